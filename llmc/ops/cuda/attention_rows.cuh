// attention_rows.cuh: what the attention kernels know of rows, with a warp's products or a warpgroup's: which keys they
// see (masks, and tiles that are skipped because no row sees them), the running softmax of the forward and what it
// writes, and the terms from which the backward recomputes probabilities.
#pragma once
#include <climits>

#include "ops/cuda/attention_tiles.cuh"

namespace llmc::cuda {

// Rows are counted like the keys: the block's first row is row `offset`, and row t sees the keys [first(t), t], as far
// as the block has them. `first` may be negative.
struct SeenKeys {
  const int32_t* positions;  // from row 0 on, of packed documents, or nullptr
  int rows, keys;            // one past the last

  __device__ SeenKeys(const int32_t* all_positions, const KernelBlock& s, int64_t b)
      : positions(all_positions == nullptr ? nullptr : all_positions + b * s.length),
        rows(s.offset + s.rows),
        keys(s.keys) {}
  // Arbitrary for a row past the end.
  __device__ int first(int row) const { return positions == nullptr || row >= rows ? 0 : row - positions[row]; }
};

// The keys that rows [begin_row, end_row) see, possibly none: `begin` is the first row, `smallest` and `largest` are
// the extremes of the rows' first keys, `end` is past the last key.
struct RowRange {
  int begin, end, smallest = 0, largest = 0;

  // All lanes of a warp call this together.
  __device__ RowRange(const SeenKeys& seen, int begin_row, int end_row)
      : begin(begin_row), end(begin_row < seen.rows ? min(min(end_row, seen.rows), seen.keys) : 0) {
    if (seen.positions == nullptr) return;
    smallest = INT_MAX;
#pragma unroll 1
    for (int row = begin_row + lane_of_thread(); row < min(end_row, seen.rows); row += warp_size) {
      smallest = min(smallest, seen.first(row));
      largest = max(largest, seen.first(row));
    }
#pragma unroll
    for (int lanes = warp_size / 2; lanes > 0; lanes /= 2) {  // both at once: neither waits for the other
      smallest = min(smallest, __shfl_xor_sync(all_lanes, smallest, lanes));
      largest = max(largest, __shfl_xor_sync(all_lanes, largest, lanes));
    }
  }
  // Does any row see any key of [first, last]? Does every row see all of them?
  __device__ bool sees_any(int first, int last) const { return first < end && last >= smallest; }
  __device__ bool sees_all(int first, int last) const { return last <= begin && last < end && first >= largest; }
};

// f(score) for each key, from `key` on, that is masked for the row of elements 2 half and 2 half + 1 of scores[m]; row
// 0 of scores is row `first`.
template <int M, int N, class F>
__device__ void for_unseen(Accumulators<M, N>& scores, int m, int half, const SeenKeys& seen, int first, int key, F f) {
  const int row = first + 16 * m + fragment_row(2 * half), first_seen = seen.first(row);
#pragma unroll
  for (int n = 0; n < N; ++n)
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      const int k = key + 8 * n + fragment_column(i);
      if (k > row || k >= seen.keys || k < first_seen) f(scores[m][n][2 * half + i]);
    }
}

// The same with the causal mask and the document mask applied separately, for which the forward's registers suffice.
template <int M, int N, class F>
__device__ void for_unseen_apart(Accumulators<M, N>& scores, int m, int half, const SeenKeys& seen, int first, int key,
                                 F f) {
  // Relative to the lane's first key, so that the others are constants.
  const int row = first + 16 * m + fragment_row(2 * half), lane_key = key + fragment_column(0),
            last_seen = min(row, seen.keys - 1) - lane_key;
#pragma unroll
  for (int n = 0; n < N; ++n)
#pragma unroll
    for (int i = 0; i < 2; ++i)
      if (8 * n + i > last_seen) f(scores[m][n][2 * half + i]);
  if (seen.positions == nullptr) return;
  const int first_seen = seen.first(row) - lane_key;
#pragma unroll
  for (int n = 0; n < N; ++n)
#pragma unroll
    for (int i = 0; i < 2; ++i)
      if (8 * n + i < first_seen) f(scores[m][n][2 * half + i]);
}

// One past the last row from `begin` on that sees a key up to `last`, or 0. Looks no further than 128 rows that do not,
// since later ones do not either: a sequence of many documents takes time in proportion to its length, not its square.
// All lanes of a warp call this together.
__device__ inline int end_of_rows_that_see(const SeenKeys& seen, int begin, int last) {
  if (seen.positions == nullptr) return seen.rows;
  int end = 0;
#pragma unroll 1
  for (int rows = begin, before = -1; rows < seen.rows && before < end; rows += 4 * warp_size) {
    before = end;
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      const int row = rows + i * warp_size + lane_of_thread();
      if (row < seen.rows && seen.first(row) <= last) end = row + 1;
    }
    end = warp_reduce(end, [](int a, int b) { return max(a, b); });
  }
  return end;
}

