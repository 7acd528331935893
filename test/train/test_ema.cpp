// --ema: the moving average of the weights against one computed here, in every layout, in validations, in checkpoints.
#include <cmath>

#include "run/selftest/run_layout.h"
#include "tiny_run.h"

using namespace llmc;

namespace {

std::string ema_run(const std::string& out, const std::string& more) {
  return tiny(out,
              "--model d2 --n-layer 2 --n-embd 24 --n-head 2 --seq-len 32 --total-batch-size 256 --max-steps 6 "
              "--lr-schedule constant --val-data " +
                  tiny_data + " --val-every 3 --val-steps 1 " + more);
}

std::map<std::string, std::vector<float>> weights_in(const std::string& directory) {
  std::map<std::string, std::vector<float>> all;
  const auto files = open_all(model_files(directory));
  for (const auto& file : files)
    for (const std::string& name : file->names()) {
      all[name].resize(static_cast<size_t>(file->info(name).numel()));
      if (file->info(name).dtype == DType::fp32) file->read(name, all[name].data());
    }
  return all;
}
std::string model_bytes(const std::string& directory) {
  std::string all;
  for (const std::string& file : model_files(directory)) all += read_whole(file);
  return all;
}
std::string whole_state(const std::string& checkpoint) {
  return state_of(checkpoint) + model_bytes(checkpoint + "/ema");
}
// The losses of the averaged weights, by step.
std::map<int64_t, double> averaged_losses(const std::string& out) {
  std::map<int64_t, double> found;
  std::ifstream in(out + "/metrics.jsonl");
  for (std::string line; std::getline(in, line);)
    if (const auto object = nlohmann::json::parse(line); object["kind"] == "val")
      found[object["step"]] = object["ema"]["loss"];
  return found;
}

}  // namespace

TEST_CASE("--ema averages the weights after every update, and changes nothing else", "[train][ema]") {
  const TempDir dir;
  run_well(ema_run(dir / "run", "--ema 0.75 --checkpoint-every 1"));
  run_well(ema_run(dir / "plain", ""));
  REQUIRE(losses(dir / "run") == losses(dir / "plain"));
  REQUIRE(validations(dir / "run") == validations(dir / "plain"));
  REQUIRE(model_bytes(dir / "run/step-000006") == model_bytes(dir / "plain/step-000006"));
  REQUIRE_FALSE(path_exists(dir / "plain/step-000006/ema"));

  std::map<std::string, std::vector<double>> average;
  for (int step = 1; step <= 6; ++step) {
    const std::string checkpoint = dir / formatted("run/step-{:06}", step);
    REQUIRE_FALSE(checkpoint_fault(checkpoint));
    REQUIRE_FALSE(checkpoint_fault(checkpoint + "/ema"));
    const double share = std::max(0.25, 1.0 / step);  // the first four weights count equally
    double difference = 0, size = 0;
    for (const auto& [name, values] : weights_in(checkpoint)) {
      std::vector<double>& mean = average[name];
      mean.resize(values.size());
      const std::vector<float> saved = weights_in(checkpoint + "/ema").at(name);
      for (size_t i = 0; i < values.size(); ++i) {
        mean[i] += share * (values[i] - mean[i]);
        difference += std::pow(saved[i] - mean[i], 2), size += std::pow(mean[i], 2);
      }
    }
    REQUIRE(std::sqrt(difference / size) < 6 * 3 * 0x1p-24);  // three roundings a step
  }
  // Saved models have the losses that the validations reported.
  const auto expected = averaged_losses(dir / "run");
  REQUIRE(expected.size() == 3);
  REQUIRE(expected.at(0) == validations(dir / "run").at(0));
  REQUIRE(expected.at(6) != validations(dir / "run").at(6));
  const std::string out = said(
      "--evaluate --json --threads 1 --batch-size 2 --seq-len 32 --val-steps 1 "
      "--total-batch-size 256 --val-data " +
      tiny_data + " --model " + dir / "run/step-000006/ema");
  REQUIRE(std::abs(nlohmann::json::parse(out)["loss"].get<double>() / expected.at(6) - 1) < 1e-6);
}

