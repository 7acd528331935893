// update.cuh: an optimizer's step on one segment, and the moving average of its weights; each array is read and written
// once. Contracts: ops/ops.h.
#pragma once
#include "ops/cuda/launch.cuh"
#include "ops/cuda/vec.cuh"
#include "ops/optimizers.h"

namespace llmc::cuda {

// Where the fp32 weights are: the weights themselves, a separate copy, or nowhere (stochastic rounding).
enum class Master : uint8_t { weights, copy, none };

// A step on one element; slots that the rule does not have are not read.
template <class Step>
__device__ void take_step(const Step& step, float& weight, float& slot1, float& slot2, float gradient) {
  if constexpr (Step::slots == 2) step(weight, slot1, slot2, gradient);
  else if constexpr (Step::slots == 1) step(weight, slot1, gradient);
  else step(weight, gradient);
}

// One thread per pack; the last, partial pack is processed element by element. The segment has these elements of
// its parameter; the four elements of a pack use one block of random numbers.
template <class W, Master where, int pack, class Step>
__global__ void update_kernel(W* __restrict__ weight, float* __restrict__ master, float* __restrict__ slot1,
                              float* __restrict__ slot2, const float* __restrict__ gradient,
                              const double* __restrict__ control, Elements elements, int64_t n, Step step,
                              Philox words) {
  if (control[2] == 0) return;
  const float gradient_scale = Step::slots == 0 ? 1.0f : static_cast<float>(control[1]);
  const auto apply = [&]<int size>(int64_t at) {
    using Pack = Packed<float, size>;
    const Pack gs = Pack::load_streaming(gradient + at);
    Pack firsts, seconds, ps;
    if constexpr (Step::slots >= 1) firsts = Pack::load_streaming(slot1 + at);
    if constexpr (Step::slots == 2) seconds = Pack::load_streaming(slot2 + at);
    Packed<W, size> ws;
    if constexpr (where == Master::copy) {
      ps = Pack::load_streaming(master + at);
      for (int i = 0; i < size; ++i) ps.elements[i] = splittable(ps[i]);
    } else {
      ws = Packed<W, size>::load(weight + at);
      for (int i = 0; i < size; ++i) ps.set(i, ws[i]);
    }
    for (int i = 0; i < size; ++i) {
      const float g = gs[i] * gradient_scale;
      take_step(step, ps.elements[i], firsts.elements[i], seconds.elements[i], g);
    }
    if constexpr (where == Master::copy)
      for (int i = 0; i < size; ++i) ps.elements[i] = splittable(ps[i]);
    if constexpr (where == Master::none) {
      const int64_t index = elements.index(at), first = index % 4;
      const auto random = words.words(static_cast<uint64_t>(index / 4));
      for (int i = 0; i < size; ++i)
        for (int j = 0; j < 4; ++j)  // registers can only be indexed by constants
          if (first + i == j) ws.elements[i].bits = bf16::stochastic_bits(ps[i], random[static_cast<size_t>(j)]);
    } else {
      for (int i = 0; i < size; ++i) ws.set(i, ps[i]);
    }
    ws.store(weight + at);
    if constexpr (where == Master::copy) ps.store_streaming(master + at);
    if constexpr (Step::slots >= 1) firsts.store_streaming(slot1 + at);
    if constexpr (Step::slots == 2) seconds.store_streaming(slot2 + at);
  };
  const int64_t first = item_of_thread() * pack;
  if (first + pack <= n) apply.template operator()<pack>(first);
  else
    for (int64_t i = first; i < n; ++i) apply.template operator()<1>(i);
}

namespace detail {

// Does each pack of four elements (0 to 3, 4 to 7, ...) match a block of random numbers, which belongs to elements
// 4 k to 4 k + 3 of the parameter?
inline bool are_blocks(const Elements& e) {
  return e.index(0) % 4 == 0 &&
         (e.columns == e.stride || (e.begin % 4 == 0 && e.columns % 4 == 0 && e.stride % 4 == 0));
}

template <Master where, class W>
void update_weights(Optimizer optimizer, W* weight, float* master, float* slot1, float* slot2, const float* gradient,
                    const double* control, const Elements& elements, int64_t n, const OptimizerOptions& options,
                    const Philox& words, cudaStream_t stream) {
  with_step<float>(optimizer, options, [&](auto step) {
    with_packs<4>(fit_packs(weight, master, slot1, slot2, gradient) && are_blocks(elements), [&]<int pack>() {
      launch_each(update_kernel<W, where, pack, decltype(step)>, ceil_div(n, pack), stream, weight, master, slot1,
                  slot2, gradient, control, elements, n, step, words);
    });
  });
}

}  // namespace detail

// master: nullptr where the weights are fp32 and their own master copy. slot2 is unused where the rule has one slot.
template <class W>
void update_weights(Optimizer optimizer, W* weight, float* master, float* slot1, float* slot2, const float* gradient,
                    const double* control, int64_t n, const OptimizerOptions& options, cudaStream_t stream) {
  constexpr bool fp32 = std::is_same_v<W, float>;
  CHECK((master == nullptr) == fp32, "update_weights: weights in {} {}", fp32 ? "fp32" : "bf16",
        fp32 ? "are their own master copy" : "need a master copy, or update_weights_stochastic");
  detail::update_weights<fp32 ? Master::weights : Master::copy>(optimizer, weight, master, slot1, slot2, gradient,
                                                                control, {}, n, options, Philox(0, "unused"), stream);
}

// bf16 weights without a master copy; see cpu/update.h. words: rounding_words(seed, parameter, step)
inline void update_weights_stochastic(Optimizer optimizer, bf16* weight, float* slot1, float* slot2,
                                      const float* gradient, const double* control, const Elements& elements, int64_t n,
                                      const OptimizerOptions& options, const Philox& words, cudaStream_t stream) {
  detail::update_weights<Master::none, bf16>(optimizer, weight, nullptr, slot1, slot2, gradient, control, elements, n,
                                             options, words, stream);
}

// One thread per element: fp32 loads of neighbours are whole transactions.
template <int = 0>
__global__ void average_weights_kernel(float* __restrict__ average, const float* __restrict__ weight,
                                       const double* __restrict__ control, int64_t n, float share) {
  if (control[2] == 0) return;
  const int64_t i = item_of_thread();
  if (i < n) average[i] += share * (weight[i] - average[i]);
}

template <int = 0>
__global__ void exchange_kernel(float* __restrict__ a, float* __restrict__ b, int64_t n) {
  const int64_t i = item_of_thread();
  if (i >= n) return;
  const float before = a[i];
  a[i] = b[i];
  b[i] = before;
}

inline void average_weights(float* average, const float* weight, const double* control, int64_t n, float share,
                            cudaStream_t stream) {
  launch_each(average_weights_kernel<>, n, stream, average, weight, control, n, share);
}

inline void exchange(float* a, float* b, int64_t n, cudaStream_t stream) {
  launch_each(exchange_kernel<>, n, stream, a, b, n);
}

}  // namespace llmc::cuda
