// grouped_matmul.h: the products of each expert's rows with its weights, in tiles that all threads share, whatever the
// number of rows of each expert. Contracts: ops/ops_experts.h.
#pragma once
#include "ops/cpu/matmul.h"

namespace llmc::cpu {

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

// Does oneDNN multiply these, as in matmul.h?
inline bool by_onednn([[maybe_unused]] DType in, [[maybe_unused]] int64_t K) {
#ifdef TRAIN_GPT_ONEDNN
  return onednn::multiplies(in, K);
#else
  return false;
#endif
}

// oneDNN packs its operands anew for each tile: larger ones than ours.
struct GroupedTile {
  int64_t rows, columns;
};
inline GroupedTile grouped_tile(DType in, int64_t K) {
  return by_onednn(in, K) ? GroupedTile{256, 512}
                          : GroupedTile{MatmulTiles::max_rows, MatmulTiles::max_columns(in == DType::fp64 ? 8 : 4)};
}

// The tile of C (M, N) = or += op(A) op(B) that begins at (m0, n0).
template <class Out, class T>
void grouped_matmul_tile(Out* c, const T* a, const T* b, const MatmulShape& s, const GroupedTile& size, int64_t m0,
                         int64_t n0) {
#ifdef TRAIN_GPT_ONEDNN
  if constexpr (!std::is_same_v<T, double>) {
    if (by_onednn(s.in, s.K)) {
      const int64_t m = std::min(size.rows, s.M - m0), n = std::min(size.columns, s.N - n0);
      const bool a_transposed = s.a == Transpose::yes, b_transposed = s.b == Transpose::yes;
      const int64_t lda = a_transposed ? s.M : s.K, ldb = b_transposed ? s.K : s.N;
      const auto& product =
          onednn::AnyMatmul::of_thread(s.in, a_transposed, b_transposed, s.accumulate == Accumulate::yes);
      a += m0 * (a_transposed ? 1 : lda), b += n0 * (b_transposed ? ldb : 1);
      if constexpr (std::is_same_v<Out, float>) {
        product.run(c + m0 * s.N + n0, s.N, a, lda, b, ldb, m, n, s.K);
      } else {
        alignas(64) float tile[256 * 512];
        CHECK(m * n <= std::ssize(tile), "a tile of {} x {}", m, n);
        product.run(tile, n, a, lda, b, ldb, m, n, s.K);
        for (int64_t i = 0; i < m; ++i) {
          Out* row = c + (m0 + i) * s.N + n0;
#pragma omp simd
          for (int64_t j = 0; j < n; ++j) store(row[j], tile[i * n + j]);
        }
      }
      return;
    }
  }
#endif
  MatmulTiles tiles(s);
  tiles.rows = size.rows, tiles.columns = size.columns;
  matmul_tile(c, a, b, static_cast<const T*>(nullptr), s, tiles, m0, n0);
}

// out (rows, N) = x (rows, K) op(weight of their expert), for all experts. R: the most rows that there may be
template <class T>
void grouped_rows(T* out, const T* x, const T* weight, const int32_t* offsets, int64_t R, int64_t E, int64_t N,
                  int64_t K, Transpose transpose) {
  const DType dtype = dtype_of<T>();
  const GroupedTile size = grouped_tile(dtype, K);
#pragma omp parallel for collapse(2) schedule(dynamic)
  for (int64_t t = 0; t < ceil_div(R, size.rows) + E; ++t)
    for (int64_t n0 = 0; n0 < N; n0 += size.columns) {
      const ExpertRows rows = row_tile(offsets, E, size.rows, t);
      if (rows.expert < 0) continue;
      const MatmulShape shape{rows.end - rows.begin, N,     K,     Transpose::no, transpose,
                              Accumulate::no,        dtype, dtype, Bias::no,      1};
      grouped_matmul_tile(out + rows.begin * N, x + rows.begin * K, weight + rows.expert * N * K, shape, size, 0, n0);
    }
}

}  // namespace detail

// weight (E, O, I)
template <class T>
void grouped_linear_forward(T* out, const T* x, const T* weight, const int32_t* offsets, int64_t R, int64_t E,
                            int64_t O, int64_t I) {
  detail::grouped_rows(out, x, weight, offsets, R, E, O, I, Transpose::yes);
}
template <class T>
void grouped_linear_backward_input(T* dx, const T* dout, const T* weight, const int32_t* offsets, int64_t R, int64_t E,
                                   int64_t O, int64_t I) {
  detail::grouped_rows(dx, dout, weight, offsets, R, E, I, O, Transpose::no);
}

template <class T, class A = accumulator_t<T>>
void grouped_linear_backward_weight(A* dweight, const T* dout, const T* x, const int32_t* offsets, int64_t E, int64_t O,
                                    int64_t I) {
  // One thread takes all tiles of an expert with few rows: its cache holds them then. Processors may have no cache in
  // common. Who computes a tile does not change it.
  const int64_t few = offsets[E] / (8 * omp_get_max_threads());
  const int64_t tiles = ceil_div(O, detail::MatmulTiles::max_rows);  // of an expert, at most
#pragma omp parallel for collapse(2) schedule(dynamic)
  for (int64_t e = 0; e < E; ++e)
    for (int64_t tile = 0; tile < tiles; ++tile) {
      const int64_t begin = offsets[e], rows = offsets[e + 1] - begin;
      detail::GroupedTile size = detail::grouped_tile(dtype_of<T>(), rows);
      if (detail::by_onednn(dtype_of<T>(), rows)) size.columns = 1024;
      const int64_t first = tile * size.rows;
      if (first >= O) continue;
      const bool whole = rows <= few;
      if (rows == 0 || (whole && first > 0)) continue;
      const MatmulShape shape{
          O, I, rows, Transpose::yes, Transpose::no, Accumulate::yes, dtype_of<T>(), dtype_of<A>(), Bias::no, 1};
      for (int64_t m0 = first; m0 < (whole ? O : first + 1); m0 += size.rows)
        for (int64_t n0 = 0; n0 < I; n0 += size.columns)
          detail::grouped_matmul_tile(dweight + e * O * I, dout + begin * O, x + begin * I, shape, size, m0, n0);
    }
}

}  // namespace llmc::cpu
