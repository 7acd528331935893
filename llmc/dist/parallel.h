// parallel.h: the ops that need the ranks of a tensor-parallel group (tensor_parallel.h says who has which part). On a
// group of one each is the plain op: the same bits, and no copy.
//
// Rows. A micro-batch has R rows. With sequence parallelism, each of the P ranks has S = ceil(R / P) rows of the
// residual stream between the parallel products: rank p has those from p S on, and the last rows may be padding.
// Padding is finite, has no loss and so no gradient. Without sequence parallelism every rank has all R rows.
//
//                     with sequence parallelism                         without
//   column_linear     all-gather the rows, then the product             the product
//   row_linear        the product, then reduce-scatter                  the product, then all-reduce
//
// and the backward of one communicates like the forward of the other. Bytes that a rank sends (with sequence
// parallelism, or without), where A is the size of R rows of C (padded) and f = (P - 1) / P: column_linear f A or
// nothing, its backward 2 f A either way (with sequence parallelism, f A of that gathers x again for the weight
// gradient, and is saved if x is still there); row_linear f A or 2 f A, its backward f A or nothing; embedding f A or
// 2 f A, its backward f A or nothing; cross_entropy 3 (P - 1) numbers a row; projection_norm 2 (P - 1) numbers a row,
// and so does its backward.
// (Gradients of shared parameters: sum_partial_gradients() in zero.h.)
//
// A reduction is an all-to-all in the training dtype; each rank adds the parts in fp32 in rank order and rounds once
// (contract 12). An all-gather and a product, or a product and a reduction, go in P pieces of S rows, so that one piece
// may travel while another is computed (--tp-overlap); without overlap the same pieces are computed one after the
// other.
#pragma once
#include <vector>

#include "dist/groups.h"
#include "ops/ops.h"

namespace llmc::parallel {

// The group of a rank, with the memory and the stream that an op needs.
struct Group {
  Groups& ranks;
  Arena& arena;
  Stream& compute;

