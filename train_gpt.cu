// train_gpt.cu: the trainer, and the place to start reading. main() parses the options and picks a mode; run_training()
// checks the job, finds the checkpoint to resume from and starts the ranks; Training::run() is the loop of each rank.
// llmc/README.md is a map of the rest.
#include <cerrno>  // program_invocation_name, from glibc
#include <chrono>
#include <cmath>
#include <cstdio>
#include <deque>
#include <limits>
#include <optional>
#include <tuple>
#include <utility>

#include "comm/group_check.h"
#include "comm/world.h"
#include "core/host_name.h"
#include "core/log.h"
#include "core/signals.h"
#include "run/batch_reader.h"
#include "run/checkpoints/checkpoint_saver.h"
#include "run/checkpoints/progress.h"
#include "run/checkpoints/run_dir.h"
#include "run/checkpoints/seen_samples.h"
#include "run/evaluate.h"
#include "run/generate.h"
#include "run/job.h"
#include "run/modes.h"
#include "run/news.h"
#include "run/options/parse.h"
#include "run/processes.h"
#include "run/ranks.h"
#include "run/recipe/print_stages.h"
#include "run/reports/next_steps.h"
#include "run/reports/report.h"
#include "run/reports/step_report.h"
#include "run/setup.h"
#include "run/start.h"
#include "run/stretches.h"
#include "run/tokenize.h"
#include "run/trace/step_trace.h"
#include "run/validation.h"
#include "shard/whole_check.h"
#include "train/not_finite.h"
#include "train/sample.h"

namespace llmc {
namespace {

// One rank of a stretch of a run, from the first update or a checkpoint to the last update. Step s is the run's s-th
// update.
class Training {
 public:
  Training(const Job& job, const Beginning& beginning, World& world, int rank)
      : job_(job),
        o_(job.options),
        log_(beginning.log),
        stop_(o_.time_limit, job.begin, static_cast<double>(job.checkpoint_bytes()) / assumed_bytes_per_second),
        rank_(rank),
        local_(world.local()),
        watchdog_(world.local().watchdog),
        report_(job, log_, beginning.peaks, rank == 0, beginning.totals),
        checkpoints_(job, beginning.directory, log_, report_, stop_),
        trace_(beginning.continues ? "" : o_.trace, log_),
        run_(job.step, job.plan, rank_device(job.device, o_.place, rank - o_.place.first_rank()), world, rank),
        train_(
            job.data->loader(job.course, job.stretch(), o_.shuffled(), job.step.model.vocab_size, job.document_begin),
            {.rank = run_.groups.reader(), .ranks = job.step.layout.readers(), .batch_size = o_.batch_size},
            job.step.micro_batches) {
    if (!job.data->val.empty()) validation_.emplace(run_.trainer, run_.groups, job.validation());
    check_groups(run_.groups, run_.stream,
                 [&](int r) { return watchdog_ != nullptr ? watchdog_->name_of_rank(r) : formatted("rank {}", r); });
    const StepConfig& step = job.step;
    check_whole_model(run_.trainer.state(), part_of(parameter_table(step.model), step.layout.tensor, 0),
                      step.model.tied, world.mesh());
    const std::optional<ResumePoint>& resume = beginning.resume;
    if (resume) restore(*resume);
    else initialise(run_, o_);
    run_.touch_memory();
    if (beginning.continues) progress_.validated = resume->trainer.value("validated", nlohmann::json()) == true;
    else take_directory(beginning);
    if (job.course.recipe().staged) {
      const auto [text, facts] = stage_text(job.course, job.number);
      if (progress_.done == job.stretch().first_step) log_.stage(progress_.done + 1, text, facts);
      else log_.line(text);
    }
    for (const DataChange& change : changed_data_) log_.data_change(progress_.done, change);
  }

