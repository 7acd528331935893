// Non-finite numbers and outliers: detected, named, and kept out of the weights.
#include <nlohmann/json.hpp>
#include <set>

#include "catch2.h"
#include "tiny_run.h"
#include "train/step_statistics.h"

using namespace llmc;
using nlohmann::json;
namespace fs = std::filesystem;

TEST_CASE("a non-finite step names the first bad tensor, its position and the samples; the weights are unchanged",
          "[train]") {
  const TempDir dir;
  write_broken_model(dir);
  std::vector<uint16_t> tokens(33 * 8 + 1, 5);
  tokens[33 * 3 + 4] = 9;  // sample 3: micro-batch 1, sequence 1
  write_shard<uint16_t>(dir / "data.bin", tokens);
  const ProgramResult bad = run_program(
      "--model " + (dir / "broken") + " --train-data " + (dir / "data.bin") +
      " --no-shuffle --seq-len 33 --batch-size 2 --total-batch-size 264 --max-steps 2 --threads 1 --out-dir " +
      (dir / "run"));
  INFO(bad.err);
  REQUIRE(bad.status == 2);
  REQUIRE(bad.err.find("step 1 diverged") != std::string::npos);
  REQUIRE(bad.err.find(
              "in embedded, written by embedding_forward in the forward of the embedding, micro-batch 1, sample 3.") !=
          std::string::npos);
  const ProgramResult ranks =
      run_program("--model " + (dir / "broken") + " --train-data " + (dir / "data.bin") +
                  " --no-shuffle --seq-len 33 --batch-size 2 --total-batch-size 264 --max-steps 2 "
                  "--local-ranks 2 --zero-stage 3 --out-dir " +
                  (dir / "ranks"));
  INFO(ranks.err);
  REQUIRE(ranks.status == 2);
  REQUIRE(ranks.err.find("in the forward of the embedding, rank 1, micro-batch 0, sample 3.") != std::string::npos);
  REQUIRE(checkpoint_steps(dir / "run").empty());
}

TEST_CASE("weights that are not finite are not trained on, whether data touch them or not", "[train]") {
  const TempDir dir;
  run_well(tiny(dir / "made", "--max-steps 1"));
  write_changed_model(dir / "broken", dir / "made/step-000001",
                      [](const std::string& name, std::vector<float>& values) {
                        if (name.ends_with("wpe.weight")) values[20 * 12] = std::numeric_limits<float>::quiet_NaN();
                      });
  const ProgramResult bad = run_program("--model " + (dir / "broken") + " --train-data " + tiny_data +
                                        " --seq-len 16 --batch-size 2 --max-steps 1 --out-dir " + (dir / "run"));
  REQUIRE(bad.status == 1);
  REQUIRE(bad.err.find("model.safetensors: tensor transformer.wpe.weight contains a number that is not finite, or too "
                       "large for fp32: use other weights") != std::string::npos);
}

TEST_CASE("weights that an update has made infinite are not saved; the last checkpoint is kept and named", "[train]") {
  const TempDir dir;
  run_well(tiny(dir / "made", "--max-steps 1"));
  // Sequences never reach position 20. Weight decay multiplies it by -1 in the first update, and by -3 in the second.
  write_changed_model(dir / "large", dir / "made/step-000001", [](const std::string& name, std::vector<float>& values) {
    if (name.ends_with("wpe.weight")) values[20 * 12] = 3e38f;
  });
  for (const std::string more : {"--max-steps 2", "--max-steps 3 --local-ranks 2 --zero-stage 3"}) {
    INFO(more);
    const std::string out = dir / std::to_string(more.size());
    const ProgramResult bad = run_program("--model " + (dir / "large") + " --train-data " + tiny_data +
                                          " --seq-len 16 --batch-size 2 --lr 100 --warmup-steps 2 --weight-decay 0.04 "
                                          "--checkpoint-every 1 --out-dir " +
                                          out + " " + more);
    INFO(bad.err);
    REQUIRE(bad.status == 2);
    REQUIRE(bad.err.find("no checkpoint after step 2: ") != std::string::npos);
    REQUIRE(bad.err.find("wpe.weight contains a non-finite number: the step diverged in its update; lower --lr") !=
            std::string::npos);
    REQUIRE(bad.err.find("the last one is " + out + "/step-000001") != std::string::npos);
    REQUIRE(checkpoint_steps(out) == std::vector<int64_t>{1});
    REQUIRE_FALSE(fs::exists(out + "/.tmp-step-000002"));
  }
}

TEST_CASE("outliers have no limit before the window is full; NaN is rejected and not recorded", "[train]") {
  OutlierDetector d;
  for (int i = 0; i < 127; ++i) d.add(i % 2);
  REQUIRE(std::isinf(d.limit(2)));
  d.add(std::numeric_limits<double>::quiet_NaN());
  d.add(std::numeric_limits<double>::infinity());
  REQUIRE(std::isinf(d.limit(2)));
  d.add(1);
  REQUIRE(std::abs(d.limit(2) - 1.5) < 1e-12);  // mean 0.5, deviation 0.5
  REQUIRE(OutlierDetector(d.values()).limit(3) == d.limit(3));
  d.add(100);
  REQUIRE(d.limit(2) > 10);
  REQUIRE(d.values().size() == OutlierDetector::window);
}

TEST_CASE("outliers are skipped if enabled, also across a resume, and reported in the metrics", "[train]") {
  const TempDir dir;
  const std::string options = "--max-steps 150 --skip-loss-z 0.5 ";
  run_well(tiny(dir / "whole", options));
  run_well(tiny(dir / "cut", "--max-steps 133 --skip-loss-z 0.5"));
  run_well(tiny(dir / "cut", options));
  auto skipped = [](const std::string& out) {
    std::set<int64_t> steps;
    std::ifstream in(out + "/metrics.jsonl");
    for (std::string line; std::getline(in, line);)
      if (const json object = json::parse(line); object.value("skipped", false))
        steps.insert(object["step"].get<int64_t>());
    return steps;
  };
  const std::set<int64_t> whole = skipped(dir / "whole");
  for (int64_t step : whole) REQUIRE(step > 128);
  REQUIRE(skipped(dir / "cut") == whole);
}
