// train_gpt.cu: the trainer, and the place to start reading. main() parses the options and picks a mode; run_training()
// checks the job, finds the checkpoint to resume from and starts the ranks; Training::train() is the loop of each rank,
// and Updates has its steps. llmc/README.md is a map of the rest.
#include <cerrno>  // program_invocation_name, from glibc
#include <cstdio>
#include <deque>

#include "comm/group_check.h"
#include "comm/world.h"
#include "core/clock.h"
#include "core/log.h"
#include "core/signals.h"
#include "run/average.h"
#include "run/batch_reader.h"
#include "run/checkpoints/progress.h"
#include "run/checkpoints/run_dir.h"
#include "run/coord_check.h"
#include "run/evaluate.h"
#include "run/generate.h"
#include "run/job.h"
#include "run/milestones.h"
#include "run/modes.h"
#include "run/news.h"
#include "run/options/parse.h"
#include "run/process_start.h"
#include "run/processes.h"
#include "run/ranks.h"
#include "run/recipe/print_stages.h"
#include "run/recorded_choices.h"
#include "run/reports/device_check.h"
#include "run/reports/next_steps.h"
#include "run/reports/report.h"
#include "run/spikes.h"
#include "run/start.h"
#include "run/stretches.h"
#include "run/tokenize.h"
#include "run/training_rank.h"
#include "shard/whole_check.h"
#include "train/not_finite.h"

namespace llmc {
namespace {

// The updates of a stretch, one after the other: reads their batches, begins them, and reports each once its result is
// there. Step s is the run's s-th update.
class Updates {
 public:
  Updates(TrainingRank& rank, GoOn& go_on)
      : r_(rank),
        job_(rank.job),
        o_(rank.options()),
        go_on_(go_on),
        batches_(job_.data->loader(job_.course, job_.stretch(), o_.shuffled(), job_.step.model.vocab_size,
                                   job_.document_begin),
                 {.rank = rank.run.groups.reader(), .ranks = job_.step.layout.readers(), .batch_size = o_.batch_size},
                 job_.step.micro_batches) {}

  // The first update follows this step.
  void begin_after(int64_t step) {
    begun_ = step;
    count();
  }
  int64_t begun() const { return begun_; }
  // Takes the batches of the next step, before any rank begins it.
  void take_batches() {
    if (under_way_.empty()) r_.report.start_clock();
    const int64_t step = taken_ = begun_ + 1;
    ahead_ = {};
    std::vector<int64_t> next;
    for (int64_t s = step + 1; s <= std::min(step + 1 + go_on_.ahead(), job_.last_step()); ++s)
      next.push_back(cursor(s));
    try {
      ahead_ = batches_.take(cursor(step), next);
    } catch (const Error& error) {
      cannot_read(error.what(), step);
    }
    if (go_on_.asks_before(0)) look_at_batches(step + go_on_.ahead());
  }

  // Begins the next update. While a GPU runs it, the previous one is reported. If the next step needs its result, or on
  // a CPU, which gains nothing by running ahead, the update is reported right away. The updates of an asynchronous
  // pipeline are reported once all stages have made them.
  void begin() {
    const int64_t step = begun_ + 1;
    if (r_.watchdog() != nullptr) r_.watchdog()->board.at_step(r_.number, step);
    const double lr = job_.stretch().learning_rate(step);
    const SpikeLimits limits(r_.progress, o_);
    if (o_.profile) r_.run.stream.set_ledger(&r_.ops);
    const UpdateRule rule{.max_norm = o_.grad_clip,
                          .scale = static_cast<double>(job_.step.tokens()) / static_cast<double>(ahead_.targets),
                          .largest_loss = limits.loss,
                          .largest_norm = limits.grad_norm};
    PendingStep result = r_.trace.timed("enqueue the step", [&] {
      return r_.run.trainer.begin_step(
          batches_of_next_step(), optimizer_options(o_, lr, step, job_.step.tokens()), rule,
          go_on_.alone() ? NoticeSource() : [this] { return notices(); });
    });
    under_way_.push_back({step, lr, limits, batches_.waited(), std::move(result)});
    begun_ = step;
    count();
    while (static_cast<int>(under_way_.size() + go_on_.waits()) > r_.run.trainer.steps_under_way()) finish_one();
  }

