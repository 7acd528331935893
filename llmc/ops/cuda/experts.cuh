// experts.cuh: the order of rows by expert, moving rows into it, and the sum of what the experts of a row computed.
// Choices are sorted by expert with stable passes: no atomics whose order would affect the result, and the host never
// learns how many rows an expert gets. Contracts: ops/ops_experts.h.
#pragma once
#include "ops/cuda/rows.cuh"
#include "ops/cuda/sort.cuh"
#include "ops/types.h"

namespace llmc::cuda {

// ids (N k) = the segment and expert of each choice.
template <int = 0>
__global__ void segment_ids_kernel(int32_t* __restrict__ ids, const int32_t* __restrict__ choices, int64_t n, int64_t E,
                                   int64_t k, Segments segments) {
  const int64_t i = item_of_thread();
  if (i < n) ids[i] = static_cast<int32_t>(segments.of(i / k) * E + choices[i]);
}

// begins (V) = where each id begins among the sorted ids; ids that do not occur are not written.
template <int = 0>
__global__ void runs_kernel(int32_t* __restrict__ begins, const int32_t* __restrict__ ids, int64_t n) {
  const int64_t i = item_of_thread();
  if (i < n && (i == 0 || ids[i - 1] != ids[i])) begins[ids[i]] = static_cast<int32_t>(i);
}

// experts (N k) = the expert of each choice; E if beyond its segment's capacity. sorted: by segment and expert.
template <int = 0>
__global__ void keep_kernel(int32_t* __restrict__ experts, detail::RowIds sorted, const int32_t* __restrict__ begins,
                            const int32_t* __restrict__ starts, int64_t n, int64_t E, int64_t capacity) {
  const int64_t i = item_of_thread();
  if (i >= n) return;
  const int32_t id = sorted.ids[i];
  const int64_t before = i - begins[id] + (starts == nullptr ? 0 : starts[id]);
  experts[sorted.rows[i]] = static_cast<int32_t>(before < capacity ? id % E : E);
}

// places and offsets from the choices sorted by expert; those with expert E are dropped. There is one more thread than
// choices: it writes the offsets of the experts after the last choice.
template <int = 0>
__global__ void plan_kernel(int32_t* __restrict__ places, int32_t* __restrict__ offsets, detail::RowIds sorted,
                            int64_t n, int32_t E) {
  const int64_t i = item_of_thread();
  if (i > n) return;
  const int32_t expert = i < n ? sorted.ids[i] : E, before = i == 0 ? -1 : sorted.ids[i - 1];
  for (int32_t e = before + 1; e <= expert; ++e) offsets[e] = static_cast<int32_t>(i);
  if (i == n) return;
  places[sorted.rows[i]] = expert < E ? static_cast<int32_t>(i) : -1;
}

// Moves the places of each block of experts to the rows of that block. of_block: experts per block
template <int = 0>
__global__ void blocks_kernel(int32_t* __restrict__ places, const int32_t* __restrict__ choices,
                              const int32_t* __restrict__ offsets, int64_t n, int64_t of_block, int64_t stride) {
  const int64_t i = item_of_thread();
  if (i >= n || places[i] < 0) return;
  const int64_t block = choices[i] / of_block;
  places[i] += static_cast<int32_t>(block * stride - offsets[block * of_block]);
}

// Integers of dispatch_plan's scratch, for S segments.
inline int64_t dispatch_plan_scratch(int64_t N, int64_t E, int64_t k, int64_t S) {
  return sort_rows_scratch(N * k) + N * k + S * E;
}

// capacity: -1 for none
inline void dispatch_plan(int32_t* places, int32_t* offsets, int32_t* scratch, const int32_t* choices,
                          const int32_t* starts, int64_t N, int64_t E, int64_t k, int64_t capacity,
                          const Segments& segments, const ExpertRoom& rows, cudaStream_t stream) {
  const int64_t n = N * k, S = segments.count(N);
  int32_t *ids = scratch + sort_rows_scratch(n), *begins = ids + n;
  detail::RowIds sorted;
  if (capacity < 0) {
    sorted = sort_rows(scratch, choices, n, E, stream);
  } else {
    launch_each(segment_ids_kernel<>, n, stream, ids, choices, n, E, k, segments);
    sorted = sort_rows(scratch, ids, n, S * E, stream);
    launch_each(runs_kernel<>, n, stream, begins, sorted.ids, n);
    launch_each(keep_kernel<>, n, stream, ids, sorted, begins, starts, n, E, capacity);
    sorted = sort_rows(scratch, ids, n, E + 1, stream);
  }
  launch_each(plan_kernel<>, n + 1, stream, places, offsets, sorted, n, static_cast<int32_t>(E));
  if (rows.blocks > 1)
    launch_each(blocks_kernel<>, n, stream, places, choices, offsets, n, E / rows.blocks, rows.stride());
}

// Grid: (N, blocks of packs in C).
template <class T, int pack>
__global__ void dispatch_rows_kernel(T* __restrict__ out, const T* __restrict__ x, const int32_t* __restrict__ places,
                                     int64_t C, int64_t k) {
  const int64_t n = blockIdx.x, c = column_of_thread(pack);
  if (c >= C) return;
  const auto row = Packed<T, pack>::load(x + n * C + c);
  for (int64_t j = 0; j < k; ++j)
    if (const int64_t place = places[n * k + j]; place >= 0) row.store(out + place * C + c);
}

// Grid: (N, blocks of packs in C). weights: (N, k), or nullptr: all 1. places: (N, k), or nullptr: as on the CPU.
template <class T, int pack>
__global__ void combine_rows_kernel(T* __restrict__ out, const T* __restrict__ y, const float* __restrict__ weights,
                                    const int32_t* __restrict__ places, int64_t C, int64_t k, Accumulate accumulate) {
  using Pack = Packed<T, pack>;
  const int64_t n = blockIdx.x, c = column_of_thread(pack);
  if (c >= C) return;
  Floats<pack> sums = {};
  for (int64_t j = 0; j < k; ++j) {
    const int64_t place = places == nullptr ? n * k + j : places[n * k + j];
    if (place < 0) continue;
    const Pack row = Pack::load(y + place * C + c);
    const float w = weights == nullptr ? 1.0f : weights[n * k + j];
    for (int i = 0; i < pack; ++i) sums[i] += w * row[i];
  }
  if (accumulate == Accumulate::yes) sums += Pack::load(out + n * C + c);
  Pack::of(sums).store(out + n * C + c);
}

// A block per choice. dy may be y: each element is read before it is written, by the same thread.
template <class T, int pack>
__global__ void combine_backward_kernel(T* dy, float* __restrict__ dweights, const T* __restrict__ dout, const T* y,
                                        const float* __restrict__ weights, const int32_t* __restrict__ places,
                                        int64_t C, int64_t k) {
  using Pack = Packed<T, pack>;
  const int64_t i = blockIdx.x, place = places == nullptr ? i : places[i];
  float sum = 0;
  if (place >= 0) {
    const float w = weights[i];
    const T *gradient = dout + i / k * C, *row = y + place * C;
    for (int64_t c = static_cast<int64_t>(threadIdx.x) * pack; c < C; c += static_cast<int64_t>(blockDim.x) * pack) {
      const Pack gs = Pack::load(gradient + c), ys = Pack::load(row + c);
      Pack ds;
      for (int e = 0; e < pack; ++e) {
        sum += gs[e] * ys[e];
        ds.set(e, w * gs[e]);
      }
      ds.store(dy + place * C + c);
    }
  }
  sum = block_sum(sum);
  if (threadIdx.x == 0) dweights[i] = sum;
}

template <class T>
void dispatch_rows(T* out, const T* x, const int32_t* places, int64_t N, int64_t C, int64_t k, cudaStream_t stream) {
  with_packs<full_pack<T>>(rows_fit_packs(C, full_pack<T>, out, x), [&]<int pack>() {
    launch_rows(dispatch_rows_kernel<T, pack>, N, C, pack, 256, stream, out, x, places, C, k);
  });
}

template <class T>
void combine_rows(T* out, const T* y, const float* weights, const int32_t* places, int64_t N, int64_t C, int64_t k,
                  Accumulate accumulate, cudaStream_t stream) {
  with_packs<full_pack<T>>(rows_fit_packs(C, full_pack<T>, out, y), [&]<int pack>() {
    launch_rows(combine_rows_kernel<T, pack>, N, C, pack, 256, stream, out, y, weights, places, C, k, accumulate);
  });
}

template <class T>
void combine_backward(T* dy, float* dweights, const T* dout, const T* y, const float* weights, const int32_t* places,
                      int64_t N, int64_t C, int64_t k, cudaStream_t stream) {
  with_packs<full_pack<T>>(rows_fit_packs(C, full_pack<T>, dy, dout, y), [&]<int pack>() {
    launch(combine_backward_kernel<T, pack>, N * k, row_threads(C, pack, 256), 0, stream, dy, dweights, dout, y,
           weights, places, C, k);
  });
}

}  // namespace llmc::cuda
