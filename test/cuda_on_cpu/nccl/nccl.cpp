// nccl.cpp: the library's functions: communicators, groups and calls. Errors that the real library returns as codes are
// returned so; mismatched calls, on which it would hang or corrupt data, throw Failure.
#include "cuda_on_cpu/nccl.h"

#include <cstring>
#include <utility>

#include "cuda_on_cpu/nccl/nccl_clique.h"

namespace cuda_on_cpu::detail {
namespace {

thread_local std::string last_error;
ncclResult_t error(ncclResult_t result, const std::string& text) {
  last_error = text;
  return result;
}

// ---- Groups ---------------------------------------------------------------------------------------------------------

struct Batch {
  ncclComm* comm;
  CUstream_st* stream;
  std::vector<Call> calls;
};
struct Group {
  int depth = 0;
  std::vector<Batch> batches;                            // by communicator and stream
  std::vector<std::pair<ncclComm_t*, ncclComm*>> inits;  // started, not complete
};
thread_local Group group;

ncclResult_t post(Batch batch) {
  const cudaError_t status =
      submit(*batch.stream,
             {.type = cudaGraphNodeTypeKernel,
              .meet = [comm = batch.comm, calls = std::move(batch.calls)](Task& task) { gather(comm, calls, task); }});
  return status == cudaSuccess ? ncclSuccess : error(ncclUnhandledCudaError, cudaGetErrorString(status));
}

ncclResult_t call(ncclComm_t handle, cudaStream_t stream, Call call) {
  Lock lock;
  ncclComm& comm = check(handle);
  call.rank = comm.rank;
  call.ranks = comm.clique->ranks;
  if (comm.clique->aborted) return error(ncclRemoteError, "a rank of " + comm.clique->name() + " was aborted");
  if (!comm.clique->complete()) return error(ncclInvalidUsage, name_of(comm) + " is used before all ranks have joined");
  if (const ncclResult_t result = check_arguments(call); result != ncclSuccess)
    return error(result, "an argument is out of range");
  CUstream_st& s = stream_of(stream);
  const std::string what = name_of(comm) + ", " + to_string(call);
  if (s.device->number != comm.device)
    throw Failure(what + " on " + detail::name_of(s) + ": it has device " + std::to_string(comm.device));
  if (comm.needs_group && group.depth == 0)
    throw Failure(what + ": a host thread with several ranks must put their calls between ncclGroupStart and -End");
  if (bytes_sent(call) > 0) require_memory_of(s.device, call.send, bytes_sent(call), (what + ", send").c_str());
  if (bytes_received(call) > 0)
    require_memory_of(s.device, call.receive, bytes_received(call), (what + ", receive").c_str());
  check_overlap(call);
  if (group.depth == 0) return post({&comm, &s, {call}});
  const auto same = [&](const Batch& batch) { return batch.comm == &comm && batch.stream == &s; };
  const auto found = std::find_if(group.batches.begin(), group.batches.end(), same);
  if (found != group.batches.end()) found->calls.push_back(call);
  else group.batches.push_back({&comm, &s, {call}});
  return ncclSuccess;
}

// ---- Creating and destroying communicators --------------------------------------------------------------------------

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

ncclResult_t await_all(Lock& lock, ncclComm_t* handle, ncclComm* comm) {
  const std::shared_ptr<Clique> clique = comm->clique;
  const auto give_up = [&] {
    library().live.erase(comm);
    delete comm;
    *handle = nullptr;
  };
  const auto who_is_missing = [&] {
    std::string missing;
    for (int rank = 0; rank < clique->ranks; ++rank)
      if (clique->members[static_cast<size_t>(rank)] == nullptr) missing += " " + std::to_string(rank);
    return "ncclCommInitRank by " + name_of(*comm) + ": of " + std::to_string(clique->ranks) +
           " ranks these have not joined:" + missing;
  };
  try {
    wait_for_hosts(
        lock, [&] { return clique->complete(); }, who_is_missing);
  } catch (const Failure&) {
    give_up();
    throw;
  }
  if (!clique->refused) return ncclSuccess;
  give_up();
  return error(ncclInvalidUsage, "two ranks have the same device");
}

void remove(ncclComm* comm, const std::string& why) {
  Clique& clique = *comm->clique;
  clique.gone[static_cast<size_t>(comm->rank)] = why;
  library().live.erase(comm);
  delete comm;
  something_changed();
}

}  // namespace
}  // namespace cuda_on_cpu::detail

