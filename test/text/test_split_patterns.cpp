// The patterns that split a text into pieces: what they match, by backtracking and by automata, and what is refused.
#include "catch2.h"
#include "helpers.h"
#include "text/tokenizer.h"

using namespace llmc;

namespace {

using Json = nlohmann::json;

Json read_golden(const std::string& file) { return Json::parse(read_whole("test/golden/tokenizers/" + file)); }

std::vector<std::string> pieces(const std::string& pattern, const std::string& text) {
  std::vector<std::string> all;
  SplitPattern(pattern, "test").split(text, [&](std::string_view piece) { all.emplace_back(piece); });
  return all;
}

}  // namespace

TEST_CASE("patterns match greedily, and backtrack only where allowed", "[text]") {
  using Pieces = std::vector<std::string>;
  REQUIRE(pieces(R"(\s+(?!\S)|\s+)", "a   b ") == Pieces{"a", "  ", " ", "b", " "});
  REQUIRE(pieces(R"(\d{1,3})", "x12345") == Pieces{"x", "123", "45"});
  REQUIRE(pieces(R"(a{2})", "aaaaa") == Pieces{"aa", "aa", "a"});
  REQUIRE(pieces(R"(a{2,}b)", "abaaab") == Pieces{"ab", "aaab"});
  REQUIRE(pieces(R"(a+ab)", "aaab") == Pieces{"aaab"});
  REQUIRE(pieces(R"(a++ab)", "aaab") == Pieces{"aaab"});  // never matched: unmatched text is one piece
  REQUIRE(pieces(R"(a++ab|b)", "aaab") == Pieces{"aaa", "b"});
  REQUIRE(pieces(R"((?:ab|a)(bc)?)", "abcx") == Pieces{"ab", "cx"});
  REQUIRE(pieces(R"((?:ab|a)bc)", "abcx") == Pieces{"abc", "x"});
  REQUIRE(pieces(R"(x(?=y))", "xxy") == Pieces{"x", "x", "y"});
  REQUIRE(pieces(R"([^\P{L}a-c]+|[\]\-x])", "abcdef]-") == Pieces{"abc", "def", "]", "-"});
  REQUIRE(pieces(R"((?i:'s|k))", "'S'\u017f\u212a") == Pieces{"'S", "'\u017f", "\u212a"});
  REQUIRE(pieces(R"((?i:'[dmst])t)", "'Mt'St") == Pieces{"'Mt", "'St"});
  REQUIRE(pieces(R"([\D])", "1\u0663a") == Pieces{"1\u0663", "a"});
  const std::string blanks(1 << 20, ' ');  // would overflow the stack if matching were recursive
  REQUIRE(pieces(R"(\s*\n|\s+(?!\S)|\s+)", blanks + "x").size() == 3);
}

