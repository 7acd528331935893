// ranks.h: one rank: memory of exactly the planned size, its stream, its groups and its trainer; and several ranks as
// threads of this process.
#pragma once
#include <exception>
#include <memory>
#include <mutex>
#include <thread>
#include <vector>

#include "core/failure_text.h"
#include "core/host_name.h"
#include "device/gpu.h"
#include "dist/world.h"
#include "run/planner.h"

namespace llmc {

struct Run {
  Arena arena, scratch;
  Stream stream;
  std::unique_ptr<Stream> copies;  // on a GPU
  DataParallel dp;
  Trainer trainer;
  Run(const StepConfig& config, const Plan& plan, const Device& device, World& world, int rank)
      : arena(device),
        scratch(device),
        stream(device, scratch),
        copies(device.kind == DeviceKind::cuda ? std::make_unique<Stream>(device, scratch) : nullptr),
        dp(
            world.mesh(), rank, device,
            [&](const std::string& name, const std::vector<int>& members) {
              return world.join(rank, name, members, device.gpu);
            },
            world.hooks(), config.tensor, config.context, config.expert, config.chunks > config.stages,
            config.asynchronous()),
        trainer((take_memory(plan.of(rank), device, world.hooks()), config), {arena, stream, &dp, copies.get()}) {
    if (world.backend() == Backend::nccl)
      for (Stream* s : streams()) s->set_watch([this] { dp.check(); });
  }
  Run(const Run&) = delete;
  Run& operator=(const Run&) = delete;

 private:
  std::vector<Stream*> streams() {
    std::vector<Stream*> all = dp.streams();
    all.push_back(&stream);
    if (copies) all.push_back(copies.get());
    return all;
  }

  // After the groups, which take what they need of a GPU. If there is too little left, the error lists what the memory
  // was for.
  void take_memory(const Plan& plan, const Device& device, const Hooks& hooks) {
    try {
      arena.reserve(plan.arena_bytes);
      scratch.reserve(plan.scratch_bytes);
    } catch (const Error& error) {
      std::string message = error.what();
      for (const MemoryLine& line : plan.memory) message += formatted("\n  {:-22} {} bytes", line.label, line.bytes);
      if (device.collectives == Collectives::library)
        message += "\nNCCL has its memory already: the rest is what is left";
      throw Error(message);
    }
    hooks.arena_created(arena);
    hooks.arena_created(scratch);
  }
};

// Runs rank_main(rank) for every rank of the world that is in this process, as threads. The first error stops all ranks
// and is thrown, with its rank and in the same words, in all processes.
template <class F>
void run_ranks(World& world, F&& rank_main) {
  std::mutex mutex;
  std::exception_ptr first, other;  // the cause, and what followed from it
  auto stop_all = [&](std::exception_ptr reason) {
    {
      std::lock_guard lock(mutex);
      if (!first) first = reason;
    }
    world.abort();
  };
  Watchdog* const watchdog = world.local().watchdog;
  // Does an error of this process follow from one that the others know already? A broken connection may be the first
  // sign of that.
  auto follows = [&](const Error& error) {
    if (watchdog == nullptr) return false;
    const bool broken = dynamic_cast<const ConnectionError*>(&error) != nullptr;
    const std::string reason = broken ? watchdog->reason() : watchdog->reason(0);
    if (reason.empty()) return false;
    std::lock_guard lock(mutex);
    other = std::make_exception_ptr(PeerError(reason));
    return true;
  };
  auto guarded = [&](int rank) {
    try {
      rank_main(rank);
    } catch (const PeerError&) {
      std::lock_guard lock(mutex);
      if (!other) other = std::current_exception();
    } catch (const SharedError&) {  // all ranks end here, by themselves
      std::lock_guard lock(mutex);
      if (!first) first = std::current_exception();
    } catch (const Error& error) {  // with several ranks, say which
      if (follows(error)) return world.abort();
      const bool many = world.mesh().size() > 1 && error.status() == ExitStatus::refused;
      if (watchdog != nullptr) watchdog->failed(rank, error.what());
      stop_all(std::make_exception_ptr(
          many ? Error(failure(formatted("rank {} on {}", rank, host_name()), error.what())) : error));
    } catch (const std::exception& error) {
      if (watchdog != nullptr) watchdog->failed(rank, failure_text(error));
      stop_all(std::current_exception());
    } catch (...) {
      stop_all(std::current_exception());
    }
  };
  const LocalRanks& local = world.local();
  std::vector<std::thread> threads;
  for (int rank = local.first + 1; rank < local.first + local.count; ++rank) threads.emplace_back(guarded, rank);
  if (local.count > 0) guarded(local.first);
  for (std::thread& thread : threads) thread.join();
  if (first) try {
      std::rethrow_exception(first);
    } catch (const SharedError&) {
      throw;
    } catch (const std::exception& error) {  // in the words of all processes
      const std::string reason = watchdog != nullptr ? watchdog->reason() : "";
      if (reason.empty()) throw;
      const auto* const ours = dynamic_cast<const Error*>(&error);
      throw Error(reason, ours != nullptr ? ours->status() : ExitStatus::refused);
    }
  const std::string reason = other && watchdog != nullptr ? watchdog->reason() : "";
  if (!reason.empty()) throw PeerError(reason);
  if (other) std::rethrow_exception(other);
}

}  // namespace llmc
