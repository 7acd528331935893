// runtime_api.h: the part of the CUDA runtime that we use. Errors that a program could handle are returned as error
// codes, as by the real runtime; bugs of the program (a copy outside its allocation, say) throw Failure.
//
// Work on a stream runs only when the host waits for it, in the order that the schedule chooses among streams and graph
// nodes: this exposes a missing wait for an event, or a host that reads or overwrites memory too early. Stream 0 is an
// ordinary stream of each device; it does not wait for others. Host code must not touch device memory: AddressSanitizer
// reports it.
#pragma once
#include <functional>
#include <type_traits>
#include <utility>

#include "cuda_on_cpu/emulator.h"

#define CUDART_VERSION 13000

enum cudaError_t {
  cudaSuccess = 0,
  cudaErrorInvalidValue = 1,
  cudaErrorMemoryAllocation = 2,
  cudaErrorInvalidConfiguration = 9,
  cudaErrorInsufficientDriver = 35,
  cudaErrorNoDevice = 100,
  cudaErrorInvalidDevice = 101,
  cudaErrorNoKernelImageForDevice = 209,
  cudaErrorInvalidResourceHandle = 400,
  cudaErrorIllegalState = 401,
  cudaErrorNotReady = 600,
  cudaErrorIllegalAddress = 700,
  cudaErrorAssert = 710,
  cudaErrorMisalignedAddress = 716,
  cudaErrorLaunchFailure = 719,
  cudaErrorStreamCaptureUnsupported = 900,
  cudaErrorStreamCaptureInvalidated = 901,
  cudaErrorStreamCaptureMerge = 902,
  cudaErrorStreamCaptureUnmatched = 903,
  cudaErrorStreamCaptureUnjoined = 904,
  cudaErrorStreamCaptureIsolation = 905,
  cudaErrorStreamCaptureImplicit = 906,
  cudaErrorCapturedEvent = 907,
  cudaErrorStreamCaptureWrongThread = 908,
  cudaErrorGraphExecUpdateFailure = 910,
};
const char* cudaGetErrorName(cudaError_t error);
const char* cudaGetErrorString(cudaError_t error);
cudaError_t cudaGetLastError();
cudaError_t cudaPeekAtLastError();

// ---- Devices --------------------------------------------------------------------------------------------------------

namespace cuda_on_cpu {
// Creates `count` devices with this much memory each (initially one with 4 GiB). If there are none, cudaGetDeviceCount
// and the like return `why_none`. Destroys the streams and memory left from the previous devices and reports them with
// a Failure.
void set_devices(int count, size_t bytes_each = size_t{4} << 30, cudaError_t why_none = cudaErrorNoDevice);
// Sets whether the program has code for these devices.
void set_code(bool there);
// The number of allocations so far, of device and pinned memory.
uint64_t allocations();
// How long a host waits, while nothing runs anywhere, for what another host thread has to enqueue (initially 60 s);
// then the wait throws Failure.
void set_patience(double seconds);
// A context takes this much of a device's memory, from now on; the devices on which this process has one. A call makes
// it that uses a device; what only asks for properties makes none.
void set_context_bytes(size_t bytes);
std::vector<int> contexts();
// A communicator of NCCL takes this much of its device's memory for each channel (maxCTAs), from now on; how much all
// of them have taken of a device, and how much the program had allocated there before the last one was made.
void set_channel_bytes(size_t bytes);
struct CommunicatorMemory {
  size_t taken = 0, allocated_before = 0;
};
CommunicatorMemory communicator_memory(int device);
// A thread of any kernel has so many registers, from now on; 0: their number limits nothing.
void set_kernel_registers(int registers);
// With true, streams run only while every host thread that has used the runtime waits for a stream or another thread,
// one task at a time on all devices: the schedule alone determines the order of all tasks, and each runs as late as
// possible. Order::random then ranks the streams by number: with each of `stream_orders` seeds a different one comes
// last.
void set_hosts_first(bool on);
inline constexpr uint64_t stream_orders = 8;
}  // namespace cuda_on_cpu

struct cudaDeviceProp {
  char name[256];
  size_t totalGlobalMem, sharedMemPerBlock, sharedMemPerBlockOptin, sharedMemPerMultiprocessor;
  int major, minor, multiProcessorCount, maxThreadsPerBlock, maxThreadsPerMultiProcessor, regsPerBlock, warpSize,
      l2CacheSize, pciDomainID, pciBusID, pciDeviceID;
};
enum cudaDeviceAttr {
  cudaDevAttrMultiProcessorCount = 16,
  cudaDevAttrComputeCapabilityMajor = 75,
  cudaDevAttrComputeCapabilityMinor = 76,
  cudaDevAttrL2CacheSize = 38,
  cudaDevAttrMaxSharedMemoryPerMultiprocessor = 81,
  cudaDevAttrMaxSharedMemoryPerBlockOptin = 97,
  cudaDevAttrReservedSharedMemoryPerBlock = 111,
};
cudaError_t cudaDriverGetVersion(int* version);
cudaError_t cudaRuntimeGetVersion(int* version);
cudaError_t cudaGetDeviceCount(int* count);
cudaError_t cudaSetDevice(int device);  // for this host thread
inline constexpr unsigned cudaDeviceScheduleBlockingSync = 4;
cudaError_t cudaSetDeviceFlags(unsigned flags);
cudaError_t cudaGetDevice(int* device);
cudaError_t cudaGetDeviceProperties(cudaDeviceProp* properties, int device);
cudaError_t cudaDeviceGetAttribute(int* value, cudaDeviceAttr attribute, int device);
cudaError_t cudaDeviceGetPCIBusId(char* id, int length, int device);
cudaError_t cudaDeviceGetStreamPriorityRange(int* least, int* greatest);
cudaError_t cudaMemGetInfo(size_t* free, size_t* total);
cudaError_t cudaDeviceSynchronize();

