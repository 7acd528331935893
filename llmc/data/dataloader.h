// dataloader.h: the order of samples (contract 8): a file of n tokens holds floor((n-1)/T) samples; sample k is tokens
// [kT, kT+T]; the order depends only on the seed, the epoch and the sample's index; after branches with another seed,
// also on where they began.
#pragma once
#include <algorithm>
#include <optional>
#include <string>
#include <vector>

#include "core/rng.h"
#include "data/token_file.h"

namespace llmc {

// The samples of files of tokens: those of the first file, then those of the second, and so on.
class TokenShards : public TokenFiles {
 public:
  // Errors name `option`.
  TokenShards(const std::string& pattern, int64_t seq_len, const char* option = "--train-data")
      : TokenFiles(pattern, option), seq_len_(seq_len) {
    for (const int64_t tokens : tokens_of_files()) {
      first_samples_.push_back(samples_);
      samples_ += (tokens - 1) / seq_len;
    }
    CHECK(samples_ > 0,
          "{} {}: {} tokens in {} file(s) hold no sample of --seq-len {} + 1 tokens; shorten --seq-len or add data",
          option, pattern, tokens(), count(), seq_len);
  }

  int64_t samples() const { return samples_; }  // in one epoch
  int64_t seq_len() const { return seq_len_; }

  // out (T + 1) = the tokens of sample `index`, each below vocab_size. Thread-safe.
  void read_sample(int64_t index, int64_t vocab_size, std::vector<int32_t>& out) const {
    CHECK(index >= 0 && index < samples_);
    const int64_t i = std::ranges::upper_bound(first_samples_, index) - first_samples_.begin() - 1,
                  first = (index - first_samples_[static_cast<size_t>(i)]) * seq_len_;
    read(i, first, seq_len_ + 1, vocab_size, out);
  }

 private:
  int64_t seq_len_, samples_ = 0;
  std::vector<int64_t> first_samples_;  // of each file
};

// From this position of the stream on, another seed orders the samples.
struct Reseed {
  int64_t position = 0;
  uint64_t seed = 0;
  bool operator==(const Reseed&) const = default;
};

// The endless stream of samples, epoch after epoch.
class DataLoader {
 public:
  struct Config {
    uint64_t seed = 0;
    std::vector<Reseed> reseeds = {};  // in ascending order; each permutes the rest of its epoch anew
    bool shuffle = false;
    int64_t vocab_size = 0;
    std::optional<int32_t> end_of_text = std::nullopt;  // restarts positions at 0; none: no token does
  };
  // The reading rank: `rank` of `ranks` that share a step, each with `batch_size` sequences per micro-batch.
  struct Reader {
    int64_t rank = 0, ranks = 1, batch_size = 1;
  };

  DataLoader(const TokenShards& shards, const Config& config) : shards_(shards), config_(config) {}

  // The index in the files of sample `position` of the stream.
  int64_t sample_at(int64_t position) {
    const int64_t epoch = position / shards_.samples(), index = position % shards_.samples();
    if (!config_.shuffle) return index;
    if (epoch != epoch_ || !order_) begin_epoch(epoch);
    // Each rest permutes the end of the order before it, so that no sample comes twice and none is skipped.
    int64_t at = index;
    for (auto rest = rests_.rbegin(); rest != rests_.rend(); ++rest)
      if (index >= rest->begin) at = rest->begin + rest->order(at - rest->begin);
    return (*order_)(at);
  }

  // The micro-batch (batch_size, T) of the step that begins at stream position `cursor`.
  void read_batch(int64_t cursor, int64_t micro_batch, const Reader& who, std::vector<int32_t>& tokens,
                  std::vector<int32_t>& targets, std::vector<int32_t>& positions) {
    const size_t T = static_cast<size_t>(shards_.seq_len()), rows = static_cast<size_t>(who.batch_size);
    for (std::vector<int32_t>* v : {&tokens, &targets, &positions}) v->resize(rows * T);
    for (size_t b = 0; b < rows; ++b) {
      const int64_t position = cursor + (micro_batch * who.ranks + who.rank) * who.batch_size + static_cast<int64_t>(b);
      shards_.read_sample(sample_at(position), config_.vocab_size, sample_);
      int32_t place = 0;
      for (size_t t = 0; t < T; ++t) {
        if (sample_[t] == config_.end_of_text) place = 0;
        tokens[b * T + t] = sample_[t];
        targets[b * T + t] = sample_[t + 1];
        positions[b * T + t] = place++;
      }
    }
  }

 private:
  void begin_epoch(int64_t epoch) {
    const int64_t n = shards_.samples();
    const std::string name = formatted("data order of epoch {}", epoch);
    uint64_t seed = config_.seed;  // at the beginning of the epoch
    rests_.clear();
    for (const Reseed& other : config_.reseeds) {
      const int64_t begin = other.position - epoch * n;
      if (begin <= 0) seed = other.seed;
      else if (begin < n)
        rests_.push_back({begin, Permutation(n - begin, other.seed, formatted("{} from sample {}", name, begin))});
    }
    order_.emplace(n, seed, name);
    epoch_ = epoch;
  }

  // The rest of an epoch when another seed came.
  struct Rest {
    int64_t begin;
    Permutation order;
  };

  const TokenShards& shards_;
  Config config_;
  int64_t epoch_ = -1;
  std::optional<Permutation> order_;
  std::vector<Rest> rests_;
  std::vector<int32_t> sample_;
};

}  // namespace llmc
