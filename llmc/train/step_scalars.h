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
        all_(room(context, "scalars of all ranks", {groups.ranks(), config.scalars_before_squares() + units})),
        losses_(room(context, "loss", {config.scalars_before_squares()})),
        square_sums_(room(context, "square sums", {units * config.layout.zero.shards * config.layout.tensor.ranks})),
        control_(room(context, "update control", {4})) {}

  // This rank's row: its losses and notices, then for each unit the square sum of the gradients that it counts.
  Tensor mine() const { return all_.slice(groups_.rank() * all_.shape[1], {all_.shape[1]}); }
  Tensor my_losses() const { return mine().slice(0, {config_.loss_sums()}); }
  // Where the square sums of this rank come from; none with a parameter server, which has the gradients of all ranks.
  Tensor square_sums() const {
    if (config_.layout.zero.updates() == ZeroConfig::Updates::server) return {};
    const int64_t before = config_.scalars_before_squares();
    return mine().slice(before, {mine().numel() - before});
  }
  // This rank tells all others.
  void notify(const Notices& notices) {
    upload(mine().slice(config_.loss_sums(), {Notices::count}), notices.values(), stream_);
  }
  // Of all ranks, once combined; the reported loss is the first. The notices follow.
  const Tensor& losses() const { return losses_; }
  const Tensor& control() const { return control_; }  // the values that the update needs

  // losses(), notices and the square sums = the values combined over all ranks.
  void combine() {
    groups_.gather_scalars(all_, stream_);
    const int64_t L = config_.loss_sums();
    combine_scalars(losses_.slice(0, {L}), losses_.slice(L, {Notices::count}), square_sums_, all_,
                    config_.layout.zero.shards, config_.layout.tensor.ranks, config_.layout.pipeline.stages, stream_);
  }

  // control() from the loss and the gradient norm of all ranks. With a parameter server only the server has gradients,
  // of all shards: it decides, and tells the others.
  void decide(ModelState& state, const UpdateRule& rule) {
    const int64_t units = static_cast<int64_t>(state.size()), shards = config_.layout.zero.shards;
    combine();
    if (config_.layout.zero.updates() != ZeroConfig::Updates::server)
      return clip_control(control_, square_sums_, losses_.slice(0, {1}), rule, stream_);
    if (groups_.first()) {
      for (int64_t i = 0; i < units * shards; ++i)
        state.gradients.square_sum_of(static_cast<size_t>(i / shards), square_sums_.slice(i, {1}), stream_,
                                      static_cast<int>(i % shards));
      clip_control(control_, square_sums_, losses_.slice(0, {1}), rule, stream_);
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
  Tensor all_, losses_, square_sums_,
      control_;  // fp64: (ranks, losses + notices + units) (losses + notices) (units tp shards) (4)
};

}  // namespace llmc
