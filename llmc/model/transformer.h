// transformer.h: the model: embedding, block and head, forward and backward, as sequences of ops.
//
// A block (pre-norm):   x1 = x  + proj(attention(heads(qkv(norm1(x)))))     heads: query-key norm, rotary positions
//                       x2 = x1 + down(activation(up(norm2(x1))))         activation: GELU; SwiGLU of gate and up
//                 or    x2 = x1 + experts(norm2(x1))                      experts.h
// config.h says which of these a model has. Sizes: N = B T rows, C channels, F feed-forward, Hq query heads, Hkv
// key-value heads, D head size, V vocabulary (stored padded). With tensor parallelism Hq, Hkv, F and V are those of
// this rank (part_of() in config.h), and a rank may have S of the N rows of the residual stream (dist/parallel.h). With
// context parallelism a rank has N = B T / cp rows, some slices of each sequence (dist/context_attention.h).
#pragma once
#include <optional>
#include <string>
#include <vector>

#include "device/arena.h"
#include "dist/context_attention.h"
#include "dist/parallel.h"
#include "dist/unit_state.h"
#include "model/activations.h"
#include "model/config.h"
#include "model/experts.h"
#include "model/slice_attention.h"
#include "ops/ops.h"

namespace llmc {

// Whether packed documents attend to each other.
enum class Documents : uint8_t { together, apart };

// The inputs that all blocks share.
struct Sequences {
  BatchShape shape;     // of the rows that this rank has
  Tensor positions;     // (N) int32
  Tensor rotary_table;  // (positions, D); empty without rotary positions
  Documents documents = Documents::together;
  ContextParallel context = {};
  Tensor all_positions = {};               // of whole sequences, if attention needs them
  std::optional<SequenceRows> slice = {};  // the tokens of this slice; none: whole sequences
  Routing routing = {};                    // for a layer with experts
  Tensor boundaries() const {              // for attention
    if (documents == Documents::together) return {};
    return all_positions.empty() ? positions : all_positions;
  }
};

// The inputs of a micro-batch of N rows, on the device. Positions are an input, not the row's index: they count within
// the whole sample, and with Documents::apart restart at 0 in each document.
struct MicroBatch {
  Tensor tokens, targets, positions;  // (N) int32; with sequence parallelism padded to a multiple of the ranks
  Tensor all_positions;               // for `all_rows` rows of whole sequences; an empty tensor if 0
  int64_t rows;                       // without the padding
  MicroBatch(int64_t N, int64_t all_rows, const TensorParallel& tensor, Arena& arena) : rows(N) {
    const int64_t padded = tensor.by_rows() ? tensor.padded_rows(N) : N;
    auto input = [&](const char* name, int64_t n) { return arena.alloc("inputs", name, DType::int32, {n}); };
    tokens = input("tokens", padded);
    targets = input("targets", padded);
    positions = input("positions", padded);
    if (all_rows > 0) all_positions = input("positions of whole sequences", all_rows);
  }
};

inline AttentionShape attention_shape(const ModelConfig& c, const BatchShape& s) {
  return {.B = s.B, .T = s.T, .Hq = c.n_head, .Hkv = c.n_kv_head, .D = c.head_size};
}

// The inputs of a block's column-parallel products, gathered from all ranks by its recomputation and kept for its
// backward.
struct GatheredRows {
  Tensor norm1, norm2;  // (P S, C), or empty tensors
};

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

// sum = a + b, and its norm.
inline void residual_norm(Tensor out, Tensor mean, Tensor rstd, Tensor sum, Tensor a, Tensor b, const std::string& name,
                          const UnitState& unit, const ModelConfig& c, Stream& stream) {
  const Tensor weight = unit.weight(name + ".weight");
  if (c.family.norm == Norm::rmsnorm) residual_rmsnorm_forward(out, rstd, sum, a, b, weight, c.norm_eps, stream);
  else residual_layernorm_forward(out, mean, rstd, sum, a, b, weight, unit.weight(name + ".bias"), c.norm_eps, stream);
}

inline std::optional<RotaryPositions> rotary_of(const ModelConfig& c, const Sequences& s) {
  if (c.family.positions == Positions::learned) return {};
  return RotaryPositions{s.rotary_table, s.positions};
}
// a.heads = the queries, keys and values that attention reads, from a.qkv; in place without query-key norm.
inline void heads(const BlockActivations& a, const UnitState& unit, const ModelConfig& c, const Sequences& s,
                  const parallel::Group& p) {
  const AttentionShape shape = attention_shape(c, s.shape);
  const auto rotary = rotary_of(c, s);
  if (c.family.qk_norm != QkNorm::none) {
    const Tensor q_weight = unit.weight("attn.q_norm.weight"), k_weight = unit.weight("attn.k_norm.weight");
    if (c.family.qk_norm == QkNorm::by_head)
      return qk_norm_forward(a.heads, a.heads_rstd, a.qkv, q_weight, k_weight, rotary, c.norm_eps, shape, p.compute);
    parallel::projection_norm(a.heads, a.heads_rstd, a.qkv, q_weight, k_weight, c.norm_eps, shape, p);
  }
  if (rotary) rotary_embedding(a.heads, *rotary, shape, Turn::forward, p.compute);
}
inline void heads_backward(Tensor dqkv, const BlockActivations& a, const UnitState& unit, const ModelConfig& c,
                           const Sequences& s, const parallel::Group& p) {
  const AttentionShape shape = attention_shape(c, s.shape);
  const auto rotary = rotary_of(c, s);
  if (rotary && c.family.qk_norm != QkNorm::by_head) rotary_embedding(dqkv, *rotary, shape, Turn::backward, p.compute);
  if (c.family.qk_norm == QkNorm::none) return;
  const Tensor q_weight = unit.weight("attn.q_norm.weight"), k_weight = unit.weight("attn.k_norm.weight"),
               dq_weight = unit.gradient("attn.q_norm.weight"), dk_weight = unit.gradient("attn.k_norm.weight");
  if (c.family.qk_norm == QkNorm::by_head)
    return qk_norm_backward(dqkv, dq_weight, dk_weight, a.qkv, q_weight, k_weight, a.heads_rstd, rotary, shape,
                            p.compute);
  parallel::projection_norm_backward(dqkv, dq_weight, dk_weight, a.qkv, q_weight, k_weight, a.heads_rstd, shape, p);
}

// The weight of a linear layer (parameter `name` and the `fused` - 1 adjacent ones), its bias if it has one, and their
// gradients.
struct Linear {
  Tensor weight, bias;
  Linear(const std::string& name, int fused, const UnitState& unit)
      : weight(unit.weight(name + ".weight", fused)),
        bias(unit.has(name + ".bias") ? unit.weight(name + ".bias", fused) : Tensor{}) {}
};
struct LinearGradients {
  Tensor weight, bias;
  LinearGradients(const std::string& name, int fused, const UnitState& unit)
      : weight(unit.gradient(name + ".weight", fused)),
        bias(unit.has(name + ".bias") ? unit.gradient(name + ".bias", fused) : Tensor{}) {}
};

// The MLP's first product: the name of its first parameter, and how many form one matrix.
struct MlpInput {
  const char* name;
  int fused;
  explicit MlpInput(const ModelConfig& c)
      : name(c.family.mlp == Mlp::swiglu ? "mlp.gate" : "mlp.up"), fused(c.family.mlp == Mlp::swiglu ? 2 : 1) {}
};

// The end of a residual branch (attention or MLP): add(linear(input)).   like (S, C): the residual stream
template <class Add>
void end_branch(const Tensor& like, Tensor input, const char* name, const UnitState& unit, const parallel::Group& p,
                Add&& add) {
  auto scope = p.arena.scope();
  const Tensor branch = p.temporary("residual branch", like.dtype, like.shape);
  const Linear linear(name, 1, unit);
  parallel::row_linear(branch, input, linear.weight, linear.bias, p);
  add(branch);
}
// The first product of a branch.   x (S, C); room: where the gathered x stays, or an empty tensor
inline void begin_branch(Tensor out, Tensor x, const char* name, int fused, Tensor room, const UnitState& unit,
                         const parallel::Group& p) {
  const Linear linear(name, fused, unit);
  parallel::column_linear(out, x, linear.weight, linear.bias, room, p);
}

inline void norm1(const BlockActivations& a, Tensor x, const UnitState& unit, const ModelConfig& c, Stream& stream) {
  norm_forward(a.norm1, a.norm1_mean, a.norm1_rstd, x, "ln1", unit, c, stream);
}
inline void norm2(const BlockActivations& a, const UnitState& unit, const ModelConfig& c, Stream& stream) {
  norm_forward(a.norm2, a.norm2_mean, a.norm2_rstd, a.middle, "ln2", unit, c, stream);
}
inline bool has_experts(const UnitState& unit) { return unit.has("moe.router.weight"); }
inline void activation(const BlockActivations& a, const UnitState& unit, const ModelConfig& c, Stream& stream) {
  if (has_experts(unit)) expert_activation(a.experts, stream);
  else if (c.family.mlp == Mlp::swiglu) swiglu_forward(a.activated, a.up, stream);
  else gelu_forward(a.activated, a.up, stream);
}

// The end of the feed-forward, and the residual addition.
inline void add_feed_forward(const BlockActivations& a, const UnitState& unit, const Sequences& s,
                             const parallel::Group& p) {
  const auto add = [&](Tensor branch) { residual_forward(a.out, a.middle, branch, p.compute); };
  if (!has_experts(unit)) return end_branch(a.middle, a.activated, "mlp.down", unit, p, add);
  auto scope = p.arena.scope();
  const Tensor branch = p.temporary("residual branch", a.out.dtype, a.out.shape);
  experts_sum(branch, a.experts, unit, s.routing, p);
  add(branch);
}

// A block without its last product (or sum of experts) and residual addition, which its backward does not need.
// `attend`: attention over whole sequences, or against a cache.
template <class Attend>
void block_interior(const BlockActivations& a, Tensor x, const GatheredRows& gathered, const UnitState& unit,
                    const ModelConfig& c, const Sequences& s, Attend&& attend, const parallel::Group& p) {
  norm1(a, x, unit, c, p.compute);
  begin_branch(a.qkv, a.norm1, "attn.q", 3, gathered.norm1, unit, p);
  heads(a, unit, c, s, p);
  attend();
  end_branch(x, a.attention, "attn.proj", unit, p, [&](Tensor branch) {
    residual_norm(a.norm2, a.norm2_mean, a.norm2_rstd, a.middle, x, branch, "ln2", unit, c, p.compute);
  });
  if (has_experts(unit)) return experts_interior(a.experts, a.norm2, gathered.norm2, unit, c, s.routing, p);
  const MlpInput mlp(c);
  begin_branch(a.up, a.norm2, mlp.name, mlp.fused, gathered.norm2, unit, p);
  activation(a, unit, c, p.compute);
}
inline void block_interior(const BlockActivations& a, Tensor x, const GatheredRows& gathered, const UnitState& unit,
                           const ModelConfig& c, const Sequences& s, const parallel::Group& p) {
  auto attend = [&] {
    const AttentionShape shape = attention_shape(c, s.shape);
    if (s.slice)
      slice_attention_forward(a.attention, a.lse, a.heads, a.slice_keys, s.boundaries(), shape, *s.slice, p.compute);
    else parallel::attention_forward(a.attention, a.lse, a.heads, s.boundaries(), shape, s.context, p);
  };
  block_interior(a, x, gathered, unit, c, s, attend, p);
}

}  // namespace detail

