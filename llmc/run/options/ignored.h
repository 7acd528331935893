// ignored.h: the modes, and the options that each of them does not use. On the command line these are rejected; those
// of a --config file, which may be that of a run, keep their defaults and get a notice. --plan is about a run, and
// takes all options of runs.
#pragma once
#include "core/check.h"
#include "core/words.h"
#include "run/options/print.h"

namespace llmc {

namespace detail {

struct OptionKind {
  enum Bit : uint64_t {
    training = 1 << 0,
    train_data = 1 << 1,
    val_data = 1 << 2,
    validation = 1 << 3,
    batch = 1 << 4,
    sampling = 1 << 5,
    layout = 1 << 6,
    stages = 1 << 7,
    slices = 1 << 8,
    model = 1 << 9,
    length = 1 << 10,  // of sequences
    data = 1 << 11,    // for training or validation
    tokenizer = 1 << 12,
    interruption = 1 << 13,
    update = 1 << 14,
    epilogues = 1 << 15,  // of products on GPUs
    step_size = 1 << 16,
    state = 1 << 17,  // kept for every weight
    threads = 1 << 18,
    local_ranks = 1 << 19,
    spare = 1 << 20,
    device = 1 << 21,
    transport = 1 << 22,
    memory = 1 << 23,
    steps = 1 << 24,          // how many a run has
    of_runs = (1 << 25) - 1,  // all of the above
    where_to_compute = threads | local_ranks | device | transport | memory,
    // Of some modes alone:
    generation = 1 << 25,
    output = 1 << 26,
    shards = 1 << 27,
    selftest = 1 << 28,
    depths = 1 << 29,
    machine = 1 << 30,
    price = uint64_t{1} << 31,
    micro_batches = uint64_t{1} << 32,
    json = uint64_t{1} << 33
  } kind;
  std::vector<std::string_view> names;
  const char* instead = "";  // for those who give one of them to a run
};

// Options in no kind choose a mode, or are for all of them.
inline const std::vector<OptionKind>& option_kinds() {
  static const std::vector<OptionKind> kinds = {
      // clang-format off
      {OptionKind::training, {
        "--data-changed", "--stages", "--pack", "--epochs", "--out-dir", "--resume", "--branch-from",
        "--log-every", "--overfit-batch", "--warmup-steps", "--warmup-tokens", "--lr-schedule", "--decay-steps", "--decay-tokens", "--final-lr-frac", "--noise-scale", "--grad-clip",
        "--skip-loss-z", "--skip-grad-z", "--on-spike", "--max-rollbacks",
        "--val-every", "--sample-every", "--keep-best", "--checkpoint-every", "--checkpoint-minutes",
        "--checkpoint-errors", "--checkpoint-mode", "--checkpoint-local",
        "--checkpoint-local-every", "--checkpoint-local-keep", "--checkpoint-local-copies", "--check-replicas", "--verify-updates", "--check-devices", "--keep-checkpoints", "--keep-every", "--recompute", "--dp-sync", "--offload", "--offload-dir", "--offload-update", "--products", "--fp8-skip",
        "--grad-reduce", "--reduce-dtype", "--gather-dtype", "--profile", "--trace", "--trace-step",
        "--peak-tflops", "--log-gpu-every", "--tune-matmul", "--moe-dispatch",
        "--moe-aux-loss", "--moe-z-loss", "--moe-bias-rate", "--moe-capacity-factor"}},
      {OptionKind::update, {
        "--optimizer", "--lr", "--weight-decay", "--weight-decay-tokens", "--decay-embeddings", "--beta1", "--beta2", "--adam-eps", "--embed-lr",
        "--head-lr", "--scalar-lr", "--muon-ns", "--muon-scale", "--muon-heads", "--muon-rows", "--muon-products",
        "--muon-momentum", "--cautious-decay", "--z-loss", "--qk-clip", "--parametrization", "--base-width", "--base-depth", "--base-head-size", "--init-std"}},
      {OptionKind::state, {"--ema", "--master-weights", "--moment1-dtype", "--moment2-dtype"}},
      {OptionKind::train_data, {"--train-data", "--data"}},
      {OptionKind::val_data, {"--val-data", "--val"}},
      {OptionKind::data, {"--data-format"}},
      {OptionKind::validation, {"--val-steps", "--eval-choices", "--shuffle"}},
      {OptionKind::batch, {"--batch-size", "--mask-documents", "--head-chunks"}},
      {OptionKind::step_size, {"--total-batch-size"}},
      {OptionKind::sampling, {"--sample-tokens", "--prompt", "--temperature", "--top-k", "--top-p"}},
      {OptionKind::layout, {
        "--zero-stage", "--dp-replicate", "--tp", "--sequence-parallel", "--tp-overlap", "--cp", "--cp-attention",
        "--ep", "--moe-imbalance"}},
      {OptionKind::stages, {"--pp", "--schedule", "--pp-chunks", "--pp-layout"}},
      {OptionKind::slices, {"--token-slices"}},
      {OptionKind::model, {
        "--model", "--from-scratch", "--n-layer", "--n-head", "--n-kv-head", "--n-embd", "--n-ffn", "--vocab-size",
        "--rope-theta", "--rope-factor", "--dtype"}},
      {OptionKind::length, {"--seq-len"}},
      {OptionKind::tokenizer, {"--tokenizer"}},
      {OptionKind::epilogues, {"--gelu", "--residual"}},
      {OptionKind::interruption, {"--restart", "--time-limit"}},
      {OptionKind::threads, {"--threads"}},
      {OptionKind::local_ranks, {"--local-ranks"}},
      {OptionKind::spare, {"--spare", "--spare-wait"}},
      {OptionKind::device, {"--device"}},
      {OptionKind::transport, {"--comm"}},
      {OptionKind::memory, {"--memory-limit"}},
      {OptionKind::generation, {"--prompt-file", "--num-samples", "--interactive"}},
      {OptionKind::output, {"--out"}, "the directory of a run is --out-dir"},
      {OptionKind::shards, {"--tokenize-field", "--tokenize-split", "--shard-size"}},
      {OptionKind::selftest, {"--selftest-layouts", "--selftest-minutes", "--selftest-draws"}},
      {OptionKind::depths, {"--coord-depths"}},
      {OptionKind::machine, {"--machine"}},
      {OptionKind::machine, {"--ranks"}, "the ranks of a run are --local-ranks of each process"},
      {OptionKind::steps, {"--max-steps", "--tokens"}},
      {OptionKind::price, {"--price"}},
      {OptionKind::micro_batches, {"--micro-batches"}, "how many a step has follows from --total-batch-size"},
      {OptionKind::json, {"--json"}},
      // clang-format on
  };
  return kinds;
}

enum class ModeRanks {
  meet,   // all ranks compute
  paper,  // one process, about the ranks of a run
  none    // one process, about none
};

struct Mode {
  const char *name, *what;
  ModeRanks ranks;
  uint64_t uses;                            // of the kinds that it uses
  bool (*asked)(const Options&) = nullptr;  // null: training
};
inline constexpr Mode training_mode{"training", "", ModeRanks::meet, OptionKind::of_runs};

inline const std::vector<Mode>& modes() {
  using K = OptionKind;
  static const std::vector<Mode> modes = {
      {"--evaluate", "which does not train and writes nothing", ModeRanks::meet,
       K::val_data | K::data | K::validation | K::batch | K::step_size | K::layout | K::stages | K::model | K::length |
           K::tokenizer | K::epilogues | K::where_to_compute | K::spare | K::json,
       [](const Options& o) { return o.evaluate; }},
      {"--generate", "which computes on one rank and does not train", ModeRanks::none,
       K::sampling | K::model | K::length | K::tokenizer | (K::where_to_compute & ~K::transport) | K::generation,
       [](const Options& o) { return o.generate; }},
      {"--verify-data", "which reads data and does not train", ModeRanks::none,
       K::train_data | K::val_data | K::data | K::model | K::length | K::tokenizer | K::threads,
       [](const Options& o) { return o.verify_data; }},
      {"--tokenize", "which reads text and does not train", ModeRanks::none,
       K::tokenizer | K::interruption | K::threads | K::output | K::shards,
       [](const Options& o) { return !o.tokenize.empty(); }},
      {"--average", "which averages weights and does not train", ModeRanks::none, K::output,
       [](const Options& o) { return !o.average.empty(); }},
      {"--selftest", "which has models and layouts of its own, on --local-ranks ranks of one thread", ModeRanks::meet,
       K::local_ranks | K::spare | K::device | K::transport | K::selftest, [](const Options& o) { return o.selftest; }},
      {"--coord-check", "which trains for a few steps on one rank and a text of its own", ModeRanks::none,
       K::update | K::model | K::epilogues | K::threads | K::device | K::depths | K::json,
       [](const Options& o) { return !o.coord_check.empty(); }},
      {"--plan", "which plans a run", ModeRanks::paper, K::of_runs | K::machine | K::price | K::json,
       [](const Options& o) { return o.plan; }},
      {"--plan-auto", "which searches the layout of a step", ModeRanks::none,
       K::model | K::length | K::tokenizer | K::step_size | K::steps | K::epilogues | K::update | K::state |
           K::where_to_compute | K::machine | K::price | K::json,
       [](const Options& o) { return o.plan_auto; }},
      {"--plan-examples", "which plans the runs of papers", ModeRanks::none, 0,
       [](const Options& o) { return o.plan_examples; }},
      {"--print-schedule", "which draws the stages of --pp, whatever they compute", ModeRanks::none,
       K::stages | K::slices | K::micro_batches | K::json, [](const Options& o) { return o.print_schedule; }},
      {"--print-stages", "which prints the stages of a run", ModeRanks::paper, (K::of_runs & ~K::spare) | K::json,
       [](const Options& o) { return o.print_stages; }},
      {"--print-samples", "which prints the samples of a run", ModeRanks::paper, K::of_runs & ~K::spare,
       [](const Options& o) { return !o.print_samples.empty(); }}};
  return modes;
}

inline const Mode& mode_of(const Options& o) {
  const Mode* asked = &training_mode;
  for (const Mode& mode : modes()) {
    if (!mode.asked(o)) continue;
    CHECK(asked == &training_mode, "{} and {}: choose one of them", asked->name, mode.name);
    asked = &mode;
  }
  return *asked;
}

}  // namespace detail

// Is it about the ranks of a run, even one on paper?
inline bool has_ranks(const Options& o) { return detail::mode_of(o).ranks != detail::ModeRanks::none; }

// Do all ranks of the job meet and compute? Other modes need one process.
inline bool needs_ranks(const Options& o) { return detail::mode_of(o).ranks == detail::ModeRanks::meet; }

// Is it about a run's training data: a run that trains, or one on paper, or a check of its data?
inline bool reads_train_data(const Options& o) {
  return (detail::mode_of(o).uses & detail::OptionKind::train_data) != 0;
}

namespace detail {

// The kind for which the mode does not use the option; null: it uses it.
inline const OptionKind* unused_kind(const Mode& mode, std::string_view option) {
  for (const OptionKind& kind : option_kinds())
    if ((mode.uses & kind.kind) == 0 && std::ranges::find(kind.names, option) != kind.names.end()) return &kind;
  return nullptr;
}

// Rejects an option of other modes. given: "--ranks 8"
[[noreturn]] inline void refuse_option_of_modes(const std::string& given, const OptionKind& kind, const Mode& mode) {
  std::vector<std::string> users;
  for (const Mode& user : modes())
    if ((user.uses & kind.kind) != 0) users.emplace_back(user.name);
  const std::string remedy = &mode != &training_mode ? "" : users.size() == 1 ? "add it, or " : "add one of them, or ";
  throw Error(formatted("{} is for {}, not for {}: {}leave out {}{}{}", shown(given), either(users, "and"), mode.name,
                        remedy, given.substr(0, given.find(' ')), *kind.instead ? "; " : "", kind.instead));
}

}  // namespace detail

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
    else if (kind->kind < detail::OptionKind::of_runs) refused.push_back(name);
    else detail::refuse_option_of_modes(rows[i].field.is_flag() ? name : name + " " + text, *kind, mode);
    rows[i].field.take(usual[i].field);
    o.config_lines.erase(name);
  }
  CHECK(refused.empty(), "{} with {}, {}: leave {} out", either(refused, "and"), mode.name, mode.what,
        refused.size() == 1 ? "it" : "them");
}

// Lines naming the options of --config files that the mode does not use, and data that a later option has replaced;
// empty: none.
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
