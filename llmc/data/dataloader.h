// dataloader.h: token shards in llm.c's format, and the order of samples (contract 8): a shard of n tokens holds
// floor((n-1)/T) samples; sample k is tokens [kT, kT+T]; the order depends only on the seed, the epoch and the sample's
// index; after branches with another seed, also on where they began. Format: a header of 256 little-endian int32,
// {magic, version, token count}, then the tokens: uint16 (20240520, 1) or uint32 (20240801, 7).
#pragma once
#include <algorithm>
#include <filesystem>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "core/checksum.h"
#include "core/files.h"
#include "core/rng.h"
#include "core/shape.h"
#include "data/no_shard.h"

namespace llmc {

// One file of tokens.
struct Shard {
  static constexpr int64_t header_bytes = 1024;
  File file;
  int64_t tokens;
  int64_t width;  // bytes of a token: 2 or 4
};

// Opens a shard and checks its header against its size.
inline Shard open_shard(const std::string& path) {
  File file = File::open_read(path);
  const int64_t size = file.size();
  CHECK(size >= Shard::header_bytes, "{}: {} bytes are too few for a token shard, whose header takes {}{}", path, size,
        Shard::header_bytes, detail::hint_of_no_shard(file));
  int32_t header[256];
  file.read_at(header, Shard::header_bytes, 0);
  const bool is_uint16 = header[0] == 20240520 && header[1] == 1, is_uint32 = header[0] == 20240801 && header[1] == 7;
  CHECK(is_uint16 || is_uint32,
        "{}: magic {} version {}, expected 20240520 version 1 (uint16) or 20240801 version 7 (uint32); not a token "
        "shard{}",
        path, header[0], header[1], detail::hint_of_no_shard(file));
  const int64_t width = is_uint16 ? 2 : 4, payload = size - Shard::header_bytes, tokens = payload / width;
  CHECK(payload % width == 0 && static_cast<uint32_t>(header[2]) == static_cast<uint32_t>(tokens),
        "{}: the header says {} tokens, but {} bytes follow it ({} per token); truncated or damaged: create it again",
        path, static_cast<uint32_t>(header[2]), payload, width);
  CHECK(tokens > 0, "{}: holds no tokens", path);
  return {std::move(file), tokens, width};
}

// Whether tokens look like bytes (data/tokenize_text.py: 0 to 255, and 256 for the end of text) in a far larger
// vocabulary.
inline bool look_like_bytes(int64_t largest_token, int64_t vocab_size) {
  return largest_token <= 256 && vocab_size > 2 * 257;
}

class TokenShards {
 public:
  // Checks every file that `pattern` matches; there may be more of them than a process can hold open. Errors name
  // `option`.
  TokenShards(const std::string& pattern, int64_t seq_len, const char* option = "--train-data") : seq_len_(seq_len) {
    for (const std::string& path : expand_glob(pattern, option)) {
      const Shard shard = open_shard(path);
      shards_.push_back({path, shard.tokens, shard.width, samples_});
      tokens_ += shard.tokens;
      samples_ += (shard.tokens - 1) / seq_len;
    }
    CHECK(samples_ > 0,
          "{} {}: {} tokens in {} file(s) hold no sample of --seq-len {} + 1 tokens; shorten --seq-len or add data",
          option, pattern, tokens_, shards_.size(), seq_len);
  }

  int64_t count() const { return static_cast<int64_t>(shards_.size()); }
  int64_t tokens() const { return tokens_; }
  int64_t samples() const { return samples_; }  // in one epoch
  int64_t seq_len() const { return seq_len_; }
  std::vector<std::string> paths() const {
    std::vector<std::string> all;
    for (const Placed& shard : shards_) all.push_back(shard.path);
    return all;
  }
  std::vector<int64_t> tokens_of_shards() const {
    std::vector<int64_t> all;
    for (const Placed& shard : shards_) all.push_back(shard.tokens);
    return all;
  }
  // A checksum of each shard, to notice that data have changed between a run and its resume: of all bytes if the shards
  // have at most 256 MiB together, otherwise of samples, the same fraction of each shard.
  std::vector<std::string> checksums() const {
    constexpr double most = 256 << 20;
    double bytes = 0;
    for (const Placed& shard : shards_) bytes += static_cast<double>(Shard::header_bytes + shard.tokens * shard.width);
    std::vector<std::string> all;
    for (const Placed& shard : shards_) all.push_back(sampled_checksum(shard.path, std::min(1.0, most / bytes)));
    return all;
  }
  bool has(const std::string& path) const {  // even if under another path
    std::error_code ignored;
    return std::any_of(shards_.begin(), shards_.end(),
                       [&](const Placed& shard) { return std::filesystem::equivalent(shard.path, path, ignored); });
  }

  // out (T + 1) = the tokens of sample `index`, each below vocab_size. Thread-safe.
  void read_sample(int64_t index, int64_t vocab_size, std::vector<int32_t>& out) const {
    CHECK(index >= 0 && index < samples_);
    const auto after = std::upper_bound(shards_.begin(), shards_.end(), index,
                                        [](int64_t i, const Placed& p) { return i < p.first_sample; });
    const Placed& shard = *std::prev(after);
    const std::shared_ptr<const File> file = files_->open_read(shard.path);
    CHECK(file->size() == Shard::header_bytes + shard.tokens * shard.width,
          "{}: its size has changed since the run began; restart the run", shard.path);
    const int64_t first = (index - shard.first_sample) * seq_len_, n = seq_len_ + 1;
    out.resize(static_cast<size_t>(n));
    if (shard.width == 4) {
      file->read_at(out.data(), n * 4, Shard::header_bytes + first * 4);
    } else {  // read into the upper half, then widen in place from the front
      uint16_t* narrow = reinterpret_cast<uint16_t*>(out.data()) + n;
      file->read_at(narrow, n * 2, Shard::header_bytes + first * 2);
      for (int64_t i = 0; i < n; ++i) {
        uint16_t token;
        std::memcpy(&token, narrow + i, sizeof token);
        out[static_cast<size_t>(i)] = token;
      }
    }
    for (int64_t i = 0; i < n; ++i) {
      const uint32_t token = static_cast<uint32_t>(out[static_cast<size_t>(i)]);
      CHECK(token < static_cast<uint64_t>(vocab_size),
            "{}: token {} at position {} is outside the model's vocabulary of {}; the data was made with another "
            "tokenizer, or --vocab-size is too small",
            shard.path, token, first + i, vocab_size);
    }
  }

 private:
  struct Placed {
    std::string path;
    int64_t tokens, width, first_sample;
  };

  int64_t seq_len_, tokens_ = 0, samples_ = 0;
  std::vector<Placed> shards_;
  std::unique_ptr<OpenFiles> files_ = std::make_unique<OpenFiles>();
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
