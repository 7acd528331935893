// clock.h: time on paper. A stream of the null device runs nothing but computes when each op would begin and end on a
// machine and, by its events, what overlaps and what waits.
//
// The simplest model of concurrency: every stream has engines of its own, so that ops and transfers of different
// streams do not slow each other down. But where links are shared, collectives of side streams go one after another
// through the tier that bounds them; where streams share processors, whatever they do goes one after another; and NCCL
// begins collectives in the order in which the host enqueues them, whatever their streams (a message between two ranks
// begins at once and waits for the other rank, which delays nobody). The host enqueues in no time; and the ranks of a
// group run in step: a transfer begins as soon as this rank arrives, and takes as long as this rank's own bytes.
#pragma once
#include "device/machine.h"

namespace llmc {

// When what the streams of a rank share is free again, and the group whose transfer takes it until then: its links by
// tier, and its processors.
struct InUse {
  double until = 0;
  const char* group = nullptr;
};
struct LinkTimes {
  std::map<size_t, InUse> tiers;
  InUse processors;
  bool in_order = false;  // does a collective begin only when those enqueued before it have begun?
  InUse last;             // until the last of them begins
};

// The time of a stream, in seconds. Without a machine it stays 0.
class PaperClock {
 public:
  // links: of a rank. is_side: of a side stream; the transfers of the stream that computes go first
  PaperClock(std::shared_ptr<const Machine> machine, std::shared_ptr<LinkTimes> links, bool is_side)
      : machine_(std::move(machine)), links_(std::move(links)), is_side_(is_side) {}

  // How long an op takes, apart from waits.
  double seconds_of(const OpCost& cost) const { return machine_ ? machine_->seconds(cost) : 0; }
  // Runs an op that takes this long.
  void run(const OpCost& cost, double seconds) {
    if (!machine_) return;
    const bool ordered = links_ && links_->in_order && cost.messages > 0 && cost.pattern != Pattern::neighbours;
    if (ordered) wait(links_->last.until, links_->last.group);
    InUse* const shared = seconds > 0 ? shared_by(cost) : nullptr;
    if (shared != nullptr) wait(shared->until, cost.messages > 0 ? cost.group : shared->group);
    if (ordered) links_->last = {now_, cost.group};
    now_ += seconds;
    if (shared != nullptr) *shared = {now_, cost.messages > 0 ? cost.group : nullptr};
    if (cost.messages > 0 || cost.host.both() > 0 || cost.file.both() > 0) {
      last_transfer_ = cost.group;
      expose(seconds, cost.group);
    }
  }
  // Waits until another stream has reached this time, at the end of a transfer of this group (none: of work).
  void wait(double until, const char* group) {
    if (until <= now_) return;
    expose(until - now_, group);
    now_ = until;
  }

  double now() const { return now_; }
  double exposed() const { return exposed_; }
  // The groups for whose transfers this stream waits, or which it makes itself.
  const std::map<std::string, double>& exposed_by_group() const { return exposed_by_group_; }
  const char* last_transfer() const { return last_transfer_; }

 private:
  // What the op shares with those of other streams; none: nothing.
  InUse* shared_by(const OpCost& cost) {
    if (!links_ || cost.file.both() > 0) return nullptr;
    if (machine_->one_at_a_time) return &links_->processors;
    const bool queues = is_side_ && machine_->share_links && cost.messages > 0 && cost.pattern != Pattern::neighbours;
    return queues ? &links_->tiers[machine_->path_of(cost).tier] : nullptr;
  }
  void expose(double seconds, const char* group) {
    exposed_ += seconds;
    exposed_by_group_[group == nullptr ? "other streams" : group] += seconds;
  }

  std::shared_ptr<const Machine> machine_;
  std::shared_ptr<LinkTimes> links_;
  bool is_side_;
  double now_ = 0, exposed_ = 0;
  std::map<std::string, double> exposed_by_group_;
  const char* last_transfer_ = nullptr;  // the group of this stream's last transfer
};

}  // namespace llmc
