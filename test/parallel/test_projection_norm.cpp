// The query-key norm of whole projections over tensor-parallel ranks, each of which has some of its heads.
#include "catch2.h"
#include "helpers.h"
#include "parallel/tensor_bugs.h"
#include "run/selftest/selftest.h"

using namespace llmc;

namespace {

// A dense model with this norm.
StepConfig step_of(QkNorm norm, int64_t kv_heads, int tp, bool sequence, DType dtype = DType::fp32) {
  ModelConfig model = selftest::Model{"qwen3", true, dtype, 8, kv_heads}.config();
  model.family.qk_norm = norm;
  return selftest::step_config(model, dtype, 3, Layout{{}, tensor_parallel(model, tp, sequence)});
}

constexpr std::string_view sums = "sums over the heads of all ranks";

}  // namespace

TEST_CASE("tensor-parallel ranks norm whole projections as one rank does", "[parallel][tp]") {
  for (const int64_t kv_heads : {8, 2}) {
    const selftest::Outcome alone = selftest::run_layout(step_of(QkNorm::by_projection, kv_heads, 1, true));
    REQUIRE(alone.fault == "");
    for (const int tp : {2, 4})
      for (const bool sequence : {true, false}) {
        INFO(kv_heads << " key-value heads, tp " << tp << ", by rows " << sequence);
        StepConfig step = step_of(QkNorm::by_projection, kv_heads, tp, sequence);
        selftest::Outcome first;
        for (const Recompute recompute : all_values<Recompute>()) {
          step.recompute = recompute;
          step.layout.tensor.overlap = recompute == Recompute::norm;
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

TEST_CASE("the norm of whole projections agrees with one rank in pipelines, over slices of sequences, and in bf16",
          "[parallel][tp]") {
  for (const DType dtype : {DType::fp32, DType::bf16}) {
    const auto run = [](DType d, int tp, int cp, Schedule schedule, int stages, int chunks) {
      ModelConfig model = selftest::Model{"qwen3", true, d, 8, 2, 48, 4}.config();
      model.family.qk_norm = QkNorm::by_projection;
      const TensorParallel tensor = tensor_parallel(model, tp);
      const ContextParallel context = cp == 1 ? ContextParallel{} : ContextParallel{cp};
      return selftest::run_layout(
          selftest::step_config(model, d, 3,
                                {{.stage = 3, .shards = cp}, tensor, context, {}, {schedule, stages, chunks}}),
          {}, {.hooks = poison_hooks});
    };
    const selftest::Outcome alone = run(dtype, 1, 1, Schedule::one_f_one_b, 1, 1);
    const selftest::Distances rounding(alone, run(DType::fp32, 1, 1, Schedule::one_f_one_b, 1, 1));
    for (const selftest::Outcome& outcome :
         {run(dtype, 2, 2, Schedule::one_f_one_b, 1, 1), run(dtype, 4, 1, Schedule::zb_h1, 2, 1),
          run(dtype, 2, 1, Schedule::zb_v, 2, 2)}) {
      REQUIRE(outcome.fault == "");
      const selftest::Distances d(outcome, alone);
      REQUIRE(d.loss < std::max(1e-6, 2 * rounding.loss));
      REQUIRE(d.gradients < std::max(1e-5, 2 * rounding.gradients));
      REQUIRE(d.weights < std::max(1e-5, 2 * rounding.weights));
    }
  }
}

TEST_CASE("the norm of whole projections over ranks costs two numbers a row in each direction", "[parallel][tp]") {
  for (const int tp : {2, 4})
    for (const Recompute recompute : all_values<Recompute>()) {
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

TEST_CASE("sums over the heads that do not arrive, and key gradients of copies that are not added, are found",
          "[parallel][tp]") {
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
