// checkpoint_saver.h: saves a run's checkpoints, retries those that could not be written, deletes old ones; ends a run
// whose replicas have diverged, because nobody knows what it trains.
#pragma once
#include "core/clock.h"
#include "core/environment.h"
#include "core/json.h"
#include "run/checkpoints/checkpoint_write.h"
#include "run/checkpoints/local_copies.h"
#include "run/checkpoints/local_parts.h"
#include "run/checkpoints/progress.h"
#include "run/checkpoints/run_dir.h"
#include "run/job.h"
#include "run/news.h"
#include "run/reports/next_steps.h"
#include "run/reports/step_report.h"
#include "shard/replica_check.h"

namespace llmc {

// rule: the options and the results so far say so, and in every run alike; clock: for --checkpoint-minutes alone; end:
// the run ends early.
enum class Because : uint8_t { rule, clock, end };

// Which checkpoints: those in the out directory, or those on the nodes' own disks (--checkpoint-local).
enum class Where : uint8_t { out, local };

struct Save {
  OnFailure on_failure = OnFailure::fail;
  Because because = Because::rule;
  bool best = false;  // it has the best validation loss so far
  bool wait = true;   // until it is written
  Where where = Where::out;
};

namespace detail {

// Where this stage of a recipe and later ones set lr: "recipe.toml:5".
inline std::vector<std::string> own_rates_of_stages(const Job& job) {
  const auto place_of_lr = [](const Options& o) {
    const auto found = o.config_lines.find("--lr");
    return found == o.config_lines.end() ? std::string() : found->second;
  };
  std::vector<std::string> places;
  const std::vector<RecipeStage>& stages = job.course.recipe().stages;
  for (size_t i = job.stretch().stage; i < stages.size(); ++i)
    if (const std::string place = place_of_lr(stages[i].options); place != place_of_lr(job.asked))
      places.push_back(place);
  return places;
}

// Ends the run on all ranks if their copies of the model's state differ. last: the last checkpoint; empty: none
inline void require_equal_copies(int64_t step, Run& run, const Place& place, const std::string& last,
                                 std::optional<size_t> only) {
  const std::string process = place.processes > 1 ? formatted(" of process {}", place.process) : "",
                    me = formatted("rank {}{} on {}", run.groups.rank(), process, host_name());
  std::vector<SharedByAll> shared;
  const std::vector<float> biases = run.trainer.expert_biases();
  if (!biases.empty() && !only) shared.push_back({"the biases of the experts", biases});
  const std::optional<std::string> differ =
      diverged_copies(run.trainer.state(), me, run.trainer.stream(), shared, only);
  if (!differ) return;
  throw SharedError(
      formatted(
          "the replicas have diverged by step {}: {}. They began alike and were updated alike, so a bit has flipped "
          "in the memory of one of them, or a processor computes incorrectly. No checkpoint of it is written; {}",
          step, *differ,
          last.empty() ? "there is none to go back to: test these machines, then begin again"
                       : formatted("the last good one is {}: test these machines, then resume from there", last)),
      ExitStatus::diverged);
}

}  // namespace detail

// How a run that diverged goes on from its last checkpoint (last_saved; empty: none), or from the one at which this
// branch began.
inline std::string way_back(const Job& job, const std::string& last_saved, const std::string& program) {
  const std::string last =
      !last_saved.empty() || job.parent.is_null() ? last_saved : job.parent["path"].get<std::string>();
  if (last.empty()) return "no checkpoint was written";
  const std::vector<std::string> places = detail::own_rates_of_stages(job);
  const bool other_shards = last == job.resumed_from &&
                            std::ranges::any_of(job.data_changes, [](const DataChange& c) { return !c.shard.empty(); });
  const std::string command =
      branch_command(job.asked, last, other_shards ? DataChanged::accept : DataChanged::refuse, program);
  if (places.empty())
    return formatted("the last checkpoint is {}; this continues from it with half the --lr:\n{}", last, command);
  return formatted(
      "the last checkpoint is {}; {}, which --lr does not change: lower {} in a copy and give that to --stages. This "
      "command continues from the checkpoint, with half the --lr:\n{}",
      last, either(places, "and") + (places.size() == 1 ? " sets its own rate" : " set their own rates"),
      places.size() == 1 ? "it" : "them", command);
}

// One per rank; all ranks call save() and settle() together.
class CheckpointSaver {
 public:
  // directory: rank 0's out directory; null on the other ranks.
  CheckpointSaver(const Job& job, RunDirectory* directory, Log& log, StepReport& report, StopCondition& stop)
      : job_(job), o_(job.options), directory_(directory), log_(log), report_(report), stop_(stop) {}

