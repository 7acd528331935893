// Training with experts: gradients against transformers, layouts against one rank, routers that send all rows to one
// expert or to one rank, and their biases.
#include "catch2.h"
#include "expert_steps.h"
#include "helpers.h"

using namespace llmc;
using expert_steps::LayoutCase;
using selftest::Outcome;

namespace {

ModelConfig model_of(const char* family) {
  ModelConfig model = selftest::Model{family, false, DType::fp32, 8, 2}.config();
  model.n_layer = 4;
  model.experts.count = 8;
  return model;
}

StepConfig step_of(const ModelConfig& model, const LayoutCase& l, const ExpertOptions& options,
                   DType dtype = DType::fp32) {
  return expert_steps::step_of(model, l, options, dtype, {3, 20}, 4 / l.dp);
}

const ExpertOptions all_losses = {.aux_loss = 0.05, .z_loss = 0.01};
const ExpertOptions dropping = {.aux_loss = 0.05, .z_loss = 0.01, .capacity_factor = 0.8};

}  // namespace

TEST_CASE("gradients of models with experts are those of PyTorch", "[train][ep]") {
  for (const std::string name : {"mixtral_tiny", "qwen2_moe_tiny", "qwen3_moe_tiny", "olmoe_tiny"}) {
    INFO(name);
    const std::string folder = "test/golden/experts/" + name;
    const nlohmann::json options = nlohmann::json::parse(read_whole(folder + "/trajectory.json"))["options"];
    const int64_t B = options["batch-size"], T = options["seq-len"], all = options["total-batch-size"];
    const StepConfig step{.model = resolve_model(folder, {}), .batch = {B, T}, .micro_batches = all / (B * T)};
    // Theirs, as weights of a model.
    const TempDir theirs_at;
    std::filesystem::copy(folder + "/config.json", theirs_at / "config.json");
    std::filesystem::copy(folder + "/gradients.safetensors", theirs_at / "model.safetensors");
    World world{Mesh()};
    Run run(step, make_plan(step, {DeviceKind::cpu, 1}), {DeviceKind::cpu, 1}, world, 0),
        theirs(step, make_plan(step, {DeviceKind::cpu, 1}), {DeviceKind::cpu, 1}, world, 0);
    load_model(folder, step.model, run.trainer.state(), run.stream);
    load_model(theirs_at.path(), step.model, theirs.trainer.state(), theirs.stream);
    const std::string file = read_whole(folder + "/train.bin");
    auto token = [&](int64_t n) {
      uint16_t value;
      std::memcpy(&value, file.data() + 1024 + 2 * n, 2);
      return static_cast<int32_t>(value);
    };
    run.trainer.accumulate_gradients([&](int64_t micro_batch) {
      HostBatch batch;
      for (int64_t n = micro_batch * B * T; n < (micro_batch + 1) * B * T; ++n) {
        batch.tokens.push_back(token(n));
        batch.targets.push_back(token(n + 1));
        batch.positions.push_back(static_cast<int32_t>(n % T));
      }
      return batch;
    });
    run.stream.synchronize();
    theirs.stream.synchronize();
    std::map<std::string, Tensor> expected;
    for (const StateEntry& e : theirs.trainer.state().state_table())
      if (e.kind == StateKind::weight) expected[e.param->name] = e.tensor;
    size_t compared = 0;
    for (const StateEntry& e : run.trainer.state().gradient_table()) {
      INFO(e.param->name);
      if (e.param->name.ends_with("attn.k.bias")) continue;  // nothing but rounding errors in some channels
      const Tensor& t = expected.at(e.param->name);
      REQUIRE(relative_distance(e.tensor.data<float>(), t.data<float>(), t.numel()) < 1e-5);
      ++compared;
    }
    REQUIRE(compared > 20);
  }
}

