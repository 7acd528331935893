// qk_clip.cuh: the largest logits of heads, and the weights that shrink where they are too large. Contracts:
// ops/ops_step.h.
#pragma once
#include "core/rng.h"
#include "ops/cuda/reduce.cuh"
#include "ops/cuda/vec.cuh"
#include "ops/types.h"

namespace llmc::cuda {

// One block per head.
template <int threads>
__global__ void largest_logits_kernel(double* __restrict__ most, const float* __restrict__ largest, int64_t B,
                                      int64_t T) {
  float found = -INFINITY;
  for (int64_t i = threadIdx.x; i < B * T; i += threads)
    found = fmaxf(found, largest[(i / T * gridDim.x + blockIdx.x) * T + i % T]);
  found = block_max(found);
  if (threadIdx.x == 0) most[blockIdx.x] = fmax(most[blockIdx.x], static_cast<double>(found));
}

// One thread per head.
template <int = 0>
__global__ void largest_of_ranks_kernel(double* __restrict__ most, const double* __restrict__ gathered, int64_t ranks,
                                        int64_t n) {
  const int64_t i = item_of_thread();
  if (i >= n) return;
  double found = most[i];
  for (int64_t r = 0; r < ranks; ++r) found = fmax(found, gathered[r * n + i]);
  most[i] = found;
}

// One thread per weight. words: for bf16 without a master copy
template <class W>
__global__ void clip_heads_kernel(W* __restrict__ weight, float* __restrict__ master,
                                  const double* __restrict__ largest, const double* __restrict__ control,
                                  Elements elements, int64_t n, HeadClip clip, Philox words) {
  const int64_t i = item_of_thread();
  if (control[2] == 0 || i >= n) return;
  const int64_t index = elements.index(i);
  const float factor = static_cast<float>(clip.factor(largest[index / clip.elements]));
  if (factor == 1.0f) return;
  if (master != nullptr) {
    weight[i] = from_float<W>(master[i] *= factor);
  } else if constexpr (std::is_same_v<W, float>) {
    weight[i] *= factor;
  } else {
    const auto random = words.words(static_cast<uint64_t>(index / 4));
    for (int j = 0; j < 4; ++j)  // registers can only be indexed by constants
      if (index % 4 == j)
        weight[i].bits = bf16::stochastic_bits(to_float(weight[i]) * factor, random[static_cast<size_t>(j)]);
  }
}

inline void largest_logits(double* most, const float* largest, int64_t B, int64_t Hq, int64_t T, cudaStream_t stream) {
  constexpr int threads = 1024;
  launch(largest_logits_kernel<threads>, Hq, threads, 0, stream, most, largest, B, T);
}

inline void largest_of_ranks(double* most, const double* gathered, int64_t ranks, int64_t n, cudaStream_t stream) {
  launch_each(largest_of_ranks_kernel<>, n, stream, most, gathered, ranks, n);
}

template <class W>
void clip_heads(W* weight, float* master, const double* largest, const double* control, const Elements& elements,
                int64_t n, const HeadClip& clip, const Philox& words, cudaStream_t stream) {
  launch_each(clip_heads_kernel<W>, n, stream, weight, master, largest, control, elements, n, clip, words);
}

}  // namespace llmc::cuda
