// Ranks that end while tasks of their streams still use their groups: what the tasks use lives as long as they do, and
// nobody waits for a rank that has failed.
#include <atomic>
#include <chrono>
#include <map>
#include <mutex>
#include <thread>

#include "catch2.h"
#include "helpers.h"
#include "run/ranks.h"

using namespace llmc;

namespace {

// Transports that know how many tasks will still use them when they are destroyed.
struct Watch {
  std::mutex mutex;
  std::map<std::string, std::shared_ptr<ThreadsHub>> hubs;
  std::atomic<int> destroyed_early = 0, exchanges = 0;

  struct Transport final : llmc::Transport {
    Transport(std::shared_ptr<ThreadsHub> hub, int index, const std::vector<int>& members, Watch& w)
        : inner(std::move(hub), index, members), watch(w) {}
    ~Transport() override { watch.destroyed_early += expected > 0; }
    int rank() const override { return inner.rank(); }
    int size() const override { return inner.size(); }
    void exchange(const ToRank& out, const FromRank& in, Stream* gpu) override {
      --expected;
      ++watch.exchanges;
      inner.exchange(out, in, gpu);
    }
    HostTransport inner;
    Watch& watch;
    std::atomic<int> expected = 0;
  };

  std::unique_ptr<Comm> join(int rank, const std::string& name, const std::vector<int>& members) {
    std::lock_guard lock(mutex);
    std::shared_ptr<ThreadsHub>& hub = hubs[formatted("{} of {}", name, members[0])];
    if (!hub) hub = std::make_shared<ThreadsHub>(0, static_cast<int>(members.size()));
    const auto index = std::find(members.begin(), members.end(), rank) - members.begin();
    auto transport = std::make_unique<Transport>(hub, static_cast<int>(index), members, *this);
    transports[{rank, name}] = transport.get();
    auto comm = std::make_unique<Comm>(name, std::move(transport));
    comm->on_abort([this] { abort(); });
    return comm;
  }
  void abort() {
    std::lock_guard lock(mutex);
    for (auto& [name, hub] : hubs) hub->abort();
  }
  // The next collective of this group is one exchange.
  void expect_one(int rank, const Comm& comm) {
    std::lock_guard lock(mutex);
    ++transports[{rank, comm.name()}]->expected;
  }
  std::map<std::pair<int, std::string>, Transport*> transports;  // by rank and group
};

const Device device{DeviceKind::cpu, 1};
const Layout layout{.zero = {.shards = 4}, .context = {.ranks = 2}, .pipeline = {.stages = 2}};

// Until some time after its rank has begun to leave: by then everything is destroyed that will not wait.
struct HeldUp {
  std::shared_ptr<std::atomic<bool>> leaving = std::make_shared<std::atomic<bool>>(false);
  void enqueue(Stream& stream) const {
    stream.enqueue([leaving = leaving] {
      for (int ms = 0; ms < 10'000 && !*leaving; ++ms) std::this_thread::sleep_for(std::chrono::milliseconds(1));
      std::this_thread::sleep_for(std::chrono::milliseconds(30));
    });
  }
};

// What a rank has on its streams when it leaves: on each an exchange of another group, behind something slow.
struct Work {
  Work(Groups& groups, Stream& compute, Arena& arena, Watch& watch, bool fails) {
    const auto enqueue = [&](Comm& comm, Stream& stream, auto&& collective) {
      held_up.enqueue(stream);
      const Tensor x = arena.alloc("test", "x", DType::fp32, {8});
      zero(x, stream);
      watch.expect_one(groups.rank(), comm);
      collective(comm, x, stream);
    };
    const auto gather = [](Comm& comm, const Tensor& x, Stream& stream) { comm.all_gather(x, stream); };
    enqueue(groups[GroupName::gradients], groups.reduce_stream(), gather);
    enqueue(groups[GroupName::weights], groups.gather_stream(), gather);
    enqueue(groups[GroupName::keys_values], *groups.find_stream(Lane::context), gather);
    if (fails) enqueue(groups[GroupName::scalars], compute, gather);  // of more ranks than two: several exchanges
    groups.links.for_each_with_ends([&](StageLink& link, int from, int) {
      enqueue(link.comm(), link.stream(), [&](Comm& comm, const Tensor& x, Stream& stream) {
        if (from == groups.me.stage) comm.send(x, link.peer(), stream);
        else comm.receive(x, link.peer(), stream);
      });
    });
    if (!fails) return;
    *held_up.leaving = true;
    throw Error("no more disk");
  }
  ~Work() { *held_up.leaving = true; }
  HeldUp held_up;
};

struct Rank {
  Arena arena, scratch;
  Stream compute;
  Groups groups;
  explicit Rank(int rank, const Groups::Join& join)
      : arena(device, 1 << 20),
        scratch(device, 1 << 20),
        compute(device, scratch),
        groups(layout, rank, device, join) {}
};
struct WorkingRank : Rank {
  Work work;
  WorkingRank(int rank, Watch& watch, bool fails)
      : Rank(rank, [&](const std::string& name, const auto& members) { return watch.join(rank, name, members); }),
        work(groups, compute, arena, watch, fails) {}
};

}  // namespace

TEST_CASE("a group that is destroyed lives on in the tasks that use it", "[parallel][failures]") {
  Watch watch;
  Arena arena(device, 1 << 20), scratch(device, 1 << 20);
  Stream stream(device, scratch), other(device, scratch);
  HeldUp held_up;
  const Tensor x = arena.alloc("test", "x", DType::fp32, {1}), y = arena.alloc("test", "y", DType::fp32, {1});
  upload(x, std::vector<float>{7}, stream);
  upload(y, std::vector<float>{0}, other);
  {
    const auto sender = watch.join(0, "test", {0, 1}), receiver = watch.join(1, "test", {0, 1});
    held_up.enqueue(stream);
    watch.expect_one(0, *sender);
    sender->send(x, 1, stream);
    watch.expect_one(1, *receiver);
    receiver->receive(y, 0, other);
  }
  const int early = watch.destroyed_early;
  *held_up.leaving = true;
  stream.synchronize();
  other.synchronize();
  REQUIRE(early == 0);
  REQUIRE(watch.destroyed_early == 0);
  REQUIRE(y.data<float>()[0] == 7);
}

TEST_CASE("a rank that ends while its streams work waits for them", "[parallel][failures]") {
  Watch watch;
  World world(layout.mesh());
  run_ranks(world, [&](int rank) { WorkingRank(rank, watch, false); });
  REQUIRE(watch.destroyed_early == 0);
  REQUIRE(watch.exchanges == 8 * (3 + 3 + 1 + 2));  // of each rank: round two groups of four, one of two, two links
}

TEST_CASE("a constructor that throws waits for no peer, no peer waits for it, and its tasks end first",
          "[parallel][failures]") {
  for (const int failing : {0, 5}) {
    INFO("rank " << failing);
    Watch watch;
    World world(layout.mesh());
    REQUIRE_ERROR(run_ranks(world,
                            [&](int rank) {
                              if (rank == failing) WorkingRank(rank, watch, true);
                              const auto join = [&](const std::string& name, const auto& members) {
                                return watch.join(rank, name, members);
                              };
                              Rank waits(rank, join);  // for all of the failing rank's groups but one
                              const Tensor x = waits.arena.alloc("test", "x", DType::fp32, {8});
                              waits.groups[GroupName::scalars].all_gather(x, waits.compute);
                              waits.compute.synchronize();
                            }),
                  formatted("rank {} on {} has failed: no more disk", failing, host_name()));
    REQUIRE(watch.destroyed_early == 0);
  }
}

TEST_CASE("groups that throw while they are made leave no task without its group", "[parallel][failures]") {
  Watch watch;
  World world(layout.mesh());
  REQUIRE_ERROR(run_ranks(world,
                          [&](int rank) {
                            Arena arena(device, 1 << 20), scratch(device, 1 << 20);
                            Stream compute(device, scratch);
                            HeldUp held_up;
                            const auto join = [&](const std::string& name, const auto& members) {
                              if (name == "weights" && rank == 3) {
                                *held_up.leaving = true;
                                throw Error("no more groups");
                              }
                              auto comm = watch.join(rank, name, members);
                              if (name != "gradients") return comm;
                              held_up.enqueue(compute);
                              watch.expect_one(rank, *comm);
                              comm->all_gather(arena.alloc("test", "x", DType::fp32, {4}), compute);
                              return comm;
                            };
                            const Groups groups(layout, rank, device, join);
                            *held_up.leaving = true;
                            compute.synchronize();
                          }),
                formatted("rank 3 on {} has failed: no more groups", host_name()));
  REQUIRE(watch.destroyed_early == 0);
}

TEST_CASE("what a rank has posted is withdrawn when it fails: its memory may be gone", "[parallel][failures]") {
  const auto hub = std::make_shared<ThreadsHub>(0, 3);
  HostTransport sender(hub, 0, {0, 1, 2}), receiver(hub, 1, {0, 1, 2}), other(hub, 2, {0, 1, 2});
  const float out = 7, wrong[2] = {};
  float in = 0, received = 0;
  std::thread sends([&] {
    try {
      other.exchange({0, wrong, sizeof wrong}, {}, nullptr);
    } catch (const PeerError&) {  // the sender has failed
    }
  });
  REQUIRE_ERROR(sender.exchange({1, &out, sizeof out}, {2, &in, sizeof in}, nullptr),
                "sent 8 bytes to rank 0, which expected 4");
  REQUIRE_ERROR(receiver.exchange({}, {0, &received, sizeof received}, nullptr), "another rank has failed");
  REQUIRE(received == 0);
  hub->abort();
  sends.join();
}
