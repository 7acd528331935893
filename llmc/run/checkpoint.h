// checkpoint.h: checkpoints as Hugging Face directories, complete or absent (contract 13). OUT/step-000500/ holds
// config.json and model.safetensors as transformers loads them, optimizer-*.safetensors with slices of master weights
// and moments, trainer.json, the tokenizer's files, and manifest.json with the size and checksums of each. All is
// written to a temporary directory, with every write, fsync and close checked. A rename makes the checkpoint visible;
// then the parent directory is synced.
#pragma once
#include <sys/statvfs.h>

#include <filesystem>
#include <nlohmann/json.hpp>
#include <optional>
#include <string>

#include "core/checksum.h"
#include "core/safetensors.h"
#include "model/hf.h"

namespace llmc {

inline std::string checkpoint_path(const std::string& out_dir, int64_t step) {
  return formatted("{}/step-{:06}", out_dir, step);
}

// The step in the name of a checkpoint's directory; none: not such a name.
inline std::optional<int64_t> checkpoint_step(const std::filesystem::path& path) {
  const std::string name = path.filename();
  const bool numbered = name.starts_with("step-") && name.size() > 5 && name.size() < 20 &&
                        name.find_first_not_of("0123456789", 5) == std::string::npos;
  return numbered ? std::optional(std::stoll(name.substr(5))) : std::nullopt;
}

// The steps that have a checkpoint, complete or damaged, in ascending order.
inline std::vector<int64_t> checkpoint_steps(const std::string& out_dir) {
  std::vector<int64_t> steps;
  if (!path_exists(out_dir)) return steps;
  for (const std::string& name : names_in(out_dir))
    if (const std::optional<int64_t> step = checkpoint_step(name)) steps.push_back(*step);
  std::sort(steps.begin(), steps.end());
  return steps;
}

// Reads a JSON object; errors name the file.
inline nlohmann::json read_json(const std::string& path) {
  const nlohmann::json json = nlohmann::json::parse(read_text(path), nullptr, false);
  CHECK(json.is_object(), "{}: not a JSON object; the file is damaged", path);
  return json;
}

// The manifest's record of each file; a file that it does not name is not part of the checkpoint.
inline std::map<std::string, FileRecord> read_manifest(const std::string& path) {
  const std::string file = path + "/manifest.json";
  CHECK(path_exists(file), "{} has no manifest.json", path);
  const nlohmann::json manifest = read_json(file);
  std::map<std::string, FileRecord> files;
  try {
    for (const auto& [name, record] : manifest.at("files").items()) {
      CHECK(name.find('/') == std::string::npos, "{} names {}, expected a file in the same directory", file, name);
      files.emplace(name, FileRecord::from_json(record));
    }
  } catch (const nlohmann::json::exception& error) {
    throw Error(formatted("{} is damaged: {}", file, error.what()));
  }
  return files;
}

// Which part of a checkpoint to check: all of it, or only what a model is loaded from, its shape and weights.
enum class Part : uint8_t { all, model };

// What is wrong with a checkpoint; none: every file of the part exists and matches its checksums.
inline std::optional<std::string> checkpoint_fault(const std::string& path, Part part = Part::all) try {
  const std::map<std::string, FileRecord> files = read_manifest(path);
  for (const char* file : {"config.json", "trainer.json"})
    if (!files.contains(file)) return formatted("{}/manifest.json does not name {}", path, file);
  for (const auto& [name, record] : files)
    if (part == Part::all || name == "config.json" || name.starts_with("model"))
      if (auto fault = file_fault(path + "/" + name, record)) return fault;
  return std::nullopt;
} catch (const Error& error) {
  return error.what();
}

// The sequence length that one of our checkpoints was trained with; positions beyond it are untrained. None: not ours.
inline std::optional<int64_t> trained_seq_len(const std::string& checkpoint) {
  const std::string file = checkpoint + "/trainer.json";
  if (!path_exists(file)) return std::nullopt;
  const nlohmann::json length = read_json(file).value("seq_len", nlohmann::json());
  CHECK(length.is_number_integer() && length > 0,
        "{}: \"seq_len\" is {}, expected a positive whole number; the checkpoint is damaged", file, length.dump());
  return length;
}

namespace detail {

// The name of a slice in optimizer-*.safetensors: elements [begin, end) of the parameter's flat contents.
inline std::string slice_name(const StateEntry& e) {
  return formatted("{}:{}[{}:{}]", e.param->name, e.kind, e.begin, e.begin + e.tensor.numel());
}

inline void require_space(const std::string& directory, int64_t bytes) {
  struct statvfs disk {};
  if (statvfs(directory.c_str(), &disk) != 0) return;  // the writes will report it
  const double free = static_cast<double>(disk.f_bavail) * static_cast<double>(disk.f_frsize);
  CHECK(free >= static_cast<double>(bytes),
        "{}: a checkpoint of {:.1f} MiB does not fit into the {:.1f} MiB that are free: make room, or see "
        "--keep-checkpoints",
        directory, static_cast<double>(bytes) / (1 << 20), free / (1 << 20));
}

}  // namespace detail

// The size of a checkpoint on disk, up to some kilobytes: weights in the training dtype, master weights and two
// moments.
inline int64_t checkpoint_bytes(const ModelConfig& config, DType dtype, bool master_weights = true) {
  const int64_t state = size_of(accumulator_of(dtype)) * (dtype == accumulator_of(dtype) || !master_weights ? 2 : 3);
  return count_parameters(parameter_table(config)) * (size_of(dtype) + state);
}

// The write speed assumed before the first checkpoint: that of a slow disk or a busy shared file system.
inline constexpr double assumed_bytes_per_second = 100e6;

namespace detail {

// Which rank writes each Hugging Face tensor: a unit goes to the rank with the fewest bytes so far.
struct WritePlan {
  std::vector<HfTensor> tensors;
  std::vector<size_t> unit;  // of each tensor
  std::vector<int> writer;   // of each unit
  int writers = 0;           // ranks that write anything

