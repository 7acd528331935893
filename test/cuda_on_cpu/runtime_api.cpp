// runtime_api.cpp: streams, events, memory and launches.
#include "cuda_on_cpu/runtime_api.h"

#include <cxxabi.h>
#include <dlfcn.h>

#include <algorithm>
#include <chrono>
#include <cstdlib>
#include <cstring>
#include <deque>
#include <map>
#include <memory>
#include <mutex>
#include <random>

#include "cuda_on_cpu/sanitizers.h"

namespace {

using cuda_on_cpu::Failure;
using cuda_on_cpu::Observed;
using cuda_on_cpu::Order;
using cuda_on_cpu::Unobserved;

struct Task {
  std::function<void()> run;
  std::function<bool()> may_run;  // empty: always
  char enqueued = 0;              // an address for ThreadSanitizer: what the host did before
};

}  // namespace

struct CUstream_st {
  int number = 0;
  std::deque<std::unique_ptr<Task>> tasks;
  void* observer = cuda_on_cpu::create_context();  // ThreadSanitizer's: streams are as concurrent as threads
  char done = 0;
};

struct CUevent_st {
  int64_t recorded = 0, reached = 0;  // how often
  std::chrono::steady_clock::time_point time;
  char sync = 0;
};

namespace {

struct Allocation {
  size_t bytes;
  bool device;
};

// The one emulated device.
struct Runtime {
  std::recursive_mutex mutex;
  CUstream_st stream0;
  std::vector<CUstream_st*> streams{&stream0};
  int next_number = 1;
  std::map<const std::byte*, Allocation> allocations;  // by their first byte
  size_t device_bytes = 0;
  std::map<const void*, size_t> dynamic_shared_limit;  // by kernel; of those that asked for more
  std::map<const void*, std::string> kernel_names;
  std::mt19937_64 random;
  cudaError_t last_error = cudaSuccess;
  bool running = false;
};
Runtime& runtime() {
  static Runtime* the_runtime = new Runtime;  // never destroyed: destructors of tests may still free memory
  return *the_runtime;
}

constexpr size_t total_memory = size_t{4} << 30;

cudaError_t note(cudaError_t status) {
  if (status != cudaSuccess) runtime().last_error = status;
  return status;
}

CUstream_st& stream_of(cudaStream_t stream) {
  if (stream == nullptr) return runtime().stream0;
  if (std::count(runtime().streams.begin(), runtime().streams.end(), stream) == 0)
    throw Failure("a stream is used that was never created, or is destroyed");
  return *stream;
}

cudaError_t enqueue(cudaStream_t stream, std::function<void()> run, std::function<bool()> may_run = {}) {
  auto task = std::make_unique<Task>(Task{std::move(run), std::move(may_run)});
  cuda_on_cpu::release(&task->enqueued);
  stream_of(stream).tasks.push_back(std::move(task));
  return cudaSuccess;
}

// Device memory is poisoned as long as the host runs.
void open_device_memory(bool open) {
  if (!cuda_on_cpu::address_sanitizer) return;
  for (const auto& [p, allocation] : runtime().allocations)
    if (allocation.device) (open ? cuda_on_cpu::unpoison_memory : cuda_on_cpu::poison_memory)(p, allocation.bytes);
}

void run_first_task(CUstream_st& stream) {
  std::unique_ptr<Task> task = std::move(stream.tasks.front());
  stream.tasks.pop_front();
  const std::function<void()>& run = task->run;
  void* host = cuda_on_cpu::current_context();
  std::exception_ptr error;
  cuda_on_cpu::switch_context(stream.observer);
  {
    Unobserved unobserved;  // of the stream's context, which is on the host's stack
    cuda_on_cpu::acquire(&task->enqueued);
    try {
      run();
    } catch (...) {
      error = std::current_exception();
    }
    cuda_on_cpu::release(&stream.done);
  }
  cuda_on_cpu::switch_context(host);
  if (error) std::rethrow_exception(error);
}

bool can_run(const CUstream_st& stream) {
  return !stream.tasks.empty() && (!stream.tasks.front()->may_run || stream.tasks.front()->may_run());
}

// Of the streams that can run, the one whose turn it is; `wanted` is the one that the host waits for, if it is one.
CUstream_st* next_stream(const CUstream_st* wanted) {
  std::vector<CUstream_st*> able;
  for (CUstream_st* stream : runtime().streams)
    if (can_run(*stream)) able.push_back(stream);
  if (able.empty()) return nullptr;
  const auto mine = std::find(able.begin(), able.end(), wanted);
  switch (cuda_on_cpu::schedule().order) {
    case Order::forward: return able.front();
    case Order::reverse: return able.back();
    case Order::depth_first: return mine != able.end() ? *mine : able.front();
    case Order::depth_first_reverse:  // all the others first
      if (able.size() > 1 && mine != able.end()) able.erase(mine);
      return able.back();
    case Order::random: break;
  }
  return able[runtime().random() % able.size()];
}

// Runs streams until `done`. Where a task fails, all that is left is dropped.
void run_until(const CUstream_st* wanted, const std::function<bool()>& done) {
  Unobserved unobserved;
  Runtime& r = runtime();
  if (r.running) throw Failure("a task of a stream must not wait for streams");
  if (done()) return;
  struct Opened {
    Opened() { open_device_memory(true), runtime().running = true; }
    ~Opened() { open_device_memory(false), runtime().running = false; }
  } opened;
  while (!done()) {
    CUstream_st* stream = next_stream(wanted);
    try {
      if (stream == nullptr) throw Failure("the host waits for a stream that waits for an event which never comes");
      run_first_task(*stream);
    } catch (...) {
      for (CUstream_st* each : r.streams) {
        each->tasks.clear();
        cuda_on_cpu::acquire(&each->done);
      }
      throw;
    }
  }
}

// The allocation that holds all of [p, p + bytes); none if it begins in no allocation.
const Allocation* allocation_of(const void* p, size_t bytes, const char* what) {
  const auto* address = static_cast<const std::byte*>(p);
  const auto& all = runtime().allocations;
  auto after = all.upper_bound(address);
  if (after == all.begin()) return nullptr;
  const auto& [begin, allocation] = *std::prev(after);
  if (address >= begin + allocation.bytes) return nullptr;
  if (address + bytes > begin + allocation.bytes)
    throw Failure(std::string(what) + ": " + std::to_string(bytes) + " bytes from byte " +
                  std::to_string(address - begin) + " of an allocation of " + std::to_string(allocation.bytes));
  return &allocation;
}

void check_side(const void* p, size_t bytes, bool device, const char* what) {
  const Allocation* allocation = allocation_of(p, bytes, what);
  const bool is_device = allocation != nullptr && allocation->device;
  if (is_device != device) throw Failure(std::string(what) + (device ? ": not device memory" : ": not host memory"));
}

cudaError_t allocate(void** p, size_t bytes, bool device) {
  std::lock_guard lock(runtime().mutex);
  *p = nullptr;
  if (bytes == 0) return cudaSuccess;
  if (device && runtime().device_bytes + bytes > total_memory) return note(cudaErrorMemoryAllocation);
  if (posix_memalign(p, 256, bytes) != 0) return note(cudaErrorMemoryAllocation);
  std::memset(*p, 0xff, bytes);  // NaN
  runtime().allocations[static_cast<std::byte*>(*p)] = {bytes, device};
  if (!device) return cudaSuccess;
  runtime().device_bytes += bytes;
  cuda_on_cpu::poison_memory(*p, bytes);
  return cudaSuccess;
}

cudaError_t deallocate(void* p, bool device) {
  std::lock_guard lock(runtime().mutex);
  if (p == nullptr) return cudaSuccess;
  const auto found = runtime().allocations.find(static_cast<std::byte*>(p));
  if (found == runtime().allocations.end() || found->second.device != device) return note(cudaErrorInvalidValue);
  cudaDeviceSynchronize();
  if (device) runtime().device_bytes -= found->second.bytes;
  cuda_on_cpu::unpoison_memory(p, found->second.bytes);
  runtime().allocations.erase(found);
  std::free(p);
  return cudaSuccess;
}

}  // namespace

