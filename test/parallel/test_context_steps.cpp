// Steps, evaluation and generation with context parallelism, against one rank: recomputation, parts of the head,
// schedules, targets on few ranks, texts of other lengths, multiple choice, sampling, the search for NaN.
#include <mutex>

#include "helpers.h"
#include "parallel/context_layouts.h"
#include "train/choices.h"
#include "train/not_finite.h"
#include "train/sample.h"

using namespace context_layouts;
using llmc::name_of, context_layouts::name_of;

namespace {

const Model qwen3{"qwen3", true, DType::fp32, 8, 2}, gpt2{"gpt2", false, DType::fp32, 8, 8};

bool same_bits(const Outcome& a, const Outcome& b) {
  return a.fault == "" && b.fault == "" && a.losses == b.losses && a.norms == b.norms && a.weights == b.weights &&
         a.gradients == b.gradients;
}

}  // namespace

TEST_CASE("recomputation and the schedule change no bits on context-parallel ranks", "[parallel][cp]") {
  for (const ContextAttention attention : all_values<ContextAttention>())
    for (const DType dtype : {DType::fp32, DType::bf16}) {
      Model model = qwen3;
      model.dtype = dtype;
      StepConfig step = step_of(model, {4, attention}, Documents::apart, 1);
      const Outcome kept = run(step);
      for (const Recompute recompute : all_values<Recompute>()) {
        const bool gpipe = recompute == Recompute::none || recompute == Recompute::norm;
        step.recompute = recompute;
        step.layout.pipeline.schedule = gpipe ? Schedule::gpipe : Schedule::one_f_one_b;
        step.layout.pipeline.chunks_per_stage =
            recompute == Recompute::none || recompute == Recompute::activation ? 1 : 3;
        INFO(name_of(attention) << ", " << name_of(dtype) << ", recompute " << name_of(recompute) << ", "
                                << name_of(step.layout.pipeline.schedule) << ", " << step.layout.pipeline.chunks()
                                << " chunks");
        REQUIRE(same_bits(run(step), kept));
      }
    }
}

TEST_CASE("any division of a step into micro-batches, and of the head's rows into parts, agrees with one rank",
          "[parallel][cp]") {
  for (const Model& model : {qwen3, gpt2}) {
    const OneRank alone(model, Documents::apart);
    for (const ContextAttention attention : all_values<ContextAttention>()) {
      for (const int64_t batch_size : {1, 4})
        require_close(run(step_of(model, {4, attention}, Documents::apart, batch_size)), alone, false);
      for (const int64_t chunks : {2, 5}) {
        INFO(model.family << ", " << name_of(attention) << ", " << chunks << " parts of the head");
        StepConfig step = step_of(model, {4, attention}, Documents::apart);
        step.head_chunks = chunks;
        require_close(run(step), alone, false);
      }
    }
  }
}

TEST_CASE("twenty steps of context-parallel ranks follow one rank", "[parallel][cp]") {
  const Outcome alone = selftest::run_layout(step_of(qwen3, {}), {}, {}, 20);
  for (const LayoutCase& layout : {LayoutCase{4},
                                   {2, ContextAttention::all_gather, 1, {.stage = 3, .shards = 2}},
                                   {4, ContextAttention::ulysses}}) {
    const Outcome found = selftest::run_layout(step_of(qwen3, layout), {}, {}, 20);
    const Distances d(found, alone);
    INFO(to_string(layout) << ": " << to_string(d));
    REQUIRE(found.fault == "");
    REQUIRE((found.losses.size() == 20 && d.loss < 1e-4 && d.norm < 1e-4 && d.weights < 1e-4));
  }
}

// ---- Targets -------------------------------------------------------------------------------------------------------

namespace {

// Rows without targets: all but the first three of every sequence, so that with eight ranks one has them all; all of
// the first slices but one row; most rows of some sequences and none of others.
template <int kind>
HostBatch read_few_targets(const StepConfig& step, int reader, int64_t micro_batch) {
  HostBatch batch = selftest::read_batch(step, reader, micro_batch);
  const int64_t T = step.batch.T;
  for (size_t i = 0; i < batch.targets.size(); ++i) {
    const int64_t t = static_cast<int64_t>(i) % T, b = static_cast<int64_t>(i) / T;
    const bool none = kind == 0   ? t >= 3
                      : kind == 1 ? t < T - 1 && t != T / 3
                                  : (b + micro_batch + reader) % 2 == 0 && t % 7 != 3;
    if (none) batch.targets[i] = -1;
  }
  return batch;
}

}  // namespace

