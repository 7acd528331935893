// ignored.h: options that a mode other than training does not use. On the command line they are rejected; those of a
// --config file, which may be that of a run, keep their defaults and get a notice. --plan is about a run, and takes
// them all.
#pragma once
#include <algorithm>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

#include "core/check.h"
#include "core/words.h"
#include "run/options/print.h"

namespace llmc {

namespace detail {

struct OptionKind {
  enum Bit : unsigned {
    training = 1,
    train_data = 2,
    val_data = 4,
    validation = 8,
    batch = 16,
    sampling = 32,
    layout = 64,
    stages = 128,
    slices = 256,
    model = 512,
    data = 1024,  // for training or validation
    tokenizer = 2048,
    interruption = 4096,
    update = 8192,
    epilogues = 16384,  // of products on GPUs
    step_size = 32768,
    state = 65536  // kept for every weight
  } kind;
  std::vector<std::string_view> names;
};

// Options in no kind say where to compute, or belong to one mode alone.
inline const std::vector<OptionKind>& option_kinds() {
  static const std::vector<OptionKind> kinds = {
      // clang-format off
      {OptionKind::training, {
        "--data-changed", "--stages", "--pack", "--max-steps", "--tokens", "--epochs", "--out-dir", "--resume",
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
        "--seq-len", "--rope-theta", "--rope-factor", "--dtype"}},
      {OptionKind::tokenizer, {"--tokenizer"}},
      {OptionKind::epilogues, {"--gelu", "--residual"}},
      {OptionKind::interruption, {"--restart", "--time-limit"}},
      // clang-format on
  };
  return kinds;
}

struct Mode {
  const char *name, *what;
  unsigned uses;  // of the kinds that it uses
};
// None: training or --plan.
inline std::optional<Mode> mode_of(const Options& o) {
  using K = OptionKind;
  if (o.evaluate)
    return Mode{"--evaluate", "which does not train and writes nothing",
                K::val_data | K::data | K::validation | K::batch | K::step_size | K::layout | K::stages | K::model |
                    K::tokenizer | K::epilogues};
  if (o.generate)
    return Mode{"--generate", "which computes on one rank and does not train", K::sampling | K::model | K::tokenizer};
  if (o.verify_data)
    return Mode{"--verify-data", "which reads data and does not train",
                K::train_data | K::val_data | K::data | K::model | K::tokenizer};
  if (!o.tokenize.empty())
    return Mode{"--tokenize", "which reads text and does not train", K::tokenizer | K::interruption};
  if (!o.average.empty()) return Mode{"--average", "which averages weights and does not train", 0};
  if (o.selftest) return Mode{"--selftest", "which has models and layouts of its own, on --local-ranks ranks", 0};
  if (!o.coord_check.empty())
    return Mode{"--coord-check", "which trains for a few steps on a text of its own",
                K::update | K::model | K::epilogues};
  if (o.plan_auto)
    return Mode{"--plan-auto", "which searches the layout of a step",
                K::model | K::tokenizer | K::step_size | K::epilogues | K::update | K::state};
  if (o.plan_examples) return Mode{"--plan-examples", "which plans the runs of papers", 0};
  if (o.print_schedule)
    return Mode{"--print-schedule", "which draws the stages of --pp, whatever they compute", K::stages | K::slices};
  return {};
}

inline bool is_used(const Mode& mode, std::string_view option) {
  return std::ranges::none_of(option_kinds(), [&](const OptionKind& kind) {
    return (mode.uses & kind.kind) == 0 && std::ranges::find(kind.names, option) != kind.names.end();
  });
}

}  // namespace detail

// Rejects options of the command line that the mode does not use. Those of --config files get their defaults back.
// is_given(name): whether the command line has it.
template <class IsGiven>
void drop_ignored(Options& o, IsGiven&& is_given) {
  const std::optional<detail::Mode> mode = detail::mode_of(o);
  if (!mode) return;
  Options defaults;
  const std::vector<OptionRow> rows = option_rows(o), usual = option_rows(defaults);
  std::vector<std::string> refused;
  for (size_t i = 0; i < rows.size(); ++i) {
    const std::string name = rows[i].name;
    if (rows[i].field.text() == usual[i].field.text() || detail::is_used(*mode, name)) continue;
    (is_given(name) ? refused : o.unused).push_back(name);
    rows[i].field.take(usual[i].field);
    o.config_lines.erase(name);
  }
  CHECK(refused.empty(), "{} with {}, {}: leave {} out", either(refused, "and"), mode->name, mode->what,
        refused.size() == 1 ? "it" : "them");
}

// A line naming the options of --config files that the mode does not use; empty: none.
inline std::string notice_of_ignored(const Options& o) {
  if (o.unused.empty()) return "";
  return formatted("notice: {} does not use these options of --config: {}", detail::mode_of(o)->name,
                   either(o.unused, "and"));
}

}  // namespace llmc
