// grouped_matmul.cuh: the products of each expert's rows with its weights. A block computes a tile of the output, and
// finds its expert from the offsets in device memory, so the grid has room for every way to spread the rows. bf16 by
// tensor cores, fp32 by FMAs; each element is summed in the order of k. Contracts: ops/ops_experts.h.
#pragma once
#include "ops/cuda/attention_tiles.cuh"

namespace llmc::cuda {

namespace detail {

// A block of (4, 2) warps computes 128 rows and 128 columns, each warp 32 and 64 of them, `depth` products at a time.
template <class T>
struct GroupedTile {
  static constexpr int rows = 128, columns = 128, warps = 8, threads = warps * warp_size;
  static constexpr int depth = 128 / sizeof(T);                // eight chunks, so that Tile covers all banks
  static constexpr int M = 2, N = 8;                           // a warp's Accumulators
  static constexpr int64_t buffer = (rows + columns) * depth;  // elements: a tile of A and one of B
  static constexpr int64_t shared_bytes = 2 * buffer * static_cast<int64_t>(sizeof(T));
};

// One expert's product: C (M, N) = op(A) op(B) over K. A is stored (M, K) or, transposed, (K, M); B (K, N) or (N, K).
template <class T>
struct Product {
  const T *a, *b;
  int M, N, K;
};

// Tile t of the rows of all experts, in tiles of up to `rows` rows of one expert; expert -1: there are fewer. All lanes
// of a warp search together.
template <int rows>
__device__ ExpertRows row_tile(const int32_t* offsets, int64_t E, int64_t t) {
  const int lane = lane_of_thread();
  for (int64_t first = 0; first < E; first += warp_size) {
    const int64_t e = first + lane;
    const int32_t begin = e < E ? offsets[e] : 0, end = e < E ? offsets[e + 1] : 0;
    const int32_t tiles = (end - begin + rows - 1) / rows;
    const int32_t up_to_mine = warp_prefix_sum(tiles);
    const unsigned behind = __ballot_sync(all_lanes, t < up_to_mine);  // lanes whose experts end after tile t
    if (behind != 0) {
      const int owner = __ffs(static_cast<int>(behind)) - 1;
      const int64_t before = __shfl_sync(all_lanes, up_to_mine - tiles, owner);
      const int64_t from = __shfl_sync(all_lanes, begin, owner) + (t - before) * rows;
      const int64_t to = __shfl_sync(all_lanes, end, owner);
      return {first + owner, from, min(from + rows, to)};
    }
    t -= __shfl_sync(all_lanes, up_to_mine, warp_size - 1);
  }
  return {};
}

// Element (i, k) of a tile of A or B; i is a row of C for A, and a column for B.
template <Transpose k_first, class T, int width>
__device__ float element(const Tile<T, width>& tile, int i, int k) {
  const int row = k_first == Transpose::yes ? k : i, column = k_first == Transpose::yes ? i : k;
  return to_float(tile.at(row, column / tile.chunk)[column % tile.chunk]);
}

// sums += rows [row, row + 16 M) of op(A) times columns [column, column + 8 N) of op(B), for tiles in shared memory.
// a_first, b_first: does the tile have a row for each k? Otherwise, one for each row of op(A) or column of op(B).
template <Transpose a_first, Transpose b_first, int M, int N, int A, int B>
__device__ void multiply_tiles(Accumulators<M, N>& sums, const Tile<bf16, A>& a, int row, const Tile<bf16, B>& b,
                               int column) {
  const int lane = lane_of_thread(), low = lane % 16, high = lane / 16, mixed = lane / 16 * 8 + lane % 8,
            middle = lane / 8 % 2;
#pragma unroll
  for (int k = 0; k < GroupedTile<bf16>::depth; k += 16) {
    uint32_t as[M][4];
#pragma unroll
    for (int m = 0; m < M; ++m) {
      const int first = row + 16 * m;
      if constexpr (a_first == Transpose::no) ldmatrix_x4(as[m], a.at(first + low, k / 8 + high));
      else ldmatrix_x4_trans(as[m], a.at(k + mixed, first / 8 + middle));
    }
#pragma unroll
    for (int n = 0; n < N; n += 2) {
      const int first = column + 8 * n;
      uint32_t bs[4];
      if constexpr (b_first == Transpose::no) ldmatrix_x4(bs, b.at(first + mixed, k / 8 + middle));
      else ldmatrix_x4_trans(bs, b.at(k + low, first / 8 + high));
#pragma unroll
      for (int m = 0; m < M; ++m) {
        mma_m16n8k16_bf16(sums[m][n], as[m], {bs[0], bs[1]});
        mma_m16n8k16_bf16(sums[m][n + 1], as[m], {bs[2], bs[3]});
      }
    }
  }
}
template <Transpose a_first, Transpose b_first, int M, int N, int A, int B>
__device__ void multiply_tiles(Accumulators<M, N>& sums, const Tile<float, A>& a, int row, const Tile<float, B>& b,
                               int column) {
#pragma unroll 1
  for (int k = 0; k < GroupedTile<float>::depth; ++k) {
    float as[M][2], bs[N][2];
#pragma unroll
    for (int m = 0; m < M; ++m)
#pragma unroll
      for (int half = 0; half < 2; ++half) as[m][half] = element<a_first>(a, row + 16 * m + fragment_row(2 * half), k);
#pragma unroll
    for (int n = 0; n < N; ++n)
#pragma unroll
      for (int i = 0; i < 2; ++i) bs[n][i] = element<b_first>(b, column + 8 * n + fragment_column(i), k);
    for_each(sums, [&](float& sum, int m, int n, int i) { sum += as[m][i / 2] * bs[n][i % 2]; });
  }
}

// C from (m0, n0) on, up to a tile: store(row, column, sums) gets each warp's part.
template <Transpose a_as, Transpose b_as, Copy copy, class T, class Store>
__device__ void multiply_block(const Product<T>& p, int m0, int n0, T* shared, Store store) {
  using Size = GroupedTile<T>;
  constexpr bool a_first = a_as == Transpose::yes, b_first = b_as == Transpose::no;  // in memory, rows are those of k
  constexpr int a_rows = a_first ? Size::depth : Size::rows, a_width = a_first ? Size::rows : Size::depth;
  constexpr int b_rows = b_first ? Size::depth : Size::columns, b_width = b_first ? Size::columns : Size::depth;
  const auto a_tile = [&](int i) { return Tile<T, a_width>{shared + i % 2 * Size::buffer}; };
  const auto b_tile = [&](int i) { return Tile<T, b_width>{shared + i % 2 * Size::buffer + a_rows * a_width}; };
  const int warp = warp_of_thread(), row = warp / 2 * 16 * Size::M, column = warp % 2 * 8 * Size::N;
  Accumulators<Size::M, Size::N> sums = {};
  double_buffered(
      0, (p.K + Size::depth - 1) / Size::depth,
      [&](int i) {
        const int k = i * Size::depth;
        const Head<const T> a = a_first ? Head<const T>{p.a + m0, p.M, p.K, min(p.M - m0, Size::rows)}
                                        : Head<const T>{p.a + k, p.K, p.M, min(p.K - k, Size::depth)};
        const Head<const T> b = b_first ? Head<const T>{p.b + n0, p.N, p.K, min(p.N - n0, Size::columns)}
                                        : Head<const T>{p.b + k, p.K, p.N, min(p.K - k, Size::depth)};
        load_rows<a_rows, Size::threads, copy>(a_tile(i), a, a_first ? k : m0);
        load_rows<b_rows, Size::threads, copy>(b_tile(i), b, b_first ? k : n0);
      },
      [&](int i) {
        multiply_tiles<a_first ? Transpose::yes : Transpose::no, b_first ? Transpose::yes : Transpose::no>(
            sums, a_tile(i), row, b_tile(i), column);
      });
  store(m0 + row, n0 + column, sums);
}

}  // namespace detail

// out (R, N) = x (R, K) op(weight[e]). Grid: tiles, row by row.
template <Transpose b_as, Copy copy, class T>
__global__ void grouped_rows_kernel(T* __restrict__ out, const T* __restrict__ x, const T* __restrict__ weight,
                                    const int32_t* __restrict__ offsets, int64_t E, int N, int K) {
  using Size = detail::GroupedTile<T>;
  DYN_SHARED(T, shared);
  const unsigned in_row = static_cast<unsigned>(ceil_div(N, Size::columns));
  const ExpertRows rows = detail::row_tile<Size::rows>(offsets, E, blockIdx.x / in_row);
  if (rows.expert < 0) return;
  const detail::Product<T> product = {x + rows.begin * K, weight + rows.expert * N * K,
                                      static_cast<int>(rows.end - rows.begin), N, K};
  detail::multiply_block<Transpose::no, b_as, copy>(
      product, 0, static_cast<int>(blockIdx.x % in_row) * Size::columns, shared,
      [&](int row, int column, const auto& sums) {
        store_rows<copy>(Head<T>{out + rows.begin * N + column, N, product.M, N - column}, row, sums);
      });
}

// dweight (E, O, I) = or += dout[e]^T x[e]. Grid: (tiles of I, tiles of O, E).
template <Accumulate accumulate, Copy copy, class T>
__global__ void grouped_weight_kernel(float* __restrict__ dweight, const T* __restrict__ dout, const T* __restrict__ x,
                                      const int32_t* __restrict__ offsets, int O, int I) {
  using Size = detail::GroupedTile<T>;
  DYN_SHARED(T, shared);
  const int64_t e = blockIdx.z, begin = offsets[e], rows = offsets[e + 1] - begin;
  if (rows == 0 && accumulate == Accumulate::yes) return;
  const detail::Product<T> product = {dout + begin * O, x + begin * I, O, I, static_cast<int>(rows)};
  detail::multiply_block<Transpose::yes, Transpose::no, copy>(
      product, static_cast<int>(blockIdx.y) * Size::rows, static_cast<int>(blockIdx.x) * Size::columns, shared,
      [&](int row, int column, const auto& sums) {
        update_rows(
            Head<float>{dweight + e * O * I + column, I, O, I - column}, row, sums,
            [](int, int, float before, float sum) { return accumulate == Accumulate::yes ? before + sum : sum; });
      });
}

namespace detail {

template <Transpose b_as, class T>
void grouped_rows(T* out, const T* x, const T* weight, const int32_t* offsets, int64_t R, int64_t E, int64_t N,
                  int64_t K, cudaStream_t stream) {
  using Size = GroupedTile<T>;
  const Grid grid(ceil_div(N, Size::columns) * (ceil_div(R, Size::rows) + E));
  with_copy<T>(rows_fit_packs(N, full_pack<T>, out, x, weight) && K % full_pack<T> == 0, [&]<Copy copy>() {
    launch(grouped_rows_kernel<b_as, copy, T>, grid, Size::threads, Size::shared_bytes, stream, out, x, weight, offsets,
           E, narrow<int>(N), narrow<int>(K));
  });
}

}  // namespace detail

template <class T>
void grouped_linear_forward(T* out, const T* x, const T* weight, const int32_t* offsets, int64_t R, int64_t E,
                            int64_t O, int64_t I, cudaStream_t stream) {
  detail::grouped_rows<Transpose::yes>(out, x, weight, offsets, R, E, O, I, stream);
}
template <class T>
void grouped_linear_backward_input(T* dx, const T* dout, const T* weight, const int32_t* offsets, int64_t R, int64_t E,
                                   int64_t O, int64_t I, cudaStream_t stream) {
  detail::grouped_rows<Transpose::no>(dx, dout, weight, offsets, R, E, I, O, stream);
}

template <class T>
void grouped_linear_backward_weight(float* dweight, const T* dout, const T* x, const int32_t* offsets, int64_t E,
                                    int64_t O, int64_t I, Accumulate accumulate, cudaStream_t stream) {
  using Size = detail::GroupedTile<T>;
  const Grid grid(ceil_div(I, Size::columns), ceil_div(O, Size::rows), E);
  with_copy<T>(rows_fit_packs(O, full_pack<T>, dout, x) && I % full_pack<T> == 0, [&]<Copy copy>() {
    const auto kernel = accumulate == Accumulate::yes ? grouped_weight_kernel<Accumulate::yes, copy, T>
                                                      : grouped_weight_kernel<Accumulate::no, copy, T>;
    launch(kernel, grid, Size::threads, Size::shared_bytes, stream, dweight, dout, x, offsets, narrow<int>(O),
           narrow<int>(I));
  });
}

}  // namespace llmc::cuda
