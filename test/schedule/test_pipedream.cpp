// The asynchronous pipeline against a plain reference, which keeps the stale weights by itself: bitwise, over flushes,
// with uneven stages and with data, tensor and context parallelism; its lists; its memory; its flushes.
#include <algorithm>
#include <cstring>
#include <map>
#include <mutex>
#include <set>

#include "catch2.h"
#include "helpers.h"
#include "run/selftest/selftest.h"
#include "schedule/check.h"

using namespace llmc;
using selftest::Outcome;

namespace {

constexpr int64_t all_steps = 30;

struct LayoutCase {
  int stages = 2;
  DType dtype = DType::fp32;
  int dp = 1, tp = 1, cp = 1;
  const char* family = "qwen3";
  bool masters = true;
};

StepConfig step_of(const LayoutCase& l) {
  selftest::Model made{l.family, false, l.dtype, 8, std::string_view(l.family) == "gpt2" ? 8 : 2};
  made.length = 20;
  ModelConfig model = made.config();
  model.n_layer = 5;  // uneven
  StepConfig step{.model = model,
                  .precision = l.dtype,
                  .batch = {2, 20},
                  .layout = {.zero = {.shards = l.dp * l.cp}, .pipeline = {.schedule = Schedule::pipedream}}};
  step.precision.masters = l.masters;
  step.layout.pipeline.stages = l.stages;
  step.layout.tensor = tensor_parallel(model, l.tp);
  step.layout.context = ContextParallel{l.cp, ContextAttention::ring};
  return step;
}

// Every step has a learning rate of its own.
OptimizerOptions options_of(int64_t k) {
  return {.lr = 1e-2f * static_cast<float>(1 + k % 5) / 3,
          .beta1 = 0.9f,
          .beta2 = 0.95f,
          .eps = 1e-2f,
          .weight_decay = 0.1f,
          .step = k + 1,
          .seed = 3};
}
BatchSource batches_of(const StepConfig& step, int reader, int64_t k) {
  return [=](int64_t) { return selftest::read_batch(step, reader, k); };
}

// f(run, rank, outcome, mutex) on all ranks.
template <class F>
Outcome on_all_ranks(const StepConfig& step, F&& f, const Hooks& hooks = poison_hooks) {
  Outcome outcome;
  std::mutex mutex;
  const Device device{DeviceKind::cpu, 1};
  const Plan plan = make_plan(step, device);
  World world(step.layout.mesh(), Backend::threads, hooks);
  run_ranks(world, [&](int rank) {
    Run run(step, plan, device, world, rank);
    init_weights(run.trainer.state(), 42, run.stream);
    std::vector<StepResult> results = f(run);
    run.stream.synchronize();
    std::lock_guard lock(mutex);
    selftest::collect_state(outcome, run.trainer.state(), rank, run.stream);
    std::vector<double> losses, norms;
    for (const StepResult& r : results) losses.push_back(r.loss), norms.push_back(r.grad_norm);
    if (outcome.losses.empty()) outcome.losses = losses, outcome.norms = norms;
    if (outcome.losses != losses || outcome.norms != norms) outcome.fault = "ranks report other losses or norms";
  });
  if (outcome.fault.empty()) selftest::require_whole(outcome, step);
  return outcome;
}

// flushes: after so many steps.
Outcome run_pipedream(const StepConfig& step, double max_norm, const std::set<int64_t>& flushes = {},
                      const Hooks& hooks = poison_hooks, int64_t steps = all_steps) {
  return on_all_ranks(
      step,
      [&](Run& run) {
        std::vector<PendingStep> pending;
        for (int64_t k = 0; k < steps; ++k) {
          pending.push_back(
              run.trainer.begin_step(batches_of(step, run.groups.reader(), k), options_of(k), {.max_norm = max_norm}));
          if (flushes.contains(k + 1)) run.trainer.flush();
        }
        run.trainer.flush();
        std::vector<StepResult> results;
        for (const PendingStep& p : pending) results.push_back(p.wait());
        return results;
      },
      hooks);
}

// What the reference does otherwise than it should.
enum class Mistake { none, fresh_weights, whole_norm, late_rate };

// The same by the trainer without a pipeline, which computes the gradients of one micro-batch after the other with the
// weights that are put into it, and by each unit's AdamW. With tensor parallelism without norms.
Outcome reference(const StepConfig& step, double max_norm, const std::set<int64_t>& flushes = {},
                  Mistake mistake = Mistake::none) {
  StepConfig alone = step;
  alone.layout.pipeline.stages = 1;
  alone.layout.pipeline.schedule = Schedule::one_f_one_b;
  const StageUnits owners = step.stage_units();
  return on_all_ranks(alone, [&](Run& run) {
    ModelState& state = run.trainer.state();
    Stream& stream = run.stream;
    const int64_t units = static_cast<int64_t>(state.size()), shards = step.layout.zero.shards;
    Arena arena(stream.device(), 1 << 20);
    auto scalars = [&](int64_t n) {
      const Tensor t = arena.alloc("test", "scalars", DType::fp64, {n});
      zero(t, stream);
      return t;
    };
    const Tensor loss = scalars(1), control = scalars(4), whole_control = scalars(4), sums = scalars(units * shards),
                 of_stage = scalars(units * shards);
    // The weights of each unit after 0, 1, 2 ... updates since the last flush.
    std::vector<std::vector<std::vector<std::byte>>> versions(static_cast<size_t>(units));
    auto weights = [&](size_t u) { return state.unit(u).weights(); };
    auto keep = [&](size_t u) {
      stream.synchronize();
      versions[u].emplace_back(weights(u).bytes, weights(u).bytes + weights(u).size_bytes());
    };
    auto load = [&](size_t u, int64_t version) {
      stream.synchronize();
      const auto& from = versions[u][static_cast<size_t>(version)];
      std::memcpy(weights(u).bytes, from.data(), from.size());
    };
    for (size_t u = 0; u < state.size(); ++u) keep(u);
    std::vector<StepResult> results;
    int64_t begin = 0;  // the step after the last flush
    for (int64_t k = 0; k < all_steps; ++k) {
      for (size_t u = 0; u < state.size(); ++u) {
        const int64_t age = step.layout.pipeline.stages - 1 - owners.stage_of[u];  // of the weights, in updates
        load(u, std::max<int64_t>(0, k - begin - age + (mistake == Mistake::fresh_weights && age > 0)));
      }
      const BatchSource batches = batches_of(step, run.groups.reader(), k);
      const double of_k = run.trainer.evaluate(1, step.tokens(), batches);
      run.trainer.accumulate_gradients(batches);
      for (int64_t u = 0; u < units; ++u)
        for (int64_t s = 0; s < shards; ++s)
          state.gradients.square_sum_of(static_cast<size_t>(u), sums.slice(u * shards + s, {1}), stream,
                                        static_cast<int>(s));
      clip_control(whole_control, sums, loss, {.max_norm = max_norm}, stream);
      for (int stage = 0; stage < step.layout.pipeline.stages; ++stage) {
        zero(of_stage, stream);
        for (int64_t u = 0; u < units; ++u)
          if (owners.stage_of[static_cast<size_t>(u)] == stage)
            copy(of_stage.slice(u * shards, {shards}), sums.slice(u * shards, {shards}), stream);
        clip_control(control, of_stage, loss, {.max_norm = max_norm}, stream);
        const int64_t rate_of = mistake == Mistake::late_rate ? k + step.layout.pipeline.stages - 1 - stage : k;
        OptimizerOptions options = options_of(k);
        options.lr = options_of(rate_of).lr;
        for (size_t u = 0; u < state.size(); ++u) {
          if (owners.stage_of[u] != stage) continue;
          load(u, k - begin);
          state.unit(u).update(mistake == Mistake::whole_norm ? whole_control : control, options, stream);
          keep(u);
        }
      }
      stream.synchronize();
      results.push_back({of_k, whole_control.data<double>()[0], true});
      if (!flushes.contains(k + 1)) continue;
      begin = k + 1;
      for (auto& of_unit : versions) of_unit = {of_unit.back()};
    }
    return results;
  });
}

bool same_state(const Outcome& a, const Outcome& b) {
  return a.weights == b.weights && a.optimizer_state == b.optimizer_state;
}
void require_equal(const Outcome& a, const Outcome& b) {
  REQUIRE((a.fault == "" && b.fault == ""));
  REQUIRE(a.losses == b.losses);
  REQUIRE(a.norms == b.norms);
  REQUIRE(same_state(a, b));
}

}  // namespace

