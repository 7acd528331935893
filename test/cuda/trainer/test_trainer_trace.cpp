// Traces of a step on GPUs (run/trace/trace_file.h): CUDA events around actions, layers and ops; what a CUDA graph
// contains is not seen, and recording changes no number.
#include <algorithm>
#include <chrono>
#include <map>
#include <mutex>
#include <optional>
#include <string>
#include <vector>

#include "cuda/trainer/trainer_test.h"
#include "run/trace/trace_file.h"
#include "run/trace_checker.h"

using namespace llmc;

namespace {

struct TracedSteps {
  std::vector<double> losses;                // of all ranks
  std::map<int, std::vector<Track>> tracks;  // by rank, of the last step
  std::map<int, TraceZero> zeros;            // of these
  nlohmann::json file;
};
TracedSteps train(const StepConfig& step, const selftest::Machine& machine, bool traced) {
  TracedSteps result;
  std::mutex mutex;
  const Plan plan = make_plan(step, machine.device);
  World world(step.layout.mesh(), machine.backend);
  run_ranks(world, [&](int rank) {
    std::optional<RankTrace> trace;  // outlives the streams
    Run run(step, plan, machine.of_rank(rank), world, rank);
    init_weights(run.trainer.state(), 42, run.stream);
    std::vector<double> losses;
    for (int k = 0; k < 3; ++k) {
      if (traced && k == 2) trace.emplace(run.stream, run.groups);
      losses.push_back(
          run.trainer
              .step([&](int64_t) { return selftest::read_batch(step, run.groups.reader(), k); },
                    {.lr = 1e-2f, .beta1 = 0.9f, .beta2 = 0.95f, .eps = 1e-2f, .weight_decay = 0, .step = k + 1},
                    {.max_norm = 1})
              .loss);
    }
    const std::lock_guard lock(mutex);
    result.losses.insert(result.losses.end(), losses.begin(), losses.end());
    if (trace) result.zeros[rank] = trace->zero(), result.tracks[rank] = trace->take();
  });
  std::vector<std::string> events;
  TraceArgs about = about_trace(step, "run", "of a test");
  about["step"] = 3;
  about["ranks_of_run"] = TraceArgs::array();
  auto first = std::chrono::steady_clock::time_point::max();
  for (const auto& [rank, zero] : result.zeros) first = std::min(first, zero.host);
  for (const auto& [rank, tracks] : result.tracks) {
    const TraceZero& zero = result.zeros[rank];
    const auto later = std::chrono::duration_cast<std::chrono::nanoseconds>(zero.host - first);
    events.push_back(trace_events(rank, "rank", tracks, later.count()));
    about["ranks_of_run"].push_back(
        {{"rank", rank}, {"clock_uncertainty_us", detail::as_microseconds(zero.uncertainty_ns)}});
  }
  if (traced) result.file = nlohmann::json::parse(trace_file(about, events));
  return result;
}
int64_t count(const TracedSteps& steps, SpanKind kind) {
  int64_t n = 0;
  for (const auto& [rank, tracks] : steps.tracks)
    for (const Track& t : tracks)
      n += std::ranges::count_if(t.spans, [&](const TraceSpan& s) { return s.kind == kind; });
  return n;
}

StepConfig small_step(const PipelineParallel& pipeline) {
  ModelConfig config = selftest::Model{"llama", false, DType::fp32, 2, 2}.config();
  config.n_layer = 3;
  StepConfig step = selftest::step_config(config, DType::fp32, 1, Layout{.pipeline = pipeline});
  step.batch.T = 5;
  step.micro_batches = 3;
  return step;
}

}  // namespace

TEST_CASE("a trace on a GPU has every action, with layers and ops unless a CUDA graph hides them", "[trainer][trace]") {
  const StepConfig step = small_step({});
  selftest::Machine graphs = gpu, plain = gpu;
  plain.device.graphs = false;
  const TracedSteps with_graphs = train(step, graphs, true), without = train(step, plain, true);
  REQUIRE(trace_faults(with_graphs.file) == "");
  REQUIRE(trace_faults(without.file) == "");
  REQUIRE(count(with_graphs, SpanKind::action) == 6);
  REQUIRE(count(without, SpanKind::action) == 6);
  REQUIRE(count(with_graphs, SpanKind::layer) < count(without, SpanKind::layer));
  REQUIRE(count(with_graphs, SpanKind::op) < count(without, SpanKind::op));
  REQUIRE(count(without, SpanKind::op) > 100);
  REQUIRE(with_graphs.losses == train(step, graphs, false).losses);
}

TEST_CASE("a trace of stages on GPUs has their messages, and changes no number", "[trainer][pp][trace]") {
  const StepConfig step = small_step({Schedule::zb_h1, 2, 1});
  const TracedSteps traced = train(step, gpu, true);
  REQUIRE(trace_faults(traced.file) == "");
  REQUIRE(traced.tracks.size() == 2);
  REQUIRE(count(traced, SpanKind::transfer) > 0);
  REQUIRE(traced.losses == train(step, gpu, false).losses);
}
