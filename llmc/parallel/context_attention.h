// context_attention.h: causal attention over sequences that are divided among the ranks of a context-parallel group
// (context_parallel.h says who has which rows). On a group of one it is the plain op: the same bits, and no copy.
//
//   ring         P steps. In each, a rank's queries meet the keys and values of one rank, which then go on to its
//                neighbour; they travel on a stream of their own while the step computes. In the backward the gradients
//                of keys and values follow them round the ring, in fp32: each rank adds its part, and the last one
//                sends them home. The gradients of a rank's own keys stay there: it computes some of them first, while
//                the first keys arrive, and the rest last, while the last gradients arrive.
//   all-gather   every rank gathers all keys and values, and in the backward the sum of their gradients is scattered,
//                in fp32.
//   ulysses      an all-to-all gives each rank some heads of whole sequences, and another one takes the results back.
//                If there are fewer key-value heads than ranks, several ranks get the same one; their gradients are
//                added in fp32 in rank order.
//
// Bytes that a rank sends to the others, with P ranks and f = (P - 1) / P. K: its own keys and values (K32: in fp32);
// Q: its queries; A: the keys and values that it packs for all ranks (A32: in fp32); H = Q + A: all heads it sends:
//
//                forward            backward
//   ring         (P - 1) K          (P - 1) (K + K32)
//   all-gather   (P - 1) K          (P - 1) (K + K32)
//   ulysses      f (H + Q)          f (H + 3 Q + A): the heads again rather than kept, the output with its gradient;
//                                   A32 instead of A where ranks share key-value heads
//
// Partial results stay in fp32 (contract 12).
#pragma once
#include <source_location>

#include "parallel/group.h"

namespace llmc::parallel {

struct AttentionTensors {
  Tensor out, lse;   // (B T, Hq D); room for (B, Hq, T) numbers, for the backward
  Tensor qkv;        // (B T, (Hq + 2 Hkv) D)
  Tensor positions;  // (B T), or (B P T) of whole sequences with ulysses; or an empty tensor
  Tensor largest;    // (Hq) fp64: the largest logit of each head so far, for QK-clip; or an empty tensor

  // The statistics that a forward writes; the caller has opened a scope for temporaries.
  RowStatistics rows(const Group& g) const {
    return {lse, largest.empty() ? Tensor{} : g.temporary("largest scores", lse.dtype, lse.shape)};
  }
  // After the forward, from the largest score of each row.
  void record(const Tensor& scores, const Group& g) const {
    if (!largest.empty()) largest_logits(largest, scores, g.compute);
  }
};

namespace detail {

// Common to the three algorithms: a rank's place in the group, and the shape of its rows.
struct ContextGroup {
  const Group& g;
  AttentionShape shape;  // T: the tokens of a sequence that this rank has
  int P = g.ranks.layout.context.ranks, r = g.ranks.me.context;
  int64_t N = shape.B * shape.T, L = shape.T / 2, whole = shape.T * P;  // rows of a rank, of a slice, of a sequence
  int64_t query_width = shape.Hq * shape.D, key_width = 2 * shape.Hkv * shape.D;

  Comm& comm() const { return g.ranks[GroupName::keys_values]; }
  Stream& stream() const { return *g.ranks.find_stream(Lane::context); }
  // The stream for the next exchange, which waits for all work enqueued on the compute stream.
  Stream& after_compute(const std::source_location& where = std::source_location::current()) const {
    stream().wait(g.compute.record(), where);
    return stream();
  }
  int slice_of(int rank, int i) const { return g.ranks.layout.context.slice_of(rank, i); }
  // The queries of this rank's slice `i` against some keys.
  AttentionBlock block(int i, const SequenceRows& keys, int64_t offset) const {
    return {.B = shape.B,
            .Hq = shape.Hq,
            .Hkv = shape.Hkv,
            .D = shape.D,
            .queries = {2 * L, i * L, L},
            .keys = keys,
            .offset = offset};
  }
  int next() const { return (r + 1) % P; }
  int previous() const { return (r + P - 1) % P; }

  // Columns [from_column, from_column + width) of x become columns [to_column, ...) of out, in every row.
  void copy_columns(Tensor out, int64_t to_column, Tensor x, int64_t from_column, int64_t width) const {
    copy_box(out, {to_column, out.shape[1], 0}, x, {from_column, x.shape[1], 0}, {x.numel() / x.shape[1], 1, width},
             g.compute);
  }
  // out (B P T, width): whole sequences, put together from the shares (P, B T, width) of all ranks; and back.
  void to_sequences(Tensor out, Tensor shares) const { each_slice(out, shares, true); }
  void to_shares(Tensor shares, Tensor sequences) const { each_slice(sequences, shares, false); }