TEST_CASE("the loss and its gradient are divided by the tokens of all ranks, wherever among them the targets are",
          "[parallel][cp]") {
  for (const auto read : {read_few_targets<0>, read_few_targets<1>, read_few_targets<2>})
    for (const Documents documents : {Documents::together, Documents::apart}) {
      const Outcome alone = selftest::run_layout(step_of(gpt2, {}, documents), {}, {.read = read});
      for (const LayoutCase& layout : {LayoutCase{2},
                                       {8},
                                       {4, ContextAttention::all_gather},
                                       {4, ContextAttention::ulysses},
                                       {2, ContextAttention::ring, 1, {.stage = 3, .shards = 2}}}) {
        const Outcome found = selftest::run_layout(step_of(gpt2, layout, documents), {}, {.read = read});
        const Distances d(found, alone);
        INFO(to_string(layout) << ": " << to_string(d));
        REQUIRE((found.fault == "" && d.loss < 1e-6 && d.norm < 1e-5 && d.gradients < 1e-5 && d.weights < 1e-5));
      }
    }
}

// ---- Evaluation ----------------------------------------------------------------------------------------------------

namespace {

struct Evaluation {
  double loss = 0;
  std::map<int64_t, std::vector<float>> rows;  // of each micro-batch, of all ranks together
};

// Batches of texts of T tokens; some have few targets.
Evaluation evaluate(const StepConfig& step, int64_t T) {
  StepConfig texts = step;
  texts.batch.T = T;
  texts.layout.zero = {};  // one reader has them all
  texts.layout.context = {};
  constexpr int64_t all = 2;  // micro-batches of all readers
  const int64_t readers = step.layout.readers();
  auto read = [&](int64_t number) {
    return number == 0 ? read_few_targets<1>(texts, 0, 0) : read_few_targets<2>(texts, 0, number);
  };
  int64_t targets = 0;
  for (int64_t number = 0; number < all; ++number)
    for (const int32_t target : read(number).targets) targets += target >= 0;
  Evaluation found;
  std::mutex mutex;
  on_ranks(step, [&](Run& run) {
    auto number_of = [&](int64_t m) { return m * readers + run.groups.reader(); };
    const double loss = run.trainer.evaluate(
        all / readers, targets, [&](int64_t m) { return read(number_of(m)); },
        [&](int64_t m, std::span<const float> losses) {
          std::lock_guard lock(mutex);
          CHECK(static_cast<int64_t>(losses.size()) == step.batch.B * T);
          const std::vector<int32_t> wanted = read(number_of(m)).targets;
          std::vector<float>& rows = found.rows[number_of(m)];
          rows.resize(losses.size());
          for (size_t i = 0; i < losses.size(); ++i) {
            CHECK(losses[i] == 0 || (wanted[i] >= 0 && rows[i] == 0), "row {} has a loss on several ranks", i);
            rows[i] += losses[i];
          }
        },
        T);
    std::lock_guard lock(mutex);
    CHECK(found.loss == 0 || found.loss == loss, "rank {} has another loss", run.groups.rank());
    found.loss = loss;
  });
  return found;
}

}  // namespace

TEST_CASE("texts of any length have the loss of one rank, and every row its own, on context-parallel ranks",
          "[parallel][cp]") {
  for (const auto& [model, documents] : {std::pair{qwen3, Documents::apart}, {gpt2, Documents::together}})
    for (const int64_t T : {1, 5, 7, 16, 33, 48}) {
      const Evaluation alone = evaluate(step_of(model, {}, documents), T);
      for (const LayoutCase& layout : {LayoutCase{2},
                                       {4},
                                       {8},
                                       {2, ContextAttention::ring, 1, {.shards = 2}},
                                       {4, ContextAttention::all_gather},
                                       {4, ContextAttention::ulysses},
                                       {8, ContextAttention::ulysses},
                                       {8, ContextAttention::all_gather}}) {
        StepConfig step = step_of(model, layout, documents);
        step.head_chunks = layout.attention == ContextAttention::ring ? 3 : 0;
        const Evaluation found = evaluate(step, T);
        INFO(model.family << ", " << T << " tokens, " << to_string(layout) << ", loss " << found.loss << ", alone "
                          << alone.loss);
        REQUIRE(std::abs(found.loss / alone.loss - 1) < 1e-6);
        REQUIRE(found.rows.size() == alone.rows.size());
        for (const auto& [number, rows] : alone.rows) {
          const std::vector<float>& its = found.rows.at(number);
          REQUIRE(its.size() == rows.size());
          for (size_t i = 0; i < rows.size(); ++i) REQUIRE(std::abs(its[i] - rows[i]) <= 2e-6f * rows[i]);
        }
      }
    }
}

