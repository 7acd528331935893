// Pipelines against one stage (contract 4): training steps of every schedule, alone and with the other axes; the rest
// of a step. Planted bugs are in test_pipeline_bugs.cpp.
#include <cmath>
#include <limits>
#include <mutex>

#include "helpers.h"
#include "schedule/pipeline_layouts.h"
#include "train/choices.h"
#include "train/not_finite.h"
#include "train/sample.h"

using namespace pipeline_layouts;
using llmc::name_of;

namespace {

constexpr Schedule gpipe = Schedule::gpipe, one_f_one_b = Schedule::one_f_one_b, interleaved = Schedule::interleaved;

// Every one of these layouts against the same one on one stage.
void compare(const Model& model, int64_t n_layer, const std::vector<LayoutCase>& layouts, int64_t batch_size = 2) {
  std::map<std::string, Outcome> on_one;
  for (const LayoutCase& layout : layouts) {
    const LayoutCase one = on_one_stage(layout);
    const auto [known, fresh] = on_one.try_emplace(to_string(one));
    if (fresh) known->second = run(step_of(model, one, n_layer, batch_size));
    INFO(model.family << (model.tied ? ", tied, " : ", untied, ") << name_of(model.dtype) << ", " << n_layer
                      << " layers, " << to_string(layout) << ", micro-batches of " << batch_size);
    require_agrees(run(step_of(model, layout, n_layer, batch_size)), known->second, model.tied, model.dtype);
  }
}

}  // namespace

TEST_CASE("every schedule computes bitwise what one stage does, whether the layers divide or not", "[pp]") {
  const DType dtype = GENERATE(DType::fp32, DType::bf16);
  const std::vector<LayoutCase> layouts = {{2, gpipe},       {2, one_f_one_b}, {2, interleaved, 2}, {2, interleaved, 3},
                                           {3, one_f_one_b}, {3, gpipe},       {3, interleaved, 2}, {4, one_f_one_b}};
  compare({"gpt2", false, dtype, 8, 8}, 7, layouts);
  compare({"qwen3", true, dtype, 8, 2}, 6, layouts);
}

TEST_CASE("every schedule on up to 8 stages of every family is one stage", "[pp][long]") {
  for (const DType dtype : {DType::fp32, DType::bf16})
    for (const bool tied : {false, true})
      for (const char* family : {"gpt2", "llama", "qwen2", "qwen3"}) {
        std::vector<LayoutCase> layouts;
        for (const int pp : {2, 3, 4, 8}) {
          layouts.push_back({pp, gpipe});
          layouts.push_back({pp, one_f_one_b});
          for (const int chunks : {2, 3})
            if (pp * chunks <= 13) layouts.push_back({pp, interleaved, chunks});
        }
        compare({family, tied, dtype, 8, 8}, 13, layouts);
      }
}

TEST_CASE("a pipeline may have fewer micro-batches than stages", "[pp]") {
  const std::vector<LayoutCase> layouts = {{4, gpipe}, {4, one_f_one_b}, {3, interleaved, 2}};
  compare({"llama", false, DType::fp32, 6, 3}, 7, layouts, 12);  // one micro-batch
  compare({"llama", true, DType::fp32, 6, 3}, 7, layouts, 6);
}

TEST_CASE("pipelines of data-parallel ranks compute bitwise what one stage of them does", "[pp]") {
  for (const DType dtype : {DType::fp32, DType::bf16})
    for (const GradReduce reduce : {GradReduce::step, GradReduce::micro}) {
      std::vector<LayoutCase> layouts;
      for (const int stage : {0, 1, 2, 3}) {
        const ZeroConfig zero{.stage = stage, .grad_reduce = reduce, .shards = 2};
        layouts.push_back({2, stage % 2 == 0 ? one_f_one_b : gpipe, 1, zero});
        layouts.push_back({2, interleaved, 2, zero});
      }
      layouts.push_back({2, one_f_one_b, 1, {.stage = 3, .grad_reduce = reduce, .shards = 2, .replicas = 2}});
      compare({"qwen3", dtype == DType::fp32 && reduce == GradReduce::micro, dtype, 8, 2}, 5, layouts, 1);
    }
}

