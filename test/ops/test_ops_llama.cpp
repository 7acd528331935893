// The ops that Llama and Qwen add to GPT-2's: finite differences in double, PyTorch in fp32 and bf16, and the key-value
// cache against whole sequences.
#include "ops/op_bench.h"

using namespace llmc;

TEST_CASE("rmsnorm: finite differences; dx overwrites or adds as requested, weights always add", "[ops]") {
  Bench b;
  const Shape NC{7, 5};
  const Tensor x = b.normal(NC), w = b.normal({5}), dout = b.normal(NC), out = b.poisoned(DType::fp64, NC),
               rstd = b.poisoned(DType::fp64, {7}), dx = b.poisoned(DType::fp64, NC), dw = b.zeros(DType::fp64, {5});
  auto value = [&] {
    rmsnorm_forward(out, rstd, x, w, 1e-3f, b.stream);
    b.stream.synchronize();
    return dot(out, dout);
  };
  value();
  rmsnorm_backward(dx, dw, dout, x, w, rstd, Accumulate::no, b.stream);
  b.stream.synchronize();
  require_gradient(x, dx, value);
  require_gradient(w, dw, value);
  value();
  rmsnorm_backward(dx, dw, dout, x, w, rstd, Accumulate::yes, b.stream);
  scale(dx, 0.5f, b.stream);
  scale(dw, 0.5f, b.stream);
  b.stream.synchronize();
  require_gradient(x, dx, value);
  require_gradient(w, dw, value);
}

TEST_CASE("a residual addition fused with a norm, and a query-key norm with the rotation, have the bits of the two ops",
          "[ops]") {
  for (const DType d : {DType::fp64, DType::fp32, DType::bf16}) {
    INFO(name_of(d));
    const DType stat = accumulator_of(d);
    Bench b;
    auto random = [&](const Shape& shape) { return b.as(d, b.normal(shape)); };
    std::map<std::string, std::vector<std::string>> bits;  // of the two ops, then fused
    auto keep = [&](const char* name, const Tensor& t) {
      b.stream.synchronize();
      bits[name].push_back(bits_of(t));
    };
    const Shape NC{7, 37};
    const Tensor x = random(NC), y = random(NC), w = random({37}), bias = random({37});
    const AttentionShape s{.B = 2, .T = 3, .Hq = 4, .Hkv = 2, .D = 70};
    const Shape heads{6, 8 * s.D};
    const Tensor qkv = random(heads), dheads = random(heads), qw = random({s.D}), kw = random({s.D});
    const RotaryPositions rotary = {b.poisoned(stat, {9, s.D}), b.integers({0, 1, 2, 0, 8, 3})};
    rotary_table(rotary.table, {.theta = 100}, b.stream);
    for (const bool fused : {false, true}) {
      const Tensor sum = b.poisoned(d, NC), out = b.poisoned(d, NC), mean = b.poisoned(stat, {7}),
                   rstd = b.poisoned(stat, {7});
      if (fused) {
        residual_rmsnorm_forward(out, rstd, sum, x, y, w, 1e-5f, b.stream);
      } else {
        residual_forward(sum, x, y, b.stream);
        rmsnorm_forward(out, rstd, sum, w, 1e-5f, b.stream);
      }
      keep("sum", sum), keep("rmsnorm", out), keep("rmsnorm's rstd", rstd);
      const Tensor again = b.poisoned(d, NC);
      if (fused) {
        residual_layernorm_forward(out, mean, rstd, again, x, y, w, bias, 1e-5f, b.stream);
      } else {
        residual_forward(again, x, y, b.stream);
        layernorm_forward(out, mean, rstd, again, w, bias, 1e-5f, b.stream);
      }
      keep("layernorm's sum", again), keep("layernorm", out), keep("mean", mean), keep("layernorm's rstd", rstd);

      const Tensor turned = b.poisoned(d, heads), heads_rstd = b.poisoned(stat, {6, 6}), dqkv = b.poisoned(d, heads),
                   dqw = b.zeros(stat, {s.D}), dkw = b.zeros(stat, {s.D});
      const std::optional<RotaryPositions> inside = fused ? std::optional(rotary) : std::nullopt;
      copy(dqkv, dheads, b.stream);
      qk_norm_forward(turned, heads_rstd, qkv, qw, kw, inside, 1e-5f, s, b.stream);
      if (!fused) rotary_embedding(turned, rotary, s, Turn::forward, b.stream);
      if (!fused) rotary_embedding(dqkv, rotary, s, Turn::backward, b.stream);
      qk_norm_backward(dqkv, dqw, dkw, qkv, qw, kw, heads_rstd, inside, s, b.stream);
      keep("heads", turned), keep("heads' rstd", heads_rstd), keep("dqkv", dqkv), keep("dqw", dqw), keep("dkw", dkw);
    }
    for (const auto& [name, two] : bits) {
      INFO(name);
      REQUIRE(two[0] == two[1]);
    }
  }
}

