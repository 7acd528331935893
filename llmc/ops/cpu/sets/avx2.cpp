// The CPU's ops for processors with AVX2 and fused multiply-add (Haswell, Zen and later).
#include "ops/cpu/sets/shared.h"

#undef CPU_ISA
#define CPU_ISA avx2
#define CPU_VECTOR_BYTES 32
#pragma GCC target("avx2,fma,f16c")
#include "ops/cpu/sets/set.h"

namespace llmc::cpu {

constexpr const OpsOf<float> avx2_fp32 = avx2::all_ops<float>();
constexpr const OpsOf<bf16> avx2_bf16 = avx2::all_ops<bf16>();
constexpr const ProductsOf<float> avx2_fp32_products = avx2::all_products<float>();
constexpr const ProductsOf<bf16> avx2_bf16_products = avx2::all_products<bf16>();

}  // namespace llmc::cpu
