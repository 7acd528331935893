// clocks.h: the clocks of several machines, compared over messages (as in NTP, Mills 1991), so that the times of all
// ranks fit into one trace.
#pragma once
#include <sstream>

#include "comm/host_group.h"
#include "core/environment.h"
#include "core/files.h"

namespace llmc {

// How far this clock is ahead of rank 0's. The error is at most the uncertainty.
struct ClockOffset {
  int64_t ns = 0, uncertainty_ns = 0;
};

// Equal for processes that have the same steady clock: those of one running kernel.
inline std::string name_of_clock() {
  std::string boot;
  try {
    boot = read_text("/proc/sys/kernel/random/boot_id");
  } catch (const Error&) {  // the name of the host must do
  }
  return host_name() + " " + boot;
}

// A text that takes d from rank 0 to this rank, by their own clocks, has taken d - offset; one that takes d' back,
// d' + offset. Both are positive, so the offset lies between -d' and d: in the middle, if both take equally long. Of
// several texts the fastest count, and of the ranks with the same clock the one that knows best.
// All ranks call it, between two steps. clock: equal for ranks with the same clock; now(): its time in nanoseconds
inline ClockOffset compare_clocks(HostGroup& control, const std::string& clock, const std::function<int64_t()>& now) {
  constexpr int rounds = 8;
  const std::vector<std::string> clocks = control.all_gather_text("clocks", clock);
  const size_t ranks = clocks.size(), me = static_cast<size_t>(control.rank());
  if (std::ranges::count(clocks, clocks[0]) == std::ssize(clocks)) return {};
  std::vector<int64_t> fastest(ranks, std::numeric_limits<int64_t>::max());  // from each rank to this one
  for (int round = 0; round < rounds; ++round) {
    const std::vector<std::string> sent = control.all_gather_text("time", std::to_string(now()));
    const int64_t arrived = now();
    for (size_t r = 0; r < ranks; ++r) fastest[r] = std::min(fastest[r], arrived - int64_t{std::stoll(sent[r])});
  }
  std::string mine = std::to_string(fastest[0]);
  if (me == 0)
    for (size_t r = 1; r < ranks; ++r) mine += " " + std::to_string(fastest[r]);
  const std::vector<std::string> all = control.all_gather_text("times between clocks", mine);
  if (clock == clocks[0]) return {};
  ClockOffset best{0, std::numeric_limits<int64_t>::max()};
  std::istringstream to_first(all[0]);
  for (size_t r = 0; r < ranks; ++r) {
    int64_t to = 0;
    to_first >> to;
    if (clocks[r] != clock) continue;
    const int64_t from = std::stoll(all[r]), uncertainty = (from + to) / 2;
    if (uncertainty < best.uncertainty_ns) best = {(from - to) / 2, uncertainty};
  }
  return best;
}

}  // namespace llmc
