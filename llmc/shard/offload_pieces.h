// offload_pieces.h: the pieces of units in which an update takes offloaded state, and which state of a piece is in a
// file.
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
inline std::vector<Tensor> in_file(const Units& units, const OffloadPiece& piece) {
  std::vector<Tensor> all;
  if (!units.zero_config().offload.any_in_file()) return all;
  for (const UnitState::StatePart& part : state_of(units, piece))
    if (part.what == Offloaded::moments) all.push_back(part.tensor);
  return all;
}

}  // namespace llmc
