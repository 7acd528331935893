// choose_layout.h: the layout that the options describe.
#pragma once
#include "model/layout_faults.h"
#include "run/options/options.h"

namespace llmc {

// How the ranks shard the state.
inline ZeroConfig choose_zero(const Options& o) {
  ZeroConfig zero;
  zero.replicas = static_cast<int>(o.dp_replicate);
  zero.shards = static_cast<int>(o.ranks / o.tp / o.pp / o.dp_replicate);
  zero.offload = o.offload;
  zero.offload.directory = o.offload_dir;
  zero.offload.update = o.offload_update;
  zero.reduce_by_stage = o.grad_reduce == GradReduceChoice::automatic;
  zero.set_stage(static_cast<int>(o.zero_stage));
  if (!zero.reduce_by_stage)
    zero.grad_reduce = o.grad_reduce == GradReduceChoice::micro ? GradReduce::micro : GradReduce::step;
  zero.optimizer = o.optimizer;
  zero.muon = {.coefficients = o.muon_ns, .scale = o.muon_scale, .heads = o.muon_heads, .rows = o.muon_rows};
  if (o.muon_products != MuonProducts::automatic)
    zero.muon.dtype = o.muon_products == MuonProducts::bf16 ? DType::bf16 : DType::fp32;
  zero.sync = o.dp_sync;
  return zero;
}

// The stages of a pipeline and their chunks, which have no layers yet.
inline PipelineParallel choose_pipeline(const Options& o) {
  const int64_t chunks = o.pp_chunks.value_or(has_chunks(o.schedule) ? 2 : 1);
  return {.schedule = o.schedule, .stages = static_cast<int>(o.pp), .chunks_per_stage = static_cast<int>(chunks)};
}

// How the ranks divide the work of any model. The lengths of token slices are decided later (with_token_slices()).
inline Layout choose_layout(const Options& o) {
  return {.zero = choose_zero(o),
          .tensor = {.ranks = static_cast<int>(o.tp),
                     .sequence = o.sequence_parallel == OnOff::on,
                     .overlap = o.tp_overlap && o.tp > 1},
          .context = {static_cast<int>(o.cp), o.cp_attention},
          .expert = {.ranks = static_cast<int>(o.ep)},
          .pipeline = choose_pipeline(o)};
}
// The same for this model. Rejects layouts that it cannot have.
inline Layout choose_layout(const Options& o, const ModelConfig& model) {
  Layout l = choose_layout(o);
  l.tensor = tensor_parallel(model, o.tp, l.tensor.sequence, l.tensor.overlap);
  l.expert = expert_parallel(model, o.ep);
  layout_faults(l, model).refuse();
  return l;
}

}  // namespace llmc
