// Numbers in fp8, and products of them, against plain definitions in fp64.
#include <cmath>

#include "catch2.h"
#include "ops/op_bench.h"

using namespace llmc;

namespace {

// Every finite number that is not negative, ascending, by its definition.
std::vector<double> all_numbers(Fp8Format format) {
  const bool e4m3 = format == Fp8Format::e4m3;
  const int mantissas = e4m3 ? 8 : 4, exponents = e4m3 ? 16 : 32, smallest = e4m3 ? -9 : -16;
  std::vector<double> numbers;
  for (int exponent = 0; exponent < exponents; ++exponent)
    for (int mantissa = 0; mantissa < mantissas; ++mantissa)
      if (exponent < exponents - 1 || (e4m3 && mantissa < 7))  // NaN; in E5M2 infinities, too
        numbers.push_back(exponent == 0 ? std::ldexp(mantissa, smallest)
                                        : std::ldexp(mantissas + mantissa, smallest + exponent - 1));
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

// x as a product reads it: blocks of rows x columns divided by the least power of two that brings them within the
// largest number.
std::vector<double> rounded(const Tensor& x, int64_t rows, int64_t columns, Fp8Format format = Fp8Format::e4m3) {
  const std::vector<double> numbers = all_numbers(format);
  const int64_t R = x.shape[0], C = x.shape[1];
  std::vector<double> out(static_cast<size_t>(x.numel()));
  const auto each = [&](int64_t row, int64_t column, auto&& use) {
    for (int64_t r = row; r < std::min(R, row + rows); ++r)
      for (int64_t c = column; c < std::min(C, column + columns); ++c)
        use(static_cast<double>(x.data<bf16>()[r * C + c]), out[static_cast<size_t>(r * C + c)]);
  };
  for (int64_t row = 0; row < R; row += rows)
    for (int64_t column = 0; column < C; column += columns) {
      double largest = 0, scale = format == Fp8Format::e4m3 ? 0x1p-117 : 0x1p-110;
      each(row, column, [&](double value, double&) { largest = std::max(largest, std::fabs(value)); });
      while (largest > numbers.back() * scale) scale *= 2;
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

// x (R, C), or (G, R, C), in bf16, as products read it.
Tensor by_definition(Bench& b, const Tensor& x, int64_t rows, int64_t columns, Fp8Format format = Fp8Format::e4m3) {
  const Tensor all = b.poisoned(DType::bf16, x.shape);
  const int64_t matrices = x.shape.rank() == 3 ? x.shape[0] : 1, n = x.numel() / matrices,
                C = x.shape[x.shape.rank() - 1];
  for (int64_t m = 0; m < matrices; ++m) {
    const std::vector<double> values = rounded(x.slice(m * n, {n / C, C}), rows, columns, format);
    for (int64_t i = 0; i < n; ++i)
      store(all.data<bf16>()[m * n + i], static_cast<float>(values[static_cast<size_t>(i)]));
  }
  return all;
}

// Numbers in bf16 of which no two rows or columns have equal sizes: a block's largest number is its own, and numbers
// scaled by that of another block lose bits or are cut off.
Tensor uneven(Bench& b, const Shape& shape) {
  const Tensor x = b.as(DType::bf16, b.normal(shape));
  const int64_t C = shape[shape.rank() - 1];
  for (int64_t i = 0; i < x.numel(); ++i)
    store(x.data<bf16>()[i],
          std::ldexp(static_cast<float>(x.data<bf16>()[i]), static_cast<int>(i / C % 31 - 15 + i % C * 7 % 29 - 14)));
  return x;
}

double distance(const Tensor& found, const std::vector<double>& expected) {
  std::vector<float> values(expected.size());
  for (size_t i = 0; i < values.size(); ++i)
    values[i] = found.dtype == DType::fp32 ? found.data<float>()[i] : static_cast<float>(found.data<bf16>()[i]);
  return relative_distance(values.data(), expected.data(), std::ssize(expected));
}

}  // namespace

TEMPLATE_TEST_CASE("every bf16 number is rounded to the nearest number in fp8, the even one of two", "[ops][fp8]", e4m3,
                   e5m2) {
  using F = TestType;
  const std::vector<double> numbers = all_numbers(std::is_same_v<F, e4m3> ? Fp8Format::e4m3 : Fp8Format::e5m2);
  REQUIRE(static_cast<double>(F::largest) == numbers.back());
  int64_t wrong = 0;
  for (int bits = 0; bits < 1 << 16; ++bits) {
    bf16 x;
    x.bits = static_cast<uint16_t>(bits);
    const float value = static_cast<float>(x), found = F::rounded(value), packed = static_cast<float>(F::of(value));
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

TEMPLATE_TEST_CASE(
    "a block is divided by the least power of two that brings it within fp8, and its numbers are exact in bf16",
    "[ops][fp8]", e4m3, e5m2) {
  using F = TestType;
  const float least = fp8_scale<F>(0);
  REQUIRE(least == (std::is_same_v<F, e4m3> ? 0x1p-117f : 0x1p-110f));
  for (int bits = 0; bits < 0x7f80; ++bits) {
    bf16 largest;
    largest.bits = static_cast<uint16_t>(bits);
    const float value = static_cast<float>(largest), scale = fp8_scale<F>(value);
    int exponent = 0;
    const bool fits = std::frexp(scale, &exponent) == 0.5f && value / scale <= F::largest &&
                      (value / scale > F::largest / 2 || scale == least) && scale * reciprocal_of_power(scale) == 1;
    if (!fits) FAIL("the scale of " << value << " is " << scale);
    for (const int number : {1, 3, 4, 7, 8, 0x7b}) {
      const float meant = static_cast<float>(F{static_cast<uint8_t>(number)}) * scale;
      if (std::isfinite(meant) && (meant != static_cast<float>(bf16(meant)) || meant < 0x1p-126f))
        FAIL(meant << " is not exact in bf16");
    }
  }
  for (const float bad : {INFINITY, NAN}) REQUIRE(std::isnan(fp8_scale<F>(bad)));
}

TEST_CASE("blocks of numbers are scaled by their own largest and rounded as defined, bit for bit", "[ops][fp8]") {
  Bench b;
  const Tensor x = uneven(b, {2, 131, 272}), smaller = b.as(DType::bf16, x), out = b.poisoned(DType::bf16, x.shape);
  for (int64_t i = 0; i < x.numel(); ++i)
    store(smaller.data<bf16>()[i], std::ldexp(static_cast<float>(x.data<bf16>()[i]), -9));
  const ScaleBlock block = GENERATE(ScaleBlock{1, 128}, ScaleBlock{128, 1}, ScaleBlock{128, 128}, ScaleBlock{1, 32},
                                    ScaleBlock{32, 1}, ScaleBlock::whole());
  const int64_t rows = block.is_whole() ? 131 : block.rows, columns = block.is_whole() ? 272 : block.columns;
  for (const Fp8Format format : {Fp8Format::e4m3, Fp8Format::e5m2})
    for (const Tensor& of : {x, smaller, x}) {  // nothing is left of those before
      detail::round_to_fp8(out, of, block, format, b.stream);
      b.stream.synchronize();
      REQUIRE(bits_of(out) == bits_of(by_definition(b, of, rows, columns, format)));
    }
}

TEST_CASE("linear layers in fp8 multiply what their definition says", "[ops][fp8]") {
  Bench b;
  const Operands read = GENERATE(Operands::fp8_block, Operands::fp8, Operands::mxfp8);
  const int64_t block = read == Operands::mxfp8 ? 32 : 128, across = read == Operands::mxfp8 ? 1 : 128;
  const Fp8Format of_gradients = read == Operands::fp8 ? Fp8Format::e5m2 : Fp8Format::e4m3;
  const int64_t N = 144, I = 272, O = 160;
  const Tensor x = b.as(DType::bf16, b.normal({N, I})), weight = b.as(DType::bf16, b.normal({O, I}, 0.02)),
               dout = b.as(DType::bf16, b.normal({N, O}, 1e-3)), bias = b.as(DType::bf16, b.normal({O}));
  const Tensor out = b.poisoned(DType::bf16, {N, O}), dx = b.poisoned(DType::bf16, {N, I}),
               dweight = b.zeros(DType::fp32, {O, I});
  linear_forward(out, x, weight, bias, b.stream, read);
  linear_backward_input(dx, dout, weight, b.stream, read);
  for (const Accumulate twice : {Accumulate::no, Accumulate::yes})
    linear_backward_weight(dweight, {}, dout, x, twice, b.stream, read);
  b.stream.synchronize();

  const auto at = [](const std::vector<double>& m, int64_t columns, int64_t r, int64_t c) {
    return m[static_cast<size_t>(r * columns + c)];
  };
  const auto xs = rounded(x, 1, block), ws = rounded(weight, across, block), w_columns = rounded(weight, block, across),
             ds = rounded(dout, 1, block, of_gradients), x_columns = rounded(x, block, 1),
             d_columns = rounded(dout, block, 1, of_gradients);
  auto forward = product(
      N, O, I, [&](int64_t n, int64_t i) { return at(xs, I, n, i); },
      [&](int64_t i, int64_t o) { return at(ws, I, o, i); });
  for (size_t k = 0; k < forward.size(); ++k)
    forward[k] += static_cast<double>(bias.data<bf16>()[k % static_cast<size_t>(O)]);
  REQUIRE(distance(out, forward) < 0x1p-8);  // rounded to bf16
  REQUIRE(distance(dx, product(
                           N, I, O, [&](int64_t n, int64_t o) { return at(ds, O, n, o); },
                           [&](int64_t o, int64_t i) { return at(w_columns, I, o, i); })) < 0x1p-8);
  auto gradient = product(
      O, I, N, [&](int64_t o, int64_t n) { return at(d_columns, O, n, o); },
      [&](int64_t n, int64_t i) { return at(x_columns, I, n, i); });
  for (double& g : gradient) g *= 2;
  REQUIRE(distance(dweight, gradient) < 1e-6);
}

TEST_CASE("linear layers in fp8 read blocks along their sums, also of operands whose rows and columns differ in size",
          "[ops][fp8]") {
  Bench b;
  const Operands read = GENERATE(Operands::fp8_block, Operands::fp8, Operands::mxfp8, Operands::fp8_tensor);
  const bool whole = read == Operands::fp8_tensor;
  const int64_t block = read == Operands::mxfp8 ? 32
                        : whole                 ? 512
                                                : 128,
                one = whole ? 512 : 1, across = read == Operands::mxfp8 ? 1 : block;
  const Fp8Format of_gradients = whole || read == Operands::fp8 ? Fp8Format::e5m2 : Fp8Format::e4m3;
  const int64_t N = 144, I = 272, O = 160;
  const Tensor x = uneven(b, {N, I}), weight = uneven(b, {O, I}), dout = uneven(b, {N, O});
  Tensor out[2], dx[2], dweight[2];
  for (int i = 0; i < 2; ++i) {
    out[i] = b.poisoned(DType::bf16, {N, O});
    dx[i] = b.poisoned(DType::bf16, {N, I});
    dweight[i] = b.poisoned(DType::fp32, {O, I});
  }
  linear_forward(out[0], x, weight, {}, b.stream, read);
  linear_backward_input(dx[0], dout, weight, b.stream, read);
  linear_backward_weight(dweight[0], {}, dout, x, Accumulate::no, b.stream, read);
  linear_forward(out[1], by_definition(b, x, one, block), by_definition(b, weight, across, block), {}, b.stream);
  linear_backward_input(dx[1], by_definition(b, dout, one, block, of_gradients),
                        by_definition(b, weight, block, across), b.stream);
  linear_backward_weight(dweight[1], {}, by_definition(b, dout, block, one, of_gradients),
                         by_definition(b, x, block, one), Accumulate::no, b.stream);
  b.stream.synchronize();
  for (const auto& both : {out, dx, dweight}) REQUIRE(bits_of(both[0]) == bits_of(both[1]));
}

TEST_CASE("experts in fp8 multiply rows in blocks of their own, and weights in blocks of one expert", "[ops][fp8]") {
  Bench b;
  const Operands read = GENERATE(Operands::fp8_block, Operands::fp8, Operands::mxfp8);
  const int64_t block = read == Operands::mxfp8 ? 32 : 128, across = read == Operands::mxfp8 ? 1 : 128;
  const int64_t R = 50, E = 3, O = 48, I = 144;  // of 128 x 128, a block has rows of two experts unless they are apart
  const Tensor offsets = b.integers({0, 7, 7, 40});  // ten rows have no expert
  const Tensor x = b.as(DType::bf16, b.normal({R, I})), dout = b.as(DType::bf16, b.normal({R, O}, 1e-3)),
               weight = b.as(DType::bf16, b.normal({E, O, I}));
  for (int64_t e = 0; e < E; ++e)  // of other sizes
    for (int64_t i = 0; i < O * I; ++i)
      store(weight.data<bf16>()[e * O * I + i],
            static_cast<float>(weight.data<bf16>()[e * O * I + i]) * std::ldexp(1.0f, static_cast<int>(-9 * e)));
  const Tensor out[2] = {b.zeros(DType::bf16, {R, O}), b.zeros(DType::bf16, {R, O})},
               dx[2] = {b.zeros(DType::bf16, {R, I}), b.zeros(DType::bf16, {R, I})},
               dw[2] = {b.zeros(DType::fp32, weight.shape), b.zeros(DType::fp32, weight.shape)};
  grouped_linear_forward(out[0], x, weight, offsets, b.stream, read);
  grouped_linear_backward_input(dx[0], dout, weight, offsets, b.stream, read);
  grouped_linear_backward_weight(dw[0], dout, x, offsets, Accumulate::no, b.stream, read);

  const Tensor rows = by_definition(b, x, 1, block),
               gradients = by_definition(b, dout, 1, block, read == Operands::fp8 ? Fp8Format::e5m2 : Fp8Format::e4m3);
  grouped_linear_forward(out[1], rows, by_definition(b, weight, across, block), offsets, b.stream);
  grouped_linear_backward_input(dx[1], gradients, by_definition(b, weight, block, across), offsets, b.stream);
  grouped_linear_backward_weight(dw[1], gradients, rows, offsets, Accumulate::no, b.stream);
  b.stream.synchronize();
  for (const auto& both : {out, dx, dw}) REQUIRE(bits_of(both[0]) == bits_of(both[1]));
}

TEST_CASE("matrices rounded in parts, whose tiles several ranks share, are the matrices rounded at once",
          "[ops][fp8]") {
  Bench b;
  const int64_t G = 2, R = 131, C = 150, n = G * R * C;
  const Tensor x = b.as(DType::bf16, b.normal({G, R, C})), whole = b.poisoned(DType::bf16, x.shape),
               again = b.poisoned(DType::bf16, x.shape);
  for (int64_t i = 0; i < n; ++i)  // the largest number of a tile is in one part, and its other numbers in others
    store(x.data<bf16>()[i], static_cast<float>(x.data<bf16>()[i]) * std::exp2(static_cast<float>(i / 700 % 19)));
  detail::round_to_fp8(whole, x, {128, 128}, Fp8Format::e4m3, b.stream);
  detail::round_to_fp8(again, whole, {128, 128}, Fp8Format::e4m3, b.stream);

  const std::vector<int64_t> ends = {0, 1000, 1001, 20000, n};  // of the parts
  const TiledPart all{G, R, C, 0, n};
  const int64_t tiles = all.tiles(), ranks = std::ssize(ends) - 1;
  REQUIRE(tiles == 2 * 2 * 2);
  const Tensor maxima = b.poisoned(DType::fp32, {ranks, tiles}), scales = b.poisoned(DType::fp32, {tiles}),
               numbers = b.poisoned(DType::e4m3, {n}), out = b.poisoned(DType::bf16, {n});
  const auto each = [&](auto&& f) {
    for (int64_t r = 0; r < ranks; ++r) {
      const int64_t first = ends[static_cast<size_t>(r)], size = ends[static_cast<size_t>(r) + 1] - first;
      f(r, x.slice(first, {size}), TiledPart{G, R, C, first, size});
    }
  };
  each([&](int64_t r, const Tensor& mine, const TiledPart& part) {
    detail::tile_maxima(maxima.slice(r * tiles, {tiles}), mine, part, b.stream);
  });
  detail::scales_of_ranks(scales, maxima, b.stream);
  each([&](int64_t, const Tensor& mine, const TiledPart& part) {
    detail::tiles_to_fp8(numbers.slice(part.first, {part.n}), mine, scales, part, b.stream);
  });
  detail::tiles_from_fp8(out, numbers, scales, all, b.stream);
  b.stream.synchronize();
  REQUIRE(bits_of(out) == bits_of(whole));
  REQUIRE(bits_of(again) == bits_of(whole));
}

TEST_CASE("the backward of a linear layer at once has the bits of its two products", "[ops][fp8]") {
  Bench b;
  const int64_t N = 144, I = 272, O = 160;
  const Operands read =
      GENERATE(Operands::as_stored, Operands::fp8_block, Operands::fp8, Operands::mxfp8, Operands::fp8_tensor);
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
