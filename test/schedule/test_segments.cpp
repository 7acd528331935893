// --recompute block:N: segments of blocks that share one kept input. Bit for bit what a step without recomputation
// computes; the inputs that are kept, and what is gathered again, by law.
#include <string>

#include "catch2.h"
#include "helpers.h"
#include "run/plan/planner.h"
#include "schedule/pipeline_layouts.h"

using namespace llmc;
using namespace pipeline_layouts;

namespace {

const auto gpipe = Schedule::gpipe, one_f_one_b = Schedule::one_f_one_b, interleaved = Schedule::interleaved,
           zb_h1 = Schedule::zb_h1, zb_v = Schedule::zb_v;

StepConfig recomputed(StepConfig step, const RecomputeChoice& choice) {
  step.recompute = choice.what;
  step.segment = choice.segment;
  return step;
}
ZeroConfig zero_of(int stage, int shards) {
  ZeroConfig zero{.shards = shards};
  zero.set_stage(stage);
  return zero;
}

}  // namespace

TEST_CASE("recomputing segments changes no bits, in every schedule and layout", "[pp][recompute]") {
  struct Case {
    Model model;
    LayoutCase layout;
    int64_t n_layer, segment;
  };
  const DType fp32 = DType::fp32, bf16 = DType::bf16;
  for (const Case& c : std::vector<Case>{
           {{"gpt2", true, fp32}, {1, gpipe}, 5, 2},
           {{"qwen3", false, bf16}, {1, one_f_one_b, 1, zero_of(3, 2)}, 5, 5},
           {{"llama", false, fp32}, {2, interleaved, 2, zero_of(1, 2)}, 7, 2},
           {{"gpt2", false, bf16, 8, 8}, {2, zb_h1, 1, {}, 2}, 7, 3},
           {{"qwen2", false, fp32}, {2, zb_v, 2}, 9, 2},
           {{"qwen3", false, fp32, 8, 2, 48}, {1, one_f_one_b, 1, zero_of(2, 1), 2, 2}, 4, 3},
           {{"qwen3_moe", false, fp32}, {2, one_f_one_b, 1, zero_of(3, 2)}, 6, 3},
       }) {
    const StepConfig step = step_of(c.model, c.layout, c.n_layer);
    INFO(c.model.family << ", " << to_string(c.layout) << ", segments of " << c.segment);
    const Outcome kept = run(step), found = run(recomputed(step, {Recompute::block, c.segment}));
    REQUIRE(kept.fault == "");
    REQUIRE(found.fault == "");
    REQUIRE(bitwise(found, kept));
  }
}

TEST_CASE("token slices, experts that ranks share, and stashed weights are recomputed in segments", "[pp][recompute]") {
  const auto compare = [](const StepConfig& step, int64_t segment) {
    const Outcome kept = run(step), found = run(recomputed(step, {Recompute::block, segment}));
    REQUIRE(kept.fault == "");
    REQUIRE(found.fault == "");
    REQUIRE(bitwise(found, kept));
  };
  StepConfig sliced = step_of({"qwen3", false, DType::fp32, 8, 2, 48}, {2, one_f_one_b}, 6);
  sliced.layout.pipeline.slices = {20, 16, 12};
  compare(sliced, 2);
  StepConfig experts = step_of({"qwen2_moe", false, DType::fp32, 8, 8}, {1, one_f_one_b, 1, zero_of(1, 2)}, 3);
  experts.layout.expert = expert_parallel(experts.model, 2);
  experts.experts.aux_loss = 0.01;
  compare(experts, 2);
}

