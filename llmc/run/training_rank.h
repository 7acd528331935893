// training_rank.h: a rank at work on a stretch of a run: what the parts of its loop share.
#pragma once
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

// Why a run of so many steps ends, of which `done` are, and what to do about it. why: the error of a sample; saved: ",
// saved to ..."; left_out: what to leave out of the command to resume.
inline std::string unreadable_text(const std::string& why, int64_t done, int64_t steps, const std::string& saved,
                                   const std::string& left_out) {
  if (done == 0 && why.find(outside_vocabulary) != std::string::npos)
    return formatted(
        "{}. The run ended before its first update. Were the data made with the model's tokenizer? A new model takes "
        "its vocabulary from --tokenizer, or --vocab-size; --verify-data names the largest token. If the file "
        "is damaged, repair it and run the same command again{}",
        why, left_out);
  return formatted(
      "{}. The run ended after step {} of {}{}. Repair the file, keeping its number of tokens (--verify-data names the "
      "bad token), and run the same command again{} with --data-changed accept",
      why, done, steps, saved, left_out);
}

}  // namespace llmc
