// runtime_devices.cpp: errors, the emulated devices, and per-host-thread state.
#include <pthread.h>
#include <unistd.h>

#include <algorithm>
#include <cstdio>
#include <cstdlib>
#include <fstream>
#include <sstream>
#include <utility>
#include <vector>

#include "cuda_on_cpu/runtime/runtime.h"

namespace cuda_on_cpu::detail {

// The machine has EMULATED_GPUS of them, or one. As in CUDA, CUDA_VISIBLE_DEVICES lists those that this process sees,
// up to the first number that is none.
static std::vector<int> visible_gpus() {
  const char* const count = std::getenv("EMULATED_GPUS");
  const int gpus = count != nullptr ? std::atoi(count) : 1;
  std::vector<int> seen;
  const char* const list = std::getenv("CUDA_VISIBLE_DEVICES");
  if (list == nullptr) {
    for (int gpu = 0; gpu < gpus; ++gpu) seen.push_back(gpu);
    return seen;
  }
  std::istringstream in(list);
  for (int gpu = 0; in >> gpu && gpu >= 0 && gpu < gpus; in.ignore()) seen.push_back(gpu);
  return seen;
}

Runtime& runtime() {
  static Runtime* the_runtime = [] {
    auto* r = new Runtime;  // never destroyed: destructors of tests may still free memory
    for (const int gpu : visible_gpus()) {
      r->devices.push_back(std::make_unique<Device>(static_cast<int>(r->devices.size()), size_t{4} << 30, gpu));
      r->streams.insert(r->devices.back()->stream0.get());
    }
    return r;
  }();
  return *the_runtime;
}

Device::Device(int number_, size_t bytes_, int gpu_)
    : number(number_), gpu(gpu_ < 0 ? number_ : gpu_), bytes(bytes_), stream0(std::make_unique<CUstream_st>()) {
  stream0->device = this;
  streams.push_back(stream0.get());
}
Device::~Device() { destroy_context(stream0->context); }

Host::Host() : thread(gettid()) {
  static const int renamed_by_fork = pthread_atfork(nullptr, nullptr, [] { host().thread = gettid(); });
  (void)renamed_by_fork;
  const std::lock_guard lock(runtime().mutex);
  runtime().hosts.insert(this);
}
Host::~Host() {
  const std::lock_guard lock(runtime().mutex);
  runtime().hosts.erase(this);
}
Host& host() {
  thread_local Host the_host;
  return the_host;
}

Lock::Lock() {
  if (host().in_task) throw Failure("a task of a stream, such as a host function, must not call the CUDA runtime");
  lock();
}
void Lock::lock() {
  Unordered unordered;
  host().enters = true;
  runtime().mutex.lock();
  host().enters = false;
}
void Lock::unlock() {
  Unordered unordered;
  runtime().mutex.unlock();
}
void Lock::wait(std::chrono::duration<double> longest) {
  Unordered unordered;
  std::unique_lock held(runtime().mutex, std::adopt_lock);
  ++runtime().blocked;
  // By the system clock, because ThreadSanitizer intercepts that wait.
  runtime().changed.wait_until(held, std::chrono::system_clock::now() +
                                         std::chrono::duration_cast<std::chrono::system_clock::duration>(longest));
  --runtime().blocked;
  held.release();
}

cudaError_t note(cudaError_t status) {
  if (status != cudaSuccess) host().last_error = status;
  return status;
}
size_t free_bytes(const Device& device) {
  const size_t used = device.bytes_used + device.communicators.taken + runtime().context_bytes;
  return device.bytes - std::min(used, device.bytes);
}
void make_context(Device& device) {
  if (std::exchange(device.has_context, true)) return;
  if (const char* const log = std::getenv("EMULATED_CONTEXTS"); log != nullptr) {
    std::ofstream(log, std::ios::app) << std::to_string(getpid()) + " " + std::to_string(device.gpu) + "\n";
  }
}
Device* current_device() {
  const auto number = static_cast<size_t>(host().device);
  if (number >= runtime().devices.size()) return nullptr;
  make_context(*runtime().devices[number]);
  return runtime().devices[number].get();
}
cudaError_t no_device() { return note(runtime().devices.empty() ? runtime().why_no_device : cudaErrorInvalidDevice); }

CUstream_st& stream_of(cudaStream_t stream) {
  if (stream == nullptr) {
    if (Device* device = current_device()) return *device->stream0;
    throw Failure("the default stream of device " + std::to_string(host().device) + " is used, but it does not exist");
  }
  if (runtime().streams.count(stream) == 0) throw Failure("a stream is used that was never created, or is destroyed");
  return *stream;
}
std::string name_of(const CUstream_st& stream) {
  const std::string device = " of device " + std::to_string(stream.device->number);
  return (stream.number == 0 ? "the default stream" : "stream " + std::to_string(stream.number)) + device;
}

}  // namespace cuda_on_cpu::detail

