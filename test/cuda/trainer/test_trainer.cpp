// The trainer on CUDA against the CPU device (contract 5), on several ranks, with and without graphs; every wait
// between streams is needed.
#include <functional>

#include "cuda/trainer/trainer_test.h"

using namespace llmc;

namespace {

const selftest::Machine gpu_without_graphs{.device = {.kind = DeviceKind::cuda, .graphs = false}};

// Two layers, two micro-batches per rank, a short sequence.
StepConfig small_step(const char* family, DType dtype, const ZeroConfig& zero = {}) {
  StepConfig step = selftest::step_config(selftest::awkward_model(family), dtype, 1, zero);
  step.model.n_layer = 2;
  step.micro_batches = 2;
  return step;
}

}  // namespace

TEST_CASE("the trainer on a GPU matches the CPU", "[cuda][trainer]") {
  const char* family = GENERATE("gpt2", "llama", "qwen3");
  CAPTURE(family);
  const StepConfig step = small_step(family, DType::fp32), narrow = small_step(family, DType::bf16);
  const selftest::Outcome fp32 = selftest::run_layout(step);
  for (const StepConfig& config : {step, narrow}) {
    const selftest::Outcome outcome = selftest::run_layout(config, gpu);
    if (config.precision.weights == DType::fp32) require_close(outcome, fp32);
    else require_as_good(outcome, selftest::run_layout(config), fp32);
    REQUIRE(same(selftest::run_layout(config, gpu_without_graphs), outcome));
  }
}

TEST_CASE("recomputation and chunking are bitwise on a GPU, too", "[cuda][trainer]") {
  const StepConfig step = small_step(GENERATE("gpt2", "llama"), DType::fp32);
  const selftest::Outcome alone = selftest::run_layout(step, gpu);
  for (const Recompute recompute : {Recompute::activation, Recompute::norm, Recompute::block}) {
    StepConfig again = step;
    again.recompute = recompute;
    REQUIRE(same(selftest::run_layout(again, gpu), alone));  // contract 11
  }
  StepConfig chunked = step;
  chunked.head_chunks = 3;
  require_close(selftest::run_layout(chunked, gpu), alone);
}

TEST_CASE("GELU in cuBLASLt's products is as good as in a kernel, whatever the order of the backward",
          "[cuda][trainer]") {
  const auto step_of = [](DType dtype) {
    StepConfig step = small_step("gpt2", dtype);
    step.model.n_ffn = 40;    // a multiple of 8
    step.model.tied = false;  // so that stages change no bit
    return step;
  };
  const StepConfig step = step_of(DType::bf16);
  selftest::Machine products = gpu;
  products.device.gelu_in_products = true;
  const selftest::Outcome outcome = selftest::run_layout(step, products);
  require_as_good(outcome, selftest::run_layout(step), selftest::run_layout(step_of(DType::fp32)));
  REQUIRE(!same(outcome, selftest::run_layout(step, gpu)));  // what is rounded differs
  products.device.graphs = false;
  REQUIRE(same(selftest::run_layout(step, products), outcome));
  StepConfig again = step;
  again.recompute = Recompute::block;
  REQUIRE(same(selftest::run_layout(again, products), outcome));
  StepConfig stages = step;  // whose backward has an input part and a weight part
  stages.layout.pipeline = {Schedule::zb_h1, 2, 1};
  const selftest::Outcome in_parts = selftest::run_layout(stages, products, {}, 1);
  REQUIRE(in_parts.fault == "");
  REQUIRE(same(in_parts, selftest::run_layout(step, products, {}, 1)));
  const auto calls = [&](const char* op) {
    const Plan plan = make_plan(step, products.device);
    int64_t calls = 0;
    for (const auto& [name, totals] : plan.step_ops) calls += name == std::string_view(op) ? totals.calls : 0;
    return calls;
  };
  REQUIRE(calls("gelu_forward") + calls("gelu_backward") + calls("gelu_backward_with_bias") == 0);
  REQUIRE(calls("linear_gelu_forward") == 2 * 2);  // layers, micro-batches
  REQUIRE(calls("linear_gelu_backward_input") == 2 * 2);
}

TEST_CASE("sums of the residual stream in cuBLASLt's products are as good as in a kernel", "[cuda][trainer]") {
  const char* family = GENERATE("gpt2", "qwen2_moe");  // experts' outputs are added by a kernel
  CAPTURE(family);
  const StepConfig step = small_step(family, DType::bf16), exact = small_step(family, DType::fp32);
  selftest::Machine products = gpu;
  products.device.residual_in_products = true;
  const selftest::Outcome outcome = selftest::run_layout(step, products), fp32 = selftest::run_layout(exact);
  require_as_good(outcome, selftest::run_layout(step), fp32);
  require_close(selftest::run_layout(exact, products), fp32);
  REQUIRE(!same(outcome, selftest::run_layout(step, gpu)));  // what is rounded differs
  for (const Recompute recompute : {Recompute::norm, Recompute::block}) {
    StepConfig again = step;
    again.recompute = recompute;
    REQUIRE(same(selftest::run_layout(again, products), outcome));  // contract 11
  }
}

