// background_copies.h: what one thread copies, another one uses in the same order. Copies lie in memory of a fixed
// size: if it holds all of them, the first thread only copies; if not, it waits until enough of them have been used.
// The other thread begins when all is copied, or when the first one has to wait: until then it would only take a
// processor, and the memory's bandwidth, from the copies, for which training stands still.
#pragma once
#include <time.h>

#include <condition_variable>
#include <deque>
#include <mutex>
#include <thread>

#include "core/clock.h"
#include "core/shape.h"

namespace llmc {

class BackgroundCopies {
 public:
  static constexpr int64_t alignment = 16;  // of each copy, for every dtype
  using Bytes = std::span<const std::byte>;

  // memory: at least `alignment` bytes
  explicit BackgroundCopies(std::span<std::byte> memory)
      : memory_(memory.first(memory.size() / alignment * alignment)),
        // Two pieces at least, so that one is used while the next one is copied.
        piece_(std::clamp(std::ssize(memory_) / 2 / alignment * alignment, alignment, most_at_once)),
        thread_([this] { use_all(); }) {}
  // Copies that have not been used yet are dropped.
  ~BackgroundCopies() {
    std::lock_guard lock(mutex_);
    tasks_.clear();
    ended_ = true;
    changed_.notify_all();
  }

  // Copies `bytes` bytes piece by piece: copy(to, from, n) makes bytes [from, from + n) at `to`, now. use(piece) is
  // called for each of them later, by the other thread, and must not throw.
  template <class Copy, class Use>
  void add(int64_t bytes, Copy&& copy, const Use& use) {
    for (int64_t from = 0, n; from < bytes; from += n) {
      const std::span<std::byte> room = wait_for_room(std::min(piece_, bytes - from));
      n = std::ssize(room);
      copy(room.data(), from, n);
      filled_ += round_up(n, alignment);
      push({[use, room] { use(Bytes(room)); }, filled_});
    }
  }
  // Calls task() after what was added before, in the other thread.
  void then(std::function<void()> task) { push({std::move(task), filled_}); }
  // Nothing more is added.
  void end() {
    then([this] {
      timespec cpu{};
      ::clock_gettime(CLOCK_THREAD_CPUTIME_ID, &cpu);
      cpu_seconds_ = static_cast<double>(cpu.tv_sec) + 1e-9 * static_cast<double>(cpu.tv_nsec);
      seconds_ = seconds_since(begin_);
    });
    std::lock_guard lock(mutex_);
    ended_ = true;
    changed_.notify_all();
  }
  // After end(): whether all has been used; and waiting for that.
  bool done() const {
    std::lock_guard lock(mutex_);
    return done_;
  }
  void wait() {
    if (thread_.joinable()) thread_.join();
  }
  // Of the other thread, once all is done.
  double seconds() const { return seconds_; }
  double cpu_seconds() const { return cpu_seconds_; }

 private:
  static constexpr int64_t most_at_once = 8 << 20;

  struct Task {
    std::function<void()> run;
    int64_t frees;  // the copies before this position
  };

  // A contiguous part of the memory, of at most `most` bytes.
  std::span<std::byte> wait_for_room(int64_t most) {
    const int64_t all = std::ssize(memory_), at = filled_ % all;
    std::unique_lock lock(mutex_);
    if (filled_ - freed_ == all) waits_ = true, changed_.notify_all();
    changed_.wait(lock, [&] { return filled_ - freed_ < all; });
    const int64_t n = std::min({most, all - at, all - (filled_ - freed_)});
    return memory_.subspan(static_cast<size_t>(at), static_cast<size_t>(n));
  }
  void push(Task task) {
    std::lock_guard lock(mutex_);
    tasks_.push_back(std::move(task));
    changed_.notify_all();
  }
  void use_all() {
    std::unique_lock lock(mutex_);
    for (;;) {
      changed_.wait(lock, [&] { return (waits_ && !tasks_.empty()) || ended_; });
      if (tasks_.empty()) break;
      const Task task = std::move(tasks_.front());
      tasks_.pop_front();
      lock.unlock();
      task.run();
      lock.lock();
      freed_ = task.frees;
      changed_.notify_all();
    }
    done_ = true;
  }

  const std::span<std::byte> memory_;
  const int64_t piece_;
  const Clock::time_point begin_ = Clock::now();
  int64_t filled_ = 0;  // bytes that were copied so far; only the first thread uses it
  double seconds_ = 0, cpu_seconds_ = 0;

  mutable std::mutex mutex_;
  std::condition_variable changed_;
  std::deque<Task> tasks_;
  int64_t freed_ = 0;   // of them, those that have been used
  bool waits_ = false;  // the first thread has waited for room
  bool ended_ = false, done_ = false;
  std::jthread thread_;  // last: it uses all of them
};

}  // namespace llmc
