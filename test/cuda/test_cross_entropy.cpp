// The cross-entropy kernels against the CPU op.
#include <numeric>

#include "cuda/device_test.h"
#include "ops/cpu/cross_entropy.h"
#include "ops/cuda/cross_entropy.cuh"

using namespace llmc;

namespace {

template <class T>
struct Case {
  int64_t N, V, V_padded;
  Gradient gradient;
  float scale = 0.25f;
  std::vector<T> logits = normal_values<T>(N * V_padded, 1, 2, 3);
  std::vector<int32_t> targets = std::vector<int32_t>(static_cast<size_t>(N));

  // Every third row is ignored. The padding's contents must not matter: NaN.
  Case(int64_t N_, int64_t V_, int64_t V_padded_, Gradient gradient_)
      : N(N_), V(V_), V_padded(V_padded_), gradient(gradient_) {
    for (int64_t n = 0; n < N; ++n) {
      targets[static_cast<size_t>(n)] = n % 3 == 1 ? -1 : n == 2 ? 0 : static_cast<int32_t>((n * 7919 + V - 1) % V);
      for (int64_t v = V; v < V_padded; ++v)
        logits[static_cast<size_t>(n * V_padded + v)] = T(std::numeric_limits<float>::quiet_NaN());
    }
  }

  // Without a gradient the logits stay unchanged, with NaN in the padding: compared bit by bit only.
  template <class R, class A>
  Outputs outputs(const std::vector<A>& losses, const std::vector<R>& after) const {
    if (gradient == Gradient::yes) return {{"losses", losses}, {"gradients", after}};
    REQUIRE(same_bits({{"logits", after}}, {{"logits", logits}}));
    return {{"losses", losses}};
  }
  // Computed in R.
  template <class R = T>
  Outputs cpu() const {
    using A = accumulator_t<R>;
    std::vector<R> after;
    for (const T x : logits) after.push_back(R(static_cast<A>(x)));
    std::vector<A> losses(static_cast<size_t>(N));
    cpu::cross_entropy(losses.data(), after.data(), targets.data(), N, V, V_padded, A(scale), gradient);
    return outputs(losses, after);
  }
  Outputs cuda() const {
    DeviceArray<T> after(logits);
    DeviceArray<float> losses(N);
    DeviceArray<int32_t> wanted(targets);
    cuda::cross_entropy<T>(losses, after, wanted, N, V, V_padded, scale, gradient, nullptr);
    return outputs(losses.host(), after.host());
  }
};

template <class T>
constexpr double tolerance = sizeof(T) == 2 ? 1e-3 : 1e-6;

}  // namespace

TEMPLATE_TEST_CASE("the cross-entropy kernels match the CPU", "[cuda]", float, bf16) {
  // One class, less than a pack, padding within a pack and whole packs of it, ragged, more packs than threads.
  const auto [N, V, V_padded] = GENERATE(std::tuple{1, 1, 1}, std::tuple{5, 5, 8}, std::tuple{4, 301, 384},
                                         std::tuple{2, 333, 333}, std::tuple{3, 9001, 9024});
  const Gradient gradient = GENERATE(Gradient::no, Gradient::yes);
  INFO("V = " << V);
  const Case<TestType> c(N, V, V_padded, gradient);
  check_kernel([&] { return c.cuda(); }, c.cpu(), tolerance<TestType>);
}

TEST_CASE("a row of logits that does not fit into shared memory is read twice", "[cuda]") {
  const Case<float> c(1, 58501, 58624, Gradient::yes);
  REQUIRE(c.V_padded * 4 > cuda::device_shared_bytes());
  check_kernel([&] { return c.cuda(); }, c.cpu<double>(), 1e-6);  // in fp32, the CPU's long sum is less exact
}

TEST_CASE("logits of minus infinity have probability 0", "[cuda]") {
  Case<float> c(1, 70, 72, Gradient::yes);
  for (size_t v = 0; v < 66; ++v) c.logits[v] = -std::numeric_limits<float>::infinity();
  const Outputs got = c.cuda();
  REQUIRE(std::isfinite(got[0].values[0]));
  REQUIRE(std::all_of(got[1].values.begin(), got[1].values.begin() + 66, [](float d) { return d == 0; }));
  REQUIRE(std::abs(std::accumulate(got[1].values.begin(), got[1].values.end(), 0.0)) < 1e-6);
}

TEMPLATE_TEST_CASE("the cross-entropy kernels need every barrier", "[cuda]", float, bf16) {
  const Case<TestType> c(3, 1001, 1024, Gradient::yes);
  // The maximum and the sum use separate arrays, and a block computes only one of each.
  check_barriers([&] { return c.cuda(); },
                 {"reduce.cuh: __syncthreads();  // partial is read; the next call may write it"});
}
