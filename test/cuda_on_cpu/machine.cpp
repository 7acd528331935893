// machine.cpp: how the threads of a block run.
#include "cuda_on_cpu/machine.h"

#include <algorithm>
#include <bit>
#include <map>
#include <utility>

namespace cuda_on_cpu::detail {
namespace {

// Thrown through a fiber to end it when another one has failed.
struct Unwind {};

std::string triple(unsigned x, unsigned y, unsigned z) {
  return "(" + std::to_string(x) + ", " + std::to_string(y) + ", " + std::to_string(z) + ")";
}
}  // namespace

std::string at(const Location& where) {
  return std::string(where.file_name()) + ":" + std::to_string(where.line()) + " in " + where.function_name();
}

constinit thread_local Machine* the_machine = nullptr;  // found faster than an object with a destructor

Machine& make_machine() {
  thread_local std::unique_ptr<Machine> owner;
  Unobserved unobserved;
  if (owner == nullptr) {
    owner = std::make_unique<Machine>();
    the_machine = owner.get();
  }
  return *owner;
}
// Not observed: to ThreadSanitizer the variables of a host thread are nothing that its fibers may read.
__attribute__((no_sanitize("thread"))) Machine& machine() {
  if (the_machine == nullptr) throw Failure("a function of the device was called outside of any kernel");
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
    try {
      machine.launch_->call();
    } catch (const Unwind&) {
    } catch (...) {
      error = std::current_exception();
    }
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
    from = context::jump_fcontext(machine.scheduler_, nullptr);
  }
}

// From the scheduler to a fiber, and back when that waits or has ended.
void Machine::resume(Thread& thread) {
  running_ = &thread;
  thread.started = true;
  [[maybe_unused]] void* fake_stack = nullptr;
#ifdef __SANITIZE_ADDRESS__
  __sanitizer_start_switch_fiber(&fake_stack, thread.stack.bottom(), thread.stack.bytes());
#endif
  switch_context(thread.observer);
  thread.resume_at = context::jump_fcontext(thread.resume_at, this).fctx;
#ifdef __SANITIZE_ADDRESS__
  __sanitizer_finish_switch_fiber(fake_stack, nullptr, nullptr);
#endif
  running_ = nullptr;
}

