// Muon's kernels against the CPU ops.
#include "cuda/device_test.h"
#include "ops/cpu/muon.h"
#include "ops/cuda/muon.cuh"

using namespace llmc;

TEMPLATE_TEST_CASE("the kernels that normalise rows match the CPU", "[cuda]", float, bf16) {
  using T = TestType;
  const int64_t rows = GENERATE(1, 3, 300), columns = rows == 300 ? 5 : GENERATE(1, 37, 700);
  const std::vector<T> x = normal_values<T>(rows * columns, 1);
  const std::vector<float> one = normal_values<float>(rows, 2);
  std::vector<float> moments;
  for (const float m : one) moments.push_back(m * m);
  for (const double allowed : {1.0, 0.0}) {
    const std::vector<double> control = {7.0, 0.5, allowed, 0.0};
    std::vector<T> normalised = x;
    std::vector<float> after = moments;
    std::vector<double> sums(static_cast<size_t>(2 * rows + 1));
    cpu::normalise_rows(normalised.data(), after.data(), sums.data(), control.data(), rows, columns, 0.95);
    const auto run = [&]() -> Outputs {
      DeviceArray<T> xs(x);
      DeviceArray<float> ms(moments);
      cuda::normalise_rows<T>(xs, ms, DeviceArray<double>(sums), DeviceArray<double>(control), rows, columns, 0.95,
                              nullptr);
      return {{"rows", xs.host()}, {"moments", ms.host()}};
    };
    check_kernel(run, {{"rows", normalised}, {"moments", after}}, sizeof(T) == 2 ? 1e-3 : 1e-5);
    if (rows == 300 && allowed > 0 && sizeof(T) == 4)
      check_barriers(run, {"reduce.cuh: __syncthreads();  // partial is read; the next call may write it"});
  }
}

TEST_CASE("the kernel of Muon's momentum matches the CPU", "[cuda]") {
  const int64_t n = GENERATE(1, 3, 255, 1027);
  for (const double allowed : {1.0, 0.0}) {
    const std::vector<double> control = {7.0, 0.5, allowed, 0.0};
    std::vector<float> gradient = normal_values<float>(n, 1), momentum = normal_values<float>(n, 2);
    const std::vector<float> g = gradient, m = momentum;
    cpu::muon_direction(gradient.data(), momentum.data(), control.data(), n, 0.95f);
    const auto run = [&]() -> Outputs {
      DeviceArray<float> gs(g), ms(m);
      cuda::muon_direction(gs, ms, DeviceArray<double>(control), n, 0.95f, nullptr);
      return {{"direction", gs.host()}, {"momentum", ms.host()}};
    };
    check_kernel(run, {{"direction", gradient}, {"momentum", momentum}}, 1e-6);
  }
}

TEMPLATE_TEST_CASE("the kernels of a Newton-Schulz step match the CPU", "[cuda]", float, bf16) {
  using T = TestType;
  const int64_t n = GENERATE(1, 7, 8, 1003), shift = n > 1000 ? GENERATE(0, 1) : 0;
  const std::vector<T> x = normal_values<T>(n, 1);
  const std::vector<float> y = normal_values<float>(n, 2);
  const std::vector<double> square = {0.3};
  std::vector<T> quotient = x, sum = x;
  cpu::divide_by_norm(quotient.data() + shift, square.data(), n - shift, 1.02, 1e-7);
  cpu::linear_combination(sum.data() + shift, 3.4445f, sum.data() + shift, -4.775f, y.data() + shift, n - shift);
  const auto run = [&]() -> Outputs {
    DeviceArray<T> quotients(x), sums(x);
    DeviceArray<float> ys(y);
    cuda::divide_by_norm<T>(quotients + shift, DeviceArray<double>(square), n - shift, 1.02, 1e-7, nullptr);
    cuda::linear_combination<T>(sums + shift, 3.4445f, sums + shift, -4.775f, ys + shift, n - shift, nullptr);
    return {{"quotient", quotients.host()}, {"sum", sums.host()}};
  };
  check_kernel(run, {{"quotient", quotient}, {"sum", sum}}, sizeof(T) == 2 ? 1e-3 : 1e-6);
}
