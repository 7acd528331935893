// params.h: the one list of parameters. A ParamSpec describes a canonical parameter completely; sizes, gradients,
// optimizer state, checkpoints and plans derive from the table. Units group parameters into flat, padded buffers: one
// per block, one more for the experts of a block, one for the embedding, one for the head. A unit is gathered, reduced
// and updated as a whole. part_of() says which part of a parameter a rank has.
#pragma once
#include "comm/layout.h"
#include "ops/optimizers.h"

namespace llmc {

enum class Init : uint8_t { normal, zeros, constant };

// How tensor parallelism divides a parameter among the ranks of a group (part_of()).
enum class TensorSplit : uint8_t {
  outputs,     // column parallel: each rank has rows of the (out, in) matrix, or elements of its bias
  inputs,      // row parallel: each rank has columns of the (out, in) matrix
  vocabulary,  // each rank has rows, padded on each rank; the last ranks may have none
  by_row,      // every rank has it all, and applies it to its rows of the residual stream
  by_head,     // every rank has it all, and applies it to its heads
};

// Where a parameter lies in its unit's flat buffer.
enum class Placement : uint8_t {
  aligned,   // at the next multiple of UnitLayout::alignment elements
  adjacent,  // directly after the previous one: q, k, v are one matrix to the matmul, three parameters elsewhere
};

// Rows and columns of a matrix; a vector has one column.
struct Box {
  int64_t row = 0, rows = 0, column = 0, columns = 1;
  int64_t numel() const { return rows * columns; }
  bool operator==(const Box&) const = default;
};

struct ParamSpec {
  std::string name;  // canonical: "blocks.0.attn.q.weight"
  Shape shape;       // global and without padding; matrices are (out, in)
  TensorSplit tp = TensorSplit::by_row;
  Init init = Init::normal;
  float init_std = 0.02f, init_value = 1;  // of Init::normal, Init::constant
  bool decay = false;                      // weight decay: matrices only
  Optimizer rule = Optimizer::adamw;       // which optimizer updates it
  RateGroup rates = RateGroup::matrices;   // whose learning rate it has
  float rate = 1, eps = 1;  // of which it has these parts, and this one of epsilon; decay is by as much per step
  int64_t padded_rows = 0;  // rows stored, including padding at the end, which is always zero; 0: no padding
  Placement placement = Placement::aligned;
  int64_t most_parts = 0;  // it divides into at most this many parts; further ranks have copies; 0: any number
  int64_t group_rows = 0;  // rows of a group of heads (HeadGroups); 0: it has no heads
  ClipShare clip = ClipShare::none;    // its share of what QK-clip takes from the logits of a head
  std::optional<int64_t> expert = {};  // which expert of its layer it is a part of (expert_parallel.h)

  // The part that this rank has, and who shares it (part_of()); none: the whole parameter.
  std::optional<Box> part = {};
  int copies = 1;          // ranks of its tensor-parallel group that have the same part
  bool first_copy = true;  // this rank is the first of them: it alone counts the part in the norm and writes it
  bool partial = false;    // each of them computes a partial gradient: their sum is the gradient

