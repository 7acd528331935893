// column_sum.cuh: sums over rows, for the gradients of biases and of norm weights, in two steps, both in a fixed order:
// each block sums one part of the rows, then the parts are summed, those of one op or of several. Contracts: ops/ops.h.
#pragma once
#include "ops/cuda/launch.cuh"
#include "ops/cuda/vec.cuh"
#include "ops/types.h"

namespace llmc::cuda {

// Number of parts of the rows: a function of N alone, so that sums do not depend on the GPU.
inline int64_t row_parts(int64_t N) { return std::min<int64_t>(ceil_div(N, 8), 512); }
__device__ inline int64_t row_part_begin(int64_t N, int64_t part, int64_t parts) { return N * part / parts; }

// The sums that one launch adds up, passed as a kernel argument.
struct RowSums {
  static constexpr int most = 16;
  RowSum sums[most];
};

// Grid: (blocks for the widest, sums). A block of (warp_size, rows) threads takes warp_size columns.
template <int rows>
__global__ void __launch_bounds__(rows* warp_size) add_partials_kernel(const RowSums list) {
  constexpr int size = rows * warp_size, in_flight = 16;
  SHARED(float, sums, size);  // (rows, warp_size)
  const RowSum& of = list.sums[blockIdx.y];
  const int64_t column = static_cast<int64_t>(blockIdx.x) * warp_size + threadIdx.x;
  float sum = 0;
  if (column < of.width)
    for (int64_t part = threadIdx.y; part < of.parts; part += in_flight * rows) {
      const float* from = of.partials + part * of.width + column;
      const int left = static_cast<int>(of.parts - part);
      float values[in_flight];
#pragma unroll
      for (int i = 0; i < in_flight; ++i, from += rows * of.width) values[i] = i * rows < left ? *from : 0;
#pragma unroll
      for (int i = 0; i < in_flight; ++i) sum += values[i];
    }
  sums[threadIdx.y * warp_size + threadIdx.x] = sum;
  __syncthreads();  // all rows of sums are written
  if (threadIdx.y != 0 || column >= of.width) return;
  float total = 0;
#pragma unroll
  for (int row = 0; row < rows; ++row) total += sums[row * warp_size + threadIdx.x];
  if (column < of.C) of.first[column] += total;
  else of.second[column - of.C] += total;
}

inline void add_partials(std::span<const RowSum> sums, cudaStream_t stream) {
  constexpr int rows = 16;
  while (!sums.empty()) {
    const auto now = sums.first(std::min<size_t>(sums.size(), RowSums::most));
    RowSums list = {};
    std::ranges::copy(now, list.sums);
    const int64_t widest = std::ranges::max(now, {}, &RowSum::width).width;
    launch(add_partials_kernel<rows>, Grid(ceil_div(widest, warp_size), now.size()), dim3(warp_size, rows), 0, stream,
           list);
    sums = sums.subspan(now.size());
  }
}
// Adds it up now, or with those that wait.
inline void add_partials(const RowSum& sum, std::vector<RowSum>* waiting, cudaStream_t stream) {
  if (waiting != nullptr) waiting->push_back(sum);
  else add_partials({&sum, 1}, stream);
}

// What column_sum sums: x (N, C).
template <class T>
struct ColumnsOf {
  using Element = T;
  static constexpr int in_flight = 8;
  const T* x;
  template <int pack>
  using Loaded = Kept<Packed<T, pack>>;
  template <int pack>
  __device__ Loaded<pack> load(int64_t at) const {
    return Packed<T, pack>::load(x + at);
  }
  template <int pack>
  __device__ Floats<pack> values(const Loaded<pack>& loaded, int64_t, bool) const {
    return loaded.fp32();
  }
};

// partials (parts, C) = the sums of the rows of each part. Blocks of (warp_size, rows) threads; each lane sums one pack
// of columns over part blockIdx.y, with the loads of several rows in flight.
template <class Source, int pack, int rows>
__global__ void __launch_bounds__(rows* warp_size, 4)
    column_sum_kernel(float* __restrict__ partials, Source x, int64_t N, int64_t C) {
  constexpr int size = rows * pack * warp_size, in_flight = Source::in_flight;
  SHARED(float, sums, size);  // (rows, pack, warp_size)
  const int64_t part = blockIdx.y, end = row_part_begin(N, part + 1, gridDim.y);
  const int64_t column = (static_cast<int64_t>(blockIdx.x) * warp_size + threadIdx.x) * pack;
  Floats<pack> sum = {};
  if (column < C)
    for (int64_t n = row_part_begin(N, part, gridDim.y) + threadIdx.y; n < end; n += in_flight * rows) {
      int64_t at = n * C + column, used = at;
      const int left = static_cast<int>(end - n);
      typename Source::template Loaded<pack> loaded[in_flight];
#pragma unroll
      for (int j = 0; j < in_flight; ++j, at += rows * C)
        if (j * rows < left) loaded[j] = x.template load<pack>(at);
#pragma unroll
      for (int j = 0; j < in_flight; ++j, used += rows * C)
        sum += x.template values<pack>(loaded[j], used, j * rows < left);  // zeros after the last row
    }
  for (int i = 0; i < pack; ++i) sums[(threadIdx.y * pack + i) * warp_size + threadIdx.x] = sum[i];
  __syncthreads();  // all rows of sums are written
  if (threadIdx.y != 0 || column >= C) return;
  for (int row = 1; row < rows; ++row)
    for (int i = 0; i < pack; ++i) sum[i] += sums[(row * pack + i) * warp_size + threadIdx.x];
  for (int i = 0; i < pack; ++i) partials[part * C + column + i] = sum[i];
}

// Parts of the rows: four blocks for each of the 132 multiprocessors of an H100, all at once.
inline int64_t column_sum_parts(int64_t N, int64_t C) {
  return std::min(std::max<int64_t>(4 * 132 / ceil_div(C, full_pack<bf16> * warp_size), 1), row_parts(N));
}

// Size of column_sum's `partials` in floats.
inline int64_t column_sum_scratch(int64_t N, int64_t C) { return column_sum_parts(N, C) * C; }

// fit: rows are whole packs
template <class Source>
void column_sum_of(float* out, const RowParts<float>& partials, const Source& x, bool fit, int64_t N, int64_t C,
                   cudaStream_t stream) {
  constexpr int rows = 8;
  const int64_t parts = column_sum_parts(N, C);
  with_packs<full_pack<typename Source::Element>>(fit, [&]<int pack>() {
    const Grid grid(ceil_div(C, pack * warp_size), parts);
    launch(column_sum_kernel<Source, pack, rows>, grid, dim3(warp_size, rows), 0, stream, partials.data, x, N, C);
  });
  add_partials({out, nullptr, partials.data, parts, C, C}, partials.waiting, stream);
}

// out (C) += the column sums of x (N, C); partials: scratch
template <class T>
void column_sum(float* out, const RowParts<float>& partials, const T* x, int64_t N, int64_t C, cudaStream_t stream) {
  column_sum_of(out, partials, ColumnsOf<T>{x}, rows_fit_packs(C, full_pack<T>, x), N, C, stream);
}

}  // namespace llmc::cuda
