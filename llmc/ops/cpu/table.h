// table.h: all ops of the CPU as pointers, one table for each type that they compute in, filled by every instruction
// set (sets/). Callers reach an op through the table of the set in use: ops<float>().gelu_forward(out, x, n).
#pragma once
#include "ops/cpu/attention.h"
#include "ops/cpu/attention_backward.h"
#include "ops/cpu/cross_entropy.h"
#include "ops/cpu/elementwise.h"
#include "ops/cpu/embedding.h"
#include "ops/cpu/expert_ranks.h"
#include "ops/cpu/experts.h"
#include "ops/cpu/grouped_matmul.h"
#include "ops/cpu/heads.h"
#include "ops/cpu/isa.h"
#include "ops/cpu/matmul.h"
#include "ops/cpu/muon.h"
#include "ops/cpu/norms.h"
#include "ops/cpu/qk_clip.h"
#include "ops/cpu/quantise.h"
#include "ops/cpu/router.h"
#include "ops/cpu/small_state.h"
#include "ops/cpu/step.h"
#include "ops/cpu/update.h"

// The ops by name: templates over the type that they compute in; templates over the type that they sum in; and ops that
// would not gain from vectors, which are compiled once.
// clang-format off
#define CPU_OPS_OF_TYPE(OP) \
  OP(add_positions) OP(attention_finish) \
  OP(cache_append) OP(clip_heads) OP(column_sum) OP(combine_backward) OP(combine_rows) OP(cross_entropy) OP(cross_entropy_merge) \
  OP(cross_entropy_stats) OP(dispatch_rows) OP(divide_by_norm) OP(embedding_backward) OP(embedding_forward) OP(fill) OP(gelu_backward) \
  OP(gelu_backward_with_bias) OP(gelu_forward) OP(init_normal) OP(layernorm_backward) OP(layernorm_forward) OP(linear_combination) OP(merge_parts) OP(normalise_rows) \
  OP(projection_norm_backward) OP(projection_norm_forward) OP(projection_sums) OP(qk_norm_backward) \
  OP(qk_norm_forward) OP(residual_forward) OP(residual_layernorm_forward) OP(residual_rmsnorm_forward) \
  OP(rmsnorm_backward) OP(rmsnorm_forward) OP(rotary) OP(round_to_fp8) OP(round_whole_to_fp8) OP(scale) OP(square_sum) OP(swiglu_backward) OP(swiglu_forward) \
  OP(tile_maxima) OP(tiles_from_fp8) OP(tiles_to_fp8) OP(update_weights)
#define CPU_OPS_OF_SUMS(OP) \
  OP(add_losses) OP(average_weights) OP(exchange) OP(join_segments) OP(largest_logits) OP(muon_direction) OP(rotary_table) OP(router_backward) OP(router_forward) OP(router_losses) \
  OP(router_statistics)
#define CPU_OPS_OF_NO_TYPE(OP) \
  OP(add_expert_counts) OP(arrival_plan) OP(clip_control) OP(combine_scalars) OP(copy) OP(count_dropped) \
  OP(dispatch_plan) OP(expert_counts) OP(largest_of_ranks) OP(poison) OP(scales_of_ranks) OP(segment_starts) OP(split_in_three) OP(update_expert_biases) OP(zero)
// clang-format on

namespace llmc::cpu {

template <class T>
struct OpsOf {
  using Sum = accumulator_t<T>;
#define CPU_OP(name) decltype(&cpu::name<T>) name;
  CPU_OPS_OF_TYPE(CPU_OP)
#undef CPU_OP
#define CPU_OP(name) decltype(&cpu::name<Sum>) name;
  CPU_OPS_OF_SUMS(CPU_OP)
#undef CPU_OP
  // Of bf16 weights and of state in few bits, in every table.
  decltype(&cpu::update_weights_stochastic) update_weights_stochastic;
  decltype(&cpu::update_small_state) update_small_state;
  // By the type that is written.
  std::tuple<decltype(&cpu::convert<float, T>), decltype(&cpu::convert<bf16, T>), decltype(&cpu::convert<double, T>)>
      converts;
  std::tuple<decltype(&cpu::copy_box<float, T>), decltype(&cpu::copy_box<bf16, T>), decltype(&cpu::copy_box<double, T>)>
      copies;

