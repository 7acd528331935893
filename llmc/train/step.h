// step.h: the interpreter of actions: the only place that runs forward and backward. A training step is a list of
// forwards and backwards, then the gradient norm, then the update; evaluation and generation are forward-only lists.
//
// The head (final norm, logits, loss and their gradients) runs at the start of the backward of the chunk that has it:
// logits then live for one micro-batch only, whatever the schedule, and gradients of a tied table arrive by
// micro-batch.
#pragma once
#include <algorithm>
#include <map>
#include <memory>
#include <optional>
#include <span>
#include <string>
#include <tuple>
#include <utility>
#include <vector>

#include "device/profiler_range.h"
#include "dist/zero.h"
#include "train/in_flight.h"
#include "train/step_config.h"

namespace llmc {

class Trainer {
 public:
  Trainer(const StepConfig& config, Context context)
      : config_(config),
        context_(context),
        alone_(context.dp ? nullptr
                          : std::make_unique<DataParallel>(Mesh(), 0, context.compute.device(),
                                                           DataParallel::on_paper(Mesh(), 0))),
        dp_(context.dp ? *context.dp : *alone_),
        state_(parameter_table(config.model), config.dtype, config.zero, dp_, context.arena),
        chunks_(make_chunks(config.model.n_layer, config.chunks)),
        actions_(training_actions(config.schedule, config.chunks, config.micro_batches)),
        scalars_(scalar("scalars of all ranks", {dp_.ranks(), 1 + static_cast<int64_t>(state_.size())})),
        loss_(scalar("loss", {1})),
        square_sums_(scalar("square sums", {static_cast<int64_t>(state_.size()) * config.zero.shards})),
        control_(scalar("update control", {4})),
        uploads_(config.batch, context) {
    CHECK(dp_.ranks() == config.zero.ranks() && (config.zero.stage >= 0 && config.zero.stage <= 3));
    zero(control_, context_.compute);
    if (config.model.family.positions == Positions::rotary) {
      rotary_table_ = context_.arena.alloc("rotary table", "rotary table", accumulator_of(config.dtype),
                                           {config.batch.T, config.model.head_size});
      rotary_table(rotary_table_, config.model.rotary, context_.compute);
    }
  }

  const ModelState& state() const { return state_; }
  ModelState& state() { return state_; }
  const StepConfig& config() const { return config_; }
  Stream& stream() const { return context_.compute; }
  Arena& arena() const { return context_.arena; }

  // Where the interpreter is.
  struct Place {
    std::string what;  // "forward of blocks.3"
    int64_t micro_batch = -1;
  };
  const Place& place() const { return place_; }

  // One update. `optimizer.step` counts from 1. rule.largest_loss: of the mean.
  PendingStep begin_step(const BatchSource& batches, const AdamWOptions& optimizer, UpdateRule rule) {
    const ProfilerRange range("step");
    accumulate_gradients(batches);
    Stream& stream = context_.compute;
    for (size_t u = 0; u < state_.size(); ++u)
      square_sum(my_scalars().slice(1 + static_cast<int64_t>(u), {1}), state_.unit(u).reduced_shard(), stream);
    combine();
    rule.largest_loss *= static_cast<double>(config_.tokens());
    clip_control(control_, square_sums_, loss_, rule, stream);
    state_.update(control_, optimizer, stream);
    return {loss_, control_, config_.tokens(), stream};
  }
  StepResult step(const BatchSource& batches, const AdamWOptions& optimizer, UpdateRule rule) {
    return begin_step(batches, optimizer, rule).wait();
  }

  // A step's forwards and backwards as a rehearsal, in which rank 0 times the algorithms for every product and the
  // others learn what it has chosen, which is returned. Weights and optimizer stay.
  std::string tune(const BatchSource& batches) {
    Stream& stream = context_.compute;
    rehearsal_ = true;
    tune_matmuls(dp_.first(), stream);
    accumulate_gradients(batches);
    stream.synchronize();
    tune_matmuls(false, stream);
    rehearsal_ = false;
    const std::string choices = dp_.control->all_gather_text("matmul algorithms", matmul_choices(stream))[0];
    set_matmul_choices(choices, stream);
    return choices;
  }

