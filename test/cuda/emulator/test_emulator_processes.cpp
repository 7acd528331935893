// The emulated NCCL between processes.
#include "cuda/emulator/processes.h"

using namespace llmc;
using namespace planted;

namespace {

constexpr size_t many = 20001;  // several chunks, the last one ragged

template <class T>
std::vector<T> random_values(size_t count, int rank) {
  return normal_values<T>(static_cast<int64_t>(count), static_cast<uint64_t>(rank) + 1);
}
template <>
std::vector<int32_t> random_values(size_t count, int rank) {
  return values<int32_t>(count, rank);
}

// The bits of the outputs of all types.
std::string all_bits(Rank& self, size_t elements) {
  std::string bits;
  for (const Outputs& outputs :
       {all_collectives(self, elements, random_values<float>), all_collectives(self, elements, random_values<bf16>),
        all_collectives(self, elements, random_values<int32_t>)})
    for (const Output& each : outputs)
      bits.append(reinterpret_cast<const char*>(each.values.data()), each.values.size() * sizeof(float));
  return bits;
}
std::string read(const std::string& path) {
  std::ostringstream text;
  text << std::ifstream(path, std::ios::binary).rdbuf();
  return text.str();
}

// A process with one rank.
struct Alone {
  TestStream stream;
  Rank self;
  explicit Alone(int ranks, bool blocking = true) : self{this_process(), ranks, nullptr, stream} {
    ncclConfig_t config = NCCL_CONFIG_INITIALIZER;
    config.blocking = blocking ? 1 : 0;
    const ncclResult_t begun = ncclCommInitRankConfig(&self.comm, ranks, told_id(), self.rank, &config);
    REQUIRE(begun == (blocking ? ncclSuccess : ncclInProgress));
  }
  ncclResult_t state() {
    ncclResult_t state = ncclSuccess;
    NCCL_OK(ncclCommGetAsyncError(self.comm, &state));
    return state;
  }
};

// Ranks that live see at once that one has died; after an abort the stream proceeds.
void expect_a_death(Alone& alone, Clock::time_point begin) {
  REQUIRE(eventually([&] { return alone.state() == ncclRemoteError; }));
  CHECK(seconds_since(begin) < prompt);
  REQUIRE_THAT(ncclGetLastError(nullptr), ContainsSubstring("in another process, has ended or was aborted"));
  DeviceArray<float> x(1);
  REQUIRE(ncclAllReduce(x, x, 1, ncclFloat32, ncclSum, alone.self.comm, alone.stream) == ncclRemoteError);
  NCCL_OK(ncclCommAbort(alone.self.comm));
  CUDA_CHECK(cudaStreamSynchronize(alone.stream));
  CHECK(seconds_since(begin) < prompt);
}

}  // namespace

// ---- What the collectives compute -----------------------------------------------------------------------------------

TEST_CASE("process: collectives", "[.process]") {
  const int each = told("CUDA_VISIBLE_DEVICES").size() > 1 ? 2 : 1, ranks = 4;
  std::vector<std::thread> hosts;
  std::vector<std::string> bits(static_cast<size_t>(each));
  for (int local = 0; local < each; ++local)
    hosts.emplace_back([&, local, id = told_id(), rank = this_process() * each + local] {
      CUDA_CHECK(cudaSetDevice(local));
      const TestStream stream;
      Rank self{rank, ranks, nullptr, stream};
      NCCL_OK(ncclCommInitRank(&self.comm, ranks, id, rank));
      bits[static_cast<size_t>(local)] = all_bits(self, many);
      NCCL_OK(ncclCommDestroy(self.comm));
    });
  for (int local = 0; local < each; ++local) {
    hosts[static_cast<size_t>(local)].join();
    std::ofstream(told_file("bits." + std::to_string(this_process() * each + local)), std::ios::binary)
        << bits[static_cast<size_t>(local)];
  }
}

