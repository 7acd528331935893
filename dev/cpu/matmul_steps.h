// matmul_steps.h: C (M, N) = A (M, K) B (K, N) in steps, each improving on the one before, from three loops to the
// method of llmc/ops/cpu/matmul.h: for readers. ladder.cpp times them, test/ops/test_matmul_steps.cpp compares them.
#pragma once
#include <algorithm>
#include <cstdint>
#include <vector>

namespace llmc::steps {

struct Sizes {
  int64_t M, N, K;
};

// 1. The definition. Every product reads another row of B: a whole cache line for each element.
inline void matmul_loops(float* c, const float* a, const float* b, const Sizes& s) {
  for (int64_t i = 0; i < s.M; ++i)
    for (int64_t j = 0; j < s.N; ++j) {
      float sum = 0;
      for (int64_t k = 0; k < s.K; ++k) sum += a[i * s.K + k] * b[k * s.N + j];
      c[i * s.N + j] = sum;
    }
}

// 2. The two inner loops are swapped: B and C are read along their rows, a vector at a time. But all of B passes
// through the caches for every row of C.
inline void matmul_along_rows(float* c, const float* a, const float* b, const Sizes& s) {
  for (int64_t i = 0; i < s.M; ++i) {
    float* row = c + i * s.N;
    std::fill_n(row, s.N, 0.0f);
    for (int64_t k = 0; k < s.K; ++k) {
      const float x = a[i * s.K + k];
#pragma omp simd
      for (int64_t j = 0; j < s.N; ++j) row[j] += x * b[k * s.N + j];
    }
  }
}

// 3. Blocks: a piece of B that fits into an L2 cache is used for all rows of A before the next one is read. But every
// sum is read and written for each product.
inline void matmul_blocked(float* c, const float* a, const float* b, const Sizes& s) {
  constexpr int64_t depth = 256, width = 512;  // 512 KiB of B
  std::fill_n(c, s.M * s.N, 0.0f);
  for (int64_t k0 = 0; k0 < s.K; k0 += depth)
    for (int64_t j0 = 0; j0 < s.N; j0 += width)
      for (int64_t i = 0; i < s.M; ++i)
        for (int64_t k = k0; k < std::min(k0 + depth, s.K); ++k) {
          const float x = a[i * s.K + k];
#pragma omp simd
          for (int64_t j = j0; j < std::min(j0 + width, s.N); ++j) c[i * s.N + j] += x * b[k * s.N + j];
        }
}

// 4. Registers: a tile of C, rows x 2 vectors, stays in registers while k runs: each element read from B serves all
// rows of the tile, each from A all columns, and C is touched once per block of k.
#ifdef __AVX512F__
inline constexpr int64_t tile_rows = 6, tile_columns = 32;
#else
inline constexpr int64_t tile_rows = 6, tile_columns = 16;  // 16 registers of 8 numbers
#endif
inline void matmul_registers(float* c, const float* a, const float* b, const Sizes& s) {
  constexpr int64_t depth = 256, width = 512;
  std::fill_n(c, s.M * s.N, 0.0f);
  const auto tile = [&](int64_t i, int64_t j, int64_t k0, int64_t k1) {
    float sums[tile_rows][tile_columns] = {};
    for (int64_t k = k0; k < k1; ++k)
#pragma GCC unroll 6
      for (int64_t r = 0; r < tile_rows; ++r)
#pragma omp simd
        for (int64_t l = 0; l < tile_columns; ++l) sums[r][l] += a[(i + r) * s.K + k] * b[k * s.N + j + l];
    for (int64_t r = 0; r < tile_rows; ++r)
      for (int64_t l = 0; l < tile_columns; ++l) c[(i + r) * s.N + j + l] += sums[r][l];
  };
  const auto edge = [&](int64_t i0, int64_t i1, int64_t j0, int64_t j1, int64_t k0, int64_t k1) {
    for (int64_t i = i0; i < i1; ++i)
      for (int64_t k = k0; k < k1; ++k)
        for (int64_t j = j0; j < j1; ++j) c[i * s.N + j] += a[i * s.K + k] * b[k * s.N + j];
  };
  for (int64_t k0 = 0; k0 < s.K; k0 += depth)
    for (int64_t j0 = 0; j0 < s.N; j0 += width) {
      const int64_t k1 = std::min(k0 + depth, s.K), j1 = std::min(j0 + width, s.N);
      const int64_t j_tiles = j0 + (j1 - j0) / tile_columns * tile_columns, i_tiles = s.M / tile_rows * tile_rows;
      for (int64_t i = 0; i < i_tiles; i += tile_rows)
        for (int64_t j = j0; j < j_tiles; j += tile_columns) tile(i, j, k0, k1);
      edge(0, i_tiles, j_tiles, j1, k0, k1);
      edge(i_tiles, s.M, j0, j1, k0, k1);
    }
}

// 5. Packing: the tile's operands are copied into the order in which it reads them, so that no cache line is read for
// only some of its bytes and no page for one row. ops/cpu/matmul.h adds the rest: more rows per tile, transposed and
// narrow operands, all threads; then bf16 in pairs, and in matrix registers.
inline void matmul_packed(float* c, const float* a, const float* b, const Sizes& s) {
  constexpr int64_t depth = 256, width = 512;
  std::fill_n(c, s.M * s.N, 0.0f);
  std::vector<float> a_panels(static_cast<size_t>((s.M + tile_rows) * depth)),
      b_panels(static_cast<size_t>((width + tile_columns) * depth));
  const auto pack = [&](std::vector<float>& to, int64_t lines, int64_t size, int64_t k_count, auto&& element) {
    size_t at = 0;
    for (int64_t first = 0; first < lines; first += size)
      for (int64_t k = 0; k < k_count; ++k)
        for (int64_t l = first; l < first + size; ++l) to[at++] = l < lines ? element(l, k) : 0;
  };
  for (int64_t k0 = 0; k0 < s.K; k0 += depth) {
    const int64_t k_count = std::min(depth, s.K - k0);
    pack(a_panels, s.M, tile_rows, k_count, [&](int64_t i, int64_t k) { return a[i * s.K + k0 + k]; });
    for (int64_t j0 = 0; j0 < s.N; j0 += width) {
      const int64_t columns = std::min(width, s.N - j0);
      pack(b_panels, columns, tile_columns, k_count, [&](int64_t j, int64_t k) { return b[(k0 + k) * s.N + j0 + j]; });
      for (int64_t i = 0; i < s.M; i += tile_rows)
        for (int64_t j = 0; j < columns; j += tile_columns) {
          const float *x = a_panels.data() + i * k_count, *y = b_panels.data() + j * k_count;
          float sums[tile_rows][tile_columns] = {};
          for (int64_t k = 0; k < k_count; ++k, x += tile_rows, y += tile_columns)
#pragma GCC unroll 6
            for (int64_t r = 0; r < tile_rows; ++r)
#pragma omp simd
              for (int64_t l = 0; l < tile_columns; ++l) sums[r][l] += x[r] * y[l];
          for (int64_t r = 0; r < std::min(tile_rows, s.M - i); ++r)
            for (int64_t l = 0; l < std::min(tile_columns, columns - j); ++l)
              c[(i + r) * s.N + j0 + j + l] += sums[r][l];
        }
    }
  }
}

}  // namespace llmc::steps
