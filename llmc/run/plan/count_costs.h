// count_costs.h: what each module of a model costs, counted by the planner: for --pp-layout balanced, and for what
// --plan says about it.
#pragma once
#include <algorithm>
#include <optional>
#include <string>
#include <vector>

#include "dist/pipeline/balance.h"
#include "run/planner.h"

namespace llmc {

// Of one micro-batch, forward and backward, on a rank: the flops of its ops, at `flops_per_s`. A pipeline of one layer
// is planned, whose stages are the embedding, the layer and the head, with two micro-batches and with one: what both
// have, such as the update, does not count.
inline ModelCosts count_costs(StepConfig step, double flops_per_s = 1e12) {
  const size_t n_layer = static_cast<size_t>(step.model.n_layer);
  step.model.n_layer = 1;
  step.schedule = Schedule::one_f_one_b;
  step.stages = step.chunks = 3;
  step.layers = {0, 1, 0};
  step.generates = false;
  const auto flops_with = [&](int64_t micro_batches) {
    step.micro_batches = micro_batches;
    std::vector<double> flops;
    for (const auto& stage : make_plan(step, Device{}).stages) {
      flops.push_back(0);
      for (const auto& [name, totals] : stage->step_ops) flops.back() += totals.flops;
    }
    return flops;
  };
  const std::vector<double> one = flops_with(1), two = flops_with(2);
  const double message = static_cast<double>(step.tensor.stream_rows(step.share(step.batch, Purpose::train).rows()) *
                                             step.model.n_embd * size_of(step.dtype));
  const ParamTable table = part_of(parameter_table(step.model), step.tensor, 0);
  const auto module = [&](size_t m) {
    int64_t elements = 0;
    for (const ParamSpec& p : table[m].params) elements += p.box().numel();
    if (m == 2 && step.model.tied)  // its table is the embedding's
      for (const ParamSpec& p : table[0].params) elements += p.name.starts_with("wte") ? p.box().numel() : 0;
    return ModuleCost{.seconds = (two[m] - one[m]) / flops_per_s,
                      .weight_bytes = static_cast<double>(elements * size_of(accumulator_of(step.dtype))),
                      .activation_bytes = m == 2 ? 0 : message,
                      .gradient_bytes = m == 2 ? 0 : message};
  };
  return {module(0), std::vector<ModuleCost>(n_layer, module(1)), module(2)};
}

}  // namespace llmc
