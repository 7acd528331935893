// Optimizer state in few bits in layouts: masters in halves are fp32 masters; moments in bf16 and 8 bits have the same
// bits in every layout at equal degree, and after a resume; memory as planned.
#include <string>
#include <tuple>

#include "catch2.h"
#include "helpers.h"
#include "parallel/on_ranks.h"
#include "run/selftest/selftest.h"

using namespace llmc;
using selftest::Model, selftest::Outcome;

namespace {

StepConfig with_moments(StepConfig step, std::optional<DType> first, std::optional<DType> second) {
  step.precision.moment1 = first;
  step.precision.moment2 = second;
  return step;
}
StepConfig split(StepConfig step) {
  step.precision.split_masters = true;
  return step;
}
ZeroConfig zero_of(int stage, int shards, int replicas = 1) {
  return {.stage = stage, .grad_reduce = GradReduce::step, .shards = shards, .replicas = replicas};
}
void require_same(const Outcome& found, const Outcome& expected) {
  REQUIRE(found.fault == "");
  REQUIRE(found.same_bits(expected));
  REQUIRE(found.optimizer_state == expected.optimizer_state);
}

}  // namespace

TEST_CASE("masters in halves are fp32 masters, bit for bit", "[parallel][optimizer]") {
  for (const int stage : {0, 1, 3}) {
    StepConfig step = selftest::step_config(selftest::awkward_model("qwen3", false), DType::bf16, 1, zero_of(stage, 2));
    for (const Optimizer optimizer : {Optimizer::adamw, Optimizer::lion}) {
      step.layout.zero.optimizer = optimizer;
      INFO("stage " << stage << ", " << name_of(optimizer));
      const Outcome wide = selftest::run_layout(step);
      REQUIRE(wide.fault == "");
      require_same(selftest::run_layout(split(step)), wide);
    }
  }
}

TEST_CASE("moments in few bits have the same bits in every stage of ZeRO and of a pipeline", "[parallel][optimizer]") {
  for (const auto& [first, second] : {std::pair{DType::bf16, DType::bf16}, {DType::e4m3, DType::e5m3}}) {
    const auto of = [&, one = first, two = second](DType dtype, const Layout& layout) {
      return with_moments(selftest::step_config(selftest::awkward_model("llama", false), dtype, 1, layout), one, two);
    };
    INFO(name_of(first));
    for (const DType dtype : {DType::fp32, DType::bf16}) {
      const Outcome alone = selftest::run_layout(of(dtype, Layout{zero_of(0, 2)}));
      REQUIRE(alone.fault == "");
      REQUIRE_FALSE(alone.same_bits(
          selftest::run_layout(with_moments(of(dtype, Layout{zero_of(0, 2)}), std::nullopt, std::nullopt))));
      for (const int stage : {1, 3}) require_same(selftest::run_layout(of(dtype, Layout{zero_of(stage, 2)})), alone);
      Layout pipeline{zero_of(1, 2)};
      pipeline.pipeline = {Schedule::one_f_one_b, 3, 1};
      require_same(selftest::run_layout(of(dtype, pipeline)), alone);
    }
  }
}

TEST_CASE("copies of weights stay equal with moments in few bits, or the layout is refused", "[parallel][optimizer]") {
  const auto of = [](const char* family, DType first, DType second) {
    const Model model{family, false, DType::bf16, 8, 2};
    StepConfig step = selftest::step_config(model.config(), model.dtype, 2, zero_of(1, 2));
    step.layout.tensor = tensor_parallel(step.model, 4);  // two ranks have copies of each key-value head
    step.precision.masters = false;
    return with_moments(step, first, second);
  };
  REQUIRE(selftest::run_layout(of("llama", DType::e4m3, DType::e5m3)).fault == "");
  REQUIRE(selftest::run_layout(of("qwen2", DType::bf16, DType::bf16)).fault == "");
  // Biases of q, k and v follow each other, 8, 4 and 4 elements of a rank.
  REQUIRE_THROWS_WITH(make_plan(of("qwen2", DType::e4m3, DType::e5m3), {DeviceKind::cpu, 1}),
                      Catch::Matchers::ContainsSubstring("shares blocks of 64 elements with other parameters"));
}

