// expert_products.h: the computation of a rank's experts, forward and backward: grouped products of the rows that were
// sent to them. If ranks share the experts of a layer (--ep), rows go to the ranks that have their experts and come
// back (parallel/expert_exchange.h), while the shared expert computes.
#pragma once
#include "model/layer.h"

namespace llmc {

// The experts that a rank has, and R rows that were sent to them.
class OwnExperts : SparseLayer {
 public:
  OwnExperts(const SparseLayer& layer, const ReceivedRows& rows) : SparseLayer(layer), received_(rows) {}

  // out (R, C) = down(SwiGLU of gate and up) of the rows.
  void forward(Tensor out) const {
    interior();
    grouped_linear_forward(out, received_.activated, weights().down, received_.offsets, stream(),
                           reading(weights().down));
  }
  // Without the last product.
  void interior() const {
    grouped_linear_forward(received_.up, received_.rows, weights().gate_up, received_.offsets, stream(),
                           reading(weights().gate_up));
    activation();
  }
  void activation() const { swiglu_forward(received_.activated, received_.up, stream(), number_of_rows()); }

  // drows (R, C) and dup (R, 2 F) = the gradients of the rows and of up, from the gradients of their outputs (R, C).
  void backward_input(Tensor drows, Tensor dup, Tensor doutputs) const {
    auto scope = group.arena.scope();
    const Tensor dactivated = like("gradient of activated of experts", received_.activated);
    const Matrices m = weights();
    grouped_linear_backward_input(dactivated, doutputs, m.down, received_.offsets, stream(), reading(m.down));
    swiglu_backward(dup, dactivated, received_.up, stream(), number_of_rows());
    grouped_linear_backward_input(drows, dup, m.gate_up, received_.offsets, stream(), reading(m.gate_up));
  }
  // The gradients of the experts' matrices += ...
  void backward_weight(Tensor dup, Tensor doutputs) const {
    const Matrices d = matrices(&UnitState::gradient);
    auto product = [&](Tensor dweight, Tensor dout, Tensor x) {
      grouped_linear_backward_weight(dweight, dout, x, received_.offsets, r.experts().accumulate(dweight), stream(),
                                     sequences.linear);
    };
    product(d.down, doutputs, received_.activated);
    product(d.gate_up, dup, received_.rows);
  }

 private:
  struct Matrices {
    Tensor gate_up, down;  // (E, 2 F, C) (E, C, F), of the E experts that the rank has
  };
  Matrices weights() const { return matrices(&UnitState::weight); }
  Matrices matrices(Tensor (UnitState::*of)(const std::string& name, int fused) const) const {
    const UnitState& unit = r.experts();
    const auto& params = unit.spec().params;  // gate and up of each expert, then all downs
    const int E = static_cast<int>(params.size() / 3);
    const int64_t C = config.n_embd, F = config.experts.width;
    return {(unit.*of)(params[0].name, 2 * E).reshaped({E, 2 * F, C}),
            (unit.*of)(params[static_cast<size_t>(2 * E)].name, E).reshaped({E, C, F})};
  }
  Reading reading(const Tensor& weight) const { return r.experts().reading(sequences.linear, weight); }
  // On the device.
  Tensor number_of_rows() const { return received_.offsets.slice(received_.offsets.shape[0] - 1, {1}); }

  const ReceivedRows& received_;
};

// The rows of a layer between the ranks that share its experts.
class ExpertExchange : SparseLayer {
 public:
  explicit ExpertExchange(const SparseLayer& layer)
      : SparseLayer(layer),
        ranks_(group.ranks[GroupName::experts]),
        travel_(*group.ranks.find_stream(Lane::expert)),
        padded_(r.padded_rows(a.norm2.shape[0])) {}