TEST_CASE("pipelines of tensor- and context-parallel ranks compute bitwise what one stage of them does", "[pp]") {
  const auto [tied, dtype] = GENERATE(std::pair{false, DType::fp32}, std::pair{true, DType::bf16});
  std::vector<LayoutCase> layouts = {{2, one_f_one_b, 1, {}, 2},
                                     {2, interleaved, 2, {.stage = 3, .shards = 2}, 2},
                                     {2, gpipe, 1, {.stage = 1, .shards = 2}, 2, 1, ContextAttention::ring, false}};
  compare({"llama", tied, dtype, 8, 4}, 5, layouts, 3);
  layouts.clear();
  for (const ContextAttention attention : all_values<ContextAttention>())
    layouts.push_back({2, one_f_one_b, 1, {}, 1, 2, attention});
  layouts.push_back({3, interleaved, 2, {.stage = 3}, 1, 2});
  layouts.push_back({2, one_f_one_b, 1, {.stage = 2, .grad_reduce = GradReduce::micro, .shards = 2}, 2, 2});
  compare({"qwen3", tied, dtype, 8, 2, 48}, 6, layouts, 1);
}

TEST_CASE("recomputation, and a head in parts, change no bits of a pipeline", "[pp]") {
  const Model model{"qwen2", false, DType::bf16, 8, 2};
  const Outcome alone = run(step_of(model, {}, 5));
  for (const Recompute recompute : all_values<Recompute>())
    for (const LayoutCase& layout : {LayoutCase{2, one_f_one_b}, {2, interleaved, 2}}) {
      StepConfig step = step_of(model, layout, 5);
      step.recompute = recompute;
      INFO(name_of(recompute));
      require_agrees(run(step), alone, false);
    }
  StepConfig in_parts = step_of(model, {3, gpipe}, 5), on_one = step_of(model, {1, gpipe}, 5);
  in_parts.head_chunks = on_one.head_chunks = 3;
  require_agrees(run(in_parts), run(on_one), false);
}

TEST_CASE("twenty steps of a pipeline are those of one stage", "[pp]") {
  const Model model{"llama", false, DType::bf16, 6, 3};
  const Outcome alone = selftest::run_layout(step_of(model, {}, 3), {}, {}, 20),
                found = selftest::run_layout(step_of(model, {3, one_f_one_b}, 3), {}, {}, 20);
  REQUIRE(found.losses.size() == 20);
  require_agrees(found, alone, false);
}

