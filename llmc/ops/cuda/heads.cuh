// heads.cuh: ops on query and key heads: rotary position embedding (Su et al. 2021), in the convention of transformers,
// where element i of a head is paired with element i + D / 2; rmsnorm of every head (Henry et al. 2020; Qwen3), with
// statistics in fp32, alone or fused with rotary embedding. Contracts: ops/ops_heads.h.
#pragma once
#include "ops/cuda/column_sum.cuh"
#include "ops/cuda/reduce.cuh"

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

// The frequencies come from the CPU.
inline void rotary_table(float* table, const Rotary& rotary, int64_t P, int64_t D, cudaStream_t stream) {
  detail::check_even_head("rotary_table", D);
  detail::Frequencies frequencies = {};
  for (int64_t i = 0; i < D / 2; ++i) frequencies[static_cast<size_t>(i)] = rotary.frequency(i, D);
  launch_each(rotary_table_kernel<float>, P * D / 2, stream, table, frequencies, P, D);
}

// ---- Query-key norm. A group of lanes takes a head; each lane holds packs of the first half, and their counterparts
// half a head further on, in registers.

namespace detail {

enum class Turning : uint8_t { no, yes };

// A lane's part of a head: packs at first, first + stride, ... below D / 2, and their counterparts at + D / 2. Sized
// for the largest head with a whole warp per head.
template <class T, int pack>
struct HeadLane {
  using Pack = Packed<T, pack>;
  static constexpr int packs = static_cast<int>(max_head_size) / 2 / warp_size / pack;
  int64_t first, stride, half;

  __device__ HeadLane(int lanes, int64_t D) : first(threadIdx.x % lanes * pack), stride(lanes * pack), half(D / 2) {}

  // f(index of the pack, its first element) for each pack; unrolled, so that arrays stay in registers.
  template <class F>
  __device__ void each(F f) const {
#pragma unroll
    for (int j = 0; j < packs; ++j)
      if (first + j * stride < half) f(j, first + j * stride);
  }
};

// The sum over the lanes of a group; all lanes of the warp take part.
__device__ inline float group_sum(float x, int lanes) {
  for (int distance = lanes / 2; distance > 0; distance /= 2) x += __shfl_xor_sync(all_lanes, x, distance);
  return x;
}

// Lanes per head: a power of two, so that a group lies within one warp.
inline int head_lanes(int64_t D, int pack) {
  int lanes = 1;
  while (lanes < warp_size && lanes * pack < D / 2) lanes *= 2;
  return lanes;
}

}  // namespace detail

// One block per row, one group of lanes per head at a time. Without turning, table and positions are unused.
template <class T, int pack, detail::Turning turning>
__global__ void qk_norm_forward_kernel(T* __restrict__ out, float* __restrict__ rstd, const T* __restrict__ qkv,
                                       const T* __restrict__ q_weight, const T* __restrict__ k_weight,
                                       const float* __restrict__ table, const int32_t* __restrict__ positions,
                                       float eps, AttentionShape s, int lanes) {
  using Pack = Packed<T, pack>;
  using Lane = detail::HeadLane<T, pack>;
  const Lane lane(lanes, s.D);
  const int64_t n = blockIdx.x, normed = s.Hq + s.Hkv, heads = normed + s.Hkv, groups = blockDim.x / lanes;
  for (int64_t begin = 0; begin < heads; begin += groups) {  // same trip count in every lane: they sum together
    const int64_t h = begin + threadIdx.x / lanes, at = (n * heads + h) * s.D;
    Pack as[Lane::packs], bs[Lane::packs];
    float squares = 0;
    if (h < heads)
      lane.each([&](int j, int64_t i) {
        as[j] = Pack::load_streaming(qkv + at + i);
        bs[j] = Pack::load_streaming(qkv + at + lane.half + i);
        for (int e = 0; e < pack; ++e) squares += as[j][e] * as[j][e] + bs[j][e] * bs[j][e];
      });
    const float r = 1.0f / sqrtf(detail::group_sum(squares, lanes) / static_cast<float>(s.D) + eps);
    if (h >= heads) continue;
    if (h < normed) {
      if (threadIdx.x % lanes == 0) rstd[n * normed + h] = r;
      const T* weight = h < s.Hq ? q_weight : k_weight;
      lane.each([&](int j, int64_t i) {
        const Pack a_weights = Pack::load(weight + i), b_weights = Pack::load(weight + lane.half + i);
        for (int e = 0; e < pack; ++e) {
          as[j].set(e, as[j][e] * r * a_weights[e]);  // rounded before the rotation, as in the two separate ops
          bs[j].set(e, bs[j][e] * r * b_weights[e]);
        }
        if constexpr (turning == detail::Turning::yes)
          detail::Angles<pack>::load(table, positions[n], s.D, i, Turn::forward).turn(as[j], bs[j]);
      });
    }
    lane.each([&](int j, int64_t i) {
      as[j].store(out + at + i);
      bs[j].store(out + at + lane.half + i);
    });
  }
}

