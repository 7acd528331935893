// --reduce-dtype bf16: gradients that travel in bf16 and are added in fp32 in rank order, against a plain reference of
// the same rounding; the stages of ZeRO bit for bit; traffic.
#include <map>
#include <mutex>
#include <string>

#include "catch2.h"
#include "helpers.h"
#include "parallel/on_ranks.h"
#include "run/selftest/selftest.h"

using namespace llmc;

namespace {

// Element i of a rank's gradients; sizes differ by a factor of 2^8.
float gradient(int rank, int64_t i) {
  const Philox rng(3, formatted("gradients of rank {}", rank));
  return std::ldexp(static_cast<float>(rng.uniform(static_cast<uint64_t>(i)) - 0.5), static_cast<int>(i % 9));
}
float rounded(float x) { return static_cast<float>(bf16(x)); }

// The sum over P ranks as it must be: each part rounded, added in fp32 in rank order, rounded.
float reference(int P, int64_t i) {
  float sum = 0;
  for (int rank = 0; rank < P; ++rank) sum += rounded(gradient(rank, i));
  return rounded(sum);
}
// The same by a ring in bf16, which rounds at every hop: what must not happen.
float of_ring(int P, int64_t n, int64_t i) {
  const int owner = static_cast<int>(i / n);
  float sum = rounded(gradient((owner + 1) % P, i));
  for (int hop = 2; hop <= P; ++hop) sum = rounded(sum + rounded(gradient((owner + hop) % P, i)));
  return sum;
}

StepConfig step_of(const ZeroConfig& zero, DType wire) {
  StepConfig step = selftest::step_config(selftest::awkward_model("gpt2", false), DType::bf16, 1, zero);
  step.precision.wire = wire;
  return step;
}

}  // namespace

TEST_CASE("sums that travel in bf16 are the reference's, in one piece or several", "[parallel][reduce]") {
  for (const int P : {2, 3, 5})
    for (const int64_t piece : {int64_t{1} << 20, int64_t{64}}) {
      const int64_t n = 192;
      World world(Mesh({{Axis::shard, P}}));
      std::mutex mutex;
      int64_t wrong = 0, unlike_ring = 0;
      run_ranks(world, [&](int rank) {
        const Device device{DeviceKind::cpu, 1};
        Arena arena(device, 1 << 20), scratch(device, 1 << 20);
        Stream stream(device, scratch);
        const auto group = world.join(rank, "gradients", world.mesh().group(rank, {Axis::shard}));
        const WireSums sums(DType::bf16, P, P * n, arena, piece);
        const Tensor all = arena.alloc("gradients", "gradients", DType::fp32, {P * n});
        std::vector<float> values;
        for (int64_t i = 0; i < P * n; ++i) values.push_back(gradient(rank, i));
        upload(all, values, stream);
        sums.reduce_scatter(all, *group, stream);
        const HostView shard(all.slice(rank * n, {n}), stream);
        std::lock_guard lock(mutex);
        for (int64_t i = 0; i < n; ++i) {
          wrong += shard.data<float>()[i] != reference(P, rank * n + i);
          unlike_ring += shard.data<float>()[i] != of_ring(P, n, rank * n + i);
        }
      });
      INFO(P << " ranks, pieces of " << piece);
      REQUIRE(wrong == 0);
      REQUIRE((P == 2 || unlike_ring > 0));
    }
}

TEST_CASE("gradients in bf16: the stages of ZeRO have the same bits, and other bits than in fp32",
          "[parallel][reduce]") {
  for (const auto& [shards, replicas] : {std::pair{4, 1}, {2, 2}, {1, 3}})
    for (const GradReduce reduce : {GradReduce::step, GradReduce::micro}) {
      INFO(shards << " shards, " << replicas << " replicas, reduced by " << name_of(reduce));
      ZeroConfig zero{.stage = 0, .grad_reduce = reduce, .shards = shards, .replicas = replicas};
      const selftest::Outcome first = selftest::run_layout(step_of(zero, DType::bf16)),
                              wide = selftest::run_layout(step_of(zero, DType::fp32));
      REQUIRE(first.fault == "");
      REQUIRE_FALSE(first.same_bits(wide));
      for (zero.stage = 1; zero.stage <= 3; ++zero.stage) {
        const selftest::Outcome found = selftest::run_layout(step_of(zero, DType::bf16));
        REQUIRE(found.fault == "");
        REQUIRE(found.same_bits(first));
      }
    }
  const ZeroConfig alone{};
  REQUIRE(
      selftest::run_layout(step_of(alone, DType::bf16)).same_bits(selftest::run_layout(step_of(alone, DType::fp32))));
}

TEST_CASE("gradients in bf16 beside tensor parallelism: stages have the same bits, and copies stay equal",
          "[parallel][reduce]") {
  const selftest::Model model{"llama", false, DType::fp32, 8, 2};
  std::optional<selftest::Outcome> first;
  for (int stage = 0; stage <= 3; ++stage) {
    ZeroConfig zero{.grad_reduce = GradReduce::step, .shards = 2};
    zero.stage = stage;
    StepConfig step = selftest::step_config(model.config(), model.dtype, 2, zero);
    step.layout.tensor = tensor_parallel(step.model, 4);
    step.precision.wire = DType::bf16;
    const selftest::Outcome found = selftest::run_layout(step);
    INFO("stage " << stage);
    REQUIRE(found.fault == "");
    if (first) REQUIRE(found.same_bits(*first));
    else first = found;
  }
}

TEST_CASE("gradients in bf16 send half the bytes, as planned, and take the planned memory", "[parallel][reduce]") {
  for (int stage = 0; stage <= 3; ++stage) {
    const ZeroConfig zero{
        .stage = stage, .grad_reduce = stage < 2 ? GradReduce::step : GradReduce::micro, .shards = 2, .replicas = 2};
    const StepConfig step = step_of(zero, DType::bf16);
    const Device device{DeviceKind::cpu, 1};
    const Plan plan = make_plan(step, device);
    std::map<std::string, int64_t> wide;
    for (const auto& [group, bytes] : make_plan(step_of(zero, DType::fp32), device).step_traffic) wide[group] = bytes;
    std::map<std::string, int64_t> narrow;
    for (const auto& [group, bytes] : plan.step_traffic) narrow[group] = bytes;
    INFO("stage " << stage);
    REQUIRE(wide["gradients"] > 0);
    for (const char* group : {"gradients", "replicas"}) REQUIRE(2 * narrow[group] == wide[group]);
    for (const char* group : {"weights", "scalars"}) REQUIRE(narrow[group] == wide[group]);
    World world(step.layout.mesh());
    run_ranks(world, [&](int rank) {
      Run run(step, plan, device, world, rank);
      init_weights(run.trainer.state(), 1, run.stream);
      run.trainer.step([&](int64_t m) { return selftest::read_batch(step, run.groups.reader(), m); },
                       selftest::update_options(Optimizer::adamw, 1), {});
      run.groups.gather_stream().synchronize();
      run.groups.reduce_stream().synchronize();
      for (Comm* comm : run.groups.tensor_groups())
        CHECK(comm->bytes_sent() == narrow[comm->name()], "{}: rank {} sends {} bytes, planned {}", comm->name(), rank,
              comm->bytes_sent(), narrow[comm->name()]);
      CHECK(run.arena.high_water() <= plan.arena_bytes, "more than planned");
    });
  }
}
