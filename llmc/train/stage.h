// stage.h: the computation of a rank's chunks: forward and backward of the embedding, the blocks and the head of one
// chunk, for the micro-batch in one slot. It knows no schedule: the interpreter decides which chunk and which slot come
// next (interpreter.h). The computation of a block is in model/transformer.h.
//
// The head (final norm, logits, loss and their gradients) runs at the start of the backward of the chunk that has it:
// logits then exist for one micro-batch at a time, whatever the schedule, and the gradients of a tied table arrive in
// the order of the micro-batches (contract 4).
#pragma once
#include <algorithm>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "device/profiler_range.h"
#include "shard/zero.h"
#include "train/expert_record.h"
#include "train/in_flight.h"
#include "train/step_config.h"

namespace llmc {

class Stage {
 public:
  // loss_sum (1) fp64: the losses of every micro-batch are added to it. experts: the records of experts
  Stage(const StepConfig& config, const Context& context, ModelState& state, const Tensor& loss_sum,
        const ExpertRecord& experts)
      : config_(config),
        context_(context),
        state_(state),
        model_(config.part()),
        placement_(config.expert_placement()),
        parallel_{state.groups(), context.arena, context.compute},
        loss_sum_(loss_sum),
        experts_(experts),
        chunks_(config.model_chunks()),
        layer_units_(layer_units(config.model)) {
    if (config.model.family.positions == Positions::rotary) {
      rotary_table_ = context_.arena.alloc("rotary table", "rotary table", config.precision.state,
                                           {config.batch.T, config.model.head_size});
      rotary_table(rotary_table_, config.model.rotary, context_.compute);
    }
  }
  Stage(const Stage&) = delete;
  Stage& operator=(const Stage&) = delete;

  const std::vector<Chunk>& chunks() const { return chunks_; }  // of the whole model
  bool is_here(int chunk) const { return config_.pipeline().stage_of(chunk) == state_.groups().me.stage; }
  const Chunk& chunk(int index) const { return chunks_[static_cast<size_t>(index)]; }
  // The work that is being enqueued, in words: "forward of blocks.3".
  const std::string& current() const { return current_; }
  // The logits (V) of the last forward for Purpose::generate; read with the stream idle.
  const std::vector<float>& logits() const { return logits_; }
  // Room for the logits of all tensor-parallel ranks, padding included.
  Tensor logits_room() const {
    const int64_t V = model_.padded_vocab() * config_.layout.tensor.ranks;
    return context_.arena.alloc("head", "logits of all ranks", config_.precision.activations, {V});
  }
  // Copies complete logits, which all ranks have, to the host.
  void deliver_logits(const Tensor& all) {
    const int64_t V = config_.model.vocab_size, part = model_.vocab_size, stored = model_.padded_vocab();
    download(all, context_.compute, [this, V, part, stored](const std::vector<float>& host) {
      logits_.clear();  // without the padding of each part
      for (size_t begin = 0; static_cast<int64_t>(logits_.size()) < V; begin += static_cast<size_t>(stored)) {
        const int64_t count = std::min(part, V - static_cast<int64_t>(logits_.size()));
        logits_.insert(logits_.end(), host.begin() + static_cast<int64_t>(begin),
                       host.begin() + static_cast<int64_t>(begin) + count);
      }
    });
  }

  // The units whose weights an action acquires, in this order.
  std::vector<size_t> units_acquired(const Action& action, Purpose purpose) const {
    const Chunk& c = chunk(action.chunk);
    const bool is_forward = action.kind == ActionKind::forward;
    std::vector<size_t> units;
    auto head = [&] {
      if (!c.has_head || (is_forward && purpose == Purpose::train)) return;
      units.push_back(head_unit());
      if (config_.model.tied) units.push_back(embedding_unit);
    };
    if (!is_forward) head();
    if (is_forward && c.has_embedding) units.push_back(embedding_unit);
    for (size_t l = 0; l < c.layers.size(); ++l) {
      const LayerUnits& layer = units_of(c.layers[is_forward ? l : c.layers.size() - 1 - l]);
      units.push_back(layer.block);
      if (layer.experts) units.push_back(*layer.experts);
    }
    if (is_forward) head();
    return units;
  }

