// quantise.h: numbers as a product in fp8 reads them. Contract: ops/ops_quantise.h.
#pragma once
#include <algorithm>
#include <bit>
#include <cstdint>

#include "core/fp8.h"
#include "ops/cpu/simd.h"

namespace llmc::cpu {
inline namespace CPU_ISA {

namespace detail {

// The bits of |x| as fp32, whose order is that of the numbers, NaN being the largest.
template <class T>
uint32_t magnitude(T x) {
  return std::bit_cast<uint32_t>(static_cast<float>(x)) & 0x7fffffffu;
}

}  // namespace detail

// out (R, C) = x, rounded to E4M3 in blocks of block_rows x block_columns, which each have a scale. A thread has a
// block of rows.
template <class T>
void round_to_fp8(T* out, const T* x, int64_t R, int64_t C, int64_t block_rows, int64_t block_columns) {
#pragma omp parallel for schedule(static)
  for (int64_t row = 0; row < R; row += block_rows) {
    const int64_t rows = std::min(block_rows, R - row);
    for (int64_t column = 0; column < C; column += fp8_block) {
      // fp8_block columns at a time: one block wide, or as many blocks of one column.
      const int64_t columns = std::min(fp8_block, C - column);
      uint32_t largest[fp8_block] = {};
      for (int64_t r = row; r < row + rows; ++r)
#pragma omp simd
        for (int64_t c = 0; c < columns; ++c)
          largest[c] = std::max(largest[c], detail::magnitude(x[r * C + column + c]));
      if (block_columns > 1) std::fill_n(largest, columns, *std::max_element(largest, largest + columns));
      float scales[fp8_block], factors[fp8_block];
      for (int64_t c = 0; c < columns; ++c) {
        scales[c] = fp8_scale(std::bit_cast<float>(largest[c]));
        factors[c] = reciprocal_of_power(scales[c]);
      }
      for (int64_t r = row; r < row + rows; ++r)
#pragma omp simd
        for (int64_t c = 0; c < columns; ++c) {
          const int64_t i = r * C + column + c;
          store(out[i], e4m3::rounded(static_cast<float>(x[i]) * factors[c]) * scales[c]);
        }
    }
  }
}

}  // namespace CPU_ISA
}  // namespace llmc::cpu
