// ops_experts.h: mixture of experts: router, balance, order of rows by expert, grouped linear layers, weighted sum.
// Conventions: ops.h. Here: E experts, k choices per row, at most R rows in the order of experts.
//
// The number of rows of each expert stays on the device, in offsets (E + 1) int32: rows [offsets[e], offsets[e + 1])
// are those of expert e. Rows from offsets[E] on are neither read nor written, and may hold anything; so tensors of R
// rows are not checked for NaN, and their cost is booked as if all R rows were there.
#pragma once
#include "ops/ops_layers.h"

namespace llmc {

namespace detail {

inline void check_router(const char* op, const Router& r) {
  CHECK(r.E >= 1 && r.E <= most_experts, "{}: {} experts; there may be 1 to {}", op, r.E, most_experts);
  CHECK(r.k >= 1 && r.k <= r.E, "{}: {} choices among {} experts; choose 1 to {}", op, r.k, r.E, r.E);
}
inline void check_segments(const char* op, const Segments& s) {
  CHECK(s.length > 0 && s.first >= 0 && s.first < s.length,
        "{}: a first row {} of segments of {} rows; it must be one of them", op, s.first, s.length);
}

// Three bf16 matrices whose sum is exactly the fp32 matrix x (N, E), so that bf16 products do not round the router's
// gradient. They are side by side, (N, 3, E), or one after the other, (3, N, E).
enum class Parts : uint8_t { side_by_side, one_after_the_other };
inline Tensor split_in_three(Tensor x, Parts parts, Stream& stream) {
  const int64_t N = x.shape[0], E = x.shape[1];
  const bool wide = parts == Parts::side_by_side;
  const int64_t row = wide ? 3 * E : E, part = wide ? E : N * E;
  const Tensor out = stream.scratch().alloc("scratch", "router gradients in three parts", DType::bf16,
                                            wide ? Shape{N, 3 * E} : Shape{3 * N, E});
  RUN_UNTYPED_OP(split_in_three, bytes_of({out, x}), (out), out.data<bf16>(), x.data<float>(), N, E, row, part);
  return out;
}

}  // namespace detail

// logits = x weight^T, in the accumulator dtype.   logits (N, E); x (N, C); weight (E, C)
inline void router_logits(Tensor logits, Tensor x, Tensor weight, Stream& stream) {
  const int64_t N = x.shape[0], C = x.shape[1], E = weight.shape[0];
  CHECK_TENSOR(logits, accumulator_of(x.dtype), N, E);
  CHECK_TENSOR(weight, x.dtype, E, C);
  detail::matmul("router_logits", logits, {x, Transpose::no}, {weight, Transpose::yes}, C, {}, Accumulate::no, stream);
}

// dx = or += (as requested, rounded once) dlogits weight; dlogits are not rounded to the dtype of dx.
inline void router_backward_input(Tensor dx, Tensor dlogits, Tensor weight, Accumulate accumulate_dx, Stream& stream) {
  const int64_t N = dlogits.shape[0], E = weight.shape[0], C = weight.shape[1];
  CHECK_TENSOR(dx, weight.dtype, N, C);
  CHECK_TENSOR(dlogits, accumulator_of(weight.dtype), N, E);
  const auto product = [&](Tensor gradients, Tensor weights) {
    detail::matmul("router_backward_input", dx, {gradients, Transpose::no}, {weights, Transpose::no}, weights.shape[0],
                   {}, accumulate_dx, stream);
  };
  if (weight.dtype != DType::bf16) return product(dlogits, weight);
  auto scope = stream.scratch().scope();
  const Tensor weights = stream.scratch().alloc("scratch", "router weights, three times", weight.dtype, {3 * E, C});
  for (int64_t part = 0; part < 3; ++part) copy(weights.slice(part * E * C, {E, C}), weight, stream);
  product(detail::split_in_three(dlogits, detail::Parts::side_by_side, stream), weights);
}

// dweight = or += (as requested) dlogits^T x.   dweight (E, C)
inline void router_backward_weight(Tensor dweight, Tensor dlogits, Tensor x, Accumulate accumulate_dweight,
                                   Stream& stream) {
  const int64_t N = x.shape[0], C = x.shape[1], E = dlogits.shape[1];
  CHECK_TENSOR(dlogits, accumulator_of(x.dtype), N, E);
  CHECK_TENSOR(dweight, accumulator_of(x.dtype), E, C);
  const auto product = [&](Tensor gradients, Accumulate accumulate) {
    detail::matmul("router_backward_weight", dweight, {gradients, Transpose::yes}, {x, Transpose::no}, N, {},
                   accumulate, stream);
  };
  if (x.dtype != DType::bf16) return product(dlogits, accumulate_dweight);
  auto scope = stream.scratch().scope();
  const Tensor parts = detail::split_in_three(dlogits, detail::Parts::one_after_the_other, stream);
  for (int64_t part = 0; part < 3; ++part)
    product(parts.slice(part * N * E, {N, E}), part == 0 ? accumulate_dweight : Accumulate::yes);
}

// choices (N, k) int32 = the experts of each row with the largest score, or score + bias, in this order; ties go to the
// first expert, and NaN counts as the smallest. weights (N, k) = their scores, without bias, as `router` says. logits
// (N, E); bias (E), or an empty tensor. Shazeer et al. 2017; biases: Wang et al. 2024, DeepSeek-V3.
inline void router_forward(Tensor choices, Tensor weights, Tensor logits, Tensor bias, const Router& router,
                           Stream& stream) {
  const int64_t N = logits.shape[0];
  detail::check_router("router_forward", router);
  CHECK_TENSOR(logits, accumulator_of(logits.dtype), N, router.E);
  CHECK_TENSOR(choices, DType::int32, N, router.k);
  CHECK_TENSOR(weights, logits.dtype, N, router.k);
  if (!bias.empty()) CHECK_TENSOR(bias, logits.dtype, router.E);
  RUN_OP(router_forward, logits.dtype, detail::bytes_of({choices, weights, logits}), (choices, weights),
         choices.data<int32_t>(), weights.data<A>(), logits.data<A>(), detail::data_or_null<A>(bias), N, router);
}

// dlogits (N, E) = the gradient through the weights, plus that of the router's own losses (types.h). dweights are 0 for
// dropped choices.   counts (segments, E) int32: how often each expert was chosen in the whole sequence of each
// segment; or an empty tensor: no balancing loss
inline void router_backward(Tensor dlogits, Tensor dweights, Tensor logits, Tensor choices, Tensor counts,
                            const Router& router, const RouterLosses& losses, const Segments& segments,
                            Stream& stream) {
  const int64_t N = logits.shape[0];
  detail::check_router("router_backward", router);
  detail::check_segments("router_backward", segments);
  CHECK_TENSORS((logits, dlogits), accumulator_of(logits.dtype), N, router.E);
  CHECK_TENSOR(dweights, logits.dtype, N, router.k);
  CHECK_TENSOR(choices, DType::int32, N, router.k);
  if (!counts.empty()) CHECK_TENSOR(counts, DType::int32, segments.count(N), router.E);
  RUN_OP(router_backward, logits.dtype, detail::bytes_of({dlogits, dweights, logits, choices}), (dlogits),
         dlogits.data<A>(), dweights.data<A>(), logits.data<A>(), choices.data<int32_t>(),
         detail::data_or_null<int32_t>(counts), N, router, losses, segments);
}

// Sums over the rows of each segment, in a fixed order: counts (segments, E) int32 = how often each expert was chosen,
// dropped or not; probabilities (segments, E) = the scores divided by their sum; sums (segments, 2) = logsumexp^2 of
// the logits, and the entropy of the probabilities (in nats). Ranks that share a sequence add theirs.
inline void router_statistics(Tensor counts, Tensor probabilities, Tensor sums, Tensor logits, Tensor choices,
                              const Router& router, const Segments& segments, Stream& stream) {
  const int64_t N = logits.shape[0], S = segments.count(N);
  detail::check_router("router_statistics", router);
  detail::check_segments("router_statistics", segments);
  CHECK_TENSOR(logits, accumulator_of(logits.dtype), N, router.E);
  CHECK_TENSOR(choices, DType::int32, N, router.k);
  CHECK_TENSOR(counts, DType::int32, S, router.E);
  CHECK_TENSOR(probabilities, logits.dtype, S, router.E);
  CHECK_TENSOR(sums, logits.dtype, S, 2);
  auto scope = stream.scratch().scope();
  const int64_t elements = cpu::router_statistics_scratch(N, router, segments);
  const Tensor partials = detail::scratch(stream, "router statistics", logits.dtype, elements, elements);
  RUN_OP(router_statistics, logits.dtype, detail::bytes_of({logits, choices}), (counts, probabilities, sums),
         counts.data<int32_t>(), probabilities.data<A>(), sums.data<A>(), partials.data<A>(), logits.data<A>(),
         choices.data<int32_t>(), N, router, segments);
}

// totals (3) fp64 += over sequences: the balancing loss E sum_e f_e P_e, f_e the share of the choices, P_e the mean
// probability (Fedus et al. 2021, eq. 4); the sum over rows of logsumexp^2 (Zoph et al. 2022); the sum over rows of the
// entropy. The arguments are those of whole sequences, with `sequence` rows each.
inline void router_losses(Tensor totals, Tensor counts, Tensor probabilities, Tensor sums, const Router& router,
                          int64_t sequence, Stream& stream) {
  const int64_t B = counts.shape[0];
  detail::check_router("router_losses", router);
  CHECK_TENSOR(totals, DType::fp64, 3);
  CHECK_TENSOR(counts, DType::int32, B, router.E);
  CHECK_TENSOR(probabilities, accumulator_of(probabilities.dtype), B, router.E);
  CHECK_TENSOR(sums, probabilities.dtype, B, 2);
  RUN_OP(router_losses, probabilities.dtype, detail::bytes_of({counts, probabilities}), (totals), totals.data<double>(),
         counts.data<int32_t>(), probabilities.data<A>(), sums.data<A>(), B, router, sequence);
}

// dropped (1) fp64 += how many of the `choices` choices have no row.   offsets (E + 1) int32, of dispatch_plan()
inline void count_dropped(Tensor dropped, int64_t choices, Tensor offsets, Stream& stream) {
  const int64_t E = offsets.shape[0] - 1;
  CHECK_TENSOR(offsets, DType::int32, E + 1);
  CHECK_TENSOR(dropped, DType::fp64, 1);
  RUN_UNTYPED_OP(count_dropped, detail::bytes_of({dropped}), (dropped), dropped.data<double>(),
                 offsets.data<int32_t>() + E, choices);
}

// Orders the choices by expert, and those of an expert by (row, choice). offsets (E + 1); places (N, k) = the row of
// each choice in this order, -1 for a dropped one. All int32. With several blocks of rows, each has an equal number of
// experts and its rows begin at a multiple of the stride, with a gap after them; offsets do not count the gaps.
// Without a capacity nothing is dropped. With one, each segment keeps the first `capacity` choices of an expert, in the
// order (row, choice). starts (segments, E) int32 count the choices that came before in the segment's sequence, on
// other ranks; an empty tensor: none.   choices (N, k)
inline void dispatch_plan(Tensor places, Tensor offsets, Tensor choices, Tensor starts, std::optional<int64_t> capacity,
                          const Segments& segments, const ExpertRoom& rows, Stream& stream) {
  const int64_t N = choices.shape[0], k = choices.shape[1], E = offsets.shape[0] - 1, S = segments.count(N);
  detail::check_segments("dispatch_plan", segments);
  CHECK(E >= 1 && E <= most_experts, "dispatch_plan: {} experts; there may be 1 to {}", E, most_experts);
  CHECK(!capacity || *capacity >= 0, "dispatch_plan: a capacity of {} rows", capacity.value_or(0));
  CHECK(rows.blocks >= 1 && E % rows.blocks == 0 && rows.room % rows.blocks == 0,
        "dispatch_plan: {} experts and {} rows do not divide into {} blocks", E, rows.room, rows.blocks);
  const int64_t of_block = E / rows.blocks, all = N * std::min(k, of_block),  // a row chooses an expert once
      most = capacity ? std::min(all, S * of_block * *capacity) : all;
  CHECK(rows.stride() >= most, "dispatch_plan: room for {} rows, but {} rows with {} choices can need {}",
        rows.stride(), N, k, most);
  CHECK(
      std::max(N * k, rows.room) <= std::numeric_limits<int32_t>::max() && S * E < std::numeric_limits<int32_t>::max(),
      "dispatch_plan: {} rows with {} choices in {} segments are too many for 32 bits; use smaller micro-batches", N, k,
      S);
  CHECK_TENSORS((choices, places), DType::int32, N, k);
  CHECK_TENSOR(offsets, DType::int32, E + 1);
  if (!starts.empty()) CHECK_TENSOR(starts, DType::int32, S, E);
  auto scope = stream.scratch().scope();
  const Tensor scratch = detail::scratch(stream, "order of rows by expert", DType::int32, (segments.most(N) + 1) * E,
                                         ON_GPU(cuda::dispatch_plan_scratch(N, E, k, segments.most(N))));
  RUN_UNTYPED_OP(dispatch_plan, detail::bytes_of({places, choices}), (), places.data<int32_t>(),
                 offsets.data<int32_t>(), scratch.data<int32_t>(), choices.data<int32_t>(),
                 detail::data_or_null<int32_t>(starts), N, E, k, capacity.value_or(-1), segments, rows);
}

// out[places[n, j]] = x[n]; dropped choices have no row. Rows of `out` without a choice stay as they are.
// out (R, C); x (N, C); places (N, k) int32
inline void dispatch_rows(Tensor out, Tensor x, Tensor places, Stream& stream) {
  const int64_t N = x.shape[0], C = x.shape[1], k = places.shape[1];
  CHECK_TENSOR(out, x.dtype, out.shape[0], C);
  CHECK_TENSOR(places, DType::int32, N, k);
  RUN_OP(dispatch_rows, x.dtype, 2 * detail::bytes_of({out}), (), out.data<X>(), x.data<X>(), places.data<int32_t>(), N,
         C, k);
}

namespace detail {

// The rows of the choices: places (N, k); or an empty tensor: in the order (row, choice), k rows for each row.
inline void check_places(const char* op, const Tensor& places, const Tensor& y, int64_t N, int64_t k) {
  if (!places.empty()) return check_tensor(op, "places", places, DType::int32, {N, k});
  CHECK(y.shape[0] == N * k, "{}: {} rows of {} choices each, but there are {}: give their places", op, N, k,
        y.shape[0]);
}

}  // namespace detail

// out = or += (as requested) the sum over j of weights[n, j] y[places[n, j]], in this order, rounded once; dropped
// choices add nothing. Without weights it is the backward of dispatch_rows.   out (N, C); y (R, C); weights (N, k) in
// the accumulator dtype, or an empty tensor: all 1; places (N, k) int32, or an empty tensor: y has the choices in order
inline void combine_rows(Tensor out, Tensor y, Tensor weights, Tensor places, Accumulate accumulate, Stream& stream) {
  const int64_t N = out.shape[0], C = out.shape[1], k = (places.empty() ? weights : places).shape[1];
  CHECK_TENSOR(y, out.dtype, y.shape[0], C);
  detail::check_places("combine_rows", places, y, N, k);
  if (!weights.empty()) CHECK_TENSOR(weights, accumulator_of(out.dtype), N, k);
  RUN_OP(combine_rows, out.dtype, detail::bytes_of({out, y}), (out), out.data<X>(), y.data<X>(),
         detail::data_or_null<A>(weights), detail::data_or_null<int32_t>(places), N, C, k, accumulate);
}

// dy[places[n, j]] = weights[n, j] dout[n]; dweights[n, j] = dout[n] y[places[n, j]], 0 for a dropped choice. dy may be
// y.   dy, y (R, C); dweights (N, k) in the accumulator dtype; dout (N, C); weights, places: as for combine_rows()
inline void combine_backward(Tensor dy, Tensor dweights, Tensor dout, Tensor y, Tensor weights, Tensor places,
                             Stream& stream) {
  const int64_t N = dout.shape[0], C = dout.shape[1], k = weights.shape[1];
  CHECK_TENSORS((y, dy), dout.dtype, y.shape[0], C);
  detail::check_places("combine_backward", places, y, N, k);
  CHECK_TENSORS((weights, dweights), accumulator_of(dout.dtype), N, k);
  RUN_OP(combine_backward, dout.dtype, detail::bytes_of({dy, dout, y}), (dweights), dy.data<X>(), dweights.data<A>(),
         dout.data<X>(), y.data<X>(), weights.data<A>(), detail::data_or_null<int32_t>(places), N, C, k);
}

namespace detail {

inline OpCost grouped_cost(const char* name, int64_t R, const Tensor& weight, const Tensor& in, const Tensor& out,
                           const ProductShape& product) {
  const double flops = 2.0 * static_cast<double>(R) * static_cast<double>(weight.shape[1] * weight.shape[2]);
  return {.name = name, .flops = flops, .bytes = bytes_of({weight, in, out}), .product = product};
}

// For products that sum at most K elements, on CPUs.
inline Tensor grouped_scratch(Stream& stream, int64_t K, DType in) {
  return scratch(stream, "grouped matmul", DType::int32,
                 ceil_div(cpu::grouped_scratch(K, in, stream.device().threads), int64_t{4}), ON_GPU(0));
}

// Operands as `read` says. In fp8 rows are read in blocks along themselves, also where the product sums over rows:
// which rows an expert has, and so blocks of them, depends on the micro-batch and on the layout.
inline Tensor grouped_rows(Tensor rows, Role role, Tensor offsets, const Reading& read, Stream& stream) {
  if (read.operands == Operands::as_stored) return rows;
  const Tensor out = stream.scratch().alloc("scratch", "fp8 operand", rows.dtype, rows.shape);
  quantise({.rows = {out}, .columns = {}}, rows, role, read.operands, stream, offsets.slice(offsets.shape[0] - 1, {1}));
  return out;
}
inline Tensor grouped_weight(Tensor weight, SumAlong sum, const Reading& read, Stream& stream) {
  if (read.operands == Operands::as_stored) return weight;
  const bool kept = !read.weight.rows.values.empty();
  const Quantised q = kept ? read.weight : quantise(weight, Role::weights, sum, read.operands, stream);
  return (sum == SumAlong::rows ? q.rows : q.columns).values;
}

}  // namespace detail

// Rows of expert e: out = x weight[e]^T.   out (R, O); x (R, I); weight (E, O, I); offsets (E + 1) int32
inline void grouped_linear_forward(Tensor out, Tensor x, Tensor weight, Tensor offsets, Stream& stream,
                                   const Reading& read = {}) {
  const int64_t R = x.shape[0], E = weight.shape[0], O = weight.shape[1], I = weight.shape[2];
  CHECK_TENSOR(out, x.dtype, R, O);
  CHECK_TENSOR(x, x.dtype, R, I);
  CHECK_TENSOR(weight, x.dtype, E, O, I);
  CHECK_TENSOR(offsets, DType::int32, E + 1);
  auto scope = stream.scratch().scope();
  x = detail::grouped_rows(x, detail::Role::activations, offsets, read, stream);
  weight = detail::grouped_weight(weight, detail::SumAlong::rows, read, stream);
  const Tensor scratch = detail::grouped_scratch(stream, I, x.dtype);
  detail::run_op(stream, x.dtype,
                 detail::grouped_cost("grouped_linear_forward", R, weight, x, out, {ceil_div(R, E), O, I, E}), {},
                 [=, &stream]<class X, class A>(detail::OpTypes<X, A>) {
                   RUN_ON_DEVICE(stream, X,
                                 cuda::grouped_linear_forward(out.data<X>(), x.data<X>(), weight.data<X>(),
                                                              offsets.data<int32_t>(), R, E, O, I, stream.cuda()),
                                 cpu::products<X>().grouped_linear(out.data<X>(), x.data<X>(), weight.data<X>(),
                                                                   offsets.data<int32_t>(), scratch.bytes, R, E, O, I,
                                                                   Transpose::yes));
                 });
}

// Rows of expert e: dx = dout weight[e].
inline void grouped_linear_backward_input(Tensor dx, Tensor dout, Tensor weight, Tensor offsets, Stream& stream,
                                          const Reading& read = {}) {
  const int64_t R = dout.shape[0], E = weight.shape[0], O = weight.shape[1], I = weight.shape[2];
  CHECK_TENSOR(dx, dout.dtype, R, I);
  CHECK_TENSOR(dout, dout.dtype, R, O);
  CHECK_TENSOR(weight, dout.dtype, E, O, I);
  CHECK_TENSOR(offsets, DType::int32, E + 1);
  auto scope = stream.scratch().scope();
  dout = detail::grouped_rows(dout, detail::Role::gradients, offsets, read, stream);
  weight = detail::grouped_weight(weight, detail::SumAlong::columns, read, stream);
  const Tensor scratch = detail::grouped_scratch(stream, O, dout.dtype);
  detail::run_op(
      stream, dout.dtype,
      detail::grouped_cost("grouped_linear_backward_input", R, weight, dout, dx, {ceil_div(R, E), I, O, E}), {},
      [=, &stream]<class X, class A>(detail::OpTypes<X, A>) {
        RUN_ON_DEVICE(
            stream, X,
            cuda::grouped_linear_backward_input(dx.data<X>(), dout.data<X>(), weight.data<X>(), offsets.data<int32_t>(),
                                                R, E, O, I, stream.cuda()),
            cpu::products<X>().grouped_linear(dx.data<X>(), dout.data<X>(), weight.data<X>(), offsets.data<int32_t>(),
                                              scratch.bytes, R, E, I, O, Transpose::no));
      });
}

// dweight[e] = or += (as requested) dout^T x over the rows of expert e, 0 if it has none.   dweight (E, O, I) in the
// accumulator dtype
inline void grouped_linear_backward_weight(Tensor dweight, Tensor dout, Tensor x, Tensor offsets,
                                           Accumulate accumulate_dweight, Stream& stream, const Reading& read = {}) {
  const int64_t R = x.shape[0], E = dweight.shape[0], O = dweight.shape[1], I = dweight.shape[2];
  CHECK_TENSOR(dweight, accumulator_of(x.dtype), E, O, I);
  CHECK_TENSOR(dout, x.dtype, R, O);
  CHECK_TENSOR(x, x.dtype, R, I);
  CHECK_TENSOR(offsets, DType::int32, E + 1);
  OpCost cost = detail::grouped_cost("grouped_linear_backward_weight", R, dweight, dout, x, {O, I, ceil_div(R, E), E});
  if (accumulate_dweight == Accumulate::yes) cost.bytes += detail::bytes_of({dweight});  // read and written
  auto scope = stream.scratch().scope();
  dout = detail::grouped_rows(dout, detail::Role::gradients, offsets, read, stream);
  x = detail::grouped_rows(x, detail::Role::activations, offsets, read, stream);
  const Tensor scratch = detail::grouped_scratch(stream, R, x.dtype);
  detail::run_op(stream, x.dtype, cost, {dweight}, [=, &stream]<class X, class A>(detail::OpTypes<X, A>) {
    RUN_ON_DEVICE(
        stream, X,
        cuda::grouped_linear_backward_weight(dweight.data<A>(), dout.data<X>(), x.data<X>(), offsets.data<int32_t>(), E,
                                             O, I, accumulate_dweight, stream.cuda()),
        cpu::products<X>().grouped_linear_backward_weight(dweight.data<A>(), dout.data<X>(), x.data<X>(),
                                                          offsets.data<int32_t>(), scratch.bytes, R, E, O, I,
                                                          accumulate_dweight));
  });
}

}  // namespace llmc
