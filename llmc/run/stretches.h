// stretches.h: how a run goes from a checkpoint, the end of a stretch of equal steps, or a spike, to the next steps.
#pragma once
#include "run/checkpoints/progress.h"
#include "run/checkpoints/run_dir.h"
#include "run/job.h"
#include "run/processes.h"
#include "run/spikes.h"
#include "run/start.h"

namespace llmc {

// The job from a checkpoint on; its rollbacks, and those of the others, are those of `first`.
inline Job resumed_job(const Job& first, const ResumePoint& from, Log& log) {
  ResumedCourse resumed = resumed_course(from, first);
  if (!resumed.changes.data_fault.empty()) throw Error(resumed.changes.data_fault);
  for (const std::string& notice : resumed.changes.notices) log.line("notice: " + notice);
  first.data->orders = resumed.changes.orders, first.data->unused = resumed.changes.unused;
  const size_t number = resumed.course.stretch_of(from.step + 1);
  Job job(first.asked, first.begin, first.data, std::move(resumed.course), number);
  if (resumed.changes.changed)
    job.former_recipe = from.trainer.value("recipe", nlohmann::json::object()).value("facts", nlohmann::json::object());
  job.data_changes = resumed.changes.data;
  job.rollbacks = first.rollbacks;
  job.require_length();
  job.resume(from, log);
  job.require_later_stretches();
  require_same_run(from, job);
  return job;
}
// The job from the run's beginning on.
inline Job job_from_beginning(const Job& first) {
  Recipe recipe = first.course.recipe();
  take_known_name(recipe, first.rollbacks);
  const std::vector<Skip> skips = skips_of(first.rollbacks, recipe_checksum(recipe));
  Job job(first.asked, first.begin, first.data, Course(std::move(recipe), first.data->train.epoch_tokens(), {}, skips),
          0);
  job.rollbacks = first.rollbacks;
  return job;
}

// The checkpoint at the end of a job's stretch.
inline ResumePoint checkpoint_of(const Job& job) {
  const std::string path = checkpoint_path(job.asked.out_dir, job.last_step());
  wait_for_path(path + "/trainer.json");
  return {path, job.last_step(), read_json(path + "/trainer.json")};
}
// The job of the stretch that follows.
inline Job next_job(const Job& job, const ResumePoint& from, Log& log) {
  Job next(job.asked, job.begin, job.data, job.course, job.number + 1);
  next.rollbacks = job.rollbacks;
  next.resume(from, log);
  require_same_run(from, next);
  return next;
}

namespace detail {

// Where a rollback takes the run from; `fault`: it cannot.
struct RollbackTarget {
  std::optional<ResumePoint> checkpoint = {};  // none: the beginning of the run
  std::string fault = {};
};

// On process 0.
inline RollbackTarget rollback_target(const Start& start, const Job& job, const Spike& spike,
                                      const CheckpointCheck& check, Log& log) {
  const Options& o = job.asked;
  const News found = start.directory->look_again(o);
  if (found.kind == NewsKind::lost) return {.fault = found.text};
  if (!found.text.empty()) log.line(found.text);
  if (auto own = start.directory->rollback_point(log, spike.changed_after, spike.rollback_point, check))
    return {.checkpoint = std::move(own)};
  if (spike.rollback_point == 0) return {};
  // The run began at a checkpoint of another one.
  if (start.resume && start.resume->path != checkpoint_path(o.out_dir, start.resume->step))
    return {.checkpoint = start.resume};
  if (job.parent.is_object() && job.parent["step"] >= spike.changed_after) {
    const std::string path = job.parent["path"];
    if (!check(path, Part::all))
      return {.checkpoint = ResumePoint{path, job.parent["step"], read_json(path + "/trainer.json"), Begin::branch}};
  }
  return {.fault = formatted("the checkpoint of step {}, to which the run would return, is no longer in --out-dir {}",
                             spike.rollback_point, o.out_dir)};
}

// Process 0 tells the others.
inline std::optional<ResumePoint> agree_on(const Processes& processes, RollbackTarget target) {
  const nlohmann::ordered_json text = {to_json_object(target.checkpoint), target.fault};
  const nlohmann::json first = parse_json(processes.all_gather("rollback", text.dump())[0], "process 0");
  if (const std::string fault = first[1]; !fault.empty()) throw SharedError(fault, ExitStatus::diverged);
  if (processes.process() == 0) return std::move(target.checkpoint);
  std::optional<ResumePoint> point = resume_point_from_json(first[0]);
  if (!point) return std::nullopt;
  wait_for_path(point->path + "/trainer.json");
  point->trainer = read_json(point->path + "/trainer.json");
  return point;
}

}  // namespace detail

// Called by all processes once their ranks have ended at a spike: job and resume = those from the checkpoint on to
// which the run returns, without the samples from there to the spike's last. Returns what to report.
inline RollbackLine roll_back(const Processes& processes, const Start& start, const Spike& spike,
                              std::optional<Job>& job, std::optional<ResumePoint>& resume, Log& log) {
  detail::RollbackTarget target;
  check_together(processes, "rollback", job->asked.out_dir, log, [&](const CheckpointCheck& check) {
    target = detail::rollback_target(start, *job, spike, check, log);
  });
  try {
    resume = detail::agree_on(processes, std::move(target));
  } catch (const SharedError& error) {
    throw SharedError(formatted("step {} is a spike: {}; {}", spike.step, spike.what, error.what()), error.status());
  }
  const Stretch& stretch = job->stretch();
  const int64_t to = resume ? resume->step : 0, from = std::max(to, stretch.first_step),
                first = stretch.samples_after(from), samples = stretch.samples_after(spike.step) - first;
  const Recipe& its = job->course.recipe();
  const std::string recipe = recipe_checksum(its), here = its.known_as.empty() ? "" : detail::checksum_here(its);
  const size_t number = rollbacks_since(job->rollbacks, spike.rollback_point, recipe).size() + 1;
  log.line(
      formatted("step {} is a spike: {}: the run returns to {} (rollback {} of at most {} without a later checkpoint), "
                "and leaves out the {} samples from {} on",
                spike.step, spike.what, resume ? resume->path : "its beginning", number, job->asked.max_rollbacks,
                samples, first));
  job->rollbacks.push_back({from, spike.step, spike.loss, spike.grad_norm, samples, recipe, here});
  together(processes, "the earlier step",
           [&] { job.emplace(resume ? resumed_job(*job, *resume, log) : job_from_beginning(*job)); });
  together(processes, "checkpoints after the earlier step", [&] {  // only now, since all can go on from there
    if (processes.process() == 0) start.directory->roll_back(log, to, job->rollbacks, job->asked.keep_checkpoints == 0);
  });
  return {to, spike.step, spike.loss, spike.grad_norm, resume ? resume->path : "", first, samples};
}

}  // namespace llmc
