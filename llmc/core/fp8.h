// fp8.h: eight-bit floating point, E4M3 (Micikevicius et al. 2022), and the powers of two that scale blocks of numbers
// for it. Every E4M3 number times such a power is exact in bf16, so a processor without fp8 computes with the same
// values.
#pragma once
#include <algorithm>
#include <bit>
#include <cstdint>

namespace llmc {

// How many numbers of a row or column share a scale.
inline constexpr int64_t fp8_block = 128;

// Sign, four bits of exponent (bias 7), three of mantissa. No infinity; all bits set but the sign: NaN.
struct e4m3 {
  static constexpr float largest = 448;
  uint8_t bits = 0;

  // value as fp32, rounded to the nearest E4M3 number, to even; beyond the largest: the largest; NaN if it is not
  // finite.
  static constexpr float rounded(float value) {
    const uint32_t u = std::bit_cast<uint32_t>(value), magnitude = u & 0x7fffffffu;
    const float size = std::bit_cast<float>(magnitude);
    const float normal = std::bit_cast<float>((magnitude + 0x7ffffu + ((magnitude >> 20) & 1u)) & 0xfff00000u);
    const float below_normal = (size + 0x1.8p14f) - 0x1.8p14f;  // a multiple of 2^-9
    const float nearest = size < 0x1p-6f ? below_normal : normal;
    const uint32_t kept = std::bit_cast<uint32_t>(nearest < largest ? nearest : largest);
    return std::bit_cast<float>(magnitude < 0x7f800000u ? kept | (u & 0x80000000u) : 0x7fc00000u);
  }
  static constexpr e4m3 of(float value) {
    const float size = rounded(value) < 0 ? -rounded(value) : rounded(value);
    const uint32_t sign = std::bit_cast<uint32_t>(value) >> 31 << 7;
    if (size != size) return {0x7f};
    if (size < 0x1p-6f) return {static_cast<uint8_t>(sign | static_cast<uint32_t>(size * 0x1p9f))};
    return {static_cast<uint8_t>(sign | ((std::bit_cast<uint32_t>(size) >> 20) - ((127 - 7) << 3)))};
  }
  // value, at most the largest in size, rounded up or down at random with expectation `value`; random: 16 bits
  static constexpr e4m3 stochastic(float value, uint32_t random) {
    const uint32_t u = std::bit_cast<uint32_t>(value), magnitude = u & 0x7fffffffu;
    const float size = std::bit_cast<float>(magnitude), steps = size < 0x1p-6f ? size * 0x1p9f : 0.0f;
    const uint32_t below_normal = static_cast<uint32_t>(steps + static_cast<float>(random) * 0x1p-16f);
    const uint32_t normal = ((magnitude + (random << 4)) >> 20) - ((127 - 7) << 3);
    return {static_cast<uint8_t>((u >> 31 << 7) | (size < 0x1p-6f ? below_normal : std::min(normal, 0x7eu)))};
  }
  explicit constexpr operator float() const {
    const uint32_t sign = (bits & 0x80u) << 24, exponent = (bits >> 3) & 15u, mantissa = bits & 7u;
    if ((bits & 0x7fu) == 0x7fu) return std::bit_cast<float>(0x7fc00000u);
    if (exponent == 0)
      return std::bit_cast<float>(sign | std::bit_cast<uint32_t>(static_cast<float>(mantissa) * 0x1p-9f));
    return std::bit_cast<float>(sign | ((exponent + 127 - 7) << 23) | (mantissa << 20));
  }
};
static_assert(sizeof(e4m3) == 1);

// Not negative: five bits of exponent, three of mantissa, no numbers below the normal ones, for averages of squares.
// What is not 0 never becomes 0, since it is divided by: it becomes the smallest number.
struct e5m3 {
  static constexpr float largest = 0x1.ep16f;
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

// The least power of two, from 2^-117 on, by which a block with this largest absolute value can be divided to be within
// E4M3's range: then the products of its numbers and the power are normal numbers in bf16, or 0. NaN if it is not
// finite: then so are all numbers of the block.
constexpr float fp8_scale(float largest) {
  const uint32_t u = std::bit_cast<uint32_t>(largest) & 0x7fffffffu;
  const uint32_t exponent = u >> 23, beyond = (u & 0x7fffffu) > 0x600000u;  // 448 is 1.75 times 2^8
  const uint32_t field = std::max(exponent + beyond, 8u + 10u) - 8u;
  return std::bit_cast<float>(exponent == 255 ? 0x7fc00000u : field << 23);
}
// The same for e5m3, from 2^-111 on.
constexpr float e5m3_scale(float largest) {
  const uint32_t u = std::bit_cast<uint32_t>(largest) & 0x7fffffffu;
  const uint32_t exponent = u >> 23, beyond = (u & 0x7fffffu) > 0x700000u;  // the largest is 1.875 times 2^16
  const uint32_t field = std::max(exponent + beyond, 16u + 16u) - 16u;
  return std::bit_cast<float>(exponent == 255 ? 0x7fc00000u : field << 23);
}
// 1 / scale, exactly.
constexpr float reciprocal_of_power(float scale) {
  return std::bit_cast<float>((254u << 23) - std::bit_cast<uint32_t>(scale));
}

}  // namespace llmc
