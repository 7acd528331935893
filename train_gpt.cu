// train_gpt.cu: the trainer. main() reads straight down: options -> plan -> model -> loop.
#include <chrono>
#include <cstdio>
#include <filesystem>
#include <memory>
#include <optional>

#include "core/log.h"
#include "core/options.h"
#include "train/checkpoint.h"
#include "train/dataloader.h"
#include "train/lr_schedule.h"
#include "train/peak.h"
#include "train/planner.h"
#include "train/report.h"
#include "train/sample.h"
#include "train/step.h"
#include "train/tokenizer.h"
#include "train/verify_data.h"

namespace llmc {
namespace {

double seconds_since(std::chrono::steady_clock::time_point begin) {
  return std::chrono::duration<double>(std::chrono::steady_clock::now() - begin).count();
}

Device choose_device(const Options& o) {
  return {DeviceKind::cpu, o.threads > 0 ? static_cast<int>(o.threads) : available_processors()};
}

ModelConfig choose_model(const Options& o) {
  return resolve_model(o.model, {o.n_layer, o.n_head, o.n_embd, o.n_ffn, o.vocab_size});
}

DType choose_dtype(const Options& o) { return o.dtype == "bf16" ? DType::bf16 : DType::fp32; }

// What a step computes; everything that the options alone can tell is checked here.
StepConfig choose_step(const Options& o) {
  StepConfig step{.model = choose_model(o),
                  .dtype = choose_dtype(o),
                  .batch = {o.batch_size, o.seq_len},
                  .schedule = schedule_from_name(o.schedule),
                  .recompute = recompute_from_name(o.recompute)};
  CHECK(o.seq_len <= step.model.n_positions, "--seq-len {} exceeds the {} positions of --model {}: use at most {}",
        o.seq_len, step.model.n_positions, o.model, step.model.n_positions);
  if (o.total_batch_size) step.micro_batches = *o.total_batch_size / step.batch.rows();  // validated with the options
  return step;
}

LrSchedule choose_lr_schedule(const Options& o, int64_t max_steps) {
  return {o.lr_schedule, o.lr, o.warmup_steps, max_steps, o.final_lr_frac};
}

// Everything that lives on the device, made exactly as large as the plan says.
struct Run {
  Arena arena, scratch;
  Stream stream;
  Trainer trainer;
  Run(const StepConfig& config, const Plan& plan, const Device& device)
      : arena(device, plan.arena_bytes),
        scratch(device, plan.scratch_bytes),
        stream(device, scratch),
        trainer(config, {arena, stream}) {}
};

// The weights of a fresh run: a directory's, unless --from-scratch or a preset asks for new ones.
void initialise(Run& run, const Options& o) {
  if (!o.from_scratch && !model_preset(o.model))
    load_model(o.model, run.trainer.config().model, run.trainer.state(), run.stream);
  else init_weights(run.trainer.state(), static_cast<uint64_t>(o.seed), run.stream);
  run.stream.synchronize();
}

SampleOptions sample_options(const Options& o) { return {o.temperature, o.top_k, o.top_p}; }

// The prompt in tokens: end of text, then the text; a vocabulary without the end of text starts at its first token.
std::vector<int32_t> prompt_tokens(const Tokenizer& tokenizer, const Options& o, const ModelConfig& model) {
  std::vector<int32_t> tokens;
  if (tokenizer.end_of_text() < model.vocab_size) tokens.push_back(tokenizer.end_of_text());
  for (int32_t token : tokenizer.encode(o.prompt)) tokens.push_back(token);
  if (tokens.empty()) tokens.push_back(0);
  for (int32_t token : tokens)
    CHECK(token < model.vocab_size,
          "--prompt: token {} is outside the model's vocabulary of {}; use a --tokenizer that fits the model", token,
          model.vocab_size);
  return tokens;
}

// --generate: load a model, print the continuation of the prompt as it comes.
void run_generate(const Options& o) {
  CHECK(!model_preset(o.model),
        "--generate needs a trained model: --model {} is a preset; name a checkpoint's directory", o.model);
  StepConfig config{.model = choose_model(o), .dtype = choose_dtype(o)};
  config.batch = {1, std::min(trained_seq_len(o.model).value_or(o.seq_len), config.model.n_positions)};
  const Device device = choose_device(o);
  const auto tokenizer = make_tokenizer(o.tokenizer);
  Run run(config, make_plan(config, device.threads), device);
  initialise(run, o);
  std::printf("%s", o.prompt.c_str());
  generate(run.trainer, prompt_tokens(*tokenizer, o, config.model), o.sample_tokens, sample_options(o),
           static_cast<uint64_t>(o.seed), "generate", [&](int32_t token) {
             if (token == tokenizer->end_of_text()) return false;
             std::printf("%s", tokenizer->decode({&token, 1}).c_str());
             std::fflush(stdout);
             return true;
           });
  std::printf("\n");
}

// --verify-data: what the shards hold; every bad one is named.
void run_verify_data(const Options& o) {
  const ModelConfig model = choose_model(o);
  omp_set_num_threads(choose_device(o).threads);
  Log log;
  std::string bad = verify_data(log, "--train-data", o.train_data, model.vocab_size);
  if (!o.val_data.empty()) bad += verify_data(log, "--val-data", o.val_data, model.vocab_size);
  CHECK(bad.empty(), "--verify-data found bad shards:{}", bad);
}

// --plan: the memory by name and the work by op of a step, from the null device.
void run_plan(const Options& o) {
  const Device device = choose_device(o);
  const StepConfig config = choose_step(o);
  const Plan plan = make_plan(config, device.threads);
  if (o.memory_limit) require_memory(o, config, plan, device.threads);
  Log log;
  report_plan(log, o, device, config, plan);
}

void run_training(const Options& o) {
  // What to compute, on what, and from which data: everything is checked before anything is made.
  const Device device = choose_device(o);
  const StepConfig config = choose_step(o);
  const auto tokenizer = make_tokenizer(o.tokenizer);
  const TokenShards train_shards(o.train_data, o.seq_len);
  std::optional<TokenShards> val_shards;
  if (!o.val_data.empty()) val_shards.emplace(o.val_data, o.seq_len, "--val-data");
  const uint64_t seed = static_cast<uint64_t>(o.seed);
  DataLoader train_loader(train_shards, {.seed = seed, .shuffle = o.shuffle, .vocab_size = config.model.vocab_size});

  const int64_t samples_per_step = config.tokens() / o.seq_len;
  const int64_t max_steps = o.max_steps.value_or(std::max<int64_t>(1, train_shards.samples() / samples_per_step));
  CHECK(o.warmup_steps <= max_steps, "--warmup-steps {} exceeds the {} steps of the run", o.warmup_steps, max_steps);

  int64_t val_micro_batches = 0;
  std::optional<DataLoader> val_loader;
  if (val_shards) {
    val_loader.emplace(*val_shards,
                       DataLoader::Config{.seed = seed, .shuffle = false, .vocab_size = config.model.vocab_size});
    val_micro_batches = std::min(o.val_steps * config.micro_batches, val_shards->samples() / o.batch_size);
    CHECK(val_micro_batches > 0,
          "--val-data {} has {} samples of {} tokens, fewer than one batch of {}: lower --batch-size or add data",
          o.val_data, val_shards->samples(), o.seq_len, o.batch_size);
  }

  // A finished run is left as it is.
  if (const std::optional<int64_t> newest = newest_checkpoint(o.out_dir); newest && *newest >= max_steps) {
    Log log;
    log.line(formatted("already complete: {} is at step {} of {}", o.out_dir, *newest, max_steps));
    return report_next_steps(log, o, checkpoint_path(o.out_dir, *newest));
  }

  const Plan plan = make_plan(config, device.threads);
  require_memory(o, config, plan, device.threads);
  const double peak = matmul_peak(device, config.dtype);
  Run run(config, plan, device);
  initialise(run, o);

  claim_out_dir(o.out_dir);
  Log log(o.out_dir);
  report_header(log, o, device, config, max_steps, train_shards, val_shards ? &*val_shards : nullptr, plan, peak);

  auto read_micro_batch = [&](DataLoader& loader, int64_t cursor, int64_t micro_batch) {
    HostBatch host;
    loader.read_batch(cursor, micro_batch, {.rank = 0, .ranks = 1, .batch_size = o.batch_size}, host.tokens,
                      host.targets, host.positions);
    return host;
  };
  double best_val = std::numeric_limits<double>::infinity();
  int64_t best_step = 0;
  auto validate = [&](int64_t step) {
    const double loss = run.trainer.evaluate(val_micro_batches, [&](int64_t m) {
      log.progress("validation: micro-batch", m + 1, val_micro_batches);
      return read_micro_batch(*val_loader, 0, m);
    });
    log.val({.step = step, .loss = loss});
    if (loss < best_val) best_val = loss, best_step = step;
  };
  auto sample = [&](int64_t step) {
    std::vector<int32_t> made;
    generate(run.trainer, prompt_tokens(*tokenizer, o, config.model), o.sample_tokens, sample_options(o), seed,
             formatted("sample {}", step), [&](int32_t token) {
               made.push_back(token);
               log.progress("sampling", static_cast<int64_t>(made.size()), o.sample_tokens);
               return token != tokenizer->end_of_text();
             });
    log.line(formatted("sample at step {}: {}{}", step, o.prompt, tokenizer->decode(made)));
  };
  std::string checkpoint;
  auto save = [&](int64_t step) {
    log.progress("writing checkpoint", 0, 1);
    checkpoint = write_checkpoint(o.out_dir, step, config.model, run.trainer.state().state_table(), config.dtype,
                                  {{"step", step},
                                   {"tokens", step * config.tokens()},
                                   {"data_cursor", step * samples_per_step},
                                   {"seq_len", o.seq_len},
                                   {"seed", o.seed}},
                                  run.stream);
    log.line("checkpoint: " + checkpoint);
  };

  // The loop. Step s is the s-th update; validation at step 0 shows where the run starts.
  const LrSchedule schedule = choose_lr_schedule(o, max_steps);
  const double flops_per_step =
      training_flops_per_token(config.model, o.seq_len) * static_cast<double>(config.tokens());
  const auto begin = std::chrono::steady_clock::now();
  double step_seconds = 0;  // of all steps, without validation, sampling and checkpoints
  double last_loss = 0;
  OpLedger ops;
  if (val_loader && o.val_every > 0) validate(0);
  for (int64_t step = 1; step <= max_steps; ++step) {
    const auto step_begin = std::chrono::steady_clock::now();
    const double lr = learning_rate(schedule, step);
    const int64_t cursor = o.overfit_batch ? 0 : (step - 1) * samples_per_step;
    if (o.profile) run.stream.set_ledger(&ops);
    const StepResult result = run.trainer.step(
        [&](int64_t m) {
          if (config.micro_batches > 1)
            log.progress(formatted("step {}: micro-batch", step), m + 1, config.micro_batches);
          return read_micro_batch(train_loader, cursor, m);
        },
        {.lr = static_cast<float>(lr),
         .beta1 = static_cast<float>(o.beta1),
         .beta2 = static_cast<float>(o.beta2),
         .eps = static_cast<float>(o.adam_eps),
         .weight_decay = static_cast<float>(o.weight_decay),
         .step = step},
        o.grad_clip);
    const double seconds = seconds_since(step_begin);
    run.stream.set_ledger(nullptr);
    step_seconds += seconds;
    last_loss = result.loss;
    const double left = seconds_since(begin) / static_cast<double>(step) * static_cast<double>(max_steps - step);
    log.train({.step = step,
               .max_steps = max_steps,
               .loss = result.loss,
               .grad_norm = result.grad_norm,
               .lr = lr,
               .ms = seconds * 1e3,
               .tokens_per_s = static_cast<double>(config.tokens()) / seconds,
               .mfu = flops_per_step / seconds / peak,
               .eta_s = left});
    if (!result.applied)
      throw Error(formatted("step {} diverged: loss {} or gradient norm {} is not finite; the weights were not "
                            "updated. Lower --lr, add --warmup-steps or "
                            "check the data; {}",
                            step, result.loss, result.grad_norm,
                            checkpoint.empty() ? "no checkpoint was written" : "the last checkpoint is " + checkpoint),
                  ExitStatus::diverged);
    const bool last = step == max_steps;
    auto due = [&](int64_t every) { return every > 0 && (last || step % every == 0); };
    if (val_loader && due(o.val_every)) validate(step);
    if (due(o.sample_every)) sample(step);
    if (last || (o.checkpoint_every > 0 && step % o.checkpoint_every == 0)) save(step);
  }

  log.table("done",
            {{"time", formatted("{} in all, {} in training steps", human_duration(seconds_since(begin)),
                                human_duration(step_seconds))},
             {"throughput",
              formatted("{:.0f} tokens/s, {:.1f}% MFU", static_cast<double>(config.tokens() * max_steps) / step_seconds,
                        100 * flops_per_step * static_cast<double>(max_steps) / step_seconds / peak)},
             {"training loss", formatted("{:.4f} at step {}", last_loss, max_steps)},
             {"validation loss",
              std::isfinite(best_val) ? formatted("{:.4f} at best, at step {}", best_val, best_step) : "not measured"},
             {"checkpoint", checkpoint},
             {"metrics", o.out_dir + "/metrics.jsonl"}});
  if (o.profile) report_profile(log, ops, max_steps);
  report_next_steps(log, o, checkpoint);
}

}  // namespace
}  // namespace llmc

int main(int argc, char** argv) {
  using namespace llmc;
  wait_without_spinning(argv);
  try {
    const Command command = parse_command_line(argc, argv);
    if (command.print) std::printf("%s\n", command.text.c_str());  // --help, --print-config and the like
    else if (command.version) std::printf("%s\n", version_text().c_str());
    else if (command.options.verify_data) run_verify_data(command.options);
    else if (command.options.plan) run_plan(command.options);
    else if (command.options.generate) run_generate(command.options);
    else run_training(command.options);
    return static_cast<int>(ExitStatus::done);
  } catch (const Error& error) {
    std::fprintf(stderr, "train_gpt: %s\n", error.what());
    return static_cast<int>(error.status());
  } catch (const std::exception& error) {
    std::fprintf(stderr, "train_gpt: internal error: %s\n", error.what());
    return static_cast<int>(ExitStatus::refused);
  }
}
