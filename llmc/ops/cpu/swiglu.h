// swiglu.h: SwiGLU (Shazeer 2020): silu(gate) up, silu(x) = x sigmoid(x). Contracts: ops/ops.h.
#pragma once
#include "ops/cpu/simd.h"

namespace llmc::cpu {
inline namespace CPU_ISA {

// rows: how many of the N rows are valid; nullptr: all
template <class T, class A = accumulator_t<T>>
void swiglu_forward(T* out, const T* gate_up, int64_t N, int64_t F, const int32_t* rows = nullptr) {
  if (rows != nullptr) N = *rows;
#pragma omp parallel for schedule(static)
  for (int64_t n = 0; n < N; ++n) {
    const T *gate = gate_up + n * 2 * F, *up = gate + F;
#pragma omp simd
    for (int64_t f = 0; f < F; ++f) {
      const A g = static_cast<A>(gate[f]);
      store(out[n * F + f], g / (A(1) + exponential(-g)) * static_cast<A>(up[f]));
    }
  }
}

template <class T, class A = accumulator_t<T>>
void swiglu_backward(T* dgate_up, const T* dout, const T* gate_up, int64_t N, int64_t F,
                     const int32_t* rows = nullptr) {
  if (rows != nullptr) N = *rows;
#pragma omp parallel for schedule(static)
  for (int64_t n = 0; n < N; ++n) {
    const T *gate = gate_up + n * 2 * F, *up = gate + F;
    T *dgate = dgate_up + n * 2 * F, *dup = dgate + F;
#pragma omp simd
    for (int64_t f = 0; f < F; ++f) {
      const A g = static_cast<A>(gate[f]), d = static_cast<A>(dout[n * F + f]);
      const A s = A(1) / (A(1) + exponential(-g));
      store(dgate[f], d * static_cast<A>(up[f]) * s * (A(1) + g * (A(1) - s)));
      store(dup[f], d * g * s);
    }
  }
}

}  // namespace CPU_ISA
}  // namespace llmc::cpu
