// runtime.h: private to the emulated CUDA runtime: devices, streams, what is enqueued on them, and how host threads
// wait. Everything here is guarded by one mutex, which is free while a task of a stream runs.
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

// ---- What is enqueued -----------------------------------------------------------------------------------------------

// A point on a stream that others wait for: an event as it was recorded, a graph as it was launched.
struct Mark {
  CUstream_st* stream = nullptr;  // whose work reaches it
  bool reached = false;
  Clock::time_point time;
  char sync = 0;  // an address for ThreadSanitizer
};
using MarkPtr = std::shared_ptr<Mark>;

// What several streams do together, such as a collective: it runs once all parties have come to it.
class Meeting {
 public:
  virtual ~Meeting() = default;
  virtual void run() = 0;                     // without the mutex
  virtual std::string waits_for() const = 0;  // for messages: which call it is, and who has not come
  std::vector<Task*> parties;                 // null: this one's call is not enqueued yet
  std::optional<std::string> nobody_comes;    // why those who are not enqueued never will be
  char sync = 0, done = 0;
};
struct Part {
  std::shared_ptr<Meeting> meeting;
  bool done = false;
};

// What a task does; the same object for every launch of a graph.
struct Work {
  cudaGraphNodeType type;
  bool opens_memory = false;  // it accesses device memory in ways that AddressSanitizer should watch
  std::function<void()> run = {};
  std::function<void(Task&)> meet = {};  // called when it is enqueued: names the meetings that it takes part in
};
using WorkPtr = std::shared_ptr<const Work>;

struct Task {
  WorkPtr work = {};                // none: only waits, or is only waited for
  std::vector<MarkPtr> after = {};  // what it waits for, besides its turn on the stream
  MarkPtr mark = {};                // reached when it has run; none: nobody waits for it alone
  std::vector<Part> parts = {};
  std::unique_ptr<GraphRun> graph = {};  // a graph that it launches
  Device* device = nullptr;
  CUstream_st* stream = nullptr;
  GraphRun* run = nullptr;  // that it is a node of
  int node = 0;
  void* context = nullptr;  // ThreadSanitizer's
  char enqueued = 0;        // an address for it: what the host did before
  char done = 0;            // and what a node has done
};

// A graph under way: it is the first task of its stream until all nodes have run.
struct GraphRun {
  Task* launch;
  std::shared_ptr<const Graph> graph;
  std::shared_ptr<const Lanes> lanes;  // whose contexts the nodes have
  std::vector<Task> nodes;
  std::vector<int> missing;  // by node: how many nodes it still waits for
  std::set<int> ready;       // nodes that wait for no other
  size_t left = 0;
  char begin = 0;
};

// ---- Devices, and all there is --------------------------------------------------------------------------------------

// Work of a device that was dropped because a task failed: told to every other host thread that had enqueued some.
struct Lost {
  std::string message;
  std::set<std::thread::id> told;
};

struct Allocation {
  size_t bytes;
  Device* device;  // none: pinned host memory
};

struct Device {
  explicit Device(int number_, size_t bytes_);
  ~Device();
  int number;
  size_t bytes, bytes_used = 0;
  std::unique_ptr<CUstream_st> stream0;
  std::vector<CUstream_st*> streams;  // in the order in which they were created
  std::mt19937_64 random;             // for Order::random,
  uint64_t seeded = 0;                // since this schedule
  bool busy = false;                  // a task of this device runs: one at a time
  int attended = 0;                   // host threads that wait for it, and so run its streams
  int open = 0;                       // those whose tasks need its memory readable
};

// What each host thread has of its own.
struct Host {
  Host();
  ~Host();
  int device = 0;
  cudaError_t last_error = cudaSuccess;
  bool in_task = false;
  const void* asked = nullptr;  // what it has asked about, and enqueued nothing since: it may be polling

  // What it waits for, if it waits in the runtime; others look at this.
  const std::function<bool()>* done = nullptr;
  const CUstream_st* wanted = nullptr;
  std::atomic<bool> enters = false;  // it waits for the mutex
  // And what the system says of it: how often it has gone to sleep, as it was seen first at a time.
  pid_t thread;
  std::string sleeps;
  Clock::time_point since;
};
Host& host();

