// runtime_tasks.cpp: enqueueing, which tasks can run, which of them runs next, and how it runs.
#include <utility>

#include "cuda_on_cpu/machine.h"
#include "cuda_on_cpu/runtime/runtime_tasks.h"

namespace cuda_on_cpu::detail {

// ---- Enqueueing -----------------------------------------------------------------------------------------------------

void enqueue(CUstream_st& stream, Task task) {
  auto owned = std::make_unique<Task>(std::move(task));
  owned->stream = &stream;
  owned->device = stream.device;
  owned->context = stream.context;
  try {
    if (owned->work && owned->work->meet) owned->work->meet(*owned);
    if (owned->graph) {
      owned->graph->launch = owned.get();
      for (Task& node : owned->graph->nodes)
        if (node.work->meet) node.work->meet(node);
    }
  } catch (const Failure& failure) {
    drop(*owned, failure.what());
    something_changed();
    throw;
  }
  host().asked = nullptr;
  release(&owned->enqueued);
  stream.tasks.push_back(std::move(owned));
  ++stream.enqueued;
  stream.last_host = std::this_thread::get_id();
  something_changed();
}
cudaError_t submit(CUstream_st& stream, Work work) {
  if (is_capturing(stream)) return capture(stream, std::move(work));
  if (const cudaError_t error = check_implicit(stream); error != cudaSuccess) return error;
  enqueue(stream, Task{.work = std::make_shared<Work>(std::move(work))});
  return cudaSuccess;
}

// ---- What can run ---------------------------------------------------------------------------------------------------

bool waits_are_over(const Task& task) {
  return std::all_of(task.after.begin(), task.after.end(), [](const MarkPtr& mark) { return mark->reached; });
}
static bool is_turn_of(const Task& task) {
  if (task.run != nullptr)
    return task.run->ready.count(task.node) > 0 && is_turn_of(*task.run->launch) && waits_are_over(*task.run->launch);
  return !task.stream->tasks.empty() && task.stream->tasks.front().get() == &task;
}
bool has_come(const Task& task) { return !task.device->busy && waits_are_over(task) && is_turn_of(task); }

static Part* part_that_can_run(Task& task) {
  for (Part& part : task.parts) {
    const auto& parties = part.meeting->parties;
    if (!part.done && std::all_of(parties.begin(), parties.end(), [](Task* p) { return p != nullptr && has_come(*p); }))
      return &part;
  }
  return nullptr;
}
static bool all_done(const Task& task) {
  return std::all_of(task.parts.begin(), task.parts.end(), [](const Part& part) { return part.done; });
}
bool can_run(Task& task) { return has_come(task) && (all_done(task) || part_that_can_run(task) != nullptr); }

static int lane_of(const Task& task) {
  return task.run == nullptr ? 0 : task.run->graph->nodes[static_cast<size_t>(task.node)].lane;
}

static Task* choose_of(Device& device, std::vector<Task*>& able, const std::function<bool(const Task*)>& is_wanted) {
  if (able.empty()) return nullptr;
  if (device.seeded != schedule_number()) {
    device.seeded = schedule_number();
    device.random.seed(schedule().seed);
  }
  const Order order = schedule().order;
  const auto not_wanted_first = [&](Task* a, Task* b) { return is_wanted(a) < is_wanted(b); };
  const auto by_lane = [&](Task* a, Task* b) {
    return a->stream == b->stream ? lane_of(*a) < lane_of(*b) : a->stream->number < b->stream->number;
  };
  switch (order) {
    case Order::forward: return able.front();
    case Order::reverse: return able.back();
    case Order::depth_first:  // the wanted stream first
      return *std::min_element(able.begin(), able.end(), [&](Task* a, Task* b) {
        return not_wanted_first(b, a) || (!not_wanted_first(a, b) && by_lane(a, b));
      });
    case Order::depth_first_reverse:  // the wanted stream last
      return *std::max_element(able.begin(), able.end(), [&](Task* a, Task* b) {
        return not_wanted_first(b, a) || (!not_wanted_first(a, b) && by_lane(a, b));
      });
    case Order::random: break;
  }
  return able[device.random() % able.size()];
}
static void add_able(std::vector<Task*>& able, const Device& device) {
  if (device.busy) return;
  for (CUstream_st* stream : device.streams)
    for_each_turn(*stream, [&](Task& task) {
      if (can_run(task)) able.push_back(&task);
    });
}
Task* choose(Device& device, const CUstream_st* wanted) {
  thread_local std::vector<Task*> able;
  able.clear();
  const Runtime& r = runtime();
  if (!r.hosts_first) {
    add_able(able, device);
    return choose_of(device, able, [&](const Task* task) { return task->stream == wanted; });
  }
  for (const auto& each : r.devices) add_able(able, *each);
  const bool by_seed = schedule().order == Order::random;  // each stream comes last with one of `stream_orders` seeds
  const auto rank = [&](const Task* task) {
    const auto number = static_cast<uint64_t>(task->stream->number);
    return by_seed ? (number + schedule().seed) % cuda_on_cpu::stream_orders : number;
  };
  std::stable_sort(able.begin(), able.end(), [&](const Task* a, const Task* b) { return rank(a) < rank(b); });
  if (by_seed) return able.empty() ? nullptr : able.front();
  return choose_of(*r.devices[0], able, [&](const Task* task) {
    return std::any_of(r.hosts.begin(), r.hosts.end(), [&](const Host* each) { return each->wanted == task->stream; });
  });
}

// ---- Running a task -------------------------------------------------------------------------------------------------

// Calls f as this context of ThreadSanitizer.
template <class F>
static void in_context(void* context, F&& f) {
  void* host_context = current_context();
  switch_context(context);
  {
    Unobserved unobserved;  // of that context; f is on the host's stack
    f();
  }
  switch_context(host_context);
}

// From here on the task knows its predecessors.
static void arrive(Task& task) {
  if (!thread_sanitizer) return;
  if (GraphRun* run = task.run) {
    in_context(task.stream->context, [&] {
      acquire(&run->launch->enqueued);
      for (const MarkPtr& mark : run->launch->after) acquire(&mark->sync);
      release(&run->begin);
    });
    in_context(task.context, [&] {
      acquire(&run->begin);
      for (const int node : run->graph->nodes[static_cast<size_t>(task.node)].after)
        acquire(&run->nodes[static_cast<size_t>(node)].done);
    });
  }
  in_context(task.context, [&] {
    acquire(&task.enqueued);
    for (const MarkPtr& mark : task.after) acquire(&mark->sync);
  });
}

static void pop(CUstream_st& stream, void* context) {
  Task& task = *stream.tasks.front();
  in_context(context, [&] {
    if (task.mark) release(&task.mark->sync);
    release(&stream.done);
  });
  if (task.mark) task.mark->reached = true, task.mark->time = Clock::now();
  ++stream.finished;
  stream.tasks.pop_front();
}

static void complete(Task& task) {
  ++runtime().progress;
  GraphRun* run = task.run;
  if (run == nullptr) return pop(*task.stream, task.context);
  in_context(task.context, [&] {
    release(&task.done);
    if (task.mark) release(&task.mark->sync);
  });
  if (task.mark) task.mark->reached = true, task.mark->time = Clock::now();
  run->ready.erase(task.node);
  for (const int follower : run->graph->nodes[static_cast<size_t>(task.node)].followers)
    if (--run->missing[static_cast<size_t>(follower)] == 0) run->ready.insert(follower);
  if (--run->left > 0) return;
  in_context(task.stream->context, [&] {
    for (Task& node : run->nodes) acquire(&node.done);
  });
  pop(*task.stream, task.stream->context);
}

static void run_meeting(Lock& lock, Task& task, Part& part, OpenedMemory& memory) {
  const std::shared_ptr<Meeting> meeting = part.meeting;
  std::vector<Task*> parties = meeting->parties;  // one task may be both parties: a rank that sends to itself
  std::sort(parties.begin(), parties.end());
  parties.erase(std::unique(parties.begin(), parties.end()), parties.end());
  for (Task* party : parties) {
    party->device->busy = true;
    memory.open(*party->device);
  }
  std::exception_ptr error;
  lock.unlock();
  for (Task* party : parties) {
    arrive(*party);
    in_context(party->context, [&] { release(&meeting->sync); });
  }
  in_context(task.context, [&] {
    acquire(&meeting->sync);
    try {
      meeting->run();
    } catch (...) {
      error = std::current_exception();
      release(&task.stream->done);  // the host reads it
    }
    release(&meeting->done);
  });
  for (Task* party : parties) in_context(party->context, [&] { acquire(&meeting->done); });
  lock.lock();
  for (Task* party : parties) {
    party->device->busy = false;
    for (Part& its : party->parts) its.done = its.done || its.meeting == meeting;
  }
  if (error) fail(lock, error);
  for (Task* party : parties)
    if (all_done(*party)) complete(*party);
}

void run_task(Lock& lock, Task& task, OpenedMemory& memory) {
  if (Part* part = part_that_can_run(task)) {
    run_meeting(lock, task, *part, memory);
  } else {
    const Work* work = task.work.get();
    std::exception_ptr error;
    task.device->busy = true;
    if (work != nullptr && work->run) {
      if (work->opens_memory) memory.open(*task.device);
      lock.unlock();
      arrive(task);
      host().in_task = true;
      in_context(task.context, [&] {
        try {
          work->run();
        } catch (...) {
          error = std::current_exception();
          release(&task.stream->done);
        }
      });
      host().in_task = false;
      lock.lock();
    } else {
      arrive(task);
    }
    task.device->busy = false;
    if (error) fail(lock, error);
    complete(task);
  }
  something_changed();
}

}  // namespace cuda_on_cpu::detail
