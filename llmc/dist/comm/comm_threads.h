// comm_threads.h: a transport between threads of one process: the receiver copies directly from the sender's buffer.
// Private to comm.h.
#pragma once
#include <chrono>
#include <condition_variable>
#include <memory>
#include <mutex>
#include <string>
#include <thread>
#include <vector>

#include "dist/comm/ring.h"

namespace llmc {

// What the threads of one group share: a slot for each ordered pair of ranks. A rank uses a
// group from one thread, so at most one of the two waits for their slot.
class ThreadsHub {
 public:
  explicit ThreadsHub(int size) : size_(size), slots_(static_cast<size_t>(size * size)) {}
  int size() const { return size_; }

  // A rank has failed: every wait fails from now on, so that no rank waits for it forever.
  void abort() {
    for (Slot& slot : slots_) {
      std::lock_guard lock(slot.mutex);
      slot.aborted = true;
      slot.changed.notify_all();
    }
  }
  // Makes each byte take so many seconds; for tests of overlap.
  void throttle(double seconds_per_byte) { seconds_per_byte_ = seconds_per_byte; }

  void post(int from, int to, const void* data, int64_t bytes) {
    Slot& s = slot(from, to);
    std::unique_lock lock(s.mutex);
    s.changed.wait(lock, [&] { return s.aborted || s.data == nullptr; });
    check(s);
    s.data = data;
    s.bytes = bytes;
    lock.unlock();  // first, or the rank that wakes up goes to sleep again at the mutex
    s.changed.notify_one();
  }
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
  // Waits until what was posted has been taken.
  void wait_taken(int from, int to) {
    Slot& s = slot(from, to);
    std::unique_lock lock(s.mutex);
    s.changed.wait(lock, [&] { return s.aborted || s.data == nullptr; });
    check(s);
  }

 private:
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
  Slot& slot(int from, int to) { return slots_[static_cast<size_t>(from * size_ + to)]; }

  int size_;
  std::vector<Slot> slots_;
  double seconds_per_byte_ = 0;
};

class ThreadsTransport final : public Transport {
 public:
  ThreadsTransport(std::shared_ptr<ThreadsHub> hub, int rank) : hub_(std::move(hub)), rank_(rank) {}
  int rank() const override { return rank_; }
  int size() const override { return hub_->size(); }
  void exchange(int to, const void* out, int64_t out_bytes, int from, void* in, int64_t in_bytes,
                Stream* gpu) override {
    const bool sends = to >= 0 && out_bytes > 0, receives = from >= 0 && in_bytes > 0;
    if (sends) hub_->post(rank_, to, out, out_bytes);
    if (receives) hub_->take(from, rank_, in, in_bytes, gpu);
    if (sends) hub_->wait_taken(rank_, to);
  }

 private:
  std::shared_ptr<ThreadsHub> hub_;
  int rank_;
};

}  // namespace llmc
