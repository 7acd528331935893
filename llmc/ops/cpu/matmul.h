// matmul.h: C = op(A) op(B) on the CPU, in blocks that fit into caches (Goto & van de Geijn 2008): panels of A and B
// are packed (panels.h) and multiplied in registers (register_tile.h). Contracts: ops/ops.h.
#pragma once
#include <omp.h>

#include "ops/cpu/matmul_shape.h"
#include "ops/cpu/panels.h"

namespace llmc::cpu {
inline namespace CPU_ISA {

namespace detail {

// out = sum + bias + (if it accumulates) out, rounded once
template <class Out, class Sum, class T>
void finish_tile(Out* out, int64_t stride, const Sum* sums, int64_t width, const T* bias, int64_t rows, int64_t columns,
                 Accumulate accumulate) {
  for (int64_t i = 0; i < rows; ++i, out += stride, sums += width) {
    if (bias == nullptr && accumulate == Accumulate::no) {
#pragma omp simd
      for (int64_t j = 0; j < columns; ++j) store(out[j], sums[j]);
      continue;
    }
#pragma omp simd
    for (int64_t j = 0; j < columns; ++j) {
      Sum value = sums[j];
      if (bias != nullptr) value += static_cast<Sum>(bias[j]);
      if (accumulate == Accumulate::yes) value += static_cast<Sum>(out[j]);
      store(out[j], value);
    }
  }
}

// A thread's packed panels, and its sums where k is divided.
template <class How>
struct MatmulScratch {
  typename How::Packed *a, *b;
  typename How::Sum* sums;
  MatmulScratch(std::byte* bytes, const MatmulBlocks& blocks) {
    const auto aligned = [](int64_t n) { return round_up(n * static_cast<int64_t>(sizeof(*a)), int64_t{64}); };
    const int64_t depth = round_up(blocks.depth, How::step);
    a = reinterpret_cast<typename How::Packed*>(bytes);
    b = reinterpret_cast<typename How::Packed*>(bytes +=
                                                aligned(round_up(blocks.rows, How::rows) * depth + beyond_panels));
    sums = reinterpret_cast<typename How::Sum*>(bytes + aligned(MatmulBlocks::strip * depth + beyond_panels));
  }
};

// A rectangle of C, M rows of N columns: the products of M lines of A and N lines of B.
template <class How, class Out, class T>
void matmul_rectangle(Out* c, int64_t stride, const Lines<T>& a, const Lines<T>& b, const T* bias, int64_t M, int64_t N,
                      int64_t K, Accumulate accumulate, const MatmulBlocks& blocks, const MatmulScratch<How>& scratch) {
  constexpr int64_t rows = How::rows, columns = How::columns;
  alignas(64) typename How::Sum tile[rows * columns];
  const bool divided = K > blocks.depth;
  [[maybe_unused]] const typename How::Session session;
  for (int64_t m0 = 0; m0 < M; m0 += blocks.rows)
    for (int64_t n0 = 0; n0 < N; n0 += blocks.columns)
      for (int64_t k0 = 0; k0 == 0 || k0 < K; k0 += blocks.depth) {
        const int64_t m = std::min(blocks.rows, M - m0), n = std::min(blocks.columns, N - n0);
        const int64_t k = std::min(blocks.depth, K - k0), steps = ceil_div(k, How::step), depth = steps * How::step;
        const bool last = k0 + blocks.depth >= K;
        pack_a<How>(scratch.a, a.from(m0, k0), m, M - m0, k, depth);
        for (int64_t j = 0; j < n; j += columns) {
          const int64_t strip = j % MatmulBlocks::strip;
          if (strip == 0)
            pack_b<How>(scratch.b, b.from(n0 + j, k0), std::min(MatmulBlocks::strip, n - j), n - j, k, depth);
          for (int64_t i = 0; i < m; i += rows) {
            const int64_t height = std::min(rows, m - i);
            auto* sums = divided ? scratch.sums + j * round_up(m, rows) + i * columns : tile;
            How::tile(height)(sums, scratch.a + i * depth, scratch.b + strip * depth, steps,
                              k0 == 0 ? Accumulate::no : Accumulate::yes);
            if (last)
              finish_tile(c + (m0 + i) * stride + n0 + j, stride, sums, columns,
                          bias == nullptr ? nullptr : bias + n0 + j, height, std::min(columns, n - j), accumulate);
          }
        }
      }
}

}  // namespace detail

// T: the type of A, B and bias. How: the way in which they are multiplied. scratch: matmul_scratch() bytes
template <class T, class Out, class How = Multiply<accumulator_t<T>>>
void matmul(Out* c, const T* a, const T* b, const T* bias, std::byte* scratch, const MatmulShape& s) {
  const MatmulBlocks blocks(s);
  const Lines<T> rows = s.a == Transpose::no ? Lines<T>{a, s.K, 1} : Lines<T>{a, 1, s.M};
  const Lines<T> columns = s.b == Transpose::yes ? Lines<T>{b, s.K, 1} : Lines<T>{b, 1, s.N};
  scratch = aligned_scratch(scratch);
#pragma omp parallel for collapse(2) schedule(dynamic) num_threads(s.threads)
  for (int64_t m = 0; m < s.M; m += blocks.rectangle_rows)
    for (int64_t n = 0; n < s.N; n += blocks.rectangle_columns)
      detail::matmul_rectangle<How>(
          c + m * s.N + n, s.N, rows.from(m, 0), columns.from(n, 0), bias == nullptr ? nullptr : bias + n,
          std::min(blocks.rectangle_rows, s.M - m), std::min(blocks.rectangle_columns, s.N - n), s.K, s.accumulate,
          blocks, detail::MatmulScratch<How>(scratch + omp_get_thread_num() * blocks.thread_bytes(s), blocks));
}

// Flops per second of register tiles alone, on panels that stay in an L1 cache, by all threads at once: an upper bound
// for every product. The best of a few windows of milliseconds.
template <class How>
double register_peak(int threads) {
  constexpr int64_t steps = 128 / How::step, windows = 5, calls = 16;
  constexpr double seconds = 0.006;  // per window
  double best = 0;
  for (int64_t window = 0; window < windows; ++window) {
    double rate = 0;
#pragma omp parallel num_threads(threads) reduction(+ : rate)
    {
      alignas(64) typename How::Packed a[How::rows * 128] = {}, b[How::columns * 128] = {};
      alignas(64) typename How::Sum sums[How::rows * How::columns];
      [[maybe_unused]] const typename How::Session session;
      const RegisterTile<How> volatile tile = How::tile(How::rows);  // else the compiler sees that the sums are unused
      const double begin = omp_get_wtime();
      double passed = 0;
      int64_t done = 0;
      for (; passed < seconds; done += calls, passed = omp_get_wtime() - begin)
        for (int64_t call = 0; call < calls; ++call) tile(sums, a, b, steps, Accumulate::no);
      rate += 2.0 * static_cast<double>(done * How::rows * How::columns * 128) / passed;
    }
    best = std::max(best, rate);
  }
  return best;
}

}  // namespace CPU_ISA
}  // namespace llmc::cpu
