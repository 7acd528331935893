// matrix_updates.h: the updates that are made of whole matrices (Muon), in every layout. The parts of a matrix's
// momentum go to one owner, which iterates it, and the parts of the result go back to the ranks that update them.
//
// The units of a stage are taken in rounds with a few matrices for every rank. While one is iterated, the next one's
// parts are on their way to their owners, and the results of the one before on their way back:
//
//   compute    unpack u | pack u + 1 | iterate u           | unpack u - 1 | pack u | unpack u + 1 | ...
//   gather                           `--> parts of u + 1                           `--> results of u
//
// A rank has memory for the matrices that it owns in one round, and for the elements of one unit that it sends and
// receives in either direction. Traffic, of all ranks together, for a matrix of n elements of s bytes with Q replicas
// of P shards and T tensor-parallel ranks that hold different parts:
//   at stages 1 to 3    n s to the owner, Q n s back, without what the owner itself holds
//   at stage 0          (T - 1) n s / T to the owner, (Q P - 1 / T) n s back
// Experts have the shards of their own group, and T = 1. With --muon-rows normalised the second moments of all rows of
// a unit, in fp32, are summed over the ranks, of which each has those of its own matrices.
#pragma once
#include "shard/matrix_owners.h"
#include "shard/units.h"

namespace llmc {

class MatrixUpdates {
 public:
  MatrixUpdates(Units& units, Arena& arena) : units_(units), muon_(units.zero_config().muon) {
    if (units.zero_config().holds == Holds::weights) return;
    make_rounds();
    if (rounds_.empty()) return;
    const DType products = muon_.dtype.value_or(units.precision().products),
                dtype = units.precision().state == DType::fp64 ? DType::fp64 : products;
    const auto room = [&](const char* label, int64_t n) {
      return n > 0 ? arena.alloc(label, "matrices", dtype, {n, 1}) : Tensor{};
    };
    own_ = room("matrices iterated", most_own_);
    to_owners_ = {room("matrices sent", most_to_owners_.sent), room("matrices received", most_to_owners_.received)};
    back_ = {room("results sent", most_back_.sent), room("results received", most_back_.received)};
  }

  // Replaces the reduced gradients of all matrices by their updates; momenta follow.
  void make(const Tensor& control, const OptimizerOptions& options, Stream& compute) {
    if (rounds_.empty()) return;
    take_scratch(control, options, compute);
    for (const Round& round : rounds_) {
      const auto begin = [&](const OfUnit& u) {
        units_.unit(u.index).begin_matrices(control, options, compute);
        send_to_owners(u, compute);
      };
      begin(round.front());
      for (size_t i = 0; i < round.size(); ++i) {
        take_own(round[i], compute);
        if (i + 1 < round.size()) begin(round[i + 1]);
        iterate(round[i], control, options, compute);
        if (i > 0) take_results(round[i - 1], compute);
        send_back(round[i], compute);
      }
      take_results(round.back(), compute);
    }
  }

 private:
  // Matrices of one shape that follow each other in own_ and are iterated at once.
  using Batch = std::vector<size_t>;
  // The matrices of a unit, who holds them, and where in own_ this rank has those that it owns.
  struct OfUnit {
    size_t index;
    UnitHolders holders;
    std::vector<Matrix> matrices;
    std::vector<std::vector<int>> ranks = {};  // of the stage, in each seat
    std::vector<int64_t> place = {};           // -1: another rank owns it
    std::vector<Batch> own = {};
    bool gathers = false;  // does any rank send anything to an owner?
  };
  using Round = std::vector<OfUnit>;
  struct Elements {
    int64_t sent = 0, received = 0;
  };
  // What is on its way, in one direction.
  struct Exchange {
    Tensor sent, received;  // flat, in the dtype of the products
    Event arrived = {};
  };

