// Many ranks in one process: the mesh, the ring, data parallelism in every ZeRO stage, the traffic laws, memory by
// stage, checkpoints that know no layout, overlap, and planted bugs that the self-test must find.
#include <fstream>
#include <nlohmann/json.hpp>

#include "catch2.h"
#include "core/signals.h"
#include "helpers.h"
#include "train/checkpoint.h"
#include "train/selftest.h"

using namespace llmc;
using nlohmann::json;

namespace {

// Runs f(comm, stream, arena, rank) on `ranks` threads; returns the bytes that each rank sent.
template <class F>
std::vector<int64_t> on_ranks(int ranks, F&& f) {
  World world(Mesh({{Axis::shard, ranks}}));
  std::vector<int64_t> sent(static_cast<size_t>(ranks));
  run_ranks(world, [&](int rank) {
    const Device device{DeviceKind::cpu, 1};
    Arena arena(device, 64 << 20), scratch(device, 4 << 20);
    Stream stream(device, scratch);
    const auto comm = world.join(rank, "test", {Axis::shard});
    f(*comm, stream, arena, rank);
    stream.synchronize();
    sent[static_cast<size_t>(rank)] = comm->bytes_sent();
  });
  return sent;
}

float value(int rank, int64_t i) { return static_cast<float>((rank * 31 + i * 7) % 101) - 50; }  // exact sums

Tensor filled(Arena& arena, DType dtype, int64_t n, int rank) {
  const Tensor t = arena.alloc("test", "buffer", dtype, {n});
  with_type(dtype, [&](auto tag) {
    using T = typename decltype(tag)::type;
    for (int64_t i = 0; i < n; ++i) t.data<T>()[i] = T(value(rank, i));
  });
  return t;
}

double at(const Tensor& t, int64_t i) {
  double x = 0;
  with_type(t.dtype, [&](auto tag) { x = static_cast<double>(t.data<typename decltype(tag)::type>()[i]); });
  return x;
}

// Checked on the test's own thread: Catch2's macros are not for several.
struct Differences {
  std::mutex mutex;
  std::vector<std::string> found;
  void expect(bool good, const std::string& what) {
    std::lock_guard lock(mutex);
    if (!good) found.push_back(what);
  }
};

}  // namespace

TEST_CASE("a mesh knows coordinates and groups in any order of its axes") {
  const Mesh mesh({{Axis::pp, 2}, {Axis::replicate, 2}, {Axis::shard, 3}});
  REQUIRE(mesh.size() == 12);
  REQUIRE(mesh.at(7, Axis::pp) == 1);
  REQUIRE(mesh.at(7, Axis::shard) == 1);
  REQUIRE(mesh.at(7, Axis::tp) == 0);
  REQUIRE(mesh.group(7, {Axis::shard}) == std::vector<int>{6, 7, 8});
  REQUIRE(mesh.group(7, {Axis::replicate}) == std::vector<int>{7, 10});
  REQUIRE(mesh.group(7, {Axis::pp}) == std::vector<int>{1, 7});
  REQUIRE(mesh.group(7, {Axis::replicate, Axis::shard}) == std::vector<int>{6, 7, 8, 9, 10, 11});
  REQUIRE(mesh.coordinates(7) == "pp 1, replicate 0, shard 1");
  const Mesh other({{Axis::shard, 3}, {Axis::pp, 2}});
  REQUIRE(other.group(2, {Axis::shard}) == std::vector<int>{0, 2, 4});
  REQUIRE_ERROR(Mesh({{Axis::shard, 3}, {Axis::shard, 2}}), "twice");
}

