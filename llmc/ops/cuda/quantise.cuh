// quantise.cuh: operands of products in fp8, with the sum along their rows, as tensor cores of Hopper take them.
// Contract: ops_quantise.h.
#pragma once
#ifdef __CUDACC__
#include <cuda_fp8.h>
#endif

#include "core/fp8.h"
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

// The scale of 128 numbers of a row, of which as many neighbouring lanes as it takes have a pack each.
template <int pack>
__device__ float scale_of_row(const Floats<pack>& values) {
  float largest = 0;
  for (int j = 0; j < pack; ++j) largest = larger_magnitude(largest, values[j]);
  return fp8_scale(warp_reduce<static_cast<int>(fp8_block) / pack>(largest, Magnitude{}));
}

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
    const float scale = scale_of_row(values);
    const int64_t r = row + i * rows;
    if (r >= R || column >= C) continue;
    e4m3_pack(values.values, reciprocal_of_power(scale)).store(out.values + r * C + column);
    if (lane == 0) out.scales[segment * R + r] = scale;
  }
}

// A tile of 128 x 128 numbers in shared memory, for a block of 256 threads. The packs of 16 rows are turned against
// those of the rows before, so that the lanes that read a column use all banks.
template <class T>
struct Fp8Tile {
  static constexpr int size = fp8_block, chunk = 16, pack = full_pack<T>, lanes = size / pack, rows = 256 / lanes;
  static constexpr int64_t bytes = static_cast<int64_t>(sizeof(T)) * size * size;
  T* data;

  __device__ T* at(int row, int p) const { return data + row * size + (p + row / chunk) % lanes * pack; }
  // f(row, p) for the packs p of all rows, each by one thread, a row by neighbours.
  template <class F>
  __device__ static void for_packs(F f) {
    const int p = static_cast<int>(threadIdx.x) % lanes, first = static_cast<int>(threadIdx.x) / lanes;
#pragma unroll 4
    for (int row = first; row < size; row += rows) f(row, p);
  }
  __device__ Floats<pack> fp32(int row, int p) const { return Kept<Packed<T>>(Packed<T>::load(at(row, p))).fp32(); }

  // The tile at (row, column) of a matrix (R, C), rounded: its rows in `out` (R, C), each with a scale, or by_tile with
  // scale_of_all, which is not written.
  template <bool by_tile = false>
  __device__ void quantise_rows(const Fp8Operand& out, int64_t row, int64_t column, int64_t R, int64_t C,
                                float scale_of_all = 0) const {
    for_packs([&](int r, int p) {
      const Floats<pack> values = fp32(r, p);
      const float scale = by_tile ? scale_of_all : scale_of_row(values);
      if (row + r >= R || column + p * pack >= C) return;
      e4m3_pack(values.values, reciprocal_of_power(scale)).store(out.values + (row + r) * C + column + p * pack);
      if (!by_tile && p == 0) out.scales[column / size * R + row + r] = scale;
    });
  }
  // The same for its columns, in `turned` (C, R). A warp has the columns of a pack, four words wide, in turn: a lane
  // has 16 rows of a word, so that eight lanes write a column's 128 bytes.
  template <bool by_tile = false>
  __device__ void quantise_columns(const Fp8Operand& turned, int64_t row, int64_t column, int64_t R, int64_t C,
                                   float scale_of_all = 0) const {
    constexpr int columns = 4 / sizeof(T), words = 4, warps = 256 / warp_size;
    const int word = lane_of_thread() % words, begin = lane_of_thread() / words * chunk;
#pragma unroll 1
    for (int p = warp_of_thread(); p < lanes; p += warps) {
      uint32_t numbers[chunk];
      const uint32_t* const from = reinterpret_cast<const uint32_t*>(at(begin, p)) + word;
#pragma unroll
      for (int i = 0; i < chunk; ++i) numbers[i] = from[i * lanes * words];
#pragma unroll
      for (int c = 0; c < columns; ++c) {
        const int64_t to = column + p * pack + word * columns + c;
        float values[chunk], scale = scale_of_all;
#pragma unroll
        for (int i = 0; i < chunk; ++i)
          values[i] = __uint_as_float(columns == 1 ? numbers[i] : c == 0 ? numbers[i] << 16 : numbers[i] & 0xffff0000u);
        if constexpr (!by_tile) {
          float largest = 0;
#pragma unroll
          for (int i = 0; i < chunk; ++i) largest = larger_magnitude(largest, values[i]);
#pragma unroll
          for (int step = warp_size / 2; step >= words; step /= 2)
            largest = larger_magnitude(largest, __shfl_xor_sync(all_lanes, largest, step));
          scale = fp8_scale(largest);
        }
        if (to >= C) continue;
        if (!by_tile && begin == 0) turned.scales[row / size * C + to] = scale;
        if (row + begin < R) e4m3_pack(values, reciprocal_of_power(scale)).store(turned.values + to * R + row + begin);
      }
    }
  }
};

