// The step: contracts 1 (reproducible), 4 (schedules are only an order), 7 (initial weights), the plan, sampling.
#include <algorithm>
#include <cmath>
#include <cstring>
#include <limits>
#include <random>

#include "catch2.h"
#include "helpers.h"
#include "run/selftest/selftest.h"
#include "train/sample.h"

using namespace llmc;

namespace {

HostBatch random_batch(const StepConfig& c, int64_t micro_batch, std::string_view stream = "batch") {
  const Philox rng(7, stream);
  HostBatch batch;
  for (int64_t i = 0; i < c.batch.rows(); ++i) {
    const uint64_t index = static_cast<uint64_t>(micro_batch * c.batch.rows() + i);
    batch.tokens.push_back(static_cast<int32_t>(rng.bits(2 * index) % static_cast<uint64_t>(c.model.vocab_size)));
    batch.targets.push_back(static_cast<int32_t>(rng.bits(2 * index + 1) % static_cast<uint64_t>(c.model.vocab_size)));
    batch.positions.push_back(static_cast<int32_t>(i % c.batch.T));
  }
  return batch;
}

// A trainer in arenas of exactly the planned size, poisoned.
struct Fixture {
  Plan plan;
  Device device;
  Arena arena, scratch;
  Stream stream;
  Trainer trainer;
  explicit Fixture(const StepConfig& c, int threads = 2)
      : plan(make_plan(c, {DeviceKind::cpu, threads})),
        device{DeviceKind::cpu, threads},
        arena(device, plan.arena_bytes),
        scratch(device, plan.scratch_bytes),
        stream(device, scratch),
        trainer((arena.poison_free(), scratch.poison_free(), c), {arena, stream}) {
    init_weights(trainer.state(), 42, stream);
  }
  BatchSource batches() {
    return [this](int64_t m) { return random_batch(trainer.config(), m); };
  }
  // Returns the losses and norms of `steps` updates, then every weight and moment.
  std::vector<double> train(int steps) {
    std::vector<double> seen;
    for (int s = 1; s <= steps; ++s) {
      const StepResult r = trainer.step(
          batches(), {.lr = 1e-2f, .beta1 = 0.9f, .beta2 = 0.95f, .eps = 1e-8f, .weight_decay = 0.1f, .step = s},
          {.max_norm = 1});
      REQUIRE(r.applied);
      seen.push_back(r.loss);
      seen.push_back(r.grad_norm);
    }
    for (const StateEntry& e : trainer.state().state_table())
      for (int64_t i = 0; i < e.tensor.numel(); ++i)
        seen.push_back(e.tensor.dtype == DType::bf16 ? double(float(e.tensor.data<bf16>()[i]))
                                                     : double(e.tensor.data<float>()[i]));
    return seen;
  }
};

bool bitwise_equal(const std::vector<double>& a, const std::vector<double>& b) {
  return a.size() == b.size() && std::memcmp(a.data(), b.data(), a.size() * sizeof(double)) == 0;
}

StepConfig awkward_step(DType dtype, const char* family = "gpt2") {
  return {.model = selftest::awkward_model(family), .precision = dtype, .batch = {2, 19}, .micro_batches = 3};
}

}  // namespace

TEST_CASE("the head takes as many rows as have 1 GiB of logits, in whole tiles of 256", "[train]") {
  StepConfig step{.model = resolve_model("gpt2:124M", {}), .precision = DType::bf16};
  const int64_t most = (int64_t{1} << 30) / (step.model.padded_vocab() * 2);
  REQUIRE(step.head_rows(1000) == 1000);  // all of them
  for (const int64_t S : {most + 1, int64_t{65536}, int64_t{65536 + 7}}) {
    const int64_t rows = step.head_rows(S);
    REQUIRE(rows % 256 == 0);
    REQUIRE(rows <= most);
    REQUIRE(ceil_div(S, rows) == ceil_div(S, most / 256 * 256));  // no more parts than that takes
  }
  REQUIRE(step.head_rows(65536) == 9472);
  step.model.vocab_size = 1 << 22;  // 128 rows
  REQUIRE(step.head_rows(512) == 128);
  REQUIRE(step.head_rows(130) == 65);
  step.head_chunks = 3;
  REQUIRE(step.head_rows(100) == 34);
}

