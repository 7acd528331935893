// Attention of blocks: against a loop over queries and keys, finite differences, and whole attention cut into blocks.
#include "catch2.h"
#include "ops/op_bench.h"

using namespace llmc;

namespace {

// Positions of documents of random lengths; the first of each sequence began up to 30 rows before its first row.
std::vector<int32_t> random_documents(std::mt19937_64& random, int64_t B, int64_t length) {
  std::vector<int32_t> positions;
  for (int64_t b = 0; b < B; ++b)
    for (int64_t t = 0, position = static_cast<int64_t>(random() % 30); t < length; ++t, ++position) {
      if (random() % 9 == 0) position = 0;
      positions.push_back(static_cast<int32_t>(position));
    }
  return positions;
}

bool sees(const AttentionBlock& s, const Tensor& positions, int64_t b, int64_t i, int64_t j) {
  const int64_t own = i + s.offset;
  if (j > own) return false;
  return positions.empty() || j >= own - positions.data<int32_t>()[b * s.queries.length + s.queries.first + i];
}
bool sees_any(const AttentionBlock& s, const Tensor& positions, int64_t b, int64_t i) {
  bool any = false;
  for (int64_t j = 0; j < s.keys.rows; ++j) any |= sees(s, positions, b, i, j);
  return any;
}

// A block of fp64 tensors, queries apart from keys and values.
struct BlockTest {
  AttentionBlock s;
  Bench b{1, 1 << 22};
  Tensor positions, q, kv, dout, out, lse;
  std::vector<bool> seeing;  // the block's rows that see a key

  BlockTest(const AttentionBlock& block, bool documents) : s(block) {
    b.random.seed(static_cast<uint64_t>(s.offset + 100 * s.keys.rows + 10000 * s.queries.rows));
    const int64_t rows = s.B * s.queries.length;
    if (documents) positions = b.integers(random_documents(b.random, s.B, s.queries.length));
    q = b.normal({rows, s.Hq * s.D});
    kv = b.normal({s.B * s.keys.length, 2 * s.Hkv * s.D});
    dout = b.normal(q.shape);
    out = b.poisoned(DType::fp64, q.shape);
    lse = b.poisoned(DType::fp64, {s.B, s.Hq, s.queries.length});
    for (int64_t n = 0; n < s.B; ++n)
      for (int64_t i = 0; i < s.queries.rows; ++i) seeing.push_back(sees_any(s, positions, n, i));
  }
  bool sees_a_key(int64_t n, int64_t i) const { return seeing[static_cast<size_t>(n * s.queries.rows + i)]; }
  int64_t row(int64_t n, int64_t i) const { return n * s.queries.length + s.queries.first + i; }
  // Rows of out and dout that the block has nothing to say about.
  bool says_nothing(int64_t n, int64_t t) const {
    const int64_t i = t - s.queries.first;
    return i < 0 || i >= s.queries.rows || !sees_a_key(n, i);
  }

  RunningAttention running() {
    return {b.poisoned(DType::fp64, out.shape), b.poisoned(DType::fp64, lse.shape), b.poisoned(DType::fp64, lse.shape)};
  }
  void forward(bool merge) {
    const auto scope = b.arena.scope();
    if (merge) {
      const RunningAttention sums = running();
      attention_begin(sums, b.stream);
      attention_merge(sums, q, kv, positions, s, b.stream);
      attention_finish(out, lse, sums, b.stream);
    } else {
      attention_forward(out, lse, q, kv, positions, s, b.stream);
    }
    b.stream.synchronize();
  }
  // sum of out * dout over the rows that see a key.
  double value(bool merge) {
    forward(merge);
    double sum = 0;
    for (int64_t n = 0; n < s.B; ++n)
      for (int64_t i = 0; i < s.queries.rows; ++i)
        if (const int64_t at = row(n, i) * s.Hq * s.D; sees_a_key(n, i))
          for (int64_t d = at; d < at + s.Hq * s.D; ++d) sum += out.data<double>()[d] * dout.data<double>()[d];
    return sum;
  }

