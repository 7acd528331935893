// The attention kernels on blocks of rows and keys, which together must give whole causal attention.
#include <algorithm>
#include <random>

#include "cuda/device_test.h"
#include "ops/cpu/attention.h"
#include "ops/cpu/attention_backward.h"
#include "ops/cuda/attention.cuh"

using namespace llmc;

namespace {

enum class Documents : uint8_t { no, yes };

// Whole sequences: inputs, and the CPU's results. Queries, and keys and values, are in tensors of their own, whose rows
// have `padding` more columns: NaN. With `padding` the heads of queries are the first columns, the others the last.
template <class T>
struct Whole {
  AttentionShape s;
  Documents documents = Documents::no;
  float size = 1;  // of queries, keys and values
  int64_t padding = 0;

  int64_t C = s.Hq * s.D, keys_C = s.Hkv * s.D, q_width = C + padding, kv_width = 2 * keys_C + padding;
  std::vector<T> q = padded(C, 0, 1, size), kv = padded(2 * keys_C, padding, 2, size),
                 dout = normal_values<T>(s.B * s.T * C, 3), out = std::vector<T>(dout.size());
  std::vector<int32_t> positions = document_positions();
  std::vector<float> lse = std::vector<float>(static_cast<size_t>(s.B * s.Hq * s.T)),
                     dq = std::vector<float>(static_cast<size_t>(s.B * s.T * C)),
                     dkv = std::vector<float>(static_cast<size_t>(s.B * s.T * 2 * keys_C));

