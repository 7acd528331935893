// Runs of the program with several ranks: equal to one rank, resumed in other layouts, refused and ended together.
#include <fstream>
#include <nlohmann/json.hpp>

#include "catch2.h"
#include "core/files.h"
#include "helpers.h"
#include "model/presets.h"
#include "run/plan/planner.h"

using namespace llmc;
using nlohmann::json;

namespace {

std::string small_run(const std::string& out, const std::string& more) {
  return "--model d2 --n-embd 24 --n-head 2 --vocab-size 211 --train-data test/golden/gpt2_tiny/train.bin --val-data "
         "test/golden/gpt2_tiny/train.bin --val-every 10 --val-steps 2 --seq-len 33 --total-batch-size 264 "
         "--lr 1e-2 --threads 2 --out-dir " +
         out + " " + more;
}
std::vector<std::string> metrics(const std::string& out) {
  std::vector<std::string> lines;
  std::ifstream in(out + "/metrics.jsonl");
  for (std::string line; std::getline(in, line);) {
    const json o = json::parse(line);
    if (o["kind"] == "checkpoint") continue;
    lines.push_back(
        formatted("{} {} {:.17g}", o["kind"].get<std::string>(), o["step"].get<int64_t>(), o["loss"].get<double>()));
  }
  return lines;
}
std::vector<double> training_losses(const std::string& out) {
  std::vector<double> losses;
  for (const std::string& line : metrics(out))
    if (line.starts_with("train")) losses.push_back(std::stod(line.substr(line.rfind(' '))));
  return losses;
}

}  // namespace

TEST_CASE("a run of several ranks equals the run of one: losses, validation, resume in another layout, signals",
          "[run]") {
  const TempDir dir;
  REQUIRE(run_program(small_run(dir / "one", "--max-steps 20 --batch-size 4")).status == 0);
  REQUIRE(run_program(small_run(dir / "four", "--max-steps 20 --batch-size 2 --local-ranks 4 --zero-stage 3")).status ==
          0);
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
  // Started on one rank, resumed on four in stage 2, then on two in stage 1: the same run.
  REQUIRE(run_program(small_run(dir / "moved", "--max-steps 7 --lr-schedule constant --batch-size 4")).status == 0);
  REQUIRE(run_program(small_run(dir / "moved",
                                "--max-steps 13 --lr-schedule constant --batch-size 1 --local-ranks 4 --zero-stage 2"))
              .status == 0);
  REQUIRE(run_program(small_run(dir / "moved",
                                "--max-steps 20 --lr-schedule constant --batch-size 2 --local-ranks 2 --zero-stage 1"))
              .status == 0);
  REQUIRE(run_program(small_run(dir / "stayed", "--max-steps 20 --lr-schedule constant --batch-size 4")).status == 0);
  const auto moved = training_losses(dir / "moved"), stayed = training_losses(dir / "stayed");
  REQUIRE(moved.size() == 20);
  REQUIRE(stayed.size() == 20);
  for (size_t i = 0; i < 20; ++i) REQUIRE(std::abs(moved[i] / stayed[i] - 1) < 1e-4);
  // Stopped by signals and by SIGKILL in the same layout: bit for bit.
  const std::string four = "--max-steps 60 --batch-size 2 --local-ranks 4 --zero-stage 2 --checkpoint-every 9";
  REQUIRE(run_program(small_run(dir / "whole", four)).status == 0);
  for (int attempt = 0;; ++attempt) {
    REQUIRE(attempt < 40);
    const ProgramResult r =
        run_program(small_run(dir / "cut", four), formatted("timeout --preserve-status --signal {} {:.2f}",
                                                            attempt % 3 == 2 ? "KILL" : "TERM", 0.4 + 0.1 * attempt));
    INFO(r.err);
    if (r.status == 0) break;
    REQUIRE((r.status == 75 || r.status > 128));
  }
  REQUIRE(metrics(dir / "cut") == metrics(dir / "whole"));
}