struct Runtime {
  std::mutex mutex;
  std::condition_variable changed;  // something was enqueued, has run, or was given up
  std::vector<std::unique_ptr<Device>> devices;
  cudaError_t why_no_device = cudaErrorNoDevice;
  std::unordered_set<CUstream_st*> streams;
  std::map<const std::byte*, Allocation> allocations;  // by their first byte
  std::vector<std::shared_ptr<Capture>> captures;      // those under way
  std::set<Host*> hosts;                               // threads that have used the runtime and still live
  uint64_t allocated = 0;                              // how many there were so far
  bool has_code = true;                                // the program, for the devices
  bool hosts_first = false;                            // see set_hosts_first
  int blocked = 0;                                     // of the hosts, how many wait on `changed`
  uint64_t progress = 0;                               // tasks that have run
  bool failing = false;                                // nothing more is begun
  uint64_t failures = 0;                               // tasks that have failed
  std::string last_failure;
  std::chrono::duration<double> patience{60};
};
Runtime& runtime();

// Holds the mutex. To ThreadSanitizer nothing that is done under it is observed, and the mutex orders nothing.
class Lock {
 public:
  Lock();
  ~Lock() { unlock(); }
  Lock(const Lock&) = delete;
  Lock& operator=(const Lock&) = delete;
  void lock();
  void unlock();
  // Blocks until something has changed, or for so long.
  void wait(std::chrono::duration<double> longest);

 private:
  Unobserved unobserved_;
};

cudaError_t note(cudaError_t status);  // for cudaGetLastError
Device* current_device();              // null where there is none: return no_device()
cudaError_t no_device();               // the reason, noted
CUstream_st& stream_of(cudaStream_t stream);
std::string name_of(const CUstream_st& stream);
void destroy(CUstream_st* stream);  // it is idle
void free_all();                    // memory of devices
// The allocation that p is in; null if in none. Failure, about `what`, if [p, p + bytes) reaches past its end.
const Allocation* allocation_of(const void* p, size_t bytes, const char* what);
// Failure if it is not memory of this device.
void require_memory_of(const Device* device, const void* p, size_t bytes, const char* what);

// ---- Enqueueing and waiting -----------------------------------------------------------------------------------------

// Appends `task`; the mutex is held. A stream that is being captured takes no task: submit() decides.
void enqueue(CUstream_st& stream, Task task);
cudaError_t submit(CUstream_st& stream, Work work);

// Waits until `done`, running streams of `device` as the schedule says, and those of others as far as needed. `wanted`:
// the stream that the host waits for, if it is one. Throws what a task has thrown, or why `done` never comes.
void wait_until(Lock& lock, Device& device, CUstream_st* wanted, const std::function<bool()>& done);
void wait_for_stream(Lock& lock, CUstream_st& stream);
void wait_for_device(Lock& lock, Device& device);
// For a host that only asks whether something is done: runs one task, if one can run, and says whether it is done now.
// Where hosts come first it runs nothing for who asks once, and who asks again and again waits. `what`: that it asks
// of.
bool poll(Lock& lock, Device& device, CUstream_st* wanted, const void* what, const std::function<bool()>& done);
// For a host that waits for other hosts, not for streams. `what` tells, in a Failure, what it has waited for.
void wait_for_hosts(Lock& lock, const std::function<bool()>& done, const std::function<std::string()>& what);
void something_changed();

// For what ends something that tasks may still use. A failure of these tasks is thrown, but not by a destructor that
// runs because another exception is on its way.
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
// Something was asked of a stream (event) in a capture that must not be: spoils the capture and returns the error.
cudaError_t refuse_capture(CUstream_st& stream);
cudaError_t refuse_captured(CUevent_st& event);
// The error if this call spoils a capture: a call that a thread must not make while it captures, except in relaxed
// mode; a wait for a device with a stream in a capture; work on a default stream while one that waits for it is in a
// capture.
cudaError_t check_unsafe_call();
cudaError_t check_device_wait(const Device& device);
cudaError_t check_implicit(const CUstream_st& stream);
cudaError_t capture(CUstream_st& stream, Work work);
void leave_capture(CUstream_st& stream);  // it is destroyed, which spoils the capture
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
  std::vector<CUgraphNode_st> nodes;  // in the order in which they were captured
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
  std::thread::id last_host;                        // who enqueued the last one
  std::shared_ptr<cuda_on_cpu::detail::Lost> lost;  // tasks of it were dropped
  std::shared_ptr<cuda_on_cpu::detail::Capture> capture;
  std::vector<int> tail;                          // what the next node of the capture comes after
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
