// Optimizers: each follows PyTorch, in every stage and layout; a run of each resumes, and moves between layouts.
#include <nlohmann/json.hpp>

#include "catch2.h"
#include "helpers.h"
#include "ops/optimizers.h"
#include "run/checkpoints/checkpoint.h"

using namespace llmc;
using nlohmann::json;

namespace {

const std::string model = "test/golden/gpt2_tiny";
const std::vector<std::string> others = {"sgd", "lion"};  // test_trajectory.cpp and all other tests are about AdamW

json golden_of(const std::string& optimizer) {
  return json::parse(read_whole(model + "/trajectory_optimizers.json"))[optimizer];
}

std::string run_of(const std::string& optimizer, const std::string& out_dir, const std::string& more = "") {
  return "--model " + model + " --train-data " + model +
         "/train.bin --batch-size 4 --seq-len 33 --total-batch-size 264 --max-steps 20 --optimizer " + optimizer +
         formatted(" --lr {} ", golden_of(optimizer)["peak"].get<double>()) +
         "--warmup-steps 5 --lr-schedule cosine --final-lr-frac 0.1 --weight-decay 0.1 --grad-clip 1 --no-shuffle "
         "--threads 2 " +
         more + " --out-dir " + out_dir;
}

void run_well(const std::string& arguments) {
  const ProgramResult r = run_program(arguments);
  INFO(arguments << "\n" << r.err);
  REQUIRE(r.status == 0);
}

std::vector<json> steps_of(const std::string& out_dir) {
  std::vector<json> lines;
  std::ifstream in(out_dir + "/metrics.jsonl");
  for (std::string line; std::getline(in, line);)
    if (json object = json::parse(line); object["kind"] == "train") lines.push_back(object);
  return lines;
}

// The bytes of all files with weights.
std::string weights_in(const std::string& checkpoint) {
  std::string all;
  for (const std::string& file : model_files(checkpoint)) all += read_whole(file);
  REQUIRE_FALSE(all.empty());
  return all;
}

// The greatest relative differences of losses and gradient norms.
std::pair<double, double> distances(const std::vector<json>& steps, const std::vector<double>& losses,
                                    const std::vector<double>& norms) {
  REQUIRE(steps.size() == losses.size());
  double loss = 0, norm = 0;
  for (size_t i = 0; i < steps.size(); ++i) {
    loss = std::max(loss, std::abs(steps[i]["loss"].get<double>() / losses[i] - 1));
    norm = std::max(norm, std::abs(steps[i]["grad_norm"].get<double>() / norms[i] - 1));
  }
  return {loss, norm};
}

}  // namespace

TEST_CASE("SGD with momentum and Lion follow PyTorch for twenty steps, on one rank and on several",
          "[train][optimizer]") {
  for (const std::string& optimizer : others)
    for (const char* layout :
         {"", "--batch-size 8", "--local-ranks 2 --zero-stage 1", "--local-ranks 4 --batch-size 2 --zero-stage 3",
          "--local-ranks 4 --batch-size 2 --zero-stage 2 --dp-replicate 2",
          "--local-ranks 2 --dp-sync parameter-server", "--local-ranks 2 --dp-sync partitioned-server",
          "--local-ranks 3 --pp 3", "--local-ranks 6 --pp 3 --batch-size 2 --zero-stage 3 --recompute block"}) {
      const TempDir dir;
      INFO(optimizer << " " << layout);
      run_well(run_of(optimizer, dir / "run", layout));
      const json golden = golden_of(optimizer);
      const auto [loss, norm] = distances(steps_of(dir / "run"), golden["loss"], golden["grad_norm"]);
      INFO("loss " << loss << ", norm " << norm);
      REQUIRE(loss < 1e-5);
      REQUIRE(norm < 1e-4);
    }
}

TEST_CASE("SGD and Lion with tensor, context, pipeline and expert parallelism are the run of one rank",
          "[train][optimizer]") {
  for (const std::string& optimizer : others)
    for (const auto& [shape, layouts] :
         {std::pair<std::string, std::vector<std::string>>{
              "--model d2 --n-embd 24 --n-head 2",
              {"--local-ranks 2 --tp 2", "--local-ranks 2 --cp 2", "--local-ranks 4 --tp 2 --pp 2",
               "--local-ranks 4 --tp 2 --cp 2 --zero-stage 3", "--local-ranks 4 --batch-size 2 --tp 2 --zero-stage 2"}},
          {"--model d2-e4 --n-embd 32 --n-head 2",
           {"--local-ranks 2 --batch-size 2 --ep 2", "--local-ranks 4 --batch-size 2 --tp 2 --ep 2 --zero-stage 3"}}}) {
      const TempDir dir;
      const auto run = [&](const std::string& out, const std::string& layout) {
        run_well(run_of(optimizer, out,
                        shape + " --vocab-size 211 --seq-len 32 --total-batch-size 256 --max-steps 8 " + layout));
      };
      run(dir / "one", "");
      std::vector<double> losses, norms;
      for (const json& step : steps_of(dir / "one")) losses.push_back(step["loss"]), norms.push_back(step["grad_norm"]);
      for (const std::string& layout : layouts) {
        std::filesystem::remove_all(dir / "several");
        run(dir / "several", layout);
        const auto [loss, norm] = distances(steps_of(dir / "several"), losses, norms);
        INFO(optimizer << " " << shape << " " << layout << ": loss " << loss << ", norm " << norm);
        REQUIRE(loss < 1e-5);
        REQUIRE(norm < 1e-3);
      }
    }
}