// a.out = the block's output for x (S, C).
inline void block_forward(const BlockActivations& a, Tensor x, const UnitState& unit, const ModelConfig& c,
                          const Sequences& s, const parallel::Group& p) {
  detail::block_interior(a, x, {}, unit, c, s, p);
  detail::add_feed_forward(a, unit, s, p);
}

// The same for the rows of one sequence from `begin` on. `cache` (rows, 2 Hkv D) holds the keys and values of earlier
// rows; those of the new rows are appended.
inline void block_forward_cached(const BlockActivations& a, Tensor x, Tensor cache, int64_t begin,
                                 const UnitState& unit, const ModelConfig& c, const Sequences& s,
                                 const parallel::Group& p) {
  const AttentionShape shape = attention_shape(c, s.shape);
  auto attend = [&] {
    cache_append(cache, a.heads, begin, shape, p.compute);
    attention_forward(a.attention, {}, a.heads, cache, {}, continuation(shape, begin, cache.shape[0]), p.compute);
  };
  detail::block_interior(a, x, {}, unit, c, s, attend, p);
  detail::add_feed_forward(a, unit, s, p);
}

// Recomputes the activations that the forward of the block did not keep. gathered: room for rows gathered on the way.
inline void block_recompute(const BlockActivations& a, Tensor x, const GatheredRows& gathered, Recompute recompute,
                            const UnitState& unit, const ModelConfig& c, const Sequences& s, const parallel::Group& p) {
  if (recompute == Recompute::block) return detail::block_interior(a, x, gathered, unit, c, s, p);
  if (recompute == Recompute::norm) {
    detail::norm1(a, x, unit, c, p.compute);
    if (c.family.qk_norm != QkNorm::none) detail::heads(a, unit, c, s, p);
    detail::norm2(a, unit, c, p.compute);
    if (detail::has_experts(unit)) detail::recompute_rows(a.experts, a.norm2, c, s.routing, p.compute);
  }
  if (recompute != Recompute::none) detail::activation(a, unit, c, p.compute);
}

