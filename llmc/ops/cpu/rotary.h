// rotary.h: rotary position embedding (Su et al. 2021), in the convention of transformers: element i of a head turns
// with element i + D / 2. Contracts: ops/ops.h.
#pragma once
#include <numbers>

#include "ops/cpu/attention.h"

namespace llmc::cpu {

// How frequencies are stretched for contexts longer than those of the pre-training (Llama 3.1): low ones are divided by
// `factor`, high ones stay, in between is blended.
struct RotaryScaling {
  double factor = 8, low_freq_factor = 1, high_freq_factor = 4;
  double original_positions = 8192;
};

struct Rotary {
  double theta = 10000;
  bool scaled = false;
  RotaryScaling scaling = {};

  // The angle per position of the pair i of D / 2; in fp32, as transformers has it.
  float frequency(int64_t i, int64_t D) const {
    const double f = std::pow(theta, -2.0 * static_cast<double>(i) / static_cast<double>(D));
    if (!scaled) return static_cast<float>(f);
    const double wavelength = 2 * std::numbers::pi / f, low = scaling.original_positions / scaling.low_freq_factor,
                 high = scaling.original_positions / scaling.high_freq_factor;
    if (wavelength > low) return static_cast<float>(f / scaling.factor);
    if (wavelength < high) return static_cast<float>(f);
    const double smooth = (scaling.original_positions / wavelength - scaling.low_freq_factor) /
                          (scaling.high_freq_factor - scaling.low_freq_factor);
    return static_cast<float>((1 - smooth) * f / scaling.factor + smooth * f);
  }
};

// table (P, D): the cosines of position p, then the sines, D / 2 each.
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

enum class Turn : uint8_t { forward, backward };

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
