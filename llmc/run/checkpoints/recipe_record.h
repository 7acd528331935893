// recipe_record.h: what trainer.json records of a run's recipe and of how far it has read its sources, and the course
// that a resumed run or a branch takes from there.
#pragma once
#include "core/checksum.h"
#include "core/log.h"
#include "run/checkpoints/resume_point.h"
#include "run/checkpoints/run_record.h"
#include "run/job.h"

namespace llmc {

namespace detail {

inline nlohmann::ordered_json position_json(const SourcePosition& at) {
  return nlohmann::ordered_json::array({at.epoch, at.tokens, at.samples});
}

// The facts that decide which samples a run takes, and at which rates.
inline nlohmann::json recipe_facts(const Recipe& recipe) {
  nlohmann::json stages = nlohmann::json::array(), sources = nlohmann::json::array();
  for (const RecipeStage& stage : recipe.stages) {
    nlohmann::json facts = {{"seq_len", stage.options.seq_len}, {"weights", stage.weights}};
    if (recipe.staged)
      for (const RampPiece& piece : stage.ramp)
        facts["tokens_per_step"].push_back(nlohmann::json::array({piece.from, piece.tokens_per_step}));
    stages.push_back(facts);
  }
  for (const SourceText& source : recipe.sources) sources.push_back({{"name", source.name}, {"files", source.pattern}});
  nlohmann::json facts = {{"stages", stages}, {"sources", sources}};
  if (recipe.staged) facts["file"] = recipe.text["stages"];
  if (const Packing pack = recipe.stages[0].options.pack; pack != Packing::stream) facts["pack"] = name_of(pack);
  return facts;
}

inline std::string recipe_checksum(const nlohmann::json& facts, int64_t tokens_per_step) {
  return checksum(facts.dump() + std::to_string(tokens_per_step));
}

}  // namespace detail

// Tells the recipes of two stretches of a run apart.
inline std::string recipe_checksum(const Recipe& recipe) {
  return detail::recipe_checksum(detail::recipe_facts(recipe), recipe.stages[0].ramp[0].tokens_per_step);
}

// The part of trainer.json after step `done`.
inline nlohmann::ordered_json recipe_json(const Job& job, int64_t done) {
  const Course& course = job.course;
  nlohmann::ordered_json json = {{"facts", detail::recipe_facts(course.recipe())}, {"block", job.data->train.block()}};
  if (course.origin().step > 0) {
    const Origin& origin = course.origin();
    json["origin"] = {{"step", origin.step}, {"tokens", origin.tokens}, {"samples", origin.samples}};
    for (const SourcePosition& at : origin.sources) json["origin"]["sources"].push_back(detail::position_json(at));
  }
  for (const Skip& skip : course.skips())
    json["left_out"].push_back(nlohmann::ordered_json::array({skip.step, skip.samples}));
  const std::vector<SourcePosition> now = course.sources_after(done);
  for (size_t s = 0; s < now.size(); ++s) {
    nlohmann::ordered_json seeds;
    for (const Reseed& seed : job.data->seeds[s])
      seeds.push_back(nlohmann::ordered_json::array({seed.epoch, seed.block, seed.seed}));
    json["sources"].push_back({{"name", course.recipe().sources[s].name},
                               {"files", course.recipe().sources[s].pattern},
                               {"position", detail::position_json(now[s])},
                               {"seeds", seeds}});
  }
  return json;
}

// How a run goes on from a checkpoint.
struct ResumedCourse {
  Course course;
  struct Changes {
    int64_t block;                           // of the sources
    std::vector<std::vector<Reseed>> seeds;  // of each source
    std::vector<std::string> notices = {};
    bool changed = false;  // another recipe from here on
  } changes;
};

namespace detail {

class RecipeReader {
 public:
  RecipeReader(const ResumePoint& from, const Job& job)
      : from_(from),
        job_(job),
        recipe_(job.course.recipe()),
        file_(from.path + "/trainer.json"),
        json_(member(from.trainer, "recipe")) {}

