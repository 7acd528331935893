// data_parallel.h: one rank among all: its coordinates, its groups, and the streams on which gradients are reduced,
// weights gathered, activations exchanged and keys passed on while the compute stream computes; and how data-parallel
// ranks shard the state.
#pragma once
#include <exception>
#include <functional>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "dist/comm/comm.h"
#include "dist/context_parallel.h"
#include "dist/expert_parallel.h"
#include "dist/hooks.h"
#include "dist/mesh.h"
#include "dist/pipeline/links.h"
#include "dist/tensor_parallel.h"

namespace llmc {

// When gradients are reduced: once per step, after accumulation, or after every micro-batch. The two round differently
// (contract 3 holds for each).
enum class GradReduce : uint8_t { step, micro };
inline const char* name_of(GradReduce r) { return r == GradReduce::step ? "step" : "micro"; }

inline GradReduce grad_reduce_from_name(const std::string& name) {
  if (name == "step") return GradReduce::step;
  if (name == "micro") return GradReduce::micro;
  throw Error(formatted("--grad-reduce {}: expected step or micro", name));
}

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
  bool master_weights = true;  // fp32 copies of bf16 weights; without them updates are rounded stochastically
  Optimizer optimizer = Optimizer::adamw;  // whose slots are sharded like the master weights
  DpSync sync = DpSync::all_reduce;        // servers need stage 0 and one replica

