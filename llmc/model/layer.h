// layer.h: what a layer of the model computes with. A layer is a light object: it refers to its shape, its parameters,
// its activations and its group, owns no memory, and is constructed wherever it computes. Sizes: N = B T rows, C
// channels, F feed-forward, Hq query heads, Hkv key-value heads, D head size, V vocabulary (stored padded), E experts.
// With tensor parallelism Hq, Hkv, F and V are those of this rank (model_of_rank() in config.h), and a rank may have S
// of the N rows of the residual stream (parallel/group.h). With context parallelism a rank has N = B T / cp rows, some
// slices of each sequence (parallel/context_attention.h).
#pragma once
#include "model/activations.h"
#include "parallel/context_attention.h"
#include "parallel/tensor_layers.h"

namespace llmc {

// Whether packed documents attend to each other.
enum class Documents : uint8_t { together, apart };

// The rows of the residual stream that a rank has, and their sequences.
struct StreamRows {
  int64_t count = 0;  // without padding
  Segments segments = {1};
  int64_t sequence = 1;  // rows of a whole sequence, on all ranks
};

// shape: the rows of a context-parallel rank; with context parallelism it has two slices of each sequence.
inline StreamRows stream_rows_of(const BatchShape& shape, const TensorParallel& tensor, const ContextParallel& context,
                                 int tensor_rank) {
  const int64_t N = shape.rows(), S = tensor.stream_rows(N), first = tensor.by_rows() ? S * tensor_rank : 0;
  const int64_t length = context.ranks > 1 ? shape.T / 2 : shape.T;
  return {std::clamp<int64_t>(N - first, 0, S), {length, first % length}, shape.T * context.ranks};
}

// The settings and records of training for the experts of a layer.
struct ExpertTraining {
  RouterLosses losses;
  Tensor totals;                               // (4) fp64 +=: the losses of router_losses(), and dropped choices
  Tensor chosen;                               // (E) fp64 +=: how often each expert was chosen
  std::optional<SegmentOrder> sequences = {};  // if sequences are spread over ranks: the order of their segments
  bool records = true;                         // false in a recomputation
  std::shared_ptr<int> rounds = {};            // the most rounds in which rows went to experts of other ranks
};

// The data that a layer with experts needs besides its inputs.
struct Routing {
  StreamRows rows = {};
  ExpertPlacement placement = {};
  Tensor bias = {};                                // (E) added to the scores for the choice only; or an empty tensor
  std::optional<ExpertTraining> training = {};     // none: nothing is dropped or recorded
  std::function<const UnitState&()> experts = {};  // acquires the experts' unit unless it is acquired already

  // Rows of an expert from one sequence; none: any number (dropless).
  std::optional<int64_t> capacity() const { return training ? placement.capacity : std::nullopt; }
  // How many rows each rank sends to every other, padding included, if a capacity bounds them; 0: only the real rows.
  // S: rows of the residual stream
  int64_t padded_rows(int64_t S) const { return capacity() ? placement.stride(S) : 0; }
};

// The keys and values of earlier rows of one sequence; those of new rows are appended.
struct CachedKeys {
  Tensor keys_values;  // (rows, 2 Hkv D)
  int64_t filled;      // rows
};

// The inputs that all blocks share.
struct Sequences {
  BatchShape shape;     // of the rows that this rank has
  Tensor positions;     // (N) int32
  Tensor rotary_table;  // (positions, D); empty without rotary positions
  Documents documents = Documents::together;
  ContextParallel context = {};
  Tensor all_positions = {};               // of whole sequences, if attention needs them
  std::optional<SequenceRows> slice = {};  // the tokens of this slice; none: whole sequences
  std::optional<CachedKeys> cache = {};    // of the text that the rows continue
  Routing routing = {};                    // for a layer with experts
  Operands linear = Operands::as_stored;   // of the products of linear layers
  Tensor largest_logits = {};              // (Hq) fp64: of this rank's heads in a step so far; or an empty tensor
  Tensor boundaries() const {              // for attention
    if (documents == Documents::together) return {};
    return all_positions.empty() ? positions : all_positions;
  }
};

inline AttentionShape attention_shape(const ModelConfig& c, const BatchShape& s) {
  return {.B = s.B, .T = s.T, .Hq = c.n_head, .Hkv = c.n_kv_head, .D = c.head_size};
}

// The inputs of a block's column-parallel products from all ranks: its recomputation keeps them for its backward.
struct GatheredRows {
  Tensor norm1, norm2;  // (P S, C), or empty tensors
};

// The common base of the layers of a block.
struct Layer {
  const ModelConfig& config;  // of this rank's part
  const UnitState& unit;
  const BlockActivations& a;
  const Sequences& sequences;
  const parallel::Group& group;
  // With `later` the backward comes in two parts: the input part sets these gradients, and the weight part, which needs
  // no weights, reads them. The bits are the same.
  const OutputGradients* later = nullptr;
  GatheredRows gathered = {};

