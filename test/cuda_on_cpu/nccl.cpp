// nccl.cpp: communicators, and how the ranks' calls find each other. What the real library reports as an error code is
// reported so; calls that do not fit each other, on which it would hang or mix up data, throw Failure.
#include "cuda_on_cpu/nccl.h"

#include <algorithm>
#include <cstring>
#include <utility>

#include "cuda_on_cpu/nccl_call.h"
#include "cuda_on_cpu/runtime.h"

namespace cuda_on_cpu::detail {
namespace {

// What some ranks' calls come together in; party i is rank ranks[i] of the clique.
struct Gathering : Meeting {
  Gathering(std::string name_, std::vector<int> ranks_) : name(std::move(name_)), ranks(std::move(ranks_)) {
    parties.resize(ranks.size());
    calls.resize(ranks.size());
  }
  void run() override {
    std::vector<Call> all;
    for (const auto& call : calls) all.push_back(*call);
    Observed observed;
    perform(all);
  }
  std::string waits_for() const override {
    std::string text = name;
    for (size_t i = 0; i < ranks.size(); ++i)
      text += (i == 0 ? ": " : "; ") + ("rank " + std::to_string(ranks[i])) +
              (calls[i] ? " calls " + to_string(*calls[i]) : " has not come");
    return text + remark + (nobody_comes ? ", and will not: " + *nobody_comes : "");
  }
  std::string name;
  std::vector<int> ranks;
  std::vector<std::optional<Call>> calls;
  std::string remark;
};
using GatheringPtr = std::shared_ptr<Gathering>;

// All ranks of a communicator.
struct Clique {
  int number, ranks;
  uint64_t failures;
  std::vector<ncclComm*> members;                // null: has not joined
  std::vector<std::optional<std::string>> gone;  // why a member is no more
  std::map<uint64_t, GatheringPtr> collectives;  // by their number; those that wait for calls
  std::map<std::pair<int, int>, std::deque<GatheringPtr>> sends, receives;  // from and to; those without the other
  bool aborted = false, refused = false;
  std::optional<std::string> broken;

  bool complete() const { return std::count(members.begin(), members.end(), nullptr) == 0; }
  std::string name() const { return "communicator " + std::to_string(number); }
};

}  // namespace
}  // namespace cuda_on_cpu::detail

struct ncclComm {
  std::shared_ptr<cuda_on_cpu::detail::Clique> clique;
  int rank, device;
  bool needs_group = false;  // its host thread has other ranks, too
  uint64_t collectives = 0;  // called so far
  cuda_on_cpu::detail::MarkPtr last = nullptr;
};

