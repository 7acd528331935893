// shared_check.h: a checkpoint that process 0 needs to verify is read by all processes, each a share of the bytes: what
// one process would read for minutes takes a job of many hosts seconds. Each host has a copy of its own of what lies
// outside of the --out-dir, as far as anyone knows; the processes of the host share that.
#pragma once
#include "core/work_progress.h"
#include "run/checkpoints/checkpoint.h"
#include "run/processes.h"

namespace llmc {

namespace detail {

inline constexpr const char *check_topic = "a checkpoint to check", *fault_topic = "faults of a checkpoint";

// What process 0 asks the others for.
struct CheckRequest {
  std::string path;
  Part part = Part::all;
  bool on_shared = false;  // every process sees the same files

  std::string text() const { return (part == Part::all ? "a" : "m") + std::string(on_shared ? "s" : "h") + path; }
  static CheckRequest from(const std::string& text) {
    return {text.substr(2), text[0] == 'a' ? Part::all : Part::model, text[1] == 's'};
  }
  std::optional<std::string> fault_in_share(ReadShare share, const Advance& advance = {}) const {
    return checkpoint_fault(path, part, share, advance);
  }
};

// What this process reads.
inline ReadShare own_share(const Processes& processes, const CheckRequest& request) {
  if (request.on_shared) return {processes.process(), processes.count()};
  return {processes.control()->local_process(), processes.control()->local_processes()};
}

// What checkpoint_fault() finds, on process 0. Of the --out-dir, it decides which checkpoints are damaged, and sets
// them aside: so it looks for itself at what another process has found.
inline std::optional<std::string> fault_found_together(const Processes& processes, const CheckRequest& request,
                                                       const Advance& advance) {
  if (processes.alone() || !path_exists(request.path + "/manifest.json")) return request.fault_in_share({}, advance);
  processes.all_gather(check_topic, request.text());
  const std::optional<std::string> own = request.fault_in_share(own_share(processes, request), advance);
  const std::vector<std::string> faults = processes.all_gather(fault_topic, own.value_or(""));
  if (own) return own;
  for (int p = 1; p < processes.count(); ++p) {
    const std::string& fault = faults[static_cast<size_t>(p)];
    if (fault.empty()) continue;
    const std::string finder = processes.control()->name_of_rank(p * processes.control()->local_ranks());
    if (!request.on_shared) return formatted("{} (read by {})", fault, finder);
    if (auto seen = request.fault_in_share({p, processes.count()})) return seen;
    throw Error(formatted("{}, as {} reads it; as process 0 reads it, it is intact: look at that host's file system",
                          fault, finder));
  }
  return std::nullopt;
}

// What the other processes do until process 0 has no more checkpoints to check.
inline void help_to_check(const Processes& processes) {
  for (;;) {
    const std::string asked = processes.all_gather(check_topic, "")[0];
    if (asked.empty()) return;
    const CheckRequest request = CheckRequest::from(asked);
    wait_for_path(request.path + "/manifest.json");
    processes.all_gather(fault_topic, request.fault_in_share(own_share(processes, request)).value_or(""));
  }
}

}  // namespace detail

// together(), in which process 0 alone calls f(check), where check is a CheckpointCheck with which the others help.
// out_dir: known to be the same for all processes; empty: none is. log: where process 0 says how far it is.
template <class F>
void check_together(const Processes& processes, const char* what, const std::string& out_dir, Log& log, F&& f) {
  together(processes, what, [&] {
    if (processes.process() != 0) return detail::help_to_check(processes);
    const auto release = [&] { processes.all_gather(detail::check_topic, ""); };
    WorkProgress progress(log);
    const Advance advance = progress.of_bytes(processes.alone() ? "checking" : "checking, this process's share");
    try {
      f([&](const std::string& path, Part part) {
        const bool on_shared = !out_dir.empty() && path.starts_with(out_dir + "/");
        return detail::fault_found_together(processes, {path, part, on_shared}, advance);
      });
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
