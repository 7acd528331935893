// quantise.cuh: operands of products in fp8, with the sum along their rows, as tensor cores of Hopper take them.
// Contract: ops_quantise.h.
#pragma once
#ifdef __CUDACC__
#include <cuda_fp8.h>
#endif

#include "core/fp8.h"
#include "ops/cuda/launch.cuh"
#include "ops/cuda/reduce.cuh"
#include "ops/cuda/vec.cuh"
#include "ops/types.h"

namespace llmc::cuda {

// Two numbers as E4M3, the first in the lower byte.
__device__ inline uint32_t e4m3_pair(float first, float second) {
#ifdef __CUDACC__
  return __nv_cvt_float2_to_fp8x2(float2{first, second}, __NV_SATFINITE, __NV_E4M3);  // one instruction from sm_89 on
#else
  return e4m3::of(first).bits | static_cast<uint32_t>(e4m3::of(second).bits) << 8;
#endif
}
// values times factor, as E4M3.
template <int n>
__device__ Packed<e4m3, n> e4m3_pack(const float (&values)[n], float factor) {
  uint32_t words[n / 4];
  for (int i = 0; i < n; i += 4)
    words[i / 4] = e4m3_pair(values[i] * factor, values[i + 1] * factor) |
                   e4m3_pair(values[i + 2] * factor, values[i + 3] * factor) << 16;
  Packed<e4m3, n> pack;
  memcpy(static_cast<void*>(&pack), words, n);
  return pack;
}

// The larger of a and |x|; NaN if either is.
__device__ inline float larger_magnitude(float a, float x) {
  const uint32_t size = __float_as_uint(x) & 0x7fffffffu;  // in the order of the numbers, NaN last
  return __uint_as_float(max(__float_as_uint(a), size));
}
struct Magnitude {
  static constexpr float neutral = 0;
  __device__ float operator()(float a, float b) const { return larger_magnitude(a, b); }
};

// Where operands in fp8 go: numbers and their scales. Null: not wanted.
struct Fp8Operand {
  e4m3* values = nullptr;
  float* scales = nullptr;
};

// out and x (R, C); scales (ceil(C / 128), R). A block has one segment of `in_flight` times as many rows as its lanes
// make up, each lane a pack of each.
template <class T>
__global__ void __launch_bounds__(256)
    quantise_rows_kernel(Fp8Operand out, const T* __restrict__ x, int64_t R, int64_t C) {
  constexpr int pack = full_pack<T>, lanes = fp8_block / pack, rows = 256 / lanes, in_flight = 4;
  const int lane = static_cast<int>(threadIdx.x) % lanes;
  const int64_t row = static_cast<int64_t>(blockIdx.x) * (in_flight * rows) + threadIdx.x / lanes, segment = blockIdx.y;
  const int64_t column = segment * fp8_block + lane * pack;
  Kept<Packed<T>> loaded[in_flight];
#pragma unroll
  for (int i = 0; i < in_flight; ++i)
    if (row + i * rows < R && column < C) loaded[i] = Packed<T>::load_streaming(x + (row + i * rows) * C + column);
#pragma unroll
  for (int i = 0; i < in_flight; ++i) {
    const Floats<pack> values = loaded[i].fp32();
    float largest = 0;
    for (int j = 0; j < pack; ++j) largest = larger_magnitude(largest, values[j]);
#pragma unroll
    for (int step = lanes / 2; step > 0; step /= 2)
      largest = larger_magnitude(largest, __shfl_xor_sync(all_lanes, largest, step));
    const float scale = fp8_scale(largest);
    const int64_t r = row + i * rows;
    if (r >= R || column >= C) continue;
    e4m3_pack(values.values, reciprocal_of_power(scale)).store(out.values + r * C + column);
    if (lane == 0) out.scales[segment * R + r] = scale;
  }
}

// A tile of x (R, C) for a block of 256 threads. by_tile: it has one scale, in `out` (R, C) or turned into (C, R). Else
// its columns have one each, in `turned` (C, R), and if `out` is wanted, too, each of its rows there.
template <class T, bool by_tile>
__global__ void __launch_bounds__(256)
    quantise_tiles_kernel(Fp8Operand out, Fp8Operand turned, const T* __restrict__ x, int64_t R, int64_t C) {
  constexpr int size = fp8_block, pack = full_pack<T>, lanes = size / pack, rows = 256 / lanes, passes = size / rows;
  const int64_t row = static_cast<int64_t>(blockIdx.y) * size, column = static_cast<int64_t>(blockIdx.x) * size;
  const int lane = static_cast<int>(threadIdx.x) % lanes, first = static_cast<int>(threadIdx.x) / lanes;
  const int64_t own_column = column + lane * pack;
  Kept<Packed<T>> loaded[passes];
#pragma unroll
  for (int i = 0; i < passes; ++i)
    if (row + first + i * rows < R && own_column < C)
      loaded[i] = Packed<T>::load_streaming(x + (row + first + i * rows) * C + own_column);

  float scale = 0;  // of the tile
  if constexpr (by_tile) {
    float largest[1] = {0};
#pragma unroll
    for (int i = 0; i < passes; ++i) {
      const Floats<pack> values = loaded[i].fp32();
      for (int j = 0; j < pack; ++j) largest[0] = larger_magnitude(largest[0], values[j]);
    }
    block_reduce(largest, Magnitude{});
    scale = fp8_scale(largest[0]);
    const auto padded = [](int64_t n) { return (ceil_div(n, int64_t{size}) + 3) / 4 * 4; };
    if (threadIdx.x == 0 && out.values != nullptr) out.scales[blockIdx.y * padded(C) + blockIdx.x] = scale;
    if (threadIdx.x == 0 && turned.values != nullptr) turned.scales[blockIdx.x * padded(R) + blockIdx.y] = scale;
  }
  if (out.values != nullptr)
#pragma unroll
    for (int i = 0; i < passes; ++i) {
      const Floats<pack> values = loaded[i].fp32();
      const int64_t r = row + first + i * rows;
      if constexpr (!by_tile) {
        float largest = 0;
        for (int j = 0; j < pack; ++j) largest = larger_magnitude(largest, values[j]);
#pragma unroll
        for (int step = lanes / 2; step > 0; step /= 2)
          largest = larger_magnitude(largest, __shfl_xor_sync(all_lanes, largest, step));
        scale = fp8_scale(largest);
        if (lane == 0 && r < R) out.scales[static_cast<int64_t>(blockIdx.x) * R + r] = scale;
      }
      if (r < R && own_column < C)
        e4m3_pack(values.values, reciprocal_of_power(scale)).store(out.values + r * C + own_column);
    }
  if (turned.values == nullptr) return;

  // Through shared memory, in words of one or two columns: a thread has `run` rows of a word's columns.
  constexpr int columns = 4 / sizeof(T), words = size / columns, run = size * words / 256,
                stride = words + pack / columns;
  DYN_SHARED(uint32_t, tile);  // (128, stride)
#pragma unroll
  for (int i = 0; i < passes; ++i) loaded[i].store(tile + (first + i * rows) * stride + lane * (pack / columns));
  __syncthreads();  // the tile is whole
  const int word = static_cast<int>(threadIdx.x) % words, begin = static_cast<int>(threadIdx.x) / words * run;
  uint32_t numbers[run];
#pragma unroll
  for (int i = 0; i < run; ++i) numbers[i] = tile[(begin + i) * stride + word];
  const auto number = [&](int i, int c) {
    if constexpr (columns == 1) return __uint_as_float(numbers[i]);
    else return __uint_as_float(c == 0 ? numbers[i] << 16 : numbers[i] & 0xffff0000u);
  };
  float scales[columns];
  for (int c = 0; c < columns; ++c) scales[c] = scale;
  if constexpr (!by_tile) {
    SHARED(float, largest_of, 256 * columns);  // (256 / words, 128): of the runs of each column
    for (int c = 0; c < columns; ++c) {
      float largest = 0;
#pragma unroll
      for (int i = 0; i < run; ++i) largest = larger_magnitude(largest, number(i, c));
      largest_of[begin / run * size + word * columns + c] = largest;
    }
    __syncthreads();  // all runs are there
    for (int c = 0; c < columns; ++c) {
      float largest = 0;
      for (int part = 0; part < size / run; ++part)
        largest = larger_magnitude(largest, largest_of[part * size + word * columns + c]);
      scales[c] = fp8_scale(largest);
      const int64_t at = column + word * columns + c;
      if (begin == 0 && at < C) turned.scales[static_cast<int64_t>(blockIdx.y) * C + at] = scales[c];
    }
  }
  constexpr int chunk = 16;
#pragma unroll
  for (int c = 0; c < columns; ++c) {
    const int64_t at = column + word * columns + c;
    const float factor = reciprocal_of_power(scales[c]);
#pragma unroll
    for (int i = 0; i < run; i += chunk) {
      float values[chunk];
      for (int j = 0; j < chunk; ++j) values[j] = number(i + j, c);
      if (at < C && row + begin + i < R) e4m3_pack(values, factor).store(turned.values + at * R + row + begin + i);
    }
  }
}

// x (R, C), with multiples of 16, in `out` (R, C), `turned` (C, R), or both.
template <class T>
void quantise(Fp8Operand out, Fp8Operand turned, const T* x, int64_t R, int64_t C, ScaledBy by, cudaStream_t stream) {
  const int64_t segments = ceil_div(C, fp8_block);
  if (by == ScaledBy::segments && turned.values == nullptr) {
    constexpr int64_t rows_of_block = 4 * 256 / (fp8_block / full_pack<T>);
    return launch(quantise_rows_kernel<T>, Grid(ceil_div(R, rows_of_block), segments), 256, 0, stream, out, x, R, C);
  }
  const Grid tiles(segments, ceil_div(R, fp8_block));
  const int64_t shared = fp8_block * (fp8_block * static_cast<int64_t>(sizeof(T)) + 16);
  if (by == ScaledBy::tiles) launch(quantise_tiles_kernel<T, true>, tiles, 256, shared, stream, out, turned, x, R, C);
  else launch(quantise_tiles_kernel<T, false>, tiles, 256, shared, stream, out, turned, x, R, C);
}

// The numbers of a product in fp8 as T, for products that tensor cores do not compute in fp8: each of 128 threads, or a
// warp, has one block of scaled numbers in turn, or all of them one.

// out and x (R, C), in blocks of 32 or 128 numbers of a row. A warp has 128 columns of a row.
template <class F, int width, class T>
__global__ void __launch_bounds__(128)
    round_rows_kernel(T* __restrict__ out, const T* __restrict__ x, int64_t R, int64_t C, const int32_t* count) {
  constexpr int each = fp8_block / warp_size;
  const int64_t row = static_cast<int64_t>(blockIdx.x) * (blockDim.x / warp_size) + threadIdx.x / warp_size,
                first = static_cast<int64_t>(blockIdx.y) * fp8_block + threadIdx.x % warp_size;
  if (row >= (count != nullptr ? *count : R)) return;
  float values[each], largest[each];
  for (int i = 0; i < each; ++i) {
    const int64_t column = first + i * warp_size;
    values[i] = column < C ? to_float(x[row * C + column]) : 0;
    largest[i] = warp_reduce(larger_magnitude(0, values[i]), Magnitude{});
  }
  if constexpr (width == fp8_block)
    for (int i = 1; i < each; ++i) largest[0] = larger_magnitude(largest[0], largest[i]);
  for (int i = 0; i < each; ++i) {
    const float scale = fp8_scale<F>(largest[width == fp8_block ? 0 : i]);
    if (const int64_t column = first + i * warp_size; column < C)
      out[row * C + column] = from_float<T>(F::rounded(values[i] * reciprocal_of_power(scale)) * scale);
  }
}

// out and x (G, R, C), in blocks of `height` numbers of a column, or of 128 x 128. A block has 128 columns of them.
template <class F, bool by_tile, class T>
__global__ void __launch_bounds__(128) round_columns_kernel(T* __restrict__ out, const T* __restrict__ x, int64_t R,
                                                            int64_t C, int height, const int32_t* count) {
  const int64_t column = static_cast<int64_t>(blockIdx.x) * fp8_block + threadIdx.x,
                begin = static_cast<int64_t>(blockIdx.y) * height, all = count != nullptr ? *count : R,
                end = min(begin + height, all), matrix = static_cast<int64_t>(blockIdx.z) * R * C;
  float largest[1] = {0};
  if (column < C)
    for (int64_t r = begin; r < end; ++r)
      largest[0] = larger_magnitude(largest[0], to_float(x[matrix + r * C + column]));
  if constexpr (by_tile) block_reduce(largest, Magnitude{});
  const float scale = fp8_scale<F>(largest[0]), factor = reciprocal_of_power(scale);
  if (column < C)
    for (int64_t r = begin; r < end; ++r) {
      const int64_t i = matrix + r * C + column;
      out[i] = from_float<T>(F::rounded(to_float(x[i]) * factor) * scale);
    }
}

template <class T>
void round_to_fp8(T* out, const T* x, int64_t G, int64_t R, int64_t C, ScaleBlock block, Fp8Format format,
                  const int32_t* count, cudaStream_t stream) {
  const auto run = [&]<class F>(type_tag<F>) {
    const int64_t segments = ceil_div(C, fp8_block);
    if (block.rows == 1) {
      constexpr int64_t rows = 128 / warp_size;
      const auto kernel = block.columns == fp8_block ? round_rows_kernel<F, fp8_block, T> : round_rows_kernel<F, 32, T>;
      return launch(kernel, Grid(ceil_div(G * R, rows), segments), 128, 0, stream, out, x, G * R, C, count);
    }
    const auto kernel = block.columns > 1 ? round_columns_kernel<F, true, T> : round_columns_kernel<F, false, T>;
    launch(kernel, Grid(segments, ceil_div(R, block.rows), G), 128, 0, stream, out, x, R, C, narrow<int>(block.rows),
           count);
  };
  if (format == Fp8Format::e4m3) run(type_tag<e4m3>{});
  else run(type_tag<e5m2>{});
}

// The same with one scale for each matrix of x (G, R, C): the largest numbers of `whole_parts` parts of each, and then
// of them all, by every block.
inline constexpr int whole_parts = 256;

template <class T>
__global__ void __launch_bounds__(whole_parts) whole_maxima_kernel(float* __restrict__ maxima, const T* __restrict__ x,
                                                                   int64_t R, int64_t C, const int32_t* count) {
  const int64_t n = (count != nullptr ? *count : R) * C, begin = blockIdx.y * R * C;
  float largest[1] = {0};
  for (int64_t i = static_cast<int64_t>(blockIdx.x) * whole_parts + threadIdx.x; i < n; i += whole_parts * whole_parts)
    largest[0] = larger_magnitude(largest[0], to_float(x[begin + i]));
  block_reduce(largest, Magnitude{});
  if (threadIdx.x == 0) maxima[blockIdx.y * whole_parts + blockIdx.x] = largest[0];
}
template <class F, class T>
__global__ void __launch_bounds__(whole_parts)
    round_whole_kernel(T* __restrict__ out, const float* __restrict__ maxima, const T* __restrict__ x, int64_t R,
                       int64_t C, const int32_t* count) {
  const int64_t n = (count != nullptr ? *count : R) * C, begin = blockIdx.y * R * C;
  float largest[1] = {maxima[blockIdx.y * whole_parts + threadIdx.x]};
  block_reduce(largest, Magnitude{});
  const float scale = fp8_scale<F>(largest[0]), factor = reciprocal_of_power(scale);
  for (int64_t i = static_cast<int64_t>(blockIdx.x) * whole_parts + threadIdx.x; i < n; i += whole_parts * whole_parts)
    out[begin + i] = from_float<T>(F::rounded(to_float(x[begin + i]) * factor) * scale);
}
// maxima (G, whole_parts): room
template <class T>
void round_whole_to_fp8(T* out, float* maxima, const T* x, int64_t G, int64_t R, int64_t C, Fp8Format format,
                        const int32_t* count, cudaStream_t stream) {
  const Grid parts(whole_parts, G);
  launch(whole_maxima_kernel<T>, parts, whole_parts, 0, stream, maxima, x, R, C, count);
  const auto kernel = format == Fp8Format::e4m3 ? round_whole_kernel<e4m3, T> : round_whole_kernel<e5m2, T>;
  launch(kernel, parts, whole_parts, 0, stream, out, maxima, x, R, C, count);
}

}  // namespace llmc::cuda
