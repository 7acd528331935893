// job.h: a training run with every choice made: all is chosen, read and validated here, before anything is created.
#pragma once
#include "core/clock.h"
#include "core/log.h"
#include "core/signals.h"
#include "run/checkpoints/checkpoint.h"
#include "run/checkpoints/run_dir.h"
#include "run/checkpoints/run_record.h"
#include "run/length.h"
#include "run/options/options.h"
#include "run/plan/report_plan.h"
#include "run/recipe/run_data.h"
#include "run/requirements.h"
#include "run/setup.h"
#include "run/validation.h"
#include "train/choices.h"

namespace llmc {

// The steps of one stretch of a run (recipe/course.h); a run without stages has one.
struct Job {
  Options asked;                  // the run's
  Options options;                // the stretch's
  Clock::time_point begin;        // when the process began
  std::shared_ptr<RunData> data;  // of all stretches
  Course course;
  size_t number;               // of the stretch
  Device device, rank_device;  // the process's, and its first rank's
  Backend backend;             // the transport between ranks
  StepConfig step;
  std::unique_ptr<Tokenizer> tokenizer;
  std::map<std::string, std::string> tokenizer_files;  // read once, so that all checkpoints save the same
  std::optional<ChoiceSet> choices;
  std::optional<int32_t> document_begin;  // the token that begins a document, for --mask-documents
  nlohmann::json parent;                  // a branch's parent, see parent_of()
  int64_t samples_per_step, max_steps;    // max_steps: of the run
  std::vector<int64_t> val_samples;       // of each validation set
  Plan plan;
  std::vector<DataChange> data_changes;  // since the checkpoint that the run resumes from
  nlohmann::json former_recipe;          // of the checkpoint that the run resumes from, if it was another one
  std::vector<Rollback> rollbacks = {};  // of the run so far
  std::string resumed_from = {};         // the checkpoint's path; empty: none

  // The first stretch of a new run.
  Job(const Options& o, Clock::time_point process_begin)
      : Job(o, process_begin, (choose_device(o), read_recipe(o))) {}  // a device that is not here is the first error
  Job(const Options& o, Clock::time_point process_begin, std::shared_ptr<RunData> run_data, Course run_course,
      size_t stretch_number)
      : asked(o),
        options(run_course.stretches()[stretch_number].options),
        begin(process_begin),
        data(std::move(run_data)),
        course(std::move(run_course)),
        number(stretch_number),
        device(choose_device(options)),
        rank_device(first_rank_device(device, options)),
        backend(choose_backend(options, rank_device)),
        step(in_stage([&] { return with_token_slices(choose_step(options), options, device); })),
        tokenizer(choose_tokenizer(options, step.model)),
        tokenizer_files(llmc::tokenizer_files(*tokenizer, step.model)),
        samples_per_step(step.tokens() / options.seq_len),
        max_steps(course.steps()) {
    options.shuffle = o.shuffle;
    asked.usual_aux_loss = options.usual_aux_loss = usual_aux_loss(step.model);
    step.model.special_tokens = choose_special_tokens(o, *tokenizer, step.model);
    prompt_tokens(*tokenizer, o.prompt, step.model);  // rejects a bad --prompt now, not at the first sample
    weight_decay(options, step.tokens());             // rejects a bad --weight-decay-tokens
    cut_validation_data();
    for (const ValidationSet& set : data->val)
      val_samples.push_back(samples_of_steps(set.shards, o.val_steps.value_or(usual_val_steps), samples_per_step));
    if (!o.eval_choices.empty()) {
      CHECK(validates(), "--eval-choices runs with every validation: it needs --val-data and --val-every");
      choices.emplace(o.eval_choices, step.model.vocab_size, options.seq_len);
    }
    if (options.mask_documents)
      document_begin = choose_document_begin("--mask-documents", options, *tokenizer, step.model);
    CHECK(!o.keep_best || validates(), "--keep-best needs --val-data and --val-every");
    require_gpu_for("--log-gpu-every", o.log_gpu_every > 0, device, o);
    require_gpu_for("--tf32", o.tf32, device, o);
    require_gpu_for("--tune-matmul", o.tune_matmul, device, o);
    in_stage([&] {
      require_cudnn_can(step, device, options);
      require_gelu_can(step, device, options);
      require_residual_can(step, device, options);
      require_fp8_can(step, device);
      require_norms_can(step, rank_device);
      plan = plan_run(options, step, rank_device, free_memory_of_rank(o));
    });
  }

  const Stretch& stretch() const { return course.stretches()[number]; }
  int64_t last_step() const { return stretch().last_step(); }
  // Whether a stage, or a recipe that takes the place of another one, begins after this step.
  bool begins_stage(int64_t done) const {
    if (done != stretch().first_step || done == 0) return false;
    return number == 0 ? course.origin().step == done : course.stretches()[number - 1].stage != stretch().stage;
  }
  bool validates() const { return !data->val.empty() && asked.val_every > 0; }

