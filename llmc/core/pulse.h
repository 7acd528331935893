// pulse.h: a count that moves whenever this process gets something done: an op, a part of a file, a part of an
// exchange. It lets the watchdog (net/watching/watchdog.h) tell a process that is busy for a long time from one that
// hangs.
#pragma once
#include <atomic>

#include "core/std.h"

namespace llmc {

namespace detail {
inline std::atomic<uint64_t> pulse_count = 0;
}

// Called often, from any thread: two calls at the same time may count once.
inline void pulse() {
  detail::pulse_count.store(detail::pulse_count.load(std::memory_order_relaxed) + 1, std::memory_order_relaxed);
}
inline uint64_t pulses() { return detail::pulse_count.load(std::memory_order_relaxed); }

}  // namespace llmc
