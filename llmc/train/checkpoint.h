// checkpoint.h: checkpoints as Hugging Face directories, whole or not at all. OUT/step-000500/ holds config.json and
// model.safetensors as transformers loads them, optimizer-*.safetensors with slices of master weights and moments,
// trainer.json, and manifest.json with the size and the checksums of each. Written to a temporary directory, every
// write, fsync and close checked, renamed, and the parent directory synced: nothing half-written is ever read.
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

// The step of a checkpoint's directory; none: not the name of one.
inline std::optional<int64_t> checkpoint_step(const std::filesystem::path& path) {
  const std::string name = path.filename();
  const bool numbered = name.starts_with("step-") && name.size() > 5 && name.size() < 20 &&
                        name.find_first_not_of("0123456789", 5) == std::string::npos;
  return numbered ? std::optional(std::stoll(name.substr(5))) : std::nullopt;
}

// The steps that have a checkpoint, whole or damaged, in ascending order.
inline std::vector<int64_t> checkpoint_steps(const std::string& out_dir) {
  std::vector<int64_t> steps;
  std::error_code none;
  for (const auto& entry : std::filesystem::directory_iterator(out_dir, none))
    if (const std::optional<int64_t> step = checkpoint_step(entry.path())) steps.push_back(*step);
  std::sort(steps.begin(), steps.end());
  return steps;
}

// A JSON object out of a file, with errors that name it.
inline nlohmann::json read_json(const std::string& path) {
  const nlohmann::json json = nlohmann::json::parse(read_text(path), nullptr, false);
  CHECK(json.is_object(), "{}: not a JSON object; the file is damaged", path);
  return json;
}

// What is wrong with a checkpoint; nothing: every file is there and has its checksums.
inline std::optional<std::string> checkpoint_fault(const std::string& path) try {
  if (!std::filesystem::exists(path + "/manifest.json")) return path + " has no manifest.json";
  const nlohmann::json manifest = read_json(path + "/manifest.json");
  for (const char* file : {"config.json", "trainer.json", "model.safetensors"})
    if (!manifest.at("files").contains(file)) return formatted("{}/manifest.json does not name {}", path, file);
  for (const auto& [name, record] : manifest.at("files").items())
    if (auto fault = file_fault(path + "/" + name, FileRecord::from_json(record))) return fault;
  return std::nullopt;
} catch (const nlohmann::json::exception& error) {
  return formatted("{}/manifest.json is damaged: {}", path, error.what());
} catch (const Error& error) {
  return error.what();
}

// The sequence length that a checkpoint of ours was trained with: positions beyond it have learnt nothing. None: not
// ours.
inline std::optional<int64_t> trained_seq_len(const std::string& checkpoint) {
  const std::string file = checkpoint + "/trainer.json";
  if (!std::filesystem::exists(file)) return std::nullopt;
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
  if (statvfs(directory.c_str(), &disk) != 0) return;  // the writes will tell
  const double free = static_cast<double>(disk.f_bavail) * static_cast<double>(disk.f_frsize);
  CHECK(free >= static_cast<double>(bytes),
        "{}: a checkpoint of {:.1f} MiB does not fit into the {:.1f} MiB that are free: make room, or see "
        "--keep-checkpoints",
        directory, static_cast<double>(bytes) / (1 << 20), free / (1 << 20));
}

}  // namespace detail

// What a checkpoint of this state takes on the disk, but for some kilobytes.
inline int64_t checkpoint_bytes(const StateTable& table) {
  int64_t bytes = 0;
  for (const StateEntry& e : table) bytes += e.tensor.size_bytes();
  return bytes;
}

