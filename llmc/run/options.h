// options.h: every option, once. One visitor names it, says which values it takes and documents it; what a resumed run
// may change stands beside it. options_print.h writes what the visitor sees, options_parse.h reads and checks it.
#pragma once
#include <limits>
#include <optional>
#include <string>
#include <vector>

#include "core/check.h"

namespace llmc {

struct Options {
  std::string train_data, val_data;
  bool shuffle = false, mask_documents = false;
  std::string tokenizer = "auto";

  std::string model = "d12";
  bool from_scratch = false;
  std::optional<int64_t> n_layer, n_head, n_kv_head, n_embd, n_ffn, vocab_size;

  int64_t batch_size = 4, seq_len = 1024;
  std::optional<int64_t> total_batch_size;

  std::optional<int64_t> max_steps;  // none: one epoch
  std::string out_dir = "out/run";
  std::string resume = "auto";
  int64_t log_every = 1;
  std::optional<double> time_limit;  // minutes
  int64_t seed = 42;
  bool overfit_batch = false;

  double lr = 3e-4;
  int64_t warmup_steps = 0;
  std::string lr_schedule = "cosine";
  double final_lr_frac = 0, weight_decay = 0.1, beta1 = 0.9, beta2 = 0.95, adam_eps = 1e-8, grad_clip = 1;
  std::optional<double> skip_loss_z, skip_grad_z;  // none: outliers are not skipped

  int64_t val_every = 250, val_steps = 20;
  std::string eval_choices;
  int64_t sample_every = 0, sample_tokens = 256;
  std::string prompt;
  double temperature = 1;
  int64_t top_k = 0;
  double top_p = 1;

  int64_t checkpoint_every = 0, keep_checkpoints = 0, keep_every = 0;
  bool keep_best = false;
  std::string dtype = "fp32";
  std::string recompute = "none";
  int64_t head_chunks = 0;
  std::string master_weights = "fp32";
  std::optional<double> memory_limit;  // GiB; none: what the machine has
  std::string schedule = "1f1b";
  int64_t local_ranks = 0, zero_stage = 0, dp_replicate = 1;
  std::string grad_reduce = "auto";
  std::string device = "auto", comm = "auto", attention = "own";
  bool tf32 = false, tune_matmul = false;
  std::string cuda_graphs = "on";
  std::optional<double> peak_tflops;
  int64_t log_gpu_every = 0;
  int64_t threads = 0;
  bool generate = false, plan = false, selftest = false, verify_data = false, profile = false;

