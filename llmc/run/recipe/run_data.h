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
                .index_directory = cache_directory() + "/documents"},
               notice);
}

// The sources as a loader reads them. seeds: see RunData.
inline std::vector<DataLoader::Source> loader_sources(const Sources& sources,
                                                      const std::vector<std::vector<Reseed>>& seeds, bool shuffle) {
  std::vector<DataLoader::Source> all;
  for (size_t s = 0; s < sources.size(); ++s) {
    const std::vector<Reseed> later(seeds[s].begin() + 1, seeds[s].end());
    all.push_back({sources[s].shards,
                   BlockOrder(sources[s].blocks(), shuffle, seeds[s][0].seed, sources[s].name, later), sources[s].name,
                   sources[s].packed.get()});
  }
  return all;
}

struct RunData {
  Sources train;
  std::vector<std::string> checksums;  // of the training files
  // Of each source: the first orders its first epoch, the others came by branches.
  std::vector<std::vector<Reseed>> seeds;
  std::vector<ValidationSet> val;
  std::vector<std::string> notices;

  RunData(const Options& o, const Recipe& recipe)
      : train(recipe.sources, recipe.longest(), o.pack),
        checksums(train.checksums()),
        seeds(train.size(), {{0, 0, static_cast<uint64_t>(o.seed)}}),
        val(open_validation_sets(o, recipe.stages[0].options.seq_len)) {
    for (const Sources::Source& source : train.all()) notice_empty(train_option(source.name), source.shards);
    for (const ValidationSet& set : val) notice_empty(val_option(set.name), set.shards);
    pack(train, o, [this](const std::string& notice) { notices.push_back(notice); });
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
    return DataLoader(loader_sources(train, seeds, shuffle), course.order_of(stretch), stretch.seq_len, vocab_size,
                      end_of_text);
  }
};

}  // namespace llmc
