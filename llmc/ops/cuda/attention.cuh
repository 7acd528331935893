// attention.cuh: attention: forward and backward for training, and with a key-value cache for generation; and a check
// that as many blocks of its kernels share a multiprocessor of this GPU as they were written for. Launch bounds limit
// their registers, and most of them need more shared memory than a kernel has without asking for it.
#pragma once
#include "ops/cuda/attention_backward.cuh"
#include "ops/cuda/attention_forward.cuh"

namespace llmc::cuda {

// A notice for each kernel for heads of D channels that has fewer blocks on a multiprocessor of the current device than
// it was written for, although there is shared memory for more: it is slower than it could be. Throws Error if there is
// no room for one block.
template <class T>
std::vector<std::string> attention_occupancy_notices(int64_t D) {
  const int64_t shared = device_attribute(cudaDevAttrMaxSharedMemoryPerMultiprocessor),
                reserved = device_attribute(cudaDevAttrReservedSharedMemoryPerBlock);
  std::vector<std::string> notices;
  const auto check = [&]<class Block>(const char* name, auto* function, int64_t shared_bytes) {
    const auto kernel = reinterpret_cast<const void*>(function);
    cudaFuncAttributes compiled{};
    CUDA_CHECK(cudaFuncGetAttributes(&compiled, kernel));
    int blocks = 0;
    cudaError_t status = allow_shared_bytes(kernel, shared_bytes);
    if (status == cudaSuccess)
      status = cudaOccupancyMaxActiveBlocksPerMultiprocessor(&blocks, kernel, Block::threads,
                                                             static_cast<size_t>(shared_bytes));
    if (status != cudaSuccess || blocks == 0)
      launch_failed(kernel, 1, Block::threads, shared_bytes,
                    status == cudaSuccess ? cudaErrorInvalidConfiguration : status);
    const int64_t of_block = shared_bytes + static_cast<int64_t>(compiled.sharedSizeBytes) + reserved,
                  meant = std::min<int64_t>(Block::blocks, shared / of_block);
    if (blocks < meant)
      notices.push_back(
          formatted("notice: {} for heads of {} channels in {} has {} of {} blocks on a multiprocessor of this GPU, "
                    "and is slower for that: its threads have {} registers each, its blocks {} bytes of shared memory",
                    name, D, dtype_of<T>(), blocks, meant, compiled.numRegs, of_block));
  };
  with_head_size<T>(D, [&]<int DP, Copy copy>() {
    if constexpr (fits_warpgroups<T, copy>) {
      using Forward = detail::ForwardWarpgroups<DP>;
      using Keys = detail::BackwardKeysWarpgroups<DP>;
      using Queries = detail::BackwardQueriesWarpgroups<DP>;
      if (tensor_cores() == TensorCores::of_warpgroup) {
        check.template operator()<Forward>("attention_forward_wgmma_kernel", attention_forward_wgmma_kernel<Forward>,
                                           Forward::shared_bytes(1));
        check.template operator()<Keys>("attention_backward_keys_wgmma_kernel",
                                        attention_backward_keys_wgmma_kernel<Keys>,
                                        detail::backward_keys_shared_bytes<Keys>);
        check.template operator()<Queries>("attention_backward_queries_wgmma_kernel",
                                           attention_backward_queries_wgmma_kernel<Queries>, Queries::shared_bytes(2));
        return;
      }
    }
    using Forward = detail::ForwardBlock<T, DP>;
    using Keys = detail::BackwardKeysBlock<T, DP>;
    using Queries = detail::BackwardQueriesBlock<T, DP>;
    check.template operator()<Forward>("attention_forward_kernel", attention_forward_kernel<T, Forward, DP, copy>,
                                       Forward::shared_bytes(1));
    check.template operator()<Keys>("attention_backward_keys_kernel", attention_backward_keys_kernel<T, Keys, DP, copy>,
                                    detail::backward_keys_shared_bytes<Keys>);
    check.template operator()<Queries>("attention_backward_queries_kernel",
                                       attention_backward_queries_kernel<T, Queries, DP, copy>,
                                       Queries::shared_bytes(2));
  });
  return notices;
}

}  // namespace llmc::cuda
