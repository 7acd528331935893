// nccl_segment.cpp: joining, leaving and dying. Each process locks the byte of the shared memory at its rank's number:
// the system releases the lock when the process ends, in whatever way, even before its parent has noticed.
#include "cuda_on_cpu/nccl/nccl_segment.h"

#include <fcntl.h>
#include <linux/futex.h>
#include <sys/mman.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <climits>
#include <cstdio>
#include <random>
#include <set>

namespace cuda_on_cpu::detail {

struct Segment::Header {
  std::atomic<uint64_t> nonce;
  std::atomic<int> ranks;
  std::atomic<uint32_t> bell;
};

namespace {

constexpr size_t page = 4096, member_bytes = 512, channel_bytes = 512;
static_assert(sizeof(Member) <= member_bytes && sizeof(Channel) <= channel_bytes);
static_assert(std::atomic<uint64_t>::is_always_lock_free && std::atomic<Presence>::is_always_lock_free);

size_t members_end(int ranks) { return page + static_cast<size_t>(ranks) * member_bytes; }
size_t slots_end(int ranks) { return members_end(ranks) + static_cast<size_t>(ranks) * Segment::chunk_bytes; }
size_t channel_at(int ranks, int from, int to) {
  return slots_end(ranks) + static_cast<size_t>(from * ranks + to) * (channel_bytes + Segment::chunk_bytes);
}

struct flock lock_of(int rank, short type) {
  struct flock lock {};
  lock.l_type = type;
  lock.l_whence = SEEK_SET;
  lock.l_start = rank;
  lock.l_len = 1;
  return lock;
}

}  // namespace

// ---- The memory -----------------------------------------------------------------------------------------------------

Segment::Segment(int descriptor, std::string id) : descriptor_(descriptor), id_(std::move(id)) {}
Segment::~Segment() {
  if (memory_ != nullptr) munmap(memory_, bytes_);
  close(descriptor_);  // releases this process's locks
}
bool Segment::map(size_t bytes) {
  void* memory = mmap(nullptr, bytes, PROT_READ | PROT_WRITE, MAP_SHARED, descriptor_, 0);
  if (memory == MAP_FAILED) return false;
  if (memory_ != nullptr) munmap(memory_, bytes_);
  memory_ = static_cast<std::byte*>(memory);
  bytes_ = bytes;
  return true;
}

std::shared_ptr<Segment> Segment::create() {
  const int descriptor = memfd_create("emulated NCCL", MFD_CLOEXEC);
  if (descriptor < 0) return nullptr;
  std::random_device device;
  const uint64_t nonce = uint64_t{device()} << 32 | device();
  std::shared_ptr<Segment> segment(new Segment(
      descriptor,
      "emulated " + std::to_string(getpid()) + " " + std::to_string(descriptor) + " " + std::to_string(nonce)));
  if (ftruncate(descriptor, page) != 0 || !segment->map(page)) return nullptr;
  segment->header().nonce = nonce;
  return segment;
}
std::shared_ptr<Segment> Segment::open(const std::string& its_id) {
  int process = 0, number = 0;
  unsigned long long nonce = 0;
  if (std::sscanf(its_id.c_str(), "emulated %d %d %llu", &process, &number, &nonce) != 3) return nullptr;
  const std::string path = "/proc/" + std::to_string(process) + "/fd/" + std::to_string(number);
  const int descriptor = ::open(path.c_str(), O_RDWR | O_CLOEXEC);
  if (descriptor < 0) return nullptr;
  std::shared_ptr<Segment> segment(new Segment(descriptor, its_id));
  // It may be another file by now, even one too short to be read through memory.
  if (lseek(descriptor, 0, SEEK_END) < static_cast<off_t>(page) || !segment->map(page) ||
      segment->header().nonce != nonce)
    return nullptr;
  return segment;
}

Member& Segment::member(int rank) const {
  return *reinterpret_cast<Member*>(memory_ + page + static_cast<size_t>(rank) * member_bytes);
}
std::byte* Segment::slot(int rank) const {
  return memory_ + members_end(ranks_) + static_cast<size_t>(rank) * chunk_bytes;
}
Channel& Segment::channel(int from, int to) const {
  return *reinterpret_cast<Channel*>(memory_ + channel_at(ranks_, from, to));
}
std::byte* Segment::data(int from, int to) const { return memory_ + channel_at(ranks_, from, to) + channel_bytes; }

// ---- The ranks ------------------------------------------------------------------------------------------------------

std::string Segment::join(int ranks, int rank, int gpu) {
  int agreed = 0;
  if (!header().ranks.compare_exchange_strong(agreed, ranks) && agreed != ranks)
    return "rank " + std::to_string(rank) + " of " + std::to_string(ranks) + " joins " + std::to_string(agreed) +
           " ranks";
  if (ranks_ == 0) {
    const size_t bytes = channel_at(ranks, ranks, 0);
    if (ftruncate(descriptor_, static_cast<off_t>(bytes)) != 0 || !map(bytes)) return "no shared memory";
    ranks_ = ranks;
  }
  struct flock lock = lock_of(rank, F_WRLCK);
  Member& own = member(rank);
  // The process that has joined as this rank holds the lock, or has ended.
  if (fcntl(descriptor_, F_SETLK, &lock) != 0 || own.presence != Presence::absent)
    return "two ranks have number " + std::to_string(rank);
  own.pid = getpid();
  own.gpu = gpu;
  own.presence = Presence::joined;
  ring();
  return "";
}
void Segment::leave(int rank, Presence how) {
  member(rank).presence = how;
  ring();
}
bool Segment::complete() const {
  for (int rank = 0; rank < ranks_; ++rank)
    if (member(rank).presence == Presence::absent) return false;
  return true;
}
bool Segment::in_one_process() const {
  for (int rank = 0; rank < ranks_; ++rank)
    if (member(rank).pid != getpid()) return false;
  return true;
}
std::optional<int> Segment::shares_gpu() const {
  std::set<int> seen;
  for (int rank = 0; rank < ranks_; ++rank)
    if (member(rank).presence != Presence::absent && !seen.insert(member(rank).gpu).second) return rank;
  return std::nullopt;
}
std::optional<int> Segment::lost() const {
  for (int rank = 0; rank < ranks_; ++rank) {
    const Presence presence = member(rank).presence;
    if (presence == Presence::aborted) return rank;
    if (presence != Presence::joined || member(rank).pid == getpid()) continue;
    struct flock lock = lock_of(rank, F_WRLCK);
    if (fcntl(descriptor_, F_GETLK, &lock) == 0 && lock.l_type == F_UNLCK && member(rank).presence == Presence::joined)
      return rank;
  }
  return std::nullopt;
}
std::string Segment::names_of_absent() const {
  std::string names;
  for (int rank = 0; rank < ranks_; ++rank)
    if (member(rank).presence == Presence::absent) names += " " + std::to_string(rank);
  return names;
}

// ---- Waiting --------------------------------------------------------------------------------------------------------

uint32_t Segment::bell() const { return header().bell; }
void Segment::ring() {
  ++header().bell;
  syscall(SYS_futex, &header().bell, FUTEX_WAKE, INT_MAX, nullptr, nullptr, 0);
}
void Segment::wait(uint32_t since, std::chrono::milliseconds longest) {
  const timespec time{.tv_sec = longest.count() / 1000, .tv_nsec = longest.count() % 1000 * 1000000};
  syscall(SYS_futex, &header().bell, FUTEX_WAIT, since, &time, nullptr, 0);
}

}  // namespace cuda_on_cpu::detail
