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

// Whether it can be the name of a file beside the one that names it.
inline bool is_file_name(const std::string& name) {
  return !name.empty() && name.find('/') == name.npos && shown(name) == name;
}

// The manifest's record of each file; a file that it does not name is not part of the checkpoint.
inline std::map<std::string, FileRecord> read_manifest(const std::string& path) {
  const std::string file = path + "/manifest.json";
  CHECK(path_exists(file), "{} has no manifest.json", path);
  const nlohmann::json records = read_json(file).value("files", nlohmann::json());
  CHECK(records.is_object(), "{}: \"files\" is {}, expected an object; the file is damaged", file, records);
  std::map<std::string, FileRecord> files;
  for (const auto& [name, record] : records.items()) {
    CHECK(is_file_name(name), "{} names {}, expected a file in the same directory", file, shown(name));
    files.emplace(name, FileRecord::from_json(record, formatted("{}: the record of {}", file, shown(name))));
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
  CHECK(whole_number(length).value_or(0) > 0,
        "{}: \"seq_len\" is {}, expected a positive whole number; the checkpoint is damaged", file, length);
  return whole_number(length);
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
inline int64_t checkpoint_bytes(const ModelConfig& config, DType dtype, bool master_weights) {
  const int64_t state = size_of(accumulator_of(dtype)) * (dtype == accumulator_of(dtype) || !master_weights ? 2 : 3);
  return count_parameters(parameter_table(config)) * (size_of(dtype) + state);
}

// The write speed assumed before the first checkpoint: that of a slow disk or a busy shared file system.
inline constexpr double assumed_bytes_per_second = 100e6;

inline std::vector<std::unique_ptr<SafetensorsReader>> open_all(const std::vector<std::string>& paths) {
  std::vector<std::unique_ptr<SafetensorsReader>> files;
  for (const std::string& path : paths) files.push_back(std::make_unique<SafetensorsReader>(path));
  return files;
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
    CHECK(file.is_string() && is_file_name(file.get<std::string>()),
          "{}: tensor {} is in {}, expected the name of a file in the same directory", index, shown(tensor), file);
    const std::string path = directory + "/" + file.get<std::string>();
    if (std::find(paths.begin(), paths.end(), path) == paths.end()) paths.push_back(path);
  }
  return paths;
}

// Loads this rank's part of the weights in these files, rounded to the training dtype; optimizer state starts at zero.
// Everything is checked before anything changes.
inline void load_weights(const std::vector<std::string>& paths, const ModelConfig& config, const ModelState& state,
                         Stream& stream) {
  const std::vector<std::unique_ptr<SafetensorsReader>> files = open_all(paths);
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

namespace detail {

// A tensor of optimizer-*.safetensors.
struct Slice {
  int64_t begin, end;
  const SafetensorsReader* file;
  std::string name;
};

// All slices, by "PARAMETER:KIND", each in ascending order. Refuses a name that slice_name() would not give.
inline std::map<std::string, std::vector<Slice>> find_slices(
    const std::vector<std::unique_ptr<SafetensorsReader>>& files) {
  std::map<std::string, std::vector<Slice>> slices;
  for (const auto& file : files)
    for (const std::string& name : file->names()) {
      const std::string what = name.substr(0, name.rfind('['));
      Slice slice{0, 0, file.get(), name};
      long long begin = 0, end = 0;
      if (what.size() < name.size() && std::sscanf(name.c_str() + what.size(), "[%18lld:%18lld]", &begin, &end) == 2)
        slice.begin = begin, slice.end = end;
      CHECK(slice.begin >= 0 && slice.end - slice.begin == file->info(name).numel() && slice.begin < slice.end &&
                name == formatted("{}[{}:{}]", what, slice.begin, slice.end) && file->info(name).dtype == DType::fp32,
            "{}: tensor {} is not a slice PARAMETER:KIND[BEGIN:END] of fp32", file->path(), shown(name));
      slices[what].push_back(slice);
    }
  for (auto& [what, all] : slices)
    std::sort(all.begin(), all.end(), [](const Slice& a, const Slice& b) { return a.begin < b.begin; });
  return slices;
}

// Refuses slices that do not hold every element of every parameter's state exactly once, and no others.
inline void require_whole_slices(const std::map<std::string, std::vector<Slice>>& slices, const std::string& path,
                                 const ModelConfig& config, bool masters) {
  std::set<std::string> expected;
  for (const UnitSpec& unit : parameter_table(config))
    for (const ParamSpec& p : unit.params)
      for (const StateKind kind : {StateKind::master, StateKind::moment1, StateKind::moment2}) {
        if (kind == StateKind::master && !masters) continue;
        const std::string what = *expected.insert(formatted("{}:{}", p.name, kind)).first;
        const auto found = slices.find(what);
        CHECK(found != slices.end(), "{}: has no {}; it was written with other options", path, what);
        int64_t at = 0;
        for (const Slice& s : found->second) {
          CHECK(s.begin == at, "{}: {} begins at element {}, but the slice before it ends at {}; the file is damaged",
                s.file->path(), s.name, s.begin, at);
          at = s.end;
        }
        CHECK(at == p.numel(), "{}: the slices of {} end at element {} of {}; the checkpoint is damaged", path, what,
              at, p.numel());
      }
  for (const auto& [what, all] : slices)
    CHECK(expected.contains(what), "{}: tensor {} belongs to no state of this model; it was written with other options",
          all[0].file->path(), shown(all[0].name));
}

}  // namespace detail

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
  const std::vector<std::unique_ptr<SafetensorsReader>> files = open_all(optimizers);
  const StateTable table = state.state_table();
  const std::map<std::string, std::vector<detail::Slice>> slices = detail::find_slices(files);
  const DType dtype = state.unit(0).weight_shard().dtype;
  const bool masters = dtype != accumulator_of(dtype) && state.zero_config().master_weights;
  detail::require_whole_slices(slices, path, config, masters);
  for (const StateEntry& e : table) {
    if (e.kind == StateKind::weight) continue;
    for (const detail::Slice& s : slices.at(formatted("{}:{}", e.param->name, e.kind))) {
      const int64_t from = std::max(s.begin, e.begin), to = std::min(s.end, e.begin + e.tensor.numel());
      if (from < to)
        write_on_host(e.tensor.slice(from - e.begin, {to - from}), stream,
                      [&](const Tensor& host) { s.file->read(s.name, host.bytes, from - s.begin, to - from); });
    }
  }
}

}  // namespace llmc
