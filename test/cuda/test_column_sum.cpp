// Column sums against the CPU op.
#include <deque>

#include "cuda/device_test.h"
#include "ops/cpu/elementwise.h"
#include "ops/cuda/column_sum.cuh"

using namespace llmc;

namespace {

template <class T>
struct Case {
  int64_t N, C;
  std::vector<T> x = normal_values<T>(N * C, 1);
  std::vector<float> before = normal_values<float>(C, 2);

  Outputs cpu() const {
    std::vector<float> out = before, partials(static_cast<size_t>(cpu::row_partitions * C));
    cpu::column_sum(out.data(), partials.data(), x.data(), N, C);
    return {{"out", out}};
  }
  Outputs cuda() const {
    DeviceArray<T> xs(x);
    DeviceArray<float> out(before), partials(cuda::column_sum_scratch(N, C));
    cuda::column_sum<T>(out, {partials}, xs, N, C, nullptr);
    return {{"out", out.host()}};
  }
};

}  // namespace

TEMPLATE_TEST_CASE("column sums match the CPU", "[cuda]", float, bf16) {
  // One column, ragged, several blocks of columns, many parts of the rows, parts of more rows than a block has threads.
  const auto [N, C] = GENERATE(std::pair{1, 1}, std::pair{7, 40}, std::pair{50, 333}, std::pair{130, 520},
                               std::pair{9000, 3}, std::pair{700, 24});
  const Case<TestType> c{N, C};
  check_kernel([&] { return c.cuda(); }, c.cpu(), 1e-6);
}

TEST_CASE("sums that wait are added up together, with the bits of each alone", "[cuda]") {
  constexpr int64_t N = 70;
  const int count = GENERATE(1, 5, cuda::RowSums::most + 2);
  CAPTURE(count);
  const auto run = [&](bool wait) {
    std::vector<RowSum> waiting;
    std::deque<DeviceArray<float>> xs, outs, partials;
    Outputs results;
    for (int i = 0; i < count; ++i) {
      const int64_t C = 1 + 37 * i % 50;  // several widths
      xs.emplace_back(normal_values<float>(N * C, i));
      outs.emplace_back(normal_values<float>(C, 100 + i));
      partials.emplace_back(cuda::column_sum_scratch(N, C));
      cuda::column_sum<float>(outs.back(), {partials.back(), wait ? &waiting : nullptr}, xs.back(), N, C, nullptr);
      if (wait) REQUIRE(outs.back().host() == normal_values<float>(C, 100 + i));
    }
    cuda::add_partials(waiting, nullptr);
    for (int i = 0; i < count; ++i) results.push_back({formatted("sum {}", i), outs[static_cast<size_t>(i)].host()});
    return results;
  };
  const Outputs alone = run(false);
  REQUIRE(same_bits(check_kernel([&] { return run(true); }, alone, 1e-6), alone));
}

TEMPLATE_TEST_CASE("column sums need every barrier", "[cuda]", float, bf16) {
  const Case<TestType> c{40, 24};
  check_barriers([&] { return c.cuda(); });
}
