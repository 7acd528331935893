// The schedules of a pipeline: lists that are right for every number of stages, micro-batches, chunks and slices, with
// the bubble and memory that the laws give; lists with a planted bug, which the checker must name.
#include <array>
#include <functional>
#include <set>

#include "catch2.h"
#include "schedule/check.h"
#include "schedule/laws.h"
#include "schedule/messages.h"

using namespace llmc;

namespace {

using enum ActionKind;
using Lists = std::vector<ActionList>;
constexpr Schedule schedules[] = {Schedule::gpipe, Schedule::one_f_one_b, Schedule::interleaved,
                                  Schedule::zb_h1, Schedule::zb_v,        Schedule::pipedream};

std::string text(const Pipeline& p) {
  return formatted("{}, P = {}, V = {}, M = {}, K = {}", p.schedule, p.stages, p.chunks_per_stage, p.micro_batches,
                   p.slices);
}

// f(pipeline, lists) for all sizes up to these.
template <class Schedules, class F>
void for_all(const Schedules& some, int most_stages, int64_t most_micro_batches, F&& f) {
  for (const Schedule schedule : some)
    for (int P = 1; P <= most_stages; ++P)
      for (int V = 1; V <= 4; ++V) {
        if (V != (schedule == Schedule::zb_v ? 2 : 1) && schedule != Schedule::interleaved) continue;
        for (int64_t M = 1; M <= most_micro_batches; ++M) {
          const Pipeline p{schedule, P, V, M};
          INFO(text(p));
          f(p, pipeline_actions(p));
        }
      }
}

void require_laws(const Pipeline& p, const Lists& lists) {
  REQUIRE_NOTHROW(check_actions(p, lists));
  const Simulation sim = simulate(p, lists);
  if (const auto law = bubble_law(p)) REQUIRE(sim.bubble() == law->bubble);  // both are quotients of whole numbers
  REQUIRE(sim.makespan >= static_cast<double>(3 * p.chunks_per_stage * p.passes() + p.stages - 1));
  for (int s = 0; s < p.stages; ++s) {
    const Kept kept = most_kept(p, lists[static_cast<size_t>(s)]);
    if (const auto law = activations_law(p, s)) REQUIRE(kept.activations == *law);
    if (p.schedule != Schedule::interleaved) REQUIRE(kept.received <= 3);
  }
}

const Lists& corrupt(Lists& lists, size_t stage, const std::function<void(ActionList&)>& bug) {
  bug(lists.at(stage));
  return lists;
}
auto at(ActionList& list, const Action& a) {
  const auto found = std::find(list.begin(), list.end(), a);
  REQUIRE(found != list.end());
  return found;
}
std::function<void(ActionList&)> without(Action a) {
  return [a](ActionList& list) { list.erase(at(list, a)); };
}
std::function<void(ActionList&)> twice(Action a) {
  return [a](ActionList& list) { list.insert(at(list, a), a); };
}
std::function<void(ActionList&)> swapped(Action a, Action b) {
  return [a, b](ActionList& list) { std::iter_swap(at(list, a), at(list, b)); };
}
// a moves to the place before b.
std::function<void(ActionList&)> before(Action a, Action b) {
  return [a, b](ActionList& list) { list.erase(at(list, a)), list.insert(at(list, b), a); };
}

void refused(const Pipeline& p, const std::string& message) {
  INFO(text(p));
  REQUIRE_THROWS_WITH(pipeline_actions(p), Catch::Matchers::ContainsSubstring(message));
}

}  // namespace

TEST_CASE(
    "every schedule of up to 16 stages and 32 micro-batches is complete, cannot hang, and has the bubble and the "
    "memory of the laws",
    "[pp]") {
  for_all(schedules, 16, 32, require_laws);
}

TEST_CASE("token slices shrink the bubble by the law, and are kept one by one", "[pp]") {
  for (const Schedule schedule : {Schedule::gpipe, Schedule::one_f_one_b})
    for (int P = 1; P <= 8; ++P)
      for (int64_t M = 1; M <= 10; ++M)
        for (int K = 2; K <= 5; ++K) {
          const Pipeline p{schedule, P, 1, M, K};
          INFO(text(p));
          const Lists lists = pipeline_actions(p);
          require_laws(p, lists);
          for (int s = 0; s < P; ++s) {
            // When the backward of a micro-batch has come to its first slice, the forward is P - s - 1 + K - 1 ahead.
            const int64_t begun = (P - s - 1 + 2 * (K - 1)) / K + 1;
            REQUIRE(most_kept(p, lists[static_cast<size_t>(s)]).micro_batches ==
                    (schedule == Schedule::gpipe ? M : std::min(M, begun)));
          }
          if (P > 1) REQUIRE(bubble_law(p)->bubble < bubble_law({schedule, P, 1, M})->bubble);
        }
}

