// Where sequences are cut into token slices: against every cut of short ones, on known answers, and rejected options.
#include "catch2.h"
#include "schedule/partitions.h"
#include "schedule/token_slices.h"

using namespace llmc;
using namespace partitions;
using Catch::Matchers::ContainsSubstring;

TEST_CASE("token slices are the best of all cuts, for any times", "[pp][slices]") {
  RandomValues random;
  for (int round = 0; round < 500; ++round) {
    const int64_t tokens = 1 + random.below(10), micro_batches = 1 + random.below(3);
    const int stages = 1 + static_cast<int>(random.below(8));
    const bool any = round % 2 == 0;
    std::vector<double> t(11 * 11);
    const double each = static_cast<double>(random.below(10)), attention = static_cast<double>(random.below(4));
    for (int64_t l = 0; l <= 10; ++l)
      for (int64_t c = 0; c <= 10; ++c)
        t[static_cast<size_t>(l * 11 + c)] =
            any ? random.value(true, 20)
                : each + static_cast<double>(4 * l) + attention * static_cast<double>(l * (2 * c + l));
    const auto seconds = [&](int64_t l, int64_t c) { return t.at(static_cast<size_t>(l * 11 + c)); };
    const auto seconds_of = [&](const Sizes& slices) {
      double total = 0, slowest = 0;
      int64_t context = 0;
      for (const int64_t l : slices) {
        total += seconds(l, context);
        slowest = std::max(slowest, seconds(l, context));
        context += l;
      }
      return static_cast<double>(micro_batches) * total + (stages - 1) * slowest;
    };
    double best = std::numeric_limits<double>::infinity();
    for (const Sizes& slices : compositions(tokens)) best = std::min(best, seconds_of(slices));
    const TokenSlices found =
        optimal_token_slices({.tokens = tokens, .stages = stages, .micro_batches = micro_batches}, seconds);
    INFO("round " << round);
    REQUIRE(found.seconds == best);
    REQUIRE(seconds_of(found.lengths) == best);
    REQUIRE(sum(found.lengths) == tokens);
  }
}

TEST_CASE("token slices on times whose best cut is known", "[pp][slices]") {
  // o + l: K even slices take K o + T + (P - 1) (o + T / K), which is smallest at K = sqrt((P - 1) T / o).
  const auto linear = [](int64_t l, int64_t) { return 1.0 + static_cast<double>(l); };
  const TokenSlices even = optimal_token_slices({.tokens = 16, .stages = 5}, linear);
  REQUIRE(even.lengths == Sizes{2, 2, 2, 2, 2, 2, 2, 2});
  REQUIRE(even.seconds == 8 + 16 + 4 * (1 + 2));
  REQUIRE(optimal_token_slices({.tokens = 16, .stages = 1}, linear).lengths == Sizes{16});  // no bubble, no cut
  // Four micro-batches make the bubble a fourth, and so half the slices enough.
  REQUIRE(optimal_token_slices({.tokens = 16, .stages = 5, .micro_batches = 4}, linear).lengths == Sizes{4, 4, 4, 4});
  // Attention over the context: each slice is shorter than the one before.
  const auto causal = [](int64_t l, int64_t c) { return static_cast<double>(l * (100 + 2 * c + l)); };
  const TokenSlices uneven =
      optimal_token_slices({.tokens = 96, .stages = 8}, [&](int64_t l, int64_t c) { return 1500 + causal(l, c); });
  REQUIRE(uneven.lengths == Sizes{18, 14, 12, 10, 10, 9, 8, 8, 7});
  // Cuts are at multiples of the granularity; the last slice has what is left.
  const Sizes coarse = optimal_token_slices({.tokens = 70, .granularity = 16, .stages = 100}, causal).lengths;
  REQUIRE(coarse == Sizes{16, 16, 16, 16, 6});
}

TEST_CASE("the more token slices, the smaller the bubble of a long sequence", "[pp][slices]") {
  for (const int64_t tokens : {512, 4096}) {
    const double work = static_cast<double>(tokens * (64 + tokens));  // the same for every cut, but for:
    double slices_before = 0;
    for (const double begin : {0.1, 0.02, 0.005}) {  // what a slice costs before its first token, of the work
      const auto causal = [&](int64_t l, int64_t c) {
        return begin * work + static_cast<double>(l * (64 + 2 * c + l));
      };
      const TokenSlices found =
          optimal_token_slices({.tokens = tokens, .granularity = tokens / 128, .stages = 4}, causal);
      const auto slices = static_cast<double>(found.lengths.size());
      const double bubble = found.seconds / (work + slices * begin * work) - 1;
      const double least = 3 / slices;  // (P - 1) / K: slices that take equally long
      EXPECT(slices > slices_before);
      EXPECT(bubble >= Catch::Approx(least));
      EXPECT(bubble < 1.1 * least);
      slices_before = slices;
    }
  }
}

TEST_CASE("a pipeline that runs the slices one after the other takes the planned time", "[pp][slices]") {
  RandomValues random;
  const auto causal = [](int64_t l, int64_t c) { return static_cast<double>(7 + l * (20 + 2 * c + l)); };
  for (int round = 0; round < 50; ++round) {
    const TokenCut cut{.tokens = 1 + random.below(40),
                       .stages = static_cast<int>(1 + random.below(6)),
                       .micro_batches = 1 + random.below(4)};
    const TokenSlices found = optimal_token_slices(cut, causal);
    std::vector<double> done(static_cast<size_t>(cut.stages));  // when each stage has done the last slice
    for (int64_t m = 0; m < cut.micro_batches; ++m) {
      int64_t context = 0;
      for (const int64_t l : found.lengths) {
        for (size_t s = 0; s < done.size(); ++s)
          done[s] = std::max(done[s], s == 0 ? 0 : done[s - 1]) + causal(l, context);
        context += l;
      }
    }
    REQUIRE(found.seconds == done.back());
  }
}

TEST_CASE("even token slices differ by at most one token, and an impossible number is refused by name",
          "[pp][slices]") {
  REQUIRE(even_token_slices(10, 3) == Sizes{4, 3, 3});
  REQUIRE(even_token_slices(8, 4) == Sizes{2, 2, 2, 2});
  REQUIRE(even_token_slices(3, 3) == Sizes{1, 1, 1});
  REQUIRE_THROWS_WITH(even_token_slices(8, 9), ContainsSubstring("--token-slices 9: a sequence of 8 tokens"));
  REQUIRE_THROWS_WITH(even_token_slices(8, 0), ContainsSubstring("--token-slices 0"));
  REQUIRE_THROWS_WITH(optimal_token_slices({.tokens = 2}, [](int64_t, int64_t) { return -1.0; }),
                      ContainsSubstring("takes -1 s"));
}
