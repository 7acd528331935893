// trainer.h: one rank's trainer. A training step is a list of forwards and backwards that accumulates gradients, then
// their norm over all ranks, then the update; evaluation and generation are lists of forwards (interpreter.h).
#pragma once
#include <bit>

#include "core/signals.h"
#include "device/stream_trace.h"
#include "shard/zero.h"
#include "train/interpreter.h"
#include "train/pipedream.h"
#include "train/step_statistics.h"

namespace llmc {

namespace detail {

// The parameters that this rank has of the model; a copy of the embedding is counted where the embedding is.
inline ParamTable table_of_rank(const StepConfig& config, const Groups& groups) {
  const StageUnits stages = config.stage_units();
  const std::vector<LayerUnits> units = layer_units(config.model);
  WantedParameters wanted{
      .layer = [&](int64_t l) { return stages.has(units[static_cast<size_t>(l)].block, groups.me.stage); }};
  if (config.layout.expert.ranks > 1) wanted.experts = config.layout.expert.held_by(groups.me.expert);
  const ZeroConfig& zero = config.layout.zero;
  ParamTable table =
      part_of(parameter_table(config.model, zero.optimizer, wanted, zero.muon), config.layout.tensor, groups.me.tensor);
  if (stages.copy_of_embedding == groups.me.stage)
    for (ParamSpec& p : table.front().params) p.first_copy = false;
  return table;
}

inline void check_layout(const StepConfig& config, const Groups& groups) {
  const Layout &l = config.layout, &of_groups = groups.layout;
  const std::vector<int64_t>& slices = l.pipeline.slices;
  CHECK(groups.ranks() == l.ranks() && groups.stages() == l.pipeline.stages &&
        of_groups.tensor.ranks == l.tensor.ranks && of_groups.context.ranks == l.context.ranks &&
        of_groups.expert.ranks == l.expert.ranks);
  CHECK(l.zero.stage >= 0 && l.zero.stage <= 3 && config.precision.uniform());
  CHECK(config.batch.T % l.context.slices() == 0);
  CHECK(slices.empty() ||
        (l.context.ranks == 1 && std::accumulate(slices.begin(), slices.end(), int64_t{0}) == config.batch.T));
  CHECK(l.tensor.head_copies == tensor_parallel(config.model, l.tensor.ranks).head_copies);
  CHECK(l.zero.sync == DpSync::all_reduce ||
        (l.zero.stage == 0 && l.zero.replicas == 1 && l.ranks() == l.zero.ranks() && l.context.ranks == 1));
}

}  // namespace detail

class Trainer {
 public:
  Trainer(const StepConfig& config, Context context)
      : config_(config),
        context_(context),
        alone_(context.groups
                   ? nullptr
                   : std::make_unique<Groups>(Layout{}, 0, context.compute.device(), Groups::null_groups(0))),
        groups_(context.groups ? *context.groups : *alone_),
        actions_(actions_of(config, groups_.me.stage)),
        state_(detail::table_of_rank(config, groups_), config.precision, config.layout.zero, groups_, context.arena,
               {.stages = config.stage_units(),
                .blocks_open = blocks_open(actions_, config.model_chunks()),
                .versions = weight_versions(config.pipeline(), groups_.me.stage),
                .offloaded = {context.host, context.file}}),
        scalars_(config_, context_, groups_, static_cast<int64_t>(state_.size())),
        experts_(config_, context_),
        logits_(config_, context_, groups_),
        stage_(config_, context_, state_, scalars_.my_losses(), experts_, logits_),
        interpreter_(config_, context_, state_, stage_),
        drain_(groups_, context_.copies == nullptr ? std::vector{&context_.compute}
                                                   : std::vector{&context_.compute, context_.copies}) {
    if (config.layout.pipeline.asynchronous())
      pipedream_.emplace(config_, context_, state_, interpreter_, scalars_.mine(), scalars_.control());
    if (config.noise_scale) {
      CHECK(noise_fault(config).empty(), "no gradient noise scale: {}", noise_fault(config));
      squares_ = context_.arena.alloc("step scalars", "squares of gradients", DType::fp64, {2});
      state_.gradients.record_squares(squares_);
    }
    detail::check_layout(config, groups_);
    CHECK(!config.qk_clip || !config.layout.zero.offload.updates_at_host(), "QK-clip of weights that the host updates");
    zero(scalars_.control(), context_.compute);
    if (config.layout.expert.ranks > 1) {  // for the tables of the rows that are exchanged
      const int64_t bytes = config.layout.expert.count * config.layout.expert.ranks * size_of(DType::fp64);
      context_.compute.reserve_uploads(bytes);
      groups_.find_stream(Lane::expert)->reserve_uploads(bytes);
    }
  }
  Trainer(const Trainer&) = delete;
  Trainer& operator=(const Trainer&) = delete;

