// bpe.h: a byte-level BPE tokenizer as described by Hugging Face's tokenizer.json. Added tokens are cut out of the
// text; the text between them is normalised (NFC), split into pieces by patterns, and encoded piece by piece. Unknown
// kinds of these steps are refused by name. "truncation" and "padding" apply to batches and are ignored.
#pragma once
#include <algorithm>
#include <array>
#include <nlohmann/json.hpp>
#include <optional>
#include <span>
#include <string>
#include <string_view>
#include <vector>

#include "core/check.h"
#include "core/files.h"
#include "text/bpe_vocabulary.h"
#include "text/split_pattern.h"
#include "text/unicode.h"

namespace llmc {

// Whether the names of special tokens in a text stand for these tokens, as in a prompt, or are text like any other, as
// in a document: none can forge an end of text.
enum class Specials : uint8_t { as_tokens, as_text };
// Whether a text begins a document, or continues one that was cut at a place of last_cut().
enum class TextPart : uint8_t { beginning, continuation };

// Tokens that are matched literally in a text, before anything else.
class AddedTokens {
 public:
  struct Token {
    std::string text;
    int32_t id;
    bool strip_left, strip_right;  // adjacent white space belongs to the token
    bool special;
  };
  void add(const Token& token) {
    if (token.text.empty()) return;
    auto& bucket = by_first_byte_[static_cast<unsigned char>(token.text[0])];
    bucket.push_back(token);
    std::stable_sort(bucket.begin(), bucket.end(),
                     [](const Token& a, const Token& b) { return a.text.size() > b.text.size(); });
  }

  // Splits the text at its tokens, leftmost first, then longest; passes their ids to on_token and the text between them
  // to on_text.
  template <class OnToken, class OnText>
  void split(std::string_view text, Specials specials, OnToken&& on_token, OnText&& on_text) const {
    size_t cut = 0;
    for (size_t at = 0; at < text.size();) {
      const Token* token = find(text.substr(at));
      if (!token || (token->special && specials == Specials::as_text)) {
        at += token ? token->text.size() : 1;
        continue;
      }
      size_t begin = at, end = at += token->text.size();
      if (token->strip_left)
        while (begin > cut && is_space(text, utf8_before(text, begin))) begin = utf8_before(text, begin);
      if (token->strip_right)
        while (end < text.size() && is_space(text, end)) end += utf8_at(text, end).width;
      if (cut < begin) on_text(text.substr(cut, begin - cut));
      on_token(token->id);
      cut = end;
    }
    if (cut < text.size()) on_text(text.substr(cut));
  }

 private:
  static bool is_space(std::string_view text, size_t at) {
    return (traits_of(utf8_at(text, at).code) & white_space_trait) != 0;
  }
  const Token* find(std::string_view text) const {
    for (const Token& token : by_first_byte_[static_cast<unsigned char>(text[0])])
      if (text.starts_with(token.text)) return &token;
    return nullptr;
  }
  std::array<std::vector<Token>, 256> by_first_byte_;  // longest first
};

// Whether encode() adds the tokens that "post_processor" puts around a text, such as Llama's <|begin_of_text|>.
enum class Template { omit, apply };

class Bpe {
 public:
  // `where`: how errors begin, "--tokenizer PATH".
  Bpe(const nlohmann::json& file, const std::string& where) : where_(where), vocabulary_(file.at("model"), where) {
    tokens_ = vocabulary_.tokens();
    read_normalizer(file.value("normalizer", nlohmann::json()));
    const nlohmann::json added = file.value("added_tokens", nlohmann::json::array());
    const size_t most = BpeVocabulary::most_ids(tokens_.size() + added.size());
    for (const nlohmann::json& token : added) read_added_token(token, most);
    read_pre_tokenizer(file.value("pre_tokenizer", nlohmann::json()));
    if (steps_.empty() || !steps_.back().is_byte_level) refuse("\"pre_tokenizer\" that does not end in ByteLevel");
    read_post_processor(file.value("post_processor", nlohmann::json()));
    const nlohmann::json decoder = file.value("decoder", nlohmann::json());
    if (type_of(decoder) != "ByteLevel") refuse(formatted("\"decoder\" {}", type_of(decoder)));
  }

