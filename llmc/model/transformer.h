// transformer.h: the block and the head of a model, forward and backward, as sequences of ops.
//
// A block (pre-norm):   x1 = x  + proj(attention(heads(qkv(norm1(x)))))     heads: query-key norm, rotary positions
//                       x2 = x1 + down(activation(up(norm2(x1))))         activation: GELU; SwiGLU of gate and up
//                 or    x2 = x1 + experts(norm2(x1))                      experts.h
// config.h says which of these a model has. Sizes, and the linear layers as
// parts of a block: layer.h. What --tp divides and sends: parallel/tensor_layers.h.
#pragma once
#include "model/experts.h"
#include "model/slice_attention.h"

namespace llmc {

// proj(attention(heads(qkv(norm1)))): the heads of a rank, over the rows of its sequences.
class Attention : Layer {
 public:
  explicit Attention(const Layer& layer) : Layer(layer) {}

  // a.attention, without the last product, which the backward does not need.
  void forward() const {
    qkv().forward(a.qkv, a.norm1, gathered.norm1);
    heads();
    attend();
  }
  // out = the projection, plus the residual if there is one
  void output(Tensor out, Tensor residual = {}) const { proj(residual).forward(out, a.attention); }
  // a.heads = the queries, keys and values that attention reads, from a.qkv; in place without query-key norm.
  void heads() const {
    const QkNorm norm = config.family.qk_norm;
    if (norm == QkNorm::by_head)
      return qk_norm_forward(a.heads, a.heads_rstd, a.qkv, q_norm().weight(), k_norm().weight(), rotary(),
                             config.norm_eps, shape(), stream());
    if (norm == QkNorm::by_projection) projection_norm().forward(a.heads, a.heads_rstd, a.qkv, config.norm_eps);
    if (rotary()) rotary_embedding(a.heads, *rotary(), shape(), Turn::forward, stream());
  }

  struct Gradients {
    Tensor qkv, attention;  // (N, (Hq + 2 Hkv) D) (N, Hq D)
  };
  // room (S, C): where the gradient of attention is, if it fits
  Gradients gradients(Tensor room) const {
    return {later == nullptr ? like("gradient of qkv", a.qkv) : later->qkv,
            a.attention.shape == room.shape ? room : like("gradient of attention", a.attention)};
  }
  // dx = the gradient of norm1, from dout, that of the residual stream after it.
  void backward(Tensor dx, Tensor dout, const Gradients& d) const {
    Layer::backward(proj(), d.attention, dout, a.attention, &OutputGradients::middle);
    if (sequences.slice) slice_attention().backward(d.qkv, d.attention, tensors());
    else parallel::attention_backward(d.qkv, d.attention, tensors(), shape(), sequences.context, group);
    heads_backward(d.qkv);
    Layer::backward(qkv(), dx, d.qkv, a.norm1, gathered.norm1);
  }
  void backward_weight() const {
    proj().backward_weight(later->middle, a.attention);
    qkv().backward_weight(later->qkv, a.norm1);
  }

 private:
  parallel::ColumnLinear qkv() const { return keeping(column("attn.q", 3), a.norm1_in_fp8); }
  parallel::RowLinear proj(Tensor residual = {}) const { return row("attn.proj", residual); }
  AttentionShape shape() const { return attention_shape(config, sequences.shape); }
  parallel::AttentionTensors tensors() const {
    return {a.attention, a.lse, a.heads, sequences.boundaries(), sequences.largest_logits};
  }
  SliceAttention slice_attention() const { return {a.slice_keys, shape(), *sequences.slice, group}; }
  parallel::Parameters q_norm() const { return {unit, "attn.q_norm"}; }
  parallel::Parameters k_norm() const { return {unit, "attn.k_norm"}; }
  parallel::ProjectionNorm projection_norm() const { return {q_norm(), k_norm(), shape(), group}; }
  std::optional<RotaryPositions> rotary() const {
    if (config.family.positions == Positions::learned) return {};
    return RotaryPositions{sequences.rotary_table, sequences.positions};
  }

