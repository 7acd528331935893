// experts.h: the order of rows by expert, moving rows into it, and the sum of what the experts of a row computed.
// Contracts: ops/ops_experts.h.
#pragma once
#include "ops/cpu/simd.h"

namespace llmc::cpu {
inline namespace CPU_ISA {

// scratch: (segments + 1, E) integers. starts: (segments, E) or nullptr. capacity: -1 for none.
inline void dispatch_plan(int32_t* places, int32_t* offsets, int32_t* scratch, const int32_t* choices,
                          const int32_t* starts, int64_t N, int64_t E, int64_t k, int64_t capacity,
                          const Segments& segments, const ExpertRoom& rows) {
  const int64_t of_block = E / rows.blocks;
  int32_t *taken = scratch, *next = scratch + segments.count(N) * E;
  for (int64_t i = 0; i < segments.count(N) * E; ++i) taken[i] = starts == nullptr ? 0 : starts[i];
  std::fill(offsets, offsets + E + 1, 0);
  for (int64_t i = 0; i < N * k; ++i) {
    const int32_t e = choices[i];
    const bool kept = capacity < 0 || taken[segments.of(i / k) * E + e]++ < capacity;
    places[i] = kept ? 0 : -1;
    if (kept) ++offsets[e + 1];
  }
  for (int64_t e = 0; e < E; ++e) offsets[e + 1] += offsets[e];
  for (int64_t e = 0; e < E; ++e) {
    const int64_t block = e / of_block;
    next[e] = offsets[e] - offsets[block * of_block] + static_cast<int32_t>(block * rows.stride());
  }
  for (int64_t i = 0; i < N * k; ++i)
    if (places[i] >= 0) places[i] = next[choices[i]]++;
}

template <class T>
void dispatch_rows(T* out, const T* x, const int32_t* places, int64_t N, int64_t C, int64_t k) {
#pragma omp parallel for schedule(static)
  for (int64_t i = 0; i < N * k; ++i)
    if (places[i] >= 0) std::copy_n(x + i / k * C, C, out + places[i] * C);
}

// weights: (N, k), or nullptr: all 1. places: (N, k), or nullptr: the rows are in the order (row, choice)
template <class T, class A = accumulator_t<T>>
void combine_rows(T* out, const T* y, const A* weights, const int32_t* places, int64_t N, int64_t C, int64_t k,
                  Accumulate accumulate) {
  constexpr int64_t columns = 256;
#pragma omp parallel for collapse(2) schedule(static)
  for (int64_t n = 0; n < N; ++n)
    for (int64_t begin = 0; begin < C; begin += columns) {
      const int64_t count = std::min(columns, C - begin);
      A sums[columns] = {};
      for (int64_t j = 0; j < k; ++j) {
        const int64_t place = places == nullptr ? n * k + j : places[n * k + j];
        if (place < 0) continue;
        const T* row = y + place * C + begin;
        const A w = weights == nullptr ? A(1) : weights[n * k + j];
#pragma omp simd
        for (int64_t c = 0; c < count; ++c) sums[c] += w * static_cast<A>(row[c]);
      }
      T* to = out + n * C + begin;
      const bool keep = accumulate == Accumulate::yes;
#pragma omp simd
      for (int64_t c = 0; c < count; ++c) store(to[c], (keep ? static_cast<A>(to[c]) : A(0)) + sums[c]);
    }
}

template <class T, class A = accumulator_t<T>>
void combine_backward(T* dy, A* dweights, const T* dout, const T* y, const A* weights, const int32_t* places, int64_t N,
                      int64_t C, int64_t k) {
#pragma omp parallel for schedule(static)
  for (int64_t n = 0; n < N; ++n)
    for (int64_t j = 0; j < k; ++j) {
      const int64_t place = places == nullptr ? n * k + j : places[n * k + j];
      const T* gradient = dout + n * C;
      const A w = weights[n * k + j];
      A sum = 0;
      if (place >= 0) {
        const T* row = y + place * C;
        T* to = dy + place * C;
#pragma omp simd reduction(+ : sum)
        for (int64_t c = 0; c < C; ++c) sum += static_cast<A>(gradient[c]) * static_cast<A>(row[c]);
#pragma omp simd
        for (int64_t c = 0; c < C; ++c) store(to[c], w * static_cast<A>(gradient[c]));
      }
      dweights[n * k + j] = sum;
    }
}

}  // namespace CPU_ISA
}  // namespace llmc::cpu
