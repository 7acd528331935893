// training_rank.h: a rank at work on a stretch of a run: what its parts share, and how ranks agree to go on.
#pragma once
#include "core/environment.h"
#include "core/log.h"
#include "core/signals.h"
#include "run/checkpoints/checkpoint_saver.h"
#include "run/checkpoints/progress.h"
#include "run/job.h"
#include "run/news.h"
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
    if (const auto seconds = beginning.totals.saves.seconds()) stop.saves_take(*seconds), checkpoints.took(*seconds);
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

// How the ranks of a run agree, before a step and within a long one, to go on, to save or to end, all at the same
// point. What they have to say (news.h) is known with the result of a step.
class GoOn {
 public:
  explicit GoOn(TrainingRank& rank) : r_(rank) {}

  bool alone() const { return r_.run.groups.ranks() == 1; }
  // Whether the host waits for each step before it begins another one.
  bool waits() const {
    const Options& o = r_.options();
    return r_.job.device.kind != DeviceKind::cuda || o.profile || o.skip_loss_z || o.skip_grad_z ||
           o.on_spike == OnSpike::skip;
  }
  // How many further steps begin before the result of one is known. A rank alone asks itself.
  int64_t ahead() const { return alone() ? 0 : r_.run.trainer.steps_under_way() - waits(); }

  // Whether ranks tell each other by texts, before a micro-batch, whether to go on. Short steps bring that with their
  // results; during a long one it would come late, and the first ones have no duration yet. Alike on all ranks.
  bool asks_before(int64_t micro_batch) const {
    constexpr double often = 10;  // seconds
    if (alone() || seconds_ == 0) return true;
    const double between = seconds_ / static_cast<double>(r_.job.step.micro_batches);
    return seconds_ >= often && micro_batch % std::max<int64_t>(1, static_cast<int64_t>(often / between)) == 0;
  }

  // So many steps of the run have begun; `under_way` of them are not reported yet.
  void begun(int64_t steps, int64_t under_way) { begun_ = steps, under_way_ = under_way; }
  // What rank 0 has seen of the out directory.
  void seen(News directory) { directory_ = std::move(directory); }

  // What this rank tells the others with a step. They hear it once that step is done, and `ahead` others have begun.
  Notices notices() { return {static_cast<double>(news(2 + ahead()).kind), r_.report.update_seconds()}; }
  // What they have told each other with one.
  void hear(const Notices& notices) {
    if (alone()) return;
    heard_ = std::max(heard_.value_or(NewsKind::none), static_cast<NewsKind>(notices.urgency));
    seconds_ = notices.seconds;
  }
  // A checkpoint has begun, perhaps because of what was heard: only a reason to end still counts.
  void forget() {
    if (heard_ && *heard_ < NewsKind::stop) heard_.reset();
  }

  // Throws on all ranks if one of them has a reason to end; otherwise returns the news that all have heard.
  NewsKind poll() {
    const std::string mine = news(1 + ahead()).message();
    const News all = r_.trace.timed("ask all ranks whether to go on",
                                    [&] { return most_urgent(r_.control().all_gather_text("time to stop", mine)); });
    if (all.kind >= NewsKind::stop) throw EndsEarly{all};
    return all.kind;
  }
  // The same before a step, where the results of those before may have brought the news.
  NewsKind agree() {
    if (asks_before(0)) return forget(), poll();
    const NewsKind heard = std::exchange(heard_, std::nullopt).value_or(NewsKind::writing);  // none: as before
    return heard >= NewsKind::stop ? poll() : heard;
  }

 private:
  // What this rank has to tell the others. further: how many steps begin before it can tell them again. A reason to end
  // stays one.
  const News& news(int64_t further) {
    if (news_.kind >= NewsKind::stop) return news_;
    // Carrying on means waiting for these updates and for those under way; and for a checkpoint, before another one.
    const std::string stop = r_.stop.reason(static_cast<double>(further + under_way_) * r_.report.update_seconds() +
                                            r_.checkpoints.seconds_to_settle());
    if (directory_.kind == NewsKind::lost) news_ = directory_;
    else if (!r_.unreadable.empty() && r_.unreadable_at <= begun_ + further)
      news_ = {NewsKind::unreadable, r_.unreadable};
    else if (!stop.empty()) news_ = {NewsKind::stop, stop};
    else if (r_.number == 0 && r_.checkpoints.clock_says()) news_ = {NewsKind::save};
    else news_ = directory_;
    if (news_.kind == NewsKind::none && r_.checkpoints.is_writing()) news_ = {NewsKind::writing};
    return news_;
  }

  TrainingRank& r_;
  News news_, directory_;  // this rank's; rank 0's, from the last look at the out directory
  std::optional<NewsKind> heard_;
  double seconds_ = 0;  // of a step, on the slowest rank; 0: not known yet
  int64_t begun_ = 0, under_way_ = 0;
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