  // Waits for all updates under way, and reports them. Flushes are recorded, because they change what the run learns.
  void finish() {
    const bool flushed = r_.run.trainer.flush();
    while (!under_way_.empty()) finish_one();
    if (flushed) r_.log.flush(r_.progress.done);
  }

  BatchSource batches_of(int64_t step) {
    return [this, step](int64_t m) {
      poll_within_step(m);
      return batches_.read(cursor(step), m);
    };
  }
  // A micro-batch of the last update that was made. It was readable when the step was computed; if it no longer is, it
  // has no targets: ranks stay together, and the next step reports it.
  HostBatch last_batch() try {
    return batches_.read(cursor(std::max(r_.progress.last_made(), job_.stretch().first_step + 1)), 0);
  } catch (const Error&) {
    const size_t rows = static_cast<size_t>(job_.step.batch.rows());
    return {std::vector(rows, 0), std::vector(rows, -1), std::vector(rows, 0)};
  }

 private:
  // One that has begun and has not been reported yet.
  struct Update {
    int64_t step;
    double lr;
    SpikeLimits limits;
    double waited;  // seconds for its batches
    PendingStep result;
  };

  // Not in a pipeline: there, a host may be waiting for a message from a stage that is at another point of its list.
  void poll_within_step(int64_t micro_batch) const {
    if (job_.step.layout.pipeline.stages == 1 && micro_batch > 0 && go_on_.asks_before(micro_batch)) go_on_.poll();
  }
  Notices notices() {
    look_at_batches(begun_ + 2 + go_on_.ahead());
    return go_on_.notices();
  }
  // Waits until all batches up to those of step `last` are read, or cannot be.
  void look_at_batches(int64_t last) {
    if (const auto fault = batches_.fault_within(last - taken_)) cannot_read(fault->second, taken_ + fault->first);
  }
  void cannot_read(const std::string& error, int64_t step) {
    if (r_.unreadable.empty()) r_.cannot_read(error, formatted("step {}", step), step);
  }
  // Where a step begins in the samples of the stretch.
  int64_t cursor(int64_t step) const {
    const Stretch& stretch = job_.stretch();
    return o_.overfit_batch ? 0 : stretch.samples_after(step) - stretch.samples - job_.samples_per_step;
  }
  // The batches that were read ahead.
  BatchSource batches_of_next_step() {
    return [this, step = begun_ + 1](int64_t m) {
      poll_within_step(m);
      if (job_.step.micro_batches > 1)
        r_.log.progress(formatted("step {}: micro-batch", step), m + 1, job_.step.micro_batches);
      return std::move(ahead_.micro_batches[static_cast<size_t>(m)]);
    };
  }

  // Waits for the first of the updates under way, and reports it.
  void finish_one() {
    const Update update = std::move(under_way_.front());
    under_way_.pop_front();
    count();
    const StepResult result = r_.trace.timed("wait for the result", [&] { return update.result.wait(); });
    if (o_.profile && under_way_.empty()) r_.run.stream.synchronize(), r_.run.stream.set_ledger(nullptr);
    if (!result.applied && (!result.finite() || action_at(result) != OnSpike::skip)) {
      r_.run.trainer.flush();
      r_.checkpoints.settle(r_.progress, r_.run);  // may be the one to return to, and is of an earlier step
    }
    go_on_.hear(result.notices);
    if (result.noise && result.applied) r_.progress.noise.add(*result.noise);
    r_.report.finished(update.step, update.lr, update.waited, result, r_.progress.noise);
    if (result.applied) {  // what a spike was computed from says nothing about what is usual
      r_.progress.losses.add(result.loss);
      r_.progress.norms.add(result.grad_norm);
      r_.progress.skipped_in_a_row = 0;
    } else {
      take_spike(update, result);
    }
    r_.report.notices(update.step, result);
    if (Watchdog* const watchdog = r_.watchdog()) {
      watchdog->board.step_done(r_.number, r_.run.stream.busy_seconds());
      if (r_.number == 0)
        if (const auto notice = watchdog->notice()) r_.log.line(*notice);
    }
    r_.progress.done = update.step;
    r_.progress.validated = false;
  }

