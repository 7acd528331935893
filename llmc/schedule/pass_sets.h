// pass_sets.h: which sets of memory the passes of a list of actions use in turn: each pass (a chunk's work on a
// micro-batch, or on a slice of it) holds some sets from one of its actions to another; then the next pass may use
// them. The chunks of a rank share the sets: there are only as many of each kind as are in use at the same time.
#pragma once
#include <map>
#include <set>
#include <unordered_map>
#include <vector>

#include "schedule/actions.h"

namespace llmc {

class PassSets {
 public:
  PassSets() = default;  // none
  // needs(chunk): the kinds (vector<K>) of the sets that a pass of the chunk holds, from its action of kind `from` to
  // its first action with until(kind). In a list without such actions, a forward-only one, all passes of a chunk use
  // the same sets.
  template <class Needs, class Until>
  PassSets(const std::vector<Action>& actions, Needs&& needs, ActionKind from, Until&& until) {
    for (const Action& a : actions) turns_ = turns_ || until(a.kind);
    std::map<int, std::set<size_t>> free;  // by kind
    for (const Action& a : actions) {
      if (a.kind == from && !of_.contains(key(a))) {
        std::vector<size_t>& mine = of_[key(a)];
        for (const auto kind : needs(a.chunk)) {  // takes the lowest free set, so that equal lists use equal sets
          std::set<size_t>& sets = free[static_cast<int>(kind)];
          if (sets.empty()) {
            sets.insert(kinds_.size());
            kinds_.push_back(static_cast<int>(kind));
          }
          mine.push_back(*sets.begin());
          sets.erase(sets.begin());
        }
      } else if (until(a.kind)) {
        CHECK(of_.contains(key(a)), "the {} of micro-batch {} in chunk {} comes before the {}", a.kind, a.micro_batch,
              a.chunk, from);
        for (const size_t set : of_[key(a)]) free[kinds_[set]].insert(set);
      }
    }
  }

  size_t count() const { return kinds_.size(); }
  template <class K = int>
  K kind_of(size_t set) const {
    return static_cast<K>(kinds_[set]);
  }
  const std::vector<size_t>& of(int chunk, int64_t micro_batch, int slice = 0) const {
    return of_.at(key({ActionKind::forward, chunk, micro_batch, slice}));
  }

 private:
  struct Key {
    int chunk;
    int64_t micro_batch;
    int slice;
    bool operator==(const Key&) const = default;
  };
  struct Hash {  // lists have fewer than 2^20 micro-batches and slices
    size_t operator()(const Key& k) const {
      return static_cast<size_t>(k.micro_batch) ^ static_cast<size_t>(k.slice) << 20 ^
             static_cast<size_t>(k.chunk) << 40;
    }
  };
  Key key(const Action& a) const { return turns_ ? Key{a.chunk, a.micro_batch, a.slice} : Key{a.chunk, 0, 0}; }

  bool turns_ = false;
  std::unordered_map<Key, std::vector<size_t>, Hash> of_;
  std::vector<int> kinds_;  // the kind of each set
};

}  // namespace llmc