TEST_CASE("an automaton splits as backtracking does, and knows where a text may be cut", "[text]") {
  std::vector<std::string> patterns = {R"(\s+(?!\S)|\s+)", R"(a{2,3}b|a+|b(?=a))", R"(a++ab|a++|b)",
                                       R"((?:ab|a)(bc)?|[bc]+)"};
  for (const std::string file : {"gpt2.json", "llama3.json", "qwen2.5.json"}) {
    const Json pre = read_golden(file).at("pre_tokenizer");
    if (pre.contains("pretokenizers")) patterns.push_back(pre.at("pretokenizers")[0].at("pattern").at("Regex"));
  }
  const Json cases = read_golden("cases.json");
  for (const Json& tokenizer : cases.at("tokenizers"))
    for (const Json& step : tokenizer.at("patch").value("/pre_tokenizer/pretokenizers"_json_pointer, Json::array()))
      if (step.contains("pattern") && step["pattern"].contains("Regex")) patterns.push_back(step["pattern"]["Regex"]);
  REQUIRE(patterns.size() >= 10);
  const std::vector<std::string> texts = cases.at("texts");
  std::string all;
  for (const std::string& text : texts) all += text;
  for (const char* more : {" a ab aab aaabc aaaab abcbc bab", "  \n x", "'re'LL 12345 \r\n\r\n"}) all += more;
  int boundaries = 0;
  for (const std::string& pattern : patterns) {
    INFO(pattern);
    const SplitPattern slow(pattern, "test");
    const auto fast = SplitAutomaton::compile(slow);
    REQUIRE(fast);
    std::vector<size_t> ends, fast_ends;
    slow.split(all, [&](std::string_view piece) {
      ends.push_back(static_cast<size_t>(piece.data() + piece.size() - all.data()));
    });
    fast->split(all, [&](Pieces some) {
      for (const std::string_view piece : some)
        fast_ends.push_back(static_cast<size_t>(piece.data() + piece.size() - all.data()));
    });
    REQUIRE(ends == fast_ends);
    for (size_t at = 1; at < all.size(); at += utf8_at(all, at).width) {
      if (fast->between(utf8_at(all, utf8_before(all, at)).code, utf8_at(all, at).code) !=
          SplitAutomaton::Place::boundary)
        continue;
      ++boundaries;
      REQUIRE(std::ranges::binary_search(ends, at));
    }
  }
  REQUIRE(boundaries > 1000);
  const SplitPattern far(R"(a(?=bc)|\s)", "test");
  REQUIRE_FALSE(SplitAutomaton::compile(far));  // looks two characters ahead: left to backtracking
}

TEST_CASE("a pattern with more ways to match than can be tried has an automaton, or is refused", "[text]") {
  std::string ways;
  for (int i = 0; i < 60; ++i) ways += "(?:a*)?";
  const std::string text = std::string(100, 'a') + "cab";
  std::vector<std::string> found;
  Splitter(ways + "b", "test").split(text, [&](Pieces some) { found.insert(found.end(), some.begin(), some.end()); });
  REQUIRE(found == std::vector<std::string>{std::string(100, 'a') + "c", "ab"});
  REQUIRE_ERROR(pieces(ways + "b(?!cd)", text), "a match takes more than");
}

TEST_CASE("unsupported pattern syntax is refused with the pattern", "[text]") {
  for (const auto& [pattern, what] : std::vector<std::pair<std::string, std::string>>{
           {R"(\w+)", R"('\w' at byte 0 is not supported; --tokenizer bytes)"},
           {R"(a\b)", R"('\b' at byte 1)"},
           {R"(\p{Han})", R"('\p{Han}')"},
           {R"(a.)", "'.' at byte 1"},
           {R"(^a)", "'^'"},
           {R"(a$)", "'$'"},
           {R"(a+?)", "a second quantifier"},
           {R"(a{1,3}+)", "a second quantifier"},
           {R"((?:ab)+)", "a repeated group"},
           {R"((?<=a)b)", "the group '(?<=' at byte 0"},
           {R"([a[b]])", "a nested class"},
           {R"([a-\d])", "a range that ends in a class"},
           {R"((?i:\p{Lu}))", "a case-insensitive class"},
           {R"((?i:ä))", "a case-insensitive character beyond ASCII"},
           {R"((?i:'ss))", "case-insensitive 'ss'"},
           {R"((?i:Fl))", "case-insensitive 'fl'"},
           {R"(a|b*)", "matches an empty text"},
           {R"((a)", "'(' at byte 0 is not closed"},
           {R"(a))", "unmatched ')' at byte 1"},
           {R"([ab)", "is incomplete"},
           {R"(a{2,1})", "the count at byte 1"},
           {R"([b-a])", "the range at byte 1 is empty"},
       }) {
    REQUIRE_ERROR(SplitPattern(pattern, "FILE"), "FILE: pattern '" + pattern + "'");
    REQUIRE_ERROR(SplitPattern(pattern, "FILE"), what);
  }
}
