// State of the CUDA trainer beyond a step: checkpoints (contract 6), generated text, validation, chosen algorithms, and
// a diverged run.
#include <algorithm>
#include <set>

#include "cuda/device_test.h"
#include "helpers.h"
#include "run/checkpoints/checkpoint_write.h"
#include "run/coord_check.h"
#include "run/recorded_choices.h"
#include "run/reports/report.h"
#include "run/requirements.h"
#include "run/selftest/selftest.h"
#include "run/setup.h"

using namespace llmc;

namespace {

const Device cpu_device{}, gpu_device{.kind = DeviceKind::cuda};
const OptimizerOptions options{
    .lr = 1e-2f, .beta1 = 0.9f, .beta2 = 0.95f, .eps = 1e-2f, .weight_decay = 0.1f, .step = 1};

StepConfig small_step(DType dtype) {
  return {.model = selftest::awkward_model("qwen3"), .precision = dtype, .batch = {2, 19}, .micro_batches = 2};
}

// One rank alone on a device, with initial weights.
struct Alone {
  World world{Mesh()};
  StepConfig config;
  Run run;
  Alone(const StepConfig& c, const Device& device, uint64_t seed)
      : config(c), run(c, make_plan(c, device), device, world, 0) {
    init_weights(run.trainer.state(), seed, run.stream);
  }
  BatchSource batches() const {
    return [this](int64_t m) {
      HostBatch batch;
      const Philox rng(3, "state");
      for (int64_t i = 0; i < config.batch.rows(); ++i) {
        const uint64_t index = static_cast<uint64_t>(m * config.batch.rows() + i);
        batch.tokens.push_back(static_cast<int32_t>(rng.bits(2 * index) % 131));
        batch.targets.push_back(static_cast<int32_t>(rng.bits(2 * index + 1) % 131));
        batch.positions.push_back(static_cast<int32_t>(i % config.batch.T));
      }
      return batch;
    };
  }
  StepResult train(int64_t step) {
    OptimizerOptions its = options;
    its.step = step;
    return run.trainer.step(batches(), its, {.max_norm = 1});
  }
  // Every byte of the state.
  std::string bytes() {
    std::string all;
    for (const StateEntry& e : run.trainer.state().state_table()) {
      const HostView held(e.tensor, run.stream);
      all.append(reinterpret_cast<const char*>(held.tensor().bytes), static_cast<size_t>(e.tensor.size_bytes()));
    }
    return all;
  }
};

}  // namespace

TEST_CASE("a CPU reads what a GPU wrote, and vice versa, bit for bit", "[cuda][trainer]") {
  const DType dtype = GENERATE(DType::fp32, DType::bf16);
  const bool from_gpu = GENERATE(true, false);
  const TempDir dir;
  Alone from(small_step(dtype), from_gpu ? gpu_device : cpu_device, 1),
      to(small_step(dtype), from_gpu ? cpu_device : gpu_device, 2);
  from.train(1);
  std::filesystem::create_directories(dir / "out");
  const std::string path = CheckpointWrite(dir / "out", 1, from.config.model, from.run.trainer.state(), from.run.stream,
                                           {.trainer = {{"seq_len", 19}}})
                               .publish();
  REQUIRE(from.bytes() != to.bytes());
  load_checkpoint(path, to.config.model, to.run.trainer.state(), to.run.stream);
  REQUIRE(from.bytes() == to.bytes());
  // Continuing from there agrees up to rounding.
  const StepResult a = from.train(2), b = to.train(2);
  REQUIRE(std::abs(a.loss / b.loss - 1) < (dtype == DType::fp32 ? 1e-5 : 1e-3));
}

