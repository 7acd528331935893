// Which rows go to the ranks of their experts in which round, and what the host waits for.
#include <atomic>
#include <chrono>
#include <thread>

#include "catch2.h"
#include "helpers.h"
#include "parallel/expert_exchange.h"
#include "parallel/expert_layouts.h"

using namespace llmc;

namespace {

// The counts of rows that the host waits for come once it has enqueued a further gather of rows for --tp, or late.
struct Watched final : Comm {
  static inline thread_local std::shared_ptr<std::atomic<int>> gathers;  // of rows, enqueued by the host of this rank
  static inline std::atomic<bool> late = false;
  explicit Watched(Comm&& group) : Comm(std::move(group)) {}
  void all_gather(Tensor all, Stream& stream) override {
    if (name() == "activations") ++*gathers;
    else
      stream.enqueue([enqueued = gathers, before = gathers->load()] {
        const auto end = std::chrono::steady_clock::now() + std::chrono::seconds(10);
        while (*enqueued == before && !late)
          if (std::this_thread::sleep_for(std::chrono::milliseconds(1)); std::chrono::steady_clock::now() > end)
            late = true;
      });
    Comm::all_gather(all, stream);
  }
};
struct Watches final : Poison {
  std::unique_ptr<Comm> joined(std::unique_ptr<Comm> group) const override {
    if (group->name() != "activations" && group->name() != "experts") return group;
    if (!Watched::gathers) Watched::gathers = std::make_shared<std::atomic<int>>(0);
    return std::make_unique<Watched>(std::move(*group));
  }
};

}  // namespace

// Every row exactly once, from its sender to the rank of its expert, never more in a round than there is room for.
TEST_CASE("rounds of rows to experts have all of them once, and never more than the room", "[parallel][ep]") {
  const int P = 3;
  const int64_t E = 6;
  const std::vector<int64_t> counts = {4, 0, 2, 1, 0, 5, /**/ 0, 0, 7, 0, 0, 0, /**/ 3, 3, 3, 0, 0, 1};
  auto count = [&](int from, int64_t expert) { return counts[static_cast<size_t>(from * E + expert)]; };
  for (const int64_t room : {1, 4, 5, 10, 16, 100}) {
    INFO("room for " << room);
    const ExpertRounds rounds(counts, P, room);
    REQUIRE(rounds.rounds() == ceil_div(13, room));  // rank 1 gets most rows
    for (int to = 0; to < P; ++to) {
      std::vector<int64_t> next(P, 0);  // row of each sender's block that has not been sent
      std::vector<int64_t> received(static_cast<size_t>(P * 2), 0);
      for (int round = 0; round < rounds.rounds(); ++round) {
        const auto blocks = rounds.blocks_received(to, round);
        const auto by_expert = rounds.counts_received(to, round);
        int64_t in_round = 0;
        for (int from = 0; from < P; ++from) {
          int64_t block = 0;  // where the rows for `to` begin
          for (int before = 0; before < to; ++before) block += rounds.rows(from, before);
          const Range sent = rounds.blocks_sent(from, round)[static_cast<size_t>(to)];
          if (sent.size > 0) REQUIRE(sent.begin == block + next[static_cast<size_t>(from)]);
          next[static_cast<size_t>(from)] += sent.size;
          REQUIRE(blocks[static_cast<size_t>(from)].begin == in_round);
          REQUIRE(blocks[static_cast<size_t>(from)].size == sent.size);
          in_round += sent.size;
          int64_t of_experts = 0;
          for (int64_t e = 0; e < 2; ++e) {
            const int32_t n = by_expert[static_cast<size_t>(from * 2 + e)];
            received[static_cast<size_t>(from * 2 + e)] += n;
            of_experts += n;
          }
          REQUIRE(of_experts == sent.size);
        }
        REQUIRE(in_round <= room);
      }
      for (int from = 0; from < P; ++from)
        for (int64_t e = 0; e < 2; ++e) REQUIRE(received[static_cast<size_t>(from * 2 + e)] == count(from, 2 * to + e));
    }
  }
  const ExpertRounds none(std::vector<int64_t>(18, 0), P, 4);
  REQUIRE(none.rounds() == 1);
  REQUIRE(none.blocks_sent(0, 0)[1].size == 0);
  REQUIRE_ERROR(ExpertRounds(counts, P, 0), "room for 0 rows");
}

TEST_CASE("with padding every rank has a block of rows for each", "[parallel][ep]") {
  const ExpertRounds rounds = ExpertRounds::padded(3, 5);
  REQUIRE(rounds.rounds() == 1);
  for (int rank = 0; rank < 3; ++rank)
    for (const auto& blocks : {rounds.blocks_sent(rank, 0), rounds.blocks_received(rank, 0)})
      for (size_t k = 0; k < 3; ++k) REQUIRE((blocks[k].begin == 5 * static_cast<int64_t>(k) && blocks[k].size == 5));
}

