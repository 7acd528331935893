// check.h: the error type, the formatter behind every message, the CHECK macro, and the names of the values of enums.
#pragma once
#include <concepts>
#include <stdexcept>

#include "core/escape.h"

namespace llmc {

// Exit statuses of the program (see README.md, "Exit status").
enum class ExitStatus : int { done = 0, refused = 1, diverged = 2, lost = 3, requeue = 75 };

// Thrown by every refusal. The message says what was found, what was expected and what to do. With several ranks
// run_ranks() adds the rank and the host; main() exits with `status`.
class Error : public std::runtime_error {
 public:
  explicit Error(const std::string& message, ExitStatus status = ExitStatus::refused)
      : std::runtime_error(message), status_(status) {}
  ExitStatus status() const { return status_; }

 private:
  ExitStatus status_;
};

// Thrown by a rank that stops only because another one failed.
class PeerError : public Error {
 public:
  // why: the reason, if it is known; status: that of the other one, or lost if it has gone or hangs
  explicit PeerError(const std::string& why = "another rank has failed", ExitStatus status = ExitStatus::lost)
      : Error(why, status) {}
};

// An error that all ranks have at the same place: one process on each host reports it.
class SharedError : public Error {
 public:
  using Error::Error;
};

// Enums in words. An enum in namespace llmc whose values have names, for messages and options, lists them once, in the
// order of the values:
//   enum class Recompute { none, block };
//   constexpr auto names_of_values(Recompute) { return std::array{"none", "block"}; }
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

namespace detail {

// A JSON value; this file does not know its type.
template <class T>
concept Json = requires(const T& value) {
  value.dump(-1, ' ', false, T::error_handler_t::replace);
};

// One formatted argument under its printf-like specification ("" for the plain form).
inline std::string printf_string(const std::string& format, auto value) {
  std::array<char, 128> buffer;
  const int length = std::snprintf(buffer.data(), buffer.size(), format.c_str(), value);
  if (length < static_cast<int>(buffer.size())) return std::string(buffer.data(), static_cast<size_t>(length));
  std::string text(static_cast<size_t>(length) + 1, '\0');
  std::snprintf(text.data(), text.size(), format.c_str(), value);
  text.pop_back();
  return text;
}

template <class T>
std::string format_argument(const std::string& spec, const T& value) {
  if constexpr (Json<T>) {
    return shown(value.dump(-1, ' ', false, T::error_handler_t::replace));
  } else if constexpr (std::is_same_v<T, bool>) {
    return value ? "true" : "false";
  } else if constexpr (std::is_enum_v<T>) {
    return format_argument(spec, name_of(value));  // found by argument-dependent lookup beside the enum
  } else if constexpr (std::is_floating_point_v<T>) {
    // The sign of a NaN means nothing.
    return printf_string("%" + (spec.empty() ? "g" : spec),
                         std::isnan(value) ? std::abs(value) : static_cast<double>(value));
  } else if constexpr (std::is_same_v<T, char>) {
    return std::string(1, value);
  } else if constexpr (std::is_integral_v<T> && std::is_signed_v<T>) {
    return printf_string("%" + spec + "lld", static_cast<long long>(value));
  } else if constexpr (std::is_integral_v<T>) {
    return printf_string("%" + spec + "llu", static_cast<unsigned long long>(value));
  } else if constexpr (std::is_convertible_v<T, std::string>) {
    const std::string text = value;
    return spec.empty() ? text : printf_string("%" + spec + "s", text.c_str());
  } else if constexpr (std::is_convertible_v<T, std::string_view>) {
    return format_argument(spec, std::string(std::string_view(value)));
  } else {  // a range: its elements, separated by commas
    std::string joined;
    for (const auto& element : value) joined += (joined.empty() ? "" : ", ") + format_argument(spec, element);
    return joined;
  }
}

// An argument with its type erased, and its formatter, so that not every combination of types in a message is compiled.
struct FormatArgument {
  const void* value;
  std::string (*format)(const std::string& spec, const void* value);
};

template <class T>
FormatArgument format_argument_of(const T& value) {
  if constexpr (std::is_convertible_v<T, const char*>)  // text of any length
    return {static_cast<const char*>(value), [](const std::string& spec, const void* text) {
              return format_argument(spec, static_cast<const char*>(text));
            }};
  else
    return {std::addressof(value), [](const std::string& spec, const void* of_type_t) {
              return format_argument(spec, *static_cast<const T*>(of_type_t));
            }};
}

inline std::string format_all(std::string_view pattern, std::span<const FormatArgument> arguments) {
  std::string out;
  size_t at = 0;
  for (const auto& [value, format] : arguments) {
    const size_t open = pattern.find('{', at);
    const size_t close = open == std::string_view::npos ? open : pattern.find('}', open);
    if (close == std::string_view::npos) throw Error("format: more arguments than {} in: " + std::string(pattern));
    out += pattern.substr(at, open - at);
    std::string spec(pattern.substr(open + 1, close - open - 1));
    if (!spec.empty()) spec.erase(0, 1);  // the colon
    out += format(spec, value);
    at = close + 1;
  }
  out += pattern.substr(at);
  return out;
}

}  // namespace detail

// "{}" takes the next argument; "{:SPEC}" formats it with printf's flags, width and precision: "{:8.4f}", "{:-20}" (a
// string, left-aligned), "{:06}". g++ 12 has no std::format; elsewhere a function of that name would be ambiguous.
template <class... Args>
std::string formatted(std::string_view pattern, const Args&... args) {
  const std::array<detail::FormatArgument, sizeof...(Args)> arguments = {detail::format_argument_of(args)...};
  return detail::format_all(pattern, arguments);
}

namespace detail {

[[noreturn]] inline void check_failed(const char* condition, const char* file, int line) {
  throw Error(
      formatted("internal check failed: {} ({}:{}); please report it with the command line", condition, file, line));
}
[[noreturn]] inline void check_failed(std::string_view pattern, std::span<const FormatArgument> arguments) {
  throw Error(format_all(pattern, arguments));
}
template <class... Args>
[[noreturn]] void check_failed(const char*, const char*, int, std::string_view pattern, const Args&... args) {
  check_failed(pattern, std::array<FormatArgument, sizeof...(Args)>{format_argument_of(args)...});
}

}  // namespace detail

// CHECK(condition, "what was found and what to do: {}", values...). Without a message, it checks an internal invariant.
#define CHECK(condition, ...)                                                                                  \
  do {                                                                                                         \
    if (!(condition)) ::llmc::detail::check_failed(#condition, __FILE__, __LINE__ __VA_OPT__(, ) __VA_ARGS__); \
  } while (false)

// The faults of a value, one sentence each, for callers that want them without an exception.
struct Faults : std::vector<std::string> {
  // Like CHECK(): the message names what was found, what was expected and what to do.
  template <class... Args>
  void unless(bool holds, std::string_view pattern, const Args&... args) {
    if (!holds) push_back(formatted(pattern, args...));
  }
  // Throws the first fault, if there is one.
  void refuse() const {
    if (!empty()) throw Error(front());
  }
};

}  // namespace llmc
