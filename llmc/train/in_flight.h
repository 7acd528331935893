// in_flight.h: what a micro-batch holds while it is in flight: its inputs, which may still be on their way to a GPU,
// its activations, and the key-value cache of a text that is being generated; and what a pass over a list of actions is
// for.
#pragma once
#include <algorithm>
#include <map>
#include <optional>
#include <tuple>
#include <utility>
#include <vector>

#include "train/step_config.h"

namespace llmc {

// The activations of one chunk for one micro-batch.
struct ChunkActivations {
  Tensor embedded;  // (S, C), of the chunk with the embedding
  Tensor received;  // (S, C), of a chunk that comes after one of another stage: its input
  std::vector<BlockActivations> blocks;
  const Tensor& output() const { return blocks.back().out; }
};

// What an action works on: the inputs of the micro-batch, or of a token slice of it, its activations in the action's
// chunk and in the one before, where that is on the same rank, and the gradient of the residual stream (S, C), which goes
// from chunk to chunk.
struct Slot {
  const MicroBatch& inputs;
  const ChunkActivations& chunk;
  Tensor input;  // of the chunk's first block
  Tensor gradient;
  BatchShape shape;                          // of what this rank has of it
  std::optional<SequenceRows> slice = {};  // which tokens; none: whole sequences

  // The residual stream that enters block `l` of the chunk.
  const Tensor& block_input(size_t l) const { return l > 0 ? chunk.blocks[l - 1].out : input; }
  // Is its backward the first, or the last, of the micro-batch? They go from the last slice to the first.
  bool begins_backward() const { return !slice || slice->first + slice->rows == slice->length; }
  bool ends_backward() const { return !slice || slice->first == 0; }
};

// The memory of a pass over a list of actions: sets of inputs and of activations, as many as are in use at the same
// time. Of inputs micro-batch m uses set m modulo their number. Token slices have the keys and values of their
// micro-batch in one place, and their gradients, of the one micro-batch whose backward is under way in a chunk.
class PassMemory {
 public:
  // all: the shape of a micro-batch
  PassMemory(const StepConfig& config, const std::vector<Chunk>& chunks, const std::vector<Action>& actions,
             const BatchShape& all, Purpose purpose, Arena& arena)
      : model_(config.part()), dtype_(config.dtype), slices_(config.slices_for(purpose)) {
    BatchShape largest = config.share(all, purpose, 0);
    for (int k = 0; k < slices_; ++k) {
      shapes_.push_back(config.share(all, purpose, k));
      if (shapes_.back().T > largest.T) largest = shapes_.back();
      rows_.push_back(slices_ > 1 ? std::optional(config.slice_rows(k)) : std::nullopt);
      streams_.push_back({config.tensor.stream_rows(shapes_.back().rows()), model_.n_embd});
    }
    const Recompute recompute = config.recompute_for(purpose);
    // The activations that are recomputed, one set for all.
    const BlockActivations shared =
        BlockActivations::recomputed(model_, largest, config.tensor, dtype_, recompute, arena);
    for (int64_t i = 0; i < micro_batches_in_flight(actions) * slices_; ++i)
      inputs_.emplace_back(shapes_[static_cast<size_t>(i % slices_)].rows(), config.all_position_rows(all, purpose),
                           config.tensor, arena);
    for (size_t c = 0; c < chunks.size(); ++c) {
      const int index = static_cast<int>(c);
      ChunkMemory& memory = chunks_.emplace_back();
      memory.sets = sets_in_turn(actions, index, Per::slice);
      // A set has room for the largest slice that uses it.
      std::vector<BatchShape> rooms(memory.sets.count, BatchShape{all.B, 0});
      for (const auto& [pass, set] : memory.sets.of)
        rooms[set].T = std::max(rooms[set].T, shapes_[static_cast<size_t>(pass.second)].T);
      std::vector<ChunkActivations> sets;
      for (const BatchShape& room : rooms) {
        ChunkActivations& acts = sets.emplace_back();
        const Shape stream{config.tensor.stream_rows(room.rows()), model_.n_embd};
        if (chunks[c].has_embedding) acts.embedded = arena.alloc("activations", "embedded", dtype_, stream);
        else if (config.pipeline().stage_of(index) != config.pipeline().stage_of(index - 1))
          acts.received = arena.alloc("activations", "received", dtype_, stream);
        for (size_t l = 0; l < chunks[c].layers.size(); ++l) {
          // Forward only: nothing is kept for a backward; the blocks of a chunk write to two outputs in turn.
          if (purpose != Purpose::train && l >= 2) acts.blocks.push_back(acts.blocks[l - 2]);
          else acts.blocks.push_back(BlockActivations::kept(model_, room, config.tensor, dtype_, recompute, shared, arena));
        }
      }
      if (slices_ == 1) {
        for (const auto& [pass, set] : memory.sets.of) memory.passes.emplace(pass, sets[set]);
        continue;
      }
      const Sets of_micro_batches = sets_in_turn(actions, index, Per::micro_batch);
      const std::vector<std::vector<SliceKeys>> keys =
          keys_of_slices(of_micro_batches.count, chunks[c].layers.size(), all, arena);
      for (const auto& [pass, set] : memory.sets.of)
        memory.passes.emplace(pass, part_of_set(sets[set], keys[of_micro_batches.of.at({pass.first, 0})], pass.second,
                                                config.tensor));
    }
    if (purpose == Purpose::train)
      gradient_ = arena.alloc("activations", "gradient", dtype_,
                              {config.tensor.stream_rows(largest.rows()), model_.n_embd});
  }

