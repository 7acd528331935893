// --evaluate gives the numbers of training's own validation, for a model that is only read, in any layout.
#include <cmath>
#include <fstream>
#include <nlohmann/json.hpp>
#include <numbers>

#include "catch2.h"
#include "core/files.h"
#include "helpers.h"
#include "text/tokenizer.h"
#include "tiny_run.h"

using namespace llmc;
using nlohmann::json;

namespace {

// A model, its data, and what both modes need alike.
// threads: of a process
std::string common(const std::string& layout, int threads = 2) {
  return formatted(" --val-data {} --threads {} {}", tiny_data, threads, layout);
}

// Trains for two steps of 256 tokens; the last validation is then the checkpoint's.
void train(const std::string& out, const std::string& model, const std::string& more) {
  run_well(model + " --train-data " + tiny_data +
           " --seq-len 32 --total-batch-size 256 --max-steps 2 --lr 1e-2 --out-dir " + out + common(more));
}
json evaluated(const std::string& out, const std::string& more, const std::string& prefix = "", int threads = 2) {
  const ProgramResult r =
      run_program("--evaluate --json --model " + out + "/step-000002" + common(more, threads), prefix);
  INFO(r.out << r.err);
  REQUIRE(r.status == 0);
  return json::parse(r.out);  // one object, and nothing else
}

const std::string dense = "--model d2 --n-embd 24 --n-head 2 --vocab-size 211",
                  sparse = "--model d1-e4 --n-embd 16 --n-head 2 --n-kv-head 2 --vocab-size 211 --moe-bias-rate 0.1";

}  // namespace

TEST_CASE("an evaluation has bit for bit the numbers of the validation in training, in every layout",
          "[run][evaluate]") {
  const TempDir dir;
  std::ofstream(dir / "questions") << R"({"context":[1,2,3],"choices":[[4,5],[6]],"lengths":[3,2],"label":0})"
                                   << "\n";
  const std::string choices = " --eval-choices " + (dir / "questions");
  struct Case {
    std::string model, layout;
  };
  for (const Case& c : {Case{dense, "-b 2 --val-steps 3" + choices},
                        {dense, "-b 2 --local-ranks 4 --zero-stage 3"},
                        {dense, "-b 2 --local-ranks 4 --tp 2 --cp 2 --val-steps 3" + choices},
                        {dense, "-b 1 --local-ranks 4 --pp 2 --val-steps 3" + choices},
                        {sparse, "-b 2 --local-ranks 2 --ep 2 --dtype bf16 --val-steps 2"}}) {
    INFO(c.layout);
    const std::string out = dir / "run";
    std::filesystem::remove_all(out);
    train(out, c.model, c.layout.find("--val-steps") == std::string::npos ? c.layout + " --val-steps 1000" : c.layout);
    const std::vector<std::string> before = names_in(out);
    const json found = evaluated(out, c.layout);
    REQUIRE(found["loss"].get<double>() == validations(out).at(2));
    REQUIRE(found["perplexity"].get<double>() == std::exp(found["loss"].get<double>()));
    REQUIRE(found["step"] == 2);
    REQUIRE(found["seq_len"] == 32);  // of the training
    REQUIRE(found["targets"] == 32 * found["samples"].get<int64_t>());
    REQUIRE(found.contains("choices_acc") == (c.layout.find("choices") != std::string::npos));
    if (found.contains("choices_acc")) {
      REQUIRE(found["choices_acc"] == metric(out, "val", "choices_acc").at(2));
      REQUIRE(found["choices_acc_norm"] == metric(out, "val", "choices_acc_norm").at(2));
    }
    REQUIRE_FALSE(found.contains("bits_per_byte"));  // nothing says what these 211 tokens are
    REQUIRE(names_in(out) == before);
  }
  REQUIRE_FALSE(path_exists("out/run/run.json"));  // the default directory
}

TEST_CASE("a run that begins with a model, and a text of it, have the biases of its experts", "[run][evaluate]") {
  const TempDir dir;
  train(dir / "run", sparse, "-b 2 --val-steps 3");
  const std::string model = dir / "run/step-000002", trainer = model + "/trainer.json";
  train(dir / "next", "--model " + model + " --moe-bias-rate 0.1", "-b 2 --val-steps 3");
  REQUIRE(validations(dir / "next").at(0) == validations(dir / "run").at(2));
  json record = json::parse(read_whole(trainer));
  record["expert_biases"] = {1, 2};
  std::ofstream(trainer) << record;
  std::filesystem::remove(model + "/manifest.json");
  const ProgramResult r = run_program("--generate --model " + model + " --prompt a");
  REQUIRE(r.status == 1);
  REQUIRE(r.err.find("\"expert_biases\" has 2 numbers, expected 4") != std::string::npos);
}

