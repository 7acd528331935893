// step_statistics.h: what a run keeps of its steps: which losses and gradient norms are outliers; and the gradient
// noise scale (McCandlish et al. 2018, appendix A), the batch, in tokens, at which the noise of the gradient is as
// large as the gradient. Estimated without any further pass: each step compares the gradients of its small batches,
// before they are added up, with that of all.
#pragma once
#include <deque>

#include "train/step_config.h"

namespace llmc {

// How many small batches a step has: one of each data-parallel rank or, where every micro-batch is reduced, each.
inline int64_t small_batches(const StepConfig& step) {
  const bool each = step.layout.zero.grad_reduce == GradReduce::micro;
  return step.layout.readers() * (each ? step.micro_batches : 1);
}

// local: the sum of |gradient|^2 of the small batches, whose gradients add up to the step's, of square `square`.
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
         "with --grad-reduce micro";
}

// Averages of both over steps, whose ratio is the scale; recorded in checkpoints.
struct NoiseScale {
  static constexpr double decay = 0.99;
  double square = 0, trace = 0;

  void add(const GradientNoise& step) {
    if (!std::isfinite(step.square) || !std::isfinite(step.trace)) return;
    square = decay * square + (1 - decay) * step.square;
    trace = decay * trace + (1 - decay) * step.trace;
  }
  // Tokens; none: the noise still hides the gradient.
  std::optional<double> tokens() const {
    return square > 0 && trace > 0 ? std::optional(trace / square) : std::nullopt;
  }
};

// Finds outliers by z-score: how many standard deviations above the mean of the last updates (as in llm.c).
class OutlierDetector {
 public:
  static constexpr size_t window = 128;

  OutlierDetector() = default;
  explicit OutlierDetector(const std::vector<double>& values) : values_(values.begin(), values.end()) {
    CHECK(values.size() <= window);
  }

  // The largest value whose z-score is at most z; infinity until the window is full.
  double limit(double z) const {
    if (values_.size() < window) return std::numeric_limits<double>::infinity();
    double squares = 0;  // recomputed each time: the same whether or not the run was resumed
    const double mean = std::accumulate(values_.begin(), values_.end(), 0.0) / window;
    for (double v : values_) squares += (v - mean) * (v - mean);
    return mean + z * std::sqrt(squares / window);
  }

  // Non-finite values are ignored.
  void add(double value) {
    if (!std::isfinite(value)) return;
    values_.push_back(value);
    if (values_.size() > window) values_.pop_front();
  }

  std::vector<double> values() const { return {values_.begin(), values_.end()}; }  // for the checkpoint

 private:
  std::deque<double> values_;
};

}  // namespace llmc
