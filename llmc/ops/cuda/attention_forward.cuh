// attention_forward.cuh: causal attention without a T x T matrix: a block holds query rows and iterates over tiles of
// keys and values, with a running maximum and sum per row (Milakov & Gimelshein 2018; Dao et al. 2022; Dao 2023).
// Contracts: ops/ops_attention.h.
#pragma once
#include "ops/cuda/attention_tiles.cuh"

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

// Grid (B Hq, blocks of rows). Two blocks per SM.
template <class T, class Block, int DP, Copy copy>
__global__ void __launch_bounds__(Block::threads, 2)
    attention_forward_kernel(T* __restrict__ out, float* __restrict__ lse, const T* __restrict__ qkv,
                             const int32_t* __restrict__ positions, AttentionShape s) {
  constexpr int M = Block::M;
  const BlockOfQueries at(s, Block::rows);
  const int T_ = static_cast<int>(s.T), warp_row = 16 * M * warp_of_thread(), first = at.first + warp_row;
  const int64_t heads = s.Hq + 2 * s.Hkv;
  if (positions != nullptr) positions += at.b * s.T;
  DYN_SHARED(T, memory);
  const Tile<T, DP> queries{memory};
  load_rows<Block::rows, Block::threads, copy>(queries, head_of(qkv, s, heads, at.b, at.h), at.first);

  const RowRange block_rows(positions, at.first, min(at.first + Block::rows, T_));
  const RowRange warp_rows(positions, first, min(first + 16 * M, T_));
  const float scale = log2_e / sqrtf(static_cast<float>(s.D));  // exp(x / sqrt(D)) = 2^(x scale)
  OnlineSoftmax<M> softmax;
  Accumulators<M, Block::ND> outs = {};
  const auto use = [&](const Tile<T, DP>& keys, const Tile<T, DP>& values, int key) {
    if (!warp_rows.sees_any(key, key + Block::tile_rows - 1)) return;
    const bool all_seen = warp_rows.sees_all(key, key + Block::tile_rows - 1);
    Accumulators<M, Block::N> p = {};
    multiply_transposed(p, queries, warp_row, keys);
#pragma unroll
    for (int m = 0; m < M; ++m)
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        if (!all_seen) for_unseen(p, m, half, warp_rows, positions, first, key, [](float& x) { x = -INFINITY; });
        softmax.update(p, outs, m, half, scale);
      }
    multiply(outs, p, values);
  };
  for_tiles_of_keys<Block, copy>(queries.after(Block::rows), head_of(qkv, s, heads, at.b, s.Hq + at.kv),
                                 head_of(qkv, s, heads, at.b, s.Hq + s.Hkv + at.kv), block_rows, use);

#pragma unroll
  for (int m = 0; m < M; ++m)
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const float total = quad_reduce(softmax.sum[m][half], Sum{});
      scale_row(outs, m, half, 1.0f / total);
      const int row = first + 16 * m + fragment_row(2 * half);
      if (row < warp_rows.end && fragment_column(0) == 0)
        lse[(at.b * s.Hq + at.h) * s.T + row] = softmax.largest[m][half] * scale * ln_2 + logf(total);
    }
  store_rows<copy>(head_of(out, s, s.Hq, at.b, at.h), first, outs);
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

// out (B, T, Hq D), lse (B, Hq, T) = ; qkv (B, T, (Hq + 2 Hkv) D); positions (B, T) or nullptr
template <class T>
void attention_forward(T* out, float* lse, const T* qkv, const int32_t* positions, const AttentionShape& s,
                       cudaStream_t stream) {
  const auto run = [&]<int DP, Copy copy>() {
    using Block = detail::ForwardBlock<T, DP>;
    const dim3 grid(static_cast<unsigned>(s.B * s.Hq), static_cast<unsigned>(ceil_div(s.T, Block::rows)));
    launch(attention_forward_kernel<T, Block, DP, copy>, grid, Block::threads, Block::shared_bytes(1), stream, out, lse,
           qkv, positions, s);
  };
  with_head_size<T>(s, run, out, qkv);
}

}  // namespace llmc::cuda
