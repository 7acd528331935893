// next_steps.h: the commands that a run suggests for going on from its weights.
#pragma once
#include <unistd.h>

#include <cstdlib>
#include <filesystem>

#include "core/files.h"
#include "core/log.h"
#include "run/options/print.h"
#include "run/plan/report_plan.h"
#include "run/recipe/sources.h"

namespace llmc {

namespace detail {

// "out/run" for "out/run-continued" and "out/run-continued-2".
inline std::string without_continued(const std::string& out) {
  const size_t digits = out.find_last_not_of("0123456789") + 1;
  const bool numbered = digits > 0 && digits < out.size() && out[digits - 1] == '-';
  const std::string name = numbered ? out.substr(0, digits - 1) : out, ending = "-continued";
  return name.ends_with(ending) ? name.substr(0, name.size() - ending.size()) : out;
}

// "out/run-continued", or "out/run-continued-2" if that exists.
inline std::string free_directory(const std::string& out, const std::string& ending) {
  std::string free = out + ending;
  for (int i = 2; path_exists(free); ++i) free = formatted("{}{}-{}", out, ending, i);
  return free;
}

inline std::string without_slash(const std::string& out) { return out.substr(0, out.find_last_not_of('/') + 1); }

// The options of a run without those that concern one start or one process. What one start accepted, a later one must
// not take without a word.
inline Options of_any_start(Options o) {
  const Options usual;
  o.resume = usual.resume;
  o.branch_from.clear();
  o.data_changed = usual.data_changed;
  o.restart = false;
  o.rank = o.world_size = std::nullopt;
  o.rendezvous.clear();
  o.trace.clear();
  o.trace_step = std::nullopt;
  return o;
}

// The command before the trainer's options, program included, if a script of scripts/multi_node/ started it.
inline constexpr const char* launch_variable = "TRAIN_GPT_LAUNCH";

// A command for as many processes as these options have, with their launcher if it is known.
inline std::string launched(const Options& o, const std::string& program, const Options& next) {
  const std::string command = command_line(next, program);
  if (o.place.processes == 1) return command;
  if (const char* const before = std::getenv(launch_variable); before != nullptr && *before != '\0')
    return before + command.substr(shell_word(program).size());
  const std::string launcher = o.place.started_by.substr(0, o.place.started_by.find(' '));
  if (launcher == "srun" || ((launcher == "mpirun" || launcher == "mpiexec") && o.place.hosts == 1))
    return formatted("{}{} -n {} {}", launcher, launcher == "mpirun" && ::geteuid() == 0 ? " --allow-run-as-root" : "",
                     o.place.processes, command);
  return formatted("in {} processes, started as these were: {}", o.place.processes, command);
}

}  // namespace detail

// The options with which this run, which is complete, goes on to twice its length; none: its stages say how long it is,
// or it may not read a source more often.
inline std::optional<Options> twice_as_long(const Options& o) {
  constexpr int64_t most = std::numeric_limits<int64_t>::max() / 2;
  if (!o.stages.empty() || o.max_steps.value_or(0) > most || (o.tokens && o.tokens->tokens > most)) return std::nullopt;
  for (const SourceText& source : source_texts(o))
    if (source.max_epochs) return std::nullopt;
  Options longer = detail::of_any_start(o);
  if (o.max_steps) longer.max_steps = 2 * *o.max_steps;
  else if (o.tokens) longer.tokens = token_count(formatted("{}", 2 * o.tokens->tokens));
  else longer.epochs = 2 * o.epochs.value_or(1);
  return longer;
}

// The command that continues from a checkpoint with half the learning rate. data_changed: refuse, if the checkpoint is
// of these data.
inline std::string branch_command(const Options& o, const std::string& checkpoint, DataChanged data_changed,
                                  const std::string& program) {
  Options branch = detail::of_any_start(o);
  branch.data_changed = data_changed;
  branch.branch_from = checkpoint;
  branch.lr = o.lr / 2;
  for (std::optional<double>* rate : {&branch.embed_lr, &branch.head_lr, &branch.scalar_lr})
    if (*rate) **rate /= 2;
  branch.out_dir = detail::free_directory(detail::without_slash(o.out_dir), "-branch");
  return detail::launched(o, program, branch);
}

// The next commands, to be pasted where `program` was called: each works as it stands. prompt: for --generate; longer:
// twice_as_long() if the run goes on with these.
inline void report_next_steps(Log& log, const Options& o, const std::string& checkpoint, const std::string& program,
                              const std::string& prompt, const std::optional<Options>& longer) {
  const std::string out = detail::without_slash(o.out_dir);
  Options more = detail::of_any_start(o), made;
  more.model = checkpoint;  // the checkpoint knows its own shape
  more.from_scratch = false;
  more.n_layer = more.n_head = more.n_kv_head = more.n_embd = more.n_ffn = more.vocab_size = std::nullopt;
  more.init_std = std::nullopt;
  more.seed = o.seed < std::numeric_limits<int64_t>::max() ? o.seed + 1 : 0;  // the same seed draws the same samples
  more.out_dir = detail::free_directory(detail::without_continued(out), "-continued");
  made.generate = true;
  made.model = checkpoint;
  made.dtype = o.dtype;
  made.tokenizer = o.tokenizer;
  made.prompt = prompt;
  made.temperature = o.temperature;
  made.top_k = o.top_k;
  made.top_p = o.top_p;
  Rows rows = {{"train further", detail::launched(o, program, more)}, {"generate", command_line(made, program)}};
  if (longer) rows.insert(rows.begin(), {"continue", detail::launched(o, program, *longer)});
  const std::string plot = (std::filesystem::path(program).parent_path() / "scripts/plot.py").lexically_normal();
  if (path_exists(plot)) rows.emplace_back("plot", formatted("python3 {} {}", shell_word(plot), shell_word(out)));
  log.table(formatted("next: {}train further from these weights (with a new optimizer), generate, plot",
                      longer ? "continue this run to twice its length, " : ""),
            rows);
}

}  // namespace llmc
