// job.h: a training run with every choice made: all is chosen, read and validated here, before anything is created.
#pragma once
#include <limits>
#include <map>
#include <memory>
#include <nlohmann/json.hpp>
#include <optional>
#include <string>

#include "core/log.h"
#include "core/signals.h"
#include "data/dataloader.h"
#include "run/checkpoints/checkpoint.h"
#include "run/checkpoints/run_dir.h"
#include "run/length.h"
#include "run/options/options.h"
#include "run/plan/report_plan.h"
#include "run/setup.h"
#include "run/validation.h"
#include "train/choices.h"

namespace llmc {

struct Job {
  Options options;
  StopCondition::Clock::time_point begin;  // when the process began
  Device device, rank_device;              // the process's, and its first rank's
  Backend backend;                         // the transport between ranks
  StepConfig step;
  std::unique_ptr<Tokenizer> tokenizer;
  std::map<std::string, std::string> tokenizer_files;  // read once, so that all checkpoints save the same
  TokenShards train;
  std::vector<std::string> data_checksums;  // of the training shards
  std::optional<TokenShards> val;
  std::vector<std::string> val_checksums;
  std::optional<ChoiceSet> choices;
  std::optional<int32_t> document_begin;  // the token that begins a document, for --mask-documents
  nlohmann::json parent;                  // a branch's parent, see parent_of()
  uint64_t first_seed;                    // for the order of the samples
  std::vector<Reseed> reseeds;            // made by branches
  int64_t samples_per_step, max_steps, val_samples = 0;
  Plan plan;

  Job(const Options& o, StopCondition::Clock::time_point process_begin)
      : options(o),
        begin(process_begin),
        device(choose_device(o)),
        rank_device(first_rank_device(device, o)),
        backend(choose_backend(o, rank_device)),
        step(with_token_slices(choose_step(o), o, device)),
        tokenizer(choose_tokenizer(o, step.model)),
        tokenizer_files(llmc::tokenizer_files(*tokenizer, step.model)),
        train(o.train_data, o.seq_len),
        data_checksums(train.checksums()),
        first_seed(static_cast<uint64_t>(o.seed)),
        samples_per_step(step.tokens() / o.seq_len),
        max_steps(choose_steps(o, step.tokens(), steps_of_an_epoch())) {
    options.usual_aux_loss = usual_aux_loss(step.model);
    step.model.special_tokens = choose_special_tokens(o, *tokenizer, step.model);
    prompt_tokens(*tokenizer, o.prompt, step.model);  // rejects a bad --prompt now, not at the first sample
    CHECK(o.warmup_steps <= max_steps, "--warmup-steps {} exceeds the {} steps of the run ({})", o.warmup_steps,
          max_steps, length_text(o));
    if (!o.val_data.empty()) {
      val.emplace(o.val_data, o.seq_len, "--val-data");
      val_checksums = val->checksums();
      val_samples = samples_of_steps(*val, o.val_steps.value_or(usual_val_steps), samples_per_step);
    }
    if (!o.eval_choices.empty()) {
      CHECK(val && o.val_every > 0, "--eval-choices runs with every validation: it needs --val-data and --val-every");
      choices.emplace(o.eval_choices, step.model.vocab_size, o.seq_len);
    }
    if (o.mask_documents) document_begin = choose_document_begin(o, *tokenizer, step.model);
    CHECK(!o.keep_best || (val && o.val_every > 0), "--keep-best needs --val-data and --val-every");
    require_gpu_for("--log-gpu-every", o.log_gpu_every > 0, device, o);
    require_gpu_for("--tf32", o.tf32, device, o);
    require_gpu_for("--tune-matmul", o.tune_matmul, device, o);
    require_cudnn_can(step, device, o);
    plan = make_plan(step, rank_device);
    // When resuming, resume() checks the memory: the checkpoint's recorded choices may need less.
    std::error_code none;
    const bool begun = std::filesystem::is_directory(o.out_dir, none) && !checkpoint_steps(o.out_dir).empty();
    if (o.restart || o.resume == "never" || (o.resume == "auto" && !begun)) {
      require_memory(o, step, plan, rank_device);
      if (o.branch_from.empty()) require_whole_weights(o);
    }
  }

