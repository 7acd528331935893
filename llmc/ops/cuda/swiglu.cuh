// swiglu.cuh: SwiGLU (Shazeer 2020): silu(gate) up, silu(x) = x sigmoid(x). Contracts: ops/ops.h.
#pragma once
#include "ops/cuda/quantise.cuh"
#include "ops/cuda/rows.cuh"

namespace llmc::cuda {

// silu(gate) up, for a pack.
template <class T, int pack>
__device__ Packed<T, pack> swiglu(const Packed<T, pack>& gates, const Packed<T, pack>& ups) {
  Packed<T, pack> outs;
  for (int i = 0; i < pack; ++i) outs.set(i, gates[i] * sigmoid<T>(gates[i]) * ups[i]);
  return outs;
}

// Grid: (N, blocks of packs in F). rows: how many of the N rows are valid; nullptr: all.
template <class T, int pack>
__global__ void swiglu_forward_kernel(T* __restrict__ out, const T* __restrict__ gate_up, int64_t F,
                                      const int32_t* __restrict__ rows) {
  using Pack = Packed<T, pack>;
  const int64_t n = blockIdx.x, f = column_of_thread(pack);
  if (f >= F || (rows != nullptr && n >= *rows)) return;
  const T* gate = gate_up + n * 2 * F + f;
  swiglu(Pack::load(gate), Pack::load(gate + F)).store(out + n * F + f);
}

// The gradients of a pack of gates and of ups, from those of their outputs.
template <class T, int pack>
__device__ void swiglu_gradients(Packed<T, pack>& dgates, Packed<T, pack>& dups, const Packed<T, pack>& ds,
                                 const Packed<T, pack>& gates, const Packed<T, pack>& ups) {
  for (int i = 0; i < pack; ++i) {
    const float g = gates[i], s = sigmoid<T>(g);
    dgates.set(i, ds[i] * ups[i] * s * (1.0f + g * (1.0f - s)));
    dups.set(i, ds[i] * g * s);
  }
}

template <class T, int pack>
__global__ void swiglu_backward_kernel(T* __restrict__ dgate_up, const T* __restrict__ dout,
                                       const T* __restrict__ gate_up, int64_t F, const int32_t* __restrict__ rows) {
  using Pack = Packed<T, pack>;
  const int64_t n = blockIdx.x, f = column_of_thread(pack);
  if (f >= F || (rows != nullptr && n >= *rows)) return;
  const int64_t gate = n * 2 * F + f;
  const Pack gates = Pack::load(gate_up + gate), ups = Pack::load(gate_up + gate + F),
             ds = Pack::load(dout + n * F + f);
  Pack dgates, dups;
  swiglu_gradients(dgates, dups, ds, gates, ups);
  dgates.store(dgate_up + gate);
  dups.store(dgate_up + gate + F);
}

// Both in fp8, as products read them that sum along their rows and along their columns: a block rounds a tile of
// outputs, or one of gates and one of ups, from T. F is a multiple of their size.

// rows (N, F), columns (F, N)
template <class T>
__global__ void __launch_bounds__(256, 4)
    swiglu_forward_fp8_kernel(Fp8Operand rows, Fp8Operand columns, const T* __restrict__ gate_up, int64_t N,
                              int64_t F) {
  using Tile = Fp8Tile<T>;
  using Pack = Packed<T>;
  const TileOfBlock at(F);
  const int64_t f = at.column, n = at.row;
  DYN_SHARED(T, memory);
  const Tile tile{memory};
  Tile::for_packs([&](int r, int p) {
    Pack outs = {};
    if (n + r < N) {
      const T* const gate = gate_up + (n + r) * 2 * F + f + p * Tile::pack;  // the backward reads it again
      outs = swiglu(Pack::load(gate), Pack::load(gate + F));
    }
    outs.store(tile.at(r, p));
  });
  __syncthreads();  // the tile is whole
  tile.quantise_rows(rows, n, f, N, F);
  tile.quantise_columns(columns, n, f, N, F);
}

// rows (N, 2 F), columns (2 F, N)
template <class T>
__global__ void __launch_bounds__(256, 3)
    swiglu_backward_fp8_kernel(Fp8Operand rows, Fp8Operand columns, const T* __restrict__ dout,
                               const T* __restrict__ gate_up, int64_t N, int64_t F) {
  using Tile = Fp8Tile<T>;
  using Pack = Packed<T>;
  const TileOfBlock at(F);
  const int64_t f = at.column, n = at.row;
  DYN_SHARED(T, memory);
  const Tile gate_tile{memory}, up_tile{memory + Tile::size * Tile::size};
  Tile::for_packs([&](int r, int p) {
    Pack dgates = {}, dups = {};
    if (n + r < N) {
      const int64_t out = (n + r) * F + f + p * Tile::pack, gate = (n + r) * F + out;
      swiglu_gradients(dgates, dups, Pack::load_streaming(dout + out), Pack::load_streaming(gate_up + gate),
                       Pack::load_streaming(gate_up + gate + F));
    }
    dgates.store(gate_tile.at(r, p));
    dups.store(up_tile.at(r, p));
  });
  __syncthreads();  // the tiles are whole
  gate_tile.quantise_rows(rows, n, f, N, 2 * F);
  up_tile.quantise_rows(rows, n, F + f, N, 2 * F);
  gate_tile.quantise_columns(columns, n, f, N, 2 * F);
  up_tile.quantise_columns(columns, n, F + f, N, 2 * F);
}

template <class T>
void swiglu_forward(T* out, const T* gate_up, int64_t N, int64_t F, const int32_t* rows, cudaStream_t stream) {
  with_packs<full_pack<T>>(rows_fit_packs(F, full_pack<T>, out, gate_up), [&]<int pack>() {
    launch_rows(swiglu_forward_kernel<T, pack>, N, F, pack, 256, stream, out, gate_up, F, rows);
  });
}

template <class T>
void swiglu_backward(T* dgate_up, const T* dout, const T* gate_up, int64_t N, int64_t F, const int32_t* rows,
                     cudaStream_t stream) {
  with_packs<full_pack<T>>(rows_fit_packs(F, full_pack<T>, dgate_up, dout, gate_up), [&]<int pack>() {
    launch_rows(swiglu_backward_kernel<T, pack>, N, F, pack, 256, stream, dgate_up, dout, gate_up, F, rows);
  });
}

template <class T>
void swiglu_forward_fp8(Fp8Operand rows, Fp8Operand columns, const T* gate_up, int64_t N, int64_t F,
                        cudaStream_t stream) {
  launch(swiglu_forward_fp8_kernel<T>, TileOfBlock::grid(N, F), 256, Fp8Tile<T>::bytes, stream, rows, columns, gate_up,
         N, F);
}

template <class T>
void swiglu_backward_fp8(Fp8Operand rows, Fp8Operand columns, const T* dout, const T* gate_up, int64_t N, int64_t F,
                         cudaStream_t stream) {
  launch(swiglu_backward_fp8_kernel<T>, TileOfBlock::grid(N, F), 256, 2 * Fp8Tile<T>::bytes, stream, rows, columns,
         dout, gate_up, N, F);
}

}  // namespace llmc::cuda
