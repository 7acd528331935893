// swiglu.cuh: SwiGLU (Shazeer 2020): silu(gate) up, silu(x) = x sigmoid(x). Contracts: ops/ops.h.
#pragma once
#include "ops/cuda/launch.cuh"
#include "ops/cuda/vec.cuh"

namespace llmc::cuda {

// Grid: (N, blocks of packs in F). rows: how many of the N rows are valid; nullptr: all.
template <class T, int pack>
__global__ void swiglu_forward_kernel(T* __restrict__ out, const T* __restrict__ gate_up, int64_t F,
                                      const int32_t* __restrict__ rows) {
  using Pack = Packed<T, pack>;
  const int64_t n = blockIdx.x, f = (static_cast<int64_t>(blockIdx.y) * blockDim.x + threadIdx.x) * pack;
  if (f >= F || (rows != nullptr && n >= *rows)) return;
  const T* gate = gate_up + n * 2 * F + f;
  const Pack gates = Pack::load(gate), ups = Pack::load(gate + F);
  Pack outs;
  for (int i = 0; i < pack; ++i) outs.set(i, gates[i] * sigmoid<T>(gates[i]) * ups[i]);
  outs.store(out + n * F + f);
}

template <class T, int pack>
__global__ void swiglu_backward_kernel(T* __restrict__ dgate_up, const T* __restrict__ dout,
                                       const T* __restrict__ gate_up, int64_t F, const int32_t* __restrict__ rows) {
  using Pack = Packed<T, pack>;
  const int64_t n = blockIdx.x, f = (static_cast<int64_t>(blockIdx.y) * blockDim.x + threadIdx.x) * pack;
  if (f >= F || (rows != nullptr && n >= *rows)) return;
  const int64_t gate = n * 2 * F + f;
  const Pack gates = Pack::load(gate_up + gate), ups = Pack::load(gate_up + gate + F),
             ds = Pack::load(dout + n * F + f);
  Pack dgates, dups;
  for (int i = 0; i < pack; ++i) {
    const float g = gates[i], s = sigmoid<T>(g);
    dgates.set(i, ds[i] * ups[i] * s * (1.0f + g * (1.0f - s)));
    dups.set(i, ds[i] * g * s);
  }
  dgates.store(dgate_up + gate);
  dups.store(dgate_up + gate + F);
}

namespace detail {

inline Grid swiglu_grid(int64_t N, int64_t F, int pack, int64_t threads) { return {N, ceil_div(F, pack * threads)}; }

}  // namespace detail

// out (N, F) = ; gate_up (N, 2 F): per row the gates, then the ups
template <class T>
void swiglu_forward(T* out, const T* gate_up, int64_t N, int64_t F, const int32_t* rows, cudaStream_t stream) {
  constexpr int64_t threads = 256;
  with_packs<full_pack<T>>(rows_fit_packs(F, full_pack<T>, out, gate_up), [&]<int pack>() {
    launch(swiglu_forward_kernel<T, pack>, detail::swiglu_grid(N, F, pack, threads), threads, 0, stream, out, gate_up,
           F, rows);
  });
}

// dgate_up (N, 2 F) = ; dout (N, F)
template <class T>
void swiglu_backward(T* dgate_up, const T* dout, const T* gate_up, int64_t N, int64_t F, const int32_t* rows,
                     cudaStream_t stream) {
  constexpr int64_t threads = 256;
  with_packs<full_pack<T>>(rows_fit_packs(F, full_pack<T>, dgate_up, dout, gate_up), [&]<int pack>() {
    launch(swiglu_backward_kernel<T, pack>, detail::swiglu_grid(N, F, pack, threads), threads, 0, stream, dgate_up,
           dout, gate_up, F, rows);
  });
}

}  // namespace llmc::cuda