// ---- Errors and devices ---------------------------------------------------------------------------------------------

const char* cudaGetErrorName(cudaError_t error) {
  switch (error) {
    case cudaSuccess: return "cudaSuccess";
    case cudaErrorInvalidValue: return "cudaErrorInvalidValue";
    case cudaErrorMemoryAllocation: return "cudaErrorMemoryAllocation";
    case cudaErrorInvalidConfiguration: return "cudaErrorInvalidConfiguration";
    case cudaErrorInvalidDevice: return "cudaErrorInvalidDevice";
    case cudaErrorNotReady: return "cudaErrorNotReady";
  }
  return "unknown";
}
const char* cudaGetErrorString(cudaError_t error) {
  switch (error) {
    case cudaSuccess: return "no error";
    case cudaErrorInvalidValue: return "invalid argument";
    case cudaErrorMemoryAllocation: return "out of memory";
    case cudaErrorInvalidConfiguration: return "invalid configuration argument";
    case cudaErrorInvalidDevice: return "invalid device ordinal";
    case cudaErrorNotReady: return "device not ready";
  }
  return "unknown error";
}
cudaError_t cudaGetLastError() { return std::exchange(runtime().last_error, cudaSuccess); }
cudaError_t cudaPeekAtLastError() { return runtime().last_error; }

