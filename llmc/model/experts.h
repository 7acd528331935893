// experts.h: the feed-forward of a layer with experts (Shazeer et al. 2017), forward and backward, as sequences of ops:
//
//   router     logits in fp32; the k experts with the largest scores, and their weights
//   dispatch   rows in the order of their experts; with a capacity, rows that come too late in their sequence are
//              dropped
//   experts    down(SwiGLU of gate and up), each for its own rows (expert_products.h)
//   combine    the sum of a row's k outputs with their weights, in the order of its choices
//   shared     one more expert for all rows, perhaps times the sigmoid of a gate of its own
//
// Sizes: as in layer.h and activations.h. The choice of experts for each row stays on the device.
#pragma once
#include "model/expert_products.h"

namespace llmc {

// Which experts the rows of a layer go to, and what a training step records about it.
class ExpertRouter : SparseLayer {
 public:
  explicit ExpertRouter(const SparseLayer& layer) : SparseLayer(layer) {}

  // Computes the choices of the rows of norm2 (S, C), their weights and their order by expert.
  void forward() const {
    const Tensor logits = rows(e.logits), choices = rows(e.choices);
    router_logits(logits, rows(a.norm2), unit.weight("moe.router.weight"), stream());
    router_forward(choices, rows(e.weights), logits, r.bias, config.router(), stream());
    const bool records = r.training && r.training->records;
    if (records) record();
    const auto capacity = r.capacity();
    const Tensor starts = capacity && r.training->sequences ? of_segments(e.starts) : Tensor{};
    const int64_t ranks = r.placement.ranks, stride = r.padded_rows(a.norm2.shape[0]);
    dispatch_plan(rows(e.places), e.offsets, choices, starts, capacity, r.rows.segments,
                  stride > 0 ? ExpertRoom{ranks * stride, ranks} : ExpertRoom{e.outputs.shape[0]}, stream());
    if (records) count_dropped(r.training->totals.slice(3, {1}), n * config.experts.per_token, e.offsets, stream());
  }
  // dlogits (S, E) = ..., from the gradients of the weights (n, k) and from the router's own losses; dx (n, C) += ...
  void backward_input(Tensor dx, Tensor dlogits, Tensor dweights) const {
    const RouterLosses losses = r.training ? r.training->losses : RouterLosses{};
    const Tensor counts = losses.balance == 0 ? Tensor{} : of_segments(e.counts);
    router_backward(rows(dlogits), dweights, rows(e.logits), rows(e.choices), counts, config.router(), losses,
                    r.rows.segments, stream());
    router_backward_input(dx, rows(dlogits), unit.weight("moe.router.weight"), Accumulate::yes, stream());
  }
  void backward_weight(Tensor dlogits) const {
    const Tensor dweight = unit.gradient("moe.router.weight");
    router_backward_weight(dweight, rows(dlogits), rows(a.norm2), unit.accumulate(dweight), stream());
  }

 private:
  Tensor of_segments(const Tensor& t) const { return parallel::rows_of(t, {0, r.rows.segments.count(n)}); }

