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

// [epoch, tokens, samples]; seeds: [epoch, block, seed]; shards: [name, tokens, checksum]
inline nlohmann::ordered_json source_json(const SourceRecord& source) {
  nlohmann::ordered_json seeds = nlohmann::ordered_json::array(), shards = seeds;
  for (const Reseed& seed : source.order.seeds)
    seeds.push_back(nlohmann::ordered_json::array({seed.epoch, seed.block, seed.seed}));
  for (const ShardRecord& shard : source.shards)
    shards.push_back(nlohmann::ordered_json::array({shard.name, shard.tokens.value_or(0), shard.checksum}));
  nlohmann::ordered_json json = {{"name", source.name},
                                 {"files", source.files},
                                 {"position", position_json(source.position)},
                                 {"seeds", seeds},
                                 {"shards", shards}};
  if (source.order.name != source.name) json["order"] = source.order.name;
  return json;
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
  if (recipe.staged) facts["file"] = recipe.text;
  if (const Packing pack = recipe.stages[0].options.pack; pack != Packing::stream) facts["pack"] = name_of(pack);
  return facts;
}

inline std::string recipe_checksum(const nlohmann::json& facts, int64_t tokens_per_step) {
  return checksum(facts.dump() + std::to_string(tokens_per_step));
}
inline std::string checksum_here(const Recipe& recipe) {
  return recipe_checksum(recipe_facts(recipe), recipe.stages[0].ramp[0].tokens_per_step);
}

}  // namespace detail

// Tells the recipes of two stretches of a run apart.
inline std::string recipe_checksum(const Recipe& recipe) {
  return recipe.known_as.empty() ? detail::checksum_here(recipe) : recipe.known_as;
}
// The name by which rollbacks know a recipe whose data they have seen where these are now.
inline void take_known_name(Recipe& recipe, const std::vector<Rollback>& rollbacks) {
  const std::string here = detail::checksum_here(recipe);
  for (const Rollback& r : rollbacks)
    if (r.here == here) recipe.known_as = r.recipe;
}

// The part of trainer.json after step `done`.
inline nlohmann::ordered_json recipe_json(const Job& job, int64_t done) {
  const Course& course = job.course;
  nlohmann::ordered_json json = {{"facts", detail::recipe_facts(course.recipe())}, {"block", job.data->train.block()}};
  if (const std::string& known_as = course.recipe().known_as; !known_as.empty()) json["known_as"] = known_as;
  if (course.origin().step > 0) {
    const Origin& origin = course.origin();
    json["origin"] = {{"step", origin.step}, {"tokens", origin.tokens}, {"samples", origin.samples}};
    for (const SourcePosition& at : origin.sources) json["origin"]["sources"].push_back(detail::position_json(at));
  }
  for (const Skip& skip : course.skips())
    json["left_out"].push_back(nlohmann::ordered_json::array({skip.step, skip.samples}));
  const std::vector<SourcePosition> now = course.sources_after(done);
  for (size_t s = 0; s < now.size(); ++s) {
    const SourceText& source = course.recipe().sources[s];
    json["sources"].push_back(
        detail::source_json({source.name, source.pattern, job.data->orders[s], now[s], job.data->shards_of(s)}));
  }
  for (const SourceRecord& source : job.data->unused) json["unused"].push_back(detail::source_json(source));
  return json;
}

// How a run goes on from a checkpoint.
struct ResumedCourse {
  Course course;
  struct Changes {
    int64_t block;                     // of the sources
    std::vector<SourceOrder> orders;   // of each source
    std::vector<SourceRecord> unused;  // that the run has read, and does not read now
    std::vector<DataChange> data = {};
    std::string data_fault = {};  // why these are not the run's data; empty: they are
    std::vector<std::string> notices = {};
    bool changed = false;  // another recipe from here on
  } changes;
};

// What goes on from a checkpoint.
struct Resuming {
  const Options& asked;
  const Recipe& recipe;
  RunData& data;
  const std::vector<Rollback>& rollbacks;
};

namespace detail {

class RecipeReader {
 public:
  RecipeReader(const ResumePoint& from, const Resuming& run)
      : from_(from),
        run_(run),
        recipe_(run.recipe),
        file_(from.path + "/trainer.json"),
        json_(member(from.trainer, "recipe")) {
    take_known_name(recipe_, run.rollbacks);
  }

