// noise_scale.h: the gradient noise scale (McCandlish et al. 2018, appendix A): the batch, in tokens, at which the
// noise of the gradient is as large as the gradient. Estimated without any further pass: each step compares the
// gradients of its small batches, before they are added up, with that of all.
#pragma once
#include "core/check.h"
#include "train/step_config.h"

namespace llmc {

// How many small batches a step has: the samples of each data-parallel rank, which add up before they are reduced; or,
// where every micro-batch is reduced, each of them.
inline int64_t small_batches(const StepConfig& step) {
  const bool each = step.layout.zero.grad_reduce == GradReduce::micro;
  return step.layout.readers() * (each ? step.micro_batches : 1);
}

// local: the sum, over the small batches, of |gradient|^2, where their gradients add up to that of the step, whose
// square is `square`.
inline GradientNoise gradient_noise(double local, double square, int64_t batches, double tokens) {
  const double K = static_cast<double>(batches);
  return {.square = K * (square - local) / (K - 1), .trace = tokens * (K * local - square) / (K - 1)};
}

// Why a step says nothing about the noise; empty: it does.
inline std::string noise_fault(const StepConfig& step) {
  const Layout& l = step.layout;
  if (l.context.ranks > 1)
    return formatted("ranks of --cp {} share their sequences, and have no gradients of whole ones", l.context.ranks);
  if (l.experts_apart()) return "with --tp and --ep, the gradients of experts are of tokens of several ranks";
  if (l.pipeline.stages > 1 && step.model.tied)
    return formatted("with --pp {}, a tied embedding has its gradients from two stages", l.pipeline.stages);
  if (l.pipeline.asynchronous()) return "with --schedule pipedream every stage has a step of its own";
  if (l.zero.sync != DpSync::all_reduce && l.tensor.ranks > 1)
    return formatted("with --dp-sync {}, parts of gradients of --tp meet on the server", l.zero.sync);
  if (small_batches(step) > 1) return "";
  return "it compares the gradients of data-parallel ranks, and there is one: use several, or several micro-batches "
         "with "
         "--grad-reduce micro";
}

// Averages of both over steps, whose ratio is the scale; recorded in checkpoints.
class NoiseScale {
 public:
  static constexpr double decay = 0.99;

  NoiseScale() = default;
  NoiseScale(double square, double trace) : square_(square), trace_(trace) {}
  void add(const GradientNoise& step) {
    if (!std::isfinite(step.square) || !std::isfinite(step.trace)) return;
    square_ = decay * square_ + (1 - decay) * step.square;
    trace_ = decay * trace_ + (1 - decay) * step.trace;
  }
  double square() const { return square_; }
  double trace() const { return trace_; }
  // Tokens; none: the noise still hides the gradient.
  std::optional<double> tokens() const {
    return square_ > 0 && trace_ > 0 ? std::optional(trace_ / square_) : std::nullopt;
  }

 private:
  double square_ = 0, trace_ = 0;
};

}  // namespace llmc
