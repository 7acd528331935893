// choices.h: multiple choice in the manner of HellaSwag (Zellers et al. 2019): the model's answer is the continuation
// of a context that it finds most likely. File format: data/README.md.
#pragma once
#include <bit>
#include <sstream>

#include "core/json.h"
#include "train/trainer.h"

namespace llmc {

// The share of questions answered correctly. The normalized score divides each loss by the characters of its choice, as
// the lm-evaluation-harness does, if the file has them.
struct ChoiceScore {
  double accuracy = 0;
  std::optional<double> normalized_accuracy;
};

class ChoiceSet {
 public:
  // Reads and checks the file. T: tokens in a sequence; longer contexts are truncated at their beginning.
  ChoiceSet(const std::string& file, int64_t vocab_size, int64_t T) {
    const std::string text = read_text(file);
    CHECK(
        !text.starts_with("\x8a\xd8\x34\x01"),
        "--eval-choices {}: these are llm.c's questions, with a header of magic 20240522: let data/hellaswag.py write "
        "them as JSON lines",
        file);
    std::istringstream in(text);
    int64_t line_number = 0;
    for (std::string line; std::getline(in, line);) {
      const std::string where = formatted("--eval-choices {}, line {}", file, ++line_number);
      if (line.find_first_not_of(" \t\r") == line.npos) continue;
      const nlohmann::json json = parse_json(line, where);
      CHECK(json.is_object() && json.contains("choices") && json["choices"].is_array() && json.contains("label"),
            "{}: expected an object with \"context\", \"choices\" and \"label\"; data/hellaswag.py makes such a file",
            where);
      const std::vector<int32_t> context = read_tokens(member(json, "context"), vocab_size, where);
      CHECK(!context.empty(), "{}: the context is empty", where);
      const int64_t count = static_cast<int64_t>(json["choices"].size());
      CHECK(count >= 2 && json["label"].is_number_integer() && json["label"] >= 0 && json["label"] < count,
            "{}: label {} of {} choices; expected at least two, and a label among them from 0", where, json["label"],
            count);
      questions_.push_back({static_cast<int64_t>(rows_.size()), count, json["label"].get<int64_t>()});
      const nlohmann::json lengths = json.value("lengths", nlohmann::json::array());
      CHECK(lengths.is_array() && (lengths.empty() || lengths.size() == json["choices"].size()),
            "{}: \"lengths\" is {}, expected the characters of each of the {} choices", where, lengths, count);
      for (size_t c = 0; c < json["choices"].size(); ++c) {
        CHECK(lengths.empty() || (lengths[c].is_number() && lengths[c] > 0),
              "{}: length {}, expected a positive number", where, lengths[c]);
        add_row(context, read_tokens(json["choices"][c], vocab_size, where),
                lengths.empty() ? 0.0 : lengths[c].get<double>(), T, where);
      }
    }
    CHECK(!rows_.empty(), "--eval-choices {}: contains no questions", file);
  }

  int64_t questions() const { return static_cast<int64_t>(questions_.size()); }
  int64_t rows() const { return static_cast<int64_t>(rows_.size()); }
  // Tokens of the longest row, rounded up to a power of two: the length at which rows are evaluated.
  int64_t length(int64_t T) const {
    size_t longest = 0;
    for (const Row& row : rows_) longest = std::max(longest, row.tokens.size() - 1);
    return std::min(T, static_cast<int64_t>(std::bit_ceil(longest)));
  }

  // Rows [first, first + B) as a batch of B x T. Only tokens of the choice are targets; rows after the last have none.
  HostBatch batch(int64_t first, int64_t B, int64_t T) const {
    HostBatch host;
    for (int64_t b = 0; b < B; ++b) {
      const Row* row = first + b < rows() ? &rows_[static_cast<size_t>(first + b)] : nullptr;
      const int64_t inputs = row ? static_cast<int64_t>(row->tokens.size()) - 1 : 0;
      for (int64_t t = 0; t < T; ++t) {
        const bool inside = t < inputs, in_choice = inside && t >= inputs - row->choice_size;
        host.tokens.push_back(inside ? row->tokens[static_cast<size_t>(t)] : 0);
        host.targets.push_back(in_choice ? row->tokens[static_cast<size_t>(t) + 1] : -1);
        host.positions.push_back(static_cast<int32_t>(t));
      }
    }
    return host;
  }

