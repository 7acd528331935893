// The scalars of a step: bitwise equal to the CPU's.
#include "cuda/device_test.h"
#include "ops/cpu/step.h"
#include "ops/cuda/step.cuh"

using namespace llmc;

namespace {

constexpr double inf = std::numeric_limits<double>::infinity();

// Splits a double into floats that together hold all of its bits, so that outputs can be compared bit by bit.
std::vector<float> halves(const std::vector<double>& values) {
  std::vector<float> out;
  for (const double value : values) {
    uint32_t words[2];
    std::memcpy(words, &value, sizeof words);
    for (const uint32_t word : words) {  // 16 bits are whole numbers that a float holds
      out.push_back(static_cast<float>(word & 0xffff));
      out.push_back(static_cast<float>(word >> 16));
    }
  }
  return out;
}
std::vector<float> bits_of(const DeviceArray<double>& array) { return halves(array.host()); }

void check_bits(const std::function<Outputs()>& run, const Outputs& right) {
  REQUIRE(same_bits(check_kernel(run, right, 1e-30), right));
}

}  // namespace

TEMPLATE_TEST_CASE("sums of squares have the CPU's bits", "[cuda]", float, bf16) {
  const int64_t n = GENERATE(1, 5, 1023, 4100, 2 * square_sum_block + 2051), shift = GENERATE(0, 1);
  const Accumulate accumulate = GENERATE(Accumulate::no, Accumulate::yes);
  const auto x = normal_values<TestType>(n + shift, 1);
  const std::vector<double> before{1.0 / 3};
  std::vector<double> sum = before, partials(static_cast<size_t>(ceil_div(n, square_sum_block)));
  cpu::square_sum(sum.data(), partials.data(), x.data() + shift, n, accumulate);
  double exact = accumulate == Accumulate::yes ? before[0] : 0;
  for (int64_t i = shift; i < n + shift; ++i) {
    const double value = static_cast<double>(x[static_cast<size_t>(i)]);
    exact += value * value;
  }
  REQUIRE(std::abs(sum[0] / exact - 1) < 1e-13);
  const auto run = [&]() -> Outputs {
    DeviceArray<TestType> xs(x);
    DeviceArray<double> out(before), parts(static_cast<int64_t>(partials.size()));
    cuda::square_sum<TestType>(out, parts, xs + shift, n, accumulate, nullptr);
    return {{"sum", bits_of(out)}, {"partials", bits_of(parts)}};
  };
  check_bits(run, {{"sum", halves(sum)}, {"partials", halves(partials)}});
  if (n == 4100 && shift == 0 && accumulate == Accumulate::no) check_barriers(run);
}

TEST_CASE("added losses have the CPU's bits", "[cuda]") {
  const int64_t N = GENERATE(1, 700, 5003);
  const auto losses = normal_values<float>(N, 1, 4);
  std::vector<double> sum = {1.0 / 3};
  cpu::add_losses(sum.data(), losses.data(), N);
  const auto run = [&]() -> Outputs {
    DeviceArray<double> out(std::vector<double>{1.0 / 3});
    DeviceArray<float> each(losses);
    cuda::add_losses<float>(out, each, N, nullptr);
    return {{"sum", bits_of(out)}};
  };
  check_bits(run, {{"sum", halves(sum)}});
  if (N == 700) check_barriers(run);
}

TEST_CASE("the scalars of all ranks are combined as on the CPU", "[cuda]") {
  const auto [ranks, units, shards, tensor, stages] =
      GENERATE(std::tuple{1, 1, 1, 1, 1}, std::tuple{4, 14, 2, 1, 1}, std::tuple{70, 3, 35, 1, 1},
               std::tuple{140, 5, 7, 4, 1}, std::tuple{36, 3, 3, 2, 3});
  const auto [L, N] = GENERATE(std::pair{1, 2}, std::pair{2, 1});
  const auto values = normal_values<float>(ranks * (L + N + units), 1);
  const std::vector<double> gathered(values.begin(), values.end());
  std::vector<double> losses(static_cast<size_t>(L)), notices(static_cast<size_t>(N)),
      sums(static_cast<size_t>(units * tensor * shards));
  cpu::combine_scalars(losses.data(), notices.data(), sums.data(), gathered.data(), ranks, L, N, units, shards, tensor,
                       stages);
  const auto run = [&, ranks = ranks, units = units, shards = shards, tensor = tensor, stages = stages, L = L,
                    N = N]() -> Outputs {
    DeviceArray<double> losses_out(L), notices_out(N), sums_out(units * tensor * shards), from(gathered);
    cuda::combine_scalars(losses_out, notices_out, sums_out, from, ranks, L, N, units, shards, tensor, stages, nullptr);
    return {{"losses", bits_of(losses_out)}, {"notices", bits_of(notices_out)}, {"sums", bits_of(sums_out)}};
  };
  check_bits(run, {{"losses", halves(losses)}, {"notices", halves(notices)}, {"sums", halves(sums)}});
}

TEST_CASE("the update control has the CPU's bits", "[cuda]") {
  const int64_t n = GENERATE(1, 45);
  const double loss = GENERATE(3.5, -inf, std::nan(""));
  const double bad_sum = GENERATE(0.25, inf, std::nan(""));
  const UpdateRule rule = GENERATE(UpdateRule{}, UpdateRule{.max_norm = 1}, UpdateRule{.max_norm = 100},
                                   UpdateRule{.max_norm = 1, .largest_loss = 3}, UpdateRule{.largest_norm = 0.1});
  std::vector<double> sums(static_cast<size_t>(n));
  for (int64_t i = 0; i < n; ++i) sums[static_cast<size_t>(i)] = 1.0 / static_cast<double>(i + 1);
  sums.back() = bad_sum;
  const double halted = GENERATE(0.0, 1.0);
  const std::vector<double> before{0, 0, 0, halted};
  std::vector<double> control = before;
  cpu::clip_control(control.data(), sums.data(), n, &loss, rule);
  const auto run = [&]() -> Outputs {
    DeviceArray<double> out(before), squares(sums), losses(std::vector<double>{loss});
    cuda::clip_control(out, squares, n, losses, rule, nullptr);
    std::vector<double> got = out.host();
    if (std::isnan(control[0]) && std::isnan(got[0])) got[0] = control[0];  // any NaN will do
    return {{"control", halves(got)}};
  };
  check_bits(run, {{"control", halves(control)}});
}
