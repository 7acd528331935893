// comm_nccl.h: NCCL's collectives between GPUs, one rank for each, on the streams of their callers. Private to comm.h.
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

// What a library does in the place of ring.h. Buffers and counts are those of Comm, which see; `n`: elements of a
// shard, or of the buffer where nothing is sharded.
class GpuCollectives {
 public:
  virtual ~GpuCollectives() = default;
  virtual void reduce_scatter(Tensor buffer, int64_t n, Stream& stream) = 0;
  virtual void all_gather(Tensor buffer, int64_t n, Stream& stream) = 0;
  virtual void broadcast(Tensor buffer, int64_t n, int root, Stream& stream) = 0;
  virtual void reduce(Tensor buffer, int64_t n, int root, Stream& stream) = 0;
  virtual void all_to_all(Tensor out, Tensor in, int64_t n, Stream& stream) = 0;
  virtual void send(Tensor buffer, int to, Stream& stream) = 0;
  virtual void receive(Tensor buffer, int from, Stream& stream) = 0;
  // Throws what went wrong meanwhile, here or at a peer; asked while the host waits for a stream.
  virtual void check() = 0;
  // From any thread, both: from now on a peer has failed; and whoever waits in a collective is let go.
  virtual void expect_abort() = 0;
  virtual void abort() = 0;
};

#ifdef TRAIN_GPT_NCCL
inline constexpr bool built_with_nccl = true;

namespace detail {

inline void check_nccl(ncclResult_t status, const char* call, ncclComm_t comm = nullptr) {
  if (status == ncclSuccess || status == ncclInProgress) return;
  throw Error(formatted("{} failed: {} ({}); NCCL_DEBUG=WARN tells more", call, ncclGetErrorString(status),
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
  throw Error("NCCL has no such type");
}

}  // namespace detail

// Before the first group, while no other thread reads the environment.
inline void prepare_nccl() {
  int version = 0;
  detail::check_nccl(ncclGetVersion(&version), "ncclGetVersion");
  CHECK(version >= detail::least_nccl,
        "--comm nccl: the NCCL library found is {}, too old: 2.26 or newer is needed, or "
        "--comm threads",
        version);
  // Gradients and weights travel at the same time, in groups of their own: NCCL is to run them in the order in which
  // they were enqueued, which is the same on all ranks.
  setenv("NCCL_LAUNCH_ORDER_IMPLICIT", "1", 0);
  // And peers connect when a group is made. A first collective that connects would block its caller, out of reach of
  // abort().
  setenv("NCCL_RUNTIME_CONNECT", "0", 0);
}

class NcclGroup final : public GpuCollectives {
 public:
  // `id`: unique_id() of one member, the same for all, who all call this at the same time.
  NcclGroup(const std::string& id, int rank, int size, int gpu) : rank_(rank), size_(size) {
    CHECK(id.size() == sizeof(ncclUniqueId), "an id of NCCL has {} bytes, expected {}", id.size(),
          sizeof(ncclUniqueId));
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
  void send(Tensor buffer, int to, Stream& stream) override {
    call("ncclSend",
         [&] { return ncclSend(buffer.bytes, count(buffer.numel()), type(buffer), to, comm_, stream.cuda()); });
  }
  void receive(Tensor buffer, int from, Stream& stream) override {
    call("ncclRecv",
         [&] { return ncclRecv(buffer.bytes, count(buffer.numel()), type(buffer), from, comm_, stream.cuda()); });
  }

  void check() override {
    ncclResult_t state = ncclSuccess;
    call("ncclCommGetAsyncError", [&] { return ncclCommGetAsyncError(comm_, &state); });
    call("a collective of NCCL", [&] { return state; });
  }
  void expect_abort() override { failed_ = true; }
  void abort() override {
    std::lock_guard lock(mutex_);  // nobody is inside a call on the communicator, which this frees
    if (!std::exchange(aborted_, true)) ncclCommAbort(comm_);
  }

 private:
  static size_t count(int64_t n) { return static_cast<size_t>(n); }
  static ncclDataType_t type(const Tensor& t) { return detail::nccl_type(t.dtype); }
  template <class F>
  void call(const char* what, F&& f) {
    std::lock_guard lock(mutex_);
    const ncclResult_t status = aborted_ ? ncclSuccess : f();
    if (failed_) throw PeerError();  // what follows from a peer's failure is not the reason
    detail::check_nccl(status, what, comm_);
  }

  int rank_, size_;
  ncclComm_t comm_ = nullptr;
  std::atomic<bool> failed_ = false;  // a rank has
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
  throw Error("this train_gpt was built without NCCL: install libnccl-dev and build anew, or use --comm threads");
}
[[noreturn]] inline void prepare_nccl() { refuse_nccl(); }
inline std::string nccl_unique_id() { refuse_nccl(); }
inline std::unique_ptr<GpuCollectives> make_nccl_group(const std::string&, int, int, int) { refuse_nccl(); }
#endif

}  // namespace llmc
