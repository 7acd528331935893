// gathered_weights.h: when the weights of a unit are whole. At stage 3 only while they are used: a unit is gathered one
// acquire() ahead, and released after it was used. At stages 1 and 2, and with servers, they are gathered once after
// each update, and acquire() waits for those of its unit alone, so that the others arrive while the next step computes.
// At stage 0 every rank has updated all of them. At every stage acquire() waits for what the host updates
// (host_update.h).
//
// A gather is enqueued two units ahead of its use, not right after the update: NCCL launches the collectives of a rank
// in the order in which the host enqueues them, and one of the compute stream, as in a layer of --tp, would begin only
// when all gathers enqueued before it have begun.
#pragma once
#include <deque>

#include "shard/host_update.h"

namespace llmc {

// What stage 3 gathers with --gather-dtype fp8: the matrices of linear layers as E4M3, in blocks of 128 x 128, each
// divided by a power of two (ops/ops_quantise.h). Once per update the ranks tell each other the largest number of each
// block in their shards, 4 bytes, so that blocks which several of them have parts of are scaled alike, and what is no
// such matrix (norms, biases, a router); each rounds its shard. Then a gather is one byte per weight, where bf16 is
// two. Products round gathered weights again, to the same numbers.
class Fp8Shard {
 public:
  Fp8Shard(const UnitState& unit, Arena& arena) : unit_(unit) {
    int64_t tiles = 0, rest = 0;
    for (const LinearMatrix& m : unit.linear_matrices()) tiles += m.whole().tiles();
    for (const Range& r : unit.besides_linear_matrices()) rest += r.size;
    const auto alloc = [&](DType dtype, int64_t n) {
      return arena.alloc("weights in fp8", unit.spec().name.c_str(), dtype, {n});
    };
    numbers_ = alloc(DType::e4m3, unit.shard_range().size);
    scales_ = alloc(DType::fp32, tiles);
    rest_ = alloc(unit.weight_shard().dtype, rest);
  }

  // Before a step: the weights may have changed.
  void weights_changed() { outdated_ = true; }

  int64_t tiles() const { return scales_.numel(); }

  // whole = the unit's weights, from those of all ranks of the shard group.   numbers: room for the unit, E4M3;
  // maxima (ranks tiles()) fp32: room
  void gather(Tensor whole, Tensor numbers, Tensor maxima, Comm& group, Stream& stream) {
    if (std::exchange(outdated_, false)) round_shard(maxima.reshaped({group.size(), tiles()}), group, stream);
    const Range own = unit_.shard_range();
    copy(words(numbers.slice(own.begin, {own.size})), words(numbers_), stream);
    group.all_gather(words(numbers), stream);
    const Range all{0, unit_.size()};
    for_parts(all, [&](const TiledPart& part, int64_t tile, const Range& r) {
      detail::tiles_from_fp8(slice_of(whole, all, r), slice_of(numbers, all, r), scales_.slice(tile, {part.tiles()}),
                             part, stream);
    });
    for_rest(all,
             [&](const Range& r, int64_t at) { copy(slice_of(whole, all, r), rest_.slice(at, {r.size}), stream); });
  }

 private:
  // E4M3 as it travels. As fp32, a word is only NaN if one of its numbers is.
  static Tensor words(Tensor numbers) {
    numbers.shape = {exact_div(numbers.numel(), 4, "words of fp8")};
    numbers.dtype = DType::fp32;
    return numbers;
  }

  // Calls f(part, its matrix's first tile, elements of the unit) for what each matrix has of some elements of the unit.
  template <class F>
  void for_parts(const Range& some, F&& f) const {
    int64_t tile = 0;
    for (const LinearMatrix& m : unit_.linear_matrices()) {
      TiledPart part = m.whole();
      const int64_t first_tile = std::exchange(tile, tile + part.tiles());
      const Range r = overlap({m.begin, part.n}, some);
      if (r.size == 0) continue;
      part.first = r.begin - m.begin, part.n = r.size;
      f(part, first_tile, r);
    }
  }
  // Calls f(elements of the unit, where they are in rest_) for those that no matrix has.
  template <class F>
  void for_rest(const Range& some, F&& f) const {
    int64_t at = 0;
    for (const Range& r : unit_.besides_linear_matrices()) {
      if (const Range in = overlap(r, some); in.size > 0) f(in, at + in.begin - r.begin);
      at += r.size;
    }
  }