TEST_CASE("a stage keeps the input of every segment, and the outputs within one once", "[pp][recompute]") {
  const int64_t n = 9;
  for (const Schedule schedule : {gpipe, one_f_one_b})
    for (const int64_t N : {1, 2, 3, 4, 9}) {
      StepConfig step = step_of({"llama", false, DType::bf16}, {1, schedule}, n);
      step.generates = false;
      const int64_t passes = schedule == gpipe ? step.micro_batches : 1;
      Arena arena({DeviceKind::null});
      arena.alloc("", "", DType::bf16, {step.batch.rows(), step.model.n_embd});
      const Plan blocks = make_plan(recomputed(step, {Recompute::block, 1}), {DeviceKind::cpu, 1}, 0, Passes::step),
                 plan = make_plan(recomputed(step, {Recompute::block, N}), {DeviceKind::cpu, 1}, 0, Passes::step);
      INFO(name_of(schedule) << ", segments of " << N);
      REQUIRE(planned_bytes(blocks, "activations") - planned_bytes(plan, "activations") ==
              passes * (n - ceil_div(n, N)) * arena.used());
      REQUIRE(planned_bytes(plan, "recomputed") - planned_bytes(blocks, "recomputed") == (N - 1) * arena.used());
    }
}

TEST_CASE("stage 3 gathers the blocks within a segment once more", "[pp][recompute]") {
  const auto gathered = [](const RecomputeChoice& choice) {
    const StepConfig step =
        recomputed(step_of({"llama", false, DType::fp32}, {1, one_f_one_b, 1, zero_of(3, 2)}, 7), choice);
    return make_plan(step, {DeviceKind::cpu, 1}, 0, Passes::step).bytes_sent();
  };
  // 7 blocks gathered in each forward and each backward; again 0 + 1 + 1 + 1 of the segments {0, 1} {2, 3} {4, 5} {6},
  // and 6 of a single one.
  const int64_t plain = gathered({Recompute::block}), pairs = gathered({Recompute::block, 2}),
                all = gathered({Recompute::block, 7});
  REQUIRE(plain == gathered({Recompute::none}));
  REQUIRE(pairs > plain);
  REQUIRE(all - plain == 2 * (pairs - plain));
}

TEST_CASE("segments follow the square-root rule, and longer ones than a chunk are refused", "[recompute]") {
  const StepConfig step = step_of({"llama", false, DType::fp32}, {1, one_f_one_b}, 16);
  REQUIRE(std::string(square_root_recomputation(step)) == "block:4");
  StepConfig pipeline = step_of({"llama", false, DType::fp32}, {4, one_f_one_b}, 16);
  REQUIRE(std::string(square_root_recomputation(pipeline)) == "block:4");  // 4 passes of 4 blocks
  for (const auto& [options, message] :
       {std::pair{"--recompute block:13",
                  "--recompute block:13 with 12 blocks in the model: a segment must not be "
                  "longer; the square-root rule gives block:3"},
        {"--recompute block:4 --pp 4 --local-ranks 4", "with 3 blocks in the largest chunk of a stage"},
        {"--recompute block:0", "expected block:N, N the blocks of a segment, from 1"},
        {"--recompute block:2x", "--recompute block:2x: expected block:N"},
        {"--recompute blocks", "expected one of none, activation, norm, block, or block:N"}}) {
    const ProgramResult r = run_program(std::string("--plan --model d12 ") + options);
    INFO(options << ": " << r.err);
    REQUIRE(r.status == 1);
    REQUIRE(r.err.find(message) != std::string::npos);
  }
}

TEST_CASE("where whole blocks recomputed do not fit, segments of them are advised, and searched", "[plan][recompute]") {
  const std::string narrow =
      "--plan --model d6 --n-layer 64 --n-embd 64 --n-head 1 --vocab-size 257 -t 1024 -b 1 --threads 2 --sample-every "
      "0 "
      "--memory-limit 0.07 ";
  const ProgramResult advice = run_program(narrow), followed = run_program(narrow + "--recompute block:8");
  INFO(advice.err << followed.err);
  REQUIRE(advice.status == 1);
  REQUIRE(advice.err.find("it would with --recompute block:8 (") != std::string::npos);
  REQUIRE(followed.status == 0);
  const ProgramResult search =
      run_program("--plan-auto --model qwen2.5:0.5B --ranks 1 --machine h100x8 -t 32768 --memory-limit 14");
  INFO(search.out << search.err);
  REQUIRE(search.status == 0);
  REQUIRE(search.out.find("--recompute block:") != std::string::npos);
}
