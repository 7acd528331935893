// Operands of products in fp8, and the products, against the CPU's.
#include <cmath>

#include "cuda/device_test.h"
#include "ops/cpu/matmul.h"
#include "ops/cpu/quantise.h"
#include "ops/cuda/matmul.cuh"
#include "ops/cuda/quantise.cuh"

using namespace llmc;

namespace {

struct Way {
  ScaledBy by;
  bool sum_over_rows;
};
const std::vector<Way> ways = {
    {ScaledBy::segments, false}, {ScaledBy::segments, true}, {ScaledBy::tiles, false}, {ScaledBy::tiles, true}};

int64_t scale_count(ScaledBy by, int64_t M, int64_t K) {
  const int64_t of_K = ceil_div(K, fp8_block);
  return by == ScaledBy::segments ? of_K * M : ceil_div(M, fp8_block) * round_up(of_K, int64_t{4});
}

// x (R, C) as the CPU rounds it.
template <class T>
std::vector<T> rounded(const std::vector<T>& x, int64_t R, int64_t C, Way way) {
  std::vector<T> out(x.size());
  const bool tiles = way.by == ScaledBy::tiles;
  cpu::round_to_fp8(out.data(), x.data(), 1, R, C,
                    ScaleBlock{tiles || way.sum_over_rows ? fp8_block : 1, tiles || !way.sum_over_rows ? fp8_block : 1},
                    Fp8Format::e4m3, nullptr);
  return out;
}

// The numbers that E4M3 values (M, K) and their scales stand for, in the order of x (R, C).
template <class T>
std::vector<float> meant(const std::vector<e4m3>& values, const std::vector<float>& scales, int64_t R, int64_t C,
                         Way way) {
  const int64_t M = way.sum_over_rows ? C : R, K = way.sum_over_rows ? R : C;
  std::vector<float> x(values.size());
  for (int64_t m = 0; m < M; ++m)
    for (int64_t k = 0; k < K; ++k) {
      const int64_t scale = way.by == ScaledBy::segments
                                ? k / fp8_block * M + m
                                : m / fp8_block * round_up(ceil_div(K, fp8_block), int64_t{4}) + k / fp8_block;
      x[way.sum_over_rows ? k * C + m : m * C + k] = static_cast<float>(values[m * K + k]) * scales[scale];
    }
  return x;
}

template <class T>
std::vector<float> floats(const std::vector<T>& x) {
  std::vector<float> all;
  for (const T value : x) all.push_back(static_cast<float>(value));
  return all;
}

template <class T>
void quantise_as(Way way, const cuda::Fp8Operand& to, const T* x, int64_t R, int64_t C) {
  const cuda::Fp8Operand none;
  cuda::quantise<T>(way.sum_over_rows ? none : to, way.sum_over_rows ? to : none, x, R, C, way.by, nullptr);
}

// Rows of different size, as those of gradients.
template <class T>
std::vector<T> uneven_values(int64_t R, int64_t C, int seed) {
  std::vector<T> x = normal_values<T>(R * C, seed);
  for (int64_t r = 0; r < R; ++r)
    for (int64_t c = 0; c < C; ++c)
      store(x[r * C + c], static_cast<float>(x[r * C + c]) * std::exp2(static_cast<float>(r % 31 - 15)));
  return x;
}

// And columns, too: a block's numbers have more sizes than E4M3 has.
template <class T>
std::vector<T> uneven_everywhere(int64_t R, int64_t C, int seed) {
  std::vector<T> x = uneven_values<T>(R, C, seed);
  for (int64_t i = 0; i < R * C; ++i)
    store(x[i], static_cast<float>(x[i]) * std::exp2(static_cast<float>(i % C * 7 % 29 - 14)));
  return x;
}

}  // namespace

