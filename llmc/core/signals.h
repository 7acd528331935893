// signals.h: requests to stop. SIGINT, SIGTERM, SIGHUP, SIGUSR1, SIGUSR2 and SIGXCPU (batch systems send one of these
// before a job ends) are recorded and polled between micro-batches; a line on stderr says at once that one has come,
// since what is under way, such as a checkpoint that is loaded, may take minutes. A SIGINT more than a second after the
// first signal ends the process at once; others do not, since batch systems send one after another while a run saves,
// and SIGKILL in the end. A time limit is polled in the same way.
#pragma once
#include <poll.h>
#include <unistd.h>

#include <atomic>
#include <cerrno>
#include <chrono>
#include <csignal>
#include <ctime>

#include "core/check.h"
#include "core/clock.h"

namespace llmc {

// Who usually sends it: a person with Ctrl-C or by closing the terminal, or a batch system when a job's time is up.
enum class StopSender : uint8_t { person, batch_system };
struct StopSignal {
  int number;
  const char* name;
  StopSender sender;
};
inline constexpr StopSignal stop_signals[] = {{SIGINT, "SIGINT", StopSender::person},
                                              {SIGTERM, "SIGTERM", StopSender::batch_system},
                                              {SIGHUP, "SIGHUP", StopSender::person},
                                              {SIGUSR1, "SIGUSR1", StopSender::batch_system},
                                              {SIGUSR2, "SIGUSR2", StopSender::batch_system},
                                              {SIGXCPU, "SIGXCPU", StopSender::batch_system}};  // a limit that is soft

namespace detail {
// A signal handler can only reach globals.
inline volatile std::sig_atomic_t signal_received = 0;
inline std::atomic<int64_t> signal_time = 0;        // when the first one came
inline volatile std::sig_atomic_t says_so = 0;      // the handler prints a line
inline volatile std::sig_atomic_t on_terminal = 0;  // which is for a terminal
inline bool hangup_ignored = false;                 // when the process began: run/process_start.h
static_assert(std::atomic<int64_t>::is_always_lock_free);

// Steady clock; async-signal-safe.
inline int64_t nanoseconds_now() {
  timespec now{};
  ::clock_gettime(CLOCK_MONOTONIC, &now);
  return int64_t{now.tv_sec} * 1'000'000'000 + now.tv_nsec;
}

// Says on stderr that a signal has come; async-signal-safe.
inline void say_signal(int number) {
  const int before = errno;
  const char* name = "a signal";
  for (const StopSignal& signal : stop_signals)
    if (signal.number == number) name = signal.name;
  std::array<char, 128> text;
  size_t n = 0;
  const char* const begin = on_terminal != 0 ? "\n" : "";  // after a progress line
  // mpirun and srun pass on a Ctrl-C as another signal; what they start has no terminal.
  const char* const again = on_terminal != 0 ? "Ctrl-C" : "SIGINT";
  for (const char* part :
       {begin, "train_gpt: ", name, ": ending after what is under way; ", again, " after a second ends at once\n"})
    for (; *part != '\0'; ++part) text[n++] = *part;
  pollfd room{STDERR_FILENO, POLLOUT, 0};  // a reader that has stopped must not stop the run
  if (::poll(&room, 1, 0) == 1 && (room.revents & POLLOUT) != 0) (void)!::write(STDERR_FILENO, text.data(), n);
  errno = before;
}
}  // namespace detail

enum class Says : uint8_t { nothing, at_once };

// Whoever started this process may have blocked the signals that ask a run to save. but: signals that stay as they are
inline void unblock_stop_signals(const sigset_t* but = nullptr) {
  sigset_t set;
  sigemptyset(&set);
  for (const StopSignal& signal : stop_signals)
    if (but == nullptr || sigismember(but, signal.number) == 0) sigaddset(&set, signal.number);
  ::sigprocmask(SIG_UNBLOCK, &set, nullptr);
}

inline void note_stop_signals(Says says) {
  detail::says_so = says == Says::at_once ? 1 : 0;
  detail::on_terminal = ::isatty(STDERR_FILENO) == 1 ? 1 : 0;
  struct sigaction action {};
  action.sa_handler = [](int signal) {
    const int64_t now = detail::nanoseconds_now();
    if (detail::signal_received == 0) {
      detail::signal_time = now;
      detail::signal_received = signal;
      if (detail::says_so != 0) detail::say_signal(signal);
    } else if (signal == SIGINT && now - detail::signal_time > 1'000'000'000) {
      std::signal(signal, SIG_DFL);  // takes effect when this handler returns
      std::raise(signal);
    }  // else a duplicate: a terminal and mpirun both deliver one Ctrl-C
  };
  action.sa_flags = SA_RESTART;
  for (const StopSignal& signal : stop_signals) {
    struct sigaction before {};
    const bool by_nohup =
        signal.number == SIGHUP &&
        (detail::hangup_ignored || (sigaction(SIGHUP, nullptr, &before) == 0 && before.sa_handler == SIG_IGN));
    if (by_nohup) std::signal(SIGHUP, SIG_IGN);  // a library may have taken it since
    else sigaction(signal.number, &action, nullptr);
  }
  // A run must still be saved when the reader of its output has ended (Ctrl-C also ends `| tee`).
  std::signal(SIGPIPE, SIG_IGN);
  std::signal(SIGXFSZ, SIG_IGN);  // a file larger than ulimit -f fails like one on a full disk
  unblock_stop_signals();
}

inline bool got_stop_signal() { return detail::signal_received != 0; }

// Will this reason (StopCondition) stop the run again after it is restarted?
inline bool comes_again(const std::string& reason) {
  return std::ranges::none_of(stop_signals, [&](const StopSignal& signal) {
    return signal.sender == StopSender::person && reason == signal.name;
  });
}

// Thrown when a run stops early.
struct Interrupted {
  std::string reason;
};

class StopCondition {
 public:
  // limit_minutes: counted from `begin`, the start of the process; none: no limit. save_seconds: estimated time of a
  // save until one is measured; the estimate reserves at most half of the limit.
  StopCondition(std::optional<double> limit_minutes, Clock::time_point begin, double save_seconds)
      : begin_(begin), limit_(limit_minutes), reserve_(margin * save_seconds) {
    if (limit_) reserve_ = std::min(reserve_, 30 * *limit_);
  }

  // Saves usually take this long (UsualTime).
  void saves_take(double seconds) { reserve_ = margin * seconds; }

  // The reason to save and exit now; empty: carry on. under_way: seconds of work to wait for first.
  std::string reason(double under_way = 0) const {
    for (const StopSignal& signal : stop_signals)
      if (signal.number == detail::signal_received) return signal.name;
    const double minutes = std::chrono::duration<double, std::ratio<60>>(Clock::now() - begin_).count();
    return limit_ && minutes + (reserve_ + under_way) / 60 >= *limit_ ? formatted("--time-limit {} minutes", *limit_)
                                                                      : std::string();
  }

 private:
  static constexpr double margin = 1.5;  // one save may take longer than another
  Clock::time_point begin_;
  std::optional<double> limit_;
  double reserve_;  // seconds
};

}  // namespace llmc
