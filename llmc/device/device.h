// device.h: devices, streams and events. A stream runs work in order, asynchronously to the host; on the CPU it is a
// first-in first-out worker thread, on the null device nothing runs and only the cost of each op is booked.
#pragma once
#include <omp.h>
#include <unistd.h>

#include <algorithm>
#include <chrono>
#include <condition_variable>
#include <cstdlib>
#include <deque>
#include <exception>
#include <functional>
#include <initializer_list>
#include <map>
#include <memory>
#include <mutex>
#include <string>
#include <thread>
#include <utility>
#include <vector>

#include "core/check.h"
#include "device/host.h"
#include "device/tensor.h"

namespace llmc {

enum class DeviceKind { cpu, cuda, null };

inline const char* name_of(DeviceKind kind) {
  switch (kind) {
    case DeviceKind::cpu: return "cpu";
    case DeviceKind::cuda: return "cuda";
    case DeviceKind::null: return "null";
  }
  return "?";
}

// OpenMP's threads wait for each other asleep, not spinning: ranks that share processors, or other programs beside this
// one, would otherwise lose whole time slices at every barrier (measured: dev/LOG.md). The library reads this when it
// is loaded, so the program starts itself once more, unless the user chose a policy.
inline void wait_without_spinning(char** argv) {
  if (std::getenv("OMP_WAIT_POLICY") != nullptr || std::getenv("GOMP_SPINCOUNT") != nullptr) return;
  if (setenv("OMP_WAIT_POLICY", "passive", 1) == 0) execv("/proc/self/exe", argv);  // where that fails, go on as we are
}

struct Device {
  DeviceKind kind = DeviceKind::cpu;
  int threads = 1;  // of the ops; the null device plans for a CPU with so many
};

// What an op costs, computed from its shapes alone: the null device adds these up.
struct OpCost {
  const char* name;
  double flops = 0;
  double bytes = 0;  // read + written once
};

// Sums by op name: calls, flops, bytes, and seconds where timing was asked for.
struct OpTotals {
  int64_t calls = 0;
  double flops = 0, bytes = 0, seconds = 0;
};
using OpLedger = std::map<std::string, OpTotals>;

// When an op ran; for traces of what overlaps with what.
struct Span {
  const char* op;
  std::chrono::steady_clock::time_point begin, end;
};

class Arena;

// A point in a stream's work. Waiting for it blocks, it does not spin; an error that kept the work from getting there
// is thrown where it is waited for.
class Event {
 public:
  Event() : state_(std::make_shared<State>()) {}
  void signal(std::exception_ptr error = nullptr) const {
    std::lock_guard lock(state_->mutex);
    state_->done = true;
    state_->error = error;
    state_->changed.notify_all();
  }
  void wait() const {
    std::unique_lock lock(state_->mutex);
    state_->changed.wait(lock, [&] { return state_->done; });
    if (state_->error) std::rethrow_exception(state_->error);
  }

 private:
  struct State {
    std::mutex mutex;
    std::condition_variable changed;
    bool done = false;
    std::exception_ptr error;
  };
  std::shared_ptr<State> state_;
};

class Stream {
 public:
  // `scratch`: work space of the ops on this stream. They run in order, so all of them may use the same bytes.
  Stream(Device device, Arena& scratch) : device_(device), scratch_(scratch) {
    if (device_.kind == DeviceKind::cpu) worker_ = std::thread([this] { work(); });
  }
  ~Stream() {
    if (!worker_.joinable()) return;
    {
      std::lock_guard lock(mutex_);
      stopping_ = true;
    }
    changed_.notify_all();
    worker_.join();
  }
  Stream(const Stream&) = delete;
  Stream& operator=(const Stream&) = delete;

  const Device& device() const { return device_; }
  Arena& scratch() { return scratch_; }

  // Runs `task` after everything enqueued before; blocks while the host is far ahead, so that the queue stays short. A
  // task that throws ends the stream's work; synchronize() rethrows.
  void enqueue(std::function<void()> task) { enqueue({std::move(task), Needed::no}); }

