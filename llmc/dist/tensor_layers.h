// tensor_layers.h: the layers that the ranks of a tensor-parallel group compute together (Shoeybi et al. 2019; with
// sequence parallelism Korthikanti et al. 2022), each with its forward beside its backward. A block, whose ranks have S
// of R rows between the products (parallel.h):
//
//   S rows:   x -> norm1 -.                          .-> + x -> norm2 -.                       .-> + -> out
//                      gather                     reduce           gather                   reduce
//   R rows:               `-> ColumnLinear -> attention -> RowLinear   `-> ColumnLinear -> RowLinear
//                             own heads         own inputs               own channels     own inputs
//
// The backward of one communicates like the forward of the other. Bytes that a rank sends, with A the size of R rows of
// C (padded) and f = (P - 1) / P:
//
//                                    sequence parallelism              without: all rows on every rank
//   ColumnLinear   forward           f A: gather x                     nothing
//                  backward_input    f A: reduce-scatter dx            2 f A: all-reduce dx
//                  backward_weight   f A: gather x again, if x is gone nothing
//   RowLinear      forward           f A: reduce-scatter out           2 f A: all-reduce out
//                  backward          f A: gather dout                  nothing; in two parts: each of them
//   Embedding      forward           f A                               2 f A
//                  backward          f A                               nothing
//   CrossEntropy                     3 (P - 1) numbers a row, never a row of logits
//   ProjectionNorm                   2 (P - 1) numbers a row, and as many in its backward
//
// (Gradients of shared parameters: sum_partial_gradients() in zero.h.)
#pragma once
#include <string>

#include "dist/parallel.h"
#include "dist/unit_state.h"
#include "ops/ops.h"

namespace llmc::parallel {

// The parameters of a linear layer in a unit: `name` and the `fused` - 1 after it, as one matrix (O, I), and a bias (O)
// or an empty tensor. They are looked up when they are used: weights and gradients may be there at different times.
struct LinearParameters {
  const UnitState& unit;
  const char* name;
  int fused = 1;

  Tensor weight() const { return unit.weight(name + std::string(".weight"), fused); }
  Tensor dweight() const { return unit.gradient(name + std::string(".weight"), fused); }
  Tensor bias() const { return has_bias() ? unit.weight(name + std::string(".bias"), fused) : Tensor{}; }
  Tensor dbias() const { return has_bias() ? unit.gradient(name + std::string(".bias"), fused) : Tensor{}; }
  bool has_bias() const { return unit.has(name + std::string(".bias")); }
};

// out = x weight^T + bias, for this rank's O outputs.   x, dx (S, I): rows of the residual stream; out, dout (R, O)
class ColumnLinear {
 public:
  ColumnLinear(const LinearParameters& parameters, const Group& group) : p_(parameters), g_(group) {}

  // room: where the gathered x (P S, I) stays, or an empty tensor
  void forward(Tensor out, Tensor x, Tensor room = {}) const {
    if (!g_.by_rows()) return linear_forward(out, x, p_.weight(), p_.bias(), g_.compute);
    auto scope = g_.arena.scope();
    if (room.empty()) room = room_for_rows("gathered", x, g_);
    gather_rows(room, x, out.shape[0], g_, [&](const Range& rows) {
      linear_forward(rows_of(out, rows), rows_of(room, rows), p_.weight(), p_.bias(), g_.compute);
    });
  }
  // dx = dout weight, summed over the ranks. meanwhile(): enqueues work that does not depend on the result.
  template <class Meanwhile>
  void backward_input(Tensor dx, Tensor dout, Meanwhile&& meanwhile) const {
    if (g_.size() == 1) {
      meanwhile();
      return linear_backward_input(dx, dout, p_.weight(), g_.compute);
    }
    auto product = [&](Tensor piece, const Range& rows) {
      linear_backward_input(piece, rows_of(dout, rows), p_.weight(), g_.compute);
    };
    reduce(dx, dout.shape[0], {}, g_, product, meanwhile);
  }
  void backward_input(Tensor dx, Tensor dout) const {
    backward_input(dx, dout, [] {});
  }
  // dweight, dbias +=.   gathered: all rows of x, if they are still there; otherwise they are gathered again
  void backward_weight(Tensor dout, Tensor x, Tensor gathered = {}) const {
    auto scope = g_.arena.scope();
    if (g_.by_rows() && gathered.empty()) {
      gathered = room_for_rows("gathered again", x, g_);
      gather_rows(gathered, x, dout.shape[0], g_, [](const Range&) {});
    }
    const Tensor rows = g_.by_rows() ? rows_of(gathered, {0, dout.shape[0]}) : x;
    linear_backward_weight(p_.dweight(), p_.dbias(), dout, rows, g_.compute);
  }
  // Both at once: x travels while dx is computed, and dx while dweight is.
  void backward(Tensor dx, Tensor dout, Tensor x, Tensor gathered = {}) const {
    auto scope = g_.arena.scope();
    Arrivals arrivals;
    const bool again = g_.by_rows() && gathered.empty();
    if (again) {
      gathered = room_for_rows("gathered again", x, g_);
      arrivals = begin_gather_rows(gathered, x, g_);
    }
    backward_input(dx, dout, [&] {
      if (again) as_they_arrive(arrivals, g_, [](int) {});
      backward_weight(dout, x, gathered);
    });
  }

