// runtime_kernels.cpp: kernels in the runtime: names, limits, launches; and library calls on a stream.
#include <cxxabi.h>
#include <dlfcn.h>

#include <cstdlib>

#include "cuda_on_cpu/runtime/runtime.h"

using namespace cuda_on_cpu::detail;

namespace {

// What is known of a kernel.
struct Kernel {
  std::string name;
  size_t dynamic_shared_limit = cuda_on_cpu::max_static_shared;
};
Kernel& kernel_of(const void* function) {  // the mutex is held
  static auto* kernels = new std::unordered_map<const void*, Kernel>;
  return (*kernels)[function];
}

const std::string& name_of(const void* function) {
  std::string& known = kernel_of(function).name;
  if (!known.empty()) return known;
  Dl_info info{};  // works if the program exports its symbols: -rdynamic
  if (dladdr(function, &info) != 0 && info.dli_sname != nullptr && info.dli_saddr == function) {
    int status = 0;
    char* demangled = abi::__cxa_demangle(info.dli_sname, nullptr, nullptr, &status);
    known = status == 0 ? demangled : info.dli_sname;
    std::free(demangled);
  } else {
    known = "without a name (in an anonymous namespace)";
  }
  return known;
}

}  // namespace

cudaError_t cudaFuncGetName(const char** name, const void* function) {
  Lock lock;
  *name = name_of(function).c_str();
  return cudaSuccess;
}
cudaError_t cudaFuncGetAttributes(cudaFuncAttributes* attributes, const void*) {
  Lock lock;
  attributes->numRegs = runtime().kernel_registers;
  return runtime().has_code ? cudaSuccess : note(cudaErrorNoKernelImageForDevice);
}
cudaError_t cudaFuncSetAttribute(const void* function, cudaFuncAttribute attribute, int value) {
  Lock lock;
  if (attribute != cudaFuncAttributeMaxDynamicSharedMemorySize) return cudaSuccess;
  if (value < 0 || static_cast<size_t>(value) > cuda_on_cpu::max_shared) return note(cudaErrorInvalidValue);
  kernel_of(function).dynamic_shared_limit = static_cast<size_t>(value);
  return cudaSuccess;
}
cudaError_t cudaOccupancyMaxActiveBlocksPerMultiprocessor(int* blocks, const void* function, int threads,
                                                          size_t dynamic_shared) {
  cudaDeviceProp properties{};
  if (const cudaError_t status = cudaGetDeviceProperties(&properties, 0); status != cudaSuccess) return status;
  Lock lock;
  if (dynamic_shared > kernel_of(function).dynamic_shared_limit) {
    *blocks = 0;
    return cudaSuccess;
  }
  constexpr size_t most_blocks = 32, reserved = 1024;
  size_t most = std::min(most_blocks, properties.sharedMemPerMultiprocessor / (dynamic_shared + reserved));
  most = std::min(most, static_cast<size_t>(properties.maxThreadsPerMultiProcessor / threads));
  if (const int registers = runtime().kernel_registers; registers > 0)
    most = std::min(most, static_cast<size_t>(properties.regsPerBlock / (registers * threads)));
  *blocks = static_cast<int>(most);
  return cudaSuccess;
}

namespace cuda_on_cpu {

void set_kernel_registers(int registers) {
  Lock lock;
  runtime().kernel_registers = registers;
}

cudaError_t enqueue_kernel(const cudaLaunchConfig_t& config, const void* function, llmc::Work call) {
  Lock lock;
  if (current_device() == nullptr) return no_device();
  const dim3 &grid = config.gridDim, &block = config.blockDim;
  const auto product = [](const dim3& d) { return uint64_t{d.x} * d.y * d.z; };
  if (product(grid) == 0 || grid.x > 0x7fffffffu || grid.y > 65535 || grid.z > 65535 || product(block) == 0 ||
      product(block) > max_block_threads || block.z > 64)
    return note(cudaErrorInvalidConfiguration);
  if (config.dynamicSmemBytes > kernel_of(function).dynamic_shared_limit || config.numAttrs != 0)
    return note(cudaErrorInvalidValue);
  CUstream_st& stream = stream_of(config.stream);
  const char* name = ::name_of(function).c_str();
  const bool asked_for_more = kernel_of(function).dynamic_shared_limit > max_static_shared;
  const size_t limit = asked_for_more ? max_shared : max_static_shared;
  if (stream.device != current_device())
    throw Failure("kernel " + std::string(name) + " is launched on " + detail::name_of(stream) + " while device " +
                  std::to_string(host().device) + " is the current one");
  const auto launch =
      std::make_shared<const Launch>(Launch{name, grid, block, config.dynamicSmemBytes, limit, std::move(call)});
  return submit(stream, {.type = cudaGraphNodeTypeKernel, .opens_memory = true, .run = [launch] { run(*launch); }});
}

cudaError_t enqueue_call(cudaStream_t stream, std::function<void()> call) {
  Lock lock;
  return submit(stream_of(stream), {.type = cudaGraphNodeTypeKernel, .opens_memory = true, .run = std::move(call)});
}

}  // namespace cuda_on_cpu
