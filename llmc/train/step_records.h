// step_records.h: what the training steps of a run record beside loss and norm, and what they do about it.
#pragma once
#include <compare>

#include "train/step_config.h"

namespace llmc {

// Of experts: losses and entropy of routers, how often each was chosen, dropped choices; and biases that balance them.
class ExpertRecord {
 public:
  ExpertRecord(const StepConfig& config, const Context& context) : config_(config) {
    const ModelConfig& model = config.model;
    for (int64_t l = 0; l < model.n_layer; ++l) index_of_layer_.push_back(model.is_sparse(l) ? layers_++ : -1);
    if (layers_ == 0) return;
    const int64_t E = model.experts.count;
    record_ = context.arena.alloc("balance of experts", "record of a step", DType::fp64, {others + layers_ * E});
    if (config.expert_placement().spread)
      for (int k = 0; k < config.slices_for(Purpose::train); ++k)
        order_segments(config.share(config.batch, Purpose::train, k), context);
    if (config.experts.bias_rate > 0) {
      biases_ = context.arena.alloc("balance of experts", "biases of experts", config.precision.state, {layers_, E});
      zero(biases_, context.compute);
    }
  }
  ExpertRecord(const ExpertRecord&) = delete;
  ExpertRecord& operator=(const ExpertRecord&) = delete;

  bool empty() const { return layers_ == 0; }
  // (4 + layers E) fp64: the totals and counts of training_of(), summed over the micro-batches of a step.
  const Tensor& record() const { return record_; }
  const Tensor& biases() const { return biases_; }  // (layers with experts, E); an empty tensor: none

  Tensor bias_of(int64_t layer) const {
    const int64_t E = config_.model.experts.count;
    return biases_.empty() ? Tensor{} : biases_.slice(index_of(layer) * E, {E});
  }
  // shape: the rows that a rank has of a micro-batch, or of a slice of it.
  ExpertTraining training_of(int64_t layer, const BatchShape& shape) const {
    const int64_t E = config_.model.experts.count, T = config_.batch.T;
    const double layers = static_cast<double>(layers_), tokens = static_cast<double>(config_.tokens());
    const ExpertOptions& o = config_.experts;
    return {.losses = {.balance = static_cast<float>(o.aux_loss * static_cast<double>(T) / (layers * tokens)),
                       .z = static_cast<float>(o.z_loss / (layers * tokens)),
                       .sequence = T},
            .totals = record_.slice(0, {others}),
            .chosen = record_.slice(others + index_of(layer) * E, {E}),
            .sequences = orders_.empty() ? std::nullopt : std::optional(orders_.at(shape.T)),
            .rounds = rounds_};
  }

  // After the gradients of a step, from the record of all ranks: every rank updates the biases of all layers.
  void update_biases(const Tensor& control, Stream& stream) const {
    const int64_t E = config_.model.experts.count;
    for (int64_t l = 0; l < layers_ && !biases_.empty(); ++l)
      update_expert_biases(biases_.slice(l * E, {E}), record_.slice(others + l * E, {E}), control,
                           static_cast<float>(config_.experts.bias_rate), stream);
  }

  // The most rounds of this rank's --ep group since the last call: those of a step, if all of it is enqueued.
  int take_rounds() const { return std::exchange(*rounds_, 1); }

  // The statistics of a step, from the record of all ranks and from take_rounds().
  ExpertStatistics statistics(std::span<const double> record, int rounds) const {
    const double layers = static_cast<double>(layers_), tokens = static_cast<double>(config_.tokens()),
                 T = static_cast<double>(config_.batch.T), k = static_cast<double>(config_.model.experts.per_token),
                 E = static_cast<double>(config_.model.experts.count);
    const auto chosen = record.subspan(others);
    const auto [least, most] = std::minmax_element(chosen.begin(), chosen.end());
    const double slices = static_cast<double>(config_.slices_for(Purpose::train));  // each has a loss of its own
    return {.balance_loss = record[0] * T / (layers * tokens * slices),
            .z_loss = record[1] / (layers * tokens),
            .entropy = record[2] / (layers * tokens),
            .dropped = record[3] / (layers * tokens * k),
            .largest = *most * E / (tokens * k),
            .smallest = *least * E / (tokens * k),
            .rounds = rounds};
  }

 private:
  // Sets how the segments of context- and tensor-parallel ranks make up sequences, or their slices of one length.
  void order_segments(const BatchShape& share, const Context& context) {
    if (orders_.contains(share.T)) return;
    const int cp = config_.layout.context.ranks, tp = config_.layout.tensor.by_rows() ? config_.layout.tensor.ranks : 1;
    const int64_t S = config_.layout.tensor.stream_rows(share.rows()), most = BlockActivations::most_segments(share, S);
    struct Segment {
      int64_t sequence, slice;
      int tensor_rank;
      int32_t id;
      auto operator<=>(const Segment&) const = default;
    };
    std::vector<Segment> all;
    std::vector<int32_t> sequence_of(static_cast<size_t>(cp * tp * most), -1), ids, begins = {0};
    for (int c = 0; c < cp; ++c)
      for (int t = 0; t < tp; ++t) {
        const StreamRows rows = stream_rows_of(share, config_.layout.tensor, config_.layout.context, t);
        const int64_t slices = cp > 1 ? 2 : 1, before = S * t / rows.segments.length;
        for (int64_t s = 0; s < rows.segments.count(rows.count); ++s) {
          const int64_t slice = (before + s) % slices, sequence = (before + s) / slices;
          const int64_t id = (c * tp + t) * most + s;
          all.push_back({sequence, slice == 0 ? c : 2 * cp - 1 - c, t, static_cast<int32_t>(id)});
          sequence_of[static_cast<size_t>(id)] = static_cast<int32_t>(sequence);
        }
      }
    std::sort(all.begin(), all.end());
    for (const Segment& s : all) {
      ids.push_back(s.id);
      begins.resize(static_cast<size_t>(s.sequence) + 2, 0);
      begins.back() = static_cast<int32_t>(ids.size());
    }
    auto on_device = [&](const char* name, std::vector<int32_t> values, const Shape& shape) {
      const Tensor t = context.arena.alloc("balance of experts", name, DType::int32, shape);
      upload(t, std::move(values), context.compute);
      return t;
    };
    const int64_t count = std::ssize(ids);
    orders_[share.T] = {on_device("sequences of segments", std::move(sequence_of), {cp * tp, most}),
                        on_device("segments in order", std::move(ids), {count}),
                        on_device("first segments of sequences", std::move(begins), {share.B + 1})};
  }

  static constexpr int64_t others = 4;  // numbers besides how often experts were chosen
  int64_t index_of(int64_t layer) const { return index_of_layer_[static_cast<size_t>(layer)]; }

  const StepConfig& config_;
  int64_t layers_ = 0;                   // layers with experts
  std::vector<int64_t> index_of_layer_;  // index among these; -1: a dense layer
  Tensor record_, biases_;
  std::shared_ptr<int> rounds_ = std::make_shared<int>(1);
  std::map<int64_t, SegmentOrder> orders_;  // by BatchShape::T; none: each rank has whole sequences
};

// QK-clip in a step: the largest logit of each head of the model, over all micro-batches and ranks, and the weights
// that shrink after the update where it is too large. All layouts find the same maximum, but for rounding in the
// logits.
//
//   forward   each rank   its layers and heads, over the rows that it has    a recomputation finds the same
//   gather    all ranks   8 L Hq bytes each, in one ring or two (Groups::scalar_tiers)
//   update    each rank   the weights that it updates, before others get them
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