  // Also sets grad_reduce to the default of the stage: micro where gradients are sharded, because it saves their
  // memory.
  void set_stage(int new_stage) {
    stage = new_stage;
    if (reduce_by_stage) grad_reduce = stage >= 2 ? GradReduce::micro : GradReduce::step;
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

// The mesh of a layout: tensor-parallel ranks are neighbours, with the fastest links; context-parallel ranks
// come next, and the stages of a pipeline are farthest from each other.
inline Mesh mesh_of(const ZeroConfig& zero, const TensorParallel& tensor = {}, const ContextParallel& context = {},
                    int stages = 1) {
  return Mesh({{Axis::pp, stages},
               {Axis::replicate, zero.replicas},
               {Axis::shard, exact_div(zero.shards, context.ranks, "ranks of a shard group over --cp")},
               {Axis::cp, context.ranks},
               {Axis::tp, tensor.ranks}});
}

// The same for experts: each is sharded among the ranks of a replica that have it.
inline ZeroConfig expert_zero(ZeroConfig zero, const TensorParallel& tensor, const ExpertParallel& expert) {
  zero.shards = static_cast<int>(exact_div(zero.shards * tensor.ranks, expert.ranks, "ranks of a replica over --ep"));
  return zero;
}

struct DataParallel;

// The destructor waits for streams whose tasks use objects that are destroyed after it. If it runs because of an error,
// or a stream has failed, it first aborts the world: a task may wait for a peer, and that peer for this rank.
class Drain {
 public:
  Drain(const DataParallel& dp, std::vector<Stream*> streams) : dp_(dp), streams_(std::move(streams)) {}
  ~Drain();
  Drain(const Drain&) = delete;
  Drain& operator=(const Drain&) = delete;

  // The exception that ends the scope is no failure: all ranks leave at the same place, as when a run is stopped and
  // still has to save.
  void all_leave() { all_leave_ = true; }

 private:
  const DataParallel& dp_;
  std::vector<Stream*> streams_;
  int exceptions_ = std::uncaught_exceptions();
  bool all_leave_ = false;
};

struct DataParallel {
  using Join = std::function<std::unique_ptr<Comm>(const std::string& name, const std::vector<int>& members)>;

  int rank, stage, shard, replica, context_rank, tensor_rank;  // shard: its place in the shard group
  int expert_rank, expert_shard;  // its places in the ep group and in the experts' shard group
  int stages;                     // pipeline stages
  TensorParallel tensor;
  ContextParallel context;
  ExpertParallel expert;
  Arena reduce_scratch, gather_scratch, exchange_scratch, context_scratch, expert_scratch;
  Stream reduce_stream, gather_stream;
  std::unique_ptr<Stream> exchange_stream;  // with tensor.overlap; otherwise the compute stream does its work
  std::unique_ptr<Stream> context_stream;   // with context parallelism: keys and values travel while others are used
  std::unique_ptr<Stream> expert_stream;    // with expert parallelism: rows travel while the shared expert computes
  std::unique_ptr<Comm> gradients;          // the shard group, on reduce_stream
  std::unique_ptr<Comm> replicas;           // the ranks with the same shard, on reduce_stream
  std::unique_ptr<Comm> weights;            // the shard group, on gather_stream
  std::unique_ptr<Comm> activations;        // the tensor-parallel group, on the compute stream or exchange_stream
  std::unique_ptr<Comm> partial_gradients;  // the same ranks, on reduce_stream
  std::unique_ptr<Comm> head_gradients;     // the ranks among these with the same key-value head, on reduce_stream
  // The next three are this rank alone unless experts are shared among other ranks than the rest of a layer
  // (experts_apart()):
  std::unique_ptr<Comm> experts;           // the ep group, on expert_stream
  std::unique_ptr<Comm> expert_gradients;  // the shard group of the experts, on reduce_stream
  std::unique_ptr<Comm> expert_weights;    // the same, on gather_stream
  std::unique_ptr<Comm> sequences;         // in a model with experts: ranks with parts of the same sequences
  std::unique_ptr<Comm> keys_values;       // the context-parallel group, on context_stream
  std::unique_ptr<Comm> tied_gradients;    // this rank's place in the first and in the last stage, on reduce_stream
  std::unique_ptr<Comm> scalars;           // all ranks, on the compute stream
  std::unique_ptr<Comm> stage_scalars;     // in an asynchronous pipeline: the stage's ranks, on the compute stream
  std::unique_ptr<Comm> control;           // all ranks; only text, between the hosts
  std::unique_ptr<Comm> tensor_control;    // the tensor-parallel group; only text, between the hosts
  std::unique_ptr<Comm> expert_control;    // the ep group; only text, between the hosts
  const Hooks& hooks;
  StageLinks links;  // to and from the neighbours of this stage

  // wraps: the last stage's neighbour is the first one. asynchronous: stages do not wait for each other's norms.
  DataParallel(const Mesh& mesh, int rank_, const Device& device, const Join& join, const Hooks& hooks_ = no_hooks,
               const TensorParallel& tensor_ = {}, const ContextParallel& context_ = {},
               const ExpertParallel& expert_ = {}, bool wraps = false, bool asynchronous = false)
      : rank(rank_),
        stage(mesh.coordinate(rank_, Axis::pp)),
        shard(mesh.coordinate(rank_, Axis::shard) * context_.ranks + mesh.coordinate(rank_, Axis::cp)),
        replica(mesh.coordinate(rank_, Axis::replicate)),
        context_rank(mesh.coordinate(rank_, Axis::cp)),
        tensor_rank(mesh.coordinate(rank_, Axis::tp)),
        expert_rank(expert_view(mesh, expert_).coordinate(rank_, Axis::ep)),
        expert_shard(expert_view(mesh, expert_).coordinate(rank_, Axis::shard)),
        stages(mesh.size(Axis::pp)),
        tensor(tensor_),
        context(context_),
        expert(expert_),
        reduce_scratch(device, mesh.size() > 1 ? scratch_bytes : 0),
        gather_scratch(device, mesh.size() > 1 ? scratch_bytes : 0),
        exchange_scratch(device, tensor.overlap ? scratch_bytes : 0),
        context_scratch(device, context.ranks > 1 ? scratch_bytes : 0),
        expert_scratch(device, expert.ranks > 1 ? scratch_bytes : 0),
        reduce_stream(device, reduce_scratch, Precedence::communication),
        gather_stream(device, gather_scratch, Precedence::communication),
        exchange_stream(tensor.overlap ? std::make_unique<Stream>(device, exchange_scratch, Precedence::communication)
                                       : nullptr),
        context_stream(context.ranks > 1 ? std::make_unique<Stream>(device, context_scratch, Precedence::communication)
                                         : nullptr),
        expert_stream(expert.ranks > 1 ? std::make_unique<Stream>(device, expert_scratch, Precedence::communication)
                                       : nullptr),
        gradients(join("gradients", mesh.group(rank, {Axis::shard, Axis::cp}))),
        replicas(join("replicas", mesh.group(rank, {Axis::replicate}))),
        weights(join("weights", mesh.group(rank, {Axis::shard, Axis::cp}))),
        activations(join("activations", mesh.group(rank, {Axis::tp}))),
        partial_gradients(join("partial gradients", mesh.group(rank, {Axis::tp}))),
        head_gradients(join("head gradients", same_head(mesh))),
        experts(join("experts", same_experts(mesh, Axis::ep))),
        expert_gradients(join("expert gradients", same_experts(mesh, Axis::shard))),
        expert_weights(join("expert weights", same_experts(mesh, Axis::shard))),
        sequences(
            join("sequences", expert.count > 0 ? mesh.group(rank, {Axis::cp, Axis::tp}) : std::vector<int>{rank})),
        keys_values(join("keys and values", mesh.group(rank, {Axis::cp}))),
        tied_gradients(join("tied gradients", ends_of_pipeline(mesh))),
        scalars(join("scalars", everybody(mesh))),
        stage_scalars(join("scalars of a stage", asynchronous ? mesh.group(rank, of_stage) : std::vector<int>{rank})),
        control(join("control", everybody(mesh))),
        tensor_control(join("tensor-parallel control", mesh.group(rank, {Axis::tp}))),
        expert_control(join("expert-parallel control", same_experts(mesh, Axis::ep))),
        hooks(hooks_),
        links(rank, mesh.size() / stages, stages, wraps, device, scratch_bytes, join),
        drain_(*this, streams()) {}

  // All streams except the compute stream.
  std::vector<Stream*> streams() {
    std::vector<Stream*> all = {&reduce_stream, &gather_stream};
    for (Stream* s : {exchange_stream.get(), context_stream.get(), expert_stream.get()})
      if (s != nullptr) all.push_back(s);
    links.for_each([&](StageLink& link) { all.push_back(&link.stream()); });
    return all;
  }
  // The groups that move tensors.
  std::vector<Comm*> tensor_groups() const {
    std::vector<Comm*> all = {gradients.get(),         replicas.get(),       weights.get(),     activations.get(),
                              partial_gradients.get(), head_gradients.get(), experts.get(),     expert_gradients.get(),
                              expert_weights.get(),    sequences.get(),      keys_values.get(), tied_gradients.get(),
                              scalars.get(),           stage_scalars.get()};
    links.for_each([&](StageLink& link) { all.push_back(&link.comm()); });
    return all;
  }
  // Throws if an exchange between the ranks has failed; called while the host waits for a stream.
  void check() const {
    for (const Comm* comm : tensor_groups()) comm->check();
  }

  // This rank has failed: nobody waits for it any more, and it waits for nobody.
  void abort() const { scalars->abort(); }

  // The groups that share a unit within a replica, and which shard of it this rank has.
  struct Sharers {
    Comm &gradients, &weights;
    int shard;
  };
  Sharers sharers(Sharing sharing) const {
    if (sharing == Sharing::experts && experts_apart()) return {*expert_gradients, *expert_weights, expert_shard};
    return {*gradients, *weights, shard};
  }
  bool experts_apart() const { return expert.count > 0 && (expert.ranks > 1 || tensor.ranks > 1); }

  int ranks() const { return scalars->size(); }
  bool first() const { return rank == 0; }
  // How many groups of ranks read different samples, and which of them this rank is in: tensor- and context-parallel
  // ranks and the stages of a pipeline read the same samples.
  int readers() const { return ranks_of_stage() / (tensor.ranks * context.ranks); }
  int reader() const { return rank % ranks_of_stage() / (tensor.ranks * context.ranks); }
  int ranks_of_stage() const { return ranks() / stages; }

  static inline const std::vector<Axis> of_stage = {Axis::replicate, Axis::shard, Axis::cp, Axis::tp};

  // One chunk of the ring, in the widest dtype.
  static constexpr int64_t scratch_bytes = ring::chunk_elements * 8;

  // Groups over null transports with the same sizes as in the mesh: nothing moves, bytes are counted.
  static Join null_groups(int rank) {
    return [rank](const std::string& name, const std::vector<int>& members) {
      const auto index = std::find(members.begin(), members.end(), rank) - members.begin();
      return std::make_unique<Comm>(
          name, std::make_unique<NullTransport>(static_cast<int>(index), static_cast<int>(members.size())));
    };
  }

 private:
  std::vector<int> same_experts(const Mesh& mesh, Axis along) const {
    return experts_apart() ? expert_view(mesh, expert).group(rank, {along}) : std::vector<int>{rank};
  }
  std::vector<int> everybody(const Mesh& mesh) const {
    return mesh.group(rank, {Axis::pp, Axis::replicate, Axis::shard, Axis::cp, Axis::tp});
  }
  std::vector<int> ends_of_pipeline(const Mesh& mesh) const {
    const std::vector<int> column = mesh.group(rank, {Axis::pp});
    if (column.size() == 1 || (rank != column.front() && rank != column.back())) return {rank};
    return {column.front(), column.back()};
  }
  // Ranks with the same key-value head follow one another.
  std::vector<int> same_head(const Mesh& mesh) const {
    const std::vector<int> group = mesh.group(rank, {Axis::tp});
    const auto first = group.begin() + tensor_rank / tensor.head_copies * tensor.head_copies;
    return {first, first + tensor.head_copies};
  }

  Drain drain_;  // last: the streams are idle before anything else is destroyed
};

inline Drain::~Drain() {
  if (!all_leave_ && std::uncaught_exceptions() > exceptions_) dp_.abort();
  for (Stream* s : streams_) try {
      s->synchronize();
    } catch (...) {  // already reported, or a peer's
      dp_.abort();
    }
}

}  // namespace llmc