TEST_CASE("SwiGLU: finite differences", "[ops]") {
  Bench b;
  const Tensor x = b.normal({4, 10}, 3), dout = b.normal({4, 5}), out = b.poisoned(DType::fp64, {4, 5}),
               dx = b.poisoned(DType::fp64, {4, 10});
  swiglu_backward(dx, dout, x, b.stream);
  b.stream.synchronize();
  require_gradient(x, dx, [&] {
    swiglu_forward(out, x, b.stream);
    b.stream.synchronize();
    return dot(out, dout);
  });
}

TEST_CASE("query-key norm and rotary positions: finite differences; values are unchanged", "[ops]") {
  const AttentionShape s{.B = 2, .T = 3, .Hq = 4, .Hkv = 2, .D = 6};
  const int64_t N = s.B * s.T, width = (s.Hq + 2 * s.Hkv) * s.D;
  Bench b;
  const Tensor qkv = b.normal({N, width}), qw = b.normal({s.D}), kw = b.normal({s.D}), dout = b.normal({N, width});
  const Tensor out = b.poisoned(DType::fp64, {N, width}), rstd = b.poisoned(DType::fp64, {N, s.Hq + s.Hkv}),
               table = b.poisoned(DType::fp64, {9, s.D});
  const RotaryPositions rotary = {table, b.integers({0, 1, 2, 0, 8, 3})};
  rotary_table(table, {.theta = 100}, b.stream);
  auto value = [&] {
    qk_norm_forward(out, rstd, qkv, qw, kw, rotary, 1e-3f, s, b.stream);
    b.stream.synchronize();
    return dot(out, dout);
  };
  value();
  for (int64_t n = 0; n < N; ++n)
    for (int64_t i = (s.Hq + s.Hkv) * s.D; i < width; ++i)
      REQUIRE(out.data<double>()[n * width + i] == qkv.data<double>()[n * width + i]);
  const Tensor dqkv = b.poisoned(DType::fp64, {N, width}), dqw = b.zeros(DType::fp64, {s.D}),
               dkw = b.zeros(DType::fp64, {s.D});
  copy(dqkv, dout, b.stream);
  qk_norm_backward(dqkv, dqw, dkw, qkv, qw, kw, rstd, rotary, s, b.stream);
  b.stream.synchronize();
  require_gradient(qkv, dqkv, value);
  require_gradient(qw, dqw, value);
  require_gradient(kw, dkw, value);
}

TEST_CASE("attention separates documents: finite differences, and each document is as if alone", "[ops]") {
  for (const auto& lengths : {std::vector<int64_t>{5, 1, 9}, {33, 40, 2}, {64, 11}}) {
    int64_t T = 0;
    std::vector<int32_t> places;
    for (const int64_t n : lengths) {
      T += n;
      for (int32_t p = 0; p < n; ++p) places.push_back(p);
    }
    const AttentionShape s{.B = 1, .T = T, .Hq = 2, .Hkv = 1, .D = 3};
    Bench b;
    const Tensor qkv = b.normal({T, 12}), dout = b.normal({T, 6}), out = b.poisoned(DType::fp64, {T, 6}),
                 lse = b.poisoned(DType::fp64, {1, 2, T}), dqkv = b.poisoned(DType::fp64, {T, 12}),
                 positions = b.integers(places);
    auto value = [&] {
      attention_forward(out, lse, qkv, qkv, positions, whole_sequences(s), b.stream);
      b.stream.synchronize();
      return dot(out, dout);
    };
    value();
    attention_backward(dqkv, dqkv, dout, out, qkv, qkv, lse, positions, whole_sequences(s), Accumulate::no, b.stream);
    b.stream.synchronize();
    require_gradient(qkv, dqkv, value);
    value();
    int64_t begin = 0;
    for (const int64_t n : lengths) {
      const AttentionShape alone{.B = 1, .T = n, .Hq = 2, .Hkv = 1, .D = 3};
      const Tensor rows = qkv.slice(begin * 12, {n, 12}), one = b.poisoned(DType::fp64, {n, 6}),
                   its_lse = b.poisoned(DType::fp64, {1, 2, n});
      attention_forward(one, its_lse, rows, rows, {}, whole_sequences(alone), b.stream);
      b.stream.synchronize();
      REQUIRE(relative_distance(one.data<double>(), out.data<double>() + begin * 6, n * 6) < 1e-13);
      begin += n;
    }
  }
}

TEST_CASE("attention against a cache gives the rows of the whole sequence", "[ops]") {
  for (const DType d : {DType::fp64, DType::fp32, DType::bf16}) {
    const int64_t T = 21;
    const AttentionShape whole{.B = 1, .T = T, .Hq = 4, .Hkv = 2, .D = 6};
    Bench b;
    const Tensor qkv = b.as(d, b.normal({T, 48})), out = b.poisoned(d, {T, 24}), cached = b.poisoned(d, {T, 24}),
                 lse = b.poisoned(accumulator_of(d), {1, 4, T}), cache = b.poisoned(d, {T + 3, 24});
    attention_forward(out, lse, qkv, qkv, {}, whole_sequences(whole), b.stream);
    for (int64_t begin = 0, n; begin < T; begin += n) {
      n = std::min<int64_t>(begin + 1, T - begin);  // 1, 2, 4, 8 and the rest
      const AttentionShape part{.B = 1, .T = n, .Hq = 4, .Hkv = 2, .D = 6};
      const Tensor rows = qkv.slice(begin * 48, {n, 48});
      cache_append(cache, rows, begin, part, b.stream);
      attention_forward(cached.slice(begin * 24, {n, 24}), {}, rows, cache, {}, continuation(part, begin, T + 3),
                        b.stream);
    }
    const Tensor a = b.as(DType::fp64, out), c = b.as(DType::fp64, cached);
    INFO(name_of(d));
    REQUIRE(relative_distance(c.data<double>(), a.data<double>(), T * 24) < (d == DType::fp64   ? 1e-14
                                                                             : d == DType::fp32 ? 1e-6
                                                                                                : 0x1p-8));
  }
}

