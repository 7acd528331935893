// tensor_layers.h: the layers that the ranks of a tensor-parallel group compute together (Shoeybi et al. 2019; with
// sequence parallelism Korthikanti et al. 2022), each with its forward beside its backward. A block, whose ranks have S
// of R rows between the products (group.h):
//
//   S rows:   x -> norm1 -.                          .-> + x -> norm2 -.                       .-> + -> out
//                      gather                     reduce           gather                   reduce
//   R rows:               `-> ColumnLinear -> attention -> RowLinear   `-> ColumnLinear -> RowLinear
//                             own heads         own inputs               own channels     own inputs
//
// The backward of one communicates like the forward of the other. Bytes that a rank sends, with A the size of R rows of
// C (padded) and f = (P - 1) / P:
//
//                                    sequence parallelism                   without: all rows on every rank
//   ColumnLinear   forward           f A: gather x                          nothing
//                  backward_input    f A: reduce-scatter dx                 2 f A: all-reduce dx
//                  backward_weight   f A: gather x again, unless it stayed  nothing
//   RowLinear      forward           f A: reduce-scatter out                2 f A: all-reduce out
//                  backward_input    f A: gather dout                       nothing
//                  backward_weight   nothing, or f A if it comes later      nothing
//   Embedding      forward           f A                                    2 f A
//                  backward          f A                                    nothing
//   CrossEntropy                     3 (P - 1) numbers a row, never a row of logits
//   ProjectionNorm                   2 (P - 1) numbers a row, and as many in its backward
//
// (Gradients of shared parameters: GradientReducer::sum_partial().)
#pragma once
#include "parallel/group.h"
#include "shard/unit_state.h"

namespace llmc::parallel {

// Parameters of a unit: weight and bias `name`, with those of the `fused` - 1 after it as one matrix and one vector.
// They are looked up when they are used: weights and gradients may be there at different times. Empty tensors: no bias
struct Parameters {
  const UnitState& unit;
  const char* name;
  int fused = 1;
  bool bias_apart = false;  // another op adds to the bias's gradient
  Operands read = Operands::as_stored;
  llmc::detail::Operand kept_input = {};  // as of Reading

  Reading reading() const {
    Reading all = unit.reading(read, weight());
    all.kept_input = kept_input;
    return all;
  }
  Tensor weight() const { return unit.weight(full(".weight"), fused); }
  Tensor dweight() const { return unit.gradient(full(".weight"), fused); }
  Tensor bias() const { return unit.has(full(".bias")) ? unit.weight(full(".bias"), fused) : Tensor{}; }
  Tensor dbias() const { return unit.has(full(".bias")) ? unit.gradient(full(".bias"), fused) : Tensor{}; }
  // Whether a product adds to dweight().
  Accumulate accumulate() const { return unit.accumulate(dweight()); }
  std::string full(const char* suffix) const { return std::string(name) + suffix; }
};

// out = x weight^T + bias, for this rank's O outputs.   x, dx (S, I): rows of the residual stream; out, dout (R, O)
struct ColumnLinear {
  Parameters p;
  const Group& g;
  Tensor activated = {};  // (R, O): the product also computes GELU(out), on a group of one rank; or an empty tensor

