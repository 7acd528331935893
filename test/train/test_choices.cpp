// Multiple choice: the questions, scoring, refusals.
#include <nlohmann/json.hpp>

#include "catch2.h"
#include "helpers.h"
#include "run/selftest/selftest.h"
#include "train/choices.h"

using namespace llmc;
using nlohmann::json;

TEST_CASE("multiple choice: exact for any batch and layout, and equal to sums by hand", "[train][evaluate]") {
  const TempDir dir;
  const Philox rng(11, "choices");
  std::ofstream out(dir / "questions.jsonl");
  uint64_t draw = 0;
  auto words = [&](size_t n) {
    std::vector<int32_t> tokens;
    while (tokens.size() < n) tokens.push_back(static_cast<int32_t>(rng.bits(draw++) % 120));
    return tokens;
  };
  struct Question {
    std::vector<int32_t> context;
    std::vector<std::vector<int32_t>> choices;
    std::vector<int64_t> lengths;
    int64_t label;
  };
  std::vector<Question> questions;
  for (size_t i = 0; i < 13; ++i) {
    Question q{words(1 + i % 9), {}, {}, static_cast<int64_t>(i % 3)};
    for (size_t c = 0; c < 3 + i % 2; ++c) {
      q.choices.push_back(words(1 + (i + c) % 5));
      q.lengths.push_back(static_cast<int64_t>(3 + (5 * i + 7 * c) % 11));
    }
    out << json{{"context", q.context}, {"choices", q.choices}, {"lengths", q.lengths}, {"label", q.label}} << "\n";
    questions.push_back(q);
  }
  out.close();
  const ModelConfig model = selftest::awkward_model("qwen3");
  const ChoiceSet set(dir / "questions.jsonl", model.vocab_size, 19);
  REQUIRE(set.questions() == 13);
  ChoiceScore by_hand{0, 0.0};
  {
    const StepConfig config{.model = model, .batch = {1, 19}};
    World world{Mesh()};
    Run run(config, make_plan(config, {DeviceKind::cpu, 1}), {DeviceKind::cpu, 1}, world, 0);
    init_weights(run.trainer.state(), 5, run.stream);
    for (const Question& q : questions) {
      std::vector<double> sums, means;
      for (const auto& choice : q.choices) {
        std::vector<int32_t> seen = q.context;
        double loss = 0;
        for (const int32_t token : choice) {
          loss += loss_of(run.trainer.next_token_logits(seen), token);
          seen.push_back(token);
        }
        sums.push_back(loss);
        means.push_back(loss / static_cast<double>(q.lengths[means.size()]));
      }
      auto right = [&](const std::vector<double>& costs) {
        return std::min_element(costs.begin(), costs.end()) - costs.begin() == q.label ? 1.0 / 13 : 0;
      };
      by_hand.accuracy += right(sums);
      *by_hand.normalized_accuracy += right(means);
    }
  }
  for (const auto& [ranks, B] : {std::pair{1, 1}, {1, 5}, {2, 2}, {3, 4}}) {
    ZeroConfig zero{.shards = ranks};
    zero.set_stage(ranks == 1 ? 0 : 3);
    const StepConfig config{.model = model, .batch = {B, 19}, .layout = {.zero = zero}};
    const Plan plan = make_plan(config, {DeviceKind::cpu, 1});
    World world(Layout{.zero = zero}.mesh());
    run_ranks(world, [&](int rank) {
      Run run(config, plan, {DeviceKind::cpu, 1}, world, rank);
      init_weights(run.trainer.state(), 5, run.stream);
      const ChoiceScore score = evaluate_choices(run.trainer, set, run.groups, [](int64_t, int64_t) {});
      if (std::abs(score.accuracy - by_hand.accuracy) > 1e-9 ||
          std::abs(score.normalized_accuracy.value() - *by_hand.normalized_accuracy) > 1e-9)
        throw Error(formatted("{} and {} by rank {} of {}, {} and {} by hand", score.accuracy,
                              *score.normalized_accuracy, rank, ranks, by_hand.accuracy, *by_hand.normalized_accuracy));
    });
  }
  auto refused = [&](const std::string& line, const std::string& part) {
    std::ofstream(dir / "bad.jsonl") << line << "\n";
    REQUIRE_ERROR(ChoiceSet(dir / "bad.jsonl", model.vocab_size, 19), part);
  };
  refused("not json", "line 1");
  refused(R"({"context": [1], "choices": [[1], [2]], "label": 2})", "label 2 of 2");
  refused(R"({"context": [], "choices": [[1], [2]], "label": 0})", "context is empty");
  refused(R"({"context": [1], "choices": [[1], [131]], "label": 0})", "token 131");
  refused(R"({"context": [1], "choices": [[1], []], "label": 0})", "empty choice");
  refused("\n \t\r", "contains no questions");  // empty lines are skipped, and counted
  refused("\n\nnot json", "line 3: not JSON");
  write_choices(dir / "spaced.jsonl");
  std::ofstream(dir / "spaced.jsonl", std::ios::app) << "\n\r\n";
  REQUIRE(ChoiceSet(dir / "spaced.jsonl", model.vocab_size, 19).questions() == 3);
  refused("[1]", "expected an object");
}
