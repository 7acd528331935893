// The ops that move rows to experts and back, and their products: finite differences in double, plain references, and
// rows beyond those in use.
#include "ops/op_bench.h"

using namespace llmc;

namespace {

std::vector<int32_t> integers_of(const Tensor& t) { return {t.data<int32_t>(), t.data<int32_t>() + t.numel()}; }

// Choices of distinct experts for each row, some experts more often than others.
Tensor some_choices(Bench& b, int64_t N, int64_t E, int64_t k) {
  const Tensor logits = b.normal({N, E}), choices = b.poisoned(DType::int32, {N, k}),
               weights = b.poisoned(DType::fp64, {N, k});
  for (int64_t i = 0; i < N * E; ++i) logits.data<double>()[i] += 0.3 * static_cast<double>(i % E);
  router_forward(choices, weights, logits, {}, {.E = E, .k = k}, b.stream);
  b.stream.synchronize();
  return choices;
}

struct Plan {
  Tensor places, offsets;
};
Plan make_plan(Bench& b, const Tensor& choices, int64_t E, int64_t R, std::optional<int64_t> capacity = std::nullopt,
               Segments segments = {1 << 20}, Tensor starts = {}, int64_t blocks = 1) {
  const Plan p{b.poisoned(DType::int32, choices.shape), b.poisoned(DType::int32, {E + 1})};
  dispatch_plan(p.places, p.offsets, choices, starts, capacity, segments, {R, blocks}, b.stream);
  b.stream.synchronize();
  return p;
}

Tensor offsets_of(Bench& b, const std::vector<int32_t>& rows) {
  std::vector<int32_t> offsets = {0};
  for (const int32_t n : rows) offsets.push_back(offsets.back() + n);
  return b.integers(offsets);
}

}  // namespace

TEST_CASE("rows are ordered by expert, also in blocks; a capacity keeps the first choices of each segment",
          "[ops][ep]") {
  struct Case {
    int64_t N, E, k, length, first;
  };
  const Case c = GENERATE(Case{1, 1, 1, 1, 0}, Case{30, 4, 2, 10, 0}, Case{30, 4, 4, 7, 3}, Case{50, 16, 3, 100, 99});
  const std::optional<int64_t> capacity = GENERATE(std::optional<int64_t>{}, 0, 1, 3, 1000);
  Bench b;
  const Segments segments{c.length, c.first};
  const int64_t S = segments.count(c.N);
  const Tensor choices = some_choices(b, c.N, c.E, c.k), starts = b.zeros(DType::int32, {S, c.E});
  for (int64_t i = 0; i < S * c.E; ++i) starts.data<int32_t>()[i] = static_cast<int32_t>(i % 3);
  const int64_t blocks = GENERATE(1, 2), of_block = c.E / blocks, stride = c.N * c.k + 3;
  if (c.E % blocks > 0) return;
  const Plan p = make_plan(b, choices, c.E, blocks * stride, capacity, segments, capacity ? starts : Tensor{}, blocks);
  std::vector<std::vector<int32_t>> rows(static_cast<size_t>(c.E));
  std::vector<int32_t> places(static_cast<size_t>(c.N * c.k), -1), taken = integers_of(starts), offsets = {0};
  for (int32_t i = 0; i < c.N * c.k; ++i) {
    const int32_t e = choices.data<int32_t>()[i];
    if (capacity && taken[static_cast<size_t>((c.first + i / c.k) / c.length * c.E + e)]++ >= *capacity) continue;
    rows[static_cast<size_t>(e)].push_back(i);
  }
  int64_t place = 0;
  for (int64_t e = 0; e < c.E; ++e) {
    if (e % of_block == 0) place = e / of_block * stride;
    const auto& of_expert = rows[static_cast<size_t>(e)];
    for (const int32_t i : of_expert) places[static_cast<size_t>(i)] = static_cast<int32_t>(place++);
    offsets.push_back(offsets.back() + static_cast<int32_t>(of_expert.size()));
  }
  REQUIRE(integers_of(p.places) == places);
  REQUIRE(integers_of(p.offsets) == offsets);
}