  OnSpike action_at(const StepResult& result) const {
    return o_.on_spike.value_or(result.finite() ? OnSpike::skip : OnSpike::stop);
  }

  // An update that was not made: goes on without it, or ends this stretch on all ranks.
  void take_spike(const Update& update, const StepResult& result) {
    Spike spike{update.step, result.loss, result.grad_norm, describe_spike(result, update.limits, o_)};
    OnSpike action = action_at(result);
    std::string history;
    if (action == OnSpike::rollback) {
      spike.rollback_point = r_.progress.rollback_point, spike.changed_after = r_.progress.changed_after();
      history = why_no_rollback(job_, spike.rollback_point);
      if (!history.empty()) action = OnSpike::stop;
    }
    require_same_spike(spike, action, r_.control());
    if (action == OnSpike::skip) return skip(spike, result);
    if (action == OnSpike::rollback) throw RollsBack{spike};
    stop_at(spike, result, history);
  }

  void skip(const Spike& spike, const StepResult& result) {
    constexpr int64_t most = OutlierDetector::window;  // in a row
    Progress& progress = r_.progress;
    r_.log.line(formatted("step {} is a spike: {}: its update was skipped", spike.step, spike.what));
    if (!result.finite()) r_.run.trainer.allow_updates();
    if (++progress.skipped_in_a_row < most) return;
    if (!result.finite()) stop_at(spike, result, formatted(" The last {} updates were skipped.", most));
    r_.log.line(formatted(
        "WARNING: the last {} updates were skipped: such losses and norms count as usual from here on", most));
    progress.losses = progress.norms = OutlierDetector();
    progress.skipped_in_a_row = 0;
  }

  // Ends the run. If a number is not finite, repeats the step with a check of every tensor, to find where the first one
  // came from. history: what came before
  [[noreturn]] void stop_at(const Spike& spike, const StepResult& result, const std::string& history) {
    const int64_t step = spike.step;
    std::string what = formatted("step {} is a spike: {}", step, spike.what);
    if (!result.finite()) {
      r_.log.line("searching for the first non-finite number ...");
      what = formatted("step {} diverged: {}; {}", step, spike.what,
                       where_not_finite(r_.run.trainer, batches_of(step), [&](int64_t micro_batch, int64_t b) {
                         return batches_.name_of_sample(cursor(step), micro_batch, b);
                       }));
    }
    throw SharedError(
        formatted("{}. The weights were not updated{}.{} Lower --lr, add --warmup-steps or check the data{}; {}", what,
                  job_.step.layout.pipeline.asynchronous() ? ", but those of stages with finite gradients" : "",
                  history, other_ways_past(o_, !r_.checkpoints.last().empty() || !job_.parent.is_null()),
                  way_back(r_.job, r_.checkpoints.last(), program_invocation_name)),
        ExitStatus::diverged);
  }

  void count() { go_on_.begun(begun_, std::ssize(under_way_)); }

