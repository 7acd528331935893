// types.h: arguments of ops other than tensors and sizes; the same on every device.
#pragma once
#include <cmath>
#include <cstdint>
#include <limits>
#include <numbers>

namespace llmc {

enum class Accumulate : uint8_t { no, yes };  // is the output overwritten or added to?
enum class Gradient : uint8_t { no, yes };
enum class Transpose : uint8_t { no, yes };
enum class Bias : uint8_t { no, yes };

// Bytes of cuBLASLt's work space: NVIDIA's recommendation for Hopper. A fixed size, not what an algorithm needs, so
// that it can be planned without a GPU.
inline constexpr int64_t gpu_matmul_workspace = 32 << 20;

// qkv (B, T, (Hq + 2 Hkv) D): all query heads, then key heads, then value heads; query head h reads key-value head h /
// (Hq / Hkv). out (B, T, Hq D); lse (B, Hq, T)
struct AttentionShape {
  int64_t B, T, Hq, Hkv, D;
};

enum class Turn : uint8_t { forward, backward };  // direction of the rotation by rotary positions

// Which elements of a parameter a flat tensor has: those of a box of it (rows x columns, row by row) from element
// `begin` of the box on. What depends on an element's place in the whole parameter, as random numbers do, asks index().
struct Elements {
  int64_t begin = 0;
  int64_t first = 0;                // index in the parameter of the box's first element
  int64_t columns = 1, stride = 1;  // of the box, and of the parameter; equal where the box has whole rows

  // The index in the parameter of element i of the tensor.
  constexpr int64_t index(int64_t i) const {
    const int64_t in_box = begin + i;
    return columns == stride ? first + in_box : first + in_box / columns * stride + in_box % columns;
  }
  // How many elements from element i on follow each other in the parameter.
  constexpr int64_t run(int64_t i) const {
    return columns == stride ? std::numeric_limits<int64_t>::max() : columns - (begin + i) % columns;
  }
};

// Tokens [first, first + size) of a vocabulary: those whose rows of a table, or columns of the logits, a rank has.
struct Vocabulary {
  int64_t first = 0, size = -1;  // size -1: all tokens

  constexpr bool has(int64_t token) const { return size < 0 || (token >= first && token < first + size); }
};

// How rotary frequencies are scaled for contexts longer than those of pretraining (Llama 3.1): low ones are divided by
// `factor`, high ones are kept, those in between are interpolated.
struct RotaryScaling {
  double factor = 8, low_freq_factor = 1, high_freq_factor = 4;
  double original_positions = 8192;
};

struct Rotary {
  double theta = 10000;
  bool scaled = false;
  RotaryScaling scaling = {};

  // The angle per position of pair i of D / 2; in fp32, as in transformers.
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

// Sums in double that all devices and vector widths add in the same order (contract 10): sum_lanes running sums,
// element i in lane i % sum_lanes, then a pairwise tree over neighbouring lanes. Squares are summed so in blocks of
// square_sum_block elements, then over the blocks.
inline constexpr int64_t sum_lanes = 1024, square_sum_block = 1 << 16;

// When an update is allowed, and how its gradients are scaled.
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
