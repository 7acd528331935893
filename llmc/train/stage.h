// stage.h: the computation of a rank's chunks: forward and backward of the embedding, the blocks and the head of one
// chunk, for the micro-batch in one slot. It knows no schedule: the interpreter decides which chunk and which slot come
// next (interpreter.h). The computation of a block is in model/transformer.h.
//
// The head (final norm, logits, loss and their gradients) runs at the start of the backward of the chunk that has it:
// logits then exist for one micro-batch at a time, whatever the schedule, and the gradients of a tied table arrive in
// the order of the micro-batches (contract 4).
#pragma once
#include "device/stream_trace.h"
#include "shard/zero.h"
#include "train/head_pass.h"
#include "train/host_activations.h"
#include "train/step_records.h"

namespace llmc {

// A layer's units while it computes. Experts, the larger unit, are acquired when needed, and gathered until then.
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
  // Acquires and releases what a layer does.
  void pass_by() {
    if (units_.experts) experts();
    release();
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

class Stage {
 public:
  // loss_sums (StepConfig::loss_sums()) fp64 += the losses of every micro-batch; experts, logits: what a step records
  Stage(const StepConfig& config, const Context& context, ModelState& state, const Tensor& loss_sums,
        const ExpertRecord& experts, const LogitRecord& logits)
      : config_(config),
        context_(context),
        state_(state),
        model_(config.part()),
        placement_(config.expert_placement()),
        parallel_{state.groups(), context.arena, context.compute},
        head_pass_(config, context, parallel_, loss_sums),
        experts_(experts),
        logits_(logits),
        host_(config, context, state.groups()),
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
  HeadPass& head_pass() { return head_pass_; }
  // The work that is being enqueued, in words: "forward of blocks.3".
  const std::string& current() const { return current_; }
  // The units whose weights an action acquires, in this order.
  std::vector<size_t> units_acquired(const Action& action, Purpose purpose) const {
    const Chunk& c = chunk(action.chunk);
    const bool is_forward = action.kind == ActionKind::forward;
    std::vector<size_t> units;
    const auto add = [&](size_t u) { units.push_back(u); };
    const auto block = [&](size_t l) { for_units(units_of(c.layers[l]), add); };
    const auto head = [&] {
      add(head_unit());
      if (config_.model.tied) add(embedding_unit);
    };
    if (is_forward) {
      if (c.has_embedding) add(embedding_unit);
      for (size_t l = 0; l < c.layers.size(); ++l) block(l);
      if (c.has_head && purpose != Purpose::train) head();
    } else {
      if (c.has_head) head();
      for_blocks_back(c, block, block);
    }
    return units;
  }

  // On paper: from here on only memory counts. Equal layers need equal memory, so forwards without backwards enqueue
  // one of each kind in a pass.
  void count_memory_alone() { memory_alone_ = true; }
  void begin_pass() { counted_ = {}; }

  void place(Slot& slot, ActionKind kind) { host_.place(slot, kind); }

  // logits: from logits_room(), for Purpose::generate
  void forward(int index, const Slot& slot, const Pass& pass, int64_t micro_batch, const Tensor& logits) {
    const Chunk& c = chunk(index);
    if (c.has_embedding) forward_embedding(slot.input, slot);
    for (size_t l = 0; l < c.layers.size(); ++l)
      if (memory_alone_ && pass.purpose != Purpose::train &&
          std::exchange(counted_[model_.is_sparse(c.layers[l])], true))
        HeldLayer(units_of(c.layers[l]), state_, context_.compute).pass_by();
      else forward_block(c.layers[l], l, slot, pass);
    if (!c.has_head || pass.purpose == Purpose::train) return;
    const Tensor& x = slot.output();
    const Head head = acquire_head();
    if (pass.purpose == Purpose::evaluate) head_pass_.evaluate(head, x, slot, pass, micro_batch);
    else head_pass_.compute_logits(logits, head, x, pass);
    release_head();
  }

  // Gradients of the chunk's weights += those of the micro-batch. `last_micro_batch`: they are then complete, and are
  // reduced unit by unit. With slot.output_gradients this is the input part; backward_weight() completes the blocks.
  void backward(int index, const Slot& slot, const Pass& pass, bool last_micro_batch) {
    const Chunk& c = chunk(index);
    host_.begin_backward(slot);
    if (c.has_head) backward_head(slot.output(), slot, last_micro_batch);
    for_blocks_back(
        c, [&](size_t l) { forward_block(c.layers[l], l, slot, pass, Again::yes); },
        [&](size_t l) { backward_block(c.layers[l], l, slot, pass, last_micro_batch); });
    if (c.has_embedding) backward_embedding(slot, last_micro_batch);
  }
  // The weight part. It needs no weights, and only the tensors of the micro-batch that the input part has left for it.
  void backward_weight(int index, const Slot& slot, bool last_micro_batch) {
    const Chunk& c = chunk(index);
    for (size_t l = c.layers.size(); l-- > 0;) {
      const LayerUnits& units = units_of(c.layers[l]);
      const UnitState& unit = state_.unit(units.block);
      const LayerRange range = set_current("weight part of the backward of " + unit.spec().name);
      const Sequences sequence = sequences(slot, {Purpose::train, slot.shape}, c.layers[l],
                                           [&]() -> const UnitState& { return state_.unit(*units.experts); });
      for_units(units, [&](size_t u) { state_.gradients.resume(u); });
      Block({model_, unit, slot.blocks[l], sequence, parallel_, &slot.output_gradients[l]}).backward_weight();
      for_units(units, [&](size_t u) { state_.gradients.reduce(u, last_micro_batch, context_.compute); });
    }
  }

  // After a whole backward of a chunk, which a graph may have repeated: it leaves no gradient of its units unwritten.
  void gradients_written(int index) {
    for (const size_t u : units_acquired({ActionKind::backward, index, 0}, Purpose::train))
      state_.gradients.all_written(u);
    if (chunk(index).has_embedding) state_.gradients.all_written(embedding_unit);
  }

 private:
  static constexpr size_t embedding_unit = 0;
  const LayerUnits& units_of(int64_t layer) const { return layer_units_[static_cast<size_t>(layer)]; }
  template <class F>
  static void for_units(const LayerUnits& units, F&& f) {
    f(units.block);
    if (units.experts) f(*units.experts);
  }
  size_t head_unit() const { return state_.size() - 1; }
  // The blocks of a chunk in the order of its backward: before the blocks of a segment, of which only the input was
  // kept, those that lead to the input of its last one go forward again.
  template <class Forward, class Backward>
  void for_blocks_back(const Chunk& c, Forward&& forward_again, Backward&& backward) const {
    const size_t segment = static_cast<size_t>(config_.segment_for(Purpose::train));
    for (size_t end = c.layers.size(), begin; end > 0; end = begin) {
      begin = (end - 1) / segment * segment;
      for (size_t l = begin; l + 1 < end; ++l) forward_again(l);
      for (size_t l = end; l-- > begin;) backward(l);
    }
  }

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
  struct LayerRange {
    ProfilerRange profiler;
    StreamRange trace;
  };
  LayerRange set_current(std::string what) {
    current_ = std::move(what);
    return {ProfilerRange(current_.c_str()),
            StreamRange(context_.compute, [&] { return TraceSpan{.kind = SpanKind::layer, .name = current_}; })};
  }

  // The data that a block needs besides its weights; a generated text is one document. experts(): acquires their unit.
  template <class AcquireExperts>
  Sequences sequences(const Slot& slot, const Pass& pass, int64_t layer, AcquireExperts&& experts) const {
    const ContextParallel context = config_.context_for(pass.purpose);
    Sequences s{slot.shape,    slot.inputs.positions.slice(0, {slot.shape.rows()}),
                rotary_table_, pass.purpose == Purpose::generate ? Documents::together : config_.documents,
                context,       slot.inputs.all_positions,
                slot.slice};
    if (pass.purpose == Purpose::train) {
      s.linear = config_.precision.linear_of(config_.model.place_of(layer));
      s.largest_logits = logits_.of(layer);
    }
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

  // out (S, C)
  void forward_embedding(const Tensor& out, const Slot& slot) {
    Stream& stream = context_.compute;
    const LayerRange range = set_current("forward of the embedding");
    const UnitState& unit = state_.weights.acquire(embedding_unit, stream);
    parallel::Embedding{unit, parallel_}.forward(out, slot.inputs.tokens, slot.inputs.positions);
    state_.weights.release(embedding_unit, stream);
  }

  // again: a forward that the backward repeats, whose statistics have been recorded
  enum class Again : uint8_t { no, yes };
  // Block `l` of the chunk.
  void forward_block(int64_t layer, size_t l, const Slot& slot, const Pass& pass, Again again = Again::no) {
    if (again == Again::yes) host_.need_input(slot, l);
    else host_.begin_output(slot, l);
    HeldLayer held(units_of(layer), state_, context_.compute);
    const UnitState& unit = held.block();
    const LayerRange range =
        set_current((again == Again::yes ? "recomputed forward of " : "forward of ") + unit.spec().name);
    Sequences sequence = sequences(slot, pass, layer, [&]() -> const UnitState& { return held.experts(); });
    if (again == Again::yes && sequence.routing.training) sequence.routing.training->records = false;
    Block({model_, unit, slot.blocks[l], sequence, parallel_}).forward(slot.block_input(l));
    if (again == Again::no) host_.keep_output(slot, l);
    held.release();
    state_.gradients.enqueue_waiting();  // of the micro-batch before
  }

  void backward_head(const Tensor& x, const Slot& slot, bool last_micro_batch) {
    const LayerRange range = set_current("backward of the head");
    const Head head = acquire_head();
    start_gradients(head_unit(), slot);
    // A tied table gets its gradients in two parts, here and in backward_embedding(), which reduces them.
    if (config_.model.tied) start_gradients(embedding_unit, slot);
    head_pass_.train(head, x, slot);
    if (config_.model.tied) state_.unit(embedding_unit).zero_unwritten(context_.compute);  // its positions
    reduce_gradients(head_unit(), slot, last_micro_batch);
    if (reduces_tied_parts()) reduce_gradients(embedding_unit, slot, last_micro_batch);
    release_head();
  }

  // Block `l` of the chunk. slot.gradient: on entry the gradient of its output, on return that of its input.
  void backward_block(int64_t layer, size_t l, const Slot& slot, const Pass& pass, bool last_micro_batch) {
    const BlockActivations& acts = slot.blocks[l];
    const Tensor& x = slot.block_input(l);  // (S, C)
    const bool whole = slot.output_gradients.empty();
    host_.need_input(slot, l);
    const LayerUnits& units = units_of(layer);
    HeldLayer held(units, state_, context_.compute);
    const UnitState& unit = held.block();
    const LayerRange range =
        set_current((whole ? "backward of " : "input part of the backward of ") + unit.spec().name);
    Sequences sequence = sequences(slot, pass, layer, [&]() -> const UnitState& { return held.experts(); });
    if (sequence.routing.training) sequence.routing.training->records = false;
    for_units(units, [&](size_t u) { start_gradients(u, slot); });
    auto scope = context_.arena.scope();
    GatheredRows gathered;
    if (whole && config_.recompute == Recompute::block) {
      gathered.norm1 = parallel::room_for_rows("gathered norm1", acts.norm1, parallel_);
      if (!units.experts || config_.model.experts.shared > 0)  // experts gather rows of their own
        gathered.norm2 = parallel::room_for_rows("gathered norm2", acts.norm2, parallel_);
    }
    const Block block({model_, unit, acts, sequence, parallel_, whole ? nullptr : &slot.output_gradients[l], gathered});
    block.recompute(x, config_.recompute);
    block.backward(slot.gradient, x);
    host_.drop_input(slot, l);
    if (whole) for_units(units, [&](size_t u) { reduce_gradients(u, slot, last_micro_batch); });
    held.release();
  }

  void backward_embedding(const Slot& slot, bool last_micro_batch) {
    const LayerRange range = set_current("backward of the embedding");
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

  const StepConfig& config_;
  Context context_;
  ModelState& state_;
  ModelConfig model_;  // the shape of this rank's part
  ExpertPlacement placement_;
  parallel::Group parallel_;
  HeadPass head_pass_;
  const ExpertRecord& experts_;
  const LogitRecord& logits_;
  HostActivations host_;
  std::vector<Chunk> chunks_;
  std::vector<LayerUnits> layer_units_;
  Tensor rotary_table_;  // (T, D); empty without rotary positions
  std::string current_;
  bool memory_alone_ = false;
  std::array<bool, 2> counted_ = {};  // with memory_alone_: dense and sparse layers of this pass
};

}  // namespace llmc
