// quantise.h: numbers as a product in fp8 reads them, and parts of matrices in fp8 with scales for 128 x 128 numbers.
// Contracts: ops/ops_quantise.h.
#pragma once
#include "ops/cpu/simd.h"

namespace llmc::cpu {
inline namespace CPU_ISA {

namespace detail {

// The bits of |x| as fp32, whose order is that of the numbers, NaN being the largest.
template <class T>
uint32_t magnitude(T x) {
  return std::bit_cast<uint32_t>(static_cast<float>(x)) & 0x7fffffffu;
}

// x (n) rounded to fp8 with one scale.
template <class F, class T>
void round_with(T* out, const T* x, int64_t n, float scale) {
  const float factor = reciprocal_of_power(scale);
#pragma omp simd
  for (int64_t i = 0; i < n; ++i) store(out[i], F::rounded(static_cast<float>(x[i]) * factor) * scale);
}

// Blocks of a row, or squares.
template <class F, class T>
void round_rows_to_fp8(T* out, const T* x, int64_t R, int64_t C, const ScaleBlock& block) {
#pragma omp parallel for schedule(static)
  for (int64_t row = 0; row < R; row += block.rows) {
    const int64_t end = std::min(row + block.rows, R) * C;
    for (int64_t column = 0; column < C; column += block.columns) {
      const int64_t columns = std::min(block.columns, C - column);
      uint32_t largest = 0;
      for (int64_t at = row * C + column; at < end; at += C)
#pragma omp simd reduction(max : largest)
        for (int64_t i = at; i < at + columns; ++i) largest = std::max(largest, magnitude(x[i]));
      const float scale = fp8_scale<F>(std::bit_cast<float>(largest));
      for (int64_t at = row * C + column; at < end; at += C) round_with<F>(out + at, x + at, columns, scale);
    }
  }
}
// Blocks of a column, many side by side.
template <class F, class T>
void round_columns_to_fp8(T* out, const T* x, int64_t R, int64_t C, const ScaleBlock& block) {
#pragma omp parallel for schedule(static)
  for (int64_t row = 0; row < R; row += block.rows) {
    const int64_t end = std::min(row + block.rows, R) * C;
    for (int64_t column = 0; column < C; column += fp8_block) {
      const int64_t columns = std::min(fp8_block, C - column);
      uint32_t largest[fp8_block] = {};
      for (int64_t at = row * C + column; at < end; at += C)
#pragma omp simd
        for (int64_t c = 0; c < columns; ++c) largest[c] = std::max(largest[c], magnitude(x[at + c]));
      float scales[fp8_block], factors[fp8_block];
      for (int64_t c = 0; c < columns; ++c) {
        scales[c] = fp8_scale<F>(std::bit_cast<float>(largest[c]));
        factors[c] = reciprocal_of_power(scales[c]);
      }
      for (int64_t at = row * C + column; at < end; at += C)
#pragma omp simd
        for (int64_t c = 0; c < columns; ++c)
          store(out[at + c], F::rounded(static_cast<float>(x[at + c]) * factors[c]) * scales[c]);
    }
  }
}

// Calls f(tile, begin, end) for the elements [begin, end) of each row of each tile that are among those of `part`, for
// the rows of tiles of one thread after another.
template <class F>
void for_each_run(const TiledPart& part, F&& f) {
  const int64_t R = part.rows, C = part.columns, down = part.down();
#pragma omp parallel for schedule(static)
  for (int64_t t = 0; t < part.matrices * down; ++t)
    for (int64_t row = t / down * R + t % down * fp8_block, last = std::min(row + fp8_block, (t / down + 1) * R);
         row < last; ++row)
      for (int64_t column = 0; column < C; column += fp8_block) {
        const int64_t begin = std::max(row * C + column, part.first),
                      end = std::min(row * C + std::min(C, column + fp8_block), part.first + part.n);
        if (begin < end) f(part.tile_of(begin), begin, end);
      }
}

}  // namespace detail

// out (G, R, C) = x, each matrix rounded to fp8 in blocks, of up to 128 columns, which each have a scale. A thread has
// a row of blocks. count: if not null, only so many rows (of G = 1)
template <class T>
void round_to_fp8(T* out, const T* x, int64_t G, int64_t R, int64_t C, ScaleBlock block, Fp8Format format,
                  const int32_t* count) {
  if (count != nullptr) R = *count;
  const auto round = [&]<class F>(F) {
    for (int64_t at = 0; at < G * R * C; at += R * C)
      if (block.columns > 1) detail::round_rows_to_fp8<F>(out + at, x + at, R, C, block);
      else detail::round_columns_to_fp8<F>(out + at, x + at, R, C, block);
  };
  if (format == Fp8Format::e4m3) round(e4m3{});
  else round(e5m2{});
}

// out (G, R, C) = x, each matrix rounded to fp8 with one scale. maxima (G): room
template <class T>
void round_whole_to_fp8(T* out, float* maxima, const T* x, int64_t G, int64_t R, int64_t C, Fp8Format format,
                        const int32_t* count) {
  if (count != nullptr) R = *count;
  const int64_t n = R * C;
  const auto round = [&]<class F>(int64_t g, F) {
    uint32_t largest = 0;
#pragma omp parallel for simd schedule(static) reduction(max : largest)
    for (int64_t i = g * n; i < (g + 1) * n; ++i) largest = std::max(largest, detail::magnitude(x[i]));
    maxima[g] = std::bit_cast<float>(largest);
    const float scale = fp8_scale<F>(maxima[g]), factor = reciprocal_of_power(scale);
#pragma omp parallel for simd schedule(static)
    for (int64_t i = g * n; i < (g + 1) * n; ++i) store(out[i], F::rounded(static_cast<float>(x[i]) * factor) * scale);
  };
  for (int64_t g = 0; g < G; ++g)
    if (format == Fp8Format::e4m3) round(g, e4m3{});
    else round(g, e5m2{});
}

template <class T>
void tile_maxima(float* maxima, const T* x, const TiledPart& part) {
  std::fill_n(maxima, part.tiles(), 0.0f);
  detail::for_each_run(part, [&](int64_t tile, int64_t begin, int64_t end) {
    for (int64_t i = begin; i < end; ++i) {
      const float size = std::fabs(static_cast<float>(x[i - part.first]));
      maxima[tile] = size <= maxima[tile] ? maxima[tile] : size < INFINITY ? size : INFINITY;
    }
  });
}

inline void scales_of_ranks(float* scales, const float* maxima, int64_t ranks, int64_t n) {
  for (int64_t i = 0; i < n; ++i) {
    float largest = 0;
    for (int64_t r = 0; r < ranks; ++r) largest = std::max(largest, maxima[r * n + i]);
    scales[i] = fp8_scale(largest);
  }
}

template <class T>
void tiles_to_fp8(e4m3* out, const T* x, const float* scales, const TiledPart& part) {
  detail::for_each_run(part, [&](int64_t tile, int64_t begin, int64_t end) {
    const float factor = reciprocal_of_power(scales[tile]);
    for (int64_t i = begin - part.first; i < end - part.first; ++i)
      out[i] = e4m3::of(static_cast<float>(x[i]) * factor);
  });
}

template <class T>
void tiles_from_fp8(T* out, const e4m3* x, const float* scales, const TiledPart& part) {
  std::array<float, 256> values;
  for (size_t i = 0; i < values.size(); ++i) values[i] = static_cast<float>(e4m3{static_cast<uint8_t>(i)});
  detail::for_each_run(part, [&](int64_t tile, int64_t begin, int64_t end) {
    for (int64_t i = begin - part.first; i < end - part.first; ++i) store(out[i], values[x[i].bits] * scales[tile]);
  });
}

}  // namespace CPU_ISA
}  // namespace llmc::cpu
