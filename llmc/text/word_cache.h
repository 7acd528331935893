// word_cache.h: the tokens of words that were encoded before, because a text has few distinct words. A word has two
// places beside each other: new words take the second one, and those that come again move to the first, so that words
// that come once displace no others. The cache never grows. Where a word would be is known before it is looked up, so
// that its cache lines can be fetched while other words are encoded.
#pragma once
#include "core/std.h"

namespace llmc {

template <size_t Words>
class WordCache {
 public:
  static constexpr size_t longest = 8 * Words - 1, most_ids = 2 * Words - 1;
  using Key = std::array<uint64_t, Words>;  // the bytes of a word, zeros, and in the last byte its length
  struct Entry {
    Key key{};                                // length 0: empty
    std::array<int32_t, most_ids + 1> ids{};  // the last one is their number
  };
  struct alignas(64) Set {
    std::array<Entry, 2> entries{};
  };
  struct Place {
    Key key;
    Set* set;
  };

  explicit WordCache(int bits) : shift_(64 - bits), sets_(size_t{1} << bits) {}

  // Where a word of 1 to `longest` bytes would be. `end`: the bytes before it can be read; `kind`: 0, or 1 for words
  // that have other tokens than the same words of kind 0.
  Place place_of(std::string_view word, const char* end, uint64_t kind = 0) {
    Key key;
    if (static_cast<size_t>(end - word.data()) >= sizeof key) {
      Key mask;
      std::memcpy(&key, word.data(), sizeof key);
      std::memcpy(&mask, ones_then_zeros.data() + sizeof key - word.size(), sizeof mask);
      for (size_t i = 0; i < Words; ++i) key[i] &= mask[i];
    } else {
      key = {};
      std::memcpy(&key, word.data(), word.size());
    }
    key.back() |= uint64_t{word.size()} << 56 | kind << 63;
    uint64_t hash = 0;
    for (size_t i = 0; i < Words; ++i) hash ^= key[i] * multipliers[i];
    return {key, &sets_[((hash ^ hash >> 32) * 0x9e3779b97f4a7c15) >> shift_]};
  }
  static void prefetch(const Place& place) {
    for (size_t at = 0; at < sizeof(Set); at += 64) __builtin_prefetch(reinterpret_cast<const char*>(place.set) + at);
  }

  // Null: the word is not there.
  static const Entry* find(const Place& place) {
    auto& [first, second] = place.set->entries;
    if (same(first.key, place.key)) return &first;
    if (!same(second.key, place.key)) return nullptr;
    std::swap(first, second);
    return &first;
  }
  // ids: at most most_ids.
  static void add(const Place& place, const int32_t* ids, size_t count) {
    Entry& entry = place.set->entries[1];
    entry.key = place.key;
    std::copy_n(ids, count, entry.ids.begin());
    entry.ids.back() = static_cast<int32_t>(count);
  }

 private:
  // Without the call that == is.
  static bool same(const Key& a, const Key& b) {
    uint64_t differences = 0;
    for (size_t i = 0; i < Words; ++i) differences |= a[i] ^ b[i];
    return differences == 0;
  }
  static constexpr std::array<uint64_t, 4> multipliers = {0x9e3779b97f4a7c15, 0xd6e8feb86659fd93, 0xa0761d6478bd642f,
                                                          0xe7037ed1a0b428db};
  static constexpr std::array<unsigned char, 2 * sizeof(Key)> ones_then_zeros = [] {
    std::array<unsigned char, 2 * sizeof(Key)> bytes{};
    std::fill_n(bytes.begin(), sizeof(Key), static_cast<unsigned char>(0xff));
    return bytes;
  }();
  int shift_;
  std::vector<Set> sets_;
};

}  // namespace llmc