// dx: on entry the gradient of a.out, on return that of x; the gradients of the unit += ... gathered: from
// block_recompute(). With `later` only the input part runs: it sets `later`, and leaves the gradients of the linear
// layers to block_backward_weight(): the same bits.
inline void block_backward(Tensor dx, const OutputGradients& later, const BlockActivations& a, Tensor x,
                           const GatheredRows& gathered, const UnitState& unit, const ModelConfig& c,
                           const Sequences& s, const parallel::Group& p) {
  auto scope = p.arena.scope();
  const bool whole = later.empty(), gated = c.family.mlp == Mlp::swiglu, sparse = detail::has_experts(unit);
  auto temporary = [&](const char* name, const Shape& shape) { return p.temporary(name, x.dtype, shape); };
  const Tensor dbranch = temporary("gradient of a branch", x.shape);                  // (S, C)
  const Tensor dqkv = whole ? temporary("gradient of qkv", a.qkv.shape) : later.qkv;  // (N, (Hq + 2 Hkv) D)
  const Tensor dactivated = sparse           ? Tensor{}
                            : whole || gated ? temporary("gradient of activated", a.activated.shape)
                                             : later.up;  // (N, F)
  const Tensor dup = sparse || !whole ? later.up : gated ? temporary("gradient of up", a.up.shape) : dactivated;
  const Tensor dattention =
      a.attention.shape == x.shape ? dbranch : temporary("gradient of attention", a.attention.shape);
  const AttentionShape shape = attention_shape(c, s.shape);
  Stream& stream = p.compute;
  auto row_backward = [&](Tensor dinput, Tensor input, const char* name, Tensor dout_later) {
    const Tensor weight = detail::Linear(name, 1, unit).weight;
    if (!whole) {
      copy(dout_later, dx, stream);
      return parallel::row_linear_backward_input(dinput, dx, weight, {}, p);
    }
    const detail::LinearGradients d(name, 1, unit);
    parallel::row_linear_backward(dinput, d.weight, d.bias, dx, input, weight, p);
  };
  auto column_backward = [&](Tensor dout, Tensor input, Tensor all_rows, const char* name, int fused) {
    const Tensor weight = detail::Linear(name, fused, unit).weight;
    if (!whole) return parallel::column_linear_backward_input(dbranch, dout, weight, p, [] {});
    const detail::LinearGradients d(name, fused, unit);
    parallel::column_linear_backward(dbranch, d.weight, d.bias, dout, input, all_rows, weight, p);
  };

  if (sparse) {
    detail::experts_backward(dbranch, dx, whole ? nullptr : &later.experts, a.experts, a.norm2, gathered.norm2, unit, c,
                             s.routing, p);
  } else {
    row_backward(dactivated, a.activated, "mlp.down", later.out);
    if (gated) swiglu_backward(dup, dactivated, a.up, stream);
    else gelu_backward(dup, dactivated, a.up, stream);
    const detail::MlpInput mlp(c);
    column_backward(dup, a.norm2, gathered.norm2, mlp.name, mlp.fused);
  }
  detail::norm_backward(dx, dbranch, a.middle, a.norm2_mean, a.norm2_rstd, "ln2", unit, c, Accumulate::yes, stream);

  row_backward(dattention, a.attention, "attn.proj", later.middle);
  if (s.slice)
    slice_attention_backward(dqkv, dattention, a.attention, a.heads, a.lse, a.slice_keys, s.boundaries(), shape,
                             *s.slice, p);
  else parallel::attention_backward(dqkv, dattention, a.attention, a.heads, a.lse, s.boundaries(), shape, s.context, p);
  detail::heads_backward(dqkv, a, unit, c, s, p);
  column_backward(dqkv, a.norm1, gathered.norm1, "attn.q", 3);
  detail::norm_backward(dx, dbranch, x, a.norm1_mean, a.norm1_rstd, "ln1", unit, c, Accumulate::yes, stream);
}

