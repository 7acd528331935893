// layernorm.cuh: Ba, Kiros & Hinton 2016. One block per row: x is read once and kept in shared memory, each thread
// owning its packs. Statistics in fp32. Contracts: ops/ops.h.
#pragma once
#include "ops/cuda/column_sum.cuh"
#include "ops/cuda/reduce.cuh"
#include "ops/cuda/rows.cuh"
#include "ops/types.h"

namespace llmc::cuda {

// Grid N; dynamic shared memory: a row of x. Each thread reads only what it stored itself: no barrier needed.
template <class T, int pack, class Row>
__global__ void layernorm_forward_kernel(T* __restrict__ out, float* __restrict__ mean, float* __restrict__ rstd, Row x,
                                         const T* __restrict__ weight, const T* __restrict__ bias, float eps,
                                         int64_t C) {
  using Pack = Packed<T, pack>;
  DYN_SHARED(T, row);  // (C)
  const int64_t begin = blockIdx.x * C, first = threadIdx.x * pack, step = blockDim.x * pack;

  float sum = 0;
  for (int64_t c = first; c < C; c += step) {
    const Pack xs = x.template load<pack>(begin + c);
    xs.store(row + c);
    for (int i = 0; i < pack; ++i) sum += xs[i];
  }
  const float m = block_sum(sum) / static_cast<float>(C);

  float squares = 0;  // centred first, to avoid cancellation
  for (int64_t c = first; c < C; c += step) {
    const Pack xs = Pack::load(row + c);
    for (int i = 0; i < pack; ++i) squares += (xs[i] - m) * (xs[i] - m);
  }
  const float r = 1.0f / sqrtf(block_sum(squares) / static_cast<float>(C) + eps);

  for (int64_t c = first; c < C; c += step) {
    const Pack xs = Pack::load(row + c), ws = Pack::load(weight + c), bs = Pack::load(bias + c);
    Pack outs;
    for (int i = 0; i < pack; ++i) outs.set(i, (xs[i] - m) * r * ws[i] + bs[i]);
    outs.store(out + begin + c);  // kept in the cache: the next op reads it
  }
  if (threadIdx.x == 0) {
    mean[blockIdx.x] = m;
    rstd[blockIdx.x] = r;
  }
}

// Each block sums dweight and dbias over a contiguous part of the rows, each thread over its own columns. partials
// (parts, 2 C): dweight, then dbias. Dynamic shared memory: the block's sums, a row of x and one of dout. The sums are
// laid out as (pack, C / pack), to avoid bank conflicts.
template <class T, int pack, Accumulate accumulate_dx>
__global__ void layernorm_backward_kernel(T* __restrict__ dx, float* __restrict__ partials, const T* __restrict__ dout,
                                          const T* __restrict__ x, const T* __restrict__ weight,
                                          const float* __restrict__ mean, const float* __restrict__ rstd, int64_t N,
                                          int64_t C) {
  using Pack = Packed<T, pack>;
  const int64_t packs = C / pack, first = threadIdx.x, step = blockDim.x;
  DYN_SHARED(float, dweight);  // (pack, packs)
  float* dbias = dweight + C;  // (pack, packs)
  T* x_row = reinterpret_cast<T*>(dbias + C);
  T* g_row = x_row + C;
  for (int64_t p = first; p < packs; p += step)
    for (int i = 0; i < pack; ++i) dweight[i * packs + p] = dbias[i * packs + p] = 0;

  const int64_t end = row_part_begin(N, blockIdx.x + 1, gridDim.x);
  for (int64_t n = row_part_begin(N, blockIdx.x, gridDim.x); n < end; ++n) {
    const float m = mean[n], r = rstd[n];
    float sums[2] = {0, 0};  // of g w and of g w normalised
    for (int64_t p = first; p < packs; p += step) {
      const int64_t c = p * pack;
      const Pack xs = Pack::load_streaming(x + n * C + c), gs = Pack::load_streaming(dout + n * C + c),
                 ws = Pack::load(weight + c);
      xs.store(x_row + c);
      gs.store(g_row + c);
      for (int i = 0; i < pack; ++i) {
        const float normalised = (xs[i] - m) * r;
        dweight[i * packs + p] += gs[i] * normalised;
        dbias[i * packs + p] += gs[i];
        sums[0] += gs[i] * ws[i];
        sums[1] += gs[i] * ws[i] * normalised;
      }
    }
    block_reduce(sums, Sum{});
    const float mean_g = sums[0] / static_cast<float>(C), mean_gx = sums[1] / static_cast<float>(C);
    for (int64_t p = first; p < packs; p += step) {
      const int64_t c = p * pack;
      const Pack xs = Pack::load(x_row + c), gs = Pack::load(g_row + c), ws = Pack::load(weight + c);
      Pack dxs;
      if constexpr (accumulate_dx == Accumulate::yes) dxs = Pack::load(dx + n * C + c);
      for (int i = 0; i < pack; ++i) {
        const float d = (gs[i] * ws[i] - mean_g - (xs[i] - m) * r * mean_gx) * r;
        if constexpr (accumulate_dx == Accumulate::yes) dxs.set(i, dxs[i] + d);
        else dxs.set(i, d);
      }
      dxs.store(dx + n * C + c);
    }
  }

  using SumPack = Packed<float, (pack < 4 ? pack : 4)>;
  float* partial = partials + blockIdx.x * 2 * C;
  for (int64_t p = first; p < packs; p += step)
    for (int i = 0; i < pack; i += SumPack::size) {
      SumPack dws, dbs;
      for (int j = 0; j < SumPack::size; ++j) {
        dws.set(j, dweight[(i + j) * packs + p]);
        dbs.set(j, dbias[(i + j) * packs + p]);
      }
      dws.store(partial + p * pack + i);
      dbs.store(partial + C + p * pack + i);
    }
}

namespace detail {

template <class T, class Row>
void layernorm_forward(T* out, float* mean, float* rstd, Row x, const T* weight, const T* bias, float eps, int64_t N,
                       int64_t C, cudaStream_t stream) {
  const int64_t shared = C * static_cast<int64_t>(sizeof(T));
  check_row_fits("layernorm_forward", C, shared);
  with_packs<full_pack<T>>(rows_fit_packs(C, full_pack<T>, out, weight, bias) && x.fits_packs(), [&]<int pack>() {
    launch(layernorm_forward_kernel<T, pack, Row>, N, row_threads(C, pack), shared, stream, out, mean, rstd, x, weight,
           bias, eps, C);
  });
}

}  // namespace detail

// out (N, C), mean (N), rstd (N) = ; x (N, C); weight, bias (C)
template <class T>
void layernorm_forward(T* out, float* mean, float* rstd, const T* x, const T* weight, const T* bias, float eps,
                       int64_t N, int64_t C, cudaStream_t stream) {
  detail::layernorm_forward(out, mean, rstd, PlainRows<T>{x}, weight, bias, eps, N, C, stream);
}

// sum (N, C) = a + b, and its layernorm; bitwise equal to residual_forward, then layernorm_forward (contract 11). Saves
// one pass over the sum. The arrays must not alias.
template <class T>
void residual_layernorm_forward(T* out, float* mean, float* rstd, T* sum, const T* a, const T* b, const T* weight,
                                const T* bias, float eps, int64_t N, int64_t C, cudaStream_t stream) {
  detail::layernorm_forward(out, mean, rstd, SummedRows<T>{sum, a, b}, weight, bias, eps, N, C, stream);
}

// Size of layernorm_backward's `partials` in floats.
inline int64_t layernorm_backward_scratch(int64_t N, int64_t C) { return row_parts(N) * 2 * C; }

// dx (N, C) = or += ; dweight (C), dbias (C) += ; partials: scratch
template <class T>
void layernorm_backward(T* dx, float* dweight, float* dbias, float* partials, const T* dout, const T* x,
                        const T* weight, const float* mean, const float* rstd, int64_t N, int64_t C,
                        Accumulate accumulate_dx, cudaStream_t stream) {
  const int64_t parts = row_parts(N), shared = 2 * C * static_cast<int64_t>(sizeof(float) + sizeof(T));
  check_row_fits("layernorm_backward", C, shared);
  const auto run = [&]<int pack, Accumulate accumulate>() {
    launch(layernorm_backward_kernel<T, pack, accumulate>, parts, row_threads(C, pack), shared, stream, dx, partials,
           dout, x, weight, mean, rstd, N, C);
  };
  with_packs<full_pack<T>>(rows_fit_packs(C, full_pack<T>, dx, partials, dout, x, weight), [&]<int pack>() {
    if (accumulate_dx == Accumulate::yes) run.template operator()<pack, Accumulate::yes>();
    else run.template operator()<pack, Accumulate::no>();
  });
  add_partials(dweight, dbias, partials, parts, C, stream);
}

}  // namespace llmc::cuda
