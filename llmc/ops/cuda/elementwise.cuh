// elementwise.cuh: elementwise ops: GELU, residual addition, sums of parts, conversion, copies of boxes, filling,
// scaling, initial weights. Contracts: ops/ops.h.
#pragma once
#include "core/rng.h"
#include "ops/cuda/column_sum.cuh"
#include "ops/cuda/reduce.cuh"

namespace llmc::cuda {

// out[i] = f(in[i]...), computed in fp32. One thread per pack; the last, partial pack is processed element by element.
// An input may be the output.
template <int pack, class Out, class F, class... In>
__global__ void map_kernel(Out* out, int64_t n, F f, const In*... in) {
  const int64_t begin = item_of_thread() * pack;
  const auto apply = [&]<int size>(int64_t at, auto... packs) {
    Packed<Out, size> outs;
    for (int i = 0; i < size; ++i) outs.set(i, f(packs[i]...));
    outs.store(out + at);
  };
  if (begin + pack <= n) apply.template operator()<pack>(begin, Packed<In, pack>::load(in + begin)...);
  else
    for (int64_t i = begin; i < n; ++i) apply.template operator()<1>(i, Packed<In, 1>::load(in + i)...);
}

namespace detail {

template <class Out, class F, class... In>
void map(Out* out, F f, int64_t n, cudaStream_t stream, const In*... in) {
  with_packs<full_pack<Out, In...>>(fit_packs(out, in...), [&]<int pack>() {
    launch_each(map_kernel<pack, Out, F, In...>, ceil_div(n, pack), stream, out, n, f, in...);
  });
}

// GELU, tanh form: x sigmoid(2 u), u = sqrt(2/pi) (x + 0.044715 x^3). Hendrycks & Gimpel 2016; GPT-2's "gelu_new".
inline constexpr float gelu_root = 0.7978845608028654f, gelu_cubic = 0.044715f;
template <class T>
__device__ float gelu_gate(float x) {
  return sigmoid<T>(2.0f * gelu_root * (x + gelu_cubic * x * x * x));
}
template <class T>
struct GeluForward {
  __device__ float operator()(float x) const { return x * gelu_gate<T>(x); }
};
template <class T>
struct GeluBackward {
  __device__ float operator()(float dout, float x) const {
    const float s = gelu_gate<T>(x);
    return dout * (s + x * s * (1.0f - s) * 2.0f * gelu_root * (1.0f + 3.0f * gelu_cubic * x * x));
  }
};
// Computes dx for column_sum_of(), which sums it.
template <class T>
struct ColumnsOfGeluBackward {
  using Element = T;
  static constexpr int in_flight = 4;
  T* dx;
  const T *dout, *x;
  template <int pack>
  struct Loaded {
    Kept<Packed<T, pack>> dout, x;
  };
  template <int pack>
  __device__ Loaded<pack> load(int64_t at) const {
    return {Packed<T, pack>::load(dout + at), Packed<T, pack>::load(x + at)};
  }
  template <int pack>
  __device__ Floats<pack> values(const Loaded<pack>& loaded, int64_t at, bool valid) const {
    const Floats<pack> douts = loaded.dout.fp32(), xs = loaded.x.fp32();
    Floats<pack> dxs;
    for (int i = 0; i < pack; ++i) dxs[i] = GeluBackward<T>{}(douts[i], xs[i]);
    const auto rounded = Packed<T, pack>::of(dxs);
    if (valid) rounded.store(dx + at);
    for (int i = 0; i < pack; ++i) dxs[i] = rounded[i];
    return dxs;
  }
};

struct Same {
  __device__ float operator()(float x) const { return x; }
};
struct Scaled {
  float factor;
  __device__ float operator()(float x) const { return x * factor; }
};
struct Constant {
  float value;
  __device__ float operator()() const { return value; }
};

}  // namespace detail

inline void zero(std::byte* out, int64_t bytes, cudaStream_t stream) {
  CUDA_CHECK(cudaMemsetAsync(out, 0, static_cast<size_t>(bytes), stream));
}

// Arrays of floats that one launch zeroes: they are an argument of the kernel, of which CUDA takes 4 KiB.
struct ZeroedArrays {
  static constexpr int most = 64;
  struct Array {
    float* data;
    int64_t n;
  } arrays[most];
};
// Grid: (any number of blocks, arrays).
template <int = 0>
__global__ void zero_kernel(const ZeroedArrays zeroed) {
  float* const data = zeroed.arrays[blockIdx.y].data;
  const int64_t n = zeroed.arrays[blockIdx.y].n;
  for (int64_t i = item_of_thread(); i < n; i += gridDim.x * item_threads) data[i] = 0;
}
// Zeroes the arrays for which each(f) calls f(out, bytes), of whole floats.
template <class Each>
void zero_each(Each&& each, cudaStream_t stream) {
  constexpr int64_t large = 1 << 20;
  ZeroedArrays small = {};
  int count = 0;
  const auto launch_small = [&] { launch(zero_kernel<>, Grid(16, count), item_threads, 0, stream, small), count = 0; };
  each([&](std::byte* out, int64_t bytes) {
    if (bytes >= large) return zero(out, bytes, stream);
    small.arrays[count++] = {reinterpret_cast<float*>(out), exact_div(bytes, int64_t{4}, "zeroed bytes")};
    if (count == ZeroedArrays::most) launch_small();
  });
  launch_small();
}

// Either may be in pinned memory of the host.
inline void copy(std::byte* out, const std::byte* x, int64_t bytes, cudaStream_t stream) {
  CUDA_CHECK(cudaMemcpyAsync(out, x, static_cast<size_t>(bytes), cudaMemcpyDefault, stream));
}

inline void poison(std::byte* out, int64_t bytes, cudaStream_t stream) {
  CUDA_CHECK(cudaMemsetAsync(out, 0xff, static_cast<size_t>(bytes), stream));
}

template <class T>
void gelu_forward(T* out, const T* x, int64_t n, cudaStream_t stream) {
  detail::map(out, detail::GeluForward<T>{}, n, stream, x);
}

template <class T>
void gelu_backward(T* dx, const T* dout, const T* x, int64_t n, cudaStream_t stream) {
  detail::map(dx, detail::GeluBackward<T>{}, n, stream, dout, x);
}

// The same for dx (N, C), and dbias (C) += its column sums, with column_sum()'s scratch and bits.
template <class T>
void gelu_backward_with_bias(T* dx, float* dbias, const RowParts<float>& partials, const T* dout, const T* x, int64_t N,
                             int64_t C, cudaStream_t stream) {
  const detail::ColumnsOfGeluBackward<T> columns{dx, dout, x};
  column_sum_of(dbias, partials, columns, rows_fit_packs(C, full_pack<T>, dx, dout, x), N, C, stream);
}

// out (n) = a + b; out may be either
template <class T>
void residual_forward(T* out, const T* a, const T* b, int64_t n, cudaStream_t stream) {
  detail::map(out, Sum{}, n, stream, a, b);
}

template <class T>
void add_to(T* out, const T* x, int64_t n, cudaStream_t stream) {
  residual_forward(out, out, x, n, stream);
}
// In fp64: a few sums of losses and counts.
template <int = 0>
__global__ void add_sums_kernel(double* out, const double* x, int64_t n) {
  const int64_t i = item_of_thread();
  if (i < n) out[i] += x[i];
}
inline void add_to(double* out, const double* x, int64_t n, cudaStream_t stream) {
  launch_each(add_sums_kernel<>, n, stream, out, x, n);
}

template <class To, class From>
void convert(To* out, const From* x, int64_t n, cudaStream_t stream) {
  detail::map(out, detail::Same{}, n, stream, x);
}

template <class T>
void scale(T* out, float factor, int64_t n, cudaStream_t stream) {
  detail::map(out, detail::Scaled{factor}, n, stream, out);
}

template <class T>
void fill(T* out, float value, int64_t n, cudaStream_t stream) {
  detail::map(out, detail::Constant{value}, n, stream);
}

// out (N, C) = parts[0] + parts[1] + ... + bias, in this order. One thread per pack; N_C = N C.
template <class T, int pack>
__global__ void merge_parts_kernel(T* __restrict__ out, const T* __restrict__ parts, const T* __restrict__ bias,
                                   int64_t P, int64_t N_C, int64_t C) {
  using Pack = Packed<T, pack>;
  const int64_t at = item_of_thread() * pack;
  if (at >= N_C) return;
  Floats<pack> sums;
  const Pack first = Pack::load_streaming(parts + at);
  for (int i = 0; i < pack; ++i) sums[i] = first[i];
#pragma unroll 4
  for (int64_t p = 1; p < P; ++p) sums += Pack::load_streaming(parts + p * N_C + at);
  if (bias != nullptr) sums += Pack::load(bias + at % C);
  Pack::of(sums).store(out + at);
}

template <class T>
void merge_parts(T* out, const T* parts, const T* bias, int64_t P, int64_t N, int64_t C, cudaStream_t stream) {
  with_packs<full_pack<T>>(rows_fit_packs(C, full_pack<T>, out, parts, bias), [&]<int pack>() {
    launch_each(merge_parts_kernel<T, pack>, N * C / pack, stream, out, parts, bias, P, N * C, C);
  });
}

// One thread per pack of a run.
template <int pack, class Out, class X>
__global__ void copy_box_kernel(Out* out, BoxStrides to, const X* x, BoxStrides from, BoxSizes sizes, int64_t packs) {
  const int64_t at = item_of_thread();
  if (at >= packs) return;
  const int64_t packs_of_run = sizes.run / pack, run = at / packs_of_run, k = at % packs_of_run * pack,
                i = run / sizes.inner, j = run % sizes.inner;
  const auto xs = Packed<X, pack>::load_streaming(x + from.begin + i * from.outer + j * from.inner + k);
  Packed<Out, pack> outs;
  for (int e = 0; e < pack; ++e) {
    if constexpr (std::is_same_v<Out, X>) outs.elements[e] = xs.elements[e];  // the bits, NaN too
    else outs.set(e, xs[e]);
  }
  const int64_t first = to.begin + i * to.outer + j * to.inner + k;
  outs.store(out + first / pack * pack);  // a multiple: nvcc must see one to store the pack at once
}

template <class Out, class X>
void copy_box(Out* out, const BoxStrides& to, const X* x, const BoxStrides& from, const BoxSizes& sizes,
              cudaStream_t stream) {
  constexpr int largest = full_pack<Out, X>;
  const auto whole_packs = [](const BoxStrides& s) {
    return s.begin % largest == 0 && s.outer % largest == 0 && s.inner % largest == 0;
  };
  const bool fit = rows_fit_packs(sizes.run, largest, out, x) && whole_packs(to) && whole_packs(from);
  with_packs<largest>(fit, [&]<int pack>() {
    const int64_t packs = sizes.outer * sizes.inner * (sizes.run / pack);
    launch_each(copy_box_kernel<pack, Out, X>, packs, stream, out, to, x, from, sizes, packs);
  });
}

// Each thread computes a block of four elements of the whole tensor: one call of Philox.
template <class T, int pack>
__global__ void init_normal_kernel(T* __restrict__ out, int64_t begin, int64_t n, float stddev, Philox rng) {
  const int64_t block = begin / 4 + item_of_thread();
  const int64_t first = block * 4 - begin;
  if (first >= n) return;
  const auto z = rng.normals(static_cast<uint64_t>(block));
  Packed<T, 4> numbers;
  for (int i = 0; i < 4; ++i) numbers.set(i, stddev * z[static_cast<size_t>(i)]);
  if (pack == 4 && first + 4 <= n) return numbers.store(out + first);
  for (int i = 0; i < 4; ++i)
    if (first + i >= 0 && first + i < n) out[first + i] = numbers.elements[i];
}

// The same for a box with some of the columns; each thread computes one element. Weights are initialised once.
template <class T>
__global__ void init_normal_box_kernel(T* __restrict__ out, Elements elements, int64_t n, float stddev, Philox rng) {
  const int64_t i = item_of_thread();
  if (i >= n) return;
  const int64_t index = elements.index(i);
  const auto z = rng.normals(static_cast<uint64_t>(index / 4));
  for (int j = 0; j < 4; ++j)  // registers can only be indexed by constants
    if (index % 4 == j) out[i] = from_float<T>(stddev * z[static_cast<size_t>(j)]);
}

// rng: keyed for the tensor of which out (n) has these elements
template <class T>
void init_normal(T* out, const Elements& elements, int64_t n, float stddev, const Philox& rng, cudaStream_t stream) {
  if (elements.columns != elements.stride)
    return launch_each(init_normal_box_kernel<T>, n, stream, out, elements, n, stddev, rng);
  const int64_t begin = elements.index(0);
  with_packs<4>(begin % 4 == 0 && fit_packs(out), [&]<int pack>() {
    launch_each(init_normal_kernel<T, pack>, ceil_div(begin % 4 + n, 4), stream, out, begin, n, stddev, rng);
  });
}

}  // namespace llmc::cuda
