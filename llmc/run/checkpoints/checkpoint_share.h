// checkpoint_share.h: which part of a checkpoint each rank writes: some of the weights, and the optimizer's slices that
// it owns.
#pragma once
#include "core/safetensors.h"
#include "model/hf.h"
#include "shard/zero.h"

namespace llmc::detail {

// Which rank writes each Hugging Face tensor: a unit goes to the rank with the fewest bytes so far.
struct WritePlan {
  std::vector<HfTensor> tensors;
  std::vector<size_t> unit;  // the unit of each tensor
  std::vector<int> writer;   // the rank that writes each unit
  std::set<int> writers;     // ranks that write anything

  WritePlan(const ModelConfig& config, const ModelState& state) : tensors(hf_tensors(config)) {
    const Groups& groups = state.groups();
    const ParamTable units = parameter_table(config);
    std::map<std::string, size_t> unit_of;
    std::vector<int64_t> bytes(static_cast<size_t>(groups.ranks()), 0);
    for (size_t u = 0; u < units.size(); ++u) {
      for (const ParamSpec& p : units[u].params) unit_of[p.name] = u;
      const auto first = bytes.begin() + state.stage_of(u) * groups.ranks_of_stage();  // ranks that hold it
      const auto least = std::min_element(first, first + groups.ranks_of_stage());
      *least += UnitLayout(units[u], state.zero_config().ranks()).size;
      writer.push_back(static_cast<int>(least - bytes.begin()));
    }
    writers.insert(writer.begin(), writer.end());
    for (const HfTensor& t : tensors) unit.push_back(unit_of.at(t.parts[0]));
  }
  std::string file(int rank) const {
    return writers.size() == 1 ? "model.safetensors"
                               : formatted("model-{:05}-of-{:05}.safetensors",
                                           std::distance(writers.begin(), writers.find(rank)) + 1, writers.size());
  }
  // model.safetensors.index.json
  std::string index(DType dtype) const {
    nlohmann::ordered_json map = nlohmann::ordered_json::object();
    int64_t bytes = 0;
    for (size_t i = 0; i < tensors.size(); ++i) {
      append_member(map, tensors[i].name, file(writer[unit[i]]));
      bytes += TensorInfo{"", dtype, tensors[i].shape}.bytes();
    }
    return nlohmann::ordered_json{{"metadata", {{"total_size", bytes}}}, {"weight_map", map}}.dump(2) + "\n";
  }
};

// The slices of the optimizer's state that a rank owns: the rest of its replica does not hold them, or holds and
// updates them alike (stage 0), and then owns others of them.
struct OwnedSlices {
  StateTable slices;
  int place, owners = 0;  // of this rank in its replica and stage, whose first ranks own the slices
  bool first_replica;
  int64_t most_bytes = 0;  // that a rank of this stage owns, in a checkpoint

  explicit OwnedSlices(const ModelState& state)
      : place(state.groups().me.shard * state.groups().layout.tensor.ranks + state.groups().me.tensor),
        first_replica(state.groups().me.replica == 0) {
    const Groups& groups = state.groups();
    const Layout& layout = groups.layout;
    std::map<std::pair<Sharing, int>, int64_t> bytes;  // of each shard
    const auto bytes_of = [](const StateEntry& e) {
      return e.tensor.numel() * std::max(size_of(DType::fp32), size_of(e.tensor.dtype));
    };
    for (size_t u = 0; u < state.size(); ++u) {
      const Sharing sharing = state.sharing_of(u);
      const ZeroConfig& zero = state.zero_config(sharing);
      const bool alike = zero.updates() == ZeroConfig::Updates::everyone;  // on all shards: each owns some tensors
      const int shards = alike ? zero.shards : zero.owners(), me = groups.sharers(sharing).shard;
      owners = std::max(owners, shards * (sharing == Sharing::experts ? layout.expert.ranks : layout.tensor.ranks));
      StateTable all;
      if (state.has(u) && me < shards) state.unit(u).append_to(all);
      for (StateEntry& e : all) {
        if (e.kind == StateKind::weight || !e.param->first_copy) continue;
        if (e.kind == StateKind::row_moment) {  // the others do not have it in their tables
          most_bytes += bytes_of(e);
          slices.push_back(std::move(e));
          continue;
        }
        int owner = me;
        for (int shard = 0; alike && shard < shards; ++shard)
          if (shard == 0 || bytes[{sharing, shard}] < bytes[{sharing, owner}]) owner = shard;
        bytes[{sharing, owner}] += bytes_of(e);
        if (owner == me) slices.push_back(std::move(e));
      }
    }
    for (const Sharing sharing : {Sharing::dense, Sharing::experts}) {
      int64_t most = 0;
      for (const auto& [shard, n] : bytes)
        if (shard.first == sharing) most = std::max(most, n);
      most_bytes += most;
    }
  }
  bool any() const { return first_replica && place < owners; }
};

// The bytes of a checkpoint that a rank of this one's stage writes, at most. Called for the first rank of a stage,
// which owns as much of the optimizer's state as any.
inline int64_t bytes_of_share(const ModelConfig& config, const ModelState& state) {
  const WritePlan plan(config, state);
  std::vector<int64_t> weights(static_cast<size_t>(state.groups().ranks()));
  for (size_t i = 0; i < plan.tensors.size(); ++i)
    weights[static_cast<size_t>(plan.writer[plan.unit[i]])] +=
        TensorInfo{"", state.precision().weights, plan.tensors[i].shape}.bytes();
  const auto first = weights.begin() + state.groups().me.stage * state.groups().ranks_of_stage();
  int64_t bytes = *std::max_element(first, first + state.groups().ranks_of_stage());
  if (state.precision().averages) bytes *= 2;
  return bytes + OwnedSlices(state).most_bytes;
}

}  // namespace llmc::detail
