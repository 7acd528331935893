// run_dir.h: the directory of one run: the run's options (run.json), its one writer (a lock), the checkpoint to resume
// from, and where metrics.jsonl is truncated.
#pragma once
#include <climits>

#include "core/files.h"
#include "core/log.h"
#include "run/checkpoints/checkpoint.h"
#include "run/checkpoints/resume_point.h"
#include "run/checkpoints/retention.h"
#include "run/checkpoints/run_record.h"
#include "run/news.h"

namespace llmc {

// The lock of an out directory. The process that holds OUT/.lock is its only writer, provided that the lock is still
// the file of that name: a directory may be moved or deleted while a run is using it.
class DirectoryLock {
 public:
  // False: another process holds it.
  bool take(const std::string& directory) {
    const std::string file = directory + "/.lock";
    const int error = lock_.take(file);  // again if a --restart has moved the directory meanwhile
    CHECK(error != ELOOP, "--out-dir {}: {} is a symbolic link, expected a file: remove it", directory, file);
    CHECK(error == 0 || error == EWOULDBLOCK, "--out-dir {}: cannot write there: {}", directory, std::strerror(error));
    return error == 0;
  }
  // A warning that the lock, although taken, keeps no second run out. "": it does.
  std::string warning() const { return lock_.warning("run"); }
  bool in_place() const { return lock_.in_place(); }

  // The directory where the held lock is now, for example after a move; empty: none, or the system does not say.
  std::string directory() const {
    std::array<char, PATH_MAX> text;
    const ssize_t n = ::readlink(formatted("/proc/self/fd/{}", lock_.fd()).c_str(), text.data(), text.size());
    const std::string name(text.data(), static_cast<size_t>(std::max<ssize_t>(n, 0)));
    return n > 0 && same_file(lock_.fd(), name) ? std::filesystem::path(name).parent_path().string() : "";
  }

 private:
  FileLock lock_;
};

// Files that a start makes before it is sure to begin. They are removed unless it keeps them, so that a rejected start
// leaves nothing behind.
class NewFiles {
 public:
  NewFiles() = default;
  NewFiles(const NewFiles&) = delete;
  NewFiles& operator=(const NewFiles&) = delete;
  ~NewFiles() {
    for (auto path = paths_.rbegin(); path != paths_.rend(); ++path) ::remove(path->c_str());  // directories if empty
  }
  // Notes that this file or directory will be made, with any missing directories above it.
  void note(const std::filesystem::path& path) {
    if (path.empty() || path_exists(path)) return;
    note(path.parent_path());
    paths_.push_back(path);
  }
  void keep() { paths_.clear(); }

 private:
  std::vector<std::filesystem::path> paths_;
};

class RunDirectory {
 public:
  // Creates the directory if needed and locks it. Rejects one that holds anything but a run with these options or a run
  // that completed no step.
  RunDirectory(Log& log, const Options& o) : path_(o.out_dir) {
    std::error_code error, unknown;
    traces_.note(path_);
    std::filesystem::create_directories(path_, error);
    CHECK(!error && std::filesystem::is_directory(path_, unknown), "--out-dir {}: cannot create this directory: {}",
          path_, error && !std::filesystem::exists(path_, unknown) ? error.message() : "a file has this name");
    if (!path_exists(run_file()) && checkpoint_steps(path_).empty() && !(o.restart && path_exists(metrics_file())))
      for (const std::string& name : names_in(path_))
        CHECK(name.starts_with(".tmp-") || nothing_in(name),
              "--out-dir {} holds {}, which does not belong to a run: choose another directory, or empty it{}", path_,
              name, path_exists(metrics_file()) ? "; if an older version left it, --restart moves it aside" : "");
    lock();
    const bool again = requeued();
    if (!again && o.restart && move_aside(o, log)) lock();
    if (again && !left_out_to_resume(o).empty() && !checkpoint_steps(path_).empty())
      log.line(
          formatted("notice: Slurm has started this job again: it goes on{} from where it was", left_out_to_resume(o)));
    if (const std::string warning = lock_.warning(); !warning.empty()) log.line(warning);
    if (has_steps()) {  // a run without a step may have been started with mistyped options
      CHECK(o.resume != "never" || again,
            "--resume never: --out-dir {} already holds a run; choose another one, or move it aside with --restart",
            path_);
      if (path_exists(run_file())) {
        record_ = read_run_record(run_file());
        require_parent(run_file(), record_.parent, o.branch_from, path_);  // before its options, which may differ
        require_same_options(run_file(), record_.options, o);
        if (checkpoint_steps(path_).empty() && o.branch_from.empty())
          require_same_files(run_file(), record_.options, o);
        leave_local_checkpoints_of_original(log, o);
      }
    } else if (path_exists(run_file())) {  // if the options are the same otherwise, so is the order of the samples
      const nlohmann::json options = read_run_record(run_file()).options;
      if (options.contains("--shuffle") && option_changes(run_file(), options, o).refused.empty())
        shuffled_before_ = shuffled(options);
    }
    for (const std::string& name : names_in(path_))  // left by a killed run; we hold the lock
      if (name.starts_with(".tmp-")) std::filesystem::remove_all(path_ + "/" + name, error);
  }

