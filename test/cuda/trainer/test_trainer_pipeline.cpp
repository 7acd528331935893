// Pipelines on GPUs: bitwise equal to the same layout on one stage of the same device (contract 4), with ranks that
// share a GPU and with NCCL between GPUs; every schedule, some beside data and tensor parallelism; the asynchronous
// one; validation and generation. test_trainer.cpp tests that every wait is needed.
#include <mutex>
#include <optional>

#include "cuda/trainer/trainer_test.h"

using namespace llmc;

namespace {

constexpr Schedule gpipe = Schedule::gpipe, one_f_one_b = Schedule::one_f_one_b, interleaved = Schedule::interleaved;

struct LayoutCase {
  int pp = 1;
  Schedule schedule = one_f_one_b;
  int chunks = 1;  // per stage
  ZeroConfig zero = {};
  int tp = 1;
};

// Few numbers: tiny layers, one more than there are stages, or as many as chunks; a short sequence.
StepConfig step_of(const selftest::Model& model, const LayoutCase& layout, int64_t n_layer, int64_t micro_batches,
                   int64_t T = 5) {
  ModelConfig config = model.config();
  config.n_layer = n_layer;
  const Layout shared{.zero = layout.zero,
                      .tensor = tensor_parallel(config, layout.tp),
                      .pipeline = {layout.schedule, layout.pp, layout.chunks}};
  StepConfig step = selftest::step_config(config, model.dtype, 1, shared);
  step.batch.T = T;
  step.micro_batches = micro_batches;
  return step;
}
selftest::Model model_of(const char* family, DType dtype, bool tied = false) {
  const bool grouped = std::string_view(family) == "qwen3";
  return {family, tied, dtype, grouped ? 4 : 2, 2};
}

// Ranks that share one GPU, and GPUs of their own if there are as many.
std::vector<selftest::Machine> machines_for(int ranks) {
  std::vector<selftest::Machine> machines = {gpu};
  if (built_with_nccl && visible_gpus().count >= ranks) machines.push_back(own_gpus(ranks));
  return machines;
}
selftest::Machine fastest_machine_for(int ranks) { return machines_for(ranks).back(); }

// Untied models: bit by bit, on each of the machines.
void compare(const selftest::Model& model, const LayoutCase& layout, const std::vector<selftest::Machine>& machines,
             int64_t micro_batches = 3, int64_t T = 5) {
  LayoutCase one = layout;
  one.pp = one.chunks = 1;
  one.schedule = one_f_one_b;
  const int64_t n_layer = layout.chunks == 1 ? layout.pp + 1 : layout.pp * layout.chunks;
  const StepConfig step = step_of(model, layout, n_layer, micro_batches, T),
                   alone = step_of(model, one, n_layer, micro_batches, T);
  std::optional<selftest::Outcome> on_one;
  for (const selftest::Machine& machine : machines) {
    CAPTURE(model.family, name_of(model.dtype), layout.pp, name_of(layout.schedule), layout.chunks, layout.zero.stage,
            layout.zero.ranks(), layout.tp, name_of(machine.backend));
    // NCCL and threads add in orders of their own.
    if (!on_one || alone.layout.ranks() > 1) {
      selftest::Machine its = machine;
      its.gpus = std::min(machine.gpus, alone.layout.ranks());
      on_one = selftest::run_layout(alone, its, {}, 1);
    }
    const selftest::Outcome outcome = selftest::run_layout(step, machine, {}, 1);
    REQUIRE(on_one->fault == "");
    REQUIRE(outcome.fault == "");
    if (model.tied) require_close(outcome, *on_one);
    else REQUIRE((same(outcome, *on_one) && outcome.optimizer_state == on_one->optimizer_state));
  }
}

}  // namespace

TEST_CASE("pipelines on GPUs compute bitwise what one stage does", "[pp][cuda][trainer]") {
#ifndef __CUDACC__
  const Gpus gpus(4);
#endif
  SECTION("1f1b, fp32") { compare(model_of("gpt2", DType::fp32), {2, one_f_one_b}, {fastest_machine_for(2)}); }
  SECTION("interleaved, fp32") {
    compare(model_of("qwen3", DType::fp32), {2, interleaved, 2}, {fastest_machine_for(2)});
  }
  SECTION("zb-h1, bf16") { compare(model_of("gpt2", DType::bf16), {2, Schedule::zb_h1}, {fastest_machine_for(2)}); }
  SECTION("zb-v, fp32, ranks that share a GPU") {
    compare(model_of("qwen3", DType::fp32), {2, Schedule::zb_v, 2}, {gpu});
  }
  SECTION("a table on both ends") {
    compare(model_of("gpt2", DType::fp32, true), {2, one_f_one_b}, {fastest_machine_for(2)}, 2);
  }
}

TEST_CASE("a pipeline on GPUs with more messages than the host may leave unread", "[pp][cuda][trainer][long]") {
#ifndef __CUDACC__
  const Gpus gpus(2);
#endif
  compare(model_of("gpt2", DType::fp32), {2, one_f_one_b}, {fastest_machine_for(2)}, 36, 1);
}