  void run() {
    first_ = begun_ = progress_.done;
    trace_.choose_step(o_.trace_step, first_, job_.last_step());
    report_.resume_after(first_);
    try {
      choose_matmuls();
      finish_step();  // validation at step 0 shows where the run starts; a resumed run does what was left undone
      while (begun_ < job_.last_step()) {
        trace_.begin(begun_ + 1);
        trace_.timed("read the batches", [&] { take_batches(); });
        directory_ = checkpoints_.look_at_directory();
        if (trace_.timed("agree to go on", [&] { return poll(); }) == NewsKind::save) save_by_clock();
        trace_.begin_streams(run_);
        update();
        trace_.end_of_step();
        if (something_due(begun_)) {
          finish_updates();
          trace_.timed("validation, sample, checkpoint", [&] { finish_step(); });
        }
        trace_.write(job_.step, run_);
      }
    } catch (const EndsEarly& early) {
      try {
        end(early);
      } catch (const EndsEarly& lost) {
        end_lost(lost.reason);
      }
    }
    if (progress_.done < job_.max_steps) return;  // another stretch follows
    report_.summary(progress_, checkpoints_.last(), ops_,
                    run_.memory_taken(job_.plan, static_cast<int>(rank_), local_));
    if (progress_.done > first_)
      report_next_steps(log_, job_.asked, checkpoints_.last(), program_invocation_name, job_.example_prompt());
  }

 private:
  // Rank 0 makes the out directory this run's; all ranks hear whether the validation after step progress_.done has been
  // made and is recorded in metrics.jsonl.
  void take_directory(const Beginning& beginning) {
    MetricsKept kept;
    if (beginning.directory != nullptr) {
      detail::require_space(o_.out_dir, job_.checkpoint_bytes());
      kept = beginning.directory->claim(log_, job_.asked, beginning.resume);
      log_.open(o_.out_dir, kept.elapsed_s);
      report_header(log_, job_, beginning.peaks);
    }
    progress_.validated =
        run_.groups[GroupName::control].all_gather_text("validated", kept.validated ? "yes" : "")[0] == "yes";
    if (beginning.resume)
      log_.line(formatted("{} after step {} from {}",
                          beginning.resume->begin == Begin::branch ? "branching" : "resuming", progress_.done,
                          beginning.resume->path));
  }

  uint64_t seed() const { return static_cast<uint64_t>(o_.seed); }

  std::string saved_to() const { return progress_.done > 0 ? ", saved to " + checkpoints_.last() : ""; }

  // Throws on all ranks if one of them has a reason to end; otherwise returns the news that all have heard. Called
  // between micro-batches, sampled tokens and updates.
  NewsKind poll() const {
    News mine;
    // Carrying on means waiting for the next update and for those under way.
    const std::string stop = stop_.reason(static_cast<double>(1 + under_way_.size()) * report_.last_seconds());
    if (directory_.kind == NewsKind::lost) mine = directory_;
    else if (!unreadable_.empty()) mine = {NewsKind::unreadable, unreadable_};
    else if (!stop.empty()) mine = {NewsKind::stop, stop};
    else if (rank_ == 0 && checkpoints_.clock_says()) mine = {NewsKind::save};
    else mine = directory_;
    const News all = most_urgent(run_.groups[GroupName::control].all_gather_text("time to stop", mine.message()));
    if (all.kind >= NewsKind::stop) throw EndsEarly{all};
    return all.kind;
  }

  // Called on all ranks, after finish_updates(). Returns whether there is a checkpoint.
  bool save(OnFailure on_failure, Because because = Because::rule) {
    require_finite_loss();
    return checkpoints_.save(progress_, run_, on_failure, because);
  }

