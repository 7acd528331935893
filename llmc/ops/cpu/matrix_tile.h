// matrix_tile.h: a tile of C computed with AMX, whose registers hold matrices of 16 rows of 64 bytes (Intel 64 and
// IA-32 Architectures Software Developer's Manual, volume 1, chapter 18); and the same in plain C++, bit for bit, for
// tests on processors that lack it.
#pragma once
#include "ops/cpu/register_tile.h"

namespace llmc::cpu {
inline namespace CPU_ISA {

#if defined(CPU_AMX) || defined(CPU_STAND_INS)

namespace detail {

#ifdef CPU_AMX

// Makes writes to memory visible to the instructions that read it: g++ 12's intrinsics do not say what they read.
template <class... Memory>
void written(const Memory*... memory) {
  (..., [&] { __asm__ volatile("" : : "r"(memory) : "memory"); }());
}

// Registers 0 to 3 are a tile of C, 4 and 5 of A, 6 and 7 of B.
struct MatrixRegisters {
  MatrixRegisters() {
    struct {
      uint8_t palette = 1, start_row = 0, reserved[14] = {};
      uint16_t row_bytes[16] = {64, 64, 64, 64, 64, 64, 64, 64};
      uint8_t rows[16] = {16, 16, 16, 16, 16, 16, 16, 16};
    } const configuration;
    static_assert(sizeof(configuration) == 64);
    written(&configuration);
    _tile_loadconfig(&configuration);
  }
  ~MatrixRegisters() { _tile_release(); }
  MatrixRegisters(const MatrixRegisters&) = delete;
  MatrixRegisters& operator=(const MatrixRegisters&) = delete;
};

inline void matrix_tile(float* sums, const bf16* a, const bf16* b, int64_t steps, Accumulate accumulate) {
  constexpr int64_t of_sums = 32 * sizeof(float), of_a = 64, of_b = 128;  // bytes from row to row
  written(sums, a, b);
  if (accumulate == Accumulate::yes) {
    _tile_loadd(0, sums, of_sums);
    _tile_loadd(1, sums + 16, of_sums);
    _tile_loadd(2, sums + 16 * 32, of_sums);
    _tile_loadd(3, sums + 16 * 32 + 16, of_sums);
  } else {
    _tile_zero(0);
    _tile_zero(1);
    _tile_zero(2);
    _tile_zero(3);
  }
  for (int64_t k = 0; k < steps; ++k, a += 32 * 32, b += 32 * 32) {
    _tile_loadd(4, a, of_a);
    _tile_loadd(6, b, of_b);
    _tile_loadd(7, b + 32, of_b);
    _tile_loadd(5, a + 16 * 32, of_a);
    _tile_dpbf16ps(0, 4, 6);
    _tile_dpbf16ps(1, 4, 7);
    _tile_dpbf16ps(2, 5, 6);
    _tile_dpbf16ps(3, 5, 7);
  }
  _tile_stored(0, sums, of_sums);
  _tile_stored(1, sums + 16, of_sums);
  _tile_stored(2, sums + 16 * 32, of_sums);
  _tile_stored(3, sums + 16 * 32 + 16, of_sums);
}

#else

struct MatrixRegisters {};

// In each step of 32 elements, the products of even and of odd elements are summed separately, then added to C.
[[gnu::always_inline]] inline void plain_matrix_tile(float* sums, const bf16* a, const bf16* b, int64_t steps,
                                                     Accumulate accumulate) {
  if (accumulate == Accumulate::no) std::fill_n(sums, 32 * 32, 0.0f);
  const auto add = [](float x, float y) { return MultiplyPairs::multiply_add(x, 1, y); };
  for (int64_t k = 0; k < steps; ++k, a += 32 * 32, b += 32 * 32)
    for (int64_t i = 0; i < 32; ++i) {
      float* const sum = sums + i * 32;
      float even[32] = {}, odd[32] = {};
      for (int64_t p = 0; p < 16; ++p) {
        const bf16 *x = a + i * 32 + 2 * p, *y = b + p * 64;
        const float x0 = static_cast<float>(x[0]), x1 = static_cast<float>(x[1]);
#pragma omp simd
        for (int64_t j = 0; j < 32; ++j) {
          const int32_t pair = vector_at<int32_t>(y + 2 * j);
          even[j] = MultiplyPairs::multiply_add(x0, MultiplyPairs::first(pair), even[j]);
          odd[j] = MultiplyPairs::multiply_add(x1, MultiplyPairs::second(pair), odd[j]);
        }
      }
#pragma omp simd
      for (int64_t j = 0; j < 32; ++j) sum[j] = add(sum[j], add(even[j], odd[j]));
    }
}
inline void matrix_tile(float* sums, const bf16* a, const bf16* b, int64_t steps, Accumulate accumulate) {
  plain_matrix_tile(sums, a, b, steps, accumulate);
}
#ifdef __x86_64__
// With the processor's fused multiply-add; without it, each one is a function call.
[[gnu::target("avx2,fma")]] inline void matrix_tile_with_fma(float* sums, const bf16* a, const bf16* b, int64_t steps,
                                                             Accumulate accumulate) {
  plain_matrix_tile(sums, a, b, steps, accumulate);
}
#endif

#endif
}  // namespace detail

// bf16 in tiles of 32 x 32 sums, 32 elements of each line at a time. In a panel, A has the elements of a line next to
// each other, and B has pairs of them. Panels of A are padded to 32 rows.
struct MultiplyTiles {
  using Packed = bf16;
  using Sum = float;
  static constexpr int64_t group_a = 32, group_b = 2, step = 32;
  static constexpr int64_t rows = 32, columns = 32;
  static constexpr bool pads_rows = true;
  using Session = detail::MatrixRegisters;
  static RegisterTile<MultiplyTiles> tile(int64_t) {
#if defined(CPU_STAND_INS) && defined(__x86_64__)
    if (__builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma")) return detail::matrix_tile_with_fma;
#endif
    return detail::matrix_tile;
  }
};

#endif

}  // namespace CPU_ISA
}  // namespace llmc::cpu
