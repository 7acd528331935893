// training_rank.h: a rank at work on a stretch of a run: what the parts of its loop share.
#pragma once
#include <optional>
#include <string>

#include "core/host_name.h"
#include "core/log.h"
#include "core/signals.h"
#include "run/checkpoints/checkpoint_saver.h"
#include "run/checkpoints/progress.h"
#include "run/job.h"
#include "run/ranks.h"
#include "run/reports/peak.h"
#include "run/reports/step_report.h"
#include "run/trace/step_trace.h"

namespace llmc {

// Why the ranks of this process begin: it starts, or they have ended another stretch, or return to an earlier step.
enum class After : uint8_t { start, stretch, rollback };

// What the process has found when the ranks begin a stretch of the run.
struct Beginning {
  const std::optional<ResumePoint>& resume;
  const Peaks& peaks;
  After after;
  const RollbackLine& rollback;  // if it is one
  RunDirectory* directory;       // rank 0's out directory; null on the other ranks
  Log& log;
  RunTotals& totals;
};

struct TrainingRank {
  TrainingRank(const Job& its_job, const Beginning& beginning, World& world, int rank)
      : job(its_job),
        log(beginning.log),
        number(rank),
        local(world.local()),
        stop(job.options.time_limit, job.begin, static_cast<double>(job.checkpoint_bytes()) / assumed_bytes_per_second),
        report(job, log, beginning.peaks, rank == 0, beginning.totals),
        trace(beginning.after == After::start ? job.options.trace : "", log),
        run(job.step, job.plan, rank_device(job.device, job.options.place, rank - job.options.place.first_rank()),
            world, rank),
        checkpoints(job, beginning.directory, log, report, stop) {
    if (const auto seconds = beginning.totals.save_seconds) stop.saved(*seconds), checkpoints.took(*seconds);
    if (watchdog() != nullptr)
      checkpoints.when_saving([this](bool saving) { watchdog()->board.saving(number, saving); });
    if (const std::string& why = run.copies_of_state.not_pinned(); !why.empty())
      log.line("notice: training stands still for longer while a checkpoint is copied, to memory that is not pinned: " +
               why);
  }

  const Job& job;
  Log& log;
  int number;
  LocalRanks local;
  StopCondition stop;
  StepReport report;
  StepTrace trace;  // declared before the streams that it records
  OpLedger ops;     // declared before the stream that records ops in it
  Run run;
  CheckpointSaver checkpoints;  // declared after the memory of copies that it may be writing

  Progress progress;          // recorded in checkpoints
  int64_t first = 0;          // updates done before this start
  std::string unreadable;     // why this rank cannot read a sample that is needed; empty: it can
  int64_t unreadable_at = 0;  // the step that needs it; 0: it is needed now

  const Options& options() const { return job.options; }
  Watchdog* watchdog() const { return local.watchdog; }  // of several ranks; else null
  Comm& control() const { return run.groups[GroupName::control]; }

  // All ranks will hear that this one cannot read its samples, and what needs them.
  void cannot_read(const std::string& error, const std::string& what_for, int64_t at = 0) {
    unreadable_at = at;
    unreadable = (run.groups.ranks() > 1 ? formatted("rank {} on {}: ", number, host_name()) : "") +
                 formatted("{}; {} needs it", error, what_for);
  }
  std::string saved_to() const { return progress.done > 0 ? ", saved to " + checkpoints.last() : ""; }
};

}  // namespace llmc
