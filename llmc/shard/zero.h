// zero.h: when the units of a model are whole: when weights are gathered and released, and gradients reduced; the
// update; and the StateTable of all units, which checkpoints iterate. unit_state.h says which part of a unit a rank
// holds.
#pragma once
#include <algorithm>
#include <memory>
#include <optional>
#include <utility>
#include <vector>

#include "shard/unit_state.h"

namespace llmc {

// Which stage of a pipeline has which unit of a model; empty: one stage has all. copy_of_embedding: the stage that has
// a copy of the embedding because its head is tied to that table; -1: none.
struct StageUnits {
  std::vector<int> stage_of = {};
  int copy_of_embedding = -1;
  bool has(size_t unit, int stage) const {
    return stage_of.empty() || stage_of[unit] == stage || (unit == 0 && stage == copy_of_embedding);
  }
};

// The units of a model: the embedding, the blocks (and their experts, if they have any), the head. A stage of a
// pipeline has some of them.
class ModelState {
 public:
  // blocks_open: the most blocks whose gradients are between start_gradients() and reduce_gradients() at the same time
  // versions: how many versions of the weights are kept
  ModelState(const ParamTable& table, DType dtype, const ZeroConfig& zero, Groups& groups, Arena& arena,
             StageUnits stages = {}, int64_t blocks_open = 1, int64_t versions = 1)
      : zero_(zero),
        expert_zero_(groups.layout.expert_zero()),
        groups_(groups),
        stages_(std::move(stages)),
        read_by_(static_cast<size_t>(versions)) {
    for (const UnitSpec& unit : table) {
      sharing_.push_back(unit.sharing);
      if (unit.sharing == Sharing::experts) require_expert_groups(unit);
      units_.push_back(stages_.has(units_.size(), groups.me.stage)
                           ? std::make_unique<UnitState>(unit, dtype, zero_config(unit.sharing),
                                                         groups.sharers(unit.sharing).shard, arena, versions)
                           : nullptr);
    }
    int64_t largest_block = 0, largest_experts = 0;
    for (size_t u = 1; u + 1 < units_.size(); ++u) {
      int64_t& largest = sharing_[u] == Sharing::experts ? largest_experts : largest_block;
      largest = std::max(largest, size_of_unit(u));
    }
    has_experts_ = largest_experts > 0;
    // One buffer for the embedding, one for the head, some that the blocks use in turn, and as many for their experts,
    // if any, which differ in size and are needed at the same time as the block.
    auto buffers = [&](const char* label, DType d, int64_t for_blocks) {
      std::vector<int64_t> sizes = {size_of_unit(0), size_of_unit(units_.size() - 1)};
      sizes.insert(sizes.end(), static_cast<size_t>(for_blocks), largest_block);
      if (has_experts_) sizes.insert(sizes.end(), static_cast<size_t>(for_blocks), largest_experts);
      std::vector<Buffer> made;
      for (const int64_t size : sizes)
        made.push_back({size > 0 ? arena.alloc(label, "unit", d, {size}) : Tensor{}, {}, false});
      return made;
    };
    if (zero.stage == 3) weight_buffers_ = buffers("gathered weights", dtype, 2);
    if (zero.grad_reduce == GradReduce::micro && zero.holds == Holds::training_state)
      gradient_buffers_ = buffers("gradients in flight", accumulator_of(dtype), blocks_open + 1);
  }

  bool has(size_t index) const { return units_[index] != nullptr; }
  // The stage that has a unit; if two have it, the first.
  int stage_of(size_t index) const { return stages_.stage_of.empty() ? 0 : stages_.stage_of[index]; }
  const UnitState& unit(size_t index) const { return *units_[index]; }
  const UnitState& front() const { return *units_.front(); }
  const UnitState& back() const { return *units_.back(); }
  size_t size() const { return units_.size(); }  // of the whole model
  const ZeroConfig& zero_config(Sharing sharing = Sharing::dense) const {
    return sharing == Sharing::experts ? expert_zero_ : zero_;
  }
  Sharing sharing_of(size_t index) const { return sharing_[index]; }
  Groups& groups() const { return groups_; }

  StateTable state_table() const {
    StateTable table;
    for (const auto& unit : units_)
      if (unit) unit->append_to(table);
    return table;
  }
  StateTable gradient_table() const {
    StateTable table;
    for (const auto& unit : units_)
      if (unit) unit->append_gradients_to(table);
    return table;
  }

  // ---- Weights: at stage 3 a unit is gathered one acquire() ahead, and released after it was used -------------------

