// mpi_bench.cpp: the collectives of MPI itself, or the rings of llmc/comm/ring.h over MpiLinks, between processes.
// dev/comm/beside_mpi.sh runs both in turn and prints them side by side. A process runs only one of the two, because
// all MPI calls must come from one thread, and MpiLinks has its own.
//
//   mpirun -n PROCESSES build/mpi_bench mpi|ring [LARGEST_MIB]     lines of "COLLECTIVE BYTES MICROSECONDS"
#include <omp.h>

#include <algorithm>
#include <chrono>
#include <cstdio>
#include <cstdlib>
#include <functional>
#include <memory>
#include <string>
#include <vector>

#include "comm/comm_mpi.h"
#include "comm/ring.h"

using namespace llmc;

namespace {

// Buffers are those of ring.h: P shards of n elements. Calls return where the result is: in the buffer or in spare.
class Implementation {
 public:
  virtual ~Implementation() = default;
  virtual int rank() const = 0;
  virtual int size() const = 0;
  virtual void barrier() = 0;
  virtual float* all_reduce(float* buffer, float* spare, int64_t n) = 0;
  virtual float* reduce_scatter(float* buffer, float* spare, int64_t n) = 0;
  virtual float* all_gather(float* buffer, float* spare, int64_t n) = 0;
  virtual float* all_to_all(float* buffer, float* spare, int64_t n) = 0;
};

class MpiCollectives final : public Implementation {
 public:
  MpiCollectives() {
    int level = 0;
    MPI_Init_thread(nullptr, nullptr, MPI_THREAD_FUNNELED, &level);
  }
  ~MpiCollectives() override { MPI_Finalize(); }
  int rank() const override { return of(MPI_Comm_rank); }
  int size() const override { return of(MPI_Comm_size); }
  void barrier() override { MPI_Barrier(world_); }
  float* all_reduce(float* buffer, float*, int64_t n) override {
    MPI_Allreduce(MPI_IN_PLACE, buffer, static_cast<int>(n) * size(), MPI_FLOAT, MPI_SUM, world_);
    return buffer;
  }
  float* reduce_scatter(float* buffer, float* spare, int64_t n) override {
    MPI_Reduce_scatter_block(buffer, spare + rank() * n, static_cast<int>(n), MPI_FLOAT, MPI_SUM, world_);
    return spare;
  }
  float* all_gather(float* buffer, float*, int64_t n) override {
    MPI_Allgather(MPI_IN_PLACE, 0, MPI_FLOAT, buffer, static_cast<int>(n), MPI_FLOAT, world_);
    return buffer;
  }
  float* all_to_all(float* buffer, float* spare, int64_t n) override {
    MPI_Alltoall(buffer, static_cast<int>(n), MPI_FLOAT, spare, static_cast<int>(n), MPI_FLOAT, world_);
    return spare;
  }

 private:
  int of(int (*call)(MPI_Comm, int*)) const {
    int value = 0;
    call(world_, &value);
    return value;
  }
  const MPI_Comm world_ = MPI_COMM_WORLD;
};

class Rings final : public Implementation, Transport {
 public:
  int rank() const override { return links_.process(); }
  int size() const override { return links_.processes(); }
  void exchange(const ToRank& out, const FromRank& in, Stream*) override { links_.exchange(0, rank(), out, in); }
  void barrier() override {  // by dissemination: Hensgen, Finkel & Manber 1988
    char out = 0, in = 0;
    for (int s = 1; s < size(); s *= 2)
      exchange({(rank() + s) % size(), &out, 1}, {(rank() - s + size()) % size(), &in, 1}, nullptr);
  }
  float* all_reduce(float* buffer, float* spare, int64_t n) override {
    ring::reduce_scatter(link_, buffer, n, spare);
    ring::all_gather(link_, buffer, n);
    return buffer;
  }
  float* reduce_scatter(float* buffer, float* spare, int64_t n) override {
    ring::reduce_scatter(link_, buffer, n, spare);
    return buffer;
  }
  float* all_gather(float* buffer, float*, int64_t n) override {
    ring::all_gather(link_, buffer, n);
    return buffer;
  }
  float* all_to_all(float* buffer, float* spare, int64_t n) override {
    ring::all_to_all(link_, spare, buffer, n);
    return spare;
  }

