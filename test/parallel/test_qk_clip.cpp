// QK-clip in a step: which heads are clipped and by how much, in every layout like on one rank; bugs that tests find.
#include "catch2.h"
#include "helpers.h"
#include "run/ranks.h"
#include "run/selftest/compare.h"

using namespace llmc;

namespace {

using Values = std::vector<double>;

std::map<std::string, Values> weights_of(Run& run) {
  std::map<std::string, Values> all;
  for (const StateEntry& e : run.trainer.state().state_table()) {
    if (e.kind != StateKind::weight) continue;
    const HostView view(e.tensor, run.stream);
    all[e.param->name] = {view.data<double>(), view.data<double>() + e.tensor.numel()};
  }
  return all;
}

// The largest logit of each head of a GPT-2's first layer, in plain loops.
Values plain_largest(const ModelConfig& m, const HostBatch& batch, int64_t T, std::map<std::string, Values> w) {
  const size_t C = static_cast<size_t>(m.n_embd), D = static_cast<size_t>(m.head_size);
  const auto project = [&](const std::string& name, const Values& x, size_t row) {
    double sum = w[name + ".bias"][row];
    for (size_t c = 0; c < C; ++c) sum += w[name + ".weight"][row * C + c] * x[c];
    return sum;
  };
  std::vector<Values> queries, keys;
  Values most(static_cast<size_t>(m.n_head));
  for (size_t t = 0; t < batch.tokens.size(); ++t) {
    Values x(C);
    double mean = 0, variance = 0;
    for (size_t c = 0; c < C; ++c) {
      x[c] = w["wte.weight"][static_cast<size_t>(batch.tokens[t]) * C + c] +
             w["wpe.weight"][static_cast<size_t>(batch.positions[t]) * C + c];
      mean += x[c] / static_cast<double>(C);
    }
    for (const double e : x) variance += (e - mean) * (e - mean) / static_cast<double>(C);
    for (size_t c = 0; c < C; ++c)
      x[c] = (x[c] - mean) / std::sqrt(variance + m.norm_eps) * w["blocks.0.ln1.weight"][c] + w["blocks.0.ln1.bias"][c];
    Values &q = queries.emplace_back(), &k = keys.emplace_back();
    for (size_t row = 0; row < most.size() * D; ++row)
      q.push_back(project("blocks.0.attn.q", x, row)), k.push_back(project("blocks.0.attn.k", x, row));
    for (size_t j = t / static_cast<size_t>(T) * static_cast<size_t>(T); j <= t; ++j)
      for (size_t h = 0; h < most.size(); ++h) {
        double score = 0;
        for (size_t d = h * D; d < (h + 1) * D; ++d) score += q[d] * keys[j][d];
        most[h] = std::max(most[h], score / std::sqrt(static_cast<double>(D)));
      }
  }
  return most;
}

// Weights whose logits are far from 0, each head's others.
void init_large(const StepConfig& step, const ModelState& state, Stream& stream) {
  selftest::init_drawn(step, state, stream);
  for (const StateEntry& e : state.state_table())
    if (e.param->group_rows > 0 && e.kind != StateKind::slot) scale(e.tensor, 5, stream);
}

// The options of a step that changes weights by QK-clip alone.
constexpr OptimizerOptions no_update{.lr = 0, .beta1 = 0.9f, .beta2 = 0.95f, .eps = 1, .weight_decay = 0, .step = 1};

// The largest logit of any head at the beginning.
double largest_logit(StepConfig step) {
  step = selftest::on_one_rank(step);
  step.qk_clip = 1e9;
  World world{Mesh()};
  Run run(step, make_plan(step, {DeviceKind::cpu, 1}), {DeviceKind::cpu, 1}, world, 0);
  init_large(step, run.trainer.state(), run.stream);
  return run.trainer.step([&](int64_t m) { return selftest::read_batch(step, 0, m); }, no_update, {}).logits->largest;
}

StepConfig step_of(const selftest::Model& model, Layout layout, double limit = 1e9) {
  const ModelConfig config = model.config();
  layout.tensor = tensor_parallel(config, layout.tensor.ranks);
  StepConfig step = selftest::step_config(config, model.dtype, layout);
  step.qk_clip = limit;
  return step;
}

}  // namespace

