// cross_entropy.cuh: softmax, cross-entropy and its gradient in one kernel, in place on the logits. One block per row,
// which it keeps in shared memory, so that the row is read and written once; a row that does not fit is read a second
// time, from L2 if still there. For a vocabulary in parts on several ranks there are two kernels, between which the
// ranks exchange three numbers per row. Contracts: ops/ops.h.
#pragma once
#include <limits>

#include "ops/cuda/reduce.cuh"
#include "ops/cuda/rows.cuh"
#include "ops/types.h"

namespace llmc::cuda {

namespace detail {

enum class KeepRow : uint8_t { no, yes };

// Element i of a pack that begins at column v; the padding from V on counts as minus infinity.
template <class Pack>
__device__ float logit(const Pack& xs, int64_t v, int i, int64_t V) {
  return v + i < V ? xs[i] : -INFINITY;
}

// Milakov & Gimelshein 2018: the sum of exponentials, rescaled whenever a larger logit appears.
template <class T>
struct SoftmaxSum {
  float largest = std::numeric_limits<float>::lowest(), sum = 0;

  template <class Pack>
  __device__ void add(const Pack& xs, int64_t v, int64_t V) {
    const float before = largest;
    for (int i = 0; i < Pack::size; ++i) largest = fmaxf(largest, logit(xs, v, i, V));
    sum *= exponential<T>(before - largest);
    for (int i = 0; i < Pack::size; ++i) sum += exponential<T>(logit(xs, v, i, V) - largest);
  }
  // Combines all threads of the block.
  __device__ void reduce() {
    const float maximum = block_max(largest);
    sum = block_sum(sum * exponential<T>(largest - maximum));
    largest = maximum;
  }
};

// The gradients of a pack of logits, which may include column `target`: scale (softmax - 1 at the target), 0 in the
// padding. factor: scale / sum
template <class T, class Pack>
__device__ Pack softmax_gradient(const Pack& xs, int64_t v, int64_t V, float largest, float factor, int64_t target,
                                 float scale) {
  Pack ds;
  for (int i = 0; i < Pack::size; ++i) {
    const float probability_scaled = exponential<T>(logit(xs, v, i, V) - largest) * factor;
    ds.set(i, v + i == target ? probability_scaled - scale : probability_scaled);
  }
  return ds;
}

// This thread's part of row (V_padded) = 0
template <class T, int pack>
__device__ void zero_row(T* row, int64_t V_padded) {
  Packed<T, pack> zeros;
  for (int i = 0; i < pack; ++i) zeros.set(i, 0);
  for (int64_t v = threadIdx.x * pack; v < V_padded; v += blockDim.x * pack) zeros.store_streaming(row + v);
}

}  // namespace detail

// Grid N. Dynamic shared memory with KeepRow::yes: a row; each thread reads only what it stored itself.
template <class T, int pack, Gradient gradient, detail::KeepRow keep>
__global__ void cross_entropy_kernel(float* __restrict__ losses, T* logits, const int32_t* __restrict__ targets,
                                     int64_t V, int64_t V_padded, float scale) {
  using Pack = Packed<T, pack>;
  T* kept = nullptr;  // (V_padded)
  if constexpr (keep == detail::KeepRow::yes) {
    DYN_SHARED(T, shared);
    kept = shared;
  }
  T* row = logits + blockIdx.x * V_padded;
  const int64_t first = threadIdx.x * pack, step = blockDim.x * pack, target = targets[blockIdx.x];
  if (target < 0) {
    if (threadIdx.x == 0) losses[blockIdx.x] = 0;
    if constexpr (gradient == Gradient::yes) detail::zero_row<T, pack>(row, V_padded);
    return;
  }

  detail::SoftmaxSum<T> softmax;
  for (int64_t v = first; v < V; v += step) {
    Pack xs;
    if constexpr (keep == detail::KeepRow::yes) {
      xs = Pack::load_streaming(row + v);
      xs.store(kept + v);
    } else {
      xs = Pack::load(row + v);
    }
    softmax.add(xs, v, V);
  }
  const float target_logit = to_float(row[target]);  // before the barriers after which the row is written
  softmax.reduce();
  if (threadIdx.x == 0) losses[blockIdx.x] = logf(softmax.sum) + softmax.largest - target_logit;

  if constexpr (gradient == Gradient::yes) {
    const float factor = scale / softmax.sum;
    for (int64_t v = first; v < V_padded; v += step) {
      Pack xs;
      if (v < V) xs = Pack::load((keep == detail::KeepRow::yes ? kept : row) + v);
      detail::softmax_gradient<T>(xs, v, V, softmax.largest, factor, target, scale).store_streaming(row + v);
    }
  }
}

// losses (N) = ; with Gradient::yes the logits (N, V_padded) become their gradients. targets (N): -1 is ignored.
template <class T>
void cross_entropy(float* losses, T* logits, const int32_t* targets, int64_t N, int64_t V, int64_t V_padded,
                   float scale, Gradient gradient, cudaStream_t stream) {
  constexpr int64_t static_shared = 1 << 10;  // upper bound for the reductions' arrays
  const int64_t bytes = V_padded * static_cast<int64_t>(sizeof(T));
  const bool fits = bytes + static_shared <= device_shared_bytes();
  const auto run = [&]<int pack, Gradient wanted, detail::KeepRow keep>() {
    launch(cross_entropy_kernel<T, pack, wanted, keep>, N, row_threads(V_padded, pack),
           keep == detail::KeepRow::yes ? bytes : 0, stream, losses, logits, targets, V, V_padded, scale);
  };
  with_packs<full_pack<T>>(rows_fit_packs(V_padded, full_pack<T>, logits), [&]<int pack>() {
    if (gradient == Gradient::no) run.template operator()<pack, Gradient::no, detail::KeepRow::no>();
    else if (fits) run.template operator()<pack, Gradient::yes, detail::KeepRow::yes>();
    else run.template operator()<pack, Gradient::yes, detail::KeepRow::no>();
  });
}

// stats (N, 3) = {largest logit, sum of exp(logit - largest), the target's logit} of the columns of `part`. Grid N.
template <class T, int pack>
__global__ void cross_entropy_stats_kernel(float* __restrict__ stats, const T* __restrict__ logits,
                                           const int32_t* __restrict__ targets, int64_t V_padded, Vocabulary part) {
  const T* row = logits + blockIdx.x * V_padded;
  detail::SoftmaxSum<T> softmax;
  for (int64_t v = threadIdx.x * pack; v < part.size; v += blockDim.x * pack)
    softmax.add(Packed<T, pack>::load(row + v), v, part.size);
  softmax.reduce();
  if (threadIdx.x != 0) return;
  const int64_t target = targets[blockIdx.x];
  float* to = stats + blockIdx.x * 3;
  to[0] = part.size > 0 ? softmax.largest : -INFINITY;
  to[1] = softmax.sum;
  to[2] = part.has(target) ? to_float(row[target - part.first]) : 0;
}

// Grid N. stats (P, N, 3): every thread merges the parts of its row, in order.
template <class T, int pack, Gradient gradient>
__global__ void cross_entropy_merge_kernel(float* __restrict__ losses, T* __restrict__ logits,
                                           const float* __restrict__ stats, const int32_t* __restrict__ targets,
                                           int64_t P, int64_t V_padded, Vocabulary part, float scale) {
  using Pack = Packed<T, pack>;
  T* row = logits + blockIdx.x * V_padded;
  const int64_t target = targets[blockIdx.x];
  if (target < 0) {
    if (threadIdx.x == 0) losses[blockIdx.x] = 0;
    if constexpr (gradient == Gradient::yes) detail::zero_row<T, pack>(row, V_padded);
    return;
  }
  const int64_t next_part = 3 * static_cast<int64_t>(gridDim.x);
  const float* of_row = stats + blockIdx.x * 3;
  float largest = -INFINITY, sum = 0, target_logit = 0;
  for (int64_t p = 0; p < P; ++p) largest = fmaxf(largest, of_row[p * next_part]);
  for (int64_t p = 0; p < P; ++p) {
    const float* of_part = of_row + p * next_part;
    sum += of_part[1] * expf(of_part[0] - largest);  // 0 for an empty part, whose largest is -infinity
    target_logit += of_part[2];
  }
  if (threadIdx.x == 0) losses[blockIdx.x] = logf(sum) + largest - target_logit;

  if constexpr (gradient == Gradient::yes) {
    const float factor = scale / sum;
    const int64_t column = part.has(target) ? target - part.first : -1;
    for (int64_t v = threadIdx.x * pack; v < V_padded; v += blockDim.x * pack) {
      Pack xs;
      if (v < part.size) xs = Pack::load_streaming(row + v);
      detail::softmax_gradient<T>(xs, v, part.size, largest, factor, column, scale).store_streaming(row + v);
    }
  }
}

// stats (N, 3) = ; targets (N): for -1 and for tokens outside `part` the target's logit is 0
template <class T>
void cross_entropy_stats(float* stats, const T* logits, const int32_t* targets, int64_t N, int64_t V_padded,
                         const Vocabulary& part, cudaStream_t stream) {
  with_packs<full_pack<T>>(rows_fit_packs(V_padded, full_pack<T>, logits), [&]<int pack>() {
    launch(cross_entropy_stats_kernel<T, pack>, N, row_threads(V_padded, pack), 0, stream, stats, logits, targets,
           V_padded, part);
  });
}

// losses (N) = ; with Gradient::yes the logits (N, V_padded) of this part become their gradients. targets (N): -1 is
// ignored.
template <class T>
void cross_entropy_merge(float* losses, T* logits, const float* stats, const int32_t* targets, int64_t P, int64_t N,
                         int64_t V_padded, const Vocabulary& part, float scale, Gradient gradient,
                         cudaStream_t stream) {
  const auto run = [&]<int pack, Gradient wanted>() {
    const unsigned threads = wanted == Gradient::yes ? row_threads(V_padded, pack) : warp_size;
    launch(cross_entropy_merge_kernel<T, pack, wanted>, N, threads, 0, stream, losses, logits, stats, targets, P,
           V_padded, part, scale);
  };
  if (gradient == Gradient::no) run.template operator()<1, Gradient::no>();
  else if (rows_fit_packs(V_padded, full_pack<T>, logits)) run.template operator()<full_pack<T>, Gradient::yes>();
  else run.template operator()<1, Gradient::yes>();
}

}  // namespace llmc::cuda
