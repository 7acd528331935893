// pipeline_layouts.h: steps of pipelines, and what they are compared with: shared by the tests of pipelines.
#pragma once
#include <cmath>
#include <string>

#include "catch2.h"
#include "parallel/on_ranks.h"
#include "run/selftest/selftest.h"

namespace pipeline_layouts {

using namespace llmc;
using selftest::Distances;
using selftest::Model;
using selftest::Outcome;

struct LayoutCase {
  int pp = 1;
  Schedule schedule = Schedule::one_f_one_b;
  int chunks = 1;  // per stage
  ZeroConfig zero = {};
  int tp = 1, cp = 1;
  ContextAttention attention = ContextAttention::ring;
  bool sequence = true;  // of tp
};
inline std::string to_string(const LayoutCase& l) {
  return formatted("pp {} {} in {} chunks, dp {} x {} stage {} reduce {}, tp {}{}, cp {} {}", l.pp, l.schedule,
                   l.chunks, l.zero.replicas, l.zero.shards, l.zero.stage, l.zero.grad_reduce, l.tp,
                   l.sequence ? " by rows" : "", l.cp, l.attention);
}
// The same layout on one stage.
inline LayoutCase on_one_stage(LayoutCase l) {
  l.pp = l.chunks = 1;
  l.schedule = l.schedule == Schedule::gpipe ? Schedule::gpipe : Schedule::one_f_one_b;
  return l;
}

inline constexpr int64_t sequences = 12;  // of a step

inline StepConfig step_of(const Model& model, const LayoutCase& layout, int64_t n_layer, int64_t batch_size = 2) {
  ModelConfig config = model.config();
  config.n_layer = n_layer;
  StepConfig step{.model = config,
                  .precision = model.dtype,
                  .batch = {batch_size, config.n_positions},
                  .micro_batches = sequences / batch_size / layout.zero.ranks(),
                  .layout = {.zero = layout.zero,
                             .tensor = tensor_parallel(config, layout.tp, layout.sequence),
                             .pipeline = {layout.schedule, layout.pp, layout.chunks}}};
  step.layout.context = ContextParallel{layout.cp, layout.attention};
  step.layout.zero.shards *= layout.cp;
  step.documents = layout.cp > 1 ? Documents::apart : Documents::together;
  return step;
}

inline Outcome run(const StepConfig& step, const Hooks& hooks = poison_hooks) {
  return selftest::run_layout(step, {}, {.hooks = hooks});
}

inline bool bitwise(const Outcome& a, const Outcome& b) {
  return a.losses == b.losses && a.norms == b.norms && a.gradients == b.gradients && a.weights == b.weights &&
         a.optimizer_state == b.optimizer_state;
}

// Untied models are bitwise what one stage computes; a tied table's gradient has two parts, which are added in another
// order (contracts 4 and 5). With bf16 weights, the update that follows rounds a few of them the other way, by up to
// 2^-8 of their size: at most one in a hundred.
inline bool agrees(const Outcome& found, const Outcome& one_stage, bool tied, DType weights = DType::fp32) {
  if (!tied) return bitwise(found, one_stage);
  const Distances d(found, one_stage);
  const double of_weights = weights == DType::bf16 ? 0x1p-8 * std::sqrt(0.01) : 1e-5;
  return d.loss <= 1e-6 && d.norm <= 1e-5 && d.gradients <= 1e-5 && d.weights <= of_weights;
}
inline void require_agrees(const Outcome& found, const Outcome& one_stage, bool tied, DType weights = DType::fp32) {
  const Distances d(found, one_stage);
  INFO(formatted("loss {:.1e}, norm {:.1e}, gradients {:.1e}, weights {:.1e}", d.loss, d.norm, d.gradients, d.weights));
  REQUIRE(found.fault == "");
  REQUIRE(agrees(found, one_stage, tied, weights));
}

}  // namespace pipeline_layouts