TEST_CASE("pipelines of data- and tensor-parallel ranks on GPUs compute bitwise what one stage of them does",
          "[pp][cuda][trainer]") {
#ifndef __CUDACC__
  const Gpus gpus(4);
#endif
  SECTION("data parallelism, 1f1b, bf16") {
    compare(model_of("gpt2", DType::bf16), {2, one_f_one_b, 1, {.shards = 2}}, {fastest_machine_for(4)}, 2);
  }
  SECTION("sharded weights, interleaved, fp32") {
    const ZeroConfig zero{.stage = 3, .grad_reduce = GradReduce::micro, .shards = 2};
    compare(model_of("qwen3", DType::fp32), {2, interleaved, 2, zero}, {fastest_machine_for(4)}, 2);
  }
  SECTION("tensor parallelism, gpipe, fp32") {
    compare(model_of("gpt2", DType::fp32), {2, gpipe, 1, {}, 2}, {fastest_machine_for(4)}, 2);
  }
}

TEST_CASE("an asynchronous pipeline on GPUs computes what it does on the CPU", "[pp][cuda][trainer]") {
#ifndef __CUDACC__
  const Gpus gpus(3);
#endif
  const StepConfig step = step_of(model_of("qwen3", DType::fp32), {3, Schedule::pipedream}, 3, 1);
  const selftest::Outcome cpu = asynchronous_steps(step, {}, 4);
  for (const selftest::Machine& machine : machines_for(3)) {
    const selftest::Outcome outcome = asynchronous_steps(step, machine, 4);
    const selftest::Distances d(outcome, cpu);
    CAPTURE(name_of(machine.backend), d.loss, d.norm, d.weights);
    REQUIRE(outcome.fault == "");
    REQUIRE(d.loss < 1e-4);  // contract 5, over several steps
    REQUIRE(std::max(d.norm, d.weights) < 1e-4);
  }
}

TEST_CASE("pipelines on GPUs compute bitwise what one stage does in every layout", "[pp][cuda][trainer][long]") {
#ifndef __CUDACC__
  const Gpus gpus(4);
#endif
  const auto [family, dtype] = GENERATE(std::pair{"gpt2", DType::fp32}, std::pair{"qwen3", DType::fp32},
                                        std::pair{"gpt2", DType::bf16}, std::pair{"qwen3", DType::bf16});
  compare(model_of(family, dtype), {4, one_f_one_b}, {fastest_machine_for(4)}, 2);  // fewer micro-batches than stages
  for (const int pp : {2, 3, 4})
    for (const auto& [schedule, chunks] : {std::pair{gpipe, 1}, {one_f_one_b, 1}, {interleaved, 2}})
      compare(model_of(family, dtype), {pp, schedule, chunks}, machines_for(pp));
  for (const int stage : {0, 1, 2, 3})
    for (const GradReduce reduce : {GradReduce::step, GradReduce::micro}) {
      const ZeroConfig zero{.stage = stage, .grad_reduce = reduce, .shards = 2};
      compare(model_of(family, dtype), {2, stage % 2 == 0 ? gpipe : interleaved, stage % 2 == 0 ? 1 : 2, zero},
              machines_for(4), 2);
    }
  for (const Schedule schedule : {gpipe, one_f_one_b})
    compare(model_of(family, dtype), {2, schedule, 1, {}, 2}, machines_for(4), 2);
}

TEST_CASE("pipelines on GPUs validate and generate what one stage does", "[pp][cuda][trainer]") {
#ifndef __CUDACC__
  const Gpus gpus(3);
#endif
  const std::vector<int32_t> tokens = {3, 1, 4, 1, 5};
  const selftest::Model model = model_of("qwen3", DType::fp32, true);
  // The mean loss of a validation, then the logits after the tokens on every rank, whole and with a cache.
  auto computed = [&](const StepConfig& config, const selftest::Machine& machine) {
    std::vector<float> all;
    std::mutex mutex;
    World world(config.layout.mesh(), machine.backend);
    const Plan plan = make_plan(config, machine.device);
    run_ranks(world, [&](int rank) {
      Run run(config, plan, machine.of_rank(rank), world, rank);
      init_weights(run.trainer.state(), 5, run.stream);
      std::vector<float> mine = {static_cast<float>(run.trainer.evaluate(
          3, 3 * config.batch.rows(), [&](int64_t m) { return selftest::read_batch(config, 0, m); }))};
      const std::vector<float> whole = run.trainer.next_token_logits(tokens);
      Continuation text(run.trainer);
      text.feed(std::span(tokens).first(4));
      const std::vector<float> grown = text.feed(std::span(tokens).last(1));
      mine.insert(mine.end(), whole.begin(), whole.end());
      mine.insert(mine.end(), grown.begin(), grown.end());
      const std::lock_guard lock(mutex);
      if (all.empty()) all = mine;
      REQUIRE(all == mine);
    });
    return all;
  };
  const std::vector<float> alone = computed(step_of(model, {}, 3, 1), gpu);
  REQUIRE(alone.size() == 1 + 2 * static_cast<size_t>(model.config().vocab_size));
  REQUIRE(computed(step_of(model, {3, one_f_one_b}, 3, 1), gpu) == alone);
  REQUIRE(computed(step_of(model, {2, one_f_one_b}, 3, 1), fastest_machine_for(2)) == alone);
}