#ifndef __CUDACC__
TEST_CASE("a micro-batch of a model with GPT-2 124M's layers and chunks takes 327 kernels", "[cuda][trainer]") {
  StepConfig step = small_step("gpt2", DType::bf16);
  step.model.n_layer = 12, step.model.n_embd = step.model.n_head * step.model.head_size;
  step.model.n_ffn = 40;
  step.head_chunks = 7;
  selftest::Machine products = gpu_without_graphs;
  products.device.gelu_in_products = products.device.residual_in_products = true;
  const auto kernels_of = [&](int64_t micro_batches) {
    step.micro_batches = micro_batches;
    const int64_t before = cuda_on_cpu::kernels_run();
    const selftest::Outcome outcome = selftest::run_layout(step, products, {}, 1);
    REQUIRE(outcome.fault == "");
    return cuda_on_cpu::kernels_run() - before;
  };
  // Norms, products and attention; in the backward also the sums of four biases, and the adding up of all sums.
  const int64_t forward = 2 + 4 + 1, backward = 2 + 8 + 2 + 4 + 1;
  // Norm, losses and the norm's backward with its sums; three products and a loss in every chunk.
  const int64_t head = 1 + 1 + 2 + 7 * (3 + 1);
  // Looked up; numbered, sorted by one digit, and added up. (The ids of 124M have two digits: 330 kernels.)
  const int64_t embedding = 1 + 1 + 3 + 2;
  const int64_t steps = 2;
  REQUIRE(kernels_of(2) - kernels_of(1) == steps * (12 * (forward + backward) + head + embedding));
}
#endif

TEST_CASE("ranks share a GPU, or have one each with NCCL between them", "[cuda][trainer]") {
  StepConfig one_rank = small_step("gpt2", DType::fp32);
  one_rank.micro_batches = 4;
  const selftest::Outcome alone = selftest::run_layout(one_rank, gpu);
#ifndef __CUDACC__
  const Gpus gpus(4);
  REQUIRE(built_with_nccl);
#endif
  std::vector<selftest::Machine> machines = {gpu};
  if (const int count = visible_gpus().count; built_with_nccl && count >= 2)
    machines.push_back({.device = gpu.device, .backend = Backend::nccl, .gpus = count < 4 ? 2 : 4});
  for (const selftest::Machine& machine : machines) {
    const int ranks = machine.backend == Backend::nccl ? machine.gpus : 4;
    selftest::Outcome stage0;
    for (const int stage : {0, 3}) {
      CAPTURE(stage, name_of(machine.backend));
      ZeroConfig zero{.grad_reduce = GradReduce::micro, .shards = 2, .replicas = ranks / 2};
      zero.stage = stage;
      StepConfig shared = small_step("gpt2", DType::fp32, zero);
      shared.micro_batches = 4 / ranks;
      const selftest::Outcome outcome = selftest::run_layout(shared, machine);
      require_close(outcome, alone);
      if (stage == 0) stage0 = outcome;
      REQUIRE(same(outcome, stage0));  // contract 3
    }
    selftest::Outcome first;
    for (const DpSync sync : all_values<DpSync>()) {
      if (sync == DpSync::all_reduce) continue;
      if (sync > DpSync::parameter_server && machine.backend == Backend::threads) continue;  // as on a CPU
      CAPTURE(name_of(sync), name_of(machine.backend));
      StepConfig served = small_step("gpt2", DType::fp32, {.shards = ranks, .sync = sync});
      served.micro_batches = 4 / ranks;
      const selftest::Outcome outcome = selftest::run_layout(served, machine);
      require_close(outcome, alone);
      if (sync == DpSync::parameter_server) first = outcome;
      REQUIRE(same(outcome, first));
    }
  }
}

#ifndef __CUDACC__

