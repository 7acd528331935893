// restart.h: --restart moves a run's directory aside; what a command leaves out when it is run again.
#pragma once
#include <cstdlib>

#include "core/files.h"
#include "core/log.h"
#include "model/presets.h"
#include "run/recipe/sources.h"

namespace llmc {

// Whether Slurm has started the job again, after exit status 75 or the loss of a node: the command is the same, and the
// run must not begin anew.
inline bool requeued() {
  const char* restarts = std::getenv("SLURM_RESTART_COUNT");
  return restarts != nullptr && std::atoi(restarts) > 0;
}

// What a command leaves out when it is run again to resume, between commas; "": nothing.
inline std::string left_out_to_resume(const Options& o) {
  std::string words = o.restart ? "--restart" : "";
  if (o.resume != "auto") words += (words.empty() ? "--resume " : " and --resume ") + o.resume;
  return words.empty() ? "" : formatted(", without {},", words);
}

// Renames the whole directory in one step, and creates a new one. Returns false if there was nothing in it but a lock.
inline bool move_aside(const Options& o, Log& log) {
  const std::vector<std::string> names = names_in(o.out_dir);
  if (std::all_of(names.begin(), names.end(), [](const std::string& name) { return name == ".lock"; })) return false;
  std::error_code error, none;
  const std::filesystem::path from = std::filesystem::canonical(o.out_dir, none);
  std::vector<std::pair<const char*, std::string>> inputs = {
      {"--model", model_preset(o.model) ? std::string() : o.model},
      {"--stages", o.stages},
      {"--tokenizer", o.tokenizer},
      {"--eval-choices", o.eval_choices}};
  for (const SourceText& source : source_texts(o)) inputs.emplace_back("--train-data", source.pattern);
  for (const ValidationText& set : validation_texts(o)) inputs.emplace_back("--val-data", set.pattern);
  for (const auto& [option, input] : inputs) {
    const std::filesystem::path path = std::filesystem::weakly_canonical(input, none);
    const bool names_files = input.find('/') != std::string::npos || std::filesystem::exists(input, none);
    CHECK(!names_files || std::mismatch(from.begin(), from.end(), path.begin(), path.end()).first != from.end(),
          "--restart would move {} {}, which is inside --out-dir {}: choose another --out-dir instead", option, input,
          o.out_dir);
  }
  std::string to;
  for (int i = 1; to.empty() || path_exists(to); ++i) to = formatted("{}.before-{}", from.string(), i);
  std::filesystem::rename(from, to, error);
  CHECK(!error, "--restart: cannot rename {} to {}: {}; choose another --out-dir instead", from.string(), to,
        error.message());
  fsync_directory(from.parent_path());
  std::filesystem::create_directories(from, error);
  CHECK(!error, "cannot create {}: {}", from.string(), error.message());
  log.line(formatted("--restart: the former contents of {} are now in {}", o.out_dir, to));
  return true;
}

}  // namespace llmc
