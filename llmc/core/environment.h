// environment.h: reads environment variables: where caches go, and how large the stacks of threads are; the name of
// this machine.
#pragma once
#include <pwd.h>
#include <sys/stat.h>
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

// This directory, made if there is none; empty: it does not belong to this user alone.
inline std::string own_directory(const std::string& path) {
  ::mkdir(path.c_str(), 0700);
  struct stat it {};
  const bool own =
      ::lstat(path.c_str(), &it) == 0 && S_ISDIR(it.st_mode) && it.st_uid == ::getuid() && (it.st_mode & 022) == 0;
  return own ? path : "";
}

// Where this user's caches are; empty: nowhere.
inline std::string cache_directory(const Environment& environment = environment_variable) {
  const auto set = [&](const char* name) { return environment(name).value_or(""); };
  if (const std::string cache = set("XDG_CACHE_HOME"); !cache.empty()) return cache + "/train_gpt";
  if (const std::string home = set("HOME"); !home.empty()) return home + "/.cache/train_gpt";
  if (const passwd* const user = ::getpwuid(::getuid()); user != nullptr && user->pw_dir[0] == '/')
    return std::string(user->pw_dir) + "/.cache/train_gpt";
  // In /tmp others could have made it first, with caches of theirs.
  return own_directory(formatted("/tmp/train_gpt-{}", int64_t{::getuid()}));
}
// A file or directory there; empty: nowhere.
inline std::string cache_path(const std::string& name) {
  const std::string directory = cache_directory();
  return directory.empty() ? "" : directory + "/" + name;
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
