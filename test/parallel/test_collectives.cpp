// The mesh, and collectives between the ranks of a process: results, traffic, failures.
#include <mutex>

#include "catch2.h"
#include "comm/group_check.h"
#include "comm/ring.h"
#include "helpers.h"
#include "parallel/row_blocks.h"
#include "run/ranks.h"

using namespace llmc;

namespace {

// Runs f(comm, stream, arena, rank) on `ranks` threads; returns the bytes that each rank sent.
template <class F>
std::vector<int64_t> on_ranks(int ranks, F&& f) {
  World world(Mesh({{Axis::shard, ranks}}));
  std::vector<int64_t> sent(static_cast<size_t>(ranks));
  run_ranks(world, [&](int rank) {
    const Device device{DeviceKind::cpu, 1};
    Arena arena(device, 64 << 20), scratch(device, 4 << 20);
    Stream stream(device, scratch);
    const auto comm = world.join(rank, "test", world.mesh().group(rank, {Axis::shard}));
    f(*comm, stream, arena, rank);
    stream.synchronize();
    sent[static_cast<size_t>(rank)] = comm->bytes_sent();
  });
  return sent;
}

float value(int rank, int64_t i) { return static_cast<float>((rank * 31 + i * 7) % 101) - 50; }  // exact sums

Tensor filled(Arena& arena, DType dtype, int64_t n, int rank) {
  const Tensor t = arena.alloc("test", "buffer", dtype, {n});
  if (dtype == DType::int32) {
    for (int64_t i = 0; i < n; ++i) t.data<int32_t>()[i] = static_cast<int32_t>(value(rank, i));
    return t;
  }
  with_type(dtype, [&](auto tag) {
    using T = typename decltype(tag)::type;
    for (int64_t i = 0; i < n; ++i) t.data<T>()[i] = T(value(rank, i));
  });
  return t;
}

// Faults of a transport, of one member of a group.
struct MixesUp final : Comm {
  static constexpr std::string_view group = "weights";
  static constexpr int member = 3;
  explicit MixesUp(Comm&& comm) : Comm(std::move(comm)) {}
  void all_gather(Tensor x, Stream& stream) override {
    Comm::all_gather(x, stream);
    stream.enqueue([x] { std::swap(x.data<float>()[2], x.data<float>()[3]); });
  }
};
struct Loses final : Comm {
  static constexpr std::string_view group = "gradients";
  static constexpr int member = 0;
  explicit Loses(Comm&& comm) : Comm(std::move(comm)) {}
  void reduce_scatter(Tensor, Stream&) override {}
};
struct LosesTied final : Comm {
  static constexpr std::string_view group = "tied gradients";
  static constexpr int member = 1;
  explicit LosesTied(Comm&& comm) : Comm(std::move(comm)) {}
  void reduce_scatter(Tensor, Stream&) override {}
};
struct LosesExperts final : Comm {
  static constexpr std::string_view group = "expert gradients";
  static constexpr int member = 1;
  explicit LosesExperts(Comm&& comm) : Comm(std::move(comm)) {}
  void reduce_scatter(Tensor, Stream&) override {}
};
struct LosesColumns final : Comm {
  static constexpr std::string_view group = "columns";
  static constexpr int member = 1;
  explicit LosesColumns(Comm&& comm) : Comm(std::move(comm)) {}
  void reduce_scatter(Tensor, Stream&) override {}
};
struct SendsAnother final : Comm {
  static constexpr std::string_view group = "stages down 0";
  static constexpr int member = 0;
  explicit SendsAnother(Comm&& comm) : Comm(std::move(comm)) {}
  void send(Tensor x, int to, Stream& stream) override {
    zero(x, stream);
    Comm::send(x, to, stream);
  }
};
template <class Fault>
struct Plants final : Hooks {
  std::unique_ptr<Comm> joined(std::unique_ptr<Comm> comm) const override {
    if (comm->name() != Fault::group || comm->rank() != Fault::member) return comm;
    return std::make_unique<Fault>(std::move(*comm));
  }
};

void check_groups_of(const Layout& layout, const Hooks& hooks = no_hooks,
                     std::span<const GroupRow> table = group_table) {
  World world(layout.mesh(), Backend::threads, hooks);
  run_ranks(world, [&](int rank) {
    const Device device{DeviceKind::cpu, 1};
    Arena scratch(device, 1 << 20);
    Stream compute(device, scratch);
    const auto join = [&](const std::string& name, const std::vector<int>& members) {
      return world.join(rank, name, members);
    };
    Groups groups(layout, rank, device, join, hooks, table);
    check_groups(groups, compute, [](int r) { return formatted("rank {} elsewhere", r); });
    for (const Comm* comm : groups.tensor_groups()) CHECK(comm->bytes_sent() == 0 && comm->bytes_received() == 0);
  });
}

double at(const Tensor& t, int64_t i) {
  if (t.dtype == DType::int32) return t.data<int32_t>()[i];
  double x = 0;
  with_type(t.dtype, [&](auto tag) { x = static_cast<double>(t.data<typename decltype(tag)::type>()[i]); });
  return x;
}

// Checked on the test's own thread: Catch2's macros are not thread-safe.
struct Differences {
  std::mutex mutex;
  std::vector<std::string> found;
  void expect(bool good, const std::string& what) {
    std::lock_guard lock(mutex);
    if (!good) found.push_back(what);
  }
};

}  // namespace

