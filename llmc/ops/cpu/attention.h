// attention.h: causal attention by blocks of query rows, so that no T x T matrix exists; the backward recomputes the
// probabilities from the saved log-sum-exp (Dao 2023, FlashAttention-2). Contracts: ops/ops.h.
#pragma once
#include <omp.h>

#include "ops/cpu/simd.h"

namespace llmc::cpu {

struct AttentionShape {
  int64_t B, T, Hq, Hkv, D;
};

inline constexpr int64_t attention_rows = 32;  // query rows in a block

// Elements of scratch for all threads: K transposed, V, a block of Q, O and scores.
inline int64_t attention_forward_scratch(const AttentionShape& s, int threads) {
  return threads * (2 * s.T * s.D + 2 * attention_rows * s.D + attention_rows * s.T);
}
// K, K^T, V^T, dK, dV, blocks of Q, dO, dQ, P and dP.
inline int64_t attention_backward_scratch(const AttentionShape& s, int threads) {
  return threads * (5 * s.T * s.D + 3 * attention_rows * s.D + 2 * attention_rows * s.T);
}

namespace detail {

// Hands out pieces of a thread's scratch.
template <class A>
struct ScratchCursor {
  A* at;
  A* take(int64_t n) {
    A* piece = at;
    at += n;
    return piece;
  }
};

// One head's matrix (rows, D) out of rows of `stride` elements, widened; transposed: (D, ldt).
template <class A, class T>
void load_head(A* out, const T* x, int64_t stride, int64_t rows, int64_t D, A factor = A(1)) {
  for (int64_t t = 0; t < rows; ++t)
#pragma omp simd
    for (int64_t d = 0; d < D; ++d) out[t * D + d] = static_cast<A>(x[t * stride + d]) * factor;
}
template <class A>
void transpose(A* out, const A* x, int64_t rows, int64_t D) {
  for (int64_t d = 0; d < D; ++d)
    for (int64_t t = 0; t < rows; ++t) out[d * rows + t] = x[t * D + d];
}
template <class T, class A>
void store_head(T* out, int64_t stride, const A* x, int64_t rows, int64_t D) {
  for (int64_t t = 0; t < rows; ++t)
#pragma omp simd
    for (int64_t d = 0; d < D; ++d) store(out[t * stride + d], x[t * D + d]);
}

}  // namespace detail

template <class T, class A = accumulator_t<T>>
void attention_forward(T* out, A* lse, const T* qkv, A* scratch, const AttentionShape& s, int threads) {
  const int64_t stride = (s.Hq + 2 * s.Hkv) * s.D, group = s.Hq / s.Hkv;
  const int64_t per_thread = attention_forward_scratch(s, 1);
  const A scale = A(1) / std::sqrt(static_cast<A>(s.D));
#pragma omp parallel for collapse(2) schedule(static) num_threads(threads)
  for (int64_t b = 0; b < s.B; ++b)
    for (int64_t hk = 0; hk < s.Hkv; ++hk) {
      detail::ScratchCursor<A> cursor{scratch + omp_get_thread_num() * per_thread};
      A *k_t = cursor.take(s.T * s.D), *v = cursor.take(s.T * s.D), *q = cursor.take(attention_rows * s.D);
      A *o = cursor.take(attention_rows * s.D), *p = cursor.take(attention_rows * s.T);
      const T* rows = qkv + b * s.T * stride;
      detail::load_head(v, rows + (s.Hq + hk) * s.D, stride, s.T, s.D);  // k, for its transpose
      detail::transpose(k_t, v, s.T, s.D);
      detail::load_head(v, rows + (s.Hq + s.Hkv + hk) * s.D, stride, s.T, s.D);
      for (int64_t h = hk * group; h < (hk + 1) * group; ++h)
        for (int64_t begin = 0; begin < s.T; begin += attention_rows) {
          const int64_t n = std::min(attention_rows, s.T - begin), visible = begin + n;
          detail::load_head(q, rows + begin * stride + h * s.D, stride, n, s.D, scale);
          small_matmul(p, s.T, q, s.D, int64_t{1}, k_t, s.T, n, visible, s.D, Accumulate::no);
          for (int64_t i = 0; i < n; ++i) {
            A* row = p + i * s.T;
            const int64_t keys = begin + i + 1;
            A largest = row[0];
#pragma omp simd reduction(max : largest)
            for (int64_t j = 0; j < keys; ++j) largest = std::max(largest, row[j]);
            A sum = 0;
#pragma omp simd reduction(+ : sum)
            for (int64_t j = 0; j < keys; ++j) sum += row[j] = exponential(row[j] - largest);
            const A inverse = A(1) / sum;
#pragma omp simd
            for (int64_t j = 0; j < keys; ++j) row[j] *= inverse;
            std::fill(row + keys, row + visible, A(0));
            lse[(b * s.Hq + h) * s.T + begin + i] = largest + std::log(sum);
          }
          small_matmul(o, s.D, p, s.T, int64_t{1}, v, s.D, n, s.D, visible, Accumulate::no);
          detail::store_head(out + (b * s.T + begin) * s.Hq * s.D + h * s.D, s.Hq * s.D, o, n, s.D);
        }
    }
}

// With P the probabilities and dO the gradient of the output:
//   dV = P^T dO,   dP = dO V^T,   dS = P (dP - rowsum(dO O)),   dQ = dS K / sqrt(D),   dK = dS^T Q / sqrt(D)
// The query heads of a group add to dK and dV one after the other.
template <class T, class A = accumulator_t<T>>
void attention_backward(T* dqkv, const T* dout, const T* out, const T* qkv, const A* lse, A* scratch,
                        const AttentionShape& s, int threads) {
  const int64_t stride = (s.Hq + 2 * s.Hkv) * s.D, out_stride = s.Hq * s.D, group = s.Hq / s.Hkv;
  const int64_t per_thread = attention_backward_scratch(s, 1);
  const A scale = A(1) / std::sqrt(static_cast<A>(s.D));
#pragma omp parallel for collapse(2) schedule(static) num_threads(threads)
  for (int64_t b = 0; b < s.B; ++b)
    for (int64_t hk = 0; hk < s.Hkv; ++hk) {
      detail::ScratchCursor<A> cursor{scratch + omp_get_thread_num() * per_thread};
      A *k = cursor.take(s.T * s.D), *k_t = cursor.take(s.T * s.D), *v_t = cursor.take(s.T * s.D);
      A *dk = cursor.take(s.T * s.D), *dv = cursor.take(s.T * s.D), *q = cursor.take(attention_rows * s.D);
      A *g = cursor.take(attention_rows * s.D), *dq = cursor.take(attention_rows * s.D);
      A *p = cursor.take(attention_rows * s.T), *dp = cursor.take(attention_rows * s.T);
      const T* rows = qkv + b * s.T * stride;
      T* drows = dqkv + b * s.T * stride;
      detail::load_head(k, rows + (s.Hq + s.Hkv + hk) * s.D, stride, s.T, s.D);  // v, for its transpose
      detail::transpose(v_t, k, s.T, s.D);
      detail::load_head(k, rows + (s.Hq + hk) * s.D, stride, s.T, s.D);
      detail::transpose(k_t, k, s.T, s.D);
      std::fill(dk, dk + s.T * s.D, A(0));
      std::fill(dv, dv + s.T * s.D, A(0));
      for (int64_t h = hk * group; h < (hk + 1) * group; ++h)
        for (int64_t begin = 0; begin < s.T; begin += attention_rows) {
          const int64_t n = std::min(attention_rows, s.T - begin), visible = begin + n;
          const T* o = out + (b * s.T + begin) * out_stride + h * s.D;
          detail::load_head(q, rows + begin * stride + h * s.D, stride, n, s.D, scale);
          detail::load_head(g, dout + (b * s.T + begin) * out_stride + h * s.D, out_stride, n, s.D);
          small_matmul(p, s.T, q, s.D, int64_t{1}, k_t, s.T, n, visible, s.D, Accumulate::no);
          small_matmul(dp, s.T, g, s.D, int64_t{1}, v_t, s.T, n, visible, s.D, Accumulate::no);
          for (int64_t i = 0; i < n; ++i) {
            A *row = p + i * s.T, *drow = dp + i * s.T;
            const int64_t keys = begin + i + 1;
            const A l = lse[(b * s.Hq + h) * s.T + begin + i];
            A delta = 0;
#pragma omp simd reduction(+ : delta)
            for (int64_t d = 0; d < s.D; ++d) delta += g[i * s.D + d] * static_cast<A>(o[i * out_stride + d]);
#pragma omp simd
            for (int64_t j = 0; j < keys; ++j) {
              row[j] = exponential(row[j] - l);
              drow[j] = row[j] * (drow[j] - delta);
            }
            std::fill(row + keys, row + visible, A(0));
            std::fill(drow + keys, drow + visible, A(0));
          }
          small_matmul(dv, s.D, p, int64_t{1}, s.T, g, s.D, visible, s.D, n, Accumulate::yes);   // P^T dO
          small_matmul(dk, s.D, dp, int64_t{1}, s.T, q, s.D, visible, s.D, n, Accumulate::yes);  // dS^T Q, q is scaled
          small_matmul(dq, s.D, dp, s.T, int64_t{1}, k, s.D, n, s.D, visible, Accumulate::no);
          for (int64_t i = 0; i < n * s.D; ++i) dq[i] *= scale;
          detail::store_head(drows + begin * stride + h * s.D, stride, dq, n, s.D);
        }
      detail::store_head(drows + (s.Hq + hk) * s.D, stride, dk, s.T, s.D);
      detail::store_head(drows + (s.Hq + s.Hkv + hk) * s.D, stride, dv, s.T, s.D);
    }
}

}  // namespace llmc::cpu
