// cross_entropy.cuh: softmax, cross-entropy and its gradient in one kernel, in place on the logits. One block per row,
// which it keeps in shared memory, so that the row is read and written once; a row that does not fit is read a second
// time, from L2 if still there. Contracts: ops/ops.h.
#pragma once
#include <limits>

#include "ops/cuda/reduce.cuh"
#include "ops/cuda/rows.cuh"
#include "ops/types.h"

namespace llmc::cuda {

namespace detail {
enum class KeepRow : uint8_t { no, yes };
}

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
    if constexpr (gradient == Gradient::yes) {
      Pack zeros;
      for (int i = 0; i < pack; ++i) zeros.set(i, 0);
      for (int64_t v = first; v < V_padded; v += step) zeros.store_streaming(row + v);
    }
    return;
  }

  // Milakov & Gimelshein 2018: the sum of exponentials, rescaled whenever a larger logit appears.
  float largest = std::numeric_limits<float>::lowest(), sum = 0;
  const auto element = [=](const Pack& xs, int64_t v, int i) { return v + i < V ? xs[i] : -INFINITY; };
  for (int64_t v = first; v < V; v += step) {
    Pack xs;
    if constexpr (keep == detail::KeepRow::yes) {
      xs = Pack::load_streaming(row + v);
      xs.store(kept + v);
    } else {
      xs = Pack::load(row + v);
    }
    const float before = largest;
    for (int i = 0; i < pack; ++i) largest = fmaxf(largest, element(xs, v, i));
    sum *= exponential<T>(before - largest);
    for (int i = 0; i < pack; ++i) sum += exponential<T>(element(xs, v, i) - largest);
  }
  const float target_logit = to_float(row[target]);  // before the barriers after which the row is written
  const float maximum = block_max(largest);
  sum = block_sum(sum * exponential<T>(largest - maximum));
  if (threadIdx.x == 0) losses[blockIdx.x] = logf(sum) + maximum - target_logit;

  if constexpr (gradient == Gradient::yes) {
    const float factor = scale / sum;
    for (int64_t v = first; v < V_padded; v += step) {
      Pack xs, ds;
      if (v < V) xs = Pack::load((keep == detail::KeepRow::yes ? kept : row) + v);
      for (int i = 0; i < pack; ++i) {
        const float probability_scaled = exponential<T>(element(xs, v, i) - maximum) * factor;  // 0 in the padding
        ds.set(i, v + i == target ? probability_scaled - scale : probability_scaled);
      }
      ds.store_streaming(row + v);
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
    launch(cross_entropy_kernel<T, pack, wanted, keep>, static_cast<unsigned>(N), row_threads(V_padded, pack),
           keep == detail::KeepRow::yes ? bytes : 0, stream, losses, logits, targets, V, V_padded, scale);
  };
  const auto run_packed = [&]<int pack>() {
    if (gradient == Gradient::no) run.template operator()<pack, Gradient::no, detail::KeepRow::no>();
    else if (fits) run.template operator()<pack, Gradient::yes, detail::KeepRow::yes>();
    else run.template operator()<pack, Gradient::yes, detail::KeepRow::no>();
  };
  if (rows_fit_packs(V_padded, full_pack<T>, logits)) run_packed.template operator()<full_pack<T>>();
  else run_packed.template operator()<1>();
}

}  // namespace llmc::cuda
