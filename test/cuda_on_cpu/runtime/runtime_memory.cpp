// runtime_memory.cpp: device memory, pinned host memory, and copies.
#include <cstdlib>
#include <cstring>
#include <utility>

#include "cuda_on_cpu/runtime/runtime.h"

namespace cuda_on_cpu::detail {

const Allocation* allocation_of(const void* p, size_t bytes, const char* what) {
  const auto* address = static_cast<const std::byte*>(p);
  const auto& all = runtime().allocations;
  const auto after = all.upper_bound(address);
  if (after == all.begin()) return nullptr;
  const auto& [begin, allocation] = *std::prev(after);
  if (address >= begin + allocation.bytes) return nullptr;
  if (address + bytes > begin + allocation.bytes)
    throw Failure(std::string(what) + ": " + std::to_string(bytes) + " bytes from byte " +
                  std::to_string(address - begin) + " of an allocation of " + std::to_string(allocation.bytes));
  return &allocation;
}

namespace {

bool is_device(const Allocation* allocation) { return allocation != nullptr && allocation->device != nullptr; }
bool is_pageable(const Allocation* allocation) { return allocation == nullptr; }

// Not through memcpy, whose operands AddressSanitizer checks: device memory is poisoned while no kernel runs, and
// unpoisoning it for a copy takes time proportional to its size.
__attribute__((no_sanitize("address", "undefined"))) void copy_poisoned(void* to, const void* from, size_t bytes) {
  struct __attribute__((packed, may_alias)) Word {
    uint64_t value;
  };
  auto* out = static_cast<char*>(to);
  const auto* in = static_cast<const char*>(from);
  size_t i = 0;
  for (; i + sizeof(Word) <= bytes; i += sizeof(Word)) {
    reinterpret_cast<Word*>(out + i)->value = reinterpret_cast<const Word*>(in + i)->value;
    asm volatile("" ::: "memory");  // or the compiler turns the loop into a memcpy
  }
  for (; i < bytes; ++i) {
    out[i] = in[i];
    asm volatile("" ::: "memory");
  }
}

void copy(void* to, const void* from, size_t bytes, bool to_host, bool from_host) {
  Observed observed;
  if (!address_sanitizer || (to_host && from_host)) {
    std::memmove(to, from, bytes);
    return;
  }
  if (to_host) check_host_memory(to, bytes);
  if (from_host) check_host_memory(from, bytes);
  copy_poisoned(to, from, bytes);
}
void set(void* p, int value, size_t bytes) {
  Observed observed;
  if (!address_sanitizer) {
    std::memset(p, value, bytes);
    return;
  }
  unsigned char pattern[256];
  std::memset(pattern, value, sizeof pattern);
  for (size_t i = 0; i < bytes; i += sizeof pattern)
    copy_poisoned(static_cast<std::byte*>(p) + i, pattern, std::min(sizeof pattern, bytes - i));
}

cudaError_t allocate(void** p, size_t bytes, bool on_device) {
  Lock lock;
  *p = nullptr;
  Device* device = current_device();
  if (device == nullptr) return no_device();
  if (const cudaError_t error = check_unsafe_call(); error != cudaSuccess) return error;
  if (bytes == 0) return cudaSuccess;
  if (on_device && bytes > free_bytes(*device)) return note(cudaErrorMemoryAllocation);
  if (posix_memalign(p, 256, bytes) != 0) return note(cudaErrorMemoryAllocation);
  std::memset(*p, 0xff, bytes);  // NaN
  ++runtime().allocated;
  runtime().allocations[static_cast<std::byte*>(*p)] = {bytes, on_device ? device : nullptr};
  if (!on_device) return cudaSuccess;
  device->bytes_used += bytes;
  if (device->open == 0) set_poison(static_cast<std::byte*>(*p), bytes, true);
  return cudaSuccess;
}

void release_memory(decltype(Runtime::allocations)::iterator allocation) {
  const auto [bytes, device] = allocation->second;
  void* p = const_cast<std::byte*>(allocation->first);
  if (device != nullptr) device->bytes_used -= bytes;
  unpoison_memory(p, bytes);
  runtime().allocations.erase(allocation);
  std::free(p);
}

// Waits for the device, like CUDA; throws failures of that work, except from a destructor during stack unwinding.
cudaError_t deallocate(void* p, bool on_device) {
  Lock lock;
  if (p == nullptr) return cudaSuccess;
  if (const cudaError_t error = check_unsafe_call(); error != cudaSuccess) return error;
  const auto found = runtime().allocations.find(static_cast<std::byte*>(p));
  if (found == runtime().allocations.end() || (found->second.device != nullptr) != on_device)
    return note(cudaErrorInvalidValue);
  finish([&, device = found->second.device] {
    if (device != nullptr) return wait_for_device(lock, *device);
    for (const auto& each : runtime().devices) wait_for_device(lock, *each);
  });
  release_memory(found);  // no other host may free it meanwhile
  return cudaSuccess;
}

// Throws Failure unless kind and location agree.
void check_side(const Allocation* allocation, bool on_device, const char* what) {
  if (is_device(allocation) != on_device)
    throw Failure(std::string(what) + (on_device ? ": not device memory" : ": not host memory"));
}

}  // namespace
}  // namespace cuda_on_cpu::detail