TEST_CASE("two runs with the same seed agree bitwise in losses, norms and weights", "[train]") {
  for (const DType dtype : {DType::fp32, DType::bf16}) {
    INFO("dtype " << name_of(dtype));
    const std::vector<double> first = Fixture(awkward_step(dtype)).train(3);
    for (double x : first) REQUIRE(std::isfinite(x));
    REQUIRE(bitwise_equal(first, Fixture(awkward_step(dtype)).train(3)));
  }
}

TEST_CASE("a step does not depend on what the memory of its gradients held before", "[train]") {
  for (const auto& [family, reduce, chunks] : {std::tuple("gpt2", GradReduce::step, 1),
                                               {"gpt2", GradReduce::step, 3},
                                               {"gpt2", GradReduce::micro, 3},
                                               {"llama", GradReduce::micro, 1},
                                               {"qwen2_moe", GradReduce::step, 2}})
    for (const bool tied : {true, false}) {
      INFO(family << (tied ? ", tied, " : ", ") << name_of(reduce) << ", " << chunks << " chunks");
      StepConfig c = awkward_step(DType::bf16, family);
      c.model.tied = tied;
      c.layout.zero.grad_reduce = reduce;
      c.layout.pipeline.chunks_per_stage = chunks;
      const auto train = [&](float held) {
        Fixture f(c);
        f.train(1);
        const ModelState& state = f.trainer.state();
        state.for_each([&](size_t u) {
          for (const Tensor& t : {state.unit(u).gradients(), state.unit(u).reduced_gradients()})
            fill(t, held, f.stream);
        });
        return f.train(1);
      };
      REQUIRE(bitwise_equal(train(0), train(NAN)));
    }
}

TEST_CASE("the first product of a sum of gradients writes; what none has written is zeroed", "[train]") {
  Fixture f(awkward_step(DType::fp32));
  UnitState& unit = f.trainer.state().unit(1);
  const Tensor all = unit.gradients(), qkv = unit.gradient("attn.q.weight", 3);
  for (int sum = 0; sum < 2; ++sum) {
    poison(all, f.stream);
    std::vector<Tensor> zeroed;
    unit.begin_sum(zeroed);
    zero(zeroed, f.stream);
    REQUIRE_ERROR(unit.accumulate(unit.gradient("attn.k.weight")), "a part of the gradient of blocks.0.attn.k.weight");
    REQUIRE(unit.accumulate(qkv) == Accumulate::no);
    REQUIRE(unit.accumulate(qkv) == Accumulate::yes);
    unit.zero_unwritten(f.stream);
    REQUIRE(unit.accumulate(unit.gradient("attn.proj.weight")) == Accumulate::yes);
    f.stream.synchronize();
    for (const float* g = all.data<float>(); g < all.data<float>() + all.numel(); ++g) {
      const bool written = g >= qkv.data<float>() && g < qkv.data<float>() + qkv.numel();  // it said so, but did not
      REQUIRE(written == std::isnan(*g));
      REQUIRE((written || *g == 0));
    }
  }
}

TEST_CASE("schedules and chunks are only an order: gpipe, 1f1b, one to three chunks agree bitwise", "[train]") {
  for (const DType dtype : {DType::fp32, DType::bf16}) {
    const std::vector<double> reference = Fixture(awkward_step(dtype)).train(2);
    for (const Schedule schedule : {Schedule::one_f_one_b, Schedule::gpipe})
      for (int chunks = 1; chunks <= 3; ++chunks) {
        StepConfig c = awkward_step(dtype);
        c.layout.pipeline.schedule = schedule;
        c.layout.pipeline.chunks_per_stage = chunks;
        INFO(name_of(dtype) << " " << name_of(schedule) << ", " << chunks << " chunks");
        REQUIRE(bitwise_equal(reference, Fixture(c).train(2)));
      }
  }
}

