// types.h: CUDA's qualifiers, index types and vector types, for a host compiler.
#pragma once
#include <cstddef>
#include <cstdint>

#define __global__
#define __device__
#define __host__
#define __constant__
#define __forceinline__ inline __attribute__((always_inline))
#define __launch_bounds__(...)
#define __grid_constant__
#define __align__(n) alignas(n)

struct uint3 {
  unsigned x, y, z;
};
struct dim3 {
  unsigned x, y, z;
  constexpr dim3(unsigned x_ = 1, unsigned y_ = 1, unsigned z_ = 1) : x(x_), y(y_), z(z_) {}
};

// Aligned as in CUDA, so that UndefinedBehaviorSanitizer finds addresses that a GPU would reject.
#define CUDA_ON_CPU_VECTORS(base, name)                                   \
  struct alignas(2 * sizeof(base)) name##2 {                              \
    base x, y;                                                            \
  };                                                                      \
  struct alignas(4 * sizeof(base) < 16 ? 4 * sizeof(base) : 16) name##4 { \
    base x, y, z, w;                                                      \
  };                                                                      \
  constexpr name##2 make_##name##2(base x, base y) { return {x, y}; }     \
  constexpr name##4 make_##name##4(base x, base y, base z, base w) { return {x, y, z, w}; }
CUDA_ON_CPU_VECTORS(unsigned char, uchar)
CUDA_ON_CPU_VECTORS(short, short)
CUDA_ON_CPU_VECTORS(unsigned short, ushort)
CUDA_ON_CPU_VECTORS(int, int)
CUDA_ON_CPU_VECTORS(unsigned, uint)
CUDA_ON_CPU_VECTORS(float, float)
#undef CUDA_ON_CPU_VECTORS
struct alignas(16) double2 {
  double x, y;
};
constexpr double2 make_double2(double x, double y) { return {x, y}; }
