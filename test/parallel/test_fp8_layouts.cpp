// Layouts of every kind of products in fp8: the same bits where only the order of work or the place of state differs
// (contracts 3, 4, 11), and within contract 5 of one rank where sums are divided, with the distance between fp8 and
// bf16 in the place of that between bf16 and fp32.
#include "catch2.h"
#include "expert_steps.h"
#include "parallel/layout_bugs.h"

using namespace llmc;

namespace {

using expert_steps::LayoutCase;

const std::vector<Operands> kinds = {Operands::fp8_block, Operands::fp8, Operands::mxfp8, Operands::fp8_tensor};
// Blocks whose heads and channels two ranks can divide into whole blocks of 128, or one rank has as many. Channels of
// the residual stream are no whole block.
ModelConfig small_model(const char* family, int64_t T, int64_t layers, int ranks) {
  ModelConfig m = selftest::awkward_model(family, false);
  m.n_layer = layers;
  m.n_head = m.n_kv_head = 2 * ranks;
  m.head_size = 64;
  m.n_embd = 80;
  m.n_ffn = 128 * ranks;
  if (m.experts.count > 0) m.experts.count = 4, m.experts.width = 48;
  m.vocab_size = 97;
  m.n_positions = T;
  return m;
}

StepConfig step_of(const ModelConfig& model, const LayoutCase& layout, Operands read) {
  const int64_t T = model.n_positions;
  StepConfig step = expert_steps::step_of(model, layout, {.aux_loss = model.experts.count > 0 ? 0.1 : 0}, DType::bf16,
                                          {1, T}, (T > 128 ? 2 : 4) / layout.dp);
  step.layout.zero.grad_reduce = GradReduce::step;
  if (layout.schedule == Schedule::interleaved) step.layout.pipeline.chunks_per_stage = 2;
  step.precision.linear = read;
  return step;
}

selftest::Outcome outcome_of(const StepConfig& step) {
  selftest::Outcome outcome = selftest::run_layout(step);
  REQUIRE(outcome.fault == "");
  return outcome;
}
void require_same(const StepConfig& step, const selftest::Outcome& first, const LayoutCase& layout) {
  INFO(expert_steps::to_string(layout));
  const selftest::Outcome outcome = outcome_of(step);
  REQUIRE(outcome.same_bits(first));
  REQUIRE(outcome.gradients == first.gradients);
}

// Weights as the self-test has them, but a block's last matrices are 0.
template <int block>
struct Silenced {
  static void init(const StepConfig& step, const ModelState& state, Stream& stream) {
    selftest::init_routes_by_token(step, state, stream);
    for (const StateEntry& e : state.state_table()) {
      const bool last = e.param->name.ends_with("proj.weight") || e.param->name.ends_with("down.weight");
      if (last && e.param->name.starts_with(formatted("blocks.{}.", block)) &&
          (e.kind == StateKind::weight || e.kind == StateKind::master))
        zero(e.tensor, stream);
    }
    stream.synchronize();
  }
};

}  // namespace

TEST_CASE("every kind of fp8 gives the same bits with every schedule and recomputation, and every stage of ZeRO",
          "[parallel][fp8]") {
  const ModelConfig model = small_model("qwen3_moe", 128, 4, 1);  // the second block has no experts
  const size_t kind = GENERATE(0u, 1u, 2u, 3u);
  const Operands read = kinds[kind];
  const selftest::Outcome one = outcome_of(step_of(model, {}, read));
  REQUIRE_FALSE(one.same_bits(outcome_of(step_of(model, {}, Operands::as_stored))));
  std::vector<LayoutCase> like_one;
  for (const Recompute recompute : {Recompute::activation, Recompute::norm, Recompute::block})
    like_one.push_back({.recompute = recompute});
  for (const Schedule schedule :
       {Schedule::gpipe, Schedule::one_f_one_b, Schedule::interleaved, Schedule::zb_h1, Schedule::zb_v})
    like_one.push_back({.pp = 2, .schedule = schedule});
  like_one.push_back({.pp = 2, .schedule = Schedule::zb_h1, .recompute = Recompute::block});
  for (const LayoutCase& layout : like_one) require_same(step_of(model, layout, read), one, layout);

  const selftest::Outcome two = outcome_of(step_of(model, {.dp = 2}, read));
  for (const int stage : {1, 2, 3}) {
    const LayoutCase layout{.dp = 2, .stage = stage};
    StepConfig step = step_of(model, layout, read);
    require_same(step, two, layout);
    if (stage < 3 || read == Operands::mxfp8 || read == Operands::fp8_tensor) continue;
    step.precision.gathers_fp8 = true;
    require_same(step, two, layout);
  }
}