// Writes the checkpoint of `step` and returns its path. `trainer`: what trainer.json says.
inline std::string write_checkpoint(const std::string& out_dir, int64_t step, const ModelConfig& config,
                                    const StateTable& table, DType dtype, const nlohmann::ordered_json& trainer,
                                    Stream& stream) {
  stream.synchronize();
  const std::string path = checkpoint_path(out_dir, step),
                    temporary = formatted("{}/.tmp-step-{:06}-{}", out_dir, step, getpid());
  CHECK(!std::filesystem::exists(path), "{} exists already: remove it, or choose another --out-dir", path);
  detail::require_space(out_dir, checkpoint_bytes(table));
  try {
    std::error_code error;
    std::filesystem::create_directory(temporary, error);
    CHECK(!error, "cannot make {}: {}", temporary, error.message());
    nlohmann::ordered_json files;
    auto record = [&](const char* name, const FileRecord& r) { files[name] = r.to_json(); };
    auto record_text = [&](const char* name, const std::string& text) {
      record(name, write_recorded_text(temporary + "/" + name, text));
    };
    record_text("config.json", config_to_hf(config, dtype).dump(2) + "\n");

    const std::vector<HfTensor> tensors = hf_tensors(config);
    const std::map<std::string, Tensor> weights = tensors_of_kind(table, StateKind::weight);
    std::vector<TensorInfo> infos;
    for (const HfTensor& t : tensors) infos.push_back({t.name, dtype, t.shape});
    SafetensorsWriter model(temporary + "/model.safetensors", infos);
    for (const HfTensor& t : tensors) {  // one tensor in host memory at a time
      const std::vector<std::byte> bytes = gather_hf(t, weights);
      model.write(bytes.data(), static_cast<int64_t>(bytes.size()));
    }
    record("model.safetensors", model.finish());

    infos.clear();
    for (const StateEntry& e : table)
      if (e.kind != StateKind::weight) infos.push_back({detail::slice_name(e), e.tensor.dtype, {e.tensor.numel()}});
    SafetensorsWriter optimizer(temporary + "/optimizer-00001-of-00001.safetensors", infos);
    for (const StateEntry& e : table)
      if (e.kind != StateKind::weight) optimizer.write(e.tensor.bytes, e.tensor.size_bytes());
    record("optimizer-00001-of-00001.safetensors", optimizer.finish());

    record_text("trainer.json", trainer.dump(2) + "\n");
    write_text_durably(temporary + "/manifest.json",
                       nlohmann::ordered_json{{"format", 1}, {"step", step}, {"files", files}}.dump(1) + "\n");
    fsync_directory(temporary);
    std::filesystem::rename(temporary, path, error);
    CHECK(!error, "cannot rename {} to {}: {}", temporary, path, error.message());
    fsync_directory(out_dir);
  } catch (...) {
    std::error_code ignored;
    std::filesystem::remove_all(temporary, ignored);
    throw;
  }
  return path;
}

// The weights of a Hugging Face directory, rounded to the training dtype; optimizer state starts at zero. Everything is
// checked before anything changes.
inline void load_model(const std::string& directory, const ModelConfig& config, const ModelState& state,
                       Stream& stream) {
  const std::string path = directory + "/model.safetensors";
  CHECK(!std::filesystem::exists(path + ".index.json"),
        "{}.index.json: weights in several files are not supported yet; save the model as one file", path);
  CHECK(std::filesystem::exists(path),
        "--model {}: has no model.safetensors; --from-scratch makes new weights of this shape", directory);
  const SafetensorsReader file(path);
  const std::vector<HfTensor> tensors = hf_tensors(config);
  const std::vector<std::string> names = match_hf_names(file, tensors);

  for (size_t u = 0; u < state.size(); ++u) state.unit(u).zero_all(stream);
  stream.synchronize();
  const StateTable table = state.state_table();
  std::map<std::string, Tensor> masters = tensors_of_kind(table, StateKind::master);
  if (masters.empty()) masters = tensors_of_kind(table, StateKind::weight);  // fp32 weights are their own masters
  for (size_t i = 0; i < tensors.size(); ++i) scatter_hf(tensors[i], file, names[i], masters);
  state.round_weights(stream);
}

// The whole state of a checkpoint, bit for bit: weights, then the optimizer's slices, from whatever layout wrote them.
inline void load_checkpoint(const std::string& path, const ModelConfig& config, const ModelState& state,
                            Stream& stream) {
  load_model(path, config, state, stream);
  stream.synchronize();
  struct Slice {
    int64_t begin, end;
    const SafetensorsReader* file;
    std::string name;
  };
  std::vector<std::unique_ptr<SafetensorsReader>> files;
  std::map<std::string, std::vector<Slice>> slices;  // by "PARAMETER:KIND"
  for (const std::string& name : expand_glob(path + "/optimizer-*.safetensors", "--resume")) {
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
      s.file->read(s.name, e.tensor.slice(from - e.begin, {to - from}).bytes, from - s.begin, to - from);
      filled += to - from;
    }
    CHECK(filled == e.tensor.numel(), "{}: {} of {} has {} of {} elements; it was made by another kind of training",
          path, e.kind, e.param->name, filled, e.tensor.numel());
  }
  state.round_weights(stream);
}

}  // namespace llmc