  // The loss of a step is computed with the weights before its update. A checkpoint therefore evaluates one more
  // micro-batch, from the data of its last step: the weights may be finite and their loss not.
  void require_finite_loss() {
    if (finite_after_ == progress_.done) return;
    const double loss = run_.trainer.evaluate(1, job_.step.batch.rows() * job_.step.layout.readers(), [this](int64_t) {
      try {
        return train_.read(cursor(std::max(progress_.done, job_.stretch().first_step + 1)), 0);
      } catch (
          const Error&) {  // it was readable when the step was computed; ranks stay together, and the next step reports
        const size_t rows = static_cast<size_t>(job_.step.batch.rows());
        return HostBatch{std::vector(rows, 0), std::vector(rows, -1), std::vector(rows, 0)};
      }
    });
    require_finite(loss, "");
  }
  void require_finite(double loss, const char* which) {
    if (!std::isfinite(loss))
      throw SharedError(
          formatted("the last update diverged: with the weights after step {} the {}loss is {}, so they were "
                    "not saved. Lower --lr, add --warmup-steps or check the data; {}",
                    progress_.done, which, loss, way_back()),
          ExitStatus::diverged);
    finite_after_ = progress_.done;
  }

  // Called between two updates. Like a validation, it does not affect the results.
  void save_by_clock() {
    finish_updates();
    if (progress_.done == 0) return;
    const OnFailure on_failure = o_.checkpoint_errors;
    if (save(on_failure, Because::clock)) checkpoints_.tidy(progress_.done, false);
    report_.start_clock();  // for the next update
  }

  // The next poll tells all ranks that this one cannot read its samples, and what needs them.
  void cannot_read(const Error& error, const std::string& what_for) {
    unreadable_ = (run_.groups.ranks() > 1 ? formatted("rank {} on {}: ", rank_, host_name()) : "") +
                  formatted("{}; {} needs it", error.what(), what_for);
  }
  // Takes the batches of the next step, before any rank begins it.
  void take_batches() {
    if (under_way_.empty()) report_.start_clock();
    const int64_t step = begun_ + 1;
    ahead_ = {};
    try {
      ahead_ = train_.take(cursor(step), step < job_.last_step() ? std::optional(cursor(step + 1)) : std::nullopt);
    } catch (const Error& error) {
      cannot_read(error, formatted("step {}", step));
    }
    report_.waited_for_data(train_.waited());
  }
  // Not in a pipeline: there, a host may be waiting for a message from a stage that is at another point of its list.
  void poll_within_step() const {
    if (job_.step.layout.pipeline.stages == 1) poll();
  }

  // Where a step begins in the samples of the stretch.
  int64_t cursor(int64_t step) const {
    return o_.overfit_batch ? 0 : (step - 1 - job_.stretch().first_step) * job_.samples_per_step;
  }

  BatchSource batches_of(int64_t step) {
    return [this, step](int64_t m) {
      poll_within_step();
      return train_.read(cursor(step), m);
    };
  }
  // The batches that were read ahead.
  BatchSource batches_of_next_step() {
    return [this, step = begun_ + 1](int64_t m) {
      poll_within_step();
      if (job_.step.micro_batches > 1)
        log_.progress(formatted("step {}: micro-batch", step), m + 1, job_.step.micro_batches);
      return std::move(ahead_.micro_batches[static_cast<size_t>(m)]);
    };
  }

  // An update that has begun and has not been reported yet.
  struct Update {
    int64_t step;
    double lr;
    PendingStep result;
  };

  // Begins the update of step begun_ + 1. While a GPU runs it, the previous one is reported. If the next step needs its
  // result, or on a CPU, which gains nothing by running ahead, the update is reported right away. The updates of an
  // asynchronous pipeline are reported once all stages have made them.
  void update() {
    const int64_t step = begun_ + 1;
    if (watchdog_ != nullptr) watchdog_->board.at_step(static_cast<int>(rank_), step);
    const double lr = job_.stretch().learning_rate(step);
    const double infinity = std::numeric_limits<double>::infinity();
    if (o_.profile) run_.stream.set_ledger(&ops_);
    const UpdateRule rule{.max_norm = o_.grad_clip,
                          .scale = static_cast<double>(job_.step.tokens()) / static_cast<double>(ahead_.targets),
                          .largest_loss = o_.skip_loss_z ? progress_.losses.limit(*o_.skip_loss_z) : infinity,
                          .largest_norm = o_.skip_grad_z ? progress_.norms.limit(*o_.skip_grad_z) : infinity};
    PendingStep result = trace_.timed("enqueue the step", [&] {
      return run_.trainer.begin_step(batches_of_next_step(), optimizer_options(o_, lr, step), rule);
    });
    under_way_.push_back({step, lr, std::move(result)});
    begun_ = step;
    const bool waits = job_.device.kind != DeviceKind::cuda || o_.profile || o_.skip_loss_z || o_.skip_grad_z;
    while (static_cast<int>(under_way_.size() + waits) > run_.trainer.steps_under_way()) finish_update();
  }

