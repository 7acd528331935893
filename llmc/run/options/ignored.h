// ignored.h: options of training that a mode other than training would ignore, and refuses.
#pragma once
#include <algorithm>
#include <iterator>
#include <string>
#include <string_view>
#include <vector>

#include "core/check.h"
#include "core/words.h"
#include "run/options/print.h"

namespace llmc {

// Options that change neither what a model computes nor where.
inline bool of_training_alone(std::string_view name) {
  constexpr std::string_view names[] = {
      // clang-format off
      "--train-data", "--max-steps", "--tokens", "--epochs", "--out-dir", "--resume", "--restart", "--log-every",
      "--time-limit", "--overfit-batch", "--lr", "--warmup-steps", "--lr-schedule", "--final-lr-frac",
      "--weight-decay", "--beta1", "--beta2", "--adam-eps", "--grad-clip", "--skip-loss-z", "--skip-grad-z",
      "--val-every", "--sample-every", "--sample-tokens", "--prompt", "--temperature", "--top-k", "--top-p",
      "--keep-best", "--checkpoint-every", "--checkpoint-minutes", "--checkpoint-errors", "--keep-checkpoints",
      "--keep-every", "--recompute", "--dp-sync", "--master-weights", "--token-slices", "--grad-reduce", "--profile",
      "--peak-tflops", "--log-gpu-every", "--tune-matmul", "--moe-dispatch", "--moe-aux-loss", "--moe-z-loss",
      "--moe-bias-rate", "--moe-capacity-factor"
      // clang-format on
  };
  return std::ranges::find(names, name) != std::end(names);
}

// How ranks share a model, and what is asked of experts. is_given(name): on the command line; a --config file may have
// what other modes use.
template <class IsGiven>
void refuse_ignored(const Options& o, IsGiven&& is_given) {
  if (o.evaluate) {
    std::vector<std::string> ignored;
    for (const OptionText& option : option_texts(o))
      if (of_training_alone(option.name) && option.text != option.usual && is_given(option.name))
        ignored.push_back(option.name);
    CHECK(ignored.empty(), "{} with --evaluate, which does not train and writes nothing: leave {} out",
          either(ignored, "and"), ignored.size() == 1 ? "it" : "them");
  }
  const struct {
    bool asked;
    const char *name, *what;
  } modes[] = {{o.generate, "--generate", "which computes on one rank and does not train"},
               {o.verify_data, "--verify-data", "which reads data and does not train"},
               {o.selftest, "--selftest", "which has models and layouts of its own, on --local-ranks ranks"},
               {o.print_schedule, "--print-schedule", "which draws the stages of --pp, whatever they compute"}};
  for (const auto& mode : modes) {
    if (!mode.asked) continue;
    for (const OptionText& option : option_texts(o)) {
      const std::string_view name = option.name;
      const bool ignored = name == "--tp" || name == "--cp" || name == "--ep" || name.starts_with("--moe-") ||
                           (name == "--pp" && !o.print_schedule);
      CHECK(!ignored || option.text == option.usual || !is_given(option.name), "{} {} with {}, {}: leave it out",
            option.name, option.text, mode.name, mode.what);
    }
  }
}

}  // namespace llmc