TEST_CASE("recomputation is bitwise in every family; each level needs less memory and more ops than the previous one",
          "[train]") {
  for (const auto& [dtype, family] : {std::pair{DType::fp32, "gpt2"},
                                      {DType::bf16, "gpt2"},
                                      {DType::bf16, "llama"},
                                      {DType::fp32, "qwen2"},
                                      {DType::bf16, "qwen3"}})
    for (const Schedule schedule : {Schedule::one_f_one_b, Schedule::gpipe}) {
      StepConfig c = awkward_step(dtype, family);
      c.layout.pipeline.schedule = schedule;
      c.layout.pipeline.chunks_per_stage = 2;
      const std::vector<double> reference = Fixture(c).train(2);
      int64_t bytes = std::numeric_limits<int64_t>::max(), calls = 0;
      for (const Recompute recompute : all_values<Recompute>()) {
        INFO(name_of(dtype) << " " << name_of(schedule) << ", recompute " << name_of(recompute));
        c.recompute = recompute;
        Fixture f(c);
        REQUIRE(bitwise_equal(reference, f.train(2)));
        REQUIRE(f.plan.arena_bytes < bytes);
        bytes = f.plan.arena_bytes;
        int64_t all_calls = 0;
        for (const auto& [name, totals] : f.plan.step_ops) all_calls += totals.calls;
        REQUIRE(all_calls > calls);
        calls = all_calls;
      }
    }
}

TEST_CASE("one large micro-batch and several small ones give the same gradients up to rounding", "[train]") {
  StepConfig small = awkward_step(DType::fp32), large = small;
  large.batch.B = small.batch.B * small.micro_batches;
  large.micro_batches = 1;
  Fixture a(small), b(large);
  const auto one = a.train(1), other = b.train(1);
  REQUIRE(std::abs(one[0] - other[0]) < 1e-6 * one[0]);
  REQUIRE(std::abs(one[1] - other[1]) < 1e-5 * one[1]);
}

TEST_CASE("the loss of a step is the mean over every target token, as evaluation finds it before the update",
          "[train]") {
  Fixture f(awkward_step(DType::fp32));
  const double before = f.trainer.evaluate(3, 3 * 38, f.batches());
  const double step = f.train(1)[0];
  REQUIRE(std::abs(before - step) < 1e-9);
  REQUIRE(before > 0.9 * std::log(131));
  REQUIRE(before < 1.1 * std::log(131));
}

TEST_CASE("the null device plans exactly the memory that the CPU uses", "[train]") {
  for (const DType dtype : {DType::fp32, DType::bf16})
    for (const Recompute recompute : all_values<Recompute>())
      for (const int64_t T : {1, 8, 19}) {
        StepConfig c = awkward_step(dtype, T == 1 ? "llama" : T == 8 ? "gpt2" : "qwen3");
        c.layout.pipeline.schedule = T == 8 ? Schedule::gpipe : Schedule::one_f_one_b;
        c.recompute = recompute;
        c.batch.T = T;
        c.layout.pipeline.chunks_per_stage = 2;
        Fixture f(c, 2);  // an arena of exactly the planned size: one byte more would throw
        f.train(1);
        f.trainer.evaluate(1, 38, f.batches());
        std::vector<int32_t> tokens(static_cast<size_t>(T), 5);
        f.trainer.next_token_logits(tokens);
        f.trainer.next_token_logits({tokens.data(), 1});
        {
          Continuation sequence(f.trainer);
          sequence.feed(tokens);
          sequence.restart();
          for (const int32_t& token : tokens) sequence.feed({&token, 1});
        }
        REQUIRE(f.arena.high_water() == f.plan.arena_bytes);
        REQUIRE(f.scratch.high_water() == f.plan.scratch_bytes);
        int64_t total = 0;
        for (const MemoryLine& line : f.plan.memory) total += line.bytes;
        REQUIRE(total == f.plan.total_bytes());
      }
}

