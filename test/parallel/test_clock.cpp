// Time on paper: the duration of collectives, and the exposed part of a step's communication, against laws by hand.
#include "catch2.h"
#include "run/plan/planner.h"
#include "run/selftest/selftest.h"

using namespace llmc;

namespace {

constexpr double infinite = std::numeric_limits<double>::infinity();

Device with_rates(double flops_per_s, double bytes_per_s, double link_bytes_per_s, double link_latency_s) {
  Device device{DeviceKind::cpu, 1};
  device.machine = ideal_machine(flops_per_s, bytes_per_s, link_bytes_per_s, link_latency_s);
  return device;
}

// A step of one micro-batch on each rank, so small that all of it can be counted by hand.
StepConfig one_micro_batch(int ranks, int stage) {
  ZeroConfig zero{.shards = ranks};
  zero.set_stage(stage);
  return selftest::step_config(selftest::awkward_model(), DType::fp32, selftest::sequences / ranks, zero);
}

// Seconds of what rank `rank` of four sends and receives in `collective`, of four shards of n fp32.
template <class F>
double seconds_of(int rank, int64_t n, F&& collective) {
  const Device paper = with_rates(1, 1, 1e6, 1e-3).on_paper();
  Arena arena(paper), scratch(paper);
  Stream stream(paper, scratch);
  Comm comm("test", std::make_unique<NullTransport>(rank, 4));
  collective(comm, arena.alloc("test", "buffer", DType::fp32, {4 * n}), stream);
  REQUIRE(stream.exposed_seconds() == stream.seconds());
  return stream.seconds();
}

}  // namespace

TEST_CASE("a collective on paper takes a latency from rank to rank, and its bytes over the link's rate",
          "[parallel][plan]") {
  const int64_t n = 3 * ring::chunk_elements + 5;  // the chunks of a message count once
  const double latency = 1e-3, shard = 4e-6 * static_cast<double>(n);
  auto is = [&](double seconds, int messages, int shards) {
    return std::abs(seconds - (messages * latency + shards * shard)) < 1e-12;
  };
  for (const int rank : {0, 1, 3}) {
    INFO("rank " << rank);
    REQUIRE(is(seconds_of(rank, n, [](Comm& c, Tensor x, Stream& s) { c.reduce_scatter(x, s); }), 3, 3));
    REQUIRE(is(seconds_of(rank, n, [](Comm& c, Tensor x, Stream& s) { c.all_gather(x, s); }), 3, 3));
    REQUIRE(is(seconds_of(rank, n, [](Comm& c, Tensor x, Stream& s) { c.all_reduce(x, s); }), 6, 6));
    REQUIRE(is(seconds_of(rank, n, [](Comm& c, Tensor x, Stream& s) { c.all_to_all(x, x, s); }), 3, 3));
    // Either end of a message is busy with it.
    REQUIRE(is(seconds_of(rank, n, [](Comm& c, Tensor x, Stream& s) { c.send(x, 2, s); }), 1, 4));
    REQUIRE(is(seconds_of(rank, n, [](Comm& c, Tensor x, Stream& s) { c.receive(x, 2, s); }), 1, 4));
    REQUIRE(is(seconds_of(rank, n, [](Comm& c, Tensor x, Stream& s) { c.broadcast(x, 0, s); }), 3, 4));
    REQUIRE(is(seconds_of(rank, n, [](Comm& c, Tensor x, Stream& s) { c.reduce(x, 0, s); }), 3, 4));
    // The server takes in what the other three send.
    const double pushed = seconds_of(rank, n, [](Comm& c, Tensor x, Stream& s) { c.push(x, 1, s); });
    REQUIRE(is(pushed, 3, rank == 0 ? 12 : 4));
  }
  // A group of one is free.
  const Device paper = with_rates(1, 1, 1, 1).on_paper();
  Arena arena(paper), scratch(paper);
  Stream stream(paper, scratch);
  Comm alone("alone", std::make_unique<NullTransport>(0, 1));
  alone.all_reduce(arena.alloc("test", "buffer", DType::fp32, {8}), stream);
  REQUIRE(stream.seconds() == 0);
}

TEST_CASE("what is exposed of a step's communication is what no computation can hide", "[parallel][plan]") {
  // Products are slow, the link fast, everything else free: a transfer that overlaps with any block is hidden. Left are
  // those that nothing is beside: the first two gathers, which at stage 1 are those of the last update, the gradients
  // of the first block and the embedding, and the scalars.
  const Device device = with_rates(1e6, infinite, 1e9, 1e-6);
  for (const int P : {2, 4})
    for (const int stage : {1, 3}) {
      INFO(P << " ranks, stage " << stage);
      const StepConfig config = one_micro_batch(P, stage);
      REQUIRE(config.micro_batches == 1);
      int64_t first = 0;  // elements of the embedding and the first block
      const ParamTable table = parameter_table(config.model);
      REQUIRE(table.size() == 5);
      for (const UnitSpec& unit : table) {
        if (unit.name == "embedding" || unit.name == "blocks.0") first += UnitLayout(unit, P).size;
      }
      auto f = [&](int64_t bytes) { return static_cast<double>(bytes / P * (P - 1)); };
      const double scalars = 8 * 8 * (P - 1);  // the loss, two notices and a square sum for each unit
      const double bytes = f(4 * first) + scalars + f(4 * first);
      const int transfers = 2 + 1 + 2;
      const Plan plan = make_plan(config, device);
      REQUIRE(plan.exposed_seconds == Catch::Approx(bytes / 1e9 + transfers * (P - 1) * 1e-6).epsilon(1e-6));
      double products = 0;
      for (const auto& [op, totals] : plan.step_ops) products += totals.flops / 1e6;
      REQUIRE(plan.step_seconds - plan.exposed_seconds == Catch::Approx(products));
    }
}

