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

// sums: two doubles for each row
template <class T, class A = accumulator_t<T>>
void normalise_rows(T* x, A* second_moments, double* sums, const double* control, int64_t rows, int64_t columns,
                    double beta2) {
  double *const squares = sums, *const divided = sums + rows;
#pragma omp parallel for schedule(static)
  for (int64_t i = 0; i < rows; ++i) {
    const T* row = x + i * columns;
    double square = 0;
#pragma omp simd reduction(+ : square)
    for (int64_t j = 0; j < columns; ++j)
      square += static_cast<double>(static_cast<A>(row[j])) * static_cast<A>(row[j]);
    const double mean = square / static_cast<double>(columns);
    if (control[2] != 0) second_moments[i] = static_cast<A>(beta2 * second_moments[i] + (1 - beta2) * mean);
    squares[i] = square, divided[i] = square * std::pow(row_factor(second_moments[i]), 2);
  }
  double before = 0, after = 0;
  for (int64_t i = 0; i < rows; ++i) before += squares[i], after += divided[i];
  const double whole = after > 0 ? std::sqrt(before / after) : 0;
#pragma omp parallel for schedule(static)
  for (int64_t i = 0; i < rows; ++i) {
    const A factor = static_cast<A>(whole * row_factor(second_moments[i]));
    T* row = x + i * columns;
#pragma omp simd
    for (int64_t j = 0; j < columns; ++j) store(row[j], static_cast<A>(row[j]) * factor);
  }
}

}  // namespace CPU_ISA
}  // namespace llmc::cpu
