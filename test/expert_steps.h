// expert_steps.h: a step of a model with experts in a layout: shared by the tests of training on CPUs and on GPUs.
#pragma once
#include <string>

#include "run/selftest/selftest.h"

namespace expert_steps {

using namespace llmc;

struct LayoutCase {
  int dp = 1, stage = 0, tp = 1, cp = 1, ep = 1, pp = 1;
  Schedule schedule = Schedule::one_f_one_b;
  Recompute recompute = Recompute::none;
  double imbalance = 1;
};
inline std::string to_string(const LayoutCase& l) {
  return formatted("dp {} stage {}, tp {}, cp {}, ep {}, pp {} {}, recompute {}, imbalance {}", l.dp, l.stage, l.tp,
                   l.cp, l.ep, l.pp, l.schedule, name_of(l.recompute), l.imbalance);
}

// batch: one micro-batch; micro_batches: per data-parallel rank
inline StepConfig step_of(const ModelConfig& model, const LayoutCase& l, const ExpertOptions& options, DType dtype,
                          const BatchShape& batch, int64_t micro_batches) {
  StepConfig step{.model = model,
                  .precision = dtype,
                  .batch = batch,
                  .micro_batches = micro_batches,
                  .recompute = l.recompute,
                  .layout = {.zero = {.shards = l.dp * l.cp},
                             .tensor = tensor_parallel(model, l.tp),
                             .pipeline = {l.schedule, l.pp, l.schedule == Schedule::zb_v ? 2 : 1}}};
  step.layout.zero.set_stage(l.stage);
  step.layout.context = ContextParallel{l.cp};
  step.layout.expert = expert_parallel(model, l.ep);
  step.experts = options;
  step.experts.imbalance = l.imbalance;
  return step;
}

}  // namespace expert_steps