TEST_CASE("transfers that begin in the order of the host, as NCCL's do, hide behind computation as others do",
          "[parallel][plan]") {
  // Products take longer than the transfers of --tp, of gradients and of weights that may run beside them. What the
  // order costs is at most what a reduction of a block takes.
  constexpr double link = 2e11;
  Device device = with_rates(5e14, infinite, link, 2e-6);
  for (const int stage : {1, 2, 3})
    for (const bool overlap : {false, true}) {
      INFO("stage " << stage << ", overlap " << overlap);
      StepConfig step{.model = resolve_model("llama3:8B", {}), .precision = DType::bf16, .batch = {1, 4096}};
      step.generates = false;
      step.micro_batches = 3;
      step.layout.tensor = tensor_parallel(step.model, 4, true, overlap);
      step.layout.zero.shards = 2;
      step.layout.zero.set_stage(stage);
      const UnitSpec block = part_of(parameter_table(step.model), step.layout.tensor, 0)[1];
      device.collectives = Collectives::own;
      const Plan any_order = make_plan(step, device, 0, Passes::step);
      device.collectives = Collectives::library;
      const Plan in_order = make_plan(step, device, 0, Passes::step);
      INFO(any_order.exposed_seconds << " and " << in_order.exposed_seconds);
      REQUIRE(in_order.exposed_seconds - any_order.exposed_seconds <
              4.0 * static_cast<double>(UnitLayout(block, 2).size) / 2 / link);
    }
}

TEST_CASE("exposed communication is less than the transfers, grows as the link gets slower, and is none on a free link",
          "[parallel][plan]") {
  for (const int stage : {0, 1, 2, 3}) {
    INFO("stage " << stage);
    const StepConfig config = one_micro_batch(4, stage);
    auto plan_at = [&](double link, double latency) {
      return make_plan(config, with_rates(1e9, infinite, link, latency));
    };
    const Plan free = plan_at(infinite, 0);
    REQUIRE(free.exposed_seconds == 0);
    REQUIRE(free.step_seconds > 0);
    int64_t sent = 0;
    for (const auto& [group, bytes] : free.step_traffic) sent += bytes;
    double before = 0;
    for (const double link : {1e10, 1e9, 1e8, 1e7, 1e6}) {
      INFO(link << " bytes per second");
      const Plan plan = plan_at(link, 0);
      REQUIRE(plan.exposed_seconds > before);
      REQUIRE(plan.exposed_seconds < static_cast<double>(sent) / link);
      REQUIRE(plan.step_seconds - plan.exposed_seconds == Catch::Approx(free.step_seconds));
      before = plan.exposed_seconds;
    }
    REQUIRE(plan_at(infinite, 1e-6).exposed_seconds > 0);
  }
}

TEST_CASE("a clock changes nothing else of a plan", "[parallel][plan]") {
  const StepConfig config = one_micro_batch(4, 3);
  const Plan without = make_plan(config, {DeviceKind::cpu, 1}),
             with = make_plan(config, with_rates(1e9, 1e9, 1e8, 1e-6));
  REQUIRE(without.step_seconds == 0);
  REQUIRE(without.exposed_seconds == 0);
  REQUIRE(with.arena_bytes == without.arena_bytes);
  REQUIRE(with.scratch_bytes == without.scratch_bytes);
  REQUIRE(with.step_traffic == without.step_traffic);
  REQUIRE(with.memory.size() == without.memory.size());
  for (size_t i = 0; i < with.memory.size(); ++i) {
    REQUIRE(with.memory[i].label == without.memory[i].label);
    REQUIRE(with.memory[i].bytes == without.memory[i].bytes);
  }
  REQUIRE(with.step_ops.size() == without.step_ops.size());
  double work = 0;
  for (const auto& [op, t] : with.step_ops) {
    INFO(op);
    const OpTotals& other = without.step_ops.at(op);
    REQUIRE((t.calls == other.calls && t.flops == other.flops && t.bytes == other.bytes && other.seconds == 0));
    if (op != "all_gather") work += t.seconds;  // of the scalars
  }
  REQUIRE(with.step_seconds - with.exposed_seconds == Catch::Approx(work));
}
