// emulator_ranks.h: ranks as host threads, each with an emulated device, for tests of the emulated NCCL.
#pragma once
#include <nccl.h>

#include <stdexcept>
#include <thread>

#include "cuda/emulator/emulator_test.h"

namespace llmc {

#define NCCL_OK(call)                                                                           \
  do {                                                                                          \
    if (const ncclResult_t result_ = (call); result_ != ncclSuccess)                            \
      throw std::runtime_error(std::string(#call) + ": " + ncclGetErrorString(result_) + ": " + \
                               ncclGetLastError(nullptr));                                      \
  } while (false)

inline constexpr size_t n = 32;

template <class T>
inline constexpr ncclDataType_t type_of = ncclFloat32;
template <>
inline constexpr ncclDataType_t type_of<bf16> = ncclBfloat16;
template <>
inline constexpr ncclDataType_t type_of<int32_t> = ncclInt32;

// One rank: a host thread, its device, a communicator of all ranks and a stream.
struct Rank {
  int rank, ranks;
  ncclComm_t comm;
  cudaStream_t stream;
  bool aborted = false;
  void finish() const { CUDA_CHECK(cudaStreamSynchronize(stream)); }
};

// Calls f(Rank&) on one host thread per rank; returns what each of them threw, or "".
template <class F>
std::vector<std::string> run_ranks(int ranks, F&& f, size_t device_bytes = size_t{1} << 20) {
  Devices devices(ranks, device_bytes);
  std::vector<std::string> thrown(static_cast<size_t>(ranks));
  ncclUniqueId id;
  NCCL_OK(ncclGetUniqueId(&id));
  std::vector<std::thread> hosts;
  for (int r = 0; r < ranks; ++r)
    hosts.emplace_back([&, r] {
      try {
        CUDA_CHECK(cudaSetDevice(r));
        const TestStream stream;
        Rank self{r, ranks, nullptr, stream};
        NCCL_OK(ncclCommInitRank(&self.comm, ranks, id, r));
        try {
          f(self);
        } catch (const std::exception& error) {
          thrown[static_cast<size_t>(r)] = error.what();
        }
        if (!self.aborted) {
          if (thrown[static_cast<size_t>(r)].empty()) NCCL_OK(ncclCommDestroy(self.comm));
          else NCCL_OK(ncclCommAbort(self.comm));
        }
      } catch (const std::exception& error) {
        thrown[static_cast<size_t>(r)] += error.what();
      }
    });
  for (std::thread& host : hosts) host.join();
  thrown[0] += devices.close();
  return thrown;
}
// The same where nothing may be thrown; f returns outputs, and this returns those of all ranks.
template <class F>
Outputs outputs_of_ranks(int ranks, F&& f) {
  std::vector<Outputs> each(static_cast<size_t>(ranks));
  const auto thrown = run_ranks(ranks, [&](Rank& self) { each[static_cast<size_t>(self.rank)] = f(self); });
  for (const std::string& text : thrown)
    if (!text.empty()) throw cuda_on_cpu::Failure(text);
  Outputs all;
  for (const Outputs& outputs : each) all.insert(all.end(), outputs.begin(), outputs.end());
  return all;
}

template <class T>
std::vector<T> values(size_t count, int rank) {
  std::vector<T> out(count);
  for (size_t i = 0; i < count; ++i) out[i] = T(static_cast<float>(i % 7 + static_cast<size_t>(rank) * 3));
  return out;
}

// Every collective, in place or not, on values(elements, rank).
template <class T>
Outputs all_collectives(Rank& self, size_t n, std::vector<T> (*values)(size_t, int)) {
  const ncclDataType_t type = type_of<T>;
  const int r = self.rank, ranks = self.ranks;
  const size_t whole_n = static_cast<size_t>(ranks) * n;
  DeviceArray<T> x(values(n, r)), whole(values(whole_n, r)), out(n), gathered(whole_n), reduced(n);
  DeviceArray<T> all(values(n, r)), scattered(values(whole_n, r)), least(values(n, r));
  DeviceArray<T> sent(n), shards(values(whole_n, r)), from_root(values(n, r)), to_all(whole_n);
  const auto shard = [&](T* of, int rank) { return of + static_cast<size_t>(rank) * n; };
  NCCL_OK(ncclAllReduce(x, out, n, type, ncclSum, self.comm, self.stream));
  NCCL_OK(ncclAllReduce(all, all, n, type, ncclMax, self.comm, self.stream));
  NCCL_OK(ncclReduceScatter(whole, reduced, n, type, ncclSum, self.comm, self.stream));
  NCCL_OK(ncclReduceScatter(scattered, shard(scattered, r), n, type, ncclSum, self.comm, self.stream));
  NCCL_OK(ncclAllGather(x, gathered, n, type, self.comm, self.stream));
  NCCL_OK(ncclAllGather(shard(shards, r), shards, n, type, self.comm, self.stream));
  NCCL_OK(ncclBroadcast(from_root, from_root, n, type, 1, self.comm, self.stream));
  NCCL_OK(ncclReduce(least, r == 2 ? static_cast<T*>(least) : nullptr, n, type, ncclMin, 2, self.comm, self.stream));
  NCCL_OK(ncclGroupStart());  // a ring
  NCCL_OK(ncclSend(x, n, type, (r + 1) % ranks, self.comm, self.stream));
  NCCL_OK(ncclRecv(sent, n, type, (r + ranks - 1) % ranks, self.comm, self.stream));
  NCCL_OK(ncclGroupEnd());
  NCCL_OK(ncclGroupStart());
  for (int other = 0; other < ranks; ++other) {
    NCCL_OK(ncclSend(shard(whole, other), n, type, other, self.comm, self.stream));
    NCCL_OK(ncclRecv(shard(to_all, other), n, type, other, self.comm, self.stream));
  }
  NCCL_OK(ncclGroupEnd());
  self.finish();
  return {{"all-reduce", out.host()},      {"max", all.host()},         {"reduce-scatter", reduced.host()},
          {"in place", scattered.host()},  {"gather", gathered.host()}, {"gather in place", shards.host()},
          {"broadcast", from_root.host()}, {"min", least.host()},       {"ring", sent.host()},
          {"all-to-all", to_all.host()}};
}

}  // namespace llmc
