// layout_faults.h: which layouts are impossible: every refusal that follows from a layout alone, or from a layout and a
// model. How long the sequences and the step are is checked with the options.
#pragma once
#include "comm/layout.h"
#include "model/config.h"

namespace llmc {

namespace detail {

// A server holds all weights and their state, and supports neither shards nor parts of a model.
inline void server_faults(Faults& faults, const Layout& l) {
  const DpSync sync = l.zero.sync;
  if (sync == DpSync::all_reduce) return;
  std::string axes;  // "--tp 2 with --cp 2"
  for (const auto& [name, size] :
       {std::pair{"--pp", l.pipeline.stages}, std::pair{"--tp", l.tensor.ranks}, std::pair{"--cp", l.context.ranks}})
    if (size > 1) axes += (axes.empty() ? "" : " with ") + formatted("{} {}", name, size);
  faults.unless(axes.empty(), "--dp-sync {} with {}: servers are for data parallelism alone: use --dp-sync all-reduce",
                sync, axes);
  faults.unless(l.zero.stage == 0,
                "--dp-sync {} with --zero-stage {}: servers are for stage 0, and hold the optimizer state already: "
                "leave out --zero-stage, or use --dp-sync all-reduce",
                sync, l.zero.stage);
  faults.unless(l.zero.replicas == 1,
                "--dp-sync {} with --dp-replicate {}: servers serve one group of all ranks: leave out --dp-replicate, "
                "or use --dp-sync all-reduce",
                sync, l.zero.replicas);
}

// Each stage of an asynchronous pipeline updates by itself after every micro-batch.
inline void pipedream_faults(Faults& faults, const Layout& l) {
  if (l.pipeline.schedule != Schedule::pipedream) return;
  faults.unless(l.zero.stage == 0,
                "--zero-stage {} with --schedule pipedream: every rank keeps whole older versions of its stage's "
                "weights; use --zero-stage 0, or use --schedule 1f1b",
                l.zero.stage);
  faults.unless(l.zero.sync == DpSync::all_reduce,
                "--dp-sync {} with --schedule pipedream: a server has no older versions of the weights; use --dp-sync "
                "all-reduce, or use --schedule 1f1b",
                l.zero.sync);
  faults.unless(l.zero.grad_reduce == GradReduce::step,
                "--grad-reduce micro with --schedule pipedream: a step is one micro-batch, whose gradients are reduced "
                "once; leave it out, or use --schedule 1f1b");
}

// State in host memory comes to the device by pieces, which an update must be able to do without the rest.
inline void offload_faults(Faults& faults, const Layout& l) {
  const Offload& offload = l.zero.offload;
  const bool gradients = offload.has(Offloaded::gradients), weights = offload.has(Offloaded::weights);
  const bool moments = offload.has(Offloaded::moments);
  faults.unless(!rule_of(l.zero.optimizer).of_matrices || !(gradients || moments),
                "--offload {} with --optimizer {}, which works on whole matrices of gradients and momenta: leave out "
                "{}, or use --optimizer adamw",
                std::string(offload), l.zero.optimizer,
                gradients && moments ? "moments and gradients"
                : gradients          ? "gradients"
                                     : "moments");
  faults.unless(
      !weights || l.zero.stage == 3,
      "--offload weights with --zero-stage {}: a unit's weights come before they are used, as those of stage 3 "
      "do: use --zero-stage 3, which one rank may have, too",
      l.zero.stage);
  faults.unless(!gradients || l.zero.grad_reduce == GradReduce::micro,
                "--offload gradients with --grad-reduce {}: their sums are in host memory, where each micro-batch adds "
                "to them: use --grad-reduce micro",
                l.zero.grad_reduce);
  const bool activations = offload.has(Offloaded::activations), to_itself = l.pipeline.schedule == Schedule::zb_v;
  faults.unless(!activations || (!to_itself && l.pipeline.schedule != Schedule::pipedream),
                "--offload activations with --schedule {}, {}: use --schedule 1f1b", l.pipeline.schedule,
                to_itself ? "one of whose stages passes outputs to itself, on the device"
                          : "whose micro-batches follow each other over steps");
  faults.unless(!activations || l.pipeline.slices.empty(),
                "--offload activations with --token-slices: not built; leave out one of them");
  faults.unless(
      !gradients || l.zero.sync == DpSync::all_reduce,
      "--offload gradients with --dp-sync {}: servers add gradients on their devices: use --dp-sync all-reduce",
      l.zero.sync);
}

inline void tensor_faults(Faults& faults, const Layout& l, const ModelConfig& c) {
  std::vector<int64_t> would_do = divisors(c.n_head);
  std::erase_if(would_do, [&](int64_t n) { return !can_share_out(c, n); });
  faults.unless(can_share_out(c, l.tensor.ranks),
                "--tp {}: it must divide the {} query heads and the feed-forward width {}{}, and divide the {} "
                "key-value heads or be a multiple of them: use one of {}",
                l.tensor.ranks, c.n_head, c.n_ffn,
                c.experts.shared > 0 ? formatted(" and {} of the shared expert", c.experts.shared) : "", c.n_kv_head,
                would_do);
}

// Only ulysses divides heads; ring and all-gather divide rows.
inline void context_faults(Faults& faults, const Layout& l, const ModelConfig& c) {
  if (l.context.attention != ContextAttention::ulysses || !can_share_out(c, l.tensor.ranks)) return;
  const ModelConfig part = model_of_rank(c, l.tensor);
  faults.unless(can_share_heads(part, l.context.ranks),
                "--cp-attention ulysses with --cp {}: it must divide the {} query heads{}, and divide the {} key-value "
                "heads or be a multiple of them: use another --cp, or --cp-attention ring",
                l.context.ranks, part.n_head, l.tensor.ranks > 1 ? " of a tensor-parallel rank" : "", part.n_kv_head);
}

inline void expert_faults(Faults& faults, const Layout& l, const ModelConfig& c) {
  const int64_t E = c.experts.count, all = int64_t{l.zero.shards} * l.tensor.ranks, ranks = l.expert.ranks;
  faults.unless(E > 0 || ranks == 1,
                "--ep {}: {} has no experts to divide: leave out --ep, or choose a model with experts", ranks,
                c.family.model_type);
  if (E == 0) return;
  faults.unless(l.tensor.ranks == 1 || l.tensor.sequence,
                "--sequence-parallel off with --tp {} and {} experts per layer: all ranks of the group would send them "
                "the same tokens: use --sequence-parallel on",
                l.tensor.ranks, E);
  std::vector<int64_t> would_do = divisors(E);
  std::erase_if(would_do, [&](int64_t n) { return all % n != 0; });
  faults.unless(E % ranks == 0 && all % ranks == 0,
                "--ep {}: it must divide the {} experts of a layer, and the {} ranks of --tp x --cp x shards: use one "
                "of {}{}",
                ranks, E, all, would_do,
                would_do == divisors(E) ? "" : formatted(", or with another number of ranks one of {}", divisors(E)));
  faults.unless(l.zero.sync == DpSync::all_reduce,
                "--dp-sync {} with {} experts per layer: servers are for dense models: use --dp-sync all-reduce",
                l.zero.sync, E);
  faults.unless(!l.pipeline.asynchronous(),
                "{} experts per layer with --schedule pipedream: not built yet; use --schedule 1f1b", E);
}

}  // namespace detail

// The faults of a layout, whatever the model.
inline Faults layout_faults(const Layout& l) {
  const PipelineParallel& p = l.pipeline;
  Faults faults = pipeline_faults(p.pipeline());
  faults.unless(p.stages > 1 || has_slices(p.schedule) || p.schedule == Schedule::pipedream,
                "--schedule {} is for the stages of a pipeline: give --pp, or use 1f1b", p.schedule);
  faults.unless(p.slices.empty() || l.context.ranks == 1,
                "--token-slices with --cp {}: both cut sequences, one in time, the other among ranks: leave out one of "
                "them",
                l.context.ranks);
  detail::server_faults(faults, l);
  detail::pipedream_faults(faults, l);
  detail::offload_faults(faults, l);
  return faults;
}

// The same, and the faults of dividing this model.
inline Faults layout_faults(const Layout& l, const ModelConfig& model) {
  Faults faults = layout_faults(l);
  detail::tensor_faults(faults, l, model);
  detail::context_faults(faults, l, model);
  detail::expert_faults(faults, l, model);
  faults.unless(
      !l.zero.offload.has(Offloaded::gradients) || !model.tied || l.pipeline.stages == 1 ||
          l.pipeline.schedule == Schedule::zb_v,
      "--offload gradients with --pp {} and {}, whose embedding is also its head: both end stages add the "
      "gradients of their tables on their devices: leave out gradients, or use a model with a head of its own",
      l.pipeline.stages, model.family.model_type);
  faults.unless(!l.pipeline.asynchronous() || !model.tied,
                "{} with --schedule pipedream: its embedding is also its head, and the first and the last stage update "
                "at different times, so a table that both have would not stay the same; use a model with a head of its "
                "own, or --schedule 1f1b",
                model.family.model_type);
  return faults;
}

}  // namespace llmc
