// on_ranks.h: a function on every rank of a layout, as threads, and memory of its plan; shared by the tests of layouts.
#pragma once
#include "run/ranks.h"

// f(run) on every rank of a layout with fresh weights.
template <class F>
void on_ranks(const llmc::StepConfig& step, F&& f) {
  using namespace llmc;
  World world(step.layout.mesh(), Backend::threads, poison_hooks);
  const Plan plan = make_plan(step, {DeviceKind::cpu, 1});
  run_ranks(world, [&](int rank) {
    Run run(step, plan, {DeviceKind::cpu, 1}, world, rank);
    init_weights(run.trainer.state(), 42, run.stream);
    f(run);
  });
}

// The bytes that a plan counts under this label.
inline int64_t planned_bytes(const llmc::Plan& plan, const std::string& label) {
  int64_t bytes = 0;
  for (const llmc::MemoryLine& line : plan.memory)
    if (line.label == label) bytes += line.bytes;
  return bytes;
}
