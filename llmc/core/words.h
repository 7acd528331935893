// words.h: the name that a mistyped one was probably meant to be.
#pragma once
#include <algorithm>
#include <string>
#include <utility>
#include <vector>

namespace llmc {

// The number of insertions, deletions and replacements between two words (Levenshtein 1966).
inline size_t edit_distance(const std::string& a, const std::string& b) {
  std::vector<size_t> row(b.size() + 1);
  for (size_t j = 0; j <= b.size(); ++j) row[j] = j;
  for (size_t i = 1; i <= a.size(); ++i) {
    size_t diagonal = std::exchange(row[0], i);
    for (size_t j = 1; j <= b.size(); ++j) {
      const size_t replaced = diagonal + (a[i - 1] != b[j - 1]);
      diagonal = std::exchange(row[j], std::min({row[j] + 1, row[j - 1] + 1, replaced}));
    }
  }
  return row[b.size()];
}

// The name closest to `word`; "" if more than half of the word would have to change.
inline std::string nearest_name(const std::string& word, const std::vector<std::string>& names) {
  const auto nearest = std::min_element(names.begin(), names.end(), [&](const auto& x, const auto& y) {
    return edit_distance(x, word) < edit_distance(y, word);
  });
  return nearest != names.end() && 2 * edit_distance(*nearest, word) <= word.size() ? *nearest : "";
}

}  // namespace llmc
