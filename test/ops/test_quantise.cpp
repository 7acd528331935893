// Numbers in fp8, and products of them, against plain definitions in fp64.
#include <cmath>

#include "catch2.h"
#include "ops/op_bench.h"

using namespace llmc;

namespace {

// Every finite E4M3 number that is not negative, ascending, by its definition.
std::vector<double> all_e4m3() {
  std::vector<double> numbers;
  for (int exponent = 0; exponent < 16; ++exponent)
    for (int mantissa = 0; mantissa < 8; ++mantissa)
      if (exponent < 15 || mantissa < 7)
        numbers.push_back(exponent == 0 ? std::ldexp(mantissa, -9) : std::ldexp(8 + mantissa, exponent - 10));
  return numbers;
}

// x in fp64, rounded to the nearest of them; of two, to the one whose last bit is 0.
double nearest(double x, const std::vector<double>& numbers) {
  const double size = std::min(std::fabs(x), numbers.back());
  const auto above = std::lower_bound(numbers.begin(), numbers.end(), size);
  size_t i = static_cast<size_t>(above - numbers.begin());
  if (i > 0) {
    const double up = numbers[i] - size, down = size - numbers[i - 1];
    if (down < up || (down == up && (i - 1) % 2 == 0)) --i;
  }
  return std::copysign(numbers[i], x);
}

// x as a product reads it: blocks of rows x columns divided by the least power of two that brings them within 448.
std::vector<double> rounded(const Tensor& x, int64_t rows, int64_t columns) {
  const std::vector<double> numbers = all_e4m3();
  const int64_t R = x.shape[0], C = x.shape[1];
  std::vector<double> out(static_cast<size_t>(x.numel()));
  const auto each = [&](int64_t row, int64_t column, auto&& use) {
    for (int64_t r = row; r < std::min(R, row + rows); ++r)
      for (int64_t c = column; c < std::min(C, column + columns); ++c)
        use(static_cast<double>(x.data<bf16>()[r * C + c]), out[static_cast<size_t>(r * C + c)]);
  };
  for (int64_t row = 0; row < R; row += rows)
    for (int64_t column = 0; column < C; column += columns) {
      double largest = 0, scale = 0x1p-117;
      each(row, column, [&](double value, double&) { largest = std::max(largest, std::fabs(value)); });
      while (largest > 448 * scale) scale *= 2;
      each(row, column, [&](double value, double& to) { to = nearest(value / scale, numbers) * scale; });
    }
  return out;
}

// c (M, N) = a b, where a(m, k) and b(k, n) give their elements.
template <class A, class B>
std::vector<double> product(int64_t M, int64_t N, int64_t K, A&& a, B&& b) {
  std::vector<double> c(static_cast<size_t>(M * N));
  for (int64_t m = 0; m < M; ++m)
    for (int64_t k = 0; k < K; ++k)
      for (int64_t n = 0; n < N; ++n) c[static_cast<size_t>(m * N + n)] += a(m, k) * b(k, n);
  return c;
}

double distance(const Tensor& found, const std::vector<double>& expected) {
  std::vector<float> values(expected.size());
  for (size_t i = 0; i < values.size(); ++i)
    values[i] = found.dtype == DType::fp32 ? found.data<float>()[i] : static_cast<float>(found.data<bf16>()[i]);
  return relative_distance(values.data(), expected.data(), std::ssize(expected));
}

}  // namespace

TEST_CASE("every bf16 number is rounded to the nearest number in E4M3, the even one of two", "[ops][fp8]") {
  const std::vector<double> numbers = all_e4m3();
  int64_t wrong = 0;
  for (int bits = 0; bits < 1 << 16; ++bits) {
    bf16 x;
    x.bits = static_cast<uint16_t>(bits);
    const float value = static_cast<float>(x), found = e4m3::rounded(value),
                packed = static_cast<float>(e4m3::of(value));
    if (!std::isfinite(value)) {
      wrong += !std::isnan(found) || !std::isnan(packed);
      continue;
    }
    const auto expected = static_cast<float>(nearest(static_cast<double>(value), numbers));
    wrong += std::bit_cast<uint32_t>(found) != std::bit_cast<uint32_t>(expected) ||
             std::bit_cast<uint32_t>(packed) != std::bit_cast<uint32_t>(expected);
  }
  REQUIRE(wrong == 0);
}

TEST_CASE("a block is divided by the least power of two that brings it within E4M3, and its numbers are exact in bf16",
          "[ops][fp8]") {
  for (int bits = 0; bits < 0x7f80; ++bits) {
    bf16 largest;
    largest.bits = static_cast<uint16_t>(bits);
    const float value = static_cast<float>(largest), scale = fp8_scale(value);
    int exponent = 0;
    const bool fits = std::frexp(scale, &exponent) == 0.5f && value <= 448 * scale &&
                      (value > 224 * scale || scale == 0x1p-117f) && scale * reciprocal_of_power(scale) == 1;
    if (!fits) FAIL("the scale of " << value << " is " << scale);
    for (const int number : {1, 7, 8, 0x7e}) {
      const float meant = static_cast<float>(e4m3{static_cast<uint8_t>(number)}) * scale;
      if (std::isfinite(meant) && (meant != static_cast<float>(bf16(meant)) || meant < 0x1p-126f))
        FAIL(meant << " is not exact in bf16");
    }
  }
  for (const float bad : {INFINITY, NAN}) REQUIRE(std::isnan(fp8_scale(bad)));
}

