// cuda_queue.h: a stream of a GPU. What is enqueued is launched at once, by the host thread that calls; what the host
// is to do behind it is done when that thread next waits. Included only where the trainer is built for GPUs.
#pragma once
#include <algorithm>
#include <cstring>
#include <deque>
#include <functional>
#include <list>
#include <memory>
#include <utility>
#include <vector>

#include "device/cpu_queue.h"
#include "device/cuda_api.h"

namespace llmc::cuda {

class Queue {
 public:
  explicit Queue(int gpu) {
    CUDA_CHECK(cudaSetDevice(gpu));  // of this host thread: each rank is one
    CUDA_CHECK(cudaStreamCreateWithFlags(&stream_, cudaStreamNonBlocking));
  }
  ~Queue() {
    cudaStreamSynchronize(stream_);
    cudaStreamDestroy(stream_);
  }
  Queue(const Queue&) = delete;
  Queue& operator=(const Queue&) = delete;

  cudaStream_t stream() const { return stream_; }

  void synchronize() {
    CUDA_CHECK(cudaStreamSynchronize(stream_));
    while (!left_to_host_.empty()) {
      const auto task = std::move(left_to_host_.front());
      left_to_host_.pop_front();
      task();
    }
  }

  llmc::Event record() {
    Event event;
    CUDA_CHECK(cudaEventRecord(event, stream_));
    return llmc::Event(std::move(event));
  }
  void wait(const Event& event) { CUDA_CHECK(cudaStreamWaitEvent(stream_, event, 0)); }

  // to = from, bytes of the host that may change as soon as this returns.
  void upload(void* to, const void* from, size_t bytes) {
    if (bytes == 0) return;
    Staging& staging = staging_for(bytes);
    std::memcpy(staging.memory.data(), from, bytes);
    CUDA_CHECK(cudaMemcpyAsync(to, staging.memory.data(), bytes, cudaMemcpyHostToDevice, stream_));
    CUDA_CHECK(cudaEventRecord(staging.copied, stream_));
  }

  // f(bytes on the host) is called by the host thread that waits for this stream.
  void download(const void* from, size_t bytes, std::function<void(const std::byte*)> f) {
    if (left_to_host_.size() >= most_downloads) synchronize();
    Staging& staging = staging_for(bytes);
    staging.held = true;
    CUDA_CHECK(cudaMemcpyAsync(staging.memory.data(), from, bytes, cudaMemcpyDeviceToHost, stream_));
    CUDA_CHECK(cudaEventRecord(staging.copied, stream_));
    left_to_host_.push_back([&staging, f = std::move(f)] {
      staging.held = false;
      f(staging.memory.data());
    });
  }

  // f(seconds on the GPU of what `work` launches) is called by the host thread that waits for this stream.
  template <class Work>
  void timed(Work&& work, std::function<void(double seconds)> f) {
    if (left_to_host_.size() >= most_timed) synchronize();
    auto begin = std::make_shared<Event>(Event::Timing::yes), end = std::make_shared<Event>(Event::Timing::yes);
    CUDA_CHECK(cudaEventRecord(*begin, stream_));
    work();
    CUDA_CHECK(cudaEventRecord(*end, stream_));
    left_to_host_.push_back([=, f = std::move(f)] { f(milliseconds(*begin, *end) * 1e-3); });
  }

 private:
  // Pinned memory of a copy; free again when the copy is done and nobody holds what it brought.
  struct Staging {
    PinnedMemory memory;
    Event copied = Event();
    bool held = false;
  };
  Staging& staging_for(size_t bytes) {
    Staging* first_fit = nullptr;
    int fit = 0;
    for (Staging& s : staging_) {
      if (s.held || s.memory.size() < bytes) continue;
      const cudaError_t status = cudaEventQuery(s.copied);
      if (status == cudaSuccess) return s;
      if (status != cudaErrorNotReady) CUDA_CHECK(status);
      cudaGetLastError();  // that it is not ready is no error
      if (fit++ == 0) first_fit = &s;
    }
    if (fit < most_staging)
      return staging_.emplace_back(Staging{.memory = PinnedMemory(std::max(bytes, least_staging))});
    CUDA_CHECK(cudaEventSynchronize(first_fit->copied));
    return *first_fit;
  }

  static constexpr size_t most_downloads = 64, most_timed = 4096, least_staging = 64 << 10;
  static constexpr int most_staging = 8;

  cudaStream_t stream_ = nullptr;
  std::list<Staging> staging_;
  std::deque<std::function<void()>> left_to_host_;
};

}  // namespace llmc::cuda
