// zero.h: who holds what of each unit. Weights, gradients, master weights and moments of every unit, the slices that
// this rank owns, and the StateTable that checkpoints iterate. Nobody outside this file computes an offset divided by
// ranks. With one rank every unit is one slice and this rank owns it; gather and release then have nothing to move.
#pragma once
#include <memory>
#include <string>
#include <vector>

#include "device/arena.h"
#include "device/device.h"
#include "dist/params.h"
#include "ops/ops.h"

namespace llmc {

enum class StateKind : uint8_t { weight, master, moment1, moment2 };
inline const char* name_of(StateKind kind) {
  constexpr const char* names[] = {"weight", "master", "moment1", "moment2"};
  return names[static_cast<int>(kind)];
}

// One line of the StateTable: the elements [begin, begin + tensor.numel()) of a parameter, as this rank holds them.
struct StateEntry {
  const ParamSpec* param;
  StateKind kind;
  int64_t begin;
  Tensor tensor;  // flat; without the padding rows
};
using StateTable = std::vector<StateEntry>;

// A run of a unit's elements that the optimizer treats alike.
struct Segment {
  int64_t begin, size;
  bool decay;
};

class UnitState {
 public:
  UnitState(const UnitSpec& spec, DType dtype, Arena& arena) : spec_(spec), layout_(spec) {
    const DType state = accumulator_of(dtype);
    auto flat = [&](const char* label, DType d) { return arena.alloc(label, spec_.name.c_str(), d, {layout_.size}); };
    weights_ = flat("weights", dtype);
    if (dtype != state) master_ = flat("master weights", state);
    gradients_ = flat("gradients", state);
    moment1_ = flat("AdamW first moment", state);
    moment2_ = flat("AdamW second moment", state);
  }

  const UnitSpec& spec() const { return spec_; }

  // A parameter by the end of its name; `fused`: with so many adjacent ones behind it, as one matrix or vector.
  Tensor weight(const char* suffix, int fused = 1) const { return view(weights_, suffix, fused); }
  Tensor gradient(const char* suffix, int fused = 1) const { return view(gradients_, suffix, fused); }

  Tensor weights() const { return weights_; }
  Tensor gradients() const { return gradients_; }
  // What the optimizer changes: fp32 master weights, which for fp32 training are the weights themselves.
  Tensor master_or_weights() const { return master_.empty() ? weights_ : master_; }

  void zero_all(Stream& stream) const {
    for (const Tensor& t : {weights_, master_, gradients_, moment1_, moment2_})
      if (!t.empty()) zero(t, stream);
  }

  void update(Tensor control, AdamWOptions options, Stream& stream) const {
    const float decay = options.weight_decay;
    for (const Segment& s : segments()) {
      auto part = [&](const Tensor& t) { return t.empty() ? t : t.slice(s.begin, {s.size}); };
      options.weight_decay = s.decay ? decay : 0.0f;
      adamw_update(part(weights_), part(master_), part(moment1_), part(moment2_), part(gradients_), control, options,
                   stream);
    }
  }

  void append_to(StateTable& table) const {
    for (size_t i = 0; i < spec_.params.size(); ++i) {
      auto add = [&](StateKind kind, const Tensor& t) {
        if (!t.empty())
          table.push_back({&spec_.params[i], kind, 0, t.slice(layout_.offsets[i], {spec_.params[i].numel()})});
      };
      add(StateKind::weight, weights_);
      add(StateKind::master, master_);
      add(StateKind::moment1, moment1_);
      add(StateKind::moment2, moment2_);
    }
  }

 private:
  Tensor view(const Tensor& buffer, const char* suffix, int fused) const {
    const size_t first = param_index(spec_, suffix);
    Shape shape = spec_.params[first].stored_shape();
    for (int i = 1; i < fused; ++i) {
      const ParamSpec& next = spec_.params[first + static_cast<size_t>(i)];
      CHECK(next.placement == Placement::adjacent);
      shape[0] += next.stored_shape()[0];
    }
    Tensor part = buffer.slice(layout_.offsets[first], shape);
    part.name = spec_.params[first].name.c_str();
    return part;
  }

  // Neighbours that are treated alike are one segment; the gaps between parameters hold zeros and stay zero.
  std::vector<Segment> segments() const {
    std::vector<Segment> found;
    for (size_t i = 0; i < spec_.params.size(); ++i) {
      const bool decay = spec_.params[i].decay;
      const int64_t begin = layout_.offsets[i];
      const int64_t end = i + 1 < spec_.params.size() ? layout_.offsets[i + 1] : layout_.size;
      if (!found.empty() && found.back().decay == decay) found.back().size += end - begin;
      else found.push_back({begin, end - begin, decay});
    }
    return found;
  }

  UnitSpec spec_;
  UnitLayout layout_;
  Tensor weights_, master_, gradients_, moment1_,
      moment2_;  // (layout_.size): weights in the training dtype, the rest fp32
};

// All units of a model.
class ModelState {
 public:
  ModelState(const ParamTable& table, DType dtype, Arena& arena) {
    units_.reserve(table.size());
    for (const UnitSpec& unit : table) units_.push_back(std::make_unique<UnitState>(unit, dtype, arena));
  }
  const UnitState& unit(size_t index) const { return *units_[index]; }
  const UnitState& front() const { return *units_.front(); }
  const UnitState& back() const { return *units_.back(); }
  size_t size() const { return units_.size(); }

  // The weights become their fp32 masters, rounded; nothing to do where they are one.
  void round_weights(Stream& stream) const {
    for (const auto& unit : units_)
      if (unit->weights().dtype != DType::fp32) convert(unit->weights(), unit->master_or_weights(), stream);
  }

  StateTable state_table() const {
    StateTable table;
    for (const auto& unit : units_) unit->append_to(table);
    return table;
  }

 private:
  std::vector<std::unique_ptr<UnitState>> units_;
};

// Fresh weights (contract 7): from the seed, the parameter's name and the element's global index alone.
inline void init_weights(const ModelState& state, uint64_t seed, Stream& stream) {
  for (size_t u = 0; u < state.size(); ++u) state.unit(u).zero_all(stream);
  for (const StateEntry& e : state.state_table()) {
    const bool is_master =
        e.kind == StateKind::master || (e.kind == StateKind::weight && e.tensor.dtype == DType::fp32);
    if (!is_master) continue;
    if (e.param->init == Init::normal) init_normal(e.tensor, e.param->init_std, e.begin, seed, e.param->name, stream);
    if (e.param->init == Init::ones) fill(e.tensor, 1.0f, stream);
  }
  state.round_weights(stream);
}

}  // namespace llmc
