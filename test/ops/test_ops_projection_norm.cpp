// The query-key norm of whole projections, whole and with the heads shared out to ranks: finite differences in double,
// every rank against one, fp32 and bf16 against double.
#include "ops/op_bench.h"

using namespace llmc;

namespace {

constexpr float eps = 1e-3f;

// The norm forward and backward on one rank that has everything.
struct Whole {
  AttentionShape s;
  int64_t N = s.B * s.T, width = (s.Hq + 2 * s.Hkv) * s.D, Q = s.Hq * s.D, K = s.Hkv * s.D;
  Tensor qkv, q_weight, k_weight, dout, out, rstd, sums, dqkv, dq_weight, dk_weight;

  Whole(Bench& b, const AttentionShape& shape, DType d) : s(shape) {
    const DType wide = accumulator_of(d);
    qkv = b.as(d, b.normal({N, width}, 2)), q_weight = b.as(d, b.normal({Q})), k_weight = b.as(d, b.normal({K}));
    dout = b.as(d, b.normal({N, width})), out = b.poisoned(d, {N, width}), rstd = b.poisoned(wide, {N, 2});
    sums = b.poisoned(wide, {1, N, 2}), dqkv = b.poisoned(d, {N, width});
    dq_weight = b.zeros(wide, {Q}), dk_weight = b.zeros(wide, {K});
  }
  void forward(Stream& stream) const {
    projection_norm_sums(sums.reshaped({N, 2}), qkv, s, stream);
    projection_norm_forward(out, rstd, qkv, q_weight, k_weight, sums, eps, s, {}, stream);
  }
  void backward(Stream& stream) const {
    copy(dqkv, dout, stream);
    projection_norm_backward_sums(sums.reshaped({N, 2}), dqkv, qkv, q_weight, k_weight, s, stream);
    projection_norm_backward(dqkv, dq_weight, dk_weight, qkv, q_weight, k_weight, rstd, sums, s, {}, stream);
  }
  void both(Bench& b) const {
    forward(b.stream);
    backward(b.stream);
    b.stream.synchronize();
  }
};

// Columns [begin, begin + n) of a matrix, or elements of a vector.
Tensor columns(Bench& b, const Tensor& t, int64_t begin, int64_t n) {
  const int64_t rows = t.shape.rank() == 1 ? 1 : t.shape[0], width = t.numel() / rows;
  const Tensor part = b.poisoned(t.dtype, t.shape.rank() == 1 ? Shape{n} : Shape{rows, n});
  for (int64_t r = 0; r < rows; ++r) std::copy_n(t.data<double>() + r * width + begin, n, part.data<double>() + r * n);
  return part;
}
// The heads of qkv that a rank has.
Tensor heads_of(Bench& b, const Tensor& qkv, const Whole& w, const AttentionShape& s, const HeadShares& shares) {
  const int64_t q = s.Hq * s.D, k = s.Hkv * s.D, first = shares.rank / shares.key_copies * k;
  const Tensor parts[] = {columns(b, qkv, shares.rank * q, q), columns(b, qkv, w.Q + first, k),
                          columns(b, qkv, w.Q + w.K + first, k)};
  const Tensor all = b.poisoned(DType::fp64, {w.N, q + 2 * k});
  for (int64_t n = 0; n < w.N; ++n) {
    double* to = all.data<double>() + n * (q + 2 * k);
    for (const Tensor& t : parts) to = std::copy_n(t.data<double>() + n * t.shape[1], t.shape[1], to);
  }
  return all;
}
double distance(const Tensor& a, const Tensor& b) {
  return relative_distance(a.data<double>(), b.data<double>(), a.numel());
}

}  // namespace