TEST_CASE("Llama's and Qwen's ops agree with PyTorch, in fp32 and in bf16", "[ops]") {
  for (const DType d : {DType::fp32, DType::bf16}) {
    const Golden golden(d);
    Bench b;
    auto in = [&](const std::string& name, const Shape& shape) { return golden.load(b, name, d, shape); };
    for (const auto& [op, accumulate] :
         {std::pair<std::string, Accumulate>{"rmsnorm.", Accumulate::no}, {"residual_rmsnorm.", Accumulate::yes}}) {
      const Tensor x = in(op + "x", {7, 36}), w = in(op + "weight", {36}), dout = in(op + "dout", {7, 36}),
                   dx = in(op + "dout", {7, 36}), out = b.poisoned(d, {7, 36}), rstd = b.poisoned(DType::fp32, {7}),
                   dw = b.zeros(DType::fp32, {36});
      rmsnorm_forward(out, rstd, x, w, 1e-5f, b.stream);
      rmsnorm_backward(dx, dw, dout, x, w, rstd, accumulate, b.stream);
      if (accumulate == Accumulate::no) golden.require(b, out, op + "out");
      golden.require(b, dx, op + "dx");
      golden.require(b, dw, op + "dweight");
    }
    {
      const Tensor x = in("swiglu.gate_up", {7, 36}), out = b.poisoned(d, {7, 18}), dx = b.poisoned(d, {7, 36});
      swiglu_forward(out, x, b.stream);
      swiglu_backward(dx, in("swiglu.dout", {7, 18}), x, b.stream);
      golden.require(b, out, "swiglu.out");
      golden.require(b, dx, "swiglu.dgate_up");
    }
    {
      const AttentionShape s{.B = 2, .T = 5, .Hq = 4, .Hkv = 2, .D = 12};
      const Tensor out = in("rotary.qkv", {10, 96}), dqkv = in("rotary.dout", {10, 96}),
                   table = b.poisoned(DType::fp32, {20, 12}), positions = golden.integers(b, "rotary.positions");
      rotary_table(table, {.theta = 500}, b.stream);
      rotary_embedding(out, {table, positions}, s, Turn::forward, b.stream);
      rotary_embedding(dqkv, {table, positions}, s, Turn::backward, b.stream);
      golden.require(b, out, "rotary.out");
      golden.require(b, dqkv, "rotary.dqkv");
    }
    {
      const AttentionShape s{.B = 1, .T = 7, .Hq = 4, .Hkv = 2, .D = 12};
      const Tensor qkv = in("qk_norm.qkv", {7, 96}), qw = in("qk_norm.q_weight", {12}),
                   kw = in("qk_norm.k_weight", {12}), dqkv = in("qk_norm.dout", {7, 96}), out = b.poisoned(d, {7, 96}),
                   rstd = b.poisoned(DType::fp32, {7, 6}), dqw = b.zeros(DType::fp32, {12}),
                   dkw = b.zeros(DType::fp32, {12});
      qk_norm_forward(out, rstd, qkv, qw, kw, {}, 1e-5f, s, b.stream);
      qk_norm_backward(dqkv, dqw, dkw, qkv, qw, kw, rstd, {}, s, b.stream);
      golden.require(b, out, "qk_norm.out");
      golden.require(b, dqkv, "qk_norm.dqkv");
      golden.require(b, dqw, "qk_norm.dq_weight");
      golden.require(b, dkw, "qk_norm.dk_weight");
    }
    {
      const std::string op = "document_attention.";
      const AttentionShape s{.B = 2, .T = 73, .Hq = 2, .Hkv = 1, .D = 8};
      const Tensor qkv = in(op + "qkv", {146, 32}), out = b.poisoned(d, {146, 16}), dqkv = b.poisoned(d, {146, 32}),
                   lse = b.poisoned(DType::fp32, {2, 2, 73}), positions = golden.integers(b, op + "positions");
      attention_forward(out, lse, qkv, qkv, positions, whole_sequences(s), b.stream);
      attention_backward(dqkv, dqkv, in(op + "dout", {146, 16}), out, qkv, qkv, lse, positions, whole_sequences(s),
                         Accumulate::no, b.stream);
      golden.require(b, out, op + "out", Rounding::inside_too);
      golden.require(b, dqkv, op + "dqkv", Rounding::inside_too);
    }
  }
}