using namespace cuda_on_cpu::detail;

// ---- Errors ---------------------------------------------------------------------------------------------------------

namespace {

struct ErrorText {
  cudaError_t error;
  const char *name, *text;
};
#define ERROR_TEXT(error, text) \
  { error, #error, text }
constexpr ErrorText error_texts[] = {
    ERROR_TEXT(cudaSuccess, "no error"),
    ERROR_TEXT(cudaErrorInvalidValue, "invalid argument"),
    ERROR_TEXT(cudaErrorMemoryAllocation, "out of memory"),
    ERROR_TEXT(cudaErrorInvalidConfiguration, "invalid configuration argument"),
    ERROR_TEXT(cudaErrorInsufficientDriver, "CUDA driver version is insufficient for CUDA runtime version"),
    ERROR_TEXT(cudaErrorNoDevice, "no CUDA-capable device is detected"),
    ERROR_TEXT(cudaErrorInvalidDevice, "invalid device ordinal"),
    ERROR_TEXT(cudaErrorNoKernelImageForDevice, "no kernel image is available for execution on the device"),
    ERROR_TEXT(cudaErrorIllegalAddress, "an illegal memory access was encountered"),
    ERROR_TEXT(cudaErrorAssert, "device-side assert triggered"),
    ERROR_TEXT(cudaErrorMisalignedAddress, "misaligned address"),
    ERROR_TEXT(cudaErrorLaunchFailure, "unspecified launch failure"),
    ERROR_TEXT(cudaErrorInvalidResourceHandle, "invalid resource handle"),
    ERROR_TEXT(cudaErrorIllegalState, "the operation cannot be performed in the present state"),
    ERROR_TEXT(cudaErrorNotReady, "device not ready"),
    ERROR_TEXT(cudaErrorStreamCaptureUnsupported, "operation not permitted when stream is capturing"),
    ERROR_TEXT(cudaErrorStreamCaptureInvalidated, "operation failed due to a previous error during capture"),
    ERROR_TEXT(cudaErrorStreamCaptureMerge, "operation would result in a merge of separate capture sequences"),
    ERROR_TEXT(cudaErrorStreamCaptureUnmatched, "capture was not ended in the same stream as it began"),
    ERROR_TEXT(cudaErrorStreamCaptureUnjoined, "capturing stream has unjoined work"),
    ERROR_TEXT(cudaErrorStreamCaptureIsolation, "dependency created on uncaptured work in another stream"),
    ERROR_TEXT(cudaErrorStreamCaptureImplicit, "operation would make the legacy stream depend on a capturing stream"),
    ERROR_TEXT(cudaErrorCapturedEvent, "operation not permitted on an event last recorded in a capturing stream"),
    ERROR_TEXT(cudaErrorStreamCaptureWrongThread, "attempt to end a capture from another thread than began it"),
    ERROR_TEXT(cudaErrorGraphExecUpdateFailure, "the graph update was not performed: it would change the graph"),
};
#undef ERROR_TEXT
const ErrorText* find_text(cudaError_t error) {
  const auto* found = std::find_if(std::begin(error_texts), std::end(error_texts),
                                   [&](const ErrorText& each) { return each.error == error; });
  return found == std::end(error_texts) ? nullptr : found;
}

// For a device that exists.
template <class F>
cudaError_t with_device(int device, F&& f) {
  Lock lock;
  if (runtime().devices.empty()) return no_device();
  if (device < 0 || static_cast<size_t>(device) >= runtime().devices.size()) return note(cudaErrorInvalidDevice);
  return note(f(*runtime().devices[static_cast<size_t>(device)]));
}

cudaDeviceProp properties_of(const Device& device) {
  return {.name = "CUDA on a CPU",
          .totalGlobalMem = device.bytes,
          .sharedMemPerBlock = cuda_on_cpu::max_static_shared,
          .sharedMemPerBlockOptin = cuda_on_cpu::max_shared,
          .sharedMemPerMultiprocessor = cuda_on_cpu::max_shared + 1024,
          .major = 8,  // Hopper's kernels for warpgroups, slow to emulate, have tests of their own
          .minor = 0,
          .multiProcessorCount = 4,
          .maxThreadsPerBlock = cuda_on_cpu::max_block_threads,
          .maxThreadsPerMultiProcessor = 2048,
          .regsPerBlock = 65536,
          .warpSize = 32,
          .l2CacheSize = 32 << 10,  // so small that attention runs in groups of heads
          .pciDomainID = 0,
          .pciBusID = device.gpu + 1,
          .pciDeviceID = 0};
}

}  // namespace

const char* cudaGetErrorName(cudaError_t error) {
  const ErrorText* found = find_text(error);
  return found ? found->name : "unrecognized error code";
}
const char* cudaGetErrorString(cudaError_t error) {
  const ErrorText* found = find_text(error);
  return found ? found->text : "unrecognized error code";
}
cudaError_t cudaGetLastError() { return std::exchange(host().last_error, cudaSuccess); }
cudaError_t cudaPeekAtLastError() { return host().last_error; }

// ---- Devices --------------------------------------------------------------------------------------------------------

void cuda_on_cpu::set_devices(int count, size_t bytes_each, cudaError_t why_none) {
  Lock lock;
  Runtime& r = runtime();
  std::string left;
  for (const auto& device : r.devices) {
    wait_for_device(lock, *device);
    const size_t streams = device->streams.size() - 1;
    if (streams > 0 || device->bytes_used > 0)
      left += " " + std::to_string(streams) + " streams and " + std::to_string(device->bytes_used) +
              " bytes of device " + std::to_string(device->number) + ";";
  }
  free_all();
  for (const auto& device : r.devices)
    while (device->streams.size() > 1) destroy(device->streams.back());
  r.streams.clear();
  r.devices.clear();
  r.why_no_device = why_none;
  for (int number = 0; number < count; ++number) {
    r.devices.push_back(std::make_unique<Device>(number, bytes_each));
    r.streams.insert(r.devices.back()->stream0.get());
  }
  host().device = 0;
  if (!left.empty()) throw Failure("set_devices: not released:" + left + " destroy and free them first");
}
void cuda_on_cpu::set_context_bytes(size_t bytes) {
  Lock lock;
  runtime().context_bytes = bytes;
}
void cuda_on_cpu::set_channel_bytes(size_t bytes) {
  Lock lock;
  runtime().channel_bytes = bytes;
}
cuda_on_cpu::CommunicatorMemory cuda_on_cpu::communicator_memory(int device) {
  Lock lock;
  return runtime().devices.at(static_cast<size_t>(device))->communicators;
}
std::vector<int> cuda_on_cpu::contexts() {
  Lock lock;
  std::vector<int> all;
  for (const auto& device : runtime().devices)
    if (device->has_context) all.push_back(device->number);
  return all;
}
void cuda_on_cpu::set_patience(double seconds) {
  Lock lock;
  runtime().patience = std::chrono::duration<double>(seconds);
}

void cuda_on_cpu::set_code(bool there) {
  Lock lock;
  runtime().has_code = there;
}
void cuda_on_cpu::set_hosts_first(bool on) {
  Lock lock;
  runtime().hosts_first = on;
}

cudaError_t cudaRuntimeGetVersion(int* version) {
  *version = CUDART_VERSION;
  return cudaSuccess;
}
// 0 without a driver; a driver that is too old reports its version.
cudaError_t cudaDriverGetVersion(int* version) {
  Lock lock;
  const bool any = !runtime().devices.empty();
  *version = any || runtime().why_no_device != cudaErrorInsufficientDriver ? CUDART_VERSION : CUDART_VERSION - 1000;
  return cudaSuccess;
}
cudaError_t cudaGetDeviceCount(int* count) {
  Lock lock;
  *count = static_cast<int>(runtime().devices.size());
  return *count > 0 ? cudaSuccess : no_device();
}
cudaError_t cudaSetDevice(int device) {
  return with_device(device, [&](Device& d) {
    host().device = device;
    make_context(d);  // since CUDA 12
    return cudaSuccess;
  });
}
cudaError_t cudaSetDeviceFlags(unsigned) {  // the host's way of waiting is fixed
  Lock lock;
  return runtime().devices.empty() ? no_device() : cudaSuccess;
}
cudaError_t cudaGetDevice(int* device) {
  Lock lock;
  if (runtime().devices.empty()) return no_device();
  *device = host().device;
  return cudaSuccess;
}
cudaError_t cudaGetDeviceProperties(cudaDeviceProp* properties, int device) {
  return with_device(device, [&](const Device& d) {
    *properties = properties_of(d);
    return cudaSuccess;
  });
}
cudaError_t cudaDeviceGetAttribute(int* value, cudaDeviceAttr attribute, int device) {
  return with_device(device, [&](const Device& d) {
    const cudaDeviceProp properties = properties_of(d);
    switch (attribute) {
      case cudaDevAttrMultiProcessorCount: *value = properties.multiProcessorCount; return cudaSuccess;
      case cudaDevAttrComputeCapabilityMajor: *value = properties.major; return cudaSuccess;
      case cudaDevAttrComputeCapabilityMinor: *value = properties.minor; return cudaSuccess;
      case cudaDevAttrL2CacheSize: *value = properties.l2CacheSize; return cudaSuccess;
      case cudaDevAttrMaxSharedMemoryPerBlockOptin:
        *value = static_cast<int>(properties.sharedMemPerBlockOptin);
        return cudaSuccess;
      case cudaDevAttrMaxSharedMemoryPerMultiprocessor:
        *value = static_cast<int>(properties.sharedMemPerMultiprocessor);
        return cudaSuccess;
      case cudaDevAttrReservedSharedMemoryPerBlock: *value = 1024; return cudaSuccess;
    }
    return cudaErrorInvalidValue;
  });
}
cudaError_t cudaDeviceGetPCIBusId(char* id, int length, int device) {
  return with_device(device, [&](const Device& d) {
    if (length < 13) return cudaErrorInvalidValue;
    const cudaDeviceProp properties = properties_of(d);
    std::snprintf(id, static_cast<size_t>(length), "%04x:%02x:%02x.0", static_cast<unsigned>(properties.pciDomainID),
                  static_cast<unsigned>(properties.pciBusID), static_cast<unsigned>(properties.pciDeviceID));
    return cudaSuccess;
  });
}
cudaError_t cudaDeviceGetStreamPriorityRange(int* least, int* greatest) {
  return with_device(host().device, [&](const Device&) {
    *least = 0;
    *greatest = -5;
    return cudaSuccess;
  });
}
cudaError_t cudaMemGetInfo(size_t* free, size_t* total) {
  return with_device(host().device, [&](Device& d) {
    make_context(d);
    *free = free_bytes(d);
    *total = d.bytes;
    return cudaSuccess;
  });
}
cudaError_t cudaDeviceSynchronize() {
  Lock lock;
  if (current_device() == nullptr) return no_device();
  if (const cudaError_t error = check_device_wait(*current_device()); error != cudaSuccess) return error;
  wait_for_device(lock, *current_device());
  return cudaSuccess;
}
