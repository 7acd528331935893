// Runs of the program with context parallelism: resumed exactly in the same layout, and in others up to rounding;
// weights that do not depend on the layout; validation, multiple choice and samples as on one rank.
#include <filesystem>
#include <fstream>
#include <map>
#include <nlohmann/json.hpp>

#include "catch2.h"
#include "helpers.h"
#include "run/checkpoints/checkpoint.h"

using namespace llmc;
using nlohmann::json;

namespace {

// Llama with 4 query heads on 2 key-value heads, 24 sequences of 12 tokens, and two questions of other lengths.
struct Setting {
  TempDir dir;
  Setting() {
    std::vector<uint16_t> tokens;
    const Philox rng(3, "context runs");
    for (uint64_t i = 0; i < 24 * 12 + 1; ++i)
      tokens.push_back(i % 7 == 3 ? 256 : static_cast<uint16_t>(rng.bits(i) % 256));
    write_shard<uint16_t>(dir / "data.bin", tokens);
    std::ofstream(dir / "questions.jsonl")
        << R"({"context": [1, 2], "choices": [[3], [4, 5], [6]], "lengths": [1, 2, 1], "label": 1})"
        << "\n"
        << R"({"context": [7], "choices": [[3], [9, 2, 5, 1]], "lengths": [4, 2], "label": 0})"
        << "\n";
  }
  // Returns what the program printed.
  std::string run(const std::string& name, const std::string& more) const {
    const ProgramResult r = run_program(
        "--model llama3:1B --n-layer 2 --n-head 4 --n-kv-head 2 --n-embd 16 --n-ffn 24 --vocab-size 257 --seq-len 12 "
        "--total-batch-size 96 --lr 1e-2 --lr-schedule constant --threads 2 --train-data " +
        (dir / "data.bin") + " --out-dir " + (dir / name) + " " + more);
    INFO(more << "\n" << r.err);
    REQUIRE(r.status == 0);
    return r.out;
  }
  // The lines of metrics.jsonl about losses.
  std::vector<json> metrics(const std::string& name) const {
    std::vector<json> lines;
    std::ifstream in(dir / (name + "/metrics.jsonl"));
    for (std::string line; std::getline(in, line);)
      if (json object = json::parse(line); object["kind"] != "checkpoint") lines.push_back(object);
    return lines;
  }
  std::vector<double> losses(const std::string& name) const {
    std::vector<double> all;
    for (const json& line : metrics(name)) all.push_back(line["loss"].get<double>());
    return all;
  }
  std::string checkpoint(const std::string& name, int64_t step) const {
    return dir / formatted("{}/step-{:06}", name, step);
  }
};

// The .safetensors files of a checkpoint.
std::map<std::string, std::string> files_of(const std::string& path) {
  std::map<std::string, std::string> files;
  for (const auto& entry : std::filesystem::directory_iterator(path))
    if (entry.path().extension() == ".safetensors") files[entry.path().filename()] = read_whole(entry.path());
  return files;
}
// The weights, by name, in however many files they are.
std::map<std::string, std::string> weights_of(const std::string& path) {
  std::map<std::string, std::string> all;
  for (const auto& file : open_all(model_files(path)))
    for (const std::string& name : file->names()) {
      std::string& bytes = all[name];
      bytes.resize(static_cast<size_t>(file->info(name).bytes()));
      file->read(name, bytes.data());
    }
  return all;
}

void require_near(const std::vector<double>& a, const std::vector<double>& b, double bound) {
  REQUIRE(a.size() == b.size());
  for (size_t i = 0; i < a.size(); ++i) REQUIRE(std::abs(a[i] / b[i] - 1) < bound);
}

}  // namespace

TEST_CASE("a run with context parallelism that was stopped goes on in the same layout bit for bit",
          "[run][cp][checkpoint]") {
  const Setting s;
  for (const char* layout : {"--cp 2 --local-ranks 2 --batch-size 2",
                             "--cp 3 --local-ranks 6 --zero-stage 1 "
                             "--batch-size 2 --cp-attention all-gather",
                             "--cp 2 --tp 2 --local-ranks 8 --zero-stage 3 --batch-size 2 --cp-attention ulysses"}) {
    const std::string name = formatted("run {}", layout), cut = name + " cut", quoted = "'" + name + "' ";
    auto run = [&](const std::string& out, int steps) {
      s.run("'" + out + "'", formatted("{} --max-steps {} --checkpoint-every 3", layout, steps));
    };
    run(name, 6);
    run(cut, 3);
    run(cut, 6);
    INFO(layout);
    REQUIRE(s.losses(name).size() == 6);
    REQUIRE(s.losses(cut) == s.losses(name));
    for (const int64_t step : {3, 6}) {
      REQUIRE(!files_of(s.checkpoint(name, step)).empty());
      REQUIRE(files_of(s.checkpoint(cut, step)) == files_of(s.checkpoint(name, step)));
    }
  }
}