TEST_CASE(
    "collectives over threads give what their names say, for any number of ranks and size, and count their bytes") {
  for (const int P : {1, 2, 3, 5, 8})
    for (const DType dtype : {DType::fp32, DType::bf16})
      for (const int64_t n : {int64_t{1}, int64_t{130}, ring::chunk_elements + 3}) {
        INFO(P << " ranks, " << name_of(dtype) << ", " << n);
        const int64_t width = size_of(dtype);
        Differences wrong;
        auto sum = [&](int64_t i) {
          double total = 0;
          for (int r = 0; r < P; ++r) total += value(r, i);
          return total;
        };
        auto sent = on_ranks(P, [&](Comm& comm, Stream& stream, Arena& arena, int rank) {
          const Tensor t = filled(arena, dtype, n * P, rank);
          comm.reduce_scatter(t, stream);
          stream.synchronize();
          for (int64_t i = n * rank; i < n * (rank + 1); ++i) wrong.expect(at(t, i) == sum(i), "reduce_scatter");
          comm.all_gather(t, stream);
          stream.synchronize();
          for (int64_t i = 0; i < n * P; ++i) wrong.expect(at(t, i) == sum(i), "all_gather");
        });
        for (int64_t bytes : sent) REQUIRE(bytes == 2 * (P - 1) * n * width);
        const int root = P / 2;
        sent = on_ranks(P, [&](Comm& comm, Stream& stream, Arena& arena, int rank) {
          const Tensor t = filled(arena, dtype, n, rank);
          comm.broadcast(t, root, stream);
          stream.synchronize();
          for (int64_t i = 0; i < n; ++i) wrong.expect(at(t, i) == value(root, i), "broadcast");
        });
        int64_t all = 0;
        for (int64_t bytes : sent) all += bytes;
        REQUIRE(all == (P - 1) * n * width);
        on_ranks(P, [&](Comm& comm, Stream& stream, Arena& arena, int rank) {
          const Tensor t = filled(arena, dtype, n, rank);
          comm.reduce(t, root, stream);
          stream.synchronize();
          for (int64_t i = 0; rank == root && i < n; ++i) wrong.expect(at(t, i) == sum(i), "reduce");
          const Tensor in = filled(arena, dtype, n * P, rank), out = filled(arena, dtype, n * P, -1);
          comm.all_to_all(out, in, stream);
          stream.synchronize();
          for (int k = 0; k < P; ++k)
            for (int64_t i = 0; i < n; ++i) wrong.expect(at(out, k * n + i) == value(k, rank * n + i), "all_to_all");
          if (P == 1) return;
          const Tensor token = filled(arena, dtype, n, rank);  // round the ring
          if (rank > 0) comm.receive(token, rank - 1, stream);
          if (rank + 1 < P) comm.send(token, rank + 1, stream);
          stream.synchronize();
          comm.barrier();
          for (int64_t i = 0; i < n; ++i) wrong.expect(at(token, i) == value(0, i), "send and receive");
          const auto words = comm.all_gather_text("words", std::string(static_cast<size_t>(rank), 'x'));
          for (int k = 0; k < P; ++k)
            wrong.expect(words[static_cast<size_t>(k)].size() == static_cast<size_t>(k), "text");
        });
        INFO(formatted("{}", wrong.found));
        REQUIRE(wrong.found.empty());
      }
}

TEST_CASE("sizes that do not match, and a rank that fails, end all ranks with the reason") {
  World world(Mesh({{Axis::shard, 3}}));
  REQUIRE_ERROR(run_ranks(world,
                          [&](int rank) {
                            const auto comm = world.join(rank, "test", {Axis::shard});
                            if (rank == 1) throw Error("rank 1 has no more disk");
                            comm->barrier();
                          }),
                "no more disk");
  REQUIRE_ERROR(on_ranks(2,
                         [&](Comm& comm, Stream& stream, Arena& arena, int rank) {
                           comm.all_gather(filled(arena, DType::fp32, rank == 0 ? 20 : 40, rank), stream);
                           stream.synchronize();
                         }),
                "which expects");
}

TEST_CASE("every layout of up to eight ranks agrees with one rank, and the stages with each other bit for bit") {
  Log log = Log::silent();
  REQUIRE(run_selftest(log, 8));
}

