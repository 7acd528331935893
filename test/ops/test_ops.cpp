// Every op: finite differences in double, and the op's contract.
#include "catch2.h"
#include "ops/op_bench.h"

using namespace llmc;

TEST_CASE("the exponential of every NaN is a NaN", "[ops]") {
  for (const uint32_t bits : {0xffffffffu, 0x7fffffffu, 0x7fc00000u, 0xffc00000u, 0xff800001u, 0x7f812345u})
    REQUIRE(std::isnan(cpu::exponential(std::bit_cast<float>(bits))));
}

TEST_CASE("embedding: finite differences", "[ops]") {
  Bench b;
  const Tensor tokens = b.integers({3, 0, 3, 6, 1}), positions = b.integers({0, 1, 2, 0, 1});
  const Tensor wte = b.normal({7, 5}), wpe = b.normal({3, 5}), dout = b.normal({5, 5}),
               out = b.poisoned(DType::fp64, {5, 5});
  const Tensor dwte = b.zeros(DType::fp64, {7, 5}), dwpe = b.zeros(DType::fp64, {3, 5});
  embedding_backward(dwte, dwpe, dout, tokens, positions, b.stream);
  b.stream.synchronize();
  auto value = [&] {
    embedding_forward(out, tokens, positions, wte, wpe, b.stream);
    b.stream.synchronize();
    return dot(out, dout);
  };
  require_gradient(wte, dwte, value);
  require_gradient(wpe, dwpe, value);
}

TEST_CASE("layernorm: finite differences; dx overwrites or adds as requested, weights always add", "[ops]") {
  Bench b;
  const Shape NC{7, 5};
  const Tensor x = b.normal(NC), w = b.normal({5}), bias = b.normal({5}), dout = b.normal(NC);
  const Tensor out = b.poisoned(DType::fp64, NC), mean = b.poisoned(DType::fp64, {7}),
               rstd = b.poisoned(DType::fp64, {7});
  const Tensor dx = b.poisoned(DType::fp64, NC), dw = b.zeros(DType::fp64, {5}), db = b.zeros(DType::fp64, {5});
  auto value = [&] {
    layernorm_forward(out, mean, rstd, x, w, bias, 1e-5f, b.stream);
    b.stream.synchronize();
    return dot(out, dout);
  };
  value();
  layernorm_backward(dx, dw, db, dout, x, w, mean, rstd, Accumulate::no, b.stream);
  b.stream.synchronize();
  require_gradient(x, dx, value);
  require_gradient(w, dw, value);
  require_gradient(bias, db, value);
  const std::vector<double> once(dx.data<double>(), dx.data<double>() + dx.numel());
  const double dw0 = dw.data<double>()[0];
  value();
  layernorm_backward(dx, dw, db, dout, x, w, mean, rstd, Accumulate::yes, b.stream);
  b.stream.synchronize();
  for (size_t i = 0; i < once.size(); ++i) REQUIRE(std::abs(dx.data<double>()[i] - 2 * once[i]) < 1e-12);
  REQUIRE(std::abs(dw.data<double>()[0] - 2 * dw0) < 1e-12);
}

TEST_CASE("linear: finite differences; weight and bias gradients add", "[ops]") {
  Bench b;
  const Tensor x = b.normal({7, 5}), w = b.normal({9, 5}), bias = b.normal({9}), dout = b.normal({7, 9});
  const Tensor out = b.poisoned(DType::fp64, {7, 9}), dx = b.poisoned(DType::fp64, {7, 5});
  const Tensor dw = b.poisoned(DType::fp64, {9, 5}), db = b.zeros(DType::fp64, {9});
  auto value = [&] {
    linear_forward(out, x, w, bias, b.stream);
    b.stream.synchronize();
    return dot(out, dout);
  };
  linear_backward_input(dx, dout, w, b.stream);
  linear_backward_weight(dw, db, dout, x, Accumulate::no, b.stream);
  b.stream.synchronize();
  require_gradient(x, dx, value);
  require_gradient(w, dw, value);
  require_gradient(bias, db, value);
  const double before = dw.data<double>()[3];
  linear_backward_weight(dw, {}, dout, x, Accumulate::yes, b.stream);
  b.stream.synchronize();
  REQUIRE(std::abs(dw.data<double>()[3] - 2 * before) < 1e-12);
}