namespace {

// Steps of small models that together execute every wait of a stream for another one; each compares its outcome with
// that of the first run. They need three GPUs.
std::vector<std::function<bool()>> programs_with_waits() {
  std::vector<std::function<bool()>> programs;
  auto find_in = [&](std::function<selftest::Outcome()> outcome) {
    const selftest::Outcome right = outcome();
    programs.push_back([outcome = std::move(outcome), right] { return same(outcome(), right); });
  };
  auto find = [&](const StepConfig& step, const selftest::Machine& machine, int steps = selftest::steps) {
    find_in([=] { return selftest::run_layout(step, machine, {}, steps); });
  };
  StepConfig tiny = small_step("gpt2", DType::fp32);  // the same ops and streams, with little to compute
  tiny.model.n_layer = 3;                             // with two, no gather waits for a buffer to be free
  tiny.model.n_head = tiny.model.n_kv_head = 1;
  tiny.model.n_embd = tiny.model.head_size;
  tiny.model.n_ffn = 9;
  tiny.model.vocab_size = 31;
  tiny.batch.T = 4;
  for (const int stage : {3, 1, 0}) {
    StepConfig step = tiny;
    step.micro_batches = 3;  // input buffers alternate
    if (stage > 0) {
      step.layout.zero = {.stage = stage, .shards = 2};
      step.layout.zero.grad_reduce = stage == 3 ? GradReduce::micro : GradReduce::step;
      step.micro_batches = 1;
    }
    // With threads the host waits at every exchange. At stage 1 the weights of an update arrive during the next step.
    if (stage == 1) find_in([=] { return asynchronous_steps(step, own_gpus(2), 2); });
    else find(step, stage == 0 ? gpu : own_gpus(2));
  }
  StepConfig shared_out = tiny;
  shared_out.model.n_layer = 1;
  shared_out.model.n_head = shared_out.model.n_kv_head = 2;
  shared_out.model.head_size = 2;
  shared_out.model.n_embd = 4;
  shared_out.model.n_ffn = 2;
  shared_out.micro_batches = 1;
  shared_out.layout.tensor = tensor_parallel(shared_out.model, 2, true, true);
  find(shared_out, own_gpus(2));
  for (const ContextAttention attention : all_values<ContextAttention>()) {
    StepConfig divided = tiny;
    divided.model.n_layer = 1;
    const bool ulysses = attention == ContextAttention::ulysses;
    const int ranks = attention == ContextAttention::ring ? 3 : 2;  // two need not pass gradients on
    divided.model.n_head = divided.model.n_kv_head = ulysses ? ranks : 1;
    divided.model.head_size = 2;
    divided.model.n_embd = divided.model.q_size();
    divided.batch.T = divided.model.n_positions = 2 * ranks;
    divided.micro_batches = 1;
    divided.documents = Documents::apart;
    divided.layout.zero.shards = ranks;
    divided.layout.context = ContextParallel{ranks, attention};
    find(divided, own_gpus(ranks), 1);
    divided.micro_batches = 3;  // the positions of whole sequences, too, arrive in two buffers in turn
    if (ulysses) find(divided, own_gpus(ranks), 1);
  }
  StepConfig sparse = tiny;  // rows for experts, in several rounds
  sparse.model = selftest::awkward_model("mixtral", false);
  sparse.model.n_layer = 1;
  sparse.model.n_head = sparse.model.n_kv_head = 1;
  sparse.model.head_size = 2;
  sparse.model.n_embd = 2;
  sparse.model.vocab_size = 31;
  sparse.model.experts.count = 4;
  sparse.model.experts.width = sparse.model.n_ffn = 3;
  sparse.micro_batches = 1;
  sparse.layout.zero.shards = 2;
  sparse.layout.expert = expert_parallel(sparse.model, 2);
  sparse.experts.imbalance = 0.6;
  find(sparse, own_gpus(2), 1);
  sparse.experts.capacity_factor = 1;  // with padding: the device alone learns how many rows there are
  find(sparse, own_gpus(2), 1);
  StepConfig staged = tiny;  // tied: the table's gradients have two parts
  staged.model.n_layer = 2;
  staged.layout.pipeline.stages = 2;
  staged.layout.pipeline.schedule =
      Schedule::gpipe;  // messages follow each other without an answer: two buffers are used again
  staged.micro_batches = 3;
  find(staged, own_gpus(2), 1);
  staged.layout.pipeline.schedule = Schedule::pipedream;
  staged.micro_batches = 1;
  staged.model.tied = false;
  find_in([=] { return asynchronous_steps(staged, own_gpus(2), 6); });  // two rounds of reports
  return programs;
}

}  // namespace

TEST_CASE("every wait of a stream for another one is needed", "[cuda][trainer][waits][long]") {
  const Gpus gpus(3);
  const std::vector<std::function<bool()>> programs = programs_with_waits();
  if (cuda_on_cpu::thread_sanitizer) {  // it would stop at the first mutant, as it should
    for (const auto& passes : programs) REQUIRE(passes());
    return;
  }
  // CPUs need this one: there two streams must not use a group at the same time, while NCCL keeps the order of the
  // host.
  const cuda_on_cpu::Mutants mutants = cuda_on_cpu::find_event_mutants(programs, [](const cuda_on_cpu::Site& site) {
    return site.source().find("the next to use the group of all ranks") != std::string::npos;
  });
  for (const cuda_on_cpu::Site& site : mutants.killed) UNSCOPED_INFO("missed: " << site.to_string());
  for (const cuda_on_cpu::Site& site : mutants.survivors) UNSCOPED_INFO("not missed: " << site.source());
  REQUIRE(mutants.survivors.empty());
  REQUIRE(mutants.killed.size() > 25);
}

TEST_CASE("no order of streams changes a bit", "[cuda][trainer][long]") {
  const Gpus gpus(3);
  const std::vector<std::function<bool()>> programs = programs_with_waits();
  const cuda_on_cpu::Restored restored;
  cuda_on_cpu::set_hosts_first(true);
  for (const cuda_on_cpu::Schedule& order : cuda_on_cpu::all_stream_orders()) {
    CAPTURE(cuda_on_cpu::to_string(order));
    cuda_on_cpu::set_schedule(order);
    for (size_t i = 0; i < programs.size(); ++i) {
      CAPTURE(i);
      REQUIRE(programs[i]());
    }
  }
}

#endif
