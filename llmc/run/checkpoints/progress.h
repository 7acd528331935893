// progress.h: a run's progress apart from its tensors: trainer.json, written to each checkpoint and read on resume.
#pragma once
#include "model/hf_config.h"
#include "model/presets.h"
#include "run/checkpoints/recipe_record.h"
#include "run/job.h"
#include "train/step_statistics.h"

namespace llmc {

struct Progress {
  int64_t done = 0;  // updates made
  OutlierDetector losses, norms;
  NoiseScale noise;
  int64_t skipped_in_a_row = 0;  // of these updates, the last ones that --on-spike skip left out
  int64_t last_made() const { return done - skipped_in_a_row; }
  int64_t rollback_point = 0;  // the step to whose checkpoint a rollback returns; 0: the beginning
  double best_val = std::numeric_limits<double>::infinity();
  int64_t best_step = -1;
  nlohmann::json best_of;            // what was validated, see validation_facts(); as the checkpoint recorded it
  bool validated = false;            // after the last of the updates
  std::string matmul_choices;        // if tuned
  std::string cpu_isa;               // on CPUs, and where the host updates: the instructions of the last updates
  std::vector<float> expert_biases;  // the checkpoint's, for all layers; with --moe-bias-rate
  nlohmann::ordered_json data_changes = nlohmann::ordered_json::array();  // accepted by --data-changed accept

