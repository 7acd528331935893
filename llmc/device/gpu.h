// gpu.h: the GPUs of this process, without CUDA types.
#pragma once
#include "core/environment.h"
#include "device/device.h"

namespace llmc {

#ifdef TRAIN_GPT_CUDNN
inline constexpr bool built_with_cudnn = true;
#else
inline constexpr bool built_with_cudnn = false;
#endif

// How many GPUs this process may use; if none, why.
struct VisibleGpus {
  int count = 0;
  std::string why_none;
};

struct GpuInfo {
  std::string name;  // "NVIDIA H200"
  int major = 0, minor = 0;
  int64_t total_bytes = 0;
  std::string bus_id;    // for NVML
  std::string software;  // driver and runtime
};

// GPU memory that no plan counts: what libraries allocate when first called.
inline constexpr int64_t gpu_reserve = 512 << 20;

// Environment variables for CUDA, and their values; the user's own win.
inline constexpr std::pair<const char*, const char*> gpu_settings[] = {
    // Queues between host and GPU: a rank has up to a dozen streams, and NCCL some of its own; those in one queue wait
    // for each other.
    {"CUDA_DEVICE_MAX_CONNECTIONS", "32"},
    // All kernels are loaded at the start: at its first launch a kernel's loading may wait for others on the GPU, and
    // takes memory after the arena has its own.
    {"CUDA_MODULE_LOADING", "EAGER"},
};
// Call before the first call of CUDA, and before other threads begin, which may read the environment.
inline void set_gpu_environment() {
  for (const auto& [name, value] : gpu_settings) setenv(name, value, 0);
}
// "CUDA_DEVICE_MAX_CONNECTIONS=32, CUDA_MODULE_LOADING=EAGER": the values in effect.
inline std::string gpu_environment() {
  std::string text;
  for (const auto& [name, value] : gpu_settings)
    text += formatted("{}{}={}", text.empty() ? "" : ", ", name, environment_variable(name).value_or(""));
  return text;
}

#ifdef TRAIN_GPT_CUDA
inline constexpr bool built_for_gpus = true;

namespace detail {

// The newest CUDA version that the driver supports, e.g. 13000; 0 without a driver.
inline int driver_version() {
  int version = 0;
  cudaDriverGetVersion(&version);
  return version;
}
inline int runtime_version() {
  int version = 0;
  cudaRuntimeGetVersion(&version);
  return version;
}
inline std::string cuda_version_text(int version) { return formatted("{}.{}", version / 1000, version % 1000 / 10); }
inline std::string cuda_versions() {
  const int driver = driver_version();
  return formatted("driver for CUDA {}, built with CUDA {}", driver == 0 ? "none" : cuda_version_text(driver),
                   cuda_version_text(runtime_version()));
}

// A driver runs programs built by any toolkit of its own major version or an earlier one ("CUDA Toolkit Release Notes",
// NVIDIA, table of minor version compatibility).
inline std::string driver_too_old() {
  const int built = runtime_version() / 1000;
  const char* const needs = built >= 13 ? "r580" : "r525";
  return formatted(
      "the driver is for CUDA {} and older, and this program was built with CUDA {}, which needs driver {} or "
      "newer (nvidia-smi shows the driver): update the driver, or build with a toolkit of the driver's "
      "version, `make DEVICE=cuda NVCC=/usr/local/cuda-{}/bin/nvcc`",
      cuda_version_text(driver_version()), cuda_version_text(runtime_version()), needs,
      cuda_version_text(driver_version()));
}

}  // namespace detail

inline VisibleGpus visible_gpus() {
  VisibleGpus gpus;
  const cudaError_t status = cudaGetDeviceCount(&gpus.count);
  if (status == cudaSuccess && gpus.count > 0) return gpus;
  cudaGetLastError();
  if (status == cudaErrorInsufficientDriver && detail::driver_version() > 0) return {0, detail::driver_too_old()};
  return {0, formatted("{} ({}): check that `nvidia-smi` works, and that CUDA_VISIBLE_DEVICES lists a GPU",
                       status == cudaSuccess           ? "no device"
                       : detail::driver_version() == 0 ? "no NVIDIA driver"
                                                       : cudaGetErrorString(status),
                       detail::cuda_versions())};
}

// Makes no context on that GPU: any visible one may be queried.
inline GpuInfo gpu_info(int gpu) {
  cudaDeviceProp properties;
  CUDA_CHECK(cudaGetDeviceProperties(&properties, gpu));
  char bus_id[32] = {};
  CUDA_CHECK(cudaDeviceGetPCIBusId(bus_id, sizeof bus_id, gpu));
  return {properties.name, properties.major,       properties.minor, static_cast<int64_t>(properties.totalGlobalMem),
          bus_id,          detail::cuda_versions()};
}

// Free bytes of a GPU of this process. Makes a context there, which takes a few hundred MB and stays.
inline int64_t free_memory_of_own(int gpu) {
  CUDA_CHECK(cudaSetDevice(gpu));
  size_t free = 0, total = 0;
  CUDA_CHECK(cudaMemGetInfo(&free, &total));
  return static_cast<int64_t>(free);
}

namespace detail {

template <class>
__global__ void code_probe() {}

}  // namespace detail

// Throws Error if the program has no code for one of these GPUs, all of them this process's own.
inline void require_code_for_gpus(const std::vector<int>& own) {
  for (const int gpu : own) {
    CUDA_CHECK(cudaSetDevice(gpu));
    cudaFuncAttributes attributes;
    const cudaError_t status = cudaFuncGetAttributes(&attributes, detail::code_probe<void>);
    if (status == cudaSuccess) continue;
    cudaGetLastError();
    const GpuInfo info = gpu_info(gpu);
    const std::string remedy =
        info.major < 8
            ? std::string("the kernels need sm_80 or later; use --device cpu")
            : formatted("build it with `make DEVICE=cuda ARCH=sm_{}{}`, or use --device cpu", info.major, info.minor);
    throw Error(formatted("this train_gpt has no code for GPU {}, {} (sm_{}{}): {}: {}", gpu, info.name, info.major,
                          info.minor, cudaGetErrorString(status), remedy));
  }
}
#else
inline constexpr bool built_for_gpus = false;

inline VisibleGpus visible_gpus() { return {0, "this train_gpt was built without CUDA: `make DEVICE=cuda`"}; }
inline GpuInfo gpu_info(int) { throw Error(visible_gpus().why_none); }
inline int64_t free_memory_of_own(int) { throw Error(visible_gpus().why_none); }
inline void require_code_for_gpus(const std::vector<int>&) {}
#endif

// Bytes that arenas may take on each of these GPUs, all of them this process's own: the least free memory, minus what
// libraries allocate. processes: how many share a GPU; the others may not have made their contexts yet.
inline int64_t gpu_memory(const std::vector<int>& own, int64_t processes) {
  int64_t least = std::numeric_limits<int64_t>::max();
  for (const int gpu : own) least = std::min(least, free_memory_of_own(gpu));
  return std::max<int64_t>(0, least - processes * gpu_reserve);
}

// The GPUs that this process sees, by the addresses of their slots.
inline std::string gpu_set() {
  std::string text;
  for (int gpu = 0; gpu < visible_gpus().count; ++gpu) text += gpu_info(gpu).bus_id + " ";
  return text;
}

}  // namespace llmc
