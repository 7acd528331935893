// local_checkpoints.h: a rank begins to save local checkpoints (--checkpoint-local): under which names, and whether the
// parts of its process are copied to another process's disk.
#pragma once
#include <filesystem>
#include <nlohmann/json.hpp>
#include <system_error>

#include "core/environment.h"
#include "run/checkpoints/local_copies.h"
#include "run/checkpoints/local_parts.h"
#include "run/checkpoints/run_dir.h"
#include "run/processes.h"
#include "run/training_rank.h"

namespace llmc {

namespace detail {

// Called by all ranks; a process's copies are made by its first rank.
inline std::unique_ptr<LocalCopies> copies_of(const LocalParts& parts, bool leads, TrainingRank& rank, World& world) {
  const Options& o = rank.options();
  std::error_code none;
  const std::string directory = std::filesystem::canonical(o.checkpoint_local, none);
  const std::vector<std::string> all =
      rank.control().all_gather_text("local disks", nlohmann::json{host_name(), shown(directory)}.dump());
  const int ranks = static_cast<int>(o.place.local_ranks), n = static_cast<int>(o.place.processes);
  std::vector<NodeDisk> disks;
  for (int p = 0; p < n; ++p) {
    const nlohmann::json disk = parse_json(all[static_cast<size_t>(p * ranks)], "a process");
    disks.push_back({disk.at(0), disk.at(1)});
  }
  const int distance = copy_distance(disks), me = static_cast<int>(o.place.process),
            group = world.channel(rank.number, "local copies");
  if (n > 1 && distance == 0)
    rank.log.line("notice: all processes have their local checkpoints in the same directory: there is no second copy");
  if (distance == 0 || !leads) return nullptr;
  return std::make_unique<LocalCopies>(LocalCopies::Ring{rank.local.links, group, rank.number,
                                                         (me + distance) % n * ranks, (me + n - distance) % n * ranks},
                                       parts.directory());
}

}  // namespace detail

// Those of a run that is complete; directory: process 0's. Called by all processes.
inline void delete_local_checkpoints(const Processes& processes, const RunDirectory* directory, const Options& o) {
  if (o.checkpoint_local.empty()) return;
  const bool some = directory != nullptr && !directory->local().run.empty();
  const std::string text =
      processes.all_gather("local checkpoints", some ? directory->local().to_json().dump() : "")[0];
  if (text.empty()) return;
  const LocalHistory history = LocalHistory::from_json(parse_json(text, "process 0"), "run.json");
  LocalParts(o.checkpoint_local, history, o.place.process, o.checkpoint_local_keep).clear();
}

// From now on, as the start that rank 0's run.json names last.
inline void save_locally(TrainingRank& rank, World& world, const RunDirectory* directory) {
  const Options& o = rank.options();
  const std::string mine = directory != nullptr ? directory->local().to_json().dump() : "";
  const LocalHistory history = LocalHistory::from_json(
      parse_json(rank.control().all_gather_text("local checkpoints", mine)[0], "rank 0"), "run.json");
  const bool leads = rank.number == o.place.first_rank();
  LocalParts parts(o.checkpoint_local, history, o.place.process, o.checkpoint_local_keep);
  if (leads) parts.remove_unfinished();
  std::unique_ptr<LocalCopies> copies;
  if (o.checkpoint_local_copies == OnOff::on) copies = detail::copies_of(parts, leads, rank, world);
  rank.checkpoints.save_locally(std::move(parts), leads, std::move(copies));
}

}  // namespace llmc
