// in_flight.h: the memory of a micro-batch in flight: its inputs, which may still be on their way to a GPU, its
// activations, and the key-value cache of a text that is generated; and the purpose of a pass over a list of actions.
#pragma once
#include "schedule/pass_sets.h"
#include "train/step_config.h"

namespace llmc {

// The inputs of a micro-batch of N rows, on the device. Positions are an input, not the row's index: they count within
// the whole sample, and with Documents::apart restart at 0 in each document.
struct MicroBatch {
  Tensor tokens, targets, positions;  // (N) int32; with sequence parallelism padded to a multiple of the ranks
  Tensor all_positions;               // for `all_rows` rows of whole sequences; an empty tensor if 0
  MicroBatch(int64_t N, int64_t all_rows, const TensorParallel& tensor, Arena& arena) {
    const int64_t padded = tensor.by_rows() ? tensor.padded_rows(N) : N;
    auto input = [&](const char* name, int64_t n) { return arena.alloc("inputs", name, DType::int32, {n}); };
    tokens = input("tokens", padded);
    targets = input("targets", padded);
    positions = input("positions", padded);
    if (all_rows > 0) all_positions = input("positions of whole sequences", all_rows);
  }
};

// The tensors of an action: the inputs of the micro-batch, or of a slice of it, its activations in the chunk and, on
// the same rank, the one before, and the gradient of the residual stream (S, C), which goes from chunk to chunk.
struct Slot {
  const MicroBatch& inputs;
  std::vector<BlockActivations> blocks;  // of the chunk
  Tensor input;                          // (S, C), of the chunk's first block
  Tensor gradient;
  BatchShape shape;                                    // of the rows that this rank has
  std::optional<SequenceRows> slice = {};              // which tokens; none: whole sequences
  std::vector<OutputGradients> output_gradients = {};  // by block, in both parts of a backward in parts
  std::vector<Tensor> at_host = {};  // by block: where its output is kept (host_activations.h); empty: on the device

