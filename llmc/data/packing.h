// packing.h: how the documents of a stream of tokens fill rows of T places; pure functions.
//
// A place p of the stream has token p as its input and token p + 1 as its target, so the rows of T places that follow
// each other are the samples of contract 8. The end of a document predicts the end of text that begins the next one.
//
//   stream           rows follow each other, and cut documents wherever they end
//   best-fit         each document in one row: the longest that is left, with the one or two others that fill the row
//                    best, or if those leave too much, with the longest that fits, and so on (compare Ding et al. 2024,
//                    "Fewer truncations improve language modeling"). Documents longer than T fill rows of their own,
//                    and their rest counts as a document; they also fill large gaps. Other gaps are padded.
//   document-start   each row begins where a document does; the rest of the document that its end cuts is dropped
#pragma once
#include <bit>

#include "core/check.h"
#include "core/shape.h"

namespace llmc {

enum class Packing : uint8_t { stream, best_fit, document_start };
constexpr auto names_of_values(Packing) { return std::array{"stream", "best-fit", "document-start"}; }

// Rows of pieces, each the places [begin, end) of one document.
struct PackedRows {
  std::vector<Range> pieces;           // row after row
  std::vector<int64_t> row_ends = {};  // in `pieces`

  int64_t count() const { return static_cast<int64_t>(row_ends.size()); }
  std::span<const Range> operator[](int64_t row) const {
    const auto end_of = [&](int64_t r) { return r < 0 ? 0 : static_cast<size_t>(row_ends[static_cast<size_t>(r)]); };
    return std::span(pieces).subspan(end_of(row - 1), end_of(row) - end_of(row - 1));
  }
};

namespace detail {

// A set of numbers below `size` with neighbours in O(log size). Bit x of a level: word x of the one before is not 0.
class NumberSet {
 public:
  explicit NumberSet(int64_t size) {
    do levels_.emplace_back(static_cast<size_t>(size = ceil_div(size, 64)));
    while (size > 1);
  }
  void insert(int64_t x) {
    for (auto& level : levels_) level[static_cast<size_t>(x / 64)] |= uint64_t{1} << x % 64, x /= 64;
  }
  void erase(int64_t x) {
    for (auto& level : levels_) {
      if ((level[static_cast<size_t>(x / 64)] &= ~(uint64_t{1} << x % 64)) != 0) return;
      x /= 64;
    }
  }
  // The smallest number from x on.
  std::optional<int64_t> next(int64_t x) const {
    for (size_t level = 0; level < levels_.size() && x / 64 < static_cast<int64_t>(levels_[level].size()); ++level) {
      if (const uint64_t bits = word(level, x / 64) >> x % 64; bits != 0)
        return descend(level, x + std::countr_zero(bits), [](uint64_t word) { return std::countr_zero(word); });
      x = x / 64 + 1;
    }
    return std::nullopt;
  }
  // The largest number up to x.
  std::optional<int64_t> previous(int64_t x) const {
    for (size_t level = 0; level < levels_.size() && x >= 0; ++level) {
      if (const uint64_t bits = word(level, x / 64) << (63 - x % 64); bits != 0)
        return descend(level, x - std::countl_zero(bits), [](uint64_t word) { return 63 - std::countl_zero(word); });
      x = x / 64 - 1;
    }
    return std::nullopt;
  }

 private:
  uint64_t word(size_t level, int64_t i) const { return levels_[level][static_cast<size_t>(i)]; }
  template <class Choose>
  int64_t descend(size_t level, int64_t x, const Choose& bit_of) const {
    while (level-- > 0) x = x * 64 + bit_of(word(level, x));
    return x;
  }

  std::vector<std::vector<uint64_t>> levels_;
};

// Pieces that are in no row yet, by their sizes up to T.
class LoosePieces {
 public:
  LoosePieces(const std::vector<Range>& pieces, int64_t T)
      : sizes_(T + 1), first_(static_cast<size_t>(T + 1), none), next_(pieces.size()) {
    for (size_t i = pieces.size(); i-- > 0;) {
      next_[i] = std::exchange(first_[static_cast<size_t>(pieces[i].size)], static_cast<int64_t>(i));
      sizes_.insert(pieces[i].size);
    }
  }
  // The largest size up to `most`; none: there is no such piece.
  std::optional<int64_t> largest(int64_t most) const { return sizes_.previous(most); }

