// document_index.h: where the documents of a file of tokens begin: at its first token, and where its format says
// (DocumentMark). Found by reading the file once, a block at a time, and kept in an index file in a cache directory:
//
//   the beginnings   int64 each, ascending
//   IndexSeal        whose they are, how many, and checksums
//
// An index of another file of tokens, or of another state of this one, and a damaged index are made again. A few bytes
// of its contents tell the file from one of the same size and time, which copies and archives make. Its inode would not
// do: hosts that share an index may have copies of the file. Numbers are little-endian.
#pragma once
#include <unistd.h>
#include <xxhash.h>

#include <cstdio>
#include <filesystem>

#include "core/checksum.h"
#include "core/environment.h"
#include "core/files.h"
#include "data/token_file.h"

namespace llmc {

// Called with a line for the log.
using Notice = std::function<void(const std::string&)>;

// The end of an index file. No padding: its bytes are hashed.
struct IndexSeal {
  struct Source {
    uint64_t path;           // XXH3 of the absolute path of the file of tokens
    int64_t size, modified;  // bytes; nanoseconds since 1970
    uint64_t documents;      // XXH3 of what says where they begin (TokenFiles::documents_from)
    uint64_t contents;       // XXH3 of some of the file's bytes
    bool operator==(const Source&) const = default;
  };

  uint64_t version = 0x3330'7363'6f64'7067;  // "gpdocs03"
  Source source = {};
  int64_t documents = 0;
  uint64_t beginnings = 0;  // XXH3 of them
  uint64_t seal = 0;        // XXH3 of what is before it here

  uint64_t hash() const { return XXH3_64bits(this, sizeof *this - sizeof seal); }
};
static_assert(sizeof(IndexSeal) == 72 && std::is_trivially_copyable_v<IndexSeal>);

class DocumentIndex {
 public:
  // Of file `i`. Unless `directory` has an index of it, the file is read, and its tokens are checked against the
  // vocabulary. If no index can be kept there, it stays in memory: 8 bytes for each document. directory: empty: none
  DocumentIndex(const TokenFiles& files, int64_t i, int64_t vocab_size, int32_t end_of_text,
                const std::string& directory, const Notice& notice)
      : of_(files.path(i)),
        tokens_(files.tokens_of(i)),
        source_(source(files, i, end_of_text)),
        path_(directory.empty() ? "" : formatted("{}/{}-{}.index", directory, hex_digits(source_.path), end_of_text)) {
    std::error_code unknown;
    if (std::filesystem::exists(path_, unknown)) {
      const std::optional<std::string> fault = fault_of_file();
      if (!fault) return;
      notice(formatted("the documents of {} are indexed again: {}", of_, *fault));
    }
    const auto for_blocks = [&](const auto& found) { find_documents(files, i, vocab_size, end_of_text, found); };
    std::optional<std::string> trouble;
    try {
      CHECK(!directory.empty(), "this user has no directory for caches: set HOME or XDG_CACHE_HOME");
      std::filesystem::create_directories(directory, unknown);
      write_file(for_blocks);
    } catch (const Error& error) {
      trouble = error.what();
      for_blocks([&](const auto& begins) { in_memory_.insert(in_memory_.end(), begins.begin(), begins.end()); });
      documents_ = static_cast<int64_t>(in_memory_.size());
    }
    CHECK(source(files, i, end_of_text) == source_, "{}: has changed while its documents were indexed; start again",
          of_);
    if (trouble)
      notice(
          formatted("the index of the documents of {} cannot be kept, so every run makes it again: {}", of_, *trouble));
  }

  int64_t documents() const { return documents_; }
  const std::string& path() const { return path_; }

  // Where the documents [first, first + n) begin. A file that `open` has is read even if it was deleted or replaced
  // since. Thread-safe.
  std::vector<int64_t> begins(int64_t first, int64_t n, OpenFiles& open) const {
    CHECK(first >= 0 && n >= 0 && first <= documents_ - n);
    if (!in_memory_.empty()) return {in_memory_.begin() + first, in_memory_.begin() + first + n};
    std::vector<int64_t> begins(static_cast<size_t>(n));
    open.open_read(path_)->read_at(begins.data(), n * 8, first * 8);
    const bool ascend = std::ranges::adjacent_find(begins, std::greater_equal<>()) == begins.end();
    CHECK(ascend && (n == 0 || (begins.front() >= 0 && begins.back() < tokens_)),
          "{}: its contents are no places in the {} tokens of {} in ascending order; it is damaged: delete it", path_,
          tokens_, of_);
    return begins;
  }

