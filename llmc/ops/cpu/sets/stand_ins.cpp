// The products of processors with AVX-512-BF16 and with AMX, in plain C++, bit for bit, for tests on others.
#include "ops/cpu/sets/shared.h"

#undef CPU_ISA
#define CPU_ISA stand_ins
#define CPU_STAND_INS
#pragma GCC diagnostic ignored "-Wpsabi"  // vectors wider than the registers are passed within this file alone
#include "ops/cpu/sets/set.h"

namespace llmc::cpu {

constexpr const ProductsOf<bf16> pairs_stand_in_products = stand_ins::all_products<bf16, MultiplyPairs>();
constexpr const ProductsOf<bf16> tiles_stand_in_products = stand_ins::all_products<bf16, MultiplyTiles>();

}  // namespace llmc::cpu