  // The definition, one pair of a query and a key after another.
  void require_forward() {
    for (int64_t n = 0; n < s.B; ++n)
      for (int64_t i = 0; i < s.queries.rows; ++i)
        for (int64_t h = 0; h < s.Hq; ++h) {
          if (!sees_a_key(n, i)) continue;
          const int64_t width = 2 * s.Hkv * s.D, head = h / (s.Hq / s.Hkv) * s.D;
          const double* query = q.data<double>() + (row(n, i) * s.Hq + h) * s.D;
          const double* keys = kv.data<double>() + (n * s.keys.length + s.keys.first) * width + head;
          std::vector<double> expected(static_cast<size_t>(s.D));
          double total = 0;
          for (int64_t j = 0; j < s.keys.rows; ++j) {
            if (!sees(s, positions, n, i, j)) continue;
            double score = 0;
            for (int64_t d = 0; d < s.D; ++d) score += query[d] * keys[j * width + d];
            const double p = std::exp(score / std::sqrt(static_cast<double>(s.D)));
            total += p;
            for (int64_t d = 0; d < s.D; ++d) expected[static_cast<size_t>(d)] += p * keys[j * width + s.Hkv * s.D + d];
          }
          for (double& x : expected) x /= total;
          REQUIRE(relative_distance(out.data<double>() + (row(n, i) * s.Hq + h) * s.D, expected.data(), s.D) < 1e-12);
          const double found = lse.data<double>()[(n * s.Hq + h) * s.queries.length + s.queries.first + i];
          REQUIRE(std::abs(found - std::log(total)) < 1e-12);
        }
  }
};

// Rows of `t` that belong to no row of the block, and the columns before `first`, are all ones (NaN); sets them to 0.
void require_poisoned_outside(const Tensor& t, int64_t B, const SequenceRows& rows) {
  for (int64_t n = 0; n < B; ++n)
    for (int64_t r = 0; r < rows.length; ++r) {
      if (r >= rows.first && r < rows.first + rows.rows) continue;
      const Tensor row = t.slice((n * rows.length + r) * t.shape[1], {t.shape[1]});
      REQUIRE(bits_of(row) == std::string(static_cast<size_t>(row.size_bytes()), '\xff'));
      std::memset(row.bytes, 0, static_cast<size_t>(row.size_bytes()));
    }
}

std::vector<std::pair<AttentionBlock, bool>> blocks_to_test() {
  // B, Hq, Hkv, D, queries {length, first, rows}, keys, offset; documents?
  std::vector<std::pair<AttentionBlock, bool>> blocks = {
      {{1, 2, 1, 3, {9, 0, 9}, {9, 0, 9}, 0}, false},      {{2, 2, 2, 3, {12, 3, 8}, {15, 4, 9}, 2}, true},
      {{2, 4, 2, 2, {8, 0, 8}, {20, 5, 15}, 40}, false},   {{1, 2, 1, 3, {40, 2, 37}, {50, 1, 45}, -5}, false},
      {{1, 1, 1, 3, {70, 0, 66}, {40, 0, 40}, -20}, true}, {{2, 2, 1, 3, {10, 1, 2}, {45, 2, 40}, 36}, true},
      {{2, 4, 2, 3, {6, 2, 2}, {30, 0, 20}, -1}, false},   {{1, 1, 1, 2, {70, 1, 68}, {80, 3, 75}, 34}, true},
      {{1, 1, 1, 2, {5, 1, 2}, {5, 1, 3}, 4}, true},       {{1, 1, 1, 2, {33, 0, 33}, {33, 0, 33}, 33}, true}};
  std::mt19937_64 random(7);
  auto below = [&](int64_t n) { return static_cast<int64_t>(random() % static_cast<uint64_t>(n)); };
  for (int i = 0; i < 12; ++i) {
    const int64_t most = i % 3 == 0 ? 45 : 12;
    const SequenceRows queries{most + 2, below(3), 1 + below(most)}, keys{most + 3, below(4), 1 + below(most)};
    const int64_t hkv = 1 + below(2), offset = below(queries.rows + keys.rows) - queries.rows + 1;
    blocks.push_back({{1 + below(2), hkv * (1 + below(2)), hkv, 1 + below(3), queries, keys, offset}, i % 2 == 0});
  }
  return blocks;
}

}  // namespace