  const ModelState& state() const { return state_; }
  ModelState& state() { return state_; }
  const StepConfig& config() const { return config_; }
  Stream& stream() const { return context_.compute; }
  Arena& arena() const { return context_.arena; }
  Interpreter::Place place() const { return interpreter_.place(); }
  void time_actions(std::vector<PassTime>* times) { interpreter_.time_actions(times); }
  void count_memory_alone() { stage_.count_memory_alone(); }
  // The forwards and backwards of a step; with pipedream those of a single step, without its updates.
  static std::vector<Action> actions_of(const StepConfig& config, int stage) {
    Pipeline pipeline = config.pipeline();
    if (pipeline.schedule == Schedule::pipedream) pipeline.schedule = Schedule::one_f_one_b;
    if (config.layout.pipeline.stages == 1)
      return training_actions(pipeline.schedule, config.layout.pipeline.chunks(), config.micro_batches,
                              pipeline.slices);
    return KeptLists::of_stage(pipeline_actions, pipeline, stage);
  }
  bool has_layer(int64_t layer) const {
    return state_.has(layer_units(config_.model)[static_cast<size_t>(layer)].block);
  }

  // ---- Training ----------------------------------------------------------------------------------------------------

  // Enqueues one update. `optimizer.step` counts from 1. rule.largest_loss: limit of the mean loss. rule.scale: above 1
  // where rows of the step have no target. notices(): what this rank then tells all others. With an asynchronous
  // pipeline the update is complete after P - 1 further ones, or flush().
  PendingStep begin_step(const BatchSource& batches, const OptimizerOptions& optimizer, UpdateRule rule,
                         const NoticeSource& notices = {}) {
    const ProfilerRange range("step");
    const StreamRange traced = span(SpanKind::step, pipedream_ ? "turn" : "step");
    if (pipedream_) return pipedream_->begin_step(batches, optimizer, rule, notices);
    accumulate_gradients(batches);
    if (!squares_.empty()) groups_[GroupName::scalars].all_reduce(squares_, context_.compute);
    const double targets = static_cast<double>(config_.tokens()) / rule.scale;
    rule.largest_loss *= targets;
    {
      const StreamRange norm = span(SpanKind::layer, "norm of the gradients");
      if (notices) scalars_.notify(notices());
      scalars_.decide(state_, rule);
    }
    update(optimizer);
    PendingStep pending(targets);
    pending.enqueued(scalars_.losses(), scalars_.control(), interpreter_.take_headers(), context_.compute);
    if (!squares_.empty())
      pending.enqueued(
          squares_,
          [scale = rule.scale, batches = small_batches(config_), targets](StepResult& result, auto squares) {
            const double unscaled = result.grad_norm / scale;
            result.noise = gradient_noise(squares[0], unscaled * unscaled - squares[1], batches, targets);
          },
          context_.compute);
    if (!experts_.empty())
      pending.enqueued(
          experts_.record(),
          [this, rounds = experts_.take_rounds()](StepResult& result, auto record) {
            result.experts = experts_.statistics(record, rounds);
          },
          context_.compute);
    if (!logits_.empty())
      pending.enqueued(
          logits_.record(), [this](StepResult& result, auto record) { result.logits = logits_.statistics(record); },
          context_.compute);
    return pending;
  }
  // A step that was not finite has made all later updates impossible: from now on they are possible again.
  void allow_updates() { zero(scalars_.control(), context_.compute); }
  // Enqueues the rest of all steps that have begun; needed before anything other than a further step, and before the
  // weights are read. Returns whether an asynchronous pipeline had anything to compute.
  bool flush() {
    const bool computed = pipedream_ && pipedream_->flush();
    state_.settle(context_.compute);
    return computed;
  }
  // On paper: what precedes a step is the update of another one, whose weights are still being gathered, copied to host
  // memory or updated by the host.
  void follow_another_step() {
    if (config_.layout.zero.updates() != ZeroConfig::Updates::everyone || config_.layout.zero.offload.any()) update({});
  }
  // How many steps begin before the first of them is completely enqueued.
  int steps_under_way() const { return config_.layout.pipeline.asynchronous() ? config_.layout.pipeline.stages : 1; }
  StepResult step(const BatchSource& batches, const OptimizerOptions& optimizer, UpdateRule rule) {
    const PendingStep pending = begin_step(batches, optimizer, rule);
    flush();
    return pending.wait();
  }

