// Context parallelism on paper and between threads: bytes by the law of context_attention.h, communication that
// computation hides, equal work, a share of the memory; rejected options. test_context_parallel.cpp tests that it
// computes what one rank computes.
#include <limits>

#include "catch2.h"
#include "helpers.h"
#include "run/ranks.h"
#include "run/selftest/selftest.h"

using namespace llmc;

namespace {

struct Case {
  ContextAttention attention;
  int cp, tp = 1, dp = 1;
  DType dtype = DType::fp32;
  Recompute recompute = Recompute::none;
  std::string text() const {
    return formatted("{}, cp {}, tp {}, dp {}, {}, recompute {}", attention, cp, tp, dp, dtype, recompute);
  }
};

// Llama with grouped heads: B sequences of T tokens in each of the micro-batches.
StepConfig step_of(const Case& c, int64_t heads, int64_t kv_heads, const BatchShape& batch, int64_t micro_batches = 1) {
  StepConfig step{.model = selftest::Model{"llama", true, c.dtype, heads, kv_heads}.config(),
                  .precision = c.dtype,
                  .batch = batch,
                  .micro_batches = micro_batches,
                  .recompute = c.recompute,
                  .layout = {.zero = {.shards = c.dp * c.cp}},
                  .generates = false};
  step.model.n_positions = batch.T;
  step.layout.tensor = tensor_parallel(step.model, c.tp);
  step.layout.context = ContextParallel{c.cp, c.attention};
  return step;
}

// What a rank sends of one layer in one direction, by the table at the top of context_attention.h.
struct Law {
  int64_t forward, backward;
  explicit Law(const StepConfig& step) {
    const ModelConfig m = step.part();
    const int64_t P = step.layout.context.ranks, N = step.batch.rows() / P, D = m.head_size,
                  size = size_of(step.precision.weights);
    const int64_t K = N * 2 * m.n_kv_head * D * size, K32 = K / size * 4, Q = N * m.n_head * D * size;
    if (step.layout.context.attention != ContextAttention::ulysses) {
      forward = (P - 1) * K;
      backward = (P - 1) * (K + K32);
      return;
    }
    // Each of P ranks is sent Hq / P query heads, and the key-value heads that those use: at least one.
    const int64_t key_heads = std::max<int64_t>(1, m.n_kv_head / P), A = P * N * 2 * key_heads * D * size;
    const int64_t gradients = m.n_kv_head < P ? A / size * 4 : A;  // parts of them, where ranks share a head
    forward = (2 * Q + A) / P * (P - 1);
    backward = (4 * Q + A + gradients) / P * (P - 1);
  }
  int64_t of_step(const StepConfig& step) const {
    const int64_t again = step.recompute == Recompute::block ? forward : 0;
    return step.micro_batches * step.model.n_layer * (forward + again + backward);
  }
};

int64_t sent_to(const Plan& plan, const std::string& group) {
  for (const auto& [name, bytes] : plan.step_traffic)
    if (name == group) return bytes;
  throw Error("no group " + group);
}
int64_t line(const Plan& plan, const std::string& label) {
  for (const MemoryLine& l : plan.memory)
    if (l.label == label) return l.bytes;
  return 0;
}

// One training step on threads: every rank sends what its plan says, and its memory is used to the last byte.
void require_as_planned(const StepConfig& step) {
  const Device device{DeviceKind::cpu, 1};
  const Plan plan = make_plan(step, device);
  World world(step.layout.mesh());
  run_ranks(world, [&](int rank) {
    Run run(step, plan, device, world, rank);
    init_weights(run.trainer.state(), 1, run.stream);
    const BatchSource batches = [&](int64_t m) { return selftest::read_batch(step, run.groups.reader(), m); };
    const StepResult result = run.trainer.step(batches, {1e-3f, 0.9f, 0.95f, 1e-8f, 0, 1}, {});
    run.groups.reduce_stream().synchronize();
    CHECK(result.applied, "the step was not applied");
    const auto planned = make_plan(step, device, rank).step_traffic;
    const std::vector<Comm*> groups = run.groups.tensor_groups();
    for (size_t g = 0; g < groups.size(); ++g)
      CHECK(groups[g]->bytes_sent() == planned[g].second, "rank {} sends {} bytes to {}, planned {}", rank,
            groups[g]->bytes_sent(), groups[g]->name(), planned[g].second);
    CHECK(run.groups[GroupName::keys_values].bytes_sent() == sent_to(plan, "keys and values"),
          "ranks send different numbers of bytes of keys and values");
    run.trainer.evaluate(1, 1, batches);
    CHECK(run.arena.high_water() == plan.arena_bytes, "rank {} uses {} bytes, planned {}", rank, run.arena.high_water(),
          plan.arena_bytes);
  });
}

double flops_of(const Plan& plan, const std::string& part_of_name = "") {
  double flops = 0;
  for (const auto& [op, totals] : plan.step_ops)
    if (op.find(part_of_name) != op.npos) flops += totals.flops;
  return flops;
}

}  // namespace

