// train_gpt.cu: the trainer, and where to start reading. main() reads the options and picks a mode; run_training()
// checks the job, finds the checkpoint to go on from and starts the ranks; Training::run() is the loop of each.
#include <cerrno>  // program_invocation_name, of glibc
#include <chrono>
#include <cstdio>
#include <limits>
#include <optional>

#include "core/log.h"
#include "core/signals.h"
#include "data/dataloader.h"
#include "device/nvml.h"
#include "run/checkpoint.h"
#include "run/job.h"
#include "run/modes.h"
#include "run/options_parse.h"
#include "run/peak.h"
#include "run/progress.h"
#include "run/ranks.h"
#include "run/report.h"
#include "run/run_dir.h"
#include "run/setup.h"
#include "train/choices.h"
#include "train/lr_schedule.h"
#include "train/not_finite.h"
#include "train/sample.h"

namespace llmc {
namespace {

double seconds_since(std::chrono::steady_clock::time_point begin) {
  return std::chrono::duration<double>(std::chrono::steady_clock::now() - begin).count();
}

// A run from its first update, or from a checkpoint, to its last. Step s is the s-th update.
class Training {
 public:
  Training(const Job& job, RunDirectory& directory, Log& log, const std::optional<ResumePoint>& resume,
           const Peaks& peaks, World& world, int rank)
      : job_(job),
        o_(job.options),
        directory_(directory),
        log_(log),
        stop_(o_.time_limit, job.begin, static_cast<double>(job.checkpoint_bytes()) / assumed_bytes_per_second),
        peaks_(peaks),
        rank_(rank),
        run_(job.step, job.plan, rank_device(job.device, o_.ranks, rank), world, rank),
        schedule_(choose_lr_schedule(o_, job.max_steps)),
        train_(job.train, loader_config(o_.shuffle)) {
    if (job.val) val_.emplace(*job.val, loader_config(false));
    if (resume) restore(*resume);
    else initialise(run_, o_);
    if (rank_ == 0 && o_.log_gpu_every > 0) monitor_.emplace(gpu_info(job.rank_device.gpu).bus_id);
    if (rank_ == 0) {
      detail::require_space(o_.out_dir, job.checkpoint_bytes());
      directory.claim(o_);
      validated_ = directory.cut_metrics(progress_.done);
      log.open_metrics(o_.out_dir);
      report_header(log, o_, job.device, job.backend, job.step, job.max_steps, job.train, job.val ? &*job.val : nullptr,
                    job.plan, peaks_, job_.document_begin);
    }
    validated_ = !run_.dp.control->all_gather_text("validated", validated_ ? "yes" : "")[0].empty();
    if (resume) log.line(formatted("resuming behind step {} from {}", progress_.done, resume->path));
  }

  void run() {
    first_ = begun_ = progress_.done;
    try {
      choose_matmuls();
      duties();  // validation at step 0 shows where the run starts; a resumed run does what was left undone
      while (begun_ < job_.max_steps) {
        poll();
        update();
        if (!something_due(begun_)) continue;
        finish();
        duties();
      }
    } catch (const Interrupted& stop) {
      finish();
      if (progress_.done > 0) save();
      throw Error(formatted("stopped by {} after step {} of {}{}; the same command goes on from there", stop.reason,
                            progress_.done, job_.max_steps,
                            progress_.done > 0 ? ", which is saved as " + checkpoint_ : std::string()),
                  ExitStatus::requeue);
    }
    report_summary();
  }

 private:
  DataLoader::Config loader_config(bool shuffle) const {
    return {.seed = seed(),
            .shuffle = shuffle,
            .vocab_size = job_.step.model.vocab_size,
            .end_of_text = job_.document_begin};
  }
  uint64_t seed() const { return static_cast<uint64_t>(o_.seed); }

  // All ranks leave together, if one of them is to; asked between micro-steps, tokens of a sample and updates.
  void poll() const {
    const std::string reason = stop_.reason(under_way_ ? last_seconds_ : 0);
    for (const std::string& other : run_.dp.control->all_gather_text("time to stop", reason))
      if (!other.empty()) throw Interrupted{other};
  }

  HostBatch read(DataLoader& loader, int64_t cursor, int64_t micro_batch) {
    poll();
    HostBatch host;
    loader.read_batch(cursor, micro_batch, {.rank = rank_, .ranks = ranks(), .batch_size = o_.batch_size}, host.tokens,
                      host.targets, host.positions);
    return host;
  }
  int64_t ranks() const { return job_.step.zero.ranks(); }

  int64_t cursor(int64_t step) const { return o_.overfit_batch ? 0 : (step - 1) * job_.samples_per_step; }