  template <class To>
  auto convert() const {
    return std::get<decltype(&cpu::convert<To, T>)>(converts);
  }
  template <class To>
  auto copy_box() const {
    return std::get<decltype(&cpu::copy_box<To, T>)>(copies);
  }
};
template <>
struct OpsOf<void> {
#define CPU_OP(name) decltype(&cpu::name) name = &cpu::name;
  CPU_OPS_OF_NO_TYPE(CPU_OP)
#undef CPU_OP
};

// Products, and attention, which is made of products: some processors have instructions for these alone. C is in T, or
// in the type of the sums.
template <class T>
struct ProductsOf {
  using Sum = accumulator_t<T>;
  decltype(&cpu::matmul<T, T>) matmul;
  decltype(&cpu::matmul<T, Sum>) matmul_sum;
  decltype(&cpu::grouped_linear<T>) grouped_linear;
  decltype(&cpu::grouped_linear_backward_weight<T>) grouped_linear_backward_weight;
  decltype(&cpu::attention_forward<T>) attention_forward;
  decltype(&cpu::attention_backward<T>) attention_backward;
  decltype(&cpu::register_peak<Multiply<Sum>>) register_peak;
};

// The tables of each set; constants, so that no code of an unused set runs. fp64 is for finite differences and other
// references: every processor computes it alike.
extern const OpsOf<double> portable_fp64;
extern const OpsOf<float> portable_fp32, avx2_fp32, avx512_fp32;
extern const OpsOf<bf16> portable_bf16, avx2_bf16, avx512_bf16;
extern const ProductsOf<double> portable_fp64_products;
extern const ProductsOf<float> portable_fp32_products, avx2_fp32_products, avx512_fp32_products;
extern const ProductsOf<bf16> portable_bf16_products, avx2_bf16_products, avx512_bf16_products, avx512_pairs_products,
    amx_products, pairs_stand_in_products, tiles_stand_in_products;

namespace detail {

// The table of a set: any processor's, AVX2's or AVX-512's.
template <class Table>
const Table& of_vectors(Isa isa, const Table& portable, const Table& avx2, const Table& avx512) {
  if (isa == Isa::avx2) return avx2;
  if (isa >= Isa::avx512 && isa <= Isa::amx) return avx512;
  return portable;
}

}  // namespace detail

#ifdef CPU_ISA_SETS
#define CPU_SETS(type, products) portable_##type##products, avx2_##type##products, avx512_##type##products
#else  // this program has only those for any processor
#define CPU_SETS(type, products) portable_##type##products, portable_##type##products, portable_##type##products
#endif

template <class T>
const OpsOf<T>& ops_of([[maybe_unused]] Isa isa) {
  if constexpr (std::is_same_v<T, double>) return portable_fp64;
  else if constexpr (std::is_same_v<T, float>) return detail::of_vectors(isa, CPU_SETS(fp32, ));
  else return detail::of_vectors(isa, CPU_SETS(bf16, ));
}
template <class T>
const ProductsOf<T>& products_of([[maybe_unused]] Isa isa) {
  if constexpr (std::is_same_v<T, double>) {
    return portable_fp64_products;
  } else if constexpr (std::is_same_v<T, float>) {
    return detail::of_vectors(isa, CPU_SETS(fp32, _products));
  } else {
    if (isa == Isa::pairs_stand_in) return pairs_stand_in_products;
    if (isa == Isa::tiles_stand_in) return tiles_stand_in_products;
#ifdef CPU_ISA_SETS
    if (isa == Isa::avx512_bf16) return avx512_pairs_products;
    if (isa == Isa::amx) return amx_products;
#endif
    return detail::of_vectors(isa, CPU_SETS(bf16, _products));
  }
}
#undef CPU_SETS

// Checks that the instructions that multiply bf16 give the same bits as their stand-ins: processors, emulators of them,
// and operating systems that lose registers may differ. Compares a product that uses all their parts.
inline void require_known_bits(Isa isa) {
  if (isa != Isa::avx512_bf16 && isa != Isa::amx) return;
  constexpr int64_t M = 37, N = 45, K = 70;
  std::vector<bf16> a(M * K), b(N * K);
  const auto fill = [](std::vector<bf16>& values, float factor) {
    for (size_t i = 0; i < values.size(); ++i) store(values[i], std::sin(factor * static_cast<float>(i)));
  };
  fill(a, 0.37f), fill(b, 0.73f);
  const MatmulShape shape{M,           N,        K, Transpose::no, Transpose::yes, Accumulate::no, DType::bf16,
                          DType::fp32, Bias::no, 1};
  std::vector<std::byte> scratch(static_cast<size_t>(matmul_scratch(shape)));
  const auto product = [&](Isa set) {
    std::vector<float> sums(M * N);
    products_of<bf16>(set).matmul_sum(sums.data(), a.data(), b.data(), nullptr, scratch.data(), shape);
    return sums;
  };
  CHECK(product(isa) == product(isa == Isa::amx ? Isa::tiles_stand_in : Isa::pairs_stand_in),
        "products of bf16 by {} on this processor are not those of its manual: use --cpu-isa {}, and please report it",
        name_of(isa), name_of(isa == Isa::amx ? Isa::avx512_bf16 : Isa::avx512));
}

// The ops of the set in use.
template <class T>
const OpsOf<T>& ops() {
  if constexpr (std::is_void_v<T>) {
    static constexpr OpsOf<void> plain;
    return plain;
  } else {
    static const OpsOf<T>& in_use = ops_of<T>(isa_in_use());
    return in_use;
  }
}
template <class T>
const ProductsOf<T>& products() {
  static const ProductsOf<T>* in_use = [] {
    if constexpr (std::is_same_v<T, bf16>) require_known_bits(isa_in_use());
    return &products_of<T>(isa_in_use());
  }();
  return *in_use;
}

}  // namespace llmc::cpu
