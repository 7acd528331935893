// checkpoint.h: checkpoints as Hugging Face directories, whole or not at all: OUT/step-000500/ with config.json,
// model.safetensors and trainer.json. Written to a temporary directory, every write, fsync and close checked, renamed,
// and the parent directory synced.
#pragma once
#include <filesystem>
#include <nlohmann/json.hpp>
#include <optional>
#include <string>

#include "core/files.h"
#include "core/safetensors.h"
#include "model/hf.h"

namespace llmc {

inline std::string checkpoint_path(const std::string& out_dir, int64_t step) {
  return formatted("{}/step-{:06}", out_dir, step);
}

// The largest step that has a whole checkpoint.
inline std::optional<int64_t> newest_checkpoint(const std::string& out_dir) {
  std::optional<int64_t> newest;
  std::error_code none;
  for (const auto& entry : std::filesystem::directory_iterator(out_dir, none)) {
    const std::string name = entry.path().filename();
    if (!name.starts_with("step-") || name.size() < 6 || name.find_first_not_of("0123456789", 5) != std::string::npos)
      continue;
    if (std::filesystem::exists(entry.path() / "trainer.json"))
      newest = std::max<int64_t>(newest.value_or(0), std::stoll(name.substr(5)));
  }
  return newest;
}

// The sequence length that a checkpoint of ours was trained with: positions beyond it have learnt nothing. None: not
// ours.
inline std::optional<int64_t> trained_seq_len(const std::string& checkpoint) {
  const std::string file = checkpoint + "/trainer.json";
  if (!std::filesystem::exists(file)) return std::nullopt;
  const nlohmann::json json = nlohmann::json::parse(read_text(file), nullptr, false);
  const nlohmann::json length = json.is_object() ? json.value("seq_len", nlohmann::json()) : nlohmann::json();
  CHECK(length.is_number_integer() && length > 0,
        "{}: \"seq_len\" is {}, expected a positive whole number; the checkpoint is damaged", file, length.dump());
  return length;
}

// Makes the out directory of a new run; one that holds anything is refused, so that nothing is lost.
inline void claim_out_dir(const std::string& out_dir) {
  std::error_code error;
  std::filesystem::create_directories(out_dir, error);
  CHECK(!error && std::filesystem::is_directory(out_dir), "--out-dir {}: cannot make this directory: {}", out_dir,
        error ? error.message() : "a file has this name");
  bool used = false;  // by anything but a run that was refused before its first step
  for (const auto& entry : std::filesystem::directory_iterator(out_dir))
    used |= entry.path().filename() != "metrics.jsonl" || !entry.is_regular_file() || entry.file_size() > 0;
  if (!used) return;
  const std::optional<int64_t> newest = newest_checkpoint(out_dir);
  throw Error(formatted(
      "--out-dir {} is not empty, and this version does not resume runs: choose another directory, or remove it "
      "first{}",
      out_dir,
      newest
          ? formatted("; --model {} starts from the weights of its last checkpoint", checkpoint_path(out_dir, *newest))
          : std::string()));
}

// Writes the checkpoint of `step` and returns its path. `trainer`: what trainer.json says.
inline std::string write_checkpoint(const std::string& out_dir, int64_t step, const ModelConfig& config,
                                    const StateTable& table, DType dtype, const nlohmann::ordered_json& trainer,
                                    Stream& stream) {
  stream.synchronize();
  const std::string path = checkpoint_path(out_dir, step),
                    temporary = formatted("{}/.tmp-step-{:06}-{}", out_dir, step, getpid());
  try {
    CHECK(!std::filesystem::exists(path), "{} exists already: remove it, or choose another --out-dir", path);
    std::error_code error;
    std::filesystem::create_directory(temporary, error);
    CHECK(!error, "cannot make {}: {}", temporary, error.message());
    write_text_durably(temporary + "/config.json", config_to_hf(config, dtype).dump(2) + "\n");
    const std::vector<HfTensor> tensors = hf_tensors(config);
    const std::map<std::string, Tensor> weights = tensors_of_kind(table, StateKind::weight);
    std::vector<TensorInfo> infos;
    for (const HfTensor& t : tensors) infos.push_back({t.name, dtype, t.shape});
    SafetensorsWriter file(temporary + "/model.safetensors", infos);
    for (const HfTensor& t : tensors) {  // one tensor in host memory at a time
      const std::vector<std::byte> bytes = gather_hf(t, weights);
      file.write(bytes.data(), static_cast<int64_t>(bytes.size()));
    }
    file.finish();
    write_text_durably(temporary + "/trainer.json", trainer.dump(2) + "\n");
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

}  // namespace llmc
