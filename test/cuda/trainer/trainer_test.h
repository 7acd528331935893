// trainer_test.h: shared by the tests of the trainer on GPUs: outcomes of layouts (run/selftest.h) and how they
// compare; emulated GPUs.
#pragma once
#include <algorithm>

#include "cuda/device_test.h"
#include "device/gpu.h"
#include "run/selftest.h"

namespace llmc {

inline constexpr selftest::Machine gpu{.device = {.kind = DeviceKind::cuda}};

// GPUs of their own for the ranks, with NCCL between them.
inline selftest::Machine own_gpus(int count) { return {.device = gpu.device, .backend = Backend::nccl, .gpus = count}; }

// Contract 5 in fp32.
inline void require_close(const selftest::Outcome& outcome, const selftest::Outcome& wanted) {
  const selftest::Distances d(outcome, wanted);
  CAPTURE(d.loss, d.norm, d.gradients, d.weights);
  REQUIRE(outcome.fault == "");
  REQUIRE(d.loss < 1e-6);
  REQUIRE(std::max({d.norm, d.gradients, d.weights}) < 1e-5);
}

// In bf16 the devices round at different places (attention's probabilities are bf16 on tensor cores): the GPU is not
// much farther from fp32 than the CPU is.
inline void require_as_good(const selftest::Outcome& gpu_bf16, const selftest::Outcome& cpu_bf16,
                            const selftest::Outcome& fp32) {
  const selftest::Distances d(gpu_bf16, fp32), usual(cpu_bf16, fp32);
  CAPTURE(d.loss, d.norm, d.gradients, d.weights, usual.loss, usual.norm, usual.gradients, usual.weights);
  REQUIRE(gpu_bf16.fault == "");
  REQUIRE(d.loss < std::max(1.5 * usual.loss, 1e-3));
  REQUIRE(d.norm < std::max(1.5 * usual.norm, 0x1p-8));
  REQUIRE(d.gradients < std::max(1.5 * usual.gradients, 0x1p-8));
  REQUIRE(d.weights < std::max(1.5 * usual.weights, 0x1p-8));
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
