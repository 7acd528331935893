// world.h: all ranks of a run, and how they form groups.
#pragma once
#include <functional>
#include <map>
#include <memory>
#include <mutex>
#include <string>
#include <thread>
#include <utility>
#include <vector>

#include "dist/comm.h"
#include "dist/comm_threads.h"
#include "dist/hooks.h"
#include "dist/mesh.h"

namespace llmc {

// Who moves tensors between ranks: threads of this process, or NCCL between GPUs of their own.
enum class Backend : uint8_t { threads, nccl };
inline const char* name_of(Backend b) { return b == Backend::threads ? "threads" : "nccl"; }

// All ranks of a run. One object, shared by the threads of the ranks. hooks: must outlive it.
class World {
 public:
  explicit World(Mesh mesh, Backend backend = Backend::threads, const Hooks& hooks = no_hooks)
      : mesh_(std::move(mesh)), backend_(backend), hooks_(hooks) {
    if (backend == Backend::nccl) prepare_nccl();
  }
  World(Mesh mesh, Backend backend, const Hooks&& hooks) = delete;  // they must outlive the World
  const Mesh& mesh() const { return mesh_; }
  Backend backend() const { return backend_; }
  const Hooks& hooks() const { return hooks_; }

  // Rank `rank` joins its group along these axes; `name` distinguishes groups along the same axes. Blocks until all
  // members have called it. gpu: the one this rank computes on; moves_tensors: false for a group that only exchanges
  // text.
  std::unique_ptr<Comm> join(int rank, const std::string& name, const std::vector<Axis>& along, int gpu = 0,
                             bool moves_tensors = true) {
    return hooks_.joined(make_group(rank, name, along, gpu, moves_tensors));
  }

  // A rank has failed: every wait for a peer ends with a PeerError, now and from now on.
  void abort() {
    std::vector<std::shared_ptr<GpuCollectives>> alive;
    {
      std::lock_guard lock(mutex_);
      failed_ = true;
      for (auto& [name, hub] : hubs_) hub->abort();
      for (const auto& group : groups_)
        if (auto locked = group.lock()) alive.push_back(std::move(locked));
    }
    for (const auto& group : alive) group->expect_abort();
    // All at once: freeing the memory of one may wait for the collectives of all groups on the same GPU.
    std::vector<std::thread> aborts;
    for (const auto& group : alive) aborts.emplace_back([&group] { group->abort(); });
    for (std::thread& thread : aborts) thread.join();
  }
  // How long join() waits for the other members' GPUs.
  void limit_init(double seconds) { init_seconds_ = seconds; }
  // Makes every transfer between threads take this long; for tests of overlap.
  void throttle(double seconds_per_byte) { seconds_per_byte_ = seconds_per_byte; }

 private:
  std::unique_ptr<Comm> make_group(int rank, const std::string& name, const std::vector<Axis>& along, int gpu,
                                   bool moves_tensors) {
    const std::vector<int> members = mesh_.group(rank, along);
    const int size = static_cast<int>(members.size());
    int index = 0;
    while (members[static_cast<size_t>(index)] != rank) ++index;
    auto comm = std::make_unique<Comm>(name, transport(formatted("{} of rank {}", name, members[0]), index, size));
    if (backend_ == Backend::threads || size == 1 || !moves_tensors) return comm;
    const std::string id = comm->all_gather_text("id of " + name, index == 0 ? nccl_unique_id() : "")[0];
    std::shared_ptr<GpuCollectives> group = make_nccl_group(id, index, size, gpu);
    {
      std::lock_guard lock(mutex_);
      if (failed_) throw PeerError();
      groups_.push_back(group);  // so that abort() ends the wait for members that never come
    }
    group->connect(init_seconds_);
    return std::make_unique<Comm>(name, transport(formatted("{} of rank {}", name, members[0]), index, size), group);
  }

  std::unique_ptr<Transport> transport(const std::string& group, int index, int size) {
    std::lock_guard lock(mutex_);
    if (failed_) throw PeerError();
    auto& hub = hubs_[group];
    if (!hub) {
      hub = std::make_shared<ThreadsHub>(size);
      hub->throttle(seconds_per_byte_);
    }
    return std::make_unique<ThreadsTransport>(hub, index);
  }

  Mesh mesh_;
  Backend backend_;
  const Hooks& hooks_;
  std::mutex mutex_;
  std::map<std::string, std::shared_ptr<ThreadsHub>> hubs_;
  std::vector<std::weak_ptr<GpuCollectives>> groups_;
  bool failed_ = false;
  double seconds_per_byte_ = 0, init_seconds_ = 600;
};

}  // namespace llmc
