// Parameter servers: sums in rank order, traffic by the law, which rank holds what, one decision for all ranks, bugs
// that the self-test must find. The self-test checks that they agree with one rank, and with each other bit for bit.
#include <mutex>

#include "catch2.h"
#include "helpers.h"
#include "parallel/layout_bugs.h"
#include "run/checkpoints/checkpoint_write.h"
#include "run/selftest/selftest.h"

using namespace llmc;

namespace {

constexpr DpSync servers[] = {DpSync::parameter_server, DpSync::parameter_server_chain, DpSync::partitioned_server};

StepConfig step_of(int ranks, DpSync sync, GradReduce reduce = GradReduce::step, DType dtype = DType::fp32) {
  return selftest::step_config(selftest::awkward_model(), dtype, 1,
                               ZeroConfig{.grad_reduce = reduce, .shards = ranks, .sync = sync});
}

constexpr OptimizerOptions optimizer{
    .lr = 1e-2f, .beta1 = 0.9f, .beta2 = 0.95f, .eps = 1e-8f, .weight_decay = 0.1f, .step = 1};

// A number whose sums depend on their order.
float value(int rank, int64_t i) {
  const Philox rng(static_cast<uint64_t>(rank), "server");
  return static_cast<float>(static_cast<int32_t>(rng.bits(static_cast<uint64_t>(i)))) * 0x1p-20f;
}

}  // namespace

TEST_CASE("servers add in the order of the ranks, for any number of servers, and send the same to everyone",
          "[parallel][servers]") {
  for (const int P : {1, 2, 3, 5, 8})
    for (const int S : {1, 2, P})
      for (const int64_t n : {int64_t{1}, int64_t{130}, 2 * server::chunk_elements + 3}) {
        if (S > P || (P > 5 && n > 130)) continue;
        INFO(P << " ranks, " << S << " servers, parts of " << n);
        World world(Mesh({{Axis::shard, P}}));
        std::mutex mutex;
        int wrong = 0;
        run_ranks(world, [&](int rank) {
          const Device device{DeviceKind::cpu, 1};
          Arena arena(device, 16 << 20), scratch(device, 1 << 20);
          Stream stream(device, scratch);
          const auto comm = world.join(rank, "test", world.mesh().group(rank, {Axis::shard}));
          const Tensor buffer = arena.alloc("test", "buffer", DType::fp32, {S * n});
          float* x = buffer.data<float>();
          std::vector<float> sum(static_cast<size_t>(S * n));
          for (int64_t i = 0; i < S * n; ++i) {
            x[i] = value(rank, i);
            for (int r = 0; r < P; ++r) sum[static_cast<size_t>(i)] += value(r, i);
          }
          comm->push(buffer, S, stream);
          stream.synchronize();
          const int64_t pushed_out = comm->bytes_sent(), pushed_in = comm->bytes_received();
          int differ = 0;
          for (int64_t i = 0; i < S * n; ++i)
            differ += x[i] != (i / n == rank ? sum[static_cast<size_t>(i)] : value(rank, i));
          comm->pull(buffer, S, stream);
          stream.synchronize();
          for (int64_t i = 0; i < S * n; ++i) differ += x[i] != sum[static_cast<size_t>(i)];
          // A part goes to each server but oneself, and comes from everyone if one is a server; then it goes back.
          const bool serves = rank < S;
          const int64_t parts_out = S - (serves ? 1 : 0), parts_in = serves ? P - 1 : 0;
          differ += pushed_out != parts_out * n * 4 || pushed_in != parts_in * n * 4;
          differ += comm->bytes_sent() != (parts_out + parts_in) * n * 4;
          differ += comm->bytes_received() != (parts_out + parts_in) * n * 4;
          std::lock_guard lock(mutex);
          wrong += differ;
        });
        REQUIRE(wrong == 0);
      }
}

