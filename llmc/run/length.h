// length.h: how long a run is: --max-steps, --tokens or --epochs as a number of updates; and what else is given in
// tokens and counted in updates.
#pragma once
#include "run/options/options.h"
#include "train/lr_schedule.h"

namespace llmc {

// If a run's length is not given: whole steps, or one for data that have less than one.
inline int64_t steps_of_an_epoch(int64_t epoch_tokens, int64_t tokens_per_step) {
  return std::max<int64_t>(1, epoch_tokens / tokens_per_step);
}

// The option that sets the length of the run.
inline std::string length_text(const Options& o) {
  if (o.max_steps) return formatted("--max-steps {}", *o.max_steps);
  if (o.tokens) return formatted("--tokens {}", *o.tokens);
  return o.epochs ? formatted("--epochs {}", *o.epochs) : "one epoch";
}

// The number of updates. epoch_tokens: of all samples; 0: not known, if --max-steps or --tokens is given. Steps may
// straddle epochs, so that only the end of --epochs is rounded up.
inline int64_t choose_steps(const Options& o, int64_t tokens_per_step, int64_t epoch_tokens) {
  const int64_t most = std::numeric_limits<int64_t>::max() / tokens_per_step;
  int64_t steps = steps_of_an_epoch(epoch_tokens, tokens_per_step);
  if (o.max_steps) steps = *o.max_steps;
  if (o.tokens) steps = (o.tokens->tokens - 1) / tokens_per_step + 1;
  if (o.epochs) {
    const double exact = *o.epochs * static_cast<double>(epoch_tokens) / static_cast<double>(tokens_per_step),
                 whole = std::round(exact);
    const double up = std::abs(exact - whole) <= 1e-9 * whole ? whole : std::ceil(exact);  // 0.07 x 100 is above 7
    steps = up < 0x1p62 ? std::max<int64_t>(1, static_cast<int64_t>(up)) : std::numeric_limits<int64_t>::max();
  }
  CHECK(steps <= most, "{} is more steps of {} tokens than 64 bits count: use at most {}", length_text(o),
        tokens_per_step, most);
  return steps;
}

// In steps of so many tokens.
inline int64_t warmup_steps(const Options& o, int64_t tokens_per_step) {
  return o.warmup_tokens ? ceil_div(o.warmup_tokens->tokens, tokens_per_step) : o.warmup_steps;
}
inline LrSchedule choose_lr_schedule(const Options& o, int64_t max_steps, int64_t tokens_per_step) {
  std::optional<int64_t> decay = o.decay_steps;
  if (o.decay_tokens) decay = ceil_div(o.decay_tokens->tokens, tokens_per_step);
  return {o.lr_schedule, o.lr, warmup_steps(o, tokens_per_step), max_steps, o.final_lr_frac, decay};
}

// Of a step of so many tokens: per step and learning rate.
inline double weight_decay(const Options& o, int64_t tokens_per_step) {
  if (!o.weight_decay_tokens) return o.weight_decay;
  CHECK(tokens_per_step <= o.weight_decay_tokens->tokens,
        "--weight-decay-tokens {}: a step has {} tokens, and weights cannot decay within one: use more",
        o.weight_decay_tokens->text, tokens_per_step);
  return static_cast<double>(tokens_per_step) / (o.lr * static_cast<double>(o.weight_decay_tokens->tokens));
}

}  // namespace llmc
