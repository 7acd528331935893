// checkpoint_write.h: all ranks write a checkpoint (checkpoint.h) together. Each rank writes its share of the weights,
// which are gathered tensor by tensor, and the optimizer slices that it owns; rank 0 also writes the rest and renames.
// Ranks fail together, and can try again.
//
//   capture   all ranks: gathers this rank's tensors, and writes them, or copies them to memory, from which a thread
//             writes them; with too little memory for all of them, a part at a time
//   publish   all ranks: are all files there? then rank 0 writes the manifest and renames
//
// Nothing half-written is ever read (contract 13): files are written to OUT/.tmp-*, which the next start removes
// (run_dir.h); RecordedFile::finish() syncs each of them to the disk before the manifest is written.
#pragma once
#include "core/clock.h"
#include "core/log.h"
#include "run/checkpoints/background_copies.h"
#include "run/checkpoints/checkpoint.h"
#include "run/checkpoints/checkpoint_share.h"

namespace llmc {

namespace detail {

// The ranks that hold parts of a unit, boxes or some of the experts, and their parameters by name: there may be
// thousands.
class Holders {
 public:
  // units: what each rank of the group has. weights: what this one has, in host memory. writer: the rank that writes
  Holders(Comm& group, int writer, DType dtype, std::vector<UnitSpec> units, const StateTable& weights)
      : group_(group), writer_(writer), dtype_(dtype), units_(std::move(units)), params_(units_.size()) {
    for (const StateEntry& e : weights)
      if (e.param->first_copy) mine_.emplace(e.param->name, e);
    for (size_t rank = 0; rank < units_.size(); ++rank)
      for (const ParamSpec& p : units_[rank].params)
        if (p.first_copy) params_[rank].emplace(p.name, &p);
  }

  // Calls use(bytes) with a Hugging Face tensor (gather_hf()), on the writer.
  template <class Use>
  void gather(std::vector<std::byte>& room, const HfTensor& hf, Use&& use) const {
    StateTable weights;
    std::string sent;
    for (const std::string& part : hf.parts)
      if (const auto entry = mine_.find(part); entry != mine_.end()) weights.push_back(entry->second);
    if (group_.rank() != writer_)
      for (const StateEntry& e : weights)
        sent.append(reinterpret_cast<const char*>(e.tensor.bytes), static_cast<size_t>(e.tensor.size_bytes()));
    std::vector<std::string> texts = group_.gather_text(writer_, hf.name, sent);
    if (group_.rank() != writer_) return;
    for (size_t rank = 0; rank < texts.size(); ++rank) {
      if (static_cast<int>(rank) == writer_) continue;
      const Tensor theirs{.name = hf.name.c_str(),
                          .dtype = dtype_,
                          .shape = {std::ssize(texts[rank]) / size_of(dtype_)},
                          .bytes = reinterpret_cast<std::byte*>(texts[rank].data())};
      int64_t at = 0;
      for (const std::string& part : hf.parts)
        if (const auto p = params_[rank].find(part); p != params_[rank].end()) {
          const int64_t n = p->second->box().numel();
          weights.push_back({p->second, StateKind::weight, 0, theirs.slice(at, {n})});
          at += n;
        }
      CHECK(at == theirs.numel(), "{}: rank {} of the group {} sent {} elements, expected {}", hf.name, rank,
            group_.name(), theirs.numel(), at);
    }
    use(gather_hf(room, hf, weights));
  }

 private:
  Comm& group_;
  int writer_;
  DType dtype_;
  std::vector<UnitSpec> units_;
  std::map<std::string, StateEntry> mine_;
  std::vector<std::map<std::string, const ParamSpec*>> params_;  // of each rank
};

// A file of tensors, which come one after the other, in any number of pieces.
class TensorFile {
 public:
  // name: in the directory
  TensorFile(std::string directory, std::string name, std::vector<TensorInfo> tensors)
      : directory_(std::move(directory)), name_(std::move(name)), tensors_(std::move(tensors)) {
    for (const TensorInfo& t : tensors_) bytes_ += t.bytes();
  }
  int64_t bytes() const { return bytes_; }
  const TensorInfo& next() { return tensors_[taken_++]; }  // the tensor that comes next

