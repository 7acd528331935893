// rotary.h: rotary position embedding (Su et al. 2021), in the convention of transformers: element i of a head is
// paired with element i + D / 2. Contracts: ops/ops.h.
#pragma once
#include "ops/cpu/simd.h"

namespace llmc::cpu {

// table (P, D): for position p, D / 2 cosines, then D / 2 sines.
template <class A>
void rotary_table(A* table, const Rotary& rotary, int64_t P, int64_t D) {
#pragma omp parallel for schedule(static)
  for (int64_t p = 0; p < P; ++p)
    for (int64_t i = 0; i < D / 2; ++i) {
      const float angle = static_cast<float>(p) * rotary.frequency(i, D);  // rounded to fp32, as transformers does
      table[p * D + i] = static_cast<A>(std::cos(static_cast<double>(angle)));
      table[p * D + D / 2 + i] = static_cast<A>(std::sin(static_cast<double>(angle)));
    }
}

template <class T, class A = accumulator_t<T>>
void rotary(T* qkv, const A* table, const int32_t* positions, const AttentionShape& s, Turn turn) {
  const int64_t row = (s.Hq + 2 * s.Hkv) * s.D, half = s.D / 2;
  const A sign = turn == Turn::forward ? A(1) : A(-1);
#pragma omp parallel for schedule(static)
  for (int64_t n = 0; n < s.B * s.T; ++n) {
    const A *cosines = table + positions[n] * s.D, *sines = cosines + half;
    for (int64_t h = 0; h < s.Hq + s.Hkv; ++h) {
      T* x = qkv + n * row + h * s.D;
#pragma omp simd
      for (int64_t i = 0; i < half; ++i) {
        const A a = static_cast<A>(x[i]), b = static_cast<A>(x[i + half]);
        store(x[i], a * cosines[i] - sign * b * sines[i]);
        store(x[i + half], b * cosines[i] + sign * a * sines[i]);
      }
    }
  }
}

}  // namespace llmc::cpu
