// attention_forward.cuh: causal attention with no T x T matrix: a block holds rows of queries and goes through tiles of
// keys and values, with a running maximum and sum of each row (Milakov & Gimelshein 2018; Dao et al. 2022; Dao 2023).
// Contracts: ops/ops_attention.h.
#pragma once
#include "ops/cuda/attention_tiles.cuh"

namespace llmc::cuda {

namespace detail {

// A block of `warps` warps holds 16 M rows of queries in each and takes `keys` keys at a time.
template <int M_, int warps_, int keys_, int DP, class T>
struct QueryBlock {
  static constexpr int M = M_, keys = keys_, rows = 16 * M * warps_, threads = warps_ * warp_size;
  static constexpr int N = keys / 8, ND = DP / 8;  // of 8 columns: the scores' and the outputs'
  // Shared memory: `operands` tiles of rows, and two buffers of two tiles of keys.
  static constexpr int64_t shared_bytes(int operands) {
    return (operands * rows + 4 * keys) * DP * static_cast<int64_t>(sizeof(T));
  }
};

// What a block of queries is of: blockIdx.x counts (sequence, query head), so that heads that share keys run together;
// blockIdx.y counts the rows from the last ones, which have the most keys, so that short blocks fill the gaps at the
// end.
struct BlockOfQueries {
  unsigned b, h, kv;
  int first;  // row
  __device__ BlockOfQueries(const AttentionShape& s, int rows)
      : b(blockIdx.x / static_cast<unsigned>(s.Hq)),
        h(blockIdx.x % static_cast<unsigned>(s.Hq)),
        kv(h / static_cast<unsigned>(s.Hq / s.Hkv)),
        first(static_cast<int>(gridDim.y - 1 - blockIdx.y) * rows) {}
};

// Calls use(keys, values, first key) for the tiles of keys that any of `rows` sees; `buffers` holds two pairs of tiles.
template <class Block, Copy copy, class T, int DP, class Use>
__device__ void for_tiles_of_keys(const Tile<T, DP>& buffers, const Head<const T>& keys, const Head<const T>& values,
                                  const RowRange& rows, Use use) {
  constexpr int n = Block::keys;
  const auto tile = [&](int i, int which) { return buffers.after((2 * (i % 2) + which) * n); };
  double_buffered(
      rows.smallest / n, (rows.end + n - 1) / n,
      [&](int i) {
        load_rows<n, Block::threads, copy>(tile(i, 0), keys, i * n);
        load_rows<n, Block::threads, copy>(tile(i, 1), values, i * n);
      },
      [&](int i) { use(tile(i, 0), tile(i, 1), i * n); });
}

}  // namespace detail

// Grid (B Hq, blocks of rows).
template <class T, class Block, int DP, Copy copy>
__global__ void __launch_bounds__(Block::threads)
    attention_forward_kernel(T* __restrict__ out, float* __restrict__ lse, const T* __restrict__ qkv,
                             const int32_t* __restrict__ positions, AttentionShape s) {
  constexpr int M = Block::M, N = Block::N, ND = Block::ND;
  const detail::BlockOfQueries at(s, Block::rows);
  const int64_t heads = s.Hq + 2 * s.Hkv;
  if (positions != nullptr) positions += at.b * s.T;
  DYN_SHARED(T, memory);
  const Tile<T, DP> queries{memory};
  load_rows<Block::rows, Block::threads, copy>(queries, head_of(qkv, s, heads, at.b, at.h), at.first);

  const int T_ = static_cast<int>(s.T), warp_row = 16 * M * warp_of_thread(), first = at.first + warp_row;
  const RowRange block_rows(positions, at.first, min(at.first + Block::rows, T_));
  const RowRange warp_rows(positions, first, min(first + 16 * M, T_));
  float largest[M][2], sum[M][2];  // of this lane's rows: of their scores, and of this lane's part of the exponentials
#pragma unroll
  for (int m = 0; m < M; ++m)
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      largest[m][half] = -INFINITY;
      sum[m][half] = 0;
    }
  Sums<M, ND> outs = {};
  const float scale = log2_e / sqrtf(static_cast<float>(s.D));  // exp(x / sqrt(D)) = 2^(x scale)