TEST_CASE("query-key norm of whole projections: finite differences; values are unchanged, weights' gradients add",
          "[ops][tp]") {
  Bench b;
  const Whole w(b, {.B = 2, .T = 3, .Hq = 4, .Hkv = 2, .D = 3}, DType::fp64);
  const auto value = [&] {
    w.forward(b.stream);
    b.stream.synchronize();
    return dot(w.out, w.dout);
  };
  value();
  for (int64_t n = 0; n < w.N; ++n)
    for (int64_t i = w.Q + w.K; i < w.width; ++i)
      REQUIRE(w.out.data<double>()[n * w.width + i] == w.qkv.data<double>()[n * w.width + i]);
  w.backward(b.stream);
  w.backward(b.stream);
  for (const Tensor& t : {w.dq_weight, w.dk_weight}) scale(t, 0.5f, b.stream);
  b.stream.synchronize();
  require_gradient(w.qkv, w.dqkv, value);
  require_gradient(w.q_weight, w.dq_weight, value);
  require_gradient(w.k_weight, w.dk_weight, value);
}

TEST_CASE("a projection of ones that differ only by their heads is divided by the root mean square of all",
          "[ops][tp]") {
  Bench b;
  const Whole w(b, {.B = 1, .T = 1, .Hq = 2, .Hkv = 1, .D = 2}, DType::fp64);
  std::ranges::copy(std::vector<double>{1, 1, 7, 7, 3, 3, 11, 13}, w.qkv.data<double>());
  for (const Tensor& t : {w.q_weight, w.k_weight}) std::fill_n(t.data<double>(), t.numel(), 2.0);
  w.forward(b.stream);
  b.stream.synchronize();
  const std::vector<double> right = {0.4, 0.4, 2.8, 2.8, 2, 2, 11, 13};  // root mean squares 5 and 3
  for (size_t i = 0; i < right.size(); ++i) REQUIRE(w.out.data<double>()[i] == Approx(right[i]).epsilon(1e-3));
}

TEST_CASE("ranks with some of the heads each compute the norm of whole projections and its gradient", "[ops][tp]") {
  struct Case {
    int64_t ranks, key_copies;
  };
  const auto [ranks, copies] = GENERATE(Case{1, 1}, Case{2, 1}, Case{2, 2}, Case{4, 1}, Case{4, 2}, Case{8, 4});
  const int64_t key_heads = std::max<int64_t>(1, ranks / copies);
  Bench b;
  const Whole w(b, {.B = 1, .T = 5, .Hq = 8, .Hkv = key_heads, .D = 6}, DType::fp64);
  w.both(b);
  const AttentionShape s{1, 5, 8 / ranks, key_heads * copies / ranks, 6};
  const int64_t q = s.Hq * s.D, k = s.Hkv * s.D;
  const Tensor forward_sums = b.poisoned(DType::fp64, {ranks, w.N, 2}),
               backward_sums = b.poisoned(DType::fp64, {ranks, w.N, 2});
  std::vector<Tensor> qkv, dqkv, dq, dk;
  const auto shares = [&, ranks = ranks, copies = copies](int64_t rank) { return HeadShares{ranks, rank, copies}; };
  const auto q_weight = [&](int64_t r) { return columns(b, w.q_weight, r * q, q); };
  const auto k_weight = [&, copies = copies](int64_t r) { return columns(b, w.k_weight, r / copies * k, k); };
  for (int64_t r = 0; r < ranks; ++r) {
    qkv.push_back(heads_of(b, w.qkv, w, s, shares(r)));
    dqkv.push_back(heads_of(b, w.dout, w, s, shares(r)));
    // Each copy has a part of the gradient of its keys and values.
    const double part =
        copies == 1 ? 1 : static_cast<double>(2 * (r % copies) + 1) / static_cast<double>(copies * copies);
    for (int64_t n = 0; n < w.N; ++n)
      for (int64_t i = q; i < q + 2 * k; ++i) dqkv.back().data<double>()[n * (q + 2 * k) + i] *= part;
    projection_norm_sums(forward_sums.slice(r * w.N * 2, {w.N, 2}), qkv.back(), s, b.stream);
    projection_norm_backward_sums(backward_sums.slice(r * w.N * 2, {w.N, 2}), dqkv.back(), qkv.back(), q_weight(r),
                                  k_weight(r), s, b.stream);
  }
  const Tensor whole_dqkv = b.zeros(DType::fp64, w.qkv.shape), whole_dk = b.zeros(DType::fp64, {w.K});
  for (int64_t r = 0; r < ranks; ++r) {
    const size_t i = static_cast<size_t>(r);
    const Tensor out = b.poisoned(DType::fp64, qkv[i].shape), rstd = b.poisoned(DType::fp64, {w.N, 2}),
                 dqw = b.zeros(DType::fp64, {q}), dkw = b.zeros(DType::fp64, {k});
    projection_norm_forward(out, rstd, qkv[i], q_weight(r), k_weight(r), forward_sums, eps, s, shares(r), b.stream);
    projection_norm_backward(dqkv[i], dqw, dkw, qkv[i], q_weight(r), k_weight(r), rstd, backward_sums, s, shares(r),
                             b.stream);
    b.stream.synchronize();
    REQUIRE(distance(rstd, w.rstd) < 1e-14);
    REQUIRE(distance(out, heads_of(b, w.out, w, s, shares(r))) < 1e-14);
    REQUIRE(distance(dqw, columns(b, w.dq_weight, r * q, q)) < 1e-13);
    const int64_t first = r / copies * k;
    for (int64_t c = 0; c < k; ++c) whole_dk.data<double>()[first + c] += dkw.data<double>()[c];
    for (int64_t n = 0; n < w.N; ++n) {
      const double* from = dqkv[i].data<double>() + n * (q + 2 * k);
      double* to = whole_dqkv.data<double>() + n * w.width;
      for (int64_t c = 0; c < q; ++c) to[r * q + c] += from[c];
      for (int64_t c = 0; c < k; ++c) to[w.Q + first + c] += from[q + c];
      for (int64_t c = 0; c < k; ++c) to[w.Q + w.K + first + c] += from[q + k + c];
    }
  }
  REQUIRE(distance(whole_dqkv, w.dqkv) < 1e-13);
  REQUIRE(distance(whole_dk, w.dk_weight) < 1e-13);
}

