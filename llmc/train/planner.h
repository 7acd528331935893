// planner.h: what a run needs, found by the trainer itself on the null device: nothing is computed, memory is counted
// by name, work by op. The arenas of the real run are made exactly this large, so the plan cannot drift from the code.
#pragma once
#include <optional>
#include <vector>

#include "train/step.h"

namespace llmc {

struct Plan {
  int64_t arena_bytes = 0, scratch_bytes = 0;
  std::vector<MemoryLine> memory;  // what is live at the high-water mark, scratch last
  OpLedger step_ops;               // calls, flops and bytes of one training step
  int64_t total_bytes() const { return arena_bytes + scratch_bytes; }
};

// One training step, one evaluation and every length of a generation, on paper. `threads`: of the device planned for.
inline Plan make_plan(const StepConfig& config, int threads) {
  const Device device{DeviceKind::null, threads};
  Arena arena(device), scratch(device);
  Stream stream(device, scratch);
  Trainer trainer(config, {arena, stream});
  const BatchSource nothing = [](int64_t) { return HostBatch{}; };
  Plan plan;
  stream.set_ledger(&plan.step_ops);
  trainer.step(nothing, {}, {.max_norm = 1});
  stream.set_ledger(nullptr);
  trainer.evaluate(1, nothing);
  std::vector<int32_t> tokens;
  for (int64_t length = 1;; length = std::min(2 * length, config.batch.T)) {
    tokens.resize(static_cast<size_t>(length));
    trainer.next_token_logits(tokens);
    if (length == config.batch.T) break;
  }
  plan.arena_bytes = arena.high_water();
  plan.scratch_bytes = scratch.high_water();
  plan.memory = arena.table();
  plan.memory.push_back({"op scratch", plan.scratch_bytes});
  return plan;
}

// Does the plan fit into `limit` bytes?
inline bool fits(const Plan& plan, int64_t limit) { return plan.total_bytes() <= limit; }

// The first way to make a run fit into `limit` bytes with the same tokens in a step: more recomputation, which changes
// no number; then smaller micro-batches, and both.
struct Remedy {
  int64_t batch_size;
  Recompute recompute;
  int64_t total_bytes;
};
inline std::optional<Remedy> first_fit(StepConfig config, int threads, int64_t limit) {
  const int64_t sequences = config.batch.B * config.micro_batches;
  const Recompute asked = config.recompute;
  for (int64_t B = config.batch.B; B >= 1; --B) {
    if (sequences % B != 0) continue;
    config.batch.B = B;
    config.micro_batches = sequences / B;
    for (const Recompute recompute : all_recompute) {
      if (recompute < asked) continue;
      config.recompute = recompute;
      if (const Plan plan = make_plan(config, threads); fits(plan, limit))
        return Remedy{B, recompute, plan.total_bytes()};
    }
  }
  return std::nullopt;
}

}  // namespace llmc
