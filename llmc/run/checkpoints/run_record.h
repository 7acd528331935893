// run_record.h: what run.json records: the options of a run, which the trainer.json of each checkpoint has too, and
// which of them may differ when it is resumed; its parent, its rollbacks (--on-spike rollback), its local checkpoints.
#pragma once
#include "core/checksum.h"
#include "core/log.h"
#include "run/checkpoints/local_parts.h"
#include "run/options/parse.h"
#include "run/recipe/course.h"

namespace llmc {

// A rollback returns to the state of a checkpoint, but not to its place in the data: the samples from there to those of
// the spike are passed over. run.json records it before training goes on, because the next checkpoint, whose
// trainer.json records the samples left out before it, may never be written.
struct Rollback {
  int64_t step;            // the last whose samples stay: usually the checkpoint's
  int64_t spike;           // the step that was a spike
  double loss, grad_norm;  // of the spike
  int64_t samples;         // left out after `step`, also by the rollbacks before this one
  std::string recipe;      // recipe_checksum(), of the recipe whose samples they are
  std::string here = {};   // what that would be without Recipe::known_as, if it has one
};

inline nlohmann::ordered_json to_json_object(const std::vector<Rollback>& rollbacks) {
  nlohmann::ordered_json all = nlohmann::ordered_json::array();
  for (const Rollback& r : rollbacks)
    all.push_back({{"step", r.step},
                   {"spike", r.spike},
                   {"loss", r.loss},
                   {"grad_norm", r.grad_norm},
                   {"samples", r.samples},
                   {"recipe", r.recipe},
                   {"here", r.here}});
  return all;
}

// file: for messages
inline std::vector<Rollback> rollbacks_from_json(const nlohmann::json& json, const std::string& file) {
  const auto damaged = [&](const nlohmann::json& found) {
    return Error(formatted("{}: \"rollbacks\" has {}; the file is damaged", file, found));
  };
  if (!json.is_array()) throw damaged(json);
  std::vector<Rollback> all;
  for (const nlohmann::json& one : json) {
    const auto step = whole_number(member(one, "step")), spike = whole_number(member(one, "spike")),
               samples = whole_number(member(one, "samples"));
    const auto value = [&](const char* name) {  // null: not finite
      const nlohmann::json number = member(one, name);
      if (!number.is_number() && !number.is_null()) throw damaged(one);
      return number.is_null() ? std::numeric_limits<double>::quiet_NaN() : number.get<double>();
    };
    const nlohmann::json recipe = member(one, "recipe"), here = member(one, "here");  // older versions have no `here`
    if (!here.is_string() && !here.is_null()) throw damaged(one);
    if (!step || !spike || !samples || *spike <= *step || *samples == 0 || !recipe.is_string()) throw damaged(one);
    all.push_back({*step, *spike, value("loss"), value("grad_norm"), *samples, recipe,
                   here.is_string() ? here.get<std::string>() : ""});
  }
  return all;
}

// What a run of this recipe leaves out after these rollbacks. A later one that returns to the same step, or to one
// before it, has counted what an earlier one left out there.
inline std::vector<Skip> skips_of(const std::vector<Rollback>& rollbacks, const std::string& recipe) {
  std::vector<Skip> skips;
  for (const Rollback& r : rollbacks) {
    if (r.recipe != recipe) continue;
    std::erase_if(skips, [&](const Skip& skip) { return skip.step >= r.step; });
    skips.push_back({r.step, r.samples});
  }
  return skips;
}

// The rollbacks of a run of this recipe since the checkpoint of this step: those that led to no later one.
inline std::vector<Rollback> rollbacks_since(std::vector<Rollback> rollbacks, int64_t step, const std::string& recipe) {
  std::erase_if(rollbacks, [&](const Rollback& r) { return r.step < step || r.recipe != recipe; });
  return rollbacks;
}

// The options of a run, with its defaults resolved: --local-ranks on this machine, --shuffle, those of the optimizer
// and of experts.
inline std::vector<OptionText> recorded_options(Options o) {
  o.local_ranks = o.ranks;
  o.shuffle = o.shuffled();
  o.beta2 = o.beta2_in_use();
  if (o.moe_dispatch == Dispatch::capacity) o.moe_capacity_factor = o.capacity_factor();
  o.moe_aux_loss = o.moe_aux_loss.value_or(o.usual_aux_loss);
  return option_texts(o);
}

inline nlohmann::ordered_json options_json(const Options& o) {
  nlohmann::ordered_json json;
  for (const OptionText& t : recorded_options(o)) json[t.name] = t.text;
  return json;
}

// The options that were recorded; options that an older version lacked keep their defaults. Rejects records that no
// version has written.
inline Options options_from_record(const std::string& file, const nlohmann::json& recorded) {
  CHECK(recorded.is_object(), "{}: the options are missing; the file is damaged", file);
  Options o;
  size_t known = 0;
  for (const OptionRow& row : option_rows(o)) {
    const auto found = recorded.find(row.name);
    if (found == recorded.end()) continue;
    ++known;
    CHECK(found->is_string(), "{}: {} is {}, expected text; the file is damaged", file, row.name, *found);
    const std::string text = *found;
    if (!text.empty()) row.field.parse(formatted("{}: {}", file, row.name), text);
  }
  if (known == recorded.size()) return o;
  std::string names;
  for (const OptionText& t : option_texts(o)) names += t.name + "\n";
  for (const auto& [name, value] : recorded.items())
    CHECK(name.find('\n') == name.npos && names.find(name + "\n") != names.npos && name.starts_with("--"),
          "{}: \"options\" has {}, which this version of train_gpt does not know: the file is damaged, or a newer "
          "version wrote it",
          file, shown(name));
  return o;
}

// Whether a run with these recorded options shuffles. File order was the default before all runs recorded it.
inline bool shuffled(const nlohmann::json& recorded) {
  return recorded.value("--shuffle", nlohmann::json("false")) == "true";
}

// The options that name the files of tokens to train on.
inline bool is_training_data(const OptionText& o) { return o.name == "--train-data" || o.name == "--data"; }

// The differences between options and recorded ones.
struct OptionChanges {
  std::string refused;                        // one per line; empty: nothing is rejected
  std::vector<std::string> noticed;           // allowed, but worth a notice
  std::vector<std::string> fixed, of_branch;  // the options rejected: those that a branch may change are apart
  bool accepted = true;                       // --data-changed accept would allow all that is rejected
};

// What a run does with a checkpoint: continue the run that wrote it, or begin another one.
enum class Begin : uint8_t { resume, branch };

// Without --shuffle and --no-shuffle, the samples keep their order.
inline OptionChanges option_changes(const std::string& file, const nlohmann::json& recorded, const Options& now,
                                    Begin begin = Begin::resume) {
  Options then = options_from_record(file, recorded);
  then.ranks = then.local_ranks;
  then.usual_aux_loss = now.usual_aux_loss;
  then.shuffle = now.shuffle ? shuffled(recorded) : now.shuffled();
  OptionChanges changes;
  const std::vector<OptionText> before = recorded_options(then), after = recorded_options(now);
  for (size_t i = 0; i < after.size(); ++i) {
    const OptionText &was = before[i], &is = after[i];
    const bool pipedream = is.name == "--schedule" && (was.text == "pipedream" || is.text == "pipedream");
    // AdamW goes on as Muon, and back: what is not a matrix is updated alike.
    const auto of_both = [](const OptionText& o) { return o.text == "adamw" || o.text == "muon"; };
    const bool matrices = is.name == "--optimizer" && of_both(was) && of_both(is);
    // The other schedules give the same results. What is for Muon's matrices alone may begin with it.
    const bool of_muon =
        then.optimizer != now.optimizer && (is.name.starts_with("--muon-") || is.name == "--cautious-decay");
    // Both are the same numbers.
    const bool masters = is.name == "--master-weights" && was.text != "none" && is.text != "none";
    // The same files may lie elsewhere: RecipeReader looks into them.
    const ResumeRule rule = pipedream || matrices || masters || is_training_data(is) ? ResumeRule::warn
                            : of_muon                                                ? ResumeRule::free
                                                                                     : is.rule;
    if (was.text == is.text || rule == ResumeRule::free || (is.name == "--grad-reduce" && is.text == "auto")) continue;
    const std::string change = formatted("{} was '{}' and is now '{}'{}", is.name, shown(was.text), is.text,
                                         matrices ? ": the state of matrices begins at zero" : "");
    const bool in_branch = rule == ResumeRule::branch || rule == ResumeRule::recipe;
    if (rule == ResumeRule::warn || (in_branch && begin == Begin::branch) ||
        (rule == ResumeRule::recipe && now.data_changed == DataChanged::accept))
      changes.noticed.push_back(change);
    else {
      changes.refused += "\n  " + change;
      (in_branch ? changes.of_branch : changes.fixed).push_back(is.name);
      changes.accepted = changes.accepted && rule == ResumeRule::recipe;
    }
  }
  return changes;
}

// Training data that are named otherwise, one per line; empty: none. Only a checkpoint says whether the files are
// others.
inline std::string changed_names_of_data(const nlohmann::json& recorded, const Options& now) {
  std::string changes;
  for (const OptionText& o : recorded_options(now))
    if (const nlohmann::json then = member(recorded, o.name); is_training_data(o) && then.is_string() && then != o.text)
      changes += formatted("\n  {} was '{}' and is now '{}'", o.name, shown(then.get<std::string>()), o.text);
  return changes;
}
inline void require_same_files(const std::string& file, const nlohmann::json& recorded, const Options& now) {
  const std::string changes = changed_names_of_data(recorded, now);
  CHECK(changes.empty(),
        "{} belongs to a run with other options:{}\nuse the same options to resume it, or choose another --out-dir",
        file, changes);
}

// Rejects changes to options that must match. Returns notices about the others.
inline std::vector<std::string> require_same_options(const std::string& file, const nlohmann::json& recorded,
                                                     const Options& now, Begin begin = Begin::resume) {
  OptionChanges changes = option_changes(file, recorded, now, begin);
  CHECK(
      changes.refused.empty() || begin == Begin::resume,
      "{} belongs to a run with other options:{}\na branch cannot change {}: use the same options, or begin a new run "
      "from its weights with --model instead of --branch-from",
      file, changes.refused, changes.fixed.size() == 1 ? "this one" : "these");
  std::string branch;
  if (changes.fixed.empty())
    branch = formatted("; {}to branch with {}, add --branch-from CHECKPOINT --out-dir NEW",
                       changes.accepted ? "to go on here, add --data-changed accept; " : "",
                       changes.of_branch.size() == 1 ? "this change" : "these changes");
  else if (!changes.of_branch.empty())
    branch = formatted("; a branch of it (--branch-from) may change {}, but not {}", either(changes.of_branch, "and"),
                       either(changes.fixed, "and"));
  CHECK(changes.refused.empty(),
        "{} belongs to a run with other options:{}\nuse the same options to resume it, or choose another --out-dir{}",
        file, changes.refused, branch);
  return std::move(changes.noticed);
}
inline void check_resumed_options(Log& log, const std::string& file, const nlohmann::json& recorded, const Options& now,
                                  Begin begin = Begin::resume) {
  for (const std::string& change : require_same_options(file, recorded, now, begin)) log.line("notice: " + change);
}

// run.json. From format 2 on it has a checksum of everything else, so that damage is always noticed.
struct RunRecord {
  nlohmann::json options, parent;  // parent: a branch's, see parent_of() in resume_point.h; otherwise null
  std::vector<Rollback> rollbacks = {};
  LocalHistory local = {};
};

// The text of one with these options; of `run` all but the options.
inline std::string run_record_text(const Options& o, const RunRecord& run = {}) {
  nlohmann::ordered_json record = {{"format", 2}, {"options", options_json(o)}};
  if (!run.parent.is_null()) record["parent"] = run.parent;
  if (!run.rollbacks.empty()) record["rollbacks"] = to_json_object(run.rollbacks);
  if (!run.local.run.empty()) record["local"] = run.local.to_json();
  record["checksum"] = checksum(nlohmann::json(record).dump());
  return record.dump(1) + "\n";
}

inline RunRecord parse_run_record(const std::string& text, const std::string& file) {
  const char* const remedy = "; where there are checkpoints it may be removed, since they record the options too";
  nlohmann::json record;
  try {
    record = parse_json(text, file);
  } catch (const Error& error) {
    throw Error(error.what() + std::string(remedy));
  }
  CHECK(record.is_object(), "{}: expected a JSON object, found {}; the file is damaged{}", file, record, remedy);
  const nlohmann::json format = record.value("format", nlohmann::json());
  CHECK(format == 1 || format == 2,
        "{}: \"format\" is {}, expected 1 or 2; the file is damaged, or a newer version of train_gpt wrote it{}", file,
        format, remedy);
  if (format == 2) {
    const nlohmann::json expected = record.value("checksum", nlohmann::json());
    record.erase("checksum");
    const std::string found = checksum(record.dump());
    CHECK(expected == found, "{}: its checksum is {}, but it says {}; the file is damaged{}", file, found, expected,
          remedy);
  }
  for (const auto& [name, value] : record.items())
    CHECK(name == "format" || name == "options" ||
              ((name == "parent" || name == "rollbacks" || name == "local") && format == 2),
          "{}: {} is unknown; the file is damaged{}", file, shown(name), remedy);
  RunRecord run{record.value("options", nlohmann::json()), record.value("parent", nlohmann::json()),
                rollbacks_from_json(record.value("rollbacks", nlohmann::json::array()), file),
                LocalHistory::from_json(member(record, "local"), file)};
  options_from_record(file, run.options);
  return run;
}

inline RunRecord read_run_record(const std::string& file) {
  return parse_run_record(read_text(file, most_json_bytes), file);
}

}  // namespace llmc
