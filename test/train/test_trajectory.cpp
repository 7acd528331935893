// End-to-end runs of the program: twenty steps against PyTorch (golden/gpt2_tiny), contracts 1 and 4, and every bad
// input refused by name.
#include <nlohmann/json.hpp>

#include "catch2.h"
#include "core/safetensors.h"
#include "helpers.h"

using namespace llmc;
using nlohmann::json;

namespace {

const std::string model = "test/golden/gpt2_tiny";

// The options of the golden trajectory; those given in `more` win.
std::string golden_options(const std::string& out_dir, const std::string& more = "") {
  return "--model " + model + " --train-data " + model +
         "/train.bin --batch-size 4 --seq-len 33 --total-batch-size 264 --max-steps 20 " +
         "--lr 1e-3 --warmup-steps 5 --lr-schedule cosine --final-lr-frac 0.1 --weight-decay 0.1 --grad-clip 1 "
         "--no-shuffle --threads 2 " +
         more + " --out-dir " + out_dir;
}

std::vector<json> metrics(const std::string& out_dir, const std::string& kind) {
  std::vector<json> lines;
  std::ifstream in(out_dir + "/metrics.jsonl");
  for (std::string line; std::getline(in, line);)
    if (json object = json::parse(line); object["kind"] == kind) lines.push_back(object);
  return lines;
}

std::vector<double> losses(const std::string& out_dir) {
  std::vector<double> all;
  for (const json& line : metrics(out_dir, "train")) all.push_back(line["loss"]);
  return all;
}

void run_well(const std::string& arguments) {
  const ProgramResult r = run_program(arguments);
  INFO(r.err);
  REQUIRE(r.status == 0);
}

}  // namespace

TEST_CASE("twenty steps follow PyTorch's AdamW in loss, norm, learning rate and every weight", "[train][pytorch]") {
  const json golden = json::parse(read_whole(model + "/trajectory.json"));
  for (const std::string more : {"", "--batch-size 8"}) {  // two micro-batches and one
    const TempDir dir;
    const std::string out = dir / "run";
    run_well(golden_options(out, more));
    const auto lines = metrics(out, "train");
    REQUIRE(lines.size() == 20);
    for (size_t i = 0; i < 20; ++i) {
      INFO("step " << i + 1 << " " << more);
      auto near = [&](const char* name, double tolerance) {
        return std::abs(lines[i][name].get<double>() / golden[name][i].get<double>() - 1) < tolerance;
      };
      REQUIRE(lines[i]["step"] == i + 1);
      REQUIRE(near("loss", 1e-5));
      REQUIRE(near("grad_norm", 1e-4));
      REQUIRE(near("lr", 1e-12));
    }
    const SafetensorsReader ours(out + "/step-000020/model.safetensors"), theirs(model + "/final.safetensors");
    REQUIRE(ours.names() == theirs.names());
    for (const std::string& name : theirs.names()) {
      std::vector<float> a(static_cast<size_t>(ours.info(name).numel())), b(a.size());
      REQUIRE(ours.info(name).shape == theirs.info(name).shape);
      ours.read(name, a.data());
      theirs.read(name, b.data());
      if (name.ends_with("c_attn.bias")) {  // the true gradient of the key bias is zero: Adam turns rounding errors
                                            // into full steps
        const size_t third = a.size() / 3;
        a.erase(a.begin() + static_cast<int64_t>(third), a.begin() + static_cast<int64_t>(2 * third));
        b.erase(b.begin() + static_cast<int64_t>(third), b.begin() + static_cast<int64_t>(2 * third));
      }
      INFO(name);
      REQUIRE(relative_distance(a.data(), b.data(), static_cast<int64_t>(a.size())) < 1e-4);
    }
  }
}

TEST_CASE("two runs of the program agree bitwise, and so do gpipe and 1f1b", "[train][pytorch]") {
  const TempDir dir;
  run_well(golden_options(dir / "a"));
  run_well(golden_options(dir / "b"));
  run_well(golden_options(dir / "c", "--schedule gpipe"));
  REQUIRE(losses(dir / "a") == losses(dir / "b"));
  REQUIRE(losses(dir / "a") == losses(dir / "c"));
  const std::string weights = read_whole(dir / "a/step-000020/model.safetensors");
  REQUIRE(weights == read_whole(dir / "b/step-000020/model.safetensors"));
  REQUIRE(weights == read_whole(dir / "c/step-000020/model.safetensors"));
}

