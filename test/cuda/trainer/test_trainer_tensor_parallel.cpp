// Tensor parallelism on GPUs: layouts against one rank on the CPU, with ranks that share a GPU and with NCCL between
// GPUs; generation and validation; the groups over NCCL. test_trainer.cpp tests that every wait is needed.
#include <mutex>

#include "comm/group_check.h"
#include "cuda/trainer/trainer_test.h"

using namespace llmc;

namespace {

// A model that two and four ranks can share out, with two key-value heads that four hold twice, and nine rows: a part
// of the second of two ranks is padding, and all of the last of four.
selftest::Model model_of(const char* family, DType dtype = DType::fp32) {
  const bool grouped = std::string_view(family) == "qwen3";
  return {family, grouped, dtype, 8, grouped ? 2 : 8};
}
StepConfig step_of(const selftest::Model& model, int tp = 1, bool sequence = true, const ZeroConfig& zero = {}) {
  ModelConfig config = model.config();
  config.n_layer = 1;
  StepConfig step = selftest::step_config(config, model.dtype, 1, Layout{zero, tensor_parallel(config, tp, sequence)});
  step.batch.T = 9;
  step.micro_batches = 1;
  return step;
}
StepConfig overlapped(StepConfig step) {
  step.layout.tensor.overlap = true;
  return step;
}

// Ranks that share one GPU, and GPUs of their own if there are as many.
std::vector<selftest::Machine> machines_for(int ranks) {
  std::vector<selftest::Machine> machines = {gpu};
  if (built_with_nccl && visible_gpus().count >= ranks) machines.push_back(own_gpus(ranks));
  return machines;
}

void compare_layouts(const char* family, int tp, bool sequence, const std::vector<selftest::Machine>& machines) {
  const selftest::Outcome alone = selftest::run_layout(step_of(model_of(family)));
  for (const selftest::Machine& machine : machines) {
    CAPTURE(family, tp, sequence, name_of(machine.backend));
    const StepConfig step = step_of(model_of(family), tp, sequence);
    const selftest::Outcome outcome = selftest::run_layout(step, machine);
    require_close(outcome, alone);
    REQUIRE(same(selftest::run_layout(overlapped(step), machine), outcome));
  }
}

}  // namespace

TEST_CASE("tensor parallelism on GPUs matches one rank on the CPU, overlapped or not", "[tp][cuda][trainer]") {
#ifndef __CUDACC__
  const Gpus gpus(4);
#endif
  SECTION("two ranks, by rows") { compare_layouts("gpt2", 2, true, machines_for(2)); }
  SECTION("two key-value heads on four ranks, all rows on each") {
    compare_layouts("qwen3", 4, false, {machines_for(4).back()});
  }
}

TEST_CASE("tensor parallelism on GPUs matches one rank on the CPU in every layout", "[tp][cuda][trainer][long]") {
#ifndef __CUDACC__
  const Gpus gpus(4);
#endif
  const int tp = GENERATE(2, 4);
  compare_layouts(GENERATE("gpt2", "qwen3"), tp, GENERATE(true, false), machines_for(tp));
}

TEST_CASE("tensor parallelism and ZeRO together match one rank on GPUs; the stages agree", "[tp][cuda][trainer]") {
#ifndef __CUDACC__
  const Gpus gpus(4);
#endif
  auto of_two_blocks = [](int tp, const ZeroConfig& zero) {
    StepConfig step = step_of(model_of("qwen3"), tp, true, zero);
    step.model.n_layer = 2;
    return step;
  };
  StepConfig one_rank = of_two_blocks(1, {});
  one_rank.micro_batches = 2;
  const selftest::Machine machine = machines_for(4).back();
  ZeroConfig zero{.grad_reduce = GradReduce::micro, .shards = 2};
  const selftest::Outcome stage0 = selftest::run_layout(of_two_blocks(2, zero), machine);
  require_close(stage0, selftest::run_layout(one_rank));
  zero.stage = 3;
  StepConfig sharded = overlapped(of_two_blocks(2, zero));
  sharded.recompute = Recompute::block;
  REQUIRE(same(selftest::run_layout(sharded, machine), stage0));  // contracts 3 and 11
}

