// --z-loss: against finite differences of a whole model's loss, in every layout, and what is reported.
#include <cmath>

#include "run/selftest/run_layout.h"
#include "tiny_run.h"

using namespace llmc;

namespace {

std::string z_run(const std::string& out, const std::string& more) {
  return tiny(
      out, "--model d2 --n-layer 2 --n-embd 24 --n-head 2 --seq-len 32 --total-batch-size 256 --max-steps 4 " + more);
}

// A step in fp32, of one rank.
StepConfig small_step(double z_loss) {
  StepConfig step{.model = selftest::awkward_model("llama", false), .batch = {2, 12}, .micro_batches = 2};
  step.z_loss = z_loss;
  return step;
}

}  // namespace

TEST_CASE("the gradient of --z-loss is that of the mean of its squares, and the loss is reported without it",
          "[train][z-loss]") {
  constexpr double coefficient = 0.7;
  const StepConfig with = small_step(coefficient);
  const Plan plan = make_plan(with, {});
  World world(with.layout.mesh(), Backend::threads, no_hooks);
  run_ranks(world, [&](int rank) {
    Run run(with, plan, {}, world, rank), plain(small_step(0), make_plan(small_step(0), {}), {}, world, rank);
    for (Run* r : {&run, &plain}) selftest::init_drawn(with, r->trainer.state(), r->stream);
    const BatchSource batches = [&](int64_t m) { return selftest::read_batch(with, 0, m); };
    // Without an update: the learning rate is 0.
    const OptimizerOptions still{.lr = 0, .beta1 = 0.9f, .beta2 = 0.9f, .eps = 1, .weight_decay = 0, .step = 1};
    const StepResult result = run.trainer.step(batches, still, {});
    REQUIRE(result.z_loss);
    REQUIRE(*result.z_loss > 0);
    const StepResult without = plain.trainer.step(batches, still, {});
    REQUIRE(result.loss == without.loss);
    REQUIRE_FALSE(without.z_loss);
    REQUIRE(result.grad_norm != without.grad_norm);
    // The loss without z-loss is what validation reports.
    const int64_t targets = with.tokens();
    REQUIRE(std::abs(run.trainer.evaluate(2, targets, batches) - without.loss) < 1e-6 * without.loss);

    // Along the gradient g of loss + coefficient z, a small step changes that sum by h |g|^2.
    run.trainer.accumulate_gradients(batches);
    run.stream.synchronize();
    std::map<std::string, std::vector<float>> gradients;
    double square = 0;
    for (const StateEntry& e : run.trainer.state().gradient_table()) {
      std::vector<float>& g = gradients[e.param->name];
      g.assign(e.tensor.data<float>(), e.tensor.data<float>() + e.tensor.numel());
      for (const float x : g) square += static_cast<double>(x) * x;
    }
    const auto at = [&](double h) {
      for (const StateEntry& e : run.trainer.state().state_table())
        if (e.kind == StateKind::weight)
          for (int64_t i = 0; i < e.tensor.numel(); ++i)
            e.tensor.data<float>()[i] += static_cast<float>(h * gradients[e.param->name][static_cast<size_t>(i)]);
      const StepResult r = run.trainer.step(batches, still, {});
      return r.loss + coefficient * *r.z_loss;
    };
    const double h = 1e-2 / std::sqrt(square);  // moves the weights by a hundredth in all
    const double above = at(h), below = at(-2 * h);
    at(h);
    // The third derivative adds a share of about (1e-2)^2; fp32 adds rounding of 1e-7 of a loss of about 10 to 2 h
    // |g|^2.
    INFO((above - below) / (2 * h) << " against " << square);
    REQUIRE(std::abs((above - below) / (2 * h) / square - 1) < 2e-3);
  });
}

TEST_CASE("--z-loss is the same in every layout, is reported, and resumes bit for bit", "[train][z-loss]") {
  const TempDir dir;
  const std::string z = "--z-loss 0.1 ";
  run_well(z_run(dir / "one", z));
  run_well(z_run(dir / "none", ""));
  const auto expected = losses(dir / "one"), without = losses(dir / "none"),
             squares = metric(dir / "one", "train", "z_loss");
  REQUIRE(expected.at(1) == without.at(1));
  REQUIRE(expected.at(4) != without.at(4));
  REQUIRE(read_whole(dir / "none/metrics.jsonl").find("z_loss") == std::string::npos);
  REQUIRE(squares.size() == 4);
  // The logits of initial weights are small: Z is about the vocabulary.
  REQUIRE(std::abs(std::sqrt(squares.at(1)) / std::log(211) - 1) < 0.02);
  REQUIRE(squares.at(4) < squares.at(1));
  for (const char* layout :
       {"--local-ranks 2 --zero-stage 3", "--local-ranks 2 --zero-stage 2 --dp-replicate 2", "--local-ranks 2 --tp 2",
        "--local-ranks 2 --cp 2", "--local-ranks 2 --pp 2 --schedule zb-h1", "--local-ranks 4 --tp 2 --pp 2",
        "--local-ranks 2 --dp-sync parameter-server", "--head-chunks 3"}) {
    INFO(layout);
    std::filesystem::remove_all(dir / "run");
    run_well(z_run(dir / "run", z + layout));
    for (const auto& [step, loss] : losses(dir / "run")) REQUIRE(std::abs(loss / expected.at(step) - 1) < 1e-5);
    for (const auto& [step, square] : metric(dir / "run", "train", "z_loss"))
      REQUIRE(std::abs(square / squares.at(step) - 1) < 1e-5);
  }
  const std::string constant = "--lr-schedule constant ";
  run_well(z_run(dir / "whole", z + constant));
  run_well(z_run(dir / "cut", z + constant + "--max-steps 2"));
  run_well(z_run(dir / "cut", z + constant));
  REQUIRE(state_of(dir / "cut/step-000004") == state_of(dir / "whole/step-000004"));
  REQUIRE(metric(dir / "cut", "train", "z_loss") == metric(dir / "whole", "train", "z_loss"));
  refused(z_run(dir / "cut", constant + "--max-steps 6"), "--z-loss was '0.1' and is now '0'");
}