TEST_CASE("a mesh knows coordinates and groups in any order of its axes", "[parallel][comm]") {
  const Mesh mesh({{Axis::pp, 2}, {Axis::replicate, 2}, {Axis::shard, 3}});
  REQUIRE(mesh.size() == 12);
  REQUIRE(mesh.coordinate(7, Axis::pp) == 1);
  REQUIRE(mesh.coordinate(7, Axis::shard) == 1);
  REQUIRE(mesh.coordinate(7, Axis::tp) == 0);
  REQUIRE(mesh.group(7, {Axis::shard}) == std::vector<int>{6, 7, 8});
  REQUIRE(mesh.group(7, {Axis::replicate}) == std::vector<int>{7, 10});
  REQUIRE(mesh.group(7, {Axis::pp}) == std::vector<int>{1, 7});
  REQUIRE(mesh.group(7, {Axis::replicate, Axis::shard}) == std::vector<int>{6, 7, 8, 9, 10, 11});
  REQUIRE(mesh.coordinates(7) == "stage 1, replicate 0, shard 1");
  const Mesh other({{Axis::shard, 3}, {Axis::pp, 2}});
  REQUIRE(other.group(2, {Axis::shard}) == std::vector<int>{0, 2, 4});
  REQUIRE_ERROR(Mesh({{Axis::shard, 3}, {Axis::shard, 2}}), "twice");
}

