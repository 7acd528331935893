// State in host memory on GPUs (--offload): the bits of a run that has everything on the device, or within contract 5
// if the host updates it, and every wait for its copies is needed.
#include <functional>

#include "cuda/trainer/trainer_test.h"
#include "helpers.h"

using namespace llmc;

namespace {

// A tiny model, of whose units every one comes in pieces.
StepConfig tiny_step(DType dtype, int stage, int shards, std::initializer_list<Offloaded> parts) {
  StepConfig step = selftest::step_config(selftest::awkward_model("gpt2"), dtype, 1, Layout{});
  step.model.n_layer = 2;
  step.model.n_head = step.model.n_kv_head = 1;
  step.model.n_embd = step.model.head_size;
  step.model.n_ffn = 9;
  step.model.vocab_size = 31;
  step.batch.T = 4;
  step.micro_batches = 2;
  ZeroConfig& zero = step.layout.zero;
  zero.shards = shards;
  zero.offload.piece = 128;
  for (const Offloaded part : parts) zero.offload.add(part);
  zero.set_stage(stage);
  return step;
}
std::vector<StepConfig> steps_with_offload() {
  using enum Offloaded;
  StepConfig outputs = tiny_step(DType::fp32, 0, 1, {activations});
  outputs.model.n_layer = 4;  // with three, no output waits for the one before the last to be copied
  outputs.recompute = Recompute::block;
  return {tiny_step(DType::bf16, 0, 1, {moments, master}),
          tiny_step(DType::bf16, 3, 2, {moments, master, gradients, weights}), outputs};
}
// The same, updated by the host: with masters; with weights that are read; with weights that stay.
std::vector<StepConfig> steps_of_host() {
  using enum Offloaded;
  std::vector<StepConfig> all = {tiny_step(DType::bf16, 0, 1, {moments, master}),
                                 tiny_step(DType::fp32, 1, 2, {moments}),
                                 tiny_step(DType::bf16, 3, 2, {moments, master, gradients, weights})};
  for (StepConfig& step : all) step.layout.zero.offload.update = OffloadUpdate::host;
  return all;
}
selftest::Machine machine_for(const StepConfig& step) { return step.layout.ranks() == 1 ? gpu : own_gpus(2); }

// Calls check(found, expected) with the steps and with those that keep everything on the device, of both kinds of
// steps.
template <class Check>
void compare(const StepConfig& step, Check&& check) {
  StepConfig without = step;
  without.layout.zero.offload = {};
  for (const auto& run : {std::function([](const StepConfig& s) { return selftest::run_layout(s, machine_for(s)); }),
                          {[](const StepConfig& s) { return asynchronous_steps(s, machine_for(s), 2); }}}) {
    const selftest::Outcome found = run(step), expected = run(without);
    REQUIRE(found.fault == "");
    check(found, expected);
  }
}

}  // namespace

#ifndef __CUDACC__

TEST_CASE("on GPUs state in host memory, and in files, changes no bit", "[cuda][trainer][offload]") {
  const Gpus gpus(2);
  const TempDir dir;
  std::vector<StepConfig> steps = steps_with_offload();
  for (size_t i = 0; i < 2; ++i) {  // moments in a file
    steps.push_back(steps[i]);
    steps.back().layout.zero.offload.directory = dir.path();
  }
  for (const StepConfig& step : steps)
    compare(step, [](const selftest::Outcome& found, const selftest::Outcome& expected) {
      REQUIRE(same(found, expected));
      REQUIRE(found.optimizer_state == expected.optimizer_state);
    });
}

TEST_CASE("on GPUs what the host updates agrees with what they update", "[cuda][trainer][offload]") {
  const Gpus gpus(2);
  const TempDir dir;
  std::vector<StepConfig> steps = steps_of_host();
  steps.push_back(steps[0]);
  steps.back().layout.zero.offload.directory = dir.path();  // moments in a file
  steps.push_back(steps[0]);
  steps.back().precision.averages = true;
  for (const StepConfig& step : steps)
    compare(step, [&](const selftest::Outcome& found, const selftest::Outcome& expected) {
#ifndef __FMA__  // no product and sum are contracted, on either
      REQUIRE(same(found, expected));
      REQUIRE(found.optimizer_state == expected.optimizer_state);
#endif
      const selftest::Distances d(found, expected);
      REQUIRE(d.loss < (step.precision.weights == DType::bf16 ? 1e-3 : 1e-6));
      REQUIRE(d.weights < (step.precision.weights == DType::bf16 ? 0x1p-8 : 1e-5));
    });
}

TEST_CASE("every wait for state in host memory is needed, and no order of streams changes a bit",
          "[cuda][trainer][offload][waits][long]") {
  if (cuda_on_cpu::thread_sanitizer) return;  // it would stop at the first mutant, as it should
  const Gpus gpus(2);
  std::vector<std::function<bool()>> programs;
  std::vector<StepConfig> steps = steps_with_offload();
  for (const StepConfig& step : steps_of_host()) steps.push_back(step);
  for (const StepConfig& step : steps) {
    const auto outcome = [step] { return asynchronous_steps(step, machine_for(step), 2); };
    programs.push_back([outcome, right = outcome()] { return same(outcome(), right); });
  }
  const cuda_on_cpu::Mutants mutants = cuda_on_cpu::find_event_mutants(programs, [](const cuda_on_cpu::Site& site) {
    return site.file.find("host_") == std::string::npos && site.source().find("last update's") == std::string::npos;
  });
  for (const cuda_on_cpu::Site& site : mutants.killed) UNSCOPED_INFO("missed: " << site.to_string());
  for (const cuda_on_cpu::Site& site : mutants.survivors) UNSCOPED_INFO("not missed: " << site.to_string());
  REQUIRE(mutants.survivors.empty());
  REQUIRE(mutants.killed.size() == 15);
}

#endif
