// clock.h: the clock that measures durations. It never goes back, and says nothing about the time of day. What
// something usually takes.
#pragma once
#include <chrono>

#include "core/std.h"

namespace llmc {

using Clock = std::chrono::steady_clock;

inline double seconds_since(Clock::time_point begin) {
  return std::chrono::duration<double>(Clock::now() - begin).count();
}

// The median of the last three times, or the longer one of two: a pause in one of them is no trend.
class UsualTime {
 public:
  void add(double seconds) {
    last_ = {last_[1], last_[2], seconds};
    known_ = std::min<size_t>(known_ + 1, last_.size());
  }
  // None: there was none yet.
  std::optional<double> seconds() const {
    std::vector<double> sorted(last_.end() - static_cast<std::ptrdiff_t>(known_), last_.end());
    std::ranges::sort(sorted);
    return known_ == 0 ? std::nullopt : std::optional(sorted[known_ / 2]);
  }

 private:
  std::array<double, 3> last_ = {};  // the newest is the last one
  size_t known_ = 0;
};

}  // namespace llmc