TEST_CASE("a run moves between numbers of context-parallel ranks: the same run up to rounding, with a notice",
          "[run][cp][checkpoint]") {
  const Setting s;
  s.run("stayed", "--batch-size 8 --max-steps 15");
  s.run("moved", "--batch-size 4 --local-ranks 2 --cp 2 --max-steps 3");
  REQUIRE(s.run("moved",
                "--batch-size 4 --local-ranks 8 --cp 2 --tp 2 --zero-stage 3 --cp-attention ulysses "
                "--max-steps 6")
              .find("notice: --cp-attention was 'ring' and is now 'ulysses'") != std::string::npos);
  REQUIRE(s.run("moved", "--batch-size 4 --local-ranks 6 --cp 3 --zero-stage 2 --cp-attention all-gather --max-steps 9")
              .find("notice: --cp was '2' and is now '3'") != std::string::npos);
  REQUIRE(json::parse(read_whole(s.checkpoint("moved", 9) + "/trainer.json"))["layout"].get<std::string>().find(
              "3 context-parallel") != std::string::npos);
  s.run("moved", "--batch-size 1 --local-ranks 4 --tp 2 --zero-stage 1 --max-steps 12");
  s.run("moved", "--batch-size 8 --max-steps 15");
  require_near(s.losses("moved"), s.losses("stayed"), 1e-4);
}

TEST_CASE("weights that did not change are the same bits whatever the number of context-parallel ranks",
          "[run][cp][checkpoint]") {
  const Setting s;
  const std::string still = "--lr 0 --max-steps 1 --dtype bf16 --batch-size 2 ";
  s.run("two", still + "--cp 2 --local-ranks 4 --zero-stage 3");
  const std::string two = s.checkpoint("two", 1);
  s.run("one", still + "--model " + two);
  s.run("four", still + "--cp 2 --tp 2 --local-ranks 4 --model " + s.checkpoint("one", 1));
  REQUIRE(weights_of(two).size() > 10);
  for (const char* name : {"one", "four"}) REQUIRE(weights_of(s.checkpoint(name, 1)) == weights_of(two));
}

TEST_CASE("validation, multiple choice and samples are with context parallelism what they are on one rank",
          "[run][cp][checkpoint]") {
  const Setting s;
  const std::string evaluated = formatted(
      "--max-steps 3 --val-data {} --val-every 2 --val-steps 2 --eval-choices {} --sample-every 3 --sample-tokens 16 "
      "--temperature 0 --mask-documents ",
      s.dir / "data.bin", s.dir / "questions.jsonl");
  auto sample_of = [&](const std::string& printed) {
    std::string text;
    std::stringstream in(printed);
    for (std::string line; std::getline(in, line);)
      if (line.find("sample at step") != line.npos) text += line + "\n";
    return text;
  };
  const std::string one = sample_of(s.run("one", evaluated + "--batch-size 4"));
  REQUIRE(one != "");
  for (const char* layout : {"--cp 2 --local-ranks 2 --batch-size 4",
                             "--cp 3 --local-ranks 6 --batch-size 4 --zero-stage 3 "
                             "--cp-attention all-gather",
                             "--cp 2 --tp 2 --local-ranks 4 --batch-size 4 --cp-attention ulysses"}) {
    INFO(layout);
    const std::string name = formatted("run {}", layout);
    REQUIRE(sample_of(s.run("'" + name + "'", evaluated + layout)) == one);
    require_near(s.losses(name), s.losses("one"), 1e-5);
    const std::vector<json> lines = s.metrics(name), expected = s.metrics("one");
    int validations = 0;
    for (size_t i = 0; i < lines.size(); ++i) {
      if (lines[i]["kind"] != "val") continue;
      ++validations;
      for (const char* field : {"choices_acc", "choices_acc_norm"})
        REQUIRE(lines[i].at(field) == expected[i].at(field));
    }
    REQUIRE(validations == 3);
  }
}