 private:
  void each_slice(const Tensor& sequences, const Tensor& shares, bool to_sequences) const {
    const int64_t width = sequences.shape[1];
    for (int rank = 0; rank < P; ++rank)
      for (int i = 0; i < 2; ++i) {
        const BoxStrides in_sequence{slice_of(rank, i) * L * width, whole * width, 0},
            in_share{(rank * N + i * L) * width, 2 * L * width, 0};
        const BoxSizes sizes{shape.B, 1, L * width};
        if (to_sequences) copy_box(sequences, in_sequence, shares, in_share, sizes, g.compute);
        else copy_box(shares, in_share, sequences, in_sequence, sizes, g.compute);
      }
  }
};

// ---- Ring ----------------------------------------------------------------------------------------------------------

// Pairs this rank's slices (i) with those of `owner` (j); calls use(block) for each pair whose queries see any key.
template <class Use>
void for_blocks(const ContextGroup& c, int owner, Use&& use) {
  for (int i = 0; i < 2; ++i)
    for (int j = 0; j < 2; ++j) {
      const int query_slice = c.slice_of(c.r, i), key_slice = c.slice_of(owner, j);
      if (query_slice < key_slice) continue;
      AttentionBlock block = c.block(i, {2 * c.L, j * c.L, c.L}, (query_slice - key_slice) * c.L);
      block.all_keys = false;
      use(block);
    }
}

// Keys and values on their way round the ring: this rank's own, then those of the rank before it, ...
class TravellingKeys {
 public:
  TravellingKeys(const ContextGroup& c, Tensor qkv) : c_(c) {
    for (Tensor& t : buffers_) t = c.g.temporary("keys and values", qkv.dtype, {c.N, c.key_width});
    c.copy_columns(buffers_[0], 0, qkv, c.query_width, c.key_width);
  }
  // Keys and values of step `s`; starts to send them on and to receive those of step s + 1.
  Tensor at(int s) {
    if (s > 0) c_.g.compute.wait(arrived_);
    if (s + 1 < c_.P) {
      c_.comm().exchange(buffers_[s % 2], c_.next(), buffers_[(s + 1) % 2], c_.previous(), c_.after_compute());
      arrived_ = c_.stream().record();
    }
    return buffers_[s % 2];
  }
  int owner(int s) const { return (c_.r - s + c_.P) % c_.P; }