// ---- Streams and events ---------------------------------------------------------------------------------------------

using cudaStream_t = struct CUstream_st*;
using cudaEvent_t = struct CUevent_st*;
inline constexpr unsigned cudaStreamDefault = 0, cudaStreamNonBlocking = 1;
inline constexpr unsigned cudaEventDefault = 0, cudaEventBlockingSync = 1, cudaEventDisableTiming = 2;
inline constexpr unsigned cudaEventWaitDefault = 0;

cudaError_t cudaStreamCreate(cudaStream_t* stream);
cudaError_t cudaStreamCreateWithFlags(cudaStream_t* stream, unsigned flags);
cudaError_t cudaStreamCreateWithPriority(cudaStream_t* stream, unsigned flags, int priority);
cudaError_t cudaStreamDestroy(cudaStream_t stream);
cudaError_t cudaStreamSynchronize(cudaStream_t stream);
cudaError_t cudaStreamQuery(cudaStream_t stream);
// A wrapper passes on its caller's location, which becomes the site that tests disable.
cudaError_t cudaStreamWaitEvent(cudaStream_t stream, cudaEvent_t event, unsigned flags = 0,
                                const cuda_on_cpu::Location& where = cuda_on_cpu::Location::current());
cudaError_t cudaLaunchHostFunc(cudaStream_t stream, void (*function)(void*), void* argument);

cudaError_t cudaEventCreate(cudaEvent_t* event);
cudaError_t cudaEventCreateWithFlags(cudaEvent_t* event, unsigned flags);
cudaError_t cudaEventDestroy(cudaEvent_t event);
cudaError_t cudaEventRecord(cudaEvent_t event, cudaStream_t stream = nullptr);
cudaError_t cudaEventSynchronize(cudaEvent_t event);
cudaError_t cudaEventQuery(cudaEvent_t event);
cudaError_t cudaEventElapsedTime(float* milliseconds, cudaEvent_t begin, cudaEvent_t end);

// ---- Graphs, by stream capture --------------------------------------------------------------------------------------

enum cudaStreamCaptureMode {
  cudaStreamCaptureModeGlobal = 0,
  cudaStreamCaptureModeThreadLocal = 1,
  cudaStreamCaptureModeRelaxed = 2,
};
enum cudaStreamCaptureStatus {
  cudaStreamCaptureStatusNone = 0,
  cudaStreamCaptureStatusActive = 1,
  cudaStreamCaptureStatusInvalidated = 2,
};
enum cudaGraphNodeType {
  cudaGraphNodeTypeKernel = 0,
  cudaGraphNodeTypeMemcpy = 1,
  cudaGraphNodeTypeMemset = 2,
  cudaGraphNodeTypeHost = 3,
};
enum cudaGraphExecUpdateResult {
  cudaGraphExecUpdateSuccess = 0,
  cudaGraphExecUpdateErrorTopologyChanged = 2,
  cudaGraphExecUpdateErrorNodeTypeChanged = 3,
};
using cudaGraph_t = struct CUgraph_st*;
using cudaGraphNode_t = struct CUgraphNode_st*;
using cudaGraphExec_t = struct CUgraphExec_st*;
struct cudaGraphExecUpdateResultInfo {
  cudaGraphExecUpdateResult result;
  cudaGraphNode_t errorNode, errorFromNode;
};

cudaError_t cudaStreamBeginCapture(cudaStream_t stream, cudaStreamCaptureMode mode);
cudaError_t cudaStreamEndCapture(cudaStream_t stream, cudaGraph_t* graph);
cudaError_t cudaStreamIsCapturing(cudaStream_t stream, cudaStreamCaptureStatus* status);
cudaError_t cudaGraphGetNodes(cudaGraph_t graph, cudaGraphNode_t* nodes, size_t* count);
cudaError_t cudaGraphNodeGetType(cudaGraphNode_t node, cudaGraphNodeType* type);
cudaError_t cudaGraphDestroy(cudaGraph_t graph);
cudaError_t cudaGraphInstantiate(cudaGraphExec_t* executable, cudaGraph_t graph, unsigned long long flags = 0);
cudaError_t cudaGraphExecUpdate(cudaGraphExec_t executable, cudaGraph_t graph, cudaGraphExecUpdateResultInfo* result);
cudaError_t cudaGraphLaunch(cudaGraphExec_t executable, cudaStream_t stream);
cudaError_t cudaGraphExecDestroy(cudaGraphExec_t executable);