  ValidationInputs validation() const {
    return {.data = val ? &*val : nullptr,
            .samples = val_samples,
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
  int64_t steps_of_an_epoch() const { return llmc::steps_of_an_epoch(train.samples(), samples_per_step); }
  double flops_per_step() const {
    return training_flops_per_token(step.model, options.seq_len) * static_cast<double>(step.tokens());
  }

  // With --grad-reduce auto, a resumed run reduces gradients as before, because the other way rounds differently; if
  // that does not fit into memory, it follows the ZeRO stage.
  void resume(const ResumePoint& from, Log& log) {
    const nlohmann::json choices = from.trainer.value("choices", nlohmann::json::object());
    const nlohmann::json recorded =
        choices.is_object() ? choices.value("grad_reduce", nlohmann::json()) : nlohmann::json();
    CHECK(recorded.is_null() || recorded == name_of(GradReduce::step) || recorded == name_of(GradReduce::micro),
          "{}/trainer.json: \"grad_reduce\" of \"choices\" is {}, expected \"step\" or \"micro\"; the file is damaged",
          from.path, recorded);
    if (!recorded.is_null() && step.layout.zero.reduce_by_stage) {
      StepConfig as_before = step;
      as_before.layout.zero.grad_reduce = *from_name<GradReduce>(recorded.get<std::string>());
      if (as_before.layout.zero.grad_reduce != step.layout.zero.grad_reduce) {
        const Plan planned = make_plan(as_before, rank_device);
        if (fits(planned, memory_limit(options, rank_device))) step = as_before, plan = planned;
        else
          log.line(formatted(
              "notice: --grad-reduce {}, with which the run began, needs {}, which does not fit: "
              "it is now {}, which rounds differently",
              as_before.layout.zero.grad_reduce, human_bytes(planned.total_bytes()), step.layout.zero.grad_reduce));
      }
    }
    require_memory(options, step, plan, rank_device, Begun::yes);
    parent = parent_of(from);
    resume_order(from);
  }

  // The samples keep the order of the checkpoint's run; a branch may continue with another seed.
  void resume_order(const ResumePoint& from) {
    const nlohmann::json seeds = from.trainer.value("seeds", nlohmann::json());
    if (seeds.is_null()) {  // one seed from the beginning
      if (const auto first = whole_number(from.trainer.value("seed", nlohmann::json())))
        first_seed = static_cast<uint64_t>(*first);
    } else {
      const auto is_seed = [](const nlohmann::json& seed) {
        return seed.is_array() && seed.size() == 2 && whole_number(seed[0]) && whole_number(seed[1]);
      };
      CHECK(seeds.is_array() && !seeds.empty() && std::all_of(seeds.begin(), seeds.end(), is_seed) &&
                std::is_sorted(seeds.begin(), seeds.end()) && seeds[0][0] == 0,
            "{}/trainer.json: \"seeds\" is {}, expected [POSITION, SEED] in ascending order; the file is damaged",
            from.path, seeds);
      first_seed = seeds[0][1].get<uint64_t>();
      for (size_t i = 1; i < seeds.size(); ++i)
        reseeds.push_back({seeds[i][0].get<int64_t>(), seeds[i][1].get<uint64_t>()});
    }
    const uint64_t now = static_cast<uint64_t>(options.seed);
    const uint64_t before = reseeds.empty() ? first_seed : reseeds.back().seed;
    CHECK(before == now || from.begin == Begin::branch,
          "{}/trainer.json: the last seed is {}, but --seed {}; the file is damaged", from.path, before, now);
    if (before != now) reseeds.push_back({from.step * samples_per_step, now});
  }
};

}  // namespace llmc
