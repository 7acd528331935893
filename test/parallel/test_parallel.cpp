// Many ranks in one process: data parallelism in every ZeRO stage, traffic volume, memory by stage, layout-independent
// checkpoints, overlap, and planted bugs that the self-test must find.
#include <latch>
#include <mutex>
#include <ranges>
#include <set>

#include "catch2.h"
#include "core/signals.h"
#include "helpers.h"
#include "parallel/layout_bugs.h"
#include "run/checkpoints/checkpoint_write.h"
#include "run/reports/report.h"
#include "run/selftest/selftest.h"

using namespace llmc;

// Every pair of choices; the long tests have all layouts.
TEST_CASE(
    "layouts of up to four and of eight ranks agree with one rank, and the ZeRO stages with each other bit for bit, "
    "with gradient accumulation",
    "[parallel][zero]") {
  using selftest::all_layouts, selftest::every_pair;
  const auto four_or_eight = [](int ranks, const ModelConfig* model) {
    return ranks == 4 || ranks == 8 ? selftest::layouts(ranks, model) : std::vector<Layout>();
  };
  std::vector<selftest::Model> models = selftest::all_models();
  std::erase_if(models, [](const selftest::Model& m) {  // these are among the long tests
    return m.dtype == DType::bf16 && m.config().experts.count == 0;
  });
  Log log = Log::silent();
  REQUIRE(run_selftest(log, every_pair(all_layouts(3, models))));
  REQUIRE(run_selftest(log, every_pair(all_layouts(8, {{"gpt2", true, DType::fp32}}, four_or_eight))));
  REQUIRE(run_selftest(log, every_pair(all_layouts(4, {{"qwen3", false, DType::bf16}}, four_or_eight))));
}

TEST_CASE("four and eight ranks with tensor parallelism agree with one rank", "[parallel][zero]") {
  const auto layouts = [](int ranks, const ModelConfig* model) {
    std::vector<Layout> some;
    for (const Layout& layout : selftest::layouts(ranks, model))
      if (layout.zero.replicas == 1 && layout.zero.grad_reduce == GradReduce::step &&
          (ranks == 4 || (ranks == 8 && layout.zero.stage % 3 == 0 && layout.tensor.ranks > 2)))
        some.push_back(layout);
    return some;
  };
  Log log = Log::silent();
  REQUIRE(
      run_selftest(log, selftest::every_pair(selftest::all_layouts(
                            8, {{"qwen2", true, DType::fp32, 8, 2}, {"gpt2", false, DType::bf16, 8, 8}}, layouts))));
}

TEST_CASE(
    "the self-test's subset has every pair of choices that occurs, in either dtype, each with the first of its kind",
    "[parallel][zero]") {
  using namespace selftest;
  // Some of the pairs, and what must be among them.
  const auto pairs = [](const std::vector<ModelLayouts>& models) {
    std::set<std::string> all;
    for (const auto& [m, layouts] : models)
      for (const Layout& l : layouts) {
        const std::string tp = formatted("tp {} by rows {}", l.tensor.ranks, l.tensor.sequence);
        all.insert(formatted("{} {}, stage {}", m.dtype, m.family, l.zero.stage));
        all.insert(formatted("{} {}, {} ranks", m.dtype, m.family, l.ranks()));
        all.insert(formatted("{} {}, {}", m.dtype, l.zero.sync, l.zero.grad_reduce));
        all.insert(formatted("{} {} replicas, stage {}", m.dtype, l.zero.replicas, l.zero.stage));
        all.insert(formatted("{} {}, stage {}", m.dtype, tp, l.zero.stage));
        all.insert(formatted("{} {} key-value heads, {}", m.dtype, m.kv_heads, tp));
        all.insert(formatted("{} cp {} {}, {}", m.dtype, l.context.ranks, l.context.attention, tp));
        all.insert(formatted("{} pp {} {}, {}", m.dtype, l.pipeline.stages, l.pipeline.schedule, tp));
        all.insert(formatted("{} ep {}, pp {}", m.dtype, l.expert.ranks, l.pipeline.stages));
        all.insert(formatted("{} tied {}, pp {} {}", m.dtype, m.tied, l.pipeline.stages, l.pipeline.schedule));
      }
    return all;
  };
  const std::vector<ModelLayouts> eight = all_layouts(8);
  for (const char* pair : {"fp32 qwen3, stage 3", "bf16 llama, 8 ranks", "fp32 1 key-value heads, tp 2 by rows true",
                           "fp32 cp 4 ring, tp 2 by rows true", "bf16 ep 4, pp 2", "fp32 tied true, pp 4 zb-v"})
    REQUIRE(pairs(eight).contains(pair));
  for (const int ranks : {1, 2, 8}) {
    const std::vector<ModelLayouts> all = all_layouts(ranks), some = every_pair(all);
    INFO(ranks << ": " << count_layouts(some) << " of " << count_layouts(all));
    REQUIRE(pairs(some) == pairs(all));
    REQUIRE(count_layouts(some) < count_layouts(all) / (ranks == 8 ? 5 : 1));
    for (const ModelLayouts& m : some) {
      const auto same_model =
          std::ranges::find(all, to_string(m.model), [](const ModelLayouts& l) { return to_string(l.model); });
      REQUIRE(same_model != all.end());
      std::string first_kept, first;
      size_t next = 0;  // in the list of all; they are in the same order
      for (const Layout& layout : m.layouts) {
        if (begins(layout)) first_kept = to_string(layout);
        for (;; ++next) {
          const Layout& candidate = same_model->layouts.at(next);
          if (begins(candidate)) first = to_string(candidate);
          if (to_string(candidate) == to_string(layout)) break;
        }
        REQUIRE(first == first_kept);
      }
    }
  }
}