  // Waits for all updates under way, and reports them. Flushes are recorded, because they change what the run learns.
  void finish_updates() {
    const bool flushed = run_.trainer.flush();
    while (!under_way_.empty()) finish_update();
    if (flushed) log_.flush(progress_.done);
  }

  // Waits for the first of the updates under way, and reports it.
  void finish_update() {
    const Update update = std::move(under_way_.front());
    under_way_.pop_front();
    const StepResult result = trace_.timed("wait for the result", [&] { return update.result.wait(); });
    if (o_.profile && under_way_.empty()) run_.stream.synchronize(), run_.stream.set_ledger(nullptr);
    progress_.losses.add(result.loss);
    progress_.norms.add(result.grad_norm);
    report_.finished(update.step, update.lr, result);
    if (!result.finite()) diverged(update.step, result, batches_of(update.step));
    report_.notices(update.step, result);
    if (watchdog_ != nullptr) {
      watchdog_->board.step_done(static_cast<int>(rank_), run_.stream.busy_seconds());
      if (rank_ == 0)
        if (const auto notice = watchdog_->notice()) log_.line(*notice);
    }
    progress_.done = update.step;
    progress_.validated = false;
  }

  // Repeats the step with a check of every tensor, to find where the first non-finite number came from.
  [[noreturn]] void diverged(int64_t step, const StepResult& result, const BatchSource& batches) {
    run_.trainer.flush();
    log_.line("searching for the first non-finite number ...");
    const std::string where = where_not_finite(run_.trainer, batches, [&](int64_t micro_batch, int64_t b) {
      return train_.name_of_sample(cursor(step), micro_batch, b);
    });
    throw SharedError(
        formatted("step {} diverged: loss {} or gradient norm {} is not finite; {}. The weights were not "
                  "updated{}. Lower --lr, add --warmup-steps or check the data; {}",
                  step, result.loss, result.grad_norm, where,
                  job_.step.layout.pipeline.asynchronous() ? ", but those of stages with finite gradients" : "",
                  way_back()),
        ExitStatus::diverged);
  }

  // How to go on from the last checkpoint, or from the one at which this branch began.
  std::string way_back() const {
    const std::string last = !checkpoints_.last().empty() || job_.parent.is_null()
                                 ? checkpoints_.last()
                                 : job_.parent["path"].get<std::string>();
    if (last.empty()) return "no checkpoint was written";
    return formatted("the last checkpoint is {}; this continues from it with half the --lr:\n{}", last,
                     branch_command(job_.asked, last, program_invocation_name));
  }

  // Does finish_step() have anything to do after this step?
  bool something_due(int64_t step) const {
    return due(step, validation_ ? o_.val_every : 0) || due(step, o_.sample_every) || due(step, o_.checkpoint_every) ||
           step == job_.last_step() || checkpoints_.retries_at(step);
  }
  bool due(int64_t step, int64_t every) const { return every > 0 && (step == job_.max_steps || step % every == 0); }

  // On a GPU, chooses matmul algorithms: as a checkpoint of the same GPU and library recorded, else by --tune-matmul.
  void choose_matmuls() {
    if (job_.device.kind == DeviceKind::cpu) return record_instructions();
    const bool other_shapes = first_ == job_.stretch().first_step && job_.number > 0;
    if (!(other_shapes && o_.tune_matmul) && take_recorded_matmuls(run_, progress_.matmul_choices, log_)) return;
    progress_.matmul_choices.clear();
    if (!o_.tune_matmul || begun_ == job_.last_step()) return;
    log_.line("timing matmul algorithms ...");
    progress_.matmul_choices = run_.trainer.tune(batches_of(begun_ + 1));
  }

