// environment.h: reads environment variables, and where they say that caches go; the name of this machine.
#pragma once
#include <unistd.h>

#include <cstdlib>

#include "core/std.h"

namespace llmc {

using Environment = std::function<std::optional<std::string>(const std::string&)>;  // getenv, or a test's

inline std::optional<std::string> environment_variable(const std::string& name) {
  const char* value = std::getenv(name.c_str());
  return value == nullptr ? std::nullopt : std::optional<std::string>(value);
}

// Where this user's caches are.
inline std::string cache_directory(const Environment& environment = environment_variable) {
  const auto set = [&](const char* name) { return environment(name).value_or(""); };
  if (const std::string cache = set("XDG_CACHE_HOME"); !cache.empty()) return cache + "/train_gpt";
  return (set("HOME").empty() ? "/tmp" : set("HOME")) + "/.cache/train_gpt";
}

// For messages that name a rank.
inline std::string host_name() {
  char name[256] = "unknown host";
  gethostname(name, sizeof name - 1);
  return name;
}

}  // namespace llmc
