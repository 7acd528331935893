// device.h: devices, streams and events. A stream runs work in order, asynchronously to the host; on the CPU it is a
// first-in first-out worker thread, on a GPU a stream of CUDA's; on the null device nothing runs and only the cost of
// each op is booked.
#pragma once
#include <unistd.h>

#include <chrono>
#include <cstdlib>
#include <functional>
#include <initializer_list>
#include <map>
#include <memory>
#include <optional>
#include <source_location>
#include <string>
#include <typeindex>
#include <utility>
#include <vector>

#include "core/check.h"
#include "device/cpu_queue.h"
#include "device/host.h"
#include "device/profiler_range.h"
#include "device/tensor.h"
#ifdef TRAIN_GPT_CUDA
#include "device/cuda_queue.cuh"
#endif

namespace llmc {

// May tensor cores multiply fp32 as if its mantissas had 10 bits?
enum class Tf32 : uint8_t { no, yes };

enum class DeviceKind { cpu, cuda, null };

inline const char* name_of(DeviceKind kind) {
  switch (kind) {
    case DeviceKind::cpu: return "cpu";
    case DeviceKind::cuda: return "cuda";
    case DeviceKind::null: return "null";
  }
  return "?";
}

// OpenMP's threads wait for each other asleep, not spinning: ranks that share processors, or other programs beside this
// one, would otherwise lose whole time slices at every barrier (measured: dev/LOG.md). The library reads this when it
// is loaded, so the program starts itself once more, unless the user chose a policy.
inline void wait_without_spinning(char** argv) {
  if (std::getenv("OMP_WAIT_POLICY") != nullptr || std::getenv("GOMP_SPINCOUNT") != nullptr) return;
  if (setenv("OMP_WAIT_POLICY", "passive", 1) == 0) execv("/proc/self/exe", argv);  // where that fails, go on as we are
}

struct Device {
  DeviceKind kind = DeviceKind::cpu;
  int threads = 1;  // of the ops on a CPU
  int gpu = 0;      // its number in this process
  int sharers = 1;  // ranks of this process on the same one
  Tf32 tf32 = Tf32::no;
  bool cudnn = false;                    // its attention instead of our own
  bool graphs = true;                    // what is enqueued again and again becomes a CUDA graph
  DeviceKind planned = DeviceKind::cpu;  // what the null device plans for

  // The same on paper.
  Device on_paper() const {
    Device paper = *this;
    paper.planned = computes_as();
    paper.kind = DeviceKind::null;
    return paper;
  }
  // Whose ops and work space these are.
  DeviceKind computes_as() const { return kind == DeviceKind::null ? planned : kind; }
};

// What an op costs, computed from its shapes alone: the null device adds these up.
struct OpCost {
  const char* name;
  double flops = 0;
  double bytes = 0;  // read + written once
};

// Sums by op name: calls, flops, bytes, and seconds where timing was asked for.
struct OpTotals {
  int64_t calls = 0;
  double flops = 0, bytes = 0, seconds = 0;
};
using OpLedger = std::map<std::string, OpTotals>;

// When an op ran; for traces of what overlaps with what.
struct Span {
  const char* op;
  std::chrono::steady_clock::time_point begin, end;
};

class Arena;

// A piece of work that is enqueued again and again, on the same tensors.
struct Replay {
  int64_t times = 0;  // that it was enqueued
#ifdef TRAIN_GPT_CUDA
  std::optional<cuda::Graph> graph;
#endif
};

class Stream {
 public:
  // `scratch`: work space of the ops on this stream. They run in order, so all of them may use the same bytes.
  Stream(Device device, Arena& scratch) : device_(device), scratch_(scratch) {
    if (device_.kind == DeviceKind::cpu) cpu_ = std::make_unique<CpuQueue>(device_.threads);
#ifdef TRAIN_GPT_CUDA
    if (device_.kind == DeviceKind::cuda) gpu_ = std::make_unique<cuda::Queue>(device_.gpu);
#endif
  }
  Stream(const Stream&) = delete;
  Stream& operator=(const Stream&) = delete;

  const Device& device() const { return device_; }
  Arena& scratch() { return scratch_; }

  // An op: its cost is booked, its work enqueued. `outputs`: what it writes or adds to.
  template <class F>
  void run(const OpCost& cost, std::initializer_list<Tensor> outputs, F&& task) {
    const ProfilerRange range(cost.name);
    if (device_.kind == DeviceKind::null) {
      if (ledger_ != nullptr) book(cost, 0);
    } else if (inspector_) {
      enqueue(std::forward<F>(task));
      synchronize();
      for (const Tensor& t : outputs)
        if (!t.empty()) inspector_(cost.name, t);
    } else if (ledger_ != nullptr) {
      enqueue_timed(cost, std::forward<F>(task));
    } else if (trace_ != nullptr) {
      enqueue([this, name = cost.name, task = std::forward<F>(task)] {
        const auto begin = std::chrono::steady_clock::now();
        task();
        trace_->push_back({name, begin, std::chrono::steady_clock::now()});
      });
    } else {
      enqueue(std::forward<F>(task));
    }
  }

