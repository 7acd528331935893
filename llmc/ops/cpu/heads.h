// heads.h: ops on query and key heads: rotary position embedding (Su et al. 2021), in the convention of transformers,
// where element i of a head is paired with element i + D / 2; rmsnorm of each head (Henry et al. 2020; Qwen3), or of
// whole projections, of which other ranks may have some heads. Statistics in fp32. Contracts: ops/ops_heads.h.
#pragma once
#include "ops/cpu/norms.h"

namespace llmc::cpu {
inline namespace CPU_ISA {

// table (P, D): for position p, D / 2 cosines, then D / 2 sines.
template <class A>
void rotary_table(A* table, const Rotary& rotary, int64_t P, int64_t D) {
#pragma omp parallel for schedule(static)
  for (int64_t p = 0; p < P; ++p)
    for (int64_t i = 0; i < D / 2; ++i) {
      const float angle = static_cast<float>(p) * rotary.frequency(i, D);  // rounded to fp32, as transformers does
      table[p * D + i] = static_cast<A>(std::cos(static_cast<double>(angle)));
      table[p * D + D / 2 + i] = static_cast<A>(std::sin(static_cast<double>(angle)));
    }
}

namespace detail {

// Rotates the query and key heads of one row in place.   row ((Hq + 2 Hkv) D); angles (D): of its position (the table)
template <class T, class A>
void rotate_row(T* row, const A* angles, const AttentionShape& s, Turn turn) {
  const int64_t half = s.D / 2;
  const A *cosines = angles, *sines = angles + half;
  const A sign = turn == Turn::forward ? A(1) : A(-1);
  for (int64_t h = 0; h < s.Hq + s.Hkv; ++h) {
    T* x = row + h * s.D;
#pragma omp simd
    for (int64_t i = 0; i < half; ++i) {
      const A a = static_cast<A>(x[i]), b = static_cast<A>(x[i + half]);
      store(x[i], a * cosines[i] - sign * b * sines[i]);
      store(x[i + half], b * cosines[i] + sign * a * sines[i]);
    }
  }
}

// The query channels (0) and the key channels (1) of a row of qkv.
struct Projection {
  int64_t begin, size;
};
inline Projection projection(int64_t which, const AttentionShape& s) {
  return which == 0 ? Projection{0, s.Hq * s.D} : Projection{s.Hq * s.D, s.Hkv * s.D};
}

}  // namespace detail

template <class T, class A = accumulator_t<T>>
void rotary(T* qkv, const A* table, const int32_t* positions, const AttentionShape& s, Turn turn) {
  const int64_t row = (s.Hq + 2 * s.Hkv) * s.D;
#pragma omp parallel for schedule(static)
  for (int64_t n = 0; n < s.B * s.T; ++n) detail::rotate_row(qkv + n * row, table + positions[n] * s.D, s, turn);
}

// Normalises each query and key head of a row separately and, given a table, rotates it; copies the values.
template <class T, class A = accumulator_t<T>>
void qk_norm_forward(T* out, A* rstd, const T* qkv, const T* q_weight, const T* k_weight, const A* table,
                     const int32_t* positions, float eps, const AttentionShape& s) {
  const int64_t normed = s.Hq + s.Hkv, row = (s.Hq + 2 * s.Hkv) * s.D;
#pragma omp parallel for schedule(static)
  for (int64_t n = 0; n < s.B * s.T; ++n) {
    for (int64_t h = 0; h < normed; ++h)
      rstd[n * normed + h] = detail::rmsnorm_row(out + n * row + h * s.D, qkv + n * row + h * s.D,
                                                 h < s.Hq ? q_weight : k_weight, eps, s.D);
    std::copy(qkv + n * row + normed * s.D, qkv + (n + 1) * row, out + n * row + normed * s.D);
    if (table != nullptr) detail::rotate_row(out + n * row, table + positions[n] * s.D, s, Turn::forward);
  }
}

// partials: (row_partitions, 2 D)
template <class T, class A = accumulator_t<T>>
void qk_norm_backward(T* dqkv, A* dq_weight, A* dk_weight, A* partials, const T* qkv, const T* q_weight,
                      const T* k_weight, const A* rstd, const A* table, const int32_t* positions,
                      const AttentionShape& s) {
  const int64_t normed = s.Hq + s.Hkv, row = (s.Hq + 2 * s.Hkv) * s.D, N = s.B * s.T;
#pragma omp parallel for schedule(static)
  for (int64_t part = 0; part < row_partitions; ++part) {
    A* dw = partials + part * 2 * s.D;
    std::fill(dw, dw + 2 * s.D, A(0));
    for (int64_t n = partition_begin(N, part); n < partition_begin(N, part + 1); ++n) {
      if (table != nullptr) detail::rotate_row(dqkv + n * row, table + positions[n] * s.D, s, Turn::backward);
      for (int64_t h = 0; h < normed; ++h) {
        T* d = dqkv + n * row + h * s.D;
        const bool query = h < s.Hq;
        detail::rmsnorm_row_backward(d, query ? dw : dw + s.D, d, qkv + n * row + h * s.D, query ? q_weight : k_weight,
                                     rstd[n * normed + h], s.D, Accumulate::no);
      }
    }
  }
  add_partials(dq_weight, partials, 2 * s.D, s.D);
  add_partials(dk_weight, partials + s.D, 2 * s.D, s.D);
}

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
