// device.h: devices, streams and events. A stream runs work in order, asynchronously to the host: on the CPU it is a
// FIFO worker thread, on a GPU a CUDA stream; on the null device nothing runs: the cost of each op is booked, and a
// clock says how long all of it would take.
#pragma once
#include <sched.h>
#include <strings.h>
#include <sys/auxv.h>
#include <unistd.h>

#include <chrono>
#include <cstdlib>
#include <source_location>
#include <typeindex>
#include <unordered_map>

#include "core/clock.h"
#include "device/cpu_queue.h"
#include "device/host.h"
#include "device/machine.h"
#include "device/stream_trace.h"
#include "device/tensor.h"
#ifdef TRAIN_GPT_CUDA
#include "device/cuda_queue.cuh"
#endif

namespace llmc {

// May tensor cores multiply fp32 as TF32, with 10-bit mantissas?
enum class Tf32 : uint8_t { no, yes };

enum class DeviceKind { cpu, cuda, null };

constexpr auto names_of_values(DeviceKind) { return std::array{"cpu", "cuda", "null"}; }

// Names the variables that set_openmp_environment() has left out, with spaces between them.
inline constexpr const char* unbound_variable = "TRAIN_GPT_UNBOUND";

// Makes OpenMP threads sleep at barriers instead of spinning, unless the user chose a policy: otherwise ranks that
// share processors, or other programs, lose whole time slices at every barrier (measured: dev/LOG.md). And leaves
// threads unbound: OpenMP would bind the first one to one place, often a single processor, from which all threads of
// streams and ranks would inherit it. OpenMP reads its settings when it is loaded, so the program executes itself
// again, on all of these processors; if they are not known, threads stay bound as the user has said.
inline void set_openmp_environment(char** argv, const cpu_set_t& processors = {}) {
  bool changed = false;
  if (std::getenv("OMP_WAIT_POLICY") == nullptr && std::getenv("GOMP_SPINCOUNT") == nullptr)
    changed = setenv("OMP_WAIT_POLICY", "passive", 1) == 0;
  std::string unbound;
  const char* const bind = std::getenv("OMP_PROC_BIND");
  if (CPU_COUNT(&processors) > 0 && (bind == nullptr || ::strcasecmp(bind, "false") != 0))  // false: nothing is bound
    for (const char* name : {"OMP_PROC_BIND", "OMP_PLACES", "GOMP_CPU_AFFINITY"})
      if (std::getenv(name) != nullptr && unsetenv(name) == 0)
        unbound += (unbound.empty() ? "" : " ") + std::string(name);
  if (!unbound.empty()) {
    setenv(unbound_variable, unbound.c_str(), 1);
    ::sched_setaffinity(0, sizeof processors, &processors);
    changed = true;
  }
  const bool by_loader = ::getauxval(AT_BASE) == 0;  // /proc/self/exe is ld.so, which was given the program's name
  if (changed && !by_loader) execv("/proc/self/exe", argv);
  if (changed) unsetenv(unbound_variable);  // it failed, and OpenMP has read what was set: continue so
}

// Who moves tensors between ranks on GPUs: this program, or a library (NCCL), which takes memory for that.
enum class Collectives : uint8_t { own, library };

struct Device {
  DeviceKind kind = DeviceKind::cpu;
  int threads = 1;  // per op, on a CPU
  int gpu = 0;      // its number in this process
  int sharers = 1;  // ranks of this host on the same device
  Collectives collectives = Collectives::own;
  Tf32 tf32 = Tf32::no;
  bool cudnn = false;                    // use cuDNN's attention
  bool gelu_in_products = false;         // cuBLASLt's products compute GELU and its derivative
  bool residual_in_products = false;     // and add to the residual stream
  bool graphs = true;                    // replay repeated work as CUDA graphs
  DeviceKind planned = DeviceKind::cpu;  // what the null device plans for
  bool elsewhere = false;                // a plan is for another machine, whatever this one has
  // The null device's clock is this machine's; none: all its times are 0.
  std::shared_ptr<const Machine> machine = nullptr;
  std::shared_ptr<LinkTimes> links = nullptr;  // of that machine, shared by a rank's streams

