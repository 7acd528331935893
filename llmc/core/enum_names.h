// enum_names.h: enums in words. An enum in namespace llmc whose values have names, for messages and options, lists them
// once, in the order of the values:
//   enum class Recompute { none, block };
//   constexpr auto names_of_values(Recompute) { return std::array{"none", "block"}; }
#pragma once
#include <concepts>

#include "core/std.h"

namespace llmc {

template <class E>
concept NamedEnum = std::is_enum_v<E> && requires(E value) {
  names_of_values(value).size();
};

template <NamedEnum E>
constexpr const char* name_of(E value) {
  return names_of_values(value)[static_cast<size_t>(value)];
}
template <NamedEnum E>
std::vector<E> all_values() {
  std::vector<E> all;
  for (size_t i = 0; i < names_of_values(E{}).size(); ++i) all.push_back(static_cast<E>(i));
  return all;
}
template <NamedEnum E>
std::vector<std::string> all_names() {
  const auto names = names_of_values(E{});
  return {names.begin(), names.end()};
}
// The value of this name; none: there is no such value.
template <NamedEnum E>
std::optional<E> from_name(std::string_view name) {
  for (const E value : all_values<E>())
    if (name == name_of(value)) return value;
  return std::nullopt;
}

}  // namespace llmc
