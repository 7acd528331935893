// mesh.h: the coordinates of each rank. The ranks form a grid with named axes; a group is the ranks along some of them.
// The order of the axes matters: neighbours along the innermost axis have consecutive ranks, and so the fastest links.
#pragma once
#include "core/check.h"
#include "core/enum_names.h"

namespace llmc {

// Data parallelism is replicate x shard: the shard ranks of one replica together hold one copy of what ZeRO shards.
// ep is an axis of another view of the same ranks (ExpertParallel).
enum class Axis : uint8_t { pp, replicate, shard, cp, tp, ep };
constexpr auto names_of_values(Axis) { return std::array{"pp", "replicate", "shard", "cp", "tp", "ep"}; }

// Some of the axes.
class Axes {
 public:
  constexpr Axes(std::initializer_list<Axis> axes) {
    for (const Axis axis : axes) bits_ |= 1u << static_cast<int>(axis);
  }
  constexpr bool has(Axis axis) const { return (bits_ >> static_cast<int>(axis) & 1) != 0; }

 private:
  unsigned bits_ = 0;
};

class Mesh {
 public:
  // The axes and their sizes, from outermost to innermost; an axis that is not listed has size 1.
  explicit Mesh(std::vector<std::pair<Axis, int>> order = {}) : order_(std::move(order)) {
    for (size_t i = 0; i < order_.size(); ++i) {
      CHECK(order_[i].second >= 1, "mesh: axis {} has size {}, expected at least 1", order_[i].first, order_[i].second);
      for (size_t j = 0; j < i; ++j)
        CHECK(order_[i].first != order_[j].first, "mesh: axis {} is listed twice", order_[i].first);
    }
  }

  int size() const {
    int ranks = 1;
    for (const auto& [axis, n] : order_) ranks *= n;
    return ranks;
  }
  int size(Axis axis) const {
    for (const auto& [a, n] : order_)
      if (a == axis) return n;
    return 1;
  }

  // The coordinate of a rank along an axis.
  int coordinate(int rank, Axis axis) const {
    for (size_t i = order_.size(); i-- > 0;) {
      if (order_[i].first == axis) return rank % order_[i].second;
      rank /= order_[i].second;
    }
    return 0;
  }

  // The ranks that differ from `rank` only along these axes, `rank` included, in ascending order.
  std::vector<int> group(int rank, Axes along) const {
    std::vector<int> members = {rank};
    int stride = 1;  // between neighbours along an axis; from the innermost axis out
    for (size_t i = order_.size(); i-- > 0; stride *= order_[i].second) {
      const auto& [axis, n] = order_[i];
      if (!along.has(axis)) continue;
      const std::vector<int> inner = std::move(members);
      const int mine = coordinate(rank, axis);
      members.clear();
      for (int c = 0; c < n; ++c)
        for (const int other : inner) members.push_back(other + (c - mine) * stride);
    }
    return members;
  }

  // "stage 1, shard 0": only the axes larger than 1.
  std::string coordinates(int rank) const {
    std::string text;
    for (const auto& [axis, n] : order_)
      if (n > 1)
        text += formatted("{}{} {}", text.empty() ? "" : ", ", axis == Axis::pp ? "stage" : name_of(axis),
                          coordinate(rank, axis));
    return text;
  }

 private:
  std::vector<std::pair<Axis, int>> order_;
};

}  // namespace llmc
