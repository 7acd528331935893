// host_state.h: state in host memory (--offload) on its way to the device and back. The state that an update needs
// comes in pieces of a unit, into two buffers in turn, on streams of its own in either direction:
//
//   to device   piece 0 | piece 1 .......| piece 2 ............| piece 3
//   compute        `--> update 0 | update 1 ...... | update 2
//   to host                `--> piece 0 | piece 1 ......| piece 2
//
// The first pieces come while the last backward computes. A step moves, for each element that a rank updates, the bytes
// of its offloaded state to the device and, but for gradients, back. Updates work on each element alone: so the bits
// are those of a run that keeps everything on the device. What is in a file comes through host memory (file_state.h).
#pragma once
#include "shard/file_state.h"

namespace llmc {

class HostState {
 public:
  // host: has room for what passes from a file to the device; none: nothing is in a file
  HostState(Units& units, Arena& arena, Arena* host)
      : units_(units), offload_(units.zero_config().offload), files_(units) {
    if (!offload_.has_state() || offload_.updates_at_host() || units.zero_config().holds != Holds::training_state)
      return;
    int64_t largest = 0, pieces = 0;
    for (const OffloadPiece& piece : offload_pieces(units_)) {
      if (piece.range.size == 0) continue;
      ++pieces;
      int64_t bytes = 0;
      for (const UnitState::StatePart& part : offloaded(piece)) bytes += FileState::room_for(part.tensor);
      largest = std::max(largest, bytes);
    }
    if (host != nullptr) files_.take_buffers(*host);
    // A piece of the next step finds its state in host memory because its buffer is free: since the last step, all
    // others have had their turn in it.
    for (int64_t i = 0; i < std::min<int64_t>(2, pieces); ++i)
      buffers_.emplace_back(arena.alloc("offloaded state", "piece", DType::int32, {largest / size_of(DType::int32)}));
  }

  // Is there anything that an update needs?
  bool any() const { return !buffers_.empty(); }

  // change(u): changes the elements of a unit that are in reach. changed(u): all of them are. Called in the order of
  // the units, unless this rank updates nothing of one.
  template <class Change, class Changed>
  void for_each(Stream& compute, Change&& change, Changed&& changed) {
    std::vector<Piece> pieces;
    files_.flush();
    for (const OffloadPiece& piece : offload_pieces(units_)) pieces.push_back({piece});
    // Others may have read and written it on the compute stream.
    if (any() && std::exchange(settled_, false)) to_device().wait(compute.record());
    if (any() && offload_.has(Offloaded::gradients)) to_device().wait(units_.groups().reduce_stream().record());
    // What is in a file is fetched just before it is needed, since the host may have to wait for it.
    const size_t ahead = files_.any() ? 1 : 2;
    for (size_t i = 0, read = 0, fetched = 0; i < pieces.size(); ++i) {
      for (; read < std::min(i + 2, pieces.size()); ++read) pieces[read].from_file = files_.read(pieces[read]);
      for (; fetched < std::min(i + ahead, pieces.size()); ++fetched) fetch(pieces[fetched]);
      Piece& piece = pieces[i];
      UnitState& unit = units_.unit(piece.unit);
      if (piece.buffer != nullptr) {
        compute.wait(piece.buffer->ready);
        unit.attach(piece.range, piece.moved);
      }
      change(piece.unit);
      if (piece.buffer != nullptr) {
        unit.detach();
        send_back(piece, compute);
        files_.write(std::move(piece.from_file), to_host().record());
      }
      if (piece.last) changed(piece.unit);
    }
  }
  // Before anything else reads or writes what is in host memory or in a file.
  void settle(Stream& compute) {
    if (!any() || settled_) return;
    compute.wait(to_host().record());
    files_.settle(compute);
    settled_ = true;
  }

 private:
  using Buffer = FileState::Buffer;
  struct Piece : OffloadPiece {
    FileState::Piece from_file = {};
    Buffer* buffer = nullptr;  // none: nothing has to come
    UnitState::Moved moved = {};
    UnitState::Moved changed = {};  // in host memory, on the device
  };

  Stream& to_device() const { return *units_.groups().find_stream(Lane::to_device); }
  Stream& to_host() const { return *units_.groups().find_stream(Lane::to_host); }

  std::vector<UnitState::StatePart> offloaded(const OffloadPiece& piece) const {
    std::vector<UnitState::StatePart> all = state_of(units_, piece);
    std::erase_if(all, [&](const auto& part) { return !offload_.has(part.what); });
    return all;
  }

  void fetch(Piece& piece) {
    if (!any() || piece.range.size == 0) return;
    piece.buffer = &buffers_[turn_++ % buffers_.size()];
    Stream& stream = to_device();
    stream.wait(piece.buffer->free);
    if (piece.from_file.buffer != nullptr) stream.wait(piece.from_file.buffer->ready);
    int64_t at = 0;
    size_t next = 0;  // of what was in a file
    for (const auto& [state, home] : offloaded(piece)) {
      const Tensor host = offload_.in_file(state) ? piece.from_file.all[next++].second : home;
      Tensor device = host;
      device.bytes = piece.buffer->memory.bytes + at;
      at += FileState::room_for(home);
      copy_to_device(device, host, stream);
      piece.moved.emplace_back(home, device);
      if (state != Offloaded::gradients) piece.changed.emplace_back(host, device);
    }
    piece.buffer->ready = stream.record();
  }
  void send_back(const Piece& piece, Stream& compute) {
    Stream& stream = to_host();
    stream.wait(compute.record());
    for (const auto& [host, device] : piece.changed) copy_to_host(host, device, stream);
    units_.groups().hooks.released(piece.buffer->memory, stream);
    piece.buffer->free = stream.record();
  }

  Units& units_;
  Offload offload_;
  FileState files_;
  std::vector<Buffer> buffers_;
  size_t turn_ = 0;
  bool settled_ = true;
};

}  // namespace llmc
