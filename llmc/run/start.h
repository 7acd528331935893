// start.h: where a run begins: what process 0 finds in the out directory, told to the other processes.
#pragma once
#include <chrono>
#include <memory>
#include <nlohmann/json.hpp>
#include <optional>
#include <string>
#include <thread>

#include "run/job.h"
#include "run/processes.h"
#include "run/run_dir.h"

namespace llmc {

struct Start {
  std::unique_ptr<RunDirectory> directory;  // of process 0
  std::optional<ResumePoint> resume;
  bool shuffled = true;   // in the run to resume
  bool complete = false;  // nothing is left to do
};

namespace detail {

// Opens the out directory and looks where to begin. A run that was stopped after its last update may still lack the
// last validation.
inline Start find_start(const Job& job, Log& log) {
  const Options& o = job.options;
  Start start{.directory = std::make_unique<RunDirectory>(log, o), .resume = {}};
  start.resume = start.directory->resume_point(log, o);
  start.shuffled = start.directory->shuffled_before();
  if (!start.resume || start.resume->step < job.max_steps) return start;
  const int64_t step = start.resume->step;
  start.complete = step > job.max_steps || !job.val || o.val_every == 0 || start.directory->validated(step);
  return start;
}

// Refuses an out directory that is not the same one for all processes: process 0 writes a file whose name nobody could
// know, and the others look for it.
inline void require_shared_directory(const Processes& processes, const std::string& out_dir) {
  const bool first = processes.process() == 0;
  std::string name;
  together(processes, "--out-dir is shared", [&] {
    if (!first) return;
    name = ".tmp-" + random_token();
    write_text_durably(out_dir + "/" + name, "");
  });
  name = processes.all_gather("a file in --out-dir", name)[0];
  const std::string file = out_dir + "/" + name;
  try {
    together(processes, "--out-dir is seen", [&] {
      // A network file system may take a moment to show what another host has written.
      const auto limit = std::chrono::steady_clock::now() + std::chrono::seconds(10);
      while (!path_exists(file) && std::chrono::steady_clock::now() < limit)
        std::this_thread::sleep_for(std::chrono::milliseconds(100));
      CHECK(path_exists(file),
            "--out-dir {}: {} does not see here what process 0 has written there: name a directory on a file system "
            "that all hosts share",
            out_dir, host_name());
    });
  } catch (...) {
    if (first) ::unlink(file.c_str());
    throw;
  }
  if (first) ::unlink(file.c_str());
}

}  // namespace detail

// Called by all processes; process 0 opens the directory.
inline Start find_start(const Processes& processes, const Job& job, Log& log) {
  Start start;
  together(processes, "--out-dir", [&] {
    if (processes.process() == 0) start = detail::find_start(job, log);
  });
  if (processes.alone()) return start;
  detail::require_shared_directory(processes, job.options.out_dir);
  const nlohmann::ordered_json mine = {start.resume ? start.resume->path : "", start.resume ? start.resume->step : 0,
                                       start.shuffled, start.complete};
  const nlohmann::json first = parse_json(processes.all_gather("start", mine.dump())[0], "process 0");
  if (processes.process() == 0) return start;
  start.shuffled = first[2];
  start.complete = first[3];
  const std::string path = first[0];
  if (!path.empty()) start.resume = ResumePoint{path, first[1], {}};
  return start;
}

}  // namespace llmc