  // losses: for each row, the sum over the tokens of its choice.
  ChoiceScore score(std::span<const double> losses) const {
    int64_t correct = 0, correct_normalized = 0;
    const auto unknown = [](const Row& row) { return row.characters == 0; };
    const bool lengths = std::none_of(rows_.begin(), rows_.end(), unknown);
    for (const Question& q : questions_) {
      auto best = [&](auto&& cost) {  // among equals the first
        int64_t least = 0;
        for (int64_t c = 1; c < q.choices; ++c)
          if (cost(q.first_row + c) < cost(q.first_row + least)) least = c;
        return least;
      };
      auto loss = [&](int64_t r) { return losses[static_cast<size_t>(r)]; };
      correct += best(loss) == q.label;
      correct_normalized +=
          best([&](int64_t r) { return loss(r) / rows_[static_cast<size_t>(r)].characters; }) == q.label;
    }
    const double n = static_cast<double>(questions());
    return {static_cast<double>(correct) / n,
            lengths ? std::optional(static_cast<double>(correct_normalized) / n) : std::nullopt};
  }

 private:
  struct Row {
    std::vector<int32_t> tokens;  // context and choice
    int64_t choice_size;          // tokens of the choice
    double characters;            // of the text of the choice; 0: the file does not say
  };
  struct Question {
    int64_t first_row, choices, label;
  };

  static std::vector<int32_t> read_tokens(const nlohmann::json& list, int64_t vocab_size, const std::string& where) {
    CHECK(list.is_array(), "{}: found {}, expected a list of token ids", where, list);
    std::vector<int32_t> tokens;
    for (const nlohmann::json& id : list) {
      CHECK(id.is_number_integer() && id >= 0 && id < vocab_size,
            "{}: token {} is outside the model's vocabulary of {}; make the file with the model's tokenizer", where, id,
            vocab_size);
      tokens.push_back(id);
    }
    return tokens;
  }

  void add_row(const std::vector<int32_t>& context, const std::vector<int32_t>& choice, double characters, int64_t T,
               const std::string& where) {
    const int64_t choice_size = static_cast<int64_t>(choice.size());
    CHECK(choice_size > 0, "{}: an empty choice", where);
    CHECK(choice_size <= T, "{}: a choice of {} tokens does not fit into --seq-len {}: raise it", where, choice_size,
          T);
    Row row{context, choice_size, characters};
    row.tokens.insert(row.tokens.end(), choice.begin(), choice.end());
    if (const int64_t spare = static_cast<int64_t>(row.tokens.size()) - (T + 1); spare > 0)
      row.tokens.erase(row.tokens.begin(), row.tokens.begin() + spare);
    rows_.push_back(std::move(row));
  }

  std::vector<Row> rows_;
  std::vector<Question> questions_;
};

inline constexpr int64_t evaluated_in_one_list = 256;  // micro-batches in one list of actions

// Answers all questions, computing each row once with any batch and layout; called by all ranks. before: called before
// each micro-batch; between: after each list of actions.
template <class Before>
ChoiceScore evaluate_choices(
    Trainer& trainer, const ChoiceSet& set, Groups& groups, Before&& before,
    const std::function<void()>& between = [] {}) {
  const int64_t B = trainer.config().batch.B, readers = groups.readers(), T = set.length(trainer.config().batch.T);
  const int64_t micro_batches = ceil_div(set.rows(), B * readers);
  auto first_row = [&](int64_t m) { return (m * readers + groups.reader()) * B; };
  // Of this reader's rows; those of context-parallel ranks have parts, and those of other stages are zero.
  std::vector<double> losses(static_cast<size_t>(micro_batches * B), 0);
  for (int64_t begin = 0; begin < micro_batches; between(), begin += evaluated_in_one_list)
    trainer.evaluate(
        std::min(evaluated_in_one_list, micro_batches - begin), 1,
        [&](int64_t m) {
          before(begin + m, micro_batches);
          return set.batch(first_row(begin + m), B, T);
        },
        [&](int64_t m, std::span<const float> rows) {
          for (int64_t b = 0; b < B; ++b)
            for (int64_t t = 0; t < T; ++t)
              losses[static_cast<size_t>((begin + m) * B + b)] +=
                  static_cast<double>(rows[static_cast<size_t>(b * T + t)]);
        },
        T);
  // A rank sends its reader's number, then its rows; nothing if it has none, or the same as a tensor-parallel rank.
  std::string mine;
  const auto add = [&](double number) { mine.append(reinterpret_cast<const char*>(&number), sizeof number); };
  const bool none = std::ranges::all_of(losses, [](double loss) { return loss == 0; });
  if (groups.me.tensor == 0 && !none) {
    add(static_cast<double>(groups.reader()));
    for (const double loss : losses) add(loss);
  }
  std::vector<double> all(static_cast<size_t>(micro_batches * readers * B), 0);
  for (const std::string& text : groups[GroupName::control].all_gather_text("choices", mine)) {
    std::vector<double> theirs(text.size() / sizeof(double));
    std::memcpy(theirs.data(), text.data(), text.size());
    for (size_t i = 1; i < theirs.size(); ++i) {
      const int64_t row = static_cast<int64_t>(i) - 1;
      all[static_cast<size_t>((row / B * readers + static_cast<int64_t>(theirs[0])) * B + row % B)] += theirs[i];
    }
  }
  return set.score(all);
}

}  // namespace llmc