  const std::string& last() const { return last_; }  // in the out directory; empty: none
  void resumed_from(const std::string& path) { last_ = path; }
  void took(double seconds) { writes_.add(seconds); }  // those of earlier stretches, usually
  // on_lost(step): the checkpoint of this step, with the best validation loss by then, could not be written.
  void when_best_is_lost(std::function<void(int64_t)> on_lost) { best_is_lost_ = std::move(on_lost); }
  // on_change(whether this rank is writing a checkpoint)
  void when_saving(std::function<void(bool)> on_change) { saving_ = std::move(on_change); }
  bool retries_at(int64_t step) const {
    const bool retrying = pending_ && pending_->how.where == Where::out;
    return retry_.at > 0 && !retrying && step >= retry_.at;
  }
  // Not at this step, but later.
  void put_off_retry(int64_t step) {
    if (retries_at(step)) retry_.at = step + retry_.pause, retry_.pause *= 2;
  }
  Because retries_because() const { return retry_.because; }

  // Is it time to save, by this rank's clock? Rank 0 asks, and tells the others.
  bool clock_says() const {
    const double minutes = o_.minutes_between_checkpoints();
    return minutes > 0 && retry_.at == 0 && !pending_ && seconds_since(saved_at_) >= 60 * minutes;
  }

  // From now on saves local checkpoints too (--checkpoint-local), as the start that rank 0's run.json names last. A
  // process's first rank makes its part, and has it copied to another process's disk.
  void save_locally(const Groups& groups, World& world) {
    const std::string mine = directory_ != nullptr ? directory_->local().to_json().dump() : "";
    const LocalHistory history = LocalHistory::from_json(
        parse_json(groups[GroupName::control].all_gather_text("local checkpoints", mine)[0], "rank 0"), "run.json");
    leads_ = groups.rank() == o_.place.first_rank();
    local_.emplace(o_.checkpoint_local, history, o_.place.process, o_.checkpoint_local_keep);
    if (leads_) local_->remove_unfinished();
    if (o_.checkpoint_local_copies == OnOff::on) copy_locally(groups, world);
  }
  // Is a local checkpoint due after this step? After one that could not be written, 1, 2, 4 ... are left out.
  bool local_due(int64_t step) const {
    return local_ && step % o_.checkpoint_local_every == 0 && step >= local_retry_.at;
  }

  // Rank 0 checks whether the out directory is still the run's.
  News look_at_directory() {
    if (directory_ == nullptr || out_dir_ != o_.out_dir) return {};
    const News found = directory_->look_again(job_.asked);
    if (found.kind == NewsKind::lost) return found;
    if (!found.text.empty()) log_.line(found.text);
    log_.ensure_in_place();
    return {found.kind};
  }
  // From now on, saves checkpoints to where the lost directory is now. Returns whether it still exists.
  bool follow_directory(const Run& run) {
    const std::string now = directory_ != nullptr ? directory_->moved_to() : "";
    out_dir_ = run.groups[GroupName::control].all_gather_text("moved to", now)[0];
    return !out_dir_.empty();
  }

  // Ends the run on all ranks if their copies of the model's state differ after this step; called by all, between two
  // updates. only: of this unit alone; none: of all
  void compare_copies(int64_t step, Run& run, std::optional<size_t> only = {}) const {
    report_.timed(only ? Task::verification : Task::comparison,
                  [&] { detail::require_equal_copies(step, run, o_.place, last_, only); });
  }

  // One unit, another one each time: all ranks that hold its copies have made its update.
  void verify_update(int64_t step, Run& run) const {
    compare_copies(step, run, static_cast<size_t>(step / o_.verify_updates) % run.trainer.state().size());
  }

