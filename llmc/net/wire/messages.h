// messages.h: what the processes of a job say to each other over their control connections, and who may say it to whom.
#pragma once
#include <cstdint>
#include <optional>

namespace llmc {

struct Kind {
  enum Value : uint32_t { greeting = 1, verdict, text, gathered, fault, end, failed, board, beat };
};

// Whether process `to` takes a message of this kind from process `from`; none: a process that is not in the job yet.
// Each process has control connections only with processes 0 and 1.
inline bool may_say(uint32_t kind, std::optional<int> from, int to) {
  switch (kind) {
    case Kind::greeting: return !from && to == 0;
    case Kind::verdict:
    case Kind::gathered: return from == 0;
    case Kind::text: return from && to == 0;
    case Kind::failed:
    case Kind::board: return from && to <= 1;
    case Kind::fault:
    case Kind::beat: return from && *from <= 1;
    case Kind::end: return from.has_value();
    default: return false;
  }
}

}  // namespace llmc
