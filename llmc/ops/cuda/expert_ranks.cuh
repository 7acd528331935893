// expert_ranks.cuh: the order of rows that arrive from several ranks, the tables of sequences that several ranks share,
// and expert biases. The host never learns how many rows arrive. Contracts: ops/ops_expert_ranks.h.
#pragma once
#include "ops/cuda/rows.cuh"
#include "ops/cuda/sort.cuh"
#include "ops/types.h"

namespace llmc::cuda {

template <int = 0>
__global__ void expert_counts_kernel(int32_t* __restrict__ counts, const int32_t* __restrict__ offsets, int64_t E) {
  const int64_t e = item_of_thread();
  if (e < E) counts[e] = offsets[e + 1] - offsets[e];
}

// A run: the rows from one rank for one expert. by_rank (P, E), by_expert (E, P) = the number of rows of each run.
template <int = 0>
__global__ void order_runs_kernel(int32_t* __restrict__ by_rank, int32_t* __restrict__ by_expert,
                                  const int32_t* __restrict__ counts, int64_t P, int64_t E) {
  const int64_t i = item_of_thread();
  if (i >= P * E) return;
  by_rank[i] = counts[i];
  by_expert[i % E * P + i / E] = counts[i];
}

// Now by_rank and by_expert are the number of rows before each run. One thread per row of the arrivals, and per offset:
// it finds the last run that begins at its row or before. stride: 0 for rows without gaps.
template <int = 0>
__global__ void arrival_plan_kernel(int32_t* __restrict__ places, int32_t* __restrict__ offsets,
                                    const int32_t* __restrict__ by_rank, const int32_t* __restrict__ by_expert,
                                    const int32_t* __restrict__ counts, int64_t P, int64_t E, int64_t rows,
                                    int64_t stride) {
  const int64_t row = item_of_thread(), runs = P * E;
  if (row <= E) offsets[row] = row < E ? by_expert[row * P] : by_expert[runs - 1] + counts[runs - 1];
  if (row >= rows) return;
  int64_t first = 0, last = runs - 1, arrival = row;  // `arrival`: the row, if there were no gaps
  if (stride > 0) {
    first = row / stride * E;
    last = first + E - 1;
    arrival = row % stride + by_rank[first];
  }
  while (first < last) {
    const int64_t middle = (first + last + 1) / 2;
    if (by_rank[middle] <= arrival) first = middle;
    else last = middle - 1;
  }
  const int64_t in_run = arrival - by_rank[first];
  places[row] = in_run < counts[first] ? static_cast<int32_t>(by_expert[first % E * P + first / E] + in_run) : -1;
}

// Grid: (B, blocks of E + 2).
template <int = 0>
__global__ void join_segments_kernel(int32_t* __restrict__ counts, float* __restrict__ probabilities,
                                     float* __restrict__ sums, const int32_t* __restrict__ all_counts,
                                     const float* __restrict__ all_probabilities, const float* __restrict__ all_sums,
                                     const int32_t* __restrict__ order, const int32_t* __restrict__ begins, int64_t E) {
  const int64_t e = column_of_thread(1), b = blockIdx.x;
  if (e >= E + 2) return;
  const int64_t width = e < E ? E : 2, column = e < E ? e : e - E;
  const float* from = (e < E ? all_probabilities : all_sums) + column;
  int32_t count = 0;
  float sum = 0;
  for (int32_t i = begins[b]; i < begins[b + 1]; ++i) {
    sum += from[order[i] * width];
    if (e < E) count += all_counts[order[i] * E + e];
  }
  (e < E ? probabilities : sums)[b * width + column] = sum;
  if (e < E) counts[b * E + e] = count;
}

// Grid: (S, blocks of E).
template <int = 0>
__global__ void segment_starts_kernel(int32_t* __restrict__ counts, int32_t* __restrict__ starts,
                                      const int32_t* __restrict__ all_counts, const int32_t* __restrict__ sequences,
                                      const int32_t* __restrict__ order, const int32_t* __restrict__ begins,
                                      int64_t rank, int64_t S, int64_t E) {
  const int64_t e = column_of_thread(1), s = blockIdx.x, id = rank * S + s;
  if (e >= E) return;
  const int64_t b = sequences[id];
  int32_t count = 0, start = 0;
  if (b >= 0)
    for (int32_t i = begins[b]; i < begins[b + 1]; ++i) {
      if (order[i] == id) start = count;
      count += all_counts[order[i] * E + e];
    }
  counts[s * E + e] = count;
  starts[s * E + e] = start;
}

template <int = 0>
__global__ void add_expert_counts_kernel(double* __restrict__ totals, const int32_t* __restrict__ counts, int64_t B,
                                         int64_t E) {
  const int64_t e = item_of_thread();
  if (e >= E) return;
  double total = totals[e];
  for (int64_t b = 0; b < B; ++b) total += static_cast<double>(counts[b * E + e]);
  totals[e] = total;
}

// A thread per expert; each adds up all counts, which are whole numbers: exact in any order.
template <int = 0>
__global__ void update_expert_biases_kernel(float* __restrict__ biases, const double* __restrict__ counts,
                                            const double* __restrict__ control, int64_t E, float rate) {
  const int64_t e = item_of_thread();
  if (e >= E || control[2] == 0) return;
  double total = 0;
  for (int64_t other = 0; other < E; ++other) total += counts[other];
  const double share = counts[e] * static_cast<double>(E);
  if (share < total) biases[e] += rate;
  if (share > total) biases[e] -= rate;
}

namespace detail {

// Smaller blocks than launch_each()'s: a few hundred experts are then on several multiprocessors.
inline constexpr int experts_of_block = 128;

// A thread for each of n items.
template <class... Parameters, class... Arguments>
void launch_experts(void (*kernel)(Parameters...), int64_t n, cudaStream_t stream, const Arguments&... arguments) {
  launch(kernel, ceil_div(n, experts_of_block), experts_of_block, 0, stream, arguments...);
}

}  // namespace detail

inline void expert_counts(int32_t* counts, const int32_t* offsets, int64_t E, cudaStream_t stream) {
  detail::launch_experts(expert_counts_kernel<>, E, stream, counts, offsets, E);
}

// Integers of arrival_plan's scratch.
inline int64_t arrival_plan_scratch(int64_t P, int64_t E) { return 2 * P * E; }

inline void arrival_plan(int32_t* places, int32_t* offsets, int32_t* scratch, const int32_t* counts, int64_t P,
                         int64_t E, int64_t rows, int64_t stride, cudaStream_t stream) {
  const int64_t runs = P * E;
  int32_t *by_rank = scratch, *by_expert = scratch + runs;
  detail::launch_experts(order_runs_kernel<>, runs, stream, by_rank, by_expert, counts, P, E);
  for (int32_t* table : {by_rank, by_expert}) sums_before(table, runs, stream);
  detail::launch_experts(arrival_plan_kernel<>, std::max(rows, E + 1), stream, places, offsets, by_rank, by_expert,
                         counts, P, E, rows, stride);
}

inline void join_segments(int32_t* counts, float* probabilities, float* sums, const int32_t* all_counts,
                          const float* all_probabilities, const float* all_sums, const int32_t* order,
                          const int32_t* begins, int64_t B, int64_t E, cudaStream_t stream) {
  launch_rows(join_segments_kernel<>, B, E + 2, 1, detail::experts_of_block, stream, counts, probabilities, sums,
              all_counts, all_probabilities, all_sums, order, begins, E);
}

inline void segment_starts(int32_t* counts, int32_t* starts, const int32_t* all_counts, const int32_t* sequences,
                           const int32_t* order, const int32_t* begins, int64_t rank, int64_t S, int64_t E,
                           cudaStream_t stream) {
  launch_rows(segment_starts_kernel<>, S, E, 1, detail::experts_of_block, stream, counts, starts, all_counts, sequences,
              order, begins, rank, S, E);
}

inline void add_expert_counts(double* totals, const int32_t* counts, int64_t B, int64_t E, cudaStream_t stream) {
  detail::launch_experts(add_expert_counts_kernel<>, E, stream, totals, counts, B, E);
}

inline void update_expert_biases(float* biases, const double* counts, const double* control, int64_t E, float rate,
                                 cudaStream_t stream) {
  detail::launch_experts(update_expert_biases_kernel<>, E, stream, biases, counts, control, E, rate);
}

}  // namespace llmc::cuda
