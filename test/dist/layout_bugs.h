// layout_bugs.h: bugs of data parallelism that tests plant, each as the hooks of a World, on top of its poison. The
// self-test must find them. They concern the unit blocks.0.
#pragma once
#include <memory>
#include <string_view>
#include <utility>

#include "dist/hooks.h"
#include "run/selftest.h"

namespace layout_bugs {

using namespace llmc;

inline bool is_first_block(const Tensor& unit) { return std::string_view(unit.name) == "blocks.0"; }

// Puts a Bug in the place of every group that its `groups` names.
template <class Bug>
struct Replaces : Poison {
  std::unique_ptr<Comm> joined(std::unique_ptr<Comm> group) const override {
    for (const std::string_view name : Bug::groups)
      if (group->name() == name) return std::make_unique<Bug>(std::move(*group));
    return group;
  }
};

// The gradients of a unit stay those of this rank's samples.
struct SkippedReduction final : Comm {
  static constexpr std::string_view groups[] = {"gradients", "replicas"};
  explicit SkippedReduction(Comm&& group) : Comm(std::move(group)) {}
  void reduce_scatter(Tensor buffer, Stream& stream) override {
    if (!is_first_block(buffer)) Comm::reduce_scatter(buffer, stream);
  }
  void all_reduce(Tensor buffer, Stream& stream) override {
    if (!is_first_block(buffer)) Comm::all_reduce(buffer, stream);
  }
};

// Gradients are averaged over the ranks although they are those of the mean loss of all.
struct MeanInsteadOfSum final : Comm {
  static constexpr std::string_view groups[] = {"gradients", "replicas"};
  explicit MeanInsteadOfSum(Comm&& group) : Comm(std::move(group)) {}
  void reduce_scatter(Tensor buffer, Stream& stream) override {  // which all_reduce() calls, too
    Comm::reduce_scatter(buffer, stream);
    const int64_t n = buffer.numel() / size();
    scale(buffer.slice(n * rank(), {n}), 1.0f / static_cast<float>(size()), stream);
  }
};

// A unit's weights are not gathered: the other ranks' shards of the buffer are what was there before.
struct StaleGather final : Comm {
  static constexpr std::string_view groups[] = {"weights"};
  explicit StaleGather(Comm&& group) : Comm(std::move(group)) {}
  void all_gather(Tensor buffer, Stream& stream) override {
    if (!is_first_block(buffer)) Comm::all_gather(buffer, stream);
  }
};

// A bug in the data, not in a group: all ranks read the samples of rank 0.
inline HostBatch read_as_rank_0(const StepConfig& step, int, int64_t micro_batch) {
  return selftest::read_batch(step, 0, micro_batch);
}

}  // namespace layout_bugs
