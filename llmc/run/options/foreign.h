// foreign.h: other trainers' names for options, with ours: behind hints about unknown ones, and dev/docs/options.md.
#pragma once
#include "core/check.h"
#include "core/words.h"

namespace llmc {

struct ForeignOption {
  const char* name;  // as that trainer spells it
  const char* ours;  // our option, perhaps with its value; "": none
  const char* note;  // what differs, or why there is none
  // How its values are written here. "": unchanged, but if there is a note, a person must decide; "same": unchanged; or
  // ours for each value, as in "True=1 False=", where an empty one leaves the option out; "*=*": others are unchanged.
  const char* values = "";
};
struct ForeignTrainer {
  const char* name;
  std::vector<ForeignOption> options;
};

namespace detail {

inline constexpr auto launchers_tell = "mpirun, srun and torchrun's variables set it";
inline constexpr auto tokens_per_step = "in tokens: sequences x --seq-len x ranks x accumulation";
inline constexpr auto as_fraction = "as a fraction of --lr";
inline constexpr auto whole_run = "the schedule ends with the run";
inline constexpr auto no_compiler = "there is nothing to compile at run time";
inline constexpr auto no_dropout = "models have no dropout";
inline constexpr auto sum_of_layers = "the mean over layers here, not their sum: times the layers with experts";
inline constexpr auto chosen_by_model = "what config.json says";
inline constexpr auto shards = "token shards, as data/tokenize_text.py writes them";

}  // namespace detail

inline const std::vector<ForeignTrainer>& foreign_trainers() {
  using namespace detail;
  static const std::vector<ForeignTrainer> trainers = {
      {"llm.c",
       {{"-e", "--model",
         "d6 and d12 as there; d24 and larger have 64 N channels here: add --n-embd and --n-head; not a .bin, but the "
         "Hugging Face directory of those weights"},
        {"-y", "--resume", "a run resumes by itself; auto, never instead of 1, 0; --restart starts it over",
         "1= 0=never"},
        {"-lg", "--log-gpu-every", ""},
        {"-nk", "--keep-checkpoints", ""},
        {"-nm", "--keep-every", ""},
        {"-sl", "--skip-loss-z", "never: leave it out, instead of 0", "0= *=*"},
        {"-sg", "--skip-grad-z", "never: leave it out, instead of 0", "0= *=*"},
        {"-m", "--val-steps", "batches of a step's size, not micro-batches"},
        {"-h", "--eval-choices", "takes the file that data/hellaswag.py writes; -h alone is help", "0="},
        {"-a", "--overfit-batch", "takes no value", "same"},
        {"-f", "--tf32", "takes no value; off unless given", "same"},
        {"-w", "--master-weights", "none, fp32 instead of 0, 1", "0=none 1=fp32"},
        {"-r", "--recompute", "none, activation, norm instead of 0, 1, 2; block also", "0=none 1=activation 2=norm"},
        {"-ge", "", "what is fused with GELU is decided by the program"},
        {"-pn", "--world-size", launchers_tell},
        {"-pr", "--rank", launchers_tell},
        {"-pg", "--local-ranks", "ranks of a process; one for each visible GPU by default"},
        {"-pm", "--rendezvous", "HOST:PORT or file:PATH; not with mpirun"},
        {"-pi", "--rendezvous", "HOST:PORT or file:PATH; not with mpirun"},
        {"-ps", "--rendezvous", "HOST:PORT of process 0"},
        {"-pp", "--rendezvous", "file:PATH on a shared file system"},
        {"-pf", "--rendezvous", "file:PATH on a shared file system"}}},
      {"llm.c's train_gpt2.py",
       {{"--input_bin", "--train-data", ""},
        {"--input_val_bin", "--val-data", ""},
        {"--output_dir", "--out-dir", ""},
        {"--sequence_length", "--seq-len", ""},
        {"--num_iterations", "--max-steps", ""},
        {"--learning_rate", "--lr", ""},
        {"--warmup_iters", "--warmup-steps", ""},
        {"--learning_rate_decay_frac", "--final-lr-frac", ""},
        {"--val_loss_every", "--val-every", ""},
        {"--val_max_steps", "--val-steps", "batches of a step's size, not micro-batches"},
        {"--overfit_single_batch", "--overfit-batch", ""},
        {"--tensorcores", "--tf32", "takes no value", "same"},
        {"--flash", "--attention", "own kernels never store the scores; cudnn is the other choice"},
        {"--compile", "", no_compiler},
        {"--inference_only", "--generate", "takes no value", "same"}}},
      {"nanoGPT",
       {{"dataset", "--train-data", "its train.bin, with --data-format nanogpt"},
        {"block_size", "--seq-len", ""},
        {"gradient_accumulation_steps", "--total-batch-size",
         "in tokens: batch_size x block_size x gradient_accumulation_steps, which counts all ranks there"},
        {"learning_rate", "--lr", ""},
        {"min_lr", "--final-lr-frac", as_fraction},
        {"warmup_iters", "--warmup-steps", ""},
        {"lr_decay_iters", "--max-steps", whole_run},
        {"decay_lr", "--lr-schedule", "constant instead of False", "False=constant True="},
        {"max_iters", "--max-steps", ""},
        {"eval_interval", "--val-every", ""},
        {"eval_iters", "--val-steps", "batches of a step's size, not micro-batches"},
        {"eval_only", "--evaluate", "takes no value; with --model DIRECTORY", "same"},
        {"log_interval", "--log-every", ""},
        {"always_save_checkpoint", "--checkpoint-every", "--keep-best saves at every best validation"},
        {"init_from", "--model",
         "a preset trains from scratch; 'resume' is the default (--resume); a directory has weights"},
        {"start", "--prompt", "with --generate; --prompt-file for a file of them, - for stdin", "same"},
        {"max_new_tokens", "--sample-tokens", ""},
        {"dropout", "", no_dropout},
        {"bias", "", "GPT-2 has biases, Llama has none: --model"},
        {"backend", "--comm", ""},
        {"compile", "", no_compiler},
        {"wandb_log", "", "scripts/tensorboard.py exports metrics.jsonl"},
        {"wandb_project", "", "scripts/tensorboard.py exports metrics.jsonl"}}},
      {"Hugging Face's Trainer",
       {{"--model_name_or_path", "--model", "a directory: download it first, with `hf download`"},
        {"--config_name", "--model", "a directory, with --from-scratch"},
        {"--tokenizer_name", "--tokenizer", "a tokenizer.json or its directory"},
        {"--train_file", "--train-data", shards},
        {"--validation_file", "--val-data", shards},
        {"--dataset_name", "--train-data", shards},
        {"--output_dir", "--out-dir", ""},
        {"--per_device_train_batch_size", "--batch-size", ""},
        {"--per_device_eval_batch_size", "--batch-size", "the same for both"},
        {"--gradient_accumulation_steps", "--total-batch-size", tokens_per_step},
        {"--learning_rate", "--lr", ""},
        {"--lr_scheduler_type", "--lr-schedule", ""},
        {"--warmup_ratio", "--warmup-steps", "in updates"},
        {"--num_train_epochs", "--epochs", ""},
        {"--adam_beta1", "--beta1", ""},
        {"--adam_beta2", "--beta2", ""},
        {"--adam_epsilon", "--adam-eps", ""},
        {"--max_grad_norm", "--grad-clip", ""},
        {"--optim", "--optimizer", "adamw, sgd, lion or muon"},
        {"--bf16", "--dtype bf16", ""},
        {"--fp16", "", "fp32 and bf16 only: --dtype"},
        {"--gradient_checkpointing", "--recompute block", ""},
        {"--logging_steps", "--log-every", ""},
        {"--eval_steps", "--val-every", ""},
        {"--eval_strategy", "--val-every", "in updates"},
        {"--save_steps", "--checkpoint-every", ""},
        {"--save_strategy", "--checkpoint-every", "in updates"},
        {"--save_total_limit", "--keep-checkpoints", ""},
        {"--load_best_model_at_end", "--keep-best", "links OUT/best", "same"},
        {"--resume_from_checkpoint", "--resume", "auto by default"},
        {"--data_seed", "--seed", ""},
        {"--router_aux_loss_coef", "--moe-aux-loss", "times the experts per token; of each sequence"},
        {"--output_router_logits", "--moe-aux-loss", "above 0"},
        {"--deepspeed", "--zero-stage", "no configuration file"},
        {"--fsdp", "--zero-stage 3", ""},
        {"--torch_compile", "", no_compiler},
        {"--report_to", "", "scripts/tensorboard.py exports metrics.jsonl"},
        {"--push_to_hub", "", "a checkpoint is a Hugging Face directory: `hf upload`"},
        {"--do_train", "", "training is the default, without --generate and the other modes"},
        {"--do_eval", "--val-data", "training validates if it is given; --evaluate does nothing else"}}},
      {"Megatron-LM",
       {{"--data-path", "--train-data", "PREFIX.bin, beside its PREFIX.idx"},
        {"--tokenizer-type", "--tokenizer", ""},
        {"--tokenizer-model", "--tokenizer", "a tokenizer.json or its directory"},
        {"--micro-batch-size", "--batch-size", ""},
        {"--global-batch-size", "--total-batch-size", "in tokens: sequences x --seq-len"},
        {"--seq-length", "--seq-len", ""},
        {"--num-layers", "--n-layer", ""},
        {"--hidden-size", "--n-embd", ""},
        {"--ffn-hidden-size", "--n-ffn", ""},
        {"--num-attention-heads", "--n-head", ""},
        {"--num-query-groups", "--n-kv-head", ""},
        {"--init-method-std", "--init-std", ""},
        {"--train-iters", "--max-steps", ""},
        {"--train-samples", "--tokens", "sequences x --seq-len"},
        {"--min-lr", "--final-lr-frac", as_fraction},
        {"--lr-decay-style", "--lr-schedule", ""},
        {"--lr-decay-iters", "--max-steps", whole_run},
        {"--lr-warmup-iters", "--warmup-steps", ""},
        {"--lr-warmup-fraction", "--warmup-steps", "in updates"},
        {"--adam-beta1", "--beta1", ""},
        {"--adam-beta2", "--beta2", ""},
        {"--sgd-momentum", "--beta1", ""},
        {"--clip-grad", "--grad-clip", ""},
        {"--save", "--out-dir", ""},
        {"--load", "--resume", "auto by default; --model for weights alone"},
        {"--save-interval", "--checkpoint-every", ""},
        {"--eval-interval", "--val-every", ""},
        {"--eval-iters", "--val-steps", ""},
        {"--skip-train", "--evaluate", "with --model DIRECTORY"},
        {"--log-interval", "--log-every", ""},
        {"--exit-duration-in-mins", "--time-limit", ""},
        {"--reset-attention-mask", "--mask-documents", "positions too", "same"},
        {"--recompute-activations", "--recompute activation", "attention never keeps its scores here"},
        {"--recompute-granularity", "--recompute", "block instead of full", "full=block"},
        {"--use-distributed-optimizer", "--zero-stage 1", ""},
        {"--tensor-model-parallel-size", "--tp", ""},
        {"--pipeline-model-parallel-size", "--pp", ""},
        {"--num-virtual-stages-per-pipeline-rank", "--pp-chunks", "with --schedule interleaved", "same"},
        {"--decoder-first-pipeline-num-layers", "--pp-layout", "a list of the layers of all stages"},
        {"--decoder-last-pipeline-num-layers", "--pp-layout", "a list of the layers of all stages"},
        {"--context-parallel-size", "--cp", ""},
        {"--cp-comm-type", "--cp-attention", "ring for p2p, all-gather, ulysses for a2a"},
        {"--expert-model-parallel-size", "--ep", ""},
        {"--sequence-parallel", "--sequence-parallel", "on or off; on by default"},
        {"--num-experts", "--model", "d<N>-e<E>, a preset such as mixtral:8x7B, or a config.json"},
        {"--moe-router-topk", "--model", chosen_by_model},
        {"--moe-ffn-hidden-size", "--model", chosen_by_model},
        {"--moe-shared-expert-intermediate-size", "--model", chosen_by_model},
        {"--moe-layer-freq", "--model", chosen_by_model},
        {"--moe-router-score-function", "--model", chosen_by_model},
        {"--moe-router-load-balancing-type", "--moe-aux-loss", "per sequence, as seq_aux_loss there"},
        {"--moe-aux-loss-coeff", "--moe-aux-loss", sum_of_layers},
        {"--moe-z-loss-coeff", "--moe-z-loss", sum_of_layers},
        {"--moe-router-enable-expert-bias", "--moe-bias-rate", "above 0"},
        {"--moe-router-bias-update-rate", "--moe-bias-rate", ""},
        {"--moe-expert-capacity-factor", "--moe-capacity-factor", "with --moe-dispatch capacity; within a sequence"},
        {"--moe-token-drop-policy", "--moe-dispatch", "the later choices of a sequence are dropped, as by 'position'"},
        {"--moe-pad-expert-input-to-capacity", "",
         "only rows on their way to the ranks of --ep, where a capacity bounds them and there is room; experts compute "
         "no padding"},
        {"--moe-grouped-gemm", "", "products of experts always are"},
        {"--moe-router-dtype", "", "the router is fp32"},
        {"--moe-token-dispatcher-type", "", "tokens go by all-to-all"},
        {"--moe-permute-fusion", "", "what is fused is decided by the program"}}},
      {"others",
       {{"--steps", "--max-steps", ""},
        {"--iters", "--max-steps", ""},
        {"--max-tokens", "--tokens", ""},
        {"--data", "--train-data", shards},
        {"--bs", "--batch-size", ""},
        {"--wd", "--weight-decay", ""},
        {"--save-every", "--checkpoint-every", ""},
        {"--eval-every", "--val-every", ""},
        {"--max-seq-len", "--seq-len", ""},
        {"--context-length", "--seq-len", ""},
        {"--grad-accum", "--total-batch-size", tokens_per_step},
        {"--precision", "--dtype", ""},
        {"--gpus", "--local-ranks", "one for each visible GPU by default", "same"},
        {"--nproc_per_node", "--local-ranks", "or start that many processes"}}},
  };
  return trainers;
}

struct ForeignMatch {
  const ForeignTrainer* trainer;
  const ForeignOption* option;
};

// The trainer that has an option of this name; among several, the one that has most of `all`, the unknown names.
inline std::optional<ForeignMatch> find_foreign(const std::string& word, const std::vector<std::string>& all = {}) {
  const auto find_in = [](const ForeignTrainer& trainer, const std::string& name) -> const ForeignOption* {
    for (const ForeignOption& option : trainer.options)
      if (plain_name(option.name) == plain_name(name)) return &option;
    return nullptr;
  };
  std::optional<ForeignMatch> best;
  int64_t most = -1;
  for (const ForeignTrainer& trainer : foreign_trainers()) {
    const ForeignOption* option = find_in(trainer, word);
    const int64_t has = std::ranges::count_if(all, [&](const std::string& name) { return find_in(trainer, name); });
    if (option != nullptr && has > most) best = {&trainer, option}, most = has;
  }
  return best;
}

// The hint for an option of another trainer: "-sl of llm.c is --skip-loss-z here". None: no trainer has it.
inline std::optional<std::string> foreign_hint(const std::string& word) {
  const std::optional<ForeignMatch> match = find_foreign(word);
  if (!match) return std::nullopt;
  const auto [trainer, option] = *match;
  const std::string theirs = trainer->name == std::string("others")
                                 ? "it"
                                 : formatted("{} of {}", option->name, trainer->name),
                    note = option->note;
  if (*option->ours == '\0') return formatted("{} has no counterpart here: {}", theirs, note);
  return formatted("{} is {} here{}", theirs, option->ours, note.empty() ? "" : " (" + note + ")");
}

// The same list as tables for dev/docs/options.md.
inline std::string foreign_markdown() {
  std::string text =
      "### Coming from another trainer\n\nNames that differ only in case, `-` and `_` are left out. Letters that are "
      "not listed mean what they mean in\nllm.c; defaults may differ. Names that do not exist here are refused, all at "
      "once, with the command that uses ours.\n";
  for (const ForeignTrainer& trainer : foreign_trainers()) {
    text += formatted("\n| {} | here | |\n| --- | --- | --- |\n", trainer.name);
    for (const ForeignOption& option : trainer.options)
      text += formatted("| `{}` | {} | {} |\n", option.name,
                        *option.ours == '\0' ? std::string("-") : formatted("`{}`", option.ours), option.note);
  }
  text.pop_back();
  return text;
}

}  // namespace llmc
