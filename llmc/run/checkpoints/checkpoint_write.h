// checkpoint_write.h: all ranks write a checkpoint (checkpoint.h) together. Each rank writes its share of the weights,
// which are gathered tensor by tensor, and the optimizer slices that it owns; rank 0 also writes the rest and renames.
// Ranks fail together, and can try again.
#pragma once
#include <algorithm>
#include <filesystem>
#include <functional>
#include <iterator>
#include <map>
#include <nlohmann/json.hpp>
#include <optional>
#include <set>
#include <string>
#include <vector>

#include "run/checkpoints/checkpoint.h"

namespace llmc {

namespace detail {

// The bytes of a Hugging Face tensor on rank `writer` of a group whose ranks hold parts of a unit (boxes, or some of
// the experts); nothing on the other ranks. weights: this rank's part of the unit, in host memory. units: the unit on
// each rank of the group.
inline std::vector<std::byte> gather_boxes(const HfTensor& hf, StateTable weights, const std::vector<UnitSpec>& units,
                                           DType dtype, int writer, Comm& group) {
  const auto gives = [&](const ParamSpec& p) {
    return p.first_copy && std::find(hf.parts.begin(), hf.parts.end(), p.name) != hf.parts.end();
  };
  std::erase_if(weights, [&](const StateEntry& e) { return !gives(*e.param); });
  std::string mine;
  if (group.rank() != writer)
    for (const StateEntry& e : weights)
      mine.append(reinterpret_cast<const char*>(e.tensor.bytes), static_cast<size_t>(e.tensor.size_bytes()));
  std::vector<std::string> texts = group.gather_text(writer, hf.name, mine);
  if (group.rank() != writer) return {};
  for (size_t rank = 0; rank < texts.size(); ++rank) {
    if (static_cast<int>(rank) == writer) continue;
    const Tensor theirs{.name = hf.name.c_str(),
                        .dtype = dtype,
                        .shape = {std::ssize(texts[rank]) / size_of(dtype)},
                        .bytes = reinterpret_cast<std::byte*>(texts[rank].data())};
    int64_t at = 0;
    for (const ParamSpec& p : units[rank].params) {
      if (!gives(p)) continue;
      weights.push_back({&p, StateKind::weight, 0, theirs.slice(at, {p.box().numel()})});
      at += p.box().numel();
    }
    CHECK(at == theirs.numel(), "{}: rank {} of the group {} sent {} elements, expected {}", hf.name, rank,
          group.name(), theirs.numel(), at);
  }
  return gather_hf(hf, weights);
}

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
    nlohmann::ordered_json map;
    int64_t bytes = 0;
    for (size_t i = 0; i < tensors.size(); ++i) {
      map[tensors[i].name] = file(writer[unit[i]]);
      bytes += TensorInfo{"", dtype, tensors[i].shape}.bytes();
    }
    return nlohmann::ordered_json{{"metadata", {{"total_size", bytes}}}, {"weight_map", map}}.dump(2) + "\n";
  }
};

}  // namespace detail

// Thrown by all ranks if one of them could not write its part of a checkpoint. Earlier checkpoints are untouched. The
// step may be retried, for example after a full disk, unless the status is `diverged`: a number is not finite.
class CheckpointError : public Error {
 public:
  using Error::Error;
};

// What a checkpoint has besides weights and optimizer state.
struct CheckpointContents {
  nlohmann::ordered_json trainer = {};           // of trainer.json
  std::map<std::string, std::string> more = {};  // names and contents of further files, such as the tokenizer's
  std::function<void()> before_visible = {};     // called on rank 0 before the rename
  Part part = Part::all;  // model: without the optimizer's slices, under a name that no run resumes from
};

