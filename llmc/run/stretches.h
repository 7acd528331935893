// stretches.h: how a run goes from a checkpoint, or from the end of a stretch of equal steps, to the next steps.
#pragma once
#include <nlohmann/json.hpp>
#include <string>
#include <utility>

#include "run/checkpoints/progress.h"
#include "run/checkpoints/run_dir.h"
#include "run/job.h"
#include "run/start.h"

namespace llmc {

// The job from a checkpoint on.
inline Job resumed_job(const Job& first, const ResumePoint& from, Log& log) {
  ResumedCourse resumed = resumed_course(from, first);
  for (const std::string& notice : resumed.changes.notices) log.line("notice: " + notice);
  first.data->seeds = resumed.changes.seeds;
  const size_t number = resumed.course.stretch_of(from.step + 1);
  Job job(first.asked, first.begin, first.data, std::move(resumed.course), number);
  if (resumed.changes.changed)
    job.former_recipe = from.trainer.value("recipe", nlohmann::json::object()).value("facts", nlohmann::json::object());
  job.resume(from, log);
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
  next.resume(from, log);
  return next;
}

}  // namespace llmc
