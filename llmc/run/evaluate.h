// evaluate.h: --evaluate: the validation of training (validation.h) alone, on a model that is only read, in any layout.
#pragma once
#include <chrono>
#include <numbers>

#include "comm/group_check.h"
#include "core/clock.h"
#include "run/checkpoints/shared_check.h"
#include "run/plan/describe.h"
#include "run/plan/report_plan.h"
#include "run/processes.h"
#include "run/recipe/run_data.h"
#include "run/requirements.h"
#include "run/start.h"
#include "run/validation.h"
#include "shard/whole_check.h"

namespace llmc {

// The facts that an evaluation takes from trainer.json of our checkpoints; other models have none.
struct TrainedRecord {
  std::optional<int64_t> step, samples_per_step;  // step: none of a mean
  nlohmann::json options;                         // of the run that wrote the checkpoint
  size_t mean_of = 0;                             // models, by --average; 0: it is none
};
inline TrainedRecord trained_record(const std::string& model) {
  const std::string file = model + "/trainer.json";
  if (!path_exists(file)) return {};
  const nlohmann::json json = read_json(file);
  const auto number = [&](const char* field) { return whole_number(member(json, field)); };
  const auto tokens = number("tokens_per_step"), length = number("seq_len");
  CHECK(number("step") && tokens && length && *length > 0 && *tokens >= *length,
        "{}: \"step\", \"tokens_per_step\" and \"seq_len\" are not those of a run; the checkpoint is damaged", file);
  const size_t mean_of = member(json, "average_of").size();
  return {mean_of > 0 ? std::nullopt : number("step"), *tokens / *length,
          json.value("options", nlohmann::json::object()), mean_of};
}

// The number of bytes of text that the targets of these samples stand for; special tokens count as none. None: some
// target is not a token of the tokenizer. Tokens are decoded one by one: a character may be spread over several.
inline std::optional<int64_t> target_bytes(const ValidationInputs& inputs, const Tokenizer& tokenizer,
                                           int64_t vocab_size) {
  constexpr int64_t unknown = -1;
  const auto bytes_of = [&](TextPart part) {
    std::vector<int64_t> all;
    for (int64_t token = 0; token < vocab_size; ++token)
      all.push_back(tokenizer.bytes_of(static_cast<int32_t>(token), part).value_or(unknown));
    return all;
  };
  const std::vector<int64_t> of_first = bytes_of(TextPart::beginning), of_others = bytes_of(TextPart::continuation);
  int64_t bytes = 0;
  std::vector<int32_t> sample;
  for (const ValidationInputs::Set& set : inputs.sets) {
    DataLoader loader = inputs.loader(set, vocab_size);
    for (int64_t i = 0; i < set.samples; ++i) {
      set.shards->read_sample(loader.sample_at(i), vocab_size, sample);
      for (size_t t = 1; t < sample.size(); ++t) {
        const auto& of_tokens = sample[t - 1] == tokenizer.end_of_text() ? of_first : of_others;
        const int64_t of_token = of_tokens[static_cast<size_t>(sample[t])];
        if (of_token == unknown) return std::nullopt;
        bytes += of_token;
      }
    }
  }
  return bytes;
}

// An evaluation with every choice made: everything is chosen, read and checked here.
struct Evaluation {
  Options options;
  Device device, rank_device;
  Backend backend;
  TrainedRecord trained;
  StepConfig step;
  std::unique_ptr<Tokenizer> tokenizer;
  std::vector<ValidationSet> data;
  std::optional<ChoiceSet> choices;
  ValidationInputs inputs;
  Plan plan;

  explicit Evaluation(const Options& o)
      : options(o),
        device(choose_device(o)),
        rank_device(first_rank_device(device, o)),
        backend(choose_backend(o, rank_device)),
        trained(trained_record(o.model)),
        step(forward_only_step(o)),
        tokenizer(choose_tokenizer(o, step.model)) {
    const int64_t per_step = o.total_batch_size ? *o.total_batch_size / o.seq_len
                                                : trained.samples_per_step.value_or(step.tokens() / o.seq_len);
    data = open_validation_sets(o, o.seq_len);
    for (const ValidationSet& set : data)
      inputs.sets.push_back(
          {set.name, &set.shards,
           o.val_steps ? samples_of_steps(set.shards, *o.val_steps, per_step) : set.shards.samples()});
    if (!o.eval_choices.empty()) choices.emplace(o.eval_choices, step.model.vocab_size, o.seq_len);
    if (choices) inputs.choices = &*choices;
    inputs.shuffled = o.shuffled();
    if (o.mask_documents) inputs.document_begin = choose_document_begin("--mask-documents", o, *tokenizer, step.model);
    require_gpu_for("--tf32", o.tf32, device, o);
    require_cudnn_can(step, device, o);
    require_gelu_can(step, device, o);
    require_residual_can(step, device, o);
    plan = make_plan(step, rank_device);
    require_memory(o, step, plan, rank_device);
  }
  Evaluation(const Evaluation&) = delete;

