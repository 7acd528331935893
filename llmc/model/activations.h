// activations.h: the tensors that a block keeps between its forward and its backward, and between the parts of its
// backward; which of them are recomputed. Sizes: as in transformer.h.
#pragma once
#include <functional>
#include <memory>
#include <optional>
#include <string>
#include <utility>

#include "core/enum_names.h"
#include "device/arena.h"
#include "dist/expert_exchange.h"
#include "dist/schedule.h"
#include "dist/tensor_parallel.h"
#include "model/config.h"

namespace llmc {

struct BatchShape {
  int64_t B, T;
  int64_t rows() const { return B * T; }
};

// The activations that the backward recomputes instead of keeping them from the forward (contract 11: bitwise the
// same). Each level includes those before it. Whole blocks: Chen et al. 2016; large but cheap parts: Korthikanti et al.
// 2022.
enum class Recompute : uint8_t { none, activation, norm, block };
constexpr auto names_of_values(Recompute) { return std::array{"none", "activation", "norm", "block"}; }

// Which layers of a model a set of activations is for. If some layers have experts and some do not, a set for any layer
// has room for both.
enum class Layers : uint8_t { dense, sparse, any };
inline Layers kind_of_layer(const ModelConfig& c, int64_t layer) {
  return c.is_sparse(layer) ? Layers::sparse : Layers::dense;
}
inline bool has_dense(const ModelConfig& c, Layers layers) {
  return layers != Layers::sparse && c.sparse_layers() < c.n_layer;
}
inline bool has_sparse(const ModelConfig& c, Layers layers) { return layers != Layers::dense && c.experts.count > 0; }

// Whether the backward of a block is done at once, or in two parts: the second, for the weights, comes later.
enum class Backward : uint8_t { whole, in_parts };

namespace detail {

// Labels in the memory table: for the activations of a block, and for those of its experts.
struct ActivationLabels {
  const char *block, *experts;
};

// Sets a tensor, or leaves it. from: the lowest level that recomputes the tensor; none: it is always kept.
using Place = std::function<void(Tensor& t, const char* name, DType dtype, const Shape& shape,
                                 std::optional<Recompute> from, bool product_input, bool of_experts)>;

// Allocates the activations that are wanted(from, product_input).
inline Place in_arena(Arena& arena, const ActivationLabels& labels,
                      std::function<bool(std::optional<Recompute> from, bool product_input)> wanted) {
  return
      [&arena, labels, wanted = std::move(wanted)](Tensor& t, const char* name, DType d, const Shape& shape,
                                                   std::optional<Recompute> from, bool product_input, bool of_experts) {
        if (wanted(from, product_input)) t = arena.alloc(of_experts ? labels.experts : labels.block, name, d, shape);
      };
}

}  // namespace detail

// The tensors that the token slices of a micro-batch share in a block (slice_attention.h).
struct SliceKeys {
  Tensor keys_values;  // (B T, 2 Hkv D) of whole sequences, as far as their slices have gone forward
  Tensor gradient;     // its gradient, in fp32, as far as the slices have gone backward
};

// The activations of a rank's E experts of width F: R rows in the order of these experts.
struct ReceivedRows {
  Tensor offsets;              // (E + 1) int32: the first row of each
  Tensor places;               // (R, 1) int32: from arrival_plan(); empty where no rows come from other ranks
  Tensor rows, up, activated;  // (R, C) (R, 2 F) (R, F)
};
// The activations that the backward of a layer with experts needs from its feed-forward (experts.h). E: experts of all
// ranks; k: choices of a row; Fs: width of the shared expert.
struct ExpertActivations {
  Tensor logits, choices, weights;     // of the router: (S, E) (S, k) int32 (S, k)
  Tensor counts, starts;               // (segments, E) int32: how often each expert was chosen in the sequence, and
                                       // in its part before the segment; starts: empty where sequences are whole
  Tensor places, offsets;              // (S, k) (E + 1) int32: from dispatch_plan()
  Tensor outputs;                      // (R', C) of the experts, in their order; R': Experts::sent()
  ReceivedRows received;               // of the experts that this rank has
  Tensor shared_up, shared_activated;  // (N, 2 Fs) (N, Fs); empty tensors without a shared expert
  Tensor shared_out, gate_logits;      // (S, C) (S, 1); empty tensors without the shared expert's gate
  std::shared_ptr<ExpertRounds> rounds = {};  // which rows are exchanged, for the host; none: no ranks share experts
};

// The activations that the backward of a block needs. Its weight part needs the inputs of the products: norm1,
// attention, norm2 and activated; with experts, their rows, activated, and the order of the rows.
struct BlockActivations {
  Tensor norm1, norm1_mean, norm1_rstd;  // (S, C) (S) (S); no mean with rmsnorm
  Tensor qkv;                            // (N, (Hq + 2 Hkv) D): q heads, k heads, v heads
  Tensor heads, heads_rstd;  // (as qkv) (N, Hq + Hkv), or (N, 2) for norms of whole projections: what attention reads;
                             // qkv itself without query-key norm
  Tensor attention, lse;     // (N, Hq D) (B, Hq, T)
  Tensor middle;             // (S, C) the residual stream between attention and MLP
  Tensor norm2, norm2_mean, norm2_rstd;  // (S, C) (S) (S)
  Tensor up, activated;                  // (N, F or 2 F: gates, ups) (N, F)
  Tensor out;                            // (S, C) the residual stream after the block
  ExpertActivations experts;             // of a layer with experts, instead of up and activated
  SliceKeys slice_keys;                  // empty tensors without token slices