  void open() { writer_.emplace(directory_ + "/" + name_, tensors_); }
  // A piece of the tensor, in host memory.
  void write(const TensorInfo& t, const std::byte* bytes, int64_t n) {
    const Tensor piece{.dtype = t.dtype, .shape = {n / size_of(t.dtype)}, .bytes = const_cast<std::byte*>(bytes)};
    if (!all_finite(piece))
      throw Error(formatted("{} contains a non-finite number: the step diverged in its update; lower --lr, clip "
                            "gradients (--grad-clip) or raise --adam-eps",
                            t.name),
                  ExitStatus::diverged);
    writer_->write(bytes, n);
  }
  // Returns the name of the file and its record.
  std::pair<std::string, nlohmann::ordered_json> finish() { return {name_, writer_->finish().to_json()}; }

 private:
  std::string directory_, name_;
  std::vector<TensorInfo> tensors_;
  int64_t bytes_ = 0;
  size_t taken_ = 0;
  std::optional<SafetensorsWriter> writer_;
};

}  // namespace detail

// Thrown by all ranks if one of them could not write its part of a checkpoint. Earlier checkpoints are untouched. The
// step may be retried, for example after a full disk, unless the status is `diverged`: a number is not finite.
class CheckpointError : public Error {
 public:
  using Error::Error;
};

// A checkpoint of which each process has a directory of its own, on its node's disk (local_parts.h): what its ranks
// write, and what rank 0 writes besides.
struct OwnPart {
  std::string name;              // of this process's part
  bool first = false;            // among the ranks of its process: makes the directory
  int64_t bytes = 0;             // of the part, about
  nlohmann::ordered_json facts;  // of the manifest
};

// What a checkpoint has besides weights and optimizer state.
struct CheckpointContents {
  nlohmann::ordered_json trainer = {};           // of trainer.json
  std::map<std::string, std::string> more = {};  // names and contents of further files, such as the tokenizer's
  std::function<void()> before_visible = {};     // called on rank 0 before the rename
  Part part = Part::all;            // model: without the optimizer's slices, under a name that no run resumes from
  std::optional<OwnPart> own = {};  // none: all ranks write to one directory
};

// Where a rank copies what it writes, to write it while training goes on.
struct CopyMemory {
  std::span<std::byte> bytes = {};  // none: it is written before training goes on
  Stream* stream = nullptr;         // of a GPU, for the copies
};

// How long it took to write a checkpoint.
struct WriteTimes {
  double seconds = 0;          // of the rank that took longest
  double cpu_seconds = 0;      // of the threads in the background, all together
  std::string no_thread = {};  // why a rank got no thread for it, and wrote before training went on; empty: all got one
};

// A checkpoint of `step` that is being written. All ranks construct it together, and call publish() together.
class CheckpointWrite {
 public:
  CheckpointWrite(const std::string& out_dir, int64_t step, const ModelConfig& config, ModelState& state,
                  Stream& stream, CheckpointContents contents = {}, const CopyMemory& memory = {})
      : out_dir_(out_dir),
        path_(contents.own                 ? out_dir + "/" + contents.own->name
              : contents.part == Part::all ? checkpoint_path(out_dir, step)
                                           : formatted("{}/weights-only-step-{:06}", out_dir, step)),
        temporary_(contents.own ? out_dir + "/.tmp-" + contents.own->name
                                : formatted("{}/.tmp-step-{:06}", out_dir, step)),
        step_(step),
        config_(config),
        precision_(state.precision()),
        dtype_(precision_.weights),
        contents_(std::move(contents)),
        groups_(state.groups()),
        leads_(contents_.own ? contents_.own->first : groups_.first()),
        plan_(config, state),
        copy_stream_(memory.stream) {
    const auto begin = Clock::now();
    stream.synchronize();
    CHECK(contents_.part == Part::model || !path_exists(path_),
          "{} already exists: remove it, or choose another --out-dir", path_);
    fault_.attempt([&] {
      if (leads_) make_directory(state);
    });
    agree();
    if (std::ssize(memory.bytes) >= BackgroundCopies::alignment) try {
        copies_.emplace(memory.bytes);
      } catch (const std::system_error& error) {  // it is written before training goes on
        no_thread_ = error.code().message();
      }
    capture_weights("", state, stream);
    capture_slices(state, stream);
    if (has_averages()) {
      state.exchange_averages(stream);
      capture_weights(averages_folder, state, stream);
      state.exchange_averages(stream);
    }
    if (leads_) write_texts();
    if (copies_) copies_->end();
    else seconds_ = seconds_since(begin);
  }

