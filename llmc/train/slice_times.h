// slice_times.h: how long a stage of a pipeline takes for a token slice, on paper, and the slices into which
// --token-slices auto therefore cuts a sequence. The blocks of transformer.h run on the null device, whose clock counts
// their time at the rates below. These are round numbers for a common machine of either kind, not measured on this one:
// the cut, and so the order in which gradients are added, depends only on options and the kind of device (contracts 1
// and 2).
#pragma once
#include "schedule/token_slices.h"
#include "train/step_config.h"

namespace llmc {

// The speeds that a cut assumes of a machine. Only the ratios matter: short slices are slow because the weights are
// read again for each, and because every op takes a while to begin.
struct SliceRates {
  std::shared_ptr<const Machine> machine;
  double op_seconds;  // before an op begins
};
inline SliceRates slice_rates(DeviceKind kind, DType dtype) {
  if (kind != DeviceKind::cuda) return {ideal_machine(1e11, 2e10, 5e9, 1e-6), 2e-5};
  return {ideal_machine(dtype == DType::bf16 ? 5e14 : 4e13, 2.5e12, 2e11, 5e-6), 5e-6};
}

class SliceTimes {
 public:
  // kind: of the device of a rank; time is only counted, on paper
  SliceTimes(const StepConfig& config, DeviceKind kind)
      : config_(config),
        model_(config.part()),
        rates_(slice_rates(kind, config.precision.products)),
        device_(Device{.kind = kind, .machine = rates_.machine}.on_paper()),
        arena_(device_),
        scratch_(device_),
        stream_(device_, scratch_),
        groups_({.tensor = config.layout.tensor}, 0, device_, Groups::null_groups(0)),
        table_(part_of(parameter_table(config.model), config.layout.tensor, 0)),
        kind_(kind_of_layer(model_, typical_layer(config))),
        layer_(layer_units(config.model)[static_cast<size_t>(typical_layer(config))]),
        block_(table_[layer_.block], config.precision, {}, 0, arena_),
        experts_(layer_.experts
                     ? std::make_unique<UnitState>(table_[*layer_.experts], config.precision, ZeroConfig{}, 0, arena_)
                     : nullptr),
        blocks_(ceil_div(model_.n_layer, config.layout.pipeline.stages)) {}
  SliceTimes(const SliceTimes&) = delete;
  SliceTimes& operator=(const SliceTimes&) = delete;

  // Seconds for forward and backward of a slice of `length` tokens after `context` others, in all blocks of a stage.
  // Messages travel meanwhile; the embedding and the head, which some stages have, take equally long for every token.
  double operator()(int64_t length, int64_t context) {
    auto scope = arena_.scope();
    const BatchShape shape{config_.batch.B, length};
    const int64_t T = config_.batch.T;
    const Recompute recompute = config_.recompute;
    // As if each rank had all experts: with --ep a rank computes equally many rows, and rows travel meanwhile.
    ExpertPlacement placement = config_.expert_placement();
    placement.ranks = 1;
    const BlockShape of{model_, shape, kind_, config_.layout.tensor, config_.precision.activations, placement};
    const BlockActivations shared = BlockActivations::recomputed(of, recompute, arena_);
    BlockActivations acts = BlockActivations::kept(of, recompute, Backward::whole, shared, arena_);
    auto alloc = [&](DType dtype, const Shape& as) { return arena_.alloc("slices on paper", "a tensor", dtype, as); };
    const Shape keys{shape.B * T, 2 * model_.kv_size()};
    acts.slice_keys = {alloc(config_.precision.activations, keys), alloc(config_.precision.state, keys)};
    const auto stream = [&] { return alloc(config_.precision.activations, {of.stream_rows(), model_.n_embd}); };
    const Tensor x = stream(), dx = stream();
    acts.out = stream();
    const Sequences sequences{.shape = shape,
                              .positions = alloc(DType::int32, {shape.rows()}),
                              .rotary_table = alloc(config_.precision.state, {T, model_.head_size}),
                              .documents = config_.documents,
                              .slice = SequenceRows{T, context, length},
                              .routing = {.rows = {x.shape[0], {length}, T},
                                          .placement = placement,
                                          .experts = [this]() -> const UnitState& { return *experts_; }},
                              .linear = config_.precision.linear_of(config_.model.place_of(typical_layer(config_)))};
    const parallel::Group group{groups_, arena_, stream_};
    const double begin = stream_.seconds();
    ops_.clear();
    stream_.set_ledger(&ops_);
    const Block block({model_, block_, acts, sequences, group});
    block.forward(x);
    const double forward = seconds_since(begin);
    block.recompute(x, recompute);
    block.backward(dx, x);
    const double segment = static_cast<double>(config_.segment_for(Purpose::train));
    return static_cast<double>(blocks_) * (seconds_since(begin) + forward * (segment - 1) / segment);
  }

 private:
  // With the time that launching the ops takes.
  double seconds_since(double begin) const {
    double seconds = stream_.seconds() - begin;
    for (const auto& [name, totals] : ops_) seconds += static_cast<double>(totals.calls) * rates_.op_seconds;
    return seconds;
  }
  // The first layer with experts, if there is one; of these, the first whose products are in fp8, if some are.
  static int64_t typical_layer(const StepConfig& config) {
    const ModelConfig& model = config.model;
    std::optional<int64_t> first;
    for (int64_t l = 0; l < model.n_layer; ++l) {
      if (model.sparse_layers() > 0 && !model.is_sparse(l)) continue;
      if (config.precision.linear_of(model.place_of(l)) == config.precision.linear) return l;
      if (!first) first = l;
    }
    return first.value_or(0);
  }

  const StepConfig& config_;
  ModelConfig model_;  // a rank's part
  SliceRates rates_;
  Device device_;
  Arena arena_, scratch_;
  Stream stream_;
  Groups groups_;
  ParamTable table_;
  Layers kind_;
  LayerUnits layer_;
  UnitState block_;
  std::unique_ptr<UnitState> experts_;  // none: the layer is dense
  int64_t blocks_;
  OpLedger ops_;
};

// The best slices of a sequence for this step. Cuts are at multiples of a 64th of it.
inline TokenSlices planned_token_slices(const StepConfig& config, DeviceKind kind) {
  SliceTimes times(config, kind);
  return optimal_token_slices({.tokens = config.batch.T,
                               .granularity = ceil_div(config.batch.T, int64_t{64}),
                               .stages = config.layout.pipeline.stages,
                               .micro_batches = config.micro_batches},
                              [&](int64_t length, int64_t context) { return times(length, context); });
}

}  // namespace llmc