using namespace cuda_on_cpu::detail;

// ---- The library's functions ----------------------------------------------------------------------------------------

const char* ncclGetErrorString(ncclResult_t result) {
  switch (result) {
    case ncclSuccess: return "no error";
    case ncclUnhandledCudaError: return "unhandled cuda error";
    case ncclSystemError: return "unhandled system error";
    case ncclInternalError: return "internal error";
    case ncclInvalidArgument: return "invalid argument";
    case ncclInvalidUsage: return "invalid usage";
    case ncclRemoteError: return "remote process exited or there was a network error";
    case ncclInProgress: return "NCCL operation in progress";
  }
  return "unknown result code";
}
const char* ncclGetLastError(ncclComm_t) { return last_error.c_str(); }
ncclResult_t ncclGetVersion(int* version) {
  *version = NCCL_VERSION_CODE;
  return ncclSuccess;
}

ncclResult_t ncclGetUniqueId(ncclUniqueId* id) {
  Lock lock;
  static int64_t made = 0;
  *id = {};
  const std::string text = "emulated " + std::to_string(++made);
  std::memcpy(id->internal, text.c_str(), text.size());
  return ncclSuccess;
}
ncclResult_t ncclCommInitRankConfig(ncclComm_t* comm, int ranks, ncclUniqueId id, int rank, ncclConfig_t* config) {
  Lock lock;
  *comm = nullptr;
  if (ranks < 1 || rank < 0 || rank >= ranks || std::strncmp(id.internal, "emulated ", 9) != 0)
    return error(ncclInvalidArgument, "the rank, the number of ranks or the unique id is invalid");
  if (config != nullptr && config->magic != NCCL_API_MAGIC)
    return error(ncclInvalidArgument, "the configuration was not made by NCCL_CONFIG_INITIALIZER");
  if (current_device() == nullptr) return error(ncclUnhandledCudaError, cudaGetErrorString(no_device()));
  auto& joining = library().joining[std::string(id.internal, sizeof id.internal)];
  if (joining == nullptr) joining = make_clique(ranks);
  const std::shared_ptr<Clique> clique = joining;
  if (clique->ranks != ranks || clique->members[static_cast<size_t>(rank)] != nullptr)
    throw cuda_on_cpu::Failure("ncclCommInitRank: rank " + std::to_string(rank) + " of " + std::to_string(ranks) +
                               " joins " + std::to_string(clique->ranks) + " ranks, of which it " +
                               (clique->ranks != ranks ? "cannot be one" : "already is one"));
  ncclComm* made = enter(clique, rank, host().device);
  if (clique->complete()) library().joining.erase(std::string(id.internal, sizeof id.internal));
  *comm = made;
  if (config != nullptr && config->blocking == 0) return ncclInProgress;
  if (group.depth == 0) return await_all(lock, comm, made);
  group.inits.emplace_back(comm, made);
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
ncclResult_t ncclCommGetAsyncError(ncclComm_t comm, ncclResult_t* error) {
  Lock lock;
  const Clique& clique = *check(comm).clique;
  *error = clique.refused      ? ncclInvalidUsage
           : clique.aborted    ? ncclRemoteError
           : clique.complete() ? ncclSuccess
                               : ncclInProgress;
  return ncclSuccess;
}

static void await_last(Lock& lock, ncclComm& comm) {
  const MarkPtr last = comm.last;
  if (last != nullptr && !last->reached)
    wait_until(lock, *last->stream->device, last->stream, [&] { return last->reached; });
}
ncclResult_t ncclCommFinalize(ncclComm_t comm) {
  Lock lock;
  await_last(lock, check(comm));
  return ncclSuccess;
}
ncclResult_t ncclCommDestroy(ncclComm_t comm) {
  Lock lock;
  check(comm);
  finish([&] { await_last(lock, *comm); });
  const std::string why = name_of(*comm) + " has been destroyed";
  for (const auto& [number, gathering] : comm->clique->collectives)
    if (!gathering->calls[static_cast<size_t>(comm->rank)]) gathering->nobody_comes = why;
  remove(comm, why);
  return ncclSuccess;
}
ncclResult_t ncclCommAbort(ncclComm_t comm) {
  Lock lock;
  check(comm);
  const std::shared_ptr<Clique> clique = comm->clique;
  const auto& device = runtime().devices[static_cast<size_t>(comm->device)];
  while (device->busy) lock.wait(std::chrono::seconds(1));
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
  library().live.erase(comm);
  delete comm;
  something_changed();
  return ncclSuccess;
}

ncclResult_t ncclGroupStart() {
  ++group.depth;
  return ncclSuccess;
}
ncclResult_t ncclGroupEnd() {
  if (group.depth == 0) return error(ncclInvalidUsage, "ncclGroupEnd without ncclGroupStart");
  if (--group.depth > 0) return ncclSuccess;
  Lock lock;
  const Group ended = std::exchange(group, {});
  ncclResult_t result = ncclSuccess;
  const auto keep = [&](ncclResult_t one) {
    if (result == ncclSuccess) result = one;
  };
  for (const auto& [handle, comm] : ended.inits) keep(await_all(lock, handle, comm));
  for (const Batch& batch : ended.batches) keep(post(batch));
  return result;
}

ncclResult_t ncclAllReduce(const void* send, void* receive, size_t count, ncclDataType_t type, ncclRedOp_t op,
                           ncclComm_t comm, cudaStream_t stream) {
  return call(comm, stream, {Kind::all_reduce, send, receive, count, type, op, 0});
}
ncclResult_t ncclReduce(const void* send, void* receive, size_t count, ncclDataType_t type, ncclRedOp_t op, int root,
                        ncclComm_t comm, cudaStream_t stream) {
  return call(comm, stream, {Kind::reduce, send, receive, count, type, op, root});
}
ncclResult_t ncclBroadcast(const void* send, void* receive, size_t count, ncclDataType_t type, int root,
                           ncclComm_t comm, cudaStream_t stream) {
  return call(comm, stream, {Kind::broadcast, send, receive, count, type, ncclSum, root});
}
ncclResult_t ncclReduceScatter(const void* send, void* receive, size_t receive_count, ncclDataType_t type,
                               ncclRedOp_t op, ncclComm_t comm, cudaStream_t stream) {
  return call(comm, stream, {Kind::reduce_scatter, send, receive, receive_count, type, op, 0});
}
ncclResult_t ncclAllGather(const void* send, void* receive, size_t send_count, ncclDataType_t type, ncclComm_t comm,
                           cudaStream_t stream) {
  return call(comm, stream, {Kind::all_gather, send, receive, send_count, type, ncclSum, 0});
}
ncclResult_t ncclSend(const void* send, size_t count, ncclDataType_t type, int peer, ncclComm_t comm,
                      cudaStream_t stream) {
  return call(comm, stream, {Kind::send, send, nullptr, count, type, ncclSum, peer});
}
ncclResult_t ncclRecv(void* receive, size_t count, ncclDataType_t type, int peer, ncclComm_t comm,
                      cudaStream_t stream) {
  return call(comm, stream, {Kind::receive, nullptr, receive, count, type, ncclSum, peer});
}
