// rotary.cuh: rotary position embedding (Su et al. 2021), in the convention of transformers: element i of a head is
// paired with element i + D / 2. Contracts: ops/ops.h.
#pragma once
#include "ops/cuda/launch.cuh"
#include "ops/cuda/vec.cuh"
#include "ops/types.h"

namespace llmc::cuda {

namespace detail {

inline constexpr int64_t max_head_size = 512;

using Frequencies = std::array<float, max_head_size / 2>;

inline void check_even_head(const char* op, int64_t D) {
  CHECK(D % 2 == 0 && D <= max_head_size, "{}: the head size {} is not an even number up to {}", op, D, max_head_size);
}

// The cosines and sines that rotate the pairs begin ... begin + pack - 1.
template <int pack>
struct Angles {
  Floats<pack> cosines, sines;

  // table (P, D): the cosines of position p, then the sines.
  __device__ static Angles load(const float* table, int64_t position, int64_t D, int64_t begin, Turn turn) {
    const float* from = table + position * D + begin;
    Angles angles = {Floats<pack>::load(from), Floats<pack>::load(from + D / 2)};
    if (turn == Turn::backward)
      for (int i = 0; i < pack; ++i) angles.sines[i] = -angles.sines[i];
    return angles;
  }

  // Explicit fma: every kernel that rotates gets the same bits.
  template <class T>
  __device__ void turn(Packed<T, pack>& as, Packed<T, pack>& bs) const {
    for (int i = 0; i < pack; ++i) {
      const float a = as[i], b = bs[i];
      as.set(i, fmaf(a, cosines[i], -(b * sines[i])));
      bs.set(i, fmaf(b, cosines[i], a * sines[i]));
    }
  }
};

}  // namespace detail

// One block of (packs in half a head, heads) threads per row; a thread rotates the same pairs of several heads.
template <class T, int pack>
__global__ void rotary_kernel(T* __restrict__ qkv, const float* __restrict__ table,
                              const int32_t* __restrict__ positions, AttentionShape s, Turn turn) {
  using Pack = Packed<T, pack>;
  const int64_t half = s.D / 2, begin = static_cast<int64_t>(threadIdx.x) * pack;
  T* row = qkv + blockIdx.x * (s.Hq + 2 * s.Hkv) * s.D;
  const auto angles = detail::Angles<pack>::load(table, positions[blockIdx.x], s.D, begin, turn);
  for (int64_t h = threadIdx.y; h < s.Hq + s.Hkv; h += blockDim.y) {
    T* x = row + h * s.D + begin;
    Pack as = Pack::load(x), bs = Pack::load(x + half);
    angles.turn(as, bs);
    as.store(x);
    bs.store(x + half);
  }
}

// In place. qkv (B T, (Hq + 2 Hkv) D); table (P, D); positions (B T)
template <class T>
void rotary(T* qkv, const float* table, const int32_t* positions, const AttentionShape& s, Turn turn,
            cudaStream_t stream) {
  detail::check_even_head("rotary", s.D);
  with_packs<full_pack<T>>(rows_fit_packs(s.D / 2, full_pack<T>, qkv, table), [&]<int pack>() {
    const int64_t lanes = s.D / 2 / pack, heads = std::min(s.Hq + s.Hkv, ceil_div(256, lanes));
    launch(rotary_kernel<T, pack>, s.B * s.T, Grid(lanes, heads), 0, stream, qkv, table, positions, s, turn);
  });
}

// One thread per (position, pair).
template <class Float>
__global__ void rotary_table_kernel(Float* __restrict__ table, const __grid_constant__ detail::Frequencies frequencies,
                                    int64_t P, int64_t D) {
  const int64_t half = D / 2, index = item_of_thread();
  if (index >= P * half) return;
  const int64_t p = index / half, i = index % half;
  const Float angle = static_cast<Float>(p) * frequencies[static_cast<size_t>(i)];  // rounded, as transformers does
  table[p * D + i] = static_cast<Float>(cos(static_cast<double>(angle)));
  table[p * D + half + i] = static_cast<Float>(sin(static_cast<double>(angle)));
}

// table (P, D): for position p, D / 2 cosines, then D / 2 sines. The frequencies come from the CPU.
inline void rotary_table(float* table, const Rotary& rotary, int64_t P, int64_t D, cudaStream_t stream) {
  detail::check_even_head("rotary_table", D);
  detail::Frequencies frequencies = {};
  for (int64_t i = 0; i < D / 2; ++i) frequencies[static_cast<size_t>(i)] = rotary.frequency(i, D);
  launch_each(rotary_table_kernel<float>, P * D / 2, stream, table, frequencies, P, D);
}

}  // namespace llmc::cuda