TEST_CASE("the self-test finds a skipped reduction, a mean, a sample served twice and a stale unit") {
  Log log = Log::silent();
  for (const PlantedBug bug : {PlantedBug::skipped_reduction, PlantedBug::mean_instead_of_sum, PlantedBug::sample_twice,
                               PlantedBug::stale_gather}) {
    INFO("bug " << static_cast<int>(bug));
    REQUIRE_FALSE(run_selftest(log, 2, bug));
  }
}

TEST_CASE("bytes sent in a step follow the law, on paper and between threads alike") {
  for (const auto& [shards, replicas] : {std::pair{1, 1}, {2, 1}, {4, 1}, {2, 2}, {1, 3}, {3, 2}})
    for (const GradReduce reduce : {GradReduce::step, GradReduce::micro})
      for (int stage = 0; stage <= 3; ++stage)
        for (const auto& [dtype, tied] : {std::pair{DType::fp32, true}, {DType::bf16, false}}) {
          const ZeroConfig zero{.stage = stage, .grad_reduce = reduce, .shards = shards, .replicas = replicas};
          const StepConfig config = selftest::step_config(selftest::awkward_model("gpt2", tied), dtype, 1, zero);
          INFO(shards << " shards, " << replicas << " replicas, stage " << stage << ", reduce " << name_of(reduce));
          // By hand: padded elements of a unit are a multiple of 64 x ranks.
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
          law["scalars"] = (P * Q - 1) * 8 * 6;  // loss and five units
          const Plan plan = make_plan(config, {DeviceKind::cpu, 1});
          for (const auto& [group, bytes] : plan.step_traffic) {
            INFO(group);
            REQUIRE(bytes == law[group]);
          }
          if (shards * replicas == 1) continue;
          std::vector<std::map<std::string, int64_t>> counted(static_cast<size_t>(zero.ranks()));
          World world(zero.mesh());
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
            run.dp.gather_stream.synchronize();
            run.dp.reduce_stream.synchronize();
            for (const auto* comm : {&run.dp.gradients, &run.dp.replicas, &run.dp.weights, &run.dp.scalars})
              counted[static_cast<size_t>(rank)][(*comm)->name()] = (*comm)->bytes_sent();
          });
          for (const auto& sent : counted)
            for (const auto& [group, bytes] : sent) {
              INFO(group << " between threads");
              REQUIRE(bytes == law[group]);
            }
        }
}