TEMPLATE_TEST_CASE("operands in fp8 are the CPU's, bit for bit", "[cuda]", float, bf16) {
  using T = TestType;
  const auto [R, C] = GENERATE(std::pair{16, 16}, std::pair{144, 272}, std::pair{144, 512});
  const Way way = ways[static_cast<size_t>(GENERATE(0, 1, 2, 3))];
  const std::vector<T> x = uneven_values<T>(R, C, 1), expected = rounded(x, R, C, way);
  const auto run = [&, R = R, C = C]() -> Outputs {
    DeviceArray<e4m3> values(R * C);
    DeviceArray<float> scales(std::vector<float>(
        static_cast<size_t>(scale_count(way.by, way.sum_over_rows ? C : R, way.sum_over_rows ? R : C))));
    DeviceArray<T> in(x);
    quantise_as<T>(way, {values, scales}, in, R, C);
    return {{"x", meant<T>(values.host(), scales.host(), R, C, way)}};
  };
  const Outputs found = check_kernel(run, {{"x", expected}}, 1e-12);
  REQUIRE(found[0].values == floats(expected));
  if (C != 272 || sizeof(T) == 4) return;
  if (way.by == ScaledBy::tiles)  // a thread finds the largest of its own copies; nothing is reduced after it
    check_barriers(run, {"quantise.cuh: __syncthreads();  // the tile is whole",
                         "reduce.cuh: __syncthreads();  // partial is read; the next call may write it"});
  else if (way.sum_over_rows) check_barriers(run);
}

TEST_CASE("an operand in fp8 has the scales of its own numbers, not of those that were there before", "[cuda]") {
  const int64_t R = 144, C = 272;
  const Way way = ways[static_cast<size_t>(GENERATE(0, 1, 2, 3))];
  const std::vector<bf16> x = uneven_values<bf16>(R, C, 1);
  DeviceArray<e4m3> values(R * C);
  DeviceArray<float> scales(std::vector<float>(
      static_cast<size_t>(scale_count(way.by, way.sum_over_rows ? C : R, way.sum_over_rows ? R : C))));
  for (const float size : {1.0f, 0x1p-9f, 1.0f}) {
    std::vector<bf16> scaled = x;
    for (bf16& value : scaled) store(value, static_cast<float>(value) * size);
    DeviceArray<bf16> in(scaled);
    quantise_as<bf16>(way, {values, scales}, in, R, C);
    REQUIRE(meant<bf16>(values.host(), scales.host(), R, C, way) == floats(rounded(scaled, R, C, way)));
  }
}

TEMPLATE_TEST_CASE("an operand in fp8 for sums along rows and columns is both of them", "[cuda]", float, bf16) {
  using T = TestType;
  const int64_t R = 144, C = 272;
  const std::vector<T> x = uneven_values<T>(R, C, 1);
  const Way rows{ScaledBy::segments, false}, columns{ScaledBy::segments, true};
  const auto run = [&]() -> Outputs {
    DeviceArray<e4m3> values(R * C), turned(R * C);
    DeviceArray<float> scales(std::vector<float>(scale_count(rows.by, R, C))),
        turned_scales(std::vector<float>(scale_count(columns.by, C, R)));
    DeviceArray<T> in(x);
    cuda::quantise<T>({values, scales}, {turned, turned_scales}, in, R, C, ScaledBy::segments, nullptr);
    return {{"rows", meant<T>(values.host(), scales.host(), R, C, rows)},
            {"columns", meant<T>(turned.host(), turned_scales.host(), R, C, columns)}};
  };
  check_kernel(run, {{"rows", rounded(x, R, C, rows)}, {"columns", rounded(x, R, C, columns)}}, 1e-12);
}

TEMPLATE_TEST_CASE("numbers rounded to fp8 are the CPU's, bit for bit, for several matrices and for some of the rows",
                   "[cuda]", float, bf16) {
  using T = TestType;
  const Fp8Format format = GENERATE(Fp8Format::e4m3, Fp8Format::e5m2);
  const ScaleBlock block =
      GENERATE(ScaleBlock{1, 128}, ScaleBlock{128, 1}, ScaleBlock{128, 128}, ScaleBlock{1, 32}, ScaleBlock{32, 1});
  const int64_t G = GENERATE(1, 2), R = 131, C = 137, n = G * R * C;
  const std::vector<int32_t> count = {100};
  std::vector<T> x = uneven_everywhere<T>(G * R, C, 1), expected(x.size());
  store(x[3 * C + 5], NAN);
  cpu::round_to_fp8(expected.data(), x.data(), G, R, C, block, format, G == 1 ? count.data() : nullptr);
  const auto run = [&]() -> Outputs {
    DeviceArray<T> in(x), out(std::vector<T>(static_cast<size_t>(n)));
    DeviceArray<int32_t> rows(count);
    const int32_t* const all = nullptr;
    cuda::round_to_fp8<T>(out, in, G, R, C, block, format, G == 1 ? rows : all, nullptr);
    return {{"x", floats(out.host())}};
  };
  const std::vector<float> found = run()[0].values, wanted = floats(expected);
  for (size_t i = 0; i < found.size(); ++i)
    if (std::bit_cast<uint32_t>(found[i]) != std::bit_cast<uint32_t>(wanted[i]) &&
        !(std::isnan(found[i]) && std::isnan(wanted[i])))
      FAIL("element " << i << " is " << found[i] << ", not " << wanted[i]);
  if (G == 1 && block.rows == 128 && block.columns == 128 && sizeof(T) == 2 && format == Fp8Format::e4m3)
    check_barriers(run, {"reduce.cuh: __syncthreads();  // partial is read; the next call may write it"});
}