  // logits: from logits_room(), for Purpose::generate
  void forward(int index, const Slot& slot, const Pass& pass, int64_t micro_batch, const Tensor& logits) {
    const Chunk& c = chunk(index);
    if (c.has_embedding) forward_embedding(slot.input, slot);
    for (size_t l = 0; l < c.layers.size(); ++l)
      forward_block(c.layers[l], slot.blocks[l], slot.block_input(l), slot, pass);
    if (!c.has_head || pass.purpose == Purpose::train) return;
    const Tensor& x = slot.output();
    const Head head = acquire_head();
    if (pass.purpose == Purpose::evaluate) evaluate_head(x, head, slot, pass, micro_batch);
    else compute_logits(logits, x, head, pass);
    release_head();
  }

  // Gradients of the chunk's weights += those of the micro-batch. `last_micro_batch`: they are then complete, and are
  // reduced unit by unit. With slot.output_gradients this is the input part; backward_weight() completes the blocks.
  void backward(int index, const Slot& slot, const Pass& pass, bool last_micro_batch) {
    const Chunk& c = chunk(index);
    if (c.has_head) backward_head(slot.output(), slot, last_micro_batch);
    for (size_t l = c.layers.size(); l-- > 0;) backward_block(c.layers[l], l, slot, pass, last_micro_batch);
    if (c.has_embedding) backward_embedding(slot, last_micro_batch);
  }
  // The weight part. It needs no weights, and only the tensors of the micro-batch that the input part has left for it.
  void backward_weight(int index, const Slot& slot, bool last_micro_batch) {
    const Chunk& c = chunk(index);
    for (size_t l = c.layers.size(); l-- > 0;) {
      const LayerUnits& units = units_of(c.layers[l]);
      const UnitState& unit = state_.unit(units.block);
      const ProfilerRange range = set_current("weight part of the backward of " + unit.spec().name);
      const Sequences sequence = sequences(slot, {Purpose::train, slot.shape}, c.layers[l],
                                           [&]() -> const UnitState& { return state_.unit(*units.experts); });
      for_units(units, [&](size_t u) { state_.gradients.resume(u); });
      Block({model_, unit, slot.blocks[l], sequence, parallel_, &slot.output_gradients[l]}).backward_weight();
      for_units(units, [&](size_t u) { state_.gradients.reduce(u, last_micro_batch, context_.compute); });
    }
  }

 private:
  static constexpr size_t embedding_unit = 0;
  const LayerUnits& units_of(int64_t layer) const { return layer_units_[static_cast<size_t>(layer)]; }
  // Calls f(unit) for the units of a layer.
  template <class F>
  static void for_units(const LayerUnits& units, F&& f) {
    f(units.block);
    if (units.experts) f(*units.experts);
  }
  size_t head_unit() const { return state_.size() - 1; }

  // Whether the two parts of a tied table's gradient, from the head and from the embedding, are reduced separately: if
  // they are on two stages, or if other micro-batches come between them and the buffer is for one micro-batch.
  bool reduces_tied_parts() const {
    if (!config_.model.tied || config_.layout.pipeline.stages == 1) return false;
    return !is_here(0) || !is_here(config_.layout.pipeline.chunks() - 1) ||
           config_.layout.zero.grad_reduce == GradReduce::micro;
  }
  // The head, with the unit of the embedding if it shares its table.
  Head acquire_head() {
    const UnitState& head = state_.weights.acquire(head_unit(), context_.compute);
    return {model_, head, config_.model.tied ? state_.weights.acquire(embedding_unit, context_.compute) : head,
            parallel_};
  }
  void release_head() {
    state_.weights.release(head_unit(), context_.compute);
    if (config_.model.tied) state_.weights.release(embedding_unit, context_.compute);
  }

