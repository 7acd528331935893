// unit_slots.h: the optimizer's slots of a unit, for the elements that a rank updates: for each rule that its
// parameters follow, moments or momenta, and the scales of those in 8 bits; and the second moments of rows (MuonRows).
#pragma once
#include "device/arena.h"
#include "ops/ops.h"
#include "shard/state_table.h"

namespace llmc {

// Calls f(the first of them, their elements, gaps included) for neighbours in a unit that are alike.
template <class Alike, class F>
void for_neighbours(const UnitSpec& unit, const UnitLayout& layout, Alike&& alike, F&& f) {
  const std::vector<ParamSpec>& params = unit.params;
  for (size_t i = 0; i < params.size();) {
    const ParamSpec& first = params[i];
    const int64_t begin = layout.offsets[i];
    while (i < params.size() && alike(params[i], first)) ++i;
    f(first, Range{begin, (i < params.size() ? layout.offsets[i] : layout.size) - begin});
  }
}

class UnitSlots {
 public:
  // The slots of one rule: those of all its parameters that the rank updates, one after another.
  struct OfRule {
    Optimizer rule;
    std::vector<Range> runs;  // of the unit
    SlotTensors tensors, scales;
    // Where in them those of the elements `r` of the unit are.
    Range of(const Range& r) const {
      Range all;
      int64_t begin = 0;
      for (const Range& run : runs) {
        if (const Range both = overlap(run, r); both.size > 0) {
          if (all.size == 0) all.begin = begin + both.begin - run.begin;
          all.size += both.size;
        }
        begin += run.size;
      }
      return all;
    }
  };
  struct Parts {
    SlotTensors slots, scales;
  };

  UnitSlots() = default;  // none
  // updated: the elements that this rank updates. All ranks of the shard group take as much memory as the one that
  // needs the most.
  UnitSlots(const UnitSpec& unit, const UnitLayout& layout, const ZeroConfig& zero, const Range& updated,
            const Precision& precision, Arena& arena) {
    if (precision.small_state()) require_segments_of_blocks(unit, layout);
    if (updated.size == 0) return;
    for (const Optimizer rule : all_values<Optimizer>()) {
      int64_t most = 0;
      for (int shard = 0; shard < zero.owners(); ++shard) {
        int64_t size = 0;
        for (const Range& r : runs_of(rule, unit, layout, update_range_of(layout.size, zero, shard))) size += r.size;
        most = std::max(most, size);
      }
      if (most == 0) continue;  // no parameter follows it
      OfRule& slots = rules_.emplace_back(OfRule{rule, runs_of(rule, unit, layout, updated), {}, {}});
      for (size_t i = 0; i < rule_of(rule).slots.size(); ++i) {
        const char* label = rule_of(rule).slots[i].label;
        const DType dtype = precision.slot_dtype(i);
        slots.tensors[i] = arena.alloc(label, unit.name.c_str(), dtype, {most});
        if (size_of(dtype) > 1) continue;
        require_own_blocks(unit, layout);
        slots.scales[i] = arena.alloc(label, "scales", DType::fp32, {ceil_div(most, state_block)});
      }
    }
  }
  // They are few, and so every rank has all of them: its part of a matrix may have any of its rows.
  void add_row_moments(const UnitSpec& unit, int shard, const Range& updated, DType dtype, Arena& arena) {
    int64_t all = 0;
    for (const ParamSpec& p : unit.params) {
      const Box box = p.box();
      rows_.push_back({.name = p.name, .shape = {rule_of(p.rule).of_matrices ? p.shape[0] : 0}, .rule = p.rule});
      rows_.back().first_copy = p.first_copy && box.row == 0 && box.column == 0 && shard == 0;
      all += rows_.back().numel();
    }
    if (all > 0 && updated.size > 0)
      row_moments_ = arena.alloc(llmc::row_moment.label, unit.name.c_str(), dtype, {all});
  }

  const std::vector<OfRule>& rules() const { return rules_; }
  // Those of elements that are in one run of a rule; the scales only of whole blocks.
  Parts of(Optimizer rule, const Range& r) const {
    Parts parts;
    for (const OfRule& s : rules_) {
      const Range held = s.of(r);
      if (s.rule != rule || held.size != r.size) continue;
      for (size_t i = 0; i < rule_of(rule).slots.size(); ++i) {
        parts.slots[i] = s.tensors[i].slice(held.begin, {r.size});
        if (!s.scales[i].empty()) parts.scales[i] = s.scales[i].slice(held.begin / state_block, {r.size / state_block});
      }
    }
    return parts;
  }

  const Tensor& row_moments() const { return row_moments_; }
  Tensor row_moments(size_t param) const {
    int64_t begin = 0;
    for (size_t i = 0; i < param; ++i) begin += rows_[i].numel();
    return row_moments_.slice(begin, {rows_[param].numel()});
  }
  void append_row_moments_to(StateTable& table) const {
    if (row_moments_.empty()) return;
    for (size_t i = 0; i < rows_.size(); ++i)
      if (rows_[i].numel() > 0) table.push_back({&rows_[i], StateKind::row_moment, 0, row_moments(i)});
  }

 private:
  // The parameters of a rule that are neighbours, as far as a shard's rank updates them.
  static std::vector<Range> runs_of(Optimizer rule, const UnitSpec& unit, const UnitLayout& layout,
                                    const Range& updated) {
    std::vector<Range> runs;
    const auto same_rule = [](const ParamSpec& a, const ParamSpec& b) { return a.rule == b.rule; };
    for_neighbours(unit, layout, same_rule, [&](const ParamSpec& p, const Range& all) {
      if (const Range r = overlap(all, updated); p.rule == rule && r.size > 0) runs.push_back(r);
    });
    return runs;
  }
  // Parameters that are updated apart must not share a block.
  static void require_segments_of_blocks(const UnitSpec& unit, const UnitLayout& layout) {
    for (size_t i = 1; i < unit.params.size(); ++i) {
      const ParamSpec &p = unit.params[i], &before = unit.params[i - 1];
      CHECK((p.rate == before.rate && p.eps == before.eps) || layout.offsets[i] % state_block == 0,
            "{} begins within a block of {} elements of optimizer state, and is updated at another rate than {} before "
            "it: use --moment1-dtype fp32 --moment2-dtype fp32 and no --master-weights split, or leave out "
            "--base-head-size",
            p.name, state_block, before.name);
    }
  }
  // Ranks that have copies of a parameter must scale them alike: none of its blocks has another parameter's elements.
  static void require_own_blocks(const UnitSpec& unit, const UnitLayout& layout) {
    for (size_t i = 0; i < unit.params.size(); ++i) {
      const ParamSpec& p = unit.params[i];
      const int64_t begin = layout.offsets[i], end = begin + p.stored_shape().numel();
      const bool shared_end =
          end % state_block != 0 && i + 1 < unit.params.size() && unit.params[i + 1].placement == Placement::adjacent;
      CHECK(p.copies == 1 || (begin % state_block == 0 && !shared_end),
            "moments in 8 bits: {} ranks have copies of {}, which shares blocks of {} elements with other parameters: "
            "use --moment1-dtype bf16 --moment2-dtype bf16, or a smaller --tp",
            p.copies, p.name, state_block);
    }
  }

  std::vector<OfRule> rules_;
  std::vector<ParamSpec> rows_;  // the row moments of each parameter as a parameter of its own
  Tensor row_moments_;           // fp32, of all of them
};

}  // namespace llmc
