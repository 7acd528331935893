// clock.h: time on paper. A stream of the null device runs nothing but computes when each op would begin and end on a
// machine and, by its events, what overlaps and what waits.
//
// The simplest model of concurrency: every stream has engines of its own, so that ops and transfers of different
// streams do not slow each other down. But where links are shared, collectives of side streams go one after another
// through the tier that bounds them. The host enqueues in no time; and the ranks of a group run in step, so that a
// transfer begins as soon as this rank arrives, and takes as long as this rank's own bytes.
#pragma once
#include <algorithm>
#include <map>
#include <memory>
#include <string>

#include "device/machine.h"

namespace llmc {

// When the links of a rank are free again, by tier.
using LinkTimes = std::map<size_t, double>;

// The time of a stream, in seconds. Without a machine it stays 0.
class PaperClock {
 public:
  // links: shared by the side streams of a rank; none: for the stream that computes, whose transfers go first
  PaperClock(std::shared_ptr<const Machine> machine, std::shared_ptr<LinkTimes> links)
      : machine_(std::move(machine)), links_(std::move(links)) {}

  // Returns how long the op takes.
  double run(const OpCost& cost) {
    if (!machine_) return 0;
    const double seconds = machine_->seconds(cost);
    if (cost.messages > 0 && cost.pattern != Pattern::neighbours && links_ && machine_->share_links) {
      double& free = (*links_)[machine_->path_of(cost).tier];
      wait(free, cost.group);
      free = now_ + seconds;
    }
    now_ += seconds;
    if (cost.messages > 0) {
      last_transfer_ = cost.group;
      expose(seconds, cost.group);
    }
    return seconds;
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
  void expose(double seconds, const char* group) {
    exposed_ += seconds;
    exposed_by_group_[group == nullptr ? "other streams" : group] += seconds;
  }

  std::shared_ptr<const Machine> machine_;
  std::shared_ptr<LinkTimes> links_;
  double now_ = 0, exposed_ = 0;
  std::map<std::string, double> exposed_by_group_;
  const char* last_transfer_ = nullptr;  // the group of this stream's last transfer
};

}  // namespace llmc
