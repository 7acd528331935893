// draws.h: models, options and layouts drawn at random for --selftest-minutes, in any combination that is possible. A
// draw is a pure function of its number and of the most ranks it may have, so a number repeats it.
//
// Consecutive draws share a model and the options that change what is computed, which one rank computes once for all;
// the layout and the options that must not change results are drawn for each.
//
// What pipedream computes between two flushes is something else than one rank does (contract 4); test_pipedream.cpp has
// a reference for that. Here every update is followed by a flush, and then it is the same: with one micro-batch in a
// step, and without clipping, for which each stage has a norm of its own.
#pragma once
#include "core/rng.h"
#include "model/layout_faults.h"
#include "run/selftest/layouts.h"
#include "schedule/stage_partition.h"
#include "train/step_config.h"

namespace llmc::selftest {

inline constexpr uint64_t draws_of_model = 4;  // that share a model

struct Draw {
  StepConfig step;
  double max_norm;  // to which gradients are clipped; 0: they are not
  int64_t sequences() const { return step.batch.B * step.micro_batches * step.layout.readers(); }
};

// Random choices, one after the other.
class Dice {
 public:
  Dice(uint64_t number, std::string_view purpose) : rng_(number, purpose) {}

  uint64_t below(uint64_t n) { return rng_.bits(next_++) % n; }
  bool one_in(uint64_t n) { return below(n) == 0; }
  template <class X>
  X pick(const std::vector<X>& values) {
    return values[below(values.size())];
  }
  template <class X>
  X pick(std::initializer_list<X> values) {
    return values.begin()[below(values.size())];
  }
  // n numbers that add up to `sum`, each of them at least 1.
  std::vector<int64_t> parts(int64_t sum, int64_t n) {
    std::vector<int64_t> cuts, parts;
    for (int64_t cut = 1; cut < sum; ++cut) cuts.push_back(cut);
    while (std::ssize(cuts) >= n) cuts.erase(cuts.begin() + static_cast<int64_t>(below(cuts.size())));
    cuts.push_back(sum);
    for (int64_t before = 0; const int64_t cut : cuts) parts.push_back(cut - std::exchange(before, cut));
    return parts;
  }

