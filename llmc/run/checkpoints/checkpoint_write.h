// checkpoint_write.h: all ranks write a checkpoint (checkpoint.h) together. Each rank writes its share of the weights,
// which are gathered tensor by tensor, and the optimizer slices that it owns; rank 0 also writes the rest and renames.
// Ranks fail together, and can try again.
//
//   capture   all ranks: gathers this rank's tensors, and writes them, or copies them to memory
//   write     each rank for itself, in the background if they were copied
//   publish   all ranks: are all files there? then rank 0 writes the manifest and renames
#pragma once
#include <algorithm>
#include <atomic>
#include <cstring>
#include <filesystem>
#include <functional>
#include <iterator>
#include <map>
#include <memory>
#include <nlohmann/json.hpp>
#include <optional>
#include <set>
#include <string>
#include <thread>
#include <utility>
#include <vector>

#include "run/checkpoints/checkpoint.h"
#include "run/options/option_values.h"

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

// A file of tensors, which come one after the other. In the background: they are copied to memory, and write() writes
// them; else each is written when it comes.
class TensorFile {
 public:
  TensorFile(std::string path, std::vector<TensorInfo> tensors, bool background)
      : path_(std::move(path)), tensors_(std::move(tensors)) {
    for (const TensorInfo& t : tensors_) bytes_ += t.bytes();
    if (background) copies_ = std::make_unique_for_overwrite<std::byte[]>(static_cast<size_t>(bytes_));
    else writer_.emplace(path_, tensors_);
  }
  int64_t bytes() const { return bytes_; }

  // The next tensor, in host memory.
  void add(const std::byte* bytes) {
    const TensorInfo& t = tensors_[added_++];
    if (writer_) return write_one(t, bytes);
    std::memcpy(copies_.get() + copied_, bytes, static_cast<size_t>(t.bytes()));
    copied_ += t.bytes();
  }
  // Returns the record of the file and its name.
  std::pair<std::string, nlohmann::ordered_json> write() {
    if (copies_) {
      writer_.emplace(path_, tensors_);
      const std::byte* from = copies_.get();
      for (const TensorInfo& t : tensors_) write_one(t, from), from += t.bytes();
      copies_ = nullptr;
    }
    return {std::filesystem::path(path_).filename(), writer_->finish().to_json()};
  }

 private:
  void write_one(const TensorInfo& t, const std::byte* bytes) {
    const Tensor tensor{.dtype = t.dtype, .shape = {t.numel()}, .bytes = const_cast<std::byte*>(bytes)};
    if (!all_finite(tensor))
      throw Error(formatted("{} contains a non-finite number: the step diverged in its update; lower --lr, clip "
                            "gradients (--grad-clip) or raise --adam-eps",
                            t.name),
                  ExitStatus::diverged);
    writer_->write(bytes, t.bytes());
  }

  std::string path_;
  std::vector<TensorInfo> tensors_;
  int64_t bytes_ = 0, copied_ = 0;
  size_t added_ = 0;
  std::unique_ptr<std::byte[]> copies_;
  std::optional<SafetensorsWriter> writer_;
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

// A checkpoint of `step` that is being written. All ranks construct it together, and call publish() together; each
// writes some of the weights and the optimizer slices that it owns, and rank 0 the rest.
class CheckpointWrite {
 public:
  CheckpointWrite(const std::string& out_dir, int64_t step, const ModelConfig& config, ModelState& state,
                  Stream& stream, CheckpointContents contents, CheckpointMode mode)
      : out_dir_(out_dir),
        path_(contents.part == Part::all ? checkpoint_path(out_dir, step) : weights_path(out_dir, step)),
        temporary_(formatted("{}/.tmp-step-{:06}", out_dir, step)),
        step_(step),
        config_(config),
        dtype_(state.precision().weights),
        contents_(std::move(contents)),
        groups_(state.groups()),
        plan_(config, state),
        background_(mode == CheckpointMode::async) {
    stream.synchronize();
    CHECK(contents_.part == Part::model || !path_exists(path_),
          "{} already exists: remove it, or choose another --out-dir", path_);
    attempt([&] {
      if (groups_.first()) make_directory(state);
    });
    agree();
    capture_weights(state, stream);
    capture_slices(state, stream);
    if (background_)
      writer_ = std::thread([this] {
        write();
        written_ = true;
      });
    else write();
  }
  CheckpointWrite(const CheckpointWrite&) = delete;
  CheckpointWrite& operator=(const CheckpointWrite&) = delete;
  ~CheckpointWrite() {
    if (writer_.joinable()) writer_.join();
  }

