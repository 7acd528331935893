// routing.h: which experts the rows of a layer go to, and what a training step records about it.
#pragma once
#include "model/layer.h"

namespace llmc {

// The common base of the parts of a layer with experts.
struct SparseLayer : Layer {
  const ExpertActivations& e;
  const Routing& r;
  int64_t n;  // rows of this rank, without padding
  explicit SparseLayer(const Layer& layer)
      : Layer(layer), e(layer.a.experts), r(layer.sequences.routing), n(r.rows.count) {}

 protected:
  bool exchanged() const { return r.placement.exchanged(); }
  // The first n rows, those that are not padding.
  Tensor rows(const Tensor& t) const { return parallel::rows_of(t, {0, n}); }
  void zero_padding(const Tensor& t) const {
    if (const int64_t S = t.shape[0]; n < S) zero(parallel::rows_of(t, {n, S - n}), stream());
  }
  // out = the rows of norm2 (S, C), in the order of their experts.
  void rows_by_expert(Tensor out) const { dispatch_rows(out, rows(a.norm2), rows(e.places), stream()); }
};

class ExpertRouter : SparseLayer {
 public:
  explicit ExpertRouter(const SparseLayer& layer) : SparseLayer(layer) {}

  // Computes the choices of the rows of norm2 (S, C), their weights and their order by expert.
  void forward() const {
    const Tensor logits = rows(e.logits), choices = rows(e.choices);
    router_logits(logits, rows(a.norm2), unit.weight("moe.router.weight"), stream());
    router_forward(choices, rows(e.weights), logits, r.bias, config.router(), stream());
    const bool records = r.training && r.training->records;
    if (records) record();
    const auto capacity = r.capacity();
    const Tensor starts = capacity && r.training->sequences ? of_segments(e.starts) : Tensor{};
    const int64_t ranks = r.placement.ranks, stride = r.padded_rows(a.norm2.shape[0]);
    dispatch_plan(rows(e.places), e.offsets, choices, starts, capacity, r.rows.segments,
                  stride > 0 ? ExpertRoom{ranks * stride, ranks} : ExpertRoom{e.outputs.shape[0]}, stream());
    if (records) count_dropped(r.training->totals.slice(3, {1}), n * config.experts.per_token, e.offsets, stream());
  }
  // dlogits (S, E) = ..., from the gradients of the weights (n, k) and from the router's own losses; dx (n, C) += ...
  void backward_input(Tensor dx, Tensor dlogits, Tensor dweights) const {
    const RouterLosses losses = r.training ? r.training->losses : RouterLosses{};
    const Tensor counts = losses.balance == 0 ? Tensor{} : of_segments(e.counts);
    router_backward(rows(dlogits), dweights, rows(e.logits), rows(e.choices), counts, config.router(), losses,
                    r.rows.segments, stream());
    router_backward_input(dx, rows(dlogits), unit.weight("moe.router.weight"), Accumulate::yes, stream());
  }
  void backward_weight(Tensor dlogits) const {
    const Tensor dweight = unit.gradient("moe.router.weight");
    router_backward_weight(dweight, rows(dlogits), rows(a.norm2), unit.accumulate(dweight), stream());
  }

 private:
  Tensor of_segments(const Tensor& t) const { return parallel::rows_of(t, {0, r.rows.segments.count(n)}); }

  // Adds to the records of training, and keeps the counts over sequences for the balancing loss and the capacity.
  void record() const {
    auto scope = group.arena.scope();
    const ExpertTraining& training = *r.training;
    const auto& order = training.sequences;
    const int64_t most = e.counts.shape[0], E = config.experts.count;
    const int64_t ranks = order ? order->ranks() : 1, me = group.ranks[GroupName::sequences].rank();
    auto table = [&](const char* name, DType dtype, int64_t columns) {
      return group.temporary(name, dtype, {ranks, most, columns});
    };
    const Tensor counts = order ? table("choices of all ranks", DType::int32, E) : e.counts,
                 probabilities = table("router probabilities", e.logits.dtype, E),
                 sums = table("router sums", e.logits.dtype, 2);
    auto mine = [&](const Tensor& t) {
      const int64_t columns = t.shape[t.shape.rank() - 1];
      return t.slice(order ? me * most * columns : 0, {most, columns});
    };
    auto my_segments = [&](const Tensor& t) { return of_segments(mine(t)); };
    for (const Tensor& t : {counts, probabilities, sums}) zero(mine(t), stream());
    if (n > 0)
      router_statistics(my_segments(counts), my_segments(probabilities), my_segments(sums), rows(e.logits),
                        rows(e.choices), config.router(), r.rows.segments, stream());
    add_expert_counts(training.chosen, mine(counts), stream());
    const Tensor losses = training.totals.slice(0, {3});
    if (!order)
      return router_losses(losses, my_segments(counts), my_segments(probabilities), my_segments(sums), config.router(),
                           r.rows.sequence, stream());
    for (const Tensor& t : {counts, probabilities, sums}) group.ranks[GroupName::sequences].all_gather(t, stream());
    segment_starts(e.counts, e.starts, counts, *order, me, stream());
    if (me > 0) return;  // the first of the ranks counts the losses of their sequences
    const int64_t B = order->count();
    const Tensor of_all = group.temporary("choices in sequences", DType::int32, {B, E}),
                 probabilities_of_all = group.temporary("router probabilities of sequences", e.logits.dtype, {B, E}),
                 sums_of_all = group.temporary("router sums of sequences", e.logits.dtype, {B, 2});
    join_segments(of_all, probabilities_of_all, sums_of_all, counts, probabilities, sums, *order, stream());
    router_losses(losses, of_all, probabilities_of_all, sums_of_all, config.router(), r.rows.sequence, stream());
  }
};

}  // namespace llmc
