// planted_bugs.h: small kernels, correct or with one bug, for the tests of the emulator.
#pragma once
#include "ops/cuda/launch.cuh"
#include "ops/cuda/mma.cuh"
#include "ops/cuda/vec.cuh"

namespace planted {

using namespace llmc::cuda;

enum class Bug { none, no_barrier, no_second_barrier, no_copy_wait, past_the_end, too_few_threads, early_return };

// out (n) = x reversed; n threads.
template <Bug bug>
__global__ void reverse(float* out, const float* x) {
  SHARED(float, tile, 128);
  const unsigned n = blockDim.x;
  tile[threadIdx.x] = x[threadIdx.x];
  if constexpr (bug == Bug::early_return)
    if (threadIdx.x == 70) return;
  if constexpr (bug != Bug::no_barrier)
    if (bug != Bug::too_few_threads || threadIdx.x < 64) __syncthreads();  // tile is complete
  out[threadIdx.x] = tile[n - 1 - threadIdx.x];
}

// Three times: every element of tile becomes the sum of itself and its neighbour. One warp, if `warp`.
template <Bug bug, bool warp>
__global__ void add_neighbours(float* out, const float* x) {
  SHARED(float, tile, 128);
  const auto barrier = [](auto first) {
    if (bug == (first ? Bug::no_barrier : Bug::no_second_barrier)) return;
    if constexpr (warp) __syncwarp();
    else __syncthreads();
  };
  tile[threadIdx.x] = x[threadIdx.x];
  for (int step = 0; step < 3; ++step) {
    barrier(true);  // tile is written
    const float sum = tile[threadIdx.x] + tile[(threadIdx.x + 1) % blockDim.x];
    barrier(false);  // tile is read
    tile[threadIdx.x] = sum;
  }
  out[threadIdx.x] = tile[threadIdx.x];
}

// out (4 threads) = the sum of `tiles` tiles of x (tiles, 4 threads), through two buffers prefetched by cp.async. Each
// thread adds what its neighbour copied.
template <Bug bug>
__global__ void pipeline(float4* out, const float4* x, int tiles) {
  DYN_SHARED(float4, buffers);  // (2, threads)
  const int threads = static_cast<int>(blockDim.x), me = static_cast<int>(threadIdx.x);
  const auto fetch = [&](int tile) {
    if (tile < tiles) cp_async_16(buffers + tile % 2 * threads + me, x + tile * threads + me);
    cp_async_commit();
  };
  float4 sum = make_float4(0, 0, 0, 0);
  fetch(0);
  for (int tile = 0; tile < tiles; ++tile) {
    fetch(tile + 1);
    if constexpr (bug != Bug::no_copy_wait) cp_async_wait<1>();  // this thread's part of the tile is there
    if constexpr (bug != Bug::no_barrier) __syncthreads();       // and everyone's
    const float4 part = buffers[tile % 2 * threads + (me + 1) % threads];
    sum = make_float4(sum.x + part.x, sum.y + part.y, sum.z + part.z, sum.w + part.w);
    if constexpr (bug != Bug::no_second_barrier) __syncthreads();  // the tile is read: the next fetch may overwrite it
  }
  out[me] = sum;
}

// Every block adds its number to the previous block's output: no order among blocks is guaranteed.
template <Bug bug>
__global__ void chain_of_blocks(float* out) {
  if (threadIdx.x == 0) out[blockIdx.x] = bug == Bug::none || blockIdx.x == 0 ? 1.0f : out[blockIdx.x - 1] + 1;
}

// Every block writes the same element.
template <Bug bug>
__global__ void last_block_wins(float* out) {
  if (threadIdx.x == 0) out[bug == Bug::none ? blockIdx.x : 0] = static_cast<float>(blockIdx.x);
}

template <Bug bug>
__global__ void past_global(float* out, int n) {
  const int i = static_cast<int>(threadIdx.x);
  if (i < n + (bug == Bug::past_the_end)) out[i] = 1;
}

// With `dynamic`, writes past the end of dynamic shared memory, else past that of the first of two arrays.
template <Bug bug, bool dynamic>
__global__ void past_shared(float* out) {
  SHARED(float, small, 32);
  SHARED(float, next, 32);
  DYN_SHARED(float, large);  // (32)
  next[threadIdx.x] = 0;
  float* array = dynamic ? large : small;
  array[threadIdx.x + (bug == Bug::past_the_end)] = 1;
  __syncthreads();
  out[threadIdx.x] = array[threadIdx.x] + next[threadIdx.x];
}

template <Bug bug>
__global__ void misaligned_pack(float* out, const float* x) {
  Packed<float>::load(x + 4 * threadIdx.x + (bug != Bug::none)).store(out + 4 * threadIdx.x);
}

// out = x + 1, and so on along the streams.
template <Bug bug>
__global__ void add_one(float* out, const float* x, int n) {
  for (int i = static_cast<int>(threadIdx.x); i < n; i += static_cast<int>(blockDim.x)) out[i] = x[i] + 1;
}

}  // namespace planted