  // Gradients of the mean loss of the whole step, summed over the ranks, left in state().
  void accumulate_gradients(const BatchSource& batches) {
    state_.zero_gradients(context_.compute);
    interpret(actions_, Purpose::train, config_.batch, batches);
    state_.finish_gradients(context_.compute);
  }

  // Mean loss over `targets` tokens, forward only; `micro_batches`: of each rank, all ranks do as many. Rows whose
  // target is -1 do not count. `T`: tokens in a sequence, a power of two below the step's; none: as many as in a step.
  double evaluate(int64_t micro_batches, int64_t targets, const BatchSource& batches, const RowLosses& row_losses = {},
                  std::optional<int64_t> T = std::nullopt) {
    row_losses_ = row_losses;
    struct Told {  // of no row once this has returned, or thrown
      Trainer& trainer;
      ~Told() {
        try {
          trainer.context_.compute.synchronize();
        } catch (...) {  // who waits for the result is told, or it is on its way already
        }
        trainer.row_losses_ = {};
        trainer.host_losses_.clear();
      }
    } told{*this};
    interpret(forward_only(config_.chunks, micro_batches), Purpose::evaluate,
              {config_.batch.B, T.value_or(config_.batch.T)}, batches);
    combine();
    context_.compute.synchronize();
    const bool on_paper = context_.compute.device().kind == DeviceKind::null;
    return on_paper ? 0 : *HostView(loss_, context_.compute).data<double>() / static_cast<double>(targets);
  }

  // The logits (V) behind the last of these tokens. The rows are padded to a power of two: causal attention does not
  // see what comes after.
  std::vector<float> next_token_logits(std::span<const int32_t> tokens) {
    const int64_t n = static_cast<int64_t>(tokens.size());
    CHECK(n >= 1 && n <= config_.batch.T);
    int64_t T = 1;
    while (T < n) T *= 2;
    std::vector<int32_t> padded(tokens.begin(), tokens.end());
    padded.resize(static_cast<size_t>(std::min(T, config_.batch.T)), 0);
    forward_text(padded, 0, n - 1);
    return logits();
  }
  // Lets these tokens follow those that the cache holds: continuation.h.
  void continue_text(std::span<const int32_t> tokens, KeyValueCache& cache) {
    cache_ = &cache;
    struct Done {
      KeyValueCache*& cache;
      ~Done() { cache = nullptr; }
    } done{cache_};
    const int64_t n = static_cast<int64_t>(tokens.size());
    forward_text(tokens, cache.rows, n - 1);
    cache.rows += n;
  }
  // Of the text that was computed last.
  std::vector<float> logits() {
    context_.compute.synchronize();
    return host_logits_;
  }

 private:
  // One sequence, whose first token is at this position, up to the logits of a row.
  void forward_text(std::span<const int32_t> tokens, int64_t first_position, int64_t logits_row) {
    logits_row_ = logits_row;
    const int64_t T = static_cast<int64_t>(tokens.size());
    interpret(forward_only(config_.chunks, 1), Purpose::generate, {1, T}, [&](int64_t) {
      HostBatch batch;
      batch.tokens.assign(tokens.begin(), tokens.end());
      batch.targets.assign(tokens.size(), 0);
      for (int64_t t = 0; t < T; ++t) batch.positions.push_back(static_cast<int32_t>(first_position + t));
      return batch;
    });
  }

  // From here on the interpreter is at `what`.
  ProfilerRange at(std::string what) {
    place_.what = std::move(what);
    return ProfilerRange(place_.what.c_str());
  }

  Tensor scalar(const char* name, const Shape& shape) const {
    return context_.arena.alloc("step scalars", name, DType::fp64, shape);
  }

