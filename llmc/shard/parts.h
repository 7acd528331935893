// parts.h: which part of a parameter a rank has: tensor parallelism cuts matrices, expert parallelism deals experts
// out. Pure functions.
#pragma once
#include "shard/params.h"

namespace llmc {

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
// experts: their sharing treats the ranks of the group like any others (ExpertParallel).
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
