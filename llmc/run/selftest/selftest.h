// selftest.h: --selftest compares tiny models with awkward sizes, in layouts of the available ranks, with the same
// models on one rank: loss, gradient norm, every gradient, the resulting weights (contracts 3 and 5). The layouts of
// layouts.h come first; then, with --selftest-minutes, others at random: draws (draws.h), one after the other.
#pragma once
#include <random>

#include "core/clock.h"
#include "core/log.h"
#include "run/selftest/compare.h"
#include "run/selftest/draws.h"

namespace llmc {

namespace selftest {

// The layouts of all models, compared with one rank: a table for each model, with a row for each number of ranks.
class LayoutTables {
 public:
  LayoutTables(Log& log, const Machine& machine, const Parts& parts, int64_t total)
      : log_(log), machine_(machine), parts_(parts), total_(total) {}

  Count compare(const ModelLayouts& m) {
    const Reference reference(step_config(m.model.config(), m.model.dtype, 1, Layout{}), parts_);
    title(m, reference);
    Count all;
    for (auto from = m.layouts.begin(); from != m.layouts.end();) {
      const auto to = std::find_if(from, m.layouts.end(), [&](const Layout& l) { return l.ranks() != from->ranks(); });
      all += compare(m.model, reference, std::span(from, to));
      from = to;
    }
    if (all.good == 0 && all.not_compared > 0) {
      log_.line("  FAILED: none of the layouts could be compared");
      all.failed += std::exchange(all.not_compared, 0);
    }
    return all;
  }

 private:
  void title(const ModelLayouts& m, const Reference& reference) {
    const bool other_device = machine_.device.kind != DeviceKind::cpu;
    log_.line("");
    log_.line(formatted("{} | {}", to_string(m.model), axes_of(m.layouts)));
    log_.line(row("largest distance from one rank", "loss", "norm", "gradients", "weights"));
    log_.line(row("allowed", other_device ? reference.farther : reference.near));
    if (!reference.fp32 && !other_device && std::ranges::any_of(m.layouts, Reference::in_parts))
      log_.line(row("allowed with tp or cp", reference.farther));
  }

  // Layouts of the same number of ranks.
  Count compare(const Model& model, const Reference& reference, std::span<const Layout> layouts) {
    const int ranks = layouts.front().ranks();
    const std::string of_ranks = formatted("{} rank{}", ranks, ranks == 1 ? "" : "s");
    Count count;
    Distances largest;
    Outcome first;  // the first of those that agree bitwise
    for (const Layout& layout : layouts) {
      log_.progress(formatted("{}, {}: layout", to_string(model), of_ranks), ++number_, total_);
      const StepConfig step = step_config(model.config(), model.dtype, layout);
      Comparison c = selftest::compare(reference, step, machine_, parts_);
      if (begins(layout)) first = c.outcome;
      // Contracts 3 and 4: the stages agree bit for bit, and so do servers and schedules; overlap changes nothing
      // either. But zb-v has both parts of a tied table's gradient on one rank, and adds them in another order.
      if (!model.tied || layout.pipeline.schedule != Schedule::zb_v) c.require_same_bits(first);
      largest = largest.or_larger(c.distances);
      count += c;
      if (!c.good()) log_.line(formatted("  {} | {} | {}", to_string(layout), c.distances.text(), c.verdict()));
    }
    log_.line(row(formatted("{}: {} of {} layouts good", of_ranks, count.good, layouts.size()), largest));
    return count;
  }

  template <class... Columns>
  static std::string row(const std::string& name, const Columns&... columns) {
    return formatted("  {:-34} {:9} {:9} {:9} {:9}", name, columns...);
  }
  static std::string row(const std::string& name, const Distances& d) {
    const auto text = [](double x) { return formatted("{:.1e}", x); };
    return row(name, text(d.loss), text(d.norm), text(d.gradients), text(d.weights));
  }

  Log& log_;
  const Machine& machine_;
  const Parts& parts_;
  int64_t number_ = 0, total_;  // of layouts
};

// ---- Draws, for some minutes or up to a number ----------------------------------------------------------------------

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
    log_.line(formatted("self-test: {} of {} draws are good{} | {}{}", count_.good, draws(), not_good_text(),
                        human_duration(seconds()), draws() == 0 ? "" : formatted(" | the last: {}", last_)));
    return count_.failed == 0;
  }

 private:
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
    std::string text = formatted("  draw {} | {} draws", last_, draws());
    if (now > 0) text += formatted(" | {:.1f} per second", static_cast<double>(draws()) / now);
    if (sweep_.minutes) text += formatted(" | {} left", human_duration(60 * *sweep_.minutes - now));
    text += not_good_text();
    if (log_.live()) return log_.progress(text);
    line_at_ = now;
    log_.line(text);
  }

  int64_t draws() const { return count_.good + count_.failed + count_.not_compared; }
  double seconds() const { return seconds_since(begin_); }
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

// Compares these layouts on the machine with one rank on the CPU. Prints a line for each layout that failed; false: one
// failed. The layouts run with `parts`, the one rank does not.
inline bool run_selftest(Log& log, const std::vector<selftest::ModelLayouts>& models,
                         const selftest::Machine& machine = {}, const selftest::Parts& parts = {}) {
  using namespace selftest;
  const auto begin = Clock::now();
  const int64_t total = count_layouts(models);
  CHECK(total > 0, "the self-test has no layout to compare");
  int max_ranks = 0;
  for (const ModelLayouts& m : models) max_ranks = std::max(max_ranks, m.layouts.back().ranks());
  log.line(formatted("self-test: {} layouts of up to {} ranks; in each, ranks together train a tiny model for {} steps",
                     total, max_ranks, steps));
  LayoutTables tables(log, machine, parts, total);
  Count count;
  for (const ModelLayouts& m : models) count += tables.compare(m);
  const double seconds = seconds_since(begin);
  log.line("");
  log.line(formatted("self-test: {} of {} layouts are good{} | {}", count.good, total, count.not_compared_text(),
                     human_duration(seconds)));
  return count.failed == 0;
}

// Compares draws with one rank. Prints a line for each that failed, and the command that repeats it; false: one did.
inline bool run_sweep(Log& log, const selftest::Sweep& sweep, const selftest::Machine& machine = {},
                      const selftest::Parts& parts = {}) {
  return selftest::SweepRun(log, sweep, machine, parts).run();
}

}  // namespace llmc