// The tiles of n rows of queries, of one head, that see any of the keys [begin, begin + keys); maybe none. All lanes of
// a warp construct it together.
struct TilesOfQueries {
  int first, count;
  __device__ TilesOfQueries(const SeenKeys& seen, const KernelBlock& s, int begin, int keys, int n) {
    const int first_row = max(begin - s.offset, 0);
    first = first_row / n;
    count = (end_of_rows_that_see(seen, s.offset + first_row, begin + keys - 1) - s.offset + n - 1) / n - first;
  }
};

// Grid (heads that run together, blocks of a head, groups of such heads), in the order in which blocks start. heads: of
// all sequences. The blocks of a head all read `rows` rows of two arrays. With the first blocks of all heads first, the
// longest run first, but if those rows of all heads do not fit into half of the L2 cache, each block reads them from
// memory again; then groups of heads that fit follow each other, unless a group would be too small to fill the GPU.
template <class T>
Grid grid_of_heads(int64_t heads, int64_t blocks, int64_t rows, int64_t D) {
  const int64_t bytes = 2 * rows * D * static_cast<int64_t>(sizeof(T)), L2 = device_attribute(cudaDevAttrL2CacheSize),
                fit = L2 / 2 / std::max<int64_t>(bytes, 1),
                groups = fit * blocks < 2 * device_attribute(cudaDevAttrMultiProcessorCount) ? 1 : ceil_div(heads, fit);
  return {ceil_div(heads, std::max<int64_t>(groups, 1)), blocks, groups};
}
// The head of this thread block, which may be past the last.
__device__ inline unsigned head_of_block() { return blockIdx.z * gridDim.x + blockIdx.x; }

// A block of queries: blockIdx.y counts backward from the last rows, which have the most keys, so that short blocks
// fill the gaps at the end. Heads that share keys follow each other.
struct BlockOfQueries {
  unsigned b, h, kv;  // b: maybe past the last
  int first;          // row, counted like the keys
  __device__ BlockOfQueries(const KernelBlock& s, int rows)
      : b(head_of_block() / static_cast<unsigned>(s.Hq)),
        h(head_of_block() % static_cast<unsigned>(s.Hq)),
        kv(h / static_cast<unsigned>(s.Hq / s.Hkv)),
        first(s.offset + static_cast<int>(gridDim.y - 1 - blockIdx.y) * rows) {}
};

// Calls use(keys, values, first key) for each tile of keys that `rows` see; `buffers` holds two pairs of tiles.
template <class Block, Copy copy, class T, int DP, class Use>
__device__ void for_tiles_of_keys(const Tile<T, DP>& buffers, const Head<const T>& keys, const Head<const T>& values,
                                  const RowRange& rows, Use use) {
  constexpr int n = Block::tile_rows;
  const auto tile = [&](int i, int which) { return buffers.after((2 * (i & 1) + which) * n); };
  double_buffered(
      max(rows.smallest, 0) / n, (rows.end + n - 1) / n,
      [&](int i) {
        load_rows<n, Block::threads, copy>(tile(i, 0), keys, i * n);
        load_rows<n, Block::threads, copy>(tile(i, 1), values, i * n);
      },
      [&](int i) { use(tile(i, 0), tile(i, 1), i * n); });
}

// ---- Softmax --------------------------------------------------------------------------------------------------------

// For the rows that a lane holds: the maximum score so far, and this lane's part of the sum of exponentials.
template <int M>
struct OnlineSoftmax {
  float largest[M][2], sum[M][2];

  __device__ OnlineSoftmax() {
#pragma unroll
    for (int i = 0; i < 2 * M; ++i) {
      largest[i / 2][i % 2] = -INFINITY;
      sum[i / 2][i % 2] = 0;
    }
  }
  // scores = 2^(scores scale - maximum). Returns the factor to the new maximum, for what was summed with an earlier
  // one.
  template <int N>
  __device__ float exponentials(Accumulators<M, N>& scores, int m, int half, float scale) {
    float most = -INFINITY;
#pragma unroll
    for (int n = 0; n < N; ++n) most = fmaxf(most, fmaxf(scores[m][n][2 * half], scores[m][n][2 * half + 1]));
    most = fmaxf(largest[m][half], quad_reduce(most, Max{}));
    const float shift = most == -INFINITY ? 0 : most * scale;  // a row may have seen no key yet
    const float correction = fast_exp2(largest[m][half] * scale - shift);
    largest[m][half] = most;
    float sums[2] = {sum[m][half] * correction, 0};  // two, so that additions do not wait for each other
#pragma unroll
    for (int n = 0; n < N; ++n)
#pragma unroll
      for (int i = 0; i < 2; ++i) {
        float& score = scores[m][n][2 * half + i];
        score = fast_exp2(score * scale - shift);
        sums[i] += score;
      }
    sum[m][half] = sums[0] + sums[1];
    return correction;
  }
  // The same, and rescales outs.
  template <int N, int ND>
  __device__ void update(Accumulators<M, N>& scores, Accumulators<M, ND>& outs, int m, int half, float scale) {
    scale_row(outs, m, half, exponentials(scores, m, half, scale));
  }
};

