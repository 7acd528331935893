// transformer.h: what is computed. The embedding, a block and the head, forward and backward, as sequences of ops.
//
// A block (GPT-2, pre-norm):        x1 = x  + proj(attention(qkv(ln1(x))))
//                                   x2 = x1 + down(gelu(up(ln2(x1))))
// Sizes: N = B T rows, C channels, F feed-forward, H heads, V vocabulary (stored padded).
#pragma once
#include <optional>
#include <string>
#include <vector>

#include "device/arena.h"
#include "dist/zero.h"
#include "model/config.h"
#include "ops/ops.h"

namespace llmc {

struct BatchShape {
  int64_t B, T;
  int64_t rows() const { return B * T; }
};

// The inputs of a micro-batch on the device. Positions are an input, not an index.
struct MicroBatch {
  Tensor tokens, targets, positions;  // (N) int32
  MicroBatch(const BatchShape& s, Arena& arena) {
    auto rows = [&](const char* name) { return arena.alloc("inputs", name, DType::int32, {s.rows()}); };
    tokens = rows("tokens");
    targets = rows("targets");
    positions = rows("positions");
  }
};

// What the backward computes again instead of keeping it from the forward (contract 11: bitwise the same). Each level
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

// What the backward of a block needs from its forward.
struct BlockActivations {
  Tensor ln1, ln1_mean, ln1_rstd;  // (N, C) (N) (N)
  Tensor qkv;                      // (N, 3 C): q heads, k heads, v heads
  Tensor attention, lse;           // (N, C) (B, H, T)
  Tensor middle;                   // (N, C) the residual stream between attention and MLP
  Tensor ln2, ln2_mean, ln2_rstd;  // (N, C) (N) (N)
  Tensor up, gelu;                 // (N, F) before and after GELU
  Tensor out;                      // (N, C) the residual stream behind the block

  // What is computed again: one set, which all blocks write in turn.
  static BlockActivations recomputed(const ModelConfig& c, const BatchShape& s, DType dtype, Recompute recompute,
                                     Arena& arena) {
    return {c,
            s,
            dtype,
            arena,
            "recomputed",
            {},
            [=](std::optional<Recompute> from) {
              return from && *from <= recompute; }};
  }
  // What each block keeps; the rest is in `shared`.
  static BlockActivations kept(const ModelConfig& c, const BatchShape& s, DType dtype, Recompute recompute,
                               const BlockActivations& shared, Arena& arena) {
    return {c,
            s,
            dtype,
            arena,
            "activations",
            shared,
            [=](std::optional<Recompute> from) {
              return !from || *from > recompute; }};
  }

  BlockActivations() = default;