 private:
  Philox rng_;
  uint64_t next_ = 0;
};

namespace detail {

inline void draw_experts(Dice& dice, ModelConfig& m, bool fp32) {
  Experts& e = m.experts;
  const bool one_width = m.family.experts == ExpertFields::one_width,
             mixtral = std::string_view(m.family.model_type) == "mixtral";
  e.count = dice.pick({4, 6, 8});
  e.per_token = fp32 ? dice.pick({1, 2, 3}) : 2;  // as init_routes_by_token() has it
  if (mixtral) e.per_token = 2;
  e.normalised = mixtral || (e.per_token > 1 && dice.one_in(2));  // the score of a single expert would be 1
  e.width = one_width ? m.n_ffn : dice.pick({8, 13});
  e.dense_layers.clear();
  if (one_width) return;
  e.every = dice.pick({1, 2});
  if (dice.one_in(2)) e.dense_layers = {m.n_layer > 3 ? 3 : 0};
}

inline ModelConfig draw_model(Dice& dice, bool fp32) {
  const Family& family = families[dice.below(std::size(families))];
  const bool grouped = family.norm == Norm::rmsnorm;
  ModelConfig m = awkward_model(family.model_type, dice.one_in(2));
  m.n_head = dice.pick({3, 4, 6, 8, 8});
  m.n_kv_head = grouped ? dice.pick(divisors(m.n_head)) : m.n_head;
  m.head_size = grouped ? dice.pick({4, 6}) : dice.pick({4, 5});
  m.n_embd = family.own_head_size ? 22 : m.q_size();
  m.n_ffn = m.n_head * dice.pick({5, 7});
  m.vocab_size = dice.pick({97, 128, 131});
  m.n_positions = dice.pick({19, 24, 28, 40, 48});
  m.n_layer = dice.pick({3, 4, 5, 8});
  if (m.experts.count > 0) draw_experts(dice, m, fp32);
  return m;
}

// The model and the options that change what is computed; the layout is that of one rank.
inline Draw draw_task(Dice& dice) {
  Draw d{};
  StepConfig& step = d.step;
  const bool fp32 = dice.one_in(2);
  step.precision = fp32 ? DType::fp32 : DType::bf16;
  step.precision.masters = fp32 || dice.one_in(2);
  step.model = draw_model(dice, fp32);
  step.batch = {1, step.model.n_positions};
  step.micro_batches = dice.pick({24, 28, 30, 40});
  step.documents = dice.pick({Documents::together, Documents::apart});
  step.layout.zero.optimizer = dice.pick(all_values<Optimizer>());
  if (step.layout.zero.optimizer == Optimizer::muon)
    step.layout.zero.muon = {.coefficients = dice.pick(all_values<NewtonSchulz>()),
                             .heads = dice.pick(all_values<HeadGroups>())};
  d.max_norm = dice.pick({0.0, 1.0});
  if (step.model.experts.count > 0) {
    step.experts = {.aux_loss = dice.pick({0.0, 0.1}), .z_loss = dice.pick({0.0, 0.01})};
    step.experts.bias_rate = dice.pick({0.0, 0.0, 0.02});
    if (dice.one_in(2)) step.experts.capacity_factor = dice.pick({1.0, 1.25});
  }
  step.z_loss = dice.pick({0.0, 0.01});
  step.precision.averages = step.precision.masters && dice.one_in(2);
  if (step.layout.zero.optimizer == Optimizer::muon) step.layout.zero.muon.rows = dice.pick(all_values<MuonRows>());
  // A limit that many heads exceed.
  if (step.model.family.qk_norm == QkNorm::none && dice.one_in(2)) step.qk_clip = 0.01;
  return d;
}

// The axes take turns, in random order, in taking a divisor of the ranks that are left; data parallelism has the rest.
inline void draw_ranks(Dice& dice, int max_ranks, StepConfig& step) {
  Layout& l = step.layout;
  const auto any = [&] { return static_cast<int>(dice.below(static_cast<uint64_t>(max_ranks))) + 1; };
  int64_t left = std::max(any(), any());
  int tensor = 1;
  std::vector<int*> axes = {&l.pipeline.stages, &tensor, &l.context.ranks, &l.zero.replicas};
  while (!axes.empty()) {
    const auto axis = axes.begin() + static_cast<int64_t>(dice.below(axes.size()));
    const int size = dice.one_in(2) ? 1 : static_cast<int>(dice.pick(divisors(left)));
    left /= size;
    **axis = size;
    axes.erase(axis);
  }
  l.zero.shards = static_cast<int>(left) * l.context.ranks;
  const bool by_rows = !dice.one_in(3), overlap = dice.one_in(3);
  l.tensor = tensor_parallel(step.model, tensor, tensor == 1 || by_rows, overlap);
  if (l.context.ranks > 1) l.context.attention = dice.pick(all_values<ContextAttention>());
}

inline void draw_pipeline(Dice& dice, StepConfig& step) {
  PipelineParallel& p = step.layout.pipeline;
  p.schedule = dice.pick(all_values<Schedule>());
  if (has_chunks(p.schedule)) p.chunks_per_stage = p.schedule == Schedule::zb_v ? 2 : dice.pick({2, 2, 3});
  const int chunks = p.chunks();
  // The first and the last chunk may have no layers.
  if (p.stages > 1 && dice.one_in(2) && chunks - 2 < step.model.n_layer) {
    const bool first = dice.one_in(4), last = dice.one_in(4);
    const int with_layers = chunks - first - last;
    if (with_layers > 0 && with_layers <= step.model.n_layer) {
      p.layers = dice.parts(step.model.n_layer, with_layers);
      if (first) p.layers.insert(p.layers.begin(), 0);
      if (last) p.layers.push_back(0);
    }
  }
  if (dice.one_in(4)) p.slices = dice.parts(step.batch.T, static_cast<int64_t>(dice.below(3)) + 2);
}

// A layout, possible or not, and the options that change no more than the order of additions.
inline void draw_layout(Dice& dice, int max_ranks, StepConfig& step) {
  Layout& l = step.layout;
  const int64_t sequences = step.micro_batches;
  draw_ranks(dice, max_ranks, step);
  draw_pipeline(dice, step);
  l.zero.stage = static_cast<int>(dice.below(4));
  l.zero.grad_reduce = dice.pick(all_values<GradReduce>());
  if (dice.one_in(8)) {  // a server has no other axis
    l = {.zero = l.zero, .pipeline = {.schedule = l.pipeline.schedule, .slices = l.pipeline.slices}};
    l.zero.shards = static_cast<int>(dice.below(static_cast<uint64_t>(max_ranks))) + 1;
    l.zero.replicas = 1;
    l.zero.stage = 0;
    l.zero.sync = dice.pick(all_values<DpSync>());
  }
  const bool asynchronous = l.pipeline.schedule == Schedule::pipedream;
  if (asynchronous) l.zero.stage = 0, l.zero.grad_reduce = GradReduce::step;
  const int64_t of_reader = sequences / l.readers();
  step.batch.B = asynchronous ? of_reader : dice.pick(divisors(of_reader));
  step.micro_batches = of_reader / step.batch.B;
  step.recompute = dice.pick(all_values<Recompute>());
  step.segment = step.recompute == Recompute::block ? dice.pick({1, 2, 3}) : 1;
  step.head_chunks = dice.pick({0, 0, 1, 2, 3});
  l.expert = expert_parallel(step.model, 1);
  if (step.model.experts.count == 0) return;
  l.expert.ranks = static_cast<int>(dice.pick(divisors(int64_t{l.zero.shards} * l.tensor.ranks)));
  if (l.expert.ranks > 1) step.experts.imbalance = dice.pick({0.5, 1.0, static_cast<double>(l.expert.ranks)});
}

// Some of the parts of the state that may be in host memory, and who updates them.
inline void draw_offload(Dice& dice, StepConfig& step) {
  if (!dice.one_in(3)) return;
  StepConfig with = step;
  with.layout.zero.offload.piece = dice.pick({64, 1 << 22});
  for (const Offloaded part : all_values<Offloaded>()) {
    if (dice.one_in(2) || (part == Offloaded::master && !step.precision.keeps_masters()) ||
        (part == Offloaded::activations && step.recompute != Recompute::block))
      continue;
    StepConfig more = with;
    more.layout.zero.offload.add(part);
    if (layout_faults(more.layout, more.model).empty()) with = more;
  }
  Offload& offload = with.layout.zero.offload;
  if (offload.has_all_of_update(step.precision) && !step.qk_clip && dice.one_in(2))
    offload.update = OffloadUpdate::host;
  if (offload.any()) step = with;
}

inline bool is_possible(const Draw& d, int64_t sequences) {
  const StepConfig& step = d.step;
  const PipelineParallel& p = step.layout.pipeline;
  const bool sliced = !p.slices.empty(), asynchronous = p.schedule == Schedule::pipedream;
  return step.micro_batches > 0 && d.sequences() == sequences && step.batch.T % step.layout.context.slices() == 0 &&
         (!p.layers.empty() || p.chunks() <= step.model.n_layer) &&
         !(sliced && (step.experts.aux_loss > 0 || step.experts.capacity_factor)) &&
         !(asynchronous && (d.max_norm > 0 || step.qk_clip)) && layout_faults(step.layout, step.model).empty();
}

}  // namespace detail

// Draw `number` of those with at most this many ranks. A layout that is not possible is drawn again.
inline Draw draw(int max_ranks, uint64_t number) {
  Dice of_model(number / draws_of_model, "model of a draw"), of_layout(number, "layout of a draw");
  const Draw task = detail::draw_task(of_model);
  for (int attempt = 0; attempt < 100'000; ++attempt) {
    Draw d = task;
    detail::draw_layout(of_layout, max_ranks, d.step);
    if (!detail::is_possible(d, task.sequences())) continue;
    Dice of_host(number, "offload of a draw");
    detail::draw_offload(of_host, d.step);
    return d;
  }
  throw Error(formatted("draw {} of at most {} ranks: no layout is possible", number, max_ranks));
}

// The layout that must agree bit for bit (contracts 3, 4 and 11): stage 0, without overlap and recomputation, without
// stages, with everything on the device, unless the host updates it, which may round differently; with a tied table,
// whose gradients stages add up in another order, with the same number of stages.
inline StepConfig first_of_its_kind(const StepConfig& step) {
  StepConfig first = step;
  Layout& l = first.layout;
  const bool same_stages = step.model.tied && l.pipeline.stages > 1;
  if (l.zero.sync != DpSync::all_reduce) l.zero.sync = DpSync::parameter_server;
  l.zero.stage = 0;
  Offload offload;
  if (l.zero.offload.updates_at_host()) {
    offload.update = OffloadUpdate::host;
    for (const Offloaded part : {Offloaded::moments, Offloaded::master})
      if (l.zero.offload.has(part)) offload.add(part);
  }
  l.zero.offload = offload;
  l.tensor.overlap = false;
  first.recompute = Recompute::none;
  first.segment = 1;
  PipelineParallel& p = l.pipeline;
  if (!same_stages) p = {.slices = p.slices};
  else if (p.schedule != Schedule::zb_v)
    p = {.schedule = Schedule::gpipe,
         .stages = p.stages,
         .layers = p.chunks_per_stage == 1 ? p.layers : std::vector<int64_t>(),
         .slices = p.slices};
  return first;
}

// ---- In words -------------------------------------------------------------------------------------------------------

// The choices that make up a draw: those that one rank has too, then the others.
struct Choices {
  std::vector<std::string> task, layout;
};
inline Choices choices(const Draw& d) {
  const StepConfig& s = d.step;
  const ModelConfig& m = s.model;
  const auto& [zero, tensor, context, expert, pipeline] = s.layout;
  Choices all;
  all.task = {formatted("{}", m.family.model_type),
              formatted("{}{}", name_of(s.precision.activations), s.precision.masters ? "" : " without master weights"),
              m.tied ? "tied" : "untied",
              formatted("heads {} on {}", m.n_head, m.n_kv_head),
              formatted("of {}", m.head_size),
              formatted("layers {}", m.n_layer),
              formatted("ffn {}", m.n_ffn),
              formatted("vocabulary {}", m.vocab_size),
              formatted("T {}", s.batch.T),
              formatted("documents {}", s.documents == Documents::apart ? "apart" : "together"),
              formatted("{} sequences", d.sequences()),
              zero.optimizer == Optimizer::muon
                  ? formatted("muon {}, heads {}, rows {}", zero.muon.coefficients, zero.muon.heads, zero.muon.rows)
                  : formatted("{}", zero.optimizer),
              formatted("z-loss x {}", s.z_loss),
              formatted("{}", s.precision.averages ? "weights averaged" : "not averaged"),
              d.max_norm > 0 ? "clipped" : "not clipped",
              s.qk_clip ? formatted("logits to {}", *s.qk_clip) : "any logits"};
  if (m.experts.count > 0)
    for (const std::string& choice :
         {formatted("experts {} of {}", m.experts.per_token, m.experts.count), formatted("width {}", m.experts.width),
          formatted("every {} but {}", m.experts.every, m.experts.dense_layers),
          formatted("{}", m.experts.normalised ? "normalised" : "not normalised"),
          formatted("aux loss {}", s.experts.aux_loss), formatted("z loss {}", s.experts.z_loss),
          formatted("bias rate {}", s.experts.bias_rate),
          s.experts.capacity_factor ? formatted("capacity {}", *s.experts.capacity_factor) : "dropless"})
      all.task.push_back(choice);
  all.layout = {formatted("ranks {}", s.layout.ranks()),
                formatted("dp {}", s.layout.readers()),
                formatted("replicas {}", zero.replicas),
                formatted("stage {}", zero.stage),
                formatted("reduce {}", zero.grad_reduce),
                formatted("offload {}{}", std::string(zero.offload),
                          zero.offload.updates_at_host() ? ", updated by the host" : ""),
                formatted("{}", zero.sync),
                tensor.ranks > 1 ? formatted("tp {}{}{}", tensor.ranks, tensor.sequence ? " by rows" : "",
                                             tensor.overlap ? " overlapped" : "")
                                 : "tp 1",
                context.ranks > 1 ? formatted("cp {} {}", context.ranks, context.attention) : "cp 1",
                formatted("pp {}", pipeline.stages),
                formatted("{}{}", pipeline.schedule,
                          pipeline.chunks_per_stage > 1 ? formatted(" in {} chunks", pipeline.chunks_per_stage) : ""),
                pipeline.layers.empty() ? "even layers" : formatted("layers {}", pipeline.layers),
                pipeline.slices.empty() ? "whole sequences" : formatted("slices {}", pipeline.slices),
                formatted("micro-batches {} of {}", s.micro_batches, s.batch.B),
                formatted("recompute {}", s.recomputation()),
                formatted("head chunks {}", s.head_chunks)};
  if (m.experts.count > 0) all.layout.push_back(formatted("ep {} imbalance {}", expert.ranks, s.experts.imbalance));
  return all;
}
inline std::string to_string(const Draw& d) {
  const Choices all = choices(d);
  return formatted("{} | {}", all.task, all.layout);
}

// The value that a draw has on each axis: "schedule gpipe", "recompute block"; of sizes only their kind.
inline std::vector<std::string> axis_values(const Draw& d) {
  const StepConfig& s = d.step;
  const auto& [zero, tensor, context, expert, pipeline] = s.layout;
  const bool sparse = s.model.experts.count > 0;
  const auto several = [](int64_t n) { return n > 1 ? "several" : "one"; };
  const auto of_experts = [&](const char* axis, const std::string& value) {
    return formatted("{} {}", axis, sparse ? value : "of a dense model");
  };
  return {formatted("family {}", s.model.family.model_type),
          formatted("dtype {}{}", s.precision.activations, s.precision.masters ? "" : " without masters"),
          formatted("embeddings {}", s.model.tied ? "tied" : "untied"),
          formatted("documents {}", s.documents == Documents::apart ? "apart" : "together"),
          formatted("optimizer {}", zero.optimizer),
          formatted("z-loss {}", s.z_loss > 0 ? "on" : "off"),
          formatted("averages {}", s.precision.averages ? "on" : "off"),
          formatted("clipping {}", d.max_norm > 0 ? "on" : "off"),
          formatted("qk clip {}", s.qk_clip ? "on" : "off"),
          formatted("dp {}", several(s.layout.readers())),
          formatted("replicas {}", several(zero.replicas)),
          formatted("stage {}", zero.stage),
          formatted("reduce {}", zero.grad_reduce),
          formatted("offload {}", zero.offload.any() ? "some" : "none"),
          formatted("sync {}", zero.sync),
          formatted("tp {}", tensor.ranks == 1 ? "one"
                             : tensor.sequence ? "by rows"
                                               : "whole"),
          formatted("overlap {}", tensor.overlap ? "on" : "off"),
          formatted("cp {}", context.ranks > 1 ? name_of(context.attention) : "one"),
          formatted("pp {}", several(pipeline.stages)),
          formatted("schedule {}", pipeline.schedule),
          formatted("layers {}", pipeline.layers.empty() ? "even" : "listed"),
          formatted("sequences {}", pipeline.slices.empty() ? "whole" : "sliced"),
          formatted("micro-batches {}", several(s.micro_batches)),
          formatted("recompute {}", s.segment > 1 ? "segments" : name_of(s.recompute)),
          formatted("head chunks {}", s.head_chunks == 0 ? "automatic" : several(s.head_chunks)),
          of_experts("ep", several(expert.ranks)),
          of_experts("aux loss", s.experts.aux_loss > 0 ? "on" : "off"),
          of_experts("bias rate", s.experts.bias_rate > 0 ? "on" : "off"),
          of_experts("dispatch", s.experts.capacity_factor ? "by capacity" : "dropless")};
}

// Some of the first draws, among which each of their values occurs on every axis.
inline std::vector<uint64_t> covering_draws(int max_ranks) {
  constexpr uint64_t candidates = 1000;
  std::set<std::string> seen;
  std::vector<uint64_t> chosen;
  for (uint64_t n = 0; n < candidates; ++n) {
    const size_t before = seen.size();
    for (const std::string& value : axis_values(draw(max_ranks, n))) seen.insert(value);
    if (seen.size() > before) chosen.push_back(n);
  }
  return chosen;
}

}  // namespace llmc::selftest