TEST_CASE("layouts of every kind of fp8 agree with one rank as those of bf16 do", "[parallel][fp8]") {
  const size_t kind = GENERATE(0u, 1u, 2u, 3u);
  const Operands read = kinds[kind];
  const auto agree = [&](const char* family, int64_t T, const std::vector<StepConfig>& steps) {
    const selftest::Reference reference(step_of(small_model(family, T, 2, 2), {}, read), {});
    REQUIRE(reference.farther.gradients > 0x1p-7);  // fp8's distance from bf16, not the floor of bf16
    for (const StepConfig& step : steps) {
      const selftest::Comparison c = selftest::compare(reference, step, {}, {});
      INFO(selftest::to_string(step.layout) << " | " << c.distances.text() << " | " << c.verdict());
      INFO("allowed: " << reference.allowed(step.layout, {}).text());
      REQUIRE(c.good());
    }
    return reference;
  };
  const ModelConfig dense = small_model("qwen3", 128, 2, 2), longer = small_model("qwen3", 512, 2, 2),
                    sparse = small_model("qwen3_moe", 128, 2, 2);
  if (read == Operands::fp8_tensor) {  // for data-parallel ranks alone
    agree("qwen3", 128, {step_of(dense, {.dp = 2}, read), step_of(dense, {.dp = 2, .stage = 3}, read)});
    return;
  }
  std::vector<StepConfig> parts = {step_of(dense, {.dp = 2}, read), step_of(dense, {.tp = 2}, read),
                                   step_of(dense, {.tp = 2}, read),
                                   step_of(dense, {.dp = 2, .stage = 3, .tp = 2}, read)};
  parts[2].layout.tensor = tensor_parallel(dense, 2, false);
  parts[3].layout.tensor.overlap = true;
  const selftest::Reference reference = agree("qwen3", 128, parts);

  std::vector<StepConfig> of_sequences;
  for (const ContextAttention attention : all_values<ContextAttention>()) {
    of_sequences.push_back(step_of(longer, {.cp = 2}, read));
    of_sequences.back().layout.context.attention = attention;
  }
  agree("qwen3", 512, of_sequences);
  agree("qwen3_moe", 128, {step_of(sparse, {.dp = 2, .ep = 2}, read), step_of(sparse, {.dp = 2, .stage = 3}, read)});

  // These bounds still see what is wrong.
  const layout_bugs::Replaces<layout_bugs::SkippedReduction> skipped;
  const selftest::Parts bugs[] = {{.hooks = skipped}, {.read = layout_bugs::read_as_rank_0}};
  for (const selftest::Parts& bug : bugs) REQUIRE_FALSE(selftest::compare(reference, parts[0], {}, bug).good());
}

