// kept_metrics.h: what a resumed run keeps of metrics.jsonl, and what it reports about damaged lines. No number in that
// file affects how a run goes on: trainer.json has those.
#pragma once
#include <sstream>

#include "core/json.h"

namespace llmc {

// The contents of metrics.jsonl up to a step.
struct MetricsKept {
  std::string lines;            // the intact ones, up to the step
  bool validated = false;       // there is a validation of the step itself
  double elapsed_s = 0;         // seconds that the run had taken
  int64_t train_lines = 0;      // training lines among them
  int64_t first = 0, last = 0;  // their smallest and largest step

  std::string damaged;                 // lines that are not ours; an incomplete last line is not damage
  std::vector<int64_t> damaged_lines;  // their numbers, from 1
};

// OwnValidation::repeat: leaves out the validation of the step itself, which will be made again.
enum class OwnValidation : uint8_t { keep, repeat };

inline MetricsKept metrics_until(const std::string& text, int64_t step, OwnValidation own = OwnValidation::keep) {
  MetricsKept kept;
  std::istringstream lines(text);
  int64_t number = 0;
  auto damage = [&](int64_t at, const std::string& line) {
    kept.damaged += line + "\n";
    kept.damaged_lines.push_back(at);
  };
  std::vector<std::pair<int64_t, std::string>> later;  // lines of later steps, with their numbers
  for (std::string line; std::getline(lines, line);) {
    ++number;
    const bool whole = !lines.eof();  // it ends with a line break
    const nlohmann::json object = try_parse_json(line).value_or(nullptr);
    const nlohmann::json at = member(object, "step");
    const nlohmann::json kind = member(object, "kind");
    if (!whole_number(at) || !kind.is_string()) {
      if (whole) damage(number, line);  // else it was being written when the run ended
      continue;
    }
    if (at > step) {
      later.emplace_back(number, line);
      continue;
    }
    for (const auto& [where, before] : later) damage(where, before);  // lines come in the order of their steps
    later.clear();
    if (kind == "val" && at == step && own == OwnValidation::repeat) continue;
    kept.validated |= kind == "val" && at == step;
    if (kind == "train") {
      kept.first = kept.train_lines == 0 ? at.get<int64_t>() : std::min(kept.first, at.get<int64_t>());
      kept.last = std::max(kept.last, at.get<int64_t>());
      ++kept.train_lines;
    }
    if (const nlohmann::json elapsed = member(object, "elapsed_s"); elapsed.is_number()) kept.elapsed_s = elapsed;
    kept.lines += line + "\n";
  }
  return kept;
}

// The fault in the metrics of a run that resumes after this step; empty: none. copy: where damaged lines are now;
// begin: the step after which a branch began.
inline std::string metrics_fault(const MetricsKept& kept, int64_t step, const std::string& file,
                                 const std::string& copy, std::optional<int64_t> begin = std::nullopt) {
  std::string fault;
  if (!kept.damaged_lines.empty())
    fault = formatted("{}: {} damaged line(s), the first is line {}: moved to {}", file, kept.damaged_lines.size(),
                      kept.damaged_lines[0], copy);
  if (step == begin) return fault;
  const std::string where = fault.empty() ? file + ": " : "; ";
  const int64_t first = begin ? *begin + 1 : kept.first;
  if (kept.train_lines == 0) fault += formatted("{}no line of a step up to {}", where, step);
  else if (kept.first != first || kept.last != step || kept.train_lines != step - first + 1)
    fault += formatted("{}{} line(s) for steps {} to {}", where, kept.train_lines, first, step);
  return fault;
}

}  // namespace llmc
