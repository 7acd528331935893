// console.h: stdout and stderr for a program that must go on whatever becomes of their reader. A terminal that is
// stopped with Ctrl-S, `less`, or a `tee` that hangs takes nothing more: whoever prints would wait for it, and all
// ranks with that one, and no signal would save the run.
#pragma once
#include <fcntl.h>
#include <poll.h>
#include <sys/socket.h>
#include <sys/stat.h>

#include <atomic>
#include <cstdio>

#include "core/clock.h"
#include "core/files.h"

namespace llmc {

class Console {
 public:
  explicit Console(std::FILE* stream = stdout) : stream_(stream) {}
  Console(Console&&) = default;
  Console& operator=(Console&&) = default;
  ~Console() { write_within(patience); }

  // Prints, but leaves out what the reader does not take within a second, and then all until it has taken the rest.
  void print(const std::string& text) {
    if (kind_ == Kind::unknown) open();
    if (kind_ == Kind::file) {
      std::fputs(text.c_str(), stream_);
      std::fflush(stream_);
      return;
    }
    if (stalled_ && !write_within({})) return;
    if (std::exchange(stalled_, false)) waiting_ = "\nsome lines were not read in time; log.txt has all\n";
    waiting_ += text;
    stalled_ = !write_within(patience);
  }

 private:
  // file: nobody reads, and it never waits; socket: send() need not wait; own: a file of its own that never waits;
  // shared: a pipe or a terminal that others may have open, too
  enum class Kind : uint8_t { unknown, file, socket, own, shared };
  static constexpr std::chrono::milliseconds patience{1000};
  static constexpr size_t surely_taken = 128;  // bytes, by a pipe or a terminal that has room

  // OpenSSH and containers give a program sockets. A pipe or a terminal is opened again: a flag of the file itself
  // would be seen by all programs that share it. The system refuses that for those of another user, as after su.
  void open() {
    struct stat it {};
    const int fd = ::fileno(stream_);
    const bool known = ::fstat(fd, &it) == 0;
    std::fflush(stream_);
    if (known && S_ISSOCK(it.st_mode)) kind_ = Kind::socket;
    else if (!known || !(S_ISFIFO(it.st_mode) || ::isatty(fd) == 1)) kind_ = Kind::file;
    else {
      own_ =
          Descriptor(::open(formatted("/proc/self/fd/{}", fd).c_str(), O_WRONLY | O_NONBLOCK | O_CLOEXEC | O_NOCTTY));
      kind_ = own_ ? Kind::own : Kind::shared;
    }
  }
  ssize_t write_some() const {
    const int fd = own_ ? own_.fd() : ::fileno(stream_);
    if (kind_ == Kind::socket) return ::send(fd, waiting_.data(), waiting_.size(), MSG_DONTWAIT | MSG_NOSIGNAL);
    if (kind_ == Kind::own) return ::write(fd, waiting_.data(), waiting_.size());
    if (!has_room({})) return errno = EAGAIN, -1;
    return ::write(fd, waiting_.data(), std::min(waiting_.size(), surely_taken));
  }
  // Waits until there is room, or an error.
  bool has_room(std::chrono::milliseconds limit) const {
    pollfd room{own_ ? own_.fd() : ::fileno(stream_), POLLOUT, 0};
    return ::poll(&room, 1, static_cast<int>(limit.count())) == 1;
  }
  // Whether nothing is left; what a reader that has gone does not take is dropped.
  bool write_within(std::chrono::milliseconds limit) {
    const auto end = Clock::now() + limit;
    while (!waiting_.empty()) {
      const ssize_t n = write_some();
      if (n >= 0) waiting_.erase(0, static_cast<size_t>(n));
      else if (errno == EAGAIN) {
        const auto left = std::chrono::duration_cast<std::chrono::milliseconds>(end - Clock::now());
        if (left <= left.zero()) return false;
        has_room(left);
      } else if (errno != EINTR) {
        waiting_.clear();
      }
    }
    return true;
  }

  std::FILE* stream_;
  Descriptor own_;
  std::string waiting_;
  Kind kind_ = Kind::unknown;
  bool stalled_ = false;
};

// Set where others wait for this process, or it has a run to save: it must end even if nobody reads its stderr.
inline std::atomic<bool> unread_errors_left_out = false;

// Prints one message to stderr.
inline void print_error(const std::string& text) {
  const std::string line = printable(text) + "\n";
  if (unread_errors_left_out) Console(stderr).print(line);
  else std::fputs(line.c_str(), stderr);
}

}  // namespace llmc
