// attention.h: causal attention by tiles of query rows, so no T x T matrix is stored; the backward recomputes the
// probabilities from the saved log-sum-exp (Dao 2023, FlashAttention-2). Contracts: ops/ops.h.
#pragma once
#include <omp.h>

#include "ops/cpu/attention_tiles.h"

namespace llmc::cpu {
inline namespace CPU_ISA {

namespace detail {

// One or two rows against more keys, as when a text is generated token by token: packing the keys would take longer
// than the attention. One thread per row and query head.
inline bool few_rows(const AttentionBlock& s) { return s.queries.rows < 3 && s.queries.rows < s.keys.rows; }

template <class T, class A>
void few_rows_forward(const AttentionOutputs<T, A>& to, const AttentionInputs<T>& from, A* scratch,
                      const AttentionBlock& s, int threads) {
  const A scale = A(1) / std::sqrt(static_cast<A>(s.D));
  const int64_t k_stride = from.keys.stride, v_stride = from.values.stride;
#pragma omp parallel for collapse(3) schedule(static) num_threads(threads)
  for (int64_t b = 0; b < s.B; ++b)
    for (int64_t i = 0; i < s.queries.rows; ++i)
      for (int64_t h = 0; h < s.Hq; ++h) {
        const KeyRange keys = keys_of_row(s, places_of(from.positions, s.queries, b), i);
        if (keys.empty() && to.sums.data != nullptr) continue;
        A *sums = scratch + omp_get_thread_num() * (s.D + s.keys.rows), *p = sums + s.D;
        const int64_t hk = h / (s.Hq / s.Hkv), at = (b * s.Hq + h) * s.queries.length + s.queries.first + i;
        const T* q = head_of(from.queries, s.queries, b, h, s.D) + i * from.queries.stride;
        const T *k = head_of(from.keys, s.keys, b, hk, s.D), *v = head_of(from.values, s.keys, b, hk, s.D);
        RowSum<A> row{-std::numeric_limits<A>::infinity(), 0};
        for (int64_t j = keys.first; j < keys.last; ++j) {
          A score = 0;
#pragma omp simd reduction(+ : score)
          for (int64_t d = 0; d < s.D; ++d) score += static_cast<A>(q[d]) * static_cast<A>(k[j * k_stride + d]);
          p[j] = score * scale;
          row.largest = std::max(row.largest, p[j]);
        }
        for (int64_t j = keys.first; j < keys.last; ++j) row.sum += p[j] = exponential(p[j] - row.largest);
        std::fill(sums, sums + s.D, A(0));
        for (int64_t j = keys.first; j < keys.last; ++j)
#pragma omp simd
          for (int64_t d = 0; d < s.D; ++d) sums[d] += p[j] * static_cast<A>(v[j * v_stride + d]);
        if (to.sums.data != nullptr) {
          merge_row(head_of(to.sums, s.queries, b, h, s.D) + i * to.sums.stride, to.largest[at], to.total[at], sums,
                    row, s.D);
          continue;
        }
        if (to.lse != nullptr) to.lse[at] = row.largest + std::log(row.sum);
        T* out = head_of(to.out, s.queries, b, h, s.D) + i * to.out.stride;
        for (int64_t d = 0; d < s.D; ++d) store(out[d], sums[d] / row.sum);
      }
}

}  // namespace detail

// Elements of scratch, of the accumulator type, for all threads.
inline int64_t attention_forward_scratch(const AttentionBlock& s, int threads) {
  return threads * (detail::few_rows(s) ? s.D + s.keys.rows : detail::AttentionLayout(s).forward_scratch());
}
inline int64_t attention_backward_scratch(const AttentionBlock& s, int threads) {
  return threads * detail::AttentionLayout(s).backward_scratch();
}

// One thread per (sequence, query head); the heads of a group run consecutively and share the packed K and V.
template <class T, class A = accumulator_t<T>>
void attention_forward(const AttentionOutputs<T, A>& to, const AttentionInputs<T>& from, A* scratch,
                       const AttentionBlock& s, int threads) {
  using namespace detail;
  if (few_rows(s)) return few_rows_forward(to, from, scratch, s, threads);
  const AttentionLayout l(s);
  const A scale = A(1) / std::sqrt(static_cast<A>(s.D));
  const bool merges = to.sums.data != nullptr;
#pragma omp parallel num_threads(threads)
  {
    ScratchCursor<A> cursor{scratch + omp_get_thread_num() * l.forward_scratch()};
    A *k_t = cursor.take(l.columns_panels()), *v = cursor.take(l.rows_panels());
    A *q = cursor.take(l.tile()), *o = cursor.take(l.tile()), *p = cursor.take(l.scores());
    int64_t packed = -1;  // the (sequence, key-value head) that k_t and v hold
#pragma omp for schedule(static)
    for (int64_t task = 0; task < s.B * s.Hq; ++task) {
      const int64_t b = task / s.Hq, h = task % s.Hq, hk = h / (s.Hq / s.Hkv);
      const T* queries = head_of(from.queries, s.queries, b, h, s.D);
      const int32_t* places = places_of(from.positions, s.queries, b);
      T* out = head_of(to.out, s.queries, b, h, s.D);
      A* running = head_of(to.sums, s.queries, b, h, s.D);
      for (int64_t begin = 0; begin < s.queries.rows; begin += attention_rows) {
        const int64_t n = std::min(attention_rows, s.queries.rows - begin);
        const KeyRange keys = keys_of_rows(s, places, begin, n);
        if (keys.empty() && merges) continue;
        if (packed != b * s.Hkv + hk) {
          panels_of_transposed(k_t, head_of(from.keys, s.keys, b, hk, s.D), from.keys.stride, s.D, l.keys);
          panels_of(v, head_of(from.values, s.keys, b, hk, s.D), from.values.stride, l.keys, s.D);
          packed = b * s.Hkv + hk;
        }
        const int64_t columns = round_up(keys.last, panel_width) - keys.first;
        load_tile(q, l.D_padded, queries + begin * from.queries.stride, from.queries.stride, n, s.D, scale);
        multiply_panels(p, l.keys_padded, q, l.D_padded, k_t + keys.first * s.D, s.D, n, columns, s.D);
        RowSum<A> rows[attention_rows];
        for (int64_t i = 0; i < n; ++i)
          rows[i] = exponentiate_row(p + i * l.keys_padded, keys_of_row(s, places, begin + i).relative_to(keys.first),
                                     columns);
        multiply_panels(o, l.D_padded, p, l.keys_padded, v + keys.first * panel_width, l.keys, n, l.D_padded,
                        keys.count());
        const int64_t first = (b * s.Hq + h) * s.queries.length + s.queries.first + begin;  // in lse
        for (int64_t i = 0; i < n; ++i) {
          const A* values = o + i * l.D_padded;
          if (merges) {
            if (rows[i].sum != 0)  // it is of a row that sees no key
              merge_row(running + (begin + i) * to.sums.stride, to.largest[first + i], to.total[first + i], values,
                        rows[i], s.D);
            continue;
          }
          if (to.lse != nullptr) to.lse[first + i] = rows[i].largest + std::log(rows[i].sum);
          T* row = out + (begin + i) * to.out.stride;
          const A inverse = A(1) / rows[i].sum;
#pragma omp simd
          for (int64_t d = 0; d < s.D; ++d) store(row[d], values[d] * inverse);
        }
      }
    }
  }
}

template <class X, class A = accumulator_t<X>>
void attention_finish(X* out, A* lse, const A* sums, const A* largest, const A* total, int64_t B, int64_t T, int64_t Hq,
                      int64_t D) {
#pragma omp parallel for collapse(2) schedule(static)
  for (int64_t n = 0; n < B * T; ++n)
    for (int64_t h = 0; h < Hq; ++h) {
      const int64_t at = (n / T * Hq + h) * T + n % T, first = (n * Hq + h) * D;
      lse[at] = largest[at] + std::log(total[at]);
#pragma omp simd
      for (int64_t d = 0; d < D; ++d) store(out[first + d], sums[first + d] / total[at]);
    }
}

// With P the probabilities and dO the gradient of the output:
//   dV = P^T dO,   dP = dO V^T,   dS = P (dP - rowsum(P dP)),   dQ = dS K / sqrt(D),   dK = dS^T Q / sqrt(D)
// One thread per (sequence, key-value head); the query heads of a group add to dK and dV one after another.
template <class T, class A = accumulator_t<T>>
void attention_backward(const AttentionGradients<T, A>& to, const T* dout, const T* out, const A* lse,
                        const AttentionInputs<T>& from, A* scratch, const AttentionBlock& s, int threads) {
  using namespace detail;
  const AttentionLayout l(s);
  const A scale = A(1) / std::sqrt(static_cast<A>(s.D));
  const bool adds = to.query_sums.data != nullptr;
  // The row sum of P dP is that of dO O, which is at hand where keys come in several blocks. In bf16, whose O is
  // rounded, it is taken always, as GPUs do: so that blocks and the whole agree.
  const bool of_output = !s.all_keys || std::is_same_v<T, bf16>;
  const int64_t stride = s.Hq * s.D;  // of dout and out
#pragma omp parallel for collapse(2) schedule(static) num_threads(threads)
  for (int64_t b = 0; b < s.B; ++b)
    for (int64_t hk = 0; hk < s.Hkv; ++hk) {
      const int32_t* places = places_of(from.positions, s.queries, b);
      const KeyRange seen = keys_of_rows(s, places, 0, s.queries.rows);
      if (seen.empty() && adds) continue;
      ScratchCursor<A> cursor{scratch + omp_get_thread_num() * l.backward_scratch()};
      A *k_t = cursor.take(l.columns_panels()), *v_t = cursor.take(l.columns_panels()),
        *k = cursor.take(l.rows_panels());
      A *dk = cursor.take(l.rows_panels()), *dv = cursor.take(l.rows_panels());
      A *q = cursor.take(l.tile()), *g = cursor.take(l.tile()), *dq = cursor.take(l.tile());  // g is dO
      A *p = cursor.take(l.scores()), *dp = cursor.take(l.scores());
      const T *keys_stored = head_of(from.keys, s.keys, b, hk, s.D),
              *values_stored = head_of(from.values, s.keys, b, hk, s.D);
      panels_of_transposed(k_t, keys_stored, from.keys.stride, s.D, l.keys);
      panels_of_transposed(v_t, values_stored, from.values.stride, s.D, l.keys);
      panels_of(k, keys_stored, from.keys.stride, l.keys, s.D);
      std::fill(dk, dk + l.rows_panels(), A(0));
      std::fill(dv, dv + l.rows_panels(), A(0));
      for (int64_t h = hk * (s.Hq / s.Hkv); h < (hk + 1) * (s.Hq / s.Hkv); ++h)
        for (int64_t begin = 0; begin < s.queries.rows; begin += attention_rows) {
          const int64_t n = std::min(attention_rows, s.queries.rows - begin);
          const KeyRange keys = keys_of_rows(s, places, begin, n);
          if (keys.empty() && adds) continue;
          const int64_t columns = round_up(keys.last, panel_width) - keys.first;
          const int64_t row = b * s.queries.length + s.queries.first + begin, at = row * stride + h * s.D;
          load_tile(q, l.D_padded, head_of(from.queries, s.queries, b, h, s.D) + begin * from.queries.stride,
                    from.queries.stride, n, s.D, scale);
          load_tile(g, l.D_padded, dout + at, stride, n, s.D);
          A means[attention_rows];
          if constexpr (std::is_same_v<T, bf16>) {
            for (int64_t i = 0; i < n; ++i) {
              A sum = 0;
#pragma omp simd reduction(+ : sum)
              for (int64_t d = 0; d < s.D; ++d) sum += g[i * l.D_padded + d] * static_cast<A>(out[at + i * stride + d]);
              means[i] = sum;
            }
          } else if (of_output) {
            // The diagonal of dO O^T, by the kernel that computes dP: where one key has all of the probability, O is
            // its value, and the two cancel exactly. dq and p are free until they are needed.
            panels_of_transposed(dq, out + at, stride, s.D, n);
            multiply_panels(p, l.keys_padded, g, l.D_padded, dq, s.D, n, panel_width, s.D);
            for (int64_t i = 0; i < n; ++i) means[i] = p[i * l.keys_padded + i];
          }
          multiply_panels(p, l.keys_padded, q, l.D_padded, k_t + keys.first * s.D, s.D, n, columns, s.D);
          multiply_panels(dp, l.keys_padded, g, l.D_padded, v_t + keys.first * s.D, s.D, n, columns, s.D);
          for (int64_t i = 0; i < n; ++i)
            score_gradient_row(p + i * l.keys_padded, dp + i * l.keys_padded,
                               lse[(b * s.Hq + h) * s.queries.length + s.queries.first + begin + i],
                               of_output ? means + i : nullptr,
                               keys_of_row(s, places, begin + i).relative_to(keys.first), columns);
          const int64_t skipped = keys.first * panel_width;
          add_outer_products(dv + skipped, l.keys, p, l.keys_padded, g, l.D_padded, keys.count(), l.D_padded, n);
          add_outer_products(dk + skipped, l.keys, dp, l.keys_padded, q, l.D_padded, keys.count(), l.D_padded,
                             n);  // q is already scaled
          multiply_panels(dq, l.D_padded, dp, l.keys_padded, k + skipped, l.keys, n, l.D_padded, keys.count());
          const GradientHead dqueries(to.queries, to.query_sums, s.queries, b, h, s.D);
          for (int64_t i = 0; i < n; ++i) dqueries.write(begin + i, 0, dq + i * l.D_padded, scale, s.D);
        }
      const KeyRange written = adds ? seen : KeyRange{0, l.keys};
      GradientHead(to.keys, to.key_sums, s.keys, b, hk, s.D).write_panels(dk, l.keys, written, s.D);
      GradientHead(to.values, to.value_sums, s.keys, b, hk, s.D).write_panels(dv, l.keys, written, s.D);
    }
}

// rows of the cache = the keys and values of new rows.
template <class T>
void cache_append(T* cache_rows, const T* qkv, const AttentionShape& s) {
  const int64_t row = (s.Hq + 2 * s.Hkv) * s.D, kept = 2 * s.Hkv * s.D;
  for (int64_t t = 0; t < s.T; ++t) std::copy(qkv + t * row + s.Hq * s.D, qkv + (t + 1) * row, cache_rows + t * kept);
}

}  // namespace CPU_ISA
}  // namespace llmc::cpu
