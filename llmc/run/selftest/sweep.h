// sweep.h: the random part of the self-test: draws (draws.h), one after the other, for some minutes or up to a number.
#pragma once
#include <chrono>
#include <random>

#include "core/log.h"
#include "run/selftest/compare.h"
#include "run/selftest/draws.h"

namespace llmc {

namespace selftest {

// Compares draws; what one rank computes is kept for those that share it.
class DrawComparer {
 public:
  DrawComparer(const Machine& machine, const Parts& parts) : machine_(machine), parts_(parts) {}

  Comparison compare(const Draw& d) try {
    Parts parts = parts_;
    parts.max_norm = d.max_norm;
    if (const std::string task = formatted("{}", choices(d).task); !reference_ || task != task_) {
      reference_.reset();
      reference_.emplace(d.step, parts);
      task_ = task;
    }
    Comparison c = selftest::compare(*reference_, d.step, machine_, parts);
    const StepConfig first = first_of_its_kind(d.step);
    if (!is_first(first, d.step)) c.require_same_bits(run_layout(first, machine_, reference_->parts_for(parts)));
    return c;
  } catch (const std::exception& error) {
    if (machine_.processes) throw;  // the ranks of other processes cannot go on
    return {.outcome = {}, .distances = {}, .fault = formatted(" {}", error.what()), .tie = {}};
  }

 private:
  static bool is_first(const StepConfig& first, const StepConfig& step) {
    const PipelineParallel &a = first.layout.pipeline, &b = step.layout.pipeline;
    return first.layout.zero.stage == step.layout.zero.stage && first.layout.zero.sync == step.layout.zero.sync &&
           first.layout.tensor.overlap == step.layout.tensor.overlap && first.recomputation() == step.recomputation() &&
           a.stages == b.stages && a.schedule == b.schedule && a.layers == b.layers;
  }

  Machine machine_;
  Parts parts_;
  std::string task_;  // of the reference
  std::optional<Reference> reference_;
};

// Which draws are compared: from `first` up to `last`, and until the minutes are over; or those of a list.
struct Sweep {
  std::vector<uint64_t> list = {};
  uint64_t first = 0;
  std::optional<uint64_t> last = {};
  std::optional<double> minutes = {};
  int max_ranks = 1;
  bool lists_all = false;                                  // print a line for each draw, not only for failures
  std::function<std::string(uint64_t draw)> command = {};  // that repeats a draw
};

// A number at which a sweep begins that no other sweep is likely to have had; the same on all processes.
inline uint64_t fresh_draw(const Processes* processes) {
  constexpr uint64_t apart = 1000, starts = 1'000'000'000;
  std::random_device device;
  std::string mine = std::to_string(device() % starts * apart);
  if (processes != nullptr) mine = processes->all_gather("the first draw", mine)[0];
  return std::stoull(mine);
}

class SweepRun {
 public:
  SweepRun(Log& log, const Sweep& sweep, const Machine& machine, const Parts& parts)
      : log_(log), sweep_(sweep), machine_(machine), comparer_(machine, parts) {}

  // false: a draw failed
  bool run() {
    if (!sweep_.list.empty()) {
      log_.line(formatted("self-test: {} draws of layouts and options of up to {} ranks", sweep_.list.size(),
                          sweep_.max_ranks));
      for (const uint64_t number : sweep_.list) compare(number);
    } else {
      CHECK(sweep_.last || sweep_.minutes, "the random part of the self-test has no end");
      log_.line(formatted("self-test: layouts of up to {} ranks, drawn at random from number {}{}{}", sweep_.max_ranks,
                          sweep_.first, sweep_.last ? formatted(" to {}", *sweep_.last) : "",
                          sweep_.minutes ? formatted(" for {} minute(s)", *sweep_.minutes) : ""));
      for (uint64_t number = sweep_.first; !is_over(number); ++number) compare(number);
    }
    log_.line(formatted("self-test: {} of {} draws are good{} | {}{}", count_.good, number(), not_good_text(),
                        human_duration(seconds()), number() == 0 ? "" : formatted(" | the last: {}", last_)));
    return count_.failed == 0;
  }

 private:
  using Clock = std::chrono::steady_clock;

  void compare(uint64_t number) {
    const Draw d = draw(sweep_.max_ranks, number);
    last_ = number;
    log_progress();
    const auto failed = [&](const std::string& verdict) {
      log_.line(formatted("  draw {} | {} | {}", number, to_string(d), verdict));
      if (sweep_.command) log_.line("    " + sweep_.command(number));
    };
    Comparison c;
    try {
      c = comparer_.compare(d);
    } catch (const Error&) {  // in another process too
      failed("FAILED");
      throw;
    }
    count_ += c;
    const bool threw = c.outcome.losses.empty();
    if (!c.fault.empty()) return failed((threw ? "" : c.distances.text() + " | ") + c.verdict());
    if (sweep_.lists_all)
      log_.line(formatted("  draw {} | {} | {} | {}", number, to_string(d), c.distances.text(),
                          c.good() ? "good" : c.verdict()));
  }

  // Rank 0's clock decides for all processes.
  bool is_over(uint64_t next) const {
    if (sweep_.last && next > *sweep_.last) return true;
    if (!sweep_.minutes) return false;
    const bool over = seconds() >= 60 * *sweep_.minutes;
    if (machine_.processes == nullptr) return over;
    return machine_.processes->all_gather("the time of the self-test", over ? "over" : "")[0] == "over";
  }

  // On a terminal a line that is overwritten, elsewhere a line now and then.
  void log_progress() {
    constexpr double pause = 60;
    const double now = seconds();
    if (!log_.live() && now < line_at_ + pause) return;
    std::string text = formatted("  draw {} | {} draws", last_, number());
    if (now > 0) text += formatted(" | {:.1f} per second", static_cast<double>(number()) / now);
    if (sweep_.minutes) text += formatted(" | {} left", human_duration(60 * *sweep_.minutes - now));
    text += not_good_text();
    if (log_.live()) return log_.progress(text);
    line_at_ = now;
    log_.line(text);
  }

  int64_t number() const { return count_.good + count_.failed + count_.not_compared; }
  double seconds() const { return std::chrono::duration<double>(Clock::now() - begin_).count(); }
  std::string not_good_text() const {
    return (count_.failed == 0 ? "" : formatted(", {} FAILED", count_.failed)) + count_.not_compared_text();
  }

  Log& log_;
  const Sweep& sweep_;
  Machine machine_;
  DrawComparer comparer_;
  Clock::time_point begin_ = Clock::now();
  uint64_t last_ = 0;  // the newest draw
  Count count_;
  double line_at_ = 0;  // seconds
};

}  // namespace selftest

// Compares draws with one rank. Prints a line for each that failed, and the command that repeats it; false: one did.
inline bool run_sweep(Log& log, const selftest::Sweep& sweep, const selftest::Machine& machine = {},
                      const selftest::Parts& parts = {}) {
  return selftest::SweepRun(log, sweep, machine, parts).run();
}

}  // namespace llmc