TEST_CASE("1f1b needs one set of activations, gpipe one for each micro-batch", "[train]") {
  StepConfig c = awkward_step(DType::fp32);
  auto activations = [&](Schedule schedule) {
    c.layout.pipeline.schedule = schedule;
    for (const MemoryLine& line : make_plan(c, {DeviceKind::cpu, 1}).memory)
      if (line.label == "activations") return line.bytes;
    return int64_t{0};
  };
  REQUIRE(activations(Schedule::gpipe) == c.micro_batches * activations(Schedule::one_f_one_b));
}

TEST_CASE("initial weights depend only on seed, name and index", "[train]") {
  StepConfig shallow = awkward_step(DType::fp32), deep = shallow;
  deep.model.vocab_size = 300;  // more rows of the same table
  Fixture a(shallow, 1), b(deep, 2);
  a.stream.synchronize();
  b.stream.synchronize();
  const Tensor small = a.trainer.state().front().weight("wte.weight"),
               large = b.trainer.state().front().weight("wte.weight");
  const int64_t n = shallow.model.vocab_size * shallow.model.n_embd;
  REQUIRE(std::memcmp(small.bytes, large.bytes, static_cast<size_t>(n) * sizeof(float)) == 0);
  for (int64_t i = n; i < small.numel(); ++i) REQUIRE(small.data<float>()[i] == 0);  // the padding rows
  const Tensor q = a.trainer.state().unit(1).weight("attn.q.weight"),
               k = a.trainer.state().unit(1).weight("attn.k.weight");
  REQUIRE(std::memcmp(q.bytes, k.bytes, static_cast<size_t>(q.size_bytes())) != 0);
}

TEST_CASE("vocabulary padding stays zero through training", "[train]") {
  Fixture f(awkward_step(DType::bf16));
  f.train(3);
  const ModelConfig m = selftest::awkward_model();
  const Tensor wte = f.trainer.state().front().weight("wte.weight");
  REQUIRE(wte.shape[0] == 256);
  for (int64_t i = m.vocab_size * m.n_embd; i < wte.numel(); ++i) REQUIRE(float(wte.data<bf16>()[i]) == 0);
}

TEST_CASE("a non-finite loss changes no weight and is reported", "[train]") {
  Fixture f(awkward_step(DType::fp32));
  f.stream.synchronize();
  const UnitState& head = f.trainer.state().unit(f.trainer.state().size() - 1);
  head.weight("ln_f.bias").data<float>()[0] = std::numeric_limits<float>::quiet_NaN();
  const Tensor q = f.trainer.state().unit(1).weights();
  const std::vector<float> before(q.data<float>(), q.data<float>() + q.numel());
  const StepResult r = f.trainer.step(
      f.batches(), {.lr = 0.1f, .beta1 = 0.9f, .beta2 = 0.9f, .eps = 1e-8f, .weight_decay = 0.1f, .step = 1},
      {.max_norm = 1});
  REQUIRE_FALSE(r.applied);
  REQUIRE(std::memcmp(before.data(), q.bytes, before.size() * sizeof(float)) == 0);
}

TEST_CASE("the logits of the next token do not depend on the row padding", "[train]") {
  Fixture f(awkward_step(DType::fp32));
  std::vector<int32_t> tokens = {3, 1, 4, 1, 5, 9, 2, 6};
  const std::vector<float> eight = f.trainer.next_token_logits(tokens);
  tokens.push_back(7);
  const std::vector<float> nine = f.trainer.next_token_logits(tokens);  // 16 rows
  tokens.pop_back();
  const std::vector<float> again = f.trainer.next_token_logits(tokens);
  REQUIRE(eight == again);
  REQUIRE(eight != nine);
  REQUIRE(eight.size() == 131);
}