  // The residual stream that enters block `l` of the chunk, and that leaves the last one.
  const Tensor& block_input(size_t l) const { return l > 0 ? blocks[l - 1].out : input; }
  const Tensor& output() const { return block_input(blocks.size()); }
  // Whether its backward is the first, or the last, of the micro-batch; they go from the last slice to the first.
  bool begins_backward() const { return !slice || slice->first + slice->rows == slice->length; }
  bool ends_backward() const { return !slice || slice->first == 0; }
};

struct KeyValueCache;

// Whether the actions of a training step may be launched as CUDA graphs that were captured before.
enum class Launch : uint8_t { replay, enqueue };

struct Pass {
  Purpose purpose;
  BatchShape shape;  // of a micro-batch
  Launch launch = Launch::replay;
  RowLosses row_losses = {};       // evaluate: receives the loss of every row, if set
  KeyValueCache* cache = nullptr;  // generate: of the text that the tokens continue; none: they begin one
  int64_t logits_row = 0;          // generate: the row whose logits are computed
};

// The memory of a pass over a list of actions: as many sets of inputs, and of each block's activations, as are in use
// at the same time. What the last block of a chunk sends to another stage is free once sent. With a backward in parts,
// memory that only the input part needs is free after it. The token slices of a micro-batch share one buffer of keys
// and values; there is one set of their gradients, for the one micro-batch whose backward is in progress.
class PassMemory {
 public:
  // chunks: live as long as this. period: micro-batch m uses the sets of micro-batch m modulo `period`; 0: the list has
  // all micro-batches
  // host: memory for outputs of blocks that are offloaded; none: none are
  PassMemory(const StepConfig& config, const std::vector<Chunk>& chunks, const std::vector<Action>& actions,
             const Pass& pass, Arena& arena, int64_t period = 0, Arena* host = nullptr)
      : config_(config),
        purpose_(pass.purpose),
        period_(period),
        chunks_(chunks),
        model_(config.part()),
        placement_(config.expert_placement()),
        // Forward only: nothing is kept for a backward; the blocks of a chunk write to two outputs in turn.
        block_sets_(
            actions,
            [&](int c) {
              if (pass.purpose == Purpose::train) return kinds_of(c);
              return std::vector<Layers>(std::min<size_t>(kinds_of(c).size(), 1), Layers::any);
            },
            ActionKind::forward, is_backward),
        output_sets_(
            actions,
            [&](int c) {
              const int64_t all = layers(c);
              if (pass.purpose != Purpose::train) return sets_of_one_kind(std::min<int64_t>(all, 2));
              std::vector<int> kinds = sets_of_one_kind(ceil_div(all, segment()) - sends_output(c));
              if (config.keeps_at_host(pass.purpose)) std::ranges::fill(kinds, at_host);
              if (chunks_[static_cast<size_t>(c)].has_head && !kinds.empty()) kinds.back() = 0;
              return kinds;
            },
            ActionKind::forward, is_backward),
        sent_sets_(
            actions, [&](int c) { return sets_of_one_kind(sends_output(c)); }, ActionKind::forward,
            [](ActionKind kind) { return kind == ActionKind::send_activations; }),
        input_sets_(
            actions, [&](int c) { return sets_of_one_kind(has_own_input(c)); }, ActionKind::forward, is_backward),
        product_sets_(parts(actions, ActionKind::forward)),
        gradient_sets_(parts(actions, ActionKind::backward_input)) {
    BatchShape shape = config.share(pass.shape, pass.purpose, 0);  // of the largest slice
    for (int k = 0; k < config.slices_for(pass.purpose); ++k) {
      shapes_.push_back(config.share(pass.shape, pass.purpose, k));
      if (shapes_.back().T > shape.T) shape = shapes_.back();
    }
    const Shape stream_shape{config.layout.tensor.stream_rows(shape.rows()), model_.n_embd};
    // A forward without a backward keeps as little as if all of it were recomputed.
    const Recompute recompute = pass.purpose == Purpose::train ? config.recompute : Recompute::block;
    const Backward backward = gradient_sets_.count() > 0 ? Backward::in_parts : Backward::whole;
    // Where all blocks can.
    inputs_in_fp8_ = pass.purpose == Purpose::train && block_sets_.count() > 0 && backward == Backward::whole &&
                     !sliced() && config.layout.tensor.ranks == 1 && model_.experts.count == 0 &&
                     !config.precision.fp8_skip.any() &&
                     detail::multiplies_fp8(config.precision.linear, arena.device());
    auto product_inputs = [&](const PassSets& sets, size_t set, ActionKind made_by) {
      return BlockActivations::product_inputs(block_shape(shape, sets.kind_of<Layers>(set)), recompute, made_by, arena);
    };
    const BlockActivations shared = BlockActivations::recomputed(block_shape(shape, Layers::any), recompute, arena);
    for (int64_t i = 0, most = micro_batches_in_flight(actions); i < most; ++i)
      for (const BatchShape& slice : shapes_)
        inputs_.emplace_back(slice.rows(), config.all_position_rows(pass.shape, pass.purpose), config.layout.tensor,
                             arena);
    for (size_t i = 0; i < input_sets_.count(); ++i)
      chunk_inputs_.push_back(
          arena.alloc("activations", "input of a chunk", config.precision.activations, stream_shape));
    auto outputs = [&](const PassSets& sets) {
      std::vector<Tensor> tensors;
      for (const BatchShape& room : rooms(sets, actions))
        tensors.push_back((sets.kind_of<int>(tensors.size()) == at_host ? *host : arena)
                              .alloc("activations", "out", config.precision.activations,
                                     {config.layout.tensor.stream_rows(room.rows()), model_.n_embd}));
      return tensors;
    };
    outputs_ = outputs(output_sets_);
    sent_ = outputs(sent_sets_);
    for (int64_t i = 1; i < std::min(segment(), largest_chunk(chunks_)); ++i)
      inner_outputs_.push_back(
          arena.alloc("recomputed", "outputs within a segment", config.precision.activations, stream_shape));
    for (const BatchShape& room : rooms(block_sets_, actions))
      blocks_.push_back(BlockActivations::kept(block_shape(room, block_sets_.kind_of<Layers>(blocks_.size())),
                                               recompute, backward, shared, arena));
    if (sliced()) keys_of_slices(actions, pass.shape, arena);
    for (size_t i = 0; i < product_sets_.count(); ++i)
      products_.push_back(product_inputs(product_sets_, i, ActionKind::forward));
    for (size_t i = 0; i < gradient_sets_.count(); ++i) {
      recomputed_products_.push_back(product_inputs(gradient_sets_, i, ActionKind::backward_input));
      gradients_.emplace_back(block_shape(shape, gradient_sets_.kind_of<Layers>(i)), arena);
    }
    if (pass.purpose == Purpose::train)
      gradient_ = arena.alloc("gradients of activations", "gradient", config.precision.activations, stream_shape);
  }