TEST_CASE("QK-clip scales the logits of each head that exceeds its limit to it, and no others", "[parallel][muon]") {
  for (const char* family : {"gpt2", "llama", "qwen2"}) {
    INFO(family);
    ModelConfig model = selftest::awkward_model(family, true);
    model.n_layer = 1;  // later layers would see other inputs once this one has changed
    StepConfig step = selftest::step_config(model, DType::fp64, 2, ZeroConfig{});
    step.micro_batches = 3;
    World world{Mesh()};
    const auto start = [&](std::optional<double> limit) {
      step.qk_clip = limit;
      auto run =
          std::make_unique<Run>(step, make_plan(step, {DeviceKind::cpu, 1}), Device{DeviceKind::cpu, 1}, world, 0);
      init_large(step, run->trainer.state(), run->stream);
      return run;
    };
    const BatchSource batches = [&](int64_t m) { return selftest::read_batch(step, 0, m); };
    const double largest = largest_logit(step);
    auto run = start(0.9 * largest);
    const auto before = weights_of(*run);
    const StepResult first = run->trainer.step(batches, no_update, {});
    const auto after = weights_of(*run);
    REQUIRE(first.logits->largest == largest);
    REQUIRE((first.logits->clipped > 0 && first.logits->clipped < model.n_head));  // some heads of all
    const bool shared = model.n_kv_head < model.n_head;
    Values factors;  // of each head's queries
    for (int64_t h = 0; h < model.n_head; ++h) {
      const size_t row = static_cast<size_t>(h * model.head_size * model.n_embd);
      factors.push_back(after.at("blocks.0.attn.q.weight")[row] / before.at("blocks.0.attn.q.weight")[row]);
    }
    REQUIRE(std::count_if(factors.begin(), factors.end(), [](double f) { return f < 1; }) == first.logits->clipped);
    if (!shared) {
      Values most(static_cast<size_t>(model.n_head));
      for (int64_t m = 0; m < step.micro_batches; ++m) {
        const Values of_batch = plain_largest(model, batches(m), step.batch.T, before);
        for (size_t h = 0; h < most.size(); ++h) most[h] = std::max(most[h], of_batch[h]);
      }
      for (size_t h = 0; h < most.size(); ++h)
        REQUIRE(std::abs(factors[h] - std::min(1.0, std::sqrt(0.9 * largest / most[h]))) < 1e-12);
    }
    for (const auto& [name, values] : before) {
      INFO(name);
      const bool queries = name.find(".attn.q.") != name.npos, keys = name.find(".attn.k.") != name.npos && !shared;
      const size_t of_head = values.size() / factors.size();
      for (size_t i = 0; i < values.size(); ++i)
        REQUIRE(std::abs(after.at(name)[i] - values[i] * (queries || keys ? factors[i / of_head] : 1)) < 1e-12);
    }
    const StepResult second = run->trainer.step(batches, no_update, {});
    REQUIRE(std::abs(second.logits->largest / (0.9 * largest) - 1) < 1e-12);  // the heads that were clipped
  }
}

