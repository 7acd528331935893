// Context parallelism on GPUs: every way of attention against one rank on the CPU, with ranks that share a GPU and with
// NCCL between GPUs; beside tensor and data parallelism; evaluation and generation. test_trainer.cpp tests that every
// wait is needed.
#include <mutex>
#include <optional>

#include "cuda/trainer/trainer_test.h"

using namespace llmc;

namespace {

constexpr int64_t seq_len = 16;  // slices of two rows on four ranks

// Four ranks of Ulysses hold each of qwen3's two key-value heads twice.
selftest::Model model_of(const char* family, DType dtype = DType::fp32) {
  const bool grouped = std::string_view(family) == "qwen3";
  return {family, grouped, dtype, 4, grouped ? 2 : 4, seq_len};
}
constexpr ContextAttention by_ring = ContextAttention::ring, by_gather = ContextAttention::all_gather,
                           ulysses = ContextAttention::ulysses;

struct LayoutCase {
  int cp = 1;
  ContextAttention attention = by_ring;
  int tp = 1;
  ZeroConfig zero = {};  // shards and replicas of data parallelism alone
};
// One block, one micro-batch of two sequences.
StepConfig step_of(const selftest::Model& model, const LayoutCase& layout = {},
                   Documents documents = Documents::apart) {
  ModelConfig config = model.config();
  config.n_layer = 1;
  const TensorParallel tensor = tensor_parallel(config, layout.tp);
  Layout shared{layout.zero, tensor, ContextParallel{layout.cp, layout.attention}};
  shared.zero.shards *= layout.cp;
  StepConfig step = selftest::step_config(config, model.dtype, 2, shared);
  step.micro_batches = 1;
  step.documents = documents;
  return step;
}

// Ranks that share one GPU, and GPUs of their own if there are as many.
std::vector<selftest::Machine> machines_for(int ranks) {
  std::vector<selftest::Machine> machines = {gpu};
  if (built_with_nccl && visible_gpus().count >= ranks) machines.push_back(own_gpus(ranks));
  return machines;
}

std::vector<selftest::Machine> fastest_machine_for(int ranks) { return {machines_for(ranks).back()}; }

selftest::Outcome one_step(const StepConfig& step, const selftest::Machine& machine = {}) {
  return selftest::run_layout(step, machine, {}, 1);
}

// fp32: contract 5. Otherwise the GPUs are as good as the same ranks on the CPU.
void compare(const selftest::Model& model, const LayoutCase& layout, Documents documents,
             const std::vector<selftest::Machine>& machines) {
  selftest::Model exact = model;
  exact.dtype = DType::fp32;
  StepConfig one_rank = step_of(exact, {}, documents), step = step_of(model, layout, documents);
  one_rank.batch.B = step.batch.B = 4 / layout.cp;
  const selftest::Outcome alone = one_step(one_rank);
  std::optional<selftest::Outcome> cpu;
  if (model.dtype != DType::fp32) cpu = one_step(step);
  for (const selftest::Machine& machine : machines) {
    CAPTURE(model.family, name_of(model.dtype), name_of(layout.attention), layout.cp, documents == Documents::apart,
            name_of(machine.backend));
    const selftest::Outcome outcome = one_step(step, machine);
    if (cpu) require_as_good(outcome, *cpu, alone);
    else require_close(outcome, alone);
  }
}

}  // namespace

TEST_CASE("context parallelism on GPUs matches one rank on the CPU", "[cp][cuda][trainer]") {
#ifndef __CUDACC__
  const Gpus gpus(4);
#endif
  SECTION("two ranks, ring") { compare(model_of("gpt2"), {2, by_ring}, Documents::together, machines_for(2)); }
  SECTION("two ranks, all-gather") { compare(model_of("qwen3"), {2, by_gather}, Documents::apart, machines_for(2)); }
  SECTION("two ranks, Ulysses") { compare(model_of("gpt2"), {2, ulysses}, Documents::apart, machines_for(2)); }
  SECTION("four ranks, ring") { compare(model_of("qwen3"), {4, by_ring}, Documents::apart, fastest_machine_for(4)); }
  SECTION("four ranks, all-gather") {
    compare(model_of("gpt2"), {4, by_gather}, Documents::together, fastest_machine_for(4));
  }
  SECTION("four ranks, Ulysses with two key-value heads") {
    compare(model_of("qwen3"), {4, ulysses}, Documents::together, fastest_machine_for(4));
  }
}