  ResumedCourse read() {
    if (json_.is_null()) read_old();
    else read_recorded();
    read_old_shards();
    former_facts_ = facts_;
    find_sources();
    const bool allowed = from_.begin == Begin::branch || run_.asked.data_changed == DataChanged::accept;
    bool others = !facts_.is_null() && facts_ != recipe_facts(recipe_);
    for (size_t s = 0; s < found_.size(); ++s) others |= found_[s] != s;
    const int64_t tokens_per_step = recipe_.stages[0].ramp[0].tokens_per_step;
    const bool resized = !recipe_.staged && count("tokens_per_step") != tokens_per_step;
    CHECK(
        !others || allowed,
        "{}: the recipe of the run was another one: {}; to go on from step {} with the new one, which repeats and "
        "skips no sample that was seen, add --data-changed accept; otherwise resume with the former --stages, --data, "
        "--seq-len and --total-batch-size",
        file_, difference(), from_.step);
    Changes next{.block = block_, .orders = run_.data.orders, .unused = {}};
    next.changed = others || (resized && allowed);
    if (next.changed && resized)
      next.notices.push_back(formatted("a step has {} tokens from step {} on, and had {}", tokens_per_step,
                                       from_.step + 1, count("tokens_per_step")));
    note_settings(next, others);
    compare_shards(next);
    const int64_t passed_over = pass_over(next);
    take_sources(next);
    if (next.changed) take_block(next);
    if (next.changed) origin_ = {from_.step, count("tokens"), samples_ + passed_over, positions_};
    else if (origin_.step == 0) origin_.sources.clear();
    // What the checkpoint's run had left out before it, and what this run has left out after it.
    if (next.changed) skips_.clear();  // they are places in the former recipe
    std::erase_if(skips_, [&](const Skip& skip) { return skip.step >= from_.step; });
    if (const std::string then = former_checksum(); !next.changed && then != recipe_checksum(recipe_))
      recipe_.known_as = then;  // its data were moved
    for (const Skip& skip : skips_of(run_.rollbacks, recipe_checksum(recipe_)))
      if (skip.step >= from_.step) skips_.push_back(skip);
    run_.data.train.cut(next.block);
    const Course course(recipe_, run_.data.train.epoch_tokens(), std::move(origin_), skips_);
    if (!next.changed && !resized && count("data_samples") == run_.data.train.samples())
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
    SourceRecord source;
    if (options.is_object()) source.files = options.value("--train-data", std::string());
    source.position = {cursor / blocks, cursor % blocks * T, cursor};
    std::vector<Reseed>& all = source.order.seeds;
    const nlohmann::json seeds = member(from_.trainer, "seeds");
    if (seeds.is_null()) {  // one seed from the beginning
      const auto first = whole_number(member(from_.trainer, "seed"));
      all.push_back({0, 0, static_cast<uint64_t>(first.value_or(run_.asked.seed))});
    } else {
      const auto is_seed = [](const nlohmann::json& seed) {
        return seed.is_array() && seed.size() == 2 && whole_number(seed[0]) && whole_number(seed[1]);
      };
      CHECK(seeds.is_array() && !seeds.empty() && std::all_of(seeds.begin(), seeds.end(), is_seed) &&
                std::is_sorted(seeds.begin(), seeds.end()) && seeds[0][0] == 0,
            "{}: \"seeds\" is {}, expected [POSITION, SEED] in ascending order; the file is damaged", file_, seeds);
      for (const nlohmann::json& seed : seeds)
        all.push_back({seed[0].get<int64_t>() / blocks, seed[0].get<int64_t>() % blocks, seed[1].get<uint64_t>()});
    }
    sources_ = {source};
    used_ = 1;
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
    const nlohmann::json sources = member(json_, "sources"), unused = member(json_, "unused"),
                         origin = member(json_, "origin");
    if (!sources.is_array() || sources.empty()) damaged("\"sources\"", sources);
    if (!unused.is_array() && !unused.is_null()) damaged("\"unused\"", unused);
    for (const nlohmann::json& source : sources) sources_.push_back(source_from(source));
    used_ = sources_.size();
    for (const nlohmann::json& source : unused) sources_.push_back(source_from(source));
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
    if (!at.is_array() || at.size() != used_) damaged("\"sources\" of \"origin\"", at);
    for (const nlohmann::json& one : at) origin_.sources.push_back(position("\"sources\" of \"origin\"", one));
  }

