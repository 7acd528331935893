// token_tables.h: the hash tables of a vocabulary: the ids of tokens by their texts, and which tokens merge.
#pragma once
#include <bit>

#include "core/shape.h"

namespace llmc {

// With open addressing. For most texts that are no tokens one memory access says so: places hold bits of the hash, too.
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

// Encoding mostly asks about pairs that do not merge, so a lookup is one access to a small table without collisions:
// each pair has its own place, with the rank of its merge beside ten bits by which other pairs are told apart. A number
// for each bucket of pairs sends them to their places (Belazzougui et al. 2009, "Hash, displace, and compress").
class MergeTable {
 public:
  struct Merge {
    int32_t left, right, merged;
  };
  static constexpr int rank_bits = 21;
  static constexpr int32_t no_rank = 1 << rank_bits;  // and the most merges

  // merges: in the order of their ranks. If a pair is there several times, the last one counts.
  explicit MergeTable(std::vector<Merge> merges = {}) : merges_(std::move(merges)) {
    std::vector<std::pair<uint64_t, uint32_t>> ranks;  // by hashes, which differ if pairs do
    for (const Merge& merge : merges_)
      ranks.emplace_back(hash_of(merge.left, merge.right), static_cast<uint32_t>(ranks.size()));
    std::ranges::sort(ranks);
    const auto same_pair = [](const auto& a, const auto& b) { return a.first == b.first; };
    ranks.erase(ranks.begin(), std::unique(ranks.rbegin(), ranks.rend(), same_pair).base());
    int bits = 6;
    while (size_t{4} << bits < 5 * ranks.size()) ++bits;  // at most 80% full
    while (!build(ranks, bits)) ++bits;
  }

  // The rank of the merge of two tokens; if they do not merge: no_rank, seldom any other (see is()).
  int32_t rank_of(int32_t left, int32_t right) const {
    const uint64_t hash = hash_of(left, right);
    const uint32_t entry = entries_[place_of(hash, displacements_[hash >> bucket_shift_])];
    return entry >> rank_bits == mark_of(hash) ? static_cast<int32_t>(entry & (no_rank - 1)) : no_rank;
  }
  bool is(int32_t rank, int32_t left, int32_t right) const {
    const Merge& merge = merges_[static_cast<size_t>(rank)];
    return merge.left == left && merge.right == right;
  }
  int32_t merged(int32_t rank) const { return merges_[static_cast<size_t>(rank)].merged; }

 private:
  // Different for different pairs: each step can be undone.
  static uint64_t hash_of(int32_t left, int32_t right) {
    const uint64_t pair = uint64_t{static_cast<uint32_t>(left)} << 32 | static_cast<uint32_t>(right);
    const uint64_t mixed = pair * 0x9e3779b97f4a7c15;
    return (mixed ^ mixed >> 32) * 0xd6e8feb86659fd93;
  }
  // Never 0: an entry of 0 is empty.
  static uint32_t mark_of(uint64_t hash) { return static_cast<uint32_t>(hash >> 10 & 0x7ff) | 1; }
  size_t place_of(uint64_t hash, uint64_t displacement) const {
    return static_cast<size_t>((hash >> 21) + displacement * (hash | 1)) & (entries_.size() - 1);
  }

  bool build(const std::vector<std::pair<uint64_t, uint32_t>>& ranks, int bits) {
    constexpr int bucket_bits = 2;  // for up to 3.2 pairs each
    bucket_shift_ = 64 - (bits - bucket_bits);
    entries_.assign(size_t{1} << bits, 0);
    displacements_.assign(entries_.size() >> bucket_bits, 0);
    std::vector<std::vector<std::pair<uint64_t, uint32_t>>> buckets(displacements_.size());
    for (const auto& [hash, rank] : ranks) buckets[hash >> bucket_shift_].emplace_back(hash, rank);
    std::vector<size_t> order(buckets.size());  // the largest first, while there is room
    std::iota(order.begin(), order.end(), size_t{0});
    std::ranges::stable_sort(order, [&](size_t a, size_t b) { return buckets[a].size() > buckets[b].size(); });
    return std::ranges::all_of(order, [&](size_t b) {
      for (uint32_t displacement = 0; displacement < 256; ++displacement) {
        displacements_[b] = static_cast<uint8_t>(displacement);
        size_t placed = 0;
        for (const auto& [hash, rank] : buckets[b]) {
          uint32_t& entry = entries_[place_of(hash, displacement)];
          if (entry != 0) break;
          entry = mark_of(hash) << rank_bits | rank;
          ++placed;
        }
        if (placed == buckets[b].size()) return true;
        while (placed > 0) entries_[place_of(buckets[b][--placed].first, displacement)] = 0;
      }
      return false;
    });
  }

  std::vector<Merge> merges_;  // by rank
  int bucket_shift_ = 0;
  std::vector<uint8_t> displacements_;
  std::vector<uint32_t> entries_;
};

}  // namespace llmc
