// qk_norm.cuh: rmsnorm of every query and key head (Henry et al. 2020; Qwen3), alone or fused with rotary embedding. A
// group of lanes takes a head; each lane holds packs of the first half, and their counterparts half a head further on,
// in registers. Statistics in fp32. Contracts: ops/ops.h.
#pragma once
#include "ops/cuda/column_sum.cuh"
#include "ops/cuda/reduce.cuh"
#include "ops/cuda/rotary.cuh"

namespace llmc::cuda {

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

namespace detail {

// Lanes per head: a power of two, so that a group lies within one warp.
inline int head_lanes(int64_t D, int pack) {
  int lanes = 1;
  while (lanes < warp_size && lanes * pack < D / 2) lanes *= 2;
  return lanes;
}
// Calls run.operator()<pack, turning>() as the arrays and the shape allow; without a table, heads are not rotated.
template <class T, class Run, class... Arrays>
void choose_head_kernel(Run run, const float* table, int64_t D, const Arrays*... arrays) {
  with_packs<full_pack<T>>(rows_fit_packs(D / 2, full_pack<T>, table, arrays...), [&]<int pack>() {
    if (table != nullptr) run.template operator()<pack, Turning::yes>();
    else run.template operator()<pack, Turning::no>();
  });
}

}  // namespace detail

// out (B T, (Hq + 2 Hkv) D), rstd (B T, Hq + Hkv) = ; qkv like out; q_weight, k_weight (D). With a table (P, D) and
// positions (B T) it is fused with rotary embedding, bitwise equal to the two ops (contract 11). No rotation: table is
// nullptr.
template <class T>
void qk_norm_forward(T* out, float* rstd, const T* qkv, const T* q_weight, const T* k_weight, const float* table,
                     const int32_t* positions, float eps, const AttentionShape& s, cudaStream_t stream) {
  detail::check_even_head("qk_norm_forward", s.D);
  const auto run = [&]<int pack, detail::Turning turning>() {
    const int lanes = detail::head_lanes(s.D, pack);
    const int64_t threads = std::min<int64_t>(round_up((s.Hq + 2 * s.Hkv) * lanes, warp_size), 256);
    launch(qk_norm_forward_kernel<T, pack, turning>, s.B * s.T, threads, 0, stream, out, rstd, qkv, q_weight, k_weight,
           table, positions, eps, s, lanes);
  };
  detail::choose_head_kernel<T>(run, table, s.D, out, qkv, q_weight, k_weight);
}

// Size of qk_norm_backward's `partials` in floats.
inline int64_t qk_norm_backward_scratch(const AttentionShape& s) { return row_parts(s.B * s.T) * 2 * s.D; }

// dqkv: in, the gradient of out; out, the gradient of qkv. dq_weight (D), dk_weight (D) += ; partials: scratch. With a
// table it also rotates back, in the same pass: bitwise equal to rotary backward, then the norm's.
template <class T>
void qk_norm_backward(T* dqkv, float* dq_weight, float* dk_weight, const RowParts<float>& partials, const T* qkv,
                      const T* q_weight, const T* k_weight, const float* rstd, const float* table,
                      const int32_t* positions, const AttentionShape& s, cudaStream_t stream) {
  detail::check_even_head("qk_norm_backward", s.D);
  const int64_t parts = row_parts(s.B * s.T);
  const auto run = [&]<int pack, detail::Turning turning>() {
    const int lanes = detail::head_lanes(s.D, pack), threads = 256;
    const int64_t shared = threads / lanes * s.D * static_cast<int64_t>(sizeof(float));
    launch(qk_norm_backward_kernel<T, pack, turning>, Grid(parts, 2), threads, shared, stream, dqkv, partials.data, qkv,
           q_weight, k_weight, rstd, table, positions, s, lanes);
  };
  detail::choose_head_kernel<T>(run, table, s.D, dqkv, qkv, q_weight, k_weight);
  add_partials({dq_weight, dk_weight, partials.data, parts, s.D, 2 * s.D}, partials.waiting, stream);
}

}  // namespace llmc::cuda
