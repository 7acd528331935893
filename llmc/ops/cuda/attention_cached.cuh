// attention_cached.cuh: attention of a few rows, as in text generation with a cache of keys and values. One block per
// part of the keys, so that a single row fills a GPU; a second kernel combines the parts in order. Contracts:
// ops/ops_attention.h.
#pragma once
#include "ops/cuda/attention_tiles.cuh"

namespace llmc::cuda {

namespace detail {

inline constexpr int cached_part = 256;  // keys per block, and threads per block; no head is larger

// Number of thread groups in a block; a group has one thread per pack of a row of D.
__host__ __device__ constexpr int64_t cached_groups(int64_t D, int pack) { return cached_part / (D / pack); }

}  // namespace detail

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

namespace detail {

// Are there too few rows to fill a GPU unless many blocks share the keys of each?
inline bool few_rows(const AttentionBlock& s) { return s.B == 1 && s.queries.rows <= 16 && s.offset >= 0; }

inline int64_t cached_parts(const AttentionBlock& s) {
  return ceil_div(std::min(s.offset + s.queries.rows, s.keys.rows), cached_part);
}
inline int64_t cached_scratch(const AttentionBlock& s) { return s.queries.rows * s.Hq * cached_parts(s) * (s.D + 2); }

// One sequence without documents, whose rows all see a key.
template <class T>
void attention_cached(const HeadRows<T>& out, const AttentionInputs<T>& from, float* scratch, const AttentionBlock& s,
                      cudaStream_t stream) {
  cuda::check_head_size<T>(s.D);
  const int64_t parts = cached_parts(s);
  const int64_t rows = s.queries.rows * s.Hq;
  with_packs<full_pack<T>>(heads_fit_packs(s.D, full_pack<T>, from.queries, from.keys, from.values), [&]<int pack>() {
    launch(attention_cached_kernel<T, pack>, Grid(rows, parts), cached_part,
           cached_groups(s.D, pack) * s.D * static_cast<int64_t>(sizeof(float)), stream, scratch, from, s);
  });
  launch(attention_cached_combine_kernel<T>, rows, round_up(s.D, warp_size), 0, stream, out, scratch, parts, s);
}

}  // namespace detail

template <class T>
void cache_append(T* cache_rows, const T* qkv, const AttentionShape& s, cudaStream_t stream) {
  with_packs<full_pack<T>>(rows_fit_packs(s.D, full_pack<T>, cache_rows, qkv), [&]<int pack>() {
    launch_each(cache_append_kernel<T, pack>, s.T * 2 * s.Hkv * s.D / pack, stream, cache_rows, qkv, s);
  });
}

}  // namespace llmc::cuda
