// comm_nccl.h: NCCL's collectives between GPUs, one rank per GPU, on the caller's streams. Its groups are private to
// comm.h and world.h.
#pragma once
#include <atomic>
#include <chrono>
#include <cstdlib>
#include <mutex>
#include <thread>

#include "comm/mesh.h"
#include "comm/ring.h"
#include "core/clock.h"
#ifdef TRAIN_GPT_NCCL
#include <nccl.h>
#endif

namespace llmc {

// A library with the same collectives as ring.h. Buffers are those of Comm; `n`: elements of a shard, or of the buffer
// in collectives that do not shard.
class GpuCollectives {
 public:
  virtual ~GpuCollectives() = default;
  // Waits until all members have begun to join, at most this long. Must come before all other calls.
  virtual void connect(double seconds) = 0;
  virtual void reduce_scatter(Tensor buffer, int64_t n, Stream& stream) = 0;
  virtual void all_gather(Tensor buffer, int64_t n, Stream& stream) = 0;
  virtual void broadcast(Tensor buffer, int64_t n, int root, Stream& stream) = 0;
  virtual void reduce(Tensor buffer, int64_t n, int root, Stream& stream) = 0;
  virtual void all_to_all(Tensor out, Tensor in, int64_t n, Stream& stream) = 0;
  virtual void all_to_all_rows(Tensor out, Tensor in, const std::vector<Range>& send, const std::vector<Range>& receive,
                               Stream& stream) = 0;
  // Like Transport::exchange(), in stream order.
  virtual void exchange(const ToRank& out, const FromRank& in, Stream& stream) = 0;
  // Throws if an error has occurred, here or at a peer; called while the host waits for a stream.
  virtual void check() = 0;
  // Both may be called from any thread, and neither waits for a call in progress. expect_abort(): a peer has failed, so
  // calls throw PeerError from now on. abort(): also aborts collectives in progress.
  virtual void expect_abort() = 0;
  virtual void abort() = 0;
};

// How many multiprocessors a kernel of NCCL may take, which is the number of channels that it connects: more are faster
// and take more memory. NCCL_MAX_CTAS is NCCL's own variable, which overrides this in NCCL too.
inline int nccl_channels(Traffic traffic) {
  const char* const set = std::getenv("NCCL_MAX_CTAS");
  const int most = set != nullptr && std::atoi(set) > 0 ? std::atoi(set) : 16;
  return traffic == Traffic::numbers ? std::min(most, 2) : most;
}

// GPU memory in bytes that NCCL takes for a group of `size` ranks, if this rank also exchanges messages with `partners`
// others. From NCCL's sources (2.30: init.cc, p2p.cc, paths.cc), for GPUs that see each other's memory: a channel has,
// for each rank that it receives from, buffers of its three protocols, 512 KiB, 4.69 MiB and 4 MiB, and a page of 2 MiB
// for each rank that it sends to; all in pages of 2 MiB. A group is connected as a ring and as a tree: to two
// neighbours, or up to four if it spans several servers. Sends and receives have connections of their own.
inline int64_t nccl_bytes(const std::string& group, int size, int partners) {
  constexpr int64_t page = int64_t{2} << 20, of_connection = 5 * page + page;
  constexpr int server = 8;
  constexpr int64_t of_group = int64_t{16} << 20;  // queues of work, tables; an estimate
  if (size == 1 || traffic_of(group) == Traffic::text) return 0;
  const int neighbours = std::min(size - 1, size <= server ? 2 : 4);
  return of_group + nccl_channels(traffic_of(group)) * (neighbours + partners) * of_connection;
}

#ifdef TRAIN_GPT_NCCL
inline constexpr bool built_with_nccl = true;

namespace detail {

inline void check_nccl(ncclResult_t status, const char* call) {
  if (status == ncclSuccess || status == ncclInProgress) return;
  const bool from_outside = status == ncclSystemError || status == ncclRemoteError;  // the network, another rank
  throw Error(formatted("{} failed: {} ({}); set NCCL_DEBUG=WARN for details", call, ncclGetErrorString(status),
                        ncclGetLastError(nullptr)),
              from_outside ? ExitStatus::lost : ExitStatus::refused);
}

inline constexpr int least_nccl = 22600;
static_assert(NCCL_VERSION_CODE >= least_nccl, "NCCL 2.26 or newer is needed; `make NCCL_VERSION=` builds without it");

inline ncclDataType_t nccl_type(DType dtype) {
  switch (dtype) {
    case DType::fp32: return ncclFloat32;
    case DType::bf16: return ncclBfloat16;
    case DType::fp16: return ncclFloat16;
    case DType::fp64: return ncclFloat64;
    case DType::int32: return ncclInt32;
    case DType::e4m3:
    case DType::e5m3:
    case DType::int16: break;  // never travel
  }
  throw Error("NCCL has no such data type");
}

// A setting that NCCL gets through the environment; the user's own value wins.
struct NcclSetting {
  const char *name, *value, *without;  // without: what may happen with another value
};
inline constexpr NcclSetting nccl_settings[] = {
    // Gradients and weights are in flight at the same time, in different groups: NCCL must run their collectives in the
    // order in which they were enqueued, which is the same on all ranks.
    {"NCCL_LAUNCH_ORDER_IMPLICIT", "1", "the ranks may wait for each other forever"},
    // Connect the peers when a group is made, not in its first collective.
    {"NCCL_RUNTIME_CONNECT", "0", "a first collective may wait where an abort does not reach it"},
    // Contract 1. The order in which NVSwitches add (NVLS) may vary from call to call; NCCL's own algorithms have a
    // fixed one, and with the ring it does not depend on which algorithm its cost model prefers. Everything else that
    // decides the order (protocol, channels, and the ring itself) is left to NCCL: it is a function of message size and
    // topology, and so the same in every run on the same GPUs. Collectives that only copy may use any algorithm.
    {"NCCL_ALGO", "reduce:ring;reducescatter:ring", "the same run may not give the same bits again"},
    // NVLS memory would be allocated for every group, and never used.
    {"NCCL_NVLS_ENABLE", "0", "NCCL takes memory for NVSwitches in every group, which no plan counts"},
    // From NCCL 2.30 on; earlier versions have no such setting, and do not let processes share a GPU.
    {"NCCL_MULTI_RANK_GPU_ENABLE", "1", "processes that share a GPU cannot use NCCL"},
};

// Pauses between two polls of something that takes from microseconds to seconds.
inline void pause_after(int looks) {
  if (looks < 100) std::this_thread::yield();
  else std::this_thread::sleep_for(std::chrono::microseconds(looks < 1000 ? 20 : 1000));
}

inline int nccl_version_number() {
  int version = 0;
  check_nccl(ncclGetVersion(&version), "ncclGetVersion");
  return version;
}

}  // namespace detail

// Call before other threads start, since they may read the environment; variables that are set stay as they are.
inline void set_nccl_environment() {
  for (const detail::NcclSetting& setting : detail::nccl_settings) setenv(setting.name, setting.value, 0);
}
// Call before the first group is made.
inline void prepare_nccl() {
  const int version = detail::nccl_version_number();
  CHECK(version >= detail::least_nccl,
        "--comm nccl: NCCL {}.{}.{} was found, but 2.26 or newer is needed; update it, or use --comm threads",
        version / 10000, version / 100 % 100, version % 100);
  set_nccl_environment();
}
// Whether processes, of one rank each, may share a GPU: for tests, since their kernels take turns.
inline bool nccl_shares_gpus() { return detail::nccl_version_number() >= 23000; }
// One notice for each setting that the user's environment overrides.
inline std::vector<std::string> nccl_notices() {
  std::vector<std::string> notices;
  for (const detail::NcclSetting& setting : detail::nccl_settings)
    if (const char* const its = std::getenv(setting.name); its != nullptr && std::string(its) != setting.value)
      notices.push_back(formatted("notice: {}={} is set in the environment: without {}={} {}", setting.name, its,
                                  setting.name, setting.value, setting.without));
  return notices;
}

// The communicator is non-blocking: a call only starts an operation that may take a long time, and its state is polled
// until it is done. So the mutex is never held for long; if a call of the library hangs after all, abort() does not
// wait for it but leaves the rest to the thread that holds the mutex.
class NcclGroup final : public GpuCollectives {
 public:
  // `id`: the unique_id() of one member, passed to all; channels: see nccl_channels(). Begins to join.
  NcclGroup(const std::string& id, int rank, int size, int gpu, int channels) : rank_(rank), size_(size) {
    CHECK(id.size() == sizeof(ncclUniqueId), "an NCCL id has {} bytes, expected {}", id.size(), sizeof(ncclUniqueId));
    ncclUniqueId bytes;
    std::memcpy(&bytes, id.data(), sizeof bytes);
    CUDA_CHECK(cudaSetDevice(gpu));
    ncclConfig_t config = NCCL_CONFIG_INITIALIZER;
    config.blocking = 0;
    config.maxCTAs = channels;
    begun_ = ncclCommInitRankConfig(&comm_, size, bytes, rank, &config);
  }
  ~NcclGroup() override {
    // The streams are idle. A peer that has failed by now must not keep this rank from ending.
    const bool clean =
        connected_ && !failed_ && await(locked([&] { return ncclCommFinalize(comm_); }), 10) == ncclSuccess;
    if (clean) locked([&] { return ncclCommDestroy(std::exchange(comm_, nullptr)); });
    else abort();
  }

