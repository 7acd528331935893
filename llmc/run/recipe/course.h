// course.h: a recipe unrolled into stretches of equal steps: how many, of how many tokens, from where in each source,
// at which rate. A run whose recipe changed goes on from an origin: the state of the checkpoint where it changed.
#pragma once
#include "run/recipe/recipe.h"

namespace llmc {

// How far a run is, and has read its sources.
struct Origin {
  int64_t step = 0, tokens = 0, samples = 0;
  std::vector<SourcePosition> sources;  // empty: at their beginnings
};

// After this update, so many samples of the stream are left out: those that a rollback passes over.
struct Skip {
  int64_t step, samples;
  bool operator==(const Skip&) const = default;
};

// Steps of one size, with the samples of one length and mix.
struct Stretch {
  size_t stage = 0;
  Options options = {};               // with which its steps run
  int64_t first_step = 0, steps = 0;  // first_step: done before it
  int64_t tokens = 0, samples = 0;    // of the run before it
  int64_t tokens_per_step = 0, samples_per_step = 0;
  int64_t seq_len = 0;
  std::vector<int64_t> weights = {};
  int64_t mixed = 0;  // samples in this mix before it, in a row
  LrSchedule schedule = {};
  int64_t counted = 0, per_step = 1;         // what the schedule counts before its first step, and for each step
  int64_t warmup_tokens = 0;                 // of a schedule in steps, whose steps have changed size; 0: it says them
  std::vector<SourcePosition> sources = {};  // at its beginning
  std::vector<Skip> skips = {};              // between its steps

  int64_t last_step() const { return first_step + steps; }
  double learning_rate(int64_t step) const {
    if (tokens_after(step) < warmup_tokens)
      return schedule.peak * static_cast<double>(tokens_after(step)) / static_cast<double>(warmup_tokens);
    return llmc::learning_rate(schedule, counted + (step - first_step) * per_step);
  }
  int64_t tokens_after(int64_t step) const { return tokens + (step - first_step) * tokens_per_step; }
  // Of the run, with those left out before this update.
  int64_t samples_after(int64_t step) const {
    int64_t all = samples + (step - first_step) * samples_per_step;
    for (const Skip& skip : skips)
      if (skip.step < step) all += skip.samples;
    return all;
  }
};

class Course {
 public:
  // epoch_tokens: of each source; empty: the data are not known, and neither is where they are read. skips: in
  // ascending order; those before the origin are part of its positions.
  Course(Recipe recipe, const std::vector<int64_t>& epoch_tokens, Origin origin = {}, std::vector<Skip> skips = {})
      : recipe_(std::move(recipe)), origin_(std::move(origin)), epoch_tokens_(epoch_tokens), skips_(std::move(skips)) {
    origin_.sources.resize(recipe_.sources.size());
    if (recipe_.staged) unroll();
    else unroll_options();
    follow_sources();
  }

  const Recipe& recipe() const { return recipe_; }
  const Origin& origin() const { return origin_; }
  const std::vector<Skip>& skips() const { return skips_; }
  // At least one, which may have no steps left.
  const std::vector<Stretch>& stretches() const { return stretches_; }
  int64_t steps() const { return stretches_.back().last_step(); }
  int64_t tokens() const { return tokens_after(steps()); }

  // The stretch of an update; of those after the last, the last.
  size_t stretch_of(int64_t step) const {
    size_t i = 0;
    while (i + 1 < stretches_.size() && step > stretches_[i].last_step()) ++i;
    return i;
  }
  int64_t tokens_after(int64_t step) const { return stretches_[stretch_of(step)].tokens_after(step); }
  int64_t samples_after(int64_t step) const { return stretches_[stretch_of(step)].samples_after(step); }
  double learning_rate(int64_t step) const { return stretches_[stretch_of(step)].learning_rate(step); }
  // How often source s has been read there.
  double epochs(size_t s, const SourcePosition& at) const {
    return static_cast<double>(at.epoch) + static_cast<double>(at.tokens) / static_cast<double>(epoch_tokens_[s]);
  }
  // Rejects a run that would read a source too often.
  void require_allowed_epochs() const {
    // The samples that take the place of those left out do not count.
    if (epoch_tokens_.empty() || !skips_.empty()) return;
    const std::vector<SourcePosition> at = sources_after(steps());
    for (size_t s = 0; s < epoch_tokens_.size(); ++s) {
      const std::optional<double> most = recipe_.sources[s].max_epochs;
      const double read = epochs(s, at[s]);
      // --epochs is rounded up to whole steps.
      const double step = recipe_.stages[0].options.epochs ? static_cast<double>(stretches_.back().tokens_per_step) /
                                                                 static_cast<double>(epoch_tokens_[s])
                                                           : 0;
      CHECK(!most || read <= *most + step,
            "--data {}: the run would read it {:.3f} times, and at most {} are allowed: lower its weight, shorten the "
            "run, or allow more",
            recipe_.sources[s].name, read, *most);
    }
  }
  std::vector<SourcePosition> sources_after(int64_t step) const {
    const Stretch& stretch = stretches_[stretch_of(step)];
    return order_of(stretch).after(stretch.samples_after(step) - stretch.samples);
  }
  SampleOrder order_of(const Stretch& stretch) const {
    std::vector<SampleOrder::Source> all;
    for (size_t s = 0; s < epoch_tokens_.size(); ++s) all.push_back({epoch_tokens_[s], stretch.sources[s]});
    return SampleOrder(std::move(all), stretch.weights, stretch.seq_len, stretch.mixed);
  }