TEST_CASE("blocks that --fp8-skip names compute as in bf16, bit for bit", "[parallel][fp8]") {
  // One of two blocks adds nothing to the residual stream and lets no gradient through: the other one, and all that is
  // in no block, then has the gradients of the model without it, and of bf16 if it is skipped.
  const ModelConfig model = [] {
    ModelConfig m = small_model("qwen3_moe", 128, 2, 1);
    m.experts.dense_layers = {};
    m.experts.shared = 0;
    return m;
  }();
  const auto gradients_of = [&](const SkippedBlocks& skip, Operands read, auto silenced, int stage) {
    StepConfig step = step_of(model, {.dp = 2, .stage = stage}, read);
    step.precision.fp8_skip = skip;
    step.precision.gathers_fp8 = stage == 3;
    selftest::Parts parts;
    parts.init = decltype(silenced)::init;
    const selftest::Outcome outcome = selftest::run_layout(step, {}, parts, 1);
    REQUIRE(outcome.fault == "");
    return outcome.gradients;
  };
  const auto check = [&](const SkippedBlocks& skip, const std::string& skipped, const std::string& silent, auto tag) {
    const auto bf16 = gradients_of({}, Operands::as_stored, tag, 0);
    for (const int stage : {0, 3}) {
      const auto all_fp8 = gradients_of({}, Operands::fp8_block, tag, stage),
                 found = gradients_of(skip, Operands::fp8_block, tag, stage);
      INFO("skipped " << skipped << ", stage " << stage);
      int64_t same = 0, other = 0, fp8 = 0;
      for (const auto& [name, gradient] : found) {
        if (name.starts_with(silent)) continue;
        same += gradient == bf16.at(name);
        other += !(gradient == bf16.at(name));
        fp8 += name.starts_with(skipped) && !(all_fp8.at(name) == bf16.at(name));
      }
      REQUIRE(other == 0);
      REQUIRE(same > 10);
      REQUIRE(fp8 > 10);  // which they would not be in fp8
      REQUIRE_FALSE(found.at(silent + ".attn.proj.weight") == bf16.at(silent + ".attn.proj.weight"));
    }
  };
  check({1, 0}, "blocks.0", "blocks.1", Silenced<1>{});
  check({0, 1}, "blocks.1", "blocks.0", Silenced<0>{});
}

TEST_CASE(
    "with --fp8-skip layouts give the same bits, and plans have the weights and products in fp8 of the other blocks",
    "[parallel][fp8]") {
  const ModelConfig model = small_model("qwen3", 128, 4, 1);
  const auto step = [&](const LayoutCase& layout, const SkippedBlocks& skip) {
    StepConfig s = step_of(model, layout, Operands::fp8_block);
    s.precision.fp8_skip = skip;
    return s;
  };
  const selftest::Outcome one = outcome_of(step({}, {1, 2})), none = outcome_of(step({}, {2, 2}));
  REQUIRE(none.same_bits(outcome_of(step_of(model, {}, Operands::as_stored))));
  REQUIRE_FALSE(none.same_bits(one));
  for (const LayoutCase& layout :
       {LayoutCase{.recompute = Recompute::block}, LayoutCase{.pp = 2, .schedule = Schedule::zb_v}})
    require_same(step(layout, {1, 2}), one, layout);
  const selftest::Outcome two = outcome_of(step({.dp = 2}, {1, 2}));
  for (const bool gathers_fp8 : {false, true}) {
    StepConfig three = step({.dp = 2, .stage = 3}, {1, 2});
    three.precision.gathers_fp8 = gathers_fp8;
    require_same(three, two, {.dp = 2, .stage = 3});
  }
  StepConfig all_skipped = step({.dp = 2, .stage = 3}, {0, 4});
  all_skipped.precision.gathers_fp8 = true;  // and so there is nothing to gather in fp8
  outcome_of(all_skipped);

  const auto planned = [&](const SkippedBlocks& skip) {
    Device gpu = Device{.kind = DeviceKind::cuda}.on_paper();
    // Where inputs are recomputed, a GPU keeps none of them in fp8, which it does without skipped blocks alone.
    const Plan plan = make_plan(step({.recompute = Recompute::norm}, skip), gpu);
    int64_t weights = 0, quantised = 0;
    for (const MemoryLine& line : plan.memory)
      if (line.label == "weights in fp8") weights += line.bytes;
    for (const auto& [name, totals] : plan.step_ops)
      if (name == std::string("quantise")) quantised += totals.calls;
    return std::pair{weights, quantised};
  };
  const auto [weights, quantised] = planned({});
  REQUIRE((weights > 0 && quantised > 0));
  REQUIRE(planned({1, 2}) == std::pair{weights / 4, quantised / 4});
  REQUIRE(planned({2, 2}) == std::pair<int64_t, int64_t>{0, 0});
}
