// zero.h: who holds what of each unit. Weights, gradients, master weights and moments of every unit, the slices of them
// that this rank holds, when weights are gathered and gradients reduced, and the StateTable that checkpoints iterate.
// Nobody outside this file computes an offset divided by ranks.
//
// A unit's flat buffer falls into as many equal shards as the shard group has ranks; rank s of the group owns shard s.
#pragma once
#include <map>
#include <memory>
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

// All units of a model, and when they are whole. Units: the embedding, the blocks, the head.
class ModelState {
 public:
  ModelState(const ParamTable& table, DType dtype, const ZeroConfig& zero, DataParallel& dp, Arena& arena)
      : zero_(zero), dp_(dp) {
    int64_t largest_block = 0;
    for (const UnitSpec& unit : table)
      units_.push_back(std::make_unique<UnitState>(unit, dtype, zero, dp.shard, arena));
    for (size_t u = 1; u + 1 < units_.size(); ++u) largest_block = std::max(largest_block, units_[u]->size());
    // Two buffers for the blocks, which take turns, one for the embedding and one for the head.
    auto buffers = [&](const char* label, DType d) {
      std::vector<Buffer> made;
      for (int64_t size : {units_.front()->size(), largest_block, largest_block, units_.back()->size()})
        made.push_back({arena.alloc(label, "unit", d, {size}), {}, false});
      return made;
    };
    if (zero.stage == 3) weight_buffers_ = buffers("gathered weights", dtype);
    if (zero.grad_reduce == GradReduce::micro)
      gradient_buffers_ = buffers("gradients in flight", accumulator_of(dtype));
  }

  const UnitState& unit(size_t index) const { return *units_[index]; }
  const UnitState& front() const { return *units_.front(); }
  const UnitState& back() const { return *units_.back(); }
  size_t size() const { return units_.size(); }
  const ZeroConfig& zero_config() const { return zero_; }
  DataParallel& dp() const { return dp_; }

  StateTable state_table() const {
    StateTable table;
    for (const auto& unit : units_) unit->append_to(table);
    return table;
  }
  StateTable gradient_table() const {
    StateTable table;
    for (const auto& unit : units_) unit->append_gradients_to(table);
    return table;
  }

  // ---- Weights: stage 3 gathers a unit before it is used, one use ahead, and lets go of it afterwards --------------

  // `uses`: the units in the order in which acquire() will ask for them.
  void start_pass(std::vector<size_t> uses, Stream& compute) {
    if (zero_.stage < 3) return;
    // What a pass that was interrupted had gathered ahead or held is let go.
    for (const size_t b : gathered_) holding_.emplace_back(0, b);
    gathered_.clear();
    for (const auto& [u, b] : holding_) {
      compute.wait(weight_buffers_[b].ready);
      weight_buffers_[b].free = compute.record();
      weight_buffers_[b].in_use = false;
    }
    holding_.clear();
    uses_ = std::move(uses);
    next_use_ = issued_ = 0;
    updated_weights_ = compute.record();
    gather_ahead();
  }
  const UnitState& acquire(size_t u, Stream& compute) {
    if (zero_.stage < 3) return *units_[u];
    CHECK(next_use_ < issued_ && uses_[next_use_] == u);
    const size_t b = gathered_.front();
    gathered_.erase(gathered_.begin());
    compute.wait(weight_buffers_[b].ready);
    units_[u]->attach_weights(weight_buffers_[b].memory);
    holding_.emplace_back(u, b);
    ++next_use_;
    gather_ahead();
    return *units_[u];
  }
  void release(size_t u, Stream& compute) {
    if (zero_.stage < 3) return;
    const auto held = std::find_if(holding_.begin(), holding_.end(), [&](const auto& h) { return h.first == u; });
    CHECK(held != holding_.end());
    Buffer& buffer = weight_buffers_[held->second];
    if (zero_.poison) poison(buffer.memory, compute);
    buffer.free = compute.record();
    buffer.in_use = false;
    holding_.erase(held);
    gather_ahead();
  }
  // Every weight of a unit, for a checkpoint; all ranks of the shard group call it.
  template <class F>
  void with_whole_unit(size_t u, Stream& compute, F&& f) {
    start_pass({u}, compute);
    const UnitState& unit = acquire(u, compute);
    compute.synchronize();
    f(unit);
    release(u, compute);
  }

  // ---- Gradients
  // ------------------------------------------------------------------------------------------------------

