// rmsnorm.h: Zhang & Sennrich 2019. Statistics in fp32. Contracts: ops/ops.h.
#pragma once
#include "ops/cpu/simd.h"

namespace llmc::cpu {
inline namespace CPU_ISA {

namespace detail {

// out = x rstd weight; returns rstd.
template <class T, class A = accumulator_t<T>>
A rmsnorm_row(T* out, const T* x, const T* weight, float eps, int64_t C) {
  A squares = 0;
#pragma omp simd reduction(+ : squares)
  for (int64_t c = 0; c < C; ++c) squares += static_cast<A>(x[c]) * static_cast<A>(x[c]);
  const A r = A(1) / std::sqrt(squares / static_cast<A>(C) + static_cast<A>(eps));
#pragma omp simd
  for (int64_t c = 0; c < C; ++c) store(out[c], static_cast<A>(x[c]) * r * static_cast<A>(weight[c]));
  return r;
}

// dx = or +=, dweight +=; dx may be dout.
template <class T, class A = accumulator_t<T>>
void rmsnorm_row_backward(T* dx, A* dweight, const T* dout, const T* x, const T* weight, A r, int64_t C,
                          Accumulate accumulate_dx) {
  A sum = 0;  // of g w xhat
#pragma omp simd reduction(+ : sum)
  for (int64_t c = 0; c < C; ++c) {
    const A normalised = static_cast<A>(x[c]) * r, g = static_cast<A>(dout[c]);
    dweight[c] += g * normalised;
    sum += g * static_cast<A>(weight[c]) * normalised;
  }
  const A mean = sum / static_cast<A>(C);
  const bool keep = accumulate_dx == Accumulate::yes;
#pragma omp simd
  for (int64_t c = 0; c < C; ++c) {
    const A d = (static_cast<A>(dout[c]) * static_cast<A>(weight[c]) - static_cast<A>(x[c]) * r * mean) * r;
    store(dx[c], (keep ? static_cast<A>(dx[c]) : A(0)) + d);
  }
}

}  // namespace detail

template <class T, class A = accumulator_t<T>>
void rmsnorm_forward(T* out, A* rstd, const T* x, const T* weight, float eps, int64_t N, int64_t C) {
#pragma omp parallel for schedule(static)
  for (int64_t n = 0; n < N; ++n) rstd[n] = detail::rmsnorm_row(out + n * C, x + n * C, weight, eps, C);
}

// partials: (row_partitions, C)
template <class T, class A = accumulator_t<T>>
void rmsnorm_backward(T* dx, A* dweight, A* partials, const T* dout, const T* x, const T* weight, const A* rstd,
                      int64_t N, int64_t C, Accumulate accumulate_dx) {
#pragma omp parallel for schedule(static)
  for (int64_t part = 0; part < row_partitions; ++part) {
    A* dw = partials + part * C;
    std::fill(dw, dw + C, A(0));
    for (int64_t n = partition_begin(N, part); n < partition_begin(N, part + 1); ++n)
      detail::rmsnorm_row_backward(dx + n * C, dw, dout + n * C, x + n * C, weight, rstd[n], C, accumulate_dx);
  }
  add_partials(dweight, partials, C, C);
}

// sum = a + b, and its norm.
template <class T, class A = accumulator_t<T>>
void residual_rmsnorm_forward(T* out, A* rstd, T* sum, const T* a, const T* b, const T* weight, float eps, int64_t N,
                              int64_t C) {
#pragma omp parallel for schedule(static)
  for (int64_t n = 0; n < N; ++n) {
    add_rows(sum + n * C, a + n * C, b + n * C, C);
    rstd[n] = detail::rmsnorm_row(out + n * C, sum + n * C, weight, eps, C);
  }
}

}  // namespace CPU_ISA
}  // namespace llmc::cpu
