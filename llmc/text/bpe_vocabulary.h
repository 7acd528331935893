// bpe_vocabulary.h: byte pair encoding (Sennrich et al. 2016) over bytes (Radford et al. 2019): a piece of text starts
// as its bytes, and adjacent pairs are merged in the order in which training found them.
#pragma once
#include <algorithm>
#include <array>
#include <cstdint>
#include <functional>
#include <nlohmann/json.hpp>
#include <optional>
#include <string>
#include <string_view>
#include <unordered_map>
#include <vector>

#include "core/check.h"
#include "core/json.h"
#include "core/shape.h"
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
  struct Hash : std::hash<std::string_view> {
    using is_transparent = void;  // lookup by std::string_view
  };

 public:
  // `model`: "model" of a tokenizer.json; errors begin with `where`.
  BpeVocabulary(const nlohmann::json& model, const std::string& where) : where_(where) {
    check_kind(model);
    std::unordered_map<std::string, int32_t> ids;
    const size_t most = most_ids(model.at("vocab").size());
    for (const auto& [token, json] : model.at("vocab").items()) {
      const int32_t id = id_of(json, most, formatted("{}: token '{}' of the vocabulary", where_, shown(token)));
      ids[token] = id;
      if (static_cast<size_t>(id) >= tokens_.size()) tokens_.resize(static_cast<size_t>(id) + 1);
      const std::optional<std::string> bytes = bytes_of_byte_level(token);
      tokens_[static_cast<size_t>(id)] = bytes.value_or(token);  // none: the text stands for itself
      if (!bytes) continue;
      id_of_[*bytes] = id;
      if (bytes->size() == 1) id_of_byte_[static_cast<unsigned char>((*bytes)[0])] = id;
    }
    read_merges(model.at("merges"), ids);
    whole_pieces_first_ = model.value("ignore_merges", false);
  }

  // The most ids that `tokens` tokens may use: ids may have gaps, but a table of all of them must fit into memory.
  static size_t most_ids(size_t tokens) { return tokens + (1 << 16); }
  // An id below `most`; errors begin with `what`.
  static int32_t id_of(const nlohmann::json& json, size_t most, const std::string& what) {
    const std::optional<int64_t> id = whole_number(json);
    CHECK(id && static_cast<size_t>(*id) < most, "{} has the id {}, expected a whole number below {}", what, json,
          most);
    return narrow<int32_t>(*id);
  }

  // The text of each id; empty: no such token.
  const std::vector<std::string>& tokens() const { return tokens_; }

  // Appends the tokens of pieces of text. Remembers pieces, because a text has few distinct words.
  class Encoder {
   public:
    explicit Encoder(const BpeVocabulary& vocabulary) : vocabulary_(vocabulary) {}

    // out += the tokens of a piece.
    void append(std::string_view piece, std::vector<int32_t>& out) {
      if (piece.size() > longest_remembered) return append_new(piece, out);
      if (const auto known = known_.find(piece); known != known_.end()) {
        out.insert(out.end(), known->second.begin(), known->second.end());
        return;
      }
      const auto begin = static_cast<std::ptrdiff_t>(out.size());
      append_new(piece, out);
      if (known_.size() < most_remembered) known_.emplace(piece, std::vector(out.begin() + begin, out.end()));
    }

   private:
    static constexpr size_t longest_remembered = 64, most_remembered = 1 << 18;
    struct Symbol {
      int32_t id, before, after;  // neighbours; -1: none. id -1: merged into the one before
    };
    struct Candidate {
      int32_t rank, left, merged;
      uint64_t ids;  // both symbols' ids when the candidate was found
      // Lower ranks first, equal ranks from left to right.
      bool operator>(const Candidate& o) const { return rank != o.rank ? rank > o.rank : left > o.left; }
    };

    void append_new(std::string_view piece, std::vector<int32_t>& out) {
      if (vocabulary_.whole_pieces_first_)
        if (const auto whole = vocabulary_.id_of_.find(piece); whole != vocabulary_.id_of_.end())
          return out.push_back(whole->second);
      const int32_t n = narrow<int32_t>(static_cast<int64_t>(piece.size()));
      symbols_.resize(piece.size());
      for (int32_t i = 0; i < n; ++i)
        at(i) = {vocabulary_.id_of_byte(piece[static_cast<size_t>(i)]), i - 1, i + 1 < n ? i + 1 : -1};
      heap_.clear();
      for (int32_t i = 0; i + 1 < n; ++i) consider(i);
      std::make_heap(heap_.begin(), heap_.end(), std::greater<>());
      merge_all();
      for (int32_t i = n > 0 ? 0 : -1; i >= 0; i = at(i).after) out.push_back(at(i).id);
    }

    // A heap of candidates over a linked list of symbols; stale candidates are skipped. O(n log n) for pieces of any
    // length.
    void merge_all() {
      while (!heap_.empty()) {
        std::pop_heap(heap_.begin(), heap_.end(), std::greater<>());
        const Candidate c = heap_.back();
        heap_.pop_back();
        Symbol& left = at(c.left);
        if (left.id < 0 || left.after < 0 || pair(left.id, at(left.after).id) != c.ids) continue;
        Symbol& right = at(left.after);
        left.id = c.merged;
        left.after = right.after;
        right.id = -1;
        if (left.after >= 0) at(left.after).before = c.left;
        if (consider(left.before)) std::push_heap(heap_.begin(), heap_.end(), std::greater<>());
        if (consider(c.left)) std::push_heap(heap_.begin(), heap_.end(), std::greater<>());
      }
    }

    // Appends the pair of a symbol and its successor to the heap, if they merge; the caller restores the heap order.
    bool consider(int32_t left) {
      if (left < 0 || at(left).after < 0) return false;
      const uint64_t ids = pair(at(left).id, at(at(left).after).id);
      const auto merge = vocabulary_.merges_.find(ids);
      if (merge == vocabulary_.merges_.end()) return false;
      heap_.push_back({merge->second.rank, left, merge->second.id, ids});
      return true;
    }
    Symbol& at(int32_t i) { return symbols_[static_cast<size_t>(i)]; }

    const BpeVocabulary& vocabulary_;
    std::unordered_map<std::string, std::vector<int32_t>, Hash, std::equal_to<>> known_;
    std::vector<Symbol> symbols_;
    std::vector<Candidate> heap_;
  };

 private:
  struct Merge {
    int32_t rank, id;
  };
  static uint64_t pair(int32_t a, int32_t b) {
    return uint64_t{static_cast<uint32_t>(a)} << 32 | static_cast<uint32_t>(b);
  }

  void check_kind(const nlohmann::json& model) const {
    const nlohmann::json none;
    auto refuse_unless = [&](bool good, const char* field, const char* expected) {
      CHECK(good,
            "{}: the model has \"{}\": {}, expected {}: only byte-level BPE is supported; --tokenizer bytes trains on "
            "tokens made elsewhere, but prints unreadable samples",
            where_, field, model.value(field, none), expected);
    };
    CHECK(model.is_object(), "{}: has no \"model\": not a Hugging Face tokenizer.json", where_);
    const nlohmann::json type = model.value("type", none), dropout = model.value("dropout", none);
    refuse_unless(type == "BPE" || (type.is_null() && model.contains("merges")), "type", "\"BPE\"");
    refuse_unless(dropout.is_null() || dropout == 0, "dropout", "null");
    for (const char* field : {"continuing_subword_prefix", "end_of_word_suffix"})
      refuse_unless(model.value(field, none).is_null() || model[field] == "", field, "null or \"\"");
    refuse_unless(!model.value("byte_fallback", false), "byte_fallback", "false");
  }

  // Two forms: "a b", and ["a", "b"].
  void read_merges(const nlohmann::json& merges, const std::unordered_map<std::string, int32_t>& ids) {
    int32_t rank = 0;
    for (const nlohmann::json& merge : merges) {
      std::string a, b;
      if (merge.is_string()) {
        const std::string& text = merge.get_ref<const std::string&>();
        if (text.starts_with("#version")) continue;
        const size_t space = std::min(text.find(' '), text.size());
        a = text.substr(0, space);
        b = text.substr(std::min(space + 1, text.size()));
      } else if (merge.is_array() && merge.size() == 2 && merge[0].is_string() && merge[1].is_string()) {
        a = merge[0];
        b = merge[1];
      }
      CHECK(!a.empty() && !b.empty() && (merge.is_array() || b.find(' ') == b.npos),
            "{}: merge {} is {}, expected \"a b\" or [\"a\", \"b\"]", where_, rank, merge);
      auto id = [&](const std::string& token) {
        const auto found = ids.find(token);
        CHECK(found != ids.end(), "{}: merge {}, {}: the token '{}' is not in the vocabulary; the file is damaged",
              where_, rank, merge, shown(token));
        return found->second;
      };
      const int32_t left = id(a), right = id(b);
      merges_[pair(left, right)] = {rank, id(a + b)};
      ++rank;
    }
  }

  int32_t id_of_byte(char byte) const {
    const int32_t id = id_of_byte_[static_cast<unsigned char>(byte)];
    CHECK(id >= 0, "{}: the vocabulary has no token for byte {}, which is in the text", where_,
          static_cast<int>(static_cast<unsigned char>(byte)));
    return id;
  }

  std::string where_;
  std::vector<std::string> tokens_;
  std::unordered_map<std::string, int32_t, Hash, std::equal_to<>> id_of_;  // by bytes
  std::array<int32_t, 256> id_of_byte_ = [] {
    std::array<int32_t, 256> none;
    none.fill(-1);
    return none;
  }();
  std::unordered_map<uint64_t, Merge> merges_;
  bool whole_pieces_first_ = false;
};

}  // namespace llmc
