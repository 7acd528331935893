// sort.cuh: sorts rows by id, keeping the order of rows with equal ids: an LSD radix sort with stable passes. For sums
// over the rows of one token, without atomics whose order would affect the result.
#pragma once
#include <bit>

#include "ops/cuda/reduce.cuh"

namespace llmc::cuda {

namespace detail {

// Rows per tile (one tile per warp), and bits per digit.
inline constexpr int64_t sort_tile = 1024;
inline constexpr int max_digit_bits = 9, max_digits = 1 << max_digit_bits, sort_warps = 4;
// Rows per lane whose loads are in flight together.
inline constexpr int sort_batch = 8;

// ids, and the row of each; rows == nullptr: still in row order.
struct RowIds {
  const int32_t *ids, *rows;
};
struct SortTile {
  int64_t index, begin, end;
  int lane, warp;
  __device__ explicit SortTile(int64_t N) : lane(lane_of_thread()), warp(warp_of_thread()) {
    index = static_cast<int64_t>(blockIdx.x) * sort_warps + warp;
    begin = min(N, index * sort_tile);
    end = min(N, begin + sort_tile);
  }
};

}  // namespace detail

// counts (digits, tiles) = how often each digit occurs in each tile.
template <int = 0>
__global__ void count_digits_kernel(int32_t* __restrict__ counts, const int32_t* __restrict__ ids, int64_t N,
                                    int64_t tiles, int shift, int digits) {
  constexpr int size = detail::sort_warps * detail::max_digits;
  SHARED(int32_t, shared, size);
  const detail::SortTile tile(N);
  int32_t* count = shared + tile.warp * detail::max_digits;
  for (int digit = tile.lane; digit < digits; digit += warp_size) count[digit] = 0;
  __syncwarp();  // all counts begin at zero
  for (int64_t begin = tile.begin + tile.lane; begin < tile.end; begin += detail::sort_batch * warp_size) {
    int32_t some[detail::sort_batch];
#pragma unroll
    for (int j = 0; j < detail::sort_batch; ++j)
      if (begin + j * warp_size < tile.end) some[j] = ids[begin + j * warp_size];
#pragma unroll
    for (int j = 0; j < detail::sort_batch; ++j)
      if (begin + j * warp_size < tile.end) atomicAdd(&count[some[j] >> shift & (digits - 1)], 1);
  }
  __syncwarp();  // the tile is counted
  if (tile.begin == tile.end) return;
  for (int digit = tile.lane; digit < digits; digit += warp_size) counts[digit * tiles + tile.index] = count[digit];
}

// One block; each thread takes a share.
template <int threads>
__global__ void sums_before_kernel(int32_t* counts, int64_t n) {
  const int64_t share = (n + threads - 1) / threads, begin = min(n, threadIdx.x * share), end = min(n, begin + share);
  int32_t sum = 0;
  for (int64_t i = begin; i < end; ++i) sum += counts[i];
  const int lane = lane_of_thread(), warp = warp_of_thread();
  const int32_t up_to_mine = warp_prefix_sum(sum);
  constexpr int warps = threads / warp_size;
  SHARED(int32_t, of_warp, warps);
  if (lane == warp_size - 1) of_warp[warp] = up_to_mine;
  __syncthreads();  // the sums of all warps are written
  int32_t before = up_to_mine - sum;
  for (int w = 0; w < warp; ++w) before += of_warp[w];
  for (int64_t i = begin; i < end; ++i) {
    const int32_t count = counts[i];
    counts[i] = before;
    before += count;
  }
}
// counts (n) = their exclusive prefix sums.
inline void sums_before(int32_t* counts, int64_t n, cudaStream_t stream) {
  launch(sums_before_kernel<1024>, 1, 1024, 0, stream, counts, n);
}

// Scatters each row to its position: places (digits, tiles) is where a tile's rows with a given digit begin.
template <int = 0>
__global__ void place_rows_kernel(int32_t* __restrict__ sorted_ids, int32_t* __restrict__ sorted_rows,
                                  detail::RowIds from, const int32_t* __restrict__ places, int64_t N, int64_t tiles,
                                  int shift, int digit_bits) {
  constexpr int size = detail::sort_warps * detail::max_digits;
  SHARED(int32_t, shared, size);
  const detail::SortTile tile(N);
  if (tile.begin == tile.end) return;
  const int digits = 1 << digit_bits;
  int32_t* place = shared + tile.warp * detail::max_digits;
  for (int digit = tile.lane; digit < digits; digit += warp_size) place[digit] = places[digit * tiles + tile.index];
  __syncwarp();  // all places are written
  for (int64_t begin = tile.begin; begin < tile.end; begin += detail::sort_batch * warp_size) {
    int32_t ids[detail::sort_batch], rows[detail::sort_batch];
#pragma unroll
    for (int j = 0; j < detail::sort_batch; ++j) {
      const int64_t i = begin + j * warp_size + tile.lane;
      const bool valid = i < tile.end;
      ids[j] = valid ? from.ids[i] : 0;
      rows[j] = valid && from.rows != nullptr ? from.rows[i] : static_cast<int32_t>(i);
    }
#pragma unroll
    for (int j = 0; j < detail::sort_batch; ++j) {
      const bool valid = begin + j * warp_size + tile.lane < tile.end;
      const int digit = ids[j] >> shift & (digits - 1);
      unsigned same = __ballot_sync(all_lanes, valid);  // lanes with my digit
      for (int bit = 0; bit < digit_bits; ++bit) {
        const unsigned set = __ballot_sync(all_lanes, digit >> bit & 1);
        same &= digit >> bit & 1 ? set : ~set;
      }
      const int before = __popc(same & ((1u << tile.lane) - 1));
      const int32_t to = place[digit] + before;
      __syncwarp();  // all lanes have read their places
      if (valid) {
        sorted_ids[to] = ids[j];
        sorted_rows[to] = rows[j];
        if (before == 0) place[digit] += __popc(same);
      }
      __syncwarp();  // the places are those after these rows
    }
  }
}

// Size of sort_rows' `scratch` in integers.
inline int64_t sort_rows_scratch(int64_t N) { return 4 * N + detail::max_digits * ceil_div(N, detail::sort_tile); }

// Sorts rows 0 ... N - 1 by ids (N), each in [0, V); returns pointers into scratch to the sorted ids and their rows.
// The ids may themselves be in scratch, at 3 N: only the first pass reads them, and the second one writes there.
inline detail::RowIds sort_rows(int32_t* scratch, const int32_t* ids, int64_t N, int64_t V, cudaStream_t stream) {
  using namespace detail;
  const int bits = std::max(1, static_cast<int>(std::bit_width(static_cast<uint64_t>(V - 1))));
  const int passes = static_cast<int>(ceil_div(bits, max_digit_bits));
  const int digit_bits = static_cast<int>(ceil_div(bits, passes)), digits = 1 << digit_bits;
  const int64_t tiles = ceil_div(N, sort_tile), blocks = ceil_div(tiles, sort_warps);
  int32_t* counts = scratch + 4 * N;
  RowIds from = {ids, nullptr};
  for (int pass = 0; pass < passes; ++pass) {
    int32_t* sorted = scratch + pass % 2 * 2 * N;
    const int shift = pass * digit_bits;
    launch(count_digits_kernel<>, blocks, sort_warps * warp_size, 0, stream, counts, from.ids, N, tiles, shift, digits);
    sums_before(counts, digits * tiles, stream);
    launch(place_rows_kernel<>, blocks, sort_warps * warp_size, 0, stream, sorted, sorted + N, from, counts, N, tiles,
           shift, digit_bits);
    from = {sorted, sorted + N};
  }
  return from;
}

}  // namespace llmc::cuda
