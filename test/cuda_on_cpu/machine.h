// machine.h: private to the emulator: fibers, the scheduler of a block's threads, their meetings and shared memory.
#pragma once
#include <sys/mman.h>

#include <array>
#include <boost/context/detail/fcontext.hpp>
#include <cstring>
#include <exception>
#include <memory>
#include <random>

#include "cuda_on_cpu/emulator.h"

namespace cuda_on_cpu::detail {

namespace context = boost::context::detail;

inline std::byte* map_memory(size_t bytes) {
  void* memory = mmap(nullptr, bytes, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
  if (memory == MAP_FAILED) throw std::bad_alloc();
  return static_cast<std::byte*>(memory);
}

// Unpoisons memory, or AddressSanitizer would apply its state to whoever gets these addresses next.
inline void unmap_memory(std::byte* memory, size_t bytes) {
  unpoison_memory(memory, bytes);
  munmap(memory, bytes);
}

// The stack of one fiber, above a guard page. Stacks begin at different cache lines: otherwise the frames of a thousand
// fibers would compete for the same cache sets.
class Stack {
 public:
  explicit Stack(unsigned number)
      : memory_(map_memory(page + size + page)), top_(memory_ + page + size + number % 63 * 64) {
    mprotect(memory_, page, PROT_NONE);
  }
  ~Stack() { unmap_memory(memory_, page + size + page); }
  Stack(const Stack&) = delete;
  Stack& operator=(const Stack&) = delete;
  std::byte* top() const { return top_; }
  std::byte* bottom() const { return memory_ + page; }
  size_t bytes() const { return static_cast<size_t>(top() - bottom()); }

 private:
  static constexpr size_t page = 4096, size = 256 << 10;
  std::byte *memory_, *top_;
};

struct PendingCopy {
  void* to;
  const void* from;
  int size, bytes;
  void complete() const {
    std::memcpy(to, from, static_cast<size_t>(bytes));
    std::memset(static_cast<std::byte*>(to) + bytes, 0, static_cast<size_t>(size - bytes));
  }
};

enum class State : uint8_t { ready, at_block, at_warp, done };

// A CUDA thread, and the fiber that runs it. Fibers are reused across blocks and launches.
struct Thread {
  explicit Thread(unsigned fiber_) : fiber(fiber_) {}

  unsigned fiber;
  std::optional<Stack> stack;  // since it first ran
  context::fcontext_t resume_at = nullptr;
  void* fake_stack = nullptr;  // AddressSanitizer's
  void* observer = nullptr;    // ThreadSanitizer's context

  uint3 index{};
  unsigned number = 0;  // in the block
  State state = State::done;
  // What it waits for.
  const char* what = nullptr;
  Location where;
  uint32_t mask = 0;
  void* record = nullptr;

  unsigned block_meetings = 0, warp_meetings = 0;  // so far; consecutive ones have different sanitizer addresses
  std::vector<std::vector<PendingCopy>> copies;    // cp.async: committed groups, oldest first; the last one is open
};

struct SharedArray {
  const void* key;
  std::byte* memory;
  size_t bytes;
};

// What one host thread needs to run kernels. A fiber stays on one host thread while a kernel runs.
class Machine {
 public:
  ~Machine() {
    if (shared_ != nullptr) unmap_memory(shared_, shared_mapped);
    for (const auto& thread : fibers_) destroy_context(thread->observer);
  }

  void run(const Launch& launch);

  // Called by fibers.
  Thread& self() { return *running_; }
  const Launch& launch() const { return *launch_; }
  const uint3& block_index() const { return block_; }
  [[noreturn]] void fail(const std::string& what, const std::string& where);
  void meet_block(const char* what, const Location& where);
  void meet_warp(const char* what, uint32_t mask, void* record, Exchange exchange, const Location& where);
  void* shared_memory(const void* key, size_t bytes);
  bool in_shared(const void* p, size_t bytes) const;

  void sync_warp(uint32_t mask, const Location& where);

 private:
  static constexpr size_t shared_mapped = 1 << 20, redzone = 1024;

  void run_block();
  void prepare_threads();
  void begin(Thread& thread, unsigned number);
  uint3 index_of(unsigned number) const;
  // Called only after every thread has started: null means ended.
  bool has_ended(unsigned number) const {
    return threads_[number] == nullptr || threads_[number]->state == State::done;
  }
  bool goes_on_as_another(Thread& thread);
  void prepare_shared();
  unsigned pick();
  void resume(Thread& thread);
  void wait(State state, const char* what, uint32_t mask, void* record, const Location& where);
  void set_ready(Thread& thread);
  void set_waiting(Thread& thread, State state);
  static void fiber_main(context::transfer_t from);
  [[noreturn]] void report_stuck();
  std::string describe(const std::vector<unsigned>& group) const;
  std::string place() const;

  const Launch* launch_ = nullptr;
  uint3 block_{};
  unsigned size_ = 0, unfinished_ = 0, blocks_run_ = 0;
  std::vector<std::unique_ptr<Thread>> fibers_;
  unsigned fibers_used_ = 0;                              // by this block
  std::array<Thread*, max_block_threads> threads_{};      // by their number in the block; none: not begun, or ended
  std::array<uint64_t, max_block_threads / 64> ready_{};  // a bit for each thread
  std::array<unsigned, max_block_threads / 32> warp_waiting_{};
  unsigned block_waiting_ = 0, last_ = 0;
  std::optional<unsigned> picked_;  // by the thread that waits, for the scheduler: one that has not begun; size_: none
  Thread* running_ = nullptr;
  std::exception_ptr error_;
  std::mt19937_64 random_;
  uint64_t seeded_ = 0;  // since this schedule

  context::fcontext_t scheduler_ = nullptr;
  void* scheduler_observer_ = nullptr;
  const void* scheduler_stack_ = nullptr;
  size_t scheduler_stack_bytes_ = 0;

  std::byte* shared_ = nullptr;
  size_t shared_used_ = 0, shared_held_ = 0;  // with and without redzones
  std::vector<SharedArray> arrays_;

  // Addresses that only ThreadSanitizer uses. Those of a block are in front of its shared memory and forgotten with it;
  // those of a launch are new each time.
  void* block_sync(unsigned i) { return shared_ + 8 * i; }
  void* warp_sync(unsigned warp, unsigned i) { return shared_ + 16 + 24 * warp + 8 * i; }
  struct LaunchSync {
    uint64_t begin, end;
  };
  std::unique_ptr<LaunchSync> launch_sync_;
};

// This host thread's machine, created on first use.
Machine& make_machine();
// The same for a fiber, but faster.
Machine& machine();

// Where in the source, for messages.
std::string at(const Location& where);

// Counts calls of set_schedule(): random orders restart with each.
uint64_t schedule_number();

}  // namespace cuda_on_cpu::detail
