// attention_forward.cuh: causal attention without a T x T matrix: a block holds query rows and iterates over tiles of
// keys and values, with a running maximum and sum per row (Milakov & Gimelshein 2018; Dao et al. 2022; Dao 2023).
// Contracts: ops/ops_attention.h.
#pragma once
#include "ops/cuda/attention_cached.cuh"
#include "ops/cuda/attention_keys.cuh"
#include "ops/cuda/elementwise.cuh"

namespace llmc::cuda {

// For the rows that a lane holds: the maximum score so far, and this lane's part of the sum of exponentials.
template <int M>
struct OnlineSoftmax {
  float largest[M][2], sum[M][2];

  __device__ OnlineSoftmax() {
#pragma unroll
    for (int i = 0; i < 2 * M; ++i) {
      largest[i / 2][i % 2] = -INFINITY;
      sum[i / 2][i % 2] = 0;
    }
  }
  // scores = 2^(scores scale - maximum); rescales outs, accumulated with an earlier maximum, to the new one.
  template <int N, int ND>
  __device__ void update(Accumulators<M, N>& scores, Accumulators<M, ND>& outs, int m, int half, float scale) {
    float most = -INFINITY;
#pragma unroll
    for (int n = 0; n < N; ++n) most = fmaxf(most, fmaxf(scores[m][n][2 * half], scores[m][n][2 * half + 1]));
    most = fmaxf(largest[m][half], quad_reduce(most, Max{}));
    const float shift = most == -INFINITY ? 0 : most * scale;  // a row may have seen no key yet
    const float correction = fast_exp2(largest[m][half] * scale - shift);
    largest[m][half] = most;
    sum[m][half] *= correction;
    scale_row(outs, m, half, correction);
#pragma unroll
    for (int n = 0; n < N; ++n)
#pragma unroll
      for (int i = 2 * half; i < 2 * half + 2; ++i) {
        scores[m][n][i] = fast_exp2(scores[m][n][i] * scale - shift);
        sum[m][half] += scores[m][n][i];
      }
  }
};

// Where the forward writes; see AttentionOutputs. Rows are counted like the keys.
template <class T>
struct KernelOutputs {
  Heads<T> out;
  Heads<float> sums;
  float *lse, *largest, *total;  // from row 0 on
};

// out = outs / softmax's sums, and lse.
template <Copy copy, int M, int ND, class T>
__device__ void store_outputs(const KernelOutputs<T>& to, const KernelBlock& s, const BlockOfQueries& at, int first,
                              const OnlineSoftmax<M>& softmax, Accumulators<M, ND>& outs, float scale) {
#pragma unroll
  for (int m = 0; m < M; ++m)
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const float total = quad_reduce(softmax.sum[m][half], Sum{});
      scale_row(outs, m, half, 1.0f / total);
      const int row = first + 16 * m + fragment_row(2 * half);
      if (to.lse != nullptr && row < s.offset + s.rows && fragment_column(0) == 0)
        s.statistic(to.lse, at.b, at.h)[row] = softmax.largest[m][half] * scale * ln_2 + logf(total);
    }
  store_rows<copy>(to.out.of(at.b, at.h), first, outs);
}