  void attend() const {
    if (const auto& cache = sequences.cache) {
      cache_append(cache->keys_values, a.heads, cache->filled, shape(), stream());
      return attention_forward(a.attention, {}, a.heads, cache->keys_values, {},
                               continuation(shape(), cache->filled, cache->keys_values.shape[0]), stream());
    }
    if (sequences.slice) slice_attention().forward(tensors());
    else parallel::attention_forward(tensors(), shape(), sequences.context, group);
  }

  void heads_backward(Tensor dqkv) const {
    const QkNorm norm = config.family.qk_norm;
    if (norm == QkNorm::by_head)
      return qk_norm_backward(dqkv, q_norm().dweight(), k_norm().dweight(), a.qkv, q_norm().weight(), k_norm().weight(),
                              a.heads_rstd, rotary(), shape(), stream());
    if (rotary()) rotary_embedding(dqkv, *rotary(), shape(), Turn::backward, stream());
    if (norm == QkNorm::by_projection) projection_norm().backward(dqkv, a.qkv, a.heads_rstd);
  }
};

// down(activation(up(norm2))): the channels of a rank.
class FeedForward : Layer {
 public:
  explicit FeedForward(const Layer& layer) : Layer(layer) {}

  // Without the last product, which the backward does not need.
  void forward() const {
    up().forward(a.up, a.norm2, gathered.norm2);
    if (!in_products() && !activates_in_fp8()) activation();
  }
  void output(Tensor out, Tensor residual = {}) const {
    if (!activates_in_fp8()) return down(residual).forward(out, a.activated);
    auto scope = stream().scratch().scope();
    const parallel::RowLinear linear = down();
    linear.forward(out, swiglu_forward_in_fp8(linear.p.kept_input, a.up, sequences.linear, stream()));
  }
  void recompute(Recompute) const { activation(); }

  // dx = the gradient of norm2, from dout, that of the output. The caller has opened a scope for temporaries.
  void backward(Tensor dx, Tensor dout) const {
    const bool whole = later == nullptr;
    // (N, F); where the forward has kept it in fp8, nobody reads `activated` any more
    Tensor dactivated = !whole && !gated()                   ? later->up
                        : !a.activated_in_fp8.values.empty() ? a.activated
                                                             : like("gradient of activated", a.activated);
    dactivated.name = "gradient of activated";
    if (whole && group.size() == 1 && in_fp8()) {
      down().backward(dactivated, dout, a.activated);
      auto scope = stream().scratch().scope();
      return up().backward(dx, swiglu_backward_in_fp8(dactivated, a.up, sequences.linear, stream()), a.norm2);
    }
    const Tensor dup = !whole ? later->up : gated() ? like("gradient of up", a.up) : dactivated;
    Layer::backward(down(), dactivated, dout, a.activated, &OutputGradients::out);
    if (gated()) swiglu_backward(dup, dactivated, a.up, stream());
    else if (in_products()) {
    }  // down's product has computed dup
    else if (const Tensor dbias = up().p.dbias(); dbias.empty())
      gelu_backward(dup, dactivated, a.up, stream());
    else gelu_backward_with_bias(dup, dbias, dactivated, a.up, stream());
    Layer::backward(up(), dx, dup, a.norm2, gathered.norm2);
  }
  void backward_weight() const {
    down().backward_weight(later->out, a.activated);
    up().backward_weight(later->up, a.norm2);
  }

