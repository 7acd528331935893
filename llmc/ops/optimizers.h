// optimizers.h: the rules by which weights follow their gradients, and their state in few bits. A rule keeps slots for
// every weight, such as AdamW's moments, and has a step on one weight, the same source for every device. Sharding,
// checkpoints and plans go through the slots and know no rule by name: a new one is an Optimizer, a row of
// optimizer_rules, a step, and a case of with_step(). llmc/README.md says where options and tests name it.
#pragma once
#include "core/check.h"
#include "core/dtype.h"
#include "core/rng.h"
#include "ops/types.h"

namespace llmc {

enum class Optimizer : uint8_t { adamw, sgd, lion, muon };

// A number for every weight, in the accumulator dtype, zero before the first step. In 8 bits the second slot of a rule
// has no sign (core/fp8.h): it is never negative.
struct OptimizerSlot {
  const char* name;   // in checkpoints: "blocks.0.ln1.weight:moment1"
  const char* label;  // in plans
};
inline constexpr size_t most_slots = 2;

struct OptimizerRule {
  const char* name;   // of --optimizer
  const char* title;  // in texts
  const char* op;     // in profiles
  std::span<const OptimizerSlot> slots;
  std::optional<double> usual_beta2;  // none: it uses none
  bool uses_eps;                      // does it divide, by --adam-eps at least?
  // Its update is made of a whole matrix (shard/matrix_updates.h), which keeps the slots: the step on one weight only
  // adds that update. Parameters of other kinds follow AdamW.
  bool of_matrices = false;
};

namespace detail {
inline constexpr OptimizerSlot adamw_slots[] = {{"moment1", "AdamW first moment"}, {"moment2", "AdamW second moment"}};
inline constexpr OptimizerSlot sgd_slots[] = {{"momentum", "SGD momentum"}};
inline constexpr OptimizerSlot lion_slots[] = {{"momentum", "Lion momentum"}};
inline constexpr OptimizerSlot muon_slots[] = {{"momentum", "Muon momentum"}};
}  // namespace detail

// In the order of Optimizer.
inline constexpr OptimizerRule optimizer_rules[] = {
    {"adamw", "AdamW", "adamw_update", detail::adamw_slots, 0.95, true},
    {"sgd", "SGD with momentum", "sgd_update", detail::sgd_slots, {}, false},
    {"lion", "Lion", "lion_update", detail::lion_slots, 0.99, false},
    {"muon", "Muon", "muon_update", detail::muon_slots, 0.95, true, true},
};
static_assert(std::size(optimizer_rules) == static_cast<size_t>(Optimizer::muon) + 1);
inline const OptimizerRule& rule_of(Optimizer optimizer) { return optimizer_rules[static_cast<size_t>(optimizer)]; }

constexpr auto names_of_values(Optimizer) {
  std::array<const char*, std::size(optimizer_rules)> names{};
  for (size_t i = 0; i < names.size(); ++i) names[i] = optimizer_rules[i].name;
  return names;
}

// The coefficients of a Newton-Schulz iteration's steps (ops_muon.h): the same ones for all, or each step's best (Amsel
// et al. 2025). Singular values from 0.002 to 1 of a matrix with norm 1 end in [0.68, 1.21] with the former, in
// [0.85, 1.15] with the latter.
enum class NewtonSchulz : uint8_t { quintic, polar_express };
constexpr auto names_of_values(NewtonSchulz) { return std::array{"quintic", "polar-express"}; }

// How large an update is, for a learning rate of 1. rms: its root mean square is about 0.2, as AdamW's is, so that
// AdamW's learning rate and decay fit (Liu et al. 2025, Moonlight). spectral: its largest singular value is about
// sqrt(rows / columns), or 1 if that is smaller.
enum class MuonScale : uint8_t { rms, spectral };
constexpr auto names_of_values(MuonScale) { return std::array{"rms", "spectral"}; }

// Whether the rows of q, k and v are one matrix each, or one for each group of heads: the queries that read the same
// key-value head, its keys, its values.
enum class HeadGroups : uint8_t { together, apart };
constexpr auto names_of_values(HeadGroups) { return std::array{"together", "apart"}; }

// Whether the rows of an orthogonal update stay as they are, or are divided by the root of a second moment (NorMuon).
enum class MuonRows : uint8_t { plain, normalised };
constexpr auto names_of_values(MuonRows) { return std::array{"plain", "normalised"}; }
inline constexpr OptimizerSlot row_moment{"row_moment", "Muon row moments"};  // one number for each row of a matrix

// How Muon makes the update of a matrix.
struct Muon {
  NewtonSchulz coefficients = NewtonSchulz::quintic;
  MuonScale scale = MuonScale::rms;
  HeadGroups heads = HeadGroups::together;
  MuonRows rows = MuonRows::plain;
  std::optional<DType> dtype = {};  // of the products; none: that of the weights
  bool operator==(const Muon&) const = default;
};

// a b + c d. Which product a compiler fuses with the sum is its choice in each loop: on a GPU it is c d; on a CPU all
// steps are taken in one loop (cpu/update.h).
template <class A>
constexpr A sum_of_products(A a, A b, A c, A d) {
#ifdef __CUDA_ARCH__
  return fma(c, d, a * b);
#else
  return a * b + c * d;
#endif
}

// AdamW (Loshchilov & Hutter 2019), as torch.optim.AdamW computes it.
template <class A>
struct AdamWStep {
  static constexpr size_t slots = std::size(detail::adamw_slots);
  A beta1, beta2, eps, decay, rate, root2;

