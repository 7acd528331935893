// Runs of models with experts: what they learn and record, resumption, the options --moe-*, validation, generation.
#include <nlohmann/json.hpp>

#include "catch2.h"
#include "run/checkpoints/run_dir.h"
#include "run/selftest/selftest.h"
#include "tiny_run.h"

using namespace llmc;
using nlohmann::json;
namespace fs = std::filesystem;

namespace {

std::string folder_of(const std::string& name) { return "test/golden/experts/" + name; }

std::string sparse(const std::string& out, const std::string& more) {
  return "--model d2-e4 --n-embd 32 --vocab-size 211 --train-data " + tiny_data +
         " --seq-len 33 --batch-size 2 --total-batch-size 264 --lr 1e-2 --lr-schedule constant --threads 1 --out-dir " +
         out + " " + more;
}

// The smallest margin of a chosen expert over one that was not chosen.
selftest::Margin margin_of(const selftest::Route& route) {
  selftest::Margin nearest;
  for (const int64_t chosen : route.experts)
    for (int64_t e = 0; e < std::ssize(route.scores); ++e)
      if (const selftest::Margin m = selftest::margin_of(route, chosen, e);
          !std::ranges::binary_search(route.experts, e) && m.by < nearest.by)
        nearest = m;
  return nearest;
}

// The nearest choice of all, compared with rounding.
struct NearestTie {
  selftest::RoutedToken token;
  selftest::Margin margin;
};
NearestTie nearest_tie(const selftest::Routes& routes) {
  NearestTie nearest{};
  for (const auto& [token, route] : routes)
    if (const selftest::Margin m = margin_of(route); m.by * nearest.margin.rounding <= nearest.margin.by * m.rounding)
      nearest = {token, m};
  return nearest;
}

}  // namespace

TEST_CASE("a model with experts learns, and resumes exactly, or in another layout up to rounding", "[run][ep]") {
  const TempDir dir;
  const std::string balance = " --moe-aux-loss 0.02 --moe-z-loss 0.001";
  run_well(sparse(dir / "whole", "--max-steps 12" + balance));
  run_well(sparse(dir / "cut", "--max-steps 5" + balance));
  fs::copy(dir / "cut", dir / "moved", fs::copy_options::recursive);
  run_well(sparse(dir / "cut", "--max-steps 12" + balance));
  run_well(sparse(dir / "moved", "--max-steps 12 --local-ranks 2 --zero-stage 3" + balance));
  const auto whole = losses(dir / "whole"), moved = losses(dir / "moved");
  REQUIRE(whole.size() == 12);
  REQUIRE(whole.at(12) < whole.at(1) - 0.2);
  REQUIRE(state_of(dir / "cut/step-000012") == state_of(dir / "whole/step-000012"));
  REQUIRE(losses(dir / "cut") == whole);
  for (const auto& [step, loss] : whole) REQUIRE(std::abs(moved.at(step) / loss - 1) < 1e-4);
  const ProgramResult other = run_program(sparse(dir / "cut", "--max-steps 13 --moe-aux-loss 0.03 --moe-z-loss 0.001"));
  REQUIRE(other.status == 1);
  REQUIRE(other.err.find("--moe-aux-loss was '0.02' and is now '0.03'") != std::string::npos);
}

TEST_CASE("a resumed run may name the default of --moe-capacity-factor, or leave it out", "[run][ep]") {
  const TempDir dir;
  const std::string capacity = " --moe-dispatch capacity";
  run_well(sparse(dir / "run", "--max-steps 1" + capacity));
  run_well(sparse(dir / "run", "--max-steps 2 --moe-capacity-factor 1.25" + capacity));
  run_well(sparse(dir / "run", "--max-steps 3" + capacity));
  const ProgramResult other = run_program(sparse(dir / "run", "--max-steps 4 --moe-capacity-factor 2" + capacity));
  REQUIRE(other.status == 1);
  REQUIRE(other.err.find("--moe-capacity-factor was '1.25' and is now '2'") != std::string::npos);
}

