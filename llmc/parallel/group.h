// group.h: the group of a tensor-parallel rank, and how rows travel in it. comm/tensor_parallel.h divides rows and the
// vocabulary, shard/parts.h the parameters. The layers that the ranks compute together are in tensor_layers.h. On a
// group of one each is the plain op: the same bits, and no copy.
//
// Rows. A micro-batch has R rows. With sequence parallelism, each of the P ranks has S = ceil(R / P) rows of the
// residual stream between the parallel products: rank p has those from p S on, and the last rows may be padding.
// Padding is finite, has no loss and so no gradient. Without sequence parallelism every rank has all R rows.
//
// A reduction is an all-to-all in the training dtype; each rank adds the parts in fp32 in rank order and rounds once
// (contract 12). An all-gather and a product, or a product and a reduction, go in P pieces of S rows, so that one piece
// may travel while another is computed (--tp-overlap); without overlap the same pieces are computed one after the
// other.
#pragma once
#include <vector>

#include "comm/groups.h"
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
inline void all_gather(Tensor all, const Group& g) {
  as_they_arrive(begin_all_gather(all, g), g, [](int) {});
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
  if (Stream* exchanges = g.ranks.find_stream(Lane::exchange)) g.compute.wait(exchanges->record());
  merge_parts(out, parts.reshaped({P, S, C}), bias, g.compute);
}

// out, rows of the residual stream = bias + the sum over the ranks of a product of R rows. product(piece, rows):
// computes these rows of it. Where every rank has all rows, the slices are gathered at the end.
template <class Product, class Meanwhile>
void reduce(Tensor out, int64_t R, Tensor bias, const Group& g, Product&& product, Meanwhile&& meanwhile) {
  auto scope = g.arena.scope();
  const int64_t S = g.by_rows() ? out.shape[0] : ceil_div(R, g.size());
  const Tensor all =
      g.by_rows() ? Tensor{} : g.temporary("sum over the ranks", out.dtype, {S * g.size(), out.shape[1]});
  auto padded = [&](Tensor piece, int p) {
    const Range rows = slice_of(R, S, p);
    if (rows.size > 0) product(rows_of(piece, {0, rows.size}), rows);
    if (rows.size < S) zero(rows_of(piece, {rows.size, S - rows.size}), g.compute);
  };
  reduce_scatter(g.by_rows() ? out : rows_of(all, {S * g.rank(), S}), bias, g, padded, meanwhile);
  if (g.by_rows()) return;
  all_gather(all, g);
  copy(out, rows_of(all, {0, R}), g.compute);
}

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

inline Arrivals begin_gather_rows(Tensor room, Tensor x, const Group& g) {
  copy(own_rows(room, x, g), x, g.compute);
  return begin_all_gather(room, g);
}

// Calls product(rows of out, the same rows of x) for all rows of x (S, C), as they arrive; or at once, where every rank
// has all rows. room: where the gathered rows stay, or an empty tensor
template <class Product>
void with_all_rows(Tensor out, Tensor x, Tensor room, const char* name, const Group& g, Product&& product) {
  if (!g.by_rows()) return product(out, x);
  auto scope = g.arena.scope();
  if (room.empty()) room = room_for_rows(name, x, g);
  as_they_arrive(begin_gather_rows(room, x, g), g, [&](int p) {
    const Range rows = slice_of(out.shape[0], x.shape[0], p);
    if (rows.size > 0) product(rows_of(out, rows), rows_of(room, rows));
  });
}
// All rows of x: gathered from all ranks, or x itself where every rank has all rows.
inline Tensor all_rows(const char* name, Tensor x, const Group& g) {
  if (!g.by_rows()) return x;
  const Tensor room = room_for_rows(name, x, g);
  as_they_arrive(begin_gather_rows(room, x, g), g, [](int) {});
  return room;
}

}  // namespace llmc::parallel
