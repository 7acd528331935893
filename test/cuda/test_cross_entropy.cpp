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
  float scale = 0.25f, z = 0.05f;
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
  Outputs outputs(const std::vector<A>& losses, const std::vector<A>& squares, const std::vector<R>& after) const {
    if (gradient == Gradient::yes) return {{"losses", losses}, {"gradients", after}, {"squares", squares}};
    REQUIRE(same_bits({{"logits", after}}, {{"logits", logits}}));
    return {{"losses", losses}, {"squares", squares}};
  }
  // Computed in R.
  template <class R = T>
  Outputs cpu() const {
    using A = accumulator_t<R>;
    std::vector<R> after;
    for (const T x : logits) after.push_back(R(static_cast<A>(x)));
    std::vector<A> losses(static_cast<size_t>(N)), squares(static_cast<size_t>(N));
    cpu::cross_entropy(losses.data(), after.data(), targets.data(), N, V, V_padded, A(scale), gradient,
                       {A(z), squares.data()});
    return outputs(losses, squares, after);
  }
  Outputs cuda() const {
    DeviceArray<T> after(logits);
    DeviceArray<float> losses(N), squares(N);
    DeviceArray<int32_t> wanted(targets);
    cuda::cross_entropy<T>(losses, after, wanted, N, V, V_padded, scale, gradient, {z, squares}, nullptr);
    return outputs(losses.host(), squares.host(), after.host());
  }
};

// The vocabulary in parts of `each` tokens, the last ones with fewer or none.
template <class T>
struct PartsCase {
  int64_t N, V, P, each, columns;
  float scale = 0.25f, z = 0.05f;
  std::vector<std::vector<T>> logits;  // (N, columns) of each part; the padding is NaN
  std::vector<int32_t> targets = std::vector<int32_t>(static_cast<size_t>(N));

  PartsCase(int64_t N_, int64_t V_, int64_t P_, int64_t each_, int64_t columns_)
      : N(N_), V(V_), P(P_), each(each_), columns(columns_) {
    for (int64_t n = 0; n < N; ++n)
      targets[static_cast<size_t>(n)] = n % 3 == 1 ? -1 : n == 2 ? 0 : static_cast<int32_t>((n * 7919 + V - 1) % V);
    for (int64_t p = 0; p < P; ++p) {
      logits.push_back(normal_values<T>(N * columns, static_cast<uint64_t>(p), 2, 3));
      for (int64_t i = 0; i < N * columns; ++i)
        if (i % columns >= part(p).size)
          logits.back()[static_cast<size_t>(i)] = T(std::numeric_limits<float>::quiet_NaN());
    }
  }
  Vocabulary part(int64_t p) const {
    const int64_t first = std::min(V, each * p);
    return {first, std::min(V, first + each) - first};
  }

  // The stats of all parts but empty ones, which are {-infinity, 0, 0}; then the losses and gradients of every part;
  // and the squares of log Z.
  template <class R, class A>
  Outputs outputs(std::vector<A> stats, const std::vector<std::vector<A>>& losses,
                  const std::vector<std::vector<R>>& gradients, const std::vector<A>& squares) const {
    for (int64_t p = P; p-- > 0;) {
      if (part(p).size > 0) continue;
      for (int64_t n = 0; n < N; ++n) {
        const A* empty = stats.data() + 3 * (p * N + n);
        REQUIRE(empty[0] == -std::numeric_limits<A>::infinity());
        REQUIRE(empty[1] == 0);
        REQUIRE(empty[2] == 0);
      }
      stats.erase(stats.begin() + 3 * p * N, stats.begin() + 3 * (p + 1) * N);
    }
    Outputs all = {{"stats", stats}};
    for (size_t p = 0; p < gradients.size(); ++p) {
      all.emplace_back("losses", losses[p]);
      all.emplace_back("gradients", gradients[p]);
    }
    all.emplace_back("squares", squares);
    return all;
  }
  // Computed in double for fp32: in fp32, the CPU's long sums are less exact.
  Outputs cpu() const {
    using R = std::conditional_t<sizeof(T) == 4, double, T>;
    using A = accumulator_t<R>;
    std::vector<A> stats(static_cast<size_t>(P * N * 3)), squares(static_cast<size_t>(N));
    std::vector<std::vector<A>> losses(static_cast<size_t>(P), std::vector<A>(static_cast<size_t>(N)));
    std::vector<std::vector<R>> after;
    for (int64_t p = 0; p < P; ++p) {
      std::vector<R>& mine = after.emplace_back();
      for (const T x : logits[static_cast<size_t>(p)]) mine.push_back(R(static_cast<A>(x)));
      cpu::cross_entropy_stats(stats.data() + p * N * 3, mine.data(), targets.data(), N, columns, part(p));
    }
    for (int64_t p = 0; p < P; ++p)
      cpu::cross_entropy_merge(losses[static_cast<size_t>(p)].data(), after[static_cast<size_t>(p)].data(),
                               stats.data(), targets.data(), P, N, columns, part(p), A(scale), Gradient::yes,
                               {A(z), squares.data()});
    return outputs(stats, losses, after, squares);
  }
  Outputs cuda() const {
    DeviceArray<float> stats(P * N * 3), squares(N);
    DeviceArray<int32_t> wanted(targets);
    std::vector<std::vector<float>> losses;
    std::vector<std::vector<T>> after;
    for (int64_t p = 0; p < P; ++p) {
      DeviceArray<T> mine(logits[static_cast<size_t>(p)]);
      cuda::cross_entropy_stats<T>(stats + p * N * 3, mine, wanted, N, columns, part(p), nullptr);
      mine.host();  // waits
    }
    for (int64_t p = 0; p < P; ++p) {
      DeviceArray<T> mine(logits[static_cast<size_t>(p)]);
      DeviceArray<float> loss(N), again(N);
      cuda::cross_entropy_merge<T>(again, mine, stats, wanted, P, N, columns, part(p), scale, Gradient::no, {},
                                   nullptr);
      REQUIRE(same_bits({{"logits", mine.host()}}, {{"logits", logits[static_cast<size_t>(p)]}}));
      cuda::cross_entropy_merge<T>(loss, mine, stats, wanted, P, N, columns, part(p), scale, Gradient::yes,
                                   {z, squares}, nullptr);
      losses.push_back(loss.host());
      REQUIRE(same_bits({{"losses", losses.back()}}, {{"losses", again.host()}}));
      REQUIRE(same_bits({{"losses", losses.back()}}, {{"losses", losses.front()}}));  // on every rank
      after.push_back(mine.host());
    }
    return outputs(stats.host(), losses, after, squares.host());
  }
};