  bool has_experts() const { return unit.has("moe.router.weight"); }
  // Whether the last products of attention and feed-forward add to the residual stream, in layouts that --residual
  // cublaslt is for.
  bool adds_in_products() const {
    return stream().device().residual_in_products && group.size() == 1 && sequences.linear == Operands::as_stored;
  }

 protected:
  Stream& stream() const { return group.compute; }
  parallel::ColumnLinear column(const char* name, int fused = 1) const {
    return {{.unit = unit, .name = name, .fused = fused, .read = sequences.linear}, group};
  }
  // residual: if the product adds it
  parallel::RowLinear row(const char* name, Tensor residual = {}) const {
    return {.p = {.unit = unit, .name = name, .read = sequences.linear}, .g = group, .residual = residual};
  }
  // A linear layer whose forward keeps its input for the backward.
  template <class Linear>
  static Linear keeping(Linear linear, const InputInFp8& input) {
    if (!input.values.empty()) linear.p.kept_input = {input.values, Transpose::no, input.scales, ScaledBy::segments};
    return linear;
  }
  Tensor like(const char* name, const Tensor& t) const { return group.temporary(name, t.dtype, t.shape); }

  // dx = ..., and the gradients of the layer's parameters += ..., now or by the weight part. all_x: gathered rows of x,
  // or an empty tensor; dout_later: where the weight part finds dout
  void backward(const parallel::ColumnLinear& linear, Tensor dx, Tensor dout, Tensor x, Tensor all_x) const {
    if (later == nullptr) linear.backward(dx, dout, x, all_x);
    else linear.backward_input(dx, dout);
  }
  void backward(const parallel::RowLinear& linear, Tensor dx, Tensor dout, Tensor x,
                Tensor OutputGradients::*dout_later) const {
    if (later == nullptr) return linear.backward(dx, dout, x);
    copy(later->*dout_later, dout, stream());
    linear.backward_input(dx, dout);
  }
};

// A norm: layernorm or rmsnorm.
struct NormLayer {
  const ModelConfig& config;
  parallel::Parameters p;
  Tensor mean, rstd;  // (S) each; no mean with rmsnorm
  Stream& stream;

  bool is_rmsnorm() const { return config.family.norm == Norm::rmsnorm; }
  void forward(Tensor out, Tensor x) const {
    if (is_rmsnorm()) rmsnorm_forward(out, rstd, x, p.weight(), config.norm_eps, stream);
    else layernorm_forward(out, mean, rstd, x, p.weight(), p.bias(), config.norm_eps, stream);
  }
  // sum = x + branch, and its norm.
  void forward(Tensor out, Tensor sum, Tensor x, Tensor branch) const {
    if (is_rmsnorm()) residual_rmsnorm_forward(out, rstd, sum, x, branch, p.weight(), config.norm_eps, stream);
    else residual_layernorm_forward(out, mean, rstd, sum, x, branch, p.weight(), p.bias(), config.norm_eps, stream);
  }
  void backward(Tensor dx, Tensor dout, Tensor x, Accumulate accumulate_dx) const {
    if (is_rmsnorm()) rmsnorm_backward(dx, p.dweight(), dout, x, p.weight(), rstd, accumulate_dx, stream);
    else layernorm_backward(dx, p.dweight(), p.dbias(), dout, x, p.weight(), mean, rstd, accumulate_dx, stream);
  }
};

// The common base of the parts of a layer with experts.
struct SparseLayer : Layer {
  const ExpertActivations& e;
  const Routing& r;
  int64_t n;  // rows of this rank, without padding
  explicit SparseLayer(const Layer& layer)
      : Layer(layer), e(layer.a.experts), r(layer.sequences.routing), n(r.rows.count) {}

 protected:
  bool exchanged() const { return r.placement.exchanged(); }
  // The first n rows, those that are not padding.
  Tensor rows(const Tensor& t) const { return parallel::rows_of(t, {0, n}); }
  void zero_padding(const Tensor& t) const {
    if (const int64_t S = t.shape[0]; n < S) zero(parallel::rows_of(t, {n, S - n}), stream());
  }
  // out = the rows of norm2 (S, C), in the order of their experts.
  void rows_by_expert(Tensor out) const { dispatch_rows(out, rows(a.norm2), rows(e.places), stream()); }
};

}  // namespace llmc
