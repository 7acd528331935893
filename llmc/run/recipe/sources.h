// sources.h: the sources of a run, from --train-data or --data, and its validation sets, from --val-data or --val.
#pragma once
#include <charconv>
#include <iterator>

#include "data/dataloader.h"
#include "run/options/options.h"

namespace llmc {

// A source, or a validation set, as its option describes it. name: empty for --train-data and --val-data.
struct SourceText {
  std::string name, pattern;
  DataFormat format = DataFormat::automatic;
  double weight = 1;                      // its proportion of the samples
  std::optional<double> max_epochs = {};  // none: as often as the run needs it
};

namespace detail {

// "web=web_*.bin..." -> the name, and what follows it.
inline std::pair<std::string, std::string> split_name(const char* option, const std::string& item,
                                                      const char* expected) {
  const size_t equals = item.find('=');
  const std::string name = item.substr(0, std::min(equals, item.size()));
  constexpr const char* allowed = "abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ0123456789_-.";
  const bool plain = !name.empty() && name.find_first_not_of(allowed) == name.npos;
  CHECK(equals != item.npos && plain && equals + 1 < item.size(),
        "{} '{}': expected {}, with a name of letters, digits, -, _ and .{}", option, shown(item), expected,
        equals == item.npos ? formatted("; {} takes files without a name",
                                        std::string_view(option) == "--val" ? "--val-data" : "--train-data")
                            : "");
  return {name, item.substr(equals + 1)};
}

// Takes ":0.7" from the end of a text.
inline std::optional<double> take_number(std::string& text) {
  const size_t colon = text.rfind(':');
  if (colon == text.npos) return std::nullopt;
  double value = 0;
  const char* const end = text.data() + text.size();
  const auto [read, error] = std::from_chars(text.data() + colon + 1, end, value);
  if (error != std::errc() || read != end) return std::nullopt;
  text.resize(colon);
  return value;
}

inline void refuse_double_names(const char* option, const std::vector<SourceText>& all) {
  for (size_t i = 0; i < all.size(); ++i)
    for (size_t j = 0; j < i; ++j)
      CHECK(all[i].name != all[j].name, "{} {}={} and {}={}: two of the same name; give each its own", option,
            all[j].name, shown(all[j].pattern), all[i].name, shown(all[i].pattern));
}

}  // namespace detail

inline constexpr double smallest_weight = 1e-9;  // of the largest one

inline std::vector<SourceText> source_texts(const Options& o) {
  CHECK(o.data.empty() || o.train_data.empty(),
        "--data with --train-data, for which it stands: leave out --train-data, or give it as one more --data");
  if (o.data.empty()) return {{"", o.train_data, o.data_format}};
  std::vector<SourceText> all;
  double largest = 0;
  for (const std::string& item : o.data.items) {
    const auto [name, rest] = detail::split_name("--data", item, "NAME=PATTERN:WEIGHT or NAME=PATTERN:WEIGHT:EPOCHS");
    SourceText source{name, rest, o.data_format};
    if (const auto last = detail::take_number(source.pattern)) {
      const auto weight = detail::take_number(source.pattern);
      if (weight) source.weight = *weight, source.max_epochs = *last;
      else source.weight = *last;
    }
    CHECK(!source.pattern.empty(), "--data '{}': no files: expected NAME=PATTERN:WEIGHT", shown(item));
    CHECK(std::isfinite(source.weight) && source.weight > 0,
          "--data '{}': the weight is {}, expected a number above 0; a source that a run does not use is left out",
          shown(item), source.weight);
    CHECK(!source.max_epochs || *source.max_epochs > 0, "--data '{}': {} epochs, expected a number above 0",
          shown(item), source.max_epochs.value_or(0));
    largest = std::max(largest, source.weight);
    all.push_back(source);
  }
  for (const SourceText& source : all)
    CHECK(source.weight >= smallest_weight * largest, "--data {}: its weight of {} is less than {} of the largest, {}",
          source.name, source.weight, smallest_weight, largest);
  detail::refuse_double_names("--data", all);
  return all;
}

inline std::vector<SourceText> validation_texts(const Options& o) {
  CHECK(o.val.empty() || o.val_data.empty(),
        "--val with --val-data, for which it stands: leave out --val-data, or give it as one more --val");
  std::vector<SourceText> all;
  if (!o.val_data.empty()) all.push_back({"", o.val_data, o.data_format});
  for (const std::string& item : o.val.items) {
    const auto [name, pattern] = detail::split_name("--val", item, "NAME=PATTERN");
    all.push_back({name, pattern, o.data_format});
  }
  detail::refuse_double_names("--val", all);
  return all;
}

// "--data web", "--train-data": how messages name a source or a validation set.
inline std::string train_option(const std::string& name) { return name.empty() ? "--train-data" : "--data " + name; }
inline std::string val_option(const std::string& name) { return name.empty() ? "--val-data" : "--val " + name; }

// The files of all sources, cut into blocks.
class Sources {
 public:
  struct Source : SourceText {
    TokenShards shards;
    std::unique_ptr<PackedShards> packed = {};  // with --pack
    int64_t blocks() const { return packed ? packed->samples() : shards.samples(); }
    int64_t epoch_tokens() const { return blocks() * shards.seq_len(); }
    // Had the files been cut into other blocks; packed rows have one length.
    int64_t epoch_tokens(int64_t block) const { return (packed ? blocks() : shards.samples_of(block)) * block; }
  };

  // block: the run's longest sequence. packing: what follows by pack(), unless it is stream.
  Sources(const std::vector<SourceText>& texts, int64_t block, Packing packing) : block_(block) {
    all_.reserve(texts.size());  // packed shards refer to theirs
    for (const SourceText& text : texts)
      all_.push_back({text, TokenShards(text.pattern, block, train_option(text.name).c_str(), text.format, packing)});
  }

  int64_t block() const { return block_; }
  Sources(const Sources&) = delete;

  // Fills blocks with whole documents.
  void pack(const PackedShards::Config& config, const Notice& notice) {
    for (Source& source : all_)
      source.packed = std::make_unique<PackedShards>(source.shards, config, notice, train_option(source.name).c_str());
  }
  // Cuts the files into blocks of another length.
  void cut(int64_t block) {
    if (block == block_) return;
    block_ = block;
    for (Source& source : all_)
      CHECK(source.shards.cut(block) > 0,
            "{} {}: no file holds a block of {} + 1 tokens, the longest sequence of the run ({} tokens in {} file(s)): "
            "shorten it, or use larger files",
            train_option(source.name), source.pattern, block, source.shards.tokens(), source.shards.count());
  }

  const std::vector<Source>& all() const { return all_; }
  size_t size() const { return all_.size(); }
  const Source& operator[](size_t i) const { return all_[i]; }
  int64_t samples() const {  // blocks, in an epoch
    int64_t all = 0;
    for (const Source& source : all_) all += source.blocks();
    return all;
  }
  // Of each source.
  std::vector<int64_t> epoch_tokens() const {
    std::vector<int64_t> all;
    for (const Source& source : all_) all.push_back(source.epoch_tokens());
    return all;
  }
  // Of each file.
  std::vector<std::string> paths() const { return joined(&TokenFiles::paths); }
  std::vector<std::string> checksums() const { return joined(&TokenFiles::checksums); }

 private:
  std::vector<std::string> joined(std::vector<std::string> (TokenFiles::*of)() const) const {
    std::vector<std::string> all;
    for (const Source& source : all_) std::ranges::move((source.shards.*of)(), std::back_inserter(all));
    return all;
  }

  int64_t block_;
  std::vector<Source> all_;
};

}  // namespace llmc
