// The emulated NCCL: its messages when the ranks' calls do not match.
#include <barrier>

#include "cuda/emulator/emulator_ranks.h"

using namespace llmc;

namespace {

struct Patience {
  explicit Patience(double seconds) { cuda_on_cpu::set_patience(seconds); }
  ~Patience() { cuda_on_cpu::set_patience(60); }
};

// The messages that both ranks get when each makes its own call. f(rank, x): x has room for 2 n floats
template <class F>
std::vector<std::string> told(F&& f) {
  return run_ranks(2, [&](Rank& self) {
    DeviceArray<float> x(values<float>(2 * n, self.rank));
    f(self, static_cast<float*>(x));
    self.finish();
  });
}

}  // namespace

TEST_CASE("mismatched calls of two ranks are reported with both", "[comm][cuda][emulator]") {
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

TEST_CASE("a rank that never joins is named", "[comm][cuda][emulator]") {
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
                                     "rank 1 has not arrived"));
  ncclUniqueId id;
  NCCL_OK(ncclGetUniqueId(&id));
  ncclComm_t comm = nullptr;
  REQUIRE_THAT(failure_of([&] { ncclCommInitRank(&comm, 3, id, 1); }),
               ContainsSubstring("of 3 ranks these have not joined: 0 2"));
}

TEST_CASE("a deadlock of ranks is reported at once", "[comm][cuda][emulator]") {
  const auto send_first = told([](Rank& r, float* x) {  // each sends before it receives, without a group
    NCCL_OK(ncclSend(x, n, ncclFloat32, 1 - r.rank, r.comm, r.stream));
    NCCL_OK(ncclRecv(x, n, ncclFloat32, 1 - r.rank, r.comm, r.stream));
  });
  int never = 0;
  for (const std::string& text : send_first) {
    CHECK_THAT(text, ContainsSubstring("deadlock: the host waits for"));
    never += text.empty() ? 0 : 1;
  }
  REQUIRE(never == 2);
  // Two communicators, whose collectives two ranks call in opposite order.
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
  for (const std::string& text : crossed) CHECK_THAT(text, ContainsSubstring("deadlock: the host waits for"));
}

TEST_CASE("collective buffers must be the rank's device memory, large enough and disjoint", "[comm][cuda][emulator]") {
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

TEST_CASE("an aborted communicator unblocks its rank's streams", "[comm][cuda][emulator]") {
  std::barrier<> end(2);
  ncclComm_t waiting = nullptr;
  const auto thrown = run_ranks(2, [&](Rank& self) {
    DeviceArray<float> x(values<float>(n, self.rank));
    if (self.rank == 0) {
      NCCL_OK(ncclAllReduce(x, x, n, ncclFloat32, ncclSum, self.comm, self.stream));
      waiting = self.comm;
      self.aborted = true;
      end.arrive_and_wait();
      self.finish();  // until the other host aborts for it
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
