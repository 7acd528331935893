// The layernorm kernels against the CPU op.
#include "cuda/device_test.h"
#include "ops/cpu/norms.h"
#include "ops/cuda/norms.cuh"

using namespace llmc;

namespace {

constexpr float eps = 1e-5f;

// Inputs of one size, and the CPU's results.
template <class T>
struct Case {
  int64_t N, C;
  Accumulate accumulate_dx;
  std::vector<T> x = normal_values<T>(N * C, 1, 3, 2), weight = normal_values<T>(C, 2, 1),
                 bias = normal_values<T>(C, 3), dout = normal_values<T>(N * C, 4), dx = normal_values<T>(N * C, 5);
  std::vector<float> dweight = normal_values<float>(C, 6), dbias = normal_values<float>(C, 7);

  Outputs cpu() const {
    std::vector<T> out(x.size()), dx_sum = dx;
    std::vector<float> mean(N), rstd(N), dw = dweight, db = dbias, partials(cpu::row_partitions * 2 * C);
    cpu::layernorm_forward(out.data(), mean.data(), rstd.data(), x.data(), weight.data(), bias.data(), eps, N, C);
    cpu::layernorm_backward(dx_sum.data(), dw.data(), db.data(), partials.data(), dout.data(), x.data(), weight.data(),
                            mean.data(), rstd.data(), N, C, accumulate_dx);
    return {{"out", out}, {"mean", mean}, {"rstd", rstd}, {"dx", dx_sum}, {"dweight", dw}, {"dbias", db}};
  }

  Outputs cuda() const {
    DeviceArray<T> out(N * C), dxs(N * C), xs(x), douts(dout), weights(weight), biases(bias);
    DeviceArray<float> mean(N), rstd(N), dw(dweight), db(dbias), partials(cuda::layernorm_backward_scratch(N, C));
    if (accumulate_dx == Accumulate::yes) CUDA_CHECK(cudaMemcpy(dxs, dx.data(), dxs.bytes(), cudaMemcpyHostToDevice));
    cuda::layernorm_forward<T>(out, mean, rstd, xs, weights, biases, eps, N, C, nullptr);
    cuda::layernorm_backward<T>(dxs, dw, db, {partials}, douts, xs, weights, mean, rstd, N, C, accumulate_dx, nullptr);
    return {{"out", out.host()}, {"mean", mean.host()},  {"rstd", rstd.host()},
            {"dx", dxs.host()},  {"dweight", dw.host()}, {"dbias", db.host()}};
  }
};

template <class T>
constexpr double tolerance = sizeof(T) == 2 ? 2e-3 : 2e-6;

}  // namespace

TEMPLATE_TEST_CASE("layernorm kernels match the CPU", "[cuda]", float, bf16) {
  // Rows of one thread, of less than a warp, ragged, of several warps, and of more packs than a block has threads.
  // Fewer rows than a block takes at a time, and so many that its warps take several.
  const auto [N, C] =
      GENERATE(std::pair{1, 1}, std::pair{3, 24}, std::pair{5, 100}, std::pair{9, 333}, std::pair{2, 4096},
               std::pair{17, 768}, std::pair{2, 1250}, std::pair{1, 8208}, std::pair{67, 264}, std::pair{35, 1400});
  const Accumulate accumulate_dx = GENERATE(Accumulate::no, Accumulate::yes);
  if (accumulate_dx == Accumulate::yes && N * C > 15000) return;  // as with fewer rows
  INFO("N = " << N << ", C = " << C);
  const Case<TestType> c{N, C, accumulate_dx};
  check_kernel([&] { return c.cuda(); }, c.cpu(), tolerance<TestType>);
}

TEMPLATE_TEST_CASE("layernorm kernels need every barrier", "[cuda]", float, bf16) {
  const Case<TestType> in_registers{10, 1032, Accumulate::no}, in_shared_memory{10, 333, Accumulate::no};
  check_barriers([&] { return joined(in_registers.cuda(), in_shared_memory.cuda()); });
}

TEST_CASE("layernorm refuses a row that does not fit into shared memory", "[cuda]") {
  REQUIRE_THROWS_WITH(
      cuda::layernorm_forward<float>(nullptr, nullptr, nullptr, nullptr, nullptr, nullptr, eps, 1, 60000, nullptr),
      Catch::Matchers::ContainsSubstring("60000 channels need 240000 bytes of shared memory"));
}