  explicit AdamWStep(const OptimizerOptions& o)
      : beta1(o.beta1),
        beta2(o.beta2),
        eps(o.eps),
        decay(A(1) - A(o.lr) * A(o.weight_decay)),
        rate(A(o.lr) / A(1 - std::pow(static_cast<double>(o.beta1), static_cast<double>(o.step)))),
        root2(A(std::sqrt(1 - std::pow(static_cast<double>(o.beta2), static_cast<double>(o.step))))) {}

  constexpr void operator()(A& weight, A& moment1, A& moment2, A gradient) const {
    moment1 = sum_of_products(beta1, moment1, A(1) - beta1, gradient);
    moment2 = sum_of_products(beta2, moment2, (A(1) - beta2) * gradient, gradient);
    weight = weight * decay - rate * moment1 / (std::sqrt(moment2) / root2 + eps);
  }
};

// SGD with momentum, as torch.optim.SGD computes it: weight decay is a part of the gradient.
template <class A>
struct SgdStep {
  static constexpr size_t slots = std::size(detail::sgd_slots);
  A beta, decay, rate;

  explicit SgdStep(const OptimizerOptions& o) : beta(o.beta1), decay(o.weight_decay), rate(o.lr) {}

  constexpr void operator()(A& weight, A& momentum, A gradient) const {
    momentum = beta * momentum + (gradient + decay * weight);
    weight -= rate * momentum;
  }
};

// Lion (Chen et al. 2023): every weight moves by the learning rate, in the direction of an average that counts the
// newest gradient more than the momentum does. Decoupled weight decay, like AdamW's.
template <class A>
struct LionStep {
  static constexpr size_t slots = std::size(detail::lion_slots);
  A beta1, beta2, decay, rate;

  explicit LionStep(const OptimizerOptions& o)
      : beta1(o.beta1), beta2(o.beta2), decay(A(1) - A(o.lr) * A(o.weight_decay)), rate(o.lr) {}