TEST_CASE("sampling respects temperature, top-k and top-p", "[train]") {
  const std::vector<float> logits = {0.0f, 3.0f, 1.0f, 2.0f};
  REQUIRE(sample_token(logits, {.temperature = 0}, 0.99) == 1);
  REQUIRE(sample_token(logits, {.top_k = 2}, 0.999) == 3);
  REQUIRE(sample_token(logits, {.top_p = 0.5}, 0.999) == 1);
  REQUIRE(sample_token(logits, {}, 0.0) == 1);
  REQUIRE(sample_token(logits, {}, 0.9999) == 0);
  // Frequencies match the softmax.
  int ones = 0;
  for (int i = 0; i < 1000; ++i) ones += sample_token(logits, {}, (i + 0.5) / 1000) == 1;
  REQUIRE(std::abs(ones / 1000.0 - 0.6439) < 0.002);
}

TEST_CASE("a token is sampled from all tokens in the order of their logits, then of their ids", "[train]") {
  std::mt19937 random(5);
  for (int i = 0; i < 2000; ++i) {
    std::vector<float> logits(1 + random() % 40);
    for (float& x : logits) x = static_cast<float>(random() % 9) / 2;
    const SampleOptions o{.temperature = static_cast<double>(random() % 3) / 2,
                          .top_k = static_cast<int64_t>(random() % 50),
                          .top_p = 1 - static_cast<double>(random() % 4) / 4};
    const double u = (random() % 1000) / 1000.0;
    std::vector<std::pair<float, int32_t>> order;
    for (const float x : logits) order.emplace_back(-x, static_cast<int32_t>(order.size()));
    std::sort(order.begin(), order.end());
    if (o.temperature == 0) {
      REQUIRE(sample_token(logits, o, u) == order[0].second);
      continue;
    }
    if (o.top_k > 0 && o.top_k < std::ssize(order)) order.resize(static_cast<size_t>(o.top_k));
    double total = 0, kept = 0;
    std::vector<double> p;
    for (const auto& [x, token] : order) total += p.emplace_back(std::exp((order[0].first - x) / o.temperature));
    size_t n = 0;
    while (n < p.size() && (n == 0 || kept < o.top_p * total)) kept += p[n++];
    size_t chosen = 0;
    for (double left = u * kept; chosen + 1 < n && left >= p[chosen];) left -= p[chosen++];
    REQUIRE(sample_token(logits, o, u) == order[chosen].second);
  }
}

TEST_CASE("no token is sampled from logits that are not finite", "[train]") {
  constexpr float inf = std::numeric_limits<float>::infinity(), nan = std::numeric_limits<float>::quiet_NaN();
  for (const std::vector<float>& logits : {std::vector<float>{nan, nan}, {0, nan, 1}, {1, nan}, {-inf, -inf}, {0, inf}})
    for (const SampleOptions& o : {SampleOptions{}, {.temperature = 0}, {.top_k = 1}})
      REQUIRE_ERROR(sample_token(logits, o, 0.5), "the logits of the next token are not finite");
  REQUIRE(sample_token(std::vector<float>{-inf, 0}, {}, 0.5) == 1);
}

TEST_CASE("gpipe and 1f1b schedules have each forward and backward once, backwards in micro-batch order", "[train]") {
  for (const Schedule schedule : {Schedule::gpipe, Schedule::one_f_one_b}) {
    const auto actions = training_actions(schedule, 2, 5);
    REQUIRE(actions.size() == 20);
    int64_t last = 0;
    for (const Action& a : actions)
      if (a.kind == ActionKind::backward) {
        REQUIRE(a.micro_batch >= last);
        last = a.micro_batch;
      }
    REQUIRE(micro_batches_in_flight(actions) == (schedule == Schedule::gpipe ? 5 : 1));
  }
}
