// Tokenizers of tokenizer.json: ids and text beside Hugging Face's library, Unicode, patterns, refusals by name.
#include "catch2.h"
#include "helpers.h"
#include "train/tokenizer.h"

using namespace llmc;

namespace {

using Json = nlohmann::json;
const std::string golden = "test/golden/tokenizers/";

Json read_golden(const std::string& file) { return Json::parse(read_whole(golden + file)); }

std::string text_of(const Bpe& bpe, const std::vector<int32_t>& ids) {
  std::string text;
  for (int32_t id : ids) text += bpe.text_of(id);
  return text;
}

// A tokenizer.json of GPT-2's form with `patch`, and what is beside it.
std::string write_tokenizer(const TempDir& dir, const Json& patch) {
  Json json = read_golden("gpt2.json");
  json.merge_patch(patch);
  std::ofstream(dir / "tokenizer.json") << json.dump();
  return dir / "tokenizer.json";
}

std::vector<std::string> pieces(const std::string& pattern, const std::string& text) {
  std::vector<std::string> all;
  SplitPattern(pattern, "test").split(text, [&](std::string_view piece) { all.emplace_back(piece); });
  return all;
}

}  // namespace

// TOKENIZER_CASES names another file of cases: test/tokenizer_test.sh compares random texts by it.
TEST_CASE("texts have the tokens of Hugging Face's library, and come back from them", "[tokenizer-cases]") {
  const char* other = std::getenv("TOKENIZER_CASES");
  const Json cases = Json::parse(read_whole(other ? other : golden + "cases.json"));
  const std::vector<std::string> texts = cases.at("texts");
  for (const Json& tokenizer : cases.at("tokenizers")) {
    Json json = read_golden(tokenizer.at("file"));
    for (const auto& [name, value] : tokenizer.at("patch").items()) json[name] = value;
    const Bpe bpe(json, "test");
    for (size_t i = 0; i < texts.size(); ++i) {
      const std::vector<int32_t> theirs = tokenizer.at("ids")[i], ours = bpe.encode(texts[i]);
      INFO(tokenizer.at("name") << ": text " << i << ", " << Json(texts[i]).dump(-1, ' ', true));
      REQUIRE(ours == theirs);
      const Json& decoded = tokenizer.at("decoded")[i];
      REQUIRE(text_of(bpe, ours) == (decoded.is_null() ? texts[i] : decoded.get<std::string>()));
    }
    REQUIRE(bpe.encode(texts[0], Template::apply) == tokenizer.at("templated").get<std::vector<int32_t>>());
  }
}
