// all_kernels.cu: every kernel, in every instantiation that its launcher uses. `make smoke` compiles it with nvcc,
// which for the GPU sees these alone; dev/cuda/kernel_resources.sh lists each kernel's resources; nothing links it.
#include "ops/cuda/attention.cuh"
#include "ops/cuda/attention_cudnn.cuh"
#include "ops/cuda/column_sum.cuh"
#include "ops/cuda/cross_entropy.cuh"
#include "ops/cuda/elementwise.cuh"
#include "ops/cuda/embedding.cuh"
#include "ops/cuda/expert_ranks.cuh"
#include "ops/cuda/experts.cuh"
#include "ops/cuda/grouped_matmul.cuh"
#include "ops/cuda/heads.cuh"
#include "ops/cuda/matmul.cuh"
#include "ops/cuda/mma.cuh"
#include "ops/cuda/muon.cuh"
#include "ops/cuda/norms.cuh"
#include "ops/cuda/projection_norm.cuh"
#include "ops/cuda/qk_clip.cuh"
#include "ops/cuda/quantise.cuh"
#include "ops/cuda/router.cuh"
#include "ops/cuda/small_state.cuh"
#include "ops/cuda/step.cuh"
#include "ops/cuda/swiglu.cuh"
#include "ops/cuda/update.cuh"

