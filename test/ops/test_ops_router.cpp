// The router of a mixture of experts: finite differences in double, what it chooses, and the statistics of its balance.
#include "ops/op_bench.h"

using namespace llmc;

namespace {

std::vector<int32_t> integers_of(const Tensor& t) { return {t.data<int32_t>(), t.data<int32_t>() + t.numel()}; }

}  // namespace

TEST_CASE("router: finite differences of its weights and of its losses", "[ops][ep]") {
  const int64_t N = 14, C = 6, E = 5;
  const RouterScores scores = GENERATE(RouterScores::softmax, RouterScores::sigmoid);
  const bool normalised = GENERATE(true, false);
  const int64_t k = GENERATE(1, 3, 5);
  const Router router{.E = E, .k = k, .scores = scores, .normalised = normalised, .scaling = 1.7f};
  INFO("k = " << k << (normalised ? ", normalised" : ""));
  const RouterLosses losses{.balance = 3, .z = 0.25f, .sequence = 7};
  const Segments segments{7};
  Bench b;
  const Tensor x = b.normal({N, C}), w = b.normal({E, C}), dweights = b.normal({N, k}), bias = b.normal({E});
  const Tensor logits = b.poisoned(DType::fp64, {N, E}), choices = b.poisoned(DType::int32, {N, k}),
               weights = b.poisoned(DType::fp64, {N, k}), counts = b.poisoned(DType::int32, {2, E}),
               probabilities = b.poisoned(DType::fp64, {2, E}), sums = b.poisoned(DType::fp64, {2, 2}),
               totals = b.poisoned(DType::fp64, {3});
  const auto value = [&] {
    router_logits(logits, x, w, b.stream);
    router_forward(choices, weights, logits, bias, router, b.stream);
    router_statistics(counts, probabilities, sums, logits, choices, router, segments, b.stream);
    zero(totals, b.stream);
    router_losses(totals, counts, probabilities, sums, router, 7, b.stream);
    b.stream.synchronize();
    return dot(weights, dweights) + 3 * totals.data<double>()[0] + 0.25 * totals.data<double>()[1];
  };
  value();
  const Tensor dlogits = b.poisoned(DType::fp64, {N, E}), dx = b.normal({N, C}), dw = b.poisoned(DType::fp64, {E, C}),
               before = b.as(DType::fp64, dx);
  router_backward(dlogits, dweights, logits, choices, counts, router, losses, segments, b.stream);
  router_backward_input(dx, dlogits, w, Accumulate::yes, b.stream);
  router_backward_weight(dw, dlogits, x, Accumulate::no, b.stream);
  b.stream.synchronize();
  require_gradient(w, dw, value);
  for (int64_t i = 0; i < dx.numel(); ++i) dx.data<double>()[i] -= before.data<double>()[i];
  require_gradient(x, dx, value);
  value();  // without the losses
  router_backward(dlogits, dweights, logits, choices, {}, router, {}, segments, b.stream);
  router_backward_input(dx, dlogits, w, Accumulate::no, b.stream);
  b.stream.synchronize();
  if (normalised && k == 1) REQUIRE(dot(dx, dx) < 1e-24);  // the only weight is constant
  else require_gradient(x, dx, [&] { return value(), dot(weights, dweights); });
}

TEST_CASE("router: the largest scores are chosen, of equal ones the first; a bias changes the choice alone",
          "[ops][ep]") {
  const DType d = GENERATE(DType::fp32, DType::fp64);
  Bench b;
  const auto run = [&](const std::vector<double>& row, const std::vector<double>& biases, const Router& r) {
    const Tensor wide = b.zeros(DType::fp64, {1, r.E}), wide_bias = b.zeros(DType::fp64, {r.E});
    std::copy(row.begin(), row.end(), wide.data<double>());
    std::copy(biases.begin(), biases.end(), wide_bias.data<double>());
    const Tensor choices = b.poisoned(DType::int32, {1, r.k}), weights = b.poisoned(d, {1, r.k});
    router_forward(choices, weights, b.as(d, wide), biases.empty() ? Tensor{} : b.as(d, wide_bias), r, b.stream);
    b.stream.synchronize();
    const Tensor w = b.as(DType::fp64, weights);
    return std::pair{integers_of(choices), std::vector<double>(w.data<double>(), w.data<double>() + r.k)};
  };
  using Ints = std::vector<int32_t>;
  REQUIRE(run({1, 2, 2, 0, 2}, {}, {.E = 5, .k = 3}).first == Ints{1, 2, 4});
  REQUIRE(run({0, 0, 0, 0}, {}, {.E = 4, .k = 4}).first == Ints{0, 1, 2, 3});
  REQUIRE(run({5}, {}, {.E = 1, .k = 1}) == std::pair{Ints{0}, std::vector<double>{1}});
  const double nan = std::numeric_limits<double>::quiet_NaN();
  REQUIRE(run({nan, 1, 2}, {}, {.E = 3, .k = 3, .scores = RouterScores::sigmoid}).first == Ints{2, 1, 0});
  REQUIRE(run({nan, nan, nan}, {}, {.E = 3, .k = 2}).first == Ints{0, 1});

  const Router plain{.E = 3, .k = 2, .scores = RouterScores::sigmoid, .normalised = false, .scaling = 2};
  const auto [chosen, weights] = run({0, 1, -1}, {0, -9, 0.5}, plain);
  REQUIRE(chosen == Ints{2, 0});
  REQUIRE(std::abs(weights[0] - 2 / (1 + std::exp(1))) < 1e-6);
  REQUIRE(std::abs(weights[1] - 1) < 1e-6);
  const auto normalised = run({std::log(1), std::log(2), std::log(5)}, {}, {.E = 3, .k = 2, .scaling = 3}).second;
  REQUIRE(std::abs(normalised[0] - 3 * 5.0 / 7) < 1e-6);
  REQUIRE(std::abs(normalised[1] - 3 * 2.0 / 7) < 1e-6);
  const auto probabilities =
      run({std::log(1), std::log(2), std::log(5)}, {}, {.E = 3, .k = 2, .normalised = false}).second;
  REQUIRE(std::abs(probabilities[0] - 5.0 / 8) < 1e-6);
}