  // text: valid UTF-8.
  std::vector<int32_t> encode(std::string_view text, Template around = Template::omit) const {
    std::vector<int32_t> ids;
    if (around == Template::apply) ids = prefix_;
    Encoder(*this, Specials::as_tokens).append(text, TextPart::beginning, ids);
    if (around == Template::apply) ids.insert(ids.end(), suffix_.begin(), suffix_.end());
    return ids;
  }

  // Encodes many texts, and remembers the words in them; one for each thread.
  class Encoder {
   public:
    Encoder(const Bpe& bpe, Specials specials) : bpe_(bpe), specials_(specials), words_(bpe.vocabulary_) {}
    // ids += the tokens of a text, valid UTF-8.
    void append(std::string_view text, TextPart, std::vector<int32_t>& ids) {
      auto on_token = [&](int32_t id) { ids.push_back(id); };
      bpe_.added_.split(text, specials_, on_token, [&](std::string_view part) {
        const std::string normalised = bpe_.nfc_ ? nfc(part) : std::string(part);
        bpe_.added_normalised_.split(normalised, specials_, on_token, [&](std::string_view between) {
          bpe_.cut(between, 0, [&](std::string_view piece) { words_.append(piece, ids); });
        });
      });
    }

   private:
    const Bpe& bpe_;
    Specials specials_;
    BpeVocabulary::Encoder words_;
  };

  // The last place where a long text may be cut and its parts encoded one after the other; none: there is none.
  std::optional<size_t> last_cut(std::string_view) const { return std::nullopt; }

  // The bytes of a token; empty: no such token. One character's bytes may be spread over several tokens.
  const std::string& text_of(int32_t id) const {
    static const std::string none;
    return id >= 0 && static_cast<size_t>(id) < tokens_.size() ? tokens_[static_cast<size_t>(id)] : none;
  }
  // Is the token for programs rather than part of a text?
  bool is_special(int32_t id) const { return std::ranges::binary_search(special_, id); }
  int32_t vocab_size() const { return narrow<int32_t>(static_cast<int64_t>(tokens_.size())); }
  // The tokens that the template puts before a text.
  const std::vector<int32_t>& prefix() const { return prefix_; }

  // The id of a token, added or ordinary, by its text.
  std::optional<int32_t> find(std::string_view text) const {
    const auto found = std::find(tokens_.begin(), tokens_.end(), text);
    return found == tokens_.end() ? std::nullopt : std::optional(static_cast<int32_t>(found - tokens_.begin()));
  }

 private:
  // One pre-tokenizer: a prefix, and the pattern that splits the text.
  struct Step {
    bool is_byte_level = false;
    bool prefix_space = false;
    std::optional<SplitPattern> pattern;
  };

  [[noreturn]] void refuse(const std::string& what) const {
    throw Error(formatted("{}: {} is not supported; expected byte-level BPE as in GPT-2, Llama 3, Qwen or SmolLM",
                          where_, what));
  }
  static std::string type_of(const nlohmann::json& json) {
    return json.is_null() ? "null" : shown(json.at("type").get<std::string>());
  }

  // Passes on the pieces into which step `s` and the later steps split a text.
  template <class F>
  void cut(std::string_view text, size_t s, F&& on_piece) const {
    if (s == steps_.size()) return on_piece(text);
    const Step& step = steps_[s];
    std::string prefixed;
    if (step.prefix_space && !text.starts_with(' ')) text = prefixed = " " + std::string(text);
    if (step.pattern) step.pattern->split(text, [&](std::string_view piece) { cut(piece, s + 1, on_piece); });
    else cut(text, s + 1, on_piece);
  }

  void read_normalizer(const nlohmann::json& json) {
    const std::string type = type_of(json);
    if (type == "NFC") nfc_ = true;
    else if (type == "Sequence")
      for (const nlohmann::json& one : json.at("normalizers")) read_normalizer(one);
    else if (type != "null") refuse("\"normalizer\" " + type);
  }