using namespace cuda_on_cpu::detail;

void cuda_on_cpu::detail::free_all() {
  auto& all = runtime().allocations;
  for (auto each = all.begin(); each != all.end();)
    if (const auto next = std::next(each); each->second.device != nullptr) release_memory(std::exchange(each, next));
    else each = next;
}
void cuda_on_cpu::detail::require_memory_of(const Device* device, const void* p, size_t bytes, const char* what) {
  const Allocation* allocation = allocation_of(p, bytes, what);
  check_side(allocation, true, what);
  if (allocation->device != device)
    throw Failure(std::string(what) + ": memory of device " + std::to_string(allocation->device->number) +
                  " where memory of device " + (device ? std::to_string(device->number) : "(none)") + " is needed");
}
void cuda_on_cpu::require_device_memory(const void* p, size_t bytes, const char* what) {
  Lock lock;
  require_memory_of(current_device(), p, bytes, what);
}

uint64_t cuda_on_cpu::allocations() {
  Lock lock;
  return runtime().allocated;
}
cudaError_t cudaMalloc(void** p, size_t bytes) { return allocate(p, bytes, true); }
cudaError_t cudaFree(void* p) { return deallocate(p, true); }
cudaError_t cudaMallocHost(void** p, size_t bytes, unsigned) { return allocate(p, bytes, false); }
cudaError_t cudaHostAlloc(void** p, size_t bytes, unsigned) { return allocate(p, bytes, false); }
cudaError_t cudaFreeHost(void* p) { return deallocate(p, false); }

cudaError_t cudaMemcpyAsync(void* to, const void* from, size_t bytes, cudaMemcpyKind kind, cudaStream_t stream) {
  Lock lock;
  CUstream_st& s = stream_of(stream);
  if (bytes == 0) return cudaSuccess;
  const Allocation* target = allocation_of(to, bytes, "cudaMemcpy, destination");
  const Allocation* source = allocation_of(from, bytes, "cudaMemcpy, source");
  if (kind != cudaMemcpyDefault) {
    check_side(target, kind == cudaMemcpyHostToDevice || kind == cudaMemcpyDeviceToDevice, "cudaMemcpy, destination");
    check_side(source, kind == cudaMemcpyDeviceToHost || kind == cudaMemcpyDeviceToDevice, "cudaMemcpy, source");
  }
  const bool pageable = is_pageable(target) || is_pageable(source);
  const bool to_host = !is_device(target), from_host = !is_device(source);
  if (pageable && is_capturing(s)) return refuse_capture(s);
  std::shared_ptr<void> staged;
  if (is_pageable(source)) {  // the source may be overwritten as soon as this call returns
    staged = std::shared_ptr<void>(std::malloc(bytes), std::free);
    copy(staged.get(), from, bytes, true, true);
  }
  const cudaError_t error = submit(s, {.type = cudaGraphNodeTypeMemcpy, .run = [=] {
                                         copy(to, staged != nullptr ? staged.get() : from, bytes, to_host, from_host);
                                       }});
  if (error == cudaSuccess && (is_pageable(target) || (to_host && from_host && !is_capturing(s))))
    wait_for_stream(lock, s);
  return error;
}
cudaError_t cudaMemsetAsync(void* p, int value, size_t bytes, cudaStream_t stream) {
  Lock lock;
  CUstream_st& s = stream_of(stream);
  if (bytes == 0) return cudaSuccess;
  check_side(allocation_of(p, bytes, "cudaMemset"), true, "cudaMemset");
  return submit(s, {.type = cudaGraphNodeTypeMemset, .run = [=] { set(p, value, bytes); }});
}

// On the default stream; the host waits.
template <class F>
static cudaError_t at_once(F&& enqueue) {
  {
    Lock lock;
    if (const cudaError_t error = check_unsafe_call(); error != cudaSuccess) return error;
  }
  const cudaError_t error = enqueue();
  return error == cudaSuccess ? cudaStreamSynchronize(nullptr) : error;
}
cudaError_t cudaMemcpy(void* to, const void* from, size_t bytes, cudaMemcpyKind kind) {
  return at_once([&] { return cudaMemcpyAsync(to, from, bytes, kind, nullptr); });
}
cudaError_t cudaMemset(void* p, int value, size_t bytes) {
  return at_once([&] { return cudaMemsetAsync(p, value, bytes, nullptr); });
}
