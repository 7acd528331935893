// attention_keys.cuh: which keys of a block its rows see: masks, and tiles that are skipped because no row sees them.
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
    smallest = warp_reduce(smallest, [](int a, int b) { return min(a, b); });
    largest = warp_reduce(largest, [](int a, int b) { return max(a, b); });
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

// One past the last row from `begin` on that sees a key up to `last`, or 0. All lanes of a warp call this together.
__device__ inline int end_of_rows_that_see(const SeenKeys& seen, int begin, int last) {
  if (seen.positions == nullptr) return seen.rows;
  int end = 0;
#pragma unroll 4
  for (int row = begin + lane_of_thread(); row < seen.rows; row += warp_size)
    if (seen.first(row) <= last) end = row + 1;
  return warp_reduce(end, [](int a, int b) { return max(a, b); });
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
  unsigned b, h, kv;
  int first;  // row, counted like the keys
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

}  // namespace llmc::cuda