  TrainingRank& r_;
  const Job& job_;
  const Options& o_;
  GoOn& go_on_;
  BatchReader batches_;
  BatchReader::Step ahead_;  // step begun_ + 1
  int64_t begun_ = 0, taken_ = 0;
  std::deque<Update> under_way_;
};

// One rank of a stretch of a run, from the first update or a checkpoint to the last update.
class Training {
 public:
  Training(const Job& job, const Beginning& beginning, World& world, int rank)
      : r_(job, beginning, world, rank),
        job_(job),
        o_(job.options),
        after_(beginning.after),
        log_(beginning.log),
        progress_(r_.progress),
        go_on_(r_),
        updates_(r_, go_on_),
        milestones_(r_, {.poll = [this] { go_on_.poll(); }, .last_batch = [this] { return updates_.last_batch(); }}) {
    check_groups(r_.run.groups, r_.run.stream, [&](int r) {
      return r_.watchdog() != nullptr ? r_.watchdog()->name_of_rank(r) : formatted("rank {}", r);
    });
    const StepConfig& step = job.step;
    check_whole_model(r_.run.trainer.state(), part_of(parameter_table(step.model), step.layout.tensor, 0),
                      step.model.tied, world.mesh());
    const std::optional<ResumePoint>& resume = beginning.resume;
    if (resume) restore(*resume);
    else initialise(r_.run, o_, WorkProgress(log_).of_bytes("loading"));
    r_.run.touch_memory();
    if (beginning.after == After::stretch)
      progress_.validated = resume->trainer.value("validated", nlohmann::json()) == true;
    else take_directory(beginning);
    if (!o_.checkpoint_local.empty()) r_.checkpoints.save_locally(r_.run.groups, world);
    if (job.course.recipe().staged) {
      const auto [text, facts] = stage_text(job.course, job.number);
      if (progress_.done == job.stretch().first_step) log_.facts("stage", progress_.done + 1, text, facts);
      else log_.line(text);
    }
    for (const DataChange& change : changed_data_) log_.data_change(progress_.done, change);
  }

  // Returns the spike from which the run returns to an earlier step; none: the stretch, or the run, has ended.
  std::optional<Spike> run() {
    try {
      train();
    } catch (const RollsBack& back) {
      r_.trace.report_missing();
      return back.spike;
    }
    if (progress_.done < job_.max_steps) return std::nullopt;  // another stretch follows
    const std::string& last = r_.checkpoints.last();
    r_.report.summary(progress_, last, r_.ops, r_.run.memory_taken(job_.plan, r_.number, r_.local));
    if (progress_.done > r_.first)
      report_next_steps(log_, job_.asked, last, program_invocation_name, job_.example_prompt(),
                        twice_as_long(job_.asked));
    return std::nullopt;
  }

 private:
  void train() {
    r_.first = progress_.done;
    updates_.begin_after(r_.first);
    r_.trace.choose_step(o_.trace_step, r_.first, job_.last_step());
    r_.report.resume_after(r_.first);
    try {
      choose_matmuls();
      milestones_.reach();  // validation at step 0 shows where the run starts; a resumed run does what was left undone
      while (updates_.begun() < job_.last_step()) {
        r_.trace.begin(updates_.begun() + 1);
        r_.trace.timed("read the batches", [&] { updates_.take_batches(); });
        go_on_.seen(r_.checkpoints.look_at_directory());
        const NewsKind news = r_.trace.timed("agree to go on", [&] { return go_on_.agree(); });
        if (news == NewsKind::none) r_.checkpoints.settle(progress_, r_.run, [this] { finish_updates(); });
        if (news == NewsKind::save) save_by_clock();
        r_.trace.begin_streams(r_.run);
        updates_.begin();
        r_.trace.end_of_step();
        if (milestones_.after(updates_.begun())) {
          updates_.finish();
          r_.trace.timed("validation, sample, checkpoint", [&] { milestones_.reach(); });
          go_on_.forget();
        }
        r_.trace.write(job_.step, r_.run);
      }
    } catch (const EndsEarly& early) {
      try {
        end(early);
      } catch (const EndsEarly& lost) {
        end_lost(lost.reason);
      }
    }
  }