namespace cuda_on_cpu::detail {
namespace {

struct Library {  // guarded by the runtime's mutex
  int cliques = 0;
  std::map<std::string, std::shared_ptr<Clique>> joining;  // by unique id
  std::set<const ncclComm*> live;
};
Library& library() {
  static auto* the_library = new Library;
  return *the_library;
}

thread_local std::string last_error;
ncclResult_t error(ncclResult_t result, const std::string& text) {
  last_error = text;
  return result;
}

ncclComm& check(ncclComm* comm) {
  if (library().live.count(comm) == 0)
    throw Failure("a communicator is used that was never made, or is destroyed or aborted");
  return *comm;
}
std::string name_of(const ncclComm& comm) { return "rank " + std::to_string(comm.rank) + " of " + comm.clique->name(); }

// ---- Where calls meet -----------------------------------------------------------------------------------------------

// The gathering that this call belongs to; `ahead`: calls of the same task before it that are not joined yet.
GatheringPtr find_gathering(const ncclComm& comm, const Call& call, size_t ahead) {
  Clique& clique = *comm.clique;
  if (call.kind != Kind::send && call.kind != Kind::receive) {
    const auto found = clique.collectives.find(comm.collectives + ahead);
    return found == clique.collectives.end() ? nullptr : found->second;
  }
  const bool sends = call.kind == Kind::send;
  const auto& others = sends ? clique.receives : clique.sends;
  const auto found = others.find(sends ? std::pair(comm.rank, call.other) : std::pair(call.other, comm.rank));
  return found == others.end() || found->second.size() <= ahead ? nullptr : found->second[ahead];
}

void check_agreement(const ncclComm& comm, const std::vector<Call>& calls) {
  std::map<std::pair<Kind, int>, size_t> ahead;  // collectives count together
  for (const Call& call : calls) {
    const bool between_two = call.kind == Kind::send || call.kind == Kind::receive;
    size_t& before = ahead[between_two ? std::pair(call.kind, call.other) : std::pair(Kind::all_reduce, -1)];
    const GatheringPtr gathering = find_gathering(comm, call, before++);
    if (gathering == nullptr) continue;
    for (size_t i = 0; i < gathering->ranks.size(); ++i) {
      if (!gathering->calls[i] || agree(*gathering->calls[i], call)) continue;
      Clique& clique = *comm.clique;
      clique.broken = gathering->name + ": rank " + std::to_string(comm.rank) + " calls " + to_string(call) +
                      " where rank " + std::to_string(gathering->ranks[i]) + " calls " +
                      to_string(*gathering->calls[i]);
      gathering->nobody_comes = clique.broken;
      throw Failure(*clique.broken);
    }
  }
}

void leave_open(Clique& clique, Gathering& gathering) {
  for (const int rank : gathering.ranks)
    if (const auto& gone = clique.gone[static_cast<size_t>(rank)]) gathering.nobody_comes = gone;
}

void join(ncclComm& comm, const Call& call, Task& task) {
  Clique& clique = *comm.clique;
  GatheringPtr gathering = find_gathering(comm, call, 0);
  size_t party = static_cast<size_t>(comm.rank);
  if (call.kind == Kind::send || call.kind == Kind::receive) {
    const bool sends = call.kind == Kind::send;
    const std::pair path = sends ? std::pair(comm.rank, call.other) : std::pair(call.other, comm.rank);
    party = sends ? 0 : 1;
    if (gathering != nullptr) {
      (sends ? clique.receives : clique.sends)[path].pop_front();
    } else {
      gathering = std::make_shared<Gathering>(
          clique.name() + ", from rank " + std::to_string(path.first) + " to " + std::to_string(path.second),
          std::vector{path.first, path.second});
      (sends ? clique.sends : clique.receives)[path].push_back(gathering);
    }
  } else {
    const uint64_t number = comm.collectives++;
    if (gathering == nullptr) {
      std::vector<int> ranks;
      for (int rank = 0; rank < clique.ranks; ++rank) ranks.push_back(rank);
      gathering = std::make_shared<Gathering>(clique.name() + ", collective " + std::to_string(number + 1), ranks);
      clique.collectives[number] = gathering;
    }
  }
  gathering->parties[party] = &task;
  gathering->calls[party] = call;
  const auto& calls = gathering->calls;
  if (std::all_of(calls.begin(), calls.end(), [](const auto& each) { return each.has_value(); }))
    std::erase_if(clique.collectives, [&](const auto& each) { return each.second == gathering; });
  else leave_open(clique, *gathering);
  task.parts.push_back({gathering});
}

// These calls of one rank have their turn on a stream, or are launched as a node of a graph.
void meet(ncclComm* live_or_not, const std::vector<Call>& calls, Task& task) {
  ncclComm& comm = check(live_or_not);
  const Clique& clique = *comm.clique;
  if (clique.aborted) throw Failure(clique.name() + " is used after a rank of it was aborted");
  if (clique.broken) throw Failure(clique.name() + " is broken: " + *clique.broken);
  if (clique.failures != runtime().failures)
    throw Failure(clique.name() + " is broken since this failed: " + runtime().last_failure);
  check_agreement(comm, calls);
  for (const Call& call : calls) join(comm, call, task);
  if (comm.last != nullptr && !comm.last->reached) task.after.push_back(comm.last);
  if (task.mark == nullptr) task.mark = std::make_shared<Mark>();
  task.mark->stream = task.stream;
  comm.last = task.mark;
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
  std::vector<std::pair<ncclComm_t*, ncclComm*>> inits;  // begun, not complete
};
thread_local Group group;

ncclResult_t post(Batch batch) {
  const cudaError_t status =
      submit(*batch.stream,
             {.type = cudaGraphNodeTypeKernel,
              .meet = [comm = batch.comm, calls = std::move(batch.calls)](Task& task) { meet(comm, calls, task); }});
  return status == cudaSuccess ? ncclSuccess : error(ncclUnhandledCudaError, cudaGetErrorString(status));
}

ncclResult_t call(ncclComm_t handle, cudaStream_t stream, Call call) {
  Lock lock;
  ncclComm& comm = check(handle);
  call.rank = comm.rank;
  call.ranks = comm.clique->ranks;
  if (comm.clique->aborted) return error(ncclRemoteError, "a rank of " + comm.clique->name() + " was aborted");
  if (!comm.clique->complete()) return error(ncclInvalidUsage, name_of(comm) + " is used before all ranks have come");
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

// ---- Beginning and end of communicators -----------------------------------------------------------------------------

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
           " ranks these have not come:" + missing;
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
    return error(ncclInvalidArgument, "the rank, the number of ranks or the unique id is none");
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
      return error(ncclInvalidArgument, "a device that there is not");
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
