// ops_qk_clip.h: QK-clip (Kimi Team 2025, Kimi K2, algorithm 1): where the largest attention logit of a head, a score
// scaled by 1 / sqrt(D), is above a limit, the weights that make its queries and keys shrink after the update.
// Conventions: ops.h.
#pragma once
#include "ops/ops_step.h"

namespace llmc {

// most[h] = the larger of most[h] and the largest logit in all rows of head h.
// most (Hq) fp64; largest (B, Hq, T) in an accumulator dtype: of each row
inline void largest_logits(Tensor most, Tensor largest, Stream& stream) {
  const int64_t B = largest.shape[0], Hq = largest.shape[1], T = largest.shape[2];
  CHECK_TENSOR(most, DType::fp64, Hq);
  RUN_OP(largest_logits, largest.dtype, detail::bytes_of({largest}), (most), most.data<double>(), largest.data<A>(), B,
         Hq, T);
}

// most = the larger of most and the largest of all rows.   most (n) fp64; gathered (ranks, n) fp64
inline void largest_of_ranks(Tensor most, Tensor gathered, Stream& stream) {
  const int64_t n = most.numel();
  CHECK_TENSOR(most, DType::fp64, n);
  CHECK_TENSOR(gathered, DType::fp64, gathered.shape[0], n);
  RUN_UNTYPED_OP(largest_of_ranks, detail::bytes_of({gathered}), (most), most.data<double>(), gathered.data<double>(),
                 gathered.shape[0], n);
}

// Weights that make the queries or keys of heads shrink by the factors of their heads, after an update that control
// allowed. The segment holds these elements of the parameter. weight, master: as in update_weights(), or bf16 without a
// master copy, with stochastic rounding (contract 1: keyed by seed, parameter name, step and element).
// largest (Hq) fp64: logit of each head
inline void clip_heads(Tensor weight, Tensor master, Tensor largest, Tensor control, std::string_view parameter,
                       const Elements& elements, const HeadClip& clip, const OptimizerOptions& options,
                       Stream& stream) {
  const int64_t n = weight.numel();
  CHECK_TENSOR(largest, DType::fp64, largest.numel());
  CHECK_TENSOR(control, DType::fp64, 4);
  const Philox words = rounding_words(options.seed, formatted("{}, clipped", parameter), options.step);
  // Most heads are not clipped, and their weights are not read.
  RUN_OP(clip_heads, weight.dtype, 0, (weight, master), weight.data<X>(), detail::data_or_null<A>(master),
         largest.data<double>(), control.data<double>(), elements, n, clip, words);
}

}  // namespace llmc