  BatchSource batches_of(int64_t step) {
    return [this, step](int64_t m) {
      if (job_.step.micro_batches > 1)
        log_.progress(formatted("step {}: micro-batch", step), m + 1, job_.step.micro_batches);
      return read(train_, cursor(step), m);
    };
  }

  // An update that was begun and not yet reported.
  struct Update {
    int64_t step;
    double lr;
    PendingStep result;
  };

  // Begins one update: step begun_ + 1. While it runs, the one before is reported; where the host must know how a step
  // went before it begins the next one, it is reported itself.
  void update() {
    const int64_t step = begun_ + 1;
    if (!under_way_) clock_ = std::chrono::steady_clock::now();
    const double lr = learning_rate(schedule_, step);
    const double infinity = std::numeric_limits<double>::infinity();
    if (o_.profile) run_.stream.set_ledger(&ops_);
    PendingStep result =
        run_.trainer.begin_step(batches_of(step),
                                {.lr = static_cast<float>(lr),
                                 .beta1 = static_cast<float>(o_.beta1),
                                 .beta2 = static_cast<float>(o_.beta2),
                                 .eps = static_cast<float>(o_.adam_eps),
                                 .weight_decay = static_cast<float>(o_.weight_decay),
                                 .step = step,
                                 .seed = seed()},
                                {.max_norm = o_.grad_clip,
                                 .largest_loss = o_.skip_loss_z ? progress_.losses.limit(*o_.skip_loss_z) : infinity,
                                 .largest_norm = o_.skip_grad_z ? progress_.norms.limit(*o_.skip_grad_z) : infinity});
    finish();
    under_way_.emplace(Update{step, lr, std::move(result)});
    begun_ = step;
    if (o_.profile || o_.skip_loss_z || o_.skip_grad_z) finish();
  }

  void log_gpu(int64_t step) {
    if (const auto reading = monitor_->read()) return log_.gpu(step, to_string(*reading), to_json_object(*reading));
    log_.line("notice: " + monitor_->why_not());
    monitor_.reset();
  }

  // Waits for the update under way, if there is one, and reports it.
  void finish() {
    if (!under_way_) return;
    const Update update = std::move(*under_way_);
    under_way_.reset();
    const StepResult result = update.result.wait();
    if (o_.profile) run_.stream.synchronize(), run_.stream.set_ledger(nullptr);
    const int64_t step = update.step;
    const double seconds = seconds_since(clock_);
    clock_ = std::chrono::steady_clock::now();
    last_seconds_ = seconds;
    step_seconds_ += seconds;
    progress_.losses.add(result.loss);
    progress_.norms.add(result.grad_norm);
    last_loss_ = result.loss;
    const double tokens = static_cast<double>(job_.step.tokens());
    const double a_step = seconds_since(begin_) / static_cast<double>(step - first_);
    log_.train(
        {.step = step,
         .max_steps = job_.max_steps,
         .loss = result.loss,
         .grad_norm = result.grad_norm,
         .lr = update.lr,
         .ms = seconds * 1e3,
         .tokens_per_s = tokens / seconds,
         .mfu = share_of(peaks_.promised, seconds),
         .speed_of_light = job_.device.kind == DeviceKind::cuda ? share_of(peaks_.measured, seconds) : std::nullopt,
         .eta_s = a_step * static_cast<double>(job_.max_steps - step),
         .skipped = !result.applied},
        step % o_.log_every == 0 || step == first_ + 1 || step == job_.max_steps);
    if (!result.finite()) diverged(step, result, batches_of(step));
    if (monitor_ && step % o_.log_gpu_every == 0) log_gpu(step);
    if (!result.applied) log_.line(formatted("step {} is an outlier: its update was skipped", step));
    progress_.done = step;
    validated_ = false;
  }

  // Of the flops that a peak would allow in so many seconds, what a step needs.
  std::optional<double> share_of(std::optional<double> peak, double seconds) const {
    return peak ? std::optional(job_.flops_per_step() / seconds / *peak) : std::nullopt;
  }

  // The step is done again, with a look at every tensor, to say where it began.
  [[noreturn]] void diverged(int64_t step, const StepResult& result, const BatchSource& batches) {
    log_.line("looking for the first number that is not finite ...");
    const std::string where = where_not_finite(run_.trainer, batches, [&](int64_t micro_batch, int64_t b) {
      return train_.sample_at(cursor(step) + (micro_batch * ranks() + rank_) * o_.batch_size + b);
    });
    throw Error(formatted("step {} diverged: loss {} or gradient norm {} is not finite; {}. The weights were not "
                          "updated. Lower --lr, add --warmup-steps or check the data; {}",
                          step, result.loss, result.grad_norm, where,
                          checkpoint_.empty() ? "no checkpoint was written" : "the last checkpoint is " + checkpoint_),
                ExitStatus::diverged);
  }

