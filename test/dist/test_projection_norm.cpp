// The query-key norm of whole projections over tensor-parallel ranks, which each have some of its heads.
#include "catch2.h"
#include "dist/tensor_bugs.h"
#include "helpers.h"
#include "run/selftest.h"

using namespace llmc;

namespace {

// A dense model with this norm.
StepConfig step_of(QkNorm norm, int64_t kv_heads, int tp, bool sequence, DType dtype = DType::fp32) {
  ModelConfig model = selftest::Model{"qwen3", true, dtype, 8, kv_heads}.config();
  model.family.qk_norm = norm;
  return selftest::step_config(model, dtype, 3, selftest::Layout{{}, tensor_parallel(model, tp, sequence)});
}

constexpr std::string_view sums = "sums over the heads of all ranks";

}  // namespace

TEST_CASE("tensor-parallel ranks norm whole projections as one rank does") {
  for (const int64_t kv_heads : {8, 2}) {
    const selftest::Outcome alone = selftest::run_layout(step_of(QkNorm::by_projection, kv_heads, 1, true));
    REQUIRE(alone.fault == "");
    for (const int tp : {2, 4})
      for (const bool sequence : {true, false}) {
        INFO(kv_heads << " key-value heads, tp " << tp << ", by rows " << sequence);
        StepConfig step = step_of(QkNorm::by_projection, kv_heads, tp, sequence);
        selftest::Outcome first;
        for (const Recompute recompute : all_recompute) {
          step.recompute = recompute;
          step.tensor.overlap = recompute == Recompute::norm;
          const selftest::Outcome outcome = selftest::run_layout(step, {}, {.hooks = poison_hooks});
          REQUIRE(outcome.fault == "");
          if (recompute == Recompute::none) {
            const selftest::Distances d(outcome, alone);
            REQUIRE((d.loss < 1e-6 && d.norm < 1e-5 && d.gradients < 1e-5 && d.weights < 1e-5));
            first = outcome;
          }
          REQUIRE(outcome.losses == first.losses);
          REQUIRE(outcome.weights == first.weights);
        }
      }
  }
}

TEST_CASE("the norm of whole projections over ranks costs two numbers a row in each direction") {
  for (const int tp : {2, 4})
    for (const Recompute recompute : all_recompute) {
      int64_t sent[2];
      for (const QkNorm norm : {QkNorm::by_head, QkNorm::by_projection}) {
        StepConfig step = step_of(norm, 2, tp, true, DType::bf16);
        step.recompute = recompute;
        for (const auto& [group, bytes] : make_plan(step, {DeviceKind::cpu, 1}).step_traffic)
          if (group == "activations") sent[norm == QkNorm::by_projection] = bytes;
      }
      const StepConfig step = step_of(QkNorm::by_projection, 2, tp, true);
      const int64_t times = recompute >= Recompute::norm ? 3 : 2;
      REQUIRE(sent[1] - sent[0] ==
              step.micro_batches * step.model.n_layer * times * 2 * (tp - 1) * 4 * step.batch.rows());
    }
}

TEST_CASE("sums over the heads that do not arrive, and key gradients of copies that are not added, are found") {
  using namespace tensor_bugs;
  const layout_bugs::Replaces<Skips<sums>> stale_sums;
  const layout_bugs::Replaces<SkipsSum<head_gradients>> copies;
  const selftest::Outcome alone = selftest::run_layout(step_of(QkNorm::by_projection, 2, 1, true));
  for (const Hooks* hooks : std::initializer_list<const Hooks*>{&stale_sums, &copies}) {
    const auto outcome = selftest::run_layout(step_of(QkNorm::by_projection, 2, 4, true), {}, {.hooks = *hooks});
    const selftest::Distances d(outcome, alone);
    REQUIRE_FALSE((outcome.fault == "" && d.loss < 1e-6 && d.gradients < 1e-5));
  }
}
