// attention_cudnn.cuh: attention for training by cuDNN's fused kernels: the contracts of ops/ops_attention.h in bf16,
// without document boundaries. `make USE_CUDNN=1` defines TRAIN_GPT_CUDNN; without it this file is empty.
#pragma once
#ifdef TRAIN_GPT_CUDNN
#include "core/std.h"  // cudnn_frontend.h uses std::strlen and does not include <cstring>
// Graphs are not written to files: for that, cudnn-frontend bundles its own, different version of our JSON library.
#define CUDNN_FRONTEND_SKIP_JSON_LIB
#include <cudnn_frontend.h>
static_assert(CUDNN_MAJOR == 9 && CUDNN_FRONTEND_VERSION >= 11300, "use cuDNN 9 and cudnn-frontend 1.13 or later");

#include <unordered_map>

#include "core/dtype.h"
#include "ops/cuda/launch.cuh"
#include "ops/types.h"

namespace llmc::cuda {

enum class AttentionPass : uint8_t { forward, backward };

inline const char* name_of(AttentionPass pass) { return pass == AttentionPass::forward ? "forward" : "backward"; }

// Required alignment of the workspace's address; the arena's.
inline constexpr int64_t cudnn_workspace_alignment = 256;

namespace detail {

// Ids under which a graph's tensors receive their addresses.
struct CudnnTensor {
  enum Number : int64_t { q = 1, k, v, out, lse, dout, dq, dk, dv };
};

using CudnnGraph = cudnn_frontend::graph::Graph;
using CudnnTensorPtr = std::shared_ptr<cudnn_frontend::graph::Tensor_attributes>;

// cuDNN's axis order is (B, heads, T, D), with free strides: the heads may lie in rows of `row_heads` heads.
inline cudnn_frontend::graph::Tensor_attributes cudnn_heads(CudnnTensor::Number number, const AttentionShape& s,
                                                            int64_t heads, int64_t row_heads) {
  cudnn_frontend::graph::Tensor_attributes tensor;
  tensor.set_uid(number)
      .set_dim({s.B, heads, s.T, s.D})
      .set_stride({s.T * row_heads * s.D, s.D, row_heads * s.D, 1})
      .set_data_type(cudnn_frontend::DataType_t::BFLOAT16);
  return tensor;
}
inline cudnn_frontend::graph::Tensor_attributes cudnn_log_sums(const AttentionShape& s) {
  cudnn_frontend::graph::Tensor_attributes tensor;
  tensor.set_uid(CudnnTensor::lse)
      .set_dim({s.B, s.Hq, s.T, 1})
      .set_stride({s.Hq * s.T, s.T, 1, 1})
      .set_data_type(cudnn_frontend::DataType_t::FLOAT);
  return tensor;
}
inline void cudnn_output(const CudnnTensorPtr& tensor, const cudnn_frontend::graph::Tensor_attributes& is) {
  tensor->set_output(true)
      .set_uid(is.get_uid())
      .set_dim(is.get_dim())
      .set_stride(is.get_stride())
      .set_data_type(is.get_data_type());
}

// The pass as a graph of one node; its plan is not built yet.
inline std::unique_ptr<CudnnGraph> cudnn_attention(AttentionPass pass, const AttentionShape& s) {
  namespace fe = cudnn_frontend;
  auto graph = std::make_unique<CudnnGraph>();
  graph->set_io_data_type(fe::DataType_t::BFLOAT16)
      .set_intermediate_data_type(fe::DataType_t::FLOAT)
      .set_compute_data_type(fe::DataType_t::FLOAT);
  const int64_t row_heads = s.Hq + 2 * s.Hkv;
  const float scale = 1.0f / std::sqrt(static_cast<float>(s.D));
  const CudnnTensorPtr q = graph->tensor(cudnn_heads(CudnnTensor::q, s, s.Hq, row_heads)),
                       k = graph->tensor(cudnn_heads(CudnnTensor::k, s, s.Hkv, row_heads)),
                       v = graph->tensor(cudnn_heads(CudnnTensor::v, s, s.Hkv, row_heads));
  if (pass == AttentionPass::forward) {
    const auto [out, lse] = graph->sdpa(q, k, v,
                                        fe::graph::SDPA_attributes()
                                            .set_name("attention_forward")
                                            .set_generate_stats(true)
                                            .set_diagonal_alignment(fe::DiagonalAlignment_t::TOP_LEFT)
                                            .set_diagonal_band_right_bound(0)  // causal
                                            .set_attn_scale(scale));
    cudnn_output(out, cudnn_heads(CudnnTensor::out, s, s.Hq, s.Hq));
    cudnn_output(lse, cudnn_log_sums(s));
    return graph;
  }
  const CudnnTensorPtr out = graph->tensor(cudnn_heads(CudnnTensor::out, s, s.Hq, s.Hq)),
                       dout = graph->tensor(cudnn_heads(CudnnTensor::dout, s, s.Hq, s.Hq)),
                       lse = graph->tensor(cudnn_log_sums(s));
  const auto [dq, dk, dv] = graph->sdpa_backward(q, k, v, out, dout, lse,
                                                 fe::graph::SDPA_backward_attributes()
                                                     .set_name("attention_backward")
                                                     .set_diagonal_alignment(fe::DiagonalAlignment_t::TOP_LEFT)
                                                     .set_diagonal_band_right_bound(0)
                                                     .set_attn_scale(scale)
                                                     .set_deterministic_algorithm(true));
  cudnn_output(dq, cudnn_heads(CudnnTensor::dq, s, s.Hq, row_heads));
  cudnn_output(dk, cudnn_heads(CudnnTensor::dk, s, s.Hkv, row_heads));
  cudnn_output(dv, cudnn_heads(CudnnTensor::dv, s, s.Hkv, row_heads));
  return graph;
}

inline std::string cudnn_version() {
  const size_t version = cudnnGetVersion();  // 92800
  return formatted("{}.{}.{}", version / 10000, version / 100 % 100, version % 100);
}

}  // namespace detail

// cuDNN, and a plan for each pass and shape in use. For the current device and one host thread at a time. The plan is
// the first that cuDNN's heuristic offers, not chosen by timing: the same library on the same kind of GPU always picks
// the same plan, and its sums have a fixed order (set_deterministic_algorithm).
class AttentionPlans {
 public:
  AttentionPlans() {
    int device = 0;
    cudaDeviceProp properties;
    CUDA_CHECK(cudaGetDevice(&device));
    CUDA_CHECK(cudaGetDeviceProperties(&properties, device));
    where_ = formatted("cuDNN {} on {} (sm_{}{})", detail::cudnn_version(), properties.name, properties.major,
                       properties.minor);
    cudnnHandle_t created = nullptr;
    const cudnnStatus_t status = cudnnCreate(&created);
    CHECK(status == CUDNN_STATUS_SUCCESS, "{} failed to start: {}; {}", where_, cudnnGetErrorString(status), remedy);
    library_.reset(created);
  }

