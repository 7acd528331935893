// token_table.h: the ids of tokens by their texts: a hash table with open addressing.
#pragma once
#include <algorithm>
#include <cstdint>
#include <functional>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

#include "core/shape.h"

namespace llmc {

class TokenTable {
 public:
  explicit TokenTable(size_t most = 0) {
    size_t size = 16;
    while (size < 2 * most) size *= 2;
    entries_.resize(size);
  }

  // Replaces the id that the text had.
  void add(std::string_view text, int32_t id) {
    const uint32_t hash = hash_of(text);
    Entry& entry = entries_[place_of(text, hash)];
    if (entry.id < 0) {
      entry = {hash, narrow<uint32_t>(std::ssize(texts_)), narrow<uint32_t>(std::ssize(text)), id};
      texts_ += text;
      longest_ = std::max(longest_, text.size());
    }
    entry.id = id;
  }
  std::optional<int32_t> find(std::string_view text) const {
    if (text.size() > longest_) return std::nullopt;
    const int32_t id = entries_[place_of(text, hash_of(text))].id;
    return id < 0 ? std::nullopt : std::optional(id);
  }

 private:
  struct Entry {
    uint32_t hash, begin, length;  // of the text, in texts_
    int32_t id = -1;               // -1: empty
  };
  static uint32_t hash_of(std::string_view text) { return static_cast<uint32_t>(std::hash<std::string_view>()(text)); }
  // Where the text is, or would be.
  size_t place_of(std::string_view text, uint32_t hash) const {
    for (size_t i = hash & (entries_.size() - 1);; i = (i + 1) & (entries_.size() - 1)) {
      const Entry& entry = entries_[i];
      if (entry.id < 0 || (entry.hash == hash && std::string_view(texts_).substr(entry.begin, entry.length) == text))
        return i;
    }
  }

  std::vector<Entry> entries_;
  std::string texts_;
  size_t longest_ = 0;
};

}  // namespace llmc
