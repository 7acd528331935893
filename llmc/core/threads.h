// threads.h: the same work on several threads.
#pragma once
#include <system_error>
#include <thread>

#include "core/std.h"

namespace llmc {

// Calls work() on this thread and on others, `threads` together, or as many as can be started. It must not throw.
template <class F>
void on_threads(int64_t threads, F&& work) {
  std::vector<std::jthread> others;
  try {
    while (static_cast<int64_t>(others.size()) + 1 < threads) others.emplace_back(work);
  } catch (const std::system_error&) {  // no further thread to be had
  }
  work();
}

}  // namespace llmc
