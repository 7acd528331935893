// attention.h: causal attention by blocks of query rows, so no T x T matrix is stored; the backward recomputes the
// probabilities from the saved log-sum-exp (Dao 2023, FlashAttention-2). Contracts: ops/ops.h.
#pragma once
#include <omp.h>

#include "ops/cpu/pack.h"

namespace llmc::cpu {

namespace detail {

inline constexpr int64_t attention_rows = 32;  // query rows in a block

// Where one (sequence, head) lies in the full tensors, and the sizes of a thread's packed operands.
struct AttentionLayout {
  int64_t T, D, group;
  int64_t qkv_stride, out_stride;  // per token
  int64_t k_offset, v_offset;      // of head 0 in a token
  int64_t T_padded, D_padded;      // rounded up to whole panels
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
  int64_t rows_panels() const { return T * D_padded; }     // (D / 32, T, 32): a head as stored
  int64_t columns_panels() const { return T_padded * D; }  // (T / 32, D, 32): a head transposed
  int64_t block() const { return attention_rows * D_padded; }
  int64_t scores() const { return attention_rows * T_padded; }
  int64_t forward_scratch() const { return rows_panels() + columns_panels() + 2 * block() + scores(); }
  int64_t backward_scratch() const { return 3 * rows_panels() + 2 * columns_panels() + 3 * block() + 2 * scores(); }
};

// Splits up a thread's scratch.
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

// The keys that a block of query rows attends to: whole panels from `start` to `end`.
struct KeyRange {
  int64_t start, visible, end;
  // `positions` of the sequence, or nullptr: row t attends to the keys from t - positions[t] on.
  KeyRange(const int32_t* positions, int64_t begin, int64_t rows)
      : start(positions == nullptr ? 0 : begin), visible(begin + rows), end(round_up(visible, panel_width)) {
    for (int64_t t = begin; t < begin + rows && positions != nullptr; ++t) start = std::min(start, t - positions[t]);
    start = start / panel_width * panel_width;
  }
};
inline int64_t first_key(const int32_t* positions, int64_t t) { return positions == nullptr ? 0 : t - positions[t]; }

// row = exp(row - its maximum) where a key is visible, from `first` to `keys`; 0 elsewhere up to `end` (a multiple of
// the panel width).
template <class A>
struct RowSum {
  A largest, sum;
};
template <class A>
RowSum<A> exponentiate_row(A* row, int64_t first, int64_t keys, int64_t end) {
  const int64_t panels = end / panel_width;
  std::fill(row, row + first, row[first]);  // leaves the maximum unchanged; whole vectors are faster than a remainder
  std::fill(row + keys, row + end, row[first]);
  A lanes[panel_width];
  std::fill(lanes, lanes + panel_width, row[first]);
  for (int64_t j = 0; j < panels; ++j)
#pragma omp simd
    for (int64_t l = 0; l < panel_width; ++l)
      lanes[l] = lanes[l] < row[j * panel_width + l] ? row[j * panel_width + l] : lanes[l];
  const A largest = *std::max_element(lanes, lanes + panel_width);
#pragma omp simd
  for (int64_t j = 0; j < panels * panel_width; ++j) row[j] = exponential(row[j] - largest);
  std::fill(row, row + first, A(0));
  std::fill(row + keys, row + end, A(0));
  A sum = 0;
#pragma omp simd reduction(+ : sum)
  for (int64_t j = 0; j < panels * panel_width; ++j) sum += row[j];
  return {largest, sum};
}

// P and dS from the scores and dP, in their place: p = exp(p - lse), dp = p (dp - sum(p dp)); 0 where no key is
// visible. Where one key has nearly all of the probability, dP and its mean cancel, and every rounding that differs
// between the two shows. So the mean is summed from the very dP that it is subtracted from, not taken as the row sum of
// dO O, which is equal but rounds differently; and the row is divided by its sum, because the rounding of a large lse
// is an error of all of the row's p.
template <class A>
void score_gradient_row(A* p, A* dp, A lse, int64_t first, int64_t keys, int64_t end) {
  const int64_t n = end / panel_width * panel_width;
#pragma omp simd
  for (int64_t j = 0; j < n; ++j) p[j] = exponential(p[j] - lse);
  for (A* row : {p, dp}) {
    std::fill(row, row + first, A(0));
    std::fill(row + keys, row + end, A(0));
  }
  A sum = 0, weighted = 0;
#pragma omp simd reduction(+ : sum, weighted)
  for (int64_t j = 0; j < n; ++j) {
    sum += p[j];
    weighted += p[j] * dp[j];
  }
  const A inverse = A(1) / sum, mean = weighted * inverse;
#pragma omp simd
  for (int64_t j = 0; j < n; ++j) {
    p[j] *= inverse;
    dp[j] = p[j] * (dp[j] - mean);
  }
}

}  // namespace detail

// Elements of scratch, of the accumulator type, for all threads.
inline int64_t attention_forward_scratch(const AttentionShape& s, int threads) {
  return threads * detail::AttentionLayout(s).forward_scratch();
}
inline int64_t attention_backward_scratch(const AttentionShape& s, int threads) {
  return threads * detail::AttentionLayout(s).backward_scratch();
}

// One thread per (sequence, query head); the heads of a group run consecutively and share the packed K and V.
template <class T, class A = accumulator_t<T>>
void attention_forward(T* out, A* lse, const T* qkv, const int32_t* positions, A* scratch, const AttentionShape& s,
                       int threads) {
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
      const int32_t* places = positions == nullptr ? nullptr : positions + b * s.T;
      if (packed != b * s.Hkv + hk) {
        panels_of_transposed(k_t, tokens + l.k_offset + hk * s.D, l.qkv_stride, s.D, s.T);
        panels_of(v, tokens + l.v_offset + hk * s.D, l.qkv_stride, s.T, s.D);
        packed = b * s.Hkv + hk;
      }
      for (int64_t begin = 0; begin < s.T; begin += attention_rows) {
        const int64_t n = std::min(attention_rows, s.T - begin);
        const auto [start, visible, end] = KeyRange(places, begin, n);
        T* out_block = out + (b * s.T + begin) * l.out_stride + h * s.D;
        load_block(q, l.D_padded, tokens + begin * l.qkv_stride + h * s.D, l.qkv_stride, n, s.D, scale);
        multiply_panels(p, l.T_padded, q, l.D_padded, k_t + start * s.D, s.D, n, end - start, s.D);
        A sums[attention_rows];
        for (int64_t i = 0; i < n; ++i) {
          const auto [largest, sum] = exponentiate_row(p + i * l.T_padded, first_key(places, begin + i) - start,
                                                       begin + i + 1 - start, end - start);
          lse[(b * s.Hq + h) * s.T + begin + i] = largest + std::log(sum);
          sums[i] = sum;
        }
        multiply_panels(o, l.D_padded, p, l.T_padded, v + start * panel_width, s.T, n, l.D_padded, visible - start);
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
//   dV = P^T dO,   dP = dO V^T,   dS = P (dP - rowsum(P dP)),   dQ = dS K / sqrt(D),   dK = dS^T Q / sqrt(D)
// One thread per (sequence, key-value head); the query heads of a group add to dK and dV one after another.
template <class T, class A = accumulator_t<T>>
void attention_backward(T* dqkv, const T* dout, const T* qkv, const A* lse, const int32_t* positions, A* scratch,
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
      const int32_t* places = positions == nullptr ? nullptr : positions + b * s.T;
      panels_of_transposed(k_t, tokens + l.k_offset + hk * s.D, l.qkv_stride, s.D, s.T);
      panels_of_transposed(v_t, tokens + l.v_offset + hk * s.D, l.qkv_stride, s.D, s.T);
      panels_of(k, tokens + l.k_offset + hk * s.D, l.qkv_stride, s.T, s.D);
      std::fill(dk, dk + l.rows_panels(), A(0));
      std::fill(dv, dv + l.rows_panels(), A(0));
      for (int64_t h = hk * l.group; h < (hk + 1) * l.group; ++h)
        for (int64_t begin = 0; begin < s.T; begin += attention_rows) {
          const int64_t n = std::min(attention_rows, s.T - begin);
          const auto [start, visible, end] = KeyRange(places, begin, n);
          const int64_t block = (b * s.T + begin) * l.out_stride + h * s.D;
          load_block(q, l.D_padded, tokens + begin * l.qkv_stride + h * s.D, l.qkv_stride, n, s.D, scale);
          load_block(g, l.D_padded, dout + block, l.out_stride, n, s.D);
          multiply_panels(p, l.T_padded, q, l.D_padded, k_t + start * s.D, s.D, n, end - start, s.D);
          multiply_panels(dp, l.T_padded, g, l.D_padded, v_t + start * s.D, s.D, n, end - start, s.D);
          for (int64_t i = 0; i < n; ++i)
            score_gradient_row(p + i * l.T_padded, dp + i * l.T_padded, lse[(b * s.Hq + h) * s.T + begin + i],
                               first_key(places, begin + i) - start, begin + i + 1 - start, end - start);
          const int64_t keys = visible - start, skipped = start * panel_width;
          add_outer_products(dv + skipped, s.T, p, l.T_padded, g, l.D_padded, keys, l.D_padded, n);
          add_outer_products(dk + skipped, s.T, dp, l.T_padded, q, l.D_padded, keys, l.D_padded,
                             n);  // q is already scaled
          multiply_panels(dq, l.D_padded, dp, l.T_padded, k + skipped, s.T, n, l.D_padded, keys);
          for (int64_t i = 0; i < n; ++i)
#pragma omp simd
            for (int64_t d = 0; d < s.D; ++d)
              store(dtokens[(begin + i) * l.qkv_stride + h * s.D + d], dq[i * l.D_padded + d] * scale);
        }
      store_panels(dtokens + l.k_offset + hk * s.D, l.qkv_stride, dk, s.T, s.D);
      store_panels(dtokens + l.v_offset + hk * s.D, l.qkv_stride, dv, s.T, s.D);
    }
}

// A few new rows against the keys and values of all rows so far. qkv (T, (Hq + 2 Hkv) D): rows begin to begin + T of a
// sequence, whose keys and values are the last rows of cache (begin + T, 2 Hkv D). One thread per query head.
inline int64_t attention_cached_scratch(const AttentionShape& s, int64_t begin, int threads) {
  return threads * (s.D + begin + s.T);
}
template <class T, class A = accumulator_t<T>>
void attention_cached(T* out, const T* qkv, const T* cache, A* scratch, int64_t begin, const AttentionShape& s,
                      int threads) {
  const int64_t group = s.Hq / s.Hkv, kv_stride = 2 * s.Hkv * s.D;
  const A scale = A(1) / std::sqrt(static_cast<A>(s.D));
  const int64_t scratch_of_thread = attention_cached_scratch(s, begin, 1);
#pragma omp parallel for collapse(2) schedule(static) num_threads(threads)
  for (int64_t t = 0; t < s.T; ++t)
    for (int64_t h = 0; h < s.Hq; ++h) {
      A *sums = scratch + omp_get_thread_num() * scratch_of_thread, *p = sums + s.D;
      const T* q = qkv + t * (s.Hq + 2 * s.Hkv) * s.D + h * s.D;
      const T *k = cache + h / group * s.D, *v = k + s.Hkv * s.D;
      const int64_t keys = begin + t + 1;
      for (int64_t j = 0; j < keys; ++j) {
        A score = 0;
#pragma omp simd reduction(+ : score)
        for (int64_t d = 0; d < s.D; ++d) score += static_cast<A>(q[d]) * static_cast<A>(k[j * kv_stride + d]);
        p[j] = score * scale;
      }
      const A largest = *std::max_element(p, p + keys);
      A sum = 0;
      for (int64_t j = 0; j < keys; ++j) sum += p[j] = exponential(p[j] - largest);
      T* o = out + (t * s.Hq + h) * s.D;
      std::fill(sums, sums + s.D, A(0));
      for (int64_t j = 0; j < keys; ++j)
#pragma omp simd
        for (int64_t d = 0; d < s.D; ++d) sums[d] += p[j] * static_cast<A>(v[j * kv_stride + d]);
      for (int64_t d = 0; d < s.D; ++d) store(o[d], sums[d] / sum);
    }
}

// rows of the cache = the keys and values of new rows.
template <class T>
void cache_append(T* cache_rows, const T* qkv, const AttentionShape& s) {
  const int64_t row = (s.Hq + 2 * s.Hkv) * s.D, kept = 2 * s.Hkv * s.D;
  for (int64_t t = 0; t < s.T; ++t) std::copy(qkv + t * row + s.Hq * s.D, qkv + (t + 1) * row, cache_rows + t * kept);
}

}  // namespace llmc::cpu