  // This rank's row of the scalars: its loss, then the square sum of its shard of each unit.
  Tensor my_scalars() const { return scalars_.slice(dp_.rank * scalars_.shape[1], {scalars_.shape[1]}); }

  void combine() {
    dp_.scalars->all_gather(scalars_, context_.compute);
    combine_scalars(loss_, square_sums_, scalars_, config_.zero.shards, context_.compute);
  }

  void interpret(const std::vector<Action>& actions, Purpose purpose, const BatchShape& shape,
                 const BatchSource& batches) {
    auto scope = context_.arena.scope();
    zero(my_scalars(), context_.compute);
    const int64_t in_flight = purpose == Purpose::train ? micro_batches_in_flight(actions) : 1;
    const BlockActivations shared = BlockActivations::recomputed(config_.model, shape, config_.dtype,
                                                                 config_.recompute_for(purpose), context_.arena);
    std::vector<Slot> slots;
    for (int64_t i = 0; i < in_flight; ++i)
      slots.emplace_back(config_, chunks_, shape, purpose, shared, context_.arena);
    state_.start_pass(unit_uses(actions, purpose), context_.compute);
    for (const Action& action : actions) {
      Slot& slot = slots[static_cast<size_t>(action.micro_batch % in_flight)];
      const Chunk& chunk = chunks_[static_cast<size_t>(action.chunk)];
      place_.micro_batch = action.micro_batch;
      if (action.kind == ActionKind::forward && chunk.has_embedding)
        uploads_.bring(slot.inputs, batches(action.micro_batch), context_);
      const bool last = action.micro_batch + 1 == config_.micro_batches;
      auto enqueue = [&] {
        if (action.kind == ActionKind::forward) forward(action.chunk, slot, shape, purpose, action.micro_batch);
        else backward(action.chunk, slot, shape, last);
      };
      if (purpose != Purpose::train || rehearsal_ || meets_other_streams(action, last)) enqueue();
      else context_.compute.replayed(replays_[{action.kind, action.chunk, slot.inputs.tokens.bytes}], enqueue);
    }
  }

  // Does the action wait for other streams, or they for it? Else it does the same every time.
  bool meets_other_streams(const Action& action, bool last_micro_batch) const {
    if (config_.zero.stage == 3 || config_.zero.grad_reduce == GradReduce::micro) return true;
    return action.kind != ActionKind::forward && last_micro_batch && dp_.ranks() > 1;
  }

  static constexpr size_t embedding_unit = 0;
  static size_t block_unit(int64_t layer) { return static_cast<size_t>(1 + layer); }
  size_t head_unit() const { return state_.size() - 1; }

  // The embedding where the head uses it, too.
  const UnitState& acquire_tied() {
    return config_.model.tied ? state_.acquire(embedding_unit, context_.compute) : state_.unit(embedding_unit);
  }
  void release_tied() {
    if (config_.model.tied) state_.release(embedding_unit, context_.compute);
  }

  // The units in the order in which the actions use them.
  std::vector<size_t> unit_uses(const std::vector<Action>& actions, Purpose purpose) const {
    std::vector<size_t> uses;
    for (const Action& action : actions) {
      const Chunk& chunk = chunks_[static_cast<size_t>(action.chunk)];
      const bool forward = action.kind == ActionKind::forward;
      const bool head = chunk.has_head && (!forward || purpose != Purpose::train);
      auto use_head = [&] {
        if (!head) return;
        uses.push_back(head_unit());
        if (config_.model.tied) uses.push_back(embedding_unit);
      };
      if (!forward) use_head();
      if (forward && chunk.has_embedding) uses.push_back(embedding_unit);
      for (size_t i = 0; i < chunk.layers.size(); ++i)
        uses.push_back(block_unit(chunk.layers[forward ? i : chunk.layers.size() - 1 - i]));
      if (forward) use_head();
    }
    return uses;
  }

  // What the blocks need besides their weights; a generated text is one document.
  Sequences sequences(const Slot& slot, const BatchShape& shape, Purpose purpose) const {
    return {shape, slot.inputs.positions, rotary_table_,
            purpose == Purpose::generate ? Documents::together : config_.documents};
  }