  int64_t targets() const { return inputs.samples() * options.seq_len; }

  // Options whose values, in the run that wrote the checkpoint, made its own validations give other numbers.
  std::vector<std::string> differences() const {
    std::vector<std::string> found;
    int64_t all = 0;
    for (const ValidationSet& set : data) all += set.shards.samples();
    for (const OptionText& now : option_texts(options)) {
      const bool matters = now.name == "--seq-len" || now.name == "--mask-documents" || now.name == "--dtype" ||
                           (now.name == "--shuffle" && inputs.samples() < all);
      const nlohmann::json then = member(trained.options, now.name);
      const auto value = [&](const std::string& text) {
        return now.name == "--shuffle" && text.empty() ? "true" : text;
      };
      if (matters && then.is_string() && value(then) != value(now.text))
        found.push_back(formatted("{} {}", now.name, value(then)));
    }
    return found;
  }

 private:
  // Weights alone, one micro-batch per reader at a time.
  StepConfig forward_only_step(const Options& o) const {
    Options asked = o;
    asked.total_batch_size.reset();  // it may state the size of a validation
    StepConfig forward = choose_step(asked);
    forward.layout.zero.holds = Holds::weights;
    forward.layout.zero.offload = {};
    forward.generates = false;
    forward.recompute = Recompute::block;  // there is no backward
    take_trained_biases(forward, o.model);
    return forward;
  }
};

// The results of an evaluation.
struct Evaluated {
  ValLine line = {};                  // its losses: NaN without data
  std::optional<int64_t> bytes = {};  // of the targets
  double seconds = 0;

