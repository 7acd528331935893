// threads.h: work for threads: the same on several of them, a task as an object, a count of what they get done.
#pragma once
#include <atomic>
#include <concepts>
#include <system_error>
#include <thread>

#include "core/std.h"

namespace llmc {

// Calls work() on this thread and on others, `threads` together, or as many as can be started. It must not throw.
template <std::invocable F>
void on_threads(int64_t threads, F&& work) {
  std::vector<std::jthread> others;
  try {
    while (static_cast<int64_t>(others.size()) + 1 < threads) others.emplace_back(work);
  } catch (const std::system_error&) {  // no further thread to be had
  }
  work();
}

// std::function<void()>, but move-only, for what streams and kernels do. There are hundreds of ops: each costs two
// functions to compile, where std::function costs a dozen.
class Work {
 public:
  Work() = default;
  template <class F>
  requires(!std::same_as<std::remove_cvref_t<F>, Work> && std::invocable<std::decay_t<F>&>) Work(F&& work)
      : object_(new std::decay_t<F>(std::forward<F>(work))), use_(use<std::decay_t<F>>), owned_(true) {}
  // Of an object that is there until the work is done: not copied.
  template <class F>
  static Work of(F& work) {
    Work w;
    w.object_ = &work;
    w.use_ = use<F>;
    return w;
  }
  Work(Work&& other) noexcept { swap(other); }
  Work& operator=(Work&& other) noexcept {
    Work(std::move(other)).swap(*this);
    return *this;
  }
  ~Work() {
    if (owned_) use_(object_, Use::destroy);
  }
  explicit operator bool() const { return use_ != nullptr; }
  // Not of an empty one.
  void operator()() const { use_(object_, Use::call); }

 private:
  enum class Use { call, destroy };
  template <class F>
  static void use(void* object, Use how) {
    F* work = static_cast<F*>(object);
    if (how == Use::call) (*work)();
    else delete work;
  }
  void swap(Work& other) noexcept {
    std::swap(object_, other.object_);
    std::swap(use_, other.use_);
    std::swap(owned_, other.owned_);
  }

  void* object_ = nullptr;
  void (*use_)(void*, Use) = nullptr;
  bool owned_ = false;
};

namespace detail {
inline std::atomic<uint64_t> pulse_count = 0;
}

// This process gets something done: an op, a part of a file, a part of an exchange. The count lets the watchdog
// (net/watching/watchdog.h) tell a process that is busy for a long time from one that hangs. Called often, from any
// thread: two calls at the same time may count once.
inline void pulse() {
  detail::pulse_count.store(detail::pulse_count.load(std::memory_order_relaxed) + 1, std::memory_order_relaxed);
}
inline uint64_t pulses() { return detail::pulse_count.load(std::memory_order_relaxed); }

}  // namespace llmc