TEST_CASE("on a GPU generation with a cache matches generation without, and the CPU", "[cuda][trainer]") {
  Alone gpu(small_step(DType::fp32), gpu_device, 5), cpu(small_step(DType::fp32), cpu_device, 5);
  const std::vector<int32_t> tokens = {3, 1, 4, 1, 5, 9, 2, 6, 5, 3, 5};
  Continuation sequence(gpu.run.trainer);
  std::vector<float> grown = sequence.feed(std::span(tokens).first(6));
  for (size_t n = 6; n < tokens.size(); ++n) grown = sequence.feed(std::span(tokens).subspan(n, 1));
  REQUIRE(relative_error(gpu.run.trainer.next_token_logits(tokens), cpu.run.trainer.next_token_logits(tokens)) < 1e-5);
  REQUIRE(relative_error(grown, cpu.run.trainer.next_token_logits(tokens)) < 1e-5);
}

TEST_CASE("validation on a GPU matches the CPU, row by row, whole or in chunks", "[cuda][trainer]") {
  StepConfig chunked = small_step(DType::fp32);
  chunked.head_chunks = 3;
  Alone gpu(chunked, gpu_device, 5), cpu(small_step(DType::fp32), cpu_device, 5);
  std::vector<float> rows[2];
  double losses[2];
  for (Alone* a : {&gpu, &cpu}) {
    std::vector<float>& mine = rows[a == &cpu];
    losses[a == &cpu] = a->run.trainer.evaluate(2, 76, a->batches(), [&](int64_t m, std::span<const float> of_batch) {
      REQUIRE(static_cast<int64_t>(mine.size()) == m * 38);
      mine.insert(mine.end(), of_batch.begin(), of_batch.end());
    });
  }
  REQUIRE(rows[0].size() == 76);
  REQUIRE(relative_error(rows[0], rows[1]) < 1e-5);
  REQUIRE(std::abs(losses[0] / losses[1] - 1) < 1e-6);
}

TEST_CASE("sums over rows that wait are added up in time, however little room they have", "[cuda][trainer]") {
  constexpr int64_t N = 40, C = 24, O = 40;
  Arena arena(gpu_device, 1 << 20), scratch(gpu_device, 1 << 20);
  Stream stream(gpu_device, scratch);
  const auto tensor = [&](const char* name, const Shape& shape, uint64_t seed) {
    const Tensor t = arena.alloc("test", name, DType::fp32, shape);
    upload(t, normal_values<float>(t.numel(), seed), stream);
    return t;
  };
  const Tensor x = tensor("x", {N, C}, 1), weight = tensor("weight", {C}, 2), dout = tensor("dout", {N, C}, 3),
               wide = tensor("wide", {N, O}, 4), mean = tensor("mean", {N}, 5), rstd = tensor("rstd", {N}, 6);
  // room: nullopt: they do not wait
  const auto run = [&](std::optional<int64_t> room, std::vector<std::string>* added = nullptr) {
    auto scope = arena.scope();
    const Tensor dx = tensor("dx", {N, C}, 7), dweight = tensor("dweight", {C}, 8), dbias = tensor("dbias", {C}, 9),
                 dwide = tensor("dwide", {O}, 10);
    if (added != nullptr)
      stream.set_inspector([&](std::string_view op, const Tensor& t) {
        if (op == "add_row_sums") added->push_back(t.name);
      });
    {
      std::optional<RowSumsTogether> sums;
      if (room) sums.emplace(stream, *room);
      layernorm_backward(dx, dweight, dbias, dout, x, weight, mean, rstd, Accumulate::yes, stream);
      linear_backward_bias(dwide, wide, stream);
      if (sums) sums->add();
    }
    stream.set_inspector(nullptr);
    Outputs all;
    for (const Tensor& t : {dx, dweight, dbias, dwide}) {
      const HostView host(t, stream);
      all.push_back({t.name, std::vector<float>(host.data<float>(), host.data<float>() + t.numel())});
    }
    return all;
  };
  const Outputs alone = run(std::nullopt);
  const int64_t norm = round_up(cuda::layernorm_backward_scratch(N, C), int64_t{64}) * 4;  // bytes of its parts
  std::vector<std::string> added;
  REQUIRE(same_bits(run(1 << 16, &added), alone));
  REQUIRE(added == std::vector<std::string>{"dweight", "dbias", "dwide"});
  REQUIRE(same_bits(run(norm), alone));      // one op's at a time
  REQUIRE(same_bits(run(norm - 4), alone));  // the bias's alone
  RowSumsTogether sums(stream, 1 << 16);
  REQUIRE_THROWS_WITH(RowSumsTogether(stream, 1 << 16), Catch::Matchers::ContainsSubstring("together already"));
  const Tensor dwide = tensor("dwide", {O}, 10);
  linear_backward_bias(dwide, wide, stream);
  REQUIRE_THROWS_WITH(linear_backward_bias(dwide, wide, stream), Catch::Matchers::ContainsSubstring("added to dwide"));
}