  // After this step came the last of them, behind which no rollback goes; 0: there was none.
  int64_t changed_after() const {
    return data_changes.empty() ? 0 : whole_number(member(data_changes.back(), "step")).value_or(0);
  }
};

// What a validation's loss depends on, besides the weights.
inline nlohmann::json validation_facts(const Job& job) {
  return {{"data", checksum(nlohmann::json(job.data->val_checksums()).dump())},
          {"samples", job.val_samples},
          {"seq_len", job.options.seq_len},
          {"document_begin", job.document_begin ? nlohmann::json(*job.document_begin) : nlohmann::json()}};
}

// trainer.json
inline nlohmann::ordered_json to_json_object(const Progress& progress, const Job& job,
                                             const std::vector<float>& expert_biases) {
  nlohmann::ordered_json best;
  if (std::isfinite(progress.best_val))
    best = {{"step", progress.best_step},
            {"loss", progress.best_val},
            {"of", job.validates() ? validation_facts(job) : progress.best_of}};
  nlohmann::ordered_json trainer = {
      {"format", 1},
      {"step", progress.done},
      {"tokens", job.course.tokens_after(progress.done)},
      {"tokens_per_step", job.step.tokens()},
      {"max_steps", job.max_steps},
      {"learning_rates", {job.course.learning_rate(progress.done), job.course.learning_rate(progress.done + 1)}},
      {"data_cursor", job.course.samples_after(progress.done)},
      {"data_samples", job.data->train.samples()},
      {"data_changes", progress.data_changes},
      {"recipe", recipe_json(job, progress.done)},
      {"val_checksums", job.data->val_checksums()},
      {"seq_len", job.options.seq_len},
      {"document_begin", job.document_begin ? nlohmann::ordered_json(*job.document_begin) : nlohmann::ordered_json()},
      {"seed", job.options.seed},
      {"best_validation", best},
      {"validated", progress.validated},
      {"detectors",
       {{"loss", progress.losses.values()},
        {"grad_norm", progress.norms.values()},
        {"skipped_in_a_row", progress.skipped_in_a_row}}},
      {"rollback_point", progress.rollback_point},
      {"expert_biases", expert_biases},
      {"choices",
       {{"grad_reduce", name_of(job.step.layout.zero.grad_reduce)},
        {"matmul", progress.matmul_choices},
        {"cpu_isa", progress.cpu_isa}}},
      {"layout", detail::layout_text(job.step)},
      {"options", options_json(job.asked)}};
  if (job.step.noise_scale)
    trainer["noise_scale"] = {{"square", progress.noise.square}, {"trace", progress.noise.trace}};
  if (!job.parent.is_null()) trainer["parent"] = job.parent;
  return trainer;
}

// Records the changes that the run resumes with, and returns them.
inline std::vector<DataChange> accept_changed_data(const ResumePoint& from, const Job& job, Progress& progress) {
  for (const DataChange& change : job.data_changes)
    progress.data_changes.push_back({{"step", from.step},
                                     {change.shard.empty() ? "setting" : "shard", change.shard + change.setting},
                                     {"before", change.before},
                                     {"now", change.now}});
  return job.data_changes;
}

// The tokens of the last step before the checkpoint; at the end of a stretch they are not those of the next one.
inline int64_t tokens_per_step_before(const ResumePoint& from, const Job& job) {
  if (job.course.origin().step == from.step && from.step > 0)  // another recipe goes on from here
    return whole_number(member(from.trainer, "tokens_per_step")).value_or(0);
  return job.course.stretches()[job.course.stretch_of(from.step)].tokens_per_step;
}

// The fields of config.json that --rope-theta and --rope-factor change, from one stage to the next.
inline constexpr const char* of_positions[] = {"rope_theta", "rope_scaling", "rope_parameters",
                                               "max_position_embeddings"};
inline bool changes_positions(const Job& job) {
  const auto changes = [](const Options& o) { return o.rope_theta || o.rope_factor; };
  return changes(job.asked) || std::ranges::any_of(job.course.recipe().stages,
                                                   [&](const RecipeStage& stage) { return changes(stage.options); });
}

// Rejects a checkpoint from which the job would not continue the same run.
inline void require_same_run(const ResumePoint& from, const Job& job) {
  const std::string file = from.path + "/trainer.json";
  auto expect = [&](const char* field, int64_t now, const std::string& what) {
    const nlohmann::json then = member(from.trainer, field);
    CHECK(then == now, "{}: \"{}\" is {}, but {} in this run: {}", file, field, then, now, what);
  };
  expect("step", from.step, "the directory was renamed");
  const int64_t tokens_per_step = tokens_per_step_before(from, job);
  expect("tokens_per_step", tokens_per_step,
         formatted("resume with --total-batch-size {}, and a --batch-size that divides it",
                   member(from.trainer, "tokens_per_step")));
  if (job.document_begin && !member(from.trainer, "document_begin").is_null())
    expect("document_begin", *job.document_begin,
           "--mask-documents needs the same end of text: give the same --tokenizer");
  const std::string config = from.path + "/config.json";
  const DType dtype = job.step.precision.weights;
  const nlohmann::json before = config_to_hf(config_from_hf(read_json(config), config), dtype),
                       now = config_to_hf(job.step.model, dtype);
  for (const auto& [field, value] : before.items())
    CHECK(std::ranges::find(special_tokens, field) != std::end(special_tokens) ||
              (changes_positions(job) && std::ranges::find(of_positions, field) != std::end(of_positions)) ||
              member(now, field) == value,
          "{}: \"{}\" is {}, but {} in --model {} now: {}", config, field, value, member(now, field), job.options.model,
          "the model's directory has changed; --resume never and another --out-dir start a new run");
  if (job.former_recipe.is_null())
    expect("data_samples", job.data->train.samples(),
           "--train-data has changed: use the former shards, or another --out-dir");
  if (job.course.origin().step != from.step)
    expect("data_cursor", job.course.samples_after(from.step),
           "the checkpoint is damaged, or was written by another program");
}

// How many steps were planned for the run when it wrote the checkpoint.
inline int64_t recorded_steps(const ResumePoint& from, const Job& job) {
  if (const nlohmann::json steps = member(from.trainer, "max_steps"); !steps.is_null()) {
    const std::optional<int64_t> number = whole_number(steps);
    CHECK(number && *number > 0,
          "{}/trainer.json: \"max_steps\" is {}, expected a number of steps; the file is damaged", from.path, steps);
    return *number;
  }
  // Older versions had only --max-steps.
  const nlohmann::json options = from.trainer.value("options", nlohmann::json::object());
  const nlohmann::json steps = member(options, "--max-steps");
  const std::string text = steps.is_string() ? steps.get<std::string>() : "";
  return text.empty() ? steps_of_an_epoch(job.data->train.samples(), job.samples_per_step)
                      : std::strtoll(text.c_str(), nullptr, 10);
}

// A run that resumes with another plan follows another schedule: reports where the learning rate jumps to.
inline void report_changed_schedule(Log& log, const ResumePoint& from, const Job& job) {
  const int64_t before = recorded_steps(from, job);
  const nlohmann::json then = member(from.trainer, "learning_rates");
  if (from.step >= job.max_steps) return;
  if (then.is_null()) {  // an older version did not record them
    if (before != job.max_steps)
      log.line(formatted("notice: {} steps instead of {}: the learning rate is {:.2e} at step {}", job.max_steps,
                         before, job.course.learning_rate(from.step + 1), from.step + 1));
    return;
  }
  CHECK(then.is_array() && then.size() == 2 && then[0].is_number() && (then[1].is_number() || then[1].is_null()),
        "{}/trainer.json: \"learning_rates\" is {}, expected those of two steps; the file is damaged", from.path, then);
  const double last = then[0], next = job.course.learning_rate(from.step + 1);
  if (before == job.max_steps && then[1] == next) return;
  log.line(formatted(
      "notice: {}the learning rate was {:.2e} at step {} and is {:.2e} at step {}, on its way to {:.2e} "
      "({})",
      before == job.max_steps ? "" : formatted("{} steps instead of {}: ", job.max_steps, before), last, from.step,
      next, from.step + 1, job.course.learning_rate(job.max_steps), job.course.stretches().back().options.lr_schedule));
}

inline Progress progress_at(const ResumePoint& from) {
  Progress progress;
  progress.done = from.step;
  const nlohmann::json detectors = member(from.trainer, "detectors"), best = member(from.trainer, "best_validation");
  auto detector = [&](const char* field) {
    const nlohmann::json values = member(detectors, field);
    CHECK(values.is_array() && values.size() <= OutlierDetector::window &&
              std::all_of(values.begin(), values.end(), [](auto& value) { return value.is_number(); }),
          "{}/trainer.json: \"{}\" of \"detectors\" is {}, expected at most {} numbers; the file is damaged", from.path,
          field, values, OutlierDetector::window);
    return OutlierDetector(values.get<std::vector<double>>());
  };
  progress.losses = detector("loss");
  progress.norms = detector("grad_norm");
  // An older version has saved neither of these numbers.
  const auto count = [&](const char* name, const nlohmann::json& in, int64_t absent, int64_t most) {
    const nlohmann::json value = member(in, name);
    const std::optional<int64_t> n = value.is_null() ? absent : whole_number(value);
    CHECK(n && *n <= most, "{}/trainer.json: \"{}\" is {}, expected a number from 0 to {}; the file is damaged",
          from.path, name, value, most);
    return *n;
  };
  progress.skipped_in_a_row = count("skipped_in_a_row", detectors, 0, OutlierDetector::window);
  progress.rollback_point = count("rollback_point", from.trainer, from.step, from.step);
  if (const nlohmann::json noise = member(from.trainer, "noise_scale"); !noise.is_null()) {
    CHECK(member(noise, "square").is_number() && member(noise, "trace").is_number(),
          "{}/trainer.json: \"noise_scale\" is {}, expected a square and a trace; the file is damaged", from.path,
          noise);
    progress.noise = {noise["square"], noise["trace"]};
  }
  if (!best.is_null()) {
    const std::optional<int64_t> step = whole_number(member(best, "step"));
    CHECK(step && member(best, "loss").is_number(),
          "{}/trainer.json: \"best_validation\" is {}, expected a step and a loss; the file is damaged", from.path,
          best);
    progress.best_step = *step;
    progress.best_val = best["loss"];
    progress.best_of = member(best, "of");
    CHECK(progress.best_of.is_null() || progress.best_of.is_object(),
          "{}/trainer.json: \"of\" of \"best_validation\" is {}, expected an object; the file is damaged", from.path,
          progress.best_of);
  }
  if (const nlohmann::json val = member(from.trainer, "val_checksums");  // as older versions recorded it
      progress.best_of.is_null() && val.is_array() && !val.empty())
    progress.best_of = {{"data", checksum(val.dump())}};
  progress.expert_biases = recorded_expert_biases(from.trainer, from.path + "/trainer.json");
  progress.data_changes = from.trainer.value("data_changes", nlohmann::json::array());
  CHECK(progress.data_changes.is_array(),
        "{}/trainer.json: \"data_changes\" is {}, expected a list; the file is damaged", from.path,
        progress.data_changes);
  if (const nlohmann::json choices = from.trainer.value("choices", nlohmann::json::object()); choices.is_object())
    for (const auto& [name, choice] :
         {std::pair{"matmul", &progress.matmul_choices}, std::pair{"cpu_isa", &progress.cpu_isa}})
      if (const nlohmann::json made = member(choices, name); made.is_string()) *choice = made;
  return progress;
}

// What differs between what was validated and what this job validates; empty: nothing.
inline std::string changed_validation(const nlohmann::json& before, const Job& job) {
  const nlohmann::json now = validation_facts(job);
  std::string changes;
  for (const auto& [name, what] : {std::pair{"data", "--val-data has changed"},
                                   {"samples", "a validation has another number of samples"},
                                   {"seq_len", "a validation has sequences of another length"},
                                   {"document_begin", "--mask-documents has changed"}})
    if (before.contains(name) && before[name] != now[name])
      changes += (changes.empty() ? "" : ", ") + std::string(what);
  return changes;
}

// The progress in a checkpoint from which the job continues the same run, as require_same_run() has seen.
inline Progress resumed_progress(const ResumePoint& from, const Job& job, Log& log) {
  Progress progress = progress_at(from);
  if (!job.former_recipe.is_null())
    progress.data_changes.push_back({{"step", from.step}, {"former_recipe", job.former_recipe}});
  const std::string changed = job.validates() ? changed_validation(progress.best_of, job) : "";
  if (!changed.empty())
    log.line(
        formatted("notice: {}: validation losses cannot be compared with the earlier ones, and the best of them "
                  "is sought anew",
                  changed));
  if (from.begin == Begin::branch || !changed.empty()) {  // a branch has its own best validation
    progress.best_val = Progress().best_val;
    progress.best_step = Progress().best_step;
  }
  if (job.begins_stage(from.step)) {  // its losses may be others
    progress.losses = progress.norms = OutlierDetector();
    progress.skipped_in_a_row = 0;
  }
  const ModelConfig& model = job.step.model;
  const int64_t expected = job.step.experts.bias_rate > 0 ? model.sparse_layers() * model.experts.count : 0;
  CHECK(
      std::ssize(progress.expert_biases) == expected,
      "{}/trainer.json: \"expert_biases\" has {} numbers, expected {}: resume with the --moe-bias-rate of the run; if "
      "it is the same, the file is damaged",
      from.path, progress.expert_biases.size(), expected);
  return progress;
}

}  // namespace llmc
