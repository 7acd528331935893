// The order of rows by expert, and moving rows into it and back, against the CPU ops.
#include "cuda/device_test.h"
#include "ops/cpu/experts.h"
#include "ops/cuda/experts.cuh"

using namespace llmc;

namespace {

struct Sizes {
  int64_t N, E, k, length, first, capacity;
};

std::vector<int32_t> some_choices(const Sizes& s, bool one_expert) {
  std::mt19937_64 random(5);
  std::vector<int32_t> choices;
  for (int64_t n = 0; n < s.N; ++n) {
    std::vector<int32_t> all(static_cast<size_t>(s.E));
    for (size_t e = 0; e < all.size(); ++e) all[e] = static_cast<int32_t>(all.size() - 1 - e);  // none to the first
    if (!one_expert) std::shuffle(all.begin(), all.end(), random);
    choices.insert(choices.end(), all.begin(), all.begin() + s.k);
  }
  return choices;
}

struct Plan {
  std::vector<int32_t> places, offsets;
};
Plan cpu_plan(const Sizes& s, const std::vector<int32_t>& choices, const std::vector<int32_t>& starts,
              const ExpertRoom& rows) {
  const Segments segments{s.length, s.first};
  Plan p{std::vector<int32_t>(choices.size()), std::vector<int32_t>(static_cast<size_t>(s.E + 1))};
  std::vector<int32_t> scratch(static_cast<size_t>((segments.count(s.N) + 1) * s.E));
  cpu::dispatch_plan(p.places.data(), p.offsets.data(), scratch.data(), choices.data(),
                     starts.empty() ? nullptr : starts.data(), s.N, s.E, s.k, s.capacity, segments, rows);
  return p;
}

}  // namespace

TEST_CASE("the kernels that order rows by expert match the CPU, bit by bit", "[ep][cuda]") {
  const Sizes s =
      GENERATE(Sizes{1, 1, 1, 1, 0, -1}, Sizes{40, 7, 2, 9, 4, -1}, Sizes{40, 7, 2, 9, 4, 2}, Sizes{50, 4, 4, 25, 0, 0},
               Sizes{50, 4, 4, 25, 0, 1}, Sizes{700, 600, 2, 350, 0, 1}, Sizes{64, 300, 8, 100, 90, 3});
  const bool one_expert = GENERATE(false, true), with_starts = GENERATE(false, true);
  const auto choices = some_choices(s, one_expert);
  const Segments segments{s.length, s.first};
  const int64_t S = segments.count(s.N);
  std::vector<int32_t> starts(with_starts ? static_cast<size_t>(S * s.E) : 0);
  for (size_t i = 0; i < starts.size(); ++i) starts[i] = static_cast<int32_t>(i % 3);
  const int64_t blocks = s.E % 4 == 0 ? 4 : s.E;
  const ExpertRoom rows = GENERATE_COPY(ExpertRoom{s.N * s.k}, ExpertRoom{blocks * (s.N * s.k + 1), blocks});
  const Plan right = cpu_plan(s, choices, starts, rows);
  const auto run = [&]() -> Outputs {
    DeviceArray<int32_t> in(choices), begin(with_starts ? starts : std::vector<int32_t>{0}), places(s.N * s.k),
        offsets(s.E + 1), scratch(cuda::dispatch_plan_scratch(s.N, s.E, s.k, S));
    cuda::dispatch_plan(places, offsets, scratch, in, with_starts ? static_cast<int32_t*>(begin) : nullptr, s.N, s.E,
                        s.k, s.capacity, segments, rows, nullptr);
    return {{"places", places.host()}, {"offsets", offsets.host()}};
  };
  const Outputs expected = {{"places", right.places}, {"offsets", right.offsets}};
  REQUIRE(same_bits(check_kernel(run, expected, 1e-30), expected));
}