  // Gradients of the mean loss of the whole step, summed over the ranks, left in state().
  void accumulate_gradients(const BatchSource& batches, Launch launch = Launch::replay) {
    state_.gradients.begin(context_.compute, scalars_.square_sums());
    if (!experts_.empty()) zero(experts_.record(), context_.compute);
    logits_.begin();
    run(actions_, {.purpose = Purpose::train, .shape = config_.batch, .launch = launch}, batches);
    state_.gradients.finish(context_.compute);
    if (!experts_.empty()) groups_[GroupName::scalars].all_reduce(experts_.record(), context_.compute);
    logits_.combine();
  }

  // The biases of all layers with experts, E each; empty without --moe-bias-rate.
  std::vector<float> expert_biases() const {
    const Tensor& biases = experts_.biases();
    if (biases.empty()) return {};
    const HostView view(biases, context_.compute);
    return {view.data<float>(), view.data<float>() + biases.numel()};
  }
  void set_expert_biases(const std::vector<float>& values) {
    const int64_t expected = experts_.biases().empty() ? 0 : experts_.biases().numel();
    CHECK(std::ssize(values) == expected, "{} biases of experts, expected {}", values.size(), expected);
    if (!values.empty()) upload(experts_.biases(), values, context_.compute);
  }

  // Runs the forwards and backwards of a step once, without an update, while the first rank of each stage times the
  // algorithms for every product that has no choice yet. All ranks then use those chosen, which are returned.
  std::string tune(const BatchSource& batches) {
    Stream& stream = context_.compute;
    tune_matmuls(groups_.first_of_stage(), stream);
    accumulate_gradients(batches, Launch::enqueue);
    stream.synchronize();
    tune_matmuls(false, stream);
    std::vector<std::string> of_stages;
    const std::vector<std::string> of_ranks =
        groups_[GroupName::control].all_gather_text("matmul algorithms", matmul_choices(stream, Choices::used));
    for (size_t rank = 0; rank < of_ranks.size(); rank += static_cast<size_t>(groups_.ranks_of_stage()))
      of_stages.push_back(of_ranks[rank]);
    const std::string choices = merged_matmul_choices(of_stages);
    set_matmul_choices(choices, stream);
    return choices;
  }

  // ---- Evaluation --------------------------------------------------------------------------------------------------

  // Mean loss over `targets` tokens, forward only. micro_batches: of each rank, the same on all. Rows whose target is
  // -1 do not count. T: tokens in a sequence; none: the step's, the most. Context-parallel ranks pad sequences.
  double evaluate(int64_t micro_batches, int64_t targets, const BatchSource& batches, const RowLosses& row_losses = {},
                  std::optional<int64_t> T = std::nullopt) {
    require_flushed();                          // first, so that its error does not end the whole job
    Drain drain(groups_, {&context_.compute});  // row_losses may refer to objects that live only as long as this call
    const BatchShape asked{config_.batch.B, T.value_or(config_.batch.T)};
    const BatchShape shape{asked.B, config_.layout.context.padded(asked.T)};
    const Pass pass{
        .purpose = Purpose::evaluate, .shape = shape, .row_losses = without_padding(row_losses, asked, shape.T)};
    const std::vector<Action> actions = forwards(micro_batches);
    try {
      run(actions, pass, padded(batches, asked, shape.T));
    } catch (const Interrupted&) {
      drain.all_leave();
      throw;
    }
    scalars_.combine();
    context_.compute.synchronize();
    check_headers();
    const bool on_paper = context_.compute.device().kind == DeviceKind::null;
    return on_paper ? 0 : *HostView(scalars_.losses(), context_.compute).data<double>() / static_cast<double>(targets);
  }