  // On a CPU, records the instruction set in use. A run that resumes with another one goes on, but rounds differently.
  void record_instructions() {
    const std::string before = std::exchange(progress_.cpu_isa, cpu::recorded_isa());
    if (before.empty() || before == progress_.cpu_isa) return;
    // "portable" of another architecture rounds differently from this one's.
    const bool is_here = cpu::can_choose(before) && before != cpu::name_of(cpu::isa_in_use());
    log_.line(formatted(
        "notice: the checkpoint was computed with the instructions of {}, and the run goes on with those of {}: "
        "it rounds differently from here on{}",
        before, progress_.cpu_isa, is_here ? formatted(". --cpu-isa {} would repeat it bit for bit", before) : ""));
  }

  [[noreturn]] void end(const EndsEarly& early) {
    finish_updates();
    trace_.report_missing();
    if (early.kind == NewsKind::lost) end_lost(early.reason);
    if (early.kind == NewsKind::unreadable) end_unreadable(early.reason);
    if (progress_.done > 0) save(OnFailure::fail);
    throw SharedError(
        formatted("stopped by {} after step {} of {}{}; run the same command again{} to resume{}", early.reason,
                  progress_.done, job_.max_steps, saved_to(), o_.restart ? ", without --restart," : "",
                  progress_.done == first_ && comes_again(early.reason)
                      ? " (this start completed no update: another such would not either)"
                      : ""),
        ExitStatus::requeue);
  }

  // Another run has taken the out directory: the work so far is saved to this run's own directory, wherever it is now,
  // if it still exists.
  [[noreturn]] void end_lost(const std::string& how) {
    const bool follows = checkpoints_.follow_directory(run_) && progress_.done > 0;
    if (follows) save(OnFailure::fail);
    throw SharedError(formatted("{}; the run ended after step {} of {}{}", how, progress_.done, job_.max_steps,
                                follows ? saved_to() : ", and saved nothing more"));
  }

  // A sample that some rank needs cannot be read: the work so far is saved.
  [[noreturn]] void end_unreadable(const std::string& why) {
    std::string saved;
    try {
      if (progress_.done > 0) save(OnFailure::fail);
      saved = saved_to();
    } catch (const SharedError& error) {
      saved = formatted("; {}", error.what());
    }
    throw SharedError(
        formatted("{}. The run ended after step {} of {}{}. Repair the file, keeping its number of tokens "
                  "(--verify-data names every bad token), and run the same command again with --data-changed accept{}",
                  why, progress_.done, job_.max_steps, saved, o_.restart ? ", without --restart" : ""));
  }

  // What is due after step progress_.done: validation, a sample, a checkpoint.
  void finish_step() {
    if (validation_ && due(progress_.done, o_.val_every) && !progress_.validated)
      report_.timed(Task::validation, [&] { validate(); });
    if (progress_.done == 0) return;
    if (progress_.done > first_ && due(progress_.done, o_.sample_every)) report_.timed(Task::sample, [&] { sample(); });
    const bool best = o_.keep_best && progress_.best_step == progress_.done, last = progress_.done == job_.last_step();
    const bool by_rule = last || best || due(progress_.done, o_.checkpoint_every);
    if (!by_rule && !checkpoints_.retries_at(progress_.done)) return;
    const Because because = by_rule ? Because::rule : checkpoints_.retries_because();
    const OnFailure on_failure = last ? OnFailure::fail : o_.checkpoint_errors;
    if (save(on_failure, because)) checkpoints_.tidy(progress_.done, best);
    else if (best) std::tie(progress_.best_step, progress_.best_val) = best_before_;  // the best one was not saved
  }

  void validate() {
    const ValLine found = validation_->line(
        progress_.done,
        {.poll = [&] { poll(); },
         .micro_batch = [&](const char* what, int64_t done,
                            int64_t total) { log_.progress(formatted("{}: micro-batch", what), done, total); },
         .cannot_read =
             [&](const Error& error) {
               cannot_read(error, formatted("the validation after step {}", progress_.done));
             }});
    log_.val(found);
    require_finite(found.loss, "validation ");
    if (found.loss < progress_.best_val)
      best_before_ = {std::exchange(progress_.best_step, progress_.done),
                      std::exchange(progress_.best_val, found.loss)};
    progress_.validated = true;
  }

