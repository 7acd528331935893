// transformer.h: the model: embedding, block and head, forward and backward, as sequences of ops.
//
// A block (pre-norm):   x1 = x  + proj(attention(heads(qkv(norm1(x)))))     heads: query-key norm, rotary positions
//                       x2 = x1 + down(activation(up(norm2(x1))))         activation: GELU; SwiGLU of gate and up
// config.h says which of these a model has. Sizes: N = B T rows, C channels, F feed-forward, Hq query heads, Hkv
// key-value heads, D head size, V vocabulary (stored padded).
#pragma once
#include <optional>
#include <string>
#include <vector>

#include "device/arena.h"
#include "dist/unit_state.h"
#include "model/config.h"
#include "ops/ops.h"

namespace llmc {

struct BatchShape {
  int64_t B, T;
  int64_t rows() const { return B * T; }
};

// Whether packed documents attend to each other.
enum class Documents : uint8_t { together, apart };

// The inputs that all blocks share.
struct Sequences {
  BatchShape shape;
  Tensor positions;     // (N) int32
  Tensor rotary_table;  // (positions, D); empty without rotary positions
  Documents documents = Documents::together;
  Tensor boundaries() const { return documents == Documents::apart ? positions : Tensor{}; }  // for attention
};

// The inputs of a micro-batch on the device. Positions are an input, not an index: with Documents::apart they restart
// at 0 in each document.
struct MicroBatch {
  Tensor tokens, targets, positions;  // (N) int32
  MicroBatch(const BatchShape& s, Arena& arena) {
    auto rows = [&](const char* name) { return arena.alloc("inputs", name, DType::int32, {s.rows()}); };
    tokens = rows("tokens");
    targets = rows("targets");
    positions = rows("positions");
  }
};

// What the backward recomputes instead of keeping it from the forward (contract 11: bitwise the same). Each level
// includes those before it. Whole blocks: Chen et al. 2016; parts that are large and cheap: Korthikanti et al. 2022.
enum class Recompute : uint8_t { none, activation, norm, block };
inline const char* name_of(Recompute r) {
  constexpr const char* names[] = {"none", "activation", "norm", "block"};
  return names[static_cast<int>(r)];
}
inline constexpr Recompute all_recompute[] = {Recompute::none, Recompute::activation, Recompute::norm,
                                              Recompute::block};
inline Recompute recompute_from_name(const std::string& name) {
  for (const Recompute r : all_recompute)
    if (name == name_of(r)) return r;
  throw Error(formatted("--recompute {}: expected one of none, activation, norm, block", name));
}

// The activations that the backward of a block needs.
struct BlockActivations {
  Tensor norm1, norm1_mean, norm1_rstd;  // (N, C) (N) (N); no mean with rmsnorm
  Tensor qkv;                            // (N, (Hq + 2 Hkv) D): q heads, k heads, v heads
  Tensor heads, heads_rstd;  // (as qkv) (N, Hq + Hkv): what attention reads; qkv itself without query-key norm
  Tensor attention, lse;     // (N, Hq D) (B, Hq, T)
  Tensor middle;             // (N, C) the residual stream between attention and MLP
  Tensor norm2, norm2_mean, norm2_rstd;  // (N, C) (N) (N)
  Tensor up, activated;                  // (N, F or 2 F: gates, ups) (N, F)
  Tensor out;                            // (N, C) the residual stream after the block

  // The recomputed tensors: one set, reused by all blocks.
  static BlockActivations recomputed(const ModelConfig& c, const BatchShape& s, DType dtype, Recompute recompute,
                                     Arena& arena) {
    auto wanted = [=](std::optional<Recompute> from) { return from && *from <= recompute; };
    return {c, s, dtype, arena, "recomputed", {}, wanted};
  }
  // The tensors that each block keeps; the others are in `shared`.
  static BlockActivations kept(const ModelConfig& c, const BatchShape& s, DType dtype, Recompute recompute,
                               const BlockActivations& shared, Arena& arena) {
    auto wanted = [=](std::optional<Recompute> from) { return !from || *from > recompute; };
    return {c, s, dtype, arena, "activations", shared, wanted};
  }

  BlockActivations() = default;