TEST_CASE("every layout clips the heads that one rank does", "[parallel][muon]") {
  using selftest::Model;
  const auto with = [](auto&& change) {
    Layout layout;
    change(layout);
    return layout;
  };
  const auto context = [&](ContextAttention attention, int tensors) {
    return with([&](Layout& l) {
      l.zero.shards = 2, l.context.ranks = 2, l.context.attention = attention, l.tensor.ranks = tensors;
      l.zero.set_stage(2);
    });
  };
  struct Case {
    Model model;
    std::vector<Layout> layouts;
  };
  for (const auto& [model, layouts] :
       {Case{{"gpt2", true, DType::fp32, 8, 8, 48},
             {context(ContextAttention::ring, 1), context(ContextAttention::all_gather, 2),
              context(ContextAttention::ulysses, 2)}},
        Case{{"llama", false, DType::bf16, 6, 3},
             {with([](Layout& l) { l.zero.shards = 2, l.zero.replicas = 2, l.zero.set_stage(3); }),
              with([](Layout& l) { l.tensor.ranks = 6, l.zero.set_stage(1); }),
              with([](Layout& l) { l.zero.shards = 3, l.zero.sync = DpSync::parameter_server; })}},
        Case{{"gpt2", true, DType::bf16, 8, 8},
             {with([](Layout& l) { l.pipeline.stages = 3, l.tensor.ranks = 2; }), with([](Layout& l) {
                l.pipeline.slices = {7, 12};
              })}}}) {
    const selftest::Parts parts{.init = init_large};
    const double limit = largest_logit(step_of(model, {})) / 3;
    const StepConfig step = step_of(model, {}, limit);
    const selftest::Reference reference(step, parts);
    StepConfig unclipped = selftest::on_one_rank(step);
    unclipped.qk_clip.reset();
    REQUIRE_FALSE(selftest::run_layout(unclipped, {}, parts).losses == reference.alone.losses);
    for (const Layout& layout : layouts)
      for (const Recompute recompute : {Recompute::none, Recompute::block}) {
        StepConfig its = step_of(model, layout, limit);
        its.recompute = recompute;
        INFO(model.family << ", layout " << &layout - layouts.data() << ", recompute " << name_of(recompute));
        const selftest::Comparison c = selftest::compare(reference, its, {}, parts);
        INFO(c.verdict());
        REQUIRE(c.good());
      }
  }
}

namespace {

// Bugs in what ranks tell each other of their heads.
struct OfLogits : Comm {
  static bool is_record(const Tensor& t) { return std::string_view(t.name) == "records of ranks"; }
  explicit OfLogits(Comm&& group) : Comm(std::move(group)) {}
  virtual void spoil(double* records, int64_t heads) const = 0;
  void all_gather(Tensor buffer, Stream& stream) override {
    Comm::all_gather(buffer, stream);
    if (!is_record(buffer)) return;
    stream.synchronize();
    spoil(buffer.data<double>(), buffer.shape[1]);
  }
};
struct ForgetsARank final : OfLogits {
  using OfLogits::OfLogits;
  void spoil(double* records, int64_t heads) const override {
    std::fill_n(records + (size() - 1) * heads, heads, 0.0);
    if (rank() == size() - 1) std::fill_n(records, size() * heads, 0.0);
  }
};
struct TellsNobody final : OfLogits {
  using OfLogits::OfLogits;
  void spoil(double* records, int64_t heads) const override {
    for (int r = 0; r < size(); ++r)
      if (r != rank()) std::fill_n(records + r * heads, heads, 0.0);
  }
};
struct TakesTheNextHead final : OfLogits {
  using OfLogits::OfLogits;
  void spoil(double* records, int64_t heads) const override {
    for (int r = 0; r < size(); ++r)
      std::rotate(records + r * heads, records + r * heads + 1, records + (r + 1) * heads);
  }
};

// Puts a Bug in the place of the group of scalars.
template <class Bug>
struct Plants : Poison {
  std::unique_ptr<Comm> joined(std::unique_ptr<Comm> group) const override {
    if (group->name() != "scalars") return group;
    return std::make_unique<Bug>(std::move(*group));
  }
};

}  // namespace

TEST_CASE("a rank whose logits are forgotten or told to nobody, and a head that is mistaken for another, are found",
          "[parallel][muon]") {
  Layout layout;
  layout.zero.shards = 2, layout.tensor.ranks = 2;
  const selftest::Model model{"gpt2", true, DType::fp32, 8, 8};
  const StepConfig step = step_of(model, layout, largest_logit(step_of(model, {})) / 3);
  const Plants<ForgetsARank> forgets;
  const Plants<TellsNobody> tells_nobody;
  const Plants<TakesTheNextHead> next_head;
  const selftest::Reference reference(step, {.init = init_large});
  const auto verdict = [&](const Hooks& hooks) {
    return selftest::compare(reference, step, {}, {.hooks = hooks, .init = init_large}).verdict();
  };
  REQUIRE(verdict(poison_hooks) == "");
  for (const Hooks* bug : {static_cast<const Hooks*>(&forgets), static_cast<const Hooks*>(&tells_nobody),
                           static_cast<const Hooks*>(&next_head)})
    REQUIRE(verdict(*bug) != "");
}
