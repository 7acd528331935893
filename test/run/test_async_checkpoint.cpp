// Checkpoints that are written while training goes on: the memory of their copies, and what happens to them meanwhile.
#include <omp.h>

#include <atomic>
#include <cmath>
#include <map>
#include <mutex>
#include <thread>

#include "catch2.h"
#include "core/rng.h"
#include "parallel/on_ranks.h"
#include "run/checkpoints/checkpoint_write.h"
#include "schedule/pipeline_layouts.h"
#include "tiny_run.h"

using namespace pipeline_layouts;
namespace fs = std::filesystem;

namespace {

std::vector<std::byte> random_bytes(int64_t n, uint64_t seed) {
  std::vector<std::byte> all;
  const Philox rng(seed, "bytes");
  for (int64_t i = 0; i < n; ++i) all.push_back(std::byte(rng.bits(static_cast<uint64_t>(i))));
  return all;
}

// All files of a directory, but for those that name its place.
std::map<std::string, std::string> files_in(const std::string& directory) {
  std::map<std::string, std::string> all;
  for (const auto& entry : fs::directory_iterator(directory)) all[entry.path().filename()] = read_whole(entry.path());
  return all;
}

// The lines of metrics.jsonl about checkpoints.
std::vector<nlohmann::json> checkpoint_lines(const std::string& out) {
  std::vector<nlohmann::json> lines;
  std::ifstream in(out + "/metrics.jsonl");
  for (std::string line; std::getline(in, line);)
    if (nlohmann::json object = nlohmann::json::parse(line); object["kind"] == "checkpoint") lines.push_back(object);
  return lines;
}

// Large enough for a part of a checkpoint to have room where the whole has not.
std::string wide(const std::string& out, const std::string& more) {
  return "--model d1 --n-embd 96 --n-head 2 --vocab-size 211 --train-data " + tiny_data +
         " --seq-len 33 --batch-size 2 --total-batch-size 264 --lr 1e-2 --threads 1 --max-steps 6 --checkpoint-every 2 "
         "--out-dir " +
         out + " " + more;
}

}  // namespace

TEST_CASE("copies are used in their order and unchanged, in memory of any size", "[run][checkpoint]") {
  for (const int64_t size : {16, 32, 100, 1000, 1 << 20}) {
    std::vector<std::byte> memory(static_cast<size_t>(size)), used;
    std::vector<std::byte> expected;
    std::vector<bool> in_turn;  // whether a task ran after all that was added before, and before the rest
    bool aligned = true;
    {
      BackgroundCopies copies(memory);
      for (uint64_t i = 0; i < 40; ++i) {
        const std::vector<std::byte> bytes = random_bytes(static_cast<int64_t>(i * 7 % 61), i);
        copies.add(
            std::ssize(bytes), [&](std::byte* to, int64_t from, int64_t n) { std::copy_n(&bytes[from], n, to); },
            [&](BackgroundCopies::Bytes piece) {
              aligned &= (piece.data() - memory.data()) % BackgroundCopies::alignment == 0;
              used.insert(used.end(), piece.begin(), piece.end());
            });
        expected.insert(expected.end(), bytes.begin(), bytes.end());
        const size_t until = expected.size();
        copies.then([&, until] { in_turn.push_back(used.size() == until); });
      }
      copies.end();
      copies.wait();
      REQUIRE(copies.done());
    }
    REQUIRE(used == expected);
    REQUIRE(in_turn == std::vector<bool>(40, true));
    REQUIRE(aligned);
  }
}

TEST_CASE("copies that the memory holds are not used before all of them are made", "[run][checkpoint]") {
  std::vector<std::byte> memory(64);
  std::atomic<int> used = 0;
  BackgroundCopies copies(memory);
  copies.add(
      64, [](std::byte*, int64_t, int64_t) {}, [&](BackgroundCopies::Bytes) { ++used; });
  copies.then([&] { ++used; });
  std::this_thread::sleep_for(std::chrono::milliseconds(20));
  REQUIRE(used == 0);
  copies.end();
  copies.wait();
  REQUIRE(used == 3);
}

TEST_CASE("copies that were not ended are dropped", "[run][checkpoint]") {
  std::vector<std::byte> memory(64);
  std::atomic<int> used = 0;
  {
    BackgroundCopies copies(memory);
    copies.add(
        64, [](std::byte*, int64_t, int64_t) {}, [&](BackgroundCopies::Bytes) { ++used; });
  }
  REQUIRE(used == 0);
}

