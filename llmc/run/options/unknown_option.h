// unknown_option.h: an option that does not exist: suggests ours for another trainer's, or one of a similar name.
#pragma once
#include "core/check.h"
#include "core/words.h"
#include "run/options/foreign.h"
#include "run/options/print.h"

namespace llmc::detail {

// Our names that resemble this one; none if there are too many.
inline std::vector<std::string> our_similar_names(const std::string& word) {
  std::vector<std::string> names;
  for (const ModeOption& mode : mode_options) names.emplace_back(mode.name);
  Options o;
  for (const OptionRow& row : option_rows(o)) names.emplace_back(row.name);
  std::vector<std::string> similar = similar_names(word, names);
  if (similar.size() > 5) similar.clear();
  return similar;
}

// "there is no such option", and one that may be meant: ours for another trainer's, or a similar name.
inline std::string unknown_option_text(const std::string& word, const std::string& where) {
  std::string hint;
  if (const std::optional<std::string> foreign = foreign_hint(word)) hint = "; " + *foreign;
  else if (const auto similar = our_similar_names(word); !similar.empty())
    hint = "; did you mean " + either(similar) + "?";
  return formatted("{}{}: there is no such option{}{} see --help", where, shown(word), hint,
                   hint.ends_with('?') ? "" : ";");
}

}  // namespace llmc::detail