TEST_CASE("an evaluation takes from the --config of a run what it uses alone", "[run][evaluate]") {
  const TempDir dir;
  train(dir / "run", dense, "-b 2");
  std::ofstream(dir / "run.ini") << "noise-scale=true\nverify-updates=10\nzero-stage=1\nproducts=\"fp8\"\n"
                                    "stages=\"none.toml\"\nval-steps=1\n";
  const std::string config = "-t 32 --config " + (dir / "run.ini");
  REQUIRE(evaluated(dir / "run", config)["loss"] == evaluated(dir / "run", "-t 32 --val-steps 1")["loss"]);
  const ProgramResult r =
      run_program("--evaluate --model " + (dir / "run/step-000002") + common(config + " --local-ranks 4 --tp 3"));
  REQUIRE(r.status == 1);
  REQUIRE(r.err.find("--tp 3 needs a multiple of 3 ranks") != std::string::npos);
}

TEST_CASE("two processes evaluate as two threads do, and process 0 alone says so", "[run][evaluate]") {
  const TempDir dir;
  train(dir / "run", dense, "-b 2");
  const std::string model = dir / "run/step-000002", arguments = common("-b 2 --zero-stage 3 --world-size 2", 1),
                    meet = " --rendezvous file:" + (dir / "meet");
  const json of_threads = evaluated(dir / "run", "-b 2 --zero-stage 3 --local-ranks 2"),
             of_processes = evaluated(dir / "run", "-b 2 --zero-stage 3 --world-size 2 --rank 0" + meet,
                                      "TRAIN_GPT_TOKEN=a-secret-of-this-test sh -c './train_gpt --evaluate --json "
                                      "--model " +
                                          model + arguments + meet + " --rank 1 >" + (dir / "other") +
                                          " 2>&1 &'; CUDA_VISIBLE_DEVICES= TRAIN_GPT_TOKEN=a-secret-of-this-test",
                                      1);
  REQUIRE(of_processes["loss"] == of_threads["loss"]);
  REQUIRE(read_whole(dir / "other").empty());
}

TEST_CASE("bits per byte: the loss of all targets over the bytes of their text; the end of text has none",
          "[run][evaluate]") {
  const TempDir dir;
  std::vector<uint16_t> tokens;
  for (int i = 0; i < 129; ++i) tokens.push_back(static_cast<uint16_t>(i % 8 == 0 ? 256 : 'a' + i % 7));
  write_shard<uint16_t>(dir / "t.bin", tokens);
  run_well("--model d1 --n-embd 16 --n-head 2 --vocab-size 257 -t 16 -b 2 -x 1 --threads 1 -i " + (dir / "t.bin") +
           " -o " + (dir / "run"));
  const std::string evaluate = "--evaluate --threads 1 --model " + (dir / "run/step-000001") + " -j " + (dir / "t.bin");
  const ProgramResult r = run_program(evaluate + " --json");
  INFO(r.err);
  REQUIRE(r.status == 0);
  const json found = json::parse(r.out);
  REQUIRE(found["samples"] == 8);  // all, without --val-steps
  REQUIRE(found["targets"] == 128);
  REQUIRE(found["bytes"] == 112);
  REQUIRE(found["bits_per_byte"].get<double>() ==
          Approx(found["loss"].get<double>() / std::numbers::ln2 * 128 / 112).epsilon(1e-12));
  const ProgramResult words = run_program(evaluate + " --mask-documents -t 8");
  INFO(words.out << words.err);
  REQUIRE(words.status == 0);
  REQUIRE(words.out.find("bits per byte") != std::string::npos);
  REQUIRE(words.out.find("had --mask-documents false and --seq-len 16") != std::string::npos);
}

TEST_CASE("bits per byte of targets without any bytes are not blamed on the tokenizer", "[run][evaluate]") {
  const TempDir dir;
  write_shard(dir / "t.bin", std::vector<uint16_t>(33, 256));
  run_well("--model d1 --n-embd 16 --n-head 2 --vocab-size 257 -t 16 -b 2 -x 1 --threads 1 -i " + (dir / "t.bin") +
           " -o " + (dir / "run"));
  const std::string out =
      said("--evaluate --threads 1 --model " + (dir / "run/step-000001") + " -j " + (dir / "t.bin"));
  REQUIRE(out.find(" n/a: the targets decode to no bytes\n") != std::string::npos);
}