  // The same device as a null device, for planning.
  Device on_paper() const {
    Device paper = *this;
    paper.planned = computes_as();
    paper.kind = DeviceKind::null;
    return paper;
  }
  // The device whose ops and work space this one uses or plans.
  DeviceKind computes_as() const { return kind == DeviceKind::null ? planned : kind; }
};

// Sums by op name: calls, flops, bytes, and seconds where timing was asked for; on the null device by its clock.
struct OpTotals {
  int64_t calls = 0;
  double flops = 0, bytes = 0, seconds = 0;
};
using OpLedger = std::map<std::string, OpTotals>;

class Arena;

// On a GPU, kernel blocks of communication streams run before those of compute streams: other ranks wait for them.
enum class Precedence : uint8_t { compute, communication };

// Work that is enqueued repeatedly, on the same tensors, or on paper on equal ones.
struct Replay {
  int64_t times = 0;  // times it was enqueued
  struct PaperOp {
    OpCost cost;
    double seconds;
  };
  std::vector<PaperOp> ops;  // on paper: of which it consists
  bool is_only_ops = true;   // on paper: no transfer is among it, and no other stream waits for it or it for them
#ifdef TRAIN_GPT_CUDA
  std::optional<cuda::Graph> graph;
#endif
};

// Books ops in a ledger, if it is open.
class OpBooks {
 public:
  void open(OpLedger* ledger) { ledger_ = ledger, booked_.clear(); }  // null: closes it
  bool are_open() const { return ledger_ != nullptr; }
  void book(const OpCost& cost, double seconds) {
    OpTotals*& booked = booked_[cost.name];  // finding an op by its text would take most of a plan's time
    if (booked == nullptr) booked = &(*ledger_)[cost.name];
    OpTotals& totals = *booked;
    ++totals.calls;
    totals.flops += cost.flops;
    totals.bytes += cost.bytes;
    totals.seconds += seconds;
  }

 private:
  OpLedger* ledger_ = nullptr;
  std::unordered_map<const char*, OpTotals*> booked_;  // in it
};

namespace detail {

inline bool is_transfer(const OpCost& cost) { return cost.group != nullptr; }
inline TraceSpan span_of(const OpCost& cost) {
  if (!is_transfer(cost))
    return {.kind = SpanKind::op, .name = cost.name, .args = {{"flops", cost.flops}, {"bytes", cost.bytes}}};
  return {.kind = SpanKind::transfer,
          .name = formatted("{}: {}", cost.name, cost.group),
          .args = {{"op", cost.name}, {"group", cost.group}, {"bytes", static_cast<int64_t>(cost.bytes)}}};
}
// whom: a stream, or the group whose transfer ends; empty: another stream
inline TraceSpan wait_span(const std::string& whom) {
  return {.kind = SpanKind::wait, .name = whom.empty() ? "wait" : "wait for " + whom};
}

#ifdef TRAIN_GPT_CUDA
// An event, and the host's time, between two readings: of a few tries the one with the closest readings.
inline TraceZero gpu_zero(cuda::Queue& gpu) {
  TraceZero best;
  for (int i = 0; i < 8; ++i) {
    const auto before = Clock::now();
    auto event = std::make_shared<const cuda::Event>(gpu.record_time());
    gpu.synchronize();
    const auto half = (Clock::now() - before) / 2;
    const int64_t ns = std::chrono::duration_cast<std::chrono::nanoseconds>(half).count() + 1;
    if (i == 0 || ns < best.uncertainty_ns) best = {before + half, std::move(event), ns};
  }
  return best;
}
#endif

}  // namespace detail

class Stream {
 public:
  // `scratch`: work space of the ops on this stream. They run in order, so all of them may use the same bytes.
  Stream(Device device, Arena& scratch, Precedence precedence = Precedence::compute)
      : device_(device),
        scratch_(scratch),
        clock_(device.machine, device.links, precedence == Precedence::communication) {
    if (device_.kind == DeviceKind::cpu) cpu_ = std::make_unique<CpuQueue>(device_.threads);
#ifdef TRAIN_GPT_CUDA
    if (device_.kind == DeviceKind::cuda)
      gpu_ = std::make_unique<cuda::Queue>(device_.gpu, precedence == Precedence::communication);
#endif
  }
  Stream(const Stream&) = delete;
  Stream& operator=(const Stream&) = delete;

  const Device& device() const { return device_; }
  Arena& scratch() { return scratch_; }