  // What is not an op: on the CPU `task` runs when the stream gets there; on a GPU it is called at once, to launch.
  template <class F>
  void enqueue(F&& task) {
    if (cpu_) cpu_->enqueue(std::forward<F>(task));
    else if (device_.kind != DeviceKind::null) task();
  }

  // What `enqueue` puts on this stream. On a GPU the first time as it comes, which also loads what must be loaded, from
  // then on as a graph: one launch.
  template <class F>
  void replayed(Replay& replay, F&& enqueue) {
#ifdef TRAIN_GPT_CUDA
    if (gpu_ && device_.graphs && !inspector_ && ledger_ == nullptr && replay.times++ > 0) {
      if (!replay.graph) replay.graph.emplace(gpu_->capture(enqueue));
      return gpu_->launch(*replay.graph);
    }
#endif
    (void)replay;
    enqueue();
  }

  // The host waits until all enqueued work is done; rethrows the first error of that work.
  void synchronize() {
    if (cpu_) cpu_->synchronize();
#ifdef TRAIN_GPT_CUDA
    if (gpu_) gpu_->synchronize();
#endif
  }

  Event record() {
    if (cpu_) return cpu_->record();
#ifdef TRAIN_GPT_CUDA
    if (gpu_) return gpu_->record();
#endif
    Event event;
    event.signal();
    return event;
  }
  // where: see cuda::wait_for_event.
  void wait(const Event& event, [[maybe_unused]] const std::source_location& where = std::source_location::current()) {
    if (cpu_) cpu_->wait(event);
#ifdef TRAIN_GPT_CUDA
    if (gpu_ && event.gpu() != nullptr) gpu_->wait(*event.gpu(), where);
#endif
  }

#ifdef TRAIN_GPT_CUDA
  cuda::Queue& gpu() { return *gpu_; }
  cudaStream_t cuda() { return gpu_->stream(); }

  // What a library keeps from call to call on this stream, made when it is first asked for.
  template <class T>
  T& kept() {
    std::shared_ptr<void>& kept = kept_[typeid(T)];
    if (!kept) kept = std::make_shared<T>();
    return *static_cast<T*>(kept.get());
  }
#endif

  // Uploads of up to so many bytes will not allocate memory.
  void reserve_uploads([[maybe_unused]] int64_t bytes) {
#ifdef TRAIN_GPT_CUDA
    if (gpu_) gpu_->reserve(static_cast<size_t>(bytes));
#endif
  }

  // Asked while the host waits for a GPU's stream, and behind it; throws to end the waiting.
  void set_watch([[maybe_unused]] std::function<void()> watch) {
#ifdef TRAIN_GPT_CUDA
    if (gpu_) gpu_->set_watch(std::move(watch));
#endif
  }

  // From now on (until nullptr is set) called with each op's name and each tensor it wrote, before the next op begins.
  using Inspector = std::function<void(const char* op, const Tensor& output)>;
  void set_inspector(Inspector inspector) { inspector_ = std::move(inspector); }

  // From now on (until nullptr is set) each op is booked here. Call with the stream idle.
  void set_ledger(OpLedger* ledger) { ledger_ = ledger; }
  // The same for when each op ran on the CPU.
  void set_trace(std::vector<Span>* trace) { trace_ = trace; }

 private:
  template <class F>
  void enqueue_timed(const OpCost& cost, F&& task) {
#ifdef TRAIN_GPT_CUDA
    if (gpu_) return gpu_->timed(task, [this, cost](double seconds) { book(cost, seconds); });
#endif
    enqueue([this, cost, task = std::forward<F>(task)] {
      const auto begin = std::chrono::steady_clock::now();
      task();
      book(cost, std::chrono::duration<double>(std::chrono::steady_clock::now() - begin).count());
    });
  }

  void book(const OpCost& cost, double seconds) {
    OpTotals& totals = (*ledger_)[cost.name];
    ++totals.calls;
    totals.flops += cost.flops;
    totals.bytes += cost.bytes;
    totals.seconds += seconds;
  }

  Device device_;
  Arena& scratch_;
  OpLedger* ledger_ = nullptr;
  std::vector<Span>* trace_ = nullptr;
  Inspector inspector_;
  std::unique_ptr<CpuQueue> cpu_;
#ifdef TRAIN_GPT_CUDA
  std::map<std::type_index, std::shared_ptr<void>> kept_;
  std::unique_ptr<cuda::Queue> gpu_;
#endif
};

}  // namespace llmc