  // Adds to the records of training, and keeps the counts over sequences for the balancing loss and the capacity.
  void record() const {
    auto scope = group.arena.scope();
    const ExpertTraining& training = *r.training;
    const auto& order = training.sequences;
    const int64_t most = e.counts.shape[0], E = config.experts.count;
    const int64_t ranks = order ? order->ranks() : 1, me = group.ranks[GroupName::sequences].rank();
    auto table = [&](const char* name, DType dtype, int64_t columns) {
      return group.temporary(name, dtype, {ranks, most, columns});
    };
    const Tensor counts = order ? table("choices of all ranks", DType::int32, E) : e.counts,
                 probabilities = table("router probabilities", e.logits.dtype, E),
                 sums = table("router sums", e.logits.dtype, 2);
    auto mine = [&](const Tensor& t) {
      const int64_t columns = t.shape[t.shape.rank() - 1];
      return t.slice(order ? me * most * columns : 0, {most, columns});
    };
    auto my_segments = [&](const Tensor& t) { return of_segments(mine(t)); };
    for (const Tensor& t : {counts, probabilities, sums}) zero(mine(t), stream());
    if (n > 0)
      router_statistics(my_segments(counts), my_segments(probabilities), my_segments(sums), rows(e.logits),
                        rows(e.choices), config.router(), r.rows.segments, stream());
    add_expert_counts(training.chosen, mine(counts), stream());
    const Tensor losses = training.totals.slice(0, {3});
    if (!order)
      return router_losses(losses, my_segments(counts), my_segments(probabilities), my_segments(sums), config.router(),
                           r.rows.sequence, stream());
    for (const Tensor& t : {counts, probabilities, sums}) group.ranks[GroupName::sequences].all_gather(t, stream());
    segment_starts(e.counts, e.starts, counts, *order, me, stream());
    if (me > 0) return;  // the first of the ranks counts the losses of their sequences
    const int64_t B = order->count();
    const Tensor of_all = group.temporary("choices in sequences", DType::int32, {B, E}),
                 probabilities_of_all = group.temporary("router probabilities of sequences", e.logits.dtype, {B, E}),
                 sums_of_all = group.temporary("router sums of sequences", e.logits.dtype, {B, 2});
    join_segments(of_all, probabilities_of_all, sums_of_all, counts, probabilities, sums, *order, stream());
    router_losses(losses, of_all, probabilities_of_all, sums_of_all, config.router(), r.rows.sequence, stream());
  }
};

// The expert that every row passes through; its output may be multiplied by the sigmoid of a gate.
class SharedExpert : SparseLayer {
 public:
  explicit SharedExpert(const SparseLayer& layer) : SparseLayer(layer) {}
  bool exists() const { return config.experts.shared > 0; }

  // Without the last product if there is no gate: the backward does not need it.
  void forward() const {
    if (!exists()) return;
    up().forward(e.shared_up, a.norm2, gathered.norm2);
    activation();
    if (!gated()) return;
    down().forward(e.shared_out, e.shared_activated);
    router_logits(rows(e.gate_logits), rows(a.norm2), unit.weight("moe.shared_gate.weight"), stream());
  }
  void activation() const {
    if (exists()) swiglu_forward(e.shared_activated, e.shared_up, stream());
  }
  // out (S, C) += ...
  void add_output(Tensor out) const {
    auto scope = group.arena.scope();
    if (gated()) return combine_rows(rows(out), rows(e.shared_out), gate().weights, {}, Accumulate::yes, stream());
    if (!exists()) return;
    const Tensor shared = like("output of the shared expert", out);
    down().forward(shared, e.shared_activated);
    residual_forward(out, out, shared, stream());
  }
  // dx (S, C) = ..., from dout; sets its part of d.
  void backward(Tensor dx, const OutputGradients::OfExperts& d, Tensor dout) const {
    if (!exists()) return;
    auto scope = group.arena.scope();
    if (gated()) {
      const Tensor logits = rows(e.gate_logits);
      const Tensor dgate = group.temporary("gradient of the gate", logits.dtype, {n, 1});
      const Gate g = gate();
      combine_backward(rows(d.shared_out), dgate, rows(dout), rows(e.shared_out), g.weights, {}, stream());
      zero_padding(d.shared_out);
      router_backward(rows(d.gate_logits), dgate, logits, g.choices, {}, gate_router, {}, r.rows.segments, stream());
    } else if (d.shared_out.bytes != dout.bytes) {
      copy(d.shared_out, dout, stream());
    }
    const Tensor dactivated =
        group.temporary("gradient of activated of the shared expert", dx.dtype, e.shared_activated.shape);
    down().backward_input(dactivated, d.shared_out);
    swiglu_backward(d.shared_up, dactivated, e.shared_up, stream());
    up().backward_input(dx, d.shared_up);
  }
  // dx (n, C) += the part of it that went through the gate.
  void backward_gate(Tensor dx, const OutputGradients::OfExperts& d) const {
    if (gated())
      router_backward_input(dx, rows(d.gate_logits), unit.weight("moe.shared_gate.weight"), Accumulate::yes, stream());
  }
  void backward_weight(const OutputGradients::OfExperts& d) const {
    if (!exists()) return;
    down().backward_weight(d.shared_out, e.shared_activated);
    up().backward_weight(d.shared_up, a.norm2, gathered.norm2);
    if (!gated()) return;
    const Tensor dgate = unit.gradient("moe.shared_gate.weight");
    router_backward_weight(dgate, rows(d.gate_logits), rows(a.norm2), unit.accumulate(dgate), stream());
  }