TEST_CASE("gelu: finite differences; the gradient may be computed in place", "[ops]") {
  Bench b;
  const Tensor x = b.normal({7, 5}, 3), dout = b.normal({7, 5}), out = b.poisoned(DType::fp64, {7, 5}),
               dx = b.poisoned(DType::fp64, {7, 5});
  gelu_backward(dx, dout, x, b.stream);
  b.stream.synchronize();
  require_gradient(x, dx, [&] {
    gelu_forward(out, x, b.stream);
    b.stream.synchronize();
    return dot(out, dout);
  });
  gelu_backward(dout, dout, x, b.stream);
  b.stream.synchronize();
  REQUIRE(relative_distance(dout.data<double>(), dx.data<double>(), dx.numel()) == 0);
}

TEST_CASE("gelu with the gradient of the bias before it has the bits of the two ops", "[ops]") {
  Bench b;
  const Tensor x = b.normal({40, 12}, 3), dout = b.normal({40, 12}), dx = b.poisoned(DType::fp64, {40, 12}),
               dbias = b.zeros(DType::fp64, {12}), summed = b.zeros(DType::fp64, {12});
  gelu_backward(dx, dout, x, b.stream);
  for (int micro_batch = 0; micro_batch < 2; ++micro_batch) linear_backward_bias(dbias, dx, b.stream);
  const Tensor again = b.poisoned(DType::fp64, {40, 12});
  gelu_backward_with_bias(again, summed, dout, x, b.stream);
  gelu_backward_with_bias(dout, summed, dout, x, b.stream);  // in place
  b.stream.synchronize();
  for (const Tensor& t : {again, dout})
    REQUIRE(relative_distance(t.data<double>(), dx.data<double>(), dx.numel()) == 0);
  REQUIRE(relative_distance(summed.data<double>(), dbias.data<double>(), 12) == 0);
}

TEST_CASE("attention: finite differences, plain and grouped heads, sequences around the block size", "[ops]") {
  for (const AttentionShape s : {AttentionShape{2, 13, 3, 3, 5}, AttentionShape{1, 7, 4, 2, 3},
                                 AttentionShape{1, 1, 1, 1, 2}, AttentionShape{1, 33, 2, 1, 3}}) {
    Bench b;
    const int64_t N = s.B * s.T, width = (s.Hq + 2 * s.Hkv) * s.D;
    const Tensor qkv = b.normal({N, width}), dout = b.normal({N, s.Hq * s.D}),
                 out = b.poisoned(DType::fp64, dout.shape);
    const Tensor lse = b.poisoned(DType::fp64, {s.B, s.Hq, s.T}), dqkv = b.poisoned(DType::fp64, qkv.shape);
    auto value = [&] {
      attention_forward(out, lse, qkv, qkv, {}, whole_sequences(s), b.stream);
      b.stream.synchronize();
      return dot(out, dout);
    };
    value();
    attention_backward(dqkv, dqkv, dout, out, qkv, qkv, lse, {}, whole_sequences(s), Accumulate::no, b.stream);
    b.stream.synchronize();
    require_gradient(qkv, dqkv, value);
  }
}