TEST_CASE("a block of attention: against a loop, and by finite differences; other rows are not touched",
          "[ops][attention]") {
  for (const auto& [block, documents] : blocks_to_test()) {
    BlockTest t(block, documents);
    INFO("B " << block.B << ", heads " << block.Hq << " and " << block.Hkv << ", " << block.queries.rows << " queries, "
              << block.keys.rows << " keys, offset " << block.offset << ", documents " << documents);
    for (const bool merge : {false, true}) {
      if (!merge && std::find(t.seeing.begin(), t.seeing.end(), false) != t.seeing.end()) continue;
      AttentionBlock& s = t.s;
      s.all_keys = !merge;
      t.forward(merge);
      t.require_forward();
      const Tensor dq = t.b.poisoned(DType::fp64, t.q.shape), dkv = t.b.poisoned(DType::fp64, t.kv.shape);
      if (merge) {  // adds to 1, 1, ...
        for (const auto& [gradient, rows] : {std::pair<Tensor, SequenceRows>{dq, s.queries}, {dkv, s.keys}})
          for (int64_t n = 0; n < s.B; ++n)
            std::fill_n(gradient.data<double>() + (n * rows.length + rows.first) * gradient.shape[1],
                        rows.rows * gradient.shape[1], 1.0);
      }
      attention_backward(dq, dkv, t.dout, t.out, t.q, t.kv, t.lse, t.positions, s,
                         merge ? Accumulate::yes : Accumulate::no, t.b.stream);
      t.b.stream.synchronize();
      if (!merge) {
        require_poisoned_outside(t.out, s.B, s.queries);
        require_poisoned_outside(t.lse.reshaped({s.B * s.Hq * s.queries.length, 1}), s.B * s.Hq, s.queries);
      }
      require_poisoned_outside(dq, s.B, s.queries);
      require_poisoned_outside(dkv, s.B, s.keys);
      for (const auto& [gradient, rows] : {std::pair<Tensor, SequenceRows>{dq, s.queries}, {dkv, s.keys}})
        for (int64_t n = 0; merge && n < s.B; ++n)
          for (int64_t i = 0; i < rows.rows * gradient.shape[1]; ++i)
            gradient.data<double>()[(n * rows.length + rows.first) * gradient.shape[1] + i] -= 1;
      require_gradient(t.q, dq, [&] { return t.value(merge); });
      require_gradient(t.kv, dkv, [&] { return t.value(merge); });
    }
  }
}

TEST_CASE("merging a block changes the rows that see one of its keys, and no bit of others", "[ops][attention]") {
  for (const auto& [block, documents] : blocks_to_test()) {
    BlockTest t(block, documents);
    const RunningAttention sums = t.running();
    attention_begin(sums, t.b.stream);
    attention_merge(sums, t.q, t.kv, t.positions, block, t.b.stream);  // the second time, no row is at its beginning
    t.b.stream.synchronize();
    auto each_row = [&](auto&& f) {
      for (int64_t n = 0; n < block.B; ++n)
        for (int64_t r = 0; r < block.queries.length; ++r)
          for (int64_t h = 0; h < block.Hq; ++h) {
            const int64_t at = (n * block.Hq + h) * block.queries.length + r;
            f(t.says_nothing(n, r),
              std::array{sums.sums.slice(((n * block.queries.length + r) * block.Hq + h) * block.D, {block.D}),
                         sums.largest.slice(at, {1}), sums.total.slice(at, {1})});
          }
    };
    each_row([](bool untouched, const auto& parts) {
      if (untouched) {
        REQUIRE(*parts[1].template data<double>() == -std::numeric_limits<double>::infinity());
        for (const Tensor& zeros : {parts[0], parts[2]})
          REQUIRE(bits_of(zeros) == std::string(static_cast<size_t>(zeros.size_bytes()), '\0'));
      }
      for (const Tensor& part : parts)
        if (untouched) std::memset(part.bytes, 0xfe, static_cast<size_t>(part.size_bytes()));
    });
    attention_merge(sums, t.q, t.kv, t.positions, block, t.b.stream);
    t.b.stream.synchronize();
    each_row([](bool untouched, const auto& parts) {
      for (const Tensor& part : parts)
        if (untouched) REQUIRE(bits_of(part) == std::string(static_cast<size_t>(part.size_bytes()), '\xfe'));
        else
          for (int64_t i = 0; i < part.numel(); ++i) REQUIRE(std::isfinite(part.data<double>()[i]));
    });
  }
}