TEST_CASE("pipedream is bitwise a reference that keeps the stale weights by itself", "[pp][pipedream]") {
  const std::set<int64_t> flushes = {1, 4, 17, 18};  // after fewer steps than stages, and after one
  for (const LayoutCase& l : {LayoutCase{2},
                              {3, DType::bf16},
                              {4},
                              {4, DType::bf16, 2},
                              {2, DType::fp32, 2, 1, 1, "gpt2"},
                              {3, DType::bf16, 1, 1, 1, "gpt2", false}}) {
    INFO(l.stages << " stages, " << name_of(l.dtype) << ", dp " << l.dp << ", " << l.family);
    const StepConfig step = step_of(l);
    require_equal(run_pipedream(step, 0.5), reference(step, 0.5));
    require_equal(run_pipedream(step, 0.5, flushes), reference(step, 0.5, flushes));
  }
}

TEST_CASE("pipedream with tensor and context parallelism inside a stage is bitwise the reference of that layout",
          "[pp][pipedream]") {
  for (const LayoutCase& l : {LayoutCase{2, DType::fp32, 1, 2}, {3, DType::fp32, 1, 1, 2}, {2, DType::bf16, 2, 2}}) {
    INFO(l.stages << " stages, dp " << l.dp << ", tp " << l.tp << ", cp " << l.cp);
    const StepConfig step = step_of(l);
    if (l.tp == 1) {
      require_equal(run_pipedream(step, 0.5, {7}), reference(step, 0.5, {7}));
      continue;
    }
    // No rank of the reference has the gradients of a whole stage, so without clipping; the norm is only reported.
    const Outcome outcome = run_pipedream(step, 0, {7}), expected = reference(step, 0, {7});
    REQUIRE((outcome.fault == "" && outcome.losses == expected.losses && same_state(outcome, expected)));
  }
}