TEST_CASE("every layout of up to eight ranks, with every family in every dtype", "[parallel][zero][long]") {
  Log log = Log::silent();
  REQUIRE(run_selftest(log, selftest::all_layouts(8)));
}

TEST_CASE("the self-test finds a skipped reduction, a mean instead of a sum, a duplicate sample and a stale unit",
          "[parallel][zero]") {
  using namespace layout_bugs;
  const Replaces<SkippedReduction> skipped_reduction;
  const Replaces<MeanInsteadOfSum> mean_instead_of_sum;
  const Replaces<StaleGather> stale_gather;
  const StepConfig one_rank = selftest::step_config(selftest::awkward_model(), DType::fp32, 1, ZeroConfig{});
  const selftest::Outcome alone = selftest::run_layout(one_rank);
  struct Case {
    const char* bug;
    selftest::Parts parts;
    int first_stage;  // that it affects
  };
  for (const auto& [bug, parts, first_stage] :
       {Case{"skipped reduction", {.hooks = skipped_reduction}, 0},
        Case{"mean instead of sum", {.hooks = mean_instead_of_sum}, 0},
        Case{"duplicate sample", {.read = read_as_rank_0}, 0}, Case{"stale unit", {.hooks = stale_gather}, 1}}) {
    INFO(bug);
    Log log = Log::silent();
    REQUIRE_FALSE(run_selftest(log, selftest::all_layouts(2, {{"gpt2", true, DType::fp32}}), {}, parts));
    for (const Layout& layout : selftest::layouts(2)) {
      const ZeroConfig& zero = layout.zero;
      if (zero.stage < first_stage || (first_stage > 0 && zero.shards == 1) || zero.sync != DpSync::all_reduce)
        continue;
      INFO("stage " << zero.stage << ", " << zero.shards << " shards, reduce " << name_of(zero.grad_reduce));
      StepConfig step = one_rank;
      step.layout.zero = zero;
      step.micro_batches /= 2;
      const selftest::Distances d(selftest::run_layout(step, {}, parts), alone);
      REQUIRE_FALSE(std::max(d.gradients, d.weights) < 1e-5);
    }
  }
}

