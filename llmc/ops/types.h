// types.h: what callers of an op say besides tensors and sizes; the same for every device.
#pragma once
#include <cmath>
#include <cstdint>
#include <limits>
#include <numbers>

namespace llmc {

enum class Accumulate : uint8_t { no, yes };  // is the output written, or added to?
enum class Gradient : uint8_t { no, yes };
enum class Transpose : uint8_t { no, yes };
enum class Bias : uint8_t { no, yes };

// qkv (B, T, (Hq + 2 Hkv) D): all query heads, then the keys', then the values'; query head h reads key-value head
// h / (Hq / Hkv). out (B, T, Hq D); lse (B, Hq, T)
struct AttentionShape {
  int64_t B, T, Hq, Hkv, D;
};

enum class Turn : uint8_t { forward, backward };  // of rotary positions

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

// Sums in double that all devices and vector widths add in the same order (contract 10): running sums in so many lanes,
// element i in lane i % sum_lanes; then neighbouring lanes by pairs, these by pairs, and so on. Squares are added so in
// blocks of square_sum_block elements, and then the blocks' sums.
inline constexpr int64_t sum_lanes = 1024, square_sum_block = 1 << 16;

// When the update may happen, and how its gradients are scaled.
struct UpdateRule {
  double max_norm = 0;
  double largest_loss = std::numeric_limits<double>::infinity(), largest_norm = largest_loss;
};

struct AdamWOptions {
  float lr, beta1, beta2, eps, weight_decay;
  int64_t step;       // counts from 1
  uint64_t seed = 0;  // of stochastic rounding
};

}  // namespace llmc