TEST_CASE("clipping by stages with tensor parallelism counts every shard of a stage once", "[pp][pipedream]") {
  // The norm of a stage, as far as it shows: a limit that no stage reaches changes nothing, a small one does, and
  // ranks that clipped differently would hold different copies.
  const StepConfig step = step_of({2, DType::fp32, 2, 2});
  const Outcome unclipped = run_pipedream(step, 0, {}, poison_hooks, 6),
                high = run_pipedream(step, 1e3, {}, poison_hooks, 6),
                low = run_pipedream(step, 0.1, {}, poison_hooks, 6);
  REQUIRE((unclipped.fault == "" && high.fault == "" && low.fault == ""));
  REQUIRE(same_state(unclipped, high));
  REQUIRE(!same_state(unclipped, low));
  StepConfig alone = step_of({2});
  alone.batch.B *= 2;  // the same samples without the other axes: the same clipping but for rounding
  REQUIRE(selftest::distance(low.weights, run_pipedream(alone, 0.1, {}, poison_hooks, 6).weights) < 1e-5);
}

TEST_CASE("the comparison with the reference notices fresh weights, a norm of all stages and another step's rate",
          "[pp][pipedream]") {
  const StepConfig step = step_of({3});
  const Outcome outcome = run_pipedream(step, 0.5);
  for (const Mistake mistake : {Mistake::fresh_weights, Mistake::whole_norm, Mistake::late_rate}) {
    INFO(static_cast<int>(mistake));
    REQUIRE(!same_state(outcome, reference(step, 0.5, {}, mistake)));
  }
}