TEST_CASE("memory of model states by stage is the ZeRO paper's, for the dtypes in use") {
  // 124M parameters over 8 ranks: in bf16, 2 + 4 + 12 bytes a parameter, of which stage 1 shards 12, stage 2 16, stage
  // 3 18.
  const StepConfig alone{.model = resolve_model("gpt2:124M", {}), .dtype = DType::bf16, .batch = {1, 64}};
  int64_t padded = 0, in_flight = 0;
  for (const UnitSpec& unit : parameter_table(alone.model)) {
    const int64_t size = UnitLayout(unit, 8).size;
    padded += size;
    if (unit.name == "embedding" || unit.name == "head") in_flight += size;
    if (unit.name == "blocks.0") in_flight += 2 * size;
  }
  auto states = [&](int stage) {
    StepConfig c = alone;
    c.zero.shards = 8;
    c.zero.set_stage(stage);
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
  // Beside them: whole units in flight, of gradients from stage 2 on, of weights in stage 3.
  StepConfig c = alone;
  c.zero.shards = 8;
  c.zero.set_stage(3);
  for (const MemoryLine& line : make_plan(c, {DeviceKind::cpu, 1}).memory) {
    if (line.label == "gathered weights") REQUIRE(line.bytes == 2 * in_flight);
    if (line.label == "gradients in flight") REQUIRE(line.bytes == 4 * in_flight);
  }
}

TEST_CASE("with --memory-limit a little above what stage 3 needs, stage 3 runs and stage 2 is refused") {
  const TempDir dir;
  write_shard<uint16_t>(dir / "t.bin", std::vector<uint16_t>(9000, 5));
  const std::string shape =
      "--model d8 --n-embd 256 --n-head 4 --vocab-size 257 --seq-len 16 --batch-size 1 --local-ranks 8 "
      "--threads 2 --max-steps 2 --train-data " +
      (dir / "t.bin");
  StepConfig c{.model = resolve_model(
                   "d8", {.n_layer = {}, .n_head = 4, .n_kv_head = {}, .n_embd = 256, .n_ffn = {}, .vocab_size = 257}),
               .batch = {1, 16}};
  c.zero.shards = 8;
  c.zero.set_stage(3);
  const double limit = 1.2 * static_cast<double>(make_plan(c, {DeviceKind::cpu, 1}).total_bytes()) / (1 << 30);
  const std::string with_limit = shape + formatted(" --memory-limit {:.6f} ", limit);
  const ProgramResult three = run_program(with_limit + "--zero-stage 3 --out-dir " + (dir / "three"));
  INFO(three.err);
  REQUIRE(three.status == 0);
  const ProgramResult two = run_program(with_limit + "--zero-stage 2 --out-dir " + (dir / "two"));
  INFO(two.err);
  REQUIRE(two.status == 1);
  REQUIRE(two.err.find("it would with --zero-stage 3") != std::string::npos);
  REQUIRE(two.err.find("AdamW first moment") != std::string::npos);
}

namespace {

// The state of all ranks, whole: every kind of every parameter.
using WholeState = std::map<std::string, std::vector<float>>;

StepConfig layout(int ranks, int stage, DType dtype) {
  ZeroConfig zero{.shards = ranks, .poison = true};
  zero.set_stage(stage);
  return selftest::step_config(selftest::awkward_model(), dtype, 1, zero);
}

// Loads `from` (or makes new weights), saves to `out` as step `step`, and returns the state.
WholeState pass_through(const StepConfig& config, const std::string& from, const std::string& out, int64_t step) {
  const Plan plan = make_plan(config, {DeviceKind::cpu, 1});
  World world(config.zero.mesh());
  WholeState whole;
  std::mutex mutex;
  run_ranks(world, [&](int rank) {
    Run run(config, plan, {DeviceKind::cpu, 1}, world, rank);
    if (from.empty()) {
      init_weights(run.trainer.state(), 3, run.stream);
      for (const StateEntry& e : run.trainer.state().state_table())  // moments too
        if (e.kind == StateKind::moment1 || e.kind == StateKind::moment2)
          init_normal(e.tensor, 0.3f, e.begin, 5, e.param->name + name_of(e.kind), run.stream);
    } else {
      load_checkpoint(from, config.model, run.trainer.state(), run.stream);
    }
    run.stream.synchronize();
    {
      std::lock_guard lock(mutex);
      for (const StateEntry& e : run.trainer.state().state_table()) {
        std::vector<float>& to = whole[e.param->name + name_of(e.kind)];
        to.resize(static_cast<size_t>(e.param->numel()));
        for (int64_t i = 0; i < e.tensor.numel(); ++i)
          to[static_cast<size_t>(e.begin + i)] = static_cast<float>(at(e.tensor, i));
      }
    }
    write_checkpoint(out, step, config.model, run.trainer.state(), config.dtype, {{"seq_len", 19}}, run.stream);
  });
  return whole;
}

}  // namespace

TEST_CASE("checkpoints know no layout: what any layout wrote any layout reads, bit for bit") {
  for (const DType dtype : {DType::fp32, DType::bf16}) {
    const TempDir dir;
    int64_t step = 0;
    const WholeState original = pass_through(layout(1, 0, dtype), "", dir.path(), ++step);
    for (const auto& [name, values] : original)
      for (float v : values) REQUIRE(std::isfinite(v));
    for (const int ranks : {1, 2, 4})
      for (int stage = 0; stage <= 3; ++stage) {
        // From one rank to this layout, and from here to every other.
        INFO(name_of(dtype) << ", " << ranks << " ranks, stage " << stage);
        const int64_t here = ++step;
        REQUIRE(pass_through(layout(ranks, stage, dtype), checkpoint_path(dir.path(), 1), dir.path(), here) ==
                original);
        REQUIRE_FALSE(checkpoint_fault(checkpoint_path(dir.path(), here)));
        for (const int other : {1, 2, 4})
          for (int other_stage = 0; other_stage <= 3; ++other_stage) {
            const WholeState read =
                pass_through(layout(other, other_stage, dtype), checkpoint_path(dir.path(), here), dir.path(), ++step);
            for (const auto& [name, values] : original) {
              INFO(name << " read by " << other << " ranks, stage " << other_stage);
              REQUIRE(read.at(name) == values);
            }
            REQUIRE(read.size() == original.size());
          }
      }
  }
}

TEST_CASE("gradients of a unit travel while the backward of the next one computes") {
  const ZeroConfig zero{.stage = 2, .grad_reduce = GradReduce::micro, .shards = 2};
  StepConfig config = selftest::step_config(selftest::awkward_model(), DType::fp32, 12, zero);
  const Plan plan = make_plan(config, {DeviceKind::cpu, 1});
  World world(zero.mesh());
  world.throttle(2e-6);  // a slow wire: a block's gradients take tens of milliseconds
  std::vector<Span> compute, reduce;
  run_ranks(world, [&](int rank) {
    Run run(config, plan, {DeviceKind::cpu, 1}, world, rank);
    init_weights(run.trainer.state(), 1, run.stream);
    run.stream.synchronize();
    if (rank == 0) run.stream.set_trace(&compute), run.dp.reduce_stream.set_trace(&reduce);
    run.trainer.accumulate_gradients([&](int64_t) {
      HostBatch batch;
      for (int32_t i = 0; i < config.batch.rows(); ++i)
        batch.tokens.push_back(i % 100), batch.targets.push_back(i % 99), batch.positions.push_back(i % 19);
      return batch;
    });
    run.stream.synchronize();
    run.dp.reduce_stream.synchronize();
  });
  // Some op of a block's backward ran wholly within the reduction of an earlier unit.
  int overlapping = 0;
  for (const Span& r : reduce)
    for (const Span& c : compute)
      overlapping += std::string(r.op) == "reduce_scatter" &&
                     std::string(c.op).find("_backward") != std::string::npos && r.begin < c.begin && c.end < r.end;
  REQUIRE(overlapping > 0);
}

namespace {

std::string tiny(const std::string& out, const std::string& more) {
  return "--model d2 --n-embd 24 --n-head 2 --vocab-size 211 --train-data test/golden/gpt2_tiny/train.bin --val-data "
         "test/golden/gpt2_tiny/train.bin --val-every 10 --val-steps 2 --seq-len 33 --total-batch-size 264 --shuffle "
         "--lr 1e-2 "
         "--threads 2 --out-dir " +
         out + " " + more;
}
std::vector<std::string> metrics(const std::string& out) {
  std::vector<std::string> lines;
  std::ifstream in(out + "/metrics.jsonl");
  for (std::string line; std::getline(in, line);) {
    const json o = json::parse(line);
    lines.push_back(
        formatted("{} {} {:.17g}", o["kind"].get<std::string>(), o["step"].get<int64_t>(), o["loss"].get<double>()));
  }
  return lines;
}

}  // namespace

TEST_CASE("a run of several ranks is the run of one: losses, validation, resume in another layout, signals") {
  const TempDir dir;
  REQUIRE(run_program(tiny(dir / "one", "--max-steps 20 --batch-size 4")).status == 0);
  REQUIRE(run_program(tiny(dir / "four", "--max-steps 20 --batch-size 2 --local-ranks 4 --zero-stage 3")).status == 0);
  auto near = [&](const std::string& a, const std::string& b) {
    const auto x = metrics(a), y = metrics(b);
    REQUIRE(x.size() == y.size());
    for (size_t i = 0; i < x.size(); ++i) {
      INFO(x[i] << " against " << y[i]);
      REQUIRE(x[i].substr(0, x[i].rfind(' ')) == y[i].substr(0, y[i].rfind(' ')));
      const double p = std::stod(x[i].substr(x[i].rfind(' '))), q = std::stod(y[i].substr(y[i].rfind(' ')));
      REQUIRE(std::abs(p / q - 1) < (i < 2 ? 1e-6 : 1e-4));
    }
  };
  near(dir / "four", dir / "one");
  // Begun by one rank, gone on by four in stage 2, then by two in stage 1: the same run.
  REQUIRE(run_program(tiny(dir / "moved", "--max-steps 7 --lr-schedule constant --batch-size 4")).status == 0);
  REQUIRE(run_program(tiny(dir / "moved",
                           "--max-steps 13 --lr-schedule constant --batch-size 1 --local-ranks 4 --zero-stage 2"))
              .status == 0);
  REQUIRE(run_program(tiny(dir / "moved",
                           "--max-steps 20 --lr-schedule constant --batch-size 2 --local-ranks 2 --zero-stage 1"))
              .status == 0);
  REQUIRE(run_program(tiny(dir / "stayed", "--max-steps 20 --lr-schedule constant --batch-size 4")).status == 0);
  auto train_only = [](const std::string& out) {
    std::vector<double> losses;
    for (const std::string& line : metrics(out))
      if (line.starts_with("train")) losses.push_back(std::stod(line.substr(line.rfind(' '))));
    return losses;
  };
  const auto moved = train_only(dir / "moved"), stayed = train_only(dir / "stayed");
  REQUIRE(moved.size() == 20);
  REQUIRE(stayed.size() == 20);
  for (size_t i = 0; i < 20; ++i) REQUIRE(std::abs(moved[i] / stayed[i] - 1) < 1e-4);
  // Stopped by signals and by kill, the layout kept: bit for bit.
  const std::string four = "--max-steps 60 --batch-size 2 --local-ranks 4 --zero-stage 2 --checkpoint-every 9";
  REQUIRE(run_program(tiny(dir / "whole", four)).status == 0);
  for (int attempt = 0;; ++attempt) {
    REQUIRE(attempt < 40);
    const ProgramResult r =
        run_program(tiny(dir / "cut", four), formatted("timeout --preserve-status --signal {} {:.2f}",
                                                       attempt % 3 == 2 ? "KILL" : "TERM", 0.4 + 0.1 * attempt));
    INFO(r.err);
    if (r.status == 0) break;
    REQUIRE((r.status == 75 || r.status > 128));
  }
  REQUIRE(metrics(dir / "cut") == metrics(dir / "whole"));
}

TEST_CASE("a run that goes on in another stage reduces gradients as before, bit for bit, if memory allows") {
  const TempDir dir;
  const std::string steps = "--n-layer 12 --max-steps 8 --checkpoint-every 4 --batch-size 2 --local-ranks 2 ";
  namespace fs = std::filesystem;
  for (const auto& [begun, moved] : {std::pair{1, 2}, {2, 1}}) {
    const std::string whole = formatted("{}/whole-{}", dir.path(), begun), first = formatted("--zero-stage {} ", begun),
                      then = formatted("--zero-stage {} ", moved), cut = dir / "cut";
    REQUIRE(run_program(tiny(whole, steps + first)).status == 0);
    auto go_on = [&](const std::string& more) {
      fs::remove_all(cut);
      fs::copy(whole, cut, fs::copy_options::recursive);
      fs::remove_all(cut + "/step-000008");
      const ProgramResult r = run_program(tiny(cut, steps + more));
      INFO(r.err);
      REQUIRE(r.status == 0);
      return r.out;
    };
    const char* recorded = begun == 1 ? "step" : "micro";
    go_on(then);
    REQUIRE(metrics(cut) == metrics(whole));
    REQUIRE(json::parse(read_whole(cut + "/step-000008/trainer.json"))["choices"]["grad_reduce"] == recorded);
    // An option that says so wins, and rounds otherwise.
    go_on(then + (begun == 1 ? "--grad-reduce micro" : "--grad-reduce step"));
    REQUIRE(metrics(cut) != metrics(whole));
    if (begun == 2) continue;
    // Where there is no memory for it, the stage's own way, with a notice.
    StepConfig c{.model = resolve_model(
                     "d2", {.n_layer = 12, .n_head = 2, .n_kv_head = {}, .n_embd = 24, .n_ffn = {}, .vocab_size = 211}),
                 .batch = {2, 33},
                 .micro_batches = 2};
    c.zero.shards = 2;
    c.zero.set_stage(2);
    const int64_t micro = make_plan(c, {DeviceKind::cpu, 1}).total_bytes();
    c.zero.grad_reduce = GradReduce::step;
    REQUIRE(micro < make_plan(c, {DeviceKind::cpu, 1}).total_bytes());
    const std::string out = go_on(then + formatted("--memory-limit {:.17g}", static_cast<double>(micro) / (1 << 30)));
    REQUIRE(out.find("notice: --grad-reduce step, with which the run began, needs") != std::string::npos);
    REQUIRE(json::parse(read_whole(cut + "/step-000008/trainer.json"))["choices"]["grad_reduce"] == "micro");
  }
}

TEST_CASE("a resumed run that fits only as it was recorded goes on; one that does not fit at all is refused") {
  const TempDir dir;
  const std::string steps = "--n-layer 12 --checkpoint-every 4 --batch-size 2 --local-ranks 2 --lr-schedule constant ";
  REQUIRE(run_program(tiny(dir / "run", steps + "--max-steps 4 --zero-stage 2")).status == 0);
  StepConfig c{.model = resolve_model(
                   "d2", {.n_layer = 12, .n_head = 2, .n_kv_head = {}, .n_embd = 24, .n_ffn = {}, .vocab_size = 211}),
               .batch = {2, 33},
               .micro_batches = 2};
  c.zero.shards = 2;
  c.zero.set_stage(1);
  c.zero.grad_reduce = GradReduce::micro;
  const double limit = static_cast<double>(make_plan(c, {DeviceKind::cpu, 1}).total_bytes());
  const std::string one = steps + "--max-steps 8 --zero-stage 1 --memory-limit ";
  const ProgramResult small = run_program(tiny(dir / "run", one + formatted("{:.17g}", 0.99 * limit / (1 << 30))));
  INFO(small.err);
  REQUIRE(small.status == 1);
  REQUIRE(small.err.find("does not fit into --memory-limit") != std::string::npos);
  const ProgramResult good = run_program(tiny(dir / "run", one + formatted("{:.17g}", limit / (1 << 30))));
  INFO(good.err);
  REQUIRE(good.status == 0);
}

TEST_CASE("a step that is interrupted in the middle can be saved, in every stage") {
  const TempDir dir;
  for (int stage = 0; stage <= 3; ++stage) {
    const StepConfig config = layout(2, stage, DType::fp32);
    const Plan plan = make_plan(config, {DeviceKind::cpu, 1});
    World world(config.zero.mesh());
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
      write_checkpoint(dir.path(), stage + 1, config.model, run.trainer.state(), config.dtype, {{"seq_len", 19}},
                       run.stream);
    });
    REQUIRE_FALSE(checkpoint_fault(checkpoint_path(dir.path(), stage + 1)));
  }
}

