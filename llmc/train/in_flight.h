// in_flight.h: what a micro-batch holds while it is in flight: its inputs, which may still be on their way to a GPU,
// its activations, and the key-value cache of a text that is being generated; and what a pass over a list of actions is
// for.
#pragma once
#include <utility>
#include <vector>

#include "train/step_config.h"

namespace llmc {

// The activations of one chunk for one micro-batch.
struct ChunkActivations {
  Tensor embedded;  // (S, C), of the chunk with the embedding
  std::vector<BlockActivations> blocks;
};

// All that one micro-batch in flight holds.
struct Slot {
  MicroBatch inputs;
  std::vector<ChunkActivations> chunks;
  Tensor gradient;  // (S, C) of the residual stream, passed from chunk to chunk in the backward

  // `shared`: the activations that are recomputed, one set for all blocks and slots.
  Slot(const StepConfig& config, const std::vector<Chunk>& of_chunks, const BatchShape& shape, Purpose purpose,
       const BlockActivations& shared, Arena& arena)
      : inputs(shape, config.tensor, arena) {
    const ModelConfig model = config.part();
    const Shape stream_shape{config.tensor.stream_rows(shape.rows()), model.n_embd};
    for (const Chunk& chunk : of_chunks) {
      ChunkActivations& acts = chunks.emplace_back();
      if (chunk.has_embedding) acts.embedded = arena.alloc("activations", "embedded", config.dtype, stream_shape);
      for (size_t l = 0; l < chunk.layers.size(); ++l) {
        // Forward only: nothing is kept for a backward; the blocks of a chunk write to two outputs in turn.
        if (purpose != Purpose::train && l >= 2) acts.blocks.push_back(acts.blocks[l - 2]);
        else
          acts.blocks.push_back(BlockActivations::kept(model, shape, config.tensor, config.dtype,
                                                       config.recompute_for(purpose), shared, arena));
      }
    }
    if (purpose == Purpose::train) gradient = arena.alloc("activations", "gradient", config.dtype, stream_shape);
  }

  // The residual stream that enters block `l` of a chunk: from the embedding, the previous block or the previous chunk.
  const Tensor& block_input(int chunk, size_t l) const {
    const ChunkActivations& acts = chunks[static_cast<size_t>(chunk)];
    if (l > 0) return acts.blocks[l - 1].out;
    return chunk == 0 ? acts.embedded : chunks[static_cast<size_t>(chunk) - 1].blocks.back().out;
  }
};

// Uploads inputs to the device. On a GPU they are copied to two buffers in turn, while the previous micro-batch is
// being computed.
class Uploads {
 public:
  Uploads(const BatchShape& shape, const TensorParallel& tensor, const Context& context) {
    if (context.compute.device().computes_as() == DeviceKind::cuda)
      for (int i = 0; i < 2; ++i) arriving_.emplace_back(shape, tensor, context.arena);
    if (context.copies != nullptr) context.copies->reserve_uploads(arriving_[0].inputs.tokens.size_bytes());
  }

  void upload_batch(const MicroBatch& to, HostBatch from, const Context& context) {
    Stream& compute = context.compute;
    const size_t padded = static_cast<size_t>(to.tokens.numel());
    for (std::vector<int32_t>* ids : {&from.tokens, &from.targets, &from.positions}) {
      CHECK(compute.device().kind == DeviceKind::null || static_cast<int64_t>(ids->size()) == to.rows,
            "a micro-batch has {} tokens, expected {}", ids->size(), to.rows);
      ids->resize(padded, ids == &from.targets ? -1 : 0);  // padding has no targets
    }
    if (context.copies == nullptr) {
      upload(to.tokens, std::move(from.tokens), compute);
      upload(to.targets, std::move(from.targets), compute);
      upload(to.positions, std::move(from.positions), compute);
      return;
    }
    Arriving& next = arriving_[static_cast<size_t>(uploads_++ % 2)];
    Stream& copies = *context.copies;
    auto first_rows = [&](const Tensor& t) { return t.slice(0, to.tokens.shape); };
    copies.wait(next.free);
    upload(first_rows(next.inputs.tokens), std::move(from.tokens), copies);
    upload(first_rows(next.inputs.targets), std::move(from.targets), copies);
    upload(first_rows(next.inputs.positions), std::move(from.positions), copies);
    compute.wait(copies.record());
    copy(to.tokens, first_rows(next.inputs.tokens), compute);
    copy(to.targets, first_rows(next.inputs.targets), compute);
    copy(to.positions, first_rows(next.inputs.positions), compute);
    next.free = compute.record();
  }

 private:
  struct Arriving {
    MicroBatch inputs;
    Event free;
    Arriving(const BatchShape& shape, const TensorParallel& tensor, Arena& arena) : inputs(shape, tensor, arena) {
      free.signal();
    }
  };
  std::vector<Arriving> arriving_;  // of a GPU
  int64_t uploads_ = 0;
};

// The keys and values of the tokens of one sequence so far.
struct KeyValueCache {
  std::vector<Tensor> layers;  // each (T, 2 Hkv D)
  int64_t rows = 0;            // filled

  KeyValueCache(const StepConfig& config, Arena& arena) {
    for (int64_t l = 0; l < config.model.n_layer; ++l)
      layers.push_back(arena.alloc("key-value cache", "keys and values", config.dtype,
                                   {config.batch.T, 2 * config.part().kv_size()}));
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