  // Saves the checkpoint of step progress.done, unless it exists already. With --checkpoint-mode async it is written
  // while training goes on, unless `wait`; the next save, or a settle(), makes it visible. If it cannot be written, for
  // example on a full disk, training may go on and the save is retried after 1, 2, 4 ... more updates. If the run ends
  // instead, the weights alone are saved if possible. Non-finite weights end the run, and so do copies that differ.
  void save(Progress& progress, Run& run, const Save& how) {
    settle(progress, run);
    wait_for_copies(run);
    const bool local = how.where == Where::local;
    if (local && !local_due(progress.done)) return;  // the last one has failed just now
    if (!local && directory_is_new(run)) last_.clear();
    if (last_ == checkpoint_path(out_dir_, progress.done))
      return local ? void() : there_is(progress.done, how, progress);
    const auto comparing = Clock::now();
    detail::require_equal_copies(progress.done, run, o_.place, last_, {});
    const double compared = seconds_since(comparing);
    log_.progress("writing checkpoint", 0, 1);
    nlohmann::ordered_json trainer = to_json_object(progress, job_, run.trainer.expert_biases());
    if (local) trainer = text_of_rank_0(trainer, run), trainer["saved_by"] = saved_locally;
    else if (how.because == Because::rule) trainer["rollback_point"] = progress.done;
    else if (how.because == Because::clock) trainer["saved_by"] = saved_by_clock;
    const CheckpointMode mode = how.wait ? CheckpointMode::sync : o_.checkpoint_mode;
    constexpr double long_wait = 10;  // seconds
    if (mode == CheckpointMode::sync && write_seconds(how.where) > long_wait && how.because != Because::end)
      log_.line(formatted("saving step {}{}", progress.done, cost_text(how.where)));
    Pending pending{.how = how, .mode = mode, .trainer = std::move(trainer), .compared = compared};
    if (saving_) saving_(true);
    try {
      pending.write = begin_write(progress.done, run, pending.trainer, Part::all, mode, how.where);
    } catch (const CheckpointError& error) {
      return failed(error, pending, progress, run);
    }
    pending.stalled = seconds_since(pending.begin);
    pending_ = std::move(pending);
    if (mode == CheckpointMode::sync) settle(progress, run);
  }

  // " (1.6 GiB, about 0:12)", by the last ones
  std::string cost_text(Where where = Where::out) const {
    return formatted(" ({}, about {})", human_bytes(job_.checkpoint_bytes()), human_duration(write_seconds(where)));
  }
  // Whether this rank's part of a checkpoint is being written.
  bool is_writing() const { return pending_ && !pending_->write->written(); }
  // How long that may still take, by the last ones.
  double seconds_to_settle() const { return is_writing() ? write_seconds(pending_->how.where) : 0; }
  // All ranks together: waits for the checkpoint that is being written, if there is one, and makes it visible. finish:
  // waits for the updates under way, so that `progress` is that of the state; called before another checkpoint is
  // tried.
  void settle(Progress& progress, Run& run, const std::function<void()>& finish = {}) {
    if (!pending_) return;
    Pending pending = std::move(*std::exchange(pending_, std::nullopt));
    const auto begin = Clock::now();
    std::string path;
    try {
      path = pending.write->publish();
    } catch (const CheckpointError& error) {
      if (finish && pending.how.where == Where::out) finish();
      return failed(error, pending, progress, run);
    }
    if (saving_) saving_(false);
    const bool local = pending.how.where == Where::local;
    const WriteTimes times = pending.write->times();
    const double stall = pending.stalled + seconds_since(begin);
    (local ? local_writes_ : writes_).add(times.seconds);
    report_.took(local ? Task::local_checkpoint : Task::checkpoint, pending.compared + stall);
    if (local) {
      local_retry_ = {};
    } else {
      last_ = path;
      retry_ = {};
      saved_at_ = pending.begin;
      const double seconds = pending.mode == CheckpointMode::async ? stall + times.seconds : stall;
      stop_.saves_take(report_.saved(seconds));
    }
    log_.checkpoint({.step = progress.done,
                     .path = path,
                     .saved = pending.write->step(),
                     .mode = name_of(pending.mode),
                     .bytes = job_.checkpoint_bytes(),
                     .stall_s = stall,
                     .write_s = times.seconds,
                     .cpu_s = times.cpu_seconds,
                     .local = local});
    if (!times.no_thread.empty() && !std::exchange(warned_of_threads_, true))
      log_.line(
          formatted("WARNING: no thread could be started to write the checkpoint while training goes on ({}): "
                    "training stood still for it, as it will for each that gets none: raise `ulimit -u`, or the "
                    "container's limit of processes",
                    times.no_thread));
    if (!local) there_is(pending.write->step(), pending.how, progress);
    if (!local && leads_ && pending.write->step() == job_.max_steps) local_->clear();
    if (local) copying_ = pending.write->step();
    if (local && copies_) copies_->begin(local_->name(pending.write->step()).text());
    else if (local && leads_) local_->saved(pending.write->step());
  }