namespace llmc::cuda {

// Never called: a call is the shortest instantiation. x: any array of the dtype; f: floats; N, C: any sizes
template <class T>
void all_kernels(T* x, float* f, double* d, int32_t* ids, int64_t N, int64_t C, cudaStream_t stream) {
  const Philox rng(0, "");
  gelu_forward(x, x, N, stream);
  gelu_backward(x, x, x, N, stream);
  gelu_backward_with_bias(x, f, {f}, x, x, N, C, stream);
  residual_forward(x, x, x, N, stream);
  convert(x, f, N, stream);
  convert(f, x, N, stream);
  convert(x, x, N, stream);
  copy_box(x, {}, x, {}, {N, N, C}, stream);
  copy_box(x, {}, f, {}, {N, N, C}, stream);
  copy_box(f, {}, x, {}, {N, N, C}, stream);
  scale(x, 1, N, stream);
  fill(x, 1, N, stream);
  merge_parts(x, x, x, 2, N, C, stream);
  init_normal(x, {}, N, 1, rng, stream);
  column_sum(f, {f}, x, N, C, stream);
  square_sum(d, d, x, N, Accumulate::no, stream);
  add_losses(d, f, N, stream);
  combine_scalars(d, d, d, d, N, 1, 1, N, N, 1, 1, stream);
  update_weights(Optimizer::adamw, x, f, f, f, f, d, N, {}, stream);
  average_weights(f, f, d, N, 1, stream);
  exchange(f, f, N, stream);
  clip_control(d, d, N, d, {}, stream);
  muon_direction(f, f, d, N, 1, stream);
  divide_by_norm(x, d, N, 1, 1, stream);
  linear_combination(x, 1, x, 1, f, N, stream);
  normalise_rows(x, f, d, d, N, C, 1, stream);
  largest_logits(d, f, 1, N, C, stream);
  largest_of_ranks(d, d, 1, N, stream);
  clip_heads(x, f, d, d, {}, N, {}, rng, stream);
  cross_entropy(f, x, ids, N, C, C, 1, Gradient::yes, {}, stream);
  const Vocabulary part = {N, N};
  cross_entropy_stats(f, x, ids, N, C, part, stream);
  cross_entropy_merge(f, x, f, ids, 1, N, C, part, 1, Gradient::yes, {}, stream);
  embedding_forward(x, ids, ids, x, x, N, C, part, stream);
  embedding_backward({f, f, N, N}, ids, x, ids, ids, N, C, part, stream);
  add_positions(x, ids, x, N, C, stream);
  layernorm_forward(x, f, f, x, x, x, 0, N, C, stream);
  residual_layernorm_forward(x, f, f, x, x, x, x, x, 0, N, C, stream);
  layernorm_backward(x, f, f, {f}, x, x, x, f, f, N, C, Accumulate::no, stream);
  rmsnorm_forward(x, f, x, x, 0, N, C, stream);
  residual_rmsnorm_forward(x, f, x, x, x, x, 0, N, C, stream);
  rmsnorm_backward(x, f, {f}, x, x, x, f, N, C, Accumulate::no, stream);
  const AttentionShape shape = {N, 1, 1, 1, C};
  rotary_table(f, {}, N, C, stream);
  rotary(x, f, ids, shape, Turn::forward, stream);
  qk_norm_forward(x, f, x, x, x, f, ids, 0, shape, stream);
  qk_norm_backward(x, f, f, {f}, x, x, x, f, f, ids, shape, stream);
  projection_sums(f, x, x, x, x, shape, stream);
  projection_norm_forward(x, f, x, x, x, f, 0, shape, {}, stream);
  projection_norm_backward(x, f, f, {f}, x, x, x, f, f, shape, {}, stream);
  const AttentionBlock block = whole_sequences(shape);
  attention_forward<T>({}, {}, f, block, stream);
  attention_finish(x, f, f, f, f, N, N, N, C, stream);
  attention_backward<T>({}, x, x, f, {}, f, block, stream);
  cache_append(x, x, shape, stream);
  swiglu_forward(x, x, N, C, ids, stream);
  swiglu_backward(x, x, x, N, C, ids, stream);
  swiglu_forward_fp8<T>({}, {}, x, N, C, stream);
  swiglu_backward_fp8<T>({}, {}, x, x, N, C, stream);
  for (const ScaledBy by : {ScaledBy::segments, ScaledBy::tiles}) quantise<T>({}, {}, x, N, C, by, stream);
  round_to_fp8(x, x, 1, N, C, {1, C}, Fp8Format::e4m3, ids, stream);
  round_whole_to_fp8(x, f, x, 1, N, C, Fp8Format::e4m3, ids, stream);
  tile_maxima(f, x, {}, stream);
  tiles_to_fp8<T>(nullptr, x, f, {}, stream);
  tiles_from_fp8<T>(x, nullptr, f, {}, stream);
  const Router router = {N, 1};
  const Segments segments = {N};
  router_forward(ids, f, f, f, N, router, stream);
  router_backward(f, f, f, ids, ids, N, router, {}, segments, stream);
  router_statistics(ids, f, f, f, f, ids, N, router, segments, stream);
  router_losses(d, ids, f, f, N, router, N, stream);
  add_to(d, d, N, stream);
  dispatch_plan(ids, ids, ids, ids, ids, N, N, 1, N, segments, {N}, stream);
  dispatch_rows(x, x, ids, N, C, 1, stream);
  combine_rows(x, x, f, ids, N, C, 1, Accumulate::no, stream);
  combine_backward(x, f, x, x, f, ids, N, C, 1, stream);
  grouped_linear_forward(x, x, x, ids, N, 1, C, C, stream);
  grouped_linear_backward_input(x, x, x, ids, N, 1, C, C, stream);
  grouped_linear_backward_weight(f, x, x, ids, 1, C, C, Accumulate::no, stream);
}
template void all_kernels(float*, float*, double*, int32_t*, int64_t, int64_t, cudaStream_t);
template void all_kernels(bf16*, float*, double*, int32_t*, int64_t, int64_t, cudaStream_t);

void use_expert_ranks(int32_t* ids, float* f, double* d, int64_t N, cudaStream_t stream) {
  expert_counts(ids, ids, N, stream);
  arrival_plan(ids, ids, ids, ids, N, N, N, N, stream);
  join_segments(ids, f, f, ids, f, f, ids, ids, N, N, stream);
  segment_starts(ids, ids, ids, ids, ids, ids, 0, N, N, stream);
  add_expert_counts(d, ids, N, N, stream);
  update_expert_biases(f, d, d, N, 0, stream);
  zero_each([](auto&&) {}, stream);
}

void use_split(bf16* out, const float* x, int64_t N, cudaStream_t stream) {
  split_in_three(out, x, N, N, N, N, stream);
}

// The wrappers of mma.cuh, as in a pipelined kernel.
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

// All host code of the matrix products.
void use_matmul(MatmulPlans& plans, const MatmulShape& shape, float* c, const bf16* ab, void* scratch) {
  plans.restore(plans.exported());
  plans.tune(shape, {c, ab, ab, nullptr, scratch}, nullptr);
  plans.prepare(shape).run({c, ab, ab, nullptr, scratch}, nullptr);
}

}  // namespace llmc::cuda
