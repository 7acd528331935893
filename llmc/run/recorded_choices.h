// recorded_choices.h: what the machine at hand decides and rounding depends on: the algorithms of products on a GPU,
// the instruction set on a CPU. Checkpoints record them, so that a resumed run computes as before where it can.
#pragma once
#include <string>
#include <utility>

#include "core/log.h"
#include "run/ranks.h"

namespace llmc {

// Uses the matmul algorithms that a checkpoint recorded, if they fit the GPU and library of all ranks.
inline bool take_recorded_matmuls(Run& run, const std::string& recorded, Log& log) {
  const std::string here = matmul_choices(run.stream);  // nothing is chosen yet, so only the header
  const bool fits = !recorded.empty() && recorded.starts_with(here);
  bool all_fit = true;
  for (const std::string& other :
       run.groups[GroupName::control].all_gather_text("matmul algorithms fit", fits ? "yes" : "no"))
    all_fit &= other == "yes";
  if (all_fit) set_matmul_choices(recorded, run.stream);
  else if (!recorded.empty())
    log.line(
        "notice: the checkpoint's matmul algorithms are for another GPU or cuBLASLt: products may round differently");
  return all_fit;
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