// With one class p - 1 is 0 but for the rounding of p, and the gradient is what the z-loss adds, some thousandths: the
// rounding is that much larger relative to it.
template <class T>
double tolerance(int64_t classes) {
  return sizeof(T) == 2 || classes == 1 ? 1e-3 : 1e-6;
}

}  // namespace

TEMPLATE_TEST_CASE("the cross-entropy kernels match the CPU", "[cuda]", float, bf16) {
  // One class, less than a pack, padding within a pack and whole packs of it, ragged, more packs than threads.
  const auto [N, V, V_padded] = GENERATE(std::tuple{1, 1, 1}, std::tuple{5, 5, 8}, std::tuple{4, 301, 384},
                                         std::tuple{2, 333, 333}, std::tuple{3, 9001, 9024});
  const Gradient gradient = GENERATE(Gradient::no, Gradient::yes);
  INFO("V = " << V);
  const Case<TestType> c(N, V, V_padded, gradient);
  using Reference = std::conditional_t<sizeof(TestType) == 4, double, bf16>;  // the CPU's long sums in fp32: less exact
  check_kernel([&] { return c.cuda(); }, c.template cpu<Reference>(), tolerance<TestType>(V));
}

TEST_CASE("the end of a row of logits that does not fit into shared memory is read twice", "[cuda]") {
  const Case<float> c(1, 58501, 58624, Gradient::yes);
  REQUIRE(c.V_padded * 4 > cuda::device_shared_bytes());
  check_kernel([&] { return c.cuda(); }, c.cpu<double>(), 1e-6);  // in fp32, the CPU's long sum is less exact
}

TEST_CASE("logits of minus infinity have probability 0", "[cuda]") {
  Case<float> c(1, 70, 72, Gradient::yes);
  c.z = 0;
  for (size_t v = 0; v < 66; ++v) c.logits[v] = -std::numeric_limits<float>::infinity();
  const Outputs got = c.cuda();
  REQUIRE(std::isfinite(got[0].values[0]));
  REQUIRE(std::all_of(got[1].values.begin(), got[1].values.begin() + 66, [](float d) { return d == 0; }));
  REQUIRE(std::abs(std::accumulate(got[1].values.begin(), got[1].values.end(), 0.0)) < 1e-6);
}

TEMPLATE_TEST_CASE("the cross-entropy kernels need every barrier", "[cuda]", float, bf16) {
  const Case<TestType> c(1, 12801, 12928, Gradient::yes);  // every thread has packs in each group of copies
  // The maximum and the sum use separate arrays, and a block computes only one of each.
  check_barriers([&] { return c.cuda(); },
                 {"reduce.cuh: __syncthreads();  // partial is read; the next call may write it"});
}

TEMPLATE_TEST_CASE("the cross-entropy kernels of a vocabulary in parts match the CPU", "[cuda]", float, bf16) {
  // One token, less than a pack, an empty part, ragged rows, more packs than threads.
  const auto [N, V, P, each, columns] =
      GENERATE(std::tuple{1, 1, 1, 1, 1}, std::tuple{5, 9, 2, 5, 8}, std::tuple{7, 97, 8, 14, 16},
               std::tuple{2, 333, 3, 111, 111}, std::tuple{3, 9001, 2, 8900, 9024});
  INFO("V = " << V << " in " << P << " parts");
  const PartsCase<TestType> c(N, V, P, each, columns);
  check_kernel([&] { return c.cuda(); }, c.cpu(), tolerance<TestType>(V));
}

TEST_CASE("large logits, of either sign, overflow nowhere", "[cuda]") {
  PartsCase<float> c(2, 40, 3, 15, 16);
  const float factor = GENERATE(1.0f, 1e4f), shift = GENERATE(0.0f, -200.0f);
  for (float& x : c.logits[1]) x *= factor;
  for (auto& part : c.logits)
    for (float& x : part) x += shift;
  const Outputs got = c.cuda();
  REQUIRE(relative_error(got[1].values, c.cpu()[1].values) < 1e-5);  // the shift takes digits
  for (const Output& output : got)
    for (const float x : output.values) REQUIRE(std::isfinite(x));
}

TEMPLATE_TEST_CASE("the cross-entropy kernels of parts need every barrier", "[cuda]", float, bf16) {
  const PartsCase<TestType> c(3, 1001, 1, 1001, 1024);
  check_barriers([&] { return c.cuda(); },
                 {"reduce.cuh: __syncthreads();  // partial is read; the next call may write it"});
}
