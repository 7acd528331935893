// expert_products.h: the computation of a rank's experts, forward and backward: grouped products of the rows that were
// sent to them. If ranks share the experts of a layer (--ep), rows go to the ranks that have their experts and come
// back (dist/expert_exchange.h), while the shared expert computes.
#pragma once
#include <algorithm>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "dist/expert_exchange.h"
#include "model/routing.h"

namespace llmc::detail {

// The matrices of the experts that a rank has, (E, 2 F, C) and (E, C, F): of their weights, or of gradients.
struct ExpertMatrices {
  Tensor gate_up, down;
  enum class Of : uint8_t { weights, gradients };
  ExpertMatrices(const UnitState& unit, const ModelConfig& c, Of of) {
    const auto& params = unit.spec().params;  // gate and up of each expert, then all downs
    const int E = static_cast<int>(params.size() / 3);
    auto matrix = [&](size_t first, int fused) {
      const std::string& name = params[first].name;
      return of == Of::weights ? unit.weight(name, fused) : unit.gradient(name, fused);
    };
    gate_up = matrix(0, 2 * E).reshaped({E, 2 * c.experts.width, c.n_embd});
    down = matrix(static_cast<size_t>(2 * E), E).reshaped({E, c.n_embd, c.experts.width});
  }
};

// The number of rows that the experts of this rank have, on the device.
inline Tensor number_of_rows(const ReceivedRows& r) { return r.offsets.slice(r.offsets.shape[0] - 1, {1}); }

// ---- Of this rank ---------------------------------------------------------------------------------------------------

// out (R, C) = down(SwiGLU of gate and up) of the received rows.
inline void experts_forward(Tensor out, const ReceivedRows& r, const ExpertMatrices& experts, Stream& stream) {
  grouped_linear_forward(r.up, r.rows, experts.gate_up, r.offsets, stream);
  swiglu_forward(r.activated, r.up, stream, number_of_rows(r));
  grouped_linear_forward(out, r.activated, experts.down, r.offsets, stream);
}

// drows (R, C) and dup (R, 2 F) = the gradients of the received rows and of up, from the gradients of their outputs.
inline void experts_backward_input(Tensor drows, Tensor dup, Tensor doutputs, const ReceivedRows& r,
                                   const ExpertMatrices& experts, const parallel::Group& p) {
  auto scope = p.arena.scope();
  const Tensor dactivated = p.temporary("gradient of activated of experts", r.activated.dtype, r.activated.shape);
  grouped_linear_backward_input(dactivated, doutputs, experts.down, r.offsets, p.compute);
  swiglu_backward(dup, dactivated, r.up, p.compute, number_of_rows(r));
  grouped_linear_backward_input(drows, dup, experts.gate_up, r.offsets, p.compute);
}
// The gradients of the experts' matrices += ..., from the gradients of their outputs (R, C) and of up (R, 2 F).
inline void experts_backward_matrices(Tensor doutputs, Tensor dup, const ReceivedRows& r,
                                      const ExpertMatrices& gradients, Stream& stream) {
  grouped_linear_backward_weight(gradients.down, doutputs, r.activated, r.offsets, stream);
  grouped_linear_backward_weight(gradients.gate_up, dup, r.rows, r.offsets, stream);
}

// ---- Between the ranks that share the experts of a layer ------------------------------------------------------------

// Memory for rows on their way to experts or back, and for rounds after the first.
inline Tensor travelling(const parallel::Group& p, const char* name, DType dtype, const Shape& shape) {
  return p.arena.alloc("rows between ranks", name, dtype, shape);
}

// The activations of this rank's experts in a round after the first; they are not kept.
inline ReceivedRows received_in_round(const ReceivedRows& like, const parallel::Group& p) {
  ReceivedRows r = like;
  for (auto t : {&ReceivedRows::offsets, &ReceivedRows::places, &ReceivedRows::rows, &ReceivedRows::up,
                 &ReceivedRows::activated})
    r.*t = travelling(p, "rows of a further round", (like.*t).dtype, (like.*t).shape);
  return r;
}

// Plans which rows are sent to which rank, from the number of rows that each rank has for each expert: the host waits
// for these numbers.
inline ExpertRounds exchange_counts(const ExpertActivations& a, const ModelConfig& c, int64_t room,
                                    const parallel::Group& p) {
  auto scope = p.arena.scope();
  const int P = p.ranks[GroupName::experts].size(), me = p.ranks[GroupName::experts].rank();
  const int64_t E = c.experts.count, own = E / P;
  const Tensor table = travelling(p, "rows for each expert", DType::int32, {P, E}),
               numbers = travelling(p, "rows for each expert", DType::fp64, {P * E});
  Stream& stream = *p.ranks.find_stream(Lane::expert);
  expert_counts(parallel::rows_of(table, {me, 1}).reshaped({E}), a.offsets, p.compute);
  stream.wait(p.compute.record());
  p.ranks[GroupName::experts].all_gather(table, stream);
  zero(numbers, stream);
  add_expert_counts(numbers, table.reshaped({1, P * E}), stream);
  const Readback on_host(numbers, stream);
  std::vector<int64_t> counts;
  if (on_host.moves_data()) {
    for (const double n : on_host.values()) counts.push_back(static_cast<int64_t>(n));
  } else {  // on paper: each rank sends equally many to all experts, but the others fill the room of this rank
    const int64_t share = std::min(a.places.numel() / E, room / (P * own)),
                  rest = (room - own * share) / (std::max(1, P - 1) * own);
    for (int64_t i = 0; i < P * E; ++i) counts.push_back(i / E != me && i % E / own == me ? rest : share);
  }
  return {std::move(counts), P, room};
}

// If each rank sends the same number of rows to each other, with padding, only the device knows how many are real rows:
// the counts for each expert of this rank from each rank, (ranks, experts).
struct ArrivingCounts {
  Tensor counts;
  Event event;
};
inline ArrivingCounts send_counts(const ExpertActivations& a, const ModelConfig& c, const parallel::Group& p) {
  Comm& group = p.ranks[GroupName::experts];
  Stream& stream = *p.ranks.find_stream(Lane::expert);
  const Shape shape = {group.size(), c.experts.own()};
  const Tensor sent = travelling(p, "rows for each expert", DType::int32, shape),
               counts = travelling(p, "rows that arrive for each expert", DType::int32, shape);
  expert_counts(sent.reshaped({c.experts.count}), a.offsets, p.compute);
  stream.wait(p.compute.record());
  group.all_to_all(counts, sent, stream);
  return {counts, stream.record()};
}

// Rows that are on their way to the experts of this rank, in the order of the ranks that sent them.
struct Arrival {
  Tensor rows;  // (R, C)
  Event event;
};
// Sends the rows of a round. sent: rows in the order of their experts; arrived (R, C): the rows that come
inline Arrival send_rows(Tensor arrived, Tensor sent, const ExpertRounds& rounds, int round, const parallel::Group& p) {
  Comm& group = p.ranks[GroupName::experts];
  Stream& stream = *p.ranks.find_stream(Lane::expert);
  stream.wait(p.compute.record());
  group.all_to_all_rows(arrived, sent, rounds.blocks_sent(group.rank(), round),
                        rounds.blocks_received(group.rank(), round), stream);
  return {arrived, stream.record()};
}
// Plans how the rows of a round are put into the order of their experts.
inline void plan_arrival(const ReceivedRows& r, const ExpertRounds& rounds, int round, const parallel::Group& p) {
  auto scope = p.arena.scope();
  const Comm& group = p.ranks[GroupName::experts];
  std::vector<int32_t> counts = rounds.counts_received(group.rank(), round);
  const Tensor on_device =
      travelling(p, "rows that arrive for each expert", DType::int32, {group.size(), r.offsets.shape[0] - 1});
  upload(on_device, std::move(counts), p.compute);
  arrival_plan(r.places, r.offsets, on_device, 0, p.compute);
}
inline void plan_arrival(const ReceivedRows& r, const ArrivingCounts& arriving, int64_t stride,
                         const parallel::Group& p) {
  p.compute.wait(arriving.event);
  arrival_plan(r.places, r.offsets, arriving.counts, stride, p.compute);
}
// out (R, C) = the arrived rows in the order of the experts.
inline void take_rows(Tensor out, const Arrival& arrival, const ReceivedRows& r, const parallel::Group& p) {
  p.compute.wait(arrival.event);
  dispatch_rows(out, arrival.rows, r.places, p.compute);
}
// Sends the results of a round back: to = the results of the ranks with the experts, `from` (R, C) on each of them.
inline void return_rows(Tensor to, Tensor from, const ReceivedRows& r, const ExpertRounds& rounds, int round,
                        const parallel::Group& p) {
  auto scope = p.arena.scope();
  Comm& group = p.ranks[GroupName::experts];
  Stream& stream = *p.ranks.find_stream(Lane::expert);
  const Tensor sent = travelling(p, "rows that return", from.dtype, from.shape);
  combine_rows(sent, from, {}, r.places, Accumulate::no, p.compute);
  stream.wait(p.compute.record());
  group.all_to_all_rows(to, sent, rounds.blocks_received(group.rank(), round), rounds.blocks_sent(group.rank(), round),
                        stream);
  p.compute.wait(stream.record());
}

// a.outputs = the experts' outputs for all rows of x (S, C), computed on the ranks that have the experts. meanwhile():
// enqueues work that does not depend on them.
template <class Meanwhile>
void experts_of_all_ranks(const ExpertActivations& a, Tensor x, const ModelConfig& c, const Routing& r,
                          const parallel::Group& p, Meanwhile&& meanwhile) {
  auto scope = p.arena.scope();
  const int64_t room = a.received.rows.shape[0], stride = padded_rows(x, c, r);
  const Tensor sent = travelling(p, "rows by expert", x.dtype, a.outputs.shape);
  rows_by_expert(sent, a, x, r, p.compute);
  std::optional<ArrivingCounts> arriving;
  if (stride > 0) arriving = send_counts(a, c, p);
  ExpertRounds& rounds = *a.rounds =
      arriving ? ExpertRounds::padded(c.experts.ranks, stride) : exchange_counts(a, c, room, p);
  if (r.training && r.training->rounds) *r.training->rounds = std::max(*r.training->rounds, rounds.rounds());
  auto like_received = [&](const char* name) { return travelling(p, name, x.dtype, a.received.rows.shape); };
  const Tensor out = like_received("outputs of experts"), arrived = like_received("rows that arrive");
  const ReceivedRows further = arriving ? ReceivedRows{} : received_in_round(a.received, p);
  for (int round = 0; round < rounds.rounds(); ++round) {
    auto scope_of_round = p.arena.scope();
    const ReceivedRows& received = round == 0 ? a.received : further;
    const Arrival arrival = send_rows(arrived, sent, rounds, round, p);
    if (round == 0) meanwhile();
    if (arriving) plan_arrival(received, *arriving, stride, p);
    else plan_arrival(received, rounds, round, p);
    take_rows(received.rows, arrival, received, p);
    experts_forward(out, received, ExpertMatrices(r.experts(), c, ExpertMatrices::Of::weights), p.compute);
    return_rows(a.outputs, out, received, rounds, round, p);
  }
}

// drows = the gradients of the rows of x, in the order of the experts, from doutputs, the gradients of their outputs;
// both have the shape of a.outputs. The gradients of the experts' matrices += ... The rows of further rounds are sent
// and computed again, so the weight part of the experts is done here as well: later the rows are no longer there.
template <class Meanwhile>
void backward_of_all_ranks(Tensor drows, Tensor doutputs, const ExpertActivations& a, Tensor x, const ModelConfig& c,
                           const Routing& r, const parallel::Group& p, Meanwhile&& meanwhile) {
  auto scope = p.arena.scope();
  Stream& stream = p.compute;
  const ExpertRounds& rounds = *a.rounds;
  const ExpertMatrices experts(r.experts(), c, ExpertMatrices::Of::weights);
  auto like = [&](const char* name, const Tensor& t) { return travelling(p, name, t.dtype, t.shape); };
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
  if (padded_rows(x, c, r) > 0) return;
  const ReceivedRows further = received_in_round(first, p);  // allocated even if there is no further round
  const Tensor sent = like("rows by expert", a.outputs), arrived = like("rows that arrive", first.rows);
  for (const Tensor& t : {first.rows, first.activated}) {
    auto scope_of_round = p.arena.scope();
    like("room of a further round", t);
  }
  if (rounds.rounds() > 1) rows_by_expert(sent, a, x, r, stream);
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

}  // namespace llmc::detail