TEST_CASE("a run resumed in another stage reduces gradients as before, bit for bit, if memory allows", "[run]") {
  const TempDir dir;
  const std::string steps = "--n-layer 12 --max-steps 8 --checkpoint-every 4 --batch-size 2 --local-ranks 2 ";
  namespace fs = std::filesystem;
  for (const auto& [begun, moved] : {std::pair{1, 2}, {2, 1}}) {
    const std::string whole = formatted("{}/whole-{}", dir.path(), begun), first = formatted("--zero-stage {} ", begun),
                      then = formatted("--zero-stage {} ", moved), cut = dir / "cut";
    REQUIRE(run_program(small_run(whole, steps + first)).status == 0);
    auto go_on = [&](const std::string& more) {
      fs::remove_all(cut);
      fs::copy(whole, cut, fs::copy_options::recursive);
      fs::remove_all(cut + "/step-000008");
      const ProgramResult r = run_program(small_run(cut, steps + more));
      INFO(r.err);
      REQUIRE(r.status == 0);
      return r.out;
    };
    const char* recorded = begun == 1 ? "step" : "micro";
    go_on(then);
    REQUIRE(metrics(cut) == metrics(whole));
    REQUIRE(json::parse(read_whole(cut + "/step-000008/trainer.json"))["choices"]["grad_reduce"] == recorded);
    // An explicit option wins, and rounds differently.
    go_on(then + (begun == 1 ? "--grad-reduce micro" : "--grad-reduce step"));
    REQUIRE(metrics(cut) != metrics(whole));
    if (begun == 2) continue;
    // Without enough memory for it: the stage's default, with a notice.
    StepConfig c{.model = resolve_model(
                     "d2", {.n_layer = 12, .n_head = 2, .n_kv_head = {}, .n_embd = 24, .n_ffn = {}, .vocab_size = 211}),
                 .batch = {2, 33},
                 .micro_batches = 2};
    c.layout.zero.shards = 2;
    c.layout.zero.set_stage(2);
    const int64_t micro = make_plan(c, {DeviceKind::cpu, 1}).total_bytes();
    c.layout.zero.grad_reduce = GradReduce::step;
    REQUIRE(micro < make_plan(c, {DeviceKind::cpu, 1}).total_bytes());
    const std::string out = go_on(then + formatted("--memory-limit {:.17g}", static_cast<double>(micro) / (1 << 30)));
    REQUIRE(out.find("notice: --grad-reduce step, with which the run began, needs") != std::string::npos);
    REQUIRE(json::parse(read_whole(cut + "/step-000008/trainer.json"))["choices"]["grad_reduce"] == "micro");
  }
}

TEST_CASE("a run moves between parameter servers bit for bit, and to and from an all-reduce with a notice", "[run]") {
  const TempDir dir;
  const std::string four = "--lr-schedule constant --batch-size 1 --local-ranks 4 --dp-sync ";
  auto run = [&](const std::string& out, const std::string& sync, int steps) {
    const ProgramResult r = run_program(small_run(dir / out, formatted("{}{} --max-steps {}", four, sync, steps)));
    INFO(r.err);
    REQUIRE(r.status == 0);
    return r.out;
  };
  const std::string header = run("whole", "parameter-server", 12);
  REQUIRE(header.find("traffic of one rank's link per step, by --dp-sync: P = 4") != std::string::npos);
  REQUIRE(header.find("out (P - 1) W    543.0 KiB | in (P - 1) G R  543.0 KiB <= chosen") != std::string::npos);
  run("moved", "parameter-server", 4);
  REQUIRE(run("moved", "partitioned-server", 8).find("notice: --dp-sync") != std::string::npos);
  run("moved", "parameter-server-chain", 12);
  auto train_only = [](std::vector<std::string> lines) {
    std::erase_if(lines, [](const std::string& line) { return !line.starts_with("train"); });
    return lines;
  };
  REQUIRE(train_only(metrics(dir / "moved")) == train_only(metrics(dir / "whole")));
  for (const char* file : {"model-00001-of-00004.safetensors", "model-00002-of-00004.safetensors"})
    REQUIRE(read_whole(dir / "moved/step-000012/" + file) == read_whole(dir / "whole/step-000012/" + file));
  // The ring adds in another order: the same run up to rounding.
  run("ring", "partitioned-server", 4);
  REQUIRE(run("ring", "all-reduce", 12).find("notice: --dp-sync") != std::string::npos);
  const std::vector<std::string> ring = train_only(metrics(dir / "ring")), whole = train_only(metrics(dir / "whole"));
  REQUIRE(ring.size() == whole.size());
  REQUIRE(ring != whole);
  auto loss = [](const std::string& line) { return std::stod(line.substr(line.rfind(' '))); };
  for (size_t i = 0; i < whole.size(); ++i) REQUIRE(std::abs(loss(ring[i]) / loss(whole[i]) - 1) < 1e-4);
}

TEST_CASE("a run moves between numbers of tensor-parallel ranks: the same run up to rounding, with a notice", "[run]") {
  const TempDir dir;
  auto run = [&](const std::string& out, const std::string& layout, int steps) {
    const ProgramResult r = run_program(
        small_run(dir / out, formatted("--n-head 4 --lr-schedule constant {} --max-steps {}", layout, steps)));
    INFO(r.err);
    REQUIRE(r.status == 0);
    return r.out;
  };
  run("stayed", "--batch-size 4", 12);
  run("moved", "--batch-size 4 --local-ranks 2 --tp 2", 3);
  run("moved", "--batch-size 2 --local-ranks 4 --tp 2 --zero-stage 3", 6);
  REQUIRE(run("moved", "--batch-size 4 --local-ranks 4 --tp 4", 9).find("notice: --tp was '2' and is now '4'") !=
          std::string::npos);
  REQUIRE(json::parse(read_whole(dir / "moved/step-000009/trainer.json"))["layout"].get<std::string>().starts_with(
      "4 tensor-parallel ranks"));
  run("moved", "--batch-size 8", 12);
  const auto moved = training_losses(dir / "moved"), stayed = training_losses(dir / "stayed");
  REQUIRE(moved.size() == 12);
  REQUIRE(stayed.size() == 12);
  for (size_t i = 0; i < 12; ++i) REQUIRE(std::abs(moved[i] / stayed[i] - 1) < 1e-4);
}

