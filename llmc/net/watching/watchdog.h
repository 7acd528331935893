// watchdog.h: nobody waits for the dead (contract 17). A thread of each process tells processes 0 and 1 what its ranks
// are doing (board.h); process 0, or in its absence process 1, finds who keeps the others waiting (judge.h) and tells
// all. The others hear from both regularly, and end by themselves if both are gone. On every process the thread then
// wakes the ranks that wait, and ends the process if that does not help.
#pragma once
#include <atomic>
#include <chrono>
#include <condition_variable>
#include <exception>
#include <mutex>
#include <thread>

#include "core/clock.h"
#include "net/meeting/rendezvous.h"
#include "net/watching/judge.h"
#include "net/watching/last_resort.h"

namespace llmc {

// The text that all processes print when a rank fails by itself.
inline std::string failure(const std::string& rank, const std::string& error) {
  return formatted("{} has failed: {}", rank, error);
}

class Watchdog {
 public:
  static constexpr double grace = 5;  // seconds for the ranks to end once they know why

  Watchdog(ControlPlane& control, const Timeouts& timeouts)
      : board(control.process() * control.local_ranks(), control.local_ranks(), first_ranks(control)),
        control_(control),
        timeouts_(timeouts),
        period_(std::clamp(std::min(timeouts.init, timeouts.comm) / 8, 0.05, 1.0)),
        seen_(static_cast<size_t>(control.processes() * control.local_ranks())),
        thread_([this] { run(); }) {}
  ~Watchdog() {
    {
      std::lock_guard lock(mutex_);
      ending_ = true;
    }
    ended_.notify_all();
    control_.wake();
    thread_.join();
  }

  // Sets the function to call, on another thread, when the job cannot go on: it wakes those who wait. Empty: none.
  void on_fault(std::function<void()> wake) {
    std::lock_guard lock(mutex_);
    wake_ = std::move(wake);
    if (fault_known_ && wake_) wake_();
  }
  // Why the job cannot go on; waits up to `seconds` for the reason, if none is known. The first sign that
  // another process is in trouble is often only a consequence of its end.
  Fault fault(double seconds = 2) const {
    return control_.wait_for_fault(Limit::seconds(seconds), [] { return false; });
  }
  std::string name_of_rank(int rank) const { return control_.name_of_rank(rank); }
  // A rank of this process has failed by itself.
  void failed(int rank, const std::string& error, ExitStatus status = ExitStatus::refused) {
    control_.report_failure({failure(control_.name_of_rank(rank), error), status});
  }

  // Its ranks are all there are.
  bool alone() const { return control_.processes() == 1; }

  // A line about a rank that is much slower than the others, now and then; known to process 0. Ranks of one process
  // share its processors.
  std::optional<std::string> notice() {
    std::lock_guard lock(mutex_);
    if (!notice_ || !next_notice_.due()) return std::nullopt;
    return std::exchange(notice_, std::nullopt);
  }

  Board board;

 private:
  static std::vector<int> first_ranks(const ControlPlane& control) {
    std::vector<int> ranks;
    for (int p = 0; p < control.processes(); ++p) ranks.push_back(p * control.local_ranks());
    return ranks;
  }

  void run() try {
    watch();
  } catch (const std::exception& error) {  // such as a board that is too long for a message: nobody is watched any more
    failed(control_.process() * control_.local_ranks(), error.what());
    end_process(fault());
  }

  void watch() {
    auto before = Clock::now();
    while (!ending_) {
      const Fault fault = control_.wait_for_fault(Limit::seconds(period_), [this] { return ending_.load(); });
      if (ending_) return;
      if (fault.known()) return end_process(fault);
      const auto now = Clock::now();
      // Time in which this process itself was stopped or starved does not count.
      const double seconds = std::min(std::chrono::duration<double>(now - before).count(), 2 * period_);
      before = now;
      const std::vector<RankState> mine = board.read(seconds);
      control_.post(parts_of(mine));
      control_.beat();
      if (control_.process() <= 1) judge(mine, seconds);
      else listen_to_judges(mine, seconds);
    }
  }

  void end_process(const Fault& fault) {
    const LastResort last_resort(grace, fault.why, fault.status);
    std::unique_lock lock(mutex_);
    fault_known_ = true;
    if (wake_) wake_();
    ended_.wait(lock, [this] { return ending_.load(); });
  }

  void judge(const std::vector<RankState>& mine, double seconds) {
    for (Seen& s : seen_) s.silent += seconds, s.still += seconds;
    take(control_.process(), mine);
    const auto [posts, ended] = control_.take_posts();
    for (const auto& [process, parts] : posts) try {
        take(process, ranks_from(parts, known_));
      } catch (const std::exception&) {  // not a board: this process says nothing
      }
    for (const int process : ended)
      for (int i = 0; i < control_.local_ranks(); ++i) of(process, i).ended = true;
    for (Seen& s : seen_) s.stale = s.silent > 4 * period_;
    const NameOfRank name = [this](int rank) { return control_.name_of_rank(rank); };
    if (control_.process() == 1 && seen_[0].silent < 8 * period_) return;  // process 0 judges
    if (const auto line = Judge(seen_, timeouts_, name).verdict()) return control_.end_job(*line);
    const auto slow = alone() ? std::nullopt : straggler(seen_, name);
    std::lock_guard lock(mutex_);
    notice_ = slow;
  }

  // Ends the job here if processes 0 and 1 both say nothing any more: one frozen host may have both.
  void listen_to_judges(const std::vector<RankState>& mine, double seconds) {
    const auto [heard, ended] = control_.take_heard();
    const bool warm = std::any_of(mine.begin(), mine.end(), [](const RankState& r) { return r.updates > 0; });
    const double most = timeouts_.silence(warm);
    std::string silent;
    for (const int process : silence_.add(seconds, heard, ended, most))
      silent += (silent.empty() ? "" : " and ") + control_.name_of_rank(process * control_.local_ranks());
    if (!silent.empty())
      control_.end_job(formatted("{}: nothing heard for {} s ({})", silent, most, timeouts_.option(warm)));
  }

  void take(int process, const std::vector<RankState>& states) {
    for (int i = 0; i < control_.local_ranks(); ++i) {
      Seen& s = of(process, i);
      const RankState& state = states.at(static_cast<size_t>(i));
      s.silent = 0;
      if (s.state.pulses != state.pulses || s.state.groups.size() != state.groups.size()) s.still = 0;
      for (size_t g = 0; g < std::min(s.state.groups.size(), state.groups.size()); ++g)
        if (s.state.groups[g].begun != state.groups[g].begun) s.still = 0;
      s.state = state;
    }
  }
  Seen& of(int process, int i) { return seen_[static_cast<size_t>(process * control_.local_ranks() + i)]; }

  ControlPlane& control_;
  Timeouts timeouts_;
  double period_;            // seconds
  std::vector<Seen> seen_;   // on processes 0 and 1: by rank
  KnownMembers known_;       // of all groups of these
  SilenceOfJudges silence_;  // on the others

  std::mutex mutex_;  // guards what follows
  std::function<void()> wake_;
  bool fault_known_ = false;
  std::optional<std::string> notice_;
  NowAndThen next_notice_{0, 60, 3600};

  std::atomic<bool> ending_ = false;
  std::condition_variable ended_;
  std::thread thread_;  // last: it uses all of them
};

}  // namespace llmc
