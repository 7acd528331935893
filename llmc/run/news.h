// news.h: what ranks tell each other, so that all of them save or end at the same point, whichever has the reason. The
// kind travels with the reduction of every step (Notices); only if it ends the run do ranks exchange texts.
#pragma once
#include "core/signals.h"

namespace llmc {

// In order of urgency, the most urgent last.
enum class NewsKind : uint8_t {
  none,
  writing,     // a checkpoint: this rank's part is not there yet
  save,        // rank 0: it is time, or the out directory is a new one
  stop,        // a signal or the time limit; text: which
  unreadable,  // text: the error of a rank that cannot read its samples
  lost,        // the out directory; text: how
};

struct News {
  NewsKind kind = NewsKind::none;
  std::string text = {};

  // As a message to the other ranks; "" for none.
  std::string message() const {
    return kind == NewsKind::none ? "" : std::string(1, static_cast<char>('0' + static_cast<int>(kind))) + text;
  }
};

// The most urgent of all ranks' messages; among equals, that of the lowest rank.
inline News most_urgent(const std::vector<std::string>& messages) {
  News first;
  for (const std::string& message : messages)
    if (const auto kind = static_cast<NewsKind>(message.empty() ? 0 : message[0] - '0'); kind > first.kind)
      first = {kind, message.substr(1)};
  return first;
}

// Thrown by all ranks where the run ends early. reason: the text of the news.
struct EndsEarly : Interrupted {
  NewsKind kind;
  explicit EndsEarly(const News& why) : Interrupted{why.text}, kind(why.kind) {}
};

}  // namespace llmc
