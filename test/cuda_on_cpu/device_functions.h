// device_functions.h: the functions that kernels call: indices, barriers, shuffles, votes, integer atomics, intrinsics.
#pragma once
#include <algorithm>
#include <bit>
#include <cmath>
#include <cstring>
#include <type_traits>

#include "cuda_on_cpu/emulator.h"

inline constexpr int warpSize = 32;

// ---- Barriers -------------------------------------------------------------------------------------------------------

inline void __syncthreads(const cuda_on_cpu::Location& where = cuda_on_cpu::Location::current()) {
  if (!cuda_on_cpu::is_switched_off("__syncthreads", where)) cuda_on_cpu::meet_block("__syncthreads", where);
}
inline void __syncwarp(unsigned mask = ~0u, const cuda_on_cpu::Location& where = cuda_on_cpu::Location::current()) {
  if (!cuda_on_cpu::is_switched_off("__syncwarp", where)) cuda_on_cpu::sync_warp(mask, where);
}
inline void __threadfence() { cuda_on_cpu::thread_fence(); }
inline void __threadfence_block() { cuda_on_cpu::thread_fence(); }

// ---- Shuffles and votes ---------------------------------------------------------------------------------------------

namespace cuda_on_cpu {

template <class T>
struct Shuffled {
  T value;
  unsigned source;  // the lane whose value this lane gets
  T result;
};

template <class T>
T shuffle(const char* what, unsigned mask, T value, unsigned source, const Location& where) {
  static_assert(std::is_trivially_copyable_v<T> && (sizeof(T) == 4 || sizeof(T) == 8), "CUDA shuffles 4 or 8 bytes");
  if ((mask >> source & 1) == 0)
    fail(std::string(what) + ": reads lane " + std::to_string(source) + ", which is not in its mask", where);
  Shuffled<T> record{value, source, {}};
  const auto exchange = [](Shuffled<T>* const* records, uint32_t lanes) {
    for (unsigned l = 0; l < 32; ++l)
      if (lanes >> l & 1) records[l]->result = records[records[l]->source]->value;
  };
  meet_warp(what, mask, record, exchange, where);
  return record.result;
}

// Every lane's predicate, as a bit mask.
inline unsigned vote(const char* what, unsigned mask, bool mine, const Location& where) {
  struct Vote {
    bool mine;
    unsigned all;
  } record{mine, 0};
  const auto exchange = [](Vote* const* records, uint32_t lanes) {
    unsigned all = 0;
    for (unsigned l = 0; l < 32; ++l)
      if (lanes >> l & 1) all |= static_cast<unsigned>(records[l]->mine) << l;
    for (unsigned l = 0; l < 32; ++l)
      if (lanes >> l & 1) records[l]->all = all;
  };
  meet_warp(what, mask, record, exchange, where);
  return record.all;
}

}  // namespace cuda_on_cpu

// Lanes stay within groups of `width`; a lane whose source is outside its group keeps its own value.
template <class T>
T __shfl_sync(unsigned mask, T value, int source, int width = 32,
              const cuda_on_cpu::Location& where = cuda_on_cpu::Location::current()) {
  const unsigned lane = cuda_on_cpu::lane(), w = static_cast<unsigned>(width);
  return cuda_on_cpu::shuffle("__shfl_sync", mask, value, lane / w * w + static_cast<unsigned>(source) % w, where);
}
template <class T>
T __shfl_xor_sync(unsigned mask, T value, int lanes, int width = 32,
                  const cuda_on_cpu::Location& where = cuda_on_cpu::Location::current()) {
  const unsigned lane = cuda_on_cpu::lane(), w = static_cast<unsigned>(width);
  const unsigned source = lane ^ static_cast<unsigned>(lanes);
  return cuda_on_cpu::shuffle("__shfl_xor_sync", mask, value, source < lane / w * w + w ? source : lane, where);
}
template <class T>
T __shfl_up_sync(unsigned mask, T value, unsigned delta, int width = 32,
                 const cuda_on_cpu::Location& where = cuda_on_cpu::Location::current()) {
  const unsigned lane = cuda_on_cpu::lane(), w = static_cast<unsigned>(width);
  return cuda_on_cpu::shuffle("__shfl_up_sync", mask, value, lane % w >= delta ? lane - delta : lane, where);
}
template <class T>
T __shfl_down_sync(unsigned mask, T value, unsigned delta, int width = 32,
                   const cuda_on_cpu::Location& where = cuda_on_cpu::Location::current()) {
  const unsigned lane = cuda_on_cpu::lane(), w = static_cast<unsigned>(width);
  return cuda_on_cpu::shuffle("__shfl_down_sync", mask, value, lane % w + delta < w ? lane + delta : lane, where);
}

inline unsigned __ballot_sync(unsigned mask, int predicate,
                              const cuda_on_cpu::Location& where = cuda_on_cpu::Location::current()) {
  return cuda_on_cpu::vote("__ballot_sync", mask, predicate != 0, where);
}
inline int __any_sync(unsigned mask, int predicate,
                      const cuda_on_cpu::Location& where = cuda_on_cpu::Location::current()) {
  return cuda_on_cpu::vote("__any_sync", mask, predicate != 0, where) != 0;
}
inline int __all_sync(unsigned mask, int predicate,
                      const cuda_on_cpu::Location& where = cuda_on_cpu::Location::current()) {
  return cuda_on_cpu::vote("__all_sync", mask, predicate != 0, where) == mask;
}
// The active lanes of this warp: with fibers that is only the caller itself.
unsigned __activemask() = delete;  // pass a mask that the algorithm knows