TEST_CASE("collectives of several processes give the bits of those of one process", "[cuda][emulator]") {
  std::vector<std::string> wanted(4);
  const auto thrown = run_ranks(
      4, [&](Rank& self) { wanted[static_cast<size_t>(self.rank)] = all_bits(self, many); }, size_t{8} << 20);
  REQUIRE(thrown == std::vector<std::string>(4));
  const std::vector<std::string> gpus = GENERATE(std::vector<std::string>{"0", "1", "2", "3"},  //
                                                 std::vector<std::string>{"2,0", "1,3"});
  Processes processes("process: collectives", static_cast<int>(gpus.size()), gpus);
  processes.require_all_passed();
  for (int rank = 0; rank < 4; ++rank)
    REQUIRE((read(processes.dir() / ("bits." + std::to_string(rank))) == wanted[static_cast<size_t>(rank)]));
}

// ---- When they run --------------------------------------------------------------------------------------------------

TEST_CASE("process: kernels and collectives", "[.process]") {
  Alone alone(2);
  const TestStream compute;
  TestEvent ready, done;
  DeviceArray<float> x(values<float>(n, alone.self.rank)), y(n);
  cudaGraph_t graph = nullptr;
  cudaGraphExec_t executable = nullptr;
  CUDA_CHECK(cudaStreamBeginCapture(compute, cudaStreamCaptureModeThreadLocal));
  launch(add_one<Bug::none>, 1, 32, 0, compute, y, x, static_cast<int>(n));
  CUDA_CHECK(cudaEventRecord(ready, compute));
  CUDA_CHECK(cudaStreamWaitEvent(alone.stream, ready));
  NCCL_OK(ncclAllReduce(y, x, n, ncclFloat32, ncclSum, alone.self.comm, alone.stream));
  CUDA_CHECK(cudaEventRecord(done, alone.stream));
  CUDA_CHECK(cudaStreamWaitEvent(compute, done));
  CUDA_CHECK(cudaStreamEndCapture(compute, &graph));
  CUDA_CHECK(cudaGraphInstantiate(&executable, graph));
  for (int i = 0; i < 3; ++i) CUDA_CHECK(cudaGraphLaunch(executable, compute));
  if (alone.self.rank == 0) {  // waits for the other one outside the runtime, which then needs this rank's kernels
    REQUIRE(eventually([] { return std::filesystem::exists(told_file("1 is done")); }));
  } else {
    CUDA_CHECK(cudaStreamSynchronize(compute));
    std::ofstream(told_file("1 is done"));
  }
  float wanted[2] = {0, 3};
  for (int i = 0; i < 3; ++i) wanted[0] = wanted[1] = wanted[0] + 1 + wanted[1] + 1;
  REQUIRE(x.host()[0] == wanted[0]);
  CUDA_CHECK(cudaGraphExecDestroy(executable));
  CUDA_CHECK(cudaGraphDestroy(graph));
  const std::string maps = read("/proc/self/maps");  // the memory that they share has no name that a death would leave
  REQUIRE_THAT(maps, ContainsSubstring("memfd:emulated NCCL (deleted)") && !ContainsSubstring("/dev/shm/"));
  NCCL_OK(ncclCommDestroy(alone.self.comm));
}

TEST_CASE("a rank's streams go on for other processes while its host waits elsewhere", "[cuda][emulator]") {
  Processes("process: kernels and collectives", 2).require_all_passed();
}

// ---- What goes wrong ------------------------------------------------------------------------------------------------

TEST_CASE("process: mismatch", "[.process]") {
  Alone alone(2);
  DeviceArray<float> x(2 * n);
  const size_t count = alone.self.rank == 0 ? n : n + 1;
  const std::string text = failure_of([&] {
    NCCL_OK(ncclAllReduce(x, x, count, ncclFloat32, ncclSum, alone.self.comm, alone.stream));
    alone.self.finish();
  });
  REQUIRE_THAT(text, ContainsSubstring("collective 1: rank ") &&
                         ContainsSubstring("calls ncclAllReduce(count 32, ncclFloat32, ncclSum)") &&
                         ContainsSubstring("calls ncclAllReduce(count 33, ncclFloat32, ncclSum)"));
  NCCL_OK(ncclCommAbort(alone.self.comm));
}