  int64_t step() const { return step_; }
  int64_t bytes() const { return bytes_; }  // that this rank writes
  // Whether publish() would not wait for this rank.
  bool written() const { return !background_ || written_; }

  // Once the files of all ranks are there, makes them the checkpoint, and returns its path. Throws CheckpointError.
  std::string publish() {
    if (writer_.joinable()) writer_.join();
    agree();
    const std::vector<std::string> files =
        groups_[GroupName::control].all_gather_text("checkpoint files", records_.dump());
    attempt([&] {
      if (groups_.first()) make_visible(files);
    });
    agree();
    return path_;
  }

 private:
  // A rank that cannot write still takes part in every exchange; then all ranks give up together.
  template <class F>
  void attempt(F&& work) {
    if (fault_.empty()) try {
        work();
      } catch (const Error& error) {
        fault_ = error.what(), status_ = error.status();
      }
  }
  void agree() {
    Comm& control = groups_[GroupName::control];
    const std::vector<std::string> all =
        control.all_gather_text("checkpoint faults", nlohmann::json{fault_, status_}.dump());
    std::string first;
    ExitStatus status = ExitStatus::refused;
    for (size_t rank = 0; rank < all.size() && first.empty(); ++rank) {
      const nlohmann::json theirs = parse_json(all[rank], "another rank's fault");
      if (theirs[0] == "") continue;
      first = (all.size() > 1 ? formatted("rank {}: ", rank) : "") + theirs[0].get<std::string>();
      status = theirs[1];
    }
    if (first.empty()) return;
    std::error_code ignored;
    if (groups_.first()) std::filesystem::remove_all(temporary_, ignored);
    control.barrier();  // a rank that throws ends the others, even before they have removed it
    throw CheckpointError(first, status);
  }

  void make_directory(const ModelState& state) const {
    std::error_code error;
    if (contents_.part == Part::model) std::filesystem::remove_all(path_, error);  // left by an earlier attempt
    detail::require_space(out_dir_, contents_.part == Part::all ? checkpoint_bytes(config_, dtype_, state.zero_config())
                                                                : weights_bytes(config_, dtype_));
    std::filesystem::remove_all(temporary_, error);
    if (!error) std::filesystem::create_directory(temporary_, error);  // but not OUT: it would have no lock
    CHECK(!error, "cannot create {}: {}", temporary_, error.message());
  }
  detail::TensorFile& begin_file(const std::string& name, const std::vector<TensorInfo>& tensors) {
    files_.push_back(std::make_unique<detail::TensorFile>(temporary_ + "/" + name, tensors, background_));
    bytes_ += files_.back()->bytes();
    return *files_.back();
  }

  // One unit is gathered, and one tensor is in host memory, at a time.
  void capture_weights(ModelState& state, Stream& stream) {
    std::vector<TensorInfo> mine;
    for (size_t i = 0; i < plan_.tensors.size(); ++i)
      if (plan_.writer[plan_.unit[i]] == groups_.rank())
        mine.push_back({plan_.tensors[i].name, dtype_, plan_.tensors[i].shape});
    detail::TensorFile* file = nullptr;
    attempt([&] {
      if (!mine.empty()) file = &begin_file(plan_.file(groups_.rank()), mine);
    });
    const ParamTable parameters = parameter_table(config_);
    for (size_t u = 0; u < state.size(); ++u)
      if (state.stage_of(u) == groups_.me.stage)
        state.weights.with_whole_unit(u, stream, [&](const UnitState& unit) {
          const bool experts = state.sharing_of(u) == Sharing::experts;
          Comm& group = experts ? groups_[GroupName::expert_control] : groups_[GroupName::tensor_control];
          const int writer = plan_.writer[u], n = group.size();
          if (writer / n != groups_.rank() / n) return;  // the ranks of either group are adjacent
          const HostView whole(unit.weights(), stream);
          std::vector<UnitSpec> held;
          for (int rank = 0; rank < n; ++rank) {
            const ParamTable all = {parameters[u]};
            held.push_back(experts ? part_of(all, groups_.layout.expert, rank)[0]
                                   : part_of(all, groups_.layout.tensor, rank)[0]);
          }
          for (size_t i = 0; i < plan_.tensors.size(); ++i) {
            if (plan_.unit[i] != u) continue;
            const std::vector<std::byte> bytes = detail::gather_boxes(
                plan_.tensors[i], unit.whole_weights(whole.tensor()), held, dtype_, writer % n, group);
            if (writer == groups_.rank()) attempt([&] { file->add(bytes.data()); });
          }
        });
  }

