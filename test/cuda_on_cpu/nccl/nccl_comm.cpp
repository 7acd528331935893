// nccl_comm.cpp: creating and destroying communicators, and their state.
#include <algorithm>
#include <cstring>
#include <utility>

#include "cuda_on_cpu/nccl/nccl_clique.h"

namespace cuda_on_cpu::detail {

// ---- Errors, and what is in progress --------------------------------------------------------------------------------

static thread_local std::string last_error;
ncclResult_t error(ncclResult_t result, const std::string& text) {
  last_error = text;
  return result;
}

Group& group() {
  thread_local Group the_group;
  return the_group;
}
ncclResult_t post(Batch batch) {
  const cudaError_t status =
      submit(*batch.stream,
             {.type = cudaGraphNodeTypeKernel,
              .meet = [comm = batch.comm, calls = std::move(batch.calls)](Task& task) { gather(comm, calls, task); }});
  return status == cudaSuccess ? ncclSuccess : error(ncclUnhandledCudaError, cudaGetErrorString(status));
}
bool takes_effect_later(ncclComm& comm) {
  if (comm.blocking || comm.random() % 2 == 0) return false;
  comm.pending = 1 + static_cast<int>(comm.random() % 3);
  return true;
}

// Once all ranks have joined: are they all in this process?
static  // As in NCCL 2.30, ranks of several processes may.
    bool
    may_share_gpus() {
  const char* const wanted = std::getenv("NCCL_MULTI_RANK_GPU_ENABLE");
  return wanted != nullptr && std::string(wanted) == "1";
}
void settle(Clique& clique) {
  if (clique.segment == nullptr || clique.settled || !clique.segment->complete()) return;
  clique.settled = true;
  library().made.erase(clique.segment->id());
  library().joining.erase(clique.segment->id());
  if (clique.segment->in_one_process()) {
    clique.segment = nullptr;
    return;
  }
  clique.refused = clique.refused || (clique.segment->shares_gpu() && !may_share_gpus());
  for (ncclComm* member : clique.members)
    if (member != nullptr)
      member->proxy = std::make_unique<Proxy>(clique.segment, *runtime().devices[static_cast<size_t>(member->device)]);
}
ncclResult_t state_of(ncclComm& comm) {
  Clique& clique = *comm.clique;
  settle(clique);
  if (clique.refused) return error(ncclInvalidUsage, "two ranks have the same device");
  if (clique.aborted) return error(ncclRemoteError, "a rank of " + clique.name() + " was aborted");
  if (clique.segment != nullptr)
    if (const std::optional<int> lost = clique.segment->lost())
      return error(ncclRemoteError, "rank " + std::to_string(*lost) + " of " + clique.name() +
                                        ", in another process, has ended or was aborted");
  return clique.complete() ? ncclSuccess : ncclInProgress;
}

// ---- Creating and destroying communicators --------------------------------------------------------------------------

namespace {

ncclComm* enter(std::shared_ptr<Clique> clique, int rank, int device) {
  auto* comm = new ncclComm{.clique = std::move(clique), .rank = rank, .device = device};
  comm->clique->members[static_cast<size_t>(rank)] = comm;
  library().live.insert(comm);
  std::set<int> devices;
  for (const ncclComm* member : comm->clique->members)
    if (member != nullptr && !devices.insert(member->device).second) comm->clique->refused = true;
  something_changed();
  return comm;
}
std::shared_ptr<Clique> make_clique(int ranks) {
  const auto n = static_cast<size_t>(ranks);
  auto clique = std::make_shared<Clique>(Clique{.number = ++library().cliques,
                                                .ranks = ranks,
                                                .failures = runtime().failures,
                                                .members = {},
                                                .gone = {},
                                                .collectives = {},
                                                .sends = {},
                                                .receives = {},
                                                .broken = {}});
  clique->members.resize(n);
  clique->gone.resize(n);
  return clique;
}

// It leaves the communicator, which is freed.
void release(Lock& lock, ncclComm* comm, Presence how) {
  const std::shared_ptr<Clique> clique = comm->clique;
  const std::unique_ptr<ncclComm> freed(comm);
  library().live.erase(comm);
  if (clique->segment != nullptr) {
    clique->segment->leave(comm->rank, how);
    if (!clique->settled) {
      clique->members[static_cast<size_t>(comm->rank)] = nullptr;
      library().joining.erase(clique->segment->id());
    }
  }
  if (comm->proxy != nullptr) comm->proxy->stop();
  something_changed();
  lock.unlock();
  comm->proxy = nullptr;
  lock.lock();
}

// The memory that ranks of other processes join through; the process that made the id need not have any.
std::shared_ptr<Segment> segment_of(const std::string& id) {
  const auto made = library().made.find(id);
  return made != library().made.end() ? made->second : Segment::open(id);
}

}  // namespace

ncclResult_t await_all(Lock& lock, ncclComm_t* handle, ncclComm* comm) {
  const std::shared_ptr<Clique> clique = comm->clique;
  const auto give_up = [&] {
    release(lock, comm, Presence::aborted);
    *handle = nullptr;
  };
  const auto who_is_missing = [&] {
    std::string missing;
    for (int rank = 0; rank < clique->ranks; ++rank)
      if (clique->members[static_cast<size_t>(rank)] == nullptr) missing += " " + std::to_string(rank);
    return "ncclCommInitRank by " + name_of(*comm) + ": of " + std::to_string(clique->ranks) +
           " ranks these have not joined:" + (clique->segment ? clique->segment->names_of_absent() : missing);
  };
  const auto done = [&] { return clique->complete() || (clique->segment != nullptr && clique->segment->lost()); };
  try {  // nobody tells this process that a rank of another one has joined
    wait_for_hosts(lock, done, who_is_missing, std::chrono::duration<double>(clique->segment ? 0.01 : 1));
  } catch (const Failure&) {
    give_up();
    throw;
  }
  const ncclResult_t state = state_of(*comm);
  if (state != ncclSuccess) give_up();
  return state;
}

}  // namespace cuda_on_cpu::detail