  // Whether the run has no checkpoint of its own yet, as far as the names in its directory say.
  bool is_new() const {
    std::error_code none;
    const Options& o = asked;
    const bool begun = std::filesystem::is_directory(o.out_dir, none) && !checkpoint_steps(o.out_dir).empty();
    return o.restart || o.resume == "never" || (o.resume == "auto" && !begun);
  }
  // Rejects a course that ends within its warm-up or reads a source too often. A run that goes on from a checkpoint has
  // this course only from there on, so that its first Job says nothing about it.
  void require_length() const {
    const LrSchedule& rates = stretch().schedule;
    const char* const unit = stretch().per_step == 1 ? "steps" : "tokens";
    CHECK(rates.warmup <= rates.length, "--warmup-{} exceeds the {} {} of the run ({})",
          asked.warmup_tokens ? formatted("tokens {}, or {} {},", asked.warmup_tokens->text, rates.warmup, unit)
                              : formatted("steps {}", asked.warmup_steps),
          rates.length, unit, length_text(asked));
    course.require_allowed_epochs();
  }
  // Rejects a new run, of any of whose stretches a step needs more memory than there is.
  void require_memory_of_new_run() const {
    if (!is_new()) return;  // resume() checks the memory: the checkpoint's recorded choices may need less
    require_memory(Begun::no);
    require_later_stretches();
  }
  // Rejects a run that a later stretch would end, because it cannot be run or needs more memory than there is.
  void require_later_stretches() const {
    for (size_t later = number + 1; later < course.stretches().size(); ++later) {
      const Options& then = course.stretches()[later].options;
      const Options& before = course.stretches()[later - 1].options;
      if (then.seq_len == before.seq_len && then.batch_size == before.batch_size &&
          then.total_batch_size == before.total_batch_size && then.recompute == before.recompute &&
          then.head_chunks == before.head_chunks && then.mask_documents == before.mask_documents)
        continue;
      Job(asked, begin, data, course, later).require_memory(Begun::no);
    }
    cut_validation_data();
  }

  ValidationInputs validation() const {
    std::vector<ValidationInputs::Set> sets;
    for (size_t i = 0; i < data->val.size(); ++i)
      sets.push_back({data->val[i].name, &data->val[i].shards, val_samples[i]});
    return {.sets = std::move(sets),
            .shuffled = options.shuffled(),
            .choices = choices ? &*choices : nullptr,
            .document_begin = document_begin};
  }
  // --prompt, or a text for a first try that the tokenizer can encode; empty: it cannot, or the tokenizer is unknown.
  std::string example_prompt() const {
    const std::string usual = "Once upon a time";
    if (!options.prompt.empty() || !knows_tokens(options, *tokenizer, step.model)) return options.prompt;
    try {
      prompt_tokens(*tokenizer, usual, step.model);
      return usual;
    } catch (const Error&) {
      return "";
    }
  }
  int64_t checkpoint_bytes() const { return llmc::checkpoint_bytes(step.model, step.precision, step.layout.zero); }
  bool takes_long_to_read() const { return checkpoint_bytes() >= int64_t{1} << 30; }  // seconds, even from a fast disk
  double flops_per_step() const {
    return training_flops_per_token(step.model, options.seq_len) * static_cast<double>(step.tokens());
  }

  // With --grad-reduce auto, a resumed run reduces gradients as before, because the other way rounds differently; if
  // that does not fit into memory, it follows the ZeRO stage.
  void resume(const ResumePoint& from, Log& log) {
    const nlohmann::json recorded = member(member(from.trainer, "choices"), "grad_reduce");
    const auto before = recorded.is_string() ? from_name<GradReduce>(recorded.get<std::string>()) : std::nullopt;
    CHECK(recorded.is_null() || before,
          "{}/trainer.json: \"grad_reduce\" of \"choices\" is {}, expected \"step\" or \"micro\"; the file is damaged",
          from.path, recorded);
    if (before && step.layout.zero.reduce_by_stage && *before != step.layout.zero.grad_reduce) {
      CHECK(!step.layout.zero.offload.has(Offloaded::gradients),
            "--offload gradients adds them after every micro-batch, and this run began with --grad-reduce {}, which "
            "rounds differently: leave out gradients, or give --grad-reduce micro",
            *before);
      StepConfig as_before = step;
      as_before.layout.zero.grad_reduce = *before;
      const Plan planned = plan_run(options, as_before, rank_device, free_memory_of_rank(options));
      if (fits(planned, memory_limit(options, rank_device))) step = as_before, plan = planned;
      else
        log.line(
            formatted("notice: --grad-reduce {}, with which the run began, needs {}, which does not fit: it is now {}, "
                      "which rounds differently",
                      *before, human_bytes(planned.total_bytes()), step.layout.zero.grad_reduce));
    }
    require_memory(Begun::yes);
    parent = parent_of(from), resumed_from = from.path;
  }

 private:
  template <class F>
  std::invoke_result_t<F> in_stage(F&& f) const {
    return llmc::in_stage(course.recipe().stages[stretch().stage], std::forward<F>(f));
  }
  void require_memory(Begun begun) const {
    in_stage([&] { llmc::require_memory(options, step, plan, rank_device, begun); });
  }
  void cut_validation_data() const {
    for (ValidationSet& set : data->val)
      CHECK(set.shards.cut(options.seq_len) > 0, "{}: no sample of {} + 1 tokens, the --seq-len of a stage",
            val_option(set.name), options.seq_len);
  }
  Job(const Options& o, Clock::time_point process_begin, const Recipe& recipe)
      : Job(o, process_begin, recipe, std::make_shared<RunData>(o, recipe)) {}
  Job(const Options& o, Clock::time_point process_begin, const Recipe& recipe, const std::shared_ptr<RunData>& run_data)
      : Job(o, process_begin, run_data, Course(recipe, run_data->train.epoch_tokens()), 0) {
    const bool may_go_on = !is_new() || !o.branch_from.empty() ||
                           (!o.restart && (!o.checkpoint_local.empty() || path_exists(o.out_dir + "/run.json")));
    if (!may_go_on) require_length();  // otherwise find_start() knows whether it does
    require_memory_of_new_run();
  }
};

}  // namespace llmc
