// context_layouts.h: steps of context-parallel layouts, and how far from one rank they may be: shared by the tests of
// context parallelism.
#pragma once
#include "catch2.h"
#include "parallel/on_ranks.h"
#include "run/selftest/selftest.h"

namespace context_layouts {

using namespace llmc;
using selftest::Distances;
using selftest::Model;
using selftest::Outcome;

inline constexpr int64_t seq_len = 48;   // can be divided into the slices of 2, 3, 4 and 8 ranks
inline constexpr int64_t sequences = 4;  // of a step

struct LayoutCase {
  int cp = 1;
  ContextAttention attention = ContextAttention::ring;
  int tp = 1;
  ZeroConfig zero = {};  // shards and replicas of data parallelism alone
};
inline const char* name_of(Documents d) { return d == Documents::apart ? "documents apart" : "documents together"; }
inline std::string to_string(const LayoutCase& l) {
  return formatted("{} cp {} tp {} dp {} x {} stage {} reduce {}", name_of(l.attention), l.cp, l.tp, l.zero.replicas,
                   l.zero.shards, l.zero.stage, l.zero.grad_reduce);
}

inline StepConfig step_of(const Model& model, const LayoutCase& layout, Documents documents = Documents::together,
                          int64_t batch_size = 2) {
  ModelConfig config = model.config();
  config.n_positions = seq_len;
  StepConfig step{.model = config,
                  .precision = model.dtype,
                  .batch = {batch_size, seq_len},
                  .micro_batches = sequences / batch_size / layout.zero.ranks(),
                  .layout = {.zero = layout.zero, .tensor = tensor_parallel(config, layout.tp)}};
  step.layout.context = ContextParallel{layout.cp, layout.attention};
  step.layout.zero.shards *= layout.cp;
  step.documents = documents;
  return step;
}

inline Outcome run(const StepConfig& step, const Hooks& hooks = poison_hooks) {
  return selftest::run_layout(step, {}, {.hooks = hooks});
}

inline std::string to_string(const Distances& d) {
  return formatted("loss {:.1e}, norm {:.1e}, gradients {:.1e}, weights {:.1e}", d.loss, d.norm, d.gradients,
                   d.weights);
}

// What one rank computes, and contract 5.
struct OneRank {
  Outcome outcome;
  bool fp32;
  Distances noise;      // from a run that differs only in the micro-batch
  Distances from_fp32;  // of a bf16 run

  OneRank(const Model& model, Documents documents)
      : outcome(run(step_of(model, {}, documents))),
        fp32(model.dtype == DType::fp32),
        noise(fp32 ? outcome : run(step_of(model, {}, documents, 1)), outcome),
        from_fp32(fp32 ? outcome : run(step_of(in_fp32(model), {}, documents)), outcome) {}

  // Without `rounds_more` a bf16 run may be as far away as two that differ only in the micro-batch; with it, as far as
  // one rank is from fp32.
  bool allows(const Distances& d, bool rounds_more) const {
    auto bound = [&](double Distances::*which, double in_fp32, double in_bf16) {
      const double usual = rounds_more ? std::max(noise.*which, from_fp32.*which) : noise.*which;
      return fp32 ? in_fp32 : std::max(2 * usual, in_bf16);
    };
    return d.loss <= bound(&Distances::loss, 1e-6, 1e-3) && d.norm <= bound(&Distances::norm, 1e-5, 0x1p-8) &&
           d.gradients <= bound(&Distances::gradients, 1e-5, 0x1p-8) &&
           d.weights <= bound(&Distances::weights, 1e-5, 0x1p-8);
  }

 private:
  static Model in_fp32(Model model) {
    model.dtype = DType::fp32;
    return model;
  }
};

// Does a layout round numbers that one rank does not? Tensor-parallel ranks round the parts of a product before they
// are added; where bf16 is multiplied, context-parallel ones round probabilities relative to other maxima.
inline bool rounds_more(const LayoutCase& l) { return l.tp > 1 || l.cp > 1; }
inline void require_close(const Outcome& found, const OneRank& alone, bool rounds_more) {
  const Distances d(found, alone.outcome);
  INFO(to_string(d) << "; two micro-batches: " << to_string(alone.noise)
                    << "; one rank from fp32: " << to_string(alone.from_fp32));
  REQUIRE(found.fault == "");
  REQUIRE(alone.allows(d, rounds_more));
}
inline void require_close(const Model& model, const LayoutCase& layout, Documents documents, const OneRank& alone) {
  require_close(run(step_of(model, layout, documents)), alone, rounds_more(layout));
}

}  // namespace context_layouts