TEST_CASE("bytes sent per step match the formula, planned and between threads", "[parallel][zero]") {
  for (const auto& [shards, replicas] : {std::pair{1, 1}, {2, 1}, {4, 1}, {2, 2}, {1, 3}, {3, 2}})
    for (const GradReduce reduce : {GradReduce::step, GradReduce::micro})
      for (int stage = 0; stage <= 3; ++stage)
        for (const auto& [dtype, tied] : {std::pair{DType::fp32, true}, {DType::bf16, false}}) {
          const ZeroConfig zero{.stage = stage, .grad_reduce = reduce, .shards = shards, .replicas = replicas};
          const StepConfig config = selftest::step_config(selftest::awkward_model("gpt2", tied), dtype, 1, zero);
          INFO(shards << " shards, " << replicas << " replicas, stage " << stage << ", reduce " << name_of(reduce));
          // By hand: units are padded to multiples of 64 x ranks elements.
          const int64_t P = shards, Q = replicas, M = config.micro_batches, R = reduce == GradReduce::step ? 1 : M;
          int64_t elements = 0, once = 0;  // once: gathered once a micro-batch in stage 3
          for (const UnitSpec& unit : parameter_table(config.model)) {
            const int64_t size = UnitLayout(unit, P * Q).size;
            REQUIRE(size % (64 * P * Q) == 0);
            elements += size;
            if (unit.name == "head" || (unit.name == "embedding" && !tied)) once += size;
          }
          const int64_t G = 4 * elements, W = size_of(dtype) * elements, W_once = size_of(dtype) * once;
          auto f = [&](int64_t bytes) { return bytes / P * (P - 1); };
          std::map<std::string, int64_t> law;
          law["gradients"] = (stage == 0 ? 2 : 1) * f(G) * R;
          law["replicas"] = 2 * (G / P / Q * (Q - 1)) * R;
          law["weights"] = stage == 3 ? f(2 * W - W_once) * M : stage > 0 ? f(W) : 0;
          law["scalars"] = (P * Q - 1) * 8 * 8;  // loss, two notices and five units
          const Plan plan = make_plan(config, {DeviceKind::cpu, 1});
          for (const auto& [group, bytes] : plan.step_traffic) {
            INFO(group);
            REQUIRE(bytes == law[group]);
          }
          if (shards * replicas == 1) continue;
          std::vector<std::map<std::string, int64_t>> counted(static_cast<size_t>(zero.ranks()));
          World world(Layout{.zero = zero}.mesh());
          run_ranks(world, [&](int rank) {
            Run run(config, plan, {DeviceKind::cpu, 1}, world, rank);
            init_weights(run.trainer.state(), 1, run.stream);
            run.trainer.step(
                [&](int64_t) {
                  HostBatch batch;
                  for (int32_t i = 0; i < selftest::seq_len; ++i)
                    batch.tokens.push_back(i), batch.targets.push_back(i + 1), batch.positions.push_back(i);
                  return batch;
                },
                {.lr = 1e-3f, .beta1 = 0.9f, .beta2 = 0.95f, .eps = 1e-8f, .weight_decay = 0, .step = 1}, {});
            run.groups.gather_stream().synchronize();
            run.groups.reduce_stream().synchronize();
            for (const Comm* comm : run.groups.tensor_groups())
              counted[static_cast<size_t>(rank)][comm->name()] = comm->bytes_sent();
          });
          for (const auto& sent : counted)
            for (const auto& [group, bytes] : sent) {
              INFO(group << " between threads");
              REQUIRE(bytes == law[group]);
            }
        }
}

TEST_CASE("memory of model states by stage is the ZeRO paper's, for the dtypes in use", "[parallel][zero]") {
  // 124M parameters over 8 ranks: in bf16, 2 + 4 + 12 bytes per parameter, of which stage 1 shards 12, stage 2 16,
  // stage 3 18.
  const StepConfig alone{.model = resolve_model("gpt2:124M", {}), .precision = DType::bf16, .batch = {1, 64}};
  int64_t padded = 0, in_flight = 0;
  for (const UnitSpec& unit : parameter_table(alone.model)) {
    const int64_t size = UnitLayout(unit, 8).size;
    padded += size;
    if (unit.name == "embedding" || unit.name == "head") in_flight += size;
    if (unit.name == "blocks.0") in_flight += 2 * size;
  }
  auto states = [&](int stage) {
    StepConfig c = alone;
    c.layout.zero.shards = 8;
    c.layout.zero.set_stage(stage);
    int64_t bytes = 0;
    for (const MemoryLine& line : make_plan(c, {DeviceKind::cpu, 1}).memory)
      for (const char* label : {"weights", "master weights", "gradients", "AdamW first moment", "AdamW second moment"})
        if (line.label == label) bytes += line.bytes;
    return bytes;
  };
  auto is = [](int64_t found, int64_t law) { return found >= law && found <= law + 14 * 5 * Arena::alignment; };
  REQUIRE(is(states(0), 18 * padded));
  REQUIRE(is(states(1), 6 * padded + 12 * padded / 8));
  REQUIRE(is(states(2), 2 * padded + 16 * padded / 8));
  REQUIRE(is(states(3), 18 * padded / 8));
  // Additional memory: whole units in flight, of gradients from stage 2 on, of weights in stage 3.
  StepConfig c = alone;
  c.layout.zero.shards = 8;
  c.layout.zero.set_stage(3);
  for (const MemoryLine& line : make_plan(c, {DeviceKind::cpu, 1}).memory) {
    if (line.label == "gathered weights") REQUIRE(line.bytes == 2 * in_flight);
    if (line.label == "gradients in flight") REQUIRE(line.bytes == 4 * in_flight);
  }
}

