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
std::vector<std::string> run_ranks(int ranks, F&& f) {
  Devices devices(ranks);
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

}  // namespace llmc
