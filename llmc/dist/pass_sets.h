// pass_sets.h: which sets of memory the passes of a list of actions use in turn: each pass (a chunk's work on a
// micro-batch, or on a slice of it) has some from one of its actions to another; then the next pass may have them. The
// chunks of a rank share what they use: there are as many sets as are in use at the same time.
#pragma once
#include <map>
#include <set>
#include <tuple>
#include <vector>

#include "dist/schedule.h"

namespace llmc {

class PassSets {
 public:
  PassSets() = default;  // none
  // needs(chunk): sets that one of its passes has, from its action of kind `from` to the first one of which until(kind)
  // is true. In a list without such actions, a forward-only one, all passes of a chunk have the same.
  template <class Needs, class Until>
  PassSets(const std::vector<Action>& actions, Needs&& needs, ActionKind from, Until&& until) {
    for (const Action& a : actions) turns_ = turns_ || until(a.kind);
    std::set<size_t> free;
    for (const Action& a : actions) {
      if (a.kind == from && !of_.contains(key(a))) {
        std::vector<size_t>& mine = of_[key(a)];
        for (int64_t i = needs(a.chunk); i > 0; --i) {  // always the first, so that equal lists use equal sets
          if (free.empty()) free.insert(count_++);
          mine.push_back(*free.begin());
          free.erase(free.begin());
        }
      } else if (until(a.kind)) {
        CHECK(of_.contains(key(a)), "the {} of micro-batch {} in chunk {} comes before the {}", a.kind, a.micro_batch,
              a.chunk, from);
        free.insert(of_[key(a)].begin(), of_[key(a)].end());
      }
    }
  }

  size_t count() const { return count_; }
  const std::vector<size_t>& of(int chunk, int64_t micro_batch, int slice = 0) const {
    return of_.at(key({ActionKind::forward, chunk, micro_batch, slice}));
  }

 private:
  using Key = std::tuple<int, int64_t, int>;  // chunk, micro-batch, slice
  Key key(const Action& a) const { return turns_ ? Key(a.chunk, a.micro_batch, a.slice) : Key(a.chunk, 0, 0); }

  bool turns_ = false;
  std::map<Key, std::vector<size_t>> of_;
  size_t count_ = 0;
};

}  // namespace llmc