  // Names the work that is enqueued from here on.
  ProfilerRange set_current(std::string what) {
    current_ = std::move(what);
    return ProfilerRange(current_.c_str());
  }

  // What a block needs besides its weights; a generated text is one document. experts(): acquires their unit.
  template <class AcquireExperts>
  Sequences sequences(const Slot& slot, const Pass& pass, int64_t layer, AcquireExperts&& experts) const {
    const ContextParallel context = config_.context_for(pass.purpose);
    Sequences s{slot.shape,    slot.inputs.positions.slice(0, {slot.shape.rows()}),
                rotary_table_, pass.purpose == Purpose::generate ? Documents::together : config_.documents,
                context,       slot.inputs.all_positions,
                slot.slice};
    if (pass.cache != nullptr) s.cache = {pass.cache->layers[static_cast<size_t>(layer)], pass.cache->rows};
    if (!units_of(layer).experts) return s;
    s.routing = {stream_rows_of(slot.shape, config_.layout.tensor, context, state_.groups().me.tensor),
                 placement_,
                 experts_.bias_of(layer),
                 {},
                 experts};
    if (pass.purpose == Purpose::train) s.routing.training = experts_.training_of(layer, slot.shape);
    return s;
  }

  // A layer's units while it computes. The experts, the larger unit, are acquired only when they are needed, and so are
  // gathered while the layer computes what comes before them.
  class HeldLayer {
   public:
    HeldLayer(const LayerUnits& units, ModelState& state, Stream& stream)
        : units_(units), state_(state), stream_(stream), block_(state.weights.acquire(units.block, stream)) {}
    HeldLayer(const HeldLayer&) = delete;
    HeldLayer& operator=(const HeldLayer&) = delete;
    const UnitState& block() const { return block_; }
    const UnitState& experts() {
      if (experts_ == nullptr) experts_ = &state_.weights.acquire(*units_.experts, stream_);
      return *experts_;
    }
    void release() {
      if (experts_ != nullptr) state_.weights.release(*units_.experts, stream_);
      state_.weights.release(units_.block, stream_);
    }

   private:
    const LayerUnits& units_;
    ModelState& state_;
    Stream& stream_;
    const UnitState& block_;
    const UnitState* experts_ = nullptr;
  };

  // ---- Forward -----------------------------------------------------------------------------------------------------

  // out (S, C)
  void forward_embedding(const Tensor& out, const Slot& slot) {
    Stream& stream = context_.compute;
    const ProfilerRange range = set_current("forward of the embedding");
    const UnitState& unit = state_.weights.acquire(embedding_unit, stream);
    parallel::Embedding{unit, parallel_}.forward(out, slot.inputs.tokens, slot.inputs.positions);
    state_.weights.release(embedding_unit, stream);
  }

  void forward_block(int64_t layer, const BlockActivations& acts, const Tensor& x, const Slot& slot, const Pass& pass) {
    HeldLayer held(units_of(layer), state_, context_.compute);
    const UnitState& unit = held.block();
    const ProfilerRange range = set_current("forward of " + unit.spec().name);
    const Sequences sequence = sequences(slot, pass, layer, [&]() -> const UnitState& { return held.experts(); });
    Block({model_, unit, acts, sequence, parallel_}).forward(x);
    held.release();
  }

