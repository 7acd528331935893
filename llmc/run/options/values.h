// values.h: the value of an option of any type as text: written, read, and checked on its own.
#pragma once
#include <charconv>
#include <cstdlib>

#include "core/check.h"
#include "core/utf8.h"
#include "run/options/option_fields.h"

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
  constexpr std::string_view segments = "block:";
  if (!text.starts_with(segments)) {
    const std::optional<Recompute> what = from_name<Recompute>(text);
    CHECK(what, "{} {}: expected one of {}, or block:N, such as block:4", name, shown(text), all_names<Recompute>());
    field = {*what, 1};
    return;
  }
  field.what = Recompute::block;
  const char *begin = text.data() + segments.size(), *end = text.data() + text.size();
  const auto [after, error] = std::from_chars(begin, end, field.segment);
  CHECK(error == std::errc() && after == end && field.segment >= 1 && field.segment <= 1 << 20,
        "{} {}: expected block:N, N the blocks of a segment, from 1 to 1048576", name, shown(text));
}
inline void parse_value(const std::string& name, const std::string& text, SkippedBlocks& field) {
  field = {};
  const char *at = text.data(), *const end = at + text.size();
  const auto number = [&](int64_t& blocks) {
    const auto [after, error] = std::from_chars(at, end, blocks);
    at = after;
    return error == std::errc() && blocks >= 0;
  };
  const bool first = number(field.first), good = first && (at == end || (*at++ == ',' && number(field.last)));
  CHECK(good && at == end, "{} {}: expected N or N,M: how many of the first blocks, and of the last, such as 1 or 1,2",
        name, shown(text));
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
  const bool above_zero = limits.min == std::numeric_limits<double>::min();
  if (std::isinf(limits.min)) return "";
  return (above_zero ? " above 0" : formatted(" from {:.9g}", limits.min)) + (!std::isinf(limits.max)
                                                                                  ? formatted(" to {:.9g}", limits.max)
                                                                              : above_zero ? ""
                                                                                           : " on");
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
    CHECK(std::isfinite(v) && v >= limits.min && v <= limits.max, "{} {}: expected a number{}", name, value,
          range_text(limits));
  }
}

}  // namespace detail

}  // namespace llmc
