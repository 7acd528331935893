// step.h: the scalars of a step: losses, sums of squares, update control. Contracts: ops/ops.h.
#pragma once
#include "ops/cpu/simd.h"

namespace llmc::cpu {
inline namespace CPU_ISA {

// The sum of f(0) ... f(n - 1), in the order defined in ops/types.h.
template <class F>
double ordered_sum(int64_t n, F f) {
  std::array<double, sum_lanes> lanes = {};
  double* sums = lanes.data();
  for (int64_t begin = 0; begin < n; begin += sum_lanes) {
    const int64_t count = std::min(sum_lanes, n - begin);
#pragma omp simd
    for (int64_t lane = 0; lane < count; ++lane) sums[lane] += f(begin + lane);
  }
  for (int64_t pairs = sum_lanes / 2; pairs > 0; pairs /= 2)
    for (int64_t i = 0; i < pairs; ++i) sums[i] = sums[2 * i] + sums[2 * i + 1];
  return sums[0];
}

// partials: ceil(n / square_sum_block) doubles
template <class G>
void square_sum(double* out, double* partials, const G* x, int64_t n, Accumulate accumulate = Accumulate::no) {
  const int64_t blocks = ceil_div(n, square_sum_block);
#pragma omp parallel for schedule(static)
  for (int64_t b = 0; b < blocks; ++b) {
    const G* block = x + b * square_sum_block;
    partials[b] = ordered_sum(std::min(square_sum_block, n - b * square_sum_block), [=](int64_t i) {
      const double value = static_cast<double>(block[i]);
      return value * value;  // exact for fp32 and bf16: an fma changes nothing
    });
  }
  *out = (accumulate == Accumulate::yes ? *out : 0) + ordered_sum(blocks, [=](int64_t b) { return partials[b]; });
}

template <class A>
void add_losses(double* sum, const A* losses, int64_t N) {
  *sum += ordered_sum(N, [=](int64_t n) { return static_cast<double>(losses[n]); });
}

// gathered (ranks, L + N + units); the tensor-parallel ranks of a shard are neighbours.
inline void combine_scalars(double* losses, double* notices, double* square_sums, const double* gathered, int64_t ranks,
                            int64_t L, int64_t N, int64_t units, int64_t shards, int64_t tensor_ranks, int64_t stages) {
  const int64_t row = L + N + units, of_stage = ranks / stages * row;
  for (int64_t l = 0; l < L; ++l) {
    losses[l] = 0;
    for (int64_t r = 0; r < ranks; r += tensor_ranks) losses[l] += gathered[r * row + l];
  }
  for (int64_t n = 0; n < N; ++n) {
    notices[n] = 0;
    for (int64_t r = 0; r < ranks; ++r) notices[n] = std::max(notices[n], gathered[r * row + L + n]);
  }
  for (int64_t u = 0; u < units; ++u)
    for (int64_t t = 0; t < tensor_ranks; ++t)
      for (int64_t s = 0; s < shards; ++s) {
        double sum = 0;  // one stage has the value, the others have zeros
        for (int64_t p = 0; p < stages; ++p) sum += gathered[p * of_stage + (s * tensor_ranks + t) * row + L + N + u];
        *square_sums++ = sum;
      }
}

inline void clip_control(double* control, const double* square_sums, int64_t n, const double* loss,
                         const UpdateRule& rule) {
  double total = 0;
  for (int64_t i = 0; i < n; ++i) total += square_sums[i];
  const double norm = rule.scale * std::sqrt(total);
  control[0] = norm;
  control[1] = rule.scale * (rule.max_norm > 0 ? std::min(1.0, rule.max_norm / (norm + 1e-6)) : 1.0);
  const bool finite = std::isfinite(norm) && std::isfinite(*loss);
  if (!finite) control[3] = 1;
  control[2] = control[3] == 0 && *loss <= rule.largest_loss && norm <= rule.largest_norm ? 1 : 0;
}

}  // namespace CPU_ISA
}  // namespace llmc::cpu
