// muon.cuh: what Muon does to a matrix besides products. Contracts: ops/ops_muon.h.
#pragma once
#include "ops/cuda/elementwise.cuh"
#include "ops/cuda/step.cuh"

namespace llmc::cuda {

// One thread per element: fp32 loads of neighbours are whole transactions.
template <int = 0>
__global__ void muon_direction_kernel(float* __restrict__ gradient, float* __restrict__ momentum,
                                      const double* __restrict__ control, int64_t n, float beta) {
  if (control[2] == 0) return;
  const int64_t i = item_of_thread();
  if (i >= n) return;
  const float g = gradient[i] * static_cast<float>(control[1]);
  const float m = momentum[i] + (1.0f - beta) * (g - momentum[i]);
  momentum[i] = m;
  gradient[i] = g + beta * (m - g);
}

inline void muon_direction(float* gradient, float* momentum, const double* control, int64_t n, float beta,
                           cudaStream_t stream) {
  launch_each(muon_direction_kernel<>, n, stream, gradient, momentum, control, n, beta);
}

namespace detail {

struct DividedByNorm {
  const double* square_sum;
  double margin, least;
  __device__ float operator()(float x) const { return x / static_cast<float>(fmax(margin * sqrt(*square_sum), least)); }
};
struct LinearCombination {
  float a, b;
  __device__ float operator()(float x, float y) const { return a * x + b * y; }
};

}  // namespace detail

template <class T>
void divide_by_norm(T* x, const double* square_sum, int64_t n, double margin, double least, cudaStream_t stream) {
  detail::map(x, detail::DividedByNorm{square_sum, margin, least}, n, stream, x);
}

template <class T>
void linear_combination(T* out, float a, const T* x, float b, const float* y, int64_t n, cudaStream_t stream) {
  detail::map(out, detail::LinearCombination{a, b}, n, stream, x, y);
}

// One block per row: its second moment, and its square sum before and after it is divided.
template <int threads, class T>
__global__ void row_moments_kernel(const T* __restrict__ x, float* __restrict__ second_moments,
                                   double* __restrict__ sums, const double* __restrict__ control, int64_t columns,
                                   float beta2) {
  const int64_t i = blockIdx.x, rows = gridDim.x;
  float square = 0;
  for (int64_t j = threadIdx.x; j < columns; j += threads) {
    const float value = to_float(x[i * columns + j]);
    square += value * value;
  }
  square = block_sum(square);
  if (threadIdx.x != 0) return;
  if (control[2] != 0)
    second_moments[i] = beta2 * second_moments[i] + (1.0f - beta2) * (square / static_cast<float>(columns));
  const double factor = row_factor(second_moments[i]);
  sums[i] = square;
  sums[rows + i] = square * factor * factor;
}

// One block of detail::sum_threads: sums[2 rows] = by what all divided rows are multiplied.
template <int threads>
__global__ void row_scale_kernel(double* __restrict__ sums, int64_t rows) {
  const double before = detail::ordered_sum<1>(sums, rows, detail::Identity{});
  __syncthreads();  // the partial sums are read
  const double after = detail::ordered_sum<1>(sums + rows, rows, detail::Identity{});
  if (threadIdx.x == 0) sums[2 * rows] = after > 0 ? sqrt(before / after) : 0;
}

// One block per row.
template <int threads, class T>
__global__ void divide_rows_kernel(T* __restrict__ x, const float* __restrict__ second_moments,
                                   const double* __restrict__ sums, int64_t columns) {
  const int64_t i = blockIdx.x, rows = gridDim.x;
  const float factor = static_cast<float>(sums[2 * rows] * row_factor(second_moments[i]));
  for (int64_t j = threadIdx.x; j < columns; j += threads)
    x[i * columns + j] = from_float<T>(to_float(x[i * columns + j]) * factor);
}

// sums: two doubles for each row, and one
template <class T>
void normalise_rows(T* x, float* second_moments, double* sums, const double* control, int64_t rows, int64_t columns,
                    double beta2, cudaStream_t stream) {
  constexpr int threads = 256;
  launch(row_moments_kernel<threads, T>, rows, threads, 0, stream, x, second_moments, sums, control, columns,
         static_cast<float>(beta2));
  launch(row_scale_kernel<detail::sum_threads>, 1, detail::sum_threads, 0, stream, sums, rows);
  launch(divide_rows_kernel<threads, T>, rows, threads, 0, stream, x, second_moments, sums, columns);
}

}  // namespace llmc::cuda
