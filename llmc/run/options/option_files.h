// option_files.h: options that files give: --config files, read line by line so that every error about them names the
// line; and defaults: the sequence length that a model was trained with, and the vocabulary of a tokenizer.
#pragma once
#include <nlohmann/json.hpp>
#include <sstream>

#include "core/check.h"
#include "core/files.h"
#include "model/presets.h"
#include "run/checkpoints/checkpoint.h"
#include "run/options/translate.h"
#include "text/tokenizer.h"

namespace llmc {

namespace detail {

inline std::string trimmed(const std::string& text) {
  constexpr const char* white = " \t\r\v\f";
  const size_t begin = text.find_first_not_of(white);
  return begin == text.npos ? "" : text.substr(begin, text.find_last_not_of(white) - begin + 1);
}

// The value of an option as written in a line: text in quotes, or a word.
inline std::string config_value(const std::string& where, const std::string& text) {
  const bool opens = text.starts_with('"'), closes = text.size() >= 2 && text.ends_with('"');
  CHECK(opens == closes, "{} '{}': a quote is missing; write text as \"text\"", where, shown(text));
  CHECK(opens || text.find(" #") == text.npos,
        "{} '{}': write the comment on a line of its own, or \"text with a #\" in quotes", where, shown(text));
  return opens ? text.substr(1, text.size() - 2) : text;
}

// Rejects an empty value, which would count as none: only a prompt may have no text. given: how the error begins.
inline void refuse_empty_value(const std::string& given, const std::string& name) {
  CHECK(name == "--prompt",
        "{} '': the value is empty, as that of a shell variable that is not set; leave the option out for its default",
        given);
}

// Reads a file in the format of --print-config: lines NAME=VALUE, text in quotes; lines that begin with # are comments.
inline void read_config(Options& o, const std::string& path) {
  constexpr int64_t most_bytes = 1 << 20;
  CHECK(path_exists(path), "--config {}: there is no such file", path);
  std::istringstream lines(read_text(path, most_bytes));
  const std::vector<OptionRow> rows = option_rows(o);
  std::map<std::string, int> seen;  // the line of each name
  int number = 0;
  for (std::string line; std::getline(lines, line);) {
    const std::string place = formatted("{}:{}", path, ++number), where = place + ": ";
    CHECK(line.find('\0') == line.npos, "{}a NUL byte, which no option has: the file is damaged", where);
    line = trimmed(line);
    if (line.empty() || line[0] == '#') continue;
    const size_t equals = line.find('=');
    CHECK(equals != line.npos, "{}'{}': expected NAME=VALUE as --print-config writes it", where, shown(line));
    const std::string name = "--" + trimmed(line.substr(0, equals));
    // No option resembles it either, and finding that out would take a long time.
    CHECK(name.size() <= 64, "{}{}: there is no such option; see --help", where, shown(name));
    const std::string value = config_value(where + name, trimmed(line.substr(equals + 1)));
    for (const ModeOption& mode : mode_options)
      CHECK(name != mode.name, "{}{}: give this on the command line", where, name);
    const auto row = std::ranges::find(rows, name, &OptionRow::name);
    if (row == rows.end()) throw Error(unknown_option_text(name, where));
    if (value.empty()) refuse_empty_value(where + name, name);
    if (!seen.contains(name)) row->field.clear_list();  // another file's
    row->field.parse(where + name, value);
    const auto [first, is_new] = seen.emplace(name, number);
    CHECK(is_new || row->field.is_list(), "{}{}: line {} sets it too; leave out one of them", where, name,
          first->second);
    o.config_lines[name] = place;
  }
}

// The --vocab-size in the checkpoint from which a run resumes or branches; "": none was given. None: a new run.
inline std::optional<std::string> recorded_vocabulary(const Options& o) {
  if (o.restart || o.resume == "never") return std::nullopt;
  std::vector<std::string> checkpoints;
  if (o.resume != "auto") checkpoints.push_back(o.resume);
  else if (is_directory(o.out_dir))
    for (const int64_t step : checkpoint_steps(o.out_dir))
      checkpoints.insert(checkpoints.begin(), checkpoint_path(o.out_dir, step));
  if (!o.branch_from.empty()) checkpoints.push_back(o.branch_from);
  for (const std::string& checkpoint : checkpoints) try {
      const nlohmann::json options = read_json(checkpoint + "/trainer.json").value("options", nlohmann::json());
      if (options.is_object()) return options.value("--vocab-size", std::string());
    } catch (const std::exception&) {  // reported when the run looks for a checkpoint to resume from
    }
  return std::nullopt;
}

}  // namespace detail

// An error's text, with the places in --config files of the options that it names: "run.ini:3: --tp 3 with --cp 2 ...
// (--cp: run.ini:4)". lines: Options::config_lines.
inline std::string with_config_lines(const std::string& error, const std::map<std::string, std::string>& lines) {
  constexpr std::string_view of_names = "abcdefghijklmnopqrstuvwxyz0123456789-";
  std::string before, after;
  std::vector<std::string> named;
  for (size_t at = 0; !lines.empty() && (at = error.find("--", at)) != error.npos;) {
    const size_t end = std::min(error.find_first_not_of(of_names, at), error.size());
    const std::string name = error.substr(at, end - at);
    const auto line = lines.find(name);
    const bool whole = at == 0 || of_names.find(error[at - 1]) == of_names.npos;
    if (whole && line != lines.end() && std::ranges::find(named, name) == named.end()) {
      named.push_back(name);
      if (at == 0) before = line->second + ": ";
      else after += formatted("{}{}: {}", after.empty() ? "" : ", ", name, line->second);
    }
    at = end;
  }
  return before + error + (after.empty() ? "" : " (" + after + ")");
}

// For --evaluate and --generate: the sequence length of the model's training if its directory says so, otherwise the
// usual one.
inline int64_t default_length(const Options& o) {
  if (o.evaluate) require_trained_model("--evaluate", o.model);
  if (!is_directory(o.model)) return o.seq_len;  // refused later
  return std::min(trained_seq_len(o.model).value_or(o.seq_len), resolve_model(o.model, {}).n_positions);
}

// A preset takes the vocabulary of the named tokenizer, unless --vocab-size says otherwise. It keeps its own if that is
// the tokenizer's plus less than a hundredth of padding, as published ones are, and in a run that began with its own,
// as all runs of earlier versions did.
inline void take_vocabulary(Options& o) {
  const std::optional<ModelConfig> preset = model_preset(o.model);
  if (!preset || o.vocab_size || o.tokenizer == "auto") return;
  const int64_t tokens = make_tokenizer(o.tokenizer)->size();
  if (tokens <= preset->vocab_size && preset->vocab_size - tokens < preset->vocab_size / 100) return;
  if (!o.plan_auto && detail::recorded_vocabulary(o) == "") return;
  o.vocab_size = tokens;
  o.preset_vocabulary = preset->vocab_size;
}

}  // namespace llmc