 private:
  bool gated() const { return config.family.mlp == Mlp::swiglu; }
  // Whether SwiGLU and its gradient are written in fp8 at once.
  bool in_fp8() const { return gated() && swiglu_writes_fp8(sequences.linear, a.up.shape[1] / 2, stream().device()); }
  // An inspector of numbers is to see what is rounded.
  bool activates_in_fp8() const { return !a.activated_in_fp8.values.empty() && in_fp8() && !stream().is_inspected(); }
  // Whether the products of up and down compute GELU: in layouts that --gelu cublaslt is for, and not in a text that is
  // being generated, of few rows.
  bool in_products() const {
    const Tensor& x = a.activated;  // which the weight part has, too
    return !gated() && stream().device().gelu_in_products && x.dtype == DType::bf16 && x.shape[1] % 8 == 0 &&
           group.size() == 1 && sequences.linear == Operands::as_stored && !sequences.cache;
  }
  parallel::ColumnLinear up() const {
    parallel::ColumnLinear linear = keeping(gated() ? column("mlp.gate", 2) : column("mlp.up"), a.norm2_in_fp8);
    linear.p.bias_apart = !gated() && !in_products();  // with GELU's backward
    if (in_products()) linear.activated = a.activated;
    return linear;
  }
  parallel::RowLinear down(Tensor residual = {}) const {
    parallel::RowLinear linear = keeping(row("mlp.down", residual), a.activated_in_fp8);
    if (in_products()) linear.before_gelu = a.up;
    return linear;
  }
  void activation() const {
    if (gated()) swiglu_forward(a.activated, a.up, stream());
    else gelu_forward(a.activated, a.up, stream());
  }
};

class Block : Layer {
 public:
  explicit Block(const Layer& layer) : Layer(layer) {}

  // a.out = the block's output for x (S, C).
  void forward(Tensor x) const {
    interior(x);
    if (adds_in_products() && !has_experts()) return FeedForward(*this).output(a.out, a.middle);
    auto scope = group.arena.scope();
    const Tensor branch = like("residual branch", a.out);
    feed_forward([&](const auto& f) { f.output(branch); });  // down, or the sum of experts
    residual_forward(a.out, a.middle, branch, stream());     // x2 = x1 + branch
  }

  // Recomputes the activations that the forward did not keep.
  void recompute(Tensor x, Recompute recompute) const {
    if (recompute == Recompute::none) return;
    if (recompute == Recompute::block) return interior(x);
    if (recompute == Recompute::norm) {
      norm1().forward(a.norm1, x);
      if (config.family.qk_norm != QkNorm::none) attention().heads();
      norm2().forward(a.norm2, a.middle);
    }
    feed_forward([&](const auto& f) { f.recompute(recompute); });
  }

  // dx: on entry the gradient of a.out, on return that of x; the gradients of the unit += ..., or with `later` only
  // those of layers that are not linear.
  void backward(Tensor dx, Tensor x) const {
    auto scope = group.arena.scope();
    RowSumsTogether sums(stream());
    const Tensor dbranch = like("gradient of a branch", x);  // (S, C)
    const Attention::Gradients d = attention().gradients(dbranch);
    feed_forward([&](const auto& f) { f.backward(dbranch, dx); });
    norm2().backward(dx, dbranch, a.middle, Accumulate::yes);
    attention().backward(dbranch, dx, d);
    norm1().backward(dx, dbranch, x, Accumulate::yes);
    sums.add();
  }
  // The weight part: the gradients of the linear layers += ..., from the inputs of their products in `a` and the
  // gradients of their outputs in `later`.
  void backward_weight() const {
    RowSumsTogether sums(stream());
    feed_forward([](const auto& f) { f.backward_weight(); });
    attention().backward_weight();
    sums.add();
  }

 private:
  NormLayer norm1() const { return {config, {unit, "ln1"}, a.norm1_mean, a.norm1_rstd, stream()}; }
  NormLayer norm2() const { return {config, {unit, "ln2"}, a.norm2_mean, a.norm2_rstd, stream()}; }
  Attention attention() const { return Attention(*this); }
  template <class Use>
  void feed_forward(Use&& use) const {
    if (has_experts()) use(ExpertLayer(*this));
    else use(FeedForward(*this));
  }

