// run_dir.h: the directory of one run: the options that it belongs to (run.json), its one writer (a lock), the
// checkpoint to resume from, the checkpoints to keep, and where metrics.jsonl is truncated.
#pragma once
#include <sys/file.h>

#include <filesystem>
#include <functional>
#include <limits>
#include <nlohmann/json.hpp>
#include <optional>
#include <sstream>
#include <string>
#include <vector>

#include "core/log.h"
#include "run/checkpoint.h"
#include "run/options_print.h"

namespace llmc {

// The checkpoint that a run resumes from.
struct ResumePoint {
  std::string path;
  int64_t step;
  nlohmann::json trainer;  // its trainer.json
};

// The recorded options of a run, with --local-ranks resolved for this machine.
inline std::vector<OptionText> recorded_options(Options o) {
  o.local_ranks = o.ranks;
  return option_texts(o);
}

// Refuses changes of options that must match; logs changes of others.
inline void check_resumed_options(Log& log, const std::string& file, const nlohmann::json& then, const Options& now) {
  CHECK(then.is_object(), "{}: the options are missing; the file is damaged", file);
  std::string broken;
  for (const OptionText& o : recorded_options(now)) {
    const nlohmann::json found =
        then.value(o.name, nlohmann::json(o.usual));  // absent in an older version: the default
    const std::string before = found.is_string() ? found.get<std::string>() : found.dump();
    if (before == o.text || o.rule == ResumeRule::free) continue;
    const std::string change = formatted("{} was '{}' and is now '{}'", o.name, shown(before), o.text);
    if (o.rule == ResumeRule::warn) log.line("notice: " + change);
    else broken += "\n  " + change;
  }
  CHECK(broken.empty(),
        "{} belongs to a run with other options:{}\nuse the same options to resume it, or choose another --out-dir",
        file, broken);
}

inline nlohmann::ordered_json options_json(const Options& o) {
  nlohmann::ordered_json json;
  for (const OptionText& t : recorded_options(o)) json[t.name] = t.text;
  return json;
}

// The newest complete checkpoint of a run directory; damaged ones are skipped with a warning each. None: there are no
// checkpoints. It is an error if all are damaged.
inline std::optional<ResumePoint> newest_checkpoint(const std::string& out_dir,
                                                    const std::function<void(const std::string&)>& warn) {
  std::vector<int64_t> steps = checkpoint_steps(out_dir);
  std::string faults;
  for (; !steps.empty(); steps.pop_back()) {
    const std::string path = checkpoint_path(out_dir, steps.back());
    const std::optional<std::string> fault = checkpoint_fault(path);
    if (!fault) return ResumePoint{path, steps.back(), read_json(path + "/trainer.json")};
    warn("skipping a damaged checkpoint: " + *fault);
    faults += "\n  " + *fault;
  }
  CHECK(faults.empty(),
        "--out-dir {}: all of its checkpoints are damaged; nothing was overwritten:{}\nto start a new run, remove the "
        "directory or choose another one",
        out_dir, faults);
  return std::nullopt;
}

class RunDirectory {
 public:
  // Creates the directory if needed and locks it. Refuses one that holds anything but a run with these options or a run
  // that completed no step.
  RunDirectory(Log& log, const Options& o) : path_(o.out_dir) {
    std::error_code error, unknown;
    std::filesystem::create_directories(path_, error);
    CHECK(!error && std::filesystem::is_directory(path_, unknown), "--out-dir {}: cannot create this directory: {}",
          path_, error ? error.message() : "a file has this name");
    if (!path_exists(run_file()))
      for (const std::string& name : names_in(path_))
        CHECK(name.starts_with(".tmp-") || nothing_in(name),
              "--out-dir {} holds {}, which does not belong to a run: choose another directory, or empty it", path_,
              name);
    lock();
    if (path_exists(run_file())) {
      const nlohmann::json options = read_json(run_file()).value("options", nlohmann::json());
      if (has_steps()) {
        CHECK(o.resume != "never", "--resume never: --out-dir {} already holds a run; choose another one, or remove it",
              path_);
        check_resumed_options(log, run_file(), options, o);
      } else {  // perhaps started with mistyped options
        std::filesystem::remove(run_file(), error);
      }
    }
    for (const std::string& name : names_in(path_))  // left by a killed run; we hold the lock
      if (name.starts_with(".tmp-")) std::filesystem::remove_all(path_ + "/" + name, error);
  }
  RunDirectory(const RunDirectory&) = delete;
  RunDirectory& operator=(const RunDirectory&) = delete;