TEST_CASE("what context-parallel ranks send obeys the law, planned and between threads, and their memory is as planned",
          "[parallel][cp]") {
  using enum ContextAttention;
  const std::vector<Case> cases = {
      {ring, 2},
      {ring, 4, 1, 1, DType::bf16},
      {ring, 4, 1, 1, DType::fp32, Recompute::block},
      {ring, 2, 2, 2, DType::bf16, Recompute::block},
      {all_gather, 4},
      {all_gather, 2, 2, 1, DType::bf16, Recompute::block},
      {ulysses, 2},
      {ulysses, 4, 1, 1, DType::bf16},  // the 2 key-value heads go to 2 ranks each
      {ulysses, 2, 4, 1, DType::fp32, Recompute::block},
      {ulysses, 8, 1, 1, DType::fp32},
  };
  for (const Case& c : cases) {
    INFO(c.text());
    const StepConfig step = step_of(c, 8, 2, {2, 32}, 3);
    const Plan plan = make_plan(step, {DeviceKind::cpu, 1});
    REQUIRE(sent_to(plan, "keys and values") == Law(step).of_step(step));
    REQUIRE(sent_to(plan, "scalars") == (step.layout.ranks() - 1) * 8 * (3 + step.model.n_layer + 2));
    require_as_planned(step);
  }
}

TEST_CASE("on paper the ring's transfers are hidden exactly where computation beside them takes longer",
          "[parallel][cp]") {
  // Products are slow, everything but links is free; all transfers but those of keys are exposed as without --cp, by
  // the law of "what is exposed of a step's communication is what no computation can hide" (test_clock.cpp).
  constexpr double infinite = std::numeric_limits<double>::infinity(), flops_per_s = 1e6;
  for (const DType dtype : {DType::fp32, DType::bf16})
    for (const int cp : {2, 4, 8})
      for (const ContextAttention attention : all_values<ContextAttention>()) {
        INFO(Case({attention, cp, 1, 1, dtype}).text());
        StepConfig step = step_of({attention, cp, 1, 1, dtype}, 8, 8, {2, 64});
        step.layout.zero.set_stage(1);
        const ModelConfig& m = step.model;
        // Two slices of L rows against two others, of which one pair sees half.
        const double L = static_cast<double>(step.layout.context.slice_rows(step.batch.T));
        const double pairs = 4.0 * static_cast<double>(step.batch.B * m.n_head * m.head_size) * L * L / flops_per_s;
        const double size = size_of(dtype), K = static_cast<double>(step.batch.rows() / cp * 2 * m.kv_size()) * size;
        // The slowest links on which all is hidden: in the forward the blocks of a step, 2 L^2 pairs, are beside K; in
        // the backward, at 2.5 times the work, a part of a step is beside K at the start, the rest of it beside its
        // gradients, in fp32, at the end, and a whole one beside both. The blocks on the diagonal, in the forward's
        // first step and at the end of the backward, have L (L + 1) pairs.
        const double K32 = K / size * 4, step_pairs = cp == 2 ? pairs * (2 + 1 / L) : 2 * pairs,
                     begin = 2.5 * pairs * std::floor(2 * L * size / (size + 4)) / L,
                     end = 2.5 * pairs * (2 + 1 / L) - begin;
        const double needed = std::max({K / step_pairs, K / begin, cp == 2 ? 0 : (K + K32) / (5 * pairs), K32 / end});
        // Where computation exceeds transfer in each step, but for the rounding to whole rows.
        REQUIRE(needed < (1 + 2 / L) * std::max(K / step_pairs, (K + K32) / (5 * pairs)));
        auto exposed_by_keys = [&](double link) {
          Device device{DeviceKind::cpu, 1};
          device.machine = ideal_machine(flops_per_s, infinite, link);
          const Plan plan = make_plan(step, device);
          int64_t first = 0;  // elements of the units whose weights are needed first, and whose gradients come last
          const ParamTable table = parameter_table(m);
          for (const UnitSpec& unit : table)
            if (unit.name == "embedding" || unit.name == "blocks.0") first += UnitLayout(unit, cp).size;
          const int64_t others =
              (4 + size_of(dtype)) * first / cp * (cp - 1) + 8 * static_cast<int64_t>(table.size() + 3) * (cp - 1);
          return plan.exposed_seconds - static_cast<double>(others) / link;
        };
        const double none = 1e-6 * pairs;
        if (attention == ContextAttention::ring) {
          REQUIRE(std::abs(exposed_by_keys(1.0001 * needed)) < none);
          REQUIRE(std::abs(exposed_by_keys(2 * needed)) < none);
          // Each layer waits for all that is missing.
          REQUIRE(exposed_by_keys(0.99 * needed) > 1e-3 * pairs * static_cast<double>(m.n_layer));
          REQUIRE(exposed_by_keys(0.25 * needed) > pairs * static_cast<double>(m.n_layer));
        } else {  // nothing is beside them
          for (const double link : {0.25 * needed, 2 * needed})
            REQUIRE(std::abs(exposed_by_keys(link) / (static_cast<double>(Law(step).of_step(step)) / link) - 1) < 1e-6);
        }
      }
}