  const MicroBatch& inputs(int64_t micro_batch, int slice) const {
    return inputs_[(static_cast<size_t>(micro_batch) * shapes_.size() + static_cast<size_t>(slice)) % inputs_.size()];
  }
  Shape stream_shape(int slice) const {
    return {config_.layout.tensor.stream_rows(shapes_[static_cast<size_t>(slice)].rows()), model_.n_embd};
  }
  Tensor gradient(int slice) const { return gradient_.empty() ? gradient_ : gradient_.slice(0, stream_shape(slice)); }
  // The output of a chunk: from its forward to its backward or, if another stage has the next chunk, until it is sent.
  Tensor output(Action a) const {
    if (period_ > 0) a.micro_batch %= period_;
    return layers(a.chunk) == 0 ? input(a) : output(a, layers(a.chunk) - 1);
  }
  // (S, C): the input of the first block of the action's chunk.
  Tensor input(Action a) const {
    if (period_ > 0) a.micro_batch %= period_;
    if (!has_own_input(a.chunk)) return output({a.kind, a.chunk - 1, a.micro_batch, a.slice});
    Tensor input = chunk_inputs_[input_sets_.of(a.chunk, a.micro_batch, a.slice)[0]].slice(0, stream_shape(a.slice));
    input.name = chunks_[static_cast<size_t>(a.chunk)].has_embedding ? "embedded" : "received";
    return input;
  }
  Slot slot(Action a) const {
    if (period_ > 0) a.micro_batch %= period_;
    Slot slot{inputs(a.micro_batch, a.slice), {}, {}, gradient(a.slice), shapes_[static_cast<size_t>(a.slice)]};
    if (sliced()) slot.slice = config_.slice_rows(a.slice);
    std::vector<BlockActivations>& blocks = slot.blocks;
    blocks.resize(static_cast<size_t>(layers(a.chunk)));
    if (a.kind != ActionKind::backward_weight) {
      slot.input = input(a);
      const auto sets = block_sets_.of(a.chunk, a.micro_batch, a.slice);
      for (size_t l = 0; l < blocks.size(); ++l) {
        blocks[l] = blocks_[set_of(sets, static_cast<int64_t>(l))];
        const bool sent = l + 1 == blocks.size() && sends_output(a.chunk);
        if (!sent || a.kind == ActionKind::forward) blocks[l].out = output(a, static_cast<int64_t>(l));
        if (!sent && is_at_host(a, static_cast<int64_t>(l))) {
          slot.at_host.resize(blocks.size());
          slot.at_host[l] = blocks[l].out;
        }
      }
    }
    for (size_t l = 0; sliced() && l < blocks.size(); ++l) {
      blocks[l] = BlockActivations::part_of(blocks[l], block_shape(slot.shape, kinds_of(a.chunk)[l]));
      blocks[l].slice_keys = {keys_[key_sets_.of(a.chunk, a.micro_batch)[l]],
                              key_gradients_[static_cast<size_t>(a.chunk)][l]};
    }
    if (gradients_.empty()) return slot;
    const auto products = product_sets_.of(a.chunk, a.micro_batch);
    for (size_t l = 0; l < blocks.size(); ++l) blocks[l].take_product_inputs(products_[products[l]]);
    if (a.kind == ActionKind::forward) return slot;
    const auto gradients = gradient_sets_.of(a.chunk, a.micro_batch);
    for (size_t l = 0; l < blocks.size(); ++l) {
      blocks[l].take_product_inputs(recomputed_products_[gradients[l]]);
      slot.output_gradients.push_back(gradients_[gradients[l]]);
    }
    return slot;
  }

