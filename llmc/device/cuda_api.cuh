// cuda_api.cuh: the CUDA runtime as the rest of the trainer sees it: errors become ours, what is created is owned.
// Included only where the trainer is built for GPUs.
#pragma once
#include <cuda_runtime.h>

#include <cstddef>
#include <memory>
#include <source_location>
#include <utility>

#include "core/check.h"

namespace llmc::cuda {

namespace detail {

[[noreturn]] inline void cuda_failed(cudaError_t status, const char* call, const char* file, int line) {
  throw Error(
      formatted("{} failed: {} ({}) at {}:{}", call, cudaGetErrorString(status), cudaGetErrorName(status), file, line));
}

}  // namespace detail

// A call of the CUDA runtime; throws Error where it does not succeed.
#define CUDA_CHECK(call)                                                     \
  do {                                                                       \
    if (const cudaError_t status_ = (call); status_ != cudaSuccess)          \
      ::llmc::cuda::detail::cuda_failed(status_, #call, __FILE__, __LINE__); \
  } while (false)

// A point in a stream's work, with or without a time.
class Event {
 public:
  enum class Timing : uint8_t { no, yes };
  explicit Event(Timing timing = Timing::no) {
    CUDA_CHECK(cudaEventCreateWithFlags(&event_, timing == Timing::yes ? cudaEventDefault : cudaEventDisableTiming));
  }
  ~Event() {
    if (event_ != nullptr) cudaEventDestroy(event_);
  }
  Event(Event&& other) noexcept : event_(std::exchange(other.event_, nullptr)) {}
  Event& operator=(Event&& other) noexcept {
    std::swap(event_, other.event_);
    return *this;
  }
  operator cudaEvent_t() const { return event_; }

 private:
  cudaEvent_t event_ = nullptr;
};

// What is enqueued on the stream from now on runs behind the event. where: the place in our source that asks for it,
// which tests without a GPU switch off.
template <class Where>
void wait_for_event(cudaStream_t stream, cudaEvent_t event, [[maybe_unused]] const Where& where) {
  if constexpr (requires { cudaStreamWaitEvent(stream, event, 0, where); })
    CUDA_CHECK(cudaStreamWaitEvent(stream, event, 0, where));
  else CUDA_CHECK(cudaStreamWaitEvent(stream, event, 0));
}

// Milliseconds between two events with times that have happened.
inline float milliseconds(const Event& begin, const Event& end) {
  float ms = 0;
  CUDA_CHECK(cudaEventElapsedTime(&ms, begin, end));
  return ms;
}

// Device memory of this GPU, for the calling host thread.
inline std::byte* allocate(int gpu, size_t bytes) {
  CUDA_CHECK(cudaSetDevice(gpu));
  void* memory = nullptr;
  const cudaError_t status = cudaMalloc(&memory, bytes);
  if (status == cudaErrorMemoryAllocation) {
    cudaGetLastError();
    size_t free = 0, total = 0;
    CUDA_CHECK(cudaMemGetInfo(&free, &total));
    throw Error(
        formatted("GPU {} has {:.2f} GiB free of {:.2f}, and {:.2f} GiB are needed in one piece: end other programs "
                  "on it, lower --batch-size, or see what --plan suggests",
                  gpu, static_cast<double>(free) / (1 << 30), static_cast<double>(total) / (1 << 30),
                  static_cast<double>(bytes) / (1 << 30)));
  }
  CUDA_CHECK(status);
  return static_cast<std::byte*>(memory);
}
inline void release(std::byte* memory) { cudaFree(memory); }
// Every byte, before this returns.
inline void fill_now(std::byte* memory, int value, int64_t bytes) {
  CUDA_CHECK(cudaMemset(memory, value, static_cast<size_t>(bytes)));
  CUDA_CHECK(cudaDeviceSynchronize());
}

// Host memory that the GPU copies from and to by itself.
class PinnedMemory {
 public:
  explicit PinnedMemory(size_t bytes) : bytes_(bytes) {
    void* memory = nullptr;
    CUDA_CHECK(cudaMallocHost(&memory, bytes));
    memory_.reset(static_cast<std::byte*>(memory));
  }
  std::byte* data() const { return memory_.get(); }
  size_t size() const { return bytes_; }

 private:
  struct Free {
    void operator()(std::byte* memory) const { cudaFreeHost(memory); }
  };
  size_t bytes_;
  std::unique_ptr<std::byte, Free> memory_;
};

}  // namespace llmc::cuda
