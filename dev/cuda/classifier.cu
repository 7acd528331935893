// classifier.cu: softmax, cross-entropy and gradient in place on the logits, in four versions. See cuda/ladder.h.
#include <memory>

#include "cuda/ladder.h"
#include "ops/cpu/cross_entropy.h"
#include "ops/cuda/cross_entropy.cuh"

namespace llmc::cuda {
namespace {

constexpr float gradient_scale = 0.25f;

__device__ bf16 gradient_of(float probability, bool is_target) {
  return from_float<bf16>((is_target ? probability - 1.0f : probability) * gradient_scale);
}

__global__ void classifier1(float* losses, bf16* logits, const int32_t* targets, int64_t N, int64_t V,
                            int64_t V_padded) {
  const int64_t n = static_cast<int64_t>(blockIdx.x) * blockDim.x + threadIdx.x;
  if (n >= N) return;
  bf16* row = logits + n * V_padded;
  float largest = -INFINITY, sum = 0;
  for (int64_t v = 0; v < V; ++v) largest = fmaxf(largest, to_float(row[v]));
  for (int64_t v = 0; v < V; ++v) sum += expf(to_float(row[v]) - largest);
  losses[n] = logf(sum) + largest - to_float(row[targets[n]]);
  for (int64_t v = 0; v < V; ++v) row[v] = gradient_of(expf(to_float(row[v]) - largest) / sum, v == targets[n]);
  for (int64_t v = V; v < V_padded; ++v) row[v] = from_float<bf16>(0);
}

template <int threads>
__global__ void classifier2(float* losses, bf16* logits, const int32_t* targets, int64_t V, int64_t V_padded) {
  const int64_t n = blockIdx.x;
  bf16* row = logits + n * V_padded;
  float largest = -INFINITY, sum = 0;
  for (int64_t v = threadIdx.x; v < V; v += threads) largest = fmaxf(largest, to_float(row[v]));
  largest = block_max(largest);
  for (int64_t v = threadIdx.x; v < V; v += threads) sum += expf(to_float(row[v]) - largest);
  const float target_logit = to_float(row[targets[n]]);  // before the barrier that precedes writing the row
  sum = block_sum(sum);
  if (threadIdx.x == 0) losses[n] = logf(sum) + largest - target_logit;
  for (int64_t v = threadIdx.x; v < V_padded; v += threads)
    row[v] = v < V ? gradient_of(expf(to_float(row[v]) - largest) / sum, v == targets[n]) : from_float<bf16>(0);
}

// Keeps the sum relative to the largest logit so far: one pass for both (Milakov & Gimelshein 2018).
template <int threads>
__global__ void classifier3(float* losses, bf16* logits, const int32_t* targets, int64_t V, int64_t V_padded) {
  using Pack = Packed<bf16, full_pack<bf16>>;
  const int64_t n = blockIdx.x;
  bf16* row = logits + n * V_padded;
  float largest = std::numeric_limits<float>::lowest(), sum = 0;
  for (int64_t v = threadIdx.x * Pack::size; v < V; v += threads * Pack::size) {
    const Pack xs = Pack::load(row + v);
    for (int i = 0; i < Pack::size && v + i < V; ++i) {
      const float before = largest;
      largest = fmaxf(largest, xs[i]);
      sum = sum * __expf(before - largest) + __expf(xs[i] - largest);
    }
  }
  const float target_logit = to_float(row[targets[n]]);
  const float maximum = block_max(largest);
  sum = block_sum(sum * __expf(largest - maximum));
  if (threadIdx.x == 0) losses[n] = logf(sum) + maximum - target_logit;
  for (int64_t v = threadIdx.x * Pack::size; v < V_padded; v += threads * Pack::size) {
    const Pack xs = Pack::load(row + v);
    Pack ds;
    for (int i = 0; i < Pack::size; ++i)
      ds.elements[i] =
          v + i < V ? gradient_of(__expf(xs[i] - maximum) / sum, v + i == targets[n]) : from_float<bf16>(0);
    ds.store(row + v);
  }
}

struct Problem {
  int64_t N, V, V_padded = round_up(V, full_pack<bf16>);
  std::vector<bf16> logits = normal_values<bf16>(N * V_padded, 1, 0, 3);
  std::vector<int32_t> targets = std::vector<int32_t>(static_cast<size_t>(N));
  DeviceArray<bf16> gradients{N * V_padded};
  DeviceArray<float> losses{N};
  DeviceArray<int32_t> wanted{N};

  Problem(int64_t N_, int64_t V_) : N(N_), V(V_) {
    for (int64_t n = 0; n < N; ++n) targets[static_cast<size_t>(n)] = static_cast<int32_t>(n * 7919 % V);
    CUDA_CHECK(cudaMemcpy(wanted, targets.data(), wanted.bytes(), cudaMemcpyHostToDevice));
  }
};

}  // namespace

Ladder classifier_ladder(int64_t N, int64_t V) {
  const auto p = std::make_shared<Problem>(N, V);
  const int64_t V_padded = p->V_padded;
  std::vector<bf16> gradients = p->logits;
  std::vector<float> losses(static_cast<size_t>(N));
  cpu::cross_entropy(losses.data(), gradients.data(), p->targets.data(), N, V, V_padded, gradient_scale, Gradient::yes);
  constexpr int threads = 1024;
  const unsigned rows = static_cast<unsigned>(N);
  return {.op = "classifier",
          .versions = {{"one thread per row: maximum, sum, gradient",
                        [=] {
                          launch(classifier1, static_cast<unsigned>(ceil_div(N, 256)), 256, 0, nullptr, p->losses,
                                 p->gradients, p->wanted, N, V, V_padded);
                        }},
                       {"one block per row: coalesced accesses",
                        [=] {
                          launch(classifier2<threads>, rows, threads, 0, nullptr, p->losses, p->gradients, p->wanted, V,
                                 V_padded);
                        }},
                       {"maximum and sum in one pass, 16-byte accesses, fast exponentials",
                        [=] {
                          launch(classifier3<threads>, rows, threads, 0, nullptr, p->losses, p->gradients, p->wanted, V,
                                 V_padded);
                        }},
                       {"llmc/ops/cuda/cross_entropy.cuh: the row is kept in shared memory: the logits are read once",
                        [=] {
                          cross_entropy<bf16>(p->losses, p->gradients, p->wanted, N, V, V_padded, gradient_scale,
                                              Gradient::yes, {}, nullptr);
                        }}},
          .prepare =
              [=] {
                CUDA_CHECK(cudaMemcpy(p->gradients, p->logits.data(), p->gradients.bytes(), cudaMemcpyHostToDevice));
                CUDA_CHECK(cudaMemset(p->losses, 0xff, p->losses.bytes()));
              },
          .outputs = [=]() -> Outputs {
            return {{"losses", p->losses.host()}, {"gradients", p->gradients.host()}};
          },
          .reference = {{"losses", losses}, {"gradients", gradients}},
          .tolerance = 2e-3,
          .bytes = 2.0 * sizeof(bf16) * static_cast<double>(N * V_padded)};
}

}  // namespace llmc::cuda
