// trainer_test.h: shared by the tests of the trainer on GPUs: outcomes of layouts (run/selftest/selftest.h) and how
// they compare; emulated GPUs.
#pragma once
#include <algorithm>
#include <mutex>
#include <vector>

#include "cuda/device_test.h"
#include "device/gpu.h"
#include "run/selftest/selftest.h"

namespace llmc {

inline const selftest::Machine gpu{.device = {.kind = DeviceKind::cuda}};

// GPUs of their own for the ranks, with NCCL between them.
inline selftest::Machine own_gpus(int count) { return {.device = gpu.device, .backend = Backend::nccl, .gpus = count}; }

// Steps that all begin before the host waits for one, a flush, a validation and one more step: losses, norms and
// weights.
inline selftest::Outcome asynchronous_steps(const StepConfig& step, const selftest::Machine& machine, int steps) {
  selftest::Outcome outcome;
  std::mutex mutex;
  const Plan plan = make_plan(step, machine.device);
  World world(step.layout.mesh(), machine.backend);
  run_ranks(world, [&](int rank) {
    Run run(step, plan, machine.of_rank(rank), world, rank);
    init_weights(run.trainer.state(), 42, run.stream);
    std::vector<PendingStep> pending;
    auto begin_step = [&](int k) {
      pending.push_back(run.trainer.begin_step(
          [&, k](int64_t) { return selftest::read_batch(step, run.groups.reader(), k); },
          {.lr = 1e-2f, .beta1 = 0.9f, .beta2 = 0.95f, .eps = 1e-2f, .weight_decay = 0.1f, .step = k + 1},
          {.max_norm = 1}));
    };
    for (int k = 0; k < steps; ++k) begin_step(k);
    run.trainer.flush();
    std::vector<double> losses, norms;
    losses.push_back(run.trainer.evaluate(2, 2 * step.batch.rows() * step.layout.readers(), [&](int64_t m) {
      return selftest::read_batch(step, run.groups.reader(), m);
    }));
    begin_step(steps);
    run.trainer.flush();
    run.stream.synchronize();
    for (const PendingStep& p : pending) losses.push_back(p.wait().loss), norms.push_back(p.wait().grad_norm);
    const std::lock_guard lock(mutex);
    selftest::collect_state(outcome, run.trainer.state(), rank, run.stream);
    if (outcome.losses.empty()) outcome.losses = losses, outcome.norms = norms;
    if (outcome.losses != losses || outcome.norms != norms) outcome.fault = "ranks report other losses or norms";
  });
  return outcome;
}

// Contract 5 in fp32.
inline void require_close(const selftest::Outcome& outcome, const selftest::Outcome& wanted) {
  const selftest::Distances d(outcome, wanted);
  CAPTURE(d.loss, d.norm, d.gradients, d.weights);
  EXPECT(outcome.fault == "");
  EXPECT(d.loss < 1e-6);
  EXPECT(std::max({d.norm, d.gradients, d.weights}) < 1e-5);
}

// In bf16 the devices round at different places (attention's probabilities are bf16 on tensor cores): the GPU is not
// much farther from fp32 than the CPU is.
inline void require_as_good(const selftest::Outcome& gpu_bf16, const selftest::Outcome& cpu_bf16,
                            const selftest::Outcome& fp32) {
  const selftest::Distances d(gpu_bf16, fp32), usual(cpu_bf16, fp32);
  CAPTURE(d.loss, d.norm, d.gradients, d.weights, usual.loss, usual.norm, usual.gradients, usual.weights);
  EXPECT(gpu_bf16.fault == "");
  EXPECT(d.loss < std::max(1.5 * usual.loss, 1e-3));
  EXPECT(d.norm < std::max(1.5 * usual.norm, 0x1p-8));
  EXPECT(d.gradients < std::max(1.5 * usual.gradients, 0x1p-8));
  EXPECT(d.weights < std::max(1.5 * usual.weights, 0x1p-8));
}

// Bit by bit.
inline bool same(const selftest::Outcome& a, const selftest::Outcome& b) {
  return a.losses == b.losses && a.norms == b.norms && a.gradients == b.gradients && a.weights == b.weights;
}

#ifndef __CUDACC__
// That many emulated GPUs, for the lifetime of the object.
struct Gpus {
  explicit Gpus(int count) { cuda_on_cpu::set_devices(count); }
  ~Gpus() {
    try {
      cuda_on_cpu::set_devices(1);
    } catch (const cuda_on_cpu::Failure& left) {
      FAIL_CHECK(left.what());
    }
  }
  Gpus(const Gpus&) = delete;
  Gpus& operator=(const Gpus&) = delete;
};
#endif

}  // namespace llmc