  // Bytes of workspace that the pass needs. This builds the plan: call it before the first step. The forward needs next
  // to nothing. The backward with deterministic sums needs at least 2 B Hq T^2 bytes on all but sm_100 and sm_103; on
  // sm_90, since cuDNN 9.25, CUDNN_FRONTEND_ATTN_DP_WORKSPACE_LIMIT=0 in the environment selects a slower kernel
  // without the T^2.
  int64_t workspace_bytes(AttentionPass pass, const AttentionShape& s) { return plan(pass, s).workspace_bytes; }

  // out (B, T, Hq D), lse (B, Hq, T) = ; qkv (B, T, (Hq + 2 Hkv) D); positions: must be nullptr. `workspace`:
  // workspace_bytes bytes, aligned to cudnn_workspace_alignment, used by no other stream meanwhile
  void forward(bf16* out, float* lse, const bf16* qkv, const int32_t* positions, void* workspace,
               const AttentionShape& s, cudaStream_t stream) {
    refuse_documents(positions);
    Addresses addresses = heads_of(qkv, s, {Number::q, Number::k, Number::v});
    addresses.insert({{Number::out, out}, {Number::lse, lse}});
    run(AttentionPass::forward, addresses, workspace, s, stream);
  }

  // dqkv = ... (overwrites all of it)
  void backward(bf16* dqkv, const bf16* dout, const bf16* out, const bf16* qkv, const float* lse,
                const int32_t* positions, void* workspace, const AttentionShape& s, cudaStream_t stream) {
    refuse_documents(positions);
    Addresses addresses = heads_of(qkv, s, {Number::q, Number::k, Number::v});
    addresses.merge(heads_of(dqkv, s, {Number::dq, Number::dk, Number::dv}));
    addresses.insert({{Number::dout, const_cast<bf16*>(dout)},
                      {Number::out, const_cast<bf16*>(out)},
                      {Number::lse, const_cast<float*>(lse)}});
    run(AttentionPass::backward, addresses, workspace, s, stream);
  }