// Adds the block to the running sums, each weighted by the exponential of its largest score minus the larger of both.
template <int M, int ND, class T>
__device__ void merge_outputs(const KernelOutputs<T>& to, const KernelBlock& s, const BlockOfQueries& at, int first,
                              const OnlineSoftmax<M>& softmax, Accumulators<M, ND>& outs, float scale) {
  float kept[M][2];  // weights of the running sums
#pragma unroll
  for (int m = 0; m < M; ++m)
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const float total = quad_reduce(softmax.sum[m][half], Sum{});
      const int row = first + 16 * m + fragment_row(2 * half);
      float weight = 0;
      kept[m][half] = 1;
      // Rows that see no key have a total of 0; rows with NaNs a total of NaN. The first lane of a quad reads and
      // writes the row's statistics for all four.
      if (total != 0 && row < s.offset + s.rows && fragment_column(0) == 0) {
        float &before = s.statistic(to.largest, at.b, at.h)[row], &sum = s.statistic(to.total, at.b, at.h)[row];
        const float added = softmax.largest[m][half] * scale * ln_2, largest = fmaxf(before, added);
        kept[m][half] = fast_exp2((before - largest) * log2_e);
        weight = fast_exp2((added - largest) * log2_e);
        before = largest;
        sum = sum * kept[m][half] + total * weight;
      }
      kept[m][half] = __shfl_sync(all_lanes, kept[m][half], 0, 4);
      scale_row(outs, m, half, __shfl_sync(all_lanes, weight, 0, 4));
    }
  update_rows(to.sums.of(at.b, at.h), first, outs,
              [&](int m, int half, float sum, float x) { return sum * kept[m][half] + x; });
}

// Grid (B Hq, blocks of rows).
template <class T, class Block, int DP, Copy copy>
__global__ void __launch_bounds__(Block::threads, attention_blocks)
    attention_forward_kernel(KernelOutputs<T> to, Heads<const T> queries, Heads<const T> keys, Heads<const T> values,
                             const int32_t* __restrict__ positions, KernelBlock s) {
  constexpr int M = Block::M;
  const BlockOfQueries at(s, Block::rows);
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
  const int64_t i = (blockIdx.x * int64_t{blockDim.x} + threadIdx.x) * pack;
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

}  // namespace detail

// Size of attention_forward's scratch in floats.
inline int64_t attention_forward_scratch(const AttentionBlock& s) {
  return detail::few_rows(s) ? detail::cached_scratch(s) : 0;
}

// scratch may be nullptr if `to` has sums
template <class T>
void attention_forward(const AttentionOutputs<T, float>& to, const AttentionInputs<T>& from, float* scratch,
                       const AttentionBlock& s, cudaStream_t stream) {
  if (detail::few_rows(s) && to.sums.data == nullptr && to.lse == nullptr && from.positions == nullptr)
    return detail::attention_cached(to.out, from, scratch, s, stream);
  const KernelOutputs<T> outputs = {Heads<T>(to.out, s.queries, s.D, s.offset),
                                    Heads<float>(to.sums, s.queries, s.D, s.offset), from_row_0(to.lse, s),
                                    from_row_0(to.largest, s), from_row_0(to.total, s)};
  const Heads<const T> queries(from.queries, s.queries, s.D), keys(from.keys, s.keys, s.D),
      values(from.values, s.keys, s.D);
  const auto run = [&]<int DP, Copy copy>() {
    using Block = detail::ForwardBlock<T, DP>;
    const Grid grid(s.B * s.Hq, ceil_div(s.queries.rows, Block::rows));
    launch(attention_forward_kernel<T, Block, DP, copy>, grid, Block::threads, Block::shared_bytes(1), stream, outputs,
           queries, keys, values, from_row_0(from.positions, s), KernelBlock(s));
  };
  with_head_size<T>(s.D, run, to.out, from.queries, from.keys, from.values);
}

// out (B T, Hq D) = sums / total; lse (B, Hq, T) = largest + log(total)
template <class T>
void attention_finish(T* out, float* lse, const float* sums, const float* largest, const float* total, int64_t B,
                      int64_t length, int64_t Hq, int64_t D, cudaStream_t stream) {
  const int64_t n = B * length * Hq * D;
  with_packs<full_pack<float>>(rows_fit_packs(D, full_pack<float>, out, sums), [&]<int pack>() {
    launch(attention_finish_kernel<T, pack>, ceil_div(n, pack * detail::elementwise_threads),
           detail::elementwise_threads, 0, stream, out, lse, sums, largest, total, n, length, Hq, D);
  });
}

}  // namespace llmc::cuda