TEST_CASE("collectives between threads are correct for any number of ranks and size, and count their bytes",
          "[parallel][comm]") {
  for (const int P : {1, 2, 3, 5, 8})
    for (const DType dtype : {DType::fp32, DType::bf16})
      for (const int64_t n : {int64_t{1}, int64_t{130}, ring::chunk_elements + 3}) {
        INFO(P << " ranks, " << name_of(dtype) << ", " << n);
        const int64_t width = size_of(dtype);
        Differences wrong;
        auto sum = [&](int64_t i) {
          double total = 0;
          for (int r = 0; r < P; ++r) total += value(r, i);
          return total;
        };
        auto sent = on_ranks(P, [&](Comm& comm, Stream& stream, Arena& arena, int rank) {
          const Tensor t = filled(arena, dtype, n * P, rank);
          comm.reduce_scatter(t, stream);
          stream.synchronize();
          for (int64_t i = n * rank; i < n * (rank + 1); ++i) wrong.expect(at(t, i) == sum(i), "reduce_scatter");
          comm.all_gather(t, stream);
          stream.synchronize();
          for (int64_t i = 0; i < n * P; ++i) wrong.expect(at(t, i) == sum(i), "all_gather");
        });
        for (int64_t bytes : sent) REQUIRE(bytes == 2 * (P - 1) * n * width);
        const int root = P / 2;
        sent = on_ranks(P, [&](Comm& comm, Stream& stream, Arena& arena, int rank) {
          const Tensor t = filled(arena, dtype, n, rank);
          comm.broadcast(t, root, stream);
          stream.synchronize();
          for (int64_t i = 0; i < n; ++i) wrong.expect(at(t, i) == value(root, i), "broadcast");
        });
        int64_t all = 0;
        for (int64_t bytes : sent) all += bytes;
        REQUIRE(all == (P - 1) * n * width);
        on_ranks(P, [&](Comm& comm, Stream& stream, Arena& arena, int rank) {
          const Tensor t = filled(arena, dtype, n, rank);
          comm.reduce(t, root, stream);
          stream.synchronize();
          for (int64_t i = 0; rank == root && i < n; ++i) wrong.expect(at(t, i) == sum(i), "reduce");
          const Tensor in = filled(arena, dtype, n * P, rank), out = filled(arena, dtype, n * P, -1);
          comm.all_to_all(out, in, stream);
          stream.synchronize();
          for (int k = 0; k < P; ++k)
            for (int64_t i = 0; i < n; ++i) wrong.expect(at(out, k * n + i) == value(k, rank * n + i), "all_to_all");
          if (P == 1) return;
          const Tensor token = filled(arena, dtype, n, rank);  // round the ring
          if (rank > 0) comm.receive(token, rank - 1, stream);
          if (rank + 1 < P) comm.send(token, rank + 1, stream);
          stream.synchronize();
          comm.barrier();
          for (int64_t i = 0; i < n; ++i) wrong.expect(at(token, i) == value(0, i), "send and receive");
          const auto words = comm.all_gather_text("words", std::string(static_cast<size_t>(rank), 'x'));
          for (int k = 0; k < P; ++k)
            wrong.expect(words[static_cast<size_t>(k)].size() == static_cast<size_t>(k), "text");
        });
        INFO(formatted("{}", wrong.found));
        REQUIRE(wrong.found.empty());
      }
}