  // Calls f() with the moving averages in the place of the weights.
  template <class F>
  auto with_averages(F&& f) {
    require_flushed();
    state_.exchange_averages(context_.compute);
    try {
      auto result = f();
      state_.exchange_averages(context_.compute);
      return result;
    } catch (const Interrupted&) {  // the run may go on to save its weights
      state_.exchange_averages(context_.compute);
      throw;
    }
  }

  // ---- Generation --------------------------------------------------------------------------------------------------

  // The logits (V) after the last of these tokens, padded to a power of two, which causal attention does not see.
  std::vector<float> next_token_logits(std::span<const int32_t> tokens) {
    const int64_t n = static_cast<int64_t>(tokens.size());
    CHECK(n >= 1 && n <= config_.batch.T);
    std::vector<int32_t> padded(tokens.begin(), tokens.end());
    padded.resize(std::min(std::bit_ceil(tokens.size()), static_cast<size_t>(config_.batch.T)), 0);
    forward_text(padded, nullptr, n - 1);
    return logits();
  }
  // Appends these tokens to the text in the cache; see sample.h.
  void continue_text(std::span<const int32_t> tokens, KeyValueCache& cache) {
    const int64_t n = static_cast<int64_t>(tokens.size());
    forward_text(tokens, &cache, n - 1);
    cache.rows += n;
  }
  // The logits of the text that was computed last.
  std::vector<float> logits() {
    context_.compute.synchronize();
    check_headers();
    return stage_.head_pass().logits();
  }

 private:
  std::vector<Action> forwards(int64_t micro_batches) const {
    Pipeline pipeline = config_.pipeline();
    pipeline.micro_batches = micro_batches;
    pipeline.slices = 1;
    return KeptLists::of_stage(forward_actions, pipeline, groups_.me.stage);
  }

  void check_headers() {
    for (const ReceivedHeaders& headers : interpreter_.take_headers()) headers.check();
  }

  // Computes one sequence, which follows the rows in the cache if there is one, up to the logits of one of its rows.
  void forward_text(std::span<const int32_t> tokens, KeyValueCache* cache, int64_t logits_row) {
    const int64_t T = static_cast<int64_t>(tokens.size()), first_position = cache == nullptr ? 0 : cache->rows;
    run(forwards(1), {.purpose = Purpose::generate, .shape = {1, T}, .cache = cache, .logits_row = logits_row},
        [&](int64_t) {
          HostBatch batch;
          batch.tokens.assign(tokens.begin(), tokens.end());
          batch.targets.assign(tokens.size(), 0);
          for (int64_t t = 0; t < T; ++t) batch.positions.push_back(static_cast<int32_t>(first_position + t));
          return batch;
        });
  }

  void require_flushed() const {
    CHECK(!pipedream_ || pipedream_->flushed(), "the steps of an asynchronous pipeline are under way: flush first");
  }
  void run(const std::vector<Action>& actions, const Pass& pass, const BatchSource& batches) {
    require_flushed();
    zero(scalars_.mine(), context_.compute);
    interpreter_.run(actions, pass, batches);
  }

  void update(const OptimizerOptions& optimizer) {
    const StreamRange traced = span(SpanKind::layer, "update");
    state_.update(scalars_.control(), optimizer, context_.compute,
                  [this, optimizer](size_t u) { logits_.clip(state_, u, scalars_.control(), optimizer); });
    experts_.update_biases(scalars_.control(), context_.compute);
  }

  StreamRange span(SpanKind kind, const char* name) const {
    return StreamRange(context_.compute, [&] { return TraceSpan{.kind = kind, .name = name}; });
  }

  StepConfig config_;
  Context context_;
  std::unique_ptr<Groups> alone_;
  Groups& groups_;
  std::vector<Action> actions_;
  ModelState state_;
  StepScalars scalars_;
  ExpertRecord experts_;
  LogitRecord logits_;
  Stage stage_;
  Interpreter interpreter_;
  Tensor squares_;                      // (2) fp64 with StepConfig::noise_scale (gradient_reducer.h)
  std::optional<Pipedream> pipedream_;  // for an asynchronous pipeline
  Drain drain_;                         // last: the streams are idle before anything else is destroyed
};

}  // namespace llmc
