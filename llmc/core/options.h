// options.h: every option, once. One visitor names it, checks it, documents it, prints and reads it; what a resumed run
// may change stands beside it.
#pragma once
#include <CLI/CLI.hpp>
#include <charconv>
#include <cmath>
#include <cstdlib>
#include <limits>
#include <map>
#include <optional>
#include <sstream>
#include <string>
#include <type_traits>
#include <vector>

#include "core/check.h"
#include "core/files.h"
#include "core/unicode.h"

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
  int64_t local_ranks = 1, zero_stage = 0, dp_replicate = 1;
  std::string grad_reduce = "auto";
  std::string device = "auto", comm = "auto", attention = "own";
  bool tf32 = false, tune_matmul = false;
  std::string cuda_graphs = "on";
  std::optional<double> peak_tflops;
  int64_t log_gpu_every = 0;
  int64_t threads = 0;
  bool generate = false, plan = false, selftest = false, verify_data = false, profile = false;
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
        "documents packed into one sequence do not see each other: each begins behind the tokenizer's end of text, at "
        "position 0; without it attention runs across them");
  visit(
      "--tokenizer", "", o.tokenizer, Limits{}, warn,
      "what turns prompts into tokens and samples into text: bytes, a Hugging Face tokenizer.json (byte-level BPE) or "
      "its directory, or a gpt2_tokenizer.bin, which prints samples only; auto: the tokenizer.json of a --model "
      "directory if the vocabulary has its tokens, else bytes");
  visit("Model");
  visit(
      "--model", "-e", o.model, Limits{}, must_match,
      "gpt2:124M and up, gpt3:, llama2:, llama3:, qwen2.5:, qwen3:, smollm2: and a size (a wrong one lists all); "
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
  visit("--time-limit", "", o.time_limit, at_least(0), free,
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
  visit("--local-ranks", "", o.local_ranks, between(1, 1024), warn,
        "ranks that share the batch, as threads of this process; --batch-size is that of each");
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

template <class T>
std::string option_text(const T& value) {
  if constexpr (std::is_same_v<T, double>) {
    const std::string brief = formatted("{}", value);  // the shortest that reads back as the same number
    return std::strtod(brief.c_str(), nullptr) == value ? brief : formatted("{:.17g}", value);
  } else {
    return formatted("{}", value);
  }
}
template <class T>
std::string option_text(const std::optional<T>& value) {
  return value ? option_text(*value) : "";
}

template <class T>
inline constexpr bool is_optional = false;
template <class T>
inline constexpr bool is_optional<std::optional<T>> = true;

// The value that `text` means: all of it, in decimal.
inline void parse_value(const std::string& name, const std::string& text, std::string& field) {
  const std::optional<size_t> fault = utf8_fault(text);  // it is written into JSON
  CHECK(!fault, "{}: byte {} is not UTF-8; give the text, or the path, in UTF-8", name, fault.value_or(0) + 1);
  field = text;
}
inline void parse_value(const std::string& name, const std::string& text, bool& field) {
  CHECK(text == "true" || text == "false", "{} '{}': expected true or false", name, text);
  field = text == "true";
}
template <class Number>
void parse_value(const std::string& name, const std::string& text, Number& field) {
  const auto [end, error] = std::from_chars(text.data(), text.data() + text.size(), field);
  const bool number = error == std::errc() && end == text.data() + text.size();
  constexpr const char* expected = std::is_integral_v<Number> ? "a whole number" : "a number";
  CHECK(number, "{} '{}': expected {}{}", name, text, expected,
        error == std::errc::result_out_of_range ? ", and this one does not fit into 64 bits" : "");
}
template <class T>
void parse_value(const std::string& name, const std::string& text, std::optional<T>& field) {
  parse_value(name, text, field.emplace());
}

template <class T>
const char* type_text(const T&) {
  if constexpr (std::is_same_v<T, bool>) return "";
  else if constexpr (std::is_same_v<T, double> || std::is_same_v<T, std::optional<double>>) return "NUMBER";
  else if constexpr (std::is_same_v<T, std::string>) return "TEXT";
  else return "N";
}

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

// The number of insertions, deletions and replacements between two words (Levenshtein 1966).
inline size_t edit_distance(const std::string& a, const std::string& b) {
  std::vector<size_t> row(b.size() + 1);
  for (size_t j = 0; j <= b.size(); ++j) row[j] = j;
  for (size_t i = 1; i <= a.size(); ++i) {
    size_t diagonal = std::exchange(row[0], i);
    for (size_t j = 1; j <= b.size(); ++j) {
      const size_t replaced = diagonal + (a[i - 1] != b[j - 1]);
      diagonal = std::exchange(row[j], std::min({row[j] + 1, row[j - 1] + 1, replaced}));
    }
  }
  return row[b.size()];
}

struct ModeOption {
  const char* name;
  const char* help;
};
inline constexpr ModeOption mode_options[] = {
    {"--config", "FILE: read options that --print-config wrote; the command line wins over the file"},
    {"--print-config", "print all options as a file for --config, and stop"},
    {"--print-options-markdown", "print the options as the table in README.md, and stop"},
    {"--version", "print version, compiler, flags and libraries, and stop"},
    {"--help", "print this, and stop"}};

inline std::string wrapped(const std::string& text, size_t indent, size_t width = 110) {
  std::string out;
  size_t column = indent;
  for (size_t at = 0; at < text.size();) {
    const size_t end = std::min(text.find(' ', at), text.size());
    if (column > indent && column + (end - at) > width) {
      out.back() = '\n';  // instead of the space
      out += std::string(indent, ' ');
      column = indent;
    }
    out += text.substr(at, end - at) + " ";
    column += end - at + 1;
    at = end + 1;
  }
  while (!out.empty() && out.back() == ' ') out.pop_back();
  return out;
}

}  // namespace detail

inline std::string help_text() {
  std::string text =
      "train_gpt pretrains GPT language models on token shards (make those with data/tokenize_text.py).\n\n"
      "  ./train_gpt -i 'data/mine_train_*.bin' -j 'data/mine_val_*.bin' --model d6 --vocab-size 257 -t 256 -o "
      "out/mine\n"
      "  ./train_gpt --generate --model out/mine/step-001000 --prompt 'Once upon'\n";
  Options defaults;
  auto line = [&](std::string left, const std::string& help) {
    left.resize(std::max<size_t>(left.size() + 2, 34), ' ');
    text += left + detail::wrapped(help, 34) + "\n";
  };
  visit_options(
      defaults,
      detail::OptionVisitor{
          [&](const char* group) { text += "\n" + std::string(group) + "\n"; },
          [&](const char* name, const char* letter, auto& field, const Limits& limits, ResumeRule, const char* help) {
            const std::string type = limits.choices.empty() ? detail::type_text(field) : "TEXT";
            const std::string value = detail::option_text(field);
            std::string all = help;
            if (!limits.choices.empty()) all += formatted(" ({})", limits.choices);
            if (!type.empty() && !value.empty()) all += formatted(" [{}]", value);
            line(formatted("  {} {} {}", *letter ? std::string(letter) + "," : std::string("   "), name, type), all);
          }});
  for (const auto& mode : detail::mode_options) line(formatted("      {}", mode.name), mode.help);
  return text +
         "\nExit status: 0 done, 1 refused (the reason is on stderr), 2 diverged, 75 stopped early and saved: start "
         "again.";
}

inline std::string config_text(const Options& options) {
  Options o = options;
  std::string text;
  visit_options(o, detail::OptionVisitor{
                       [&](const char* group) { text += formatted("{}# {}\n", text.empty() ? "" : "\n", group); },
                       [&](const char* name, const char*, auto& field, const Limits&, ResumeRule, const char*) {
                         using T = std::remove_reference_t<decltype(field)>;
                         const std::string value = detail::option_text(field);
                         if (value.empty()) return;  // absent
                         CHECK(value.find('\n') == std::string::npos,
                               "{}: a value with a line break cannot stand in a --config file", name);
                         if constexpr (std::is_same_v<T, std::string>)
                           text += formatted("{}=\"{}\"\n", name + 2, value);
                         else text += formatted("{}={}\n", name + 2, value);
                       }});
  if (!text.empty()) text.pop_back();
  return text;
}

// Quotes a word for a shell where that is needed.
inline std::string shell_word(const std::string& word) {
  const bool plain = !word.empty() && word.find_first_not_of(
                                          "abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ"
                                          "0123456789_-./:,=+") == std::string::npos;
  if (plain) return word;
  std::string quoted = "'";
  for (char c : word) quoted += c == '\'' ? std::string("'\\''") : std::string(1, c);
  return quoted + "'";
}

// Every option as text, the default's text, and its rule.
struct OptionText {
  std::string name, text, usual;
  ResumeRule rule;
  bool flag;
};
inline std::vector<OptionText> option_texts(const Options& options) {
  Options o = options, defaults;
  std::vector<OptionText> all;
  auto add = [&](const char* name, const char*, auto& field, const Limits&, ResumeRule rule, const char*) {
    all.push_back({name, detail::option_text(field), "", rule, std::is_same_v<decltype(field), bool&>});
  };
  visit_options(o, detail::OptionVisitor{detail::no_group, add});
  size_t i = 0;
  auto add_usual = [&](const char*, const char*, auto& field, const Limits&, ResumeRule, const char*) {
    all[i++].usual = detail::option_text(field);
  };
  visit_options(defaults, detail::OptionVisitor{detail::no_group, add_usual});
  return all;
}

// The command line that gives these options: those that are not the default. `program`: as it is called.
inline std::string command_line(const Options& options, const std::string& program = "./train_gpt") {
  std::string text = shell_word(program);
  for (const OptionText& o : option_texts(options)) {
    if (o.text == o.usual) continue;
    text += " " + o.name;
    if (!o.flag) text += (o.text.starts_with("-") ? "=" : " ") + shell_word(o.text);  // no option is taken for a value
  }
  return text;
}

inline std::string options_markdown() {
  std::string text;
  Options defaults;
  visit_options(
      defaults,
      detail::OptionVisitor{
          [&](const char* group) {
            text += formatted("{}**{}**\n\n| option | default | meaning | on resume |\n| --- | --- | --- | --- |\n",
                              text.empty() ? "" : "\n", group);
          },
          [&](const char* name, const char* letter, auto& field, const Limits& limits, ResumeRule rule,
              const char* help) {
            std::string all = help;
            if (!limits.choices.empty()) all += formatted(" ({})", limits.choices);
            text += formatted("| `{}`{} | {} | {} | {} |\n", name, *letter ? formatted(" `{}`", letter) : std::string(),
                              detail::option_text(field), all, rule);
          }});
  text.pop_back();
  return text;
}

// Each value by itself, right after parsing.
inline void check_limits(Options& o) {
  visit_options(
      o, detail::OptionVisitor{
             detail::no_group,
             [](const char* name, const char*, auto& field, const Limits& limits, ResumeRule, const char*) {
               using T = std::remove_reference_t<decltype(field)>;
               auto check_number = [&](auto value) {
                 const double v = static_cast<double>(value);
                 CHECK(std::isfinite(v) && v >= limits.min && v <= limits.max, "{} {}: expected a number {}{}", name,
                       value, std::isinf(limits.min) ? std::string() : formatted("from {}", limits.min),
                       std::isinf(limits.max) ? std::string(" on") : formatted(" to {}", limits.max));
               };
               if constexpr (std::is_same_v<T, std::string>) {
                 CHECK(limits.choices.empty() ||
                           std::find(limits.choices.begin(), limits.choices.end(), field) != limits.choices.end(),
                       "{} {}: expected one of {}", name, field, limits.choices);
               } else if constexpr (detail::is_optional<T>) {
                 if (field) check_number(*field);
               } else if constexpr (!std::is_same_v<T, bool>) {
                 check_number(field);
               }
             }});
}

// Combinations, as far as the options alone tell.
inline void validate(const Options& o) {
  CHECK(o.generate + o.plan + o.selftest + o.verify_data <= 1,
        "--generate, --plan, --selftest and --verify-data: choose one of them");
  if (o.selftest) return;
  CHECK(!o.generate || !o.from_scratch,
        "--generate with --from-scratch: there would be nothing learnt to generate from; leave out one of them");
  if (o.generate) return;
  CHECK(o.local_ranks % o.dp_replicate == 0, "--dp-replicate {} does not divide the {} ranks", o.dp_replicate,
        o.local_ranks);
  const int64_t micro = o.batch_size * o.seq_len * o.local_ranks;
  CHECK(!o.total_batch_size || *o.total_batch_size % micro == 0,
        "--total-batch-size {} is not a multiple of --batch-size {} x --seq-len {} x {} rank(s) = {} tokens: use {}",
        *o.total_batch_size, o.batch_size, o.seq_len, o.local_ranks, micro,
        std::max<int64_t>(1, *o.total_batch_size / micro) * micro);
  if (o.plan) return;
  CHECK(!o.train_data.empty(),
        "--train-data is missing: name the token shards to train on (data/tokenize_text.py makes them), or see --help");
  CHECK(!o.out_dir.empty(), "--out-dir is empty: name a directory for metrics and checkpoints");
}

// What the command line asks for.
struct Command {
  Options options;
  bool print = false;    // print `text` and stop
  bool version = false;  // print the version and stop
  std::string text;
};

namespace detail {

// "there is no such option", and which name is near.
[[noreturn]] inline void unknown_option(const std::string& word, const std::string& where) {
  std::vector<std::string> names;
  for (const ModeOption& mode : mode_options) names.emplace_back(mode.name);
  Options o;
  visit_options(o, OptionVisitor{no_group, [&](const char* name, const char*, auto&, const Limits&, ResumeRule,
                                               const char*) { names.emplace_back(name); }});
  const auto nearest = std::min_element(names.begin(), names.end(), [&](const auto& x, const auto& y) {
    return edit_distance(x, word) < edit_distance(y, word);
  });
  const bool close = 2 * edit_distance(*nearest, word) <= word.size();
  throw Error(formatted("{}{}: there is no such option{}; see --help", where, word,
                        close ? "; the nearest is " + *nearest : ""));
}

// Reads a file that --print-config wrote: lines NAME=VALUE, text between quotes; a comment is a line that begins with
// #.
inline void read_config(Options& o, const std::string& path) {
  std::istringstream lines(read_text(path));
  int number = 0;
  for (std::string line; std::getline(lines, line);) {
    ++number;
    line = CLI::detail::trim(line);
    if (line.empty() || line[0] == '#') continue;
    const std::string where = formatted("--config {}:{}: ", path, number);
    const size_t equals = line.find('=');
    CHECK(equals != std::string::npos, "{}'{}': expected NAME=VALUE as --print-config writes it", where, line);
    const std::string name = "--" + CLI::detail::trim_copy(line.substr(0, equals));
    std::string value = CLI::detail::trim_copy(line.substr(equals + 1));
    if (value.size() >= 2 && value.front() == '"' && value.back() == '"') value = value.substr(1, value.size() - 2);
    bool found = false;
    auto set = [&](const char* option, const char*, auto& field, const Limits&, ResumeRule, const char*) {
      if (name != option) return;
      found = true;
      parse_value(where + name, value, field);
    };
    visit_options(o, OptionVisitor{no_group, set});
    if (!found) unknown_option(name, where);
  }
}

}  // namespace detail

inline Command parse_command_line(int argc, const char* const* argv) {
  Command command;
  CLI::App app;
  app.set_help_flag();
  app.allow_extras();
  std::map<std::string, std::string> given;  // CLI11 finds the words, parse_value() reads them
  visit_options(
      command.options,
      detail::OptionVisitor{
          detail::no_group,
          [&](const char* name, const char* letter, auto& field, const Limits&, ResumeRule, const char*) {
            const std::string both = *letter ? formatted("{},{}", letter, name) : std::string(name);
            if constexpr (std::is_same_v<std::remove_reference_t<decltype(field)>, bool>)
              app.add_flag(both + "{true}", given[name])->multi_option_policy(CLI::MultiOptionPolicy::TakeLast);
            else app.add_option(both, given[name])->multi_option_policy(CLI::MultiOptionPolicy::TakeLast);
          }});
  bool help = false, print_config = false, markdown = false;
  std::vector<std::string> configs;
  app.add_option("--config", configs)->allow_extra_args(false);
  app.add_flag("-h,--help", help);
  app.add_flag("--print-config", print_config);
  app.add_flag("--print-options-markdown", markdown);
  app.add_flag("--version", command.version);
  try {
    app.parse(argc, argv);
  } catch (const CLI::ParseError& error) {
    throw Error(formatted("{}; see --help", error.what()));
  }
  if (help || markdown) {
    command.print = true;
    command.text = help ? help_text() : options_markdown();
    return command;
  }
  for (std::string word : app.remaining()) {
    word = word.substr(0, word.find('='));
    CHECK(word[0] == '-', "{}: an argument without an option; see --help", word);
    detail::unknown_option(word, "");
  }
  if (command.version) return command;
  for (const std::string& path : configs) detail::read_config(command.options, path);
  visit_options(command.options, detail::OptionVisitor{detail::no_group, [&](const char* name, const char*, auto& field,
                                                                             const Limits&, ResumeRule, const char*) {
                                                         if (app.count(name) > 0)
                                                           detail::parse_value(name, given[name], field);
                                                       }});
  check_limits(command.options);
  if (print_config) {
    command.print = true;
    command.text = config_text(command.options);
    return command;
  }
  validate(command.options);
  return command;
}

}  // namespace llmc