TEST_CASE("router: the losses of even and of extreme routing, and the entropy", "[ops][ep]") {
  Bench b;
  const int64_t E = 4, N = 8;
  const Router r{.E = E, .k = 1};
  const Tensor logits = b.zeros(DType::fp64, {N, E}), choices = b.poisoned(DType::int32, {N, 1}),
               counts = b.poisoned(DType::int32, {1, E}), probabilities = b.poisoned(DType::fp64, {1, E}),
               sums = b.poisoned(DType::fp64, {1, 2}), totals = b.zeros(DType::fp64, {3});
  const auto run = [&](auto expert_of, double logit) {
    for (int64_t n = 0; n < N; ++n) {
      choices.data<int32_t>()[n] = expert_of(n);
      for (int32_t e = 0; e < E; ++e) logits.data<double>()[n * E + e] = e == expert_of(n) ? logit : 0;
    }
    router_statistics(counts, probabilities, sums, logits, choices, r, {N}, b.stream);
    zero(totals, b.stream);
    router_losses(totals, counts, probabilities, sums, r, N, b.stream);
    b.stream.synchronize();
    return std::vector<double>(totals.data<double>(), totals.data<double>() + 3);
  };
  const auto even = run([](int64_t n) { return static_cast<int32_t>(n % 4); }, 0);
  REQUIRE(std::abs(even[0] - 1) < 1e-12);
  REQUIRE(std::abs(even[1] - N * std::log(4) * std::log(4)) < 1e-12);
  REQUIRE(std::abs(even[2] - N * std::log(4)) < 1e-12);
  const auto extreme = run([](int64_t) { return int32_t{2}; }, 60);
  REQUIRE(std::abs(extreme[0] - 4) < 1e-12);
  REQUIRE(std::abs(extreme[2]) < 1e-12);
}

TEST_CASE("router: statistics and gradients do not depend on which rows are in a call", "[ops][ep]") {
  const int64_t N = 600, E = 7, k = 2, T = 300;
  const Router r{.E = E, .k = k, .scores = GENERATE(RouterScores::softmax, RouterScores::sigmoid)};
  const RouterLosses losses{.balance = 2, .z = 1, .sequence = T};
  Bench b;
  const Tensor logits = b.normal({N, E}), choices = b.poisoned(DType::int32, {N, k}), dweights = b.normal({N, k}),
               weights = b.poisoned(DType::fp64, {N, k});
  router_forward(choices, weights, logits, {}, r, b.stream);
  const auto run = [&](int64_t begin, int64_t rows, Tensor& all_counts, Tensor& all_sums, Tensor& dlogits) {
    const Segments s{T, begin % T};
    const int64_t S = s.count(rows), first = begin / T;
    const Tensor counts = b.poisoned(DType::int32, {S, E}), p = b.poisoned(DType::fp64, {S, E}),
                 sums = b.poisoned(DType::fp64, {S, 2}), l = logits.slice(begin * E, {rows, E}),
                 c = choices.slice(begin * k, {rows, k});
    router_statistics(counts, p, sums, l, c, r, s, b.stream);
    b.stream.synchronize();
    for (int64_t i = 0; i < S; ++i) {
      for (int64_t e = 0; e < E; ++e) {
        all_counts.data<int32_t>()[(first + i) * E + e] += counts.data<int32_t>()[i * E + e];
        all_sums.data<double>()[(first + i) * (E + 2) + e] += p.data<double>()[i * E + e];
      }
      for (int64_t e = 0; e < 2; ++e)
        all_sums.data<double>()[(first + i) * (E + 2) + E + e] += sums.data<double>()[i * 2 + e];
    }
    const Tensor given = b.integers(std::vector<int32_t>(static_cast<size_t>(S * E)));
    for (int64_t i = 0; i < S * E; ++i) given.data<int32_t>()[i] = static_cast<int32_t>(first * E + i) % 11;
    router_backward(dlogits.slice(begin * E, {rows, E}), dweights.slice(begin * k, {rows, k}), l, c,
                    given.reshaped({S, E}), r, losses, s, b.stream);
    b.stream.synchronize();
  };
  Tensor counts[2], sums[2], dlogits[2];
  for (int i = 0; i < 2; ++i) {
    counts[i] = b.zeros(DType::int32, {2, E}), sums[i] = b.zeros(DType::fp64, {2, E + 2});
    dlogits[i] = b.poisoned(DType::fp64, {N, E});
  }
  run(0, N, counts[0], sums[0], dlogits[0]);
  for (const auto& [begin, rows] : {std::pair<int64_t, int64_t>{0, 130}, {130, 250}, {380, 220}})
    run(begin, rows, counts[1], sums[1], dlogits[1]);
  REQUIRE(integers_of(counts[0]) == integers_of(counts[1]));
  int32_t chosen = 0;
  for (const int32_t n : integers_of(counts[0])) chosen += n;
  REQUIRE(chosen == N * k);
  REQUIRE(relative_distance(sums[1].data<double>(), sums[0].data<double>(), 2 * (E + 2)) < 1e-14);
  REQUIRE(bits_of(dlogits[0]) == bits_of(dlogits[1]));
}