TEST_CASE("plans count state in few bits", "[plan][optimizer]") {
  const StepConfig step = selftest::step_config(selftest::awkward_model("gpt2"), DType::bf16, 1, zero_of(1, 2));
  const auto bytes = [](const StepConfig& s, const char* label) {
    return planned_bytes(make_plan(s, {DeviceKind::cpu, 1}, 0, Passes::step), label);
  };
  const StepConfig small = split(with_moments(step, DType::bf16, DType::e5m3));
  const auto expected = [&](int64_t of_element, int64_t of_block) {  // a shard of each unit, by allocations
    int64_t sum = 0;
    for (const UnitSpec& unit : parameter_table(step.model)) {
      const int64_t n = UnitLayout(unit, 2).size / 2;
      sum += round_up(n * of_element, Arena::alignment) + round_up(n / state_block * of_block, Arena::alignment);
    }
    return sum;
  };
  REQUIRE(bytes(small, "AdamW first moment") == expected(2, 0));
  REQUIRE(bytes(small, "AdamW second moment") == expected(1, 4));
  REQUIRE(bytes(small, "master weights") == expected(2, 0));
  REQUIRE(bytes(step, "master weights") == expected(4, 0));
}

TEST_CASE("a resumed run with moments in few bits is the run that never stopped; other types are noticed",
          "[run][optimizer]") {
  const TempDir dir;
  const std::string model =
      "--model d2 --n-embd 64 --n-head 1 --vocab-size 257 -t 32 -b 2 --dtype bf16 --master-weights split --threads 1 "
      "--sample-every 0 --val-every 0 --lr-schedule constant -i test/golden/gpt2_tiny/train.bin -o ";
  const auto metrics = [&](const std::string& out) {
    std::string losses;
    std::istringstream lines(read_whole(dir / (out + "/metrics.jsonl")));
    for (std::string line; std::getline(lines, line);) {
      const nlohmann::json row = nlohmann::json::parse(line);
      if (row.contains("loss"))
        losses += row["loss"].dump() + " " + row.value("grad_norm", nlohmann::json()).dump() + "\n";
    }
    return losses;
  };
  const auto types = [](const std::string& first, const std::string& second) {
    return " --moment1-dtype " + first + " --moment2-dtype " + second;
  };
  // Of both moments, and what the second run has besides.
  const std::tuple<std::string, std::string, std::string> runs[] = {
      {"8bit", "8bit", ""},
      {"bf16", "bf16", " --local-ranks 2 --zero-stage 1"},
      {"bf16", "8bit", " --offload moments --offload-dir " + dir.path()},
  };
  for (const auto& [first, second, besides] : runs) {
    const std::string small = types(first, second), whole = "whole-" + first + second,
                      parts = "parts-" + first + second;
    const ProgramResult all = run_program(model + (dir / whole) + small + besides + " --max-steps 6"),
                        begun = run_program(model + (dir / parts) + small + besides + " --max-steps 3");
    INFO(all.err << begun.err);
    REQUIRE(all.status == 0);
    REQUIRE(begun.status == 0);
    const ProgramResult resumed = run_program(model + (dir / parts) + small + besides + " --max-steps 6");
    INFO(resumed.err);
    REQUIRE(resumed.status == 0);
    REQUIRE(metrics(parts) == metrics(whole));
    // The checkpoint resumes with other types.
    const std::string ranks = besides.find("ranks") != std::string::npos ? besides : "";
    const ProgramResult wide =
        run_program(model + (dir / parts) + types("fp32", "fp32") + ranks + " --max-steps 8 --master-weights fp32");
    INFO(wide.out << wide.err);
    REQUIRE(wide.status == 0);
    for (const std::string& notice : {"--moment1-dtype was '" + first + "' and is now 'fp32'",
                                      "--moment2-dtype was '" + second + "' and is now 'fp32'",
                                      std::string("--master-weights was 'split' and is now 'fp32'")})
      REQUIRE((wide.out + wide.err).find(notice) != std::string::npos);
    const ProgramResult back = run_program(model + (dir / parts) + small + ranks + " --max-steps 9");
    INFO(back.out << back.err);
    REQUIRE(back.status == 0);
  }
}

TEST_CASE("state in few bits is refused where it makes no sense", "[options][optimizer]") {
  for (const auto& [options, message] :
       {std::pair{"--master-weights split",
                  "--master-weights split with --dtype fp32: the weights are their own masters"},
        {"--dtype bf16 --master-weights split --ema 0.9", "--ema 0.9 with --master-weights split, but"},
        {"--optimizer muon --moment1-dtype bf16", "--optimizer muon keeps its momentum and masters in fp32"},
        {"--optimizer lion --moment2-dtype 8bit",
         "--moment2-dtype 8bit with --optimizer lion, which has no second moment"},
        {"--dtype bf16 --master-weights split --pp 2 --local-ranks 2 --schedule pipedream --grad-clip 0",
         "--master-weights split with --schedule pipedream"},
        {"--reduce-dtype bf16 --local-ranks 2 --dp-sync parameter-server", "--reduce-dtype bf16 with --dp-sync"}}) {
    const ProgramResult r = run_program(std::string("--plan --model d2 ") + options);
    INFO(options << ": " << r.err);
    REQUIRE(r.status == 1);
    REQUIRE(r.err.find(message) != std::string::npos);
  }
}