 private:
  LinearParameters p_;
  const Group& g_;
};

// out = x weight^T + bias, summed over the ranks; the bias is added once.   x, dx (R, I): this rank's inputs; out, dout
// (S, O): rows of the residual stream
class RowLinear {
 public:
  RowLinear(const LinearParameters& parameters, const Group& group) : p_(parameters), g_(group) {}

  void forward(Tensor out, Tensor x) const {
    if (g_.size() == 1) return linear_forward(out, x, p_.weight(), p_.bias(), g_.compute);
    auto product = [&](Tensor piece, const Range& rows) {
      linear_forward(piece, rows_of(x, rows), p_.weight(), {}, g_.compute);
    };
    reduce(out, x.shape[0], p_.bias(), g_, product, [] {});
  }
  // dx = dout weight, for this rank's inputs.   room: where the gathered dout (P S, O) stays, or an empty tensor
  void backward_input(Tensor dx, Tensor dout, Tensor room = {}) const {
    if (!g_.by_rows()) return linear_backward_input(dx, dout, p_.weight(), g_.compute);
    auto scope = g_.arena.scope();
    if (room.empty()) room = room_for_rows("gathered gradient", dout, g_);
    gather_rows(room, dout, dx.shape[0], g_, [&](const Range& rows) {
      linear_backward_input(rows_of(dx, rows), rows_of(room, rows), p_.weight(), g_.compute);
    });
  }
  // dweight +=; dbias += the sum of this rank's rows of dout.   gathered: all rows of dout, if they are still there
  void backward_weight(Tensor dout, Tensor x, Tensor gathered = {}) const {
    if (!g_.by_rows()) return linear_backward_weight(p_.dweight(), p_.dbias(), dout, x, g_.compute);
    auto scope = g_.arena.scope();
    if (gathered.empty()) {
      gathered = room_for_rows("gathered gradient", dout, g_);
      gather_rows(gathered, dout, x.shape[0], g_, [](const Range&) {});
    }
    linear_backward_weight(p_.dweight(), {}, rows_of(gathered, {0, x.shape[0]}), x, g_.compute);
    if (p_.has_bias()) linear_backward_bias(p_.dbias(), dout, g_.compute);
  }
  // Both at once.
  void backward(Tensor dx, Tensor dout, Tensor x) const {
    auto scope = g_.arena.scope();
    const Tensor room = room_for_rows("gathered gradient", dout, g_);
    backward_input(dx, dout, room);
    backward_weight(dout, x, room);
  }

 private:
  LinearParameters p_;
  const Group& g_;
};

// The norm of whole query and key projections; each rank has some of their heads (ops_heads.h).   rstd (N, 2), equal on
// all ranks
class ProjectionNorm {
 public:
  ProjectionNorm(const UnitState& unit, const AttentionShape& shape, const Group& group)
      : unit_(unit), shape_(shape), g_(group) {}

  void forward(Tensor out, Tensor rstd, Tensor qkv, float eps) const {
    auto scope = g_.arena.scope();
    const Tensor sums =
        of_all_ranks(rstd.dtype, [&](Tensor part) { projection_norm_sums(part, qkv, shape_, g_.compute); });
    projection_norm_forward(out, rstd, qkv, q_weight(), k_weight(), sums, eps, shape_, shares(), g_.compute);
  }
  void backward(Tensor dqkv, Tensor qkv, Tensor rstd) const {
    auto scope = g_.arena.scope();
    const Tensor sums = of_all_ranks(rstd.dtype, [&](Tensor part) {
      projection_norm_backward_sums(part, dqkv, qkv, q_weight(), k_weight(), shape_, g_.compute);
    });
    projection_norm_backward(dqkv, unit_.gradient("attn.q_norm.weight"), unit_.gradient("attn.k_norm.weight"), qkv,
                             q_weight(), k_weight(), rstd, sums, shape_, shares(), g_.compute);
  }