TEST_CASE("copies wait for memory until what lies there has been used", "[run][checkpoint]") {
  std::vector<std::byte> memory(64);
  std::atomic<int> used = 0;
  std::atomic<bool> go_on = false, copied = false;
  BackgroundCopies copies(memory);
  const auto add = [&] {  // two pieces, which fill the memory
    copies.add(
        64, [](std::byte*, int64_t, int64_t) {},
        [&](BackgroundCopies::Bytes) {
          while (!go_on) std::this_thread::yield();
          ++used;
        });
  };
  add();
  std::thread later([&] { add(), copied = true; });
  std::this_thread::sleep_for(std::chrono::milliseconds(20));
  REQUIRE(!copied);
  go_on = true;
  later.join();
  REQUIRE(used >= 2);
}

TEST_CASE("a checkpoint has the same bytes from copies in memory of any size, and a rank writes what its plan says",
          "[run][pp][checkpoint]") {
  const Model model{"gpt2", true, DType::bf16, 8, 8};
  for (const LayoutCase& layout : std::vector<LayoutCase>{{},
                                                          {1, Schedule::one_f_one_b, 1, {.shards = 2}, 2},
                                                          {1, Schedule::one_f_one_b, 1, {.stage = 1, .shards = 3}},
                                                          {3, Schedule::one_f_one_b},
                                                          {2, Schedule::one_f_one_b, 1, {.stage = 3, .shards = 2}, 2},
                                                          {1, Schedule::one_f_one_b, 1, {.stage = 2, .replicas = 2}}}) {
    INFO(to_string(layout));
    const StepConfig step = step_of(model, layout, 5, 1);
    const Plan plan = make_plan(step, {DeviceKind::cpu, 1});
    const TempDir dir;
    int64_t number = 0;
    for (const int64_t size : {int64_t{0}, int64_t{16}, int64_t{1000}, plan.share_bytes}) {
      ++number;
      std::mutex mutex;
      std::map<const Plan*, int64_t> most;  // that a rank of a stage writes
      int most_threads = 0;                 // that take columns of a tensor
      on_ranks(step, [&](Run& run) {
        run.stream.synchronize();
        std::vector<std::byte> memory(static_cast<size_t>(size));
        CheckpointWrite write(dir.path(), number, step.model, run.trainer.state(), run.stream,
                              {.trainer = {{"seq_len", 7}}}, {.bytes = memory});
        // Training goes on: the copies do not change any more.
        if (size == plan.share_bytes)
          for (const StateEntry& e : run.trainer.state().state_table())
            std::memset(e.tensor.bytes, 0xff, static_cast<size_t>(e.tensor.size_bytes()));
        write.publish();
        const std::lock_guard lock(mutex);
        int64_t& bytes = most[&plan.of(run.groups.rank())];
        bytes = std::max(bytes, write.bytes());
        most_threads = std::max(most_threads, omp_get_max_threads());
      });
      REQUIRE(most_threads == 1);  // as on_ranks() gives them
      for (const auto& [stage, bytes] : most) {
        REQUIRE(bytes <= stage->share_bytes);
        // A bound if the rank that writes most of the weights is not the one with most of the optimizer's state.
        if (step.layout.ranks() == step.layout.pipeline.stages) REQUIRE(bytes == stage->share_bytes);
      }
      const std::string path = checkpoint_path(dir.path(), number);
      REQUIRE_FALSE(checkpoint_fault(path));
      std::map<std::string, std::string> files = files_in(path), at_once = files_in(checkpoint_path(dir.path(), 1));
      files.erase("manifest.json"), at_once.erase("manifest.json");  // has the step
      REQUIRE(files == at_once);
    }
  }
}

