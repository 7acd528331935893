// run_data.h: the data of a run, opened and checked once: its sources, how they are ordered, and its validation sets.
#pragma once
#include "core/environment.h"
#include "run/recipe/course.h"
#include "run/setup.h"

namespace llmc {

struct ValidationSet {
  std::string name;  // empty: --val-data
  TokenShards shards;
  std::vector<std::string> checksums;
};

inline std::vector<ValidationSet> open_validation_sets(const Options& o, int64_t seq_len) {
  std::vector<ValidationSet> all;
  for (const SourceText& text : validation_texts(o)) {
    all.push_back({text.name, {text.pattern, seq_len, val_option(text.name).c_str(), text.format}, {}});
    all.back().checksums = all.back().shards.checksums();
  }
  return all;
}

// With --pack, fills the samples of the sources with whole documents.
inline void pack(Sources& sources, const Options& o, const Notice& notice) {
  if (o.pack == Packing::stream) return;
  const ModelConfig model = choose_model(o);
  sources.pack({.packing = o.pack,
                .seq_len = sources.block(),
                .vocab_size = model.vocab_size,
                .end_of_text = choose_document_begin("--pack", o, *choose_tokenizer(o, model), model),
                .index_directory = cache_path("documents")},
               notice);
}

// What orders the blocks of a source, besides their number.
struct SourceOrder {
  std::string name;           // the source's when the run first read it
  std::vector<Reseed> seeds;  // the first orders the first epoch, the others came by branches
};

// A file of a source, and a source, as a checkpoint records them.
struct ShardRecord {
  std::string name;               // in the folder of all files of the source; empty: an older version did not record it
  std::optional<int64_t> tokens;  // none: the same
  std::string checksum;
};
struct SourceRecord {
  std::string name, files;  // files: their pattern
  SourceOrder order;
  SourcePosition position;
  std::vector<ShardRecord> shards;  // empty: an older version did not record them
};

struct RunData {
  Sources train;
  std::vector<std::string> checksums;  // of the training files
  std::vector<SourceOrder> orders;     // of each source
  std::vector<SourceRecord> unused;    // that the run has read, and does not read now
  std::vector<ValidationSet> val;
  std::vector<std::string> notices;

  RunData(const Options& o, const Recipe& recipe)
      : train(recipe.sources, recipe.longest(), o.pack),
        checksums(train.checksums()),
        val(open_validation_sets(o, recipe.stages[0].options.seq_len)) {
    for (const SourceText& source : recipe.sources)
      orders.push_back({source.name, {{0, 0, static_cast<uint64_t>(o.seed)}}});
    for (const Sources::Source& source : train.all()) notice_empty(train_option(source.name), source.shards);
    for (const ValidationSet& set : val) notice_empty(val_option(set.name), set.shards);
    pack(train, o, [this](const std::string& notice) { notices.push_back(notice); });
  }

  std::vector<ShardRecord> shards_of(size_t source) const {
    std::vector<ShardRecord> all;
    auto sum = checksums.begin();
    for (size_t s = 0; s < source; ++s) sum += train[s].shards.count();
    const std::vector<std::string> paths = train[source].shards.paths();  // in order
    const auto differs = std::ranges::mismatch(paths.front(), paths.back()).in1 - paths.front().begin();
    const size_t folder = paths.front().substr(0, static_cast<size_t>(differs)).rfind('/') + 1;
    for (size_t i = 0; i < paths.size(); ++i)
      all.push_back({paths[i].substr(folder), train[source].shards.tokens_of(static_cast<int64_t>(i)), *sum++});
    return all;
  }

  std::vector<std::string> val_checksums() const {
    std::vector<std::string> all;
    for (const ValidationSet& set : val) all.insert(all.end(), set.checksums.begin(), set.checksums.end());
    return all;
  }

  void notice_empty(const std::string& option, const TokenFiles& files) {
    const std::vector<std::string>& empty = files.empty_files();
    if (!empty.empty())
      notices.push_back(formatted("{}: {} of {} file(s) hold no tokens and are left out, such as {}", option,
                                  empty.size(), std::ssize(empty) + files.count(), empty[0]));
  }

  // The samples of a stretch.
  DataLoader loader(const Course& course, const Stretch& stretch, bool shuffle, int64_t vocab_size,
                    std::optional<int32_t> end_of_text) const {
    std::vector<DataLoader::Source> sources;
    for (size_t s = 0; s < train.size(); ++s) {
      const auto& [name, seeds] = orders[s];
      const std::vector<Reseed> later(seeds.begin() + 1, seeds.end());
      sources.push_back({train[s].shards, BlockOrder(train[s].blocks(), shuffle, seeds[0].seed, name, later),
                         train[s].name, train[s].packed.get()});
    }
    return DataLoader(std::move(sources), course.order_of(stretch), stretch.seq_len, vocab_size, end_of_text);
  }
};

}  // namespace llmc