  int64_t ranks = 1;  // not an option: what --local-ranks says, or what it stands for on this machine
};

// When a run is resumed, an option must be what it was, may differ with a warning, or may differ freely.
enum class ResumeRule { must_match, warn, free };
inline const char* name_of(ResumeRule rule) {
  constexpr const char* names[] = {"must match", "warns", "free"};
  return names[static_cast<int>(rule)];
}

// Which values are taken: a closed interval, or one of a list.
struct Limits {
  double min = -std::numeric_limits<double>::infinity(), max = std::numeric_limits<double>::infinity();
  std::vector<std::string> choices;
};
inline Limits at_least(double min) { return {.min = min, .choices = {}}; }
inline Limits above_zero() { return {.min = std::numeric_limits<double>::min(), .choices = {}}; }
inline Limits between(double min, double max) { return {.min = min, .max = max, .choices = {}}; }
inline Limits one_of(std::vector<std::string> choices) { return {.choices = std::move(choices)}; }

// Of one dimension. The products of several are bounded where they are known: require_countable() of the planner.
inline constexpr double largest_size = 1 << 24;

// visit(group) before each group, then visit(long name, letter or "", field, limits, rule, help) for each option.
template <class O, class Visitor>
void visit_options(O& o, Visitor&& visit) {
  using enum ResumeRule;
  visit("Data");
  visit("--train-data", "-i", o.train_data, Limits{}, must_match,
        "token shards to train on: a file or a quoted pattern ('data/*_train_*.bin')");
  visit("--val-data", "-j", o.val_data, Limits{}, warn, "token shards for validation; none: no validation");
  visit("--shuffle", "", o.shuffle, Limits{}, must_match,
        "a new order of the samples in every epoch; without it they come in file order");
  visit("--mask-documents", "", o.mask_documents, Limits{}, must_match,
        "documents packed into one sequence do not see each other: each begins with the tokenizer's end of text, at "
        "position 0; without it attention runs across them");
  visit(
      "--tokenizer", "", o.tokenizer, Limits{}, warn,
      "what turns prompts into tokens and samples into text: bytes, a Hugging Face tokenizer.json (byte-level BPE) or "
      "its directory, or a gpt2_tokenizer.bin, which prints samples only; auto: the tokenizer.json of a --model "
      "directory if the vocabulary has its tokens, else bytes");
  visit("Model");
  visit(
      "--model", "-e", o.model, Limits{}, must_match,
      "gpt2:124M and up, gpt3:, llama2:, llama3:, qwen2.5:, qwen3:, smollm2: and a size, as in llama3:8B; "
      "d<N>: GPT-2 with N layers, N heads, 64 N channels; or a directory with a Hugging Face config.json (and weights) "
      "of one of these families");
  visit("--from-scratch", "", o.from_scratch, Limits{}, must_match, "new weights although --model is a directory");
  visit("--n-layer", "", o.n_layer, between(1, largest_size), must_match, "layers, instead of the model's");
  visit("--n-head", "", o.n_head, between(1, largest_size), must_match, "attention heads, instead of the model's");
  visit("--n-kv-head", "", o.n_kv_head, between(1, largest_size), must_match,
        "key-value heads, which groups of attention heads share; instead of the model's (not GPT-2)");
  visit("--n-embd", "", o.n_embd, between(1, largest_size), must_match,
        "channels, instead of the model's; the feed-forward width keeps its proportion to them");
  visit("--n-ffn", "", o.n_ffn, between(1, largest_size), must_match, "feed-forward width, instead of the model's");
  visit("--vocab-size", "", o.vocab_size, between(1, largest_size), must_match,
        "vocabulary, instead of the model's: 257 for byte tokens");
  visit("Batch");
  visit("--batch-size", "-b", o.batch_size, between(1, largest_size), warn,
        "sequences in a micro-batch; memory grows with it");
  visit("--seq-len", "-t", o.seq_len, between(1, largest_size), must_match,
        "tokens in a sequence; at most the model's positions");
  visit("--total-batch-size", "-d", o.total_batch_size, at_least(1), free,
        "tokens in a step, by gradient accumulation; default: one micro-batch of all ranks. A resumed run must have as "
        "many "
        "as before, in whatever layout");
  visit("Run");
  visit("--max-steps", "-x", o.max_steps, at_least(1), warn, "updates to do; default: one epoch");
  visit("--out-dir", "-o", o.out_dir, Limits{}, free,
        "where metrics.jsonl and the checkpoints go; one run, one directory");
  visit("--resume", "", o.resume, Limits{}, free,
        "auto: go on from the newest whole checkpoint of --out-dir, or begin there; never: refuse a directory with a "
        "run; or a checkpoint's directory to go on from");
  visit("--log-every", "", o.log_every, at_least(1), free,
        "updates between two lines on the console; metrics.jsonl has one for each");
  visit("--time-limit", "", o.time_limit, above_zero(), free,
        "minutes after which the run saves and leaves with exit status 75, as it does at SIGINT, SIGTERM and SIGUSR1");
  visit("--seed", "", o.seed, at_least(0), must_match, "of initial weights, data order and samples");
  visit("--overfit-batch", "-a", o.overfit_batch, Limits{}, must_match,
        "train on the first batch again and again: the loss must fall towards zero");
  visit("Optimizer");
  visit("--lr", "-l", o.lr, between(0, 100), must_match, "peak learning rate of AdamW");
  visit("--warmup-steps", "-u", o.warmup_steps, at_least(0), must_match,
        "updates over which the learning rate rises to its peak");
  visit("--lr-schedule", "-k", o.lr_schedule, one_of({"constant", "cosine", "linear", "wsd"}), must_match,
        "how the learning rate falls after the warm-up; wsd: not before the last fifth");
  visit("--final-lr-frac", "-q", o.final_lr_frac, between(0, 1), must_match,
        "learning rate at the end, as a share of the peak");
  visit("--weight-decay", "-c", o.weight_decay, between(0, 100), must_match,
        "decoupled weight decay; matrices only, no biases and norms");
  visit("--beta1", "", o.beta1, between(0, 0.9999999), must_match, "decay of AdamW's first moment");
  visit("--beta2", "", o.beta2, between(0, 0.9999999), must_match, "decay of AdamW's second moment");
  visit("--adam-eps", "", o.adam_eps, between(1e-30, 1), must_match, "added to the root of the second moment");
  visit("--grad-clip", "", o.grad_clip, at_least(0), must_match,
        "largest gradient norm; longer gradients are scaled down; 0: never");
  visit("--skip-loss-z", "", o.skip_loss_z, at_least(0), must_match,
        "skip the update where the loss is more than so many standard deviations above the mean of the last 128");
  visit("--skip-grad-z", "", o.skip_grad_z, at_least(0), must_match, "the same for the gradient norm");
  visit("Evaluation and samples");
  visit("--val-every", "-v", o.val_every, at_least(0), free,
        "updates between validations (there is one at the start and one at the end, too); 0: none");
  visit("--val-steps", "-m", o.val_steps, at_least(1), free, "size of a validation, in batches as large as a step's");
  visit("--eval-choices", "", o.eval_choices, Limits{}, free,
        "multiple-choice questions to ask with every validation, as data/hellaswag.py writes them; none: no questions");
  visit("--sample-every", "-s", o.sample_every, at_least(0), free, "updates between samples; 0: none");
  visit("--sample-tokens", "-g", o.sample_tokens, at_least(1), free, "tokens in a sample");
  visit("--prompt", "", o.prompt, Limits{}, free, "text that samples begin with");
  visit("--temperature", "", o.temperature, between(0, 100), free, "of sampling; 0: always the likeliest token");
  visit("--top-k", "", o.top_k, at_least(0), free, "sample from the k likeliest tokens; 0: from all");
  visit("--top-p", "", o.top_p, between(0, 1), free,
        "sample from the likeliest tokens that together have this probability");
  visit("Checkpoints");
  visit("--checkpoint-every", "-n", o.checkpoint_every, at_least(0), free,
        "updates between checkpoints; 0: only at the end");
  visit("--keep-checkpoints", "", o.keep_checkpoints, at_least(0), free,
        "keep so many of the newest checkpoints and delete older ones; 0: keep all");
  visit("--keep-every", "", o.keep_every, at_least(0), free,
        "never delete the checkpoints of these multiples; 0: none");
  visit("--keep-best", "", o.keep_best, Limits{}, free,
        "write a checkpoint whenever the validation loss is the best so far, keep it, and let OUT/best lead to it");
  visit("Numerics and layout");
  visit("--dtype", "", o.dtype, one_of({"fp32", "bf16"}), must_match,
        "of weights and activations; with bf16, master weights and optimizer state are fp32");
  visit(
      "--master-weights", "-w", o.master_weights, one_of({"fp32", "none"}), must_match,
      "beside weights in bf16; none: the optimizer updates bf16 itself and rounds up or down by chance, which takes 4 "
      "bytes a parameter less");
  visit(
      "--head-chunks", "", o.head_chunks, between(0, 1 << 20), warn,
      "the head takes the rows of a micro-batch in so many parts, so that the logits of one alone exist at a time; 0: "
      "as few as keep them below 1 GiB");
  visit("--recompute", "-r", o.recompute, one_of({"none", "activation", "norm", "block"}), free,
        "what the backward computes again instead of keeping it: the activation function, the norms too, or whole "
        "blocks; the numbers are the same, memory goes down and time up");
  visit("--memory-limit", "", o.memory_limit, between(0, 1 << 30), free,
        "GiB that each rank may take: a run that needs more is refused before it starts; default: its part of the "
        "memory of the machine, or of what is free on the GPU");
  visit("--schedule", "", o.schedule, one_of({"gpipe", "1f1b"}), free,
        "order of forwards and backwards; 1f1b needs less memory, the numbers are the same");
  visit(
      "--zero-stage", "-z", o.zero_stage, between(0, 3), free,
      "what the data-parallel ranks share out: 1 optimizer state, 2 gradients too, 3 weights too; the numbers are the "
      "same at equal --grad-reduce");
  visit("--dp-replicate", "", o.dp_replicate, between(1, 1 << 20), warn,
        "hybrid sharding: so many replicas, each of which is shared out over the other ranks");
  visit(
      "--grad-reduce", "", o.grad_reduce, one_of({"auto", "step", "micro"}), warn,
      "reduce the gradients accumulated in a step, or those of every micro-batch, which needs less memory and more "
      "traffic; the two round differently; auto: as before where a run goes on, else step, and micro from stage 2 on");
  visit("Machine");
  visit("--local-ranks", "", o.local_ranks, between(0, 1024), warn,
        "ranks that share the batch, as threads of this process; --batch-size is that of each; 0: one for each visible "
        "GPU, one on a CPU");
  visit("--comm", "", o.comm, one_of({"auto", "threads", "nccl"}), warn,
        "who moves tensors between ranks; auto: NCCL where each rank has a GPU of its own, else threads");
  visit("--device", "", o.device, one_of({"auto", "cpu", "cuda"}), warn,
        "where to compute: on GPUs or on the CPU; auto: on GPUs where this build and this machine have them");
  visit("--attention", "", o.attention, one_of({"own", "cudnn"}), warn,
        "whose attention GPUs use: this program's, or cuDNN's, in bf16, where it was built with USE_CUDNN=1");
  visit(
      "--cuda-graphs", "", o.cuda_graphs, one_of({"on", "off"}), free,
      "on GPUs a micro-batch's forward, and its backward, is launched as one CUDA graph, where it does not meet other "
      "ranks: not in stage 3, not with --grad-reduce micro, nor in the last backward of several ranks");
  visit(
      "--tune-matmul", "", o.tune_matmul, Limits{}, warn,
      "before the first step, time what cuBLASLt offers for each product of a step and choose the fastest; recorded in "
      "the checkpoints, and kept by a run that goes on; two runs from the start may choose, and round, otherwise");
  visit("--tf32", "", o.tf32, Limits{}, warn,
        "GPUs multiply fp32 on tensor cores, with 10 bits of mantissa: faster, and no longer the numbers of fp32");
  visit("--threads", "", o.threads, between(0, 1024), warn,
        "threads of this process, shared out over its ranks; 0: all processors it may use");
  visit("Modes");
  visit("--generate", "", o.generate, Limits{}, free, "do not train: print what --model DIR makes of --prompt");
  visit("--plan", "", o.plan, Limits{}, free,
        "do not train: print what the run would need, memory by name and work by op; needs no data");
  visit("--selftest", "", o.selftest, Limits{}, free,
        "do not train: a tiny model in every layout that --local-ranks allow, against one rank");
  visit("--verify-data", "", o.verify_data, Limits{}, free,
        "do not train: read --train-data and --val-data whole, check every token against the vocabulary, and count");
  visit("--profile", "", o.profile, Limits{}, free,
        "time every op, and print the table at the end of the training: slower, for ops then wait for each other");
  visit("--peak-tflops", "", o.peak_tflops, between(1e-6, 1e9), free,
        "what MFU is a share of, in TFLOP/s of a GPU or of this CPU; default: the GPU's datasheet (dense), the CPU's "
        "measured matmul");
  visit("--log-gpu-every", "", o.log_gpu_every, at_least(0), free,
        "print use, memory, clock, power, temperature and throttling of the GPU every so many steps; 0: never");
}

namespace detail {

// Visits groups and options with two lambdas.
template <class OnGroup, class OnOption>
struct OptionVisitor {
  OnGroup on_group;
  OnOption on_option;
  void operator()(const char* group) { on_group(group); }
  template <class T>
  void operator()(const char* name, const char* letter, T& field, const Limits& limits, ResumeRule rule,
                  const char* help) {
    on_option(name, letter, field, limits, rule, help);
  }
};
template <class G, class F>
OptionVisitor(G, F) -> OptionVisitor<G, F>;

inline auto no_group = [](const char*) {};

}  // namespace detail

}  // namespace llmc
