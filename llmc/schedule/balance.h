// balance.h: --pp-layout balanced: divides the layers so that the slowest stage is as fast as possible, by PipeDream's
// dynamic programming over the costs of the modules (Narayanan et al. 2019, section 3.1), also in its full form with
// replicated stages. Several chunks per stage, with equal layers, need no dynamic programming.
#pragma once
#include "schedule/stage_partition.h"

namespace llmc {

// The costs of a module for one micro-batch.
struct ModuleCost {
  double seconds = 0;           // forward and backward; T_l in the paper
  double weight_bytes = 0;      // that replicas all-reduce: an fp32 gradient for each weight (contract 12); |w_l|
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

// PipeDream's dynamic programming: A(j, m) is the pipeline of the first j modules on exactly m workers whose slowest
// stage or link is the fastest. It is one stage, or the best pipeline of the first s modules with a last stage added:
//   A(j, m) = min over s < j and m' < m of max(A(s, m - m'), sends(s), T(s -> j, m'))
//   sends(s) = (activation_bytes + gradient_bytes of module s - 1) / link
//   T(i -> j, m) = max(sum of seconds, ring all-reduce of the weights = 2 (m - 1) / m x weight_bytes / link) / m
// since compute and exchanges overlap, and m replicas do m micro-batches for one all-reduce. Without replication
// m' = 1, m is the number of stages, and messages do not count.
//
// Many pipelines have the same slowest stage or link; which of them is the best?
// - Not replicated: the one with the faster second slowest stage, and so on: the descending lists of times are compared
//   lexicographically. Adding the same stage to two lists keeps their order, so the recurrence stays exact.
// - Replicated: the one with the fewest stages. A last pass finds it by counting all times up to the answer as the
//   answer.
// - Still equal: the one with the longest last stage (see even_layers), then the one whose last stage has the fewest
//   replicas.
// A fused multiply-add would change nothing here, so every build finds the same pipeline.
//
// A(j, m) takes n^2 m^2 / 4 steps with replication: too many for thousands of workers. So a pass considers only times
// up to a limit, and skips pipelines that cannot stay below it: modules of t seconds need t / limit workers. The limit
// begins just above perfect balance and rises until there is a pipeline, which is then the best without a limit, too.
class Pipedream {
 public:
  // link: bytes/s between any two workers; none: stages are not replicated
  Pipedream(const ModelCosts& costs, int workers, std::optional<double> link) : workers_(workers), link_(link) {
    modules_.push_back(costs.embedding);
    modules_.insert(modules_.end(), costs.blocks.begin(), costs.blocks.end());
    modules_.push_back(costs.head);
    for (const ModuleCost& c : modules_)
      for (const double x : {c.seconds, c.weight_bytes, c.activation_bytes, c.gradient_bytes})
        CHECK(x >= 0 && std::isfinite(x), "the costs of a layer must be finite and not negative, found {}", x);
    CHECK(!link || *link > 0, "a link of {} bytes/s: expected more than 0", *link);
    const size_t n = modules_.size();
    seconds_.resize(n * (n + 1));
    weight_bytes_.resize(n * (n + 1));
    for (size_t i = 0; i < n; ++i)  // sums start at each run's own first module: equal runs of modules cost the same
      for (size_t j = i; j < n; ++j) {
        seconds_[at(i, j + 1)] = seconds_[at(i, j)] + modules_[j].seconds;
        weight_bytes_[at(i, j + 1)] = weight_bytes_[at(i, j)] + modules_[j].weight_bytes;
      }
  }

  BalancedPipeline solve() {
    const double balance = seconds_[at(0, modules_.size())] / workers_;
    double least = balance;  // that the slowest stage can take; a stage that is not replicated has a module at least
    if (!link_)
      for (const ModuleCost& m : modules_) least = std::max(least, m.seconds);
    if (balance < std::numeric_limits<double>::min()) pass(infinity);
    else
      for (double above = 1.0 / 64; best_.empty() || best_.back().back().replicas == 0; above *= 2)
        pass(least * (1 + above));
    if (link_) pass(floor_ = best_.back().back().slowest);
    return pipeline(workers_);
  }

 private:
  static constexpr double infinity = std::numeric_limits<double>::infinity();

