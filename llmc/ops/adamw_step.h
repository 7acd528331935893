// adamw_step.h: AdamW on one element (Loshchilov & Hutter 2019), as torch.optim.AdamW computes it: the same source for
// every device.
#pragma once
#include <cmath>
#include <cstdint>
#include <string_view>

#include "core/rng.h"
#include "ops/types.h"

namespace llmc {

template <class A>
struct AdamWStep {
  A beta1, beta2, eps, decay, rate, root2;

  explicit AdamWStep(const AdamWOptions& o)
      : beta1(o.beta1),
        beta2(o.beta2),
        eps(o.eps),
        decay(A(1) - A(o.lr) * A(o.weight_decay)),
        rate(A(o.lr) / A(1 - std::pow(static_cast<double>(o.beta1), static_cast<double>(o.step)))),
        root2(A(std::sqrt(1 - std::pow(static_cast<double>(o.beta2), static_cast<double>(o.step))))) {}

  constexpr void operator()(A& weight, A& moment1, A& moment2, A gradient) const {
    moment1 = beta1 * moment1 + (A(1) - beta1) * gradient;
    moment2 = beta2 * moment2 + (A(1) - beta2) * gradient * gradient;
    weight = weight * decay - rate * moment1 / (std::sqrt(moment2) / root2 + eps);
  }
};

// The random numbers that round one parameter's weights at one step, one per element: element i uses word i % 4 of
// block i / 4.
inline Philox rounding_words(uint64_t seed, std::string_view parameter, int64_t step) {
  return Philox(seed, formatted("{}, rounded at step {}", parameter, step));
}

}  // namespace llmc
