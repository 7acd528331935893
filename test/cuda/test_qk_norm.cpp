// Rotary embedding and query-key norm, separate and fused, and query-key norm of whole projections.
#include <numeric>

#include "cuda/device_test.h"
#include "ops/cpu/heads.h"
#include "ops/cuda/heads.cuh"
#include "ops/cuda/projection_norm.cuh"

using namespace llmc;

namespace {

constexpr float eps = 1e-6f;
constexpr int64_t max_positions = 50;

template <class T>
struct Case {
  AttentionShape s;
  int64_t rows = s.B * s.T, width = (s.Hq + 2 * s.Hkv) * s.D;
  std::vector<T> qkv = normal_values<T>(rows * width, 1, 1), dout = normal_values<T>(rows * width, 2),
                 q_weight = normal_values<T>(s.D, 3, 1), k_weight = normal_values<T>(s.D, 4, 1);
  std::vector<float> dq_weight = normal_values<float>(s.D, 5), dk_weight = normal_values<float>(s.D, 6);
  std::vector<float> table = std::vector<float>(static_cast<size_t>(max_positions * s.D));
  std::vector<int32_t> positions = std::vector<int32_t>(static_cast<size_t>(rows));

  explicit Case(const AttentionShape& shape) : s(shape) {
    cpu::rotary_table(table.data(), Rotary{}, max_positions, s.D);
    for (int64_t n = 0; n < rows; ++n) positions[static_cast<size_t>(n)] = static_cast<int32_t>(n * 7 % max_positions);
  }

  Outputs cpu_rotary() const {
    std::vector<T> turned = qkv, back = dout;
    cpu::rotary(turned.data(), table.data(), positions.data(), s, Turn::forward);
    cpu::rotary(back.data(), table.data(), positions.data(), s, Turn::backward);
    return {{"turned", turned}, {"turned back", back}};
  }
  Outputs cuda_rotary() const {
    DeviceArray<T> turned(qkv), back(dout);
    DeviceArray<float> angles(table);
    DeviceArray<int32_t> where(positions);
    cuda::rotary<T>(turned, angles, where, s, Turn::forward, nullptr);
    cuda::rotary<T>(back, angles, where, s, Turn::backward, nullptr);
    return {{"turned", turned.host()}, {"turned back", back.host()}};
  }

  // The norm, then the rotation, and both backward.
  Outputs cpu_norm(bool turning) const {
    std::vector<T> out(qkv.size()), dqkv = dout;
    std::vector<float> rstd(static_cast<size_t>(rows * (s.Hq + s.Hkv))),
        dq = dq_weight, dk = dk_weight, partials(static_cast<size_t>(cpu::row_partitions * 2 * s.D));
    const float* angles = turning ? table.data() : nullptr;
    cpu::qk_norm_forward(out.data(), rstd.data(), qkv.data(), q_weight.data(), k_weight.data(), angles,
                         positions.data(), eps, s);
    cpu::qk_norm_backward(dqkv.data(), dq.data(), dk.data(), partials.data(), qkv.data(), q_weight.data(),
                          k_weight.data(), rstd.data(), angles, positions.data(), s);
    return {{"out", out}, {"rstd", rstd}, {"dqkv", dqkv}, {"dq_weight", dq}, {"dk_weight", dk}};
  }
  enum class Passes { norm, two, one };
  Outputs cuda_norm(Passes passes) const {
    DeviceArray<T> out(rows * width), in(qkv), dqkv(dout), qw(q_weight), kw(k_weight);
    DeviceArray<float> rstd(rows * (s.Hq + s.Hkv)), dq(dq_weight), dk(dk_weight), angles(table),
        partials(cuda::qk_norm_backward_scratch(s));
    DeviceArray<int32_t> where(positions);
    const float* fused = passes == Passes::one ? static_cast<float*>(angles) : nullptr;
    cuda::qk_norm_forward<T>(out, rstd, in, qw, kw, fused, where, eps, s, nullptr);
    if (passes == Passes::two) {
      cuda::rotary<T>(out, angles, where, s, Turn::forward, nullptr);
      cuda::rotary<T>(dqkv, angles, where, s, Turn::backward, nullptr);
    }
    cuda::qk_norm_backward<T>(dqkv, dq, dk, {partials}, in, qw, kw, rstd, fused, where, s, nullptr);
    return {{"out", out.host()},
            {"rstd", rstd.host()},
            {"dqkv", dqkv.host()},
            {"dq_weight", dq.host()},
            {"dk_weight", dk.host()}};
  }
};

// The norm of whole projections, of all heads or of a rank's.
template <class T>
struct Projections {
  AttentionShape s;
  HeadShares shares;
  int64_t N = s.B * s.T, width = (s.Hq + 2 * s.Hkv) * s.D, Q = s.Hq * s.D, K = s.Hkv * s.D;
  std::vector<T> qkv = normal_values<T>(N * width, 1, 1), dout = normal_values<T>(N * width, 2),
                 q_weight = normal_values<T>(Q, 3, 1), k_weight = normal_values<T>(K, 4, 1);
  std::vector<float> dq_weight = normal_values<float>(Q, 5), dk_weight = normal_values<float>(K, 6);
  // What other ranks summed: squares, and of the backward.
  std::vector<float> squares, products;