 private:
  static constexpr int64_t block = int64_t{1} << 18;  // tokens or documents that are in memory at once

  static IndexSeal::Source source(const TokenFiles& files, int64_t i, int32_t end_of_text) {
    const std::string &path = files.path(i), documents = files.documents_from(i, end_of_text);
    const File file = File::open_read(path);
    std::error_code unknown;
    const std::string absolute = std::filesystem::canonical(path, unknown);
    return {XXH3_64bits(absolute.data(), absolute.size()), file.size(), file.modified(),
            XXH3_64bits(documents.data(), documents.size()), contents_of(file)};
  }

  // A hash of a few bytes at the beginning, at the end, and at equal distances between them.
  static uint64_t contents_of(const File& file) {
    constexpr int64_t places = 8, most = 128;
    std::array<char, most> bytes;
    const int64_t size = file.size(), n = std::min(size, most);
    RunningHash hash;
    for (int64_t place = 0; place < places; ++place) {
      file.read_at(bytes.data(), n, (size - n) / (places - 1) * place);
      hash.add(bytes.data(), n);
    }
    return hash.value();
  }

  // Why the index file is of no use; none: it is good, and sets documents_.
  std::optional<std::string> fault_of_file() try {
    OpenFiles open;
    const std::shared_ptr<const File> file = open.open_read(path_);
    const int64_t seal_at = file->size() - static_cast<int64_t>(sizeof(IndexSeal));
    IndexSeal seal;
    if (seal_at >= 0) file->read_at(&seal, sizeof seal, seal_at);
    if (seal_at < 0 || seal.version != IndexSeal().version || seal.seal != seal.hash() || seal.documents < 1 ||
        seal.documents != seal_at / 8 || seal_at % 8 != 0)
      return formatted("{} is damaged or of another format", path_);
    if (seal.source != source_) return formatted("{} is of another file, or of another state of this one", path_);
    documents_ = seal.documents;
    RunningHash hash;
    for (int64_t first = 0; first < documents_; first += block) {
      const std::vector<int64_t> some = begins(first, std::min(block, documents_ - first), open);
      if (first == 0 && some[0] != 0) return formatted("{} lacks the first document", path_);
      hash.add(some.data(), static_cast<int64_t>(some.size()) * 8);
    }
    if (hash.value() != seal.beginnings) return formatted("{} does not match its checksum", path_);
    return std::nullopt;
  } catch (const Error& error) {
    return error.what();
  }

  // Calls found(where documents begin) for one block of tokens after another.
  template <class Found>
  void find_documents(const TokenFiles& files, int64_t i, int64_t vocab_size, int32_t end_of_text,
                      const Found& found) const {
    std::vector<int32_t> tokens;
    std::vector<uint8_t> begins;
    for (int64_t first = 0; first < tokens_; first += block) {
      const int64_t from = std::max<int64_t>(first - 1, 0);  // the token before may end a document
      files.read(i, from, std::min(first + block, tokens_) - from, vocab_size, tokens);
      files.find_documents(i, from, tokens, end_of_text, begins);
      std::vector<int64_t> places;
      for (int64_t t = first; t < from + std::ssize(tokens); ++t)
        if (t == 0 || begins[static_cast<size_t>(t - from)] != 0) places.push_back(t);
      found(places);
    }
  }

  // Under another name until it is complete. Several processes may do this at once: they write the same.
  template <class ForBlocks>
  void write_file(const ForBlocks& for_blocks) {
    const std::string temporary = formatted("{}.{}.{}.tmp", path_, host_name(), int64_t{::gettid()});
    try {
      File file = File::create(temporary);
      IndexSeal seal{.source = source_};
      RunningHash hash;
      for_blocks([&](const std::vector<int64_t>& begins) {
        const int64_t n = static_cast<int64_t>(begins.size());
        file.write(begins.data(), n * 8);
        hash.add(begins.data(), n * 8);
        seal.documents += n;
      });
      seal.beginnings = hash.value();
      seal.seal = seal.hash();
      file.write(&seal, sizeof seal);
      file.sync_and_close();
      rename_path(temporary, path_);
      documents_ = seal.documents;
    } catch (...) {
      std::remove(temporary.c_str());
      throw;
    }
  }

  std::string of_;
  int64_t tokens_;
  IndexSeal::Source source_;
  std::string path_;
  int64_t documents_ = 0;
  std::vector<int64_t> in_memory_;  // all, if there is no file
};

}  // namespace llmc
