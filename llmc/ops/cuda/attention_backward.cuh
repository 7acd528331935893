// attention_backward.cuh: the gradients of attention, from probabilities recomputed with the saved log-sum-exp (Dao
// 2023). With P the probabilities and dO the gradient of the output:
//   dV = P^T dO,   dP = dO V^T,   dS = P (dP - delta),   dQ = dS K / sqrt(D),   dK = dS^T Q / sqrt(D)
// where delta = rowsum(dO O). One kernel holds queries, for which it finds delta, and accumulates dQ over the keys;
// another holds keys and accumulates dK and dV over the queries. S and dP are computed twice, and every sum has a fixed
// order. Contracts: ops/ops_attention.h.
#pragma once
#include "ops/cuda/attention_wgmma.cuh"

namespace llmc::cuda {

// dK and dV. Grid: grid_of_heads(B Hkv, blocks of keys), first keys first, which the most rows see.
template <class T, class Block, int DP, Copy copy>
__global__ void __launch_bounds__(Block::threads, Block::blocks)
    attention_backward_keys_kernel(GradientRows<T> dkeys, GradientRows<T> dvalues, Heads<const T> douts,
                                   Heads<const T> queries, Heads<const T> keys, Heads<const T> values,
                                   const RowTerms* __restrict__ terms, const int32_t* __restrict__ positions,
                                   KernelBlock s) {
  constexpr int M = Block::M, N = Block::N, ND = Block::ND, n = Block::tile_rows;
  const unsigned b = head_of_block() / static_cast<unsigned>(s.Hkv),
                 kv = head_of_block() % static_cast<unsigned>(s.Hkv);
  if (b >= static_cast<unsigned>(s.B)) return;
  const SeenKeys seen(positions, s, b);
  const int group = static_cast<int>(s.Hq / s.Hkv);
  const int begin = static_cast<int>(blockIdx.y) * Block::rows, warp_row = 16 * M * warp_of_thread();
  const int first = begin + warp_row, last = first + 16 * M - 1;  // the warp's keys
  const int64_t terms_rows = detail::terms_rows(s.rows);

  DYN_SHARED(T, memory);
  const Tile<T, DP> key_tile{memory}, value_tile = key_tile.after(Block::rows), buffers = value_tile.after(Block::rows);
  RowTerms* terms_buffers = reinterpret_cast<RowTerms*>(buffers.after(4 * n).data);
  load_rows<Block::rows, Block::threads, copy>(key_tile, keys.of(b, kv), begin);
  load_rows<Block::rows, Block::threads, copy>(value_tile, values.of(b, kv), begin);

  Accumulators<M, ND> dk = {}, dv = {};
  const float scale = s.scale;
  // Tiles of queries of the first head, then of the second, ...
  const TilesOfQueries of_head(seen, s, begin, Block::rows, n);
  const auto load = [&](int i) {
    const int h = static_cast<int>(kv) * group + i / of_head.count, row = (of_head.first + i % of_head.count) * n;
    const Tile<T, DP> tile = buffers.after((i & 1) * 2 * n);
    load_rows<n, Block::threads, copy>(tile, queries.of(b, h), row);
    load_rows<n, Block::threads, copy>(tile.after(n), douts.of(b, h), row);
    if (threadIdx.x < n / 2)
      cp_async_16(terms_buffers + (i & 1) * n + threadIdx.x * 2,
                  terms + (b * s.Hq + h) * terms_rows + row + threadIdx.x * 2);
  };
  const auto use = [&](int i) {
    const int row = s.offset + (of_head.first + i % of_head.count) * n;
    const RowRange rows(seen, row, row + n);
    if (!rows.sees_any(first, last)) return;
    const Tile<T, DP> query_tile = buffers.after((i & 1) * 2 * n), dout_tile = query_tile.after(n);
    const RowTerms* row_terms = terms_buffers + (i & 1) * n;
    const bool all_seen = last <= rows.begin && first >= rows.largest;  // or past the last: not stored
    Accumulators<M, N> p = {}, ds = {};                                 // transposed: the keys are the rows
    multiply_transposed(p, key_tile, warp_row, query_tile);
    for_each(p, [&](float& x, int, int j, int i) {
      x = fast_exp2(x * (scale * log2_e) - row_terms[8 * j + fragment_column(i)].lse_log2);
    });
    if (!all_seen)  // by itself: as a condition of each element it took half of the loop's instructions
      for_each(p, [&](float& x, int m, int j, int i) {
        const int row_of_x = row + 8 * j + fragment_column(i), key = first + 16 * m + fragment_row(i);
        if (key > row_of_x || key < seen.first(row_of_x)) x = 0;
      });
    multiply(dv, p, dout_tile);
    multiply_transposed(ds, value_tile, warp_row, dout_tile);
    for_each(
        ds, [&](float& x, int m, int j, int i) { x = p[m][j][i] * (x - row_terms[8 * j + fragment_column(i)].delta); });
    multiply(dk, ds, query_tile);
  };
  double_buffered(0, group * of_head.count, load, use);

  for_each(dk, [&](float& x, int, int, int) { x *= scale; });
  dkeys.template put<copy>(b, kv, first, dk);
  dvalues.template put<copy>(b, kv, first, dv);
}

// dQ, and the terms of the rows, for the kernel above. Grid: grid_of_heads(B Hq, blocks of rows). Rows are counted like
// the keys, except in `douts`, `outs` and `queries`. terms (B, Hq, terms_rows), lse (B, Hq, length): row 0's.
// keys_values: Hkv heads of keys, then Hkv of values: two arguments, each with a stride and a base, would spill
// registers.
template <class T, class Block, int DP, Copy copy>
__global__ void __launch_bounds__(Block::threads, Block::blocks)
    attention_backward_queries_kernel(GradientRows<T> dqueries, RowTerms* terms, Heads<const T> douts,
                                      Heads<const T> outs, const float* __restrict__ lse, Heads<const T> queries,
                                      Heads<const T> keys_values, const int32_t* __restrict__ positions,
                                      KernelBlock s) {
  constexpr int M = Block::M, N = Block::N, ND = Block::ND;
  const BlockOfQueries at(s, Block::rows);
  if (at.b >= static_cast<unsigned>(s.B)) return;
  const SeenKeys seen(positions, s, at.b);
  const int warp_row = 16 * M * warp_of_thread(), first = at.first + warp_row;
  terms += (at.b * s.Hq + at.h) * detail::terms_rows(s.rows);
  DYN_SHARED(T, memory);
  const Tile<T, DP> query_tile{memory}, dout_tile = query_tile.after(Block::rows);
  load_rows<Block::rows, Block::threads, copy>(query_tile, queries.of(at.b, at.h), at.first - s.offset);
  load_rows<Block::rows, Block::threads, copy>(dout_tile, douts.of(at.b, at.h), at.first - s.offset);
  find_row_terms<16 * M, copy, DP>(terms + s.offset, douts.of(at.b, at.h), outs.of(at.b, at.h),
                                   s.statistic(lse, at.b, at.h) + s.offset, first - s.offset);

  const RowRange block_rows(seen, at.first, at.first + Block::rows), warp_rows(seen, first, first + 16 * M);
  Accumulators<M, ND> dq = {};
  const float scale = s.scale;
  const auto use = [&](const Tile<T, DP>& key_tile, const Tile<T, DP>& value_tile, int key) {
    if (!warp_rows.sees_any(key, key + Block::tile_rows - 1)) return;
    const bool all_seen = warp_rows.sees_all(key, key + Block::tile_rows - 1);
    Accumulators<M, N> p = {}, ds = {};
    multiply_transposed(p, query_tile, warp_row, key_tile);
    multiply_transposed(ds, dout_tile, warp_row, value_tile);
#pragma unroll
    for (int m = 0; m < M; ++m)
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        const RowTerms row_terms = terms[first + 16 * m + fragment_row(2 * half)];
#pragma unroll
        for (int n = 0; n < N; ++n)
#pragma unroll
          for (int i = 2 * half; i < 2 * half + 2; ++i)
            ds[m][n][i] =
                fast_exp2(p[m][n][i] * (scale * log2_e) - row_terms.lse_log2) * (ds[m][n][i] - row_terms.delta);
        if (!all_seen) for_unseen(ds, m, half, seen, first, key, [](float& x) { x = 0; });
      }
    multiply(dq, ds, key_tile);
  };
  for_tiles_of_keys<Block, copy>(dout_tile.after(Block::rows), keys_values.of(at.b, at.kv),
                                 keys_values.of(at.b, s.Hkv + at.kv), block_rows, use);
  for_each(dq, [&](float& x, int, int, int) { x *= scale; });
  dqueries.template put<copy>(at.b, at.h, first, dq);
}

