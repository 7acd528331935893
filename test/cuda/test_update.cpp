// The kernels of the update against the CPU op.
#include "cuda/device_test.h"
#include "ops/cpu/update.h"
#include "ops/cuda/update.cuh"

using namespace llmc;

namespace {

constexpr OptimizerOptions options = {
    .lr = 0.01f, .beta1 = 0.9f, .beta2 = 0.95f, .eps = 1e-8f, .weight_decay = 0.1f, .step = 3};
constexpr float factor = 0.5f;

struct Case {
  int64_t n;
  std::vector<float> weight = normal_values<float>(n, 1), moment1 = normal_values<float>(n, 2),
                     moment2 = squares(normal_values<float>(n, 3)), gradient = normal_values<float>(n, 4);
  static std::vector<float> squares(std::vector<float> x) {
    for (float& value : x) value *= value;
    return x;
  }
  template <class T>
  std::vector<T> weight_as() const {
    std::vector<T> out;
    for (const float w : weight) out.push_back(T(w));
    return out;
  }
};

int64_t some_size() { return GENERATE(1, 3, 4, 1000, 1027); }

constexpr double allowed[] = {7.0, factor, 1.0}, unclipped[] = {7.0, 1.0, 1.0};

DeviceArray<double> control_of(bool allow) {
  return DeviceArray<double>(std::vector<double>{7.0, factor, allow ? 1.0 : 0.0});
}

}  // namespace

TEMPLATE_TEST_CASE("AdamW kernels match the CPU", "[cuda]", float, bf16) {
  using W = TestType;
  constexpr bool copy = sizeof(W) == 2;
  const Case c{some_size()};
  const int64_t shift = c.n > 1000 ? GENERATE(0, 1) : 0;
  std::vector<W> weight = c.weight_as<W>();
  std::vector<float> master = c.weight, m = c.moment1, v = c.moment2;
  cpu::update_weights(Optimizer::adamw, weight.data() + shift, copy ? master.data() + shift : nullptr, m.data() + shift,
                      v.data() + shift, c.gradient.data() + shift, allowed, c.n - shift, options);
  const auto run = [&]() -> Outputs {
    DeviceArray<W> weights(c.weight_as<W>());
    DeviceArray<float> masters(c.weight), ms(c.moment1), vs(c.moment2), gradients(c.gradient);
    cuda::update_weights<W>(Optimizer::adamw, weights + shift, copy ? masters + shift : nullptr, ms + shift, vs + shift,
                            gradients + shift, control_of(true), c.n - shift, options, nullptr);
    return {{"weight", weights.host()}, {"master", masters.host()}, {"moment1", ms.host()}, {"moment2", vs.host()}};
  };
  check_kernel(run, {{"weight", weight}, {"master", master}, {"moment1", m}, {"moment2", v}}, copy ? 1e-3 : 1e-6);
}

TEMPLATE_TEST_CASE("kernels of optimizers with one slot match the CPU", "[cuda]", float, bf16) {
  using W = TestType;
  constexpr bool copy = sizeof(W) == 2;
  const Case c{some_size()};
  const Optimizer optimizer = GENERATE(Optimizer::sgd, Optimizer::lion);
  std::vector<W> weight = c.weight_as<W>();
  std::vector<float> master = c.weight, momentum = c.moment1;
  cpu::update_weights(optimizer, weight.data(), copy ? master.data() : nullptr, momentum.data(),
                      static_cast<float*>(nullptr), c.gradient.data(), allowed, c.n, options);
  const auto run = [&]() -> Outputs {
    DeviceArray<W> weights(c.weight_as<W>());
    DeviceArray<float> masters(c.weight), momenta(c.moment1), gradients(c.gradient);
    cuda::update_weights<W>(optimizer, weights, copy ? masters + 0 : nullptr, momenta, nullptr, gradients,
                            control_of(true), c.n, options, nullptr);
    return {{"weight", weights.host()}, {"master", masters.host()}, {"momentum", momenta.host()}};
  };
  check_kernel(run, {{"weight", weight}, {"master", master}, {"momentum", momentum}}, copy ? 1e-3 : 1e-6);
}

