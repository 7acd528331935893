// ranks.h: one rank (memory of exactly the planned size, its stream, its groups and its trainer), and several ranks as
// threads of this process.
#pragma once
#include <omp.h>

#include <exception>
#include <mutex>
#include <thread>

#include "comm/world.h"
#include "core/environment.h"
#include "core/log.h"
#include "device/gpu.h"
#include "device/host_copy.h"
#include "run/plan/planner.h"

namespace llmc {

struct Run {
  Arena arena, scratch, host, file;  // host and file: for what is offloaded
  Stream stream;
  std::unique_ptr<Stream> copies, saves;  // on a GPU: of inputs to it, and of checkpoints from it
  HostBuffer copies_of_state;             // of a checkpoint that is written while training goes on
  int64_t free_at_start;                  // free bytes of the GPU before the groups are made, if only this rank uses it
  Groups groups;
  Trainer trainer;
  Run(const StepConfig& config, const Plan& plan, const Device& device, World& world, int rank)
      : arena(device),
        scratch(device),
        host(device, 0, MemoryOf::host),
        file(device, 0, MemoryOf::file),
        stream(device, scratch),
        copies(device.kind == DeviceKind::cuda ? std::make_unique<Stream>(device, scratch) : nullptr),
        saves(copies && plan.of(rank).copy_bytes > 0 ? std::make_unique<Stream>(device, scratch) : nullptr),
        copies_of_state(device, copies_label, plan.of(rank).copy_bytes),
        free_at_start(has_own_gpu(device) ? free_memory_of_own(device.gpu) : 0),
        groups(
            config.layout, rank, device,
            [&](const std::string& name, const std::vector<int>& members) {
              return world.join(rank, name, members, device.gpu);
            },
            world.hooks()),
        trainer((take_memory(plan.of(rank), device, world.hooks()), config),
                {arena, stream, &groups, &host, copies.get(), &file}) {
    omp_set_num_threads(device.threads);  // of this thread, which reads and writes weights
    if (world.backend() == Backend::nccl)
      for (Stream* s : streams()) s->set_watch([this] { groups.check(); });
  }
  Run(const Run&) = delete;
  Run& operator=(const Run&) = delete;

  // Called before the first step, which would otherwise wait for each page.
  void touch_memory() {
    arena.touch();
    scratch.touch();
    host.touch();
    copies_of_state.touch();
  }

  // The memory that this rank's GPU has lost since the start, beside what was planned for it: "5.2 GiB after the CUDA
  // context, 5.1 GiB planned; ...". Empty if other ranks share the GPU. On a CPU that of this process, with the ranks
  // `local`. all: the plan of all ranks
  std::string memory_taken(const Plan& all, int rank, const LocalRanks& local) const {
    const Device& device = arena.device();
    int64_t planned = all.of(rank).total_bytes();
    if (device.kind == DeviceKind::cpu) {
      for (int r = local.first; r < local.first + local.count; ++r)
        if (r != rank) planned += all.of(r).total_bytes();
      return formatted("{} resident at most, {} planned", human_bytes(peak_resident_bytes()), human_bytes(planned));
    }
    if (!has_own_gpu(device)) return "";
    const int64_t taken = free_at_start - free_memory_of_own(device.gpu);
    return formatted("{} after the CUDA context, {} planned; of {} left for libraries, {} in use{}", human_bytes(taken),
                     human_bytes(planned), human_bytes(gpu_reserve), human_bytes(std::max<int64_t>(0, taken - planned)),
                     taken > planned + gpu_reserve ? ": too little was left, unless another program took it" : "");
  }

 private:
  std::vector<Stream*> streams() {
    std::vector<Stream*> all = groups.streams();
    all.push_back(&stream);
    if (copies) all.push_back(copies.get());
    if (saves) all.push_back(saves.get());
    return all;
  }

  static bool has_own_gpu(const Device& device) { return device.kind == DeviceKind::cuda && device.sharers == 1; }

  // The memory that NCCL takes is planned from its sources; another version, or other links, may take more.
  void require_room_beside_nccl(const Plan& plan, const Device& device) const {
    int64_t planned = 0;
    for (const MemoryLine& line : plan.memory)
      if (line.label == nccl_label) planned = line.bytes;
    const int64_t free = free_memory_of_own(device.gpu), taken = free_at_start - free,
                  needed = plan.arena_bytes + plan.scratch_bytes;
    // NCCL may take the rest when a group is first used.
    CHECK(needed <= free - std::max<int64_t>(0, planned - taken),
          "GPU {}: the groups of NCCL took {} of the {} that were planned for them, {} are free, and {} are needed for "
          "the rest: set NCCL_MAX_CTAS below {}, which limits what they take, or use a smaller --batch-size",
          device.gpu, human_bytes(taken), human_bytes(planned), human_bytes(free), human_bytes(needed),
          nccl_channels(Traffic::tensors));
  }