  void forward(int chunk_index, const Slot& slot, const BatchShape& shape, Purpose purpose, int64_t micro_batch) {
    Stream& stream = context_.compute;
    const Sequences sequence = sequences(slot, shape, purpose);
    const Chunk& chunk = chunks_[static_cast<size_t>(chunk_index)];
    const ChunkActivations& acts = slot.chunks[static_cast<size_t>(chunk_index)];
    if (chunk.has_embedding) {
      const ProfilerRange range = at("forward of the embedding");
      const UnitState& unit = state_.acquire(embedding_unit, stream);
      embedding_forward(acts.embedded, slot.inputs.tokens, slot.inputs.positions, unit.weight("wte.weight"),
                        unit.has("wpe.weight") ? unit.weight("wpe.weight") : Tensor{}, stream);
      state_.release(embedding_unit, stream);
    }
    for (size_t l = 0; l < chunk.layers.size(); ++l) {
      const size_t u = block_unit(chunk.layers[l]);
      const UnitState& unit = state_.acquire(u, stream);
      const ProfilerRange range = at("forward of " + unit.spec().name);
      const Tensor& x = slot.block_input(chunk_index, l);
      if (cache_ != nullptr)
        block_forward_cached(acts.blocks[l], x, cache_->layers[static_cast<size_t>(chunk.layers[l])], cache_->rows,
                             unit, config_.model, sequence, context_.arena, stream);
      else block_forward(acts.blocks[l], x, unit, config_.model, sequence, context_.arena, stream);
      state_.release(u, stream);
    }
    if (!chunk.has_head || purpose == Purpose::train) return;
    const Tensor& x = acts.blocks.back().out;
    const UnitState &head_state = state_.acquire(head_unit(), stream), &embedding = acquire_tied();
    if (purpose == Purpose::evaluate) {
      for_head_chunks(x, [&](const HeadActivations& head, int64_t begin, const Shape& rows) {
        head_forward(head, x.slice(begin * rows[1], rows), head_state, embedding, config_.model, stream);
        loss(head, slot.inputs.targets.slice(begin, {rows[0]}), Gradient::no);
        if (row_losses_) report_rows(head.losses, begin + rows[0] == x.shape[0], micro_batch);
      });
    } else {
      generate_logits(x, head_state, embedding);
    }
    state_.release(head_unit(), stream);
    release_tied();
  }

  void backward(int chunk_index, const Slot& slot, const BatchShape& shape, bool last_micro_batch) {
    Stream& stream = context_.compute;
    Arena& arena = context_.arena;
    const Sequences sequence = sequences(slot, shape, Purpose::train);
    const Chunk& chunk = chunks_[static_cast<size_t>(chunk_index)];
    const ChunkActivations& acts = slot.chunks[static_cast<size_t>(chunk_index)];
    if (chunk.has_head) {
      const ProfilerRange range = at("the head");
      const Tensor& x = acts.blocks.back().out;
      const UnitState &unit = state_.acquire(head_unit(), stream), &embedding = acquire_tied();
      state_.start_gradients(head_unit(), stream);
      if (config_.model.tied) state_.start_gradients(embedding_unit, stream);  // they come in two parts, here and last
      for_head_chunks(x, [&](const HeadActivations& head, int64_t begin, const Shape& rows) {
        const Tensor part = x.slice(begin * rows[1], rows);
        head_forward(head, part, unit, embedding, config_.model, stream);
        loss(head, slot.inputs.targets.slice(begin, {rows[0]}), Gradient::yes);
        head_backward(slot.gradient.slice(begin * rows[1], rows), head, part, unit, embedding, config_.model, arena,
                      stream);
      });
      state_.reduce_gradients(head_unit(), last_micro_batch, stream);
      state_.release(head_unit(), stream);
      release_tied();
    }
    for (size_t l = chunk.layers.size(); l-- > 0;) {
      const Tensor& x = slot.block_input(chunk_index, l);
      const size_t u = block_unit(chunk.layers[l]);
      const UnitState& unit = state_.acquire(u, stream);
      const ProfilerRange range = at("backward of " + unit.spec().name);
      state_.start_gradients(u, stream);
      block_recompute(acts.blocks[l], x, config_.recompute, unit, config_.model, sequence, arena, stream);
      block_backward(slot.gradient, acts.blocks[l], x, unit, config_.model, sequence, arena, stream);
      state_.reduce_gradients(u, last_micro_batch, stream);
      state_.release(u, stream);
    }
    if (chunk.has_embedding) {
      const ProfilerRange range = at("backward of the embedding");
      if (!config_.model.tied) state_.start_gradients(embedding_unit, stream);
      const UnitState& unit = state_.unit(embedding_unit);
      const Tensor dwpe = unit.has("wpe.weight") ? unit.gradient("wpe.weight") : Tensor{};
      embedding_backward(unit.gradient("wte.weight"), dwpe, slot.gradient, slot.inputs.tokens, slot.inputs.positions,
                         stream);
      state_.reduce_gradients(embedding_unit, last_micro_batch, stream);
    }
  }

