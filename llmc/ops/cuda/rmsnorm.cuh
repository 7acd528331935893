// rmsnorm.cuh: Zhang & Sennrich 2019, on whole rows. Each row is read once; statistics in fp32. Contracts: ops/ops.h.
#pragma once
#include "ops/cuda/norm_backward.cuh"
#include "ops/cuda/reduce.cuh"
#include "ops/cuda/rows.cuh"
#include "ops/types.h"

namespace llmc::cuda {

template <class Held, class Input, class T>
__global__ void __launch_bounds__(Held::threads)
    rmsnorm_forward_kernel(T* __restrict__ out, float* __restrict__ rstd, Input x, const T* __restrict__ weight,
                           float eps, int64_t N, int64_t C) {
  using Pack = typename Held::Pack;
  Held row(C);
  const int64_t n = row.index();
  if (n >= N) return;
  row.fill(x, n);

  float squares = 0;
  row.each([&](const auto& xs, int64_t) {
    for (int i = 0; i < Pack::size; ++i) squares += xs[i] * xs[i];
  });
  const float r = rsqrtf(row.sum(squares) / static_cast<float>(C) + eps);

  row.each([&](const auto& xs, int64_t c) {
    const auto ws = Kept<Pack>(Pack::load(weight + c)).fp32();
    Floats<Pack::size> outs;
    for (int i = 0; i < Pack::size; ++i) outs[i] = xs[i] * r * ws[i];
    Pack::of(outs).store(out + n * C + c);  // kept in the cache: the next op reads it
  });
  if (row.leads()) rstd[n] = r;
}

namespace detail {

template <class T, class Input>
void rmsnorm_forward(T* out, float* rstd, Input x, const T* weight, float eps, int64_t N, int64_t C,
                     cudaStream_t stream) {
  const bool fit = rows_fit_packs(C, full_pack<T>, out, weight) && x.fits_packs();
  with_held_row<T>("rmsnorm_forward", N, C, fit, [&]<class Held>(int64_t blocks, int64_t threads, int64_t shared) {
    launch(rmsnorm_forward_kernel<Held, Input, T>, blocks, threads, shared, stream, out, rstd, x, weight, eps, N, C);
  });
}

}  // namespace detail

// out (N, C), rstd (N) = ; x (N, C); weight (C)
template <class T>
void rmsnorm_forward(T* out, float* rstd, const T* x, const T* weight, float eps, int64_t N, int64_t C,
                     cudaStream_t stream) {
  detail::rmsnorm_forward(out, rstd, PlainRows<T>{x}, weight, eps, N, C, stream);
}

// sum (N, C) = a + b, and its rmsnorm; bitwise equal to residual_forward, then rmsnorm_forward (contract 11). Saves one
// pass over the sum. The arrays must not alias.
template <class T>
void residual_rmsnorm_forward(T* out, float* rstd, T* sum, const T* a, const T* b, const T* weight, float eps,
                              int64_t N, int64_t C, cudaStream_t stream) {
  detail::rmsnorm_forward(out, rstd, SummedRows<T>{sum, a, b}, weight, eps, N, C, stream);
}

// Size of rmsnorm_backward's `partials` in floats.
inline int64_t rmsnorm_backward_scratch(int64_t N, int64_t C) {
  return detail::norm_backward_scratch(Centred::no, N, C);
}

// dx (N, C) = or += ; dweight (C) += ; partials: scratch
template <class T>
void rmsnorm_backward(T* dx, float* dweight, const RowParts<float>& partials, const T* dout, const T* x,
                      const T* weight, const float* rstd, int64_t N, int64_t C, Accumulate accumulate_dx,
                      cudaStream_t stream) {
  detail::norm_backward<Centred::no>("rmsnorm_backward", dx, dweight, nullptr, partials, dout, x, weight, nullptr, rstd,
                                     N, C, accumulate_dx, stream);
}

}  // namespace llmc::cuda
