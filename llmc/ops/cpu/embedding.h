// embedding.h: token embedding, plus position embedding where a model has one. Contracts: ops/ops.h.
#pragma once
#include "ops/cpu/simd.h"

namespace llmc::cpu {

template <class T>
void embedding_forward(T* out, const int32_t* tokens, const int32_t* positions, const T* wte, const T* wpe, int64_t N,
                       int64_t C) {
  using A = accumulator_t<T>;
#pragma omp parallel for schedule(static)
  for (int64_t n = 0; n < N; ++n) {
    const T* token = wte + tokens[n] * C;
    if (wpe == nullptr) {
      std::copy(token, token + C, out + n * C);
      continue;
    }
    const T* position = wpe + positions[n] * C;
#pragma omp simd
    for (int64_t c = 0; c < C; ++c) store(out[n * C + c], static_cast<A>(token[c]) + static_cast<A>(position[c]));
  }
}

// Threads split the columns, not the rows: each element is summed in row order for any thread count, and no two threads
// write to the same element.
template <class T, class G>
void embedding_backward(G* dwte, G* dwpe, const T* dout, const int32_t* tokens, const int32_t* positions, int64_t N,
                        int64_t C) {
  constexpr int64_t columns = 64;
#pragma omp parallel for schedule(static)
  for (int64_t block = 0; block < ceil_div(C, columns); ++block) {
    const int64_t begin = block * columns, end = std::min(C, begin + columns);
    for (int64_t n = 0; n < N; ++n) {
      G* token = dwte + tokens[n] * C;
#pragma omp simd
      for (int64_t c = begin; c < end; ++c) token[c] += static_cast<G>(dout[n * C + c]);
      if (dwpe == nullptr) continue;
      G* position = dwpe + positions[n] * C;
#pragma omp simd
      for (int64_t c = begin; c < end; ++c) position[c] += static_cast<G>(dout[n * C + c]);
    }
  }
}

}  // namespace llmc::cpu
