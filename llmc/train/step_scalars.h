// step_scalars.h: the numbers of a step that all ranks share: the loss, the norm of the gradients, and what the update
// makes of them. Their order of addition is contract 10.
#pragma once
#include "train/step_config.h"

namespace llmc {

// The scalars of the ranks of a group, and what they are together.
struct GroupScalars {
  Tensor rows, losses, square_sums;  // fp64: (ranks, losses + notices + units) (losses + notices) (units tp shards)

  GroupScalars(const StepConfig& config, const Context& context, int ranks, int64_t units)
      : rows(room(context, "scalars of all ranks", {ranks, config.scalars_before_squares() + units})),
        losses(room(context, "loss", {config.scalars_before_squares()})),
        square_sums(room(context, "square sums", {units * config.layout.zero.shards * config.layout.tensor.ranks})) {}

  static Tensor room(const Context& context, const char* name, const Shape& shape) {
    return context.arena.alloc("step scalars", name, DType::fp64, shape);
  }
  // rows = those of all ranks of the group, from this rank's row and the others'.
  void gather(const Tensor& row, Comm& group, Stream& stream) const {
    copy(rows.slice(group.rank() * row.numel(), {row.numel()}), row, stream);
    group.all_gather(rows, stream);
  }
  // losses (with the notices) and square_sums = those of the group's ranks together, in so many stages.
  void combine(const StepConfig& config, int stages, Stream& stream) const {
    const int64_t L = config.loss_sums();
    combine_scalars(losses.slice(0, {L}), losses.slice(L, {Notices::count}), square_sums, rows,
                    config.layout.zero.shards, config.layout.tensor.ranks, stages, stream);
  }
  // control (4) = what the update needs
  void decide(const Tensor& control, const UpdateRule& rule, Stream& stream) const {
    clip_control(control, square_sums, losses.slice(0, {1}), rule, stream);
  }
};

class StepScalars {
 public:
  StepScalars(const StepConfig& config, const Context& context, const Groups& groups, int64_t units)
      : config_(config),
        stream_(context.compute),
        groups_(groups),
        all_(config, context, groups.ranks(), units),
        control_(GroupScalars::room(context, "update control", {4})) {}

  // This rank's row: its losses and notices, then for each unit the square sum of the gradients that it counts.
  Tensor mine() const { return all_.rows.slice(groups_.rank() * all_.rows.shape[1], {all_.rows.shape[1]}); }
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
  const Tensor& losses() const { return all_.losses; }
  const Tensor& control() const { return control_; }  // the values that the update needs

  // losses(), notices and the square sums = the values combined over all ranks.
  void combine() {
    groups_.gather_scalars(all_.rows, stream_);
    all_.combine(config_, config_.layout.pipeline.stages, stream_);
  }

  // control() from the loss and the gradient norm of all ranks. With a parameter server only the server has gradients,
  // of all shards: it decides, and tells the others.
  void decide(ModelState& state, const UpdateRule& rule) {
    const int64_t units = static_cast<int64_t>(state.size()), shards = config_.layout.zero.shards;
    combine();
    if (config_.layout.zero.updates() != ZeroConfig::Updates::server) return all_.decide(control_, rule, stream_);
    if (groups_.first()) {
      for (int64_t i = 0; i < units * shards; ++i)
        state.gradients.square_sum_of(static_cast<size_t>(i / shards), all_.square_sums.slice(i, {1}), stream_,
                                      static_cast<int>(i % shards));
      all_.decide(control_, rule, stream_);
    }
    groups_[GroupName::scalars].broadcast(control_, 0, stream_);
  }

 private:
  const StepConfig& config_;
  Stream& stream_;
  const Groups& groups_;
  GroupScalars all_;
  Tensor control_;  // (4) fp64
};

}  // namespace llmc
