// grouped_matmul.h: the products of each expert's rows with its weights, in tiles that all threads share, whatever the
// number of rows of each expert. Contracts: ops/ops_experts.h.
#pragma once
#include "ops/cpu/matmul.h"

namespace llmc::cpu {
inline namespace CPU_ISA {

namespace detail {

// Tile t of the rows of all experts, in tiles of up to `rows` rows of one expert; expert -1: there are fewer tiles.
inline ExpertRows row_tile(const int32_t* offsets, int64_t E, int64_t rows, int64_t t) {
  for (int64_t e = 0; e < E; ++e) {
    const int64_t begin = offsets[e], end = offsets[e + 1], tiles = ceil_div(end - begin, rows);
    if (t < tiles) return {e, begin + t * rows, std::min(begin + (t + 1) * rows, end)};
    t -= tiles;
  }
  return {};
}

// A tile of C, m rows of n columns, by one thread.
template <class How, class Out, class T>
void grouped_tile(Out* c, int64_t stride, const Lines<T>& a, const Lines<T>& b, int64_t m, int64_t n, int64_t K,
                  Accumulate accumulate, std::byte* scratch) {
  const MatmulBlocks blocks(grouped_tile_shape(m, n, K, dtype_of<T>()));
  matmul_rectangle<How, Out, T>(c, stride, a, b, nullptr, m, n, K, accumulate, blocks,
                                MatmulScratch<How>(scratch, blocks));
}

}  // namespace detail

// out (rows, N) = x (rows, K) op(weight of their expert), for all experts.   weight (E, K, N), or to transpose (E, N,
// K). R: the most rows that there may be. scratch: grouped_scratch() bytes
template <class T, class How = Multiply<accumulator_t<T>>>
void grouped_linear(T* out, const T* x, const T* weight, const int32_t* offsets, std::byte* scratch, int64_t R,
                    int64_t E, int64_t N, int64_t K, Transpose transpose) {
  constexpr int64_t rows = GroupedTile::rows, columns = GroupedTile::columns;
  scratch = aligned_scratch(scratch);
  const int64_t of_thread = grouped_thread_bytes(K, dtype_of<T>());
#pragma omp parallel for collapse(2) schedule(dynamic)
  for (int64_t t = 0; t < ceil_div(R, rows) + E; ++t)
    for (int64_t n0 = 0; n0 < N; n0 += columns) {
      const ExpertRows taken = detail::row_tile(offsets, E, rows, t);
      if (taken.expert < 0) continue;
      const T* w = weight + taken.expert * N * K;
      const Lines<T> b = transpose == Transpose::yes ? Lines<T>{w, K, 1} : Lines<T>{w, 1, N};
      detail::grouped_tile<How>(out + taken.begin * N + n0, N, Lines<T>{x + taken.begin * K, K, 1}, b.from(n0, 0),
                                taken.end - taken.begin, std::min(columns, N - n0), K, Accumulate::no,
                                scratch + omp_get_thread_num() * of_thread);
    }
}

template <class T, class A = accumulator_t<T>, class How = Multiply<accumulator_t<T>>>
void grouped_linear_backward_weight(A* dweight, const T* dout, const T* x, const int32_t* offsets, std::byte* scratch,
                                    int64_t R, int64_t E, int64_t O, int64_t I, Accumulate accumulate) {
  constexpr int64_t tile_rows = GroupedTile::rows, tile_columns = GroupedTile::columns;
  scratch = aligned_scratch(scratch);
  const int64_t of_thread = grouped_thread_bytes(R, dtype_of<T>());
  // One thread takes all tiles of an expert with few rows: they stay in its cache, which other processors may not
  // share. Which thread computes a tile does not change the result.
  const int64_t few = offsets[E] / (8 * omp_get_max_threads());
#pragma omp parallel for collapse(2) schedule(dynamic)
  for (int64_t e = 0; e < E; ++e)
    for (int64_t first = 0; first < O; first += tile_rows) {
      const int64_t begin = offsets[e], rows = offsets[e + 1] - begin;
      const bool whole = rows <= few;
      if ((rows == 0 && accumulate == Accumulate::yes) || (whole && first > 0)) continue;
      const Lines<T> a{dout + begin * O, 1, O}, b{x + begin * I, 1, I};
      for (int64_t m0 = first; m0 < (whole ? O : first + 1); m0 += tile_rows)
        for (int64_t n0 = 0; n0 < I; n0 += tile_columns)
          detail::grouped_tile<How>(dweight + (e * O + m0) * I + n0, I, a.from(m0, 0), b.from(n0, 0),
                                    std::min(tile_rows, O - m0), std::min(tile_columns, I - n0), rows, accumulate,
                                    scratch + omp_get_thread_num() * of_thread);
    }
}

}  // namespace CPU_ISA
}  // namespace llmc::cpu
