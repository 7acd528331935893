// checkpoint.h: checkpoints as Hugging Face directories, complete or absent (contract 13). OUT/step-000500/ holds
// config.json and model.safetensors as transformers loads them, optimizer-*.safetensors with slices of master weights
// and optimizer slots, trainer.json, the tokenizer's files, and manifest.json with the size and checksums of each. With
// --ema the folder ema/ has the averaged weights, as a model with a manifest of its own. All is written to a temporary
// directory, with every write, fsync and close checked. A rename makes the checkpoint visible; then the parent
// directory is synced. Any layout reads what any other wrote, bit for bit (contract 6).
#pragma once

#include "core/checksum.h"
#include "core/log.h"
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

// The folder of a checkpoint with the moving average of the weights.
inline const std::string averages_folder = "ema/";

// Whether this is a plain file name, so that a manifest or index cannot point outside its directory.
inline bool is_file_name(const std::string& name) {
  return !name.empty() && name.find('/') == name.npos && shown(name) == name;
}

// The manifest's record of each file; files that it does not list are not part of the checkpoint. file: for messages
inline std::map<std::string, FileRecord> records_of(const nlohmann::json& manifest, const std::string& file) {
  const nlohmann::json records = member(manifest, "files");
  CHECK(records.is_object(), "{}: \"files\" is {}, expected an object; the file is damaged", file, records);
  std::map<std::string, FileRecord> files;
  for (const auto& [name, record] : records.items()) {
    CHECK(is_file_name(name.starts_with(averages_folder) ? name.substr(averages_folder.size()) : name),
          "{} names {}, expected a file in the same directory", file, shown(name));
    files.emplace(name, FileRecord::from_json(record, formatted("{}: the record of {}", file, shown(name))));
  }
  return files;
}
inline std::map<std::string, FileRecord> read_manifest(const std::string& path) {
  const std::string file = path + "/manifest.json";
  CHECK(path_exists(file), "{} has no manifest.json", path);
  return records_of(read_json(file), file);
}

// Which part of a checkpoint to check: all of it, or only what is needed to load the model: shape and weights.
enum class Part : uint8_t { all, model };

// The first fault found in a checkpoint; none: every file of the part exists and matches its checksums, of which this
// reader computes its share.
inline std::optional<std::string> checkpoint_fault(const std::string& path, Part part = Part::all, ReadShare share = {},
                                                   const Advance& advance = {}) try {
  const std::map<std::string, FileRecord> files = read_manifest(path);
  for (const char* file : {"config.json", "trainer.json"})
    if (!files.contains(file)) return formatted("{}/manifest.json does not name {}", path, file);
  std::map<std::string, FileRecord> of_part;
  for (const auto& [name, record] : files)
    if (part == Part::all || name == "config.json" || name.starts_with("model"))
      of_part.emplace(path + "/" + name, record);
  return file_fault(of_part, share, advance);
} catch (const Error& error) {
  return error.what();
}

// How a start finds out whether a checkpoint is intact: returns its first fault, as checkpoint_fault() does.
using CheckpointCheck = std::function<std::optional<std::string>(const std::string& path, Part part)>;

inline std::optional<std::string> check_alone(const std::string& path, Part part) {
  return checkpoint_fault(path, part);
}

// The sequence length that one of our checkpoints was trained with; later positions are untrained. None: not ours.
inline std::optional<int64_t> trained_seq_len(const std::string& checkpoint) {
  const std::string file = checkpoint + "/trainer.json";
  if (!path_exists(file)) return std::nullopt;
  const nlohmann::json length = member(read_json(file), "seq_len");
  CHECK(whole_number(length).value_or(0) > 0,
        "{}: \"seq_len\" is {}, expected a positive whole number; the checkpoint is damaged", file, length);
  return whole_number(length);
}

namespace detail {

// The first error of a thread, which goes on: a rank that cannot write still takes part in every exchange.
struct FirstFault {
  std::string text;  // empty: none
  ExitStatus status = ExitStatus::refused;