TEST_CASE("zero-bubble schedules idle less than 1f1b and keep no more than its first stage", "[pp]") {
  for_all(std::array{Schedule::zb_h1, Schedule::zb_v}, 16, 32, [](const Pipeline& p, const Lists& lists) {
    const double bubble = simulate(p, lists).bubble();
    REQUIRE(bubble_law(p).has_value() ==
            (p.micro_batches >= (p.schedule == Schedule::zb_h1 ? p.stages : 2 * p.stages - 1)));
    if (p.stages > 1) REQUIRE(bubble < bubble_law({Schedule::one_f_one_b, p.stages, 1, p.micro_batches})->bubble);
    if (p.schedule == Schedule::zb_v && p.stages > 1) {
      const Pipeline h1{Schedule::zb_h1, p.stages, 1, p.micro_batches};
      REQUIRE(bubble <= simulate(h1, pipeline_actions(h1)).bubble());
    }
    const int64_t most = std::min<int64_t>(p.micro_batches, p.stages);
    for (size_t s = 0; s < lists.size(); ++s) {
      const Kept kept = most_kept(p, lists[s]);
      REQUIRE(kept.together <= p.chunks_per_stage * most);
      if (p.schedule == Schedule::zb_h1)
        REQUIRE(kept.for_weights == std::min<int64_t>(p.micro_batches, static_cast<int64_t>(s) + 1));
      else if (s == 0 && p.micro_batches >= 2 * p.stages) REQUIRE(kept.activations == 2 * p.stages);
    }
  });
}

TEST_CASE("interleaved keeps what Narayanan et al. say where the stages divide the micro-batches", "[pp]") {
  for_all(std::array{Schedule::interleaved}, 8, 32, [](const Pipeline& p, const Lists& lists) {
    const int P = p.stages, V = p.chunks_per_stage;
    if (V == 1 || p.micro_batches % P != 0) return;
    for (int s = 0; s < P; ++s)
      REQUIRE(most_kept(p, lists[static_cast<size_t>(s)]).activations ==
              std::min<int64_t>(V * p.micro_batches, (V - 1) * P + 2 * (P - s - 1) + 1));
  });
}

TEST_CASE("pipedream keeps P - s versions of weights, and its gradients are P - s - 1 updates old", "[pp]") {
  for_all(std::array{Schedule::pipedream}, 8, 16, [](const Pipeline& p, const Lists& lists) {
    for (int s = 0; s < p.stages; ++s) {
      int64_t version = 0;          // updates so far
      std::vector<int64_t> used;    // by each forward
      std::multiset<int64_t> kept;  // by those whose backward is to come
      size_t most = 0;
      for (const Action& a : lists[static_cast<size_t>(s)]) {
        if (a.kind == forward) used.push_back(version), kept.insert(version);
        if (a.kind == backward) {
          REQUIRE(version - used.at(static_cast<size_t>(a.micro_batch)) ==
                  std::min<int64_t>(a.micro_batch, p.stages - s - 1));
          kept.erase(kept.find(used[static_cast<size_t>(a.micro_batch)]));
        }
        if (a.kind == update) REQUIRE(a.micro_batch == version++);
        std::set<int64_t> versions(kept.begin(), kept.end());
        versions.insert(version);
        most = std::max(most, versions.size());
      }
      REQUIRE(static_cast<int64_t>(most) <= weight_versions(p, s));
      if (p.micro_batches >= 2 * (p.stages - s) - 1) REQUIRE(static_cast<int64_t>(most) == weight_versions(p, s));
    }
  });
}

TEST_CASE("a pipeline of one stage computes in the order of one rank", "[pp]") {
  for (const Schedule schedule : {Schedule::gpipe, Schedule::one_f_one_b})
    REQUIRE(pipeline_actions({schedule, 1, 1, 5})[0] == training_actions(schedule, 1, 5));
}

TEST_CASE("forwards alone fill the stages of every schedule, and cannot hang", "[pp]") {
  for_all(schedules, 16, 32, [](const Pipeline& p, const Lists&) {
    const Lists lists = forward_actions(p);
    REQUIRE_NOTHROW(check_actions(p, lists, ListsOf::forwards));
    // The last micro-batch begins as soon as the first stage may take it, and then waits for nothing.
    const int64_t P = p.stages, V = p.chunks_per_stage, M = p.micro_batches, full = (M - 1) / P * P * V;
    const int64_t begins = p.schedule == Schedule::zb_v ? 2 * (M - 1) : full + (M - 1) % P;
    REQUIRE(simulate(p, lists).makespan <= static_cast<double>(begins + p.chunks()));
    for (const ActionList& list : lists) REQUIRE(micro_batches_in_flight(list) <= (V == 1 ? 1 : P));
  });
  // One micro-batch at a time would take 2 P M.
  REQUIRE(simulate({Schedule::interleaved, 4, 2, 16}, forward_actions({Schedule::interleaved, 4, 2, 16})).makespan ==
          2 * 16 + 3);
  REQUIRE(simulate({Schedule::zb_v, 4, 2, 16}, forward_actions({Schedule::zb_v, 4, 2, 16})).makespan == 2 * 16 + 6);
}

