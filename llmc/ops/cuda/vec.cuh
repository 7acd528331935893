// vec.cuh: elements as fp32, and packs of elements that one instruction moves: 16 bytes where an array allows it.
#pragma once
#include <cuda_runtime.h>
#ifdef __CUDACC__
#include <cuda_bf16.h>
#endif

#include <cstdint>
#include <cstring>

#include "core/dtype.h"

namespace llmc::cuda {

__device__ inline float to_float(float x) { return x; }
__device__ inline float to_float(bf16 x) { return __uint_as_float(static_cast<uint32_t>(x.bits) << 16); }

// x rounded to T, to nearest even.
template <class T>
__device__ T from_float(float x);
template <>
__device__ inline float from_float<float>(float x) {
  return x;
}
template <>
__device__ inline bf16 from_float<bf16>(float x) {
  bf16 rounded;
#ifdef __CUDACC__
  rounded.bits = static_cast<__nv_bfloat16_raw>(__float2bfloat16_rn(x)).x;  // one instruction
#else
  rounded.bits = bf16::rounded_bits(x);
#endif
  return rounded;
}

// Two bf16 in a register, the first in the lower half.
__device__ inline uint32_t bf16_pair(float first, float second) {
#ifdef __CUDACC__
  const __nv_bfloat162_raw pair = __floats2bfloat162_rn(first, second);  // one instruction
  return pair.x | static_cast<uint32_t>(pair.y) << 16;
#else
  return bf16::rounded_bits(first) | static_cast<uint32_t>(bf16::rounded_bits(second)) << 16;
#endif
}

// N neighbours of an array, in registers. Arrays that packs are read from or written to are aligned to the pack's size.
template <class T, int N = 16 / sizeof(T)>
struct alignas(sizeof(T) * N) Packed {
  static constexpr int size = N;
  static constexpr int bytes = sizeof(T) * N;
  T elements[N];

  __device__ float operator[](int i) const { return to_float(elements[i]); }
  __device__ void set(int i, float x) { elements[i] = from_float<T>(x); }

  __device__ static Packed load(const T* from) { return *reinterpret_cast<const Packed*>(from); }
  __device__ void store(T* to) const { *reinterpret_cast<Packed*>(to) = *this; }

  // For what is read or written once: it leaves the caches first.
  __device__ static Packed load_streaming(const T* from) {
    if constexpr (bytes == 16) {
      const uint4 bits = __ldcs(reinterpret_cast<const uint4*>(from));
      Packed pack;
      memcpy(static_cast<void*>(&pack), &bits, sizeof bits);
      return pack;
    } else {
      return load(from);
    }
  }
  __device__ void store_streaming(T* to) const {
    if constexpr (bytes == 16) {
      uint4 bits;
      memcpy(&bits, this, sizeof bits);
      __stcs(reinterpret_cast<uint4*>(to), bits);
    } else {
      store(to);
    }
  }
};

// The elements of a pack for rows of C: 16 bytes' worth where every row begins at a multiple of 16 bytes, else one.
template <class T>
inline constexpr int full_pack = 16 / sizeof(T);
template <class... Pointers>
bool rows_fit_packs(int64_t C, int pack, const Pointers*... arrays) {
  return C % pack == 0 && ((reinterpret_cast<uintptr_t>(arrays) % 16 == 0) && ...);
}

}  // namespace llmc::cuda