  // Descending times, each with how many stages take it. Lists of equally many are compared as if each were
  // listed singly: where one of them has a time less often, a smaller one follows it.
  using Times = std::vector<std::pair<double, int>>;
  // Smaller is better: the slowest time, then the other times or, where stages are replicated, the number of stages.
  struct Best {
    double slowest = 0;
    int stages = 0;
    Times times = {};  // none where stages are replicated
    size_t start = 0;  // of the last stage
    int replicas = 0;  // of the last stage; 0: no such pipeline
  };

  size_t at(size_t i, size_t j) const { return i * (modules_.size() + 1) + j; }

  double stage_seconds(size_t i, size_t j, int m) const {
    const double all_reduce = m == 1 ? 0 : 2.0 * (m - 1) / m * weight_bytes_[at(i, j)] / *link_;
    return std::max(seconds_[at(i, j)], all_reduce) / m;
  }
  // The messages between modules s - 1 and s.
  double link_seconds(size_t s) const {
    return (modules_[s - 1].activation_bytes + modules_[s - 1].gradient_bytes) / *link_;
  }

  static void add(Times& times, double t) {
    const auto at = std::ranges::find_if(times, [t](const auto& o) { return o.first <= t; });
    if (at != times.end() && at->first == t) ++at->second;
    else times.insert(at, {t, 1});
  }

  // The least number of workers for modules [i, j); rounding may make it one too low.
  int needed(size_t i, size_t j) const {
    return limit_ == 0 ? 0 : static_cast<int>(std::min<double>(workers_, seconds_[at(i, j)] / limit_));
  }

  void pass(double limit) {
    limit_ = limit;
    const size_t n = modules_.size();
    best_.assign(n + 1, std::vector<Best>(static_cast<size_t>(workers_) + 1));
    fewest_.assign(n + 1, 1);
    most_.assign(n + 1, workers_);
    for (size_t j = 1; j <= n; ++j) {
      fewest_[j] = std::max(1, needed(0, j));
      if (j < n) most_[j] = workers_ - std::max(1, needed(j, n));
    }
    for (size_t j = 1; j <= n; ++j)
      for (int m = fewest_[j]; m <= most_[j]; ++m) best_[j][static_cast<size_t>(m)] = best_of(m, j);
  }

  // Without replication. The last stage grows as it begins earlier, and from some point on takes longer than the best.
  Best best_of_single(int m, size_t j) const {
    if (m == 1) {
      const double all = stage_seconds(0, j, 1);
      return all > limit_ ? Best{} : Best{all, 1, {{all, 1}}, 0, 1};
    }
    Best best;
    for (size_t s = j; s-- > 1;) {
      const double stage = stage_seconds(s, j, 1);
      if (stage > (best.replicas > 0 ? best.slowest : limit_)) break;
      const Best& before = best_[s][static_cast<size_t>(m - 1)];
      if (before.replicas == 0 || (best.replicas > 0 && before.slowest > best.slowest)) continue;
      Times times = before.times;
      add(times, stage);
      if (best.replicas == 0 || times <= best.times) best = {times[0].first, m, std::move(times), s, 1};
    }
    return best;
  }

  Best best_of(int m, size_t j) const {
    if (!link_) return best_of_single(m, j);
    Best best;
    if (const double stage = std::max(floor_, stage_seconds(0, j, m)); stage <= limit_) best = {stage, 1, {}, 0, m};
    for (size_t s = 1; s < j; ++s) {
      const int first = std::max({1, needed(s, j), m - most_[s]});
      const int last = std::min(m - fewest_[s], m - 1);
      if (first > last) continue;
      const double link = link_seconds(s);
      for (int replicas = first; replicas <= last; ++replicas) {
        const Best& before = best_[s][static_cast<size_t>(m - replicas)];
        const double most = best.replicas == 0 ? limit_ : best.slowest, others = std::max(before.slowest, link);
        if (before.replicas == 0 || others > most) continue;
        const double slowest = std::max(others, stage_seconds(s, j, replicas));
        if (slowest > most) continue;
        const int stages = before.stages + 1;
        if (best.replicas == 0 || std::pair(slowest, stages) < std::pair(best.slowest, best.stages))
          best = {slowest, stages, {}, s, replicas};
      }
    }
    return best;
  }