  int64_t numel() const { return shape.numel(); }  // of the whole parameter
  Box box() const { return part ? *part : Box{0, shape[0], 0, numel() / shape[0]}; }
  Shape stored_shape() const {
    const Box held = box();
    Shape stored = shape;
    stored[0] = padded_rows > 0 ? padded_rows : held.rows;
    if (stored.rank() == 2) stored[1] = held.columns;
    return stored;
  }
  // Where in the whole parameter the elements of this rank's box are, from index `begin` of the box on.
  Elements elements_from(int64_t begin) const {
    const Box held = box();
    const int64_t stride = numel() / shape[0];
    return {.begin = begin, .first = held.row * stride + held.column, .columns = held.columns, .stride = stride};
  }
};

struct UnitSpec {
  std::string name;  // "embedding", "blocks.0", "blocks.0.experts", "head"
  std::vector<ParamSpec> params;
  Sharing sharing = Sharing::dense;
  std::optional<BlockPlace> block = {};  // of a block, or its experts
};

using ParamTable = std::vector<UnitSpec>;  // in the order of the forward pass

inline int64_t count_parameters(const ParamTable& table) {
  int64_t n = 0;
  for (const UnitSpec& unit : table)
    for (const ParamSpec& p : unit.params) n += p.numel();
  return n;
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

// The part of a unit of `size` elements that a rank of a shard group updates (unit_state.h).
inline Range update_range_of(int64_t size, const ZeroConfig& zero, int shard) {
  const ZeroConfig::Updates updates = zero.updates();
  if (updates == ZeroConfig::Updates::shard_owners) return {size / zero.shards * shard, size / zero.shards};
  return updates == ZeroConfig::Updates::everyone || shard == 0 ? Range{0, size} : Range{};
}

// How a parameter is updated, with these options for all.
inline bool decays(const ParamSpec& p, const OptimizerOptions& options) {
  return p.decay && (p.rates != RateGroup::embedding || options.decays_embeddings);
}
inline OptimizerOptions options_for(const ParamSpec& p, OptimizerOptions options) {
  options.lr *= options.rate(p.rates) * p.rate;
  options.weight_decay = decays(p, options) ? options.weight_decay / p.rate : 0;
  options.eps *= p.eps;
  return options;
}

inline size_t param_index(const UnitSpec& unit, const std::string& suffix) {
  for (size_t i = 0; i < unit.params.size(); ++i)
    if (unit.params[i].name.ends_with(suffix)) return i;
  throw Error(formatted("unit {} has no parameter ...{}", unit.name, suffix));
}

// ---- Parts: tensor parallelism cuts matrices, expert parallelism deals experts out ----------------------------------

// The part of a parameter that a rank has.
inline ParamSpec part_of(ParamSpec p, const TensorParallel& tp, int rank) {
  if (tp.ranks == 1) return p;
  Box box = p.box();
  switch (p.tp) {
    case TensorSplit::outputs: {
      const int64_t parts = p.most_parts > 0 ? std::min<int64_t>(p.most_parts, tp.ranks) : tp.ranks;
      p.copies = static_cast<int>(exact_div(tp.ranks, parts, "tensor-parallel ranks over the parts of a parameter"));
      box.rows = exact_div(box.rows, parts, "outputs over tensor-parallel ranks");
      box.row = box.rows * (rank / p.copies);
      p.first_copy = rank % p.copies == 0;
      p.partial = p.copies > 1;
      break;
    }
    case TensorSplit::inputs:
      box.columns = exact_div(box.columns, tp.ranks, "inputs over tensor-parallel ranks");
      box.column = box.columns * rank;
      break;
    case TensorSplit::vocabulary: {
      const int64_t V = box.rows, each = ceil_div(V, tp.ranks);
      box.row = std::min(V, each * rank);
      box.rows = std::min(V, each * (rank + 1)) - box.row;
      p.padded_rows = tp.stored_vocab(V);
      break;
    }
    case TensorSplit::by_row:
    case TensorSplit::by_head:
      p.copies = tp.ranks;
      p.first_copy = rank == 0;
      // Without sequence parallelism every rank sees all rows: its gradient is whole already.
      p.partial = p.tp == TensorSplit::by_head || tp.sequence;
      break;
  }
  p.part = box;
  return p;
}

// The parts of a table that a rank has. Parameters that all ranks of the group have come last in their unit, so that
// one exchange sums their partial gradients; adjacent parameters stay together. Tensor parallelism does not divide
// experts: their sharing treats the ranks of the group like any others (expert_parallel.h).
inline ParamTable part_of(ParamTable table, const TensorParallel& tp, int rank) {
  if (tp.ranks == 1) return table;
  ParamTable parts;
  for (const UnitSpec& unit : table) {
    UnitSpec& mine = parts.emplace_back(UnitSpec{unit.name, {}, unit.sharing, unit.block});
    std::vector<ParamSpec> everybodys;
    bool last = false;
    for (const ParamSpec& whole : unit.params) {
      ParamSpec p = unit.sharing == Sharing::experts ? whole : part_of(whole, tp, rank);
      if (p.placement == Placement::aligned) last = p.copies == tp.ranks;
      (last ? everybodys : mine.params).push_back(std::move(p));
    }
    mine.params.insert(mine.params.end(), everybodys.begin(), everybodys.end());
  }
  return parts;
}

// The part of a table that a rank of an ep group has: of the experts, only its own.
inline ParamTable part_of(ParamTable table, const ExpertParallel& expert, int rank) {
  if (expert.ranks == 1) return table;
  const Range held = expert.held_by(rank);
  ParamTable parts;
  for (const UnitSpec& unit : table) {
    UnitSpec& mine = parts.emplace_back(UnitSpec{unit.name, {}, unit.sharing, unit.block});
    bool follows = true;  // the rank has the parameter before this one, too
    for (const ParamSpec& p : unit.params) {
      const bool has = !p.expert || overlap({*p.expert, 1}, held).size > 0;
      if (has) mine.params.push_back(p);
      if (has && !follows) mine.params.back().placement = Placement::aligned;
      follows = has;
    }
  }
  return parts;
}

}  // namespace llmc
