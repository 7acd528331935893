// The CPU's products of bf16 for processors with AVX-512 that multiply it in pairs (Cooper Lake, Sapphire Rapids, Zen 4
// and later).
#include "ops/cpu/sets/shared.h"

#undef CPU_ISA
#define CPU_ISA avx512_pairs
#define CPU_VECTOR_BYTES 64
#define CPU_BF16_PAIRS
#pragma GCC target("avx512bf16,avx512f,avx512bw,avx512dq,avx512vl,avx2,fma,f16c,prefer-vector-width=512")
#include "ops/cpu/sets/set.h"

namespace llmc::cpu {

constexpr const ProductsOf<bf16> avx512_pairs_products = avx512_pairs::all_products<bf16, MultiplyPairs>();

}  // namespace llmc::cpu
