// megatron_index.h: Megatron's index FILE.idx of the tokens in FILE.bin. All numbers are little-endian:
//
//   "MMIDIDX\0\0", version 1 (8 bytes), type of the tokens (1 byte), number of sequences S (8), of boundaries D (8),
//   lengths[S] of the sequences in tokens (int32), pointers[S] to their first bytes in FILE.bin (int64),
//   boundaries[D] (int64): document d is the sequences [boundaries[d], boundaries[d + 1]).
//
// The sequences follow each other in FILE.bin without gaps. Source: _IndexWriter in Megatron-LM's
// megatron/core/datasets/indexed_dataset.py.
#pragma once
#include "core/files.h"
#include "data/token_format.h"

namespace llmc {

class MegatronIndex {
 public:
  static constexpr std::string_view magic{"MMIDIDX\0\0", 9};
  static constexpr int64_t header_bytes = 34;

  static std::string path_for(const std::string& data) {
    return (data.ends_with(".bin") ? data.substr(0, data.size() - 4) : data) + ".idx";
  }
  static bool begins(const File& file) {
    std::string start(magic.size(), '\0');
    if (file.size() < std::ssize(start)) return false;
    file.read_at(start.data(), std::ssize(start), 0);
    return start == magic;
  }

  // Checks every number of the index, also against the size of the data.
  MegatronIndex(const File& file, const File& data) : bytes_(file.size()) {
    const std::string& path = file.path();
    CHECK(begins(file) && bytes_ >= header_bytes,
          "{}: expected Megatron's index, which begins with MMIDIDX and a header of {} bytes", path, header_bytes);
    const uint64_t version = number<uint64_t>(file, 9);
    CHECK(version == 1, "{}: version {} of Megatron's index, expected 1", path, version);
    type_ = type_of(path, number<uint8_t>(file, 17));
    const uint64_t sequences = number<uint64_t>(file, 18), boundaries = number<uint64_t>(file, 26),
                   room = static_cast<uint64_t>(bytes_ - header_bytes);
    const bool fits = sequences <= room / 12 && boundaries <= (room - 12 * sequences) / 8;
    const uint64_t rest = fits ? room - 12 * sequences - 8 * boundaries : 0;
    CHECK(rest == 0 || rest != sequences,
          "{}: has modes of sequences, of Megatron's multimodal data; only text can be trained on", path);
    CHECK(fits && rest == 0,
          "{}: {} sequences and {} document boundaries take 12 and 8 bytes each, but {} bytes follow the header; "
          "truncated or damaged: copy it again",
          path, sequences, boundaries, room);
    sequences_ = static_cast<int64_t>(sequences), boundaries_ = static_cast<int64_t>(boundaries);
    check_sequences(file, data);
    check_documents(file);
  }

  TokenType type() const { return type_; }
  int64_t tokens() const { return tokens_; }
  int64_t documents() const { return boundaries_ - 1; }
  int64_t bytes() const { return bytes_; }  // of the index

  // The tokens in [begin, end) at which documents begin. file: the index, opened again.
  std::vector<int64_t> document_starts(const File& file, int64_t begin, int64_t end) const {
    CHECK(file.size() == bytes_, "{}: its size has changed since the run began; restart the run", file.path());
    int64_t d = 0;
    for (int64_t after = documents(); d < after;) {
      const int64_t middle = d + (after - d) / 2;
      if (start_of(file, middle) < begin) d = middle + 1;
      else after = middle;
    }
    std::vector<int64_t> starts;
    for (; d < documents(); ++d) {
      const int64_t start = start_of(file, d);
      if (start >= end) break;
      if (starts.empty() || start != starts.back()) starts.push_back(start);
    }
    return starts;
  }

 private:
  static constexpr int64_t block = 1 << 16;  // numbers that are checked at a time

  template <class T>
  static std::vector<T> numbers(const File& file, int64_t byte, int64_t n) {
    std::vector<T> values(static_cast<size_t>(n));
    file.read_at(values.data(), n * static_cast<int64_t>(sizeof(T)), byte);
    return values;
  }
  template <class T>
  static T number(const File& file, int64_t byte) {
    return numbers<T>(file, byte, 1)[0];
  }
  static TokenType type_of(const std::string& path, int code) {
    using enum TokenType;
    CHECK(code != 6 && code != 7, "{}: type code {} is of floating-point numbers, expected tokens", path, code);
    CHECK(code >= 1 && code <= 8, "{}: unknown type code {}, expected 1 (uint8) to 5 (int64), or 8 (uint16)", path,
          code);
    return std::array{uint8, int8, int16, int32, int64, int64, int64, uint16}[static_cast<size_t>(code - 1)];
  }
  int64_t pointers_at() const { return header_bytes + 4 * sequences_; }
  int64_t boundaries_at() const { return header_bytes + 12 * sequences_; }

  void check_sequences(const File& file, const File& data) {
    const int64_t width = width_of(type_), size = data.size();
    for (int64_t first = 0; first < sequences_; first += block) {
      const int64_t n = std::min(block, sequences_ - first);
      const auto lengths = numbers<int32_t>(file, header_bytes + 4 * first, n);
      const auto pointers = numbers<int64_t>(file, pointers_at() + 8 * first, n);
      for (int64_t i = 0; i < n; ++i) {
        const int64_t length = lengths[static_cast<size_t>(i)], pointer = pointers[static_cast<size_t>(i)];
        CHECK(length >= 0, "{}: sequence {} has {} tokens; damaged: copy it again", file.path(), first + i, length);
        CHECK(pointer == tokens_ * width,
              "{}: sequence {} is at byte {}, expected {}, where the sequence before it ends", file.path(), first + i,
              pointer, tokens_ * width);
        CHECK(length <= size / width - tokens_,
              "{}: sequence {}, of {} tokens from byte {} on, ends beyond {}, of {} bytes", file.path(), first + i,
              length, pointer, data.path(), size);
        tokens_ += length;
      }
    }
    CHECK(tokens_ * width == size, "{}: describes {} tokens of {} bytes, but {} has {} bytes: the two are not a pair",
          file.path(), tokens_, width, data.path(), size);
  }

  void check_documents(const File& file) const {
    CHECK(boundaries_ > 0, "{}: has no document boundaries", file.path());
    int64_t last = 0;
    for (int64_t first = 0; first < boundaries_; first += block) {
      const int64_t n = std::min(block, boundaries_ - first);
      const auto values = numbers<int64_t>(file, boundaries_at() + 8 * first, n);
      for (int64_t i = 0; i < n; ++i) {
        const int64_t value = values[static_cast<size_t>(i)];
        CHECK(first + i > 0 ? value >= last : value == 0, "{}: document {} begins at sequence {}, expected {}",
              file.path(), first + i, value,
              first + i > 0 ? formatted("at least {}, where the one before it begins", last) : "0");
        last = value;
      }
    }
    CHECK(last == sequences_, "{}: the last document ends before sequence {}, expected {}, the number of sequences",
          file.path(), last, sequences_);
  }

  // The first token of document d; that of one without sequences at the end: the number of tokens.
  int64_t start_of(const File& file, int64_t d) const {
    const int64_t sequence = number<int64_t>(file, boundaries_at() + 8 * d);
    CHECK(sequence >= 0 && sequence <= sequences_, "{}: has changed since the run began; restart the run", file.path());
    return sequence == sequences_ ? tokens_ : number<int64_t>(file, pointers_at() + 8 * sequence) / width_of(type_);
  }

  int64_t bytes_, sequences_ = 0, boundaries_ = 0, tokens_ = 0;
  TokenType type_ = TokenType::uint16;
};

}  // namespace llmc
