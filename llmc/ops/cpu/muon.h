// muon.h: what Muon does to a matrix besides products. Contracts: ops/ops_muon.h.
#pragma once
#include "ops/cpu/simd.h"

namespace llmc::cpu {
inline namespace CPU_ISA {

template <class A>
void muon_direction(A* gradient, A* momentum, const double* control, int64_t n, A beta) {
  if (control[2] == 0) return;
  const A gradient_scale = static_cast<A>(control[1]);
#pragma omp parallel for simd schedule(static)
  for (int64_t i = 0; i < n; ++i) {
    const A g = gradient[i] * gradient_scale;
    momentum[i] += (A(1) - beta) * (g - momentum[i]);
    gradient[i] = g + beta * (momentum[i] - g);
  }
}

template <class T>
void divide_by_norm(T* x, const double* square_sum, int64_t n, double margin, double least) {
  using A = accumulator_t<T>;
  const A norm = static_cast<A>(std::max(margin * std::sqrt(*square_sum), least));
#pragma omp parallel for simd schedule(static)
  for (int64_t i = 0; i < n; ++i) store(x[i], static_cast<A>(x[i]) / norm);
}

template <class T, class A = accumulator_t<T>>
void linear_combination(T* out, A a, const T* x, A b, const A* y, int64_t n) {
#pragma omp parallel for simd schedule(static)
  for (int64_t i = 0; i < n; ++i) store(out[i], a * static_cast<A>(x[i]) + b * y[i]);
}

}  // namespace CPU_ISA
}  // namespace llmc::cpu