  // Takes the first piece of a size.
  size_t take(int64_t size) {
    const int64_t piece = first(size);
    if ((first_[static_cast<size_t>(size)] = next_[static_cast<size_t>(piece)]) == none) sizes_.erase(size);
    return static_cast<size_t>(piece);
  }

  // One or two sizes that leave the least of `room` places. Not all pairs are looked at: the larger is one of the 16
  // smallest sizes from room / 2 on, which saves the smallest pieces for later rows.
  std::vector<int64_t> fill(int64_t room) const {
    if (first(room) != none) return {room};
    std::vector<int64_t> best;
    int64_t least = room;
    std::optional<int64_t> larger = sizes_.next(ceil_div(room, 2));
    for (int tries = 0; tries < 16 && larger && *larger < room && least > 0; ++tries) {
      std::optional<int64_t> smaller = largest(room - *larger);
      if (smaller == larger && next_[static_cast<size_t>(first(*larger))] == none) smaller = largest(*larger - 1);
      if (const int64_t left = room - *larger - smaller.value_or(0); left < least) {
        least = left;
        best = {*larger};
        if (smaller) best.push_back(*smaller);
      }
      larger = sizes_.next(*larger + 1);
    }
    return best;
  }

 private:
  int64_t first(int64_t size) const { return first_[static_cast<size_t>(size)]; }

