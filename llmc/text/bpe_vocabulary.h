// bpe_vocabulary.h: the tokens and merges of byte pair encoding (Sennrich et al. 2016): a piece of text starts as its
// smallest symbols; adjacent pairs merge in the order in which training found them. The symbols are bytes (Radford et
// al. 2019), or characters, of which those that are no tokens are written as bytes (SentencePiece's byte_fallback).
#pragma once
#include <unordered_map>

#include "core/json.h"
#include "text/token_tables.h"
#include "text/unicode.h"

namespace llmc {

// GPT-2 writes each byte as a visible character: the byte itself if visible, otherwise the next of U+0100, U+0101, ....
inline const std::array<char32_t, 256>& byte_level_characters() {
  static const std::array<char32_t, 256> characters = [] {
    std::array<char32_t, 256> all{};
    char32_t next = 0x100;
    for (size_t byte = 0; byte < 256; ++byte) {
      const bool visible = (byte > 0x20 && byte < 0x7f) || (byte > 0xa0 && byte != 0xad);
      all[byte] = visible ? static_cast<char32_t>(byte) : next++;
    }
    return all;
  }();
  return characters;
}

// Bytes as a token of a byte-level vocabulary.
inline std::string byte_level_text(std::string_view bytes) {
  std::string text;
  for (const unsigned char byte : bytes) append_utf8(text, byte_level_characters()[byte]);
  return text;
}

// The bytes that a token of a byte-level vocabulary stands for. None: the token holds another character.
inline std::optional<std::string> bytes_of_byte_level(std::string_view token) {
  static const std::unordered_map<char32_t, char> byte_of = [] {
    std::unordered_map<char32_t, char> map;
    for (size_t byte = 0; byte < 256; ++byte) map[byte_level_characters()[byte]] = static_cast<char>(byte);
    return map;
  }();
  std::string bytes;
  for (size_t at = 0; at < token.size();) {
    const Utf8Character c = utf8_at(token, at);
    const auto found = byte_of.find(c.code);
    if (found == byte_of.end()) return std::nullopt;
    bytes += found->second;
    at += c.width;
  }
  return bytes;
}

class BpeVocabulary {
 public:
  enum class Symbols : uint8_t { bytes, characters };
  // What to do without a tokenizer that is not supported.
  static constexpr const char* remedy =
      "--tokenizer bytes trains on tokens made elsewhere, but prints unreadable samples";

  // `model`: "model" of a tokenizer.json; errors begin with `where`.
  BpeVocabulary(const nlohmann::json& model, const std::string& where) : where_(where) {
    check_kind(model);
    id_of_ascii_.fill(-1);
    id_of_byte_.fill(-1);
    const auto is_true = [&](const char* field) {
      const nlohmann::json value = model.value(field, nlohmann::json());
      return !value.is_null() && value.get<bool>();
    };
    id_of_ = TokenTable(model.at("vocab").size());
    symbols_ = is_true("byte_fallback") ? Symbols::characters : Symbols::bytes;
    TokenTable ids(model.at("vocab").size());  // as the file writes them
    const size_t most = most_ids(model.at("vocab").size());
    for (const auto& [token, json] : model.at("vocab").items()) {
      const int32_t id = id_of(json, most, [&, &token = token] {
        return formatted("{}: token '{}' of the vocabulary", where_, shown(token));
      });
      ids.add(token, id);
      if (static_cast<size_t>(id) >= tokens_.size()) tokens_.resize(static_cast<size_t>(id) + 1);
      add(token, id);
    }
    for (size_t byte = 0; symbols_ == Symbols::characters && byte < 256; ++byte)
      CHECK(id_of_byte_[byte] >= 0, "{}: \"byte_fallback\" needs a token for every byte, and there is no {}", where_,
            byte_name(byte));
    read_merges(model.at("merges"), ids);
    find_ranks_of_bytes();
    whole_pieces_first_ = is_true("ignore_merges");
  }

  // The most ids that `tokens` tokens may use: ids may have gaps, but a table of all of them must fit into memory.
  static size_t most_ids(size_t tokens) { return tokens + (1 << 16); }
  // An id below `most`; errors begin with what().
  template <class What>
  static int32_t id_of(const nlohmann::json& json, size_t most, What&& what) {
    const std::optional<int64_t> id = whole_number(json);
    CHECK(id && static_cast<size_t>(*id) < most, "{} has the id {}, expected a whole number below {}", what(), json,
          most);
    return narrow<int32_t>(*id);
  }

