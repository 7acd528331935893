// matrix_owners.h: which rank iterates which matrix (Muon), and which part of it every rank holds. Pure functions.
//
// A seat is a rank's place among those that share a unit: replica, shard and tensor-parallel rank, in this order. A
// matrix has one owner among them. All that hold an element of its momentum in the owner's replica send it there, and
// every rank that updates an element gets it back. Within a round of matrices the largest are dealt out first, each to
// the rank with the least to do so far.
#pragma once
#include "ops/ops_muon.h"
#include "shard/params.h"

namespace llmc {

struct Seats {
  int replicas = 1, shards = 1, tensors = 1;

  int count() const { return replicas * shards * tensors; }
  int at(int replica, int shard, int tensor) const { return (replica * shards + shard) * tensors + tensor; }
  int replica(int seat) const { return seat / tensors / shards; }
  int shard(int seat) const { return seat / tensors % shards; }
  int tensor(int seat) const { return seat % tensors; }
};

// Rows of a parameter that are iterated as one matrix: all of them, or those of a group of heads.
struct Matrix {
  size_t unit, param;  // in the unit's table
  int64_t row, rows, columns;
  int owner = 0;  // a seat

  int64_t numel() const { return rows * columns; }
  double flops() const { return newton_schulz_flops(rows, columns); }
};

// The matrices of a unit, in the order of its parameters.
inline std::vector<Matrix> matrices_of(const UnitSpec& unit, size_t index, HeadGroups groups) {
  std::vector<Matrix> all;
  for (size_t i = 0; i < unit.params.size(); ++i) {
    const ParamSpec& p = unit.params[i];
    if (!rule_of(p.rule).of_matrices) continue;
    const int64_t rows = p.shape[0], each = groups == HeadGroups::apart && p.group_rows > 0 ? p.group_rows : rows;
    for (int64_t row = 0; row < rows; row += each) all.push_back({index, i, row, each, p.numel() / rows});
  }
  return all;
}

// What every seat holds of a unit.
class UnitHolders {
 public:
  UnitHolders(const UnitSpec& unit, const ZeroConfig& zero, const TensorParallel& tp)
      : zero_(zero), seats_{zero.replicas, zero.shards, unit.sharing == Sharing::experts ? 1 : tp.ranks} {
    for (int t = 0; t < seats_.tensors; ++t) {
      UnitSpec part{unit.name, {}, unit.sharing};
      for (ParamSpec p : unit.params) {
        if (seats_.tensors > 1) {
          p.part = {}, p.copies = 1;
          p = part_of(p, tp, t);
        }
        part.params.push_back(std::move(p));
      }
      layouts_.emplace_back(part, zero.ranks());
      params_.push_back(std::move(part.params));
    }
  }

  const Seats& seats() const { return seats_; }
  // The elements of a matrix that a seat updates: `held` of its buffer of the unit, which are those from element
  // `begin` on of `columns` columns from `column` on, counted from the matrix's first row.
  struct Piece {
    Range held;
    int64_t begin, column, columns;
  };
  Piece piece(const Matrix& m, int seat) const {
    const size_t t = static_cast<size_t>(seats_.tensor(seat));
    const ParamSpec& p = params_[t][m.param];
    const Box box = p.box();
    const Range rows = overlap({box.row, box.rows}, {m.row, m.rows});
    if (rows.size == 0) return {};
    const int64_t first = layouts_[t].offsets[m.param] + (rows.begin - box.row) * box.columns;
    const Range held =
        overlap({first, rows.size * box.columns}, update_range_of(layouts_[t].size, zero_, seats_.shard(seat)));
    if (held.size == 0) return {};
    return {held, (rows.begin - m.row) * box.columns + held.begin - first, box.column, box.columns};
  }
  // Whether a seat sends its piece of a matrix to the owner: not if another one, or the owner itself, has the same
  // piece and is nearer.
  bool sends(const Matrix& m, int seat) const {
    if (seats_.replica(seat) != seats_.replica(m.owner)) return false;
    if (zero_.updates() == ZeroConfig::Updates::everyone && seats_.shard(seat) != seats_.shard(m.owner)) return false;
    const int t = seats_.tensor(seat), copies = params_[static_cast<size_t>(t)][m.param].copies,
              of_owner = seats_.tensor(m.owner);
    return t == (of_owner / copies == t / copies ? of_owner : t / copies * copies);
  }
  // Seats that hold the same elements of the unit have the same key.
  int content(int seat) const {
    const int shard = zero_.updates() == ZeroConfig::Updates::everyone ? 0 : seats_.shard(seat);
    return shard * seats_.tensors + seats_.tensor(seat);
  }
  int contents() const {
    return (zero_.updates() == ZeroConfig::Updates::everyone ? 1 : seats_.shards) * seats_.tensors;
  }
  // A seat with this content.
  int seat_of(int content) const { return content; }
  // The seats that may own matrices: those that update anything.
  int owners() const { return zero_.updates() == ZeroConfig::Updates::server ? 1 : seats_.count(); }

 private:
  ZeroConfig zero_;
  Seats seats_;
  std::vector<UnitLayout> layouts_;             // by tensor-parallel rank
  std::vector<std::vector<ParamSpec>> params_;  // the same
};

// What each rank of a stage has to iterate so far, in flops.
using Loads = std::vector<double>;

// Deals matrices out: the largest first, each to the least loaded owner. ranks(seat): the ranks of the stage whose load
// grows with that seat's; those with other experts have as many matrices of the same shapes.
template <class Owners, class Ranks>
void deal_out(std::vector<Matrix*> matrices, Loads& loads, Owners&& owners, Ranks&& ranks) {
  std::stable_sort(matrices.begin(), matrices.end(),
                   [](const Matrix* a, const Matrix* b) { return a->flops() > b->flops(); });
  for (Matrix* m : matrices) {
    double least = 0;
    for (int seat = 0; seat < owners(*m); ++seat) {
      double load = 0;
      for (const int rank : ranks(*m, seat)) load += loads[static_cast<size_t>(rank)];
      if (seat == 0 || load < least) least = load, m->owner = seat;
    }
    for (const int rank : ranks(*m, m->owner)) loads[static_cast<size_t>(rank)] += m->flops();
  }
}

}  // namespace llmc