  // Behind a step, is there anything to do for which it must be finished?
  bool something_due(int64_t step) const {
    return due(step, val_ ? o_.val_every : 0) || due(step, o_.sample_every) || due(step, o_.checkpoint_every) ||
           step == job_.max_steps;
  }
  bool due(int64_t step, int64_t every) const { return every > 0 && (step == job_.max_steps || step % every == 0); }

  // Algorithms of a GPU's products that a checkpoint of the same GPU and library recorded, or by --tune-matmul.
  void choose_matmuls() {
    if (job_.device.kind != DeviceKind::cuda) return;
    if (take_recorded_matmuls(run_, progress_.matmul_choices, log_)) return;
    progress_.matmul_choices.clear();
    if (!o_.tune_matmul || begun_ == job_.max_steps) return;
    log_.line("timing matmul algorithms ...");
    progress_.matmul_choices = run_.trainer.tune(batches_of(begun_ + 1));
  }

  // What is due behind step progress_.done.
  void duties() {
    if (val_ && due(progress_.done, o_.val_every) && !validated_) validate();
    if (progress_.done == 0) return;
    if (progress_.done > first_ && due(progress_.done, o_.sample_every)) sample();
    const bool best = o_.keep_best && progress_.best_step == progress_.done;
    if (progress_.done != job_.max_steps && !best && !due(progress_.done, o_.checkpoint_every)) return;
    save();
    if (rank_ != 0) return;
    if (best) directory_.link_best(progress_.done);
    directory_.prune(o_.keep_checkpoints, o_.keep_every,
                     o_.keep_best ? std::optional(progress_.best_step) : std::nullopt);
  }

  void validate() {
    // Every sample once, whatever the layout: rows behind the last one do not count.
    const int64_t micro_batches = ceil_div(job_.val_samples, o_.batch_size * ranks());
    double sum = 0;
    for (int64_t begin = 0; begin < micro_batches; begin += validation_pass)
      sum += run_.trainer.evaluate(std::min(validation_pass, micro_batches - begin), 1, [&](int64_t in_pass) {
        const int64_t m = begin + in_pass;
        log_.progress("validation: micro-batch", m + 1, micro_batches);
        HostBatch host = read(*val_, 0, m);
        const int64_t rows = job_.val_samples - (m * ranks() + rank_) * o_.batch_size;
        for (int64_t b = std::max<int64_t>(rows, 0); b < o_.batch_size; ++b)
          std::fill_n(host.targets.begin() + b * o_.seq_len, o_.seq_len, -1);
        return host;
      });
    const double loss = sum / static_cast<double>(job_.val_samples * o_.seq_len);
    std::optional<ChoiceScore> score;
    if (job_.choices)
      score = evaluate_choices(run_.trainer, *job_.choices, run_.dp, [&](int64_t m, int64_t count) {
        poll();
        log_.progress("multiple choice: micro-batch", m + 1, count);
      });
    log_.val({.step = progress_.done,
              .loss = loss,
              .choices = score ? std::optional(score->accuracy) : std::nullopt,
              .choices_normalized = score ? score->normalized_accuracy : std::nullopt});
    if (loss < progress_.best_val) progress_.best_val = loss, progress_.best_step = progress_.done;
    validated_ = true;
  }

  void sample() {
    std::vector<int32_t> made;
    generate(run_.trainer, prompt_tokens(*job_.tokenizer, o_, job_.step.model), o_.sample_tokens, sample_options(o_),
             seed(), formatted("sample {}", progress_.done), [&](int32_t token) {
               poll();
               made.push_back(token);
               log_.progress("sampling", static_cast<int64_t>(made.size()), o_.sample_tokens);
               return token != job_.tokenizer->end_of_text();
             });
    log_.line(formatted("sample at step {}: {}{}", progress_.done, o_.prompt, job_.tokenizer->decode(made)));
  }

  // The checkpoint of step progress_.done, unless there is one.
  void save() {
    if (checkpoint_ == checkpoint_path(o_.out_dir, progress_.done)) return;
    const auto begin = std::chrono::steady_clock::now();
    log_.progress("writing checkpoint", 0, 1);
    log_.sync_metrics();  // what a resumed run finds in front of it
    checkpoint_ = write_checkpoint(o_.out_dir, progress_.done, job_.step.model, run_.trainer.state(), job_.step.dtype,
                                   to_json_object(progress_, job_), run_.stream, job_.tokenizer_files);
    stop_.saved(seconds_since(begin));
    log_.line("checkpoint: " + checkpoint_);
  }

  void restore(const ResumePoint& from) {
    require_same_run(from, job_);
    load_checkpoint(from.path, job_.step.model, run_.trainer.state(), run_.stream);
    run_.stream.synchronize();
    progress_ = progress_at(from);
    if (from.path == checkpoint_path(o_.out_dir, from.step)) checkpoint_ = from.path;
  }