namespace detail {

// As many rows as fit into the registers of two blocks per SM: the more rows a warp has, the less often it reads the
// others from shared memory. In fp32, heads of up to 128 channels fit into the 99 KiB of shared memory of every GPU
// since Ampere; heads of 256 into the 163 KiB of an A100.
template <class T, int DP>
using SmallBlock = BlockSize<1, sizeof(T) * DP <= 512 ? 4 : 2, sizeof(T) * DP <= 256 ? 32 : 16, DP, T>;
template <class T, int DP>
struct BackwardKeysBlock : SmallBlock<T, DP> {};
template <>
struct BackwardKeysBlock<bf16, 64> : BlockSize<2, 4, 32, 64, bf16> {};
template <class T, int DP>
struct BackwardQueriesBlock : SmallBlock<T, DP> {};
template <>
struct BackwardQueriesBlock<bf16, 64> : BlockSize<2, 4, 64, 64, bf16> {};
template <>
struct BackwardQueriesBlock<bf16, 128> : BlockSize<2, 4, 32, 128, bf16> {};
template <int DP>
using BackwardKeysWarpgroups = WarpgroupBlock<1, 64, DP, DP == 64 ? 3 : 2>;
template <int DP>
using BackwardQueriesWarpgroups = WarpgroupBlock<DP == 64 ? 2 : 1, 64, DP, 2>;
// Including the terms of two tiles of rows.
template <class Block>
inline constexpr int64_t backward_keys_shared_bytes = Block::shared_bytes(2) +
                                                      2 * Block::tile_rows* static_cast<int64_t>(sizeof(RowTerms));
static_assert(BackwardKeysBlock<float, 128>::shared_bytes(2) + (1 << 10) <= 99 << 10);
static_assert(BackwardKeysBlock<float, 256>::shared_bytes(2) + (1 << 10) <= 163 << 10);

}  // namespace detail