// The weight part: the gradients of the linear layers += ..., from the inputs of their products in `a` and the
// gradients of their outputs. Needs no weights.
inline void block_backward_weight(const OutputGradients& d, const BlockActivations& a, const UnitState& unit,
                                  const ModelConfig& c, const Sequences& s, const parallel::Group& p) {
  auto row = [&](Tensor dout, Tensor input, const char* name) {
    const detail::LinearGradients g(name, 1, unit);
    parallel::row_linear_backward_weight(g.weight, g.bias, dout, input, {}, p);
  };
  auto column = [&](Tensor dout, Tensor input, const char* name, int fused) {
    const detail::LinearGradients g(name, fused, unit);
    parallel::column_linear_backward_weight(g.weight, g.bias, dout, input, p);
  };
  if (detail::has_experts(unit)) {
    detail::experts_backward_weight(d.experts, a.experts, a.norm2, {}, unit, c, s.routing, p);
  } else {
    const detail::MlpInput mlp(c);
    row(d.out, a.activated, "mlp.down");
    column(d.up, a.norm2, mlp.name, mlp.fused);
  }
  row(d.middle, a.attention, "attn.proj");
  column(d.qkv, a.norm1, "attn.q", 3);
}

// logits = head(norm(x)). The logits have the rows of all ranks: with sequence parallelism N = P S of them, ordered by
// rank.
struct HeadActivations {
  Tensor norm, mean, rstd;  // (S, C) (S) (S); no mean with rmsnorm
  Tensor gathered;          // (N, C); an empty tensor without sequence parallelism
  Tensor logits;            // (N, V padded)
  Tensor losses;            // (N)

