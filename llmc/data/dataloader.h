// dataloader.h: the batches of a run: samples of token files, in the order of sample_order.h (contract 8). A file of n
// tokens holds floor((n-1)/T) samples of T tokens; sample k is tokens [kT, kT+T].
#pragma once
#include <atomic>
#include <exception>

#include "core/clock.h"
#include "data/packed_shards.h"
#include "data/sample_order.h"

namespace llmc {

// The samples of files of tokens: those of the first file, then those of the second, and so on.
class TokenShards : public TokenFiles {
 public:
  // Errors name `option`. Samples that are packed in another way are counted there (PackedShards).
  TokenShards(const std::string& pattern, int64_t seq_len, const char* option = "--train-data",
              DataFormat format = DataFormat::automatic, Packing packing = Packing::stream)
      : TokenFiles(pattern, option, format) {
    cut(seq_len);
    CHECK(
        samples_ > 0 || packing != Packing::stream,
        "{} {}: no file holds a sample of --seq-len {} + 1 tokens ({} tokens in {} file(s)); shorten --seq-len or use "
        "larger files",
        option, pattern, seq_len, tokens(), count());
  }

  int64_t samples() const { return samples_; }  // in one epoch
  int64_t seq_len() const { return seq_len_; }
  // Tokens that are in no sample, neither as input nor as target: the ends of files, and all of those that are shorter
  // than a sample.
  struct Unused {
    int64_t tokens = 0, short_files = 0;
  };
  Unused unused() const {
    Unused all;
    for (const int64_t tokens : tokens_of_files()) {
      const int64_t samples = (tokens - 1) / seq_len_;
      all.tokens += samples > 0 ? tokens - samples * seq_len_ - 1 : tokens;
      all.short_files += samples == 0;
    }
    return all;
  }

  // How many samples of this length they hold.
  int64_t samples_of(int64_t seq_len) const {
    int64_t all = 0;
    for (const int64_t tokens : tokens_of_files()) all += (tokens - 1) / seq_len;
    return all;
  }
  // Cuts the files into samples of another length; returns how many they hold, which may be none.
  int64_t cut(int64_t seq_len) {
    seq_len_ = seq_len;
    samples_ = 0;
    first_samples_.clear();
    for (const int64_t tokens : tokens_of_files()) {
      first_samples_.push_back(samples_);
      samples_ += (tokens - 1) / seq_len;
    }
    return samples_;
  }

  // out (T + 1) = the tokens of sample `index`, each below vocab_size. Thread-safe.
  void read_sample(int64_t index, int64_t vocab_size, std::vector<int32_t>& out) const {
    read_part(index, 0, seq_len_, vocab_size, out);
  }
  // out (n + 1) = the part of it that begins at token `begin`.
  void read_part(int64_t index, int64_t begin, int64_t n, int64_t vocab_size, std::vector<int32_t>& out) const {
    CHECK(begin >= 0 && begin + n <= seq_len_);
    const auto [file, first] = place_of(index);
    read(file, first + begin, n + 1, vocab_size, out);
  }
  // begins: whether a document begins at each of these tokens of that part, other than its first.
  void find_documents_of(int64_t index, int64_t begin, const std::vector<int32_t>& tokens, int32_t end_of_text,
                         std::vector<uint8_t>& begins) const {
    const auto [file, first] = place_of(index);
    find_documents(file, first + begin, tokens, end_of_text, begins);
  }

 private:
  // The file of a sample, and its first token there.
  std::pair<int64_t, int64_t> place_of(int64_t index) const {
    CHECK(index >= 0 && index < samples_);
    const int64_t i = std::ranges::upper_bound(first_samples_, index) - first_samples_.begin() - 1;
    return {i, (index - first_samples_[static_cast<size_t>(i)]) * seq_len_};
  }

  int64_t seq_len_ = 0, samples_ = 0;
  std::vector<int64_t> first_samples_;  // of each file
};

// The batches of an endless stream of samples.
class DataLoader {
 public:
  struct Source {
    const TokenShards& shards;  // their samples are the blocks of the order
    BlockOrder order;
    std::string name = "";                 // for messages; empty: the only source
    const PackedShards* packed = nullptr;  // whose rows are the blocks; none: documents are not packed

    int64_t block(int64_t T) const { return packed != nullptr ? T : shards.seq_len(); }
  };
  // What one source alone needs.
  struct Config {
    uint64_t seed = 0;
    std::vector<Reseed> reseeds = {};
    bool shuffle = false;
    int64_t vocab_size = 0;
    std::optional<int32_t> end_of_text = std::nullopt;  // positions restart at 0 where a document begins; none: never
  };
  // The reading rank: `rank` of `ranks` that share a step, each with `batch_size` sequences per micro-batch.
  struct Reader {
    int64_t rank = 0, ranks = 1, batch_size = 1;
  };