  // What rollbacks to this very checkpoint left out of the former recipe's samples stays left out: moves the positions
  // behind it. Returns how many samples those are.
  int64_t pass_over(Changes& next) {
    const nlohmann::json pack = member(former_facts_, "pack"), stages = member(former_facts_, "stages");
    const bool same_rows =
        pack == member(recipe_facts(recipe_), "pack") && (pack.is_null() || block_ == recipe_.longest());
    // Of a run with several stages, nothing says how far it is in the mix.
    const bool known = same_rows && stages.is_array() && stages.size() == 1 && !former_facts_.contains("file");
    const std::string now = recipe_checksum(recipe_), former = former_checksum();
    int64_t samples = 0;
    std::vector<int64_t> lost;  // spikes
    for (const Rollback& r : run_.rollbacks) {
      const bool of_former = r.recipe == former;
      if (of_former && known && r.step == from_.step) samples = r.samples;
      else if ((of_former ? next.changed : r.recipe != now) && r.step >= from_.step) lost.push_back(r.spike);
    }
    if (!lost.empty())
      next.notices.push_back(formatted(
          "the samples that rollbacks left out after the spikes at steps {} are not left out any more: they were those "
          "of another recipe",
          lost));
    if (!next.changed || samples == 0 || !next.data_fault.empty()) return 0;
    const int64_t T = whole_number(member(stages[0], "seq_len")).value_or(0);
    if (T == 0 || block_ % T != 0 || samples_ < origin_.samples) damaged("\"facts\"", former_facts_);
    std::vector<SampleOrder::Source> sources;
    for (size_t i = 0; i < used_; ++i) {
      const auto ours = static_cast<size_t>(std::ranges::find(found_, std::optional(i)) - found_.begin());
      sources.push_back(
          {ours < found_.size() ? run_.data.train[ours].epoch_tokens(block_) : block_, sources_[i].position});
    }
    const std::vector<SourcePosition> after =
        SampleOrder(std::move(sources), numbers("\"weights\"", member(stages[0], "weights"), used_), T,
                    samples_ - origin_.samples)
            .after(samples);
    for (const std::optional<size_t>& i : found_)  // of others, the epoch is not known: they stay where they are
      if (i && *i < used_) sources_[*i].position = after[*i];
    return samples;
  }
  // Of the recipe that the checkpoint's run had, as rollbacks record it.
  std::string former_checksum() const {
    const nlohmann::json known_as = member(json_, "known_as");
    if (known_as.is_string()) return known_as;
    if (!known_as.is_null()) damaged("\"known_as\"", known_as);
    const nlohmann::json stages = member(former_facts_, "stages");
    if (!former_facts_.contains("file")) return recipe_checksum(former_facts_, count("tokens_per_step"));
    if (!stages.is_array() || stages.empty()) damaged("\"facts\"", former_facts_);
    const nlohmann::json ramp = member(stages[0], "tokens_per_step");
    if (!ramp.is_array() || ramp.empty()) damaged("\"facts\"", former_facts_);
    return recipe_checksum(former_facts_, numbers("\"facts\"", ramp[0], 2)[1]);
  }

  SourceRecord source_from(const nlohmann::json& json) const {
    const auto text = [&](const nlohmann::json& value) {
      if (!value.is_string()) damaged("\"sources\"", json);
      return value.get<std::string>();
    };
    SourceRecord source;
    source.name = text(member(json, "name")), source.files = text(member(json, "files"));
    source.position = position("\"position\"", member(json, "position"));
    const nlohmann::json order = member(json, "order"), seeds = member(json, "seeds"), shards = member(json, "shards");
    source.order.name = order.is_null() ? source.name : text(order);
    if (!seeds.is_array() || seeds.empty()) damaged("\"seeds\"", seeds);
    for (const nlohmann::json& seed : seeds) {
      const std::vector<int64_t> three = numbers("\"seeds\"", seed, 3);
      source.order.seeds.push_back({three[0], three[1], static_cast<uint64_t>(three[2])});
    }
    if (!shards.is_array() && !shards.is_null()) damaged("\"shards\"", shards);
    for (const nlohmann::json& shard : shards) {
      if (!shard.is_array() || shard.size() != 3 || !whole_number(shard[1])) damaged("\"shards\"", shard);
      source.shards.push_back({text(shard[0]), whole_number(shard[1]), text(shard[2])});
      if (source.shards.back().tokens == 0) source.shards.back().tokens.reset();  // unknown
    }
    return source;
  }

