// word_cache.h: the tokens of words that were encoded before, because a text has few distinct words. A word has two
// places, in one cache line or two, and the word looked up longest ago gives way; so lookups touch little memory, and
// the cache never grows.
#pragma once
#include <algorithm>
#include <array>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <string_view>
#include <utility>
#include <vector>

namespace llmc {

// 64-bit words that hold a text of at most 8 * Words bytes; with its length they determine it.
template <size_t Words>
std::array<uint64_t, Words> packed_text(std::string_view text) {
  std::array<uint64_t, Words> key{};
  const char* const at = text.data();
  const size_t n = text.size();
  auto load = [&](size_t from, auto value) {
    std::memcpy(&value, at + from, sizeof value);
    return uint64_t{value};
  };
  if (n >= 8) {  // the last 8 bytes may be in two of them
    for (size_t i = 0; i < Words && 8 * i < n; ++i) key[i] = load(std::min(8 * i, n - 8), uint64_t{});
  } else if (n >= 4) {
    key[0] = load(0, uint32_t{}) | load(n - 4, uint32_t{}) << 32;
  } else if (n > 0) {
    key[0] = load(0, uint8_t{}) | load(n / 2, uint8_t{}) << 8 | load(n - 1, uint8_t{}) << 16;
  }
  return key;
}

template <size_t Words, size_t Ids>
class WordCache {
 public:
  static constexpr size_t longest = 8 * Words, most_ids = Ids;
  struct Entry {
    std::array<uint64_t, Words> key;
    uint8_t length = 0, count = 0;  // length 0: empty
    std::array<int32_t, Ids> ids;
  };

  explicit WordCache(int bits) : shift_(64 - bits), entries_(size_t{2} << bits) {}

  // The entry of a word of 1 to `longest` bytes; null: it is not there.
  const Entry* find(std::string_view word) {
    const auto key = packed_text<Words>(word);
    Entry* const set = set_of(key, word.size());
    for (Entry* entry : {set, set + 1})
      if (entry->length == word.size() && entry->key == key) return entry;
    return nullptr;
  }
  // ids: at most most_ids.
  void add(std::string_view word, const int32_t* ids, size_t count) {
    const auto key = packed_text<Words>(word);
    Entry* const set = set_of(key, word.size());
    set[1] = set[0];
    set[0].key = key;
    set[0].length = static_cast<uint8_t>(word.size());
    set[0].count = static_cast<uint8_t>(count);
    std::copy_n(ids, count, set[0].ids.begin());
  }

 private:
  Entry* set_of(const std::array<uint64_t, Words>& key, size_t length) {
    uint64_t hash = length;
    for (const uint64_t word : key) hash = ((hash ^ word) * 0x9e3779b97f4a7c15) ^ (hash >> 29);
    return &entries_[2 * ((hash * 0xd6e8feb86659fd93) >> shift_)];
  }
  int shift_;
  std::vector<Entry> entries_;
};

}  // namespace llmc