TEST_CASE("a simulation takes the times of chunks and messages", "[pp]") {
  const Pipeline two{Schedule::gpipe, 2, 1, 1};
  const Simulation head = simulate(two, pipeline_actions(two), {.chunk = {1, 3}});
  REQUIRE(head.makespan == 12);  // 1 + 3 forward, 6 + 2 backward
  REQUIRE(head.busy == std::vector<double>{3, 9});
  REQUIRE(head.bubble(0) == 0.75);
  REQUIRE(head.bubble() == 0.5);

  const Pipeline three{Schedule::zb_h1, 3, 1, 1};
  REQUIRE(simulate(three, pipeline_actions(three)).makespan == 7);  // 3 F, 3 B, 1 W
  REQUIRE(simulate(three, pipeline_actions(three), {.message = 0.25}).makespan == 8);
  REQUIRE(simulate(three, pipeline_actions(three), {.forward = 2, .input = 3, .weight = 5}).makespan == 20);

  // Both chunks of the last stage of a V are next to each other: no message. Of its weight parts, one is in the way.
  const Pipeline v{Schedule::zb_v, 2, 2, 1};
  REQUIRE(simulate(v, pipeline_actions(v), {.message = 1}).makespan == 4 + 4 + 4 + 2);
  const Lists of_v = pipeline_actions(v);
  for (const Action& a : of_v[1]) REQUIRE((a.kind != send_activations || a.chunk == 2));

  Lists hang = pipeline_actions(three);
  corrupt(hang, 2, without({forward, 2, 0}));
  REQUIRE_THROWS_WITH(simulate(three, hang), Catch::Matchers::ContainsSubstring("the schedule hangs: stage 0 waits"));
}

