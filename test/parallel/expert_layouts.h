// expert_layouts.h: small models with experts, layouts of them, and a step on the ranks of a layout whose gradients are
// given, not computed: small whole numbers, of which every sum is exact, so that all layouts agree bit for bit.
#pragma once
#include <cmath>
#include <exception>
#include <mutex>
#include <string>
#include <vector>

#include "core/rng.h"
#include "run/ranks.h"
#include "run/selftest/selftest.h"

namespace expert_layouts {

using namespace llmc;

// Sizes that 2, 4 and 8 ranks divide, but for the vocabulary; 8 query heads on 2 key-value heads. Qwen's have a dense
// layer in the middle.
inline ModelConfig small_model(const char* family, bool tied = false, int64_t experts = 8) {
  ModelConfig m = selftest::awkward_model(family, tied);
  m.n_layer = 3;
  m.n_head = 8;
  m.n_kv_head = m.family.norm == Norm::rmsnorm ? 2 : 8;
  m.head_size = 2;
  m.n_embd = m.family.own_head_size ? 10 : m.q_size();
  m.n_ffn = 24;
  m.vocab_size = 97;
  m.experts.count = experts;
  if (m.family.experts == ExpertFields::one_width) m.experts.width = m.n_ffn;
  return m;
}

struct LayoutCase {
  int ep = 1, shards = 1, stage = 0, replicas = 1, tp = 1, cp = 1, pp = 1;  // shards: data-parallel ranks of a replica
  GradReduce reduce = GradReduce::step;
};
inline std::string to_string(const LayoutCase& l) {
  return formatted("ep {}, {} shards, stage {}, {} replicas, tp {}, cp {}, pp {}, reduce {}", l.ep, l.shards, l.stage,
                   l.replicas, l.tp, l.cp, l.pp, name_of(l.reduce));
}

inline StepConfig step_of(const ModelConfig& model, const LayoutCase& l, DType dtype = DType::fp32) {
  StepConfig step{.model = model, .precision = dtype, .micro_batches = 2};
  step.layout.zero = {.stage = l.stage, .grad_reduce = l.reduce, .shards = l.shards * l.cp, .replicas = l.replicas};
  step.layout.tensor = tensor_parallel(model, l.tp);
  step.layout.context = {.ranks = l.cp};
  step.layout.expert = expert_parallel(model, l.ep);
  step.layout.pipeline.stages = l.pp;
  return step;
}

// A rank that holds its part of the state of a model, and computes nothing.
struct Holder {
  Arena arena, scratch;
  Stream stream;
  Groups groups;
  ModelState state;
  Holder(const StepConfig& step, World& world, int rank)
      : arena({DeviceKind::cpu, 1}, (1 << 20) + 64 * count_parameters(parameter_table(step.model))),
        scratch({DeviceKind::cpu, 1}, 1 << 20),
        stream({DeviceKind::cpu, 1}, scratch),
        groups(
            step.layout, rank, {DeviceKind::cpu, 1},
            [&](const std::string& name, const auto& group) { return world.join(rank, name, group); }, world.hooks()),
        state(table_of(step, groups), step.precision, step.layout.zero, groups, poisoned(arena),
              {.stages = step.stage_units()}) {}
  Holder(const Holder&) = delete;
  Holder& operator=(const Holder&) = delete;
  void synchronize() {
    for (Stream* s : {&stream, &groups.reduce_stream(), &groups.gather_stream()}) s->synchronize();
  }

