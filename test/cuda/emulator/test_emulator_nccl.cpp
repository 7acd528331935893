// The emulated NCCL: what its collectives compute, and when they run.
#include <barrier>

#include "cuda/emulator/emulator_ranks.h"

using namespace llmc;
using namespace planted;

// ---- What the collectives compute -----------------------------------------------------------------------------------

TEMPLATE_TEST_CASE("emulated collectives compute what NCCL defines, in place or not", "[cuda][emulator]", float, bf16,
                   int32_t) {
  using T = TestType;
  constexpr int ranks = 3;
  const auto run = [&] {
    return outputs_of_ranks(ranks, [](Rank& self) { return all_collectives(self, n, values<T>); });
  };
  Outputs right;
  for (int r = 0; r < ranks; ++r) {
    const auto sum = [&](size_t count, size_t from) {
      std::vector<float> out(count);
      for (size_t i = 0; i < count; ++i)
        for (int s = 0; s < ranks; ++s) out[i] += static_cast<float>(values<T>(ranks * n, s)[from + i]);
      return out;
    };
    const size_t shard = static_cast<size_t>(r) * n;
    std::vector<T> gathered, shards, to_all, scattered = values<T>(ranks * n, r);
    for (int s = 0; s < ranks; ++s) {
      const auto x = values<T>(n, s), w = values<T>(ranks * n, s);
      gathered.insert(gathered.end(), x.begin(), x.end());
      shards.insert(shards.end(), w.begin() + s * static_cast<int>(n), w.begin() + (s + 1) * static_cast<int>(n));
      to_all.insert(to_all.end(), w.begin() + r * static_cast<int>(n), w.begin() + (r + 1) * static_cast<int>(n));
    }
    const std::vector<float> reduced = sum(n, shard);
    for (size_t i = 0; i < n; ++i) scattered[shard + i] = T(reduced[i]);
    right.insert(right.end(), {{"all-reduce", sum(n, 0)},
                               {"max", values<T>(n, ranks - 1)},
                               {"reduce-scatter", reduced},
                               {"in place", scattered},
                               {"gather", gathered},
                               {"gather in place", shards},
                               {"broadcast", values<T>(n, 1)},
                               {"min", values<T>(n, r == 2 ? 0 : r)},
                               {"ring", values<T>(n, (r + 2) % ranks)},
                               {"all-to-all", to_all}});
  }
  check_kernel(run, right, 1e-30);
}

TEST_CASE("emulated sums of bf16 are rounded once", "[comm][cuda][emulator]") {
  const Outputs out = outputs_of_ranks(3, [](Rank& self) -> Outputs {
    DeviceArray<bf16> x(std::vector<bf16>{bf16(self.rank == 0 ? 256.0f : 1.0f)});  // 257 would be rounded to 256
    NCCL_OK(ncclAllReduce(x, x, 1, ncclBfloat16, ncclSum, self.comm, self.stream));
    self.finish();
    return {{"sum", x.host()}};
  });
  for (const Output& each : out) REQUIRE(each.values[0] == 258);
}

// ---- When they run --------------------------------------------------------------------------------------------------

namespace {

// A kernel before and one after a collective, on another stream.
template <bool wait_before, bool wait_after, bool in_a_graph>
Outputs run_between_streams() {
  return outputs_of_ranks(2, [](Rank& self) -> Outputs {
    const TestStream compute;
    TestEvent ready, done;
    DeviceArray<float> x(values<float>(n, self.rank)), y(values<float>(n, 9)), z(values<float>(n, 9));
    cudaGraph_t graph = nullptr;
    if (in_a_graph) {
      CUDA_CHECK(cudaStreamBeginCapture(compute, cudaStreamCaptureModeThreadLocal));
      CUDA_CHECK(cudaEventRecord(ready, compute));
      CUDA_CHECK(cudaStreamWaitEvent(self.stream, ready));  // a fork
      CUDA_CHECK(cudaMemsetAsync(z, 0, n * sizeof(float), self.stream));
    }
    launch(add_one<Bug::none>, 1, 32, 0, compute, y, x, static_cast<int>(n));
    CUDA_CHECK(cudaEventRecord(ready, compute));
    if (wait_before) CUDA_CHECK(cudaStreamWaitEvent(self.stream, ready));  // y is written
    NCCL_OK(ncclAllReduce(y, y, n, ncclFloat32, ncclSum, self.comm, self.stream));
    CUDA_CHECK(cudaEventRecord(done, self.stream));
    if (wait_after) CUDA_CHECK(cudaStreamWaitEvent(compute, done));  // y is summed
    launch(add_one<Bug::none>, 1, 32, 0, compute, x, y, static_cast<int>(n));
    if (in_a_graph) {
      launch(add_one<Bug::none>, 1, 32, 0, self.stream, z, z, static_cast<int>(n));
      CUDA_CHECK(cudaEventRecord(done, self.stream));
      CUDA_CHECK(cudaStreamWaitEvent(compute, done));  // the join
      cudaGraphExec_t executable = nullptr;
      CUDA_CHECK(cudaStreamEndCapture(compute, &graph));
      CUDA_CHECK(cudaGraphInstantiate(&executable, graph));
      for (int i = 0; i < 2; ++i) CUDA_CHECK(cudaGraphLaunch(executable, compute));
      CUDA_CHECK(cudaGraphExecDestroy(executable));
      CUDA_CHECK(cudaGraphDestroy(graph));
    }
    return {{"x", x.host()}, {"y", y.host()}, {"z", z.host()}};
  });
}

}  // namespace

