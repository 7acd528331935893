// machine.cpp: how the threads of a block run: fibers and their scheduling.
#include "cuda_on_cpu/machine.h"

#include <algorithm>
#include <bit>
#include <mutex>
#include <utility>

namespace cuda_on_cpu::detail {
namespace {

// Thrown through a fiber to end it after another one has failed.
struct Unwind {};

}  // namespace

constinit thread_local Machine* the_machine = nullptr;  // faster to access than an object with a destructor

namespace {

// The machines of finished threads, for reuse: a thousand stacks take time to create.
struct Pool {
  std::mutex mutex;
  std::vector<std::unique_ptr<Machine>> idle;
};
Pool& pool() {
  static auto* the_pool = new Pool;  // never destroyed: threads may end after the statics
  return *the_pool;
}

struct Owner {
  std::unique_ptr<Machine> machine;
  Owner() {
    const std::lock_guard lock(pool().mutex);
    if (pool().idle.empty()) {
      machine = std::make_unique<Machine>();
    } else {
      machine = std::move(pool().idle.back());
      pool().idle.pop_back();
    }
    the_machine = machine.get();
  }
  ~Owner() {
    Unobserved unobserved;
    Unordered unordered;
    const std::lock_guard lock(pool().mutex);
    the_machine = nullptr;
    pool().idle.push_back(std::move(machine));
  }
};

}  // namespace

Machine& make_machine() {
  Unobserved unobserved;
  Unordered unordered;
  thread_local Owner owner;
  return *owner.machine;
}
// Not observed: for ThreadSanitizer fibers must not appear to read a host thread's variables.
__attribute__((no_sanitize("thread"))) Machine& machine() {
  if (the_machine == nullptr) throw Failure("a device function was called outside any kernel");
  return *the_machine;
}

// ---- Fibers ---------------------------------------------------------------------------------------------------------

void Machine::fiber_main(context::transfer_t from) {
  Machine& machine = *static_cast<Machine*>(from.data);
  for (;;) {
#ifdef __SANITIZE_ADDRESS__
    __sanitizer_finish_switch_fiber(machine.self().fake_stack, &machine.scheduler_stack_,
                                    &machine.scheduler_stack_bytes_);
#endif
    Thread* thread;
    {
      Unobserved unobserved;
      machine.scheduler_ = from.fctx;
      thread = machine.running_;
    }
    acquire(&machine.launch_sync_->begin);
    std::exception_ptr error;
    do {
      try {
        machine.launch_->call();
      } catch (const Unwind&) {
      } catch (...) {
        error = std::current_exception();
      }
    } while (!error && machine.goes_on_as_another(*thread));
    release(&machine.launch_sync_->end);
    {
      Unobserved unobserved;
      if (error && !machine.error_) machine.error_ = error;
      error = nullptr;
      machine.set_waiting(*thread, State::done);
      --machine.unfinished_;
    }
    switch_context(machine.scheduler_observer_);
#ifdef __SANITIZE_ADDRESS__
    __sanitizer_start_switch_fiber(&thread->fake_stack, machine.scheduler_stack_, machine.scheduler_stack_bytes_);
#endif
    from = context::jump_fcontext(machine.scheduler_, thread);
  }
}

// If a thread has ended and another has not started, its fiber runs that one too, without switching to the scheduler
// and back. Only ThreadSanitizer needs them on separate fibers.
bool Machine::goes_on_as_another(Thread& thread) {
  if (thread_sanitizer || error_) return false;
  set_waiting(thread, State::done);
  const unsigned next = unfinished_ > 1 ? pick() : size_;
  if (next == size_ || threads_[next] != nullptr) return false;
  threads_[thread.number] = nullptr;
  --unfinished_;
  begin(thread, next);
  last_ = next;
  return true;
}

// Switches from the scheduler to a fiber; returns when a fiber, this one or another, switches back.
void Machine::resume(Thread& thread) {
  running_ = &thread;
  if (!thread.stack) {
    thread.stack.emplace(thread.fiber);
    thread.resume_at = context::make_fcontext(thread.stack->top(), thread.stack->bytes(), fiber_main);
  }
  [[maybe_unused]] void* fake_stack = nullptr;
#ifdef __SANITIZE_ADDRESS__
  __sanitizer_start_switch_fiber(&fake_stack, thread.stack->bottom(), thread.stack->bytes());
#endif
  switch_context(thread.observer);
  const context::transfer_t from = context::jump_fcontext(thread.resume_at, this);
  static_cast<Thread*>(from.data)->resume_at = from.fctx;
#ifdef __SANITIZE_ADDRESS__
  __sanitizer_finish_switch_fiber(fake_stack, nullptr, nullptr);
#endif
  running_ = nullptr;
}

// Switches to the next thread's fiber, or to the scheduler if that thread has not begun or there is none; returns when
// this one may continue.
void Machine::wait(State state, const char* what, uint32_t mask, void* record, const Location& where) {
  Thread& thread = *running_;
  thread.what = what;
  thread.where = where;
  thread.mask = mask;
  thread.record = record;
  if (state != State::ready) set_waiting(thread, state);
  const unsigned next = pick();
  const bool direct = next < size_ && threads_[next] != nullptr;
  if (direct) {
    last_ = next;
    running_ = threads_[next];
    if (running_ == &thread) return;
  } else picked_ = next;
  switch_context(direct ? running_->observer : scheduler_observer_);
#ifdef __SANITIZE_ADDRESS__
  __sanitizer_start_switch_fiber(&thread.fake_stack, direct ? running_->stack->bottom() : scheduler_stack_,
                                 direct ? running_->stack->bytes() : scheduler_stack_bytes_);
#endif
  const context::transfer_t from = context::jump_fcontext(direct ? running_->resume_at : scheduler_, &thread);
  const bool from_scheduler = from.data == this;
  (from_scheduler ? scheduler_ : static_cast<Thread*>(from.data)->resume_at) = from.fctx;
#ifdef __SANITIZE_ADDRESS__
  __sanitizer_finish_switch_fiber(thread.fake_stack, from_scheduler ? &scheduler_stack_ : nullptr,
                                  from_scheduler ? &scheduler_stack_bytes_ : nullptr);
#endif
  if (error_) throw Unwind{};
}

// ---- The scheduler --------------------------------------------------------------------------------------------------

void Machine::set_ready(Thread& thread) {
  thread.state = State::ready;
  ready_[thread.number / 64] |= uint64_t{1} << thread.number % 64;
}
void Machine::set_waiting(Thread& thread, State state) {
  thread.state = state;
  ready_[thread.number / 64] &= ~(uint64_t{1} << thread.number % 64);
}

// The number of the thread to run next; size_ if none can.
unsigned Machine::pick() {
  const auto up_from = [&](unsigned first) {  // the lowest one that is ready, from `first` on
    for (unsigned word = first / 64; word < ready_.size(); ++word) {
      const uint64_t bits = ready_[word] & (word == first / 64 ? ~uint64_t{0} << first % 64 : ~uint64_t{0});
      if (bits != 0) return word * 64 + static_cast<unsigned>(std::countr_zero(bits));
    }
    return size_;
  };
  const auto down_from = [&](unsigned last) {  // the highest one, down from `last`
    for (unsigned word = last / 64 + 1; word-- > 0;) {
      const uint64_t bits = ready_[word] & (word == last / 64 ? ~uint64_t{0} >> (63 - last % 64) : ~uint64_t{0});
      if (bits != 0) return word * 64 + 63 - static_cast<unsigned>(std::countl_zero(bits));
    }
    return size_;
  };
  unsigned next = size_;
  switch (schedule().order) {
    case Order::forward:
      if (last_ + 1 < size_) next = up_from(last_ + 1);
      return next < size_ ? next : up_from(0);
    case Order::reverse:
      if (last_ > 0) next = down_from(last_ - 1);
      return next < size_ ? next : down_from(size_ - 1);
    case Order::depth_first: return up_from(0);
    case Order::depth_first_reverse: return down_from(size_ - 1);
    case Order::random: break;
  }
  const unsigned start = static_cast<unsigned>(random_() % size_);
  next = up_from(start);
  return next < size_ ? next : up_from(0);
}

void Machine::run(const Launch& launch) {
  Unobserved unobserved;
  launch_ = &launch;
  size_ = launch.block.x * launch.block.y * launch.block.z;
  scheduler_observer_ = current_context();
  if (seeded_ != schedule_number()) {
    seeded_ = schedule_number();
    random_.seed(schedule().seed);
  }
  while (fibers_.size() < size_) {
    fibers_.push_back(std::make_unique<Thread>(static_cast<unsigned>(fibers_.size())));
    fibers_.back()->observer = create_context();
  }
  launch_sync_ = std::make_unique<LaunchSync>();
  release(&launch_sync_->begin);

  const uint64_t blocks = uint64_t{launch.grid.x} * launch.grid.y * launch.grid.z;
  std::vector<uint64_t> order(blocks);
  for (uint64_t i = 0; i < blocks; ++i) order[i] = i;
  if (schedule().order == Order::reverse || schedule().order == Order::depth_first_reverse)
    std::reverse(order.begin(), order.end());
  if (schedule().order == Order::random) std::shuffle(order.begin(), order.end(), random_);
  for (const uint64_t i : order) {
    block_ = {static_cast<unsigned>(i % launch.grid.x), static_cast<unsigned>(i / launch.grid.x % launch.grid.y),
              static_cast<unsigned>(i / launch.grid.x / launch.grid.y)};
    run_block();
  }
  acquire(&launch_sync_->end);
  launch_sync_.reset();
}

uint3 Machine::index_of(unsigned number) const {
  const dim3& shape = launch_->block;
  if (number < shape.x) return {number, 0, 0};
  return {number % shape.x, number / shape.x % shape.y, number / shape.x / shape.y};
}

// Assigns this fiber to thread `number` of the block, which is ready.
void Machine::begin(Thread& thread, unsigned number) {
  threads_[number] = &thread;
  thread.index = index_of(number);
  thread.number = number;
  thread.state = State::ready;
  thread.block_meetings = thread.warp_meetings = 0;
  thread.copies.resize(1);
  thread.copies.front().clear();
}

void Machine::prepare_threads() {
  ++blocks_run_;
  fibers_used_ = 0;
  std::fill_n(threads_.begin(), size_, nullptr);
  for (unsigned word = 0; word < ready_.size(); ++word)
    ready_[word] = 64 * word >= size_ ? 0 : ~uint64_t{0} >> (64 * (word + 1) <= size_ ? 0 : 64 * (word + 1) - size_);
  warp_waiting_ = {};
  block_waiting_ = 0;
  unfinished_ = size_;
  last_ = schedule().order == Order::forward ? size_ - 1 : 0;
}

void Machine::run_block() {
  prepare_threads();
  prepare_shared();
  error_ = nullptr;
  while (unfinished_ > 0 && !error_) {
    last_ = picked_ ? *std::exchange(picked_, std::nullopt) : pick();
    if (last_ == size_) {
      try {
        report_stuck();
      } catch (...) {
        error_ = std::current_exception();
      }
      break;
    }
    // Each block begins with another fiber, so that ThreadSanitizer does not take the same thread of two blocks or
    // launches for one thread.
    if (threads_[last_] == nullptr)
      begin(*fibers_[(thread_sanitizer ? last_ + blocks_run_ : fibers_used_++) % size_], last_);
    resume(*threads_[last_]);
  }
  if (!error_) return;
  for (unsigned number = 0; number < size_; ++number)  // running ones unwind, the others never start
    if (threads_[number] != nullptr && threads_[number]->state != State::done) resume(*threads_[number]);
  ready_ = {};
  acquire(&launch_sync_->end);
  std::exception_ptr error = std::exchange(error_, nullptr);
  std::rethrow_exception(error);
}

}  // namespace cuda_on_cpu::detail
