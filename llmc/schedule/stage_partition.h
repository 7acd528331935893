// stage_partition.h: which layers a stage of the pipeline has: pure functions that return printable values. `even`
// spreads the layers and their remainder; a list is checked; `balanced` is in balance.h. A model with L layers has L +
// 2 modules, in this order: the embedding, the blocks and the head.
//
//   10 layers, 4 stages, even:   | embedding, 0 1 | 2 3 4 | 5 6 7 | 8 9, head |
//
// A stage may run several chunks (interleaved, zb-v); then each run of layers is a chunk, in the order of the model. In
// every case each layer is in exactly one chunk: a remainder is spread, never dropped.
#pragma once
#include "core/words.h"
#include "schedule/actions.h"

namespace llmc {

enum class LayoutKind : uint8_t { even, balanced, list };

struct PipelineLayout {
  LayoutKind kind = LayoutKind::even;
  std::vector<int64_t> layers;  // list: the number of layers of each chunk
};

inline std::string name_of(const PipelineLayout& layout) {
  if (layout.kind == LayoutKind::even) return "even";
  if (layout.kind == LayoutKind::balanced) return "balanced";
  std::string name;
  for (const int64_t n : layout.layers) name += (name.empty() ? "" : ",") + std::to_string(n);
  return name;
}

// "even", "balanced", or "8,10,10,8". listed_layers() checks whether a list fits the model.
inline PipelineLayout pipeline_layout_from_name(const std::string& name) {
  if (name == "even") return {LayoutKind::even, {}};
  if (name == "balanced") return {LayoutKind::balanced, {}};
  PipelineLayout layout{LayoutKind::list, {}};
  for (const std::string& number : split(name, ',')) {
    const int64_t n = number_from<int64_t>(number).value_or(-1);
    CHECK(n >= 0,
          "--pp-layout {}: \"{}\" is not a number of layers; expected even, balanced, or the layers of each stage, as "
          "in 8,10,10,8",
          shown(name), shown(number));
    layout.layers.push_back(n);
  }
  return layout;
}

// The number of layers of each chunk, from a list, if it fits: one number for each chunk, which add up to the model's
// layers. A chunk may be without layers, 0, only if it has the embedding or the head.
inline std::vector<int64_t> listed_layers(const std::vector<int64_t>& layers, int64_t n_layer, int stages,
                                          int chunks_per_stage = 1) {
  const std::string option = "--pp-layout " + name_of(PipelineLayout{LayoutKind::list, layers});
  const size_t chunks = static_cast<size_t>(stages) * static_cast<size_t>(chunks_per_stage);
  CHECK(layers.size() == chunks, "{}: found {} numbers, expected {}: one for each {}", option, layers.size(), chunks,
        chunks_per_stage == 1
            ? formatted("of the {} stages (--pp {})", stages, stages)
            : formatted("chunk, in the order of the model (--pp {} x --pp-chunks {})", stages, chunks_per_stage));
  int64_t sum = 0;
  for (size_t c = 0; c < chunks; ++c) {
    CHECK(layers[c] >= 0 && layers[c] <= n_layer, "{}: found {} layers for one {}, but the model has {}", option,
          layers[c], chunks_per_stage == 1 ? "stage" : "chunk", n_layer);
    CHECK(layers[c] > 0 || c == 0 || c + 1 == chunks,
          "{}: number {} is 0; only the first, which has the embedding, and the last, which has the head, may be "
          "without layers",
          option, c + 1);
    sum += layers[c];
  }
  CHECK(sum == n_layer, "{}: the numbers add up to {}, but the model has {} layers: {} too {}", option, sum, n_layer,
        std::abs(n_layer - sum), sum < n_layer ? "few" : "many");
  return layers;
}

// The number of layers of each chunk, spread evenly over chunks and over stages: the chunks differ by at most one
// layer, and so do the sums of the stages. stage_of[c]: the stage that runs chunk c; all stages run equally many.
//
// One layer more goes first to stages with neither embedding nor head, then to the stage with the embedding, whose
// lookup is cheap, last to the stage with the head. Among equals the later stage comes first: in 1F1B stage s of P
// keeps the activations of P - s micro-batches, so a layer costs less memory on a later stage.
inline std::vector<int64_t> even_layers(int64_t n_layer, const std::vector<int>& stage_of) {
  const int chunks = static_cast<int>(stage_of.size());
  CHECK(chunks > 0);
  const int stages = *std::max_element(stage_of.begin(), stage_of.end()) + 1;
  CHECK(chunks <= n_layer,
        "--pp {}{}: {} layers cannot be spread over {} {}: each needs at least one; use at most {}{}", stages,
        chunks == stages ? "" : formatted(" x --pp-chunks {}", chunks / stages), n_layer, chunks,
        chunks == stages ? "stages" : "chunks", n_layer,
        n_layer + 2 < chunks ? "" : ", or a list whose first or last number is 0 (--pp-layout)");

  const auto has = [&](int c) { return (c == 0 ? 1 : 0) + (c == chunks - 1 ? 2 : 0); };
  std::vector<int> stage_has(static_cast<size_t>(stages)), ranked(static_cast<size_t>(stages));
  for (int c = 0; c < chunks; ++c) stage_has[static_cast<size_t>(stage_of[static_cast<size_t>(c)])] += has(c);

  std::vector<int> order(static_cast<size_t>(chunks));
  std::iota(order.rbegin(), order.rend(), 0);
  std::stable_sort(order.begin(), order.end(), [&](int a, int b) { return has(a) < has(b); });
  // A stage gets its second additional layer only after every other stage has its first. Sorted by: chunks before on
  // this stage, what the stage has (embedding, head), -stage, chunk.
  std::vector<std::tuple<int, int, int, int>> turns;
  for (const int c : order) {
    const int stage = stage_of[static_cast<size_t>(c)];
    turns.emplace_back(ranked[static_cast<size_t>(stage)]++, stage_has[static_cast<size_t>(stage)], -stage, c);
  }
  for (const int n : ranked) CHECK(n == chunks / stages && chunks % stages == 0);
  std::sort(turns.begin(), turns.end());

  std::vector<int64_t> layers(static_cast<size_t>(chunks), n_layer / chunks);
  for (size_t i = 0; i < static_cast<size_t>(n_layer % chunks); ++i)
    ++layers[static_cast<size_t>(std::get<3>(turns[i]))];
  return layers;
}

inline std::vector<Chunk> chunks_of(const std::vector<int64_t>& layers) {
  std::vector<Chunk> chunks(layers.size());
  int64_t next = 0;
  for (size_t c = 0; c < chunks.size(); ++c) {
    chunks[c].layers.resize(static_cast<size_t>(layers[c]));
    std::iota(chunks[c].layers.begin(), chunks[c].layers.end(), next);
    next += layers[c];
  }
  chunks.front().has_embedding = chunks.back().has_head = true;
  return chunks;
}

}  // namespace llmc
