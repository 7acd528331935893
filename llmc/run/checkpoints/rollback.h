// rollback.h: the rollbacks of a run (--on-spike rollback): what run.json records of them, and which samples they leave
// out. A rollback returns to the state of a checkpoint, but not to its place in the data: the samples from there to
// those of the spike are passed over. run.json records it before training goes on, because the next checkpoint, whose
// trainer.json records the samples left out before it, may never be written.
#pragma once
#include <iterator>
#include <nlohmann/json.hpp>

#include "core/json.h"
#include "run/recipe/course.h"

namespace llmc {

struct Rollback {
  int64_t step;            // the last whose samples stay: usually the checkpoint's
  int64_t spike;           // the step that was a spike
  double loss, grad_norm;  // of the spike
  int64_t samples;         // left out after `step`, also by the rollbacks before this one
  std::string recipe;      // recipe_checksum(), of the recipe whose samples they are
};

inline nlohmann::ordered_json to_json_object(const std::vector<Rollback>& rollbacks) {
  nlohmann::ordered_json all = nlohmann::ordered_json::array();
  for (const Rollback& r : rollbacks)
    all.push_back({{"step", r.step},
                   {"spike", r.spike},
                   {"loss", r.loss},
                   {"grad_norm", r.grad_norm},
                   {"samples", r.samples},
                   {"recipe", r.recipe}});
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
    const nlohmann::json recipe = member(one, "recipe");
    if (!step || !spike || !samples || *spike <= *step || *samples == 0 || !recipe.is_string()) throw damaged(one);
    all.push_back({*step, *spike, value("loss"), value("grad_norm"), *samples, recipe});
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

// The rollbacks since the checkpoint of this step: those that led to no later one.
inline std::vector<Rollback> rollbacks_since(const std::vector<Rollback>& rollbacks, int64_t step) {
  std::vector<Rollback> since;
  std::ranges::copy_if(rollbacks, std::back_inserter(since), [&](const Rollback& r) { return r.step >= step; });
  return since;
}

}  // namespace llmc