TEST_CASE("context-parallel ranks have the same work, and together that of one rank", "[parallel][cp]") {
  for (const int cp : {2, 3, 4, 8, 16})
    for (const ContextAttention attention : all_values<ContextAttention>()) {
      INFO(Case({attention, cp}).text());
      const StepConfig step = step_of({attention, cp}, 48, 48, {1, 384}),
                       alone = step_of({attention, 1}, 48, 48, {1, 384});
      const Plan whole = make_plan(alone, {DeviceKind::cpu, 1});
      double least = std::numeric_limits<double>::infinity(), most = 0;
      std::map<std::string, double> sums;
      for (int rank = 0; rank < cp; ++rank) {
        const Plan plan = make_plan(step, {DeviceKind::cpu, 1}, rank);
        const double flops = flops_of(plan, "attention");
        least = std::min(least, flops);
        most = std::max(most, flops);
        for (const char* op : {"attention", "linear_forward", "linear_backward_input", "linear_backward_weight"})
          sums[op] += flops_of(plan, op);
      }
      REQUIRE(least > 0);
      REQUIRE(most <= 1.01 * least);
      for (const auto& [op, sum] : sums) {
        INFO(op);
        REQUIRE(std::abs(sum / flops_of(whole, op) - 1) < 1e-12);
      }
    }
}

TEST_CASE("a context-parallel rank keeps its share of the activations", "[parallel][cp]") {
  for (const ContextAttention attention : all_values<ContextAttention>())
    for (const int tp : {1, 2}) {
      INFO(Case({attention, 4, tp}).text());
      const StepConfig step = step_of({attention, 4, tp}, 8, 8, {1, 512});
      const Plan plan = make_plan(step, {DeviceKind::cpu, 1}),
                 alone = make_plan(step_of({attention, 1, tp}, 8, 8, {1, 512}), {DeviceKind::cpu, 1});
      REQUIRE(4 * line(plan, "activations") == line(alone, "activations"));
    }
}

namespace {

// A small Llama of 6 layers and 384 channels on 16,384 tokens; ulysses cannot share its 6 heads out to 4 ranks.
StepConfig long_step(int cp, ContextAttention attention) {
  StepConfig step{
      .model = resolve_model(
          "llama3:1B", {.n_layer = 6, .n_head = 6, .n_kv_head = 2, .n_embd = 384, .n_ffn = 1024, .vocab_size = 257}),
      .batch = {1, 16384},
      .layout = {.zero = {.shards = cp}},
      .generates = false};
  step.layout.context = ContextParallel{cp, attention};
  return step;
}

// The memory of this process in bytes: "VmRSS", or "VmHWM", the most since reset_peak().
int64_t resident(const std::string& which) {
  std::ifstream in("/proc/self/status");
  for (std::string line; std::getline(in, line);)
    if (line.starts_with(which)) return std::stoll(line.substr(which.size() + 1)) * 1024;
  throw Error("/proc/self/status has no " + which);
}
void reset_peak() { std::ofstream("/proc/self/clear_refs") << 5; }

}  // namespace

