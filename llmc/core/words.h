// words.h: numbers in words; the names that a mistyped or half-remembered one was probably meant to be; words of a
// shell.
#pragma once
#include <cctype>
#include <charconv>

#include "core/std.h"

namespace llmc {

// "a,b" -> "a", "b"; at least one part, which may be empty.
inline std::vector<std::string> split(const std::string& text, char at) {
  std::vector<std::string> parts(1);
  for (const char c : text) {
    if (c == at) parts.emplace_back();
    else parts.back() += c;
  }
  return parts;
}

// All of `text` as a decimal number; none: it is something else, or out of range.
template <class Number>
std::optional<Number> number_from(std::string_view text) {
  Number number = 0;
  const auto [end, error] = std::from_chars(text.data(), text.data() + text.size(), number);
  return error == std::errc() && end == text.data() + text.size() ? std::optional(number) : std::nullopt;
}

// The number of insertions, deletions, replacements and swaps of neighbours between two words (Damerau 1964).
inline size_t edit_distance(const std::string& a, const std::string& b) {
  std::vector<std::vector<size_t>> d(a.size() + 1, std::vector<size_t>(b.size() + 1));
  for (size_t i = 0; i <= a.size(); ++i)
    for (size_t j = 0; j <= b.size(); ++j) {
      if (i == 0 || j == 0) {
        d[i][j] = i + j;
        continue;
      }
      d[i][j] = std::min({d[i - 1][j] + 1, d[i][j - 1] + 1, d[i - 1][j - 1] + (a[i - 1] != b[j - 1])});
      if (i > 1 && j > 1 && a[i - 1] == b[j - 2] && a[i - 2] == b[j - 1])
        d[i][j] = std::min(d[i][j], d[i - 2][j - 2] + 1);
    }
  return d[a.size()][b.size()];
}

// "--Batch_Size" -> "batch-size".
inline std::string plain_name(const std::string& name) {
  std::string plain = name.substr(std::min(name.find_first_not_of('-'), name.size()));
  for (char& c : plain) c = c == '_' ? '-' : static_cast<char>(std::tolower(static_cast<unsigned char>(c)));
  return plain;
}

namespace detail {

inline std::vector<std::string> parts_of(const std::string& plain) {
  std::vector<std::string> parts = split(plain, '-');
  std::sort(parts.begin(), parts.end());
  return parts;
}

// The names with the highest score; scores below 0 do not count.
template <class Score>
std::vector<std::string> best_names(const std::vector<std::string>& names, Score&& score) {
  std::vector<std::string> best;
  int highest = 0;
  for (const std::string& name : names) {
    const int s = score(name);
    if (s > highest) best.clear(), highest = s;
    if (s == highest) best.push_back(name);
  }
  return best;
}

}  // namespace detail

// The names that `word` probably means, by the first of these rules that any name meets: it is another spelling of the
// name; the name begins with it; one has all parts of the other (--data: --train-data, --val-data); it is a
// misspelling, by one letter in four. Empty: none, as for a word that is far longer than any name.
inline std::vector<std::string> similar_names(const std::string& word, const std::vector<std::string>& names) {
  if (word.size() > 1000) return {};
  const std::string plain = plain_name(word);
  if (plain.empty()) return {};
  const std::vector<std::string> parts = detail::parts_of(plain);
  std::vector<std::string> best;
  auto found = [&](auto&& score) { return !(best = detail::best_names(names, score)).empty(); };
  if (found([&](const std::string& name) { return plain_name(name) == plain ? 0 : -1; }) ||
      found([&](const std::string& name) { return plain_name(name).starts_with(plain) ? 0 : -1; }) ||
      found([&](const std::string& name) {
        const std::vector<std::string> theirs = detail::parts_of(plain_name(name));
        if (std::includes(theirs.begin(), theirs.end(), parts.begin(), parts.end())) return 0;
        if (!std::includes(parts.begin(), parts.end(), theirs.begin(), theirs.end())) return -1;
        return static_cast<int>(theirs.size());  // the more parts, the nearer
      }))
    return best;
  const int limit = std::max(1, static_cast<int>(plain.size()) / 4);
  found([&](const std::string& name) { return limit - static_cast<int>(edit_distance(plain_name(name), plain)); });
  return best;
}

// "a", "a or b", "a, b or c"; `last`: a word instead of "or".
inline std::string either(const std::vector<std::string>& names, const std::string& last = "or") {
  std::string text;
  for (size_t i = 0; i < names.size(); ++i)
    text += (i == 0 ? "" : i + 1 == names.size() ? " " + last + " " : ", ") + names[i];
  return text;
}

// Quotes a word for a shell if needed.
inline std::string shell_word(const std::string& word) {
  const bool plain = !word.empty() && word.find_first_not_of(
                                          "abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ"
                                          "0123456789_-./:,=+") == std::string::npos;
  if (plain) return word;
  std::string quoted = "'";
  for (char c : word) quoted += c == '\'' ? std::string("'\\''") : std::string(1, c);
  return quoted + "'";
}

}  // namespace llmc
