// runtime_hosts.cpp: how host threads wait, for streams and for each other, and how they learn that a task failed.
//
// A waiting host thread runs the streams of the device that it waits for. If these wait for streams of another device
// (an event, a collective) whose own host is not waiting for it now, it runs those too, as far as needed.
#include <fstream>
#include <sstream>
#include <utility>

#include "cuda_on_cpu/runtime/runtime_tasks.h"

namespace cuda_on_cpu::detail {

// ---- Failures -------------------------------------------------------------------------------------------------------

void drop(Task& task, const std::string& why) {
  if (task.mark) task.mark->reached = true;
  for (const Part& part : task.parts) {
    std::fill(part.meeting->parties.begin(), part.meeting->parties.end(), nullptr);
    part.meeting->nobody_comes = why;
  }
  if (task.graph)
    for (Task& node : task.graph->nodes) drop(node, why);
}

void fail(Lock& lock, const std::exception_ptr& error) {
  Runtime& r = runtime();
  r.failing = true;
  const auto busy = [&] {
    return std::any_of(r.devices.begin(), r.devices.end(), [](const auto& device) { return device->busy; });
  };
  while (busy()) lock.wait(std::chrono::seconds(1));
  const auto lost = std::make_shared<Lost>();
  try {
    std::rethrow_exception(error);
  } catch (const std::exception& exception) {
    lost->message = exception.what();
  } catch (...) {
    lost->message = "a task threw something that is not an exception";
  }
  for (CUstream_st* stream : r.streams) {
    for (const auto& task : stream->tasks) drop(*task, lost->message);
    if (!stream->tasks.empty() && stream->last_host != std::this_thread::get_id()) stream->lost = lost;
    stream->finished += stream->tasks.size();
    stream->tasks.clear();
    acquire(&stream->done);
  }
  ++r.failures;
  r.last_failure = lost->message;
  r.failing = false;
  something_changed();
  std::rethrow_exception(error);
}

namespace {

// How long a host leaves another device's streams to that device's own host, which may be about to wait: starting the
// work before anyone waits for it would hide a host that overwrites its operands too early.
constexpr std::chrono::duration<double> grace{0.01};

// ---- Why a waiting host cannot run its streams ----------------------------------------------------------------------

struct Outlook {
  Task* helpful = nullptr;  // of another device, and no other host runs it
  bool hope = false;        // another host may still enqueue what is missing
  std::string obstacles;
  std::set<const CUstream_st*> seen;

  void look(CUstream_st& stream) {
    if (seen.insert(&stream).second) for_each_turn(stream, [&](Task& task) { look_at(task); });
  }
  void look_at(Task& task) {
    if (task.device->busy) {
      hope = true;
    } else if (can_run(task)) {
      if (task.device->attended == 0) helpful = &task;
      else hope = true;
    } else {
      for (const MarkPtr& mark : task.after)
        if (!mark->reached) {
          obstacles += "\n  " + name_of(*task.stream) + " waits for an event of " + name_of(*mark->stream);
          look(*mark->stream);
        }
      if (waits_are_over(task))
        for (const Part& part : task.parts)
          if (!part.done) look_at(task, *part.meeting);
    }
  }
  void look_at(const Task& task, const Meeting& meeting) {
    obstacles += "\n  " + name_of(*task.stream) + ": " + meeting.waits_for();
    for (Task* party : meeting.parties) {
      if (party == nullptr) {
        if (!meeting.nobody_comes) hope = true;
      } else if (!has_come(*party)) {
        look(*party->stream);
      }
    }
  }
};
Outlook outlook(Device& device, CUstream_st* wanted) {
  Outlook all;
  if (wanted != nullptr) all.look(*wanted);
  else
    for (CUstream_st* stream : device.streams) all.look(*stream);
  return all;
}

// Throws if another host dropped work that this host may wait for.
void tell_what_is_lost(Device& device, CUstream_st* wanted) {
  const auto tell = [](CUstream_st& stream) {
    const std::shared_ptr<Lost> lost = std::exchange(stream.lost, nullptr);
    if (lost && lost->told.insert(std::this_thread::get_id()).second)
      throw Failure("the work of " + name_of(stream) +
                    " was dropped when this failed on another host thread: " + lost->message);
  };
  if (wanted != nullptr) tell(*wanted);
  else
    for (CUstream_st* stream : device.streams) tell(*stream);
}

// What a host waits for, visible to others.
class Waiting {
 public:
  Waiting(const std::function<bool()>& done, const CUstream_st* wanted) {
    host().done = &done;
    host().wanted = wanted;
    something_changed();
  }
  ~Waiting() {
    host().done = nullptr;
    host().wanted = nullptr;
  }
  Waiting(const Waiting&) = delete;
  Waiting& operator=(const Waiting&) = delete;
};

// Does it wait for a thread, outside the runtime? True if the system says it sleeps and has not woken up for a while.
bool sleeps(Host& other) {
  if (other.enters) return false;
  std::ifstream status("/proc/self/task/" + std::to_string(other.thread) + "/status");
  std::string line, count;
  bool asleep = false;
  while (std::getline(status, line)) {
    if (line.starts_with("State:")) asleep = line.find("sleeping") != std::string::npos;
    if (line.starts_with("voluntary_ctxt_switches:")) count = line;
  }
  if (count != other.sleeps) other.sleeps = count, other.since = Clock::now();
  return asleep && Clock::now() - other.since > std::chrono::milliseconds(1);
}
bool all_hosts_wait() {
  const Runtime& r = runtime();
  return std::none_of(r.devices.begin(), r.devices.end(), [](const auto& device) { return device->busy; }) &&
         std::all_of(r.hosts.begin(), r.hosts.end(),
                     [](Host* each) { return each->done != nullptr ? !(*each->done)() : sleeps(*each); });
}

// Has nothing happened anywhere for longer than the runtime's patience?
class Patience {
 public:
  bool is_over() {
    const Runtime& r = runtime();
    const bool busy = std::any_of(r.devices.begin(), r.devices.end(), [](const auto& d) { return d->busy; });
    if (busy || seen_ != r.progress) since_ = Clock::now(), seen_ = r.progress;
    return Clock::now() - since_ >= r.patience;
  }
  std::string text() const {
    std::ostringstream out;
    out << "the host has waited " << runtime().patience.count() << " s for ";
    return out.str();
  }

