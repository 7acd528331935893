// register_tile.h: the innermost loop of a product: a tile of C that stays in registers while the panels of A and B
// that it needs are read once, in order (Goto & van de Geijn 2008; Van Zee & van de Geijn 2015). And the layout of
// those panels, which depends on how an instruction set multiplies.
#pragma once
#include <array>
#include <utility>

#include "ops/cpu/simd.h"
#ifdef CPU_BF16_PAIRS
#include <immintrin.h>
#endif

namespace llmc::cpu::inline CPU_ISA {

// How elements are multiplied: one after another, by fused multiply-add where the set has it. Operands are widened to
// A.
template <class A>
struct Multiply {
  using Packed = A;
  using Sum = A;
  using Vector = typename simd<A>::type;
  static constexpr int64_t group = 1;  // elements of a line that lie next to each other, and are multiplied at once
  static constexpr int64_t rows = vector_bytes == 64 ? 14 : 6, columns = 2 * vector_bytes / sizeof(A);

  static Vector line(const Packed* b) {
    Vector v;
    std::memcpy(&v, b, sizeof(v));
    return v;
  }
  static A element(const Packed* a) { return *a; }
  static void add(Vector& sum, A a, const Vector& b) { sum += a * b; }
};

#ifdef CPU_BF16_PAIRS
// bf16 in pairs, whose two products are added to an fp32 (AVX-512-BF16's vdpbf16ps).
struct MultiplyPairs {
  using Packed = bf16;
  using Sum = float;
  using Vector = simd<float>::type;
  static constexpr int64_t group = 2;
  static constexpr int64_t rows = 14, columns = 32;

  static __m512i line(const Packed* b) { return _mm512_loadu_si512(b); }
  static int32_t element(const Packed* a) {
    int32_t pair;
    std::memcpy(&pair, a, sizeof(pair));
    return pair;
  }
  static void add(Vector& sum, int32_t a, const __m512i& b) {
    sum = _mm512_dpbf16_ps(sum, reinterpret_cast<__m512bh>(_mm512_set1_epi32(a)), reinterpret_cast<__m512bh>(b));
  }
};
#endif

namespace detail {

// sums (R, columns) = or += the products of a panel of A (steps, R, group) and one of B (steps, columns, group).
template <class How, int R>
void register_tile(typename How::Sum* sums, const typename How::Packed* a, const typename How::Packed* b, int64_t steps,
                   Accumulate accumulate) {
  using Vector = typename How::Vector;
  constexpr int64_t lanes = sizeof(Vector) / sizeof(typename How::Sum), group = How::group;
  Vector sum[R][2];
  for (int r = 0; r < R; ++r)  // vector by vector: one memcpy() of all would be a slow string instruction
    for (int v = 0; v < 2; ++v) {
      sum[r][v] = Vector{};
      if (accumulate == Accumulate::yes) std::memcpy(&sum[r][v], sums + (2 * r + v) * lanes, sizeof(Vector));
    }
  for (int64_t k = 0; k < steps; ++k, a += R * group, b += How::columns * group) {
    const auto b0 = How::line(b), b1 = How::line(b + lanes * group);
    for (int r = 0; r < R; ++r) {
      const auto x = How::element(a + r * group);
      How::add(sum[r][0], x, b0);
      How::add(sum[r][1], x, b1);
    }
  }
  for (int r = 0; r < R; ++r)
    for (int v = 0; v < 2; ++v) std::memcpy(sums + (2 * r + v) * lanes, &sum[r][v], sizeof(Vector));
}

// By number of rows.
template <class How>
using RegisterTile = void (*)(typename How::Sum*, const typename How::Packed*, const typename How::Packed*, int64_t,
                              Accumulate);
template <class How>
inline constexpr auto register_tiles = []<int... R>(std::integer_sequence<int, R...>) {
  return std::array<RegisterTile<How>, How::rows + 1>{nullptr, register_tile<How, R + 1>...};
}
(std::make_integer_sequence<int, How::rows>{});

}  // namespace detail
}  // namespace llmc::cpu::inline CPU_ISA