  int64_t step() const { return step_; }
  int64_t bytes() const { return bytes_; }  // that this rank writes
  // Whether publish() would not wait for this rank.
  bool written() const { return !copies_ || copies_->done(); }

  // Once the files of all ranks are there, makes them the checkpoint, and returns its path. Throws CheckpointError.
  std::string publish() {
    if (copies_) copies_->wait();
    if (fault_.text.empty()) fault_ = writing_;
    agree();
    const std::vector<std::string> all = groups_[GroupName::control].all_gather_text(
        "checkpoint files", nlohmann::ordered_json{{"files", records_},
                                                   {"seconds", copies_ ? copies_->seconds() : seconds_},
                                                   {"cpu_seconds", copies_ ? copies_->cpu_seconds() : 0},
                                                   {"no_thread", no_thread_}}
                                .dump());
    std::map<std::string, nlohmann::ordered_json> files;
    fault_.attempt([&] {
      for (const std::string& text : all) {
        const nlohmann::ordered_json rank = parse_json<nlohmann::ordered_json>(text, "a rank's list of files");
        if (leads_)
          for (const auto& [name, record] : rank["files"].items()) files[name] = record;
        times_.seconds = std::max<double>(times_.seconds, rank["seconds"]);
        times_.cpu_seconds += rank["cpu_seconds"].get<double>();
        if (times_.no_thread.empty()) times_.no_thread = rank["no_thread"];
      }
      if (leads_) make_visible(files);
    });
    agree();
    return path_;
  }
  const WriteTimes& times() const { return times_; }  // once it is published

 private:
  void agree() {
    Comm& control = groups_[GroupName::control];
    const std::vector<std::string> all =
        control.all_gather_text("checkpoint faults", nlohmann::json{fault_.text, fault_.status}.dump());
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
    if (leads_) std::filesystem::remove_all(temporary_, ignored);
    if (contents_.own && visible_) std::filesystem::remove_all(path_, ignored);  // others have no part of it
    control.barrier();  // a rank that throws ends the others, even before they have removed it
    throw CheckpointError(first, status);
  }

