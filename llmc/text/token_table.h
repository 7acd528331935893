// token_table.h: the ids of tokens by their texts: a hash table with open addressing. For most texts that are not
// tokens, one memory access says so, because places hold some bits of the hash, too.
#pragma once
#include <bit>

#include "core/shape.h"

namespace llmc {

class TokenTable {
 public:
  // most: how many tokens it can hold
  explicit TokenTable(size_t most = 0) {
    CHECK(most <= number_mask, "{} tokens, expected at most {}", most, number_mask);
    places_.resize(std::bit_ceil(std::max<size_t>(16, 2 * most)));
  }

  // Replaces the id that the text had.
  void add(std::string_view text, int32_t id) {
    const uint64_t hash = hash_of(text);
    uint32_t& place = places_[place_of(text, hash)];
    if (place == 0) {
      tokens_.push_back({narrow<uint32_t>(std::ssize(texts_)), narrow<uint32_t>(std::ssize(text)), id});
      place = mark_of(hash) | static_cast<uint32_t>(tokens_.size());
      texts_ += text;
      longest_ = std::max(longest_, text.size());
    }
    tokens_[(place & number_mask) - 1].id = id;
  }
  std::optional<int32_t> find(std::string_view text) const {
    if (text.size() > longest_) return std::nullopt;
    const uint32_t place = places_[place_of(text, hash_of(text))];
    return place == 0 ? std::nullopt : std::optional(tokens_[(place & number_mask) - 1].id);
  }

 private:
  static constexpr uint32_t number_mask = (1 << 24) - 1;
  struct Token {
    uint32_t begin, length;  // in texts_
    int32_t id;
  };

  static uint64_t hash_of(std::string_view text) { return std::hash<std::string_view>()(text); }
  static uint32_t mark_of(uint64_t hash) { return static_cast<uint32_t>(hash >> 40) & ~number_mask; }
  // Where the text is, or would be.
  size_t place_of(std::string_view text, uint64_t hash) const {
    for (size_t i = hash & (places_.size() - 1);; i = (i + 1) & (places_.size() - 1)) {
      if (places_[i] == 0) return i;
      if ((places_[i] & ~number_mask) != mark_of(hash)) continue;
      const Token& token = tokens_[(places_[i] & number_mask) - 1];
      if (std::string_view(texts_).substr(token.begin, token.length) == text) return i;
    }
  }

  std::vector<uint32_t> places_;  // the number of a token, from 1, and bits of its hash; 0: empty
  std::vector<Token> tokens_;
  std::string texts_;
  size_t longest_ = 0;
};

}  // namespace llmc
