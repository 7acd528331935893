// zero.h: the state of a model on a rank, as ZeRO shards it (Rajbhandari et al. 2020): its units, which unit_state.h
// cuts into shards; when their weights are whole (gathered_weights.h); when their gradients are reduced
// (gradient_reducer.h); what is made of whole matrices (matrix_updates.h); and the update.
#pragma once
#include "shard/gathered_weights.h"
#include "shard/gradient_reducer.h"
#include "shard/host_state.h"
#include "shard/matrix_updates.h"

namespace llmc {

class ModelState : public Units {
 public:
  ModelState(const ParamTable& table, const Precision& precision, const ZeroConfig& zero, Groups& groups, Arena& arena,
             const StageState& kept = {})
      : Units(table, precision, zero, groups, arena, kept),
        host_update(*this, kept.offloaded.host),
        weights(*this, host_update, arena),
        gradients(*this, kept.blocks_open, arena),
        versions(*this, kept.versions),
        matrices(*this, arena),
        host(*this, arena, kept.offloaded.host) {}

  // updated(u): enqueues what else changes the weights of a unit in reach, before others get them; may be called until
  // the weights of the unit are first read
  template <class Updated>
  void update(Tensor control, const OptimizerOptions& options, Stream& compute, Updated updated) {
    matrices.make(control, options, compute);
    change_weights(control, compute, [this, options, updated](size_t u, const Tensor& its_control, Stream& stream) {
      unit(u).update(its_control, options, stream);
      updated(u);
      unit(u).follow_average(its_control, options, stream);
    });
  }
  void update(Tensor control, const OptimizerOptions& options, Stream& compute) {
    update(control, options, compute, [](size_t) {});
  }
  void begin_averages(Stream& stream) const {
    for_each([&](size_t u) { unit(u).begin_average(stream); });
  }
  // The moving averages take the place of the weights, and the weights theirs.
  void exchange_averages(Stream& compute) {
    settle(compute);
    change_weights({}, compute, [this](size_t u, const Tensor&, Stream& stream) { unit(u).exchange_average(stream); });
    settle(compute);
  }
  // Before anything but the next step reads or writes the state: waits for what is still on its way.
  void settle(Stream& compute) {
    weights.settle(compute);
    host.settle(compute);
    host_update.settle(compute);
  }

 private:
  // change(u, control, stream) changes the part of a unit's weights that this rank updates, as far as it is in reach.
  // control: of an update. The host may call it until the weights of the unit are first read.
  template <class F>
  void change_weights(const Tensor& control, Stream& compute, F change) {
    const auto changed = [&](size_t u) { weights.updated(u, compute); };
    if (host_update.any()) {
      host_update.begin(control, compute, change);
      for_each(changed);
      if (versions.several()) weights.settle(compute);  // before weights of another version are in use
    } else {
      host.for_each(
          compute, [&](size_t u) { change(u, control, compute); }, changed);
    }
  }

 public:
  HostUpdate host_update;
  GatheredWeights weights;
  GradientReducer gradients;
  WeightVersions versions;
  MatrixUpdates matrices;
  HostState host;
};

// Fresh weights (contract 7): they depend only on the seed, the parameter's name and the element's global index, not on
// which rank holds them.
inline void init_weights(const ModelState& state, uint64_t seed, Stream& stream) {
  state.for_each([&](size_t u) { state.unit(u).zero_all(stream); });
  for (const StateEntry& e : state.state_table()) {
    if (e.kind != StateKind::weight && e.kind != StateKind::master) continue;
    if (e.small() && e.param->init != Init::zeros) {  // as fp32 masters are
      write_state(e, stream, [&](const Tensor& host) {
        float* out = host.data<float>();
        if (e.param->init == Init::constant) std::fill_n(out, host.numel(), e.param->init_value);
        else cpu::ops<float>().init_normal(out, e.elements(), host.numel(), e.param->init_std, {seed, e.param->name});
      });
      continue;
    }
    if (e.param->init == Init::normal)
      init_normal(e.tensor, e.param->init_std, e.elements(), seed, e.param->name, stream);
    if (e.param->init == Init::constant) fill(e.tensor, e.param->init_value, stream);
  }
  state.begin_averages(stream);
}

}  // namespace llmc
