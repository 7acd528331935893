// messages.h: the complete lists of stages: what each computes, sends and receives. Those of pipedream also by turns.
#pragma once
#include "schedule/simulate.h"

namespace llmc {

namespace detail {

// Adds the messages to the passes that each stage computes, at places that are decided for all stages at once: messages
// are sorted by the time at which they are made, if every pass takes its time in PassCosts, and each is put into the
// lists of sender and receiver before the passes that these begin at that time or later. So no stages wait in a cycle,
// even if sends wait for their receives; and two stages see the messages between them in the same order.
inline std::vector<ActionList> with_messages(const Pipeline& p, const std::vector<ActionList>& computes) {
  const Simulation sim = simulate(p, computes);
  struct Message {
    double time;
    Action send, receive;
  };
  std::vector<Message> messages;
  for (size_t s = 0; s < computes.size(); ++s)
    for (size_t i = 0; i < computes[s].size(); ++i) {
      const Action& a = computes[s][i];
      const bool forward = a.kind == ActionKind::forward;
      const int to = chunk_after(a);
      if ((!forward && !is_backward(a.kind)) || !p.elsewhere(a.chunk, to)) continue;
      messages.push_back(
          {sim.times[s][i].end,
           {forward ? ActionKind::send_activations : ActionKind::send_gradients, a.chunk, a.micro_batch, a.slice},
           {forward ? ActionKind::receive_activations : ActionKind::receive_gradients, to, a.micro_batch, a.slice}});
    }
  std::sort(messages.begin(), messages.end(), [](const Message& a, const Message& b) {
    return std::tuple(a.time, a.send.chunk, a.send.kind) < std::tuple(b.time, b.send.chunk, b.send.kind);
  });

  std::vector<ActionList> lists(computes.size());
  std::vector<size_t> computed(computes.size(), 0);
  // Lists the passes that a stage begins before `time`.
  auto compute_until = [&](int stage, double time) {
    const auto s = static_cast<size_t>(stage);
    while (computed[s] < computes[s].size() && sim.times[s][computed[s]].begin < time)
      lists[s].push_back(computes[s][computed[s]++]);
  };
  for (const Message& m : messages)
    for (const Action* a : {&m.send, &m.receive}) {
      const int stage = p.stage_of(a->chunk);
      compute_until(stage, m.time);
      lists[static_cast<size_t>(stage)].push_back(*a);
    }
  for (int s = 0; s < p.stages; ++s) compute_until(s, sim.makespan + 1);
  return lists;
}

}  // namespace detail

// One list of actions per stage: for a step, and for forwards alone.
inline std::vector<ActionList> pipeline_actions(const Pipeline& p) {
  return detail::with_messages(p, compute_orders(p));
}
inline std::vector<ActionList> forward_actions(const Pipeline& p) {
  return detail::with_messages(p, forward_orders(p));
}

// While one exists, its thread makes the lists of a pipeline once: a plan asks for those of each stage in turn, and all
// stages' lists are made together; then what is printed about it asks for them again.
class KeptLists {
 public:
  using Make = std::vector<ActionList> (*)(const Pipeline&);
  KeptLists() : outer_(std::exchange(of_thread(), this)) {}
  ~KeptLists() { of_thread() = outer_; }
  KeptLists(const KeptLists&) = delete;
  KeptLists& operator=(const KeptLists&) = delete;

  using Lists = std::shared_ptr<const std::vector<ActionList>>;
  static bool exist() { return of_thread() != nullptr; }
  // The lists of all stages; `make`: pipeline_actions or forward_actions.
  static Lists of(Make make, const Pipeline& p) {
    if (!exist()) return std::make_shared<const std::vector<ActionList>>(make(p));
    auto& kept = of_thread()->kept_;
    for (const Entry& e : kept)
      if (e.make == make && e.pipeline == p) return e.lists;
    if (kept.size() == most) kept.erase(kept.begin());  // a search plans many pipelines
    kept.push_back({make, p, std::make_shared<const std::vector<ActionList>>(make(p))});
    return kept.back().lists;
  }
  static ActionList of_stage(Make make, const Pipeline& p, int stage) {
    return (*of(make, p))[static_cast<size_t>(stage)];
  }

 private:
  static constexpr size_t most = 8;
  struct Entry {
    Make make;
    Pipeline pipeline;
    Lists lists;
  };
  static KeptLists*& of_thread() {
    thread_local KeptLists* kept = nullptr;
    return kept;
  }
  KeptLists* outer_;
  std::vector<Entry> kept_;
};

// The lists of pipedream turn by turn, because the number of micro-batches until the next flush is known only when it
// comes. In turn t a stage runs the forward of micro-batch t, as long as new ones begin, and the backward and update of
// an earlier one: of micro-batch t itself on the last stage, and one turn older on each stage before it. A gradient is
// received one turn before it is used, in the turn in which it is sent. If `begun` micro-batches have begun, all turns
// up to begun + P - 2 are the complete lists for them; in these, too, two stages see the messages between them in the
// same order, and no stages wait in a cycle.
inline ActionList pipedream_turn(int stages, int stage, int64_t turn, int64_t begun) {
  using enum ActionKind;
  const int behind = stages - 1 - stage;  // stages after this one
  const int64_t arriving = turn - (behind - 1), back = turn - behind;
  const auto exists = [&](int64_t m) { return m >= 0 && m < begun; };
  ActionList list;
  if (exists(turn)) {
    if (stage > 0) list.push_back({receive_activations, stage, turn});
    list.push_back({forward, stage, turn});
    if (behind > 0) list.push_back({send_activations, stage, turn});
  }
  if (behind > 0 && exists(arriving)) list.push_back({receive_gradients, stage, arriving});
  if (exists(back)) {
    list.push_back({backward, stage, back});
    if (stage > 0) list.push_back({send_gradients, stage, back});
    list.push_back({update, stage, back});
  }
  return list;
}

}  // namespace llmc
