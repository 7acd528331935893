// bpe_encoder.h: pieces of text to tokens, by the merges of a BpeVocabulary and from memory.
#pragma once
#include "text/bpe_vocabulary.h"
#include "text/split_automaton.h"
#include "text/word_cache.h"

namespace llmc {

class BpeEncoder {
 public:
  // Remembers about 2^cache_bits words.
  BpeEncoder(const BpeVocabulary& vocabulary, int cache_bits)
      : vocabulary_(vocabulary), short_words_(cache_bits - 1), long_words_(cache_bits - 3) {}

  // out += the tokens of one to SplitAutomaton::most_pieces pieces.
  void append(Pieces pieces, std::vector<int32_t>& out) {
    end_ = pieces.back().data() + pieces.back().size();
    const size_t begin = out.size(),
                 most = static_cast<size_t>(end_ - pieces.front().data());  // every token has at least one byte
    out.resize(begin + most + LongWords::most_ids + 1);                     // copies from a cache are of a fixed size
    int32_t* to = out.data() + begin;
    if (vocabulary_.symbols() == BpeVocabulary::Symbols::bytes) to = append_all(pieces, to);
    else
      for (const std::string_view piece : pieces) to = append_long(piece, to);
    out.resize(static_cast<size_t>(to - out.data()));
  }

 private:
  using ShortWords = WordCache<2>;
  using LongWords = WordCache<4>;
  enum class Kind : uint8_t { piece, part };  // a part of a piece that is no token as a whole: only merges count

  // These write tokens to `to` and return where they end.

  // First finds the places in the cache of all pieces, so that their memory is fetched at the same time.
  int32_t* append_all(Pieces pieces, int32_t* to) {
    std::array<ShortWords::Place, SplitAutomaton::most_pieces> places;
    for (size_t i = 0; i < pieces.size(); ++i)
      if (pieces[i].size() <= ShortWords::longest)
        ShortWords::prefetch(places[i] = short_words_.place_of(pieces[i], end_));
    for (size_t i = 0; i < pieces.size(); ++i)
      to = pieces[i].size() <= ShortWords::longest  ? append_word(pieces[i], Kind::piece, places[i], to)
           : pieces[i].size() <= LongWords::longest ? append_word(pieces[i], Kind::piece, to)
                                                    : append_long(pieces[i], to);
    return to;
  }

  // A long piece, such as a whole text without a pre-tokenizer, is cut where no merge joins what is on either side.
  int32_t* append_long(std::string_view text, int32_t* to) {
    if (const std::optional<int32_t> whole = vocabulary_.whole(text)) return *to = *whole, to + 1;
    const Kind kind = vocabulary_.whole_pieces_first() ? Kind::part : Kind::piece;
    auto append_part = [&](std::string_view word) {
      if (word.size() <= ShortWords::longest)
        to = append_word(word, kind, short_words_.place_of(word, end_, static_cast<uint64_t>(kind)), to);
      else if (word.size() <= LongWords::longest) to = append_word(word, kind, to);
      else to = append_new(word, kind, to);
    };
    size_t cut = 0;
    std::string_view last;
    for (size_t at = 0; at < text.size(); at += last.size()) {
      const std::string_view character = text.substr(at, utf8_width(text[at]));
      if (at > cut && !vocabulary_.merges_join(last, character)) {
        append_part(text.substr(cut, at - cut));
        cut = at;
      }
      last = character;
    }
    if (cut < text.size()) append_part(text.substr(cut));
    return to;
  }

  // A word that may be in both caches: its text is short, but it may have many tokens.
  int32_t* append_word(std::string_view word, Kind kind, const ShortWords::Place& place, int32_t* to) {
    if (const auto* known = ShortWords::find(place)) return append_known(*known, to);
    int32_t* const end = append_word(word, kind, to);
    if (const size_t count = static_cast<size_t>(end - to); count <= ShortWords::most_ids)
      ShortWords::add(place, to, count);
    return end;
  }
  int32_t* append_word(std::string_view word, Kind kind, int32_t* to) {
    const LongWords::Place place = long_words_.place_of(word, end_, static_cast<uint64_t>(kind));
    if (const auto* known = LongWords::find(place)) return append_known(*known, to);
    int32_t* const end = append_new(word, kind, to);
    const size_t count = static_cast<size_t>(end - to);
    const bool is_short = word.size() <= ShortWords::longest && count <= ShortWords::most_ids;
    if (!is_short && count <= LongWords::most_ids) LongWords::add(place, to, count);
    return end;
  }
  template <class Entry>
  static int32_t* append_known(const Entry& entry, int32_t* to) {
    std::memcpy(to, entry.ids.data(), sizeof entry.ids);
    return to + entry.ids.back();
  }