  // Where experts are shared as dense weights are, the seats are the same.
  bool apart(const OfUnit& u) const {
    return units_.sharing_of(u.index) == Sharing::experts && units_.groups().layout.experts_apart();
  }
  int seat(const OfUnit& u, const Coordinates& c) const {
    return apart(u) ? u.holders.seats().at(c.replica, c.expert_shard, 0)
                    : u.holders.seats().at(c.replica, c.shard, c.tensor);
  }
  int seat(const OfUnit& u) const { return seat(u, units_.groups().me); }
  Comm& group(const OfUnit& u) const {
    return units_.groups()[apart(u) ? GroupName::expert_matrices : GroupName::matrices];
  }

  // Rounds of at least two matrices for every rank of the stage, and their owners.
  void make_rounds() {
    const Layout& layout = units_.groups().layout;
    const int ranks = units_.groups().ranks_of_stage();
    std::vector<Coordinates> all;
    for (int r = 0; r < ranks; ++r) all.push_back(layout.coordinates(r));
    Loads loads(static_cast<size_t>(ranks));
    int64_t in_round = 2 * ranks;
    units_.for_each([&](size_t u) {
      const UnitSpec& spec = units_.unit(u).spec();
      OfUnit of_unit{u, UnitHolders(spec, units_.zero_config(spec.sharing), layout.tensor),
                     matrices_of(spec, u, muon_.heads)};
      if (of_unit.matrices.empty()) return;
      of_unit.ranks.resize(static_cast<size_t>(of_unit.holders.seats().count()));
      for (const Coordinates& c : all) of_unit.ranks[static_cast<size_t>(seat(of_unit, c))].push_back(c.rank);
      if (in_round >= 2 * ranks) rounds_.emplace_back(), in_round = 0;
      in_round += std::ssize(of_unit.matrices) * (spec.sharing == Sharing::experts ? layout.expert.ranks : 1);
      rounds_.back().push_back(std::move(of_unit));
    });
    for (Round& round : rounds_) {
      std::vector<Matrix*> matrices;
      for (OfUnit& u : round)
        for (Matrix& m : u.matrices) matrices.push_back(&m);
      const auto of = [&](const Matrix& m) -> const OfUnit& {
        return *std::ranges::find(round, m.unit, &OfUnit::index);
      };
      deal_out(
          matrices, loads, [&](const Matrix& m) { return of(m).holders.owners(); },
          [&](const Matrix& m, int seat) -> const std::vector<int>& { return of(m).ranks[static_cast<size_t>(seat)]; });
      place_own(round);
      measure(round);
    }
  }

  static bool exchanges(const OfUnit& u) { return u.holders.owners() > 1; }

  static int64_t room_of(const Matrix& m) { return round_up(m.numel(), UnitLayout::alignment); }

  // What a seat owns of a unit. A batch has no more elements than keep a GPU busy, or one matrix.
  static std::vector<Batch> batches_of(const OfUnit& u, int seat) {
    constexpr int64_t most = 1 << 23;
    std::map<std::pair<int64_t, int64_t>, Batch> by_shape;
    for (size_t i = 0; i < u.matrices.size(); ++i)
      if (const Matrix& m = u.matrices[i]; m.owner == seat) by_shape[{m.rows, m.columns}].push_back(i);
    std::vector<Batch> batches;
    for (const auto& [shape, all] : by_shape) {
      const Matrix& m = u.matrices[all[0]];
      const size_t each = room_of(m) == m.numel() ? static_cast<size_t>(std::max<int64_t>(1, most / m.numel())) : 1;
      for (size_t i = 0; i < all.size(); i += each)
        batches.emplace_back(all.begin() + static_cast<ptrdiff_t>(i),
                             all.begin() + static_cast<ptrdiff_t>(std::min(i + each, all.size())));
    }
    return batches;
  }

  void place_own(Round& round) const {
    int64_t end = 0;
    for (OfUnit& u : round) {
      u.place.assign(u.matrices.size(), -1);
      u.own = batches_of(u, seat(u));
      for (const Batch& batch : u.own)
        for (const size_t i : batch) u.place[i] = std::exchange(end, end + room_of(u.matrices[i]));
    }
  }

