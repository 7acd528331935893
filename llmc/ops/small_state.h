// small_state.h: optimizer state in fewer bits than fp32, the same arithmetic for every device. A number is widened,
// the optimizer's step is taken in fp32, and the result is rounded stochastically, since most changes are smaller than
// half the distance to the next number and would be lost.
//
//   bf16   2 bytes; a rounding changes a number by less than 2^-7 of it
//   8 bits   1 byte, and an fp32 scale for 64 numbers: the power of two that brings their largest into range. First
//            moments are E4M3: less than 2^-3 of a number, or 2^-16 of the block's largest if that is more. Second
//            moments, which are divided by, are e5m3: less than 2^-3, down to 2^-30 of the largest, and never 0
//   split    masters are a bf16 weight and 16 more bits: the same fp32 number
//
// Blocks begin at multiples of 64 elements of a unit, as the shards of ranks do, so every layout has the same blocks. A
// random word belongs to an element of a unit and a step: its upper half is for the first moment, its lower half for
// the second.
#pragma once
#include "core/dtype.h"
#include "core/rng.h"
#include "ops/types.h"

namespace llmc {

inline constexpr int64_t state_block = 64;

// Numbers of an optimizer's slot.
struct StateArray {
  DType dtype = DType::fp32;
  void* values = nullptr;   // none: the rule has no such slot
  float* scales = nullptr;  // of blocks, with e4m3 and e5m3
};

enum class Masters : uint8_t { weights, copy, split, none };  // fp32 weights; fp32 beside bf16; 16 bits; no masters

// A segment of whole blocks.
struct SmallUpdate {
  Masters masters = Masters::copy;
  void* weight = nullptr;  // fp32 with Masters::weights, else bf16
  void* master = nullptr;  // fp32 with Masters::copy, int16 with Masters::split
  StateArray slots[2] = {};
  const float* gradient = nullptr;
  const double* control = nullptr;
  int64_t first = 0, n = 0;                                    // elements [first, first + n) of a unit
  Philox words = Philox(0, ""), weight_words = Philox(0, "");  // of moments; of weights without masters
};

inline Philox state_words(uint64_t seed, std::string_view unit, int64_t step) {
  return Philox(seed, formatted("state of {}, rounded at step {}", unit, step));
}

constexpr float state_scale(DType dtype, float largest) {
  return dtype == DType::e5m3 ? fp8_scale<e5m3>(largest) : fp8_scale(largest);
}

}  // namespace llmc
