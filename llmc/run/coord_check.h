// coord_check.h: --coord-check: do the sizes of activations, and how far some steps of training change them, stay the
// same when a model becomes wider or deeper? If they do, so does the best learning rate (Yang et al. 2022, appendix D).
// Every model trains for a few steps, from several seeds, on the same made-up text; then the slope of each size over
// the widths is fitted, log against log.
#pragma once
#include "core/work_progress.h"
#include "run/processes.h"
#include "run/requirements.h"

namespace llmc::coord {

inline constexpr int64_t steps = 10, seeds = 3, least_width = 128;
inline constexpr BatchShape batch_shape{32, 32};

// Activations of all layers. Scores: of attention, of the last row of each sequence, before the softmax.
enum class Kind : uint8_t { embedding, qkv, scores, attention, hidden, stream, logits };
constexpr auto names_of_values(Kind) {
  return std::array{"embedding", "queries, keys, values", "attention scores", "attention", "hidden", "residual stream",
                    "logits"};
}
inline constexpr size_t kinds = std::size(names_of_values(Kind{}));
// Whether the size is to stay the same. What weights that have learnt nothing contribute to logits and scores vanishes
// with the width, and what blocks contribute to the stream with the depth: there, only the change does.
inline bool keeps_size(Kind kind) { return kind != Kind::scores && kind != Kind::logits; }
// How far from zero a slope may be. Without a multiplier or with a wrong rate it is off by 1/2 or 1. Scores vary most
// from seed to seed: from 128 to 512 the slopes of eight draws had a standard deviation of 0.03, between two of these
// widths of 0.08; with the depth l, sizes approach their limits as slowly as 1 / l.
inline double most_slope(Kind kind, bool of_width) { return kind == Kind::scores ? 0.25 : of_width ? 0.05 : 0.15; }

using Activations = std::array<std::vector<float>, kinds>;

// A text of few tokens, so that all contexts have something in common: what has not, a model's random weights, vanishes
// only slowly with the width. The next token is one of four that follow from the last one.
inline constexpr int64_t vocabulary = 8;
inline HostBatch read_batch(int64_t V, uint64_t seed, int64_t step) {
  const Philox rng(seed, formatted("coordinate check, step {}", step));
  const uint64_t tokens = static_cast<uint64_t>(V), T = static_cast<uint64_t>(batch_shape.T);
  HostBatch batch;
  for (uint64_t b = 0, i = 0; b < static_cast<uint64_t>(batch_shape.B); ++b) {
    uint64_t token = rng.bits(i++) % tokens;
    for (uint64_t t = 0; t < T; ++t) {
      batch.tokens.push_back(static_cast<int32_t>(token));
      token = (5 * token + 1 + rng.bits(i++) % 4) % tokens;
      batch.targets.push_back(static_cast<int32_t>(token));
      batch.positions.push_back(static_cast<int32_t>(t));
    }
  }
  return batch;
}

// The scores of a head in all sequences.
inline constexpr int64_t scores_of_head = batch_shape.B * batch_shape.T;

// Appends q k / sqrt(D) of the last row of each sequence with all of its rows, head by head.
// heads (N, (Hq + 2 Hkv) D)
inline void append_scores(std::vector<float>& scores, const std::vector<float>& heads, const ModelConfig& c) {
  const int64_t D = c.head_size, width = c.qkv_size(), T = batch_shape.T;
  for (int64_t h = 0; h < c.n_head; ++h)
    for (int64_t b = 0; b < batch_shape.B; ++b) {
      const float* q = heads.data() + ((b + 1) * T - 1) * width + h * D;
      for (int64_t t = 0; t < T; ++t) {
        const float* k = heads.data() + (b * T + t) * width + c.q_size() + h / (c.n_head / c.n_kv_head) * D;
        double score = 0;
        for (int64_t i = 0; i < D; ++i) score += static_cast<double>(q[i]) * static_cast<double>(k[i]);
        scores.push_back(static_cast<float>(score / std::sqrt(static_cast<double>(D))));
      }
    }
}

// Those of one forward.
inline Activations activations_of(Trainer& trainer, const HostBatch& batch) {
  Stream& stream = trainer.stream();
  Activations all;
  std::vector<float> heads;
  const auto keep = [&](Kind kind, const std::vector<float>& values) {
    std::vector<float>& to = all[static_cast<size_t>(kind)];
    to.insert(to.end(), values.begin(), values.end());
  };
  const Inspection inspection(stream, [&](std::string_view op, const Tensor& t) {
    const std::string_view name = t.name;
    const bool product = op == "linear_forward";
    if (name == "embedded" && op != "zero") keep(Kind::embedding, values_of<float>(t, stream));
    if (name == "qkv" && product) keep(Kind::qkv, values_of<float>(t, stream));
    if (name == "qkv" || name == "heads") heads = values_of<float>(t, stream);
    if (name == "attention" && op == "attention_forward") {
      append_scores(all[static_cast<size_t>(Kind::scores)], heads, trainer.config().model);
      keep(Kind::attention, values_of<float>(t, stream));
    }
    if (name == "activated") keep(Kind::hidden, values_of<float>(t, stream));
    if (name == "out" && op.ends_with("residual_forward")) keep(Kind::stream, values_of<float>(t, stream));
    if (name == "logits" && product) keep(Kind::logits, values_of<float>(t, stream));
  });
  trainer.evaluate(1, batch_shape.rows(), [&](int64_t) { return batch; });
  return all;
}

// The logarithm of the root mean square of values, or of their change; of scores, the mean of those of the heads.
// Scores are sums of products whose sizes differ much between heads: in a mean of their squares few heads count, in a
// narrow model by chance one of the few, and a slope would be that of the number of heads.
inline double log_size(Kind kind, const std::vector<float>& values, const std::vector<float>& before = {}) {
  if (values.empty()) return -std::numeric_limits<double>::infinity();
  double logs = 0;
  const size_t n = kind == Kind::scores ? static_cast<size_t>(scores_of_head) : values.size();
  for (size_t begin = 0; begin < values.size(); begin += n) {
    double sum = 0;
    for (size_t i = begin; i < begin + n; ++i) {
      const double x = static_cast<double>(values[i]) - (before.empty() ? 0 : static_cast<double>(before[i]));
      sum += x * x;
    }
    logs += std::log(sum / static_cast<double>(n)) / 2;
  }
  return logs * static_cast<double>(n) / static_cast<double>(values.size());
}

// Logarithms of sizes after the steps; the change is that since the beginning.
struct Sizes {
  double size = 0, change = 0;
};
using ModelSizes = std::array<Sizes, kinds>;

inline ModelSizes train(const Options& o, const StepConfig& step, const Device& device, uint64_t seed) {
  ModelSizes sizes;
  const Plan plan = make_plan(step, device);
  World world(step.layout.mesh());
  run_ranks(world, [&](int rank) {
    Run run(step, plan, device, world, rank);
    init_weights(run.trainer.state(), seed, run.stream);
    const auto batch = [&](int64_t s) { return read_batch(step.model.vocab_size, seed, s); };
    const Activations before = activations_of(run.trainer, batch(0));
    for (int64_t s = 1; s <= steps; ++s) {
      const StepResult result = run.trainer.step([&](int64_t) { return batch(s); },
                                                 optimizer_options(o, o.lr, s, step.tokens()), {.max_norm = 0});
      CHECK(result.applied, "--coord-check: step {} of a model with {} channels has loss {}: lower --lr", s,
            step.model.n_embd, result.loss);
    }
    const Activations after = activations_of(run.trainer, batch(0));
    for (size_t k = 0; k < kinds; ++k) {
      const Kind kind = static_cast<Kind>(k);
      sizes[k] = {log_size(kind, after[k]), log_size(kind, after[k], before[k])};
    }
  });
  return sizes;
}

// The step of a model; throws Error if it cannot be computed.
inline StepConfig step_of(const Options& o, const ModelConfig& model, const Device& device) {
  StepConfig step{.model = model, .precision = choose_precision(o), .batch = batch_shape, .generates = false};
  const ZeroConfig zero = choose_zero(o);
  step.layout.zero.optimizer = zero.optimizer;
  step.layout.zero.muon = zero.muon;
  step.layout.expert = expert_parallel(model, 1);
  step.z_loss = o.z_loss;
  step.qk_clip = o.qk_clip;
  require_updates_can(model, o);
  require_gelu_can(step, device, o);
  require_residual_can(step, device, o);
  require_norms_can(step, device);
  return step;
}

// The means over all seeds.   trained(): called after each
inline ModelSizes sizes_of(
    const Options& o, const StepConfig& step, const Device& device, int64_t count,
    const std::function<void()>& trained = [] {}) {
  ModelSizes mean;
  for (int64_t s = 0; s < count; ++s) {
    const ModelSizes sizes = train(o, step, device, static_cast<uint64_t>(o.seed + s));
    trained();
    for (size_t k = 0; k < kinds; ++k)
      mean[k].size += sizes[k].size / static_cast<double>(count),
          mean[k].change += sizes[k].change / static_cast<double>(count);
  }
  return mean;
}

// The slope of the line of least squares.
inline double slope_of(const std::vector<double>& x, const std::vector<double>& y) {
  const double n = static_cast<double>(x.size());
  double mean_x = 0, mean_y = 0, xy = 0, xx = 0;
  for (size_t i = 0; i < x.size(); ++i) mean_x += x[i] / n, mean_y += y[i] / n;
  for (size_t i = 0; i < x.size(); ++i)
    xy += (x[i] - mean_x) * (y[i] - mean_y), xx += (x[i] - mean_x) * (x[i] - mean_x);
  return xy / xx;
}

// The sizes of one kind over all models along an axis.
struct Line {
  Kind kind;
  bool change;                // or the size itself
  std::vector<double> sizes;  // of each model
  double slope, most;         // the largest that is good
  bool checked;
  bool good() const { return !checked || std::abs(slope) <= most; }  // NaN is not
};
struct Axis {
  std::string name;  // "width"
  std::vector<int64_t> values;
  std::vector<Line> lines;
  bool good() const {
    return std::ranges::all_of(lines, [](const Line& line) { return line.good(); });
  }
};

// steps: of the models of these widths or depths
inline Axis check_axis(
    const char* name, const std::vector<int64_t>& values, const std::vector<StepConfig>& models, const Options& o,
    const Device& device, int64_t count = seeds, const std::function<void()>& trained = [] {}) {
  const bool width = name == std::string_view("width");
  Axis axis{name, values, {}};
  std::vector<ModelSizes> all;
  for (const StepConfig& step : models) all.push_back(sizes_of(o, step, device, count, trained));
  for (const Kind kind : all_values<Kind>())
    for (const bool change : {false, true}) {
      Line line{kind, change, {}, 0, most_slope(kind, width), change || (width && keeps_size(kind))};
      std::vector<double> x, y;
      for (size_t i = 0; i < values.size(); ++i) {
        const Sizes& sizes = all[i][static_cast<size_t>(kind)];
        const double log_size = change ? sizes.change : sizes.size;
        line.sizes.push_back(std::exp(log_size));
        if (!width || values[i] >= least_width)
          x.push_back(std::log(static_cast<double>(values[i]))), y.push_back(log_size);
      }
      line.slope = slope_of(x, y);
      if (line.sizes[0] > 0) axis.lines.push_back(std::move(line));  // a model with experts alone has no "hidden"
    }
  return axis;
}

// The model of --model with this width and depth. Its heads keep their size, unless --n-head says how many there are.
inline ModelConfig model_of(Options o, std::optional<int64_t> width, std::optional<int64_t> depth) {
  if (!o.vocab_size) o.vocab_size = vocabulary;
  if (depth) o.n_layer = depth;
  if (width && !o.n_head) {
    const int64_t head_size = choose_model(o).head_size;
    CHECK(*width % head_size == 0,
          "--coord-check: the width {} is no multiple of the head size, {}: use {}, or --n-head", *width, head_size,
          multiples_beside(*width, head_size));
    o.n_head = *width / head_size;
  }
  if (width) o.n_embd = width;
  return choose_model(o);
}

inline std::vector<int64_t> numbers_of(const char* option, const std::string& text) {
  std::vector<int64_t> numbers;
  for (const std::string& number : split(text, ',')) {
    const int64_t n = number_from<int64_t>(number).value_or(0);
    CHECK(n > 0 && n <= static_cast<int64_t>(largest_size),
          "{} {}: expected numbers with commas between them, such as 128,256,512", option, shown(text));
    numbers.push_back(n);
  }
  CHECK(std::ranges::is_sorted(numbers, std::less_equal()), "{} {}: expected numbers that rise", option, shown(text));
  return numbers;
}

// All models are made before the first is trained, so that one that cannot be is refused at once.
inline std::vector<Axis> check(const Options& o, Log& log) {
  const std::vector<int64_t> widths = numbers_of("--coord-check", o.coord_check);
  const auto narrowest = std::ranges::lower_bound(widths, least_width);
  CHECK(
      narrowest != widths.end() && widths.back() >= 4 * *narrowest,
      "--coord-check {}: slopes are over widths from {} on, and vary too much from seed to seed if the largest is not "
      "four times the smallest of these: give widths such as 128,256,512",
      o.coord_check, least_width);
  std::vector<int64_t> depths;
  if (!o.coord_depths.empty()) depths = numbers_of("--coord-depths", o.coord_depths);
  CHECK(o.coord_depths.empty() || depths.size() >= 2, "--coord-depths {}: expected at least two depths, such as 2,4,8",
        o.coord_depths);
  const Device device = choose_device(o);
  std::vector<StepConfig> wide, deep;
  for (const int64_t width : widths) wide.push_back(step_of(o, model_of(o, width, {}), device));
  for (const int64_t depth : depths) deep.push_back(step_of(o, model_of(o, widths[0], depth), device));
  WorkProgress progress(log);
  const int64_t all = seeds * std::ssize(wide) + seeds * std::ssize(deep);
  int64_t done = 0;
  const auto show = [&] { progress.show("training", done, all, formatted("model {} of {}", done + 1, all)); };
  const auto trained = [&] {
    if (++done < all) show();
  };
  show();
  std::vector<Axis> axes = {check_axis("width", widths, wide, o, device, seeds, trained)};
  if (!deep.empty()) axes.push_back(check_axis("depth", depths, deep, o, device, seeds, trained));
  return axes;
}

inline std::string text_of(const std::vector<Axis>& axes) {
  std::string text;
  for (const Axis& axis : axes) {
    text += formatted("{:-30}", axis.name);
    for (const int64_t v : axis.values) text += formatted(" {:9}", v);
    text += "    slope\n";
    for (const Line& line : axis.lines) {
      text += formatted("{:-22}{:-8}", name_of(line.kind), line.change ? "change" : "size");
      for (const double size : line.sizes) text += formatted(" {:9.3g}", size);
      text += formatted("   {:+.3f}{}\n", line.slope,
                        !line.good() ? formatted("  FAILED: beyond {}", line.most)
                                     : std::string(line.checked ? "" : "  (not checked)"));
    }
  }
  return text;
}

inline nlohmann::ordered_json json_of(const Options& o, const std::vector<Axis>& axes, bool good) {
  nlohmann::ordered_json json = {{"parametrization", name_of(o.parametrization)}, {"passed", good}};
  for (const Axis& axis : axes) {
    nlohmann::ordered_json lines = nlohmann::ordered_json::array();
    for (const Line& line : axis.lines)
      lines.push_back({{"kind", name_of(line.kind)},
                       {"of", line.change ? "change" : "size"},
                       {"values", line.sizes},
                       {"slope", line.slope},
                       {"checked", line.checked},
                       {"most", line.most}});
    json["axes"].push_back({{"axis", axis.name}, {"values", axis.values}, {"lines", lines}});
  }
  return json;
}

}  // namespace llmc::coord

namespace llmc {

inline void run_coord_check(const Options& o) {
  omp_set_num_threads(choose_device(o).threads);
  Log log = o.json ? Log::silent() : make_log(o);
  const std::vector<coord::Axis> axes = coord::check(o, log);
  const bool good = std::ranges::all_of(axes, [](const coord::Axis& axis) { return axis.good(); });
  if (o.json) std::printf("%s\n", coord::json_of(o, axes, good).dump(1).c_str());
  else
    log.line(formatted("{}, {}, lr {}: root mean squares after {} steps, and of what the steps changed\n{}{}",
                       o.parametrization, rule_of(o.optimizer).title, o.lr, coord::steps, coord::text_of(axes),
                       good ? "PASS: activations do not depend on the size of the model"
                            : "FAIL: activations depend on the size of the model"));
  if (!good)
    throw Error(formatted("--coord-check: activations of --parametrization {} depend on the size of the model",
                          o.parametrization),
                ExitStatus::diverged);
}

}  // namespace llmc