  template <class F>
  void attempt(F&& work) {
    if (text.empty()) try {
        work();
      } catch (const Error& error) {
        text = error.what(), status = error.status();
      } catch (const std::exception& error) {  // memory
        text = failure_text(error);
      }
  }
};

// The elements of a parameter that a tensor of optimizer-*.safetensors holds: [begin, end) of its flat contents, or of
// some of its columns, row by row.
struct SliceRange {
  std::optional<Range> columns;  // none: all of them
  int64_t begin = 0, end = 0;

  // what: PARAMETER:KIND
  std::string tensor_name(const std::string& what) const {
    const std::string box = columns ? formatted("[:,{}:{}]", columns->begin, columns->end()) : "";
    return formatted("{}{}[{}:{}]", what, box, begin, end);
  }
};

inline int64_t row_size(const ParamSpec& p) { return p.numel() / p.shape[0]; }
inline std::string what_of(const StateEntry& e) { return formatted("{}:{}", e.param->name, e.name()); }

inline SliceRange slice_range(const StateEntry& e) {
  const Box box = e.param->box();
  const int64_t stride = row_size(*e.param), n = e.tensor.numel();
  if (box.columns == stride) return {{}, box.row * stride + e.begin, box.row * stride + e.begin + n};
  CHECK(box.rows == e.param->shape[0], "{} is divided along both axes, which checkpoints do not support",
        e.param->name);
  return {Range{box.column, box.columns}, e.begin, e.begin + n};
}

inline void require_space(const std::string& directory, int64_t bytes) {
  const std::optional<double> free = free_bytes(directory);
  CHECK(!free || *free >= static_cast<double>(bytes),  // not known: the writes will report it
        "{}: the {:.1f} MiB to save do not fit into the {:.1f} MiB that are free: make room, or see "
        "--keep-checkpoints",
        directory, static_cast<double>(bytes) / (1 << 20), *free / (1 << 20));
}

}  // namespace detail

inline int64_t weights_bytes(const ModelConfig& config, DType dtype) {
  return count_parameters(parameter_table(config)) * size_of(dtype);
}

// The size of a checkpoint on disk, to within a few kilobytes: weights in the training dtype, master weights, averages
// and the optimizer's slots.
inline int64_t checkpoint_bytes(const ModelConfig& config, const Precision& precision, const ZeroConfig& zero) {
  const int64_t masters = precision.keeps_masters() ? 1 : 0, averages = precision.averages ? 1 : 0;
  int64_t numbers = 0;
  for (const UnitSpec& unit : parameter_table(config, zero.optimizer))
    for (const ParamSpec& p : unit.params) {
      numbers += p.numel() * (masters + averages + std::ssize(rule_of(p.rule).slots));
      if (zero.muon.rows == MuonRows::normalised && rule_of(p.rule).of_matrices) numbers += p.shape[0];
    }
  return (1 + averages) * weights_bytes(config, precision.weights) + numbers * size_of(precision.state);
}

// The write speed assumed before the first checkpoint: that of a slow disk or a busy shared file system.
inline constexpr double assumed_bytes_per_second = 100e6;

inline SafetensorsFiles open_all(const std::vector<std::string>& paths) {
  SafetensorsFiles files;
  for (const std::string& path : paths) files.push_back(std::make_unique<const SafetensorsReader>(path));
  return files;
}