TEST_CASE("whole attention cut into blocks, in any order, is whole attention: also where exp() alone overflows",
          "[ops][attention]") {
  const AttentionShape shape{.B = 2, .T = 75, .Hq = 4, .Hkv = 2, .D = 8};
  const int64_t N = shape.B * shape.T, width = (shape.Hq + 2 * shape.Hkv) * shape.D;
  const int64_t cuts[] = {0, 20, 33, 64, 75};
  std::vector<std::pair<int, int>> pairs;  // of slices: queries, keys
  for (int a = 0; a < 4; ++a)
    for (int c = 0; c < 4; ++c) pairs.emplace_back(a, c);
  for (const DType d : {DType::fp64, DType::fp32, DType::bf16})
    for (const double size : {1.0, 12.0})  // scores of up to 1 or 2; of more than 1000
      for (const bool documents : {false, true}) {
        Bench b;
        const DType stat = accumulator_of(d);
        const Tensor exact = b.normal({N, width});
        for (int64_t i = 0; i < exact.numel(); ++i)
          if (i % width < (shape.Hq + shape.Hkv) * shape.D) exact.data<double>()[i] *= size;
        const Tensor qkv = b.as(d, exact), dout = b.as(d, b.normal({N, shape.Hq * shape.D}));
        Tensor positions;
        if (documents) {
          std::vector<int32_t> places = random_documents(b.random, 1, N);
          for (int64_t t = 0; t < N; ++t) places[t] = std::min(places[t], static_cast<int32_t>(t % shape.T));
          positions = b.integers(places);
        }
        const Tensor out = b.poisoned(d, dout.shape), lse = b.poisoned(stat, {shape.B, shape.Hq, shape.T}),
                     dqkv = b.poisoned(d, qkv.shape);
        attention_forward(out, lse, qkv, qkv, positions, whole_sequences(shape), b.stream);
        attention_backward(dqkv, dqkv, dout, out, qkv, qkv, lse, positions, whole_sequences(shape), Accumulate::no,
                           b.stream);
        for (int order = 0; order < 4; ++order) {
          auto blocks = pairs;
          if (order % 2 == 1) std::reverse(blocks.begin(), blocks.end());
          if (order >= 2) std::shuffle(blocks.begin(), blocks.end(), b.random);
          const Tensor merged = b.poisoned(d, out.shape), merged_lse = b.poisoned(stat, lse.shape),
                       sums = b.zeros(stat, dqkv.shape);
          const RunningAttention running{b.poisoned(stat, out.shape), b.poisoned(stat, lse.shape),
                                         b.poisoned(stat, lse.shape)};
          auto block = [&](int a, int c) {
            AttentionBlock part = whole_sequences(shape);
            part.queries = {shape.T, cuts[a], cuts[a + 1] - cuts[a]};
            part.keys = {shape.T, cuts[c], cuts[c + 1] - cuts[c]};
            part.offset = cuts[a] - cuts[c];
            part.all_keys = false;
            return part;
          };
          attention_begin(running, b.stream);
          for (const auto& [a, c] : blocks) attention_merge(running, qkv, qkv, positions, block(a, c), b.stream);
          attention_finish(merged, merged_lse, running, b.stream);
          for (const auto& [a, c] : blocks)
            attention_backward(sums, sums, dout, merged, qkv, qkv, merged_lse, positions, block(a, c), Accumulate::yes,
                               b.stream);
          b.stream.synchronize();
          auto distance = [&](const Tensor& found, const Tensor& expected) {
            const Tensor x = b.as(DType::fp64, found), y = b.as(DType::fp64, expected);
            return relative_distance(x.data<double>(), y.data<double>(), x.numel());
          };
          // Gradients of blocks read the lse, whose rounding is an error of all probabilities of a row, and out, which
          // is rounded to bf16.
          const bool large = size > 1;
          INFO(name_of(d) << ", scores " << (large ? "large" : "small") << ", order " << order << ": "
                          << distance(merged, out) << ", lse " << distance(merged_lse, lse) << ", gradients "
                          << distance(sums, dqkv));
          REQUIRE(distance(merged, out) < (d == DType::fp64 ? 1e-13 : d == DType::fp32 ? 1e-6 : 0x1p-8));
          REQUIRE(distance(merged_lse, lse) < (d == DType::fp64 ? 1e-13 : 1e-6));
          REQUIRE(distance(sums, dqkv) < (d == DType::fp64 ? 1e-12 : d == DType::fp32 ? large ? 2e-5 : 1e-6 : 0x1p-7));
        }
      }
}