// Where the forward writes; see AttentionOutputs. Rows are counted like the keys.
template <class T>
struct KernelOutputs {
  Heads<T> out;
  Heads<float> sums;
  float *lse, *largest, *total;  // from row 0 on
};

// out = outs / softmax's sums, and the statistics of the rows.
template <Copy copy, int M, int ND, class T>
__device__ void store_outputs(const KernelOutputs<T>& to, const KernelBlock& s, const BlockOfQueries& at, int first,
                              const OnlineSoftmax<M>& softmax, Accumulators<M, ND>& outs, float scale) {
#pragma unroll
  for (int m = 0; m < M; ++m)
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const float total = quad_reduce(softmax.sum[m][half], Sum{});
      scale_row(outs, m, half, 1.0f / total);
      const int row = first + 16 * m + fragment_row(2 * half);
      if (row >= s.offset + s.rows || fragment_column(0) != 0) continue;
      const float largest = softmax.largest[m][half] * scale * ln_2;
      if (to.lse != nullptr) s.statistic(to.lse, at.b, at.h)[row] = largest + logf(total);
      if (to.largest != nullptr) s.statistic(to.largest, at.b, at.h)[row] = largest;
    }
  store_rows<copy>(to.out.of(at.b, at.h), first, outs);
}

// Adds the block to the running sums, each weighted by the exponential of its largest score minus the larger of both.
template <int M, int ND, class T>
__device__ void merge_outputs(const KernelOutputs<T>& to, const KernelBlock& s, const BlockOfQueries& at, int first,
                              const OnlineSoftmax<M>& softmax, Accumulators<M, ND>& outs, float scale) {
  float kept[M][2];  // weights of the running sums
#pragma unroll
  for (int m = 0; m < M; ++m)
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const float total = quad_reduce(softmax.sum[m][half], Sum{});
      const int row = first + 16 * m + fragment_row(2 * half);
      float weight = 0;
      kept[m][half] = 1;
      // Rows that see no key have a total of 0; rows with NaNs a total of NaN. The first lane of a quad reads and
      // writes the row's statistics for all four.
      if (total != 0 && row < s.offset + s.rows && fragment_column(0) == 0) {
        float &before = s.statistic(to.largest, at.b, at.h)[row], &sum = s.statistic(to.total, at.b, at.h)[row];
        const float added = softmax.largest[m][half] * scale * ln_2, largest = fmaxf(before, added);
        kept[m][half] = fast_exp2((before - largest) * log2_e);
        weight = fast_exp2((added - largest) * log2_e);
        before = largest;
        sum = sum * kept[m][half] + total * weight;
      }
      kept[m][half] = __shfl_sync(all_lanes, kept[m][half], 0, 4);
      scale_row(outs, m, half, __shfl_sync(all_lanes, weight, 0, 4));
    }
  update_rows(to.sums.of(at.b, at.h), first, outs,
              [&](int m, int half, float sum, float x) { return sum * kept[m][half] + x; });
}

// Per query row: P = 2^(S scale - lse_log2).
struct alignas(8) RowTerms {
  float lse_log2, delta;
};
struct alignas(16) RowTermsPair {
  RowTerms of[2];
};

namespace detail {

// Rows of terms per head: whole tiles of every kernel. Those past the block's are {infinity, 0}, so P and dS are 0.
__host__ __device__ constexpr int64_t terms_rows(int64_t rows) { return (rows + 127) / 128 * 128; }

}  // namespace detail

// The terms of a head's rows [begin, begin + count), by a warp, whose other lanes see them after a barrier. lse and
// terms: row 0's
template <int count, Copy copy, int DP, class T>
__device__ void find_row_terms(RowTerms* terms, const Head<const T>& dout, const Head<const T>& out,
                               const float* __restrict__ lse, int begin) {
  constexpr int pack = copy == Copy::packs ? full_pack<T> : 1, lanes = DP / pack < warp_size ? DP / pack : warp_size;
  const int lane = lane_of_thread() % lanes, end = begin + count;
#pragma unroll 1
  for (int row = begin + lane_of_thread() / lanes; row < end; row += warp_size / lanes) {
    const bool valid = row < dout.rows;
    float delta = 0;
    if (valid)
      for (int d = lane * pack; d < dout.D; d += lanes * pack) {
        const auto gs = Packed<T, pack>::load(dout.data + row * dout.stride + d),
                   os = Packed<T, pack>::load(out.data + row * out.stride + d);
        for (int i = 0; i < pack; ++i) delta += gs[i] * os[i];
      }
    delta = warp_reduce<lanes>(delta, Sum{});
    if (lane == 0) terms[row] = {valid ? lse[row] * log2_e : INFINITY, delta};
  }
}

}  // namespace llmc::cuda