  // The text of each id: bytes, or with characters as symbols the text before the decoder. Empty: no such token.
  const std::vector<std::string>& tokens() const { return tokens_; }
  Symbols symbols() const { return symbols_; }
  // The byte that a token <0x00> of a vocabulary of characters stands for.
  std::optional<char> byte_of(int32_t id) const {
    if (symbols_ == Symbols::bytes) return std::nullopt;
    const auto found = std::ranges::find(id_of_byte_, id);
    return found == id_of_byte_.end() ? std::nullopt : std::optional(static_cast<char>(found - id_of_byte_.begin()));
  }

  const MergeTable& merges() const { return merges_; }
  // The rank of the merge of two bytes' tokens, in a vocabulary of bytes.
  int32_t rank_of_bytes(char left, char right) const {
    return rank_of_bytes_[static_cast<size_t>(static_cast<unsigned char>(left)) << 8 |
                          static_cast<unsigned char>(right)];
  }
  // The token that a whole piece is at once, whatever the merges (Llama 3).
  std::optional<int32_t> whole(std::string_view piece) const {
    return whole_pieces_first_ ? id_of_.find(piece) : std::nullopt;
  }
  bool whole_pieces_first() const { return whole_pieces_first_; }

  // Passes on the symbols of a piece.
  template <class F>
  void for_each_symbol(std::string_view piece, F&& f) const {
    for (size_t at = 0; at < piece.size();) {
      const size_t width = symbols_ == Symbols::bytes ? 1 : utf8_at(piece, at).width;
      const int32_t known = width == 1 ? id_of_ascii_[static_cast<unsigned char>(piece[at])] : -1;
      if (known >= 0) f(known);
      else if (const auto id = width > 1 ? id_of_.find(piece.substr(at, width)) : std::nullopt) f(*id);
      else
        for (size_t i = at; i < at + width; ++i) f(id_of_byte(piece[i]));
      at += width;
    }
  }

  // May a merge join texts of which one ends in the character `a` and the other begins with `b`? If not, merges on
  // either side of their border do not depend on each other.
  bool merges_join(std::string_view a, std::string_view b) const {
    for (size_t first = a.size(); first-- > 0;)
      for (size_t n = 1; n <= b.size(); ++n)
        if (joins_[bit_of(number_of(a.substr(first)), number_of(b.substr(0, n)))]) return true;
    return joins_all_;
  }
  // The same for tokens, which may be whole pieces without merges.
  bool joins(std::string_view a, std::string_view b) const { return whole_pieces_first_ || merges_join(a, b); }

 private:
  static std::string byte_name(size_t byte) { return detail::printf_string("<0x%02X>", static_cast<unsigned>(byte)); }

  void check_kind(const nlohmann::json& model) const {
    const nlohmann::json none;
    auto refuse_unless = [&](bool good, const char* field, const char* expected) {
      CHECK(good,
            "{}: the model has \"{}\": {}, expected {}: only BPE of bytes, or with byte_fallback, is supported; {}",
            where_, field, model.value(field, none), expected, remedy);
    };
    CHECK(model.is_object(), "{}: has no \"model\": not a Hugging Face tokenizer.json", where_);
    const nlohmann::json type = model.value("type", none), dropout = model.value("dropout", none);
    refuse_unless(type == "BPE" || (type.is_null() && model.contains("merges")), "type", "\"BPE\"");
    refuse_unless(dropout.is_null() || dropout == 0, "dropout", "null");
    for (const char* field : {"continuing_subword_prefix", "end_of_word_suffix"})
      refuse_unless(model.value(field, none).is_null() || model[field] == "", field, "null or \"\"");
  }

  void add(const std::string& token, int32_t id) {
    if (symbols_ == Symbols::bytes) {
      const std::optional<std::string> bytes = bytes_of_byte_level(token);
      tokens_[static_cast<size_t>(id)] = bytes.value_or(token);  // none: the text stands for itself
      if (!bytes) return;
      id_of_.add(*bytes, id);
      if (bytes->size() != 1) return;
      const auto byte = static_cast<unsigned char>((*bytes)[0]);
      id_of_ascii_[byte] = id_of_byte_[byte] = id;
    } else {
      tokens_[static_cast<size_t>(id)] = token;
      id_of_.add(token, id);
      if (token.size() == 1) id_of_ascii_[static_cast<unsigned char>(token[0])] = id;
      for (size_t byte = 0; token.size() == 6 && token.starts_with("<0x") && byte < 256; ++byte)
        if (token == byte_name(byte)) id_of_byte_[byte] = id;
    }
  }

