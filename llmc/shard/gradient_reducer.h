// gradient_reducer.h: the sums of the gradients over micro-batches and ranks: reduced once per step, or after every
// micro-batch, unit by unit while the next one computes; and their square sums, right after they are reduced.
//
// NCCL launches the collectives of a rank in the order in which the host enqueues them: one of the compute stream, as
// in a layer of --tp, begins only when the reductions enqueued before it have begun. A unit's reduction begins when
// that of the unit before is over, which a block's backward has hidden by then. Only the embedding's backward hides
// nothing: its reduction is enqueued after the first block of the next micro-batch.
#pragma once
#include "shard/units.h"

namespace llmc {

// Sums of gradients over ranks. If they travel in the dtype in which they are kept, a ring makes them. In a narrower
// one (--reduce-dtype bf16) every rank's part is rounded once, the parts of an element are added in fp32 in rank order,
// and the sum is rounded once (contract 12); so all shards, and all stages of ZeRO, have the same bits. A rank sends
// what a ring sends, half as wide: (P - 1) n elements for P shards of n.
class WireSums {
 public:
  WireSums() = default;  // gradients travel in the dtype in which they are kept
  // ranks: the most of a group; elements: of the largest buffer, and of the pieces in which larger ones go
  WireSums(DType dtype, int64_t ranks, int64_t elements, Arena& arena, int64_t piece = 1 << 24) {
    const int64_t room = std::min(elements, std::max(piece, ranks * alignment));
    for (Tensor* t : {&sent_, &received_}) *t = arena.alloc("gradients on their way", "a piece", dtype, {room});
  }

  // Shard rank() of all (P n) = its sum over the ranks; the other shards are left alone.
  void reduce_scatter(const Tensor& all, Comm& group, Stream& stream) const {
    if (sent_.empty()) return group.reduce_scatter(all, stream);
    const int64_t P = group.size(), n = exact_div(all.numel(), P, "reduce_scatter: elements over ranks");
    if (P == 1) return;
    for_pieces(P, n, [&](int64_t begin, int64_t c) {
      const Tensor sent = sent_.slice(0, {P, c}), received = received_.slice(0, {P, 1, c}),
                   sum = sent_.slice(0, {1, c});
      copy_box(sent, {0, c, 0}, all, {begin, n, 0}, {P, 1, c}, stream);
      group.all_to_all(received, sent, stream);
      merge_parts(sum, received, {}, stream);
      convert(all.slice(group.rank() * n + begin, {1, c}), sum, stream);
    });
  }
  // all (P n) = the shards of all ranks, which reduce_scatter() or round() has made.
  void all_gather(const Tensor& all, Comm& group, Stream& stream) const {
    if (sent_.empty()) return group.all_gather(all, stream);
    const int64_t P = group.size(), n = exact_div(all.numel(), P, "all_gather: elements over ranks");
    if (P == 1) return;
    for_pieces(P, n, [&](int64_t begin, int64_t c) {
      const Tensor piece = sent_.slice(0, {P, c});
      convert(piece.slice(group.rank() * c, {c}), all.slice(group.rank() * n + begin, {c}), stream);
      group.all_gather(piece, stream);
      copy_box(all, {begin, n, 0}, piece, {0, c, 0}, {P, 1, c}, stream);
    });
  }
  void all_reduce(const Tensor& all, Comm& group, Stream& stream) const {
    if (sent_.empty()) return group.all_reduce(all, stream);
    reduce_scatter(all, group, stream);
    all_gather(all, group, stream);
  }
  // Rounds what was added since.
  void round(const Tensor& t, Stream& stream) const {
    if (sent_.empty()) return;
    for_pieces(1, t.numel(), [&](int64_t begin, int64_t c) {
      convert(sent_.slice(0, {c}), t.slice(begin, {c}), stream);
      convert(t.slice(begin, {c}), sent_.slice(0, {c}), stream);
    });
  }

 private:
  static constexpr int64_t alignment = 64;

  // Calls f(begin, count) for pieces of n elements, P of which fit into the room.
  template <class F>
  void for_pieces(int64_t P, int64_t n, F&& f) const {
    const int64_t fits = sent_.numel() / P, most = n <= fits ? n : fits / alignment * alignment;
    for (int64_t begin = 0; begin < n; begin += most) f(begin, std::min(most, n - begin));
  }

