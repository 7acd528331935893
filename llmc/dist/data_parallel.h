// data_parallel.h: one rank's place among those that share a batch: its coordinates, its groups, and the streams on
// which gradients are reduced and weights are gathered while the compute stream goes on.
#pragma once
#include <functional>
#include <memory>
#include <string>
#include <vector>

#include "dist/comm.h"

namespace llmc {

// Bugs that a test plants, to see that the self-test finds them.
enum class PlantedBug : uint8_t { none, skipped_reduction, mean_instead_of_sum, sample_twice, stale_gather };

// When gradients are reduced (contract 3): the accumulated ones once a step, or those of every micro-batch.
enum class GradReduce : uint8_t { step, micro };
inline const char* name_of(GradReduce r) { return r == GradReduce::step ? "step" : "micro"; }

inline GradReduce grad_reduce_from_name(const std::string& name) {
  if (name == "step") return GradReduce::step;
  if (name == "micro") return GradReduce::micro;
  throw Error(formatted("--grad-reduce {}: expected step or micro", name));
}

// What is held of a model: all that training needs, or the weights alone, for generation.
enum class Holds : uint8_t { training_state, weights };

// How the data-parallel ranks share the state: ZeRO's stages (Rajbhandari et al. 2020): 0 everyone holds everything, 1
// optimizer state and masters are sharded, 2 gradients too, 3 weights too. Hybrid sharding: replicas of the shard
// group.
struct ZeroConfig {
  int stage = 0;
  GradReduce grad_reduce = GradReduce::step;
  int shards = 1, replicas = 1;
  bool reduce_by_stage = true;  // grad_reduce follows the stage
  Holds holds = Holds::training_state;
  bool master_weights = true;  // fp32 ones beside those in bf16; else bf16 alone, rounded by chance
  bool poison = false;         // what is released or not owned is filled with NaN
  PlantedBug bug = PlantedBug::none;

  // With the stage's usual way of reducing: micro where gradients are sharded, whose memory it is.
  void set_stage(int new_stage) {
    stage = new_stage;
    if (reduce_by_stage) grad_reduce = stage >= 2 ? GradReduce::micro : GradReduce::step;
  }
  int ranks() const { return shards * replicas; }
  Mesh mesh() const { return Mesh({{Axis::replicate, replicas}, {Axis::shard, shards}}); }
};

struct DataParallel {
  using Join = std::function<std::unique_ptr<Comm>(const std::string& name, const std::vector<Axis>& along)>;

  int shard, replica, rank;
  Arena reduce_scratch, gather_scratch;
  Stream reduce_stream, gather_stream;
  std::unique_ptr<Comm> gradients;  // the shard group, on reduce_stream
  std::unique_ptr<Comm> replicas;   // the ranks with the same shard, on reduce_stream
  std::unique_ptr<Comm> weights;    // the shard group, on gather_stream
  std::unique_ptr<Comm> scalars;    // all, on the compute stream
  std::unique_ptr<Comm> control;    // all, the hosts' own words

  DataParallel(const Mesh& mesh, int rank_, const Device& device, const Join& join)
      : shard(mesh.at(rank_, Axis::shard)),
        replica(mesh.at(rank_, Axis::replicate)),
        rank(rank_),
        reduce_scratch(device, scratch_bytes),
        gather_scratch(device, scratch_bytes),
        reduce_stream(device, reduce_scratch),
        gather_stream(device, gather_scratch),
        gradients(join("gradients", {Axis::shard})),
        replicas(join("replicas", {Axis::replicate})),
        weights(join("weights", {Axis::shard})),
        scalars(join("scalars", {Axis::replicate, Axis::shard})),
        control(join("control", {Axis::replicate, Axis::shard})) {}

  // Throws what went wrong between the ranks; asked while the host waits for a stream.
  void check() const {
    for (const auto* comm : {&gradients, &replicas, &weights, &scalars}) (*comm)->check();
  }

  int ranks() const { return scalars->size(); }
  bool first() const { return rank == 0; }

  // A chunk of the widest dtype, for the ring.
  static constexpr int64_t scratch_bytes = ring::chunk_elements * 8;

  // Groups on paper, with the sizes of a mesh: nothing moves, bytes are counted.
  static Join on_paper(const Mesh& mesh, int rank) {
    return [mesh, rank](const std::string& name, const std::vector<Axis>& along) {
      const std::vector<int> members = mesh.group(rank, along);
      const auto place = std::find(members.begin(), members.end(), rank) - members.begin();
      return std::make_unique<Comm>(
          name, std::make_unique<NullTransport>(static_cast<int>(place), static_cast<int>(members.size())));
    };
  }
};

}  // namespace llmc
