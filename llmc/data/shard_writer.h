// shard_writer.h: writes token shards (token_file.h has the format) under temporary names, PREFIX_000000.bin.partial,
// so that writing can go on after an interruption; publish() gives all of them their names.
#pragma once
#include <filesystem>

#include "data/token_file.h"

namespace llmc {

// How tokens are stored: up to 65,536 of them as uint16, more as uint32.
inline int64_t token_width(int64_t vocab_size) { return vocab_size <= 1 << 16 ? 2 : 4; }

class ShardWriter {
 public:
  static constexpr int64_t most_shards = 1'000'000;  // six digits

  // tokens: how many an earlier writer has written; call go_on() or publish() then.
  ShardWriter(std::string prefix, int64_t width, int64_t shard_tokens, int64_t tokens = 0)
      : prefix_(std::move(prefix)), width_(width), shard_tokens_(shard_tokens), tokens_(tokens) {}

  // Goes on after the earlier writer's tokens; what it wrote after them is removed.
  void go_on() {
    for (int64_t i = 0; i < shards(); ++i) {
      const int64_t bytes = shard_header_bytes + tokens_in(i) * width_;
      const int64_t size = path_exists(partial_path(i)) ? File::open_own(partial_path(i)).size() : -1;
      CHECK(size >= bytes, "{}: {}, expected at least {} bytes from the interrupted run: start over with --restart",
            partial_path(i), size < 0 ? "does not exist" : formatted("has {} bytes", size), bytes);
      std::filesystem::resize_file(partial_path(i), static_cast<uintmax_t>(bytes));
    }
    for (const std::string& path : numbered(prefix_, ".bin.partial"))
      if (path >= partial_path(shards())) std::filesystem::remove(path);
  }

  int64_t tokens() const { return tokens_; }
  int64_t shards() const { return ceil_div(tokens_, shard_tokens_); }
  int64_t tokens_in(int64_t shard) const { return std::min(shard_tokens_, tokens_ - shard * shard_tokens_); }
  std::string path(int64_t shard) const { return formatted("{}_{:06}.bin", prefix_, shard); }
  std::string partial_path(int64_t shard) const { return path(shard) + ".partial"; }

  // `packed`: tokens of width_ bytes each.
  void append(std::string_view packed) {
    while (!packed.empty()) {
      const int64_t shard = tokens_ / shard_tokens_, room = shard_tokens_ - tokens_ % shard_tokens_;
      if (!file_) open(shard);
      const std::string_view part = packed.substr(0, static_cast<size_t>(room * width_));
      file_->write(part.data(), std::ssize(part));
      packed.remove_prefix(part.size());
      tokens_ += std::ssize(part) / width_;
      if (tokens_ % shard_tokens_ == 0) close();
    }
  }

  // Makes what was written durable.
  void sync() {
    if (file_) file_->sync();
    fsync_directory(folder_of(prefix_));
  }

  // Writes the headers.
  void finish() {
    if (file_) close();
    for (int64_t i = 0; i < shards(); ++i) {
      const bool narrow = width_ == 2;
      int32_t header[256] = {narrow ? 20240520 : 20240801, narrow ? 1 : 7, static_cast<int32_t>(tokens_in(i))};
      File file = File::update(partial_path(i));
      file.write(header, sizeof header);
      file.sync_and_close();
    }
  }

  // Gives the finished shards their names, unless they have them, and removes shards of the same prefix beyond them.
  void publish() const {
    const std::vector<std::string> old = existing(prefix_);
    for (int64_t i = 0; i < shards(); ++i)
      if (path_exists(partial_path(i))) std::filesystem::rename(partial_path(i), path(i));
    for (const std::string& one : old)
      if (one > path(shards() - 1)) std::filesystem::remove(one);
    fsync_directory(folder_of(prefix_));
  }

  // The first published shard that is not as it was written; none: all are.
  std::optional<std::string> damaged() const {
    for (int64_t i = 0; i < shards(); ++i)
      if (!path_exists(path(i)) || File::open_read(path(i)).size() != shard_header_bytes + tokens_in(i) * width_)
        return path(i);
    return std::nullopt;
  }

  // The published shards of a prefix.
  static std::vector<std::string> existing(const std::string& prefix) { return numbered(prefix, ".bin"); }

 private:
  // PREFIX_000000SUFFIX and so on, sorted.
  static std::vector<std::string> numbered(const std::string& prefix, std::string_view suffix) {
    const std::filesystem::path path(prefix);
    const std::string folder = folder_of(prefix), name = path.filename().string() + "_";
    std::vector<std::string> found;
    if (!is_directory(folder)) return found;
    for (const std::string& file : names_in(folder)) {
      if (file.size() != name.size() + 6 + suffix.size() || !file.starts_with(name) || !file.ends_with(suffix))
        continue;
      const std::string_view digits = std::string_view(file).substr(name.size(), 6);
      if (digits.find_first_not_of("0123456789") == digits.npos)
        found.push_back(prefix + "_" + file.substr(name.size()));  // as path() and partial_path() spell it
    }
    return found;
  }
  static std::string folder_of(const std::string& prefix) {
    const std::filesystem::path folder = std::filesystem::path(prefix).parent_path();
    return folder.empty() ? "." : folder.string();
  }

  void open(int64_t shard) {
    CHECK(shard < most_shards, "{}: more than {} shards of {} tokens: raise --shard-size", prefix_, most_shards,
          shard_tokens_);
    const bool begun = tokens_ % shard_tokens_ != 0;
    file_.emplace(begun ? File::append(partial_path(shard)) : File::create(partial_path(shard)));
    const std::string no_header(shard_header_bytes, '\0');  // no magic: not a shard until finish()
    if (!begun) file_->write(no_header.data(), std::ssize(no_header));
  }
  void close() {
    file_->sync_and_close();
    file_.reset();
  }

  std::string prefix_;
  int64_t width_, shard_tokens_, tokens_;
  std::optional<File> file_;  // the last shard, once something was written to it
};

}  // namespace llmc