  // The total loss of so many targets, in bits, over the bytes of their text.
  std::optional<double> bits_per_byte(int64_t targets) const {
    if (bytes.value_or(0) == 0) return std::nullopt;
    return line.loss / std::numbers::ln2 * static_cast<double>(targets) / static_cast<double>(*bytes);
  }
};

namespace detail {

inline void report_evaluation_header(Log& log, const Evaluation& job) {
  const Options& o = job.options;
  Rows rows = {
      {"machine", formatted("{}: {}", host_name(), describe(job.device))},
      {"model",
       formatted("{}: {} parameters{}{}", o.model, human_count(count_parameters(parameter_table(job.step.model))),
                 job.trained.step ? formatted(", after step {}", *job.trained.step) : "",
                 job.trained.mean_of > 0 ? formatted(", the mean of {} models", job.trained.mean_of) : "")},
      {"layout", formatted("{}, {}", o.dtype, layout_text(job.step))}};
  for (size_t i = 0; i < job.data.size(); ++i)
    rows.emplace_back(
        "validation data",
        formatted("{}: {} of {} samples of {} tokens{}", job.data[i].name.empty() ? o.val_data : o.val.items[i],
                  human_count(job.inputs.sets[i].samples), human_count(job.data[i].shards.samples()), o.seq_len,
                  o.mask_documents ? ", documents masked from each other" : ""));
  if (job.choices)
    rows.emplace_back("multiple choice",
                      formatted("{}: {} questions", o.eval_choices, human_count(job.choices->questions())));
  rows.emplace_back("memory", formatted("{} per rank", human_bytes(job.plan.total_bytes())));
  log.table("train_gpt " TRAIN_GPT_GIT_HASH ": evaluation", rows);
  if (const std::vector<std::string> differences = job.differences(); !differences.empty())
    log.line(formatted(
        "notice: the run that wrote this model had {}: its validation losses are comparable only with these settings",
        either(differences, "and")));
}

inline void report_evaluated(Log& log, const Evaluation& job, const Evaluated& found) {
  Rows rows;
  if (!job.data.empty()) {
    rows.emplace_back("loss", formatted("{:.4f} nats per token", found.line.loss));
    for (const auto& [name, loss] : found.line.sets)
      rows.emplace_back("loss of " + name, formatted("{:.4f} nats per token", loss));
    rows.emplace_back("perplexity", formatted("{:.3f}", std::exp(found.line.loss)));
    const auto bits = found.bits_per_byte(job.targets());
    rows.emplace_back("bits per byte", bits ? formatted("{:.4f}, of {} bytes that {} targets decode to", *bits,
                                                        human_count(*found.bytes), human_count(job.targets()))
                                       : found.bytes
                                           ? std::string("n/a: the targets decode to no bytes")
                                           : std::string("n/a: no tokenizer is known for these tokens; name it with "
                                                         "--tokenizer"));
  }
  if (found.line.choices) rows.emplace_back("choices_acc", formatted("{:.2f}%", 100 * *found.line.choices));
  if (found.line.choices_normalized)
    rows.emplace_back("choices_acc_norm", formatted("{:.2f}%", 100 * *found.line.choices_normalized));
  rows.emplace_back("time", human_duration(found.seconds));
  log.table("evaluated", rows);
}

// One JSON object; numbers round-trip, and non-finite ones are null.
inline std::string to_json(const Evaluation& job, const Evaluated& found) {
  nlohmann::ordered_json json = {{"model", job.options.model}};
  if (job.trained.step) json["step"] = *job.trained.step;
  if (job.trained.mean_of > 0) json["mean_of"] = job.trained.mean_of;
  if (!job.data.empty()) {
    json.update({{"loss", found.line.loss},
                 {"perplexity", std::exp(found.line.loss)},
                 {"samples", job.inputs.samples()},
                 {"seq_len", job.options.seq_len},
                 {"targets", job.targets()}});
    for (const auto& [name, loss] : found.line.sets) json["losses"][name] = loss;
    if (const auto bits = found.bits_per_byte(job.targets()))
      json["bits_per_byte"] = *bits, json["bytes"] = *found.bytes;
  }
  if (found.line.choices) json["questions"] = job.choices->questions(), json["choices_acc"] = *found.line.choices;
  if (found.line.choices_normalized) json["choices_acc_norm"] = *found.line.choices_normalized;
  json["seconds"] = found.seconds;
  return json.dump();
}

inline Evaluated evaluate_on_rank(const Evaluation& job, World& world, int rank, Log& log) {
  const Options& o = job.options;
  Run run(job.step, job.plan, rank_device(job.device, o.place, rank - o.place.first_rank()), world, rank);
  check_groups(run.groups, run.stream, [](int r) { return formatted("rank {}", r); });
  const StepConfig& step = job.step;
  check_whole_model(run.trainer.state(), part_of(parameter_table(step.model), step.layout.tensor, 0), step.model.tied,
                    world.mesh());
  WorkProgress progress(log);
  initialise(run, o, progress.of_bytes("loading"));
  const ValidationHooks hooks{[] {}, shows_micro_batches(progress)};
  Validation validation(run.trainer, run.groups, job.inputs);
  const auto begin = Clock::now();
  Evaluated found{.line = validation.line(0, hooks)};
  found.seconds = seconds_since(begin);
  return found;
}

}  // namespace detail

// Checks that all processes chose and read the same from what their hosts have.
inline void require_same_evaluation(const Processes& processes, const Evaluation& job) {
  if (processes.alone()) return;
  const Options& o = job.options;
  NamedValues found;
  together(processes, "files", [&] {
    found = {{formatted("the transport, of --comm {}", o.comm), name_of(job.backend)},
             {formatted("the device, of --device {}", o.device), name_of(job.device.kind)},
             {"what --model holds", detail::model_checksum(o, true)},
             {"the number of validation samples", formatted("{}", job.inputs.samples())}};
    for (const ValidationSet& set : job.data)
      found.emplace_back(formatted("what {} holds", val_option(set.name)), checksum(formatted("{}", set.checksums)));
    if (job.choices) found.emplace_back("what --eval-choices holds", checksum(read_text(o.eval_choices)));
  });
  require_same(processes, "what was found", found);
}

// Called by all processes; the first one prints. Nothing is written.
inline void run_evaluate(const Options& o, const Processes& processes) {
  const bool first = processes.process() == 0;
  Log log = first && !o.json ? make_log(o) : Log::silent();
  std::optional<Evaluation> made;
  together(processes, "options", [&] { made.emplace(o); });
  check_together(processes, "--model", "", log, [&](const CheckpointCheck& check) { require_whole_weights(o, check); });
  const Evaluation& job = *made;
  require_same_evaluation(processes, job);
  detail::report_evaluation_header(log, job);
  Evaluated found;
  std::optional<int64_t> bytes;
  together(processes, "validation data", [&] {
    if (first && !job.data.empty() && knows_tokens(o, *job.tokenizer, job.step.model))
      bytes = target_bytes(job.inputs, *job.tokenizer, job.step.model.vocab_size);
  });
  World world(job.step.layout.mesh(), job.backend, no_hooks, processes.local_ranks());
  world.limit_init(o.init_timeout);
  run_ranks(world, [&](int rank) {
    Log silent = Log::silent();
    const bool reports = rank == o.place.first_rank();
    const Evaluated mine = detail::evaluate_on_rank(job, world, rank, reports ? log : silent);
    if (reports) found = mine;
  });
  found.bytes = bytes;
  if (first && o.json) std::printf("%s\n", detail::to_json(job, found).c_str());
  else if (first) detail::report_evaluated(log, job, found);
  if (!job.data.empty() && !std::isfinite(found.line.loss))
    throw SharedError(formatted("--evaluate: the loss of {} is not finite: {}", o.model, found.line.loss),
                      ExitStatus::diverged);
}

}  // namespace llmc
