// console.h: stdout for a program that must go on whatever becomes of its reader. A terminal that is stopped with
// Ctrl-S, `less`, or a `tee` that hangs takes nothing more: whoever prints would wait for it, and all ranks with that
// one, and no signal would save the run.
#pragma once
#include <fcntl.h>
#include <poll.h>
#include <sys/stat.h>

#include <cstdio>

#include "core/clock.h"
#include "core/files.h"

namespace llmc {

class Console {
 public:
  Console() = default;
  Console(Console&&) = default;
  Console& operator=(Console&&) = default;
  ~Console() { write_within(patience); }

  // Prints, but leaves out what the reader does not take within a second, and then all until it has taken the rest.
  void print(const std::string& text) {
    if (!opened_) open();
    if (!own_) {
      std::fputs(text.c_str(), stdout);
      std::fflush(stdout);
      return;
    }
    if (stalled_ && !write_within({})) return;
    if (std::exchange(stalled_, false)) waiting_ = "\nsome lines were not read in time; log.txt has all\n";
    waiting_ += text;
    stalled_ = !write_within(patience);
  }

 private:
  static constexpr std::chrono::milliseconds patience{1000};

  // stdout as a file of its own that never waits, if it is a pipe or a terminal: others wait for no reader. A flag of
  // the file itself would be seen by all programs that share it.
  void open() {
    opened_ = true;
    struct stat it {};
    if (::fstat(STDOUT_FILENO, &it) != 0 || !(S_ISFIFO(it.st_mode) || ::isatty(STDOUT_FILENO) == 1)) return;
    std::fflush(stdout);
    own_ = Descriptor(::open("/proc/self/fd/1", O_WRONLY | O_NONBLOCK | O_CLOEXEC | O_NOCTTY));
  }
  // Whether nothing is left; what a reader that has gone does not take is dropped.
  bool write_within(std::chrono::milliseconds limit) {
    const auto end = Clock::now() + limit;
    while (!waiting_.empty()) {
      const ssize_t n = ::write(own_.fd(), waiting_.data(), waiting_.size());
      if (n >= 0) waiting_.erase(0, static_cast<size_t>(n));
      else if (errno == EAGAIN) {
        const auto left = std::chrono::duration_cast<std::chrono::milliseconds>(end - Clock::now());
        if (left <= left.zero()) return false;
        pollfd room{own_.fd(), POLLOUT, 0};
        ::poll(&room, 1, static_cast<int>(left.count()));
      } else if (errno != EINTR) {
        waiting_.clear();
      }
    }
    return true;
  }

  Descriptor own_;
  std::string waiting_;
  bool opened_ = false, stalled_ = false;
};

}  // namespace llmc
