// projection_norm.cuh: rmsnorm of whole query and key projections; other ranks may have some of their heads. A row's
// sums are computed before its channels are needed, so that no thread waits for another: each takes a pack of channels.
// Statistics in fp32. Contracts: ops/ops_heads.h.
#pragma once
#include "ops/cuda/column_sum.cuh"
#include "ops/cuda/rows.cuh"

namespace llmc::cuda {

// Grid (N, 2): a block sums the query channels or the key channels of a row. dout, q_weight, k_weight: nullptr for the
// sums of squares.
template <class T, int pack>
__global__ void projection_sums_kernel(float* __restrict__ sums, const T* __restrict__ qkv, const T* __restrict__ dout,
                                       const T* __restrict__ q_weight, const T* __restrict__ k_weight,
                                       AttentionShape s) {
  using Pack = Packed<T, pack>;
  const int64_t n = blockIdx.x, which = blockIdx.y, size = (which == 0 ? s.Hq : s.Hkv) * s.D;
  const int64_t begin = (n * (s.Hq + 2 * s.Hkv) + which * s.Hq) * s.D, step = static_cast<int64_t>(blockDim.x) * pack;
  const T* weight = which == 0 ? q_weight : k_weight;
  float sum = 0;
  for (int64_t c = static_cast<int64_t>(threadIdx.x) * pack; c < size; c += step) {
    const Pack xs = Pack::load(qkv + begin + c);
    if (dout == nullptr) {
      for (int i = 0; i < pack; ++i) sum += xs[i] * xs[i];
    } else {
      const Pack ds = Pack::load(dout + begin + c), ws = Pack::load(weight + c);
      for (int i = 0; i < pack; ++i) sum += ds[i] * ws[i] * xs[i];
    }
  }
  sum = block_sum(sum);
  if (threadIdx.x == 0) sums[n * 2 + which] = sum;
}

// Grid: (N, blocks of packs of a row).
template <class T, int pack>
__global__ void projection_norm_forward_kernel(T* __restrict__ out, float* __restrict__ rstd, const T* __restrict__ qkv,
                                               const T* __restrict__ q_weight, const T* __restrict__ k_weight,
                                               const float* __restrict__ sums, float eps, AttentionShape s,
                                               HeadShares shares) {
  using Pack = Packed<T, pack>;
  const int64_t n = blockIdx.x, row = (s.Hq + 2 * s.Hkv) * s.D, queries = s.Hq * s.D, keys = s.Hkv * s.D;
  const int64_t c = column_of_thread(pack);
  if (c >= row) return;
  Pack xs = Pack::load_streaming(qkv + n * row + c);
  if (c < queries + keys) {
    const int64_t which = c < queries ? 0 : 1, first = which * queries;
    const float channels = static_cast<float>((which == 0 ? queries : keys) * shares.parts(which));
    const float r = 1.0f / sqrtf(shares.total(sums, gridDim.x, n, which) / channels + eps);
    const Pack ws = Pack::load((which == 0 ? q_weight : k_weight) + c - first);
    for (int i = 0; i < pack; ++i) xs.set(i, xs[i] * r * ws[i]);
    if (c == first) rstd[n * 2 + which] = r;
  }
  xs.store(out + n * row + c);
}

// Grid: (blocks of packs of the query and key channels, parts of the rows). partials (parts, (Hq + Hkv) D)
template <class T, int pack>
__global__ void projection_norm_backward_kernel(T* __restrict__ dqkv, float* __restrict__ partials,
                                                const T* __restrict__ qkv, const T* __restrict__ q_weight,
                                                const T* __restrict__ k_weight, const float* __restrict__ rstd,
                                                const float* __restrict__ sums, AttentionShape s, HeadShares shares) {
  using Pack = Packed<T, pack>;
  const int64_t N = s.B * s.T, row = (s.Hq + 2 * s.Hkv) * s.D, queries = s.Hq * s.D, keys = s.Hkv * s.D;
  const int64_t c = (static_cast<int64_t>(blockIdx.x) * blockDim.x + threadIdx.x) * pack;
  if (c >= queries + keys) return;
  const int64_t which = c < queries ? 0 : 1;
  const float channels = static_cast<float>((which == 0 ? queries : keys) * shares.parts(which));
  const Pack ws = Pack::load((which == 0 ? q_weight : k_weight) + c - which * queries);
  float dweights[pack] = {};
  const int64_t end = row_part_begin(N, blockIdx.y + 1, gridDim.y);
  for (int64_t n = row_part_begin(N, blockIdx.y, gridDim.y); n < end; ++n) {
    const float r = rstd[n * 2 + which], mean = shares.total(sums, N, n, which) * r / channels;
    const Pack xs = Pack::load_streaming(qkv + n * row + c);
    Pack ds = Pack::load(dqkv + n * row + c);
    for (int i = 0; i < pack; ++i) {
      dweights[i] += ds[i] * (xs[i] * r);
      ds.set(i, (ds[i] * ws[i] - xs[i] * r * mean) * r);
    }
    ds.store(dqkv + n * row + c);
  }
  for (int i = 0; i < pack; ++i) partials[blockIdx.y * (queries + keys) + c + i] = dweights[i];
}

template <class T>
void projection_sums(float* sums, const T* qkv, const T* dout, const T* q_weight, const T* k_weight,
                     const AttentionShape& s, cudaStream_t stream) {
  with_packs<full_pack<T>>(rows_fit_packs(s.D, full_pack<T>, qkv, dout, q_weight, k_weight), [&]<int pack>() {
    launch(projection_sums_kernel<T, pack>, Grid(s.B * s.T, 2), row_threads(s.Hq * s.D, pack, 256), 0, stream, sums,
           qkv, dout, q_weight, k_weight, s);
  });
}

template <class T>
void projection_norm_forward(T* out, float* rstd, const T* qkv, const T* q_weight, const T* k_weight, const float* sums,
                             float eps, const AttentionShape& s, const HeadShares& shares, cudaStream_t stream) {
  const int64_t row = (s.Hq + 2 * s.Hkv) * s.D;
  with_packs<full_pack<T>>(rows_fit_packs(s.D, full_pack<T>, out, qkv, q_weight, k_weight), [&]<int pack>() {
    launch_rows(projection_norm_forward_kernel<T, pack>, s.B * s.T, row, pack, 256, stream, out, rstd, qkv, q_weight,
                k_weight, sums, eps, s, shares);
  });
}

// Size of projection_norm_backward's `partials` in floats.
inline int64_t projection_norm_backward_scratch(const AttentionShape& s) {
  return row_parts(s.B * s.T) * (s.Hq + s.Hkv) * s.D;
}

template <class T>
void projection_norm_backward(T* dqkv, float* dq_weight, float* dk_weight, const RowParts<float>& partials,
                              const T* qkv, const T* q_weight, const T* k_weight, const float* rstd, const float* sums,
                              const AttentionShape& s, const HeadShares& shares, cudaStream_t stream) {
  const int64_t parts = row_parts(s.B * s.T), queries = s.Hq * s.D, normed = queries + s.Hkv * s.D;
  with_packs<full_pack<T>>(rows_fit_packs(s.D, full_pack<T>, dqkv, qkv, q_weight, k_weight), [&]<int pack>() {
    const unsigned threads = row_threads(normed, pack, 256);
    const Grid grid(ceil_div(normed, pack * threads), parts);
    launch(projection_norm_backward_kernel<T, pack>, grid, threads, 0, stream, dqkv, partials.data, qkv, q_weight,
           k_weight, rstd, sums, s, shares);
  });
  add_partials({dq_weight, dk_weight, partials.data, parts, queries, normed}, partials.waiting, stream);
}

}  // namespace llmc::cuda