namespace {

// The full state of all ranks: every kind of every parameter.
using WholeState = std::map<std::string, std::vector<float>>;

StepConfig layout(int ranks, int stage, DType dtype) {
  ZeroConfig zero{.shards = ranks};
  zero.set_stage(stage);
  return selftest::step_config(selftest::awkward_model(), dtype, 1, zero);
}

// Loads `from` (or initialises weights), saves to `out` as step `step`, and returns the state.
WholeState pass_through(const StepConfig& config, const std::string& from, const std::string& out, int64_t step) {
  const Plan plan = make_plan(config, {DeviceKind::cpu, 1});
  World world(config.layout.mesh(), Backend::threads, poison_hooks);
  WholeState whole;
  std::mutex mutex;
  run_ranks(world, [&](int rank) {
    Run run(config, plan, {DeviceKind::cpu, 1}, world, rank);
    if (from.empty()) {
      init_weights(run.trainer.state(), 3, run.stream);
      for (const StateEntry& e : run.trainer.state().state_table())  // moments too
        if (e.kind == StateKind::slot)
          init_normal(e.tensor, 0.3f, e.elements(), 5, e.param->name + e.name(), run.stream);
    } else {
      load_checkpoint(from, config.model, run.trainer.state(), run.stream);
    }
    run.stream.synchronize();
    {
      std::lock_guard lock(mutex);
      for (const StateEntry& e : run.trainer.state().state_table()) {
        std::vector<float>& to = whole[e.param->name + e.name()];
        to.resize(static_cast<size_t>(e.param->numel()));
        with_type(e.tensor.dtype, [&](auto tag) {
          const auto* from = e.tensor.data<typename decltype(tag)::type>();
          for (int64_t i = 0; i < e.tensor.numel(); ++i)
            to[static_cast<size_t>(e.begin + i)] = static_cast<float>(from[i]);
        });
      }
    }
    CheckpointWrite(out, step, config.model, run.trainer.state(), run.stream, {.trainer = {{"seq_len", 19}}}).publish();
  });
  return whole;
}

// How many ops of the backward ran entirely during the reduction of an earlier unit, over a link this slow.
int ops_during_reductions(bool pushed, double seconds_per_byte) {
  ZeroConfig zero{.stage = 2, .grad_reduce = GradReduce::micro, .shards = 2};
  if (pushed) zero.stage = 0, zero.sync = DpSync::parameter_server;
  StepConfig config = selftest::step_config(selftest::awkward_model(), DType::fp32, 12, zero);
  const Plan plan = make_plan(config, {DeviceKind::cpu, 1});
  World world(Layout{.zero = zero}.mesh());
  world.throttle(seconds_per_byte);
  const TraceZero now;
  StreamTrace compute("compute", now), reduce("reduce", now);
  run_ranks(world, [&](int rank) {
    Run run(config, plan, {DeviceKind::cpu, 1}, world, rank);
    init_weights(run.trainer.state(), 1, run.stream);
    run.stream.synchronize();
    if (rank == 0) run.stream.set_trace(&compute), run.groups.reduce_stream().set_trace(&reduce);
    run.trainer.accumulate_gradients([&](int64_t) {
      HostBatch batch;
      for (int32_t i = 0; i < config.batch.rows(); ++i)
        batch.tokens.push_back(i % 100), batch.targets.push_back(i % 99), batch.positions.push_back(i % 19);
      return batch;
    });
    run.stream.synchronize();
    run.groups.reduce_stream().synchronize();
  });
  int overlapping = 0;
  const Track of_compute = compute.take(), of_reduce = reduce.take();
  for (const TraceSpan& r : of_reduce.spans)
    for (const TraceSpan& c : of_compute.spans)
      overlapping += r.name.starts_with(pushed ? "push:" : "reduce_scatter:") && c.kind == SpanKind::op &&
                     c.name.find("_backward") != std::string::npos && r.begin < c.begin && c.end < r.end;
  return overlapping;
}

// Each layout writes, and every stride-th of all layouts reads it, beginning with another one for each.
void compare_readers(size_t stride) {
  for (const DType dtype : {DType::fp32, DType::bf16}) {
    const TempDir dir;
    int64_t step = 0;
    const WholeState original = pass_through(layout(1, 0, dtype), "", dir.path(), ++step);
    for (const auto& [name, values] : original)
      for (float v : values) REQUIRE(std::isfinite(v));
    std::vector<StepConfig> layouts;
    for (const int ranks : {1, 2, 4})
      for (int stage = 0; stage <= 3; ++stage) layouts.push_back(layout(ranks, stage, dtype));
    for (const DpSync sync : {DpSync::parameter_server, DpSync::partitioned_server}) {
      layouts.push_back(layout(4, 0, dtype));
      layouts.back().layout.zero.sync = sync;
    }
    for (size_t w = 0; w < layouts.size(); ++w) {
      const StepConfig& writer = layouts[w];
      INFO(name_of(dtype) << ", " << detail::layout_text(writer));
      const int64_t here = ++step;
      REQUIRE(pass_through(writer, checkpoint_path(dir.path(), 1), dir.path(), here) == original);
      REQUIRE_FALSE(checkpoint_fault(checkpoint_path(dir.path(), here)));
      for (size_t r = w % stride; r < layouts.size(); r += stride) {
        const StepConfig& reader = layouts[r];
        const WholeState read = pass_through(reader, checkpoint_path(dir.path(), here), dir.path(), ++step);
        for (const auto& [name, values] : original) {
          INFO(name << " read by " << detail::layout_text(reader));
          REQUIRE(read.at(name) == values);
        }
        REQUIRE(read.size() == original.size());
      }
    }
  }
}

}  // namespace

