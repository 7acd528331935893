// What processors with AVX-512-BF16 and with AMX compute, in plain C++ and bit for bit, for tests on others.
#include "ops/cpu/sets/shared.h"

#undef CPU_ISA
#define CPU_ISA stand_ins
#define CPU_STAND_INS
#pragma GCC diagnostic ignored "-Wpsabi"  // vectors wider than the registers are passed within this file alone
#include "ops/cpu/sets/set.h"

namespace llmc::cpu {

const OpsOf<bf16> pairs_stand_in_bf16 = stand_ins::with_products<MultiplyPairs>(portable_bf16);
const OpsOf<bf16> tiles_stand_in_bf16 = stand_ins::with_products<MultiplyTiles>(portable_bf16);

}  // namespace llmc::cpu
