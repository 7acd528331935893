// Memory is as planned: layouts drawn at random, to the byte on every rank, and of the process that the program is.
#include <mutex>
#include <regex>
#include <tuple>

#include "catch2.h"
#include "helpers.h"
#include "run/plan/machines.h"
#include "run/ranks.h"
#include "run/selftest/draws.h"
#include "run/selftest/run_layout.h"
#include "train/sample.h"

using namespace llmc;

namespace {

// What a plan has on paper, computed: a step, an evaluation at each length and, if it generates, texts. Returns the
// ranks whose arenas were not used to the last planned byte, in words.
std::string differences(const StepConfig& step, const Plan& plan) {
  const Device device{DeviceKind::cpu, 1};
  World world(step.layout.mesh());
  std::string text;
  std::mutex mutex;
  run_ranks(world, [&](int rank) {
    Run run(step, plan, device, world, rank);
    Trainer& trainer = run.trainer;
    init_weights(trainer.state(), 1, run.stream);
    const auto batches_of = [&](int64_t T) -> BatchSource {
      StepConfig shorter = step;
      shorter.batch.T = T;
      return [&run, shorter](int64_t m) { return selftest::read_batch(shorter, run.groups.reader(), m); };
    };
    trainer.step(batches_of(step.batch.T), selftest::update_options(step.layout.zero.optimizer, 1), {.max_norm = 1});
    for (int64_t T = 1;; T = std::min(2 * T, step.batch.T)) {
      trainer.evaluate(step.layout.pipeline.chunks(), 1, batches_of(T), {}, T);
      if (T == step.batch.T) break;
    }
    if (step.generates) {
      const std::vector<int32_t> tokens(static_cast<size_t>(step.batch.T), 5);
      trainer.next_token_logits(tokens);
      Continuation(trainer).feed(tokens);
    }
    std::lock_guard lock(mutex);
    for (const auto& [what, used, planned] : {std::tuple("arena", run.arena.high_water(), plan.of(rank).arena_bytes),
                                              {"scratch", run.scratch.high_water(), plan.of(rank).scratch_bytes},
                                              {"host", run.host.high_water(), plan.of(rank).host_bytes}})
      if (used != planned) text += formatted("rank {}: {} uses {} bytes, planned {}; ", rank, what, used, planned);
  });
  return text;
}

}  // namespace

TEST_CASE("in a hundred layouts drawn at random, every rank uses its planned memory to the byte",
          "[parallel][plan][selftest]") {
  for (uint64_t n = 0; n < 100; ++n) {
    selftest::Draw d = selftest::draw(n % 4 == 3 ? 8 : 4, 1000 + n);
    d.step.generates = n % 2 == 0;
    INFO(n << ": " << to_string(d));
    Plan plan = make_plan(d.step, {DeviceKind::cpu, 1});
    REQUIRE(differences(d.step, plan) == "");
    if (n > 0) continue;
    plan.arena_bytes += Arena::alignment;  // is noticed
    REQUIRE(differences(d.step, plan).find("rank 0: arena uses ") != std::string::npos);
  }
}

TEST_CASE("a plan that books repeated work without enqueueing it again is the plan that enqueues all of it",
          "[parallel][plan][selftest]") {
  int pipelines = 0;
  for (uint64_t n = 0; n < 60; ++n) {
    const selftest::Draw d = selftest::draw(8, 2000 + n);
    INFO(n << ": " << to_string(d));
    Device device{DeviceKind::cuda};
    device.machine = choose_machine("h100x4", d.step.precision.products, false);
    const Plan repeated = make_plan(d.step, device);
    device.graphs = false;
    const Plan all = make_plan(d.step, device);
    pipelines += d.step.layout.pipeline.stages > 1;
    for (int s = 0; s < d.step.layout.pipeline.stages; ++s) {
      const Plan &a = repeated.of_stage(static_cast<size_t>(s)), &b = all.of_stage(static_cast<size_t>(s));
      REQUIRE(a.step_seconds == b.step_seconds);
      REQUIRE(a.action_seconds == b.action_seconds);
      REQUIRE(a.step_traffic == b.step_traffic);
      REQUIRE(a.total_bytes() == b.total_bytes());
      REQUIRE(a.step_ops.size() == b.step_ops.size());
      for (const auto& [op, totals] : a.step_ops) {
        const OpTotals& others = b.step_ops.at(op);
        REQUIRE((totals.calls == others.calls && totals.flops == others.flops && totals.bytes == others.bytes &&
                 totals.seconds == others.seconds));
      }
    }
  }
  REQUIRE(pipelines > 10);
}

TEST_CASE("a run takes as much memory as planned, but for 3% and 50 MiB", "[parallel][plan]") {
  const TempDir dir;
  const auto bytes = [](const std::string& number, const std::string& unit) {
    return std::stod(number) * (unit == "GiB" ? 1 << 30 : 1 << 20);
  };
  for (const std::string layout :
       {"--vocab-size 257 -t 128 -b 4", "--vocab-size 257 -t 128 -b 4 --dtype bf16 --local-ranks 2 --recompute norm",
        "--vocab-size 8000 -t 32 -b 1 --dtype bf16 --local-ranks 4 --zero-stage 3",
        "--vocab-size 8000 -t 32 -b 1 --local-ranks 4 --tp 2 --cp 2",
        "--vocab-size 257 -t 128 -b 2 --dtype bf16 --local-ranks 4 --pp 4 --schedule gpipe -d 1024"}) {
    const ProgramResult r = run_program(
        "--model d6 --threads 1 --max-steps 1 --sample-every 0 --checkpoint-every 0 --restart -i "
        "test/golden/gpt2_tiny/train.bin -o " +
        (dir / "out ") + layout);
    INFO(layout << ": " << r.out << r.err);
    REQUIRE(r.status == 0);
    std::smatch found;
    REQUIRE(std::regex_search(r.out, found,
                              std::regex(R"(\n  memory +([0-9.]+) ([MG]iB) resident at most, ([0-9.]+) ([MG]iB) pl)")));
    const double resident = bytes(found[1], found[2]), planned = bytes(found[3], found[4]);
    EXPECT(planned > 0x1p26);
    EXPECT(std::abs(resident - planned) < 0.03 * planned + 50.0 * (1 << 20));
  }
}