  // `order`: the units in the order in which acquire() will be called for them.
  void start_pass(std::vector<size_t> order, Stream& compute) {
    if (zero_.stage < 3) return;
    // Frees the buffers that an interrupted pass had gathered ahead or still held.
    for (const size_t b : gathered_) held_.emplace_back(0, b);
    gathered_.clear();
    for (const auto& [u, b] : held_) {
      compute.wait(weight_buffers_[b].ready);
      weight_buffers_[b].free = compute.record();
      weight_buffers_[b].in_use = false;
    }
    held_.clear();
    order_ = std::move(order);
    acquired_ = issued_ = 0;
    updated_weights_ = compute.record();
    gather_ahead();
  }
  const UnitState& acquire(size_t u, Stream& compute) {
    if (zero_.stage < 3) return *units_[u];
    CHECK(acquired_ < issued_ && order_[acquired_] == u);
    const size_t b = gathered_.front();
    gathered_.erase(gathered_.begin());
    compute.wait(weight_buffers_[b].ready);
    units_[u]->attach_weights(weight_buffers_[b].memory);
    held_.emplace_back(u, b);
    ++acquired_;
    gather_ahead();
    return *units_[u];
  }
  void release(size_t u, Stream& compute) {
    if (zero_.stage < 3) return;
    const auto held = std::find_if(held_.begin(), held_.end(), [&](const auto& h) { return h.first == u; });
    CHECK(held != held_.end());
    Buffer& buffer = weight_buffers_[held->second];
    groups_.hooks.released(buffer.memory, compute);
    buffer.free = compute.record();
    buffer.in_use = false;
    held_.erase(held);
    gather_ahead();
  }
  // Calls f(unit) with all of its weights, for a checkpoint; called by all ranks of the shard group.
  template <class F>
  void with_whole_unit(size_t u, Stream& compute, F&& f) {
    start_pass({u}, compute);
    const UnitState& unit = acquire(u, compute);
    compute.synchronize();
    f(unit);
    release(u, compute);
  }

  // ---- Versions of the weights: for an asynchronous pipeline -------------------------------------------------------

  // The backward of a micro-batch reads the version that its forward has read. There must be no more micro-batches
  // between forward and backward than versions are kept.
  void begin_forward(int64_t micro_batch) {
    use_version(newest_);
    read_by_[static_cast<size_t>(micro_batch) % read_by_.size()] = newest_;
  }
  void begin_backward(int64_t micro_batch) {
    use_version(read_by_[static_cast<size_t>(micro_batch) % read_by_.size()]);
  }
  // The next update makes a new version from a copy of the newest, in the place of the oldest.
  void begin_version(Stream& compute) {
    const size_t before = newest_;
    newest_ = (newest_ + 1) % read_by_.size();
    use_version(newest_);
    for (const auto& unit : units_)
      if (unit && newest_ != before) copy(unit->version(newest_), unit->version(before), compute);
  }
  // After a flush only the newest version is read.
  void forget_old_versions(Stream& compute) {
    for (const auto& unit : units_)
      for (size_t v = 0; unit && v < read_by_.size(); ++v)
        if (v != newest_) groups_.hooks.released(unit->version(v), compute);
  }

  // ---- Gradients ---------------------------------------------------------------------------------------------------

