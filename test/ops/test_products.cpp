// Products on CPUs: every instruction set that this processor has, against fp64 and against itself.
#include <random>

#include "ops/op_bench.h"
#include "ops/sets_here.h"

using namespace llmc;
using cpu::Isa;

namespace {

// A product with inputs of its own, behind which nothing may be read or written.
template <class T, class Out>
struct Product {
  cpu::MatmulShape shape;
  std::vector<T> a, b, bias;
  std::vector<Out> before;

  Product(const cpu::MatmulShape& s, std::mt19937_64& random) : shape(s) {
    std::normal_distribution<double> draw;
    const auto fill = [&](auto& values, int64_t n) {
      values.resize(static_cast<size_t>(n));
      for (auto& value : values) store(value, static_cast<accumulator_t<std::decay_t<decltype(value)>>>(draw(random)));
    };
    fill(a, s.M * s.K);
    fill(b, s.K * s.N);
    fill(bias, s.bias == Bias::yes ? s.N : 0);
    fill(before, s.M * s.N);
  }
  std::vector<Out> computed(Isa isa, int threads) const {
    cpu::MatmulShape s = shape;
    s.threads = threads;
    std::vector<Out> c = before;
    if (s.accumulate == Accumulate::no) std::fill(c.begin(), c.end(), Out(NAN));
    std::vector<std::byte> scratch(static_cast<size_t>(cpu::matmul_scratch(s)), std::byte{0xff});
    const T* with = bias.empty() ? nullptr : bias.data();
    const cpu::ProductsOf<T>& products = cpu::products_of<T>(isa);
    if constexpr (std::is_same_v<Out, T>) products.matmul(c.data(), a.data(), b.data(), with, scratch.data(), s);
    else products.matmul_sum(c.data(), a.data(), b.data(), with, scratch.data(), s);
    return c;
  }
  // How far an element may be from its value in fp64, in units of that distance: each of its K + 2 additions rounds to
  // 24 bits what is at most the sum of all magnitudes, and in bf16 the result is rounded to 8 bits.
  double worst(const std::vector<Out>& c) const {
    const auto [M, N, K] = std::tuple(shape.M, shape.N, shape.K);
    double worst = 0;
    for (int64_t i = 0; i < M; ++i)
      for (int64_t j = 0; j < N; ++j) {
        double sum = 0, magnitude = 0;
        const auto add = [&](double x) { sum += x, magnitude += std::abs(x); };
        for (int64_t k = 0; k < K; ++k)
          add(static_cast<double>(a[static_cast<size_t>(shape.a == Transpose::yes ? k * M + i : i * K + k)]) *
              static_cast<double>(b[static_cast<size_t>(shape.b == Transpose::yes ? j * K + k : k * N + j)]));
        if (!bias.empty()) add(static_cast<double>(bias[static_cast<size_t>(j)]));
        const auto at = static_cast<size_t>(i * N + j);
        if (shape.accumulate == Accumulate::yes) add(static_cast<double>(before[at]));
        const double unit = sizeof(T) == 8 ? 0x1p-53 : 0x1p-24;
        const double allowed =
            static_cast<double>(K + 2) * unit * magnitude + (sizeof(Out) == 2 ? 0x1p-8 * std::abs(sum) : 0) + 1e-37;
        const double distance = std::abs(static_cast<double>(c[at]) - sum);
        worst = std::max(worst, std::isnan(distance) ? INFINITY : distance / allowed);
      }
    return worst;
  }
};

template <class Out>
std::string bytes_of(const std::vector<Out>& c) {
  return {reinterpret_cast<const char*>(c.data()), c.size() * sizeof(Out)};
}

template <class T, class Out>
void check(const cpu::MatmulShape& shape, std::mt19937_64& random) {
  const Product<T, Out> product(shape, random);
  for (const Isa isa : sets_here()) {
    const std::vector<Out> c = product.computed(isa, 1);
    INFO(to_string(shape) << ", " << cpu::name_of(isa));
    REQUIRE(product.worst(c) <= 1);
    if (shape.threads > 1) REQUIRE(bytes_of(product.computed(isa, shape.threads)) == bytes_of(c));
    if (std::is_same_v<T, double>) break;
  }
}

// Sizes of one to some hundred, small ones as likely as large ones; rarely a depth that takes several blocks.
void random_products(int count, uint64_t seed) {
  std::mt19937_64 random(seed);
  const auto size = [&](double most) {
    return static_cast<int64_t>(std::exp(std::uniform_real_distribution<double>(0, std::log(most))(random)));
  };
  const auto one_of_two = [&] { return random() % 2 == 0; };
  for (int i = 0; i < count; ++i) {
    const bool deep = i % 100 == 99;
    cpu::MatmulShape s{.M = size(deep ? 40 : 300),
                       .N = size(deep ? 40 : 300),
                       .K = deep                 ? 4000 + size(6000)
                            : random() % 50 == 0 ? 0
                                                 : size(400),
                       .a = one_of_two() ? Transpose::yes : Transpose::no,
                       .b = one_of_two() ? Transpose::yes : Transpose::no,
                       .accumulate = one_of_two() ? Accumulate::yes : Accumulate::no,
                       .in = DType::fp32,
                       .out = DType::fp32,
                       .bias = one_of_two() ? Bias::yes : Bias::no,
                       .threads = 1 + static_cast<int>(random() % 3)};
    if (random() % 50 == 0) (one_of_two() ? s.M : s.N) = 0;
    switch (random() % 4) {
      case 0: check<float, float>(s, random); break;
      case 1: s.in = DType::bf16, check<bf16, float>(s, random); break;
      case 2: s.in = s.out = DType::bf16, check<bf16, bf16>(s, random); break;
      default: s.in = s.out = DType::fp64, check<double, double>(s, random);
    }
  }
}

}  // namespace

