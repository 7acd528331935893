// QK-clip's ops: the largest logits that attention finds, and what becomes of the weights of heads.
#include "catch2.h"
#include "ops/op_bench.h"

using namespace llmc;

namespace {

// The largest logit of each head, in plain loops.
std::vector<double> plain_largest(const AttentionShape& s, const Tensor& qkv, const Tensor& positions) {
  const int64_t width = (s.Hq + 2 * s.Hkv) * s.D;
  std::vector<double> most(static_cast<size_t>(s.Hq), -std::numeric_limits<double>::infinity());
  for (int64_t h = 0; h < s.Hq; ++h)
    for (int64_t b = 0; b < s.B; ++b)
      for (int64_t i = 0; i < s.T; ++i)
        for (int64_t j = positions.empty() ? 0 : i - positions.data<int32_t>()[b * s.T + i]; j <= i; ++j) {
          const double* q = qkv.data<double>() + (b * s.T + i) * width + h * s.D;
          const double* k = qkv.data<double>() + (b * s.T + j) * width + (s.Hq + h / (s.Hq / s.Hkv)) * s.D;
          double score = 0;
          for (int64_t d = 0; d < s.D; ++d) score += q[d] * k[d];
          double& found = most[static_cast<size_t>(h)];
          found = std::max(found, score / std::sqrt(static_cast<double>(s.D)));
        }
  return most;
}

}  // namespace

TEST_CASE("attention finds the largest logit of each head, over whole sequences, blocks and documents", "[ops][muon]") {
  for (const DType dtype : {DType::fp64, DType::fp32, DType::bf16})
    for (const int64_t T : {3, 21}) {  // few rows, and tiles
      Bench b;
      const AttentionShape s{2, T, 4, 2, 6};
      const Tensor given = b.as(dtype, b.normal({s.B * T, (s.Hq + 2 * s.Hkv) * s.D}, 3)),
                   exact = b.as(DType::fp64, given), out = b.poisoned(dtype, {s.B * T, s.Hq * s.D});
      for (const bool documents : {false, true}) {
        INFO(name_of(dtype) << ", " << T << " rows" << (documents ? ", documents" : ""));
        std::vector<int32_t> places;
        for (int64_t i = 0; i < s.B * T; ++i) places.push_back(static_cast<int32_t>(i % T % 5));
        const Tensor positions = documents ? b.integers(places) : Tensor{};
        const std::vector<double> expected = plain_largest(s, exact, positions);
        const DType stat = accumulator_of(dtype);
        const Tensor lse = b.poisoned(stat, {s.B, s.Hq, T}), largest = b.poisoned(stat, lse.shape),
                     most = b.zeros(DType::fp64, {s.Hq});
        const auto require_found = [&](const Tensor& rows) {
          for (int64_t h = 0; h < s.Hq; ++h) most.data<double>()[h] = h == 0 ? 1e3 : 0;
          largest_logits(most, rows, b.stream);
          b.stream.synchronize();
          REQUIRE(most.data<double>()[0] == 1e3);  // it was larger before
          // Sums of D products: each rounding is within 2^-24 of the product of the lengths, which is below 500.
          for (size_t h = 1; h < 4; ++h)
            REQUIRE(std::abs(most.data<double>()[h] - expected[h]) <
                    (dtype == DType::fp64 ? 1e-12 : 500 * 6 * 0x1p-24));
        };
        attention_forward(out, {lse, largest}, given, given, positions, whole_sequences(s), b.stream);
        require_found(largest);
        const RunningAttention running{b.poisoned(stat, out.shape), b.poisoned(stat, lse.shape),
                                       b.poisoned(stat, lse.shape)};
        attention_begin(running, b.stream);  // keys in two blocks, of which the later rows see both
        AttentionBlock block = whole_sequences(s);
        block.all_keys = false, block.keys.rows = T / 2;
        attention_merge(running, given, given, positions, block, b.stream);
        block.keys = {T, T / 2, T - T / 2}, block.queries = {T, T / 2, T - T / 2};
        attention_merge(running, given, given, positions, block, b.stream);
        require_found(running.largest);
      }
    }
}

