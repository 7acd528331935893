// copies.h: the host memory that copies of a checkpoint take while it is written (--checkpoint-mode async): all that a
// rank writes, or as much as there is.
#pragma once
#include "device/host.h"
#include "run/plan/planner.h"
#include "run/plan/remedy.h"

namespace llmc {

// With less than this, or than a rank writes, a checkpoint is written before training goes on.
inline constexpr int64_t least_copies = int64_t{1} << 20;

// Does the run write checkpoints while it goes on? Only the last one, and those before an early end, are waited for.
inline bool copies_checkpoints(const Options& o) {
  return o.checkpoint_mode == CheckpointMode::async &&
         (o.checkpoint_every > 0 || o.minutes_between_checkpoints() > 0 || o.keep_best || !o.checkpoint_local.empty());
}

// Bytes of this host's memory that are free for one of its ranks, before it takes any.
inline int64_t free_memory_of_rank(const Options& o) { return free_host_memory() / o.place.ranks_on_host; }

// On a CPU they are a line of the plan; memory of a GPU they do not take.
inline void add_copies(Plan& plan, const Device& device, int64_t limit, int64_t free) {
  const bool on_cpu = device.computes_as() != DeviceKind::cuda;
  int64_t own = 0;  // of this stage, which needs less than another one perhaps
  for (const MemoryLine& line : plan.memory) own += line.bytes;
  const int64_t room = on_cpu ? std::min(limit, free) - own : free - plan.host_bytes;
  plan.copy_bytes = std::min(plan.share_bytes, std::max<int64_t>(0, room) / Arena::alignment * Arena::alignment);
  if (plan.copy_bytes < std::min(plan.share_bytes, least_copies)) plan.copy_bytes = 0;
  if (on_cpu && plan.copy_bytes > 0) plan.memory.push_back({copies_label, plan.copy_bytes});
}

// The plan of a run, with its copies. free: bytes of this host's memory that a rank can still take; none: a plan alone
inline Plan plan_run(const Options& o, const StepConfig& step, const Device& device,
                     int64_t free = std::numeric_limits<int64_t>::max()) {
  Plan plan = make_plan(step, device);
  if (!copies_checkpoints(o)) return plan;
  const int64_t limit = memory_limit(o, device);
  add_copies(plan, device, limit, free);
  const auto add_to = [&](std::shared_ptr<const Plan>& part) {
    Plan with = *part;
    add_copies(with, device, limit, free);
    part = std::make_shared<Plan>(std::move(with));
  };
  if (plan.others) add_to(plan.others);
  std::ranges::for_each(plan.stages, add_to);
  return plan;
}

// A notice if there is not enough memory for the copies of a rank; empty: there is.
inline std::string copies_notice(const Options& o, const Plan& plan) {
  const Plan& p = plan.with_most([](const auto& stage) { return stage->share_bytes - stage->copy_bytes; });
  if (!copies_checkpoints(o) || p.copy_bytes >= p.share_bytes) return "";
  return formatted(
      "notice: --checkpoint-mode async: {} of host memory are left for copies of the {} that a rank writes of a "
      "checkpoint: {}",
      human_bytes(p.copy_bytes), human_bytes(p.share_bytes),
      p.copy_bytes > 0 ? "they are copied a part at a time, and training waits until the rest is written"
                       : "training waits until a checkpoint is written, as with --checkpoint-mode sync");
}

}  // namespace llmc
