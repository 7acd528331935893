// nccl.cpp: the library's functions: groups and calls; nccl_comm.cpp has communicators. Errors that the real library
// returns as codes are returned likewise; mismatched calls, on which it would hang or corrupt data, throw Failure.
#include "cuda_on_cpu/nccl.h"

#include <cstring>
#include <utility>

#include "cuda_on_cpu/nccl/nccl_clique.h"

namespace cuda_on_cpu::detail {
namespace {

// ---- Groups ---------------------------------------------------------------------------------------------------------

// Later, if earlier ones are held, too.
ncclResult_t launch(Batch batch) {
  ncclComm& comm = *batch.comm;
  if (comm.pending == 0 && !takes_effect_later(comm)) return post(std::move(batch));
  comm.held.push_back(std::move(batch));
  return ncclInProgress;
}

ncclResult_t call(ncclComm_t handle, cudaStream_t stream, Call call) {
  Lock lock;
  ncclComm& comm = check(handle);
  call.rank = comm.rank;
  call.ranks = comm.clique->ranks;
  const ncclResult_t state = state_of(comm);
  if (state != ncclSuccess && state != ncclInProgress) return state;
  if (comm.pending > 0) return error(ncclInvalidArgument, name_of(comm) + " is used while a call is in progress");
  if (state != ncclSuccess) return error(ncclInvalidUsage, name_of(comm) + " is used before all ranks have joined");
  if (const ncclResult_t result = check_arguments(call); result != ncclSuccess)
    return error(result, "an argument is out of range");
  CUstream_st& s = stream_of(stream);
  const std::string what = name_of(comm) + ", " + to_string(call);
  if (s.device->number != comm.device)
    throw Failure(what + " on " + detail::name_of(s) + ": it has device " + std::to_string(comm.device));
  if (comm.needs_group && group().depth == 0)
    throw Failure(what + ": a host thread with several ranks must put their calls between ncclGroupStart and -End");
  if (bytes_sent(call) > 0) require_memory_of(s.device, call.send, bytes_sent(call), (what + ", send").c_str());
  if (bytes_received(call) > 0)
    require_memory_of(s.device, call.receive, bytes_received(call), (what + ", receive").c_str());
  check_overlap(call);
  if (group().depth == 0) return launch({&comm, &s, {call}});
  const auto same = [&](const Batch& batch) { return batch.comm == &comm && batch.stream == &s; };
  const auto found = std::find_if(group().batches.begin(), group().batches.end(), same);
  if (found != group().batches.end()) found->calls.push_back(call);
  else group().batches.push_back({&comm, &s, {call}});
  return ncclSuccess;
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
ncclResult_t ncclGetVersion(int* version) {
  *version = NCCL_VERSION_CODE;
  return ncclSuccess;
}

ncclResult_t ncclGroupStart() {
  ++group().depth;
  return ncclSuccess;
}
ncclResult_t ncclGroupEnd() {
  if (group().depth == 0) return error(ncclInvalidUsage, "ncclGroupEnd without ncclGroupStart");
  if (--group().depth > 0) return ncclSuccess;
  Lock lock;
  const Group ended = std::exchange(group(), {});
  ncclResult_t result = ncclSuccess;
  const auto keep = [&](ncclResult_t one) {
    if (result == ncclSuccess || (result == ncclInProgress && one != ncclSuccess)) result = one;
  };
  for (const auto& [handle, comm] : ended.inits) keep(await_all(lock, handle, comm));
  for (const Batch& batch : ended.batches) keep(launch(batch));
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