  void read_added_token(const nlohmann::json& json, size_t most) {
    const bool normalised = json.value("normalized", !json.value("special", false));
    const std::string content = json.at("content");
    const int32_t id =
        BpeVocabulary::id_of(json.at("id"), most, formatted("{}: added token '{}'", where_, shown(content)));
    const AddedTokens::Token token{normalised && nfc_ ? nfc(content) : content, id, json.value("lstrip", false),
                                   json.value("rstrip", false), json.value("special", false)};
    if (json.value("single_word", false)) refuse(formatted("added token '{}' with \"single_word\"", shown(content)));
    const size_t i = static_cast<size_t>(token.id);
    if (i >= tokens_.size()) tokens_.resize(i + 1);
    CHECK(tokens_[i].empty() || tokens_[i] == content, "{}: added token '{}' has the id {} of token '{}'", where_,
          shown(content), token.id, shown(tokens_[i]));
    tokens_[i] = token.text;  // kept as it is; the library reads U+00E9 in it as GPT-2's sign for byte 0xe9
    if (token.special) special_.insert(std::ranges::upper_bound(special_, id), id);
    (normalised ? added_normalised_ : added_).add(token);
  }

  void read_pre_tokenizer(const nlohmann::json& json) {
    const std::string type = type_of(json);
    if (!steps_.empty() && steps_.back().is_byte_level) refuse("a pre-tokenizer after ByteLevel");
    if (type == "Sequence") {
      for (const nlohmann::json& one : json.at("pretokenizers")) read_pre_tokenizer(one);
    } else if (type == "ByteLevel") {
      Step step{.is_byte_level = true, .prefix_space = json.value("add_prefix_space", true), .pattern = {}};
      if (json.value("use_regex", true))
        step.pattern.emplace(R"('(?:[sdmt]|ll|ve|re)| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+)", where_);
      steps_.push_back(std::move(step));
    } else if (type == "Split") {
      const nlohmann::json& pattern = json.at("pattern");
      if (!pattern.contains("Regex")) refuse(formatted("a Split by {}", pattern));
      if (json.at("behavior") != "Isolated") refuse(formatted("a Split with behavior {}", json.at("behavior")));
      steps_.push_back({.pattern = SplitPattern(pattern.at("Regex"), where_)});
    } else if (type == "Digits") {
      steps_.push_back(
          {.pattern = SplitPattern(json.value("individual_digits", false) ? R"(\p{N})" : R"(\p{N}+)", where_)});
    } else {
      refuse("\"pre_tokenizer\" " + type);
    }
  }

  void read_post_processor(const nlohmann::json& json) {
    const std::string type = type_of(json);
    if (type == "Sequence") {
      for (const nlohmann::json& one : json.at("processors")) read_post_processor(one);
    } else if (type == "TemplateProcessing") {
      std::vector<int32_t>* side = &prefix_;
      for (const nlohmann::json& part : json.at("single")) {
        if (part.contains("Sequence")) {
          side = &suffix_;
          continue;
        }
        const std::string& name = part.at("SpecialToken").at("id").get_ref<const std::string&>();
        for (const nlohmann::json& id : json.at("special_tokens").at(name).at("ids"))
          side->push_back(BpeVocabulary::id_of(id, tokens_.size(),
                                               formatted("{}: the template's token '{}'", where_, shown(name))));
      }
    } else if (type != "null" && type != "ByteLevel") {  // which only trims offsets; unused here
      refuse("\"post_processor\" " + type);
    }
  }

  std::string where_;
  BpeVocabulary vocabulary_;
  std::vector<std::string> tokens_;       // including the added ones
  AddedTokens added_, added_normalised_;  // found in the text as it is, and in the normalised text
  bool nfc_ = false;
  std::vector<Step> steps_;
  std::vector<int32_t> prefix_, suffix_;
  std::vector<int32_t> special_;  // ascending
};

}  // namespace llmc