  // all (ranks, tiles()): the largest number of each block, in each rank's shard
  void round_shard(Tensor all, Comm& group, Stream& stream) {
    const Range own = unit_.shard_range();
    const Tensor mine = all.slice(group.rank() * scales_.numel(), {scales_.numel()});
    zero(mine, stream);
    for_parts(own, [&](const TiledPart& part, int64_t tile, const Range& r) {
      detail::tile_maxima(mine.slice(tile, {part.tiles()}), slice_of(unit_.weight_shard(), own, r), part, stream);
    });
    group.all_gather(all.reshaped({all.numel()}), stream);
    detail::scales_of_ranks(scales_, all, stream);
    zero(words(numbers_), stream);
    for_parts(own, [&](const TiledPart& part, int64_t tile, const Range& r) {
      detail::tiles_to_fp8(slice_of(numbers_, own, r), slice_of(unit_.weight_shard(), own, r),
                           scales_.slice(tile, {part.tiles()}), part, stream);
    });
    zero(rest_, stream);  // the others' parts, to which they add theirs: exactly
    for_rest(own, [&](const Range& r, int64_t at) {
      copy(rest_.slice(at, {r.size}), slice_of(unit_.weight_shard(), own, r), stream);
    });
    if (!rest_.empty()) group.all_reduce(rest_, stream);
  }

  const UnitState& unit_;
  bool outdated_ = true;
  Tensor numbers_;  // (shard) E4M3; 0 where other parameters are
  Tensor scales_;   // (blocks of all matrices) fp32
  Tensor rest_;     // of the whole unit
};

class GatheredWeights {
 public:
  GatheredWeights(Units& units, HostUpdate& host_update, Arena& arena) : units_(units), host_update_(host_update) {
    if (!sharded()) return;
    buffers_ = UnitBuffers(units, "gathered weights", units.precision().weights, 2, arena);
    if (!units.precision().gathers_fp8) return;
    int64_t largest = 0, most_maxima = 0;
    units.for_each([&](size_t u) {
      if (units.unit(u).linear_matrices().empty()) return;
      const Fp8Shard& shard = fp8_.emplace(u, Fp8Shard(units.unit(u), arena)).first->second;
      largest = std::max(largest, units.unit(u).size());
      most_maxima = std::max(most_maxima, units.sharers(u).weights.size() * shard.tiles());
    });
    if (fp8_.empty()) return;  // no block has products in fp8
    fp8_numbers_ = arena.alloc("gathered weights", "a unit in fp8", DType::e4m3, {largest});
    fp8_maxima_ = arena.alloc("gathered weights", "largest numbers of blocks", DType::fp32, {most_maxima});
  }

  // Whether acquire() must be foretold by start_pass().
  bool sharded() const { return units_.zero_config().stage == 3; }
  // Whether weights travel in fp8, if --gather-dtype says so: in training.
  enum class Travel : uint8_t { as_stored, as_trained };
  // `order`: the units in the order in which acquire() will be called for them.
  void start_pass(std::vector<size_t> order, Stream& compute, Travel travel = Travel::as_stored) {
    if (!sharded()) return;
    travel_ = travel;
    for (const Gathered& g : gathered_) {  // what an interrupted pass had gathered ahead or still held
      compute.wait(g.buffer->ready);
      g.buffer->release(compute);
    }
    gathered_.clear();
    order_ = std::move(order);
    issued_ = 0;
    updated_weights_ = compute.record();
    gather_ahead();
  }
  const UnitState& acquire(size_t u, Stream& compute) {
    if (!sharded()) {
      while (!outdated_.empty() && outdated_.front().first <= u) gather_updated();
      if (const auto found = arriving_.find(u); found != arriving_.end()) {
        compute.wait(found->second);
        arriving_.erase(found);
      }
      host_update_.wait_for(u, compute);
      gather_updated_ahead();
      units_.unit(u).make_fp8_again(compute);
      return units_.unit(u);
    }
    const auto next = std::ranges::find(gathered_, false, &Gathered::acquired);
    CHECK(next != gathered_.end() && next->unit == u);
    compute.wait(next->buffer->ready);
    units_.unit(u).attach_weights(next->buffer->memory);
    next->acquired = true;
    gather_ahead();
    return units_.unit(u);
  }
  void release(size_t u, Stream& compute) {
    if (!sharded()) return;
    const auto held = std::ranges::find(gathered_, u, &Gathered::unit);
    CHECK(held != gathered_.end() && held->acquired);
    units_.groups().hooks.released(held->buffer->memory, compute);
    held->buffer->release(compute);
    gathered_.erase(held);
    gather_ahead();
  }

