// simulate.h: time and memory of a pipeline's lists, on paper: when actions run, how long stages idle, what they keep.
#pragma once
#include "schedule/orders.h"

namespace llmc {

// The time of one pass through a chunk, in any unit. A backward takes as long as its two parts.
struct PassCosts {
  double forward = 1, input = 1, weight = 1;
  double message = 0;              // from the end of a pass until the next stage has its result
  std::vector<double> chunk = {};  // how many times as long a chunk takes; empty: all equally long
  std::vector<double> slice = {};  // the same for a slice
  // The time of each action of each stage's list, in the place of all these but `message`; empty: unknown.
  std::vector<std::vector<double>> actions = {};
};

// Begin and end of an action. Sends and receives run beside the computation: their times are those of the message.
struct PassTime {
  double begin = 0, end = 0;
  bool operator==(const PassTime&) const = default;
};

// The most that a stage keeps at a time, in passes of a chunk: micro-batches, or slices of them.
struct Kept {
  int64_t activations = 0;    // between forward and backward, or its input part
  int64_t for_weights = 0;    // between input part and weight part: the data that the weight part needs
  int64_t together = 0;       // the sum of both
  int64_t received = 0;       // messages that have arrived and are not used yet
  int64_t micro_batches = 0;  // with any slice kept, over all chunks; without slices equal to activations
  bool operator==(const Kept&) const = default;
};

struct Simulation {
  std::vector<std::vector<PassTime>> times;  // of each action of each stage
  double makespan = 0;
  std::vector<double> busy;  // the time in which each stage computes
  double bubble(size_t stage) const { return 1 - busy[stage] / makespan; }
  double bubble() const {  // of all stages
    const double all = makespan * static_cast<double>(busy.size());
    return (all - std::accumulate(busy.begin(), busy.end(), 0.0)) / all;
  }
};

// A value for each pass of each chunk.
template <class T>
class PerPass {
 public:
  PerPass(const Pipeline& p, T value)
      : slices_(p.slices), passes_(p.passes()), values_(static_cast<size_t>(p.chunks() * p.passes()), value) {}
  T& operator()(int chunk, int64_t micro_batch, int slice) {
    return values_[static_cast<size_t>(chunk * passes_ + micro_batch * slices_ + slice)];
  }
  T& operator[](const Action& a) { return (*this)(a.chunk, a.micro_batch, a.slice); }

 private:
  int64_t slices_, passes_;
  std::vector<T> values_;
};

// Runs every list in its order, each pass as soon as its inputs are there. Throws if the lists hang.
inline Simulation simulate(const Pipeline& p, const std::vector<ActionList>& lists, const PassCosts& costs = {}) {
  constexpr double never = -1;
  const size_t P = lists.size();
  Simulation sim{.times = std::vector<std::vector<PassTime>>(P), .busy = std::vector<double>(P, 0)};
  std::vector<double> now(P, 0);
  PerPass<double> forward_end(p, never), backward_end(p, never);

  // When chunk `to` has the result that `chunk` makes at time `end`.
  auto arrival = [&](double end, int chunk, int to) {
    return end == never || p.stage_of(chunk) == p.stage_of(to) ? end : end + costs.message;
  };
  auto ready_at = [&](const Action& a) {
    const int before = chunk_before(a);
    switch (a.kind) {
      case ActionKind::forward:
      case ActionKind::receive_activations:
        return before < 0 ? 0 : arrival(forward_end(before, a.micro_batch, a.slice), before, a.chunk);
      case ActionKind::backward:
      case ActionKind::backward_input:
      case ActionKind::receive_gradients:
        return before == p.chunks() ? forward_end[a]
                                    : arrival(backward_end(before, a.micro_batch, a.slice), before, a.chunk);
      case ActionKind::send_activations: return forward_end[a];
      default: return backward_end[a];  // send_gradients, backward_weight, update
    }
  };
  auto duration = [&](const Action& a) {
    const double times = (costs.chunk.empty() ? 1 : costs.chunk[static_cast<size_t>(a.chunk)]) *
                         (costs.slice.empty() ? 1 : costs.slice[static_cast<size_t>(a.slice)]);
    switch (a.kind) {
      case ActionKind::forward: return times * costs.forward;
      case ActionKind::backward: return times * (costs.input + costs.weight);
      case ActionKind::backward_input: return times * costs.input;
      case ActionKind::backward_weight: return times * costs.weight;
      default: return 0.0;
    }
  };
  auto run_next = [&](size_t stage) {
    const Action& a = lists[stage][sim.times[stage].size()];
    const double ready = ready_at(a);
    if (ready == never) return false;
    if (is_send(a.kind)) return sim.times[stage].push_back({ready, ready + costs.message}), true;
    if (is_receive(a.kind)) return sim.times[stage].push_back({ready - costs.message, ready}), true;
    const double seconds = costs.actions.empty() ? duration(a) : costs.actions[stage][sim.times[stage].size()];
    const double begin = std::max(now[stage], ready), end = begin + seconds;
    sim.times[stage].push_back({begin, end});
    if (a.kind == ActionKind::forward) forward_end[a] = end;
    if (is_backward(a.kind)) backward_end[a] = end;
    sim.busy[stage] += end - begin;
    now[stage] = end;
    return true;
  };
  for (bool progress = true; progress;) {
    progress = false;
    for (size_t s = 0; s < P; ++s)
      while (sim.times[s].size() < lists[s].size() && run_next(s)) progress = true;
  }
  for (size_t s = 0; s < P; ++s)
    CHECK(sim.times[s].size() == lists[s].size(), "the schedule hangs: stage {} waits for what {} needs", s,
          text_of(p, lists[s][sim.times[s].size()]));
  sim.makespan = *std::max_element(now.begin(), now.end());
  return sim;
}

// Follows from the list alone: a stage keeps the data that earlier actions have made and later actions need.
inline Kept most_kept(const Pipeline& p, const ActionList& list) {
  Kept now, most;
  for (const Action& a : list) {
    if (a.kind == ActionKind::forward) ++now.activations;
    if (a.kind == ActionKind::forward && a.slice == 0) ++now.micro_batches;
    if (is_receive(a.kind)) ++now.received;
    // A pass holds its input and makes its result before it frees anything.
    now.together = now.activations + now.for_weights;
    if (a.kind == ActionKind::backward_input) ++now.for_weights;
    for (auto n : {&Kept::activations, &Kept::for_weights, &Kept::together, &Kept::received, &Kept::micro_batches})
      most.*n = std::max(most.*n, now.*n);
    if ((a.kind == ActionKind::forward || is_backward(a.kind)) && p.elsewhere(a.chunk, chunk_before(a))) --now.received;
    if (is_backward(a.kind)) --now.activations;
    if (is_backward(a.kind) && a.slice == 0) --now.micro_batches;
    if (a.kind == ActionKind::backward_weight) --now.for_weights;
  }
  return most;
}

}  // namespace llmc