TEST_CASE("pipedream on one stage is 1f1b with one micro-batch a step, and flushed after every step any pipeline is",
          "[pp][pipedream]") {
  StepConfig one = step_of({1});
  StepConfig other = one;
  other.layout.pipeline.schedule = Schedule::one_f_one_b;
  REQUIRE(!one.layout.pipeline.asynchronous());
  const Outcome alone = run_pipedream(other, 0);
  require_equal(run_pipedream(one, 0), alone);
  std::set<int64_t> always;
  for (int64_t k = 1; k <= all_steps; ++k) always.insert(k);
  require_equal(run_pipedream(step_of({4}), 0, always), alone);
  REQUIRE(!same_state(run_pipedream(step_of({4}), 0), alone));
}

TEST_CASE("a resumed run is bitwise the one that flushed where it stopped", "[pp][pipedream]") {
  for (const DType dtype : {DType::fp32, DType::bf16}) {
    const StepConfig step = step_of({4, dtype});
    const int64_t stop = 13;
    // What a checkpoint has, by rank: the bytes of the table of a rank's state.
    std::vector<std::vector<std::vector<std::byte>>> saved(4);
    auto tensors = [](Run& run) {
      run.stream.synchronize();
      std::vector<Tensor> all;
      for (const StateEntry& e : run.trainer.state().state_table()) all.push_back(e.tensor);
      return all;
    };
    auto train = [&](Run& run, int64_t from, int64_t to) {
      std::vector<PendingStep> pending;
      for (int64_t k = from; k < to; ++k)
        pending.push_back(run.trainer.begin_step(batches_of(step, 0, k), options_of(k), {.max_norm = 0.5}));
      run.trainer.flush();
      std::vector<StepResult> results;
      for (const PendingStep& p : pending) results.push_back(p.wait());
      return results;
    };
    on_all_ranks(step, [&](Run& run) {
      const std::vector<StepResult> results = train(run, 0, stop);
      for (const Tensor& t : tensors(run))
        saved[static_cast<size_t>(run.groups.rank())].emplace_back(t.bytes, t.bytes + t.size_bytes());
      return results;
    });
    Outcome resumed = on_all_ranks(step, [&](Run& run) {
      const std::vector<Tensor> all = tensors(run);
      for (size_t i = 0; i < all.size(); ++i)
        std::copy_n(saved[static_cast<size_t>(run.groups.rank())][i].data(), all[i].size_bytes(), all[i].bytes);
      return train(run, stop, all_steps);
    });
    const Outcome whole = run_pipedream(step, 0.5, {stop});
    REQUIRE(resumed.fault == "");
    REQUIRE(resumed.losses == std::vector<double>(whole.losses.begin() + stop, whole.losses.end()));
    REQUIRE(same_state(resumed, whole));
    REQUIRE(!same_state(run_pipedream(step, 0.5), whole));
  }
}

namespace {

// Counts the versions that a flush forgets, all of which must have been written.
struct Forgotten : Poison {
  void released(const Tensor& memory, Stream& stream) const override {
    stream.synchronize();
    const bool written =
        std::any_of(memory.bytes, memory.bytes + memory.size_bytes(), [](std::byte b) { return b != std::byte{0xff}; });
    std::lock_guard lock(mutex);
    ++(written ? used : unused)[memory.name];
    Poison::released(memory, stream);
  }
  mutable std::mutex mutex;
  mutable std::map<std::string, int> used, unused;
};

}  // namespace

