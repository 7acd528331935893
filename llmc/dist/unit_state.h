// unit_state.h: who holds what of a unit. Its weights, gradients, master weights and moments, the slices of them that
// this rank holds, and their lines of the StateTable. Nobody outside this file computes an offset divided by ranks.
//
// A unit's flat buffer falls into as many equal shards as the shard group has ranks; rank s of the group owns shard s.
#pragma once
#include <algorithm>
#include <map>
#include <string>
#include <vector>

#include "device/arena.h"
#include "device/device.h"
#include "dist/data_parallel.h"
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

// The elements [begin, begin + size) of a unit.
struct Range {
  int64_t begin = 0, size = 0;
  int64_t end() const { return begin + size; }
};
inline Range overlap(const Range& a, const Range& b) {
  const int64_t begin = std::max(a.begin, b.begin);
  return {begin, std::max<int64_t>(0, std::min(a.end(), b.end()) - begin)};
}

class UnitState {
 public:
  UnitState(const UnitSpec& spec, DType dtype, const ZeroConfig& zero, int shard, Arena& arena)
      : spec_(spec), layout_(spec, zero.ranks()) {
    const DType state = accumulator_of(dtype);
    all_ = {0, layout_.size};
    owned_ = {layout_.size / zero.shards * shard, layout_.size / zero.shards};
    updated_ = zero.stage == 0 ? all_ : owned_;
    sharded_ = zero.stage == 0 ? Sharded::nothing : zero.stage == 3 ? Sharded::weights : Sharded::optimizer;
    auto flat = [&](const char* label, DType d, const Range& r) {
      return arena.alloc(label, spec_.name.c_str(), d, {r.size});
    };
    if (zero.stage == 3) {
      weight_shard_ = flat("weights", dtype, owned_);
    } else {
      weights_ = flat("weights", dtype, all_);
      weight_shard_ = weights_.slice(owned_.begin, {owned_.size});
    }
    if (zero.holds == Holds::weights) return;
    if (dtype != state && zero.master_weights) master_ = flat("master weights", state, updated_);
    if (zero.grad_reduce == GradReduce::step) gradients_ = flat("gradients", state, all_);
    else gradient_sum_ = flat("gradients", state, updated_);
    moment1_ = flat("AdamW first moment", state, updated_);
    moment2_ = flat("AdamW second moment", state, updated_);
  }

  const UnitSpec& spec() const { return spec_; }
  int64_t size() const { return layout_.size; }
  const Range& owned() const { return owned_; }  // this rank's shard

  // A parameter by the end of its name; `fused`: with so many adjacent ones behind it, as one matrix or vector.
  Tensor weight(const std::string& suffix, int fused = 1) const { return view(weights_, suffix, fused); }
  Tensor gradient(const std::string& suffix, int fused = 1) const { return view(gradients_, suffix, fused); }
  bool has(const std::string& suffix) const {
    for (const ParamSpec& p : spec_.params)
      if (p.name.ends_with(suffix)) return true;
    return false;
  }

  Tensor weights() const { return weights_; }  // the whole unit; stage 3: while it is gathered
  Tensor weight_shard() const { return weight_shard_; }
  Tensor gradients() const { return gradients_; }  // the whole unit, of this rank's samples; micro: while in use
  // The sum over all ranks, of what this rank updates.
  Tensor reduced_gradients() const {
    return gradient_sum_.empty() ? gradients_.slice(updated_.begin, {updated_.size}) : gradient_sum_;
  }
  Tensor reduced_shard() const { return part(reduced_gradients(), updated_, owned_); }
  Tensor gradient_sum() const { return gradient_sum_; }
  const Range& updated() const { return updated_; }

  void attach_weights(const Tensor& buffer) { weights_ = buffer.slice(0, {layout_.size}); }
  void attach_gradients(const Tensor& buffer) { gradients_ = buffer.slice(0, {layout_.size}); }

  void zero_all(Stream& stream) const {
    for (const Tensor& t : {sharded_ == Sharded::weights ? weight_shard_ : weights_, master_, moment1_, moment2_})
      if (!t.empty()) zero(t, stream);
  }