// The tile of a block, row by row, all in the grid's x dimension: the others are at most 65,535.
struct TileOfBlock {
  int64_t down, across, row, column;  // the tile's, and those of its first number
  __device__ explicit TileOfBlock(int64_t C) {
    const unsigned in_row = static_cast<unsigned>(ceil_div(C, fp8_block));
    down = blockIdx.x / in_row, across = blockIdx.x % in_row;
    row = down * fp8_block, column = across * fp8_block;
  }
  static Grid grid(int64_t R, int64_t C) { return ceil_div(R, fp8_block) * ceil_div(C, fp8_block); }
};

// A tile of x (R, C) for each block. by_tile: it has one scale, in `out` (R, C) or turned into (C, R). Else its columns
// have one each, in `turned` (C, R), and if `out` is wanted, too, each of its rows there.
template <class T, bool by_tile>
__global__ void __launch_bounds__(256, 4)
    quantise_tiles_kernel(Fp8Operand out, Fp8Operand turned, const T* __restrict__ x, int64_t R, int64_t C) {
  using Tile = Fp8Tile<T>;
  const TileOfBlock at(C);
  const int64_t row = at.row, column = at.column;
  DYN_SHARED(T, memory);
  const Tile tile{memory};
  Tile::for_packs([&](int r, int p) {
    const bool valid = row + r < R && column + p * Tile::pack < C;
    cp_async_16(tile.at(r, p), valid ? x + (row + r) * C + column + p * Tile::pack : x, valid ? 16 : 0);
  });
  cp_async_commit();
  cp_async_wait<0>();
  __syncthreads();  // the tile is whole

  float scale = 0;  // of the tile
  if constexpr (by_tile) {
    float largest[1] = {0};
    Tile::for_packs([&](int r, int p) {
      const Floats<Tile::pack> values = tile.fp32(r, p);
      for (int j = 0; j < Tile::pack; ++j) largest[0] = larger_magnitude(largest[0], values[j]);
    });
    block_reduce(largest, Magnitude{});
    scale = fp8_scale(largest[0]);
    const auto padded = [](int64_t n) { return (ceil_div(n, int64_t{Tile::size}) + 3) / 4 * 4; };
    if (threadIdx.x == 0 && out.values != nullptr) out.scales[at.down * padded(C) + at.across] = scale;
    if (threadIdx.x == 0 && turned.values != nullptr) turned.scales[at.across * padded(R) + at.down] = scale;
  }
  if (out.values != nullptr) tile.template quantise_rows<by_tile>(out, row, column, R, C, scale);
  if (turned.values != nullptr) tile.template quantise_columns<by_tile>(turned, row, column, R, C, scale);
}

// x (R, C), with multiples of 16, in `out` (R, C), `turned` (C, R), or both.
template <class T>
void quantise(Fp8Operand out, Fp8Operand turned, const T* x, int64_t R, int64_t C, ScaledBy by, cudaStream_t stream) {
  if (by == ScaledBy::segments && turned.values == nullptr) {
    constexpr int64_t rows_of_block = 4 * 256 / (fp8_block / full_pack<T>);
    return launch(quantise_rows_kernel<T>, Grid(ceil_div(R, rows_of_block), ceil_div(C, fp8_block)), 256, 0, stream,
                  out, x, R, C);
  }
  const auto kernel = by == ScaledBy::tiles ? quantise_tiles_kernel<T, true> : quantise_tiles_kernel<T, false>;
  launch(kernel, TileOfBlock::grid(R, C), 256, Fp8Tile<T>::bytes, stream, out, turned, x, R, C);
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
  const int64_t column = static_cast<int64_t>(blockIdx.y) * fp8_block + threadIdx.x,
                begin = static_cast<int64_t>(blockIdx.x) * height, all = count != nullptr ? *count : R,
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
    launch(kernel, Grid(ceil_div(R, block.rows), segments, G), 128, 0, stream, out, x, R, C, narrow<int>(block.rows),
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

// ---- Parts of matrices with scales for 128 x 128 numbers ------------------------------------------------------------

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