  // c: this rank's part of the model; S: rows of x
  HeadActivations(const ModelConfig& c, int64_t S, const TensorParallel& tensor, DType dtype, Arena& arena) {
    const DType stat = accumulator_of(dtype);
    const int64_t N = tensor.by_rows() ? S * tensor.ranks : S;
    norm = arena.alloc("head", "ln_f", dtype, {S, c.n_embd});
    if (c.family.norm == Norm::layernorm) mean = arena.alloc("head", "ln_f mean", stat, {S});
    rstd = arena.alloc("head", "ln_f rstd", stat, {S});
    if (tensor.by_rows()) gathered = arena.alloc("head", "gathered rows of the head", dtype, {N, c.n_embd});
    logits = arena.alloc("head", "logits", dtype, {N, c.padded_vocab()});
    losses = arena.alloc("head", "losses", stat, {N});
  }
};

// The head's matrix: the token embedding if tied.   `embedding`: read only if tied
inline Tensor head_matrix(const UnitState& head, const UnitState& embedding, const ModelConfig& c) {
  return c.tied ? embedding.weight("wte.weight") : head.weight("lm_head.weight");
}

inline void head_forward(const HeadActivations& a, Tensor x, const UnitState& head, const UnitState& embedding,
                         const ModelConfig& c, const parallel::Group& p) {
  detail::norm_forward(a.norm, a.mean, a.rstd, x, "ln_f", head, c, p.compute);
  parallel::column_linear(a.logits, a.norm, head_matrix(head, embedding, c), {}, a.gathered, p);
}

// dx = ..., from a.logits, which already hold their gradient; the weight gradients += ...
inline void head_backward(Tensor dx, const HeadActivations& a, Tensor x, const UnitState& head,
                          const UnitState& embedding, const ModelConfig& c, const parallel::Group& p) {
  auto scope = p.arena.scope();
  const Tensor dnorm = p.temporary("gradient of ln_f", x.dtype, x.shape);
  const Tensor dmatrix = c.tied ? embedding.gradient("wte.weight") : head.gradient("lm_head.weight");
  parallel::column_linear_backward(dnorm, dmatrix, {}, a.logits, a.norm, a.gathered, head_matrix(head, embedding, c),
                                   p);
  detail::norm_backward(dx, dnorm, x, a.mean, a.rstd, "ln_f", head, c, Accumulate::no, p.compute);
}

}  // namespace llmc
