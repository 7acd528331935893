// recipe.h: the stages of a run. Without --stages there is one, which the options describe; a file of stages gives some
// of them other values, from stage to stage. README.md in this folder describes the file.
#pragma once
#include "core/toml.h"
#include "run/length.h"
#include "run/options/parse.h"
#include "run/recipe/sources.h"

namespace llmc {

// A file of stages as JSON, and the line of each value of TOML.
struct RecipeFile {
  std::string path;
  nlohmann::json root;
  std::map<std::string, int> lines;  // by JSON pointer; of TOML

  // "recipe.toml:12" where the file has lines, otherwise "recipe.json: /stage/0/tokens".
  std::string place(const std::string& pointer) const {
    const auto line = lines.find(pointer);
    if (line != lines.end()) return formatted("{}:{}", path, line->second);
    return lines.empty() && !pointer.empty() ? path + ": " + shown(pointer) : path;
  }
};

inline RecipeFile read_recipe_file(const std::string& path) {
  CHECK(path_exists(path), "--stages {}: there is no such file", path);
  if (path.ends_with(".json")) return {path, read_json(path), {}};
  CHECK(path.ends_with(".toml"), "--stages {}: expected a file that ends with .toml or .json", path);
  const std::string text = read_text(path, 1 << 20);
  const auto fault = utf8_fault(text);
  CHECK(!fault, "--stages {}: byte {} is not UTF-8", path, fault.value_or(0) + 1);
  int dots = 0;  // a.b.c: tables in tables, which the parser builds and frees by recursion
  for (const char c : text) {
    dots = c == '\n' ? 0 : dots + (c == '.');
    CHECK(dots <= 256, "--stages {}: a line with more than 256 dots, which no setting of a stage has", path);
  }
  const TomlFile toml = read_toml(text);
  CHECK(toml.fault_line == 0, "{}:{}: {}", path, toml.fault_line, shown(toml.fault, 300));
  return {path, parse_json(toml.json, path), toml.lines};
}

// From this token of its stage on, the steps have so many tokens.
struct RampPiece {
  int64_t from, tokens_per_step;
};

struct RecipeStage {
  std::string name, place;  // place: in the file; empty: there is none
  Options options;          // of the run, with the values that the stage gives
  // How long it is: one of these.
  std::optional<int64_t> tokens, steps;
  std::optional<double> epochs;
  std::vector<int64_t> weights;          // of the sources; 0: not in this stage
  std::vector<RampPiece> ramp;           // at least one
  std::optional<int64_t> warmup, decay;  // in tokens
};

// Calls f, which a fault of the stage ends: the error names its place, and those of the options that it is about.
template <class F>
auto in_stage(const RecipeStage& stage, F&& f) {
  try {
    return f();
  } catch (const Error& error) {
    if (stage.place.empty()) throw;
    std::map<std::string, std::string> own = stage.options.config_lines;  // main() names those of --config
    std::erase_if(own, [&](const auto& line) { return !line.second.starts_with(stage.options.stages + ":"); });
    throw Error(formatted("{}: stage \"{}\": {}", stage.place, stage.name, with_config_lines(error.what(), own)),
                error.status());
  }
}

struct Recipe {
  std::vector<SourceText> sources;
  std::vector<RecipeStage> stages;
  bool staged = false;  // by a file
  nlohmann::json text;  // the stages of the file, as recorded; null: no file
  // recipe_checksum() before its data were moved, under which the run's rollbacks know it; empty: they were not
  std::string known_as = {};
  int64_t longest() const {
    int64_t T = 1;
    for (const RecipeStage& stage : stages) T = std::max(T, stage.options.seq_len);
    return T;
  }
};

namespace detail {

inline std::vector<RampPiece> one_size(const Options& o) {
  const int64_t readers = std::max<int64_t>(1, o.ranks / (o.tp * o.cp * o.pp));  // which take other micro-batches
  return {{0, o.total_batch_size.value_or(micro_batch_tokens(o, readers))}};
}

inline std::vector<int64_t> weights_of(const std::vector<SourceText>& sources) {
  std::vector<double> weights;
  for (const SourceText& source : sources) weights.push_back(source.weight);
  return Mixture::shares(weights);
}

// One stage of a file.
class StageReader {
 public:
  StageReader(const RecipeFile& file, size_t number, const Options& o, const std::vector<SourceText>& sources)
      : file_(file), pointer_(formatted("/stage/{}", number)), json_(file.root["stage"][number]), sources_(sources) {
    CHECK(json_.is_object(), "{}: stage {} is {}, expected a table of settings", file_.place(pointer_), number + 1,
          json_);
    stage_.options = o;
    stage_.name = formatted("{}", number + 1);
    stage_.place = file_.place(pointer_);
  }