TEST_CASE("tuned matmul algorithms are used again after they are restored", "[cuda][trainer]") {
  Alone tuned(small_step(DType::fp32), gpu_device, 5), restored(small_step(DType::fp32), gpu_device, 5);
  const std::string before = tuned.bytes(), title = matmul_choices(restored.run.stream);
  const std::string choices = tuned.run.trainer.tune(tuned.batches());
  REQUIRE(tuned.bytes() == before);
  REQUIRE(choices.starts_with(title));
  REQUIRE(std::count(choices.begin(), choices.end(), '\n') > 8);
  set_matmul_choices(choices, restored.run.stream);
  for (const int64_t step : {1, 2}) tuned.train(step), restored.train(step);
  REQUIRE(tuned.bytes() == restored.bytes());
  // All algorithms in use are among the recorded ones.
  std::istringstream used(matmul_choices(restored.run.stream));
  for (std::string line; std::getline(used, line);) REQUIRE(choices.find(line) != std::string::npos);
}

TEST_CASE("each stage of a pipeline times its own products, and not those that an earlier run has timed",
          "[cuda][trainer]") {
  const TempDir dir;
  struct CacheIn {
    explicit CacheIn(const std::string& folder) { setenv("XDG_CACHE_HOME", folder.c_str(), 1); }
    ~CacheIn() { unsetenv("XDG_CACHE_HOME"); }
  } const cache_in(dir / "cache");
  StepConfig step = small_step(DType::fp32);
  step.layout.pipeline = {Schedule::one_f_one_b, 2, 1};
  const selftest::Machine machine{.device = gpu_device};
  const Plan plan = make_plan(step, gpu_device);
  struct Timed {
    std::string choices, used;  // of all ranks, and of this one's products
    std::vector<double> losses;
  };
  const auto run = [&] {
    std::vector<Timed> of_ranks(2);
    World world(step.layout.mesh(), machine.backend);
    run_ranks(world, [&](int rank) {
      Run r(step, plan, machine.of_rank(rank), world, rank);
      init_weights(r.trainer.state(), 42, r.stream);
      const BatchSource batches = [&](int64_t) { return selftest::read_batch(step, r.groups.reader(), 0); };
      Timed& mine = of_ranks[static_cast<size_t>(rank)];
      Log log = Log::silent();
      mine.choices = time_matmuls(r, batches, log);
      for (const int64_t s : {1, 2}) {
        OptimizerOptions its = options;
        its.step = s;
        mine.losses.push_back(r.trainer.step(batches, its, {.max_norm = 1}).loss);
      }
      mine.used = matmul_choices(r.stream, Choices::used);
    });
    REQUIRE(of_ranks[0].choices == of_ranks[1].choices);
    return of_ranks;
  };
  const auto shapes_of = [](const std::string& choices) {
    std::set<std::string> shapes;
    for_matmul_choices(choices, [&](const std::string& shape, const std::string&) { shapes.insert(shape); });
    return shapes;
  };
  const std::vector<Timed> first = run();
  const std::set<std::string> all = shapes_of(first[0].choices), of_head = shapes_of(first[1].used);
  REQUIRE(!std::ranges::includes(shapes_of(first[0].used), of_head));  // the head's are the second stage's
  REQUIRE(std::ranges::includes(all, of_head));
  REQUIRE(std::ranges::includes(all, shapes_of(first[0].used)));

  MeasurementCache cache("matmul_algorithms.json");
  const std::string title = first[0].choices.substr(0, first[0].choices.find('\n') + 1);
  std::string kept = cache.find(title)["choices"];
  REQUIRE(title + kept == first[0].choices);
  REQUIRE(run()[0].choices == first[0].choices);
  const std::string line = kept.substr(0, kept.find('\n') + 1);
  cache.keep(title, {{"choices", line}});
  REQUIRE(shapes_of(run()[0].choices) == all);  // the others are timed again
  REQUIRE(shapes_of(title + MeasurementCache("matmul_algorithms.json").find(title)["choices"].get<std::string>()) ==
          all);
  const std::string unusable = line.substr(0, line.find(": ")) + ": 1 1 1 1 1 1 1 1\n";
  for (const std::string& damaged : {std::string("no shape\n"), unusable}) {  // as good as none
    cache.keep(title, {{"choices", damaged}});
    REQUIRE(shapes_of(run()[0].choices) == all);
  }
}