TEMPLATE_TEST_CASE("matrices rounded to fp8 with one scale each are the CPU's, bit for bit", "[cuda]", float, bf16) {
  using T = TestType;
  const Fp8Format format = GENERATE(Fp8Format::e4m3, Fp8Format::e5m2);
  const int64_t G = GENERATE(1, 2), R = 31, C = G == 1 ? 2237 : 37, n = G * R * C;  // more than all threads at once
  const std::vector<int32_t> count = {30};
  std::vector<T> x = uneven_everywhere<T>(G * R, C, 1);
  store(x[0], 0x1p33f);  // the scale of the first matrix is that of its first number
  std::vector<T> expected(x.size());
  std::vector<float> largest(static_cast<size_t>(G));
  cpu::round_whole_to_fp8(expected.data(), largest.data(), x.data(), G, R, C, format, G == 1 ? count.data() : nullptr);
  const auto run = [&]() -> Outputs {
    DeviceArray<T> in(x), out(std::vector<T>(static_cast<size_t>(n)));
    DeviceArray<float> maxima(G * cuda::whole_parts);
    DeviceArray<int32_t> rows(count);
    const int32_t* const all = nullptr;
    cuda::round_whole_to_fp8<T>(out, maxima, in, G, R, C, format, G == 1 ? rows : all, nullptr);
    return {{"x", floats(out.host())}};
  };
  REQUIRE(run()[0].values == floats(expected));
}

TEMPLATE_TEST_CASE("parts of matrices in tiles have the CPU's scales and numbers in fp8", "[cuda]", float, bf16) {
  using T = TestType;
  const TiledPart part{2, 131, 137, GENERATE(int64_t{0}, int64_t{5000}), 20000};
  std::vector<T> x = uneven_values<T>(part.n, 1, 1);
  for (int64_t i = 0; i < part.n; ++i)  // the tiles from row or column 128 on have larger numbers
    if (const int64_t at = part.first + i; at / part.columns % part.rows >= fp8_block || at % part.columns >= fp8_block)
      store(x[i], static_cast<float>(x[i]) * 0x1p20f);
  std::vector<float> maxima(part.tiles()), scales(part.tiles());
  std::vector<e4m3> numbers(part.n);
  std::vector<T> back(part.n);
  cpu::tile_maxima(maxima.data(), x.data(), part);
  cpu::scales_of_ranks(scales.data(), maxima.data(), 1, part.tiles());
  cpu::tiles_to_fp8(numbers.data(), x.data(), scales.data(), part);
  cpu::tiles_from_fp8(back.data(), numbers.data(), scales.data(), part);
  const auto run = [&]() -> Outputs {
    DeviceArray<T> in(x), out(std::vector<T>(x.size()));
    DeviceArray<e4m3> in_fp8(std::vector<e4m3>(x.size()));
    DeviceArray<float> largest(std::vector<float>(maxima.size())), found(std::vector<float>(maxima.size()));
    cuda::tile_maxima<T>(largest, in, part, nullptr);
    cuda::scales_of_ranks(found, largest, 1, part.tiles(), nullptr);
    cuda::tiles_to_fp8<T>(in_fp8, in, found, part, nullptr);
    cuda::tiles_from_fp8<T>(out, in_fp8, found, part, nullptr);
    return {{"scales", found.host()}, {"x", out.host()}};
  };
  const Outputs found = check_kernel(run, {{"scales", scales}, {"x", back}}, 1e-12);
  REQUIRE(found[1].values == floats(back));
}

