// comm_nccl.h: NCCL's collectives between GPUs, one rank per GPU, on the caller's streams. Private to comm.h and
// world.h.
#pragma once
#include <atomic>
#include <cstdlib>
#include <cstring>
#include <memory>
#include <mutex>
#include <string>
#include <utility>

#include "dist/ring.h"
#ifdef TRAIN_GPT_NCCL
#include <nccl.h>
#endif

namespace llmc {

// A library that does what ring.h does. Buffers are those of Comm; `n`: elements of a shard, or of the buffer in
// collectives that do not shard.
class GpuCollectives {
 public:
  virtual ~GpuCollectives() = default;
  virtual void reduce_scatter(Tensor buffer, int64_t n, Stream& stream) = 0;
  virtual void all_gather(Tensor buffer, int64_t n, Stream& stream) = 0;
  virtual void broadcast(Tensor buffer, int64_t n, int root, Stream& stream) = 0;
  virtual void reduce(Tensor buffer, int64_t n, int root, Stream& stream) = 0;
  virtual void all_to_all(Tensor out, Tensor in, int64_t n, Stream& stream) = 0;
  // As Transport::exchange(), in stream order.
  virtual void exchange(int to, const void* out, int64_t out_bytes, int from, void* in, int64_t in_bytes,
                        Stream& stream) = 0;
  // Throws if an error has occurred, here or at a peer; called while the host waits for a stream.
  virtual void check() = 0;
  // Both may be called from any thread. A peer has failed: calls throw PeerError from now on; and collectives in
  // progress are aborted.
  virtual void expect_abort() = 0;
  virtual void abort() = 0;
};

#ifdef TRAIN_GPT_NCCL
inline constexpr bool built_with_nccl = true;

namespace detail {

inline void check_nccl(ncclResult_t status, const char* call, ncclComm_t comm = nullptr) {
  if (status == ncclSuccess || status == ncclInProgress) return;
  throw Error(formatted("{} failed: {} ({}); set NCCL_DEBUG=WARN for details", call, ncclGetErrorString(status),
                        ncclGetLastError(comm)));
}

inline constexpr int least_nccl = 22600;
static_assert(NCCL_VERSION_CODE >= least_nccl, "NCCL 2.26 or newer is needed; `make NCCL_VERSION=` builds without");

inline ncclDataType_t nccl_type(DType dtype) {
  switch (dtype) {
    case DType::fp32: return ncclFloat32;
    case DType::bf16: return ncclBfloat16;
    case DType::fp16: return ncclFloat16;
    case DType::fp64: return ncclFloat64;
    case DType::int32: return ncclInt32;
  }
  throw Error("NCCL has no such data type");
}

}  // namespace detail

// Call before the first group is made, while no other thread reads the environment.
inline void prepare_nccl() {
  int version = 0;
  detail::check_nccl(ncclGetVersion(&version), "ncclGetVersion");
  CHECK(version >= detail::least_nccl,
        "--comm nccl: NCCL {}.{}.{} was found, but 2.26 or newer is needed; update it, or use --comm threads",
        version / 10000, version / 100 % 100, version % 100);
  // Gradients and weights are in flight at the same time, in different groups: NCCL must run their collectives in the
  // order in which they were enqueued, which is the same on all ranks.
  setenv("NCCL_LAUNCH_ORDER_IMPLICIT", "1", 0);
  // Connect the peers when a group is made. A first collective that connects would block its caller where abort()
  // cannot reach it.
  setenv("NCCL_RUNTIME_CONNECT", "0", 0);
}

class NcclGroup final : public GpuCollectives {
 public:
  // `id`: the unique_id() of one member, passed to all. Blocks until all members have called it.
  NcclGroup(const std::string& id, int rank, int size, int gpu) : rank_(rank), size_(size) {
    CHECK(id.size() == sizeof(ncclUniqueId), "an NCCL id has {} bytes, expected {}", id.size(), sizeof(ncclUniqueId));
    ncclUniqueId bytes;
    std::memcpy(&bytes, id.data(), sizeof bytes);
    CUDA_CHECK(cudaSetDevice(gpu));
    detail::check_nccl(ncclCommInitRank(&comm_, size, bytes, rank), "ncclCommInitRank");
  }
  ~NcclGroup() override {
    if (!aborted_) ncclCommDestroy(comm_);
  }

  static std::string unique_id() {
    ncclUniqueId id;
    detail::check_nccl(ncclGetUniqueId(&id), "ncclGetUniqueId");
    return {reinterpret_cast<const char*>(&id), sizeof id};
  }