  constexpr void operator()(A& weight, A& momentum, A gradient) const {
    const A direction = sum_of_products(beta1, momentum, A(1) - beta1, gradient);
    weight = weight * decay - (direction > A(0) ? rate : direction < A(0) ? -rate : A(0));
    momentum = sum_of_products(beta2, momentum, A(1) - beta2, gradient);
  }
};

// Muon (Jordan et al. 2024), after newton_schulz(): instead of a gradient the step gets an update, which is scaled
// already. Decoupled weight decay, like AdamW's.
template <class A>
struct MuonStep {
  static constexpr size_t slots = 0;
  A decay, rate;
  bool cautious;

  explicit MuonStep(const OptimizerOptions& o)
      : decay(A(1) - A(o.lr) * A(o.weight_decay)), rate(o.lr), cautious(o.decay == Decay::cautious) {}

  constexpr void operator()(A& weight, A update) const {
    weight = sum_of_products(weight, !cautious || weight * update > A(0) ? decay : A(1), -rate, update);
  }
};

// Calls f(step) with the step of a rule.
template <class A, class F>
void with_step(Optimizer optimizer, const OptimizerOptions& options, F&& f) {
  switch (optimizer) {
    case Optimizer::adamw: return f(AdamWStep<A>(options));
    case Optimizer::sgd: return f(SgdStep<A>(options));
    case Optimizer::lion: return f(LionStep<A>(options));
    case Optimizer::muon: return f(MuonStep<A>(options));
  }
}

// The random numbers that round one parameter's weights at one step, one per element: element i uses word i % 4 of
// block i / 4.
inline Philox rounding_words(uint64_t seed, std::string_view parameter, int64_t step) {
  return Philox(seed, formatted("{}, rounded at step {}", parameter, step));
}

// ---- State in few bits ---------------------------------------------------------------------------------------------
//
// Optimizer state in fewer bits than fp32, the same arithmetic for every device. A number is widened, the optimizer's
// step is taken in fp32, and the result is rounded stochastically, since most changes are smaller than half the
// distance to the next number and would be lost.
//
//   bf16   2 bytes; a rounding changes a number by less than 2^-7 of it
//   8 bits   1 byte, and an fp32 scale for 64 numbers: the power of two that brings their largest into range. First
//            moments are E4M3: less than 2^-3 of a number, or 2^-16 of the block's largest if that is more. Second
//            moments, which are divided by, are e5m3: less than 2^-3, down to 2^-30 of the largest, and never 0
//   split    masters are a bf16 weight and 16 more bits: the same fp32 number
//
// Blocks begin at multiples of 64 elements of a unit, as the shards of ranks do, so every layout has the same blocks. A
// random word belongs to an element of a unit and a step: its upper half is for the first moment, its lower half for
// the second.

inline constexpr int64_t state_block = 64;

// Numbers of an optimizer's slot.
struct StateArray {
  DType dtype = DType::fp32;
  void* values = nullptr;   // none: the rule has no such slot
  float* scales = nullptr;  // of blocks, with e4m3 and e5m3
};

enum class Masters : uint8_t { weights, copy, split, none };  // fp32 weights; fp32 beside bf16; 16 bits; no masters

// A segment of whole blocks.
struct SmallUpdate {
  Masters masters = Masters::copy;
  void* weight = nullptr;  // fp32 with Masters::weights, else bf16
  void* master = nullptr;  // fp32 with Masters::copy, int16 with Masters::split
  StateArray slots[2] = {};
  const float* gradient = nullptr;
  const double* control = nullptr;
  int64_t first = 0, n = 0;                                    // elements [first, first + n) of a unit
  Philox words = Philox(0, ""), weight_words = Philox(0, "");  // of moments; of weights without masters
};

inline Philox state_words(uint64_t seed, std::string_view unit, int64_t step) {
  return Philox(seed, formatted("state of {}, rounded at step {}", unit, step));
}

constexpr float state_scale(DType dtype, float largest) {
  return dtype == DType::e5m3 ? fp8_scale<e5m3>(largest) : fp8_scale(largest);
}

}  // namespace llmc
