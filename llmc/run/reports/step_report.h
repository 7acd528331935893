// step_report.h: what a run prints about its updates: a line for each, GPU readings, and the summary at the end.
#pragma once
#include <deque>

#include "core/clock.h"
#include "device/nvml.h"
#include "run/checkpoints/progress.h"
#include "run/job.h"
#include "run/reports/report.h"

namespace llmc {

// What a run does between updates.
enum class Task : uint8_t { validation, sample, checkpoint, local_checkpoint, comparison, verification };

// The sums of this start of a run, over all of its stretches.
struct RunTotals {
  Clock::time_point begin = Clock::now();
  double step_seconds = 0;  // without validation, sampling and checkpoints
  double data_seconds = 0;  // of these, waiting for data
  int64_t updates = 0, tokens = 0;
  double flops = 0;
  UsualTime saves = {};  // of checkpoints, until they are durable
};

class StepReport {
 public:
  StepReport(const Job& job, Log& log, const Peaks& peaks, bool first_rank, RunTotals& totals)
      : job_(job), o_(job.options), log_(log), peaks_(peaks), first_rank_(first_rank), totals_(totals) {
    if (first_rank && o_.log_gpu_every > 0) monitor_.emplace(gpu_info(job.rank_device.gpu).bus_id);
  }

  // Training resumes after this step, or begins if it is 0.
  void resume_after(int64_t step) { first_ = step; }
  // An update begins, and none is under way.
  void start_clock() { clock_ = Clock::now(); }

  // Returns how long that usually takes.
  double saved(double seconds) {
    totals_.saves.add(seconds);
    return *totals_.saves.seconds();
  }

  // An update has finished. Its time runs from the end of the previous one, or from start_clock(). With an asynchronous
  // pipeline it is the mean over the last updates, as many as are under way: several finish together when the pipeline
  // is flushed, and none while it fills. waited: seconds for its batches
  void finished(int64_t step, double lr, double waited, const StepResult& result, const NoiseScale& noise) {
    between_.push_back(seconds_since(clock_));
    clock_ = Clock::now();
    totals_.step_seconds += between_.back();
    totals_.data_seconds += waited;
    totals_.tokens += job_.step.tokens();
    totals_.flops += job_.flops_per_step();
    ++totals_.updates;
    if (between_.size() >
        static_cast<size_t>(job_.step.layout.pipeline.asynchronous() ? job_.step.layout.pipeline.stages : 1))
      between_.pop_front();
    const double seconds =
        std::accumulate(between_.begin(), between_.end(), 0.0) / static_cast<double>(between_.size());
    recent_.push_back(seconds);
    // The first update touches all memory for the first time.
    if (recent_.size() > recent_updates || (recent_.size() == 2 && step == first_ + 2)) recent_.pop_front();
    last_loss_ = result.loss;
    const bool on_gpu = job_.device.kind == DeviceKind::cuda;
    if (peaks_.raise(job_.flops_per_step() / seconds) && !std::exchange(raised_, true))
      log_.line(
          formatted("notice: step {} was faster than the matmul peak that was measured at the start, when the machine "
                    "was busy: MFU refers to the fastest step from here on",
                    step));
    log_.train({.step = step,
                .max_steps = job_.max_steps,
                .loss = result.loss,
                .grad_norm = result.grad_norm,
                .lr = lr,
                .ms = seconds * 1e3,
                .tokens_per_s = static_cast<double>(job_.step.tokens()) / seconds,
                .mfu = share_of(peaks_.promised, seconds),
                .speed_of_light = on_gpu ? share_of(peaks_.measured, seconds) : std::nullopt,
                .eta_s = seconds_left(step),
                .tokens = job_.course.tokens_after(step),
                .memory = on_gpu ? job_.plan.total_bytes() : resident_bytes(),
                .skipped = !result.applied,
                .column = experts_column(result),
                .more = more_numbers(waited, result, noise)},
               step % o_.log_every == 0 || step == first_ + 1 || step == job_.max_steps);
  }