  Whole(const AttentionShape& shape, Documents d, float size_, int64_t padding_)
      : s(shape), documents(d), size(size_), padding(padding_) {
    const AttentionBlock block = whole_sequences(s);
    const AttentionInputs<T> from = inputs(q.data(), kv.data(), positions.data());
    std::vector<std::byte> scratch(
        static_cast<size_t>(std::max(cpu::attention_forward_scratch(block, sizeof(float), 1),
                                     cpu::attention_backward_scratch(block, sizeof(float), 1))));
    cpu::attention_forward<T>({{out.data(), C}, lse.data()}, from, scratch.data(), block, 1);
    cpu::attention_backward<T>(sums(dq.data(), dkv.data(), C, 2 * keys_C), dout.data(), out.data(), lse.data(), from,
                               scratch.data(), block, 1);
  }
  std::vector<T> padded(int64_t columns, int64_t left, uint64_t seed, float scale) const {
    const std::vector<T> values = normal_values<T>(s.B * s.T * columns, seed, 0, scale);
    std::vector<T> rows(static_cast<size_t>(s.B * s.T * (columns + padding)), T(NAN));
    for (int64_t r = 0; r < s.B * s.T; ++r)
      std::copy_n(values.begin() + r * columns, columns, rows.begin() + r * (columns + padding) + left);
    return rows;
  }
  std::vector<int32_t> document_positions() const {
    std::vector<int32_t> places;
    for (int64_t b = 0; b < s.B; ++b)
      for (int64_t t = 0, begin = 0; t < s.T; ++t) {
        if ((t + 13 * b) % 41 == 29 || t == 5) begin = t;
        places.push_back(static_cast<int32_t>(t - begin));
      }
    return places;
  }
  AttentionInputs<T> inputs(const T* queries, const T* keys, const int32_t* places) const {
    return {{queries, q_width},
            {keys + padding, kv_width},
            {keys + padding + keys_C, kv_width},
            documents == Documents::yes ? places : nullptr};
  }
  AttentionGradients<T, float> sums(float* queries, float* keys, int64_t queries_width, int64_t keys_width) const {
    const int64_t left = keys_width - 2 * keys_C;
    return {.query_sums = {queries, queries_width},
            .key_sums = {keys + left, keys_width},
            .value_sums = {keys + left + keys_C, keys_width}};
  }
  // Rows [a, b) of the queries against keys [c, d).
  AttentionBlock block(int64_t a, int64_t b, int64_t c, int64_t d) const {
    return {.B = s.B,
            .Hq = s.Hq,
            .Hkv = s.Hkv,
            .D = s.D,
            .queries = {s.T, a, b - a},
            .keys = {s.T, c, d - c},
            .offset = a - c,
            .all_keys = false};
  }
};

// Every slice of the queries against every slice of the keys, in random order; the slices begin at random rows. Blocks
// that see nothing are among them.
template <class T>
std::vector<AttentionBlock> random_blocks(const Whole<T>& w, uint64_t seed) {
  std::mt19937_64 random(seed);
  const auto cuts = [&](int n) {
    std::vector<int64_t> at = {0, w.s.T};
    for (int i = 1; i < n; ++i) at.push_back(1 + static_cast<int64_t>(random() % static_cast<uint64_t>(w.s.T - 1)));
    std::sort(at.begin(), at.end());
    at.erase(std::unique(at.begin(), at.end()), at.end());
    return at;
  };
  const std::vector<int64_t> queries = cuts(3), keys = cuts(4);
  std::vector<AttentionBlock> blocks;
  for (size_t i = 1; i < queries.size(); ++i)
    for (size_t j = 1; j < keys.size(); ++j)
      blocks.push_back(w.block(queries[i - 1], queries[i], keys[j - 1], keys[j]));
  std::shuffle(blocks.begin(), blocks.end(), random);
  return blocks;
}

// The forward, from the blocks merged in their order; the backward, added to numbers that are there already, from the
// CPU's outputs.
template <class T>
Outputs merged(const Whole<T>& w, const std::vector<AttentionBlock>& blocks,
               cuda::TensorCores instructions = cuda::tensor_cores()) {
  DeviceArray<T> q(w.q), kv(w.kv), dout(w.dout), w_out(w.out), out(static_cast<int64_t>(w.out.size()));
  const std::vector<float> nothing(w.lse.size());
  DeviceArray<float> sums(std::vector<float>(w.out.size())), total(nothing), lse(static_cast<int64_t>(w.lse.size())),
      largest(std::vector<float>(w.lse.size(), -INFINITY)), w_lse(w.lse);
  DeviceArray<float> dq(std::vector<float>(w.q.size(), 3)), dkv(std::vector<float>(w.kv.size(), 5));
  DeviceArray<int32_t> positions(w.positions);
  const AttentionInputs<T> from = w.inputs(q, kv, positions);
  for (const AttentionBlock& block : blocks) {
    cuda::attention_forward<T>({{}, nullptr, {sums, w.C}, largest, total}, from, nullptr, block, nullptr, instructions);
    DeviceArray<float> scratch(cuda::attention_backward_scratch(block));
    cuda::attention_backward<T>(w.sums(dq, dkv, w.q_width, w.kv_width), dout, w_out, w_lse, from, scratch, block,
                                nullptr, instructions);
    CUDA_CHECK(cudaDeviceSynchronize());  // scratch goes
  }
  cuda::attention_finish<T>(out, lse, sums, largest, total, w.s.B, w.s.T, w.s.Hq, w.s.D, nullptr);
  // The heads of `columns` columns, less what was there; the others are left alone.
  const auto added = [&](const std::vector<float>& rows, int64_t columns, int64_t left, float before) {
    std::vector<float> values;
    for (size_t i = 0; i < rows.size(); ++i) {
      const int64_t column = static_cast<int64_t>(i) % (columns + w.padding) - left;
      if (column >= 0 && column < columns) values.push_back(rows[i] - before);
      else REQUIRE(rows[i] == before);
    }
    return values;
  };
  return {{"out", out.host()},
          {"lse", lse.host()},
          {"dq", added(dq.host(), w.C, 0, 3)},
          {"dkv", added(dkv.host(), 2 * w.keys_C, w.padding, 5)}};
}
template <class T>
Outputs expected(const Whole<T>& w) {
  return {{"out", w.out}, {"lse", w.lse}, {"dq", w.dq}, {"dkv", w.dkv}};
}

// In bf16 the tensor cores take rounded probabilities and gradients, unlike the CPU.
template <class T>
constexpr double tolerance = sizeof(T) == 2 ? 0x1p-7 : 4e-6;

// `rows` must be NaN, as allocated, everywhere but in the columns [left, left + columns) of the block's rows; returns
// those.
template <class T>
std::vector<float> of_block(const std::vector<T>& rows, int64_t B, const SequenceRows& r, int64_t width, int64_t left,
                            int64_t columns) {
  std::vector<float> values;
  for (size_t i = 0; i < rows.size(); ++i) {
    const int64_t row = static_cast<int64_t>(i) / width % r.length, column = static_cast<int64_t>(i) % width - left;
    if (row >= r.first && row < r.first + r.rows && column >= 0 && column < columns)
      values.push_back(static_cast<float>(rows[i]));
    else REQUIRE(std::isnan(static_cast<float>(rows[i])));
  }
  REQUIRE(values.size() == static_cast<size_t>(B * r.rows * columns));
  return values;
}

}  // namespace

