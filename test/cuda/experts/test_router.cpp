// The router's kernels against the CPU ops.
#include "cuda/device_test.h"
#include "ops/cpu/router.h"
#include "ops/cuda/router.cuh"

using namespace llmc;

namespace {

struct Case {
  int64_t N;
  Router router;
  Segments segments;
  bool biased = false;
  bool ties = false;
  std::vector<float> logits = normal_values<float>(N * router.E, 1, 0, 2), bias = normal_values<float>(router.E, 2),
                     dweights = normal_values<float>(N * router.k, 3);
  std::vector<int32_t> counts = std::vector<int32_t>(static_cast<size_t>(segments.count(N) * router.E));
  RouterLosses losses = {.balance = 0.5f, .z = 0.1f, .sequence = segments.length};

  void prepare() {
    for (size_t i = 0; i < counts.size(); ++i) counts[i] = static_cast<int32_t>(i % 7);
    if (!ties) return;
    for (float& x : logits) x = std::round(x);
    logits[0] = std::numeric_limits<float>::quiet_NaN();
  }

  Outputs cpu() const {
    const int64_t E = router.E, S = segments.count(N);
    std::vector<int32_t> choices(dweights.size()), chosen(counts.size());
    std::vector<float> weights(dweights.size()), dlogits(logits.size()), p(static_cast<size_t>(S * E)),
        sums(static_cast<size_t>(S * 2)),
        partials(static_cast<size_t>(cpu::router_statistics_scratch(N, router, segments)));
    std::vector<double> totals = {1, 2, 3};
    cpu::router_forward(choices.data(), weights.data(), logits.data(), biased ? bias.data() : nullptr, N, router);
    cpu::router_backward(dlogits.data(), dweights.data(), logits.data(), choices.data(),
                         biased ? nullptr : counts.data(), N, router, losses, segments);
    cpu::router_statistics(chosen.data(), p.data(), sums.data(), partials.data(), logits.data(), choices.data(), N,
                           router, segments);
    cpu::router_losses(totals.data(), chosen.data(), p.data(), sums.data(), S, router, segments.length);
    return {{"choices", choices}, {"weights", weights}, {"dlogits", dlogits}, {"counts", chosen},
            {"probabilities", p}, {"sums", sums},       {"totals", totals}};
  }
  Outputs cuda() const {
    const int64_t E = router.E, S = segments.count(N), scratch = cpu::router_statistics_scratch(N, router, segments);
    DeviceArray<float> in(logits), b(bias), dw(dweights), weights(N * router.k), dlogits(N * E), p(S * E), sums(S * 2),
        partials(scratch);
    DeviceArray<int32_t> choices(N * router.k), given(counts), chosen(S * E);
    DeviceArray<double> totals(std::vector<double>{1, 2, 3});
    cuda::router_forward(choices, weights, in, biased ? static_cast<float*>(b) : nullptr, N, router, nullptr);
    cuda::router_backward(dlogits, dw, in, choices, biased ? nullptr : static_cast<int32_t*>(given), N, router, losses,
                          segments, nullptr);
    cuda::router_statistics(chosen, p, sums, partials, in, choices, N, router, segments, nullptr);
    cuda::router_losses(totals, chosen, p, sums, S, router, segments.length, nullptr);
    return {{"choices", choices.host()}, {"weights", weights.host()}, {"dlogits", dlogits.host()},
            {"counts", chosen.host()},   {"probabilities", p.host()}, {"sums", sums.host()},
            {"totals", totals.host()}};
  }
};

}  // namespace

TEST_CASE("the router's kernels match the CPU", "[ep][cuda]") {
  const auto scores = GENERATE(RouterScores::softmax, RouterScores::sigmoid);
  const bool normalised = GENERATE(true, false), biased = normalised == (scores == RouterScores::softmax);
  struct Sizes {
    int64_t N, E, k, length, first;
  };
  // One of each; less than a warp; ragged, several segments; all experts; several blocks of a segment.
  const Sizes s = GENERATE(Sizes{1, 1, 1, 1, 0}, Sizes{9, 8, 2, 4, 3}, Sizes{7, 70, 8, 3, 0}, Sizes{5, 33, 33, 100, 98},
                           Sizes{140, 4, 1, 133, 0});
  Case c{s.N, {s.E, s.k, scores, normalised, 1.5f}, {s.length, s.first}, biased};
  c.prepare();
  check_kernel([&] { return c.cuda(); }, c.cpu(), 1e-5);
}

TEST_CASE("of equal scores the router's kernel chooses the first, and NaN last", "[ep][cuda]") {
  Case c{20, {40, 12}, {20}, false, true};
  c.prepare();
  Outputs ours = c.cuda(), cpu = c.cpu();
  REQUIRE(ours[0].values == cpu[0].values);  // a row of NaN, too
}

TEST_CASE("the router's kernels need every barrier", "[ep][cuda]") {
  Case c{9, {70, 3}, {5}};
  c.prepare();
  check_barriers([&] { return c.cuda(); });
}

TEST_CASE("a gradient in three parts is exact, on the CPU and on GPUs", "[ep][cuda]") {
  const int64_t N = 37, E = 9;
  const auto x = normal_values<float>(N * E, 1, 0, 1e-4f);
  std::vector<bf16> parts(x.size() * 3), wide(x.size() * 3);
  cpu::split_in_three(parts.data(), x.data(), N, E, E, N * E);
  cpu::split_in_three(wide.data(), x.data(), N, E, 3 * E, E);
  for (size_t i = 0; i < x.size(); ++i) {
    const size_t n = i / E, e = i % E, all = x.size();
    const float sum =
        static_cast<float>(parts[i]) + static_cast<float>(parts[all + i]) + static_cast<float>(parts[2 * all + i]);
    REQUIRE(sum == x[i]);
    for (size_t p = 0; p < 3; ++p) REQUIRE(wide[n * 3 * E + p * E + e].bits == parts[p * all + i].bits);
  }
  const auto run = [&]() -> Outputs {
    DeviceArray<float> in(x);
    DeviceArray<bf16> a(N * E * 3), b(N * E * 3);
    cuda::split_in_three(a, in, N, E, E, N * E, nullptr);
    cuda::split_in_three(b, in, N, E, 3 * E, E, nullptr);
    return {{"parts", a.host()}, {"side by side", b.host()}};
  };
  const Outputs right = {{"parts", parts}, {"side by side", wide}};
  REQUIRE(same_bits(check_kernel(run, right, 1e-30), right));
}
