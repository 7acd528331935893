// launch.cuh: launching kernels and declaring shared memory.
// Kernel sources compile with nvcc, and with a C++ compiler against test/cuda_on_cpu/, which runs them on a CPU. The
// differences are confined to this file, vec.cuh, mma.cuh and compiled_for_warpgroups, chosen by __CUDACC__. All
// kernels are templates, if need be of nothing (template <int = 0>), or each object file would have them.
#pragma once
#include "core/shape.h"
#include "device/cuda_api.cuh"

namespace llmc::cuda {

// `name`: a shared array of N elements of T per block, 16-byte aligned, uninitialised.
// (As bytes, because CUDA rejects shared arrays of types with default member initialisers, such as bf16.)
#ifdef __CUDACC__
#define SHARED(T, name, N)                                              \
  __shared__ __align__(16) unsigned char name##_bytes[sizeof(T) * (N)]; \
  T(&name)[N] = reinterpret_cast<T(&)[N]>(name##_bytes)
#else
#define SHARED(T, name, N) T(&name)[N] = ::cuda_on_cpu::shared_array<T, (N), decltype([] {})>()
#endif

// `name`: a pointer of type T* to the dynamic shared memory; aligned to 128 bytes, or to 1024 for tiles of a warpgroup.
#ifdef __CUDACC__
#define DYN_SHARED(T, name)                                        \
  extern __shared__ __align__(128) unsigned char dynamic_shared[]; \
  T* name = reinterpret_cast<T*>(dynamic_shared)
#define DYN_SHARED_TILES(T, name)                                         \
  extern __shared__ __align__(1024) unsigned char dynamic_shared_tiles[]; \
  T* name = reinterpret_cast<T*>(dynamic_shared_tiles)
#else
#define DYN_SHARED(T, name) T* name = static_cast<T*>(::cuda_on_cpu::dynamic_shared_memory())
#define DYN_SHARED_TILES DYN_SHARED
#endif

inline constexpr int warp_size = 32;
// Dynamic shared memory of a block, in bytes: the default limit, and the limit that sm_90 allows on request.
inline constexpr int64_t default_shared_bytes = 48 << 10, max_shared_bytes = 227 << 10;
// Upper bound for the static shared arrays of any kernel that uses dynamic shared memory.
inline constexpr int64_t most_static_shared_bytes = 2 << 10;

// An attribute of the current device.
inline int64_t device_attribute(cudaDeviceAttr attribute) {
  int device = 0, value = 0;
  CUDA_CHECK(cudaGetDevice(&device));
  CUDA_CHECK(cudaDeviceGetAttribute(&value, attribute, device));
  return value;
}
// The largest shared memory per block on the current device, in bytes.
inline int64_t device_shared_bytes() { return device_attribute(cudaDevAttrMaxSharedMemoryPerBlockOptin); }

// Lets a kernel have this much dynamic shared memory. Static arrays count too. All launches use one limit: ranks in
// other threads may set it at the same time.
inline cudaError_t allow_shared_bytes(const void* kernel, int64_t shared_bytes) {
  if (shared_bytes <= default_shared_bytes - most_static_shared_bytes) return cudaSuccess;
  const int64_t limit = std::max(shared_bytes, device_shared_bytes() - most_static_shared_bytes);
  return cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, static_cast<int>(limit));
}

// The size of a grid or block, from numbers that fit.
struct Grid : dim3 {
  Grid(int64_t x, int64_t y = 1, int64_t z = 1)
      : dim3(static_cast<unsigned>(x), static_cast<unsigned>(y), static_cast<unsigned>(z)) {}
  Grid(const dim3& size) : dim3(size) {}
  bool empty() const { return x == 0 || y == 0 || z == 0; }
};

// Says which launch it was and, if it asked for too much shared memory or too many blocks, what to do.
[[noreturn]] inline void launch_failed(const void* kernel, Grid grid, Grid block, int64_t shared_bytes,
                                       cudaError_t status) {
  const char* name = nullptr;
  if (cudaFuncGetName(&name, kernel) != cudaSuccess) name = "a kernel";
  cudaGetLastError();  // clear the error: it is reported here
  // In the y and z dimensions of a grid.
  constexpr unsigned most_blocks = 65535;
  const bool above_default = shared_bytes > default_shared_bytes - most_static_shared_bytes;
  const int64_t most_shared = above_default ? device_shared_bytes() : default_shared_bytes;
  throw Error(formatted(
      "launching {} with a grid of {} x {} x {}, {} x {} x {} threads and {} bytes of dynamic shared "
      "memory failed: {}{}",
      name, grid.x, grid.y, grid.z, block.x, block.y, block.z, shared_bytes, detail::describe(status),
      shared_bytes > most_shared - most_static_shared_bytes
          ? formatted("; a block on this GPU has {}, of which fixed arrays may take {}: use --dtype bf16 (heads "
                      "of up to 128), or a model with fewer channels or smaller heads",
                      most_shared, most_static_shared_bytes)
      : std::max(grid.y, grid.z) > most_blocks
          ? formatted("; the y and z dimensions of a grid are at most {}: use a smaller --batch-size or "
                      "--seq-len",
                      most_blocks)
          : ""));
}

// Enqueues kernel<<<grid, block, shared_bytes, stream>>>(arguments...). An empty grid is a no-op.
template <class... Parameters, class... Arguments>
void launch(void (*kernel)(Parameters...), Grid grid, Grid block, int64_t shared_bytes, cudaStream_t stream,
            Arguments&&... arguments) {
  if (grid.empty()) return;
  const auto function = reinterpret_cast<const void*>(kernel);
  const cudaLaunchConfig_t config = {grid, block, static_cast<size_t>(shared_bytes), stream, nullptr, 0};
  cudaError_t status = allow_shared_bytes(function, shared_bytes);
  if (status == cudaSuccess) status = cudaLaunchKernelEx(&config, kernel, std::forward<Arguments>(arguments)...);
  if (status != cudaSuccess) launch_failed(function, grid, block, shared_bytes, status);
}

// A thread for each of n items; item_of_thread() may be past the last.
inline constexpr int item_threads = 256;
template <class... Parameters, class... Arguments>
void launch_each(void (*kernel)(Parameters...), int64_t n, cudaStream_t stream, Arguments&&... arguments) {
  launch(kernel, ceil_div(n, item_threads), item_threads, 0, stream, std::forward<Arguments>(arguments)...);
}
__device__ inline int64_t item_of_thread() { return static_cast<int64_t>(blockIdx.x) * blockDim.x + threadIdx.x; }

}  // namespace llmc::cuda
