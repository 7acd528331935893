// ignored.h: the modes, and the options that each of them does not use: rejected on the command line; those of a
// --config file, which may be a run's, keep their defaults, with a notice. --plan, about a run, takes all of a run's.
#pragma once
#include "core/check.h"
#include "core/words.h"
#include "run/options/print.h"

namespace llmc {

namespace detail {

// clang-format off
enum class Kind : uint8_t {
  // About runs. evaluation: batches, layout, validation; length: of sequences; state: kept for each weight; steps: how
  // many; epilogues: of products on GPUs.
  training, train_data, val_data, evaluation, step_size, sampling, stages, slices, model, length, tokenizer,
  interruption, update, state, steps, epilogues, threads, local_ranks, spare, device, transport, memory,
  // Of some modes alone:
  generation, output, shards, selftest, depths, machine, micro_batches, json
};
// clang-format on

using Kinds = uint64_t;  // a bit for each
constexpr Kinds kinds(std::initializer_list<Kind> all) {
  Kinds bits = 0;
  for (const Kind kind : all) bits |= Kinds{1} << static_cast<int>(kind);
  return bits;
}
inline constexpr Kinds of_runs = kinds({Kind::generation}) - 1;  // all before this one
inline constexpr Kinds where_to_compute =
    kinds({Kind::threads, Kind::local_ranks, Kind::device, Kind::transport, Kind::memory});

struct OptionKind {
  Kind kind;
  std::vector<std::string_view> names;
  const char* instead = "";  // for those who give one of them to a run
};

// Options in no kind choose a mode, or are for all of them.
inline const std::vector<OptionKind>& option_kinds() {
  using enum Kind;
  static const std::vector<OptionKind> all = {
      // clang-format off
      {training, {
        "--data-changed", "--stages", "--pack", "--epochs", "--out-dir", "--resume", "--branch-from",
        "--log-every", "--overfit-batch", "--warmup-steps", "--warmup-tokens", "--lr-schedule", "--decay-steps", "--decay-tokens", "--final-lr-frac", "--noise-scale", "--grad-clip",
        "--skip-loss-z", "--skip-grad-z", "--on-spike", "--max-rollbacks",
        "--val-every", "--sample-every", "--keep-best", "--checkpoint-every", "--checkpoint-minutes",
        "--checkpoint-errors", "--checkpoint-mode", "--checkpoint-local",
        "--checkpoint-local-every", "--checkpoint-local-keep", "--checkpoint-local-copies", "--check-replicas", "--verify-updates", "--check-devices", "--keep-checkpoints", "--keep-every", "--recompute", "--dp-sync", "--offload", "--offload-dir", "--offload-update", "--products", "--fp8-skip",
        "--grad-reduce", "--reduce-dtype", "--gather-dtype", "--profile", "--trace", "--trace-step",
        "--peak-tflops", "--log-gpu-every", "--tune-matmul", "--moe-dispatch",
        "--moe-aux-loss", "--moe-z-loss", "--moe-bias-rate", "--moe-capacity-factor"}},
      {update, {
        "--optimizer", "--lr", "--weight-decay", "--weight-decay-tokens", "--decay-embeddings", "--beta1", "--beta2", "--adam-eps", "--embed-lr",
        "--head-lr", "--scalar-lr", "--muon-ns", "--muon-scale", "--muon-heads", "--muon-rows", "--muon-products",
        "--muon-momentum", "--cautious-decay", "--z-loss", "--qk-clip", "--parametrization", "--base-width", "--base-depth", "--base-head-size", "--init-std"}},
      {state, {"--ema", "--master-weights", "--moment1-dtype", "--moment2-dtype"}},
      {train_data, {"--train-data", "--data"}},
      {val_data, {"--val-data", "--val", "--data-format"}},
      {evaluation, {
        "--val-steps", "--eval-choices", "--shuffle", "--batch-size", "--mask-documents", "--head-chunks",
        "--zero-stage", "--dp-replicate", "--tp", "--sequence-parallel", "--tp-overlap", "--cp", "--cp-attention",
        "--ep", "--moe-imbalance"}},
      {step_size, {"--total-batch-size"}},
      {sampling, {"--sample-tokens", "--prompt", "--temperature", "--top-k", "--top-p"}},
      {stages, {"--pp", "--schedule", "--pp-chunks", "--pp-layout"}},
      {slices, {"--token-slices"}},
      {model, {
        "--model", "--from-scratch", "--n-layer", "--n-head", "--n-kv-head", "--n-embd", "--n-ffn", "--vocab-size",
        "--rope-theta", "--rope-factor", "--dtype"}},
      {length, {"--seq-len"}},
      {tokenizer, {"--tokenizer"}},
      {epilogues, {"--gelu", "--residual"}},
      {interruption, {"--restart", "--time-limit"}},
      {threads, {"--threads"}},
      {local_ranks, {"--local-ranks"}},
      {spare, {"--spare", "--spare-wait"}},
      {device, {"--device", "--tf32", "--attention", "--cuda-graphs"}},
      {transport, {"--comm"}},
      {memory, {"--memory-limit"}},
      {generation, {"--prompt-file", "--num-samples", "--interactive"}},
      {output, {"--out"}, "the directory of a run is --out-dir"},
      {shards, {"--tokenize-field", "--tokenize-split", "--shard-size"}},
      {selftest, {"--selftest-layouts", "--selftest-minutes", "--selftest-draws"}},
      {depths, {"--coord-depths"}},
      {machine, {"--machine", "--price"}},
      {machine, {"--ranks"}, "the ranks of a run are --local-ranks of each process"},
      {steps, {"--max-steps", "--tokens"}},
      {micro_batches, {"--micro-batches"}, "how many a step has follows from --total-batch-size"},
      {json, {"--json"}},
      // clang-format on
  };
  return all;
}

enum class ModeRanks {
  meet,   // all ranks compute
  paper,  // one process, about the ranks of a run
  none    // one process, about none
};

struct Mode {
  const char *name, *what;
  ModeRanks ranks;
  Kinds uses;
  bool (*asked)(const Options&) = nullptr;  // null: training
};
inline constexpr Mode training_mode{"training", "", ModeRanks::meet, of_runs};

inline const std::vector<Mode>& modes() {
  using enum Kind;
  static const std::vector<Mode> all = {
      {"--evaluate", "which does not train and writes nothing", ModeRanks::meet,
       kinds({val_data, evaluation, step_size, stages, model, length, tokenizer, epilogues, spare, json}) |
           where_to_compute,
       [](const Options& o) { return o.evaluate; }},
      {"--generate", "which computes on one rank and does not train", ModeRanks::none,
       kinds({sampling, model, length, tokenizer, threads, local_ranks, device, memory, generation}),
       [](const Options& o) { return o.generate; }},
      {"--verify-data", "which reads data and does not train", ModeRanks::none,
       kinds({train_data, val_data, model, length, tokenizer, threads}),
       [](const Options& o) { return o.verify_data; }},
      {"--tokenize", "which reads text and does not train", ModeRanks::none,
       kinds({tokenizer, interruption, threads, output, shards}), [](const Options& o) { return !o.tokenize.empty(); }},
      {"--average", "which averages weights and does not train", ModeRanks::none, kinds({output}),
       [](const Options& o) { return !o.average.empty(); }},
      {"--selftest", "which has models and layouts of its own, on --local-ranks ranks of one thread", ModeRanks::meet,
       kinds({local_ranks, spare, device, transport, selftest}), [](const Options& o) { return o.selftest; }},
      {"--coord-check", "which trains for a few steps on one rank and a text of its own", ModeRanks::none,
       kinds({update, model, epilogues, threads, device, depths, json}),
       [](const Options& o) { return !o.coord_check.empty(); }},
      {"--plan", "which plans a run", ModeRanks::paper, of_runs | kinds({machine, json}),
       [](const Options& o) { return o.plan; }},
      {"--plan-auto", "which searches the layout of a step", ModeRanks::none,
       kinds({model, length, tokenizer, step_size, steps, epilogues, update, state, machine, json}) | where_to_compute,
       [](const Options& o) { return o.plan_auto; }},
      {"--plan-examples", "which plans the runs of papers", ModeRanks::none, 0,
       [](const Options& o) { return o.plan_examples; }},
      {"--print-schedule", "which draws the stages of --pp, whatever they compute", ModeRanks::none,
       kinds({stages, slices, micro_batches, json}), [](const Options& o) { return o.print_schedule; }},
      {"--print-stages", "which prints the stages of a run", ModeRanks::paper,
       (of_runs & ~kinds({spare})) | kinds({json}), [](const Options& o) { return o.print_stages; }},
      {"--print-samples", "which prints the samples of a run", ModeRanks::paper, of_runs & ~kinds({spare}),
       [](const Options& o) { return !o.print_samples.empty(); }}};
  return all;
}
// Whether it uses options of this kind.
inline bool uses(const Mode& mode, Kind kind) { return (mode.uses & kinds({kind})) != 0; }

inline const Mode& mode_of(const Options& o) {
  const Mode* asked = &training_mode;
  for (const Mode& mode : modes()) {
    if (!mode.asked(o)) continue;
    CHECK(asked == &training_mode, "{} and {}: choose one of them", asked->name, mode.name);
    asked = &mode;
  }
  return *asked;
}

// The kind for which the mode does not use the option; null: it uses it.
inline const OptionKind* unused_kind(const Mode& mode, std::string_view option) {
  for (const OptionKind& kind : option_kinds())
    if (!uses(mode, kind.kind) && std::ranges::find(kind.names, option) != kind.names.end()) return &kind;
  return nullptr;
}

// Rejects an option of other modes. given: "--ranks 8"
[[noreturn]] inline void refuse_option_of_modes(const std::string& given, const OptionKind& kind, const Mode& mode) {
  std::vector<std::string> users;
  for (const Mode& user : modes())
    if (uses(user, kind.kind)) users.emplace_back(user.name);
  const std::string remedy = &mode != &training_mode ? "" : users.size() == 1 ? "add it, or " : "add one of them, or ";
  throw Error(formatted("{} is for {}, not for {}: {}leave out {}{}{}", shown(given), either(users, "and"), mode.name,
                        remedy, given.substr(0, given.find(' ')), *kind.instead ? "; " : "", kind.instead));
}

}  // namespace detail

// Is it about the ranks of a run, even one on paper?
inline bool has_ranks(const Options& o) { return detail::mode_of(o).ranks != detail::ModeRanks::none; }

// Do all ranks of the job meet and compute? Other modes need one process.
inline bool needs_ranks(const Options& o) { return detail::mode_of(o).ranks == detail::ModeRanks::meet; }

// Is it about a run's training data: a run that trains, or one on paper, or a check of its data?
inline bool reads_train_data(const Options& o) { return detail::uses(detail::mode_of(o), detail::Kind::train_data); }

// Rejects options of the command line that the mode does not use. Those of --config files get their defaults back.
// is_given(name): whether the command line has it.
template <class IsGiven>
void drop_ignored(Options& o, IsGiven&& is_given) {
  const detail::Mode& mode = detail::mode_of(o);
  Options defaults;
  const std::vector<OptionRow> rows = option_rows(o), usual = option_rows(defaults);
  std::vector<std::string> refused;
  for (size_t i = 0; i < rows.size(); ++i) {
    const std::string name = rows[i].name, text = rows[i].field.text();
    const detail::OptionKind* const kind = detail::unused_kind(mode, name);
    if (kind == nullptr || text == usual[i].field.text()) continue;
    if (!is_given(name)) o.unused.push_back(name);
    else if (kind->kind < detail::Kind::generation) refused.push_back(name);
    else detail::refuse_option_of_modes(rows[i].field.is_flag() ? name : name + " " + text, *kind, mode);
    rows[i].field.take(usual[i].field);
    o.config_lines.erase(name);
  }
  CHECK(refused.empty(), "{} with {}, {}: leave {} out", either(refused, "and"), mode.name, mode.what,
        refused.size() == 1 ? "it" : "them");
}

// Names the options of --config files that the mode does not use, and data that a later option has replaced, if any.
inline std::string notice_of_ignored(const Options& o) {
  std::string lines;
  const auto add = [&](const std::string& line) { lines += (lines.empty() ? "notice: " : "\nnotice: ") + line; };
  if (!o.unused.empty())
    add(formatted("{} does not use these options of --config: {}", detail::mode_of(o).name, either(o.unused, "and")));
  for (const std::string& name : o.repeated) {
    const bool training = name == "--train-data";
    add(formatted("{} is given more than once, and only the last counts, {}: to use several, give {}", name,
                  training ? o.train_data : o.val_data,
                  training ? "--data NAME=PATTERN:WEIGHT for each" : "--val NAME=PATTERN for each"));
  }
  return lines;
}

}  // namespace llmc