TEST_CASE("random products are as near to fp64 as rounding allows, by every instruction set, with any threads",
          "[ops][matmul]") {
  random_products(400, 20261124);
}
TEST_CASE("twenty thousand random products are right", "[ops][matmul][long]") { random_products(20'000, 1); }

// A micro-batch divides its rows in many ways: none changes them (contract 4).
TEST_CASE("a row of a product has the same bits whatever other rows and columns there are", "[ops][matmul]") {
  std::mt19937_64 random(5);
  const cpu::MatmulShape shape{.M = 61,
                               .N = 101,
                               .K = 333,
                               .a = Transpose::no,
                               .b = Transpose::yes,
                               .accumulate = Accumulate::no,
                               .in = DType::bf16,
                               .out = DType::fp32,
                               .bias = Bias::no,
                               .threads = 2};
  const Product<bf16, float> all(shape, random);
  for (const Isa isa : sets_here()) {
    const std::vector<float> c = all.computed(isa, 2);
    for (const int64_t rows : {1, 2, 13, 14, 15, 60}) {
      Product<bf16, float> some = all;
      some.shape.M = rows, some.shape.N = 100 - rows;
      const std::vector<float> part = some.computed(isa, 1);
      for (int64_t i = 0; i < rows; ++i)
        for (int64_t j = 0; j < some.shape.N; ++j)
          REQUIRE(part[static_cast<size_t>(i * some.shape.N + j)] == c[static_cast<size_t>(i * shape.N + j)]);
    }
  }
}

// So tests of the stand-ins are tests of the instructions, whatever the processor.
TEST_CASE("pairs and tiles of bf16 have the bits of their stand-ins in plain C++, where the processor has them",
          "[ops][matmul]") {
  std::mt19937_64 random(9);
  for (const auto& [real, stand_in] :
       {std::pair{Isa::avx512_bf16, Isa::pairs_stand_in}, {Isa::amx, Isa::tiles_stand_in}})
    for (const int64_t K : {1, 2, 31, 63, 64, 333, 1500}) {
      if (!cpu::processor_has(real)) continue;
      const cpu::MatmulShape shape{.M = 45,
                                   .N = 70,
                                   .K = K,
                                   .a = K % 2 == 0 ? Transpose::yes : Transpose::no,
                                   .b = Transpose::yes,
                                   .accumulate = Accumulate::no,
                                   .in = DType::bf16,
                                   .out = DType::fp32,
                                   .bias = Bias::no,
                                   .threads = 1};
      Product<bf16, float> product(shape, random);
      for (size_t i = 0; i < product.a.size(); i += 7) product.a[i].bits = static_cast<uint16_t>(random() % 0x7f80);
      INFO(cpu::name_of(real) << ", depth " << K);
      const std::vector<float> c = product.computed(real, 1), same = product.computed(stand_in, 1);
      for (size_t i = 0; i < c.size(); ++i)
        if (!std::isnan(c[i]) || !std::isnan(same[i]))
          REQUIRE(std::bit_cast<uint32_t>(c[i]) == std::bit_cast<uint32_t>(same[i]));
    }
}

TEST_CASE("an instruction set that there is not, or that the processor lacks, is refused by name", "[ops][matmul]") {
  REQUIRE_ERROR(cpu::isa_of("sse5", "--cpu-isa"), "--cpu-isa sse5: no such instruction set; use one of portable, avx2");
  REQUIRE(cpu::isa_of("portable", "--cpu-isa") == Isa::portable);
  if (cpu::processor_isa() < Isa::avx512)
    REQUIRE_ERROR(cpu::isa_of("avx512", "--cpu-isa"), "--cpu-isa avx512: this processor has ");
}
