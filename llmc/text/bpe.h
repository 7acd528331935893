// bpe.h: a BPE tokenizer as described by Hugging Face's tokenizer.json: of bytes, as GPT-2's, or of characters that are
// written as their bytes where they are no tokens, as SentencePiece's. Added tokens are cut out of the text; the text
// between them is normalised, split into pieces, and encoded piece by piece. Unknown kinds of these steps are refused
// by name. "truncation" and "padding" apply to batches and are ignored.
#pragma once
#include <iterator>

#include "text/bpe_encoder.h"
#include "text/pre_tokenizer.h"

namespace llmc {

// Whether the names of special tokens in a text stand for these tokens, as in a prompt, or are text like any other, as
// in a document: none can forge an end of text.
enum class Specials : uint8_t { as_tokens, as_text };

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
    const auto place = std::ranges::lower_bound(bucket, token.text, {}, &Token::text);
    if (place == bucket.end() || place->text != token.text) bucket.insert(place, token);
    all_special_ &= token.special;
  }

  // Splits the text at its tokens, leftmost first, then longest: passes on their ids and the text between them.
  template <class OnToken, class OnText>
  void split(std::string_view text, Specials specials, OnToken&& on_token, OnText&& on_text) const {
    size_t cut = 0;
    for (size_t at = specials == Specials::as_text && all_special_ ? text.size() : 0; at < text.size();) {
      const auto& bucket = by_first_byte_[static_cast<unsigned char>(text[at])];
      const Token* token = bucket.empty() ? nullptr : find(bucket, text.substr(at));
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

  // May a token, or the white space that belongs to it, be on both sides of the border of these two characters of a
  // document, or end there, so that a text begins?
  bool cross(std::string_view a, std::string_view b) const {
    if (all_special_) return false;
    const std::string both = std::string(a) + std::string(b);
    for (const auto& bucket : by_first_byte_)
      for (const Token& token : bucket)
        if (token.text.find(both) != token.text.npos || token.text.ends_with(a) ||
            ((token.strip_left || token.strip_right) && is_space(a, 0)) || (token.strip_right && is_space(b, 0)))
          return true;
    return false;
  }

 private:
  static bool is_space(std::string_view text, size_t at) {
    return (traits_of(utf8_at(text, at).code) & white_space_trait) != 0;
  }
  // The longest token that the text begins with: in lexicographic order the last one that is not after the text, or
  // else one that what these two have in common begins with.
  static const Token* find(const std::vector<Token>& bucket, std::string_view text) {
    for (;;) {
      const auto after = std::ranges::upper_bound(bucket, text, {}, [](auto& t) { return std::string_view(t.text); });
      if (after == bucket.begin()) return nullptr;
      const Token& token = *std::prev(after);
      if (text.starts_with(token.text)) return &token;
      text = {text.begin(), std::ranges::mismatch(text, token.text).in1};
    }
  }
  std::array<std::vector<Token>, 256> by_first_byte_;  // in lexicographic order
  bool all_special_ = true;                            // in documents, these are text
};

class Bpe {
 public:
  // `where`: how errors begin, "--tokenizer PATH".
  Bpe(const nlohmann::json& file, const std::string& where) : where_(where), vocabulary_(file.at("model"), where) {
    auto refuse_kind = [this](const std::string& what) { refuse(what); };
    normalizer_.read(file.value("normalizer", nlohmann::json()), refuse_kind);
    read_decoder(file.value("decoder", nlohmann::json()));
    for (const std::string& token : vocabulary_.tokens())
      tokens_.push_back(decoded(token, static_cast<int32_t>(tokens_.size())));
    read_added_tokens(file.value("added_tokens", nlohmann::json::array()), file.at("model").at("vocab"));
    pre_tokenizer_.read(file.value("pre_tokenizer", nlohmann::json()), where, refuse_kind);
    if (pre_tokenizer_.is_byte_level() != of_bytes())
      refuse(of_bytes() ? "\"pre_tokenizer\" that does not end in ByteLevel" : "ByteLevel with \"byte_fallback\"");
    read_post_processor(file.value("post_processor", nlohmann::json()));
  }

  // text: valid UTF-8.
  std::vector<int32_t> encode(std::string_view text) const {
    std::vector<int32_t> ids;
    Encoder(*this, Specials::as_tokens, 4).append(text, TextPart::beginning, ids);
    return ids;
  }

  // Encodes many texts, and remembers the words in them; one for each thread.
  class Encoder {
   public:
    // cache_bits: how many words it remembers, about 2^cache_bits.
    Encoder(const Bpe& bpe, Specials specials, int cache_bits)
        : bpe_(bpe), specials_(specials), words_(bpe.vocabulary_, cache_bits) {}
    // ids += the tokens of a text, valid UTF-8; `part`: whether it begins a document.
    void append(std::string_view text, TextPart part, std::vector<int32_t>& ids) {
      auto on_token = [&](int32_t id) { ids.push_back(id); };
      bpe_.added_.split(text, specials_, on_token, [&](std::string_view between) {
        const bool begins = between.data() == text.data();
        const std::string_view normal =
            bpe_.normalizer_.apply(between, begins ? part : TextPart::beginning, normalised_);
        bpe_.added_normalised_.split(normal, specials_, on_token, [&](std::string_view rest) {
          bpe_.pre_tokenizer_.split(rest, part, begins && rest.data() == normal.data(),
                                    [&](Pieces pieces) { words_.append(pieces, ids); });
        });
      });
    }

   private:
    const Bpe& bpe_;
    Specials specials_;
    BpeEncoder words_;
    std::string normalised_;
  };

  // The last place in the second half of a long document where it may be cut: the tokens of its parts are those of the
  // whole. None: there is none. The text may end within a character, and may not even be UTF-8.
  std::optional<size_t> last_cut(std::string_view text) const {
    const size_t middle = text.size() / 2;
    for (size_t at = text.size() - std::min<size_t>(text.size(), 8), before; at > middle; at = before) {
      for (before = at - 1; before > middle && utf8_continues(text[before]);) --before;
      const Utf8Character a = utf8_at(text, before), b = utf8_at(text, at), next = utf8_at(text, at + b.width);
      if (utf8_continues(text[at]) || a.width != at - before || std::max({a.code, b.code, next.code}) > 0x10ffff)
        continue;
      // nor does what follows b change b
      if (normalizer_.independent(a.code, b.code) && normalizer_.independent(b.code, next.code) &&
          independent(text.substr(before, a.width), text.substr(at, b.width)))
        return at;
    }
    return std::nullopt;
  }

  // The bytes of a token; empty: no such token. One character's bytes may be spread over several tokens.
  std::string text_of(int32_t id) const { return id >= 0 && id < vocab_size() ? tokens_[static_cast<size_t>(id)] : ""; }
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

  // Does decoding drop one leading space?
  bool strips_first_space() const { return strips_first_space_; }

 private:
  bool of_bytes() const { return vocabulary_.symbols() == BpeVocabulary::Symbols::bytes; }

  [[noreturn]] void refuse(const std::string& what) const {
    throw Error(
        formatted("{}: {} is not supported; expected byte-level BPE as in GPT-2, Llama 3, Qwen or SmolLM, or "
                  "BPE with byte_fallback as in Llama 2, Mistral or Gemma; {}",
                  where_, what, BpeVocabulary::remedy));
  }

  // Are the tokens on both sides of the border of these two characters independent of each other?
  bool independent(std::string_view left, std::string_view right) const {
    std::string before, after;
    const std::string_view last = normalizer_.apply(left, TextPart::continuation, before),
                           first = normalizer_.apply(right, TextPart::continuation, after);
    if (last.empty() || first.empty()) return false;
    const std::string_view a = last.substr(utf8_before(last, last.size())), b = first.substr(0, utf8_width(first[0]));
    char32_t end = utf8_at(a, 0).code, begin = utf8_at(b, 0).code;
    const SplitAutomaton::Place place = pre_tokenizer_.between(end, begin);
    if (place == SplitAutomaton::Place::anything) return false;
    if (place == SplitAutomaton::Place::independent) {
      std::string end_text, begin_text;
      append_utf8(end_text, end);
      append_utf8(begin_text, begin);
      if (vocabulary_.joins(end_text, begin_text)) return false;
    }
    return !added_.cross(left, right) && !added_normalised_.cross(a, b);
  }

  // The text that a token of the vocabulary stands for.
  std::string decoded(std::string token, int32_t id) const {
    if (of_bytes()) return token;
    if (const std::optional<char> byte = vocabulary_.byte_of(id)) return std::string(1, *byte);
    for (const auto& [from, to] : replaced_) token = replaced(token, from, to);
    return token;
  }

  void read_decoder(const nlohmann::json& json) {
    const std::string type = type_of(json);
    if (type == "ByteLevel" && of_bytes()) return;
    if (of_bytes()) refuse("\"decoder\" " + type);
    auto replace = [this](const std::string& from, const std::string& to) {
      if (from.empty()) refuse("a \"decoder\" that replaces \"\"");
      replaced_.emplace_back(from, to);
    };
    if (type == "Sequence") {
      for (const nlohmann::json& one : json.at("decoders")) read_decoder(one);
    } else if (type == "Replace" && json.at("pattern").contains("String")) {
      replace(json.at("pattern").at("String"), json.at("content"));
    } else if (type == "Metaspace") {
      replace(json.value("replacement", "\u2581"), " ");
      strips_first_space_ |= prepend_scheme(json) != "never";
    } else if (type == "Strip" && json.at("content") == " " && json.at("start") == 1 && json.at("stop") == 0) {
      strips_first_space_ = true;
    } else if (type != "ByteFallback" && type != "Fuse") {
      refuse("\"decoder\" " + type);
    }
  }

  // The library gives them the vocabulary's ids, or those that follow its number of tokens, whatever the file says.
  void read_added_tokens(const nlohmann::json& added, const nlohmann::json& vocabulary) {
    const size_t most = BpeVocabulary::most_ids(tokens_.size() + added.size());
    std::map<std::string, int32_t> ids;  // of those that are not in the vocabulary
    for (const nlohmann::json& json : added) {
      const std::string content = json.at("content");
      const auto name = [&] { return formatted("{}: added token '{}'", where_, shown(content)); };
      const int32_t id = BpeVocabulary::id_of(json.at("id"), most, name),
                    next = narrow<int32_t>(std::ssize(vocabulary) + std::ssize(ids));
      const auto known = vocabulary.find(content);
      const int32_t theirs =
          known != vocabulary.end() ? known->get<int32_t>() : ids.try_emplace(content, next).first->second;
      CHECK(id == theirs, "{} has the id {}, but Hugging Face's library gives it {}: correct the file", name(), id,
            theirs);
      const auto i = static_cast<size_t>(id);
      const std::vector<std::string>& there = vocabulary_.tokens();
      CHECK(known != vocabulary.end() || i >= there.size() || there[i].empty(), "{} has the id {} of token '{}'",
            name(), id, shown(there[i]));
      read_added_token(json, content, id);
    }
  }
  void read_added_token(const nlohmann::json& json, const std::string& content, int32_t id) {
    const bool normalised = json.value("normalized", !json.value("special", false));
    std::string buffer;
    const AddedTokens::Token token{
        normalised ? std::string(normalizer_.apply(content, TextPart::beginning, buffer)) : content, id,
        json.value("lstrip", false), json.value("rstrip", false), json.value("special", false)};
    if (json.value("single_word", false)) refuse(formatted("added token '{}' with \"single_word\"", shown(content)));
    const size_t i = static_cast<size_t>(id);
    if (i >= tokens_.size()) tokens_.resize(i + 1);
    tokens_[i] = of_bytes() ? token.text
                            : content;  // kept as it is; the library reads U+00E9 in it as GPT-2's sign for byte 0xe9
    if (token.special) special_.insert(std::ranges::upper_bound(special_, id), id);
    (normalised ? added_normalised_ : added_).add(token);
  }

  void read_post_processor(const nlohmann::json& json) {
    const std::string type = type_of(json);
    if (type == "Sequence") {
      for (const nlohmann::json& one : json.at("processors")) read_post_processor(one);
    } else if (type == "TemplateProcessing") {
      for (const nlohmann::json& part : json.at("single")) {
        if (part.contains("Sequence")) break;  // what follows a text is not used
        const std::string& name = part.at("SpecialToken").at("id").get_ref<const std::string&>();
        for (const nlohmann::json& id : json.at("special_tokens").at(name).at("ids"))
          prefix_.push_back(BpeVocabulary::id_of(
              id, tokens_.size(), [&] { return formatted("{}: the template's token '{}'", where_, shown(name)); }));
      }
    } else if (type != "null" && type != "ByteLevel") {  // which only trims offsets; unused here
      refuse("\"post_processor\" " + type);
    }
  }

  std::string where_;
  BpeVocabulary vocabulary_;
  std::vector<std::string> tokens_;       // including the added ones
  AddedTokens added_, added_normalised_;  // found in the text as it is, and in the normalised text
  Normalizer normalizer_;
  PreTokenizer pre_tokenizer_;
  std::vector<std::pair<std::string, std::string>> replaced_;  // by the decoder
  bool strips_first_space_ = false;
  std::vector<int32_t> prefix_;
  std::vector<int32_t> special_;  // ascending
};

}  // namespace llmc