 private:
  void copy_locally(const Groups& groups, World& world) {
    std::error_code none;
    const std::string directory = std::filesystem::canonical(o_.checkpoint_local, none);
    const std::vector<std::string> all =
        groups[GroupName::control].all_gather_text("local disks", nlohmann::json{host_name(), shown(directory)}.dump());
    const int ranks = static_cast<int>(o_.place.local_ranks), n = static_cast<int>(o_.place.processes);
    std::vector<NodeDisk> disks;
    for (int p = 0; p < n; ++p) {
      const nlohmann::json disk = parse_json(all[static_cast<size_t>(p * ranks)], "a process");
      disks.push_back({disk.at(0), disk.at(1)});
    }
    const int distance = copy_distance(disks), me = static_cast<int>(o_.place.process),
              group = world.channel(groups.rank(), "local copies");
    if (n > 1 && distance == 0)
      log_.line("notice: all processes have their local checkpoints in the same directory: there is no second copy");
    if (distance == 0 || !leads_) return;
    copies_ =
        std::make_unique<LocalCopies>(LocalCopies::Ring{world.local().links, group, groups.rank(),
                                                        (me + distance) % n * ranks, (me + n - distance) % n * ranks},
                                      local_->directory());
  }

  // Whether the out directory had to be made again, or has lost its last checkpoint; all ranks end if another run has
  // taken it.
  bool directory_is_new(const Run& run) {
    News found = look_at_directory();
    if (found.kind == NewsKind::none && directory_ != nullptr && !last_.empty() && !is_directory(last_))
      found = {NewsKind::save};
    found = most_urgent(run.groups[GroupName::control].all_gather_text("out directory", found.message()));
    if (found.kind == NewsKind::lost) throw EndsEarly{found};
    return found.kind == NewsKind::save;
  }

  struct Pending {
    Save how;
    CheckpointMode mode;
    nlohmann::ordered_json trainer;
    double compared = 0;  // seconds that the comparison of copies took before it
    Clock::time_point begin = Clock::now();
    double stalled = 0;  // seconds
    std::unique_ptr<CheckpointWrite> write = nullptr;
  };

  // Until the last local checkpoint is on other disks, too, or cannot be. Only then are older ones deleted.
  void wait_for_copies(Run& run) {
    const std::optional<int64_t> step = std::exchange(copying_, std::nullopt);
    if (!step) return;
    const std::vector<std::string> faults =
        run.groups[GroupName::control].all_gather_text("copies", copies_ ? copies_->wait() : "");
    if (copies_ && leads_) local_->saved(*step);
    for (const std::string& fault : faults)
      if (!fault.empty())
        return log_.line(formatted("WARNING: a part of a local checkpoint was not copied to another disk: {}", fault));
  }

  // Processes record other options where those say which process it is; a checkpoint has one trainer.json.
  static nlohmann::ordered_json text_of_rank_0(const nlohmann::ordered_json& trainer, const Run& run) {
    const std::string mine = run.groups.first() ? trainer.dump() : "";
    return parse_json<nlohmann::ordered_json>(run.groups[GroupName::control].all_gather_text("trainer.json", mine)[0],
                                              "trainer.json of rank 0");
  }

  std::unique_ptr<CheckpointWrite> begin_write(int64_t step, Run& run, const nlohmann::ordered_json& trainer, Part part,
                                               CheckpointMode mode, Where where = Where::out) const {
    if (where == Where::out) await_deletion();  // so that it takes no room any more
    CheckpointContents contents{.trainer = trainer, .more = job_.tokenizer_files, .part = part};
    if (where == Where::local)
      contents.own = OwnPart{.name = local_->name(step).text(),
                             .first = leads_,
                             .bytes = job_.checkpoint_bytes() / std::max<int64_t>(1, o_.place.processes),
                             .facts = local_->facts(o_.place.processes)};
    if (part == Part::all && directory_ != nullptr)
      contents.before_visible = [this] {
        log_.sync_metrics();  // a resumed run appends to them
        if (out_dir_ == o_.out_dir) directory_->ensure_run_file(job_.asked);
      };
    CopyMemory memory;
    if (mode == CheckpointMode::async) memory = {run.copies_of_state.bytes(), run.saves.get()};
    return std::make_unique<CheckpointWrite>(contents.own ? local_->directory() : out_dir_, step, job_.step.model,
                                             run.trainer.state(), run.stream, std::move(contents), memory);
  }