  // The checkpoint that --resume asks for; none: a new run.
  std::optional<ResumePoint> resume_point(Log& log, const Options& o, const CheckpointCheck& check) {
    if (o.resume == "auto" || o.resume == "never" || (requeued() && !checkpoint_steps(path_).empty())) {
      auto newest = newest_checkpoint(
          path_, [&](const std::string& warning) { log.line("WARNING: " + warning); }, check);
      for (const int64_t step : checkpoint_steps(path_))
        if (newest && step > newest->step) log.line("WARNING: " + set_aside(step, "damaged"));
      if (newest) require_parent(newest->path + "/trainer.json", parent_of(*newest), o.branch_from, path_);
      else if (recorded()) require_parent(run_file(), record_.parent, o.branch_from, path_);
      if (newest) take_options(log, *newest, o);
      else if (!o.branch_from.empty() || !record_.parent.is_null()) return branch_point(log, o, check);
      else if (recorded()) take_recorded_options(log, o);
      return newest;
    }
    const auto [asked, step] =
        named_checkpoint("--resume", o.resume, "auto, never, or a checkpoint's directory", check);
    const std::vector<int64_t> steps = checkpoint_steps(path_);
    const std::string own = checkpoint_path(path_, step);
    std::error_code none;
    const bool is_own = std::filesystem::equivalent(asked, own, none);
    CHECK(
        steps.empty() || is_own,
        "--resume {}: --out-dir {} holds checkpoints of its own, the last of step {}: choose another --out-dir; or, if "
        "that one belongs to this run, move it into {}",
        o.resume, path_, steps.back(), path_);
    CHECK(steps.empty() || steps.back() <= step,
          "--resume {}: --out-dir {} holds a later checkpoint, of step {}: choose another --out-dir, or move it away",
          o.resume, path_, steps.back());
    ResumePoint point{is_own ? own : asked, step, read_json(asked + "/trainer.json")};
    take_options(log, point, o);
    return point;
  }

  // False: the run to resume takes its samples in file order.
  bool shuffled_before() const { return shuffled_before_; }

  // Makes this the directory of a run with these options, which begins at its first step or resumes at a checkpoint.
  // Returns what metrics.jsonl holds up to there; nothing if the run is new, since lines left by another run are not
  // its results.
  MetricsKept claim(Log& log, const Options& o, const std::optional<ResumePoint>& resume) {
    traces_.keep();
    const bool ours = (resume || !rollbacks().empty()) && has_steps();
    const MetricsKept kept = ours ? truncate_metrics(log, resume) : MetricsKept();
    if (!ours) replace(metrics_file(), ""), record_.local = {};
    record_.local.begin(resume && resume->begin == Begin::resume ? resume->step : 0, !o.checkpoint_local.empty());
    std::error_code none;
    const std::string directory = std::filesystem::canonical(path_, none);
    record_.local.out_dir = utf8_fault(directory) ? "" : directory;
    write_run_file(o);
    return kept;
  }