TEST_CASE("checkpoints are layout-independent: any layout reads what others wrote, bit for bit", "[parallel][zero]") {
  compare_readers(5);
}
TEST_CASE("any layout reads what any other wrote, bit for bit", "[parallel][zero][long]") { compare_readers(1); }

TEST_CASE("the reduction of a unit's gradients overlaps with the backward of the next one", "[parallel][zero]") {
  const bool pushed = GENERATE(false, true);  // to a parameter server
  // A block's gradients take tens of milliseconds; longer if a busy machine gave the backward no core meanwhile.
  int overlapping = 0;
  for (double seconds_per_byte = 2e-6; overlapping == 0 && seconds_per_byte < 1e-3; seconds_per_byte *= 5)
    overlapping = ops_during_reductions(pushed, seconds_per_byte);
  REQUIRE(overlapping > 0);
}

TEST_CASE("a step that is interrupted in the middle can be saved, in every stage and with a parameter server",
          "[parallel][zero]") {
  const TempDir dir;
  for (int stage = 0; stage <= 4; ++stage) {
    StepConfig config = layout(2, stage % 4, DType::fp32);
    if (stage == 4) config.layout.zero.sync = DpSync::parameter_server;
    const Plan plan = make_plan(config, {DeviceKind::cpu, 1});
    World world(config.layout.mesh(), Backend::threads, poison_hooks);
    run_ranks(world, [&](int rank) {
      Run run(config, plan, {DeviceKind::cpu, 1}, world, rank);
      init_weights(run.trainer.state(), 3, run.stream);
      try {
        run.trainer.accumulate_gradients([&](int64_t m) -> HostBatch {
          if (m == 1) throw Interrupted{"test"};
          HostBatch batch;
          for (int32_t i = 0; i < 19; ++i)
            batch.tokens.push_back(i), batch.targets.push_back(i), batch.positions.push_back(i);
          return batch;
        });
      } catch (const Interrupted&) {
      }
      CheckpointWrite(dir.path(), stage + 1, config.model, run.trainer.state(), run.stream,
                      {.trainer = {{"seq_len", 19}}})
          .publish();
    });
    REQUIRE_FALSE(checkpoint_fault(checkpoint_path(dir.path(), stage + 1)));
  }
}

