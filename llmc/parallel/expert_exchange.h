// expert_exchange.h: rows on their way to the ranks that have their experts, and back.
//
// Every rank of an ep group has put its rows into the order of their experts, so that those for each rank of the group
// are one block. Two ranks with two experts each, and tokens that choose two:
//
//   rank 0: a chose 1 3, b 0 1            a row for each choice, by expert:  b0 a1 b1 | a3
//   rank 1: c chose 2 3, d 1 2                                                     d1 | c2 d2 c3
//   arrived, by rank:                     rank 0:  b0 a1 b1 | d1             rank 1:  a3 | c2 d2 c3
//   by expert, then by rank: computed     rank 0:  b0 a1 b1 d1               rank 1:  c2 d2 a3 c3
//   and back the same way; each token then adds the outputs of its choices, in their order
//
// A rank has room for a planned number of rows. If it gets more, they come in further rounds: with all its rows in
// order, those of rank 0 first, then those of rank 1, and so on, round i brings rows [i room, (i + 1) room). So the
// rows never exceed the room, and none is dropped; all ranks take part in as many rounds as the rank with the most rows
// needs.
//
// The rows of each round follow from one table: how many rows each rank has for each expert. All ranks gather it and
// their hosts read it: the host waits for the device once in each forward of a layer, recomputed ones included, after
// it has enqueued the shared expert.
//
// The host does not wait where a capacity bounds the rows from each rank to every other, and a rank has room for that
// many from every rank (ExpertPlacement::stride() in model/expert_config.h). Then each rank sends that many in one
// round, padding included; the number of real rows is sent before them, and only the device learns it.
//
// Elements that a rank sends in a forward, with S rows of C elements and k choices each: S k C (P - 1) / P if all
// experts are chosen equally often, and as much again for their outputs; the backward sends the same, and the rows of
// further rounds once more. The table is E numbers from each rank to every other. With padding: P - 1 blocks each time,
// and E / P numbers for each rank.
#pragma once
#include "comm/ring.h"
#include "shard/params.h"

namespace llmc {

class ExpertRounds {
 public:
  ExpertRounds() = default;
  // counts (ranks, E): rows of each rank for each expert; rank d has the d-th E / ranks experts. room: rows that a rank
  // takes in one round
  ExpertRounds(std::vector<int64_t> counts, int ranks, int64_t room)
      : counts_(std::move(counts)), ranks_(ranks), experts_(std::ssize(counts_) / ranks), room_(room) {
    CHECK(room > 0, "experts on {} ranks: room for {} rows", ranks, room);
    for (int to = 0; to < ranks; ++to) {
      int64_t all = 0;
      for (int from = 0; from < ranks; ++from) all += rows(from, to);
      rounds_ = std::max(rounds_, static_cast<int>(ceil_div(all, room)));
    }
  }

  // One round in which each rank sends `rows` rows to each, as if every rank had one expert.
  static ExpertRounds padded(int ranks, int64_t rows) {
    return {std::vector<int64_t>(static_cast<size_t>(ranks * ranks), rows), ranks, ranks * rows};
  }

  int rounds() const { return rounds_; }  // at least 1
  // How many rows a rank has for another.
  int64_t rows(int from, int to) const {
    const auto first = of(from, to * own());
    return std::accumulate(first, first + own(), int64_t{0});
  }
  // The rows that rank `from` sends to `to` in a round, counted from its first row for `to`.
  Range sent(int from, int to, int round) const {
    int64_t before = 0;  // rows of ranks before it
    for (int r = 0; r < from; ++r) before += rows(r, to);
    const Range window = overlap({before, rows(from, to)}, {room_ * round, room_});
    return window.size > 0 ? Range{window.begin - before, window.size} : Range{};
  }
  // The blocks of rows that a rank sends in a round, and those that it gets.
  std::vector<Range> blocks_sent(int rank, int round) const {
    std::vector<Range> blocks;
    int64_t begin = 0;
    for (int to = 0; to < ranks_; ++to) {
      const Range part = sent(rank, to, round);
      blocks.push_back({begin + part.begin, part.size});
      begin += rows(rank, to);
    }
    return blocks;
  }
  std::vector<Range> blocks_received(int rank, int round) const {
    std::vector<Range> blocks;
    int64_t begin = 0;
    for (int from = 0; from < ranks_; ++from) {
      blocks.push_back({begin, sent(from, rank, round).size});
      begin += blocks.back().size;
    }
    return blocks;
  }
  // (ranks, experts of the rank): how many of the rows that a rank gets in a round are for each of its experts.
  std::vector<int32_t> counts_received(int rank, int round) const {
    std::vector<int32_t> counts;
    for (int from = 0; from < ranks_; ++from) {
      const Range part = sent(from, rank, round);
      int64_t begin = 0;
      for (auto e = of(from, rank * own()), end = e + own(); e != end; begin += *e++)
        counts.push_back(static_cast<int32_t>(overlap({begin, *e}, part).size));
    }
    return counts;
  }

 private:
  int64_t own() const { return experts_ / ranks_; }
  std::vector<int64_t>::const_iterator of(int rank, int64_t expert) const {
    return counts_.begin() + rank * experts_ + expert;
  }

  std::vector<int64_t> counts_;
  int ranks_ = 1;
  int64_t experts_ = 0, room_ = 1;
  int rounds_ = 1;
};

}  // namespace llmc
