// spikes.h: updates whose loss or gradient norm is above its limit or not finite, which no rank makes; and those after
// which the loss is not finite. All ranks see the same, because loss and norm have one value on all (step_scalars.h),
// and so do the limits, which follow from earlier values alone.
#pragma once
#include "comm/comm.h"
#include "run/checkpoints/progress.h"
#include "run/checkpoints/run_record.h"
#include "run/options/options.h"
#include "train/step_config.h"

namespace llmc {

struct Spike {
  int64_t step;
  double loss, grad_norm;
  std::string what;                               // "the loss, 9.1, is above 3.2, ..."
  int64_t rollback_point = 0, changed_after = 0;  // Progress's, if the run rolls back
};

// Thrown by all ranks where the run returns to an earlier step.
struct RollsBack {
  Spike spike;
};

// The limits of the next update.
struct SpikeLimits {
  double loss = std::numeric_limits<double>::infinity(), grad_norm = loss;

  SpikeLimits(const Progress& progress, const Options& o) {
    if (o.skip_loss_z) loss = progress.losses.limit(*o.skip_loss_z);
    if (o.skip_grad_z) grad_norm = progress.norms.limit(*o.skip_grad_z);
  }
};

// What is wrong with an update that was not made.
inline std::string describe_spike(const StepResult& result, const SpikeLimits& limits, const Options& o) {
  if (!result.finite()) return formatted("loss {} or gradient norm {} is not finite", result.loss, result.grad_norm);
  const bool by_loss = result.loss > limits.loss;
  return formatted("the {}, {:.4g}, is above {:.4g}, {} standard deviations above the mean of the last {} ({})",
                   by_loss ? "loss" : "gradient norm", by_loss ? result.loss : result.grad_norm,
                   by_loss ? limits.loss : limits.grad_norm, (by_loss ? o.skip_loss_z : o.skip_grad_z).value_or(0),
                   OutlierDetector::window, by_loss ? "--skip-loss-z" : "--skip-grad-z");
}

// What else a run that stops at a spike could do about it, as far as its other options allow; resumes: it has a
// checkpoint
inline std::string other_ways_past(const Options& o, bool resumes) {
  if (o.on_spike != OnSpike::stop) return "";
  std::vector<std::string> ways;
  if (o.schedule != Schedule::pipedream) ways.emplace_back("skip");
  if (!o.overfit_batch) ways.emplace_back(o.checkpoint_every > 0 ? "rollback" : "rollback --checkpoint-every N");
  if (ways.empty()) return "";
  return formatted(", or {} with --on-spike {}", resumes ? "resume" : "begin again", either(ways));
}

// Why a run does not return to this step once more; empty: it may.
inline std::string why_no_rollback(const Job& job, int64_t step) {
  const std::vector<Rollback> before = rollbacks_since(job.rollbacks, step, recipe_checksum(job.course.recipe()));
  if (std::ssize(before) < job.asked.max_rollbacks) return "";
  std::vector<int64_t> steps;
  for (const Rollback& rollback : before) steps.push_back(rollback.spike);
  return formatted(
      " {} rollback(s) to step {}, after spikes at steps {}, have led to no later checkpoint (--max-rollbacks {}).",
      before.size(), step, steps, job.asked.max_rollbacks);
}

// The step to which a rollback takes a run that resumes here: that of the last checkpoint of a rule, unless it is of
// other data, another recipe or other steps, or is gone. All ranks together.
inline int64_t rollback_point_from(const ResumePoint& from, const Progress& progress, const Job& job, Comm& control,
                                   Log& log) {
  const int64_t point = progress.rollback_point, changed = progress.changed_after();
  if (from.path != checkpoint_path(job.asked.out_dir, from.step) || (changed > 0 && point <= changed)) return from.step;
  const bool of_parent = job.parent.is_object() && whole_number(member(job.parent, "step")) == point;
  const std::string path = of_parent ? job.parent.value("path", "") : checkpoint_path(job.asked.out_dir, point);
  const bool there = point == 0 || point == from.step || is_directory(path);
  if (control.all_gather_text("rollback point", there ? "yes" : "")[0] == "yes") return point;  // as rank 0 sees it
  if (job.asked.rolls_back())
    log.line(
        formatted("notice: {}, to which a rollback would return, is not there: until the next one of "
                  "--checkpoint-every it returns to {}",
                  path, from.path));
  return from.step;
}

// Ends the run if not all ranks have seen, and will do, the same: the numbers of one are wrong.
inline void require_same_spike(const Spike& spike, OnSpike action, Comm& control) {
  const std::vector<std::string> all = control.all_gather_text(
      "spike", formatted("step {}, loss {:.17g}, gradient norm {:.17g}, and would {} (to step {})", spike.step,
                         spike.loss, spike.grad_norm, action, spike.rollback_point));
  for (size_t rank = 1; rank < all.size(); ++rank)
    if (all[rank] != all[0])
      throw SharedError(formatted("ranks do not agree on a spike: rank 0 has computed {}, and rank {} {}: one of their "
                                  "machines computes wrong numbers",
                                  all[0], rank, all[rank]),
                        ExitStatus::diverged);
}

}  // namespace llmc
