// tensor_parallel.h: how tensor parallelism (Shoeybi et al. 2019) divides a layer's parameters, and with sequence
// parallelism (Korthikanti et al. 2022) the rows of the residual stream, among the ranks of a group. Pure functions;
// the ops that need the group are in parallel.h.
#pragma once
#include <algorithm>
#include <vector>

#include "dist/params.h"

namespace llmc {

inline constexpr int64_t vocab_multiple = 128;  // rows of a vocabulary that a rank stores are a multiple of this

struct TensorParallel {
  int ranks = 1;
  bool sequence = true;  // sequence parallelism: between the products each rank has some rows of the residual stream
  bool overlap = false;  // exchange one piece of a product while another is computed
  int head_copies = 1;   // ranks that have the same key-value head: more than one if heads are fewer than ranks

  bool by_rows() const { return ranks > 1 && sequence; }
  // How many of R rows each rank exchanges with every other; those of the last ranks may be padding.
  int64_t slice_rows(int64_t R) const { return ceil_div(R, ranks); }
  int64_t padded_rows(int64_t R) const { return slice_rows(R) * ranks; }
  // How many rows of the residual stream a rank has, padding included.
  int64_t stream_rows(int64_t R) const { return by_rows() ? slice_rows(R) : R; }
  // How many rows of a vocabulary of V a rank stores, padding included.
  int64_t stored_vocab(int64_t V) const { return round_up(ceil_div(V, ranks), vocab_multiple); }
};

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
inline ParamTable part_of(const ParamTable& table, const TensorParallel& tp, int rank) {
  ParamTable parts;
  for (const UnitSpec& unit : table) {
    UnitSpec& mine = parts.emplace_back(UnitSpec{unit.name, {}, unit.sharing});
    std::vector<ParamSpec> everybodys;
    bool last = false;
    for (const ParamSpec& whole : unit.params) {
      const ParamSpec p = unit.sharing == Sharing::experts ? whole : part_of(whole, tp, rank);
      if (p.placement == Placement::aligned) last = tp.ranks > 1 && p.copies == tp.ranks;
      (last ? everybodys : mine.params).push_back(p);
    }
    mine.params.insert(mine.params.end(), everybodys.begin(), everybodys.end());
  }
  return parts;
}

}  // namespace llmc
