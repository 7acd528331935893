// detector.h: is a loss or a gradient norm far from those of the last updates? By z-score, the distance from their mean
// in standard deviations (as llm.c does).
#pragma once
#include <cmath>
#include <deque>
#include <limits>
#include <vector>

#include "core/check.h"

namespace llmc {

class OutlierDetector {
 public:
  static constexpr size_t window = 128;

  OutlierDetector() = default;
  explicit OutlierDetector(const std::vector<double>& values) : values_(values.begin(), values.end()) {
    CHECK(values.size() <= window);
  }

  // The largest value whose z-score is at most z; infinity until a whole window was seen.
  double limit(double z) const {
    if (values_.size() < window) return std::numeric_limits<double>::infinity();
    double sum = 0, squares = 0;  // anew each time: the same whether or not the run was interrupted
    for (double v : values_) sum += v;
    const double mean = sum / window;
    for (double v : values_) squares += (v - mean) * (v - mean);
    return mean + z * std::sqrt(squares / window);
  }

  // Values that are not finite leave no trace.
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
