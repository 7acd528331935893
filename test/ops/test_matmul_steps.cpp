// The steps of dev/cpu/ all compute the same product.
#include <random>

#include "catch2.h"
#include "dev/cpu/matmul_steps.h"

using namespace llmc;

TEST_CASE("every step of the ladder of products on CPUs computes the product", "[ops][matmul]") {
  std::mt19937_64 random(2);
  for (const steps::Sizes s : {steps::Sizes{1, 1, 1}, {7, 33, 5}, {6, 32, 256}, {13, 600, 300}, {20, 64, 700}}) {
    std::vector<float> a(static_cast<size_t>(s.M * s.K)), b(static_cast<size_t>(s.K * s.N));
    for (std::vector<float>* x : {&a, &b})
      for (float& value : *x) value = static_cast<float>(static_cast<int64_t>(random() % 9) - 4);  // all sums are exact
    std::vector<float> expected(static_cast<size_t>(s.M * s.N));
    steps::matmul_loops(expected.data(), a.data(), b.data(), s);
    double first = 0;
    for (int64_t k = 0; k < s.K; ++k) first += a[static_cast<size_t>(k)] * b[static_cast<size_t>(k * s.N)];
    REQUIRE(expected[0] == static_cast<float>(first));
    for (auto* step :
         {&steps::matmul_along_rows, &steps::matmul_blocked, &steps::matmul_registers, &steps::matmul_packed}) {
      std::vector<float> c(expected.size(), NAN);
      step(c.data(), a.data(), b.data(), s);
      REQUIRE(c == expected);
    }
  }
}