TEST_CASE("with SGD and Lion stages 0 to 3 of as many ranks agree bitwise, in fp32, with masters and without",
          "[train][optimizer]") {
  for (const std::string& optimizer : others)
    for (const char* numerics : {"--dtype fp32", "--dtype bf16", "--dtype bf16 --master-weights none"}) {
      const TempDir dir;
      std::string reference;
      for (const char* stage : {"0", "1", "2", "3"}) {
        INFO(optimizer << " " << numerics << ", stage " << stage);
        run_well(
            run_of(optimizer, dir / stage,
                   formatted("{} --max-steps 6 --local-ranks 2 --grad-reduce micro --zero-stage {}", numerics, stage)));
        const std::string weights = weights_in(dir / stage + "/step-000006");
        if (reference.empty()) reference = weights;
        REQUIRE(weights == reference);
      }
    }
}

TEST_CASE("runs of SGD and Lion resume bit for bit, and move between layouts", "[train][optimizer]") {
  for (const std::string& optimizer : others) {
    const TempDir dir;
    INFO(optimizer);
    const std::string constant = "--lr-schedule constant ", two = constant + "--local-ranks 2 --zero-stage 3 ";
    run_well(run_of(optimizer, dir / "whole", two));
    run_well(run_of(optimizer, dir / "cut", two + "--max-steps 9"));
    run_well(run_of(optimizer, dir / "cut", two));
    REQUIRE(weights_in(dir / "cut/step-000020") == weights_in(dir / "whole/step-000020"));
    run_well(run_of(optimizer, dir / "moved", two + "--max-steps 9"));
    run_well(run_of(optimizer, dir / "moved", constant + "--local-ranks 3 --pp 3 --max-steps 15"));
    run_well(run_of(optimizer, dir / "moved", constant + "--local-ranks 4 --batch-size 2 --zero-stage 1"));
    std::vector<double> losses, norms;
    for (const json& step : steps_of(dir / "whole")) losses.push_back(step["loss"]), norms.push_back(step["grad_norm"]);
    const auto [loss, norm] = distances(steps_of(dir / "moved"), losses, norms);
    INFO("loss " << loss << ", norm " << norm);
    REQUIRE(loss < 1e-5);
    REQUIRE(norm < 1e-4);

    const ProgramResult other = run_program(run_of(optimizer, dir / "whole", two + "--optimizer adamw --max-steps 30"));
    INFO(other.err);
    REQUIRE(other.status == 1);
    REQUIRE(other.err.find("--optimizer was '" + optimizer + "' and is now 'adamw'") != std::string::npos);
  }
}

TEST_CASE("a plan and a checkpoint have the slots of the optimizer, and no others", "[train][optimizer]") {
  for (const OptimizerRule& rule : optimizer_rules) {
    const TempDir dir;
    INFO(rule.name);
    const std::string run =
        formatted("--model {} --train-data {}/train.bin -b 4 -t 33 --max-steps 1 --optimizer {} -o {}", model, model,
                  rule.name, dir / "run");
    const ProgramResult plan = run_program(run + " --plan");
    REQUIRE(plan.status == 0);
    run_well(run);
    const std::string saved = read_whole(dir / "run/step-000001/optimizer-00001-of-00001.safetensors");
    for (const OptimizerRule& any : optimizer_rules)
      for (const OptimizerSlot& slot : any.slots) {
        INFO(slot.label);
        const bool own = any.name == rule.name;
        REQUIRE((plan.out.find(slot.label) != std::string::npos) == own);
        if (own) REQUIRE(saved.find(formatted("ln_f.weight:{}[", slot.name)) != std::string::npos);
      }
    REQUIRE((saved.find(":moment1[") != std::string::npos) == (std::string_view(rule.name) == "adamw"));
  }
}

TEST_CASE("options that an optimizer does not have are refused by name", "[train][optimizer]") {
  const TempDir dir;
  for (const auto& [options, culprit] : {std::pair{"--optimizer sgd --beta2 0.9", "--beta2 0.9 with --optimizer sgd"},
                                         {"--optimizer lion --adam-eps 1e-6", "--adam-eps 1e-06 with --optimizer lion"},
                                         {"--optimizer adam", "--optimizer"}}) {
    const ProgramResult r = run_program(
        formatted("--model {} --train-data {}/train.bin -b 4 -t 33 -o {} {}", model, model, dir / "run", options));
    INFO(options << "\n" << r.err);
    REQUIRE(r.status == 1);
    REQUIRE(r.err.find(culprit) != std::string::npos);
  }
}
