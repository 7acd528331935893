// all_kernels.cu: every kernel, instantiated for all that its launcher takes. `make smoke` compiles it by nvcc, for the
// warnings; nothing links it.
#include "ops/cuda/attention.cuh"
#include "ops/cuda/layernorm.cuh"
#include "ops/cuda/matmul.cuh"
#include "ops/cuda/mma.cuh"

namespace llmc::cuda {

template void layernorm_forward(float*, float*, float*, const float*, const float*, const float*, float, int64_t,
                                int64_t, cudaStream_t);
template void layernorm_forward(bf16*, float*, float*, const bf16*, const bf16*, const bf16*, float, int64_t, int64_t,
                                cudaStream_t);
template void layernorm_backward(float*, float*, float*, float*, const float*, const float*, const float*, const float*,
                                 const float*, int64_t, int64_t, Accumulate, cudaStream_t);
template void layernorm_backward(bf16*, float*, float*, float*, const bf16*, const bf16*, const bf16*, const float*,
                                 const float*, int64_t, int64_t, Accumulate, cudaStream_t);

template void attention_forward(float*, float*, const float*, const int32_t*, const AttentionShape&, cudaStream_t);
template void attention_forward(bf16*, float*, const bf16*, const int32_t*, const AttentionShape&, cudaStream_t);
template void attention_backward(float*, const float*, const float*, const float*, const float*, const int32_t*, float*,
                                 const AttentionShape&, cudaStream_t);
template void attention_backward(bf16*, const bf16*, const bf16*, const bf16*, const float*, const int32_t*, float*,
                                 const AttentionShape&, cudaStream_t);
template void attention_cached(float*, const float*, const float*, float*, int64_t, const AttentionShape&,
                               cudaStream_t);
template void attention_cached(bf16*, const bf16*, const bf16*, float*, int64_t, const AttentionShape&, cudaStream_t);
template void cache_append(float*, const float*, const AttentionShape&, cudaStream_t);
template void cache_append(bf16*, const bf16*, const AttentionShape&, cudaStream_t);

// The wrappers of mma.cuh, as a kernel of several stages uses them.
__global__ void all_instructions(float* out, const uint4* in, int bytes) {
  DYN_SHARED(uint4, tile);
  cp_async_16(tile + threadIdx.x, in + threadIdx.x, bytes);
  cp_async_commit();
  cp_async_wait<0>();
  __syncthreads();
  uint32_t a[4], b[4];
  ldmatrix_x4(a, tile + threadIdx.x);
  ldmatrix_x4_trans(b, tile + threadIdx.x);
  float d[4] = {};
  mma_m16n8k16_bf16(d, a, {b[0], b[1]});
  for (int i = 0; i < 4; ++i) out[4 * threadIdx.x + i] = d[i];
}

void launch_all_instructions(float* out, const uint4* in, cudaStream_t stream) {
  launch(all_instructions, 1, warp_size, warp_size * sizeof(uint4), stream, out, in, 16);
}

// All of the host's side of the matrix products.
void use_matmul(MatmulPlans& plans, const MatmulShape& shape, float* c, const bf16* ab, void* scratch) {
  plans.restore(plans.exported());
  plans.tune(shape, c, ab, ab, nullptr, scratch, nullptr);
  plans.prepare(shape).run(c, ab, ab, nullptr, scratch, nullptr);
}

}  // namespace llmc::cuda
