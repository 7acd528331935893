// cross_entropy.h: softmax, cross-entropy and its gradient, in place on the logits. Contracts: ops/ops.h.
#pragma once
#include "ops/cpu/simd.h"
#include "ops/types.h"

namespace llmc::cpu {
inline namespace CPU_ISA {

namespace detail {

// The largest of a row of logits, and the sum of the exponentials of all relative to it.
template <class T, class A>
void softmax_sum(A& largest, A& sum, const T* row, int64_t V) {
  A most = std::numeric_limits<A>::lowest(), total = 0;
#pragma omp simd reduction(max : most)
  for (int64_t v = 0; v < V; ++v) most = std::max(most, static_cast<A>(row[v]));
#pragma omp simd reduction(+ : total)
  for (int64_t v = 0; v < V; ++v) total += exponential(static_cast<A>(row[v]) - most);
  largest = most, sum = total;
}

// row = factor exp(row - largest) - scale at the target, 0 in the padding.   target: a column, or -1
template <class T, class A>
void softmax_gradient(T* row, A largest, A factor, int64_t target, int64_t V, int64_t V_padded, A scale) {
  const A at_target = target < 0 ? A(0) : static_cast<A>(row[target]);
#pragma omp simd
  for (int64_t v = 0; v < V; ++v) store(row[v], exponential(static_cast<A>(row[v]) - largest) * factor);
  if (target >= 0) row[target] = T(exponential(at_target - largest) * factor - scale);
  std::fill(row + V, row + V_padded, T(A(0)));
}

}  // namespace detail

template <class T, class A = accumulator_t<T>>
void cross_entropy(A* losses, T* logits, const int32_t* targets, int64_t N, int64_t V, int64_t V_padded, A scale,
                   Gradient gradient, const ZLoss<A>& z = {}) {
#pragma omp parallel for schedule(static)
  for (int64_t n = 0; n < N; ++n) {
    T* row = logits + n * V_padded;
    if (targets[n] < 0) {
      losses[n] = 0;
      z.record(n, 0);
      if (gradient == Gradient::yes) std::fill(row, row + V_padded, T(A(0)));
      continue;
    }
    A largest, sum;
    detail::softmax_sum(largest, sum, row, V);
    const A log_z = std::log(sum) + largest;
    losses[n] = log_z - static_cast<A>(row[targets[n]]);
    z.record(n, log_z);
    if (gradient == Gradient::yes)
      detail::softmax_gradient(row, largest, scale * z.gradient(log_z) / sum, targets[n], V, V_padded, scale);
  }
}

// stats (N, 3) = {largest logit, sum of exp(logit - largest), the target's logit} of the columns of `part`
template <class T, class A = accumulator_t<T>>
void cross_entropy_stats(A* stats, const T* logits, const int32_t* targets, int64_t N, int64_t V_padded,
                         const Vocabulary& part) {
#pragma omp parallel for schedule(static)
  for (int64_t n = 0; n < N; ++n) {
    const T* row = logits + n * V_padded;
    A largest = -std::numeric_limits<A>::infinity(), sum = 0;
    if (part.size > 0) detail::softmax_sum(largest, sum, row, part.size);
    stats[3 * n] = largest;
    stats[3 * n + 1] = sum;
    stats[3 * n + 2] = part.has(targets[n]) ? static_cast<A>(row[targets[n] - part.first]) : A(0);
  }
}

// stats (P, N, 3): of all parts, which are merged in order
template <class T, class A = accumulator_t<T>>
void cross_entropy_merge(A* losses, T* logits, const A* stats, const int32_t* targets, int64_t P, int64_t N,
                         int64_t V_padded, const Vocabulary& part, A scale, Gradient gradient, const ZLoss<A>& z = {}) {
#pragma omp parallel for schedule(static)
  for (int64_t n = 0; n < N; ++n) {
    T* row = logits + n * V_padded;
    if (targets[n] < 0) {
      losses[n] = 0;
      z.record(n, 0);
      if (gradient == Gradient::yes) std::fill(row, row + V_padded, T(A(0)));
      continue;
    }
    const A* of_row = stats + 3 * n;  // and every 3 N from there
    A largest = of_row[0], sum = 0, target_logit = 0;
    for (int64_t p = 1; p < P; ++p) largest = std::max(largest, of_row[3 * N * p]);
    for (int64_t p = 0; p < P; ++p) {
      const A* of_part = of_row + 3 * N * p;
      sum += of_part[1] * exponential(of_part[0] - largest);  // 0 for an empty part, whose largest is -infinity
      target_logit += of_part[2];
    }
    const A log_z = std::log(sum) + largest;
    losses[n] = log_z - target_logit;
    z.record(n, log_z);
    const int64_t target = part.has(targets[n]) ? targets[n] - part.first : -1;
    if (gradient == Gradient::yes)
      detail::softmax_gradient(row, largest, scale * z.gradient(log_z) / sum, target, part.size, V_padded, scale);
  }
}

}  // namespace CPU_ISA
}  // namespace llmc::cpu