  ResumedCourse read() {
    if (json_.is_null()) read_old();
    else read_recorded();
    const bool allowed = from_.begin == Begin::branch || job_.asked.data_changed == DataChanged::accept;
    const bool others = !facts_.is_null() && facts_ != recipe_facts(recipe_);
    const int64_t tokens_per_step = recipe_.stages[0].ramp[0].tokens_per_step;
    const bool resized = !recipe_.staged && count("tokens_per_step") != tokens_per_step;
    CHECK(
        !others || allowed,
        "{}: the recipe of the run was another one: {}; to go on from step {} with the new one, which repeats and "
        "skips no sample that was seen, add --data-changed accept; otherwise resume with the former --stages, --data, "
        "--seq-len and --total-batch-size",
        file_, difference(), from_.step);
    Changes next{.block = block_, .seeds = job_.data->seeds};
    next.changed = others || (resized && allowed);
    if (next.changed && resized)
      next.notices.push_back(formatted("a step has {} tokens from step {} on, and had {}", tokens_per_step,
                                       from_.step + 1, count("tokens_per_step")));
    const int64_t passed_over = pass_over(next);
    take_sources(next);
    if (next.changed) take_block(next);
    if (next.changed) origin_ = {from_.step, count("tokens"), samples_ + passed_over, positions_};
    else if (origin_.step == 0) origin_.sources.clear();
    // What the checkpoint's run had left out before it, and what this run has left out after it.
    if (next.changed) skips_.clear();  // they are places in the former recipe
    std::erase_if(skips_, [&](const Skip& skip) { return skip.step >= from_.step; });
    for (const Skip& skip : skips_of(job_.rollbacks, recipe_checksum(recipe_)))
      if (skip.step >= from_.step) skips_.push_back(skip);
    job_.data->train.cut(next.block);
    const Course course(recipe_, job_.data->train.epoch_tokens(), std::move(origin_), skips_);
    if (!next.changed && !resized && count("data_samples") == job_.data->train.samples())
      CHECK(course.sources_after(from_.step) == positions_ || from_.step > course.steps(),
            "{}: the positions in the data are not those of step {}: the file is damaged", file_, from_.step);
    reseed(next, course);
    return {course, std::move(next)};
  }

 private:
  using Changes = ResumedCourse::Changes;

  int64_t count(const char* field) const {
    const std::optional<int64_t> n = whole_number(member(from_.trainer, field));
    CHECK(n, "{}: \"{}\" is {}, expected a whole number; the file is damaged", file_, field,
          member(from_.trainer, field));
    return *n;
  }
  [[noreturn]] void damaged(const char* what, const nlohmann::json& found) const {
    throw Error(formatted("{}: {} of \"recipe\" is {}; the file is damaged", file_, what, found));
  }
  std::vector<int64_t> numbers(const char* what, const nlohmann::json& json, size_t n) const {
    std::vector<int64_t> all;
    if (!json.is_array() || json.size() != n) damaged(what, json);
    for (const nlohmann::json& one : json) {
      const auto number = whole_number(one);
      if (!number) damaged(what, json);
      all.push_back(*number);
    }
    return all;
  }
  SourcePosition position(const char* what, const nlohmann::json& json) const {
    const std::vector<int64_t> at = numbers(what, json, 3);
    return {at[0], at[1], at[2]};
  }

  // A checkpoint of a version that knew one source and one length.
  void read_old() {
    const int64_t T = count("seq_len"), blocks = count("data_samples"), cursor = count("data_cursor");
    CHECK(T > 0 && blocks > 0, "{}: \"seq_len\" is {} and \"data_samples\" {}; the file is damaged", file_, T, blocks);
    samples_ = cursor;
    block_ = T;
    const nlohmann::json options = from_.trainer.value("options", nlohmann::json::object());
    names_ = {""};
    files_ = {options.is_object() ? options.value("--train-data", std::string()) : ""};
    positions_ = {{cursor / blocks, cursor % blocks * T, cursor}};
    seeds_ = {{}};
    const nlohmann::json seeds = member(from_.trainer, "seeds");
    if (seeds.is_null()) {  // one seed from the beginning
      const auto first = whole_number(member(from_.trainer, "seed"));
      seeds_[0].push_back({0, 0, static_cast<uint64_t>(first.value_or(job_.asked.seed))});
    } else {
      const auto is_seed = [](const nlohmann::json& seed) {
        return seed.is_array() && seed.size() == 2 && whole_number(seed[0]) && whole_number(seed[1]);
      };
      CHECK(seeds.is_array() && !seeds.empty() && std::all_of(seeds.begin(), seeds.end(), is_seed) &&
                std::is_sorted(seeds.begin(), seeds.end()) && seeds[0][0] == 0,
            "{}: \"seeds\" is {}, expected [POSITION, SEED] in ascending order; the file is damaged", file_, seeds);
      for (const nlohmann::json& seed : seeds)
        seeds_[0].push_back(
            {seed[0].get<int64_t>() / blocks, seed[0].get<int64_t>() % blocks, seed[1].get<uint64_t>()});
    }
    if (T != recipe_.stages[0].options.seq_len || recipe_.staged || recipe_.sources.size() > 1)
      facts_ = {{"seq_len", T}};  // unlike any of ours
  }

