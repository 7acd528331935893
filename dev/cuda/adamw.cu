// adamw.cu: the update of bf16 weights with fp32 masters, in three versions. See cuda/ladder.h.
#include <memory>

#include "cuda/ladder.h"
#include "ops/cpu/update.h"
#include "ops/cuda/update.cuh"

namespace llmc::cuda {
namespace {

constexpr OptimizerOptions options = {
    .lr = 0.01f, .beta1 = 0.9f, .beta2 = 0.95f, .eps = 1e-8f, .weight_decay = 0.1f, .step = 3};
constexpr float clip = 0.5f;

__global__ void adamw1(bf16* weight, float* master, float* moment1, float* moment2, const float* gradient, int64_t n,
                       AdamWStep<float> update, float gradient_scale) {
  const int64_t i = static_cast<int64_t>(blockIdx.x) * blockDim.x + threadIdx.x;
  if (i >= n) return;
  update(master[i], moment1[i], moment2[i], gradient[i] * gradient_scale);
  weight[i] = from_float<bf16>(master[i]);
}

__global__ void adamw2(bf16* weight, float* master, float* moment1, float* moment2, const float* gradient, int64_t n,
                       AdamWStep<float> update, const double* control) {
  const int64_t i = static_cast<int64_t>(blockIdx.x) * blockDim.x + threadIdx.x;
  if (i >= n || control[2] == 0) return;
  update(master[i], moment1[i], moment2[i], gradient[i] * static_cast<float>(control[1]));
  weight[i] = from_float<bf16>(master[i]);
}

struct Problem {
  int64_t n;
  std::vector<float> weight = normal_values<float>(n, 1), m = normal_values<float>(n, 2),
                     v = std::vector<float>(static_cast<size_t>(n), 0.5f), g = normal_values<float>(n, 3);
  DeviceArray<bf16> weights{n};
  DeviceArray<float> master{n}, moment1{n}, moment2{n}, gradient{g};
  DeviceArray<double> control{std::vector<double>{1, clip, 1}};
};

}  // namespace

Ladder adamw_ladder(int64_t n) {
  const auto p = std::make_shared<Problem>(n);
  std::vector<float> master = p->weight, m = p->m, v = p->v;
  std::vector<bf16> weight(master.size());
  const double clipped[] = {1, clip, 1};
  cpu::update_weights(Optimizer::adamw, weight.data(), master.data(), m.data(), v.data(), p->g.data(), clipped, n,
                      options);
  const AdamWStep<float> update(options);
  constexpr int64_t threads = 256;
  const unsigned blocks = static_cast<unsigned>(ceil_div(n, threads));
  return {.op = "adamw",
          .versions = {{"one thread per element; the host waits for the gradient norm first",
                        [=] {
                          double control[3];
                          CUDA_CHECK(cudaMemcpy(control, p->control, sizeof control, cudaMemcpyDeviceToHost));
                          if (control[2] != 0)
                            launch(adamw1, blocks, threads, 0, nullptr, p->weights, p->master, p->moment1, p->moment2,
                                   p->gradient, n, update, static_cast<float>(control[1]));
                        }},
                       {"the kernel reads the update control itself: no wait",
                        [=] {
                          launch(adamw2, blocks, threads, 0, nullptr, p->weights, p->master, p->moment1, p->moment2,
                                 p->gradient, n, update, p->control);
                        }},
                       {"llmc/ops/cuda/update.cuh: 16-byte accesses, evicted from the caches first",
                        [=] {
                          update_weights<bf16>(Optimizer::adamw, p->weights, p->master, p->moment1, p->moment2,
                                               p->gradient, p->control, n, options, nullptr);
                        }}},
          .prepare =
              [=] {
                const auto restore = [](DeviceArray<float>& to, const std::vector<float>& from) {
                  CUDA_CHECK(cudaMemcpy(to, from.data(), to.bytes(), cudaMemcpyHostToDevice));
                };
                restore(p->master, p->weight), restore(p->moment1, p->m), restore(p->moment2, p->v);
                CUDA_CHECK(cudaMemset(p->weights, 0xff, p->weights.bytes()));
              },
          .outputs = [=]() -> Outputs {
            return {{"weight", p->weights.host()},
                    {"master", p->master.host()},
                    {"moment1", p->moment1.host()},
                    {"moment2", p->moment2.host()}};
          },
          .reference = {{"weight", weight}, {"master", master}, {"moment1", m}, {"moment2", v}},
          .tolerance = 1e-3,
          .bytes = (7.0 * sizeof(float) + sizeof(bf16)) * static_cast<double>(n)};
}

}  // namespace llmc::cuda