TEST_CASE("which choices are dropped does not depend on how a sequence is cut", "[ops][ep]") {
  const int64_t N = 40, E = 4, k = 2;
  Bench b;
  const Tensor choices = some_choices(b, N, E, k);
  const Plan whole = make_plan(b, choices, E, N * k, 6, {20});
  std::vector<bool> kept;
  std::vector<int32_t> taken(E);
  for (int64_t begin = 0; begin < N; begin += 5) {  // a rank per 5 rows
    if (begin % 20 == 0) std::fill(taken.begin(), taken.end(), 0);
    const Tensor part = choices.slice(begin * k, {5, k});
    const Plan p = make_plan(b, part, E, 5 * k, 6, {5}, b.integers(taken).reshaped({1, E}));
    for (const int32_t place : integers_of(p.places)) kept.push_back(place >= 0);
    for (const int32_t e : integers_of(part)) ++taken[static_cast<size_t>(e)];
  }
  int64_t dropped = 0;
  for (size_t i = 0; i < kept.size(); ++i) {
    REQUIRE(kept[i] == (integers_of(whole.places)[i] >= 0));
    dropped += !kept[i];
  }
  REQUIRE(dropped > 0);
}

TEST_CASE("experts: finite differences of dispatch, grouped linear layers and weighted sum; stale rows are NaN",
          "[ops][ep]") {
  // Each expert some rows; dropped choices; k = E; one expert takes all and one nothing.
  struct Case {
    int64_t E, k;
    std::optional<int64_t> capacity;
    bool all_to_one;
  };
  const Case c = GENERATE(Case{4, 2, {}, false}, Case{4, 2, 2, false}, Case{3, 3, {}, false}, Case{3, 1, {}, true},
                          Case{1, 1, {}, false}, Case{3, 2, 0, false});
  const int64_t N = 9, C = 5, F = 4, R = N * c.k + 4;
  Bench b;
  const Tensor choices = some_choices(b, N, c.E, c.k);
  if (c.all_to_one) std::fill_n(choices.data<int32_t>(), N, 1);
  const Plan p = make_plan(b, choices, c.E, R, c.capacity, {4, 1});
  const Tensor x = b.normal({N, C}), up = b.normal({c.E, 2 * F, C}), down = b.normal({c.E, C, F}),
               weights = b.normal({N, c.k}), dout = b.normal({N, C}), shared = b.normal({N, C});
  const auto fresh = [&](int64_t n, int64_t width, int filler = 0xff) {  // rows that are never written keep it
    const Tensor t = b.poisoned(DType::fp64, {n, width});
    std::memset(t.bytes, filler, static_cast<size_t>(t.size_bytes()));
    return t;
  };
  const Tensor sent = fresh(R, C), gate_up = fresh(R, 2 * F), hidden = fresh(R, F, 1), y = fresh(R, C),
               out = fresh(N, C);
  const Tensor count = p.offsets.slice(c.E, {1});
  b.stream.set_inspector([](const char* op, const Tensor& t) {  // what is not written is not inspected either
    INFO(op);
    if (t.dtype == DType::fp64)
      for (int64_t i = 0; i < t.numel(); ++i)
        if (!std::isfinite(t.data<double>()[i])) FAIL("not finite");
  });
  const auto value = [&] {
    copy(out, shared, b.stream);
    dispatch_rows(sent, x, p.places, b.stream);
    grouped_linear_forward(gate_up, sent, up, p.offsets, b.stream);
    swiglu_forward(hidden, gate_up, b.stream, count);
    grouped_linear_forward(y, hidden, down, p.offsets, b.stream);
    combine_rows(out, y, weights, p.places, Accumulate::yes, b.stream);
    b.stream.synchronize();
    return dot(out, dout);
  };
  value();
  const int64_t rows = *count.data<int32_t>();
  const Tensor dy = fresh(R, C), dhidden = fresh(R, F), dgate_up = fresh(R, 2 * F, 1), dsent = fresh(R, C),
               dx = fresh(N, C), dweights = b.poisoned(DType::fp64, {N, c.k}),
               ddown = b.poisoned(DType::fp64, {c.E, C, F}), dup = b.poisoned(DType::fp64, {c.E, 2 * F, C});
  combine_backward(dy, dweights, dout, y, weights, p.places, b.stream);
  grouped_linear_backward_input(dhidden, dy, down, p.offsets, b.stream);
  grouped_linear_backward_weight(ddown, dy, hidden, p.offsets, Accumulate::no, b.stream);
  swiglu_backward(dgate_up, dhidden, gate_up, b.stream, count);
  grouped_linear_backward_input(dsent, dgate_up, up, p.offsets, b.stream);
  grouped_linear_backward_weight(dup, dgate_up, sent, p.offsets, Accumulate::no, b.stream);
  combine_rows(dx, dsent, {}, p.places, Accumulate::no, b.stream);
  b.stream.set_inspector(nullptr);
  b.stream.synchronize();
  for (const Tensor& t : {sent, gate_up, hidden, y, dy, dhidden, dgate_up, dsent}) {
    const int64_t written = rows * t.shape[1] * 8;
    const std::string rest = bits_of(t).substr(static_cast<size_t>(written));
    REQUIRE(rest.find_first_not_of(rest[0]) == std::string::npos);
    REQUIRE(rest[0] == (t.bytes == hidden.bytes || t.bytes == dgate_up.bytes ? '\1' : '\xff'));
  }
  require_gradient(x, dx, value);
  require_gradient(weights, dweights, value);
  require_gradient(up, dup, value);
  require_gradient(down, ddown, value);
  // In place, and the second micro-batch adds to the weights' gradient.
  const Tensor again = b.zeros(DType::fp64, {N, c.k}), twice = b.as(DType::fp64, ddown);
  value();
  combine_backward(y, again, dout, y, weights, p.places, b.stream);
  grouped_linear_backward_weight(twice, y, hidden, p.offsets, Accumulate::yes, b.stream);
  b.stream.synchronize();
  REQUIRE(bits_of(again) == bits_of(dweights));
  REQUIRE(bits_of(y) == bits_of(dy));
  for (int64_t i = 0; i < twice.numel(); ++i)
    REQUIRE(std::abs(twice.data<double>()[i] - 2 * ddown.data<double>()[i]) < 1e-12);
}