  // Runs a task and records how long it took.
  template <class F>
  void timed(Task task, F&& work) {
    const auto begin = Clock::now();
    work();
    took(task, seconds_since(begin));
  }
  void took(Task task, double seconds) { tasks_[static_cast<size_t>(task)].add(seconds); }

  // Further remarks about an update that has finished and not diverged.
  void notices(int64_t step, const StepResult& result) {
    if (monitor_ && step % o_.log_gpu_every == 0) read_gpu(step);
    if (result.experts && result.experts->rounds > 1 && !std::exchange(rounds_said_, true))
      log_.line(formatted(
          "notice: in step {} tokens went to the experts of other ranks in {} rounds, because one rank got more than "
          "--moe-imbalance has room for; expert_rounds in metrics.jsonl has the number of every step",
          step, result.experts->rounds));
  }

  // How long an update takes now, in seconds: as long as the last one, unless there was a pause in that.
  double update_seconds() const { return recent_.empty() ? 0 : std::min(recent_.back(), 2 * usual_seconds()); }

  // Until the end of the run, after this step: estimated from recent updates and the last tasks of each kind; kinds
  // that never ran are left out.
  double seconds_left(int64_t step) const {
    double seconds = usual_seconds() * static_cast<double>(job_.course.tokens() - job_.course.tokens_after(step)) /
                     static_cast<double>(job_.step.tokens());
    const auto task_seconds = [&](Task task) { return tasks_[static_cast<size_t>(task)].seconds().value_or(0); };
    const auto times = [&](int64_t every) {
      return every > 0 ? static_cast<double>(ceil_div(job_.max_steps, every) - (step - 1) / every) : 0;
    };
    const double saves = times(o_.checkpoint_every > 0 ? o_.checkpoint_every : job_.max_steps),
                 between = 60 * o_.minutes_between_checkpoints();
    const double saves_by_clock = between > 0 ? std::max(0.0, seconds / between - saves) : 0;
    seconds += task_seconds(Task::checkpoint) * (saves + saves_by_clock);
    for (const auto& [task, every] : {std::pair(Task::validation, job_.validates() ? o_.val_every : 0),
                                      {Task::sample, o_.sample_every},
                                      {Task::local_checkpoint, o_.checkpoint_local_every},
                                      {Task::comparison, o_.check_replicas},
                                      {Task::verification, o_.verify_updates}})
      seconds += task_seconds(task) * times(every);
    return seconds;
  }

  // Called at the end of a run. ops: where --profile has recorded its ops. memory: Run::memory_taken().
  void summary(const Progress& progress, const std::string& checkpoint, const OpLedger& ops,
               const std::string& memory) const {
    const double seconds = totals_.step_seconds;
    if (totals_.updates == 0) return log_.line("done: only the last validation was missing");
    const std::string mfu = peaks_.promised ? formatted("{:.1f}% MFU", 100 * totals_.flops / seconds / *peaks_.promised)
                                            : std::string("MFU n/a");
    Rows rows = {
        {"time", formatted("{} total, {} in training steps, {:.1f}% of these waiting for data",
                           human_duration(seconds_since(totals_.begin)), human_duration(seconds),
                           100 * totals_.data_seconds / seconds)},
        {"throughput", formatted("{} tokens/s, {}", human_amount(static_cast<double>(totals_.tokens) / seconds), mfu)},
        {"training loss", formatted("{:.4f} at step {}", last_loss_, job_.max_steps)},
        {"validation loss", std::isfinite(progress.best_val)
                                ? formatted("best {:.4f} at step {}", progress.best_val, progress.best_step)
                                : "not measured"},
        {"checkpoint", checkpoint},
        {"metrics", o_.out_dir + "/metrics.jsonl"}};
    if (!memory.empty()) rows.emplace_back(job_.device.kind == DeviceKind::cuda ? "GPU memory" : "memory", memory);
    log_.table("done", rows);
    if (o_.profile && first_rank_)
      report_profile(log_, ops, first_ + 1, job_.last_step(), roof().of_rank(job_.step.layout.ranks()));
  }

