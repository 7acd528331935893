// runtime.h: private to the emulated CUDA runtime: devices, streams, their queues, and how host threads wait. One mutex
// guards everything here; it is released while a stream's task runs.
#pragma once
#include <atomic>
#include <chrono>
#include <condition_variable>
#include <deque>
#include <map>
#include <memory>
#include <mutex>
#include <optional>
#include <random>
#include <set>
#include <thread>
#include <unordered_map>
#include <unordered_set>

#include "cuda_on_cpu/runtime_api.h"
#include "cuda_on_cpu/sanitizers.h"

namespace cuda_on_cpu::detail {

struct Task;
struct Device;
struct Graph;
struct GraphRun;
struct Capture;
struct Lanes;
using Clock = std::chrono::steady_clock;

// ---- Tasks ----------------------------------------------------------------------------------------------------------

// A point on a stream that others wait for: a recorded event, or a launched graph.
struct Mark {
  CUstream_st* stream = nullptr;  // the stream that reaches it
  bool reached = false;
  Clock::time_point time;
  char sync = 0;  // an address for ThreadSanitizer
};
using MarkPtr = std::shared_ptr<Mark>;

// What several streams do together, such as a collective: runs once all parties have reached it.
class Meeting {
 public:
  virtual ~Meeting() = default;
  virtual void run() = 0;                     // without the mutex
  virtual std::string waits_for() const = 0;  // for messages: which call it is, and who is missing
  std::vector<Task*> parties;                 // null: not enqueued yet
  std::optional<std::string> nobody_comes;    // why the missing ones never will be
  char sync = 0, done = 0;
};
struct Part {
  std::shared_ptr<Meeting> meeting;
  bool done = false;
};

// What a task does; the same object for every launch of a graph.
struct Work {
  cudaGraphNodeType type;
  bool opens_memory = false;  // it accesses device memory under AddressSanitizer's checks
  std::function<void()> run = {};
  std::function<void(Task&)> meet = {};  // called when enqueued: registers the meetings that it takes part in
};
using WorkPtr = std::shared_ptr<const Work>;

struct Task {
  WorkPtr work = {};                // none: only waits or is waited for
  std::vector<MarkPtr> after = {};  // what it waits for, besides stream order
  MarkPtr mark = {};                // reached when it has run; none: not waited for individually
  std::vector<Part> parts = {};
  std::unique_ptr<GraphRun> graph = {};  // a graph that it launches
  Device* device = nullptr;
  CUstream_st* stream = nullptr;
  GraphRun* run = nullptr;  // the launch that it is a node of
  int node = 0;
  void* context = nullptr;  // ThreadSanitizer's
  char enqueued = 0;        // its address for what the host did before
  char done = 0;            // and for what a node has done
};

// A pending graph launch: the first task of its stream until all nodes have run.
struct GraphRun {
  Task* launch;
  std::shared_ptr<const Graph> graph;
  std::shared_ptr<const Lanes> lanes;  // provides the contexts of the nodes
  std::vector<Task> nodes;
  std::vector<int> missing;  // per node: how many nodes it still waits for
  std::set<int> ready;       // nodes that wait for no other
  size_t left = 0;
  char begin = 0;
};

// ---- Devices and global state ---------------------------------------------------------------------------------------

// Work of a device dropped because a task failed: reported to every other host thread that had enqueued some.
struct Lost {
  std::string message;
  std::set<std::thread::id> told;
};

struct Allocation {
  size_t bytes;
  Device* device;  // none: pinned host memory
};

struct Device {
  explicit Device(int number_, size_t bytes_, int gpu_ = -1);
  ~Device();
  int number;
  int gpu;  // its number in the machine, of whose GPUs this process may see only some
  size_t bytes, bytes_used = 0;
  CommunicatorMemory communicators;
  bool has_context = false;  // of this process; then runtime().context_bytes of its memory are gone
  std::unique_ptr<CUstream_st> stream0;
  std::vector<CUstream_st*> streams;  // in order of creation
  std::mt19937_64 random;             // for Order::random,
  uint64_t seeded = 0;                // since this schedule
  bool busy = false;                  // a task of this device is running (one at a time)
  int attended = 0;                   // host threads that wait for it and so run its streams
  int open = 0;                       // those whose tasks need its memory readable
};

// Per-host-thread state.
struct Host {
  Host();
  ~Host();
  int device = 0;
  cudaError_t last_error = cudaSuccess;
  bool in_task = false;
  const void* asked = nullptr;  // what it last queried without enqueueing since: it may be polling