TEST_CASE("an error while gradients travel keeps the update from happening, on every rank") {
  const StepConfig config = layout(2, 2, DType::fp32);
  const Plan plan = make_plan(config, {DeviceKind::cpu, 1});
  World world(config.zero.mesh());
  std::mutex mutex;
  int unchanged = 0;
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
                  run.dp.reduce_stream.enqueue([&] {
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
                    for (Stream* s : {&run.stream, &run.dp.reduce_stream, &run.dp.gather_stream})
                      REQUIRE_THROWS_AS(s->synchronize(), Error);
                    std::lock_guard lock(mutex);
                    unchanged += weights() == before;
                    throw;
                  }
                }),
      Catch::Matchers::Contains("rank 1 on ") && Catch::Matchers::Contains("the wire was cut"));
  REQUIRE(unchanged == 2);
}

TEST_CASE("a weight that is not a number on one rank of a stage-3 run: all ranks leave with status 2 and name it") {
  const TempDir dir;
  std::vector<uint16_t> tokens(33 * 8 + 1, 5);
  write_shard<uint16_t>(dir / "data.bin", tokens);
  const std::string options =
      "--model d1 --n-embd 12 --n-head 2 --vocab-size 211 --seq-len 33 --batch-size 1 --local-ranks 2 --zero-stage 3 "
      "--train-data " +
      (dir / "data.bin") + " --out-dir " + (dir / "run");
  // A weight of the last unit, which one rank of the two holds, is not a number in the checkpoint.
  REQUIRE(run_program(options + " --max-steps 1 --local-ranks 1").status == 0);
  const std::string file = dir / "run/step-000001/model.safetensors";
  std::string bytes = read_text(file);
  bytes.replace(bytes.size() - 4, 4, "\xff\xff\xff\x7f");
  const std::string model = dir / "bad";
  std::filesystem::create_directory(model);
  std::ofstream(model + "/model.safetensors", std::ios::binary) << bytes;
  std::filesystem::copy(dir / "run/step-000001/config.json", model + "/config.json");
  const ProgramResult weight =
      run_program("--seq-len 33 --batch-size 1 --local-ranks 2 --zero-stage 3 --max-steps 3 --train-data " +
                  (dir / "data.bin") + " --model " + model + " --out-dir " + (dir / "weight"));
  INFO(weight.err);
  REQUIRE(weight.status == 2);
  REQUIRE(weight.err.find("before the step) holds one") != std::string::npos);
}