TEST_CASE("validation, multiple choice and sampling give with a pipeline what they give on one stage", "[pp]") {
  const TempDir dir;
  write_choices(dir / "choices.jsonl");
  const std::vector<int32_t> text = {3, 1, 4, 1, 5, 9, 2, 6, 5, 3, 5};
  for (const Model& model : {Model{"qwen3", true, DType::fp32, 8, 2}, Model{"gpt2", false, DType::bf16, 8, 8}}) {
    const ChoiceSet set(dir / "choices.jsonl", model.config().vocab_size, selftest::seq_len);
    auto losses_of = [](Run& run, const StepConfig& step) {
      std::vector<float> rows;
      const double mean = run.trainer.evaluate(
          3, 3 * step.batch.rows() * step.layout.readers(),
          [&](int64_t m) { return selftest::read_batch(step, run.groups.reader(), m); },
          [&](int64_t, std::span<const float> losses) { rows.insert(rows.end(), losses.begin(), losses.end()); });
      return std::pair{mean, rows};
    };
    ChoiceScore score;
    std::pair<double, std::vector<float>> losses;
    std::vector<std::vector<float>> logits;
    const StepConfig alone = step_of(model, {}, 6);
    on_ranks(alone, [&](Run& run) {
      losses = losses_of(run, alone);
      score = evaluate_choices(run.trainer, set, run.groups, [](int64_t, int64_t) {});
      for (size_t n = 1; n <= text.size(); ++n)
        logits.push_back(run.trainer.next_token_logits(std::span(text).first(n)));
    });
    for (const LayoutCase& layout : {LayoutCase{3, one_f_one_b},
                                     {2, interleaved, 3},
                                     {2, gpipe, 1, {.stage = 3, .shards = 1}},
                                     {4, one_f_one_b}}) {
      StepConfig step = step_of(model, layout, 6);
      if (layout.pp == 4) step.layout.pipeline.layers = {0, 3, 3, 0};  // the embedding, and the head, by themselves
      on_ranks(step, [&](Run& run) {
        const auto [mean, rows] = losses_of(run, step);
        CHECK(mean == losses.first, "{}: validation {} instead of {}", to_string(layout), mean, losses.first);
        CHECK(rows.empty() || rows == losses.second, "{}: other losses of rows", to_string(layout));
        const ChoiceScore mine = evaluate_choices(run.trainer, set, run.groups, [](int64_t, int64_t) {});
        CHECK(mine.accuracy == score.accuracy && mine.normalized_accuracy == score.normalized_accuracy,
              "{}: accuracy {} instead of {}", to_string(layout), mine.accuracy, score.accuracy);
        Continuation sequence_so_far(run.trainer);
        for (size_t n = 1; n <= text.size(); ++n) {
          CHECK(run.trainer.next_token_logits(std::span(text).first(n)) == logits[n - 1], "{}: other logits after {}",
                to_string(layout), n);
          const std::vector<float> grown = sequence_so_far.feed(std::span(text).subspan(n - 1, 1));
          const double far = relative_distance(grown.data(), logits[n - 1].data(), static_cast<int64_t>(grown.size()));
          CHECK(far < (model.dtype == DType::fp32 ? 1e-5 : 0.05), "{}: logits of the cache are {} from those without",
                to_string(layout), far);
        }
      });
    }
  }
}

TEST_CASE("the first number that is not finite is found on the stage where it arose", "[pp]") {
  const Model model{"qwen3", false, DType::fp32, 8, 2};
  for (const LayoutCase& layout : {LayoutCase{3, one_f_one_b}, {3, gpipe}, {3, interleaved, 2}}) {
    const StepConfig step = step_of(model, layout, 6);
    std::vector<std::string> found(3);
    auto search = [&](const std::string& name, float value) {
      on_ranks(step, [&](Run& run) {
        for (const StateEntry& e : run.trainer.state().state_table())
          if (e.param->name == name && e.kind == StateKind::weight) fill(e.tensor, value, run.stream);
        const BatchSource batches = [&](int64_t m) { return selftest::read_batch(step, run.groups.reader(), m); };
        found[static_cast<size_t>(run.groups.rank())] =
            where_not_finite(run.trainer, batches, [](int64_t m, int64_t b) { return 100 * m + b; });
      });
      for (const std::string& text : found) REQUIRE(text == found[0]);
      return found[0];
    };
    const int owner = layout.chunks == 1 ? 1 : 0;  // of block 3
    REQUIRE(
        search("blocks.3.mlp.up.weight", std::numeric_limits<float>::quiet_NaN()) ==
        formatted("blocks.3.mlp.up.weight (weight, before the step) contains a non-finite number on rank {}", owner));
    const std::string overflow = search("blocks.3.ln2.weight", 3e38f);
    INFO(overflow);
    REQUIRE(overflow.find(formatted("in the forward of blocks.3, rank {}, micro-batch 0", owner)) != std::string::npos);
    // What the head overflows arises in the backward of the last stage, and goes from there to the others.
    const std::string head = search("lm_head.weight", 3e38f);
    INFO(head);
    REQUIRE(head.find("in the backward of the head, rank 2, micro-batch 0") != std::string::npos);
  }
}