using namespace cuda_on_cpu::detail;

const char* ncclGetLastError(ncclComm_t) { return last_error.c_str(); }

ncclResult_t ncclGetUniqueId(ncclUniqueId* id) {
  Lock lock;
  const std::shared_ptr<Segment> made = Segment::create();
  if (made == nullptr) return error(ncclSystemError, "there is no memory that processes can share");
  library().made[made->id()] = made;
  *id = {};
  std::memcpy(id->internal, made->id().c_str(), made->id().size());
  return ncclSuccess;
}
ncclResult_t ncclCommInitRankConfig(ncclComm_t* comm, int ranks, ncclUniqueId id, int rank, ncclConfig_t* config) {
  Lock lock;
  *comm = nullptr;
  if (ranks < 1 || rank < 0 || rank >= ranks || std::strncmp(id.internal, "emulated ", 9) != 0)
    return error(ncclInvalidArgument, "the rank, the number of ranks or the unique id is invalid");
  if (config != nullptr && config->magic != NCCL_API_MAGIC)
    return error(ncclInvalidArgument, "the configuration was not made by NCCL_CONFIG_INITIALIZER");
  const Device* const device = current_device();
  if (device == nullptr) return error(ncclUnhandledCudaError, cudaGetErrorString(no_device()));
  const std::string name(id.internal, strnlen(id.internal, sizeof id.internal));
  const auto joining = library().joining.find(name);
  const std::shared_ptr<Clique> clique = joining != library().joining.end() ? joining->second : make_clique(ranks);
  if (clique->ranks != ranks || clique->members[static_cast<size_t>(rank)] != nullptr)
    throw cuda_on_cpu::Failure("ncclCommInitRank: rank " + std::to_string(rank) + " of " + std::to_string(ranks) +
                               " joins " + std::to_string(clique->ranks) + " ranks, of which it " +
                               (clique->ranks != ranks ? "cannot be one" : "already is one"));
  if (clique->segment == nullptr) clique->segment = segment_of(name);
  if (clique->segment == nullptr) return error(ncclRemoteError, "the process that made the unique id has ended");
  if (const std::string fault = clique->segment->join(ranks, rank, device->gpu); !fault.empty())
    return error(ncclInvalidUsage, fault);
  // Its channels' buffers, for as long as the device is there: so that a plan may only count too many of them.
  Device& there = *runtime().devices[static_cast<size_t>(device->number)];
  constexpr int most_channels = 32;
  const bool limited = config != nullptr && config->maxCTAs != NCCL_CONFIG_UNDEF_INT;
  const size_t bytes =
      ranks == 1 ? 0 : runtime().channel_bytes * static_cast<size_t>(limited ? config->maxCTAs : most_channels);
  if (bytes > free_bytes(there)) return error(ncclUnhandledCudaError, "out of memory");
  there.communicators = {there.communicators.taken + bytes, there.bytes_used};
  library().joining[name] = clique;
  ncclComm* const made = *comm = enter(clique, rank, device->number);
  if (config != nullptr && config->blocking == 0) {
    made->blocking = false;
    made->random.seed(static_cast<unsigned>(cuda_on_cpu::schedule().seed + 17 * static_cast<uint64_t>(rank)));
    made->pending = 1 + static_cast<int>(made->random() % 3);
    return ncclInProgress;
  }
  if (group().depth == 0) return await_all(lock, comm, made);
  group().inits.emplace_back(comm, made);
  return ncclSuccess;
}
ncclResult_t ncclCommInitRank(ncclComm_t* comm, int ranks, ncclUniqueId id, int rank) {
  return ncclCommInitRankConfig(comm, ranks, id, rank, nullptr);
}
ncclResult_t ncclCommInitAll(ncclComm_t* comms, int devices, const int* device_list) {
  Lock lock;
  if (devices < 1) return error(ncclInvalidArgument, "there must be at least one device");
  const auto device_of = [&](int rank) { return device_list == nullptr ? rank : device_list[rank]; };
  for (int rank = 0; rank < devices; ++rank)
    if (device_of(rank) < 0 || static_cast<size_t>(device_of(rank)) >= runtime().devices.size())
      return error(ncclInvalidArgument, "no such device");
  const auto clique = make_clique(devices);
  for (int rank = 0; rank < devices; ++rank) {
    comms[rank] = enter(clique, rank, device_of(rank));
    comms[rank]->needs_group = devices > 1;
  }
  ncclResult_t result = ncclSuccess;
  for (int rank = 0; rank < devices; ++rank) result = await_all(lock, &comms[rank], comms[rank]);
  return result;
}

