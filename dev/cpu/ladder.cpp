// ladder.cpp: times the steps of a product on a CPU, then the trainer's own product, each with the share that it
// reaches of its instructions' peak.   make cpu-ladder && build/cpu_ladder [M N K]
#include <chrono>
#include <cstdio>
#include <cstdlib>
#include <functional>
#include <random>

#include "core/check.h"
#include "matmul_steps.h"
#include "ops/cpu/table.h"

using namespace llmc;

namespace {

// Seconds of the fastest of at least three calls.
double best_of(const std::function<void()>& call) {
  double best = 1e30, all = 0;
  for (int i = 0; i < 3 || (all < 0.5 && i < 100); ++i) {
    const auto begin = std::chrono::steady_clock::now();
    call();
    const double passed = std::chrono::duration<double>(std::chrono::steady_clock::now() - begin).count();
    best = std::min(best, passed), all += passed;
  }
  return best;
}

}  // namespace

int main(int argc, char** argv) try {
  CHECK(argc == 1 || argc == 4, "usage: cpu_ladder [M N K]");
  const steps::Sizes s = argc == 4 ? steps::Sizes{std::atoll(argv[1]), std::atoll(argv[2]), std::atoll(argv[3])}
                                   : steps::Sizes{1024, 3072, 768};
  CHECK(s.M > 0 && s.N > 0 && s.K > 0, "cpu_ladder: M, N and K must be positive numbers, not {} {} {}", argv[1],
        argv[2], argv[3]);
  std::mt19937_64 random(1);
  std::normal_distribution<float> draw;
  const auto filled = [&](int64_t n) {
    std::vector<float> values(static_cast<size_t>(n));
    for (float& value : values) value = draw(random);
    return values;
  };
  const std::vector<float> a = filled(s.M * s.K), b = filled(s.K * s.N);
  std::vector<bf16> narrow_a(a.size()), narrow_b(b.size());
  std::transform(a.begin(), a.end(), narrow_a.begin(), [](float x) { return bf16(x); });
  std::transform(b.begin(), b.end(), narrow_b.begin(), [](float x) { return bf16(x); });
  std::vector<float> c(static_cast<size_t>(s.M * s.N));
  const int all = omp_get_max_threads();
  std::vector<std::byte> scratch;
  const auto shape = [&](DType in, int threads) {
    const cpu::MatmulShape m{s.M, s.N,         s.K,      Transpose::no, Transpose::no, Accumulate::no,
                             in,  DType::fp32, Bias::no, threads};
    scratch.resize(std::max(scratch.size(), static_cast<size_t>(cpu::matmul_scratch(m))));
    return m;
  };

  const double flops = 2.0 * static_cast<double>(s.M) * static_cast<double>(s.N) * static_cast<double>(s.K);
  const double fp32_peak = cpu::products_of<float>(cpu::isa_in_use()).register_peak(1);
  std::printf("C (%ld, %ld) = A (%ld, %ld) B (%ld, %ld)\n\n%-58s %10s %14s\n", s.M, s.N, s.M, s.K, s.K, s.N, "step",
              "GFLOP/s", "of its peak");
  const auto row = [&](const std::string& name, double peak, const std::function<void()>& call) {
    const double rate = flops / best_of(call);
    std::printf("%-58s %10.1f %13.0f%%\n", name.c_str(), rate * 1e-9, 100 * rate / peak);
    std::fflush(stdout);
  };
  const auto step = [&](const char* name, auto* matmul) {
    row(name, fp32_peak, [&, matmul] { matmul(c.data(), a.data(), b.data(), s); });
  };
  step("1 three loops", &steps::matmul_loops);
  step("2 along rows", &steps::matmul_along_rows);
  step("3 blocks that fit into a cache", &steps::matmul_blocked);
  step("4 sums in registers", &steps::matmul_registers);
  step("5 packed operands", &steps::matmul_packed);
  for (size_t i = 0; i < cpu::isa_names.size(); ++i) {
    const cpu::Isa isa = static_cast<cpu::Isa>(i);
    if (!cpu::processor_has(isa) || isa >= cpu::Isa::pairs_stand_in) continue;
    for (const int threads : {1, all}) {
      if (threads == all && all == 1) continue;
      const std::string by = formatted(", {} thread{}", threads, threads == 1 ? "" : "s");
      if (isa < cpu::Isa::avx512_bf16) {
        const auto& products = cpu::products_of<float>(isa);
        row(std::string("6 ops/cpu/matmul.h, fp32, ") + cpu::name_of(isa) + by, products.register_peak(threads), [&] {
          const cpu::MatmulShape m = shape(DType::fp32, threads);
          products.matmul(c.data(), a.data(), b.data(), nullptr, scratch.data(), m);
        });
      } else {
        const auto& products = cpu::products_of<bf16>(isa);
        row(std::string("7 ops/cpu/matmul.h, bf16, ") + cpu::name_of(isa) + by, products.register_peak(threads), [&] {
          const cpu::MatmulShape m = shape(DType::bf16, threads);
          products.matmul_sum(c.data(), narrow_a.data(), narrow_b.data(), nullptr, scratch.data(), m);
        });
      }
    }
  }
  return 0;
} catch (const Error& error) {
  std::fprintf(stderr, "%s\n", error.what());
  return 1;
}