TEST_CASE("twenty steps in bf16 follow PyTorch's bf16 as closely as two of its own runs agree, and every tensor moves",
          "[train][pytorch]") {
  // Contract 5: within twice the distance between two runs that differ only in micro-batch size, or 1e-3 and 2^-8.
  const json golden = json::parse(read_whole(model + "/trajectory_bf16.json"));
  const json &four = golden["micro-batches of 4"], &eight = golden["micro-batches of 8"];
  const SafetensorsReader theirs(model + "/final_bf16_4.safetensors"), others(model + "/final_bf16_8.safetensors"),
      start(model + "/model.safetensors");
  const TempDir dir;
  run_well(golden_options(dir / "run", "--dtype bf16"));
  const auto lines = metrics(dir / "run", "train");
  for (const char* name : {"loss", "grad_norm"})
    for (size_t i = 0; i < 20; ++i) {
      INFO(name << " at step " << i + 1);
      const double a = four[name][i], b = eight[name][i], ours = lines[i][name];
      const double rounding = std::string(name) == "loss" ? 1e-3 : 0x1p-8;
      REQUIRE(std::abs(ours - a) < std::max(2 * std::abs(a - b), rounding * a));
    }
  const SafetensorsReader ours(dir / "run/step-000020/model.safetensors");
  REQUIRE(ours.names() == theirs.names());
  for (const std::string& name : ours.names()) {
    auto values = [&](const SafetensorsReader& file) {
      const int64_t n = file.info(name).numel();
      std::vector<float> wide(static_cast<size_t>(n));
      if (file.info(name).dtype == DType::fp32) {
        file.read(name, wide.data());
        return wide;
      }
      std::vector<bf16> narrow(static_cast<size_t>(n));
      file.read(name, narrow.data());
      std::transform(narrow.begin(), narrow.end(), wide.begin(), [](bf16 x) { return float(x); });
      return wide;
    };
    std::vector<float> a = values(ours), b = values(theirs), c = values(others), before = values(start);
    const int64_t n = static_cast<int64_t>(a.size());
    INFO(name);
    REQUIRE(ours.info(name).dtype == DType::bf16);
    for (float& x : before) x = float(bf16(x));
    REQUIRE(a != before);
    REQUIRE(relative_distance(a.data(), b.data(), n) < std::max(2 * relative_distance(b.data(), c.data(), n), 0x1p-8));
  }
}

TEST_CASE("--overfit-batch drives the loss down", "[train][pytorch]") {
  const TempDir dir;
  run_well(
      golden_options(dir / "run", "--overfit-batch --max-steps 60 --lr 1e-2 --from-scratch --total-batch-size 132"));
  const auto l = losses(dir / "run");
  REQUIRE(l.front() > 5);
  REQUIRE(l.back() < 0.5);
}

TEST_CASE("validation, checkpoints, sampling and continuing from a checkpoint work together", "[train][pytorch]") {
  const TempDir dir;
  const std::string val = " --val-data " + model + "/train.bin --val-every 10 --val-steps 2 ";
  run_well(golden_options(dir / "a", val + "--checkpoint-every 8"));
  REQUIRE(std::filesystem::exists(dir / "a/step-000008/model.safetensors"));
  REQUIRE(std::filesystem::exists(dir / "a/step-000016/model.safetensors"));
  const auto first = metrics(dir / "a", "val");
  REQUIRE(first.size() == 3);  // at 0, 10 and 20
  REQUIRE(first[2]["loss"] < first[0]["loss"]);
  run_well(golden_options(dir / "b", val + "--max-steps 1 --warmup-steps 0 --model " + (dir / "a/step-000020")));
  REQUIRE(metrics(dir / "b", "val")[0]["loss"] == first[2]["loss"]);  // starts from exactly those weights

  const ProgramResult once =
      run_program("--generate --model " + (dir / "a/step-000020") + " --prompt '!' --sample-tokens 50 --seed 1");
  const ProgramResult again =
      run_program("--generate --model " + (dir / "a/step-000020") + " --prompt '!' --sample-tokens 50 --seed 1");
  REQUIRE(once.status == 0);
  REQUIRE(once.out.size() > 40);
  REQUIRE(once.out == again.out);
}

TEST_CASE("restarting a finished run reports that it is complete and changes nothing", "[train][pytorch]") {
  const TempDir dir;
  run_well(golden_options(dir / "run"));
  const std::string before = read_whole(dir / "run/metrics.jsonl");
  const ProgramResult again = run_program(golden_options(dir / "run"));
  REQUIRE(again.status == 0);
  REQUIRE(again.out.find("already complete") != std::string::npos);
  REQUIRE(read_whole(dir / "run/metrics.jsonl") == before);
}