ncclResult_t ncclCommCount(const ncclComm_t comm, int* count) {
  Lock lock;
  *count = check(comm).clique->ranks;
  return ncclSuccess;
}
ncclResult_t ncclCommUserRank(const ncclComm_t comm, int* rank) {
  Lock lock;
  *rank = check(comm).rank;
  return ncclSuccess;
}
ncclResult_t ncclCommCuDevice(const ncclComm_t comm, int* device) {
  Lock lock;
  *device = check(comm).device;
  return ncclSuccess;
}

static void await_last(Lock& lock, ncclComm& comm) {
  const MarkPtr last = comm.last;
  if (last != nullptr && !last->reached)
    wait_until(lock, *last->stream->device, last->stream, [&] { return last->reached; });
}
// What is in progress goes on.
static ncclResult_t go_on(Lock& lock, ncclComm& comm) {
  if (const ncclResult_t state = state_of(comm); state != ncclSuccess) return state;
  if (comm.pending > 0 && --comm.pending > 0) return ncclInProgress;
  for (Batch& batch : std::exchange(comm.held, {}))
    if (const ncclResult_t result = post(std::move(batch)); result != ncclSuccess) return result;
  const MarkPtr last = comm.last;
  if (!comm.finalizing || last == nullptr) return ncclSuccess;
  const bool quiet = poll(lock, *last->stream->device, last->stream, &comm, [&] { return last->reached; });
  return quiet ? ncclSuccess : ncclInProgress;
}
ncclResult_t ncclCommGetAsyncError(ncclComm_t comm, ncclResult_t* error) {
  Lock lock;
  *error = go_on(lock, check(comm));
  return ncclSuccess;
}
ncclResult_t ncclCommFinalize(ncclComm_t comm) {
  Lock lock;
  if (check(comm).pending > 0)
    return error(ncclInvalidArgument, name_of(*comm) + " is used while a call is in progress");
  comm->finalizing = true;
  if (!comm->blocking) return ncclInProgress;
  await_last(lock, *comm);
  return ncclSuccess;
}
ncclResult_t ncclCommDestroy(ncclComm_t comm) {
  Lock lock;
  if (check(comm).pending > 0)
    return error(ncclInvalidArgument, name_of(*comm) + " is destroyed while a call is in progress");
  finish([&] { await_last(lock, *comm); });
  const std::string why = name_of(*comm) + " has been destroyed";
  for (const auto& [number, gathering] : comm->clique->collectives)
    if (!gathering->calls[static_cast<size_t>(comm->rank)]) gathering->nobody_comes = why;
  comm->clique->gone[static_cast<size_t>(comm->rank)] = why;
  release(lock, comm, Presence::left);
  return ncclSuccess;
}
ncclResult_t ncclCommAbort(ncclComm_t comm) {
  Lock lock;
  check(comm);
  const std::shared_ptr<Clique> clique = comm->clique;
  const auto& device = runtime().devices[static_cast<size_t>(comm->device)];
  while (comm->proxy == nullptr && device->busy) lock.wait(std::chrono::seconds(1));
  const auto leave = [&](Task& task) {
    for (Part& part : task.parts) {
      auto* gathering = dynamic_cast<Gathering*>(part.meeting.get());
      for (size_t i = 0; gathering != nullptr && i < gathering->parties.size(); ++i)
        if (gathering->parties[i] == &task && gathering->name.starts_with(clique->name() + ",")) {
          gathering->parties[i] = nullptr;
          gathering->remark += "; " + name_of(*comm) + " was aborted";
          part.done = true;
        }
    }
  };
  for (CUstream_st* stream : device->streams)
    for (const auto& task : stream->tasks) {
      leave(*task);
      if (task->graph) std::for_each(task->graph->nodes.begin(), task->graph->nodes.end(), leave);
    }
  clique->aborted = true;
  release(lock, comm, Presence::aborted);
  return ncclSuccess;
}
