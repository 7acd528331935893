// comm_threads.h: a transport between threads of one process: the receiver copies directly from the sender's buffer.
// Private to comm_processes.h and world.h.
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
  int count() const { return count_; }

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
      hub.post(from, to, data, bytes);
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
  void post(int from, int to, const void* data, int64_t bytes) {
    Slot& s = slot(from, to);
    std::unique_lock lock(s.mutex);
    s.changed.wait(lock, [&] { return s.aborted || s.data == nullptr; });
    check(s);
    s.data = data;
    s.bytes = bytes;
    lock.unlock();  // before notifying, or the rank that wakes up would sleep again at the mutex
    s.changed.notify_one();
  }
  Slot& slot(int from, int to) { return slots_[static_cast<size_t>((from - first_) * count_ + to - first_)]; }

  int first_, count_;
  std::vector<Slot> slots_;
  double seconds_per_byte_ = 0;
};

class ThreadsTransport final : public Transport {
 public:
  ThreadsTransport(std::shared_ptr<ThreadsHub> hub, int rank) : hub_(std::move(hub)), rank_(rank) {}
  int rank() const override { return rank_; }
  int size() const override { return hub_->count(); }
  void exchange(const ToRank& out, const FromRank& in, Stream* gpu) override {
    std::optional<ThreadsHub::Post> post;
    if (out.rank >= 0 && out.bytes > 0) post.emplace(*hub_, rank_, out.rank, out.data, out.bytes);
    if (in.rank >= 0 && in.bytes > 0) hub_->take(in.rank, rank_, in.data, in.bytes, gpu);
    if (post) post->wait_taken();
  }

 private:
  std::shared_ptr<ThreadsHub> hub_;
  int rank_;
};

}  // namespace llmc