// Writes the checkpoint of `step` and returns its path; called by all ranks. Each writes some of the weights and the
// optimizer slices that it owns; rank 0 writes the rest.
inline std::string write_checkpoint(const std::string& out_dir, int64_t step, const ModelConfig& config,
                                    ModelState& state, Stream& stream, const CheckpointContents& contents = {}) {
  const auto& [trainer, more, before_visible, part] = contents;
  const DType dtype = state.precision().weights;
  stream.synchronize();
  Groups& groups = state.groups();
  const std::string path = part == Part::all ? checkpoint_path(out_dir, step) : weights_path(out_dir, step),
                    temporary = formatted("{}/.tmp-step-{:06}", out_dir, step);
  CHECK(part == Part::model || !path_exists(path), "{} already exists: remove it, or choose another --out-dir", path);
  // A rank that cannot write still takes part in every exchange; then all ranks give up together.
  std::string fault;
  ExitStatus status = ExitStatus::refused;
  auto attempt = [&](auto&& write) {
    if (fault.empty()) try {
        write();
      } catch (const Error& error) {
        fault = error.what(), status = error.status();
      }
  };
  auto require_finite = [](const std::string& name, const Tensor& t) {
    if (!all_finite(t))
      throw Error(formatted("{} contains a non-finite number: the step diverged in its update; lower --lr, clip "
                            "gradients (--grad-clip) or raise --adam-eps",
                            name),
                  ExitStatus::diverged);
  };
  auto agree = [&] {
    const std::string mine = nlohmann::json{fault, status}.dump();
    const std::vector<std::string> all = groups[GroupName::control].all_gather_text("checkpoint faults", mine);
    std::string first;
    for (size_t rank = 0; rank < all.size() && first.empty(); ++rank) {
      const nlohmann::json theirs = parse_json(all[rank], "another rank's fault");
      if (theirs[0] == "") continue;
      first = (all.size() > 1 ? formatted("rank {}: ", rank) : "") + theirs[0].get<std::string>();
      status = theirs[1];
    }
    if (first.empty()) return;
    std::error_code ignored;
    if (groups.first()) std::filesystem::remove_all(temporary, ignored);
    groups[GroupName::control].barrier();  // a rank that throws ends the others, even before they have removed it
    throw CheckpointError(first, status);
  };
  std::error_code error;
  attempt([&] {
    if (!groups.first()) return;
    if (part == Part::model) std::filesystem::remove_all(path, error);  // left by an earlier attempt
    detail::require_space(out_dir, part == Part::all ? checkpoint_bytes(config, dtype, state.zero_config())
                                                     : weights_bytes(config, dtype));
    std::filesystem::remove_all(temporary, error);
    if (!error) std::filesystem::create_directory(temporary, error);  // but not OUT: it would have no lock
    CHECK(!error, "cannot create {}: {}", temporary, error.message());
  });
  agree();
  nlohmann::ordered_json files = nlohmann::ordered_json::object();  // those written by this rank

  const detail::WritePlan plan(config, state);
  std::vector<TensorInfo> infos;
  for (size_t i = 0; i < plan.tensors.size(); ++i)
    if (plan.writer[plan.unit[i]] == groups.rank())
      infos.push_back({plan.tensors[i].name, dtype, plan.tensors[i].shape});
  std::optional<SafetensorsWriter> model;
  attempt([&] {
    if (!infos.empty()) model.emplace(temporary + "/" + plan.file(groups.rank()), infos);
  });
  const ParamTable parameters = parameter_table(config);
  for (size_t u = 0; u < state.size(); ++u)  // one unit gathered, one tensor in host memory at a time
    if (state.stage_of(u) == groups.me.stage)
      state.weights.with_whole_unit(u, stream, [&](const UnitState& unit) {
        const bool experts = state.sharing_of(u) == Sharing::experts;
        Comm& group = experts ? groups[GroupName::expert_control] : groups[GroupName::tensor_control];
        const int writer = plan.writer[u], n = group.size();
        if (writer / n != groups.rank() / n) return;  // the ranks of either group are adjacent
        const HostView whole(unit.weights(), stream);
        std::vector<UnitSpec> held;
        for (int rank = 0; rank < n; ++rank) {
          const ParamTable all = {parameters[u]};
          held.push_back(experts ? part_of(all, groups.layout.expert, rank)[0]
                                 : part_of(all, groups.layout.tensor, rank)[0]);
        }
        for (size_t i = 0; i < plan.tensors.size(); ++i) {
          if (plan.unit[i] != u) continue;
          std::vector<std::byte> bytes =
              detail::gather_boxes(plan.tensors[i], unit.whole_weights(whole.tensor()), held, dtype, writer % n, group);
          if (writer != groups.rank()) continue;
          attempt([&] {
            require_finite(plan.tensors[i].name,
                           {.dtype = dtype, .shape = {std::ssize(bytes) / size_of(dtype)}, .bytes = bytes.data()});
            model->write(bytes.data(), std::ssize(bytes));
          });
        }
      });
  attempt([&] {
    if (model) files[plan.file(groups.rank())] = model->finish().to_json();
  });

  // A rank owns slices of state that the rest of its replica does not hold, or holds and updates alike (stage 0).
  StateTable table;
  int owners = 0;  // ranks of a replica that own any slices
  for (size_t u = 0; u < state.size(); ++u) {
    const Sharing sharing = state.sharing_of(u);
    const int shards = state.zero_config(sharing).owners();
    owners = std::max(owners,
                      shards * (sharing == Sharing::experts ? groups.layout.expert.ranks : groups.layout.tensor.ranks));
    if (state.has(u) && groups.sharers(sharing).shard < shards) state.unit(u).append_to(table);
  }
  std::erase_if(table, [](const StateEntry& e) { return e.kind == StateKind::weight || !e.param->first_copy; });
  const int place = groups.me.shard * groups.layout.tensor.ranks + groups.me.tensor;  // of this rank in the replica
  attempt([&] {
    if (part == Part::model || groups.me.replica > 0 || place >= owners) return;
    infos.clear();
    for (const StateEntry& e : table)
      infos.push_back({detail::slice_range(e).tensor_name(detail::what_of(e)), e.tensor.dtype, {e.tensor.numel()}});
    const std::string name = formatted("optimizer-{:05}-of-{:05}.safetensors", groups.me.stage * owners + place + 1,
                                       groups.stages() * owners);
    SafetensorsWriter optimizer(temporary + "/" + name, infos);
    for (size_t i = 0; i < table.size(); ++i) {
      const HostView view(table[i].tensor, stream);
      require_finite(infos[i].name, view.tensor());
      optimizer.write(view.tensor().bytes, view.tensor().size_bytes());
    }
    files[name] = optimizer.finish().to_json();
  });
  agree();

  const std::vector<std::string> written = groups[GroupName::control].all_gather_text("checkpoint files", files.dump());
  attempt([&] {
    if (!groups.first()) return;
    nlohmann::ordered_json all;
    auto record_text = [&](const std::string& name, const std::string& text) {
      all[name] = write_recorded_text(temporary + "/" + name, text).to_json();
    };
    for (const auto& [name, text] : more) record_text(name, text);
    record_text("config.json", config_to_hf(config, dtype).dump(2) + "\n");
    record_text("trainer.json", trainer.dump(2) + "\n");
    if (plan.writers.size() > 1) record_text("model.safetensors.index.json", plan.index(dtype));
    for (const std::string& text : written)
      all.update(nlohmann::ordered_json(parse_json(text, "a rank's list of files")));
    write_text_durably(temporary + "/manifest.json",
                       nlohmann::ordered_json{{"format", 1}, {"step", step}, {"files", all}}.dump(1) + "\n");
    fsync_directory(temporary);
    if (before_visible) before_visible();
    std::filesystem::rename(temporary, path, error);
    CHECK(!error, "cannot rename {} to {}: {}", temporary, path, error.message());
    try {
      fsync_directory(out_dir);
    } catch (const Error&) {  // a crash could undo the rename, so undo it now
      std::filesystem::rename(path, temporary, error);
      throw;
    }
  });
  agree();
  return path;
}

}  // namespace llmc