 private:
  // On a CPU, the peaks are measured again, since the machine may have been busy at the start; the higher value counts.
  // They are not measured again if too little memory is left to measure its speed.
  Peaks roof() const {
    constexpr int64_t enough = int64_t{1} << 30;
    Peaks best = peaks_;
    if (job_.device.kind != DeviceKind::cpu || host_memory() - resident_bytes() < enough) return best;
    try {
      const Device device = working_device(job_.device, o_.place);
      best.raise(measure_matmul_peak(device, job_.step.precision.products) * devices_in_use(device, o_));
      best.bandwidth = std::max(best.bandwidth, measure_bandwidth(rank_device(job_.device, o_.place)));
    } catch (const Error&) {  // another program has the memory
    }
    return best;
  }

  // "0.7-1.5": the use of the least and the most chosen expert, over the mean; with a capacity, the share dropped.
  std::optional<std::pair<std::string, std::string>> experts_column(const StepResult& result) const {
    if (!result.experts) return std::nullopt;
    const ExpertStatistics& e = *result.experts;
    if (job_.step.experts.capacity_factor) return std::pair{"dropped", formatted("{:.1f}%", 100 * e.dropped)};
    return std::pair{"experts",
                     formatted("{:.1f}-", e.smallest) + formatted(e.largest < 9.95 ? "{:.1f}" : "{:.0f}", e.largest)};
  }
  std::vector<std::pair<const char*, double>> more_numbers(double waited, const StepResult& result,
                                                           const NoiseScale& noise) const {
    std::vector<std::pair<const char*, double>> all = {{"data_ms", 1e3 * waited}};
    const auto add = [&](const char* name, double value) { all.emplace_back(name, value); };
    if (result.z_loss) add("z_loss", *result.z_loss);
    if (const auto& l = result.logits) {
      add("largest_logit", l->largest);
      add("clipped_heads", static_cast<double>(l->clipped));
    }
    if (result.noise) {
      add("noise_square", result.noise->square);
      add("noise_trace", result.noise->trace);
      if (noise.tokens()) add("noise_scale", *noise.tokens());
    }
    if (const auto& e = result.experts) {
      add("moe_balance_loss", e->balance_loss);
      add("moe_z_loss", e->z_loss);
      add("router_entropy", e->entropy);
      add("expert_largest", e->largest);
      add("expert_smallest", e->smallest);
      add("dropped", e->dropped);
      add("expert_rounds", e->rounds);
    }
    return all;
  }

  // The share of a peak, in flops per second, that a step taking this many seconds reached.
  std::optional<double> share_of(std::optional<double> peak, double seconds) const {
    return peak ? std::optional(job_.flops_per_step() / seconds / *peak) : std::nullopt;
  }

  // Of a recent update: a pause is no trend.
  double usual_seconds() const { return median({recent_.begin(), recent_.end()}); }

  void read_gpu(int64_t step) {
    if (const auto reading = monitor_->read())
      return log_.facts("gpu", step, to_string(*reading), to_json_object(*reading));
    log_.line("notice: " + monitor_->why_not());
    monitor_.reset();
  }

  const Job& job_;
  const Options& o_;
  Log& log_;
  Peaks peaks_;
  bool first_rank_;
  bool raised_ = false, rounds_said_ = false;  // notices that are printed once
  std::optional<GpuMonitor> monitor_;
  int64_t first_ = 0;        // updates done when training began or resumed
  Clock::time_point clock_;  // when the last update finished, or the current one began
  RunTotals& totals_;
  static constexpr size_t recent_updates = 16;
  std::deque<double> between_;           // seconds from one update to the next, for recent ones
  std::deque<double> recent_;            // seconds per update, for recent ones
  std::array<UsualTime, 6> tasks_ = {};  // by Task
  double last_loss_ = 0;
};

}  // namespace llmc