  // The forward without the last product (or sum of experts) and residual addition, which the backward does not need.
  void interior(Tensor x) const {
    norm1().forward(a.norm1, x);
    attention().forward();  // attention(heads(qkv(norm1)))
    if (adds_in_products()) {
      attention().output(a.middle, x);  // x1 = x + proj
      norm2().forward(a.norm2, a.middle);
    } else {
      auto scope = group.arena.scope();
      const Tensor branch = like("residual branch", x);
      attention().output(branch);                     // proj
      norm2().forward(a.norm2, a.middle, x, branch);  // x1 = x + branch, and its norm
    }
    feed_forward([](const auto& f) { f.forward(); });  // activation(up(norm2)), or experts
  }
};

// The norm before the head, of all rows of the residual stream that a rank has.
struct HeadNorm {
  Tensor out, mean, rstd;  // (S, C) (S) (S); no mean with rmsnorm

  HeadNorm(const ModelConfig& c, Tensor room, Arena& arena) : out(room) {
    const DType stat = accumulator_of(room.dtype);
    const int64_t S = room.shape[0];
    out.name = "ln_f";
    if (c.family.norm == Norm::layernorm) mean = arena.alloc("head", "ln_f mean", stat, {S});
    rstd = arena.alloc("head", "ln_f rstd", stat, {S});
  }
};

// The logits have the rows of all ranks: with sequence parallelism N = P S of them, ordered by rank.
struct Logits {
  Tensor gathered;  // (N, C); an empty tensor without sequence parallelism
  Tensor values;    // (N, V padded)

  // c: this rank's part of the model; S: rows of the norm
  Logits(const ModelConfig& c, int64_t S, const TensorParallel& tensor, DType dtype, Arena& arena) {
    const int64_t N = tensor.by_rows() ? S * tensor.ranks : S;
    if (tensor.by_rows()) gathered = arena.alloc("head", "gathered rows of the head", dtype, {N, c.n_embd});
    values = arena.alloc("head", "logits", dtype, {N, c.padded_vocab()});
  }
};

// logits = matrix(norm(x)), and their loss. The matrix is the head's own or, if tied, the token embedding, which is
// then read from `embedding`.
struct Head {
  const ModelConfig& config;
  const UnitState &unit, &embedding;
  const parallel::Group& g;

  void forward(const HeadNorm& n, Tensor x) const { norm(n).forward(n.out, x); }
  // norm (S, C): some rows of it
  void forward(const Logits& logits, Tensor norm) const { matrix().forward(logits.values, norm, logits.gathered); }
  // losses (N). With Gradient::yes the logits become their gradient, times `scale`.
  void loss(Tensor losses, const Logits& logits, Tensor targets, double scale, Gradient gradient,
            const HeadZLoss& z = {}) const {
    const parallel::Parameters p = matrix().p;
    parallel::CrossEntropy{p.unit.vocabulary(p.full(".weight")), g}(losses, logits.values, targets, scale, gradient, z);
  }
  // dnorm = ..., from the gradient of the logits; the matrix's gradient += ...
  void backward(Tensor dnorm, const Logits& logits, Tensor norm) const {
    matrix().backward(dnorm, logits.values, norm, logits.gathered);
  }
  // dx = ..., which may lie where the norm did; the norm's gradients += ...
  void backward(Tensor dx, const HeadNorm& n, Tensor dnorm, Tensor x) const {
    norm(n).backward(dx, dnorm, x, Accumulate::no);
  }

  parallel::ColumnLinear matrix() const {
    if (config.tied) return {{embedding, "wte"}, g};
    return {{unit, "lm_head"}, g};
  }
  NormLayer norm(const HeadNorm& n) const { return {config, {unit, "ln_f"}, n.mean, n.rstd, g.compute}; }
};

}  // namespace llmc
