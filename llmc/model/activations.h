// activations.h: the tensors that a block keeps between its forward and its backward, and between the parts of its
// backward; which of them are recomputed. Sizes: as in layer.h.
#pragma once
#include "core/fp8.h"
#include "device/arena.h"
#include "model/config.h"
#include "parallel/expert_exchange.h"
#include "schedule/actions.h"
#include "shard/params.h"

namespace llmc {

struct BatchShape {
  int64_t B, T;
  int64_t rows() const { return B * T; }
};

// The activations that the backward recomputes instead of keeping them (contract 11: bitwise the same). Each level
// includes those before it. Whole blocks: Chen et al. 2016; large but cheap parts: Korthikanti et al. 2022.
enum class Recompute : uint8_t { none, activation, norm, block };
constexpr auto names_of_values(Recompute) { return std::array{"none", "activation", "norm", "block"}; }
// Does it compute the activation again by a kernel, without the product before it? With --gelu cublaslt, where the
// product computes it from sums that are not rounded, that would give other numbers.
constexpr bool repeats_activation_alone(Recompute r) { return r == Recompute::activation || r == Recompute::norm; }

// With blocks recomputed, segments of several blocks may share one kept input (Chen et al. 2016): the backward computes
// the segment's blocks forward again from it, in full, before it recomputes one block after another. n blocks then keep
// n / N inputs, and N - 1 while a segment is in the backward; of N, about the square root of n is best.
struct RecomputeChoice {
  Recompute what = Recompute::none;
  int64_t segment = 1;  // blocks
  bool operator==(const RecomputeChoice&) const = default;
  operator std::string() const { return segment > 1 ? formatted("{}:{}", what, segment) : std::string(name_of(what)); }
};

// The layers that a set of activations is for; `any` has room for both, where a model has both.
enum class Layers : uint8_t { dense, sparse, any };
inline Layers kind_of_layer(const ModelConfig& c, int64_t layer) {
  return c.is_sparse(layer) ? Layers::sparse : Layers::dense;
}

// Whether the backward of a block is done at once, or in two parts: the second, for the weights, comes later.
enum class Backward : uint8_t { whole, in_parts };

// The rows and the layers of a model that activations are for.
struct BlockShape {
  const ModelConfig& config;  // of this rank's part
  BatchShape batch;           // of the rows that this rank has
  Layers layers;
  TensorParallel tensor = {};
  DType dtype = DType::fp32;
  ExpertPlacement placement = {};
  bool inputs_in_fp8 = false;  // InputInFp8 in the place of what a block keeps for the gradients of weights alone

  int64_t rows() const { return batch.rows(); }                       // N
  int64_t stream_rows() const { return tensor.stream_rows(rows()); }  // S
  bool has_dense() const { return layers != Layers::sparse && config.sparse_layers() < config.n_layer; }
  bool has_sparse() const { return layers != Layers::dense && config.experts.count > 0; }
};

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
  Tensor outputs;                      // (R', C) of the experts, in their order; R': ExpertPlacement::sent()
  ReceivedRows received;               // of the experts that this rank has
  Tensor shared_up, shared_activated;  // (N, 2 Fs) (N, Fs); empty tensors without a shared expert
  Tensor shared_out, gate_logits;      // (S, C) (S, 1); empty tensors without the shared expert's gate
  std::shared_ptr<ExpertRounds> rounds = {};  // which rows are exchanged, for the host; none: no ranks share experts
};

// The input of a linear layer as the gradient of its weights reads it on tensor cores that multiply fp8: the forward
// rounds it once, along its rows for itself and along its columns for the backward, which keeps 1 byte in place of 2
// and computes the same bits.
struct InputInFp8 {
  Tensor values, scales;  // (C, N) E4M3, (ceil(N / 128), C) fp32; or empty tensors
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
  // Where these are kept, norm1, norm2 and activated are those of one block at a time.
  InputInFp8 norm1_in_fp8, norm2_in_fp8, activated_in_fp8;
  Tensor out;                 // (S, C) the residual stream after the block; whoever allocates these sets it
  ExpertActivations experts;  // of a layer with experts, instead of up and activated
  SliceKeys slice_keys;       // empty tensors without token slices

