// attention_tiles.h: the parts of attention.h: which keys a row sees, products of panels, softmax of a tile of scores
// and its gradient, and where results go.
#pragma once
#include "ops/cpu/attention_shape.h"
#include "ops/cpu/panels.h"

namespace llmc::cpu {
inline namespace CPU_ISA {

namespace detail {

// The address of a head of the block's rows; nullptr if there is no matrix.
template <class T>
T* head_of(const HeadRows<T>& m, const SequenceRows& rows, int64_t b, int64_t head, int64_t D) {
  return m.data == nullptr ? nullptr : m.data + (b * rows.length + rows.first) * m.stride + head * D;
}
inline const int32_t* positions_of(const int32_t* positions, const SequenceRows& rows, int64_t b) {
  return positions == nullptr ? nullptr : positions + b * rows.length + rows.first;
}

// Keys from `first` to `last`.
struct KeyRange {
  int64_t first = 0, last = 0;
  bool empty() const { return first >= last; }
  bool overlaps(int64_t begin, int64_t end) const { return first < end && begin < last; }
  KeyRange within(int64_t begin, int64_t end) const { return {std::max(first, begin), std::min(last, end)}; }
  bool covers(int64_t begin, int64_t end) const { return first <= begin && end <= last; }
};
// The keys that row i of the block sees. `positions`: positions of the block's rows, or nullptr
inline KeyRange keys_of_row(const AttentionBlock& s, const int32_t* positions, int64_t i) {
  const int64_t last = i + s.offset;
  return {positions == nullptr ? 0 : std::max(last - positions[i], int64_t{0}), std::min(last + 1, s.keys.rows)};
}
// The range of keys that any of several rows sees.
inline KeyRange keys_of_rows(const AttentionBlock& s, const int32_t* positions, int64_t begin, int64_t rows) {
  KeyRange all{s.keys.rows, 0};
  for (int64_t i = begin; i < begin + rows; ++i)
    if (const KeyRange keys = keys_of_row(s, positions, i); !keys.empty())
      all = {std::min(all.first, keys.first), std::max(all.last, keys.last)};
  return all.empty() ? KeyRange{} : all;
}

// Splits up a thread's scratch.
struct ScratchCursor {
  std::byte* at;
  template <class P>
  P* take(int64_t n) {
    P* piece = reinterpret_cast<P*>(at);
    at += round_up((n + beyond_panels) * static_cast<int64_t>(sizeof(P)), int64_t{64});
    return piece;
  }
};

// Packs all lines, with K elements each, as the panels of A, or of B, of a product.
template <class How, class T>
void pack_a(typename How::Packed* out, const Lines<T>& x, int64_t lines, int64_t K) {
  pack_a<How>(out, x, lines, lines, K, round_up(K, How::step));
}
template <class How, class T>
void pack_b(typename How::Packed* out, const Lines<T>& x, int64_t lines, int64_t K) {
  pack_b<How>(out, x, lines, lines, K, round_up(K, How::step));
}

// Packed panels, of lines with `depth` elements each; read from element `first` of each on.
template <class How>
struct Panels {
  const typename How::Packed* data;
  int64_t depth, first = 0;
  // The panel of lines `line` to line + height.
  const typename How::Packed* at(int64_t line, int64_t height) const { return data + line * depth + first * height; }
};

// C (M, How::columns) = or += A B: panels of A, and the one panel of B, of lines of K elements.
template <class How>
void multiply_panels(typename How::Sum* c, const Panels<How>& a, const typename How::Packed* b, int64_t M, int64_t K,
                     Accumulate accumulate) {
  for (int64_t i = 0; i < M; i += How::rows)
    How::tile(std::min(How::rows, M - i))(c + i * How::columns, a.at(i, panel_height<How>(M - i)), b,
                                          ceil_div(K, How::step), accumulate);
}

// Packs sums (rows, How::columns) as a panel of B for the next product, with zeros up to a whole step. Returns the
// panel: `out`, or `x` itself where that is one already.
template <class How>
typename How::Packed* pack_columns([[maybe_unused]] typename How::Packed* out, typename How::Sum* x, int64_t rows) {
  constexpr int64_t C = How::columns;
  const int64_t depth = round_up(rows, How::step);
  std::fill(x + rows * C, x + depth * C, typename How::Sum(0));
  if constexpr (How::group_b == 1) {
    return x;
  } else {
    static_assert(How::group_b == 2);
    for (int64_t k = 0; k < depth; k += 2) {
      uint32_t pairs[C];
#pragma omp simd
      for (int64_t l = 0; l < C; ++l)
        pairs[l] = bf16::rounded_bits(x[k * C + l]) | static_cast<uint32_t>(bf16::rounded_bits(x[(k + 1) * C + l]))
                                                          << 16;
      std::memcpy(static_cast<void*>(out + k * C), pairs, sizeof(pairs));
    }
    return out;
  }
}

// out (width, lines) = x (lines, width)^T.   lines: up to 32; out: with room for beyond_panels more elements
template <class A>
void transposed_lines(A* out, const A* x, int64_t width, int64_t lines) {
  pack_panels<1>(out, lines, LastPanel::narrow, width, Lines<A>{x, width, 1}, lines, lines, width);
}

// Online softmax of a panel of queries: for each query the largest score so far, the sum of exponentials relative to
// it, and the sum of values weighted by them (D, How::columns).
template <class How>
struct QueryPanel {
  using Sum = typename How::Sum;
  static constexpr int64_t C = How::columns;
  Sum *largest, *total, *sums;

  void clear(int64_t D) const {
    std::fill_n(largest, C, std::numeric_limits<Sum>::lowest());  // not -infinity: the difference of two is a number
    std::fill_n(total, C, Sum(0));
    std::fill_n(sums, D * C, Sum(0));
  }
  // Replaces scores (keys, C) by their exponentials; 0 where visible(k, l) is false. The scaled scores are rounded and
  // stored: multiplied and subtracted in one operation, they would differ from those that `largest` is taken from.
  template <class Visible>
  void update_softmax(Sum* scores, int64_t keys, Sum scale, int64_t D, const Visible& visible) const {
    Sum most[C], added[C], before[C];
    std::fill_n(most, C, std::numeric_limits<Sum>::lowest());
    for (int64_t k = 0; k < keys; ++k)
#pragma omp simd
      for (int64_t l = 0; l < C; ++l) {
        const Sum score = scores[k * C + l] *= scale;
        most[l] = visible(k, l) && most[l] < score ? score : most[l];
      }
#pragma omp simd
    for (int64_t l = 0; l < C; ++l) {
      const Sum now = std::max(largest[l], most[l]);
      before[l] = exponential(largest[l] - now);
      largest[l] = now;
      added[l] = 0;
    }
    for (int64_t k = 0; k < keys; ++k)
#pragma omp simd
      for (int64_t l = 0; l < C; ++l) {
        const Sum p = exponential(scores[k * C + l] - largest[l]);
        added[l] += scores[k * C + l] = visible(k, l) ? p : Sum(0);
      }
    for (int64_t d = 0; d < D; ++d)
#pragma omp simd
      for (int64_t l = 0; l < C; ++l) sums[d * C + l] *= before[l];
#pragma omp simd
    for (int64_t l = 0; l < C; ++l) total[l] = total[l] * before[l] + added[l];
  }
};

// A head of a gradient, whose rows are overwritten in the training dtype or, if `sums` is set, added to.
template <class T, class A>
struct GradientHead {
  T* out;
  A* sums;
  int64_t stride;
  GradientHead(const HeadRows<T>& overwritten, const HeadRows<A>& added_to, const SequenceRows& rows, int64_t b,
               int64_t head, int64_t D)
      : out(head_of(overwritten, rows, b, head, D)),
        sums(head_of(added_to, rows, b, head, D)),
        stride(sums == nullptr ? overwritten.stride : added_to.stride) {}

  // n channels of row t, from d on: x * factor.
  void write(int64_t t, int64_t d, const A* x, A factor, int64_t n) const {
    if (sums != nullptr) {
      A* row = sums + t * stride + d;
#pragma omp simd
      for (int64_t i = 0; i < n; ++i) row[i] += x[i] * factor;
    } else {
      T* row = out + t * stride + d;
#pragma omp simd
      for (int64_t i = 0; i < n; ++i) store(row[i], x[i] * factor);
    }
  }
};

// P and dS of a panel, (rows, How::columns), from the scores and dP, in place: p = exp(scale * score - lse),
// ds = p (dp - delta); 0 where the row does not see the key. The panel's first key is `key`. The scaled scores are
// rounded before lse is subtracted, as in the forward: a separate loop keeps g++ from fusing the two.
template <class How>
void score_gradients(typename How::Sum* p, typename How::Sum* dp, typename How::Sum scale, int64_t rows, int64_t key,
                     const typename How::Sum* lse, const typename How::Sum* delta, const KeyRange* visible) {
  using Sum = typename How::Sum;
  constexpr int64_t C = How::columns;
#pragma omp simd
  for (int64_t i = 0; i < rows * C; ++i) p[i] *= scale;
  for (int64_t i = 0; i < rows; ++i, p += C, dp += C) {
    const Sum mean = delta[i], s = lse[i];
#pragma omp simd
    for (int64_t l = 0; l < C; ++l) {
      p[l] = exponential(p[l] - s);
      dp[l] = p[l] * (dp[l] - mean);
    }
    if (visible[i].covers(key, key + C)) continue;
    const int64_t first = std::clamp<int64_t>(visible[i].first - key, 0, C),
                  last = std::clamp<int64_t>(visible[i].last - key, first, C);
    for (Sum* x : {p, dp}) {
      std::fill(x, x + first, Sum(0));
      std::fill(x + last, x + C, Sum(0));
    }
  }
}

// Merges a row of a block into the result of the blocks before it: `values` (D) are weighted by exponentials relative
// to `most`, whose sum is `sum`; all exponentials become relative to the larger maximum. Before the first block,
// `largest` is -infinity, and sums and total are 0.
template <class A>
void merge_row(A* sums, A& largest, A& total, const A* values, A most, A sum, int64_t D) {
  const A both = std::max(largest, most);
  const A before = exponential(largest - both), now = exponential(most - both);
#pragma omp simd
  for (int64_t d = 0; d < D; ++d) sums[d] = sums[d] * before + values[d] * now;
  total = total * before + sum * now;
  largest = both;
}

}  // namespace detail
}  // namespace CPU_ISA
}  // namespace llmc::cpu