  void reduce_scatter(Tensor buffer, int64_t n, Stream& stream) override {
    std::byte* mine = buffer.bytes + rank_ * n * size_of(buffer.dtype);
    call("ncclReduceScatter",
         [&] { return ncclReduceScatter(buffer.bytes, mine, count(n), type(buffer), ncclSum, comm_, stream.cuda()); });
  }
  void all_gather(Tensor buffer, int64_t n, Stream& stream) override {
    const std::byte* mine = buffer.bytes + rank_ * n * size_of(buffer.dtype);
    call("ncclAllGather",
         [&] { return ncclAllGather(mine, buffer.bytes, count(n), type(buffer), comm_, stream.cuda()); });
  }
  void broadcast(Tensor buffer, int64_t n, int root, Stream& stream) override {
    call("ncclBroadcast",
         [&] { return ncclBroadcast(buffer.bytes, buffer.bytes, count(n), type(buffer), root, comm_, stream.cuda()); });
  }
  void reduce(Tensor buffer, int64_t n, int root, Stream& stream) override {
    call("ncclReduce", [&] {
      return ncclReduce(buffer.bytes, buffer.bytes, count(n), type(buffer), ncclSum, root, comm_, stream.cuda());
    });
  }
  void all_to_all(Tensor out, Tensor in, int64_t n, Stream& stream) override {
    const int64_t bytes = n * size_of(in.dtype);
    call("ncclGroupStart", [] { return ncclGroupStart(); });
    for (int k = 0; k < size_; ++k) {
      call("ncclSend", [&] { return ncclSend(in.bytes + k * bytes, count(n), type(in), k, comm_, stream.cuda()); });
      call("ncclRecv", [&] { return ncclRecv(out.bytes + k * bytes, count(n), type(out), k, comm_, stream.cuda()); });
    }
    call("ncclGroupEnd", [] { return ncclGroupEnd(); });
  }
  void exchange(int to, const void* out, int64_t out_bytes, int from, void* in, int64_t in_bytes,
                Stream& stream) override {
    call("ncclGroupStart", [] { return ncclGroupStart(); });
    if (to >= 0) call("ncclSend", [&] { return ncclSend(out, count(out_bytes), ncclInt8, to, comm_, stream.cuda()); });
    if (from >= 0)
      call("ncclRecv", [&] { return ncclRecv(in, count(in_bytes), ncclInt8, from, comm_, stream.cuda()); });
    call("ncclGroupEnd", [] { return ncclGroupEnd(); });
  }

  void check() override {
    ncclResult_t state = ncclSuccess;
    call("ncclCommGetAsyncError", [&] { return ncclCommGetAsyncError(comm_, &state); });
    call("a collective of NCCL", [&] { return state; });
  }
  void expect_abort() override { failed_ = true; }
  void abort() override {
    std::lock_guard lock(mutex_);  // no call may use the communicator while it is freed
    if (!std::exchange(aborted_, true)) ncclCommAbort(comm_);
  }

 private:
  static size_t count(int64_t n) { return static_cast<size_t>(n); }
  static ncclDataType_t type(const Tensor& t) { return detail::nccl_type(t.dtype); }
  template <class F>
  void call(const char* what, F&& f) {
    std::lock_guard lock(mutex_);
    const ncclResult_t status = aborted_ ? ncclSuccess : f();
    if (failed_) throw PeerError();  // the error here is only a consequence
    detail::check_nccl(status, what, comm_);
  }

  int rank_, size_;
  ncclComm_t comm_ = nullptr;
  std::atomic<bool> failed_ = false;  // a peer has failed
  std::mutex mutex_;                  // of the communicator
  bool aborted_ = false;
};

inline std::string nccl_version() {
  int version = 0;
  detail::check_nccl(ncclGetVersion(&version), "ncclGetVersion");
  return formatted("NCCL {}.{}.{}", version / 10000, version / 100 % 100, version % 100);
}
inline std::string nccl_unique_id() { return NcclGroup::unique_id(); }
inline std::unique_ptr<GpuCollectives> make_nccl_group(const std::string& id, int rank, int size, int gpu) {
  return std::make_unique<NcclGroup>(id, rank, size, gpu);
}
#else
inline constexpr bool built_with_nccl = false;

inline std::string nccl_version() { return "no NCCL"; }
[[noreturn]] inline void refuse_nccl() {
  throw Error("this train_gpt was built without NCCL: install libnccl-dev and rebuild, or use --comm threads");
}
[[noreturn]] inline void prepare_nccl() { refuse_nccl(); }
inline std::string nccl_unique_id() { refuse_nccl(); }
inline std::unique_ptr<GpuCollectives> make_nccl_group(const std::string&, int, int, int) { refuse_nccl(); }
#endif

}  // namespace llmc