  // e.outputs = the experts' outputs for all rows of norm2 (S, C), computed on the ranks that have the experts.
  // meanwhile(): enqueues work that does not depend on them.
  template <class Meanwhile>
  void forward(Meanwhile&& meanwhile) const {
    auto scope = group.arena.scope();
    const Tensor sent = room_like("rows by expert", e.outputs);
    rows_by_expert(sent);
    const Event packed = stream().record();
    std::optional<Arrival> counts;
    if (padded_ > 0) counts = send_counts();
    const Tensor out = room_like("outputs of experts", e.received.rows),
                 arrived = room_like("rows that arrive", e.received.rows);
    const ReceivedRows further = counts ? ReceivedRows{} : received_in_round();
    if (counts) {
      *e.rounds = ExpertRounds::padded(ranks_.size(), padded_);
    } else {
      const Readback all_counts = gather_counts();
      meanwhile();  // enqueued before the host waits
      *e.rounds = rounds_of(all_counts);
    }
    const int rounds = e.rounds->rounds();
    if (r.training && r.training->rounds) *r.training->rounds = std::max(*r.training->rounds, rounds);
    for (int round = 0; round < rounds; ++round) {
      auto scope_of_round = group.arena.scope();
      const ReceivedRows& received = round == 0 ? e.received : further;
      const Arrival arrival = send_rows(arrived, sent, round, round == 0 ? packed : stream().record());
      if (counts) meanwhile();
      if (counts) plan_arrival(received, *counts);
      else plan_arrival(received, round);
      take_rows(received.rows, arrival, received);
      OwnExperts(*this, received).forward(out);
      return_rows(e.outputs, out, received, round);
    }
  }

  // drows = the gradients of the rows of norm2, in the order of the experts, from doutputs, the gradients of their
  // outputs; both have the shape of e.outputs. The gradients of the experts' matrices += ..., here and not in a weight
  // part: the rows of further rounds, which are sent and computed again, are no longer there later.
  template <class Meanwhile>
  void backward(Tensor drows, Tensor doutputs, Meanwhile&& meanwhile) const {
    auto scope = group.arena.scope();
    r.experts();
    const ReceivedRows& first = e.received;
    const Tensor dreceived = room_like("gradient of rows by expert", first.rows),
                 dup = room_like("gradient of up of experts", first.up),
                 dreturned = room_like("gradient of outputs of experts", first.rows),
                 darrived = room_like("gradients that arrive", first.rows);
    auto compute = [&](const ReceivedRows& received, const Arrival& arrival, int round) {
      const OwnExperts experts(*this, received);
      take_rows(dreturned, arrival, received);
      experts.backward_input(dreceived, dup, dreturned);
      experts.backward_weight(dup, dreturned);
      return_rows(drows, dreceived, received, round);
    };
    {
      const Arrival arrival = send_rows(darrived, doutputs, 0, stream().record());
      meanwhile();
      compute(first, arrival, 0);
    }
    if (padded_ > 0) return;
    const ReceivedRows further = received_in_round();  // allocated even if there is no further round
    const Tensor sent = room_like("rows by expert", e.outputs), arrived = room_like("rows that arrive", first.rows);
    for (const Tensor& t : {first.rows, first.activated}) {
      auto scope_of_round = group.arena.scope();
      room_like("room of a further round", t);
    }
    if (e.rounds->rounds() > 1) rows_by_expert(sent);
    for (int round = 1; round < e.rounds->rounds(); ++round) {
      const Event free = stream().record();
      const Arrival arrival = send_rows(arrived, sent, round, free),
                    darrival = send_rows(darrived, doutputs, round, free);
      plan_arrival(further, round);
      take_rows(further.rows, arrival, further);
      OwnExperts(*this, further).interior();
      compute(further, darrival, round);
    }
  }

 private:
  // Memory for rows on their way to experts or back, and for rounds after the first.
  Tensor room(const char* name, DType dtype, const Shape& shape) const {
    return group.arena.alloc("rows between ranks", name, dtype, shape);
  }
  Tensor room_like(const char* name, const Tensor& t) const { return room(name, t.dtype, t.shape); }

  // The activations of this rank's experts in a round after the first; they are not kept.
  ReceivedRows received_in_round() const {
    ReceivedRows round = e.received;
    for (auto t : {&ReceivedRows::offsets, &ReceivedRows::places, &ReceivedRows::rows, &ReceivedRows::up,
                   &ReceivedRows::activated})
      round.*t = room_like("rows of a further round", e.received.*t);
    return round;
  }