TEST_CASE("attention: fp32 gradients are exact up to rounding where large scores saturate the softmax", "[ops]") {
  const AttentionShape s{1, 70, 2, 1, 16};
  const int64_t width = (s.Hq + 2 * s.Hkv) * s.D, queries_and_keys = (s.Hq + s.Hkv) * s.D;
  Bench b;
  // Whole numbers, and a scale of 1/4: the scores, of up to 70 or so, are exact in fp32.
  const Tensor exact = b.normal({s.T, width});
  for (int64_t i = 0; i < exact.numel(); ++i)
    if (double& x = exact.data<double>()[i]; i % width < queries_and_keys) x = std::round(4 * x);
  const Tensor some = b.normal({s.T, s.Hq * s.D}), narrow = b.as(DType::fp32, exact), dout = b.as(DType::fp32, some);
  auto gradient = [&](DType d) {
    const Tensor qkv = b.as(d, narrow), g = b.as(d, dout), out = b.poisoned(d, g.shape),
                 lse = b.poisoned(d, {s.B, s.Hq, s.T}), dqkv = b.poisoned(d, qkv.shape);
    attention_forward(out, lse, qkv, qkv, {}, whole_sequences(s), b.stream);
    attention_backward(dqkv, dqkv, g, out, qkv, qkv, lse, {}, whole_sequences(s), Accumulate::no, b.stream);
    b.stream.synchronize();
    double largest = 0;
    for (int64_t i = 0; i < lse.numel(); ++i)
      largest = std::max(largest, d == DType::fp32 ? lse.data<float>()[i] : lse.data<double>()[i]);
    REQUIRE(largest > 60);
    return b.as(DType::fp64, dqkv);
  };
  const Tensor ours = gradient(DType::fp32), reference = gradient(DType::fp64);
  // In half units of the last place, 2^-24: dV sees the rounding of the exponential and of a product, and that of the
  // lse of its row, of up to 64 of them, in all p; dQ and dK also that of the 16 products of each dP, and of the mean,
  // with which it largely cancels.
  struct Columns {
    int64_t first, last;
    double bound;
  };
  for (const auto [first, last, bound] :
       {Columns{0, s.Hq * s.D, 76}, Columns{s.Hq * s.D, queries_and_keys, 76}, Columns{queries_and_keys, width, 68}}) {
    double error = 0, size = 0;
    for (int64_t t = 0; t < s.T; ++t)
      for (int64_t i = t * width + first; i < t * width + last; ++i) {
        const double exactly = reference.data<double>()[i];
        error += std::pow(ours.data<double>()[i] - exactly, 2);
        size += std::pow(exactly, 2);
      }
    INFO("columns " << first << " to " << last << ": " << std::sqrt(error / size) * std::pow(2, 24));
    REQUIRE(std::sqrt(error / size) < bound * std::pow(2, -24));
  }
}

TEST_CASE("cross-entropy, with and without z-loss: finite differences; padding columns become zero and have no effect",
          "[ops]") {
  Bench b;
  const double coefficient = GENERATE(0.0, 0.3);
  constexpr int64_t N = 6, V = 9, padded = 16;
  const Tensor targets = b.integers({0, 8, 3, 3, 5, 1});
  const Tensor original = b.normal({N, padded}, 2), logits = b.poisoned(DType::fp64, {N, padded}),
               losses = b.poisoned(DType::fp64, {N});
  const HeadZLoss z{coefficient, b.poisoned(DType::fp64, {N})};
  for (int64_t n = 0; n < N; ++n)  // arbitrary values in the padding
    for (int64_t v = V; v < padded; ++v) original.data<double>()[n * padded + v] = 1e30;
  auto value = [&] {
    copy(logits, original, b.stream);
    cross_entropy(losses, logits, targets, V, 0.25, Gradient::no, b.stream, z);
    b.stream.synchronize();
    double sum = 0;
    for (int64_t n = 0; n < N; ++n)
      sum += 0.25 * (losses.data<double>()[n] + coefficient * z.squares.data<double>()[n]);
    return sum;
  };
  value();
  REQUIRE(relative_distance(logits.data<double>(), original.data<double>(), N * padded) ==
          0);                        // untouched without Gradient::yes
  for (int64_t n = 0; n < N; ++n) {  // whatever the coefficient, the reported loss and (log Z)^2 are the same
    double sum = 0;
    for (int64_t v = 0; v < V; ++v) sum += std::exp(original.data<double>()[n * padded + v]);
    REQUIRE(std::abs(z.squares.data<double>()[n] - std::pow(std::log(sum), 2)) < 1e-12);
    const double at_target = original.data<double>()[n * padded + targets.data<int32_t>()[n]];
    REQUIRE(std::abs(losses.data<double>()[n] - (std::log(sum) - at_target)) < 1e-12);
  }
  cross_entropy(losses, logits, targets, V, 0.25, Gradient::yes, b.stream, z);
  b.stream.synchronize();
  const Tensor gradient = b.poisoned(DType::fp64, {N, padded});
  copy(gradient, logits, b.stream);
  b.stream.synchronize();
  for (int64_t n = 0; n < N; ++n)
    for (int64_t v = V; v < padded; ++v) REQUIRE(gradient.data<double>()[n * padded + v] == 0);
  for (int64_t n = 0; n < N; ++n)
    for (int64_t v = V; v < padded; ++v) original.data<double>()[n * padded + v] = 0;
  require_gradient(original, gradient, value);
}

