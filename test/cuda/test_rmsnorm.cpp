// The rmsnorm kernels against the CPU op; fused residual addition and norm against the two ops.
#include "cuda/device_test.h"
#include "ops/cpu/norms.h"
#include "ops/cuda/elementwise.cuh"
#include "ops/cuda/norms.cuh"

using namespace llmc;

namespace {

constexpr float eps = 1e-6f;

template <class T>
struct Case {
  int64_t N, C;
  Accumulate accumulate_dx;
  std::vector<T> x = normal_values<T>(N * C, 1, 1, 2), weight = normal_values<T>(C, 2, 1),
                 dout = normal_values<T>(N * C, 4), dx = normal_values<T>(N * C, 5);
  std::vector<float> dweight = normal_values<float>(C, 6);

  Outputs cpu() const {
    std::vector<T> out(x.size()), dx_sum = dx;
    std::vector<float> rstd(N), dw = dweight, partials(cpu::row_partitions * C);
    cpu::rmsnorm_forward(out.data(), rstd.data(), x.data(), weight.data(), eps, N, C);
    cpu::rmsnorm_backward(dx_sum.data(), dw.data(), partials.data(), dout.data(), x.data(), weight.data(), rstd.data(),
                          N, C, accumulate_dx);
    return {{"out", out}, {"rstd", rstd}, {"dx", dx_sum}, {"dweight", dw}};
  }

  Outputs cuda() const {
    DeviceArray<T> out(N * C), dxs(N * C), xs(x), douts(dout), weights(weight);
    DeviceArray<float> rstd(N), dw(dweight), partials(cuda::rmsnorm_backward_scratch(N, C));
    if (accumulate_dx == Accumulate::yes) CUDA_CHECK(cudaMemcpy(dxs, dx.data(), dxs.bytes(), cudaMemcpyHostToDevice));
    cuda::rmsnorm_forward<T>(out, rstd, xs, weights, eps, N, C, nullptr);
    cuda::rmsnorm_backward<T>(dxs, dw, {partials}, douts, xs, weights, rstd, N, C, accumulate_dx, nullptr);
    return {{"out", out.host()}, {"rstd", rstd.host()}, {"dx", dxs.host()}, {"dweight", dw.host()}};
  }
};

template <class T>
constexpr double tolerance = sizeof(T) == 2 ? 2e-3 : 2e-6;

}  // namespace

TEMPLATE_TEST_CASE("rmsnorm kernels match the CPU", "[cuda]", float, bf16) {
  // Rows of one thread, of less than a warp, ragged, of several warps, and of more packs than a block has threads.
  const auto [N, C] = GENERATE(std::pair{1, 1}, std::pair{3, 24}, std::pair{9, 333}, std::pair{17, 768},
                               std::pair{2, 4096}, std::pair{1, 8208}, std::pair{35, 1400});
  const Accumulate accumulate_dx = GENERATE(Accumulate::no, Accumulate::yes);
  if (accumulate_dx == Accumulate::yes && N * C > 15000) return;  // as with fewer rows
  INFO("N = " << N << ", C = " << C);
  const Case<TestType> c{N, C, accumulate_dx};
  const auto compared = [C = C](Outputs outputs) {  // a row of one channel becomes 1 or -1: dx is rounding
    if (C == 1) std::erase_if(outputs, [](const Output& o) { return o.name == "dx"; });
    return outputs;
  };
  check_kernel([&] { return compared(c.cuda()); }, compared(c.cpu()), tolerance<TestType>);
}

TEMPLATE_TEST_CASE("rmsnorm kernels need every barrier", "[cuda]", float, bf16) {
  const Case<TestType> in_registers{10, 1032, Accumulate::no}, in_shared_memory{10, 333, Accumulate::no};
  check_barriers([&] { return joined(in_registers.cuda(), in_shared_memory.cuda()); });
}

TEMPLATE_TEST_CASE("fused residual addition and norm have the bits of the two ops", "[cuda]", float, bf16) {
  using T = TestType;
  const auto [N, C] = GENERATE(std::pair{1, 3}, std::pair{5, 100}, std::pair{3, 520});
  const auto a = normal_values<T>(N * C, 1), b = normal_values<T>(N * C, 2), weight = normal_values<T>(C, 3, 1),
             bias = normal_values<T>(C, 4);
  const auto run = [&, N = N, C = C](bool in_one_pass) -> Outputs {
    DeviceArray<T> sum(N * C), other_sum(N * C), norm(N * C), other_norm(N * C), as(a), bs(b), weights(weight),
        biases(bias);
    DeviceArray<float> rstd(N), mean(N), other_rstd(N);
    if (in_one_pass) {
      cuda::residual_rmsnorm_forward<T>(norm, rstd, sum, as, bs, weights, eps, N, C, nullptr);
      cuda::residual_layernorm_forward<T>(other_norm, mean, other_rstd, other_sum, as, bs, weights, biases, eps, N, C,
                                          nullptr);
    } else {
      cuda::residual_forward<T>(sum, as, bs, N * C, nullptr);
      cuda::residual_forward<T>(other_sum, as, bs, N * C, nullptr);
      cuda::rmsnorm_forward<T>(norm, rstd, sum, weights, eps, N, C, nullptr);
      cuda::layernorm_forward<T>(other_norm, mean, other_rstd, sum, weights, biases, eps, N, C, nullptr);
    }
    return {{"sum", sum.host()},
            {"rmsnorm", norm.host()},
            {"rstd", rstd.host()},
            {"mean", mean.host()},
            {"layernorm", other_norm.host()},
            {"layernorm's rstd", other_rstd.host()},
            {"sum again", other_sum.host()}};
  };
  const Outputs two_ops = run(false);
  REQUIRE(same_bits(check_kernel([&] { return run(true); }, two_ops, 1e-30), two_ops));
}