TEST_CASE("the coordinate check sees all that products write in passing", "[cuda][trainer]") {
  StepConfig step{.model = selftest::awkward_model("gpt2"), .precision = DType::bf16, .batch = coord::batch_shape};
  step.model.n_layer = 2, step.model.n_ffn = 40;  // GELU in products takes a multiple of 8
  Device products = gpu_device;
  products.gelu_in_products = products.residual_in_products = true;
  Alone own(step, gpu_device, 5), passing(step, products, 5);
  const HostBatch batch = coord::read_batch(step.model.vocab_size, 3, 0);
  const coord::Activations expected = coord::activations_of(own.run.trainer, batch),
                           found = coord::activations_of(passing.run.trainer, batch);
  for (const coord::Kind kind : all_values<coord::Kind>()) {
    CAPTURE(name_of(kind));
    const auto k = static_cast<size_t>(kind);
    REQUIRE(!expected[k].empty());
    REQUIRE(found[k].size() == expected[k].size());
  }
}

TEST_CASE("steps started before the host learns of a non-finite one change nothing", "[cuda][trainer]") {
  const Device device = GENERATE(cpu_device, gpu_device);
  Alone run(small_step(DType::fp32), device, 5);
  run.train(1);
  Tensor bias = run.run.trainer.state().unit(1).weight("attn.q_norm.weight");
  const HostView good(bias, run.run.stream);
  const std::vector<float> values(good.data<float>(), good.data<float>() + bias.numel());
  std::vector<float> bad = values;
  bad[0] = std::numeric_limits<float>::quiet_NaN();
  upload(bias, bad, run.run.stream);
  const std::string before = run.bytes();
  const PendingStep first = run.run.trainer.begin_step(run.batches(), options, {});
  upload(bias, values, run.run.stream);  // the step after it is finite again
  const PendingStep second = run.run.trainer.begin_step(run.batches(), options, {});
  REQUIRE(!first.wait().finite());
  REQUIRE((second.wait().finite() && !second.wait().applied));
  upload(bias, bad, run.run.stream);
  REQUIRE(run.bytes() == before);
}

#ifndef __CUDACC__  // a real GPU's size is fixed

TEST_CASE("a run that does not fit on a GPU is refused with the table of its memory", "[cuda][trainer]") {
  using Catch::Matchers::ContainsSubstring;
  cuda_on_cpu::set_devices(1, static_cast<size_t>(gpu_reserve) + (64 << 20));
  const auto refusal = [](const Options& o, const StepConfig& step) -> std::string {
    try {
      require_memory(o, step, make_plan(step, gpu_device), gpu_device);
    } catch (const Error& error) {
      return error.what();
    }
    return "";
  };
  StepConfig step = small_step(DType::bf16);
  step.batch.B = 8192;
  step.micro_batches = 1;
  const std::string text = refusal({}, step);
  cuda_on_cpu::set_devices(1);
  REQUIRE_THAT(text, ContainsSubstring("the run needs ") &&
                         ContainsSubstring("does not fit into this GPU's 64.0 MiB; it "
                                           "would with --batch-size ") &&
                         ContainsSubstring("\n  activations") && ContainsSubstring("\n  total "));
  REQUIRE(refusal({}, step) == "");  // 4 GiB
}