TEST_CASE("a control that forbids the update changes nothing", "[ops]") {
  Bench b;
  const Tensor w = b.as(DType::fp32, b.normal({50})), m = b.zeros(DType::fp32, {50}), v = b.zeros(DType::fp32, {50});
  const Tensor g = b.as(DType::fp32, b.normal({50})), control = b.zeros(DType::fp64, {4});
  const std::vector<float> before(w.data<float>(), w.data<float>() + 50);
  update_weights(Optimizer::adamw, w, {}, {m, v}, g, control,
                 {.lr = 1, .beta1 = 0.9f, .beta2 = 0.9f, .eps = 1e-8f, .weight_decay = 1, .step = 1}, b.stream);
  b.stream.synchronize();
  REQUIRE(std::memcmp(before.data(), w.bytes, 200) == 0);
  REQUIRE(m.data<float>()[7] == 0);
}

TEST_CASE("a segment in parts is updated as the whole is, by every optimizer", "[ops]") {
  Bench b;
  constexpr int64_t n = 2501;
  constexpr int64_t cuts[] = {0, 1, 64, 130, 1155, 1200, 2480, n};
  const Tensor control = b.zeros(DType::fp64, {4}), from = b.as(DType::fp32, b.normal({n})),
               g = b.as(DType::fp32, b.normal({n}));
  control.data<double>()[1] = 0.7, control.data<double>()[2] = 1;
  for (const Optimizer optimizer : {Optimizer::adamw, Optimizer::sgd, Optimizer::lion, Optimizer::muon})
    for (const DType d : {DType::fp32, DType::bf16}) {
      const auto scope = b.arena.scope();
      const size_t slots = rule_of(optimizer).of_matrices ? 0 : rule_of(optimizer).slots.size();
      const auto updated = [&](std::span<const int64_t> at) {
        std::array state = {b.as(d, from), b.as(DType::fp32, from), b.zeros(DType::fp32, {n}),
                            b.zeros(DType::fp32, {n})};  // weights, masters, slots
        for (int64_t step = 1; step <= 3; ++step)
          for (size_t i = 0; i + 1 < at.size(); ++i) {
            const auto part = [&](size_t s) { return state[s].slice(at[i], {at[i + 1] - at[i]}); };
            update_weights(optimizer, part(0), d == DType::fp32 ? Tensor{} : part(1),
                           {slots > 0 ? part(2) : Tensor{}, slots > 1 ? part(3) : Tensor{}},
                           g.slice(at[i], {at[i + 1] - at[i]}), control,
                           {.lr = 1e-2f, .beta1 = 0.9f, .beta2 = 0.95f, .eps = 1e-8f, .weight_decay = 1, .step = step},
                           b.stream);
          }
        b.stream.synchronize();
        std::string bits;
        for (const Tensor& s : state) bits += bits_of(s);
        return bits;
      };
      INFO(rule_of(optimizer).title << ", " << name_of(d));
      REQUIRE(updated(cuts) == updated(std::array{int64_t{0}, n}));
    }
}

