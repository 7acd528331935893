// host_name.h: the name of this machine, for messages that name a rank.
#pragma once
#include <unistd.h>

#include "core/std.h"

namespace llmc {

inline std::string host_name() {
  char name[256] = "unknown host";
  gethostname(name, sizeof name - 1);
  return name;
}

}  // namespace llmc
