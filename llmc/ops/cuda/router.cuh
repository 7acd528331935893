// router.cuh: a router of experts, the statistics of its balance, and their gradient: a warp per row, whose scores it
// holds in shared memory. Contracts: ops/ops_experts.h.
#pragma once
#include "ops/cuda/rows.cuh"
#include "ops/types.h"

namespace llmc::cuda {

namespace detail {

inline constexpr int router_warps = 4;        // per block
inline constexpr int64_t router_block = 128;  // rows whose statistics are summed first, as on the CPU

// Each lane has experts lane, lane + 32, ... of a row: f(e) for each.
template <class F>
__device__ void for_experts_of_lane(int E, F f) {
  for (int e = lane_of_thread(); e < E; e += warp_size) f(e);
}

// A router's results for the logits of a row; the lanes of the warp compute them together.
struct RouterRow {
  float* scores;  // (E), in shared memory
  float sum;      // of the scores: probabilities are scores / sum
  float lse;      // logsumexp of the logits

  __device__ RouterRow(float* shared, const float* logits, const Router& r) : scores(shared) {
    const int E = static_cast<int>(r.E);
    float largest = -INFINITY, total = 0, all = 0;
    for_experts_of_lane(E, [&](int e) { largest = fmaxf(largest, logits[e]); });
    largest = warp_max(largest);
    for_experts_of_lane(E, [&](int e) { total += scores[e] = expf(logits[e] - largest); });
    total = warp_sum(total);
    lse = largest + logf(total);
    for_experts_of_lane(E, [&](int e) {
      if (r.scores == RouterScores::softmax) scores[e] /= total;
      else all += scores[e] = 1.0f / (1.0f + expf(-logits[e]));
    });
    sum = r.scores == RouterScores::softmax ? 1.0f : warp_sum(all);
    __syncwarp();  // all lanes' scores are written
  }
};

// A warp for each of N rows, with two floats of dynamic shared memory for each of its experts.
template <class... Parameters, class... Arguments>
void launch_router(void (*kernel)(Parameters...), int64_t N, const Router& r, cudaStream_t stream,
                   const Arguments&... arguments) {
  launch(kernel, ceil_div(N, router_warps), router_warps * warp_size,
         2 * router_warps * r.E * static_cast<int64_t>(sizeof(float)), stream, arguments...);
}

// An expert and the key that it is chosen by. The larger key wins; ties go to the lower expert.
struct Candidate {
  float key;
  int expert;
  __device__ bool loses_to(const Candidate& other) const {
    return other.key > key || (other.key == key && other.expert < expert);
  }
};

}  // namespace detail

// Dynamic shared memory: per warp scores (E), then keys (E).
template <int = 0>
__global__ void router_forward_kernel(int32_t* __restrict__ choices, float* __restrict__ weights,
                                      const float* __restrict__ logits, const float* __restrict__ bias, int64_t N,
                                      Router r) {
  DYN_SHARED(float, shared);
  const int warp = warp_of_thread(), lane = lane_of_thread(), E = static_cast<int>(r.E);
  const int64_t n = static_cast<int64_t>(blockIdx.x) * detail::router_warps + warp;
  if (n >= N) return;
  const detail::RouterRow row(shared + 2 * warp * E, logits + n * E, r);
  float* keys = shared + (2 * warp + 1) * E;  // each lane reads its own; those of chosen experts become NaN
  detail::for_experts_of_lane(E, [&](int e) {
    const float key = bias == nullptr ? row.scores[e] : row.scores[e] + bias[e];
    keys[e] = key == key ? key : -INFINITY;
  });
  float chosen = 0;
  for (int64_t j = 0; j < r.k; ++j) {
    detail::Candidate best = {-INFINITY, E};
    detail::for_experts_of_lane(E, [&](int e) {
      const detail::Candidate mine = {keys[e], e};
      if (best.loses_to(mine)) best = mine;
    });
#pragma unroll
    for (int lanes = warp_size / 2; lanes > 0; lanes /= 2) {
      const detail::Candidate other = {__shfl_xor_sync(all_lanes, best.key, lanes),
                                       __shfl_xor_sync(all_lanes, best.expert, lanes)};
      if (best.loses_to(other)) best = other;
    }
    if (best.expert % warp_size == lane) keys[best.expert] = NAN;
    chosen += row.scores[best.expert];
    if (lane == 0) choices[n * r.k + j] = best.expert;
    if (lane == 0) weights[n * r.k + j] = row.scores[best.expert];
  }
  if (lane != 0) return;
  const float factor = r.scaling / (r.normalised ? chosen + 1e-20f : 1.0f);
  for (int64_t j = 0; j < r.k; ++j) weights[n * r.k + j] *= factor;
}

// Dynamic shared memory: per warp scores (E), then their gradients (E).
template <int = 0>
__global__ void router_backward_kernel(float* __restrict__ dlogits, const float* __restrict__ dweights,
                                       const float* __restrict__ logits, const int32_t* __restrict__ choices,
                                       const int32_t* __restrict__ counts, int64_t N, Router r, RouterLosses losses,
                                       Segments segments) {
  DYN_SHARED(float, shared);
  const int warp = warp_of_thread(), lane = lane_of_thread(), E = static_cast<int>(r.E);
  const int64_t n = static_cast<int64_t>(blockIdx.x) * detail::router_warps + warp;
  if (n >= N) return;
  const detail::RouterRow row(shared + 2 * warp * E, logits + n * E, r);
  float* d = shared + (2 * warp + 1) * E;
  const int32_t* chosen = choices + n * r.k;
  const float* dw = dweights + n * r.k;
  const float T = static_cast<float>(losses.sequence);
  const float per_count = losses.balance * static_cast<float>(r.E) / (T * T * static_cast<float>(r.k));
  const bool softmax = r.scores == RouterScores::softmax;
  const int32_t* count = counts == nullptr ? nullptr : counts + segments.of(n) * E;
  float mean = 0;
  if (count != nullptr && !softmax) {
    detail::for_experts_of_lane(
        E, [&](int e) { mean += per_count * static_cast<float>(count[e]) * (row.scores[e] / row.sum); });
    mean = warp_sum(mean);
  }
  detail::for_experts_of_lane(
      E, [&](int e) { d[e] = count == nullptr ? 0 : (per_count * static_cast<float>(count[e]) - mean) / row.sum; });
  float divisor = 1, of_all = 0;
  if (r.normalised) {
    divisor = 0;
    for (int64_t j = 0; j < r.k; ++j) divisor += row.scores[chosen[j]];
    divisor += 1e-20f;
    for (int64_t j = 0; j < r.k; ++j) of_all += dw[j] * row.scores[chosen[j]] / divisor;
  }
  for (int64_t j = 0; j < r.k; ++j)  // an expert's own lane, so that no other writes it
    if (chosen[j] % warp_size == lane) d[chosen[j]] += r.scaling * (dw[j] - of_all) / divisor;
  mean = 0;
  if (softmax) {
    detail::for_experts_of_lane(E, [&](int e) { mean += d[e] * row.scores[e]; });
    mean = warp_sum(mean);
  }
  const float z = 2 * losses.z * row.lse;
  detail::for_experts_of_lane(E, [&](int e) {
    const float s = row.scores[e], slope = softmax ? s : s * (1.0f - s);
    float out = slope * (d[e] - mean);
    if (z != 0) out += z * expf(logits[n * E + e] - row.lse);
    dlogits[n * E + e] = out;
  });
}

// partials (segments, blocks, E + 2) as on the CPU. Grid: (segments, blocks), one warp; dynamic shared memory: scores
// (E), then sums (E). Each lane sums those of its experts.
template <int = 0>
__global__ void router_sums_kernel(float* __restrict__ partials, const float* __restrict__ logits, int64_t N, Router r,
                                   Segments segments) {
  DYN_SHARED(float, shared);
  const int E = static_cast<int>(r.E);
  float* sums = shared + E;
  detail::for_experts_of_lane(E, [&](int e) { sums[e] = 0; });
  float squares = 0, entropies = 0;
  const int64_t segment = blockIdx.x, first = segments.begin(segment) + blockIdx.y * detail::router_block;
  const int64_t end = min(first + detail::router_block, segments.end(segment, N));
  for (int64_t n = first; n < end; ++n) {
    const detail::RouterRow row(shared, logits + n * E, r);
    float entropy = 0;
    detail::for_experts_of_lane(E, [&](int e) {
      const float p = row.scores[e] / row.sum;
      sums[e] += p;
      if (p > 0) entropy -= p * logf(p);
    });
    squares += row.lse * row.lse;
    entropies += warp_sum(entropy);
  }
  float* out = partials + (segment * gridDim.y + blockIdx.y) * (E + 2);
  detail::for_experts_of_lane(E, [&](int e) { out[e] = sums[e]; });
  if (lane_of_thread() == 0) out[E] = squares;
  if (lane_of_thread() == 0) out[E + 1] = entropies;
}

// Adds up the blocks of each segment. Grid: (segments, blocks of E + 2).
template <int = 0>
__global__ void add_router_sums_kernel(float* __restrict__ probabilities, float* __restrict__ sums,
                                       const float* __restrict__ partials, int64_t blocks, int64_t E) {
  const int64_t e = column_of_thread(1), segment = blockIdx.x;
  if (e >= E + 2) return;
  float total = 0;
  for (int64_t block = 0; block < blocks; ++block) total += partials[(segment * blocks + block) * (E + 2) + e];
  if (e < E) probabilities[segment * E + e] = total;
  else sums[segment * 2 + e - E] = total;
}

// counts of a segment, by one block. Dynamic shared memory: (E) integers.
template <int threads>
__global__ void count_choices_kernel(int32_t* __restrict__ counts, const int32_t* __restrict__ choices, int64_t N,
                                     Router r, Segments segments) {
  DYN_SHARED(int32_t, count);
  const int64_t segment = blockIdx.x, E = r.E;
  for (int64_t e = threadIdx.x; e < E; e += threads) count[e] = 0;
  __syncthreads();  // all counts begin at zero
  for (int64_t i = segments.begin(segment) * r.k + threadIdx.x; i < segments.end(segment, N) * r.k; i += threads)
    atomicAdd(&count[choices[i]], 1);
  __syncthreads();  // all choices are counted
  for (int64_t e = threadIdx.x; e < E; e += threads) counts[segment * E + e] = count[e];
}

// One warp; each lane takes some sequences, and lane 0 adds theirs in order.
template <int = 0>
__global__ void router_losses_kernel(double* __restrict__ totals, const int32_t* __restrict__ counts,
                                     const float* __restrict__ probabilities, const float* __restrict__ sums, int64_t S,
                                     Router r, int64_t sequence) {
  const double T = static_cast<double>(sequence);
  double balance = 0, z = 0, entropy = 0;
  for (int64_t first = 0; first < S; first += warp_size) {
    const int64_t s = first + threadIdx.x;
    double mine = 0;
    if (s < S)
      for (int64_t e = 0; e < r.E; ++e)
        mine += static_cast<double>(counts[s * r.E + e]) * static_cast<double>(probabilities[s * r.E + e]);
    mine = static_cast<double>(r.E) * mine / (T * T * static_cast<double>(r.k));
    for (int lane = 0; lane < warp_size && first + lane < S; ++lane) {
      balance += __shfl_sync(all_lanes, mine, lane);
      z += static_cast<double>(sums[(first + lane) * 2]);
      entropy += static_cast<double>(sums[(first + lane) * 2 + 1]);
    }
  }
  if (threadIdx.x != 0) return;
  totals[0] += balance;
  totals[1] += z;
  totals[2] += entropy;
}

template <int = 0>
__global__ void count_dropped_kernel(double* __restrict__ dropped, const int32_t* __restrict__ rows, int64_t choices) {
  *dropped += static_cast<double>(choices - *rows);
}

// x as the sum of three bf16 matrices; see cpu/router.h.
template <int = 0>
__global__ void split_in_three_kernel(bf16* __restrict__ out, const float* __restrict__ x, int64_t n, int64_t columns,
                                      int64_t row, int64_t part) {
  const int64_t i = item_of_thread();
  if (i >= n) return;
  float rest = x[i];
  for (int64_t p = 0; p < 3; ++p) {
    const bf16 rounded = from_float<bf16>(rest);
    out[p * part + i / columns * row + i % columns] = rounded;
    rest -= to_float(rounded);
  }
}

inline void split_in_three(bf16* out, const float* x, int64_t rows, int64_t columns, int64_t row, int64_t part,
                           cudaStream_t stream) {
  launch_each(split_in_three_kernel<>, rows * columns, stream, out, x, rows * columns, columns, row, part);
}

inline void router_forward(int32_t* choices, float* weights, const float* logits, const float* bias, int64_t N,
                           const Router& r, cudaStream_t stream) {
  detail::launch_router(router_forward_kernel<>, N, r, stream, choices, weights, logits, bias, N, r);
}

inline void router_backward(float* dlogits, const float* dweights, const float* logits, const int32_t* choices,
                            const int32_t* counts, int64_t N, const Router& r, const RouterLosses& losses,
                            const Segments& segments, cudaStream_t stream) {
  detail::launch_router(router_backward_kernel<>, N, r, stream, dlogits, dweights, logits, choices, counts, N, r,
                        losses, segments);
}

// partials: cpu::router_statistics_scratch floats
inline void router_statistics(int32_t* counts, float* probabilities, float* sums, float* partials, const float* logits,
                              const int32_t* choices, int64_t N, const Router& r, const Segments& segments,
                              cudaStream_t stream) {
  constexpr int64_t bytes = sizeof(float);
  constexpr int threads = 128;
  const int64_t S = segments.count(N), blocks = ceil_div(std::min(segments.length, N), detail::router_block);
  launch(router_sums_kernel<>, Grid(S, blocks), warp_size, 2 * r.E * bytes, stream, partials, logits, N, r, segments);
  launch_rows(add_router_sums_kernel<>, S, r.E + 2, 1, threads, stream, probabilities, sums, partials, blocks, r.E);
  launch(count_choices_kernel<threads>, S, threads, r.E * bytes, stream, counts, choices, N, r, segments);
}

inline void router_losses(double* totals, const int32_t* counts, const float* probabilities, const float* sums,
                          int64_t S, const Router& r, int64_t sequence, cudaStream_t stream) {
  launch(router_losses_kernel<>, 1, warp_size, 0, stream, totals, counts, probabilities, sums, S, r, sequence);
}

inline void count_dropped(double* dropped, const int32_t* rows, int64_t choices, cudaStream_t stream) {
  launch(count_dropped_kernel<>, 1, 1, 0, stream, dropped, rows, choices);
}

}  // namespace llmc::cuda
