// orders.h: the order in which each stage of a pipeline computes: one rule for each schedule. messages.h adds messages.
#pragma once
#include "core/shape.h"
#include "schedule/pipeline.h"

namespace llmc {

using ActionList = std::vector<Action>;

namespace detail {

// First `ahead` forwards, then one forward and one backward in turn, then the backwards that are left.
inline ActionList in_turn(const ActionList& forwards, const ActionList& backwards, int64_t ahead) {
  const size_t lead = std::min(forwards.size(), static_cast<size_t>(ahead));
  ActionList order(forwards.begin(), forwards.begin() + static_cast<ptrdiff_t>(lead));
  for (size_t i = 0; i < backwards.size(); ++i) {
    if (i + lead < forwards.size()) order.push_back(forwards[i + lead]);
    order.push_back(backwards[i]);
  }
  return order;
}

// gpipe, 1f1b and pipedream: one chunk. The slices of a micro-batch go forward in their order and back from the last,
// which attends to all others. With 1f1b and pipedream, the forwards of a stage are ahead by the number of stages after
// it plus the slices before the last: so each gradient arrives in time, and no more slices than needed are kept (K = 1:
// 1f1b; K > 1: as in Sun et al. 2024, Seq1F1B).
inline ActionList one_chunk_order(const Pipeline& p, int stage) {
  ActionList forwards, backwards;
  for (int64_t m = 0; m < p.micro_batches; ++m)
    for (int k = 0; k < p.slices; ++k) {
      forwards.push_back({ActionKind::forward, stage, m, k});
      backwards.push_back({ActionKind::backward, stage, m, p.slices - 1 - k});
    }
  return in_turn(forwards, backwards, p.schedule == Schedule::gpipe ? p.passes() : p.stages - stage - 1 + p.slices - 1);
}

inline ActionList pipedream_order(const Pipeline& p, int stage) {
  ActionList order;
  for (const Action& a : one_chunk_order(p, stage)) {
    order.push_back(a);
    if (a.kind == ActionKind::backward) order.push_back({ActionKind::update, a.chunk, a.micro_batch});
  }
  return order;
}

// Micro-batches go through the chunks of a stage in groups: all of a group through the first chunk, then all through
// the second, and so on. When the last micro-batch of a group has left the first chunk, the group's first must have
// come round: so a group has at least as many micro-batches as there are stages. If P does not divide M, some groups
// have more; M < P is one group, and the stages wait until its first micro-batch comes round.
inline ActionList interleaved_order(const Pipeline& p, int stage) {
  if (p.chunks_per_stage == 1) return one_chunk_order(p, stage);
  const int64_t M = p.micro_batches, V = p.chunks_per_stage, groups = std::max<int64_t>(1, M / p.stages);
  ActionList forwards, backwards;
  for (int64_t g = 0; g < groups; ++g)
    for (int v = 0; v < V; ++v)
      for (int64_t m = g * M / groups; m < (g + 1) * M / groups; ++m) {
        forwards.push_back({ActionKind::forward, p.chunk_of(stage, v), m});
        backwards.push_back({ActionKind::backward, p.chunk_of(stage, static_cast<int>(V) - 1 - v), m});
      }
  const int64_t largest_group = ceil_div(M, groups);
  return in_turn(forwards, backwards, (V - 1) * largest_group + 2 * (p.stages - stage - 1));
}

// 1f1b, with the weight part `stage` micro-batches after the input part: later stages have more weight parts left to
// fill the time in which 1f1b waits, and all stages keep the same amount, the activations of P micro-batches.
inline ActionList zb_h1_order(const Pipeline& p, int stage) {
  ActionList order;
  int64_t input_parts = 0, weight_parts = 0;
  auto weight_part = [&] { order.push_back({ActionKind::backward_weight, stage, weight_parts++}); };
  for (Action a : one_chunk_order(p, stage)) {
    if (a.kind == ActionKind::backward) a.kind = ActionKind::backward_input;
    order.push_back(a);
    if (a.kind == ActionKind::backward_input && ++input_parts > stage) weight_part();
  }
  while (weight_parts < p.micro_batches) weight_part();
  return order;
}

// The V schedule of Qi et al. 2023, section 6, in the form for parts that take equally long: every stage enters the
// steady phase with 2 P forwards that wait for their backward, and then runs forward, input part and weight part of one
// chunk, then of the other. With fewer than 2 P - 1 micro-batches, the passes of those that do not exist are left out.
inline ActionList zb_v_order(const Pipeline& p, int stage) {
  const int P = p.stages;
  const int64_t M = std::max<int64_t>(p.micro_batches, 2 * P - 1);
  ActionList order;
  std::array<std::array<int64_t, 4>, 2> done = {};  // micro-batches, by chunk and kind
  auto next = [&](ActionKind kind, int v) {
    const int64_t m = done[v][static_cast<int>(kind)]++;
    if (m < p.micro_batches) order.push_back({kind, p.chunk_of(stage, v), m});
  };
  auto count = [&](ActionKind kind, int v) { return done[v][static_cast<int>(kind)]; };
  using enum ActionKind;
  auto whole_backward = [&](int v) { next(backward_input, v), next(backward_weight, v); };
  for (int i = 0; i < 2 * (P - stage) - 1; ++i) next(forward, 0);  // until the first micro-batch comes up again
  for (int i = 0; i < stage; ++i) next(forward, 1), next(forward, 0);
  for (int i = 0; i < P - stage; ++i) next(forward, 1), whole_backward(1);  // until it comes down again
  while (count(forward, 1) < M) {
    if (count(forward, 0) < M) next(forward, 0);
    whole_backward(0);
    next(forward, 1), whole_backward(1);
  }
  for (int i = 0; i < stage; ++i) next(backward_input, 0), next(backward_input, 1);
  for (int i = 0; i < P - stage; ++i) whole_backward(0);
  for (const int v : {1, 0})
    while (count(backward_weight, v) < M) next(backward_weight, v);
  return order;
}

}  // namespace detail

// The passes that each stage computes, in order.
inline std::vector<ActionList> compute_orders(const Pipeline& p) {
  pipeline_faults(p).refuse();
  std::vector<ActionList> orders;
  for (int stage = 0; stage < p.stages; ++stage) switch (p.schedule) {
      case Schedule::gpipe:
      case Schedule::one_f_one_b: orders.push_back(detail::one_chunk_order(p, stage)); break;
      case Schedule::interleaved: orders.push_back(detail::interleaved_order(p, stage)); break;
      case Schedule::zb_h1: orders.push_back(detail::zb_h1_order(p, stage)); break;
      case Schedule::zb_v: orders.push_back(detail::zb_v_order(p, stage)); break;
      case Schedule::pipedream: orders.push_back(detail::pipedream_order(p, stage)); break;
    }
  return orders;
}

// Only the forwards of p.micro_batches whole micro-batches. As on a conveyor belt, a micro-batch enters chunk c at
// begins_at(m) + c, so that no stage has two at a time, and none waits once the pipeline is full.
inline std::vector<ActionList> forward_orders(const Pipeline& p) {
  const int64_t P = p.stages, V = p.chunks_per_stage;
  auto begins_at = [&](int64_t m) {
    if (p.schedule == Schedule::zb_v) return 2 * m;  // the chunks on the way up take the turns between
    return m / P * P * V + m % P;                    // P of them, which then come round for the next chunk
  };
  std::vector<ActionList> orders(static_cast<size_t>(P));
  for (int c = 0; c < p.chunks(); ++c)
    for (int64_t m = 0; m < p.micro_batches; ++m)
      orders[static_cast<size_t>(p.stage_of(c))].push_back({ActionKind::forward, c, m});
  for (ActionList& order : orders)
    std::sort(order.begin(), order.end(), [&](const Action& a, const Action& b) {
      return begins_at(a.micro_batch) + a.chunk < begins_at(b.micro_batch) + b.chunk;
    });
  return orders;
}

}  // namespace llmc
