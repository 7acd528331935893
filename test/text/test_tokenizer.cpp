// Tokenizers from tokenizer.json: ids and text compared with Hugging Face's library, Unicode, refusals.
#include <limits>
#include <map>
#include <random>

#include "catch2.h"
#include "helpers.h"
#include "text/tokenizer.h"

using namespace llmc;

namespace {

using Json = nlohmann::json;
const std::string golden = "test/golden/tokenizers/";

Json read_golden(const std::string& file) { return Json::parse(read_whole(golden + file)); }

// The tokenizer.json of a case of cases.json.
Json form_of(const Json& tokenizer) {
  Json json = read_golden(tokenizer.at("file"));
  for (const auto& [name, value] : tokenizer.at("patch").items()) json[name] = value;
  return json;
}
Json added_token(int64_t id, const std::string& content, bool normalised, bool special = false) {
  return {{"id", id}, {"content", content}, {"normalized", normalised}, {"special", special}};
}

std::string text_of(const Bpe& bpe, const std::vector<int32_t>& ids) {
  std::string text;
  for (int32_t id : ids) text += bpe.text_of(id);
  return bpe.strips_first_space() && text.starts_with(' ') ? text.substr(1) : text;
}

// A tokenizer.json like GPT-2's with `patch` applied, and the files next to it.
std::string write_tokenizer(const TempDir& dir, const Json& patch) {
  Json json = read_golden("gpt2.json");
  json.merge_patch(patch);
  std::ofstream(dir / "tokenizer.json") << json.dump();
  return dir / "tokenizer.json";
}

}  // namespace

// TOKENIZER_CASES names another file of cases: test/scripts/tokenizer_test.sh compares random texts with it.
TEST_CASE("texts have the tokens of Hugging Face's library, and round-trip", "[text][tokenizer-cases]") {
  const char* other = std::getenv("TOKENIZER_CASES");
  const Json cases = Json::parse(read_whole(other ? other : golden + "cases.json"));
  const std::vector<std::string> texts = cases.at("texts");
  for (const Json& tokenizer : cases.at("tokenizers")) {
    const Bpe bpe(form_of(tokenizer), "test");
    for (size_t i = 0; i < texts.size(); ++i) {
      const std::vector<int32_t> theirs = tokenizer.at("ids")[i], ours = bpe.encode(texts[i]);
      INFO(tokenizer.at("name") << ": text " << i << ", " << Json(texts[i]).dump(-1, ' ', true));
      REQUIRE(ours == theirs);
      const Json& decoded = tokenizer.at("decoded")[i];
      REQUIRE(text_of(bpe, ours) == (decoded.is_null() ? texts[i] : decoded.get<std::string>()));
    }
    std::vector<int32_t> templated = bpe.prefix();
    for (const int32_t id : bpe.encode(texts[0])) templated.push_back(id);
    REQUIRE(templated == tokenizer.at("templated").get<std::vector<int32_t>>());
  }
}

TEST_CASE("NFC orders and composes marks, and leaves everything else unchanged", "[text]") {
  const std::pair<const char*, const char*> cases[] = {
      {"plain", "plain"},
      {"e\u0301", "\u00e9"},
      {"e\u0323\u0302", "\u1ec7"},                    // two steps
      {"a\u0315\u0300", "\u00e0\u0315"},              // the accent moves before a mark of a higher class
      {"\u0301e\u0301\u0301", "\u0301\u00e9\u0301"},  // no base character, and a second accent
      {"\u212b\u2126", "\u00c5\u03a9"},               // signs that are letters
      {"\u0958", "\u0915\u093c"},                     // never composed
      {"\u1112\u1161\u11ab\u1100\u1161", "\ud55c\uac00"},
      {"\uac00\u11a7", "\uac00\u11a7"},  // U+11A7 is no final consonant
      {"\ufb01\u00bd", "\ufb01\u00bd"},  // compatibility characters are unchanged
  };
  for (const auto& [text, normal] : cases) {
    INFO(text);
    REQUIRE(nfc(text) == normal);
    REQUIRE(nfc(std::string("x") + text + "\u4e16") == std::string("x") + normal + "\u4e16");
    REQUIRE(nfc(normal) == normal);
  }
}