  Projections(const AttentionShape& shape, const HeadShares& h) : s(shape), shares(h) {
    for (auto [sums, dy] : {std::pair{&squares, static_cast<const T*>(nullptr)}, {&products, dout.data()}}) {
      *sums = normal_values<float>(shares.ranks * N * 2, 7, static_cast<float>(Q), 2);
      cpu::projection_sums(sums->data() + shares.rank * N * 2, qkv.data(), dy, q_weight.data(), k_weight.data(), s);
    }
  }

  Outputs cpu() const {
    std::vector<T> out(qkv.size()), dqkv = dout;
    std::vector<float> rstd(static_cast<size_t>(2 * N)), sums(rstd.size()), dsums(rstd.size()),
        dq = dq_weight, dk = dk_weight, partials(static_cast<size_t>(cpu::row_partitions * (Q + K)));
    const T* const none = nullptr;
    cpu::projection_sums(sums.data(), qkv.data(), none, none, none, s);
    cpu::projection_sums(dsums.data(), qkv.data(), dout.data(), q_weight.data(), k_weight.data(), s);
    cpu::projection_norm_forward(out.data(), rstd.data(), qkv.data(), q_weight.data(), k_weight.data(), squares.data(),
                                 eps, s, shares);
    cpu::projection_norm_backward(dqkv.data(), dq.data(), dk.data(), partials.data(), qkv.data(), q_weight.data(),
                                  k_weight.data(), rstd.data(), products.data(), s, shares);
    return {{"sums", sums}, {"backward sums", dsums}, {"out", out},     {"rstd", rstd},
            {"dqkv", dqkv}, {"dq_weight", dq},        {"dk_weight", dk}};
  }
  Outputs cuda() const {
    DeviceArray<T> out(N * width), in(qkv), dqkv(dout), qw(q_weight), kw(k_weight);
    DeviceArray<float> rstd(2 * N), sums(2 * N), dsums(2 * N), dq(dq_weight), dk(dk_weight), all(squares),
        all_products(products), partials(cuda::projection_norm_backward_scratch(s));
    T* const none = nullptr;
    cuda::projection_sums<T>(sums, in, none, none, none, s, nullptr);
    cuda::projection_sums<T>(dsums, in, dqkv, qw, kw, s, nullptr);
    cuda::projection_norm_forward<T>(out, rstd, in, qw, kw, all, eps, s, shares, nullptr);
    cuda::projection_norm_backward<T>(dqkv, dq, dk, {partials}, in, qw, kw, rstd, all_products, s, shares, nullptr);
    return {{"sums", sums.host()}, {"backward sums", dsums.host()}, {"out", out.host()},     {"rstd", rstd.host()},
            {"dqkv", dqkv.host()}, {"dq_weight", dq.host()},        {"dk_weight", dk.host()}};
  }
};

// Element-wise pairs, ragged, grouped heads, partial groups of lanes, more heads than a block takes at once, a head
// that just needs a whole warp, the largest head.
AttentionShape some_shape() {
  return GENERATE(AttentionShape{.B = 1, .T = 1, .Hq = 1, .Hkv = 1, .D = 2},
                  AttentionShape{.B = 2, .T = 4, .Hq = 3, .Hkv = 1, .D = 6},
                  AttentionShape{.B = 1, .T = 9, .Hq = 4, .Hkv = 2, .D = 32},
                  AttentionShape{.B = 1, .T = 3, .Hq = 2, .Hkv = 2, .D = 100},
                  AttentionShape{.B = 1, .T = 2, .Hq = 40, .Hkv = 8, .D = 64},
                  AttentionShape{.B = 1, .T = 2, .Hq = 1, .Hkv = 1, .D = 272},
                  AttentionShape{.B = 1, .T = 3, .Hq = 2, .Hkv = 1, .D = 512});
}

template <class T>
constexpr double tolerance = sizeof(T) == 2 ? 2e-3 : 2e-6;

}  // namespace