  // What it waits for, if it waits in the runtime; read by others.
  const std::function<bool()>* done = nullptr;
  const CUstream_st* wanted = nullptr;
  std::atomic<bool> enters = false;  // it waits for the mutex
  // And what the system reports about it: how often it has gone to sleep, as first seen.
  pid_t thread;
  std::string sleeps;
  Clock::time_point since;
};
Host& host();

struct Runtime {
  std::mutex mutex;
  std::condition_variable changed;  // something was enqueued, has run or was dropped
  std::vector<std::unique_ptr<Device>> devices;
  cudaError_t why_no_device = cudaErrorNoDevice;
  std::unordered_set<CUstream_st*> streams;
  std::map<const std::byte*, Allocation> allocations;  // by their first byte
  std::vector<std::shared_ptr<Capture>> captures;      // in progress
  std::set<Host*> hosts;                               // live threads that have used the runtime
  uint64_t allocated = 0;                              // allocations so far
  int kernel_registers = 0;                            // of a thread; 0: they limit nothing
  size_t channel_bytes = 0;                            // of a device's memory, for each channel of a communicator
  size_t context_bytes = 0;                            // of a device's memory, that this process's context takes
  bool has_code = true;                                // whether the program has code for the devices
  bool hosts_first = false;                            // see set_hosts_first
  int blocked = 0;                                     // hosts that wait on `changed`
  uint64_t progress = 0;                               // tasks that have run
  bool failing = false;                                // nothing new is started
  uint64_t failures = 0;                               // tasks that have failed
  std::string last_failure;
  std::chrono::duration<double> patience{60};
};
Runtime& runtime();

// Holds the mutex. ThreadSanitizer observes nothing done under it, and the mutex orders nothing for it.
class Lock {
 public:
  Lock();
  ~Lock() { unlock(); }
  Lock(const Lock&) = delete;
  Lock& operator=(const Lock&) = delete;
  void lock();
  void unlock();
  // Blocks until something has changed, or for at most this long.
  void wait(std::chrono::duration<double> longest);

