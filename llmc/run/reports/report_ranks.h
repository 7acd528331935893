// report_ranks.h: the part of a run's header that says where its ranks are and how they exchange tensors.
#pragma once
#include "comm/connected_processes.h"
#include "core/log.h"
#include "run/options/options.h"

namespace llmc {

namespace detail {

// How tensors travel between the ranks, and why --comm auto chose this way.
inline std::string transport_text(const Options& o, Backend backend) {
  const bool chosen = o.comm == CommChoice::automatic, several = o.place.processes > 1;
  const std::string within =
      o.place.local_ranks > 1 && several ? "; within a process, through its memory" : std::string();
  switch (backend) {
    case Backend::threads: return "through the process's memory, thread to thread";
    case Backend::nccl: return "by " + nccl_version() + (chosen ? ", because each rank has its own GPU" : "");
    case Backend::mpi: return "by " + mpi_version() + (chosen ? ", which started them" : "") + within;
    case Backend::tcp:
      return "by TCP" + std::string(chosen ? ", because MPI, which is faster, has not started them" : "") + within;
  }
  throw Error("no such transport");
}

// A line for each rank, or, if there are many, for each process.
inline std::vector<std::pair<std::string, std::string>> rank_rows(const Options& o, const Mesh& mesh) {
  std::vector<std::pair<std::string, std::string>> rows;
  const int local = static_cast<int>(o.place.local_ranks);
  const auto where = [&](int rank) {
    return o.place.processes == 1 ? std::string() : "on " + o.place.host_of_process[static_cast<size_t>(rank / local)];
  };
  constexpr int most = 16;
  if (mesh.size() <= most)
    for (int rank = 0; rank < mesh.size(); ++rank) {
      const std::string coordinates = mesh.coordinates(rank), host = where(rank);
      rows.emplace_back(formatted("rank {}", rank), coordinates + (host.empty() ? "" : ", ") + host);
    }
  for (int first = 0, end = 0; mesh.size() > most && first < mesh.size(); first = end) {
    for (end = first + 1; end < mesh.size() && where(end) == where(first); ++end) continue;
    rows.emplace_back(formatted("ranks {}-{}", first, end - 1),
                      formatted("{} to {} {}", mesh.coordinates(first), mesh.coordinates(end - 1), where(first)));
  }
  return rows;
}

}  // namespace detail

inline void report_ranks(Log& log, const Options& o, const Device& device, Backend backend, const Mesh& mesh) {
  const std::string who = o.place.processes == 1
                              ? std::string("threads of this process")
                              : formatted("{} processes of {} rank{} each, started by {}", o.place.processes,
                                          o.place.local_ranks, o.place.local_ranks == 1 ? "" : "s", o.place.started_by);
  log.table(formatted("ranks: {}; tensors go {}", who, detail::transport_text(o, backend)), detail::rank_rows(o, mesh));
  if (backend == Backend::nccl)
    for (const std::string& notice : nccl_notices()) log.line(notice);
  if (device.kind == DeviceKind::cuda && backend != Backend::nccl)
    log.line("notice: ranks share GPUs, or this build has no NCCL: every exchange waits for the GPU: correct but slow");
}

}  // namespace llmc