TEST_CASE("averages follow weights unless the update is forbidden, and change places with them", "[ops]") {
  Bench b;
  for (const DType d : {DType::fp32, DType::fp64}) {
    const Tensor weight = b.as(d, b.normal({1001})), average = b.as(d, b.normal({1001})),
                 control = b.zeros(DType::fp64, {4});
    const Tensor w = b.as(DType::fp64, weight), a = b.as(DType::fp64, average);
    const std::string weights = bits_of(weight), before = bits_of(average);
    average_weights(average, weight, control, 0.125, b.stream);
    b.stream.synchronize();
    REQUIRE(bits_of(average) == before);
    control.data<double>()[2] = 1;
    average_weights(average, weight, control, 0.125, b.stream);
    b.stream.synchronize();
    const std::string after = bits_of(average);
    const Tensor found = b.as(DType::fp64, average);
    const double rounding = d == DType::fp64 ? 0x1p-53 : 0x1p-24;  // of the difference, the product and the sum
    for (int64_t i = 0; i < 1001; ++i) {
      const double before_i = a.data<double>()[i], weight_i = w.data<double>()[i];
      REQUIRE(std::abs(found.data<double>()[i] - (0.875 * before_i + 0.125 * weight_i)) <=
              3 * rounding * (std::abs(before_i) + std::abs(weight_i)));
    }
    exchange(average, weight, b.stream);
    b.stream.synchronize();
    REQUIRE(bits_of(average) == weights);
    REQUIRE(bits_of(weight) == after);
  }
}

TEST_CASE("the gradient norm adds in double, clips as torch does, and forbids non-finite updates", "[ops]") {
  Bench b;
  const Tensor x = b.poisoned(DType::fp32, {200003}), sums = b.poisoned(DType::fp64, {2}),
               control = b.zeros(DType::fp64, {4}), loss = b.zeros(DType::fp64, {1});
  for (int64_t i = 0; i < x.numel(); ++i) x.data<float>()[i] = 0.001f;
  square_sum(sums.slice(0, {1}), x, b.stream);
  square_sum(sums.slice(1, {1}), x.slice(0, {1}), b.stream);
  clip_control(control, sums, loss, {.max_norm = 0.1}, b.stream);
  b.stream.synchronize();
  const double norm = std::sqrt(200004.0) * double(0.001f);
  REQUIRE(std::abs(control.data<double>()[0] / norm - 1) < 1e-12);
  REQUIRE(std::abs(control.data<double>()[1] - 0.1 / (norm + 1e-6)) < 1e-12);
  REQUIRE(control.data<double>()[2] == 1);
  clip_control(control, sums, loss, {.max_norm = 0}, b.stream);
  b.stream.synchronize();
  REQUIRE(control.data<double>()[1] == 1);
  loss.data<double>()[0] = std::numeric_limits<double>::infinity();
  clip_control(control, sums, loss, {.max_norm = 0}, b.stream);
  b.stream.synchronize();
  REQUIRE(control.data<double>()[2] == 0);
  loss.data<double>()[0] = 0;
  x.data<float>()[100000] = std::numeric_limits<float>::quiet_NaN();
  square_sum(sums.slice(0, {1}), x, b.stream);
  zero(control, b.stream);
  clip_control(control, sums, loss, {.max_norm = 1}, b.stream);
  b.stream.synchronize();
  REQUIRE(control.data<double>()[2] == 0);
  // From then on no update is allowed until it is reset to 0; a value that is only too large forbids one update.
  x.data<float>()[100000] = 0;
  square_sum(sums.slice(0, {1}), x, b.stream);
  clip_control(control, sums, loss, {}, b.stream);
  b.stream.synchronize();
  REQUIRE(control.data<double>()[2] == 0);
  zero(control, b.stream);
  for (const double allowed : {0.0, 1.0}) {
    clip_control(control, sums, loss, {.largest_loss = allowed - 0.5}, b.stream);
    b.stream.synchronize();
    REQUIRE(control.data<double>()[2] == allowed);
  }
}

