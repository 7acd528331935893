// The SwiGLU kernels against the CPU op.
#include "cuda/device_test.h"
#include "ops/cpu/elementwise.h"
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

TEST_CASE("SwiGLU kernels leave rows alone that are not there", "[cuda]") {
  const int64_t N = 5, F = 24, rows = GENERATE(0, 3);
  auto gate_up = normal_values<bf16>(N * 2 * F, 1), dout = normal_values<bf16>(N * F, 2);
  const std::vector<bf16> untouched = normal_values<bf16>(N * 2 * F, 3);
  std::vector<bf16> out(untouched.begin(), untouched.begin() + N * F), dgate_up = untouched;
  const int32_t count = static_cast<int32_t>(rows);
  cpu::swiglu_forward(out.data(), gate_up.data(), N, F, &count);
  cpu::swiglu_backward(dgate_up.data(), dout.data(), gate_up.data(), N, F, &count);
  for (int64_t i = rows * F; i < N * F; ++i) REQUIRE(out[i].bits == untouched[i].bits);
  const auto run = [&]() -> Outputs {
    DeviceArray<bf16> outs(std::vector<bf16>(untouched.begin(), untouched.begin() + N * F)), in(gate_up),
        gradient(dout), din(untouched);
    DeviceArray<int32_t> counts(std::vector<int32_t>{count});
    cuda::swiglu_forward<bf16>(outs, in, N, F, counts, nullptr);
    cuda::swiglu_backward<bf16>(din, gradient, in, N, F, counts, nullptr);
    return {{"out", outs.host()}, {"dgate_up", din.host()}};
  };
  check_kernel(run, {{"out", out}, {"dgate_up", dgate_up}}, 1e-3);
}

TEMPLATE_TEST_CASE("SwiGLU in fp8 and its gradient have the bits of numbers that are then rounded", "[cuda]", float,
                   bf16) {
  using T = TestType;
  const int64_t N = 144, F = 256;
  const auto gate_up = normal_values<T>(N * 2 * F, 1, 0, 3), dout = normal_values<T>(N * F, 2);
  // x (N, C) in fp8 as write() leaves it
  const auto both = [&](int64_t C, auto write) -> Outputs {
    DeviceArray<e4m3> rows(N * C), columns(N * C);
    DeviceArray<float> of_rows(C / fp8_block * N), of_columns(ceil_div(N, fp8_block) * C);
    write(cuda::Fp8Operand{rows, of_rows}, cuda::Fp8Operand{columns, of_columns});
    return {{"rows", rows.host()},
            {"columns", columns.host()},
            {"row scales", of_rows.host()},
            {"column scales", of_columns.host()}};
  };
  const auto run = [&](bool at_once) {
    DeviceArray<T> in(gate_up), gradient(dout), out(N * F), din(N * 2 * F);
    const auto round = [&](T* x, int64_t C, cuda::Fp8Operand rows, cuda::Fp8Operand columns) {
      cuda::quantise<T>(rows, columns, x, N, C, ScaledBy::segments, nullptr);
    };
    return joined(both(F,
                       [&](auto rows, auto columns) {
                         if (at_once) return cuda::swiglu_forward_fp8<T>(rows, columns, in, N, F, nullptr);
                         cuda::swiglu_forward<T>(out, in, N, F, nullptr, nullptr);
                         round(out, F, rows, columns);
                       }),
                  both(2 * F, [&](auto rows, auto columns) {
                    if (at_once) return cuda::swiglu_backward_fp8<T>(rows, columns, gradient, in, N, F, nullptr);
                    cuda::swiglu_backward<T>(din, gradient, in, N, F, nullptr, nullptr);
                    round(din, 2 * F, rows, columns);
                  }));
  };
  const Outputs apart = run(false), at_once = check_kernel([&] { return run(true); }, apart, 1e-12);
  REQUIRE(same_bits(at_once, apart));
  if (sizeof(T) == 2) check_barriers([&] { return run(true); });
}