  // A rank owns slices of state that the rest of its replica does not hold, or holds and updates alike (stage 0).
  void capture_slices(ModelState& state, Stream& stream) {
    StateTable table;
    int owners = 0;  // ranks of a replica that own any slices
    const Layout& layout = groups_.layout;
    for (size_t u = 0; u < state.size(); ++u) {
      const Sharing sharing = state.sharing_of(u);
      const int shards = state.zero_config(sharing).owners();
      owners = std::max(owners, shards * (sharing == Sharing::experts ? layout.expert.ranks : layout.tensor.ranks));
      if (state.has(u) && groups_.sharers(sharing).shard < shards) state.unit(u).append_to(table);
    }
    std::erase_if(table, [](const StateEntry& e) { return e.kind == StateKind::weight || !e.param->first_copy; });
    const int place = groups_.me.shard * layout.tensor.ranks + groups_.me.tensor;  // of this rank in the replica
    attempt([&] {
      if (contents_.part == Part::model || groups_.me.replica > 0 || place >= owners) return;
      std::vector<TensorInfo> slices;
      for (const StateEntry& e : table)
        slices.push_back({detail::slice_range(e).tensor_name(detail::what_of(e)), e.tensor.dtype, {e.tensor.numel()}});
      detail::TensorFile& file = begin_file(formatted("optimizer-{:05}-of-{:05}.safetensors",
                                                      groups_.me.stage * owners + place + 1, groups_.stages() * owners),
                                            slices);
      for (const StateEntry& e : table) file.add(HostView(e.tensor, stream).tensor().bytes);
    });
  }

  // This rank's files, in this thread or in writer_.
  void write() {
    attempt([&] {
      for (const auto& file : files_) {
        const auto [name, record] = file->write();
        records_[name] = record;
      }
    });
    files_.clear();
  }

  // On rank 0. files: the records of all ranks
  void make_visible(const std::vector<std::string>& files) const {
    nlohmann::ordered_json all;
    auto record_text = [&](const std::string& name, const std::string& text) {
      all[name] = write_recorded_text(temporary_ + "/" + name, text).to_json();
    };
    for (const auto& [name, text] : contents_.more) record_text(name, text);
    record_text("config.json", config_to_hf(config_, dtype_).dump(2) + "\n");
    record_text("trainer.json", contents_.trainer.dump(2) + "\n");
    if (plan_.writers.size() > 1) record_text("model.safetensors.index.json", plan_.index(dtype_));
    for (const std::string& text : files)
      all.update(nlohmann::ordered_json(parse_json(text, "a rank's list of files")));
    write_text_durably(temporary_ + "/manifest.json",
                       nlohmann::ordered_json{{"format", 1}, {"step", step_}, {"files", all}}.dump(1) + "\n");
    fsync_directory(temporary_);
    if (contents_.before_visible) contents_.before_visible();
    std::error_code error;
    std::filesystem::rename(temporary_, path_, error);
    CHECK(!error, "cannot rename {} to {}: {}", temporary_, path_, error.message());
    try {
      fsync_directory(out_dir_);
    } catch (const Error&) {  // a crash could undo the rename, so undo it now
      std::filesystem::rename(path_, temporary_, error);
      throw;
    }
  }

  const std::string out_dir_, path_, temporary_;
  const int64_t step_;
  const ModelConfig config_;
  const DType dtype_;
  const CheckpointContents contents_;
  Groups& groups_;
  const detail::WritePlan plan_;
  const bool background_;
  // While writer_ runs, only it uses these.
  std::vector<std::unique_ptr<detail::TensorFile>> files_;
  nlohmann::ordered_json records_ = nlohmann::ordered_json::object();  // of the files that this rank has written
  std::string fault_;
  ExitStatus status_ = ExitStatus::refused;

  int64_t bytes_ = 0;
  std::atomic<bool> written_ = false;
  std::thread writer_;
};

// Writes the checkpoint of `step` and returns its path; called by all ranks.
inline std::string write_checkpoint(const std::string& out_dir, int64_t step, const ModelConfig& config,
                                    ModelState& state, Stream& stream, CheckpointContents contents = {}) {
  return CheckpointWrite(out_dir, step, config, state, stream, std::move(contents), CheckpointMode::sync).publish();
}

}  // namespace llmc