  RecipeStage read() {
    for (const auto& [key, value] : json_.items()) take(key, value);
    const int lengths = stage_.tokens.has_value() + stage_.steps.has_value() + stage_.epochs.has_value() + has("share");
    CHECK(lengths == 1,
          "{}: stage \"{}\" has {} of tokens, steps, epochs and share: give one of them, how long the stage is",
          file_.place(pointer_), stage_.name, lengths == 0 ? "none" : "several");
    if (has("share")) {
      const std::optional<TokenCount>& all = stage_.options.tokens;
      CHECK(all, "{}: share = {} is a part of --tokens: give --tokens, or say tokens or steps", place("share"),
            json_["share"]);
      const double share = number("share", json_["share"]);
      CHECK(share > 0 && share <= 1, "{}: share is {}, expected a number above 0, at most 1", place("share"), share);
      stage_.tokens = std::max<int64_t>(1, std::llround(share * static_cast<double>(all->tokens)));
    }
    if (!has("data")) stage_.weights = weights_of(sources_);
    CHECK(!stage_.epochs || std::ranges::count_if(stage_.weights, [](int64_t w) { return w > 0; }) == 1,
          "{}: epochs = {} of a mix of sources, each of which has its own: say tokens or steps", place("epochs"),
          json_["epochs"]);
    CHECK(has("batch-ramp") + has("batch-doubling") <= 1,
          "{}: stage \"{}\" has batch-ramp and batch-doubling: give one of them", file_.place(pointer_), stage_.name);
    in_stage(stage_, [&] { check_limits(stage_.options); });
    if (!has("batch-ramp")) stage_.ramp = one_size(stage_.options);
    if (has("batch-doubling")) read_doubling();
    in_stage(stage_, [&] {
      for (const RampPiece& piece : stage_.ramp) {
        Options step = stage_.options;
        step.total_batch_size = piece.tokens_per_step;
        step.stages.clear();  // a stage alone
        step.price.reset();   // of the run
        validate(step);
      }
    });
    CHECK(!stage_.decay || stage_.options.lr_schedule == LrShape::wsd,
          "{}: decay is for lr-schedule = \"wsd\", and this stage's is {}: leave it out", place("decay"),
          stage_.options.lr_schedule);
    stage_.options.stage = {formatted("stage \"{}\" of {}", stage_.name, file_.path),
                            has("batch-ramp") || has("batch-doubling")};
    return stage_;
  }

 private:
  bool has(const char* key) const { return json_.contains(key); }
  std::string place(const std::string& key) const { return file_.place(pointer_ + "/" + key); }

  double number(const std::string& key, const nlohmann::json& value) const {
    CHECK(value.is_number() && std::isfinite(value.get<double>()), "{}: {} is {}, expected a number", place(key), key,
          value);
    return value;
  }
  // 300000000 or "300M"
  int64_t tokens(const std::string& key, const nlohmann::json& value, int64_t least) const {
    std::optional<int64_t> count = whole_number(value);
    if (value.is_string())
      if (const auto read = token_count(value.get<std::string>())) count = read->tokens;
    CHECK(count && *count >= least,
          "{}: {} is {}, expected a whole number of tokens from {} on, such as 1000000 or \"300M\"", place(key), key,
          value, least);
    return *count;
  }

  // Every setting of a stage, and what takes its value.
  using Take = void (StageReader::*)(const std::string& key, const nlohmann::json& value);
  static const std::map<std::string, Take>& settings() {
    using R = StageReader;
    static const std::map<std::string, Take> all = [] {
      std::map<std::string, Take> made = {
          {"name", &R::take_name}, {"epochs", &R::take_epochs}, {"data", &R::take_mix}, {"batch-ramp", &R::take_ramp}};
      for (const char* key : {"tokens", "steps", "warmup", "decay"}) made[key] = &R::take_length;
      for (const char* key : {"share", "batch-doubling"}) made[key] = &R::take_later;
      for (const char* key : {"seq-len", "batch-size", "total-batch-size", "lr", "lr-schedule", "final-lr-frac",
                              "mask-documents", "grad-clip", "rope-theta", "rope-factor", "recompute", "head-chunks"})
        made[key] = &R::take_option;
      return made;
    }();
    return all;
  }
  void take(const std::string& key, const nlohmann::json& value) {
    const auto setting = settings().find(key);
    if (setting != settings().end()) return (this->*setting->second)(key, value);
    std::vector<std::string> all;
    for (const auto& [name, how] : settings()) all.push_back(name);
    const auto similar = similar_names(key, all);
    throw Error(formatted(
        "{}: {}: no setting of a stage has this name{}", place(key), shown(key),
        similar.size() == 1 ? formatted("; did you mean {}?", similar[0]) : formatted(": expected one of {}", all)));
  }