TEST_CASE("a step says in how many rounds tokens went to the experts of other ranks", "[train][ep]") {
  const auto rounds = [](double imbalance) {
    const StepConfig step = step_of(model_of("mixtral"), {.dp = 2, .ep = 2, .imbalance = imbalance}, all_losses);
    const Plan plan = make_plan(step, {});
    World world(step.layout.mesh());
    std::vector<int> found(2);
    run_ranks(world, [&](int rank) {
      Run run(step, plan, {}, world, rank);
      init_weights(run.trainer.state(), 42, run.stream);
      for (int64_t k = 1; k <= 2; ++k)  // of each step, not of all so far
        found[static_cast<size_t>(rank)] =
            run.trainer
                .step([&](int64_t m) { return selftest::read_batch(step, run.groups.reader(), m); },
                      {.lr = 1e-3f, .beta1 = 0.9f, .beta2 = 0.95f, .eps = 1e-8f, .weight_decay = 0, .step = k}, {})
                .experts->rounds;
    });
    return found;
  };
  REQUIRE(rounds(2) == std::vector<int>{1, 1});  // room for all
  const std::vector<int> several = rounds(0.4);
  REQUIRE((several[0] > 1 && several[0] == several[1]));
}

// Models without near ties: what a router chooses does not depend on rounding.
TEST_CASE("experts on any ranks give what one rank computes", "[train][ep]") {
  const LayoutCase layouts[] = {
      {.dp = 2, .ep = 2},
      {.dp = 2, .stage = 1, .ep = 2, .recompute = Recompute::activation},
      {.dp = 4, .stage = 2, .ep = 2, .recompute = Recompute::norm},
      {.dp = 4, .stage = 3, .ep = 4, .recompute = Recompute::block},
      {.tp = 2, .ep = 2},
      {.cp = 2, .ep = 2, .imbalance = 0.4},
      {.dp = 2, .stage = 3, .tp = 2, .cp = 2, .ep = 8, .imbalance = 8},
      {.dp = 2, .stage = 2, .tp = 2, .ep = 4, .recompute = Recompute::block, .imbalance = 0.4},
      {.stage = 1, .tp = 2},
      {.stage = 2, .tp = 4, .ep = 2},
      {.tp = 2, .cp = 2},
      {.dp = 2, .ep = 2, .pp = 2, .schedule = Schedule::zb_h1},
      {.dp = 2,
       .stage = 2,
       .ep = 2,
       .pp = 2,
       .schedule = Schedule::zb_v,
       .recompute = Recompute::norm,
       .imbalance = 0.5},
  };
  for (const char* family : {"mixtral", "qwen2_moe", "qwen3_moe", "olmoe"})
    for (const ExpertOptions& options : {all_losses, dropping}) {
      const ModelConfig model = model_of(family);
      const Outcome alone = selftest::run_layout(step_of(model, {}, options));
      for (const LayoutCase& layout : layouts) {
        const bool few = std::string_view(family) != "mixtral";  // of the others, every third
        if (few && (&layout - layouts) % 3 != (options.capacity_factor ? 0 : 2)) continue;
        INFO(family << (options.capacity_factor ? " with a capacity, " : ", ") << to_string(layout));
        const Outcome found = selftest::run_layout(step_of(model, layout, options));
        REQUIRE(found.fault == "");
        const selftest::Distances d(found, alone);
        INFO("loss " << d.loss << ", norm " << d.norm << ", gradients " << d.gradients << ", weights " << d.weights);
        const bool close = d.loss <= 1e-6 && d.norm <= 1e-6 && d.gradients <= 1e-5 && d.weights <= 1e-5;
        INFO(
            (close ? "" : to_string(selftest::rerouted(step_of(model, {}, options), step_of(model, layout, options)))));
        REQUIRE(close);
      }
    }
}