TEST_CASE("a bad token that one rank reads ends all of them with its message") {
  const TempDir dir;
  std::vector<uint16_t> tokens(33 * 8 + 1, 5);
  tokens[33 * 3 + 4] = 250;
  write_shard<uint16_t>(dir / "data.bin", tokens);
  const ProgramResult r = run_program(
      "--model d1 --n-embd 12 --n-head 2 --vocab-size 211 --seq-len 33 --batch-size 1 --local-ranks 4 "
      "--max-steps 2 --train-data " +
      (dir / "data.bin") + " --out-dir " + (dir / "run"));
  INFO(r.err);
  REQUIRE(r.status == 1);
  REQUIRE(r.err.find("token 250 at position 103") != std::string::npos);
  REQUIRE(r.err.find("rank 3 on ") != std::string::npos);
}

TEST_CASE("bf16 weights without master weights are rounded alike in every layout", "[parallel]") {
  selftest::Outcome alone;
  for (const ZeroConfig& layout : selftest::layouts(2)) {
    if (layout.shards == 1 && layout.ranks() > 1) continue;
    ZeroConfig zero = layout;
    zero.master_weights = false;
    const StepConfig step = selftest::step_config(selftest::awkward_model(), DType::bf16, 4, zero);
    for (const MemoryLine& line : make_plan(step, {DeviceKind::cpu, 1}).memory) REQUIRE(line.label != "master weights");
    const selftest::Outcome outcome = selftest::run_layout(step);
    REQUIRE(outcome.fault == "");
    if (zero.stage == 0) alone = outcome;
    REQUIRE(outcome.losses == alone.losses);
    REQUIRE(outcome.weights == alone.weights);
  }
  // The updates are those of master weights but for the rounding, which is right in the mean.
  const selftest::Outcome masters =
      selftest::run_layout(selftest::step_config(selftest::awkward_model(), DType::bf16, 4, {.shards = 2}));
  REQUIRE(selftest::distance(alone.weights, masters.weights) < 0x1p-7);
}
