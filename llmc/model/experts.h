// experts.h: the feed-forward of a layer with experts (Shazeer et al. 2017), forward and backward, as sequences of ops:
//
//   router     logits in fp32; the k experts with the largest scores, and their weights
//   dispatch   rows in the order of their experts; with a capacity, those that come too late in their sequence are left
//              out
//   experts    down(SwiGLU of gate and up), each for its own rows: grouped products. Where ranks share the experts of a
//              layer (--ep), the rows go to the ranks that have them and come back (dist/expert_exchange.h), while the
//              shared expert computes
//   combine    the sum of a row's k outputs with their weights, in the order of its choices
//   shared     one more expert for all rows, perhaps times the sigmoid of a gate of its own
//
// Sizes: as in transformer.h and activations.h. Which rows go to which expert stays on the device.
#pragma once
#include <algorithm>
#include <functional>
#include <optional>
#include <string>

#include "dist/expert_exchange.h"
#include "dist/parallel.h"
#include "dist/unit_state.h"
#include "model/activations.h"
#include "model/config.h"
#include "ops/ops.h"
#include "ops/ops_expert_ranks.h"

namespace llmc {

// Rows of the residual stream that a rank has, and of which sequences.
struct StreamRows {
  int64_t count = 0;  // without padding
  Segments segments = {1};
  int64_t sequence = 1;  // rows of a whole one, on all ranks
};

// shape: of what a context-parallel rank has; with context parallelism two slices of each sequence.
inline StreamRows stream_rows_of(const BatchShape& shape, const TensorParallel& tensor, const ContextParallel& context,
                                 int tensor_rank) {
  const int64_t N = shape.rows(), S = tensor.stream_rows(N), first = tensor.by_rows() ? S * tensor_rank : 0;
  const int64_t length = context.ranks > 1 ? shape.T / 2 : shape.T;
  return {std::clamp<int64_t>(N - first, 0, S), {length, first % length}, shape.T * context.ranks};
}

// What training has of the experts of a layer.
struct ExpertTraining {
  RouterLosses losses;
  std::optional<int64_t> capacity;             // rows of an expert from one sequence; none: any number (dropless)
  Tensor totals;                               // (4) fp64 +=: the losses of router_losses(), and dropped choices
  Tensor chosen;                               // (E) fp64 +=: how often each expert was chosen
  std::optional<SegmentOrder> sequences = {};  // where they are spread over ranks: how their segments make them up
  bool records = true;                         // false: computed again
};

// What a layer with experts needs besides its inputs.
struct Routing {
  StreamRows rows;
  Tensor bias = {};                                // (E) of the scores, for the choice alone; or an empty tensor
  std::optional<ExpertTraining> training = {};     // none: nothing is dropped or recorded
  std::function<const UnitState&()> experts = {};  // acquires their unit, if it is not yet
};

namespace detail {

// The matrices of the experts that a rank has, (E, 2 F, C) and (E, C, F): of their weights, or of gradients.
struct ExpertMatrices {
  Tensor gate_up, down;
  enum class Of : uint8_t { weights, gradients };
  ExpertMatrices(const UnitState& unit, const ModelConfig& c, Of of) {
    const auto& params = unit.spec().params;  // gate and up of each, then the downs
    const int E = static_cast<int>(params.size() / 3);
    auto matrix = [&](size_t first, int fused) {
      const std::string& name = params[first].name;
      return of == Of::weights ? unit.weight(name, fused) : unit.gradient(name, fused);
    };
    gate_up = matrix(0, 2 * E).reshaped({E, 2 * c.experts.width, c.n_embd});
    down = matrix(static_cast<size_t>(2 * E), E).reshaped({E, c.n_embd, c.experts.width});
  }
};

// The shared expert's gate is a router of one expert, with sigmoid scores.
inline constexpr Router shared_gate = {.E = 1, .k = 1, .scores = RouterScores::sigmoid, .normalized = false};

// Its choices, weights and places, from its logits.
struct SharedGate {
  Tensor choices, weights, places;  // (n, 1) each
  SharedGate(Tensor logits, const Segments& segments, const parallel::Group& p) {
    const int64_t n = logits.shape[0];
    auto integers = [&](const Shape& shape) { return p.temporary("gate of the shared expert", DType::int32, shape); };
    choices = integers({n, 1});
    places = integers({n, 1});
    weights = p.temporary("gate of the shared expert", logits.dtype, {n, 1});
    router_forward(choices, weights, logits, {}, shared_gate, p.compute);
    auto scope = p.arena.scope();
    dispatch_plan(places, integers({n}), integers({2}), choices, {}, std::nullopt, segments, p.compute);
  }
};

// The first n rows, those that are not padding.
inline Tensor first_rows(const Tensor& t, int64_t n) { return parallel::rows_of(t, {0, n}); }
inline void zero_padding(const Tensor& t, int64_t n, Stream& stream) {
  if (const int64_t S = t.shape[0]; n < S) zero(parallel::rows_of(t, {n, S - n}), stream);
}
// The number of rows that experts have, on the device.
inline Tensor number_of_rows(const ReceivedRows& r) { return r.offsets.slice(r.offsets.shape[0] - 1, {1}); }

inline void expert_activation(const ExpertActivations& a, Stream& stream) {
  swiglu_forward(a.received.activated, a.received.up, stream, number_of_rows(a.received));
  if (!a.shared_up.empty()) swiglu_forward(a.shared_activated, a.shared_up, stream);
}
// out (k S, C) = the rows of x, in the order of their experts.
inline void rows_by_expert(Tensor out, const ExpertActivations& a, Tensor x, const ModelConfig& c, const Routing& r,
                           Stream& stream) {
  dispatch_rows(out, first_rows(x, r.rows.count), a.sources, a.offsets, c.experts.per_token, stream);
}

// ---- Between the ranks that share the experts of a layer ------------------------------------------------------------

// What the experts of this rank have in a round after the first, whose rows are not kept.
inline ReceivedRows received_in_round(const ReceivedRows& like, const parallel::Group& p) {
  ReceivedRows r = like;
  for (auto t : {&ReceivedRows::offsets, &ReceivedRows::sources, &ReceivedRows::places, &ReceivedRows::rows,
                 &ReceivedRows::up, &ReceivedRows::activated})
    r.*t = p.temporary("rows of a further round", (like.*t).dtype, (like.*t).shape);
  return r;
}

// Which rows are sent to which rank: from how many rows each rank has for each expert.
inline ExpertRounds exchange_counts(const ExpertActivations& a, const ModelConfig& c, int64_t room,
                                    const parallel::Group& p) {
  auto scope = p.arena.scope();
  const int P = p.ranks.experts->size(), me = p.ranks.experts->rank();
  const int64_t E = c.experts.count, own = E / P;
  const Tensor table = p.temporary("rows for each expert", DType::fp64, {P, E});
  Stream& stream = *p.ranks.expert_stream;
  rows_of_experts(parallel::rows_of(table, {me, 1}).reshaped({E}), a.offsets, p.compute);
  stream.wait(p.compute.record());
  p.ranks.experts->all_gather(table, stream);
  const Readback on_host(table, stream);
  std::vector<int64_t> counts;
  if (on_host.moves_data()) {
    for (const double n : on_host.values()) counts.push_back(static_cast<int64_t>(n));
  } else {  // on paper: this rank gets as many as it has room for, the others their share
    for (int64_t i = 0; i < P * E; ++i) {
      const bool mine = i % E / own == me;
      counts.push_back(mine ? room / (P * own) : a.places.numel() / E);
    }
  }
  return {std::move(counts), P, room};
}

// Rows that are on their way to the experts of this rank, in the order of the ranks that sent them.
struct Arrival {
  Tensor rows;  // (R, C)
  Event event;
};
// sent (k S, C): in the order of their experts; arrived (R, C)
inline Arrival send_rows(Tensor arrived, Tensor sent, const ExpertRounds& rounds, int round, const parallel::Group& p) {
  Comm& group = *p.ranks.experts;
  Stream& stream = *p.ranks.expert_stream;
  stream.wait(p.compute.record());
  group.all_to_all_rows(arrived, sent, rounds.blocks_sent(group.rank(), round),
                        rounds.blocks_received(group.rank(), round), stream);
  return {arrived, stream.record()};
}
// The order by expert of the rows of a round.
inline void plan_arrival(const ReceivedRows& r, const ExpertRounds& rounds, int round, const parallel::Group& p) {
  auto scope = p.arena.scope();
  const Comm& group = *p.ranks.experts;
  std::vector<int32_t> counts = rounds.counts_received(group.rank(), round);
  const Tensor on_device =
      p.temporary("rows that arrive for each expert", DType::int32, {group.size(), r.offsets.shape[0] - 1});
  upload(on_device, std::move(counts), p.compute);
  arrival_plan(r.places, r.sources, r.offsets, on_device, 0, p.compute);
}
// out (R, C) = the rows in the order of the experts.
inline void take_rows(Tensor out, const Arrival& arrival, const ReceivedRows& r, const parallel::Group& p) {
  p.compute.wait(arrival.event);
  dispatch_rows(out, arrival.rows, r.sources, r.offsets, 1, p.compute);
}
// to (k S, C) = what the ranks with the experts have made of the rows, `from` (R, C) on each, of a round.
inline void return_rows(Tensor to, Tensor from, const ReceivedRows& r, const ExpertRounds& rounds, int round,
                        const parallel::Group& p) {
  auto scope = p.arena.scope();
  Comm& group = *p.ranks.experts;
  Stream& stream = *p.ranks.expert_stream;
  const Tensor sent = p.temporary("rows that return", from.dtype, from.shape);
  combine_rows(sent, from, {}, r.places.reshaped({from.shape[0], 1}), Accumulate::no, p.compute);
  stream.wait(p.compute.record());
  group.all_to_all_rows(to, sent, rounds.blocks_received(group.rank(), round), rounds.blocks_sent(group.rank(), round),
                        stream);
  p.compute.wait(stream.record());
}

// ---- Forward --------------------------------------------------------------------------------------------------------

// out (R, C) = down(SwiGLU of gate and up) of the rows that were received.
inline void experts_forward(Tensor out, const ReceivedRows& r, const ExpertMatrices& experts, Stream& stream) {
  grouped_linear_forward(r.up, r.rows, experts.gate_up, r.offsets, stream);
  swiglu_forward(r.activated, r.up, stream, number_of_rows(r));
  grouped_linear_forward(out, r.activated, experts.down, r.offsets, stream);
}

// a.outputs = those of all rows of x (S, C), by way of the ranks that have the experts. meanwhile(): enqueues work that
// does not depend on them.
template <class Meanwhile>
void experts_of_all_ranks(const ExpertActivations& a, Tensor x, const ModelConfig& c, const Routing& r,
                          const parallel::Group& p, Meanwhile&& meanwhile) {
  auto scope = p.arena.scope();
  const int64_t room = a.received.rows.shape[0];
  const Tensor sent = p.temporary("rows by expert", x.dtype, a.outputs.shape);
  rows_by_expert(sent, a, x, c, r, p.compute);
  ExpertRounds& rounds = *a.rounds = exchange_counts(a, c, room, p);
  auto like_received = [&](const char* name) { return p.temporary(name, x.dtype, a.received.rows.shape); };
  const Tensor out = like_received("outputs of experts"), arrived = like_received("rows that arrive");
  const ReceivedRows further = received_in_round(a.received, p);
  for (int round = 0; round < rounds.rounds(); ++round) {
    auto scope_of_round = p.arena.scope();
    const ReceivedRows& received = round == 0 ? a.received : further;
    const Arrival arrival = send_rows(arrived, sent, rounds, round, p);
    plan_arrival(received, rounds, round, p);
    if (round == 0) meanwhile();
    take_rows(received.rows, arrival, received, p);
    experts_forward(out, received, ExpertMatrices(r.experts(), c, ExpertMatrices::Of::weights), p.compute);
    return_rows(a.outputs, out, received, rounds, round, p);
  }
}

// Adds to what training records, and keeps what its balancing loss and its capacity need of whole sequences.
inline void record_routing(const ExpertActivations& a, const ModelConfig& c, const Routing& r,
                           const parallel::Group& p) {
  auto scope = p.arena.scope();
  const ExpertTraining& training = *r.training;
  const int64_t n = r.rows.count, segments = r.rows.segments.count(n), most = a.counts.shape[0], E = c.experts.count;
  const int64_t ranks = training.sequences ? training.sequences->ranks() : 1, me = p.ranks.sequences->rank();
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
  for (const Tensor& t : {counts, probabilities, sums}) p.ranks.sequences->all_gather(t, p.compute);
  segment_starts(a.counts, a.starts, counts, *training.sequences, me, p.compute);
  if (me > 0) return;  // the first of the ranks counts the losses of their sequences
  const int64_t B = training.sequences->count();
  const Tensor of_all = p.temporary("choices in sequences", DType::int32, {B, E}),
               probabilities_of_all = p.temporary("router probabilities of sequences", a.logits.dtype, {B, E}),
               sums_of_all = p.temporary("router sums of sequences", a.logits.dtype, {B, 2});
  join_segments(of_all, probabilities_of_all, sums_of_all, counts, probabilities, sums, *training.sequences, p.compute);
  router_losses(losses, of_all, probabilities_of_all, sums_of_all, c.router(), r.rows.sequence, p.compute);
}

// All but the sum of the outputs, which the backward does not need.   x (S, C); gathered: room for x as all ranks have
// it, or an empty tensor
inline void experts_interior(const ExpertActivations& a, Tensor x, Tensor gathered, const UnitState& unit,
                             const ModelConfig& c, const Routing& r, const parallel::Group& p) {
  const int64_t n = r.rows.count;
  const Tensor rows = first_rows(x, n), logits = first_rows(a.logits, n), choices = first_rows(a.choices, n);
  router_logits(logits, rows, unit.weight("moe.router.weight"), p.compute);
  router_forward(choices, first_rows(a.weights, n), logits, r.bias, c.router(), p.compute);
  const bool records = r.training && r.training->records;
  if (records) record_routing(a, c, r, p);
  const auto capacity = r.training ? r.training->capacity : std::nullopt;
  const bool spread = r.training && r.training->sequences;
  dispatch_plan(first_rows(a.places, n), a.sources, a.offsets, choices,
                capacity && spread ? first_rows(a.starts, r.rows.segments.count(n)) : Tensor{}, capacity,
                r.rows.segments, p.compute);
  if (records) count_dropped(r.training->totals.slice(3, {1}), n * c.experts.per_token, a.offsets, p.compute);
  auto shared_expert = [&] {
    if (a.shared_up.empty()) return;
    parallel::column_linear(a.shared_up, x, unit.weight("moe.shared.gate.weight", 2), {}, gathered, p);
    swiglu_forward(a.shared_activated, a.shared_up, p.compute);
    if (a.shared_out.empty()) return;
    parallel::row_linear(a.shared_out, a.shared_activated, unit.weight("moe.shared.down.weight"), {}, p);
    router_logits(first_rows(a.gate_logits, n), rows, unit.weight("moe.shared_gate.weight"), p.compute);
  };
  if (c.experts.ranks > 1) return experts_of_all_ranks(a, x, c, r, p, shared_expert);
  rows_by_expert(a.received.rows, a, x, c, r, p.compute);
  experts_forward(a.outputs, a.received, ExpertMatrices(r.experts(), c, ExpertMatrices::Of::weights), p.compute);
  shared_expert();
}
// What of it is recomputed when the norm before it is.
inline void recompute_rows(const ExpertActivations& a, Tensor x, const ModelConfig& c, const Routing& r,
                           Stream& stream) {
  if (c.experts.ranks == 1) rows_by_expert(a.received.rows, a, x, c, r, stream);
}

// out (S, C) = the sum of the outputs.
inline void experts_sum(Tensor out, const ExpertActivations& a, const UnitState& unit, const Routing& r,
                        const parallel::Group& p) {
  const int64_t n = r.rows.count;
  combine_rows(first_rows(out, n), a.outputs, first_rows(a.weights, n), first_rows(a.places, n), Accumulate::no,
               p.compute);
  zero_padding(out, n, p.compute);
  auto scope = p.arena.scope();
  if (!a.shared_out.empty()) {
    const SharedGate gate(first_rows(a.gate_logits, n), r.rows.segments, p);
    combine_rows(first_rows(out, n), a.shared_out, gate.weights, gate.places, Accumulate::yes, p.compute);
  } else if (!a.shared_up.empty()) {
    const Tensor shared = p.temporary("output of the shared expert", out.dtype, out.shape);
    parallel::row_linear(shared, a.shared_activated, unit.weight("moe.shared.down.weight"), {}, p);
    residual_forward(out, out, shared, p.compute);
  }
}

// ---- Backward -------------------------------------------------------------------------------------------------------

// The gradients of the experts' matrices += ..., from those of their outputs (R, C) and of up (R, 2 F).
inline void experts_backward_matrices(Tensor doutputs, Tensor dup, const ReceivedRows& r,
                                      const ExpertMatrices& gradients, Stream& stream) {
  grouped_linear_backward_weight(gradients.down, doutputs, r.activated, r.offsets, stream);
  grouped_linear_backward_weight(gradients.gate_up, dup, r.rows, r.offsets, stream);
}
// The gradients of the matrices that multiply rows of the residual stream or of an expert += ...: the weight part.
// d: the gradients of the outputs of the products
inline void experts_backward_weight(const OutputGradients::OfExperts& d, const ExpertActivations& a, Tensor x,
                                    Tensor gathered, const UnitState& unit, const ModelConfig& c, const Routing& r,
                                    const parallel::Group& p) {
  const int64_t n = r.rows.count;
  const Tensor rows = first_rows(x, n);
  if (c.experts.ranks == 1)  // otherwise they have it from backward_of_all_ranks()
    experts_backward_matrices(d.outputs, d.up, a.received, {r.experts(), c, ExpertMatrices::Of::gradients}, p.compute);
  router_backward_weight(unit.gradient("moe.router.weight"), first_rows(d.logits, n), rows, p.compute);
  if (a.shared_activated.empty()) return;
  parallel::row_linear_backward_weight(unit.gradient("moe.shared.down.weight"), {}, d.shared_out, a.shared_activated,
                                       {}, p);
  const Tensor dshared = unit.gradient("moe.shared.gate.weight", 2);
  if (gathered.empty()) parallel::column_linear_backward_weight(dshared, {}, d.shared_up, x, p);
  else linear_backward_weight(dshared, {}, d.shared_up, first_rows(gathered, d.shared_up.shape[0]), p.compute);
  if (!d.gate_logits.empty())
    router_backward_weight(unit.gradient("moe.shared_gate.weight"), first_rows(d.gate_logits, n), rows, p.compute);
}

// drows (R, C) and dup (R, 2 F) = the gradients of the rows that were received and of up, from those of their outputs.
inline void experts_backward_input(Tensor drows, Tensor dup, Tensor doutputs, const ReceivedRows& r,
                                   const ExpertMatrices& experts, const parallel::Group& p) {
  auto scope = p.arena.scope();
  const Tensor dactivated = p.temporary("gradient of activated of experts", r.activated.dtype, r.activated.shape);
  grouped_linear_backward_input(dactivated, doutputs, experts.down, r.offsets, p.compute);
  swiglu_backward(dup, dactivated, r.up, p.compute, number_of_rows(r));
  grouped_linear_backward_input(drows, dup, experts.gate_up, r.offsets, p.compute);
}

// drows (k S, C) = the gradients of the rows of x, in the order of the experts, from doutputs (k S, C), those of their
// outputs; the gradients of the experts' matrices += ... The rows of further rounds are sent and computed again. So the
// weight part of the experts is done here as well: the rows are no longer there when it comes.
template <class Meanwhile>
void backward_of_all_ranks(Tensor drows, Tensor doutputs, const ExpertActivations& a, Tensor x, const ModelConfig& c,
                           const Routing& r, const parallel::Group& p, Meanwhile&& meanwhile) {
  auto scope = p.arena.scope();
  Stream& stream = p.compute;
  const ExpertRounds& rounds = *a.rounds;
  const ExpertMatrices experts(r.experts(), c, ExpertMatrices::Of::weights);
  auto like = [&](const char* name, const Tensor& t) { return p.temporary(name, t.dtype, t.shape); };
  const ReceivedRows& first = a.received;
  const Tensor dreceived = like("gradient of rows by expert", first.rows),
               dup = like("gradient of up of experts", first.up),
               dreturned = like("gradient of outputs of experts", first.rows),
               darrived = like("gradients that arrive", first.rows);
  auto compute = [&](const ReceivedRows& received, const Arrival& arrival, int round) {
    take_rows(dreturned, arrival, received, p);
    experts_backward_input(dreceived, dup, dreturned, received, experts, p);
    experts_backward_matrices(dreturned, dup, received, {r.experts(), c, ExpertMatrices::Of::gradients}, stream);
    return_rows(drows, dreceived, received, rounds, round, p);
  };
  {
    const Arrival arrival = send_rows(darrived, doutputs, rounds, 0, p);
    meanwhile();
    compute(first, arrival, 0);
  }
  const ReceivedRows further = received_in_round(first, p);  // room for it, whether there is one or not
  const Tensor sent = like("rows by expert", a.outputs), arrived = like("rows that arrive", first.rows);
  for (const Tensor& t : {first.rows, first.activated}) {
    auto scope_of_round = p.arena.scope();
    like("room of a further round", t);
  }
  if (rounds.rounds() > 1) rows_by_expert(sent, a, x, c, r, stream);
  for (int round = 1; round < rounds.rounds(); ++round) {
    const Arrival arrival = send_rows(arrived, sent, rounds, round, p),
                  darrival = send_rows(darrived, doutputs, rounds, round, p);
    plan_arrival(further, rounds, round, p);
    take_rows(further.rows, arrival, further, p);
    grouped_linear_forward(further.up, further.rows, experts.gate_up, further.offsets, stream);
    swiglu_forward(further.activated, further.up, stream, number_of_rows(further));
    compute(further, darrival, round);
  }
}

// The shared expert: dx (S, C) = ..., from dout; sets its part of d.
inline void shared_expert_backward(Tensor dx, const OutputGradients::OfExperts& d, Tensor dout,
                                   const ExpertActivations& a, const UnitState& unit, const Routing& r,
                                   const parallel::Group& p) {
  auto scope = p.arena.scope();
  const int64_t n = r.rows.count;
  if (!a.shared_out.empty()) {
    const Tensor logits = first_rows(a.gate_logits, n);
    const Tensor dgate = p.temporary("gradient of the gate", logits.dtype, {n, 1});
    const SharedGate gate(logits, r.rows.segments, p);
    combine_backward(first_rows(d.shared_out, n), dgate, first_rows(dout, n), first_rows(a.shared_out, n), gate.weights,
                     gate.places, p.compute);
    zero_padding(d.shared_out, n, p.compute);
    router_backward(first_rows(d.gate_logits, n), dgate, logits, gate.choices, {}, shared_gate, {}, r.rows.segments,
                    p.compute);
  } else if (d.shared_out.bytes != dout.bytes) {
    copy(d.shared_out, dout, p.compute);
  }
  const Tensor dactivated =
      p.temporary("gradient of activated of the shared expert", dx.dtype, a.shared_activated.shape);
  parallel::row_linear_backward_input(dactivated, d.shared_out, unit.weight("moe.shared.down.weight"), {}, p);
  swiglu_backward(d.shared_up, dactivated, a.shared_up, p.compute);
  parallel::column_linear_backward_input(dx, d.shared_up, unit.weight("moe.shared.gate.weight", 2), p, [] {});
}

// dx = the gradient of x (S, C), from dout, that of the sum; the gradients of the units += ... With `later` it is the
// input part alone, which sets them. The outputs of the experts may be replaced by their gradients.
inline void experts_backward(Tensor dx, Tensor dout, const OutputGradients::OfExperts* later,
                             const ExpertActivations& a, Tensor x, Tensor gathered, const UnitState& unit,
                             const ModelConfig& c, const Routing& r, const parallel::Group& p) {
  auto scope = p.arena.scope();
  Stream& stream = p.compute;
  const int64_t n = r.rows.count;
  const bool exchanged = c.experts.ranks > 1, has_shared = !a.shared_up.empty();
  auto like = [&](const char* name, const Tensor& t) {
    return t.empty() ? Tensor{} : p.temporary(name, t.dtype, t.shape);
  };
  OutputGradients::OfExperts d;
  if (later != nullptr) {
    d = *later;
  } else {
    d = {.logits = like("gradient of router logits", a.logits),
         .up = exchanged ? Tensor{} : like("gradient of up of experts", a.received.up),
         .outputs = a.outputs,
         .shared_up = like("gradient of up of the shared expert", a.shared_up),
         .shared_out = a.shared_out.empty() ? dout : like("gradient of the output of the shared expert", a.shared_out),
         .gate_logits = like("gradient of the gate of the shared expert", a.gate_logits)};
  }
  const Tensor doutputs = exchanged ? a.outputs : d.outputs;  // of the choices of this rank's rows
  const Tensor dweights = p.temporary("gradient of the weights of experts", a.weights.dtype, {n, c.experts.per_token});
  combine_backward(doutputs, dweights, first_rows(dout, n), a.outputs, first_rows(a.weights, n),
                   first_rows(a.places, n), stream);
  auto shared_expert = [&] {
    if (has_shared) shared_expert_backward(dx, d, dout, a, unit, r, p);
  };
  const Tensor drows = like("gradient of rows by expert", a.outputs);
  if (exchanged) {
    backward_of_all_ranks(drows, doutputs, a, x, c, r, p, shared_expert);
  } else {
    shared_expert();
    experts_backward_input(drows, d.up, d.outputs, a.received, {r.experts(), c, ExpertMatrices::Of::weights}, p);
  }
  const Tensor dstream = first_rows(dx, n);
  combine_rows(dstream, drows, {}, first_rows(a.places, n), has_shared ? Accumulate::yes : Accumulate::no, stream);
  zero_padding(dx, n, stream);

  const RouterLosses losses = r.training ? r.training->losses : RouterLosses{};
  const Tensor counts = losses.balance == 0 ? Tensor{} : first_rows(a.counts, r.rows.segments.count(n));
  const Tensor dlogits = first_rows(d.logits, n);
  router_backward(dlogits, dweights, first_rows(a.logits, n), first_rows(a.choices, n), counts, c.router(), losses,
                  r.rows.segments, stream);
  router_backward_input(dstream, dlogits, unit.weight("moe.router.weight"), Accumulate::yes, stream);
  if (!d.gate_logits.empty())
    router_backward_input(dstream, first_rows(d.gate_logits, n), unit.weight("moe.shared_gate.weight"), Accumulate::yes,
                          stream);
  if (later == nullptr) experts_backward_weight(d, a, x, gathered, unit, c, r, p);
}

}  // namespace detail
}  // namespace llmc
