// cross_entropy.h: softmax, cross-entropy and its gradient, in place on the logits. Contracts: ops/ops.h.
#pragma once
#include "ops/cpu/simd.h"
#include "ops/types.h"

namespace llmc::cpu {

template <class T, class A = accumulator_t<T>>
void cross_entropy(A* losses, T* logits, const int32_t* targets, int64_t N, int64_t V, int64_t V_padded, A scale,
                   Gradient gradient) {
#pragma omp parallel for schedule(static)
  for (int64_t n = 0; n < N; ++n) {
    T* row = logits + n * V_padded;
    if (targets[n] < 0) {
      losses[n] = 0;
      if (gradient == Gradient::yes) std::fill(row, row + V_padded, T(A(0)));
      continue;
    }
    A largest = static_cast<A>(row[0]);
#pragma omp simd reduction(max : largest)
    for (int64_t v = 0; v < V; ++v) largest = std::max(largest, static_cast<A>(row[v]));
    A sum = 0;
#pragma omp simd reduction(+ : sum)
    for (int64_t v = 0; v < V; ++v) sum += exponential(static_cast<A>(row[v]) - largest);
    losses[n] = std::log(sum) + largest - static_cast<A>(row[targets[n]]);
    if (gradient == Gradient::no) continue;
    const A factor = scale / sum;
    const A at_target = static_cast<A>(row[targets[n]]);
#pragma omp simd
    for (int64_t v = 0; v < V; ++v) store(row[v], exponential(static_cast<A>(row[v]) - largest) * factor);
    row[targets[n]] = T(exponential(at_target - largest) * factor - scale);
    std::fill(row + V, row + V_padded, T(A(0)));
  }
}

}  // namespace llmc::cpu