TEST_CASE("a collective and kernels on other streams wait for each other's events", "[comm][cuda][emulator]") {
  std::vector<float> x(n), y(n);
  for (size_t i = 0; i < n; ++i) {
    y[i] = 2 * static_cast<float>(i % 7) + 3 + 2;
    x[i] = y[i] + 1;
  }
  const std::vector<float> z = values<float>(n, 9);
  check_kernel(run_between_streams<true, true, false>, {{"x", x}, {"y", y}, {"z", z}, {"x", x}, {"y", y}, {"z", z}},
               1e-30);
  for (size_t i = 0; i < n; ++i) {
    y[i] = 2 * (x[i] + 1);
    x[i] = y[i] + 1;
  }
  const std::vector<float> one(n, 1.0f);
  check_kernel(run_between_streams<true, true, true>, {{"x", x}, {"y", y}, {"z", one}, {"x", x}, {"y", y}, {"z", one}},
               1e-30);
}

#ifndef __SANITIZE_THREAD__  // which ends the program at these bugs: see below

TEST_CASE("a missing wait before or after a collective shows under some schedule", "[comm][cuda][emulator]") {
  const Outputs right = run_between_streams<true, true, false>(), captured = run_between_streams<true, true, true>();
  REQUIRE(differs(run_between_streams<false, true, false>, right));
  REQUIRE(differs(run_between_streams<true, false, false>, right));
  REQUIRE(differs(run_between_streams<false, true, true>, captured));
  REQUIRE(differs(run_between_streams<true, false, true>, captured));
}

#endif

TEST_CASE("disabled waits around collectives are detected", "[comm][cuda][emulator]") {
  check_barriers(run_between_streams<true, true, false>);
  check_barriers(run_between_streams<true, true, true>);
}

TEST_CASE("a waiting rank runs work that other ranks have enqueued", "[comm][cuda][emulator]") {
  std::barrier<> rest(2);
  const auto thrown = run_ranks(2, [&](Rank& self) {
    DeviceArray<float> x(values<float>(n, self.rank));
    launch(add_one<Bug::none>, 1, 32, 0, self.stream, x, x, static_cast<int>(n));
    NCCL_OK(ncclAllReduce(x, x, n, ncclFloat32, ncclSum, self.comm, self.stream));
    if (self.rank == 0) self.finish();  // while the other one waits for the barrier
    rest.arrive_and_wait();
    demand(x.host()[0] == 5);
  });
  REQUIRE(thrown == std::vector<std::string>{"", ""});
}

TEST_CASE("one host thread may drive all ranks if it groups their calls", "[comm][cuda][emulator]") {
  const Devices devices(2);
  ncclComm_t comms[2];
  const int same[2] = {1, 1};
  REQUIRE(ncclCommInitAll(comms, 2, same) == ncclInvalidUsage);  // two ranks on one device
  NCCL_OK(ncclCommInitAll(comms, 2, nullptr));
  {
    std::vector<std::unique_ptr<DeviceArray<float>>> x;
    for (int r = 0; r < 2; ++r) {
      CUDA_CHECK(cudaSetDevice(r));
      x.push_back(std::make_unique<DeviceArray<float>>(values<float>(n, r)));
    }
    const auto all_reduce = [&](int r) {
      CUDA_CHECK(cudaSetDevice(r));
      float* data = *x[static_cast<size_t>(r)];
      NCCL_OK(ncclAllReduce(data, data, n, ncclFloat32, ncclSum, comms[r], nullptr));
    };
    REQUIRE_THAT(failure_of([&] { all_reduce(0); }), ContainsSubstring("between ncclGroupStart and -End"));
    NCCL_OK(ncclGroupStart());
    all_reduce(0);
    all_reduce(1);
    NCCL_OK(ncclGroupEnd());
    for (int r = 0; r < 2; ++r) {
      CUDA_CHECK(cudaSetDevice(r));
      REQUIRE(x[static_cast<size_t>(r)]->host()[0] == 3);
    }
  }
  for (const ncclComm_t comm : comms) NCCL_OK(ncclCommDestroy(comm));
  CUDA_CHECK(cudaSetDevice(0));
}

