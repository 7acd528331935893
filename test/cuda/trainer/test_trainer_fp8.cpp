// Products in fp8 on CUDA, whose operands have numbers and scales where the CPU has rounded numbers: against the CPU,
// and with weights that are kept in fp8 from update to update, gathered, or gathered in fp8.
#include "cuda/trainer/trainer_test.h"

using namespace llmc;

namespace {

StepConfig step_in_fp8(Operands read, int dp = 1, int stage = 0) {
  ModelConfig m = selftest::awkward_model("qwen3", false);
  m.n_layer = 1;
  m.n_head = m.n_kv_head = 2;
  m.head_size = 64;
  m.n_embd = 80;
  m.n_ffn = 128;
  m.vocab_size = 97;
  m.n_positions = 128;
  StepConfig step = selftest::step_config(m, DType::bf16, 1,
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
    CAPTURE(c.distances.text(), reference.farther().text(), c.verdict());
    EXPECT(c.good());
  }
  StepConfig three = step_in_fp8(Operands::fp8_block, 2, 3);
  const selftest::Outcome two = selftest::run_layout(step_in_fp8(Operands::fp8_block, 2), gpu);
  EXPECT(same(selftest::run_layout(three, gpu), two));
  three.precision.gathers_fp8 = true;
  EXPECT(same(selftest::run_layout(three, gpu), two));
}