  void take_name(const std::string& key, const nlohmann::json& value) {
    CHECK(value.is_string() && !value.get<std::string>().empty(), "{}: name is {}, expected text", place(key), value);
    stage_.name = value;
  }
  void take_length(const std::string& key, const nlohmann::json& value) {
    std::optional<int64_t>& field = key == "tokens"   ? stage_.tokens
                                    : key == "steps"  ? stage_.steps
                                    : key == "warmup" ? stage_.warmup
                                                      : stage_.decay;
    field = tokens(key, value, key == "warmup" ? 0 : 1);
  }
  void take_epochs(const std::string& key, const nlohmann::json& value) {
    stage_.epochs = number(key, value);
    CHECK(*stage_.epochs > 0, "{}: epochs is {}, expected a number above 0", place(key), value);
  }
  void take_later(const std::string&, const nlohmann::json&) {}  // by read(), once the others are known

  // data = {web = 0.7, code = 0.3}
  void take_mix(const std::string&, const nlohmann::json& value) {
    CHECK(value.is_object() && !value.empty(),
          "{}: data is {}, expected weights by source, such as {web = 0.7, code = 0.3}", place("data"), value);
    std::vector<double> weights(sources_.size());
    for (const auto& [name, weight] : value.items()) {
      std::vector<std::string> names;
      const auto source = std::ranges::find(sources_, name, &SourceText::name);
      for (const SourceText& s : sources_)
        names.push_back(s.name.empty() ? "none, as --train-data has no name" : s.name);
      CHECK(source != sources_.end(), "{}: data names {}, which is no --data; the sources are {}",
            place("data/" + name), shown(name), either(names, "and"));
      const double w = number("data/" + name, weight);
      CHECK(w >= 0, "{}: the weight of {} is {}, expected a number from 0 on", place("data/" + name), name, w);
      weights[static_cast<size_t>(source - sources_.begin())] = w;
    }
    const double largest = *std::ranges::max_element(weights);
    CHECK(largest > 0, "{}: all weights are 0", place("data"));
    for (size_t i = 0; i < weights.size(); ++i)
      CHECK(weights[i] == 0 || weights[i] >= smallest_weight * largest,
            "{}: the weight of {} is less than {} of the largest: leave it out", place("data"), sources_[i].name,
            smallest_weight);
    stage_.weights = Mixture::shares(weights);
  }

  // batch-ramp = [[0, 65536], ["50M", 131072]]
  void take_ramp(const std::string&, const nlohmann::json& value) {
    const auto is_piece = [](const nlohmann::json& piece) { return piece.is_array() && piece.size() == 2; };
    CHECK(value.is_array() && !value.empty() && std::ranges::all_of(value, is_piece),
          "{}: batch-ramp is {}, expected a list of [from which token of the stage on, tokens of a step], such as "
          "[[0, 65536], [\"50M\", 131072]]",
          place("batch-ramp"), value);
    for (const nlohmann::json& piece : value)
      stage_.ramp.push_back({tokens("batch-ramp", piece[0], 0), tokens("batch-ramp", piece[1], 1)});
    CHECK(stage_.ramp[0].from == 0, "{}: batch-ramp begins at token {}, expected 0", place("batch-ramp"),
          stage_.ramp[0].from);
    for (size_t i = 1; i < stage_.ramp.size(); ++i)
      CHECK(stage_.ramp[i].from > stage_.ramp[i - 1].from, "{}: batch-ramp: {} comes after {}: sort it",
            place("batch-ramp"), stage_.ramp[i].from, stage_.ramp[i - 1].from);
  }

  // batch-doubling = {from = 65536, every = "50M"}, up to total-batch-size
  void read_doubling() {
    constexpr const char* key = "batch-doubling";
    const nlohmann::json& value = json_[key];
    CHECK(value.is_object() && value.size() == 2 && value.contains("from") && value.contains("every"),
          "{}: batch-doubling is {}, expected {from = tokens of the first steps, every = tokens between doublings}",
          place(key), value);
    const int64_t from = tokens("batch-doubling/from", value["from"], 1),
                  every = tokens("batch-doubling/every", value["every"], 1), last = stage_.ramp[0].tokens_per_step;
    int64_t size = from, at = 0;
    stage_.ramp.clear();
    for (; size < last; size *= 2, at += every) {
      stage_.ramp.push_back({at, size});
      CHECK(size <= last / 2 && at <= std::numeric_limits<int64_t>::max() / 2 - every,
            "{}: batch-doubling from {} does not reach total-batch-size, {}, by doubling: use a power of two of it",
            place(key), from, last);
    }
    CHECK(size == last, "{}: batch-doubling from {}, and total-batch-size is {}: use less", place(key), from, last);
    stage_.ramp.push_back({at, last});
  }