  const TensorParallel& tensor() const { return ranks.layout.tensor; }
  int size() const { return ranks.layout.tensor.ranks; }
  int rank() const { return ranks.me.tensor; }
  bool by_rows() const { return ranks.layout.tensor.by_rows(); }
  Tensor temporary(const char* name, DType dtype, const Shape& shape) const {
    return arena.alloc("temporary", name, dtype, shape);
  }
};

// Rows [begin, begin + size) of a matrix.
inline Tensor rows_of(const Tensor& t, const Range& rows) {
  return t.slice(rows.begin * t.shape[1], {rows.size, t.shape[1]});
}

namespace detail {

// Slice p of R rows cut into slices of S, without padding: it may be short or empty.
inline Range slice_of(int64_t R, int64_t S, int p) {
  const int64_t begin = std::min(R, S * p);
  return {begin, std::min(R, S * (p + 1)) - begin};
}

// The stream of the exchanges; the next exchange waits for everything enqueued on the compute stream so far.
inline Stream& after_compute(const Group& g) {
  if (!g.ranks.find_stream(Lane::exchange)) return g.compute;
  g.ranks.find_stream(Lane::exchange)->wait(g.compute.record());
  return *g.ranks.find_stream(Lane::exchange);
}
// The compute stream waits for all exchanges so far.
inline void wait_for_exchanges(const Group& g) {
  if (g.ranks.find_stream(Lane::exchange)) g.compute.wait(g.ranks.find_stream(Lane::exchange)->record());
}

// Slices of a matrix that are on their way from other ranks: one event for each of rank() - 1, rank() - 2, ...
using Arrivals = std::vector<Event>;

// Begins to gather the slices of the other ranks into all (P S, C); this rank has already set slice rank().
inline Arrivals begin_all_gather(Tensor all, const Group& g) {
  const int P = g.size(), r = g.rank();
  const int64_t S = all.shape[0] / P;
  auto slice = [&](int p) { return rows_of(all, {S * p, S}); };
  Stream& stream = after_compute(g);
  Arrivals arrivals;
  for (int s = 1; s < P; ++s) {
    const int to = (r + s) % P, from = (r - s + P) % P;
    g.ranks[GroupName::activations].exchange(slice(r), to, slice(from), from, stream);
    arrivals.push_back(stream.record());
  }
  return arrivals;
}
// Calls use(p) for each slice, in the order of arrival; it enqueues the work that reads slice p.
template <class Use>
void as_they_arrive(const Arrivals& arrivals, const Group& g, Use&& use) {
  const int P = g.size(), r = g.rank();
  use(r);
  for (int s = 1; s < P; ++s) {
    if (g.ranks.find_stream(Lane::exchange)) g.compute.wait(arrivals[static_cast<size_t>(s) - 1]);
    use((r - s + P) % P);
  }
}

// out (S, C) = bias + the sum over the ranks of their products for this rank's slice. product(piece (S, C), p):
// computes slice p. meanwhile(): enqueues work that does not depend on the result.
template <class Product, class Meanwhile>
void reduce_scatter(Tensor out, Tensor bias, const Group& g, Product&& product, Meanwhile&& meanwhile) {
  const int P = g.size(), r = g.rank();
  const int64_t S = out.shape[0], C = out.shape[1];
  auto scope = g.arena.scope();
  const Tensor sent = g.temporary("partial sums to send", out.dtype, {(P - 1) * S, C});
  const Tensor parts = g.temporary("partial sums", out.dtype, {P * S, C});
  auto slice = [&](const Tensor& t, int p) { return rows_of(t, {S * p, S}); };
  for (int s = 1; s < P; ++s) {
    const int to = (r + s) % P, from = (r - s + P) % P;
    product(slice(sent, s - 1), to);
    g.ranks[GroupName::activations].exchange(slice(sent, s - 1), to, slice(parts, from), from, after_compute(g));
  }
  product(slice(parts, r), r);
  meanwhile();
  wait_for_exchanges(g);
  merge_parts(out, parts.reshaped({P, S, C}), bias, g.compute);
}

// The same with all rows on every rank: out (R, C).
template <class Product, class Meanwhile>
void all_reduce(Tensor out, Tensor bias, const Group& g, Product&& product, Meanwhile&& meanwhile) {
  const int64_t R = out.shape[0], C = out.shape[1], S = ceil_div(R, g.size());
  auto scope = g.arena.scope();
  const Tensor all = g.temporary("sum over the ranks", out.dtype, {S * g.size(), C});
  reduce_scatter(rows_of(all, {S * g.rank(), S}), bias, g, product, meanwhile);
  as_they_arrive(begin_all_gather(all, g), g, [](int) {});
  copy(out, rows_of(all, {0, R}), g.compute);
}

// out, rows of the residual stream = bias + the sum over the ranks of a product of R rows. product(piece, rows):
// computes these rows of it.
template <class Product, class Meanwhile>
void reduce(Tensor out, int64_t R, Tensor bias, const Group& g, Product&& product, Meanwhile&& meanwhile) {
  const int64_t S = g.by_rows() ? out.shape[0] : ceil_div(R, g.size());
  auto padded = [&](Tensor piece, int p) {
    const Range rows = slice_of(R, S, p);
    if (rows.size > 0) product(rows_of(piece, {0, rows.size}), rows);
    if (rows.size < S) zero(rows_of(piece, {rows.size, S - rows.size}), g.compute);
  };
  if (g.by_rows()) reduce_scatter(out, bias, g, padded, meanwhile);
  else all_reduce(out, bias, g, padded, meanwhile);
}

}  // namespace detail

// ---- Rows ----------------------------------------------------------------------------------------------------------

// Room for the rows x (S, C) of all ranks: (P S, C); an empty tensor where every rank already has all rows.
inline Tensor room_for_rows(const char* name, Tensor x, const Group& g) {
  return g.by_rows() ? g.temporary(name, x.dtype, {g.size() * x.shape[0], x.shape[1]}) : Tensor{};
}
// The rows of `all` (all ranks' rows, with any number of axes) that belong to this rank's rows `stream_rows`.
inline Tensor own_rows(Tensor all, Tensor stream_rows, const Group& g) {
  const int64_t S = stream_rows.shape[0], width = all.numel() / all.shape[0];
  Shape shape = all.shape;
  shape[0] = S;
  return all.slice(g.by_rows() ? S * g.rank() * width : 0, shape);
}

namespace detail {

inline Arrivals begin_gather_rows(Tensor room, Tensor x, const Group& g) {
  copy(own_rows(room, x, g), x, g.compute);
  return begin_all_gather(room, g);
}

}  // namespace detail

// room (P S, C) = the rows x (S, C) of all ranks. use(rows): enqueues the work that reads these rows; called only for
// the first R.
template <class Use>
void gather_rows(Tensor room, Tensor x, int64_t R, const Group& g, Use&& use) {
  detail::as_they_arrive(detail::begin_gather_rows(room, x, g), g, [&](int p) {
    const Range rows = detail::slice_of(R, x.shape[0], p);
    if (rows.size > 0) use(rows);
  });
}

// ---- Linear layers -------------------------------------------------------------------------------------------------

// out (R, O) = x weight^T + bias, for this rank's O outputs.   x: rows of the residual stream (.., I); weight (O, I);
// bias (O), or an empty tensor; room: where the gathered x stays, or an empty tensor
inline void column_linear(Tensor out, Tensor x, Tensor weight, Tensor bias, Tensor room, const Group& g) {
  if (!g.by_rows()) return linear_forward(out, x, weight, bias, g.compute);
  auto scope = g.arena.scope();
  if (room.empty()) room = room_for_rows("gathered", x, g);
  gather_rows(room, x, out.shape[0], g, [&](const Range& rows) {
    linear_forward(rows_of(out, rows), rows_of(room, rows), weight, bias, g.compute);
  });
}

// dx = dout weight, summed over the ranks. meanwhile(): enqueues work that does not depend on the result.
template <class Meanwhile>
void column_linear_backward_input(Tensor dx, Tensor dout, Tensor weight, const Group& g, Meanwhile&& meanwhile) {
  if (g.size() == 1) {
    meanwhile();
    return linear_backward_input(dx, dout, weight, g.compute);
  }
  auto product = [&](Tensor piece, const Range& rows) {
    linear_backward_input(piece, rows_of(dout, rows), weight, g.compute);
  };
  detail::reduce(dx, dout.shape[0], {}, g, product, meanwhile);
}
// dweight, dbias +=.   x: rows of the residual stream, gathered again
inline void column_linear_backward_weight(Tensor dweight, Tensor dbias, Tensor dout, Tensor x, const Group& g) {
  auto scope = g.arena.scope();
  const int64_t R = dout.shape[0];
  const Tensor room = room_for_rows("gathered again", x, g);
  if (g.by_rows()) gather_rows(room, x, R, g, [](const Range&) {});
  linear_backward_weight(dweight, dbias, dout, g.by_rows() ? rows_of(room, {0, R}) : x, g.compute);
}
// Both at once.   gathered: all rows of x, if they are still there
inline void column_linear_backward(Tensor dx, Tensor dweight, Tensor dbias, Tensor dout, Tensor x, Tensor gathered,
                                   Tensor weight, const Group& g) {
  auto scope = g.arena.scope();
  detail::Arrivals arrivals;
  const bool again = g.by_rows() && gathered.empty();
  if (again) {
    gathered = room_for_rows("gathered again", x, g);
    arrivals = detail::begin_gather_rows(gathered, x, g);
  }
  column_linear_backward_input(dx, dout, weight, g, [&] {
    if (again) detail::as_they_arrive(arrivals, g, [](int) {});
    linear_backward_weight(dweight, dbias, dout, g.by_rows() ? rows_of(gathered, {0, dout.shape[0]}) : x, g.compute);
  });
}

// out, rows of the residual stream = x weight^T + bias, summed over the ranks.   x (R, I) this rank's inputs; weight
// (O, I); bias (O), or an empty tensor: added once
inline void row_linear(Tensor out, Tensor x, Tensor weight, Tensor bias, const Group& g) {
  if (g.size() == 1) return linear_forward(out, x, weight, bias, g.compute);
  detail::reduce(
      out, x.shape[0], bias, g,
      [&](Tensor piece, const Range& rows) { linear_forward(piece, rows_of(x, rows), weight, {}, g.compute); }, [] {});
}

// dx (R, I) = dout weight, for this rank's inputs.   room: where the gathered dout stays, or an empty tensor
inline void row_linear_backward_input(Tensor dx, Tensor dout, Tensor weight, Tensor room, const Group& g) {
  if (!g.by_rows()) return linear_backward_input(dx, dout, weight, g.compute);
  auto scope = g.arena.scope();
  if (room.empty()) room = room_for_rows("gathered gradient", dout, g);
  gather_rows(room, dout, dx.shape[0], g, [&](const Range& rows) {
    linear_backward_input(rows_of(dx, rows), rows_of(room, rows), weight, g.compute);
  });
}
// dweight +=; dbias += the sum of this rank's rows of dout.   gathered: all rows of dout, if they are still there
inline void row_linear_backward_weight(Tensor dweight, Tensor dbias, Tensor dout, Tensor x, Tensor gathered,
                                       const Group& g) {
  if (!g.by_rows()) return linear_backward_weight(dweight, dbias, dout, x, g.compute);
  auto scope = g.arena.scope();
  if (gathered.empty()) {
    gathered = room_for_rows("gathered gradient", dout, g);
    gather_rows(gathered, dout, x.shape[0], g, [](const Range&) {});
  }
  linear_backward_weight(dweight, {}, rows_of(gathered, {0, x.shape[0]}), x, g.compute);
  if (!dbias.empty()) linear_backward_bias(dbias, dout, g.compute);
}
// Both at once.
inline void row_linear_backward(Tensor dx, Tensor dweight, Tensor dbias, Tensor dout, Tensor x, Tensor weight,
                                const Group& g) {
  auto scope = g.arena.scope();
  const Tensor room = room_for_rows("gathered gradient", dout, g);
  row_linear_backward_input(dx, dout, weight, room, g);
  row_linear_backward_weight(dweight, dbias, dout, x, room, g);
}

// ---- Query-key norm ------------------------------------------------------------------------------------------------

namespace detail {

// (P, N, 2): the results of sum(part (N, 2)) of all ranks.
template <class Sum>
Tensor sums_of_all(DType dtype, int64_t N, const Group& g, Sum&& sum) {
  const Tensor all = g.temporary("sums over the heads of all ranks", dtype, {g.size() * N, 2});
  sum(rows_of(all, {N * g.rank(), N}));
  as_they_arrive(begin_all_gather(all, g), g, [](int) {});
  return all.reshaped({g.size(), N, 2});
}
inline HeadShares head_shares(const Group& g) { return {g.size(), g.rank(), g.tensor().head_copies}; }

}  // namespace detail

// The norm of whole query and key projections; each rank has some of their heads (ops_heads.h). rstd (N, 2), equal on
// all ranks
inline void projection_norm(Tensor out, Tensor rstd, Tensor qkv, Tensor q_weight, Tensor k_weight, float eps,
                            const AttentionShape& shape, const Group& g) {
  auto scope = g.arena.scope();
  const Tensor sums = detail::sums_of_all(rstd.dtype, shape.B * shape.T, g,
                                          [&](Tensor part) { projection_norm_sums(part, qkv, shape, g.compute); });
  projection_norm_forward(out, rstd, qkv, q_weight, k_weight, sums, eps, shape, detail::head_shares(g), g.compute);
}
inline void projection_norm_backward(Tensor dqkv, Tensor dq_weight, Tensor dk_weight, Tensor qkv, Tensor q_weight,
                                     Tensor k_weight, Tensor rstd, const AttentionShape& shape, const Group& g) {
  auto scope = g.arena.scope();
  const Tensor sums = detail::sums_of_all(rstd.dtype, shape.B * shape.T, g, [&](Tensor part) {
    projection_norm_backward_sums(part, dqkv, qkv, q_weight, k_weight, shape, g.compute);
  });
  llmc::projection_norm_backward(dqkv, dq_weight, dk_weight, qkv, q_weight, k_weight, rstd, sums, shape,
                                 detail::head_shares(g), g.compute);
}

// ---- Vocabulary ----------------------------------------------------------------------------------------------------

// out, rows of the residual stream = wte[tokens] + wpe[positions].   tokens, positions: for all rows, padding included;
// wte: the rows of `part` of the vocabulary; wpe (P, C), or an empty tensor
inline void embedding(Tensor out, Tensor tokens, Tensor positions, Tensor wte, Tensor wpe, const Vocabulary& part,
                      const Group& g) {
  if (g.size() == 1) return embedding_forward(out, tokens, positions, wte, wpe, g.compute);
  detail::reduce(
      out, tokens.numel(), {}, g,
      [&](Tensor piece, const Range& rows) {
        const Shape n{rows.size};
        embedding_forward(piece, tokens.slice(rows.begin, n), positions.slice(rows.begin, n), wte, {}, g.compute, part);
      },
      [] {});
  if (!wpe.empty()) add_positions(out, own_rows(positions, out, g), wpe, g.compute);
}

// dwte, dwpe +=, from dout, rows of the residual stream. dwpe: from the rows that this rank has.
inline void embedding_backward(Tensor dwte, Tensor dwpe, Tensor dout, Tensor tokens, Tensor positions,
                               const Vocabulary& part, const Group& g) {
  if (g.size() == 1) return llmc::embedding_backward(dwte, dwpe, dout, tokens, positions, g.compute);
  auto scope = g.arena.scope();
  const Tensor room = room_for_rows("gathered gradient", dout, g);
  if (g.by_rows()) gather_rows(room, dout, room.shape[0], g, [](const Range&) {});
  llmc::embedding_backward(dwte, {}, g.by_rows() ? room : dout, tokens, positions, g.compute, part);
  if (!dwpe.empty()) add_positions_backward(dwpe, dout, own_rows(positions, dout, g), g.compute);
}

// cross_entropy() over a vocabulary divided among the ranks. logits (N, V of this part, padded); losses (N), equal on
// all ranks. Each rank sends three numbers per row to every other rank, and never a row of logits.
inline void cross_entropy(Tensor losses, Tensor logits, Tensor targets, const Vocabulary& part, double scale,
                          Gradient gradient, const Group& g) {
  if (g.size() == 1) return llmc::cross_entropy(losses, logits, targets, part.size, scale, gradient, g.compute);
  const int64_t N = logits.shape[0], P = g.size();
  auto scope = g.arena.scope();
  const Tensor stats = g.temporary("largest, sum, target", losses.dtype, {P * N, 3});
  cross_entropy_stats(rows_of(stats, {N * g.rank(), N}), logits, targets, part, g.compute);
  detail::as_they_arrive(detail::begin_all_gather(stats, g), g, [](int) {});
  cross_entropy_merge(losses, logits, stats.reshaped({P, N, 3}), targets, part, scale, gradient, g.compute);
}

// The logits (V of all parts, padded) of one row, gathered from the parts of all ranks.
inline Tensor gather_vocabulary(Tensor logits, const Group& g) {
  if (g.size() == 1) return logits;
  const Tensor all = g.temporary("logits of all ranks", logits.dtype, {g.size(), logits.numel()});
  copy(rows_of(all, {g.rank(), 1}), logits.reshaped({1, logits.numel()}), g.compute);
  detail::as_they_arrive(detail::begin_all_gather(all, g), g, [](int) {});
  return all.reshaped({all.numel()});
}

}  // namespace llmc::parallel