TEST_CASE("a non-blocking communicator reports when all ranks have joined", "[comm][cuda][emulator]") {
  const Devices devices(2);
  ncclUniqueId id;
  NCCL_OK(ncclGetUniqueId(&id));
  ncclConfig_t config = NCCL_CONFIG_INITIALIZER;
  config.blocking = 0;
  ncclComm_t comms[2];
  ncclResult_t state = ncclSuccess;
  int value = -1;
  REQUIRE(ncclCommInitRankConfig(&comms[0], 2, id, 0, &config) == ncclInProgress);
  REQUIRE((ncclCommGetAsyncError(comms[0], &state) == ncclSuccess && state == ncclInProgress));
  CUDA_CHECK(cudaSetDevice(1));
  REQUIRE(ncclCommInitRankConfig(&comms[1], 2, id, 1, &config) == ncclInProgress);
  for (const ncclComm_t comm : comms) {
    int asked = 0;
    do REQUIRE(ncclCommGetAsyncError(comm, &state) == ncclSuccess);
    while (state == ncclInProgress && ++asked < 10);
    REQUIRE(state == ncclSuccess);
  }
  REQUIRE((ncclCommCount(comms[0], &value) == ncclSuccess && value == 2));
  REQUIRE((ncclCommUserRank(comms[1], &value) == ncclSuccess && value == 1));
  REQUIRE((ncclCommCuDevice(comms[1], &value) == ncclSuccess && value == 1));
  for (const ncclComm_t comm : comms) NCCL_OK(ncclCommDestroy(comm));
  REQUIRE_THAT(failure_of([&] { ncclCommCount(comms[0], &value); }), ContainsSubstring("is destroyed or aborted"));
  CUDA_CHECK(cudaSetDevice(0));
}

TEST_CASE("a call of a non-blocking communicator takes effect at once, or while its state is asked",
          "[comm][cuda][emulator]") {
  ncclUniqueId id;
  NCCL_OK(ncclGetUniqueId(&id));
  ncclConfig_t config = NCCL_CONFIG_INITIALIZER;
  config.blocking = 0;
  ncclComm_t comm = nullptr;
  ncclResult_t state = ncclInProgress;
  REQUIRE(ncclCommInitRankConfig(&comm, 1, id, 0, &config) == ncclInProgress);
  REQUIRE(ncclCommDestroy(comm) == ncclInvalidArgument);
  const auto await = [&] {
    do NCCL_OK(ncclCommGetAsyncError(comm, &state));
    while (state == ncclInProgress);
    REQUIRE(state == ncclSuccess);
  };
  await();
  const TestStream stream;
  int later = 0;
  for (int i = 0; i < 40; ++i) {
    DeviceArray<float> x(values<float>(n, 1)), y(n);
    const bool grouped = i % 2 == 1;
    if (grouped) NCCL_OK(ncclGroupStart());
    const ncclResult_t called = ncclAllReduce(x, y, n, ncclFloat32, ncclSum, comm, stream);
    if (grouped) REQUIRE(called == ncclSuccess);
    const ncclResult_t result = grouped ? ncclGroupEnd() : called;
    REQUIRE((result == ncclSuccess || result == ncclInProgress));
    if (result == ncclInProgress) {
      ++later;
      REQUIRE(ncclAllReduce(x, y, n, ncclFloat32, ncclSum, comm, stream) == ncclInvalidArgument);
      CUDA_CHECK(cudaStreamSynchronize(stream));
      REQUIRE(std::isnan(y.host()[0]));  // not even enqueued
      await();
    }
    CUDA_CHECK(cudaStreamSynchronize(stream));
    REQUIRE(y.host() == x.host());
  }
  REQUIRE((later > 5 && later < 35));
  REQUIRE(ncclCommFinalize(comm) == ncclInProgress);
  await();
  NCCL_OK(ncclCommDestroy(comm));
}

// ---- Bugs that a sanitizer reports: each is a hidden test case, run by this program again ---------------------------

#ifdef __SANITIZE_THREAD__

TEST_CASE("planted: missing wait before a collective", "[.planted]") { run_between_streams<false, true, false>(); }
TEST_CASE("planted: missing wait after a collective", "[.planted]") { run_between_streams<true, false, false>(); }
TEST_CASE("planted: missing wait before a captured collective", "[.planted]") {
  run_between_streams<false, true, true>();
}

TEST_CASE("ThreadSanitizer ends the program at races with a collective", "[comm][cuda][emulator]") {
  for (const char* bug : {"missing wait before a collective", "missing wait after a collective",
                          "missing wait before a captured collective"}) {
    INFO(bug);
    REQUIRE_THAT(output_of_failing(std::string("planted: ") + bug), ContainsSubstring("ThreadSanitizer: data race"));
  }
}

#endif