TEST_CASE("where one key has all of the probability, the gradients of a block's scores cancel", "[ops][attention]") {
  for (const DType d : {DType::fp32, DType::bf16}) {
    const AttentionShape shape{.B = 1, .T = 40, .Hq = 2, .Hkv = 1, .D = 24};
    Bench b;
    // Key 0 scores 0; the others, at least 200 less.
    const Tensor wide_q = b.normal({40, 48}), wide_kv = b.normal({40, 48});
    for (int64_t i = 0; i < wide_q.numel(); ++i) wide_q.data<double>()[i] = 10;
    for (int64_t t = 0; t < 40; ++t)
      for (int64_t i = 0; i < 24; ++i) wide_kv.data<double>()[t * 48 + i] = t == 0 ? 0 : -10;
    const Tensor q = b.as(d, wide_q), kv = b.as(d, wide_kv), dout = b.as(d, b.normal({40, 48})),
                 out = b.poisoned(d, {40, 48}), lse = b.poisoned(DType::fp32, {1, 2, 40}),
                 dq = b.zeros(DType::fp32, {40, 48}), dkv = b.zeros(DType::fp32, {40, 48});
    AttentionBlock block = whole_sequences(shape);
    attention_forward(out, lse, q, kv, {}, block, b.stream);
    block.all_keys = false;
    attention_backward(dq, dkv, dout, out, q, kv, lse, {}, block, Accumulate::yes, b.stream);
    b.stream.synchronize();
    // The gradient of key 0's score, in each row, is the difference of two sums of the same 24 products, dout and value
    // 0, in two orders: each is off by at most 24 roundings of the sum of their magnitudes. Key 0 gets it times the
    // query, 10, and the scale; the queries times key 0, which is 0; and what is left of the other keys' probabilities
    // is exp(-87).
    const Tensor rounded_dout = b.as(DType::fp64, dout), rounded_kv = b.as(DType::fp64, kv);
    double products = 0;
    for (int64_t i = 0; i < 40 * 48; ++i)
      products += std::abs(rounded_dout.data<double>()[i] * rounded_kv.data<double>()[24 + i % 24]);
    const double rounding = 2 * 24 * 0x1p-24 * products * 10 / std::sqrt(24.0);
    for (int64_t t = 0; t < 40; ++t)
      for (int64_t i = 0; i < 48; ++i) {
        REQUIRE(std::abs(dq.data<float>()[t * 48 + i]) < 1e-30f);
        if (t > 0 || i < 24) REQUIRE(std::abs(dkv.data<float>()[t * 48 + i]) < (t == 0 ? rounding : 1e-30));
      }
  }
}

