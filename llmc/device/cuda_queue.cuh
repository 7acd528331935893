// cuda_queue.cuh: a GPU stream. Work is launched at once, by the calling host thread; host callbacks run when that
// thread next waits for the stream. Included only in GPU builds.
#pragma once
#include <chrono>
#include <deque>
#include <list>
#include <thread>

#include "core/clock.h"
#include "device/cpu_queue.h"
#include "device/cuda_api.cuh"

namespace llmc::cuda {

// Work captured once, launched as a whole.
class Graph {
 public:
  explicit Graph(cudaGraph_t captured) {
    const cudaError_t status = cudaGraphInstantiate(&graph_, captured, 0);
    cudaGraphDestroy(captured);
    CUDA_CHECK(status);
  }
  ~Graph() {
    if (graph_ != nullptr) cudaGraphExecDestroy(graph_);
  }
  Graph(Graph&& other) noexcept : graph_(std::exchange(other.graph_, nullptr)) {}
  Graph& operator=(Graph&&) = delete;
  operator cudaGraphExec_t() const { return graph_; }

 private:
  cudaGraphExec_t graph_ = nullptr;
};

class Queue {
  // Pinned memory for a copy; free again once the copy is done and nobody uses its contents.
  struct Staging {
    PinnedMemory memory;
    Event copied = Event(Event::For::host);
    bool held = false;
  };

 public:
  explicit Queue(int gpu, bool comes_first = false) {
    CUDA_CHECK(cudaSetDevice(gpu));                                  // per host thread: each rank is one
    CUDA_CHECK(cudaSetDeviceFlags(cudaDeviceScheduleBlockingSync));  // waiting yields the processor
    int least = 0, greatest = 0;
    CUDA_CHECK(cudaDeviceGetStreamPriorityRange(&least, &greatest));
    CUDA_CHECK(cudaStreamCreateWithPriority(&stream_, cudaStreamNonBlocking, comes_first ? greatest : least));
    reserve(least_staging);
  }
  ~Queue() {
    cudaStreamSynchronize(stream_);
    cudaStreamDestroy(stream_);
  }
  Queue(const Queue&) = delete;
  Queue& operator=(const Queue&) = delete;

  cudaStream_t stream() const { return stream_; }

  // Allocates pinned memory for copies of up to `bytes` bytes. Otherwise the first copies allocate it inside a step,
  // where that may wait for kernels that wait for other ranks.
  void reserve(size_t bytes) {
    auto fit =
        std::count_if(staging_.begin(), staging_.end(), [&](const Staging& s) { return s.memory.size() >= bytes; });
    for (; fit < most_staging; ++fit) staging_.push_back({.memory = PinnedMemory(bytes)});
  }

  // Called repeatedly while the host waits for this stream, and once after; throws to abort the wait.
  void set_watch(std::function<void()> watch) { watch_ = std::move(watch); }

  void synchronize() {
    if (watch_) wait_watching([&] { return cudaStreamQuery(stream_); });
    else CUDA_CHECK(cudaStreamSynchronize(stream_));
    while (!left_to_host_.empty()) {
      const auto task = std::move(left_to_host_.front());
      left_to_host_.pop_front();
      task();
    }
  }

  llmc::Event record() { return llmc::Event(recorded(Event::For::streams)); }
  // An event whose time can be compared with that of others of this GPU.
  Event record_time() { return recorded(Event::For::timing); }
  // Work enqueued from now on runs after the event. where: the calling line, so that tests without a GPU can disable
  // single waits.
  template <class Where>
  void wait(const Event& event, [[maybe_unused]] const Where& where) {
    if constexpr (requires { cudaStreamWaitEvent(stream_, event, 0, where); })
      CUDA_CHECK(cudaStreamWaitEvent(stream_, event, 0, where));
    else CUDA_CHECK(cudaStreamWaitEvent(stream_, event, 0));
  }

  // Copies `bytes` bytes from `from` (host memory, which may change as soon as this returns) to `to`.
  void upload(void* to, const void* from, size_t bytes) {
    if (bytes == 0) return;
    Staging& staging = staging_for(bytes);
    std::memcpy(staging.memory.data(), from, bytes);
    CUDA_CHECK(cudaMemcpyAsync(to, staging.memory.data(), bytes, cudaMemcpyHostToDevice, stream_));
    CUDA_CHECK(cudaEventRecord(staging.copied, stream_));
  }

  // A device-to-host copy in flight.
  class Arrival {
   public:
    Arrival(Queue& queue, Staging& staging) : queue_(queue), staging_(staging) { staging_.held = true; }
    ~Arrival() { staging_.held = false; }
    Arrival(const Arrival&) = delete;
    Arrival& operator=(const Arrival&) = delete;
    const std::byte* wait() const {
      queue_.wait_on_host(staging_.copied);
      return staging_.memory.data();
    }