TEST_CASE("numbers in fp8 keep 30 dB of a normal distribution, of any size", "[ops][fp8]") {
  Bench b;
  const double size = GENERATE(1e-6, 1.0, 3e4);
  const Tensor x = b.as(DType::bf16, b.normal({256, 384}, size));
  const auto [rows, columns] = GENERATE(std::pair{1, 128}, std::pair{128, 1}, std::pair{128, 128});
  const Tensor out = b.poisoned(DType::bf16, x.shape);
  cpu::ops<bf16>().round_to_fp8(out.data<bf16>(), x.data<bf16>(), 256, 384, rows, columns);
  double noise = 0, signal = 0;
  for (int64_t i = 0; i < x.numel(); ++i) {
    const double value = static_cast<double>(x.data<bf16>()[i]),
                 error = value - static_cast<double>(out.data<bf16>()[i]);
    signal += value * value;
    noise += error * error;
  }
  REQUIRE(10 * std::log10(signal / noise) > 30);
}

TEST_CASE("linear layers in fp8 multiply what their definition says", "[ops][fp8]") {
  Bench b;
  const int64_t N = 144, I = 272, O = 160;
  const Tensor x = b.as(DType::bf16, b.normal({N, I})), weight = b.as(DType::bf16, b.normal({O, I}, 0.02)),
               dout = b.as(DType::bf16, b.normal({N, O}, 1e-3)), bias = b.as(DType::bf16, b.normal({O}));
  const Tensor out = b.poisoned(DType::bf16, {N, O}), dx = b.poisoned(DType::bf16, {N, I}),
               dweight = b.zeros(DType::fp32, {O, I});
  linear_forward(out, x, weight, bias, b.stream, Operands::fp8_block);
  linear_backward_input(dx, dout, weight, b.stream, Operands::fp8_block);
  for (const Accumulate twice : {Accumulate::no, Accumulate::yes})
    linear_backward_weight(dweight, {}, dout, x, twice, b.stream, Operands::fp8_block);
  b.stream.synchronize();

  const auto at = [](const std::vector<double>& m, int64_t columns, int64_t r, int64_t c) {
    return m[static_cast<size_t>(r * columns + c)];
  };
  const auto xs = rounded(x, 1, 128), ws = rounded(weight, 128, 128), ds = rounded(dout, 1, 128),
             x_columns = rounded(x, 128, 1), d_columns = rounded(dout, 128, 1);
  auto forward = product(
      N, O, I, [&](int64_t n, int64_t i) { return at(xs, I, n, i); },
      [&](int64_t i, int64_t o) { return at(ws, I, o, i); });
  for (size_t k = 0; k < forward.size(); ++k)
    forward[k] += static_cast<double>(bias.data<bf16>()[k % static_cast<size_t>(O)]);
  REQUIRE(distance(out, forward) < 0x1p-8);  // rounded to bf16
  REQUIRE(distance(dx, product(
                           N, I, O, [&](int64_t n, int64_t o) { return at(ds, O, n, o); },
                           [&](int64_t o, int64_t i) { return at(ws, I, o, i); })) < 0x1p-8);
  auto gradient = product(
      O, I, N, [&](int64_t o, int64_t n) { return at(d_columns, O, n, o); },
      [&](int64_t n, int64_t i) { return at(x_columns, I, n, i); });
  for (double& g : gradient) g *= 2;
  REQUIRE(distance(dweight, gradient) < 1e-6);
}

TEST_CASE("the backward of a linear layer at once has the bits of its two products", "[ops][fp8]") {
  Bench b;
  const int64_t N = 144, I = 272, O = 160;
  const Operands read = GENERATE(Operands::as_stored, Operands::fp8_block);
  const Tensor x = b.as(DType::bf16, b.normal({N, I})), weight = b.as(DType::bf16, b.normal({O, I})),
               dout = b.as(DType::bf16, b.normal({N, O}));
  Tensor dx[2], dweight[2], dbias[2];
  for (int i = 0; i < 2; ++i) {
    dx[i] = b.poisoned(DType::bf16, {N, I});
    dweight[i] = b.zeros(DType::fp32, {O, I});
    dbias[i] = b.zeros(DType::fp32, {O});
  }
  linear_backward_input(dx[0], dout, weight, b.stream, read);
  linear_backward_weight(dweight[0], dbias[0], dout, x, Accumulate::yes, b.stream, read);
  linear_backward(dx[1], dweight[1], dbias[1], dout, x, weight, Accumulate::yes, b.stream, read);
  b.stream.synchronize();
  for (const auto& both : {dx, dweight, dbias}) REQUIRE(bits_of(both[0]) == bits_of(both[1]));
}

TEST_CASE("in fp8 the gradient of a weight is the sum of those of its micro-batches", "[ops][fp8]") {
  Bench b;
  const int64_t N = 256, C = 64;
  const Tensor x = b.as(DType::bf16, b.normal({N, C})), dout = b.as(DType::bf16, b.normal({N, C}));
  const Tensor at_once = b.zeros(DType::fp32, {C, C}), in_turn = b.zeros(DType::fp32, {C, C});
  linear_backward_weight(at_once, {}, dout, x, Accumulate::yes, b.stream, Operands::fp8_block);
  for (const int64_t n : {0, 128})
    linear_backward_weight(in_turn, {}, dout.slice(n * C, {128, C}), x.slice(n * C, {128, C}), Accumulate::yes,
                           b.stream, Operands::fp8_block);
  b.stream.synchronize();
  REQUIRE(relative_distance(in_turn.data<float>(), at_once.data<float>(), C * C) < 1e-6);  // the order of the sums
}
