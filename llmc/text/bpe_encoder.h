// bpe_encoder.h: pieces of text to tokens, by the merges of a BpeVocabulary and from memory.
#pragma once
#include <algorithm>
#include <cstdint>
#include <functional>
#include <limits>
#include <optional>
#include <string_view>
#include <vector>

#include "text/bpe_vocabulary.h"
#include "text/word_cache.h"

namespace llmc {

class BpeEncoder {
 public:
  // Remembers about 2^cache_bits words.
  BpeEncoder(const BpeVocabulary& vocabulary, int cache_bits)
      : vocabulary_(vocabulary), short_words_(cache_bits - 1), long_words_(cache_bits - 3) {}

  // out += the tokens of a piece. A long one, such as a whole text without a pre-tokenizer, is cut where no merge joins
  // what is on either side.
  void append(std::string_view piece, std::vector<int32_t>& out) {
    if (piece.size() <= long_words_.longest && vocabulary_.symbols() == BpeVocabulary::Symbols::bytes)
      return append_word(piece, out);
    size_t cut = 0;
    char32_t last = 0;
    for (size_t at = 0; at < piece.size();) {
      const Utf8Character c = vocabulary_.symbols() == BpeVocabulary::Symbols::bytes
                                  ? Utf8Character{static_cast<unsigned char>(piece[at]), 1}
                                  : utf8_at(piece, at);
      if (at > cut && !vocabulary_.joins(last, c.code)) {
        append_word(piece.substr(cut, at - cut), out);
        cut = at;
      }
      last = c.code;
      at += c.width;
    }
    if (cut < piece.size()) append_word(piece.substr(cut), out);
  }

 private:
  void append_word(std::string_view piece, std::vector<int32_t>& out) {
    if (piece.size() <= short_words_.longest)
      if (const auto* known = short_words_.find(piece)) return append_known(*known, out);
    if (piece.size() <= long_words_.longest)
      if (const auto* known = long_words_.find(piece)) return append_known(*known, out);
    const size_t begin = out.size();
    append_new(piece, out);
    const size_t count = out.size() - begin;
    if (piece.empty()) return;
    if (piece.size() <= short_words_.longest && count <= short_words_.most_ids)
      short_words_.add(piece, out.data() + begin, count);
    else if (piece.size() <= long_words_.longest && count <= long_words_.most_ids)
      long_words_.add(piece, out.data() + begin, count);
  }

  static constexpr size_t few = 32;  // symbols of which the best pair is sought one by one
  struct Symbol {
    int32_t id, before, after;  // neighbours; -1: none. id -1: merged into the one before
  };
  struct Candidate {
    int32_t rank, left, merged;
    uint64_t ids;  // both symbols' ids when the candidate was found
    // Lower ranks first, equal ranks from left to right.
    bool operator>(const Candidate& o) const { return rank != o.rank ? rank > o.rank : left > o.left; }
  };

  template <class Entry>
  static void append_known(const Entry& entry, std::vector<int32_t>& out) {
    const size_t at = out.size();
    out.resize(at + entry.count);
    for (size_t i = 0; i < entry.count; ++i) out[at + i] = entry.ids[i];
  }

  void append_new(std::string_view piece, std::vector<int32_t>& out) {
    if (const std::optional<int32_t> whole = vocabulary_.whole(piece)) return out.push_back(*whole);
    symbols_.clear();
    vocabulary_.for_each_symbol(piece, [&](int32_t id) { symbols_.push_back(id); });
    if (symbols_.size() <= few) merge_few();
    else merge_many();
    out.insert(out.end(), symbols_.begin(), symbols_.end());
  }

  // Merges the best pair until there is none.
  void merge_few() {
    constexpr int32_t none = std::numeric_limits<int32_t>::max();
    std::array<int32_t, few> rank, merged;  // of each symbol with the one after it
    auto look_up = [&](size_t i) {
      const BpeVocabulary::Merge* merge =
          i + 1 < symbols_.size() ? vocabulary_.merge_of(symbols_[i], symbols_[i + 1]) : nullptr;
      rank[i] = merge ? merge->rank : none;
      merged[i] = merge ? merge->id : -1;
    };
    for (size_t i = 0; i < symbols_.size(); ++i) look_up(i);
    while (symbols_.size() > 1) {
      const size_t n = symbols_.size();
      const size_t best = static_cast<size_t>(
          std::min_element(rank.begin(), rank.begin() + static_cast<std::ptrdiff_t>(n)) - rank.begin());
      if (rank[best] == none) return;
      symbols_[best] = merged[best];
      symbols_.erase(symbols_.begin() + static_cast<std::ptrdiff_t>(best) + 1);
      std::copy(rank.begin() + best + 2, rank.begin() + n, rank.begin() + best + 1);
      std::copy(merged.begin() + best + 2, merged.begin() + n, merged.begin() + best + 1);
      look_up(best);
      if (best > 0) look_up(best - 1);
    }
  }

  // A heap of candidates over a linked list of symbols; stale candidates are skipped. O(n log n) for pieces of any
  // length.
  void merge_many() {
    const int32_t n = narrow<int32_t>(std::ssize(symbols_));
    links_.clear();
    for (int32_t i = 0; i < n; ++i) links_.push_back({symbols_[static_cast<size_t>(i)], i - 1, i + 1 < n ? i + 1 : -1});
    heap_.clear();
    for (int32_t i = 0; i + 1 < n; ++i) consider(i);
    std::make_heap(heap_.begin(), heap_.end(), std::greater<>());
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
    symbols_.clear();
    for (int32_t i = 0; i >= 0; i = at(i).after) symbols_.push_back(at(i).id);
  }

  // Appends the pair of a symbol and its successor to the heap, if they merge; the caller restores the heap order.
  bool consider(int32_t left) {
    if (left < 0 || at(left).after < 0) return false;
    const int32_t a = at(left).id, b = at(at(left).after).id;
    const BpeVocabulary::Merge* merge = vocabulary_.merge_of(a, b);
    if (merge == nullptr) return false;
    heap_.push_back({merge->rank, left, merge->id, pair(a, b)});
    return true;
  }
  static uint64_t pair(int32_t a, int32_t b) {
    return uint64_t{static_cast<uint32_t>(a)} << 32 | static_cast<uint32_t>(b);
  }
  Symbol& at(int32_t i) { return links_[static_cast<size_t>(i)]; }

  const BpeVocabulary& vocabulary_;
  WordCache<2, 3> short_words_;
  WordCache<4, 7> long_words_;
  std::vector<int32_t> symbols_;
  std::vector<Symbol> links_;
  std::vector<Candidate> heap_;
};

}  // namespace llmc
