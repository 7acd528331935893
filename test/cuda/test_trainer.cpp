// The trainer in its CUDA form against the CPU device: contract 5.
#include "cuda/device_test.h"
#include "train/selftest.h"

using namespace llmc;

namespace {

constexpr Device gpu{.kind = DeviceKind::cuda};

// Two micro-batches of two short sequences.
StepConfig small_step(const char* family, DType dtype, const ZeroConfig& zero = {}) {
  StepConfig step = selftest::step_config(selftest::awkward_model(family), dtype, 2, zero);
  step.micro_batches = 2;
  return step;
}

selftest::Distances distances_from_cpu(const StepConfig& step) {
  return {selftest::run_layout(step, gpu), selftest::run_layout(step)};
}

}  // namespace

TEST_CASE("the trainer computes on a GPU what it does on the CPU", "[cuda][trainer]") {
  const char* family = GENERATE("gpt2", "llama", "qwen3");
  CAPTURE(family);
  const StepConfig step = small_step(family, DType::fp32);
  const selftest::Distances d = distances_from_cpu(step);
  CAPTURE(d.loss, d.norm, d.gradients, d.weights);
  REQUIRE(d.loss < 1e-6);
  REQUIRE(d.norm < 1e-5);
  REQUIRE(d.gradients < 1e-5);
  REQUIRE(d.weights < 1e-5);
}