 private:
  // `wanted`: of tensors that are computed again from this level on, or never.
  template <class Wanted>
  BlockActivations(const ModelConfig& c, const BatchShape& s, DType dtype, Arena& arena, const char* label,
                   const BlockActivations& others, Wanted wanted)
      : BlockActivations(others) {
    const int64_t N = s.rows(), C = c.n_embd, F = c.n_ffn;
    const DType stat = accumulator_of(dtype);
    auto alloc = [&](Tensor& tensor, const char* name, DType d, const Shape& shape, std::optional<Recompute> from) {
      if (wanted(from)) tensor = arena.alloc(label, name, d, shape);
    };
    using enum Recompute;
    alloc(ln1, "ln1", dtype, {N, C}, norm);
    alloc(ln1_mean, "ln1 mean", stat, {N}, block);
    alloc(ln1_rstd, "ln1 rstd", stat, {N}, block);
    alloc(qkv, "qkv", dtype, {N, 3 * C}, block);
    alloc(attention, "attention", dtype, {N, C}, block);
    alloc(lse, "attention lse", stat, {s.B, c.n_head, s.T}, block);
    alloc(middle, "middle", dtype, {N, C}, block);
    alloc(ln2, "ln2", dtype, {N, C}, norm);
    alloc(ln2_mean, "ln2 mean", stat, {N}, block);
    alloc(ln2_rstd, "ln2 rstd", stat, {N}, block);
    alloc(up, "up", dtype, {N, F}, block);
    alloc(gelu, "gelu", dtype, {N, F}, activation);
    alloc(out, "out", dtype, {N, C}, std::nullopt);
  }
};

inline AttentionShape attention_shape(const ModelConfig& c, const BatchShape& s) {
  return {.B = s.B, .T = s.T, .Hq = c.n_head, .Hkv = c.n_head, .D = c.head_size()};
}

namespace detail {

// The residual branch behind attention, and behind the MLP: out = x + linear(branch input).   x, out (N, C)
inline void add_branch(Tensor out, Tensor x, Tensor input, Tensor weight, Tensor bias, Arena& arena, Stream& stream) {
  auto scope = arena.scope();
  const Tensor branch = arena.alloc("temporary", "residual branch", x.dtype, x.shape);
  linear_forward(branch, input, weight, bias, stream);
  residual_forward(out, x, branch, stream);
}

inline void norm1(const BlockActivations& a, Tensor x, const UnitState& unit, const ModelConfig& c, Stream& stream) {
  layernorm_forward(a.ln1, a.ln1_mean, a.ln1_rstd, x, unit.weight("ln1.weight"), unit.weight("ln1.bias"), c.norm_eps,
                    stream);
}
inline void norm2(const BlockActivations& a, const UnitState& unit, const ModelConfig& c, Stream& stream) {
  layernorm_forward(a.ln2, a.ln2_mean, a.ln2_rstd, a.middle, unit.weight("ln2.weight"), unit.weight("ln2.bias"),
                    c.norm_eps, stream);
}

// All of a block but what its backward does not need: the last product and the sum behind it.
inline void block_interior(const BlockActivations& a, Tensor x, const UnitState& unit, const ModelConfig& c,
                           const BatchShape& s, Arena& arena, Stream& stream) {
  norm1(a, x, unit, c, stream);
  linear_forward(a.qkv, a.ln1, unit.weight("attn.q.weight", 3), unit.weight("attn.q.bias", 3), stream);
  attention_forward(a.attention, a.lse, a.qkv, attention_shape(c, s), stream);
  add_branch(a.middle, x, a.attention, unit.weight("attn.proj.weight"), unit.weight("attn.proj.bias"), arena, stream);
  norm2(a, unit, c, stream);
  linear_forward(a.up, a.ln2, unit.weight("mlp.up.weight"), unit.weight("mlp.up.bias"), stream);
  gelu_forward(a.gelu, a.up, stream);
}

}  // namespace detail

// a.out = block(x).   x (N, C)
inline void block_forward(const BlockActivations& a, Tensor x, const UnitState& unit, const ModelConfig& c,
                          const BatchShape& s, Arena& arena, Stream& stream) {
  detail::block_interior(a, x, unit, c, s, arena, stream);
  detail::add_branch(a.out, a.middle, a.gelu, unit.weight("mlp.down.weight"), unit.weight("mlp.down.bias"), arena,
                     stream);
}

// Before the backward of a block: what its forward did not keep, by the same ops on the same inputs.
inline void block_recompute(const BlockActivations& a, Tensor x, Recompute recompute, const UnitState& unit,
                            const ModelConfig& c, const BatchShape& s, Arena& arena, Stream& stream) {
  if (recompute == Recompute::block) return detail::block_interior(a, x, unit, c, s, arena, stream);
  if (recompute == Recompute::norm) {
    detail::norm1(a, x, unit, c, stream);
    detail::norm2(a, unit, c, stream);
  }
  if (recompute != Recompute::none) gelu_forward(a.gelu, a.up, stream);
}

// dx: in, the gradient of a.out; out, the gradient of x. Gradients of the unit's weights are added to.
inline void block_backward(Tensor dx, const BlockActivations& a, Tensor x, const UnitState& unit, const ModelConfig& c,
                           const BatchShape& s, Arena& arena, Stream& stream) {
  auto scope = arena.scope();
  auto temporary = [&](const char* name, const Shape& shape) { return arena.alloc("temporary", name, x.dtype, shape); };
  const Tensor dbranch = temporary("gradient of a branch", x.shape);  // (N, C)
  const Tensor dup = temporary("gradient of up", a.up.shape);         // (N, F)
  const Tensor dqkv = temporary("gradient of qkv", a.qkv.shape);      // (N, 3 C)

  linear_backward_weight(unit.gradient("mlp.down.weight"), unit.gradient("mlp.down.bias"), dx, a.gelu, stream);
  linear_backward_input(dup, dx, unit.weight("mlp.down.weight"), stream);
  gelu_backward(dup, dup, a.up, stream);
  linear_backward_weight(unit.gradient("mlp.up.weight"), unit.gradient("mlp.up.bias"), dup, a.ln2, stream);
  linear_backward_input(dbranch, dup, unit.weight("mlp.up.weight"), stream);
  layernorm_backward(dx, unit.gradient("ln2.weight"), unit.gradient("ln2.bias"), dbranch, a.middle,
                     unit.weight("ln2.weight"), a.ln2_mean, a.ln2_rstd, Accumulate::yes, stream);

  linear_backward_weight(unit.gradient("attn.proj.weight"), unit.gradient("attn.proj.bias"), dx, a.attention, stream);
  linear_backward_input(dbranch, dx, unit.weight("attn.proj.weight"), stream);
  attention_backward(dqkv, dbranch, a.attention, a.qkv, a.lse, attention_shape(c, s), stream);
  linear_backward_weight(unit.gradient("attn.q.weight", 3), unit.gradient("attn.q.bias", 3), dqkv, a.ln1, stream);
  linear_backward_input(dbranch, dqkv, unit.weight("attn.q.weight", 3), stream);
  layernorm_backward(dx, unit.gradient("ln1.weight"), unit.gradient("ln1.bias"), dbranch, x, unit.weight("ln1.weight"),
                     a.ln1_mean, a.ln1_rstd, Accumulate::yes, stream);
}

// logits (N, V padded) = head(ln_f(x)).
struct HeadActivations {
  Tensor ln, mean, rstd;  // (N, C) (N) (N)
  Tensor logits;          // (N, V padded)
  Tensor losses;          // (N)

