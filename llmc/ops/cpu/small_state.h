// small_state.h: an optimizer's step on state in few bits, block by block in fp32. Contract: ops/optimizers.h.
#pragma once
#include "ops/cpu/update.h"

namespace llmc::cpu {
inline namespace CPU_ISA {

namespace detail {

// The random words of a block: element i uses word i % 4 of counter i / 4.
inline void words_of_block(uint32_t* out, const Philox& words, int64_t first) {
  constexpr int64_t counters = state_block / 4;
  uint32_t by_word[4][counters];
#pragma omp simd
  for (int64_t c = 0; c < counters; ++c) {
    const auto four = words.words(static_cast<uint64_t>(first / 4 + c));
    for (size_t w = 0; w < 4; ++w) by_word[w][c] = four[w];
  }
  for (int64_t c = 0; c < counters; ++c)
    for (int64_t w = 0; w < 4; ++w) out[4 * c + w] = by_word[w][c];
}

template <class T>
void widen_block(float* out, const T* x, float scale) {
#pragma omp simd
  for (int64_t i = 0; i < state_block; ++i) out[i] = static_cast<float>(x[i]) * scale;
}
inline void load_slot(float* out, const StateArray& slot, int64_t begin) {
  const auto at = [&]<class T>(type_tag<T>) { return static_cast<const T*>(slot.values) + begin; };
  switch (slot.dtype) {
    case DType::bf16: return widen_block(out, at(type_tag<bf16>{}), 1.0f);
    case DType::e4m3: return widen_block(out, at(type_tag<e4m3>{}), slot.scales[begin / state_block]);
    case DType::e5m3: return widen_block(out, at(type_tag<e5m3>{}), slot.scales[begin / state_block]);
    default: return widen_block(out, at(type_tag<float>{}), 1.0f);
  }
}

template <class T>
void round_block(T* out, float* scale, const float* x, const uint32_t* random, int shift) {
  uint32_t largest = 0;
#pragma omp simd reduction(max : largest)
  for (int64_t i = 0; i < state_block; ++i) largest = std::max(largest, std::bit_cast<uint32_t>(x[i]) & 0x7fffffffu);
  *scale = fp8_scale<T>(std::bit_cast<float>(largest));
  const float factor = reciprocal_of_power(*scale);
#pragma omp simd
  for (int64_t i = 0; i < state_block; ++i)
    out[i].bits = T::stochastic(x[i] * factor, (random[i] >> shift) & 0xffffu).bits;
}
// shift: of the 16 random bits in a word
inline void store_slot(const StateArray& slot, int64_t begin, const float* x, const uint32_t* random, int shift) {
  const auto at = [&]<class T>(type_tag<T>) { return static_cast<T*>(slot.values) + begin; };
  switch (slot.dtype) {
    case DType::bf16: {
      bf16* out = at(type_tag<bf16>{});
#pragma omp simd
      for (int64_t i = 0; i < state_block; ++i) out[i].bits = bf16::stochastic_bits(x[i], random[i] >> shift << 16);
      return;
    }
    case DType::e4m3: return round_block(at(type_tag<e4m3>{}), slot.scales + begin / state_block, x, random, shift);
    case DType::e5m3: return round_block(at(type_tag<e5m3>{}), slot.scales + begin / state_block, x, random, shift);
    default: std::copy_n(x, state_block, at(type_tag<float>{}));
  }
}

inline void load_masters(float* out, const SmallUpdate& u, int64_t begin) {
  if (u.masters == Masters::weights) return widen_block(out, static_cast<const float*>(u.weight) + begin, 1.0f);
  const bf16* weight = static_cast<const bf16*>(u.weight) + begin;
  if (u.masters == Masters::none) return widen_block(out, weight, 1.0f);
  if (u.masters == Masters::copy) {
    const float* master = static_cast<const float*>(u.master) + begin;
#pragma omp simd
    for (int64_t i = 0; i < state_block; ++i) out[i] = splittable(master[i]);
    return;
  }
  const int16_t* lower = static_cast<const int16_t*>(u.master) + begin;
#pragma omp simd
  for (int64_t i = 0; i < state_block; ++i) out[i] = joined_halves(weight[i].bits, lower[i]);
}
inline void store_masters(const SmallUpdate& u, int64_t begin, const float* x) {
  if (u.masters == Masters::weights) {
    std::copy_n(x, state_block, static_cast<float*>(u.weight) + begin);
    return;
  }
  bf16* weight = static_cast<bf16*>(u.weight) + begin;
  if (u.masters == Masters::none) {
    uint32_t random[state_block];
    words_of_block(random, u.weight_words, u.first + begin);
#pragma omp simd
    for (int64_t i = 0; i < state_block; ++i) weight[i].bits = bf16::stochastic_bits(x[i], random[i]);
    return;
  }
#pragma omp simd
  for (int64_t i = 0; i < state_block; ++i) weight[i].bits = bf16::rounded_bits(splittable(x[i]));
  if (u.masters == Masters::copy) {
    float* master = static_cast<float*>(u.master) + begin;
#pragma omp simd
    for (int64_t i = 0; i < state_block; ++i) master[i] = splittable(x[i]);
    return;
  }
  int16_t* lower = static_cast<int16_t*>(u.master) + begin;
#pragma omp simd
  for (int64_t i = 0; i < state_block; ++i) lower[i] = lower_half(splittable(x[i]));
}

}  // namespace detail

// Nothing changes where control (4) forbids the update.
inline void update_small_state(Optimizer optimizer, const SmallUpdate& u, const OptimizerOptions& options) {
  if (u.control[2] == 0) return;
  with_step<float>(optimizer, options, [&](auto step) {
    const float gradient_scale = step.slots == 0 ? 1 : static_cast<float>(u.control[1]);
#pragma omp parallel for schedule(static)
    for (int64_t begin = 0; begin < u.n; begin += state_block) {
      float weights[state_block], slots[2][state_block];
      uint32_t random[state_block] = {};
      detail::load_masters(weights, u, begin);
      for (size_t s = 0; s != step.slots; ++s) detail::load_slot(slots[s], u.slots[s], begin);
      advance_blocks(step, weights, slots[0], slots[1], u.gradient + begin, gradient_scale, state_block);
      detail::store_masters(u, begin, weights);
      if (step.slots > 0) detail::words_of_block(random, u.words, u.first + begin);
      for (size_t s = 0; s != step.slots; ++s) detail::store_slot(u.slots[s], begin, slots[s], random, s == 0 ? 16 : 0);
    }
  });
}

}  // namespace CPU_ISA
}  // namespace llmc::cpu
