// The cost of layers with experts, and how --pp-layout balanced therefore divides a model that has some.
#include "catch2.h"
#include "run/plan/planner.h"
#include "run/selftest/layouts.h"

using namespace llmc;

TEST_CASE("layers with experts cost what a token uses of them, and --pp-layout balanced counts them", "[pp][ep]") {
  ModelConfig model = selftest::Model{"qwen2_moe", false, DType::fp32, 2, 2}.config();
  model.n_layer = 7;
  model.vocab_size = 64;
  model.experts.dense_layers = {0, 1, 3};
  StepConfig step{.model = model, .batch = {2, 16}, .micro_batches = 6};
  step.layout.pipeline.stages = 2;
  const ModelCosts costs = count_costs(step, 1);
  const double rows = static_cast<double>(step.batch.rows());
  const ParamTable table = parameter_table(model);
  const std::vector<LayerUnits> units = layer_units(model);
  const Experts& e = model.experts;
  const double attention = 6 * 2 * rows * static_cast<double>(step.batch.T * model.q_size());
  for (size_t l = 0; l < 7; ++l) {
    INFO("layer " << l);
    const bool is_sparse = units[l].experts.has_value();
    REQUIRE(is_sparse == (l != 0 && l != 1 && l != 3));
    const int64_t used =
        count_parameters({table[units[l].block]}) + (is_sparse ? 3 * e.per_token * e.width * model.n_embd : 0);
    const double products = 6 * rows * static_cast<double>(used), counted = costs.blocks[l].seconds;
    REQUIRE((0.95 * products < counted && counted < products + attention));
    int64_t weights = count_parameters({table[units[l].block]});
    if (is_sparse) weights += count_parameters({table[*units[l].experts]});
    REQUIRE(costs.blocks[l].weight_bytes == 4 * static_cast<double>(weights));
  }
  REQUIRE(costs.head.seconds == Catch::Approx(6 * rows * static_cast<double>(model.n_embd) * 128).epsilon(1e-3));
  const auto most_flops = [&](const std::vector<int64_t>& layers) {
    step.layout.pipeline.layers = layers;
    const Plan plan = make_plan(step, Device{});
    return std::max(plan.of_stage(0).flops(), plan.of_stage(1).flops());
  };
  const double balanced = most_flops(balanced_layers(costs, {0, 1}));
  double least = balanced;
  for (int64_t first = 1; first < 7; ++first) least = std::min(least, most_flops({first, 7 - first}));
  REQUIRE(balanced == Catch::Approx(least).epsilon(1e-3));
  REQUIRE(balanced < 0.95 * most_flops({4, 3}));
}

TEST_CASE("dense layers and layers with experts keep each only what they need", "[pp][ep]") {
  ModelConfig model = selftest::Model{"qwen2_moe", false, DType::fp32, 2, 2}.config();
  model.n_layer = 7;
  model.experts.dense_layers = {0, 1, 3};
  constexpr int64_t micro_batches = 5;
  for (const Schedule schedule : {Schedule::gpipe, Schedule::one_f_one_b, Schedule::zb_h1})
    for (const Recompute recompute : all_values<Recompute>()) {
      INFO(name_of(schedule) << ", " << name_of(recompute));
      StepConfig step{.model = model, .batch = {2, 16}, .micro_batches = micro_batches, .recompute = recompute};
      step.generates = false;
      step.layout.pipeline.schedule = schedule;
      const bool in_parts = schedule == Schedule::zb_h1;
      if (in_parts) {
        step.layout.pipeline.stages = 2;
        step.layout.pipeline.layers = {4, 3};
      }
      const Plan plan = make_plan(step, {DeviceKind::cpu, 1});
      for (int stage = 0; stage < step.layout.pipeline.stages; ++stage) {
        auto bytes_of = [&](Layers layers) {
          Arena arena({DeviceKind::null});
          BlockActivations::kept({model, step.batch, layers, {}, step.precision.activations, step.expert_placement()},
                                 recompute, in_parts ? Backward::in_parts : Backward::whole, {}, arena);
          return arena.used();
        };
        const int64_t layers = step.layout.pipeline.stages == 1 ? 7 : (stage == 0 ? 4 : 3), first = stage == 0 ? 0 : 4;
        int64_t dense = 0;
        for (const int64_t l : model.experts.dense_layers) dense += l >= first && l < first + layers;
        const int64_t kept = schedule == Schedule::gpipe ? micro_batches : step.layout.pipeline.stages - stage;
        const int64_t stream = step.batch.rows() * model.n_embd * 4;
        // The inputs of all blocks and the last output, of each micro-batch; but what goes to another stage is kept
        // until it is sent, one at a time.
        const int64_t streams = stage + 1 < step.layout.pipeline.stages ? kept * layers + 1 : kept * (layers + 1);
        int64_t planned = 0;
        for (const MemoryLine& line : (plan.stages.empty() ? plan : *plan.stages[static_cast<size_t>(stage)]).memory)
          if (line.label == "activations" || line.label == "activations of experts") planned += line.bytes;
        if (recompute != Recompute::block)
          REQUIRE(std::max(bytes_of(Layers::dense), bytes_of(Layers::sparse)) < bytes_of(Layers::any));
        REQUIRE(planned == kept * (dense * bytes_of(Layers::dense) + (layers - dense) * bytes_of(Layers::sparse)) +
                               streams * stream);
      }
    }
}