  // The most that any rank of the stage needs.
  void measure(Round& round) {
    std::vector<int64_t> own(static_cast<size_t>(units_.groups().ranks_of_stage()));
    for (OfUnit& u : round) {
      const int seats = u.holders.seats().count();
      std::vector<Elements> gather(static_cast<size_t>(seats)), back(gather);
      for (const Matrix& m : u.matrices) {
        Elements &to_owner = gather[static_cast<size_t>(m.owner)], &of_owner = back[static_cast<size_t>(m.owner)];
        for (const int rank : u.ranks[static_cast<size_t>(m.owner)]) own[static_cast<size_t>(rank)] += room_of(m);
        for (int s = 0; s < seats; ++s) {
          const int64_t n = u.holders.piece(m, s).held.size;
          if (s != m.owner && u.holders.sends(m, s)) {
            gather[static_cast<size_t>(s)].sent += n, to_owner.received += n;
            u.gathers |= n > 0;
          }
          if (s != m.owner) back[static_cast<size_t>(s)].received += n;
        }
        for (int c = 0; c < u.holders.contents(); ++c)
          of_owner.sent += u.holders.piece(m, u.holders.seat_of(c)).held.size;
      }
      const auto include = [](Elements& most, const std::vector<Elements>& all) {
        for (const Elements& e : all) most = {std::max(most.sent, e.sent), std::max(most.received, e.received)};
      };
      include(most_to_owners_, gather);
      if (exchanges(u)) include(most_back_, back);
    }
    most_own_ = std::max(most_own_, *std::max_element(own.begin(), own.end()));
  }

  Tensor own_matrix(const OfUnit& u, size_t i) const {
    return own_.slice(u.place[i], {u.matrices[i].rows, u.matrices[i].columns});
  }
  Tensor own_matrices(const OfUnit& u, const Batch& batch) const {
    const Matrix& m = u.matrices[batch[0]];
    return own_.slice(u.place[batch[0]], {std::ssize(batch), m.rows, m.columns});
  }

  // Copies a piece of own matrix `i`, which is flat elsewhere, to its place in the matrix, or back: box by box, or at
  // once where it has all columns.
  enum class Way : uint8_t { to_matrix, to_flat };
  void copy_piece(Way way, const OfUnit& u, size_t i, const UnitHolders::Piece& p, const Tensor& flat,
                  Stream& stream) const {
    const Tensor matrix = own_matrix(u, i);
    const int64_t width = matrix.shape[1];
    const bool all_columns = p.columns == width;
    for (int64_t at = 0, n; at < p.held.size; at += n) {
      const int64_t row = (p.begin + at) / p.columns, column = (p.begin + at) % p.columns, left = p.held.size - at;
      const int64_t rows = all_columns || column > 0 ? 1 : std::max<int64_t>(1, left / p.columns),
                    columns = all_columns ? left : std::min(p.columns - column, left);
      const BoxStrides in_matrix{row * width + p.column + column, width, 0}, in_flat{at, columns, 0};
      n = rows * columns;
      if (way == Way::to_matrix) copy_box(matrix, in_matrix, flat, in_flat, {rows, 1, columns}, stream);
      else copy_box(flat, in_flat, matrix, in_matrix, {rows, 1, columns}, stream);
    }
  }

  // A piece of this rank in its reduced gradients.
  Tensor gradients(const OfUnit& u, const UnitHolders::Piece& p) const {
    return p.held.size > 0 ? units_.unit(u.index).reduced_gradients(p.held) : Tensor{};
  }

  // Calls f(owner, matrix, piece) for the pieces of this rank, by owner; they may be empty.
  template <class F>
  void for_each_held(const OfUnit& u, F&& f) const {
    const int me = seat(u);
    for (int s = 0; s < u.holders.seats().count(); ++s)
      for (size_t i = 0; i < u.matrices.size(); ++i)
        if (u.matrices[i].owner == s) f(s, i, u.holders.piece(u.matrices[i], me));
  }
  // Blocks of elements for each seat, which follow each other in memory.
  struct Blocks {
    std::vector<Range> all;
    int64_t end = 0;
    // Appends n elements to the last block, or to one after it; returns where they begin.
    int64_t append(int block, int64_t n) {
      Range& r = all[static_cast<size_t>(block)];
      if (r.size == 0) r.begin = end;
      r.size += n;
      return std::exchange(end, end + n);
    }
  };

