// comm_host.h: the transport between ranks that are threads: of one process, where the receiver copies directly from
// the sender's buffer, or of several, between which bytes go through Links (TCP or MPI). Private to world.h.
#pragma once
#include <chrono>
#include <condition_variable>
#include <mutex>
#include <thread>

#include "comm/ring.h"

namespace llmc {

// The state shared by the threads of one group: a slot for each ordered pair of its ranks in this process. A rank uses
// a group from one thread, so at most one of the two waits for their slot.
class ThreadsHub {
  struct Slot {
    std::mutex mutex;
    std::condition_variable changed;
    const void* data = nullptr;
    int64_t bytes = 0;
    bool aborted = false;
  };
  static void check(const Slot& s) {
    if (s.aborted) throw PeerError();
  }

 public:
  // For ranks [first, first + count) of the group.
  ThreadsHub(int first, int count)
      : first_(first), count_(count), slots_(static_cast<size_t>(count) * static_cast<size_t>(count)) {}

  // A rank has failed: every wait fails from now on, so that no rank waits for it forever.
  void abort() {
    for (Slot& slot : slots_) {
      std::lock_guard lock(slot.mutex);
      slot.aborted = true;
      slot.changed.notify_all();
    }
  }
  // Makes each byte take this many seconds; for tests of overlap.
  void throttle(double seconds_per_byte) { seconds_per_byte_ = seconds_per_byte; }

  void take(int from, int to, void* data, int64_t bytes, Stream* gpu) {
    Slot& s = slot(from, to);
    std::unique_lock lock(s.mutex);
    s.changed.wait(lock, [&] { return s.aborted || s.data != nullptr; });
    check(s);
    CHECK(s.bytes == bytes, "rank {} of a group sent {} bytes to rank {}, which expected {}", from, s.bytes, to, bytes);
    if (seconds_per_byte_ > 0)
      std::this_thread::sleep_for(std::chrono::duration<double>(seconds_per_byte_ * static_cast<double>(bytes)));
    copy_now(data, s.data, bytes, gpu);
    s.data = nullptr;
    lock.unlock();
    s.changed.notify_one();
  }
  // Data that a rank has posted. After the destructor no peer reads the data any more, even if an error ends it.
  class Post {
   public:
    Post(ThreadsHub& hub, int from, int to, const void* data, int64_t bytes) : slot_(hub.slot(from, to)) {
      std::unique_lock lock(slot_.mutex);
      slot_.changed.wait(lock, [&] { return slot_.aborted || slot_.data == nullptr; });
      check(slot_);
      slot_.data = data;
      slot_.bytes = bytes;
      lock.unlock();  // before notifying, or the rank that wakes up would sleep again at the mutex
      slot_.changed.notify_one();
    }
    ~Post() {
      if (taken_) return;
      std::lock_guard lock(slot_.mutex);  // the receiver holds it while it copies
      slot_.data = nullptr;
      slot_.aborted = true;
      slot_.changed.notify_all();
    }
    Post(const Post&) = delete;
    Post& operator=(const Post&) = delete;
    void wait_taken() {
      std::unique_lock lock(slot_.mutex);
      slot_.changed.wait(lock, [&] { return slot_.aborted || slot_.data == nullptr; });
      check(slot_);
      taken_ = true;
    }

   private:
    Slot& slot_;
    bool taken_ = false;
  };

 private:
  Slot& slot(int from, int to) { return slots_[static_cast<size_t>((from - first_) * count_ + to - first_)]; }

  int first_, count_;
  std::vector<Slot> slots_;
  double seconds_per_byte_ = 0;
};

class Watchdog;

// The ranks of the job that this process runs, as threads: `count` ranks from `first` on.
struct LocalRanks {
  int first = 0, count = 0;      // count 0: all ranks are here
  Links* links = nullptr;        // to ranks of other processes
  Watchdog* watchdog = nullptr;  // of several ranks

  bool here(int rank) const { return count == 0 || (rank >= first && rank < first + count); }
};

// Ranks of this process talk through its memory, and with other ranks through Links (TCP or MPI).
class HostTransport final : public Transport {
 public:
  // members: the global ranks of the group; index: this rank's place among them. group: a number, equal on all members.
  HostTransport(std::shared_ptr<ThreadsHub> hub, int index, std::vector<int> members, int group = 0,
                LocalRanks local = {})
      : hub_(std::move(hub)), index_(index), members_(std::move(members)), group_(group), local_(local) {}
  int rank() const override { return index_; }
  int size() const override { return static_cast<int>(members_.size()); }

  void exchange(const ToRank& out, const FromRank& in, Stream* gpu) override {
    const bool sends = out.rank >= 0 && out.bytes > 0, receives = in.rank >= 0 && in.bytes > 0;
    const bool sends_here = sends && local_.here(member(out.rank)),
               receives_here = receives && local_.here(member(in.rank));
    // Posting a local send does not wait, so if it comes first, the order of the rest cannot deadlock.
    std::optional<ThreadsHub::Post> post;
    if (sends_here) post.emplace(*hub_, index_, out.rank, out.data, out.bytes);
    if (sends != sends_here || receives != receives_here)
      remote(sends == sends_here ? ToRank{} : ToRank{member(out.rank), out.data, out.bytes},
             receives == receives_here ? FromRank{} : FromRank{member(in.rank), in.data, in.bytes}, gpu);
    if (receives_here) hub_->take(in.rank, index_, in.data, in.bytes, gpu);
    if (post) post->wait_taken();
  }

 private:
  int member(int index) const { return members_[static_cast<size_t>(index)]; }

  // To and from ranks of the world.
  void remote(const ToRank& out, const FromRank& in, Stream* gpu) {
    const int self = member(index_);
    if (gpu == nullptr) return local_.links->exchange(group_, self, out, in);
    // A GPU's memory goes through the host's, part by part; the receiver expects the same parts.
    if (!staging_) staging_ = std::make_unique<Staging>(ring::chunk_elements * 8);
    const std::byte* source = static_cast<const std::byte*>(out.data);
    std::byte* target = static_cast<std::byte*>(in.data);
    for (int64_t begin = 0; begin < std::max(out.bytes, in.bytes); begin += staging_->bytes()) {
      const int64_t sent = std::clamp<int64_t>(out.bytes - begin, 0, staging_->bytes()),
                    received = std::clamp<int64_t>(in.bytes - begin, 0, staging_->bytes());
      if (sent > 0) copy_now(staging_->out(), source + begin, sent, gpu);
      local_.links->exchange(group_, self, {sent > 0 ? out.rank : -1, staging_->out(), sent},
                             {received > 0 ? in.rank : -1, staging_->in(), received});
      if (received > 0) copy_now(target + begin, staging_->in(), received, gpu);
    }
  }

  std::shared_ptr<ThreadsHub> hub_;
  int index_;
  std::vector<int> members_;
  int group_;
  LocalRanks local_;
  std::unique_ptr<Staging> staging_;
};

}  // namespace llmc