TEST_CASE("bytes through every rank's link match the law of --dp-sync, planned and between threads",
          "[parallel][servers]") {
  for (const int P : {2, 4})
    for (const DpSync sync : all_values<DpSync>())
      for (const GradReduce reduce : {GradReduce::step, GradReduce::micro})
        for (const DType dtype : {DType::fp32, DType::bf16}) {
          const StepConfig step = step_of(P, sync, reduce, dtype);
          INFO(P << " ranks, " << name_of(sync) << ", reduce " << name_of(reduce) << ", " << name_of(dtype));
          int64_t elements = 0;
          for (const UnitSpec& unit : parameter_table(step.model)) elements += UnitLayout(unit, P).size;
          const int64_t G = 4 * elements, W = size_of(dtype) * elements,
                        R = reduce == GradReduce::step ? 1 : step.micro_batches;
          const std::vector<LinkTraffic> law = link_traffic(P, G * R, W);
          const Plan plan = make_plan(step, {DeviceKind::cpu, 1});
          World world(step.layout.mesh());
          std::mutex mutex;
          std::string wrong;
          run_ranks(world, [&](int rank) {
            Run run(step, plan, {DeviceKind::cpu, 1}, world, rank);
            init_weights(run.trainer.state(), 1, run.stream);
            run.trainer.step([&](int64_t m) { return selftest::read_batch(step, rank, m); }, optimizer, {});
            for (Stream* s : {&run.stream, &run.groups.reduce_stream(), &run.groups.gather_stream()}) s->synchronize();
            std::lock_guard lock(mutex);
            int found = 0;
            const int64_t out = run.groups[GroupName::gradients].bytes_sent() +
                                run.groups[GroupName::weights].bytes_sent(),
                          in = run.groups[GroupName::gradients].bytes_received() +
                               run.groups[GroupName::weights].bytes_received();
            for (const LinkTraffic& link : law) {
              if (link.sync != sync || rank < link.first || rank > link.last) continue;
              ++found;
              if (out != link.out || in != link.in)
                wrong += formatted("rank {}: {} out and {} in, the law: {} and {}\n", rank, out, in, link.out, link.in);
            }
            if (found != 1) wrong += formatted("rank {}: {} laws\n", rank, found);
            // The losses of all ranks, and a central server's decision.
            const bool tells =
                (sync == DpSync::parameter_server || sync == DpSync::parameter_server_chain) && rank + 1 < P;
            if (run.groups[GroupName::scalars].bytes_sent() != (P - 1) * 8 * 8 + (tells ? 4 * 8 : 0))
              wrong += formatted("rank {}: {} bytes of scalars\n", rank, run.groups[GroupName::scalars].bytes_sent());
            if (rank > 1) return;  // plans are of ranks 0 and 1
            for (const GroupName id : {GroupName::gradients, GroupName::weights, GroupName::scalars})
              for (const auto& [group, bytes] : plan.of(rank).step_traffic)
                if (group == run.groups[id].name() && bytes != run.groups[id].bytes_sent() &&
                    (rank == 0 || plan.others))
                  wrong += formatted("rank {}: {} bytes planned for {}\n", rank, bytes, group);
          });
          REQUIRE(wrong == "");
        }
}

TEST_CASE("a server of one rank is that rank alone, bit for bit", "[parallel][servers]") {
  for (const GradReduce reduce : {GradReduce::step, GradReduce::micro}) {
    const selftest::Outcome alone = selftest::run_layout(step_of(1, DpSync::all_reduce, reduce));
    for (const DpSync sync : servers) {
      INFO(name_of(sync) << ", reduce " << name_of(reduce));
      const selftest::Outcome outcome = selftest::run_layout(step_of(1, sync, reduce));
      REQUIRE((outcome.fault == "" && outcome.losses == alone.losses && outcome.weights == alone.weights));
    }
  }
}

TEST_CASE("only servers hold master weights, moments and reduced gradients", "[parallel][servers]") {
  for (const GradReduce reduce : {GradReduce::step, GradReduce::micro}) {
    auto bytes = [&](const Plan& plan, const std::string& label) {
      for (const MemoryLine& line : plan.memory)
        if (line.label == label) return line.bytes;
      return int64_t{0};
    };
    const Device device{DeviceKind::cpu, 1};
    const Plan everyone = make_plan(step_of(4, DpSync::all_reduce, reduce, DType::bf16), device),
               sharded = make_plan(step_of(4, DpSync::partitioned_server, reduce, DType::bf16), device);
    REQUIRE((!everyone.others && !sharded.others));
    const StepConfig stage1 = [&] {
      StepConfig step = step_of(4, DpSync::all_reduce, reduce, DType::bf16);
      step.layout.zero.stage = 1;
      return step;
    }();
    for (const MemoryLine& line : make_plan(stage1, device).memory) REQUIRE(line.bytes == bytes(sharded, line.label));
    for (const DpSync sync : {DpSync::parameter_server, DpSync::parameter_server_chain}) {
      const Plan server = make_plan(step_of(4, sync, reduce, DType::bf16), device);
      REQUIRE(server.others);
      for (const MemoryLine& line : everyone.memory) {
        INFO(line.label);
        REQUIRE(bytes(server, line.label) == line.bytes);
        const bool only_served = line.label == "master weights" || line.label.starts_with("AdamW") ||
                                 (line.label == "gradients" && reduce == GradReduce::micro);
        if (line.label != "op scratch") REQUIRE(bytes(*server.others, line.label) == (only_served ? 0 : line.bytes));
      }
    }
  }
}