  // The directions of a unit's matrices begin their way to the owners.
  void send_to_owners(const OfUnit& u, Stream& compute) {
    const int me = seat(u);
    Blocks send{std::vector<Range>(u.ranks.size())}, receive(send);
    for_each_held(u, [&](int owner, size_t i, const UnitHolders::Piece& p) {
      const int64_t n = p.held.size;
      if (n == 0 || !u.holders.sends(u.matrices[i], me)) return;
      if (owner == me) copy_piece(Way::to_matrix, u, i, p, gradients(u, p), compute);
      else copy_box(to_owners_.sent, {send.append(owner, n), 0, 0}, gradients(u, p), {0, 0, 0}, {1, 1, n}, compute);
    });
    if (!u.gathers) return;
    for_each_received(u, [&](int s, size_t, const UnitHolders::Piece& p) { receive.append(s, p.held.size); });
    start(to_owners_, u, send.all, receive.all, compute);
  }
  // Own matrices = the directions of all that hold parts of them.
  void take_own(const OfUnit& u, Stream& compute) {
    if (!u.gathers) return;
    compute.wait(to_owners_.arrived);
    int64_t at = 0;
    for_each_received(u, [&](int, size_t i, const UnitHolders::Piece& p) {
      copy_piece(Way::to_matrix, u, i, p, to_owners_.received.slice(at, {p.held.size}), compute);
      at += p.held.size;
    });
  }
  // Calls f(seat, matrix, piece) for what this rank receives as an owner, in order.
  template <class F>
  void for_each_received(const OfUnit& u, F&& f) const {
    const int me = seat(u);
    for (int s = 0; s < u.holders.seats().count(); ++s)
      for (size_t i = 0; i < u.matrices.size(); ++i)
        if (s != me && u.matrices[i].owner == me && u.holders.sends(u.matrices[i], s))
          if (const UnitHolders::Piece p = u.holders.piece(u.matrices[i], s); p.held.size > 0) f(s, i, p);
  }

  void iterate(const OfUnit& u, const Tensor& control, const OptimizerOptions& options, Stream& compute) {
    const UnitState& unit = units_.unit(u.index);
    for (const Batch& batch : u.own) {
      iterate(own_matrices(u, batch), compute);
      for (const size_t i : batch) {
        const Matrix& m = u.matrices[i];
        normalise(m, own_matrix(u, i), control, options, compute);
        units_.groups().hooks.iterated(unit.spec().params[m.param].name, m.row);
      }
    }
    if (!exchanges(u) || unit.row_moments().empty()) return;
    for (size_t i = 0; i < u.matrices.size(); ++i)
      if (u.place[i] < 0) zero(row_moments(u.matrices[i]), compute);
    Stream& stream = units_.groups().gather_stream();
    stream.wait(compute.record());
    group(u).all_reduce(unit.row_moments(), stream);  // exact: all but the owner add 0. Arrives before the results do
  }
  // matrices (B, rows, columns)
  void iterate(const Tensor& matrices, Stream& stream) const {
    newton_schulz(matrices, muon_.coefficients,
                  scale_of(muon_.scale, static_cast<double>(matrices.shape[1]), static_cast<double>(matrices.shape[2])),
                  stream);
  }
  // With --muon-rows normalised.
  void normalise(const Matrix& m, const Tensor& matrix, const Tensor& control, const OptimizerOptions& options,
                 Stream& stream) const {
    if (const Tensor moments = row_moments(m); !moments.empty())
      normalise_rows(matrix, moments, control, options.beta2, stream);
  }
  // Those of a matrix; or an empty tensor
  Tensor row_moments(const Matrix& m) const {
    const UnitState& unit = units_.unit(m.unit);
    return unit.row_moments().empty() ? Tensor{} : unit.row_moments(m.param).slice(m.row, {m.rows});
  }

