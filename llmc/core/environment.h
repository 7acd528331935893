// environment.h: reads environment variables.
#pragma once
#include <cstdlib>
#include <functional>
#include <optional>
#include <string>

namespace llmc {

using Environment = std::function<std::optional<std::string>(const std::string&)>;  // getenv, or a test's

inline std::optional<std::string> environment_variable(const std::string& name) {
  const char* value = std::getenv(name.c_str());
  return value == nullptr ? std::nullopt : std::optional<std::string>(value);
}

}  // namespace llmc
