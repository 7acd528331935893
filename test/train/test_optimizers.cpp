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
const std::vector<std::string> others = {"sgd", "lion",
                                         "muon"};  // test_trajectory.cpp and all other tests are about AdamW

json golden_of(const std::string& optimizer) {
  const json all = json::parse(read_whole(model + "/trajectory_optimizers.json"));
  return all.value(optimizer, json{{"peak", 1e-3}});
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

TEST_CASE("SGD with momentum, Lion and Muon follow PyTorch for twenty steps, on one rank and on several",
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

TEST_CASE("SGD, Lion and Muon with tensor, context, pipeline and expert parallelism are the run of one rank",
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

TEST_CASE("with SGD, Lion and Muon stages 0 to 3 of as many ranks agree bitwise, in fp32, with masters and without",
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

TEST_CASE("runs of SGD, Lion and Muon resume bit for bit, and move between layouts", "[train][optimizer]") {
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

    const std::string new_optimizer = optimizer == "muon" ? "lion" : "adamw";
    const ProgramResult other =
        run_program(run_of(optimizer, dir / "whole", two + "--optimizer " + new_optimizer + " --max-steps 30"));
    INFO(other.err);
    REQUIRE(other.status == 1);
    REQUIRE(other.err.find("--optimizer was '" + optimizer + "' and is now '" + new_optimizer + "'") !=
            std::string::npos);
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
        const bool rest = rule.of_matrices && any.name == optimizer_rules[0].name, own = any.name == rule.name || rest;
        REQUIRE((plan.out.find(slot.label) != std::string::npos) == own);
        for (const bool matrix : {false, true})  // with Muon the rest is AdamW's
          if (own && (!rule.of_matrices || matrix != rest))
            REQUIRE(saved.find(formatted("{}:{}[", matrix ? "blocks.0.attn.q.weight" : "ln_f.weight", slot.name)) !=
                    std::string::npos);
      }
    REQUIRE((saved.find("q.weight:moment1[") != std::string::npos) == (std::string_view(rule.name) == "adamw"));
  }
}

TEST_CASE("options that an optimizer does not have are refused by name", "[train][optimizer]") {
  const TempDir dir;
  for (const auto& [options, culprit] :
       {std::pair{"--optimizer sgd --beta2 0.9", "--beta2 0.9 with --optimizer sgd"},
        {"--optimizer lion --adam-eps 1e-6", "--adam-eps 1e-06 with --optimizer lion"},
        {"--optimizer adam", "--optimizer"},
        {"--muon-ns polar-express", "--muon-ns with --optimizer adamw"},
        {"--muon-rows normalised", "--muon-rows with --optimizer adamw"},
        {"--optimizer lion --cautious-decay", "--cautious-decay with --optimizer lion"},
        {"--optimizer muon --head-lr 1", "--head-lr 1 with --model"},
        {"--lr 0 --embed-lr 1", "--embed-lr 1 with --lr 0"},
        {"--model qwen3:0.6B --qk-clip 100",
         "--qk-clip 100 with --model qwen3:0.6B, whose queries and keys are "
         "normalised"},
        {"--local-ranks 3 --pp 3 --schedule pipedream --qk-clip 100", "--qk-clip 100 with --schedule pipedream"},
        {"--qk-clip 0", "--qk-clip"}}) {
    const ProgramResult r = run_program(
        formatted("--model {} --train-data {}/train.bin -b 4 -t 33 -o {} {}", model, model, dir / "run", options));
    INFO(options << "\n" << r.err);
    REQUIRE(r.status == 1);
    REQUIRE(r.err.find(culprit) != std::string::npos);
  }
}

TEST_CASE("with Muon stages, schedules and recomputation give the same bits", "[train][muon]") {
  std::vector<double> reference;
  for (const char* layout :
       {"", "--recompute block", "--recompute norm", "--local-ranks 3 --pp 3",
        "--local-ranks 3 --pp 3 --schedule zb-h1", "--local-ranks 3 --pp 3 --schedule gpipe --recompute activation"}) {
    const TempDir dir;
    INFO(layout);
    run_well(
        run_of("muon", dir / "run",
               formatted("--model llama2:7B --n-layer 3 --n-head 3 --n-kv-head 3 --n-embd 36 --n-ffn 64 --vocab-size "
                         "211 --dtype bf16 --warmup-steps 1 --max-steps 6 {}",
                         layout)));
    std::vector<double> numbers;
    for (const json& s : steps_of(dir / "run")) numbers.push_back(s["loss"]), numbers.push_back(s["grad_norm"]);
    if (reference.empty()) reference = numbers;
    REQUIRE(numbers.size() == 12);
    REQUIRE(numbers == reference);
  }
}

TEST_CASE("Muon's options change what they say, and no layout changes it", "[train][muon]") {
  std::set<double> losses;
  for (const char* options :
       {"", "--muon-ns polar-express", "--muon-scale spectral", "--muon-heads apart", "--muon-products bf16",
        "--muon-momentum 0.8", "--cautious-decay", "--embed-lr 1e-4", "--scalar-lr 1e-4"}) {
    INFO(options);
    double of_one = 0;
    for (const char* layout : {"", "--local-ranks 4 --tp 2 --zero-stage 2"}) {
      const TempDir dir;
      run_well(
          run_of("muon", dir / "run",
                 formatted("--model d2 --n-embd 24 --n-head 2 --vocab-size 211 --seq-len 32 --total-batch-size 256 "
                           "--warmup-steps 1 --max-steps 4 {} {}",
                           options, layout)));
      const double loss = steps_of(dir / "run").back()["loss"];
      if (of_one == 0) of_one = loss;
      REQUIRE(std::abs(loss / of_one - 1) < (std::string_view(options).ends_with("bf16") ? 1e-3 : 1e-5));
    }
    losses.insert(of_one);
  }
  REQUIRE(losses.size() == 9);
}

TEST_CASE("a run of AdamW goes on with Muon, and back, with a notice; the state of matrices begins at zero",
          "[train][muon]") {
  const TempDir dir;
  const std::string constant = "--lr-schedule constant --warmup-steps 1 ";
  run_well(run_of("adamw", dir / "run", constant + "--lr 1e-3 --local-ranks 2 --zero-stage 2 --max-steps 4"));
  for (const auto& [optimizer, steps, layout] : {std::tuple{"muon", 8, "--muon-scale spectral --muon-rows normalised"},
                                                 {"adamw", 12, "--local-ranks 2 --zero-stage 1"}}) {
    const ProgramResult r =
        run_program(run_of(optimizer, dir / "run", constant + formatted("--lr 1e-3 --max-steps {} {}", steps, layout)));
    INFO(r.out << r.err);
    REQUIRE(r.status == 0);
    REQUIRE(r.out.find(formatted("and is now '{}': the state of matrices begins at zero", optimizer)) !=
            std::string::npos);
    const std::vector<json> all = steps_of(dir / "run");
    REQUIRE(std::ssize(all) == steps);
    for (const json& s : all) REQUIRE(s["loss"] < 5.5);
  }
}

TEST_CASE("with --qk-clip stages agree bitwise, with masters and without, runs resume bit for bit, and metrics say it",
          "[train][muon]") {
  const TempDir dir;
  run_well(run_of("muon", dir / "any", "--qk-clip 1e9 --warmup-steps 1 --max-steps 1"));
  const json any = steps_of(dir / "any").back();
  REQUIRE(any["clipped_heads"] == 0);
  const double limit = any["largest_logit"].get<double>() / 2;
  REQUIRE(limit > 0);
  const std::string clip =
      formatted("--lr-schedule constant --warmup-steps 1 --local-ranks 2 --grad-reduce micro --qk-clip {} ", limit);
  for (const char* numerics : {"--dtype bf16", "--dtype bf16 --master-weights none"}) {
    std::string reference;
    for (const char* stage : {"0", "1", "3"}) {
      INFO(numerics << ", stage " << stage);
      const std::string out = dir / stage, options = clip + formatted("{} --zero-stage {} ", numerics, stage);
      std::filesystem::remove_all(out);
      if (stage[0] == '3') run_well(run_of("muon", out, options + "--max-steps 3"));  // and resume
      run_well(run_of("muon", out, options + "--max-steps 6"));
      REQUIRE(steps_of(out)[0]["clipped_heads"] > 0);
      const std::string weights = weights_in(out + "/step-000006");
      if (reference.empty()) reference = weights;
      REQUIRE(weights == reference);
    }
  }
}

TEST_CASE("NorMuon's row moments are the same at every stage, and are resumed bit for bit at another one",
          "[train][muon]") {
  const TempDir dir;
  const std::string two =
      "--muon-rows normalised --lr-schedule constant --warmup-steps 1 --local-ranks 2 --grad-reduce micro ";
  run_well(run_of("muon", dir / "whole", two + "--zero-stage 3 --max-steps 6"));
  run_well(run_of("muon", dir / "moved", two + "--zero-stage 2 --max-steps 3"));
  REQUIRE(read_whole(dir / "moved/step-000003/optimizer-00001-of-00002.safetensors")
              .find("blocks.0.attn.q.weight:row_moment[0:") != std::string::npos);
  for (const char* steps : {"4", "6"})
    run_well(run_of("muon", dir / "moved", two + "--zero-stage 0 --max-steps " + steps));
  REQUIRE(weights_in(dir / "moved/step-000006") == weights_in(dir / "whole/step-000006"));
  run_well(run_of("muon", dir / "plain", "--lr-schedule constant --warmup-steps 1 --local-ranks 2 --max-steps 6"));
  REQUIRE(steps_of(dir / "plain").back()["loss"] != steps_of(dir / "whole").back()["loss"]);
}