  // After the update of a unit, or once the host has begun it; called for all units in their order.
  void updated(size_t u, Stream& compute) {
    const ZeroConfig& zero = units_.zero_config(units_.sharing_of(u));
    if (sharded() || zero.updates() == ZeroConfig::Updates::everyone || zero.ranks() == 1) return;
    units_.groups().hooks.released_except(units_.unit(u).weights(), units_.unit(u).update_range(), compute);
    outdated_.emplace_back(u, compute.record());
    gather_updated_ahead();
  }
  // Whether weights of the last update have yet to be waited for.
  bool arriving() const { return !outdated_.empty() || !arriving_.empty() || host_update_.under_way(); }
  // Waits for all of them: before anything but acquire() reads weights.
  void settle(Stream& compute) {
    while (!outdated_.empty()) gather_updated();
    for (const auto& [u, event] : arriving_) compute.wait(event);
    arriving_.clear();
    for (const Gathered& g : gathered_) compute.wait(g.buffer->ready);  // of an interrupted pass
    units_.for_each([&](size_t u) {
      host_update_.wait_for(u, compute);
      units_.unit(u).make_fp8_again(compute);
    });
  }
  // Before a step: the numbers in fp8 of each unit's weights are made again when the unit is first used.
  void begin_step() {
    units_.for_each([&](size_t u) { units_.unit(u).weights_changed(); });
    for (auto& [u, shard] : fp8_) shard.weights_changed();
  }

  // Calls f(unit) with all of its weights, for a checkpoint; called by all ranks of the shard group.
  template <class F>
  void with_whole_unit(size_t u, Stream& compute, F&& f) {
    start_pass({u}, compute);
    const UnitState& unit = acquire(u, compute);
    compute.synchronize();
    f(unit);
    release(u, compute);
  }

 private:
  struct Gathered {
    size_t unit;
    UnitBuffers::Buffer* buffer;
    bool acquired = false;
  };

  // Issues the gather of the next unit of order_, if it has not been issued and a buffer is free.
  void gather_ahead() {
    if (issued_ == order_.size() || (!gathered_.empty() && !gathered_.back().acquired)) return;
    const size_t u = order_[issued_];
    UnitBuffers::Buffer* buffer = buffers_.take(u);
    if (buffer == nullptr) return;
    gathered_.push_back({u, buffer});
    ++issued_;
    Stream& stream = units_.groups().gather_stream();
    stream.wait(updated_weights_);
    stream.wait(buffer->free);
    host_update_.wait_for(u, stream);
    const UnitState& unit = units_.unit(u);
    const Tensor all = unit.in_buffer(buffer->memory);
    if (const auto fp8 = fp8_.find(u); fp8 != fp8_.end() && travel_ == Travel::as_trained) {
      Comm& group = units_.sharers(u).weights;
      fp8->second.gather(all, fp8_numbers_.slice(0, {unit.size()}),
                         fp8_maxima_.slice(0, {group.size() * fp8->second.tiles()}), group, stream);
      buffer->ready = stream.record();
      return;
    }
    const Tensor own = all.slice(unit.shard_range().begin, {unit.shard_range().size});
    if (units_.zero_config().offload.has(Offloaded::weights)) {
      stream.wait(units_.lane(Lane::to_host).record());  // the last update's
      copy_to_device(own, unit.weight_shard(), stream);
    } else {
      copy(own, unit.weight_shard(), stream);
    }
    units_.sharers(u).weights.all_gather(all, stream);
    buffer->ready = stream.record();
  }

  // Begins to gather the weights of the first unit of outdated_ from the ranks that have updated them.
  void gather_updated() {
    const auto [u, updated] = std::move(outdated_.front());
    outdated_.pop_front();
    const Tensor weights = units_.unit(u).weights();
    Comm& group = units_.sharers(u).weights;
    Stream& stream = units_.groups().gather_stream();
    stream.wait(updated);
    host_update_.wait_for(u, stream);
    switch (units_.zero_config().sync) {
      case DpSync::all_reduce: group.all_gather(weights, stream); break;
      case DpSync::parameter_server_chain: group.broadcast(weights, 0, stream); break;
      case DpSync::parameter_server:
      case DpSync::partitioned_server: group.pull(weights, units_.zero_config().owners(), stream); break;
    }
    arriving_[u] = stream.record();
  }
  void gather_updated_ahead() {
    while (!outdated_.empty() && arriving_.size() < 2) gather_updated();
  }

  Units& units_;
  HostUpdate& host_update_;
  UnitBuffers buffers_;
  std::map<size_t, Fp8Shard> fp8_;   // with --gather-dtype fp8, of units that have linear layers
  Tensor fp8_numbers_, fp8_maxima_;  // of one unit: the gather stream uses them for one after another
  Travel travel_ = Travel::as_stored;
  std::deque<std::pair<size_t, Event>> outdated_;  // units updated, whose gathers are not begun
  std::map<size_t, Event> arriving_;               // units whose gathers are begun, and not yet waited for
  std::vector<size_t> order_;                      // the units to acquire in this pass
  size_t issued_ = 0;                              // how many of them have their gather begun
  std::vector<Gathered> gathered_;                 // issued and not yet released; at most the last one is not acquired
  Event updated_weights_;
};

}  // namespace llmc