  // Two forms: "a b", and ["a", "b"].
  void read_merges(const nlohmann::json& merges, const TokenTable& ids) {
    CHECK(merges.size() <= size_t{MergeTable::no_rank}, "{}: {} merges, expected at most {}", where_, merges.size(),
          MergeTable::no_rank);
    std::vector<MergeTable::Merge> all;
    for (const nlohmann::json& merge : merges) {
      std::string_view a, b;
      if (merge.is_string()) {
        const std::string_view text = merge.get_ref<const std::string&>();
        if (text.starts_with("#version")) continue;
        const size_t space = std::min(text.find(' '), text.size());
        a = text.substr(0, space);
        b = text.substr(std::min(space + 1, text.size()));
      } else if (merge.is_array() && merge.size() == 2 && merge[0].is_string() && merge[1].is_string()) {
        a = merge[0].get_ref<const std::string&>();
        b = merge[1].get_ref<const std::string&>();
      }
      CHECK(!a.empty() && !b.empty() && (merge.is_array() || b.find(' ') == b.npos),
            "{}: merge {} is {}, expected \"a b\" or [\"a\", \"b\"]", where_, all.size(), merge);
      auto id = [&](std::string_view token) {
        const std::optional<int32_t> found = ids.find(token);
        CHECK(found, "{}: merge {}, {}: the token '{}' is not in the vocabulary; the file is damaged", where_,
              all.size(), merge, shown(token));
        return *found;
      };
      const int32_t left = id(a), right = id(b);
      all.push_back({left, right, id(std::string(a) += b)});
      note_join(left, right);
    }
    merges_ = MergeTable(std::move(all));
  }

  // Notes the two characters that a merge joins; tokens may also be the last bytes of one, or the first of the other.
  void note_join(int32_t left, int32_t right) {
    if (byte_of(left) || byte_of(right)) joins_all_ = true;
    const std::string_view a = tokens_[static_cast<size_t>(left)], b = tokens_[static_cast<size_t>(right)];
    size_t last = a.size() - 1;
    while (last > 0 && utf8_continues(a[last]) && a.size() - last < 4) --last;
    if (a.size() - last < utf8_width(a[last]) || utf8_continues(b[0])) return;  // only within characters
    joins_[bit_of(number_of(a.substr(last)), number_of(b.substr(0, utf8_width(b[0]))))] = true;
  }
  static uint32_t number_of(std::string_view bytes) {
    uint32_t number = 0;
    for (const char byte : bytes) number = number << 8 | static_cast<unsigned char>(byte);
    return number;
  }
  static size_t bit_of(uint32_t a, uint32_t b) {
    return static_cast<size_t>(((uint64_t{a} << 32 | b) * 0x9e3779b97f4a7c15) >> (64 - joins_bits));
  }

  void find_ranks_of_bytes() {
    if (symbols_ != Symbols::bytes) return;
    rank_of_bytes_.assign(size_t{1} << 16, MergeTable::no_rank);
    for (size_t a = 0; a < 256; ++a)
      for (size_t b = 0; b < 256; ++b) {
        const int32_t left = id_of_byte_[a], right = id_of_byte_[b], rank = merges_.rank_of(left, right);
        if (rank != MergeTable::no_rank && merges_.is(rank, left, right)) rank_of_bytes_[a << 8 | b] = rank;
      }
  }

  int32_t id_of_byte(char byte) const {
    const int32_t id = id_of_byte_[static_cast<unsigned char>(byte)];
    CHECK(id >= 0, "{}: the vocabulary has no token for byte {}, which is in the text", where_,
          static_cast<int>(static_cast<unsigned char>(byte)));
    return id;
  }

  std::string where_;
  Symbols symbols_ = Symbols::bytes;
  std::vector<std::string> tokens_;
  TokenTable id_of_;
  std::array<int32_t, 256> id_of_ascii_, id_of_byte_;  // of symbols of one byte, of bytes; -1: none
  MergeTable merges_;
  std::vector<int32_t> rank_of_bytes_;  // 256 x 256
  bool whole_pieces_first_ = false;
  // By a hash of the two: another pair's bit may stand for this one; a collision only costs one cut.
  static constexpr int joins_bits = 20;
  std::vector<bool> joins_ = std::vector<bool>(size_t{1} << joins_bits);
  bool joins_all_ = false;
};

}  // namespace llmc