TEST_CASE("tiles that ranks share have the scales of the largest of their numbers", "[cuda]") {
  const int64_t ranks = 3, n = 300;
  const std::vector<float> maxima = uneven_values<float>(ranks * n, 1, 1);
  std::vector<float> scales(n);
  cpu::scales_of_ranks(scales.data(), maxima.data(), ranks, n);
  check_kernel(
      [&]() -> Outputs {
        DeviceArray<float> of_ranks(maxima), found(n);
        cuda::scales_of_ranks(found, of_ranks, ranks, n, nullptr);
        return {{"scales", found.host()}};
      },
      {{"scales", scales}}, 1e-12);
}

TEST_CASE("a block with a number that is not finite is NaN in fp8", "[cuda]") {
  const float bad = GENERATE(INFINITY, -INFINITY, NAN);
  const Way way = ways[static_cast<size_t>(GENERATE(0, 1, 2, 3))];
  const int64_t R = 144, C = 144, at = 130 * C + 131;  // in the last block of every kind
  std::vector<bf16> x = normal_values<bf16>(R * C, 1);
  store(x[at], bad);
  DeviceArray<e4m3> values(R * C);
  DeviceArray<float> scales(std::vector<float>(scale_count(way.by, R, C)));
  DeviceArray<bf16> in(x);
  quantise_as<bf16>(way, {values, scales}, in, R, C);
  const std::vector<float> found = meant<bf16>(values.host(), scales.host(), R, C, way);
  const std::vector<bf16> expected = rounded(x, R, C, way);
  REQUIRE(std::isnan(found[at]));
  size_t differ = 0;
  for (size_t i = 0; i < x.size(); ++i) differ += std::isnan(found[i]) != std::isnan(static_cast<float>(expected[i]));
  REQUIRE(differ == 0);
}

TEMPLATE_TEST_CASE("products in fp8 match the CPU's of the same numbers", "[matmul][cuda]", float, bf16) {
  using Out = TestType;
  // A (M, K) and B (N, K) with the scales of a forward and of a weight's gradient.
  const auto [M, N, K] = GENERATE(std::tuple{16, 32, 48}, std::tuple{144, 160, 272});
  const ScaledBy of_b = GENERATE(ScaledBy::segments, ScaledBy::tiles);
  const Accumulate accumulate = std::is_same_v<Out, float> ? GENERATE(Accumulate::no, Accumulate::yes) : Accumulate::no;
  const std::vector<bf16> a = uneven_values<bf16>(M, K, 1), b = uneven_values<bf16>(N, K, 2);
  std::vector<Out> c = normal_values<Out>(M * N, 3);
  const cpu::MatmulShape of_cpu{M,        N, K, Transpose::no, Transpose::yes, accumulate, DType::bf16, dtype_of<Out>(),
                                Bias::no, 1};
  std::vector<Out> expected = c;
  std::vector<std::byte> cpu_scratch(static_cast<size_t>(cpu::matmul_scratch(of_cpu)));
  cpu::matmul(expected.data(), rounded(a, M, K, {ScaledBy::segments, false}).data(),
              rounded(b, N, K, {of_b, false}).data(), static_cast<const bf16*>(nullptr), cpu_scratch.data(), of_cpu);
  const auto run = [&, M = M, N = N, K = K]() -> Outputs {
    DeviceArray<bf16> as(a), bs(b);
    DeviceArray<e4m3> a8(M * K), b8(N * K);
    DeviceArray<float> a_scales(std::vector<float>(scale_count(ScaledBy::segments, M, K))),
        b_scales(std::vector<float>(scale_count(of_b, N, K)));
    DeviceArray<Out> sum(c);
    DeviceArray<char> workspace(1 << 20);
    quantise_as<bf16>({ScaledBy::segments, false}, {a8, a_scales}, as, M, K);
    quantise_as<bf16>({of_b, false}, {b8, b_scales}, bs, N, K);
    cuda::MatmulPlans plans(1 << 20);
    plans
        .prepare({M, N, K, Transpose::no, Transpose::yes, accumulate, DType::e4m3, dtype_of<Out>(), Bias::no, Tf32::no,
                  16, ScaledBy::segments, of_b})
        .run({sum, a8, b8, nullptr, workspace, a_scales, b_scales}, nullptr);
    return {{"c", sum.host()}};
  };
#ifdef __CUDACC__
  // Hopper adds 32 products to a sum at a time, and cuts off what is below 13 bits after the first of the largest.
  constexpr double in_fp32 = 128 / 32 * 0x1p-13;
#else
  constexpr double in_fp32 = 2e-6;
#endif
  check_kernel(run, {{"c", expected}}, sizeof(Out) == 4 ? in_fp32 : 1e-3);
}
