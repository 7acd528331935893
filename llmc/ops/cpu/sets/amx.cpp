// The CPU's products of bf16 for processors with AMX (Sapphire Rapids and later).
#include "ops/cpu/sets/shared.h"

#undef CPU_ISA
#define CPU_ISA amx
#define CPU_VECTOR_BYTES 64
#define CPU_AMX
#pragma GCC target("amx-tile,amx-bf16,avx512f,avx512bw,avx512dq,avx512vl,avx2,fma,f16c,prefer-vector-width=512")
#include "ops/cpu/sets/set.h"

namespace llmc::cpu {

constexpr const ProductsOf<bf16> amx_products = amx::all_products<bf16, MultiplyTiles>();

}  // namespace llmc::cpu
