// params.h: the one list of parameters. A ParamSpec says all there is to say about a canonical parameter; sizes,
// gradients, optimizer state, checkpoints and plans derive from the table. Units group parameters into flat, padded
// buffers: one per block, one for the embedding, one for the head; the quantum of gathering, reducing and updating.
#pragma once
#include <algorithm>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "core/dtype.h"
#include "core/shape.h"

namespace llmc {

enum class Init : uint8_t { normal, zeros, ones };

// How tensor parallelism treats a parameter (used when that axis is wider than 1).
enum class TensorSplit : uint8_t {
  axis0,                         // column parallel: each rank holds rows of the (out, in) matrix
  axis1,                         // row parallel
  replicated,                    // every rank computes the whole gradient
  replicated_partial_gradients,  // every rank computes a part of the gradient: add them up
};

// Where a parameter lies in its unit's flat buffer.
enum class Placement : uint8_t {
  aligned,   // at the next multiple of UnitLayout::alignment elements
  adjacent,  // right behind the one before: q, k and v are one matrix to the matmul, three parameters to all others
};

struct ParamSpec {
  std::string name;  // canonical: "blocks.0.attn.q.weight"
  Shape shape;       // global, as everyone outside sees it; matrices are (out, in)
  TensorSplit tp = TensorSplit::replicated;
  Init init = Init::normal;
  float init_std = 0.02f;
  bool decay = false;       // weight decay: matrices only
  int64_t padded_rows = 0;  // rows stored, the last of them always zero; 0: as many as shape has
  Placement placement = Placement::aligned;

  int64_t numel() const { return shape.numel(); }
  Shape stored_shape() const {
    Shape stored = shape;
    if (padded_rows > 0) stored[0] = padded_rows;
    return stored;
  }
};

struct UnitSpec {
  std::string name;  // "embedding", "blocks.0", "head"
  std::vector<ParamSpec> params;
};

using ParamTable = std::vector<UnitSpec>;  // in the order of the forward pass

inline int64_t count_parameters(const ParamTable& table) {
  int64_t n = 0;
  for (const UnitSpec& unit : table)
    for (const ParamSpec& p : unit.params) n += p.numel();
  return n;
}

// A unit's flat buffer, in elements, padded so that it falls into equal aligned parts.
struct UnitLayout {
  static constexpr int64_t alignment = 64;

  explicit UnitLayout(const UnitSpec& unit, int64_t parts = 1) {
    for (const ParamSpec& p : unit.params) {
      const int64_t begin = p.placement == Placement::adjacent ? size : round_up(size, alignment);
      offsets.push_back(begin);
      size = begin + p.stored_shape().numel();
    }
    size = round_up(size, alignment * parts);
  }

  std::vector<int64_t> offsets;  // of each parameter
  int64_t size = 0;              // padded
};

inline size_t param_index(const UnitSpec& unit, const std::string& suffix) {
  for (size_t i = 0; i < unit.params.size(); ++i)
    if (unit.params[i].name.ends_with(suffix)) return i;
  throw Error(formatted("unit {} has no parameter ...{}", unit.name, suffix));
}

}  // namespace llmc
