// pack.h: packs matrices into panels of 32 columns, widened and zero-padded, so that small_matmul reads contiguous
// whole vectors and a panel fits into an L1 cache. For matmul.h and attention.h.
#pragma once
#include "ops/cpu/simd.h"

namespace llmc::cpu {
inline namespace CPU_ISA {

inline constexpr int64_t panel_width = 32;  // columns of small_matmul's kernel in fp32, of two kernels in fp64

namespace detail {

// out (K, ldo) = x (N, ldx)^T, widened, for N up to a panel: eight rows per pass, so that writes are contiguous.
template <class A, class T>
void transpose_into(A* out, int64_t ldo, const T* x, int64_t ldx, int64_t N, int64_t K) {
  constexpr int64_t rows = 8;
  int64_t n = 0;
  for (; n + rows <= N; n += rows)
    for (int64_t k = 0; k < K; ++k)
      for (int64_t r = 0; r < rows; ++r) out[k * ldo + n + r] = static_cast<A>(x[(n + r) * ldx + k]);
  for (; n < N; ++n)
    for (int64_t k = 0; k < K; ++k) out[k * ldo + n] = static_cast<A>(x[n * ldx + k]);
}

// out (ceil(C / 32), R, 32) = x (R, ldx)
template <class A, class T>
void panels_of(A* out, const T* x, int64_t ldx, int64_t R, int64_t C) {
  for (int64_t c = 0; c < C; c += panel_width, out += R * panel_width) {
    const int64_t columns = std::min(panel_width, C - c);
    if (columns < panel_width) std::fill(out, out + R * panel_width, A(0));
    for (int64_t r = 0; r < R; ++r) widen(out + r * panel_width, x + r * ldx + c, columns);
  }
}

// out (ceil(C / 32), R, 32) = x (C, ldx)^T
template <class A, class T>
void panels_of_transposed(A* out, const T* x, int64_t ldx, int64_t R, int64_t C) {
  for (int64_t c = 0; c < C; c += panel_width, out += R * panel_width) {
    const int64_t columns = std::min(panel_width, C - c);
    if (columns < panel_width) std::fill(out, out + R * panel_width, A(0));
    transpose_into(out, panel_width, x + c * ldx, ldx, columns, R);
  }
}

}  // namespace detail
}  // namespace CPU_ISA
}  // namespace llmc::cpu
