// Mixture of experts on several ranks: the order of rows that arrive, the tables of sequences that ranks share, and the
// biases of experts.
#include "ops/op_bench.h"

using namespace llmc;

namespace {

using Integers = std::vector<int32_t>;

Integers values_of(const Tensor& t) { return {t.data<int32_t>(), t.data<int32_t>() + t.numel()}; }

struct ArrivalPlan {
  Tensor places, offsets;
};
ArrivalPlan plan_arrivals(Bench& b, const Tensor& counts, int64_t rows, int64_t stride) {
  const ArrivalPlan p{b.poisoned(DType::int32, {rows, 1}), b.poisoned(DType::int32, {counts.shape[1] + 1})};
  std::fill_n(p.places.data<int32_t>(), rows, 7);  // poison is -1
  arrival_plan(p.places, p.offsets, counts, stride, b.stream);
  b.stream.synchronize();
  return p;
}

}  // namespace

TEST_CASE("rows that have arrived are ordered by expert, then by rank, then as they arrived", "[ops][ep]") {
  Bench b;
  const Tensor counts = b.integers({1, 0, 2, /**/ 0, 0, 0, /**/ 2, 1, 0}).reshaped({3, 3});
  const ArrivalPlan close = plan_arrivals(b, counts, 7, 0);
  REQUIRE(values_of(close.offsets) == Integers{0, 3, 4, 6});
  REQUIRE(values_of(close.places) == Integers{0, 4, 5, 1, 2, 3, -1});
  const ArrivalPlan padded = plan_arrivals(b, counts, 12, 4);
  REQUIRE(values_of(padded.offsets) == Integers{0, 3, 4, 6});
  REQUIRE(values_of(padded.places) == Integers{0, 4, 5, -1, -1, -1, -1, -1, 1, 2, 3, -1});
  const Tensor per_expert = b.poisoned(DType::int32, {3});
  expert_counts(per_expert, padded.offsets, b.stream);
  b.stream.synchronize();
  REQUIRE(values_of(per_expert) == Integers{3, 1, 2});
  REQUIRE_ERROR(plan_arrivals(b, counts, 11, 4), "room for 11 rows of 3 ranks, 4 of each");
}

