// state_table.h: the state that a rank holds, entry by entry: what checkpoints and checks of copies iterate, which know
// no optimizer and no layout.
#pragma once
#include "device/tensor.h"
#include "shard/params.h"

namespace llmc {

enum class StateKind : uint8_t { weight, master, average, slot, row_moment };

// One entry of the StateTable: the elements [begin, begin + tensor.numel()) of param->box(), held by this rank.
struct StateEntry {
  const ParamSpec* param;
  StateKind kind;
  int64_t begin;
  Tensor tensor;    // flat, without padding rows
  size_t slot = 0;  // which one of the parameter's rule
  // Of state in few bits (state_view.h). Slots in 8 bits: their whole blocks, of which the tensor begins at element
  // `in_block`, and the scales of these; masters in halves: the weights. Slots in bf16 have neither.
  Tensor blocks = {}, scales = {}, weight = {};
  int64_t in_block = 0;
  bool small() const { return !blocks.empty() || !weight.empty() || is_bf16_slot(); }
  bool is_bf16_slot() const { return kind == StateKind::slot && tensor.dtype == DType::bf16; }
  // "weight", "master", "average" or the name of the slot, such as "moment1".
  const char* name() const {
    return kind == StateKind::weight       ? "weight"
           : kind == StateKind::master     ? "master"
           : kind == StateKind::average    ? "average"
           : kind == StateKind::row_moment ? llmc::row_moment.name
                                           : rule_of(param->rule).slots[slot].name;
  }
  Elements elements() const { return param->elements_from(begin); }  // where they are in the whole parameter

  // Calls f(i, index, n) for each row, or part of one: elements [i, i + n) of the tensor are those of the parameter
  // from `index` on.
  template <class F>
  void for_each_row(F&& f) const {
    const Elements where = elements();
    for (int64_t i = 0, n; i < tensor.numel(); i += n) {
      n = std::min(tensor.numel() - i, where.columns - (where.begin + i) % where.columns);
      f(i, where.index(i), n);
    }
  }
};
using StateTable = std::vector<StateEntry>;

// The elements `r` of a unit, from a tensor that holds the elements `held`.
inline Tensor slice_of(const Tensor& t, const Range& held, const Range& r) {
  return t.slice(r.begin - held.begin, {r.size});
}

}  // namespace llmc