  // The recomputed tensors: one set, reused by all blocks.
  static BlockActivations recomputed(const ModelConfig& c, const BatchShape& s, const TensorParallel& tensor,
                                     DType dtype, Recompute recompute, Arena& arena) {
    auto wanted = [=](std::optional<Recompute> from, bool) { return from && *from <= recompute; };
    BlockActivations all(c, s, Layers::any, tensor, dtype, {},
                         detail::in_arena(arena, {"recomputed", "recomputed of experts"}, wanted));
    if (recompute == Recompute::block) all.set_rounds(c, Layers::any);
    return all;
  }
  // The tensors that each block keeps; the others are in `shared`. With a backward in parts, product_inputs() are left
  // out.
  static BlockActivations kept(const ModelConfig& c, const BatchShape& s, Layers layers, const TensorParallel& tensor,
                               DType dtype, Recompute recompute, Backward backward, const BlockActivations& shared,
                               Arena& arena) {
    auto wanted = [=](std::optional<Recompute> from, bool product_input) {
      return (!from || *from > recompute) && !(product_input && backward == Backward::in_parts);
    };
    BlockActivations block(c, s, layers, tensor, dtype, shared,
                           detail::in_arena(arena, {"activations", "activations of experts"}, wanted));
    if (recompute < Recompute::block) block.set_rounds(c, layers);
    return block;
  }
  // The inputs of the products, for the weight part: those that the forward keeps for it, or those that the input part
  // recomputes.
  static BlockActivations product_inputs(const ModelConfig& c, const BatchShape& s, Layers layers,
                                         const TensorParallel& tensor, DType dtype, Recompute recompute,
                                         ActionKind made_by, Arena& arena) {
    auto wanted = [=](std::optional<Recompute> from, bool product_input) {
      return product_input && (*from <= recompute) == (made_by == ActionKind::backward_input);
    };
    return {c,
            s,
            layers,
            tensor,
            dtype,
            {},
            detail::in_arena(arena, {"for the weight part", "for the weight part"}, wanted)};
  }
  // The same memory for a batch of at most as many rows, in a layer of a kind that the memory is for.
  static BlockActivations part_of(const BlockActivations& room, const ModelConfig& c, const BatchShape& s,
                                  Layers layers, const TensorParallel& tensor) {
    auto place = [](Tensor& t, const char*, DType, const Shape& shape, std::optional<Recompute>, bool, bool) {
      t = t.slice(0, shape);
    };
    return {c, s, layers, tensor, room.out.dtype, room, place};
  }
  // Takes those inputs of the products that `other` has.
  void take_product_inputs(const BlockActivations& other) {
    using A = BlockActivations;
    for (auto t : {&A::norm1, &A::attention, &A::norm2, &A::activated})
      if (!(other.*t).empty()) this->*t = other.*t;
    for (auto t : {&ExpertActivations::offsets, &ExpertActivations::shared_activated})
      if (!(other.experts.*t).empty()) experts.*t = other.experts.*t;
    for (auto t : {&ReceivedRows::offsets, &ReceivedRows::rows, &ReceivedRows::activated})
      if (!(other.experts.received.*t).empty()) experts.received.*t = other.experts.received.*t;
  }