TEST_CASE("rows sent to the ranks of their experts come into the experts' order there, and back to their senders",
          "[ops][ep]") {
  // Whole experts on each rank; all rows to one rank's one expert; as they come, or a fixed room for each sender.
  const bool one_expert = GENERATE(false, true), padded = GENERATE(false, true);
  const int64_t P = 3, E = 2, N = 8, k = 2, C = 5, R = N * k, stride = padded ? R : 0, A = P * R;
  Bench b;
  const auto stale = [&](int64_t rows) { return b.poisoned(DType::fp64, {rows, C}); };
  struct Sender {
    Tensor choices, x, rows, returned, places, offsets, counts;
  };
  std::vector<Sender> senders;
  for (int64_t p = 0; p < P; ++p) {
    const Tensor choices = b.poisoned(DType::int32, {N, k});
    for (int64_t i = 0; i < N * k; ++i)
      choices.data<int32_t>()[i] =
          static_cast<int32_t>(one_expert ? 3 : (i / k * (p + 1) + i % k * (1 + i / k % 4)) % (P * E));
    const Sender s{choices,
                   b.normal({N, C}),
                   stale(A),
                   stale(A),
                   b.poisoned(DType::int32, {N, k}),
                   b.poisoned(DType::int32, {P * E + 1}),
                   b.poisoned(DType::int32, {P * E})};
    dispatch_plan(s.places, s.offsets, s.choices, {}, {}, {N}, {A, padded ? P : 1}, b.stream);
    dispatch_rows(s.rows, s.x, s.places, b.stream);
    expert_counts(s.counts, s.offsets, b.stream);
    b.stream.synchronize();
    senders.push_back(s);
  }
  for (int64_t owner = 0; owner < P; ++owner) {
    // What an all-to-all does.
    const Tensor counts = b.poisoned(DType::int32, {P, E}), arrived = stale(A);
    int64_t to = 0;
    std::vector<std::pair<double*, double*>> moved;  // where rows were sent from, and where they are
    for (int64_t p = 0; p < P; ++p) {
      const Sender& s = senders[static_cast<size_t>(p)];
      std::copy_n(s.counts.data<int32_t>() + owner * E, E, counts.data<int32_t>() + p * E);
      const int32_t* const begin = s.offsets.data<int32_t>() + owner * E;
      if (padded) to = p * stride;
      for (int64_t r = padded ? owner * stride : *begin, end = r + begin[E] - *begin; r < end; ++r, ++to) {
        moved.emplace_back(s.returned.data<double>() + r * C, arrived.data<double>() + to * C);
        std::copy_n(s.rows.data<double>() + r * C, C, moved.back().second);
      }
    }
    const ArrivalPlan plan = plan_arrivals(b, counts, A, stride);
    const Tensor rows = stale(A), back = stale(A);
    dispatch_rows(rows, arrived, plan.places, b.stream);
    b.stream.synchronize();
    // Each expert's rows: those of all ranks that chose it, by rank, row and choice.
    int64_t r = 0;
    for (int64_t e = 0; e < E; ++e) {
      REQUIRE(plan.offsets.data<int32_t>()[e] == r);
      for (const Sender& s : senders)
        for (int64_t i = 0; i < N * k; ++i)
          if (s.choices.data<int32_t>()[i] == owner * E + e)
            REQUIRE(std::equal(s.x.data<double>() + i / k * C, s.x.data<double>() + (i / k + 1) * C,
                               rows.data<double>() + r++ * C));
    }
    REQUIRE(plan.offsets.data<int32_t>()[E] == r);
    combine_rows(back, rows, {}, plan.places.reshaped({A, 1}), Accumulate::no, b.stream);
    b.stream.synchronize();
    REQUIRE(std::ranges::count(values_of(plan.places), -1) == A - r);
    for (int64_t a = 0; a < A; ++a)
      if (plan.places.data<int32_t>()[a] < 0)
        REQUIRE(std::all_of(back.data<double>() + a * C, back.data<double>() + (a + 1) * C,
                            [](double x) { return x == 0; }));
    for (const auto& [from, at] : moved) std::copy_n(back.data<double>() + (at - arrived.data<double>()), C, from);
  }
  for (const Sender& s : senders) {
    const Tensor out = stale(N);
    combine_rows(out, s.returned, {}, s.places, Accumulate::no, b.stream);
    b.stream.synchronize();
    for (int64_t i = 0; i < N * C; ++i) REQUIRE(out.data<double>()[i] == Approx(k * s.x.data<double>()[i]));
  }
}