// Grid (parts, 2): a block takes the query heads or the key heads of a part of the rows, one group of lanes per head at
// a time. partials (parts, 2 D): dq_weight, dk_weight. Dynamic shared memory: (groups, D) floats.
template <class T, int pack, detail::Turning turning>
__global__ void qk_norm_backward_kernel(T* __restrict__ dqkv, float* __restrict__ partials, const T* __restrict__ qkv,
                                        const T* __restrict__ q_weight, const T* __restrict__ k_weight,
                                        const float* __restrict__ rstd, const float* __restrict__ table,
                                        const int32_t* __restrict__ positions, AttentionShape s, int lanes) {
  using Pack = Packed<T, pack>;
  using Lane = detail::HeadLane<T, pack>;
  DYN_SHARED(float, dweights);  // (groups, D)
  const Lane lane(lanes, s.D);
  const bool queries = blockIdx.y == 0;
  const int64_t normed = s.Hq + s.Hkv, heads = normed + s.Hkv, first_head = queries ? 0 : s.Hq;
  const unsigned head_count = static_cast<unsigned>(queries ? s.Hq : s.Hkv);
  const unsigned groups = blockDim.x / lanes, group = threadIdx.x / lanes;
  const T* weight = queries ? q_weight : k_weight;
  float a_sums[Lane::packs][pack] = {}, b_sums[Lane::packs][pack] = {};  // partial sums of dweight

  const int64_t N = s.B * s.T, first_row = row_part_begin(N, blockIdx.x, gridDim.x);
  const unsigned rows = static_cast<unsigned>(row_part_begin(N, blockIdx.x + 1, gridDim.x) - first_row);
  for (unsigned begin = 0; begin < rows * head_count; begin += groups) {  // 32-bit division is faster
    const unsigned item = begin + group;
    const int64_t n = first_row + item / head_count, h = first_head + item % head_count, at = (n * heads + h) * s.D;
    const bool valid = item < rows * head_count;  // lanes without a head sum with the others
    const float r = valid ? rstd[n * normed + h] : 0;
    Pack as[Lane::packs], bs[Lane::packs], das[Lane::packs], dbs[Lane::packs];
    float sum = 0;  // of g w normalised
    if (valid)
      lane.each([&](int j, int64_t i) {
        as[j] = Pack::load_streaming(qkv + at + i);
        bs[j] = Pack::load_streaming(qkv + at + lane.half + i);
        das[j] = Pack::load(dqkv + at + i);
        dbs[j] = Pack::load(dqkv + at + lane.half + i);
        if constexpr (turning == detail::Turning::yes)
          detail::Angles<pack>::load(table, positions[n], s.D, i, Turn::backward).turn(das[j], dbs[j]);
        const Pack a_weights = Pack::load(weight + i), b_weights = Pack::load(weight + lane.half + i);
        for (int e = 0; e < pack; ++e) {
          a_sums[j][e] += das[j][e] * (as[j][e] * r);
          b_sums[j][e] += dbs[j][e] * (bs[j][e] * r);
          sum += das[j][e] * a_weights[e] * (as[j][e] * r) + dbs[j][e] * b_weights[e] * (bs[j][e] * r);
        }
      });
    const float mean = detail::group_sum(sum, lanes) / static_cast<float>(s.D);
    if (valid)
      lane.each([&](int j, int64_t i) {
        const Pack a_weights = Pack::load(weight + i), b_weights = Pack::load(weight + lane.half + i);
        for (int e = 0; e < pack; ++e) {
          das[j].set(e, (das[j][e] * a_weights[e] - as[j][e] * r * mean) * r);
          dbs[j].set(e, (dbs[j][e] * b_weights[e] - bs[j][e] * r * mean) * r);
        }
        das[j].store(dqkv + at + i);
        dbs[j].store(dqkv + at + lane.half + i);
      });
  }

  lane.each([&](int j, int64_t i) {
    for (int e = 0; e < pack; ++e) {
      dweights[group * s.D + i + e] = a_sums[j][e];
      dweights[group * s.D + lane.half + i + e] = b_sums[j][e];
    }
  });
  __syncthreads();  // the sums of all groups are written
  for (int64_t c = threadIdx.x; c < s.D; c += blockDim.x) {
    float sum = 0;
    for (unsigned g = 0; g < groups; ++g) sum += dweights[g * s.D + c];
    partials[(blockIdx.x * 2 + blockIdx.y) * s.D + c] = sum;
  }
}