  void read_recorded() {
    if (!json_.is_object()) damaged("everything", json_);
    facts_ = member(json_, "facts");
    const auto block = whole_number(member(json_, "block"));
    if (!facts_.is_object() || !block || *block == 0) damaged("\"facts\" or \"block\"", json_);
    block_ = *block;
    samples_ = whole_number(member(from_.trainer, "data_cursor")).value_or(0);  // checked later
    const nlohmann::json sources = member(json_, "sources"), origin = member(json_, "origin");
    if (!sources.is_array() || sources.empty()) damaged("\"sources\"", sources);
    for (const nlohmann::json& source : sources) {
      const auto text = [&](const char* field) {
        const nlohmann::json value = member(source, field);
        if (!value.is_string()) damaged("\"sources\"", source);
        return value.get<std::string>();
      };
      names_.push_back(text("name"));
      files_.push_back(text("files"));
      positions_.push_back(position("\"position\"", member(source, "position")));
      seeds_.emplace_back();
      const nlohmann::json seeds = member(source, "seeds");
      if (!seeds.is_array() || seeds.empty()) damaged("\"seeds\"", seeds);
      for (const nlohmann::json& seed : seeds) {
        const std::vector<int64_t> three = numbers("\"seeds\"", seed, 3);
        seeds_.back().push_back({three[0], three[1], static_cast<uint64_t>(three[2])});
      }
    }
    for (const nlohmann::json& skip : json_.value("left_out", nlohmann::json::array())) {
      const std::vector<int64_t> two = numbers("\"left_out\"", skip, 2);
      if (!skips_.empty() && two[0] <= skips_.back().step) damaged("\"left_out\"", skip);
      skips_.push_back({two[0], two[1]});
    }
    if (origin.is_null()) return;
    if (!origin.is_object()) damaged("\"origin\"", origin);
    for (const auto& [name, number] : {std::pair{"step", &origin_.step}, std::pair{"tokens", &origin_.tokens},
                                       std::pair{"samples", &origin_.samples}})
      *number = numbers("\"origin\"", nlohmann::json::array({member(origin, name)}), 1)[0];
    const nlohmann::json at = member(origin, "sources");
    if (!at.is_array() || at.size() != names_.size()) damaged("\"sources\" of \"origin\"", at);
    for (const nlohmann::json& one : at) origin_.sources.push_back(position("\"sources\" of \"origin\"", one));
  }

  // What rollbacks to this very checkpoint left out of the former recipe's samples stays left out: moves the positions
  // behind it. Returns how many samples those are.
  int64_t pass_over(Changes& next) {
    const nlohmann::json pack = member(facts_, "pack"), stages = member(facts_, "stages");
    const bool same_rows =
        pack == member(recipe_facts(recipe_), "pack") && (pack.is_null() || block_ == recipe_.longest());
    // Of a run with several stages, nothing says how far it is in the mix.
    const bool known = same_rows && stages.is_array() && stages.size() == 1 && !facts_.contains("file");
    const std::string now = recipe_checksum(recipe_),
                      former = known ? detail::recipe_checksum(facts_, count("tokens_per_step")) : "";
    int64_t samples = 0;
    std::vector<int64_t> lost;  // spikes
    for (const Rollback& r : job_.rollbacks)
      if (r.recipe == former && r.step == from_.step) samples = r.samples;
      else if (r.recipe != now && r.step >= from_.step) lost.push_back(r.spike);
    if (!lost.empty())
      next.notices.push_back(formatted(
          "the samples that rollbacks left out after the spikes at steps {} are not left out any more: they were those "
          "of another recipe",
          lost));
    if (!next.changed || samples == 0) return 0;
    const int64_t T = whole_number(member(stages[0], "seq_len")).value_or(0);
    if (T == 0 || block_ % T != 0 || samples_ < origin_.samples) damaged("\"facts\"", facts_);
    job_.data->train.cut(block_);
    const std::vector<int64_t> epochs = job_.data->train.epoch_tokens();
    std::vector<SampleOrder::Source> sources;  // the epoch of one that is no longer read does not matter
    for (size_t i = 0; i < names_.size(); ++i) {
      const auto found = std::ranges::find_if(
          recipe_.sources, [&](const SourceText& s) { return s.name == names_[i] && s.pattern == files_[i]; });
      const auto s = static_cast<size_t>(found - recipe_.sources.begin());
      sources.push_back({s < epochs.size() ? epochs[s] : block_, positions_[i]});
    }
    positions_ = SampleOrder(std::move(sources), numbers("\"weights\"", member(stages[0], "weights"), names_.size()), T,
                             samples_ - origin_.samples)
                     .after(samples);
    return samples;
  }