  Tensor sent_, received_;
};

class GradientReducer {
 public:
  // blocks_open: the most blocks whose gradients are between start() and reduce() at the same time
  GradientReducer(Units& units, int64_t blocks_open, Arena& arena) : units_(units) {
    if (by_micro_batch() && zero().holds == Holds::training_state)
      buffers_ = UnitBuffers(units, "gradients in flight", units.precision().state, blocks_open + 1, arena);
    if (at_host()) {
      CHECK(by_micro_batch() && zero().sync == DpSync::all_reduce && !units.shares_embedding(),
            "sums of gradients in host memory: reduced by micro-batch, without servers and tables on two stages");
      int64_t largest = 0;
      units.for_each([&](size_t u) { largest = std::max(largest, units.unit(u).update_range().size); });
      arriving_ = arena.alloc("offloaded state", "gradients", units.precision().state,
                              {std::min(largest, zero().offload.piece)});
    }
    if (units.precision().wire == units.precision().state || zero().holds != Holds::training_state) return;
    CHECK(zero().sync == DpSync::all_reduce, "servers add gradients in {}", units.precision().state);
    int64_t ranks = 1, largest = 0;
    units.for_each([&](size_t u) {
      const int64_t its = units.zero_config(units.sharing_of(u)).ranks();
      ranks = std::max(ranks, its);
      if (its > 1) largest = std::max(largest, units.size_of(u));
    });
    if (largest > 0) wire_ = WireSums(units.precision().wire, ranks, largest, arena);
  }

  // From here on, sums (2) fp64 = the sum of the squares of the gradients before they are reduced, as far as this rank
  // counts them, and, after finish(), that of the gradients that this leaves out, of all ranks.
  void record_squares(const Tensor& sums) { squares_ = sums; }

  // Before the first micro-batch of a step. square_sums (units) fp64, or none: where finish() has put those of the
  // gradients that this rank counts in its shard of each unit
  void begin(Stream& compute, const Tensor& square_sums = {}) {
    waiting_.clear();
    square_sums_ = square_sums;
    summed_.clear();
    if (!squares_.empty()) llmc::zero(squares_, compute);
    for (const auto& [u, buffer] : current_) buffer->release(compute);  // left by an interrupted step
    current_.clear();
    std::vector<Tensor> zeroed;
    units_.for_each([&](size_t u) {
      if (by_micro_batch()) sums_to_write_.insert(u);
      else if (zero().offload.updates_at_host()) sums_to_begin_.insert(u);
      else units_.unit(u).begin_sum(zeroed);
    });
    llmc::zero(zeroed, compute);
  }
  // Before the first backward of a unit in a micro-batch.
  void start(size_t u, Stream& compute) {
    if (sums_to_begin_.erase(u) > 0) begin_sum(u, compute);
    if (!by_micro_batch()) return;
    UnitState& unit = units_.unit(u);
    if (u == 0) enqueue_waiting();
    Buffer* buffer = buffers_.take(u);
    CHECK(buffer != nullptr, "{}: its gradients have no buffer", unit.spec().name);
    compute.wait(buffer->free);
    unit.attach_gradients(buffer->memory);
    begin_sum(u, compute);
    current_.emplace_back(u, buffer);
  }
  // A graph has repeated a backward of this unit, with its start().
  void all_written(size_t u) {
    sums_to_begin_.erase(u);
    units_.unit(u).all_written();
  }
  // Before a later part of a unit's backward: continues the gradients of its oldest micro-batch.
  void resume(size_t u) {
    if (by_micro_batch()) units_.unit(u).attach_gradients(oldest(u)->second->memory);
  }
  // After the last backward of a unit in a micro-batch: reduces its gradients while the next unit computes.
  void reduce(size_t u, bool last_micro_batch, Stream& compute) {
    const UnitState& unit = units_.unit(u);
    unit.zero_unwritten(compute);
    const bool alone = units_.zero_config(units_.sharing_of(u)).ranks() == 1 && unit.partial_sums().empty();
    if (!by_micro_batch() && (!last_micro_batch || alone)) return;
    if (!squares_.empty()) add_squares(0, unit.own_gradients(), compute);
    if (!last_micro_batch || !delays_other_stages()) enqueue_waiting();
    waiting_.push_back({u, last_micro_batch, unit.gradients(), compute.record()});
    // Now, but for the embedding's, before the last micro-batch, and those of the last one that would delay other
    // stages.
    if (last_micro_batch ? !delays_other_stages() : u > 0) enqueue_waiting();
  }
  // After the forward of a block has been enqueued.
  void enqueue_waiting() {
    for (const Waiting& w : std::exchange(waiting_, {})) enqueue(w);
  }
  // After the last micro-batch: the compute stream waits for the sums. A tied table on two stages gets the sum of the
  // gradients of both.
  void finish(Stream& compute) {
    enqueue_waiting();
    CHECK(sums_to_write_.empty(), "the gradients of {} units were not reduced", sums_to_write_.size());
    CHECK(sums_to_begin_.empty(), "the gradients of {} units were not begun", sums_to_begin_.size());
    Groups& groups = units_.groups();
    if (units_.shares_embedding()) {
      groups.reduce_stream().wait(compute.record());
      groups[GroupName::tied_gradients].all_reduce(units_.front().reduced_gradients(), groups.reduce_stream());
    }
    compute.wait(groups.reduce_stream().record());
    for (size_t u = 0; u < units_.size() && !square_sums_.empty(); ++u)
      if (!summed_.contains(u)) square_sum_of(u, place_of_sum(u), compute);
    if (!squares_.empty() && groups.me.replica == 0)
      units_.for_each([&](size_t u) { add_squares(1, units_.unit(u).counted_partial_sums(), compute); });
  }

