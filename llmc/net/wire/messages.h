// messages.h: what the processes of a job say to each other over their control connections, and who may say it to whom.
#pragma once
#include "core/check.h"

namespace llmc {

struct Kind {
  enum Value : uint32_t { greeting = 1, verdict, text, gathered, fault, end, failed, board, beat, place };
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
    default: return false;  // also a place: only spares take one, which are not in the job (spare.h)
  }
}

// Why a job cannot go on, and the exit status of its processes: that of a rank that has failed by itself; lost where
// one has gone, hangs, or has not come.
struct Fault {
  std::string why = {};  // empty: there is none
  ExitStatus status = ExitStatus::lost;

  bool known() const { return !why.empty(); }
  // The text, which may be another process's, as far as it is read.
  static std::string limited(const std::string& text) {
    constexpr size_t most = 16 << 10;
    return text.size() <= most ? text : formatted("{}... ({} bytes)", text.substr(0, most), text.size());
  }
  std::vector<std::string> parts() const { return {why, std::to_string(static_cast<int>(status))}; }
  static Fault from(const std::vector<std::string>& parts) {
    const ExitStatus status{std::stoi(parts.at(1))};
    CHECK(status == ExitStatus::refused || status == ExitStatus::diverged || status == ExitStatus::lost,
          "a fault has no such exit status");
    return {limited(parts.at(0)), status};
  }
};

}  // namespace llmc