  const std::vector<Rollback>& rollbacks() const { return record_.rollbacks; }
  const LocalHistory& local() const { return record_.local; }

  // Makes a directory in which all files of a checkpoint lie one of this step, in the place of a damaged one.
  void adopt(Log& log, int64_t step, const std::string& temporary, const std::string& manifest) const {
    const std::string path = checkpoint_path(path_, step);
    write_text_durably(temporary + "/manifest.json", manifest);
    fsync_directory(temporary);
    if (path_exists(path)) log.line("WARNING: " + set_aside(step, "damaged"));
    rename_path(temporary, path);
    fsync_directory(path_);
  }

  // The newest intact checkpoint up to `step` to which a rollback may return, but none before `first`; none: there is
  // none.
  std::optional<ResumePoint> rollback_point(Log& log, int64_t first, int64_t step, const CheckpointCheck& check) const {
    std::vector<int64_t> steps = checkpoint_steps(path_);
    for (; !steps.empty() && steps.back() >= first; steps.pop_back()) {
      const std::string path = checkpoint_path(path_, steps.back());
      if (steps.back() > step) continue;
      if (const std::optional<std::string> fault = check(path, Part::all)) {
        log.line("WARNING: skipping a damaged checkpoint: " + *fault);
        continue;
      }
      const nlohmann::json trainer = read_json(path + "/trainer.json");
      if (steps.back() == step || member(trainer, "rollback_point") == steps.back())
        return ResumePoint{path, steps.back(), trainer};
    }
    return std::nullopt;
  }
  // The run goes on after this step, as if it had not gone further: its later checkpoints are renamed first, so that
  // no start resumes from one. What earlier rollbacks left behind is deleted, unless `keep`. claim() records them.
  void roll_back(Log& log, int64_t step, const std::vector<Rollback>& rollbacks, bool keep) {
    for (const std::string& name : names_in(path_))
      if (std::error_code none; !keep && name.starts_with("rolled-back-step-"))
        if (std::filesystem::remove_all(path_ + "/" + name, none) > 0 && !none)
          log.line(formatted("notice: removed {}/{}, which an earlier rollback left behind", path_, name));
    for (const int64_t later : checkpoint_steps(path_))
      if (later > step) log.line("notice: " + set_aside(later, "rolled-back"));
    fsync_directory(path_);
    retention_.forget();
    record_.rollbacks = rollbacks;
  }

  // The directory may have been removed during the run: its checkpoint then needs a new run.json.
  void ensure_run_file(const Options& o) const {
    if (!path_exists(run_file())) write_run_file(o);
  }

  // The fate of the directory during the run, with a text for the user: compares the held lock with the file of that
  // name. If they differ and nobody holds the other one, the directory is taken again; if another run is or was there,
  // it is lost: no directory has two writers. NewsKind::save: it is made anew.
  News look_again(const Options& o) try {
    if (lock_.in_place()) return {};
    const std::string now = moved_to(), what = formatted("--out-dir {} was {} while the run was in it", path_,
                                                         now.empty() ? "deleted" : "moved to " + now);
    std::filesystem::create_directories(path_);
    DirectoryLock again;
    if (!again.take(path_)) return {NewsKind::lost, what + ", and another run is writing to it now"};
    if (path_exists(run_file())) {
      if (!claimed_ || !claimed_->in_place()) return {NewsKind::lost, what + ", and another run has begun there"};
      lock_ = std::move(again);
      return {NewsKind::none, formatted("WARNING: {}/.lock was deleted; it is made again", path_)};
    }
    write_run_file(o);
    lock_ = std::move(again);
    retention_.forget();
    return {NewsKind::save, formatted("WARNING: {}; it is made again, and the run goes on there{}", what,
                                      now.empty() ? "" : formatted(": its checkpoints so far are in {}", now))};
  } catch (const std::exception&) {  // someone may still be deleting it: retried at the next look
    return {};
  }
  // Where the directory that this run still holds is now; empty: nowhere.
  std::string moved_to() const { return lock_.directory(); }

