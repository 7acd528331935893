// sample_order.h: which samples a run takes, in which order (contract 8): the mix of its sources, and the keyed order
// of each one. Everything is a pure function of the sources' positions where a stretch of the run begins, of the seeds
// and of the sample's number; nothing is stored and no file is read.
//
// A source is cut into blocks of the run's longest sequence, permuted in every epoch. Samples of that length are
// blocks; shorter ones are parts of a block, in order. Where a longer length takes over in the middle of one of its
// parts, the first sample of each source is only the rest of it: nothing is repeated or skipped.
#pragma once
#include "core/rng.h"
#include "core/shape.h"
#include "data/mixture.h"

namespace llmc {

// From this block of an epoch on, another seed orders the blocks.
struct Reseed {
  int64_t epoch = 0, block = 0;
  uint64_t seed = 0;
  bool operator==(const Reseed&) const = default;
};

// The order of the blocks of one source, epoch after epoch.
class BlockOrder {
 public:
  // name: empty for a run's only source. reseeds: in ascending order; each permutes the rest of its epoch anew.
  BlockOrder(int64_t blocks, bool shuffle, uint64_t seed, std::string name, std::vector<Reseed> reseeds)
      : blocks_(blocks), shuffle_(shuffle), seed_(seed), name_(std::move(name)), reseeds_(std::move(reseeds)) {
    CHECK(blocks > 0);
  }

  // The block in the files that comes at `index` of an epoch.
  int64_t at(int64_t epoch, int64_t index) {
    if (!shuffle_) return index;
    if (epoch != epoch_ || !order_) begin_epoch(epoch);
    // Each rest permutes the end of the order before it, so that no block comes twice and none is skipped.
    int64_t at = index;
    for (auto rest = rests_.rbegin(); rest != rests_.rend(); ++rest)
      if (index >= rest->begin) at = rest->begin + rest->order(at - rest->begin);
    return (*order_)(at);
  }

 private:
  void begin_epoch(int64_t epoch) {
    const std::string name = formatted("data order of {}epoch {}", name_.empty() ? "" : name_ + ", ", epoch);
    uint64_t seed = seed_;  // at the beginning of the epoch
    rests_.clear();
    for (const Reseed& other : reseeds_) {
      if (other.epoch < epoch || (other.epoch == epoch && other.block == 0)) seed = other.seed;
      else if (other.epoch == epoch && other.block < blocks_)
        rests_.push_back({other.block, Permutation(blocks_ - other.block, other.seed,
                                                   formatted("{} from sample {}", name, other.block))});
    }
    order_.emplace(blocks_, seed, name);
    epoch_ = epoch;
  }

  // The rest of an epoch when another seed came.
  struct Rest {
    int64_t begin;
    Permutation order;
  };

  int64_t blocks_;
  bool shuffle_;
  uint64_t seed_;
  std::string name_;
  std::vector<Reseed> reseeds_;
  int64_t epoch_ = -1;
  std::optional<Permutation> order_;
  std::vector<Rest> rests_;
};

// How far a run has read a source: its tokens of this epoch, and its samples of all epochs.
struct SourcePosition {
  int64_t epoch = 0, tokens = 0, samples = 0;
  bool operator==(const SourcePosition&) const = default;
};

// What a run takes from its sources while the mix and the length of the samples stay the same.
class SampleOrder {
 public:
  struct Source {
    int64_t epoch_tokens;  // a whole number of blocks
    SourcePosition begin;  // where this order begins
  };
  // weights: see Mixture. T divides the length of the blocks. mixed: how many samples of this mix came before.
  SampleOrder(std::vector<Source> sources, const std::vector<int64_t>& weights, int64_t T, int64_t mixed = 0)
      : sources_(std::move(sources)), mixture_(weights), T_(T), mixed_(mixed), counted_(mixture_.counts(mixed)) {
    for (const Source& source : sources_) CHECK(T > 0 && source.epoch_tokens > 0 && source.epoch_tokens % T == 0);
  }

  // Where a sample is: `length` targets from token `token` of the source's epoch on.
  struct Place {
    size_t source;
    int64_t epoch, token, length;
  };
  Place at(int64_t n) const {
    const Mixture::Place mixed = mixture_.at(mixed_ + n);
    const Source& source = sources_[mixed.source];
    const int64_t begin = begin_of(source, mixed.before - counted_[mixed.source]), token = begin % source.epoch_tokens;
    return {mixed.source, source.begin.epoch + begin / source.epoch_tokens, token, T_ - begin % T_};
  }
  // The targets of the samples [0, n).
  int64_t targets(int64_t n) const {
    int64_t all = 0;
    const std::vector<int64_t> counts = counts_of(n);
    for (size_t s = 0; s < sources_.size(); ++s) all += begin_of(sources_[s], counts[s]) - sources_[s].begin.tokens;
    return all;
  }
  // Where each source is after n samples.
  std::vector<SourcePosition> after(int64_t n) const {
    std::vector<SourcePosition> all;
    const std::vector<int64_t> counts = counts_of(n);
    for (size_t s = 0; s < sources_.size(); ++s) {
      const Source& source = sources_[s];
      const int64_t end = begin_of(source, counts[s]);
      all.push_back({source.begin.epoch + end / source.epoch_tokens, end % source.epoch_tokens,
                     source.begin.samples + counts[s]});
    }
    return all;
  }

 private:
  // Of the samples [0, n), each source's.
  std::vector<int64_t> counts_of(int64_t n) const {
    std::vector<int64_t> counts = mixture_.counts(mixed_ + n);
    for (size_t s = 0; s < counts.size(); ++s) counts[s] -= counted_[s];
    return counts;
  }
  // The first token of a source's sample k here, counted through epochs; sample 0 ends at the next multiple of T.
  int64_t begin_of(const Source& source, int64_t k) const {
    const int64_t begin = source.begin.tokens;
    return k == 0 ? begin : begin / T_ * T_ + k * T_;
  }

  std::vector<Source> sources_;
  Mixture mixture_;
  int64_t T_, mixed_;
  std::vector<int64_t> counted_;  // of each source, in the samples before
};

}  // namespace llmc
