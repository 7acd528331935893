// attention_tiles.h: the parts of attention.h: which keys a row sees, packed products of a tile of query rows and keys,
// softmax of a row and its gradient, and where results go.
#pragma once
#include <limits>

#include "ops/cpu/pack.h"

namespace llmc::cpu {
inline namespace CPU_ISA {

namespace detail {

inline constexpr int64_t attention_rows = 32;  // query rows in a tile

// The sizes of a thread's packed operands.
struct AttentionLayout {
  int64_t keys, D;
  int64_t keys_padded, D_padded;  // rounded up to whole panels
  explicit AttentionLayout(const AttentionBlock& s)
      : keys(s.keys.rows), D(s.D), keys_padded(round_up(keys, panel_width)), D_padded(round_up(D, panel_width)) {}
  int64_t rows_panels() const { return keys * D_padded; }     // (D / 32, keys, 32): a head as stored
  int64_t columns_panels() const { return keys_padded * D; }  // (keys / 32, D, 32): a head transposed
  int64_t tile() const { return attention_rows * D_padded; }
  int64_t scores() const { return attention_rows * keys_padded; }
  int64_t forward_scratch() const { return rows_panels() + columns_panels() + 2 * tile() + scores(); }
  int64_t backward_scratch() const { return 3 * rows_panels() + 2 * columns_panels() + 3 * tile() + 2 * scores(); }
};

// Where a head of the block's rows lies, or nullptr if the matrix is not there.
template <class T>
T* head_of(const HeadRows<T>& m, const SequenceRows& rows, int64_t b, int64_t head, int64_t D) {
  return m.data == nullptr ? nullptr : m.data + (b * rows.length + rows.first) * m.stride + head * D;
}
inline const int32_t* places_of(const int32_t* positions, const SequenceRows& rows, int64_t b) {
  return positions == nullptr ? nullptr : positions + b * rows.length + rows.first;
}

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
void load_tile(A* out, int64_t ldo, const T* x, int64_t stride, int64_t rows, int64_t D, A factor = A(1)) {
  for (int64_t t = 0; t < rows; ++t) {
#pragma omp simd
    for (int64_t d = 0; d < D; ++d) out[t * ldo + d] = static_cast<A>(x[t * stride + d]) * factor;
    std::fill(out + t * ldo + D, out + (t + 1) * ldo, A(0));
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

// Keys from `first` to `last`.
struct KeyRange {
  int64_t first = 0, last = 0;
  bool empty() const { return first >= last; }
  int64_t count() const { return last - first; }
  KeyRange relative_to(int64_t start) const { return {first - start, last - start}; }
};
// Those that row i of the block sees. `places`: positions of the block's rows, or nullptr
inline KeyRange keys_of_row(const AttentionBlock& s, const int32_t* places, int64_t i) {
  const int64_t last = i + s.offset;
  return {places == nullptr ? 0 : std::max(last - places[i], int64_t{0}), std::min(last + 1, s.keys.rows)};
}
// Those that any of several rows sees, from the beginning of a panel.
inline KeyRange keys_of_rows(const AttentionBlock& s, const int32_t* places, int64_t begin, int64_t rows) {
  KeyRange all{s.keys.rows, 0};
  for (int64_t i = begin; i < begin + rows; ++i)
    if (const KeyRange keys = keys_of_row(s, places, i); !keys.empty())
      all = {std::min(all.first, keys.first), std::max(all.last, keys.last)};
  if (all.empty()) return {};
  all.first = all.first / panel_width * panel_width;
  return all;
}

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
  void write_panels(const A* panels, int64_t panel_rows, const KeyRange& rows, int64_t D) const {
    for (int64_t d = 0; d < D; d += panel_width, panels += panel_rows * panel_width)
      for (int64_t t = rows.first; t < rows.last; ++t)
        write(t, d, panels + t * panel_width, A(1), std::min(panel_width, D - d));
  }
};

template <class A>
struct RowSum {
  A largest, sum;
};
// row = exp(row - its maximum) where a key is visible; 0 elsewhere up to `end` (a multiple of the panel width).
template <class A>
RowSum<A> exponentiate_row(A* row, const KeyRange& visible, int64_t end) {
  if (visible.empty()) {
    std::fill(row, row + end, A(0));
    return {-std::numeric_limits<A>::infinity(), 0};
  }
  const auto [first, last] = visible;
  const int64_t panels = end / panel_width;
  std::fill(row, row + first, row[first]);  // leaves the maximum unchanged; whole vectors are faster than a remainder
  std::fill(row + last, row + end, row[first]);
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
  std::fill(row + last, row + end, A(0));
  A sum = 0;
#pragma omp simd reduction(+ : sum)
  for (int64_t j = 0; j < panels * panel_width; ++j) sum += row[j];
  return {largest, sum};
}

// P and dS from the scores and dP, in their place: p = exp(p - lse), dp = p (dp - sum(p dp)); 0 where no key is
// visible. Where one key has nearly all of the probability, dP and its mean cancel, and every rounding that differs
// between the two shows. So the mean is summed from the very dP that it is subtracted from, not taken as the row sum of
// dO O, which is equal but rounds differently; and the row is divided by its sum, because the rounding of a large lse
// is an error of all of the row's p. Neither can be had from a part of the keys: `mean_of_all`, if not nullptr, is the
// mean over all keys, and the sum of all p counts as 1.
template <class A>
void score_gradient_row(A* p, A* dp, A lse, const A* mean_of_all, const KeyRange& visible, int64_t end) {
  const int64_t n = visible.empty() ? 0 : end / panel_width * panel_width;
  const auto [first, last] = visible.empty() ? KeyRange{end, end} : visible;
#pragma omp simd
  for (int64_t j = 0; j < n; ++j) p[j] = exponential(p[j] - lse);
  for (A* row : {p, dp}) {
    std::fill(row, row + first, A(0));
    std::fill(row + last, row + end, A(0));
  }
  A inverse = 1, mean = 0;
  if (mean_of_all != nullptr) {
    mean = *mean_of_all;
  } else {
    A sum = 0, weighted = 0;
#pragma omp simd reduction(+ : sum, weighted)
    for (int64_t j = 0; j < n; ++j) {
      sum += p[j];
      weighted += p[j] * dp[j];
    }
    inverse = A(1) / sum;
    mean = weighted * inverse;
  }
#pragma omp simd
  for (int64_t j = 0; j < n; ++j) {
    p[j] *= inverse;
    dp[j] = p[j] * (dp[j] - mean);
  }
}

// Merges a row of a block, `values` (D) weighted by exponentials, into what blocks before it gave: all exponentials
// become relative to the larger maximum. Before the first block that is -infinity, and sums and total are 0.
template <class A>
void merge_row(A* sums, A& largest, A& total, const A* values, const RowSum<A>& row, int64_t D) {
  const A both = std::max(largest, row.largest);
  const A before = exponential(largest - both), now = exponential(row.largest - both);
#pragma omp simd
  for (int64_t d = 0; d < D; ++d) sums[d] = sums[d] * before + values[d] * now;
  total = total * before + row.sum * now;
  largest = both;
}

}  // namespace detail
}  // namespace CPU_ISA
}  // namespace llmc::cpu