TEST_CASE("tables of sequences that ranks share are those of the undivided sequences, and so are the choices kept",
          "[ops][ep]") {
  // Two sequences, each in four slices: rank r has slices r and 3 - r of both, and room for one more that is not there.
  const int64_t G = 2, B = 2, T = 512, L = 128, E = 5, k = 2, S = 2 * B + 1, capacity = 120;
  const RouterScores scores = GENERATE(RouterScores::softmax, RouterScores::sigmoid);
  const Router router{.E = E, .k = k, .scores = scores};
  const Segments slices{L}, whole{T};
  Bench b;
  const Tensor logits = b.as(DType::fp32, b.normal({B * T, E})), choices = b.poisoned(DType::int32, {B * T, k}),
               weights = b.poisoned(DType::fp32, {B * T, k});
  router_forward(choices, weights, logits, {}, router, b.stream);
  const auto tables = [&](const Shape& shape, const Shape& of_sums) {
    return std::tuple{b.poisoned(DType::int32, shape), b.poisoned(DType::fp32, shape),
                      b.poisoned(DType::fp32, of_sums)};
  };
  const auto [counts, probabilities, sums] = tables({B, E}, {B, 2});
  router_statistics(counts, probabilities, sums, logits, choices, router, whole, b.stream);
  const auto [joined_counts, joined_probabilities, joined_sums] = tables({B, E}, {B, 2});
  const auto [all_counts, all_probabilities, all_sums] = tables({G, S, E}, {G, S, 2});
  b.stream.synchronize();
  Integers sequences(static_cast<size_t>(G * S), -1), ids(static_cast<size_t>(G * S), -7);
  std::vector<Tensor> own_choices;
  for (int64_t g = 0; g < G; ++g) {
    const int64_t rows = 2 * B * L;
    const Tensor own_logits = b.poisoned(DType::fp32, {rows, E});
    own_choices.push_back(b.poisoned(DType::int32, {rows, k}));
    for (int64_t s = 0; s < 2 * B; ++s) {
      const int64_t slice = s % 2 == 0 ? g : 3 - g, first = s / 2 * T + slice * L;
      std::copy_n(logits.data<float>() + first * E, L * E, own_logits.data<float>() + s * L * E);
      std::copy_n(choices.data<int32_t>() + first * k, L * k, own_choices.back().data<int32_t>() + s * L * k);
      sequences[static_cast<size_t>(g * S + s)] = static_cast<int32_t>(s / 2);
      ids[static_cast<size_t>(s / 2 * 4 + slice)] = static_cast<int32_t>(g * S + s);
    }
    router_statistics(all_counts.slice(g * S * E, {2 * B, E}), all_probabilities.slice(g * S * E, {2 * B, E}),
                      all_sums.slice(g * S * 2, {2 * B, 2}), own_logits, own_choices.back(), router, slices, b.stream);
  }
  const SegmentOrder order{b.integers(sequences).reshaped({G, S}), b.integers(ids), b.integers({0, 4, 8})};
  join_segments(joined_counts, joined_probabilities, joined_sums, all_counts, all_probabilities, all_sums, order,
                b.stream);
  b.stream.synchronize();
  REQUIRE(bits_of(joined_counts) == bits_of(counts));
  REQUIRE(bits_of(joined_probabilities) == bits_of(probabilities));  // statistics are summed in blocks of 128 rows
  REQUIRE(bits_of(joined_sums) == bits_of(sums));

  const auto kept = [&](const Tensor& of, const Tensor& starts, const Segments& segments) {
    const int64_t N = of.shape[0];
    const Tensor places = b.poisoned(DType::int32, {N, k}), offsets = b.poisoned(DType::int32, {E + 1});
    dispatch_plan(places, offsets, of, starts, capacity, segments, {N * k}, b.stream);
    b.stream.synchronize();
    std::vector<bool> is_kept;
    for (const int32_t place : values_of(places)) is_kept.push_back(place >= 0);
    return is_kept;
  };
  const std::vector<bool> all_kept = kept(choices, {}, whole);
  REQUIRE(std::ranges::count(all_kept, false) > 0);
  for (int64_t g = 0; g < G; ++g) {
    const Tensor whole_counts = b.poisoned(DType::int32, {S, E}), starts = b.poisoned(DType::int32, {S, E});
    segment_starts(whole_counts, starts, all_counts, order, g, b.stream);
    b.stream.synchronize();
    for (int64_t s = 0; s < S; ++s)
      for (int64_t e = 0; e < E; ++e)
        REQUIRE(whole_counts.data<int32_t>()[s * E + e] == (s == 2 * B ? 0 : counts.data<int32_t>()[s / 2 * E + e]));
    const std::vector<bool> own = kept(own_choices[static_cast<size_t>(g)], starts.slice(0, {2 * B, E}), slices);
    for (int64_t s = 0; s < 2 * B; ++s)
      for (int64_t i = 0; i < L * k; ++i) {
        const int64_t slice = s % 2 == 0 ? g : 3 - g;
        REQUIRE(own[static_cast<size_t>(s * L * k + i)] ==
                all_kept[static_cast<size_t>((s / 2 * T + slice * L) * k + i)]);
      }
  }
}