TEMPLATE_TEST_CASE("attention by blocks, merged in any order, is whole attention", "[cuda]", float, bf16) {
  // Heads of whole packs and of elements; several tiles; one and several sequences; large scores.
  const auto [s, documents, size, padding] = GENERATE(table<AttentionShape, Documents, float, int64_t>({
      {{2, 20, 4, 2, 16}, Documents::no, 1.0f, 0},
      {{2, 70, 2, 1, 8}, Documents::yes, 1.0f, 8},
      {{1, 45, 2, 2, 7}, Documents::yes, 1.0f, 3},
      {{1, 150, 1, 1, 16}, Documents::no, 1.0f, 8},
      {{1, 140, 1, 1, 72}, Documents::yes, 1.0f, 4},
      {{1, 66, 1, 1, 64}, Documents::no, 12.0f, 0},
  }));
  INFO("B = " << s.B << ", T = " << s.T << ", Hq = " << s.Hq << ", Hkv = " << s.Hkv << ", D = " << s.D);
  const Whole<TestType> w(s, documents, size, padding);
  std::vector<cuda::TensorCores> all{cuda::tensor_cores()};
#ifndef __CUDACC__
  if (sizeof(TestType) == 2 && (s.T == 66 || s.T == 70)) all.push_back(cuda::TensorCores::of_warpgroup);
#endif
  for (const cuda::TensorCores instructions : all) {
    const Outputs got = merged(w, random_blocks(w, static_cast<uint64_t>(s.T)), instructions), wanted = expected(w);
    for (size_t i = 0; i < got.size(); ++i) {
      INFO(got[i].name);
      // With probabilities near 1 the gradients are small differences from sums over the rounded output.
      REQUIRE(relative_error(got[i].values, wanted[i].values) < (size > 1 ? 0x1p-6 : tolerance<TestType>));
    }
  }
}

TEMPLATE_TEST_CASE("attention by blocks has the same bits under every schedule", "[cuda]", float, bf16) {
  const Whole<TestType> w({1, 40, 2, 1, 16}, Documents::yes, 1, 0);
  check_kernel(
      [&] {
        return merged(w, {w.block(0, 40, 17, 40), w.block(0, 40, 0, 17)});
      },
      expected(w), tolerance<TestType>);
}

TEMPLATE_TEST_CASE("attention's rows that see no key of a block do not change", "[cuda]", float, bf16) {
  const Whole<TestType> w({1, 40, 1, 1, 16}, Documents::no, 1, 0);
  // Nothing was seen yet: the running sums stay those of nothing.
  DeviceArray<TestType> q(w.q), kv(w.kv);
  DeviceArray<float> sums(std::vector<float>(40 * 16, 7)), largest(std::vector<float>(40, -INFINITY)),
      total(std::vector<float>(40));
  cuda::attention_forward<TestType>({{}, nullptr, {sums, 16}, largest, total}, w.inputs(q, kv, nullptr), nullptr,
                                    w.block(0, 40, 30, 40), nullptr);
  const std::vector<float> s = sums.host(), l = largest.host(), t = total.host();
  for (size_t row = 0; row < 40; ++row) {
    REQUIRE((t[row] == 0) == (row < 30));
    REQUIRE((l[row] == -INFINITY) == (row < 30));
    if (row < 30) REQUIRE(std::all_of(s.begin() + row * 16, s.begin() + row * 16 + 16, [](float x) { return x == 7; }));
  }
}

TEMPLATE_TEST_CASE("attention passes NaN on to the running sums", "[cuda]", float, bf16) {
  Whole<TestType> w({1, 20, 1, 1, 16}, Documents::no, 1, 0);
  std::fill_n(w.q.begin() + 3 * 16, 16, TestType(NAN));
  const Outputs got = merged(w, {w.block(0, 20, 10, 20), w.block(0, 20, 0, 10)});
  for (size_t row = 0; row < 20; ++row) REQUIRE(std::isnan(got[1].values[row]) == (row == 3));
}