// From a fiber to the scheduler; returns when the thread may go on.
void Machine::wait(State state, const char* what, uint32_t mask, void* record, const Location& where) {
  Thread& thread = *running_;
  thread.what = what;
  thread.where = where;
  thread.mask = mask;
  thread.record = record;
  if (state != State::ready) set_waiting(thread, state);
  switch_context(scheduler_observer_);
#ifdef __SANITIZE_ADDRESS__
  __sanitizer_start_switch_fiber(&thread.fake_stack, scheduler_stack_, scheduler_stack_bytes_);
#endif
  scheduler_ = context::jump_fcontext(scheduler_, nullptr).fctx;
#ifdef __SANITIZE_ADDRESS__
  __sanitizer_finish_switch_fiber(thread.fake_stack, &scheduler_stack_, &scheduler_stack_bytes_);
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

// The number of the thread that goes on; size_ if none can.
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
  while (fibers_.size() < size_) {
    fibers_.push_back(std::make_unique<Thread>(static_cast<unsigned>(fibers_.size())));
    Thread& thread = *fibers_.back();
    thread.resume_at = context::make_fcontext(thread.stack.top(), thread.stack.bytes(), fiber_main);
    thread.observer = create_context();
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

void Machine::prepare_threads() {
  // Each block begins with another fiber: to ThreadSanitizer the same thread of two blocks or launches is not the same.
  const unsigned shift = blocks_run_++;
  const dim3& shape = launch_->block;
  for (unsigned number = 0; number < size_; ++number) {
    Thread& thread = *fibers_[(number + shift) % size_];
    threads_[number] = &thread;
    thread.index = {number % shape.x, number / shape.x % shape.y, number / shape.x / shape.y};
    thread.number = number;
    thread.started = false;
    thread.block_meetings = thread.warp_meetings = 0;
    thread.copies.assign(1, {});
    set_ready(thread);
  }
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
    last_ = pick();
    if (last_ == size_) {
      try {
        report_stuck();
      } catch (...) {
        error_ = std::current_exception();
      }
      break;
    }
    resume(*threads_[last_]);
  }
  if (!error_) return;
  for (unsigned number = 0; number < size_; ++number) {  // those under way unwind, the others never begin
    Thread& thread = *threads_[number];
    if (thread.state == State::done) continue;
    if (thread.started) resume(thread);
    else set_waiting(thread, State::done);
  }
  ready_ = {};
  acquire(&launch_sync_->end);
  std::exception_ptr error = std::exchange(error_, nullptr);
  std::rethrow_exception(error);
}

// ---- Meetings -------------------------------------------------------------------------------------------------------

void Machine::meet_block(const char* what, const Location& where) {
  Unobserved unobserved;
  Thread& thread = *running_;
  void* sync = block_sync(thread.block_meetings++ & 1);
  release(sync);
  if (++block_waiting_ == size_) {
    block_waiting_ = 0;
    thread.where = where;
    thread.what = what;
    thread.state = State::at_block;
    for (unsigned number = 0; number < size_; ++number)
      if (threads_[number]->where.line() != where.line() ||
          std::strcmp(threads_[number]->where.file_name(), where.file_name()) != 0)
        report_stuck();
    for (unsigned number = 0; number < size_; ++number) set_ready(*threads_[number]);
    wait(State::ready, what, 0, nullptr, where);
  } else {
    wait(State::at_block, what, 0, nullptr, where);
  }
  acquire(sync);
}

void Machine::meet_warp(const char* what, uint32_t mask, void* record, Exchange exchange, const Location& where) {
  Unobserved unobserved;
  Thread& thread = *running_;
  const unsigned lane = thread.number % 32, first = thread.number - lane;
  if ((mask >> lane & 1) == 0)
    cuda_on_cpu::fail(std::string(what) + ": its mask does not name lane " + std::to_string(lane) + ", which calls it",
                      where);
  thread.what = what;
  thread.where = where;
  thread.mask = mask;
  thread.record = record;
  thread.state = State::at_warp;
  unsigned& waiting = warp_waiting_[first / 32];
  const unsigned wanted = static_cast<unsigned>(std::popcount(mask));
  const auto is_here = [&](const Thread& other) {
    return other.state == State::at_warp && other.mask == mask && other.what == what &&
           other.where.line() == where.line() && std::strcmp(other.where.file_name(), where.file_name()) == 0;
  };
  bool all = ++waiting >= wanted;
  for (unsigned l = 0; all && l < 32; ++l)
    if (mask >> l & 1) all = first + l < size_ && is_here(*threads_[first + l]);
  if (!all) return wait(State::at_warp, what, mask, record, where);

  waiting -= wanted;
  void* records[32] = {};
  for (unsigned l = 0; l < 32; ++l)
    if (mask >> l & 1) records[l] = threads_[first + l]->record;
  if (exchange != nullptr) exchange(records, mask);
  for (unsigned l = 0; l < 32; ++l)
    if (mask >> l & 1) set_ready(*threads_[first + l]);
  wait(State::ready, what, mask, record, where);
}

// Meetings that follow each other have different addresses, or a late thread would acquire what an early one did after
// it.
void Machine::sync_warp(uint32_t mask, const Location& where) {
  Thread& thread = *running_;
  void* sync = warp_sync(thread.number / 32, mask == ~0u ? thread.warp_meetings++ & 1 : 2);
  release(sync);
  meet_warp("__syncwarp", mask, nullptr, nullptr, where);
  acquire(sync);
}

// ---- Failures -------------------------------------------------------------------------------------------------------

void Machine::fail(const std::string& what, const std::string& where) {
  const uint3& t = running_->index;
  throw Failure(place() + ", thread " + triple(t.x, t.y, t.z) + ": " + what + " (" + where + ")");
}

std::string Machine::place() const {
  return "kernel " + launch_->kernel + ", block " + triple(block_.x, block_.y, block_.z);
}

std::string Machine::describe(const std::vector<const Thread*>& group) const {
  const Thread& one = *group.front();
  std::string text = std::to_string(group.size()) + " of " + std::to_string(size_) + " threads, the first is thread " +
                     triple(one.index.x, one.index.y, one.index.z) + ", ";
  if (one.state == State::done) return text + "have ended";
  text += std::string("wait in ") + one.what + " at " + at(one.where);
  if (one.state != State::at_warp) return text;
  char mask[16];
  std::snprintf(mask, sizeof mask, "0x%08x", one.mask);
  return text + " for the lanes " + mask;
}

void Machine::report_stuck() {
  std::map<std::string, std::vector<const Thread*>> groups;
  for (unsigned number = 0; number < size_; ++number) {
    const Thread& t = *threads_[number];
    groups[t.state == State::done ? "" : at(t.where) + std::to_string(t.mask)].push_back(&t);
  }
  std::string text = place() + ": divergent barrier, nobody can go on:";
  for (const auto& [key, group] : groups) text += "\n  " + describe(group);
  throw Failure(text);
}

// ---- Shared memory --------------------------------------------------------------------------------------------------

void Machine::prepare_shared() {
  if (shared_ != nullptr && thread_sanitizer) {  // forgets who used it: another block's threads are no race
    unmap_memory(shared_, shared_mapped);
    shared_ = nullptr;
  }
  if (shared_ == nullptr) shared_ = map_memory(shared_mapped);
  poison_memory(shared_, std::max(shared_used_, size_t{1} << 16));
  arrays_.clear();
  shared_used_ = redzone;
  shared_held_ = 0;
  if (launch_->dynamic_shared > 0) shared_memory(nullptr, launch_->dynamic_shared);
}

void* Machine::shared_memory(const void* key, size_t bytes) {
  Unobserved unobserved;
  for (const SharedArray& array : arrays_)
    if (array.key == key) return array.memory;
  shared_held_ += (bytes + 15) / 16 * 16;
  const size_t fixed = shared_held_ - (launch_->dynamic_shared + 15) / 16 * 16;
  if (key != nullptr && (fixed > max_static_shared || shared_held_ > max_shared))
    throw Failure(place() + ": " + std::to_string(fixed) + " bytes of shared arrays and " +
                  std::to_string(launch_->dynamic_shared) + " dynamic ones; a block has " +
                  std::to_string(max_static_shared) + " for arrays and " + std::to_string(max_shared) + " in all");
  std::byte* memory = shared_ + shared_used_;
  shared_used_ += (bytes + redzone + 127) / 128 * 128;
  poison_memory(memory, shared_ + shared_used_ - memory);
  unpoison_memory(memory, bytes);
  std::memset(memory, 0xff, bytes);
  arrays_.push_back({key, memory, bytes});
  return memory;
}

bool Machine::in_shared(const void* p, size_t bytes) const {
  const auto* address = static_cast<const std::byte*>(p);
  return std::any_of(arrays_.begin(), arrays_.end(), [&](const SharedArray& array) {
    return address >= array.memory && address + bytes <= array.memory + array.bytes;
  });
}

}  // namespace cuda_on_cpu::detail