TEST_CASE("our ops are bitwise the same with 1, 2 and 3 threads", "[ops]") {
  for (const DType d : {DType::fp32, DType::bf16}) {
    std::vector<std::string> results;
    for (int threads = 1; threads <= 3; ++threads) {
      Bench b(threads);
      const AttentionShape s{2, 70, 4, 2, 9};
      const int64_t N = 140, C = 36, W = (s.Hq + 2 * s.Hkv) * s.D;
      const Tensor x = b.as(d, b.normal({N, C})), w = b.as(d, b.normal({C})), dout = b.as(d, b.normal({N, C}));
      const Tensor out = b.poisoned(d, {N, C}), dx = b.poisoned(d, {N, C}), mean = b.poisoned(DType::fp32, {N}),
                   rstd = b.poisoned(DType::fp32, {N});
      const Tensor dw = b.zeros(DType::fp32, {C}), db = b.zeros(DType::fp32, {C});
      layernorm_forward(out, mean, rstd, x, w, w, 1e-5f, b.stream);
      layernorm_backward(dx, dw, db, dout, x, w, mean, rstd, Accumulate::no, b.stream);
      const Tensor qkv = b.as(d, b.normal({N, W})), dqkv = b.poisoned(d, {N, W}),
                   lse = b.poisoned(DType::fp32, {s.B, s.Hq, s.T}), o = b.poisoned(d, {N, C});
      attention_forward(o, lse, qkv, qkv, {}, whole_sequences(s), b.stream);
      attention_backward(dqkv, dqkv, dout, o, qkv, qkv, lse, {}, whole_sequences(s), Accumulate::no, b.stream);
      const Tensor wide = b.normal({N, 50}), big = b.as(DType::fp64, b.normal({50, C})),
                   product = b.poisoned(DType::fp64, {N, 50});
      linear_forward(product, b.as(DType::fp64, b.normal({N, C})), big, {}, b.stream);  // our own matmul
      const Tensor sums = b.poisoned(DType::fp64, {1});
      square_sum(sums, wide, b.stream);
      b.stream.synchronize();
      std::string all;
      for (const Tensor& t : {out, dx, dw, db, o, dqkv, lse, product, sums})
        all.append(reinterpret_cast<const char*>(t.bytes), static_cast<size_t>(t.size_bytes()));
      results.push_back(all);
    }
    REQUIRE(results[0] == results[1]);
    REQUIRE(results[0] == results[2]);
  }
}

TEST_CASE("a wrong shape or dtype is refused, naming op and argument", "[ops]") {
  Bench b;
  const Tensor x = b.zeros(DType::fp32, {4, 6}), w = b.zeros(DType::fp32, {6}), stat = b.zeros(DType::fp32, {4}),
               half = b.zeros(DType::bf16, {4, 6});
  REQUIRE_ERROR(layernorm_forward(x, stat, stat, x, b.zeros(DType::fp32, {5}), w, 1e-5f, b.stream),
                "layernorm_forward: weight");
  REQUIRE_ERROR(layernorm_forward(half, stat, stat, x, w, w, 1e-5f, b.stream), "layernorm_forward: out");
  REQUIRE_ERROR(linear_forward(x, x, b.zeros(DType::fp32, {6, 7}), {}, b.stream), "linear_forward: weight");
  REQUIRE_ERROR(residual_forward(x, x, half, b.stream), "residual_forward: b");
  REQUIRE_ERROR(attention_forward(x, stat, x, x, {}, whole_sequences({1, 4, 3, 2, 1}), b.stream), "3 query heads");
}

TEST_CASE("the null device books flops and bytes and computes nothing", "[ops]") {
  const Device device{DeviceKind::null, 2};
  Arena arena(device), scratch(device);
  Stream stream(device, scratch);
  OpLedger ledger;
  stream.set_ledger(&ledger);
  auto tensor = [&](const Shape& s) { return arena.alloc("test", "test", DType::fp32, s); };
  linear_forward(tensor({10, 20}), tensor({10, 30}), tensor({20, 30}), {}, stream);
  REQUIRE(ledger.at("linear_forward").calls == 1);
  REQUIRE(ledger.at("linear_forward").flops == 2.0 * 10 * 20 * 30);
  REQUIRE(ledger.at("linear_forward").bytes == 4.0 * (200 + 300 + 600));
  REQUIRE(arena.high_water() == 1024 + 1280 + 2560);
}