// The weight files of a Hugging Face directory: a single one, or those listed in its index.
inline std::vector<std::string> model_files(const std::string& directory) {
  const std::string one = directory + "/model.safetensors", index = one + ".index.json";
  if (path_exists(one) || !path_exists(index)) {  // if both exist, transformers takes the first
    CHECK(path_exists(one), "--model {}: has no model.safetensors; --from-scratch makes random weights of this shape",
          directory);
    return {one};
  }
  const nlohmann::json map = member(read_json(index), "weight_map");
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
// Everything is checked before anything changes. advance: called with the bytes of weights, of the whole model.
inline void load_weights(const std::vector<std::string>& paths, const ModelConfig& config, const ModelState& state,
                         Stream& stream, const Advance& advance = {}) {
  const SafetensorsFiles files = open_all(paths);
  const std::vector<HfTensor> tensors = hf_tensors(config, files);
  const std::vector<HfPlace> places = match_hf_names(files, tensors);
  if (config.tied) require_same_head(files, places[0]);

  state.for_each([&](size_t u) { state.unit(u).zero_all(stream); });
  stream.synchronize();
  std::map<std::string, StateTable> entries;  // by parameter: models with experts have many
  for (const StateEntry& e : state.state_table()) entries[e.param->name].push_back(e);
  int64_t all = 0, read = 0;  // bytes
  for (const HfPlace& place : places) all += place.file->info(place.name).bytes();
  for (size_t i = 0; i < tensors.size(); ++i) {
    if (advance) advance(read, all);
    read += places[i].file->info(places[i].name).bytes();
    StateTable of_parts;
    for (const std::string& part : tensors[i].parts)
      of_parts.insert(of_parts.end(), entries[part].begin(), entries[part].end());
    scatter_hf(tensors[i], *places[i].file, places[i].name, of_parts, stream);
  }
  state.begin_averages(stream);
}

inline void load_model(const std::string& directory, const ModelConfig& config, const ModelState& state, Stream& stream,
                       const Advance& advance = {}) {
  load_weights(model_files(directory), config, state, stream, advance);
}

namespace detail {

// A tensor of optimizer-*.safetensors.
struct Slice : SliceRange {
  const SafetensorsReader* file;
  std::string name;
};

// All slices, by "PARAMETER:KIND", in ascending order of columns and elements. Rejects names that
// SliceRange::tensor_name() would not produce.
inline std::map<std::string, std::vector<Slice>> find_slices(const SafetensorsFiles& files) {
  std::map<std::string, std::vector<Slice>> slices;
  for (const auto& file : files)
    for (const std::string& name : file->names()) {
      const std::string what = name.substr(0, std::min(name.find("[:,"), name.rfind('[')));
      const char* const numbers = name.c_str() + what.size();
      long long column = 0, end_column = 0, begin = 0, end = 0;
      Slice slice{{}, file.get(), name};
      if (std::sscanf(numbers, "[:,%18lld:%18lld][%18lld:%18lld]", &column, &end_column, &begin, &end) == 4)
        slice.columns = Range{column, end_column - column};
      else if (std::sscanf(numbers, "[%18lld:%18lld]", &begin, &end) != 2) begin = end = 0;
      slice.begin = begin, slice.end = end;
      CHECK(slice.begin >= 0 && slice.end - slice.begin == file->info(name).numel() && slice.begin < slice.end &&
                column >= 0 && (!slice.columns || slice.columns->size > 0) && name == slice.tensor_name(what) &&
                file->info(name).dtype == DType::fp32,
            "{}: tensor {} is not a slice PARAMETER:KIND[BEGIN:END], or [:,COLUMN:COLUMN][BEGIN:END], of fp32",
            file->path(), shown(name));
      slices[what].push_back(slice);
    }
  for (auto& [what, all] : slices)
    std::ranges::sort(all, {}, [](const Slice& s) {
      const Range columns = s.columns.value_or(Range{});
      return std::tuple(columns.begin, columns.size, s.begin);
    });
  return slices;
}

// Rejects slices of a parameter's state, given in ascending order, unless they hold every element exactly once.
inline void require_whole(const std::vector<Slice>& slices, const ParamSpec& p, const std::string& what,
                          const std::string& path) {
  const int64_t stride = row_size(p);
  int64_t column = 0;  // earlier columns are complete
  for (size_t i = 0; i < slices.size();) {
    const Slice& first = slices[i];
    CHECK(first.columns.has_value() == slices[0].columns.has_value(),
          "{}: {} has some columns, but {} has all of them; the checkpoint is damaged", first.file->path(), first.name,
          slices[0].name);
    const Range columns = first.columns.value_or(Range{0, stride});
    CHECK(columns.begin == column,
          "{}: {} begins at column {}, but the slices before it end at {}; the file is damaged", first.file->path(),
          first.name, columns.begin, column);
    column = columns.end();
    CHECK(column <= stride && (!first.columns || columns.size < stride),
          "{}: {} has columns {} to {} of {}, expected fewer; the file is damaged", first.file->path(), first.name,
          columns.begin, column, stride);
    const int64_t n = p.shape[0] * columns.size;
    int64_t at = 0;
    for (; i < slices.size() && slices[i].columns == first.columns; ++i) {
      const Slice& s = slices[i];
      CHECK(s.begin == at, "{}: {} begins at element {}, but the slice before it ends at {}; the file is damaged",
            s.file->path(), s.name, s.begin, at);
      at = s.end;
    }
    CHECK(at == n, "{}: the slices of {}{} end at element {} of {}; the checkpoint is damaged", path, what,
          first.columns ? formatted("[:,{}:{}]", columns.begin, column) : "", at, n);
  }
  CHECK(column == stride, "{}: the slices of {} end at column {} of {}; the checkpoint is damaged", path, what, column,
        stride);
}

inline bool has_kind(const std::map<std::string, std::vector<Slice>>& slices, const std::string& kind) {
  return std::ranges::any_of(slices, [&](const auto& slice) { return slice.first.ends_with(":" + kind); });
}

// Rejects slices unless they hold every element of every parameter's state exactly once, and nothing else. Averages of
// the weights may be there or not.
inline void require_whole_slices(const std::map<std::string, std::vector<Slice>>& slices, const std::string& path,
                                 const ParamTable& table, bool masters, bool row_moments) {
  const bool averages = has_kind(slices, "average");
  std::set<std::string> expected;
  for (const UnitSpec& unit : table)
    for (const ParamSpec& p : unit.params) {
      const auto require = [&](const char* kind, const ParamSpec& of) {
        const std::string what = *expected.insert(formatted("{}:{}", p.name, kind)).first;
        const auto found = slices.find(what);
        CHECK(found != slices.end(), "{}: has no {}; it was written with other options", path, what);
        require_whole(found->second, of, what, path);
      };
      if (masters) require("master", p);
      if (averages) require("average", p);
      for (const OptimizerSlot& slot : rule_of(p.rule).slots) require(slot.name, p);
      if (row_moments && rule_of(p.rule).of_matrices) require(row_moment.name, {.name = p.name, .shape = {p.shape[0]}});
    }
  for (const auto& [what, all] : slices)
    CHECK(expected.contains(what), "{}: tensor {} belongs to no state of this model; it was written with other options",
          all[0].file->path(), shown(all[0].name));
}

// Reads the elements of an entry that a slice holds into `host`, the entry's tensor in host memory.
inline void read_slice(const Slice& s, const StateEntry& entry, float* host) {
  const int64_t stride = row_size(*entry.param);
  const Range columns = s.columns.value_or(Range{0, stride});
  const Box box = entry.param->box();
  const int64_t row = s.begin / columns.size - box.row, end_row = ceil_div(s.end, columns.size) - box.row;
  const Range rows = overlap({entry.begin, entry.tensor.numel()}, {row * box.columns, (end_row - row) * box.columns});
  if (rows.size == 0) return;
  StateEntry e = entry;  // which lie in these rows
  e.begin = rows.begin;
  e.tensor = entry.tensor.slice(rows.begin - entry.begin, {rows.size});
  host += rows.begin - entry.begin;
  // Calls f(i, first, n) row by row: elements [i, i + n) of the tensor are the slice's from `first` on.
  auto for_each_common = [&](auto&& f) {
    e.for_each_row([&](int64_t i, int64_t index, int64_t n) {
      const Range both = overlap({index % stride, n}, columns);
      const int64_t in_columns = index / stride * columns.size + both.begin - columns.begin;
      const Range common = overlap({in_columns, both.size}, {s.begin, s.end - s.begin});
      if (common.size > 0)
        f(i + both.begin - index % stride + common.begin - in_columns, common.begin - s.begin, common.size);
    });
  };
  int64_t end = 0;
  for_each_common([&](int64_t, int64_t first, int64_t n) { end = first + n; });
  constexpr int64_t most = 1 << 18;
  std::vector<float> piece;  // part of the slice, from element `begin` on: no more than is needed
  int64_t begin = 0;
  for_each_common([&](int64_t i, int64_t first, int64_t n) {
    if (first + n > begin + std::ssize(piece)) {
      begin = first;
      piece.resize(static_cast<size_t>(std::min(std::max(n, most), end - first)));
      s.file->read(s.name, piece.data(), begin, std::ssize(piece));
    }
    std::copy_n(piece.data() + first - begin, n, host + i);
  });
}

}  // namespace detail

// Loads the whole state of a checkpoint, bit for bit: weights, then the optimizer's slices, whatever layout wrote them.
// written_by: its optimizer; none: the same. The slots of parameters that another one updated begin at zero, and
// averages of weights that the checkpoint does not have begin at the weights. advance: called with the bytes of
// weights, then with those of this rank's optimizer state.
inline void load_checkpoint(const std::string& path, const ModelConfig& config, const ModelState& state, Stream& stream,
                            std::optional<Optimizer> written_by = std::nullopt, const Advance& advance = {}) {
  std::vector<std::string> models, optimizers;
  for (const auto& [name, record] : read_manifest(path)) {
    if (!name.ends_with(".safetensors")) continue;
    if (name.starts_with("model")) models.push_back(path + "/" + name);
    if (name.starts_with("optimizer-")) optimizers.push_back(path + "/" + name);
  }
  CHECK(!models.empty() && !optimizers.empty(), "{}/manifest.json names no {}.safetensors", path,
        models.empty() ? "model" : "optimizer");
  load_weights(models, config, state, stream, advance);
  stream.synchronize();
  const SafetensorsFiles files = open_all(optimizers);
  const StateTable table = state.state_table();
  const std::map<std::string, std::vector<detail::Slice>> slices = detail::find_slices(files);
  const Optimizer now = state.zero_config().optimizer, then = written_by.value_or(now);
  const ParamTable written = parameter_table(config, then);
  detail::require_whole_slices(slices, path, written, state.precision().keeps_masters(),
                               (then == now && state.zero_config().muon.rows == MuonRows::normalised) ||
                                   detail::has_kind(slices, row_moment.name));
  std::map<std::string, Optimizer> rules;
  for (const UnitSpec& unit : written)
    for (const ParamSpec& p : unit.params) rules[p.name] = p.rule;
  const bool averages = detail::has_kind(slices, "average");
  StateTable stored;
  int64_t all = 0, read = 0;  // bytes
  for (const StateEntry& e : table)
    if (e.kind == StateKind::master || (e.kind == StateKind::average && averages) ||
        ((e.kind == StateKind::slot || e.kind == StateKind::row_moment) && rules.at(e.param->name) == e.param->rule))
      stored.push_back(e), all += e.tensor.numel() * size_of(DType::fp32);
  for (const StateEntry& e : stored) {
    if (advance) advance(read, all);
    write_state(e, stream, [&](const Tensor& host) {
      for (const detail::Slice& s : slices.at(detail::what_of(e))) detail::read_slice(s, e, host.data<float>());
    });
    read += e.tensor.numel() * size_of(DType::fp32);
  }
  if (!averages) state.begin_averages(stream);
}

}  // namespace llmc