TEST_CASE("bad input is refused with exit status 1, names the culprit, and leaves nothing behind", "[train][pytorch]") {
  const TempDir dir;
  std::ofstream(dir / "text.bin") << "this is no token shard";
  write_shard<uint16_t>(dir / "short.bin", {1, 2, 3});
  std::vector<uint16_t> large(400, 5);
  large[200] = 300;
  write_shard(dir / "large.bin", large);
  std::filesystem::create_directories(dir / "empty");
  std::filesystem::create_directories(dir / "other");
  std::filesystem::create_directories(dir / "huge");
  std::ofstream(dir / "huge/config.json") << R"({"model_type": "gpt2", "n_embd": 1000000000000})";
  std::filesystem::create_directories(dir / "yarn");
  std::ofstream(dir / "yarn/config.json")
      << R"({"model_type": "llama", "rope_scaling": {"rope_type": "yarn", "factor": 4}})";
  std::filesystem::create_directories(dir / "window");
  std::ofstream(dir / "window/config.json") << R"({"model_type": "qwen2", "use_sliding_window": true})";
  std::ofstream(dir / "other/config.json") << R"({"model_type": "mamba"})";
  std::filesystem::create_directories(dir / "relu");
  std::ofstream(dir / "relu/config.json") << R"({"model_type": "gpt2", "activation_function": "relu"})";
  std::filesystem::create_directories(dir / "garbage");
  std::ofstream(dir / "garbage/config.json") << "{";
  std::filesystem::create_directories(dir / "cut");
  std::filesystem::copy(model + "/config.json", dir / "cut/config.json");
  std::ofstream(dir / "cut/model.safetensors") << read_whole(model + "/model.safetensors").substr(0, 100000);

  const std::pair<std::string, std::string> cases[] = {
      {"--train-data /nowhere/x_*.bin", "/nowhere/x_*.bin"},
      {"--train-data " + (dir / "text.bin"), "text.bin"},
      {"--train-data " + (dir / "short.bin"), "--seq-len"},
      {"--train-data " + (dir / "large.bin") + " --overfit-batch --total-batch-size 264 --batch-size 8",
       "token 300 at position"},
      {"--val-data /nowhere/y.bin", "--val-data"},
      {"--no-such-option 3", "--no-such-option"},
      {"--bach-size 3", "--batch-size"},
      {"--lr nan", "--lr"},
      {"--lr fast", "--lr"},
      {"--lr -1", "--lr"},
      {"--batch-size 0", "--batch-size"},
      {"--lr-schedule sawtooth", "sawtooth"},
      {"--dtype fp8", "--dtype"},
      {"--device cuda", "--device"},
      {"--seq-len 49 --total-batch-size 196", "48 positions"},
      {"--total-batch-size 265", "--total-batch-size 265"},
      {"--warmup-steps 21", "--warmup-steps 21"},
      {"--n-head 5", "--n-head 5"},
      {"--vocab-size 100", "wte.weight"},
      {"--tokenizer words", "--tokenizer"},
      {"--model gpt5:1T", "gpt5:1T"},
      {"--model " + (dir / "empty"), "config.json"},
      {"--model " + (dir / "other"), "mamba"},
      {"--model " + (dir / "relu"), "relu"},
      {"--model " + (dir / "yarn"), "yarn"},
      {"--model " + (dir / "window"), "use_sliding_window"},
      {"--n-kv-head 1", "--n-kv-head 1"},
      {"--model " + (dir / "garbage"), "not JSON"},
      {"--model " + (dir / "cut"), "truncated"},
      {"--config /nowhere/file.ini", "/nowhere/file.ini"},
      {"stray", "stray"},
      {"--prompt \"$(printf 'a\\377')\"", "--prompt: byte 2 is not UTF-8"},
      {"--model " + (dir / "huge"), "n_embd"},
      {"--generate --model d2", "with --generate, which computes on one rank"},
      {"--plan --world-size 16777216 --local-ranks 256",
       "16777216 processes with --local-ranks 256: 4294967296 ranks, expected at most"},
  };
  for (const auto& [options, culprit] : cases) {
    const ProgramResult r = run_program(golden_options(dir / "out", options));
    INFO(options << "\n" << r.err);
    REQUIRE(r.status == 1);
    REQUIRE(r.err.find(culprit) != std::string::npos);
    REQUIRE(read_whole(dir / "out/metrics.jsonl").empty());  // so the directory is free for the next attempt
    REQUIRE_FALSE(std::filesystem::exists(dir / "out/step-000020"));
    std::filesystem::remove_all(dir / "out");
  }
}

TEST_CASE("an out directory with unrelated contents is refused and left unchanged", "[train][pytorch]") {
  const TempDir dir;
  std::filesystem::create_directories(dir / "mine");
  std::ofstream(dir / "mine/thesis.txt") << "years of work";
  const ProgramResult r = run_program(golden_options(dir / "mine"));
  REQUIRE(r.status == 1);
  REQUIRE(r.err.find("mine") != std::string::npos);
  REQUIRE(read_whole(dir / "mine/thesis.txt") == "years of work");
  REQUIRE(std::distance(std::filesystem::directory_iterator(dir / "mine"), {}) == 1);
  const ProgramResult file = run_program(golden_options(dir / "mine/thesis.txt"));
  REQUIRE(file.status == 1);
}

TEST_CASE("divergence ends the run with exit status 2", "[train][pytorch]") {
  const TempDir dir;
  const ProgramResult r = run_program(golden_options(
      dir / "run", "--lr 100 --grad-clip 0 --warmup-steps 0 --max-steps 200 --overfit-batch --weight-decay 100"));
  INFO(r.err);
  REQUIRE(r.status == 2);
  REQUIRE(r.err.find("not finite") != std::string::npos);
}
