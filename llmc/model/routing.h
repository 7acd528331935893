// routing.h: which experts the rows of a layer go to, and what a training step records about it.
#pragma once
#include <algorithm>
#include <functional>
#include <memory>
#include <optional>

#include "dist/parallel.h"
#include "dist/unit_state.h"
#include "model/activations.h"
#include "model/config.h"
#include "ops/ops.h"

namespace llmc {

// The rows of the residual stream that a rank has, and their sequences.
struct StreamRows {
  int64_t count = 0;  // without padding
  Segments segments = {1};
  int64_t sequence = 1;  // rows of a whole sequence, on all ranks
};

// shape: the rows of a context-parallel rank; with context parallelism it has two slices of each sequence.
inline StreamRows stream_rows_of(const BatchShape& shape, const TensorParallel& tensor, const ContextParallel& context,
                                 int tensor_rank) {
  const int64_t N = shape.rows(), S = tensor.stream_rows(N), first = tensor.by_rows() ? S * tensor_rank : 0;
  const int64_t length = context.ranks > 1 ? shape.T / 2 : shape.T;
  return {std::clamp<int64_t>(N - first, 0, S), {length, first % length}, shape.T * context.ranks};
}

// The settings and records of training for the experts of a layer.
struct ExpertTraining {
  RouterLosses losses;
  std::optional<int64_t> capacity;             // rows of an expert from one sequence; none: any number (dropless)
  Tensor totals;                               // (4) fp64 +=: the losses of router_losses(), and dropped choices
  Tensor chosen;                               // (E) fp64 +=: how often each expert was chosen
  std::optional<SegmentOrder> sequences = {};  // if sequences are spread over ranks: the order of their segments
  bool records = true;                         // false in a recomputation
  std::shared_ptr<int> rounds = {};            // the most rounds in which rows went to experts of other ranks
};

// What a layer with experts needs besides its inputs.
struct Routing {
  StreamRows rows = {};
  Tensor bias = {};                                // (E) added to the scores for the choice only; or an empty tensor
  std::optional<ExpertTraining> training = {};     // none: nothing is dropped or recorded
  std::function<const UnitState&()> experts = {};  // acquires the experts' unit unless it is acquired already
};

namespace detail {

// The first n rows, those that are not padding.
inline Tensor first_rows(const Tensor& t, int64_t n) { return parallel::rows_of(t, {0, n}); }
inline void zero_padding(const Tensor& t, int64_t n, Stream& stream) {
  if (const int64_t S = t.shape[0]; n < S) zero(parallel::rows_of(t, {n, S - n}), stream);
}

// The number of rows that each rank sends to each other, with padding, if a capacity bounds it; 0: no padding, only the
// real rows. x (S, C)
inline int64_t padded_rows(const Tensor& x, const ModelConfig& c, const Routing& r) {
  return r.training && r.training->capacity ? c.experts.stride(x.shape[0]) : 0;
}

// Adds to the records of training, and keeps the counts over whole sequences that the balancing loss and the capacity
// need.
inline void record_routing(const ExpertActivations& a, const ModelConfig& c, const Routing& r,
                           const parallel::Group& p) {
  auto scope = p.arena.scope();
  const ExpertTraining& training = *r.training;
  const int64_t n = r.rows.count, segments = r.rows.segments.count(n), most = a.counts.shape[0], E = c.experts.count;
  const int64_t ranks = training.sequences ? training.sequences->ranks() : 1, me = p.ranks[GroupName::sequences].rank();
  auto table = [&](const char* name, DType dtype, int64_t columns) {
    return p.temporary(name, dtype, {ranks, most, columns});
  };
  const Tensor counts = training.sequences ? table("choices of all ranks", DType::int32, E) : a.counts,
               probabilities = table("router probabilities", a.logits.dtype, E),
               sums = table("router sums", a.logits.dtype, 2);
  auto mine = [&](const Tensor& t) {
    const int64_t columns = t.shape[t.shape.rank() - 1];
    return t.slice(training.sequences ? me * most * columns : 0, {most, columns});
  };
  for (const Tensor& t : {counts, probabilities, sums}) zero(mine(t), p.compute);
  if (n > 0)
    router_statistics(first_rows(mine(counts), segments), first_rows(mine(probabilities), segments),
                      first_rows(mine(sums), segments), first_rows(a.logits, n), first_rows(a.choices, n), c.router(),
                      r.rows.segments, p.compute);
  add_expert_counts(training.chosen, mine(counts), p.compute);
  const Tensor losses = training.totals.slice(0, {3});
  if (!training.sequences)
    return router_losses(losses, first_rows(counts, segments), first_rows(mine(probabilities), segments),
                         first_rows(mine(sums), segments), c.router(), r.rows.sequence, p.compute);
  for (const Tensor& t : {counts, probabilities, sums}) p.ranks[GroupName::sequences].all_gather(t, p.compute);
  segment_starts(a.counts, a.starts, counts, *training.sequences, me, p.compute);
  if (me > 0) return;  // the first of the ranks counts the losses of their sequences
  const int64_t B = training.sequences->count();
  const Tensor of_all = p.temporary("choices in sequences", DType::int32, {B, E}),
               probabilities_of_all = p.temporary("router probabilities of sequences", a.logits.dtype, {B, E}),
               sums_of_all = p.temporary("router sums of sequences", a.logits.dtype, {B, 2});
  join_segments(of_all, probabilities_of_all, sums_of_all, counts, probabilities, sums, *training.sequences, p.compute);
  router_losses(losses, of_all, probabilities_of_all, sums_of_all, c.router(), r.rows.sequence, p.compute);
}

// Computes the choices of the rows of x (S, C), their weights and their order by expert.
inline void route(const ExpertActivations& a, Tensor x, const UnitState& unit, const ModelConfig& c, const Routing& r,
                  const parallel::Group& p) {
  const int64_t n = r.rows.count;
  const Tensor logits = first_rows(a.logits, n), choices = first_rows(a.choices, n);
  router_logits(logits, first_rows(x, n), unit.weight("moe.router.weight"), p.compute);
  router_forward(choices, first_rows(a.weights, n), logits, r.bias, c.router(), p.compute);
  const bool records = r.training && r.training->records;
  if (records) record_routing(a, c, r, p);
  const auto capacity = r.training ? r.training->capacity : std::nullopt;
  const bool spread = r.training && r.training->sequences;
  const int64_t stride = padded_rows(x, c, r);
  dispatch_plan(
      first_rows(a.places, n), a.offsets, choices,
      capacity && spread ? first_rows(a.starts, r.rows.segments.count(n)) : Tensor{}, capacity, r.rows.segments,
      stride > 0 ? ExpertRoom{c.experts.ranks * stride, c.experts.ranks} : ExpertRoom{a.outputs.shape[0]}, p.compute);
  if (records) count_dropped(r.training->totals.slice(3, {1}), n * c.experts.per_token, a.offsets, p.compute);
}
// out = the rows of x (S, C), in the order of their experts.
inline void rows_by_expert(Tensor out, const ExpertActivations& a, Tensor x, const Routing& r, Stream& stream) {
  const int64_t n = r.rows.count;
  dispatch_rows(out, first_rows(x, n), first_rows(a.places, n), stream);
}

}  // namespace detail
}  // namespace llmc