// golden: made by make_experts.py
TEST_CASE("what --moe-* ask for, and what metrics.jsonl says of it, is that of a reference in PyTorch", "[run][ep]") {
  const TempDir dir;
  for (const char* name : {"mixtral_tiny", "qwen2_moe_tiny"})
    for (const char* kind : {"losses", "capacity", "biases"}) {
      INFO(name << " " << kind);
      const json golden = json::parse(read_whole(folder_of(name) + "/" + kind + ".json"));
      const std::string out = dir / formatted("{}-{}", name, kind);
      std::string options = "--model " + folder_of(name) + " --train-data " + folder_of(name) +
                            "/train.bin --no-shuffle --tokenizer bytes --threads 1 --out-dir " + out;
      for (const auto& [option, value] : golden["options"].items())
        options += formatted(" --{} {}", option, value.is_string() ? value.get<std::string>() : value.dump());
      run_well(options);
      for (const char* field : {"loss", "grad_norm", "moe_balance_loss", "moe_z_loss", "router_entropy", "dropped",
                                "expert_largest", "expert_smallest"}) {
        INFO(field);
        const auto ours = metric(out, "train", field);
        REQUIRE(ours.size() == golden[field].size());
        for (const auto& [step, value] : ours) {
          const double theirs = golden[field][static_cast<size_t>(step) - 1];
          REQUIRE(std::abs(value - theirs) <= 1e-4 * std::abs(theirs) + 1e-7);
        }
      }
    }
}

TEST_CASE("validation, multiple choice and generation drop nothing, whatever the capacity in training", "[run][ep]") {
  const TempDir dir;
  write_choices(dir / "questions.jsonl");
  const std::string more =
      "--max-steps 2 --lr 0 --sample-every 2 --sample-tokens 4 --temperature 0 --tokenizer bytes "
      "--val-data " +
      tiny_data + " --val-steps 1 --eval-choices " + (dir / "questions.jsonl");
  run_well(sparse(dir / "dropless", more));
  run_well(sparse(dir / "capacity", more + " --moe-dispatch capacity --moe-capacity-factor 0.5"));
  REQUIRE(metric(dir / "dropless", "train", "dropped").at(1) == 0);
  REQUIRE(metric(dir / "capacity", "train", "dropped").at(1) > 0.3);
  REQUIRE(losses(dir / "capacity").at(1) != losses(dir / "dropless").at(1));
  for (const char* number : {"loss", "choices_acc"})
    REQUIRE(metric(dir / "capacity", "val", number) == metric(dir / "dropless", "val", number));
  for (const char* run : {"dropless", "capacity"}) {
    const std::string rows = read_whole(dir / formatted("{}/log.txt", run));
    INFO(rows);
    REQUIRE(rows.find(run == std::string("capacity") ? "MFU dropped" : "MFU experts") != std::string::npos);
  }
  const ProgramResult made = run_program("--generate --temperature 0 --sample-tokens 4 --tokenizer bytes --model " +
                                         (dir / "capacity/step-000002"));
  INFO(made.err);
  REQUIRE(made.status == 0);
}

TEST_CASE("what --moe-* cannot do is refused by name", "[run][ep]") {
  const TempDir dir;
  auto refused = [&](const std::string& options, const std::string& part) {
    const ProgramResult r = run_program(options);
    INFO(options << "\n" << r.err);
    REQUIRE(r.status == 1);
    REQUIRE(r.err.find(part) != std::string::npos);
    REQUIRE_FALSE(fs::exists(dir / "run"));
  };
  auto with_experts = [&](const std::string& options, const std::string& part) {
    refused(sparse(dir / "run", "--max-steps 1 " + options), part);
  };
  for (const char* option : {"--moe-aux-loss 0.001", "--moe-z-loss 0.001", "--moe-bias-rate 0.001", "--moe-imbalance 2",
                             "--moe-dispatch capacity"})
    refused(tiny(dir / "run", std::string("--max-steps 1 ") + option),
            std::string(option) + " is for models with experts, and --model d1 has none");
  run_well(tiny(dir / "dense", "--max-steps 1 --moe-aux-loss 0 --moe-z-loss 0"));
  with_experts("--moe-aux-loss -1", "--moe-aux-loss -1: expected a number");
  with_experts("--moe-imbalance 0.5", "--moe-imbalance 0.5: expected a number");
  with_experts("--moe-imbalance 3 --ep 2 --local-ranks 2",
               "--moe-imbalance 3 with --ep 2: a rank gets at most 2 times");
  with_experts("--moe-dispatch drop", "expected one of");
  with_experts("--moe-capacity-factor 2", "--moe-capacity-factor 2 with --moe-dispatch dropless");
  with_experts("--moe-dispatch capacity --token-slices 2", "--token-slices 2 with --moe-dispatch capacity");
  with_experts("--moe-aux-loss 0.01 --token-slices auto", "--token-slices auto with --moe-aux-loss 0.01");
  with_experts("--local-ranks 2 --tp 2 --sequence-parallel off", "--sequence-parallel off with --tp 2");
  with_experts("--local-ranks 2 --dp-sync parameter-server", "--dp-sync parameter-server with 4 experts per layer");
  with_experts("--local-ranks 2 --pp 2 --schedule pipedream --total-batch-size 66",
               "4 experts per layer with --schedule pipedream");
  with_experts("--moe-expert-capacity-factor 2", "is --moe-capacity-factor here");
  with_experts("--num-experts 8", "is --model here");
}

