// How much of a signal numbers in fp8 keep, in dB against fp64, and what is left of it in the gradient of a weight.
//
// The bounds of a cast, 30 dB for E4M3 and 24 dB for E5M2, follow from its steps. With m bits of mantissa a number in
// [1, 2) is rounded to a multiple of 2^-m, and errs by at most 2^-(m + 1) of its binade, uniformly: noise of (2^-m)^2 /
// 12. The mean square of numbers that are uniform in the binade is 7/3, of those whose logarithms are, 3 / (2 ln 2) =
// 2.16. So the ratio is 12 * 4^m times that: 32.5 and 32.2 dB for m = 3 (E4M3), 26.5 and 26.1 dB for m = 2 (E5M2). What
// is below the normal numbers errs by as much as the smallest of them: it matters where it is what is looked at.
//
// The gradient of a weight is a sum of products of two operands that err independently of each other, and its noise is
// the sum of theirs: 1 / (1 / r + 1 / s) for ratios of r and s. From the bounds of the casts, that is 27 dB for two
// operands in E4M3, and 23 dB with gradients in E5M2. 17 dB are a factor of 4 to 10 less in noise: room for rows and
// channels of different size, where few products make up a sum. Where the products of a sum cancel, what is left of it
// may be less than its noise, in fp8 as in any dtype: such sums are not what is bounded.
#include <cmath>

#include "catch2.h"
#include "ops/op_bench.h"

using namespace llmc;

namespace {

double decibels(double signal, double noise) { return 10 * std::log10(signal / noise); }

// The ratio of `exact` and what differs from it, of the elements that `counts` names.
template <class X, class Counts>
double ratio(const Tensor& exact, const X* found, Counts&& counts) {
  double signal = 0, noise = 0;
  for (int64_t i = 0; i < exact.numel(); ++i) {
    if (!counts(i)) continue;
    const double value = exact.data<double>()[i], error = static_cast<double>(found[i]) - value;
    signal += value * value;
    noise += error * error;
  }
  return decibels(signal, noise);
}
bool everywhere(int64_t) { return true; }

Tensor rounded(Bench& b, const Tensor& x, ScaleBlock block, Fp8Format format) {
  const Tensor out = b.poisoned(DType::bf16, x.shape);
  detail::round_to_fp8(out, b.as(DType::bf16, x), block, format, b.stream);
  b.stream.synchronize();
  return out;
}

// Numbers that bf16 has, in fp64.
Tensor as_bf16(Bench& b, const Tensor& x) { return b.as(DType::fp64, b.as(DType::bf16, x)); }

// Activations as in a trained model: the channels that `outlier` names are `times` as large as the others (Dettmers et
// al. 2022; Sun et al. 2024: from ten to thousands of times).
Tensor activations(Bench& b, int64_t N, int64_t C, double times, int64_t outlier) {
  const Tensor x = b.normal({N, C});
  for (int64_t n = 0; n < N; ++n) x.data<double>()[n * C + outlier] *= times;
  return as_bf16(b, x);
}
// Gradients of outputs: those of one token are up to thousands of times as large as another's.
Tensor gradients(Bench& b, int64_t N, int64_t C) {
  const Tensor sizes = b.normal({N}), g = b.normal({N, C}, 1e-4);
  for (int64_t i = 0; i < g.numel(); ++i) g.data<double>()[i] *= std::exp(1.5 * sizes.data<double>()[i / C]);
  return as_bf16(b, g);
}

double bound(Fp8Format format) { return format == Fp8Format::e4m3 ? 30 : 24; }

}  // namespace

TEST_CASE("numbers in fp8 keep 30 dB of a normal distribution of any size, and 24 dB as E5M2", "[ops][fp8]") {
  Bench b;
  const double size = GENERATE(1e-6, 1.0, 3e4);
  const ScaleBlock block =
      GENERATE(ScaleBlock{1, 128}, ScaleBlock{128, 1}, ScaleBlock{128, 128}, ScaleBlock{1, 32}, ScaleBlock{32, 1});
  const Fp8Format format = GENERATE(Fp8Format::e4m3, Fp8Format::e5m2);
  const Tensor x = as_bf16(b, b.normal({256, 384}, size));
  REQUIRE(ratio(x, rounded(b, x, block, format).data<bf16>(), everywhere) > bound(format));
}

