// token_file.h: files of tokens in the formats of token_format.h: opened, checked, read. The order of samples is
// dataloader.h's. llm.c's format is a header of 256 little-endian int32, {magic, version, token count}, then the
// tokens: uint16 (20240520, 1) or uint32 (20240801, 7).
#pragma once
#include <mutex>

#include "core/checksum.h"
#include "data/no_shard.h"

namespace llmc {

// How a file of tokens stores them.
struct TokenStorage {
  DataFormat format;
  TokenType type;
  int64_t begin;   // the byte of the first token
  int64_t tokens;  // their number
  std::optional<MegatronIndex> index = std::nullopt;

  int64_t byte_of(int64_t token) const { return begin + token * width_of(type); }
};
struct TokenFile : TokenStorage {
  File file;
};

namespace detail {

inline TokenFile open_llmc(File file) {
  constexpr int64_t header_bytes = shard_header_bytes;
  const std::string& path = file.path();
  const int64_t size = file.size();
  CHECK(size >= header_bytes, "{}: {} bytes are too few for a token shard, whose header takes {}{}", path, size,
        header_bytes, hint_of_no_shard(file));
  int32_t header[256];
  file.read_at(header, header_bytes, 0);
  const bool is_uint16 = header[0] == 20240520 && header[1] == 1, is_uint32 = header[0] == 20240801 && header[1] == 7;
  CHECK(is_uint16 || is_uint32,
        "{}: magic {} version {}, expected llm.c's 20240520 version 1 (uint16) or 20240801 version 7 (uint32), or "
        "Megatron's {} beside it; tokens without a header are read only if --data-format says nanogpt or olmo{}",
        path, header[0], header[1], MegatronIndex::path_for(path), hint_of_no_shard(file));
  const int64_t width = is_uint16 ? 2 : 4, payload = size - header_bytes, tokens = payload / width;
  CHECK(payload % width == 0 && static_cast<uint32_t>(header[2]) == static_cast<uint32_t>(tokens),
        "{}: the header says {} tokens, but {} bytes follow it ({} per token); truncated or damaged: create it again",
        path, static_cast<uint32_t>(header[2]), payload, width);
  return {{DataFormat::llmc, is_uint16 ? TokenType::uint16 : TokenType::uint32, header_bytes, tokens}, std::move(file)};
}

inline TokenFile open_without_header(File file, DataFormat format) {
  const TokenType type = format == DataFormat::nanogpt ? TokenType::uint16 : TokenType::uint32;
  const std::string& path = file.path();
  const int64_t size = file.size(), width = width_of(type);
  CHECK(size > 0, "{}: holds no tokens", path);
  const std::string hint = hint_of_header(file, width);
  CHECK(hint.empty(), "{}: --data-format {} stands for {} tokens without a header{}", path, name_of(format),
        name_of(type), hint);
  CHECK(size % width == 0, "{}: {} bytes are no whole number of {} tokens, as --data-format {} has them; truncated?",
        path, size, name_of(type), name_of(format));
  return {{format, type, 0, size / width}, std::move(file)};
}

inline TokenFile open_megatron(File file) {
  const std::string path = MegatronIndex::path_for(file.path());
  CHECK(!MegatronIndex::begins(file), "{}: is Megatron's index: name the .bin beside it", file.path());
  CHECK(path_exists(path), "{}: --data-format megatron needs its index beside it, {}, and there is none", file.path(),
        path);
  const MegatronIndex index(File::open_read(path), file);
  return {{DataFormat::megatron, index.type(), 0, index.tokens(), index}, std::move(file)};
}

}  // namespace detail

// Opens a file of tokens and checks its header and its index against its size.
inline TokenFile open_token_file(const std::string& path, DataFormat format = DataFormat::automatic) {
  File file = File::open_read(path);
  if (format == DataFormat::automatic)
    format = !detail::has_magic_of_llmc(file) && detail::has_index_of_megatron(file) ? DataFormat::megatron
                                                                                     : DataFormat::llmc;
  if (format == DataFormat::llmc) return detail::open_llmc(std::move(file));
  if (format == DataFormat::megatron) return detail::open_megatron(std::move(file));
  return detail::open_without_header(std::move(file), format);
}

// Do tokens look like bytes (data/tokenize_text.py: 0 to 255, 256 for the end of text) in a far larger vocabulary?
inline bool look_like_bytes(int64_t largest_token, int64_t vocab_size) {
  return largest_token <= 256 && vocab_size > 2 * 257;
}

// Whether the largest of so many tokens is far below those that the vocabulary's tokenizer would write. Of GPT-2's
// tokens, in prose as in code, about one in ten is in the upper three quarters of its vocabulary.
inline bool look_like_fewer(int64_t largest_token, int64_t tokens, int64_t vocab_size) {
  return tokens >= 4096 && largest_token > 256 && largest_token < vocab_size / 4;
}

// In errors about a token.
inline constexpr const char* outside_vocabulary = "is outside the model's vocabulary of";

// All files that a pattern matches, in order, without those that say that they hold no tokens, such as those of a
// tokenizing process that was given no documents.
class TokenFiles {
 public:
  // Checks every file; there may be more of them than a process can hold open. Errors name `option`.
  TokenFiles(const std::string& pattern, const char* option, DataFormat format = DataFormat::automatic) {
    for (const std::string& path : expand_glob(pattern, option)) {
      const TokenFile file = open_token_file(path, format);
      if (file.tokens == 0) {
        empty_.push_back(path);
        continue;
      }
      files_.push_back({file, path});
      files_.back().first_seen->modified = file.file.modified();
      tokens_ += file.tokens;
    }
    CHECK(!files_.empty(), "{} {}: holds no tokens, in {} file(s)", option, pattern, empty_.size());
  }

