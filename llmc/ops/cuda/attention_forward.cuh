// attention_forward.cuh: causal attention without a T x T matrix: a block holds query rows and iterates over tiles of
// keys and values, with a running maximum and sum per row (Milakov & Gimelshein 2018; Dao et al. 2022; Dao 2023). And
// attention of a few rows, as in text generation with a cache of keys and values: one block per part of the keys, so
// that a single row fills a GPU, then a second kernel that combines the parts in order, and the rows that join the
// cache. Contracts: ops/ops_attention.h.
#pragma once
#include "ops/cuda/attention_wgmma.cuh"

namespace llmc::cuda {

namespace detail {

// As many rows as fit into the registers of two blocks: the more rows a warp has, the less often it reads keys and
// values from shared memory.
template <class T, int DP>
struct ForwardBlock : BlockSize<1, 4, (DP < 256 ? 32 : 16), DP, T> {};
template <>
struct ForwardBlock<bf16, 64> : BlockSize<2, 4, 64, 64, bf16> {};
template <>
struct ForwardBlock<bf16, 128> : BlockSize<2, 4, 32, 128, bf16> {};
template <int DP>
using ForwardWarpgroups = WarpgroupBlock<2, DP == 64 ? 64 : 128, DP, DP == 64 ? 2 : 1>;

inline constexpr int cached_part = 256;  // of few rows: keys per block, and threads; no head is larger

// Number of thread groups in a block; a group has one thread per pack of a row of D.
__host__ __device__ constexpr int64_t cached_groups(int64_t D, int pack) { return cached_part / (D / pack); }

// Are there too few rows to fill a GPU unless many blocks share the keys of each?
inline bool few_rows(const AttentionBlock& s) { return s.B == 1 && s.queries.rows <= 16 && s.offset >= 0; }

inline int64_t cached_parts(const AttentionBlock& s) {
  return ceil_div(std::min(s.offset + s.queries.rows, s.keys.rows), cached_part);
}
inline int64_t cached_scratch(const AttentionBlock& s) { return s.queries.rows * s.Hq * cached_parts(s) * (s.D + 2); }

}  // namespace detail

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

// partials (rows, Hq, parts, D + 2): exponential-weighted sums of values, then the maximum score (base 2) and the sum
// of the exponentials. Grid (rows Hq, parts). Dynamic shared memory: groups rows of D.
template <class T, int pack>
__global__ void attention_cached_kernel(float* __restrict__ partials, AttentionInputs<T> from, AttentionBlock s) {
  using Pack = Packed<T, pack>;
  constexpr int part = detail::cached_part;
  const int64_t t = blockIdx.x / s.Hq, h = blockIdx.x % s.Hq, kv = h / (s.Hq / s.Hkv);
  const int64_t first = blockIdx.y * int64_t{part},
                keys = min(min(s.offset + t + 1, s.keys.rows) - first, int64_t{part});
  if (keys <= 0) return;
  const int D = static_cast<int>(s.D), thread = static_cast<int>(threadIdx.x);
  const T* __restrict__ q = from.queries.data + (s.queries.first + t) * from.queries.stride + h * D;
  const T* __restrict__ k = from.keys.data + (s.keys.first + first) * from.keys.stride + kv * D;
  const T* __restrict__ v = from.values.data + (s.keys.first + first) * from.values.stride + kv * D;
  const float scale = log2_e / sqrtf(static_cast<float>(D));
  SHARED(float, p, part);

  float score = -INFINITY;  // for this thread's key
  if (thread < keys) {
    score = 0;
    for (int d = 0; d < D; d += pack) {
      const Pack qs = Pack::load(q + d), ks = Pack::load(k + thread * from.keys.stride + d);
      for (int i = 0; i < pack; ++i) score += qs[i] * ks[i];
    }
    score *= scale;
  }
  const float largest = block_max(score);
  p[thread] = fast_exp2(score - largest);
  const float sum = block_sum(p[thread]);  // after it, p is complete

  // Group g takes keys g, g + groups, ...; each of its threads takes one pack of the row.
  DYN_SHARED(float, sums);  // (groups, D)
  const int packs = D / pack, groups = static_cast<int>(detail::cached_groups(D, pack)), group = thread / packs;
  if (group < groups) {
    const int d = thread % packs * pack;
    float outs[pack] = {};
    for (int j = group; j < keys; j += groups) {
      const Pack vs = Pack::load(v + j * from.values.stride + d);
      for (int i = 0; i < pack; ++i) outs[i] += p[j] * vs[i];
    }
    for (int i = 0; i < pack; ++i) sums[group * D + d + i] = outs[i];
  }
  __syncthreads();  // sums is complete
  float* partial = partials + (blockIdx.x * int64_t{gridDim.y} + blockIdx.y) * (D + 2);
  if (thread < D) {
    float total = 0;
    for (int g = 0; g < groups; ++g) total += sums[g * D + thread];
    partial[thread] = total;
  }
  if (thread == 0) {
    partial[D] = largest;
    partial[D + 1] = sum;
  }
}

// Grid rows Hq; one thread per d.
template <class T>
__global__ void attention_cached_combine_kernel(HeadRows<T> out, const float* __restrict__ partials, int64_t parts,
                                                AttentionBlock s) {
  const int64_t D = s.D, d = threadIdx.x, t = blockIdx.x / s.Hq, keys = min(s.offset + t + 1, s.keys.rows);
  const int64_t used = (keys + detail::cached_part - 1) / detail::cached_part;
  const float* partial = partials + blockIdx.x * parts * (D + 2);
  if (d >= D) return;
  float largest = -INFINITY;
  for (int64_t i = 0; i < used; ++i) largest = fmaxf(largest, partial[i * (D + 2) + D]);
  float total = 0, sum = 0;
  for (int64_t i = 0; i < used; ++i) {
    const float weight = fast_exp2(partial[i * (D + 2) + D] - largest);
    total += weight * partial[i * (D + 2) + d];
    sum += weight * partial[i * (D + 2) + D + 1];
  }
  out.data[(s.queries.first + t) * out.stride + blockIdx.x % s.Hq * D + d] = from_float<T>(total / sum);
}

// One thread per pack to copy.
template <class T, int pack>
__global__ void cache_append_kernel(T* __restrict__ cache_rows, const T* __restrict__ qkv, AttentionShape s) {
  const int64_t kept = 2 * s.Hkv * s.D, row = s.Hq * s.D + kept;
  const int64_t i = item_of_thread() * pack, t = i / kept;
  if (t < s.T) Packed<T, pack>::load(qkv + t * row + s.Hq * s.D + i % kept).store(cache_rows + i);
}

// One sequence without documents, whose rows all see a key.
template <class T>
void attention_cached(const HeadRows<T>& out, const AttentionInputs<T>& from, float* scratch, const AttentionBlock& s,
                      cudaStream_t stream) {
  check_head_size<T>(s.D);
  const int64_t parts = detail::cached_parts(s);
  const int64_t rows = s.queries.rows * s.Hq;
  with_packs<full_pack<T>>(heads_fit_packs(s.D, full_pack<T>, from.queries, from.keys, from.values), [&]<int pack>() {
    launch(attention_cached_kernel<T, pack>, Grid(rows, parts), detail::cached_part,
           detail::cached_groups(s.D, pack) * s.D * static_cast<int64_t>(sizeof(float)), stream, scratch, from, s);
  });
  launch(attention_cached_combine_kernel<T>, rows, round_up(s.D, warp_size), 0, stream, out, scratch, parts, s);
}

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
    return attention_cached(to.out, from, scratch, s, stream);
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

template <class T>
void cache_append(T* cache_rows, const T* qkv, const AttentionShape& s, cudaStream_t stream) {
  with_packs<full_pack<T>>(rows_fit_packs(s.D, full_pack<T>, cache_rows, qkv), [&]<int pack>() {
    launch_each(cache_append_kernel<T, pack>, s.T * 2 * s.Hkv * s.D / pack, stream, cache_rows, qkv, s);
  });
}

}  // namespace llmc::cuda