  // The checkpoint that --resume asks for; none: a new run.
  std::optional<ResumePoint> resume_point(Log& log, const Options& o) const {
    if (o.resume == "auto" || o.resume == "never") {
      auto newest = newest_checkpoint(path_, [&](const std::string& warning) { log.line("WARNING: " + warning); });
      for (const int64_t step : checkpoint_steps(path_))
        if (newest && step > newest->step) set_aside(log, step);
      return newest;
    }
    // The same directory has many spellings: links, a trailing slash.
    std::error_code error, none;
    const std::filesystem::path asked = std::filesystem::canonical(o.resume, error);
    const std::optional<int64_t> step = checkpoint_step(asked);
    const std::vector<int64_t> inside = step || error ? std::vector<int64_t>() : checkpoint_steps(asked);
    CHECK(step, "--resume {}: {}; expected auto, never, or a checkpoint's directory, {}", o.resume,
          error ? error.message() : std::string("this is not a checkpoint"),
          inside.empty() ? "OUT/step-NNNNNN" : checkpoint_path(o.resume, inside.back()));
    if (const auto fault = checkpoint_fault(asked))
      throw Error(formatted("--resume {}: this checkpoint is damaged: {}", o.resume, *fault));
    const std::vector<int64_t> steps = checkpoint_steps(path_);
    const std::string own = checkpoint_path(path_, *step);
    const bool is_own = std::filesystem::equivalent(asked, own, none);
    CHECK(steps.empty() || steps.back() < *step || (steps.back() == *step && is_own),
          "--resume {}: --out-dir {} holds {} checkpoint, of step {}: choose another --out-dir, or move it away",
          o.resume, path_, steps.back() == *step ? "another" : "a later", steps.back());
    ResumePoint point{is_own ? own : asked.string(), *step, read_json(asked.string() + "/trainer.json")};
    check_resumed_options(log, o.resume + "/trainer.json", point.trainer.value("options", nlohmann::json()), o);
    return point;
  }

  // Makes this the directory of a run with these options.
  void claim(const Options& o) const {
    if (path_exists(run_file())) return;
    const std::string temporary = path_ + "/.tmp-run.json";
    write_text_durably(temporary, nlohmann::ordered_json{{"format", 1}, {"options", options_json(o)}}.dump(1) + "\n");
    std::error_code error;
    std::filesystem::rename(temporary, run_file(), error);
    CHECK(!error, "cannot rename {} to {}: {}", temporary, run_file(), error.message());
    fsync_directory(path_);
  }

  // Deletes checkpoints except the newest `keep` (0: keeps all), multiples of `keep_every`, and that of step `best`.
  void prune(int64_t keep, int64_t keep_every, std::optional<int64_t> best) const {
    if (keep == 0) return;
    std::vector<int64_t> steps = checkpoint_steps(path_);
    steps.resize(steps.size() - std::min(steps.size(), static_cast<size_t>(keep)));
    for (const int64_t step : steps)
      if (!(keep_every > 0 && step % keep_every == 0) && step != best) remove(step);
  }

  // OUT/best links to the checkpoint with the best validation loss.
  void link_best(int64_t step) const {
    const std::string temporary = path_ + "/.tmp-best";
    std::error_code error;
    std::filesystem::remove(temporary, error);
    std::filesystem::create_symlink(std::filesystem::path(checkpoint_path(path_, step)).filename(), temporary, error);
    if (!error) std::filesystem::rename(temporary, path_ + "/best", error);
    CHECK(!error, "cannot link {}/best: {}", path_, error.message());
  }