  const std::vector<std::string>& empty_files() const { return empty_; }  // which are left out of all that follows
  int64_t count() const { return static_cast<int64_t>(files_.size()); }
  int64_t tokens() const { return tokens_; }
  DataFormat format(int64_t i) const { return files_[static_cast<size_t>(i)].format; }
  DocumentMark document_mark(int64_t i) const { return document_mark_of(format(i)); }
  OpenFiles& open_files() const { return *open_; }
  const std::string& path(int64_t i) const { return files_[static_cast<size_t>(i)].path; }
  int64_t tokens_of(int64_t i) const { return files_[static_cast<size_t>(i)].tokens; }
  std::vector<std::string> paths() const { return of_all(&Described::path); }
  std::vector<int64_t> tokens_of_files() const { return of_all(&Described::tokens); }
  // A checksum of each file and its index, to notice that data have changed between a run and its resume: of all bytes
  // if the files have at most 256 MiB together, otherwise of samples, the same fraction of each file.
  std::vector<std::string> checksums() const {
    constexpr double most = 256 << 20;
    double bytes = 0;
    for (const Described& file : files_)
      bytes += static_cast<double>(file.byte_of(file.tokens) + (file.index ? file.index->bytes() : 0));
    const double share = std::min(1.0, most / bytes);
    std::vector<std::string> all;
    for (const Described& file : files_) {
      all.push_back(sampled_checksum(file.path, share));
      const std::lock_guard lock(file.first_seen->mutex);
      file.first_seen->checksum = all.back(), file.first_seen->share = share;
      if (file.index) all.back() += "+" + sampled_checksum(MegatronIndex::path_for(file.path), share);
    }
    return all;
  }

  // out (n) = tokens [first, first + n) of file i, each below vocab_size. An error if the file has changed since it was
  // opened first, although one that was only touched is taken. Thread-safe.
  void read(int64_t i, int64_t first, int64_t n, int64_t vocab_size, std::vector<int32_t>& out) const {
    const Described& described = files_[static_cast<size_t>(i)];
    CHECK(first >= 0 && n >= 0 && first <= described.tokens - n);
    const std::shared_ptr<const File> file = open_->open_read(described.path);
    CHECK(file->size() == described.byte_of(described.tokens),
          "{}: its size has changed since the run began; restart the run", described.path);
    out.resize(static_cast<size_t>(n));
    with_type(described.type, [&]<class T>() {
      std::vector<T> stored(static_cast<size_t>(n));
      file->read_at(stored.data(), n * static_cast<int64_t>(sizeof(T)), described.byte_of(first));
      for (int64_t t = 0; t < n; ++t) {
        const int64_t token = stored[static_cast<size_t>(t)];
        CHECK(token >= 0 && token < vocab_size,
              "{}: token {} at position {} {} {}; the data was made with another tokenizer, or --vocab-size is too "
              "small",
              described.path, token, first + t, outside_vocabulary, vocab_size);
        out[static_cast<size_t>(t)] = static_cast<int32_t>(token);
      }
    });
    require_unchanged(described, *file);  // afterwards, so that nothing was written before these tokens were read
  }

  // begins (n): whether a document begins at each of the `tokens` [first, first + n) of file i, other than the first of
  // them, which begins one in any sample. Thread-safe.
  void find_documents(int64_t i, int64_t first, const std::vector<int32_t>& tokens, int32_t end_of_text,
                      std::vector<uint8_t>& begins) const {
    const Described& described = files_[static_cast<size_t>(i)];
    begins.assign(tokens.size(), 0);
    if (described.index) {
      const auto file = open_->open_read(MegatronIndex::path_for(described.path));
      for (const int64_t start : described.index->document_starts(*file, first, first + std::ssize(tokens)))
        begins[static_cast<size_t>(start - first)] = 1;
      return;
    }
    const size_t after = document_mark(i) == DocumentMark::end_of_text_after;
    for (size_t t = after; t < tokens.size(); ++t) begins[t] = tokens[t - after] == end_of_text;
  }

  // What says where the documents of file i begin; another text if that has changed.
  std::string documents_from(int64_t i, int32_t end_of_text) const {
    const Described& described = files_[static_cast<size_t>(i)];
    const std::string mark = mark_text(document_mark(i), end_of_text);
    if (!described.index) return mark;
    const std::string index = MegatronIndex::path_for(described.path);
    return formatted("{}: {} bytes, {}", mark, described.index->bytes(), File::open_read(index).modified());
  }

 private:
  // What a file was like when the run began.
  struct FirstSeen {
    std::mutex mutex;
    int64_t modified = 0;
    std::string checksum = {};  // empty: nobody has asked for it
    double share = 1;           // of the file, in the checksum
  };
  struct Described : TokenStorage {
    std::string path;
    std::shared_ptr<FirstSeen> first_seen = std::make_shared<FirstSeen>();
  };

  template <class T, class Of>
  std::vector<T> of_all(T Of::*field) const {
    std::vector<T> all;
    for (const Described& file : files_) all.push_back(file.*field);
    return all;
  }
  static void require_unchanged(const Described& described, const File& file) {
    FirstSeen& first = *described.first_seen;
    const std::lock_guard lock(first.mutex);
    if (file.modified() == first.modified) return;
    CHECK(!first.checksum.empty() && sampled_checksum(described.path, first.share) == first.checksum,
          "{}: its tokens have changed since the run began", described.path);
    first.modified = file.modified();
  }

  int64_t tokens_ = 0;
  std::vector<Described> files_;
  std::vector<std::string> empty_;
  std::unique_ptr<OpenFiles> open_ = std::make_unique<OpenFiles>();
};

}  // namespace llmc
