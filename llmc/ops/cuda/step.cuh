// step.cuh: the scalars of a step: losses, sums of squares, update control. Small kernels, so that the host need not
// wait; same bits as on the CPU. Contracts: ops/ops.h.
#pragma once
#include "ops/cuda/reduce.cuh"
#include "ops/cuda/vec.cuh"
#include "ops/types.h"

namespace llmc::cuda {

namespace detail {

inline constexpr int sum_threads = sum_lanes / 4;  // each has four lanes: one load where a pack has four elements

__device__ inline double to_double(double x) { return x; }
template <class T>
__device__ double to_double(T x) {
  return to_float(x);
}

struct Identity {
  __device__ double operator()(double x) const { return x; }
};

// The sum of f(x[0]) ... f(x[n - 1]) in the order of ops/types.h, by a block of sum_threads; every thread gets it.
template <int pack, class T, class F>
__device__ double ordered_sum(const T* x, int64_t n, F f) {
  double lanes[4] = {};
  int64_t first = 4 * threadIdx.x;
#pragma unroll 8
  for (; first + 4 <= n; first += sum_lanes) {
    if constexpr (pack == 4) {
      const auto xs = Packed<T, 4>::load_streaming(x + first);
      for (int i = 0; i < 4; ++i) lanes[i] += f(to_double(xs.elements[i]));
    } else {
      for (int i = 0; i < 4; ++i) lanes[i] += f(to_double(x[first + i]));
    }
  }
  for (int i = 0; i < 4; ++i)
    if (first + i < n) lanes[i] += f(to_double(x[first + i]));

  double sum = (lanes[0] + lanes[1]) + (lanes[2] + lanes[3]);
#pragma unroll
  for (int neighbour = 1; neighbour < warp_size; neighbour *= 2) sum += __shfl_xor_sync(all_lanes, sum, neighbour);
  constexpr int warps = sum_threads / warp_size;
  SHARED(double, partial, warps);
  if (threadIdx.x % warp_size == 0) partial[threadIdx.x / warp_size] = sum;
  __syncthreads();  // partial is complete
  sum = partial[threadIdx.x % warps];
#pragma unroll
  for (int neighbour = 1; neighbour < warps; neighbour *= 2) sum += __shfl_xor_sync(all_lanes, sum, neighbour);
  return sum;
}

// x[0] + x[stride] + ... in order, by one warp: the lanes load together and add one by one; every lane gets the sum.
__device__ inline double sum_in_order(const double* x, int64_t stride, int64_t n) {
  const int lane = threadIdx.x % warp_size;
  double total = 0;
  for (int64_t begin = 0; begin < n; begin += warp_size) {
    const double mine = begin + lane < n ? x[(begin + lane) * stride] : 0;
    for (int i = 0; i < warp_size && begin + i < n; ++i) total += __shfl_sync(all_lanes, mine, i);
  }
  return total;
}

}  // namespace detail

// One block per square_sum_block elements.
template <int pack, class G>
__global__ void square_sum_kernel(double* __restrict__ partials, const G* __restrict__ x, int64_t n) {
  const int64_t begin = blockIdx.x * square_sum_block;
  const double sum = detail::ordered_sum<pack>(x + begin, min(square_sum_block, n - begin), [](double value) {
    return value * value;  // exact for fp32 and bf16: an fma changes nothing
  });
  if (threadIdx.x == 0) partials[blockIdx.x] = sum;
}

// out = or += the sum of x, by one block.
template <class T>
__global__ void ordered_sum_kernel(double* __restrict__ out, const T* __restrict__ x, int64_t n,
                                   Accumulate accumulate) {
  const double sum = detail::ordered_sum<1>(x, n, detail::Identity{});
  if (threadIdx.x == 0) *out = (accumulate == Accumulate::yes ? *out : 0) + sum;
}

// partials: ceil(n / square_sum_block) doubles
template <class G>
void square_sum(double* out, double* partials, const G* x, int64_t n, Accumulate accumulate, cudaStream_t stream) {
  const int64_t blocks = ceil_div(n, square_sum_block);
  with_packs<4>(fit_packs(x), [&]<int pack>() {
    launch(square_sum_kernel<pack, G>, blocks, detail::sum_threads, 0, stream, partials, x, n);
  });
  launch(ordered_sum_kernel<double>, 1, detail::sum_threads, 0, stream, out, partials, blocks, accumulate);
}

template <class A>
void add_losses(double* sum, const A* losses, int64_t N, cudaStream_t stream) {
  launch(ordered_sum_kernel<A>, 1, detail::sum_threads, 0, stream, sum, losses, N, Accumulate::yes);
}

// One warp.
template <class Double>
__global__ void combine_scalars_kernel(Double* __restrict__ losses, Double* __restrict__ notices,
                                       Double* __restrict__ square_sums, const Double* __restrict__ gathered,
                                       int64_t ranks, int64_t L, int64_t N, int64_t units, int64_t shards,
                                       int64_t tensor_ranks, int64_t stages) {
  const int64_t row = L + N + units, of_stage = ranks / stages * row;
  for (int64_t l = 0; l < L; ++l) {
    const Double total = detail::sum_in_order(gathered + l, tensor_ranks * row, ranks / tensor_ranks);
    if (threadIdx.x == 0) losses[l] = total;
  }
  for (int64_t n = 0; n < N; ++n) {
    Double most = 0;
    for (int64_t r = threadIdx.x; r < ranks; r += warp_size) most = fmax(most, gathered[r * row + L + n]);
    most = warp_reduce(most, [](Double a, Double b) { return fmax(a, b); });
    if (threadIdx.x == 0) notices[n] = most;
  }
  for (int64_t i = threadIdx.x; i < units * tensor_ranks * shards; i += warp_size) {
    const int64_t shard = i % shards, tensor_rank = i / shards % tensor_ranks, unit = i / shards / tensor_ranks;
    Double sum = 0;  // one stage has the value, the others have zeros
    for (int64_t p = 0; p < stages; ++p)
      sum += gathered[p * of_stage + (shard * tensor_ranks + tensor_rank) * row + L + N + unit];
    square_sums[i] = sum;
  }
}

inline void combine_scalars(double* losses, double* notices, double* square_sums, const double* gathered, int64_t ranks,
                            int64_t L, int64_t N, int64_t units, int64_t shards, int64_t tensor_ranks, int64_t stages,
                            cudaStream_t stream) {
  launch(combine_scalars_kernel<double>, 1, warp_size, 0, stream, losses, notices, square_sums, gathered, ranks, L, N,
         units, shards, tensor_ranks, stages);
}

// One warp.
template <class Double>
__global__ void clip_control_kernel(Double* __restrict__ control, const Double* __restrict__ square_sums, int64_t n,
                                    const Double* __restrict__ loss, UpdateRule rule) {
  const Double norm = rule.scale * sqrt(detail::sum_in_order(square_sums, 1, n)), l = *loss;
  if (threadIdx.x != 0) return;
  constexpr Double largest = std::numeric_limits<Double>::max();
  control[0] = norm;
  control[1] = rule.scale * (rule.max_norm > 0 ? fmin(1.0, rule.max_norm / (norm + 1e-6)) : 1.0);
  const bool finite = norm <= largest && l >= -largest && l <= largest;
  if (!finite) control[3] = 1;
  control[2] = control[3] == 0 && l <= rule.largest_loss && norm <= rule.largest_norm;
}

inline void clip_control(double* control, const double* square_sums, int64_t n, const double* loss,
                         const UpdateRule& rule, cudaStream_t stream) {
  launch(clip_control_kernel<double>, 1, warp_size, 0, stream, control, square_sums, n, loss, rule);
}

}  // namespace llmc::cuda
