// environment.h: reads environment variables: where caches go, and how large the stacks of threads are; the name of
// this machine.
#pragma once
#include <unistd.h>

#include <cstdlib>
#include <sstream>

#include "core/check.h"

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

// Refuses a size that gives OpenMP's threads too little room for the arrays of ops, of up to 25 KiB. It counts KiB
// unless a unit follows; OpenMP ignores less than 16, and what is no whole number.
inline void require_stacks(const Environment& environment = environment_variable) {
  for (const char* name : {"OMP_STACKSIZE", "GOMP_STACKSIZE"}) {
    const std::string value = environment(name).value_or("");
    std::istringstream text(value);
    int64_t size = 0;
    char unit = 'k';
    text >> size >> unit;
    const int64_t kib = unit == 'b' || unit == 'B' ? 1 << 10 : unit == 'k' || unit == 'K' ? 1 : 0;  // 0: M, G: enough
    CHECK(size < 16 * kib || size >= 64 * kib,
          "{} {}: a thread needs 64 KiB at least; leave it out, or give more, such as 4M", name, value);
  }
}

// For messages that name a rank.
inline std::string host_name() {
  char name[256] = "unknown host";
  gethostname(name, sizeof name - 1);
  return name;
}

}  // namespace llmc
