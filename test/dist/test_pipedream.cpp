// The asynchronous pipeline against a plain reference, which keeps the stale weights by itself: bitwise, over flushes,
// with uneven stages and with data, tensor and context parallelism; its lists; its memory; its flushes.
#include <algorithm>
#include <cstring>
#include <mutex>
#include <set>

#include "catch2.h"
#include "dist/pipeline/check.h"
#include "helpers.h"
#include "run/selftest.h"

using namespace llmc;
using selftest::Outcome;

namespace {

constexpr int64_t all_steps = 30;

struct Layout {
  int stages = 2;
  DType dtype = DType::fp32;
  int dp = 1, tp = 1, cp = 1;
  const char* family = "qwen3";
  bool masters = true;
};

StepConfig step_of(const Layout& l) {
  selftest::Model made{l.family, false, l.dtype, 8, std::string_view(l.family) == "gpt2" ? 8 : 2};
  made.length = 20;
  ModelConfig model = made.config();
  model.n_layer = 5;  // uneven
  StepConfig step{.model = model,
                  .dtype = l.dtype,
                  .batch = {2, 20},
                  .schedule = Schedule::pipedream,
                  .zero = {.shards = l.dp * l.cp, .master_weights = l.masters}};
  step.stages = step.chunks = l.stages;
  step.tensor = tensor_parallel(model, l.tp);
  step.context = context_parallel(model, step.tensor, l.cp, ContextAttention::ring);
  return step;
}

// Every step has a learning rate of its own.
AdamWOptions options_of(int64_t k) {
  return {.lr = 1e-2f * static_cast<float>(1 + k % 5) / 3, .beta1 = 0.9f, .beta2 = 0.95f, .eps = 1e-2f,
          .weight_decay = 0.1f, .step = k + 1, .seed = 3};
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
  World world(step.mesh(), Backend::threads, hooks);
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
          pending.push_back(run.trainer.begin_step(batches_of(step, run.dp.reader(), k), options_of(k),
                                                   {.max_norm = max_norm}));
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
  alone.stages = alone.chunks = 1;
  alone.schedule = Schedule::one_f_one_b;
  const StageUnits owners = step.stage_units();
  return on_all_ranks(alone, [&](Run& run) {
    ModelState& state = run.trainer.state();
    Stream& stream = run.stream;
    const int64_t units = static_cast<int64_t>(state.size()), shards = step.zero.shards;
    Arena arena(stream.device(), 1 << 20);
    auto scalars = [&](int64_t n) {
      const Tensor t = arena.alloc("test", "scalars", DType::fp64, {n});
      zero(t, stream);
      return t;
    };
    const Tensor loss = scalars(1), control = scalars(4), whole_control = scalars(4), sums = scalars(units * shards),
                 of_stage = scalars(units * shards);
    // Of each unit: its weights after 0, 1, 2 ... updates since the last flush.
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
        const int64_t age = step.stages - 1 - owners.stage_of[u];  // of the weights, in updates
        load(u, std::max<int64_t>(0, k - begin - age + (mistake == Mistake::fresh_weights && age > 0)));
      }
      const BatchSource batches = batches_of(step, run.dp.reader(), k);
      const double of_k = run.trainer.evaluate(1, step.tokens(), batches);
      run.trainer.accumulate_gradients(batches);
      for (int64_t u = 0; u < units; ++u)
        for (int64_t s = 0; s < shards; ++s)
          state.square_sum_of(static_cast<size_t>(u), static_cast<int>(s), sums.slice(u * shards + s, {1}), stream);
      clip_control(whole_control, sums, loss, {.max_norm = max_norm}, stream);
      for (int stage = 0; stage < step.stages; ++stage) {
        zero(of_stage, stream);
        for (int64_t u = 0; u < units; ++u)
          if (owners.stage_of[static_cast<size_t>(u)] == stage)
            copy(of_stage.slice(u * shards, {shards}), sums.slice(u * shards, {shards}), stream);
        clip_control(control, of_stage, loss, {.max_norm = max_norm}, stream);
        const int64_t rate_of = mistake == Mistake::late_rate ? k + step.stages - 1 - stage : k;
        AdamWOptions options = options_of(k);
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

TEST_CASE("pipedream is bitwise a reference that keeps the stale weights by itself") {
  const std::set<int64_t> flushes = {1, 4, 17, 18};  // after fewer steps than stages, and after one
  for (const Layout& l : {Layout{2}, {3, DType::bf16}, {4}, {4, DType::bf16, 2}, {2, DType::fp32, 2, 1, 1, "gpt2"},
                          {3, DType::bf16, 1, 1, 1, "gpt2", false}}) {
    INFO(l.stages << " stages, " << name_of(l.dtype) << ", dp " << l.dp << ", " << l.family);
    const StepConfig step = step_of(l);
    require_equal(run_pipedream(step, 0.5), reference(step, 0.5));
    require_equal(run_pipedream(step, 0.5, flushes), reference(step, 0.5, flushes));
  }
}
