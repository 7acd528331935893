// set.h: fills the tables of an instruction set with the ops compiled for it. The files beside it include it, after
// shared.h and after naming the set.
#pragma once
#include "ops/cpu/table.h"

namespace llmc::cpu::CPU_ISA {

// How: the way in which elements of T are multiplied.
template <class T, class How = Multiply<accumulator_t<T>>>
constexpr ProductsOf<T> all_products() {
  using Sum = accumulator_t<T>;
  return {&matmul<T, T, How>,         &matmul<T, Sum, How>,
          &grouped_linear<T, How>,    &grouped_linear_backward_weight<T, Sum, How>,
          &attention_forward<T, How>, &attention_backward<T, How>,
          &register_peak<How>};
}
template <class T>
constexpr OpsOf<T> all_ops() {
  using Sum = accumulator_t<T>;
  OpsOf<T> all{};
#define CPU_OP(name) all.name = &name<T>;
  CPU_OPS_OF_TYPE(CPU_OP)
#undef CPU_OP
#define CPU_OP(name) all.name = &name<Sum>;
  CPU_OPS_OF_SUMS(CPU_OP)
#undef CPU_OP
  all.update_weights_stochastic = &update_weights_stochastic;
  all.update_small_state = &update_small_state;
  all.converts = {&convert<float, T>, &convert<bf16, T>, &convert<double, T>};
  all.copies = {&copy_box<float, T>, &copy_box<bf16, T>, &copy_box<double, T>};
  return all;
}

}  // namespace llmc::cpu::CPU_ISA
