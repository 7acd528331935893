// norms.h: layernorm, and rmsnorm. Statistics in fp32. Contracts: ops/ops.h.
#pragma once
#include "ops/cpu/simd.h"

namespace llmc::cpu {
inline namespace CPU_ISA {

namespace detail {

// Layernorm (Ba, Kiros & Hinton 2016): out = (x - mean) rstd weight + bias; mean, rstd = those of the row.
template <class T, class A>
void layernorm_row(T* out, A& mean, A& rstd, const T* x, const T* weight, const T* bias, float eps, int64_t C) {
  A sum = 0;
#pragma omp simd reduction(+ : sum)
  for (int64_t c = 0; c < C; ++c) sum += static_cast<A>(x[c]);
  const A m = sum / static_cast<A>(C);
  A squares = 0;  // centred first, to avoid cancellation
#pragma omp simd reduction(+ : squares)
  for (int64_t c = 0; c < C; ++c) squares += (static_cast<A>(x[c]) - m) * (static_cast<A>(x[c]) - m);
  const A r = A(1) / std::sqrt(squares / static_cast<A>(C) + static_cast<A>(eps));
#pragma omp simd
  for (int64_t c = 0; c < C; ++c)
    store(out[c], (static_cast<A>(x[c]) - m) * r * static_cast<A>(weight[c]) + static_cast<A>(bias[c]));
  mean = m;
  rstd = r;
}

// Rmsnorm (Zhang & Sennrich 2019): out = x rstd weight; returns rstd.
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
void layernorm_forward(T* out, A* mean, A* rstd, const T* x, const T* weight, const T* bias, float eps, int64_t N,
                       int64_t C) {
#pragma omp parallel for schedule(static)
  for (int64_t n = 0; n < N; ++n) detail::layernorm_row(out + n * C, mean[n], rstd[n], x + n * C, weight, bias, eps, C);
}

// sum = a + b, and its norm.
template <class T, class A = accumulator_t<T>>
void residual_layernorm_forward(T* out, A* mean, A* rstd, T* sum, const T* a, const T* b, const T* weight,
                                const T* bias, float eps, int64_t N, int64_t C) {
#pragma omp parallel for schedule(static)
  for (int64_t n = 0; n < N; ++n) {
    add_rows(sum + n * C, a + n * C, b + n * C, C);
    detail::layernorm_row(out + n * C, mean[n], rstd[n], sum + n * C, weight, bias, eps, C);
  }
}

// partials: (row_partitions, 2 C)
template <class T, class A = accumulator_t<T>>
void layernorm_backward(T* dx, A* dweight, A* dbias, A* partials, const T* dout, const T* x, const T* weight,
                        const A* mean, const A* rstd, int64_t N, int64_t C, Accumulate accumulate_dx) {
#pragma omp parallel for schedule(static)
  for (int64_t part = 0; part < row_partitions; ++part) {
    A* dw = partials + part * 2 * C;
    A* db = dw + C;
    std::fill(dw, dw + 2 * C, A(0));
    for (int64_t n = partition_begin(N, part); n < partition_begin(N, part + 1); ++n) {
      const T* g = dout + n * C;
      const T* row = x + n * C;
      T* dxn = dx + n * C;
      const A m = mean[n], r = rstd[n];
      A sum_g = 0, sum_gx = 0;  // of g w and g w xhat
#pragma omp simd reduction(+ : sum_g, sum_gx)
      for (int64_t c = 0; c < C; ++c) {
        const A normalised = (static_cast<A>(row[c]) - m) * r, gn = static_cast<A>(g[c]);
        dw[c] += gn * normalised;
        db[c] += gn;
        sum_g += gn * static_cast<A>(weight[c]);
        sum_gx += gn * static_cast<A>(weight[c]) * normalised;
      }
      const A mean_g = sum_g / static_cast<A>(C), mean_gx = sum_gx / static_cast<A>(C);
      const bool keep = accumulate_dx == Accumulate::yes;
#pragma omp simd
      for (int64_t c = 0; c < C; ++c) {
        const A normalised = (static_cast<A>(row[c]) - m) * r;
        const A d = (static_cast<A>(g[c]) * static_cast<A>(weight[c]) - mean_g - normalised * mean_gx) * r;
        store(dxn[c], (keep ? static_cast<A>(dxn[c]) : A(0)) + d);
      }
    }
  }
  add_partials(dweight, partials, 2 * C, C);
  add_partials(dbias, partials + C, 2 * C, C);
}

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