  // The updates of own matrices begin their way to all that hold parts of them.
  void send_back(const OfUnit& u, Stream& compute) {
    const int me = seat(u);
    Blocks receive{std::vector<Range>(u.ranks.size())},
        by_content{std::vector<Range>(static_cast<size_t>(u.holders.contents()))};
    for (int c = 0; c < u.holders.contents() && exchanges(u); ++c)
      for (size_t i = 0; i < u.matrices.size(); ++i) {
        if (u.place[i] < 0) continue;
        const UnitHolders::Piece p = u.holders.piece(u.matrices[i], u.holders.seat_of(c));
        copy_piece(Way::to_flat, u, i, p, back_.sent.slice(by_content.append(c, p.held.size), {p.held.size}), compute);
      }
    for_each_held(u, [&](int owner, size_t i, const UnitHolders::Piece& p) {
      if (owner == me) copy_piece(Way::to_flat, u, i, p, gradients(u, p), compute);
      else receive.append(owner, p.held.size);
    });
    if (!exchanges(u)) return;
    std::vector<Range> send(u.ranks.size());
    for (int s = 0; s < u.holders.seats().count(); ++s)
      if (s != me) send[static_cast<size_t>(s)] = by_content.all[static_cast<size_t>(u.holders.content(s))];
    start(back_, u, send, receive.all, compute);
  }
  // The gradients of this rank = the updates of all owners.
  void take_results(const OfUnit& u, Stream& compute) {
    if (!exchanges(u)) return;
    compute.wait(back_.arrived);
    int64_t at = 0;
    for_each_held(u, [&](int owner, size_t, const UnitHolders::Piece& p) {
      if (owner == seat(u)) return;
      copy_box(gradients(u, p), {0, 0, 0}, back_.received, {at, 0, 0}, {1, 1, p.held.size}, compute);
      at += p.held.size;
    });
  }

  void start(Exchange& exchange, const OfUnit& u, const std::vector<Range>& send, const std::vector<Range>& receive,
             Stream& compute) {
    Stream& stream = units_.groups().gather_stream();
    stream.wait(compute.record());
    group(u).all_to_all_rows(exchange.received, exchange.sent, send, receive, stream);
    exchange.arrived = stream.record();
  }

  // All ranks of a stage have scratch for its largest batches, since a plan is that of one of them.
  void take_scratch(const Tensor& control, const OptimizerOptions& options, Stream& compute) {
    if (scratch_bytes_ == 0) {
      const Device paper = compute.device().on_paper();
      Arena counted(paper);
      Stream alone(paper, counted);
      std::map<std::pair<int64_t, int64_t>, std::pair<int64_t, const Matrix*>> largest;  // batch of a shape
      for (const Round& round : rounds_)
        for (const OfUnit& u : round)
          for (int s = 0; s < u.holders.seats().count(); ++s)
            for (const Batch& batch : batches_of(u, s)) {
              const Matrix& m = u.matrices[batch[0]];
              auto& [most, one] = largest[{m.rows, m.columns}];
              most = std::max(most, std::ssize(batch)), one = &m;
            }
      for (const auto& [shape, batch] : largest) {
        Tensor matrices = own_;  // of this rank, which may have fewer
        matrices.shape = {batch.first, shape.first, shape.second};
        iterate(matrices, alone);
        normalise(*batch.second, own_.slice(0, {shape.first, shape.second}), control, options, alone);
      }
      scratch_bytes_ = counted.high_water();
    }
    auto scope = compute.scratch().scope();
    compute.scratch().alloc("scratch", "Newton-Schulz", DType::int32, {ceil_div(scratch_bytes_, int64_t{4})});
  }

  Units& units_;
  Muon muon_;
  std::vector<Round> rounds_;
  int64_t most_own_ = 0;  // elements of a round, on any rank of the stage
  Elements most_to_owners_, most_back_;
  int64_t scratch_bytes_ = 0;
  Tensor own_;  // flat, in the dtype of the products
  Exchange to_owners_, back_;
};

}  // namespace llmc