TEST_CASE("a model whose norms have no room on a GPU is refused before the run", "[cuda][trainer]") {
  StepConfig step = small_step(DType::bf16);
  REQUIRE_NOTHROW(require_norms_can(step, gpu_device));
  step.model.n_embd = 100'000;
  REQUIRE_THROWS_WITH(require_norms_can(step, gpu_device),
                      Catch::Matchers::ContainsSubstring("rmsnorm_backward: 100000 channels need 800000 bytes"));
  step.model.family.norm = Norm::layernorm;
  REQUIRE_THROWS_WITH(require_norms_can(step, gpu_device),
                      Catch::Matchers::ContainsSubstring("layernorm_backward: 100000 channels need 1200000 bytes"));
}

TEST_CASE("a process makes a context on the GPUs of its own ranks alone", "[cuda][trainer]") {
  struct Form {
    int visible;
    Place place;
    std::vector<int> own;
  };
  const Form form = GENERATE(
      Form{1, {}, {0}}, Form{8, {}, {0}},                                                   // one rank
      Form{2, {.local_ranks = 2, .ranks_on_host = 2}, {0, 1}},                              // threads
      Form{8, {.local_ranks = 8, .ranks_on_host = 8}, {0, 1, 2, 3, 4, 5, 6, 7}},            //
      Form{8, {.process = 5, .processes = 8, .ranks_on_host = 8, .rank_on_host = 5}, {5}},  // a process a GPU, all seen
      Form{8, {.process = 1, .processes = 2, .local_ranks = 4, .ranks_on_host = 8, .rank_on_host = 4}, {4, 5, 6, 7}},
      Form{1, {.process = 5, .processes = 8, .ranks_on_host = 8, .rank_on_host = 5, .own_gpus = true}, {0}},  // Slurm's
      Form{2, {.process = 3, .processes = 4, .ranks_on_host = 4, .rank_on_host = 3}, {1}});  // more ranks than GPUs
  constexpr size_t context = 500 << 20, memory = size_t{4} << 30;
  cuda_on_cpu::set_devices(form.visible, memory);
  cuda_on_cpu::set_context_bytes(context);
  Options o;
  o.device = DeviceChoice::cuda;
  o.place = form.place;
  o.ranks = form.place.processes * form.place.local_ranks;
  const Device device = choose_device(o), first = rank_device(device, o.place);
  const bool several_seen = gpu_set().size() > gpu_info(0).bus_id.size() + 1;
  const int64_t limit = memory_limit(o, first);
  for (int64_t thread = 0; thread < o.place.local_ranks; ++thread)
    const cuda::Queue made(rank_device(device, o.place, thread).gpu);
  const std::vector<int> made = cuda_on_cpu::contexts();
  cuda_on_cpu::set_context_bytes(0);
  cuda_on_cpu::set_devices(1);
  REQUIRE(made == form.own);
  REQUIRE(several_seen == (form.visible > 1));
  const int64_t sharing = form.visible == 2 && form.place.processes == 4 ? 2 : 1;
  REQUIRE(limit == (static_cast<int64_t>(memory - context) - sharing * gpu_reserve) / first.sharers);
}

