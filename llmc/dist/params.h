// params.h: the one list of parameters. A ParamSpec describes a canonical parameter completely; sizes, gradients,
// optimizer state, checkpoints and plans derive from the table. Units group parameters into flat, padded buffers: one
// per block, one for the embedding, one for the head. A unit is what is gathered, reduced and updated at once.
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

// How tensor parallelism splits a parameter (not built yet: nothing reads it).
enum class TensorSplit : uint8_t {
  axis0,                         // column parallel: each rank holds rows of the (out, in) matrix
  axis1,                         // row parallel
  replicated,                    // every rank computes the full gradient
  replicated_partial_gradients,  // every rank computes a partial gradient: sum them
};

// Where a parameter lies in its unit's flat buffer.
enum class Placement : uint8_t {
  aligned,   // at the next multiple of UnitLayout::alignment elements
  adjacent,  // directly after the previous one: the matmul sees q, k and v as one matrix, all else as three parameters
};

struct ParamSpec {
  std::string name;  // canonical: "blocks.0.attn.q.weight"
  Shape shape;       // global and without padding; matrices are (out, in)
  TensorSplit tp = TensorSplit::replicated;
  Init init = Init::normal;
  float init_std = 0.02f;
  bool decay = false;       // weight decay: matrices only
  int64_t padded_rows = 0;  // rows stored, of which the padding at the end is always zero; 0: no padding
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

// The elements [begin, begin + size) of a unit's flat buffer.
struct Range {
  int64_t begin = 0, size = 0;
  int64_t end() const { return begin + size; }
};
inline Range overlap(const Range& a, const Range& b) {
  const int64_t begin = std::max(a.begin, b.begin);
  return {begin, std::max<int64_t>(0, std::min(a.end(), b.end()) - begin)};
}

// The layout of a unit's flat buffer, in elements, padded so that it divides into equal, aligned parts.
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
