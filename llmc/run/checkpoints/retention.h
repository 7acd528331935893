// retention.h: what of an out directory stays: of its checkpoints, when there are newer ones; of metrics.jsonl, when
// the run is resumed, and what is reported about damaged lines.
#pragma once
#include <thread>

#include "run/checkpoints/checkpoint.h"

namespace llmc {

// In trainer.json, if saved for --checkpoint-minutes alone, or for --checkpoint-local alone.
inline constexpr const char *saved_by_clock = "clock", *saved_locally = "local";

class Retention {
 public:
  explicit Retention(std::string out_dir) : path_(std::move(out_dir)) {}

  ~Retention() { wait(); }
  Retention(const Retention&) = delete;
  Retention& operator=(const Retention&) = delete;

  // Deletes, in a thread of its own, all checkpoints except the newest `keep` (0: keeps all), the two newest saved by
  // the clock alone or locally, multiples of `keep_every`, the one that OUT/best links to, and those of the steps
  // `needed`.
  void prune(int64_t keep, int64_t keep_every, const std::set<int64_t>& needed) {
    constexpr size_t keep_by_clock = 2;
    fault_ = wait();
    const std::optional<int64_t> best = best_step();
    std::vector<std::string> removed;  // renamed, and to be deleted
    std::vector<int64_t> by_clock, others;
    for (const int64_t step : checkpoint_steps(path_)) (saved_by_the_clock(step) ? by_clock : others).push_back(step);
    const auto remove_older = [&](std::vector<int64_t> steps, size_t most) {
      steps.resize(steps.size() - std::min(steps.size(), most));
      for (const int64_t step : steps)
        if (!(keep_every > 0 && step % keep_every == 0) && step != best && !needed.contains(step))
          if (const std::optional<std::string> gone = rename_away(step)) removed.push_back(*gone);
    };
    remove_older(std::move(by_clock), keep_by_clock);
    if (keep > 0) remove_older(std::move(others), static_cast<size_t>(keep));
    if (removed.empty()) return;
    const auto remove_all = [this, removed] {
      for (const std::string& path : removed)
        if (std::error_code error; std::filesystem::remove_all(path, error), error) cannot_remove(path, error);
    };
    try {
      removing_ = std::jthread(remove_all);
    } catch (const std::system_error&) {  // no further thread to be had
      remove_all();
    }
  }
  // Until what prune() deletes is gone. Returns what could not be deleted, and why; empty: nothing.
  std::string wait() {
    if (removing_.joinable()) removing_.join();
    return std::exchange(fault_, "");
  }

  // Makes OUT/best a link to the checkpoint with the best validation loss.
  void link_best(int64_t step) const {
    const std::string temporary = path_ + "/.tmp-best", copy = path_ + "/.tmp-copy-of-best";
    std::error_code error, none;
    std::filesystem::remove(temporary, error);
    std::filesystem::create_symlink(std::filesystem::path(checkpoint_path(path_, step)).filename(), temporary, error);
    if (!error && best_is_directory()) take_away_copy(copy);
    if (!error) std::filesystem::rename(temporary, path_ + "/best", error);
    CHECK(!error, "cannot link {}/best: {}", path_, error.message());
    std::filesystem::remove_all(copy, none);
  }
  // The directory is a new one, or steps are taken again.
  void forget() { by_clock_.clear(); }

 private:
  // As where OUT was copied and links were followed.
  bool best_is_directory() const {
    std::error_code none;
    return std::filesystem::is_directory(std::filesystem::symlink_status(path_ + "/best", none));
  }
  // The step of the checkpoint that OUT/best links to, or is a copy of.
  std::optional<int64_t> best_step() const {
    std::error_code none;
    if (!best_is_directory()) return checkpoint_step(std::filesystem::read_symlink(path_ + "/best", none));
    try {
      return whole_number(member(read_json(path_ + "/best/trainer.json"), "step"));
    } catch (const Error&) {  // it is something else
      return std::nullopt;
    }
  }
  // Renames OUT/best, a copy of a checkpoint, to `temporary` if OUT has that checkpoint, otherwise to a lasting name.
  void take_away_copy(const std::string& temporary) const {
    const std::string best = path_ + "/best", manifest = best + "/manifest.json";
    const std::optional<int64_t> step = best_step();
    CHECK(step && path_exists(manifest),
          "{} is a directory that is no copy of a checkpoint, expected a link to one: move it away", best);
    const std::string original = checkpoint_path(path_, *step) + "/manifest.json",
                      lasting = formatted("{}/former-best-step-{:06}", path_, *step);
    const bool in_out = path_exists(original) && read_text(original) == read_text(manifest);
    CHECK(in_out || !path_exists(lasting), "cannot rename {} to {}, which is there already: move one of them away",
          best, lasting);
    rename_path(best, in_out ? temporary : lasting);
  }
  // Whether trainer.json says that a checkpoint was saved for --checkpoint-minutes or --checkpoint-local alone.
  bool saved_by_the_clock(int64_t step) {
    const auto [found, is_new] = by_clock_.try_emplace(step, false);
    if (is_new) try {
        const nlohmann::json by =
            read_json(checkpoint_path(path_, step) + "/trainer.json").value("saved_by", nlohmann::json());
        found->second = by == saved_by_clock || by == saved_locally;
      } catch (const std::exception&) {  // do not delete a damaged one early
      }
    return found->second;
  }

  // First, so that half of it is never taken for a checkpoint. Returns the new path; none: it is still there.
  std::optional<std::string> rename_away(int64_t step) {
    const std::string path = checkpoint_path(path_, step), gone = formatted("{}/.tmp-removed-{:06}", path_, step);
    std::error_code error;
    std::filesystem::rename(path, gone, error);
    if (!error) return gone;
    cannot_remove(path, error);
    return std::nullopt;
  }
  void cannot_remove(const std::string& path, const std::error_code& error) {
    fault_ = formatted("cannot remove {}: {}", path, error.message());
  }

  std::string path_;
  std::map<int64_t, bool> by_clock_;  // of checkpoints whose trainer.json was read
  std::string fault_;                 // of the last deletions
  std::jthread removing_;             // uses fault_
};

// The contents of metrics.jsonl up to a step. No number in that file affects how a run goes on: trainer.json has those.
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

inline MetricsKept metrics_until(std::string_view text, int64_t step, OwnValidation own = OwnValidation::keep) {
  MetricsKept kept;
  int64_t number = 0;
  auto damage = [&](int64_t at, std::string_view line) {
    kept.damaged.append(line) += '\n';
    kept.damaged_lines.push_back(at);
  };
  std::vector<std::pair<int64_t, std::string_view>> later;  // lines of later steps, with their numbers
  while (!text.empty()) {
    const size_t end = text.find('\n');
    const std::string_view line = text.substr(0, end);
    const bool whole = end != text.npos;  // it ends with a line break
    text.remove_prefix(whole ? end + 1 : text.size());
    ++number;
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
    kept.lines.append(line) += '\n';
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
