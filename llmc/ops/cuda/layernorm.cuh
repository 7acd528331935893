// layernorm.cuh: Ba, Kiros & Hinton 2016. Each row is read once; statistics in fp32. Contracts: ops/ops.h.
#pragma once
#include "ops/cuda/norm_backward.cuh"
#include "ops/cuda/reduce.cuh"
#include "ops/cuda/rows.cuh"
#include "ops/types.h"

namespace llmc::cuda {

template <class Held, class Input, class T>
__global__ void __launch_bounds__(Held::threads)
    layernorm_forward_kernel(T* __restrict__ out, float* __restrict__ mean, float* __restrict__ rstd, Input x,
                             const T* __restrict__ weight, const T* __restrict__ bias, float eps, int64_t N,
                             int64_t C) {
  using Pack = typename Held::Pack;
  Held row(C);
  const int64_t n = row.index();
  if (n >= N) return;
  row.fill(x, n);

  float sum = 0;
  row.each([&](const auto& xs, int64_t) {
    for (int i = 0; i < Pack::size; ++i) sum += xs[i];
  });
  const float per_channel = 1.0f / static_cast<float>(C), m = row.sum(sum) * per_channel;

  float squares = 0;  // centred first, to avoid cancellation
  row.each([&](const auto& xs, int64_t) {
    for (int i = 0; i < Pack::size; ++i) squares += (xs[i] - m) * (xs[i] - m);
  });
  const float r = rsqrtf(row.sum(squares) * per_channel + eps);

  row.each([&](const auto& xs, int64_t c) {
    const Kept<Pack> weights = Pack::load(weight + c), biases = Pack::load(bias + c);
    const auto ws = weights.fp32(), bs = biases.fp32();
    Floats<Pack::size> outs;
    for (int i = 0; i < Pack::size; ++i) outs[i] = (xs[i] - m) * r * ws[i] + bs[i];
    Pack::of(outs).store(out + n * C + c);  // kept in the cache: the next op reads it
  });
  if (row.leads()) {
    mean[n] = m;
    rstd[n] = r;
  }
}

namespace detail {

template <class T, class Input>
void layernorm_forward(T* out, float* mean, float* rstd, Input x, const T* weight, const T* bias, float eps, int64_t N,
                       int64_t C, cudaStream_t stream) {
  const bool fit = rows_fit_packs(C, full_pack<T>, out, weight, bias) && x.fits_packs();
  with_held_row<T>("layernorm_forward", N, C, fit, [&]<class Held>(int64_t blocks, int64_t threads, int64_t shared) {
    launch(layernorm_forward_kernel<Held, Input, T>, blocks, threads, shared, stream, out, mean, rstd, x, weight, bias,
           eps, N, C);
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
inline int64_t layernorm_backward_scratch(int64_t N, int64_t C) {
  return detail::norm_backward_scratch(Centred::yes, N, C);
}

// dx (N, C) = or += ; dweight (C), dbias (C) += ; partials: scratch
template <class T>
void layernorm_backward(T* dx, float* dweight, float* dbias, const RowParts<float>& partials, const T* dout, const T* x,
                        const T* weight, const float* mean, const float* rstd, int64_t N, int64_t C,
                        Accumulate accumulate_dx, cudaStream_t stream) {
  detail::norm_backward<Centred::yes>("layernorm_backward", dx, dweight, dbias, partials, dout, x, weight, mean, rstd,
                                      N, C, accumulate_dx, stream);
}

}  // namespace llmc::cuda
