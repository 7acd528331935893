// process_start.h: what comes first in a process: before options are read, and before the libraries that it is linked
// with begin.
#pragma once
#include <csignal>

#include "comm/comm.h"
#include "core/signals.h"
#include "device/device.h"
#include "device/gpu.h"

namespace llmc {

namespace detail {
inline void look_for_nohup(int, char**, char**) {
  struct sigaction now {};
  hangup_ignored = ::sigaction(SIGHUP, nullptr, &now) == 0 && now.sa_handler == SIG_IGN;
}
// The loader calls it before the constructors of libraries: that of UCX, which Open MPI 5 is linked with, takes SIGHUP.
__attribute__((section(".preinit_array"), used)) static void (*const before_libraries)(int, char**,
                                                                                       char**) = look_for_nohup;
}  // namespace detail

inline void prepare_process(char** argv) {
  if (detail::hangup_ignored) std::signal(SIGHUP, SIG_IGN);  // so that it is when this program executes itself again
  wait_without_spinning(argv);
  set_gpu_environment();
  set_nccl_environment();
}

}  // namespace llmc