TEST_CASE("stages of a pipeline, recomputation and backwards in parts change no bit of a model with experts",
          "[train][ep]") {
  const ModelConfig model = model_of("qwen2_moe");
  for (const DType dtype : {DType::fp32, DType::bf16})
    for (const int ep : {1, 2}) {
      const LayoutCase one{.dp = 2, .ep = ep, .imbalance = 0.5};
      const Outcome alone = selftest::run_layout(step_of(model, one, dropping, dtype));
      for (const auto& [pp, schedule, recompute] : {std::tuple(1, Schedule::one_f_one_b, Recompute::activation),
                                                    {1, Schedule::gpipe, Recompute::block},
                                                    {2, Schedule::one_f_one_b, Recompute::norm},
                                                    {2, Schedule::zb_h1, Recompute::none},
                                                    {2, Schedule::zb_v, Recompute::block}}) {
        LayoutCase layout = one;
        layout.pp = pp, layout.schedule = schedule, layout.recompute = recompute;
        INFO(name_of(dtype) << ", " << to_string(layout));
        const Outcome found = selftest::run_layout(step_of(model, layout, dropping, dtype));
        REQUIRE(found.fault == "");
        REQUIRE(found.losses == alone.losses);
        REQUIRE(found.norms == alone.norms);
        REQUIRE(found.gradients == alone.gradients);
        REQUIRE(found.weights == alone.weights);
      }
    }
}

TEST_CASE("all rows may go to one expert, or to the experts of one rank, and an expert may get none", "[train][ep]") {
  ModelConfig model = model_of("qwen3_moe");
  struct Routes {
    const char* what;
    int64_t per_token;
    std::vector<int64_t> wanted;  // experts
    double largest, smallest;     // share of an expert, times their number
  };
  for (const Routes& routes : {Routes{"one expert", 1, {5}, 8, 0},
                               {"one rank", 2, {4, 5}, 4, 0},
                               {"none to one expert", 7, {0, 1, 2, 3, 4, 6, 7}, 8.0 / 7, 0}}) {
    model.experts.per_token = routes.per_token;
    std::vector<StepResult> alone;
    for (const LayoutCase& layout : {LayoutCase{},
                                     {.dp = 2, .ep = 2},
                                     {.dp = 4, .stage = 3, .ep = 4, .recompute = Recompute::block},
                                     {.dp = 2, .stage = 2, .tp = 2, .ep = 4}}) {
      INFO(routes.what << ", " << to_string(layout));
      const StepConfig step = step_of(model, layout, {.bias_rate = 1e-4});
      std::vector<float> biases(static_cast<size_t>(model.sparse_layers() * 8), 0);
      for (int64_t l = 0; l < model.sparse_layers(); ++l)
        for (const int64_t e : routes.wanted) biases[static_cast<size_t>(8 * l + e)] = 10;
      std::vector<StepResult> results;
      const Plan plan = make_plan(step, {DeviceKind::cpu, 1});
      World world(step.layout.mesh(), Backend::threads, poison_hooks);
      run_ranks(world, [&](int rank) {
        Run run(step, plan, {DeviceKind::cpu, 1}, world, rank);
        init_weights(run.trainer.state(), 42, run.stream);
        run.trainer.set_expert_biases(biases);
        for (int s = 1; s <= 2; ++s) {
          const StepResult r = run.trainer.step(
              [&](int64_t m) { return selftest::read_batch(step, run.groups.reader(), m); },
              {.lr = 1e-2f, .beta1 = 0.9f, .beta2 = 0.95f, .eps = 1e-2f, .weight_decay = 0.1f, .step = s},
              {.max_norm = 1});
          if (rank == 0) results.push_back(r);
        }
      });
      if (alone.empty()) alone = results;
      for (size_t s = 0; s < 2; ++s) {
        REQUIRE(results[s].finite());
        REQUIRE(std::abs(results[s].loss / alone[s].loss - 1) < 1e-6);
        REQUIRE(std::abs(results[s].grad_norm / alone[s].grad_norm - 1) < 1e-5);
        REQUIRE(results[s].experts->largest == Approx(routes.largest));
        REQUIRE(results[s].experts->smallest == routes.smallest);
      }
    }
  }
}