TEST_CASE("rows go to the ranks that they are counted for, any number of them, and only they are sent",
          "[parallel][comm]") {
  constexpr int64_t width = 5, most = 9;
  // None between some pairs, none at all from or to some rank.
  const auto rows_between = [](int from, int to, int pattern) -> int64_t {
    switch (pattern) {
      case 0: return (from * 3 + to * 2) % 4;
      case 1: return from == 0 ? to + 1 : 0;  // all from one rank
      case 2: return to == 1 ? from : 0;      // all to one rank
      default: return 0;
    }
  };
  for (const int P : {1, 2, 3, 5})
    for (const DType dtype : {DType::fp32, DType::bf16, DType::int32})
      for (const int pattern : {0, 1, 2, 3}) {
        INFO(P << " ranks, " << name_of(dtype) << ", pattern " << pattern);
        Differences wrong;
        const auto sent = on_ranks(P, [&](Comm& comm, Stream& stream, Arena& arena, int rank) {
          std::vector<int64_t> send, receive;
          for (int k = 0; k < P; ++k) {
            send.push_back(rows_between(rank, k, pattern));
            receive.push_back(rows_between(k, rank, pattern));
          }
          const Tensor in = filled(arena, dtype, P * most * width, rank).reshaped({P * most, width}),
                       out = filled(arena, dtype, P * most * width, -1).reshaped({P * most, width});
          comm.all_to_all_rows(out, in, in_order(send), in_order(receive), stream);
          stream.synchronize();
          int64_t row = 0;
          for (int k = 0; k < P; ++k) {
            int64_t theirs = 0;  // where its rows for this rank begin
            for (int before = 0; before < rank; ++before) theirs += rows_between(k, before, pattern);
            for (int64_t i = 0; i < receive[static_cast<size_t>(k)] * width; ++i)
              wrong.expect(at(out, row * width + i) == value(k, theirs * width + i), formatted("from rank {}", k));
            row += receive[static_cast<size_t>(k)];
          }
          for (int64_t i = row * width; i < P * most * width; ++i)
            wrong.expect(at(out, i) == value(-1, i), "what follows the rows");
        });
        for (int rank = 0; rank < P; ++rank) {
          int64_t rows = 0;
          for (int k = 0; k < P; ++k) rows += k == rank ? 0 : rows_between(rank, k, pattern);
          REQUIRE(sent[static_cast<size_t>(rank)] == rows * width * size_of(dtype));
        }
        INFO(formatted("{}", wrong.found));
        REQUIRE(wrong.found.empty());
      }
  // Blocks with gaps between them: the second half of what each of two ranks has for each.
  Differences wrong;
  on_ranks(2, [&](Comm& comm, Stream& stream, Arena& arena, int rank) {
    const Tensor in = filled(arena, DType::fp32, 8 * width, rank).reshaped({8, width}),
                 out = filled(arena, DType::fp32, 8 * width, -1).reshaped({8, width});
    comm.all_to_all_rows(out, in, {{2, 2}, {6, 2}}, {{1, 2}, {5, 2}}, stream);
    stream.synchronize();
    for (int64_t row = 0; row < 8; ++row) {
      const int from = row < 4 ? 0 : 1;
      const bool received = row % 4 == 1 || row % 4 == 2;
      for (int64_t i = 0; i < width; ++i)
        wrong.expect(at(out, row * width + i) ==
                         (received ? value(from, (4 * rank + row % 4 + 1) * width + i) : value(-1, row * width + i)),
                     formatted("row {} of rank {}", row, rank));
    }
  });
  INFO(formatted("{}", wrong.found));
  REQUIRE(wrong.found.empty());
  // On paper: the bytes, and a message to each other rank.
  const Device paper = Device{DeviceKind::cpu, 1}.on_paper();
  Arena arena(paper), scratch(paper);
  Stream stream(paper, scratch);
  Comm comm("test", std::make_unique<NullTransport>(1, 3));
  const Tensor rows = arena.alloc("test", "rows", DType::bf16, {20, width});
  comm.all_to_all_rows(rows, rows, in_order({4, 3, 0}), in_order({5, 3, 6}), stream);
  REQUIRE((comm.bytes_sent() == 4 * width * 2 && comm.bytes_received() == 11 * width * 2));

  const auto refused = [&](const std::vector<int64_t>& send, const std::vector<int64_t>& receive, const char* why) {
    REQUIRE_ERROR(comm.all_to_all_rows(rows, rows, in_order(send), in_order(receive), stream), why);
  };
  refused({4, 3}, {5, 3, 6}, "2 blocks of rows to send between 3 ranks");
  refused({4, 3, -1}, {5, 3, 6}, "-1 rows from 7 on to send, of 20");
  refused({4, 3, 14}, {5, 3, 6}, "14 rows from 7 on to send, of 20");
  refused({4, 3, 0}, {5, 3, 13}, "13 rows from 8 on to receive, of 20");
  refused({4, 3, 0}, {5, 2, 6}, "rank 1 sends itself 3 rows, and receives 2");
}

