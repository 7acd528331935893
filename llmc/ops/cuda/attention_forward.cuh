// attention_forward.cuh: causal attention without a T x T matrix: a block holds query rows and iterates over tiles of
// keys and values, with a running maximum and sum per row (Milakov & Gimelshein 2018; Dao et al. 2022; Dao 2023).
// Contracts: ops/ops_attention.h.
#pragma once
#include "ops/cuda/attention_cached.cuh"
#include "ops/cuda/attention_wgmma.cuh"

namespace llmc::cuda {

// Grid: grid_of_heads(B Hq, blocks of rows).
template <class T, class Block, int DP, Copy copy>
__global__ void __launch_bounds__(Block::threads, Block::blocks)
    attention_forward_kernel(KernelOutputs<T> to, Heads<const T> queries, Heads<const T> keys, Heads<const T> values,
                             const int32_t* __restrict__ positions, KernelBlock s) {
  constexpr int M = Block::M;
  const BlockOfQueries at(s, Block::rows);
  if (at.b >= static_cast<unsigned>(s.B)) return;
  const SeenKeys seen(positions, s, at.b);
  const int warp_row = 16 * M * warp_of_thread(), first = at.first + warp_row;
  DYN_SHARED(T, memory);
  const Tile<T, DP> query_tile{memory};
  load_rows<Block::rows, Block::threads, copy>(query_tile, queries.of(at.b, at.h), at.first - s.offset);

  const RowRange block_rows(seen, at.first, at.first + Block::rows), warp_rows(seen, first, first + 16 * M);
  const float scale = log2_e / sqrtf(static_cast<float>(s.D));  // exp(x / sqrt(D)) = 2^(x scale)
  OnlineSoftmax<M> softmax;
  Accumulators<M, Block::ND> outs = {};
  const auto use = [&](const Tile<T, DP>& key_tile, const Tile<T, DP>& value_tile, int key) {
    if (!warp_rows.sees_any(key, key + Block::tile_rows - 1)) return;
    const bool all_seen = warp_rows.sees_all(key, key + Block::tile_rows - 1);
    Accumulators<M, Block::N> p = {};
    multiply_transposed(p, query_tile, warp_row, key_tile);
#pragma unroll
    for (int m = 0; m < M; ++m)
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        if (!all_seen) for_unseen_apart(p, m, half, seen, first, key, [](float& x) { x = -INFINITY; });
        softmax.update(p, outs, m, half, scale);
      }
    multiply(outs, p, value_tile);
  };
  for_tiles_of_keys<Block, copy>(query_tile.after(Block::rows), keys.of(at.b, at.kv), values.of(at.b, at.kv),
                                 block_rows, use);
  if (to.sums.data == nullptr) store_outputs<copy>(to, s, at, first, softmax, outs, scale);
  else merge_outputs(to, s, at, first, softmax, outs, scale);
}

// One thread per pack of out.
template <class T, int pack>
__global__ void attention_finish_kernel(T* out, float* lse, const float* sums, const float* largest, const float* total,
                                        int64_t n, int64_t length, int64_t Hq, int64_t D) {
  const int64_t i = item_of_thread() * pack;
  if (i >= n) return;
  const int64_t row = i / (Hq * D), h = i / D % Hq, statistic = (row / length * Hq + h) * length + row % length;
  const auto xs = Packed<float, pack>::load_streaming(sums + i);
  Packed<T, pack> outs;
  for (int j = 0; j < pack; ++j) outs.set(j, xs[j] / total[statistic]);
  outs.store(out + i);
  if (i % D == 0) lse[statistic] = largest[statistic] + logf(total[statistic]);
}

namespace detail {

// As many rows as fit into the registers of two blocks: the more rows a warp has, the less often it reads keys and
// values from shared memory.
template <class T, int DP>
    struct ForwardBlock : BlockSize < 1,
    4, DP<256 ? 32 : 16, DP, T> {};
template <>
struct ForwardBlock<bf16, 64> : BlockSize<2, 4, 64, 64, bf16> {};
template <>
struct ForwardBlock<bf16, 128> : BlockSize<2, 4, 32, 128, bf16> {};
template <int DP>
using ForwardWarpgroups = WarpgroupBlock<2, DP == 64 ? 64 : 128, DP, DP == 64 ? 2 : 1>;

}  // namespace detail

// Size of attention_forward's scratch in floats.
inline int64_t attention_forward_scratch(const AttentionBlock& s) {
  return detail::few_rows(s) ? detail::cached_scratch(s) : 0;
}

// scratch may be nullptr if `to` has sums
template <class T>
void attention_forward(const AttentionOutputs<T, float>& to, const AttentionInputs<T>& from, float* scratch,
                       const AttentionBlock& s, cudaStream_t stream, TensorCores instructions = tensor_cores()) {
  if (detail::few_rows(s) && to.sums.data == nullptr && to.lse == nullptr && to.largest == nullptr &&
      from.positions == nullptr)
    return detail::attention_cached(to.out, from, scratch, s, stream);
  const KernelOutputs<T> outputs = {Heads<T>(to.out, s.queries, s.D, s.offset),
                                    Heads<float>(to.sums, s.queries, s.D, s.offset), from_row_0(to.lse, s),
                                    from_row_0(to.largest, s), from_row_0(to.total, s)};
  const Heads<const T> queries(from.queries, s.queries, s.D), keys(from.keys, s.keys, s.D),
      values(from.values, s.keys, s.D);
  const auto run = [&]<int DP, Copy copy>() {
    const auto start = [&]<class Block>(auto* kernel) {
      const Grid grid =
          grid_of_heads<T>(s.B * s.Hq, ceil_div(s.queries.rows, Block::rows), ceil_div(s.keys.rows * s.Hkv, s.Hq), s.D);
      launch(kernel, grid, Block::threads, Block::shared_bytes(1), stream, outputs, queries, keys, values,
             from_row_0(from.positions, s), KernelBlock(s));
    };
    if constexpr (fits_warpgroups<T, copy>) {
      using Block = detail::ForwardWarpgroups<DP>;
      if (instructions == TensorCores::of_warpgroup)
        return start.template operator()<Block>(attention_forward_wgmma_kernel<Block>);
    }
    using Block = detail::ForwardBlock<T, DP>;
    start.template operator()<Block>(attention_forward_kernel<T, Block, DP, copy>);
  };
  with_head_size<T>(s.D, run, to.out, from.queries, from.keys, from.values);
}

template <class T>
void attention_finish(T* out, float* lse, const float* sums, const float* largest, const float* total, int64_t B,
                      int64_t length, int64_t Hq, int64_t D, cudaStream_t stream) {
  const int64_t n = B * length * Hq * D;
  with_packs<full_pack<float>>(rows_fit_packs(D, full_pack<float>, out, sums), [&]<int pack>() {
    launch_each(attention_finish_kernel<T, pack>, n / pack, stream, out, lse, sums, largest, total, n, length, Hq, D);
  });
}

}  // namespace llmc::cuda
