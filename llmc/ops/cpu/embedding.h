// embedding.h: token embedding, plus position embedding where a model has one. Contracts: ops/ops.h.
#pragma once
#include "ops/cpu/simd.h"

namespace llmc::cpu {
inline namespace CPU_ISA {

// wte: the rows of the tokens in `part`.
template <class T>
void embedding_forward(T* out, const int32_t* tokens, const int32_t* positions, const T* wte, const T* wpe, int64_t N,
                       int64_t C, const Vocabulary& part = {}) {
#pragma omp parallel for schedule(static)
  for (int64_t n = 0; n < N; ++n) {
    T* row = out + n * C;
    if (part.has(tokens[n])) std::copy_n(wte + (tokens[n] - part.first) * C, C, row);
    else std::fill_n(row, C, T(accumulator_t<T>(0)));
    if (wpe != nullptr) add_rows(row, row, wpe + positions[n] * C, C);
  }
}

// x (N, C) += wpe[positions]
template <class T>
void add_positions(T* x, const int32_t* positions, const T* wpe, int64_t N, int64_t C) {
#pragma omp parallel for schedule(static)
  for (int64_t n = 0; n < N; ++n) add_rows(x + n * C, x + n * C, wpe + positions[n] * C, C);
}

// Threads split the columns, not the rows: each element is summed in row order for any thread count, and no two threads
// write to the same element. Either table may be nullptr.
template <class T, class G = accumulator_t<T>>
void embedding_backward(G* dwte, G* dwpe, const T* dout, const int32_t* tokens, const int32_t* positions, int64_t N,
                        int64_t C, const Vocabulary& part = {}) {
  constexpr int64_t columns = 64;
#pragma omp parallel for schedule(static)
  for (int64_t block = 0; block < ceil_div(C, columns); ++block) {
    const int64_t begin = block * columns, end = std::min(C, begin + columns);
    for (int64_t n = 0; n < N; ++n) {
      if (dwte != nullptr && part.has(tokens[n])) {
        G* token = dwte + (tokens[n] - part.first) * C;
#pragma omp simd
        for (int64_t c = begin; c < end; ++c) token[c] += static_cast<G>(dout[n * C + c]);
      }
      if (dwpe == nullptr) continue;
      G* position = dwpe + positions[n] * C;
#pragma omp simd
      for (int64_t c = begin; c < end; ++c) position[c] += static_cast<G>(dout[n * C + c]);
    }
  }
}

}  // namespace CPU_ISA
}  // namespace llmc::cpu
