// experts_bench: compares grouped products of experts with one dense product of the same flops, on the CPU: even shares
// of the rows, uneven ones, and all rows to one expert.
//
//   make experts-bench && build/experts_bench [THREADS]
//
// The two take turns; times are the best of several. With one thread they are processor time, which other work on the
// machine affects only through the caches.
#include <omp.h>

#include <algorithm>
#include <chrono>
#include <cstdio>
#include <cstdlib>
#include <ctime>
#include <functional>
#include <limits>
#include <random>
#include <vector>

#include "ops/ops.h"

using namespace llmc;

namespace {

struct Sizes {
  const char* name;
  int64_t R, C, F, E;  // rows after dispatch; up products have 2 F columns
};

enum class Share : uint8_t { even, uneven, one };

const char* name_of(Share share) {
  return share == Share::even ? "even" : share == Share::uneven ? "uneven" : "one takes all";
}

std::vector<int32_t> offsets_of(int64_t R, int64_t E, Share share) {
  std::mt19937 random(1);
  std::vector<double> weights(static_cast<size_t>(E), 1);
  for (double& w : weights) {  // the busiest expert gets about four times its share
    if (share == Share::uneven) w = std::exp(std::normal_distribution<double>(0, 0.7)(random));
    if (share == Share::one) w = &w == weights.data() + E / 2;
  }
  double total = 0, sum = 0;
  for (const double w : weights) total += w;
  std::vector<int32_t> offsets = {0};
  for (const double w : weights)
    offsets.push_back(static_cast<int32_t>(std::lround((sum += w) / total * static_cast<double>(R))));
  return offsets;
}

double now(int threads) {
  if (threads == 1) return static_cast<double>(std::clock()) / CLOCKS_PER_SEC;
  return std::chrono::duration<double>(std::chrono::steady_clock::now().time_since_epoch()).count();
}

double seconds(Stream& stream, int threads, const std::function<void()>& work) {
  stream.synchronize();
  const double begin = now(threads);
  work();
  stream.synchronize();
  return now(threads) - begin;
}

void measure(const Sizes& s, DType dtype, Share share, int threads) {
  const Device device{DeviceKind::cpu, threads};
  Arena arena(device, int64_t{3} << 30), scratch(device, int64_t{64 + 16 * threads} << 20);
  Stream stream(device, scratch);
  const auto tensor = [&](DType d, const Shape& shape) {
    const Tensor t = arena.alloc("bench", "bench", d, shape);
    if (d != DType::int32) init_normal(t, 1, {}, 1, "bench", stream);
    return t;
  };
  const int64_t O = 2 * s.F, I = s.C;
  const Tensor x = tensor(dtype, {s.R, I}), y = tensor(dtype, {s.R, O}), weight = tensor(dtype, {s.E, O, I}),
               dense = tensor(dtype, {O, I}), dweight = tensor(DType::fp32, {s.E, O, I}),
               ddense = tensor(DType::fp32, {O, I}), offsets = tensor(DType::int32, {s.E + 1});
  const auto rows = offsets_of(s.R, s.E, share);
  std::copy(rows.begin(), rows.end(), offsets.data<int32_t>());
  const struct {
    const char* name;
    std::function<void()> grouped, dense;
  } products[] = {
      {"forward", [&] { grouped_linear_forward(y, x, weight, offsets, stream); },
       [&] { linear_forward(y, x, dense, {}, stream); }},
      {"backward, input", [&] { grouped_linear_backward_input(x, y, weight, offsets, stream); },
       [&] { linear_backward_input(x, y, dense, stream); }},
      {"backward, weight", [&] { grouped_linear_backward_weight(dweight, y, x, offsets, Accumulate::no, stream); },
       [&] { linear_backward_weight(ddense, {}, y, x, Accumulate::no, stream); }}};
  for (const auto& product : products) {
    double best[2] = {std::numeric_limits<double>::infinity(), std::numeric_limits<double>::infinity()};
    for (int run = 0; run < 8; ++run) {
      best[0] = std::min(best[0], seconds(stream, threads, product.grouped));
      best[1] = std::min(best[1], seconds(stream, threads, product.dense));
    }
    const double flops = 2.0 * static_cast<double>(s.R * O * I);
    std::printf("| %s | %s | %s | %s | %.1f | %.1f | %.0f%% |\n", s.name, llmc::name_of(dtype), name_of(share),
                product.name, flops / best[0] / 1e9, flops / best[1] / 1e9, 100 * best[1] / best[0]);
    std::fflush(stdout);
  }
}

}  // namespace

int main(int argc, char** argv) {
  set_openmp_environment(argv);
  const int threads = argc > 1 ? std::atoi(argv[1]) : omp_get_num_procs();
  if (threads < 1) {
    std::fprintf(stderr, "experts_bench: %s: expected a number of threads\n", argv[1]);
    return 1;
  }
  std::printf("%s, %d threads\n\n", matmul_library({DeviceKind::cpu, threads}).c_str(), threads);
  std::printf("| sizes | dtype | rows | product | grouped, GFLOP/s | dense | grouped / dense |\n");
  std::printf("| --- | --- | --- | --- | ---: | ---: | ---: |\n");
  for (const Sizes& s :
       {Sizes{"R 2048, C 384, F 512, E 8", 2048, 384, 512, 8}, Sizes{"R 4096, C 768, F 768, E 32", 4096, 768, 768, 32},
        Sizes{"R 8192, C 1024, F 512, E 64", 8192, 1024, 512, 64}})
    for (const DType dtype : {DType::fp32, DType::bf16})
      for (const Share share : {Share::even, Share::uneven, Share::one}) measure(s, dtype, share, threads);
}
