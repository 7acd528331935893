// go_on.h: how the ranks of a run agree, before a step and within a long one, to go on, to save or to end: all at the
// same point. What they have to say travels with the reduction of every step, and is known with its result; if it ends
// the run, they exchange texts.
#pragma once
#include "run/news.h"
#include "run/training_rank.h"

namespace llmc {

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
  Notices notices() { return {urgency(news(2 + ahead()).kind), r_.report.last_seconds()}; }
  // What they have told each other with one.
  void hear(const Notices& notices) {
    if (alone()) return;
    heard_ = std::max(heard_.value_or(NewsKind::none), kind_of_urgency(notices.urgency));
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
    const std::string stop = r_.stop.reason(static_cast<double>(further + under_way_) * r_.report.last_seconds() +
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

}  // namespace llmc
