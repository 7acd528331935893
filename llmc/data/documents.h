// documents.h: files of text or JSON lines, cut into chunks of bounded size for several threads, and the documents in
// them. Chunks depend on the files alone, never on the number of threads; reading can resume between any two.
#pragma once
#include "core/check.h"
#include "data/json_line.h"
#include "data/text_file.h"

namespace llmc {

// A place between two chunks.
struct TextPosition {
  int64_t file = 0, offset = 0;  // bytes of its text, decompressed
  int64_t line = 1;
  bool within = false;  // a document goes on here
  bool operator==(const TextPosition&) const = default;
};

enum class TextFormat : uint8_t { text, json_lines };

// By the name, in small or capital letters. A file of text is one document.
inline TextFormat format_of(std::string path) {
  for (char& c : path) c = c >= 'A' && c <= 'Z' ? static_cast<char>(c + ('a' - 'A')) : c;
  for (const char* packed : {".gz", ".zst", ".zstd"})
    if (path.ends_with(packed)) path.resize(path.find_last_of('.'));
  for (const char* suffix : {".jsonl", ".ndjson", ".json"})
    if (path.ends_with(suffix)) return TextFormat::json_lines;
  return TextFormat::text;
}

// Whole lines of JSON, or text: a document, or a part of a long one.
struct TextChunk {
  std::string path;
  TextFormat format;
  TextPosition begin, end;
  std::string text;
};

class ChunkReader {
 public:
  // The last place where the text of a document may be cut; none: there is none. Called with at least chunk_bytes.
  using Cut = std::function<std::optional<size_t>(std::string_view)>;

  static constexpr size_t chunk_bytes = 1 << 20;
  static constexpr size_t longest_line = size_t{1} << 30;  // of JSON; it is held in memory
  static constexpr size_t longest_part = size_t{1} << 26;  // of text without a place to cut

  ChunkReader(std::vector<std::string> paths, Cut cut, TextPosition begin = {})
      : paths_(std::move(paths)), cut_(std::move(cut)), at_(begin) {
    if (at_.offset == 0 || at_.file == std::ssize(paths_)) return;
    open();
    CHECK(file_->skip(at_.offset) == at_.offset,
          "{}: ends before byte {} of its text, where reading is to go on: it has changed", file_->path(), at_.offset);
  }

  // The next chunk; none: all files have been read.
  std::optional<TextChunk> next() {
    while (at_.file < std::ssize(paths_)) {
      if (!file_) open();
      const bool more = read_more();
      if (rest_.empty()) {
        next_file();
        continue;
      }
      const bool is_json = format_of(file_->path()) == TextFormat::json_lines;
      const std::string_view text = std::string_view(rest_).substr(0, wanted_);
      std::optional<size_t> end = more ? is_json ? end_of_line(text) : cut_(text) : text.size();
      if (!is_json && !end && text.size() >= longest_part) end = text.size() - detail::unfinished(text);
      CHECK(end || text.size() < longest_line,
            "{}:{}: a line of more than {} bytes, expected one document on each line", file_->path(), at_.line,
            longest_line);
      if (!end) {
        wanted_ *= 2;
        continue;
      }
      wanted_ = chunk_bytes;
      return take(*end, is_json ? TextFormat::json_lines : TextFormat::text, more);
    }
    return std::nullopt;
  }

  // The bytes of all files as they are, and how many of them have been read.
  int64_t bytes_read() const { return bytes_before_ + (file_ ? file_->position() : 0); }

 private:
  void open() { file_.emplace(paths_[static_cast<size_t>(at_.file)]); }
  void next_file() {
    bytes_before_ += file_->size();
    file_.reset();
    ended_ = false;
    at_ = {.file = at_.file + 1};
  }

  // Reads until rest_ has more than wanted_. False: the file ends before.
  bool read_more() {
    const size_t kept = rest_.size();
    if (!ended_ && kept <= wanted_) {
      rest_.resize(wanted_ + 1);
      rest_.resize(kept + file_->read(rest_.data() + kept, wanted_ + 1 - kept));
      ended_ = rest_.size() <= wanted_;
    }
    return rest_.size() > wanted_;
  }

  static std::optional<size_t> end_of_line(std::string_view text) {
    const size_t last = text.rfind('\n');
    return last == text.npos ? std::nullopt : std::optional(last + 1);
  }

  TextChunk take(size_t end, TextFormat format, bool more) {
    TextChunk chunk{file_->path(), format, at_, {}, rest_.substr(0, end)};
    rest_.erase(0, end);
    at_.line += std::count(chunk.text.begin(), chunk.text.end(), '\n');
    at_.offset += static_cast<int64_t>(end);
    at_.within = format == TextFormat::text;
    if (!more) next_file();
    chunk.end = at_;
    return chunk;
  }

  std::vector<std::string> paths_;
  Cut cut_;
  TextPosition at_;
  std::optional<TextFile> file_;
  std::string rest_;             // read, and not yet in a chunk
  size_t wanted_ = chunk_bytes;  // of rest_, for the next chunk
  bool ended_ = false;           // the file, not rest_
  int64_t bytes_before_ = 0;
};

// Passes on the documents of a chunk, or the part of one, that are not empty: on_document(text, line, begins). Those of
// JSON lines are UTF-8. Errors name the file and the line.
template <class F>
void for_each_document(const TextChunk& chunk, const std::string& field, F&& on_document) {
  int64_t line = chunk.begin.line;
  if (chunk.format == TextFormat::text) return on_document(std::string_view(chunk.text), line, !chunk.begin.within);
  std::string text;
  for (size_t at = 0; at < chunk.text.size(); ++line) {
    const size_t end = std::min(chunk.text.find('\n', at), chunk.text.size());
    const std::string_view row = std::string_view(chunk.text).substr(at, end - at);
    at = end + 1;
    if (row.find_first_not_of(" \t\r") == row.npos) continue;
    text_in_line(text, row, field, formatted("{}:{}", chunk.path, line));
    if (!text.empty()) on_document(std::string_view(text), line, true);
  }
}

}  // namespace llmc