  // Rank 0 makes the out directory this run's; all ranks hear whether the validation after step progress_.done has been
  // made and is recorded in metrics.jsonl.
  void take_directory(const Beginning& beginning) {
    MetricsKept kept;
    if (beginning.directory != nullptr) {
      detail::require_space(o_.out_dir, job_.checkpoint_bytes());
      kept = beginning.directory->claim(log_, job_.asked, beginning.resume);
      if (beginning.after == After::rollback) {
        log_.metrics_replaced();
        log_.rollback(beginning.rollback);
      } else {
        log_.open(o_.out_dir, kept.elapsed_s);
        report_header(log_, job_, beginning.peaks);
      }
    }
    progress_.validated = r_.control().all_gather_text("validated", kept.validated ? "yes" : "")[0] == "yes";
    if (beginning.resume)
      log_.line(formatted("{} after step {} from {}",
                          beginning.resume->begin == Begin::branch ? "branching" : "resuming", progress_.done,
                          beginning.resume->path));
  }

  // Called between two updates. Like a validation, it does not affect the results.
  void save_by_clock() {
    finish_updates();
    if (progress_.done == 0) return;
    milestones_.save({.on_failure = o_.checkpoint_errors, .because = Because::clock, .wait = false});
    r_.report.start_clock();  // for the next update
  }
  void finish_updates() {
    updates_.finish();
    go_on_.forget();
  }

  // On a GPU, chooses matmul algorithms: as a checkpoint of the same GPU and library recorded, else by --tune-matmul.
  void choose_matmuls() {
    const bool on_cpu = job_.device.kind == DeviceKind::cpu;
    if (on_cpu || job_.step.layout.zero.offload.updates_at_host()) record_instructions(progress_.cpu_isa, log_);
    if (on_cpu) return;
    const bool other_shapes = r_.first == job_.stretch().first_step && job_.number > 0;
    if (!(other_shapes && o_.tune_matmul) && take_recorded_matmuls(r_.run, progress_.matmul_choices, log_)) return;
    progress_.matmul_choices.clear();
    if (!o_.tune_matmul || r_.first == job_.last_step()) return;
    progress_.matmul_choices = time_matmuls(r_.run, updates_.batches_of(r_.first + 1), log_);
  }

  [[noreturn]] void end(const EndsEarly& early) {
    updates_.finish();
    r_.trace.report_missing();
    if (early.kind == NewsKind::lost) end_lost(early.reason);
    if (early.kind == NewsKind::unreadable) end_unreadable(early.reason);
    if (progress_.done > 0) {
      if (r_.checkpoints.last() != checkpoint_path(o_.out_dir, progress_.done))
        log_.line(formatted("{}: saving step {}{}{}", early.reason, progress_.done, r_.checkpoints.cost_text(),
                            got_stop_signal() ? "; a later SIGINT ends the run at once, without it" : ""));
      milestones_.save({.because = Because::end});
    }
    throw SharedError(formatted("stopped by {} after step {} of {}{}; run the same command again{} to resume{}",
                                early.reason, progress_.done, job_.max_steps, r_.saved_to(), left_out_to_resume(o_),
                                after_ == After::start && progress_.done == r_.first && comes_again(early.reason)
                                    ? " (this start completed no update: another such would not either)"
                                    : ""),
                      ExitStatus::requeue);
  }

  // Another run has taken the out directory: the work so far is saved to this run's own directory, wherever it is now,
  // if it still exists.
  [[noreturn]] void end_lost(const std::string& how) {
    const bool follows = r_.checkpoints.follow_directory(r_.run) && progress_.done > 0;
    if (follows) milestones_.save({.because = Because::end});
    throw SharedError(formatted("{}; the run ended after step {} of {}{}", how, progress_.done, job_.max_steps,
                                follows ? r_.saved_to() : ", and saved nothing more"));
  }

  // A sample that some rank needs cannot be read: the work so far is saved.
  [[noreturn]] void end_unreadable(const std::string& why) {
    std::string saved;
    try {
      if (progress_.done > 0) milestones_.save({.because = Because::end});
      saved = r_.saved_to();
    } catch (const SharedError& error) {
      saved = formatted("; {}", error.what());
    }
    throw SharedError(unreadable_text(why, progress_.done, job_.max_steps, saved, left_out_to_resume(o_)));
  }