  // Runs an op: books its cost and enqueues its work. `outputs`: what it writes or adds to.
  template <class F>
  void run(const OpCost& cost, std::initializer_list<Tensor> outputs, F&& task) {
    run(cost, std::span<const Tensor>(outputs.begin(), outputs.size()), std::forward<F>(task));
  }
  template <class F>
  void run(const OpCost& cost, std::span<const Tensor> outputs, F&& task) {
    if (device_.kind == DeviceKind::null) run_on_paper(cost, clock_.seconds_of(cost));
    else if (cpu_) run_task(cost, outputs, std::forward<F>(task));
    else run_task(cost, outputs, Work::of(task));  // called before this returns: no need to copy it
  }

  // Work that is not an op: on the CPU `task` runs in stream order; on a GPU it is called at once, to launch.
  template <class F>
  void enqueue(F&& task) {
    if (cpu_) cpu_->enqueue(std::forward<F>(task));
    else if (device_.kind != DeviceKind::null) task(), pulse();
  }

  // Runs `enqueue`. On a GPU, the first call enqueues normally (and loads the kernels); later calls launch a graph of
  // it. On paper later calls book the costs of the second one.
  template <class F>
  void replayed(Replay& replay, F&& enqueue) {
    if (device_.kind == DeviceKind::null && device_.graphs && trace_ == nullptr && replay.is_only_ops &&
        replay.times++ > 0) {
      for (const auto& [cost, seconds] : replay.ops) run_on_paper(cost, seconds);
      if (!replay.ops.empty()) return;
      noted_ = &replay;
      enqueue();
      noted_ = nullptr;
      return;
    }
#ifdef TRAIN_GPT_CUDA
    if (gpu_ && device_.graphs && !inspector_ && !books_.are_open() && replay.times++ > 0) {
      if (!replay.graph) {
        capturing_ = true;
        replay.graph.emplace(gpu_->capture(enqueue));
        capturing_ = false;
      }
      return gpu_->launch(*replay.graph);
    }
#endif
    (void)replay;
    enqueue();
  }

  // Waits on the host until all enqueued work is done; rethrows its first error.
  void synchronize() {
    if (cpu_) cpu_->synchronize();
#ifdef TRAIN_GPT_CUDA
    if (gpu_) gpu_->synchronize();
#endif
  }

  // Seconds that a CPU stream has worked, without waits for other streams and other ranks.
  double busy_seconds() const { return cpu_ ? cpu_->busy_seconds() : 0; }

  // On the null device: when all enqueued work would be done.
  double seconds() const { return clock_.now(); }
  // Bytes copied on it between the memories of the device and of its host.
  const HostBytes& host_bytes() const { return host_bytes_; }
  // Bytes of files read and written on it.
  const FileBytes& file_bytes() const { return file_bytes_; }
  // The part of it that this stream spends waiting for others or transferring: it is exposed, because no work of this
  // stream hides it. The stream works the rest of the time.
  double exposed_seconds() const { return clock_.exposed(); }
  const std::map<std::string, double>& exposed_by_group() const { return clock_.exposed_by_group(); }

  Event record() {
    if (noted_ != nullptr) noted_->is_only_ops = false;
    if (cpu_) return trace_ == nullptr ? cpu_->record() : cpu_->record().of_stream(trace_->name());
#ifdef TRAIN_GPT_CUDA
    if (gpu_) return gpu_->record();
#endif
    Event event = Event::on_paper(seconds(), clock_.last_transfer());
    return trace_ == nullptr ? event : std::move(event).of_stream(trace_->name());
  }
  // where: see cuda::Queue::wait().
  void wait(const Event& event, [[maybe_unused]] const std::source_location& where = std::source_location::current()) {
#ifdef TRAIN_GPT_CUDA
    if ((cpu_ && event.gpu() != nullptr) || (gpu_ && event.gpu() == nullptr)) return wait_on_host(event);
#endif
    if (cpu_ && trace_ != nullptr) wait_traced(event);
    else if (cpu_) cpu_->wait(event);
#ifdef TRAIN_GPT_CUDA
    if (gpu_ && event.gpu() != nullptr) gpu_->wait(*event.gpu(), where);
#endif
    if (device_.kind != DeviceKind::null) return;
    if (noted_ != nullptr) noted_->is_only_ops = false;
    const double begin = seconds();
    clock_.wait(event.seconds(), event.group());
    if (trace_ != nullptr && seconds() > begin)
      trace_->add(detail::wait_span(event.group() == nullptr ? event.stream() : event.group()), begin, seconds());
  }

#ifdef TRAIN_GPT_CUDA
  cuda::Queue& gpu() { return *gpu_; }
  cudaStream_t cuda() { return gpu_->stream(); }
#endif

