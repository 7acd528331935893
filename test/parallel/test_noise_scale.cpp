// The gradient noise scale: a step's estimates against those from the gradients of its small batches, each computed by
// itself, in every layout that has them; the smoothing, and what is refused.
#include <cmath>

#include "run/selftest/run_layout.h"
#include "tiny_run.h"
#include "train/step_statistics.h"

using namespace llmc;

namespace {

const OptimizerOptions still{.lr = 0, .beta1 = 0.9f, .beta2 = 0.9f, .eps = 1, .weight_decay = 0, .step = 1};

// Of a step of 4 readers x 2 micro-batches of 2 sequences.
HostBatch batch_of(StepConfig step, int64_t number) {
  step.layout = {};  // numbered from one reader to the next
  return selftest::read_batch(step, 0, number);
}

using Gradients = std::map<std::string, std::vector<double>>;

// Of one rank: the gradient of the sum of these micro-batches' losses over the tokens of `whole`, in double.
Gradients gradients_of(const StepConfig& whole, int64_t first, int64_t count) {
  StepConfig step{.model = whole.model, .batch = whole.batch, .micro_batches = count};
  Gradients all;
  World world(step.layout.mesh(), Backend::threads, no_hooks);
  run_ranks(world, [&](int rank) {
    Run run(step, make_plan(step, {}), {}, world, rank);
    selftest::init_drawn(step, run.trainer.state(), run.stream);
    run.trainer.accumulate_gradients([&](int64_t m) { return batch_of(step, first + m); });
    run.stream.synchronize();
    const double share = static_cast<double>(step.tokens()) / static_cast<double>(whole.tokens());
    for (const StateEntry& e : run.trainer.state().gradient_table())
      for (int64_t i = 0; i < e.tensor.numel(); ++i)
        all[e.param->name].push_back(share * static_cast<double>(e.tensor.data<float>()[i]));
  });
  return all;
}
// norms: with those of the parameters that every rank of --tp has, and sees only some rows of
double square_of(const Gradients& gradients, bool norms) {
  double sum = 0;
  for (const auto& [name, values] : gradients)
    if (norms || name.find("ln") == name.npos)
      for (const double g : values) sum += g * g;
  return sum;
}

}  // namespace

TEST_CASE("the noise of a step is estimated from the gradients of its small batches, in every layout",
          "[parallel][noise]") {
  struct Case {
    int stage, replicas, tensor, stages;
    GradReduce reduce;
    bool tied = false;
  };
  for (const Case& c : {Case{0, 1, 1, 1, GradReduce::step}, Case{1, 2, 1, 1, GradReduce::step},
                        Case{3, 1, 1, 1, GradReduce::micro, true}, Case{0, 1, 2, 1, GradReduce::step},
                        Case{2, 1, 2, 1, GradReduce::micro}, Case{1, 1, 1, 2, GradReduce::step}}) {
    INFO("stage " << c.stage << ", replicas " << c.replicas << ", tp " << c.tensor << ", pp " << c.stages);
    StepConfig step{.model = selftest::awkward_model("llama", c.tied), .batch = {2, 12}, .micro_batches = 2};
    step.noise_scale = true;
    step.layout.zero.replicas = c.replicas;
    step.layout.zero.shards = 4 / c.replicas;
    step.layout.zero.stage = c.stage;
    step.layout.zero.grad_reduce = c.reduce;
    step.layout.tensor = tensor_parallel(step.model, c.tensor);
    step.layout.pipeline.stages = c.stages;
    const int64_t batches = small_batches(step), each = 8 / batches;
    REQUIRE(batches == (c.reduce == GradReduce::micro ? 8 : 4));

    double local = 0;
    Gradients all;
    for (int64_t k = 0; k < batches; ++k) {
      const Gradients small = gradients_of(step, k * each, each);
      local += square_of(small, c.tensor == 1);
      for (const auto& [name, values] : small) {
        all[name].resize(values.size());
        for (size_t i = 0; i < values.size(); ++i) all[name][i] += values[i];
      }
    }
    const double square = square_of(all, c.tensor == 1), tokens = static_cast<double>(step.tokens());
    // B_small = tokens / K, and the gradient of a small batch's own mean is K times as large (McCandlish et al., A.1).
    const double K = static_cast<double>(batches), small = tokens / K, of_small = K * local;
    const double expected_square = (tokens * square - small * of_small) / (tokens - small),
                 expected_trace = (of_small - square) / (1 / small - 1 / tokens);
    World world(step.layout.mesh(), Backend::threads, no_hooks);
    run_ranks(world, [&](int rank) {
      Run run(step, make_plan(step, {}, rank), {}, world, rank);
      selftest::init_drawn(step, run.trainer.state(), run.stream);
      for (int twice = 0; twice < 2; ++twice) {
        const StepResult r = run.trainer.step([&](int64_t m) { return batch_of(step, run.groups.reader() * 2 + m); },
                                              still, {.max_norm = 1e-3});
        REQUIRE(r.noise);
        REQUIRE(std::abs(r.noise->square - expected_square) < 1e-4 * of_small);
        REQUIRE(std::abs(r.noise->trace - expected_trace) < 1e-4 * expected_trace);
      }
    });
  }
}

TEST_CASE(
    "--noise-scale is in metrics.jsonl, changes nothing, goes on after a resume, and is refused where there is none",
    "[parallel][noise]") {
  const TempDir dir;
  const std::string two = "--local-ranks 2 --lr-schedule constant --max-steps 4 ", noise = two + "--noise-scale ";
  run_well(tiny(dir / "whole", noise));
  run_well(tiny(dir / "plain", two));
  run_well(tiny(dir / "cut", noise + "--max-steps 2"));
  run_well(tiny(dir / "cut", noise));
  REQUIRE(losses(dir / "whole") == losses(dir / "plain"));
  const auto scales = metric(dir / "whole", "train", "noise_scale"),
             squares = metric(dir / "whole", "train", "noise_square"),
             traces = metric(dir / "whole", "train", "noise_trace");
  REQUIRE(scales == metric(dir / "cut", "train", "noise_scale"));
  double square = 0, trace = 0;
  for (int64_t step = 1; step <= 4; ++step) {
    square = 0.99 * square + 0.01 * squares.at(step), trace = 0.99 * trace + 0.01 * traces.at(step);
    REQUIRE(square > 0);  // the first gradients of a model point the same way
    REQUIRE(std::abs(scales.at(step) / (trace / square) - 1) < 1e-9);
  }
  REQUIRE(read_whole(dir / "plain/metrics.jsonl").find("noise") == std::string::npos);
  for (const auto& [options, why] : {std::pair{"", "--noise-scale: it compares the gradients of data-parallel ranks"},
                                     {"--seq-len 32 --total-batch-size 256 --local-ranks 2 --cp 2", "ranks of --cp 2"},
                                     {"--n-layer 2 --local-ranks 4 --pp 2", "a tied embedding"}})
    refused(tiny(dir / "refused", formatted("--noise-scale --max-steps 1 {}", options)), why);
}