  // Before the first micro-batch of a step.
  void zero_gradients(Stream& compute) {
    for (const auto& [u, buffer] : current_gradients_)  // left by an interrupted step
      buffer->free = compute.record(), buffer->in_use = false;
    current_gradients_.clear();
    for (const auto& unit : units_) {
      if (!unit) continue;
      const Tensor sum = zero_.grad_reduce == GradReduce::step ? unit->gradients() : unit->gradient_sum();
      if (!sum.empty()) zero(sum, compute);  // empty: a parameter server holds it
    }
  }
  // Before the first backward of a unit in a micro-batch.
  void start_gradients(size_t u, Stream& compute) {
    if (zero_.grad_reduce == GradReduce::step) return;
    const size_t b = buffer_of(u, gradient_turn_, gradient_buffers_);
    Buffer& buffer = gradient_buffers_[b];
    CHECK(!buffer.in_use, "{}: its gradients have no buffer", units_[u]->spec().name);
    buffer.in_use = true;
    compute.wait(buffer.free);
    units_[u]->attach_gradients(buffer.memory);
    zero(units_[u]->gradients(), compute);
    current_gradients_.emplace_back(u, &buffer);
  }
  // Before a later part of a unit's backward: continues the gradients of its oldest micro-batch.
  void resume_gradients(size_t u) {
    if (zero_.grad_reduce == GradReduce::micro) units_[u]->attach_gradients(oldest_gradients(u)->second->memory);
  }
  // After the last backward of a unit in a micro-batch: reduces its gradients while the next unit computes.
  void reduce_gradients(size_t u, bool last_micro_batch, Stream& compute) {
    const UnitState& unit = *units_[u];
    const bool micro = zero_.grad_reduce == GradReduce::micro;
    const bool alone = zero_config(sharing_[u]).ranks() == 1 && unit.partial_sums().empty();
    if (!micro && (!last_micro_batch || alone)) return;
    Stream& stream = groups_.reduce_stream();
    stream.wait(compute.record());
    const Tensor all = unit.gradients(), shard = all.slice(unit.shard_range().begin, {unit.shard_range().size});
    if (zero_.sync == DpSync::all_reduce) {
      Comm& sharers = groups_.sharers(sharing_[u]).gradients;
      sharers.reduce_scatter(all, stream);  // the shard group first, then the replicas (contract 3)
      groups_[GroupName::replicas].all_reduce(shard, stream);
      sum_partial_gradients(unit, stream);
      if (zero_.stage == 0) sharers.all_gather(all, stream);
    } else {
      groups_[GroupName::gradients].push(all, zero_.owners(), stream);
    }
    if (micro) {
      if (const Range kept = unit.update_range(); kept.size > 0)
        add_to(unit.gradient_sum(), all.slice(kept.begin, {kept.size}), stream);
      const auto current = oldest_gradients(u);
      groups_.hooks.released(current->second->memory, stream);
      current->second->free = stream.record();
      current->second->in_use = false;
      current_gradients_.erase(current);
    } else {
      groups_.hooks.released_except(all, unit.update_range(), stream);
    }
  }
  // After the last micro-batch: the compute stream waits for the sums. A tied table on two stages gets the sum of the
  // gradients of both.
  void finish_gradients(Stream& compute) {
    if (stages_.copy_of_embedding >= 0 && units_.front()) {
      groups_.reduce_stream().wait(compute.record());
      groups_[GroupName::tied_gradients].all_reduce(units_.front()->reduced_gradients(), groups_.reduce_stream());
    }
    compute.wait(groups_.reduce_stream().record());
  }

  // out (1) fp64 = the square sum of the gradients that this rank counts in its shard of a unit, or, on a parameter
  // server, in shard `k`.
  void square_sum_of(size_t u, const Tensor& out, Stream& compute, std::optional<int> k = std::nullopt) const {
    const int shard = k.value_or(groups_.sharers(sharing_[u]).shard);
    const std::vector<Tensor> counted = has(u) ? units_[u]->counted_gradients(shard) : std::vector<Tensor>();
    if (counted.empty()) zero(out, compute);
    for (size_t i = 0; i < counted.size(); ++i)
      square_sum(out, counted[i], compute, i == 0 ? Accumulate::no : Accumulate::yes);
  }

  // ---- The update --------------------------------------------------------------------------------------------------

  void update(Tensor control, const OptimizerOptions& options, Stream& compute) {
    const bool divided = zero_.stage < 3 && zero_.updates() != ZeroConfig::Updates::everyone;
    for (size_t u = 0; u < units_.size(); ++u) {
      if (!has(u)) continue;
      const UnitState& unit = *units_[u];
      unit.update(control, options, compute);
      if (!divided || zero_config(sharing_[u]).ranks() == 1) continue;
      groups_.gather_stream().wait(compute.record());
      groups_.hooks.released_except(unit.weights(), unit.update_range(), groups_.gather_stream());
      gather_updated(unit.weights(), groups_.sharers(sharing_[u]).weights);
    }
    if (divided) compute.wait(groups_.gather_stream().record());
  }

 private:
  void use_version(size_t index) {
    for (const auto& unit : units_)
      if (unit) unit->use_version(index);
  }
  int64_t size_of_unit(size_t u) const { return units_[u] ? units_[u]->size() : 0; }

  // Sums, in this rank's shard, the partial gradients of the tensor-parallel ranks that have copies of a parameter.
  void sum_partial_gradients(const UnitState& unit, Stream& stream) {
    for (const auto& [range, copies] : unit.partial_sums()) {
      const Range r = overlap(range, unit.shard_range());
      Comm& group = copies == groups_.layout.tensor.ranks ? groups_[GroupName::partial_gradients]
                                                          : groups_[GroupName::head_gradients];
      if (r.size > 0) group.all_reduce(unit.gradients().slice(r.begin, {r.size}), stream);
    }
  }