TEMPLATE_TEST_CASE("the kernels that move rows to experts and back match the CPU", "[cuda]", float, bf16) {
  using T = TestType;
  const auto [N, C] = GENERATE(std::pair{1, 1}, std::pair{6, 7}, std::pair{9, 40}, std::pair{3, 2056});
  const int64_t capacity = GENERATE(-1, 1, 0);
  const Sizes s{N, 5, 2, 3, 1, capacity};
  const auto choices = some_choices(s, false);
  const Plan p = cpu_plan(s, choices, {}, {N * s.k});
  const int64_t k = s.k, R = N * k + 3, used = p.offsets.back();
  const auto x = normal_values<T>(N * C, 1), before = normal_values<T>(N * C, 2), dout = normal_values<T>(N * C, 3);
  const auto weights = normal_values<float>(N * k, 4);
  std::vector<T> y = normal_values<T>(R * C, 5);
  std::memset(static_cast<void*>(y.data() + used * C), 0xff, static_cast<size_t>((R - used) * C) * sizeof(T));
  T nan;
  std::memset(static_cast<void*>(&nan), 0xff, sizeof nan);
  const std::vector<T> empty(static_cast<size_t>(R * C), nan);

  std::vector<T> sent = empty, out = before, sum(x.size()), dy = empty;
  std::vector<float> dweights(weights.size());
  cpu::dispatch_rows(sent.data(), x.data(), p.places.data(), N, C, k);
  cpu::combine_rows(out.data(), y.data(), weights.data(), p.places.data(), N, C, k, Accumulate::yes);
  const float* const ones = nullptr;
  cpu::combine_rows(sum.data(), y.data(), ones, p.places.data(), N, C, k, Accumulate::no);
  cpu::combine_backward(dy.data(), dweights.data(), dout.data(), y.data(), weights.data(), p.places.data(), N, C, k);
  for (int64_t i = 0; i < N * k; ++i) {  // in double: the CPU's long sums in fp32 are less exact
    const int64_t place = p.places[static_cast<size_t>(i)];
    double sum = 0;
    for (int64_t c = 0; c < C && place >= 0; ++c)
      sum += static_cast<double>(static_cast<float>(dout[static_cast<size_t>(i / k * C + c)])) *
             static_cast<double>(static_cast<float>(y[static_cast<size_t>(place * C + c)]));
    dweights[static_cast<size_t>(i)] = static_cast<float>(sum);
  }
  const auto used_rows = [&, C = C](std::vector<T> rows) {  // the rest stays NaN
    REQUIRE(std::all_of(rows.begin() + used * C, rows.end(), [](T e) { return std::isnan(static_cast<float>(e)); }));
    rows.resize(static_cast<size_t>(used * C));
    return rows;
  };
  const auto run = [&, N = N, C = C]() -> Outputs {
    DeviceArray<T> in(x), ys(y), to(before), gradient(dout), sent_rows(R * C), sums(N * C), dys(R * C), in_place(y);
    DeviceArray<float> w(weights), dw(N * k), dw_again(N * k);
    DeviceArray<int32_t> places(p.places);
    cuda::dispatch_rows<T>(sent_rows, in, places, N, C, k, nullptr);
    cuda::combine_rows<T>(to, ys, w, places, N, C, k, Accumulate::yes, nullptr);
    cuda::combine_rows<T>(sums, ys, nullptr, places, N, C, k, Accumulate::no, nullptr);
    cuda::combine_backward<T>(dys, dw, gradient, ys, w, places, N, C, k, nullptr);
    cuda::combine_backward<T>(in_place, dw_again, gradient, in_place, w, places, N, C, k, nullptr);
    const Output gradients("dweights", dw.host()), again("dweights", dw_again.host());
    REQUIRE(same_bits({gradients}, {again}));
    REQUIRE(same_bits({{"dy", used_rows(in_place.host())}}, {{"dy", used_rows(dys.host())}}));
    return {{"sent", used_rows(sent_rows.host())},
            {"out", to.host()},
            {"sum", sums.host()},
            {"dy", used_rows(dys.host())},
            gradients};
  };
  check_kernel(run,
               {{"sent", used_rows(sent)}, {"out", out}, {"sum", sum}, {"dy", used_rows(dy)}, {"dweights", dweights}},
               sizeof(T) == 2 ? 2e-3 : 1e-6);
}

TEMPLATE_TEST_CASE("the kernels take rows without places in the order of the choices", "[cuda]", float, bf16) {
  using T = TestType;
  const auto [N, C] = GENERATE(std::pair{6, 7}, std::pair{9, 40});
  const int64_t k = GENERATE(1, 2);
  const auto dout = normal_values<T>(N * C, 1), y = normal_values<T>(N * k * C, 2);
  const auto weights = normal_values<float>(N * k, 3);
  std::vector<int32_t> in_order(static_cast<size_t>(N * k));
  std::iota(in_order.begin(), in_order.end(), 0);
  DeviceArray<int32_t> places(in_order);
  const auto results = [&, N = N, C = C](const int32_t* at) -> Outputs {
    DeviceArray<T> ys(y), gradient(dout), out(N * C), dy(N * k * C);
    DeviceArray<float> w(weights), dw(N * k);
    cuda::combine_rows<T>(out, ys, w, at, N, C, k, Accumulate::no, nullptr);
    cuda::combine_backward<T>(dy, dw, gradient, ys, w, at, N, C, k, nullptr);
    return {{"out", out.host()}, {"dy", dy.host()}, {"dweights", dw.host()}};
  };
  REQUIRE(same_bits(results(nullptr), results(places)));
}