// ---- Memory ---------------------------------------------------------------------------------------------------------

enum cudaMemcpyKind {
  cudaMemcpyHostToHost = 0,
  cudaMemcpyHostToDevice = 1,
  cudaMemcpyDeviceToHost = 2,
  cudaMemcpyDeviceToDevice = 3,
  cudaMemcpyDefault = 4,
};
inline constexpr unsigned cudaHostAllocDefault = 0, cudaHostAllocPortable = 1;

cudaError_t cudaMalloc(void** p, size_t bytes);
cudaError_t cudaFree(void* p);  // waits for the device, as CUDA does
cudaError_t cudaMallocHost(void** p, size_t bytes, unsigned flags = 0);
cudaError_t cudaHostAlloc(void** p, size_t bytes, unsigned flags);
cudaError_t cudaFreeHost(void* p);
cudaError_t cudaMemcpy(void* to, const void* from, size_t bytes, cudaMemcpyKind kind);
cudaError_t cudaMemset(void* p, int value, size_t bytes);
// Host memory not allocated here is pageable: copies from it are staged at the call, and copies to it block.
cudaError_t cudaMemcpyAsync(void* to, const void* from, size_t bytes, cudaMemcpyKind kind,
                            cudaStream_t stream = nullptr);
cudaError_t cudaMemsetAsync(void* p, int value, size_t bytes, cudaStream_t stream = nullptr);
template <class T>
cudaError_t cudaMalloc(T** p, size_t bytes) {
  return cudaMalloc(reinterpret_cast<void**>(p), bytes);
}
template <class T>
cudaError_t cudaHostAlloc(T** p, size_t bytes, unsigned flags) {
  return cudaHostAlloc(reinterpret_cast<void**>(p), bytes, flags);
}
template <class T>
cudaError_t cudaMallocHost(T** p, size_t bytes, unsigned flags = 0) {
  return cudaMallocHost(reinterpret_cast<void**>(p), bytes, flags);
}

// ---- Kernels --------------------------------------------------------------------------------------------------------

enum cudaFuncAttribute {
  cudaFuncAttributeMaxDynamicSharedMemorySize = 8,
  cudaFuncAttributePreferredSharedMemoryCarveout = 9,
};
struct cudaLaunchAttribute {};  // none is supported
struct cudaLaunchConfig_t {
  dim3 gridDim, blockDim;
  size_t dynamicSmemBytes;
  cudaStream_t stream;
  cudaLaunchAttribute* attrs;
  unsigned numAttrs;
};

cudaError_t cudaFuncGetName(const char** name, const void* function);
struct cudaFuncAttributes {
  int numRegs = 0;             // see set_kernel_registers()
  size_t sharedSizeBytes = 0;  // of static arrays, which the emulator does not count
};
cudaError_t cudaFuncGetAttributes(cudaFuncAttributes* attributes, const void* function);
template <class T>
cudaError_t cudaFuncGetAttributes(cudaFuncAttributes* attributes, T* function) {
  return cudaFuncGetAttributes(attributes, reinterpret_cast<const void*>(function));
}
cudaError_t cudaFuncSetAttribute(const void* function, cudaFuncAttribute attribute, int value);
template <class T>
cudaError_t cudaFuncSetAttribute(T* function, cudaFuncAttribute attribute, int value) {
  return cudaFuncSetAttribute(reinterpret_cast<const void*>(function), attribute, value);
}
// Limited by threads, shared memory, and registers (set_kernel_registers).
cudaError_t cudaOccupancyMaxActiveBlocksPerMultiprocessor(int* blocks, const void* function, int threads,
                                                          size_t dynamic_shared);

namespace cuda_on_cpu {
cudaError_t enqueue_kernel(const cudaLaunchConfig_t& config, const void* function, llmc::Work call);
// For emulated libraries, whose stream work is a host call. The call says by observe_read() and observe_write() what it
// accesses. Their arguments must be memory of the current device, else Failure.
cudaError_t enqueue_call(cudaStream_t stream, std::function<void()> call);
void require_device_memory(const void* p, size_t bytes, const char* what);
}  // namespace cuda_on_cpu

namespace cuda_on_cpu {
// x as a T, if it converts without a cast, as nvcc demands of arguments.
template <class T>
T converted(std::type_identity_t<T> x) {
  return x;
}
}  // namespace cuda_on_cpu

template <class... Parameters, class... Arguments>
cudaError_t cudaLaunchKernelEx(const cudaLaunchConfig_t* config, void (*kernel)(Parameters...),
                               Arguments&&... arguments) {
  return cuda_on_cpu::enqueue_kernel(*config, reinterpret_cast<const void*>(kernel),
                                     [kernel, ... values = cuda_on_cpu::converted<Parameters>(
                                                  std::forward<Arguments>(arguments))] { kernel(values...); });
}
