// attention.h: causal attention by blocks of query rows, so that no T x T matrix exists; the backward recomputes the
// probabilities from the saved log-sum-exp (Dao 2023, FlashAttention-2). Contracts: ops/ops.h.
#pragma once
#include <omp.h>

#include "ops/cpu/pack.h"

namespace llmc::cpu {

// qkv (B, T, (Hq + 2 Hkv) D): all query heads, then the keys', then the values'; query head h reads key-value head
// h / (Hq / Hkv). out (B, T, Hq D); lse (B, Hq, T)
struct AttentionShape {
  int64_t B, T, Hq, Hkv, D;
};

namespace detail {

inline constexpr int64_t attention_rows = 32;  // query rows in a block

// Where one (sequence, head) lies in the big tensors, and the sizes of what a thread packs.
struct AttentionLayout {
  int64_t T, D, group;
  int64_t qkv_stride, out_stride;  // from token to token
  int64_t k_offset, v_offset;      // of head 0 in a token
  int64_t T_padded, D_padded;      // to whole panels
  explicit AttentionLayout(const AttentionShape& s)
      : T(s.T),
        D(s.D),
        group(s.Hq / s.Hkv),
        qkv_stride((s.Hq + 2 * s.Hkv) * s.D),
        out_stride(s.Hq * s.D),
        k_offset(s.Hq * s.D),
        v_offset((s.Hq + s.Hkv) * s.D),
        T_padded(round_up(s.T, panel_width)),
        D_padded(round_up(s.D, panel_width)) {}
  int64_t rows_panels() const { return T * D_padded; }     // (D / 32, T, 32): a head as it is
  int64_t columns_panels() const { return T_padded * D; }  // (T / 32, D, 32): a head transposed
  int64_t block() const { return attention_rows * D_padded; }
  int64_t scores() const { return attention_rows * T_padded; }
  int64_t forward_scratch() const { return rows_panels() + columns_panels() + 2 * block() + scores(); }
  int64_t backward_scratch() const { return 3 * rows_panels() + 2 * columns_panels() + 3 * block() + 2 * scores(); }
};

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

// out (rows, ldo) = x (rows, D) * factor, with zeros in the columns from D to ldo.
template <class A, class T>
void load_block(A* out, int64_t ldo, const T* x, int64_t stride, int64_t rows, int64_t D, A factor = A(1)) {
  for (int64_t t = 0; t < rows; ++t) {
#pragma omp simd
    for (int64_t d = 0; d < D; ++d) out[t * ldo + d] = static_cast<A>(x[t * stride + d]) * factor;
    std::fill(out + t * ldo + D, out + (t + 1) * ldo, A(0));
  }
}
template <class T, class A>
void store_panels(T* out, int64_t stride, const A* panels, int64_t rows, int64_t D) {
  for (int64_t c = 0; c < D; c += panel_width, panels += rows * panel_width)
    for (int64_t t = 0; t < rows; ++t) {
      const int64_t columns = std::min(panel_width, D - c);
#pragma omp simd
      for (int64_t d = 0; d < columns; ++d) store(out[t * stride + c + d], panels[t * panel_width + d]);
    }
}

// C (M, columns) = A B, where B (columns / 32, K, 32) is packed in panels.
template <class A>
void multiply_panels(A* c, int64_t ldc, const A* a, int64_t lda, const A* panels, int64_t panel_rows, int64_t M,
                     int64_t columns, int64_t K) {
  for (int64_t n = 0; n < columns; n += panel_width)
    small_matmul(c + n, ldc, a, lda, int64_t{1}, panels + n * panel_rows, panel_width, M, panel_width, K,
                 Accumulate::no);
}
// C (columns / 32, M, 32), in panels, += A^T B, where A is (K, M) and B (K, columns).
template <class A>
void add_outer_products(A* panels, int64_t panel_rows, const A* a, int64_t lda, const A* b, int64_t ldb, int64_t M,
                        int64_t columns, int64_t K) {
  for (int64_t n = 0; n < columns; n += panel_width)
    small_matmul(panels + n * panel_rows, panel_width, a, int64_t{1}, lda, b + n, ldb, M, panel_width, K,
                 Accumulate::yes);
}

// row = exp(row - its largest) where a key is visible, 0 behind it up to `end` (a multiple of the panel width).
template <class A>
struct RowSum {
  A largest, sum;
};
template <class A>
RowSum<A> exponentiate_row(A* row, int64_t keys, int64_t end) {
  const int64_t panels = end / panel_width;
  std::fill(row + keys, row + end, row[0]);  // changes no maximum, and whole vectors are faster than a remainder
  A lanes[panel_width];
  std::fill(lanes, lanes + panel_width, row[0]);
  for (int64_t j = 0; j < panels; ++j)
#pragma omp simd
    for (int64_t l = 0; l < panel_width; ++l)
      lanes[l] = lanes[l] < row[j * panel_width + l] ? row[j * panel_width + l] : lanes[l];
  const A largest = *std::max_element(lanes, lanes + panel_width);
#pragma omp simd
  for (int64_t j = 0; j < panels * panel_width; ++j) row[j] = exponential(row[j] - largest);
  std::fill(row + keys, row + end, A(0));
  A sum = 0;
#pragma omp simd reduction(+ : sum)
  for (int64_t j = 0; j < panels * panel_width; ++j) sum += row[j];
  return {largest, sum};
}

// p = exp(p - lse), dp = p * (dp - delta): P and dS out of the scores and dP; 0 behind the visible keys.
template <class A>
void score_gradient_row(A* p, A* dp, A lse, A delta, int64_t keys, int64_t end) {
  const int64_t panels = end / panel_width;
#pragma omp simd
  for (int64_t j = 0; j < panels * panel_width; ++j) {
    p[j] = exponential(p[j] - lse);
    dp[j] = p[j] * (dp[j] - delta);
  }
  std::fill(p + keys, p + end, A(0));
  std::fill(dp + keys, dp + end, A(0));
}

}  // namespace detail

// Elements of scratch, of the accumulator type, for all threads.
inline int64_t attention_forward_scratch(const AttentionShape& s, int threads) {
  return threads * detail::AttentionLayout(s).forward_scratch();
}
inline int64_t attention_backward_scratch(const AttentionShape& s, int threads) {
  return threads * detail::AttentionLayout(s).backward_scratch();
}

// Each (sequence, query head) is one thread's work; the heads of a group follow each other and share the packed K and
// V.
template <class T, class A = accumulator_t<T>>
void attention_forward(T* out, A* lse, const T* qkv, A* scratch, const AttentionShape& s, int threads) {
  using namespace detail;
  const AttentionLayout l(s);
  const A scale = A(1) / std::sqrt(static_cast<A>(s.D));
#pragma omp parallel num_threads(threads)
  {
    ScratchCursor<A> cursor{scratch + omp_get_thread_num() * l.forward_scratch()};
    A *k_t = cursor.take(l.columns_panels()), *v = cursor.take(l.rows_panels());
    A *q = cursor.take(l.block()), *o = cursor.take(l.block()), *p = cursor.take(l.scores());
    int64_t packed = -1;  // the (sequence, key-value head) that k_t and v hold
#pragma omp for schedule(static)
    for (int64_t task = 0; task < s.B * s.Hq; ++task) {
      const int64_t b = task / s.Hq, h = task % s.Hq, hk = h / l.group;
      const T* tokens = qkv + b * s.T * l.qkv_stride;
      if (packed != b * s.Hkv + hk) {
        panels_of_transposed(k_t, tokens + l.k_offset + hk * s.D, l.qkv_stride, s.D, s.T);
        panels_of(v, tokens + l.v_offset + hk * s.D, l.qkv_stride, s.T, s.D);
        packed = b * s.Hkv + hk;
      }
      for (int64_t begin = 0; begin < s.T; begin += attention_rows) {
        const int64_t n = std::min(attention_rows, s.T - begin), visible = begin + n,
                      end = round_up(visible, panel_width);
        T* out_block = out + (b * s.T + begin) * l.out_stride + h * s.D;
        load_block(q, l.D_padded, tokens + begin * l.qkv_stride + h * s.D, l.qkv_stride, n, s.D, scale);
        multiply_panels(p, l.T_padded, q, l.D_padded, k_t, s.D, n, end, s.D);
        A sums[attention_rows];
        for (int64_t i = 0; i < n; ++i) {
          const auto [largest, sum] = exponentiate_row(p + i * l.T_padded, begin + i + 1, end);
          lse[(b * s.Hq + h) * s.T + begin + i] = largest + std::log(sum);
          sums[i] = sum;
        }
        multiply_panels(o, l.D_padded, p, l.T_padded, v, s.T, n, l.D_padded, visible);
        for (int64_t i = 0; i < n; ++i) {
          const A inverse = A(1) / sums[i];
#pragma omp simd
          for (int64_t d = 0; d < s.D; ++d) store(out_block[i * l.out_stride + d], o[i * l.D_padded + d] * inverse);
        }
      }
    }
  }
}

// With P the probabilities and dO the gradient of the output:
//   dV = P^T dO,   dP = dO V^T,   dS = P (dP - rowsum(dO O)),   dQ = dS K / sqrt(D),   dK = dS^T Q / sqrt(D)
// Each (sequence, key-value head) is one thread's work; the query heads of a group add to dK and dV one after the
// other.
template <class T, class A = accumulator_t<T>>
void attention_backward(T* dqkv, const T* dout, const T* out, const T* qkv, const A* lse, A* scratch,
                        const AttentionShape& s, int threads) {
  using namespace detail;
  const AttentionLayout l(s);
  const A scale = A(1) / std::sqrt(static_cast<A>(s.D));
#pragma omp parallel for collapse(2) schedule(static) num_threads(threads)
  for (int64_t b = 0; b < s.B; ++b)
    for (int64_t hk = 0; hk < s.Hkv; ++hk) {
      ScratchCursor<A> cursor{scratch + omp_get_thread_num() * l.backward_scratch()};
      A *k_t = cursor.take(l.columns_panels()), *v_t = cursor.take(l.columns_panels()),
        *k = cursor.take(l.rows_panels());
      A *dk = cursor.take(l.rows_panels()), *dv = cursor.take(l.rows_panels());
      A *q = cursor.take(l.block()), *g = cursor.take(l.block()), *dq = cursor.take(l.block());  // g is dO
      A *p = cursor.take(l.scores()), *dp = cursor.take(l.scores());
      const T* tokens = qkv + b * s.T * l.qkv_stride;
      T* dtokens = dqkv + b * s.T * l.qkv_stride;
      panels_of_transposed(k_t, tokens + l.k_offset + hk * s.D, l.qkv_stride, s.D, s.T);
      panels_of_transposed(v_t, tokens + l.v_offset + hk * s.D, l.qkv_stride, s.D, s.T);
      panels_of(k, tokens + l.k_offset + hk * s.D, l.qkv_stride, s.T, s.D);
      std::fill(dk, dk + l.rows_panels(), A(0));
      std::fill(dv, dv + l.rows_panels(), A(0));
      for (int64_t h = hk * l.group; h < (hk + 1) * l.group; ++h)
        for (int64_t begin = 0; begin < s.T; begin += attention_rows) {
          const int64_t n = std::min(attention_rows, s.T - begin), visible = begin + n,
                        end = round_up(visible, panel_width);
          const int64_t block = (b * s.T + begin) * l.out_stride + h * s.D;
          load_block(q, l.D_padded, tokens + begin * l.qkv_stride + h * s.D, l.qkv_stride, n, s.D, scale);
          load_block(g, l.D_padded, dout + block, l.out_stride, n, s.D);
          multiply_panels(p, l.T_padded, q, l.D_padded, k_t, s.D, n, end, s.D);
          multiply_panels(dp, l.T_padded, g, l.D_padded, v_t, s.D, n, end, s.D);
          for (int64_t i = 0; i < n; ++i) {
            A delta = 0;
#pragma omp simd reduction(+ : delta)
            for (int64_t d = 0; d < s.D; ++d)
              delta += g[i * l.D_padded + d] * static_cast<A>(out[block + i * l.out_stride + d]);
            score_gradient_row(p + i * l.T_padded, dp + i * l.T_padded, lse[(b * s.Hq + h) * s.T + begin + i], delta,
                               begin + i + 1, end);
          }
          add_outer_products(dv, s.T, p, l.T_padded, g, l.D_padded, visible, l.D_padded, n);
          add_outer_products(dk, s.T, dp, l.T_padded, q, l.D_padded, visible, l.D_padded, n);  // q is scaled
          multiply_panels(dq, l.D_padded, dp, l.T_padded, k, s.T, n, l.D_padded, visible);
          for (int64_t i = 0; i < n; ++i)
#pragma omp simd
            for (int64_t d = 0; d < s.D; ++d)
              store(dtokens[(begin + i) * l.qkv_stride + h * s.D + d], dq[i * l.D_padded + d] * scale);
        }
      store_panels(dtokens + l.k_offset + hk * s.D, l.qkv_stride, dk, s.T, s.D);
      store_panels(dtokens + l.v_offset + hk * s.D, l.qkv_stride, dv, s.T, s.D);
    }
}

}  // namespace llmc::cpu
