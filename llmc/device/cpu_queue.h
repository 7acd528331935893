// cpu_queue.h: a CPU stream: a FIFO queue with a worker thread, and events for which streams and the host wait.
#pragma once
#include <omp.h>

#include <atomic>
#include <condition_variable>
#include <exception>
#include <mutex>
#include <thread>

#include "core/clock.h"
#include "core/threads.h"
#ifdef TRAIN_GPT_CUDA
#include "device/cuda_api.cuh"
#endif

namespace llmc {

// How long this thread has waited for other streams and other ranks.
inline thread_local double waited_seconds = 0;
class WaitTimer {
 public:
  ~WaitTimer() { waited_seconds += seconds_since(begin_); }

 private:
  Clock::time_point begin_ = Clock::now();
};

// A point in a stream's work. Waiting blocks instead of spinning, and rethrows the error if the work before this point
// failed. Only another GPU stream can wait for a GPU stream's event.
class Event {
 public:
  Event() : state_(std::make_shared<State>()) {}
  // The null device's event: complete, as nothing runs, and at this time of its clock, when a transfer of this group
  // ends (none: work).
  static Event on_paper(double seconds, const char* group) {
    Event event(nullptr);
    event.seconds_ = seconds;
    event.group_ = group;
    return event;
  }
  double seconds() const { return seconds_; }
  const char* group() const { return group_; }
  // The stream whose work it ends, for traces.
  Event of_stream(std::string name) && {
    stream_ = std::make_shared<const std::string>(std::move(name));
    return std::move(*this);
  }
  std::string stream() const { return stream_ ? *stream_ : std::string(); }
  bool done() const {
    if (!state_) return true;
    std::lock_guard lock(state_->mutex);
    return state_->done;
  }
  void signal(std::exception_ptr error = nullptr) const {
    const std::shared_ptr<State> state = state_;  // a waiter may destroy this event
    {
      std::lock_guard lock(state->mutex);
      state->done = true;
      state->error = error;
    }
    state->changed.notify_all();  // unlocked, so that a waiter does not wake up to wait for the mutex
  }
  void wait() const {
    if (!state_) return;
    std::unique_lock lock(state_->mutex);
    if (!state_->done) {
      const WaitTimer timer;
      state_->changed.wait(lock, [&] { return state_->done; });
    }
    if (state_->error) std::rethrow_exception(state_->error);
  }
#ifdef TRAIN_GPT_CUDA
  explicit Event(cuda::Event event) : gpu_(std::make_shared<cuda::Event>(std::move(event))) {}
  const cuda::Event* gpu() const { return gpu_.get(); }  // none: already complete
#endif

 private:
  struct State {
    std::mutex mutex;
    std::condition_variable changed;
    bool done = false;
    std::exception_ptr error;
  };
  explicit Event(std::shared_ptr<State> state) : state_(std::move(state)) {}
  std::shared_ptr<State> state_;  // none: complete
  double seconds_ = 0;            // by the null device's clock
  const char* group_ = nullptr;
  std::shared_ptr<const std::string> stream_;  // none: unknown
#ifdef TRAIN_GPT_CUDA
  std::shared_ptr<cuda::Event> gpu_;
#endif
};

// One thread enqueues, synchronizes and destroys.
class CpuQueue {
  // Events are signalled even after an error: a stream that waits for one gets the error.
  enum class Needed { no, yes };

 public:
  // `threads`: OpenMP threads of each op.
  explicit CpuQueue(int threads) : queue_(room()), worker_([this, threads] { work(threads); }) {}
  ~CpuQueue() {
    {
      std::lock_guard lock(mutex_);
      stopping_ = true;
    }
    changed_.notify_all();
  }

  // The worker runs `task` after everything enqueued before. Blocks while the host is far ahead, to keep the queue
  // short. A task that throws stops the queue; synchronize() rethrows.
  void enqueue(Work task, Needed needed = Needed::no) {
    std::unique_lock lock(mutex_);
    room_.wait(lock, [&] { return queue_.size() < max_queued || error_; });
    if (error_) {
      if (needed == Needed::yes) task();
      return;
    }
    queue_.push_back({std::move(task), needed});
    const bool asleep = asleep_;
    lock.unlock();
    if (asleep) changed_.notify_one();
  }

  void synchronize() {
    std::unique_lock lock(mutex_);
    idle_.wait(lock, [&] { return (queue_.empty() && !busy_) || error_; });
    if (error_) std::rethrow_exception(error_);
  }

  // Seconds that it has worked, without waits for other streams and other ranks.
  double busy_seconds() const { return busy_seconds_; }

  Event record() {
    Event event;
    enqueue([this, event] { event.signal(error_); }, Needed::yes);
    return event;
  }
  void wait(const Event& event) {
    enqueue([event] { event.wait(); });
  }

 private:
  struct Task {
    Work run;
    Needed needed;
  };

  // The worker thread.
  void work(int threads) {
    omp_set_num_threads(threads);  // a setting of this thread, so that each rank has its own
    std::vector<Task> taken = room();
    std::unique_lock lock(mutex_);
    while (take(taken, lock)) {
      lock.unlock();
      if (taken.size() == max_queued) room_.notify_all();
      const std::exception_ptr failed = run(taken);
      lock.lock();
      busy_ = false;
      if (failed) fail(failed, taken);
      if (queue_.empty()) idle_.notify_all();
    }
  }
  // Runs tasks in order until one throws, and returns its error; then `tasks` keeps all of them, those that ran without
  // their `run`.
  std::exception_ptr run(std::vector<Task>& tasks) {
    std::exception_ptr failed;
    const auto begin = Clock::now();
    const double waited = waited_seconds;
    for (auto task = tasks.begin(); !failed && task != tasks.end(); task->run = {}, ++task) try {
        task->run();
        pulse();
      } catch (...) {
        failed = std::current_exception();
      }
    if (!failed) tasks.clear();
    busy_seconds_ = busy_seconds_ + seconds_since(begin) - (waited_seconds - waited);
    return failed;
  }
  // Waits for tasks and takes all at once: one lock for many small ops. Returns false if there will be no more.
  bool take(std::vector<Task>& taken, std::unique_lock<std::mutex>& lock) {
    if (queue_.empty() && !stopping_) {  // lets the host enqueue more before going to sleep
      lock.unlock();
      std::this_thread::yield();
      lock.lock();
    }
    asleep_ = true;
    changed_.wait(lock, [&] { return stopping_ || !queue_.empty(); });
    asleep_ = false;
    if (queue_.empty()) return false;
    taken.swap(queue_);
    busy_ = true;
    return true;
  }
  // Under the mutex: nothing more runs, but events are signalled.
  void fail(std::exception_ptr failed, std::vector<Task>& taken) {
    error_ = failed;
    for (std::vector<Task>* left : {&taken, &queue_}) {
      for (const Task& task : *left)
        if (task.run && task.needed == Needed::yes) task.run();
      left->clear();
    }
    room_.notify_all();
  }

  static constexpr size_t max_queued = 256;
  static std::vector<Task> room() {
    std::vector<Task> tasks;
    tasks.reserve(max_queued);
    return tasks;
  }

  std::mutex mutex_;
  std::condition_variable changed_, idle_, room_;
  std::vector<Task> queue_;
  bool busy_ = false, asleep_ = false, stopping_ = false;
  std::exception_ptr error_;  // written by the worker, under the mutex
  std::atomic<double> busy_seconds_ = 0;
  std::jthread worker_;  // last: it uses the others
};

}  // namespace llmc
