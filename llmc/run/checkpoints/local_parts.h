// local_parts.h: checkpoints on the nodes' own disks (--checkpoint-local DIR). Each process writes what its ranks hold
// of one, and the manifest of all of it, to a directory of its own, which is complete or absent like any checkpoint:
//
//   DIR/train_gpt-3f81d20c9b7e4a65/step-000075-start-2348810194-process-3/
//
// The run and the start that wrote them are random numbers. run.json has both, and says which parts belong to the run's
// past: a start that resumes from step 50 has no use for step 75 of an earlier one.
#pragma once
#include <compare>
#include <cstdio>
#include <deque>

#include "core/files.h"
#include "core/json.h"
#include "net/meeting/secret.h"

namespace llmc {

// The name of a part.
struct LocalName {
  int64_t step = 0, start = 0, process = 0;
  auto operator<=>(const LocalName&) const = default;

  std::string text() const { return formatted("step-{:06}-start-{}-process-{}", step, start, process); }
  static std::optional<LocalName> from(const std::string& text) {
    long long step = 0, start = 0, process = 0;
    if (std::sscanf(text.c_str(), "step-%18lld-start-%18lld-process-%18lld", &step, &start, &process) != 3) return {};
    const LocalName name{step, start, process};
    return name.text() == text ? std::optional(name) : std::nullopt;
  }
};

// Which local checkpoints belong to a run. run.json records it.
struct LocalHistory {
  static constexpr int64_t no_end = std::numeric_limits<int64_t>::max();
  struct Start {
    int64_t number, until;  // until: the last of its steps that is part of the run's past
    bool operator==(const Start&) const = default;
  };
  std::string run = {};            // empty: the run has saved none
  std::vector<Start> starts = {};  // in their order; the oldest are forgotten
  std::string out_dir = {};        // of the run; empty: not known

  bool operator==(const LocalHistory&) const = default;
  bool has(const LocalName& name) const {
    return std::ranges::any_of(starts, [&](const Start& s) { return s.number == name.start && name.step <= s.until; });
  }
  // A start goes on after this step. saves: it will save local checkpoints.
  void begin(int64_t step, bool saves) {
    constexpr size_t most = 16;
    for (Start& s : starts) s.until = std::min(s.until, step);
    std::erase_if(starts, [](const Start& s) { return s.until == 0; });
    if (!saves) return;
    if (run.empty()) run = random_token().substr(0, 16);
    starts.push_back({std::stoll(random_token().substr(0, 8), nullptr, 16), no_end});
    if (starts.size() > most) starts.erase(starts.begin());
  }

  nlohmann::ordered_json to_json() const {
    nlohmann::ordered_json all = nlohmann::ordered_json::array();
    for (const Start& s : starts)
      all.push_back({s.number, s.until == no_end ? nlohmann::ordered_json() : nlohmann::ordered_json(s.until)});
    return {{"run", run}, {"starts", all}, {"out_dir", out_dir}};
  }
  // file: for messages. null: none
  static LocalHistory from_json(const nlohmann::json& json, const std::string& file) {
    if (json.is_null()) return {};
    const auto require = [&](bool good) {
      CHECK(good, "{}: \"local\" is {}, which no version of train_gpt writes; the file is damaged", file, json);
    };
    const nlohmann::json run = member(json, "run"), starts = member(json, "starts"), out = member(json, "out_dir");
    require(run.is_string() && starts.is_array() && (out.is_string() || out.is_null()));
    LocalHistory history{run, {}, out.is_null() ? "" : out.get<std::string>()};
    require(history.run.size() == 16 && history.run.find_first_not_of("0123456789abcdef") == std::string::npos);
    for (const nlohmann::json& s : starts) {
      require(s.is_array() && s.size() == 2 && whole_number(s[0]) && (s[1].is_null() || whole_number(s[1])));
      history.starts.push_back({s[0], s[1].is_null() ? no_end : s[1].get<int64_t>()});
    }
    return history;
  }
};

// Of one run in --checkpoint-local DIR.
inline std::string local_directory(const std::string& dir, const std::string& run) {
  return formatted("{}/train_gpt-{}", dir, run);
}

// The names of the parts in a run's directory, in order; none if it cannot be read.
inline std::vector<LocalName> local_names(const std::string& directory) {
  std::vector<LocalName> names;
  std::error_code error;
  for (std::filesystem::directory_iterator entry(directory, error), end; !error && entry != end; entry.increment(error))
    if (const auto name = LocalName::from(entry->path().filename())) names.push_back(*name);
  std::sort(names.begin(), names.end());
  return names;
}

// The parts that a process of this start writes, and which of those on its disk stay.
class LocalParts {
 public:
  LocalParts(const std::string& dir, const LocalHistory& history, int64_t process, int64_t keep)
      : directory_(local_directory(dir, history.run)),
        history_(history),
        process_(process),
        keep_(static_cast<size_t>(keep)) {}

  const std::string& directory() const { return directory_; }
  LocalName name(int64_t step) const { return {step, history_.starts.back().number, process_}; }
  // What the manifest says besides.
  nlohmann::ordered_json facts(int64_t processes) const {
    return {{"run", history_.run}, {"start", history_.starts.back().number}, {"processes", processes}};
  }

  // Deletes what killed starts of the run left half written. None of them is alive: the out directory is locked.
  void remove_unfinished() const {
    const std::string own = formatted("-start-{}-", name(0).start);
    std::error_code none;
    if (!is_directory(directory_)) return;
    for (const std::string& one : names_in(directory_))
      if (one.starts_with(".tmp-") && one.find(own) == one.npos)
        std::filesystem::remove_all(directory_ + "/" + one, none);
  }
  // All processes have their part of this step. Deletes all but the newest `keep` steps: of this start, and as long as
  // it has fewer, of earlier ones. Other processes may have the same disk, and delete the same.
  void saved(int64_t step) {
    saved_.push_back(step);
    if (saved_.size() > keep_) saved_.pop_front();
    std::vector<int64_t> older;
    for (const LocalName& n : local_names(directory_))
      if (n.start != name(0).start && history_.has(n) && (older.empty() || older.back() != n.step))
        older.push_back(n.step);
    if (const size_t room = keep_ - saved_.size(); older.size() > room)
      older.erase(older.begin(), older.end() - static_cast<ptrdiff_t>(room));
    for (const LocalName& n : local_names(directory_)) {
      const bool own = n.start == name(0).start;
      const bool stays = own ? std::ranges::find(saved_, n.step) != saved_.end() || n.step > step
                             : history_.has(n) && std::ranges::find(older, n.step) != older.end();
      if (!stays) remove(n);
    }
  }
  // The run is complete, and its last checkpoint is in the out directory.
  void clear() const {
    for (const LocalName& n : local_names(directory_)) remove(n);
    std::error_code not_empty;
    std::filesystem::remove(directory_, not_empty);
  }

 private:
  void remove(const LocalName& name) const {
    const std::string path = directory_ + "/" + name.text(), gone = directory_ + "/.tmp-removed-" + name.text();
    std::error_code none;
    std::filesystem::rename(path, gone, none);  // first, so that half of it is never taken for a part
    if (!none) std::filesystem::remove_all(gone, none);
  }

  std::string directory_;
  LocalHistory history_;
  int64_t process_;
  size_t keep_;
  std::deque<int64_t> saved_;  // by this start: the newest, which are complete
};

}  // namespace llmc