  HeadActivations(const ModelConfig& c, int64_t N, DType dtype, Arena& arena) {
    const DType stat = accumulator_of(dtype);
    ln = arena.alloc("head", "ln_f", dtype, {N, c.n_embd});
    mean = arena.alloc("head", "ln_f mean", stat, {N});
    rstd = arena.alloc("head", "ln_f rstd", stat, {N});
    logits = arena.alloc("head", "logits", dtype, {N, c.padded_vocab()});
    losses = arena.alloc("head", "losses", stat, {N});
  }
};

// The head's matrix: the token embedding where the model ties them.   `embedding`: read only if tied
inline Tensor head_matrix(const UnitState& head, const UnitState& embedding, const ModelConfig& c) {
  return c.tied ? embedding.weight("wte.weight") : head.weight("lm_head.weight");
}

inline void head_forward(const HeadActivations& a, Tensor x, const UnitState& head, const UnitState& embedding,
                         const ModelConfig& c, Stream& stream) {
  layernorm_forward(a.ln, a.mean, a.rstd, x, head.weight("ln_f.weight"), head.weight("ln_f.bias"), c.norm_eps, stream);
  linear_forward(a.logits, a.ln, head_matrix(head, embedding, c), {}, stream);
}

// dx = gradient of x, from a.logits that hold their gradient already.
inline void head_backward(Tensor dx, const HeadActivations& a, Tensor x, const UnitState& head,
                          const UnitState& embedding, const ModelConfig& c, Arena& arena, Stream& stream) {
  auto scope = arena.scope();
  const Tensor dln = arena.alloc("temporary", "gradient of ln_f", x.dtype, x.shape);
  const Tensor dmatrix = c.tied ? embedding.gradient("wte.weight") : head.gradient("lm_head.weight");
  linear_backward_weight(dmatrix, {}, a.logits, a.ln, stream);
  linear_backward_input(dln, a.logits, head_matrix(head, embedding, c), stream);
  layernorm_backward(dx, head.gradient("ln_f.weight"), head.gradient("ln_f.bias"), dln, x, head.weight("ln_f.weight"),
                     a.mean, a.rstd, Accumulate::no, stream);
}

}  // namespace llmc
