// warp_matrix.cpp: the arithmetic of mma, in which the tests of products spend most of their time.
#include "cuda_on_cpu/warp_matrix.h"

namespace cuda_on_cpu {

// Without checks of addresses, none of which come from the kernel: fragments are registers. What it calls must be
// inlined, or it is checked.
__attribute__((no_sanitize("address", "undefined"))) void multiply_fragments(MmaFragments* const* lanes) {
  float a[16][16], b[16][8], sums[16][8] = {};
  for (int lane = 0; lane < 32; ++lane) {
    const int group = lane / 4, within = lane % 4 * 2;
    const MmaFragments& f = *lanes[lane];
    const auto put = [](float* pair, int apart, uint32_t packed) __attribute__((always_inline)) {
      pair[0] = __builtin_bit_cast(float, packed << 16);  // the lower half first
      pair[apart] = __builtin_bit_cast(float, packed & 0xffff0000u);
    };
    for (int r = 0; r < 4; ++r) put(&a[group + r % 2 * 8][within + r / 2 * 8], 1, f.a[r]);
    for (int r = 0; r < 2; ++r) put(&b[within + r * 8][group], 8, f.b[r]);
  }
  for (int row = 0; row < 16; ++row)
    for (int k = 0; k < 16; ++k)
      for (int column = 0; column < 8; ++column) sums[row][column] += a[row][k] * b[k][column];
  for (int lane = 0; lane < 32; ++lane)
    for (int i = 0; i < 4; ++i) lanes[lane]->d[i] += sums[lane / 4 + i / 2 * 8][lane % 4 * 2 + i % 2];
}

}  // namespace cuda_on_cpu