  void sample() {
    std::vector<int32_t> made;
    generate(run_.trainer, prompt_tokens(*job_.tokenizer, o_.prompt, job_.step.model), o_.sample_tokens,
             sample_options(o_), Philox(seed(), formatted("sample {}", progress_.done)), [&](int32_t token) {
               poll();
               made.push_back(token);
               log_.progress("sampling", static_cast<int64_t>(made.size()), o_.sample_tokens);
               return token != job_.tokenizer->end_of_text();
             });
    log_.line(formatted("sample at step {}: {}{}", progress_.done, o_.prompt, job_.tokenizer->decode(made)));
  }

  void restore(const ResumePoint& from) {
    progress_ = resumed_progress(from, job_);
    changed_data_ = accept_changed_data(from, job_, progress_);
    load_checkpoint(from.path, job_.step.model, run_.trainer.state(), run_.stream);
    run_.trainer.set_expert_biases(progress_.expert_biases);
    run_.stream.synchronize();
    if (from.path == checkpoint_path(o_.out_dir, from.step)) checkpoints_.resumed_from(from.path);
  }

  const Job& job_;
  const Options& o_;
  Log& log_;
  StopCondition stop_;
  int64_t rank_;
  LocalRanks local_;
  Watchdog* watchdog_;  // with several processes; else null
  StepReport report_;
  CheckpointSaver checkpoints_;
  StepTrace trace_;  // declared before the streams that it records
  OpLedger ops_;     // declared before the stream that records ops in it
  Run run_;
  BatchReader train_;
  std::optional<Validation> validation_;

  Progress progress_;              // recorded in checkpoints
  int64_t begun_ = 0, first_ = 0;  // updates begun so far, and those done before this process
  int64_t finite_after_ = -1;      // the loss after this step was seen to be finite; -1: after none yet
  std::deque<Update> under_way_;
  BatchReader::Step ahead_;                 // step begun_ + 1
  News directory_;                          // rank 0's, from the last look at the out directory
  std::string unreadable_;                  // why this rank cannot read a sample that is needed; empty: it can
  std::vector<DataChange> changed_data_;    // since the checkpoint that this start resumes from
  std::pair<int64_t, double> best_before_;  // step and loss of the best validation before the last improvement
};

void run_training(const Options& o, const Processes& processes, StopCondition::Clock::time_point process_begin) {
  note_stop_signals();
  const bool first = processes.process() == 0;
  Log log = make_log(o, processes);
  std::optional<Job> job;
  together(processes, "options", [&] { job.emplace(o, process_begin); });
  log.file_line(formatted("{}: {}", time_stamp(), command_line(o, program_invocation_name)));
  const Start start = find_start(processes, *job, log);
  std::optional<ResumePoint> resume = start.resume;
  if (!o.shuffle && !start.shuffled) job->asked.shuffle = job->options.shuffle = false;
  if (start.complete) {
    const int64_t steps = job->max_steps;
    log.line(formatted("already complete: {} is at step {}{} {}", o.out_dir, resume->step,
                       resume->step == steps ? " of" : ", beyond step", steps));
    return report_next_steps(log, o, resume->path, program_invocation_name, job->example_prompt());
  }
  together(processes, "weights", [&] {
    if (resume && !first) resume->trainer = read_json(resume->path + "/trainer.json");
    if (resume) job.emplace(resumed_job(*job, *resume, log)), report_changes(log, *resume, *job);
    else report_seen_samples(log, *job);
  });
  require_same_everywhere(processes, *job, resume);
  if (!o.trace.empty())
    together(processes, "trace", [&] {
      traced_step(o.trace_step, resume ? resume->step : 0, job->last_step());
      if (first) require_writable_trace(o.trace);
    });
  Peaks peaks;
  if (first) {
    peaks = find_peaks(job->device, job->step.precision.products, o.peak_tflops).times(devices_in_use(job->device, o));
    if (o.profile) peaks.bandwidth = measure_bandwidth(rank_device(job->device, o.place));
  }
  RunTotals totals;
  try {
    for (bool continues = false;; continues = true) {
      {
        World world(job->step.layout.mesh(), job->backend, no_hooks, processes.local_ranks());
        world.limit_init(o.init_timeout);
        run_ranks(world, [&](int rank) {
          Log silent = Log::silent();
          RunTotals own;
          const bool reports = rank == 0;
          Training(*job,
                   {.resume = resume,
                    .peaks = peaks,
                    .continues = continues,
                    .directory = reports ? start.directory.get() : nullptr,
                    .log = reports ? log : silent,
                    .totals = reports ? totals : own},
                   world, rank)
              .run();
        });
      }
      if (job->last_step() == job->max_steps) return;
      together(processes, "the next stage", [&] {
        resume = checkpoint_of(*job);
        job.emplace(next_job(*job, *resume, log));
      });
    }
  } catch (const PeerError& error) {  // another rank has gone; all ranks report which one, in the same words
    const std::vector<int64_t> saved = checkpoint_steps(o.out_dir);
    const std::string text =
        error.what() +
        (saved.empty() ? std::string() : formatted("; the same command resumes from step {}", saved.back()));
    log.file_line("train_gpt: " + text);
    throw PeerError(text);
  } catch (const Error& error) {
    log.file_line("train_gpt: " + with_config_lines(error.what(), o.config_lines));  // main() prints it
    throw;
  }
}

}  // namespace
}  // namespace llmc