TEST_CASE("the balancing loss that transformers would add is that of config.json, k times as large", "[run][ep]") {
  const TempDir dir;
  json config = json::parse(read_whole(folder_of("mixtral_tiny") + "/config.json"));
  const int64_t k = config["num_experts_per_tok"];
  config["router_aux_loss_coef"] = 0.25;
  for (const bool adds : {false, true}) {
    config["output_router_logits"] = adds;
    fs::create_directories(dir / "model");
    std::ofstream(dir / "model/config.json") << config.dump();
    auto plan = [&](const std::string& more) {
      const ProgramResult r = run_program("--plan --seq-len 15 --model " + (dir / "model") + more);
      INFO(r.err);
      REQUIRE(r.status == 0);
      return r.out;
    };
    const std::string asked = plan(""), given = plan(" --moe-aux-loss 0.5");
    INFO(asked);
    REQUIRE((asked.find(formatted("balancing loss x {}", 0.25 * static_cast<double>(k))) != std::string::npos) == adds);
    REQUIRE(given.find("balancing loss x 0.5") != std::string::npos);
  }
}

TEST_CASE("a non-finite number that comes from experts is found there", "[run][ep]") {
  const TempDir dir;
  run_well(sparse(dir / "made", "--max-steps 1"));
  // Every expert of the second layer overflows.
  write_changed_model(dir / "broken", dir / "made/step-000001",
                      [](const std::string& name, std::vector<float>& values) {
                        if (name.find("layers.1.") == name.npos) return;
                        if (name.ends_with(".w2.weight")) std::ranges::fill(values, 3e38f);
                        if (name.ends_with(".w3.weight"))
                          for (float& value : values) value *= 1e6f;
                      });
  const ProgramResult bad =
      run_program("--model " + (dir / "broken") + " --train-data " + tiny_data +
                  " --seq-len 33 --batch-size 2 --max-steps 1 --threads 1 --out-dir " + (dir / "run"));
  INFO(bad.err);
  REQUIRE(bad.status == 2);
  REQUIRE(bad.err.find("written by combine_rows in the forward of blocks.1.experts, micro-batch 0") !=
          std::string::npos);
}

TEST_CASE("no router of the self-test's models with experts is near a tie", "[run][ep]") {
  int compared = 0;
  for (const selftest::Model& model : selftest::all_models()) {
    if (model.config().experts.count == 0) continue;
    ++compared;
    const bool bf16 = model.dtype == DType::bf16;
    const StepConfig step = selftest::step_config(model.config(), model.dtype, 1, Layout{});
    selftest::Routes routes;
    run_layout(step, {}, {.init = bf16 ? selftest::init_routes_by_token : selftest::init_drawn}, 2, &routes);
    REQUIRE(std::ssize(routes) == 2 * 2 * step.tokens());  // of two layers, in two steps
    const auto [token, margin] = nearest_tie(routes);
    INFO(name_of(model.dtype) << ", " << to_string(token) << ": " << margin.by << ", rounding " << margin.rounding);
    REQUIRE(margin.by > 4 * margin.rounding);
    REQUIRE(margin.rounding > (bf16 ? 1e-3 : 1e-9));
  }
  REQUIRE(compared == 2);
}