TEST_CASE("the self-test finds a server that skips a rank, adds in another order, or sends old or too few weights",
          "[parallel][servers]") {
  using namespace layout_bugs;
  const auto three_ranks = [](int ranks, const ModelConfig*) {
    std::vector<Layout> all;
    for (const DpSync sync : servers)
      if (ranks == 3) all.push_back({{.shards = 3, .sync = sync}});
    return all;
  };
  Log silent = Log::silent();
  const std::vector<selftest::ModelLayouts> models =
      selftest::all_layouts(3, {{"gpt2", true, DType::fp32}}, three_ranks);
  REQUIRE(run_selftest(silent, models));
  const Replaces<ServerSkipsARank> skips;
  const Replaces<ServerAddsAsItArrives> arrival;
  const Replaces<ServerSendsStaleWeights> stale;
  const Replaces<PullsOnePart> one_part;
  const Replaces<UntoldDecision> untold;
  using Hits = std::vector<DpSync>;
  const Hits all(std::begin(servers), std::end(servers)),
      direct = {DpSync::parameter_server, DpSync::partitioned_server}, partitioned = {DpSync::partitioned_server},
      central = {DpSync::parameter_server, DpSync::parameter_server_chain};
  for (const auto& [bug, hooks, hits] : {std::tuple{"skips a rank", static_cast<const Hooks*>(&skips), all},
                                         {"arrival order", &arrival, central},
                                         {"stale weights", &stale, direct},
                                         {"one part", &one_part, partitioned},
                                         {"untold", &untold, central}}) {
    INFO(bug);
    REQUIRE_FALSE(run_selftest(silent, models, {}, {.hooks = *hooks}));
    for (const DpSync sync : hits) {  // each of them, not only one
      INFO(name_of(sync));
      const selftest::Outcome right = selftest::run_layout(step_of(3, sync)),
                              wrong = selftest::run_layout(step_of(3, sync), {}, {.hooks = *hooks});
      REQUIRE((wrong.fault != "" || wrong.losses != right.losses || wrong.weights != right.weights));
    }
  }
}

TEST_CASE("the server decides for all ranks: a step that is not finite, or an outlier, changes no rank",
          "[parallel][servers]") {
  for (const DpSync sync : servers) {
    INFO(name_of(sync));
    const StepConfig step = step_of(3, sync);
    const Plan plan = make_plan(step, {DeviceKind::cpu, 1});
    World world(step.layout.mesh(), Backend::threads, poison_hooks);
    std::mutex mutex;
    int good = 0;
    run_ranks(world, [&](int rank) {
      Run run(step, plan, {DeviceKind::cpu, 1}, world, rank);
      init_weights(run.trainer.state(), 3, run.stream);
      const BatchSource batches = [&](int64_t m) { return selftest::read_batch(step, rank, m); };
      auto weights = [&] {
        run.stream.synchronize();
        const Tensor t = run.trainer.state().unit(1).weights();
        return std::vector<float>(t.data<float>(), t.data<float>() + t.numel());
      };
      const std::vector<float> before = weights();
      const StepResult outlier = run.trainer.step(batches, optimizer, {.max_norm = 1, .largest_norm = 1e-3});
      const bool skipped = !outlier.applied && outlier.finite() && weights() == before;
      const StepResult usual = run.trainer.step(batches, optimizer, {.max_norm = 1});
      const std::vector<float> after = weights();
      // A NaN in the weights of one rank that is no server.
      Tensor bias = run.trainer.state().unit(1).weight("ln1.bias");
      const float kept = bias.data<float>()[0];
      if (rank == 2) bias.data<float>()[0] = std::numeric_limits<float>::quiet_NaN();
      const StepResult bad = run.trainer.step(batches, optimizer, {.max_norm = 1});
      run.stream.synchronize();
      if (rank == 2) bias.data<float>()[0] = kept;
      const StepResult later = run.trainer.step(batches, optimizer, {.max_norm = 1});
      std::lock_guard lock(mutex);
      good += skipped && usual.applied && after != before && !bad.finite() && !later.applied && weights() == after;
    });
    REQUIRE(good == 3);
  }
}
