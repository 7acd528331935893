// Models with experts on GPUs: layouts against one rank on the CPU, with ranks that share a GPU and with NCCL between
// GPUs, in one round of exchanged rows or several; routers that send all rows to one expert or one rank; in every order
// of streams. test_trainer.cpp tests that every wait is needed.
#include <optional>

#include "cuda/trainer/trainer_test.h"
#include "expert_steps.h"

using namespace llmc;
using expert_steps::LayoutCase;
using selftest::Outcome;

namespace {

const selftest::Machine gpu_without_graphs{.device = {.kind = DeviceKind::cuda, .graphs = false}};

// All layers have experts, Qwen2's a shared one as well.
ModelConfig model_of(const char* family, int64_t layers = 1) {
  ModelConfig model = selftest::Model{family, false, DType::fp32, 4, 2}.config();
  model.n_layer = layers;
  model.n_ffn = 12;
  model.experts.count = 4;
  model.experts.width = 6;
  model.experts.dense_layers = {};
  if (model.experts.shared > 0) model.experts.shared = 10;
  model.vocab_size = 31;
  return model;
}

// Two micro-batches of two sequences of 8 tokens.
StepConfig step_of(const ModelConfig& model, const LayoutCase& l, const ExpertOptions& options,
                   DType dtype = DType::fp32) {
  return expert_steps::step_of(model, l, options, dtype, {l.dp == 4 ? 1 : 2, 8}, l.dp == 1 ? 2 : 1);
}

const ExpertOptions dropless = {.aux_loss = 0.05, .z_loss = 0.01},
                    dropping = {.aux_loss = 0.05, .z_loss = 0.01, .capacity_factor = 0.8};

Outcome one_step(const StepConfig& step, const selftest::Machine& machine = {}) {
  return selftest::run_layout(step, machine, {}, 1);
}

// Ranks that share one GPU, and GPUs of their own if there are as many.
std::vector<selftest::Machine> machines_for(int ranks) {
  std::vector<selftest::Machine> machines = {gpu};
  if (built_with_nccl && visible_gpus().count >= ranks) machines.push_back(own_gpus(ranks));
  return machines;
}

void compare(const char* family, const ExpertOptions& options, const LayoutCase& layout,
             const std::vector<selftest::Machine>& machines) {
  const ModelConfig model = model_of(family, layout.pp);
  const Outcome alone = one_step(step_of(model, {}, options));
  for (const selftest::Machine& machine : machines) {
    CAPTURE(family, options.capacity_factor.has_value(), to_string(layout), name_of(machine.backend));
    require_close(one_step(step_of(model, layout, options), machine), alone);
  }
}

}  // namespace

TEST_CASE("a model with experts on a GPU matches the CPU, with graphs and without", "[ep][cuda][trainer]") {
  const auto [family, options] = GENERATE(std::pair{"qwen2_moe", dropless}, std::pair{"mixtral", dropping});
  CAPTURE(family);
  const StepConfig step = step_of(model_of(family), {}, options),
                   narrow = step_of(model_of(family), {}, options, DType::bf16);
  const Outcome fp32 = selftest::run_layout(step);
  for (const StepConfig& config : {step, narrow}) {
    const Outcome outcome = selftest::run_layout(config, gpu);
    if (config.precision.weights == DType::fp32) require_close(outcome, fp32);
    else require_as_good(outcome, selftest::run_layout(config), fp32);
    if (config.precision.weights == DType::fp32 || options.capacity_factor) continue;
    REQUIRE(same(selftest::run_layout(config, gpu_without_graphs), outcome));
    for (const Recompute recompute : {Recompute::norm, Recompute::block}) {
      StepConfig again = config;
      again.recompute = recompute;
      REQUIRE(same(selftest::run_layout(again, gpu), outcome));  // contract 11
    }
  }
}

TEST_CASE("experts on GPUs match one rank on the CPU in every layout", "[ep][cuda][trainer]") {
#ifndef __CUDACC__
  const Gpus gpus(4);
#endif
  SECTION("data parallelism, stage 3") {
    compare("mixtral", dropless, {.dp = 2, .stage = 3}, {machines_for(2).back()});
  }
  SECTION("tensor parallelism") { compare("qwen2_moe", dropless, {.tp = 2}, {machines_for(2).back()}); }
  SECTION("context parallelism") { compare("olmoe", dropping, {.cp = 2}, {machines_for(2).back()}); }
  SECTION("ep 2") { compare("qwen2_moe", dropless, {.dp = 2, .ep = 2}, {gpu}); }
  SECTION("ep 2, several rounds") {
    compare("mixtral", dropless, {.dp = 2, .ep = 2, .imbalance = 0.4}, {machines_for(2).back()});
  }
  SECTION("ep 4, a capacity: rows with padding") {
    compare("mixtral", dropping, {.dp = 4, .ep = 4, .recompute = Recompute::block}, {machines_for(4).back()});
  }
  SECTION("ep 4 over tp and cp, a capacity, several rounds") {
    compare("qwen2_moe", dropping, {.tp = 2, .cp = 2, .ep = 4, .imbalance = 0.4}, {machines_for(4).back()});
  }
}

