// NCCL's collectives as the trainer calls them (comm/comm_nccl.h), between processes: peers that die or never
// come, and an abort from another thread.
#include <future>

#include "comm/world.h"
#include "cuda/emulator/processes.h"
#include "cuda_on_cpu/nccl/nccl_clique.h"
#include "parallel/row_blocks.h"

using namespace llmc;

namespace {

constexpr int64_t shard = 9000;  // several chunks of the emulated NCCL for all shards together

// A process with one rank, a group of all, and a stream.
struct Member {
  int rank = this_process(), ranks;
  Device device{.kind = DeviceKind::cuda};
  Arena arena{device, int64_t{8} << 20}, scratch{device, int64_t{1} << 20};
  Stream stream{device, scratch};
  std::unique_ptr<GpuCollectives> group;

  explicit Member(int ranks_) : ranks(ranks_) {
    prepare_nccl();
    const ncclUniqueId id = told_id();
    group = make_nccl_group({id.internal, sizeof id.internal}, rank, ranks, 0, 1);
  }
  Tensor tensor(const char* name, DType dtype, int64_t n, uint64_t seed) {
    Tensor t = arena.alloc(name, "test", dtype, {n});
    with_type(dtype, [&](auto tag) {
      using T = typename decltype(tag)::type;
      const auto from = normal_values<T>(n, seed);
      CUDA_CHECK(cudaMemcpy(t.bytes, from.data(), from.size() * sizeof(T), cudaMemcpyHostToDevice));
    });
    return t;
  }
};
std::string bytes_of(const Tensor& t) {
  std::string bytes(static_cast<size_t>(t.size_bytes()), '\0');
  CUDA_CHECK(cudaMemcpy(bytes.data(), t.bytes, bytes.size(), cudaMemcpyDeviceToHost));
  return bytes;
}

// What becomes of an exception of f(): "peer" for a PeerError, its text otherwise, or "none".
template <class F>
std::string thrown_by(F&& f) {
  try {
    f();
  } catch (const PeerError&) {
    return "peer";
  } catch (const std::exception& error) {
    return error.what();
  }
  return "none";
}

}  // namespace

TEST_CASE("process: the trainer's collectives", "[.process]") {
  Member m(3);
  m.group->connect(10);
  for (const DType dtype : {DType::fp32, DType::bf16}) {
    const int64_t n = shard * m.ranks;
    const auto each = [&](uint64_t rank) { return rank * 10 + (dtype == DType::bf16 ? 1 : 0); };
    const auto own = each(static_cast<uint64_t>(m.rank));
    Tensor sums = m.tensor("sums", dtype, n, own), gathered = m.tensor("gathered", dtype, n, own),
           copy = m.tensor("copy", dtype, n, own), reduced = m.tensor("reduced", dtype, n, own),
           out = m.tensor("out", dtype, n, 99), in = m.tensor("in", dtype, n, own),
           passed = m.tensor("passed", dtype, n, own);
    m.group->reduce_scatter(sums, shard, m.stream);
    m.group->all_gather(sums, shard, m.stream);
    m.group->all_gather(gathered, shard, m.stream);
    m.group->broadcast(copy, n, 1, m.stream);
    m.group->reduce(reduced, n, 2, m.stream);
    m.group->all_to_all(out, in, shard, m.stream);
    const auto rows_between = [](int from, int to) -> int64_t { return from == 1 ? 0 : 2 * from + to; };
    std::vector<int64_t> send, receive;
    for (int k = 0; k < m.ranks; ++k) {
      send.push_back(rows_between(m.rank, k));
      receive.push_back(rows_between(k, m.rank));
    }
    constexpr int64_t width = 5, rows = 20;
    const Tensor outgoing = m.tensor("outgoing", dtype, rows * width, own).reshaped({rows, width}),
                 incoming = m.tensor("incoming", dtype, rows * width, 99).reshaped({rows, width});
    m.group->all_to_all_rows(incoming, outgoing, in_order(send), in_order(receive), m.stream);
    if (m.rank == 0) m.group->exchange({1, passed.bytes, passed.size_bytes()}, {}, m.stream);
    if (m.rank == 1) m.group->exchange({}, {0, passed.bytes, passed.size_bytes()}, m.stream);
    m.stream.synchronize();
    m.group->check();
    with_type(dtype, [&](auto tag) {
      using T = typename decltype(tag)::type;
      std::vector<std::vector<T>> inputs;
      for (uint64_t rank = 0; rank < 3; ++rank) inputs.push_back(normal_values<T>(n, each(rank)));
      std::vector<T> sum, joined, crossed;
      for (size_t i = 0; i < static_cast<size_t>(n); ++i) {
        const size_t owner = i / static_cast<size_t>(shard), at = i % static_cast<size_t>(shard);
        sum.push_back(T((static_cast<float>(inputs[0][i]) + static_cast<float>(inputs[1][i])) +
                        static_cast<float>(inputs[2][i])));
        joined.push_back(inputs[owner][i]);
        crossed.push_back(inputs[owner][static_cast<size_t>(m.rank * shard) + at]);
      }
      const auto is = [](const Tensor& t, const std::vector<T>& wanted) {
        return bytes_of(t) == std::string(reinterpret_cast<const char*>(wanted.data()), wanted.size() * sizeof(T));
      };
      REQUIRE(is(sums, sum));
      REQUIRE(is(gathered, joined));
      REQUIRE(is(copy, inputs[1]));
      if (m.rank == 2) REQUIRE(is(reduced, sum));
      REQUIRE(is(out, crossed));
      std::vector<T> came, stays = normal_values<T>(rows * width, 99);
      for (int k = 0; k < m.ranks; ++k) {
        int64_t begin = 0;  // of the rows for this rank
        for (int before = 0; before < m.rank; ++before) begin += rows_between(k, before);
        const std::vector<T> all = normal_values<T>(rows * width, each(static_cast<uint64_t>(k)));
        const auto theirs = all.begin() + begin * width;
        came.insert(came.end(), theirs, theirs + rows_between(k, m.rank) * width);
      }
      came.insert(came.end(), stays.begin() + std::ssize(came), stays.end());
      REQUIRE(is(incoming, came));
      REQUIRE(is(passed, inputs[m.rank == 1 ? 0 : static_cast<size_t>(m.rank)]));
    });
  }
}