TEST_CASE("grouped linear layers in fp32 and bf16 are those of each expert alone, within rounding", "[ops][ep]") {
  const DType d = GENERATE(DType::fp32, DType::bf16);
  const auto rows = GENERATE(std::vector<int32_t>{700}, std::vector<int32_t>{0, 300, 0, 1, 130, 0},
                             std::vector<int32_t>{0, 0, 0}, std::vector<int32_t>{5, 257, 63, 31});
  const auto [O, I] = GENERATE(table<int64_t, int64_t>({{600, 193}, {70, 1100}}));
  const int64_t E = static_cast<int64_t>(rows.size());
  Bench b;
  const Tensor offsets = offsets_of(b, rows);
  const int64_t used = offsets.data<int32_t>()[E], R = used + 77;
  const Tensor x = b.as(d, b.normal({R, I})), dout = b.as(d, b.normal({R, O})), w = b.as(d, b.normal({E, O, I}));
  const Tensor dw = b.as(DType::fp32, b.normal({E, O, I})), out = b.poisoned(d, {R, O}), dx = b.poisoned(d, {R, I});
  const Tensor wide_x = b.as(DType::fp64, x), wide_dout = b.as(DType::fp64, dout), wide_w = b.as(DType::fp64, w),
               wide_dw = b.as(DType::fp64, dw), dw_before = b.as(DType::fp32, dw);
  for (const Tensor& t : {x, dout})  // stale rows
    std::fill(t.bytes + used * t.shape[1] * size_of(d), t.bytes + t.size_bytes(), std::byte{0xff});
  grouped_linear_forward(out, x, w, offsets, b.stream);
  grouped_linear_backward_input(dx, dout, w, offsets, b.stream);
  grouped_linear_backward_weight(dw, dout, x, offsets, Accumulate::yes, b.stream);
  b.stream.synchronize();
  const double rounding = d == DType::bf16 ? 0x1p-8 : 1e-6;
  for (int64_t e = 0, begin = 0; e < E; begin += rows[static_cast<size_t>(e++)]) {
    const int64_t n = rows[static_cast<size_t>(e)];
    const Tensor we = wide_w.slice(e * O * I, {O, I}), dwe = wide_dw.slice(e * O * I, {O, I}),
                 oute = b.poisoned(DType::fp64, {n, O}), dxe = b.poisoned(DType::fp64, {n, I});
    if (n == 0) {
      REQUIRE(bits_of(dw.slice(e * O * I, {O, I})) == bits_of(dw_before.slice(e * O * I, {O, I})));
      continue;
    }
    linear_forward(oute, wide_x.slice(begin * I, {n, I}), we, {}, b.stream);
    linear_backward_input(dxe, wide_dout.slice(begin * O, {n, O}), we, b.stream);
    linear_backward_weight(dwe, {}, wide_dout.slice(begin * O, {n, O}), wide_x.slice(begin * I, {n, I}),
                           Accumulate::yes, b.stream);
    const Tensor got = b.as(DType::fp64, out.slice(begin * O, {n, O})),
                 dgot = b.as(DType::fp64, dx.slice(begin * I, {n, I}));
    REQUIRE(relative_distance(got.data<double>(), oute.data<double>(), n * O) < rounding);
    REQUIRE(relative_distance(dgot.data<double>(), dxe.data<double>(), n * I) < rounding);
    REQUIRE(relative_distance(dw.data<float>() + e * O * I, dwe.data<double>(), O * I) < 1e-6);
  }
  for (const Tensor& t : {out, dx})
    REQUIRE(bits_of(t.slice(used * t.shape[1], {77, t.shape[1]})).find_first_not_of('\xff') == std::string::npos);
}