cudaError_t cudaGetDeviceCount(int* count) {
  *count = 1;
  return cudaSuccess;
}
cudaError_t cudaSetDevice(int device) { return note(device == 0 ? cudaSuccess : cudaErrorInvalidDevice); }
cudaError_t cudaGetDevice(int* device) {
  *device = 0;
  return cudaSuccess;
}
cudaError_t cudaGetDeviceProperties(cudaDeviceProp* properties, int device) {
  *properties = {.name = "CUDA on a CPU",
                 .totalGlobalMem = total_memory,
                 .sharedMemPerBlock = cuda_on_cpu::max_static_shared,
                 .sharedMemPerBlockOptin = cuda_on_cpu::max_shared,
                 .sharedMemPerMultiprocessor = cuda_on_cpu::max_shared + 1024,
                 .major = 9,
                 .minor = 0,
                 .multiProcessorCount = 4,
                 .maxThreadsPerBlock = cuda_on_cpu::max_block_threads,
                 .maxThreadsPerMultiProcessor = 2048,
                 .regsPerBlock = 65536,
                 .warpSize = 32,
                 .l2CacheSize = 1 << 20};
  return cudaSetDevice(device);
}
cudaError_t cudaDeviceGetAttribute(int* value, cudaDeviceAttr attribute, int device) {
  cudaDeviceProp properties;
  const cudaError_t status = cudaGetDeviceProperties(&properties, device);
  switch (attribute) {
    case cudaDevAttrMultiProcessorCount: *value = properties.multiProcessorCount; return status;
    case cudaDevAttrComputeCapabilityMajor: *value = properties.major; return status;
    case cudaDevAttrComputeCapabilityMinor: *value = properties.minor; return status;
    case cudaDevAttrMaxSharedMemoryPerBlockOptin:
      *value = static_cast<int>(properties.sharedMemPerBlockOptin);
      return status;
  }
  return note(cudaErrorInvalidValue);
}
cudaError_t cudaMemGetInfo(size_t* free, size_t* total) {
  std::lock_guard lock(runtime().mutex);
  *free = total_memory - runtime().device_bytes;
  *total = total_memory;
  return cudaSuccess;
}
cudaError_t cudaDeviceSynchronize() {
  std::lock_guard lock(runtime().mutex);
  const auto& streams = runtime().streams;
  run_until(nullptr,
            [&] { return std::all_of(streams.begin(), streams.end(), [](auto* s) { return s->tasks.empty(); }); });
  for (CUstream_st* stream : streams) cuda_on_cpu::acquire(&stream->done);
  return cudaSuccess;
}

// ---- Streams and events ---------------------------------------------------------------------------------------------

