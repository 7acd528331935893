// host_update.h: offloaded state that the processors of the host update where it is (--offload-update host;
// ZeRO-Offload, Ren et al. 2021). Instead of the state, gradients go to the host, and weights come back, by pieces of a
// unit, through two buffers each:
//
//   to host      gradients 0 | gradients 1 ..| gradients 2 .....| gradients 3
//   host update            `--> update 0 ....| update 1 ........| update 2
//   to device                                 `--> weights 0     `--> weights 1
//
// A step copies, for each element that a rank updates, its gradient to the host (4 bytes; with --offload gradients it
// is there) and its weight back (2 or 4; with --offload weights it stays). Weights that an update reads because there
// are no separate masters, or split ones, go to the host as well. So does the control of the step (ops_step.h), once.
// Moments in a file are read into host memory and written from there (FileState).
//
// Updates work on each element alone, by the ops of CPUs: on a CPU the bits are those of a run that keeps everything on
// the device. A GPU rounds elsewhere where a compiler contracts a product and a sum (contract 5). Beside a GPU the
// update is a thread of the host; as it and a GPU's stream cannot wait for each other, there the host waits for either
// (Stream::wait): so it enqueues an update before it waits for the one before.
//
// The next step begins meanwhile: the first use of a unit's weights waits for its update (wait_for()), so that updates
// go on while the units before compute. What is on the device stays as it is until it was copied, since a step begins
// the gradients of a unit after it has used its weights (GradientReducer::start()). A gather is enqueued one or two
// units ahead of its use: beside a GPU the host waits for the updates of those units as well. With several versions of
// the weights (WeightVersions), and on paper with several stages, updates end before anything else begins.
#pragma once
#include "shard/host_state.h"

namespace llmc {

class HostUpdate {
 public:
  // host: the memory that has the state; none: nothing is offloaded
  HostUpdate(Units& units, Arena* host) : units_(units), offload_(units.zero_config().offload), files_(units) {
    if (!offload_.updates_at_host() || units.zero_config().holds != Holds::training_state) return;
    const Precision& precision = units.precision();
    CHECK(offload_.has_all_of_update(precision),
          "updates in host memory: masters and averages must be there, too, and --offload is {}",
          std::string(offload_));
    CHECK(!rule_of(units.zero_config().optimizer).of_matrices, "updates in host memory: not of matrices");
    int64_t pieces = 0, largest = 0;
    for (const OffloadPiece& piece : offload_pieces(units_)) {
      pieces += piece.range.size > 0;
      largest = std::max(largest, piece.range.size);
    }
    if (pieces == 0) return;
    control_ = host->alloc(label, "update control", DType::fp64, {4});
    for (int64_t i = 0; i < std::min<int64_t>(2, pieces); ++i) {
      if (travels(Offloaded::gradients))
        gradients_.emplace_back(host->alloc(label, "gradients", precision.state, {largest}));
      if (travels(Offloaded::weights))
        weights_.emplace_back(host->alloc(label, "weights", precision.weights, {largest}));
    }
    files_.take_buffers(*host);
  }

  // Does the host update anything?
  bool any() const { return !control_.empty(); }

  // change(u, control, stream): changes the elements of a unit that are in reach, all of which are in host memory, as
  // control is; kept until all units were waited for. control: of this update, on the device; none: not an update,
  // gradients have no part in it.
  using Change = std::function<void(size_t u, const Tensor& control, Stream& stream)>;
  void begin(const Tensor& control, Stream& compute, Change change) {
    CHECK(!under_way(), "updates in host memory: one begins before all weights of the last were waited for");
    is_update_ = !control.empty();
    change_ = std::move(change);
    for (const OffloadPiece& piece : offload_pieces(units_)) {
      pieces_.push_back({piece});
      under_way_.insert(piece.unit);
    }
    read_ = enqueued_ = sent_ = 0;
    units_.lane(Lane::to_host).wait(compute.record());
    if (is_update_) copy_to_host(control_, control, units_.lane(Lane::to_host));
    if (!pieces_.empty()) fetch(pieces_[0]);
  }
  // Are there units whose weights nobody has waited for?
  bool under_way() const { return !under_way_.empty(); }
  // `stream`, the first that reads the weights of a unit after an update, waits for them; all others wait for it.
  void wait_for(size_t u, Stream& stream) {
    if (!under_way_.contains(u)) return;
    const auto of_unit = [&](const Piece& piece) { return piece.unit == u && piece.last; };
    const auto last = std::find_if(pieces_.begin(), pieces_.end(), of_unit);
    while (sent_ <= static_cast<size_t>(last - pieces_.begin())) proceed();
    if (last->range.size > 0) stream.wait(last->weights != nullptr ? last->sent : last->updated);
    under_way_.erase(u);
    if (under_way()) return;
    pieces_.clear();
    change_ = nullptr;
  }
  // Before anything else reads or writes what is in a file. For what is in host memory the streams that wait_for()
  // units have waited.
  void settle(Stream& compute) { files_.settle(compute); }