TEST_CASE("experts on GPUs: stages, schedules and recomputation change no bit", "[ep][cuda][long][trainer]") {
#ifndef __CUDACC__
  const Gpus gpus(4);
#endif
  const int ep = GENERATE(1, 2);
  const DType dtype = ep == 1 ? DType::fp32 : DType::bf16;
  const ModelConfig model = model_of("qwen2_moe", 2);
  const selftest::Machine machine = machines_for(4).back();
  auto step = [&](LayoutCase layout) {
    layout.dp = layout.ep = ep;
    layout.imbalance = 0.4;
    return step_of(model, layout, dropping, dtype);
  };
  selftest::Machine two = machine;
  two.gpus = std::min(machine.gpus, ep);
  const Outcome plain = one_step(step({}), two);
  REQUIRE(plain.fault == "");
  REQUIRE(same(one_step(step({.recompute = Recompute::norm}), two), plain));
  two.gpus = std::min(machine.gpus, 2 * ep);
  REQUIRE(same(one_step(step({.pp = 2, .schedule = Schedule::zb_h1}), two), plain));
  two.gpus = std::min(machine.gpus, 2);
  if (ep > 1) REQUIRE(same(one_step(step({.stage = 3, .recompute = Recompute::block}), two), plain));
}

TEST_CASE("on GPUs all rows may go to one expert, or to the experts of one rank, and an expert may get none",
          "[ep][cuda][trainer]") {
#ifndef __CUDACC__
  const Gpus gpus(4);
#endif
  struct Routes {
    const char* what;
    int64_t per_token;
    std::vector<int64_t> wanted;  // experts
    double largest;               // share of an expert, times their number
  };
  const Routes routes = GENERATE(Routes{"one expert", 1, {1}, 4}, Routes{"one rank", 2, {2, 3}, 2},
                                 Routes{"none to one expert", 3, {0, 1, 3}, 4. / 3});
  ModelConfig model = model_of("qwen3_moe");
  model.experts.per_token = routes.per_token;
  std::optional<StepResult> alone;
  for (const auto& [layout, machine] :
       {std::pair(LayoutCase{}, selftest::Machine()),
        {{.dp = 2, .ep = 2}, machines_for(2).back()},
        {{.dp = 2, .stage = 2, .tp = 2, .ep = 4, .recompute = Recompute::block}, machines_for(4).back()}}) {
    CAPTURE(routes.what, to_string(layout));
    const StepConfig step = step_of(model, layout, {.bias_rate = 1e-4});
    std::vector<float> biases(4, 0);
    for (const int64_t e : routes.wanted) biases[static_cast<size_t>(e)] = 10;
    std::optional<StepResult> result;
    const Plan plan = make_plan(step, machine.device);
    World world(step.layout.mesh(), machine.backend, poison_hooks);
    run_ranks(world, [&](int rank) {
      Run run(step, plan, machine.of_rank(rank), world, rank);
      init_weights(run.trainer.state(), 42, run.stream);
      run.trainer.set_expert_biases(biases);
      const StepResult r = run.trainer.step(
          [&](int64_t m) { return selftest::read_batch(step, run.groups.reader(), m); },
          {.lr = 1e-2f, .beta1 = 0.9f, .beta2 = 0.95f, .eps = 1e-2f, .weight_decay = 0.1f, .step = 1}, {.max_norm = 1});
      if (rank == 0) result = r;
    });
    if (!alone) alone = result;
    REQUIRE(result->finite());
    REQUIRE(std::abs(result->loss / alone->loss - 1) < 1e-6);
    REQUIRE(std::abs(result->grad_norm / alone->grad_norm - 1) < 1e-5);
    REQUIRE(result->experts->largest == Approx(routes.largest));
    REQUIRE(result->experts->smallest == 0);
  }
}

#ifndef __CUDACC__

// Of a smaller model test_trainer.cpp's search for waits finds it, too.
TEST_CASE("experts on GPUs: no order of streams changes a bit", "[ep][cuda][long][trainer]") {
  const Gpus gpus(2);
  const StepConfig step = step_of(model_of("qwen2_moe"), {.dp = 2, .stage = 3, .ep = 2, .imbalance = 0.4}, dropless);
  const Outcome plain = one_step(step, own_gpus(2));
  REQUIRE(plain.fault == "");
  const cuda_on_cpu::Restored restored;
  cuda_on_cpu::set_hosts_first(true);
  using cuda_on_cpu::Order;
  for (const cuda_on_cpu::Schedule& schedule :
       {cuda_on_cpu::Schedule{Order::random, {}, 1}, {Order::random, {}, 2}, {Order::reverse, {}, 0}}) {
    CAPTURE(cuda_on_cpu::to_string(schedule));
    cuda_on_cpu::set_schedule(schedule);
    REQUIRE(same(one_step(step, own_gpus(2)), plain));
  }
}

#endif