TEST_CASE("NCCL's groups are made before the arena, with as many channels as the plan counts", "[cuda][trainer]") {
  StepConfig step = small_step(DType::bf16);
  SECTION("two replicas of the optimizer state") { step.layout.zero.shards = 2, step.layout.zero.set_stage(1); }
  SECTION("tensor parallelism") { step.layout.tensor = tensor_parallel(step.model, 2, true); }
  SECTION("a pipeline") { step.layout.pipeline.stages = 2, step.layout.pipeline.schedule = Schedule::one_f_one_b; }
  constexpr size_t of_channel = 1 << 20;
  cuda_on_cpu::set_devices(2);
  cuda_on_cpu::set_channel_bytes(of_channel);
  Device device = gpu_device;
  device.collectives = Collectives::library;
  const Plan plan = make_plan(step, device);
  std::mutex mutex;
  int64_t channels = 0;
  size_t small = 0;  // what is allocated for the groups themselves
  {
    World world(step.layout.mesh(), Backend::nccl);
    run_ranks(world, [&](int rank) {
      Device own = device;
      own.gpu = rank;
      const Run run(step, plan, own, world, rank);
      const std::lock_guard lock(mutex);
      if (rank != 0) return;
      for (const Comm* group : run.groups.tensor_groups())
        if (group->size() > 1) channels += nccl_channels(traffic_of(group->name()));
      small = 2 * Groups::scratch_bytes, run.groups.links.for_each([&](StageLink&) { small += Groups::scratch_bytes; });
    });
  }
  const cuda_on_cpu::CommunicatorMemory found = cuda_on_cpu::communicator_memory(0);
  cuda_on_cpu::set_channel_bytes(0);
  cuda_on_cpu::set_devices(1);
  REQUIRE(channels > 0);
  REQUIRE(found.taken == static_cast<size_t>(channels) * of_channel);
  REQUIRE(found.allocated_before <= small);
  const auto line = std::find_if(plan.of(0).memory.begin(), plan.of(0).memory.end(),
                                 [](const MemoryLine& l) { return l.label == "NCCL"; });
  REQUIRE(line != plan.of(0).memory.end());
  REQUIRE(line->bytes >= channels * int64_t{12 << 20});  // each is connected to one rank at least
}

TEST_CASE("where NCCL takes more than was planned, and the rest has no room, the error says so", "[cuda][trainer]") {
  StepConfig step = small_step(DType::bf16);
  step.layout.zero.shards = 2, step.layout.zero.set_stage(1);
  Device device = gpu_device;
  device.collectives = Collectives::library;
  Plan plan = make_plan(step, device);
  constexpr size_t memory = size_t{4} << 30, of_channel = 1 << 20;
  plan.arena_bytes = memory - of_channel;
  cuda_on_cpu::set_devices(2, memory);
  cuda_on_cpu::set_channel_bytes(of_channel);
  std::string error;
  try {
    World world(step.layout.mesh(), Backend::nccl);
    run_ranks(world, [&](int rank) {
      Device own = device;
      own.gpu = rank;
      const Run run(step, plan, own, world, rank);
    });
  } catch (const Error& e) {
    error = e.what();
  }
  cuda_on_cpu::set_channel_bytes(0);
  cuda_on_cpu::set_devices(1);
  INFO(error);
  REQUIRE(error.find("the groups of NCCL took ") != std::string::npos);
  REQUIRE(error.find("set NCCL_MAX_CTAS below 16") != std::string::npos);
}

TEST_CASE("a step allocates nothing, nor does a second one", "[cuda][trainer]") {
  Alone alone(small_step(DType::bf16), gpu_device, 1);
  const uint64_t before = cuda_on_cpu::allocations();
  for (int64_t step = 1; step <= 3; ++step) alone.train(step);
  REQUIRE(cuda_on_cpu::allocations() == before);
}

TEST_CASE("what a run has taken of a GPU is said beside what was planned", "[cuda][trainer]") {
  Alone alone(small_step(DType::bf16), gpu_device, 1);
  alone.train(1);
  const Plan plan = make_plan(small_step(DType::bf16), gpu_device);
  const std::string planned = human_bytes(plan.total_bytes());
  REQUIRE(alone.run.memory_taken(plan, 0, {}) == planned + " after the CUDA context, " + planned +
                                                     " planned; of 512.0 MiB left for libraries, 0.0 KiB in use");
  void* others = nullptr;
  CUDA_CHECK(cudaMalloc(&others, size_t{600} << 20));
  const std::string more = alone.run.memory_taken(plan, 0, {});
  CUDA_CHECK(cudaFree(others));
  INFO(more);
  REQUIRE(more.find("in use: too little was left") != std::string::npos);
}