 private:
  MpiLinks links_{1};
  const Link link_{*this};
};

float element(int rank, int64_t i) { return static_cast<float>((rank * 13 + i) % 61); }

struct Form {
  const char* name;
  float* (Implementation::*run)(float* buffer, float* spare, int64_t n);
  // Element i of the result, in shard k, on this rank of P; -1: undefined.
  std::function<float(int64_t i, int k, int rank, int P, int64_t n)> expected;
};

float sum(int64_t i, int P) {
  float total = 0;
  for (int r = 0; r < P; ++r) total += element(r, i);
  return total;
}
const Form forms[] = {
    {"all_reduce", &Implementation::all_reduce, [](int64_t i, int, int, int P, int64_t) { return sum(i, P); }},
    {"reduce_scatter", &Implementation::reduce_scatter,
     [](int64_t i, int k, int rank, int P, int64_t) { return k == rank ? sum(i, P) : -1; }},
    {"all_gather", &Implementation::all_gather, [](int64_t i, int k, int, int, int64_t) { return element(k, i); }},
    {"all_to_all", &Implementation::all_to_all,
     [](int64_t i, int k, int rank, int, int64_t n) { return element(k, i + (rank - k) * n); }}};

// The median time of a call in microseconds.
double measure(Implementation& all, const Form& form, int64_t n) {
  const int P = all.size(), rank = all.rank();
  std::vector<float> buffer(static_cast<size_t>(n * P)), spare(buffer.size());
  std::vector<double> times(n * P < (1 << 18) ? 41 : 9);
  for (double& time : times) {
    for (int64_t i = 0; i < n * P; ++i) buffer[static_cast<size_t>(i)] = element(rank, i);
    all.barrier();
    const auto begin = std::chrono::steady_clock::now();
    const float* const result = (all.*form.run)(buffer.data(), spare.data(), n);
    all.barrier();
    time = std::chrono::duration<double, std::micro>(std::chrono::steady_clock::now() - begin).count();
    for (int64_t i = 0; i < n * P; ++i) {
      const float expected = form.expected(i, static_cast<int>(i / n), rank, P, n);
      CHECK(expected < 0 || result[i] == expected, "{}: element {} on rank {} is {}, expected {}", form.name, i, rank,
            result[i], expected);
    }
  }
  std::nth_element(times.begin(), times.begin() + std::ssize(times) / 2, times.end());
  return times[times.size() / 2];
}

}  // namespace

int main(int argc, char** argv) {
  const std::string which = argc > 1 ? argv[1] : "";
  const int64_t largest = (argc > 2 ? std::atoll(argv[2]) : 64) << 20;
  if ((which != "mpi" && which != "ring") || largest < 1 << 20) {
    std::fprintf(stderr, "mpi_bench: expected mpi or ring, and at least 1 MiB\n");
    return 1;
  }
  omp_set_num_threads(1);
  try {
    std::unique_ptr<Implementation> all;
    if (which == "mpi") all = std::make_unique<MpiCollectives>();
    else all = std::make_unique<Rings>();
    for (const Form& form : forms)
      for (int64_t bytes = 4096, last = 0; bytes != last; last = bytes, bytes = std::min(16 * bytes, largest)) {
        const int64_t n = bytes / 4 / all->size();
        const double us = measure(*all, form, n);
        if (all->rank() == 0)
          std::printf("%s %lld %.1f\n", form.name, static_cast<long long>(n * 4 * all->size()), us),
              std::fflush(stdout);
      }
  } catch (const std::exception& error) {
    std::fprintf(stderr, "mpi_bench: %s\n", error.what());
    std::_Exit(1);
  }
}