  void restore(const ResumePoint& from) {
    progress_ = resumed_progress(from, job_, log_);
    changed_data_ = accept_changed_data(from, job_, progress_);
    if (job_.takes_long_to_read()) log_.line(formatted("loading {}", from.path));
    load_checkpoint(from.path, job_.step.model, r_.run.trainer.state(), r_.run.stream,
                    options_from_record(from.path + "/trainer.json", member(from.trainer, "options")).optimizer,
                    WorkProgress(log_).of_bytes("loading"));
    r_.run.trainer.set_expert_biases(progress_.expert_biases);
    r_.run.stream.synchronize();
    progress_.rollback_point =
        after_ == After::rollback ? from.step : rollback_point_from(from, progress_, job_, r_.control(), log_);
    if (from.path == checkpoint_path(o_.out_dir, from.step)) r_.checkpoints.resumed_from(from.path);
  }

  TrainingRank r_;
  const Job& job_;
  const Options& o_;
  After after_;
  Log& log_;
  Progress& progress_;
  GoOn go_on_;
  Updates updates_;
  Milestones milestones_;
  std::vector<DataChange> changed_data_;  // since the checkpoint that this start resumes from
};

void run_training(const Options& o, const Processes& processes, Clock::time_point process_begin) {
  const bool first = processes.process() == 0;
  note_stop_signals(first ? Says::at_once : Says::nothing);
  unread_errors_left_out = true;
  Log log = make_log(o, processes);
  std::optional<Job> job;
  together(processes, "options", [&] { job.emplace(o, process_begin); });
  log.file_line(formatted("{}: {}", time_stamp(), command_line(o, program_invocation_name)));
  const Start start = find_start(processes, *job, log);
  std::optional<ResumePoint> resume = start.resume;
  if (!o.shuffle && !start.shuffled) job->asked.shuffle = job->options.shuffle = false;
  if (start.complete) {
    const int64_t steps = *start.complete;
    delete_local_checkpoints(processes, start.directory.get(), o);
    log.line(formatted("already complete: {} is at step {}{} {}", o.out_dir, resume->step,
                       resume->step == steps ? " of" : ", beyond step", steps));
    return report_next_steps(log, o, resume->path, program_invocation_name, job->example_prompt(),
                             resume->step == steps ? twice_as_long(o) : std::nullopt);
  }
  together(processes, "weights", [&] {
    if (resume && !first) resume->trainer = read_json(resume->path + "/trainer.json");
    job->rollbacks = start.rollbacks;
    if (resume) job.emplace(resumed_job(*job, *resume, log)), report_changed_schedule(log, *resume, *job);
    else report_seen_samples(log, *job);
    if (!resume && !job->rollbacks.empty()) job.emplace(job_from_beginning(*job));
  });
  require_same_everywhere(processes, *job, resume);
  if (o.check_devices) check_devices(processes, job->device, o.place, job->step.precision.weights, log);
  if (!o.trace.empty())
    together(processes, "trace", [&] {
      traced_step(o.trace_step, resume ? resume->step : 0, job->last_step());
      if (first) require_writable_trace(o.trace);
    });
  Peaks peaks;
  if (first) peaks = peaks_of_run(*job);
  std::vector<RunTotals> totals(static_cast<size_t>(o.place.local_ranks));
  try {
    RollbackLine rollback{};
    for (After after = After::start;;) {
      std::optional<Spike> spike;
      {
        World world(job->step.layout.mesh(), job->backend, no_hooks, processes.local_ranks());
        world.limit_init(o.init_timeout);
        run_ranks(world, [&](int rank) {
          Log silent = Log::silent();
          const int own = rank - processes.local_ranks().first;
          const Beginning beginning{.resume = resume,
                                    .peaks = peaks,
                                    .after = after,
                                    .rollback = rollback,
                                    .directory = rank == 0 ? start.directory.get() : nullptr,
                                    .log = rank == 0 ? log : silent,
                                    .totals = totals[static_cast<size_t>(own)]};
          const std::optional<Spike> seen = Training(*job, beginning, world, rank).run();
          if (own == 0) spike = seen;
        });
      }
      if (spike) {
        rollback = roll_back(processes, start, *spike, job, resume, log);
        after = After::rollback;
        continue;
      }
      if (job->last_step() == job->max_steps) return;
      together(processes, "the next stage", [&] {
        resume = checkpoint_of(*job);
        job.emplace(next_job(*job, *resume, log));
      });
      after = After::stretch;
    }
  } catch (const PeerError& error) {  // another rank has gone; all ranks report which one, in the same words
    const std::vector<int64_t> saved = checkpoint_steps(o.out_dir);
    const std::string text =
        error.what() +
        (saved.empty() ? std::string()
                       : formatted("; the same command{} resumes from step {}", left_out_to_resume(o), saved.back())) +
        (o.checkpoint_local.empty() ? "" : "; from a later local checkpoint, if one is complete");
    log.file_line("train_gpt: " + text);
    throw PeerError(text, error.status());
  } catch (const Error& error) {
    log.file_line("train_gpt: " + with_config_lines(error.what(), o.config_lines));  // main() prints it
    throw;
  }
}

}  // namespace
}  // namespace llmc