TEST_CASE("an op that cannot be captured in a graph is named, with the option that does without", "[cuda][trainer]") {
  Arena scratch(gpu_device);
  const auto refusal = [&](const std::function<void(Stream&)>& work) -> std::string {
    Stream stream(gpu_device, scratch);
    Replay replay;
    const auto enqueue = [&] {
      stream.run({.name = "fine"}, {}, [] {});
      stream.run({.name = "pickle"}, {}, [&] { work(stream); });
    };
    try {
      for (int i = 0; i < 2; ++i) stream.replayed(replay, enqueue);
    } catch (const Error& error) {
      cudaGetLastError();
      return error.what();
    }
    return "";
  };
  REQUIRE(refusal([](Stream&) {}) == "");
  // The host waits: an error at once, which the op checks; and one that it overlooks.
  for (const bool checks : {true, false}) {
    const std::string text = refusal([&](Stream& s) {
      const cudaError_t status = cudaStreamSynchronize(s.cuda());
      if (checks) CUDA_CHECK(status);
    });
    CAPTURE(text);
    REQUIRE(text.starts_with("pickle cannot be captured in a CUDA graph: "));
    REQUIRE(text.find(checks ? "not permitted when stream is capturing" : "previous error during capture") !=
            text.npos);
    REQUIRE(text.ends_with(": use --cuda-graphs off"));
  }
}

TEST_CASE("--device auto uses the CPU if there is no GPU, and cuda says why there is none", "[cuda][trainer]") {
  Options automatic, cuda;
  cuda.device = DeviceChoice::cuda;
  REQUIRE(choose_device(automatic).kind == DeviceKind::cuda);
  cuda_on_cpu::set_devices(0, 0, cudaErrorInsufficientDriver);
  const DeviceKind without = choose_device(automatic).kind;
  std::string why;
  try {
    choose_device(cuda);
  } catch (const Error& error) {
    why = error.what();
  }
  cuda_on_cpu::set_devices(1);
  cudaGetLastError();
  REQUIRE(without == DeviceKind::cpu);
  REQUIRE_THAT(why, Catch::Matchers::ContainsSubstring("--device cuda: the driver is for CUDA 12.0 and older") &&
                        Catch::Matchers::ContainsSubstring("built with CUDA 13.0, which needs driver r580 or newer") &&
                        Catch::Matchers::ContainsSubstring("NVCC=/usr/local/cuda-12.0/bin/nvcc"));
}

TEST_CASE("a program without code for the GPU says so before it starts", "[cuda][trainer]") {
  REQUIRE_NOTHROW(require_code_for_gpus({0}));
  cuda_on_cpu::set_code(false);
  REQUIRE_THROWS_WITH(require_code_for_gpus({0}), Catch::Matchers::ContainsSubstring("no code for GPU 0, ") &&
                                                      Catch::Matchers::ContainsSubstring("ARCH=sm_80"));
  cuda_on_cpu::set_code(true);
}

TEST_CASE("without --local-ranks there is one rank per visible GPU", "[cuda][trainer]") {
  cuda_on_cpu::set_devices(3);
  Options cpu, generate;
  cpu.device = DeviceChoice::cpu;
  generate.generate = true;
  const int64_t all = default_ranks({}), on_cpu = default_ranks(cpu), of_a_text = default_ranks(generate);
  cuda_on_cpu::set_devices(0, 0);
  const int64_t without = default_ranks({});
  cuda_on_cpu::set_devices(1);
  REQUIRE((all == 3 && on_cpu == 1 && of_a_text == 1 && without == 1));
}

TEST_CASE("heads too large for the kernels are refused with the plan", "[cuda][trainer]") {
  StepConfig step = small_step(DType::bf16);
  step.model.head_size = 130;
  REQUIRE_THROWS_WITH(make_plan(step, gpu_device),
                      Catch::Matchers::ContainsSubstring("up to 128 channels in bf16, not 130"));
  REQUIRE_NOTHROW(make_plan(step, cpu_device));
}

#endif