  void connect(double seconds) override {
    const ncclResult_t state = await(begun_, seconds);
    if (failed_) throw PeerError();
    CHECK(state != ncclInProgress,
          "NCCL has not connected the {} GPUs of a group within {} s: at least one rank has not begun to; "
          "set NCCL_DEBUG=INFO for details",
          size_, seconds);
    detail::check_nccl(state, "ncclCommInitRankConfig");
    connected_ = true;
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
    call("an all-to-all by ncclSend and ncclRecv", [&] {
      return grouped([&](auto&& keep) {
        for (int k = 0; k < size_; ++k) {
          keep(ncclSend(in.bytes + k * bytes, count(n), type(in), k, comm_, stream.cuda()));
          keep(ncclRecv(out.bytes + k * bytes, count(n), type(out), k, comm_, stream.cuda()));
        }
      });
    });
  }
  void all_to_all_rows(Tensor out, Tensor in, const std::vector<Range>& send, const std::vector<Range>& receive,
                       Stream& stream) override {
    const int64_t width = in.shape[1];
    call("an all-to-all of rows by ncclSend and ncclRecv", [&] {
      return grouped([&](auto&& keep) {
        auto block = [&](const Tensor& t, const Range& b) { return t.bytes + b.begin * width * size_of(t.dtype); };
        for (size_t k = 0; k < send.size(); ++k) {
          const int peer = static_cast<int>(k);
          if (const Range& b = send[k]; b.size > 0)
            keep(ncclSend(block(in, b), count(b.size * width), type(in), peer, comm_, stream.cuda()));
          if (const Range& b = receive[k]; b.size > 0)
            keep(ncclRecv(block(out, b), count(b.size * width), type(out), peer, comm_, stream.cuda()));
        }
      });
    });
  }
  void exchange(const ToRank& out, const FromRank& in, Stream& stream) override {
    call("an exchange by ncclSend and ncclRecv", [&] {
      return grouped([&](auto&& keep) {
        if (out.rank >= 0) keep(ncclSend(out.data, count(out.bytes), ncclInt8, out.rank, comm_, stream.cuda()));
        if (in.rank >= 0) keep(ncclRecv(in.data, count(in.bytes), ncclInt8, in.rank, comm_, stream.cuda()));
      });
    });
  }