  Retention& retention() { return retention_; }

  // Drops what is left of the last line of metrics.jsonl where a run was killed after its last checkpoint.
  void drop_incomplete_line() const {
    if (!path_exists(metrics_file())) return;
    const File file = File::append(metrics_file());
    const int64_t size = file.size();
    int64_t end = size;  // of the last line that is whole
    for (std::string block(1 << 16, '\0'); end > 0;) {
      const int64_t n = std::min(end, std::ssize(block));
      file.read_at(block.data(), n, end - n);
      const size_t line_break = std::string_view(block).substr(0, static_cast<size_t>(n)).rfind('\n');
      end -= line_break == std::string_view::npos ? n : n - 1 - static_cast<int64_t>(line_break);
      if (line_break != std::string_view::npos) break;
    }
    if (end < size) file.truncate(end);
  }

  // Whether metrics.jsonl has the validation of a step.
  bool validated(int64_t step) const { return metrics_until(step).validated; }

 private:
  std::string run_file() const { return path_ + "/run.json"; }
  std::string metrics_file() const { return path_ + "/metrics.jsonl"; }

  void write_run_file(const Options& o) const {
    replace(run_file(), run_record_text(o, record_));
    claimed_ = std::make_unique<const File>(File::open_read(run_file()));
  }

  // Replaces the contents of a file in the directory: after a crash it has either the old or the new ones.
  void replace(const std::string& file, const std::string& text) const {
    const std::string temporary = path_ + "/.tmp-" + std::filesystem::path(file).filename().string();
    write_text_durably(temporary, text);
    rename_path(temporary, file);
    fsync_directory(path_);
  }

  MetricsKept metrics_until(int64_t step, OwnValidation own = OwnValidation::keep) const {
    if (!path_exists(metrics_file())) return {};
    File::open_own(metrics_file());
    return llmc::metrics_until(read_text(metrics_file(), std::numeric_limits<int64_t>::max()), step, own);
  }

  // Truncates metrics.jsonl after the lines of a checkpoint's step; none: of those before the first. Damaged lines are
  // moved to a separate file.
  MetricsKept truncate_metrics(Log& log, const std::optional<ResumePoint>& resume) const {
    // In these cases, best_validation does not include the validation of this step.
    const bool later = !resume || resume->begin == Begin::branch || member(resume->trainer, "validated") == false;
    MetricsKept kept = metrics_until(resume ? resume->step : 0, later ? OwnValidation::repeat : OwnValidation::keep);
    const std::string copy = path_ + "/metrics-damaged.txt";
    if (!kept.damaged.empty()) {
      File file = File::append(copy);
      file.write(kept.damaged.data(), std::ssize(kept.damaged));
      file.sync_and_close();
    }
    const std::optional<int64_t> begin = whole_number(member(record_.parent, "step"));
    if (resume && resume->path == checkpoint_path(path_, resume->step))
      if (const auto fault = metrics_fault(kept, resume->step, metrics_file(), copy, begin); !fault.empty())
        log.line("WARNING: " + fault);
    replace(metrics_file(), kept.lines);
    return kept;
  }

  // Takes the options from a checkpoint's trainer.json, which has a checksum, or from run.json if it has none.
  void take_options(Log& log, const ResumePoint& from, const Options& o) {
    const nlohmann::json options = member(from.trainer, "options");
    check_resumed_options(log, from.path + "/trainer.json", options, o, from.begin);
    shuffled_before_ = shuffled(options);
    record_.parent = parent_of(from);
  }
  void take_recorded_options(Log& log, const Options& o) {
    CHECK(o.shuffle || record_.options.contains("--shuffle"),
          "{} does not say whether the run shuffles: give --shuffle, or --no-shuffle", run_file());
    check_resumed_options(log, run_file(), record_.options, o);
    shuffled_before_ = shuffled(record_.options);
  }

