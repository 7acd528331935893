// world.h: all ranks of a run, and how they form groups. Some or all of them are threads of this process.
#pragma once
#include <mutex>
#include <thread>

#include "comm/comm.h"
#include "comm/comm_host.h"
#include "comm/mesh.h"
#include "net/watching/watchdog.h"

namespace llmc {

// Who moves tensors between ranks: our ring through memory and, between processes, MPI or TCP; or NCCL between GPUs of
// their own.
enum class Backend : uint8_t { threads, mpi, tcp, nccl };
constexpr auto names_of_values(Backend) { return std::array{"threads", "mpi", "tcp", "nccl"}; }

// All ranks of a run. One object in each process, shared by the threads of its ranks. hooks: must outlive it.
class World {
 public:
  explicit World(Mesh mesh, Backend backend = Backend::threads, const Hooks& hooks = no_hooks, LocalRanks local = {})
      : mesh_(std::move(mesh)), backend_(backend), hooks_(hooks), local_(local) {
    if (backend == Backend::nccl) prepare_nccl();
    if (local_.count == 0) local_.count = mesh_.size();
    local_.count = std::min(local_.count, mesh_.size() - local_.first);
    CHECK(local_.count == mesh_.size() || local_.links != nullptr);
    if (local_.watchdog == nullptr) return;
    local_.watchdog->board.begin_world();
    local_.watchdog->on_fault([this] { abort(); });
  }
  ~World() {
    if (local_.watchdog != nullptr) local_.watchdog->on_fault({});
  }
  World(Mesh mesh, Backend backend, const Hooks&& hooks, LocalRanks local = {}) = delete;  // they must outlive it
  const Mesh& mesh() const { return mesh_; }
  const LocalRanks& local() const { return local_; }  // those of this process; may be none
  Backend backend() const { return backend_; }
  const Hooks& hooks() const { return hooks_; }

  // Rank `rank` joins the group of these ranks, ascending; `name` distinguishes groups of the same ranks. Blocks until
  // all members have called it. gpu: the one this rank computes on. The world must outlive the group.
  std::unique_ptr<Comm> join(int rank, const std::string& name, const std::vector<int>& members, int gpu = 0) {
    std::unique_ptr<Comm> group = hooks_.joined(make_group(rank, name, members, gpu));
    group->on_abort([this] { abort(); });
    return group;
  }

  // The number of a group. All ranks join groups with the same names in the same order, so it is the same on all its
  // members. A group of some ranks of other processes, which talk to each other through local().links alone, needs only
  // this: all members call it between the same joins.
  int channel(int rank, const std::string& name) {
    std::lock_guard lock(mutex_);
    std::vector<std::string>& joined = joined_[rank];
    const auto at = std::find(joined.begin(), joined.end(), name);
    const int number = static_cast<int>(at - joined.begin());
    if (at == joined.end()) joined.push_back(name);
    return number;
  }

  // A rank has failed: every wait for a peer ends with a PeerError, now and from now on.
  void abort() {
    std::vector<std::shared_ptr<GpuCollectives>> alive;
    {
      std::lock_guard lock(mutex_);
      if (std::exchange(failed_, true)) return;
      if (local_.links != nullptr) local_.links->abort();
      for (auto& [name, hub] : hubs_) hub->abort();
      for (const auto& group : groups_)
        if (auto locked = group.lock()) alive.push_back(std::move(locked));
    }
    for (const auto& group : alive) group->expect_abort();
    // All at once: freeing the memory of one may wait for the collectives of all groups on the same GPU.
    std::vector<std::thread> aborts;
    for (const auto& group : alive) try {
        aborts.emplace_back([&group] { group->abort(); });
      } catch (const std::exception&) {  // no thread could be started: abort one after the other instead
        group->abort();
      }
    for (std::thread& thread : aborts) thread.join();
  }
  // How long join() waits for the other members' GPUs.
  void limit_init(double seconds) { init_seconds_ = seconds; }
  // Makes every transfer between threads take this long; for tests of overlap.
  void throttle(double seconds_per_byte) { seconds_per_byte_ = seconds_per_byte; }

 private:
  std::unique_ptr<Comm> make_group(int rank, const std::string& name, const std::vector<int>& members, int gpu) {
    const int size = static_cast<int>(members.size());
    int index = 0;
    while (members[static_cast<size_t>(index)] != rank) ++index;
    const auto connect = [&] {
      return transport(formatted("{} of rank {}", name, members[0]), index, members, channel(rank, name));
    };
    auto comm = std::make_unique<Comm>(name, connect());
    if (local_.watchdog != nullptr) comm->report_to(local_.watchdog->board.join(rank, name, members));
    if (backend_ != Backend::nccl || size == 1 || traffic_of(name) == Traffic::text) return comm;
    const std::string id = comm->all_gather_text("id of " + name, index == 0 ? nccl_unique_id() : "")[0];
    std::shared_ptr<GpuCollectives> group = make_nccl_group(id, index, size, gpu, nccl_channels(traffic_of(name)));
    {
      std::lock_guard lock(mutex_);
      if (failed_) throw PeerError();
      groups_.push_back(group);  // so that abort() ends the wait for members that never come
    }
    group->connect(init_seconds_);
    return std::make_unique<Comm>(name, connect(), group);
  }

  std::unique_ptr<Transport> transport(const std::string& group, int index, const std::vector<int>& members,
                                       int number) {
    std::lock_guard lock(mutex_);
    if (failed_) throw PeerError();
    auto& hub = hubs_[group];
    const auto here = [&](int rank) { return local_.here(rank); };
    const int first = static_cast<int>(std::ranges::find_if(members, here) - members.begin()),  // the others follow it
        count = static_cast<int>(std::ranges::count_if(members, here));
    if (!hub) {
      hub = std::make_shared<ThreadsHub>(first, count);
      hub->throttle(seconds_per_byte_);
    }
    return std::make_unique<HostTransport>(hub, index, members, number, local_);
  }

  Mesh mesh_;
  Backend backend_;
  const Hooks& hooks_;
  LocalRanks local_;
  std::mutex mutex_;
  std::map<int, std::vector<std::string>> joined_;  // names of groups, by local rank
  std::map<std::string, std::shared_ptr<ThreadsHub>> hubs_;
  std::vector<std::weak_ptr<GpuCollectives>> groups_;
  bool failed_ = false;
  double seconds_per_byte_ = 0, init_seconds_ = 600;
};

}  // namespace llmc
