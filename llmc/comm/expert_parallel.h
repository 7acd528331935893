// expert_parallel.h: which experts of a layer a rank has, and with whom it shares them (Shazeer et al. 2017; Lepikhin
// et al. 2020). Pure functions.
//
// The ranks of a stage are numbered in two ways, in the same order. A replica with --tp 2, --cp 2 and two shards:
//
//                    rank   0  1  2  3  4  5  6  7
//   dense weights   shard   0  0  0  0  1  1  1  1      --ep 4   ep   0  1  2  3  0  1  2  3
//                      cp   0  0  1  1  0  0  1  1            shard   0  0  0  0  1  1  1  1
//                      tp   0  1  0  1  0  1  0  1
//
// Experts: the E experts of a layer lie on the ranks of an ep group, E / ep consecutive ones on each, and no rank has a
// part of one. A group takes neighbours: the ranks of tp, then of cp, then of shard.
//
// Tokens: every rank has rows of its own: data and context parallelism divide them, and within a tensor-parallel group
// so does sequence parallelism. A rank sends each row to the ranks of its ep group that have the chosen experts, and
// their outputs come back.
//
// Gradients: an expert has seen all rows of its ep group, so its gradient is the sum over the ranks with the same ep
// coordinate: over the shards of this view, then over the replicas. ZeRO shards its state over these shards. No other
// sum over tensor-parallel ranks is needed, and no division: losses are divided by the global number of tokens.
//
// With one rank in an ep group and no tensor parallelism the two views are the same, and so are the groups.
#pragma once
#include "comm/mesh.h"
#include "core/shape.h"

namespace llmc {

struct ExpertParallel {
  int ranks = 1;      // of an ep group
  int64_t count = 0;  // experts of a layer; 0: a dense model

  // The experts that a rank of the group has.
  Range held_by(int rank) const {
    const int64_t each = exact_div(count, ranks, "experts over --ep");
    return {each * rank, each};
  }
};

// The ranks of a mesh, in the same order, with the axes by which experts are shared.
inline Mesh expert_view(const Mesh& mesh, const ExpertParallel& expert) {
  const int ranks = mesh.size(Axis::shard) * mesh.size(Axis::cp) * mesh.size(Axis::tp);
  return Mesh({{Axis::pp, mesh.size(Axis::pp)},
               {Axis::replicate, mesh.size(Axis::replicate)},
               {Axis::shard, static_cast<int>(exact_div(ranks, expert.ranks, "ranks of a replica over --ep"))},
               {Axis::ep, expert.ranks}});
}

}  // namespace llmc