TEST_CASE("a stage plans and uses as many versions of its weights as there are stages from it to the last",
          "[pp][pipedream]") {
  for (const int P : {2, 4}) {
    const StepConfig step = step_of({P});
    const Plan plan = make_plan(step, {DeviceKind::cpu, 1});
    for (int s = 0; s < P; ++s) {
      std::map<std::string, int64_t> bytes;
      for (const MemoryLine& line : plan.stages[static_cast<size_t>(s)]->memory) bytes[line.label] = line.bytes;
      REQUIRE(bytes["weights"] > 0);
      REQUIRE(bytes["weight versions"] == (weight_versions(step.pipeline(), s) - 1) * bytes["weights"]);
    }
    const Forgotten forgotten;
    REQUIRE(run_pipedream(step, 0.5, {}, forgotten).fault == "");
    REQUIRE(forgotten.unused.empty());
    const StageUnits owners = step.stage_units();
    const ParamTable table = parameter_table(step.model);
    for (size_t u = 0; u < table.size(); ++u) {
      const auto found = forgotten.used.find(table[u].name);
      REQUIRE((found == forgotten.used.end() ? 0 : found->second) == P - 1 - owners.stage_of[u]);
    }
  }
}

TEST_CASE("the turns of pipedream add up to lists that the checker proves right", "[pp][pipedream]") {
  for (int P = 1; P <= 8; ++P)
    for (int64_t M = 1; M <= 20; ++M) {
      const Pipeline p{Schedule::pipedream, P, 1, M};
      std::vector<ActionList> lists(static_cast<size_t>(P));
      for (int s = 0; s < P; ++s)
        for (int64_t turn = 0; turn < M + P - 1; ++turn)
          for (const Action& a : pipedream_turn(P, s, turn, std::min(turn + 1, M)))
            lists[static_cast<size_t>(s)].push_back(a);
      INFO("P = " << P << ", M = " << M);
      REQUIRE_NOTHROW(check_actions(p, lists));
      // What is computed comes in the order of pipedream, and takes no longer.
      std::vector<ActionList> computes = lists;
      for (ActionList& list : computes)
        std::erase_if(list, [](const Action& a) { return is_send(a.kind) || is_receive(a.kind); });
      REQUIRE(computes == compute_orders(p));
      REQUIRE(simulate(p, lists).makespan == simulate(p, pipeline_actions(p)).makespan);
      for (int s = 0; s < P; ++s) REQUIRE(most_kept(p, lists[static_cast<size_t>(s)]).received <= 2);
    }
}

TEST_CASE("steps of pipedream that are under way are not read, and not interrupted", "[pp][pipedream]") {
  const StepConfig step = step_of({2});
  on_all_ranks(step, [&](Run& run) {
    const PendingStep first = run.trainer.begin_step(batches_of(step, 0, 0), options_of(0), {});
    REQUIRE_THROWS_WITH(first.wait(), Catch::Matchers::ContainsSubstring("flush first"));
    REQUIRE_THROWS_WITH(run.trainer.evaluate(1, 1, batches_of(step, 0, 0)),
                        Catch::Matchers::ContainsSubstring("flush first"));
    REQUIRE_THROWS_WITH(run.trainer.begin_step(batches_of(step, 0, 1), options_of(1), {.largest_norm = 1}),
                        Catch::Matchers::ContainsSubstring("outliers"));
    // A batch that cannot be read: the step has not begun, and those before it go on.
    REQUIRE_THROWS_WITH(run.trainer.begin_step([](int64_t) -> HostBatch { throw Error("stop"); }, options_of(1), {}),
                        Catch::Matchers::ContainsSubstring("stop"));
    REQUIRE(run.trainer.flush());
    REQUIRE(!run.trainer.flush());
    const double evaluated = run.trainer.evaluate(1, step.tokens(), batches_of(step, 0, 0));
    REQUIRE(evaluated < first.wait().loss);
    return std::vector<StepResult>{first.wait()};
  });
}