  // An op: its cost is booked, its work enqueued. `outputs`: what it writes or adds to.
  template <class F>
  void run(const OpCost& cost, std::initializer_list<Tensor> outputs, F&& task) {
    if (inspector_ && device_.kind != DeviceKind::null) {
      enqueue(std::forward<F>(task));
      synchronize();
      for (const Tensor& t : outputs)
        if (!t.empty()) inspector_(cost.name, t);
      return;
    }
    if (ledger_ != nullptr && device_.kind == DeviceKind::null) book(cost, 0);
    if (device_.kind == DeviceKind::null) return;
    if (trace_ != nullptr)
      return enqueue([this, name = cost.name, task = std::forward<F>(task)] {
        const auto begin = std::chrono::steady_clock::now();
        task();
        trace_->push_back({name, begin, std::chrono::steady_clock::now()});
      });
    if (ledger_ == nullptr) return enqueue(std::forward<F>(task));
    enqueue([this, cost, task = std::forward<F>(task)] {
      const auto begin = std::chrono::steady_clock::now();
      task();
      book(cost, std::chrono::duration<double>(std::chrono::steady_clock::now() - begin).count());
    });
  }

  // The host waits until all enqueued work is done; rethrows the first error of that work.
  void synchronize() {
    if (device_.kind == DeviceKind::null) return;
    std::unique_lock lock(mutex_);
    idle_.wait(lock, [&] { return (queue_.empty() && !busy_) || error_; });
    if (error_) std::rethrow_exception(error_);
  }

  Event record() {
    Event event;
    if (device_.kind == DeviceKind::null) event.signal();
    else enqueue({[this, event] { event.signal(error_); }, Needed::yes});
    return event;
  }
  void wait(const Event& event) {
    enqueue([event] { event.wait(); });
  }

  // From now on (until nullptr is set) called with each op's name and each tensor it wrote, before the next op begins.
  using Inspector = std::function<void(const char* op, const Tensor& output)>;
  void set_inspector(Inspector inspector) { inspector_ = std::move(inspector); }

  // From now on (until nullptr is set) each op is booked here. Call with the stream idle.
  void set_ledger(OpLedger* ledger) { ledger_ = ledger; }
  // The same for when each op ran.
  void set_trace(std::vector<Span>* trace) { trace_ = trace; }

 private:
  // Signals are needed even where an error has ended the work: another stream may wait for them, and learns the error.
  enum class Needed { no, yes };
  struct Task {
    std::function<void()> run;
    Needed needed;
  };

  void enqueue(Task task) {
    if (device_.kind == DeviceKind::null) return;
    std::unique_lock lock(mutex_);
    room_.wait(lock, [&] { return queue_.size() < max_queued || error_; });
    if (error_) {
      if (task.needed == Needed::yes) task.run();
      return;
    }
    queue_.push_back(std::move(task));
    changed_.notify_all();
  }

  void book(const OpCost& cost, double seconds) {
    OpTotals& totals = (*ledger_)[cost.name];
    ++totals.calls;
    totals.flops += cost.flops;
    totals.bytes += cost.bytes;
    totals.seconds += seconds;
  }

  void work() {
    omp_set_num_threads(device_.threads);  // a setting of this thread, so that each rank has its own
    std::unique_lock lock(mutex_);
    for (;;) {
      changed_.wait(lock, [&] { return stopping_ || !queue_.empty(); });
      if (queue_.empty()) return;
      Task task = std::move(queue_.front());
      queue_.pop_front();
      room_.notify_all();
      busy_ = true;
      lock.unlock();
      std::exception_ptr failed;
      try {
        task.run();
      } catch (...) {
        failed = std::current_exception();
      }
      task.run = nullptr;
      lock.lock();
      busy_ = false;
      if (failed && !error_) {
        error_ = failed;
        for (const Task& left : queue_)
          if (left.needed == Needed::yes) left.run();
        queue_.clear();
        room_.notify_all();
      }
      if (queue_.empty()) idle_.notify_all();
    }
  }

  static constexpr size_t max_queued = 256;

  Device device_;
  Arena& scratch_;
  OpLedger* ledger_ = nullptr;
  std::vector<Span>* trace_ = nullptr;
  Inspector inspector_;
  std::thread worker_;
  std::mutex mutex_;
  std::condition_variable changed_, idle_, room_;
  std::deque<Task> queue_;
  bool busy_ = false, stopping_ = false;
  std::exception_ptr error_;  // written by the worker, under the mutex
};

}  // namespace llmc
