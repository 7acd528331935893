// The order of rows that arrive from several ranks, the tables of sequences that ranks share and the biases of experts:
// bitwise equal to the CPU's.
#include "cuda/device_test.h"
#include "ops/cpu/expert_ranks.h"
#include "ops/cuda/expert_ranks.cuh"

using namespace llmc;

namespace {

using Integers = std::vector<int32_t>;
Integers stale(int64_t n) { return Integers(static_cast<size_t>(n), -1); }

Integers random_counts(int64_t n, int32_t most, uint64_t seed) {
  std::mt19937_64 random(seed);
  Integers counts;
  for (int64_t i = 0; i < n; ++i) counts.push_back(static_cast<int32_t>(random() % static_cast<uint64_t>(most + 1)));
  return counts;
}

void check_bits(const std::function<Outputs()>& run, const Outputs& right) {
  REQUIRE(same_bits(check_kernel(run, right, 1e-30), right));
}

}  // namespace

TEST_CASE("the kernels that order arriving rows match the CPU, bit by bit", "[ep][cuda]") {
  struct Sizes {
    int64_t P, E;
    int32_t most;
  };
  const Sizes s = GENERATE(Sizes{1, 1, 3}, Sizes{3, 4, 2}, Sizes{2, 300, 1}, Sizes{40, 30, 2}, Sizes{4, 1, 0});
  const int kind = GENERATE(0, 1, 2);  // of counts: any; all of the last rank for its last expert; of the first
  const int64_t gaps = GENERATE(-1, 0, 3), runs = s.P * s.E;
  Integers counts = random_counts(runs, s.most, 1);
  if (kind > 0) {
    std::fill(counts.begin(), counts.end(), 0);
    (kind == 1 ? counts.back() : counts.front()) = 5;
  }
  int64_t largest = 0, all = 0;
  for (int64_t p = 0; p < s.P; ++p) {
    int64_t rows = 0;
    for (int64_t e = 0; e < s.E; ++e) rows += counts[static_cast<size_t>(p * s.E + e)];
    largest = std::max(largest, rows);
    all += rows;
  }
  const int64_t stride = gaps < 0 ? 0 : largest + gaps, rows = stride == 0 ? all + 4 : s.P * stride;
  Integers places = stale(rows), offsets = stale(s.E + 1), scratch = stale(s.P), per_expert = stale(s.E);
  cpu::arrival_plan(places.data(), offsets.data(), scratch.data(), counts.data(), s.P, s.E, rows, stride);
  cpu::expert_counts(per_expert.data(), offsets.data(), s.E);
  const auto run = [&]() -> Outputs {
    DeviceArray<int32_t> in(counts), to(Integers(places.size(), 7)), begin(s.E + 1),
        work(cuda::arrival_plan_scratch(s.P, s.E)), per(s.E);
    cuda::arrival_plan(to, begin, work, in, s.P, s.E, rows, stride, nullptr);
    cuda::expert_counts(per, begin, s.E, nullptr);
    return {{"places", to.host()}, {"offsets", begin.host()}, {"counts", per.host()}};
  };
  check_bits(run, {{"places", places}, {"offsets", offsets}, {"counts", per_expert}});
}

TEST_CASE("the kernels that join the segments of a sequence match the CPU, bit by bit", "[ep][cuda]") {
  const int64_t G = 3, S = 4, B = 3, E = GENERATE(1, 5, 127, 300);
  // Each sequence on some ranks, in an order of its own; two segments are not there.
  const Integers ids = {8, 1, 4, 0, 9, 10, 5, 6, 2, 3}, begins = {0, 3, 4, 10};
  Integers sequences = stale(G * S);
  for (int32_t b = 0; b < B; ++b)
    for (int32_t i = begins[static_cast<size_t>(b)]; i < begins[static_cast<size_t>(b) + 1]; ++i)
      sequences[static_cast<size_t>(ids[static_cast<size_t>(i)])] = b;
  const Integers all_counts = random_counts(G * S * E, 50, 2);
  const auto all_p = normal_values<float>(G * S * E, 3), all_sums = normal_values<float>(G * S * 2, 4);
  Integers counts = stale(B * E);
  std::vector<float> p(static_cast<size_t>(B * E)), sums(static_cast<size_t>(B * 2));
  cpu::join_segments(counts.data(), p.data(), sums.data(), all_counts.data(), all_p.data(), all_sums.data(), ids.data(),
                     begins.data(), B, E);
  Outputs right = {{"counts", counts}, {"probabilities", p}, {"sums", sums}};
  for (int64_t g = 0; g < G; ++g) {
    Integers of_rank = stale(S * E), starts = stale(S * E);
    cpu::segment_starts(of_rank.data(), starts.data(), all_counts.data(), sequences.data(), ids.data(), begins.data(),
                        g, S, E);
    right.emplace_back("counts of a rank", of_rank);
    right.emplace_back("starts of a rank", starts);
  }
  const auto run = [&]() -> Outputs {
    DeviceArray<int32_t> in(all_counts), of(sequences), order(ids), begin(begins), out(B * E);
    DeviceArray<float> in_p(all_p), in_sums(all_sums), out_p(B * E), out_sums(B * 2);
    cuda::join_segments(out, out_p, out_sums, in, in_p, in_sums, order, begin, B, E, nullptr);
    Outputs outputs = {{"counts", out.host()}, {"probabilities", out_p.host()}, {"sums", out_sums.host()}};
    for (int64_t g = 0; g < G; ++g) {
      DeviceArray<int32_t> of_rank(S * E), starts(S * E);
      cuda::segment_starts(of_rank, starts, in, of, order, begin, g, S, E, nullptr);
      outputs.emplace_back("counts of a rank", of_rank.host());
      outputs.emplace_back("starts of a rank", starts.host());
    }
    return outputs;
  };
  check_bits(run, right);
}

TEST_CASE("the kernels of the biases of experts match the CPU, bit by bit", "[ep][cuda]") {
  const int64_t E = GENERATE(1, 4, 300), B = 3;
  const double allowed = GENERATE(0.0, 1.0);
  const Integers counts = random_counts(B * E, 2, 5);  // so few that some have the mean
  const auto before = normal_values<float>(E, 6);
  const std::vector<double> control = {1, 1, allowed, 0};
  std::vector<double> totals(static_cast<size_t>(E), 1);
  std::vector<float> biases = before;
  cpu::add_expert_counts(totals.data(), counts.data(), B, E);
  cpu::update_expert_biases(biases.data(), totals.data(), control.data(), E, 0.125f);
  const auto run = [&]() -> Outputs {
    DeviceArray<int32_t> in(counts);
    DeviceArray<double> sums(std::vector<double>(static_cast<size_t>(E), 1)), rule(control);
    DeviceArray<float> out(before);
    cuda::add_expert_counts(sums, in, B, E, nullptr);
    cuda::update_expert_biases(out, sums, rule, E, 0.125f, nullptr);
    return {{"totals", sums.host()}, {"biases", out.host()}};
  };
  check_bits(run, {{"totals", totals}, {"biases", biases}});
}
