// layout.h: how the ranks of a run divide the work of a step, as one value: by data (ZeRO), by tensors, by context, by
// experts and by layers. All ranks have the same layout; groups.h says who talks to whom in it.
#pragma once
#include "comm/context_parallel.h"
#include "comm/expert_parallel.h"
#include "comm/mesh.h"
#include "comm/server.h"
#include "comm/tensor_parallel.h"
#include "core/offload.h"
#include "ops/optimizers.h"
#include "schedule/pipeline.h"

namespace llmc {

// When gradients are reduced: once per step, after accumulation, or after every micro-batch. The two round differently
// (contract 3 holds for each).
enum class GradReduce : uint8_t { step, micro };
constexpr auto names_of_values(GradReduce) { return std::array{"step", "micro"}; }

// Which state of a model is held: all that training needs, or only the weights, for generation.
enum class Holds : uint8_t { training_state, weights };

// How the data-parallel ranks shard the state, by the stages of ZeRO (Rajbhandari et al. 2020): 0: every rank holds
// everything; 1: optimizer state and master weights are sharded; 2: gradients too; 3: weights too. Hybrid sharding: the
// shard group has replicas.
struct ZeroConfig {
  int stage = 0;
  GradReduce grad_reduce = GradReduce::step;
  int shards = 1, replicas = 1;  // ranks of a shard group (data-parallel times context-parallel); its replicas
  bool reduce_by_stage = true;   // set_stage() sets grad_reduce
  Holds holds = Holds::training_state;
  Optimizer optimizer = Optimizer::adamw;  // whose slots are sharded like the master weights
  Muon muon = {};                          // with Optimizer::muon
  DpSync sync = DpSync::all_reduce;        // servers need stage 0 and one replica
  Offload offload = {};

  // Also sets grad_reduce to the default of the stage: micro where gradients are sharded or in host memory, because it
  // saves their memory.
  void set_stage(int new_stage) {
    stage = new_stage;
    if (reduce_by_stage)
      grad_reduce = stage >= 2 || offload.has(Offloaded::gradients) ? GradReduce::micro : GradReduce::step;
  }
  int ranks() const { return shards * replicas; }
  // Which ranks update a unit, and so hold its master weights and slots.
  enum class Updates : uint8_t { everyone, server, shard_owners };
  Updates updates() const {
    if (stage > 0 || sync == DpSync::partitioned_server) return Updates::shard_owners;
    return sync == DpSync::all_reduce ? Updates::everyone : Updates::server;
  }
  // How many ranks of a shard group hold different parts of the optimizer state: always the first ones.
  int owners() const { return updates() == Updates::shard_owners ? shards : 1; }
};

// How the stages of a pipeline divide the layers, and the sequences of a micro-batch in time.
struct PipelineParallel {
  Schedule schedule = Schedule::one_f_one_b;
  int stages = 1, chunks_per_stage = 1;
  std::vector<int64_t> layers = {};  // of each chunk, in the order of the model; empty: spread evenly (--pp-layout)
  std::vector<int64_t> slices = {};  // tokens of each token slice of a sequence; empty: sequences are whole

  int chunks() const { return stages * chunks_per_stage; }
  Pipeline pipeline(int64_t micro_batches = 1) const {
    return {schedule, stages, chunks_per_stage, micro_batches, std::max(1, static_cast<int>(slices.size()))};
  }
  // Whether stages update by themselves. A single stage waits for no other: pipedream is then 1f1b.
  bool asynchronous() const { return schedule == Schedule::pipedream && stages > 1; }
  // Whether the last stage sends activations to the first one.
  bool wraps() const { return chunks_per_stage > 1; }
};

// Which ranks share a unit of parameters: all that have the layer, or those that have the same experts of it.
enum class Sharing : uint8_t { dense, experts };

// Where a rank is in a layout.
struct Coordinates {
  int rank, stage, replica, shard;  // shard: its place in the shard group
  int context, tensor;              // its places in the context- and tensor-parallel groups
  int expert, expert_shard;         // its places in the ep group and in the experts' shard group
};

struct Layout {
  ZeroConfig zero = {};
  TensorParallel tensor = {};  // made by tensor_parallel()
  ContextParallel context = {};
  ExpertParallel expert = {};
  PipelineParallel pipeline = {};

  int ranks() const { return zero.ranks() * tensor.ranks * pipeline.stages; }
  // How many ranks, or groups of tensor- and context-parallel ranks, read samples of their own.
  int readers() const { return zero.ranks() / context.ranks; }
  // Tensor-parallel ranks are neighbours, with the fastest links; context-parallel ranks come next, and the stages of a
  // pipeline are farthest from each other.
  Mesh mesh() const {
    return Mesh({{Axis::pp, pipeline.stages},
                 {Axis::replicate, zero.replicas},
                 {Axis::shard, exact_div(zero.shards, context.ranks, "ranks of a shard group over --cp")},
                 {Axis::cp, context.ranks},
                 {Axis::tp, tensor.ranks}});
  }
  Coordinates coordinates(int rank) const {
    const Mesh all = mesh(), experts = expert_view(all, expert);
    return {.rank = rank,
            .stage = all.coordinate(rank, Axis::pp),
            .replica = all.coordinate(rank, Axis::replicate),
            .shard = all.coordinate(rank, Axis::shard) * context.ranks + all.coordinate(rank, Axis::cp),
            .context = all.coordinate(rank, Axis::cp),
            .tensor = all.coordinate(rank, Axis::tp),
            .expert = experts.coordinate(rank, Axis::ep),
            .expert_shard = experts.coordinate(rank, Axis::shard)};
  }
  // How experts are sharded: each among the ranks of a replica that have it.
  ZeroConfig expert_zero() const {
    ZeroConfig experts = zero;
    experts.shards =
        static_cast<int>(exact_div(zero.shards * tensor.ranks, expert.ranks, "ranks of a replica over --ep"));
    return experts;
  }
  // Do the ranks share experts differently from the rest of a layer?
  bool experts_apart() const { return expert.count > 0 && (expert.ranks > 1 || tensor.ranks > 1); }
};

}  // namespace llmc
