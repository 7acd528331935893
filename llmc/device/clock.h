// clock.h: time on paper. A stream of the null device runs nothing but, at stated rates, computes when each op would
// begin and end and, by its events, what overlaps and what waits.
//
// The simplest model of concurrency: every stream has engines of its own, so that ops and transfers of different
// streams do not slow each other down; the host enqueues in no time; and the ranks of a group run in step, so that a
// transfer begins as soon as this rank arrives, and takes as long as this rank's own bytes.
#pragma once
#include <algorithm>
#include <cstdint>
#include <optional>

#include "core/check.h"

namespace llmc {

// What the clock assumes of a device and of its link to the others. Infinity: takes no time.
struct Rates {
  double flops_per_s, bytes_per_s;  // of memory: reads and writes
  double link_bytes_per_s;          // in each of its two directions
  double link_latency_s;            // per message
};

// The cost of an op, computed from its shapes alone; the null device adds these up.
struct OpCost {
  const char* name;
  double flops = 0;
  double bytes = 0;  // read + written once
  // For a transfer: bytes through this rank's link, in the busier direction, and the number of messages that must
  // follow one another. Known on the null device; no messages: not a transfer.
  double link_bytes = 0;
  int64_t messages = 0;
};

// The time of a stream, in seconds. Without rates it stays 0.
class PaperClock {
 public:
  explicit PaperClock(const std::optional<Rates>& rates) : rates_(rates) {
    CHECK(!rates || (std::min({rates->flops_per_s, rates->bytes_per_s, rates->link_bytes_per_s}) > 0 &&
                     rates->link_latency_s >= 0));
  }

  // Returns how long the op takes.
  double run(const OpCost& cost) {
    if (!rates_) return 0;
    const double seconds =
        cost.messages == 0
            ? std::max(cost.flops / rates_->flops_per_s, cost.bytes / rates_->bytes_per_s)
            : static_cast<double>(cost.messages) * rates_->link_latency_s + cost.link_bytes / rates_->link_bytes_per_s;
    now_ += seconds;
    if (cost.messages > 0) exposed_ += seconds;
    return seconds;
  }
  // Waits until another stream has reached this time.
  void wait(double until) {
    exposed_ += std::max(0.0, until - now_);
    now_ = std::max(now_, until);
  }

  double now() const { return now_; }
  double exposed() const { return exposed_; }

 private:
  std::optional<Rates> rates_;
  double now_ = 0, exposed_ = 0;
};

}  // namespace llmc