TEST_CASE("at 16,384 tokens each of four context-parallel ranks keeps a quarter of the activations", "[parallel][cp]") {
  for (const ContextAttention attention : {ContextAttention::ring, ContextAttention::all_gather}) {
    const Plan plan = make_plan(long_step(4, attention), {DeviceKind::cpu, 1}),
               alone = make_plan(long_step(1, attention), {DeviceKind::cpu, 1});
    REQUIRE(line(alone, "activations") > int64_t{2} << 30);
    REQUIRE(4 * line(plan, "activations") == line(alone, "activations"));
  }
}

TEST_CASE("the memory of a step of 16,384 tokens on four context-parallel ranks is as planned",
          "[parallel][cp][long]") {
  const StepConfig step = long_step(4, ContextAttention::ring);
  const int64_t planned = 4 * make_plan(step, {DeviceKind::cpu, 1}).total_bytes(), before = resident("VmRSS");
  reset_peak();
  require_as_planned(step);
  const int64_t used = resident("VmHWM") - before;
  WARN("planned for four ranks: " << planned << " bytes; the process grew by " << used);
  // What is not in the plan: the ranks' stacks, the batches on the host, the allocator's own.
  REQUIRE(used < planned + (int64_t{128} << 20));
}

TEST_CASE("Ulysses is refused where heads cannot be divided; the others are not", "[parallel][cp]") {
  const ModelConfig m = selftest::Model{"llama", true, DType::fp32, 6, 3}.config();
  using enum ContextAttention;
  const auto faults = [&](int tp, int cp, ContextAttention attention) {
    return layout_faults({.tensor = tensor_parallel(m, tp), .context = {cp, attention}}, m);
  };
  REQUIRE_ERROR(faults(1, 4, ulysses).refuse(),
                "--cp-attention ulysses with --cp 4: it must divide the 6 query heads, and divide the 3 key-value "
                "heads or be a multiple of them: use another --cp, or --cp-attention ring");
  REQUIRE_ERROR(faults(1, 2, ulysses).refuse(), "6 query heads, and divide the 3 key-value heads");
  REQUIRE_ERROR(faults(3, 4, ulysses).refuse(),
                "it must divide the 2 query heads of a tensor-parallel rank, and divide the 1 key-value heads");
  for (const int cp : {3, 6}) REQUIRE(faults(1, cp, ulysses).empty());
  REQUIRE(faults(3, 2, ulysses).empty());
  for (const ContextAttention attention : {ring, all_gather}) REQUIRE(faults(1, 4, attention).empty());
}

TEST_CASE("llama3:8B at 131,072 tokens is planned in a moment: what a rank keeps of a sequence fits a GPU",
          "[parallel][cp]") {
  StepConfig step{.model = resolve_model("llama3:8B", {}), .precision = DType::bf16, .batch = {1, 131072}};
  step.recompute = Recompute::block;
  step.generates = false;
  step.layout.zero.shards = 16;
  step.layout.zero.set_stage(3);
  step.layout.tensor = tensor_parallel(step.model, 8);
  const int64_t N = step.batch.T / 16 / 8, C = step.model.n_embd, L = step.model.n_layer;
  for (const ContextAttention attention : {ContextAttention::ring, ContextAttention::all_gather}) {
    step.layout.context = ContextParallel{16, attention};
    const Plan plan = make_plan(step, {DeviceKind::cpu, 1});
    REQUIRE(sent_to(plan, "keys and values") == Law(step).of_step(step));
    // A block keeps its output; the embedding's comes to that.
    REQUIRE(line(plan, "activations") >= (L + 1) * N * C * 2);
    REQUIRE(line(plan, "activations") <= 2 * (L + 1) * N * C * 2);
    REQUIRE(plan.total_bytes() < int64_t{80} << 30);
  }
}
