// offload_layouts.h: steps with state in host memory or in files, and the comparison with the same on the device.
#pragma once
#include <functional>
#include <mutex>
#include <string>
#include <vector>

#include "catch2.h"
#include "helpers.h"
#include "parallel/on_ranks.h"
#include "run/selftest/selftest.h"

namespace offload_layouts {

using namespace llmc;

// Pieces are small, so that every unit has several.
inline Offload offload(std::initializer_list<Offloaded> parts) {
  Offload all{.piece = 128};
  for (const Offloaded part : parts) all.add(part);
  return all;
}
inline StepConfig step_of(const char* family, DType dtype, Layout layout, const Offload& offloaded) {
  layout.zero.offload = offloaded;
  if (offloaded.has(Offloaded::gradients)) layout.zero.grad_reduce = GradReduce::micro;
  const ModelConfig model = selftest::awkward_model(family, false);
  layout.tensor = tensor_parallel(model, layout.tensor.ranks);
  StepConfig step = selftest::step_config(model, dtype, 2, layout);
  step.micro_batches = 2;
  return step;
}
inline Layout layout_of(int stage, int shards) {
  Layout layout{.zero = {.shards = shards}};
  layout.zero.set_stage(stage);
  return layout;
}
// Three steps, each of which begins before the update of the one before has ended. `skipped`, if not 0, is not applied,
// its norm being above the limit.
inline selftest::Outcome steps_in_a_row(const StepConfig& step, int64_t skipped = 0) {
  selftest::Outcome outcome;
  std::mutex mutex;
  on_ranks(step, [&](Run& run) {
    const BatchSource batches = [&](int64_t m) { return selftest::read_batch(step, run.groups.reader(), m); };
    std::vector<PendingStep> pending;
    for (int64_t s = 1; s <= 3; ++s) {
      UpdateRule rule{.max_norm = 1};
      if (s == skipped) rule.largest_norm = 1e-9;
      const Optimizer optimizer = step.layout.zero.optimizer;
      pending.push_back(run.trainer.begin_step(batches, selftest::update_options(optimizer, s), rule));
    }
    run.trainer.flush();
    std::vector<double> losses;
    const std::lock_guard lock(mutex);
    for (int64_t s = 1; s <= 3; ++s) {
      const StepResult r = pending[static_cast<size_t>(s - 1)].wait();
      if (r.applied != (s != skipped)) outcome.fault = "another update was skipped";
      losses.push_back(r.loss);
    }
    selftest::collect_state(outcome, run.trainer.state(), run.groups.rank(), run.stream);
    outcome.losses = losses;
  });
  return outcome;
}

inline void require_same(const StepConfig& offloaded) {
  StepConfig step = offloaded;
  step.layout.zero.offload = {};
  const auto each_alone = [](const StepConfig& s) { return selftest::run_layout(s); };
  const auto in_a_row = [](const StepConfig& s) { return steps_in_a_row(s); };
  for (const std::function<selftest::Outcome(const StepConfig&)>& run : {std::function(each_alone), {in_a_row}}) {
    const selftest::Outcome expected = run(step), found = run(offloaded);
    REQUIRE(expected.fault == "");
    REQUIRE(found.fault == "");
    REQUIRE(found.same_bits(expected));
    REQUIRE(found.optimizer_state == expected.optimizer_state);
  }
}

// Runs of one small model on two ranks, with averages, each in a directory of its own.
struct SavedRuns {
  TempDir dir;

  void train(const std::string& out, const std::string& options) const {
    const ProgramResult r = run_program(
        "--model d2 --n-embd 64 --n-head 1 --vocab-size 257 -t 32 -b 2 -d 128 --dtype bf16 --local-ranks 2 --threads 1 "
        "--sample-every 0 --val-every 0 --ema 0.9 --checkpoint-every 2 --lr-schedule constant "
        "-i test/golden/gpt2_tiny/train.bin -o " +
        (dir / out) + " " + options);
    INFO(options << ": " << r.out << r.err);
    REQUIRE(r.status == 0);
  }
  // Everything in the checkpoint of step 6.
  std::string state(const std::string& out) const {
    std::string all;
    for (const std::string& name : names_in(dir / (out + "/step-000006")))
      if (name.ends_with(".safetensors")) all += name + read_whole(dir / (out + "/step-000006/" + name));
    return all;
  }
};

}  // namespace offload_layouts
