// check.h: proves the lists of actions of a pipeline right, or says what is wrong with them: no action is missing or
// comes twice, each comes after those that it needs, gradients are added in the order of the micro-batches, every
// message is sent once and received once, and no stages wait for each other in a cycle.
#pragma once
#include "schedule/simulate.h"

namespace llmc {

enum class ListsOf : uint8_t { steps, forwards };

namespace detail {

// Checks one stage after another, then the messages between them.
class ListCheck {
 public:
  ListCheck(const Pipeline& p, const std::vector<ActionList>& lists, ListsOf what)
      : p_(p),
        lists_(lists),
        what_(what),
        done_(kinds, PerPass<uint8_t>(p, 0)),
        last_(kinds, std::vector<int64_t>(static_cast<size_t>(p.chunks()), -1)) {}

  void run() {
    CHECK(static_cast<int>(lists_.size()) == p_.stages, "{} lists for {} stages", lists_.size(), p_.stages);
    for (int s = 0; s < p_.stages; ++s)
      for (const Action& a : lists_[static_cast<size_t>(s)]) check_action(s, a);
    for (int c = 0; c < p_.chunks(); ++c)
      for (int64_t m = 0; m < p_.micro_batches; ++m)
        for (int k = 0; k < p_.slices; ++k) check_complete(c, m, k);
    check_links();
    check_blocking();
  }

 private:
  static constexpr size_t kinds = static_cast<size_t>(ActionKind::update) + 1;  // the last of the enum

  uint8_t& done(const Action& a) { return done_[static_cast<size_t>(a.kind)][a]; }
  bool exists(int chunk) const { return chunk >= 0 && chunk < p_.chunks(); }
  std::string text(const Action& a) const { return text_of(p_, a); }

  void check_action(int stage, const Action& a) {
    CHECK(exists(a.chunk) && a.micro_batch >= 0 && a.micro_batch < p_.micro_batches && a.slice >= 0 &&
              a.slice < p_.slices,
          "stage {}: {}: there is no such chunk, micro-batch or slice", stage, text(a));
    CHECK(p_.stage_of(a.chunk) == stage, "stage {}: {}, which is on stage {}", stage, text(a), p_.stage_of(a.chunk));
    CHECK(!done(a), "stage {}: {} comes twice", stage, text(a));
    check_needs(stage, a);
    check_order(stage, a);
    done(a) = 1;
  }

  // Every action that this one needs from its own stage must come before it.
  void check_needs(int stage, const Action& a) {
    auto need = [&](ActionKind kind, int chunk) {
      const Action needed{kind, chunk, a.micro_batch, a.slice};
      CHECK(done(needed), "stage {}: {} comes before {}", stage, text(a), text(needed));
    };
    const int before = chunk_before(a), after = chunk_after(a);
    const bool whole = !p_.splits_backward();
    using enum ActionKind;
    switch (a.kind) {
      case forward:
        if (p_.elsewhere(a.chunk, before)) need(receive_activations, a.chunk);
        else if (exists(before)) need(forward, before);
        return;
      case backward:
      case backward_input:
        CHECK((a.kind == backward) == whole, "stage {}: {}: {} {} the backward", stage, text(a), p_.schedule,
              whole ? "does not split" : "splits");
        need(forward, a.chunk);
        if (p_.elsewhere(a.chunk, before)) need(receive_gradients, a.chunk);
        else if (exists(before)) need(a.kind, before);
        return;
      case backward_weight: return need(backward_input, a.chunk);
      case send_activations:
      case send_gradients:
        CHECK(p_.elsewhere(a.chunk, after), "stage {}: {}: there is no other stage to send to", stage, text(a));
        return need(a.kind == send_activations ? forward : whole ? backward : backward_input, a.chunk);
      case receive_activations:
      case receive_gradients:
        CHECK(p_.elsewhere(a.chunk, before), "stage {}: {}: there is no other stage to receive from", stage, text(a));
        return;
      case update:
        CHECK(p_.schedule == Schedule::pipedream, "stage {}: {}: only pipedream updates within a list", stage, text(a));
        return need(backward, a.chunk);
    }
  }

  // Forwards, backwards, weight parts and updates of a chunk come in the order of the micro-batches; slices go forward
  // from the first to the last, and backward from the last to the first.
  void check_order(int stage, const Action& a) {
    if (is_send(a.kind) || is_receive(a.kind)) return;
    int64_t& last = last_[static_cast<size_t>(a.kind)][static_cast<size_t>(a.chunk)];
    const int slice = a.kind == ActionKind::forward ? a.slice : p_.slices - 1 - a.slice;
    const int64_t now = a.micro_batch * p_.slices + slice;
    CHECK(now > last, "stage {}: {} comes after that of micro-batch {}{}: it must come before, in the order of the {}",
          stage, text(a), last / p_.slices, p_.slices > 1 ? ", another slice" : "",
          p_.slices > 1 ? "micro-batches and their slices" : "micro-batches");
    last = now;
    if (p_.schedule != Schedule::pipedream || a.kind != ActionKind::backward || a.micro_batch == 0) return;
    const Action before{ActionKind::update, a.chunk, a.micro_batch - 1};
    CHECK(done(before), "stage {}: {} comes before {}", stage, text(a), text(before));
  }