  // Samples of T tokens of several sources.
  DataLoader(std::vector<Source> sources, SampleOrder order, int64_t T, int64_t vocab_size,
             std::optional<int32_t> end_of_text = std::nullopt)
      : sources_(std::move(sources)),
        order_(std::move(order)),
        T_(T),
        vocab_size_(vocab_size),
        end_of_text_(end_of_text) {}
  // The samples of one source, from its beginning.
  DataLoader(const TokenShards& shards, const Config& config)
      : DataLoader({{shards, BlockOrder(shards.samples(), config.shuffle, config.seed, "", config.reseeds)}},
                   SampleOrder({{shards.samples() * shards.seq_len(), {}}}, {1}, shards.seq_len()), shards.seq_len(),
                   config.vocab_size, config.end_of_text) {}

  // Where sample `position` of the stream is in the files: in sample `index` of a source's shards, from token `begin`
  // on. It has `targets` targets; the rest of its T tokens is padding.
  struct Sample {
    size_t source;
    int64_t index, begin, targets;
  };
  Sample sample(int64_t position) {
    const SampleOrder::Place at = order_.at(position);
    Source& source = sources_[at.source];
    const int64_t block = source.block(T_), index = source.order.at(at.epoch, at.token / block);
    return {at.source, index, at.token % block, source.packed != nullptr ? source.packed->targets(index) : at.length};
  }
  // The targets of n samples.
  int64_t targets(int64_t position, int64_t n) {
    const bool packed = std::ranges::any_of(sources_, [](const Source& source) { return source.packed != nullptr; });
    if (!packed) return order_.targets(position + n) - order_.targets(position);
    int64_t all = 0;
    for (int64_t i = 0; i < n; ++i) all += sample(position + i).targets;
    return all;
  }
  int64_t sample_at(int64_t position) { return sample(position).index; }
  // "14", "part 2 of 14 of web": the name of a sample, for messages.
  std::string name_of_sample(int64_t position) {
    const Sample s = sample(position);
    const Source& source = sources_[s.source];
    return formatted("{}{}{}", s.begin > 0 ? formatted("part {} of ", s.begin / T_) : "", s.index,
                     source.name.empty() ? "" : " of " + source.name);
  }

  // The micro-batch (batch_size, T) of the step that begins at stream position `cursor`. Padding has no target (-1).
  void read_batch(int64_t cursor, int64_t micro_batch, const Reader& who, std::vector<int32_t>& tokens,
                  std::vector<int32_t>& targets, std::vector<int32_t>& positions) {
    const size_t T = static_cast<size_t>(T_), rows = static_cast<size_t>(who.batch_size);
    for (std::vector<int32_t>* v : {&tokens, &targets, &positions}) v->resize(rows * T);
    std::vector<Sample> samples;
    for (int64_t b = 0; b < who.batch_size; ++b)
      samples.push_back(sample(cursor + (micro_batch * who.ranks + who.rank) * who.batch_size + b));

    const auto begin = Clock::now();
    const int64_t threads = threads_.value_or(seconds_per_row_ > slow_row ? std::min<int64_t>(8, who.batch_size) : 1);
    std::atomic<size_t> next = 0;
    std::vector<std::exception_ptr> faults(rows);
    on_threads(threads, [&] {
      Row row;
      for (size_t b = next++; b < rows; b = next++) try {
          read_row(samples[b], row, &tokens[b * T], &targets[b * T], &positions[b * T]);
        } catch (...) {
          faults[b] = std::current_exception();
        }
    });
    for (const std::exception_ptr& fault : faults)
      if (fault) std::rethrow_exception(fault);
    seconds_per_row_ = seconds_since(begin) * static_cast<double>(threads) / static_cast<double>(rows);
  }
  // So many threads read a micro-batch. Otherwise one does, and up to 8 once a slow disk or network takes long.
  void read_on(int64_t threads) { threads_ = threads; }

 private:
  static constexpr double slow_row = 0.3e-3;  // seconds; from memory it takes some microseconds

  // What a thread needs to read rows.
  struct Row {
    std::vector<int32_t> tokens;
    std::vector<uint8_t> begins;
  };
  // tokens, targets, positions (T)
  void read_row(const Sample& s, Row& row, int32_t* tokens, int32_t* targets, int32_t* positions) const {
    const Source& source = sources_[s.source];
    if (source.packed != nullptr)
      return source.packed->read_sample(s.index, vocab_size_, tokens, targets, positions,
                                        end_of_text_ ? PositionsIn::document : PositionsIn::row);
    source.shards.read_part(s.index, s.begin, s.targets, vocab_size_, row.tokens);
    if (end_of_text_) source.shards.find_documents_of(s.index, s.begin, row.tokens, *end_of_text_, row.begins);
    int32_t place = 0;
    for (size_t t = 0; t < static_cast<size_t>(T_); ++t) {
      const bool padding = static_cast<int64_t>(t) >= s.targets;
      if (end_of_text_ && !padding && row.begins[t]) place = 0;
      tokens[t] = padding ? 0 : row.tokens[t];
      targets[t] = padding ? -1 : row.tokens[t + 1];
      positions[t] = place++;
    }
  }

  std::vector<Source> sources_;
  SampleOrder order_;
  int64_t T_, vocab_size_;
  std::optional<int32_t> end_of_text_;
  std::optional<int64_t> threads_;
  double seconds_per_row_ = 0;  // of the last micro-batch, on a thread
};

}  // namespace llmc