 private:
  const ContextGroup& c_;
  Tensor buffers_[2];
  Event arrived_;
};

inline void ring_forward(const AttentionTensors& a, const ContextGroup& c) {
  const DType stat = accumulator_of(a.qkv.dtype);
  const RunningAttention running{c.g.temporary("attention so far", stat, {c.N, c.query_width}),
                                 c.g.temporary("largest scores", stat, a.lse.shape),
                                 c.g.temporary("sums of exponentials", stat, a.lse.shape)};
  attention_begin(running, c.g.compute);
  TravellingKeys keys(c, a.qkv);
  for (int s = 0; s < c.P; ++s) {
    const Tensor kv = keys.at(s);
    for_blocks(c, keys.owner(s), [&](const AttentionBlock& block) {
      attention_merge(running, a.qkv, kv, a.positions, block, c.g.compute);
    });
  }
  attention_finish(a.out, a.lse, running, c.g.compute);
  a.record(running.largest, c.g);
}

inline void ring_backward(Tensor dqkv, Tensor dout, const AttentionTensors& a, const ContextGroup& c) {
  const DType stat = accumulator_of(a.qkv.dtype);
  Stream& compute = c.g.compute;
  const Tensor dq = c.g.temporary("gradient of queries", stat, {c.N, c.query_width});
  const Tensor home = c.g.temporary("gradient of own keys and values", stat, {c.N, c.key_width});
  const Tensor incoming = c.g.temporary("gradient of keys that arrives", stat, {c.N, c.key_width});
  Tensor parts[2];  // this rank's gradients of others' keys; one is sent while the other is computed
  for (Tensor& t : parts) t = c.g.temporary("gradient of others' keys", stat, {c.N, c.key_width});
  zero(dq, compute);
  zero(home, compute);
  TravellingKeys keys(c, a.qkv);
  Event arrived;
  auto block_backward = [&](const AttentionBlock& block, Tensor kv, Tensor dkv) {
    attention_backward(dq, dkv, dout, a.out, a.qkv, kv, a.lse, a.positions, block, Accumulate::yes, compute);
  };
  keys.at(0);
  // This rank's own keys: some rows of the later slice against the earlier slice come first, while the first keys
  // travel; the other rows, and each slice against itself, come last, while the last gradients travel. The fraction
  // that comes first is that of the keys in all bytes that travel.
  const int64_t size = size_of(a.qkv.dtype), rows_first = 2 * c.L * size / (size + size_of(stat));
  auto own = [&](bool last) {
    for_blocks(c, c.r, [&](AttentionBlock block) {
      if (block.offset > 0 && last) {
        block.queries.first += rows_first;
        block.queries.rows -= rows_first;
        block.offset += rows_first;
      } else if (block.offset > 0) {
        block.queries.rows = rows_first;
      }
      if (block.queries.rows > 0 && (last || block.offset > 0)) block_backward(block, a.qkv, home);
    });
  };
  own(false);
  for (int s = 1; s < c.P; ++s) {
    const Tensor kv = keys.at(s), part = parts[s % 2];
    zero(part, compute);
    for_blocks(c, keys.owner(s), [&](const AttentionBlock& block) { block_backward(block, kv, part); });
    if (s > 1) {
      compute.wait(arrived);
      add_to(part, incoming, compute);
    }
    c.comm().exchange(part, c.next(), incoming, c.previous(), c.after_compute());
    arrived = c.stream().record();
  }
  own(true);
  compute.wait(arrived);
  add_to(home, incoming, compute);
  c.copy_columns(dqkv, 0, dq, 0, c.query_width);
  c.copy_columns(dqkv, c.query_width, home, 0, c.key_width);
}

// ---- All-gather ----------------------------------------------------------------------------------------------------

// The keys and values of whole sequences (B P T, 2 Hkv D).
inline Tensor gather_keys(Tensor qkv, const ContextGroup& c) {
  const Tensor all = c.g.temporary("keys and values", qkv.dtype, {c.P * c.N, c.key_width});
  auto scope = c.g.arena.scope();
  const Tensor shares = c.g.temporary("gathered keys and values", qkv.dtype, {c.P * c.N, c.key_width});
  c.copy_columns(rows_of(shares, {c.r * c.N, c.N}), 0, qkv, c.query_width, c.key_width);
  c.comm().all_gather(shares, c.after_compute());
  c.g.compute.wait(c.stream().record());
  c.to_sequences(all, shares);
  return all;
}
// Calls f(block) for each slice of this rank, against all keys up to the slice's own.
template <class F>
void for_slices(const ContextGroup& c, F&& f) {
  for (int i = 0; i < 2; ++i) {
    const int64_t first = c.slice_of(c.r, i) * c.L;
    f(c.block(i, {c.whole, 0, first + c.L}, first));
  }
}

inline void all_gather_forward(const AttentionTensors& a, const ContextGroup& c) {
  const Tensor kv = gather_keys(a.qkv, c);
  const RowStatistics rows = a.rows(c.g);
  for_slices(c, [&](const AttentionBlock& block) {
    llmc::attention_forward(a.out, rows, a.qkv, kv, a.positions, block, c.g.compute);
  });
  a.record(rows.largest, c.g);
}

inline void all_gather_backward(Tensor dqkv, Tensor dout, const AttentionTensors& a, const ContextGroup& c) {
  const DType stat = accumulator_of(a.qkv.dtype);
  Stream& compute = c.g.compute;
  const Tensor kv = gather_keys(a.qkv, c);
  const Tensor dq = c.g.temporary("gradient of queries", stat, {c.N, c.query_width});
  const Tensor dkv = c.g.temporary("gradient of keys and values", stat, {c.P * c.N, c.key_width});
  const Tensor shares = c.g.temporary("gradient of keys, by rank", stat, {c.P * c.N, c.key_width});
  zero(dq, compute);
  zero(dkv, compute);
  for_slices(c, [&](const AttentionBlock& block) {
    llmc::attention_backward(dq, dkv, dout, a.out, a.qkv, kv, a.lse, a.positions, block, Accumulate::yes, compute);
  });
  c.to_shares(shares, dkv);
  c.comm().reduce_scatter(shares, c.after_compute());
  compute.wait(c.stream().record());
  c.copy_columns(dqkv, 0, dq, 0, c.query_width);
  c.copy_columns(dqkv, c.query_width, rows_of(shares, {c.r * c.N, c.N}), 0, c.key_width);
}

// ---- Ulysses -------------------------------------------------------------------------------------------------------

// Which heads each rank computes.
struct HeadShares {
  int64_t queries, keys;  // heads of a rank
  int copies;             // ranks with the same key-value head
  HeadShares(const AttentionShape& s, int P)
      : queries(exact_div(s.Hq, P, "query heads over --cp")),
        keys(s.Hkv >= P ? exact_div(s.Hkv, P, "key-value heads over --cp") : 1),
        copies(s.Hkv >= P ? 1 : static_cast<int>(exact_div(P, s.Hkv, "--cp over key-value heads"))) {}
  int64_t all() const { return queries + 2 * keys; }
  int64_t first_key(int rank) const { return rank / copies * keys; }
};

// out (B P T, width) = the heads of this rank for whole sequences, received from all ranks. pack(p, room) enqueues the
// copies that fill room (B T, width) with the data for rank p.
template <class Pack>
void to_heads(Tensor out, const ContextGroup& c, Pack&& pack) {
  auto scope = c.g.arena.scope();
  const int64_t width = out.shape[1];
  const Tensor sent = c.g.temporary("heads to send", out.dtype, {c.P * c.N, width});
  const Tensor shares = c.g.temporary("heads that arrive", out.dtype, {c.P * c.N, width});
  for (int p = 0; p < c.P; ++p) pack(p, rows_of(sent, {p * c.N, c.N}));
  c.comm().all_to_all(shares, sent, c.after_compute());
  c.g.compute.wait(c.stream().record());
  c.to_sequences(out, shares);
}
// The way back: sends x (B P T, width) and returns each rank's heads for this rank's rows, (P, B T, width), in `dtype`.
inline Tensor to_rows(Tensor x, DType dtype, const ContextGroup& c) {
  const int64_t width = x.shape[1];
  const Tensor shares = c.g.temporary("rows that arrive", dtype, {c.P * c.N, width});
  auto scope = c.g.arena.scope();
  const Tensor sent = c.g.temporary("rows to send", dtype, {c.P * c.N, width});
  c.to_shares(sent, x);
  c.comm().all_to_all(shares, sent, c.after_compute());
  c.g.compute.wait(c.stream().record());
  return shares;
}
// This rank's query, key and value heads of whole sequences.
inline Tensor heads_of_sequences(Tensor qkv, const HeadShares& heads, const ContextGroup& c) {
  const int64_t D = c.shape.D;
  const Tensor all = c.g.temporary("heads of whole sequences", qkv.dtype, {c.P * c.N, heads.all() * D});
  to_heads(all, c, [&](int p, Tensor room) {
    const int64_t first_key = c.shape.Hq + heads.first_key(p);
    c.copy_columns(room, 0, qkv, p * heads.queries * D, heads.queries * D);
    c.copy_columns(room, heads.queries * D, qkv, first_key * D, heads.keys * D);
    c.copy_columns(room, (heads.queries + heads.keys) * D, qkv, (first_key + c.shape.Hkv) * D, heads.keys * D);
  });
  return all;
}
inline AttentionShape whole_shape(const HeadShares& heads, const ContextGroup& c) {
  return {c.shape.B, c.whole, heads.queries, heads.keys, c.shape.D};
}

inline void ulysses_forward(const AttentionTensors& a, const ContextGroup& c) {
  const HeadShares heads(c.shape, c.P);
  const AttentionShape shape = whole_shape(heads, c);
  const int64_t width = heads.queries * c.shape.D;
  const Tensor all = heads_of_sequences(a.qkv, heads, c);
  const Tensor result = c.g.temporary("attention of some heads", a.qkv.dtype, {c.P * c.N, width});
  AttentionTensors of_heads = a;
  of_heads.lse = a.lse.reshaped({shape.B, shape.Hq, shape.T});
  if (!a.largest.empty()) of_heads.largest = a.largest.slice(c.r * shape.Hq, {shape.Hq});
  const RowStatistics rows = of_heads.rows(c.g);
  llmc::attention_forward(result, rows, all, all, a.positions, whole_sequences(shape), c.g.compute);
  of_heads.record(rows.largest, c.g);
  const Tensor shares = to_rows(result, a.qkv.dtype, c);
  for (int p = 0; p < c.P; ++p) c.copy_columns(a.out, p * width, rows_of(shares, {p * c.N, c.N}), 0, width);
}

inline void ulysses_backward(Tensor dqkv, Tensor dout, const AttentionTensors& a, const ContextGroup& c) {
  const HeadShares heads(c.shape, c.P);
  const AttentionShape shape = whole_shape(heads, c);
  const int64_t D = c.shape.D, width = heads.queries * D, keys = 2 * heads.keys * D;
  // Where several ranks have the same keys, their parts of the gradients stay in fp32.
  const bool parts = heads.copies > 1;
  const DType sum = parts ? accumulator_of(a.qkv.dtype) : a.qkv.dtype;
  const Tensor all = heads_of_sequences(a.qkv, heads, c);
  const Tensor dq = c.g.temporary("gradient of query heads", sum, {c.P * c.N, width});
  const Tensor dkv = c.g.temporary("gradient of key-value heads", sum, {c.P * c.N, keys});
  {
    auto scope = c.g.arena.scope();
    const Tensor result = c.g.temporary("attention of some heads", a.qkv.dtype, {c.P * c.N, width});
    const Tensor dresult = c.g.temporary("gradient of attention of some heads", a.qkv.dtype, {c.P * c.N, width});
    for (const auto& [whole, share] : {std::pair{result, a.out}, std::pair{dresult, dout}})
      to_heads(whole, c, [&](int p, Tensor room) { c.copy_columns(room, 0, share, p * width, width); });
    if (parts) zero(dq, c.g.compute), zero(dkv, c.g.compute);
    llmc::attention_backward(dq, dkv, dresult, result, all, all, a.lse.reshaped({shape.B, shape.Hq, shape.T}),
                             a.positions, whole_sequences(shape), parts ? Accumulate::yes : Accumulate::no,
                             c.g.compute);
  }
  {
    auto scope = c.g.arena.scope();
    const Tensor shares = to_rows(dq, a.qkv.dtype, c);
    for (int p = 0; p < c.P; ++p) c.copy_columns(dqkv, p * width, rows_of(shares, {p * c.N, c.N}), 0, width);
  }
  const Tensor shares = to_rows(dkv, sum, c);
  for (int p = 0; p < c.P; p += heads.copies) {  // ranks p to p + copies - 1 have the same keys
    auto scope = c.g.arena.scope();
    const Tensor of_ranks = rows_of(shares, {p * c.N, heads.copies * c.N});
    Tensor whole = of_ranks;
    if (parts) {
      whole = c.g.temporary("gradient of keys of one head", sum, {c.N, keys});
      merge_parts(whole, of_ranks.reshaped({heads.copies, c.N, keys}), {}, c.g.compute);
    }
    const int64_t first_key = c.shape.Hq + heads.first_key(p);
    c.copy_columns(dqkv, first_key * D, whole, 0, keys / 2);
    c.copy_columns(dqkv, (first_key + c.shape.Hkv) * D, whole, keys / 2, keys / 2);
  }
}

}  // namespace detail

// attention_forward() over whole sequences; this rank has the rows of its share.
inline void attention_forward(const AttentionTensors& a, const AttentionShape& shape, const ContextParallel& context,
                              const Group& g) {
  auto scope = g.arena.scope();
  if (context.ranks == 1) {
    const RowStatistics rows = a.rows(g);
    llmc::attention_forward(a.out, rows, a.qkv, a.qkv, a.positions, whole_sequences(shape), g.compute);
    return a.record(rows.largest, g);
  }
  const detail::ContextGroup c{g, shape};
  switch (context.attention) {
    case ContextAttention::ring: return detail::ring_forward(a, c);
    case ContextAttention::all_gather: return detail::all_gather_forward(a, c);
    case ContextAttention::ulysses: return detail::ulysses_forward(a, c);
  }
}

// dqkv = ... (overwrites all of it)
inline void attention_backward(Tensor dqkv, Tensor dout, const AttentionTensors& a, const AttentionShape& shape,
                               const ContextParallel& context, const Group& g) {
  if (context.ranks == 1)
    return llmc::attention_backward(dqkv, dqkv, dout, a.out, a.qkv, a.qkv, a.lse, a.positions, whole_sequences(shape),
                                    Accumulate::no, g.compute);
  auto scope = g.arena.scope();
  const detail::ContextGroup c{g, shape};
  switch (context.attention) {
    case ContextAttention::ring: return detail::ring_backward(dqkv, dout, a, c);
    case ContextAttention::all_gather: return detail::all_gather_backward(dqkv, dout, a, c);
    case ContextAttention::ulysses: return detail::ulysses_backward(dqkv, dout, a, c);
  }
}

}  // namespace llmc::parallel