 private:
  Tensor q_weight() const { return unit_.weight("attn.q_norm.weight"); }
  Tensor k_weight() const { return unit_.weight("attn.k_norm.weight"); }
  HeadShares shares() const { return {g_.size(), g_.rank(), g_.tensor().head_copies}; }
  // (P, N, 2): the results of sum(part (N, 2)) of all ranks.
  template <class Sum>
  Tensor of_all_ranks(DType dtype, Sum&& sum) const {
    const int64_t N = shape_.B * shape_.T;
    const Tensor all = g_.temporary("sums over the heads of all ranks", dtype, {g_.size() * N, 2});
    sum(rows_of(all, {N * g_.rank(), N}));
    all_gather(all, g_);
    return all.reshaped({g_.size(), N, 2});
  }

  const UnitState& unit_;
  AttentionShape shape_;
  const Group& g_;
};

// out, rows of the residual stream = wte[tokens] + wpe[positions]; each rank has some rows of wte.   tokens, positions:
// for all rows, padding included
class Embedding {
 public:
  Embedding(const UnitState& unit, const Group& group) : unit_(unit), g_(group) {}

  void forward(Tensor out, Tensor tokens, Tensor positions) const {
    const Tensor wte = unit_.weight("wte.weight"), wpe = has_positions() ? unit_.weight("wpe.weight") : Tensor{};
    if (g_.size() == 1) return embedding_forward(out, tokens, positions, wte, wpe, g_.compute);
    auto lookup = [&](Tensor piece, const Range& rows) {
      const Shape n{rows.size};
      embedding_forward(piece, tokens.slice(rows.begin, n), positions.slice(rows.begin, n), wte, {}, g_.compute,
                        part());
    };
    reduce(out, tokens.numel(), {}, g_, lookup, [] {});
    if (has_positions()) add_positions(out, own_rows(positions, out, g_), wpe, g_.compute);
  }
  // dwte, dwpe +=; dwpe: from the rows that this rank has
  void backward(Tensor dout, Tensor tokens, Tensor positions) const {
    const Tensor dwte = unit_.gradient("wte.weight"), dwpe = has_positions() ? unit_.gradient("wpe.weight") : Tensor{};
    if (g_.size() == 1) return embedding_backward(dwte, dwpe, dout, tokens, positions, g_.compute);
    auto scope = g_.arena.scope();
    const Tensor room = room_for_rows("gathered gradient", dout, g_);
    if (g_.by_rows()) gather_rows(room, dout, room.shape[0], g_, [](const Range&) {});
    embedding_backward(dwte, {}, g_.by_rows() ? room : dout, tokens, positions, g_.compute, part());
    if (has_positions()) add_positions_backward(dwpe, dout, own_rows(positions, dout, g_), g_.compute);
  }

 private:
  bool has_positions() const { return unit_.has("wpe.weight"); }
  Vocabulary part() const { return unit_.vocabulary("wte.weight"); }

  const UnitState& unit_;
  const Group& g_;
};

// cross_entropy() over a vocabulary of which this rank has a part.
struct CrossEntropy {
  Vocabulary part;
  const Group& group;

  // logits (N, V of this part, padded); losses (N), equal on all ranks
  void operator()(Tensor losses, Tensor logits, Tensor targets, double scale, Gradient gradient) const {
    const Group& g = group;
    if (g.size() == 1) return cross_entropy(losses, logits, targets, part.size, scale, gradient, g.compute);
    const int64_t N = logits.shape[0], P = g.size();
    auto scope = g.arena.scope();
    const Tensor stats = g.temporary("largest, sum, target", losses.dtype, {P * N, 3});
    cross_entropy_stats(rows_of(stats, {N * g.rank(), N}), logits, targets, part, g.compute);
    all_gather(stats, g);
    cross_entropy_merge(losses, logits, stats.reshaped({P, N, 3}), targets, part, scale, gradient, g.compute);
  }
};

// The logits (V of all parts, padded) of one row, gathered from the parts of all ranks.
inline Tensor gather_vocabulary(Tensor logits, const Group& g) {
  if (g.size() == 1) return logits;
  const Tensor all = g.temporary("logits of all ranks", logits.dtype, {g.size(), logits.numel()});
  copy(rows_of(all, {g.rank(), 1}), logits.reshaped({1, logits.numel()}), g.compute);
  all_gather(all, g);
  return all.reshaped({all.numel()});
}

}  // namespace llmc::parallel