  // State that ops or a library keep per stream, created on first use.
  template <class T>
  T& kept() {
    std::shared_ptr<void>& kept = kept_[typeid(T)];
    if (!kept) kept = std::make_shared<T>();
    return *static_cast<T*>(kept.get());
  }

  // Uploads of up to `bytes` bytes will not allocate memory.
  void reserve_uploads([[maybe_unused]] int64_t bytes) {
#ifdef TRAIN_GPT_CUDA
    if (gpu_) gpu_->reserve(static_cast<size_t>(bytes));
#endif
  }

  // Called repeatedly while the host waits for a GPU stream, and once after; throws to abort the wait.
  void set_watch([[maybe_unused]] std::function<void()> watch) {
#ifdef TRAIN_GPT_CUDA
    if (gpu_) gpu_->set_watch(watch);
    watch_ = std::move(watch);
#endif
  }

  // Calls the inspector (until nullptr is set) with each op's name and each tensor it wrote, before the next op begins.
  using Inspector = std::function<void(const char* op, const Tensor& output)>;
  void set_inspector(Inspector inspector) { inspector_ = std::move(inspector); }
  bool is_inspected() const { return static_cast<bool>(inspector_); }

  // Books each op here (until nullptr is set), where nobody else may remove entries. Call with the stream idle.
  void set_ledger(OpLedger* ledger) { books_.open(ledger); }
  // Records in this trace (until nullptr is set) when what is enqueued runs: on a CPU and on paper all of it, on a GPU
  // what is not in a CUDA graph, without waits. The trace is taken once the stream is idle.
  void set_trace(StreamTrace* trace) { trace_ = trace; }
  StreamTrace* trace() const { return trace_; }
  // Begins and ends a span around what is enqueued between the two calls; see StreamRange.
  void open_span(TraceSpan span) {
    note_time([trace = trace_, span = std::move(span)](double now) { trace->open(span, now); });
  }
  void close_span() {
    if (trace_ != nullptr) note_time([trace = trace_](double now) { trace->close(now); });
  }
  // Now, as time 0 of traces of this stream and others of its device.
  TraceZero trace_zero() {
    synchronize();
#ifdef TRAIN_GPT_CUDA
    if (gpu_) return detail::gpu_zero(*gpu_);
#endif
    return {};
  }

 private:
  void run_on_paper(const OpCost& cost, double seconds) {
    if (noted_ != nullptr) noted_->ops.push_back({cost, seconds}), noted_->is_only_ops &= cost.group == nullptr;
    const double before = this->seconds();
    clock_.run(cost, seconds);
    host_bytes_.to_device += cost.host.to_device;
    host_bytes_.to_host += cost.host.to_host;
    file_bytes_.read += cost.file.read;
    file_bytes_.written += cost.file.written;
    const double begin = this->seconds() - seconds;
    if (books_.are_open()) books_.book(cost, seconds);
    if (trace_ == nullptr) return;
    if (begin > before) trace_->add(detail::wait_span(cost.group == nullptr ? "" : cost.group), before, begin);
    if (is_traced(cost)) trace_->add(detail::span_of(cost), begin, this->seconds());
  }
  void run_task(const OpCost& cost, std::span<const Tensor> outputs, Work task) {
    const ProfilerRange range(cost.name);
    if (inspector_) {
      enqueue(std::move(task));
      synchronize();
      for (const Tensor& t : outputs)
        if (!t.empty()) inspector_(cost.name, t);
    } else if (books_.are_open()) {
      enqueue_timed(cost, std::move(task));
    } else if (capturing_) {
      enqueue_captured(cost.name, task);
    } else if (trace_ != nullptr && is_traced(cost)) {
      enqueue_traced(cost, std::move(task));
    } else {
      enqueue(std::move(task));
    }
  }

  // CUDA reports work that cannot be captured only at the end, and does not name it: so it is looked for after each op.
  void enqueue_captured([[maybe_unused]] const char* op, [[maybe_unused]] const Work& task) {
#ifdef TRAIN_GPT_CUDA
    try {
      task();
      gpu_->require_capture();
    } catch (const Error& error) {
      if (gpu_->captures()) throw;  // an error of the op's own
      throw Error(formatted("{} cannot be captured in a CUDA graph: {}: use --cuda-graphs off", op, error.what()));
    }
#endif
  }

