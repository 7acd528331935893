// option_row.h: a row of the list in options.h: an option, whose value of any type is read, written and checked here.
#pragma once
#include <charconv>
#include <cstdlib>

#include "core/check.h"
#include "core/utf8.h"
#include "run/options/option_fields.h"
#include "run/options/option_values.h"

namespace llmc {

namespace detail {

template <class T>
inline constexpr bool is_optional = false;
template <class T>
inline constexpr bool is_optional<std::optional<T>> = true;

// As a --config file has it; empty: absent.
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

// Parses all of `text`, numbers in decimal.
inline void parse_value(const std::string& name, const std::string& text, std::string& field) {
  const std::optional<size_t> fault = utf8_fault(text);  // it is written to JSON
  CHECK(!fault, "{}: byte {} is not UTF-8; give the text, or the path, in UTF-8", name, fault.value_or(0) + 1);
  field = text;
}
inline void parse_value(const std::string& name, const std::string& text, bool& field) {
  CHECK(text == "true" || text == "false", "{} '{}': expected true or false", name, shown(text));
  field = text == "true";
}
template <NamedEnum E>
void parse_value(const std::string& name, const std::string& text, E& field) {
  const std::optional<E> value = from_name<E>(text);
  CHECK(value, "{} {}: expected one of {}", name, shown(text), all_names<E>());
  field = *value;
}
template <class Number>
requires std::is_arithmetic_v<Number>
void parse_value(const std::string& name, const std::string& text, Number& field) {
  const auto [end, error] = std::from_chars(text.data(), text.data() + text.size(), field);
  const bool number = error == std::errc() && end == text.data() + text.size();
  constexpr const char* expected = std::is_integral_v<Number> ? "a whole number" : "a number";
  CHECK(number, "{} '{}': expected {}{}", name, shown(text), expected,
        error == std::errc::result_out_of_range ? ", and this one does not fit into 64 bits" : "");
}
inline void parse_value(const std::string& name, const std::string& text, TokenCount& field) {
  const std::optional<TokenCount> count = token_count(text);
  CHECK(count, "{} '{}': expected a whole number of tokens, such as 1000000, 300M or 1.5B", name, shown(text));
  field = *count;
}
inline void parse_value(const std::string& name, const std::string& text, RecomputeChoice& field) {
  if (text.starts_with("block:")) {
    const int64_t segment = number_from<int64_t>(text.substr(text.find(':') + 1)).value_or(0);
    CHECK(segment >= 1 && segment <= 1 << 20, "{} {}: expected block:N, N the blocks of a segment, from 1 to 1048576",
          name, shown(text));
    field = {Recompute::block, segment};
    return;
  }
  const std::optional<Recompute> what = from_name<Recompute>(text);
  CHECK(what, "{} {}: expected one of {}, or block:N, such as block:4", name, shown(text), all_names<Recompute>());
  field = {*what, 1};
}
inline void parse_value(const std::string& name, const std::string& text, SkippedBlocks& field) {
  const std::vector<std::string> parts = split(text, ',');
  const auto number = [&](size_t i) { return number_from<int64_t>(parts[i]).value_or(-1); };
  field = {number(0), parts.size() == 2 ? number(1) : 0};
  CHECK(parts.size() <= 2 && field.first >= 0 && field.last >= 0,
        "{} {}: expected N or N,M: how many of the first blocks, and of the last, such as 1 or 1,2", name, shown(text));
}
inline void parse_value(const std::string& name, const std::string& text, Offload& field) {
  field = {};
  if (text == "none") return;
  for (const std::string& word : split(text, ',')) {
    const std::optional<Offloaded> part = from_name<Offloaded>(word);
    CHECK(part && !field.has(*part), "{} {}: '{}' {}: expected none, or some of {}, separated by commas", name,
          shown(text), shown(word), part ? "is there twice" : "is no state", all_names<Offloaded>());
    field.add(*part);
  }
}
inline void parse_value(const std::string& name, const std::string& text, TextList& field) {
  std::string valid;
  parse_value(name, text, valid);
  field.add(valid);
}
template <class T>
void parse_value(const std::string& name, const std::string& text, std::optional<T>& field) {
  parse_value(name, text, field.emplace());
}

// " from 1 to 16777216", " from 0 to 0.9999999", " above 0".
inline std::string range_text(const Limits& limits) {
  if (std::isinf(limits.min)) return "";
  if (limits.min == std::numeric_limits<double>::min()) return " above 0";
  return formatted(" from {:.9g}", limits.min) + (std::isinf(limits.max) ? " on" : formatted(" to {:.9g}", limits.max));
}

// Throws if the value is not within the limits.
template <class T>
void check_limits(const char* name, const T& value, const Limits& limits) {
  if constexpr (is_optional<T>) {
    if (value) check_limits(name, *value, limits);
  } else if constexpr (std::is_same_v<T, std::string>) {
    CHECK(limits.choices.empty() || std::ranges::find(limits.choices, value) != limits.choices.end(),
          "{} {}: expected one of {}", name, shown(value), limits.choices);
  } else if constexpr (!std::is_same_v<T, bool> && !NamedEnum<T> && std::is_constructible_v<double, T>) {
    const double v = static_cast<double>(value);
    CHECK(std::isfinite(v) && v >= limits.min && v <= limits.max, "{} {}: expected a number{}{}", name, value,
          range_text(limits), limits.remedy);
  }
}

}  // namespace detail

// The value of one option, whatever its type.
class OptionField {
 public:
  template <class T>
  explicit OptionField(T& value) : value_(&value), type_(&type_of<T>) {}

