// print.h: the options as text: help, a --config file, a command line, the tables in dev/docs/options.md.
#pragma once
#include "core/words.h"
#include "run/options/options.h"

namespace llmc {

namespace detail {

struct ModeOption {
  const char* name;
  const char* help;
  const char* letter = "";
  const char* type = "";
};
inline constexpr ModeOption mode_options[] = {
    {"--config",
     "read options from a file that --print-config wrote; the command line takes precedence; options that a mode does "
     "not use are refused on the command line, and those in the file keep their defaults, with a notice",
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
  for (const OptionRow& row : option_rows(defaults))
    if (groups.empty() || groups.back() != row.group) groups.emplace_back(row.group);
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
  auto line = [&](const char* letter, const std::string& name, const char* type, const std::string& help) {
    std::string left = formatted("  {} {} {}", *letter ? formatted("{},", letter) : "   ", name, type);
    if (left.size() + 2 > 34) left += "\n", text += std::exchange(left, "");
    left.resize(34, ' ');
    text += left + detail::wrapped(help, 34) + "\n";
  };
  Options defaults;
  std::string group;
  for (const OptionRow& row : option_rows(defaults)) {
    if (!only.empty() && only != row.group) continue;
    if (group != row.group) text += formatted("{}{}\n", text.empty() ? "" : "\n", group = row.group);
    const std::string value = row.field.text(), negation = row.negation();
    const char* type = row.limits.choices.empty() ? row.field.placeholder() : "TEXT";
    line(row.letter, row.name + (negation.empty() ? "" : " / " + negation), type,
         row.whole_help() + (*type && !value.empty() ? formatted(" [{}]", value) : ""));
  }
  if (!only.empty()) {
    text.pop_back();
    return text;
  }
  for (const auto& mode : detail::mode_options) line(mode.letter, mode.name, mode.type, mode.help);
  return text +
         "\nExit status: 0 done, 1 refused (the reason is on stderr), 2 diverged or self-test failed,\n"
         "3 a rank was lost, 75 stopped early and saved: after 3 and 75 run the same command again.";
}

inline std::string config_text(const Options& options) {
  Options o = options;
  std::string text, group;
  for (const OptionRow& row : option_rows(o)) {
    if (group != row.group) text += formatted("{}# {}\n", text.empty() ? "" : "\n", group = row.group);
    const std::string value = row.field.text();
    if (value.empty()) continue;  // absent
    CHECK(value.find('\n') == std::string::npos, "{}: a value with a line break cannot be written to a --config file",
          row.name);
    text += formatted(row.field.is_text() ? "{}=\"{}\"\n" : "{}={}\n", row.name + 2, value);
  }
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
  const std::vector<OptionRow> rows = option_rows(o), usual = option_rows(defaults);
  std::vector<OptionText> all;
  for (size_t i = 0; i < rows.size(); ++i)
    all.push_back({rows[i].name, rows[i].field.text(), usual[i].field.text(), rows[i].rule, rows[i].field.is_flag(),
                   rows[i].negation()});
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
  std::string text, group;
  Options defaults;
  for (const OptionRow& row : option_rows(defaults)) {
    if (group != row.group)
      text += formatted("{}**{}**\n\n| option | default | meaning | on resume |\n| --- | --- | --- | --- |\n",
                        text.empty() ? "" : "\n", group = row.group);
    std::string others = *row.letter ? formatted(" `{}`", row.letter) : "";
    if (row.field.has_negation()) others += formatted(" `{}`", row.negation());
    text += formatted("| `{}`{} | {} | {} | {} |\n", row.name, others, row.field.text(), row.whole_help(), row.rule);
  }
  text.pop_back();
  return text;
}

}  // namespace llmc
