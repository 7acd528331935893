// host_state.h: state in host memory (--offload) on its way to the device and back. The state that an update needs
// comes in pieces of a unit, into two buffers in turn, on streams of its own in either direction:
//
//   to device   piece 0 | piece 1 .......| piece 2 ............| piece 3
//   compute        `--> update 0 | update 1 ...... | update 2
//   to host                `--> piece 0 | piece 1 ......| piece 2
//
// The first pieces come while the last backward computes. A step moves, for each element that a rank updates, the bytes
// of its offloaded state to the device and, but for gradients, back. Updates work on each element alone: so the bits
// are those of a run that keeps everything on the device.
#pragma once
#include <algorithm>
#include <optional>
#include <utility>
#include <vector>

#include "shard/units.h"

namespace llmc {

class HostState {
 public:
  HostState(Units& units, Arena& arena) : units_(units), offload_(units.zero_config().offload) {
    if (!offload_.has_state() || units.zero_config().holds != Holds::training_state) return;
    int64_t largest = 0, pieces = 0;
    units_.for_each([&](size_t u) {
      for_each_piece(u, [&](const Range& r) { largest = std::max(largest, bytes_of(u, r)), ++pieces; });
    });
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
    struct Piece {
      size_t unit;
      Range range;
      bool last;  // of its unit
    };
    std::vector<Piece> pieces;
    units_.for_each([&](size_t u) {
      if (any()) for_each_piece(u, [&](const Range& r) { pieces.push_back({u, r, false}); });
      if (pieces.empty() || pieces.back().unit != u) pieces.push_back({u, {}, false});
      pieces.back().last = true;
    });
    // Others may have read and written it on the compute stream.
    if (any() && std::exchange(settled_, false)) to_device().wait(compute.record());
    if (any() && offload_.has(Offloaded::gradients)) to_device().wait(units_.groups().reduce_stream().record());
    std::vector<Arrival> arriving;
    for (size_t i = 0, fetched = 0; i < pieces.size(); ++i) {
      for (; fetched < std::min(i + 2, pieces.size()); ++fetched)
        arriving.push_back(fetch(pieces[fetched].unit, pieces[fetched].range));
      UnitState& unit = units_.unit(pieces[i].unit);
      Arrival& piece = arriving[i];
      if (piece.buffer != nullptr) {
        compute.wait(piece.buffer->ready);
        unit.attach(pieces[i].range, piece.moved);
      }
      change(pieces[i].unit);
      if (piece.buffer != nullptr) {
        unit.detach();
        send_back(piece, compute);
      }
      if (pieces[i].last) changed(pieces[i].unit);
    }
  }
  // Before anything else reads or writes what is in host memory.
  void settle(Stream& compute) {
    if (!any() || settled_) return;
    compute.wait(to_host().record());
    settled_ = true;
  }

 private:
  struct Buffer {
    Tensor memory;
    Event free, ready;
    explicit Buffer(const Tensor& m) : memory(m) { free.signal(); }
  };
  struct Arrival {
    Buffer* buffer = nullptr;  // none: nothing had to come
    UnitState::Moved moved = {};
    std::vector<bool> changes = {};
  };

  Stream& to_device() const { return *units_.groups().find_stream(Lane::to_device); }
  Stream& to_host() const { return *units_.groups().find_stream(Lane::to_host); }

  template <class F>
  void for_each_piece(size_t u, F&& f) const {
    const Range all = units_.unit(u).update_range();
    for (int64_t begin = all.begin; begin < all.end(); begin += offload_.piece)
      f(Range{begin, std::min(offload_.piece, all.end() - begin)});
  }
  static int64_t room_for(const Tensor& t) { return round_up(t.size_bytes(), Arena::alignment); }
  int64_t bytes_of(size_t u, const Range& r) const {
    int64_t bytes = 0;
    for (const UnitState::AtHost& state : units_.unit(u).at_host(r)) bytes += room_for(state.tensor);
    return bytes;
  }

  Arrival fetch(size_t u, const Range& r) {
    if (r.size == 0) return {};
    Arrival piece{&buffers_[turn_++ % buffers_.size()]};
    Stream& stream = to_device();
    stream.wait(piece.buffer->free);
    int64_t at = 0;
    for (const auto& [home, changes] : units_.unit(u).at_host(r)) {
      Tensor device = home;
      device.bytes = piece.buffer->memory.bytes + at;
      at += room_for(home);
      copy_to_device(device, home, stream);
      piece.moved.emplace_back(home, device);
      piece.changes.push_back(changes);
    }
    piece.buffer->ready = stream.record();
    return piece;
  }
  void send_back(const Arrival& piece, Stream& compute) {
    Stream& stream = to_host();
    stream.wait(compute.record());
    for (size_t i = 0; i < piece.moved.size(); ++i)
      if (piece.changes[i]) copy_to_host(piece.moved[i].first, piece.moved[i].second, stream);
    units_.groups().hooks.released(piece.buffer->memory, stream);
    piece.buffer->free = stream.record();
  }

  Units& units_;
  Offload offload_;
  std::vector<Buffer> buffers_;
  size_t turn_ = 0;
  bool settled_ = true;
};

}  // namespace llmc