  // out (1) fp64 = the square sum of the gradients that this rank counts in its shard of a unit, or, on a parameter
  // server, in shard `k`.
  void square_sum_of(size_t u, const Tensor& out, Stream& compute, std::optional<int> k = std::nullopt) const {
    const int shard = k.value_or(units_.sharers(u).shard);
    const std::vector<Tensor> counted = units_.has(u) ? units_.unit(u).counted_gradients(shard) : std::vector<Tensor>();
    if (counted.empty()) llmc::zero(out, compute);
    for (size_t i = 0; i < counted.size(); ++i)
      square_sum(out, counted[i], compute, i == 0 ? Accumulate::no : Accumulate::yes);
  }

 private:
  using Buffer = UnitBuffers::Buffer;
  const ZeroConfig& zero() const { return units_.zero_config(); }
  bool by_micro_batch() const { return zero().grad_reduce == GradReduce::micro; }
  bool at_host() const { return zero().offload.has(Offloaded::gradients) && zero().holds == Holds::training_state; }
  // With NCCL, a collective of the compute stream (of --tp) waits until reductions enqueued before it have begun; and
  // for the last backward of a stage wait all stages before it. So there reductions come after it.
  bool delays_other_stages() const {
    const Layout& layout = units_.groups().layout;
    return !by_micro_batch() && layout.pipeline.stages > 1 && layout.tensor.ranks > 1;
  }

  void begin_sum(size_t u, Stream& compute) {
    std::vector<Tensor> zeroed;
    units_.unit(u).begin_sum(zeroed);
    llmc::zero(zeroed, compute);
  }

  // A reduction that is not enqueued yet.
  struct Waiting {
    size_t unit;
    bool last_micro_batch;
    Tensor gradients;
    Event computed;
  };
  void enqueue(const Waiting& waiting) {
    const auto& [u, last_micro_batch, all, computed] = waiting;
    const UnitState& unit = units_.unit(u);
    Groups& groups = units_.groups();
    Stream& stream = groups.reduce_stream();
    stream.wait(computed);
    const Tensor shard = all.slice(unit.shard_range().begin, {unit.shard_range().size});
    if (zero().sync == DpSync::all_reduce) {
      Comm& sharers = units_.sharers(u).gradients;
      wire_.reduce_scatter(all, sharers, stream);  // the shard group first, then the replicas (contract 3)
      wire_.all_reduce(shard, groups[GroupName::replicas], stream);
      sum_partial(unit, all, stream);
      if (zero().stage == 0) wire_.all_gather(all, sharers, stream);
    } else {
      groups[GroupName::gradients].push(all, zero().owners(), stream);
    }
    if (by_micro_batch()) {
      const bool first = sums_to_write_.erase(u) > 0;
      if (const Range kept = unit.update_range(); kept.size > 0) {
        const Tensor mine = all.slice(kept.begin, {kept.size});
        if (at_host()) add_at_host(u, mine, first, last_micro_batch, stream);
        else if (first) copy(unit.gradient_sum(), mine, stream);
        else add_to(unit.gradient_sum(), mine, stream);
      }
      const auto current = oldest(u);
      groups.hooks.released(current->second->memory, stream);
      current->second->release(stream);
      current_.erase(current);
    } else {
      groups.hooks.released_except(all, unit.update_range(), stream);
    }
    if (last_micro_batch && !at_host()) sum_squares(u, stream);
  }

