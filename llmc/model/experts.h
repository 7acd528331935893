// experts.h: the feed-forward of a layer with experts (Shazeer et al. 2017), forward and backward, as sequences of ops:
//
//   router     logits in fp32; the k experts with the largest scores, and their weights
//   dispatch   rows in the order of their experts; with a capacity, rows that come too late in their sequence are
//              dropped
//   experts    down(SwiGLU of gate and up), each for its own rows: grouped products. If ranks share the experts of a
//              layer (--ep), the rows go to the ranks that have their experts and come back (dist/expert_exchange.h),
//              while the shared expert computes
//   combine    the sum of a row's k outputs with their weights, in the order of its choices
//   shared     one more expert for all rows, perhaps times the sigmoid of a gate of its own
//
// Sizes: as in transformer.h and activations.h. The choice of experts for each row stays on the device.
#pragma once

#include "model/expert_products.h"
#include "model/routing.h"

namespace llmc::detail {

// The shared expert's gate is a router of one expert, with sigmoid scores.
inline constexpr Router shared_gate = {.E = 1, .k = 1, .scores = RouterScores::sigmoid, .normalised = false};

// The choices and weights of this router, from its logits. Every row has one choice, so the rows stay in their order.
struct SharedGate {
  Tensor choices, weights;  // (n, 1) each
  SharedGate(Tensor logits, const parallel::Group& p) {
    auto alloc = [&](DType dtype) {
      return p.temporary("gate of the shared expert", dtype, {logits.shape[0], int64_t{1}});
    };
    choices = alloc(DType::int32);
    weights = alloc(logits.dtype);
    router_forward(choices, weights, logits, {}, shared_gate, p.compute);
  }
};
inline void expert_activation(const ExpertActivations& a, Stream& stream) {
  swiglu_forward(a.received.activated, a.received.up, stream, number_of_rows(a.received));
  if (!a.shared_up.empty()) swiglu_forward(a.shared_activated, a.shared_up, stream);
}

// ---- Forward --------------------------------------------------------------------------------------------------------

// The forward without the sum of the outputs, which the backward does not need.   x (S, C); gathered: room for the x of
// all ranks, or an empty tensor
inline void experts_interior(const ExpertActivations& a, Tensor x, Tensor gathered, const UnitState& unit,
                             const ModelConfig& c, const Routing& r, const parallel::Group& p) {
  const int64_t n = r.rows.count;
  route(a, x, unit, c, r, p);
  auto shared_expert = [&] {
    if (a.shared_up.empty()) return;
    parallel::column_linear(a.shared_up, x, unit.weight("moe.shared.gate.weight", 2), {}, gathered, p);
    swiglu_forward(a.shared_activated, a.shared_up, p.compute);
    if (a.shared_out.empty()) return;
    parallel::row_linear(a.shared_out, a.shared_activated, unit.weight("moe.shared.down.weight"), {}, p);
    router_logits(first_rows(a.gate_logits, n), first_rows(x, n), unit.weight("moe.shared_gate.weight"), p.compute);
  };
  if (c.experts.ranks > 1) return experts_of_all_ranks(a, x, c, r, p, shared_expert);
  rows_by_expert(a.received.rows, a, x, r, p.compute);
  experts_forward(a.outputs, a.received, ExpertMatrices(r.experts(), c, ExpertMatrices::Of::weights), p.compute);
  shared_expert();
}
// The part of it that is recomputed together with the norm before it.
inline void recompute_rows(const ExpertActivations& a, Tensor x, const ModelConfig& c, const Routing& r,
                           Stream& stream) {
  if (c.experts.ranks == 1) rows_by_expert(a.received.rows, a, x, r, stream);
}

// out (S, C) = the sum of the outputs.
inline void experts_sum(Tensor out, const ExpertActivations& a, const UnitState& unit, const Routing& r,
                        const parallel::Group& p) {
  const int64_t n = r.rows.count;
  combine_rows(first_rows(out, n), a.outputs, first_rows(a.weights, n), first_rows(a.places, n), Accumulate::no,
               p.compute);
  zero_padding(out, n, p.compute);
  auto scope = p.arena.scope();
  if (!a.shared_out.empty()) {
    const SharedGate gate(first_rows(a.gate_logits, n), p);
    combine_rows(first_rows(out, n), first_rows(a.shared_out, n), gate.weights, {}, Accumulate::yes, p.compute);
  } else if (!a.shared_up.empty()) {
    const Tensor shared = p.temporary("output of the shared expert", out.dtype, out.shape);
    parallel::row_linear(shared, a.shared_activated, unit.weight("moe.shared.down.weight"), {}, p);
    residual_forward(out, out, shared, p.compute);
  }
}

// ---- Backward -------------------------------------------------------------------------------------------------------

// The weight part: the gradients of the matrices that multiply rows of the residual stream or of an expert += ...
// d: the gradients of the outputs of the products
inline void experts_backward_weight(const OutputGradients::OfExperts& d, const ExpertActivations& a, Tensor x,
                                    Tensor gathered, const UnitState& unit, const ModelConfig& c, const Routing& r,
                                    const parallel::Group& p) {
  const int64_t n = r.rows.count;
  const Tensor rows = first_rows(x, n);
  if (c.experts.ranks == 1)  // otherwise backward_of_all_ranks() has done it
    experts_backward_matrices(d.outputs, d.up, a.received, {r.experts(), c, ExpertMatrices::Of::gradients}, p.compute);
  router_backward_weight(unit.gradient("moe.router.weight"), first_rows(d.logits, n), rows, p.compute);
  if (a.shared_activated.empty()) return;
  parallel::row_linear_backward_weight(unit.gradient("moe.shared.down.weight"), {}, d.shared_out, a.shared_activated,
                                       {}, p);
  const Tensor dshared = unit.gradient("moe.shared.gate.weight", 2);
  if (gathered.empty()) parallel::column_linear_backward_weight(dshared, {}, d.shared_up, x, p);
  else linear_backward_weight(dshared, {}, d.shared_up, first_rows(gathered, d.shared_up.shape[0]), p.compute);
  if (!d.gate_logits.empty())
    router_backward_weight(unit.gradient("moe.shared_gate.weight"), first_rows(d.gate_logits, n), rows, p.compute);
}

// The shared expert: dx (S, C) = ..., from dout; sets its part of d.
inline void shared_expert_backward(Tensor dx, const OutputGradients::OfExperts& d, Tensor dout,
                                   const ExpertActivations& a, const UnitState& unit, const Routing& r,
                                   const parallel::Group& p) {
  auto scope = p.arena.scope();
  const int64_t n = r.rows.count;
  if (!a.shared_out.empty()) {
    const Tensor logits = first_rows(a.gate_logits, n);
    const Tensor dgate = p.temporary("gradient of the gate", logits.dtype, {n, 1});
    const SharedGate gate(logits, p);
    combine_backward(first_rows(d.shared_out, n), dgate, first_rows(dout, n), first_rows(a.shared_out, n), gate.weights,
                     {}, p.compute);
    zero_padding(d.shared_out, n, p.compute);
    router_backward(first_rows(d.gate_logits, n), dgate, logits, gate.choices, {}, shared_gate, {}, r.rows.segments,
                    p.compute);
  } else if (d.shared_out.bytes != dout.bytes) {
    copy(d.shared_out, dout, p.compute);
  }
  const Tensor dactivated =
      p.temporary("gradient of activated of the shared expert", dx.dtype, a.shared_activated.shape);
  parallel::row_linear_backward_input(dactivated, d.shared_out, unit.weight("moe.shared.down.weight"), {}, p);
  swiglu_backward(d.shared_up, dactivated, a.shared_up, p.compute);
  parallel::column_linear_backward_input(dx, d.shared_up, unit.weight("moe.shared.gate.weight", 2), p, [] {});
}

// dx = the gradient of x (S, C), from dout, the gradient of the sum; the gradients of the units += ... With `later`
// only the input part runs, and sets *later. It may overwrite the outputs of the experts with their gradients.
inline void experts_backward(Tensor dx, Tensor dout, const OutputGradients::OfExperts* later,
                             const ExpertActivations& a, Tensor x, Tensor gathered, const UnitState& unit,
                             const ModelConfig& c, const Routing& r, const parallel::Group& p) {
  auto scope = p.arena.scope();
  Stream& stream = p.compute;
  const int64_t n = r.rows.count;
  const bool exchanged = c.experts.ranks > 1, has_shared = !a.shared_up.empty();
  auto like = [&](const char* name, const Tensor& t) {
    return t.empty() ? Tensor{} : p.temporary(name, t.dtype, t.shape);
  };
  OutputGradients::OfExperts d;
  if (later != nullptr) {
    d = *later;
  } else {
    d = {.logits = like("gradient of router logits", a.logits),
         .up = exchanged ? Tensor{} : like("gradient of up of experts", a.received.up),
         .outputs = a.outputs,
         .shared_up = like("gradient of up of the shared expert", a.shared_up),
         .shared_out = a.shared_out.empty() ? dout : like("gradient of the output of the shared expert", a.shared_out),
         .gate_logits = like("gradient of the gate of the shared expert", a.gate_logits)};
  }
  const Tensor doutputs = exchanged ? a.outputs : d.outputs;  // of the choices of this rank's rows
  const Tensor dweights = p.temporary("gradient of the weights of experts", a.weights.dtype, {n, c.experts.per_token});
  combine_backward(doutputs, dweights, first_rows(dout, n), a.outputs, first_rows(a.weights, n),
                   first_rows(a.places, n), stream);
  auto shared_expert = [&] {
    if (has_shared) shared_expert_backward(dx, d, dout, a, unit, r, p);
  };
  const Tensor drows = like("gradient of rows by expert", a.outputs);
  if (exchanged) {
    backward_of_all_ranks(drows, doutputs, a, x, c, r, p, shared_expert);
  } else {
    shared_expert();
    experts_backward_input(drows, d.up, d.outputs, a.received, {r.experts(), c, ExpertMatrices::Of::weights}, p);
  }
  const Tensor dstream = first_rows(dx, n);
  combine_rows(dstream, drows, {}, first_rows(a.places, n), has_shared ? Accumulate::yes : Accumulate::no, stream);
  zero_padding(dx, n, stream);

  const RouterLosses losses = r.training ? r.training->losses : RouterLosses{};
  const Tensor counts = losses.balance == 0 ? Tensor{} : first_rows(a.counts, r.rows.segments.count(n));
  const Tensor dlogits = first_rows(d.logits, n);
  router_backward(dlogits, dweights, first_rows(a.logits, n), first_rows(a.choices, n), counts, c.router(), losses,
                  r.rows.segments, stream);
  router_backward_input(dstream, dlogits, unit.weight("moe.router.weight"), Accumulate::yes, stream);
  if (!d.gate_logits.empty())
    router_backward_input(dstream, first_rows(d.gate_logits, n), unit.weight("moe.shared_gate.weight"), Accumulate::yes,
                          stream);
  if (later == nullptr) experts_backward_weight(d, a, x, gathered, unit, c, r, p);
}

}  // namespace llmc::detail
