// cuDNN's attention against our own kernels: on a GPU, built with USE_CUDNN=1.
#include <algorithm>
#include <array>

#include "cuda/device_test.h"
#include "ops/cuda/attention.cuh"
#include "ops/cuda/attention_cudnn.cuh"

using namespace llmc;
using cuda::AttentionPass, cuda::AttentionPlans;

namespace {

constexpr size_t guard = 4096;  // bytes after the workspace, which must stay unchanged

// Inputs of one size, and the results of our kernels.
struct Case {
  AttentionShape s;
  DeviceArray<bf16> qkv{normal_values<bf16>(s.B * s.T * (s.Hq + 2 * s.Hkv) * s.D, 1)},
      dout{normal_values<bf16>(s.B * s.T * s.Hq * s.D, 2)}, out{s.B * s.T * s.Hq * s.D};
  DeviceArray<float> lse{s.B * s.Hq * s.T};

  explicit Case(const AttentionShape& shape) : s(shape) {
    cuda::attention_forward<bf16>({{out, s.Hq * s.D}, lse}, inputs(), nullptr, whole_sequences(s), nullptr);
  }

  template <class T>
  std::array<HeadRows<T>, 3> heads(T* array) const {
    const int64_t width = (s.Hq + 2 * s.Hkv) * s.D;
    return {{{array, width}, {array + s.Hq * s.D, width}, {array + (s.Hq + s.Hkv) * s.D, width}}};
  }
  AttentionInputs<bf16> inputs() {
    const auto [q, k, v] = heads<const bf16>(qkv);
    return {q, k, v, nullptr};
  }

  Outputs ours() {
    DeviceArray<bf16> dqkv(s.B * s.T * (s.Hq + 2 * s.Hkv) * s.D);
    DeviceArray<float> scratch(cuda::attention_backward_scratch(whole_sequences(s)));
    const auto [dq, dk, dv] = heads<bf16>(dqkv);
    cuda::attention_backward<bf16>({dq, dk, dv}, dout, out, lse, inputs(), scratch, whole_sequences(s), nullptr);
    return {{"out", out.host()}, {"lse", lse.host()}, {"dqkv", dqkv.host()}};
  }
  // Backward from our outputs, to judge the two passes separately.
  Outputs of(AttentionPlans& plans, cudaStream_t stream) {
    DeviceArray<bf16> new_out(s.B * s.T * s.Hq * s.D), dqkv(s.B * s.T * (s.Hq + 2 * s.Hkv) * s.D);
    DeviceArray<float> new_lse(s.B * s.Hq * s.T);
    in_workspace(plans.workspace_bytes(AttentionPass::forward, s),
                 [&](void* workspace) { plans.forward(new_out, new_lse, qkv, nullptr, workspace, s, stream); });
    in_workspace(plans.workspace_bytes(AttentionPass::backward, s),
                 [&](void* workspace) { plans.backward(dqkv, dout, out, qkv, lse, nullptr, workspace, s, stream); });
    return {{"out", new_out.host()}, {"lse", new_lse.host()}, {"dqkv", dqkv.host()}};
  }

 private:
  template <class F>
  static void in_workspace(int64_t bytes, F use) {
    DeviceArray<uint8_t> workspace(bytes + static_cast<int64_t>(guard));
    use(static_cast<uint8_t*>(workspace));
    const std::vector<uint8_t> after = workspace.host();
    REQUIRE(std::count(after.end() - guard, after.end(), 0xff) == guard);
  }
};

}  // namespace

TEST_CASE("cuDNN's attention matches our kernels, with the same bits each time", "[attention][cuda][cudnn]") {
  // Heads that share keys and values, or not; partial tiles; several tiles; head sizes other than powers of two.
  const auto s = GENERATE(values<AttentionShape>({
      {2, 64, 4, 4, 64},
      {1, 333, 8, 2, 64},
      {2, 512, 6, 1, 128},
      {1, 200, 3, 3, 80},
      {3, 2, 2, 2, 128},
  }));
  INFO("B = " << s.B << ", T = " << s.T << ", Hq = " << s.Hq << ", Hkv = " << s.Hkv << ", D = " << s.D);
  Case c(s);
  AttentionPlans plans;
  const Outputs first = c.of(plans, nullptr), ours = c.ours();
  // Both round probabilities and their gradients to bf16 for the tensor cores.
  const double tolerances[] = {0x1p-7, 1e-5, 0x1p-7};
  for (size_t i = 0; i < ours.size(); ++i) {
    INFO(ours[i].name);
    REQUIRE(relative_error(first[i].values, ours[i].values) < tolerances[i]);
  }
  REQUIRE(same_bits(c.of(plans, nullptr), first));
  AttentionPlans others;  // of another run
  cudaStream_t stream = nullptr;
  CUDA_CHECK(cudaStreamCreateWithFlags(&stream, cudaStreamNonBlocking));
  CUDA_CHECK(cudaDeviceSynchronize());
  const bool same = same_bits(c.of(others, stream), first);
  CUDA_CHECK(cudaStreamDestroy(stream));
  REQUIRE(same);
}

TEST_CASE("cuDNN's attention refuses shapes without a plan by name", "[attention][cuda][cudnn]") {
  AttentionPlans plans;
  using Catch::Matchers::ContainsSubstring;
  REQUIRE_THROWS_WITH(plans.workspace_bytes(AttentionPass::forward, {1, 64, 2, 2, 12}),
                      ContainsSubstring("cuDNN 9.") && ContainsSubstring("sm_") &&
                          ContainsSubstring("forward pass in bf16 with B = 1, T = 64, Hq = 2, Hkv = 2, D = 12") &&
                          ContainsSubstring("use --attention own"));
  DeviceArray<int32_t> positions(64);
  REQUIRE_THROWS_WITH(plans.forward(nullptr, nullptr, nullptr, positions, nullptr, {1, 64, 2, 2, 64}, nullptr),
                      ContainsSubstring("--mask-documents") && ContainsSubstring("use --attention own"));
}