  // An older version recorded the shards of all sources as one: they are told apart if there is one source, or if the
  // sources are the same.
  void read_old_shards() {
    const nlohmann::json sums = member(from_.trainer, "data_checksums"), tokens = member(from_.trainer, "data_tokens");
    if (sums.is_null() || !sources_[0].shards.empty()) return;
    CHECK(sums.is_array() && (tokens.is_null() || (tokens.is_array() && tokens.size() == sums.size())),
          "{}: \"data_checksums\" is {} and \"data_tokens\" {}, expected as many of each; the file is damaged", file_,
          sums, tokens);
    std::vector<ShardRecord> all;
    for (size_t i = 0; i < sums.size(); ++i)
      all.push_back({"", whole_number(tokens.is_null() ? nlohmann::json() : tokens[i]),
                     sums[i].is_string() ? sums[i].get<std::string>() : sums[i].dump()});
    if (used_ == 1) {
      sources_[0].shards = all;
      return;
    }
    if (std::ssize(all) != std::ssize(run_.data.checksums) || used_ != recipe_.sources.size()) return;
    auto shard = all.begin();
    for (size_t s = 0; s < used_; ++s) {
      const auto end = shard + run_.data.train[s].shards.count();
      if (is_named(sources_[s], recipe_.sources[s])) sources_[s].shards = {shard, end};
      shard = end;
    }
  }

  static bool is_named(const SourceRecord& record, const SourceText& source) {
    return record.name == source.name && record.files == source.pattern;
  }
  static bool same_shard(const ShardRecord& then, const ShardRecord& now) {
    return then.checksum == now.checksum && (!then.tokens || then.tokens == now.tokens);
  }
  static bool same_shards(const std::vector<ShardRecord>& then, const std::vector<ShardRecord>& now) {
    return std::ranges::equal(then, now, same_shard);
  }

  // Which recorded source each of ours is: the one that has its files and its name; the one that its option names by
  // the same text, whose files may have changed; or the one that has its files and another name.
  void find_sources() {
    found_.assign(recipe_.sources.size(), std::nullopt);
    for (size_t s = 0; s < found_.size(); ++s) ours_.push_back(run_.data.shards_of(s));
    std::vector<bool> taken(sources_.size());
    const auto find = [&](auto&& is_it) {
      for (size_t s = 0; s < found_.size(); ++s)
        for (size_t i = 0; i < sources_.size() && !found_[s]; ++i)
          if (!taken[i] && is_it(sources_[i], s)) found_[s] = i, taken[i] = true;
    };
    find([&](const SourceRecord& record, size_t s) {
      return record.name == recipe_.sources[s].name && same_shards(record.shards, ours_[s]);
    });
    find([&](const SourceRecord& record, size_t s) { return is_named(record, recipe_.sources[s]); });
    find([&](const SourceRecord& record, size_t s) { return same_shards(record.shards, ours_[s]); });
    // Where the same files lie is no fact of the recipe.
    for (size_t s = 0; s < found_.size() && s < member(facts_, "sources").size(); ++s)
      if (found_[s] == s && sources_[s].name == recipe_.sources[s].name && facts_["sources"].is_array() &&
          facts_["sources"][s].is_object())
        facts_["sources"][s]["files"] = recipe_.sources[s].pattern;
  }

  // What is set otherwise than before: options, and what a file of stages says. Another place of the same files is no
  // change.
  void note_settings(Changes& next, bool others) const {
    const nlohmann::json recorded = member(from_.trainer, "options");
    if (recorded.is_object())
      for (const OptionText& o : recorded_options(run_.asked)) {
        const bool names_files = o.name == "--stages" || is_training_data(o);
        const nlohmann::json then = member(recorded, o.name.c_str());
        if (then.is_string() && then != o.text && (names_files ? next.changed : o.rule == ResumeRule::recipe))
          next.data.push_back({.setting = o.name, .before = then, .now = o.text});
      }
    if (member(from_.trainer, "tokens_per_step") != recipe_.stages[0].ramp[0].tokens_per_step && !recipe_.staged)
      next.data.push_back({.setting = "tokens per step",
                           .before = member(from_.trainer, "tokens_per_step").dump(),
                           .now = std::to_string(recipe_.stages[0].ramp[0].tokens_per_step)});
    if (!others || !recipe_.staged) return;
    next.data.push_back({.setting = "stages", .before = facts_.dump(), .now = recipe_facts(recipe_).dump()});
    next.notices.push_back(formatted("the recipe is another one from step {} on: {}", from_.step + 1, difference()));
  }

