// logit_record.h: QK-clip in a step: the largest logit of each head of the model, over all micro-batches and ranks, and
// the weights that shrink after the update where it is too large. A maximum has no order: all layouts find the same
// one, but for rounding in the logits themselves.
//
//   forward   each rank   its layers and heads, over the rows that it has    a recomputation finds the same
//   gather    all ranks   8 L Hq bytes each, in one ring or two (Groups::scalar_tiers)
//   update    each rank   the weights that it updates, before others get them
#pragma once
#include "train/step_config.h"

namespace llmc {

class LogitRecord {
 public:
  LogitRecord(const StepConfig& config, const Context& context, const Groups& groups)
      : config_(config), groups_(groups), stream_(context.compute), units_(layer_units(config.model)) {
    if (!config.qk_clip) return;
    const auto room = [&](const char* name, const Shape& shape) {
      return context.arena.alloc("largest logits", name, DType::fp64, shape);
    };
    const int64_t heads = config.model.n_layer * config.model.n_head;
    record_ = room("record of a step", {heads});
    int most = 1;
    for (const Comm* group : groups.scalar_tiers()) most = std::max(most, group->size());
    if (most > 1) gathered_ = room("records of ranks", {most, heads});
  }
  LogitRecord(const LogitRecord&) = delete;
  LogitRecord& operator=(const LogitRecord&) = delete;

  bool empty() const { return record_.empty(); }
  const Tensor& record() const { return record_; }  // (L Hq) fp64
  void begin() const {
    if (!empty()) zero(record_, stream_);
  }
  // (Hq): those of this rank's heads; or an empty tensor
  Tensor of(int64_t layer) const {
    if (empty()) return {};
    const int64_t heads = config_.part().n_head;
    return of_layer(layer).slice(groups_.me.tensor * heads, {heads});
  }

  // After the forwards of a step: every rank gets the record of all.
  void combine() const {
    if (empty()) return;
    for (Comm* group : groups_.scalar_tiers()) {
      if (group->size() == 1) continue;
      const int64_t n = record_.numel();
      const Tensor all = gathered_.slice(0, {group->size(), n});
      copy(all.slice(group->rank() * n, {n}), record_, stream_);
      group->all_gather(all, stream_);
      largest_of_ranks(record_, all, stream_);
    }
  }

  LogitStatistics statistics(std::span<const double> record) const {
    return {*std::ranges::max_element(record),
            std::ranges::count_if(record, [&](double largest) { return largest > *config_.qk_clip; })};
  }

  // After the update of a unit.
  void clip(const Units& units, size_t u, const Tensor& control, const OptimizerOptions& options) const {
    for (size_t l = 0; l < units_.size() && !empty(); ++l)
      if (units_[l].block == u)
        units.unit(u).clip_heads(of_layer(static_cast<int64_t>(l)), *config_.qk_clip, control, options, stream_);
  }

 private:
  Tensor of_layer(int64_t layer) const {
    const int64_t heads = config_.model.n_head;
    return record_.slice(layer * heads, {heads});
  }

  const StepConfig& config_;
  const Groups& groups_;
  Stream& stream_;
  std::vector<LayerUnits> units_;
  Tensor record_, gathered_;  // fp64: (L Hq) (ranks of a ring, L Hq)
};

}  // namespace llmc
