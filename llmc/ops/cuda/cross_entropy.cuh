// cross_entropy.cuh: softmax, cross-entropy and its gradient in one kernel, in place on the logits. One block per row,
// which it keeps in shared memory, so that the row is read and written once; of a row that does not fit, the end is
// read a second time, from L2. For a vocabulary in parts on several ranks there are two kernels, between which the
// ranks exchange three numbers per row. Contracts: ops/ops.h.
#pragma once
#include "ops/cuda/rows.cuh"
#include "ops/types.h"

namespace llmc::cuda {

namespace detail {

enum class Reads : uint8_t { again, once };  // once: the row need not stay in the caches

// f(pack, its first column) for the columns [begin, end) of a row: thread by thread, each with several loads in flight.
template <class Pack, int in_flight = 8, Reads reads = Reads::again, class T, class F>
__device__ void for_packs(const T* row, int begin, int end, F f) {
  const int step = static_cast<int>(blockDim.x) * Pack::size;
  for (int v = begin + static_cast<int>(threadIdx.x) * Pack::size; v < end; v += in_flight * step) {
    Kept<Pack> packs[in_flight];
#pragma unroll
    for (int j = 0; j < in_flight; ++j)
      if (const int at = v + j * step; at < end)
        packs[j] = reads == Reads::once ? Pack::load_streaming(row + at) : Pack::load(row + at);
#pragma unroll
    for (int j = 0; j < in_flight; ++j)
      if (v + j * step < end) f(packs[j], v + j * step);
  }
}

// The same for columns [0, kept), which are copied to shared memory: all copies of a thread are under way at once, in
// groups, and it takes what it copied itself.
template <class T, class Pack, class F>
__device__ void for_kept_packs(T* kept_row, const T* row, int kept, F f) {
  if constexpr (Pack::bytes == 16) {
    constexpr int groups = 4;
    const int step = static_cast<int>(blockDim.x) * Pack::size, of_group = (kept + groups * step - 1) / (groups * step);
    const auto for_group = [&](int group, auto&& use) {
      const int end = min(kept, (group + 1) * of_group * step);
      for (int v = group * of_group * step + static_cast<int>(threadIdx.x) * Pack::size; v < end; v += step) use(v);
    };
#pragma unroll
    for (int group = 0; group < groups; ++group) {
      for_group(group, [&](int v) { cp_async_16(kept_row + v, row + v); });
      cp_async_commit();
    }
    const auto take = [&](int v) { f(Kept<Pack>(Pack::load(kept_row + v)), v); };
    cp_async_wait<3>();
    for_group(0, take);
    cp_async_wait<2>();
    for_group(1, take);
    cp_async_wait<1>();
    for_group(2, take);
    cp_async_wait<0>();
    for_group(3, take);
  } else {
    for_packs<Pack>(row, 0, kept, [&](const Kept<Pack>& packed, int v) {
      packed.store(kept_row + v);
      f(packed, v);
    });
  }
}

// The logits from column v on. Columns from V on are padding, which counts as minus infinity.
template <class Pack>
__device__ Floats<Pack::size> logits_of(const Kept<Pack>& packed, int v, int V) {
  Floats<Pack::size> xs = packed.fp32();
  if (v + Pack::size > V)
    for (int i = 0; i < Pack::size; ++i)
      if (v + i >= V) xs[i] = -INFINITY;
  return xs;
}

// Milakov & Gimelshein 2018: the sum of exponentials, rescaled whenever a larger logit appears.
template <class T>
struct SoftmaxSum {
  float largest = std::numeric_limits<float>::lowest(), sum = 0;

