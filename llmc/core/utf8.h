// utf8.h: UTF-8: reading and writing characters, and finding invalid bytes.
#pragma once
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

}  // namespace llmc
