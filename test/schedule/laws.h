// laws.h: what the partitions and schedules of pipelines are compared with.
#pragma once
#include <algorithm>
#include <optional>
#include <vector>

#include "schedule/pipeline.h"
#include "schedule/stage_partition.h"

namespace llmc {

// Contract 15 for layers: the chunks of all stages, in the order of the model, hold each module once and in order.
inline void check_every_layer_once(const std::vector<Chunk>& chunks, int64_t n_layer) {
  int64_t next = 0;
  for (size_t c = 0; c < chunks.size(); ++c) {
    for (const int64_t layer : chunks[c].layers) {
      CHECK(layer == next, "the pipeline does not hold every layer once: chunk {} of {} has layer {}, expected {}", c,
            chunks.size(), layer, next);
      ++next;
    }
    CHECK(chunks[c].has_embedding == (c == 0), "the first chunk, and no other, has the embedding: chunk {} of {} {}", c,
          chunks.size(), c == 0 ? "has not" : "has it too");
    CHECK(chunks[c].has_head == (c + 1 == chunks.size()),
          "the last chunk, and no other, has the head: chunk {} of {} {}", c, chunks.size(),
          chunks[c].has_head ? "has it too" : "has not");
  }
  CHECK(next == n_layer, "the pipeline does not hold every layer once: {} in {} chunks, but the model has {}", next,
        chunks.size(), n_layer);
}

// The most passes (a micro-batch or slice in a chunk) that a stage has at the same time between their forward and their
// backward or its input part. None: there is no law, only the lists.
inline std::optional<int64_t> activations_law(const Pipeline& p, int stage) {
  const int64_t behind = p.stages - stage;  // stages from this one to the last
  switch (p.schedule) {
    case Schedule::gpipe: return p.passes();
    case Schedule::one_f_one_b: return std::min(p.passes(), behind + p.slices - 1);
    case Schedule::zb_h1:
    case Schedule::pipedream: return std::min(p.micro_batches, behind);
    default: return std::nullopt;
  }
}

}  // namespace llmc