  // room: where the gathered x (P S, I) stays, or an empty tensor
  void forward(Tensor out, Tensor x, Tensor room = {}) const {
    if (!activated.empty()) return linear_gelu_forward(activated, out, x, p.weight(), p.bias(), g.compute);
    with_all_rows(out, x, room, "gathered", g, [&](Tensor out_rows, Tensor rows) {
      linear_forward(out_rows, rows, p.weight(), p.bias(), g.compute, p.reading());
    });
  }
  // dx = dout weight, summed over the ranks. meanwhile(): enqueues work that does not depend on the result.
  template <class Meanwhile = void (*)()>
  void backward_input(
      Tensor dx, Tensor dout, Meanwhile&& meanwhile = [] {}) const {
    auto product = [&](Tensor piece, const Range& rows) {
      linear_backward_input(piece, rows_of(dout, rows), p.weight(), g.compute, p.reading());
    };
    if (g.size() > 1) return reduce(dx, dout.shape[0], {}, g, product, meanwhile);
    meanwhile();
    linear_backward_input(dx, dout, p.weight(), g.compute, p.reading());
  }
  // dweight, dbias += (the unit knows which products of a sum write instead).   gathered: all rows of x, if they are
  // still there
  void backward_weight(Tensor dout, Tensor x, Tensor gathered = {}) const {
    auto scope = g.arena.scope();
    if (gathered.empty()) gathered = all_rows("gathered again", x, g);
    linear_backward_weight(p.dweight(), p.bias_apart ? Tensor{} : p.dbias(), dout,
                           rows_of(gathered, {0, dout.shape[0]}), p.accumulate(), g.compute, p.reading());
  }
  // Both at once: x travels while dx is computed, and dx while dweight is.
  void backward(Tensor dx, Tensor dout, Tensor x, Tensor gathered = {}) const {
    if (g.size() == 1)
      return linear_backward(dx, p.dweight(), p.bias_apart ? Tensor{} : p.dbias(), dout, x, p.weight(), p.accumulate(),
                             g.compute, p.reading());
    auto scope = g.arena.scope();
    Arrivals arrivals;
    if (g.by_rows() && gathered.empty()) {
      gathered = room_for_rows("gathered again", x, g);
      arrivals = begin_gather_rows(gathered, x, g);
    }
    backward_input(dx, dout, [&] {
      if (!arrivals.empty()) as_they_arrive(arrivals, g, [](const Range&) {});
      backward_weight(dout, x, gathered);
    });
  }
  // The same from dout in fp8, on a group of one rank, without a bias.
  void backward(Tensor dx, const llmc::detail::Quantised& dout, Tensor x) const {
    CHECK(g.size() == 1 && p.dbias().empty(), "{}: its gradient in fp8 is for one rank, and has no bias", p.name);
    linear_backward(dx, p.dweight(), dout, x, p.weight(), p.accumulate(), g.compute, p.reading());
  }
};

// out = x weight^T + bias, summed over the ranks; the bias is added once.   x, dx (R, I): this rank's inputs; out, dout
// (S, O): rows of the residual stream
struct RowLinear {
  Parameters p;
  const Group& g;
  // For products that compute more, on a group of one rank; or empty tensors:
  Tensor before_gelu = {};  // (R, I): x is its GELU, and dx its gradient
  Tensor residual = {};     // (S, O): added to out

  void forward(Tensor out, Tensor x) const {
    if (!residual.empty()) return linear_residual_forward(out, residual, x, p.weight(), p.bias(), g.compute);
    if (g.size() == 1) return linear_forward(out, x, p.weight(), p.bias(), g.compute, p.reading());
    auto product = [&](Tensor piece, const Range& rows) {
      linear_forward(piece, rows_of(x, rows), p.weight(), {}, g.compute, p.reading());
    };
    reduce(out, x.shape[0], p.bias(), g, product, [] {});
  }
  // The same from x in fp8, on a group of one rank.
  void forward(Tensor out, const llmc::detail::Operand& x) const {
    CHECK(g.size() == 1, "{}: its input in fp8 is for one rank", p.name);
    linear_forward(out, x, p.weight(), p.bias(), g.compute, p.reading());
  }
  // dx = dout weight, for this rank's inputs.   room: where the gathered dout (P S, O) stays, or an empty tensor
  void backward_input(Tensor dx, Tensor dout, Tensor room = {}) const {
    if (!before_gelu.empty()) return linear_gelu_backward_input(dx, dout, p.weight(), before_gelu, g.compute);
    with_all_rows(dx, dout, room, "gathered gradient", g, [&](Tensor dx_rows, Tensor rows) {
      linear_backward_input(dx_rows, rows, p.weight(), g.compute, p.reading());
    });
  }
  // dweight +=; dbias += the sum of this rank's rows of dout.   gathered: all rows of dout, if they are still there
  void backward_weight(Tensor dout, Tensor x, Tensor gathered = {}) const {
    if (!g.by_rows())
      return linear_backward_weight(p.dweight(), p.dbias(), dout, x, p.accumulate(), g.compute, p.reading());
    auto scope = g.arena.scope();
    if (gathered.empty()) gathered = all_rows("gathered gradient", dout, g);
    linear_backward_weight(p.dweight(), {}, rows_of(gathered, {0, x.shape[0]}), x, p.accumulate(), g.compute,
                           p.reading());
    if (const Tensor dbias = p.dbias(); !dbias.empty()) linear_backward_bias(dbias, dout, g.compute);
  }
  // Both at once.
  void backward(Tensor dx, Tensor dout, Tensor x) const {
    if (g.size() == 1 && before_gelu.empty())
      return linear_backward(dx, p.dweight(), p.dbias(), dout, x, p.weight(), p.accumulate(), g.compute, p.reading());
    auto scope = g.arena.scope();
    const Tensor room = room_for_rows("gathered gradient", dout, g);
    backward_input(dx, dout, room);
    backward_weight(dout, x, room);
  }
};

// The norm of whole query and key projections; each rank has some of their heads (ops_heads.h).   rstd (N, 2), equal on
// all ranks
struct ProjectionNorm {
  Parameters q, k;
  AttentionShape shape;
  const Group& g;