TEST_CASE("text of any bytes is gathered on one rank, and text about something else is refused", "[parallel][comm]") {
  auto text = [](int rank) {
    std::string bytes(rank == 2 ? 0 : static_cast<size_t>(100'000 * rank + 5), '\0');
    for (size_t i = 0; i < bytes.size(); ++i) bytes[i] = static_cast<char>(i * 7 + static_cast<size_t>(rank));
    return bytes;
  };
  for (const int P : {1, 2, 4})
    for (int root = 0; root < P; ++root) {
      Differences wrong;
      on_ranks(P, [&](Comm& comm, Stream&, Arena&, int rank) {
        for (int time = 0; time < 3; ++time) {
          const std::vector<std::string> all = comm.gather_text(root, "bytes", text(rank));
          wrong.expect(std::ssize(all) == (rank == root ? P : 0), "who gets texts");
          for (size_t r = 0; r < all.size(); ++r) wrong.expect(all[r] == text(static_cast<int>(r)), "text");
        }
      });
      INFO(P << " ranks, root " << root << formatted(", {}", wrong.found));
      REQUIRE(wrong.found.empty());
    }
  REQUIRE_ERROR(on_ranks(3, [](Comm& comm, Stream&, Arena&,
                               int rank) { comm.gather_text(1, rank == 2 ? "ln_f.bias" : "ln_f.weight", "x"); }),
                "test: rank 2 sent \"ln_f.bias\" while rank 1 was sending \"ln_f.weight\"");
}

TEST_CASE(
    "texts of all ranks go around a ring, in which a rank exchanges with its neighbours only; those of many "
    "ranks along rows and columns",
    "[parallel][comm]") {
  for (const int P : {1, 2, 3, 4, 7, 67, 72}) {
    const auto text = [P](int rank) {  // also an empty one, and one in several pieces
      const int large = P < 64 ? 16 << 20 : 1 << 15;
      return std::string(static_cast<size_t>(rank == 1   ? 0
                                             : rank == 2 ? large + 5
                                                         : 100 * rank + 1),
                         static_cast<char>('a' + rank % 26));
    };
    World world(Mesh({{Axis::shard, P}}));
    const auto hub = std::make_shared<ThreadsHub>(0, P);
    Differences wrong;
    run_ranks(world, [&](int rank) {
      const auto counting = std::make_shared<CountingTransport>(
          std::make_unique<HostTransport>(hub, rank, world.mesh().group(0, {Axis::shard})));
      counting->between_two = true;
      HostGroup group("test", counting);
      for (int time = 0; time < 2; ++time) {
        const std::vector<std::string> all = group.all_gather_text("words", text(rank));
        wrong.expect(std::ssize(all) == P, "the number of texts");
        for (int r = 0; r < P; ++r) wrong.expect(all.at(static_cast<size_t>(r)) == text(r), formatted("text {}", r));
      }
      std::set<int> neighbours = {(rank + 1) % P, (rank + P - 1) % P};
      if (P == 72)  // rows of 8
        neighbours = {rank / 8 * 8 + (rank + 1) % 8, rank / 8 * 8 + (rank + 7) % 8, (rank + 8) % P, (rank + P - 8) % P};
      neighbours.erase(rank);
      wrong.expect(counting->partners == neighbours, "who is connected");
    });
    INFO(P << " ranks" << formatted(", {}", wrong.found));
    REQUIRE(wrong.found.empty());
  }
}

TEST_CASE("mismatched sizes, or a failing rank, end all ranks with the reason", "[parallel][comm]") {
  World world(Mesh({{Axis::shard, 3}}));
  REQUIRE_ERROR(run_ranks(world,
                          [&](int rank) {
                            const auto comm = world.join(rank, "test", world.mesh().group(rank, {Axis::shard}));
                            if (rank == 1) throw Error("rank 1 has no more disk");
                            comm->barrier();
                          }),
                "no more disk");
  REQUIRE_ERROR(on_ranks(2,
                         [&](Comm& comm, Stream& stream, Arena& arena, int rank) {
                           comm.all_gather(filled(arena, DType::fp32, rank == 0 ? 20 : 40, rank), stream);
                           stream.synchronize();
                         }),
                "which expected");
}

TEST_CASE("known values go through every group, and a pair between which they are wrong is named", "[parallel][comm]") {
  check_groups_of({.zero = {.shards = 3, .replicas = 2}});
  check_groups_of({});
  for (const bool overlap : {false, true})
    check_groups_of({.zero = {.shards = 2}, .tensor = {.ranks = 4, .overlap = overlap, .head_copies = 2}});
  check_groups_of({.zero = {.shards = 4, .replicas = 2}, .tensor = {.ranks = 2}, .context = {.ranks = 2}});
  for (const int stages : {2, 3, 4})
    check_groups_of({.zero = {.shards = 2}, .pipeline = {.stages = stages, .chunks_per_stage = stages > 2 ? 2 : 1}});
  check_groups_of({.zero = {.shards = 2}, .pipeline = {.schedule = Schedule::pipedream, .stages = 2}});
  const auto with_experts = [](int ep) {
    return Layout{.zero = {.shards = 2, .replicas = 2}, .tensor = {.ranks = 2}, .expert = {.ranks = ep, .count = 8}};
  };
  for (const int ep : {1, 2, 4}) check_groups_of(with_experts(ep));
  REQUIRE_ERROR(check_groups_of(with_experts(2), Plants<LosesExperts>()), "the group expert gradients: got the sum ");
  const Layout pipeline{.pipeline = {.stages = 3}}, four{.zero = {.shards = 4}};
  REQUIRE_ERROR(check_groups_of(pipeline, Plants<SendsAnother>()),
                "the link from stage 0 to stage 1: got 0 from rank 0 elsewhere instead of 10011");
  REQUIRE_ERROR(check_groups_of(pipeline, Plants<LosesTied>()), "the group tied gradients: got the sum ");
  REQUIRE_ERROR(
      check_groups_of(four, Plants<MixesUp>()),
      "rank 3 on " + host_name() + " has failed: the group weights: got 3003 from rank 2 elsewhere instead of 3002");
  REQUIRE_ERROR(check_groups_of(four, Plants<Loses>()),
                "rank 0 on " + host_name() + " has failed: the group gradients: got the sum 10 instead of 46");
}

TEST_CASE("a new group is a row of the table: it is made, has its stream and is checked like the others",
          "[parallel][comm]") {
  std::vector<GroupRow> table(std::begin(group_table), std::end(group_table));
  const GroupName columns = static_cast<GroupName>(table.size());
  table.push_back({columns, "columns", Traffic::tensors, Lane::context, {Axis::pp, Axis::cp}});
  const Layout layout{.zero = {.shards = 4}, .context = {.ranks = 2}, .pipeline = {.stages = 2}};
  check_groups_of(layout, no_hooks, table);
  REQUIRE_ERROR(check_groups_of(layout, Plants<LosesColumns>(), table), "the group columns: got the sum ");
  const Device paper = Device{DeviceKind::cpu, 1}.on_paper();
  const Groups groups(layout, 5, paper, Groups::null_groups(5), no_hooks, table);
  REQUIRE((groups[columns].size() == 4 && groups[columns].rank() == 3));
  const std::vector<Comm*> moving = groups.tensor_groups();
  REQUIRE(std::find(moving.begin(), moving.end(), &groups[columns]) != moving.end());
}

TEST_CASE("more ranks than a ring should have gather their scalars in two tiers", "[parallel][comm]") {
  for (const int ranks : {64, 67, 72}) {
    const Layout layout{.zero = {.shards = ranks}};
    check_groups_of(layout);
    World world(layout.mesh());
    Differences differences;
    run_ranks(world, [&](int rank) {
      const Device device{DeviceKind::cpu, 1};
      Arena arena(device, 1 << 20), scratch(device, 1 << 20);
      Stream compute(device, scratch);
      const Groups groups(layout, rank, device, [&](const std::string& name, const std::vector<int>& members) {
        return world.join(rank, name, members);
      });
      const Tensor rows = arena.alloc("test", "rows", DType::fp64, {ranks, 3});
      std::vector<double> expected, mine;
      for (int i = 0; i < 3 * ranks; ++i)
        expected.push_back(1.0 / (1 + i)), mine.push_back(i / 3 == rank ? expected.back() : -1);
      upload(rows, mine, compute);
      groups.gather_scalars(rows, compute);
      const HostView all(rows, compute);
      differences.expect(std::equal(expected.begin(), expected.end(), all.data<double>()),
                         formatted("rank {} of {} has other scalars", rank, ranks));
    });
    REQUIRE(differences.found.empty());
  }
  // By the latency of its messages: 127 along a row and 127 along a column, not 16,383.
  Device paper = Device{DeviceKind::cpu, 1}.on_paper();
  paper.machine = ideal_machine(1, 1, std::numeric_limits<double>::infinity(), 1);
  const Layout many{.zero = {.shards = 16'384}};
  Arena arena(paper), scratch(paper);
  Stream compute(paper, scratch);
  const Groups groups(many, 5000, paper, Groups::null_groups(5000));
  groups.gather_scalars(arena.alloc("test", "rows", DType::fp64, {16'384, 3}), compute);
  REQUIRE(compute.seconds() == 254);
}