  // f(head, first row, shape of its rows of x) for the chunks of x (N, C), with activations of the head for each.
  template <class F>
  void for_head_chunks(const Tensor& x, F&& f) {
    const int64_t N = x.shape[0], most = config_.head_rows(N);
    for (int64_t begin = 0; begin < N; begin += most) {
      const int64_t rows = std::min(most, N - begin);
      auto scope = context_.arena.scope();
      f(HeadActivations(config_.model, rows, config_.dtype, context_.arena), begin, Shape{rows, x.shape[1]});
    }
  }

  // The losses of a micro-batch come chunk by chunk.
  void report_rows(const Tensor& losses, bool last_chunk, int64_t micro_batch) {
    download(losses, context_.compute, [this, last_chunk, micro_batch](const std::vector<float>& host) {
      host_losses_.insert(host_losses_.end(), host.begin(), host.end());
      if (!last_chunk) return;
      row_losses_(micro_batch, host_losses_);
      host_losses_.clear();
    });
  }

  // Adds the losses to the step's sum; with Gradient::yes the logits become the gradient of the step's mean loss.
  void loss(const HeadActivations& head, const Tensor& targets, Gradient gradient) {
    cross_entropy(head.losses, head.logits, targets, config_.model.vocab_size,
                  1.0 / static_cast<double>(config_.tokens()), gradient, context_.compute);
    add_losses(my_scalars().slice(0, {1}), head.losses, context_.compute);
  }

  // The head on one row only.
  void generate_logits(const Tensor& x, const UnitState& head_state, const UnitState& embedding) {
    auto scope = context_.arena.scope();
    const int64_t C = config_.model.n_embd;
    const HeadActivations head(config_.model, 1, config_.dtype, context_.arena);
    head_forward(head, x.slice(logits_row_ * C, {1, C}), head_state, embedding, config_.model, context_.compute);
    download(head.logits.slice(0, {config_.model.vocab_size}), context_.compute,
             [this](std::vector<float> host) { host_logits_ = std::move(host); });
  }

  StepConfig config_;
  Context context_;
  std::unique_ptr<DataParallel> alone_;
  DataParallel& dp_;
  ModelState state_;
  std::vector<Chunk> chunks_;
  std::vector<Action> actions_;
  Tensor scalars_, loss_, square_sums_, control_;
  Uploads uploads_;
  Tensor rotary_table_;
  bool rehearsal_ = false;
  // Actions by kind, chunk, and where their slot is.
  std::map<std::tuple<ActionKind, int, const std::byte*>, Replay> replays_;
  RowLosses row_losses_;
  std::vector<float> host_losses_;  // of the chunks so far
  KeyValueCache* cache_ = nullptr;  // while a text goes on
  Place place_;
  int64_t logits_row_ = 0;
  std::vector<float> host_logits_;
};

}  // namespace llmc