 private:
  using Number = detail::CudnnTensor;
  using Addresses = std::unordered_map<int64_t, void*>;  // cuDNN takes non-const pointers
  struct Plan {
    std::unique_ptr<detail::CudnnGraph> graph;
    int64_t workspace_bytes = 0;
  };
  struct Destroy {
    void operator()(cudnnHandle_t library) const { cudnnDestroy(library); }
  };
  static constexpr const char* remedy = "use --attention own";

  static void refuse_documents(const int32_t* positions) {
    CHECK(positions == nullptr,
          "cuDNN's attention cannot keep the documents of a sequence apart, as --mask-documents requires: leave "
          "that out, or {}",
          remedy);
  }
  // Offsets of queries, keys and values in packed rows.
  static Addresses heads_of(const bf16* packed, const AttentionShape& s, const std::array<int64_t, 3>& numbers) {
    bf16* first = const_cast<bf16*>(packed);
    return {{numbers[0], first}, {numbers[1], first + s.Hq * s.D}, {numbers[2], first + (s.Hq + s.Hkv) * s.D}};
  }

  void check(const cudnn_frontend::error_t& status, const char* what_fails, AttentionPass pass,
             const AttentionShape& s) const {
    if (status.is_good()) return;
    std::string reason = status.err_msg.substr(0, 500);  // has a line per plan tried
    std::replace(reason.begin(), reason.end(), '\n', ' ');
    throw Error(formatted("{} {} attention's {} pass in bf16 with B = {}, T = {}, Hq = {}, Hkv = {}, D = {}: {}; {}",
                          where_, what_fails, pass, s.B, s.T, s.Hq, s.Hkv, s.D, reason, remedy));
  }

  const Plan& plan(AttentionPass pass, const AttentionShape& s) {
    Plan& plan = plans_[{static_cast<int64_t>(pass), s.B, s.T, s.Hq, s.Hkv, s.D}];
    if (plan.graph != nullptr) return plan;
    auto graph = detail::cudnn_attention(pass, s);
    check(graph->build(library_.get(), {cudnn_frontend::HeurMode_t::A}), "has no plan for", pass, s);
    check(graph->get_workspace_size(plan.workspace_bytes), "gives no workspace size for", pass, s);
    plan.graph = std::move(graph);
    return plan;
  }

  void run(AttentionPass pass, Addresses& addresses, void* workspace, const AttentionShape& s, cudaStream_t stream) {
    if (s.B == 0 || s.T == 0) return;
    const Plan& with = plan(pass, s);
    const cudnnStatus_t status = cudnnSetStream(library_.get(), stream);
    CHECK(status == CUDNN_STATUS_SUCCESS, "{} rejects the stream: {}", where_, cudnnGetErrorString(status));
    check(with.graph->execute(library_.get(), addresses, workspace), "fails in", pass, s);
  }

  std::string where_;
  std::unique_ptr<std::remove_pointer_t<cudnnHandle_t>, Destroy> library_;
  std::map<std::array<int64_t, 6>, Plan> plans_;  // by pass and shape; destroyed before the library
};

}  // namespace llmc::cuda
#endif
