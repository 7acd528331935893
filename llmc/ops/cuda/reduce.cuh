// reduce.cuh: sums and maxima over a warp and over a block, in an order that depends only on the block's size.
#pragma once
#include "ops/cuda/launch.cuh"

namespace llmc::cuda {

inline constexpr unsigned all_lanes = 0xffffffffu;
__device__ inline int lane_of_thread() { return static_cast<int>(threadIdx.x) % warp_size; }
__device__ inline int warp_of_thread() { return static_cast<int>(threadIdx.x) / warp_size; }

struct Sum {
  static constexpr float neutral = 0;
  __device__ float operator()(float a, float b) const { return a + b; }
};
struct Max {  // ignores NaN
  static constexpr float neutral = -INFINITY;
  __device__ float operator()(float a, float b) const { return fmaxf(a, b); }
};

// Over each `lanes` neighbours, a power of two. Every lane gets the result with the same bits: at each step two lanes
// add the same two numbers. All lanes of the warp take part.
template <int lanes = warp_size, class T, class Op>
__device__ T warp_reduce(T x, Op op) {
#pragma unroll
  for (int distance = lanes / 2; distance > 0; distance /= 2) x = op(x, __shfl_xor_sync(all_lanes, x, distance));
  return x;
}
__device__ inline float warp_sum(float x) { return warp_reduce(x, Sum{}); }
__device__ inline float warp_max(float x) { return warp_reduce(x, Max{}); }
// The sum over this lane and those below it.
__device__ inline int32_t warp_prefix_sum(int32_t x) {
  const int lane = lane_of_thread();
  for (int distance = 1; distance < warp_size; distance *= 2) {
    const int32_t below = __shfl_up_sync(all_lanes, x, distance);
    if (lane >= distance) x += below;
  }
  return x;
}

// Reduces each of the N values over a one-dimensional block of whole warps; every thread gets the results. Acts as a
// barrier: earlier writes to shared memory are visible afterwards.
template <class Op, int N>
__device__ void block_reduce(float (&values)[N], Op op) {
  constexpr int most = N * warp_size;
  SHARED(float, partial, most);  // (N, warps)
  const int lane = threadIdx.x % warp_size, warp = threadIdx.x / warp_size, warps = blockDim.x / warp_size;
  for (int i = 0; i < N; ++i) {
    values[i] = warp_reduce(values[i], op);
    if (lane == 0) partial[i * warp_size + warp] = values[i];
  }
  __syncthreads();  // partial is complete
  for (int i = 0; i < N; ++i) values[i] = warp_reduce(lane < warps ? partial[i * warp_size + lane] : Op::neutral, op);
  __syncthreads();  // partial is read; the next call may write it
}
template <class Op>
__device__ float block_reduce(float x, Op op) {
  float values[1] = {x};
  block_reduce(values, op);
  return values[0];
}
__device__ inline float block_sum(float x) { return block_reduce(x, Sum{}); }
__device__ inline float block_max(float x) { return block_reduce(x, Max{}); }

}  // namespace llmc::cuda