  const MicroBatch& inputs(int64_t micro_batch, int slice) const {
    return inputs_[static_cast<size_t>(micro_batch * slices_ + slice) % inputs_.size()];
  }
  // Of the residual stream of a slice.
  Tensor gradient(int slice) const {
    return gradient_.empty() ? gradient_ : gradient_.slice(0, stream_shape(slice));
  }
  const Shape& stream_shape(int slice) const { return streams_[static_cast<size_t>(slice)]; }
  Slot slot(const Action& a) const {
    const ChunkActivations& mine = activations(a.chunk, a);
    const Tensor input = !mine.embedded.empty()   ? mine.embedded
                         : !mine.received.empty() ? mine.received
                                                  : activations(a.chunk - 1, a).output();
    const size_t k = static_cast<size_t>(a.slice);
    return {inputs(a.micro_batch, a.slice), mine, input, gradient(a.slice), shapes_[k], rows_[k]};
  }

 private:
  struct ChunkMemory {
    Sets sets;
    std::map<std::pair<int64_t, int>, ChunkActivations> passes;  // by micro-batch and slice
  };

  const ChunkActivations& activations(int chunk, const Action& a) const {
    return chunks_[static_cast<size_t>(chunk)].passes.at({a.micro_batch, a.slice});
  }
  // Of each of `sets` micro-batches, for each block.
  std::vector<std::vector<SliceKeys>> keys_of_slices(size_t sets, size_t blocks, const BatchShape& all,
                                                     Arena& arena) const {
    std::vector<std::vector<SliceKeys>> keys(sets, std::vector<SliceKeys>(blocks));
    auto alloc = [&](const char* name, DType dtype) {
      return arena.alloc("keys of token slices", name, dtype, {all.rows(), 2 * model_.kv_size()});
    };
    for (size_t l = 0; l < blocks; ++l) {
      const Tensor gradient = alloc("gradient of keys and values", accumulator_of(dtype_));
      for (auto& of_micro_batch : keys) of_micro_batch[l] = {alloc("keys and values", dtype_), gradient};
    }
    return keys;
  }
  // The part of a set that a slice fills.
  ChunkActivations part_of_set(const ChunkActivations& set, const std::vector<SliceKeys>& keys, int slice,
                               const TensorParallel& tensor) const {
    ChunkActivations part = set;
    for (Tensor* t : {&part.embedded, &part.received})
      if (!t->empty()) *t = t->slice(0, stream_shape(slice));
    for (size_t l = 0; l < part.blocks.size(); ++l) {
      part.blocks[l] = BlockActivations::part_of(set.blocks[l], model_, shapes_[static_cast<size_t>(slice)], tensor);
      part.blocks[l].slice_keys = keys[l];
    }
    return part;
  }