  int32_t* append_new(std::string_view word, Kind kind, int32_t* to) {
    if (kind == Kind::piece)
      if (const std::optional<int32_t> whole = vocabulary_.whole(word)) return *to = *whole, to + 1;
    int32_t* end = to;
    vocabulary_.for_each_symbol(word, [&](int32_t id) { *end++ = id; });
    const size_t n = static_cast<size_t>(end - to);
    if (n > few) return merge_many(to, end);
    if (vocabulary_.symbols() == BpeVocabulary::Symbols::bytes)
      return merge_few(to, n, [&](size_t i) { return vocabulary_.rank_of_bytes(word[i], word[i + 1]); });
    return merge_few(to, n, [&](size_t i) { return vocabulary_.merges().rank_of(to[i], to[i + 1]); });
  }

  // Merges n symbols. The least of the pairs says which merge is next: it has the lowest rank and, of equal ones, is
  // the first. first_rank(i): of symbol i with the one after it.
  template <class FirstRank>
  int32_t* merge_few(int32_t* symbols, size_t n, FirstRank&& first_rank) {
    constexpr int32_t none = MergeTable::no_rank << few_bits;
    const MergeTable& merges = vocabulary_.merges();
    alignas(64) std::array<int32_t, few> pairs;  // rank << few_bits | place, of each symbol with the one after it
    std::array<uint8_t, few + 1> before, after;  // neighbours; n: none
    const size_t padded = (n + 7) / 8 * 8;       // to whole vectors
    for (size_t i = 0; i < n; ++i) {
      before[i] = static_cast<uint8_t>(i - 1);
      after[i] = static_cast<uint8_t>(i + 1);
    }
    for (size_t i = 0; i + 1 < n; ++i) pairs[i] = first_rank(i) << few_bits | static_cast<int32_t>(i);
    for (size_t i = n - 1; i < padded; ++i) pairs[i] = none;
    auto look_up = [&](size_t i, size_t j) {
      pairs[i] = merges.rank_of(symbols[i], symbols[j]) << few_bits | static_cast<int32_t>(i);
    };
    for (;;) {
      int32_t best = none;
      for (size_t i = 0; i < padded; ++i) best = std::min(best, pairs[i]);
      if (best == none) break;
      const size_t left = static_cast<size_t>(best) % few, right = after[left], next = after[right];
      const int32_t rank = best >> few_bits;
      if (!merges.is(rank, symbols[left], symbols[right])) {
        pairs[left] = none;
        continue;
      }
      symbols[left] = merges.merged(rank);
      pairs[right] = none;
      after[left] = static_cast<uint8_t>(next);
      before[next] = static_cast<uint8_t>(left);
      if (next < n) look_up(left, next);
      else pairs[left] = none;
      if (left > 0) look_up(before[left], left);
    }
    int32_t* to = symbols;
    for (size_t i = 0; i < n; i = after[i]) *to++ = symbols[i];
    return to;
  }

  // Merges by a heap of candidates over a linked list of symbols, skipping stale ones: O(n log n) for any length.
  int32_t* merge_many(int32_t* symbols, const int32_t* end) {
    const int32_t n = narrow<int32_t>(end - symbols);
    links_.clear();
    for (int32_t i = 0; i < n; ++i) links_.push_back({symbols[i], i - 1, i + 1 < n ? i + 1 : -1});
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
      left.id = vocabulary_.merges().merged(c.rank);
      left.after = right.after;
      right.id = -1;
      if (left.after >= 0) at(left.after).before = c.left;
      if (consider(left.before)) std::push_heap(heap_.begin(), heap_.end(), std::greater<>());
      if (consider(c.left)) std::push_heap(heap_.begin(), heap_.end(), std::greater<>());
    }
    int32_t* to = symbols;
    for (int32_t i = 0; i >= 0; i = at(i).after) *to++ = at(i).id;
    return to;
  }

  // Appends the pair of a symbol and its successor to the heap, if they merge; the caller restores the heap order.
  bool consider(int32_t left) {
    if (left < 0 || at(left).after < 0) return false;
    const MergeTable& merges = vocabulary_.merges();
    const int32_t a = at(left).id, b = at(at(left).after).id, rank = merges.rank_of(a, b);
    if (rank == MergeTable::no_rank || !merges.is(rank, a, b)) return false;
    heap_.push_back({rank, left, pair(a, b)});
    return true;
  }
  static uint64_t pair(int32_t a, int32_t b) {
    return uint64_t{static_cast<uint32_t>(a)} << 32 | static_cast<uint32_t>(b);
  }

  static constexpr int few_bits = 7;
  static constexpr size_t few = 1 << few_bits;  // up to this many symbols, the best pair is found by a scan
  struct Symbol {
    int32_t id, before, after;  // neighbours; -1: none. id -1: merged into the one before
  };
  struct Candidate {
    int32_t rank, left;
    uint64_t ids;  // both symbols' ids when the candidate was found
    // Lower ranks first, equal ranks from left to right.
    bool operator>(const Candidate& o) const { return rank != o.rank ? rank > o.rank : left > o.left; }
  };
  Symbol& at(int32_t i) { return links_[static_cast<size_t>(i)]; }

  const BpeVocabulary& vocabulary_;
  const char* end_ = nullptr;  // of the pieces: what is before it can be read
  ShortWords short_words_;
  LongWords long_words_;
  std::vector<Symbol> links_;
  std::vector<Candidate> heap_;
};

}  // namespace llmc
