// seen_samples.h: a notice when a run begins with weights that were trained on the very samples that come next.
#pragma once
#include <nlohmann/json.hpp>

#include "core/log.h"
#include "run/checkpoints/run_record.h"
#include "run/job.h"

namespace llmc {

// Whether a run mixed sources, had stages, or was a branch with another order.
inline bool with_several_orders(const nlohmann::json& recipe) {
  if (!recipe.is_object()) return false;
  const nlohmann::json sources = member(recipe, "sources"), facts = member(recipe, "facts");
  return recipe.contains("origin") || !facts.is_object() || facts.contains("file") || !sources.is_array() ||
         sources.size() != 1 || member(sources[0], "seeds").size() != 1;
}

// A notice if the run that wrote this trainer.json took the same samples in the same order as this run will; empty:
// they are others, or come in another order.
inline std::string seen_samples(const nlohmann::json& trainer, const Options& o,
                                const std::vector<std::string>& data_checksums) {
  auto field = [&](const char* name) { return member(trainer, name); };
  const std::optional<int64_t> seen = whole_number(field("data_cursor")), all = whole_number(field("data_samples"));
  const nlohmann::json options = field("options");
  if (!seen || !all || *seen == 0 || *all == 0 || o.overfit_batch || !options.is_object()) return "";
  if (field("data_checksums") != nlohmann::json(data_checksums) || field("seq_len") != o.seq_len) return "";
  if (!field("seeds").is_null() || with_several_orders(field("recipe"))) return "";
  if (shuffled(options) != o.shuffled() || (o.shuffled() && field("seed") != o.seed)) return "";
  return formatted(
      "was trained on the same data in the same order, {}: this run begins with the same samples, {:.2f} "
      "epochs of them; {} takes them in another order",
      o.shuffled() ? formatted("--seed {}", o.seed) : std::string("that of the files"),
      static_cast<double>(*seen) / static_cast<double>(*all), o.shuffled() ? "another --seed" : "--shuffle");
}

// For a run that begins with the weights of --model.
inline void report_seen_samples(Log& log, const Job& job) {
  const Options& o = job.asked;
  const std::string file = o.model + "/trainer.json";
  if (job.course.recipe().staged || job.data->train.size() > 1 || model_preset(o.model) || o.from_scratch ||
      !path_exists(file))
    return;
  const std::string seen = seen_samples(read_json(file), o, job.data->checksums);
  if (!seen.empty()) log.line(formatted("notice: --model {} {}", o.model, seen));
}

}  // namespace llmc