  void check() override {
    const ncclResult_t now = state();
    if (failed_) throw PeerError();
    detail::check_nccl(now, "a collective of NCCL");
  }
  void expect_abort() override { failed_ = true; }
  void abort() override {
    failed_ = true;
    abort_wanted_.fetch_or(1);
    abort_if_wanted();
  }

 private:
  // calls(keep): makes the NCCL calls of one group, and gives each result to keep(). Returns the first error.
  template <class Calls>
  static ncclResult_t grouped(Calls&& calls) {
    ncclResult_t first = ncclGroupStart();
    const auto keep = [&](ncclResult_t status) {
      if (first == ncclSuccess || first == ncclInProgress) first = status;
    };
    calls(keep);
    keep(ncclGroupEnd());  // after an error, too
    return first;
  }
  static size_t count(int64_t n) { return static_cast<size_t>(n); }
  static ncclDataType_t type(const Tensor& t) { return detail::nccl_type(t.dtype); }

  template <class F>
  void call(const char* what, F&& f) {
    const ncclResult_t status = await(locked(f));
    if (failed_) throw PeerError();  // the error here is only a consequence
    detail::check_nccl(status, what);
  }
  // Calls f() under the mutex, if there is a communicator and no abort is wanted.
  template <class F>
  ncclResult_t locked(F&& f) {
    ncclResult_t status = ncclSuccess;
    {
      std::lock_guard lock(mutex_);
      if (comm_ != nullptr && abort_wanted_ == 0) status = f();
    }
    abort_if_wanted();
    return status;
  }
  ncclResult_t state() {
    return locked([&] {
      ncclResult_t state = ncclSuccess;
      const ncclResult_t status = ncclCommGetAsyncError(comm_, &state);
      return status == ncclSuccess ? state : status;
    });
  }
  // Waits while a call is in progress. Until it is done, only an abort may be called.
  ncclResult_t await(ncclResult_t status, double seconds = std::numeric_limits<double>::infinity()) {
    const Clock::time_point begin = Clock::now();
    for (int looks = 1; status == ncclInProgress && !failed_; detail::pause_after(looks++)) {
      if (seconds_since(begin) > seconds) break;
      status = state();
    }
    return status;
  }
  // If a call holds the mutex, it aborts when it returns. Both modify the flag, one after the other: either the call
  // sees it set, or abort() finds the mutex free.
  void abort_if_wanted() {
    if (abort_wanted_.fetch_or(0) == 0) return;
    std::unique_lock lock(mutex_, std::try_to_lock);
    if (!lock || comm_ == nullptr) return;
    const ncclComm_t mine = std::exchange(comm_, nullptr);
    lock.unlock();
    ncclCommAbort(mine);
  }