 private:
  // `wanted`(from): from is the lowest level that recomputes the tensor; none: it is always kept.
  template <class Wanted>
  BlockActivations(const ModelConfig& c, const BatchShape& s, DType dtype, Arena& arena, const char* label,
                   const BlockActivations& shared, Wanted wanted)
      : BlockActivations(shared) {
    const int64_t N = s.rows(), C = c.n_embd;
    const DType stat = accumulator_of(dtype);
    auto alloc = [&](Tensor& tensor, const char* name, DType d, const Shape& shape, std::optional<Recompute> from) {
      if (wanted(from)) tensor = arena.alloc(label, name, d, shape);
    };
    const bool means = c.family.norm == Norm::layernorm;
    using enum Recompute;
    alloc(norm1, "norm1", dtype, {N, C}, norm);
    if (means) alloc(norm1_mean, "norm1 mean", stat, {N}, block);
    alloc(norm1_rstd, "norm1 rstd", stat, {N}, block);
    alloc(qkv, "qkv", dtype, {N, c.qkv_size()}, block);
    if (c.family.qk_norm) {
      alloc(heads, "heads", dtype, {N, c.qkv_size()}, norm);
      alloc(heads_rstd, "heads rstd", stat, {N, c.n_head + c.n_kv_head}, block);
    } else {
      heads = qkv;
    }
    alloc(attention, "attention", dtype, {N, c.q_size()}, block);
    alloc(lse, "attention lse", stat, {s.B, c.n_head, s.T}, block);
    alloc(middle, "middle", dtype, {N, C}, block);
    alloc(norm2, "norm2", dtype, {N, C}, norm);
    if (means) alloc(norm2_mean, "norm2 mean", stat, {N}, block);
    alloc(norm2_rstd, "norm2 rstd", stat, {N}, block);
    alloc(up, "up", dtype, {N, c.mlp_in_size()}, block);
    alloc(activated, "activated", dtype, {N, c.n_ffn}, activation);
    alloc(out, "out", dtype, {N, C}, std::nullopt);
  }
};

inline AttentionShape attention_shape(const ModelConfig& c, const BatchShape& s) {
  return {.B = s.B, .T = s.T, .Hq = c.n_head, .Hkv = c.n_kv_head, .D = c.head_size};
}

namespace detail {

// Norm `name` of a unit, forward and backward. mean: unused with rmsnorm
inline void norm_forward(Tensor out, Tensor mean, Tensor rstd, Tensor x, const std::string& name, const UnitState& unit,
                         const ModelConfig& c, Stream& stream) {
  const Tensor weight = unit.weight(name + ".weight");
  if (c.family.norm == Norm::rmsnorm) rmsnorm_forward(out, rstd, x, weight, c.norm_eps, stream);
  else layernorm_forward(out, mean, rstd, x, weight, unit.weight(name + ".bias"), c.norm_eps, stream);
}
inline void norm_backward(Tensor dx, Tensor dout, Tensor x, Tensor mean, Tensor rstd, const std::string& name,
                          const UnitState& unit, const ModelConfig& c, Accumulate accumulate_dx, Stream& stream) {
  const Tensor weight = unit.weight(name + ".weight"), dweight = unit.gradient(name + ".weight");
  if (c.family.norm == Norm::rmsnorm) rmsnorm_backward(dx, dweight, dout, x, weight, rstd, accumulate_dx, stream);
  else
    layernorm_backward(dx, dweight, unit.gradient(name + ".bias"), dout, x, weight, mean, rstd, accumulate_dx, stream);
}

// The linear layer whose weight is parameter `name` and the `fused` - 1 adjacent to it, with its bias if it has one.
inline void linear(Tensor out, Tensor x, const std::string& name, int fused, const UnitState& unit, Stream& stream) {
  const Tensor bias = unit.has(name + ".bias") ? unit.weight(name + ".bias", fused) : Tensor{};
  linear_forward(out, x, unit.weight(name + ".weight", fused), bias, stream);
}
// dx = ...; dweight, dbias += ...
inline void linear_backward(Tensor dx, Tensor dout, Tensor x, const std::string& name, int fused, const UnitState& unit,
                            Stream& stream) {
  const Tensor dbias = unit.has(name + ".bias") ? unit.gradient(name + ".bias", fused) : Tensor{};
  linear_backward_weight(unit.gradient(name + ".weight", fused), dbias, dout, x, stream);
  linear_backward_input(dx, dout, unit.weight(name + ".weight", fused), stream);
}

// The MLP's first product: the name of its first parameter, and how many form one matrix.
struct MlpInput {
  const char* name;
  int fused;
  explicit MlpInput(const ModelConfig& c)
      : name(c.family.mlp == Mlp::swiglu ? "mlp.gate" : "mlp.up"), fused(c.family.mlp == Mlp::swiglu ? 2 : 1) {}
};

// The end of a residual branch, of attention or the MLP: out = x + linear(input).   x, out (N, C)
inline void add_branch(Tensor out, Tensor x, Tensor input, const char* name, const UnitState& unit, Arena& arena,
                       Stream& stream) {
  auto scope = arena.scope();
  const Tensor branch = arena.alloc("temporary", "residual branch", x.dtype, x.shape);
  linear(branch, input, name, 1, unit, stream);
  residual_forward(out, x, branch, stream);
}

inline void norm1(const BlockActivations& a, Tensor x, const UnitState& unit, const ModelConfig& c, Stream& stream) {
  norm_forward(a.norm1, a.norm1_mean, a.norm1_rstd, x, "ln1", unit, c, stream);
}
inline void norm2(const BlockActivations& a, const UnitState& unit, const ModelConfig& c, Stream& stream) {
  norm_forward(a.norm2, a.norm2_mean, a.norm2_rstd, a.middle, "ln2", unit, c, stream);
}
inline void activation(const BlockActivations& a, const ModelConfig& c, Stream& stream) {
  if (c.family.mlp == Mlp::swiglu) swiglu_forward(a.activated, a.up, stream);
  else gelu_forward(a.activated, a.up, stream);
}
// What attention reads of qkv; in place without query-key norm.
inline void heads(const BlockActivations& a, const UnitState& unit, const ModelConfig& c, const Sequences& s,
                  Stream& stream) {
  const AttentionShape shape = attention_shape(c, s.shape);
  if (c.family.qk_norm)
    qk_norm_forward(a.heads, a.heads_rstd, a.qkv, unit.weight("attn.q_norm.weight"), unit.weight("attn.k_norm.weight"),
                    c.norm_eps, shape, stream);
  if (c.family.positions == Positions::rotary)
    rotary_embedding(a.heads, s.rotary_table, s.positions, shape, Turn::forward, stream);
}

// A block without its last product and residual addition, which its backward does not need. `attend`: attention over
// whole sequences, or against a cache.
template <class Attend>
void block_interior(const BlockActivations& a, Tensor x, const UnitState& unit, const ModelConfig& c,
                    const Sequences& s, Attend&& attend, Arena& arena, Stream& stream) {
  norm1(a, x, unit, c, stream);
  linear(a.qkv, a.norm1, "attn.q", 3, unit, stream);
  heads(a, unit, c, s, stream);
  attend();
  add_branch(a.middle, x, a.attention, "attn.proj", unit, arena, stream);
  norm2(a, unit, c, stream);
  const MlpInput mlp(c);
  linear(a.up, a.norm2, mlp.name, mlp.fused, unit, stream);
  activation(a, c, stream);
}
inline void block_interior(const BlockActivations& a, Tensor x, const UnitState& unit, const ModelConfig& c,
                           const Sequences& s, Arena& arena, Stream& stream) {
  auto attend = [&] {
    attention_forward(a.attention, a.lse, a.heads, s.boundaries(), attention_shape(c, s.shape), stream);
  };
  block_interior(a, x, unit, c, s, attend, arena, stream);
}

}  // namespace detail

// a.out = the block's output for x (N, C).
inline void block_forward(const BlockActivations& a, Tensor x, const UnitState& unit, const ModelConfig& c,
                          const Sequences& s, Arena& arena, Stream& stream) {
  detail::block_interior(a, x, unit, c, s, arena, stream);
  detail::add_branch(a.out, a.middle, a.activated, "mlp.down", unit, arena, stream);
}

// The same for the rows of one sequence from `begin` on. `cache` (rows, 2 Hkv D) holds the keys and values of the rows
// before; those of the new rows are appended.
inline void block_forward_cached(const BlockActivations& a, Tensor x, Tensor cache, int64_t begin,
                                 const UnitState& unit, const ModelConfig& c, const Sequences& s, Arena& arena,
                                 Stream& stream) {
  const AttentionShape shape = attention_shape(c, s.shape);
  auto attend = [&] {
    cache_append(cache, a.heads, begin, shape, stream);
    attention_cached(a.attention, a.heads, cache, begin, shape, stream);
  };
  detail::block_interior(a, x, unit, c, s, attend, arena, stream);
  detail::add_branch(a.out, a.middle, a.activated, "mlp.down", unit, arena, stream);
}

// Recomputes what the forward of the block did not keep.
inline void block_recompute(const BlockActivations& a, Tensor x, Recompute recompute, const UnitState& unit,
                            const ModelConfig& c, const Sequences& s, Arena& arena, Stream& stream) {
  if (recompute == Recompute::block) return detail::block_interior(a, x, unit, c, s, arena, stream);
  if (recompute == Recompute::norm) {
    detail::norm1(a, x, unit, c, stream);
    if (c.family.qk_norm) detail::heads(a, unit, c, s, stream);
    detail::norm2(a, unit, c, stream);
  }
  if (recompute != Recompute::none) detail::activation(a, c, stream);
}

// dx: on entry the gradient of a.out, on return that of x; the gradients of the unit += ...
inline void block_backward(Tensor dx, const BlockActivations& a, Tensor x, const UnitState& unit, const ModelConfig& c,
                           const Sequences& s, Arena& arena, Stream& stream) {
  auto scope = arena.scope();
  auto temporary = [&](const char* name, const Shape& shape) { return arena.alloc("temporary", name, x.dtype, shape); };
  const Tensor dbranch = temporary("gradient of a branch", x.shape);                // (N, C)
  const Tensor dactivated = temporary("gradient of activated", a.activated.shape);  // (N, F)
  const Tensor dqkv = temporary("gradient of qkv", a.qkv.shape);                    // (N, (Hq + 2 Hkv) D)
  const bool gated = c.family.mlp == Mlp::swiglu;
  const Tensor dup = gated ? temporary("gradient of up", a.up.shape) : dactivated;
  const Tensor dattention = c.q_size() == c.n_embd ? dbranch : temporary("gradient of attention", a.attention.shape);
  const AttentionShape shape = attention_shape(c, s.shape);

  detail::linear_backward(dactivated, dx, a.activated, "mlp.down", 1, unit, stream);
  if (gated) swiglu_backward(dup, dactivated, a.up, stream);
  else gelu_backward(dup, dactivated, a.up, stream);
  const detail::MlpInput mlp(c);
  detail::linear_backward(dbranch, dup, a.norm2, mlp.name, mlp.fused, unit, stream);
  detail::norm_backward(dx, dbranch, a.middle, a.norm2_mean, a.norm2_rstd, "ln2", unit, c, Accumulate::yes, stream);

  detail::linear_backward(dattention, dx, a.attention, "attn.proj", 1, unit, stream);
  attention_backward(dqkv, dattention, a.attention, a.heads, a.lse, s.boundaries(), shape, stream);
  if (c.family.positions == Positions::rotary)
    rotary_embedding(dqkv, s.rotary_table, s.positions, shape, Turn::backward, stream);
  if (c.family.qk_norm)
    qk_norm_backward(dqkv, unit.gradient("attn.q_norm.weight"), unit.gradient("attn.k_norm.weight"), a.qkv,
                     unit.weight("attn.q_norm.weight"), unit.weight("attn.k_norm.weight"), a.heads_rstd, shape, stream);
  detail::linear_backward(dbranch, dqkv, a.norm1, "attn.q", 3, unit, stream);
  detail::norm_backward(dx, dbranch, x, a.norm1_mean, a.norm1_rstd, "ln1", unit, c, Accumulate::yes, stream);
}

// logits (N, V padded) = head(norm(x)).
struct HeadActivations {
  Tensor norm, mean, rstd;  // (N, C) (N) (N); no mean with rmsnorm
  Tensor logits;            // (N, V padded)
  Tensor losses;            // (N)

