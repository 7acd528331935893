// work.h: std::function<void()>, but move-only, for what streams and kernels do. There are hundreds of ops: each costs
// two functions to compile, where std::function costs a dozen.
#pragma once
#include <concepts>

#include "core/std.h"

namespace llmc {

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

}  // namespace llmc
