// fp8_weights.h: the matrices of a unit that --products in fp8 is about, and their numbers in fp8, which are kept
// beside the weights where these are whole between steps (stages 0 to 2): made once per update, when a step first uses
// the unit, for all micro-batches, forward and backward. At stage 3 products round what was gathered, or shards are
// rounded before they travel (Fp8Shard).
#pragma once
#include "ops/ops.h"
#include "shard/params.h"

namespace llmc {

// A matrix of a linear layer, or all of one kind of a layer's experts, one after another; as products read it: adjacent
// parameters are one matrix.
struct LinearMatrix {
  int64_t begin;                    // in the unit
  int64_t matrices, rows, columns;  // one, or one of each expert
  bool of_experts = false;

  TiledPart whole() const { return {matrices, rows, columns, 0, matrices * rows * columns}; }
  Shape shape() const { return of_experts ? Shape{matrices, rows, columns} : Shape{rows, columns}; }
};

inline std::vector<LinearMatrix> linear_matrices_of(const UnitSpec& unit, const UnitLayout& layout) {
  std::vector<LinearMatrix> all;
  const auto& params = unit.params;
  for (size_t i = 0; i < params.size();) {
    const ParamSpec& first = params[i];
    LinearMatrix m{layout.offsets[i], first.expert ? 0 : 1, 0, first.box().columns, first.expert.has_value()};
    do {
      m.rows += params[i].box().rows;
      m.matrices += m.of_experts && (m.matrices == 0 || params[i].expert != params[i - 1].expert);
    } while (++i < params.size() && params[i].placement == Placement::adjacent);
    m.rows /= m.matrices;
    const bool divided = first.tp == TensorSplit::outputs || first.tp == TensorSplit::inputs;  // a router is not
    if (first.shape.rank() == 2 && (m.of_experts || divided)) all.push_back(m);
  }
  return all;
}

class Fp8Weights {
 public:
  Fp8Weights() = default;
  // versions: buffers of the unit's weights
  Fp8Weights(const std::vector<LinearMatrix>& matrices, const std::vector<Tensor>& versions, Operands read,
             const char* unit, Arena& arena)
      : read_(read) {
    for (const Tensor& weights : versions)
      for (const LinearMatrix& m : matrices) {
        Tensor of = weights.slice(m.begin, m.shape());
        of.name = unit;
        kept_.push_back({of, detail::room_in_fp8(of, detail::Role::weights, detail::SumAlong::both, read,
                                                 arena.device(), arena, "weights in fp8")});
      }
  }

  // How a linear layer reads this matrix and its other operands.
  Reading reading(Operands read, const Tensor& matrix) const {
    if (read != Operands::as_stored)
      for (const Kept& k : kept_)
        if (k.of.bytes == matrix.bytes) return {read, k.numbers};
    return read;
  }
  // weights: the version of which they change, and of which numbers are made again.
  void changed(const Tensor& weights) {
    for (Kept& k : kept_) k.outdated |= k.is_in(weights);
  }
  void make_again(const Tensor& weights, Stream& stream) {
    for (Kept& k : kept_)
      if (k.outdated && k.is_in(weights)) {
        detail::quantise(k.numbers, k.of, detail::Role::weights, read_, stream);
        k.outdated = false;
      }
  }

 private:
  struct Kept {
    Tensor of;
    detail::Quantised numbers;
    bool outdated = true;
    bool is_in(const Tensor& weights) const {
      return of.bytes >= weights.bytes && of.bytes < weights.bytes + weights.size_bytes();
    }
  };
  Operands read_ = Operands::as_stored;
  std::vector<Kept> kept_;
};

}  // namespace llmc
