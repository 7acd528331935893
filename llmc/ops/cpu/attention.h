// attention.h: causal attention by blocks of queries and keys, so no T x T matrix is stored: the forward rescales its
// sums whenever a row's largest score grows; the backward recomputes the probabilities from the saved log-sum-exp (Dao
// 2023, FlashAttention-2). All products use the panels and register tiles of matmul.h: where they multiply bf16,
// probabilities and the gradients of scores are rounded to it. Contracts: ops/ops.h.
#pragma once
#include <omp.h>

#include "ops/cpu/attention_tiles.h"

namespace llmc::cpu {
inline namespace CPU_ISA {

namespace detail {

// One task per row and query head. Scores are summed in another order than in the backward: they differ by rounding.
template <class T, class A>
void few_rows_forward(const AttentionOutputs<T, A>& to, const AttentionInputs<T>& from, A* scratch,
                      const AttentionBlock& s, int threads) {
  const A scale = A(1) / std::sqrt(static_cast<A>(s.D));
  const int64_t k_stride = from.keys.stride, v_stride = from.values.stride;
#pragma omp parallel for collapse(3) schedule(static) num_threads(threads)
  for (int64_t b = 0; b < s.B; ++b)
    for (int64_t i = 0; i < s.queries.rows; ++i)
      for (int64_t h = 0; h < s.Hq; ++h) {
        const KeyRange keys = keys_of_row(s, positions_of(from.positions, s.queries, b), i);
        if (keys.empty() && to.sums.data != nullptr) continue;
        A *sums = scratch + omp_get_thread_num() * (s.D + s.keys.rows), *p = sums + s.D;
        const int64_t hk = h / (s.Hq / s.Hkv), at = (b * s.Hq + h) * s.queries.length + s.queries.first + i;
        const T* q = head_of(from.queries, s.queries, b, h, s.D) + i * from.queries.stride;
        const T *k = head_of(from.keys, s.keys, b, hk, s.D), *v = head_of(from.values, s.keys, b, hk, s.D);
        A most = -std::numeric_limits<A>::infinity(), sum = 0;
        for (int64_t j = keys.first; j < keys.last; ++j) {
          A score = 0;
#pragma omp simd reduction(+ : score)
          for (int64_t d = 0; d < s.D; ++d) score += static_cast<A>(q[d]) * static_cast<A>(k[j * k_stride + d]);
          p[j] = score * scale;
          most = std::max(most, p[j]);
        }
        for (int64_t j = keys.first; j < keys.last; ++j) sum += p[j] = exponential(p[j] - most);
        std::fill(sums, sums + s.D, A(0));
        for (int64_t j = keys.first; j < keys.last; ++j)
#pragma omp simd
          for (int64_t d = 0; d < s.D; ++d) sums[d] += p[j] * static_cast<A>(v[j * v_stride + d]);
        if (to.sums.data != nullptr) {
          merge_row(head_of(to.sums, s.queries, b, h, s.D) + i * to.sums.stride, to.largest[at], to.total[at], sums,
                    most, sum, s.D);
          continue;
        }
        if (to.lse != nullptr) to.lse[at] = most + std::log(sum);
        if (to.largest != nullptr) to.largest[at] = most;
        T* out = head_of(to.out, s.queries, b, h, s.D) + i * to.out.stride;
        for (int64_t d = 0; d < s.D; ++d) store(out[d], sums[d] / sum);
      }
}

// Writes the rows of a panel of queries once they have seen all keys of the block.
template <class How, class T, class A>
void write_rows(const AttentionOutputs<T, A>& to, const AttentionBlock& s, int64_t b, int64_t h, int64_t begin,
                int64_t rows, const QueryPanel<How>& panel, A* square) {
  constexpr int64_t C = How::columns;
  const int64_t first = (b * s.Hq + h) * s.queries.length + s.queries.first + begin;  // in lse
  const bool merges = to.sums.data != nullptr;
  for (int64_t d = 0; d < s.D; d += 32) {
    const int64_t channels = std::min(int64_t{32}, s.D - d);
    transposed_lines(square, panel.sums + d * C, C, channels);
    for (int64_t i = 0; i < rows; ++i) {
      const A* values = square + i * channels;
      if (merges) {
        if (panel.total[i] == 0) continue;  // this row sees none of the keys
        A largest = to.largest[first + i], total = to.total[first + i];
        merge_row(head_of(to.sums, s.queries, b, h, s.D) + (begin + i) * to.sums.stride + d, largest, total, values,
                  panel.largest[i], panel.total[i], channels);
        if (d + channels == s.D) to.largest[first + i] = largest, to.total[first + i] = total;
        continue;
      }
      T* row = head_of(to.out, s.queries, b, h, s.D) + (begin + i) * to.out.stride + d;
      const A inverse = A(1) / panel.total[i];
#pragma omp simd
      for (int64_t c = 0; c < channels; ++c) store(row[c], values[c] * inverse);
    }
  }
  for (int64_t i = 0; i < rows && to.lse != nullptr && !merges; ++i)
    to.lse[first + i] = panel.largest[i] + std::log(panel.total[i]);
  if (to.largest != nullptr && !merges) std::copy_n(panel.largest, rows, to.largest + first);
}

}  // namespace detail

// Scores are transposed, a column for each query, so that the softmax runs along whole vectors and its result is an
// operand without repacking: with K and V of a block of keys, and O the sums,   S^T = K Q^T,   O^T += V^T P^T
// A task is a (sequence, query head, group of query rows).   scratch: attention_forward_scratch() bytes
template <class T, class How = Multiply<accumulator_t<T>>, class A = accumulator_t<T>>
void attention_forward(const AttentionOutputs<T, A>& to, const AttentionInputs<T>& from, std::byte* scratch,
                       const AttentionBlock& s, int threads) {
  using namespace detail;
  scratch = aligned_scratch(scratch);
  const AttentionTiles tiling(s, sizeof(A));
  if (tiling.few_rows()) return few_rows_forward(to, from, reinterpret_cast<A*>(scratch), s, threads);
  constexpr int64_t C = How::columns, query_group = AttentionTiles::forward_queries,
                    key_block = AttentionTiles::keys / How::rows * How::rows;
  const int64_t D = s.D, depth = round_up(D, How::step), heads = s.B * s.Hq,
                groups = ceil_div(s.queries.rows, query_group),
                most_keys = std::min(key_block, round_up(s.keys.rows, How::rows));
  const A scale = A(1) / std::sqrt(static_cast<A>(D));
#pragma omp parallel for schedule(dynamic) num_threads(threads)
  for (int64_t task = 0; task < groups * heads; ++task) {
    // The last rows, which see the most keys, come first.
    const int64_t group = (groups - 1 - task / heads) * query_group, b = task % heads / s.Hq, h = task % s.Hq,
                  hk = h / (s.Hq / s.Hkv), queries = std::min(query_group, s.queries.rows - group);
    const int32_t* positions = positions_of(from.positions, s.queries, b);
    [[maybe_unused]] const typename How::Session session;
    ScratchCursor cursor{scratch + omp_get_thread_num() * tiling.forward_bytes()};
    auto* k = cursor.take<typename How::Packed>(most_keys * depth);
    auto* v = cursor.take<typename How::Packed>(round_up(D, How::rows) * most_keys);
    auto* q = cursor.take<typename How::Packed>(round_up(queries, C) * depth);
    auto* p = cursor.take<typename How::Packed>(most_keys * C);
    A *scores = cursor.take<A>(most_keys * C), *square = cursor.take<A>(C * 32);
    A *sums = cursor.take<A>(round_up(queries, C) * round_up(D, How::rows)),
      *state = cursor.take<A>(2 * round_up(queries, C));

    const Lines<T> q_rows{head_of(from.queries, s.queries, b, h, D) + group * from.queries.stride, from.queries.stride,
                          1};
    const Lines<T> k_rows{head_of(from.keys, s.keys, b, hk, D), from.keys.stride, 1};
    const Lines<T> v_columns{head_of(from.values, s.keys, b, hk, D), 1, from.values.stride};
    pack_b<How>(q, q_rows, queries, D);
    const auto panel_at = [&](int64_t i) {
      return QueryPanel<How>{state + 2 * i, state + 2 * i + C, sums + i * round_up(D, How::rows)};
    };
    for (int64_t i = 0; i < queries; i += C) panel_at(i).clear(round_up(D, How::rows));
    const KeyRange seen = keys_of_rows(s, positions, group, queries);
    for (int64_t key = seen.first / key_block * key_block; key < seen.last; key += key_block) {
      const int64_t keys = std::min(key_block, s.keys.rows - key);
      pack_a<How>(k, k_rows.from(key, 0), keys, D);
      pack_a<How>(v, v_columns.from(0, key), D, keys);
      for (int64_t i = 0; i < queries; i += C) {
        const int64_t rows = std::min(C, queries - i);
        const KeyRange any = keys_of_rows(s, positions, group + i, rows).within(key, key + keys);
        if (any.empty()) continue;
        // The block's keys, starting at a whole tile, `n` of them in memory; and which of these each query sees.
        const int64_t begin = (any.first - key) / How::rows * How::rows, n = any.last - key - begin;
        bool all = true;
        A first[C] = {}, last[C] = {};
        for (int64_t l = 0; l < rows; ++l) {
          const KeyRange seen_by = keys_of_row(s, positions, group + i + l);
          all &= seen_by.covers(key + begin, key + begin + n);
          first[l] = static_cast<A>(seen_by.first - key - begin), last[l] = static_cast<A>(seen_by.last - key - begin);
        }
        const QueryPanel<How> panel = panel_at(i);
        multiply_panels<How>(scores, {k + begin * depth, depth}, q + i * depth,
                             std::min(round_up(n, How::rows), keys - begin), D, Accumulate::no);  // whole panels of K
        if (all) panel.update_softmax(scores, n, scale, D, [](int64_t, int64_t) { return true; });
        else
          panel.update_softmax(scores, n, scale, D, [&](int64_t j, int64_t l) {
            return static_cast<A>(j) >= first[l] && static_cast<A>(j) < last[l];
          });
        multiply_panels<How>(panel.sums, {v, round_up(keys, How::step), begin}, pack_columns<How>(p, scores, n), D, n,
                             Accumulate::yes);
      }
    }
    for (int64_t i = 0; i < queries; i += C)
      write_rows<How>(to, s, b, h, group + i, std::min(C, queries - i), panel_at(i), square);
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

// rows of the cache = the keys and values of new rows.
template <class T>
void cache_append(T* cache_rows, const T* qkv, const AttentionShape& s) {
  const int64_t row = (s.Hq + 2 * s.Hkv) * s.D, kept = 2 * s.Hkv * s.D;
  for (int64_t t = 0; t < s.T; ++t) std::copy(qkv + t * row + s.Hq * s.D, qkv + (t + 1) * row, cache_rows + t * kept);
}

}  // namespace CPU_ISA
}  // namespace llmc::cpu