TEST_CASE("the trainer's collectives compute the same between processes", "[comm][cuda][emulator]") {
  Processes("process: the trainer's collectives", 3).require_all_passed();
}

TEST_CASE("process: a group that is aborted", "[.process]") {
  const std::string when = told("TEST_WHEN");
  Member m(2);
  if (when == "deadline") {  // rank 1 never comes
    const auto begin = Clock::now();
    REQUIRE_THAT(thrown_by([&] { m.group->connect(0.2); }),
                 ContainsSubstring("NCCL has not connected the 2 GPUs of a group within 0.2 s"));
    CHECK(seconds_since(begin) < prompt);
    REQUIRE(thrown_by([&] { m.group->connect(0.2); }) != "none");
    return;
  }
  if (m.rank == 1) {  // lives, but does not take part
    m.group->connect(10);
    REQUIRE(eventually([&] { return thrown_by([&] { m.group->check(); }) != "none"; }));
    REQUIRE_THAT(thrown_by([&] { m.group->check(); }), ContainsSubstring("remote process exited"));
    return m.group->abort();
  }
  Tensor x = m.tensor("x", DType::fp32, shard, 1);
  if (when != "init") m.group->connect(10);
  const auto begin = Clock::now();
  std::thread other([&] {
    std::this_thread::sleep_for(std::chrono::milliseconds(200));
    m.group->expect_abort();
    m.group->abort();
    m.group->abort();
    CHECK(seconds_since(begin) < prompt);
  });
  if (when == "init") {
    CHECK(thrown_by([&] { m.group->connect(600); }) == "peer");
  } else {
    m.stream.set_watch([&] { m.group->check(); });
    CHECK(thrown_by([&] {
            m.group->broadcast(x, shard, 1, m.stream);
            m.stream.synchronize();
          }) == "peer");
  }
  CHECK(seconds_since(begin) < prompt);
  other.join();
  CHECK(thrown_by([&] { m.group->broadcast(x, shard, 0, m.stream); }) == "peer");
  m.stream.set_watch({});
  m.stream.synchronize();
}

TEST_CASE("an abort by another thread ends what waits for a peer", "[comm][cuda][emulator]") {
  const std::string when = GENERATE("init", "deadline", "in a collective");
  CAPTURE(when);
  Processes("process: a group that is aborted", when == "in a collective" ? 2 : 1, {}, when).require_all_passed();
}

