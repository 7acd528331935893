// Products in fp8 on CUDA, whose operands have numbers and scales where the CPU has rounded numbers: against the CPU,
// and with weights that are kept in fp8 from update to update, gathered, or gathered in fp8.
#include "cuda/trainer/trainer_test.h"
#include "train/not_finite.h"

using namespace llmc;

namespace {

ModelConfig model_in_fp8(const char* family = "qwen3", int64_t n_layer = 1) {
  ModelConfig m = selftest::awkward_model(family, false);
  m.n_layer = n_layer;
  m.n_head = m.n_kv_head = 2;
  m.head_size = 64;
  m.n_embd = 80;
  m.n_ffn = 128;
  m.vocab_size = 97;
  m.n_positions = 128;
  return m;
}
StepConfig step_in_fp8(Operands read, int dp = 1, int stage = 0) {
  StepConfig step = selftest::step_config(model_in_fp8(), DType::bf16, 1,
                                          ZeroConfig{.stage = stage, .grad_reduce = GradReduce::step, .shards = dp});
  step.micro_batches = 2 / dp;
  step.precision.linear = read;
  return step;
}

}  // namespace

TEST_CASE(
    "products in fp8 on a GPU are as near to the CPU's as both are to bf16, and the same bits in every stage of ZeRO",
    "[cuda][trainer][fp8]") {
  for (const Operands read : {Operands::fp8_block, Operands::fp8, Operands::mxfp8}) {
    CAPTURE(static_cast<int>(read));
    const selftest::Reference reference(step_in_fp8(read), {});
    const selftest::Comparison c = selftest::compare(reference, step_in_fp8(read), gpu, {});
    CAPTURE(c.distances.text(), reference.farther.text(), c.verdict());
    EXPECT(c.good());
  }
  StepConfig three = step_in_fp8(Operands::fp8_block, 2, 3);
  const selftest::Outcome two = selftest::run_layout(step_in_fp8(Operands::fp8_block, 2), gpu);
  EXPECT(same(selftest::run_layout(three, gpu), two));
  three.precision.gathers_fp8 = true;
  EXPECT(same(selftest::run_layout(three, gpu), two));
}

TEST_CASE("inputs that a forward keeps in fp8 are, bit for bit, those that a backward rounds", "[cuda][trainer][fp8]") {
  // SwiGLU writes fp8 itself where its channels fill whole blocks.
  const auto [family, channels] = GENERATE(std::pair{"qwen3", 128}, std::pair{"qwen3", 144}, std::pair{"gpt2", 128});
  CAPTURE(family, channels);
  const auto step = [&, family = family, channels = channels](Recompute recompute,
                                                              const PipelineParallel& pipeline = {}) {
    ModelConfig m = model_in_fp8(family, 2);
    m.n_ffn = channels;
    StepConfig s = selftest::step_config(m, DType::bf16, 1, Layout{.pipeline = pipeline});
    s.micro_batches = 2;
    s.precision.linear = Operands::fp8_block;
    s.recompute = recompute;
    return s;
  };
  const selftest::Outcome kept = selftest::run_layout(step(Recompute::none), gpu);
  EXPECT(same(selftest::run_layout(step(Recompute::activation), gpu), kept));
  if (channels != 128) return;  // what follows does not depend on who writes SwiGLU's output in fp8
  for (const Recompute recompute : {Recompute::norm, Recompute::block}) {
    CAPTURE(static_cast<int>(recompute));
    EXPECT(same(selftest::run_layout(step(recompute), gpu), kept));
  }
  // Several micro-batches in flight; the weight part of a backward in two reads inputs as they are stored.
  EXPECT(same(selftest::run_layout(step(Recompute::none, {Schedule::zb_h1, 2, 1}), gpu), kept));
}

TEST_CASE("the search for the first number that is not finite sees SwiGLU, else written in fp8",
          "[cuda][trainer][fp8]") {
  const StepConfig step = step_in_fp8(Operands::fp8_block);
  const Plan plan = make_plan(step, gpu.device);
  World world(step.layout.mesh(), gpu.backend);
  std::string found;
  run_ranks(world, [&](int rank) {
    Run run(step, plan, gpu.of_rank(rank), world, rank);
    init_weights(run.trainer.state(), 42, run.stream);
    for (const StateEntry& e : run.trainer.state().state_table())
      if (e.param->name == "blocks.0.ln2.weight" && e.kind == StateKind::weight) fill(e.tensor, 1e22f, run.stream);
    found = where_not_finite(
        run.trainer, [&](int64_t m) { return selftest::read_batch(step, run.groups.reader(), m); },
        [](int64_t m, int64_t b) { return 100 * m + b; });
  });
  INFO(found);
  EXPECT(found.find("in activated, written by swiglu_forward in the forward of blocks.0, micro-batch 0, sample") !=
         std::string::npos);
}