 private:
  BlockShape block_shape(const BatchShape& batch, Layers layers) const {
    return {model_, batch, layers, config_.layout.tensor, config_.precision.activations, placement_, inputs_in_fp8_};
  }
  int64_t layers(int chunk) const { return static_cast<int64_t>(chunks_[static_cast<size_t>(chunk)].layers.size()); }
  // The blocks that share one kept input; those within a segment write to outputs that all segments use in turn.
  int64_t segment() const { return config_.segment_for(purpose_); }
  std::vector<Layers> kinds_of(int chunk) const {
    std::vector<Layers> kinds;
    for (const int64_t l : chunks_[static_cast<size_t>(chunk)].layers) kinds.push_back(kind_of_layer(model_, l));
    return kinds;
  }
  static std::vector<int> sets_of_one_kind(int64_t count) { return std::vector<int>(static_cast<size_t>(count), 0); }
  // Whether a chunk's input is not the output of another chunk of this rank.
  bool has_own_input(int chunk) const { return chunk == 0 || config_.pipeline().elsewhere(chunk, chunk - 1); }
  // Whether no backward on this rank reads a chunk's output, because another stage has the next chunk.
  bool sends_output(int chunk) const {
    return purpose_ == Purpose::train && layers(chunk) > 0 && config_.pipeline().elsewhere(chunk, chunk + 1);
  }
  // Sets that are held from an action of this kind to the weight part.
  PassSets parts(const std::vector<Action>& actions, ActionKind from) const {
    auto is_weight_part = [](ActionKind kind) { return kind == ActionKind::backward_weight; };
    if (std::none_of(actions.begin(), actions.end(), [&](const Action& a) { return is_weight_part(a.kind); }))
      return PassSets();
    return PassSets(
        actions, [&](int c) { return kinds_of(c); }, from, is_weight_part);
  }
  static constexpr int at_host = 1;  // the kind of sets of outputs in host memory
  // Is the output of a block of the action's chunk kept, and in host memory?
  bool is_at_host(const Action& a, int64_t layer) const {
    if (!config_.keeps_at_host(purpose_)) return false;
    const bool last = layer + 1 == layers(a.chunk);
    if (!last && layer % segment() + 1 < segment()) return false;
    return output_sets_.kind_of<int>(set_of(output_sets_.of(a.chunk, a.micro_batch, a.slice), layer / segment())) ==
           at_host;
  }
  static size_t set_of(std::span<const size_t> sets, int64_t layer) {
    return sets[static_cast<size_t>(layer) % sets.size()];
  }
  // (S, C): the output of a block of the action's chunk
  Tensor output(const Action& a, int64_t layer) const {
    const bool last = layer + 1 == layers(a.chunk), sent = last && sends_output(a.chunk);
    if (const int64_t place = layer % segment(); !last && place + 1 < segment())
      return inner_outputs_[static_cast<size_t>(place)].slice(0, stream_shape(a.slice));
    const auto& [tensors, sets] = sent ? std::tie(sent_, sent_sets_) : std::tie(outputs_, output_sets_);
    return tensors[set_of(sets.of(a.chunk, a.micro_batch, a.slice), layer / segment())].slice(0, stream_shape(a.slice));
  }
  bool sliced() const { return shapes_.size() > 1; }
  // The largest slice that uses each set.
  std::vector<BatchShape> rooms(const PassSets& sets, const std::vector<Action>& actions) const {
    std::vector<BatchShape> rooms(sets.count(), {shapes_[0].B, 0});
    for (const Action& a : actions) {
      if (a.kind != ActionKind::forward) continue;
      for (const size_t set : sets.of(a.chunk, a.micro_batch, a.slice))
        rooms[set].T = std::max(rooms[set].T, shapes_[static_cast<size_t>(a.slice)].T);
    }
    return rooms;
  }
  // all: the shape of a micro-batch
  void keys_of_slices(const std::vector<Action>& actions, const BatchShape& all, Arena& arena) {
    std::vector<Action> ends;  // keys are needed from the forward of the first slice to its backward, which is the last
    for (const Action& a : actions)
      if (a.slice == 0) ends.push_back(a);
    key_sets_ = PassSets(
        ends, [&](int c) { return sets_of_one_kind(layers(c)); }, ActionKind::forward, is_backward);
    auto alloc = [&](const char* name, DType dtype) {
      return arena.alloc("keys of token slices", name, dtype, {all.rows(), 2 * model_.kv_size()});
    };
    for (size_t i = 0; i < key_sets_.count(); ++i)
      keys_.push_back(alloc("keys and values", config_.precision.activations));
    for (const Chunk& chunk : chunks_) {
      std::vector<Tensor>& gradients = key_gradients_.emplace_back();
      while (gradients.size() < chunk.layers.size())
        gradients.push_back(alloc("gradient of keys and values", config_.precision.state));
    }
  }

