// projection_norm.h: rmsnorm of whole query and key projections; other ranks may have some of their heads. Statistics
// in fp32. Contracts: ops/ops_heads.h.
#pragma once
#include "ops/cpu/rmsnorm.h"

namespace llmc::cpu {
inline namespace CPU_ISA {

namespace detail {

// The query channels (0) and the key channels (1) of a row of qkv.
struct Projection {
  int64_t begin, size;
};
inline Projection projection(int64_t which, const AttentionShape& s) {
  return which == 0 ? Projection{0, s.Hq * s.D} : Projection{s.Hq * s.D, s.Hkv * s.D};
}

}  // namespace detail

// dout, q_weight, k_weight: nullptr for the sums of squares
template <class T, class A = accumulator_t<T>>
void projection_sums(A* sums, const T* qkv, const T* dout, const T* q_weight, const T* k_weight,
                     const AttentionShape& s) {
  const int64_t row = (s.Hq + 2 * s.Hkv) * s.D;
#pragma omp parallel for schedule(static)
  for (int64_t n = 0; n < s.B * s.T; ++n)
    for (const int64_t which : {0, 1}) {
      const auto [begin, size] = detail::projection(which, s);
      const T *x = qkv + n * row + begin, *d = dout + n * row + begin, *weight = which == 0 ? q_weight : k_weight;
      A sum = 0;
      if (dout == nullptr) {
#pragma omp simd reduction(+ : sum)
        for (int64_t c = 0; c < size; ++c) sum += static_cast<A>(x[c]) * static_cast<A>(x[c]);
      } else {
#pragma omp simd reduction(+ : sum)
        for (int64_t c = 0; c < size; ++c)
          sum += static_cast<A>(d[c]) * static_cast<A>(weight[c]) * static_cast<A>(x[c]);
      }
      sums[n * 2 + which] = sum;
    }
}

template <class T, class A = accumulator_t<T>>
void projection_norm_forward(T* out, A* rstd, const T* qkv, const T* q_weight, const T* k_weight, const A* sums,
                             float eps, const AttentionShape& s, const HeadShares& shares) {
  const int64_t row = (s.Hq + 2 * s.Hkv) * s.D, N = s.B * s.T;
#pragma omp parallel for schedule(static)
  for (int64_t n = 0; n < N; ++n) {
    for (const int64_t which : {0, 1}) {
      const auto [begin, size] = detail::projection(which, s);
      const T *x = qkv + n * row + begin, *weight = which == 0 ? q_weight : k_weight;
      T* to = out + n * row + begin;
      const A channels = static_cast<A>(size * shares.parts(which));
      const A r = A(1) / std::sqrt(shares.total(sums, N, n, which) / channels + static_cast<A>(eps));
#pragma omp simd
      for (int64_t c = 0; c < size; ++c) store(to[c], static_cast<A>(x[c]) * r * static_cast<A>(weight[c]));
      rstd[n * 2 + which] = r;
    }
    std::copy(qkv + (n + 1) * row - s.Hkv * s.D, qkv + (n + 1) * row, out + (n + 1) * row - s.Hkv * s.D);
  }
}

// partials: (row_partitions, (Hq + Hkv) D)
template <class T, class A = accumulator_t<T>>
void projection_norm_backward(T* dqkv, A* dq_weight, A* dk_weight, A* partials, const T* qkv, const T* q_weight,
                              const T* k_weight, const A* rstd, const A* sums, const AttentionShape& s,
                              const HeadShares& shares) {
  const int64_t row = (s.Hq + 2 * s.Hkv) * s.D, N = s.B * s.T, normed = (s.Hq + s.Hkv) * s.D;
#pragma omp parallel for schedule(static)
  for (int64_t part = 0; part < row_partitions; ++part) {
    A* dweights = partials + part * normed;
    std::fill(dweights, dweights + normed, A(0));
    for (int64_t n = partition_begin(N, part); n < partition_begin(N, part + 1); ++n)
      for (const int64_t which : {0, 1}) {
        const auto [begin, size] = detail::projection(which, s);
        const T *x = qkv + n * row + begin, *weight = which == 0 ? q_weight : k_weight;
        T* d = dqkv + n * row + begin;
        A* dweight = dweights + begin;
        const A r = rstd[n * 2 + which], channels = static_cast<A>(size * shares.parts(which));
        const A mean = shares.total(sums, N, n, which) * r / channels;  // of gradient x weight x normalised channel
#pragma omp simd
        for (int64_t c = 0; c < size; ++c) {
          const A normalised = static_cast<A>(x[c]) * r, g = static_cast<A>(d[c]);
          dweight[c] += g * normalised;
          store(d[c], (g * static_cast<A>(weight[c]) - normalised * mean) * r);
        }
      }
  }
  add_partials(dq_weight, partials, normed, s.Hq * s.D);
  add_partials(dk_weight, partials + s.Hq * s.D, normed, s.Hkv * s.D);
}

}  // namespace CPU_ISA
}  // namespace llmc::cpu
