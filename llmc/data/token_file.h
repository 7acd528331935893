// token_file.h: files of tokens, in llm.c's format: a header of 256 little-endian int32, {magic, version, token count},
// then the tokens: uint16 (20240520, 1) or uint32 (20240801, 7).
#pragma once
#include <algorithm>
#include <filesystem>
#include <memory>
#include <string>
#include <vector>

#include "core/checksum.h"
#include "core/files.h"
#include "data/no_shard.h"

namespace llmc {

// One file of tokens.
struct TokenFile {
  static constexpr int64_t header_bytes = 1024;
  File file;
  int64_t tokens;
  int64_t width;  // bytes of a token: 2 or 4
};

// Opens a file of tokens and checks its header against its size.
inline TokenFile open_token_file(const std::string& path) {
  File file = File::open_read(path);
  const int64_t size = file.size();
  CHECK(size >= TokenFile::header_bytes, "{}: {} bytes are too few for a token shard, whose header takes {}{}", path,
        size, TokenFile::header_bytes, detail::hint_of_no_shard(file));
  int32_t header[256];
  file.read_at(header, TokenFile::header_bytes, 0);
  const bool is_uint16 = header[0] == 20240520 && header[1] == 1, is_uint32 = header[0] == 20240801 && header[1] == 7;
  CHECK(is_uint16 || is_uint32,
        "{}: magic {} version {}, expected 20240520 version 1 (uint16) or 20240801 version 7 (uint32); not a token "
        "shard{}",
        path, header[0], header[1], detail::hint_of_no_shard(file));
  const int64_t width = is_uint16 ? 2 : 4, payload = size - TokenFile::header_bytes, tokens = payload / width;
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

// All files that a pattern matches, in order.
class TokenFiles {
 public:
  // Checks every file; there may be more of them than a process can hold open. Errors name `option`.
  TokenFiles(const std::string& pattern, const char* option) {
    for (const std::string& path : expand_glob(pattern, option)) {
      const TokenFile file = open_token_file(path);
      files_.push_back({path, file.tokens, file.width});
      tokens_ += file.tokens;
    }
  }

  int64_t count() const { return static_cast<int64_t>(files_.size()); }
  int64_t tokens() const { return tokens_; }
  std::vector<std::string> paths() const {
    std::vector<std::string> all;
    for (const Described& file : files_) all.push_back(file.path);
    return all;
  }
  std::vector<int64_t> tokens_of_files() const {
    std::vector<int64_t> all;
    for (const Described& file : files_) all.push_back(file.tokens);
    return all;
  }
  // A checksum of each file, to notice that data have changed between a run and its resume: of all bytes if the files
  // have at most 256 MiB together, otherwise of samples, the same fraction of each file.
  std::vector<std::string> checksums() const {
    constexpr double most = 256 << 20;
    double bytes = 0;
    for (const Described& file : files_) bytes += static_cast<double>(file.bytes());
    std::vector<std::string> all;
    for (const Described& file : files_) all.push_back(sampled_checksum(file.path, std::min(1.0, most / bytes)));
    return all;
  }
  bool has(const std::string& path) const {  // even if under another path
    std::error_code ignored;
    return std::any_of(files_.begin(), files_.end(),
                       [&](const Described& file) { return std::filesystem::equivalent(file.path, path, ignored); });
  }

  // out (n) = tokens [first, first + n) of file i, each below vocab_size. Thread-safe.
  void read(int64_t i, int64_t first, int64_t n, int64_t vocab_size, std::vector<int32_t>& out) const {
    const Described& described = files_[static_cast<size_t>(i)];
    CHECK(first >= 0 && n >= 0 && first <= described.tokens - n);
    const std::shared_ptr<const File> file = open_->open_read(described.path);
    CHECK(file->size() == described.bytes(), "{}: its size has changed since the run began; restart the run",
          described.path);
    out.resize(static_cast<size_t>(n));
    if (described.width == 4) {
      file->read_at(out.data(), n * 4, TokenFile::header_bytes + first * 4);
    } else {  // read into the upper half, then widen in place from the front
      uint16_t* narrow = reinterpret_cast<uint16_t*>(out.data()) + n;
      file->read_at(narrow, n * 2, TokenFile::header_bytes + first * 2);
      for (int64_t t = 0; t < n; ++t) {
        uint16_t token;
        std::memcpy(&token, narrow + t, sizeof token);
        out[static_cast<size_t>(t)] = token;
      }
    }
    for (int64_t t = 0; t < n; ++t) {
      const uint32_t token = static_cast<uint32_t>(out[static_cast<size_t>(t)]);
      CHECK(token < static_cast<uint64_t>(vocab_size),
            "{}: token {} at position {} is outside the model's vocabulary of {}; the data was made with another "
            "tokenizer, or --vocab-size is too small",
            described.path, token, first + t, vocab_size);
    }
  }

 private:
  struct Described {
    std::string path;
    int64_t tokens, width;
    int64_t bytes() const { return TokenFile::header_bytes + tokens * width; }
  };

  int64_t tokens_ = 0;
  std::vector<Described> files_;
  std::unique_ptr<OpenFiles> open_ = std::make_unique<OpenFiles>();
};

}  // namespace llmc