TEST_CASE("bytes that are not UTF-8 are detected", "[text]") {
  REQUIRE_FALSE(utf8_fault("a\u00e9\u4e16\U0001f600\U0010ffff"));
  for (const char* bad : {"\x80", "\xc0\x80", "\xc3", "\xe0\x80\x80", "\xed\xa0\x80", "\xf0\x80\x80\x80",
                          "\xf4\x90\x80\x80", "\xff", "\xe4\xb8"}) {
    REQUIRE(utf8_fault(std::string("ab") + bad) == 2);
    REQUIRE(utf8_fault(std::string("ab") + bad + "c") == 2);
    for (size_t n = 0; n < 20; ++n) REQUIRE(utf8_fault(std::string(n, 'a') + bad + std::string(n, 'c')) == n);
  }
  const HuggingFaceTokenizer tokenizer(golden + "gpt2.json");
  REQUIRE_ERROR(tokenizer.encode("ab\xff"), "byte 3");
}

TEST_CASE("among many added tokens with a common beginning the longest is found, in time", "[text]") {
  std::mt19937 random(3);
  auto some = [&](size_t n) {
    std::string text;
    while (text.size() < n) text += "ab "[random() % 3];
    return text;
  };
  const auto marked = [](const std::vector<std::string>& tokens, const std::string& text) {
    AddedTokens added;
    for (size_t i = 0; i < tokens.size(); ++i) added.add({tokens[i], static_cast<int32_t>(i), false, false, false});
    std::string found;
    added.split(
        text, Specials::as_text, [&](int32_t id) { found += "[" + tokens[static_cast<size_t>(id)] + "]"; },
        [&](std::string_view between) { found += between; });
    return found;
  };
  for (int i = 0; i < 300; ++i) {
    std::vector<std::string> tokens;
    for (size_t n = 1 + random() % 12; n > 0; --n) tokens.push_back(some(1 + random() % 6));
    const std::string text = some(60);
    std::string expected;
    for (size_t at = 0; at < text.size();) {
      std::string longest;
      for (const std::string& token : tokens)
        if (token.size() > longest.size() && text.compare(at, token.size(), token) == 0) longest = token;
      expected += longest.empty() ? text.substr(at, 1) : "[" + longest + "]";
      at += std::max<size_t>(1, longest.size());
    }
    INFO(Json(tokens).dump() << ": " << text);
    REQUIRE(marked(tokens, text) == expected);
  }
  std::vector<std::string> many;
  for (int i = 0; i < 100'000; ++i) many.push_back(formatted("<|reserved_special_token_{:05}|>", i));
  std::string text;
  for (int i = 0; i < 300'000; ++i) text += "<|reserved_special_token_x";
  REQUIRE((marked(many, text + many[777]) == text + "[" + many[777] + "]"));
}

TEST_CASE("a document cut where it may be has the tokens of the whole", "[text]") {
  const Json cases = read_golden("cases.json");
  std::string all;
  for (int i = 0; i < 3; ++i)
    for (const std::string text : cases.at("texts")) all += text + (i == 1 ? " " : i == 2 ? "\n" : "");
  std::map<std::string, Json> forms;
  for (const Json& tokenizer : cases.at("tokenizers")) forms[tokenizer.at("name")] = form_of(tokenizer);
  Json& nfc = forms["NFC, one piece"] = forms.at("qwen2.5");
  nfc["pre_tokenizer"] = forms.at("one piece").at("pre_tokenizer");
  Json& spaced = forms["an added token with a space"] = forms.at("gemma");
  spaced["pre_tokenizer"] = nullptr;
  spaced["added_tokens"].push_back(added_token(811, "q q", true));
  for (int i = 0; i < 60; ++i) all += "cafe\u0301 x q q cafe\u0301";
  int cuts = 0;
  for (const auto& [name, json] : forms) {
    const Bpe bpe(json, "test");
    Bpe::Encoder encoder(bpe, Specials::as_text, 8);
    std::vector<int32_t> whole;
    encoder.append(all, TextPart::beginning, whole);
    std::vector<size_t> tried;
    for (size_t end = 40; end < all.size(); end += 11) {
      const auto cut = bpe.last_cut(all.substr(0, end));
      if (!cut || (!tried.empty() && tried.back() == *cut)) continue;
      tried.push_back(*cut);
      std::vector<int32_t> parts;
      encoder.append(all.substr(0, *cut), TextPart::beginning, parts);
      encoder.append(all.substr(*cut), TextPart::continuation, parts);
      INFO(name << ": cut at " << *cut << ", after " << shown(all.substr(*cut - 12, 12)));
      REQUIRE(parts == whole);
    }
    cuts += static_cast<int>(tried.size());
  }
  REQUIRE(cuts > 1000);
  // Without a place to cut, the middle may be within a character.
  for (const auto& [name, json] : forms)
    for (const std::string character : {"\u044f", "\u4e2d", "\U0001f600"})
      for (size_t before = 0; before < 4; ++before) {
        std::string text(before, 'x');
        while (text.size() < 64) text += character;
        const Bpe bpe(json, "test");
        for (size_t end = 0; end <= text.size(); ++end) {
          INFO(name << ": " << end << " bytes of " << text);
          const auto cut = bpe.last_cut(text.substr(0, end));
          REQUIRE((!cut || (*cut > end / 2 && *cut < end && !utf8_continues(text[*cut]))));
        }
      }
  const Bpe bpe(read_golden("llama3.json"), "test");
  for (const char* bad : {"\xff\xff\xff\xff\xff\xff\xff\xff", "\x80\x80\x80\x80\x80\x80\x80\x80\x80", "", "a"})
    REQUIRE_FALSE(bpe.last_cut(bad));
}

TEST_CASE("kinds of tokenizer.json that are not supported are refused by name", "[text]") {
  const TempDir dir;
  for (const auto& [patch, what] : std::vector<std::pair<Json, std::string>>{
           {{{"model", {{"type", "Unigram"}}}}, R"("type": "Unigram")"},
           {{{"model", {{"type", "WordPiece"}}}}, "WordPiece"},
           {{{"model", {{"dropout", 0.1}}}}, R"("dropout": 0.1)"},
           {{{"model", {{"byte_fallback", true}}}}, "needs a token for every byte, and there is no <0x00>"},
           {{{"model", {{"continuing_subword_prefix", "##"}}}}, R"("continuing_subword_prefix": "##")"},
           {{{"model", {{"end_of_word_suffix", "</w>"}}}}, R"("end_of_word_suffix": "</w>")"},
           {{{"model", {{"merges", {"Ġ t", "Ġ nowhere"}}}}}, R"(merge 1, "Ġ nowhere": the token 'nowhere')"},
           {{{"model", {{"merges", Json::array({Json::array({"t", "Q"})})}}}}, "the token 'tQ'"},
           {{{"model", {{"merges", {"t"}}}}}, R"(merge 0 is "t")"},
           {{{"model", {{"merges", {"a b c"}}}}}, R"(merge 0 is "a b c")"},
           {{{"model", {{"vocab", {{"a", "one"}}}}}}, R"(token 'a' of the vocabulary has the id "one")"},
           {{{"model", {{"vocab", {{"a", 1 << 23}}}}}},
            "token 'a' of the vocabulary has the id 8388608, expected a whole"},
           {{{"model", {{"vocab", {{"a", 3.5}}}}}}, "has the id 3.5"},
           {{{"added_tokens", {{{"id", 4294967299}, {"content", "<x>"}}}}}, "added token '<x>' has the id 4294967299"},
           {{{"post_processor",
              {{"type", "TemplateProcessing"},
               {"single", {{{"SpecialToken", {{"id", "<s>"}}}}}},
               {"special_tokens", {{"<s>", {{"ids", {-1}}}}}}}}},
            "the template's token '<s>' has the id -1"},
           {{{"pre_tokenizer",
              {{"type", "Split"}, {"pattern", {{"Regex", std::string(33, '(')}}}, {"behavior", "Isolated"}}}},
            "a group 33 deep"},
           {{{"pre_tokenizer",
              {{"type", "Split"}, {"pattern", {{"Regex", std::string(5000, 'a')}}}, {"behavior", "Isolated"}}}},
            "expected at most 4096 bytes"},
           {{{"model", nullptr}}, "model"},
           {{{"normalizer", {{"type", "NFKC"}}}}, R"("normalizer" NFKC)"},
           {{{"normalizer", {{"type", "Sequence"}, {"normalizers", {{{"type", "Lowercase"}}}}}}}, "Lowercase"},
           {{{"pre_tokenizer", {{"type", "Metaspace"}}}}, "does not end in ByteLevel"},
           {{{"pre_tokenizer", {{"type", "Punctuation"}}}}, "\"pre_tokenizer\" Punctuation"},
           {{{"pre_tokenizer", nullptr}}, "does not end in ByteLevel"},
           {{{"pre_tokenizer", {{"type", "Digits"}}}}, "does not end in ByteLevel"},
           {{{"pre_tokenizer", {{"type", "Split"}, {"pattern", {{"String", "x"}}}, {"behavior", "Isolated"}}}},
            "does not end in ByteLevel"},
           {{{"pre_tokenizer", {{"type", "Split"}, {"pattern", {{"Regex", "x"}}}, {"behavior", "Removed"}}}},
            R"(behavior "Removed")"},
           {{{"pre_tokenizer", {{"type", "Split"}, {"pattern", {{"Regex", "\\w"}}}, {"behavior", "Isolated"}}}},
            R"(pattern '\w')"},
           {{{"post_processor", {{"type", "RobertaProcessing"}}}}, R"("post_processor" RobertaProcessing)"},
           {{{"decoder", {{"type", "WordPiece"}}}}, R"("decoder" WordPiece)"},
           {{{"decoder", nullptr}}, R"("decoder" null)"},
           {{{"decoder", {{"type", "CTC"}}}}, "or Gemma; --tokenizer bytes trains on tokens made elsewhere"},
           {{{"added_tokens", {{{"id", 657}, {"content", "<x>"}, {"single_word", true}}}}},
            R"(added token '<x>' with "single_word")"},
           {{{"added_tokens", {{{"id", 3}, {"content", "<x>"}}}}},
            "added token '<x>' has the id 3, but Hugging Face's library gives it 657"},
           {{{"added_tokens", {{{"id", 5000}, {"content", "$"}}}}},
            "has the id 5000, but Hugging Face's library gives it 3"},
           {{{"model", {{"vocab", {{"gap", 658}}}}}, {"added_tokens", {{{"id", 658}, {"content", "<x>"}}}}},
            "added token '<x>' has the id 658 of token 'gap'"},
           {{{"added_tokens", {{{"id", 3}}}}}, "content"},
       }) {
    const std::string path = write_tokenizer(dir, patch);
    REQUIRE_ERROR(make_tokenizer(path), "--tokenizer " + path);
    REQUIRE_ERROR(make_tokenizer(path), what);
  }
  const std::string whole = read_whole(golden + "gpt2.json");
  std::ofstream(dir / "half.json") << whole.substr(0, whole.size() / 2);
  REQUIRE_ERROR(make_tokenizer(dir / "half.json"), "half.json: not JSON: parse error");
  std::ofstream(dir / "other.json") << "[1, 2]";
  REQUIRE_ERROR(make_tokenizer(dir / "other.json"), "other.json: expected a JSON object, found [1,2]");
  REQUIRE_ERROR(make_tokenizer(dir / "none.json"), "none.json");
  REQUIRE_ERROR(make_tokenizer("tokenizer.model"), "--tokenizer tokenizer.model");
  REQUIRE_ERROR(make_tokenizer(std::string(100000, 'a')), "aaa... (100000 bytes): expected auto, bytes");
}

TEST_CASE("added tokens may be in the vocabulary as they are, and be named twice", "[text]") {
  Json json = read_golden("gpt2.json");
  json["model"]["vocab"]["<|fran\u00e7ais|>"] = 657;
  json["model"]["ignore_merges"] = json["model"]["byte_fallback"] = nullptr;
  json["added_tokens"] = {added_token(657, "<|fran\u00e7ais|>", false, true), added_token(658, "<x>", false),
                          added_token(658, "<x>", false), added_token(9, "", false)};  // the library ignores the last
  const Bpe bpe(json, "FILE");
  REQUIRE(bpe.encode("<|fran\u00e7ais|><x>") == std::vector<int32_t>{657, 658});
  REQUIRE(bpe.text_of(657) == "<|fran\u00e7ais|>");
  Json gap = read_golden("gpt2.json");
  gap["model"]["vocab"]["after a gap"] = 700;
  REQUIRE_FALSE(Bpe(gap, "FILE").find(""));  // the text of ids that are no token
}

TEST_CASE("the bytes of a document's tokens are those of its text, without the space put before it", "[text]") {
  const std::string text = "the people of the other number";
  const TempDir dir;
  const Json cases = read_golden("cases.json");
  for (const Json& tokenizer : cases.at("tokenizers")) {
    if (std::string(tokenizer.at("name")).starts_with("prefix space")) continue;  // their decoder keeps it
    INFO(tokenizer.at("name"));
    std::ofstream(dir / "tokenizer.json") << form_of(tokenizer);
    const auto made = make_tokenizer(dir.path());
    int64_t bytes = 0;
    for (TextPart part = TextPart::beginning; const int32_t id : made->encode(text)) {
      bytes += made->bytes_of(id, part).value();
      part = TextPart::continuation;
    }
    REQUIRE(bytes == std::ssize(text));
  }
}

TEST_CASE("a decoder that replaces nothing, which would never end, is refused", "[text]") {
  for (const Json& decoder : {Json{{"type", "Replace"}, {"pattern", {{"String", ""}}}, {"content", "x"}},
                              Json{{"type", "Metaspace"}, {"replacement", ""}}}) {
    Json json = read_golden("llama2.json");
    json["decoder"] = {{"type", "Sequence"}, {"decoders", {{{"type", "Fuse"}}, decoder}}};
    REQUIRE_ERROR(Bpe(json, "FILE"), "FILE: a \"decoder\" that replaces \"\" is not supported");
  }
}

TEST_CASE("a token for a byte is needed only if the byte is in the text", "[text]") {
  Json json = read_golden("gpt2.json");
  json["model"]["vocab"].erase("!");
  json["model"]["merges"] = Json::array();
  const Bpe bpe(json, "FILE");
  REQUIRE(text_of(bpe, bpe.encode("abc")) == "abc");
  REQUIRE_ERROR(bpe.encode("abc!"), "FILE: the vocabulary has no token for byte 33");
}

TEST_CASE("a token that is half a character prints its bytes; an unknown one its number", "[text]") {
  const HuggingFaceTokenizer tokenizer(golden + "gpt2.json");
  const std::vector<int32_t> ids = tokenizer.encode("\U00012000");  // cuneiform, four tokens
  REQUIRE(ids.size() == 4);
  std::string text;
  for (int32_t id : ids) text += tokenizer.decode({&id, 1});
  REQUIRE(text == "\U00012000");
  REQUIRE(tokenizer.decode(std::vector<int32_t>{ids[0], 100000, -1}) == "\xf0<100000><-1>");
}

TEST_CASE("the end of text is the token of a usual name, or the one named in the files next to it", "[text]") {
  REQUIRE(make_tokenizer(golden + "gpt2.json")->end_of_text() == 656);
  REQUIRE(make_tokenizer(golden + "smollm2.json")->end_of_text() == 0);
  const auto llama = make_tokenizer(golden + "llama3.json");
  REQUIRE(llama->decode(std::vector<int32_t>{llama->end_of_text()}) == "<|end_of_text|>");
  REQUIRE(llama->decode(llama->prefix()) == "<|begin_of_text|>");
  REQUIRE(make_tokenizer(golden + "gpt2.json")->prefix() == std::vector<int32_t>{656});

  const TempDir dir;
  Json gemma = read_golden("llama2.json");  // "</s>" is an ordinary token there
  gemma["model"]["vocab"].merge_patch({{"</s>", 809}, {"<eos>", 2}});
  gemma["added_tokens"][2]["content"] = "<eos>";
  std::ofstream(dir / "tokenizer.json") << gemma;
  REQUIRE(make_tokenizer(dir.path())->end_of_text() == 2);
  gemma["model"]["vocab"].merge_patch({{"<end>", 2}, {"<eos>", nullptr}});
  gemma["added_tokens"][2]["content"] = "<end>";
  std::ofstream(dir / "tokenizer.json") << gemma;
  REQUIRE(make_tokenizer(dir.path())->end_of_text() == 809);
  std::ofstream(dir / "tokenizer_config.json") << R"({"eos_token": "<end>"})";
  REQUIRE(make_tokenizer(dir.path())->end_of_text() == 2);
  std::filesystem::remove(dir / "tokenizer_config.json");

  Json json = read_golden("gpt2.json");
  json["added_tokens"] = Json::array();
  json["model"]["vocab"].erase("<|endoftext|>");
  std::ofstream(dir / "tokenizer.json") << json.dump();
  REQUIRE_ERROR(make_tokenizer(dir.path()), "eos_token_id");
  std::ofstream(dir / "config.json") << R"({"eos_token_id": 5})";
  REQUIRE(make_tokenizer(dir.path())->end_of_text() == 5);
  std::ofstream(dir / "generation_config.json") << R"({"eos_token_id": [7, 8]})";
  REQUIRE(make_tokenizer(dir.path())->end_of_text() == 7);
  std::ofstream(dir / "tokenizer_config.json") << R"({"eos_token": {"content": "!"}})";
  REQUIRE(make_tokenizer(dir.path())->end_of_text() == 0);
  std::ofstream(dir / "tokenizer_config.json") << R"({"eos_token": null})";
  REQUIRE(make_tokenizer(dir.path())->end_of_text() == 7);
  std::ofstream(dir / "tokenizer_config.json") << "{";
  REQUIRE_ERROR(make_tokenizer(dir.path()), "tokenizer_config.json");
}

TEST_CASE("the files of the byte tokenizer are a tokenizer.json that encodes and decodes as it does", "[text]") {
  const TempDir dir;
  const ByteTokenizer bytes;
  for (const auto& [name, text] : bytes.files()) std::ofstream(dir / name) << text;
  const auto reread = make_tokenizer("auto", dir.path(), ByteTokenizer::vocab_size);
  REQUIRE(dynamic_cast<HuggingFaceTokenizer*>(reread.get()) != nullptr);
  REQUIRE(reread->end_of_text() == 256);
  REQUIRE(reread->prefix() == bytes.prefix());
  std::vector<std::string> texts = read_golden("cases.json").at("texts");
  texts.emplace_back("\0 is a byte, too\n\r\t \x7f \u00ad\u0100\U0010ffff", 26);
  for (const std::string& text : texts) {
    if (text.find("<|endoftext|>") != std::string::npos) continue;  // there a token, here thirteen bytes
    REQUIRE(reread->encode(text) == bytes.encode(text));
    REQUIRE(reread->decode(bytes.encode(text)) == text);
  }
  for (int32_t token = 0; token <= 257; ++token)
    REQUIRE(reread->decode(std::vector<int32_t>{token}) == bytes.decode(std::vector<int32_t>{token}));
}

TEST_CASE("a checkpoint of a byte-level model has a tokenizer.json; one of another vocabulary has not", "[text]") {
  const TempDir dir;
  write_shard<uint16_t>(dir / "t.bin", std::vector<uint16_t>(200, 'a'));
  auto train = [&](const std::string& out, const std::string& more) {
    const ProgramResult r = run_program("--model d1 --n-embd 16 --n-head 2 --seq-len 8 --max-steps 1 --threads 1 -i " +
                                        (dir / "t.bin") + " -o " + (dir / out) + " " + more);
    INFO(r.err);
    REQUIRE(r.status == 0);
    return std::filesystem::exists(dir / (out + "/step-000001/tokenizer.json"));
  };
  REQUIRE(train("bytes", "--vocab-size 257"));
  REQUIRE(!train("other", "--vocab-size 300"));
  REQUIRE(!train("named", "--vocab-size 300 --tokenizer bytes"));  // may stand in for another tokenizer
  const std::string generate =
      "--generate --prompt 'a \u00e9' --temperature 0 -g 5 --model " + (dir / "bytes/step-000001");
  const ProgramResult found = run_program(generate), bytes = run_program(generate + " --tokenizer bytes");
  INFO(found.err);
  REQUIRE(found.status == 0);
  REQUIRE(found.out == bytes.out);
  // And so has one that is trained further from it.
  REQUIRE(train("more", "--n-embd 16 --model " + (dir / "bytes/step-000001")));
}

TEST_CASE("tokens are those of merging pair after pair, whatever the length and what is remembered", "[text]") {
  for (const std::string file : {"gpt2.json", "llama3.json"}) {
    Json json = read_golden(file);
    json["pre_tokenizer"] = {{"type", "ByteLevel"}, {"add_prefix_space", false}, {"use_regex", false}};
    json["model"]["vocab"]["zq"] = 5000;  // no merge makes it
    json["added_tokens"] = Json::array();
    json["post_processor"] = nullptr;
    const bool whole_first = json["model"].value("ignore_merges", false);
    const Bpe bpe(json, "test");
    std::map<std::string, int32_t> id_of, rank_of;
    for (const auto& [token, id] : json["model"]["vocab"].items()) id_of[token] = id;
    for (const Json& merge : json["model"]["merges"])
      rank_of[merge.is_string() ? merge.get<std::string>()
                                : merge[0].get<std::string>() + " " + merge[1].get<std::string>()] =
          static_cast<int32_t>(rank_of.size());
    auto merged = [&](const std::string& text) -> std::vector<int32_t> {
      if (whole_first && id_of.contains(byte_level_text(text))) return {id_of.at(byte_level_text(text))};
      std::vector<std::string> symbols;
      for (const char byte : text) symbols.push_back(byte_level_text({&byte, 1}));
      for (;;) {
        size_t best = symbols.size();
        int32_t lowest = std::numeric_limits<int32_t>::max();
        for (size_t i = 0; i + 1 < symbols.size(); ++i) {
          const auto found = rank_of.find(symbols[i] + " " + symbols[i + 1]);
          if (found != rank_of.end() && found->second < lowest) lowest = found->second, best = i;
        }
        if (best == symbols.size()) break;
        symbols[best] += symbols[best + 1];
        symbols.erase(symbols.begin() + static_cast<std::ptrdiff_t>(best) + 1);
      }
      std::vector<int32_t> ids;
      for (const std::string& symbol : symbols) ids.push_back(id_of.at(symbol));
      return ids;
    };
    Bpe::Encoder encoder(bpe, Specials::as_text, 5);
    std::mt19937 random(17);
    const std::vector<std::string> alphabets[] = {{"t", "h", "e", " ", "an", "d"},
                                                  {"z", "q"},
                                                  {"a", "e", "i", "o", "n", "r", "s", " "},
                                                  {std::string(1, '\0'), "a"},
                                                  {"\u65e5", "\u672c", "\u306e", "\u00e9", "\U0001f600"}};
    std::vector<std::string> texts;
    for (size_t n = 1; n < 420; n += n < 140 ? 1 : 40)
      for (const std::vector<std::string>& alphabet : alphabets) {
        std::string text;
        while (text.size() < n) text += alphabet[random() % alphabet.size()];
        texts.push_back(text);
        if (n < 40) texts.push_back(texts[random() % texts.size()]);  // seen before
      }
    for (const std::string& text : texts) {
      std::vector<int32_t> ids;
      encoder.append(text, TextPart::beginning, ids);
      INFO(file << ": " << Json(text).dump(-1, ' ', true, Json::error_handler_t::replace));
      REQUIRE(ids == merged(text));
    }
  }
}

TEST_CASE("a long piece is encoded in n log n", "[text]") {
  const Bpe bpe(read_golden("gpt2.json"), "test");
  std::string text;  // 4 MiB without a space: would take hours if each merge scanned all of it
  while (text.size() < (size_t{1} << 22)) text += "thethereand";
  const std::vector<int32_t> ids = bpe.encode(text);
  REQUIRE(ids.size() < text.size());
  REQUIRE(text_of(bpe, ids) == text);
}

TEST_CASE("a checkpoint holds the tokenizer's files, and --generate finds them there", "[text]") {
  const TempDir dir;
  const std::string tokenizer = write_tokenizer(dir, Json::object());
  std::ofstream(dir / "tokenizer_config.json") << "{\"model_max_length\": 64}";
  const auto encoded = make_tokenizer(tokenizer)->encode("the people of the other number");
  std::vector<uint16_t> tokens;
  for (int i = 0; i < 20; ++i) tokens.insert(tokens.end(), encoded.begin(), encoded.end());
  write_shard(dir / "train.bin", tokens);
  const std::string out = dir / "out";
  const ProgramResult trained = run_program(
      "--model d1 --n-embd 16 --n-head 2 --vocab-size 657 --seq-len 8 --batch-size 2 --max-steps 2 --sample-every 2 "
      "--sample-tokens 4 --prompt 'the people' --train-data " +
      (dir / "train.bin") + " --tokenizer " + dir.path() + " --out-dir " + out);
  INFO(trained.out << trained.err);
  REQUIRE(trained.status == 0);
  const std::string checkpoint = out + "/step-000002/";
  for (const char* file : {"tokenizer.json", "tokenizer_config.json"}) {
    REQUIRE(read_whole(checkpoint + file) == read_whole(dir / file));
    REQUIRE(Json::parse(read_whole(checkpoint + "manifest.json")).at("files").contains(file));
  }
  REQUIRE_FALSE(std::filesystem::exists(checkpoint + "special_tokens_map.json"));

  auto generate = [&](const std::string& more) {
    return run_program("--generate --model " + checkpoint + " --prompt 'the people' --temperature 0 -g 3 " + more);
  };
  const ProgramResult found = generate(""), named = generate("--tokenizer " + tokenizer);
  INFO(found.out << found.err);
  REQUIRE(found.status == 0);
  REQUIRE(found.out == named.out);
  const ProgramResult bytes = generate("--tokenizer bytes");
  REQUIRE(bytes.status == 0);
  REQUIRE(bytes.out != found.out);
  // A tokenizer with more tokens than the model is ignored, unless requested explicitly.
  Json larger = Json::parse(read_whole(tokenizer));
  larger["added_tokens"].push_back({{"id", 657}, {"content", "<more>"}});
  std::ofstream(checkpoint + "tokenizer.json") << larger.dump();
  REQUIRE(generate("").out == bytes.out);
  const ProgramResult outside = run_program("--generate --model " + checkpoint +
                                            " --prompt '<more>' -g 3 --tokenizer " + checkpoint + "tokenizer.json");
  REQUIRE(outside.status == 1);
  REQUIRE(outside.err.find("token 657") != std::string::npos);
}
