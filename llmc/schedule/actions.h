// actions.h: the order in which the forwards and backwards of a step run, as lists of actions: pure functions whose
// values can be printed and tested. A schedule is only an order (contract 4): in every list the backwards of a chunk
// come in the order of the micro-batches. The lists for one rank that has the whole model are here; those for the
// stages of a pipeline are in orders.h and messages.h.
#pragma once
#include "core/check.h"

namespace llmc {

// backward: both parts at once. The input part makes the gradient of the chunk's input, for which the stage before
// waits; the weight part makes the gradients of the weights, for which nobody waits until the update.
enum class ActionKind : uint8_t {
  forward,
  backward,
  backward_input,
  backward_weight,
  send_activations,
  receive_activations,
  send_gradients,
  receive_gradients,
  update
};
constexpr auto names_of_values(ActionKind) {
  return std::array{"forward",
                    "backward",
                    "input part of the backward",
                    "weight part of the backward",
                    "sending of activations",
                    "receiving of activations",
                    "sending of gradients",
                    "receiving of gradients",
                    "update"};
}

// chunk: a chunk of the stage whose list has the action; for a message, the chunk that has made it or waits for it.
struct Action {
  ActionKind kind;
  int chunk;
  int64_t micro_batch;
  int slice = 0;  // of the micro-batch's sequence
  bool operator==(const Action&) const = default;
};

enum class Schedule : uint8_t { gpipe, one_f_one_b, interleaved, zb_h1, zb_v, pipedream };
constexpr auto names_of_values(Schedule) {
  return std::array{"gpipe", "1f1b", "interleaved", "zb-h1", "zb-v", "pipedream"};
}
// Do its stages have several chunks each?
inline bool has_chunks(Schedule s) { return s == Schedule::interleaved || s == Schedule::zb_v; }
// Can it take a micro-batch in token slices?
inline bool has_slices(Schedule s) { return s == Schedule::gpipe || s == Schedule::one_f_one_b; }
// The list for one rank that holds all chunks.
// gpipe: all forwards, then all backwards, in the order of the micro-batches (Huang et al. 2019).
// 1f1b: each backward as soon as it can run, so that one set of activations suffices (Narayanan et al. 2019,
// PipeDream-Flush).
// slices: how many each micro-batch's sequence has; they go forward one after the other, and back from last to first.
inline std::vector<Action> training_actions(Schedule schedule, int chunks, int64_t micro_batches, int slices = 1) {
  CHECK(schedule == Schedule::gpipe || schedule == Schedule::one_f_one_b,
        "--schedule {}: a rank that has the whole model has the schedules gpipe and 1f1b", schedule);
  std::vector<Action> actions;
  auto forward = [&](int64_t m) {
    for (int k = 0; k < slices; ++k)
      for (int c = 0; c < chunks; ++c) actions.push_back({ActionKind::forward, c, m, k});
  };
  auto backward = [&](int64_t m) {
    for (int k = slices - 1; k >= 0; --k)
      for (int c = chunks - 1; c >= 0; --c) actions.push_back({ActionKind::backward, c, m, k});
  };
  for (int64_t m = 0; m < micro_batches; ++m) {
    forward(m);
    if (schedule == Schedule::one_f_one_b) backward(m);
  }
  if (schedule == Schedule::gpipe)
    for (int64_t m = 0; m < micro_batches; ++m) backward(m);
  return actions;
}

// A backward, or the input part of one, for which the stage before waits.
inline bool is_backward(ActionKind k) { return k == ActionKind::backward || k == ActionKind::backward_input; }

inline bool is_send(ActionKind k) { return k == ActionKind::send_activations || k == ActionKind::send_gradients; }
inline bool is_receive(ActionKind k) {
  return k == ActionKind::receive_activations || k == ActionKind::receive_gradients;
}
inline bool computes(ActionKind k) { return !is_send(k) && !is_receive(k) && k != ActionKind::update; }
// A forward, or a message with activations.
inline bool goes_forward(ActionKind k) {
  return k == ActionKind::forward || k == ActionKind::send_activations || k == ActionKind::receive_activations;
}
// The chunk from which a pass gets its input, or to which it gives its result; none if outside [0, chunks).
inline int chunk_before(const Action& a) { return goes_forward(a.kind) ? a.chunk - 1 : a.chunk + 1; }
inline int chunk_after(const Action& a) { return goes_forward(a.kind) ? a.chunk + 1 : a.chunk - 1; }

// The largest number of micro-batches that are in flight at the same time: from the first forward to the last backward
// or input part, or to the last forward in a list without backwards. That many sets of inputs are needed.
inline int64_t micro_batches_in_flight(const std::vector<Action>& actions) {
  const bool backwards = std::ranges::any_of(actions, is_backward, &Action::kind);
  std::map<int64_t, const Action*> last;  // of each micro-batch
  for (const Action& a : actions)
    if (backwards ? is_backward(a.kind) : a.kind == ActionKind::forward) last[a.micro_batch] = &a;
  std::set<int64_t> live;
  size_t most = 0;
  for (const Action& a : actions) {
    if (a.kind == ActionKind::forward) live.insert(a.micro_batch);
    most = std::max(most, live.size());
    if (last[a.micro_batch] == &a) live.erase(a.micro_batch);
  }
  return static_cast<int64_t>(most);
}

// A run of layers; the first chunk has the embedding, the last the head.
struct Chunk {
  std::vector<int64_t> layers;
  bool has_embedding = false, has_head = false;
};

inline int64_t largest_chunk(const std::vector<Chunk>& chunks) {  // its layers
  return std::ssize(std::ranges::max_element(chunks, {}, [](const Chunk& c) { return c.layers.size(); })->layers);
}

// The most blocks whose gradients are open at the same time, that is, between the first and the last part of a
// micro-batch's backward: all blocks of a chunk, if its backward has several parts; otherwise one block after another.
inline int64_t blocks_open(const std::vector<Action>& actions, const std::vector<Chunk>& chunks) {
  const auto in_parts = [](const Action& a) { return a.kind == ActionKind::backward_weight || a.slice > 0; };
  if (std::none_of(actions.begin(), actions.end(), in_parts)) return 1;
  struct Backward {
    int64_t left = 0;  // parts still to come
    bool open = false;
  };
  std::map<std::pair<int, int64_t>, Backward> backwards;  // by chunk and micro-batch
  auto of = [&](const Action& a) -> Backward& { return backwards[{a.chunk, a.micro_batch}]; };
  auto is_part = [](const Action& a) { return computes(a.kind) && a.kind != ActionKind::forward; };
  for (const Action& a : actions) of(a).left += is_part(a);
  int64_t now = 0, most = 1;
  for (const Action& a : actions) {
    if (!is_part(a)) continue;
    Backward& backward = of(a);
    const int64_t blocks = std::ssize(chunks[static_cast<size_t>(a.chunk)].layers);
    if (backward.left > 1 && !std::exchange(backward.open, true)) now += blocks;
    most = std::max(most, now + !backward.open);
    if (--backward.left == 0 && backward.open) now -= blocks;
  }
  return most;
}

}  // namespace llmc
