// Muon on CUDA: the iteration of matrices, their rows, their way to an owner and back, and QK-clip, against the CPU.
#include "cuda/trainer/trainer_test.h"

using namespace llmc;

namespace {

StepConfig step_with_muon(const char* family, DType dtype, const Layout& layout = {}) {
  StepConfig step = selftest::step_config(selftest::awkward_model(family), dtype, 1, layout);
  step.layout.zero.optimizer = Optimizer::muon;
  if (step.model.family.qk_norm == QkNorm::none) step.qk_clip = 0.01;  // which many heads exceed
  else step.layout.zero.muon.rows = MuonRows::normalised;
  step.model.n_layer = 2;
  step.micro_batches = 4 / step.layout.readers();
  return step;
}

}  // namespace

TEST_CASE("Muon on a GPU matches the CPU", "[cuda][trainer][muon]") {
  StepConfig step = step_with_muon("olmoe", DType::fp32);
  step.model.n_layer = 1;
  require_close(selftest::run_layout(step, gpu), selftest::run_layout(step));
}

TEST_CASE("Muon on a GPU in bf16 is as good as on the CPU", "[cuda][trainer][muon]") {
  const StepConfig step = step_with_muon("gpt2", DType::bf16);
  require_as_good(selftest::run_layout(step, gpu), selftest::run_layout(step),
                  selftest::run_layout(step_with_muon("gpt2", DType::fp32)));
}

TEST_CASE("with Muon GPUs that have the parts of a matrix make the update of one", "[cuda][trainer][muon]") {
#ifndef __CUDACC__
  const Gpus gpus(4);
#endif
  const selftest::Outcome alone = selftest::run_layout(step_with_muon("llama", DType::fp32), gpu);
  const selftest::Machine machine = built_with_nccl && visible_gpus().count >= 4 ? own_gpus(4) : gpu;
  for (const auto& [tp, stage] : {std::pair{1, 0}, {2, 2}}) {
    CAPTURE(tp, stage, name_of(machine.backend));
    Layout layout{.zero = {.grad_reduce = GradReduce::micro, .shards = 4 / tp},
                  .tensor = tensor_parallel(selftest::awkward_model("llama"), tp)};
    layout.zero.stage = stage;
    require_close(selftest::run_layout(step_with_muon("llama", DType::fp32, layout), machine), alone);
  }
}

#ifndef __CUDACC__

TEST_CASE("every wait for a matrix on its way is needed, and no order of streams changes a bit",
          "[cuda][trainer][muon][waits][long]") {
  if (cuda_on_cpu::thread_sanitizer) return;  // it would stop at the first mutant, as it should
  const Gpus gpus(2);
  StepConfig step = step_with_muon("llama", DType::fp32, {.zero = {.shards = 2}});
  step.layout.zero.muon.rows = MuonRows::normalised;
  step.model.n_layer = 3;  // several units in a round
  step.model.vocab_size = 31;
  step.batch.T = 4;
  step.layout.zero.set_stage(2);
  const auto outcome = [step] { return asynchronous_steps(step, own_gpus(2), 2); };
  const cuda_on_cpu::Mutants mutants = cuda_on_cpu::find_event_mutants(
      {[outcome, right = outcome()] {
        const selftest::Outcome found = outcome();
        return same(found, right) && found.optimizer_state == right.optimizer_state;
      }},
      [](const cuda_on_cpu::Site& site) { return site.file.find("matrix_updates.h") == std::string::npos; });
  for (const cuda_on_cpu::Site& site : mutants.killed) UNSCOPED_INFO("missed: " << site.to_string());
  for (const cuda_on_cpu::Site& site : mutants.survivors) UNSCOPED_INFO("not missed: " << site.to_string());
  REQUIRE(mutants.survivors.empty());
  REQUIRE(mutants.killed.size() == 4);
}

#endif
