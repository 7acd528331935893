// small_state.cuh: an optimizer's step on state in few bits. Contract: ops/optimizers.h.
#pragma once
#include "ops/cuda/quantise.cuh"
#include "ops/cuda/update.cuh"
#include "ops/cuda/vec.cuh"
#include "ops/optimizers.h"

namespace llmc::cuda {

namespace detail {

inline constexpr int of_thread = 4, block_lanes = state_block / of_thread;  // elements; threads of a block of state
using Numbers = Floats<of_thread>;

template <class T>
__device__ Numbers load_state(const void* from, int64_t at, float scale = 1) {
  const auto pack = Packed<T, of_thread>::load(static_cast<const T*>(from) + at);
  Numbers out;
  for (int i = 0; i < of_thread; ++i) {
    if constexpr (sizeof(T) == 1) out[i] = static_cast<float>(pack.elements[i]) * scale;
    else out[i] = pack[i] * scale;
  }
  return out;
}
__device__ inline Numbers load_slot(const StateArray& slot, int64_t at) {
  switch (slot.dtype) {
    case DType::bf16: return load_state<bf16>(slot.values, at);
    case DType::e4m3: return load_state<e4m3>(slot.values, at, slot.scales[at / state_block]);
    case DType::e5m3: return load_state<e5m3>(slot.values, at, slot.scales[at / state_block]);
    default: return load_state<float>(slot.values, at);
  }
}
// All lanes of a warp take part; those that are not active store nothing. shift: of the 16 random bits in a word
template <class T>
__device__ void round_block(const StateArray& slot, int64_t at, bool active, const Numbers& x,
                            const std::array<uint32_t, 4>& random, int shift) {
  float largest = 0;
  for (int i = 0; i < of_thread; ++i) largest = larger_magnitude(largest, x[i]);
  largest = warp_reduce<block_lanes>(largest, Magnitude{});
  const float scale = state_scale(slot.dtype, largest), factor = reciprocal_of_power(scale);
  Packed<T, of_thread> pack;
#pragma unroll
  for (int i = 0; i < of_thread; ++i)
    pack.elements[i] = T::stochastic(x[i] * factor, (random[static_cast<size_t>(i)] >> shift) & 0xffffu);
  if (!active) return;
  pack.store(static_cast<T*>(slot.values) + at);
  if (at % state_block == 0) slot.scales[at / state_block] = scale;
}
__device__ inline void store_slot(const StateArray& slot, int64_t at, bool active, const Numbers& x,
                                  const std::array<uint32_t, 4>& random, int shift) {
  if (slot.dtype == DType::e4m3) return round_block<e4m3>(slot, at, active, x, random, shift);
  if (slot.dtype == DType::e5m3) return round_block<e5m3>(slot, at, active, x, random, shift);
  if (!active) return;
  if (slot.dtype == DType::bf16) {
    Packed<bf16, of_thread> pack;
#pragma unroll
    for (int i = 0; i < of_thread; ++i)
      pack.elements[i].bits = bf16::stochastic_bits(x[i], random[static_cast<size_t>(i)] >> shift << 16);
    return pack.store(static_cast<bf16*>(slot.values) + at);
  }
  x.store(static_cast<float*>(slot.values) + at);
}

__device__ inline Numbers load_masters(const SmallUpdate& u, int64_t at) {
  if (u.masters == Masters::weights) return load_state<float>(u.weight, at);
  if (u.masters == Masters::none) return load_state<bf16>(u.weight, at);
  Numbers out;
  if (u.masters == Masters::copy) {
    out = load_state<float>(u.master, at);
    for (float& x : out.values) x = splittable(x);
    return out;
  }
  const auto upper = Packed<bf16, of_thread>::load(static_cast<const bf16*>(u.weight) + at);
  const auto lower = Packed<int16_t, of_thread>::load(static_cast<const int16_t*>(u.master) + at);
  for (int i = 0; i < of_thread; ++i) out[i] = joined_halves(upper.elements[i].bits, lower.elements[i]);
  return out;
}
__device__ inline void store_masters(const SmallUpdate& u, int64_t at, const Numbers& x) {
  if (u.masters == Masters::weights) return x.store(static_cast<float*>(u.weight) + at);
  bf16* const weight = static_cast<bf16*>(u.weight) + at;
  if (u.masters == Masters::none) {
    const auto random = u.weight_words.words(static_cast<uint64_t>((u.first + at) / 4));
    Packed<bf16, of_thread> rounded;
#pragma unroll
    for (int i = 0; i < of_thread; ++i)
      rounded.elements[i].bits = bf16::stochastic_bits(x[i], random[static_cast<size_t>(i)]);
    return rounded.store(weight);
  }
  Numbers wide;
  for (int i = 0; i < of_thread; ++i) wide[i] = splittable(x[i]);
  Packed<bf16, of_thread>::of(wide).store(weight);
  if (u.masters == Masters::copy) return wide.store(static_cast<float*>(u.master) + at);
  Packed<int16_t, of_thread> lower;
  for (int i = 0; i < of_thread; ++i) lower.elements[i] = lower_half(wide[i]);
  lower.store(static_cast<int16_t*>(u.master) + at);
}

// A thread has four elements, and 16 threads a block of state.
template <class Step>
__global__ void __launch_bounds__(256) small_state_kernel(SmallUpdate u, Step step) {
  if (u.control[2] == 0) return;
  const float gradient_scale = Step::slots == 0 ? 1.0f : static_cast<float>(u.control[1]);
  const int64_t at = item_of_thread() * of_thread;
  const bool active = at < u.n;
  Numbers weights = {}, slots[2] = {}, gradient = {};
  if (active) {
    weights = load_masters(u, at);
    for (size_t s = 0; s != Step::slots; ++s) slots[s] = load_slot(u.slots[s], at);
    gradient = load_state<float>(u.gradient, at);
  }
#pragma unroll
  for (int i = 0; i < of_thread; ++i)
    take_step(step, weights[i], slots[0][i], slots[1][i], gradient[i] * gradient_scale);
  if (active) store_masters(u, at, weights);
  if constexpr (Step::slots > 0) {
    const auto random = u.words.words(static_cast<uint64_t>((u.first + at) / 4));
    for (size_t s = 0; s != Step::slots; ++s) store_slot(u.slots[s], at, active, slots[s], random, s == 0 ? 16 : 0);
  }
}

}  // namespace detail

inline void update_small_state(Optimizer optimizer, const SmallUpdate& u, const OptimizerOptions& options,
                               cudaStream_t stream) {
  with_step<float>(optimizer, options, [&](auto step) {
    launch_each(detail::small_state_kernel<decltype(step)>, ceil_div(u.n, detail::of_thread), stream, u, step);
  });
}

}  // namespace llmc::cuda