  ModelConfig model_;  // of this rank's part
  DType dtype_;
  int64_t slices_;
  std::vector<BatchShape> shapes_;                  // by slice
  std::vector<std::optional<SequenceRows>> rows_;  // by slice
  std::vector<Shape> streams_;                      // by slice
  std::vector<MicroBatch> inputs_;
  std::vector<ChunkMemory> chunks_;  // by chunk of the model; none of those elsewhere
  Tensor gradient_;
};

// These tokens of each of B sequences; of an empty batch on paper none.
inline HostBatch slice_of(const HostBatch& all, int64_t B, const SequenceRows& tokens) {
  HostBatch part;
  for (const auto ids : {&HostBatch::tokens, &HostBatch::targets, &HostBatch::positions})
    for (int64_t b = 0; b < B && !(all.*ids).empty(); ++b) {
      const auto first = (all.*ids).begin() + b * tokens.length + tokens.first;
      (part.*ids).insert((part.*ids).end(), first, first + tokens.rows);
    }
  return part;
}

// Uploads inputs to the device: of each sequence what this rank has. On a GPU they are copied to two buffers in turn,
// while the previous micro-batch is being computed.
class Uploads {
 public:
  Uploads(const StepConfig& config, const Context& context) : config_(config) {
    if (context.compute.device().computes_as() == DeviceKind::cuda) {
      // Of a step, or of a text, which is not divided.
      const int64_t rows = std::max(config.share(config.batch, Purpose::train).rows(), config.batch.T);
      for (int i = 0; i < 2; ++i)
        arriving_.emplace_back(rows, config.all_position_rows(config.batch, Purpose::train), config.tensor,
                               context.arena);
    }
    if (context.copies != nullptr)
      context.copies->reserve_uploads(
          std::max(arriving_[0].inputs.tokens.size_bytes(), arriving_[0].inputs.all_positions.size_bytes()));
  }

  // from: (B T) of each kind, of the shape `all`; `context_rank`: of this rank
  void upload_batch(const MicroBatch& to, HostBatch from, const BatchShape& all, Purpose purpose, int context_rank,
                    const Context& context) {
    const bool on_paper = context.compute.device().kind == DeviceKind::null;
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
  std::vector<Arriving> arriving_;  // of a GPU
  int64_t uploads_ = 0;
};

// The keys and values of the tokens of one sequence so far.
struct KeyValueCache {
  std::vector<Tensor> layers;  // each (T, 2 Hkv D); empty tensors for those of other stages
  int64_t rows = 0;            // filled

  // held(layer): of those that this rank has
  template <class Held>
  KeyValueCache(const StepConfig& config, Arena& arena, Held&& held) {
    for (int64_t l = 0; l < config.model.n_layer; ++l)
      layers.push_back(held(l) ? arena.alloc("key-value cache", "keys and values", config.dtype,
                                             {config.batch.T, 2 * config.part().kv_size()})
                               : Tensor{});
  }
};

// May the actions of a training step be launched as CUDA graphs that were captured before?
enum class Launch : uint8_t { replay, enqueue };

// One pass over a list of actions: what it is for.
struct Pass {
  Purpose purpose;
  BatchShape shape;  // of a micro-batch
  Launch launch = Launch::replay;
  RowLosses row_losses = {};       // evaluate: receives the loss of every row, if set
  KeyValueCache* cache = nullptr;  // generate: of the text that the tokens continue; none: they begin one
  int64_t logits_row = 0;          // generate: the row whose logits are computed
};

}  // namespace llmc