  void make_directory(const ModelState& state) {
    std::error_code error;
    if (contents_.part == Part::model) std::filesystem::remove_all(path_, error);  // left by an earlier attempt
    if (contents_.own) std::filesystem::create_directories(out_dir_, error);       // somebody may have deleted it
    detail::require_space(out_dir_, contents_.own ? contents_.own->bytes
                                    : contents_.part == Part::all
                                        ? checkpoint_bytes(config_, precision_, state.zero_config())
                                        : weights_bytes(config_, dtype_));
    std::filesystem::remove_all(temporary_, error);
    if (!error) std::filesystem::create_directory(temporary_, error);  // but not OUT: it would have no lock
    if (!error && has_averages()) std::filesystem::create_directory(temporary_ + "/" + averages_folder, error);
    CHECK(!error, "cannot create {}: {}", temporary_, error.message());
    directory_ = identity_of(temporary_);
  }
  detail::TensorFile& begin_file(const std::string& name, const std::vector<TensorInfo>& tensors) {
    files_.push_back(std::make_unique<detail::TensorFile>(temporary_, name, tensors));
    detail::TensorFile& file = *files_.back();
    bytes_ += file.bytes();
    fault_.attempt([&] { file.open(); });
    return file;
  }
  void end_file(detail::TensorFile& file) {
    write([this, &file] {
      const auto [name, record] = file.finish();
      records_[name] = record;
    });
  }
  // What rank 0 writes besides, or the first rank of each process.
  void write_texts() {
    const auto write_text = [this](const std::string& name, const std::string& text) {
      write([this, name, text] { records_[name] = write_recorded_text(temporary_ + "/" + name, text).to_json(); });
    };
    std::vector<std::string> folders = {""};
    if (has_averages()) folders.push_back(averages_folder);
    for (const std::string& folder : folders) {
      for (const auto& [name, text] : contents_.more) write_text(folder + name, text);
      write_text(folder + "config.json", config_to_hf(config_, dtype_).dump(2) + "\n");
      write_text(folder + "trainer.json", contents_.trainer.dump(2) + "\n");
      if (plan_.writers.size() > 1) write_text(folder + "model.safetensors.index.json", plan_.index(dtype_));
    }
  }
  // The next tensor of a file. copies: the stream of a GPU that holds it; null: it is in host memory
  void add(detail::TensorFile& file, const std::byte* bytes, Stream* copies = nullptr) {
    const TensorInfo& t = file.next();
    if (!fault_.text.empty()) return;
    if (!copies_) return fault_.attempt([&] { file.write(t, bytes, t.bytes()); });
    copies_->add(
        t.bytes(), [&](std::byte* to, int64_t from, int64_t n) { copy_now(to, bytes + from, n, copies); },
        [this, &file, &t](BackgroundCopies::Bytes piece) {
          writing_.attempt([&] { file.write(t, piece.data(), std::ssize(piece)); });
        });
  }
  // The same from a file of the state (--offload-dir), in pieces, so that it takes little memory.
  void add_from_file(detail::TensorFile& file, const Tensor& state) {
    const TensorInfo& t = file.next();
    if (!fault_.text.empty()) return;
    const auto read = [&](std::byte* to, int64_t from, int64_t n) {
      state.file->read(to, n, Arena::offset_of(state) + from);
    };
    if (copies_)
      return copies_->add(t.bytes(), read, [this, &file, &t](BackgroundCopies::Bytes piece) {
        writing_.attempt([&] { file.write(t, piece.data(), std::ssize(piece)); });
      });
    std::vector<std::byte> piece(static_cast<size_t>(std::min(t.bytes(), int64_t{16} << 20)));
    for (int64_t at = 0, n; at < t.bytes(); at += n) {
      n = std::min(std::ssize(piece), t.bytes() - at);
      read(piece.data(), at, n);
      fault_.attempt([&] { file.write(t, piece.data(), n); });
    }
  }
  // Now, or after what has been copied so far.
  template <class F>
  void write(F&& work) {
    if (!copies_) fault_.attempt(work);
    else if (fault_.text.empty()) copies_->then([this, work] { writing_.attempt(work); });
  }

  // Whether the averages are also a model of their own: not in a node's checkpoint, whose slices have them.
  bool has_averages() const { return precision_.averages && contents_.part == Part::all && !contents_.own; }

  // One unit is gathered, and one tensor is in host memory, at a time. folder: of the checkpoint; empty or with a slash
  void capture_weights(const std::string& folder, ModelState& state, Stream& stream) {
    std::vector<TensorInfo> mine;
    for (size_t i = 0; i < plan_.tensors.size(); ++i)
      if (plan_.writer[plan_.unit[i]] == groups_.rank())
        mine.push_back({plan_.tensors[i].name, dtype_, plan_.tensors[i].shape});
    detail::TensorFile* const file = mine.empty() ? nullptr : &begin_file(folder + plan_.file(groups_.rank()), mine);
    const ParamTable parameters = parameter_table(config_);
    std::vector<std::byte> room;  // for one tensor after the other
    for (size_t u = 0; u < state.size(); ++u)
      if (state.stage_of(u) == groups_.me.stage)
        state.weights.with_whole_unit(u, stream, [&](const UnitState& unit) {
          const bool experts = state.sharing_of(u) == Sharing::experts;
          Comm& group = experts ? groups_[GroupName::expert_control] : groups_[GroupName::tensor_control];
          const int writer = plan_.writer[u], n = group.size();
          if (writer / n != groups_.rank() / n) return;  // the ranks of either group are adjacent
          const HostView whole(unit.weights(), stream);
          std::vector<UnitSpec> units;
          for (int rank = 0; rank < n; ++rank) {
            const ParamTable all = {parameters[u]};
            units.push_back(experts ? part_of(all, groups_.layout.expert, rank)[0]
                                    : part_of(all, groups_.layout.tensor, rank)[0]);
          }
          const detail::Holders holders(group, writer % n, dtype_, std::move(units),
                                        unit.whole_weights(whole.tensor()));
          for (size_t i = 0; i < plan_.tensors.size(); ++i)
            if (plan_.unit[i] == u)
              holders.gather(room, plan_.tensors[i], [&](const std::byte* bytes) { add(*file, bytes); });
        });
    if (file != nullptr) end_file(*file);
  }