TEST_CASE("rows are padded where a capacity bounds them and there is room for as many from all ranks",
          "[parallel][ep]") {
  ExpertPlacement e{.count = 8, .per_token = 2, .ranks = 4, .sequence = 64, .segment = 64};
  REQUIRE((e.stride(128) == 0 && e.room(128) == 256 && e.sent(128) == 256));  // dropless
  e.capacity = 20;                                                            // 1.25 times its share
  REQUIRE((e.stride(128) == 2 * 2 * 20 && e.room(128) == 320 && e.sent(128) == 320));
  e.capacity = 64;  // no more than the choices of the rows there are
  REQUIRE(e.stride(128) == 2 * 128);
  e.capacity = 8;  // less than the share: a rank has rows for validation, which drops nothing
  REQUIRE((e.stride(128) == 32 && e.room(128) == 128 && e.sent(128) == 256));
  e.ranks = 8;  // a row chooses an expert once
  e.capacity = 64;
  REQUIRE(e.stride(128) == 128);
  e.ranks = 1;
  REQUIRE((e.stride(128) == 0 && e.room(128) == 256));
  // Context-parallel ranks with two slices of 16 rows of each sequence: 4 in all.
  e = {.count = 8, .per_token = 2, .ranks = 4, .imbalance = 2.4, .sequence = 64, .segment = 16, .spread = true};
  e.capacity = 10;
  REQUIRE((e.stride(64) == 0 && e.room(64) == 308));
  e.imbalance = 2.5;
  REQUIRE((e.stride(64) == 4 * 2 * 10 && e.room(64) == 320));
  e.cut = true;  // tensor-parallel ranks may have a part of a fifth one
  REQUIRE((e.stride(64) == 0 && e.room(64) == 320));
}

// What is planned for a layout is enough for its rows, whatever the sizes: dispatch_plan() refuses otherwise. Where
// sequences are whole no capacity waits for the host, and elsewhere not with the imbalance that is named.
TEST_CASE("the room for padded rows is what any choices need", "[parallel][ep]") {
  Arena scratch({DeviceKind::null}, 1 << 20);
  Stream stream({DeviceKind::null}, scratch);
  for (const int64_t T : {20, 56, 64})
    for (const int64_t B : {1, 3})
      for (const int64_t E : {4, 8})
        for (const int64_t k : {1, 2, 4})
          for (const int ranks : {2, 4})
            for (const double factor : {0.3, 1.1, 1.25, 2.0, 8.0})
              for (const int64_t slices : {1, 4}) {
                CAPTURE(T, B, E, k, ranks, factor, slices);
                const int64_t S = B * T * (slices == 1 ? 1 : 2) / slices;  // two of them
                ExpertPlacement e{.count = E, .per_token = k, .ranks = ranks, .sequence = T, .segment = T / slices};
                e.capacity = ExpertOptions{.capacity_factor = factor}.capacity(T, {.count = E, .per_token = k});
                e.spread = slices > 1;
                if (e.spread) {
                  const double needed = static_cast<double>(ranks * e.most_to_each(S)) / static_cast<double>(k * S);
                  e.imbalance = std::ceil(100 * needed) / 100;
                }
                REQUIRE(e.stride(S) > 0);
                auto table = [&](const Shape& shape) { return Tensor{.dtype = DType::int32, .shape = shape}; };
                dispatch_plan(table({S, k}), table({E + 1}), table({S, k}), {}, e.capacity, {e.segment},
                              {ranks * e.stride(S), ranks}, stream);
              }
}

// The compute stream is held up, so a host that needs to know what it computes does not get to the end of the step. The
// step is a short one: queues are bounded.
TEST_CASE("the host waits for no counts of rows where a capacity bounds them; without one it does", "[parallel][ep]") {
  for (const bool bounded : {true, false}) {
    ModelConfig model = expert_layouts::small_model("mixtral");
    model.n_layer = 1;
    StepConfig step = expert_layouts::step_of(model, {.ep = 2, .shards = 2});
    step.batch = {2, 16};
    step.micro_batches = 1;
    if (bounded) step.experts.capacity_factor = 1.25;
    World world(step.layout.mesh(), Backend::threads, poison_hooks);
    std::atomic<int> enqueued = 0;
    std::atomic<bool> all_enqueued = true;
    run_ranks(world, [&](int rank) {
      Run run(step, make_plan(step, {DeviceKind::cpu, 1}), {DeviceKind::cpu, 1}, world, rank);
      init_weights(run.trainer.state(), 42, run.stream);
      run.stream.synchronize();
      run.stream.enqueue([&] {
        const auto end = std::chrono::steady_clock::now() + std::chrono::milliseconds(bounded ? 60000 : 300);
        while (enqueued < step.layout.ranks() && std::chrono::steady_clock::now() < end)
          std::this_thread::sleep_for(std::chrono::milliseconds(1));
        if (enqueued < step.layout.ranks()) all_enqueued = false;
      });
      const PendingStep pending = run.trainer.begin_step(
          [&](int64_t m) { return selftest::read_batch(step, run.groups.reader(), m); },
          {.lr = 1e-2f, .beta1 = 0.9f, .beta2 = 0.95f, .eps = 1e-8f, .weight_decay = 0.1f, .step = 1}, {.max_norm = 1});
      ++enqueued;
      pending.wait();
    });
    REQUIRE(all_enqueued == bounded);
  }
}

TEST_CASE("the shared expert is enqueued before the host waits for the counts of rows", "[parallel][ep]") {
  const selftest::Model model{"qwen2_moe", false, DType::fp32, 8, 2, 20};
  Layout layout{.tensor = tensor_parallel(model.config(), 2)};
  layout.expert = expert_parallel(model.config(), 2);
  StepConfig step = selftest::step_config(model.config(), model.dtype, 1, layout);
  step.micro_batches = 1;
  const Watches watches;
  REQUIRE(selftest::run_layout(step, {}, {.hooks = watches}, 1).fault == "");
  REQUIRE_FALSE(Watched::late);
}
