// QK-clip's kernels against the CPU ops.
#include "cuda/device_test.h"
#include "ops/cpu/qk_clip.h"
#include "ops/cuda/qk_clip.cuh"
#include "ops/optimizers.h"

using namespace llmc;

TEST_CASE("the kernels that find the largest logits match the CPU", "[cuda]") {
  const int64_t B = GENERATE(1, 3), Hq = 2 * B, T = GENERATE(1, 300);
  const std::vector<float> rows = normal_values<float>(B * Hq * T, 1);
  std::vector<double> most(static_cast<size_t>(Hq), 0.5), gathered, of_ranks = most;
  cpu::largest_logits(most.data(), rows.data(), B, Hq, T);
  for (const float x : rows) gathered.push_back(x);
  cpu::largest_of_ranks(of_ranks.data(), gathered.data(), B * T, Hq);
  const auto run = [&]() -> Outputs {
    const std::vector<double> before(static_cast<size_t>(Hq), 0.5);
    DeviceArray<double> mosts(before), ranks(before);
    cuda::largest_logits(mosts, DeviceArray<float>(rows), B, Hq, T, nullptr);
    cuda::largest_of_ranks(ranks, DeviceArray<double>(gathered), B * T, Hq, nullptr);
    return {{"of heads", mosts.host()}, {"of ranks", ranks.host()}};
  };
  check_kernel(run, {{"of heads", most}, {"of ranks", of_ranks}}, 1e-12);
}

TEMPLATE_TEST_CASE("the kernel that shrinks the weights of heads matches the CPU", "[cuda]", float, bf16) {
  using W = TestType;
  const bool masters = sizeof(W) == 2 && GENERATE(true, false);
  const bool whole = GENERATE(true, false);
  const Elements elements = whole ? Elements{} : Elements{.begin = 2, .first = 1, .columns = 3, .stride = 5};
  constexpr int64_t n = 1003, heads = 90;
  std::vector<double> largest;
  for (int64_t h = 0; h < heads; ++h) largest.push_back(90.0 + static_cast<double>(h));
  const std::vector<double> control = {7.0, 0.5, 1.0, 0.0};
  const HeadClip clip{100, ClipShare::root, 21};
  const Philox words = rounding_words(3, "q", 2);
  const std::vector<float> before = normal_values<float>(n, 1);
  std::vector<W> start;
  for (const float x : before) start.push_back(W(x));
  std::vector<W> weight = start;
  std::vector<float> master = before;
  cpu::clip_heads(weight.data(), masters ? master.data() : nullptr, largest.data(), control.data(), elements, n, clip,
                  words);
  const auto run = [&]() -> Outputs {
    DeviceArray<W> weights(start);
    DeviceArray<float> copies(before);
    cuda::clip_heads<W>(weights, masters ? static_cast<float*>(copies) : nullptr, DeviceArray<double>(largest),
                        DeviceArray<double>(control), elements, n, clip, words, nullptr);
    return {{"weight", weights.host()}, {"master", copies.host()}};
  };
  check_kernel(run, {{"weight", weight}, {"master", master}}, 1e-6);
}
