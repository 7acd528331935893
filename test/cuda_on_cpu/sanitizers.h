// sanitizers.h: annotations that tell AddressSanitizer and ThreadSanitizer about fibers, shared memory and barriers;
// no-ops in builds without them.
#pragma once
#include <cstddef>

#if defined(__SANITIZE_ADDRESS__)
#include <sanitizer/asan_interface.h>
#include <sanitizer/common_interface_defs.h>
#elif defined(__SANITIZE_THREAD__)
#include <sanitizer/tsan_interface.h>
extern "C" {
void AnnotateIgnoreReadsBegin(const char* file, int line);
void AnnotateIgnoreReadsEnd(const char* file, int line);
void AnnotateIgnoreWritesBegin(const char* file, int line);
void AnnotateIgnoreWritesEnd(const char* file, int line);
void AnnotateIgnoreSyncBegin(const char* file, int line);
void AnnotateIgnoreSyncEnd(const char* file, int line);
void __tsan_read_range(void* p, unsigned long bytes);
void __tsan_write_range(void* p, unsigned long bytes);
}
#endif

namespace cuda_on_cpu {

#if defined(__SANITIZE_ADDRESS__)
inline constexpr bool address_sanitizer = true, thread_sanitizer = false;
inline void poison_memory(const void* p, size_t bytes) { __asan_poison_memory_region(p, bytes); }
inline void unpoison_memory(const void* p, size_t bytes) { __asan_unpoison_memory_region(p, bytes); }
// As if all of it were read.
inline void check_host_memory(const void* p, size_t bytes) {
  if (const void* bad = __asan_region_is_poisoned(const_cast<void*>(p), bytes)) [[maybe_unused]]
    const char read = *static_cast<const volatile char*>(bad);
}
#else
inline constexpr bool address_sanitizer = false;
inline void poison_memory(const void*, size_t) {}
inline void unpoison_memory(const void*, size_t) {}
inline void check_host_memory(const void*, size_t) {}
#endif

#if defined(__SANITIZE_THREAD__)
inline constexpr bool thread_sanitizer = true;

// Accesses before a release, by any context, happen before those after an acquire of the same address.
inline void release(void* address) { __tsan_release(address); }
inline void acquire(void* address) { __tsan_acquire(address); }

inline void* current_context() { return __tsan_get_current_fiber(); }
inline void* create_context() { return __tsan_create_fiber(0); }
inline void destroy_context(void* context) { __tsan_destroy_fiber(context); }
// From here on another context accesses memory. The switch itself orders nothing: only acquire and release do.
inline void switch_context(void* context) { __tsan_switch_to_fiber(context, __tsan_switch_to_fiber_no_sync); }

// While an Unobserved lives, the emulator's own accesses are ignored, except within an Observed.
template <bool observed>
class Observation {
 public:
  Observation() { set(observed); }
  ~Observation() { set(!observed); }
  Observation(const Observation&) = delete;
  Observation& operator=(const Observation&) = delete;

 private:
  static void set(bool on) {
    (on ? AnnotateIgnoreReadsEnd : AnnotateIgnoreReadsBegin)(__FILE__, __LINE__);
    (on ? AnnotateIgnoreWritesEnd : AnnotateIgnoreWritesBegin)(__FILE__, __LINE__);
  }
};
using Unobserved = Observation<false>;
using Observed = Observation<true>;

// Records that the emulator has read (written) all of this on behalf of the context.
inline void observe_read(const void* p, size_t bytes) {
  const Observed observed;
  __tsan_read_range(const_cast<void*>(p), bytes);
}
inline void observe_write(void* p, size_t bytes) {
  const Observed observed;
  __tsan_write_range(p, bytes);
}

// While an Unordered lives, mutexes order nothing: otherwise their use inside the emulator would hide races between
// host threads.
class Unordered {
 public:
  Unordered() { AnnotateIgnoreSyncBegin(__FILE__, __LINE__); }
  ~Unordered() { AnnotateIgnoreSyncEnd(__FILE__, __LINE__); }
  Unordered(const Unordered&) = delete;
  Unordered& operator=(const Unordered&) = delete;
};
#else
#if !defined(__SANITIZE_ADDRESS__)
inline constexpr bool thread_sanitizer = false;
#endif
inline void release(void*) {}
inline void acquire(void*) {}
inline void* current_context() { return nullptr; }
inline void* create_context() { return nullptr; }
inline void destroy_context(void*) {}
inline void switch_context(void*) {}
struct Unobserved {
  Unobserved() {}  // not trivial, to avoid unused-variable warnings
};
using Observed = Unobserved;
using Unordered = Unobserved;
inline void observe_read(const void*, size_t) {}
inline void observe_write(void*, size_t) {}
#endif

}  // namespace cuda_on_cpu