  std::unique_ptr<ScratchFile> file_of_moments(int64_t bytes) const {
    const std::string& directory = groups.layout.zero.offload.directory;
    CHECK(is_directory(directory), "--offload-dir {}: there is no such directory on {}: make it, or name another",
          shown(directory), host_name());
    return std::make_unique<ScratchFile>(
        formatted("{}/train_gpt-moments-{:05}-of-{:05}", directory, groups.rank(), groups.ranks()), bytes,
        formatted("moments of rank {} on {}", groups.rank(), host_name()),
        "make room, use another --offload-dir, or share moments among more ranks with --zero-stage 1");
  }

  // Called after the groups were made, which take what they need of a GPU. If too little is left, the error lists what
  // the memory was for.
  void take_memory(const Plan& plan, const Device& device, const Hooks& hooks) {
    if (has_own_gpu(device) && device.collectives == Collectives::library) require_room_beside_nccl(plan, device);
    try {
      arena.reserve(plan.arena_bytes);
      scratch.reserve(plan.scratch_bytes);
      host.reserve(plan.host_bytes);
    } catch (const Error& error) {
      std::string message = error.what();
      for (const MemoryLine& line : plan.memory) message += formatted("\n  {:-22} {} bytes", line.label, line.bytes);
      throw Error(message);
    }
    if (plan.file_bytes > 0) file.reserve(file_of_moments(plan.file_bytes));
    for (Arena* made : {&arena, &scratch, &host, &file}) hooks.arena_created(*made);
  }
};

// Runs rank_main(rank) for every rank of the world that is in this process, as threads. The first error stops all ranks
// and is thrown, with its rank and in the same words, in all processes.
template <class F>
void run_ranks(World& world, F&& rank_main) {
  std::mutex mutex;
  std::exception_ptr first, other;  // the cause, and errors that followed from it
  const auto keep = [&](std::exception_ptr& kept, const std::exception_ptr& error) {
    std::lock_guard lock(mutex);
    if (!kept) kept = error;
  };
  const auto stop_all = [&](const std::exception_ptr& reason) {
    keep(first, reason);
    world.abort();
  };
  Watchdog* const watchdog = world.local().watchdog;
  // Does an error of this process follow from one that the others already know? A broken connection may be the first
  // sign of one.
  auto follows = [&](const Error& error) {
    if (watchdog == nullptr) return false;
    const bool broken = dynamic_cast<const ConnectionError*>(&error) != nullptr;
    const Fault fault = watchdog->fault(broken ? 2 : 0);
    if (!fault.known()) return false;
    std::lock_guard lock(mutex);
    other = std::make_exception_ptr(PeerError(fault.why, fault.status));
    return true;
  };
  auto guarded = [&](int rank) {
    try {
      rank_main(rank);
    } catch (const PeerError&) {
      keep(other, std::current_exception());
    } catch (const SharedError&) {  // all ranks end here, by themselves
      keep(first, std::current_exception());
    } catch (const Error& error) {  // with several ranks, name the rank
      if (follows(error)) return world.abort();
      const bool many = world.mesh().size() > 1 && error.status() != ExitStatus::diverged;
      if (watchdog != nullptr) watchdog->failed(rank, error.what(), error.status());
      stop_all(std::make_exception_ptr(
          many ? Error(failure(formatted("rank {} on {}", rank, host_name()), error.what()), error.status()) : error));
    } catch (const std::exception& error) {
      if (watchdog != nullptr) watchdog->failed(rank, failure_text(error));
      stop_all(std::current_exception());
    } catch (...) {
      stop_all(std::current_exception());
    }
  };
  const LocalRanks& local = world.local();
  std::vector<std::thread> threads;
  try {
    for (int rank = local.first + 1; rank < local.first + local.count; ++rank) threads.emplace_back(guarded, rank);
    if (local.count > 0) guarded(local.first);
  } catch (const std::exception& error) {  // the system gives no further thread; those that began wait for it
    if (watchdog != nullptr) watchdog->failed(local.first, failure_text(error));
    stop_all(std::current_exception());
  }
  for (std::thread& thread : threads) thread.join();
  if (first) try {
      std::rethrow_exception(first);
    } catch (const SharedError&) {
      throw;
    } catch (const std::exception& error) {  // in the words common to all processes
      const Fault fault = watchdog != nullptr && !watchdog->alone() ? watchdog->fault() : Fault();
      if (!fault.known()) throw;
      throw Error(fault.why, fault.status);
    }
  const Fault fault = other && watchdog != nullptr ? watchdog->fault() : Fault();
  if (fault.known()) throw PeerError(fault.why, fault.status);
  if (other) std::rethrow_exception(other);
}

}  // namespace llmc
