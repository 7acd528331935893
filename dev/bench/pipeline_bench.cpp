// pipeline_bench: compares a pipeline of two stages with two data-parallel ranks, on the same two threads, for a model
// whose stages balance: the time of a step, and the time that stages wait, beside the law of the bubble.
//
//   make pipeline-bench && build/pipeline_bench [RUNS]
//
// The forms take turns; times are medians. A stage is busy when its compute stream does not wait for others
// (Stream::busy_seconds()), during the forwards and backwards of a step without its update.
#include <algorithm>
#include <chrono>
#include <cstdio>
#include <cstdlib>
#include <vector>

#include "core/log.h"
#include "run/ranks.h"
#include "run/selftest/selftest.h"
#include "schedule/simulate.h"

using namespace llmc;

namespace {

constexpr int ranks = 2;

// GPT-2's shape, with a cheap head: 3 layers per stage.
StepConfig step_of(int stages, int64_t micro_batches) {
  ModelConfig model;
  model.n_layer = model.n_head = model.n_kv_head = 6;
  model.n_embd = 384;
  model.n_ffn = 1536;
  model.vocab_size = 257;
  model.tied = false;
  StepConfig step{.model = model, .batch = {2, 128}, .micro_batches = micro_batches, .generates = false};
  step.layout.pipeline.stages = stages;
  step.layout.zero.shards = ranks / stages;
  return step;
}

struct Times {
  std::vector<double> step, idle;  // seconds; share of the ranks' time
};

void measure(const StepConfig& step, int steps, Times& times) {
  const Plan plan = make_plan(step, {DeviceKind::cpu, 1});
  World world(step.layout.mesh());
  std::vector<double> busy(ranks);
  run_ranks(world, [&](int rank) {
    Run run(step, plan, {DeviceKind::cpu, 1}, world, rank);
    init_weights(run.trainer.state(), 42, run.stream);
    const BatchSource batches = [&](int64_t m) { return selftest::read_batch(step, run.groups.reader(), m); };
    const auto timed = [&](auto&& work) {
      run.stream.synchronize();
      run.groups[GroupName::control].barrier();
      const auto begin = std::chrono::steady_clock::now();
      const double before = run.stream.busy_seconds();
      work();
      run.stream.synchronize();
      busy[static_cast<size_t>(rank)] = run.stream.busy_seconds() - before;
      run.groups[GroupName::control].barrier();
      return std::chrono::duration<double>(std::chrono::steady_clock::now() - begin).count();
    };
    for (int s = 1; s <= steps + 1; ++s) {
      const double whole = timed([&] {
        run.trainer.step(batches,
                         {.lr = 1e-4f, .beta1 = 0.9f, .beta2 = 0.95f, .eps = 1e-8f, .weight_decay = 0, .step = s},
                         {.max_norm = 1});
      });
      const double gradients = timed([&] { run.trainer.accumulate_gradients(batches); });
      if (rank > 0 || s == 1) continue;  // the first warms up
      times.step.push_back(whole);
      times.idle.push_back(1 - (busy[0] + busy[1]) / (ranks * gradients));
    }
  });
}

}  // namespace

int main(int argc, char** argv) {
  const int runs = argc > 1 ? std::atoi(argv[1]) : 5;
  if (runs < 1) {
    std::fprintf(stderr, "pipeline_bench: %s: expected a number of runs\n", argv[1]);
    return 1;
  }
  std::printf("| micro-batches | dp 2, ms | pp 2, ms | pp / dp | idle of pp 2 | law of the bubble | idle of dp 2 |\n");
  std::printf("| ---: | ---: | ---: | ---: | ---: | ---: | ---: |\n");
  for (const int64_t M : {4, 8, 16}) {
    Times dp, pp;
    for (int run = 0; run < runs; ++run) {
      measure(step_of(1, M / ranks), 2, dp);
      measure(step_of(ranks, M), 2, pp);
    }
    const double a = median(dp.step) * 1e3, b = median(pp.step) * 1e3;
    std::printf("| %ld | %.0f | %.0f | %.2f | %.1f%% | %.1f%% | %.1f%% |\n", static_cast<long>(M), a, b, b / a,
                100 * median(pp.idle), 100 * bubble_law(step_of(ranks, M).pipeline())->bubble, 100 * median(dp.idle));
    std::fflush(stdout);
  }
}