TEST_CASE("--ema is the same in every layout and stage, in fp32 and with master weights", "[train][ema]") {
  const TempDir dir;
  run_well(ema_run(dir / "one", "--ema 0.9"));
  const auto expected = averaged_losses(dir / "one");
  for (const char* layout : {"--local-ranks 2 --zero-stage 1 --dp-replicate 2", "--local-ranks 2 --tp 2",
                             "--local-ranks 2 --cp 2 --zero-stage 3", "--local-ranks 2 --pp 2",
                             "--local-ranks 4 --tp 2 --pp 2", "--local-ranks 2 --dp-sync parameter-server"}) {
    INFO(layout);
    std::filesystem::remove_all(dir / "run");
    run_well(ema_run(dir / "run", formatted("--ema 0.9 {}", layout)));
    for (const auto& [step, loss] : averaged_losses(dir / "run"))
      REQUIRE(std::abs(loss / expected.at(step) - 1) < 1e-5);
  }
  std::string reference;
  for (const char* stage : {"0", "1", "2", "3"}) {
    std::filesystem::remove_all(dir / "run");
    run_well(ema_run(dir / "run",
                     formatted("--ema 0.9 --dtype bf16 --local-ranks 2 --grad-reduce micro --zero-stage {}", stage)));
    std::string found = model_bytes(dir / "run/step-000006") + model_bytes(dir / "run/step-000006/ema");
    for (const auto& [step, loss] : averaged_losses(dir / "run")) found += formatted("{} {}\n", step, loss);
    if (reference.empty()) reference = found;
    REQUIRE(found == reference);
  }
}

TEST_CASE("averages take the place of the weights, on every rank, and give it back bit for bit, also if interrupted",
          "[train][ema]") {
  for (const int stage : {0, 1, 2, 3}) {
    StepConfig step{.model = selftest::awkward_model("llama", true), .precision = DType::bf16, .batch = {2, 12}};
    step.precision.averages = true;
    step.layout.zero.shards = 2;
    step.layout.zero.set_stage(stage);
    const Plan plan = make_plan(step, {});
    World world(step.layout.mesh(), Backend::threads, no_hooks);
    run_ranks(world, [&](int rank) {
      Run run(step, plan, {}, world, rank);
      selftest::init_drawn(step, run.trainer.state(), run.stream);
      for (int s = 1; s <= 3; ++s)
        run.trainer.step([&](int64_t m) { return selftest::read_batch(step, run.groups.reader(), m); },
                         selftest::update_options(Optimizer::adamw, s), {});
      const auto bits = [&](std::optional<StateKind> kind = {}) {
        run.stream.synchronize();
        std::string all;
        for (const StateEntry& e : run.trainer.state().state_table())
          if (!kind || e.kind == *kind)
            all.append(reinterpret_cast<const char*>(e.tensor.bytes), static_cast<size_t>(e.tensor.size_bytes()));
        return all;
      };
      const std::string before = bits(), weights = bits(StateKind::weight), average = bits(StateKind::average);
      const auto look = [&] {
        REQUIRE(bits(StateKind::weight) != weights);
        REQUIRE(bits(StateKind::master) == average);
        return 0;
      };
      run.trainer.with_averages(look);
      REQUIRE(bits() == before);
      const auto interrupted = [&]() -> int {
        look();
        throw Interrupted{"asked to stop"};
      };
      REQUIRE_THROWS_AS(run.trainer.with_averages(interrupted), Interrupted);
      REQUIRE(bits() == before);
    });
  }
}

TEST_CASE("a run with --ema resumes bit for bit, and a branch may begin or end it", "[train][ema]") {
  const TempDir dir;
  const std::string bf16 = "--ema 0.9 --dtype bf16 ";
  run_well(ema_run(dir / "whole", bf16));
  run_well(ema_run(dir / "cut", bf16 + "--max-steps 4"));
  run_well(ema_run(dir / "cut", bf16));
  REQUIRE(whole_state(dir / "cut/step-000006") == whole_state(dir / "whole/step-000006"));
  refused(ema_run(dir / "cut", "--dtype bf16 --max-steps 8"), "--ema was '0.9' and is now ''");
  refused(ema_run(dir / "none", "--ema 0.9 --dtype bf16 --master-weights none"),
          "--ema 0.9 with --master-weights none");

  run_well(ema_run(dir / "plain", "--dtype bf16 --max-steps 4"));
  run_well(ema_run(dir / "branch", bf16 + "--branch-from " + dir / "plain/step-000004"));
  run_well(ema_run(dir / "without", "--dtype bf16 --branch-from " + dir / "cut/step-000004"));
  REQUIRE(model_bytes(dir / "branch/step-000006") == model_bytes(dir / "whole/step-000006"));
  REQUIRE(model_bytes(dir / "without/step-000006") == model_bytes(dir / "whole/step-000006"));
  REQUIRE_FALSE(path_exists(dir / "without/step-000006/ema"));
}

TEST_CASE("a plan counts the average by its name, sharded as the optimizer's state is", "[train][ema]") {
  const TempDir dir;
  const auto bytes = [&](const std::string& more) {
    const auto plan = nlohmann::json::parse(said(ema_run(dir / "run", "--plan --json --ema 0.9 " + more)));
    for (const auto& line : plan["stages"][0]["memory"])
      if (line["name"] == "moving average of weights") return line["bytes"].get<int64_t>();
    return int64_t{0};
  };
  const int64_t whole = bytes("");
  REQUIRE(whole > 0);
  REQUIRE(std::abs(static_cast<double>(bytes("--ranks 2 --zero-stage 1")) / static_cast<double>(whole) - 0.5) < 0.02);
}