int main(int argc, char** argv) {
  using namespace llmc;
  const auto begin = StopCondition::Clock::now();
  wait_without_spinning(argv);
  set_gpu_environment();
  set_nccl_environment();
  bool reports = true;  // prints errors common to all processes
  std::unique_ptr<Processes> processes;
  Command command;
  Options& o = command.options;
  const auto report = [&](const std::string& error) {
    print_error("train_gpt: " + with_config_lines(error, o.config_lines));
  };
  try {
    command = read_command_line(argc, argv);
    if (o.cpu_isa != "auto") cpu::use_isa(o.cpu_isa, "--cpu-isa");
    reports = o.place.rank_on_host == 0;
    if (!command.print && !command.version) {
      processes = meet(o);
      reports = o.place.rank_on_host == 0;
      if (const std::string notice = notice_of_ignored(o); !notice.empty() && o.place.process == 0) print_error(notice);
    }
    if (command.print) std::printf("%s\n", command.text.c_str());  // --help, --print-config and the like
    else if (command.version) std::printf("%s\n", version_text().c_str());
    else if (o.selftest) run_selftest_mode(o, *processes);
    else if (o.evaluate) run_evaluate(o, *processes);
    else if (needs_ranks(o)) run_training(o, *processes, begin);
    else if (o.place.process > 0) return static_cast<int>(ExitStatus::done);  // one process is enough
    else if (o.verify_data) run_verify_data(o);
    else if (!o.tokenize.empty()) run_tokenize(o);
    else if (o.plan) run_plan(o);
    else if (o.plan_auto) run_plan_auto(o);
    else if (o.plan_examples) run_plan_examples(o);
    else if (o.print_schedule) run_print_schedule(o);
    else if (o.print_stages) run_print_stages(o);
    else if (!o.print_samples.empty()) run_print_samples(o);
    else run_generate(o);
    return static_cast<int>(ExitStatus::done);
  } catch (const SharedError& error) {
    if (reports) report(error.what());
    return end_together(processes.get(), error.status());
  } catch (const Error& error) {
    report(end_alone(processes.get(), error));
    return static_cast<int>(error.status());
  } catch (const std::exception& error) {
    print_error("train_gpt: " + end_alone(processes.get(), error));
    return static_cast<int>(ExitStatus::refused);
  }
}
