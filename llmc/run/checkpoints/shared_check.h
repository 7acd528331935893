// shared_check.h: checkpoints that process 0 wants to know intact are read by all processes, each a share of the bytes:
// what one process would read for minutes takes a job of many hosts seconds.
#pragma once
#include <optional>
#include <string>
#include <vector>

#include "run/checkpoints/checkpoint.h"
#include "run/checkpoints/resume_point.h"
#include "run/processes.h"

namespace llmc {

namespace detail {

inline constexpr const char *check_topic = "a checkpoint to check", *fault_topic = "faults of a checkpoint";

// What checkpoint_fault() finds, on process 0. It decides which checkpoints are damaged, and sets them aside: a fault
// that it does not see itself is one of the other process's host.
inline std::optional<std::string> fault_found_together(const Processes& processes, const std::string& path, Part part) {
  if (processes.alone() || !path_exists(path + "/manifest.json")) return checkpoint_fault(path, part);
  const auto fault_in_share = [&](int process) { return checkpoint_fault(path, part, {process, processes.count()}); };
  processes.all_gather(check_topic, (part == Part::all ? "all " : "model ") + path);
  const std::optional<std::string> own = fault_in_share(0);
  const std::vector<std::string> faults = processes.all_gather(fault_topic, own.value_or(""));
  if (own) return own;
  for (int p = 1; p < processes.count(); ++p) {
    const std::string& fault = faults[static_cast<size_t>(p)];
    if (fault.empty()) continue;
    if (auto seen = fault_in_share(p)) return seen;
    throw Error(formatted("{}: {}, which process 0, on {}, does not see: look at the file system of that host",
                          processes.control()->name_of_rank(p * processes.control()->local_ranks()), fault,
                          host_name()));
  }
  return std::nullopt;
}

// What the other processes do until process 0 has no more checkpoints to check.
inline void help_to_check(const Processes& processes) {
  for (;;) {
    const std::string asked = processes.all_gather(check_topic, "")[0];
    if (asked.empty()) return;
    const size_t space = asked.find(' ');
    const std::string path = asked.substr(space + 1);
    wait_for_path(path + "/manifest.json");
    processes.all_gather(fault_topic, checkpoint_fault(path, asked.substr(0, space) == "all" ? Part::all : Part::model,
                                                       {processes.process(), processes.count()})
                                          .value_or(""));
  }
}

}  // namespace detail

// together(), in which process 0 alone calls f(check), where check is a CheckpointCheck with which the others help.
template <class F>
void check_together(const Processes& processes, const char* what, F&& f) {
  together(processes, what, [&] {
    if (processes.process() != 0) return detail::help_to_check(processes);
    const auto release = [&] { processes.all_gather(detail::check_topic, ""); };
    try {
      f([&](const std::string& path, Part part) { return detail::fault_found_together(processes, path, part); });
    } catch (const PeerError&) {  // no one is left to release
      throw;
    } catch (const Error&) {
      release();
      throw;
    }
    release();
  });
}

}  // namespace llmc
