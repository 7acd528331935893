// The SwiGLU kernels against the CPU op.
#include "cuda/device_test.h"
#include "ops/cpu/swiglu.h"
#include "ops/cuda/swiglu.cuh"

using namespace llmc;

TEMPLATE_TEST_CASE("SwiGLU kernels match the CPU", "[cuda]", float, bf16) {
  using T = TestType;
  // One element, less than a pack, ragged, whole packs, several blocks to a row.
  const auto [N, F] =
      GENERATE(std::pair{1, 1}, std::pair{3, 7}, std::pair{4, 300}, std::pair{3, 96}, std::pair{2, 2056});
  const auto gate_up = normal_values<T>(N * 2 * F, 1, 0, 3), dout = normal_values<T>(N * F, 2);
  std::vector<T> out(dout.size()), dgate_up(gate_up.size());
  cpu::swiglu_forward(out.data(), gate_up.data(), N, F);
  cpu::swiglu_backward(dgate_up.data(), dout.data(), gate_up.data(), N, F);
  const auto run = [&, N = N, F = F]() -> Outputs {
    DeviceArray<T> outs(N * F), in(gate_up), gradient(dout), din(N * 2 * F);
    cuda::swiglu_forward<T>(outs, in, N, F, nullptr, nullptr);
    cuda::swiglu_backward<T>(din, gradient, in, N, F, nullptr, nullptr);
    return {{"out", outs.host()}, {"dgate_up", din.host()}};
  };
  check_kernel(run, {{"out", out}, {"dgate_up", dgate_up}}, sizeof(T) == 2 ? 1e-3 : 1e-6);
}
