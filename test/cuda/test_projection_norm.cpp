// The query-key norm of whole projections, of all heads and of a rank's, against the CPU ops.
#include "cuda/device_test.h"
#include "ops/cpu/projection_norm.h"
#include "ops/cuda/projection_norm.cuh"

using namespace llmc;

namespace {

constexpr float eps = 1e-5f;

template <class T>
struct Case {
  AttentionShape s;
  HeadShares shares;
  int64_t N = s.B * s.T, width = (s.Hq + 2 * s.Hkv) * s.D, Q = s.Hq * s.D, K = s.Hkv * s.D;
  std::vector<T> qkv = normal_values<T>(N * width, 1, 1), dout = normal_values<T>(N * width, 2),
                 q_weight = normal_values<T>(Q, 3, 1), k_weight = normal_values<T>(K, 4, 1);
  std::vector<float> dq_weight = normal_values<float>(Q, 5), dk_weight = normal_values<float>(K, 6);
  // What other ranks summed: squares, and of the backward.
  std::vector<float> squares, products;

  Case(const AttentionShape& shape, const HeadShares& h) : s(shape), shares(h) {
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
    cuda::projection_norm_backward<T>(dqkv, dq, dk, partials, in, qw, kw, rstd, all_products, s, shares, nullptr);
    return {{"sums", sums.host()}, {"backward sums", dsums.host()}, {"out", out.host()},     {"rstd", rstd.host()},
            {"dqkv", dqkv.host()}, {"dq_weight", dq.host()},        {"dk_weight", dk.host()}};
  }
};

}  // namespace

// Element by element, ragged, in packs, more rows than parts of them, more channels than a block's threads; ranks with
// keys of their own and with copies.
TEMPLATE_TEST_CASE("the kernels of the norm of whole projections match the CPU", "[cuda]", float, bf16) {
  const AttentionShape s = GENERATE(AttentionShape{.B = 1, .T = 1, .Hq = 1, .Hkv = 1, .D = 1},
                                    AttentionShape{.B = 2, .T = 4, .Hq = 3, .Hkv = 1, .D = 7},
                                    AttentionShape{.B = 1, .T = 33, .Hq = 4, .Hkv = 2, .D = 32},
                                    AttentionShape{.B = 1, .T = 2, .Hq = 20, .Hkv = 5, .D = 152});
  const HeadShares shares = GENERATE(HeadShares{}, HeadShares{4, 2, 1}, HeadShares{4, 1, 2}, HeadShares{4, 3, 4});
  const Case<TestType> c(s, shares);
  check_kernel([&] { return c.cuda(); }, c.cpu(), sizeof(TestType) == 2 ? 2e-3 : 2e-6);
}

TEST_CASE("the kernels of the norm of whole projections need every barrier", "[cuda]") {
  const Case<float> c({.B = 1, .T = 9, .Hq = 12, .Hkv = 12, .D = 16}, {});
  check_barriers([&] { return c.cuda(); });
}
