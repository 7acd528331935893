// count_costs.h: the cost of each module of a model, counted by the planner, for --pp-layout balanced and for what
// --plan says about it.
#pragma once
#include "run/plan/planner.h"
#include "schedule/balance.h"

namespace llmc {

namespace detail {

// The costs of the embedding, a layer and the head, from a model with this one layer. A pipeline of three stages is
// planned with two micro-batches and with one; costs common to both, such as the update, cancel.
inline std::array<ModuleCost, 3> count_modules(StepConfig step, double flops_per_s) {
  PipelineParallel& pipeline = step.layout.pipeline;
  pipeline = {.schedule = Schedule::one_f_one_b, .stages = 3, .layers = {0, 1, 0}, .slices = pipeline.slices};
  step.generates = false;
  const auto flops_with = [&](int64_t micro_batches) {
    step.micro_batches = micro_batches;
    std::vector<double> flops;
    for (const auto& stage : make_plan(step, Device{}).stages) flops.push_back(stage->flops());
    return flops;
  };
  const std::vector<double> one = flops_with(1), two = flops_with(2);
  const double message =
      static_cast<double>(step.layout.tensor.stream_rows(step.share(step.batch, Purpose::train).rows()) *
                          step.model.n_embd * size_of(step.precision.activations));
  const ParamTable table = part_of(parameter_table(step.model), step.layout.tensor, 0);
  std::array<int64_t, 3> elements = {};
  for (size_t u = 0; u < table.size(); ++u)  // a layer may have two units
    for (const ParamSpec& p : table[u].params) elements[u == 0 ? 0 : u + 1 == table.size() ? 2 : 1] += p.box().numel();
  if (step.model.tied)  // the head's table is the embedding's
    for (const ParamSpec& p : table[0].params) elements[2] += p.name.starts_with("wte") ? p.box().numel() : 0;
  std::array<ModuleCost, 3> modules;
  for (size_t m = 0; m < 3; ++m)
    modules[m] = {.seconds = (two[m] - one[m]) / flops_per_s,
                  .weight_bytes = static_cast<double>(elements[m] * size_of(step.precision.state)),
                  .activation_bytes = m == 2 ? 0 : message,
                  .gradient_bytes = m == 2 ? 0 : message};
  return modules;
}

}  // namespace detail

// The costs of one micro-batch, forward and backward, on a rank: the flops of its ops, at `flops_per_s`; with experts,
// as if all ranks had equally many rows.
inline ModelCosts count_costs(const StepConfig& step, double flops_per_s = 1e12) {
  std::array<std::optional<std::array<ModuleCost, 3>>, 2> kinds;  // with a dense layer, and with a sparse one
  std::vector<ModuleCost> blocks;
  for (int64_t l = 0; l < step.model.n_layer; ++l) {
    auto& modules = kinds[step.model.is_sparse(l)];
    if (!modules) {
      StepConfig one = step;
      one.model.n_layer = 1;
      one.model.experts.every = 1;
      one.model.experts.dense_layers = {};
      if (!step.model.is_sparse(l)) one.model.experts.dense_layers = {0};
      modules = detail::count_modules(one, flops_per_s);
    }
    blocks.push_back((*modules)[1]);
  }
  const auto& any = kinds[0] ? *kinds[0] : *kinds[1];
  return {any[0], std::move(blocks), any[2]};
}

}  // namespace llmc
