// host_state.h: state in host memory (--offload) on its way to the device and back. The state that an update needs
// comes in pieces of a unit, into two buffers in turn, on streams of its own in either direction:
//
//   to device   piece 0 | piece 1 .......| piece 2 ............| piece 3
//   compute        `--> update 0 | update 1 ...... | update 2
//   to host                `--> piece 0 | piece 1 ......| piece 2
//
// The first pieces come while the last backward computes. A step moves, for each element that a rank updates, the bytes
// of its offloaded state to the device and, but for gradients, back. Updates work on each element alone: so the bits
// are those of a run that keeps everything on the device. What is in a file comes through host memory (FileState).
#pragma once
#include "shard/units.h"

namespace llmc {

// Some elements of a unit that this rank updates; none: it updates nothing of the unit, or nothing is offloaded.
struct OffloadPiece {
  size_t unit;
  Range range = {};
  bool last = false;  // of its unit
};

// In the order of the units; of each at least one.
inline std::vector<OffloadPiece> offload_pieces(const Units& units) {
  const Offload& offload = units.zero_config().offload;
  std::vector<OffloadPiece> pieces;
  units.for_each([&](size_t u) {
    const Range all = offload.has_state() ? units.unit(u).update_range() : Range{};
    for (int64_t begin = all.begin; begin < all.end(); begin += offload.piece)
      pieces.push_back({u, {begin, std::min(offload.piece, all.end() - begin)}});
    if (all.size == 0) pieces.push_back({u});
    pieces.back().last = true;
  });
  return pieces;
}

inline std::vector<UnitState::StatePart> state_of(const Units& units, const OffloadPiece& piece) {
  return piece.range.size > 0 ? units.unit(piece.unit).state_of(piece.range) : std::vector<UnitState::StatePart>();
}

// The name of transfers between files and memory, in plans and traces.
inline constexpr const char* file_transfers = "files";

// State in a file (--offload-dir) on its way to host memory and back. Buffers take turns by piece of a unit, and each
// of two threads works on one of them while an update changes what was in a third:
//
//   from file   piece 0 | piece 1 | piece 2 ............| piece 3 ...
//   to device         `--> piece 0 | piece 1 ........| piece 2
//   compute                    `--> update 0 | update 1 ...| update 2
//   to host                              `--> piece 0 | piece 1
//   to file                                       `--> piece 0 | piece 1 ...
//
// An update reads the moments that a rank has for its elements from the file once, and writes them once. The threads
// are the same beside a GPU, where pieces are pinned memory. As a thread and a GPU's stream cannot wait for each other,
// there the host waits for either (Stream::wait): so what waits is enqueued as late as it may be, a piece's write after
// the next piece's update.
class FileState {
 public:
  FileState(const Units& units) : units_(units) {}
  void take_buffers(Arena& host) {
    int64_t pieces = 0, largest = 0;
    for (const OffloadPiece& piece : offload_pieces(units_)) {
      pieces += piece.range.size > 0;
      int64_t bytes = 0;
      for (const Tensor& t : in_file(piece)) bytes += room_for(t);
      largest = std::max(largest, bytes);
    }
    if (largest == 0) return;
    for (int64_t i = 0; i < std::min<int64_t>(3, pieces); ++i)
      buffers_.emplace_back(host.alloc("buffers of files", "piece", DType::int32, {largest / size_of(DType::int32)}));
  }
  bool any() const { return !buffers_.empty(); }
  static int64_t room_for(const Tensor& t) { return round_up(t.size_bytes(), Arena::alignment); }

  using Buffer = UnitBuffers::Buffer;
  // Some of the state of a piece, in a buffer.
  struct Piece {
    Buffer* buffer = nullptr;                    // none: no part of the piece is in a file
    std::vector<std::pair<Tensor, Tensor>> all;  // in the file, in the buffer
  };
  // Begins to read. A piece of the next step finds what this one has written because its buffer is free: all others
  // have had their turn since, and writes are done in their order.
  Piece read(const OffloadPiece& what) {
    const std::vector<Tensor> homes = in_file(what);
    if (homes.empty()) return {};
    Piece piece{&buffers_[turn_++ % buffers_.size()], {}};
    Stream& stream = units_.lane(Lane::from_file);
    stream.wait(piece.buffer->free);
    int64_t at = 0;
    for (const Tensor& home : homes) {
      Tensor here = home;
      here.bytes = piece.buffer->memory.bytes + at;
      here.file = nullptr;
      at += room_for(home);
      const auto bytes = static_cast<double>(home.size_bytes());
      stream.run({.name = "read_file", .bytes = bytes, .group = file_transfers, .file = {.read = bytes}}, {here},
                 [home, here] { home.file->read(here.bytes, here.size_bytes(), Arena::offset_of(home)); });
      piece.all.emplace_back(home, here);
    }
    piece.buffer->ready = stream.record();
    return piece;
  }
  // Writes a piece once this event has come. Until the next call, or flush(), it is only remembered.
  void write(Piece piece, const Event& changed) {
    flush();
    if (piece.buffer != nullptr) unwritten_.emplace(std::move(piece), changed);
  }
  void flush() {
    if (!unwritten_) return;
    const auto [piece, changed] = std::move(*std::exchange(unwritten_, std::nullopt));
    Stream& stream = units_.lane(Lane::to_file);
    stream.wait(changed);
    for (const auto& [home, here] : piece.all) {
      const auto bytes = static_cast<double>(home.size_bytes());
      stream.run({.name = "write_file", .bytes = bytes, .group = file_transfers, .file = {.written = bytes}}, {},
                 [home, here] { home.file->write(here.bytes, here.size_bytes(), Arena::offset_of(home)); });
    }
    units_.groups().hooks.released(piece.buffer->memory, stream);
    piece.buffer->free = stream.record();
  }
  // Before anything else reads or writes the file.
  void settle(Stream& compute) {
    if (!any()) return;
    flush();
    compute.wait(units_.lane(Lane::to_file).record());
  }

 private:
  std::vector<Tensor> in_file(const OffloadPiece& piece) const {
    std::vector<Tensor> all;
    if (!units_.zero_config().offload.any_in_file()) return all;
    for (const UnitState::StatePart& part : state_of(units_, piece))
      if (part.what == Offloaded::moments) all.push_back(part.tensor);
    return all;
  }

  const Units& units_;
  std::vector<Buffer> buffers_;
  size_t turn_ = 0;
  std::optional<std::pair<Piece, Event>> unwritten_;  // and when it has changed
};

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
    if (any() && std::exchange(settled_, false)) units_.lane(Lane::to_device).wait(compute.record());
    if (any() && offload_.has(Offloaded::gradients))
      units_.lane(Lane::to_device).wait(units_.groups().reduce_stream().record());
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
        files_.write(std::move(piece.from_file), units_.lane(Lane::to_host).record());
      }
      if (piece.last) changed(piece.unit);
    }
  }
  // Before anything else reads or writes what is in host memory or in a file.
  void settle(Stream& compute) {
    if (!any() || settled_) return;
    compute.wait(units_.lane(Lane::to_host).record());
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

  std::vector<UnitState::StatePart> offloaded(const OffloadPiece& piece) const {
    std::vector<UnitState::StatePart> all = state_of(units_, piece);
    std::erase_if(all, [&](const auto& part) { return !offload_.has(part.what); });
    return all;
  }

  void fetch(Piece& piece) {
    if (!any() || piece.range.size == 0) return;
    piece.buffer = &buffers_[turn_++ % buffers_.size()];
    Stream& stream = units_.lane(Lane::to_device);
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
    Stream& stream = units_.lane(Lane::to_host);
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
