// selftest.h: --selftest compares tiny models with awkward sizes, in layouts of the available ranks, with the same
// models on one rank: loss, gradient norm, every gradient, the resulting weights (contracts 3 and 5). The layouts of
// layouts.h come first; then, with --selftest-minutes, others at random (sweep.h).
#pragma once
#include <chrono>

#include "core/log.h"
#include "run/selftest/compare.h"

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

}  // namespace selftest

// Compares these layouts on the machine with one rank on the CPU. Prints a line for each layout that failed; false: one
// failed. The layouts run with `parts`, the one rank does not.
inline bool run_selftest(Log& log, const std::vector<selftest::ModelLayouts>& models,
                         const selftest::Machine& machine = {}, const selftest::Parts& parts = {}) {
  using namespace selftest;
  const auto begin = std::chrono::steady_clock::now();
  const int64_t total = count_layouts(models);
  CHECK(total > 0, "the self-test has no layout to compare");
  int max_ranks = 0;
  for (const ModelLayouts& m : models) max_ranks = std::max(max_ranks, m.layouts.back().ranks());
  log.line(formatted("self-test: {} layouts of up to {} ranks; in each, ranks together train a tiny model for {} steps",
                     total, max_ranks, steps));
  LayoutTables tables(log, machine, parts, total);
  Count count;
  for (const ModelLayouts& m : models) count += tables.compare(m);
  const double seconds = std::chrono::duration<double>(std::chrono::steady_clock::now() - begin).count();
  log.line("");
  log.line(formatted("self-test: {} of {} layouts are good{} | {}", count.good, total, count.not_compared_text(),
                     human_duration(seconds)));
  return count.failed == 0;
}

}  // namespace llmc
