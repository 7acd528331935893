// recorded_choices.h: what the machine at hand decides and rounding depends on: the algorithms of products on a GPU,
// the instruction set on a CPU. Checkpoints record them, so that a resumed run computes as before where it can.
#pragma once
#include "core/clock.h"
#include "core/log.h"
#include "run/ranks.h"
#include "run/reports/peak.h"

namespace llmc {

// Uses the matmul algorithms that a checkpoint recorded, if they fit the GPU and library of all ranks.
inline bool take_recorded_matmuls(Run& run, const std::string& recorded, Log& log) {
  const std::string here = matmul_choices(run.stream);  // nothing is chosen yet, so only the header
  const bool fits = !recorded.empty() && recorded.starts_with(here);
  const std::vector<std::string> all =
      run.groups[GroupName::control].all_gather_text("matmul algorithms fit", fits ? "yes" : "no");
  const bool all_fit = std::ranges::find(all, "no") == all.end();
  if (all_fit) set_matmul_choices(recorded, run.stream);
  else if (!recorded.empty())
    log.line(
        "notice: the checkpoint's matmul algorithms are for another GPU or cuBLASLt: products may round differently");
  return all_fit;
}

// What earlier runs on this machine have chosen for GPUs and a library with this title, or the title alone. A cache
// that cannot be read is as good as none.
inline std::string matmul_choices_before(const std::string& title, const MeasurementCache& cache, Run& run, Log& log) {
  constexpr double a_month = 30.0 * 24 * 3600;  // then the GPU, or what else ran on it, may have been another
  const nlohmann::json choices = member(cache.find(title, a_month), "choices");
  if (!choices.is_string()) return title;
  std::string before = title + choices.get<std::string>();
  try {
    set_matmul_choices(before, run.stream);
  } catch (const Error& error) {
    log.line(formatted("notice: {}: {}", cache.file(), error.what()));
    return title;
  }
  return before;
}

// Times the algorithms of a step's products, but for those that an earlier run on this machine has timed, and keeps the
// choices for later ones.
inline std::string time_matmuls(Run& run, const BatchSource& batches, Log& log) {
  const std::string title = matmul_choices(run.stream);  // nothing is chosen yet
  MeasurementCache cache("matmul_algorithms.json");
  const std::string before = run.groups[GroupName::control].all_gather_text(
      "matmul algorithms of earlier runs", run.groups.first() ? matmul_choices_before(title, cache, run, log) : "")[0];
  if (run.groups.first_of_stage() && before.starts_with(title)) set_matmul_choices(before, run.stream);
  log.line("timing matmul algorithms ...");
  const auto begin = Clock::now();
  std::string choices = run.trainer.tune(batches);
  const double seconds = seconds_since(begin);
  std::set<std::string> known;
  int64_t shapes = 0, timed = 0;
  for_matmul_choices(before, [&](const std::string&, const std::string& line) { known.insert(line); });
  for_matmul_choices(
      choices, [&](const std::string&, const std::string& line) { ++shapes, timed += known.contains(line) ? 0 : 1; });
  log.line(formatted("timed {} of {} matrix products in {:.1f} s; choices: {}", timed, shapes, seconds,
                     cache.file().empty() ? "not kept, since there is no directory for caches" : cache.file()));
  if (timed > 0 && run.groups.first())
    cache.keep(title, {{"choices", merged_matmul_choices(std::array{choices, before}).substr(title.size())}});
  return choices;
}

// Records the instruction set in use. A run that resumes with another one goes on, but rounds differently.
inline void record_instructions(std::string& recorded, Log& log) {
  const std::string before = std::exchange(recorded, cpu::recorded_isa());
  if (before.empty() || before == recorded) return;
  // "portable" of another architecture rounds differently from this one's.
  const bool is_here = cpu::can_choose(before) && before != cpu::name_of(cpu::isa_in_use());
  log.line(formatted(
      "notice: the checkpoint was computed with the instructions of {}, and the run goes on with those of {}: "
      "it rounds differently from here on{}",
      before, recorded, is_here ? formatted(". --cpu-isa {} would repeat it bit for bit", before) : ""));
}

}  // namespace llmc
