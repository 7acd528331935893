// compare.h: a layout against one rank: near enough (contract 5); bit for bit like others of its kind (contracts 3, 4).
#pragma once
#include "run/selftest/run_layout.h"

namespace llmc::selftest {

// What one rank computes on the CPU, and how far from it a layout may be.
struct Reference {
  StepConfig one;
  bool fp32;
  Outcome alone;
  Distances near, farther;

  // step: any layout of the model, with the options that change results. parts: those of the layouts.
  Reference(const StepConfig& step, const Parts& parts)
      : one(on_one_rank(step)),
        fp32(step.precision.activations == DType::fp32 && step.precision.linear == Operands::as_stored),
        parts_{.init = parts.init, .max_norm = parts.max_norm} {
    // Without this some tokens in bf16 would have scores of two experts that are closer than rounding.
    if (step.model.experts.count > 0 && !fp32 && parts.init == init_drawn) parts_.init = init_routes_by_token;
    alone = run_layout(one, {}, parts_);
    near = farther = Distances(1e-6, 1e-5, 1e-5, 1e-5);
    if (!fp32) measure_bounds();
    alone.directions.rounding = roundings * farther.gradients;
    if (!fp32 && !alone.directions.of_steps.empty()) measure_bounds();  // again, of the weights that are compared
  }

  // The parts of a layout that is compared with it.
  Parts parts_for(const Parts& parts) const {
    Parts used = parts;
    used.init = parts_.init;
    return used;
  }
  // Another device rounds differently in bf16, and so do ranks that add parts of a product or merge parts of attention:
  // they may be as far away as both are from fp32, with products in fp8 from the dtype. (Two runs that differ only in
  // the micro-batch round alike.) Muon amplifies what its products round in directions with small singular values.
  const Distances& allowed(const Layout& layout, const Device& device) const {
    const bool amplifies = layout.zero.optimizer == Optimizer::muon;
    return device.kind != DeviceKind::cpu || in_parts(layout) || amplifies ? farther : near;
  }
  static bool in_parts(const Layout& layout) {
    return layout.tensor.ranks > 1 || layout.context.ranks > 1 || !layout.pipeline.slices.empty();
  }

 private:
  static constexpr double roundings = 8;  // of an element, in those of its tensor's root mean square

  // Contract 5: twice the largest distance from the run in micro-batches of one sequence, of runs in micro-batches of
  // two and of all; or a bound where that is larger. What is rounded to fp8 is compared with what is not.
  void measure_bounds() {
    const Outcome pairs = run_layout(on_one_rank(one, 2), {}, parts_),
                  whole = one.micro_batches == 2 ? pairs : run_layout(on_one_rank(one, one.micro_batches), {}, parts_);
    StepConfig exact = one;
    if (one.precision.linear != Operands::as_stored) exact.precision.linear = Operands::as_stored;
    else exact.precision = DType::fp32;
    const Outcome less_rounded = run_layout(exact, {}, parts_);
    const Distances noise = Distances(pairs, alone).or_larger(Distances(whole, alone)), from_exact(less_rounded, alone);
    const auto twice = [](const Distances& usual) {
      return Distances(2 * usual.loss, 2 * usual.norm, 2 * usual.gradients, 2 * usual.weights)
          .or_larger(Distances(1e-3, 0x1p-8, 0x1p-8, 0x1p-8));
    };
    near = twice(noise);
    farther = twice(noise.or_larger(from_exact));
    // Norms of gradients differ by no more than the gradients do. In bf16 they are bounded closer; in fp8 one
    // difference between two norms says little, since a gradient errs by several percent, mostly across its direction.
    if (one.precision.linear != Operands::as_stored)
      farther.norm = std::max(farther.norm, 2 * whole_distance(less_rounded.gradients, alone.gradients));
  }

  Parts parts_;
};

// How a layout compares with one rank.
struct Comparison {
  Outcome outcome;
  Distances distances;
  std::string fault;  // what is wrong with it
  std::string tie;    // why it could not be compared: a near tie of a router
  bool good() const { return fault.empty() && tie.empty(); }
  bool not_compared() const { return fault.empty() && !tie.empty(); }
  std::string verdict() const { return !fault.empty() ? "FAILED:" + fault : tie.empty() ? "" : "NOT COMPARED: " + tie; }

  // The same layout but for what changes no bit.
  void require_same_bits(const Outcome& first) {
    if (!outcome.same_bits(first)) fault += " not bitwise equal to the first of its kind";
  }
};

// How many comparisons ended in which way.
struct Count {
  int64_t good = 0, failed = 0, not_compared = 0;

  Count& operator+=(const Count& other) {
    good += other.good;
    failed += other.failed;
    not_compared += other.not_compared;
    return *this;
  }
  Count& operator+=(const Comparison& c) { return *this += Count{c.good(), !c.fault.empty(), c.not_compared()}; }
  std::string not_compared_text() const {
    return not_compared == 0 ? "" : formatted("; near ties of routers: {} not compared", not_compared);
  }
};

inline Comparison compare(const Reference& reference, const StepConfig& step, const Machine& machine,
                          const Parts& parts) {
  const Parts used = reference.parts_for(parts);
  Comparison c{.outcome = run_layout(step, machine, used), .distances = {}, .fault = {}, .tie = {}};
  c.distances = Distances(c.outcome, reference.alone);
  if (!c.outcome.fault.empty()) c.fault = " " + c.outcome.fault;
  const Distances& allowed = reference.allowed(step.layout, machine.device);
  const bool too_far = !c.distances.within(allowed);
  const bool sparse = step.model.experts.count > 0;
  const Rerouted routes = sparse && any_process(machine.processes, "distances of a layout", too_far)
                              ? rerouted(reference.one, step, machine, used)
                              : Rerouted();
  if (too_far && routes.tokens > 0 && routes.ties) c.tie = to_string(routes);
  else if (too_far)
    c.fault += formatted(" too far, allowed: {}{}", allowed.text(), sparse ? "; " + to_string(routes) : "");
  return c;
}

}  // namespace llmc::selftest
