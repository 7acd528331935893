// news.h: the messages that ranks exchange between micro-batches and updates, so that all of them save or end at the
// same point, whichever has the reason.
#pragma once
#include <string>
#include <vector>

#include "core/signals.h"

namespace llmc {

// In order of urgency, the most urgent last.
enum class NewsKind : char {
  none = '0',
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
  std::string message() const { return kind == NewsKind::none ? "" : static_cast<char>(kind) + text; }
};

// The most urgent of all ranks' messages; among equals, that of the lowest rank.
inline News most_urgent(const std::vector<std::string>& messages) {
  News first;
  for (const std::string& message : messages)
    if (!message.empty() && static_cast<NewsKind>(message[0]) > first.kind)
      first = {static_cast<NewsKind>(message[0]), message.substr(1)};
  return first;
}

// Thrown by all ranks where the run ends early. reason: the text of the news.
struct EndsEarly : Interrupted {
  NewsKind kind;
  explicit EndsEarly(const News& why) : Interrupted{why.text}, kind(why.kind) {}
};

}  // namespace llmc