  // The files of a recorded source that is ours: they have changed if find_sources() knows it by its option's text
  // alone.
  void compare_shards(Changes& next) const {
    for (size_t s = 0; s < found_.size(); ++s) {
      if (!found_[s]) continue;
      const SourceRecord& source = sources_[*found_[s]];
      if (source.shards.empty() || same_shards(source.shards, ours_[s])) continue;
      const std::string option = train_option(recipe_.sources[s].name);
      std::string fault = other_files(source.shards, ours_[s]);
      if (!fault.empty()) fault = formatted("{}: {}", option, fault);
      for (size_t i = 0; fault.empty() && i < ours_[s].size(); ++i) {
        const ShardRecord &then = source.shards[i], &now = ours_[s][i];
        const std::string path = run_.data.train[s].shards.path(static_cast<int64_t>(i));
        if (same_shard(then, now)) continue;
        if (run_.asked.data_changed != DataChanged::accept)
          fault = formatted(
              "{}: {} has changed since the run began (checksum {}, in {} {}): restore its former contents to resume, "
              "take it as it is with --data-changed accept, or start a new run in another --out-dir",
              option, path, now.checksum, file_, shown(then.checksum));
        else if (then.tokens && then.tokens != now.tokens)
          fault = formatted(
              "--data-changed accept: {} has {} tokens, but {} when the run began: other samples would follow; restore "
              "its former contents, or start a new run in another --out-dir",
              path, *now.tokens, *then.tokens);
        else next.data.push_back({.shard = path, .before = then.checksum, .now = now.checksum});
      }
      if (!fault.empty() && *found_[s] >= used_)
        fault +=
            "; the run has read other files under this name before: with a new name, and --data-changed accept, these "
            "are a source of their own";
      if (next.data_fault.empty()) next.data_fault = fault;
    }
  }

  // Why the shards cannot be compared one by one; empty: they are as many, in the same order.
  static std::string other_files(const std::vector<ShardRecord>& then, const std::vector<ShardRecord>& now) {
    const auto sorted = [](const std::vector<ShardRecord>& all, std::string ShardRecord::*field) {
      std::vector<std::string> texts;
      for (const ShardRecord& shard : all) texts.push_back(shard.*field);
      std::ranges::sort(texts);
      return texts;
    };
    const auto some = [](std::vector<std::string> texts) {
      if (texts.size() > 4) texts.resize(4), texts.push_back("...");
      std::string text;
      for (const std::string& one : texts) text += (text.empty() ? "" : ", ") + one;
      return text.empty() ? "none" : text;
    };
    const bool named = !then.empty() && !then[0].name.empty();
    if (then.size() != now.size()) {
      const auto former = sorted(then, &ShardRecord::name), names = sorted(now, &ShardRecord::name);
      std::vector<std::string> added, missing;
      std::ranges::set_difference(names, former, std::back_inserter(added));
      std::ranges::set_difference(former, names, std::back_inserter(missing));
      return formatted(
          "{} files, but {} when the run began{}: resume with those alone; new ones may be in another folder, as a "
          "source of their own: --data NAME=PATTERN:WEIGHT for each of the two, with --data-changed accept",
          now.size(), then.size(), named ? formatted(" (new: {}; missing: {})", some(added), some(missing)) : "");
    }
    if (sorted(then, &ShardRecord::checksum) != sorted(now, &ShardRecord::checksum)) return "";
    std::vector<std::string> renamed;
    for (size_t i = 0; i < now.size(); ++i) {
      if (same_shard(then[i], now[i])) continue;
      const auto was = std::ranges::find(then, now[i].checksum, &ShardRecord::checksum);
      if (!named) renamed.push_back(formatted("{} was file {}", now[i].name, was - then.begin() + 1));
      else if (was->name != now[i].name) renamed.push_back(formatted("{} was {}", now[i].name, was->name));
    }
    return formatted(
        "the files of the run in another order, because they were renamed ({}): samples are numbered in the order of "
        "the names: give the files their former names, or name a folder of links that has them",
        some(renamed));
  }