  // The tensors that blocks use in turn: recomputed ones, and those that are kept in another form (InputInFp8).
  static BlockActivations recomputed(const BlockShape& shape, Recompute recompute, Arena& arena) {
    BlockActivations all(shape, {}, [&](Tensor& t, const Activation& a) {
      const bool again = a.from && *a.from <= recompute;
      if (a.in_fp8 || !(again || a.kept_in_fp8)) return;
      const char* label = !again ? "activations of one block" : a.of_experts ? "recomputed of experts" : "recomputed";
      t = arena.alloc(label, a.name, a.dtype, a.shape);
    });
    if (recompute == Recompute::block) all.set_rounds(shape);
    return all;
  }
  // The tensors that each block keeps, except `out`; the others are in `shared`. With a backward in parts,
  // product_inputs() are left out.
  static BlockActivations kept(const BlockShape& shape, Recompute recompute, Backward backward,
                               const BlockActivations& shared, Arena& arena) {
    auto wanted = [=](const Activation& a) {
      return (!a.from || *a.from > recompute) && !(a.product_input && backward == Backward::in_parts) && !a.kept_in_fp8;
    };
    BlockActivations block(shape, shared, in_arena(arena, "activations", "activations of experts", wanted));
    if (recompute < Recompute::block) block.set_rounds(shape);
    return block;
  }
  // The inputs of the products, for the weight part: those that the forward keeps, or that the input part recomputes.
  static BlockActivations product_inputs(const BlockShape& shape, Recompute recompute, ActionKind made_by,
                                         Arena& arena) {
    auto wanted = [=](const Activation& a) {
      return a.product_input && (*a.from <= recompute) == (made_by == ActionKind::backward_input);
    };
    return {shape, {}, in_arena(arena, "for the weight part", "for the weight part", wanted)};
  }
  // The same memory for a batch of at most as many rows, in a layer of a kind that the memory is for.
  static BlockActivations part_of(const BlockActivations& room, const BlockShape& shape) {
    CHECK(!shape.inputs_in_fp8, "inputs in fp8 are for whole sequences");  // a part of them is no slice
    return {shape, room, [](Tensor& t, const Activation& a) { t = t.slice(0, a.shape); }};
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
  // An activation. from: the lowest level that recomputes it; none: it is always kept.
  struct Activation {
    const char* name;
    DType dtype;
    Shape shape;
    std::optional<Recompute> from;
    bool product_input, of_experts;
    bool kept_in_fp8 = false, in_fp8 = false;  // InputInFp8 is kept in its place; is a part of one
  };
  // Sets a tensor, or leaves it.
  using Place = std::function<void(Tensor& t, const Activation& a)>;
  // Allocates the activations that are wanted, under a label for those of a block or one for those of its experts.
  template <class Wanted>
  static Place in_arena(Arena& arena, const char* label, const char* label_of_experts, Wanted wanted) {
    return [=, &arena](Tensor& t, const Activation& a) {
      if (wanted(a)) t = arena.alloc(a.of_experts ? label_of_experts : label, a.name, a.dtype, a.shape);
    };
  }
  void set_rounds(const BlockShape& shape) {
    if (shape.has_sparse() && shape.placement.exchanged()) experts.rounds = std::make_shared<ExpertRounds>();
  }
  // Begins as a copy of `others`.
  BlockActivations(const BlockShape& of, const BlockActivations& others, const Place& place)
      : BlockActivations(others) {
    const ModelConfig& c = of.config;
    const int64_t N = of.rows(), S = of.stream_rows(), C = c.n_embd;
    const DType dtype = of.dtype, stat = accumulator_of(dtype);
    bool of_experts = false;
    auto alloc = [&](Tensor& t, const char* name, DType d, const Shape& shape, std::optional<Recompute> from,
                     bool product_input = false) {
      place(t, {name, d, shape, from, product_input, of_experts});
    };
    // An input that is kept for the gradients of weights alone.
    auto alloc_input = [&](Tensor& t, InputInFp8& fp8, const char* name, const char* scales, const Shape& shape,
                           Recompute from) {
      place(t, {name, dtype, shape, from, true, false, of.inputs_in_fp8});
      if (!of.inputs_in_fp8) return;
      const int64_t rows = shape[0], columns = shape[1];
      place(fp8.values, {name, DType::e4m3, {columns, rows}, from, true, false, false, true});
      place(fp8.scales, {scales, DType::fp32, {ceil_div(rows, fp8_block), columns}, from, true, false, false, true});
    };
    constexpr bool product_input = true;
    const bool means = c.family.norm == Norm::layernorm;
    using enum Recompute;
    alloc_input(norm1, norm1_in_fp8, "norm1", "scales of norm1", {S, C}, norm);
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
    alloc(lse, "attention lse", stat, {of.batch.B, c.n_head, of.batch.T}, block);
    alloc(middle, "middle", dtype, {S, C}, block);
    alloc_input(norm2, norm2_in_fp8, "norm2", "scales of norm2", {S, C}, norm);
    if (means) alloc(norm2_mean, "norm2 mean", stat, {S}, block);
    alloc(norm2_rstd, "norm2 rstd", stat, {S}, block);
    if (of.has_dense()) {
      alloc(up, "up", dtype, {N, c.mlp_in_size()}, block);
      alloc_input(activated, activated_in_fp8, "activated", "scales of activated", {N, c.n_ffn}, activation);
    }
    if (of.has_sparse()) {
      const Experts& e = c.experts;
      const ExpertPlacement& p = of.placement;
      const int64_t k = e.per_token, segments = most_segments(of.batch, S), R = p.room(S);
      ExpertActivations& x = experts;
      ReceivedRows& r = x.received;
      const bool exchanged = p.exchanged();
      of_experts = true;
      alloc(x.logits, "router logits", stat, {S, e.count}, block);
      alloc(x.choices, "experts chosen", DType::int32, {S, k}, block);
      alloc(x.weights, "weights of experts", stat, {S, k}, block);
      alloc(x.counts, "choices of each expert", DType::int32, {segments, e.count}, std::nullopt);
      if (p.spread) alloc(x.starts, "choices before a segment", DType::int32, {segments, e.count}, std::nullopt);
      alloc(x.places, "places of choices", DType::int32, {S, k}, block);
      alloc(x.offsets, "first rows of experts", DType::int32, {e.count + 1}, block, !exchanged);
      alloc(x.outputs, "outputs of experts", dtype, {p.sent(S), C}, block);
      if (exchanged) {
        alloc(r.offsets, "first received rows of experts", DType::int32, {p.own() + 1}, block);
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
  }
};

// The gradients of the outputs of a block's products, which its weight part needs.
struct OutputGradients {
  Tensor qkv, middle, up, out;  // as in BlockActivations; middle and out: of the product added to the residual stream
  struct OfExperts {            // the same for a layer with experts
    Tensor logits, up, outputs, shared_up, shared_out, gate_logits;
  } experts = {};
  OutputGradients() = default;
  OutputGradients(const BlockShape& of, Arena& arena) {
    const ModelConfig& c = of.config;
    const int64_t N = of.rows(), S = of.stream_rows(), C = c.n_embd;
    const DType stat = accumulator_of(of.dtype);
    auto alloc = [&](const char* name, const Shape& shape, std::optional<DType> other = {}) {
      return arena.alloc("for the weight part", name, other.value_or(of.dtype), shape);
    };
    qkv = alloc("gradient of qkv", {N, c.qkv_size()});
    middle = alloc("gradient of middle", {S, C});
    out = alloc("gradient of out", {S, C});
    if (of.has_dense()) up = alloc("gradient of up", {N, c.mlp_in_size()});
    if (!of.has_sparse()) return;
    const Experts& e = c.experts;
    const int64_t R = of.placement.room(S);
    experts.logits = alloc("gradient of router logits", {S, e.count}, stat);
    if (!of.placement.exchanged()) {
      experts.up = alloc("gradient of up of experts", {R, 2 * e.width});
      experts.outputs = alloc("gradient of outputs of experts", {R, C});
    }
    if (e.shared > 0) {
      experts.shared_up = alloc("gradient of up of the shared expert", {N, 2 * e.shared});
      experts.shared_out = alloc("gradient of the output of the shared expert", {S, C});
    }
    if (e.shared_gate) experts.gate_logits = alloc("gradient of the gate of the shared expert", {S, 1}, stat);
  }
};

}  // namespace llmc
