// group.h: the group of a tensor-parallel rank, and how rows travel in it. comm/tensor_parallel.h divides rows and the
// vocabulary, shard/params.h the parameters. The layers that the ranks compute together are in tensor_layers.h. On a
// group of one each is the plain op: the same bits, and no copy.
//
// Rows. A micro-batch has R rows. With sequence parallelism, each of the P ranks has S = ceil(R / P) rows of the
// residual stream between the parallel products: rank p has those from p S on, and the last rows may be padding.
// Padding is finite, has no loss and so no gradient. Without sequence parallelism every rank has all R rows.
//
// A reduction is an all-to-all in the training dtype; each rank adds the parts in fp32 in rank order and rounds once
// (contract 12). Without overlap a linear layer is one collective and one product. With --tp-overlap the slices of all
// ranks are cut into K = min(P, 4) pieces of neighbours, so that one piece travels while another is computed: in turn t
// the ranks of piece g send to those of piece g + t, so that all links are busy at all times.
#pragma once
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

// The slices of these ranks, of R rows cut into slices of S, without padding: they may be short or empty.
inline Range rows_of_slices(int64_t R, int64_t S, const Range& ranks) {
  const int64_t begin = std::min(R, S * ranks.begin);
  return {begin, std::min(R, S * ranks.end()) - begin};
}

// The pieces in which the slices of all ranks travel. At most four: each costs the launch of a product and an exchange.
class Pieces {
 public:
  explicit Pieces(const Group& g)
      : P_(g.size()), r_(g.rank()), count_(g.tensor().overlap ? std::min<int64_t>(P_, 4) : 1) {
    while (piece(mine_).end() <= r_) ++mine_;
  }
  int64_t count() const { return count_; }
  // The ranks that this one sends to in a turn, and those that it receives from; in turn 0 those of its own piece.
  Range to(int64_t turn) const { return piece((mine_ + turn) % count_); }
  Range from(int64_t turn) const { return piece((mine_ - turn + count_) % count_); }
  bool nobody_sends(int64_t turn) const { return turn == 0 && count_ == P_; }

  // The slices of `ranks`, of S rows each, as blocks for an all-to-all.
  std::vector<Range> blocks(const Range& ranks, int64_t S) const {
    std::vector<Range> all(static_cast<size_t>(P_), Range{});
    for (int64_t k = ranks.begin; k < ranks.end(); ++k) all[static_cast<size_t>(k)] = {S * k, S};
    return all;
  }

 private:
  Range piece(int64_t i) const {
    const int64_t begin = P_ * i / count_;
    return {begin, P_ * (i + 1) / count_ - begin};
  }
  int64_t P_, r_, count_, mine_ = 0;
};

// The stream of the exchanges; the next exchange waits for everything enqueued on the compute stream so far.
inline Stream& after_compute(const Group& g) {
  if (!g.ranks.find_stream(Lane::exchange)) return g.compute;
  g.ranks.find_stream(Lane::exchange)->wait(g.compute.record());
  return *g.ranks.find_stream(Lane::exchange);
}

// Slices of a matrix that are on their way from other ranks: with overlap an event for each piece, in turn.
using Arrivals = std::vector<Event>;

// Begins to gather the slices of the other ranks into all (P S, C); this rank has already set slice rank().
inline Arrivals begin_all_gather(Tensor all, const Group& g) {
  Comm& ranks = g.ranks[GroupName::activations];
  if (!g.tensor().overlap) return ranks.all_gather(all, g.compute), Arrivals{};
  const Pieces pieces(g);
  const int64_t S = all.shape[0] / g.size();
  Stream& stream = after_compute(g);
  Arrivals arrivals;
  for (int64_t turn = 0; turn < pieces.count(); ++turn) {
    if (!pieces.nobody_sends(turn)) {
      std::vector<Range> send = pieces.blocks(pieces.to(turn), S), receive = pieces.blocks(pieces.from(turn), S);
      for (Range& b : send) b.begin = S * g.rank();
      send[static_cast<size_t>(g.rank())].size = receive[static_cast<size_t>(g.rank())].size = 0;
      ranks.all_to_all_rows(all, all, send, receive, stream);
    }
    arrivals.push_back(stream.record());
  }
  return arrivals;
}
// Calls use(ranks) for the slices of all ranks, or for one piece after the other in the order of arrival; it enqueues
// the work that reads them.
template <class Use>
void as_they_arrive(const Arrivals& arrivals, const Group& g, Use&& use) {
  if (!g.tensor().overlap) return use(Range{0, g.size()});
  const Pieces pieces(g);
  for (int64_t turn = 0; turn < pieces.count(); ++turn) {
    if (!pieces.nobody_sends(turn)) g.compute.wait(arrivals[static_cast<size_t>(turn)]);
    use(pieces.from(turn));
  }
}
inline void all_gather(Tensor all, const Group& g) {
  as_they_arrive(begin_all_gather(all, g), g, [](const Range&) {});
}