TEST_CASE("an error during gradient reduction prevents the update on every rank", "[parallel][zero]") {
  const StepConfig config = layout(2, 2, DType::fp32);
  const Plan plan = make_plan(config, {DeviceKind::cpu, 1});
  World world(config.layout.mesh(), Backend::threads, poison_hooks);
  std::mutex mutex;
  int unchanged = 0;
  std::latch begun(2);  // else a rank that is late would be ended before its step
  REQUIRE_THROWS_WITH(
      run_ranks(world,
                [&](int rank) {
                  Run run(config, plan, {DeviceKind::cpu, 1}, world, rank);
                  init_weights(run.trainer.state(), 3, run.stream);
                  run.stream.synchronize();
                  auto weights = [&] {
                    const Tensor t = run.trainer.state().front().weights();
                    return std::vector<float>(t.data<float>(), t.data<float>() + t.numel());
                  };
                  const std::vector<float> before = weights();
                  begun.arrive_and_wait();
                  run.groups.reduce_stream().enqueue([&] {
                    if (rank == 1) throw Error("the wire was cut");
                  });
                  try {
                    run.trainer.step(
                        [&](int64_t) {
                          HostBatch b;
                          for (int32_t i = 0; i < 19; ++i)
                            b.tokens.push_back(i), b.targets.push_back(i), b.positions.push_back(i);
                          return b;
                        },
                        {.lr = 1, .beta1 = 0.9f, .beta2 = 0.95f, .eps = 1e-8f, .weight_decay = 0, .step = 1},
                        {.max_norm = 1});
                  } catch (const Error&) {
                    world.abort();
                    for (Stream* s : {&run.stream, &run.groups.reduce_stream(), &run.groups.gather_stream()})
                      REQUIRE_THROWS_AS(s->synchronize(), Error);
                    std::lock_guard lock(mutex);
                    unchanged += weights() == before;
                    throw;
                  }
                }),
      Catch::Matchers::ContainsSubstring("rank 1 on ") && Catch::Matchers::ContainsSubstring("the wire was cut"));
  REQUIRE(unchanged == 2);
}

TEST_CASE("bf16 weights without masters are rounded identically in every layout", "[zero][parallel]") {
  selftest::Outcome alone;
  std::vector<Layout> layouts = selftest::layouts(1);
  for (const Layout& layout : selftest::layouts(2))
    if (layout.zero.shards == 2) layouts.push_back(layout);
  for (const ZeroConfig& zero : layouts | std::views::transform(&Layout::zero)) {
    StepConfig step = selftest::step_config(selftest::awkward_model(), DType::bf16, 4, zero);
    step.precision.masters = false;
    for (const MemoryLine& line : make_plan(step, {DeviceKind::cpu, 1}).memory) REQUIRE(line.label != "master weights");
    const selftest::Outcome outcome = selftest::run_layout(step);
    REQUIRE(outcome.fault == "");
    if (zero.stage == 0) alone = outcome;
    REQUIRE(outcome.losses == alone.losses);
    REQUIRE(outcome.weights == alone.weights);
  }
  // The updates equal those of master weights up to the rounding, which is unbiased.
  const selftest::Outcome masters =
      selftest::run_layout(selftest::step_config(selftest::awkward_model(), DType::bf16, 4, ZeroConfig{.shards = 2}));
  REQUIRE(selftest::distance(alone.weights, masters.weights) < 0x1p-7);
}

TEST_CASE("the self-test says what it compares, with what axes, at what distances and how long it took",
          "[parallel][zero]") {
  const TempDir dir;
  Log log;
  log.open(dir.path(), 0);
  REQUIRE(run_selftest(log, selftest::all_layouts(2, {{"gpt2", true, DType::bf16, 6, 3},
                                                      {"llama", false, DType::bf16, 8, 4, selftest::seq_len, 9}})));
  const std::string text = read_whole(dir / "log.txt");
  INFO(text);
  for (const char* line :
       {"self-test: 9 layouts of up to 2 ranks; in each, ranks together train a tiny model for 2 steps\n",
        "\nllama in bf16, untied embeddings, 8 heads on 4 key-value heads, 9 layers | ZeRO, pp\n"
        "  largest distance from one rank          loss      norm gradients   weights\n"
        "  allowed                              1.0e-03 ",
        "\n  2 ranks: 9 of 9 layouts good         ", "\nself-test: 9 of 9 layouts are good | 0:"})
    REQUIRE(text.find(line) != std::string::npos);
  REQUIRE(text.find("with tp") == std::string::npos);  // no layout has it
  REQUIRE(text.find("gpt2") == std::string::npos);     // six heads, as few as two ranks cannot share three of
}