// Size of attention_backward's scratch in floats; it is aligned to 16 bytes.
inline int64_t attention_backward_scratch(const AttentionBlock& s) {
  return s.B * s.Hq * detail::terms_rows(s.queries.rows) * static_cast<int64_t>(sizeof(RowTerms) / sizeof(float));
}

template <class T>
void attention_backward(const AttentionGradients<T, float>& to, const T* dout, const T* out, const float* lse,
                        const AttentionInputs<T>& from, float* scratch, const AttentionBlock& s, cudaStream_t stream,
                        TensorCores instructions = tensor_cores()) {
  CHECK(from.values.data == from.keys.data + s.Hkv * s.D && from.values.stride == from.keys.stride,
        "attention_backward: the values are not next to the keys");
  RowTerms* terms = reinterpret_cast<RowTerms*>(scratch);
  const HeadRows<const T> dout_rows = {dout, s.Hq * s.D}, out_rows = {out, s.Hq * s.D};
  const KernelBlock block(s);
  const GradientRows<T> dqueries = {{to.queries, s.queries, s.D, s.offset}, {to.query_sums, s.queries, s.D, s.offset}},
                        dkeys = {{to.keys, s.keys, s.D}, {to.key_sums, s.keys, s.D}},
                        dvalues = {{to.values, s.keys, s.D}, {to.value_sums, s.keys, s.D}};
  const Heads<const T> douts(dout_rows, s.queries, s.D), outs(out_rows, s.queries, s.D),
      queries(from.queries, s.queries, s.D), keys(from.keys, s.keys, s.D), values(from.values, s.keys, s.D);
  const int32_t* positions = from_row_0(from.positions, s);
  const auto run = [&]<int DP, Copy copy>() {
    const auto start_keys = [&]<class Block>(auto* kernel) {
      const Grid grid =
          grid_of_heads<T>(s.B * s.Hkv, ceil_div(s.keys.rows, Block::rows), s.queries.rows * s.Hq / s.Hkv, s.D);
      launch(kernel, grid, Block::threads, detail::backward_keys_shared_bytes<Block>, stream, dkeys, dvalues, douts,
             queries, keys, values, terms, positions, block);
    };
    const auto start_queries = [&]<class Block>(auto* kernel, const auto&... keys_and_values) {
      const Grid grid =
          grid_of_heads<T>(s.B * s.Hq, ceil_div(s.queries.rows, Block::rows), ceil_div(s.keys.rows * s.Hkv, s.Hq), s.D);
      launch(kernel, grid, Block::threads, Block::shared_bytes(2), stream, dqueries, terms - s.offset, douts, outs,
             from_row_0(lse, s), queries, keys_and_values..., positions, block);
    };
    if constexpr (fits_warpgroups<T, copy>) {
      if (instructions == TensorCores::of_warpgroup) {
        using Keys = detail::BackwardKeysWarpgroups<DP>;
        using Queries = detail::BackwardQueriesWarpgroups<DP>;
        static_assert(Queries::rows % Keys::tile_rows == 0);  // so that all terms are there
        start_queries.template operator()<Queries>(attention_backward_queries_wgmma_kernel<Queries>, keys, values);
        start_keys.template operator()<Keys>(attention_backward_keys_wgmma_kernel<Keys>);
        return;
      }
    }
    using Keys = detail::BackwardKeysBlock<T, DP>;
    using Queries = detail::BackwardQueriesBlock<T, DP>;
    static_assert(Queries::rows % Keys::tile_rows == 0);
    start_queries.template operator()<Queries>(attention_backward_queries_kernel<T, Queries, DP, copy>, keys);
    start_keys.template operator()<Keys>(attention_backward_keys_kernel<T, Keys, DP, copy>);
  };
  with_head_size<T>(s.D, run, to.queries, to.keys, to.values, dout_rows, out_rows, from.queries, from.keys,
                    from.values);
}

}  // namespace llmc::cuda