TEST_CASE("the biases of experts are updated once a step, from the choices of all ranks, and not by a skipped step",
          "[train][ep]") {
  const ModelConfig model = model_of("mixtral");
  std::vector<float> alone;
  for (const LayoutCase& layout : {LayoutCase{},
                                   {.recompute = Recompute::block},
                                   {.dp = 4},
                                   {.tp = 2, .cp = 2, .ep = 4},
                                   {.dp = 2, .ep = 2, .pp = 2, .schedule = Schedule::zb_v}}) {
    INFO(to_string(layout));
    const StepConfig step = step_of(model, layout, {.bias_rate = 0.125});
    const Plan plan = make_plan(step, {DeviceKind::cpu, 1});
    World world(step.layout.mesh(), Backend::threads, poison_hooks);
    std::mutex mutex;
    run_ranks(world, [&](int rank) {
      Run run(step, plan, {DeviceKind::cpu, 1}, world, rank);
      init_weights(run.trainer.state(), 42, run.stream);
      const auto batches = [&](int64_t m) { return selftest::read_batch(step, run.groups.reader(), m); };
      OptimizerOptions adamw{.lr = 0, .beta1 = 0.9f, .beta2 = 0.95f, .eps = 1e-2f, .weight_decay = 0, .step = 1};
      run.trainer.step(batches, adamw, {.largest_norm = 1e-30});
      for (const float b : run.trainer.expert_biases())
        if (b != 0) throw Error("a skipped step has changed a bias");
      run.trainer.step(batches, adamw, {});
      const std::vector<float> biases = run.trainer.expert_biases();
      std::lock_guard lock(mutex);
      if (alone.empty()) alone = biases;
      if (biases != alone) throw Error(formatted("rank {} has other biases", rank));
    });
    size_t up = 0, down = 0;
    for (const float b : alone) up += b == 0.125f, down += b == -0.125f;
    REQUIRE(alone.size() == 4 * 8);
    REQUIRE((up >= 8 && down >= 8 && up + down >= 28));
  }
}

// The balancing loss of slices is that of each slice: compared with one rank that has the same slices.
TEST_CASE("what a step records of experts in token slices is the same on stages and tensor-parallel ranks",
          "[train][ep]") {
  const ModelConfig model = model_of("qwen3_moe");
  auto recorded = [&](const LayoutCase& layout, const std::vector<int64_t>& slices) {
    StepConfig step = step_of(model, layout, {.z_loss = 0.01});
    step.layout.pipeline.slices = slices;
    const Plan plan = make_plan(step, {DeviceKind::cpu, 1});
    World world(step.layout.mesh(), Backend::threads, poison_hooks);
    ExpertStatistics statistics{};
    run_ranks(world, [&](int rank) {
      Run run(step, plan, {DeviceKind::cpu, 1}, world, rank);
      init_weights(run.trainer.state(), 42, run.stream);
      const StepResult r =
          run.trainer.step([&](int64_t m) { return selftest::read_batch(step, run.groups.reader(), m); },
                           {.lr = 0, .beta1 = 0.9f, .beta2 = 0.95f, .eps = 1e-8f, .weight_decay = 0, .step = 1}, {});
      if (rank == 0) statistics = *r.experts;
    });
    return statistics;
  };
  const ExpertStatistics whole = recorded({}, {});
  // Two ranks have one and a half of three sequences each; of slices of one token, two and one.
  for (const std::vector<int64_t>& slices : {std::vector<int64_t>{14, 5, 1}, {10, 10}}) {
    const ExpertStatistics sliced = recorded({}, slices);
    for (const LayoutCase& layout : {LayoutCase{.tp = 2}, {.tp = 2, .pp = 2}, {.dp = 2, .tp = 2, .ep = 4}}) {
      INFO("slices of " << formatted("{}", slices) << ", " << to_string(layout));
      const ExpertStatistics found = recorded(layout, slices);
      REQUIRE(found.entropy == Approx(whole.entropy).epsilon(1e-6));
      REQUIRE(found.z_loss == Approx(whole.z_loss).epsilon(1e-6));
      REQUIRE(found.largest == whole.largest);
      REQUIRE(found.smallest == whole.smallest);
      REQUIRE(found.balance_loss == Approx(sliced.balance_loss).epsilon(1e-6));
    }
  }
}