  // Before the first micro-batch of a step.
  void zero_gradients(Stream& compute) {
    for (const auto& [u, buffer] : current_gradients_) buffer->free = compute.record();  // of an interrupted step
    current_gradients_.clear();
    for (const auto& unit : units_)
      zero(zero_.grad_reduce == GradReduce::step ? unit->gradients() : unit->gradient_sum(), compute);
  }
  // Before a unit's first backward of a micro-batch.
  void start_gradients(size_t u, Stream& compute) {
    if (zero_.grad_reduce == GradReduce::step) return;
    Buffer& buffer = gradient_buffers_[buffer_of(u, gradient_turn_)];
    compute.wait(buffer.free);
    units_[u]->attach_gradients(buffer.memory);
    zero(units_[u]->gradients(), compute);
    current_gradients_.emplace_back(u, &buffer);
  }
  // Behind a unit's last backward of a micro-batch: they travel while the next unit computes.
  void reduce_gradients(size_t u, bool last_micro_batch, Stream& compute) {
    const UnitState& unit = *units_[u];
    const bool micro = zero_.grad_reduce == GradReduce::micro;
    if (!micro && (!last_micro_batch || zero_.ranks() == 1)) return;
    Stream& stream = dp_.reduce_stream;
    stream.wait(compute.record());
    const Tensor all = unit.gradients(), shard = all.slice(unit.owned().begin, {unit.owned().size});
    if (zero_.bug != PlantedBug::skipped_reduction || u != 1) {
      dp_.gradients->reduce_scatter(all, stream);  // the shard group first, then the replicas
      dp_.replicas->all_reduce(shard, stream);
    }
    if (zero_.bug == PlantedBug::mean_instead_of_sum) scale(shard, 1.0f / static_cast<float>(zero_.ranks()), stream);
    if (zero_.stage == 0) dp_.gradients->all_gather(all, stream);
    if (micro) {
      add_to(unit.gradient_sum(), all.slice(unit.updated().begin, {unit.updated().size}), stream);
      const auto current = std::find_if(current_gradients_.begin(), current_gradients_.end(),
                                        [&](const auto& c) { return c.first == u; });
      if (zero_.poison) poison(current->second->memory, stream);
      current->second->free = stream.record();
      current_gradients_.erase(current);
    } else if (zero_.poison && zero_.stage > 0) {
      poison(all.slice(0, {unit.owned().begin}), stream);
      poison(all.slice(unit.owned().end(), {all.numel() - unit.owned().end()}), stream);
    }
  }
  // Behind the last micro-batch: the compute stream sees the sums.
  void finish_gradients(Stream& compute) { compute.wait(dp_.reduce_stream.record()); }

  // ---- The update
  // -----------------------------------------------------------------------------------------------------

  void update(Tensor control, const AdamWOptions& options, Stream& compute) {
    const bool gather = zero_.ranks() > 1 && (zero_.stage == 1 || zero_.stage == 2);
    for (const auto& unit : units_) {
      unit->update(control, options, compute);
      if (!gather) continue;
      dp_.gather_stream.wait(compute.record());
      if (zero_.poison) {
        const Tensor all = unit->weights();
        poison(all.slice(0, {unit->owned().begin}), dp_.gather_stream);
        poison(all.slice(unit->owned().end(), {all.numel() - unit->owned().end()}), dp_.gather_stream);
      }
      dp_.weights->all_gather(unit->weights(), dp_.gather_stream);
    }
    if (gather) compute.wait(dp_.gather_stream.record());
  }

 private:
  struct Buffer {
    Tensor memory;
    Event free, ready;
    bool in_use = false;
    Buffer(Tensor m, Event f, bool used) : memory(m), free(f), in_use(used) { free.signal(); }
  };

  size_t buffer_of(size_t u, int& turn) const {
    if (u == 0) return 0;
    if (u + 1 == units_.size()) return 3;
    return 1 + static_cast<size_t>(turn++ % 2);
  }

  // Gathers the next use, if its buffer is not in use.
  void gather_ahead() {
    if (issued_ > next_use_ || issued_ == uses_.size()) return;
    const size_t u = uses_[issued_];
    int turn = weight_turn_;
    const size_t b = buffer_of(u, turn);
    Buffer& buffer = weight_buffers_[b];
    if (buffer.in_use) return;
    weight_turn_ = turn;
    buffer.in_use = true;
    gathered_.push_back(b);
    ++issued_;
    Stream& stream = dp_.gather_stream;
    stream.wait(updated_weights_);
    stream.wait(buffer.free);
    const UnitState& unit = *units_[u];
    const Tensor all = buffer.memory.slice(0, {unit.size()});
    copy(all.slice(unit.owned().begin, {unit.owned().size}), unit.weight_shard(), stream);
    if (zero_.bug != PlantedBug::stale_gather || u != 1) dp_.weights->all_gather(all, stream);
    buffer.ready = stream.record();
  }

  ZeroConfig zero_;
  DataParallel& dp_;
  std::vector<std::unique_ptr<UnitState>> units_;
  std::vector<Buffer> weight_buffers_, gradient_buffers_;
  std::vector<size_t> uses_, gathered_;
  size_t next_use_ = 0, issued_ = 0;
  int weight_turn_ = 0, gradient_turn_ = 0;
  std::vector<std::pair<size_t, size_t>> holding_;             // unit, weight buffer
  std::vector<std::pair<size_t, Buffer*>> current_gradients_;  // unit, gradient buffer
  Event updated_weights_;
};

// Fresh weights (contract 7): from the seed, the parameter's name and the element's global index alone, whoever holds
// it.
inline void init_weights(const ModelState& state, uint64_t seed, Stream& stream) {
  for (size_t u = 0; u < state.size(); ++u) state.unit(u).zero_all(stream);
  for (const StateEntry& e : state.state_table()) {
    if (e.kind != StateKind::weight && e.kind != StateKind::master) continue;
    if (e.param->init == Init::normal) init_normal(e.tensor, e.param->init_std, e.begin, seed, e.param->name, stream);
    if (e.param->init == Init::ones) fill(e.tensor, 1.0f, stream);
  }
}

}  // namespace llmc