// ---- Atomics: integers only. Sums of floats would depend on the order, which the contracts of ops forbid. -----------

namespace cuda_on_cpu {
template <class T>
concept AtomicInteger = std::is_same_v<T, int> || std::is_same_v<T, unsigned> || std::is_same_v<T, unsigned long long>;

template <AtomicInteger T, class F>
T atomic_update(T* address, F&& next) {  // relaxed, as in CUDA: no other ordering
  T old = __atomic_load_n(address, __ATOMIC_RELAXED);
  while (!__atomic_compare_exchange_n(address, &old, next(old), false, __ATOMIC_RELAXED, __ATOMIC_RELAXED)) continue;
  return old;
}
}  // namespace cuda_on_cpu

template <cuda_on_cpu::AtomicInteger T>
T atomicAdd(T* address, std::type_identity_t<T> value) {
  return __atomic_fetch_add(address, value, __ATOMIC_RELAXED);
}
template <cuda_on_cpu::AtomicInteger T>
T atomicMax(T* address, std::type_identity_t<T> value) {
  return cuda_on_cpu::atomic_update(address, [=](T old) { return std::max(old, value); });
}
template <cuda_on_cpu::AtomicInteger T>
T atomicMin(T* address, std::type_identity_t<T> value) {
  return cuda_on_cpu::atomic_update(address, [=](T old) { return std::min(old, value); });
}
template <cuda_on_cpu::AtomicInteger T>
T atomicOr(T* address, std::type_identity_t<T> value) {
  return __atomic_fetch_or(address, value, __ATOMIC_RELAXED);
}
template <cuda_on_cpu::AtomicInteger T>
T atomicAnd(T* address, std::type_identity_t<T> value) {
  return __atomic_fetch_and(address, value, __ATOMIC_RELAXED);
}
template <cuda_on_cpu::AtomicInteger T>
T atomicExch(T* address, std::type_identity_t<T> value) {
  return __atomic_exchange_n(address, value, __ATOMIC_RELAXED);
}
template <cuda_on_cpu::AtomicInteger T>
T atomicCAS(T* address, std::type_identity_t<T> expected, std::type_identity_t<T> value) {
  __atomic_compare_exchange_n(address, &expected, value, false, __ATOMIC_RELAXED, __ATOMIC_RELAXED);
  return expected;
}
inline unsigned atomicInc(unsigned* address, unsigned limit) {
  return cuda_on_cpu::atomic_update(address, [=](unsigned old) { return old >= limit ? 0 : old + 1; });
}

// ---- Intrinsics -----------------------------------------------------------------------------------------------------

// Loads and stores with a hint to the cache.
template <class T>
T __ldg(const T* p) {
  return *p;
}
template <class T>
T __ldcs(const T* p) {
  return *p;
}
template <class T>
T __ldcg(const T* p) {
  return *p;
}
template <class T>
void __stcs(T* p, std::type_identity_t<T> value) {
  *p = value;
}
template <class T>
void __stcg(T* p, std::type_identity_t<T> value) {
  *p = value;
}

// Fast math is exact here: tests compare with tolerances. glibc declares some of these names and exports none.
inline float __expf(float x) noexcept { return std::exp(x); }
inline float __logf(float x) noexcept { return std::log(x); }
inline float __powf(float x, float y) noexcept { return std::pow(x, y); }
inline float __fdividef(float x, float y) { return x / y; }
inline float rsqrtf(float x) { return 1.0f / std::sqrt(x); }
inline float __frsqrt_rn(float x) { return 1.0f / std::sqrt(x); }
inline float __frcp_rn(float x) { return 1.0f / x; }
inline float __fsqrt_rn(float x) { return std::sqrt(x); }
inline float __fadd_rn(float x, float y) { return x + y; }
inline float __fmul_rn(float x, float y) { return x * y; }
inline float __fmaf_rn(float x, float y, float z) { return std::fma(x, y, z); }
inline float __saturatef(float x) { return x > 0 ? (x < 1 ? x : 1.0f) : 0.0f; }

inline unsigned __float_as_uint(float x) { return std::bit_cast<unsigned>(x); }
inline int __float_as_int(float x) { return std::bit_cast<int>(x); }
inline float __uint_as_float(unsigned x) { return std::bit_cast<float>(x); }
inline float __int_as_float(int x) { return std::bit_cast<float>(x); }
inline int __popc(unsigned x) { return std::popcount(x); }
inline int __clz(int x) { return std::countl_zero(static_cast<unsigned>(x)); }
inline int __ffs(int x) { return x == 0 ? 0 : std::countr_zero(static_cast<unsigned>(x)) + 1; }
inline unsigned __umulhi(unsigned x, unsigned y) { return static_cast<unsigned>(uint64_t{x} * y >> 32); }

// CUDA has these in the global namespace.
#define CUDA_ON_CPU_MIN_MAX(T)                     \
  inline T min(T a, T b) { return b < a ? b : a; } \
  inline T max(T a, T b) { return a < b ? b : a; }
CUDA_ON_CPU_MIN_MAX(int)
CUDA_ON_CPU_MIN_MAX(unsigned)
CUDA_ON_CPU_MIN_MAX(long)
CUDA_ON_CPU_MIN_MAX(long long)
CUDA_ON_CPU_MIN_MAX(unsigned long)
CUDA_ON_CPU_MIN_MAX(unsigned long long)
#undef CUDA_ON_CPU_MIN_MAX
inline float min(float a, float b) { return std::fmin(a, b); }
inline float max(float a, float b) { return std::fmax(a, b); }
