// adamw.h: Loshchilov & Hutter 2019, as torch.optim.AdamW computes it. Contracts: ops/ops.h.
#pragma once
#include "ops/cpu/simd.h"
#include "ops/types.h"

namespace llmc::cpu {

// master == nullptr: the weights are their own master copy.
template <class W, class A>
void adamw_update(W* weight, A* master, A* moment1, A* moment2, const A* gradient, int64_t n, const AdamWOptions& o,
                  A gradient_scale) {
  const A correction1 = A(1 - std::pow(static_cast<double>(o.beta1), static_cast<double>(o.step)));
  const A root2 = A(std::sqrt(1 - std::pow(static_cast<double>(o.beta2), static_cast<double>(o.step))));
  const A b1 = o.beta1, b2 = o.beta2, eps = o.eps, decay = A(1) - A(o.lr) * A(o.weight_decay),
          rate = A(o.lr) / correction1;
  auto update = [=](A& p, A& m, A& v, A g) {
    g *= gradient_scale;
    m = b1 * m + (A(1) - b1) * g;
    v = b2 * v + (A(1) - b2) * g * g;
    p = p * decay - rate * m / (std::sqrt(v) / root2 + eps);
  };
  if (master == nullptr) {
    if constexpr (std::is_same_v<W, A>) {
#pragma omp parallel for simd schedule(static)
      for (int64_t i = 0; i < n; ++i) update(weight[i], moment1[i], moment2[i], gradient[i]);
    }
    return;
  }
#pragma omp parallel for simd schedule(static)
  for (int64_t i = 0; i < n; ++i) {
    update(master[i], moment1[i], moment2[i], gradient[i]);
    store(weight[i], master[i]);
  }
}

}  // namespace llmc::cpu