   private:
    Queue& queue_;
    Staging& staging_;
  };
  std::unique_ptr<Arrival> download(const void* from, size_t bytes) {
    Staging& staging = staging_for(bytes);
    CUDA_CHECK(cudaMemcpyAsync(staging.memory.data(), from, bytes, cudaMemcpyDeviceToHost, stream_));
    CUDA_CHECK(cudaEventRecord(staging.copied, stream_));
    return std::make_unique<Arrival>(*this, staging);
  }

  // f(bytes on the host) is called by the host thread that waits for this stream.
  void download(const void* from, size_t bytes, std::function<void(const std::byte*)> f) {
    if (left_to_host_.size() >= most_downloads) synchronize();
    left_to_host_.push_back(
        [arrival = std::shared_ptr(download(from, bytes)), f = std::move(f)] { f(arrival->wait()); });
  }

  // Captures as one graph what `enqueue` puts on this stream and on streams forked from it and joined again; runs
  // nothing now.
  template <class F>
  Graph capture(F&& enqueue) {
    CUDA_CHECK(cudaStreamBeginCapture(stream_, cudaStreamCaptureModeThreadLocal));
    cudaGraph_t captured = nullptr;
    try {
      enqueue();
    } catch (...) {
      cudaStreamEndCapture(stream_, &captured);
      if (captured != nullptr) cudaGraphDestroy(captured);
      throw;
    }
    const cudaError_t status = cudaStreamEndCapture(stream_, &captured);
    CHECK(status == cudaSuccess,
          "the work of a micro-batch cannot be captured in a CUDA graph: {}: use --cuda-graphs off",
          detail::describe(status));
    return Graph(captured);
  }
  // Is what was captured so far still a valid graph? require_capture() throws if it is not.
  bool captures() const {
    cudaStreamCaptureStatus status = cudaStreamCaptureStatusNone;
    CUDA_CHECK(cudaStreamIsCapturing(stream_, &status));
    return status == cudaStreamCaptureStatusActive;
  }
  void require_capture() const { CHECK(captures(), "{}", detail::describe(cudaErrorStreamCaptureInvalidated)); }
  void launch(const Graph& graph) { CUDA_CHECK(cudaGraphLaunch(graph, stream_)); }

  // f(GPU seconds of what `work` launches) is called by the host thread that waits for this stream.
  void timed(const Work& work, std::function<void(double seconds)> f) {
    if (left_to_host_.size() >= most_timed) synchronize();
    auto begin = std::make_shared<Event>(Event::For::timing), end = std::make_shared<Event>(Event::For::timing);
    CUDA_CHECK(cudaEventRecord(*begin, stream_));
    work();
    CUDA_CHECK(cudaEventRecord(*end, stream_));
    left_to_host_.push_back([=, f = std::move(f)] { f(milliseconds(*begin, *end) * 1e-3); });
  }

 private:
  Event recorded(Event::For use) {
    Event event(use);
    CUDA_CHECK(cudaEventRecord(event, stream_));
    return event;
  }
  // status(): the state of what is waited for.
  template <class F>
  void wait_watching(F&& status) {
    cudaError_t now;
    while ((now = status()) == cudaErrorNotReady) {
      cudaGetLastError();  // "not ready" is not an error
      watch_();
      std::this_thread::sleep_for(std::chrono::microseconds(50));
    }
    CUDA_CHECK(now);
    watch_();
  }
  // First looks without a pause: a thread that sleeps wakes up tens of microseconds late, as long as the GPU idles
  // where it waits for the host, as for the numbers of rows that go to experts.
  void wait_on_host(const Event& event) {
    for (const auto end = Clock::now() + spin; Clock::now() < end;) {
      const cudaError_t status = cudaEventQuery(event);
      if (status == cudaErrorNotReady) {
        cudaGetLastError();  // "not ready" is not an error
        continue;
      }
      CUDA_CHECK(status);
      if (watch_) watch_();
      return;
    }
    if (watch_) wait_watching([&] { return cudaEventQuery(event); });
    else CUDA_CHECK(cudaEventSynchronize(event));
  }

  Staging& staging_for(size_t bytes) {
    Staging* first_fit = nullptr;
    int fit = 0;
    for (Staging& s : staging_) {
      if (s.held || s.memory.size() < bytes) continue;
      const cudaError_t status = cudaEventQuery(s.copied);
      if (status == cudaSuccess) return s;
      if (status != cudaErrorNotReady) CUDA_CHECK(status);
      cudaGetLastError();  // "not ready" is not an error
      if (fit++ == 0) first_fit = &s;
    }
    if (fit < most_staging)
      return staging_.emplace_back(Staging{.memory = PinnedMemory(std::max(bytes, least_staging))});
    wait_on_host(first_fit->copied);
    return *first_fit;
  }

  static constexpr size_t most_downloads = 64, most_timed = 4096, least_staging = 64 << 10;
  static constexpr int most_staging = 8;
  static constexpr std::chrono::microseconds spin{100};

  cudaStream_t stream_ = nullptr;
  std::function<void()> watch_;
  std::list<Staging> staging_;
  std::deque<std::function<void()>> left_to_host_;
};

}  // namespace llmc::cuda
