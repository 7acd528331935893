// utf8.h: UTF-8: reading and writing characters, and finding invalid bytes; and text that anyone may have written
// (names and values in files, messages of other processes, generated text), made safe for a terminal and a log: it
// cannot move the cursor, change colours or ring the bell.
#pragma once
#include <cstdio>

#include "core/std.h"

namespace llmc {

inline constexpr std::string_view utf8_mark = "\xef\xbb\xbf";  // which some files begin with

struct Utf8Character {
  char32_t code;
  size_t width;  // bytes
};

// The width of the character that begins with this byte; 1 for a byte that none begins with.
inline size_t utf8_width(char lead) {
  const unsigned char byte = static_cast<unsigned char>(lead);
  return byte < 0xc0 ? 1 : byte < 0xe0 ? 2 : byte < 0xf0 ? 3 : 4;
}

// The same; 0 for a byte that none begins with in well-formed UTF-8.
inline size_t utf8_valid_width(char lead) {
  const unsigned char byte = static_cast<unsigned char>(lead);
  return byte < 0x80 ? 1 : byte < 0xc2 || byte > 0xf4 ? 0 : utf8_width(lead);
}

// The character at `at` of valid UTF-8.
inline Utf8Character utf8_at(std::string_view text, size_t at) {
  auto byte = [&](size_t i) { return static_cast<char32_t>(static_cast<unsigned char>(text[at + i])); };
  auto rest = [&](size_t i) { return byte(i) & 0x3f; };
  const char32_t lead = byte(0);
  if (lead < 0x80) return {lead, 1};
  if (lead < 0xe0) return {(lead & 0x1f) << 6 | rest(1), 2};
  if (lead < 0xf0) return {(lead & 0x0f) << 12 | rest(1) << 6 | rest(2), 3};
  return {(lead & 0x07) << 18 | rest(1) << 12 | rest(2) << 6 | rest(3), 4};
}

// Is it a byte of a character, but not the first?
inline bool utf8_continues(char byte) { return (static_cast<unsigned char>(byte) & 0xc0) == 0x80; }

// Where the character before `end` begins.
inline size_t utf8_before(std::string_view text, size_t end) {
  do --end;
  while (utf8_continues(text[end]));
  return end;
}

inline void append_utf8(std::string& text, char32_t code) {
  auto byte = [&](char32_t value) { text += static_cast<char>(static_cast<unsigned char>(value)); };
  if (code < 0x80) return byte(code);
  if (code < 0x800) byte(0xc0 | code >> 6);
  else if (code < 0x10000) byte(0xe0 | code >> 12), byte(0x80 | (code >> 6 & 0x3f));
  else byte(0xf0 | code >> 18), byte(0x80 | (code >> 12 & 0x3f)), byte(0x80 | (code >> 6 & 0x3f));
  byte(0x80 | (code & 0x3f));
}

// The first byte that is not well-formed UTF-8 (surrogates and overlong forms are not); none: all of it is.
inline std::optional<size_t> utf8_fault(std::string_view text) {
  constexpr uint64_t not_ascii = 0x8080808080808080;
  for (size_t at = 0; at < text.size();) {
    if (uint64_t eight; text.size() - at >= sizeof eight) {
      std::memcpy(&eight, text.data() + at, sizeof eight);
      if ((eight & not_ascii) == 0) {
        at += sizeof eight;
        continue;
      }
    }
    const size_t width = utf8_valid_width(text[at]);
    if (width == 0 || at + width > text.size()) return at;
    for (size_t i = 1; i < width; ++i)
      if (!utf8_continues(text[at + i])) return at;
    const char32_t code = utf8_at(text, at).code;
    if ((width == 3 && (code < 0x800 || (code >= 0xd800 && code < 0xe000))) ||
        (width == 4 && (code < 0x10000 || code > 0x10ffff)))
      return at;
    at += width;
  }
  return std::nullopt;
}

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

// A name or a value within a message: line breaks and tabs are escaped too, and no more than `most` bytes are shown.
inline std::string shown(std::string_view text, size_t most = 80) {
  size_t cut = text.size();
  if (cut > most)
    for (cut = most; cut > 0 && utf8_continues(text[cut]);) --cut;  // not within a character
  const std::string out = detail::escaped(text.substr(0, cut), "");
  return cut == text.size() ? out : out + "... (" + std::to_string(text.size()) + " bytes)";
}

// Prints one message to stderr.
inline void print_error(const std::string& text) { std::fprintf(stderr, "%s\n", printable(text).c_str()); }

}  // namespace llmc
