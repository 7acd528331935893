// stage_partition.h: which layers a stage of the pipeline has, as pure functions to values that can be printed. `even`
// spreads the layers and their remainder; a list is checked; `balanced` is PipeDream's dynamic programming over what
// each module costs (Narayanan et al. 2019, section 3.1). A model with L layers has L + 2 modules, in this order: the
// embedding, the blocks and the head.
//
//   10 layers, 4 stages, even:   | embedding, 0 1 | 2 3 4 | 5 6 7 | 8 9, head |
//
// A stage may run several chunks (interleaved, zb-v); then the runs of layers are those of chunks, in the order of the
// model. Whatever the way, every layer is in exactly one chunk: a remainder is spread, never dropped.
#pragma once
#include <algorithm>
#include <charconv>
#include <cmath>
#include <cstdint>
#include <functional>
#include <limits>
#include <numeric>
#include <string>
#include <tuple>
#include <vector>

#include "core/check.h"
#include "dist/schedule.h"

namespace llmc {

// ---- --pp-layout ----------------------------------------------------------------------------------------------------

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

// "even", "balanced", or "8,10,10,8". Whether a list fits the model is for listed_layers().
inline PipelineLayout pipeline_layout_from_name(const std::string& name) {
  if (name == "even") return {LayoutKind::even, {}};
  if (name == "balanced") return {LayoutKind::balanced, {}};
  PipelineLayout layout{LayoutKind::list, {}};
  for (size_t at = 0; at <= name.size();) {
    const size_t comma = std::min(name.find(',', at), name.size());
    const char *begin = name.data() + at, *end = name.data() + comma;
    int64_t n = 0;
    const auto [parsed, error] = std::from_chars(begin, end, n);
    CHECK(begin != end && parsed == end && error == std::errc{} && n >= 0,
          "--pp-layout {}: \"{}\" is not a number of layers; expected even, balanced, or the layers of each stage, as "
          "in 8,10,10,8",
          shown(name), shown(name.substr(at, comma - at)));
    layout.layers.push_back(n);
    at = comma + 1;
  }
  return layout;
}

// The layers of each chunk by a list, if it fits: one number for each chunk, which together are the model's layers. A
// chunk without layers has a purpose only if it has the embedding or the head: so only the first and the last may be 0.
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

// ---- even -----------------------------------------------------------------------------------------------------------

// The layers of each chunk, spread as evenly as possible over chunks and over stages: the chunks differ by at most one
// layer, and so do the sums of the stages. stage_of[c]: the stage that runs chunk c; every stage runs as many chunks.
//
// Who has one more: first the stages with neither embedding nor head, then that of the embedding, whose lookup is
// cheap, last that of the head. Among equals the later stage, since in 1F1B stage s of P keeps the activations of P - s
// micro-batches: there a layer costs less memory.
inline std::vector<int64_t> even_layers(int64_t n_layer, const std::vector<int>& stage_of) {
  const int chunks = static_cast<int>(stage_of.size());
  CHECK(chunks > 0);
  const int stages = *std::max_element(stage_of.begin(), stage_of.end()) + 1;
  CHECK(chunks <= n_layer,
        "--pp {}{}: {} layers cannot be spread over {} {}, of which each needs one; use at most {}{}", stages,
        chunks == stages ? "" : formatted(" x --pp-chunks {}", chunks / stages), n_layer, chunks,
        chunks == stages ? "stages" : "chunks", n_layer,
        n_layer + 2 < chunks ? "" : ", or a list whose first or last number is 0 (--pp-layout)");

  const auto has = [&](int c) { return (c == 0 ? 1 : 0) + (c == chunks - 1 ? 2 : 0); };
  std::vector<int> stage_has(static_cast<size_t>(stages)), ranked(static_cast<size_t>(stages));
  for (int c = 0; c < chunks; ++c) stage_has[static_cast<size_t>(stage_of[static_cast<size_t>(c)])] += has(c);

  std::vector<int> order(static_cast<size_t>(chunks));
  std::iota(order.rbegin(), order.rend(), 0);
  std::stable_sort(order.begin(), order.end(), [&](int a, int b) { return has(a) < has(b); });
  // A stage has its second additional layer after every other stage has its first.
  std::vector<std::tuple<int, int, int, int>>
      turns;  // how many before on this stage, what the stage has, -stage, chunk
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

// One chunk a stage.
inline std::vector<int64_t> even_layers(int64_t n_layer, int stages) {
  std::vector<int> stage_of(static_cast<size_t>(stages));
  std::iota(stage_of.begin(), stage_of.end(), 0);
  return even_layers(n_layer, stage_of);
}

// ---- Chunks ---------------------------------------------------------------------------------------------------------

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

// ---- balanced -------------------------------------------------------------------------------------------------------

// What a module costs for one micro-batch.
struct ModuleCost {
  double seconds = 0;           // forward and backward; T_l in the paper
  double weight_bytes = 0;      // what replicas all-reduce: as many elements as weights, in fp32 (contract 12); |w_l|
  double activation_bytes = 0;  // sent to the next module in the forward; a_l
  double gradient_bytes = 0;    // sent back for them in the backward; the paper counts a_l again
};

struct ModelCosts {
  ModuleCost embedding;
  std::vector<ModuleCost> blocks;
  ModuleCost head;
};

struct PipelineStage {
  Chunk chunk;
  int replicas = 1;
  double seconds = 0;  // for one micro-batch: a replica's compute or all-reduce, divided by the replicas
};

struct BalancedPipeline {
  std::vector<PipelineStage> stages;
  double slowest = 0;  // seconds between two micro-batches in the steady state: the slowest stage or link
};

namespace detail {

enum class Replicate : uint8_t { no, yes };

// PipeDream's dynamic programming: A(j, m) is the pipeline of the first j modules on exactly m workers whose slowest
// stage or link is the fastest. It is one stage, or the best pipeline of the first s modules with a last stage added:
//   A(j, m) = min over s < j and m' < m of max(A(s, m - m'), sends(s), T(s -> j, m'))
//   sends(s) = (activation_bytes + gradient_bytes of module s - 1) / link
//   T(i -> j, m) = max(sum of seconds, ring all-reduce of the weights = 2 (m - 1) / m x weight_bytes / link) / m
// since compute and exchanges overlap, and m replicas do m micro-batches for one all-reduce. Without replication
// m' = 1, and m is the number of stages.
//
// Many pipelines have the same slowest stage or link; which of them is the best?
// - Not replicated: the one with the faster second slowest stage or link, and so on: the descending lists of times are
//   compared as words are. That order survives the addition of the same stage to both, so the recurrence stays exact.
// - Replicated: the one with the fewest stages. A last pass, in which all times up to the answer count as the answer,
//   finds it.
// - Still equal: the one with the longest last stage (see even_layers), and that with the fewest replicas.
// A fused multiply-add would change nothing here, so every build finds the same.
//
// A(j, m) takes n^2 m^2 / 4 steps with replication: too many for thousands of workers. So a pass takes only times up to
// a limit, and leaves out what cannot stay below it: modules of t seconds need t / limit workers. The limit begins just
// above perfect balance and rises until there is a pipeline; that is then the best without a limit, too.
class Pipedream {
 public:
  // links: bytes/s of the link after each stage, or one for all.
  Pipedream(const ModelCosts& costs, int workers, std::vector<double> links, Replicate replicate)
      : workers_(workers), links_(std::move(links)), replicate_(replicate) {
    modules_.push_back(costs.embedding);
    modules_.insert(modules_.end(), costs.blocks.begin(), costs.blocks.end());
    modules_.push_back(costs.head);
    for (const ModuleCost& c : modules_)
      for (const double x : {c.seconds, c.weight_bytes, c.activation_bytes, c.gradient_bytes})
        CHECK(x >= 0 && std::isfinite(x), "the costs of a layer must be finite and not negative, found {}", x);
    for (const double link : links_) CHECK(link > 0, "a link of {} bytes/s: expected more than 0", link);
    const size_t n = modules_.size();
    seconds_.resize(n * (n + 1));
    weight_bytes_.resize(n * (n + 1));
    for (size_t i = 0; i < n; ++i)  // each added up from its own first module: equal runs of modules cost equally
      for (size_t j = i; j < n; ++j) {
        seconds_[at(i, j + 1)] = seconds_[at(i, j)] + modules_[j].seconds;
        weight_bytes_[at(i, j + 1)] = weight_bytes_[at(i, j)] + modules_[j].weight_bytes;
      }
  }

  BalancedPipeline solve() {
    const double balance = seconds_[at(0, modules_.size())] / workers_;
    if (replicate_ == Replicate::no || balance < std::numeric_limits<double>::min()) {
      pass(infinity);
    } else {
      for (double above = 1.0 / 64; best_.empty() || best_.back().back().replicas == 0; above *= 2)
        pass(balance * (1 + above));
    }
    if (replicate_ == Replicate::yes) pass(floor_ = best_.back().back().order[0]);
    return pipeline(workers_);
  }

 private:
  static constexpr double infinity = std::numeric_limits<double>::infinity();

  struct Best {
    std::vector<double> order;  // smaller is better: the slowest time, then the other times or the number of stages
    size_t start = 0;           // of the last stage
    int replicas = 0;           // of the last stage; 0: no such pipeline
  };

  size_t at(size_t i, size_t j) const { return i * (modules_.size() + 1) + j; }

  double stage_seconds(size_t i, size_t j, int m) const {
    const double all_reduce = m == 1 ? 0 : 2.0 * (m - 1) / m * weight_bytes_[at(i, j)] / links_[0];
    return std::max(seconds_[at(i, j)], all_reduce) / m;
  }
  // The link before module s, after `stage`.
  double link_seconds(size_t s, int stage) const {
    const double link = links_.size() == 1 ? links_[0] : links_[static_cast<size_t>(stage)];
    return (modules_[s - 1].activation_bytes + modules_[s - 1].gradient_bytes) / link;
  }

  void add_stage(std::vector<double>& order, double link, double stage) const {
    if (replicate_ == Replicate::yes) {
      order = {std::max({order[0], link, stage}), order[1] + 1};
    } else {
      for (const double t : {link, stage})
        order.insert(std::upper_bound(order.begin(), order.end(), t, std::greater<>()), t);
    }
  }

  // At least so many workers for modules [i, j); at most one too few by rounding.
  int needed(size_t i, size_t j) const {
    return limit_ == 0 ? 0 : static_cast<int>(std::min<double>(workers_, seconds_[at(i, j)] / limit_));
  }

  void pass(double limit) {
    limit_ = limit;
    const size_t n = modules_.size();
    best_.assign(static_cast<size_t>(workers_) + 1, std::vector<Best>(n + 1));
    fewest_.assign(n + 1, 1);
    most_.assign(n + 1, workers_);
    for (size_t j = 1; j <= n; ++j) {
      fewest_[j] = std::max(1, needed(0, j));
      if (j < n) most_[j] = workers_ - std::max(1, needed(j, n));
    }
    for (size_t j = 1; j <= n; ++j)
      for (int m = fewest_[j]; m <= most_[j]; ++m) best_[static_cast<size_t>(m)][j] = best_of(m, j);
  }

  Best best_of(int m, size_t j) const {
    const bool replicate = replicate_ == Replicate::yes;
    Best best;
    std::vector<double> order;
    if (m == 1 || replicate) {
      const double stage = std::max(floor_, stage_seconds(0, j, m));
      if (stage <= limit_) best = {replicate ? std::vector<double>{stage, 1} : std::vector<double>{stage}, 0, m};
    }
    for (size_t s = 1; s < j; ++s) {
      const int first = std::max({1, needed(s, j), m - most_[s]});
      const int last = std::min(m - fewest_[s], replicate ? m - 1 : 1);
      if (first > last) continue;
      const double link = link_seconds(s, m - 2);
      for (int replicas = first; replicas <= last; ++replicas) {
        const Best& before = best_[static_cast<size_t>(m - replicas)][s];
        if (before.replicas == 0) continue;
        const double stage = stage_seconds(s, j, replicas);
        const double slowest = std::max({before.order[0], link, stage});
        if (slowest > (best.replicas == 0 ? limit_ : best.order[0])) continue;
        order = before.order;
        add_stage(order, link, stage);
        if (best.replicas == 0 || order < best.order) best = {order, s, replicas};
      }
    }
    return best;
  }

  BalancedPipeline pipeline(int m) const {
    BalancedPipeline made;
    size_t j = modules_.size();
    made.slowest = best_[static_cast<size_t>(m)][j].order[0];
    while (j > 0) {
      const Best& best = best_[static_cast<size_t>(m)][j];
      PipelineStage stage{{}, best.replicas, stage_seconds(best.start, j, best.replicas)};
      stage.chunk.has_embedding = best.start == 0;
      stage.chunk.has_head = j == modules_.size();
      for (size_t i = std::max<size_t>(best.start, 1); i < std::min(j, modules_.size() - 1); ++i)
        stage.chunk.layers.push_back(static_cast<int64_t>(i) - 1);
      made.stages.insert(made.stages.begin(), std::move(stage));
      m -= best.replicas;
      j = best.start;
    }
    return made;
  }

  int workers_;
  std::vector<double> links_;
  Replicate replicate_;
  double limit_ = 0, floor_ = 0;    // slower times are left out; faster ones count as floor_
  std::vector<int> fewest_, most_;  // workers that the first j modules may have in a pipeline within the limit
  std::vector<ModuleCost> modules_;
  std::vector<double> seconds_, weight_bytes_;  // of modules [i, j), by at(i, j)
  std::vector<std::vector<Best>> best_;         // A(j, m), by [m][j]
};

}  // namespace detail

// The pipeline of exactly `stages` stages, none replicated, whose slowest stage or link is the fastest. With several
// chunks a stage: of that many chunks (a stage's time is then the sum of its chunks'). The first and the last may have
// no layers, only the embedding or the head. links: bytes/s of the link after each stage but the last, or one for all.
inline BalancedPipeline balanced_stages(const ModelCosts& costs, int stages, const std::vector<double>& links) {
  const int64_t modules = static_cast<int64_t>(costs.blocks.size()) + 2;
  CHECK(stages >= 1 && stages <= modules,
        "--pp-layout balanced: the embedding, {} layers and the head cannot be divided into {} stages; use at most {}",
        costs.blocks.size(), stages, modules);
  CHECK(links.size() == 1 || links.size() + 1 == static_cast<size_t>(stages),
        "{} link speeds, expected one, or one for each of the {} links between {} stages", links.size(), stages - 1,
        stages);
  return detail::Pipedream(costs, stages, links, detail::Replicate::no).solve();
}

// The fastest pipeline of all `workers`, with as many stages, each as often replicated, as it takes. link: bytes/s
// between any two workers. For 128 modules it takes milliseconds to a second with up to 256 workers, seconds to minutes
// with thousands: there let a worker be a group of data-parallel ranks (a level in the paper), so many times as fast.
inline BalancedPipeline balanced_replicated_stages(const ModelCosts& costs, int workers, double link) {
  CHECK(workers >= 1, "{} workers, expected at least 1", workers);
  return detail::Pipedream(costs, workers, {link}, detail::Replicate::yes).solve();
}

// "8,10,10,8", as a list for --pp-layout; a replicated stage as "10x2".
inline std::string name_of(const BalancedPipeline& pipeline) {
  std::string text;
  for (const PipelineStage& stage : pipeline.stages)
    text += formatted("{}{}{}", text.empty() ? "" : ",", stage.chunk.layers.size(),
                      stage.replicas == 1 ? "" : formatted("x{}", stage.replicas));
  return text;
}

}  // namespace llmc
