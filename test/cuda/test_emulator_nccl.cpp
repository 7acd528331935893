// The stand-in for NCCL: ranks are host threads, each with a device of its own.
#include <nccl.h>

#include <barrier>
#include <mutex>
#include <thread>

#include "cuda/emulator_test.h"

using namespace llmc;
using namespace planted;

namespace {

#define NCCL_OK(call)                                                                           \
  do {                                                                                          \
    if (const ncclResult_t result_ = (call); result_ != ncclSuccess)                            \
      throw std::runtime_error(std::string(#call) + ": " + ncclGetErrorString(result_) + ": " + \
                               ncclGetLastError(nullptr));                                      \
  } while (false)

constexpr size_t n = 32;

template <class T>
constexpr ncclDataType_t type_of = ncclFloat32;
template <>
constexpr ncclDataType_t type_of<bf16> = ncclBfloat16;
template <>
constexpr ncclDataType_t type_of<int32_t> = ncclInt32;

// One rank: a host thread, its device, a communicator of all and a stream.
struct Rank {
  int rank, ranks;
  ncclComm_t comm;
  cudaStream_t stream;
  bool aborted = false;
  void finish() const { CUDA_CHECK(cudaStreamSynchronize(stream)); }
};

// Calls f(Rank&) on as many host threads; what each of them threw, or "".
template <class F>
std::vector<std::string> run_ranks(int ranks, F&& f) {
  Devices devices(ranks);
  std::vector<std::string> thrown(static_cast<size_t>(ranks));
  ncclUniqueId id;
  NCCL_OK(ncclGetUniqueId(&id));
  std::vector<std::thread> hosts;
  for (int r = 0; r < ranks; ++r)
    hosts.emplace_back([&, r] {
      try {
        CUDA_CHECK(cudaSetDevice(r));
        const TestStream stream;
        Rank self{r, ranks, nullptr, stream};
        NCCL_OK(ncclCommInitRank(&self.comm, ranks, id, r));
        try {
          f(self);
        } catch (const std::exception& error) {
          thrown[static_cast<size_t>(r)] = error.what();
        }
        if (!self.aborted) {
          if (thrown[static_cast<size_t>(r)].empty()) NCCL_OK(ncclCommDestroy(self.comm));
          else NCCL_OK(ncclCommAbort(self.comm));
        }
      } catch (const std::exception& error) {
        thrown[static_cast<size_t>(r)] += error.what();
      }
    });
  for (std::thread& host : hosts) host.join();
  thrown[0] += devices.close();
  return thrown;
}
// The same, where nothing may be thrown; f returns outputs, which are those of all ranks.
template <class F>
Outputs outputs_of_ranks(int ranks, F&& f) {
  std::vector<Outputs> each(static_cast<size_t>(ranks));
  const auto thrown = run_ranks(ranks, [&](Rank& self) { each[static_cast<size_t>(self.rank)] = f(self); });
  for (const std::string& text : thrown)
    if (!text.empty()) throw cuda_on_cpu::Failure(text);
  Outputs all;
  for (const Outputs& outputs : each) all.insert(all.end(), outputs.begin(), outputs.end());
  return all;
}

template <class T>
std::vector<T> values(size_t count, int rank) {
  std::vector<T> out(count);
  for (size_t i = 0; i < count; ++i) out[i] = T(static_cast<float>(i % 7 + static_cast<size_t>(rank) * 3));
  return out;
}

}  // namespace

// ---- What the collectives compute -----------------------------------------------------------------------------------

TEMPLATE_TEST_CASE("emulated collectives compute what NCCL defines, in place or not", "[cuda][emulator]", float, bf16,
                   int32_t) {
  using T = TestType;
  const ncclDataType_t type = type_of<T>;
  constexpr int ranks = 3;
  const auto run = [&] {
    return outputs_of_ranks(ranks, [&](Rank& self) -> Outputs {
      const int r = self.rank;
      DeviceArray<T> x(values<T>(n, r)), whole(values<T>(ranks * n, r)), out(n), gathered(ranks * n), reduced(n);
      DeviceArray<T> all(values<T>(n, r)), scattered(values<T>(ranks * n, r)), least(values<T>(n, r));
      DeviceArray<T> sent(n), shards(values<T>(ranks * n, r)), from_root(values<T>(n, r));
      T* mine = static_cast<T*>(shards) + static_cast<size_t>(r) * n;
      NCCL_OK(ncclAllReduce(x, out, n, type, ncclSum, self.comm, self.stream));
      NCCL_OK(ncclAllReduce(all, all, n, type, ncclMax, self.comm, self.stream));
      NCCL_OK(ncclReduceScatter(whole, reduced, n, type, ncclSum, self.comm, self.stream));
      NCCL_OK(ncclReduceScatter(scattered, static_cast<T*>(scattered) + static_cast<size_t>(r) * n, n, type, ncclSum,
                                self.comm, self.stream));
      NCCL_OK(ncclAllGather(x, gathered, n, type, self.comm, self.stream));
      NCCL_OK(ncclAllGather(mine, shards, n, type, self.comm, self.stream));
      NCCL_OK(ncclBroadcast(from_root, from_root, n, type, 1, self.comm, self.stream));
      NCCL_OK(
          ncclReduce(least, r == 2 ? static_cast<T*>(least) : nullptr, n, type, ncclMin, 2, self.comm, self.stream));
      NCCL_OK(ncclGroupStart());  // a ring
      NCCL_OK(ncclSend(x, n, type, (r + 1) % ranks, self.comm, self.stream));
      NCCL_OK(ncclRecv(sent, n, type, (r + 2) % ranks, self.comm, self.stream));
      NCCL_OK(ncclGroupEnd());
      self.finish();
      return {{"all-reduce", out.host()},      {"max", all.host()},         {"reduce-scatter", reduced.host()},
              {"in place", scattered.host()},  {"gather", gathered.host()}, {"gather in place", shards.host()},
              {"broadcast", from_root.host()}, {"min", least.host()},       {"ring", sent.host()}};
    });
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
    std::vector<T> gathered, shards, scattered = values<T>(ranks * n, r);
    for (int s = 0; s < ranks; ++s) {
      const auto x = values<T>(n, s), w = values<T>(ranks * n, s);
      gathered.insert(gathered.end(), x.begin(), x.end());
      shards.insert(shards.end(), w.begin() + s * static_cast<int>(n), w.begin() + (s + 1) * static_cast<int>(n));
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
                               {"ring", values<T>(n, (r + 2) % ranks)}});
  }
  check_kernel(run, right, 1e-30);
}