  // Any option of the list, by its name without the dashes.
  void take_option(const std::string& key, const nlohmann::json& value) {
    CHECK(value.is_string() || value.is_number() || value.is_boolean(), "{}: {} is {}, expected a value", place(key),
          key, value);
    std::string text = value.is_string() ? value.get<std::string>() : value.dump();
    if (key == "total-batch-size") text = std::to_string(tokens(key, value, 1));
    const std::string name = "--" + key;
    for (const OptionRow& row : option_rows(stage_.options))
      if (name == row.name) row.field.parse(formatted("{}: {}", place(key), key), text);
    stage_.options.config_lines[name] = place(key);
  }

  const RecipeFile& file_;
  std::string pointer_;
  const nlohmann::json& json_;
  const std::vector<SourceText>& sources_;
  RecipeStage stage_;
};

}  // namespace detail

// The options of a stage's steps with its warm-up, as a table of them says it.
inline Options with_warmup(const RecipeStage& stage, Options o) {
  if (stage.warmup) o.warmup_tokens = {*stage.warmup, std::to_string(*stage.warmup)};
  return o;
}

// The recipe that the options, and the file that they name, describe. Reads no data.
inline Recipe read_recipe(const Options& o) {
  Recipe recipe{.sources = source_texts(o), .stages = {}, .staged = !o.stages.empty(), .text = {}};
  if (!recipe.staged) {
    RecipeStage only;
    only.options = o;
    only.weights = detail::weights_of(recipe.sources);
    only.ramp = detail::one_size(o);
    CHECK(recipe.sources.size() == 1 || o.max_steps || o.tokens,
          "--data of {} sources, each with its own epochs: say how long the run is by --tokens or --max-steps{}",
          recipe.sources.size(), o.epochs ? formatted(", not by --epochs {}", *o.epochs) : "");
    recipe.stages.push_back(std::move(only));
    return recipe;
  }
  for (const auto& [given, option] :
       {std::pair{o.max_steps.has_value(), "--max-steps"}, std::pair{o.epochs.has_value(), "--epochs"},
        std::pair{o.warmup_steps > 0, "--warmup-steps"}, std::pair{o.decay_steps.has_value(), "--decay-steps"},
        std::pair{o.warmup_tokens.has_value(), "--warmup-tokens"},
        std::pair{o.decay_tokens.has_value(), "--decay-tokens"}, std::pair{o.overfit_batch, "--overfit-batch"}})
    CHECK(!given, "{} with --stages {}, whose stages say this in tokens (tokens, warmup, decay): leave it out", option,
          o.stages);
  CHECK(o.schedule != Schedule::pipedream,
        "--stages with --schedule pipedream, whose pipeline would be emptied between stages, which changes what it "
        "learns: use another schedule");
  const RecipeFile file = read_recipe_file(o.stages);
  for (const auto& [key, value] : file.root.items())
    CHECK(key == "stage", "{}: {} is unknown: expected [[stage]], one for each stage", file.place("/" + key),
          shown(key));
  const nlohmann::json stages = file.root.value("stage", nlohmann::json());
  CHECK(stages.is_array() && !stages.empty(), "{}: no stages: expected [[stage]] for each one", file.path);
  constexpr size_t most = 10'000;
  CHECK(stages.size() <= most, "{}: {} stages, at most {} are read", file.path, stages.size(), most);
  bool shares = false;
  for (size_t i = 0; i < stages.size(); ++i) {
    recipe.stages.push_back(detail::StageReader(file, i, o, recipe.sources).read());
    for (size_t j = 0; j < i; ++j)
      CHECK(recipe.stages[j].name != recipe.stages[i].name, "{}: two stages are called \"{}\"",
            file.place(formatted("/stage/{}", i)), recipe.stages[i].name);
    shares |= stages[i].contains("share");
  }
  CHECK(!o.tokens || shares, "--tokens {} with --stages {}, whose stages say how long they are: leave it out",
        *o.tokens, o.stages);
  const int64_t block = recipe.longest();
  for (const RecipeStage& stage : recipe.stages)
    CHECK(o.pack == Packing::stream || stage.options.seq_len == block,
          "--pack {} with stages of {} and of {} tokens: rows are packed for one length: use one, or --pack stream",
          o.pack, stage.options.seq_len, block);
  for (const RecipeStage& stage : recipe.stages)
    CHECK(
        block % stage.options.seq_len == 0,
        "{}: stage \"{}\" has sequences of {} tokens, which do not divide the longest, {}: samples are cut from blocks "
        "of that length; use one of {}",
        file.path, stage.name, stage.options.seq_len, block, divisors(block));
  recipe.text = stages;
  return recipe;
}

}  // namespace llmc