  HeadActivations(const ModelConfig& c, int64_t N, DType dtype, Arena& arena) {
    const DType stat = accumulator_of(dtype);
    norm = arena.alloc("head", "ln_f", dtype, {N, c.n_embd});
    if (c.family.norm == Norm::layernorm) mean = arena.alloc("head", "ln_f mean", stat, {N});
    rstd = arena.alloc("head", "ln_f rstd", stat, {N});
    logits = arena.alloc("head", "logits", dtype, {N, c.padded_vocab()});
    losses = arena.alloc("head", "losses", stat, {N});
  }
};

// The head's matrix: the token embedding if tied.   `embedding`: read only if tied
inline Tensor head_matrix(const UnitState& head, const UnitState& embedding, const ModelConfig& c) {
  return c.tied ? embedding.weight("wte.weight") : head.weight("lm_head.weight");
}

inline void head_forward(const HeadActivations& a, Tensor x, const UnitState& head, const UnitState& embedding,
                         const ModelConfig& c, Stream& stream) {
  detail::norm_forward(a.norm, a.mean, a.rstd, x, "ln_f", head, c, stream);
  linear_forward(a.logits, a.norm, head_matrix(head, embedding, c), {}, stream);
}

// dx = ..., from a.logits, which hold their gradient already; the weight gradients += ...
inline void head_backward(Tensor dx, const HeadActivations& a, Tensor x, const UnitState& head,
                          const UnitState& embedding, const ModelConfig& c, Arena& arena, Stream& stream) {
  auto scope = arena.scope();
  const Tensor dnorm = arena.alloc("temporary", "gradient of ln_f", x.dtype, x.shape);
  const Tensor dmatrix = c.tied ? embedding.gradient("wte.weight") : head.gradient("lm_head.weight");
  linear_backward_weight(dmatrix, {}, a.logits, a.norm, stream);
  linear_backward_input(dnorm, a.logits, head_matrix(head, embedding, c), stream);
  detail::norm_backward(dx, dnorm, x, a.mean, a.rstd, "ln_f", head, c, Accumulate::no, stream);
}

}  // namespace llmc
