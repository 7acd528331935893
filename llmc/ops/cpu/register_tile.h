// register_tile.h: the innermost loop of a product: a tile of C that stays in registers while the panels of A and B
// that it needs are read once, in order (Goto & van de Geijn 2008; Van Zee & van de Geijn 2015); and the layout of
// those panels, which depends on how an instruction set multiplies.
#pragma once
#include "ops/cpu/simd.h"
#ifdef CPU_BF16_PAIRS
#include <immintrin.h>
#endif

namespace llmc::cpu {
inline namespace CPU_ISA {

// sums (height, columns) = or += the products of a panel of A (steps, height, group_a) and one of B (steps, columns,
// group_b).
template <class How>
using RegisterTile = void (*)(typename How::Sum* sums, const typename How::Packed* a, const typename How::Packed* b,
                              int64_t steps, Accumulate accumulate);

namespace detail {

// R rows of two vectors each.
template <class How, int R>
void vector_tile(typename How::Sum* sums, const typename How::Packed* a, const typename How::Packed* b, int64_t steps,
                 Accumulate accumulate) {
  using Vector = typename How::Vector;
  constexpr int64_t lanes = sizeof(Vector) / sizeof(typename How::Sum), group = How::group_b;
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

// Indexed by height.
template <class How>
inline constexpr auto vector_tiles = []<int... R>(std::integer_sequence<int, R...>) {
  return std::array<RegisterTile<How>, How::rows + 1>{nullptr, vector_tile<How, R + 1>...};
}
(std::make_integer_sequence<int, How::rows>{});

template <class V, class P>
V vector_at(const P* p) {
  V v;
  std::memcpy(&v, p, sizeof(v));
  return v;
}

}  // namespace detail

// How elements are multiplied: one after another, by fused multiply-add where the set has it. Operands are widened to
// A.
template <class A>
struct Multiply {
  using Packed = A;
  using Sum = A;
  using Vector = typename simd<A>::type;
  static constexpr int64_t group_a = 1, group_b = 1;  // elements of a line that lie next to each other in a panel
  static constexpr int64_t step = 1;                  // elements of a line that are multiplied at once
  static constexpr int64_t rows = vector_bytes == 64 ? 14 : 6, columns = 2 * vector_bytes / sizeof(A);
  static constexpr bool pads_rows = false;  // is the last panel of A as high as the others?
  struct Session {};                        // what a thread needs while it multiplies

  static RegisterTile<Multiply> tile(int64_t height) {
    return detail::vector_tiles<Multiply>[static_cast<size_t>(height)];
  }
  static Vector line(const Packed* b) { return detail::vector_at<Vector>(b); }
  static A element(const Packed* a) { return *a; }
  static void add(Vector& sum, A a, const Vector& b) { sum += a * b; }
};

#if defined(CPU_BF16_PAIRS) || defined(CPU_STAND_INS)
// bf16 in pairs: both products of a pair are added to an fp32, that of the second element first (AVX-512-BF16's
// vdpbf16ps). Subnormal numbers count as zeros.
struct MultiplyPairs {
  using Packed = bf16;
  using Sum = float;
  typedef float Vector __attribute__((vector_size(64)));
  typedef int32_t Pairs __attribute__((vector_size(64)));
  static constexpr int64_t group_a = 2, group_b = 2, step = 2;
  static constexpr int64_t rows = 14, columns = 32;
  static constexpr bool pads_rows = false;
  struct Session {};

  static RegisterTile<MultiplyPairs> tile(int64_t height) {
    return detail::vector_tiles<MultiplyPairs>[static_cast<size_t>(height)];
  }
  static Pairs line(const Packed* b) { return detail::vector_at<Pairs>(b); }
  static int32_t element(const Packed* a) { return detail::vector_at<int32_t>(a); }
#ifdef CPU_BF16_PAIRS
  static void add(Vector& sum, int32_t a, const Pairs& b) {
    sum = _mm512_dpbf16_ps(sum, reinterpret_cast<__m512bh>(_mm512_set1_epi32(a)), reinterpret_cast<__m512bh>(b));
  }
#else
  static void add(Vector& sum, int32_t a, const Pairs& b) {
    for (int i = 0; i < 16; ++i)
      sum[i] = multiply_add(first(a), first(b[i]), multiply_add(second(a), second(b[i]), sum[i]));
  }
#endif

  // The same in plain C++, for tests on processors without these instructions.
  static float first(int32_t pair) { return std::bit_cast<float>(pair << 16); }
  static float second(int32_t pair) { return std::bit_cast<float>(static_cast<uint32_t>(pair) & 0xffff0000u); }
  static float normal_or_zero(float x) { return std::abs(x) < 0x1p-126f ? std::copysign(0.0f, x) : x; }
  static float multiply_add(float a, float b, float sum) {
    return normal_or_zero(std::fma(normal_or_zero(a), normal_or_zero(b), normal_or_zero(sum)));
  }
};
#endif

// The height of a panel of A that has `rows` lines.
template <class How>
constexpr int64_t panel_height(int64_t rows) {
  return How::pads_rows ? How::rows : std::min(How::rows, rows);
}

}  // namespace CPU_ISA
}  // namespace llmc::cpu