  // The recorded sources, in this run's order; new ones begin at their beginnings, with this run's seed.
  void take_sources(Changes& next) {
    std::vector<SourcePosition> now, then;
    std::vector<bool> taken(sources_.size());
    for (size_t s = 0; s < found_.size(); ++s) {
      const std::string &name = recipe_.sources[s].name, option = train_option(name);
      const std::optional<size_t> i = found_[s];
      now.push_back(i ? sources_[*i].position : SourcePosition());
      then.push_back(i && *i < origin_.sources.size() ? origin_.sources[*i] : SourcePosition());
      if (i) taken[*i] = true, next.orders[s] = sources_[*i].order;
      if (i && sources_[*i].name != name)
        next.notices.push_back(
            formatted("{} goes on where {} was: they are the same files", option, train_option(sources_[*i].name)));
      else if (!i)
        next.notices.push_back(formatted("{} {}: it begins at their first sample", option,
                                         std::ranges::find(sources_, name, &SourceRecord::name) != sources_.end()
                                             ? "names other files than before"
                                             : "names new files"));
    }
    for (size_t i = 0; i < sources_.size(); ++i)
      if (!taken[i] && sources_[i].position.samples > 0) next.unused.push_back(sources_[i]);
    positions_ = std::move(now), origin_.sources = std::move(then);
  }
  // Blocks as before, if all lengths divide them; otherwise a new epoch of every source begins.
  void take_block(Changes& next) {
    const auto divides = [&](const RecipeStage& stage) { return block_ % stage.options.seq_len == 0; };
    const bool packs = recipe_.stages[0].options.pack != Packing::stream,
               other_rows = member(facts_, "pack") != member(recipe_facts(recipe_), "pack");
    if (!other_rows && (packs ? block_ == recipe_.longest() : std::ranges::all_of(recipe_.stages, divides))) return;
    next.block = recipe_.longest();
    const auto next_epoch = [](SourcePosition& at) { at = {at.epoch + (at.tokens > 0), 0, at.samples}; };
    const bool begun = std::ranges::any_of(positions_, [](const SourcePosition& at) { return at.tokens > 0; });
    std::ranges::for_each(positions_, next_epoch);
    for (SourceRecord& source : next.unused) next_epoch(source.position);
    if (begun)
      next.notices.push_back(other_rows ? std::string("samples are packed in another way: a new epoch begins here")
                                        : formatted("sequences of {} tokens were not foreseen when the data were cut "
                                                    "into blocks of {}: a new epoch begins here",
                                                    next.block, block_));
  }

  // Another --seed orders the rest of each source's epoch, from its next block on.
  void reseed(Changes& next, const Course& course) const {
    const uint64_t seed = static_cast<uint64_t>(run_.asked.seed);
    const std::vector<SourcePosition> at = next.changed ? positions_ : course.sources_after(from_.step);
    for (size_t s = 0; s < next.orders.size(); ++s) {
      std::vector<Reseed>& seeds = next.orders[s].seeds;
      const uint64_t before = seeds.back().seed;
      const bool was_unused = found_[s] && *found_[s] >= used_;  // since before the branch that changed the seed
      CHECK(before == seed || from_.begin == Begin::branch || was_unused,
            "{}: the last seed is {}, but --seed {}; the file is damaged", file_, before, seed);
      if (before == seed) continue;
      const int64_t block = ceil_div(at[s].tokens, next.block), blocks = run_.data.train[s].blocks();
      seeds.push_back({at[s].epoch + block / blocks, block % blocks, seed});
      if (s == 0 && run_.asked.shuffled())
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
  const Resuming& run_;
  Recipe recipe_;
  std::string file_;
  nlohmann::json json_, facts_, former_facts_;  // facts_: where files lie now, if they are the same
  int64_t block_ = 0, samples_ = 0;
  Origin origin_;
  std::vector<Skip> skips_;
  std::vector<SourceRecord> sources_;  // as recorded: those in use, then the others
  size_t used_ = 0;
  std::vector<std::vector<ShardRecord>> ours_;
  std::vector<std::optional<size_t>> found_;  // of each of our sources, among those recorded
  std::vector<SourcePosition> positions_;     // of our sources
};

}  // namespace detail

// Cuts the data into the blocks of the course. Rejects a checkpoint of another recipe, unless the run is a branch or
// says --data-changed accept.
inline ResumedCourse resumed_course(const ResumePoint& from, const Resuming& run) {
  return detail::RecipeReader(from, run).read();
}
inline ResumedCourse resumed_course(const ResumePoint& from, const Job& job) {
  return resumed_course(from, {job.asked, job.course.recipe(), *job.data, job.rollbacks});
}

}  // namespace llmc