// out (S, C) = bias + the sum over the ranks of their products of this rank's slice of R rows. product(piece, rows):
// computes these rows. meanwhile(): enqueues work that does not depend on the result.
template <class Product, class Meanwhile>
void reduce_scatter(Tensor out, int64_t R, Tensor bias, const Group& g, Product&& product, Meanwhile&& meanwhile) {
  const Pieces pieces(g);
  const int64_t P = g.size(), S = out.shape[0], C = out.shape[1];
  auto scope = g.arena.scope();
  const Tensor sent = g.temporary("partial sums to send", out.dtype, {P * S, C});
  const Tensor parts = g.temporary("partial sums", out.dtype, {P * S, C});
  auto compute = [&](const Tensor& all, const Range& ranks) {
    const Range rows = rows_of_slices(R, S, ranks);
    if (rows.size > 0) product(rows_of(all, rows), rows);
    if (const int64_t padding = S * ranks.size - rows.size; padding > 0)
      zero(rows_of(all, {S * ranks.end() - padding, padding}), g.compute);
  };
  for (int64_t i = 1; i <= pieces.count(); ++i) {  // a rank's own piece comes last
    const int64_t turn = i % pieces.count();
    if (pieces.nobody_sends(turn)) {
      compute(parts, pieces.to(turn));
    } else {
      compute(sent, pieces.to(turn));
      g.ranks[GroupName::activations].all_to_all_rows(parts, sent, pieces.blocks(pieces.to(turn), S),
                                                      pieces.blocks(pieces.from(turn), S), after_compute(g));
    }
  }
  meanwhile();
  if (Stream* exchanges = g.ranks.find_stream(Lane::exchange)) g.compute.wait(exchanges->record());
  merge_parts(out, parts.reshaped({P, S, C}), bias, g.compute);
}

// out, rows of the residual stream = bias + the sum over the ranks of a product of R rows. product(piece, rows):
// computes these rows of it. Where every rank has all rows, the slices are gathered at the end.
template <class Product, class Meanwhile>
void reduce(Tensor out, int64_t R, Tensor bias, const Group& g, Product&& product, Meanwhile&& meanwhile) {
  if (g.by_rows()) return reduce_scatter(out, R, bias, g, product, meanwhile);
  auto scope = g.arena.scope();
  const int64_t S = ceil_div(R, g.size());
  const Tensor all = g.temporary("sum over the ranks", out.dtype, {S * g.size(), out.shape[1]});
  reduce_scatter(rows_of(all, {S * g.rank(), S}), R, bias, g, product, meanwhile);
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
  as_they_arrive(begin_gather_rows(room, x, g), g, [&](const Range& ranks) {
    const Range rows = rows_of_slices(out.shape[0], x.shape[0], ranks);
    if (rows.size > 0) product(rows_of(out, rows), rows_of(room, rows));
  });
}
// All rows of x: gathered from all ranks, or x itself where every rank has all rows.
inline Tensor all_rows(const char* name, Tensor x, const Group& g) {
  if (!g.by_rows()) return x;
  const Tensor room = room_for_rows(name, x, g);
  as_they_arrive(begin_gather_rows(room, x, g), g, [](const Range&) {});
  return room;
}

}  // namespace llmc::parallel
