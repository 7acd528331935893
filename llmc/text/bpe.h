// bpe.h: a BPE tokenizer as described by Hugging Face's tokenizer.json: of bytes, as GPT-2's, or of characters that are
// written as their bytes where they are no tokens, as SentencePiece's. Added tokens are cut out of the text; the text
// between them is normalised, split into pieces, and encoded piece by piece. Unknown kinds of these steps are refused
// by name. "truncation" and "padding" apply to batches and are ignored.
#pragma once
#include "text/added_tokens.h"
#include "text/bpe_encoder.h"
#include "text/pre_tokenizer.h"

namespace llmc {

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
      if (utf8_continues(text[before]) || utf8_continues(text[at]) || a.width != at - before ||
          std::max({a.code, b.code, next.code}) > last_character)
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
    const auto found = text.empty() ? tokens_.end()  // ids without a token have an empty text
                                    : std::find(tokens_.begin(), tokens_.end(), text);
    return found == tokens_.end() ? std::nullopt : std::optional(static_cast<int32_t>(found - tokens_.begin()));
  }

  // Does decoding drop one leading space?
  bool strips_first_space() const { return strips_first_space_; }

 private:
  static constexpr char32_t last_character = 0x10ffff;
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
    return pieces_independent(utf8_at(a, 0).code, utf8_at(b, 0).code) && !added_.cross(left, right) &&
           !added_normalised_.cross(a, b);
  }
  bool pieces_independent(char32_t a, char32_t b) const {
    const SplitAutomaton::Place place = pre_tokenizer_.between(a, b);
    if (place != SplitAutomaton::Place::independent) return place == SplitAutomaton::Place::boundary;
    std::string last, first;
    append_utf8(last, a);
    append_utf8(first, b);
    return !vocabulary_.joins(last, first);
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
      if (content.empty()) continue;  // as the library does
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