TEST_CASE("emulated sums of bf16 are rounded once", "[cuda][emulator]") {
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

// A kernel before a collective and one after it, on another stream.
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

TEST_CASE("a collective and its neighbours on other streams wait for events", "[cuda][emulator]") {
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

TEST_CASE("a missing wait before or after a collective shows under some schedule", "[cuda][emulator]") {
  const Outputs right = run_between_streams<true, true, false>(), captured = run_between_streams<true, true, true>();
  REQUIRE(differs(run_between_streams<false, true, false>, right));
  REQUIRE(differs(run_between_streams<true, false, false>, right));
  REQUIRE(differs(run_between_streams<false, true, true>, captured));
  REQUIRE(differs(run_between_streams<true, false, true>, captured));
}

#endif

TEST_CASE("waits around collectives that are switched off are missed", "[cuda][emulator]") {
  check_barriers(run_between_streams<true, true, false>);
  check_barriers(run_between_streams<true, true, true>);
}

TEST_CASE("a rank that waits runs what other ranks have enqueued", "[cuda][emulator]") {
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

TEST_CASE("one host thread may have all ranks if it groups their calls", "[cuda][emulator]") {
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

TEST_CASE("a communicator that does not block says when all ranks have come", "[cuda][emulator]") {
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
  REQUIRE((ncclCommGetAsyncError(comms[0], &state) == ncclSuccess && state == ncclSuccess));
  REQUIRE((ncclCommCount(comms[0], &value) == ncclSuccess && value == 2));
  REQUIRE((ncclCommUserRank(comms[1], &value) == ncclSuccess && value == 1));
  REQUIRE((ncclCommCuDevice(comms[1], &value) == ncclSuccess && value == 1));
  for (const ncclComm_t comm : comms) NCCL_OK(ncclCommDestroy(comm));
  REQUIRE_THAT(failure_of([&] { ncclCommCount(comms[0], &value); }), ContainsSubstring("is destroyed or aborted"));
  CUDA_CHECK(cudaSetDevice(0));
}

// ---- What goes wrong ------------------------------------------------------------------------------------------------

namespace {

struct Patience {
  explicit Patience(double seconds) { cuda_on_cpu::set_patience(seconds); }
  ~Patience() { cuda_on_cpu::set_patience(60); }
};

// What both ranks are told when each makes its own call. f(rank, x): x has room for 2 n floats
template <class F>
std::vector<std::string> told(F&& f) {
  return run_ranks(2, [&](Rank& self) {
    DeviceArray<float> x(values<float>(2 * n, self.rank));
    f(self, static_cast<float*>(x));
    self.finish();
  });
}

}  // namespace

TEST_CASE("calls of two ranks that do not fit each other are reported with both", "[cuda][emulator]") {
  const auto both_say = [](const auto& f, const std::string& first, const std::string& second) {
    for (const std::string& text : told(f)) {
      CHECK_THAT(text, ContainsSubstring("collective 1: rank ") && ContainsSubstring("rank 0 calls " + first) &&
                           ContainsSubstring("rank 1 calls " + second));
    }
  };
  const std::string all_reduce = "ncclAllReduce(count 32, ncclFloat32, ncclSum)";
  both_say(
      [](Rank& r, float* x) {
        NCCL_OK(ncclAllReduce(x, x, r.rank == 0 ? n : n - 1, ncclFloat32, ncclSum, r.comm, r.stream));
      },
      all_reduce, "ncclAllReduce(count 31, ncclFloat32, ncclSum)");
  both_say(
      [](Rank& r, float* x) {
        NCCL_OK(ncclAllReduce(x, x, n, r.rank == 0 ? ncclFloat32 : ncclInt32, ncclSum, r.comm, r.stream));
      },
      all_reduce, "ncclAllReduce(count 32, ncclInt32, ncclSum)");
  both_say(
      [](Rank& r, float* x) {
        NCCL_OK(ncclAllReduce(x, x, n, ncclFloat32, r.rank == 0 ? ncclSum : ncclMax, r.comm, r.stream));
      },
      all_reduce, "ncclAllReduce(count 32, ncclFloat32, ncclMax)");
  both_say(
      [](Rank& r, float* x) {
        if (r.rank == 0) NCCL_OK(ncclAllReduce(x, x, n, ncclFloat32, ncclSum, r.comm, r.stream));
        else NCCL_OK(ncclReduce(x, x, n, ncclFloat32, ncclSum, 0, r.comm, r.stream));
      },
      all_reduce, "ncclReduce(count 32, ncclFloat32, ncclSum, root 0)");
  both_say([](Rank& r, float* x) { NCCL_OK(ncclBroadcast(x, x, n, ncclFloat32, r.rank, r.comm, r.stream)); },
           "ncclBroadcast(count 32, ncclFloat32, root 0)", "ncclBroadcast(count 32, ncclFloat32, root 1)");
  for (const std::string& text : told([](Rank&r, float*x) {
         if (r.rank == 0) NCCL_OK(ncclSend(x, n, ncclFloat32, 1, r.comm, r.stream));
         else NCCL_OK(ncclRecv(x, 2 * n, ncclFloat32, 0, r.comm, r.stream));
       }))
    CHECK_THAT(text, ContainsSubstring("from rank 0 to 1: rank ") &&
                         ContainsSubstring("rank 0 calls ncclSend(count 32, ncclFloat32, peer 1)") &&
                         ContainsSubstring("rank 1 calls ncclRecv(count 64, ncclFloat32, peer 0)"));
}

TEST_CASE("a rank that never comes is named", "[cuda][emulator]") {
  const Patience patience(0.3);
  std::barrier<> end(2);
  const auto thrown = run_ranks(2, [&](Rank& self) {
    DeviceArray<float> x(values<float>(n, self.rank));
    std::string text;
    if (self.rank == 0)
      text = failure_of([&] {
        NCCL_OK(ncclAllReduce(x, x, n, ncclFloat32, ncclSum, self.comm, self.stream));
        self.finish();
      });
    end.arrive_and_wait();
    if (!text.empty()) throw std::runtime_error(text);
  });
  REQUIRE_THAT(thrown[0],
               ContainsSubstring("the host has waited 0.3 s for stream 1 of device 0:\n  stream 1 of device 0") &&
                   ContainsSubstring("collective 1: rank 0 calls ncclAllReduce(count 32, ncclFloat32, ncclSum); "
                                     "rank 1 has not come"));
  ncclUniqueId id;
  NCCL_OK(ncclGetUniqueId(&id));
  ncclComm_t comm = nullptr;
  REQUIRE_THAT(failure_of([&] { ncclCommInitRank(&comm, 3, id, 1); }),
               ContainsSubstring("of 3 ranks these have not come: 0 2"));
}

TEST_CASE("ranks that wait for each other in a ring are told at once", "[cuda][emulator]") {
  const auto send_first = told([](Rank& r, float* x) {  // each sends before it receives, without a group
    NCCL_OK(ncclSend(x, n, ncclFloat32, 1 - r.rank, r.comm, r.stream));
    NCCL_OK(ncclRecv(x, n, ncclFloat32, 1 - r.rank, r.comm, r.stream));
  });
  int never = 0;
  for (const std::string& text : send_first) {
    CHECK_THAT(text, ContainsSubstring("the host waits for what never comes"));
    never += text.empty() ? 0 : 1;
  }
  REQUIRE(never == 2);
  // Two communicators, whose collectives two ranks call in opposite orders.
  ncclUniqueId id;
  NCCL_OK(ncclGetUniqueId(&id));
  const auto crossed = told([&](Rank& r, float* x) {
    ncclComm_t second = nullptr;
    NCCL_OK(ncclCommInitRank(&second, 2, id, r.rank));
    for (const bool first : {r.rank == 0, r.rank != 0})
      NCCL_OK(ncclAllReduce(x, x, n, ncclFloat32, ncclSum, first ? r.comm : second, r.stream));
    const std::string text = failure_of([&] { r.finish(); });
    NCCL_OK(ncclCommDestroy(second));
    throw std::runtime_error(text);
  });
  for (const std::string& text : crossed) CHECK_THAT(text, ContainsSubstring("the host waits for what never comes"));
}

TEST_CASE("buffers of collectives are device memory of the rank, large enough and apart", "[cuda][emulator]") {
  const auto first_says = [](auto&& f, const std::string& wanted) {
    const auto thrown = run_ranks(1, [&](Rank& self) {
      DeviceArray<float> x(values<float>(n, self.rank));
      std::vector<float> host(n);
      f(self, static_cast<float*>(x), host.data());
    });
    CHECK_THAT(thrown[0], ContainsSubstring(wanted));
  };
  first_says([](Rank& r, float* x, float* host) { ncclAllReduce(host, x, n, ncclFloat32, ncclSum, r.comm, r.stream); },
             "rank 0 of communicator");
  first_says([](Rank& r, float* x, float* host) { ncclAllReduce(host, x, n, ncclFloat32, ncclSum, r.comm, r.stream); },
             "send: not device memory");
  first_says([](Rank& r, float* x, float*) { ncclAllReduce(x, x, n + 1, ncclFloat32, ncclSum, r.comm, r.stream); },
             "132 bytes from byte 0 of an allocation of 128");
  first_says([](Rank& r, float* x, float*) { ncclAllGather(x + 1, x, n / 2, ncclFloat32, r.comm, r.stream); },
             "its buffers overlap");
  const auto thrown = run_ranks(2, [](Rank& self) {
    if (self.rank == 1) return;
    CUDA_CHECK(cudaSetDevice(1));
    const TestStream stream;
    DeviceArray<float> x(n);
    const auto reduce = [&](cudaStream_t on) { ncclAllReduce(x, x, n, ncclFloat32, ncclSum, self.comm, on); };
    demand(failure_of([&] { reduce(stream); }).ends_with("of device 1: it has device 0"));
    demand(failure_of([&] { reduce(self.stream); }).ends_with("memory of device 1 where memory of device 0 is needed"));
    demand(ncclAllReduce(nullptr, x, n, ncclFloat32, ncclSum, self.comm, self.stream) == ncclInvalidArgument);
    demand(ncclBroadcast(x, x, n, ncclFloat32, 2, self.comm, self.stream) == ncclInvalidArgument);
  });
  REQUIRE(thrown == std::vector<std::string>{"", ""});
}

TEST_CASE("a communicator that is aborted lets its rank's streams go on", "[cuda][emulator]") {
  std::barrier<> end(2);
  ncclComm_t waiting = nullptr;
  const auto thrown = run_ranks(2, [&](Rank& self) {
    DeviceArray<float> x(values<float>(n, self.rank));
    if (self.rank == 0) {
      NCCL_OK(ncclAllReduce(x, x, n, ncclFloat32, ncclSum, self.comm, self.stream));
      waiting = self.comm;
      self.aborted = true;
      end.arrive_and_wait();
      self.finish();  // until the other host gives up for it
      demand(x.host()[1] == 1);
      end.arrive_and_wait();
    } else {
      end.arrive_and_wait();
      std::this_thread::sleep_for(std::chrono::milliseconds(50));
      NCCL_OK(ncclCommAbort(waiting));
      end.arrive_and_wait();
      ncclResult_t state = ncclSuccess;
      NCCL_OK(ncclCommGetAsyncError(self.comm, &state));
      demand(state == ncclRemoteError);
      demand(ncclAllReduce(x, x, n, ncclFloat32, ncclSum, self.comm, self.stream) == ncclRemoteError);
    }
  });
  REQUIRE(thrown == std::vector<std::string>{"", ""});
}

// ---- Bugs that a sanitizer reports: each is a hidden test case, run by this program again ---------------------------

#ifdef __SANITIZE_THREAD__

TEST_CASE("planted: missing wait before a collective", "[.planted]") { run_between_streams<false, true, false>(); }
TEST_CASE("planted: missing wait after a collective", "[.planted]") { run_between_streams<true, false, false>(); }
TEST_CASE("planted: missing wait before a captured collective", "[.planted]") {
  run_between_streams<false, true, true>();
}

TEST_CASE("ThreadSanitizer ends the program at races with a collective", "[cuda][emulator]") {
  for (const char* bug : {"missing wait before a collective", "missing wait after a collective",
                          "missing wait before a captured collective"}) {
    INFO(bug);
    REQUIRE_THAT(output_of_failing(std::string("planted: ") + bug), ContainsSubstring("ThreadSanitizer: data race"));
  }
}

#endif