TEST_CASE("the norm of whole projections in fp32 and bf16 is that in double, rounded once", "[ops][tp]") {
  const DType d = GENERATE(DType::fp32, DType::bf16);
  const AttentionShape s{.B = 1, .T = 70, .Hq = 6, .Hkv = 2, .D = 20};
  Bench b;
  const Whole w(b, s, d), exact(b, s, DType::fp64);
  for (const auto t : {&Whole::qkv, &Whole::q_weight, &Whole::k_weight, &Whole::dout})
    convert(exact.*t, w.*t, b.stream);
  w.both(b);
  exact.both(b);
  const double rounding = d == DType::bf16 ? 0x1p-9 : 1e-6;
  for (const auto t : {&Whole::out, &Whole::dqkv}) REQUIRE(distance(b.as(DType::fp64, w.*t), exact.*t) < rounding);
  for (const auto t : {&Whole::rstd, &Whole::dq_weight, &Whole::dk_weight})
    REQUIRE(distance(b.as(DType::fp64, w.*t), exact.*t) < 1e-6);
}

TEST_CASE("the norm of whole projections gives the same bits for any number of threads, and refuses wrong shares",
          "[ops][tp]") {
  std::string results[2];
  for (const int threads : {1, 3}) {
    Bench b(threads);
    const Whole w(b, {.B = 1, .T = 90, .Hq = 3, .Hkv = 1, .D = 10}, DType::fp32);
    w.both(b);
    for (const Tensor& t : {w.out, w.rstd, w.dqkv, w.dq_weight, w.dk_weight}) results[threads / 3] += bits_of(t);
  }
  REQUIRE((results[0] == results[1]));
  Bench b;
  const Whole w(b, {.B = 1, .T = 2, .Hq = 3, .Hkv = 1, .D = 4}, DType::fp32);
  const auto forward = [&](const HeadShares& shares) {
    projection_norm_forward(w.out, w.rstd, w.qkv, w.q_weight, w.k_weight, w.sums, eps, w.s, shares, b.stream);
  };
  REQUIRE_ERROR(forward({3, 0, 2}), "rank 0 of 3, of which 2 have the same key heads");
  REQUIRE_ERROR(forward({3, 3, 1}), "rank 3 of 3");
  REQUIRE_ERROR(forward({2, 0, 1}), "projection_norm_forward: sums");
}
