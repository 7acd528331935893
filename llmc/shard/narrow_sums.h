// narrow_sums.h: sums of gradients over ranks that travel in a narrower dtype than they are kept in (--reduce-dtype
// bf16). Every rank's part is rounded once, the parts of an element are added in fp32 in rank order, and the sum is
// rounded once (contract 12); so all shards, and all stages of ZeRO, have the same bits. A rank sends what a ring
// sends, half as wide: (P - 1) n elements for P shards of n.
#pragma once
#include "comm/comm.h"
#include "ops/ops.h"

namespace llmc {

class NarrowSums {
 public:
  NarrowSums() = default;  // none: gradients travel in the dtype in which they are kept
  // ranks: the most of a group; elements: of the largest buffer, and of the pieces in which larger ones go
  NarrowSums(DType dtype, int64_t ranks, int64_t elements, Arena& arena, int64_t piece = 1 << 24) {
    const int64_t room = std::min(elements, std::max(piece, ranks * alignment));
    for (Tensor* t : {&sent_, &received_}) *t = arena.alloc("gradients on their way", "a piece", dtype, {room});
  }
  bool empty() const { return sent_.empty(); }

  // Shard rank() of all (P n) = its sum over the ranks; the other shards are left alone.
  void reduce_scatter(const Tensor& all, Comm& group, Stream& stream) const {
    const int64_t P = group.size(), n = exact_div(all.numel(), P, "reduce_scatter: elements over ranks");
    if (P == 1) return;
    for_pieces(P, n, [&](int64_t begin, int64_t c) {
      const Tensor sent = sent_.slice(0, {P, c}), received = received_.slice(0, {P, 1, c}),
                   sum = sent_.slice(0, {1, c});
      copy_box(sent, {0, c, 0}, all, {begin, n, 0}, {P, 1, c}, stream);
      group.all_to_all(received, sent, stream);
      merge_parts(sum, received, {}, stream);
      convert(all.slice(group.rank() * n + begin, {1, c}), sum, stream);
    });
  }
  // all (P n) = the shards of all ranks, which reduce_scatter() or round() has made.
  void all_gather(const Tensor& all, Comm& group, Stream& stream) const {
    const int64_t P = group.size(), n = exact_div(all.numel(), P, "all_gather: elements over ranks");
    if (P == 1) return;
    for_pieces(P, n, [&](int64_t begin, int64_t c) {
      const Tensor piece = sent_.slice(0, {P, c});
      convert(piece.slice(group.rank() * c, {c}), all.slice(group.rank() * n + begin, {c}), stream);
      group.all_gather(piece, stream);
      copy_box(all, {begin, n, 0}, piece, {0, c, 0}, {P, 1, c}, stream);
    });
  }
  // Rounds what was added since.
  void round(const Tensor& t, Stream& stream) const {
    for_pieces(1, t.numel(), [&](int64_t begin, int64_t c) {
      convert(sent_.slice(0, {c}), t.slice(begin, {c}), stream);
      convert(t.slice(begin, {c}), sent_.slice(0, {c}), stream);
    });
  }

 private:
  static constexpr int64_t alignment = 64;

  // Calls f(begin, count) for pieces of n elements, P of which fit into the room.
  template <class F>
  void for_pieces(int64_t P, int64_t n, F&& f) const {
    const int64_t fits = sent_.numel() / P, most = n <= fits ? n : fits / alignment * alignment;
    for (int64_t begin = 0; begin < n; begin += most) f(begin, std::min(most, n - begin));
  }

  Tensor sent_, received_;
};

}  // namespace llmc