  BalancedPipeline pipeline(int m) const {
    BalancedPipeline made;
    size_t j = modules_.size();
    made.slowest = best_[j][static_cast<size_t>(m)].slowest;
    while (j > 0) {
      const Best& best = best_[j][static_cast<size_t>(m)];
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
  std::optional<double> link_;
  double limit_ = 0, floor_ = 0;    // slower times are left out; faster ones count as floor_
  std::vector<int> fewest_, most_;  // workers that the first j modules can have in a pipeline within the limit
  std::vector<ModuleCost> modules_;
  std::vector<double> seconds_, weight_bytes_;  // of modules [i, j), by at(i, j)
  std::vector<std::vector<Best>> best_;         // A(j, m), by [j][m]
};

}  // namespace detail

// The pipeline of exactly `stages` stages, none replicated, whose slowest stage is the fastest. The first and the last
// stage may have no layers, only the embedding or the head.
inline BalancedPipeline balanced_stages(const ModelCosts& costs, int stages) {
  const int64_t modules = static_cast<int64_t>(costs.blocks.size()) + 2;
  CHECK(stages >= 1 && stages <= modules,
        "--pp-layout balanced: the embedding, {} layers and the head cannot be divided into {} stages; use at most {}",
        costs.blocks.size(), stages, modules);
  return detail::Pipedream(costs, stages, std::nullopt).solve();
}

// The fastest pipeline that uses all `workers`, with any number of stages and of replicas of each. link: bytes/s
// between any two workers. For 128 modules this takes up to a second with 256 workers, seconds to minutes with
// thousands: then let a worker be a group of n data-parallel ranks (a level in the paper), n times as fast.
inline BalancedPipeline balanced_replicated_stages(const ModelCosts& costs, int workers, double link) {
  CHECK(workers >= 1, "{} workers, expected at least 1", workers);
  return detail::Pipedream(costs, workers, link).solve();
}

// The number of layers of each chunk, for any placement of chunks on stages: stage stage_of[c] runs chunk c, and all
// stages run equally many chunks. With one chunk per stage: balanced_stages(). Otherwise all layers must cost the same,
// and each in turn goes to the stage with the least work, there to the chunk with the least: no other choice makes the
// slowest stage faster. Every chunk has a layer, except the first and the last, which have the embedding and the head.
// Messages do not count: they are equally large between any two layers.
inline std::vector<int64_t> balanced_layers(const ModelCosts& costs, const std::vector<int>& stage_of) {
  const size_t chunks = stage_of.size(), stages = static_cast<size_t>(*std::ranges::max_element(stage_of)) + 1;
  std::vector<int64_t> layers(chunks);
  if (chunks == stages) {
    const BalancedPipeline found = balanced_stages(costs, static_cast<int>(stages));
    for (size_t s = 0; s < stages; ++s) layers[s] = static_cast<int64_t>(found.stages[s].chunk.layers.size());
    return layers;
  }
  CHECK(costs.blocks.size() + 2 >= chunks,
        "--pp-layout balanced: the embedding, {} layers and the head cannot be divided into {} chunks; use at most {}",
        costs.blocks.size(), chunks, costs.blocks.size() + 2);
  const double layer = costs.blocks.empty() ? 0 : costs.blocks[0].seconds;
  for (const ModuleCost& block : costs.blocks)
    CHECK(block.seconds == layer,
          "--pp-layout balanced: with several chunks a stage, all layers must cost the same, and with experts some do "
          "not: use even, or give their numbers");
  std::vector<double> of_chunk(chunks), of_stage(stages);
  const auto add = [&](size_t c, double seconds) {
    of_chunk[c] += seconds;
    of_stage[static_cast<size_t>(stage_of[c])] += seconds;
  };
  add(0, costs.embedding.seconds);
  add(chunks - 1, costs.head.seconds);
  for (size_t c = 1; c + 1 < chunks; ++c) ++layers[c], add(c, layer);
  for (size_t left = costs.blocks.size() + 2 - chunks; left > 0; --left) {
    size_t least = 0;  // among equal stages the later one: see even_layers()
    for (size_t c = 1; c < chunks; ++c) {
      const auto load = [&](size_t i) {
        const size_t stage = static_cast<size_t>(stage_of[i]);
        return std::tuple(of_stage[stage], -static_cast<double>(stage), of_chunk[i]);
      };
      if (load(c) <= load(least)) least = c;
    }
    ++layers[least], add(least, layer);
  }
  return layers;
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
