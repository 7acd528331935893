// pass_sets.h: which sets of memory the passes of a list of actions use in turn: each pass (a chunk's work on a
// micro-batch, or on a slice of it) holds some sets from one of its actions to another; then the next pass may use
// them. The chunks of a rank share the sets: there are only as many of each kind as are in use at the same time.
#pragma once
#include "schedule/actions.h"

namespace llmc {

class PassSets {
 public:
  PassSets() = default;  // none
  // needs(chunk): the kinds (vector<K>) of the sets that a pass of the chunk holds, from its action of kind `from` to
  // its first with until(kind). In a list without such actions, all passes of a chunk use the same sets.
  template <class Needs, class Until>
  PassSets(const std::vector<Action>& actions, Needs&& needs, ActionKind from, Until&& until) {
    bool turns = false;
    std::vector<std::vector<int>> kinds_needed;  // by place of the chunk
    for (const Action& a : actions) {
      turns = turns || until(a.kind);
      micro_batches_ = std::max(micro_batches_, a.micro_batch + 1);
      slices_ = std::max<int64_t>(slices_, a.slice + 1);
      if (a.kind != from) continue;
      if (place_of_chunk_.size() <= static_cast<size_t>(a.chunk))
        place_of_chunk_.resize(static_cast<size_t>(a.chunk) + 1, none);
      size_t& place = place_of_chunk_[static_cast<size_t>(a.chunk)];
      if (place != none) continue;
      place = kinds_needed.size();
      std::vector<int>& kinds = kinds_needed.emplace_back();
      for (const auto kind : needs(a.chunk)) kinds.push_back(static_cast<int>(kind));
    }
    if (!turns) micro_batches_ = slices_ = 1;
    held_.resize(kinds_needed.size() * static_cast<size_t>(micro_batches_ * slices_));
    std::map<int, std::set<size_t>> free;  // by kind
    for (const Action& a : actions) {
      if (a.kind != from && !until(a.kind)) continue;
      const size_t i = index_of(a.chunk, a.micro_batch, a.slice);
      if (a.kind == from && !held_[i].begun) {
        const std::vector<int>& kinds = kinds_needed[place_of_chunk_[static_cast<size_t>(a.chunk)]];
        held_[i] = {true, sets_.size(), kinds.size()};
        for (const int kind : kinds) {  // takes the lowest free set, so that equal lists use equal sets
          auto& sets = free[kind];
          if (sets.empty()) {
            sets.insert(kinds_.size());
            kinds_.push_back(kind);
          }
          sets_.push_back(sets.extract(sets.begin()).value());
        }
      } else if (until(a.kind)) {
        CHECK(i != none && held_[i].begun, "the {} of micro-batch {} in chunk {} comes before the {}", a.kind,
              a.micro_batch, a.chunk, from);
        for (const size_t set : sets_of(held_[i])) free[kinds_[set]].insert(set);
      }
    }
  }

  size_t count() const { return kinds_.size(); }
  template <class K = int>
  K kind_of(size_t set) const {
    return static_cast<K>(kinds_[set]);
  }
  // The sets of a pass, in the order of needs().
  std::span<const size_t> of(int chunk, int64_t micro_batch, int slice = 0) const {
    const size_t i = index_of(chunk, micro_batch, slice);
    CHECK(i != none && held_[i].begun);
    return sets_of(held_[i]);
  }

 private:
  static constexpr size_t none = static_cast<size_t>(-1);
  struct Held {
    bool begun = false;
    size_t first = 0, count = 0;  // in sets_
  };
  // The index of a pass in held_; none: it never holds sets.
  size_t index_of(int chunk, int64_t micro_batch, int slice) const {
    const auto c = static_cast<size_t>(chunk);
    if (c >= place_of_chunk_.size() || place_of_chunk_[c] == none) return none;
    if (micro_batches_ == 1 && slices_ == 1) return place_of_chunk_[c];
    if (micro_batch >= micro_batches_ || slice >= slices_) return none;
    return (place_of_chunk_[c] * static_cast<size_t>(micro_batches_) + static_cast<size_t>(micro_batch)) *
               static_cast<size_t>(slices_) +
           static_cast<size_t>(slice);
  }
  std::span<const size_t> sets_of(const Held& held) const { return std::span(sets_).subspan(held.first, held.count); }

  int64_t micro_batches_ = 1, slices_ = 1;  // that passes differ by; 1: all passes of a chunk use the same sets
  std::vector<size_t> place_of_chunk_;      // among those of the list
  std::vector<Held> held_;                  // by place, micro-batch and slice
  std::vector<size_t> sets_;                // of all passes
  std::vector<int> kinds_;                  // the kind of each set
};

}  // namespace llmc