  static constexpr int64_t none = -1;
  NumberSet sizes_;
  std::vector<int64_t> first_, next_;  // the first piece of each size; the next one of a piece's size
};

// A piece, and the number of its row.
struct Placed {
  Range piece;
  int64_t row;
};

// Rows in the order of their first pieces, the pieces of a row in the order of the stream.
inline PackedRows in_stream_order(std::vector<Placed> placed, int64_t rows) {
  std::ranges::sort(placed, {}, [](const Placed& p) { return p.piece.begin; });
  PackedRows packed{std::vector<Range>(placed.size())};
  std::vector<int64_t> order(static_cast<size_t>(rows), -1);  // where a row is among those of `packed`
  for (auto& [piece, row] : placed) {
    int64_t& mine = order[static_cast<size_t>(row)];
    if (mine < 0) mine = packed.count(), packed.row_ends.push_back(0);
    row = mine;
    ++packed.row_ends[static_cast<size_t>(row)];
  }
  std::vector<int64_t> next(packed.row_ends.size());  // where the next piece of a row goes
  std::exclusive_scan(packed.row_ends.begin(), packed.row_ends.end(), next.begin(), int64_t{0});
  std::inclusive_scan(packed.row_ends.begin(), packed.row_ends.end(), packed.row_ends.begin());
  for (const auto& [piece, row] : placed) packed.pieces[static_cast<size_t>(next[static_cast<size_t>(row)]++)] = piece;
  return packed;
}

// Divides full rows of long documents, the last first, among gaps of at least T / 16 places, the largest first. full:
// in placed; gaps: {places, row}
inline void fill_gaps(std::vector<Placed>& placed, std::vector<size_t> full,
                      std::vector<std::pair<int64_t, int64_t>> gaps, int64_t T) {
  std::erase_if(gaps, [T](const auto& gap) { return gap.first * 16 < T; });
  std::ranges::sort(gaps);
  int64_t free = 0;
  for (const auto& [places, row] : gaps) free += places;
  for (; free >= T && !full.empty(); full.pop_back()) {
    Range rest = std::exchange(placed[full.back()].piece, {});
    while (rest.size > 0) {
      auto& [places, row] = gaps.back();
      const int64_t n = std::min(places, rest.size);
      placed.push_back({{rest.begin, n}, row});
      rest = {rest.begin + n, rest.size - n};
      free -= n;
      if (places -= n; places * 16 < T) free -= places, gaps.pop_back();
    }
  }
  std::erase_if(placed, [](const Placed& p) { return p.piece.size == 0; });
}

inline PackedRows pack_best_fit(std::span<const Range> documents, int64_t T) {
  std::vector<Range> pieces;
  std::vector<size_t> full;  // rows of documents longer than T
  for (const Range& document : documents)
    for (int64_t begin = document.begin; begin < document.end(); begin += T) {
      if (document.size > T && document.end() - begin >= T) full.push_back(pieces.size());
      pieces.push_back({begin, std::min(T, document.end() - begin)});
    }
  LoosePieces loose(pieces, T);
  std::vector<Placed> placed;
  for (const Range& piece : pieces) placed.push_back({piece, 0});
  std::vector<std::pair<int64_t, int64_t>> gaps;
  int64_t rows = 0;
  for (std::optional<int64_t> size = loose.largest(T); size; size = loose.largest(T), ++rows) {
    int64_t room = T;
    const auto take = [&](int64_t of_size) {
      placed[loose.take(of_size)].row = rows;
      room -= of_size;
    };
    for (; size; size = loose.largest(room)) {
      take(*size);
      const std::vector<int64_t> last = loose.fill(room);
      if ((room - std::accumulate(last.begin(), last.end(), int64_t{0})) * 1024 > T) continue;
      for (const int64_t of_size : last) take(of_size);
      break;
    }
    gaps.push_back({room, rows});
  }
  fill_gaps(placed, std::move(full), std::move(gaps), T);
  return in_stream_order(std::move(placed), rows);
}

// Full rows of T places in the order of the stream: one after another, or with document_start each from the next
// beginning of a document on.
inline PackedRows pack_in_order(Packing packing, std::span<const Range> documents, int64_t T) {
  PackedRows packed;
  auto document = documents.begin();  // the first one that ends after `begin`
  for (int64_t begin = documents.empty() ? 0 : document->begin;; begin += T) {
    while (document != documents.end() && document->end() <= begin) ++document;
    if (packing == Packing::document_start && document != documents.end() && document->begin < begin)
      begin = document++->end();
    if (document == documents.end() || documents.back().end() - begin < T) return packed;
    for (auto in_row = document; in_row != documents.end() && in_row->begin < begin + T; ++in_row)
      packed.pieces.push_back(overlap(*in_row, {begin, T}));
    packed.row_ends.push_back(static_cast<int64_t>(packed.pieces.size()));
  }
}

}  // namespace detail

inline int64_t places_in(std::span<const Range> pieces) {
  return std::accumulate(pieces.begin(), pieces.end(), int64_t{0},
                         [](int64_t n, const Range& r) { return n + r.size; });
}

// documents: each from where the one before it ends, none empty
inline PackedRows pack_rows(Packing packing, std::span<const Range> documents, int64_t T) {
  return packing == Packing::best_fit ? detail::pack_best_fit(documents, T)
                                      : detail::pack_in_order(packing, documents, T);
}

// What became of documents that were packed.
struct PackingCounts {
  int64_t rows = 0, padded = 0;     // rows, and places of them that hold nothing
  int64_t tokens = 0, dropped = 0;  // places of the documents, and those in no row
  int64_t documents = 0, cut = 0;   // documents, and those that no row holds whole, though it has a part

  PackingCounts& operator+=(const PackingCounts& other) {
    rows += other.rows, padded += other.padded;
    tokens += other.tokens, dropped += other.dropped;
    documents += other.documents, cut += other.cut;
    return *this;
  }
};

inline PackingCounts counts_of(const PackedRows& packed, std::span<const Range> documents, int64_t T) {
  const int64_t tokens = places_in(documents), held = places_in(packed.pieces);
  PackingCounts counts{.rows = packed.count(),
                       .padded = packed.count() * T - held,
                       .tokens = tokens,
                       .dropped = tokens - held,
                       .documents = static_cast<int64_t>(documents.size())};
  for (const Range& piece : packed.pieces) {  // each cut document has one piece that begins where it does
    const auto document = std::prev(std::ranges::upper_bound(documents, piece.begin, {}, &Range::begin));
    counts.cut += piece.begin == document->begin && piece.size < document->size;
  }
  return counts;
}

}  // namespace llmc
