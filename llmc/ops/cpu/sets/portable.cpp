// The CPU's ops for any processor.
#include "ops/cpu/sets/set.h"

namespace llmc::cpu {

constexpr const OpsOf<double> portable_fp64 = portable::all_ops<double>();
constexpr const OpsOf<float> portable_fp32 = portable::all_ops<float>();
constexpr const OpsOf<bf16> portable_bf16 = portable::all_ops<bf16>();
constexpr const ProductsOf<double> portable_fp64_products = portable::all_products<double>();
constexpr const ProductsOf<float> portable_fp32_products = portable::all_products<float>();
constexpr const ProductsOf<bf16> portable_bf16_products = portable::all_products<bf16>();

}  // namespace llmc::cpu
