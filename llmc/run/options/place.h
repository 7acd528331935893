// place.h: the place of a process in its job.
#pragma once
#include "core/std.h"

namespace llmc {

// This process among those of the job, and its ranks among all ranks. A process alone has all ranks.
struct Place {
  int64_t process = 0, processes = 1, hosts = 1;
  int64_t local_ranks = 1;                      // of each process
  int64_t ranks_on_host = 1, rank_on_host = 0;  // ranks on this host; this process's first among them
  int64_t sharers = 1;                          // processes that may use the same processors
  bool own_gpus = false;                        // the launcher shows each process GPUs of its own
  bool by_mpi = false;                          // MPI has started the processes
  std::string started_by = {};
  std::vector<std::string> host_of_process = {};

  int64_t first_rank() const { return process * local_ranks; }
};

}  // namespace llmc