  void forward(Tensor out, Tensor rstd, Tensor qkv, float eps) const {
    auto scope = g.arena.scope();
    const Tensor sums =
        of_all_ranks(rstd.dtype, [&](Tensor part) { projection_norm_sums(part, qkv, shape, g.compute); });
    projection_norm_forward(out, rstd, qkv, q.weight(), k.weight(), sums, eps, shape, shares(), g.compute);
  }
  void backward(Tensor dqkv, Tensor qkv, Tensor rstd) const {
    auto scope = g.arena.scope();
    const Tensor sums = of_all_ranks(rstd.dtype, [&](Tensor part) {
      projection_norm_backward_sums(part, dqkv, qkv, q.weight(), k.weight(), shape, g.compute);
    });
    projection_norm_backward(dqkv, q.dweight(), k.dweight(), qkv, q.weight(), k.weight(), rstd, sums, shape, shares(),
                             g.compute);
  }
  HeadShares shares() const { return {g.size(), g.rank(), g.tensor().head_copies}; }
  // (P, N, 2): the results of sum(part (N, 2)) of all ranks.
  template <class Sum>
  Tensor of_all_ranks(DType dtype, Sum&& sum) const {
    const int64_t N = shape.B * shape.T;
    const Tensor all = g.temporary("sums over the heads of all ranks", dtype, {g.size() * N, 2});
    sum(rows_of(all, {N * g.rank(), N}));
    all_gather(all, g);
    return all.reshaped({g.size(), N, 2});
  }
};

// out, rows of the residual stream = wte[tokens] + wpe[positions]; each rank has some rows of wte.   tokens, positions:
// for all rows, padding included
struct Embedding {
  const UnitState& unit;
  const Group& g;

  void forward(Tensor out, Tensor tokens, Tensor positions) const {
    const Tensor wte = unit.weight("wte.weight"), wpe = unit.has("wpe.weight") ? unit.weight("wpe.weight") : Tensor{};
    if (g.size() == 1) return embedding_forward(out, tokens, positions, wte, wpe, g.compute);
    auto lookup = [&](Tensor piece, const Range& rows) {
      const Shape n{rows.size};
      embedding_forward(piece, tokens.slice(rows.begin, n), positions.slice(rows.begin, n), wte, {}, g.compute,
                        unit.vocabulary("wte.weight"));
    };
    reduce(out, tokens.numel(), {}, g, lookup, [] {});
    if (!wpe.empty()) add_positions(out, own_rows(positions, out, g), wpe, g.compute);
  }
  // dwte, dwpe +=; dwpe: from the rows that this rank has
  void backward(Tensor dout, Tensor tokens, Tensor positions) const {
    unit.zero_unwritten(g.compute);
    const Tensor dwte = unit.gradient("wte.weight"),
                 dwpe = unit.has("wpe.weight") ? unit.gradient("wpe.weight") : Tensor{};
    if (g.size() == 1) return embedding_backward(dwte, dwpe, dout, tokens, positions, g.compute);
    auto scope = g.arena.scope();
    embedding_backward(dwte, {}, all_rows("gathered gradient", dout, g), tokens, positions, g.compute,
                       unit.vocabulary("wte.weight"));
    if (!dwpe.empty()) add_positions_backward(dwpe, dout, own_rows(positions, dout, g), g.compute);
  }
};

// cross_entropy() over a vocabulary of which this rank has a part.
struct CrossEntropy {
  Vocabulary part;
  const Group& g;

  // logits (N, V of this part, padded); losses (N), equal on all ranks
  void operator()(Tensor losses, Tensor logits, Tensor targets, double scale, Gradient gradient,
                  const HeadZLoss& z = {}) const {
    if (g.size() == 1) return cross_entropy(losses, logits, targets, part.size, scale, gradient, g.compute, z);
    const int64_t N = logits.shape[0], P = g.size();
    auto scope = g.arena.scope();
    const Tensor stats = g.temporary("largest, sum, target", losses.dtype, {P * N, 3});
    cross_entropy_stats(rows_of(stats, {N * g.rank(), N}), logits, targets, part, g.compute);
    all_gather(stats, g);
    cross_entropy_merge(losses, logits, stats.reshaped({P, N, 3}), targets, part, scale, gradient, g.compute, z);
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