 private:
  // The gate is a router of one expert, with sigmoid scores. Every row has one choice, so the rows stay in their order.
  static constexpr Router gate_router = {.E = 1, .k = 1, .scores = RouterScores::sigmoid, .normalised = false};
  struct Gate {
    Tensor choices, weights;  // (n, 1) each
  };
  Gate gate() const {
    auto alloc = [&](DType dtype) { return group.temporary("gate of the shared expert", dtype, {n, 1}); };
    const Gate g{alloc(DType::int32), alloc(e.gate_logits.dtype)};
    router_forward(g.choices, g.weights, rows(e.gate_logits), {}, gate_router, stream());
    return g;
  }
  bool gated() const { return config.experts.shared_gate; }
  parallel::ColumnLinear up() const { return column("moe.shared.gate", 2); }
  parallel::RowLinear down() const { return row("moe.shared.down"); }
};

class ExpertLayer : SparseLayer {
 public:
  explicit ExpertLayer(const Layer& layer) : SparseLayer(layer) {}

  // Without the sum of the outputs, which the backward does not need.
  void forward() const {
    router().forward();
    if (exchanged()) return ExpertExchange(*this).forward([&] { shared().forward(); });
    rows_by_expert(e.received.rows);
    own().forward(e.outputs);
    shared().forward();
  }
  // out (S, C) = the sum of the outputs.
  void output(Tensor out) const {
    combine_rows(rows(out), e.outputs, rows(e.weights), rows(e.places), Accumulate::no, stream());
    zero_padding(out);
    shared().add_output(out);
  }
  void recompute(Recompute recompute) const {
    if (recompute == Recompute::norm && !exchanged()) rows_by_expert(e.received.rows);
    own().activation();
    shared().activation();
  }

  // dx = the gradient of norm2 (S, C), from dout, the gradient of the sum; the gradients of the units += ... It may
  // overwrite the outputs of the experts with their gradients.
  void backward(Tensor dx, Tensor dout) const {
    auto scope = group.arena.scope();
    const OutputGradients::OfExperts d = later != nullptr ? later->experts : gradients(dout);
    const Tensor doutputs = exchanged() ? e.outputs : d.outputs;  // of the choices of this rank's rows
    const Tensor dweights =
        group.temporary("gradient of the weights of experts", e.weights.dtype, {n, config.experts.per_token});
    combine_backward(doutputs, dweights, rows(dout), e.outputs, rows(e.weights), rows(e.places), stream());
    const Tensor drows = like("gradient of rows by expert", e.outputs);
    if (exchanged()) {
      ExpertExchange(*this).backward(drows, doutputs, [&] { shared().backward(dx, d, dout); });
    } else {
      shared().backward(dx, d, dout);
      own().backward_input(drows, d.up, d.outputs);
    }
    const Tensor dstream = rows(dx);
    combine_rows(dstream, drows, {}, rows(e.places), shared().exists() ? Accumulate::yes : Accumulate::no, stream());
    zero_padding(dx);
    router().backward_input(dstream, d.logits, dweights);
    shared().backward_gate(dstream, d);
    if (later == nullptr) backward_weight(d);
  }
  void backward_weight() const { backward_weight(later->experts); }

 private:
  ExpertRouter router() const { return ExpertRouter(*this); }
  SharedExpert shared() const { return SharedExpert(*this); }
  OwnExperts own() const { return {*this, e.received}; }

  // The gradients of the outputs of the products, if no weight part comes later.
  OutputGradients::OfExperts gradients(Tensor dout) const {
    auto of = [&](const char* name, const Tensor& t) { return t.empty() ? Tensor{} : like(name, t); };
    return {.logits = of("gradient of router logits", e.logits),
            .up = exchanged() ? Tensor{} : of("gradient of up of experts", e.received.up),
            .outputs = e.outputs,
            .shared_up = of("gradient of up of the shared expert", e.shared_up),
            .shared_out = e.shared_out.empty() ? dout : of("gradient of the output of the shared expert", e.shared_out),
            .gate_logits = of("gradient of the gate of the shared expert", e.gate_logits)};
  }
  // The gradients of the matrices that multiply rows of the residual stream or of an expert += ...
  void backward_weight(const OutputGradients::OfExperts& d) const {
    if (!exchanged()) own().backward_weight(d.up, d.outputs);  // otherwise ExpertExchange::backward() has done it
    router().backward_weight(d.logits);
    shared().backward_weight(d);
  }
};

}  // namespace llmc
