// selftest_ties.h: where the routers of a model were nearest to another choice: a layout that rounds differently may
// choose otherwise there, and then differs by more than rounding.
#pragma once
#include <algorithm>
#include <functional>
#include <string>
#include <string_view>
#include <vector>

#include "device/host_copy.h"
#include "run/ranks.h"

namespace llmc::selftest {

struct NearTie {
  std::string place;  // "forward of blocks.3"
  int64_t micro_batch = 0, row = 0, chosen = 0, other = 0;
  double margin = std::numeric_limits<double>::infinity();  // of their logits
};

inline std::string to_string(const NearTie& t) {
  return formatted("in the {}, micro-batch {}, token {}, expert {} was chosen before {} by a margin of {:.1e}", t.place,
                   t.micro_batch, t.row, t.chosen, t.other, t.margin);
}

// Of the first step of a model with experts on one rank, with these inputs.
inline NearTie nearest_tie(const StepConfig& step, const BatchSource& batches) {
  const int64_t E = step.model.experts.count;
  const size_t k = static_cast<size_t>(step.model.experts.per_token);
  NearTie nearest;
  if (k == static_cast<size_t>(E)) return nearest;
  World world{Mesh()};
  Run run(step, make_plan(step, {}), {}, world, 0);
  init_weights(run.trainer.state(), 42, run.stream);
  const auto look = [&](const auto* logits, int64_t rows) {
    std::vector<double> row(static_cast<size_t>(E));
    std::vector<int64_t> order(static_cast<size_t>(E));
    for (int64_t i = 0; i < rows; ++i) {
      for (int64_t e = 0; e < E; ++e)
        row[static_cast<size_t>(e)] = static_cast<double>(logits[i * E + e]), order[static_cast<size_t>(e)] = e;
      std::ranges::stable_sort(order, std::greater(), [&](int64_t e) { return row[static_cast<size_t>(e)]; });
      const int64_t last = order[k - 1], next = order[k];
      const double margin = row[static_cast<size_t>(last)] - row[static_cast<size_t>(next)];
      if (!(margin < nearest.margin)) continue;
      const Interpreter::Place place = run.trainer.place();
      nearest = {place.what, place.micro_batch, i, last, next, margin};
    }
  };
  run.stream.set_inspector([&](const char* op, const Tensor& t) {
    if (op != std::string_view("router_logits") || t.shape[1] != E) return;  // not the gate of a shared expert
    const HostView logits(t, run.stream);
    with_type(t.dtype, [&](auto tag) { look(logits.data<typename decltype(tag)::type>(), t.shape[0]); });
  });
  run.trainer.accumulate_gradients(batches);
  run.stream.synchronize();
  run.stream.set_inspector(nullptr);
  return nearest;
}

}  // namespace llmc::selftest