  int rank_, size_;
  std::mutex mutex_;  // guards the communicator: no call may use it while it is freed
  ncclComm_t comm_ = nullptr;
  ncclResult_t begun_ = ncclSuccess;
  bool connected_ = false;
  std::atomic<bool> failed_ = false;  // a peer has failed
  std::atomic<int> abort_wanted_ = 0;
};

inline std::string nccl_version() {
  const int version = detail::nccl_version_number();
  return formatted("NCCL {}.{}.{}", version / 10000, version / 100 % 100, version % 100);
}
inline std::string nccl_unique_id() {
  ncclUniqueId id;
  detail::check_nccl(ncclGetUniqueId(&id), "ncclGetUniqueId");
  return {reinterpret_cast<const char*>(&id), sizeof id};
}
inline std::unique_ptr<GpuCollectives> make_nccl_group(const std::string& id, int rank, int size, int gpu,
                                                       int channels) {
  return std::make_unique<NcclGroup>(id, rank, size, gpu, channels);
}
#else
inline constexpr bool built_with_nccl = false;

inline std::string nccl_version() { return "no NCCL"; }
[[noreturn]] inline void refuse_nccl() {
  throw Error("this train_gpt was built without NCCL: install libnccl-dev and rebuild, or use --comm threads");
}
inline void set_nccl_environment() {}
[[noreturn]] inline void prepare_nccl() { refuse_nccl(); }
inline bool nccl_shares_gpus() { return false; }
inline std::vector<std::string> nccl_notices() { return {}; }
inline std::string nccl_unique_id() { refuse_nccl(); }
inline std::unique_ptr<GpuCollectives> make_nccl_group(const std::string&, int, int, int, int) { refuse_nccl(); }
#endif

}  // namespace llmc
