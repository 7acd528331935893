// attention.cuh: attention: forward and backward for training, and with a key-value cache for generation; and a check
// that as many blocks of its kernels share a multiprocessor of this GPU as they were written for. Launch bounds limit
// their registers, and most of them need more shared memory than a kernel has without asking for it.
#pragma once
#include "ops/cuda/attention_backward.cuh"
#include "ops/cuda/attention_forward.cuh"

namespace llmc::cuda {

struct KernelSize {
  const char* name;
  const void* kernel;
  int threads;
  int64_t shared_bytes;  // dynamic
  int blocks;            // meant to share a multiprocessor
};

// The kernels for heads of D channels.
template <class T>
std::vector<KernelSize> attention_kernels(int64_t D, TensorCores instructions = tensor_cores()) {
  std::vector<KernelSize> all;
  const auto list = [&]<int DP, Copy copy>() {
    const auto add = [&]<class Block>(const char* name, auto* kernel, int64_t shared_bytes) {
      all.push_back({name, reinterpret_cast<const void*>(kernel), Block::threads, shared_bytes, Block::blocks});
    };
    if constexpr (fits_warpgroups<T, copy>) {
      using Forward = detail::ForwardWarpgroups<DP>;
      using Keys = detail::BackwardKeysWarpgroups<DP>;
      using Queries = detail::BackwardQueriesWarpgroups<DP>;
      if (instructions == TensorCores::of_warpgroup) {
        add.template operator()<Forward>("attention_forward_wgmma_kernel", attention_forward_wgmma_kernel<Forward>,
                                         Forward::shared_bytes(1));
        add.template operator()<Keys>("attention_backward_keys_wgmma_kernel",
                                      attention_backward_keys_wgmma_kernel<Keys>,
                                      detail::backward_keys_shared_bytes<Keys>);
        add.template operator()<Queries>("attention_backward_queries_wgmma_kernel",
                                         attention_backward_queries_wgmma_kernel<Queries>, Queries::shared_bytes(2));
        return;
      }
    }
    using Forward = detail::ForwardBlock<T, DP>;
    using Keys = detail::BackwardKeysBlock<T, DP>;
    using Queries = detail::BackwardQueriesBlock<T, DP>;
    add.template operator()<Forward>("attention_forward_kernel", attention_forward_kernel<T, Forward, DP, copy>,
                                     Forward::shared_bytes(1));
    add.template operator()<Keys>("attention_backward_keys_kernel", attention_backward_keys_kernel<T, Keys, DP, copy>,
                                  detail::backward_keys_shared_bytes<Keys>);
    add.template operator()<Queries>("attention_backward_queries_kernel",
                                     attention_backward_queries_kernel<T, Queries, DP, copy>, Queries::shared_bytes(2));
  };
  with_head_size<T>(D, list);
  return all;
}

// How many blocks share a multiprocessor of the current device. Throws Error if it has no room for one.
inline int blocks_of(const KernelSize& k) {
  int blocks = 0;
  cudaError_t status = allow_shared_bytes(k.kernel, k.shared_bytes);
  if (status == cudaSuccess)
    status = cudaOccupancyMaxActiveBlocksPerMultiprocessor(&blocks, k.kernel, k.threads,
                                                           static_cast<size_t>(k.shared_bytes));
  if (status != cudaSuccess || blocks == 0)
    launch_failed(k.kernel, 1, static_cast<unsigned>(k.threads), k.shared_bytes,
                  status == cudaSuccess ? cudaErrorInvalidConfiguration : status);
  return blocks;
}

// A notice for each kernel with fewer blocks on a multiprocessor than it was written for, although there is shared
// memory for more: it is slower than it could be.
template <class T>
std::vector<std::string> attention_occupancy_notices(int64_t D) {
  const int64_t shared = device_attribute(cudaDevAttrMaxSharedMemoryPerMultiprocessor),
                reserved = device_attribute(cudaDevAttrReservedSharedMemoryPerBlock);
  std::vector<std::string> notices;
  for (const KernelSize& k : attention_kernels<T>(D)) {
    cudaFuncAttributes compiled{};
    CUDA_CHECK(cudaFuncGetAttributes(&compiled, k.kernel));
    const int64_t of_block = k.shared_bytes + static_cast<int64_t>(compiled.sharedSizeBytes) + reserved,
                  meant = std::min<int64_t>(k.blocks, shared / of_block);
    if (const int blocks = blocks_of(k); blocks < meant)
      notices.push_back(
          formatted("notice: {} for heads of {} channels in {} has {} of {} blocks on a multiprocessor of this GPU, "
                    "and is slower for "
                    "that: its threads have {} registers each, its blocks {} bytes of shared memory",
                    k.name, D, dtype_of<T>(), blocks, meant, compiled.numRegs, of_block));
  }
  return notices;
}

}  // namespace llmc::cuda
