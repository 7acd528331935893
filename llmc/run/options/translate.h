// translate.h: unknown options, such as another trainer's: which of ours is meant; and for a whole command line one
// error, with the command that would do the same as far as ours are the same.
#pragma once
#include <cctype>
#include <sstream>

#include "core/check.h"
#include "core/words.h"
#include "run/options/foreign.h"
#include "run/options/print.h"

namespace llmc {

namespace detail {

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

inline bool is_letter(char c) { return std::isalpha(static_cast<unsigned char>(c)) != 0; }

// "--lr", "-sl", "-b4"; not "-1".
inline bool is_option_word(const std::string& word) {
  return word.size() > 1 && word[0] == '-' && (word[1] == '-' || is_letter(word[1]));
}

// A letter may be followed by a value ("-b4"), but a longer word after one dash is a name.
inline bool is_word_after_one_dash(const std::string& word) {
  if (word.size() < 2 || word[0] != '-' || !is_letter(word[1])) return false;
  const size_t second = word.find_first_not_of("-_", 2);
  return second != std::string::npos && is_letter(word[second]);
}

// Words of a command line that belong together: an option with its value, or something else.
struct Argument {
  std::string name, value;  // as given
  bool has_value = false, known = true;
  std::vector<std::string> words;
};

// Whether each of our names and letters takes a value.
inline std::map<std::string, bool> known_names() {
  std::map<std::string, bool> takes_value;
  for (const ModeOption& mode : mode_options) takes_value[mode.name] = mode.name == std::string("--config");
  takes_value["-h"] = false;
  Options o;
  for (const OptionRow& row : option_rows(o)) {
    for (const std::string each : {row.name, row.letter})
      if (!each.empty()) takes_value[each] = !row.field.is_flag();
    if (row.field.has_negation()) takes_value[row.negation()] = false;
  }
  return takes_value;
}

using Words = std::vector<std::string>;

inline std::vector<Argument> split_arguments(const Words& words) {
  const std::map<std::string, bool> takes_value = known_names();
  std::vector<Argument> all;
  for (size_t i = 1; i < words.size(); ++i) {
    const std::string& word = words[i];
    Argument a;
    a.words = {word};
    const bool last = i + 1 == words.size(), value_follows = !last && !is_option_word(words[i + 1]);
    if (word == "--") {
      while (++i < words.size()) a.words.push_back(words[i]);
    } else if (is_option_word(word)) {
      const bool letter = word[1] != '-' && !is_word_after_one_dash(word), help = letter && word[1] == 'h';
      const size_t equals = std::min(word.find('='), word.size());
      a.name = letter && !help ? word.substr(0, 2) : word.substr(0, equals);
      a.has_value = a.name.size() < word.size();
      if (a.has_value) a.value = word.substr(letter && !help ? 2 : equals + 1);
      const auto known = takes_value.find(a.name);
      a.known = known != takes_value.end() && !(help && (a.name != "-h" || a.has_value || value_follows));
      // Our flags take no value, but llm.c's "-a 1" has one.
      const bool number_follows = value_follows && (words[i + 1] == "0" || words[i + 1] == "1");
      const bool takes = !a.known ? value_follows : known->second ? !last : number_follows;
      if (!a.has_value && takes) a.words.push_back(a.value = words[++i]), a.has_value = true;
    }
    all.push_back(std::move(a));
  }
  return all;
}

inline Words with_value(const std::string& name, const std::string& value) {
  return is_option_word(value) ? Words{name + "=" + value} : Words{name, value};
}
inline std::string as_command(const Words& words) {
  std::string text;
  for (const std::string& word : words) text += (text.empty() ? "" : " ") + shell_word(word);
  return text;
}

// The translation of an unknown option.
struct Translation {
  std::string theirs;  // "--learning_rate 3e-4"
  Words ours;          // {"--lr", "3e-4"}; empty: leave it out
  std::string fault;   // why it differs; "": it does not
};

// all: the unknown names of the command line.
inline Translation translate(const Argument& a, const Words& all) {
  Translation t{.theirs = as_command(a.words), .ours = {}, .fault = ""};
  const Words similar = our_similar_names(a.name);
  std::string ours, note, values;
  if (const std::optional<ForeignMatch> match = find_foreign(a.name, all)) {
    ours = match->option->ours, note = match->option->note, values = match->option->values;
    if (ours.empty()) t.fault = "no counterpart: " + note;
    else if (values.empty() && !note.empty()) t.fault = formatted("{}: {}", ours, note);
  } else if (similar.size() == 1 && plain_name(similar[0]) == plain_name(a.name)) {
    ours = similar[0];  // --batch_size
  } else {
    t.fault = similar.empty() ? "unknown" : "did you mean " + either(similar) + "?";
  }
  if (!t.fault.empty()) return t;
  const std::map<std::string, bool> takes_value = known_names();
  if (const auto it = takes_value.find(ours); it == takes_value.end() || !it->second) {  // "--tf32", "--dtype bf16"
    const std::string value = plain_name(a.value);
    const bool off = a.has_value && (value == "0" || value == "false" || value == "no" || value == "off");
    std::istringstream words(off ? "" : ours);
    for (std::string word; words >> word;) t.ours.push_back(word);
  } else if (!a.has_value) {
    t.fault = ours + ", with a value";
  } else if (values.empty() || values == "same") {
    t.ours = with_value(ours, a.value);
  } else {
    t.fault = formatted("{}: {}", ours, note);
    std::istringstream pairs(values);
    for (std::string pair; !t.fault.empty() && pairs >> pair;) {
      const std::string from = pair.substr(0, pair.find('=')), to = pair.substr(pair.find('=') + 1);
      if (from != "*" && from != a.value) continue;
      t.fault = "";
      if (!to.empty()) t.ours = with_value(ours, to == "*" ? a.value : to);
    }
  }
  return t;
}

}  // namespace detail

// Rejects unknown options: all of them at once, with what they are called here and a command to use instead.
// fault_of(words): why that command would be rejected in turn; "": it would not.
inline void refuse_unknown_options(const std::vector<std::string>& words,
                                   std::string (*fault_of)(const std::vector<std::string>&)) {
  using namespace detail;
  const std::vector<Argument> arguments = split_arguments(words);
  Words unknown, command = {words[0]};
  for (const Argument& a : arguments) {
    if (a.known && (a.name == "-h" || a.name == "--help")) return;
    if (!a.known) unknown.push_back(a.name);
  }
  if (unknown.empty()) return;
  std::vector<Translation> translations;
  bool any_ours = false, any_fault = false;
  for (const Argument& a : arguments) {
    Translation t{"", a.words, ""};
    const std::optional<ForeignMatch> match = find_foreign(a.name, unknown);
    const bool same_name = a.known && match && a.name == match->option->name;  // llm.c's "-r 1"
    if (!a.known || (same_name && *match->option->values != '\0')) t = translate(a, unknown);
    if (a.known && !t.fault.empty()) t.ours = a.words;
    command.insert(command.end(), t.ours.begin(), t.ours.end());
    if (a.known) continue;
    translations.push_back(t);
    (t.fault.empty() ? any_ours : any_fault) = true;
  }
  std::string text;
  if (translations.size() == 1) {
    text = unknown_option_text(unknown[0], "");
  } else {
    Words names;
    for (const std::string& name : unknown) names.push_back(shown(name));
    text = either(names, "and") + ": there are no such options; see --help. Here they are";
    for (const Translation& t : translations)
      text += formatted("\n  {:-36} {}", shown(t.theirs),
                        !t.fault.empty() ? "? " + t.fault
                        : t.ours.empty() ? "leave it out"
                                         : as_command(t.ours));
  }
  if (!any_ours) throw Error(text);
  text += formatted("\nthe command for train_gpt{}:\n  {}", any_fault ? ", without the options marked \"?\"" : "",
                    as_command(command));
  if (const std::string fault = fault_of(command); !fault.empty())
    text += "\nin which this must still change: " + fault;
  throw Error(text);
}

}  // namespace llmc
