// hooks.h: what a test, or --selftest, installs in a World to watch its ranks, or to break them on purpose. Production
// code calls each hook once per event, and the hooks that are installed by default do nothing.
//
// Poison fills memory that nobody may read with NaN, so that such reads show. Bugs are planted by replacing a group
// with a class derived from Comm whose collectives skip or change something.
#pragma once
#include "comm/comm.h"
#include "ops/ops.h"

namespace llmc {

// One object serves all ranks of a World at the same time, so its methods are const.
class Hooks {
 public:
  virtual ~Hooks() = default;
  // An arena of a rank, or the scratch of its ops, was created; nothing has been allocated from it yet.
  virtual void arena_created(Arena&) const {}
  // From this point of the stream on, nobody may read `memory` until it is written again.
  virtual void released(const Tensor& memory, Stream&) const { (void)memory; }
  // The same for all of a unit's buffer except `kept`.
  void released_except(const Tensor& unit, const Range& kept, Stream& stream) const {
    released(unit.slice(0, {kept.begin}), stream);
    released(unit.slice(kept.end(), {unit.numel() - kept.end()}), stream);
  }
  // A rank is about to iterate a matrix (Muon): the rows of this parameter from `row` on, or all of them.
  virtual void iterated(const std::string& parameter, int64_t row) const { (void)parameter, (void)row; }
  // A rank has joined this group; the returned group takes its place.
  virtual std::unique_ptr<Comm> joined(std::unique_ptr<Comm> group) const { return group; }
};

// Fills free and released memory with bytes that are a NaN in every floating-point dtype.
class Poison : public Hooks {
 public:
  void arena_created(Arena& arena) const override { arena.poison_free(); }
  void released(const Tensor& memory, Stream& stream) const override { poison(memory, stream); }
};

inline const Hooks no_hooks{};
inline const Poison poison_hooks{};

}  // namespace llmc