TEST_CASE("copies are part of a run's plan; where memory is short, a part at a time is copied",
          "[run][checkpoint][plan]") {
  const TempDir dir;
  const auto memory_of = [&](const std::string& more) {
    const ProgramResult r = run_program("--plan --json " + wide(dir / "none", more));
    INFO(r.err);
    REQUIRE(r.status == 0);
    const nlohmann::json plan = nlohmann::json::parse(r.out);
    return std::pair(plan["memory_bytes"].get<int64_t>(), plan["stages"][0]["checkpoint_copy_bytes"].get<int64_t>());
  };
  const auto [at_once, none] = memory_of("--checkpoint-mode sync");
  const auto [all, copies] = memory_of("");
  REQUIRE(none == 0);
  REQUIRE(all == at_once + copies);
  run_well(wide(dir / "sync", "--checkpoint-mode sync"));
  // The last checkpoint of a run is waited for: where there is no other, nothing is copied.
  REQUIRE(memory_of("--checkpoint-every 0 --checkpoint-minutes 0").second == 0);

  struct Case {
    std::string name;
    int64_t bytes;  // beside the rest
    const char* said;
  };
  for (const Case& c : std::vector<Case>{{"all", copies, ""},
                                         {"part", copies / 2, "they are copied a part at a time"},
                                         {"none", 1000, "training waits until a checkpoint is written"}}) {
    const std::string limit = formatted("--memory-limit {:.12f}", static_cast<double>(at_once + c.bytes) / (1 << 30));
    const ProgramResult r = run_program(wide(dir / c.name, limit));
    INFO(c.name << r.out << r.err);
    REQUIRE(r.status == 0);
    REQUIRE((r.out.find("  checkpoint copies ") != r.out.npos) == (c.name != "none"));
    REQUIRE((r.out.find("notice: --checkpoint-mode async: ") != r.out.npos) == (c.name != "all"));
    REQUIRE(r.out.find(c.said) != r.out.npos);
    for (const int64_t step : {2, 4, 6})
      REQUIRE((state_of(checkpoint_path(dir / c.name, step)) == state_of(checkpoint_path(dir / "sync", step))));
  }
  const std::string too_small = formatted("--memory-limit {:.12f}", static_cast<double>(at_once - 4096) / (1 << 30));
  REQUIRE(run_program(wide(dir / "refused", too_small)).status == 1);
}

TEST_CASE("the console and metrics.jsonl say for each checkpoint how long training stood still", "[run][checkpoint]") {
  const TempDir dir;
  for (const std::string layout : {"", "--local-ranks 2 --zero-stage 1 "}) {
    fs::remove_all(dir / "run");
    const std::string out = said(tiny(dir / "run", layout + "--max-steps 7 --checkpoint-every 2"));
    const std::vector<nlohmann::json> lines = checkpoint_lines(dir / "run");
    REQUIRE(lines.size() == 4);
    for (size_t i = 0; i < lines.size(); ++i) {
      const int64_t saved = i == 3 ? 7 : 2 * static_cast<int64_t>(i) + 2;
      REQUIRE(lines[i]["saved"] == saved);
      REQUIRE(lines[i]["step"] >= saved);
      REQUIRE(lines[i]["mode"] == (i == 3 ? "sync" : "async"));  // the last one is waited for
      for (const char* seconds : {"stall_s", "write_s", "mb_per_s"}) REQUIRE(lines[i][seconds] > 0);
      REQUIRE((lines[i]["cpu_s"] > 0) == (i < 3));
      const double bytes = 1e6 * lines[i]["write_s"].get<double>() * lines[i]["mb_per_s"].get<double>();
      REQUIRE(std::abs(bytes / lines[i]["bytes"].get<double>() - 1) < 1e-9);
      REQUIRE(out.find(checkpoint_path(dir / "run", saved) + "; training stood still for ") != out.npos);
    }
  }
}

TEST_CASE("a run that gets no thread to write checkpoints says once why training stands still for them",
          "[run][checkpoint]") {
  const TempDir dir;
  const ProgramResult r = run_program(
      tiny(dir / "run", "--max-steps 7 --checkpoint-every 2"),
      "env LD_PRELOAD=build/file_ops.so FILE_OPS_NO_THREADS_AFTER=.tmp-step-000002 FILE_OPS_ROOT=" + (dir / "run"));
  INFO(r.out << r.err);
  REQUIRE(r.status == 0);
  REQUIRE(checkpoint_lines(dir / "run").size() == 4);
  const std::string warning =
      "WARNING: no thread could be started to write the checkpoint while training goes on (Resource temporarily "
      "unavailable): ";
  REQUIRE(r.out.find(warning) != std::string::npos);
  REQUIRE(r.out.find(warning) == r.out.rfind(warning));
  REQUIRE(r.out.find("raise `ulimit -u`", r.out.find(warning)) != std::string::npos);
}

TEST_CASE("a directory that another one replaces while a checkpoint is written does not become that checkpoint",
          "[run][checkpoint]") {
  const Model model{"gpt2", true, DType::fp32, 8, 8};
  const StepConfig step = step_of(model, {}, 2, 1);
  const TempDir dir;
  on_ranks(step, [&](Run& run) {
    run.stream.synchronize();
    std::vector<std::byte> memory(1 << 20);
    CheckpointWrite write(dir.path(), 3, step.model, run.trainer.state(), run.stream, {.trainer = {{"seq_len", 7}}},
                          {.bytes = memory});
    fs::rename(dir / ".tmp-step-000003", dir / "moved");
    fs::create_directory(dir / ".tmp-step-000003");
    REQUIRE_ERROR(write.publish(), "was moved, deleted or replaced while it was written");
  });
  REQUIRE(!fs::exists(dir / "step-000003"));
}
