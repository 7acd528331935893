// experts.h: the feed-forward of a layer with experts (Shazeer et al. 2017), forward and backward, as sequences of ops:
//
//   router     logits in fp32; the k experts with the largest scores, and their weights
//   dispatch   rows in the order of their experts; with a capacity, those that come too late in their sequence are left
//              out
//   experts    down(SwiGLU of gate and up), each for its own rows: grouped products
//   combine    the sum of a row's k outputs with their weights, in the order of its choices
//   shared     one more expert for all rows, perhaps times the sigmoid of a gate of its own
//
// Sizes: as in transformer.h and activations.h. Which rows go to which expert stays on the device.
#pragma once
#include <functional>
#include <optional>
#include <string>

#include "dist/parallel.h"
#include "dist/unit_state.h"
#include "model/activations.h"
#include "model/config.h"
#include "ops/ops.h"

namespace llmc {

// Rows of the residual stream that a rank has, and of which sequences.
struct StreamRows {
  int64_t count = 0;  // without padding
  Segments segments = {1};
  int64_t sequence = 1;  // rows of a whole one, on all ranks
};

// What training has of the experts of a layer.
struct ExpertTraining {
  RouterLosses losses;
  std::optional<int64_t> capacity;  // rows of an expert from one sequence; none: any number (dropless)
  Tensor totals;                    // (4) fp64 +=: the losses of router_losses(), and choices that were dropped
  Tensor chosen;                    // (E) fp64 +=: how often each expert was chosen
};

// What a layer with experts needs besides its inputs.
struct Routing {
  StreamRows rows;
  Tensor bias;                                // (E) of the scores, for the choice alone; or an empty tensor
  std::optional<ExpertTraining> training;     // none: nothing is dropped or recorded
  std::function<const UnitState&()> experts;  // acquires their unit, if it is not yet
};

namespace detail {

// The matrices of the experts that a rank has, (E, 2 F, C) and (E, C, F): of their weights, or of gradients.
struct ExpertMatrices {
  Tensor gate_up, down;
  enum class Of : uint8_t { weights, gradients };
  ExpertMatrices(const UnitState& unit, const ModelConfig& c, Of of) {
    const auto& params = unit.spec().params;  // gate and up of each, then the downs
    const int E = static_cast<int>(params.size() / 3);
    auto matrix = [&](size_t first, int fused) {
      const std::string& name = params[first].name;
      return of == Of::weights ? unit.weight(name, fused) : unit.gradient(name, fused);
    };
    gate_up = matrix(0, 2 * E).reshaped({E, 2 * c.experts.width, c.n_embd});
    down = matrix(static_cast<size_t>(2 * E), E).reshaped({E, c.n_embd, c.experts.width});
  }
};

// The shared expert's gate is a router of one expert, with sigmoid scores.
inline constexpr Router shared_gate = {.E = 1, .k = 1, .scores = RouterScores::sigmoid, .normalized = false};

// Its choices, weights and places, from its logits.
struct SharedGate {
  Tensor choices, weights, places;  // (n, 1) each
  SharedGate(Tensor logits, const Segments& segments, const parallel::Group& p) {
    const int64_t n = logits.shape[0];
    auto integers = [&](const Shape& shape) { return p.temporary("gate of the shared expert", DType::int32, shape); };
    choices = integers({n, 1});
    places = integers({n, 1});
    weights = p.temporary("gate of the shared expert", logits.dtype, {n, 1});
    router_forward(choices, weights, logits, {}, shared_gate, p.compute);
    auto scope = p.arena.scope();
    dispatch_plan(places, integers({n}), integers({2}), choices, {}, std::nullopt, segments, p.compute);
  }
};

// The first n rows, those that are not padding.
inline Tensor first_rows(const Tensor& t, int64_t n) { return parallel::rows_of(t, {0, n}); }
inline void zero_padding(const Tensor& t, int64_t n, Stream& stream) {
  if (const int64_t S = t.shape[0]; n < S) zero(parallel::rows_of(t, {n, S - n}), stream);
}
// The number of rows that experts have, on the device.
inline Tensor expert_rows(const ExpertActivations& a) { return a.offsets.slice(a.offsets.shape[0] - 1, {1}); }

inline void expert_activation(const ExpertActivations& a, Stream& stream) {
  swiglu_forward(a.activated, a.up, stream, expert_rows(a));
  if (!a.shared_up.empty()) swiglu_forward(a.shared_activated, a.shared_up, stream);
}
inline void rows_by_expert(const ExpertActivations& a, Tensor x, const ModelConfig& c, const Routing& r,
                           Stream& stream) {
  dispatch_rows(a.rows, first_rows(x, r.rows.count), a.sources, a.offsets, c.experts.per_token, stream);
}

// All but the sum of the outputs, which the backward does not need.   x (S, C); gathered: room for x as all ranks have
// it, or an empty tensor
inline void experts_interior(const ExpertActivations& a, Tensor x, Tensor gathered, const UnitState& unit,
                             const ModelConfig& c, const Routing& r, const parallel::Group& p) {
  const int64_t n = r.rows.count;
  const Tensor rows = first_rows(x, n), logits = first_rows(a.logits, n), choices = first_rows(a.choices, n);
  router_logits(logits, rows, unit.weight("moe.router.weight"), p.compute);
  router_forward(choices, first_rows(a.weights, n), logits, r.bias, c.router(), p.compute);
  dispatch_plan(first_rows(a.places, n), a.sources, a.offsets, choices, {},
                r.training ? r.training->capacity : std::nullopt, r.rows.segments, p.compute);
  if (!a.shared_up.empty())
    parallel::column_linear(a.shared_up, x, unit.weight("moe.shared.gate.weight", 2), {}, gathered, p);
  rows_by_expert(a, x, c, r, p.compute);
  const ExpertMatrices experts(r.experts(), c, ExpertMatrices::Of::weights);
  grouped_linear_forward(a.up, a.rows, experts.gate_up, a.offsets, p.compute);
  expert_activation(a, p.compute);
  grouped_linear_forward(a.outputs, a.activated, experts.down, a.offsets, p.compute);
  if (a.shared_out.empty()) return;
  parallel::row_linear(a.shared_out, a.shared_activated, unit.weight("moe.shared.down.weight"), {}, p);
  router_logits(first_rows(a.gate_logits, n), rows, unit.weight("moe.shared_gate.weight"), p.compute);
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
    const SharedGate gate(first_rows(a.gate_logits, n), r.rows.segments, p);
    combine_rows(first_rows(out, n), a.shared_out, gate.weights, gate.places, Accumulate::yes, p.compute);
  } else if (!a.shared_up.empty()) {
    const Tensor shared = p.temporary("output of the shared expert", out.dtype, out.shape);
    parallel::row_linear(shared, a.shared_activated, unit.weight("moe.shared.down.weight"), {}, p);
    residual_forward(out, out, shared, p.compute);
  }
}

// Adds to what training records, and keeps what its balancing loss needs.
inline void record_routing(const ExpertActivations& a, const ModelConfig& c, const Routing& r,
                           const parallel::Group& p) {
  const int64_t n = r.rows.count, segments = r.rows.segments.count(n), E = c.experts.count;
  if (!r.training || n == 0) return;
  auto scope = p.arena.scope();
  const Tensor logits = first_rows(a.logits, n), choices = first_rows(a.choices, n);
  const Tensor counts = first_rows(a.counts, segments);
  const Tensor probabilities = p.temporary("router probabilities", logits.dtype, {segments, E});
  const Tensor sums = p.temporary("router sums", logits.dtype, {segments, 2});
  router_statistics(counts, probabilities, sums, logits, choices, c.router(), r.rows.segments, p.compute);
  router_losses(r.training->totals.slice(0, {3}), counts, probabilities, sums, c.router(), r.rows.sequence, p.compute);
  count_choices(r.training->chosen, r.training->totals.slice(3, {1}), counts, a.offsets, p.compute);
}

// The gradients of the matrices that multiply rows of the residual stream or of an expert += ...: the weight part.
// d: the gradients of the outputs of the products
inline void experts_backward_weight(const OutputGradients::OfExperts& d, const ExpertActivations& a, Tensor x,
                                    Tensor gathered, const UnitState& unit, const ModelConfig& c, const Routing& r,
                                    const parallel::Group& p) {
  const int64_t n = r.rows.count;
  const Tensor rows = first_rows(x, n);
  const ExpertMatrices experts(r.experts(), c, ExpertMatrices::Of::gradients);
  grouped_linear_backward_weight(experts.down, d.outputs, a.activated, a.offsets, p.compute);
  grouped_linear_backward_weight(experts.gate_up, d.up, a.rows, a.offsets, p.compute);
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

// dx = the gradient of x (S, C), from dout, that of the sum; the gradients of the units += ... With `later` it is the
// input part alone, which sets them. Otherwise the outputs of the experts are replaced by their gradients.
inline void experts_backward(Tensor dx, Tensor dout, const OutputGradients::OfExperts* later,
                             const ExpertActivations& a, Tensor x, Tensor gathered, const UnitState& unit,
                             const ModelConfig& c, const Routing& r, const parallel::Group& p) {
  auto scope = p.arena.scope();
  Stream& stream = p.compute;
  const int64_t n = r.rows.count;
  OutputGradients::OfExperts d;
  if (later != nullptr) {
    d = *later;
  } else {
    auto like = [&](const char* name, const Tensor& t) {
      return t.empty() ? Tensor{} : p.temporary(name, t.dtype, t.shape);
    };
    d = {.logits = like("gradient of router logits", a.logits),
         .up = like("gradient of up of experts", a.up),
         .outputs = a.outputs,
         .shared_up = like("gradient of up of the shared expert", a.shared_up),
         .shared_out = like("gradient of the output of the shared expert", a.shared_out),
         .gate_logits = like("gradient of the gate of the shared expert", a.gate_logits)};
    if (d.shared_out.empty()) d.shared_out = dout;
  }

  if (!a.shared_out.empty()) {
    const Tensor logits = first_rows(a.gate_logits, n),
                 dgate = p.temporary("gradient of the gate", logits.dtype, {n, 1});
    const SharedGate gate(logits, r.rows.segments, p);
    combine_backward(first_rows(d.shared_out, n), dgate, first_rows(dout, n), first_rows(a.shared_out, n), gate.weights,
                     gate.places, stream);
    zero_padding(d.shared_out, n, stream);
    router_backward(first_rows(d.gate_logits, n), dgate, logits, gate.choices, {}, shared_gate, {}, r.rows.segments,
                    stream);
  } else if (!a.shared_up.empty() && later != nullptr) {
    copy(d.shared_out, dout, stream);
  }
  if (!a.shared_up.empty()) {  // it sets dx, the others add to it
    auto shared_scope = p.arena.scope();
    const Tensor dactivated =
        p.temporary("gradient of activated of the shared expert", x.dtype, a.shared_activated.shape);
    parallel::row_linear_backward_input(dactivated, d.shared_out, unit.weight("moe.shared.down.weight"), {}, p);
    swiglu_backward(d.shared_up, dactivated, a.shared_up, stream);
    parallel::column_linear_backward_input(dx, d.shared_up, unit.weight("moe.shared.gate.weight", 2), p, [] {});
  }

  const ExpertMatrices experts(r.experts(), c, ExpertMatrices::Of::weights);
  const Tensor dweights = p.temporary("gradient of the weights of experts", a.weights.dtype, {n, c.experts.per_token});
  combine_backward(d.outputs, dweights, first_rows(dout, n), a.outputs, first_rows(a.weights, n),
                   first_rows(a.places, n), stream);
  const Tensor dactivated = p.temporary("gradient of activated of experts", x.dtype, a.activated.shape);
  grouped_linear_backward_input(dactivated, d.outputs, experts.down, a.offsets, stream);
  swiglu_backward(d.up, dactivated, a.up, stream, expert_rows(a));
  const Tensor drows = p.temporary("gradient of rows by expert", x.dtype, a.rows.shape);
  grouped_linear_backward_input(drows, d.up, experts.gate_up, a.offsets, stream);
  const Tensor dstream = first_rows(dx, n);
  combine_rows(dstream, drows, {}, first_rows(a.places, n), a.shared_up.empty() ? Accumulate::no : Accumulate::yes,
               stream);
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

}  // namespace detail
}  // namespace llmc