  // sum = or += mine, where the sum is in host memory: it is added to what is on the device, piece by piece, and goes
  // back from there.
  void add_at_host(size_t u, const Tensor& mine, bool first, bool last_micro_batch, Stream& stream) {
    UnitState& unit = units_.unit(u);
    for (int64_t begin = 0, n; begin < mine.numel() && !first; begin += n) {
      n = std::min(arriving_.numel(), mine.numel() - begin);
      copy_to_device(arriving_.slice(0, {n}), unit.gradient_sum().slice(begin, {n}), stream);
      add_to(mine.slice(begin, {n}), arriving_.slice(0, {n}), stream);
    }
    copy_to_host(unit.gradient_sum(), mine, stream);
    if (!last_micro_batch) return;
    unit.attach(unit.update_range(), {{unit.gradient_sum(), mine}});
    sum_squares(u, stream);
    unit.detach();
  }

  Tensor place_of_sum(size_t u) const { return square_sums_.slice(static_cast<int64_t>(u), {1}); }
  // On the stream of reductions, unless more is added to the gradients, or its scratch memory is too small.
  void sum_squares(size_t u, Stream& stream) {
    const int64_t scratch = ceil_div(units_.unit(u).shard_range().size, square_sum_block) * size_of(DType::fp64);
    CHECK(!at_host() || scratch <= Groups::scratch_bytes, "unit {} is too large for sums of gradients in host memory",
          units_.unit(u).spec().name);
    if (square_sums_.empty() || (units_.groups().ranks() == 1 && !at_host()) || scratch > Groups::scratch_bytes) return;
    if (u == 0 && units_.shares_embedding()) return;
    square_sum_of(u, place_of_sum(u), stream);
    summed_.insert(u);
  }

  // Sums, in this rank's shard, the partial gradients of the tensor-parallel ranks that have copies of a parameter.
  // Each sends 2 (P - 1) / P of the bytes of such gradients in its shard.
  void sum_partial(const UnitState& unit, const Tensor& gradients, Stream& stream) {
    Groups& groups = units_.groups();
    for (const auto& [range, copies] : unit.partial_sums()) {
      const Range r = overlap(range, unit.shard_range());
      if (r.size == 0) continue;
      Comm& group =
          groups[copies == groups.layout.tensor.ranks ? GroupName::partial_gradients : GroupName::head_gradients];
      const Tensor partial = gradients.slice(r.begin, {r.size});
      group.all_reduce(partial, stream);
      if (units_.zero_config(unit.spec().sharing).ranks() > 1) wire_.round(partial, stream);  // stage 0 gathers it
    }
  }
  void add_squares(int64_t sum, const std::vector<Tensor>& gradients, Stream& compute) const {
    for (const Tensor& g : gradients) square_sum(squares_.slice(sum, {1}), g, compute, Accumulate::yes);
  }
  std::vector<std::pair<size_t, Buffer*>>::iterator oldest(size_t u) {
    const auto found = std::find_if(current_.begin(), current_.end(), [&](const auto& c) { return c.first == u; });
    CHECK(found != current_.end(), "{}: its gradients were not begun", units_.unit(u).spec().name);
    return found;
  }

  Units& units_;
  UnitBuffers buffers_;
  Tensor arriving_;  // a piece of a sum from host memory
  WireSums wire_;    // in the dtype in which gradients travel among data-parallel ranks
  std::vector<Waiting> waiting_;
  Tensor square_sums_;
  std::set<size_t> summed_;                          // units whose square sums are there, or on their way
  Tensor squares_;                                   // none: they are not wanted
  std::set<size_t> sums_to_write_;                   // units whose first micro-batch is not yet reduced
  std::set<size_t> sums_to_begin_;                   // whose gradients the host's update may still have to read
  std::vector<std::pair<size_t, Buffer*>> current_;  // unit and buffer, between start and reduction
};

}  // namespace llmc