  // Adds the losses of x (S, C) to the sum, and passes the loss of every row to pass.row_losses if it is set.
  void evaluate_head(const Tensor& x, const Head& head, const Slot& slot, const Pass& pass, int64_t micro_batch) {
    const int64_t R = config_.share(pass.shape, pass.purpose).rows();
    const auto losses =
        std::make_shared<std::vector<float>>(pass.row_losses ? static_cast<size_t>(pass.shape.rows()) : 0);
    const auto row_of_all = [context = config_.layout.context, T = pass.shape.T, rank = state_.groups().me.context](
                                int64_t row) { return static_cast<size_t>(context.row_of_all(row, T, rank)); };
    for_head_chunks(x, slot, [&](const HeadActivations& acts, Tensor part, Tensor targets, const auto& rows) {
      head.forward(acts, part);
      add_loss(head, acts, targets, Gradient::no);
      if (!pass.row_losses) return;
      const bool last = rows[0].end() == x.shape[0];
      download(acts.losses, context_.compute,
               [losses, rows, R, last, micro_batch, row_of_all,
                report = pass.row_losses](const std::vector<float>& of_part) {
                 auto from = of_part.begin();
                 for (const Range& range : rows)
                   for (int64_t row = range.begin; row < range.end(); ++row, ++from)
                     if (row < R) (*losses)[row_of_all(row)] = *from;
                 if (last) report(micro_batch, *losses);
               });
    });
  }

  // logits = the head on one row of x (S, C) only.
  void compute_logits(const Tensor& logits, const Tensor& x, const Head& head, const Pass& pass) {
    auto scope = context_.arena.scope();
    const int64_t S = x.shape[0], C = x.shape[1];
    const HeadActivations acts(model_, 1, config_.layout.tensor, config_.precision.activations, context_.arena);
    // With sequence parallelism one rank has the row; the other ranks compute rows that are not used.
    head.forward(acts, x.slice(pass.logits_row % S * C, {1, C}));
    const Tensor mine = acts.logits.slice(pass.logits_row / S * acts.logits.shape[1], {acts.logits.shape[1]});
    copy(logits, parallel::gather_vocabulary(mine, parallel_), context_.compute);
  }

  // ---- Backward ----------------------------------------------------------------------------------------------------

  // Final norm, logits and loss of x (S, C), forward and backward; slot.gradient = the gradient of x.
  void backward_head(const Tensor& x, const Slot& slot, bool last_micro_batch) {
    const ProfilerRange range = set_current("backward of the head");
    const Head head = acquire_head();
    start_gradients(head_unit(), slot);
    // A tied table gets its gradients in two parts, here and in backward_embedding(), which reduces them.
    if (config_.model.tied) start_gradients(embedding_unit, slot);
    for_head_chunks(x, slot, [&](const HeadActivations& acts, Tensor part, Tensor targets, const auto& rows) {
      head.forward(acts, part);
      add_loss(head, acts, targets, Gradient::yes);
      head.backward(slot.gradient.slice(rows[0].begin * x.shape[1], part.shape), acts, part);
    });
    reduce_gradients(head_unit(), slot, last_micro_batch);
    if (reduces_tied_parts()) reduce_gradients(embedding_unit, slot, last_micro_batch);
    release_head();
  }

  // Block `l` of the chunk. slot.gradient: on entry the gradient of its output, on return that of its input.
  void backward_block(int64_t layer, size_t l, const Slot& slot, const Pass& pass, bool last_micro_batch) {
    const BlockActivations& acts = slot.blocks[l];
    const Tensor& x = slot.block_input(l);  // (S, C)
    const bool whole = slot.output_gradients.empty();
    const LayerUnits& units = units_of(layer);
    HeldLayer held(units, state_, context_.compute);
    const UnitState& unit = held.block();
    const ProfilerRange range =
        set_current((whole ? "backward of " : "input part of the backward of ") + unit.spec().name);
    Sequences sequence = sequences(slot, pass, layer, [&]() -> const UnitState& { return held.experts(); });
    if (sequence.routing.training) sequence.routing.training->records = false;
    for_units(units, [&](size_t u) { start_gradients(u, slot); });
    auto scope = context_.arena.scope();
    GatheredRows gathered;
    if (whole && config_.recompute == Recompute::block)
      gathered = {parallel::room_for_rows("gathered norm1", acts.norm1, parallel_),
                  parallel::room_for_rows("gathered norm2", acts.norm2, parallel_)};
    const Block block({model_, unit, acts, sequence, parallel_, whole ? nullptr : &slot.output_gradients[l], gathered});
    block.recompute(x, config_.recompute);
    block.backward(slot.gradient, x);
    if (whole) for_units(units, [&](size_t u) { reduce_gradients(u, slot, last_micro_batch); });
    held.release();
  }

