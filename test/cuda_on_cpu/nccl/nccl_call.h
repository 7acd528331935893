// nccl_call.h: private to nccl/: one rank's call of a collective, and the result of all ranks' calls.
#pragma once
#include <string>
#include <vector>

#include "cuda_on_cpu/nccl.h"

namespace cuda_on_cpu::detail {

enum class Kind : uint8_t { all_reduce, reduce, broadcast, reduce_scatter, all_gather, send, receive };

struct Call {
  Kind kind;
  const void* send;
  void* receive;
  size_t count;  // as passed to the call
  ncclDataType_t type;
  ncclRedOp_t op;
  int other;  // the root, or the peer
  int rank = 0, ranks = 0;
};
std::string to_string(const Call& call);  // "ncclBroadcast(count 8, ncclFloat32, root 0)"

// The error that NCCL would return for these arguments.
ncclResult_t check_arguments(const Call& call);
bool is_between_two(Kind kind);
size_t element_bytes(const Call& call);
size_t bytes_of(const Call& call);  // of its count
// What it reads and writes; 0 where this rank's buffer is not used.
size_t bytes_sent(const Call& call);
size_t bytes_received(const Call& call);
// Throws Failure unless the buffers are disjoint or aliased as the in-place form allows.
void check_overlap(const Call& call);
// Can these be two ranks' calls of the same collective?
bool agree(const Call& a, const Call& b);

// out (n elements) = the calls' inputs, combined in their order and rounded at the end.
void reduce(std::byte* out, const std::vector<Call>& calls, size_t n);
// By rank; or a send and its receive.
void perform(const std::vector<Call>& calls);

}  // namespace cuda_on_cpu::detail
