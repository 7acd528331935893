// qk_clip.h: the largest logits of heads, and the weights that shrink where they are too large. Contracts:
// ops/ops_step.h.
#pragma once
#include "core/rng.h"
#include "ops/cpu/simd.h"

namespace llmc::cpu {
inline namespace CPU_ISA {

template <class A>
void largest_logits(double* most, const A* largest, int64_t B, int64_t Hq, int64_t T) {
#pragma omp parallel for schedule(static)
  for (int64_t h = 0; h < Hq; ++h)
    for (int64_t b = 0; b < B; ++b) {
      const A* rows = largest + (b * Hq + h) * T;
      A row_most = rows[0];
#pragma omp simd reduction(max : row_most)
      for (int64_t t = 0; t < T; ++t) row_most = rows[t] > row_most ? rows[t] : row_most;
      most[h] = std::max(most[h], static_cast<double>(row_most));
    }
}

inline void largest_of_ranks(double* most, const double* gathered, int64_t ranks, int64_t n) {
  for (int64_t r = 0; r < ranks; ++r)
    for (int64_t i = 0; i < n; ++i) most[i] = std::max(most[i], gathered[r * n + i]);
}

// master == nullptr: the weights are their own master copy; in bf16 they are then rounded stochastically, by `words` of
// the whole parameter.
template <class W, class A = accumulator_t<W>>
void clip_heads(W* weight, A* master, const double* largest, const double* control, const Elements& elements, int64_t n,
                const HeadClip& clip, const Philox& words) {
  if (control[2] == 0) return;
  constexpr int64_t chunk = 1 << 10;
#pragma omp parallel for schedule(static)
  for (int64_t c = 0; c < ceil_div(n, chunk); ++c)
    for (int64_t first = c * chunk, last = 0, end = std::min(n, first + chunk); first < end; first = last) {
      const int64_t begin = elements.index(first), head = begin / clip.elements;
      last = first + std::min({end - first, elements.run(first), (head + 1) * clip.elements - begin});
      const A factor = static_cast<A>(clip.factor(largest[head]));
      for (int64_t i = first; i < last && factor != A(1); ++i) {
        if (master != nullptr) store(weight[i], master[i] *= factor);
        else if constexpr (std::is_same_v<W, A>) weight[i] *= factor;
        else {
          const int64_t index = begin + i - first;
          weight[i].bits =
              bf16::stochastic_bits(static_cast<A>(weight[i]) * factor,
                                    words.words(static_cast<uint64_t>(index / 4))[static_cast<size_t>(index % 4)]);
        }
      }
    }
}

}  // namespace CPU_ISA
}  // namespace llmc::cpu