cudaError_t cudaStreamCreate(cudaStream_t* stream) {
  std::lock_guard lock(runtime().mutex);
  *stream = new CUstream_st;
  (*stream)->number = runtime().next_number++;
  runtime().streams.push_back(*stream);
  return cudaSuccess;
}
cudaError_t cudaStreamCreateWithFlags(cudaStream_t* stream, unsigned) { return cudaStreamCreate(stream); }
cudaError_t cudaStreamCreateWithPriority(cudaStream_t* stream, unsigned, int) { return cudaStreamCreate(stream); }
cudaError_t cudaStreamDestroy(cudaStream_t stream) {
  std::lock_guard lock(runtime().mutex);
  cudaStreamSynchronize(stream);
  std::erase(runtime().streams, stream);
  cuda_on_cpu::destroy_context(stream->observer);
  delete stream;
  return cudaSuccess;
}
cudaError_t cudaStreamSynchronize(cudaStream_t stream) {
  std::lock_guard lock(runtime().mutex);
  CUstream_st& s = stream_of(stream);
  run_until(&s, [&] { return s.tasks.empty(); });
  cuda_on_cpu::acquire(&s.done);
  return cudaSuccess;
}
cudaError_t cudaStreamQuery(cudaStream_t stream) {
  std::lock_guard lock(runtime().mutex);
  return stream_of(stream).tasks.empty() ? cudaSuccess : cudaErrorNotReady;
}
cudaError_t cudaStreamWaitEvent(cudaStream_t stream, cudaEvent_t event, unsigned, const cuda_on_cpu::Location& where) {
  std::lock_guard lock(runtime().mutex);
  if (cuda_on_cpu::is_switched_off("cudaStreamWaitEvent", where)) return cudaSuccess;
  return enqueue(
      stream, [event] { cuda_on_cpu::acquire(&event->sync); },
      [event, wanted = event->recorded] { return event->reached >= wanted; });
}
cudaError_t cudaLaunchHostFunc(cudaStream_t stream, void (*function)(void*), void* argument) {
  std::lock_guard lock(runtime().mutex);
  return enqueue(stream, [=] { function(argument); });
}

cudaError_t cudaEventCreate(cudaEvent_t* event) {
  *event = new CUevent_st;
  return cudaSuccess;
}
cudaError_t cudaEventCreateWithFlags(cudaEvent_t* event, unsigned) { return cudaEventCreate(event); }
cudaError_t cudaEventDestroy(cudaEvent_t event) {
  std::lock_guard lock(runtime().mutex);
  cudaDeviceSynchronize();  // CUDA would free it later: tasks may still name it
  delete event;
  return cudaSuccess;
}
cudaError_t cudaEventRecord(cudaEvent_t event, cudaStream_t stream) {
  std::lock_guard lock(runtime().mutex);
  const int64_t number = ++event->recorded;
  return enqueue(stream, [event, number] {
    event->reached = std::max(event->reached, number);
    event->time = std::chrono::steady_clock::now();
    cuda_on_cpu::release(&event->sync);
  });
}
cudaError_t cudaEventSynchronize(cudaEvent_t event) {
  std::lock_guard lock(runtime().mutex);
  run_until(nullptr, [event, wanted = event->recorded] { return event->reached >= wanted; });
  cuda_on_cpu::acquire(&event->sync);
  return cudaSuccess;
}
cudaError_t cudaEventQuery(cudaEvent_t event) {
  std::lock_guard lock(runtime().mutex);
  return event->reached >= event->recorded ? cudaSuccess : cudaErrorNotReady;
}
cudaError_t cudaEventElapsedTime(float* milliseconds, cudaEvent_t begin, cudaEvent_t end) {
  std::lock_guard lock(runtime().mutex);
  if (begin->reached == 0 || end->reached == 0) return note(cudaErrorInvalidValue);
  *milliseconds = std::chrono::duration<float, std::milli>(end->time - begin->time).count();
  return cudaSuccess;
}

// ---- Memory ---------------------------------------------------------------------------------------------------------

cudaError_t cudaMalloc(void** p, size_t bytes) { return allocate(p, bytes, true); }
cudaError_t cudaFree(void* p) { return deallocate(p, true); }
cudaError_t cudaMallocHost(void** p, size_t bytes, unsigned) { return allocate(p, bytes, false); }
cudaError_t cudaHostAlloc(void** p, size_t bytes, unsigned) { return allocate(p, bytes, false); }
cudaError_t cudaFreeHost(void* p) { return deallocate(p, false); }