TEST_CASE("multiple choice gives on context-parallel ranks what it gives on one", "[parallel][cp]") {
  const TempDir dir;
  write_choices(dir / "choices.jsonl");
  for (const Model& model : {qwen3, gpt2}) {
    const ChoiceSet set(dir / "choices.jsonl", model.config().vocab_size, seq_len);
    ChoiceScore score;
    on_ranks(step_of(model, {}),
             [&](Run& run) { score = evaluate_choices(run.trainer, set, run.groups, [](int64_t, int64_t) {}); });
    for (const LayoutCase& layout : {LayoutCase{2},
                                     {8},
                                     {4, ContextAttention::all_gather},
                                     {4, ContextAttention::ulysses},
                                     {2, ContextAttention::ring, 2, {.shards = 2}}})
      on_ranks(step_of(model, layout), [&](Run& run) {
        const ChoiceScore mine = evaluate_choices(run.trainer, set, run.groups, [](int64_t, int64_t) {});
        CHECK(mine.accuracy == score.accuracy && mine.normalized_accuracy == score.normalized_accuracy,
              "{}: accuracy {} instead of {}", to_string(layout), mine.accuracy, score.accuracy);
      });
  }
}

TEST_CASE("a text is generated from the same logits, bit for bit, on context-parallel ranks", "[parallel][cp]") {
  const std::vector<int32_t> text = {3, 1, 4, 1, 5, 9, 2, 6, 5, 3, 5};
  auto logits_of = [&](const StepConfig& step) {
    std::vector<std::vector<std::vector<float>>> of_rank(static_cast<size_t>(step.layout.ranks()));
    on_ranks(step, [&](Run& run) {
      Continuation grown(run.trainer);
      for (size_t n = 1; n <= text.size(); ++n) {
        of_rank[static_cast<size_t>(run.groups.rank())].push_back(
            run.trainer.next_token_logits(std::span(text).first(n)));
        of_rank[static_cast<size_t>(run.groups.rank())].push_back(grown.feed(std::span(text).subspan(n - 1, 1)));
      }
    });
    for (const auto& logits : of_rank) REQUIRE(logits == of_rank[0]);
    return of_rank[0];
  };
  for (const Model& model : {qwen3, gpt2})
    for (const int tp : {1, 2}) {
      const auto alone = logits_of(step_of(model, {1, ContextAttention::ring, tp}));
      REQUIRE(alone.size() == 2 * text.size());
      for (const ContextAttention attention : all_values<ContextAttention>())
        for (const Documents documents : {Documents::together, Documents::apart})
          REQUIRE(logits_of(step_of(model, {4, attention, tp}, documents)) == alone);
    }
}

TEST_CASE("the search for a number that is not finite names the sample, on the context-parallel rank that has it",
          "[parallel][cp]") {
  for (const ContextAttention attention : all_values<ContextAttention>()) {
    StepConfig step = step_of(gpt2, {2, attention});
    step.batch.B = 4;
    step.micro_batches = 3;
    // The embedding of a token that only one row has: finite, but a norm's sum of it is not.
    for (const auto& [row, rank, sample] : {std::tuple{seq_len / 4, 1, 200}, {4 * seq_len - 1, 0, 203}}) {
      std::vector<std::string> found(2);
      on_ranks(step, [&](Run& run) {
        for (const StateEntry& e : run.trainer.state().state_table())
          if (e.param->name == "wte.weight" && e.kind == StateKind::weight)
            fill(e.tensor.slice(96 * e.param->box().columns, {e.param->box().columns}), 3e38f, run.stream);
        const BatchSource batches = [&](int64_t m) {
          HostBatch batch = selftest::read_batch(step, 0, m);
          for (int32_t& token : batch.tokens) token = std::min(token, 95);
          if (m == 2) batch.tokens[static_cast<size_t>(row)] = 96;
          return batch;
        };
        found[static_cast<size_t>(run.groups.rank())] =
            where_not_finite(run.trainer, batches, [](int64_t m, int64_t b) { return 100 * m + b; });
      });
      INFO(name_of(attention) << ": " << found[0]);
      REQUIRE(found[0] == found[1]);
      REQUIRE(found[0] == formatted("the first non-finite number is in norm1, written by layernorm_forward in the "
                                    "forward of blocks.0, rank {}, micro-batch 2, sample {}",
                                    rank, sample));
    }
  }
}