TEST_CASE("rows without places are those of the choices, one after the other", "[ops][ep]") {
  const int64_t N = 5, C = 7, k = GENERATE(1, 3);
  Bench b;
  std::vector<int32_t> in_order(static_cast<size_t>(N * k));
  std::iota(in_order.begin(), in_order.end(), 0);
  const Tensor y = b.normal({N * k, C}), weights = b.normal({N, k}), dout = b.normal({N, C}),
               places = b.integers(in_order).reshaped({N, k});
  const auto results = [&](const Tensor& p) {
    const Tensor out = b.poisoned(DType::fp64, {N, C}), dy = b.poisoned(DType::fp64, {N * k, C}),
                 dweights = b.poisoned(DType::fp64, {N, k});
    combine_rows(out, y, weights, p, Accumulate::no, b.stream);
    combine_backward(dy, dweights, dout, y, weights, p, b.stream);
    b.stream.synchronize();
    return bits_of(out) + bits_of(dy) + bits_of(dweights);
  };
  REQUIRE(results({}) == results(places));
  REQUIRE_ERROR(combine_rows(dout, b.normal({N * k + 1, C}), weights, {}, Accumulate::no, b.stream),
                "combine_rows: 5 rows of");
}

TEST_CASE("the weighted sum adds in the order of the choices and rounds once; router gradients are not rounded",
          "[ops][ep]") {
  const int64_t N = 3, C = 300, k = 3, E = 8;
  Bench b;
  const Tensor y = b.as(DType::bf16, b.normal({N * k, C})), weights = b.as(DType::fp32, b.normal({N, k})),
               out = b.as(DType::bf16, b.normal({N, C})), places = b.integers({8, 0, 3, 5, -1, 1, 7, 2, 4});
  const Tensor before = b.as(DType::fp32, out);
  combine_rows(out, y, weights, places.reshaped({N, k}), Accumulate::yes, b.stream);
  const Tensor dlogits = b.as(DType::fp32, b.normal({N, E})), w = b.as(DType::bf16, b.normal({E, C})),
               dx = b.as(DType::bf16, before), dw = b.zeros(DType::fp32, {E, C});
  router_backward_input(dx, dlogits, w, Accumulate::yes, b.stream);
  router_backward_weight(dw, dlogits, out, Accumulate::yes, b.stream);
  b.stream.synchronize();
  const Tensor rows = b.as(DType::fp32, y), wide = b.as(DType::fp64, w), x = b.as(DType::fp64, out);
  for (int64_t n = 0; n < N; ++n)
    for (int64_t c = 0; c < C; ++c) {
      double exact = before.data<float>()[n * C + c];
      for (int64_t j = 0; j < k; ++j) {
        const int32_t place = places.data<int32_t>()[n * k + j];
        if (place < 0) continue;
        exact += static_cast<double>(rows.data<float>()[place * C + c]) *
                 static_cast<double>(weights.data<float>()[n * k + j]);
      }
      const double got = static_cast<double>(out.data<bf16>()[n * C + c]);
      REQUIRE(std::abs(got - exact) <= 0x1p-8 * std::abs(exact) + 1e-6);
      double gradient = before.data<float>()[n * C + c];
      for (int64_t e = 0; e < E; ++e)
        gradient += static_cast<double>(dlogits.data<float>()[n * E + e]) * wide.data<double>()[e * C + c];
      REQUIRE(std::abs(static_cast<double>(dx.data<bf16>()[n * C + c]) - gradient) <=
              0x1p-8 * std::abs(gradient) + 1e-5);
    }
  for (int64_t i = 0; i < E * C; ++i) {
    double sum = 0;
    for (int64_t n = 0; n < N; ++n)
      sum += static_cast<double>(dlogits.data<float>()[n * E + i / C]) * x.data<double>()[n * C + i % C];
    REQUIRE(std::abs(dw.data<float>()[i] - sum) < 1e-5);
  }
}