TEST_CASE(
    "numbers in fp8 keep as much beside outliers of up to a thousand times their size, and of gradients of tokens "
    "of different size",
    "[ops][fp8]") {
  // A block's largest number becomes at least 224, 2^13.8 times E4M3's smallest normal number: beside an outlier of a
  // thousand times the usual size, what is below the normal numbers is less than a fourteenth of that size.
  Bench b;
  const int64_t N = 256, C = 384, outlier = 200;
  const Fp8Format format = GENERATE(Fp8Format::e4m3, Fp8Format::e5m2);
  const ScaleBlock block = GENERATE(ScaleBlock{1, 128}, ScaleBlock{128, 1}, ScaleBlock{1, 32}, ScaleBlock{32, 1});
  for (const double times : {20.0, 1000.0}) {
    const Tensor x = activations(b, N, C, times, outlier), found = rounded(b, x, block, format);
    INFO(times << " times, blocks of " << block.rows << " x " << block.columns);
    REQUIRE(ratio(x, found.data<bf16>(), everywhere) > bound(format));
    REQUIRE(ratio(x, found.data<bf16>(), [&](int64_t i) { return i % C != outlier; }) > bound(format));
  }
  const Tensor g = gradients(b, N, C);
  REQUIRE(ratio(g, rounded(b, g, block, format).data<bf16>(), everywhere) > bound(format));
}

TEST_CASE("an outlier that scales do not permit costs its own block only", "[ops][fp8]") {
  // 2^20 times as large as the others: these are below E4M3's smallest number once it is within 448.
  Bench b;
  const int64_t N = 256, C = 384, outlier = 200, width = GENERATE(128, 32);
  const Tensor x = activations(b, N, C, 0x1p20, outlier), found = rounded(b, x, {1, width}, Fp8Format::e4m3);
  const auto in_block = [&](int64_t i) { return i % C / width == outlier / width; };
  REQUIRE(ratio(x, found.data<bf16>(), [&](int64_t i) { return !in_block(i); }) > 30);
  REQUIRE(ratio(x, found.data<bf16>(), [&](int64_t i) { return in_block(i) && i % C != outlier; }) < 3);
  // Along the columns no block has an outlier and other channels.
  const Tensor columns = rounded(b, x, {width, 1}, Fp8Format::e4m3);
  REQUIRE(ratio(x, columns.data<bf16>(), [&](int64_t i) { return i % C != outlier; }) > 30);
}

TEST_CASE("the gradient of a weight from operands in fp8 keeps 17 dB against fp64", "[ops][fp8]") {
  Bench b;
  const Operands read = GENERATE(Operands::fp8_block, Operands::fp8, Operands::mxfp8, Operands::fp8_tensor);
  const bool of_experts = GENERATE(false, true);  // whose rows are read in blocks along themselves
  const int64_t N = 512, I = 192, O = 160, outlier = 77;
  const double times = GENERATE(1.0, 1000.0);
  const Tensor x = activations(b, N, I, times, outlier), dout = gradients(b, N, O),
               exact = b.zeros(DType::fp64, {O, I}), found = b.poisoned(DType::fp32, {O, I}),
               x16 = b.as(DType::bf16, x), dout16 = b.as(DType::bf16, dout);
  for (int64_t n = 0; n < N; ++n)
    for (int64_t o = 0; o < O; ++o)
      for (int64_t i = 0; i < I; ++i)
        exact.data<double>()[o * I + i] += dout.data<double>()[n * O + o] * x.data<double>()[n * I + i];
  if (of_experts)
    grouped_linear_backward_weight(found.reshaped({1, O, I}), dout16, x16, b.integers({0, static_cast<int32_t>(N)}),
                                   Accumulate::no, b.stream, read);
  else linear_backward_weight(found, {}, dout16, x16, Accumulate::no, b.stream, read);
  b.stream.synchronize();
  const float* const values = found.data<float>();
  const double all = ratio(exact, values, everywhere),
               usual = ratio(exact, values, [&](int64_t i) { return i % I != outlier; });
  INFO("kind " << static_cast<int>(read) << (of_experts ? " of experts" : "") << ", an outlier of " << times << ": "
               << all << " dB, " << usual << " beside it");
  REQUIRE(all > 17);
  REQUIRE(usual > 17);
}