  const StepConfig& config_;
  Purpose purpose_;
  int64_t period_;
  const std::vector<Chunk>& chunks_;  // of the model; those of other stages have no layers
  ModelConfig model_;                 // this rank's part
  ExpertPlacement placement_;
  PassSets block_sets_, output_sets_, sent_sets_, input_sets_, product_sets_, gradient_sets_;
  std::vector<BatchShape> shapes_;  // by slice
  PassSets key_sets_;
  std::vector<Tensor> keys_;
  std::vector<std::vector<Tensor>> key_gradients_;  // by chunk and block
  std::vector<MicroBatch> inputs_;                  // micro-batch m uses set m modulo their number; one per slice
  std::vector<Tensor> chunk_inputs_, outputs_, sent_, inner_outputs_;
  bool inputs_in_fp8_ = false;  // see BlockShape
  std::vector<BlockActivations> blocks_, products_, recomputed_products_;
  std::vector<OutputGradients> gradients_;
  Tensor gradient_;
};

// These tokens of each of B sequences; none if the batch is empty, on paper.
inline HostBatch slice_of(const HostBatch& all, int64_t B, const SequenceRows& tokens) {
  HostBatch part;
  for (const auto ids : {&HostBatch::tokens, &HostBatch::targets, &HostBatch::positions})
    for (int64_t b = 0; b < B && !(all.*ids).empty(); ++b) {
      const auto first = (all.*ids).begin() + b * tokens.length + tokens.first;
      (part.*ids).insert((part.*ids).end(), first, first + tokens.rows);
    }
  return part;
}

// Uploads inputs to the device: the rows that this rank has of each sequence. On a GPU they are copied to two buffers
// in turn, while the previous micro-batch is being computed.
class Uploads {
 public:
  Uploads(const StepConfig& config, const Context& context) : config_(config) {
    if (context.compute.device().computes_as() == DeviceKind::cuda) {
      // The rows of a step, or of a text, which is not divided.
      const int64_t rows = std::max(config.share(config.batch, Purpose::train).rows(), config.batch.T);
      for (int i = 0; i < 2; ++i)
        arriving_.emplace_back(rows, config.all_position_rows(config.batch, Purpose::train), config.layout.tensor,
                               context.arena);
    }
    if (context.copies != nullptr)
      context.copies->reserve_uploads(
          std::max(arriving_[0].inputs.tokens.size_bytes(), arriving_[0].inputs.all_positions.size_bytes()));
  }

