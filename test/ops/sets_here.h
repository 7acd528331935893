// sets_here.h: the instruction sets that this processor has, and the stand-ins, for tests of all of them.
#pragma once
#include "ops/cpu/table.h"

namespace llmc {

inline std::vector<cpu::Isa> sets_here() {
  std::vector<cpu::Isa> sets;
  for (size_t i = 0; i < cpu::isa_names.size(); ++i)
    if (const cpu::Isa isa = static_cast<cpu::Isa>(i); cpu::processor_has(isa)) sets.push_back(isa);
  return sets;
}

}  // namespace llmc