 private:
  // One stage, in the steps of --max-steps, --tokens or --epochs. What a run has done before its origin counts.
  void unroll_options() {
    const RecipeStage& stage = recipe_.stages[0];
    const Options& o = stage.options;
    Stretch only = stretch(0, stage.ramp[0].tokens_per_step);
    // Where steps have changed size on the way, tokens are counted, not steps.
    const int64_t before = origin_.step - origin_.tokens / only.tokens_per_step;
    int64_t all = choose_steps(o, only.tokens_per_step, epoch_tokens_.empty() ? 0 : epoch_tokens_[0]);
    if (!o.max_steps && origin_.step > 0) all += before;
    only.steps = std::max<int64_t>(0, all - origin_.step);
    only.schedule = choose_lr_schedule(o, all, only.tokens_per_step);
    only.counted = origin_.step;
    if (origin_.tokens != origin_.step * only.tokens_per_step) count_tokens(only);
    append(std::move(only));
  }

  // After steps of another size: what the options give in tokens stays that many tokens of the run.
  void count_tokens(Stretch& s) const {
    const Options& o = s.options;
    LrSchedule& rates = s.schedule;
    const int64_t each = s.tokens_per_step, so_far = origin_.tokens;
    if (!o.max_steps) {  // so is the length
      CHECK(rates.length <= std::numeric_limits<int64_t>::max() / each, "{} is more tokens than 64 bits count",
            length_text(o));
      rates.length = so_far + s.steps * each;
      rates.warmup = o.warmup_tokens ? o.warmup_tokens->tokens : std::min(tokens_of(rates.warmup, each), rates.length);
      if (rates.decay) rates.decay = o.decay_tokens ? o.decay_tokens->tokens : *rates.decay * each;
      rates.first = std::max<int64_t>(1, so_far / std::max<int64_t>(1, origin_.step));
      s.counted = so_far, s.per_step = each;
    } else if (o.warmup_tokens) {
      const int64_t warmup = o.warmup_tokens->tokens;
      s.warmup_tokens = warmup;
      // The step after which it ends, or has ended, had all steps been of their mean size.
      rates.warmup = warmup > so_far ? origin_.step + ceil_div(warmup - so_far, each)
                                     : static_cast<int64_t>(static_cast<double>(origin_.step) *
                                                            static_cast<double>(warmup) / static_cast<double>(so_far));
    }
  }

  // Of the run's first steps, before its origin of their mean size, and of `each` after it.
  int64_t tokens_of(int64_t steps, int64_t each) const {
    if (steps > origin_.step) return origin_.tokens + (steps - origin_.step) * each;
    return static_cast<int64_t>(static_cast<double>(origin_.tokens) * static_cast<double>(steps) /
                                static_cast<double>(std::max<int64_t>(1, origin_.step)));
  }

  Stretch stretch(size_t stage, int64_t tokens_per_step) const {
    const Options& o = recipe_.stages[stage].options;
    Stretch s{.stage = stage,
              .options = o,
              .first_step = origin_.step,
              .tokens = origin_.tokens,
              .samples = origin_.samples,
              .tokens_per_step = tokens_per_step,
              .samples_per_step = tokens_per_step / o.seq_len,
              .seq_len = o.seq_len,
              .weights = recipe_.stages[stage].weights};
    if (recipe_.staged) s.options.total_batch_size = tokens_per_step;
    return s;
  }

