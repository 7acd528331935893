// cuda_api.cuh: the CUDA runtime as the rest of the trainer sees it: errors become ours, what is created is owned.
// Included only where the trainer is built for GPUs.
#pragma once
#include <cuda_runtime.h>

#include <cstddef>
#include <memory>
#include <source_location>
#include <string>
#include <utility>

#include "core/check.h"

namespace llmc::cuda {

namespace detail {

// "unspecified launch failure (cudaErrorLaunchFailure)". What a kernel does wrong is told by a later call, any one.
inline std::string describe(cudaError_t status) {
  const bool late = status == cudaErrorIllegalAddress || status == cudaErrorLaunchFailure ||
                    status == cudaErrorMisalignedAddress || status == cudaErrorAssert;
  return formatted("{} ({}){}", cudaGetErrorString(status), cudaGetErrorName(status),
                   late ? ", of a kernel launched earlier: CUDA_LAUNCH_BLOCKING=1 in the environment tells which" : "");
}
[[noreturn]] inline void cuda_failed(cudaError_t status, const char* call, const char* file, int line) {
  throw Error(formatted("{} failed: {} at {}:{}", call, describe(status), file, line));
}

}  // namespace detail

// A call of the CUDA runtime; throws Error where it does not succeed.
#define CUDA_CHECK(call)                                                     \
  do {                                                                       \
    if (const cudaError_t status_ = (call); status_ != cudaSuccess)          \
      ::llmc::cuda::detail::cuda_failed(status_, #call, __FILE__, __LINE__); \
  } while (false)

// A point in a stream's work.
class Event {
 public:
  enum class For : unsigned {
    streams = cudaEventDisableTiming,
    host = cudaEventDisableTiming | cudaEventBlockingSync,  // which sleeps while it waits
    timing = cudaEventDefault,
  };
  explicit Event(For use = For::streams) { CUDA_CHECK(cudaEventCreateWithFlags(&event_, static_cast<unsigned>(use))); }
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
// Every byte, before this returns. On a stream of its own: to wait for the device would spoil what another rank
// captures.
inline void fill_now(std::byte* memory, int value, int64_t bytes) {
  cudaStream_t stream = nullptr;
  CUDA_CHECK(cudaStreamCreateWithFlags(&stream, cudaStreamNonBlocking));
  const cudaError_t begun = cudaMemsetAsync(memory, value, static_cast<size_t>(bytes), stream);
  const cudaError_t done = cudaStreamSynchronize(stream);
  cudaStreamDestroy(stream);
  CUDA_CHECK(begun);
  CUDA_CHECK(done);
}

// Host memory that the GPU copies from and to by itself.
class PinnedMemory {
 public:
  explicit PinnedMemory(size_t bytes) : bytes_(bytes) {
    void* memory = nullptr;
    const cudaError_t status = cudaMallocHost(&memory, bytes);
    CHECK(status == cudaSuccess,
          "{} bytes of the host's memory cannot be locked for copies to the GPU: {}; raise `ulimit -l` or the "
          "container's limit of memory",
          bytes, detail::describe(status));
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