  // The number of rows that each rank has for each expert, on its way to the host.
  Readback gather_counts() const {
    const int P = ranks_.size(), me = ranks_.rank();
    const int64_t E = config.experts.count;
    const Tensor table = room("rows for each expert", DType::int32, {P, E}),
                 numbers = room("rows for each expert", DType::fp64, {P * E});
    expert_counts(parallel::rows_of(table, {me, 1}).reshaped({E}), e.offsets, stream());
    travel_.wait(stream().record());
    ranks_.all_gather(table, travel_);
    zero(numbers, travel_);
    add_expert_counts(numbers, table.reshaped({1, P * E}), travel_);
    return {numbers, travel_};
  }
  // Plans which rows are sent to which rank: the host waits for their numbers.
  ExpertRounds rounds_of(const Readback& on_host) const {
    const int P = ranks_.size(), me = ranks_.rank();
    const int64_t E = config.experts.count, own = E / P, most = e.received.rows.shape[0];
    std::vector<int64_t> counts;
    if (on_host.moves_data()) {
      for (const double rows : on_host.values()) counts.push_back(static_cast<int64_t>(rows));
    } else {  // on paper: each rank sends equally many to all experts, but the others fill the room of this rank
      const int64_t share = std::min(e.places.numel() / E, most / (P * own)),
                    rest = (most - own * share) / (std::max(1, P - 1) * own);
      for (int64_t i = 0; i < P * E; ++i) counts.push_back(i / E != me && i % E / own == me ? rest : share);
    }
    return {std::move(counts), P, most};
  }

  // A tensor that comes from the other ranks.
  struct Arrival {
    Tensor tensor;
    Event event;
  };
  // If each rank sends the same number of rows to every other, with padding, only the device knows how many are real
  // rows: the counts for each expert of this rank from each rank, (ranks, experts).
  Arrival send_counts() const {
    const Shape shape = {ranks_.size(), r.placement.own()};
    const Tensor sent = room("rows for each expert", DType::int32, shape),
                 counts = room("rows that arrive for each expert", DType::int32, shape);
    expert_counts(sent.reshaped({config.experts.count}), e.offsets, stream());
    travel_.wait(stream().record());
    ranks_.all_to_all(counts, sent, travel_);
    return {counts, travel_.record()};
  }

  // Sends the rows of a round. sent: rows in the order of their experts; arrived (R, C): the rows that come, in the
  // order of the ranks that sent them; ready: `sent` is complete, and `arrived` is free
  Arrival send_rows(Tensor arrived, Tensor sent, int round, const Event& ready) const {
    travel_.wait(ready);
    ranks_.all_to_all_rows(arrived, sent, e.rounds->blocks_sent(ranks_.rank(), round),
                           e.rounds->blocks_received(ranks_.rank(), round), travel_);
    return {arrived, travel_.record()};
  }
  // Plans how the rows of a round are put into the order of their experts.
  void plan_arrival(const ReceivedRows& received, int round) const {
    auto scope = group.arena.scope();
    std::vector<int32_t> counts = e.rounds->counts_received(ranks_.rank(), round);
    const Tensor on_device =
        room("rows that arrive for each expert", DType::int32, {ranks_.size(), received.offsets.shape[0] - 1});
    upload(on_device, std::move(counts), stream());
    arrival_plan(received.places, received.offsets, on_device, 0, stream());
  }
  void plan_arrival(const ReceivedRows& received, const Arrival& counts) const {
    stream().wait(counts.event);
    arrival_plan(received.places, received.offsets, counts.tensor, padded_, stream());
  }
  // out (R, C) = the arrived rows in the order of the experts.
  void take_rows(Tensor out, const Arrival& arrival, const ReceivedRows& received) const {
    stream().wait(arrival.event);
    dispatch_rows(out, arrival.tensor, received.places, stream());
  }
  // Sends the results of a round back: to = the results of the ranks with the experts, `from` (R, C) on each of them.
  void return_rows(Tensor to, Tensor from, const ReceivedRows& received, int round) const {
    auto scope = group.arena.scope();
    const Tensor sent = room_like("rows that return", from);
    combine_rows(sent, from, {}, received.places, Accumulate::no, stream());
    travel_.wait(stream().record());
    ranks_.all_to_all_rows(to, sent, e.rounds->blocks_received(ranks_.rank(), round),
                           e.rounds->blocks_sent(ranks_.rank(), round), travel_);
    stream().wait(travel_.record());
  }

  Comm& ranks_;
  Stream& travel_;
  int64_t padded_;  // rows that each rank sends to every other; 0: only the real ones
};

}  // namespace llmc
