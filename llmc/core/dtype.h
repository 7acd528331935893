// dtype.h: element types, their names and sizes, and conversions between fp32 and bf16.
#pragma once
#include "core/check.h"
#include "core/fp8.h"

namespace llmc {

enum class DType : uint8_t { fp32, bf16, fp16, fp64, int32, e4m3, e5m3, int16 };

constexpr auto names_of_values(DType) {
  return std::array{"fp32", "bf16", "fp16", "fp64", "int32", "e4m3", "e5m3", "int16"};
}

inline int64_t size_of(DType dtype) {
  constexpr std::array<int64_t, 8> bytes = {4, 2, 2, 8, 4, 1, 1, 2};  // in the order of the enum
  return bytes[static_cast<size_t>(dtype)];
}

// bfloat16: the upper half of an fp32. Same bits as __nv_bfloat16. Arithmetic widens to fp32 first.
struct bf16 {
  uint16_t bits = 0;
  bf16() = default;
  explicit bf16(float value) : bits(rounded_bits(value)) {}
  // Rounds to nearest even; NaN stays NaN.
  static constexpr uint16_t rounded_bits(float value) {
    const uint32_t u = std::bit_cast<uint32_t>(value);
    const uint32_t rounded = (u + 0x7fffu + ((u >> 16) & 1u)) >> 16;
    return static_cast<uint16_t>((u & 0x7fffffffu) > 0x7f800000u ? (u >> 16) | 0x40u : rounded);
  }
  // Rounds up or down at random with expectation `value`; uses 16 bits of `random`. Infinity and NaN are kept.
  static constexpr uint16_t stochastic_bits(float value, uint32_t random) {
    const uint32_t u = std::bit_cast<uint32_t>(value);
    return (u & 0x7f800000u) == 0x7f800000u ? rounded_bits(value) : static_cast<uint16_t>((u + (random >> 16)) >> 16);
  }
  explicit operator float() const { return std::bit_cast<float>(static_cast<uint32_t>(bits) << 16); }
  explicit operator double() const { return static_cast<double>(static_cast<float>(*this)); }
};
static_assert(sizeof(bf16) == 2);

// fp32 numbers as the bf16 that they round to and 16 bits more (--master-weights split): what must be added to the
// bf16's bits, as the upper half of the fp32's. Of two ties around a bf16 with an even last bit, only one has a place:
// splittable() moves the one that rounds down by one unit, 2^-24 of its size at most, toward 0.
constexpr float splittable(float value) {
  const uint32_t u = std::bit_cast<uint32_t>(value);
  return std::bit_cast<float>(u - ((u & 0x1ffffu) == 0x8000u ? 1u : 0u));
}
// Of a splittable number.
constexpr int16_t lower_half(float value) { return static_cast<int16_t>(std::bit_cast<uint32_t>(value) & 0xffffu); }
constexpr float joined_halves(uint16_t upper, int16_t lower) {
  return std::bit_cast<float>((static_cast<uint32_t>(upper) << 16) +
                              static_cast<uint32_t>(static_cast<int32_t>(lower)));
}

// out = value, rounded to the type of out. For loops that must vectorise: g++ does not vectorise assigning a struct.
inline void store(bf16& out, float value) { out.bits = bf16::rounded_bits(value); }
inline void store(float& out, float value) { out = value; }
inline void store(double& out, double value) { out = value; }

// IEEE half precision, for reading files only.
struct fp16 {
  uint16_t bits = 0;
  explicit operator float() const {
    const uint32_t sign = (bits & 0x8000u) << 16, exponent = (bits >> 10) & 31u, mantissa = bits & 0x3ffu;
    if (exponent == 31) return std::bit_cast<float>(sign | 0x7f800000u | (mantissa << 13));
    if (exponent == 0)
      return std::bit_cast<float>(sign | std::bit_cast<uint32_t>(static_cast<float>(mantissa) * 0x1p-24f));
    return std::bit_cast<float>(sign | ((exponent + 112) << 23) | (mantissa << 13));
  }
};

// The type in which ops compute and gradients accumulate: fp32, or double in ops of doubles, for finite differences.
template <class T>
using accumulator_t = std::conditional_t<std::is_same_v<T, double>, double, float>;

template <class T>
using type_tag = std::type_identity<T>;

constexpr DType dtype_of(type_tag<float>) { return DType::fp32; }
constexpr DType dtype_of(type_tag<bf16>) { return DType::bf16; }
constexpr DType dtype_of(type_tag<fp16>) { return DType::fp16; }
constexpr DType dtype_of(type_tag<double>) { return DType::fp64; }
constexpr DType dtype_of(type_tag<int32_t>) { return DType::int32; }
constexpr DType dtype_of(type_tag<e4m3>) { return DType::e4m3; }
constexpr DType dtype_of(type_tag<e5m3>) { return DType::e5m3; }
constexpr DType dtype_of(type_tag<int16_t>) { return DType::int16; }
template <class T>
constexpr DType dtype_of() {
  return dtype_of(type_tag<T>{});
}

// Calls f(type_tag<T>{}) with the C++ type of a floating-point dtype that ops compute with.
template <class F>
void with_type(DType dtype, F&& f) {
  switch (dtype) {
    case DType::fp32: return f(type_tag<float>{});
    case DType::bf16: return f(type_tag<bf16>{});
    case DType::fp64: return f(type_tag<double>{});
    default: throw Error(formatted("no op computes in {}: use fp32 or bf16", dtype));
  }
}

}  // namespace llmc
