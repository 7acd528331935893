// escape.h: makes text that anyone may have written (names and values in files, messages of other processes, generated
// text) safe for a terminal and a log: it cannot move the cursor, change colours or ring the bell.
#pragma once
#include "core/utf8.h"

namespace llmc {

namespace detail {

inline void append_escaped(std::string& out, std::string_view bytes) {
  constexpr std::string_view digits = "0123456789abcdef";
  for (const char c : bytes) {
    const auto byte = static_cast<unsigned char>(c);
    out.append("\\x").append({digits[byte / 16], digits[byte % 16]});
  }
}

// keep: control characters that are not escaped.
inline std::string escaped(std::string_view text, std::string_view keep) {
  std::string out;
  while (!text.empty()) {
    const size_t valid = utf8_fault(text).value_or(text.size());
    for (size_t at = 0; at < valid;) {
      const Utf8Character c = utf8_at(text, at);
      const bool control = c.code < 0x20 || (c.code >= 0x7f && c.code < 0xa0) ||  // ASCII's, and C1 of ISO 6429
                           (c.code >= 0x202a && c.code <= 0x202e) ||  // these reverse the order of other characters
                           (c.code >= 0x2066 && c.code <= 0x2069);
      const std::string_view bytes = text.substr(at, c.width);
      if (control && keep.find(bytes) == keep.npos) append_escaped(out, bytes);
      else out += bytes;
      at += c.width;
    }
    append_escaped(out, text.substr(valid, 1));
    text.remove_prefix(valid == text.size() ? valid : valid + 1);
  }
  return out;
}

// The number of bytes at the end that begin a character whose other bytes may follow.
inline size_t unfinished(std::string_view text) {
  for (size_t n = 1; n <= std::min<size_t>(3, text.size()); ++n) {
    const char lead = text[text.size() - n];
    if (utf8_continues(lead)) continue;
    return n < utf8_valid_width(lead) ? n : 0;
  }
  return 0;
}

}  // namespace detail

// Escapes as \x1b the bytes of control characters except line breaks and tabs, of characters that change the direction
// of text, and of invalid UTF-8. Escaping again changes nothing.
inline std::string printable(std::string_view text) { return detail::escaped(text, "\n\t"); }

// The same for text that arrives in pieces: a character spread over several pieces is shown once it is complete.
class PrintableStream {
 public:
  std::string add(std::string_view bytes) {
    held_ += bytes;
    const size_t begun = detail::unfinished(held_);
    const std::string out = printable(std::string_view(held_).substr(0, held_.size() - begun));
    held_.erase(0, held_.size() - begun);
    return out;
  }
  // The bytes of a character that was begun and never completed.
  std::string rest() { return printable(std::exchange(held_, "")); }

 private:
  std::string held_;
};

// A name or a value within a message: line breaks and tabs are escaped too, and text of more than `most` bytes is cut
// off there.
inline std::string shown(std::string_view text, size_t most = 80) {
  size_t cut = text.size();
  if (cut > most)
    for (cut = most; cut > 0 && utf8_continues(text[cut]);) --cut;  // not within a character
  const std::string out = detail::escaped(text.substr(0, cut), "");
  return cut == text.size() ? out : out + "... (" + std::to_string(text.size()) + " bytes)";
}

}  // namespace llmc
