// fp8_tiles.h: parts of matrices in fp8 with scales for 128 x 128 numbers. Contract: ops/ops_quantise.h.
#pragma once
#include "core/dtype.h"
#include "core/shape.h"
#include "ops/cpu/simd.h"
#include "ops/types.h"

namespace llmc::cpu {
inline namespace CPU_ISA {

namespace detail {

// Calls f(tile, begin, end) for the elements [begin, end) of each row of each tile that are among those of `part`, for
// the rows of tiles of one thread after another.
template <class F>
void for_each_run(const TiledPart& part, F&& f) {
  const int64_t R = part.rows, C = part.columns, down = ceil_div(R, fp8_block), across = ceil_div(C, fp8_block);
#pragma omp parallel for schedule(static)
  for (int64_t t = 0; t < part.matrices * down; ++t)
    for (int64_t row = t / down * R + t % down * fp8_block, last = std::min(row + fp8_block, (t / down + 1) * R);
         row < last; ++row)
      for (int64_t column = 0; column < C; column += fp8_block) {
        const int64_t begin = std::max(row * C + column, part.first),
                      end = std::min(row * C + std::min(C, column + fp8_block), part.first + part.n);
        if (begin < end) f(t * across + column / fp8_block, begin, end);
      }
}

}  // namespace detail

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