 private:
  static constexpr const char* label = "buffers of host updates";
  using Buffer = UnitBuffers::Buffer;
  struct Piece : OffloadPiece {
    FileState::Piece from_file = {};
    Buffer *gradients = nullptr, *weights = nullptr;  // none: they are in host memory
    UnitState::Moved moved = {};
    std::pair<Tensor, Tensor> changed = {};  // weights on the device, in host memory
    Event fetched = {}, updated = {}, sent = {};
  };

  bool travels(Offloaded part) const { return !offload_.has(part); }
  bool reads_weights() const { return !units_.precision().keeps_masters() || units_.precision().split_masters; }

  // Enqueues the update of one more piece, and sends the one before.
  void proceed() {
    const size_t i = enqueued_;
    if (i < pieces_.size()) {
      for (; read_ < std::min(i + 2, pieces_.size()) && is_update_; ++read_)
        pieces_[read_].from_file = files_.read(pieces_[read_]);
      ++enqueued_;
      enqueue(pieces_[i]);
    }
    if (i > 0) send(pieces_[sent_++]);
    if (i + 1 < pieces_.size()) fetch(pieces_[i + 1]);
  }
  // Begins to copy what the update of a piece reads on the device.
  void fetch(Piece& piece) {
    if (piece.range.size == 0) return;
    Stream& stream = units_.lane(Lane::to_host);
    const size_t turn = turn_++;
    for (const UnitState::StatePart& part : state_of(units_, piece)) {
      const bool gradients = part.what == Offloaded::gradients && is_update_;
      if (!(gradients || part.what == Offloaded::weights) || !travels(part.what)) continue;
      std::vector<Buffer>& buffers = gradients ? gradients_ : weights_;
      Buffer& buffer = buffers[turn % buffers.size()];
      Tensor host = part.tensor;
      host.bytes = buffer.memory.bytes;
      piece.moved.emplace_back(part.tensor, host);
      (gradients ? piece.gradients : piece.weights) = &buffer;
      if (!gradients) piece.changed = {part.tensor, host};
      if (!gradients && !reads_weights()) continue;
      stream.wait(buffer.free);
      copy_to_host(host, part.tensor, stream);
    }
    piece.fetched = stream.record();
  }
  void enqueue(Piece& piece) {
    if (piece.range.size == 0) return;
    Stream& stream = units_.lane(Lane::host_update);
    stream.wait(piece.fetched);
    if (piece.weights != nullptr && !reads_weights()) {
      stream.wait(piece.weights->free);
      units_.groups().hooks.released(piece.weights->memory, stream);
    }
    if (piece.from_file.buffer != nullptr) stream.wait(piece.from_file.buffer->ready);
    for (const auto& moved : piece.from_file.all) piece.moved.push_back(moved);
    UnitState& unit = units_.unit(piece.unit);
    unit.attach(piece.range, std::move(piece.moved));
    change_(piece.unit, control_, stream);
    unit.detach();
    if (piece.gradients != nullptr) units_.groups().hooks.released(piece.gradients->memory, stream);
    piece.updated = stream.record();
    if (piece.gradients != nullptr) piece.gradients->free = piece.updated;
    files_.write(std::move(piece.from_file), piece.updated);
    files_.flush();
  }
  void send(Piece& piece) {
    if (piece.weights == nullptr) return;
    Stream& stream = units_.lane(Lane::to_device);
    stream.wait(piece.updated);
    const auto& [device, host] = piece.changed;
    if (is_update_) copy_updated_to_device(device, host, control_, stream);
    else copy_to_device(device, host, stream);
    piece.sent = piece.weights->free = stream.record();
  }

  Units& units_;
  Offload offload_;
  FileState files_;
  Tensor control_;  // (4) fp64, of the update that is enqueued last
  std::vector<Buffer> gradients_, weights_;
  size_t turn_ = 0;
  // Of the update that began last.
  bool is_update_ = false;
  Change change_;
  std::vector<Piece> pieces_;
  size_t read_ = 0, enqueued_ = 0, sent_ = 0;  // how many pieces are
  std::set<size_t> under_way_;                 // units that nobody has waited for
};

}  // namespace llmc
