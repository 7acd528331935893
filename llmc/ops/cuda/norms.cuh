// norms.cuh: layernorm (Ba, Kiros & Hinton 2016) and rmsnorm (Zhang & Sennrich 2019) of whole rows, which are each read
// once; statistics in fp32. The backward: a warp, or several for a long row, takes a row at a time and keeps it in
// registers, as well as its sums of dweight and dbias over all of its rows; the loads of the next row are in flight
// meanwhile. Rows that do not fit into registers, or whose packs are not aligned, go through shared memory. Contracts:
// ops/ops_layers.h.
#pragma once
#include "ops/cuda/column_sum.cuh"
#include "ops/cuda/rows.cuh"

namespace llmc::cuda {

// Without centring, mean and bias are unused.
template <Centred centred, class Held, class Input, class T>
__global__ void __launch_bounds__(Held::threads)
    norm_forward_kernel(T* __restrict__ out, float* __restrict__ mean, float* __restrict__ rstd, Input x,
                        const T* __restrict__ weight, const T* __restrict__ bias, float eps, int64_t N, int64_t C) {
  using Pack = typename Held::Pack;
  constexpr bool is_centred = centred == Centred::yes;
  Held row(C);
  const int64_t n = row.index();
  if (n >= N) return;
  row.fill(x, n);

  float sum = 0;
  if constexpr (is_centred)
    row.each([&](const auto& xs, int64_t) {
      for (int i = 0; i < Pack::size; ++i) sum += xs[i];
    });
  const float per_channel = 1.0f / static_cast<float>(C), m = is_centred ? row.sum(sum) * per_channel : 0;

  float squares = 0;  // centred first, to avoid cancellation
  row.each([&](const auto& xs, int64_t) {
    for (int i = 0; i < Pack::size; ++i) squares += (xs[i] - m) * (xs[i] - m);
  });
  squares = row.sum(squares);
  const float r = rsqrtf((is_centred ? squares * per_channel : squares / static_cast<float>(C)) + eps);

  row.each([&](const auto& xs, int64_t c) {
    const Kept<Pack> weights = Pack::load(weight + c), biases = is_centred ? Pack::load(bias + c) : Pack{};
    const auto ws = weights.fp32(), bs = is_centred ? biases.fp32() : Floats<Pack::size>{};
    Floats<Pack::size> outs;
    for (int i = 0; i < Pack::size; ++i) {
      const float normed = (xs[i] - m) * r * ws[i];
      outs[i] = is_centred ? normed + bs[i] : normed;
    }
    Pack::of(outs).store(out + n * C + c);  // kept in the cache: the next op reads it
  });
  if (row.leads()) {
    if constexpr (is_centred) mean[n] = m;
    rstd[n] = r;
  }
}

namespace detail {

// Column sums: of dweight and, for layernorm, of dbias.
constexpr int norm_sums(Centred centred) { return centred == Centred::yes ? 2 : 1; }

// Warps of a multiprocessor whose registers hold, per thread, that many packs of a row: sums, weight, this row, the
// next. They are in two or three blocks, each with as many warps on all four schedulers.
constexpr int64_t norm_warps(int64_t packs) { return packs == 1 ? 32 : packs == 2 ? 16 : packs == 3 ? 12 : 8; }
constexpr int64_t norm_block_warps(int64_t packs) { return packs == 3 ? 4 : norm_warps(packs) / 2; }
inline constexpr int most_norm_packs = 4;

// Who takes which rows: a function of the shape alone, so that sums do not depend on the GPU.
struct NormShares {
  int64_t packs;   // per thread
  int64_t warps;   // per row
  int64_t groups;  // rows that a block takes at a time
  int64_t parts;   // blocks
  bool in_registers;

