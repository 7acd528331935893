// simd.h: shared by the CPU ops: an exponential that vectorises, the widest vectors, and the fixed partition that keeps
// sums independent of the thread count.
#pragma once
#include <bit>

#include "core/dtype.h"
#include "core/shape.h"
#include "ops/cpu/isa.h"
#include "ops/types.h"

namespace llmc::cpu {
inline namespace CPU_ISA {

// exp(x) for x in [-87, 88], clamped outside; NaN stays NaN. About 1 ulp (Cody-Waite reduction, degree 6 polynomial).
// Inline and branchless, so that loops over it vectorise without -ffast-math.
inline float exponential(float x) {
  x = x < -87.0f ? -87.0f : x;
  x = x > 88.0f ? 88.0f : x;
  const float shifted = x * 1.44269504f + 12582912.0f;  // 1.5 * 2^23: rounds x / ln 2 into the low bits
  const float n = shifted - 12582912.0f;
  const float r = (x - n * 0.693145751953125f) - n * 1.428606765330187e-6f;
  float p = 1.0f / 720;
  p = p * r + 1.0f / 120;
  p = p * r + 1.0f / 24;
  p = p * r + 1.0f / 6;
  p = p * r + 0.5f;
  p = p * r + 1.0f;
  p = p * r + 1.0f;
  const uint32_t exponent = std::bit_cast<uint32_t>(shifted) << 23;
  const float result = std::bit_cast<float>(std::bit_cast<uint32_t>(p) + exponent);
  return x != x ? x : result;  // adding the exponent could turn a NaN into a number
}
inline double exponential(double x) { return std::exp(x); }

// The widest vector that the set (sets/) has registers for: g++ 12 splits wider ones through memory, fifty times
// slower.
#ifndef CPU_VECTOR_BYTES
#define CPU_VECTOR_BYTES 16
#endif
inline constexpr int vector_bytes = CPU_VECTOR_BYTES;
template <class A>
struct simd;
template <>
struct simd<float> {
  typedef float type __attribute__((vector_size(vector_bytes)));
};
template <>
struct simd<double> {
  typedef double type __attribute__((vector_size(vector_bytes)));
};

template <class A, class T>
void widen(A* out, const T* x, int64_t n) {
#pragma omp simd
  for (int64_t i = 0; i < n; ++i) out[i] = static_cast<A>(x[i]);
}

// sum = a + b
template <class T>
void add_rows(T* sum, const T* a, const T* b, int64_t n) {
  using A = accumulator_t<T>;
#pragma omp simd
  for (int64_t i = 0; i < n; ++i) store(sum[i], static_cast<A>(a[i]) + static_cast<A>(b[i]));
}

// Number of partial sums over rows; they are added in order, so the result does not depend on the thread count.
inline constexpr int64_t row_partitions = 32;
inline int64_t partition_begin(int64_t rows, int64_t part) { return rows * part / row_partitions; }
// sum (n) += the partial sums, in order.   partials (row_partitions, stride)
template <class A>
void add_partials(A* sum, const A* partials, int64_t stride, int64_t n) {
  for (int64_t part = 0; part < row_partitions; ++part)
    for (int64_t c = 0; c < n; ++c) sum[c] += partials[part * stride + c];
}

}  // namespace CPU_ISA
}  // namespace llmc::cpu
