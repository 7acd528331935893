// nccl_call.cpp: the arithmetic of the collectives, and checks of a call.
#include "cuda_on_cpu/nccl/nccl_call.h"

#include <cstring>
#include <type_traits>

#include "core/dtype.h"
#include "cuda_on_cpu/emulator.h"

namespace cuda_on_cpu::detail {
namespace {

struct TypeName {
  ncclDataType_t type;
  const char* name;
  size_t size;
};
constexpr TypeName type_names[] = {{ncclInt8, "ncclInt8", 1},       {ncclUint8, "ncclUint8", 1},
                                   {ncclInt32, "ncclInt32", 4},     {ncclUint32, "ncclUint32", 4},
                                   {ncclInt64, "ncclInt64", 8},     {ncclUint64, "ncclUint64", 8},
                                   {ncclFloat16, "ncclFloat16", 2}, {ncclFloat32, "ncclFloat32", 4},
                                   {ncclFloat64, "ncclFloat64", 8}, {ncclBfloat16, "ncclBfloat16", 2}};
const TypeName* find(ncclDataType_t type) {
  for (const TypeName& each : type_names)
    if (each.type == type) return &each;
  return nullptr;
}

bool reduces(Kind kind) { return kind == Kind::all_reduce || kind == Kind::reduce || kind == Kind::reduce_scatter; }
bool has_root(Kind kind) { return kind == Kind::reduce || kind == Kind::broadcast; }

// ---- Reductions -----------------------------------------------------------------------------------------------------

template <class T>
T combine(ncclRedOp_t op, T a, T b) {
  if (op == ncclMax) return a < b ? b : a;
  if (op == ncclMin) return b < a ? b : a;
  if constexpr (std::is_integral_v<T>) {  // wraps
    using Unsigned = std::make_unsigned_t<T>;
    return static_cast<T>(static_cast<Unsigned>(a) + static_cast<Unsigned>(b));
  } else {
    return a + b;
  }
}

// out (n elements of T) = the ranks' inputs, combined in rank order as Sum and rounded at the end.
template <class T, class Sum = T>
void reduce(std::byte* out, const std::vector<Call>& calls, size_t n) {
  for (size_t i = 0; i < n; ++i) {
    const auto input = [&](size_t rank) { return static_cast<Sum>(static_cast<const T*>(calls[rank].send)[i]); };
    Sum sum = input(0);
    for (size_t rank = 1; rank < calls.size(); ++rank) sum = combine(calls[0].op, sum, input(rank));
    reinterpret_cast<T*>(out)[i] = static_cast<T>(sum);
  }
}

}  // namespace

void reduce(std::byte* out, const std::vector<Call>& calls, size_t n) {
  switch (calls[0].type) {
    case ncclInt8: return reduce<int8_t>(out, calls, n);
    case ncclUint8: return reduce<uint8_t>(out, calls, n);
    case ncclInt32: return reduce<int32_t>(out, calls, n);
    case ncclUint32: return reduce<uint32_t>(out, calls, n);
    case ncclInt64: return reduce<int64_t>(out, calls, n);
    case ncclUint64: return reduce<uint64_t>(out, calls, n);
    case ncclFloat32: return reduce<float>(out, calls, n);
    case ncclFloat64: return reduce<double>(out, calls, n);
    case ncclBfloat16: return reduce<llmc::bf16, float>(out, calls, n);
    case ncclFloat16: break;
  }
  throw Failure(to_string(calls[0]) + ": sums of this type are not emulated");
}

// ---- One call -------------------------------------------------------------------------------------------------------

std::string to_string(const Call& call) {
  static constexpr const char* names[] = {"ncclAllReduce", "ncclReduce", "ncclBroadcast", "ncclReduceScatter",
                                          "ncclAllGather", "ncclSend",   "ncclRecv"};
  std::string text = names[static_cast<size_t>(call.kind)];
  text += "(count " + std::to_string(call.count) + ", " + find(call.type)->name;
  if (reduces(call.kind)) text += call.op == ncclSum ? ", ncclSum" : call.op == ncclMax ? ", ncclMax" : ", ncclMin";
  if (has_root(call.kind)) text += ", root " + std::to_string(call.other);
  if (is_between_two(call.kind)) text += ", peer " + std::to_string(call.other);
  return text + ")";
}

bool is_between_two(Kind kind) { return kind == Kind::send || kind == Kind::receive; }
size_t element_bytes(const Call& call) { return find(call.type)->size; }
size_t bytes_of(const Call& call) { return call.count * element_bytes(call); }
size_t bytes_sent(const Call& call) {
  if (call.kind == Kind::receive || (call.kind == Kind::broadcast && call.other != call.rank)) return 0;
  return bytes_of(call) * (call.kind == Kind::reduce_scatter ? static_cast<size_t>(call.ranks) : 1);
}
size_t bytes_received(const Call& call) {
  if (call.kind == Kind::send || (call.kind == Kind::reduce && call.other != call.rank)) return 0;
  return bytes_of(call) * (call.kind == Kind::all_gather ? static_cast<size_t>(call.ranks) : 1);
}

ncclResult_t check_arguments(const Call& call) {
  const bool known = find(call.type) != nullptr && (call.op == ncclSum || call.op == ncclMax || call.op == ncclMin);
  const bool uses_other = has_root(call.kind) || is_between_two(call.kind);
  if (!known || (uses_other && (call.other < 0 || call.other >= call.ranks))) return ncclInvalidArgument;
  const bool missing = (bytes_sent(call) > 0 && call.send == nullptr) ||  //
                       (bytes_received(call) > 0 && call.receive == nullptr);
  return missing ? ncclInvalidArgument : ncclSuccess;
}

void check_overlap(const Call& call) {
  const auto begin = reinterpret_cast<uintptr_t>(call.send), end = begin + bytes_sent(call);
  const auto out = reinterpret_cast<uintptr_t>(call.receive), out_end = out + bytes_received(call);
  const size_t shard = static_cast<size_t>(call.rank) * bytes_of(call);
  const bool in_place = call.kind == Kind::reduce_scatter ? out == begin + shard
                        : call.kind == Kind::all_gather   ? begin == out + shard
                                                          : begin == out;
  if (begin < out_end && out < end && !in_place)
    throw Failure(to_string(call) + " of rank " + std::to_string(call.rank) +
                  ": its buffers overlap, but not as in the in-place form");
}

bool agree(const Call& a, const Call& b) {
  if (is_between_two(a.kind)) return a.kind != b.kind && a.count == b.count && a.type == b.type;
  return a.kind == b.kind && a.count == b.count && a.type == b.type && (!reduces(a.kind) || a.op == b.op) &&
         (!has_root(a.kind) || a.other == b.other);
}

// ---- All of them ----------------------------------------------------------------------------------------------------

void perform(const std::vector<Call>& calls) {
  const Call& first = calls[0];
  const size_t bytes = bytes_of(first), ranks = calls.size();
  std::vector<std::byte> result;  // of all ranks, computed before any receives it: safe for in-place calls
  const auto receive = [&](const Call& call, size_t from) {
    std::memcpy(call.receive, result.data() + from, bytes_received(call));
  };
  if (bytes == 0) return;
  switch (first.kind) {
    case Kind::all_reduce:
    case Kind::reduce:
    case Kind::reduce_scatter: {
      const size_t total = bytes_sent(first);
      result.resize(total);
      reduce(result.data(), calls, total / element_bytes(first));
      for (size_t r = 0; r < ranks; ++r)
        if (bytes_received(calls[r]) > 0) receive(calls[r], first.kind == Kind::reduce_scatter ? r * bytes : 0);
      return;
    }
    case Kind::all_gather:
      result.resize(ranks * bytes);
      for (size_t r = 0; r < ranks; ++r) std::memcpy(result.data() + r * bytes, calls[r].send, bytes);
      for (const Call& call : calls) receive(call, 0);
      return;
    case Kind::broadcast: {
      const auto* root = static_cast<const std::byte*>(calls[static_cast<size_t>(first.other)].send);
      result.assign(root, root + bytes);
      for (const Call& call : calls) receive(call, 0);
      return;
    }
    case Kind::send:
    case Kind::receive: std::memmove(calls[1].receive, first.send, bytes); return;
  }
}

}  // namespace cuda_on_cpu::detail
