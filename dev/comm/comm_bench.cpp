// comm_bench: benchmarks the collectives like nccl-tests: for each size the time, the algorithm bandwidth (buffer bytes
// over time), the bus bandwidth (traffic of the slowest link, comparable across rank counts), and whether the result is
// correct. Ranks are threads of this process.
//
//   make comm-bench && build/comm_bench [RANKS [LARGEST_MIB]]
#include <chrono>
#include <cmath>
#include <cstdio>
#include <cstdlib>

#include "../dev/comm/forms.h"
#include "core/log.h"
#include "run/ranks.h"

using namespace llmc;

namespace {

struct Form {
  const char* name;
  double bus_factor;  // depends on P: bus bandwidth over algorithm bandwidth
  void (*run)(Comm&, Tensor, Tensor, Stream&);
  bool sums;  // every rank gets the sum over the ranks; else each shard is its owner's
};

float element(int rank, int64_t i) { return static_cast<float>((rank * 13 + i) % 61); }

// Returns the median time of a call in microseconds, and the number of wrong elements.
std::pair<double, int64_t> measure(const Form& form, int ranks, int64_t n) {
  World world(Mesh({{Axis::shard, ranks}}));
  std::vector<double> times;
  std::atomic<int64_t> wrong{0};
  run_ranks(world, [&](int rank) {
    const Device device{DeviceKind::cpu, 1};
    Arena arena(device, 2 * n * 4 + 1024), scratch(device, 1 << 20);
    Stream stream(device, scratch);
    const auto comm = world.join(rank, "bench", world.mesh().group(rank, {Axis::shard}));
    const Tensor buffer = arena.alloc("bench", "buffer", DType::fp32, {n}),
                 spare = arena.alloc("bench", "spare", DType::fp32, {n});
    const int rounds = n < (1 << 20) ? 30 : 7;
    for (int round = 0; round < rounds; ++round) {
      for (int64_t i = 0; i < n; ++i) buffer.data<float>()[i] = element(rank, i);
      comm->barrier();
      const auto begin = std::chrono::steady_clock::now();
      form.run(*comm, buffer, spare, stream);
      stream.synchronize();
      comm->barrier();
      if (rank == 0 && round > 1)
        times.push_back(std::chrono::duration<double, std::micro>(std::chrono::steady_clock::now() - begin).count());
    }
    for (int64_t i = 0; i < n; ++i) {
      float expected = 0;
      for (int r = 0; r < ranks; ++r) expected += element(r, i);
      if (!form.sums) expected = element(static_cast<int>(i / (n / ranks)), i);
      const bool mine = i / (n / ranks) == rank;
      if (std::string(form.name) != "reduce_scatter" || mine) wrong += buffer.data<float>()[i] != expected;
    }
  });
  std::sort(times.begin(), times.end());
  return {times[times.size() / 2], wrong};
}

template <void (*F)(const Link&, float*, int64_t, float*)>
void through_transport(Comm& comm, Tensor buffer, Tensor spare, Stream& stream) {
  stream.enqueue(
      [&comm, buffer, spare] { F({comm.transport()}, buffer.data<float>(), buffer.numel(), spare.data<float>()); });
}

}  // namespace

int main(int argc, char** argv) {
  const int P = argc > 1 ? std::atoi(argv[1]) : 4;
  const int64_t largest = (argc > 2 ? std::atoll(argv[2]) : 16) << 20;
  if (P < 2 || P > 64 || largest < 1 << 20) {
    std::fprintf(stderr, "comm_bench: expected 2 to 64 ranks and at least 1 MiB\n");
    return 1;
  }
  const double f = static_cast<double>(P - 1) / P;
  const Form collectives[] = {
      {"all_reduce, ring", 2 * f, [](Comm& c, Tensor t, Tensor, Stream& s) { c.all_reduce(t, s); }, true},
      {"all_reduce, tree", 2 * f, through_transport<forms::tree_all_reduce<float>>, true},
      {"all_reduce, naive", 2 * f, through_transport<forms::naive_all_reduce<float>>, true},
      {"reduce_scatter", f, [](Comm& c, Tensor t, Tensor, Stream& s) { c.reduce_scatter(t, s); }, true},
      {"all_gather", f, [](Comm& c, Tensor t, Tensor, Stream& s) { c.all_gather(t, s); }, false},
  };
  std::printf("%d ranks, threads of this process, fp32\n%-18s %12s %12s %10s %10s %6s\n", P, "collective", "bytes",
              "us", "alg GB/s", "bus GB/s", "wrong");
  int64_t all_wrong = 0;
  for (const Form& form : collectives)
    for (int64_t bytes = 4096, last = 0; bytes != last; last = bytes, bytes = std::min(16 * bytes, largest)) {
      const int64_t n = round_up(bytes / 4, P);
      const auto [us, wrong] = measure(form, P, n);
      const double alg = static_cast<double>(n) * 4e-3 / us;
      std::printf("%-18s %12lld %12.1f %10.3f %10.3f %6lld\n", form.name, static_cast<long long>(4 * n), us, alg,
                  alg * form.bus_factor, static_cast<long long>(wrong));
      all_wrong += wrong;
    }
  return all_wrong == 0 ? 0 : 1;
}
