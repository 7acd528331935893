// emulator.cpp: schedules, and the requests of running kernels.
#include "cuda_on_cpu/emulator.h"

#include <algorithm>
#include <atomic>

#include "cuda_on_cpu/machine.h"

// Default options that ASAN_OPTIONS and TSAN_OPTIONS may override. A kernel bug ends the program at once.
extern "C" {
const char* __asan_default_options() { return "detect_stack_use_after_return=0"; }
const char* __tsan_default_options() { return "halt_on_error=1:atexit_sleep_ms=0"; }
}

namespace cuda_on_cpu {

using detail::machine;

namespace {

Schedule the_schedule;
uint64_t the_schedule_number = 1;
std::atomic<bool> async_copy_used = false;

}  // namespace

std::string to_string(const Schedule& schedule) {
  static constexpr const char* orders[] = {"forward", "reverse", "depth first", "depth first, reverse", "random"};
  return std::string(orders[static_cast<size_t>(schedule.order)]) +
         (schedule.order == Order::random ? " " + std::to_string(schedule.seed) : "") +
         (schedule.async_copy == AsyncCopy::eager ? ", eager copies" : ", lazy copies");
}
std::vector<Schedule> all_schedules() {
  std::vector<Schedule> all;
  for (const AsyncCopy copies : {AsyncCopy::eager, AsyncCopy::lazy}) {
    if (copies == AsyncCopy::lazy && !async_copy_used) break;
    if (thread_sanitizer) {  // sees races in any order
      all.push_back({Order::depth_first, copies, 0});
      continue;
    }
    for (const Order order : {Order::forward, Order::reverse, Order::depth_first, Order::depth_first_reverse})
      all.push_back({order, copies, 0});
    for (const uint64_t seed : {1, 2}) all.push_back({Order::random, copies, seed});
  }
  return all;
}
void set_schedule(const Schedule& schedule) {
  the_schedule = schedule;
  ++the_schedule_number;
  async_copy_used = false;
}
const Schedule& schedule() { return the_schedule; }
uint64_t detail::schedule_number() { return the_schedule_number; }

void run(const Launch& launch) {
  detail::make_machine().run(launch);
  count_kernel();
}

namespace {
std::atomic<int64_t> kernels = 0;
}  // namespace
int64_t kernels_run() { return kernels; }
void count_kernel() { ++kernels; }

const uint3& thread_index() { return machine().self().index; }
const uint3& block_index() { return machine().block_index(); }
const dim3& block_size() { return machine().launch().block; }
const dim3& grid_size() { return machine().launch().grid; }
unsigned lane() { return machine().self().number % 32; }

void fail(const std::string& what, const Location& where) { machine().fail(what, detail::at(where)); }
void meet_block(const char* what, const Location& where) { machine().meet_block(what, where); }
void meet_warp(const char* what, uint32_t mask, void* record, Exchange exchange, const Location& where) {
  machine().meet_warp(what, mask, record, exchange, where);
}
void sync_warp(uint32_t mask, const Location& where) { machine().sync_warp(mask, where); }

void* shared_memory(const void* key, size_t bytes) { return machine().shared_memory(key, bytes); }
void* dynamic_shared_memory() {
  if (machine().launch().dynamic_shared == 0)
    machine().fail("the kernel uses dynamic shared memory but was launched without any", "at DYN_SHARED");
  return machine().shared_memory(nullptr, machine().launch().dynamic_shared);
}

void async_copy(void* to, const void* from, int size, int bytes, const Location& where) {
  const auto misaligned = [&](const void* p) { return reinterpret_cast<uintptr_t>(p) % static_cast<unsigned>(size); };
  if (!machine().in_shared(to, static_cast<size_t>(size)))
    fail("cp.async: the destination is not inside one shared array", where);
  if (misaligned(to) || misaligned(from))
    fail("cp.async: an address is not a multiple of " + std::to_string(size), where);
  if (bytes < 0 || bytes > size) fail("cp.async: " + std::to_string(bytes) + " bytes are asked for", where);
  const detail::PendingCopy copy{to, from, size, bytes};
  if (the_schedule.async_copy == AsyncCopy::eager) copy.complete();
  Unobserved unobserved;
  async_copy_used = true;
  if (the_schedule.async_copy == AsyncCopy::lazy) machine().self().copies.back().push_back(copy);
}
void async_commit() {
  Unobserved unobserved;
  machine().self().copies.emplace_back();
}
void async_wait(int groups_left) {
  std::vector<detail::PendingCopy> due;
  {
    Unobserved unobserved;
    auto& groups = machine().self().copies;  // the last one is still open and is not waited for
    const size_t closed = groups.size() - 1, left = std::min(closed, static_cast<size_t>(groups_left));
    const auto end = groups.begin() + static_cast<std::ptrdiff_t>(closed - left);
    for (auto group = groups.begin(); group != end; ++group) due.insert(due.end(), group->begin(), group->end());
    groups.erase(groups.begin(), end);
  }
  for (const detail::PendingCopy& copy : due) copy.complete();
}

void thread_fence() {
  static uint64_t sync;
  acquire(&sync);
  release(&sync);
}

}  // namespace cuda_on_cpu
