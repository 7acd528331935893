// Elementwise kernels against the CPU ops.
#include <utility>

#include "cuda/device_test.h"
#include "ops/cpu/elementwise.h"
#include "ops/cuda/elementwise.cuh"

using namespace llmc;

namespace {

// One element, less than a pack, whole packs, ragged, few for the last block. With `shift` the arrays begin unaligned
// to packs.
struct Size {
  int64_t n, shift;
};
Size size_of_array() {
  return GENERATE(Size{1, 0}, Size{3, 0}, Size{8, 0}, Size{1000, 0}, Size{2051, 0}, Size{1022, 0}, Size{1003, 1});
}

// The elements after the first `shift` ones, which must stay unchanged: NaN.
template <class T>
std::vector<T> behind(const DeviceArray<T>& array, int64_t shift) {
  std::vector<T> values = array.host();
  for (int64_t i = 0; i < shift; ++i) REQUIRE(std::isnan(static_cast<float>(values[static_cast<size_t>(i)])));
  values.erase(values.begin(), values.begin() + shift);
  return values;
}

template <class T>
std::vector<T> with_space(std::vector<T> x, int64_t shift) {
  x.insert(x.begin(), static_cast<size_t>(shift), T(std::numeric_limits<float>::quiet_NaN()));
  return x;
}

template <class T>
constexpr double tolerance = sizeof(T) == 2 ? 1e-3 : 1e-6;

}  // namespace

TEMPLATE_TEST_CASE("GELU kernels match the CPU", "[cuda]", float, bf16) {
  using T = TestType;
  const auto [n, shift] = size_of_array();
  const auto x = normal_values<T>(n, 1, 0, 3), dout = normal_values<T>(n, 2);
  std::vector<T> out(x.size()), dx(x.size());
  cpu::gelu_forward(out.data(), x.data(), n);
  cpu::gelu_backward(dx.data(), dout.data(), x.data(), n);
  const auto run = [&, n = n, shift = shift]() -> Outputs {
    DeviceArray<T> xs(with_space(x, shift)), gradient(with_space(dout, shift)), outs(n + shift);
    cuda::gelu_forward<T>(outs + shift, xs + shift, n, nullptr);
    cuda::gelu_backward<T>(gradient + shift, gradient + shift, xs + shift, n, nullptr);
    return {{"out", behind(outs, shift)}, {"dx", behind(gradient, shift)}};
  };
  check_kernel(run, {{"out", out}, {"dx", dx}}, tolerance<T>);
}

TEMPLATE_TEST_CASE("GELU's backward with the bias's gradient has the bits of the two ops", "[cuda]", float, bf16) {
  using T = TestType;
  // Ragged rows, rows of whole packs, several rows for a thread, several blocks of columns.
  const auto [N, C] = GENERATE(std::pair{7, 5}, std::pair{100, 24}, std::pair{700, 40}, std::pair{130, 520});
  const auto x = normal_values<T>(N * C, 1, 0, 3), dout = normal_values<T>(N * C, 2);
  const auto before = normal_values<float>(C, 3);
  const auto run = [&, N = N, C = C](bool at_once) -> Outputs {
    DeviceArray<T> xs(x), gradient(dout);
    DeviceArray<float> dbias(before), partials(cuda::column_sum_scratch(N, C));
    if (at_once) {
      cuda::gelu_backward_with_bias<T>(gradient, dbias, {partials}, gradient, xs, N, C, nullptr);
    } else {
      cuda::gelu_backward<T>(gradient, gradient, xs, N * C, nullptr);
      cuda::column_sum<T>(dbias, {partials}, gradient, N, C, nullptr);
    }
    return {{"dx", gradient.host()}, {"dbias", dbias.host()}};
  };
  check_kernel([&] { return run(true); }, run(false), 1e-300);
}