TEST_CASE("bits per byte do not count the space that a tokenizer puts before a document", "[run][evaluate]") {
  const TempDir dir;
  const std::string file = "test/golden/tokenizers/llama2.json";
  const HuggingFaceTokenizer tokenizer(file);
  std::string text = "the";
  while (tokenizer.encode(text).size() < 7) text += " the";
  std::vector<uint16_t> tokens;
  for (int i = 0; i < 16; ++i) {
    tokens.push_back(static_cast<uint16_t>(tokenizer.end_of_text()));
    for (const int32_t id : tokenizer.encode(text)) tokens.push_back(static_cast<uint16_t>(id));
  }
  tokens.push_back(static_cast<uint16_t>(tokenizer.end_of_text()));
  REQUIRE(tokens.size() == 129);
  write_shard(dir / "t.bin", tokens);
  const std::string with = " --threads 1 --tokenizer " + file;
  run_well("--model d1 --n-embd 16 --n-head 2 --vocab-size 809 -t 16 -b 2 -x 1 -i " + (dir / "t.bin") + " -o " +
           (dir / "run") + with);
  const json found = json::parse(
      run_program("--evaluate --json --model " + (dir / "run/step-000001") + " -j " + (dir / "t.bin") + with).out);
  REQUIRE(found["bytes"] == 16 * text.size());
}

TEST_CASE("a validation of a part of the data has the order that the notice about --shuffle asks for",
          "[run][evaluate]") {
  const TempDir dir;
  train(dir / "run", dense, "-b 2 --val-steps 1 --no-shuffle");
  const std::string part = "-b 2 -t 32 --val-steps 1 ", out = dir / "run",
                    words = "--evaluate --model " + out + "/step-000002" + common(part);
  REQUIRE(said(words).find("had --shuffle false") != std::string::npos);
  REQUIRE(said(words + "--no-shuffle").find("had --") == std::string::npos);
  REQUIRE(evaluated(out, part)["loss"] != evaluated(out, part + "--no-shuffle")["loss"]);
  const std::string metrics = read_whole(out + "/metrics.jsonl");
  REQUIRE(metrics.find(evaluated(out, part + "--no-shuffle")["loss"].dump()) != std::string::npos);
}

TEST_CASE("what cannot be evaluated, or would be ignored, is refused by name", "[run][evaluate]") {
  const TempDir dir;
  train(dir / "run", dense, "-b 2");
  const std::string model = dir / "run/step-000002";
  auto refused = [&](const std::string& arguments, const std::string& words) {
    const ProgramResult r = run_program("--evaluate " + arguments);
    INFO(arguments << "\n" << r.err);
    REQUIRE(r.status == 1);
    REQUIRE(r.out.empty());
    REQUIRE(r.err.find(words) != std::string::npos);
  };
  refused("-j " + tiny_data, "needs a trained model: --model d12 is a preset");
  refused("--model elsewhere -j " + tiny_data, "needs a trained model: --model elsewhere is no directory");
  refused("--model " + model, "give --val-data, --eval-choices or both");
  refused("--model " + model + " -m 3 --eval-choices x", "--val-steps 3 is a part of --val-data");
  refused("--model " + model + " -j " + tiny_data + " --lr 1e-3 -x 3 -o x", "--max-steps, --out-dir and --lr");
  refused("--model " + model + " -j " + tiny_data + " --generate", "choose one of them");
  refused("--model " + model + " -j " + tiny_data + " --memory-limit 6e-4", "it would with --batch-size 2 (");

  write_changed_model(dir / "nan", model, [](const std::string& name, std::vector<float>& values) {
    if (name.ends_with("wte.weight")) std::fill(values.begin(), values.end(), 3e38f);  // sums of two overflow
  });
  const ProgramResult r = run_program("--evaluate --json -t 32 --model " + (dir / "nan") + " -j " + tiny_data);
  INFO(r.err);
  REQUIRE(r.status == 2);
  REQUIRE(json::parse(r.out)["loss"].is_null());
  REQUIRE(r.err.find("is not finite") != std::string::npos);
}