TEST_CASE("the rotary table matches the CPU", "[cuda]") {
  const int64_t P = 37, D = GENERATE(2, 30, 512);
  const Rotary rotary = {.theta = 500000, .scaled = true};
  std::vector<float> table(static_cast<size_t>(P * D));
  cpu::rotary_table(table.data(), rotary, P, D);
  const auto run = [&]() -> Outputs {
    DeviceArray<float> out(P * D);
    cuda::rotary_table(out, rotary, P, D, nullptr);
    return {{"table", out.host()}};
  };
  check_kernel(run, {{"table", table}}, 1e-7);
}

TEMPLATE_TEST_CASE("the rotary kernel matches the CPU", "[cuda]", float, bf16) {
  const Case<TestType> c(some_shape());
  check_kernel([&] { return c.cuda_rotary(); }, c.cpu_rotary(), tolerance<TestType>);
}

TEMPLATE_TEST_CASE("query-key norm kernels match the CPU", "[cuda]", float, bf16) {
  using Passes = typename Case<TestType>::Passes;
  const Case<TestType> c(some_shape());
  check_kernel([&] { return c.cuda_norm(Passes::norm); }, c.cpu_norm(false), tolerance<TestType>);
  const Outputs two = check_kernel([&] { return c.cuda_norm(Passes::two); }, c.cpu_norm(true), 2 * tolerance<TestType>);
  REQUIRE(same_bits(check_kernel([&] { return c.cuda_norm(Passes::one); }, two, 1e-30), two));
}

TEMPLATE_TEST_CASE("query-key norm kernels need every barrier", "[cuda]", float, bf16) {
  const Case<TestType> c({.B = 1, .T = 5, .Hq = 3, .Hkv = 1, .D = 32});
  check_barriers([&] { return c.cuda_norm(Case<TestType>::Passes::one); });
}

TEST_CASE("odd or too large head sizes are refused", "[cuda]") {
  const AttentionShape odd = {.B = 1, .T = 1, .Hq = 1, .Hkv = 1, .D = 7},
                       large = {.B = 1, .T = 1, .Hq = 1, .Hkv = 1, .D = 514};
  REQUIRE_THROWS_WITH(cuda::rotary<float>(nullptr, nullptr, nullptr, odd, Turn::forward, nullptr),
                      Catch::Matchers::ContainsSubstring("the head size 7 is not an even number up to 512"));
  REQUIRE_THROWS_WITH(
      cuda::qk_norm_forward<float>(nullptr, nullptr, nullptr, nullptr, nullptr, nullptr, nullptr, eps, large, nullptr),
      Catch::Matchers::ContainsSubstring("the head size 514 is not an even number up to 512"));
}

// Element by element, ragged, in packs, more rows than parts of them, more channels than a block's threads; ranks with
// keys of their own and with copies.
TEMPLATE_TEST_CASE("the kernels of the norm of whole projections match the CPU", "[cuda]", float, bf16) {
  const AttentionShape s = GENERATE(AttentionShape{.B = 1, .T = 1, .Hq = 1, .Hkv = 1, .D = 1},
                                    AttentionShape{.B = 2, .T = 4, .Hq = 3, .Hkv = 1, .D = 7},
                                    AttentionShape{.B = 1, .T = 33, .Hq = 4, .Hkv = 2, .D = 32},
                                    AttentionShape{.B = 1, .T = 2, .Hq = 20, .Hkv = 5, .D = 152});
  const HeadShares shares = GENERATE(HeadShares{}, HeadShares{4, 2, 1}, HeadShares{4, 1, 2}, HeadShares{4, 3, 4});
  const Projections<TestType> c(s, shares);
  check_kernel([&] { return c.cuda(); }, c.cpu(), sizeof(TestType) == 2 ? 2e-3 : 2e-6);
}

TEST_CASE("the kernels of the norm of whole projections need every barrier but one for a next sum", "[cuda]") {
  const Projections<float> c({.B = 1, .T = 9, .Hq = 12, .Hkv = 12, .D = 16}, {});
  check_barriers([&] { return c.cuda(); },
                 {"reduce.cuh: __syncthreads();  // partial is read; the next call may write it"});
}