TEST_CASE("a resumed run that fits only with its recorded settings continues; one that does not fit at all is refused",
          "[run]") {
  const TempDir dir;
  const std::string steps = "--n-layer 12 --checkpoint-every 4 --batch-size 2 --local-ranks 2 --lr-schedule constant ";
  REQUIRE(run_program(small_run(dir / "run", steps + "--max-steps 4 --zero-stage 2")).status == 0);
  StepConfig c{.model = resolve_model(
                   "d2", {.n_layer = 12, .n_head = 2, .n_kv_head = {}, .n_embd = 24, .n_ffn = {}, .vocab_size = 211}),
               .batch = {2, 33},
               .micro_batches = 2};
  c.layout.zero.shards = 2;
  c.layout.zero.set_stage(1);
  c.layout.zero.grad_reduce = GradReduce::micro;
  const double limit = static_cast<double>(make_plan(c, {DeviceKind::cpu, 1}).total_bytes());
  const std::string one = steps + "--max-steps 8 --zero-stage 1 --memory-limit ";
  const ProgramResult small = run_program(small_run(dir / "run", one + formatted("{:.17g}", 0.99 * limit / (1 << 30))));
  INFO(small.err);
  REQUIRE(small.status == 1);
  REQUIRE(small.err.find("does not fit into --memory-limit") != std::string::npos);
  const ProgramResult good = run_program(small_run(dir / "run", one + formatted("{:.17g}", limit / (1 << 30))));
  INFO(good.err);
  REQUIRE(good.status == 0);
}

TEST_CASE("with --memory-limit a little above what stage 3 needs, stage 3 runs and stage 2 is refused", "[run]") {
  const TempDir dir;
  write_shard<uint16_t>(dir / "t.bin", std::vector<uint16_t>(9000, 5));
  const std::string shape =
      "--model d8 --n-embd 256 --n-head 4 --vocab-size 257 --seq-len 16 --batch-size 1 --local-ranks 8 "
      "--threads 2 --max-steps 2 --train-data " +
      (dir / "t.bin");
  StepConfig c{.model = resolve_model(
                   "d8", {.n_layer = {}, .n_head = 4, .n_kv_head = {}, .n_embd = 256, .n_ffn = {}, .vocab_size = 257}),
               .batch = {1, 16}};
  c.layout.zero.shards = 8;
  c.layout.zero.set_stage(3);
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

TEST_CASE("a NaN weight that one rank of a stage-3 run reads is refused on all ranks, by name", "[run]") {
  const TempDir dir;
  std::vector<uint16_t> tokens(33 * 8 + 1, 5);
  write_shard<uint16_t>(dir / "data.bin", tokens);
  const std::string options =
      "--model d1 --n-embd 12 --n-head 2 --vocab-size 211 --seq-len 33 --batch-size 1 --local-ranks 2 --zero-stage 3 "
      "--train-data " +
      (dir / "data.bin") + " --out-dir " + (dir / "run");
  // A weight of the last unit, held by one of the two ranks, is NaN in the checkpoint.
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
  REQUIRE(weight.status == 1);
  REQUIRE(weight.err.find("bad/model.safetensors: tensor transformer.ln_f.bias contains a number that is not finite") !=
          std::string::npos);
}

TEST_CASE("a bad token read by one rank ends all ranks with its message", "[run]") {
  const TempDir dir;
  std::vector<uint16_t> tokens(33 * 8 + 1, 5);
  tokens[33 * 3 + 4] = 250;
  write_shard<uint16_t>(dir / "data.bin", tokens);
  const ProgramResult r = run_program(
      "--model d1 --n-embd 12 --n-head 2 --vocab-size 211 --seq-len 33 --batch-size 1 --local-ranks 4 "
      "--no-shuffle --max-steps 2 --train-data " +
      (dir / "data.bin") + " --out-dir " + (dir / "run"));
  INFO(r.err);
  REQUIRE(r.status == 1);
  REQUIRE(r.err.find("token 250 at position 103") != std::string::npos);
  REQUIRE(r.err.find("rank 3 on ") != std::string::npos);
}