TEST_CASE("AdamW with stochastic rounding draws the same numbers as the CPU", "[optimizer][cuda]") {
  const Case c{some_size()};
  // Flat; then boxes whose packs are blocks of four random numbers, and whose are not, for one reason each.
  const Elements elements = GENERATE(Elements{0}, Elements{1}, Elements{5}, Elements{(int64_t{5} << 33) + 2},
                                     Elements{.begin = 3, .first = 1},
                                     Elements{.begin = 12, .first = int64_t{1} << 40, .columns = 8, .stride = 20},
                                     Elements{.begin = 12, .first = 5, .columns = 8, .stride = 20},
                                     Elements{.begin = 5, .first = 3, .columns = 8, .stride = 20},
                                     Elements{.begin = 20, .first = 8, .columns = 10, .stride = 20},
                                     Elements{.begin = 32, .first = 8, .columns = 8, .stride = 25});
  const Philox words = rounding_words(5, "a parameter", options.step);
  std::vector<bf16> weight = c.weight_as<bf16>();
  std::vector<float> m = c.moment1, v = c.moment2;
  cpu::update_weights_stochastic(Optimizer::adamw, weight.data(), m.data(), v.data(), c.gradient.data(), allowed,
                                 elements, c.n, options, words);
  const auto run = [&]() -> Outputs {
    DeviceArray<bf16> weights(c.weight_as<bf16>());
    DeviceArray<float> ms(c.moment1), vs(c.moment2), gradients(c.gradient);
    cuda::update_weights_stochastic(Optimizer::adamw, weights, ms, vs, gradients, control_of(true), elements, c.n,
                                    options, words, nullptr);
    return {{"weight", weights.host()}, {"moment1", ms.host()}, {"moment2", vs.host()}};
  };
  // With other random numbers half of the weights would be one bf16 step off: 2e-3.
  check_kernel(run, {{"weight", weight}, {"moment1", m}, {"moment2", v}}, 1e-4);
}

TEST_CASE("stochastic rounding keeps the mean of updates that rounding to nearest would lose", "[optimizer]") {
  constexpr int64_t n = 4096;
  std::vector<bf16> weight(n, bf16(1));
  std::vector<float> m(n, 0.0f), v(n, 0.0f), gradient(n, 1.0f);
  for (int64_t step = 1; step <= 8; ++step)  // each moves a weight by 2^-12, a 16th of the distance to the next bf16
    cpu::update_weights_stochastic(
        Optimizer::adamw, weight.data(), m.data(), v.data(), gradient.data(), unclipped, {}, n,
        {.lr = 0x1p-12f, .beta1 = 0.9f, .beta2 = 0.95f, .eps = 1e-8f, .weight_decay = 0, .step = step},
        rounding_words(5, "a parameter", step));
  double mean = 0;
  for (const bf16 w : weight) mean += static_cast<double>(w) / n;
  REQUIRE(std::abs((1 - mean) / 0x1p-9 - 1) < 0.05);  // deviation of the mean: 1.3%
}

TEST_CASE("AdamW kernels change nothing if the control forbids the update", "[optimizer][cuda]") {
  const Case c{1003};
  const auto narrow = c.weight_as<bf16>();
  const auto run = [&]() -> Outputs {
    DeviceArray<float> weights(c.weight), ms(c.moment1), vs(c.moment2), gradients(c.gradient);
    DeviceArray<bf16> rounded(narrow);
    DeviceArray<double> control = control_of(false);
    cuda::update_weights<float>(Optimizer::adamw, weights, nullptr, ms, vs, gradients, control, c.n, options, nullptr);
    cuda::update_weights<bf16>(Optimizer::adamw, rounded, weights, ms, vs, gradients, control, c.n, options, nullptr);
    cuda::update_weights_stochastic(Optimizer::adamw, rounded, ms, vs, gradients, control, {}, c.n, options,
                                    Philox(1, ""), nullptr);
    return {{"fp32", weights.host()}, {"bf16", rounded.host()}, {"moment1", ms.host()}, {"moment2", vs.host()}};
  };
  const Outputs before = {{"fp32", c.weight}, {"bf16", narrow}, {"moment1", c.moment1}, {"moment2", c.moment2}};
  REQUIRE(same_bits(check_kernel(run, before, 1e-30), before));
}

TEST_CASE("AdamW refuses bf16 weights without a master copy", "[optimizer][cuda]") {
  REQUIRE_THROWS_WITH(cuda::update_weights<bf16>(Optimizer::adamw, nullptr, nullptr, nullptr, nullptr, nullptr, nullptr,
                                                 8, options, nullptr),
                      Catch::Matchers::ContainsSubstring("need a master copy"));
}

TEST_CASE("averages of weights, and their exchange, have the CPU's bits", "[cuda]") {
  const int64_t n = some_size();
  const bool allow = GENERATE(true, false);
  const auto weight = normal_values<float>(n, 1), average = normal_values<float>(n, 2);
  // A power of two as the share: a fused multiply-add rounds as a product and a sum do.
  auto expected = average;
  const std::vector<double> control = {7.0, factor, allow ? 1.0 : 0.0};
  cpu::average_weights(expected.data(), weight.data(), control.data(), n, 0.25f);
  const auto run = [&]() -> Outputs {
    DeviceArray<float> averages(average), weights(weight);
    cuda::average_weights(averages, weights, control_of(allow), n, 0.25f, nullptr);
    cuda::exchange(averages, weights, n, nullptr);
    return {{"weights", averages.host()}, {"average", weights.host()}};
  };
  const Outputs right = {{"weights", weight}, {"average", expected}};
  REQUIRE(same_bits(check_kernel(run, right, 1e-30), right));
}