cudaError_t cudaMemcpyAsync(void* to, const void* from, size_t bytes, cudaMemcpyKind kind, cudaStream_t stream) {
  std::lock_guard lock(runtime().mutex);
  if (bytes == 0) return cudaSuccess;
  if (kind == cudaMemcpyDefault) {
    allocation_of(to, bytes, "cudaMemcpy, destination");
    allocation_of(from, bytes, "cudaMemcpy, source");
  } else {
    const bool to_device = kind == cudaMemcpyHostToDevice || kind == cudaMemcpyDeviceToDevice;
    const bool from_device = kind == cudaMemcpyDeviceToHost || kind == cudaMemcpyDeviceToDevice;
    check_side(to, bytes, to_device, "cudaMemcpy, destination");
    check_side(from, bytes, from_device, "cudaMemcpy, source");
  }
  return enqueue(stream, [=] {
    Observed observed;
    std::memcpy(to, from, bytes);
  });
}
cudaError_t cudaMemsetAsync(void* p, int value, size_t bytes, cudaStream_t stream) {
  std::lock_guard lock(runtime().mutex);
  if (bytes == 0) return cudaSuccess;
  check_side(p, bytes, true, "cudaMemset");
  return enqueue(stream, [=] {
    Observed observed;
    std::memset(p, value, bytes);
  });
}
cudaError_t cudaMemcpy(void* to, const void* from, size_t bytes, cudaMemcpyKind kind) {
  const cudaError_t status = cudaMemcpyAsync(to, from, bytes, kind, nullptr);
  return status == cudaSuccess ? cudaStreamSynchronize(nullptr) : status;
}
cudaError_t cudaMemset(void* p, int value, size_t bytes) {
  const cudaError_t status = cudaMemsetAsync(p, value, bytes, nullptr);
  return status == cudaSuccess ? cudaStreamSynchronize(nullptr) : status;
}

// ---- Kernels --------------------------------------------------------------------------------------------------------

cudaError_t cudaFuncGetName(const char** name, const void* function) {
  std::lock_guard lock(runtime().mutex);
  std::string& known = runtime().kernel_names[function];
  if (known.empty()) {  // found where the program exports its symbols: -rdynamic
    Dl_info info{};
    if (dladdr(function, &info) != 0 && info.dli_sname != nullptr && info.dli_saddr == function) {
      int status = 0;
      char* demangled = abi::__cxa_demangle(info.dli_sname, nullptr, nullptr, &status);
      known = status == 0 ? demangled : info.dli_sname;
      std::free(demangled);
    } else {
      known = "without a name (in an anonymous namespace)";
    }
  }
  *name = known.c_str();
  return cudaSuccess;
}
cudaError_t cudaFuncSetAttribute(const void* function, cudaFuncAttribute attribute, int value) {
  std::lock_guard lock(runtime().mutex);
  if (attribute != cudaFuncAttributeMaxDynamicSharedMemorySize) return cudaSuccess;
  if (value < 0 || static_cast<size_t>(value) > cuda_on_cpu::max_shared) return note(cudaErrorInvalidValue);
  runtime().dynamic_shared_limit[function] = static_cast<size_t>(value);
  return cudaSuccess;
}

namespace cuda_on_cpu {

cudaError_t enqueue_kernel(const cudaLaunchConfig_t& config, const void* function, std::function<void()> call) {
  Runtime& r = runtime();
  std::lock_guard lock(r.mutex);
  const dim3 &grid = config.gridDim, &block = config.blockDim;
  const auto product = [](const dim3& d) { return uint64_t{d.x} * d.y * d.z; };
  if (product(grid) == 0 || grid.x > 0x7fffffffu || grid.y > 65535 || grid.z > 65535 || product(block) == 0 ||
      product(block) > max_block_threads || block.z > 64)
    return note(cudaErrorInvalidConfiguration);
  const auto asked = r.dynamic_shared_limit.find(function);
  const size_t limit = asked == r.dynamic_shared_limit.end() ? max_static_shared : asked->second;
  if (config.dynamicSmemBytes > limit || config.numAttrs != 0) return note(cudaErrorInvalidValue);
  const char* name = nullptr;
  cudaFuncGetName(&name, function);
  return enqueue(config.stream,
                 [launch = Launch{name, grid, block, config.dynamicSmemBytes, std::move(call)}] { run(launch); });
}

cudaError_t enqueue_call(cudaStream_t stream, std::function<void()> call) {
  std::lock_guard lock(runtime().mutex);
  return enqueue(stream, [call = std::move(call)] {
    Observed observed;
    call();
  });
}
void require_device_memory(const void* p, size_t bytes, const char* what) {
  std::lock_guard lock(runtime().mutex);
  check_side(p, bytes, true, what);
}

}  // namespace cuda_on_cpu