  template <int pack>
  __device__ void add(const Floats<pack>& xs) {
    const float before = largest;
    for (int i = 0; i < pack; ++i) largest = fmaxf(largest, xs[i]);
    sum *= exponential<T>(before - largest);
    for (int i = 0; i < pack; ++i) sum += exponential<T>(xs[i] - largest);
  }
  // Combines all threads of the block.
  __device__ void reduce() {
    const float maximum = block_max(largest);
    sum = block_sum(sum * exponential<T>(largest - maximum));
    largest = maximum;
  }
};

// The gradients of a pack of logits, which may include column `target`: scale (softmax - 1 at the target). factor:
// scale / sum
template <class T, int pack>
__device__ Packed<T, pack> softmax_gradient(Floats<pack> xs, int v, float largest, float factor, int target,
                                            float scale) {
  for (int i = 0; i < pack; ++i) xs[i] = exponential<T>(xs[i] - largest) * factor;
  if (target >= v && target < v + pack)
    for (int i = 0; i < pack; ++i)
      if (v + i == target) xs[i] -= scale;
  return Packed<T, pack>::of(xs);
}

// This thread's part of the columns in [begin, V_padded) = 0
template <class T, int pack>
__device__ void zero_row(T* row, int begin, int V_padded) {
  const auto zeros = Packed<T, pack>::of({});
  for (int v = begin + static_cast<int>(threadIdx.x) * pack; v < V_padded; v += static_cast<int>(blockDim.x) * pack)
    zeros.store_streaming(row + v);
}

inline constexpr int64_t row_softmax_threads = 512;  // two blocks on each multiprocessor

}  // namespace detail

// Grid N. Dynamic shared memory: the first `kept` columns, none without a gradient; each thread reads only what it
// stored itself.
template <class T, int pack, Gradient gradient>
__global__ void __launch_bounds__(1024)
    cross_entropy_kernel(float* __restrict__ losses, T* logits, const int32_t* __restrict__ targets, int V,
                         int V_padded, int kept, float scale, ZLoss<float> z) {
  using Pack = Packed<T, pack>;
  T* kept_row = nullptr;  // (kept)
  if constexpr (gradient == Gradient::yes) {
    DYN_SHARED(T, shared);
    kept_row = shared;
  }
  T* row = logits + static_cast<int64_t>(blockIdx.x) * V_padded;
  const int target = targets[blockIdx.x];
  if (target < 0) {
    if (threadIdx.x == 0) losses[blockIdx.x] = 0, z.record(blockIdx.x, 0);
    if constexpr (gradient == Gradient::yes) detail::zero_row<T, pack>(row, 0, V_padded);
    return;
  }

  detail::SoftmaxSum<T> softmax;
  const int in_kept = std::min(kept, V);
  const auto add = [&](const Kept<Pack>& packed, int v) { softmax.add(detail::logits_of(packed, v, V)); };
  if constexpr (gradient == Gradient::yes) detail::for_kept_packs<T, Pack>(kept_row, row, in_kept, add);
  detail::for_packs<Pack>(row, in_kept, V, add);
  const float target_logit = to_float(row[target]);  // before the barriers after which the row is written
  softmax.reduce();
  const float log_z = logf(softmax.sum) + softmax.largest;
  if (threadIdx.x == 0) losses[blockIdx.x] = log_z - target_logit, z.record(blockIdx.x, log_z);

  if constexpr (gradient == Gradient::yes) {
    const float factor = scale * z.gradient(log_z) / softmax.sum;
    const auto store = [&](const Kept<Pack>& packed, int v) {
      detail::softmax_gradient<T>(detail::logits_of(packed, v, V), v, softmax.largest, factor, target, scale)
          .store_streaming(row + v);
    };
    detail::for_packs<Pack>(row, in_kept, V, store);
    detail::for_packs<Pack, 2>(kept_row, 0, in_kept, store);
    detail::zero_row<T, pack>(row, static_cast<int>(round_up(V, pack)), V_padded);
  }
}

template <class T>
void cross_entropy(float* losses, T* logits, const int32_t* targets, int64_t N, int64_t V, int64_t V_padded,
                   float scale, Gradient gradient, const ZLoss<float>& z, cudaStream_t stream) {
  constexpr int64_t static_shared = 1 << 10;  // upper bound for the reductions' arrays
  constexpr int64_t element = sizeof(T);
  with_packs<full_pack<T>>(rows_fit_packs(V_padded, full_pack<T>, logits), [&]<int pack>() {
    const bool keeps = gradient == Gradient::yes;
    // Two blocks on each multiprocessor, one reading while the other one writes, if the rows of both fit.
    const bool two = !keeps || 2 * (V_padded * element + static_shared) <= max_shared_bytes;
    const int64_t threads = row_threads(V_padded, pack, two ? detail::row_softmax_threads : 1024),
                  step = threads * pack;
    // Whole steps, so that each thread has the same columns whatever fits.
    const int64_t fits = (device_shared_bytes() - static_shared) / (step * element) * step;
    const int64_t kept = keeps ? std::min(round_up(V, step), fits) : 0;
    const auto kernel =
        keeps ? cross_entropy_kernel<T, pack, Gradient::yes> : cross_entropy_kernel<T, pack, Gradient::no>;
    launch(kernel, N, threads, std::min(kept, V_padded) * element, stream, losses, logits, targets, static_cast<int>(V),
           static_cast<int>(V_padded), static_cast<int>(kept), scale, z);
  });
}

// Grid N.
template <class T, int pack>
__global__ void __launch_bounds__(detail::row_softmax_threads)
    cross_entropy_stats_kernel(float* __restrict__ stats, const T* __restrict__ logits,
                               const int32_t* __restrict__ targets, int64_t V_padded, Vocabulary part) {
  using Pack = Packed<T, pack>;
  const T* row = logits + blockIdx.x * V_padded;
  const int V = static_cast<int>(part.size);
  detail::SoftmaxSum<T> softmax;
  detail::for_packs<Pack>(row, 0, V,
                          [&](const Kept<Pack>& packed, int v) { softmax.add(detail::logits_of(packed, v, V)); });
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
__global__ void __launch_bounds__(detail::row_softmax_threads)
    cross_entropy_merge_kernel(float* __restrict__ losses, T* __restrict__ logits, const float* __restrict__ stats,
                               const int32_t* __restrict__ targets, int64_t P, int64_t V_padded, Vocabulary part,
                               float scale, ZLoss<float> z) {
  using Pack = Packed<T, pack>;
  T* row = logits + blockIdx.x * V_padded;
  const int64_t target = targets[blockIdx.x];
  if (target < 0) {
    if (threadIdx.x == 0) losses[blockIdx.x] = 0, z.record(blockIdx.x, 0);
    if constexpr (gradient == Gradient::yes) detail::zero_row<T, pack>(row, 0, static_cast<int>(V_padded));
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
  const float log_z = logf(sum) + largest;
  if (threadIdx.x == 0) losses[blockIdx.x] = log_z - target_logit, z.record(blockIdx.x, log_z);

  if constexpr (gradient == Gradient::yes) {
    const float factor = scale * z.gradient(log_z) / sum;
    const int V = static_cast<int>(part.size), column = static_cast<int>(part.has(target) ? target - part.first : -1);
    detail::for_packs<Pack, 8, detail::Reads::once>(row, 0, V, [&](const Kept<Pack>& packed, int v) {
      detail::softmax_gradient<T>(detail::logits_of(packed, v, V), v, largest, factor, column, scale)
          .store_streaming(row + v);
    });
    detail::zero_row<T, pack>(row, static_cast<int>(round_up(V, pack)), static_cast<int>(V_padded));
  }
}

template <class T>
void cross_entropy_stats(float* stats, const T* logits, const int32_t* targets, int64_t N, int64_t V_padded,
                         const Vocabulary& part, cudaStream_t stream) {
  with_packs<full_pack<T>>(rows_fit_packs(V_padded, full_pack<T>, logits), [&]<int pack>() {
    launch(cross_entropy_stats_kernel<T, pack>, N, row_threads(V_padded, pack, detail::row_softmax_threads), 0, stream,
           stats, logits, targets, V_padded, part);
  });
}

template <class T>
void cross_entropy_merge(float* losses, T* logits, const float* stats, const int32_t* targets, int64_t P, int64_t N,
                         int64_t V_padded, const Vocabulary& part, float scale, Gradient gradient,
                         const ZLoss<float>& z, cudaStream_t stream) {
  const auto run = [&]<int pack, Gradient wanted>() {
    const unsigned threads =
        wanted == Gradient::yes ? row_threads(V_padded, pack, detail::row_softmax_threads) : warp_size;
    launch(cross_entropy_merge_kernel<T, pack, wanted>, N, threads, 0, stream, losses, logits, stats, targets, P,
           V_padded, part, scale, z);
  };
  if (gradient == Gradient::no) run.template operator()<1, Gradient::no>();
  else if (rows_fit_packs(V_padded, full_pack<T>, logits)) run.template operator()<full_pack<T>, Gradient::yes>();
  else run.template operator()<1, Gradient::yes>();
}

}  // namespace llmc::cuda