  void report_summary() {
    const double steps = static_cast<double>(job_.max_steps - first_), tokens = static_cast<double>(job_.step.tokens());
    if (progress_.done == first_) return log_.line("done: only the validation was left");
    log_.table(
        "done",
        {{"time", formatted("{} in all, {} in training steps", human_duration(seconds_since(begin_)),
                            human_duration(step_seconds_))},
         {"throughput",
          formatted("{:.0f} tokens/s, {}", tokens * steps / step_seconds_,
                    peaks_.promised ? formatted("{:.1f}% MFU", 100 * *share_of(peaks_.promised, step_seconds_ / steps))
                                    : std::string("MFU n/a"))},
         {"training loss", formatted("{:.4f} at step {}", last_loss_, job_.max_steps)},
         {"validation loss", std::isfinite(progress_.best_val)
                                 ? formatted("{:.4f} at best, at step {}", progress_.best_val, progress_.best_step)
                                 : "not measured"},
         {"checkpoint", checkpoint_},
         {"metrics", o_.out_dir + "/metrics.jsonl"}});
    if (o_.profile) report_profile(log_, ops_, job_.max_steps - first_, peaks_.of_rank(ranks()));
    report_next_steps(log_, o_, checkpoint_, program_invocation_name);
  }

  static constexpr int64_t validation_pass = 4096;  // micro-batches whose actions are listed at a time

  const Job& job_;
  const Options& o_;
  RunDirectory& directory_;
  Log& log_;
  StopCondition stop_;
  Peaks peaks_;
  int64_t rank_;
  std::optional<GpuMonitor> monitor_;
  OpLedger ops_;  // before the stream that books in it
  Run run_;
  LrSchedule schedule_;
  DataLoader train_;
  std::optional<DataLoader> val_;

  Progress progress_;              // recorded in checkpoints
  int64_t begun_ = 0, first_ = 0;  // updates begun, and done when this process began
  std::optional<Update> under_way_;
  std::chrono::steady_clock::time_point clock_;  // when the last update was finished, or this one begun
  bool validated_ = false;                       // behind step progress_.done
  std::string checkpoint_;                       // the last one in the out directory
  std::chrono::steady_clock::time_point begin_ = std::chrono::steady_clock::now();
  double step_seconds_ = 0;  // of all steps, without validation, sampling and checkpoints
  double last_loss_ = 0, last_seconds_ = 0;
};

void run_training(const Options& o, StopCondition::Clock::time_point process_begin) {
  note_stop_signals();
  Job job(o, process_begin);
  Log log;
  RunDirectory directory(log, o);
  const std::optional<ResumePoint> resume = directory.resume_point(log, o);
  // Stopped behind the last update, a run may still lack its last validation.
  const bool validation_left =
      resume && resume->step == job.max_steps && job.val && o.val_every > 0 && !directory.validated(resume->step);
  if (resume && resume->step >= job.max_steps && !validation_left) {
    log.line(formatted("already complete: {} is at step {} of {}", o.out_dir, resume->step, job.max_steps));
    return report_next_steps(log, o, resume->path, program_invocation_name);
  }
  if (resume) job.go_on(*resume, log);
  else require_whole_weights(o);
  const Peaks peaks = find_peaks(job.device, job.step.dtype, o.peak_tflops, o.profile)
                          .times(static_cast<double>(devices_in_use(job.device, o.ranks)));
  World world(job.step.zero.mesh(), job.backend);
  run_ranks(world, [&](int rank) {
    Log silent = Log::silent();
    Training(job, directory, rank == 0 ? log : silent, resume, peaks, world, rank).run();
  });
}

}  // namespace
}  // namespace llmc

int main(int argc, char** argv) {
  using namespace llmc;
  const auto begin = StopCondition::Clock::now();
  wait_without_spinning(argv);
  try {
    const Command command = parse_command_line(argc, argv, default_ranks);
    if (command.print) std::printf("%s\n", command.text.c_str());  // --help, --print-config and the like
    else if (command.version) std::printf("%s\n", version_text().c_str());
    else if (command.options.selftest) run_selftest_mode(command.options);
    else if (command.options.verify_data) run_verify_data(command.options);
    else if (command.options.plan) run_plan(command.options);
    else if (command.options.generate) run_generate(command.options);
    else run_training(command.options, begin);
    return static_cast<int>(ExitStatus::done);
  } catch (const Error& error) {
    std::fprintf(stderr, "train_gpt: %s\n", error.what());
    return static_cast<int>(error.status());
  } catch (const std::exception& error) {
    std::fprintf(stderr, "train_gpt: internal error: %s\n", error.what());
    return static_cast<int>(ExitStatus::refused);
  }
}
