// fp8.h: eight-bit floating point, E4M3 and E5M2 (Micikevicius et al. 2022), and the powers of two that scale blocks of
// numbers for it. Every such number times such a power is exact in bf16, so a processor without fp8 computes with the
// same values.
#pragma once
#include <bit>

#include "core/std.h"

namespace llmc {

// How many numbers of a row or column share a scale.
inline constexpr int64_t fp8_block = 128;

// Sign, bits of exponent, bits of mantissa. No infinity: what is beyond the largest number is NaN.
template <int exponent_bits, int mantissa_bits, uint32_t largest_bits>
struct Float8 {
  static constexpr int bias = (1 << (exponent_bits - 1)) - 1, smallest_exponent = bias + mantissa_bits - 1;
  static constexpr uint32_t dropped = 23 - mantissa_bits;            // of the bits of an fp32
  static constexpr uint32_t offset = (127 - bias) << mantissa_bits;  // the bits are those left of an fp32, less this
  static constexpr float normal = std::bit_cast<float>(static_cast<uint32_t>(127 + 1 - bias) << 23);  // the smallest
  static constexpr float step = std::bit_cast<float>(static_cast<uint32_t>(127 - smallest_exponent) << 23);  // below it
  static constexpr float largest = std::bit_cast<float>((largest_bits + offset) << dropped);
  uint8_t bits = 0;

  // value as fp32, rounded to the nearest of these numbers, to even; at most the largest; NaN if it is not finite.
  static constexpr float rounded(float value) {
    const uint32_t u = std::bit_cast<uint32_t>(value), magnitude = u & 0x7fffffffu, half = 1u << (dropped - 1);
    const float size = std::bit_cast<float>(magnitude);
    const float of_normal =
        std::bit_cast<float>((magnitude + (half - 1) + ((magnitude >> dropped) & 1u)) & -(2 * half));
    const float below_normal = (size + step * 0x1.8p23f) - step * 0x1.8p23f;  // a multiple of step
    const float nearest = size < normal ? below_normal : of_normal;
    const uint32_t kept = std::bit_cast<uint32_t>(nearest < largest ? nearest : largest);
    return std::bit_cast<float>(magnitude < 0x7f800000u ? kept | (u & 0x80000000u) : 0x7fc00000u);
  }
  static constexpr Float8 of(float value) {
    const float size = rounded(value) < 0 ? -rounded(value) : rounded(value);
    const uint32_t sign = std::bit_cast<uint32_t>(value) >> 31 << 7;
    if (size != size) return {0x7f};
    if (size < normal) return {static_cast<uint8_t>(sign | static_cast<uint32_t>(size / step))};
    return {static_cast<uint8_t>(sign | ((std::bit_cast<uint32_t>(size) >> dropped) - offset))};
  }
  // value, at most the largest in size, rounded up or down at random with expectation `value`; random: 16 bits
  static constexpr Float8 stochastic(float value, uint32_t random) {
    const uint32_t u = std::bit_cast<uint32_t>(value), magnitude = u & 0x7fffffffu;
    const float size = std::bit_cast<float>(magnitude), steps = size < normal ? size / step : 0.0f;
    const uint32_t below_normal = static_cast<uint32_t>(steps + static_cast<float>(random) * 0x1p-16f);
    const uint32_t of_normal = ((magnitude + (random << (dropped - 16))) >> dropped) - offset;
    return {static_cast<uint8_t>((u >> 31 << 7) | (size < normal ? below_normal : std::min(of_normal, largest_bits)))};
  }
  explicit constexpr operator float() const {
    const uint32_t sign = (bits & 0x80u) << 24, size = bits & 0x7fu, subnormal = 1u << mantissa_bits;
    if (size > largest_bits) return std::bit_cast<float>(0x7fc00000u);
    const float below_normal = static_cast<float>(size) * step;
    return std::bit_cast<float>(
        sign | (size < subnormal ? std::bit_cast<uint32_t>(below_normal) : (size + offset) << dropped));
  }
};
using e4m3 = Float8<4, 3, 0x7e>;  // up to 448
using e5m2 = Float8<5, 2, 0x7b>;  // up to 57,344: gradients, whose sizes differ more
static_assert(sizeof(e4m3) == 1 && e4m3::largest == 448 && e5m2::largest == 57344);

// Not negative: five bits of exponent, three of mantissa, no numbers below the normal ones, for averages of squares.
// What is not 0 never becomes 0, since it is divided by: it becomes the smallest number.
struct e5m3 {
  static constexpr float largest = 0x1.ep16f;
  static constexpr int smallest_exponent = 15;
  static constexpr uint32_t offset = 112 << 3;  // the bits are those of an fp32, without the lower 20, less this
  uint8_t bits = 0;

  static constexpr e5m3 of(float value) {
    const uint32_t u = std::bit_cast<uint32_t>(value);
    return from_fp32(value, u + 0x7ffffu + ((u >> 20) & 1u));
  }
  // As e4m3's; unbiased from the smallest number on.
  static constexpr e5m3 stochastic(float value, uint32_t random) {
    return from_fp32(value, std::bit_cast<uint32_t>(value) + (random << 4));
  }
  explicit constexpr operator float() const { return bits == 0 ? 0.0f : std::bit_cast<float>((bits + offset) << 20); }

 private:
  static constexpr e5m3 from_fp32(float value, uint32_t rounded) {
    const uint32_t code = std::min(std::max(rounded >> 20, offset + 1) - offset, 255u);
    return {static_cast<uint8_t>(value > 0 ? code : 0u)};
  }
};
static_assert(sizeof(e5m3) == 1);

// The least power of two by which a block with this largest absolute value can be divided to be within F's range, and
// at least so large that the products of F's numbers and the power are normal numbers in bf16, or 0: from 2^-117 on for
// E4M3, 2^-110 for E5M2. NaN if it is not finite: then so are all numbers of the block.
template <class F = e4m3>
constexpr float fp8_scale(float largest) {
  constexpr uint32_t most = std::bit_cast<uint32_t>(F::largest), smallest = F::smallest_exponent + 1;
  constexpr uint32_t binades = (most >> 23) - 127;
  const uint32_t u = std::bit_cast<uint32_t>(largest) & 0x7fffffffu;
  const uint32_t exponent = u >> 23, beyond = (u & 0x7fffffu) > (most & 0x7fffffu);
  const uint32_t field = std::max(exponent + beyond, binades + smallest) - binades;
  return std::bit_cast<float>(exponent == 255 ? 0x7fc00000u : field << 23);
}
// 1 / scale, exactly.
constexpr float reciprocal_of_power(float scale) {
  return std::bit_cast<float>((254u << 23) - std::bit_cast<uint32_t>(scale));
}

}  // namespace llmc
