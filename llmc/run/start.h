// start.h: where a run begins: process 0 looks in the out directory and tells the others; what each process finds by
// itself must be the same on all. A notice says if weights were trained on the very samples that come next.
#pragma once
#include "core/checksum.h"
#include "run/checkpoints/local_resume.h"
#include "run/checkpoints/recipe_record.h"
#include "run/checkpoints/run_dir.h"
#include "run/checkpoints/shared_check.h"
#include "run/job.h"
#include "run/processes.h"

namespace llmc {

struct Start {
  std::unique_ptr<RunDirectory> directory;  // process 0's
  std::optional<ResumePoint> resume;
  bool shuffled = true;                  // by the run to resume
  std::optional<int64_t> complete = {};  // the steps of the run, after which nothing is left to do; none: it goes on
  std::vector<Rollback> rollbacks = {};
};

namespace detail {

// Looks in the out directory where to begin. A run that was stopped after its last update may still lack the last
// validation.
inline void find_start(Start& start, const Job& job, const CheckpointCheck& check, Log& log) {
  const Options& o = job.asked;
  start.resume = start.directory->resume_point(log, o, [&](const std::string& path, Part part) {
    if (job.takes_long_to_read()) log.line(formatted("checking {}, {}", path, human_bytes(job.checkpoint_bytes())));
    return check(path, part);
  });
  start.shuffled = start.directory->shuffled_before();
  start.rollbacks = start.directory->rollbacks();
  if (!start.resume) return job.require_length();
  const int64_t step = start.resume->step;
  const int64_t steps = resumed_course(*start.resume, job).course.steps();
  if (step < steps) return;
  CHECK(start.resume->begin == Begin::resume,
        "--branch-from {} is at step {}, and the branch ends at step {} ({}): nothing would be left to do; name an "
        "earlier checkpoint, or a longer run",
        start.resume->path, step, steps, o.stages.empty() ? length_text(o) : "--stages " + o.stages);
  if (step == steps && job.validates() && !start.directory->validated(step)) return;
  start.complete = steps;
  start.directory->drop_incomplete_line();
}

// Rejects an out directory that is not the same for all processes: process 0 writes a file with an unguessable name,
// and the others look for it.
inline void require_shared_directory(const Processes& processes, const std::string& out_dir) {
  NewFiles made;  // on process 0
  std::string name;
  together(processes, "--out-dir is shared", [&] {
    if (processes.process() != 0) return;
    name = ".tmp-" + random_token();
    made.note(out_dir + "/" + name);
    write_text_durably(out_dir + "/" + name, "");
  });
  const std::string file = out_dir + "/" + processes.all_gather("a file in --out-dir", name)[0];
  together(processes, "--out-dir is seen", [&] {
    wait_for_path(file);
    CHECK(path_exists(file),
          "--out-dir {}: {} does not see what process 0 has written there: name a directory on a file system that all "
          "hosts share",
          out_dir, host_name());
  });
}

// A checksum of the files that this run reads of a --model directory. Our manifests have checksums of the weights,
// which were verified; for other weights, a sample is enough to tell two models apart.
inline std::string model_checksum(const Options& o, bool weights) {
  constexpr double most = 64 << 20;  // bytes
  std::string text = read_text(o.model + "/config.json");
  if (!weights) return checksum(text);
  if (path_exists(o.model + "/manifest.json")) return checksum(text + read_text(o.model + "/manifest.json"));
  double bytes = 1;
  const std::vector<std::string> files = model_files(o.model);
  for (const std::string& file : files) bytes += static_cast<double>(std::filesystem::file_size(file));
  for (const std::string& file : files)
    text += std::filesystem::path(file).filename().string() + sampled_checksum(file, std::min(1.0, most / bytes));
  return checksum(text);
}

}  // namespace detail

// Called by all processes; process 0 opens the directory.
inline Start find_start(const Processes& processes, const Job& job, Log& log) {
  check_together(processes, "--model", "", log, [&](const CheckpointCheck& check) {
    if (job.is_new() && job.asked.branch_from.empty()) require_whole_weights(job.asked, check);
  });
  Start start;
  together(processes, "--out-dir", [&] {
    if (processes.process() == 0) start.directory = std::make_unique<RunDirectory>(log, job.asked);
  });
  if (!processes.alone()) detail::require_shared_directory(processes, job.options.out_dir);
  adopt_local_checkpoint(processes, job.asked, start.directory.get(), log);
  check_together(processes, "a checkpoint to resume from", job.asked.out_dir, log,
                 [&](const CheckpointCheck& check) { detail::find_start(start, job, check, log); });
  if (processes.alone()) return start;
  const nlohmann::ordered_json mine = {
      to_json_object(start.resume), start.shuffled,
      start.complete ? nlohmann::ordered_json(*start.complete) : nlohmann::ordered_json(),
      to_json_object(start.rollbacks)};
  const nlohmann::json first = parse_json(processes.all_gather("start", mine.dump())[0], "process 0");
  if (processes.process() == 0) return start;
  start.resume = resume_point_from_json(first[0]);
  start.shuffled = first[1];
  start.complete = whole_number(first[2]);
  start.rollbacks = rollbacks_from_json(first[3], "process 0");
  return start;
}

// Called by all processes: each has made its choices on its own host and read its own files.
inline void require_same_everywhere(const Processes& processes, const Job& job,
                                    const std::optional<ResumePoint>& resume) {
  if (processes.alone()) return;
  const Options& o = job.options;
  NamedValues found;
  together(processes, "files", [&] {
    std::string tokenizer;
    for (const auto& [name, text] : job.tokenizer_files) tokenizer += name + '\n' + text;
    found = {{formatted("the transport, of --comm {}", o.comm), name_of(job.backend)},
             {formatted("the device, of --device {}", o.device), name_of(job.device.kind)},
             {formatted("the way of --grad-reduce {}", o.grad_reduce), name_of(job.step.layout.zero.grad_reduce)},
             {"the number of steps", std::to_string(job.max_steps)},
             {"the number of validation samples", formatted("{}", job.val_samples)},
             {"what --train-data holds", checksum(formatted("{}", job.data->checksums))},
             {"what --val-data holds", checksum(formatted("{}", job.data->val_checksums()))},
             {"what --tokenizer holds", checksum(tokenizer)}};
    if (!o.stages.empty())
      found.emplace_back("what --stages holds", checksum(detail::recipe_facts(job.course.recipe()).dump()));
    if (!o.eval_choices.empty()) found.emplace_back("what --eval-choices holds", checksum(read_text(o.eval_choices)));
    if (!model_preset(o.model))
      found.emplace_back("what --model holds", detail::model_checksum(o, !resume && !o.from_scratch));
    if (resume)
      found.emplace_back(formatted("what {} holds", resume->path),
                         checksum(read_text(resume->path + "/manifest.json")));
  });
  require_same(processes, "what was found", found);
}

// Whether a run mixed sources, had stages, or was a branch with another order.
inline bool with_several_orders(const nlohmann::json& recipe) {
  if (!recipe.is_object()) return false;
  const nlohmann::json sources = member(recipe, "sources"), facts = member(recipe, "facts");
  return recipe.contains("origin") || !facts.is_object() || facts.contains("file") || !sources.is_array() ||
         sources.size() != 1 || member(sources[0], "seeds").size() != 1;
}

// The checksums of the files of a run with one source.
inline nlohmann::json recorded_checksums(const nlohmann::json& trainer) {
  const nlohmann::json sources = member(member(trainer, "recipe"), "sources"),
                       shards =
                           sources.is_array() && sources.size() == 1 ? member(sources[0], "shards") : nlohmann::json();
  if (!shards.is_array()) return member(trainer, "data_checksums");  // as older versions recorded them
  nlohmann::json sums = nlohmann::json::array();
  for (const nlohmann::json& shard : shards)  // [name, tokens, checksum]
    sums.push_back(shard.is_array() && shard.size() == 3 ? shard[2] : nlohmann::json());
  return sums;
}

// A notice if the run that wrote this trainer.json took the same samples in the same order as this run will; empty:
// they are others, or come in another order.
inline std::string seen_samples(const nlohmann::json& trainer, const Options& o,
                                const std::vector<std::string>& data_checksums) {
  auto field = [&](const char* name) { return member(trainer, name); };
  const std::optional<int64_t> seen = whole_number(field("data_cursor")), all = whole_number(field("data_samples"));
  const nlohmann::json options = field("options");
  if (!seen || !all || *seen == 0 || *all == 0 || o.overfit_batch || !options.is_object()) return "";
  if (recorded_checksums(trainer) != nlohmann::json(data_checksums) || field("seq_len") != o.seq_len) return "";
  if (!field("seeds").is_null() || with_several_orders(field("recipe"))) return "";
  if (shuffled(options) != o.shuffled() || (o.shuffled() && field("seed") != o.seed)) return "";
  return formatted(
      "was trained on the same data in the same order, {}: this run begins with the same samples, {:.2f} "
      "epochs of them; {} takes them in another order",
      o.shuffled() ? formatted("--seed {}", o.seed) : std::string("that of the files"),
      static_cast<double>(*seen) / static_cast<double>(*all), o.shuffled() ? "another --seed" : "--shuffle");
}

// For a run that begins with the weights of --model.
inline void report_seen_samples(Log& log, const Job& job) {
  const Options& o = job.asked;
  const std::string file = o.model + "/trainer.json";
  if (job.course.recipe().staged || job.data->train.size() > 1 || model_preset(o.model) || o.from_scratch ||
      !path_exists(file))
    return;
  const std::string seen = seen_samples(read_json(file), o, job.data->checksums);
  if (!seen.empty()) log.line(formatted("notice: --model {} {}", o.model, seen));
}

}  // namespace llmc