  void backward_embedding(const Slot& slot, bool last_micro_batch) {
    const ProfilerRange range = set_current("backward of the embedding");
    if (!config_.model.tied || reduces_tied_parts()) start_gradients(embedding_unit, slot);
    const UnitState& unit = state_.unit(embedding_unit);
    parallel::Embedding{unit, parallel_}.backward(slot.gradient, slot.inputs.tokens, slot.inputs.positions);
    reduce_gradients(embedding_unit, slot, last_micro_batch);
  }

  // The gradients of a unit are those of a whole micro-batch: its slices add to them.
  void start_gradients(size_t u, const Slot& slot) {
    if (slot.begins_backward()) state_.gradients.start(u, context_.compute);
  }
  void reduce_gradients(size_t u, const Slot& slot, bool last_micro_batch) {
    if (slot.ends_backward()) state_.gradients.reduce(u, last_micro_batch, context_.compute);
  }

  // ---- The head's rows ---------------------------------------------------------------------------------------------

  // Calls f(head, part of x, targets, rows) for parts of the rows of x (S, C), each with activations of its own. rows:
  // the rows of the micro-batch that the logits and targets belong to; with sequence parallelism some from each rank.
  template <class F>
  void for_head_chunks(const Tensor& x, const Slot& slot, F&& f) {
    const int64_t S = x.shape[0], C = x.shape[1], most = config_.head_rows(S);
    const int slices = config_.layout.tensor.by_rows() ? config_.layout.tensor.ranks : 1;
    for (int64_t begin = 0; begin < S; begin += most) {
      const int64_t n = std::min(most, S - begin);
      auto scope = context_.arena.scope();
      std::vector<Range> rows;
      for (int p = 0; p < slices; ++p) rows.push_back({S * p + begin, n});
      f(HeadActivations(model_, n, config_.layout.tensor, config_.precision.activations, context_.arena),
        x.slice(begin * C, {n, C}), targets_of(rows, slot), rows);
    }
  }
  Tensor targets_of(const std::vector<Range>& rows, const Slot& slot) {
    const int64_t n = rows[0].size;
    if (rows.size() == 1) return slot.inputs.targets.slice(rows[0].begin, {n});
    const Tensor targets =
        context_.arena.alloc("head", "targets", DType::int32, {n * static_cast<int64_t>(rows.size())});
    for (size_t p = 0; p < rows.size(); ++p)
      copy(targets.slice(n * static_cast<int64_t>(p), {n}), slot.inputs.targets.slice(rows[p].begin, {n}),
           context_.compute);
    return targets;
  }

  // Adds the losses to the sum; with Gradient::yes the logits become the gradient of the step's mean loss (contract 9:
  // divided by the tokens of all ranks).
  void add_loss(const Head& head, const HeadActivations& acts, const Tensor& targets, Gradient gradient) {
    head.loss(acts, targets, 1.0 / static_cast<double>(config_.tokens()), gradient);
    add_losses(loss_sum_, acts.losses, context_.compute);
  }

  const StepConfig& config_;
  Context context_;
  ModelState& state_;
  ModelConfig model_;  // the shape of this rank's part
  ExpertPlacement placement_;
  parallel::Group parallel_;
  Tensor loss_sum_;
  const ExpertRecord& experts_;
  std::vector<Chunk> chunks_;
  std::vector<LayerUnits> layer_units_;
  Tensor rotary_table_;  // (T, D); empty without rotary positions
  std::string current_;
  std::vector<float> logits_;
};

}  // namespace llmc