  // A flag takes no value. A flag without a fixed default has a negation, --no-NAME.
  bool is_flag() const { return type_->kind == Kind::flag || type_->kind == Kind::flag_or_none; }
  bool has_negation() const { return type_->kind == Kind::flag_or_none; }
  bool is_list() const { return type_->kind == Kind::list; }  // may be given several times
  bool is_text() const { return type_->kind == Kind::text || type_->kind == Kind::list; }
  // What --help calls the value.
  const char* placeholder() const {
    return is_flag() ? "" : is_text() ? "TEXT" : type_->kind == Kind::real ? "NUMBER" : "N";
  }

  // As a --config file has it; empty: absent.
  std::string text() const { return type_->text(value_); }
  // Reads all of `text`; a list takes it as more values. An error begins with `name`.
  void parse(const std::string& name, const std::string& text) const { type_->parse(name, text, value_); }
  void check(const char* name, const Limits& limits) const { type_->check(name, limits, value_); }
  // A list loses its values; other options take one alone anyway.
  void clear_list() const {
    if (is_list()) *static_cast<TextList*>(value_) = {};
  }
  // Takes the value that the same option has elsewhere.
  void take(const OptionField& from) const { type_->take(from.value_, value_); }

 private:
  enum class Kind { flag, flag_or_none, list, text, real, other };
  template <class T>
  static constexpr Kind kind_of() {
    if (std::is_same_v<T, bool>) return Kind::flag;
    if (std::is_same_v<T, std::optional<bool>>) return Kind::flag_or_none;
    if (std::is_same_v<T, TextList>) return Kind::list;
    if (std::is_same_v<T, std::string> || NamedEnum<T>) return Kind::text;
    if (std::is_same_v<T, double> || std::is_same_v<T, std::optional<double>>) return Kind::real;
    return Kind::other;
  }
  struct Type {
    Kind kind;
    std::string (*text)(const void*);
    void (*parse)(const std::string&, const std::string&, void*);
    void (*check)(const char*, const Limits&, const void*);
    void (*take)(const void*, void*);
  };
  template <class T>
  static constexpr Type type_of = {
      kind_of<T>(), [](const void* value) { return detail::option_text(*static_cast<const T*>(value)); },
      [](const std::string& name, const std::string& text, void* value) {
        detail::parse_value(name, text, *static_cast<T*>(value));
      },
      [](const char* name, const Limits& limits, const void* value) {
        detail::check_limits(name, *static_cast<const T*>(value), limits);
      },
      [](const void* from, void* value) { *static_cast<T*>(value) = *static_cast<const T*>(from); }};

  void* value_;
  const Type* type_;
};

struct OptionRow {
  const char* group;
  const char* name;    // "--batch-size"
  const char* letter;  // "-b", or ""
  OptionField field;
  Limits limits;
  ResumeRule rule;
  const char* help;

  std::string negation() const { return field.has_negation() ? formatted("--no-{}", name + 2) : ""; }
  // With the values to choose from.
  std::string whole_help() const { return limits.choices.empty() ? help : formatted("{} ({})", help, limits.choices); }
};

}  // namespace llmc
