// Nothing is allocated while a step is computed. The threads that run ops and move messages between ranks allocate no
// memory at all. The host, which enqueues, allocates only what says what is to be done (a task for each op and event,
// the lists of a pass, the batch), of a size that does not depend on that of tensors, and keeps none of it.
//
// Of processes, MPI and sockets allocate for themselves; the console line and metrics.jsonl are written between steps.
#include <atomic>
#include <barrier>

#include "catch2.h"
#include "run/ranks.h"
#include "run/selftest/run_layout.h"

using namespace llmc;

namespace {

struct Allocations {
  std::atomic<int64_t> host_calls = 0, host_bytes = 0, other_calls = 0;  // of threads that enqueue; of all others
  std::atomic<int64_t> kept = 0;                                         // blocks: allocated less freed
};
std::atomic<Allocations*> counts = nullptr;  // none: they are not counted
enum class Thread : uint8_t { other, host, test };
thread_local Thread this_thread = Thread::other;

void count(size_t bytes) {
  Allocations* const all = counts;
  if (all == nullptr) return;
  ++all->kept;
  if (this_thread == Thread::host) ++all->host_calls, all->host_bytes += static_cast<int64_t>(bytes);
  if (this_thread == Thread::other) ++all->other_calls;
}

}  // namespace

// Instead of glibc's, for all of this program and its libraries.
extern "C" {
void* __libc_malloc(size_t);
void* __libc_calloc(size_t, size_t);
void* __libc_realloc(void*, size_t);
void* __libc_memalign(size_t, size_t);
void __libc_free(void*);
void* malloc(size_t bytes) noexcept {
  count(bytes);
  return __libc_malloc(bytes);
}
void* calloc(size_t n, size_t bytes) noexcept {
  count(n * bytes);
  return __libc_calloc(n, bytes);
}
void* aligned_alloc(size_t alignment, size_t bytes) noexcept {
  count(bytes);
  return __libc_memalign(alignment, bytes);
}
void* realloc(void* memory, size_t bytes) noexcept {
  if (Allocations* const all = counts; all != nullptr && memory != nullptr) --all->kept;
  count(bytes);
  return __libc_realloc(memory, bytes);
}
void free(void* memory) noexcept {
  if (Allocations* const all = counts; all != nullptr && memory != nullptr) --all->kept;
  __libc_free(memory);
}
}

namespace {

// Counts from the beginning of step 3 to the end of step 5. planted: an op that allocates
void count_steps(Allocations& all, const StepConfig& step, bool planted = false) {
  const Device device{DeviceKind::cpu, 2};
  const Plan plan = make_plan(step, device);
  World world(step.layout.mesh());
  std::barrier meeting(step.layout.ranks());
  run_ranks(world, [&](int rank) {
    Run run(step, plan, device, world, rank);
    init_weights(run.trainer.state(), 1, run.stream);
    std::vector<HostBatch> read;
    for (int64_t m = 0; m < step.micro_batches; ++m) read.push_back(selftest::read_batch(step, run.groups.reader(), m));
    const BatchSource batches = [&](int64_t m) {
      this_thread = Thread::test;
      HostBatch batch = read[static_cast<size_t>(m)];
      this_thread = Thread::host;
      return batch;
    };
    const auto meet = [&](Allocations* counted) {
      run.stream.synchronize();
      for (Stream* side : run.groups.streams()) side->synchronize();
      meeting.arrive_and_wait();
      if (rank == 0) counts = counted;
      meeting.arrive_and_wait();
    };
    this_thread = Thread::host;
    for (int s = 1; s <= 5; ++s) {
      if (s == 3) meet(&all);
      if (planted) run.stream.enqueue([] { free(malloc(1)); });
      run.trainer.step(batches, selftest::update_options(step.layout.zero.optimizer, s), {.max_norm = 1});
    }
    meet(nullptr);
    this_thread = Thread::other;
  });
}

StepConfig step_of(const char* family, DType dtype, const Layout& layout) {
  StepConfig step{.model = selftest::awkward_model(family),
                  .precision = dtype,
                  .batch = {2, 16},
                  .micro_batches = 4,
                  .layout = layout,
                  .generates = false};
  ModelConfig& m = step.model;
  m.n_layer = m.n_head = m.n_kv_head = 4;
  if (m.experts.count > 0) m.experts.count = 4, step.experts.imbalance = 2;  // rows for all that may come: one round
  step.layout.tensor = tensor_parallel(m, layout.tensor.ranks, true, layout.tensor.overlap);
  step.layout.expert = expert_parallel(m, layout.expert.ranks);
  return step;
}

}  // namespace

TEST_CASE("the threads that compute and communicate allocate nothing in a step, and the host keeps nothing",
          "[parallel]") {
  const auto zero = [](int replicas, int stage) {
    ZeroConfig config{.shards = 2};
    config.replicas = replicas;
    config.set_stage(stage);
    return Layout{.zero = config};
  };
  struct Case {
    const char* name;
    Layout layout;
    const char* family = "llama";
    DType dtype = DType::bf16;
  };
  for (const Case& c : std::vector<Case>{
           {"one rank", {}, "gpt2"},
           {"one rank, fp32", {}, "llama", DType::fp32},
           {"ZeRO 1 in two replicas", zero(2, 1)},
           {"ZeRO 3", zero(1, 3), "qwen3", DType::fp32},
           {"server", {.zero = {.shards = 2, .sync = DpSync::parameter_server}}},
           {"tensor", {.tensor = {.ranks = 2}}, "gpt2"},
           {"tensor, overlapped", {.tensor = {.ranks = 2, .overlap = true}}, "llama", DType::fp32},
           {"1f1b", {.pipeline = {.schedule = Schedule::one_f_one_b, .stages = 2}}, "gpt2", DType::fp32},
           {"zb-v", {.pipeline = {.schedule = Schedule::zb_v, .stages = 2, .chunks_per_stage = 2}}},
           {"ring attention", {.zero = {.shards = 2}, .context = {2, ContextAttention::ring}}},
           {"ulysses", {.zero = {.shards = 2}, .context = {2, ContextAttention::ulysses}}, "llama", DType::fp32},
           {"experts", {.zero = {.shards = 2}, .expert = {.ranks = 2}}, "mixtral"}}) {
    INFO(c.name);
    StepConfig step = step_of(c.family, c.dtype, c.layout);
    Allocations small, large;
    count_steps(small, step);
    REQUIRE(small.host_calls > 0);
    step.batch.T *= 4;
    count_steps(large, step);
    EXPECT((small.other_calls == 0 && large.other_calls == 0));
    EXPECT((small.kept == 0 && large.kept == 0));
    EXPECT(small.host_calls == large.host_calls);
    // With --cp the host cuts slices out of the batch: tokens, targets, positions.
    const int64_t batches = 3 * step.micro_batches * step.layout.ranks() * step.batch.rows() * 3 * 4;
    EXPECT(large.host_bytes - small.host_bytes <= (step.layout.context.ranks > 1 ? batches : 0));
  }
  Allocations planted;
  count_steps(planted, step_of("gpt2", DType::fp32, {}), true);
  REQUIRE(planted.other_calls == 3);
}
