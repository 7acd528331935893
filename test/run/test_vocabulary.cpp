// The default vocabulary of a preset: the tokenizer's.
#include <nlohmann/json.hpp>

#include "catch2.h"
#include "core/files.h"
#include "helpers.h"
#include "run/options/option_files.h"
#include "tiny_run.h"

using namespace llmc;

namespace {

const std::string gpt2 = "test/golden/tokenizers/gpt2.json";
const int64_t tokens = make_tokenizer(gpt2)->size();

}  // namespace

TEST_CASE("a preset has the vocabulary of the tokenizer that is named, and says so", "[run]") {
  auto planned = [](const std::string& options) {
    const ProgramResult r = run_program("--plan -t 16 " + options);
    INFO(r.out << r.err);
    REQUIRE(r.status == 0);
    return r.out;
  };
  const std::string notice = formatted("notice: {} tokens, those of --tokenizer, instead of the 50,257 of d1", tokens);
  REQUIRE(planned("--model d1 --tokenizer " + gpt2).find(notice) != std::string::npos);
  REQUIRE(planned("--model d1 --tokenizer bytes").find("notice: 257 tokens") != std::string::npos);
  for (const std::string& same : {std::string("--model d1"), "--model d1 --vocab-size 1024 --tokenizer " + gpt2}) {
    const std::string plan = planned(same);
    REQUIRE(plan.find("notice:") == std::string::npos);
    REQUIRE(plan.find(same == "--model d1" ? "vocabulary 50257" : "vocabulary 1024") != std::string::npos);
  }

  auto taken = [](const std::string& model, const std::string& tokenizer) {
    Options o;
    o.model = model;
    o.tokenizer = tokenizer;
    take_vocabulary(o);
    return o.vocab_size;
  };
  REQUIRE(taken("llama3:8B", gpt2) == tokens);
  // Published vocabularies are padded: as many tokens as Qwen's tokenizer has, and GPT-2's.
  const TempDir dir;
  auto table = [&](uint32_t size) {
    std::string text(1024, '\0');
    const uint32_t header[4] = {20240328, 2, size, 0};
    std::memcpy(text.data(), header, sizeof header);
    for (uint32_t i = 0; i < size; ++i) text += std::string("\1x");
    std::ofstream(dir / "table.bin", std::ios::binary) << text;
    return dir / "table.bin";
  };
  REQUIRE_FALSE(taken("qwen2.5:0.5B", table(151665)));
  REQUIRE_FALSE(taken("d12", table(50257)));
  REQUIRE(taken("d12", table(50258)) == 50258);
}

TEST_CASE("a run has it from its start to its end; one that began with the preset's own keeps that", "[run]") {
  const TempDir dir;
  const std::string shape =
      "--model d1 --n-embd 12 --n-head 2 --seq-len 33 --batch-size 2 --threads 1 --train-data " + tiny_data;
  auto vocabulary = [&](const std::string& checkpoint) {
    return read_json(dir / (checkpoint + "/config.json"))["vocab_size"].get<int64_t>();
  };
  const std::string run = shape + " --out-dir " + (dir / "new") + " --tokenizer " + gpt2;
  run_well(run + " --max-steps 1");
  run_well(run + " --max-steps 2");
  REQUIRE(vocabulary("new/step-000002") == tokens);

  const std::string old = shape + " --out-dir " + (dir / "old");
  run_well(old + " --max-steps 1");
  run_well(old + " --max-steps 2 --tokenizer " + gpt2);
  REQUIRE(vocabulary("old/step-000002") == 50257);
  run_well(shape + " --max-steps 2 --out-dir " + (dir / "moved") + " --resume " + (dir / "old/step-000001") +
           " --tokenizer " + gpt2);
  REQUIRE(vocabulary("moved/step-000002") == 50257);
  run_well(shape + " --max-steps 2 --out-dir " + (dir / "branch") + " --branch-from " + (dir / "old/step-000001") +
           " --tokenizer " + gpt2);
  REQUIRE(vocabulary("branch/step-000002") == 50257);
}

TEST_CASE("a tokenizer that is not the data's, and llm.c's deep models, get a notice", "[run][plan]") {
  const TempDir dir;
  write_shard(dir / "bytes.bin", std::vector<uint16_t>(40, 'a'));
  const std::string run =
      "--n-layer 1 --n-embd 8 --n-head 1 --seq-len 8 --batch-size 1 --max-steps 1 --threads 1 "
      "--train-data " +
      (dir / "bytes.bin") + " --out-dir ";
  const ProgramResult unknown = run_program(run + (dir / "a") + " --vocab-size 300");
  REQUIRE(unknown.out.find("notice: no tokenizer is known for this vocabulary of 300") != std::string::npos);
  const ProgramResult bytes = run_program(run + (dir / "b") + " --vocab-size 257");
  REQUIRE(bytes.out.find("notice: the training data begin with token 97, not with the tokenizer's end of text, 256") !=
          std::string::npos);
  const ProgramResult generated =
      run_program("--generate --sample-tokens 1 --prompt a --model " + (dir / "a/step-000001"));
  REQUIRE(generated.status == 0);
  REQUIRE(generated.err.find("notice: no tokenizer is known for this vocabulary of 300") != std::string::npos);
  REQUIRE(run_program("--plan --model d24 -t 8 -b 1").out.find("llm.c's d24 is d24 --n-embd 1024 --n-head 16") !=
          std::string::npos);
}