 private:
  Unobserved unobserved_;
};

cudaError_t note(cudaError_t status);  // for cudaGetLastError
size_t free_bytes(const Device& device);
Device* current_device();  // makes its context; null if there is none: return no_device()
cudaError_t no_device();   // the reason, noted
CUstream_st& stream_of(cudaStream_t stream);
std::string name_of(const CUstream_st& stream);
void destroy(CUstream_st* stream);  // must be idle
void free_all();                    // all device memory
// Poisons device memory while only hosts run, or undoes it. Of a large allocation the middle is left out, which would
// take most of the time: tests use its ends.
inline void set_poison(const std::byte* p, size_t bytes, bool on) {
  constexpr size_t end = 1 << 20;
  const auto set = on ? poison_memory : unpoison_memory;
  set(p, std::min(bytes, end));
  if (bytes <= end) return;
  const size_t rest = std::max(end, (bytes - end) / 256 * 256);
  set(p + rest, bytes - rest);
}
// The allocation that contains p, or null. Failure, about `what`, if [p, p + bytes) reaches past its end.
const Allocation* allocation_of(const void* p, size_t bytes, const char* what);
// Failure if it is not memory of this device.
void require_memory_of(const Device* device, const void* p, size_t bytes, const char* what);

// ---- Enqueueing and waiting -----------------------------------------------------------------------------------------

// Appends `task`; the mutex is held. A stream that is being captured takes no tasks: submit() decides.
void enqueue(CUstream_st& stream, Task task);
cudaError_t submit(CUstream_st& stream, Work work);

// Waits until `done`, running streams of `device` in the schedule's order, and others as needed. `wanted`: the stream
// that the host waits for, if any. Throws what a task has thrown, or why `done` can never come true.
void wait_until(Lock& lock, Device& device, CUstream_st* wanted, const std::function<bool()>& done);
void wait_for_stream(Lock& lock, CUstream_st& stream);
void wait_for_device(Lock& lock, Device& device);
// For a host that only queries whether something is done: returns whether it is, and if not, runs a few tasks. In
// hosts-first mode a single query runs nothing, and repeated queries wait. `what`: the object of the query.
bool poll(Lock& lock, Device& device, CUstream_st* wanted, const void* what, const std::function<bool()>& done);
// For a host that waits for other hosts, not for streams. `what` describes, in a Failure, what it waited for.
// look_every: how often `done` is asked if nothing changes in this process.
void wait_for_hosts(Lock& lock, const std::function<bool()>& done, const std::function<std::string()>& what,
                    std::chrono::duration<double> look_every = std::chrono::seconds(1));
void something_changed();

// Before freeing something that tasks may still use. Throws a failure of these tasks, except from a destructor during
// stack unwinding.
template <class F>
void finish(F&& wait) {
  try {
    wait();
  } catch (const Failure&) {
    if (std::uncaught_exceptions() == 0) throw;
  }
}

// ---- Capture --------------------------------------------------------------------------------------------------------

bool is_capturing(const CUstream_st& stream);
// Rejects a request to a stream (event) that a capture does not allow: invalidates the capture and returns the error.
cudaError_t refuse_capture(CUstream_st& stream);
cudaError_t refuse_captured(CUevent_st& event);
// The error if this call invalidates a capture: a call that a capturing thread must not make, except in relaxed mode; a
// wait for a device with a capturing stream; work on a default stream while a stream that waits for it is capturing.
cudaError_t check_unsafe_call();
cudaError_t check_device_wait(const Device& device);
cudaError_t check_implicit(const CUstream_st& stream);
cudaError_t capture(CUstream_st& stream, Work work);
void leave_capture(CUstream_st& stream);  // it is being destroyed, which invalidates the capture
cudaError_t capture_record(CUevent_st& event, CUstream_st& stream);
cudaError_t capture_wait(CUstream_st& stream, CUevent_st& event);

}  // namespace cuda_on_cpu::detail

struct CUgraphNode_st {
  cuda_on_cpu::detail::WorkPtr work;
  cuda_on_cpu::detail::Device* device;
  int lane;                           // the stream that it was captured from
  std::vector<int> after, followers;  // nodes
};
struct cuda_on_cpu::detail::Graph {
  std::vector<CUgraphNode_st> nodes;  // in order of capture
  int lanes = 0;
};
struct CUgraph_st {
  std::shared_ptr<cuda_on_cpu::detail::Graph> graph;
};
struct CUgraphExec_st {
  std::shared_ptr<const cuda_on_cpu::detail::Graph> graph;
  std::shared_ptr<const cuda_on_cpu::detail::Lanes> lanes;
  cuda_on_cpu::detail::MarkPtr last;  // its last launch
};

struct CUstream_st {
  cuda_on_cpu::detail::Device* device = nullptr;
  int number = 0;  // on its device; 0: the default stream
  unsigned flags = cudaStreamDefault;
  std::deque<std::unique_ptr<cuda_on_cpu::detail::Task>> tasks;
  uint64_t enqueued = 0, finished = 0;              // tasks so far
  std::thread::id last_host;                        // the host that enqueued the last one
  std::shared_ptr<cuda_on_cpu::detail::Lost> lost;  // tasks of it were dropped
  std::shared_ptr<cuda_on_cpu::detail::Capture> capture;
  std::vector<int> tail;                          // dependencies of the capture's next node
  void* context = cuda_on_cpu::create_context();  // ThreadSanitizer's: streams are as concurrent as threads
  char done = 0;
};

struct CUevent_st {
  cuda_on_cpu::detail::Device* device;
  unsigned flags;
  cuda_on_cpu::detail::MarkPtr mark;                      // as last recorded; none: never, or in a capture
  std::shared_ptr<cuda_on_cpu::detail::Capture> capture;  // in which it was last recorded
  std::vector<int> tail;
};
