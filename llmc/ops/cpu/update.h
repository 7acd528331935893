// update.h: an optimizer's step on one segment, and the moving average of its weights. Contracts: ops/ops.h.
#pragma once
#include "ops/cpu/simd.h"
#include "ops/optimizers.h"

namespace llmc::cpu {
inline namespace CPU_ISA {

// A step on n neighbours, a multiple of state_block. The steps on all kinds of state are taken here, by the same
// instructions: a compiler chooses in each loop which product of a b + c d it rounds, and --master-weights split, fp32
// masters and every layout must agree bit for bit.
template <class Step, class A>
[[gnu::noinline, gnu::noclone]] void advance_blocks(const Step& step, A* weight, A* slot1, A* slot2, const A* gradient,
                                                    A gradient_scale, int64_t n) {
  for (int64_t block = 0; block < n; block += state_block)
#pragma omp simd
    for (int64_t i = block; i < block + state_block; ++i) {
      const A scaled = gradient[i] * gradient_scale;
      if constexpr (Step::slots == 2) step(weight[i], slot1[i], slot2[i], scaled);
      else if constexpr (Step::slots == 1) step(weight[i], slot1[i], scaled);
      else step(weight[i], scaled);
    }
}

// A step on elements [first, first + n) of the slots and the gradient, and on their weights.
template <class Step, class A>
void advance(const Step& step, A* weights, A* slot1, A* slot2, const A* gradient, A gradient_scale, int64_t first,
             int64_t n) {
  std::array state = {weights, slot1, slot2};
  for (size_t s = 1; s <= Step::slots; ++s) state[s] += first;
  gradient += first;
  const int64_t whole = n / state_block * state_block, rest = n - whole;
  advance_blocks(step, state[0], state[1], state[2], gradient, gradient_scale, whole);
  if (rest == 0) return;
  A parts[4][state_block] = {};  // of the state and the gradient
  for (size_t s = 0; s <= Step::slots; ++s) std::copy_n(state[s] + whole, rest, parts[s]);
  std::copy_n(gradient + whole, rest, parts[3]);
  advance_blocks(step, parts[0], parts[1], parts[2], parts[3], gradient_scale, state_block);
  for (size_t s = 0; s <= Step::slots; ++s) std::copy_n(parts[s], rest, state[s] + whole);
}

// Elements that a thread widens, steps and rounds at once.
inline constexpr int64_t update_chunk = 16 * state_block;

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
#pragma omp parallel for schedule(static)
    for (int64_t first = 0; first < n; first += update_chunk) {
      const int64_t size = std::min(update_chunk, n - first);
      if constexpr (std::is_same_v<W, A>)
        if (master == nullptr) {
          advance(step, weight + first, slot1, slot2, gradient, gradient_scale, first, size);
          continue;
        }
      A* const masters = master + first;
      for (int64_t i = 0; i < size; ++i) masters[i] = splittable(masters[i]);
      advance(step, masters, slot1, slot2, gradient, gradient_scale, first, size);
      for (int64_t i = 0; i < size; ++i) {
        masters[i] = splittable(masters[i]);
        store(weight[first + i], masters[i]);
      }
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
  with_step<float>(optimizer, options, [&](auto step) {
    const float gradient_scale = step.slots == 0 ? 1 : static_cast<float>(control[1]);
#pragma omp parallel for schedule(static)
    for (int64_t c = 0; c < ceil_div(n, update_chunk); ++c)
      for (int64_t first = c * update_chunk, last = 0, end = std::min(n, first + update_chunk); first < end;
           first = last) {
        last = first + std::min(end - first, elements.run(first));
        float weights[update_chunk];
        widen(weights, weight + first, last - first);
        advance(step, weights, slot1, slot2, gradient, gradient_scale, first, last - first);
        const int64_t begin = elements.index(first) - first;  // element i is element begin + i of the parameter
        for (int64_t block = (begin + first) / 4; block < ceil_div(begin + last, 4); ++block) {
          const auto random = words.words(static_cast<uint64_t>(block));
          for (int64_t i = std::max(block * 4 - begin, first); i < std::min(block * 4 + 4 - begin, last); ++i)
            weight[i].bits = bf16::stochastic_bits(weights[i - first], random[static_cast<size_t>((begin + i) % 4)]);
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
  for (int64_t i = 0; i < n; ++i) std::swap(a[i], b[i]);
}

}  // namespace CPU_ISA
}  // namespace llmc::cpu
