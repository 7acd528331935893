// layout_bugs.h: bugs of data parallelism that tests plant, each as the hooks of a World, on top of its poison. The
// self-test must find them. They concern the unit blocks.0.
#pragma once
#include <algorithm>
#include <memory>
#include <string_view>
#include <utility>
#include <vector>

#include "comm/comm.h"
#include "run/selftest/selftest.h"

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

// A parameter server leaves out the gradients of the last rank.
struct ServerSkipsARank final : Comm {
  static constexpr std::string_view groups[] = {"gradients"};
  explicit ServerSkipsARank(Comm&& group) : Comm(std::move(group)) {}
  void push(Tensor buffer, int servers, Stream& stream) override {
    if (is_first_block(buffer) && rank() == size() - 1) zero(buffer, stream);
    Comm::push(buffer, servers, stream);
  }
};

// It adds in another order than that of the ranks, as if in that of arrival.
struct ServerAddsAsItArrives final : Comm {
  static constexpr std::string_view groups[] = {"gradients"};
  explicit ServerAddsAsItArrives(Comm&& group) : Comm(std::move(group)) {}
  void push(Tensor buffer, int servers, Stream& stream) override {
    if (servers == 1 && is_first_block(buffer)) reduce(buffer, 0, stream);  // along the ring, rank 0 last
    else Comm::push(buffer, servers, stream);
  }
};

// It sends weights back that are one update old.
struct ServerSendsStaleWeights final : Comm {
  static constexpr std::string_view groups[] = {"weights"};
  explicit ServerSendsStaleWeights(Comm&& group) : Comm(std::move(group)) {}
  void pull(Tensor buffer, int servers, Stream& stream) override {
    if (!is_first_block(buffer)) return Comm::pull(buffer, servers, stream);
    stream.synchronize();
    const std::vector<std::byte> updated(buffer.bytes, buffer.bytes + buffer.size_bytes());
    if (rank() < servers && !before_.empty()) std::copy(before_.begin(), before_.end(), buffer.bytes);
    Comm::pull(buffer, servers, stream);
    stream.synchronize();
    if (rank() < servers) std::copy(updated.begin(), updated.end(), buffer.bytes);
    before_ = updated;
  }

 private:
  std::vector<std::byte> before_;
};

// The other ranks get the weights of a unit from a server, but those of its first part only.
struct PullsOnePart final : Comm {
  static constexpr std::string_view groups[] = {"weights"};
  explicit PullsOnePart(Comm&& group) : Comm(std::move(group)) {}
  void pull(Tensor buffer, int servers, Stream& stream) override {
    if (is_first_block(buffer) && servers > 1) Comm::pull(buffer.slice(0, {buffer.numel() / servers}), 1, stream);
    else Comm::pull(buffer, servers, stream);
  }
};

// The server keeps its decision about an update for itself: whether it happens, and the norm.
struct UntoldDecision final : Comm {
  static constexpr std::string_view groups[] = {"scalars"};
  explicit UntoldDecision(Comm&& group) : Comm(std::move(group)) {}
  void broadcast(Tensor, int, Stream&) override {}
};

// A bug in the data, not in a group: all ranks read the samples of rank 0.
inline HostBatch read_as_rank_0(const StepConfig& step, int, int64_t micro_batch) {
  return selftest::read_batch(step, 0, micro_batch);
}

}  // namespace layout_bugs
