// mesh.h: the coordinates of each rank, and its groups as a table. The ranks form a grid with named axes; a group is
// the ranks along some of them. The order of the axes matters: neighbours along the innermost axis have consecutive
// ranks, and so the fastest links.
#pragma once
#include "core/check.h"

namespace llmc {

// Data parallelism is replicate x shard: the shard ranks of one replica together hold one copy of what ZeRO shards.
// ep is an axis of another view of the same ranks (expert_parallel.h).
enum class Axis : uint8_t { pp, replicate, shard, cp, tp, ep };
constexpr auto names_of_values(Axis) { return std::array{"pp", "replicate", "shard", "cp", "tp", "ep"}; }

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

// ---- The groups that every rank is in -------------------------------------------------------------------------------
// What moves in each, where, and between whom. A new group is a row; groups.h makes communicators and streams of rows.

enum class GroupName : uint8_t {
  gradients,
  replicas,
  weights,
  activations,
  partial_gradients,
  head_gradients,
  experts,
  expert_gradients,
  expert_weights,
  matrices,
  expert_matrices,
  sequences,
  keys_values,
  tied_gradients,
  scalars,
  scalar_rows,
  scalar_columns,
  stage_scalars,
  control,
  tensor_control,
  expert_control
};

// What a group moves: only text between hosts, a few numbers, tensors, or whole units of parameters.
enum class Traffic : uint8_t { text, numbers, tensors, units };

// The stream that a group's collectives are enqueued on. A lane without a stream of its own (groups.h) is the compute
// stream.
enum class Lane : uint8_t {
  compute,
  reduce,       // gradients, while the next unit computes
  gather,       // weights, before they are needed
  exchange,     // pieces of products between tensor-parallel ranks, with --tp-overlap
  context,      // keys and values, while others are used
  expert,       // rows for experts, while the shared expert computes
  to_device,    // state from the host's memory, before it is needed (--offload)
  to_host,      // and back
  from_file,    // state from a file to the host's memory (--offload-dir): a thread, also beside a GPU
  to_file,      // and back
  host_update,  // of state in the host's memory (--offload-update host): a thread, also beside a GPU
  host          // none: text between hosts
};
constexpr auto names_of_values(Lane) {
  return std::array{"compute",   "reduce",  "gather",    "exchange", "context",     "expert",
                    "to device", "to host", "from file", "to file",  "host update", "host"};
}
inline constexpr int lanes = static_cast<int>(Lane::host) + 1;

// How the members are found; in every case this rank is one of them.
enum class View : uint8_t {
  mesh,       // the ranks along the axes
  experts,    // the same in the mesh by which experts are shared (expert_parallel.h), if that makes a difference
  same_head,  // those along the axes that have the same key-value head
  ends,       // the first and the last along the axes
  row,        // all ranks in rows of row_length(): this rank's row
  column      // those in the same place of each row
};

// The runs that need a group; in all others each rank is alone in it.
enum class Needed : uint8_t { always, with_experts, with_matrices, asynchronous, many_ranks };

// A ring's latency grows with its ranks. More than this many gather their scalars and texts in two tiers: along rows of
// about as many ranks as there are rows, then along columns.
inline constexpr int most_in_one_ring = 64;
constexpr int row_length(int ranks) {
  int length = 1;
  for (int n = 2; n * n <= ranks; ++n)
    if (ranks % n == 0) length = n;
  return length;
}

struct GroupRow {
  GroupName id;
  const char* name;  // in messages, and the same on all ranks
  Traffic traffic;
  Lane lane;
  Axes axes;
  View view = View::mesh;
  Needed needed = Needed::always;
};

inline constexpr Axes of_stage = {Axis::replicate, Axis::shard, Axis::cp, Axis::tp};
inline constexpr Axes of_all = {Axis::pp, Axis::replicate, Axis::shard, Axis::cp, Axis::tp};

// All ranks join the groups in this order.
inline constexpr auto group_table = [] {
  using enum GroupName;
  using enum Traffic;
  using enum Lane;
  using enum Axis;
  return std::to_array<GroupRow>({
      {gradients, "gradients", units, reduce, {shard, cp}},
      {replicas, "replicas", units, reduce, {replicate}},
      {weights, "weights", units, gather, {shard, cp}},
      {activations, "activations", tensors, exchange, {tp}},
      {partial_gradients, "partial gradients", tensors, reduce, {tp}},
      {head_gradients, "head gradients", tensors, reduce, {tp}, View::same_head},
      {experts, "experts", tensors, expert, {ep}, View::experts},
      {expert_gradients, "expert gradients", units, reduce, {shard}, View::experts},
      {expert_weights, "expert weights", units, gather, {shard}, View::experts},
      {matrices, "matrices", tensors, gather, of_stage, View::mesh, Needed::with_matrices},
      {expert_matrices, "expert matrices", tensors, gather, {replicate, shard}, View::experts, Needed::with_matrices},
      {sequences, "sequences", numbers, compute, {cp, tp}, View::mesh, Needed::with_experts},
      {keys_values, "keys and values", tensors, context, {cp}},
      {tied_gradients, "tied gradients", tensors, reduce, {pp}, View::ends},
      {scalars, "scalars", numbers, compute, of_all},
      {scalar_rows, "scalars of a row", numbers, compute, of_all, View::row, Needed::many_ranks},
      {scalar_columns, "scalars of a column", numbers, compute, of_all, View::column, Needed::many_ranks},
      {stage_scalars, "scalars of a stage", numbers, compute, of_stage, View::mesh, Needed::asynchronous},
      {control, "control", text, host, of_all},
      {tensor_control, "tensor-parallel control", text, host, {tp}},
      {expert_control, "expert-parallel control", text, host, {ep}, View::experts},
  });
}();

static_assert(std::ranges::adjacent_find(group_table, std::ranges::greater_equal{}, &GroupRow::id) ==
                      group_table.end() &&
                  group_table.size() == static_cast<size_t>(GroupName::expert_control) + 1,
              "the rows of the table are in the order of GroupName");

// What the group of this name moves; groups that are not in the table, such as those of the links between stages, move
// tensors.
inline Traffic traffic_of(std::string_view group) {
  for (const GroupRow& row : group_table)
    if (group == row.name) return row.traffic;
  return Traffic::tensors;
}

}  // namespace llmc
