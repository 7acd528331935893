// failure_text.h: says in words what ended a process when it is not one of our Errors: the system refused memory or a
// thread, whatever the limit, or the program has a bug.
#pragma once
#include <sys/resource.h>

#include <filesystem>
#include <new>
#include <system_error>

#include "core/check.h"

namespace llmc {

namespace detail {

// ", ulimit -v is 200000 KiB"; "" if there is no such limit.
std::string limit_text(auto resource, const char* name, rlim_t unit, const char* of_unit) {
  rlimit limit{};
  if (getrlimit(resource, &limit) != 0 || limit.rlim_cur == RLIM_INFINITY) return "";
  return formatted(", ulimit {} is {}{}", name, limit.rlim_cur / unit, of_unit);
}

}  // namespace detail

inline std::string failure_text(const std::exception& error) {
  if (dynamic_cast<const Error*>(&error) != nullptr ||
      dynamic_cast<const std::filesystem::filesystem_error*>(&error) != nullptr)
    return error.what();
  const bool wrong_size = dynamic_cast<const std::bad_array_new_length*>(&error) != nullptr;  // a bug in the program
  if (!wrong_size && dynamic_cast<const std::bad_alloc*>(&error) != nullptr)
    return formatted(
        "the system gave no more memory{}: end other programs, raise a limit (ulimit -v, or a container's), or make "
        "the run smaller (--plan says what it needs)",
        detail::limit_text(RLIMIT_AS, "-v", 1024, " KiB"));
  const auto* const system = dynamic_cast<const std::system_error*>(&error);
  if (system != nullptr && system->code() == std::errc::resource_unavailable_try_again)
    return formatted(
        "the system started no further thread{}{}: raise a limit (ulimit -u and -v, or a container's pids.max), or use "
        "fewer --local-ranks and --threads",
        detail::limit_text(RLIMIT_NPROC, "-u", 1, ""), detail::limit_text(RLIMIT_AS, "-v", 1024, " KiB"));
  return formatted("internal error: {}", error.what());
}

}  // namespace llmc
