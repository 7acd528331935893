// precision.h: which dtype each part of a run has: a value for each.
#pragma once
#include "core/dtype.h"

namespace llmc {

// Sums, and everything that is updated in small steps, are kept in this dtype.
inline DType accumulator_of(DType dtype) { return dtype == DType::fp64 ? DType::fp64 : DType::fp32; }

// How a product reads its operands: as they are stored, or rounded to eight bits in blocks that are scaled by powers of
// two: to E4M3 in blocks of 128; with fp8 gradients to E5M2; with mxfp8 in blocks of 32; with fp8_tensor as with fp8,
// but each operand is one block (ops/ops_quantise.h).
enum class Operands : uint8_t { as_stored, fp8_block, fp8, mxfp8, fp8_tensor };

// The place of a block in a model: so many blocks come before it, and after it.
struct BlockPlace {
  int64_t before = 0, after = 0;
};
// The blocks of a model that read operands as they are stored all the same: so many first ones, and last ones.
struct SkippedBlocks {
  int64_t first = 0, last = 0;
  bool any() const { return first > 0 || last > 0; }
  bool have(const BlockPlace& block) const { return block.before < first || block.after < last; }
  bool operator==(const SkippedBlocks&) const = default;
  operator std::string() const { return std::to_string(first) + (last > 0 ? "," + std::to_string(last) : ""); }
};

struct Precision {
  DType weights = DType::fp32;            // as ranks hold and gather them
  DType activations = DType::fp32;        // and their gradients, between layers and between stages
  DType products = DType::fp32;           // the operands of matrix products
  Operands linear = Operands::as_stored;  // how linear layers of blocks read theirs in training
  SkippedBlocks fp8_skip = {};            // but not those of these blocks
  bool gathers_fp8 = false;               // weights of linear layers travel as E4M3 in training, at stage 3
  DType wire = DType::fp32;               // gradients on their way between data-parallel ranks
  DType state = DType::fp32;              // sums of gradients, master weights, optimizer slots, statistics of rows
  // Other dtypes of the optimizer's slots; none: `state`. e4m3 and e5m3 stand for 8 bits.
  std::optional<DType> moment1 = {}, moment2 = {};
  bool split_masters = false;  // masters are the weights and 16 more bits each
  bool averages = false;       // a moving average of the weights, in `state`
  bool masters = true;         // copies of the weights in `state`; without them updates are rounded stochastically

  Precision() = default;
  // Mixed precision as one word: weights, activations and products in this dtype, all sums in its accumulator.
  Precision(DType dtype)  // NOLINT: implicit, as --dtype says it
      : weights(dtype),
        activations(dtype),
        products(dtype),
        wire(accumulator_of(dtype)),
        state(accumulator_of(dtype)) {}

  // Do weights, activations and products have one dtype, and sums its accumulator? So far, all kernels expect this.
  bool uniform() const { return activations == weights && products == weights && state == accumulator_of(weights); }
  // How the linear layers of a block read their operands.
  Operands linear_of(const BlockPlace& block) const { return fp8_skip.have(block) ? Operands::as_stored : linear; }
  bool keeps_masters() const { return masters && weights != state; }
  DType master_dtype() const { return split_masters ? DType::int16 : state; }
  DType slot_dtype(size_t slot) const { return (slot == 0 ? moment1 : moment2).value_or(state); }
  bool small_state() const { return moment1 || moment2 || (split_masters && keeps_masters()); }
  bool operator==(const Precision&) const = default;
};

}  // namespace llmc