TEST_CASE("a block books the flops of its pairs, and nothing if it has none", "[ops][attention]") {
  for (int64_t rows = 1; rows < 7; ++rows)
    for (int64_t keys = 1; keys < 7; ++keys)
      for (int64_t offset = -9; offset < 10; ++offset) {
        const AttentionBlock block{1, 1, 1, 1, {9, 1, rows}, {9, 2, keys}, offset};
        int64_t count = 0;
        for (int64_t i = 0; i < rows; ++i)
          for (int64_t j = 0; j < keys; ++j) count += sees(block, {}, 0, i, j);
        INFO(rows << " rows, " << keys << " keys, offset " << offset);
        REQUIRE(block.pairs() == count);
      }
  REQUIRE(whole_sequences({2, 10, 4, 2, 8}).pairs() == 55);
  REQUIRE(continuation({1, 3, 4, 2, 8}, 7, 20).pairs() == 8 + 9 + 10);

  const Device device{DeviceKind::null, 2};
  Arena arena(device), scratch(device);
  Stream stream(device, scratch);
  OpLedger ledger;
  stream.set_ledger(&ledger);
  auto tensor = [&](const Shape& s) { return arena.alloc("test", "test", DType::fp32, s); };
  const Tensor q = tensor({20, 16}), kv = tensor({20, 16}), lse = tensor({2, 4, 10});
  const RunningAttention running{q, lse, lse};
  AttentionBlock block{2, 4, 2, 4, {10, 5, 5}, {10, 0, 5}, 5, false};
  attention_merge(running, q, kv, {}, block, stream);
  attention_backward(q, kv, q, q, q, kv, lse, {}, block, Accumulate::yes, stream);
  const double flops = 4.0 * 2 * 4 * 25 * 4;  // two products, sequences, heads, pairs, channels
  REQUIRE(ledger.at("attention_merge").flops == flops);
  REQUIRE(ledger.at("attention_backward").flops == 2.5 * flops);
  block.offset = -5;
  attention_merge(running, q, kv, {}, block, stream);
  attention_backward(q, kv, q, q, q, kv, lse, {}, block, Accumulate::yes, stream);
  REQUIRE(ledger.at("attention_merge").calls == 1);
  REQUIRE(ledger.at("attention_backward").calls == 1);
}

TEST_CASE("a block that attention cannot compute is refused", "[ops][attention]") {
  Bench b;
  const Tensor q = b.zeros(DType::fp32, {8, 6}), kv = b.zeros(DType::fp32, {10, 12}),
               lse = b.zeros(DType::fp32, {1, 2, 8});
  auto forward = [&](const AttentionBlock& block) { attention_forward(q, lse, q, kv, {}, block, b.stream); };
  REQUIRE_ERROR(forward({1, 2, 2, 3, {8, 4, 5}, {10, 0, 10}, 2}), "attention_forward: rows 4 to 9 of 8");
  REQUIRE_ERROR(forward({1, 2, 2, 3, {8, 0, 8}, {10, 3, 0}, 2}), "attention_forward: rows 3 to 3 of 10");
  REQUIRE_ERROR(forward({1, 2, 2, 3, {8, 0, 8}, {10, 0, 10}, -1}), "every row must see a key");
  REQUIRE_ERROR(forward({1, 2, 2, 3, {8, 0, 8}, {10, 0, 10}, 2, false}), "every row must see a key");
  REQUIRE_ERROR(forward({1, 2, 2, 4, {8, 0, 8}, {10, 0, 10}, 2}), "attention_forward: q");
}

TEST_CASE("attention of blocks is bitwise the same with 1, 2 and 3 threads", "[ops][attention]") {
  for (const DType d : {DType::fp32, DType::bf16})
    for (const int64_t rows : {50, 2}) {
      std::vector<std::string> results;
      for (int threads = 1; threads <= 3; ++threads) {
        Bench b(threads);
        const AttentionBlock block{2, 4, 2, 9, {rows + 3, 2, rows}, {75, 3, 70}, 30, false};
        const Tensor q = b.as(d, b.normal({2 * (rows + 3), 36})), kv = b.as(d, b.normal({150, 36})),
                     dout = b.as(d, b.normal(q.shape)), out = b.zeros(d, q.shape), dq = b.zeros(DType::fp32, q.shape),
                     dkv = b.zeros(DType::fp32, kv.shape);
        const Shape stats{2, 4, rows + 3};
        const RunningAttention running{b.poisoned(DType::fp32, q.shape), b.poisoned(DType::fp32, stats),
                                       b.poisoned(DType::fp32, stats)};
        const Tensor lse = b.poisoned(DType::fp32, stats);
        attention_begin(running, b.stream);
        attention_merge(running, q, kv, {}, block, b.stream);
        attention_finish(out, lse, running, b.stream);
        attention_backward(dq, dkv, dout, out, q, kv, lse, {}, block, Accumulate::yes, b.stream);
        b.stream.synchronize();
        results.push_back(bits_of(running.sums) + bits_of(lse) + bits_of(dq) + bits_of(dkv));
      }
      REQUIRE(results[0] == results[1]);
      REQUIRE(results[0] == results[2]);
    }
}