TEST_CASE("a weight gradient that is written has the bits of one added to zeros, whatever was there", "[ops][ep]") {
  const DType d = GENERATE(DType::fp32, DType::bf16, DType::fp64), sum = accumulator_of(d);
  const int64_t N = GENERATE(0, 3, 700);  // no rows; few; some for each of three experts, but none for two
  const int32_t some = static_cast<int32_t>(N / 3);
  const int64_t O = 70, I = 130, E = 5;
  Bench b;
  const Tensor offsets = offsets_of(b, {some, 0, some, some, 0});
  const Tensor x = b.as(d, b.normal({N, I})), dout = b.as(d, b.normal({N, O})), dlogits = b.as(sum, b.normal({N, O}));
  const auto [name, shape, product] = GENERATE_REF(table<const char*, Shape, std::function<void(Tensor, Accumulate)>>(
      {{"linear", {O, I}, [&](Tensor dw, Accumulate a) { linear_backward_weight(dw, {}, dout, x, a, b.stream); }},
       {"experts",
        {E, O, I},
        [&](Tensor dw, Accumulate a) { grouped_linear_backward_weight(dw, dout, x, offsets, a, b.stream); }},
       {"router", {O, I}, [&](Tensor dw, Accumulate a) { router_backward_weight(dw, dlogits, x, a, b.stream); }}}));
  CAPTURE(name, d, N);
  const Tensor written = b.poisoned(sum, shape), added = b.zeros(sum, shape);
  for (const Accumulate second : {Accumulate::no, Accumulate::yes}) {
    if (second == Accumulate::yes) product(written, second), product(added, second);
    else product(written, Accumulate::no), product(added, Accumulate::yes);
    b.stream.synchronize();
    REQUIRE(bits_of(written) == bits_of(added));
  }
}

