// update.h: an optimizer's step on one segment, and the moving average of its weights. Contracts: ops/ops.h.
#pragma once
#include "ops/cpu/simd.h"
#include "ops/optimizers.h"

namespace llmc::cpu {
inline namespace CPU_ISA {

// One weight, whose slots, if it has any, are element i of slot1 and slot2.
template <class Step, class A>
inline void advance(const Step& step, A& weight, A* slot1, A* slot2, int64_t i, A gradient) {
  if constexpr (Step::slots == 2) step(weight, slot1[i], slot2[i], gradient);
  else if constexpr (Step::slots == 1) step(weight, slot1[i], gradient);
  else step(weight, gradient);
}

// Masters in fp32 are always splittable, so that they are those of --master-weights split, bit for bit.
inline float splittable(float x) { return llmc::splittable(x); }
inline double splittable(double x) { return x; }

// master == nullptr: the weights are their own master copy. slot2 is unused where the rule has one slot. Nothing
// changes where control (4) forbids the update.
template <class W, class A = accumulator_t<W>>
void update_weights(Optimizer optimizer, W* weight, A* master, A* slot1, A* slot2, const A* gradient,
                    const double* control, int64_t n, const OptimizerOptions& options) {
  if (control[2] == 0) return;
  with_step<A>(optimizer, options, [=](auto step) {
    const A gradient_scale = step.slots == 0 ? A(1) : static_cast<A>(control[1]);
    if (master == nullptr) {
      if constexpr (std::is_same_v<W, A>) {
#pragma omp parallel for simd schedule(static)
        for (int64_t i = 0; i < n; ++i) advance(step, weight[i], slot1, slot2, i, gradient[i] * gradient_scale);
      }
      return;
    }
#pragma omp parallel for simd schedule(static)
    for (int64_t i = 0; i < n; ++i) {
      A m = splittable(master[i]);
      advance(step, m, slot1, slot2, i, gradient[i] * gradient_scale);
      master[i] = splittable(m);
      store(weight[i], master[i]);
    }
  });
}

// bf16 weights without a master copy: an update is often less than half the distance to the next bf16, so rounding to
// nearest would always lose it; stochastic rounding keeps it on average. `words` are those of the whole parameter,
// `elements` the part of it that the segment holds.
inline void update_weights_stochastic(Optimizer optimizer, bf16* weight, float* slot1, float* slot2,
                                      const float* gradient, const double* control, const Elements& elements, int64_t n,
                                      const OptimizerOptions& options, const Philox& words) {
  if (control[2] == 0) return;
  constexpr int64_t chunk = 1 << 10;
  with_step<float>(optimizer, options, [&](auto step) {
    const float gradient_scale = step.slots == 0 ? 1 : static_cast<float>(control[1]);
#pragma omp parallel for schedule(static)
    for (int64_t c = 0; c < ceil_div(n, chunk); ++c)
      for (int64_t first = c * chunk, last = 0, end = std::min(n, first + chunk); first < end; first = last) {
        last = first + std::min(end - first, elements.run(first));
        const int64_t begin = elements.index(first) - first;  // element i is element begin + i of the parameter
        for (int64_t block = (begin + first) / 4; block < ceil_div(begin + last, 4); ++block) {
          const auto random = words.words(static_cast<uint64_t>(block));
          for (int64_t i = std::max(block * 4 - begin, first); i < std::min(block * 4 + 4 - begin, last); ++i) {
            float w = static_cast<float>(weight[i]);
            advance(step, w, slot1, slot2, i, gradient[i] * gradient_scale);
            weight[i].bits = bf16::stochastic_bits(w, random[static_cast<size_t>((begin + i) % 4)]);
          }
        }
      }
  });
}

template <class A>
void average_weights(A* average, const A* weight, const double* control, int64_t n, A share) {
  if (control[2] == 0) return;
#pragma omp parallel for simd schedule(static)
  for (int64_t i = 0; i < n; ++i) average[i] += share * (weight[i] - average[i]);
}

template <class A>
void exchange(A* a, A* b, int64_t n) {
#pragma omp parallel for simd schedule(static)
  for (int64_t i = 0; i < n; ++i) {
    const A before = a[i];
    a[i] = b[i];
    b[i] = before;
  }
}

}  // namespace CPU_ISA
}  // namespace llmc::cpu