  WritePlan(const ModelConfig& config, const ModelState& state, int ranks) : tensors(hf_tensors(config)) {
    std::map<std::string, size_t> unit_of;
    std::vector<int64_t> bytes(static_cast<size_t>(ranks), 0);
    for (size_t u = 0; u < state.size(); ++u) {
      for (const ParamSpec& p : state.unit(u).spec().params) unit_of[p.name] = u;
      const auto least = std::min_element(bytes.begin(), bytes.end());
      *least += state.unit(u).size();
      writer.push_back(static_cast<int>(least - bytes.begin()));
      writers = std::max(writers, writer.back() + 1);
    }
    for (const HfTensor& t : tensors) unit.push_back(unit_of.at(t.parts[0]));
  }
  std::string file(int rank) const {
    return writers == 1 ? "model.safetensors" : formatted("model-{:05}-of-{:05}.safetensors", rank + 1, writers);
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

// Thrown by all ranks if one of them could not write its part of a checkpoint, as on a full disk. Earlier checkpoints
// are untouched, and the step may be tried again.
class CheckpointError : public Error {
 public:
  using Error::Error;
};

// Writes the checkpoint of `step` and returns its path; called by all ranks. Each writes some of the weights and the
// optimizer slices that it owns; rank 0 writes the rest. `trainer`: contents of trainer.json; `more`: names and
// contents of further files, such as the tokenizer's; before_visible: what rank 0 must have done before.
inline std::string write_checkpoint(const std::string& out_dir, int64_t step, const ModelConfig& config,
                                    ModelState& state, DType dtype, const nlohmann::ordered_json& trainer,
                                    Stream& stream, const std::map<std::string, std::string>& more = {},
                                    const std::function<void()>& before_visible = {}) {
  stream.synchronize();
  DataParallel& dp = state.dp();
  const std::string path = checkpoint_path(out_dir, step), temporary = formatted("{}/.tmp-step-{:06}", out_dir, step);
  CHECK(!path_exists(path), "{} already exists: remove it, or choose another --out-dir", path);
  // A rank that cannot write still takes part in every exchange, and all ranks then give up together.
  std::string fault;
  auto attempt = [&](auto&& write) {
    if (fault.empty()) try {
        write();
      } catch (const Error& error) {
        fault = error.what();
      }
  };
  auto agree = [&] {
    std::error_code ignored;
    for (const std::string& of_rank : dp.control->all_gather_text("checkpoint faults", fault)) {
      if (of_rank.empty()) continue;
      if (dp.first()) std::filesystem::remove_all(temporary, ignored);
      throw CheckpointError(of_rank);
    }
  };
  std::error_code error;
  attempt([&] {
    if (!dp.first()) return;
    detail::require_space(out_dir, checkpoint_bytes(config, dtype));
    std::filesystem::remove_all(temporary, error);
    std::filesystem::create_directory(temporary, error);
    CHECK(!error, "cannot create {}: {}", temporary, error.message());
  });
  agree();
  nlohmann::ordered_json files = nlohmann::ordered_json::object();  // written by this rank

  const detail::WritePlan plan(config, state, dp.ranks());
  std::vector<TensorInfo> infos;
  for (size_t i = 0; i < plan.tensors.size(); ++i)
    if (plan.writer[plan.unit[i]] == dp.rank) infos.push_back({plan.tensors[i].name, dtype, plan.tensors[i].shape});
  std::optional<SafetensorsWriter> model;
  attempt([&] {
    if (!infos.empty()) model.emplace(temporary + "/" + plan.file(dp.rank), infos);
  });
  for (size_t u = 0; u < state.size(); ++u)  // one unit gathered, one tensor in host memory at a time
    state.with_whole_unit(u, stream, [&](const UnitState& unit) {
      if (plan.writer[u] != dp.rank) return;
      const HostView whole(unit.weights(), stream);
      const std::map<std::string, Tensor> weights = unit.whole_weights(whole.tensor());
      for (size_t i = 0; i < plan.tensors.size(); ++i) {
        if (plan.unit[i] != u) continue;
        const std::vector<std::byte> bytes = gather_hf(plan.tensors[i], weights);
        attempt([&] { model->write(bytes.data(), static_cast<int64_t>(bytes.size())); });
      }
    });
  attempt([&] {
    if (model) files[plan.file(dp.rank)] = model->finish().to_json();
  });

  const StateTable table = state.state_table();
  const bool owner = dp.replica == 0 && (state.zero_config().stage > 0 || dp.shard == 0);
  const int owners = state.zero_config().stage > 0 ? state.zero_config().shards : 1;
  attempt([&] {
    if (!owner) return;
    infos.clear();
    for (const StateEntry& e : table)
      if (e.kind != StateKind::weight) infos.push_back({detail::slice_name(e), e.tensor.dtype, {e.tensor.numel()}});
    const std::string name = formatted("optimizer-{:05}-of-{:05}.safetensors", dp.shard + 1, owners);
    SafetensorsWriter optimizer(temporary + "/" + name, infos);
    for (const StateEntry& e : table)
      if (e.kind != StateKind::weight)
        optimizer.write(HostView(e.tensor, stream).tensor().bytes, e.tensor.size_bytes());
    files[name] = optimizer.finish().to_json();
  });
  agree();

  const std::vector<std::string> written = dp.control->all_gather_text("checkpoint files", files.dump());
  attempt([&] {
    if (!dp.first()) return;
    nlohmann::ordered_json all;
    auto record_text = [&](const std::string& name, const std::string& text) {
      all[name] = write_recorded_text(temporary + "/" + name, text).to_json();
    };
    for (const auto& [name, text] : more) record_text(name, text);
    record_text("config.json", config_to_hf(config, dtype).dump(2) + "\n");
    record_text("trainer.json", trainer.dump(2) + "\n");
    if (plan.writers > 1) record_text("model.safetensors.index.json", plan.index(dtype));
    for (const std::string& text : written) all.update(nlohmann::ordered_json::parse(text));
    write_text_durably(temporary + "/manifest.json",
                       nlohmann::ordered_json{{"format", 1}, {"step", step}, {"files", all}}.dump(1) + "\n");
    fsync_directory(temporary);
    if (before_visible) before_visible();
    std::filesystem::rename(temporary, path, error);
    CHECK(!error, "cannot rename {} to {}: {}", temporary, path, error.message());
    fsync_directory(out_dir);
  });
  agree();
  return path;
}

// The weight files of a Hugging Face directory: one, or those that its index names.
inline std::vector<std::string> model_files(const std::string& directory) {
  const std::string one = directory + "/model.safetensors", index = one + ".index.json";
  if (path_exists(one) || !path_exists(index)) {  // if both exist, transformers takes the first
    CHECK(path_exists(one), "--model {}: has no model.safetensors; --from-scratch makes random weights of this shape",
          directory);
    return {one};
  }
  const nlohmann::json map = read_json(index).value("weight_map", nlohmann::json());
  CHECK(map.is_object() && !map.empty(), "{}: has no \"weight_map\"", index);
  std::vector<std::string> paths;
  for (const auto& [tensor, file] : map.items()) {
    CHECK(file.is_string() && file.get<std::string>().find('/') == std::string::npos,
          "{}: tensor {} is in {}, expected the name of a file in the same directory", index, tensor, file.dump());
    const std::string path = directory + "/" + file.get<std::string>();
    if (std::find(paths.begin(), paths.end(), path) == paths.end()) paths.push_back(path);
  }
  return paths;
}

// Loads this rank's part of the weights in these files, rounded to the training dtype; optimizer state starts at zero.
// Everything is checked before anything changes.
inline void load_weights(const std::vector<std::string>& paths, const ModelConfig& config, const ModelState& state,
                         Stream& stream) {
  std::vector<std::unique_ptr<SafetensorsReader>> files;
  for (const std::string& path : paths) files.push_back(std::make_unique<SafetensorsReader>(path));
  const std::vector<HfTensor> tensors = hf_tensors(config);
  const std::vector<HfPlace> places = match_hf_names(files, tensors);
  if (config.tied) require_same_head(files, places[0]);

  for (size_t u = 0; u < state.size(); ++u) state.unit(u).zero_all(stream);
  stream.synchronize();
  const StateTable table = state.state_table();
  std::map<std::string, int64_t> elements;
  for (size_t u = 0; u < state.size(); ++u)
    for (const ParamSpec& p : state.unit(u).spec().params) elements[p.name] = p.numel();
  for (size_t i = 0; i < tensors.size(); ++i)
    scatter_hf(tensors[i], *places[i].file, places[i].name, table, elements, stream);
}

inline void load_model(const std::string& directory, const ModelConfig& config, const ModelState& state,
                       Stream& stream) {
  load_weights(model_files(directory), config, state, stream);
}

// Loads the whole state of a checkpoint, bit for bit: weights, then the optimizer's slices, whatever layout wrote them.
inline void load_checkpoint(const std::string& path, const ModelConfig& config, const ModelState& state,
                            Stream& stream) {
  std::vector<std::string> models, optimizers;
  for (const auto& [name, record] : read_manifest(path)) {
    if (!name.ends_with(".safetensors")) continue;
    if (name.starts_with("model")) models.push_back(path + "/" + name);
    if (name.starts_with("optimizer-")) optimizers.push_back(path + "/" + name);
  }
  CHECK(!models.empty() && !optimizers.empty(), "{}/manifest.json names no {}.safetensors", path,
        models.empty() ? "model" : "optimizer");
  load_weights(models, config, state, stream);
  stream.synchronize();
  struct Slice {
    int64_t begin, end;
    const SafetensorsReader* file;
    std::string name;
  };
  std::vector<std::unique_ptr<SafetensorsReader>> files;
  std::map<std::string, std::vector<Slice>> slices;  // by "PARAMETER:KIND"
  for (const std::string& name : optimizers) {
    const auto& file = files.emplace_back(std::make_unique<SafetensorsReader>(name));
    for (const std::string& tensor : file->names()) {
      long long begin = 0, end = 0;
      const size_t bracket = std::min(tensor.rfind('['), tensor.size());
      CHECK(std::sscanf(tensor.c_str() + bracket, "[%lld:%lld]", &begin, &end) == 2 && begin >= 0 &&
                end - begin == file->info(tensor).numel() && file->info(tensor).dtype == DType::fp32,
            "{}: tensor {} is not a slice PARAMETER:KIND[BEGIN:END] of fp32", name, tensor);
      slices[tensor.substr(0, bracket)].push_back({begin, end, file.get(), tensor});
    }
  }
  for (const StateEntry& e : state.state_table()) {
    if (e.kind == StateKind::weight) continue;
    const int64_t end = e.begin + e.tensor.numel();
    int64_t filled = 0;
    for (const Slice& s : slices[formatted("{}:{}", e.param->name, e.kind)]) {
      const int64_t from = std::max(s.begin, e.begin), to = std::min(s.end, end);
      if (from >= to) continue;
      write_on_host(e.tensor.slice(from - e.begin, {to - from}), stream,
                    [&](const Tensor& host) { s.file->read(s.name, host.bytes, from - s.begin, to - from); });
      filled += to - from;
    }
    CHECK(filled == e.tensor.numel(), "{}: {} of {} has {} of {} elements; it was written with other options", path,
          e.kind, e.param->name, filled, e.tensor.numel());
  }
}

}  // namespace llmc
