// unicode.h: general categories, white space and the normal form NFC, as in Hugging Face's tokenizers.
#pragma once
#include <cstdlib>
#include <unordered_map>

#include "core/utf8.h"
#include "text/unicode_tables.h"

namespace llmc {

// ---- The tables of unicode_tables.h, expanded on first use ----------------------------------------------------------

namespace detail {

// Hangul syllables are composed by arithmetic: The Unicode Standard, 3.12.
inline constexpr char32_t hangul = 0xac00, jamo_l = 0x1100, jamo_v = 0x1161, jamo_t = 0x11a7;
inline constexpr char32_t hangul_l = 19, hangul_v = 21, hangul_t = 28;
inline constexpr char32_t hangul_count = hangul_l * hangul_v * hangul_t;

struct UnicodeTables {
  static constexpr uint8_t category_bits = 31, white_space = 32, unstable = 64;
  // For each character: its category, whether it is white space, and whether NFC may change it or its neighbours.
  std::vector<uint8_t> traits = std::vector<uint8_t>(0x110000, 0);
  std::unordered_map<char32_t, uint8_t> combining_class;
  std::unordered_map<char32_t, std::array<char32_t, 2>> parts;  // one level deep; second 0: none
  std::unordered_map<uint64_t, char32_t> composed;              // by both parts

  static uint64_t pair(char32_t a, char32_t b) { return uint64_t{a} << 32 | b; }

  UnicodeTables() {
    auto at = traits.begin();
    for (const char* run = category_runs; *run != '\0';) {
      const int letter = *run++;
      char* end = nullptr;
      const unsigned long length = std::strtoul(run, &end, 10);
      at = std::fill_n(at, end == run ? 1 : length,
                       static_cast<uint8_t>(letter < 'a' ? letter - 'A' : letter - 'a' + 26));
      run = end;
    }
    for (const char32_t c : {0x9, 0xa, 0xb, 0xc, 0xd, 0x20, 0x85, 0xa0, 0x1680, 0x2028, 0x2029, 0x202f, 0x205f, 0x3000})
      traits[c] |= white_space;
    for (char32_t c = 0x2000; c <= 0x200a; ++c) traits[c] |= white_space;

    char32_t c = 0;
    for_each_triple(combining_class_runs, [&](char32_t skip, char32_t length, char32_t value) {
      for (c += skip; length > 0; --length, ++c) {
        combining_class[c] = static_cast<uint8_t>(value);
        traits[c] |= unstable;
      }
    });
    c = 0;
    for_each_triple(compositions, [&](char32_t step, char32_t a, char32_t b) {
      c += step;
      parts[c] = {a, b};
      composed[pair(a, b)] = c;
      traits[b] |= unstable;
    });
    c = 0;
    for_each_triple(decompositions, [&](char32_t step, char32_t a, char32_t b) {
      c += step;
      parts[c] = {a, b};
      traits[c] |= unstable;
    });
    for (char32_t v = 0; v < hangul_v; ++v) traits[jamo_v + v] |= unstable;
    for (char32_t t = 1; t < hangul_t; ++t) traits[jamo_t + t] |= unstable;
  }

