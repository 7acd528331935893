// The samples of mixed sources and of changing lengths (contract 8), beside counting one by one.
#include <cmath>
#include <random>

#include "catch2.h"
#include "data/dataloader.h"
#include "helpers.h"

using namespace llmc;

TEST_CASE("after every sample, the count of each source is within its bound of its share", "[data][recipe]") {
  std::mt19937_64 random(1);
  for (int trial = 0; trial < 60; ++trial) {
    const size_t n = trial < 20 ? 2 : 1 + random() % 13;
    std::vector<int64_t> weights(n);
    for (int64_t& w : weights) w = static_cast<int64_t>(random() % (trial % 2 == 0 ? 10 : Mixture::whole));
    weights[random() % n] += 1;
    double all = 0;
    for (const int64_t w : weights) all += static_cast<double>(w);
    const Mixture mixture(weights);
    const double bound = n == 2 ? 0.5 : std::ceil(std::log2(static_cast<double>(n))) / 2;
    std::vector<int64_t> counts(n);
    for (int64_t i = 0; i < 2000; ++i) {
      const Mixture::Place place = mixture.at(i);
      REQUIRE(place.before == counts[place.source]);
      REQUIRE(weights[place.source] > 0);
      ++counts[place.source];
      REQUIRE(mixture.counts(i + 1) == counts);
      for (size_t s = 0; s < n; ++s) {
        const double share = static_cast<double>(weights[s]) / all * static_cast<double>(i + 1);
        REQUIRE(std::abs(static_cast<double>(counts[s]) - share) <= bound + 1e-9);
      }
    }
  }
}

TEST_CASE("a mixture counts 10^15 samples without overflow", "[data][recipe]") {
  const Mixture mixture(Mixture::shares({0.7, 0.2, 1e-9, 0.1}));
  const int64_t n = 1'000'000'000'000'000;
  std::vector<int64_t> before = mixture.counts(n);
  REQUIRE(before[0] + before[1] + before[2] + before[3] == n);
  REQUIRE(std::abs(static_cast<double>(before[0]) - 0.7e15 / (1 + 1e-9)) < 1e4);
  for (int64_t i = n; i < n + 100; ++i) {
    const Mixture::Place place = mixture.at(i);
    REQUIRE(place.before == before[place.source]++);
  }
}

TEST_CASE("equal proportions are equal mixtures", "[data][recipe]") {
  REQUIRE(Mixture::shares({0.7, 0.3}) == Mixture::shares({7, 3}));
  REQUIRE(Mixture::shares({1}) == Mixture::shares({5}));
}

TEST_CASE("no token is repeated or skipped where mix and length change", "[data][recipe]") {
  std::mt19937_64 random(2);
  for (int trial = 0; trial < 40; ++trial) {
    const int64_t block = std::vector<int64_t>{12, 16, 24, 60}[random() % 4];
    std::vector<int64_t> lengths;
    for (int64_t T = 1; T <= block; ++T)
      if (block % T == 0) lengths.push_back(T);
    const size_t n = 1 + random() % 3;
    std::vector<int64_t> epoch_tokens(n), next(n), epochs(n), samples(n);
    for (int64_t& tokens : epoch_tokens) tokens = block * (1 + static_cast<int64_t>(random() % 7));
    std::vector<SourcePosition> at(n);
    for (int stretch = 0; stretch < 6; ++stretch) {
      const int64_t T = lengths[random() % lengths.size()];
      std::vector<int64_t> weights(n);
      for (int64_t& w : weights) w = static_cast<int64_t>(random() % 4);
      weights[random() % n] += 1;
      std::vector<SampleOrder::Source> sources;
      for (size_t s = 0; s < n; ++s) sources.push_back({epoch_tokens[s], at[s]});
      const SampleOrder order(sources, weights, T);
      const int64_t count = static_cast<int64_t>(random() % 40);
      int64_t targets = 0;
      for (int64_t i = 0; i < count; ++i) {
        const SampleOrder::Place place = order.at(i);
        REQUIRE(order.targets(i) == targets);
        // It begins where the source's last sample ended, and ends at the next multiple of its length.
        REQUIRE(place.token == next[place.source]);
        REQUIRE(place.epoch == epochs[place.source]);
        REQUIRE((place.length >= 1 && place.length <= T && (place.token + place.length) % T == 0));
        REQUIRE(place.token / block == (place.token + place.length - 1) / block);
        targets += place.length;
        next[place.source] += place.length, ++samples[place.source];
        if (next[place.source] == epoch_tokens[place.source]) next[place.source] = 0, ++epochs[place.source];
      }
      at = order.after(count);
      for (size_t s = 0; s < n; ++s) REQUIRE(at[s] == SourcePosition{epochs[s], next[s], samples[s]});
    }
  }
}

TEST_CASE("every epoch of every source has each block once, in an order of its own", "[data][recipe]") {
  BlockOrder web(37, true, 5, "web", {}), code(37, true, 5, "code", {}), only(37, true, 5, "", {});
  bool differ = false;
  for (int64_t epoch = 0; epoch < 4; ++epoch) {
    std::vector<int64_t> seen(37);
    for (int64_t i = 0; i < 37; ++i) {
      ++seen[static_cast<size_t>(web.at(epoch, i))];
      differ |= web.at(epoch, i) != code.at(epoch, i) && web.at(epoch, i) != only.at(epoch, i);
    }
    REQUIRE(seen == std::vector<int64_t>(37, 1));
  }
  REQUIRE(differ);
}

TEST_CASE("shorter samples are the parts of a block; the rest of one is padded where a longer length begins",
          "[data][recipe]") {
  const TempDir dir;
  std::vector<uint16_t> tokens;
  for (uint16_t t = 0; t < 49; ++t) tokens.push_back(t);
  write_shard(dir / "x.bin", tokens);
  const TokenShards shards(dir / "x.bin", 12);  // 4 blocks
  const auto loader = [&](SourcePosition begin, int64_t T) {
    return DataLoader({{shards, BlockOrder(4, false, 0, "", {})}}, SampleOrder({{48, begin}}, {1}, T), T, 100, 15);
  };
  std::vector<int32_t> read, targets, positions;
  DataLoader fours = loader({}, 4);
  fours.read_batch(0, 0, {.batch_size = 4}, read, targets, positions);
  for (int32_t i = 0; i < 16; ++i)
    REQUIRE((read[static_cast<size_t>(i)] == i && targets[static_cast<size_t>(i)] == i + 1));
  REQUIRE(positions == std::vector<int32_t>{0, 1, 2, 3, 0, 1, 2, 3, 0, 1, 2, 3, 0, 1, 2, 0});  // token 15 begins a text
  DataLoader sixes = loader({.epoch = 0, .tokens = 16, .samples = 4}, 6);
  sixes.read_batch(0, 0, {.batch_size = 2}, read, targets, positions);
  REQUIRE(read == std::vector<int32_t>{16, 17, 0, 0, 0, 0, 18, 19, 20, 21, 22, 23});
  REQUIRE(targets == std::vector<int32_t>{17, 18, -1, -1, -1, -1, 19, 20, 21, 22, 23, 24});
  REQUIRE(sixes.name_of_sample(1) == "part 1 of 1");
}