  void failed(const CheckpointError& error, const Pending& pending, Progress& progress, Run& run) {
    if (saving_) saving_(false);
    const bool diverged = error.status() == ExitStatus::diverged;
    if (!diverged && pending.how.where == Where::local) return local_failed(error, pending, progress);
    const int64_t step = pending.write ? pending.write->step() : progress.done;
    if (!diverged && directory_is_new(run)) {  // moved or deleted while this was written
      last_.clear();
      Save again = pending.how;
      again.wait = true;
      if (again.best && step != progress.done) {
        if (best_is_lost_) best_is_lost_(step);
        again.best = false;
      }
      return save(progress, run, again);
    }
    const std::string last = last_.empty() ? "there is none" : "the last one is " + last_;
    if (pending.how.on_failure == OnFailure::fail || diverged)
      throw SharedError(formatted("no checkpoint after step {}: {}; {}{}", step, error.what(), last,
                                  diverged ? "" : save_weights(progress, run)),
                        error.status());
    if (pending.how.best && best_is_lost_) best_is_lost_(step);
    retry_.because = pending.how.because;
    retry_.at = progress.done + retry_.pause;
    retry_.pause *= 2;
    log_.line(formatted("WARNING: no checkpoint after step {}: {}; {}; trying again by step {}", step, error.what(),
                        last, std::min(retry_.at, job_.max_steps)));
  }

  // Local checkpoints only shorten what is computed again after a failure: without one the run goes on.
  void local_failed(const CheckpointError& error, const Pending& pending, const Progress& progress) {
    local_retry_.at = progress.done + local_retry_.pause * o_.checkpoint_local_every;
    local_retry_.pause *= 2;
    log_.line(formatted(
        "WARNING: no local checkpoint after step {}: {}; training goes on, and the next is tried after step {}",
        pending.write ? pending.write->step() : progress.done, error.what(),
        round_up(local_retry_.at, o_.checkpoint_local_every)));
  }

  // How long a checkpoint usually takes to write.
  double write_seconds(Where where) const {
    return (where == Where::local ? local_writes_ : writes_)
        .seconds()
        .value_or(static_cast<double>(job_.checkpoint_bytes()) / assumed_bytes_per_second);
  }

  void await_deletion() const {
    if (directory_ == nullptr) return;
    if (const std::string fault = directory_->retention().wait(); !fault.empty())
      log_.line(formatted("WARNING: {}", fault));
  }
  // There is a checkpoint of this step now. Deletes old ones.
  void there_is(int64_t step, const Save& how, Progress& progress) const {
    if (how.because == Because::rule) progress.rollback_point = step;
    if (directory_ == nullptr) return;
    const auto attempt = [&](const std::function<void()>& work) {
      try {
        work();
      } catch (const Error& error) {  // the checkpoint itself is safe
        log_.line(formatted("WARNING: {}", error.what()));
      }
    };
    Retention& retention = directory_->retention();
    std::set<int64_t> needed;
    if (o_.rolls_back()) needed.insert(progress.rollback_point);
    if (o_.keep_best) needed.insert(progress.best_step);  // also where it cannot be linked
    if (how.best) attempt([&] { retention.link_best(step); });
    attempt([&] { retention.prune(o_.keep_checkpoints, o_.keep_every, needed); });
    if (how.wait) await_deletion();
  }

  // The last resort of a run that ends without a checkpoint; returns a text for the user.
  std::string save_weights(const Progress& progress, Run& run) const try {
    const auto trainer = to_json_object(progress, job_, run.trainer.expert_biases());
    return formatted(
        "; the weights alone are saved in {}: a model for --model or --generate, without the optimizer's "
        "state, so that no run can resume from it",
        begin_write(progress.done, run, trainer, Part::model, CheckpointMode::sync)->publish());
  } catch (const CheckpointError& error) {
    return formatted("; nor could the weights alone be saved: {}", error.what());
  }

  const Job& job_;
  const Options& o_;
  RunDirectory* directory_;
  Log& log_;
  StepReport& report_;
  StopCondition& stop_;
  std::string out_dir_ = o_.out_dir, last_;
  Clock::time_point saved_at_ = Clock::now();  // or when the run began
  struct Retry {
    int64_t at = 0;     // step after which to retry; 0: no checkpoint has failed
    int64_t pause = 1;  // updates until the retry after that
    Because because = Because::rule;
  } retry_, local_retry_;
  std::optional<LocalParts> local_;
  std::unique_ptr<LocalCopies> copies_;
  bool leads_ = false;
  std::optional<int64_t> copying_;  // the step of the local checkpoint that may not be on other disks yet
  UsualTime writes_, local_writes_;
  std::function<void(int64_t)> best_is_lost_;
  std::function<void(bool)> saving_;
  bool warned_of_threads_ = false;
  std::optional<Pending> pending_;
};

}  // namespace llmc
