// bos_token_id and eos_token_id of config.json: they come from the run's tokenizer, so that generate() of transformers
// stops.
#include <fstream>
#include <nlohmann/json.hpp>

#include "catch2.h"
#include "core/checksum.h"
#include "helpers.h"
#include "run/setup.h"
#include "tiny_run.h"

using namespace llmc;
using nlohmann::json;

namespace {

// What a checkpoint's config.json says with these options of a model in this directory, or a preset.
json config_of(const Options& o) {
  ModelConfig model = choose_model(o);
  model.special_tokens = choose_special_tokens(o, *choose_tokenizer(o, model), model);
  const json written = config_to_hf(model, DType::fp32);
  const json again = config_to_hf(config_from_hf(written, "test"), DType::fp32);  // as our own reader takes it
  for (const char* name : special_tokens) REQUIRE(again.value(name, json("none")) == written.value(name, json("none")));
  return written;
}
void require_tokens(const Options& o, const std::optional<json>& bos, const std::optional<json>& eos) {
  const json config = config_of(o);
  INFO(o.model << " " << o.tokenizer << " " << config);
  for (const auto& [name, expected] : {std::pair{"bos_token_id", bos}, {"eos_token_id", eos}}) {
    REQUIRE(config.contains(name) == expected.has_value());
    if (expected) REQUIRE(config[name] == *expected);
  }
}

Options preset(const std::string& model, const std::string& tokenizer, int64_t vocab_size) {
  Options o;
  o.model = model;
  o.tokenizer = tokenizer;
  o.vocab_size = vocab_size;
  return o;
}

const std::string gpt2 = "test/golden/tokenizers/gpt2.json", llama3 = "test/golden/tokenizers/llama3.json";

}  // namespace

TEST_CASE("a new model's texts begin and end with the tokens of its tokenizer", "[run]") {
  const int end = make_tokenizer(gpt2)->end_of_text();
  for (const char* model : {"d2", "llama2:7B", "d2-e4"}) {
    require_tokens(preset(model, "auto", 257), 256, 256);
    require_tokens(preset(model, "bytes", 300), 256, 256);
    require_tokens(preset(model, gpt2, 1024), end, end);
    require_tokens(preset(model, llama3, 1024), 658, 659);  // of its template, and <|end_of_text|>
    require_tokens(preset(model, "auto", 50257), 50256, 50256);
    // Whose tokens nobody knows: transformers would take 50256, or 1 and 2.
    require_tokens(preset(model, "auto", 1024), nullptr, nullptr);
    require_tokens(preset(model, gpt2, 300), nullptr, nullptr);  // it has no end of text
  }
  require_tokens(preset("llama2:7B", "auto", 32000), {}, {});  // what transformers takes is right
  require_tokens(preset("d2", "auto", 50304), {}, {});

  const TempDir dir;
  std::string table(1024, '\0');
  const uint32_t header[4] = {20240328, 2, 211, 3};
  std::memcpy(table.data(), header, sizeof header);
  for (int i = 0; i < 211; ++i) table += std::string("\1") + static_cast<char>('a' + i % 26);
  std::ofstream(dir / "table.bin", std::ios::binary) << table;
  require_tokens(preset("d2", dir / "table.bin", 211), 3, 3);
}

TEST_CASE("a directory keeps its own, unless they are no tokens or another tokenizer ends texts otherwise", "[run]") {
  const TempDir dir;
  json config = config_of(preset("qwen3:0.6B", "auto", 1024));
  Options o;
  o.model = dir.path();
  auto write = [&](const json& bos, const json& eos) {
    config["bos_token_id"] = bos;
    config["eos_token_id"] = eos;
    std::ofstream(dir / "config.json") << config.dump();
  };
  const int end = make_tokenizer(gpt2)->end_of_text();
  write(7, {8, 9});
  require_tokens(o, 7, json{8, 9});
  std::filesystem::copy(gpt2, dir / "tokenizer.json");
  require_tokens(o, 7, json{8, 9});  // as of a chat model, whose turns end otherwise than its texts
  o.tokenizer = gpt2;
  require_tokens(o, end, end);
  write(7, {8, end});
  require_tokens(o, 7, json{8, end});
  o.tokenizer = "auto";
  write(50256, 50256);  // outside the vocabulary of 1,024
  require_tokens(o, end, end);
  write(nullptr, nullptr);
  require_tokens(o, end, end);
}

TEST_CASE("a run whose checkpoints have other special tokens, as those of earlier versions, resumes", "[run]") {
  const TempDir dir;
  run_well(tiny(dir / "run", "--max-steps 1"));
  const std::string checkpoint = dir / "run/step-000001";
  json config = read_json(checkpoint + "/config.json"), manifest = read_json(checkpoint + "/manifest.json");
  REQUIRE(config["eos_token_id"].is_null());
  config["eos_token_id"] = config["bos_token_id"] = 50256;
  const std::string text = config.dump();
  std::ofstream(checkpoint + "/config.json") << text;
  manifest["files"]["config.json"] = FileRecord{std::ssize(text), {checksum(text)}}.to_json();
  std::ofstream(checkpoint + "/manifest.json") << manifest.dump();
  run_well(tiny(dir / "run", "--max-steps 2"));
  REQUIRE(losses(dir / "run").size() == 2);
  REQUIRE(read_json(dir / "run/step-000002/config.json")["eos_token_id"].is_null());
}