  // Every rank of a group gets the weights of a unit from the ranks that have updated them.
  void gather_updated(const Tensor& weights, Comm& sharers) {
    switch (zero_.sync) {
      case DpSync::all_reduce: return sharers.all_gather(weights, groups_.gather_stream());
      case DpSync::parameter_server_chain: return sharers.broadcast(weights, 0, groups_.gather_stream());
      case DpSync::parameter_server:
      case DpSync::partitioned_server: return sharers.pull(weights, zero_.owners(), groups_.gather_stream());
    }
  }
  void require_expert_groups(const UnitSpec& unit) const {
    CHECK(
        groups_.layout.tensor.ranks == 1 || groups_.layout.experts_apart(),
        "{}: with {} tensor-parallel ranks it has groups of its own, which were not made: ExpertParallel of {} experts",
        unit.name, groups_.layout.tensor.ranks, groups_.layout.expert.count);
    CHECK(zero_.sync == DpSync::all_reduce, "{}: the servers of --dp-sync {} cannot hold experts", unit.name,
          zero_.sync);
  }

  struct Buffer {
    Tensor memory;
    Event free, ready;
    bool in_use = false;
    Buffer(Tensor m, Event f, bool used) : memory(m), free(f), in_use(used) { free.signal(); }
  };

  struct Turns {  // the next of the buffers that are used in turn: for blocks, and for experts
    size_t block = 0, experts = 0;
  };
  size_t buffer_of(size_t u, Turns& turns, const std::vector<Buffer>& buffers) const {
    if (u == 0) return 0;
    if (u + 1 == units_.size()) return 1;
    const bool experts = sharing_[u] == Sharing::experts;
    const size_t each = (buffers.size() - 2) / (has_experts_ ? 2 : 1), first = experts ? 2 + each : 2;
    size_t& turn = experts ? turns.experts : turns.block;
    for (size_t tried = 1; tried < each && buffers[first + turn % each].in_use; ++tried) ++turn;
    return first + turn++ % each;
  }

  std::vector<std::pair<size_t, Buffer*>>::iterator oldest_gradients(size_t u) {
    const auto oldest =
        std::find_if(current_gradients_.begin(), current_gradients_.end(), [&](const auto& c) { return c.first == u; });
    CHECK(oldest != current_gradients_.end(), "{}: its gradients were not begun", units_[u]->spec().name);
    return oldest;
  }

  // Issues the gather of the next unit of order_, if it has not been issued and its buffer is not in use.
  void gather_ahead() {
    if (issued_ > acquired_ || issued_ == order_.size()) return;
    const size_t u = order_[issued_];
    Turns turn = weight_turn_;
    const size_t b = buffer_of(u, turn, weight_buffers_);
    Buffer& buffer = weight_buffers_[b];
    if (buffer.in_use) return;
    weight_turn_ = turn;
    buffer.in_use = true;
    gathered_.push_back(b);
    ++issued_;
    Stream& stream = groups_.gather_stream();
    stream.wait(updated_weights_);
    stream.wait(buffer.free);
    const UnitState& unit = *units_[u];
    const Tensor all = unit.in_buffer(buffer.memory);
    copy(all.slice(unit.shard_range().begin, {unit.shard_range().size}), unit.weight_shard(), stream);
    groups_.sharers(sharing_[u]).weights.all_gather(all, stream);
    buffer.ready = stream.record();
  }

  ZeroConfig zero_, expert_zero_;  // of dense units, of experts
  Groups& groups_;
  StageUnits stages_;
  std::vector<std::unique_ptr<UnitState>> units_;  // none: on another stage
  std::vector<Sharing> sharing_;                   // of each unit of the model
  bool has_experts_ = false;                       // on this stage
  std::vector<Buffer> weight_buffers_, gradient_buffers_;
  std::vector<size_t> order_;         // the units to acquire in this pass
  size_t issued_ = 0, acquired_ = 0;  // how many units of order_ have their gather begun, and are acquired
  std::vector<size_t> gathered_;      // buffers issued and not yet acquired
  Turns weight_turn_, gradient_turn_;
  std::vector<std::pair<size_t, size_t>> held_;                // unit and weight buffer, between acquire and release
  std::vector<std::pair<size_t, Buffer*>> current_gradients_;  // unit and gradient buffer, between start and reduction
  Event updated_weights_;
  size_t newest_ = 0;  // version of the weights
  std::vector<size_t>
      read_by_;  // the version that a micro-batch's forward has read, by micro-batch modulo the number of versions
};

// Fresh weights (contract 7): they depend only on the seed, the parameter's name and the element's global index, not on
// which rank holds them.
inline void init_weights(const ModelState& state, uint64_t seed, Stream& stream) {
  for (size_t u = 0; u < state.size(); ++u)
    if (state.has(u)) state.unit(u).zero_all(stream);
  for (const StateEntry& e : state.state_table()) {
    if (e.kind != StateKind::weight && e.kind != StateKind::master) continue;
    if (e.param->init == Init::normal)
      init_normal(e.tensor, e.param->init_std, e.elements(), seed, e.param->name, stream);
    if (e.param->init == Init::ones) fill(e.tensor, 1.0f, stream);
  }
}

}  // namespace llmc