TEST_CASE("context parallelism in bf16 is as good on GPUs as on the CPU", "[cp][cuda][trainer]") {
#ifndef __CUDACC__
  const Gpus gpus(4);
#endif
  auto in_bf16 = [](const char* family, const LayoutCase& layout) {
    compare(model_of(family, DType::bf16), layout, Documents::apart, fastest_machine_for(layout.cp));
  };
  SECTION("ring") { in_bf16("gpt2", {2, by_ring}); }
  SECTION("all-gather") { in_bf16("qwen3", {2, by_gather}); }
  SECTION("Ulysses") { in_bf16("qwen3", {4, ulysses}); }
}

TEST_CASE("context parallelism on GPUs matches one rank on the CPU in every layout", "[cp][cuda][trainer][long]") {
#ifndef __CUDACC__
  const Gpus gpus(4);
#endif
  const auto [family, dtype] = GENERATE(std::pair{"gpt2", DType::fp32}, std::pair{"qwen3", DType::fp32},
                                        std::pair{"gpt2", DType::bf16}, std::pair{"qwen3", DType::bf16});
  for (const ContextAttention attention : all_values<ContextAttention>())
    for (const int cp : {2, 4})
      for (const Documents documents : {Documents::together, Documents::apart})
        compare(model_of(family, dtype), {cp, attention}, documents, machines_for(cp));
}

TEST_CASE("context parallelism beside tensor and data parallelism matches one rank on GPUs; the stages agree",
          "[cp][cuda][trainer]") {
#ifndef __CUDACC__
  const Gpus gpus(4);
#endif
  const auto [attention, tp, shards] = GENERATE(std::tuple{by_gather, 2, 1}, std::tuple{by_ring, 1, 2});
  CAPTURE(name_of(attention), tp, shards);
  LayoutCase layout{2, attention, tp, {.grad_reduce = GradReduce::micro, .shards = shards}};
  auto step = [](const LayoutCase& l) {
    StepConfig s = step_of(model_of("qwen3"), l);
    s.batch.B = 1;
    return s;
  };
  StepConfig one_rank = step({});
  one_rank.micro_batches = shards;
  const selftest::Machine machine = machines_for(4).back();
  const selftest::Outcome stage0 = one_step(step(layout), machine);
  require_close(stage0, one_step(one_rank));
  layout.zero.stage = 3;
  StepConfig sharded = step(layout);
  sharded.layout.tensor.overlap = tp > 1;
  sharded.recompute = Recompute::block;
  REQUIRE(same(one_step(sharded, machine), stage0));  // contracts 3 and 11
}

TEST_CASE("context-parallel ranks on GPUs evaluate and generate like one rank on the CPU", "[cp][cuda][trainer]") {
#ifndef __CUDACC__
  const Gpus gpus(2);
#endif
  const std::vector<int32_t> tokens = {3, 1, 4, 1, 5, 9, 2, 6, 5, 3, 5};  // more than a rank has of a micro-batch
  constexpr int64_t T = 13;                                               // padded to 16
  auto step = [](const LayoutCase& layout) {
    StepConfig s = step_of(model_of("qwen3"), layout);
    s.batch.B = 1;
    return s;
  };
  // The losses of all rows of two short texts, of which a rank reports its own; then rank 1's logits after the tokens,
  // whole and with a cache.
  auto computed = [&](const StepConfig& config, const selftest::Machine& machine) {
    StepConfig texts = config;
    texts.batch.T = T;
    std::vector<std::vector<float>> all(3);
    all[0].resize(2 * T);
    std::mutex mutex;
    World world(config.layout.mesh(), machine.backend);
    const Plan plan = make_plan(config, machine.device);
    run_ranks(world, [&](int rank) {
      Run run(config, plan, machine.of_rank(rank), world, rank);
      init_weights(run.trainer.state(), 5, run.stream);
      run.trainer.evaluate(
          2, 2 * T, [&](int64_t m) { return selftest::read_batch(texts, 0, m); },
          [&](int64_t m, std::span<const float> of_batch) {
            const std::lock_guard lock(mutex);
            for (size_t i = 0; i < of_batch.size(); ++i) all[0][static_cast<size_t>(m * T) + i] += of_batch[i];
          },
          T);
      const std::vector<float> whole = run.trainer.next_token_logits(tokens);
      Continuation text(run.trainer);
      const std::vector<float> grown = text.feed(tokens);
      if (rank == config.layout.ranks() - 1) all[1] = whole, all[2] = grown;
    });
    return all;
  };
  const auto alone = computed(step({}), {});
  for (const ContextAttention attention : all_values<ContextAttention>())
    for (const selftest::Machine& machine : machines_for(2)) {
      CAPTURE(name_of(attention), name_of(machine.backend));
      const auto together = computed(step({2, attention}), machine);
      for (size_t i = 0; i < alone.size(); ++i) {
        REQUIRE((!alone[i].empty() && together[i].size() == alone[i].size()));
        REQUIRE(relative_error(together[i], alone[i]) < 1e-5);
      }
    }
}