  NormShares(int64_t N, int64_t C, int pack) {
    const int64_t in_row = ceil_div(C, pack);
    warps = ceil_div(in_row, most_norm_packs * warp_size);
    packs = ceil_div(in_row, warps * warp_size);
    const int64_t resident = norm_warps(packs), most_groups = std::max<int64_t>(norm_block_warps(packs) / warps, 1);
    in_registers = warps <= resident;
    const int64_t blocks = std::max<int64_t>(resident / (most_groups * warps), 1);
    parts = std::min(row_parts(N), 132 * blocks);  // all at once on the 132 multiprocessors of an H100
    groups = std::clamp<int64_t>(N / (2 * std::max<int64_t>(parts, 1)), 1, most_groups);
  }
};

// A row as a thread of the backward holds it.
template <class T, int packs>
struct NormRow {
  Kept<Packed<T>> xs[packs], gs[packs];
  float m, r;
};

}  // namespace detail

// The backward. Each block takes a contiguous part of the rows, `groups` of row_threads threads one row each at a time.
// partials (parts, C or 2 C): dweight, then dbias. Dynamic shared memory: the sums of every group.
template <class T, int packs, Centred centred>
__global__ void __launch_bounds__(detail::norm_warps(packs) * warp_size)
    norm_backward_kernel(T* __restrict__ dx, float* __restrict__ partials, const T* __restrict__ dout,
                         const T* __restrict__ x, const T* __restrict__ weight, const float* __restrict__ mean,
                         const float* __restrict__ rstd, int64_t N, int64_t C, Accumulate accumulate_dx,
                         int row_threads) {
  using Pack = Packed<T>;
  constexpr int kinds = detail::norm_sums(centred), most_partial = 2 * kinds * warp_size;
  SHARED(float, partial, most_partial);  // (2, kinds, warps of a block): those of successive rows alternate
  const int lane = threadIdx.x % row_threads, group = threadIdx.x / row_threads, groups = blockDim.x / row_threads;
  const int in_row = static_cast<int>(C / Pack::size), row_warps = row_threads / warp_size;
  // f(index of the pack, its first column) for each of this thread's packs
  const auto each = [&](auto f) {
#pragma unroll
    for (int j = 0; j < packs; ++j) {
      const int p = lane + j * row_threads;
      if (j < packs - 1 || p < in_row) f(j, p * Pack::size);
    }
  };
  const int64_t end = row_part_begin(N, blockIdx.x + 1, gridDim.x);
  const auto load = [&](detail::NormRow<T, packs>& row, int64_t n) {
    if (n >= end) return;
    each([&](int j, int c) { row.xs[j] = Pack::load_streaming(x + n * C + c); });
    each([&](int j, int c) { row.gs[j] = Pack::load_streaming(dout + n * C + c); });
    row.m = centred == Centred::yes ? mean[n] : 0;
    row.r = rstd[n];
  };

  const float per_channel = 1.0f / static_cast<float>(C);
  Kept<Pack> weights[packs];
  each([&](int j, int c) { weights[j] = Pack::load(weight + c); });
  Floats<Pack::size> dweights[packs] = {}, dbiases[packs] = {};
  detail::NormRow<T, packs> next = {};
  const int64_t begin = row_part_begin(N, blockIdx.x, gridDim.x);
  load(next, begin + group);
  int turn = 0;
  for (int64_t first = begin; first < end; first += groups) {  // the same number of times in every group
    const int64_t n = first + group;
    const detail::NormRow<T, packs> row = next;
    Kept<Pack> before[packs];
    if (accumulate_dx == Accumulate::yes && n < end)
      each([&](int j, int c) { before[j] = Pack::load(dx + n * C + c); });
    load(next, n + groups);

    float sums[2] = {0, 0};  // of g w normalised and of g w
    if (n < end)
      each([&](int j, int) {
        const auto xs = row.xs[j].fp32(), gs = row.gs[j].fp32(), ws = weights[j].fp32();
        for (int i = 0; i < Pack::size; ++i) {
          const float normalised = (xs[i] - row.m) * row.r;
          dweights[j][i] += gs[i] * normalised;
          sums[0] += gs[i] * ws[i] * normalised;
          if constexpr (centred == Centred::yes) {
            dbiases[j][i] += gs[i];
            sums[1] += gs[i] * ws[i];
          }
        }
      });
    for (int k = 0; k < kinds; ++k) sums[k] = warp_sum(sums[k]);
    if (row_warps > 1) {
      float* of_turn = partial + turn * kinds * warp_size;
      if (threadIdx.x % warp_size == 0)
        for (int k = 0; k < kinds; ++k) of_turn[k * warp_size + threadIdx.x / warp_size] = sums[k];
      __syncthreads();  // of_turn is complete; all have read the other one, which is written next
      for (int k = 0; k < kinds; ++k) {
        sums[k] = 0;
        for (int w = 0; w < row_warps; ++w) sums[k] += of_turn[k * warp_size + group * row_warps + w];
      }
      turn = 1 - turn;
    }

    const float slope = sums[0] * per_channel * row.r * row.r, shift = sums[1] * per_channel * row.r;
    if (n < end)
      each([&](int j, int c) {
        const auto xs = row.xs[j].fp32(), gs = row.gs[j].fp32(), ws = weights[j].fp32();
        Floats<Pack::size> dxs = before[j].fp32();
        for (int i = 0; i < Pack::size; ++i) dxs[i] += gs[i] * ws[i] * row.r - shift - (xs[i] - row.m) * slope;
        Pack::of(dxs).store(dx + n * C + c);
      });
  }

  DYN_SHARED(float, of_groups);  // (groups, kinds, C)
  each([&](int j, int c) {
    float* const to = of_groups + group * kinds * C + c;
    dweights[j].store(to);
    if constexpr (centred == Centred::yes) dbiases[j].store(to + C);
  });
  __syncthreads();  // the sums of all groups are written
  const int width = kinds * static_cast<int>(C);
  for (int c = threadIdx.x; c < width; c += blockDim.x) {
    float sum = 0;
    for (int g = 0; g < groups; ++g) sum += of_groups[g * width + c];
    partials[blockIdx.x * width + c] = sum;
  }
}

// For the other rows. A block takes a row at a time, each thread over its own columns. Dynamic shared memory: the
// block's sums, a row of x and one of dout. The sums are laid out as (pack, C / pack), to avoid bank conflicts.
template <class T, int pack, Centred centred>
__global__ void norm_backward_shared_kernel(T* __restrict__ dx, float* __restrict__ partials,
                                            const T* __restrict__ dout, const T* __restrict__ x,
                                            const T* __restrict__ weight, const float* __restrict__ mean,
                                            const float* __restrict__ rstd, int64_t N, int64_t C,
                                            Accumulate accumulate_dx) {
  using Pack = Packed<T, pack>;
  constexpr int kinds = detail::norm_sums(centred);
  const int64_t packs = C / pack, first = threadIdx.x, step = blockDim.x;
  DYN_SHARED(float, dweight);                   // (pack, packs)
  [[maybe_unused]] float* dbias = dweight + C;  // (pack, packs), if centred
  T* x_row = reinterpret_cast<T*>(dweight + kinds * C);
  T* g_row = x_row + C;
  for (int64_t p = first; p < packs; p += step)
    for (int i = 0; i < pack * kinds; ++i) dweight[i * packs + p] = 0;

  const int64_t end = row_part_begin(N, blockIdx.x + 1, gridDim.x);
  for (int64_t n = row_part_begin(N, blockIdx.x, gridDim.x); n < end; ++n) {
    const float m = centred == Centred::yes ? mean[n] : 0, r = rstd[n];
    float sums[kinds] = {};  // of g w normalised and of g w
    for (int64_t p = first; p < packs; p += step) {
      const int64_t c = p * pack;
      const Pack xs = Pack::load_streaming(x + n * C + c), gs = Pack::load_streaming(dout + n * C + c),
                 ws = Pack::load(weight + c);
      xs.store(x_row + c);
      gs.store(g_row + c);
      for (int i = 0; i < pack; ++i) {
        const float normalised = (xs[i] - m) * r;
        dweight[i * packs + p] += gs[i] * normalised;
        sums[0] += gs[i] * ws[i] * normalised;
        if constexpr (centred == Centred::yes) {
          dbias[i * packs + p] += gs[i];
          sums[1] += gs[i] * ws[i];
        }
      }
    }
    block_reduce(sums, Sum{});
    const float mean_gx = sums[0] / static_cast<float>(C), mean_g = sums[kinds - 1] / static_cast<float>(C);
    for (int64_t p = first; p < packs; p += step) {
      const int64_t c = p * pack;
      const Pack xs = Pack::load(x_row + c), gs = Pack::load(g_row + c), ws = Pack::load(weight + c);
      Pack dxs;
      if (accumulate_dx == Accumulate::yes) dxs = Pack::load(dx + n * C + c);
      for (int i = 0; i < pack; ++i) {
        const float centre = centred == Centred::yes ? mean_g : 0;
        const float d = (gs[i] * ws[i] - centre - (xs[i] - m) * r * mean_gx) * r;
        dxs.set(i, accumulate_dx == Accumulate::yes ? dxs[i] + d : d);
      }
      dxs.store(dx + n * C + c);
    }
  }

  for (int64_t p = first; p < packs; p += step)
    for (int k = 0; k < kinds; ++k)
      for (int i = 0; i < pack; ++i)
        partials[(blockIdx.x * kinds + k) * C + p * pack + i] = dweight[(k * pack + i) * packs + p];
}

namespace detail {

template <Centred centred, class T, class Input>
void norm_forward(T* out, float* mean, float* rstd, Input x, const T* weight, const T* bias, float eps, int64_t N,
                  int64_t C, cudaStream_t stream) {
  const char* op = centred == Centred::yes ? "layernorm_forward" : "rmsnorm_forward";
  const bool fit = rows_fit_packs(C, full_pack<T>, out, weight, bias) && x.fits_packs();
  with_held_row<T>(op, N, C, fit, [&]<class Held>(int64_t blocks, int64_t threads, int64_t shared) {
    launch(norm_forward_kernel<centred, Held, Input, T>, blocks, threads, shared, stream, out, mean, rstd, x, weight,
           bias, eps, N, C);
  });
}

// The shared memory for rows that are not held in registers: a block's sums, a row of x and one of dout.
template <Centred centred, class T>
int64_t norm_backward_shared_bytes(int64_t C) {
  const int64_t bytes = C * static_cast<int64_t>(norm_sums(centred) * sizeof(float) + 2 * sizeof(T));
  check_row_fits(centred == Centred::yes ? "layernorm_backward" : "rmsnorm_backward", C, bytes);
  return bytes;
}

// Without centring, dbias and mean are unused.
template <Centred centred, class T>
void norm_backward(T* dx, float* dweight, float* dbias, const RowParts<float>& partials, const T* dout, const T* x,
                   const T* weight, const float* mean, const float* rstd, int64_t N, int64_t C,
                   Accumulate accumulate_dx, cudaStream_t stream) {
  constexpr int kinds = norm_sums(centred);
  const bool fit = rows_fit_packs(C, full_pack<T>, dx, dout, x, weight);
  const NormShares shares(N, C, full_pack<T>);
  const bool in_registers = fit && shares.in_registers;
  const int64_t parts = in_registers ? shares.parts : row_parts(N);
  if (in_registers) {
    const int64_t row_threads = shares.warps * warp_size;
    with_constant<most_norm_packs>(shares.packs, [&]<int packs>() {
      launch(norm_backward_kernel<T, packs, centred>, parts, shares.groups * row_threads,
             shares.groups * kinds * C * static_cast<int64_t>(sizeof(float)), stream, dx, partials.data, dout, x,
             weight, mean, rstd, N, C, accumulate_dx, static_cast<int>(row_threads));
    });
  } else {
    const int64_t shared = norm_backward_shared_bytes<centred, T>(C);
    with_packs<full_pack<T>>(fit, [&]<int pack>() {
      launch(norm_backward_shared_kernel<T, pack, centred>, parts, row_threads(C, pack), shared, stream, dx,
             partials.data, dout, x, weight, mean, rstd, N, C, accumulate_dx);
    });
  }
  add_partials({dweight, dbias, partials.data, parts, C, kinds * C}, partials.waiting, stream);
}

}  // namespace detail

template <class T>
void layernorm_forward(T* out, float* mean, float* rstd, const T* x, const T* weight, const T* bias, float eps,
                       int64_t N, int64_t C, cudaStream_t stream) {
  detail::norm_forward<Centred::yes>(out, mean, rstd, PlainRows<T>{x}, weight, bias, eps, N, C, stream);
}
template <class T>
void rmsnorm_forward(T* out, float* rstd, const T* x, const T* weight, float eps, int64_t N, int64_t C,
                     cudaStream_t stream) {
  detail::norm_forward<Centred::no, T>(out, nullptr, rstd, PlainRows<T>{x}, weight, nullptr, eps, N, C, stream);
}

// sum (N, C) = a + b, and its norm; bitwise equal to residual_forward, then the norm (contract 11). Saves one pass over
// the sum. The arrays must not alias.
template <class T>
void residual_layernorm_forward(T* out, float* mean, float* rstd, T* sum, const T* a, const T* b, const T* weight,
                                const T* bias, float eps, int64_t N, int64_t C, cudaStream_t stream) {
  detail::norm_forward<Centred::yes>(out, mean, rstd, SummedRows<T>{sum, a, b}, weight, bias, eps, N, C, stream);
}
template <class T>
void residual_rmsnorm_forward(T* out, float* rstd, T* sum, const T* a, const T* b, const T* weight, float eps,
                              int64_t N, int64_t C, cudaStream_t stream) {
  detail::norm_forward<Centred::no, T>(out, nullptr, rstd, SummedRows<T>{sum, a, b}, weight, nullptr, eps, N, C,
                                       stream);
}

// Throws Error if the backward has no room on the current device for rows of C channels, in arrays that fit packs.
template <Centred centred, class T>
void check_norm_fits(int64_t C) {
  if (C % full_pack<T> != 0 || !detail::NormShares(1, C, full_pack<T>).in_registers)
    detail::norm_backward_shared_bytes<centred, T>(C);
}

// Sizes of `partials` in floats.
inline int64_t layernorm_backward_scratch(int64_t N, int64_t C) { return row_parts(N) * 2 * C; }
inline int64_t rmsnorm_backward_scratch(int64_t N, int64_t C) { return row_parts(N) * C; }

template <class T>
void layernorm_backward(T* dx, float* dweight, float* dbias, const RowParts<float>& partials, const T* dout, const T* x,
                        const T* weight, const float* mean, const float* rstd, int64_t N, int64_t C,
                        Accumulate accumulate_dx, cudaStream_t stream) {
  detail::norm_backward<Centred::yes>(dx, dweight, dbias, partials, dout, x, weight, mean, rstd, N, C, accumulate_dx,
                                      stream);
}
template <class T>
void rmsnorm_backward(T* dx, float* dweight, const RowParts<float>& partials, const T* dout, const T* x,
                      const T* weight, const float* rstd, int64_t N, int64_t C, Accumulate accumulate_dx,
                      cudaStream_t stream) {
  detail::norm_backward<Centred::no>(dx, dweight, nullptr, partials, dout, x, weight, nullptr, rstd, N, C,
                                     accumulate_dx, stream);
}

}  // namespace llmc::cuda
