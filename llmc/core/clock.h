// clock.h: the clock that measures durations. It never goes back, and says nothing about the time of day.
#pragma once
#include <chrono>

namespace llmc {

using Clock = std::chrono::steady_clock;

inline double seconds_since(Clock::time_point begin) {
  return std::chrono::duration<double>(Clock::now() - begin).count();
}

}  // namespace llmc