TEST_CASE("tensor parallelism in bf16 is as good on GPUs as on the CPU, with rows of an odd width, too",
          "[tp][cuda][trainer]") {
#ifndef __CUDACC__
  const Gpus gpus(4);
#endif
  auto step = [](DType dtype, int tp) {
    StepConfig s = step_of(model_of("qwen3", dtype), tp);
    s.model.n_embd = 21;  // slices of three rows begin at addresses that only 2 divides
    s.head_chunks = 2;
    return s;
  };
  const selftest::Outcome fp32 = selftest::run_layout(step(DType::fp32, 1)),
                          cpu = selftest::run_layout(step(DType::bf16, 4));
  require_as_good(selftest::run_layout(overlapped(step(DType::bf16, 4)), machines_for(4).back()), cpu, fp32);
}

TEST_CASE("tensor-parallel ranks on GPUs validate and generate like one rank on the CPU", "[tp][cuda][trainer]") {
#ifndef __CUDACC__
  const Gpus gpus(2);
#endif
  const std::vector<int32_t> tokens = {3, 1, 4, 1, 5, 9, 2};
  // What rank 0 of a layout computes: the losses of all rows, then the logits after the tokens, whole and with a cache.
  auto computed = [&](const StepConfig& step, const selftest::Machine& machine) {
    std::vector<std::vector<float>> all(3);
    World world(step.layout.mesh(), machine.backend);
    const Plan plan = make_plan(step, machine.device);
    run_ranks(world, [&](int rank) {
      Run run(step, plan, machine.of_rank(rank), world, rank);
      init_weights(run.trainer.state(), 5, run.stream);
      std::vector<float> losses;
      run.trainer.evaluate(
          2, 2 * step.batch.rows(), [&](int64_t m) { return selftest::read_batch(step, 0, m); },
          [&](int64_t, std::span<const float> of_batch) {
            losses.insert(losses.end(), of_batch.begin(), of_batch.end());
          });
      const std::vector<float> whole = run.trainer.next_token_logits(tokens);
      Continuation text(run.trainer);
      std::vector<float> grown;
      for (const int32_t token : tokens) grown = text.feed(std::span(&token, 1));
      if (rank == 0) all = {losses, whole, grown};
    });
    return all;
  };
  const auto alone = computed(step_of(model_of("qwen3")), {});
  for (const selftest::Machine& machine : machines_for(2)) {
    CAPTURE(name_of(machine.backend));
    const auto together = computed(overlapped(step_of(model_of("qwen3"), 2)), machine);
    for (size_t i = 0; i < alone.size(); ++i) {
      REQUIRE((!alone[i].empty() && together[i].size() == alone[i].size()));
      REQUIRE(relative_error(together[i], alone[i]) < 1e-5);
    }
  }
}

#ifndef __CUDACC__

TEST_CASE("every group of tensor-parallel ranks works over NCCL, and sums what they do not divide",
          "[tp][cuda][trainer]") {
  const Gpus gpus(6);
  const Layout layout{.tensor = {.ranks = 6, .overlap = true, .head_copies = 3}};
  World world(layout.mesh(), Backend::nccl);
  std::mutex mutex;
  std::vector<std::vector<float>> sums;
  constexpr int64_t n = 3 * 64 + 2;
  run_ranks(world, [&](int rank) {
    const Device device{.kind = DeviceKind::cuda, .gpu = rank};
    Arena arena(device, 1 << 20), scratch(device, Groups::scratch_bytes);
    Stream compute(device, scratch);
    const auto join = [&](const std::string& name, const std::vector<int>& members) {
      return world.join(rank, name, members, rank);
    };
    Groups groups(layout, rank, device, join);
    check_groups(groups, compute, [](int r) { return formatted("rank {}", r); });
    const Tensor x = arena.alloc("test", "head gradients", DType::fp32, {n});
    std::vector<float> values;
    for (int64_t i = 0; i < n; ++i) values.push_back(static_cast<float>(i + 1000 * rank));
    upload(x, values, groups.reduce_stream());
    groups[GroupName::head_gradients].all_reduce(x, groups.reduce_stream());
    const HostView sum(x, groups.reduce_stream());
    std::lock_guard lock(mutex);
    sums.resize(6);
    sums[static_cast<size_t>(rank)].assign(sum.data<float>(), sum.data<float>() + n);
  });
  for (size_t rank = 0; rank < 6; ++rank)
    for (size_t i = 0; i < n; ++i) REQUIRE(sums[rank][i] == static_cast<float>(3 * i + 1000 * (rank < 3 ? 3 : 12)));
}

#endif
