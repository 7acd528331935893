// vec.cuh: elements as fp32, and packs of elements moved by one instruction: 16 bytes where alignment allows it.
#pragma once
#include <cuda_runtime.h>
#ifdef __CUDACC__
#include <cuda_bf16.h>
#endif

#include "core/dtype.h"
#include "ops/cuda/mma.cuh"

namespace llmc::cuda {

__device__ inline float to_float(float x) { return x; }
__device__ inline float to_float(bf16 x) { return __uint_as_float(static_cast<uint32_t>(x.bits) << 16); }

// x rounded to T, to nearest even.
template <class T>
__device__ T from_float(float x) {
  if constexpr (std::is_same_v<T, float>) return x;
  else {
    static_assert(std::is_same_v<T, bf16>);
    bf16 rounded;
#ifdef __CUDACC__
    rounded.bits = static_cast<__nv_bfloat16_raw>(__float2bfloat16_rn(x)).x;  // one instruction
#else
    rounded.bits = bf16::rounded_bits(x);
#endif
    return rounded;
  }
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

// exp x and 1 / (1 + exp -x), to the precision of T: bf16 has 8 bits, the fast instructions about 21.
template <class T>
__device__ float exponential(float x) {
  if constexpr (sizeof(T) == sizeof(bf16)) return fast_exp2(x * log2_e);
  else return expf(x);
}
template <class T>
__device__ float sigmoid(float x) {
  const float y = 1.0f + exponential<T>(-x);
  if constexpr (sizeof(T) == sizeof(bf16)) return __fdividef(1.0f, y);
  else return 1.0f / y;
}

template <class T, int N = 16 / sizeof(T)>
struct Packed;

// N fp32 numbers in registers. In memory they are aligned to four of them, or to all N if there are fewer.
template <int N>
struct Floats {
  static constexpr int at_once = N < 4 ? N : 4;
  float values[N];
  __device__ float operator[](int i) const { return values[i]; }
  __device__ float& operator[](int i) { return values[i]; }
  template <class X>
  __device__ void operator+=(const X& x) {
    for (int i = 0; i < N; ++i) values[i] += x[i];
  }
  __device__ static Floats load(const float* from) {
    Floats all;
    for (int i = 0; i < N; i += at_once) {
      const auto some = Packed<float, at_once>::load(from + i);
      for (int j = 0; j < at_once; ++j) all[i + j] = some[j];
    }
    return all;
  }
  __device__ void store(float* to) const {
    for (int i = 0; i < N; i += at_once) {
      Packed<float, at_once> some;
      for (int j = 0; j < at_once; ++j) some.set(j, values[i + j]);
      some.store(to + i);
    }
  }
};

// N consecutive array elements, in registers. The arrays must be aligned to the pack's size.
template <class T, int N>
struct alignas(sizeof(T) * N) Packed {
  static constexpr int size = N;
  static constexpr int bytes = sizeof(T) * N;
  T elements[N];

  __device__ float operator[](int i) const { return to_float(elements[i]); }
  __device__ void set(int i, float x) { elements[i] = from_float<T>(x); }
  // Sets all elements; bf16 two at a time.
  __device__ static Packed of(const Floats<N>& values) {
    Packed pack;
    if constexpr (sizeof(T) == sizeof(bf16) && N % 2 == 0) {
      uint32_t words[N / 2];
      for (int i = 0; i < N; i += 2) words[i / 2] = bf16_pair(values[i], values[i + 1]);
      memcpy(static_cast<void*>(&pack), words, sizeof words);
    } else {
      for (int i = 0; i < N; ++i) pack.set(i, values[i]);
    }
    return pack;
  }

  __device__ static Packed load(const T* from) { return *reinterpret_cast<const Packed*>(from); }
  __device__ void store(T* to) const { *reinterpret_cast<Packed*>(to) = *this; }

  // For data read or written once: evicted from the caches first.
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

// A pack kept in whole registers until it is used. A compiler may hold each bf16 of a Packed in a register of its own,
// and its fp32 value as well.
template <class Pack>
struct Kept {
  static constexpr int count = (Pack::bytes + 3) / 4;
  uint32_t words[count] = {};

  Kept() = default;
  __device__ Kept(const Pack& pack) { memcpy(words, &pack, Pack::bytes); }
  template <class T>
  __device__ void store(T* to) const {
    if constexpr (count == 4) *reinterpret_cast<uint4*>(to) = {words[0], words[1], words[2], words[3]};
    else pack(words).store(to);
  }
  // The elements as fp32, converted anew by every call.
  __device__ Floats<Pack::size> fp32() const {
    Floats<Pack::size> all;
    uint32_t now[count];
    for (int i = 0; i < count; ++i) {
      now[i] = words[i];
      asm volatile("" : "+r"(now[i]));
    }
    if constexpr (2 * count == Pack::size) {  // pairs of bf16
      for (int i = 0; i < count; ++i) {
        all[2 * i] = __uint_as_float(now[i] << 16);
        all[2 * i + 1] = __uint_as_float(now[i] & 0xffff0000u);
      }
    } else {
      const Pack elements = pack(now);
      for (int i = 0; i < Pack::size; ++i) all[i] = elements[i];
    }
    return all;
  }

 private:
  __device__ static Pack pack(const uint32_t (&from)[count]) {
    Pack pack;
    memcpy(static_cast<void*>(&pack), from, Pack::bytes);
    return pack;
  }
};

// Elements per pack: 16 bytes of the widest type; 1 if an array, or a row of C in it, is not 16-byte aligned.
template <class... T>
inline constexpr int full_pack = 16 / std::max({sizeof(T)...});
template <class... Pointers>
bool fit_packs(const Pointers*... arrays) {
  return ((reinterpret_cast<uintptr_t>(arrays) % 16 == 0) && ...);
}
template <class... Pointers>
bool rows_fit_packs(int64_t C, int pack, const Pointers*... arrays) {
  return C % pack == 0 && fit_packs(arrays...);
}

// Calls f<pack>() if everything fits packs of this size, else f<1>().
template <int pack, class F>
void with_packs(bool fit, F&& f) {
  if (fit) f.template operator()<pack>();
  else f.template operator()<1>();
}

// Calls f<n>(), where n is from 1 to most.
template <int most, class F>
void with_constant(int64_t n, F&& f) {
  if constexpr (most > 1)
    if (n < most) return with_constant<most - 1>(n, f);
  f.template operator()<most>();
}

}  // namespace llmc::cuda
