// replicas.h: ends a run whose replicas have diverged, because nobody knows what it trains.
#pragma once
#include "core/host_name.h"
#include "run/options/option_fields.h"
#include "run/ranks.h"
#include "shard/replica_check.h"

namespace llmc {

// Ends the run on all ranks if their copies of the model's state differ; called by all, between two updates. last: the
// last checkpoint; empty: none. only: of this unit alone; none: of all
inline void require_equal_copies(Run& run, const Place& place, int64_t step, const std::string& last,
                                 std::optional<size_t> only = {}) {
  const std::string process = place.processes > 1 ? formatted(" of process {}", place.process) : "",
                    me = formatted("rank {}{} on {}", run.groups.rank(), process, host_name());
  std::vector<SharedByAll> shared;
  const std::vector<float> biases = run.trainer.expert_biases();
  if (!biases.empty() && !only) shared.push_back({"the biases of the experts", biases});
  const std::optional<std::string> differ =
      diverged_copies(run.trainer.state(), me, run.trainer.stream(), shared, only);
  if (!differ) return;
  throw SharedError(
      formatted(
          "the replicas have diverged by step {}: {}. They began alike and were updated alike, so a bit has flipped in "
          "the memory of one of them, or a processor computes incorrectly. No checkpoint of it is written; {}",
          step, *differ,
          last.empty() ? "there is none to go back to: test these machines, then begin again"
                       : formatted("the last good one is {}: test these machines, then resume from there", last)),
      ExitStatus::diverged);
}

}  // namespace llmc