 private:
  template <class F>
  static void for_each_triple(const char* text, F&& f) {
    auto next = [&] {
      char* end = nullptr;
      const auto number = static_cast<char32_t>(std::strtoul(text, &end, 16));
      text = end;
      return number;
    };
    while (text[0] != '\0' && text[1] != '\0') {
      const char32_t first = next(), second = next();
      f(first, second, next());
    }
  }
};

inline const UnicodeTables& unicode_tables() {
  static const UnicodeTables tables;
  return tables;
}

// ---- NFC ------------------------------------------------------------------------------------------------------------

inline uint8_t combining_class(char32_t c) {
  const auto found = unicode_tables().combining_class.find(c);
  return found == unicode_tables().combining_class.end() ? 0 : found->second;
}

// out += what a character decomposes to, with combining classes.
inline void decompose(char32_t c, std::vector<std::pair<char32_t, uint8_t>>& out) {
  if (c - hangul < hangul_count) {
    const char32_t s = c - hangul, t = s % hangul_t;
    out.emplace_back(jamo_l + s / hangul_t / hangul_v, 0);
    out.emplace_back(jamo_v + s / hangul_t % hangul_v, 0);
    if (t > 0) out.emplace_back(jamo_t + t, 0);
    return;
  }
  const auto found = unicode_tables().parts.find(c);
  if (found == unicode_tables().parts.end()) {
    out.emplace_back(c, combining_class(c));
    return;
  }
  for (const char32_t part : found->second)
    if (part != 0) decompose(part, out);
}

// The character that a and b compose to; 0: none.
inline char32_t compose(char32_t a, char32_t b) {
  if (a - jamo_l < hangul_l && b - jamo_v < hangul_v)
    return hangul + ((a - jamo_l) * hangul_v + (b - jamo_v)) * hangul_t;
  if (a - hangul < hangul_count && (a - hangul) % hangul_t == 0 && b - jamo_t - 1 < hangul_t - 1)
    return a + (b - jamo_t);
  const auto found = unicode_tables().composed.find(UnicodeTables::pair(a, b));
  return found == unicode_tables().composed.end() ? 0 : found->second;
}

// Decomposes, orders the marks, and composes: UAX #15, The Unicode Standard, 3.11.
inline void append_normalised(std::string& out, std::string_view text) {
  std::vector<std::pair<char32_t, uint8_t>> marked;
  for (size_t at = 0; at < text.size();) {
    const Utf8Character c = utf8_at(text, at);
    decompose(c.code, marked);
    at += c.width;
  }
  for (auto begin = marked.begin(); begin != marked.end(); ++begin) {
    if (begin->second == 0) continue;
    const auto end = std::find_if(begin, marked.end(), [](const auto& c) { return c.second == 0; });
    std::stable_sort(begin, end, [](const auto& a, const auto& b) { return a.second < b.second; });
    begin = end - 1;
  }
  size_t kept = 0, starter = marked.size();  // none yet
  uint8_t last = 0;                          // class of the last character kept after the starter; 0: none
  for (const auto& [c, mark] : marked) {
    const bool blocked = last != 0 && last >= mark;  // by a mark in between of the same or a higher class
    const char32_t both = starter < kept && !blocked ? compose(marked[starter].first, c) : 0;
    if (both != 0) {
      marked[starter].first = both;
      continue;
    }
    if (mark == 0) starter = kept;
    last = mark;
    marked[kept++] = {c, mark};
  }
  for (size_t i = 0; i < kept; ++i) append_utf8(out, marked[i].first);
}

}  // namespace detail

// Bit i: the i-th general category; the last two: white space, and everything else.
using CharacterTraits = uint32_t;
inline constexpr CharacterTraits white_space_trait = 1u << 30, visible_trait = 1u << 31;

inline CharacterTraits traits_of(char32_t c) {
  const uint8_t traits = detail::unicode_tables().traits[c];
  return 1u << (traits & detail::UnicodeTables::category_bits) |
         (traits & detail::UnicodeTables::white_space ? white_space_trait : visible_trait);
}

// The categories that a name stands for: "Lu" for one, "L" for all that begin with L; 0: no such name.
inline CharacterTraits category_traits(std::string_view name) {
  CharacterTraits traits = 0;
  const std::string_view names = detail::category_names;
  for (size_t i = 0; 3 * i < names.size(); ++i)
    if (!name.empty() && names.substr(3 * i, 2).starts_with(name)) traits |= 1u << i;
  return traits;
}

// May NFC change this character, or the one before it?
inline bool nfc_may_change(char32_t c) {
  return (detail::unicode_tables().traits[c] & detail::UnicodeTables::unstable) != 0;
}

// The first character from `at` on of valid UTF-8 that NFC may change; the text's size: there is none.
inline size_t find_unstable(std::string_view text, size_t at = 0) {
  for (; at < text.size(); at += utf8_width(text[at]))
    if (static_cast<unsigned char>(text[at]) >= 0x80 && nfc_may_change(utf8_at(text, at).code)) break;
  return at;
}

// NFC of valid UTF-8. Text that NFC cannot change is copied.
inline std::string nfc(std::string_view text) {
  std::string out;
  size_t copied = 0;
  for (size_t at = 0; (at = find_unstable(text, at)) < text.size(); copied = at) {
    const size_t before = at == 0 ? 0 : utf8_before(text, at);  // the character before may change, too
    while (at < text.size() && nfc_may_change(utf8_at(text, at).code)) at += utf8_width(text[at]);
    out += text.substr(copied, before - copied);
    detail::append_normalised(out, text.substr(before, at - before));
  }
  return out += text.substr(copied);
}

}  // namespace llmc
