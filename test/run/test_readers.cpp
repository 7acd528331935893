// Paths that are not regular files, and values in a checkpoint that no run would write: rejected at once, by name.
#include <sys/stat.h>

#include <nlohmann/json.hpp>

#include "catch2.h"
#include "helpers.h"
#include "tiny_run.h"

using namespace llmc;
using nlohmann::json;
namespace fs = std::filesystem;

TEST_CASE("a pipe or a link to itself instead of a file is refused by name, whatever the option", "[run]") {
  const TempDir dir;
  for (const char* name : {"pipe", "loop"}) {
    const bool pipe = name == std::string("pipe");
    auto make = [&](const std::string& path) {
      if (pipe) REQUIRE(mkfifo(path.c_str(), 0600) == 0);
      else fs::create_symlink(fs::path(path).filename(), path);
    };
    const std::string here = dir / name;
    for (const char* made : {"", "/model", "/weights", "/choices"}) fs::create_directory(here + made);
    for (const char* file : {"/data.bin", "/options.ini", "/tokens.json", "/tokens.bin", "/model/config.json",
                             "/weights/model.safetensors", "/questions.jsonl"})
      make(here + file);
    fs::copy("test/golden/gpt2_tiny/config.json", here + "/weights");
    const std::pair<std::string, std::string> cases[] = {
        {"--train-data " + here + "/data.bin", "/data.bin"},
        {"--val-data " + here + "/data.bin", "/data.bin"},
        {"--config " + here + "/options.ini", "/options.ini"},
        {"--tokenizer " + here + "/tokens.json", "/tokens.json"},
        {"--tokenizer " + here + "/tokens.bin", "/tokens.bin"},
        {"--model " + here + "/model", "/model/config.json"},
        {"--model " + here + "/weights --n-embd 48 --n-head 4 --vocab-size 257", "/weights/model.safetensors"},
        {"--val-data " + tiny_data + " --eval-choices " + here + "/questions.jsonl", "/questions.jsonl"},
        {"--verify-data --train-data " + here + "/data.bin", "/data.bin"}};
    for (const auto& [options, file] : cases) {
      const bool trains = options.find("--verify-data") == std::string::npos;
      const ProgramResult r =
          run_program(trains ? tiny(dir / "out", "--max-steps 1 " + options) : options, "timeout -s KILL 30");
      INFO(options << "\n" << r.err);
      REQUIRE(r.status == 1);
      REQUIRE(r.err.find(here + file) != std::string::npos);
      REQUIRE(r.err.find(pipe ? "it is a pipe, expected a file" : "Too many levels of symbolic links") !=
              std::string::npos);
      REQUIRE(r.err.find("internal") == std::string::npos);
      REQUIRE_FALSE(fs::exists(dir / "out/run.json"));
    }
  }
}

TEST_CASE("a value in trainer.json that no run would write is refused with the file and the field", "[run]") {
  const TempDir dir;
  run_well(tiny(dir / "run", "--max-steps 3"));
  const std::string checkpoint = dir / "run/step-000003";
  const json trainer = read_json(checkpoint + "/trainer.json"), manifest = read_json(checkpoint + "/manifest.json");
  auto refused = [&](const char* pointer, const json& value, const std::string& message) {
    json changed = trainer, sealed = manifest;
    changed[json::json_pointer(pointer)] = value;
    sealed["files"]["trainer.json"] = write_recorded_text(checkpoint + "/trainer.json", changed.dump()).to_json();
    std::ofstream(checkpoint + "/manifest.json") << sealed;
    const ProgramResult r = run_program(tiny(dir / "run", "--max-steps 6"));
    INFO(pointer << ": " << r.err);
    REQUIRE(r.status == 1);
    REQUIRE(r.err.find("step-000003/trainer.json: " + message) != std::string::npos);
    REQUIRE(r.err.size() < 600);
  };
  refused("/detectors/loss", json(129, 2.5), "\"loss\" of \"detectors\" is [2.5,");
  refused("/detectors/grad_norm", {1, "x"},
          "\"grad_norm\" of \"detectors\" is [1,\"x\"], expected at most 128 numbers");
  refused("/detectors", nullptr, "\"loss\" of \"detectors\" is null");
  refused("/best_validation", {{"step", 1.5}, {"loss", 2}}, "\"best_validation\" is {\"loss\":2,\"step\":1.5}");
  refused("/choices/grad_reduce", "sideways", "\"grad_reduce\" of \"choices\" is \"sideways\", expected \"step\" or");
  refused("/step", std::string(100'000, 'x'), "\"step\" is \"xxx");
}