  // The recorded sources, in this run's order; new ones begin at their beginnings, with this run's seed.
  void take_sources(Changes& next) {
    std::vector<SourcePosition> now, then;
    for (size_t s = 0; s < recipe_.sources.size(); ++s) {
      const SourceText& source = recipe_.sources[s];
      const auto found = std::ranges::find(names_, source.name);
      const size_t i = static_cast<size_t>(found - names_.begin());
      const bool is_new = found == names_.end() || (next.changed && files_[i] != source.pattern);
      now.push_back(is_new ? SourcePosition() : positions_[i]);
      then.push_back(is_new || origin_.sources.empty() ? SourcePosition() : origin_.sources[i]);
      if (!is_new) next.seeds[s] = seeds_[i];
      else if (next.changed && found != names_.end())
        next.notices.push_back(
            formatted("{} names other files than before: it begins at their first sample", train_option(source.name)));
    }
    positions_ = std::move(now), origin_.sources = std::move(then);
  }

  // Blocks as before, if all lengths divide them; otherwise a new epoch of every source begins.
  void take_block(Changes& next) {
    const auto divides = [&](const RecipeStage& stage) { return block_ % stage.options.seq_len == 0; };
    const bool packs = recipe_.stages[0].options.pack != Packing::stream,
               other_rows = member(facts_, "pack") != member(recipe_facts(recipe_), "pack");
    if (!other_rows && (packs ? block_ == recipe_.longest() : std::ranges::all_of(recipe_.stages, divides))) return;
    next.block = recipe_.longest();
    bool begun = false;
    for (size_t s = 0; s < positions_.size(); ++s) {
      SourcePosition& at = positions_[s];
      begun |= at.tokens > 0;
      at = {at.epoch + (at.tokens > 0), 0, at.samples};
    }
    if (begun)
      next.notices.push_back(other_rows ? std::string("samples are packed in another way: a new epoch begins here")
                                        : formatted("sequences of {} tokens were not foreseen when the data were cut "
                                                    "into blocks of {}: a new epoch begins here",
                                                    next.block, block_));
  }

  // Another --seed orders the rest of each source's epoch, from its next block on.
  void reseed(Changes& next, const Course& course) const {
    const uint64_t seed = static_cast<uint64_t>(job_.asked.seed);
    const std::vector<SourcePosition> at = next.changed ? positions_ : course.sources_after(from_.step);
    for (size_t s = 0; s < next.seeds.size(); ++s) {
      const uint64_t before = next.seeds[s].back().seed;
      CHECK(before == seed || from_.begin == Begin::branch,
            "{}: the last seed is {}, but --seed {}; the file is damaged", file_, before, seed);
      if (before == seed) continue;
      const int64_t block = ceil_div(at[s].tokens, next.block), blocks = job_.data->train[s].blocks();
      next.seeds[s].push_back({at[s].epoch + block / blocks, block % blocks, seed});
      if (s == 0 && job_.asked.shuffled())
        next.notices.push_back(
            formatted("--seed {} orders the samples from step {} on: the rest of this epoch, then the "
                      "next ones",
                      seed, from_.step + 1));
    }
  }

  // The first difference between the recorded facts and ours.
  std::string difference() const {
    const nlohmann::json now = recipe_facts(recipe_);
    const auto list = [](const nlohmann::json& facts, const char* name) {
      const nlohmann::json value = member(facts, name);
      return value.is_array() ? value : nlohmann::json::array();
    };
    for (const char* name : {"sources", "file", "stages"}) {
      const nlohmann::json before = list(facts_, name), after = list(now, name);
      for (size_t i = 0; i < std::max(before.size(), after.size()); ++i) {
        const nlohmann::json one = i < before.size() ? before[i] : nlohmann::json(),
                             other = i < after.size() ? after[i] : nlohmann::json();
        if (one != other)
          return formatted("{} {} was {} and is now {}", std::string_view(name) == "sources" ? "source" : "stage",
                           i + 1, one, other);
      }
    }
    return formatted("it was {} and is now {}", facts_, now);
  }

  const ResumePoint& from_;
  const Job& job_;
  const Recipe& recipe_;
  std::string file_;
  nlohmann::json json_, facts_;
  int64_t block_ = 0, samples_ = 0;
  Origin origin_;
  std::vector<Skip> skips_;
  std::vector<std::string> names_, files_;
  std::vector<SourcePosition> positions_;
  std::vector<std::vector<Reseed>> seeds_;
};

}  // namespace detail

// Cuts the data into the blocks of the course. Rejects a checkpoint of another recipe, unless the run is a branch or
// says --data-changed accept.
inline ResumedCourse resumed_course(const ResumePoint& from, const Job& job) {
  return detail::RecipeReader(from, job).read();
}

}  // namespace llmc
