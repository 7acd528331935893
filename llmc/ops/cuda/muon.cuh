// muon.cuh: what Muon does to a matrix besides products. Contracts: ops/ops_muon.h.
#pragma once
#include "ops/cuda/elementwise.cuh"

namespace llmc::cuda {

// One thread per element: fp32 loads of neighbours are whole transactions.
template <int threads>
__global__ void muon_direction_kernel(float* __restrict__ gradient, float* __restrict__ momentum,
                                      const double* __restrict__ control, int64_t n, float beta) {
  if (control[2] == 0) return;
  const int64_t i = static_cast<int64_t>(blockIdx.x) * threads + threadIdx.x;
  if (i >= n) return;
  const float g = gradient[i] * static_cast<float>(control[1]);
  const float m = momentum[i] + (1.0f - beta) * (g - momentum[i]);
  momentum[i] = m;
  gradient[i] = g + beta * (m - g);
}

inline void muon_direction(float* gradient, float* momentum, const double* control, int64_t n, float beta,
                           cudaStream_t stream) {
  constexpr int threads = detail::elementwise_threads;
  launch(muon_direction_kernel<threads>, ceil_div(n, threads), threads, 0, stream, gradient, momentum, control, n,
         beta);
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

}  // namespace llmc::cuda
