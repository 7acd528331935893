// fp8_tiles.cuh: parts of matrices in fp8 with scales for 128 x 128 numbers. Contract: ops/ops_quantise.h.
#pragma once
#include "ops/cuda/quantise.cuh"

namespace llmc::cuda {

// A block has a tile, a thread a column of it.
template <class T>
__global__ void __launch_bounds__(128)
    tile_maxima_kernel(float* __restrict__ maxima, const T* __restrict__ x, TiledPart part) {
  const int64_t column = static_cast<int64_t>(blockIdx.x) * fp8_block + threadIdx.x,
                begin = static_cast<int64_t>(blockIdx.y) * fp8_block, end = min(begin + fp8_block, part.rows);
  float largest[1] = {0};
  if (column < part.columns)
    for (int64_t r = begin; r < end; ++r) {
      const int64_t i = (blockIdx.z * part.rows + r) * part.columns + column - part.first;
      if (i >= 0 && i < part.n) largest[0] = larger_magnitude(largest[0], to_float(x[i]));
    }
  block_reduce(largest, Magnitude{});
  const int64_t tile = (static_cast<int64_t>(blockIdx.z) * gridDim.y + blockIdx.y) * gridDim.x + blockIdx.x;
  if (threadIdx.x == 0) maxima[tile] = largest[0] < INFINITY ? largest[0] : INFINITY;
}
template <class T>
void tile_maxima(float* maxima, const T* x, const TiledPart& part, cudaStream_t stream) {
  launch(tile_maxima_kernel<T>, Grid(ceil_div(part.columns, fp8_block), ceil_div(part.rows, fp8_block), part.matrices),
         128, 0, stream, maxima, x, part);
}

template <int = 0>
__global__ void scales_of_ranks_kernel(float* __restrict__ scales, const float* __restrict__ maxima, int64_t ranks,
                                       int64_t n) {
  const int64_t i = item_of_thread();
  if (i >= n) return;
  float largest = 0;
  for (int64_t r = 0; r < ranks; ++r) largest = fmaxf(largest, maxima[r * n + i]);
  scales[i] = fp8_scale(largest);
}
inline void scales_of_ranks(float* scales, const float* maxima, int64_t ranks, int64_t n, cudaStream_t stream) {
  launch_each(scales_of_ranks_kernel<>, n, stream, scales, maxima, ranks, n);
}

// A thread has an element of `part`.
template <class Out, class In>
__global__ void __launch_bounds__(item_threads) scale_tiles_kernel(Out* __restrict__ out, const In* __restrict__ x,
                                                                   const float* __restrict__ scales, TiledPart part) {
  const int64_t i = item_of_thread();
  if (i >= part.n) return;
  const float scale = scales[part.tile_of(part.first + i)];
  if constexpr (std::is_same_v<Out, e4m3>) out[i] = e4m3::of(to_float(x[i]) * reciprocal_of_power(scale));
  else out[i] = from_float<Out>(static_cast<float>(x[i]) * scale);
}
template <class T>
void tiles_to_fp8(e4m3* out, const T* x, const float* scales, const TiledPart& part, cudaStream_t stream) {
  launch_each(scale_tiles_kernel<e4m3, T>, part.n, stream, out, x, scales, part);
}
template <class T>
void tiles_from_fp8(T* out, const e4m3* x, const float* scales, const TiledPart& part, cudaStream_t stream) {
  launch_each(scale_tiles_kernel<T, e4m3>, part.n, stream, out, x, scales, part);
}

}  // namespace llmc::cuda
