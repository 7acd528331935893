// nccl.h: replaces NVIDIA's header when the trainer is compiled for the CPU: the part that comm/comm_nccl.h uses,
// with the same names and values. nccl.cpp documents what it checks and refuses.
//
// A collective is a task of its stream that runs once every rank of the communicator has enqueued its own. Ranks are
// host threads of this process, or of several processes of this machine. Calls of one communicator run in the order in
// which they were made, on any streams, as NCCL guarantees.
#pragma once
#include <climits>
#include <cstddef>

#include "cuda_on_cpu/runtime_api.h"

#define NCCL_MAJOR 2
#define NCCL_MINOR 30
#define NCCL_PATCH 4
#define NCCL_VERSION_CODE 23004
#define NCCL_VERSION(X, Y, Z) ((X)*10000 + (Y)*100 + (Z))

using ncclComm_t = struct ncclComm*;

#define NCCL_UNIQUE_ID_BYTES 128
struct ncclUniqueId {
  char internal[NCCL_UNIQUE_ID_BYTES];
};

enum ncclResult_t {
  ncclSuccess = 0,
  ncclUnhandledCudaError = 1,
  ncclSystemError = 2,
  ncclInternalError = 3,
  ncclInvalidArgument = 4,
  ncclInvalidUsage = 5,
  ncclRemoteError = 6,
  ncclInProgress = 7,
};
const char* ncclGetErrorString(ncclResult_t result);
const char* ncclGetLastError(ncclComm_t comm);
ncclResult_t ncclGetVersion(int* version);

// ---- Communicators --------------------------------------------------------------------------------------------------

#define NCCL_CONFIG_UNDEF_INT INT_MIN
#define NCCL_API_MAGIC 0xcafebeef
struct ncclConfig_t {
  size_t size;
  unsigned magic, version;
  // 0: ncclCommInitRankConfig returns at once, and ncclCommGetAsyncError reports when all ranks have joined. Other
  // calls may return ncclInProgress, too: they take effect only while ncclCommGetAsyncError is asked, until it reports
  // success, and before that the communicator takes no further call but ncclCommAbort.
  int blocking;
  int cgaClusterSize, minCTAs, maxCTAs;
  const char* netName;
  int splitShare;
};
#define NCCL_CONFIG_INITIALIZER                                                                            \
  {                                                                                                        \
    sizeof(ncclConfig_t), NCCL_API_MAGIC, NCCL_VERSION_CODE, NCCL_CONFIG_UNDEF_INT, NCCL_CONFIG_UNDEF_INT, \
        NCCL_CONFIG_UNDEF_INT, NCCL_CONFIG_UNDEF_INT, nullptr, NCCL_CONFIG_UNDEF_INT                       \
  }

ncclResult_t ncclGetUniqueId(ncclUniqueId* id);
ncclResult_t ncclCommInitRank(ncclComm_t* comm, int ranks, ncclUniqueId id, int rank);
ncclResult_t ncclCommInitRankConfig(ncclComm_t* comm, int ranks, ncclUniqueId id, int rank, ncclConfig_t* config);
ncclResult_t ncclCommInitAll(ncclComm_t* comms, int devices, const int* device_list);
ncclResult_t ncclCommCount(const ncclComm_t comm, int* count);
ncclResult_t ncclCommUserRank(const ncclComm_t comm, int* rank);
ncclResult_t ncclCommCuDevice(const ncclComm_t comm, int* device);
ncclResult_t ncclCommGetAsyncError(ncclComm_t comm, ncclResult_t* error);
// Waits for the work that this rank has enqueued.
ncclResult_t ncclCommFinalize(ncclComm_t comm);
ncclResult_t ncclCommDestroy(ncclComm_t comm);
// Drops the work that this rank has enqueued, so that its streams proceed; other ranks must abort, too.
ncclResult_t ncclCommAbort(ncclComm_t comm);

// ---- Collectives and point-to-point ---------------------------------------------------------------------------------

enum ncclRedOp_t { ncclSum = 0, ncclMax = 2, ncclMin = 3 };
enum ncclDataType_t {
  ncclInt8 = 0,
  ncclUint8 = 1,
  ncclInt32 = 2,
  ncclUint32 = 3,
  ncclInt64 = 4,
  ncclUint64 = 5,
  ncclFloat16 = 6,  // can be moved but not reduced
  ncclFloat32 = 7,
  ncclFloat64 = 8,
  ncclBfloat16 = 9,
};

// Sums are added from rank 0 to the last, in fp32 for bf16, and rounded once.
ncclResult_t ncclAllReduce(const void* send, void* receive, size_t count, ncclDataType_t type, ncclRedOp_t op,
                           ncclComm_t comm, cudaStream_t stream);
ncclResult_t ncclReduce(const void* send, void* receive, size_t count, ncclDataType_t type, ncclRedOp_t op, int root,
                        ncclComm_t comm, cudaStream_t stream);
ncclResult_t ncclBroadcast(const void* send, void* receive, size_t count, ncclDataType_t type, int root,
                           ncclComm_t comm, cudaStream_t stream);
ncclResult_t ncclReduceScatter(const void* send, void* receive, size_t receive_count, ncclDataType_t type,
                               ncclRedOp_t op, ncclComm_t comm, cudaStream_t stream);
ncclResult_t ncclAllGather(const void* send, void* receive, size_t send_count, ncclDataType_t type, ncclComm_t comm,
                           cudaStream_t stream);
ncclResult_t ncclSend(const void* send, size_t count, ncclDataType_t type, int peer, ncclComm_t comm,
                      cudaStream_t stream);
ncclResult_t ncclRecv(void* receive, size_t count, ncclDataType_t type, int peer, ncclComm_t comm, cudaStream_t stream);

// The calls between these two are launched together, as one task per communicator and stream.
ncclResult_t ncclGroupStart();
ncclResult_t ncclGroupEnd();