  void update(Tensor control, AdamWOptions options, Stream& stream) const {
    if (rounds_by_chance()) return update_stochastic(control, options, stream);
    const float decay = options.weight_decay;
    for (size_t i = 0; i < spec_.params.size();) {  // neighbours that are treated alike in one go, gaps with them
      const size_t first = i;
      while (i < spec_.params.size() && spec_.params[i].decay == spec_.params[first].decay) ++i;
      const int64_t begin = layout_.offsets[first], end = i < spec_.params.size() ? layout_.offsets[i] : layout_.size;
      const Range r = overlap({begin, end - begin}, updated_);
      if (r.size == 0) continue;
      auto of_updated = [&](const Tensor& t) { return t.empty() ? t : part(t, updated_, r); };
      options.weight_decay = spec_.params[first].decay ? decay : 0.0f;
      adamw_update(of_updated(sharded_ == Sharded::nothing ? weights_ : weight_shard_), of_updated(master_),
                   of_updated(moment1_), of_updated(moment2_), of_updated(reduced_gradients()), control, options,
                   stream);
    }
  }

  // Every parameter, flat and without padding, out of the whole unit `weights`: weights(), or a copy of them.
  std::map<std::string, Tensor> whole_weights(const Tensor& weights) const {
    std::map<std::string, Tensor> all;
    for (size_t i = 0; i < spec_.params.size(); ++i)
      all.emplace(spec_.params[i].name, weights.slice(layout_.offsets[i], {spec_.params[i].numel()}));
    return all;
  }

  void append_to(StateTable& table) const {
    for (size_t i = 0; i < spec_.params.size(); ++i) {
      const Range param{layout_.offsets[i], spec_.params[i].numel()};
      auto add = [&](StateKind kind, const Tensor& t, const Range& held) {
        const Range r = overlap(param, held);
        if (!t.empty() && r.size > 0)
          table.push_back({&spec_.params[i], kind, r.begin - param.begin, part(t, held, r)});
      };
      if (sharded_ == Sharded::weights) add(StateKind::weight, weight_shard_, owned_);
      else add(StateKind::weight, weights_, all_);
      add(StateKind::master, master_, updated_);
      add(StateKind::moment1, moment1_, updated_);
      add(StateKind::moment2, moment2_, updated_);
    }
  }

  // The reduced gradients that this rank holds, by parameter, as append_to() lists the state.
  void append_gradients_to(StateTable& table) const {
    for (size_t i = 0; i < spec_.params.size(); ++i) {
      const Range param{layout_.offsets[i], spec_.params[i].numel()}, r = overlap(param, updated_);
      if (r.size > 0)
        table.push_back(
            {&spec_.params[i], StateKind::weight, r.begin - param.begin, part(reduced_gradients(), updated_, r)});
    }
  }

 private:
  bool rounds_by_chance() const { return master_.empty() && weight_shard_.dtype == DType::bf16; }

  // Parameter by parameter: each has random numbers of its own.
  void update_stochastic(Tensor control, AdamWOptions options, Stream& stream) const {
    const float decay = options.weight_decay;
    for (size_t i = 0; i < spec_.params.size(); ++i) {
      const Range r = overlap({layout_.offsets[i], spec_.params[i].numel()}, updated_);
      if (r.size == 0) continue;
      options.weight_decay = spec_.params[i].decay ? decay : 0.0f;
      adamw_update_stochastic(part(sharded_ == Sharded::nothing ? weights_ : weight_shard_, updated_, r),
                              part(moment1_, updated_, r), part(moment2_, updated_, r),
                              part(reduced_gradients(), updated_, r), control, spec_.params[i].name,
                              r.begin - layout_.offsets[i], options, stream);
    }
  }

  // The elements `r` of the unit out of a tensor that holds the elements `held`.
  static Tensor part(const Tensor& t, const Range& held, const Range& r) {
    return t.slice(r.begin - held.begin, {r.size});
  }

  Tensor view(const Tensor& buffer, const std::string& suffix, int fused) const {
    CHECK(!buffer.empty(), "unit {} is asked for {} while it is not gathered", spec_.name, suffix);
    const size_t first = param_index(spec_, suffix);
    Shape shape = spec_.params[first].stored_shape();
    for (int i = 1; i < fused; ++i) {
      const ParamSpec& next = spec_.params[first + static_cast<size_t>(i)];
      CHECK(next.placement == Placement::adjacent);
      shape[0] += next.stored_shape()[0];
    }
    Tensor param = buffer.slice(layout_.offsets[first], shape);
    param.name = spec_.params[first].name.c_str();
    return param;
  }

  enum class Sharded { nothing, optimizer, weights };

  UnitSpec spec_;
  UnitLayout layout_;
  Sharded sharded_;
  Range all_, owned_, updated_;
  Tensor weights_, weight_shard_;      // in the training dtype
  Tensor gradients_, gradient_sum_;    // fp32; the sum: of the micro-batches, where each is reduced
  Tensor master_, moment1_, moment2_;  // fp32, of updated_
};

}  // namespace llmc
