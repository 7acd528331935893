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

TEMPLATE_TEST_CASE("SwiGLU's gradient in fp8 has the bits of the gradient that is then rounded", "[cuda]", float,
                   bf16) {
  using T = TestType;
  const int64_t N = 144, F = 256, values = N * 2 * F, rows_scales = 2 * F / fp8_block * N,
                columns_scales = ceil_div(N, fp8_block) * 2 * F;
  const auto gate_up = normal_values<T>(values, 1, 0, 3), dout = normal_values<T>(N * F, 2);
  const auto run = [&](bool fused) -> Outputs {
    DeviceArray<T> in(gate_up), gradient(dout), din(values);
    DeviceArray<e4m3> rows(values), columns(values);
    DeviceArray<float> of_rows(rows_scales), of_columns(columns_scales);
    const cuda::Fp8Operand to_rows{rows, of_rows}, to_columns{columns, of_columns};
    if (fused) {
      cuda::swiglu_backward_fp8<T>(to_rows, to_columns, gradient, in, N, F, nullptr);
    } else {
      cuda::swiglu_backward<T>(din, gradient, in, N, F, nullptr, nullptr);
      cuda::quantise<T>(to_rows, to_columns, din, N, 2 * F, ScaledBy::segments, nullptr);
    }
    return {{"rows", rows.host()},
            {"columns", columns.host()},
            {"row scales", of_rows.host()},
            {"column scales", of_columns.host()}};
  };
  const Outputs apart = run(false), fused = check_kernel([&] { return run(true); }, apart, 1e-12);
  REQUIRE(same_bits(fused, apart));
  if (sizeof(T) == 2) check_barriers([&] { return run(true); });
}