TEST_CASE("a sequence's segments are joined in their order, whatever ranks they are on", "[ops][ep]") {
  Bench b;
  const int64_t G = 2, S = 2, B = 2, E = 1;
  // Sequence 0: segment 1 of rank 1, then segment 0 of rank 0; sequence 1: segment 0 of rank 1.
  const SegmentOrder order{b.integers({0, -1, 1, 0}).reshaped({G, S}), b.integers({3, 0, 2}), b.integers({0, 2, 3})};
  const Tensor all_counts = b.integers({10, 20, 30, 40}).reshaped({G, S, E});
  const Tensor all_sums = b.as(DType::fp32, b.normal({G, S, 2}));
  const Tensor all_p = b.poisoned(DType::fp32, {G, S, E});
  std::ranges::copy(std::vector<float>{1, NAN, 5, 0x1p-25f}, all_p.data<float>());
  const Tensor counts = b.poisoned(DType::int32, {B, E}), p = b.poisoned(DType::fp32, {B, E}),
               sums = b.poisoned(DType::fp32, {B, 2}), whole = b.poisoned(DType::int32, {S, E}),
               starts = b.poisoned(DType::int32, {S, E});
  join_segments(counts, p, sums, all_counts, all_p, all_sums, order, b.stream);
  b.stream.synchronize();
  REQUIRE(values_of(counts) == Integers{50, 30});
  REQUIRE(p.data<float>()[0] == 1);
  REQUIRE(p.data<float>()[1] == 5);
  for (const int64_t j : {0, 1}) {
    const float* s = all_sums.data<float>();
    REQUIRE(sums.data<float>()[j] == s[3 * 2 + j] + s[j]);
    REQUIRE(sums.data<float>()[2 + j] == s[2 * 2 + j]);
  }
  segment_starts(whole, starts, all_counts, order, 0, b.stream);
  b.stream.synchronize();
  REQUIRE(values_of(whole) == Integers{50, 0});
  REQUIRE(values_of(starts) == Integers{40, 0});
  segment_starts(whole, starts, all_counts, order, 1, b.stream);
  b.stream.synchronize();
  REQUIRE(values_of(whole) == Integers{30, 50});
  REQUIRE(values_of(starts) == Integers{0, 0});
  REQUIRE_ERROR(segment_starts(whole, starts, all_counts, order, 2, b.stream), "rank 2 of 2");
}

TEST_CASE("biases of experts move by the rate towards the mean count, and not where the update is forbidden",
          "[ops][ep]") {
  Bench b;
  const Tensor biases = b.zeros(DType::fp32, {4}), totals = b.zeros(DType::fp64, {4}),
               control = b.zeros(DType::fp64, {4}), counts = b.integers({1, 4, 0, 3, /**/ 1, 0, 2, 5}).reshaped({2, 4});
  std::ranges::copy(std::vector<float>{0.5f, 0.5f, -0.5f, 0}, biases.data<float>());
  add_expert_counts(totals, counts, b.stream);
  update_expert_biases(biases, totals, control, 0.25f, b.stream);
  b.stream.synchronize();
  REQUIRE(std::vector<double>(totals.data<double>(), totals.data<double>() + 4) == std::vector<double>{2, 4, 2, 8});
  const auto now = [&] { return std::vector<float>(biases.data<float>(), biases.data<float>() + 4); };
  REQUIRE(now() == std::vector<float>{0.5f, 0.5f, -0.5f, 0});
  control.data<double>()[2] = 1;
  update_expert_biases(biases, totals, control, 0.25f, b.stream);  // the mean is 4
  b.stream.synchronize();
  REQUIRE(now() == std::vector<float>{0.75f, 0.5f, -0.25f, -0.25f});
  add_expert_counts(totals, counts, b.stream);  // a second micro-batch
  b.stream.synchronize();
  REQUIRE(totals.data<double>()[3] == 16);
  // A mean that is no whole number, and counts that fp32 would round.
  const std::vector<double> large = {1 << 25, (1 << 25) + 1, 1 << 25, 1 << 25};
  std::ranges::copy(large, totals.data<double>());
  update_expert_biases(biases, totals, control, 0.25f, b.stream);
  b.stream.synchronize();
  REQUIRE(now() == std::vector<float>{1, 0.25f, 0, 0});
}