  // from: (B T) of each kind, of the shape `all`; context_rank: this rank's
  void upload_batch(const MicroBatch& to, HostBatch from, const BatchShape& all, Purpose purpose, int context_rank,
                    const Context& context) {
    const bool on_paper = context.compute.device().kind == DeviceKind::null;
    if (on_paper && context.copies == nullptr) return;
    const size_t padded = static_cast<size_t>(to.tokens.numel());
    std::vector<int32_t> all_positions;
    if (!to.all_positions.empty()) all_positions = from.positions;
    for (std::vector<int32_t>* ids : {&from.tokens, &from.targets, &from.positions}) {
      CHECK(on_paper || static_cast<int64_t>(ids->size()) == all.rows(), "a micro-batch has {} tokens, expected {}",
            ids->size(), all.rows());
      if (!on_paper) *ids = config_.context_for(purpose).share_of(std::move(*ids), all.T, context_rank);
      ids->resize(padded, ids == &from.targets ? -1 : 0);  // padding has no targets
    }
    if (on_paper) all_positions.resize(static_cast<size_t>(to.all_positions.numel()));
    const std::tuple<Tensor, Tensor MicroBatch::*, std::vector<int32_t>*> inputs[] = {
        {to.tokens, &MicroBatch::tokens, &from.tokens},
        {to.targets, &MicroBatch::targets, &from.targets},
        {to.positions, &MicroBatch::positions, &from.positions},
        {to.all_positions, &MicroBatch::all_positions, &all_positions}};
    if (context.copies == nullptr) {
      for (const auto& [tensor, which, ids] : inputs)
        if (!tensor.empty()) upload(tensor, std::move(*ids), context.compute);
      return;
    }
    Arriving& next = arriving_[static_cast<size_t>(uploads_++ % 2)];
    Stream& copies = *context.copies;
    auto arriving = [&](const Tensor& tensor, Tensor MicroBatch::*which) {
      return (next.inputs.*which).slice(0, tensor.shape);
    };
    copies.wait(next.free);
    for (const auto& [tensor, which, ids] : inputs)
      if (!tensor.empty()) upload(arriving(tensor, which), std::move(*ids), copies);
    context.compute.wait(copies.record());
    for (const auto& [tensor, which, ids] : inputs)
      if (!tensor.empty()) copy(tensor, arriving(tensor, which), context.compute);
    next.free = context.compute.record();
  }

 private:
  struct Arriving {
    MicroBatch inputs;
    Event free;
    Arriving(int64_t rows, int64_t all_rows, const TensorParallel& tensor, Arena& arena)
        : inputs(rows, all_rows, tensor, arena) {
      free.signal();
    }
  };
  const StepConfig& config_;
  std::vector<Arriving> arriving_;  // on a GPU
  int64_t uploads_ = 0;
};

// The keys and values of the tokens of one sequence so far.
struct KeyValueCache {
  std::vector<Tensor> layers;  // each (T, 2 Hkv D); empty tensors for layers of other stages
  int64_t rows = 0;            // how many are filled

  // held(layer): whether this rank has the layer
  template <class Held>
  KeyValueCache(const StepConfig& config, Arena& arena, Held&& held) {
    for (int64_t l = 0; l < config.model.n_layer; ++l)
      layers.push_back(held(l) ? arena.alloc("key-value cache", "keys and values", config.precision.activations,
                                             {config.batch.T, 2 * config.part().kv_size()})
                               : Tensor{});
  }
};

}  // namespace llmc