  const auto use = [&](const Tile<T, DP>& keys, const Tile<T, DP>& values, int key) {
    if (!warp_rows.sees_any(key, key + Block::keys - 1)) return;
    Sums<M, N> p = {};
    multiply_transposed(p, queries, warp_row, keys);
    const bool all_seen = warp_rows.sees_all(key, key + Block::keys - 1);
#pragma unroll
    for (int m = 0; m < M; ++m)
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        if (!all_seen) {
          const int row = first + 16 * m + fragment_row(2 * half), first_seen = warp_rows.first_key(positions, row);
#pragma unroll
          for (int n = 0; n < N; ++n)
#pragma unroll
            for (int i = 0; i < 2; ++i) {
              const int k = key + 8 * n + fragment_column(i);
              if (k > row || k < first_seen) p[m][n][2 * half + i] = -INFINITY;
            }
        }
        float most = -INFINITY;
#pragma unroll
        for (int n = 0; n < N; ++n) most = fmaxf(most, fmaxf(p[m][n][2 * half], p[m][n][2 * half + 1]));
        most = fmaxf(largest[m][half], quad_reduce(most, Max{}));
        const float shift = most == -INFINITY ? 0 : most * scale;  // a row may have seen no key yet
        const float correction = fast_exp2(largest[m][half] * scale - shift);
        largest[m][half] = most;
        sum[m][half] *= correction;
#pragma unroll
        for (int n = 0; n < ND; ++n)
#pragma unroll
          for (int i = 2 * half; i < 2 * half + 2; ++i) outs[m][n][i] *= correction;
#pragma unroll
        for (int n = 0; n < N; ++n)
#pragma unroll
          for (int i = 2 * half; i < 2 * half + 2; ++i) {
            p[m][n][i] = fast_exp2(p[m][n][i] * scale - shift);
            sum[m][half] += p[m][n][i];
          }
      }
    multiply(outs, p, values);
  };
  detail::for_tiles_of_keys<Block, copy>(queries.after(Block::rows), head_of(qkv, s, heads, at.b, s.Hq + at.kv),
                                         head_of(qkv, s, heads, at.b, s.Hq + s.Hkv + at.kv), block_rows, use);

#pragma unroll
  for (int m = 0; m < M; ++m)
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const float total = quad_reduce(sum[m][half], Sum{}), inverse = 1.0f / total;
#pragma unroll
      for (int n = 0; n < ND; ++n)
#pragma unroll
        for (int i = 2 * half; i < 2 * half + 2; ++i) outs[m][n][i] *= inverse;
      const int row = first + 16 * m + fragment_row(2 * half);
      if (row < T_ && fragment_column(0) == 0)
        lse[(at.b * s.Hq + at.h) * s.T + row] = largest[m][half] * scale * ln_2 + logf(total);
    }
  store_rows<copy>(head_of(out, s, s.Hq, at.b, at.h), first, outs);
}

namespace detail {

inline constexpr int64_t largest_head = 128;

inline void check_head_size(const char* op, const AttentionShape& s) {
  CHECK(s.D <= largest_head, "{}: a head of {} channels is more than the kernels hold; use heads of up to {}", op, s.D,
        largest_head);
}
// Calls f.operator()<DP, copy>(), with DP the head size that the kernel is made for.
template <class T, class F>
void with_head_size(const char* op, const AttentionShape& s, F&& f, const auto*... arrays) {
  check_head_size(op, s);
  const bool packs = rows_fit_packs(s.D, full_pack<T>, arrays...);
  if (s.D <= 64) packs ? f.template operator()<64, Copy::packs>() : f.template operator()<64, Copy::elements>();
  else packs ? f.template operator()<128, Copy::packs>() : f.template operator()<128, Copy::elements>();
}

template <class T, int DP>
struct ForwardBlock;
template <>
struct ForwardBlock<bf16, 64> : QueryBlock<2, 4, 64, 64, bf16> {};
template <>
struct ForwardBlock<bf16, 128> : QueryBlock<2, 4, 32, 128, bf16> {};
template <int DP>
struct ForwardBlock<float, DP> : QueryBlock<1, 4, 32, DP, float> {};

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
  detail::with_head_size<T>("attention_forward", s, run, out, qkv);
}

}  // namespace llmc::cuda