  // Truncates metrics.jsonl after the lines of `step` and drops incomplete lines; returns whether it holds a validation
  // of that step.
  bool cut_metrics(int64_t step) const {
    const std::string temporary = path_ + "/.tmp-metrics.jsonl";
    const Metrics metrics = metrics_until(step);
    write_text_durably(temporary, metrics.lines);
    std::error_code error;
    std::filesystem::rename(temporary, metrics_file(), error);
    CHECK(!error, "cannot rename {} to {}: {}", temporary, metrics_file(), error.message());
    return metrics.validated;
  }
  bool validated(int64_t step) const { return metrics_until(step).validated; }

 private:
  std::string run_file() const { return path_ + "/run.json"; }
  std::string metrics_file() const { return path_ + "/metrics.jsonl"; }

  struct Metrics {
    std::string lines;       // complete ones, of no later step
    bool validated = false;  // whether `step` itself was
  };
  Metrics metrics_until(int64_t step) const {
    Metrics metrics;
    if (!path_exists(metrics_file())) return metrics;
    std::istringstream lines(read_text(metrics_file()));
    for (std::string line; std::getline(lines, line);) {
      const nlohmann::json object = try_parse_json(line).value_or(nullptr);
      const nlohmann::json at = object.is_object() ? object.value("step", nlohmann::json()) : nlohmann::json();
      if (!at.is_number_integer() || at > step) continue;
      metrics.validated |= at == step && object.value("kind", nlohmann::json()) == "val";
      metrics.lines += line + "\n";
    }
    return metrics;
  }

  // Whether the run has done anything worth keeping.
  bool has_steps() const {
    return !checkpoint_steps(path_).empty() ||
           metrics_until(std::numeric_limits<int64_t>::max()).lines.find("\"kind\":\"train\"") != std::string::npos;
  }

  // Whether this is an empty file, such as the lock, or is gone by now.
  bool nothing_in(const std::string& name) const {
    struct stat info {};
    if (::lstat((path_ + "/" + name).c_str(), &info) != 0) return errno == ENOENT;
    return S_ISREG(info.st_mode) && info.st_size == 0;
  }

  void lock() {
    const std::string file = path_ + "/.lock";
    lock_.fd = ::open(file.c_str(), O_RDWR | O_CREAT | O_CLOEXEC, 0644);
    CHECK(lock_.fd >= 0, "--out-dir {}: cannot write there: {}", path_, std::strerror(errno));
    const bool locked = flock(lock_.fd, LOCK_EX | LOCK_NB) == 0;
    CHECK(locked || errno != EWOULDBLOCK,
          "--out-dir {}: another run is writing to it; wait for its end, or choose another directory", path_);
  }

  // Renames a damaged checkpoint to make room for the one that will be written again.
  void set_aside(Log& log, int64_t step) const {
    const std::string from = checkpoint_path(path_, step);
    std::string to = formatted("{}/damaged-step-{:06}", path_, step);
    for (int i = 2; path_exists(to); ++i) to = formatted("{}/damaged-step-{:06}-{}", path_, step, i);
    std::error_code error;
    std::filesystem::rename(from, to, error);
    CHECK(!error, "cannot rename {} to {}: {}", from, to, error.message());
    log.line(formatted("WARNING: renamed {} to {}", from, to));
  }

  void remove(int64_t step) const {
    const std::string path = checkpoint_path(path_, step), gone = formatted("{}/.tmp-removed-{:06}", path_, step);
    std::error_code error;
    std::filesystem::rename(path, gone, error);  // first, so that half of it is never taken for a checkpoint
    if (!error) std::filesystem::remove_all(gone, error);
    CHECK(!error, "cannot remove {}: {}", path, error.message());
  }

  std::string path_;
  struct LockFile {
    int fd = -1;
    ~LockFile() {
      if (fd >= 0) ::close(fd);  // which releases it
    }
  } lock_;
};

}  // namespace llmc