TEST_CASE("mismatched calls of two processes are reported on both", "[cuda][emulator]") {
  Processes("process: mismatch", 2).require_all_passed();
}

TEST_CASE("process: one GPU", "[.process]") {
  unsetenv("NCCL_MULTI_RANK_GPU_ENABLE");  // which the trainer sets, and this process has inherited
  ncclComm_t comm = nullptr;
  REQUIRE(ncclCommInitRank(&comm, 2, told_id(), this_process()) == ncclInvalidUsage);
  REQUIRE(ncclGetLastError(nullptr) == std::string("two ranks have the same device"));
}

TEST_CASE("two processes with one GPU are refused", "[cuda][emulator]") {
  Processes("process: one GPU", 2, {"3", "3"}).require_all_passed();
}

TEST_CASE("process: a rank twice", "[.process]") {
  ncclComm_t comm = nullptr;
  if (this_process() == 1) REQUIRE(eventually([] { return std::filesystem::exists(told_file("0 has joined")); }));
  ncclConfig_t config = NCCL_CONFIG_INITIALIZER;
  config.blocking = 0;
  const ncclResult_t result = ncclCommInitRankConfig(&comm, 2, told_id(), 0, &config);
  REQUIRE(result == (this_process() == 0 ? ncclInProgress : ncclInvalidUsage));
  std::ofstream(told_file(std::to_string(this_process()) + " has joined"));
  REQUIRE(eventually([] { return std::filesystem::exists(told_file("1 has joined")); }));
  if (comm != nullptr) NCCL_OK(ncclCommAbort(comm));
}

TEST_CASE("two processes with the same rank are refused", "[cuda][emulator]") {
  Processes("process: a rank twice", 2).require_all_passed();
}

TEST_CASE("process: death", "[.process]") {
  const std::string when = told("TEST_WHEN");
  const bool dies = this_process() == 1;
  Alone alone(when == "init" ? 3 : 2, false);
  const auto begin = Clock::now();
  if (when == "init") {  // rank 2 never comes
    REQUIRE(alone.state() != ncclSuccess);
    if (dies) raise(SIGKILL);
    return expect_a_death(alone, begin);
  }
  REQUIRE(eventually([&] { return alone.state() == ncclSuccess; }));
  DeviceArray<float> x(values<float>(many, 0));
  const auto reduce = [&] {
    ncclAllReduce(x, x, many, ncclFloat32, ncclSum, alone.self.comm, alone.stream);
    REQUIRE(eventually([&] { return alone.state() != ncclInProgress; }));
  };
  reduce();
  alone.self.finish();
  const auto after = Clock::now();
  if (dies) raise(SIGKILL);
  if (when == "in a collective") reduce();
  expect_a_death(alone, after);
}

TEST_CASE("a process that dies is reported to its peers", "[cuda][emulator]") {
  const std::string when = GENERATE("init", "in a collective", "between collectives");
  CAPTURE(when);
  Processes processes("process: death", 2, {}, when);
  REQUIRE(processes.end_of(1) == "killed");
  const std::string end = processes.end_of(0);
  INFO(processes.output(0));
  REQUIRE(end == "passed");
}

TEST_CASE("process: abort", "[.process]") {
  Alone alone(2);
  DeviceArray<float> x(n);
  if (this_process() == 0) {  // rank 1 lives, but does not join
    NCCL_OK(ncclAllReduce(x, x, n, ncclFloat32, ncclSum, alone.self.comm, alone.stream));
    std::thread([&] {
      std::this_thread::sleep_for(std::chrono::milliseconds(100));
      NCCL_OK(ncclCommAbort(alone.self.comm));
    }).join();
    const auto begin = Clock::now();
    alone.self.finish();
    CHECK(seconds_since(begin) < prompt);
  } else {
    REQUIRE(eventually([&] { return alone.state() == ncclRemoteError; }));
    NCCL_OK(ncclCommAbort(alone.self.comm));
  }
}

TEST_CASE("an abort ends a collective that another process does not join, and is reported there", "[cuda][emulator]") {
  Processes("process: abort", 2).require_all_passed();
}
