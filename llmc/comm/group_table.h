// group_table.h: the groups that every rank is in, as a table: what moves in each, on which stream, and between whom. A
// new group is a row; groups.h makes communicators and streams of the rows.
#pragma once
#include "comm/mesh.h"

namespace llmc {

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
  experts,    // the same in the mesh by which experts are shared (ExpertParallel), if that makes a difference
  same_head,  // those along the axes that have the same key-value head
  ends,       // the first and the last along the axes
  row,        // all ranks in rows of row_length(): this rank's row
  column      // those in the same place of each row
};

// The runs that need a group; in all others each rank is alone in it.
enum class Needed : uint8_t { always, with_experts, with_matrices, asynchronous, many_ranks };

// A ring's latency grows with its ranks. More than this many gather their scalars in two tiers: along rows of about as
// many ranks as there are rows, then along columns.
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

static_assert(
    [] {
      for (size_t i = 0; i < group_table.size(); ++i)
        if (group_table[i].id != static_cast<GroupName>(i)) return false;
      return true;
    }(),
    "the rows of the table are in the order of GroupName");

// What the group of this name moves; groups that are not in the table, such as those of the links between stages, move
// tensors.
inline Traffic traffic_of(std::string_view group) {
  for (const GroupRow& row : group_table)
    if (group == row.name) return row.traffic;
  return Traffic::tensors;
}

}  // namespace llmc
