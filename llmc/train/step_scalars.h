// step_scalars.h: the numbers of a step that all ranks share: the loss, the norm of the gradients, and what the update
// makes of them. Their order of addition is contract 10.
#pragma once
#include "device/host_copy.h"
#include "ops/ops_step.h"
#include "shard/zero.h"
#include "train/step_config.h"

namespace llmc {

class StepScalars {
 public:
  StepScalars(const StepConfig& config, const Context& context, const Groups& groups, int64_t units)
      : config_(config),
        stream_(context.compute),
        groups_(groups),
        all_(room(context, "scalars of all ranks", {groups.ranks(), 1 + units})),
        loss_(room(context, "loss", {1})),
        square_sums_(room(context, "square sums", {units * config.layout.zero.shards * config.layout.tensor.ranks})),
        control_(room(context, "update control", {4})) {}

  // This rank's row: its loss, then for each unit the square sum of the gradients that it counts.
  Tensor mine() const { return all_.slice(groups_.rank() * all_.shape[1], {all_.shape[1]}); }
  const Tensor& loss() const { return loss_; }        // of all ranks, once combined
  const Tensor& control() const { return control_; }  // the values that the update needs

  // loss() and the square sums = the values combined over all ranks.
  void combine() {
    groups_.gather_scalars(all_, stream_);
    combine_scalars(loss_, square_sums_, all_, config_.layout.zero.shards, config_.layout.tensor.ranks,
                    config_.layout.pipeline.stages, stream_);
  }

  // control() from the loss and the gradient norm of all ranks. With a parameter server only the server has gradients,
  // of all shards: it decides, and tells the others.
  void decide(ModelState& state, const UpdateRule& rule) {
    const int64_t units = static_cast<int64_t>(state.size()), shards = config_.layout.zero.shards;
    if (config_.layout.zero.updates() != ZeroConfig::Updates::server) {
      for (int64_t u = 0; u < units; ++u)
        state.gradients.square_sum_of(static_cast<size_t>(u), mine().slice(1 + u, {1}), stream_);
      combine();
      return clip_control(control_, square_sums_, loss_, rule, stream_);
    }
    combine();  // the losses
    if (groups_.first()) {
      for (int64_t i = 0; i < units * shards; ++i)
        state.gradients.square_sum_of(static_cast<size_t>(i / shards), square_sums_.slice(i, {1}), stream_,
                                      static_cast<int>(i % shards));
      clip_control(control_, square_sums_, loss_, rule, stream_);
    }
    groups_[GroupName::scalars].broadcast(control_, 0, stream_);
  }

 private:
  static Tensor room(const Context& context, const char* name, const Shape& shape) {
    return context.arena.alloc("step scalars", name, DType::fp64, shape);
  }

  const StepConfig& config_;
  Stream& stream_;
  const Groups& groups_;
  Tensor all_, loss_, square_sums_, control_;  // fp64: (ranks, 1 + units) (1) (units tp shards) (4)
};

}  // namespace llmc
