// layernorm.cu: the forward of layernorm in five versions. See cuda/ladder.h.
#include <memory>

#include "cuda/ladder.h"
#include "ops/cpu/norms.h"
#include "ops/cuda/norms.cuh"

namespace llmc::cuda {
namespace {

constexpr float eps = 1e-5f;

__global__ void layernorm1(bf16* out, float* mean, float* rstd, const bf16* x, const bf16* weight, const bf16* bias,
                           int64_t N, int64_t C) {
  const int64_t n = static_cast<int64_t>(blockIdx.x) * blockDim.x + threadIdx.x;
  if (n >= N) return;
  float sum = 0, squares = 0;
  for (int64_t c = 0; c < C; ++c) sum += to_float(x[n * C + c]);
  const float m = sum / static_cast<float>(C);
  for (int64_t c = 0; c < C; ++c) squares += (to_float(x[n * C + c]) - m) * (to_float(x[n * C + c]) - m);
  const float r = 1.0f / sqrtf(squares / static_cast<float>(C) + eps);
  for (int64_t c = 0; c < C; ++c)
    out[n * C + c] = from_float<bf16>((to_float(x[n * C + c]) - m) * r * to_float(weight[c]) + to_float(bias[c]));
  mean[n] = m;
  rstd[n] = r;
}

// The sum over a block by a tree in shared memory: a barrier for each of its log2(threads) steps.
template <int threads>
__device__ float halving_sum(float x) {
  SHARED(float, sums, threads);
  sums[threadIdx.x] = x;
  __syncthreads();
  for (unsigned half = threads / 2; half > 0; half /= 2) {
    if (threadIdx.x < half) sums[threadIdx.x] += sums[threadIdx.x + half];
    __syncthreads();
  }
  const float sum = sums[0];
  __syncthreads();  // all must have read before the next call writes
  return sum;
}

template <int threads>
__global__ void layernorm2(bf16* out, float* mean, float* rstd, const bf16* x, const bf16* weight, const bf16* bias,
                           int64_t C) {
  const int64_t n = blockIdx.x;
  float sum = 0, squares = 0;
  for (int64_t c = threadIdx.x; c < C; c += threads) sum += to_float(x[n * C + c]);
  const float m = halving_sum<threads>(sum) / static_cast<float>(C);
  for (int64_t c = threadIdx.x; c < C; c += threads)
    squares += (to_float(x[n * C + c]) - m) * (to_float(x[n * C + c]) - m);
  const float r = 1.0f / sqrtf(halving_sum<threads>(squares) / static_cast<float>(C) + eps);
  for (int64_t c = threadIdx.x; c < C; c += threads)
    out[n * C + c] = from_float<bf16>((to_float(x[n * C + c]) - m) * r * to_float(weight[c]) + to_float(bias[c]));
  if (threadIdx.x == 0) mean[n] = m, rstd[n] = r;
}

// pack 1: version 3; full packs: version 4.
template <int pack>
__global__ void layernorm3(bf16* out, float* mean, float* rstd, const bf16* x, const bf16* weight, const bf16* bias,
                           int64_t N, int64_t C) {
  using Pack = Packed<bf16, pack>;
  const int64_t n = (static_cast<int64_t>(blockIdx.x) * blockDim.x + threadIdx.x) / warp_size;
  if (n >= N) return;
  const int64_t first = threadIdx.x % warp_size * pack, step = warp_size * pack;
  float sum = 0, squares = 0;
  for (int64_t c = first; c < C; c += step) {
    const Pack xs = Pack::load(x + n * C + c);
    for (int i = 0; i < pack; ++i) sum += xs[i];
  }
  const float m = warp_sum(sum) / static_cast<float>(C);
  for (int64_t c = first; c < C; c += step) {
    const Pack xs = Pack::load(x + n * C + c);
    for (int i = 0; i < pack; ++i) squares += (xs[i] - m) * (xs[i] - m);
  }
  const float r = 1.0f / sqrtf(warp_sum(squares) / static_cast<float>(C) + eps);
  for (int64_t c = first; c < C; c += step) {
    const Pack xs = Pack::load(x + n * C + c), ws = Pack::load(weight + c), bs = Pack::load(bias + c);
    Pack outs;
    for (int i = 0; i < pack; ++i) outs.set(i, (xs[i] - m) * r * ws[i] + bs[i]);
    outs.store(out + n * C + c);
  }
  if (threadIdx.x % warp_size == 0) mean[n] = m, rstd[n] = r;
}

struct Problem {
  int64_t N, C;
  std::vector<bf16> x = normal_values<bf16>(N * C, 1, 3, 2), weight = normal_values<bf16>(C, 2, 1),
                    bias = normal_values<bf16>(C, 3);
  DeviceArray<bf16> out{N * C}, xs{x}, weights{weight}, biases{bias};
  DeviceArray<float> mean{N}, rstd{N};
};

}  // namespace

Ladder layernorm_ladder(int64_t N, int64_t C) {
  const auto p = std::make_shared<Problem>(N, C);
  std::vector<bf16> out(p->x.size());
  std::vector<float> mean(static_cast<size_t>(N)), rstd(mean.size());
  cpu::layernorm_forward(out.data(), mean.data(), rstd.data(), p->x.data(), p->weight.data(), p->bias.data(), eps, N,
                         C);
  constexpr int threads = 256;
  const auto blocks = [=](int64_t rows) { return static_cast<unsigned>(ceil_div(N, rows)); };
  const auto with_warps = [=]<int pack>() {
    launch(layernorm3<pack>, blocks(threads / warp_size), threads, 0, nullptr, p->out, p->mean, p->rstd, p->xs,
           p->weights, p->biases, N, C);
  };
  return {.op = "layernorm",
          .versions = {{"one thread per row: uncoalesced reads",
                        [=] {
                          launch(layernorm1, blocks(threads), threads, 0, nullptr, p->out, p->mean, p->rstd, p->xs,
                                 p->weights, p->biases, N, C);
                        }},
                       {"one block per row: coalesced reads; tree sums in shared memory",
                        [=] {
                          launch(layernorm2<threads>, blocks(1), threads, 0, nullptr, p->out, p->mean, p->rstd, p->xs,
                                 p->weights, p->biases, C);
                        }},
                       {"one warp per row; sums by shuffles, without barriers",
                        [=] { with_warps.template operator()<1>(); }},
                       {"the same with 16-byte accesses", [=] { with_warps.template operator()<full_pack<bf16>>(); }},
                       {"llmc/ops/cuda/norms.cuh: the warp keeps its row in registers, so that x is read once",
                        [=] {
                          layernorm_forward<bf16>(p->out, p->mean, p->rstd, p->xs, p->weights, p->biases, eps, N, C,
                                                  nullptr);
                        }}},
          .prepare =
              [=] {
                CUDA_CHECK(cudaMemset(p->out, 0xff, p->out.bytes()));
                CUDA_CHECK(cudaMemset(p->mean, 0xff, p->mean.bytes()));
                CUDA_CHECK(cudaMemset(p->rstd, 0xff, p->rstd.bytes()));
              },
          .outputs = [=]() -> Outputs {
            return {{"out", p->out.host()}, {"mean", p->mean.host()}, {"rstd", p->rstd.host()}};
          },
          .reference = {{"out", out}, {"mean", mean}, {"rstd", rstd}},
          .tolerance = 2e-3,
          .bytes = 2.0 * sizeof(bf16) * static_cast<double>(N * C)};
}

}  // namespace llmc::cuda
