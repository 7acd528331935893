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

// The larger of the two in the middle of an even number of values.
inline double median(std::vector<double> values) {
  const auto middle = values.begin() + std::ssize(values) / 2;
  std::nth_element(values.begin(), middle, values.end());
  return *middle;
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
    if (known_ == 0) return std::nullopt;
    return median({last_.end() - static_cast<std::ptrdiff_t>(known_), last_.end()});
  }

 private:
  std::array<double, 3> last_ = {};  // the newest is the last one
  size_t known_ = 0;
};

}  // namespace llmc