  // The stages in tokens, each in pieces of whole steps. Pieces that the run had behind it at its origin are left out.
  void unroll() {
    int64_t begin = 0;  // tokens from the run's beginning to the stage, had it always had this recipe
    for (size_t i = 0; i < recipe_.stages.size(); ++i) {
      const RecipeStage& stage = recipe_.stages[i];
      std::vector<std::pair<int64_t, int64_t>> pieces;  // steps, tokens of each
      const int64_t length = lay_out(stage, pieces);
      const Options& o = stage.options;
      const LrSchedule schedule{.shape = o.lr_schedule,
                                .peak = o.lr,
                                .warmup = stage.warmup.value_or(0),
                                .length = length,
                                .final_frac = o.final_lr_frac,
                                .decay = stage.decay,
                                .first = pieces[0].second};
      CHECK(schedule.warmup <= length, "--stages {}: the warmup of stage \"{}\", {} tokens, exceeds its {} tokens",
            o.stages, stage.name, schedule.warmup, length);
      int64_t done = 0;  // tokens of the stage
      for (const auto& [steps, per_step] : pieces) {
        const int64_t piece = steps * per_step, left = begin + done + piece - origin_.tokens;
        if (left > 0) {
          Stretch s = stretch(i, per_step);
          s.steps = left < piece ? ceil_div(left, per_step) : steps;
          s.schedule = schedule;
          s.counted = done + std::max<int64_t>(0, piece - left);
          s.per_step = per_step;
          append(std::move(s));
        }
        done += piece;
      }
      CHECK(begin <= std::numeric_limits<int64_t>::max() / 2 - done, "--stages {}: more tokens than 64 bits count",
            o.stages);
      begin += done;
    }
    if (stretches_.empty())  // nothing is left
      stretches_.push_back(stretch(recipe_.stages.size() - 1, recipe_.stages.back().ramp.back().tokens_per_step));
  }

  void append(Stretch s) {
    if (!stretches_.empty()) {
      const Stretch& last = stretches_.back();
      s.first_step = last.last_step();
      s.tokens = last.tokens_after(s.first_step);
      s.samples = last.samples_after(s.first_step);
      if (s.weights == last.weights) s.mixed = last.mixed + s.samples - last.samples;
    }
    take_skips(s);
    stretches_.push_back(std::move(s));
  }

  void take_skips(Stretch& s) const {
    for (const Skip& skip : skips_)
      if (skip.step >= s.first_step && skip.step < s.last_step()) s.skips.push_back(skip);
  }

  // The steps of a stage; returns their tokens.
  int64_t lay_out(const RecipeStage& stage, std::vector<std::pair<int64_t, int64_t>>& pieces) const {
    constexpr int64_t most = std::numeric_limits<int64_t>::max() / 4;
    const std::string& file = stage.options.stages;
    int64_t all = most;
    if (stage.tokens) all = *stage.tokens;
    if (stage.epochs) {
      const size_t source = static_cast<size_t>(std::ranges::find_if(stage.weights, [](int64_t w) { return w > 0; }) -
                                                stage.weights.begin());
      CHECK(!epoch_tokens_.empty(),
            "--stages {}: stage \"{}\" is {} epochs long, which depends on the data: name them, or say tokens", file,
            stage.name, *stage.epochs);
      const double exact = *stage.epochs * static_cast<double>(epoch_tokens_[source]);
      all = exact < static_cast<double>(most) ? std::max<int64_t>(1, std::llround(exact)) : most;
    }
    CHECK(all < most || stage.steps, "--stages {}: stage \"{}\" has more tokens than 64 bits count", file, stage.name);
    int64_t done = 0, steps_left = stage.steps.value_or(most);
    for (size_t p = 0; p < stage.ramp.size() && done < all && steps_left > 0; ++p) {
      const int64_t per_step = stage.ramp[p].tokens_per_step,
                    end = p + 1 < stage.ramp.size() ? std::min(all, stage.ramp[p + 1].from) : all;
      if (end <= done) continue;
      const int64_t steps = std::min(steps_left, ceil_div(end - done, per_step));
      CHECK(steps <= (most - done) / per_step, "--stages {}: stage \"{}\" has more tokens than 64 bits count", file,
            stage.name);
      pieces.emplace_back(steps, per_step);
      done += steps * per_step;
      steps_left -= steps;
    }
    return done;
  }

  // Where each stretch begins in the sources.
  void follow_sources() {
    std::vector<SourcePosition> at = origin_.sources;
    for (Stretch& stretch : stretches_) {
      stretch.sources = at;
      if (!epoch_tokens_.empty())
        at = order_of(stretch).after(stretch.samples_after(stretch.last_step()) - stretch.samples);
    }
  }

  Recipe recipe_;
  Origin origin_;
  std::vector<int64_t> epoch_tokens_;
  std::vector<Skip> skips_;
  std::vector<Stretch> stretches_;
};

}  // namespace llmc
