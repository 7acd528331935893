// whole_check.h: before the first step, the ranks say which elements of which parameters they hold; together these must
// be the whole model, every element exactly as often as the layout says (contract 15). So if a layer falls between two
// stages of a pipeline, or lies on two of them, or if no rank has an expert, the run ends and names it before anything
// is computed.
#pragma once
#include <sstream>

#include "shard/zero.h"

namespace llmc {

// The part of a parameter that a rank holds: elements of the box of its tensor-parallel rank. An expert's box is always
// whole.
struct HeldParam {
  Box box;
  Range weights, slots;
  bool operator==(const HeldParam&) const = default;
};
// Units of which a rank holds the same parts, such as most blocks, by their places in the model.
struct HeldUnits {
  std::vector<size_t> units;
  std::vector<HeldParam> params;
  Range experts = {};  // in a unit of experts: which ones
};
struct HeldByRank {
  int stage = 0, tensor_rank = 0;
  std::vector<HeldUnits> units;
  int expert_rank = 0;
};

inline std::vector<HeldUnits> units_held(const ModelState& state) {
  std::vector<HeldUnits> held;
  for (size_t u = 0; u < state.size(); ++u) {
    if (!state.has(u)) continue;
    const std::vector<ParamSpec>& params = state.unit(u).spec().params;
    HeldUnits unit{{u}, {}};
    for (const ParamSpec& p : params) unit.params.push_back({p.box(), {}, {}});
    if (!params.empty() && params.front().expert)
      unit.experts = {*params.front().expert, *params.back().expert + 1 - *params.front().expert};
    StateTable table;
    state.unit(u).append_to(table);
    for (const StateEntry& e : table) {
      if (e.kind == StateKind::row_moment) continue;  // on every rank
      HeldParam& p = unit.params[static_cast<size_t>(e.param - params.data())];
      if (e.kind == StateKind::weight) p.weights = {e.begin, e.tensor.numel()};
      if (e.kind == StateKind::slot && e.slot == 0) p.slots = {e.begin, e.tensor.numel()};
    }
    const auto same = std::ranges::find_if(
        held, [&](const HeldUnits& h) { return h.experts == unit.experts && h.params == unit.params; });
    if (same != held.end()) same->units.push_back(u);
    else held.push_back(std::move(unit));
  }
  return held;
}

// As text, to be sent: numbers, with the number of units before them, and that of parameters.
inline std::string text_of(const std::vector<HeldUnits>& held) {
  std::string text;
  for (const HeldUnits& h : held) {
    text += formatted("{}", h.units.size());
    for (const size_t u : h.units) text += formatted(" {}", u);
    text += formatted(" {} {} {}\n", h.experts.begin, h.experts.size, h.params.size());
    for (const HeldParam& p : h.params)
      text += formatted("{} {} {} {} {} {} {} {}\n", p.box.row, p.box.rows, p.box.column, p.box.columns,
                        p.weights.begin, p.weights.size, p.slots.begin, p.slots.size);
  }
  return text;
}
inline std::vector<HeldUnits> held_from_text(const std::string& text) {
  std::vector<HeldUnits> held;
  std::istringstream in(text);
  const auto whole = [&] { CHECK(in, "a rank's list of what it holds breaks off"); };
  for (size_t count; in >> count;) {
    HeldUnits& h = held.emplace_back();
    for (size_t u; h.units.size() < count; h.units.push_back(u)) in >> u, whole();
    in >> h.experts.begin >> h.experts.size >> count, whole();
    for (HeldParam p; h.params.size() < count; h.params.push_back(p)) {
      in >> p.box.row >> p.box.rows >> p.box.column >> p.box.columns >> p.weights.begin >> p.weights.size >>
          p.slots.begin >> p.slots.size;
      whole();
    }
  }
  return held;
}

namespace detail {

// Throws unless each of the elements [0, size) is in exactly `times` of the ranges. what: for the message.
inline void require_covered(const std::vector<Range>& ranges, int64_t size, int times, const std::string& what) {
  std::map<int64_t, int> changes{{0, 0}, {size, 0}};
  for (const Range& r : ranges) {
    if (r.size == 0) continue;
    ++changes[r.begin], --changes[r.end()];
  }
  int count = 0;
  for (const auto& [element, change] : changes) {
    count += change;
    CHECK(count == (element < 0 || element >= size ? 0 : times) || size == 0,
          "the model is not whole: element {} of {} is held by {} rank(s), expected {}", element, what, count, times);
  }
}

// The same for the boxes that tensor-parallel ranks have of one parameter.
inline void require_covered(const std::vector<Box>& boxes, int64_t rows, int64_t columns, int times,
                            const std::string& what) {
  std::set<int64_t> row_cuts{0}, column_cuts{0};
  for (const Box& b : boxes) {
    row_cuts.insert({b.row, b.row + b.rows});
    column_cuts.insert({b.column, b.column + b.columns});
  }
  for (const int64_t row : row_cuts)
    for (const int64_t column : column_cuts) {
      const auto count = std::ranges::count_if(boxes, [&](const Box& b) {
        return b.row <= row && row < b.row + b.rows && b.column <= column && column < b.column + b.columns;
      });
      CHECK(count == (row < rows && column < columns ? times : 0),
            "the model is not whole: row {}, column {} of {} belongs to {} tensor-parallel rank(s), expected {}", row,
            column, what, count, times);
    }
}

}  // namespace detail

// Throws unless the ranks of a layout together hold the whole model. table: the parts of one tensor-parallel rank, with
// all experts. experts: how they are sharded.
inline void require_whole_model(const ParamTable& table, bool tied, const ZeroConfig& dense, const ZeroConfig& experts,
                                const std::vector<HeldByRank>& ranks) {
  using Updates = ZeroConfig::Updates;
  struct Holder {
    int stage, part;  // part: the tensor-parallel rank; of experts, the rank in its ep group
    const HeldUnits* held;
  };
  std::vector<std::vector<Holder>> holders(table.size());
  for (const HeldByRank& rank : ranks)
    for (const HeldUnits& h : rank.units)
      for (const size_t u : h.units) {
        CHECK(u < table.size(), "the model is not whole: stage {} has a unit {}, and there are {}", rank.stage, u,
              table.size());
        holders[u].push_back(
            {rank.stage, table[u].sharing == Sharing::experts ? rank.expert_rank : rank.tensor_rank, &h});
      }
  const auto stages_of = [&](size_t u) {
    std::set<int> stages;
    for (const Holder& h : holders[u]) stages.insert(h.stage);
    return std::vector<int>(stages.begin(), stages.end());
  };
  for (size_t u = 0; u < table.size(); ++u)
    CHECK(!holders[u].empty(), "the model is not whole: no stage of the pipeline has {}", table[u].name);
  for (size_t u = 0; u < table.size(); ++u) {
    const UnitSpec& unit = table[u];
    const bool of_experts = unit.sharing == Sharing::experts;
    const ZeroConfig& zero = of_experts ? experts : dense;
    const int holders_of_weights = zero.stage == 3 ? zero.replicas : zero.ranks(),
              holders_of_slots = zero.updates() == Updates::everyone       ? zero.ranks()
                                 : zero.updates() == Updates::shard_owners ? zero.replicas
                                                                           : 1;
    const std::vector<int> stages = stages_of(u), heads = stages_of(table.size() - 1);
    if (u == 0 && tied)
      CHECK(std::ranges::includes(stages, heads) && stages.size() <= 2,
            "the model is not whole: {}, whose table is the head's too, is on stage(s) {}, and the head on {}",
            unit.name, stages, heads);
    else CHECK(stages.size() == 1, "the model is not whole: {} is on stages {}, expected one", unit.name, stages);
    for (const int stage : stages) {
      // For each parameter, by part: the elements that each rank with this part holds.
      std::vector<std::map<int, std::vector<const HeldParam*>>> parts(unit.params.size());
      for (const Holder& h : holders[u]) {
        if (h.stage != stage) continue;
        size_t next = 0;
        for (size_t i = 0; i < unit.params.size(); ++i) {
          if (of_experts && overlap({*unit.params[i].expert, 1}, h.held->experts).size == 0) continue;
          if (next++ < h.held->params.size()) parts[i][h.part].push_back(&h.held->params[next - 1]);
        }
        CHECK(next == h.held->params.size(), "the model is not whole: stage {} has {} parameters of {}, expected {}",
              stage, h.held->params.size(), unit.name, next);
      }
      for (size_t i = 0; i < unit.params.size(); ++i) {
        const ParamSpec& p = unit.params[i];
        CHECK(!of_experts || parts[i].size() == 1,
              "the model is not whole: {} on stage {} belongs to {} rank(s) of an ep group, expected 1", p.name, stage,
              parts[i].size());
        std::vector<Box> boxes;
        for (const auto& [part, held] : parts[i]) {
          const Box box = boxes.emplace_back(held.front()->box);
          std::vector<Range> weights, slots;
          for (const HeldParam* h : held) {
            CHECK(h->box == box, "the model is not whole: data-parallel ranks have different parts of {}", p.name);
            weights.push_back(h->weights);
            slots.push_back(h->slots);
          }
          const std::string whose =
              formatted("{} on stage {}, {} rank {},", p.name, stage, of_experts ? "ep" : "tensor-parallel", part);
          detail::require_covered(weights, box.numel(), holders_of_weights, whose);
          if (zero.holds == Holds::training_state)
            detail::require_covered(slots, box.numel(), holders_of_slots, "optimizer state of " + whose);
        }
        detail::require_covered(boxes, p.shape[0], p.numel() / p.shape[0], p.copies,
                                formatted("{} on stage {}", p.name, stage));
      }
    }
  }
}

// Called by all ranks; rank 0 compares.
inline void check_whole_model(const ModelState& state, const ParamTable& table, bool tied, const Mesh& mesh) {
  const Mesh view = expert_view(mesh, state.groups().layout.expert);
  std::vector<HeldByRank> ranks;
  for (const std::string& text : state.groups()[GroupName::control].gather_text(0, "parameters that the ranks hold",
                                                                                text_of(units_held(state)))) {
    const int rank = static_cast<int>(ranks.size());
    ranks.push_back({mesh.coordinate(rank, Axis::pp), mesh.coordinate(rank, Axis::tp), held_from_text(text),
                     view.coordinate(rank, Axis::ep)});
  }
  if (!ranks.empty()) require_whole_model(table, tied, state.zero_config(), state.zero_config(Sharing::experts), ranks);
}

}  // namespace llmc