// table: nullptr for no rotation. With it the bits are those of the two ops (contract 11).
template <class T>
void qk_norm_forward(T* out, float* rstd, const T* qkv, const T* q_weight, const T* k_weight, const float* table,
                     const int32_t* positions, float eps, const AttentionShape& s, cudaStream_t stream) {
  detail::check_even_head("qk_norm_forward", s.D);
  with_packs<full_pack<T>>(rows_fit_packs(s.D / 2, full_pack<T>, table, out, qkv, q_weight, k_weight), [&]<int pack>() {
    const int lanes = detail::head_lanes(s.D, pack);
    const int64_t threads = std::min<int64_t>(round_up((s.Hq + 2 * s.Hkv) * lanes, warp_size), 256);
    const auto kernel = table != nullptr ? qk_norm_forward_kernel<T, pack, detail::Turning::yes>
                                         : qk_norm_forward_kernel<T, pack, detail::Turning::no>;
    launch(kernel, s.B * s.T, threads, 0, stream, out, rstd, qkv, q_weight, k_weight, table, positions, eps, s, lanes);
  });
}

// Size of qk_norm_backward's `partials` in floats.
inline int64_t qk_norm_backward_scratch(const AttentionShape& s) { return row_parts(s.B * s.T) * 2 * s.D; }

// table: as above; rotates back first, in the same pass.
template <class T>
void qk_norm_backward(T* dqkv, float* dq_weight, float* dk_weight, const RowParts<float>& partials, const T* qkv,
                      const T* q_weight, const T* k_weight, const float* rstd, const float* table,
                      const int32_t* positions, const AttentionShape& s, cudaStream_t stream) {
  detail::check_even_head("qk_norm_backward", s.D);
  const int64_t parts = row_parts(s.B * s.T);
  with_packs<full_pack<T>>(
      rows_fit_packs(s.D / 2, full_pack<T>, table, dqkv, qkv, q_weight, k_weight), [&]<int pack>() {
        const int lanes = detail::head_lanes(s.D, pack), threads = 256;
        const int64_t shared = threads / lanes * s.D * static_cast<int64_t>(sizeof(float));
        const auto kernel = table != nullptr ? qk_norm_backward_kernel<T, pack, detail::Turning::yes>
                                             : qk_norm_backward_kernel<T, pack, detail::Turning::no>;
        launch(kernel, Grid(parts, 2), threads, shared, stream, dqkv, partials.data, qkv, q_weight, k_weight, rstd,
               table, positions, s, lanes);
      });
  add_partials({dq_weight, dk_weight, partials.data, parts, s.D, 2 * s.D}, partials.waiting, stream);
}

}  // namespace llmc::cuda
