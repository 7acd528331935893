// resume_point.h: the checkpoint at which a run resumes or branches, and what a branch records of its parent; --restart
// moves a run's directory aside; what a command leaves out when it is run again.
#pragma once
#include <cstdlib>

#include "core/files.h"
#include "core/log.h"
#include "model/presets.h"
#include "run/checkpoints/checkpoint.h"
#include "run/checkpoints/run_record.h"
#include "run/recipe/sources.h"
#include "text/unicode.h"

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
  for (const SourceText& set : validation_texts(o)) inputs.emplace_back("--val-data", set.pattern);
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

// The checkpoint from which a run resumes, or with which a branch begins.
struct ResumePoint {
  std::string path;
  int64_t step;
  nlohmann::json trainer;  // its trainer.json
  Begin begin = Begin::resume;
};

// As process 0 tells the others, which read its trainer.json themselves; null: there is none.
inline nlohmann::ordered_json to_json_object(const std::optional<ResumePoint>& point) {
  if (!point) return nullptr;
  return {{"path", point->path}, {"step", point->step}, {"branch", point->begin == Begin::branch}};
}
inline std::optional<ResumePoint> resume_point_from_json(const nlohmann::json& json) {
  if (json.is_null()) return std::nullopt;
  return ResumePoint{json["path"], json["step"], {}, json["branch"] ? Begin::branch : Begin::resume};
}

// The newest complete checkpoint of a run directory; damaged ones are skipped, each with a warning. None: there are no
// checkpoints. It is an error if all are damaged.
inline std::optional<ResumePoint> newest_checkpoint(const std::string& out_dir,
                                                    const std::function<void(const std::string&)>& warn,
                                                    const CheckpointCheck& check = check_alone) {
  std::vector<int64_t> steps = checkpoint_steps(out_dir);
  std::string faults;
  for (; !steps.empty(); steps.pop_back()) {
    const std::string path = checkpoint_path(out_dir, steps.back());
    const std::optional<std::string> fault = check(path, Part::all);
    if (!fault) return ResumePoint{path, steps.back(), read_json(path + "/trainer.json")};
    warn("skipping a damaged checkpoint: " + *fault);
    faults += "\n  " + *fault;
  }
  CHECK(faults.empty(),
        "--out-dir {}: all of its checkpoints are damaged; nothing was overwritten:{}\nto start a new run, move "
        "them aside with --restart, or choose another directory",
        out_dir, faults);
  return std::nullopt;
}

// The checkpoint that an option names, under its canonical path (links and trailing slashes give a directory many), and
// its step.
inline std::pair<std::string, int64_t> named_checkpoint(const std::string& option, const std::string& named,
                                                        const char* expected, const CheckpointCheck& check) {
  std::error_code error;
  const std::filesystem::path asked = std::filesystem::canonical(named, error);
  const std::optional<int64_t> step = checkpoint_step(asked);
  const std::vector<int64_t> inside = step || error ? std::vector<int64_t>() : checkpoint_steps(asked);
  CHECK(step, "{} {}: {}; expected {}, {}", option, named,
        error ? error.message() : std::string("this is not a checkpoint"), expected,
        inside.empty() ? "OUT/step-NNNNNN" : checkpoint_path(named, inside.back()));
  if (const auto fault = check(asked, Part::all))
    throw Error(formatted("{} {}: this checkpoint is damaged: {}", option, named, *fault));
  return {asked, *step};
}

// The checkpoint that a run branched from, as run.json and trainer.json record it; null: the run is not a branch.
inline nlohmann::json parent_of(const ResumePoint& from) {
  if (from.begin == Begin::resume) return member(from.trainer, "parent");
  CHECK(!utf8_fault(from.path), "--branch-from {}: its path is not UTF-8, and is written into JSON: rename it",
        shown(from.path));
  return {{"path", from.path}, {"step", from.step}, {"manifest", checksum(read_text(from.path + "/manifest.json"))}};
}

// Rejects a --branch-from that is not the checkpoint from which the run in the out directory branched. The parent may
// be gone once the branch has a checkpoint.
inline void require_parent(const std::string& file, const nlohmann::json& recorded, const std::string& branch_from,
                           const std::string& out_dir) {
  if (branch_from.empty()) return;
  CHECK(!recorded.is_null(),
        "--branch-from {}: --out-dir {} holds a run that is no branch ({} names no parent): choose a new --out-dir",
        branch_from, out_dir, file);
  const std::string manifest = branch_from + "/manifest.json";
  CHECK(!path_exists(manifest) || member(recorded, "manifest") == checksum(read_text(manifest)),
        "--branch-from {}: {} says that the run in --out-dir {} is a branch of another checkpoint, {}: name that one, "
        "or choose a new --out-dir",
        branch_from, file, out_dir, member(recorded, "path"));
}

}  // namespace llmc