  BlockActivations() = default;

  // The most sequences, or slices of them, to which S rows of the residual stream may belong.
  static int64_t most_segments(const BatchShape& s, int64_t S) { return std::min(S, 2 * s.B + 1); }

 private:
  void set_rounds(const ModelConfig& c, Layers layers) {
    if (has_sparse(c, layers) && c.experts.ranks > 1) experts.rounds = std::make_shared<ExpertRounds>();
  }
  // Begins as a copy of `others`.
  BlockActivations(const ModelConfig& c, const BatchShape& s, Layers layers, const TensorParallel& tensor, DType dtype,
                   const BlockActivations& others, const detail::Place& place)
      : BlockActivations(others) {
    const int64_t N = s.rows(), S = tensor.stream_rows(N), C = c.n_embd;
    const DType stat = accumulator_of(dtype);
    bool of_experts = false;
    auto alloc = [&](Tensor& t, const char* name, DType d, const Shape& shape, std::optional<Recompute> from,
                     bool product_input = false) { place(t, name, d, shape, from, product_input, of_experts); };
    constexpr bool product_input = true;
    const bool means = c.family.norm == Norm::layernorm;
    using enum Recompute;
    alloc(norm1, "norm1", dtype, {S, C}, norm, product_input);
    if (means) alloc(norm1_mean, "norm1 mean", stat, {S}, block);
    alloc(norm1_rstd, "norm1 rstd", stat, {S}, block);
    alloc(qkv, "qkv", dtype, {N, c.qkv_size()}, block);
    if (c.family.qk_norm != QkNorm::none) {
      alloc(heads, "heads", dtype, {N, c.qkv_size()}, norm);
      const int64_t norms = c.family.qk_norm == QkNorm::by_head ? c.n_head + c.n_kv_head : 2;
      alloc(heads_rstd, "heads rstd", stat, {N, norms}, block);
    } else {
      heads = qkv;
    }
    alloc(attention, "attention", dtype, {N, c.q_size()}, block, product_input);
    alloc(lse, "attention lse", stat, {s.B, c.n_head, s.T}, block);
    alloc(middle, "middle", dtype, {S, C}, block);
    alloc(norm2, "norm2", dtype, {S, C}, norm, product_input);
    if (means) alloc(norm2_mean, "norm2 mean", stat, {S}, block);
    alloc(norm2_rstd, "norm2 rstd", stat, {S}, block);
    if (has_dense(c, layers)) {
      alloc(up, "up", dtype, {N, c.mlp_in_size()}, block);
      alloc(activated, "activated", dtype, {N, c.n_ffn}, activation, product_input);
    }
    if (has_sparse(c, layers)) {
      const Experts& e = c.experts;
      const int64_t k = e.per_token, segments = most_segments(s, S), R = e.room(S);
      ExpertActivations& x = experts;
      ReceivedRows& r = x.received;
      const bool exchanged = e.ranks > 1;
      of_experts = true;
      alloc(x.logits, "router logits", stat, {S, e.count}, block);
      alloc(x.choices, "experts chosen", DType::int32, {S, k}, block);
      alloc(x.weights, "weights of experts", stat, {S, k}, block);
      alloc(x.counts, "choices of each expert", DType::int32, {segments, e.count}, std::nullopt);
      if (e.spread) alloc(x.starts, "choices before a segment", DType::int32, {segments, e.count}, std::nullopt);
      alloc(x.places, "places of choices", DType::int32, {S, k}, block);
      alloc(x.offsets, "first rows of experts", DType::int32, {e.count + 1}, block, !exchanged);
      alloc(x.outputs, "outputs of experts", dtype, {e.sent(S), C}, block);
      if (exchanged) {
        alloc(r.offsets, "first received rows of experts", DType::int32, {e.own() + 1}, block);
        alloc(r.places, "places of received rows", DType::int32, {R, 1}, block);
      } else {
        r.offsets = x.offsets;
      }
      alloc(r.rows, "rows by expert", dtype, {R, C}, exchanged ? block : norm, !exchanged);
      alloc(r.up, "up of experts", dtype, {R, 2 * e.width}, block);
      alloc(r.activated, "activated of experts", dtype, {R, e.width}, activation, !exchanged);
      if (e.shared > 0) {
        alloc(x.shared_up, "up of the shared expert", dtype, {N, 2 * e.shared}, block);
        alloc(x.shared_activated, "activated of the shared expert", dtype, {N, e.shared}, activation, product_input);
      }
      if (e.shared_gate) {
        alloc(x.shared_out, "output of the shared expert", dtype, {S, C}, block);
        alloc(x.gate_logits, "gate of the shared expert", stat, {S, 1}, block);
      }
    }
    of_experts = false;
    alloc(out, "out", dtype, {S, C}, std::nullopt);
  }
};

// The gradients of the outputs of a block's products, which its weight part needs.
struct OutputGradients {
  Tensor qkv, middle, up, out;  // as in BlockActivations; middle and out: of the product added to the residual stream
  struct OfExperts {            // the same for a layer with experts
    Tensor logits, up, outputs, shared_up, shared_out, gate_logits;
  } experts = {};
  OutputGradients() = default;
  OutputGradients(const ModelConfig& c, const BatchShape& s, Layers layers, const TensorParallel& tensor, DType dtype,
                  Arena& arena) {
    const int64_t N = s.rows(), S = tensor.stream_rows(N), C = c.n_embd;
    const DType stat = accumulator_of(dtype);
    auto of = [&](const char* name, DType d, const Shape& shape) {
      return arena.alloc("for the weight part", name, d, shape);
    };
    auto alloc = [&](const char* name, const Shape& shape) { return of(name, dtype, shape); };
    qkv = alloc("gradient of qkv", {N, c.qkv_size()});
    middle = alloc("gradient of middle", {S, C});
    out = alloc("gradient of out", {S, C});
    if (has_dense(c, layers)) up = alloc("gradient of up", {N, c.mlp_in_size()});
    if (!has_sparse(c, layers)) return;
    const Experts& e = c.experts;
    const int64_t R = e.room(S);
    experts.logits = of("gradient of router logits", stat, {S, e.count});
    if (e.ranks == 1) {
      experts.up = alloc("gradient of up of experts", {R, 2 * e.width});
      experts.outputs = alloc("gradient of outputs of experts", {R, C});
    }
    if (e.shared > 0) {
      experts.shared_up = alloc("gradient of up of the shared expert", {N, 2 * e.shared});
      experts.shared_out = alloc("gradient of the output of the shared expert", {S, C});
    }
    if (e.shared_gate) experts.gate_logits = of("gradient of the gate of the shared expert", stat, {S, 1});
  }
  bool empty() const { return out.empty(); }
};

}  // namespace llmc