int main(int argc, char** argv) {
  using namespace llmc;
  constexpr int done = static_cast<int>(ExitStatus::done);
  auto begin = Clock::now();
  prepare_process(argv);
  bool reports = true;  // prints errors common to all processes
  std::unique_ptr<Processes> processes;
  Command command;
  Options& o = command.options;
  const auto report = [&](const std::string& e) { print_error("train_gpt: " + with_config_lines(e, o.config_lines)); };
  try {
    command = read_command_line(argc, argv);
    if (o.cpu_isa != "auto") cpu::use_isa(o.cpu_isa, "--cpu-isa");
    require_stacks();
    reports = o.place.rank_on_host == 0;
    if (command.text.empty() && !command.version) {
      processes = meet(o);
      if (!processes) return done;        // a spare that was not needed
      if (o.spare) begin = Clock::now();  // --time-limit does not count the wait
      reports = o.place.rank_on_host == 0;
      if (const std::string notice = notice_of_ignored(o); !notice.empty() && o.place.process == 0) print_error(notice);
    }
    if (!command.text.empty()) std::printf("%s\n", command.text.c_str());  // --help, --print-config and the like
    else if (command.version) std::printf("%s\n", version_text().c_str());
    else if (o.selftest) run_selftest_mode(o, *processes);
    else if (o.evaluate) run_evaluate(o, *processes);
    else if (needs_ranks(o)) return run_training(o, *processes, begin), done;  // log.txt has all that it prints
    else if (o.place.process > 0) return say_idle(o.place), done;              // one process is enough
    else if (o.verify_data) run_verify_data(o);
    else if (!o.tokenize.empty()) run_tokenize(o);
    else if (!o.coord_check.empty()) run_coord_check(o);
    else if (!o.average.empty()) run_average(o);
    else if (o.plan) run_plan(o);
    else if (o.plan_auto) run_plan_auto(o);
    else if (o.plan_examples) run_plan_examples(o);
    else if (o.print_schedule) run_print_schedule(o);
    else if (o.print_stages) run_print_stages(o);
    else if (!o.print_samples.empty()) run_print_samples(o);
    else run_generate(o);
    check_printed();
    return done;
  } catch (const SharedError& error) {
    if (reports) report(error.what());
    return end_together(processes.get(), error.status());
  } catch (const std::exception& error) {
    const Fault fault = end_alone(processes.get(), error);
    report(fault.why);
    return static_cast<int>(fault.status);
  }
}
