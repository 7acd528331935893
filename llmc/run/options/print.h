// print.h: the options as text: help, a --config file, a command line, the tables in dev/docs/options.md.
#pragma once
#include <algorithm>
#include <cstdlib>
#include <optional>
#include <string>
#include <type_traits>
#include <utility>
#include <vector>

#include "core/words.h"
#include "run/options/options.h"

namespace llmc {

namespace detail {

template <class T>
std::string option_text(const T& value) {
  if constexpr (std::is_same_v<T, double>) {
    const std::string brief = formatted("{}", value);  // the shortest text that parses to the same number
    return std::strtod(brief.c_str(), nullptr) == value ? brief : formatted("{:.17g}", value);
  } else {
    return formatted("{}", value);
  }
}
template <class T>
std::string option_text(const std::optional<T>& value) {
  return value ? option_text(*value) : "";
}

// A flag takes no value. A flag without a fixed default has a negation, --no-NAME.
template <class T>
bool is_flag(const T&) {
  return std::is_same_v<T, bool> || std::is_same_v<T, std::optional<bool>>;
}
// An option that may be given several times.
template <class T>
bool is_list(const T&) {
  return std::is_same_v<T, TextList>;
}
template <class T>
std::string negation(const std::string& name, const T&) {
  return std::is_same_v<T, std::optional<bool>> ? "--no-" + name.substr(2) : "";
}

template <class T>
const char* type_text(const T& field) {
  if (is_flag(field)) return "";
  else if constexpr (std::is_same_v<T, double> || std::is_same_v<T, std::optional<double>>) return "NUMBER";
  else if constexpr (std::is_same_v<T, std::string> || std::is_same_v<T, TextList> || NamedEnum<T>) return "TEXT";
  else return "N";
}

struct ModeOption {
  const char* name;
  const char* help;
  const char* letter = "";
  const char* type = "";
};
inline constexpr ModeOption mode_options[] = {
    {"--config",
     "read options from a file that --print-config wrote; the command line takes precedence; options that a mode does "
     "not use are refused on the command line, and only noted in the file",
     "", "FILE"},
    {"--print-config", "print all options as a file for --config, and stop"},
    {"--print-options-markdown",
     "print the options, and other trainers' names for them, as the tables in dev/docs/options.md, and stop"},
    {"--version", "print version, compiler, flags and libraries, and stop"},
    {"--help", "print this, or one group of it, such as parallelism, and stop", "-h", "[GROUP]"}};

inline std::string wrapped(const std::string& text, size_t indent, size_t width = 100) {
  std::string out;
  size_t column = indent;
  for (size_t at = 0; at < text.size();) {
    const size_t end = std::min(text.find(' ', at), text.size());
    if (column > indent && column + (end - at) > width) {
      out.back() = '\n';  // instead of the space
      out += std::string(indent, ' ');
      column = indent;
    }
    out += text.substr(at, end - at) + " ";
    column += end - at + 1;
    at = end + 1;
  }
  while (!out.empty() && out.back() == ' ') out.pop_back();
  return out;
}

}  // namespace detail

// The groups of options, in the order of --help.
inline std::vector<std::string> option_groups() {
  std::vector<std::string> groups;
  Options defaults;
  const auto no_option = [](const char*, const char*, auto&, const Limits&, ResumeRule, const char*) {};
  visit_options(defaults, detail::OptionVisitor{[&](const char* group) { groups.emplace_back(group); }, no_option});
  return groups;
}

// The help for one group, named by the beginning of one of its words, or for all groups.
inline std::string help_text(const std::string& asked = "") {
  std::string only;
  const std::string name = plain_name(asked);
  for (const std::string& group : option_groups())
    if (only.empty() && !name.empty() && (" " + plain_name(group)).find(" " + name) != std::string::npos) only = group;
  CHECK(asked.empty() || !only.empty(), "--help {}: there is no such group of options: name one of {}, or none for all",
        shown(asked), option_groups());
  std::string text =
      "train_gpt pretrains language models on token shards (make those with data/tokenize_text.py).\n\n"
      "  ./train_gpt -i 'data/mine/mine_train_*.bin' -j 'data/mine/mine_val_*.bin' --model d6 --vocab-size 257 \\\n"
      "      -t 256 -x 1000 -o out/mine\n"
      "  ./train_gpt --generate --model out/mine/step-001000 --prompt 'Once upon'\n";
  if (!only.empty()) text.clear();
  Options defaults;
  bool here = only.empty();
  auto line = [&](std::string left, const std::string& help) {
    if (!here) return;
    if (left.size() + 2 > 34) left += "\n", text += std::exchange(left, "");
    left.resize(34, ' ');
    text += left + detail::wrapped(help, 34) + "\n";
  };
  visit_options(defaults, detail::OptionVisitor{
                              [&](const char* group) {
                                here = only.empty() || only == group;
                                if (here) text += (text.empty() ? "" : "\n") + std::string(group) + "\n";
                              },
                              [&](const char* name, const char* letter, auto& field, const Limits& limits, ResumeRule,
                                  const char* help) {
                                const std::string type = limits.choices.empty() ? detail::type_text(field) : "TEXT";
                                const std::string value = detail::option_text(field);
                                std::string all = help;
                                if (!limits.choices.empty()) all += formatted(" ({})", limits.choices);
                                if (!type.empty() && !value.empty()) all += formatted(" [{}]", value);
                                const std::string negated = detail::negation(name, field);
                                line(formatted("  {} {}{} {}", *letter ? std::string(letter) + "," : std::string("   "),
                                               name, negated.empty() ? "" : " / " + negated, type),
                                     all);
                              }});
  if (!only.empty()) {
    text.pop_back();
    return text;
  }
  for (const auto& mode : detail::mode_options)
    line(formatted("  {} {} {}", *mode.letter ? std::string(mode.letter) + "," : std::string("   "), mode.name,
                   mode.type),
         mode.help);
  return text +
         "\nExit status: 0 done, 1 refused (the reason is on stderr), 2 diverged or self-test failed, 75 stopped "
         "early\nand saved: run the same command again.";
}

inline std::string config_text(const Options& options) {
  Options o = options;
  std::string text;
  visit_options(o, detail::OptionVisitor{
                       [&](const char* group) { text += formatted("{}# {}\n", text.empty() ? "" : "\n", group); },
                       [&](const char* name, const char*, auto& field, const Limits&, ResumeRule, const char*) {
                         using T = std::remove_reference_t<decltype(field)>;
                         const std::string value = detail::option_text(field);
                         if (value.empty()) return;  // absent
                         CHECK(value.find('\n') == std::string::npos,
                               "{}: a value with a line break cannot be written to a --config file", name);
                         if constexpr (std::is_same_v<T, std::string> || std::is_same_v<T, TextList> || NamedEnum<T>)
                           text += formatted("{}=\"{}\"\n", name + 2, value);
                         else text += formatted("{}={}\n", name + 2, value);
                       }});
  if (!text.empty()) text.pop_back();
  return text;
}

// Every option as text, with its default and its rule on resume.
struct OptionText {
  std::string name, text, usual;
  ResumeRule rule;
  bool flag;
  std::string negation;  // --no-NAME, for a flag that has one
};
inline std::vector<OptionText> option_texts(const Options& options) {
  Options o = options, defaults;
  std::vector<OptionText> all;
  auto add = [&](const char* name, const char*, auto& field, const Limits&, ResumeRule rule, const char*) {
    all.push_back({name, detail::option_text(field), "", rule, detail::is_flag(field), detail::negation(name, field)});
  };
  visit_options(o, detail::OptionVisitor{detail::no_group, add});
  size_t i = 0;
  auto add_usual = [&](const char*, const char*, auto& field, const Limits&, ResumeRule, const char*) {
    all[i++].usual = detail::option_text(field);
  };
  visit_options(defaults, detail::OptionVisitor{detail::no_group, add_usual});
  return all;
}

// " --name value", as a command line has it; empty if the value is the default.
inline std::string words_of(const OptionText& o) {
  if (o.text == o.usual) return "";
  if (o.flag) return " " + (o.text == "false" ? o.negation : o.name);
  // With "=" a value is not taken for an option.
  return " " + o.name + (o.text.starts_with("-") ? "=" : " ") + shell_word(o.text);
}
// The command line for these options: those that differ from their defaults. `program`: as it was called.
inline std::string command_line(const Options& options, const std::string& program = "./train_gpt") {
  std::string text = shell_word(program);
  for (const OptionText& o : option_texts(options)) text += words_of(o);
  return text;
}

inline std::string options_markdown() {
  std::string text;
  Options defaults;
  visit_options(
      defaults,
      detail::OptionVisitor{
          [&](const char* group) {
            text += formatted("{}**{}**\n\n| option | default | meaning | on resume |\n| --- | --- | --- | --- |\n",
                              text.empty() ? "" : "\n", group);
          },
          [&](const char* name, const char* letter, auto& field, const Limits& limits, ResumeRule rule,
              const char* help) {
            std::string all = help;
            if (!limits.choices.empty()) all += formatted(" ({})", limits.choices);
            std::string others = *letter ? formatted(" `{}`", letter) : std::string();
            if (const std::string negated = detail::negation(name, field); !negated.empty())
              others += formatted(" `{}`", negated);
            text += formatted("| `{}`{} | {} | {} | {} |\n", name, others, detail::option_text(field), all, rule);
          }});
  text.pop_back();
  return text;
}

}  // namespace llmc