TEMPLATE_TEST_CASE("residual addition, scaling and filling round like the CPU", "[cuda]", float, bf16) {
  using T = TestType;
  const auto [n, shift] = size_of_array();
  const auto a = normal_values<T>(n, 1), b = normal_values<T>(n, 2);
  std::vector<T> sum(a.size()), twice(a.size()), scaled;
  cpu::residual_forward(sum.data(), a.data(), b.data(), n);
  cpu::residual_forward(twice.data(), sum.data(), b.data(), n);
  for (const T x : a) scaled.push_back(T(static_cast<float>(x) * 0.3f));
  const auto run = [&, n = n, shift = shift]() -> Outputs {
    DeviceArray<T> as(with_space(a, shift)), bs(with_space(b, shift)), sums(n + shift), constant(n + shift);
    cuda::residual_forward<T>(sums + shift, as + shift, bs + shift, n, nullptr);
    const std::vector<T> first = behind(sums, shift);
    cuda::add_to<T>(sums + shift, bs + shift, n, nullptr);
    cuda::scale<T>(as + shift, 0.3f, n, nullptr);
    cuda::fill<T>(constant + shift, 0.7f, n, nullptr);
    return {{"sum", first},
            {"sum with b again", behind(sums, shift)},
            {"scaled", behind(as, shift)},
            {"constant", behind(constant, shift)}};
  };
  const Outputs right = {
      {"sum", sum}, {"sum with b again", twice}, {"scaled", scaled}, {"constant", std::vector<T>(a.size(), T(0.7f))}};
  REQUIRE(same_bits(check_kernel(run, right, 1e-30), right));
}

TEST_CASE("many arrays are zeroed, and nothing between them", "[cuda]") {
  // More than one launch takes; one is so large that it is not for a kernel.
  constexpr int64_t arrays = 70, n = 6000, large = 1 << 18;
  const auto size_of = [](int64_t i) { return i == 3 ? large : i == 5 ? n : i % 4; };
  int64_t all = 1;
  for (int64_t i = 0; i < arrays; ++i) all += size_of(i) + 1;
  std::vector<float> expected(static_cast<size_t>(all), 1.0f);
  const auto run = [&]() -> Outputs {
    DeviceArray<float> x(std::vector<float>(static_cast<size_t>(all), 1.0f));
    cuda::zero_each(
        [&](auto&& zero) {
          int64_t begin = 1;  // unaligned to packs
          for (int64_t i = 0; i < arrays; begin += size_of(i++) + 1) {
            std::fill_n(expected.begin() + begin, size_of(i), 0.0f);
            zero(reinterpret_cast<std::byte*>(static_cast<float*>(x) + begin), 4 * size_of(i));
          }
        },
        nullptr);
    return {{"x", x.host()}};
  };
  run();
  check_kernel(run, {{"x", expected}}, 1e-6);
}

TEST_CASE("numbers in fp64 are added in fp64", "[cuda]") {
  const int64_t n = GENERATE(1, 300);
  std::vector<double> sums, to_add, right;
  for (int64_t i = 0; i < n; ++i) {
    sums.push_back(1e9 + static_cast<double>(i));
    to_add.push_back(1.0 / static_cast<double>(i + 3));
    right.push_back(sums.back() + to_add.back());
  }
  DeviceArray<double> out(sums), x(to_add);
  cuda::add_to(out, x, n, nullptr);
  REQUIRE(out.host() == right);
}

TEMPLATE_TEST_CASE("sums of parts have the CPU's bits", "[cuda]", float, bf16) {
  using T = TestType;
  const auto [P, N, C] = GENERATE(std::tuple{1, 1, 1}, std::tuple{2, 3, 8}, std::tuple{3, 5, 7}, std::tuple{8, 9, 264});
  const bool with_bias = GENERATE(false, true);
  const auto parts = normal_values<T>(P * N * C, 1), bias = normal_values<T>(C, 2);
  std::vector<T> right(static_cast<size_t>(N * C));
  cpu::merge_parts(right.data(), parts.data(), with_bias ? bias.data() : nullptr, P, N, C);
  const auto run = [&, P = P, N = N, C = C]() -> Outputs {
    DeviceArray<T> out(N * C), each(parts), to_add(bias);
    cuda::merge_parts<T>(out, each, with_bias ? static_cast<T*>(to_add) : nullptr, P, N, C, nullptr);
    return {{"out", out.host()}};
  };
  REQUIRE(same_bits(check_kernel(run, {{"out", right}}, 1e-30), {{"out", right}}));
}