TEST_CASE("the ops of experts give the same bits for any number of threads", "[ops][ep]") {
  const DType d = GENERATE(DType::fp32, DType::bf16, DType::fp64);
  std::vector<std::string> results;
  for (const int threads : {1, 3}) {
    Bench b(threads);
    // Experts of some 50 rows and two tiles: of one thread's, and shared by three.
    const int64_t N = 300, E = 12, k = 2, C = 40, O = 300, R = N * k;
    const DType wide = accumulator_of(d);
    const Router router{.E = E, .k = k};
    const Tensor x = b.as(d, b.normal({N, C})), w = b.as(d, b.normal({E, O, C})), logits = b.as(wide, b.normal({N, E}));
    const Tensor choices = b.poisoned(DType::int32, {N, k}), weights = b.poisoned(wide, {N, k}),
                 dlogits = b.poisoned(wide, {N, E}), counts = b.poisoned(DType::int32, {1, E}),
                 p = b.poisoned(wide, {1, E}), sums = b.poisoned(wide, {1, 2}), sent = b.poisoned(d, {R, C}),
                 y = b.poisoned(d, {R, O}), dx = b.poisoned(d, {R, C}), dw = b.zeros(wide, {E, O, C}),
                 out = b.poisoned(d, {N, O});
    router_forward(choices, weights, logits, {}, router, b.stream);
    router_statistics(counts, p, sums, logits, choices, router, {N}, b.stream);
    router_backward(dlogits, weights, logits, choices, counts, router, {1, 1, N}, {N}, b.stream);
    const Plan plan = make_plan(b, choices, E, R);
    dispatch_rows(sent, x, plan.places, b.stream);
    grouped_linear_forward(y, sent, w, plan.offsets, b.stream);
    grouped_linear_backward_input(dx, y, w, plan.offsets, b.stream);
    grouped_linear_backward_weight(dw, y, sent, plan.offsets, Accumulate::yes, b.stream);
    combine_rows(out, y, weights, plan.places, Accumulate::no, b.stream);
    b.stream.synchronize();
    std::string& all = results.emplace_back();
    for (const Tensor& t : {choices, weights, dlogits, counts, p, sums, plan.places, sent, y, dx, dw, out})
      all += bits_of(t);
  }
  REQUIRE((results[0] == results[1]));
}

TEST_CASE("the ops of experts refuse what does not fit, and book what all rows cost", "[ops][ep]") {
  Bench b;
  const Tensor choices = b.integers({0, 1, 1, 0, 0, 1}).reshaped({3, 2});
  REQUIRE_ERROR(make_plan(b, choices, 2, 5), "room for 5 rows, but 3 rows with 2 choices can need 6");
  REQUIRE_ERROR(make_plan(b, choices, 2, 9, {}, {3}, {}, 2), "2 experts and 9 rows do not divide into 2 blocks");
  REQUIRE_ERROR(make_plan(b, choices, 2, 1, 1), "can need 2");
  REQUIRE_ERROR(make_plan(b, choices, 2, 6, -2), "a capacity of -2 rows");
  REQUIRE_ERROR(make_plan(b, choices, 2, 6, {}, {4, 4}), "a first row 4 of segments of 4 rows");
  REQUIRE_ERROR(make_plan(b, choices, 2000, 6), "2000 experts");
  const Tensor logits = b.zeros(DType::fp32, {3, 2}), weights = b.zeros(DType::fp32, {3, 2});
  REQUIRE_ERROR(router_forward(choices, weights, logits, {}, {.E = 2, .k = 3}, b.stream), "3 choices among 2 experts");
  REQUIRE_ERROR(router_forward(choices, weights, b.zeros(DType::bf16, {3, 2}), {}, {.E = 2, .k = 2}, b.stream),
                "router_forward: logits");

  const Device device{DeviceKind::null, 2};
  Arena arena(device), scratch(device);
  Stream stream(device, scratch);
  OpLedger ledger;
  stream.set_ledger(&ledger);
  const auto tensor = [&](DType d, const Shape& s) { return arena.alloc("test", "test", d, s); };
  const Tensor x = tensor(DType::bf16, {10, 20}), out = tensor(DType::bf16, {10, 30}),
               w = tensor(DType::bf16, {4, 30, 20}), dw = tensor(DType::fp32, {4, 30, 20}),
               offsets = tensor(DType::int32, {5});
  grouped_linear_forward(out, x, w, offsets, stream);
  grouped_linear_backward_weight(dw, out, x, offsets, Accumulate::no, stream);
  REQUIRE(ledger.at("grouped_linear_forward").flops == 2.0 * 10 * 20 * 30);
  REQUIRE(ledger.at("grouped_linear_forward").bytes == 2.0 * (200 + 300 + 2400));
  REQUIRE(ledger.at("grouped_linear_backward_weight").flops == 2.0 * 10 * 20 * 30);
  OpTotals& weights_gradient = ledger.at("grouped_linear_backward_weight");
  REQUIRE(weights_gradient.bytes == 2.0 * (200 + 300) + 4.0 * 2400);
  grouped_linear_backward_weight(dw, out, x, offsets, Accumulate::yes, stream);
  REQUIRE(weights_gradient.bytes == 2 * 2.0 * (200 + 300) + 4.0 * 3 * 2400);
}
