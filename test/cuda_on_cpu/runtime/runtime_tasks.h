// runtime_tasks.h: private to runtime_tasks.cpp and runtime_hosts.cpp: which tasks can run, and running them.
#pragma once
#include <algorithm>

#include "cuda_on_cpu/runtime/runtime.h"

namespace cuda_on_cpu::detail {

// The devices whose memory a waiting host has unpoisoned: it is poisoned while only hosts run.
class OpenedMemory {
 public:
  OpenedMemory() = default;
  ~OpenedMemory() {
    for (Device* device : devices_)
      if (--device->open == 0) poison(*device, true);
  }
  OpenedMemory(const OpenedMemory&) = delete;
  OpenedMemory& operator=(const OpenedMemory&) = delete;
  void open(Device& device) {
    if (!address_sanitizer || std::count(devices_.begin(), devices_.end(), &device) > 0) return;
    devices_.push_back(&device);
    if (device.open++ == 0) poison(device, false);
  }

 private:
  static void poison(const Device& device, bool on) {
    for (const auto& [p, allocation] : runtime().allocations)
      if (allocation.device == &device) set_poison(p, allocation.bytes, on);
  }
  std::vector<Device*> devices_;
};

bool waits_are_over(const Task& task);
// Is it the task's turn on its stream, and is its device idle? Then only its meetings' parties can be missing.
bool has_come(const Task& task);
bool can_run(Task& task);

// Calls f(task) for each task whose turn it is on the stream: one, or all that a graph allows to run concurrently.
template <class F>
void for_each_turn(CUstream_st& stream, F&& f) {
  if (stream.tasks.empty()) return;
  Task& first = *stream.tasks.front();
  if (first.graph == nullptr || first.graph->left == 0 || !waits_are_over(first)) return f(first);
  for (const int node : first.graph->ready) f(first.graph->nodes[static_cast<size_t>(node)]);
}

// Of the device's runnable tasks (of all devices' in hosts-first mode), the one that the schedule picks; null if there
// is none. `wanted`: the stream that the host waits for, if any.
Task* choose(Device& device, const CUstream_st* wanted);
// Runs it, with its meeting's parties if any, without the mutex.
void run_task(Lock& lock, Task& task, OpenedMemory& memory);

// Nothing waits for this task any longer.
void drop(Task& task, const std::string& why);
// Drops everything enqueued anywhere and notifies the hosts that wait for it. The error is passed on to the caller.
[[noreturn]] void fail(Lock& lock, const std::exception_ptr& error);

}  // namespace cuda_on_cpu::detail