 private:
  uint64_t seen_ = runtime().progress;
  Clock::time_point since_ = Clock::now();
};

}  // namespace

// ---- Hosts ----------------------------------------------------------------------------------------------------------

void wait_until(Lock& lock, Device& device, CUstream_st* wanted, const std::function<bool()>& done) {
  Runtime& r = runtime();
  if (done()) return tell_what_is_lost(device, wanted);
  const struct Attended {
    explicit Attended(Device& device_) : device(device_) { ++device.attended; }
    ~Attended() {
      --device.attended;
      something_changed();
    }
    Device& device;
  } attended(device);
  const Waiting waiting(done, wanted);
  OpenedMemory memory;
  Patience patience;
  const Clock::time_point begin = Clock::now();
  while (!done()) {
    if (r.failing) {
      lock.wait(std::chrono::seconds(1));
      continue;
    }
    if (r.hosts_first && !all_hosts_wait()) {
      if (patience.is_over())
        fail(lock,
             std::make_exception_ptr(Failure(patience.text() + "other host threads, which neither wait nor exit")));
      lock.wait(std::chrono::milliseconds(1));
      continue;
    }
    if (Task* task = choose(device, wanted)) {
      run_task(lock, *task, memory);
      continue;
    }
    const Outlook out = outlook(device, wanted);
    if (out.helpful != nullptr && (r.hosts.size() == 1 || Clock::now() - begin >= grace)) {
      run_task(lock, *out.helpful, memory);
      continue;
    }
    const bool hopeless = out.helpful == nullptr && !out.hope;
    if (hopeless || patience.is_over()) {
      const std::string what = wanted != nullptr ? name_of(*wanted) : "device " + std::to_string(device.number);
      const std::string error = hopeless ? "deadlock: the host waits for " : patience.text();
      fail(lock, std::make_exception_ptr(Failure(error + what + ":" + out.obstacles)));
    }
    lock.wait(std::min(r.patience, out.helpful != nullptr ? grace : std::chrono::duration<double>(1)));
  }
  tell_what_is_lost(device, wanted);
}
void wait_for_stream(Lock& lock, CUstream_st& stream) {
  wait_until(lock, *stream.device, &stream, [&stream, last = stream.enqueued] { return stream.finished >= last; });
  acquire(&stream.done);
}
void wait_for_device(Lock& lock, Device& device) {
  std::vector<std::pair<CUstream_st*, uint64_t>> last;
  for (CUstream_st* stream : device.streams)
    if (!stream->tasks.empty()) last.emplace_back(stream, stream->enqueued);
  wait_until(lock, device, nullptr, [&] {
    return std::all_of(last.begin(), last.end(), [](const auto& each) {
      return runtime().streams.count(each.first) == 0 || each.first->finished >= each.second;
    });
  });
  for (CUstream_st* stream : device.streams) acquire(&stream->done);
}
bool poll(Lock& lock, Device& device, CUstream_st* wanted, const void* what, const std::function<bool()>& done) {
  if (done()) return true;
  if (runtime().hosts_first) {
    if (std::exchange(host().asked, what) != what) return false;
    wait_until(lock, device, wanted, done);
    return true;
  }
  OpenedMemory memory;  // takes longer to open than most tasks to run
  for (int tasks = 0; tasks < 16 && !done(); ++tasks) {
    if (runtime().failing) return false;
    Task* task = choose(device, wanted);
    if (task == nullptr) task = outlook(device, wanted).helpful;
    if (task == nullptr) break;
    run_task(lock, *task, memory);
  }
  tell_what_is_lost(device, wanted);
  return false;
}
void wait_for_hosts(Lock& lock, const std::function<bool()>& done, const std::function<std::string()>& what,
                    std::chrono::duration<double> look_every) {
  const Waiting waiting(done, nullptr);
  Patience patience;
  const uint64_t failures = runtime().failures;
  while (!done()) {
    if (runtime().failures != failures)
      throw Failure(what() + "; this failed on another host thread: " + runtime().last_failure);
    if (patience.is_over()) throw Failure(patience.text() + what());
    lock.wait(std::min(runtime().patience, look_every));
  }
}

void something_changed() {
  if (runtime().blocked > 0) runtime().changed.notify_all();
}

}  // namespace cuda_on_cpu::detail