  void enqueue_timed(const OpCost& cost, Work task) {
#ifdef TRAIN_GPT_CUDA
    if (gpu_) return gpu_->timed(task, [this, cost](double seconds) { books_.book(cost, seconds); });
#endif
    enqueue([this, cost, task = std::move(task)] {
      const auto begin = Clock::now();
      task();
      books_.book(cost, seconds_since(begin));
    });
  }

#ifdef TRAIN_GPT_CUDA
  // A stream of a GPU and a thread cannot wait for each other: the host does, before it enqueues more.
  void wait_on_host(const Event& event) {
    const auto reached = [&] {
      if (event.gpu() == nullptr) return event.done();
      const cudaError_t status = cudaEventQuery(*event.gpu());
      if (status == cudaErrorNotReady) cudaGetLastError();  // which is not an error
      else CUDA_CHECK(status);
      return status == cudaSuccess;
    };
    for (; watch_ && !reached(); std::this_thread::sleep_for(std::chrono::microseconds(50))) watch_();
    if (event.gpu() != nullptr) CUDA_CHECK(cudaEventSynchronize(*event.gpu()));
    else event.wait();
  }
#endif

  // ---- Traces ------------------------------------------------------------------------------------------------------

  bool is_traced(const OpCost& cost) { return detail::is_transfer(cost) || trace_->takes_op(); }
  void enqueue_traced(const OpCost& cost, Work task) {
    if (!cpu_) {
      open_span(detail::span_of(cost));
      enqueue(std::move(task));
      return close_span();
    }
    enqueue([trace = trace_, span = detail::span_of(cost), task = std::move(task)] {
      const double begin = trace->now();
      task();
      trace->add(span, begin, trace->now());
    });
  }
  void wait_traced(const Event& event) {
    enqueue([trace = trace_, event] {
      if (event.done()) return event.wait();
      const double begin = trace->now();
      event.wait();
      trace->add(detail::wait_span(event.stream()), begin, trace->now());
    });
  }
  // Calls note(seconds), when it is known, with the time at which this stream gets here.
  template <class F>
  void note_time(F&& note) {
    if (cpu_) cpu_->enqueue([trace = trace_, note] { note(trace->now()); });
    if (device_.kind == DeviceKind::null) note(seconds());
#ifdef TRAIN_GPT_CUDA
    if (gpu_ && !gpu_->captures()) trace_->at(gpu_->record_time(), note);
#endif
  }

  Device device_;
  Arena& scratch_;
  PaperClock clock_;
  HostBytes host_bytes_;  // on the null device
  FileBytes file_bytes_;  // the same
  OpBooks books_;
  StreamTrace* trace_ = nullptr;
  Inspector inspector_;
  bool capturing_ = false;   // a graph; after an error the stream is not used again
  Replay* noted_ = nullptr;  // on paper: takes note of what is enqueued
  std::unique_ptr<CpuQueue> cpu_;
  std::map<std::type_index, std::shared_ptr<void>> kept_;
#ifdef TRAIN_GPT_CUDA
  std::function<void()> watch_;
  std::unique_ptr<cuda::Queue> gpu_;
#endif
};

// Inspects the ops of a stream (Stream::set_inspector) until the end of the scope.
class Inspection {
 public:
  Inspection(Stream& stream, Stream::Inspector inspector) : stream_(stream) {
    stream_.set_inspector(std::move(inspector));
  }
  ~Inspection() { stream_.set_inspector(nullptr); }
  Inspection(const Inspection&) = delete;
  Inspection& operator=(const Inspection&) = delete;

 private:
  Stream& stream_;
};

// Puts what is enqueued on a stream while it lives into a span of the stream's trace, if it has one.
class [[nodiscard]] StreamRange {
 public:
  // make(): the TraceSpan; called only if the stream is traced
  template <class Make>
  StreamRange(Stream& stream, Make&& make) : stream_(stream.trace() == nullptr ? nullptr : &stream) {
    if (stream_ != nullptr) stream_->open_span(make());
  }
  ~StreamRange() {
    if (stream_ != nullptr) try {
        stream_->close_span();
      } catch (...) {  // the stream has failed: its next call says so
      }
  }
  StreamRange(const StreamRange&) = delete;
  StreamRange& operator=(const StreamRange&) = delete;

 private:
  Stream* stream_;
};

}  // namespace llmc
