// group_table.h: the groups that every rank is in, as a table: what moves in each, on which stream, and between whom. A
// new group is a row; groups.h makes communicators and streams of the rows.
#pragma once
#include <iterator>

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
inline constexpr GroupRow group_table[] = {
    {GroupName::gradients, "gradients", Traffic::units, Lane::reduce, {Axis::shard, Axis::cp}},
    {GroupName::replicas, "replicas", Traffic::units, Lane::reduce, {Axis::replicate}},
    {GroupName::weights, "weights", Traffic::units, Lane::gather, {Axis::shard, Axis::cp}},
    {GroupName::activations, "activations", Traffic::tensors, Lane::exchange, {Axis::tp}},
    {GroupName::partial_gradients, "partial gradients", Traffic::tensors, Lane::reduce, {Axis::tp}},
    {GroupName::head_gradients, "head gradients", Traffic::tensors, Lane::reduce, {Axis::tp}, View::same_head},
    {GroupName::experts, "experts", Traffic::tensors, Lane::expert, {Axis::ep}, View::experts},
    {GroupName::expert_gradients, "expert gradients", Traffic::units, Lane::reduce, {Axis::shard}, View::experts},
    {GroupName::expert_weights, "expert weights", Traffic::units, Lane::gather, {Axis::shard}, View::experts},
    {GroupName::matrices, "matrices", Traffic::tensors, Lane::gather, of_stage, View::mesh, Needed::with_matrices},
    {GroupName::expert_matrices,
     "expert matrices",
     Traffic::tensors,
     Lane::gather,
     {Axis::replicate, Axis::shard},
     View::experts,
     Needed::with_matrices},
    {GroupName::sequences,
     "sequences",
     Traffic::numbers,
     Lane::compute,
     {Axis::cp, Axis::tp},
     View::mesh,
     Needed::with_experts},
    {GroupName::keys_values, "keys and values", Traffic::tensors, Lane::context, {Axis::cp}},
    {GroupName::tied_gradients, "tied gradients", Traffic::tensors, Lane::reduce, {Axis::pp}, View::ends},
    {GroupName::scalars, "scalars", Traffic::numbers, Lane::compute, of_all},
    {GroupName::scalar_rows, "scalars of a row", Traffic::numbers, Lane::compute, of_all, View::row,
     Needed::many_ranks},
    {GroupName::scalar_columns, "scalars of a column", Traffic::numbers, Lane::compute, of_all, View::column,
     Needed::many_ranks},
    {GroupName::stage_scalars, "scalars of a stage", Traffic::numbers, Lane::compute, of_stage, View::mesh,
     Needed::asynchronous},
    {GroupName::control, "control", Traffic::text, Lane::host, of_all},
    {GroupName::tensor_control, "tensor-parallel control", Traffic::text, Lane::host, {Axis::tp}},
    {GroupName::expert_control, "expert-parallel control", Traffic::text, Lane::host, {Axis::ep}, View::experts}};

static_assert(
    [] {
      for (size_t i = 0; i < std::size(group_table); ++i)
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