  void check_complete(int c, int64_t m, int k) {
    using enum ActionKind;
    auto require = [&](ActionKind kind, bool needed) {
      const Action a{kind, c, m, k};
      CHECK(!needed || done(a), "stage {}: {} is missing", p_.stage_of(c), text(a));
    };
    require(forward, true);
    require(send_activations, p_.elsewhere(c, c + 1));
    require(receive_activations, p_.elsewhere(c, c - 1));
    if (what_ == ListsOf::forwards) return;
    require(backward, !p_.splits_backward());
    require(backward_input, p_.splits_backward());
    require(backward_weight, p_.splits_backward());
    require(update, p_.schedule == Schedule::pipedream);
    require(send_gradients, p_.elsewhere(c, c - 1));
    require(receive_gradients, p_.elsewhere(c, c + 1));
  }

  // The receive that belongs to a send: the same message as its receiver lists it.
  static Action as_received(const Action& send) {
    return {goes_forward(send.kind) ? ActionKind::receive_activations : ActionKind::receive_gradients,
            chunk_after(send), send.micro_batch, send.slice};
  }
  int peer_of(const Action& a) const { return p_.stage_of(is_send(a.kind) ? chunk_after(a) : chunk_before(a)); }

  // Sender and receiver must list the messages from one stage to another in the same order.
  void check_links() {
    using Link = std::pair<int, int>;  // from, to
    std::map<Link, ActionList> sent, received;
    for (int s = 0; s < p_.stages; ++s)
      for (const Action& a : lists_[static_cast<size_t>(s)]) {
        if (is_send(a.kind)) sent[{s, peer_of(a)}].push_back(as_received(a));
        if (is_receive(a.kind)) received[{peer_of(a), s}].push_back(a);
      }
    for (const auto& [link, out] : sent) {
      const ActionList& in = received.at(link);
      for (size_t i = 0; i < out.size(); ++i)
        CHECK(out[i] == in[i],
              "from stage {} to stage {}: message {} is for {} where it is sent, and for {} where it is received",
              link.first, link.second, i, text(out[i]), text(in[i]));
    }
  }

  // Runs the lists as if every send waited for its receive.
  void check_blocking() {
    std::vector<size_t> at(lists_.size(), 0);
    auto next = [&](int s) -> const Action* {
      const ActionList& list = lists_[static_cast<size_t>(s)];
      size_t& i = at[static_cast<size_t>(s)];
      while (i < list.size() && !is_send(list[i].kind) && !is_receive(list[i].kind)) ++i;
      return i < list.size() ? &list[i] : nullptr;
    };
    // Stages whose next action may have become possible.
    std::vector<int> awake;
    for (int s = 0; s < p_.stages; ++s) awake.push_back(s);
    while (!awake.empty()) {
      const int s = awake.back();
      awake.pop_back();
      const Action* mine = next(s);
      if (mine == nullptr) continue;
      const int peer = peer_of(*mine);
      const Action* theirs = next(peer);
      if (theirs == nullptr) continue;
      const Action *send = is_send(mine->kind) ? mine : theirs, *receive = send == mine ? theirs : mine;
      if (!is_send(send->kind) || as_received(*send) != *receive) continue;
      ++at[static_cast<size_t>(s)], ++at[static_cast<size_t>(peer)];
      awake.push_back(s), awake.push_back(peer);
    }
    for (int s = 0; s < p_.stages; ++s)
      if (next(s) != nullptr) throw Error(deadlock(s, next));
  }

  // Follows each waiting stage to the one that it waits for, until a stage repeats.
  template <class Next>
  std::string deadlock(int s, const Next& next) const {
    std::vector<int> path;
    while (std::find(path.begin(), path.end(), s) == path.end()) path.push_back(s), s = peer_of(*next(s));
    std::string circle;
    for (auto i = std::find(path.begin(), path.end(), s); i != path.end(); ++i)
      circle += formatted("{}stage {} waits for stage {} in {}", circle.empty() ? "" : ", ", *i, peer_of(*next(*i)),
                          text(*next(*i)));
    return "the stages wait for each other if sends block: " + circle;
  }

  const Pipeline& p_;
  const std::vector<ActionList>& lists_;
  ListsOf what_;
  std::vector<PerPass<uint8_t>> done_;      // by kind
  std::vector<std::vector<int64_t>> last_;  // by kind and chunk: the last pass so far
};

}  // namespace detail

// Throws an Error that names the stage and the action. what: lists of whole steps, or of forwards alone
inline void check_actions(const Pipeline& p, const std::vector<ActionList>& lists, ListsOf what = ListsOf::steps) {
  pipeline_faults(p).refuse();
  detail::ListCheck(p, lists, what).run();
}

}  // namespace llmc