TEST_CASE("process: a peer dies", "[.process]") {
  const std::string when = told("TEST_WHEN");
  const bool dies = this_process() == 1;
  Member m(when == "init" ? 3 : 2);  // rank 2 never comes
  const auto begin = Clock::now();
  const std::string remote = "remote process exited";
  if (when == "init") {
    if (dies) raise(SIGKILL);
    REQUIRE_THAT(thrown_by([&] { m.group->connect(600); }), ContainsSubstring(remote));
    CHECK(seconds_since(begin) < prompt);
    return;
  }
  m.group->connect(10);
  Tensor x = m.tensor("x", DType::fp32, shard, 1);
  m.stream.set_watch([&] { m.group->check(); });
  m.group->broadcast(x, shard, 0, m.stream);
  m.stream.synchronize();
  if (dies) {
    REQUIRE(eventually([] { return std::filesystem::exists(told_file("0 is done")); }));
    raise(SIGKILL);
  }
  std::ofstream(told_file("0 is done"));
  const auto after = Clock::now();
  if (when == "in a collective") {
    REQUIRE_THAT(thrown_by([&] {
                   m.group->broadcast(x, shard, 1, m.stream);
                   m.stream.synchronize();
                 }),
                 ContainsSubstring(remote));
  } else {
    REQUIRE(eventually([&] { return thrown_by([&] { m.group->check(); }) != "none"; }));
    REQUIRE_THAT(thrown_by([&] { m.group->check(); }), ContainsSubstring(remote));
  }
  CHECK(seconds_since(after) < prompt);
  m.stream.set_watch({});
  m.group->abort();
  m.stream.synchronize();
  CHECK(seconds_since(after) < prompt);
}

TEST_CASE("a rank whose peer's process dies has an error at once", "[comm][cuda][emulator]") {
  const std::string when = GENERATE("init", "in a collective", "between collectives");
  CAPTURE(when);
  Processes processes("process: a peer dies", 2, {}, when);
  REQUIRE(processes.end_of(1) == "killed");
  const std::string end = processes.end_of(0);
  INFO(processes.output(0));
  REQUIRE(end == "passed");
}

TEST_CASE("an abort does not wait for a call that hangs in the library, which then ends it", "[comm][cuda][emulator]") {
  const std::string id = nccl_unique_id();
  const auto group = make_nccl_group(id, 0, 1, 0, 1);
  group->connect(10);
  std::string thrown;
  std::optional<cuda_on_cpu::detail::Lock> hang(std::in_place);  // the emulated library waits for it in every call
  std::thread caller([&] { thrown = thrown_by([&] { group->check(); }); });
  std::this_thread::sleep_for(std::chrono::milliseconds(100));
  std::future<void> aborted = std::async(std::launch::async, [&] {
    group->expect_abort();
    group->abort();
  });
  CHECK(aborted.wait_for(std::chrono::seconds(5)) == std::future_status::ready);
  hang.reset();
  caller.join();
  REQUIRE(thrown == "peer");
  REQUIRE(thrown_by([&] { group->check(); }) == "peer");
  REQUIRE(cuda_on_cpu::detail::library().live.empty());
}

TEST_CASE("sends and receives that NCCL refuses leave no group of calls open", "[comm][cuda][emulator]") {
  const Device device{.kind = DeviceKind::cuda};
  Arena arena(device, 1 << 20);
  Stream stream(device, arena);
  const Tensor x = arena.alloc("x", "test", DType::fp32, {4});
  const auto group = make_nccl_group(nccl_unique_id(), 0, 1, 0, 1);
  group->connect(10);
  const int nobody = 7;
  REQUIRE_THAT(thrown_by([&] {
                 group->exchange({nobody, x.bytes, 16}, {}, stream);
               }),
               ContainsSubstring("an exchange by ncclSend and ncclRecv failed: invalid argument"));
  REQUIRE(ncclGroupEnd() == ncclInvalidUsage);
  group->abort();
  REQUIRE(thrown_by([&] { group->exchange({0, x.bytes, 8}, {0, x.bytes + 8, 8}, stream); }) == "peer");
  REQUIRE(ncclGroupEnd() == ncclInvalidUsage);
}

TEST_CASE("a group ends cleanly, or is aborted, but never left", "[comm][cuda][emulator]") {
  const bool fails = GENERATE(false, true);
  for (int i = 0; i < 5; ++i) {
    const auto group = make_nccl_group(nccl_unique_id(), 0, 1, 0, 1);
    if (i > 0) group->connect(10);
    if (fails) group->expect_abort();
  }
  REQUIRE(cuda_on_cpu::detail::library().live.empty());
}

TEST_CASE("a setting of NCCL in the user's environment wins, with a notice", "[comm][cuda][emulator]") {
  prepare_nccl();
  REQUIRE(nccl_notices().empty());
  REQUIRE(std::getenv("NCCL_ALGO") == std::string("reduce:ring;reducescatter:ring"));
  setenv("NCCL_ALGO", "^NVLS", 1);
  prepare_nccl();
  const std::vector<std::string> notices = nccl_notices();
  unsetenv("NCCL_ALGO");
  REQUIRE(notices.size() == 1);
  REQUIRE(notices[0] ==
          "notice: NCCL_ALGO=^NVLS is set in the environment: without "
          "NCCL_ALGO=reduce:ring;reducescatter:ring the same run may not give the same bits again");
}
