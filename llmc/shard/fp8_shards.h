// fp8_shards.h: what stage 3 gathers with --gather-dtype fp8: the matrices of linear layers as E4M3, in blocks of 128 x
// 128, each divided by a power of two (ops/ops_quantise.h). Once per update the ranks tell each other the largest
// number of each block in their shards, 4 bytes, so that blocks which several of them have parts of are scaled alike,
// and what is no such matrix (norms, biases, a router); each rounds its shard. Then a gather is one byte per weight,
// where bf16 is two. Products round gathered weights again, to the same numbers.
#pragma once
#include "shard/unit_state.h"

namespace llmc {

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
    int64_t tile = 0, at = 0;
    for (const LinearMatrix& m : unit_.linear_matrices()) {
      const TiledPart part = m.whole();
      detail::tiles_from_fp8(whole.slice(m.begin, {part.n}), numbers.slice(m.begin, {part.n}),
                             scales_.slice(tile, {part.tiles()}), part, stream);
      tile += part.tiles();
    }
    for (const Range& r : unit_.besides_linear_matrices()) {
      copy(whole.slice(r.begin, {r.size}), rest_.slice(at, {r.size}), stream);
      at += r.size;
    }
  }

 private:
  // E4M3 as it travels. As fp32, a word is only NaN if one of its numbers is.
  static Tensor words(Tensor numbers) {
    numbers.shape = {exact_div(numbers.numel(), 4, "words of fp8")};
    numbers.dtype = DType::fp32;
    return numbers;
  }

  // all (ranks, tiles()): the largest number of each block, in each rank's shard
  void round_shard(Tensor all, Comm& group, Stream& stream) {
    const Range own = unit_.shard_range();
    const auto for_own_parts = [&](auto&& f) {
      int64_t tile = 0;
      for (const LinearMatrix& m : unit_.linear_matrices()) {
        TiledPart part = m.whole();
        const int64_t first_tile = std::exchange(tile, tile + part.tiles());
        const Range r = overlap({m.begin, part.n}, own);
        if (r.size == 0) continue;
        part.first = r.begin - m.begin, part.n = r.size;
        f(part, first_tile, r.begin - own.begin);
      }
    };
    const Tensor mine = all.slice(group.rank() * scales_.numel(), {scales_.numel()});
    zero(mine, stream);
    for_own_parts([&](const TiledPart& part, int64_t tile, int64_t begin) {
      detail::tile_maxima(mine.slice(tile, {part.tiles()}), unit_.weight_shard().slice(begin, {part.n}), part, stream);
    });
    group.all_gather(all.reshaped({all.numel()}), stream);
    detail::scales_of_ranks(scales_, all, stream);
    zero(words(numbers_), stream);
    for_own_parts([&](const TiledPart& part, int64_t tile, int64_t begin) {
      detail::tiles_to_fp8(numbers_.slice(begin, {part.n}), unit_.weight_shard().slice(begin, {part.n}),
                           scales_.slice(tile, {part.tiles()}), part, stream);
    });
    zero(rest_, stream);  // the others' parts, to which they add theirs: exactly
    int64_t at = 0;
    for (const Range& r : unit_.besides_linear_matrices()) {
      if (const Range here = overlap(r, own); here.size > 0)
        copy(rest_.slice(at + here.begin - r.begin, {here.size}),
             unit_.weight_shard().slice(here.begin - own.begin, {here.size}), stream);
      at += r.size;
    }
    if (!rest_.empty()) group.all_reduce(rest_, stream);
  }

  const UnitState& unit_;
  bool outdated_ = true;
  Tensor numbers_;  // (shard) E4M3; 0 where other parameters are
  Tensor scales_;   // (blocks of all matrices) fp32
  Tensor rest_;     // of the whole unit
};

}  // namespace llmc