 private:
  static Arena& poisoned(Arena& arena) {
    arena.poison_free();
    return arena;
  }
  static ParamTable table_of(const StepConfig& step, const Groups& groups) {
    return part_of(part_of(parameter_table(step.model), step.layout.tensor, groups.me.tensor), step.layout.expert,
                   groups.me.expert);
  }
};

// f(holder) on every rank.
template <class F>
void on_holders(const StepConfig& step, F&& f, const Hooks& hooks = poison_hooks) {
  World world(step.layout.mesh(), Backend::threads, hooks);
  run_ranks(world, [&](int rank) {
    Holder holder(step, world, rank);
    f(holder);
    holder.synchronize();
  });
}

// The gradient of an element from micro-batch m.
inline float gradient_of(const std::string& name, int64_t element, int64_t micro_batch) {
  return static_cast<float>(Philox(11, name).bits(static_cast<uint64_t>(2 * element + micro_batch)) % 7) - 3;
}
// What rank j of the n that have seen parts of it has of that.
inline float part_of_gradient(const std::string& name, int64_t element, int64_t micro_batch, int j, int n) {
  const float others = static_cast<float>(element % 5) - 2;
  return j > 0 ? others : gradient_of(name, element, micro_batch) - others * static_cast<float>(n - 1);
}

// Adds what this rank has seen of a micro-batch. Dense weights: everyone but tensor-parallel neighbours has seen other
// rows. Experts: their ep group has seen the rows of all of its ranks.
inline void add_gradients(const UnitState& unit, const Groups& groups, int64_t micro_batch) {
  const bool experts = unit.spec().sharing == Sharing::experts;
  const int group = experts ? groups.layout.expert.ranks : groups.layout.tensor.ranks,
            place = groups.rank() % groups.ranks_of_stage();
  for (const ParamSpec& p : unit.spec().params) {
    if (p.partial && !p.first_copy) continue;
    float* const gradient = unit.gradient(p.name).data<float>();
    const Elements elements = p.elements_from(0);
    for (int64_t i = 0; i < p.box().numel(); ++i)
      gradient[i] +=
          part_of_gradient(p.name, elements.index(i), micro_batch, place / group, groups.ranks_of_stage() / group);
  }
}

// What a test changes to see that it is noticed.
enum class Planted { nothing, norm_of_dense_shard };

struct Scalars {
  Tensor gathered, loss, notice, square_sums, control;
  Scalars(const StepConfig& step, Holder& h) {
    const int64_t units = static_cast<int64_t>(h.state.size());
    auto alloc = [&](const Shape& shape) { return h.arena.alloc("test", "scalars", DType::fp64, shape); };
    gathered = alloc({step.layout.ranks(), 2 + units});
    loss = alloc({1});
    notice = alloc({1});
    square_sums = alloc({units * step.layout.zero.shards * step.layout.tensor.ranks});
    control = alloc({4});
    for (const Tensor& t : {gathered, control}) zero(t, h.stream);
  }
};

// One step with given gradients: what all ranks hold then, assembled, and the gradient norm.
inline selftest::Outcome given_step(const StepConfig& step, const Hooks& hooks = poison_hooks,
                                    Planted planted = Planted::nothing) {
  selftest::Outcome outcome;
  std::mutex mutex;
  on_holders(
      step,
      [&](Holder& h) {
        ModelState& state = h.state;
        init_weights(state, 42, h.stream);
        state.gradients.begin(h.stream);
        for (int64_t m = 0; m < step.micro_batches; ++m)
          for (size_t u = state.size(); u-- > 0;) {
            if (!state.has(u)) continue;
            state.gradients.start(u, h.stream);
            state.unit(u).zero_unwritten(h.stream);
            h.stream.synchronize();
            add_gradients(state.unit(u), h.groups, m);
            state.gradients.reduce(u, m + 1 == step.micro_batches, h.stream);
          }
        state.gradients.finish(h.stream);

        const Scalars s(step, h);  // as Trainer::decide() has it
        const Tensor mine = s.gathered.slice(h.groups.rank() * s.gathered.shape[1], {s.gathered.shape[1]});
        const std::optional<int> shard = planted == Planted::nothing ? std::nullopt : std::optional(h.groups.me.shard);
        for (size_t u = 0; u < state.size(); ++u)
          state.gradients.square_sum_of(u, mine.slice(2 + static_cast<int64_t>(u), {1}), h.stream, shard);
        h.groups[GroupName::scalars].all_gather(s.gathered, h.stream);
        combine_scalars(s.loss, s.notice, s.square_sums, s.gathered, step.layout.zero.shards, step.layout.tensor.ranks,
                        step.layout.pipeline.stages, h.stream);
        clip_control(s.control, s.square_sums, s.loss, {.max_norm = 1}, h.stream);
        state.update(s.control,
                     {.lr = 0.01f, .beta1 = 0.9f, .beta2 = 0.95f, .eps = 1e-8f, .weight_decay = 0.1f, .step = 1},
                     h.stream);
        state.weights.settle(h.stream);
        h.synchronize();

        const std::lock_guard lock(mutex);
        outcome.norms.push_back(*HostView(s.control, h.stream).data<double>());
        selftest::collect_gradients(outcome, state, h.groups.rank(), h.stream);
        selftest::collect_state(outcome, state, h.groups.rank(), h.stream);
      },
      hooks);
  selftest::require_whole(outcome, step);
  return outcome;
}

// The norm of the gradients that given_step() is given.
inline double norm_of_given(const StepConfig& step) {
  double squares = 0;
  for (const UnitSpec& unit : parameter_table(step.model))
    for (const ParamSpec& p : unit.params)
      for (int64_t i = 0; i < p.numel(); ++i) {
        double sum = 0;
        for (int64_t m = 0; m < step.micro_batches; ++m) sum += gradient_of(p.name, i, m);
        squares += sum * sum;
      }
  return std::sqrt(squares);
}

// What of a layout differs from one rank, for messages; empty: nothing.
inline std::string difference(const StepConfig& step, const selftest::Outcome& one, const selftest::Outcome& found) {
  const double norm = norm_of_given(step);
  for (const double n : found.norms)
    if (n != norm) return formatted("the norm is {}, expected {}", n, norm);
  auto differing = [](const selftest::Wholes& a, const selftest::Wholes& b) -> std::string {
    for (const auto& [name, whole] : a)
      if (!b.contains(name) || !(b.at(name) == whole)) return name;
    return a.size() == b.size() ? "" : "the number of tensors";
  };
  if (const std::string d = differing(one.gradients, found.gradients); !d.empty()) return "gradient of " + d;
  if (const std::string d = differing(one.weights, found.weights); !d.empty()) return "weight " + d;
  if (const std::string d = differing(one.optimizer_state, found.optimizer_state); !d.empty()) return "state " + d;
  return found.fault;
}

}  // namespace expert_layouts
