// offload_layouts.h: steps with state in host memory or in files, and the comparison with the same on the device.
#pragma once
#include <string>

#include "catch2.h"
#include "helpers.h"
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
inline void require_same(const StepConfig& offloaded) {
  StepConfig step = offloaded;
  step.layout.zero.offload = {};
  const selftest::Outcome expected = selftest::run_layout(step), found = selftest::run_layout(offloaded);
  REQUIRE(expected.fault == "");
  REQUIRE(found.fault == "");
  REQUIRE(found.same_bits(expected));
  REQUIRE(found.optimizer_state == expected.optimizer_state);
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
