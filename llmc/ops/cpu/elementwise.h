// elementwise.h: GELU, SwiGLU, residual addition, zeroing, copies, conversion, sums of parts and columns, initial
// weights. Contracts: ops/ops.h.
#pragma once
#include "core/rng.h"
#include "ops/cpu/simd.h"

namespace llmc::cpu {
inline namespace CPU_ISA {

// GELU, tanh form: 0.5 x (1 + tanh u) = x sigmoid(2 u), u = sqrt(2/pi) (x + 0.044715 x^3).
// Hendrycks & Gimpel 2016; GPT-2's "gelu_new".
template <class A>
struct Gelu {
  A value, derivative;
};
template <class A>
Gelu<A> gelu(A x) {
  constexpr A root = A(0.7978845608028654), cubic = A(0.044715);
  const A twice_u = A(2) * root * (x + cubic * x * x * x);
  const A s = A(1) / (A(1) + exponential(-twice_u));
  return {x * s, s + x * s * (A(1) - s) * A(2) * root * (A(1) + A(3) * cubic * x * x)};
}

template <class T>
void gelu_forward(T* out, const T* x, int64_t n) {
  using A = accumulator_t<T>;
#pragma omp parallel for simd schedule(static)
  for (int64_t i = 0; i < n; ++i) store(out[i], gelu(static_cast<A>(x[i])).value);
}

template <class T>
void gelu_backward(T* dx, const T* dout, const T* x, int64_t n) {
  using A = accumulator_t<T>;
#pragma omp parallel for simd schedule(static)
  for (int64_t i = 0; i < n; ++i) store(dx[i], static_cast<A>(dout[i]) * gelu(static_cast<A>(x[i])).derivative);
}

// SwiGLU (Shazeer 2020): silu(gate) up, silu(x) = x sigmoid(x). rows: how many of the N rows are valid; nullptr: all
template <class T, class A = accumulator_t<T>>
void swiglu_forward(T* out, const T* gate_up, int64_t N, int64_t F, const int32_t* rows = nullptr) {
  if (rows != nullptr) N = *rows;
#pragma omp parallel for schedule(static)
  for (int64_t n = 0; n < N; ++n) {
    const T *gate = gate_up + n * 2 * F, *up = gate + F;
#pragma omp simd
    for (int64_t f = 0; f < F; ++f) {
      const A g = static_cast<A>(gate[f]);
      store(out[n * F + f], g / (A(1) + exponential(-g)) * static_cast<A>(up[f]));
    }
  }
}

template <class T, class A = accumulator_t<T>>
void swiglu_backward(T* dgate_up, const T* dout, const T* gate_up, int64_t N, int64_t F,
                     const int32_t* rows = nullptr) {
  if (rows != nullptr) N = *rows;
#pragma omp parallel for schedule(static)
  for (int64_t n = 0; n < N; ++n) {
    const T *gate = gate_up + n * 2 * F, *up = gate + F;
    T *dgate = dgate_up + n * 2 * F, *dup = dgate + F;
#pragma omp simd
    for (int64_t f = 0; f < F; ++f) {
      const A g = static_cast<A>(gate[f]), d = static_cast<A>(dout[n * F + f]);
      const A s = A(1) / (A(1) + exponential(-g));
      store(dgate[f], d * static_cast<A>(up[f]) * s * (A(1) + g * (A(1) - s)));
      store(dup[f], d * g * s);
    }
  }
}

template <class T>
void residual_forward(T* out, const T* a, const T* b, int64_t n) {
  using A = accumulator_t<T>;
#pragma omp parallel for simd schedule(static)
  for (int64_t i = 0; i < n; ++i) store(out[i], static_cast<A>(a[i]) + static_cast<A>(b[i]));
}

template <class To, class From>
void convert(To* out, const From* x, int64_t n) {
  using A = accumulator_t<From>;
#pragma omp parallel for simd schedule(static)
  for (int64_t i = 0; i < n; ++i) store(out[i], static_cast<accumulator_t<To>>(static_cast<A>(x[i])));
}

// A box of out = a box of x; with equal dtypes the bits are copied, NaN too.
template <class To, class From>
void copy_box(To* out, const BoxStrides& to, const From* x, const BoxStrides& from, const BoxSizes& sizes) {
  constexpr int64_t piece = 1 << 16;  // part of a run for one thread
#pragma omp parallel for collapse(3) schedule(static)
  for (int64_t i = 0; i < sizes.outer; ++i)
    for (int64_t j = 0; j < sizes.inner; ++j)
      for (int64_t begin = 0; begin < sizes.run; begin += piece) {
        To* run = out + to.begin + i * to.outer + j * to.inner + begin;
        const From* source = x + from.begin + i * from.outer + j * from.inner + begin;
        const int64_t n = std::min(piece, sizes.run - begin);
        if constexpr (std::is_same_v<To, From>) {
          std::copy(source, source + n, run);
        } else {
          using A = accumulator_t<From>;
#pragma omp simd
          for (int64_t k = 0; k < n; ++k) store(run[k], static_cast<accumulator_t<To>>(static_cast<A>(source[k])));
        }
      }
}

inline void zero(std::byte* out, int64_t bytes) {
  constexpr int64_t block = 1 << 20;
#pragma omp parallel for schedule(static)
  for (int64_t i = 0; i < ceil_div(bytes, block); ++i)
    std::memset(out + i * block, 0, static_cast<size_t>(std::min(block, bytes - i * block)));
}

inline void copy(std::byte* out, const std::byte* x, int64_t bytes) { std::memcpy(out, x, static_cast<size_t>(bytes)); }

// All bits set: a NaN in every floating-point dtype.
inline void poison(std::byte* out, int64_t bytes) { std::memset(out, 0xff, static_cast<size_t>(bytes)); }

template <class T>
void fill(T* out, float value, int64_t n) {
  std::fill_n(out, n, T(value));
}

template <class T>
void scale(T* out, float factor, int64_t n) {
  using A = accumulator_t<T>;
  for (int64_t i = 0; i < n; ++i) out[i] = T(static_cast<A>(out[i]) * A(factor));
}

// out (N, C) = parts[0] + parts[1] + ... + bias, in this order, rounded once.   parts (P, N, C); bias (C) or nullptr
template <class T, class A = accumulator_t<T>>
void merge_parts(T* out, const T* parts, const T* bias, int64_t P, int64_t N, int64_t C) {
  constexpr int64_t columns = 256;
#pragma omp parallel for collapse(2) schedule(static)
  for (int64_t n = 0; n < N; ++n)
    for (int64_t begin = 0; begin < C; begin += columns) {
      const int64_t count = std::min(columns, C - begin);
      A sums[columns];
      widen(sums, parts + n * C + begin, count);
      for (int64_t p = 1; p < P; ++p) {
        const T* part = parts + (p * N + n) * C + begin;
#pragma omp simd
        for (int64_t c = 0; c < count; ++c) sums[c] += static_cast<A>(part[c]);
      }
      if (bias != nullptr)
#pragma omp simd
        for (int64_t c = 0; c < count; ++c) sums[c] += static_cast<A>(bias[begin + c]);
#pragma omp simd
      for (int64_t c = 0; c < count; ++c) store(out[n * C + begin + c], sums[c]);
    }
}

// out (C) += the column sums of x (N, C).   partials: (row_partitions, C)
template <class T, class A = accumulator_t<T>>
void column_sum(A* out, A* partials, const T* x, int64_t N, int64_t C) {
#pragma omp parallel for schedule(static)
  for (int64_t part = 0; part < row_partitions; ++part) {
    A* sum = partials + part * C;
    std::fill(sum, sum + C, A(0));
    for (int64_t n = partition_begin(N, part); n < partition_begin(N, part + 1); ++n)
#pragma omp simd
      for (int64_t c = 0; c < C; ++c) sum[c] += static_cast<A>(x[n * C + c]);
  }
  add_partials(out, partials, C, C);
}

// gelu_backward, and dbias (C) += the column sums of dx (N, C).   partials: as for column_sum
template <class T, class A = accumulator_t<T>>
void gelu_backward_with_bias(T* dx, A* dbias, A* partials, const T* dout, const T* x, int64_t N, int64_t C) {
  gelu_backward(dx, dout, x, N * C);
  column_sum(dbias, partials, dx, N, C);
}

// out[i] = a normal number keyed by (seed, name, elements.index(i)).
template <class T>
void init_normal(T* out, const Elements& elements, int64_t n, float stddev, const Philox& rng) {
  constexpr int64_t block = 1 << 12;
#pragma omp parallel for schedule(static)
  for (int64_t i = 0; i < ceil_div(n, block); ++i) {
    float numbers[block];
    const int64_t first = i * block, count = std::min(block, n - first);
    for (int64_t run = 0, j = 0; j < count; j += run) {
      run = std::min(elements.run(first + j), count - j);
      rng.fill_normal(numbers + j, elements.index(first + j), run, stddev);
    }
    for (int64_t j = 0; j < count; ++j) out[first + j] = T(numbers[j]);
  }
}

}  // namespace CPU_ISA
}  // namespace llmc::cpu