TEST_CASE("the checker names what is wrong with a list", "[pp]") {
  struct Planted {
    Pipeline pipeline;
    size_t stage;
    std::function<void(ActionList&)> bug;
    std::string message;
  };
  const Pipeline f1b1{Schedule::one_f_one_b, 2, 1, 3}, gpipe{Schedule::gpipe, 2, 1, 3}, h1{Schedule::zb_h1, 2, 1, 3},
      v{Schedule::zb_v, 2, 2, 3}, slices{Schedule::gpipe, 2, 1, 2, 3}, pipedream{Schedule::pipedream, 2, 1, 3};
  const std::vector<Planted> planted = {
      {f1b1, 1, without({receive_activations, 1, 2}),
       "stage 1: the forward of micro-batch 2 in chunk 1 comes before the receiving of activations of micro-batch 2"},
      {f1b1, 0, without({send_activations, 0, 2}),
       "stage 0: the sending of activations of micro-batch 2 in chunk 0 is missing"},
      {f1b1, 1, without({send_gradients, 1, 1}),
       "stage 1: the sending of gradients of micro-batch 1 in chunk 1 is missing"},
      {f1b1, 1, swapped({forward, 1, 1}, {backward, 1, 1}),
       "stage 1: the backward of micro-batch 1 in chunk 1 comes before the forward of micro-batch 1 in chunk 1"},
      {gpipe, 1, swapped({backward, 1, 0}, {backward, 1, 1}), "before the backward of micro-batch 0"},
      {gpipe, 0,
       [](ActionList& list) {  // whole micro-batches, with their messages
         before({receive_gradients, 0, 1}, {receive_gradients, 0, 0})(list);
         before({backward, 0, 1}, {backward, 0, 0})(list);
       },
       "stage 0: the backward of micro-batch 0 in chunk 0 comes after that of micro-batch 1: it must come before, in "
       "the order of the micro-batches"},
      {gpipe, 0, twice({forward, 0, 1}), "stage 0: the forward of micro-batch 1 in chunk 0 comes twice"},
      {gpipe, 0, without({backward, 0, 2}), "stage 0: the backward of micro-batch 2 in chunk 0 is missing"},
      {gpipe, 0,
       [](ActionList& list) {
         list.push_back({forward, 1, 0});
       },
       "stage 0: the forward of micro-batch 0 in chunk 1, which is on stage 1"},
      {gpipe, 0,
       [](ActionList& list) {
         list.push_back({forward, 0, 3});
       },
       "stage 0: the forward of micro-batch 3 in chunk 0: there is no such chunk, micro-batch or slice"},
      {gpipe, 1,
       [](ActionList& list) {
         list.push_back({send_activations, 1, 0});
       },
       "stage 1: the sending of activations of micro-batch 0 in chunk 1: there is no other stage to send to"},
      {gpipe, 0,
       [](ActionList& list) {
         list.push_back({update, 0, 0});
       },
       "only pipedream updates within a list"},
      {gpipe, 1, before({receive_activations, 1, 1}, {receive_activations, 1, 0}),
       "from stage 0 to stage 1: message 0 is for the receiving of activations of micro-batch 0 in chunk 1 where it is "
       "sent, and for the receiving of activations of micro-batch 1 in chunk 1 where it is received"},
      {f1b1, 1, before({receive_activations, 1, 1}, {forward, 1, 1}),
       "the stages wait for each other if sends block: stage 0 waits for stage 1 in the sending of activations of "
       "micro-batch 1 in chunk 0, stage 1 waits for stage 0 in the sending of gradients of micro-batch 0 in chunk 1"},
      {h1, 1, swapped({backward_input, 1, 1}, {backward_weight, 1, 1}),
       "stage 1: the weight part of the backward of micro-batch 1 in chunk 1 comes before the input part of the "
       "backward of micro-batch 1 in chunk 1"},
      {h1, 0, without({backward_weight, 0, 1}), "stage 0: the weight part of the backward of micro-batch 1"},
      {h1, 1, swapped({backward_weight, 1, 1}, {backward_weight, 1, 2}), "comes after that of micro-batch 2"},
      {h1, 1,
       [](ActionList& list) {
         at(list, {backward_input, 1, 0})->kind = backward;
       },
       "zb-h1 splits the backward"},
      {f1b1, 1,
       [](ActionList& list) {
         at(list, {backward, 1, 0})->kind = backward_input;
       },
       "1f1b does not split the backward"},
      {v, 1, swapped({forward, 1, 0}, {forward, 2, 0}),
       "stage 1: the forward of micro-batch 0 in chunk 2 comes before the forward of micro-batch 0 in chunk 1"},
      {slices, 0, before({forward, 0, 0, 2}, {forward, 0, 0, 1}), "in the order of the micro-batches and their slices"},
      {slices, 1, before({backward, 1, 1, 0}, {backward, 1, 1, 1}),
       "the backward of micro-batch 1, slice 1, in chunk 1 comes after that of micro-batch 1, another slice"},
      {pipedream, 1, without({update, 1, 1}),
       "stage 1: the backward of micro-batch 2 in chunk 1 comes before the update "
       "of micro-batch 1"},
      {pipedream, 0, before({update, 0, 0}, {backward, 0, 0}), "the update of micro-batch 0 in chunk 0 comes before"},
  };
  for (const Planted& bug : planted) {
    Lists lists = pipeline_actions(bug.pipeline);
    INFO(text(bug.pipeline) << ": " << bug.message);
    REQUIRE_NOTHROW(check_actions(bug.pipeline, lists));
    REQUIRE_THROWS_WITH(check_actions(bug.pipeline, corrupt(lists, bug.stage, bug.bug)),
                        Catch::Matchers::ContainsSubstring(bug.message));
  }
  REQUIRE_THROWS_WITH(check_actions(gpipe, Lists(1)), Catch::Matchers::ContainsSubstring("1 lists for 2 stages"));
}

TEST_CASE("schedules that there are not are refused by name", "[pp]") {
  refused({Schedule::one_f_one_b, 4, 2, 8}, "--pp-chunks 2 with --schedule 1f1b");
  refused({Schedule::zb_h1, 4, 2, 8}, "--pp-chunks 2 with --schedule zb-h1");
  refused({Schedule::zb_v, 4, 1, 8}, "--pp-chunks 1 with --schedule zb-v, whose stages have 2 chunks");
  refused({Schedule::zb_v, 4, 3, 8}, "--pp-chunks 3 with --schedule zb-v");
  refused({Schedule::interleaved, 4, 2, 8, 2}, "--token-slices with --schedule interleaved");
  refused({Schedule::pipedream, 4, 1, 8, 2}, "--token-slices with --schedule pipedream");
  refused({Schedule::gpipe, 0, 1, 8}, "--pp 0");
  refused({Schedule::gpipe, 1, 1, 0}, "0 micro-batches");
  refused({Schedule::gpipe, 1, 0, 1}, "--pp-chunks 0");
  refused({Schedule::gpipe, 1, 1, 1, 0}, "--token-slices 0");
  refused({Schedule::gpipe, 1024, 1, 1 << 20}, "too many to list");
  REQUIRE_THROWS_WITH(training_actions(Schedule::zb_h1, 1, 2), Catch::Matchers::ContainsSubstring("--schedule zb-h1"));
  REQUIRE(!from_name<Schedule>("2f2b"));
  for (const Schedule s : schedules) REQUIRE(from_name<Schedule>(name_of(s)) == s);
}
