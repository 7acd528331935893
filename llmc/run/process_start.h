// process_start.h: what comes first in a process: before options are read, and before its libraries begin.
#pragma once
#include <fcntl.h>
#include <sched.h>
#include <sys/prctl.h>
#include <sys/resource.h>
#include <unistd.h>

#include <cerrno>  // program_invocation_short_name, from glibc
#include <csignal>

#include "comm/comm.h"
#include "core/signals.h"
#include "device/device.h"
#include "device/gpu.h"

namespace llmc {

namespace detail {
// A standard stream that is closed is /dev/null from here on. Otherwise the next file or connection that is opened
// would get its number, and with it what is printed.
inline void open_standard_streams() {
  for (const int fd : {STDIN_FILENO, STDOUT_FILENO, STDERR_FILENO})
    if (::fcntl(fd, F_GETFD) < 0) (void)!::open("/dev/null", O_RDWR);  // gets the lowest number that is free: fd
}
inline cpu_set_t processors_at_start;  // where the process may run, before OpenMP binds its first thread
inline void before_libraries(int, char**, char**) {
  struct sigaction now {};
  hangup_ignored = ::sigaction(SIGHUP, nullptr, &now) == 0 && now.sa_handler == SIG_IGN;  // by nohup
  sigset_t pending;  // note_stop_signals() unblocks these: before it, they would end the process
  if (::sigpending(&pending) == 0) unblock_stop_signals(&pending);
  open_standard_streams();
  if (::sched_getaffinity(0, sizeof processors_at_start, &processors_at_start) != 0) CPU_ZERO(&processors_at_start);
}
// The loader calls it before the constructors of libraries: that of UCX, which Open MPI 5 is linked with, takes SIGHUP.
__attribute__((section(".preinit_array"), used)) static void (*const called_by_loader)(int, char**,
                                                                                       char**) = before_libraries;
}  // namespace detail

// As many files as the system lets this process open: a resume reads those of all ranks that kept optimizer state.
inline void allow_many_files() {
  constexpr rlim_t many = 1 << 20;
  rlimit files{};
  if (::getrlimit(RLIMIT_NOFILE, &files) != 0 || files.rlim_cur >= many) return;
  files.rlim_cur = std::min(files.rlim_max, many);
  ::setrlimit(RLIMIT_NOFILE, &files);
}

// A pipe that an earlier program left non-blocking would lose what its reader does not take at once.
inline void block_standard_streams() {
  for (const int fd : {STDOUT_FILENO, STDERR_FILENO})
    if (const int flags = ::fcntl(fd, F_GETFL); flags >= 0 && (flags & O_NONBLOCK) != 0)
      (void)!::fcntl(fd, F_SETFL, flags & ~O_NONBLOCK);
}

inline void prepare_process(char** argv) {
  allow_many_files();
  block_standard_streams();
  if (detail::hangup_ignored) std::signal(SIGHUP, SIG_IGN);  // so that it is when this program executes itself again
  set_openmp_environment(argv, detail::processors_at_start);
  ::prctl(PR_SET_NAME, program_invocation_short_name);  // it may have executed itself as /proc/self/exe
  set_gpu_environment();
  set_nccl_environment();
}

}  // namespace llmc