TEST_CASE("the weights of heads with too large logits shrink, of every part that a rank may hold", "[ops][muon]") {
  constexpr int64_t heads = 4, rows = 3, columns = 5, per_head = rows * columns;
  const double inf = std::numeric_limits<double>::infinity();
  const std::vector<double> logits = {50, 200, inf, 100.5};
  const std::vector<double> whole = {1, 0.5, 1, 100 / 100.5};
  const Elements everything{0, 0, 1, 1}, middle{.begin = 7}, box{.begin = 2, .first = 1, .columns = 3, .stride = 5};
  for (const DType dtype : {DType::fp64, DType::fp32, DType::bf16})
    for (const ClipShare share : {ClipShare::root, ClipShare::whole})
      for (const Elements& elements : {everything, middle, box})
        for (const double allowed : {1.0, 0.0}) {
          Bench b;
          const int64_t n = elements.columns == 3 ? heads * rows * 3 - 2 : heads * per_head - elements.begin;
          const Tensor before = b.normal({n}), largest = b.zeros(DType::fp64, {heads}),
                       control = b.zeros(DType::fp64, {4});
          std::copy(logits.begin(), logits.end(), largest.data<double>());
          control.data<double>()[2] = allowed;
          const Tensor master = dtype == DType::bf16 ? b.as(DType::fp32, before) : Tensor{};
          const Tensor weight = b.as(dtype, before);
          clip_heads(weight, master, largest, control, "q", elements, {100, share, per_head}, {}, b.stream);
          b.stream.synchronize();
          const Tensor now = b.as(DType::fp64, dtype == DType::bf16 ? master : weight);
          if (dtype == DType::bf16) REQUIRE(bits_of(weight) == bits_of(b.as(DType::bf16, master)));
          for (int64_t i = 0; i < n; ++i) {
            const double factor = allowed > 0 ? whole[static_cast<size_t>(elements.index(i) / per_head)] : 1;
            const double expected = before.data<double>()[i] * (share == ClipShare::root ? std::sqrt(factor) : factor);
            REQUIRE(std::abs(now.data<double>()[i] - expected) <=
                    std::abs(expected) * (dtype == DType::fp64 ? 1e-15 : 3 * 0x1p-24));
          }
        }
}

TEST_CASE("bf16 weights without a master copy shrink on average by what rounding to nearest would lose",
          "[ops][muon]") {
  Bench b;
  constexpr int64_t n = 1 << 14;
  const Tensor weight = b.poisoned(DType::bf16, {n}), largest = b.zeros(DType::fp64, {1}),
               control = b.zeros(DType::fp64, {4});
  for (int64_t i = 0; i < n; ++i) weight.data<bf16>()[i] = bf16(1.5f);
  const OptimizerOptions options{.lr = 0, .beta1 = 0, .beta2 = 0, .eps = 0, .weight_decay = 0, .step = 2, .seed = 3};
  largest.data<double>()[0] = 100.1, control.data<double>()[2] = 1;
  clip_heads(weight, {}, largest, control, "q", {}, {100, ClipShare::whole, n}, options, b.stream);
  b.stream.synchronize();
  double mean = 0;
  for (int64_t i = 0; i < n; ++i) mean += static_cast<float>(weight.data<bf16>()[i]) / static_cast<double>(n);
  // A weight becomes 1.5 - 2^-7 with probability p = 1.5 (1 - 1 / 1.001) 2^7 = 0.19: five standard deviations of the
  // mean
  REQUIRE(std::abs(mean - 1.5 / 1.001) < 5 * 0x1p-7 * std::sqrt(0.19 * 0.81 / n));
}

TEST_CASE("the largest of all ranks is taken head by head", "[ops][muon]") {
  Bench b;
  const Tensor most = b.zeros(DType::fp64, {3}), gathered = b.normal({4, 3});
  largest_of_ranks(most, gathered, b.stream);
  b.stream.synchronize();
  for (int64_t i = 0; i < 3; ++i) {
    double expected = 0;
    for (int64_t r = 0; r < 4; ++r) expected = std::max(expected, gathered.data<double>()[3 * r + i]);
    REQUIRE(most.data<double>()[i] == expected);
  }
}
