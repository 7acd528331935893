// router.h: scores, choices and weights of a router of experts, the statistics of its balance, and the gradient of all
// of them. Contracts: ops/ops_experts.h.
#pragma once
#include "ops/cpu/simd.h"

namespace llmc::cpu {
inline namespace CPU_ISA {

// Rows whose statistics are summed before they are added to those of their segment: a fixed number, so that sums do not
// depend on the thread count.
inline constexpr int64_t router_block = 128;

namespace detail {

// A router's scores and probabilities for the logits of a row.
template <class A>
struct RouterRow {
  A scores[most_experts];
  A probabilities[most_experts];  // scores that sum to 1: for the balancing loss
  A sum;                          // of the scores
  A lse;                          // logsumexp of the logits

  void compute(const A* logits, const Router& r) {
    A largest = std::numeric_limits<A>::lowest(), total = 0;
    for (int64_t e = 0; e < r.E; ++e) largest = std::max(largest, logits[e]);
#pragma omp simd reduction(+ : total)
    for (int64_t e = 0; e < r.E; ++e) total += scores[e] = exponential(logits[e] - largest);
    lse = largest + std::log(total);
    sum = r.scores == RouterScores::softmax ? A(1) : A(0);
    for (int64_t e = 0; e < r.E; ++e) {
      if (r.scores == RouterScores::softmax) scores[e] /= total;
      else sum += scores[e] = A(1) / (A(1) + exponential(-logits[e]));
    }
    for (int64_t e = 0; e < r.E; ++e) probabilities[e] = scores[e] / sum;
  }

  // The divisor of the weights of these experts. As in DeepSeek-V3's code, never 0.
  A divisor(const int32_t* choices, const Router& r) const {
    if (!r.normalised) return A(1);
    A chosen = 0;
    for (int64_t j = 0; j < r.k; ++j) chosen += scores[choices[j]];
    return chosen + A(1e-20);
  }
};

}  // namespace detail

template <class A>
void router_forward(int32_t* choices, A* weights, const A* logits, const A* bias, int64_t N, const Router& r) {
#pragma omp parallel for schedule(static)
  for (int64_t n = 0; n < N; ++n) {
    detail::RouterRow<A> row;
    row.compute(logits + n * r.E, r);
    A keys[most_experts];  // those of chosen experts become NaN
    for (int64_t e = 0; e < r.E; ++e) {
      keys[e] = bias == nullptr ? row.scores[e] : row.scores[e] + bias[e];
      if (std::isnan(keys[e])) keys[e] = -std::numeric_limits<A>::infinity();
    }
    int32_t* chosen = choices + n * r.k;
    for (int64_t j = 0; j < r.k; ++j) {
      int64_t best = -1;
      for (int64_t e = 0; e < r.E; ++e)
        if (!std::isnan(keys[e]) && (best < 0 || keys[e] > keys[best])) best = e;
      chosen[j] = static_cast<int32_t>(best);
      keys[best] = std::numeric_limits<A>::quiet_NaN();
    }
    const A factor = static_cast<A>(r.scaling) / row.divisor(chosen, r);
    for (int64_t j = 0; j < r.k; ++j) weights[n * r.k + j] = row.scores[chosen[j]] * factor;
  }
}

// counts: those of each segment's sequence, or nullptr without a balancing loss
template <class A>
void router_backward(A* dlogits, const A* dweights, const A* logits, const int32_t* choices, const int32_t* counts,
                     int64_t N, const Router& r, const RouterLosses& losses, const Segments& segments) {
  const A T = static_cast<A>(losses.sequence);
  const A per_count = static_cast<A>(losses.balance) * static_cast<A>(r.E) / (T * T * static_cast<A>(r.k));
#pragma omp parallel for schedule(static)
  for (int64_t n = 0; n < N; ++n) {
    detail::RouterRow<A> row;
    row.compute(logits + n * r.E, r);
    const int32_t* chosen = choices + n * r.k;
    const A* dw = dweights + n * r.k;
    A d[most_experts];  // gradient of the scores
    std::fill(d, d + r.E, A(0));
    if (counts != nullptr) {
      const int32_t* count = counts + segments.of(n) * r.E;
      A mean = 0;  // mean gradient of the probabilities: 0 for softmax scores, which sum to 1 anyway
      if (r.scores == RouterScores::sigmoid)
        for (int64_t e = 0; e < r.E; ++e) mean += per_count * static_cast<A>(count[e]) * row.probabilities[e];
      for (int64_t e = 0; e < r.E; ++e) d[e] = (per_count * static_cast<A>(count[e]) - mean) / row.sum;
    }
    const A divisor = row.divisor(chosen, r);
    A shared = 0;  // subtracted from each weight's gradient, as they share a divisor
    if (r.normalised)
      for (int64_t j = 0; j < r.k; ++j) shared += dw[j] * row.scores[chosen[j]] / divisor;
    for (int64_t j = 0; j < r.k; ++j) d[chosen[j]] += static_cast<A>(r.scaling) * (dw[j] - shared) / divisor;

    A* out = dlogits + n * r.E;
    A mean = 0;
    if (r.scores == RouterScores::softmax)
      for (int64_t e = 0; e < r.E; ++e) mean += d[e] * row.scores[e];
    const A z = A(2) * static_cast<A>(losses.z) * row.lse;
    for (int64_t e = 0; e < r.E; ++e) {
      const A s = row.scores[e], slope = r.scores == RouterScores::softmax ? s : s * (A(1) - s);
      out[e] = slope * (d[e] - mean);
      if (z != 0) out[e] += z * exponential(logits[n * r.E + e] - row.lse);
    }
  }
}

// Elements of router_statistics' `partials`.
inline int64_t router_statistics_scratch(int64_t N, const Router& r, const Segments& s) {
  return s.most(N) * ceil_div(std::min(s.length, N), router_block) * (r.E + 2);
}

// partials (segments, blocks, E + 2): the sums of the probabilities, of lse^2 and of the entropy over a block of rows.
template <class A>
void router_statistics(int32_t* counts, A* probabilities, A* sums, A* partials, const A* logits, const int32_t* choices,
                       int64_t N, const Router& r, const Segments& segments) {
  const int64_t all = segments.count(N), blocks = ceil_div(std::min(segments.length, N), router_block);
#pragma omp parallel for collapse(2) schedule(static)
  for (int64_t s = 0; s < all; ++s)
    for (int64_t block = 0; block < blocks; ++block) {
      A* sum = partials + (s * blocks + block) * (r.E + 2);
      std::fill(sum, sum + r.E + 2, A(0));
      const int64_t first = segments.begin(s) + block * router_block;
      for (int64_t n = first; n < std::min(first + router_block, segments.end(s, N)); ++n) {
        detail::RouterRow<A> row;
        row.compute(logits + n * r.E, r);
        A entropy = 0;
        for (int64_t e = 0; e < r.E; ++e) {
          const A p = row.probabilities[e];
          sum[e] += p;
          if (p > 0) entropy -= p * std::log(p);
        }
        sum[r.E] += row.lse * row.lse;
        sum[r.E + 1] += entropy;
      }
    }
#pragma omp parallel for schedule(static)
  for (int64_t s = 0; s < all; ++s) {
    for (int64_t e = 0; e < r.E + 2; ++e) {
      A total = 0;
      for (int64_t block = 0; block < blocks; ++block) total += partials[(s * blocks + block) * (r.E + 2) + e];
      (e < r.E ? probabilities[s * r.E + e] : sums[s * 2 + e - r.E]) = total;
    }
    std::fill(counts + s * r.E, counts + (s + 1) * r.E, 0);
    for (int64_t i = segments.begin(s) * r.k; i < segments.end(s, N) * r.k; ++i) ++counts[s * r.E + choices[i]];
  }
}

template <class A>
void router_losses(double* totals, const int32_t* counts, const A* probabilities, const A* sums, int64_t S,
                   const Router& r, int64_t sequence) {
  const double T = static_cast<double>(sequence);
  double balance = 0, z = 0, entropy = 0;
  for (int64_t s = 0; s < S; ++s) {
    double products = 0;
    for (int64_t e = 0; e < r.E; ++e)
      products += static_cast<double>(counts[s * r.E + e]) * static_cast<double>(probabilities[s * r.E + e]);
    balance += static_cast<double>(r.E) * products / (T * T * static_cast<double>(r.k));
    z += static_cast<double>(sums[s * 2]);
    entropy += static_cast<double>(sums[s * 2 + 1]);
  }
  totals[0] += balance;
  totals[1] += z;
  totals[2] += entropy;
}

inline void count_dropped(double* dropped, const int32_t* rows, int64_t choices) {
  *dropped += static_cast<double>(choices - *rows);
}

// x (rows, columns) as the exact sum of three bf16 matrices: 24 bits are three times 8. Part p of row n is
// at out + p * part + n * row.
inline void split_in_three(bf16* out, const float* x, int64_t rows, int64_t columns, int64_t row, int64_t part) {
#pragma omp parallel for schedule(static)
  for (int64_t n = 0; n < rows; ++n)
    for (int64_t c = 0; c < columns; ++c) {
      float rest = x[n * columns + c];
      for (int64_t p = 0; p < 3; ++p) {
        bf16& to = out[p * part + n * row + c];
        to = bf16(rest);
        rest -= static_cast<float>(to);
      }
    }
}

}  // namespace CPU_ISA
}  // namespace llmc::cpu