TEMPLATE_TEST_CASE("attention of a block writes its rows and no others", "[cuda]", float, bf16) {
  using T = TestType;
  struct Rows {
    SequenceRows queries, keys;
    int64_t offset, D;
    float size = 0;  // queries are near it, keys and values near -size, so that scores are near -size^2 sqrt(D)
  };
  // Rows that see all keys, and others that do not; few and many; keys that nobody sees; a scratch without
  // padding; all keys, one less than a tile, with scores whose exponentials are too small for a float: those of the
  // padding would be infinite.
  const Rows r = GENERATE(Rows{{50, 7, 40}, {60, 5, 33}, 3, 16}, Rows{{20, 1, 18}, {90, 11, 70}, 100, 7},
                          Rows{{17, 0, 17}, {80, 0, 77}, 60, 64}, Rows{{19, 3, 16}, {300, 20, 260}, 250, 16},
                          Rows{{30, 10, 17}, {60, 0, 60}, 0, 8}, Rows{{128, 0, 128}, {16, 0, 16}, 0, 8},
                          Rows{{20, 1, 18}, {70, 4, 63}, 100, 16, 6});
  const int64_t B = r.D == 16 && r.keys.length < 100 ? 2 : 1, Hq = 4, Hkv = 2, D = r.D, C = Hq * D, keys_C = Hkv * D;
  INFO("rows " << r.queries.rows << ", keys " << r.keys.rows << ", offset " << r.offset << ", D " << D);
  const AttentionBlock block = {
      .B = B, .Hq = Hq, .Hkv = Hkv, .D = D, .queries = r.queries, .keys = r.keys, .offset = r.offset};
  const auto q = normal_values<T>(B * r.queries.length * C, 1, r.size),
             kv = normal_values<T>(B * r.keys.length * 2 * keys_C, 2, -r.size),
             dout = normal_values<T>(B * r.queries.length * C, 3);
  std::vector<T> out(q.size()), dq(q.size()), dkv(kv.size());
  std::vector<float> lse(static_cast<size_t>(B * Hq * r.queries.length));
  const auto inputs = [&](const T* queries, const T* keys) -> AttentionInputs<T> {
    return {{queries, C}, {keys, 2 * keys_C}, {keys + keys_C, 2 * keys_C}, nullptr};
  };
  const auto gradients = [&](T* queries, T* keys) -> AttentionGradients<T, float> {
    return {{queries, C}, {keys, 2 * keys_C}, {keys + keys_C, 2 * keys_C}};
  };
  std::vector<std::byte> scratch(
      static_cast<size_t>(std::max(cpu::attention_forward_scratch(block, sizeof(float), 1),
                                   cpu::attention_backward_scratch(block, sizeof(float), 1))));
  cpu::attention_forward<T>({{out.data(), C}, lse.data()}, inputs(q.data(), kv.data()), scratch.data(), block, 1);
  cpu::attention_backward<T>(gradients(dq.data(), dkv.data()), dout.data(), out.data(), lse.data(),
                             inputs(q.data(), kv.data()), scratch.data(), block, 1);

  DeviceArray<T> qs(q), kvs(kv), douts(dout), cpu_out(out), new_out(B * r.queries.length * C),
      alone(B * r.queries.length * C), new_dq(B * r.queries.length * C), new_dkv(B * r.keys.length * 2 * keys_C);
  DeviceArray<float> cpu_lse(lse), new_lse(B * Hq * r.queries.length), forward(cuda::attention_forward_scratch(block)),
      backward(cuda::attention_backward_scratch(block));
  cuda::attention_forward<T>({{new_out, C}, new_lse}, inputs(qs, kvs), forward, block, nullptr);
  cuda::attention_forward<T>({{alone, C}}, inputs(qs, kvs), forward, block, nullptr);  // without log-sum-exps
  cuda::attention_backward<T>(gradients(new_dq, new_dkv), douts, cpu_out, cpu_lse, inputs(qs, kvs), backward, block,
                              nullptr);
  const auto close = [&](const char* name, const auto& got, const auto& wanted, const SequenceRows& rows,
                         int64_t width) {
    INFO(name);
    const int64_t sequences = static_cast<int64_t>(got.size()) / (rows.length * width);
    std::vector<float> reference;
    for (size_t i = 0; i < wanted.size(); ++i) {
      const int64_t row = static_cast<int64_t>(i) / width % rows.length;
      if (row >= rows.first && row < rows.first + rows.rows) reference.push_back(static_cast<float>(wanted[i]));
    }
    // Large scores have large rounding errors.
    REQUIRE(relative_error(of_block(got, sequences, rows, width, 0, width), reference) <
            (r.size > 0 ? 0x1p-6 : tolerance<T>));
  };
  close("out", new_out.host(), out, r.queries, C);
  close("out without lse", alone.host(), out, r.queries, C);
  close("lse", new_lse.host(), lse, r.queries, 1);
  close("dq", new_dq.host(), dq, r.queries, C);
  close("dkv", new_dkv.host(), dkv, r.keys, 2 * keys_C);
}

TEMPLATE_TEST_CASE("attention_finish divides by the totals", "[cuda]", float, bf16) {
  using T = TestType;
  const int64_t D = GENERATE(1, 6, 64), B = 2, length = 5, Hq = 3;
  const auto sums = normal_values<float>(B * length * Hq * D, 1),
             largest = normal_values<float>(B * Hq * length, 2, 0, 50);
  std::vector<float> total = normal_values<float>(B * Hq * length, 3), lse(total.size());
  for (float& x : total) x = 1 + std::abs(x);
  std::vector<T> out(sums.size());
  cpu::attention_finish<T>(out.data(), lse.data(), sums.data(), largest.data(), total.data(), B, length, Hq, D);
  const auto run = [&]() -> Outputs {
    DeviceArray<float> from(sums), most(largest), totals(total), lses(B * Hq * length);
    DeviceArray<T> outs(B * length * Hq * D);
    cuda::attention_finish<T>(outs, lses, from, most, totals, B, length, Hq, D, nullptr);
    return {{"out", outs.host()}, {"lse", lses.host()}};
  };
  check_kernel(run, {{"out", out}, {"lse", lse}}, 1e-6);
}
