// cuda_api.cuh: RAII wrappers of the CUDA runtime that throw Error. Included only in GPU builds.
#pragma once
#include <cuda_runtime.h>

#include "core/check.h"

namespace llmc::cuda {

namespace detail {

// A kernel's error, which any later call may report.
inline bool is_late(cudaError_t status) {
  return status == cudaErrorIllegalAddress || status == cudaErrorLaunchFailure ||
         status == cudaErrorMisalignedAddress || status == cudaErrorAssert;
}
// "unspecified launch failure (cudaErrorLaunchFailure)"
inline std::string describe(cudaError_t status) {
  return formatted(
      "{} ({}){}", cudaGetErrorString(status), cudaGetErrorName(status),
      is_late(status) ? ", from a kernel launched earlier: set CUDA_LAUNCH_BLOCKING=1 to find out which" : "");
}
// A kernel that fails in the middle of a run may be the GPU's fault: the next start may go well.
[[noreturn]] inline void cuda_failed(cudaError_t status, const char* call, const char* file, int line) {
  throw Error(formatted("{} failed: {} at {}:{}", call, describe(status), file, line),
              is_late(status) ? ExitStatus::lost : ExitStatus::refused);
}

}  // namespace detail

// Calls the CUDA runtime; throws Error on failure.
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
    host = cudaEventDisableTiming | cudaEventBlockingSync,  // waiting sleeps
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

// Milliseconds between two completed timing events.
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
    throw Error(formatted(
        "GPU {} has {:.2f} GiB free of {:.2f}, but {:.2f} GiB are needed in one allocation: stop other programs "
        "on it, lower --batch-size, or see what --plan suggests",
        gpu, static_cast<double>(free) / (1 << 30), static_cast<double>(total) / (1 << 30),
        static_cast<double>(bytes) / (1 << 30)));
  }
  CUDA_CHECK(status);
  return static_cast<std::byte*>(memory);
}
inline void release(std::byte* memory) { cudaFree(memory); }
// Sets every byte before it returns. Uses its own stream: a device-wide wait would invalidate another rank's capture.
inline void fill_now(std::byte* memory, int value, int64_t bytes) {
  cudaStream_t stream = nullptr;
  CUDA_CHECK(cudaStreamCreateWithFlags(&stream, cudaStreamNonBlocking));
  const cudaError_t begun = cudaMemsetAsync(memory, value, static_cast<size_t>(bytes), stream);
  const cudaError_t done = cudaStreamSynchronize(stream);
  cudaStreamDestroy(stream);
  CUDA_CHECK(begun);
  CUDA_CHECK(done);
}

// Pinned host memory, for asynchronous copies.
class PinnedMemory {
 public:
  explicit PinnedMemory(size_t bytes) : bytes_(bytes) {
    void* memory = nullptr;
    const cudaError_t status = cudaMallocHost(&memory, bytes);
    if (status != cudaSuccess) cudaGetLastError();  // or a later call would report it, if the caller goes on without
    CHECK(status == cudaSuccess,
          "cannot pin {} bytes of host memory for copies to the GPU: {}; raise `ulimit -l` or the "
          "container's memory limit",
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