  // The checkpoint of another run at which this one begins: the one that --branch-from names, or, before the branch has
  // a checkpoint of its own, the one that it began with.
  ResumePoint branch_point(Log& log, const Options& o, const CheckpointCheck& check) {
    const nlohmann::json parent = record_.parent, path = parent.is_object() ? member(parent, "path") : parent;
    const bool given = !o.branch_from.empty();
    CHECK(given || path.is_string(), "{}: \"parent\" is {}, expected a checkpoint; the file is damaged", run_file(),
          parent);
    const auto [asked, step] =
        named_checkpoint(given ? "--branch-from" : "the parent in " + run_file() + ",",
                         given ? o.branch_from : path.get<std::string>(), "a checkpoint's directory", check);
    ResumePoint point{asked, step, read_json(asked + "/trainer.json"), Begin::branch};
    if (recorded()) require_parent(run_file(), parent, asked, path_);
    take_options(log, point, o);
    return point;
  }

  // Whether there was a run.json, of a run that has completed a step.
  bool recorded() const { return !record_.options.is_null(); }
  // Whether the run has done anything worth keeping.
  bool has_steps() const {
    return !checkpoint_steps(path_).empty() || metrics_until(std::numeric_limits<int64_t>::max()).train_lines > 0 ||
           (path_exists(run_file()) && !read_run_record(run_file()).rollbacks.empty());
  }

  // Two directories must not delete each other's local checkpoints: those of a run whose directory was copied stay with
  // the original, if that is still where run.json says.
  void leave_local_checkpoints_of_original(Log& log, const Options& o) {
    const std::string& original = record_.local.out_dir;
    std::error_code error;
    if (original.empty() || std::filesystem::equivalent(original, path_, error) || error) return;  // it was moved
    try {
      const std::string file = original + "/run.json";
      if (!path_exists(file) || read_run_record(file).local.run != record_.local.run) return;
    } catch (const Error&) {
      return;  // another one has taken its place, or it is damaged
    }
    log.line(
        formatted("notice: --out-dir {} is a copy of {}, to which the local checkpoints so far belong: this run "
                  "takes none of them{}",
                  path_, original, o.checkpoint_local.empty() ? "" : ", and makes its own"));
    record_.local = {};
  }

  // Whether this is an empty file, such as the lock, or has disappeared.
  bool nothing_in(const std::string& name) const {
    struct stat info {};
    if (::lstat((path_ + "/" + name).c_str(), &info) != 0) return errno == ENOENT;
    return S_ISREG(info.st_mode) && info.st_size == 0;
  }

  void lock() {
    traces_.note(path_ + "/.lock");
    CHECK(lock_.take(path_),
          "--out-dir {}: another run is writing to it; wait until it ends, or choose another directory", path_);
  }

  // Renames a checkpoint, "damaged" or "rolled-back", to make room for a new one of the same step. Returns a text for
  // the user.
  std::string set_aside(int64_t step, const char* why) const {
    const std::string from = checkpoint_path(path_, step);
    std::string to = formatted("{}/{}-step-{:06}", path_, why, step);
    for (int i = 2; path_exists(to); ++i) to = formatted("{}/{}-step-{:06}-{}", path_, why, step, i);
    rename_path(from, to);
    return formatted("renamed {} to {}", from, to);
  }

  std::string path_;
  // What run.json says, if the run has completed a step; then what this start will write there besides its options:
  // the parent (from resume_point() on), the rollbacks (roll_back()) and the local checkpoints (claim()).
  RunRecord record_;
  bool shuffled_before_ = true;
  DirectoryLock lock_;
  Retention retention_{path_};                   // after lock_: it may still be deleting
  NewFiles traces_;                              // removed before the lock is released
  mutable std::unique_ptr<const File> claimed_;  // run.json as this run wrote it
};

}  // namespace llmc
