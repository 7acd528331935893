// average.h: --average: the mean of the weights of several models of one shape, as a new Hugging Face directory (model
// soups, Wortsman et al. 2022; checkpoints of a run, Izmailov et al. 2018). Weights are added in fp64, in the order of
// the command line, and rounded once.
#pragma once
#include <filesystem>

#include "core/signals.h"
#include "core/work_progress.h"
#include "net/meeting/secret.h"
#include "run/checkpoints/checkpoint.h"
#include "run/options/options.h"
#include "run/processes.h"
#include "text/tokenizer.h"

namespace llmc {

namespace detail {

// Calls f(type_tag<T>()) with the type of weights in a file.
template <class F>
void with_stored_type(DType dtype, F&& f) {
  if (dtype == DType::fp16) return f(type_tag<fp16>{});
  with_type(dtype, std::forward<F>(f));
}

// A model that is averaged.
struct Averaged {
  std::string directory;
  ModelConfig model;
  nlohmann::json config;  // the same in Hugging Face's words
  SafetensorsFiles files;
  std::vector<HfTensor> tensors;
  std::vector<HfPlace> places;  // of each tensor

  Averaged(const std::string& d, const Advance& checking) : directory(d) {
    if (path_exists(d + "/manifest.json"))
      if (const auto fault = checkpoint_fault(d, Part::model, {}, checking))
        throw Error(formatted("--average {}: {}", d, *fault));
    const std::string file = d + "/config.json";
    CHECK(path_exists(file), "--average {}: has no config.json: name checkpoints or Hugging Face directories", d);
    model = config_from_hf(read_json(file), file);
    files = open_all(model_files(d));
    tensors = hf_tensors(model, files);
    places = match_hf_names(files, tensors);
    if (model.tied) require_same_head(files, places[0]);
    config = config_to_hf(model, dtype(0));
  }
  DType dtype(size_t tensor) const { return places[tensor].file->info(places[tensor].name).dtype; }
};

// Rejects models that differ in anything but their weights, or in what their tokens mean.
inline void require_alike(const Averaged& a, const Averaged& b) {
  for (const auto& [field, value] : a.config.items())
    CHECK(std::ranges::find(special_tokens, field) != std::end(special_tokens) || member(b.config, field) == value,
          "--average: \"{}\" is {} in {}/config.json and {} in {}/config.json: only models that differ in nothing but "
          "weights can be averaged",
          field, value, a.directory, member(b.config, field), b.directory);
  CHECK(b.tensors.size() == a.tensors.size(),
        "--average: {} has {} tensors and {} has {}: store their experts in the same way", a.directory,
        a.tensors.size(), b.directory, b.tensors.size());
  for (size_t i = 0; i < a.tensors.size(); ++i)
    CHECK(a.dtype(i) == b.dtype(i), "--average: {} is {} in {} and {} in {}: average weights of one dtype",
          a.tensors[i].name, a.dtype(i), a.directory, b.dtype(i), b.directory);
  const std::string tokens_a = a.directory + "/tokenizer.json", tokens_b = b.directory + "/tokenizer.json";
  if (!path_exists(tokens_a) || !path_exists(tokens_b)) return;
  const nlohmann::json of_a = read_json(tokens_a), of_b = read_json(tokens_b);
  for (const char* part : {"model", "added_tokens", "normalizer", "pre_tokenizer"})
    CHECK(member(of_a, part) == member(of_b, part),
          "--average: {} and {} differ in \"{}\": the models read other tokens, and their mean would mean nothing",
          tokens_a, tokens_b, part);
}

// trainer.json of the mean: what its models were trained with; null: some are not our checkpoints, or lengths differ.
inline nlohmann::ordered_json trainer_of_average(const std::vector<Averaged>& models) {
  nlohmann::ordered_json average;
  std::vector<double> biases;
  for (const Averaged& m : models) {
    const std::string file = m.directory + "/trainer.json";
    if (!path_exists(file)) return nullptr;
    const nlohmann::json trainer = read_json(file);
    const std::vector<double> its = trainer.value("expert_biases", std::vector<double>());
    CHECK(average.is_null() || its.size() == biases.size(), "--average: {} has {} biases of experts and {} has {}",
          models[0].directory, biases.size(), m.directory, its.size());
    if (average.is_null()) biases.resize(its.size());
    else if (average["seq_len"].dump() != member(trainer, "seq_len").dump()) return nullptr;
    for (size_t i = 0; i < its.size(); ++i) biases[i] += its[i] / static_cast<double>(models.size());
    for (const char* field : {"step", "tokens_per_step", "seq_len"}) average[field] = member(trainer, field);
    average["average_of"].push_back(m.directory);
  }
  if (!biases.empty()) average["expert_biases"] = biases;
  return average;
}

// Which file has each tensor: files of at most 5 GB, as Hugging Face has them, or of one tensor.
inline std::vector<std::vector<size_t>> divide_into_files(const std::vector<TensorInfo>& tensors,
                                                          int64_t most = 5'000'000'000) {
  std::vector<std::vector<size_t>> files;
  int64_t bytes = 0;
  for (size_t i = 0; i < tensors.size(); ++i) {
    if (files.empty() || bytes + tensors[i].bytes() > most) files.emplace_back(), bytes = 0;
    files.back().push_back(i);
    bytes += tensors[i].bytes();
  }
  return files;
}

// Appends the mean of one tensor, a piece at a time. Ends if the process is asked to stop. advance: called with the
// bytes of the tensor
inline void write_mean(SafetensorsWriter& out, const TensorInfo& mean, const std::vector<Averaged>& models,
                       size_t tensor, const std::function<void(int64_t)>& advance) {
  constexpr int64_t most = 1 << 20;
  const int64_t n = mean.numel();
  const StopCondition stop(std::nullopt, Clock::now(), 0);
  for (int64_t begin = 0; begin < n; begin += most) {
    if (const std::string why = stop.reason(); !why.empty())
      throw Error(formatted("--average was stopped by {}: nothing is written", why), ExitStatus::requeue);
    const int64_t count = std::min(most, n - begin);
    advance(begin * size_of(mean.dtype));
    std::vector<double> sum(static_cast<size_t>(count));
    for (const Averaged& m : models)
      with_stored_type(m.dtype(tensor), [&]<class From>(type_tag<From>) {
        std::vector<From> piece(sum.size());
        const HfPlace& place = m.places[tensor];
        place.file->read(place.name, piece.data(), begin, count);
        for (size_t i = 0; i < sum.size(); ++i) sum[i] += static_cast<double>(static_cast<float>(piece[i]));
        CHECK(std::ranges::all_of(sum, [](double x) { return std::isfinite(x); }),
              "--average {}: tensor {} has a number that is not finite", m.directory, place.name);
      });
    with_stored_type(mean.dtype, [&]<class To>(type_tag<To>) {
      std::vector<To> rounded;
      for (const double x : sum) rounded.push_back(To(static_cast<float>(x / static_cast<double>(models.size()))));
      out.write(rounded.data(), count * static_cast<int64_t>(sizeof(To)));
    });
  }
}

// All that belongs to the mean, in an empty directory.
inline void write_average(const std::string& directory, const std::vector<Averaged>& models, const Advance& advance) {
  const Averaged& first = models[0];
  std::vector<TensorInfo> tensors;  // fp16 becomes fp32, which --model trains
  for (size_t i = 0; i < first.tensors.size(); ++i)
    tensors.push_back(
        {first.tensors[i].name, first.dtype(i) == DType::fp16 ? DType::fp32 : first.dtype(i), first.tensors[i].shape});
  nlohmann::ordered_json records, places = nlohmann::ordered_json::object();
  const std::vector<std::vector<size_t>> files = divide_into_files(tensors);
  int64_t bytes = 0, all = 0;
  for (const TensorInfo& t : tensors) all += t.bytes();
  for (size_t f = 0; f < files.size(); ++f) {
    const std::string name =
        files.size() == 1 ? "model.safetensors" : formatted("model-{:05}-of-{:05}.safetensors", f + 1, files.size());
    std::vector<TensorInfo> in_file;
    for (const size_t i : files[f]) in_file.push_back(tensors[i]), append_member(places, tensors[i].name, name);
    SafetensorsWriter out(directory + "/" + name, in_file);
    for (const size_t i : files[f]) {
      write_mean(out, tensors[i], models, i, [&](int64_t of_tensor) { advance(bytes + of_tensor, all); });
      bytes += tensors[i].bytes();
    }
    records[name] = out.finish().to_json();
  }
  const auto write_text = [&](const std::string& name, const std::string& text) {
    records[name] = write_recorded_text(directory + "/" + name, text).to_json();
  };
  if (files.size() > 1)
    write_text("model.safetensors.index.json",
               nlohmann::ordered_json{{"metadata", {{"total_size", bytes}}}, {"weight_map", places}}.dump(2) + "\n");
  write_text("config.json", config_to_hf(first.model, tensors[0].dtype).dump(2) + "\n");
  for (const char* name : tokenizer_file_names)
    for (const Averaged& m : models)
      if (const std::string file = m.directory + "/" + name; !records.contains(name) && path_exists(file))
        write_text(name, read_text(file));
  if (const nlohmann::ordered_json trainer = trainer_of_average(models); !trainer.is_null()) {
    write_text("trainer.json", trainer.dump(2) + "\n");
    write_text_durably(
        directory + "/manifest.json",
        nlohmann::ordered_json{{"format", 1}, {"step", trainer["step"]}, {"files", records}}.dump(1) + "\n");
  }
  fsync_directory(directory);
}

}  // namespace detail

// --average A,B,C --out DIR. Checks everything before it writes; DIR appears when it is complete.
inline void run_average(const Options& o) {
  Log log = make_log(o);
  WorkProgress progress(log);
  std::vector<detail::Averaged> models;
  for (const std::string& directory : split(o.average, ','))
    models.emplace_back(directory, progress.of_bytes("checking " + directory));
  CHECK(models.size() > 1, "--average {}: name at least two models", o.average);
  for (size_t i = 1; i < models.size(); ++i) detail::require_alike(models[0], models[i]);
  std::filesystem::path out = o.tokenize_out;
  if (!out.has_filename()) out = out.parent_path();  // it ended in a slash
  CHECK(!path_exists(out), "--out {} exists: name a new directory", out.string());
  const std::string parent = out.has_parent_path() ? out.parent_path().string() : ".";
  CHECK(is_directory(parent), "--out {}: there is no directory {}: make it first", out.string(), parent);
  int64_t bytes = 0;
  for (size_t i = 0; i < models[0].tensors.size(); ++i)
    bytes += TensorInfo{"", models[0].dtype(i), models[0].tensors[i].shape}.bytes();
  detail::require_space(parent, bytes);

  note_stop_signals(Says::at_once);
  const std::string temporary = formatted("{}/.tmp-{}", parent, random_token());
  std::error_code error;
  std::filesystem::create_directory(temporary, error);
  CHECK(!error, "cannot create {}: {}", temporary, error.message());
  try {
    detail::write_average(temporary, models, progress.of_bytes("averaging"));
    CHECK(!path_exists(out), "--out {} was made in the meantime: name a new directory", out.string());
    rename_path(temporary, out);
  } catch (...) {
    std::filesystem::remove_all(temporary, error);
    throw;
  }
  fsync_directory(parent);
  log.line(formatted("{}: the mean of {} models of {} parameters; use it with --model", out.string(), models.size(),
                     human_count(count_parameters(parameter_table(models[0].model)))));
}

}  // namespace llmc
