// file_defaults.h: option defaults taken from files: the sequence length that a model was trained with, and the
// vocabulary of a tokenizer.
#pragma once
#include <nlohmann/json.hpp>

#include "model/presets.h"
#include "run/checkpoints/checkpoint.h"
#include "run/options/options.h"
#include "text/tokenizer.h"

namespace llmc {

// For --evaluate: the sequence length of the model's training if its directory says so, otherwise the usual one.
inline int64_t default_length(const Options& o) {
  require_trained_model("--evaluate", o.model);
  return std::min(trained_seq_len(o.model).value_or(o.seq_len), resolve_model(o.model, {}).n_positions);
}

namespace detail {

// The --vocab-size recorded by the checkpoint from which a run resumes or branches; "": none was given. None: a new
// run.
inline std::optional<std::string> recorded_vocabulary(const Options& o) {
  if (o.restart || o.resume == "never") return std::nullopt;
  std::vector<std::string> checkpoints;
  if (o.resume != "auto") checkpoints.push_back(o.resume);
  else if (is_directory(o.out_dir))
    for (const int64_t step : checkpoint_steps(o.out_dir))
      checkpoints.insert(checkpoints.begin(), checkpoint_path(o.out_dir, step));
  if (!o.branch_from.empty()) checkpoints.push_back(o.branch_from);
  for (const std::string& checkpoint : checkpoints) try {
      const nlohmann::json options = read_json(checkpoint + "/trainer.json").value("options", nlohmann::json());
      if (options.is_object()) return options.value("--vocab-size", std::string());
    } catch (const std::exception&) {  // reported when the run looks for a checkpoint to resume from
    }
  return std::nullopt;
}

}  // namespace detail

// A preset takes the vocabulary of the named tokenizer, unless --vocab-size says otherwise. It keeps its own if that is
// the tokenizer's plus less than a hundredth of padding, as published ones are, and in a run that began with its own,
// as all runs of earlier versions did.
inline void take_vocabulary(Options& o) {
  const std::optional<ModelConfig> preset = model_preset(o.model);
  if (!preset || o.vocab_size || o.tokenizer == "auto") return;
  const int64_t tokens = make_tokenizer(o.tokenizer)->size();
  if (tokens <= preset->vocab_size && preset->vocab_size - tokens < preset->vocab_size / 100) return;
  if (!o.plan_auto && detail::recorded_vocabulary(o) == "") return;
  o.vocab_size = tokens;
  o.preset_vocabulary = preset->vocab_size;
}

}  // namespace llmc
