// checksum.h: files with a checksum per slice, so that several threads or ranks can verify one file together. XXH3, 64
// bits (https://xxhash.com): detects damage, not forgery.
#pragma once
#include <xxhash.h>

#include <atomic>
#include <exception>
#include <mutex>

#include "core/json.h"
#include "core/shape.h"

namespace llmc {

// A file's entry in a manifest.
struct FileRecord {
  static constexpr int64_t slice_bytes = int64_t{64} << 20;
  int64_t size = 0;
  std::vector<std::string> slices;  // 16 hexadecimal digits each

  nlohmann::ordered_json to_json() const { return {{"size", size}, {"xxh3", slices}}; }
  // Errors begin with `where`.
  static FileRecord from_json(const nlohmann::json& json, const std::string& where) {
    const nlohmann::json slices = member(json, "xxh3");
    const std::optional<int64_t> size = whole_number(member(json, "size"));
    CHECK(size && slices.is_array() && std::all_of(slices.begin(), slices.end(), [](auto& s) { return s.is_string(); }),
          "{} is {}, expected a size and a list of checksums; the file is damaged", where, json);
    return {*size, slices};
  }
};

// A running checksum of bytes that arrive in pieces.
class RunningHash {
 public:
  RunningHash() : state_(XXH3_createState(), XXH3_freeState) {
    CHECK(state_ != nullptr, "no memory for a checksum");
    XXH3_64bits_reset(state_.get());
  }
  void add(const void* data, int64_t bytes) { XXH3_64bits_update(state_.get(), data, static_cast<size_t>(bytes)); }
  uint64_t value() const { return XXH3_64bits_digest(state_.get()); }
  void reset() { XXH3_64bits_reset(state_.get()); }

 private:
  std::unique_ptr<XXH3_state_t, XXH_errorcode (*)(XXH3_state_t*)> state_;
};

inline std::string hex_digits(uint64_t hash) {
  return detail::printf_string("%016llx", static_cast<unsigned long long>(hash));
}

inline std::string checksum(std::string_view text) { return hex_digits(XXH3_64bits(text.data(), text.size())); }

// Writes a file and its record in one pass.
class RecordedFile {
 public:
  explicit RecordedFile(const std::string& path) : file_(File::create(path)) {}
  void write(const void* data, int64_t bytes) {
    file_.write(data, bytes);
    for (const char* from = static_cast<const char*>(data); bytes > 0;) {
      const int64_t room = FileRecord::slice_bytes - record_.size % FileRecord::slice_bytes, n = std::min(bytes, room);
      hash_.add(from, n);
      record_.size += n;
      from += n;
      bytes -= n;
      if (n == room) end_slice();
    }
  }
  // Syncs to disk and closes.
  FileRecord finish() {
    if (record_.size % FileRecord::slice_bytes != 0) end_slice();
    file_.sync_and_close();
    return std::move(record_);
  }

 private:
  void end_slice() {
    record_.slices.push_back(hex_digits(hash_.value()));
    hash_.reset();
    if (record_.size % FileRecord::slice_bytes == 0)
      file_.write_back(record_.size - FileRecord::slice_bytes, record_.size);
  }
  File file_;
  RunningHash hash_;
  FileRecord record_;
};

inline FileRecord write_recorded_text(const std::string& path, std::string_view text) {
  RecordedFile file(path);
  file.write(text.data(), static_cast<int64_t>(text.size()));
  return file.finish();
}

// This reader's part of what `readers` read together.
struct ReadShare {
  int reader = 0, readers = 1;
};

// The first difference between a file and its record, by path, in this reader's share of the slices; none: they match.
// advance: called with the bytes read, by one thread at a time.
inline std::optional<std::string> file_fault(const std::map<std::string, FileRecord>& records, ReadShare share = {},
                                             const Advance& advance = {}) {
  struct Slice {
    const std::string& path;
    const FileRecord& record;
    int64_t number;  // 0 of 0: the file is empty
  };
  std::vector<Slice> all;
  for (const auto& [path, record] : records) {
    const int64_t slices = ceil_div(record.size, FileRecord::slice_bytes);
    if (slices != std::ssize(record.slices))
      return formatted("{}: the manifest has {} checksums for {} slices", path, record.slices.size(), slices);
    for (int64_t i = 0; i < std::max<int64_t>(1, slices); ++i) all.push_back({path, record, i});
  }
  const auto slice_fault = [](const Slice& slice, std::vector<char>& bytes) -> std::optional<std::string> {
    const auto& [path, record, number] = slice;
    const File file = File::open_read(path);
    if (file.size() != record.size)
      return formatted("{} has {} bytes, but its manifest says {}", path, file.size(), record.size);
    const int64_t begin = number * FileRecord::slice_bytes,
                  end = std::min(begin + FileRecord::slice_bytes, record.size);
    if (begin == end) return std::nullopt;
    RunningHash hash;
    for (int64_t at = begin; at < end; at += std::ssize(bytes)) {
      const int64_t n = std::min<int64_t>(std::ssize(bytes), end - at);
      file.read_at(bytes.data(), n, at);
      hash.add(bytes.data(), n);
    }
    if (hex_digits(hash.value()) == record.slices[static_cast<size_t>(number)]) return std::nullopt;
    return formatted("{}: bytes {} to {} do not match the checksum in the manifest", path, begin, end);
  };
  const int64_t first = share.reader * std::ssize(all) / share.readers,
                last = (share.reader + 1) * std::ssize(all) / share.readers;
  std::atomic<int64_t> next = first;
  std::mutex mutex;  // guards what follows
  int64_t slices_read = 0;
  std::map<int64_t, std::string> faults;
  const auto work = [&] {
    int64_t i = first;
    std::optional<std::string> fault;
    try {
      std::vector<char> bytes(1 << 20);
      while (!fault && (i = next++) < last) {
        fault = slice_fault(all[static_cast<size_t>(i)], bytes);
        if (!advance) continue;
        const std::lock_guard lock(mutex);
        advance(++slices_read * FileRecord::slice_bytes, (last - first) * FileRecord::slice_bytes);
      }
    } catch (const std::exception& error) {
      fault = error.what();
    }
    if (!fault) return;
    next = last;
    const std::lock_guard lock(mutex);
    faults.emplace(i, *fault);
  };
  on_threads(std::min<int64_t>(8, last - first), work);
  return faults.empty() ? std::nullopt : std::optional(faults.begin()->second);
}

// A checksum of a file's size and of `share` of its contents: evenly spaced blocks, including the first and the last;
// 1: all. Changed contents of the same size are noticed unless they differ only between the blocks.
inline std::string sampled_checksum(const std::string& path, double share) {
  constexpr int64_t block_bytes = 64 << 10;
  const File file = File::open_read(path);
  const int64_t size = file.size(), all = ceil_div(size, block_bytes);
  const int64_t blocks = std::min(all, std::max<int64_t>(2, std::ceil(share * static_cast<double>(all))));
  std::vector<char> bytes(static_cast<size_t>(std::min(size, block_bytes)));
  uint64_t hash = static_cast<uint64_t>(size);
  for (int64_t i = 0; i < blocks; ++i) {
    const int64_t block = blocks == all ? i
                                        : static_cast<int64_t>(static_cast<double>(i) * static_cast<double>(all - 1) /
                                                               static_cast<double>(blocks - 1));
    const int64_t begin = block * block_bytes, n = std::min(block_bytes, size - begin);
    file.read_at(bytes.data(), n, begin);
    hash = XXH3_64bits_withSeed(bytes.data(), static_cast<size_t>(n), hash);
  }
  return hex_digits(hash);
}

}  // namespace llmc
