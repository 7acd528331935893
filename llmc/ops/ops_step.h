// ops_step.h: the ops at the end of a step: loss, gradient norm, clipping, update, average, QK-clip. Conventions:
// ops.h.
#pragma once
#include "ops/ops_memory.h"
#include "ops/optimizers.h"

namespace llmc {

namespace detail {

inline void check_columns(const char* op, const Vocabulary& part, int64_t columns) {
  CHECK(part.size >= 0 && part.size <= columns, "{}: {} tokens from {} on in {} columns of logits", op, part.size,
        part.first, columns);
}

}  // namespace detail

// A ZLoss, and the tensor (N) for its squares, in the accumulator dtype; none: no such loss.
struct HeadZLoss {
  double coefficient = 0;
  Tensor squares = {};

  template <class A>
  ZLoss<A> of(int64_t N) const {
    if (squares.empty()) return {};
    CHECK_TENSOR(squares, dtype_of<A>(), N);
    return {static_cast<A>(coefficient), squares.data<A>()};
  }
};

// losses (N) = -log softmax(logits)[target] over the first V of the V_padded columns, in the accumulator dtype. With
// Gradient::yes, logits become d(scale * sum of losses) / d logits, zero in the padding. A target of -1 is ignored: its
// loss and gradients are zero. z: adds to the gradients alone.   targets (N) int32
inline void cross_entropy(Tensor losses, Tensor logits, Tensor targets, int64_t V, double scale, Gradient gradient,
                          Stream& stream, const HeadZLoss& z = {}) {
  const int64_t N = logits.shape[0], V_padded = logits.shape[1];
  CHECK_TENSOR(losses, accumulator_of(logits.dtype), N);
  CHECK_TENSOR(targets, DType::int32, N);
  CHECK(V <= V_padded, "cross_entropy: vocabulary {} exceeds the {} columns of the logits", V, V_padded);
  RUN_OP(cross_entropy, logits.dtype, 2 * detail::bytes_of({logits}), (losses, logits), losses.data<A>(),
         logits.data<X>(), targets.data<int32_t>(), N, V, V_padded, A(scale), gradient, z.of<A>(N));
}

// The same for a vocabulary cut into parts, each with its own columns of the logits. First the stats of this part:
// stats (N, 3) = {largest logit, sum of exp(logit - largest), the target's logit} per row, in the accumulator dtype;
// only the first part.size of the V_padded columns count; the target's logit is 0 if another part has it or the target
// is -1. An empty part gives {-infinity, 0, 0}.
inline void cross_entropy_stats(Tensor stats, Tensor logits, Tensor targets, const Vocabulary& part, Stream& stream) {
  const int64_t N = logits.shape[0], V_padded = logits.shape[1];
  CHECK_TENSOR(stats, accumulator_of(logits.dtype), N, 3);
  CHECK_TENSOR(targets, DType::int32, N);
  detail::check_columns("cross_entropy_stats", part, V_padded);
  // The stats are no output to check: those of an empty part are not finite.
  RUN_OP(cross_entropy_stats, logits.dtype, detail::bytes_of({logits}), (), stats.data<A>(), logits.data<X>(),
         targets.data<int32_t>(), N, V_padded, part);
}

// Then losses (N) of the whole vocabulary, from the stats (P, N, 3) of all parts, which are merged in order. With
// Gradient::yes, the logits of this part become d(scale * sum of losses) / d logits, zero in the padding.
inline void cross_entropy_merge(Tensor losses, Tensor logits, Tensor stats, Tensor targets, const Vocabulary& part,
                                double scale, Gradient gradient, Stream& stream, const HeadZLoss& z = {}) {
  const int64_t N = logits.shape[0], V_padded = logits.shape[1], P = stats.shape[0];
  CHECK_TENSOR(losses, accumulator_of(logits.dtype), N);
  CHECK_TENSOR(stats, accumulator_of(logits.dtype), P, N, 3);
  CHECK_TENSOR(targets, DType::int32, N);
  detail::check_columns("cross_entropy_merge", part, V_padded);
  const double bytes = detail::bytes_of({stats}) + (gradient == Gradient::yes ? 2 * detail::bytes_of({logits}) : 0);
  RUN_OP(cross_entropy_merge, logits.dtype, bytes, (losses, logits), losses.data<A>(), logits.data<X>(),
         stats.data<A>(), targets.data<int32_t>(), P, N, V_padded, part, A(scale), gradient, z.of<A>(N));
}

// sum (1) fp64 += all of losses (N), added in a fixed order
inline void add_losses(Tensor sum, Tensor losses, Stream& stream) {
  CHECK_TENSOR(sum, DType::fp64, 1);
  RUN_OP(add_losses, losses.dtype, detail::bytes_of({losses}), (sum), sum.data<double>(), losses.data<A>(),
         losses.numel());
}

// out (1) fp64 = or += the sum of squares of x (n), added in a fixed order (contract 10)
inline void square_sum(Tensor out, Tensor x, Stream& stream, Accumulate accumulate = Accumulate::no) {
  CHECK_TENSOR(out, DType::fp64, 1);
  auto scope = stream.scratch().scope();
  const Tensor partials =
      stream.scratch().alloc("scratch", "square sum", DType::fp64, {ceil_div(x.numel(), square_sum_block)});
  RUN_OP(square_sum, x.dtype, detail::bytes_of({x}), (out), out.data<double>(), partials.data<double>(), x.data<X>(),
         x.numel(), accumulate);
}

// Combines the scalars of all ranks, which are ordered by stage, replica, shard, then tensor-parallel rank: losses (L)
// fp64 = the sums over the ranks whose tensor-parallel rank is 0, since a group's ranks have the same losses; notices
// (N) fp64 = the largest of all ranks, and at least 0; square_sums (units tensor_ranks shards) fp64 = those of each
// stage's first replica, ordered by unit, then by tensor-parallel rank, then by shard (contract 10). gathered (ranks, L
// + N + units): each rank's losses, then its notices, then the sums of its shards.
inline void combine_scalars(Tensor losses, Tensor notices, Tensor square_sums, Tensor gathered, int64_t shards,
                            int64_t tensor_ranks, int64_t stages, Stream& stream) {
  const int64_t ranks = gathered.shape[0], L = losses.numel(), N = notices.numel(), units = gathered.shape[1] - L - N;
  CHECK(ranks % (stages * shards * tensor_ranks) == 0,
        "combine_scalars: {} ranks are not {} stages of replicas of {} shards x {} ranks", ranks, stages, shards,
        tensor_ranks);
  CHECK_TENSOR(losses, DType::fp64, L);
  CHECK_TENSOR(notices, DType::fp64, N);
  CHECK_TENSOR(square_sums, DType::fp64, units * tensor_ranks * shards);
  RUN_UNTYPED_OP(combine_scalars, detail::bytes_of({gathered}), (), losses.data<double>(), notices.data<double>(),
                 square_sums.data<double>(), gathered.data<double>(), ranks, L, N, units, shards, tensor_ranks, stages);
}

// Computes on the device what the update needs, so that the host does not wait: control (4) fp64 = {gradient norm,
// gradient scale, 1 if the update is allowed, 1 after a non-finite step}. The scale clips to max_norm (0: no clipping)
// as torch's clip_grad_norm_ does. A loss or norm above its limit skips this update; a non-finite one also skips all
// later updates, since the host learns of it late and must find the weights unchanged. control[3] starts at 0.
// square_sums fp64, added in order; loss (1) fp64
inline void clip_control(Tensor control, Tensor square_sums, Tensor loss, const UpdateRule& rule, Stream& stream) {
  CHECK_TENSOR(control, DType::fp64, 4);
  CHECK_TENSOR(loss, DType::fp64, 1);
  RUN_UNTYPED_OP(clip_control, detail::bytes_of({square_sums}), (), control.data<double>(), square_sums.data<double>(),
                 square_sums.numel(), loss.data<double>(), rule);
}

// The state that an optimizer keeps for a segment of weights: a tensor for each slot of its rule, empty ones after
// these.
using SlotTensors = std::array<Tensor, most_slots>;

namespace detail {

inline OpCost cost_of_update(Optimizer optimizer, const Tensor& weight, const Tensor& master, const SlotTensors& slots,
                             const Tensor& gradient) {
  const size_t count = rule_of(optimizer).of_matrices ? 0 : rule_of(optimizer).slots.size();
  for (size_t i = 0; i < slots.size(); ++i)
    if (i < count) CHECK_TENSOR(slots[i], accumulator_of(weight.dtype), weight.numel());
    else CHECK(slots[i].empty(), "{}: has {} slot(s)", rule_of(optimizer).op, count);
  CHECK_TENSOR(gradient, accumulator_of(weight.dtype), weight.numel());
  return {rule_of(optimizer).op, 0, 2 * bytes_of({weight, master, slots[0], slots[1]}) + bytes_of({gradient})};
}

}  // namespace detail

// A step on one segment of bf16 weights without a master copy, with stochastic rounding (contract 1: keyed by seed,
// parameter name, step and element). The segment holds these elements of the parameter.
inline void update_weights_stochastic(Optimizer optimizer, Tensor weight, const SlotTensors& slots, Tensor gradient,
                                      Tensor control, std::string_view parameter, const Elements& elements,
                                      const OptimizerOptions& options, Stream& stream) {
  const int64_t n = weight.numel();
  CHECK_TENSOR(weight, DType::bf16, n);
  CHECK_TENSOR(control, DType::fp64, 4);
  const Philox words = rounding_words(options.seed, parameter, options.step);
  const OpCost cost = detail::cost_of_update(optimizer, weight, {}, slots, gradient);
  stream.run(cost, {weight, slots[0], slots[1]}, [=, &stream] {
    CALL_OP(stream, bf16, update_weights_stochastic, optimizer, weight.data<bf16>(),
            detail::data_or_null<float>(slots[0]), detail::data_or_null<float>(slots[1]), gradient.data<float>(),
            control.data<double>(), elements, n, options, words);
  });
}

// A step on one segment: weight, master and slots change in place. master is fp32 when weight is bf16, else empty (the
// weight is its own master copy). Nothing changes where control forbids the update.
inline void update_weights(Optimizer optimizer, Tensor weight, Tensor master, const SlotTensors& slots, Tensor gradient,
                           Tensor control, const OptimizerOptions& options, Stream& stream) {
  CHECK(master.empty() == (weight.dtype == accumulator_of(weight.dtype)),
        "update_weights: weights in {} {} a separate master copy", weight.dtype,
        master.empty() ? "need" : "must not have");
  CHECK_TENSOR(control, DType::fp64, 4);
  RUN_OP_AT(update_weights, weight.dtype, detail::cost_of_update(optimizer, weight, master, slots, gradient),
            (weight, master, slots[0], slots[1]), optimizer, weight.data<X>(), detail::data_or_null<A>(master),
            detail::data_or_null<A>(slots[0]), detail::data_or_null<A>(slots[1]), gradient.data<A>(),
            control.data<double>(), weight.numel(), options);
}

// average += share (weight - average). Nothing changes where control forbids the update.   average, weight (n)
inline void average_weights(Tensor average, Tensor weight, Tensor control, double share, Stream& stream) {
  CHECK_TENSOR(weight, average.dtype, average.shape);
  CHECK_TENSOR(control, DType::fp64, 4);
  RUN_OP(average_weights, average.dtype, detail::bytes_of({average, average, weight}), (average), average.data<A>(),
         weight.data<A>(), control.data<double>(), average.numel(), A(share));
}

// a = b, b = a
inline void exchange(Tensor a, Tensor b, Stream& stream) {
  CHECK_TENSOR(b, a.dtype, a.shape);
  RUN_OP(exchange, a.dtype, 2 * detail::bytes_of({a, b}), (a, b), a.data<A>(), b.data<A>(), a.numel());
}

// update_weights() with state in few bits (optimizers.h): slots of fp32, bf16, e4m3 or e5m3, the latter two with
// scales; a master of fp32, of int16, or for bf16 weights none. The segment is whole blocks of a unit, from element
// `first` on.
inline void update_small_state(Optimizer optimizer, Tensor weight, Tensor master, const SlotTensors& slots,
                               const SlotTensors& scales, Tensor gradient, Tensor control, std::string_view unit,
                               int64_t first, const OptimizerOptions& options, Stream& stream) {
  const int64_t n = weight.numel();
  CHECK(first % state_block == 0 && n % state_block == 0,
        "update_small_state: elements [{}, {}) of unit {} are not whole blocks of {}", first, first + n, unit,
        state_block);
  CHECK_TENSOR(gradient, DType::fp32, n);
  CHECK_TENSOR(control, DType::fp64, 4);
  SmallUpdate u{.masters = weight.dtype == DType::fp32    ? Masters::weights
                           : master.empty()               ? Masters::none
                           : master.dtype == DType::int16 ? Masters::split
                                                          : Masters::copy,
                .weight = weight.bytes,
                .master = master.bytes,
                .gradient = gradient.data<float>(),
                .control = control.data<double>(),
                .first = first,
                .n = n,
                .words = state_words(options.seed, unit, options.step),
                .weight_words = rounding_words(options.seed, unit, options.step)};
  for (size_t s = 0; s < rule_of(optimizer).slots.size(); ++s) {
    CHECK(slots[s].numel() == n && scales[s].empty() == (size_of(slots[s].dtype) > 1),
          "update_small_state: slot {} has {} elements {} scales, expected {}", s, slots[s].numel(),
          scales[s].empty() ? "without" : "with", n);
    u.slots[s] = {slots[s].dtype, slots[s].bytes, detail::data_or_null<float>(scales[s])};
  }
  const double bytes = 2 * detail::bytes_of({weight, master, slots[0], slots[1], scales[0], scales[1]});
  stream.run({rule_of(optimizer).op, 0, bytes + detail::bytes_of({gradient})}, {weight},
             [=, &stream] { CALL_OP(stream, float, update_small_state, optimizer, u, options); });
}

// ---- QK-clip (Kimi Team 2025, Kimi K2, algorithm 1): where the largest attention logit of a head, a score scaled by
// 1 / sqrt(D), is above a limit, the weights that make its queries and keys shrink after the update.

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