  void capture_slices(ModelState& state, Stream& stream) {
    const detail::OwnedSlices owned(state);
    if (contents_.part == Part::model || !owned.any()) return;
    std::vector<TensorInfo> slices;
    for (const StateEntry& e : owned.slices)
      slices.push_back({detail::slice_range(e).tensor_name(detail::what_of(e)),
                        e.small() ? DType::fp32 : e.tensor.dtype,
                        {e.tensor.numel()}});
    detail::TensorFile& file =
        begin_file(formatted("optimizer-{:05}-of-{:05}.safetensors", groups_.me.stage * owned.owners + owned.place + 1,
                             groups_.stages() * owned.owners),
                   slices);
    for (const StateEntry& e : owned.slices) {
      if (e.tensor.file != nullptr && !e.small()) add_from_file(file, e.tensor);
      else if (copies_ && copy_stream_ != nullptr && !e.small()) add(file, e.tensor.bytes, copy_stream_);
      else add(file, StateView(e, stream).tensor().bytes);
    }
    end_file(file);
  }

  // On the rank that leads. all: the records of all ranks' files, by name
  void make_visible(const std::map<std::string, nlohmann::ordered_json>& all) {
    CHECK(directory_ == identity_of(temporary_), "{} was moved, deleted or replaced while it was written", temporary_);
    const auto write_manifest = [this](const std::string& folder, const auto& files) {
      nlohmann::ordered_json manifest = {{"format", 1}, {"step", step_}}, records = nlohmann::ordered_json::object();
      if (contents_.own) manifest.update(contents_.own->facts);
      for (const auto& [name, record] : files) append_member(records, name, record);
      manifest["files"] = std::move(records);
      write_text_durably(temporary_ + "/" + folder + "manifest.json", manifest.dump(1) + "\n");
      fsync_directory(folder.empty() ? temporary_ : temporary_ + "/" + folder);
    };
    std::map<std::string, nlohmann::ordered_json> averages;
    for (const auto& [name, record] : all)
      if (name.starts_with(averages_folder)) averages[name.substr(averages_folder.size())] = record;
    if (!averages.empty()) write_manifest(averages_folder, averages);
    write_manifest("", all);
    if (contents_.before_visible) contents_.before_visible();
    rename_path(temporary_, path_);
    visible_ = true;
    try {
      fsync_directory(out_dir_);
    } catch (const Error&) {  // a crash could undo the rename, so undo it now
      std::error_code ignored;
      std::filesystem::rename(path_, temporary_, ignored);
      throw;
    }
  }

  const std::string out_dir_, path_, temporary_;
  const int64_t step_;
  const ModelConfig config_;
  const Precision precision_;
  const DType dtype_;
  const CheckpointContents contents_;
  Groups& groups_;
  const bool leads_;  // makes the directory
  const detail::WritePlan plan_;
  Stream* const copy_stream_;
  FileIdentity directory_;  // temporary_, on the rank that leads
  bool visible_ = false;
  int64_t bytes_ = 0;
  double seconds_ = 0;  // that writing took, if training waited for it
  std::string no_thread_;
  WriteTimes times_;
  detail::FirstFault fault_;
  // While copies_ are written, only its thread uses these.
  std::vector<std::unique_ptr<detail::TensorFile>> files_;
  nlohmann::ordered_json records_ = nlohmann::ordered_json::object();  // of the files that this rank has written
  detail::FirstFault writing_;
  std::optional<BackgroundCopies> copies_;  // last: its thread uses the others
};

}  // namespace llmc
