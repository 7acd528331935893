// detector.h: outlier detection for losses and gradient norms by z-score: how many standard deviations a value is above
// the mean of the last updates (as in llm.c).
#pragma once
#include <deque>

#include "core/check.h"

namespace llmc {

class OutlierDetector {
 public:
  static constexpr size_t window = 128;

  OutlierDetector() = default;
  explicit OutlierDetector(const std::vector<double>& values) : values_(values.begin(), values.end()) {
    CHECK(values.size() <= window);
  }

  // The largest value whose z-score is at most z; infinity until the window is full.
  double limit(double z) const {
    if (values_.size() < window) return std::numeric_limits<double>::infinity();
    double sum = 0, squares = 0;  // recomputed each time: the same whether or not the run was resumed
    for (double v : values_) sum += v;
    const double mean = sum / window;
    for (double v : values_) squares += (v - mean) * (v - mean);
    return mean + z * std::sqrt(squares / window);
  }

  // Non-finite values are ignored.
  void add(double value) {
    if (!std::isfinite(value)) return;
    values_.push_back(value);
    if (values_.size() > window) values_.pop_front();
  }

  std::vector<double> values() const { return {values_.begin(), values_.end()}; }  // for the checkpoint

 private:
  std::deque<double> values_;
};

}  // namespace llmc
