// layout.h: how the ranks of a run divide the work of a step, as one value: by data (ZeRO), by tensors, by context, by
// experts and by layers. All ranks have the same layout; groups.h says who talks to whom in it.
#pragma once
#include "comm/mesh.h"
#include "comm/server.h"
#include "core/precision.h"
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

inline constexpr int64_t vocab_multiple = 128;  // rows of a vocabulary that a rank stores are a multiple of this

// How tensor parallelism (Shoeybi et al. 2019) divides a layer's vocabulary, and with sequence parallelism (Korthikanti
// et al. 2022) the rows of the residual stream, among the ranks of a group. shard/params.h divides the parameters.
struct TensorParallel {
  int ranks = 1;
  bool sequence = true;  // sequence parallelism: between the products each rank has some rows of the residual stream
  bool overlap = false;  // exchange one piece of a product while another is computed (parallel/group.h)
  int head_copies = 1;   // ranks that have the same key-value head: more than one if there are fewer heads than ranks

  bool by_rows() const { return ranks > 1 && sequence; }
  // How many of R rows each rank exchanges with every other; those of the last ranks may be padding.
  int64_t slice_rows(int64_t R) const { return ceil_div(R, ranks); }
  int64_t padded_rows(int64_t R) const { return slice_rows(R) * ranks; }
  // How many rows of the residual stream a rank has, padding included.
  int64_t stream_rows(int64_t R) const { return by_rows() ? slice_rows(R) : R; }
  // How many rows of a vocabulary of V a rank stores, padding included.
  int64_t stored_vocab(int64_t V) const { return round_up(ceil_div(V, ranks), vocab_multiple); }
};

// How a rank's queries meet the keys and values of the others.
enum class ContextAttention : uint8_t {
  ring,        // keys and values go round a ring while the ranks compute (Liu et al. 2023)
  all_gather,  // every rank gathers them all (Llama Team 2024)
  ulysses,     // each rank computes some heads of whole sequences (Jacobs et al. 2023)
};
constexpr auto names_of_values(ContextAttention) { return std::array{"ring", "all-gather", "ulysses"}; }

// How context parallelism divides a sequence among the ranks of a group (parallel/context_attention.h). A sequence is
// cut into 2 P equal slices; rank r has slices r and 2 P - 1 - r, so all ranks have the same causal work (Llama Team
// 2024).
struct ContextParallel {
  int ranks = 1;
  ContextAttention attention = ContextAttention::ring;

  int slices() const { return ranks == 1 ? 1 : 2 * ranks; }
  // How many of the T rows of a sequence a rank has, and how many a slice has.
  int64_t share(int64_t T) const { return exact_div(T, slices(), "rows over the slices of --cp") * (slices() / ranks); }
  int64_t slice_rows(int64_t T) const { return T / slices(); }
  // Slice i of a rank; its slices are in the order of their rows.
  int slice_of(int rank, int i) const { return i == 0 ? rank : 2 * ranks - 1 - rank; }
  // T rounded up to a number of rows that can be divided into slices.
  int64_t padded(int64_t T) const { return round_up(T, slices()); }

  // A rank has rows (B share(T)) of B sequences; returns the index of its row `row` among all rows (B T).
  int64_t row_of_all(int64_t row, int64_t T, int rank) const {
    const int64_t mine = share(T), L = slice_rows(T), in_share = row % mine;
    return row / mine * T + slice_of(rank, static_cast<int>(in_share / L)) * L + in_share % L;
  }
  // The elements of x (B T) that a rank has, in the order of its rows.
  template <class X>
  std::vector<X> share_of(std::vector<X> x, int64_t T, int rank) const {
    if (ranks == 1) return x;
    std::vector<X> mine(x.size() / static_cast<size_t>(ranks));
    for (size_t row = 0; row < mine.size(); ++row)
      mine[row] = x[static_cast<size_t>(row_of_all(static_cast<int64_t>(row), T, rank))];
    return mine;
  }
};

// Which experts of a layer a rank has (Shazeer et al. 2017; Lepikhin et al. 2020): E / ep consecutive ones of E, and a
// part of none. An ep group takes neighbours: the ranks of tp, then of cp, then of shard. So the ranks of a stage are
// numbered in two ways, in the same order (parallel/README.md has a picture): for dense weights by shard, cp and tp,
// for experts by shard and ep. With one rank in an ep group and no tensor parallelism the views are the same, and so
// are the groups.
//
// Every rank has rows of its own: data and context parallelism divide them, and within a tensor-parallel group so does
// sequence parallelism. An expert sees all rows of its ep group, so its gradient is the sum over the ranks with the
// same ep coordinate: over the shards of this view, over which ZeRO shards its state, then over the replicas. No other
// sum over tensor-parallel ranks is needed, and no division: losses are divided by the global number of tokens.
struct ExpertParallel {
  int ranks = 1;      // of an ep group
  int64_t count = 0;  // experts of a layer; 0: a dense model

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
