// expert_ranks.h: the order of rows that arrive from several ranks, the tables of sequences that several ranks share,
// and expert biases. Contracts: ops/ops_expert_ranks.h.
#pragma once
#include "ops/cpu/simd.h"

namespace llmc::cpu {
inline namespace CPU_ISA {

inline void expert_counts(int32_t* counts, const int32_t* offsets, int64_t E) {
  for (int64_t e = 0; e < E; ++e) counts[e] = offsets[e + 1] - offsets[e];
}

// scratch: (P) integers. stride: 0 for rows without gaps.
inline void arrival_plan(int32_t* places, int32_t* offsets, int32_t* scratch, const int32_t* counts, int64_t P,
                         int64_t E, int64_t rows, int64_t stride) {
  int32_t begin = 0, place = 0;
  for (int64_t p = 0; p < P; ++p) {
    scratch[p] = stride == 0 ? begin : static_cast<int32_t>(p * stride);
    for (int64_t e = 0; e < E; ++e) begin += counts[p * E + e];
  }
  std::fill(places, places + rows, -1);
  for (int64_t e = 0; e < E; ++e) {
    offsets[e] = place;
    for (int64_t p = 0; p < P; ++p)
      for (int32_t i = 0; i < counts[p * E + e]; ++i) places[scratch[p]++] = place++;
  }
  offsets[E] = place;
}

template <class A>
void join_segments(int32_t* counts, A* probabilities, A* sums, const int32_t* all_counts, const A* all_probabilities,
                   const A* all_sums, const int32_t* order, const int32_t* begins, int64_t B, int64_t E) {
  std::fill(counts, counts + B * E, 0);
  std::fill(probabilities, probabilities + B * E, A(0));
  std::fill(sums, sums + B * 2, A(0));
  for (int64_t b = 0; b < B; ++b)
    for (int32_t i = begins[b]; i < begins[b + 1]; ++i) {
      for (int64_t e = 0; e < E; ++e) {
        counts[b * E + e] += all_counts[order[i] * E + e];
        probabilities[b * E + e] += all_probabilities[order[i] * E + e];
      }
      for (int64_t j = 0; j < 2; ++j) sums[b * 2 + j] += all_sums[order[i] * 2 + j];
    }
}

inline void segment_starts(int32_t* counts, int32_t* starts, const int32_t* all_counts, const int32_t* sequences,
                           const int32_t* order, const int32_t* begins, int64_t rank, int64_t S, int64_t E) {
  std::fill(counts, counts + S * E, 0);
  std::fill(starts, starts + S * E, 0);
  for (int64_t s = 0; s < S; ++s) {
    const int64_t id = rank * S + s, b = sequences[id];
    if (b < 0) continue;
    bool before = true;
    for (int32_t i = begins[b]; i < begins[b + 1]; ++i) {
      before = before && order[i] != id;
      for (int64_t e = 0; e < E; ++e) {
        const int32_t count = all_counts[order[i] * E + e];
        counts[s * E + e] += count;
        if (before) starts[s * E + e] += count;
      }
    }
  }
}

inline void add_expert_counts(double* totals, const int32_t* counts, int64_t B, int64_t E) {
  for (int64_t b = 0; b < B; ++b)
    for (int64_t e = 0; e < E; ++e) totals[e] += static_cast<double>(counts[b * E + e]);
}

inline void update_expert_biases(float* biases, const double* counts, const double* control, int64_t E, float rate) {
  if (control[2] == 0) return;
  double total = 0;  // exact, as counts are whole numbers
  for (int64_t e = 0; e < E; ++e) total += counts[e];
  for (int64_t e = 0; e < E; ++e) {
    const double share = counts[e] * static_cast<double>(E);
    if (share < total) biases[e] += rate;
    if (share > total) biases[e] -= rate;
  }
}

}  // namespace CPU_ISA
}  // namespace llmc::cpu
