// The CPU's ops for processors with AVX-512 (Skylake-X, Zen 4 and later).
#include "ops/cpu/sets/shared.h"

#undef CPU_ISA
#define CPU_ISA avx512
#define CPU_VECTOR_BYTES 64
#pragma GCC target("avx512f,avx512bw,avx512dq,avx512vl,avx2,fma,f16c,prefer-vector-width=512")
#include "ops/cpu/sets/set.h"

namespace llmc::cpu {

constexpr const OpsOf<float> avx512_fp32 = avx512::all_ops<float>();
constexpr const OpsOf<bf16> avx512_bf16 = avx512::all_ops<bf16>();
constexpr const ProductsOf<float> avx512_fp32_products = avx512::all_products<float>();
constexpr const ProductsOf<bf16> avx512_bf16_products = avx512::all_products<bf16>();

}  // namespace llmc::cpu
