// faults.h: the faults of a value, one sentence each, for callers that want them without an exception.
#pragma once
#include "core/check.h"

namespace llmc {

struct Faults : std::vector<std::string> {
  // Like CHECK(): the message names what was found, what was expected and what to do.
  template <class... Args>
  void unless(bool holds, std::string_view pattern, const Args&... args) {
    if (!holds) push_back(formatted(pattern, args...));
  }
  // Throws the first fault, if there is one.
  void refuse() const {
    if (!empty()) throw Error(front());
  }
};

}  // namespace llmc