TEMPLATE_TEST_CASE("conversions between fp32 and bf16 round like the CPU", "[cuda]", float, bf16) {
  using From = TestType;
  const auto [n, shift] = size_of_array();
  auto x = normal_values<From>(n, 1);
  x[0] = From(std::numeric_limits<float>::infinity());
  std::vector<float> wide(x.size());
  std::vector<bf16> narrow(x.size());
  cpu::convert(wide.data(), x.data(), n);
  cpu::convert(narrow.data(), x.data(), n);
  const auto run = [&, n = n, shift = shift]() -> Outputs {
    DeviceArray<From> xs(with_space(x, shift));
    DeviceArray<float> to_fp32(n + shift);
    DeviceArray<bf16> to_bf16(n + shift);
    cuda::convert<float, From>(to_fp32 + shift, xs + shift, n, nullptr);
    cuda::convert<bf16, From>(to_bf16 + shift, xs + shift, n, nullptr);
    return {{"fp32", behind(to_fp32, shift)}, {"bf16", behind(to_bf16, shift)}};
  };
  REQUIRE(same_bits(run(), {{"fp32", wide}, {"bf16", narrow}}));
}

TEMPLATE_TEST_CASE("initial numbers on the GPU have the CPU's bits", "[cuda]", float, bf16) {
  using T = TestType;
  const auto [n, shift] = size_of_array();
  const Elements elements = GENERATE(Elements{0}, Elements{4}, Elements{4095}, Elements{int64_t{3} << 40},
                                     Elements{.begin = 5, .first = 6}, Elements{.columns = 8, .stride = 12},
                                     Elements{.begin = 3, .first = int64_t{1} << 40, .columns = 5, .stride = 7});
  const Philox rng(5, "a parameter");
  std::vector<T> numbers(static_cast<size_t>(n));
  cpu::init_normal(numbers.data(), elements, n, 0.02f, rng);
  const auto run = [&, n = n, shift = shift]() -> Outputs {
    DeviceArray<T> out(n + shift);
    cuda::init_normal<T>(out + shift, elements, n, 0.02f, rng, nullptr);
    return {{"numbers", behind(out, shift)}};
  };
  REQUIRE(same_bits(check_kernel(run, {{"numbers", numbers}}, 1e-30), {{"numbers", numbers}}));
}

TEMPLATE_TEST_CASE("boxes are copied, and rounded like on the CPU", "[cuda]", (std::pair<float, float>),
                   (std::pair<bf16, bf16>), (std::pair<bf16, float>), (std::pair<float, bf16>)) {
  using Out = typename TestType::first_type;
  using X = typename TestType::second_type;
  struct Box {
    BoxStrides to, from;
    BoxSizes sizes;
  };
  // Whole packs, over several blocks of threads; a begin, a distance or a run that is none; the transposition of heads.
  const Box box = GENERATE(Box{{8, 192, 64}, {16, 128, 32}, {9, 3, 24}}, Box{{0, 512, 128}, {64, 448, 64}, {50, 4, 64}},
                           Box{{3, 192, 64}, {16, 128, 32}, {2, 3, 16}}, Box{{0, 100, 30}, {0, 96, 32}, {2, 3, 24}},
                           Box{{8, 33, 16}, {8, 32, 16}, {3, 1, 8}}, Box{{8, 45, 16}, {8, 45, 16}, {3, 2, 8}},
                           Box{{0, 32, 8}, {0, 24, 8}, {3, 2, 7}}, Box{{0, 8, 40}, {0, 32, 8}, {5, 4, 8}});
  const auto size = [&](const BoxStrides& s) {
    return s.begin + (box.sizes.outer - 1) * s.outer + (box.sizes.inner - 1) * s.inner + box.sizes.run;
  };
  const auto x = normal_values<X>(size(box.from), 1);
  std::vector<Out> out(static_cast<size_t>(size(box.to)), Out(9.0f));
  const auto run = [&]() -> Outputs {
    DeviceArray<X> xs(x);
    DeviceArray<Out> outs(std::vector<Out>(out.size(), Out(9.0f)));
    cuda::copy_box<Out, X>(outs, box.to, xs, box.from, box.sizes, nullptr);
    return {{"out", outs.host()}};
  };
  const Outputs got = run();
  cpu::copy_box(out.data(), box.to, x.data(), box.from, box.sizes);
  REQUIRE(same_bits(got, {{"out", out}}));
}
