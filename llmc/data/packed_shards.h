// packed_shards.h: samples of whole documents: files of tokens whose documents fill rows of T places by --pack best-fit
// or document-start (packing.h).
//
// Documents are packed within windows of the stream, those that begin in the same 1024 T tokens of a file: so any
// sample is found from the index of the documents of one window, and is a function of the files, T and the packing.
#pragma once
#include <atomic>
#include <deque>
#include <exception>
#include <mutex>
#include <random>

#include "data/document_index.h"
#include "data/packing.h"

namespace llmc {

// Whether positions go on through a row, or begin at 0 in each document, which keeps documents apart in attention.
enum class PositionsIn : uint8_t { row, document };

class PackedShards {
 public:
  struct Config {
    Packing packing = Packing::best_fit;
    int64_t seq_len = 0, vocab_size = 0;
    int32_t end_of_text = 0;
    std::string index_directory;
    int64_t most_kept = int64_t{1} << 22;  // pieces of packed windows in memory, of 16 bytes each
  };

  // Errors name `option`.
  PackedShards(const TokenFiles& files, const Config& config, const Notice& notice, const char* option = "--train-data")
      : files_(files), config_(config) {
    index_documents(notice);
    int64_t documents = 0;
    for (int64_t file = 0; file < files.count(); ++file) {
      documents += indexes_[static_cast<size_t>(file)]->documents();
      divide_into_windows(file);
    }
    packed_.resize(windows_.size());
    CHECK(documents > files.count() || is_a_document(),
          "--pack {}: none of the {} tokens of {} is {}, the end of text, which {} documents: give the data's "
          "--tokenizer",
          config.packing, files.tokens(), option, config.end_of_text,
          files.document_mark(0) == DocumentMark::end_of_text_before ? "begins" : "ends");
    CHECK(samples() > 0,
          "--pack {}: {}: no file holds a sample{} ({} tokens in {} file(s)); shorten --seq-len or use larger files",
          config.packing, option,
          config.packing == Packing::document_start
              ? formatted(" of --seq-len {} + 1 tokens that begins with a document", config.seq_len)
              : ", which takes two tokens",
          files.tokens(), files.count());
  }

  int64_t samples() const { return counts_.rows; }
  const PackingCounts& counts() const { return counts_; }

  // How many targets sample `index` has.
  int64_t targets(int64_t index) const {
    const uint8_t padding = padding_.at(static_cast<size_t>(index));
    if (padding < much_padding) return config_.seq_len - padding;
    int64_t n = 0;
    with_row(index, [&](int64_t, std::span<const Range> row) { n = places_in(row); });
    return n;
  }

  // tokens, targets, positions (T) = sample `index`; targets: -1 where the row is padded. Thread-safe.
  void read_sample(int64_t index, int64_t vocab_size, int32_t* tokens, int32_t* targets, int32_t* positions,
                   PositionsIn positions_in = PositionsIn::row) const {
    with_row(index, [&](int64_t file, std::span<const Range> row) {
      const int64_t T = config_.seq_len;
      std::vector<int32_t> piece_tokens;
      std::vector<uint8_t> begins;
      int64_t at = 0;
      const auto place = [&](int32_t token, int32_t target, int64_t in_document) {
        tokens[at] = token;
        targets[at] = target;
        positions[at] = static_cast<int32_t>(positions_in == PositionsIn::document ? in_document : at);
        ++at;
      };
      for (const Range& piece : row) {
        files_.read(file, piece.begin, piece.size + 1, vocab_size, piece_tokens);
        files_.find_documents(file, piece.begin, piece_tokens, config_.end_of_text, begins);
        for (int64_t i = 0; i < piece.size; ++i) {
          const size_t t = static_cast<size_t>(i);
          CHECK(i == 0 || begins[t] == 0,
                "{}: a document begins at token {}, which the index {} lacks: delete the index and start again",
                files_.path(file), piece.begin + i, indexes_[static_cast<size_t>(file)]->path());
          place(piece_tokens[t], piece_tokens[t + 1], i);
        }
      }
      while (at < T) place(config_.end_of_text, -1, 0);
    });
  }

 private:
  // The documents of a file that begin in one window of the stream.
  struct Window {
    int64_t file, first_document, documents, end, first_sample;  // end: of the last document
  };

  // Whether the first file, if it is all one document, is marked as such.
  bool is_a_document() const {
    const DocumentMark mark = files_.document_mark(0);
    std::vector<int32_t> token;
    files_.read(0, mark == DocumentMark::end_of_text_after ? files_.tokens_of(0) - 1 : 0, 1, config_.vocab_size, token);
    return mark == DocumentMark::index || token[0] == config_.end_of_text;
  }

  // Several files at once. Each process starts at a random one: so several share the work, through the index directory.
  void index_documents(const Notice& notice) {
    const int64_t n = files_.count(), start = std::random_device()() % static_cast<uint64_t>(n);
    indexes_.resize(static_cast<size_t>(n));
    std::atomic<int64_t> next = 0;
    std::mutex mutex;  // for notice() and faults
    std::map<int64_t, std::exception_ptr> faults;
    on_threads(std::min<int64_t>(8, n), [&] {
      for (int64_t i = 0; (i = next++) < n;) {
        const int64_t file = (start + i) % n;
        try {
          indexes_[static_cast<size_t>(file)].emplace(files_, file, config_.vocab_size, config_.end_of_text,
                                                      config_.index_directory, [&](const std::string& line) {
                                                        const std::lock_guard lock(mutex);
                                                        notice(line);
                                                      });
        } catch (...) {
          next = n;
          const std::lock_guard lock(mutex);
          faults.emplace(file, std::current_exception());
        }
      }
    });
    if (!faults.empty()) std::rethrow_exception(faults.begin()->second);
  }

  void divide_into_windows(int64_t file) {
    constexpr int64_t block = int64_t{1} << 16;
    const DocumentIndex& index = *indexes_[static_cast<size_t>(file)];
    const int64_t window = 1024 * config_.seq_len;
    int64_t first = 0;
    std::vector<int64_t> begins;  // of the window
    const auto end_window = [&](int64_t end) {
      const int64_t n = static_cast<int64_t>(begins.size());
      const std::vector<Range> documents = documents_of(begins, end);
      const PackedRows rows = pack_rows(config_.packing, documents, config_.seq_len);
      if (rows.count() > 0) windows_.push_back({file, first, n, end, samples()});
      for (int64_t row = 0; row < rows.count(); ++row)
        padding_.push_back(
            static_cast<uint8_t>(std::min<int64_t>(config_.seq_len - places_in(rows[row]), much_padding)));
      counts_ += counts_of(rows, documents, config_.seq_len);
      first += n;
      begins.clear();
    };
    for (int64_t some = 0; some < index.documents(); some += block)
      for (const int64_t begin : index.begins(some, std::min(block, index.documents() - some), files_.open_files())) {
        if (!begins.empty() && begin / window != begins.front() / window) end_window(begin);
        begins.push_back(begin);
      }
    end_window(files_.tokens_of(file) - 1);
  }

  // A document has the places from its beginning to that of the next one. A file's last token is only a target.
  static std::vector<Range> documents_of(const std::vector<int64_t>& begins, int64_t end) {
    std::vector<Range> documents;
    for (size_t i = 0; i < begins.size(); ++i)
      if (const int64_t next = i + 1 < begins.size() ? begins[i + 1] : end; next > begins[i])
        documents.push_back({begins[i], next - begins[i]});
    return documents;
  }

  // Calls f(file, pieces) for the row that is sample `index`.
  template <class F>
  void with_row(int64_t index, F&& f) const {
    CHECK(index >= 0 && index < samples());
    const auto window = std::prev(std::ranges::upper_bound(windows_, index, {}, &Window::first_sample));
    const std::shared_ptr<const PackedRows> rows = packed(static_cast<size_t>(window - windows_.begin()));
    const int64_t row = index - window->first_sample;
    CHECK(row < rows->count(), "{}: the index of its documents has changed since the run began; restart the run",
          files_.path(window->file));
    f(window->file, (*rows)[row]);
  }

  // The rows of window w. Those packed last stay in memory.
  std::shared_ptr<const PackedRows> packed(size_t w) const {
    {
      const std::lock_guard lock(mutex_);
      if (packed_[w] != nullptr) return packed_[w];
    }
    const Window& window = windows_[w];
    const std::vector<int64_t> begins = indexes_[static_cast<size_t>(window.file)]->begins(
        window.first_document, window.documents, files_.open_files());
    auto rows = std::make_shared<const PackedRows>(
        pack_rows(config_.packing, documents_of(begins, window.end), config_.seq_len));
    const std::lock_guard lock(mutex_);
    if (packed_[w] != nullptr) return packed_[w];  // another thread was faster
    const auto pieces = [&](size_t of) { return static_cast<int64_t>(packed_[of]->pieces.size()); };
    packed_[w] = rows;
    kept_.push_back(w);
    for (kept_pieces_ += pieces(w); kept_pieces_ > config_.most_kept && kept_.size() > 1; kept_.pop_front()) {
      kept_pieces_ -= pieces(kept_.front());
      packed_[kept_.front()] = nullptr;  // a thread that reads it still has it
    }
    return rows;
  }

  const TokenFiles& files_;
  Config config_;
  std::vector<std::optional<DocumentIndex>> indexes_;  // of each file
  std::vector<Window> windows_;
  PackingCounts counts_;
  // Of each row, a byte, so that a step's targets are counted without packing the windows of all its rows again.
  static constexpr uint8_t much_padding = 255;  // or more
  std::vector<uint8_t> padding_;

  mutable std::mutex mutex_;
  mutable std::vector<std::shared_ptr<const PackedRows>> packed_;  // of each window, if it is kept
  mutable std::deque<size_t> kept_;                                // in the order in which they were packed
  mutable int64_t kept_pieces_ = 0;
};

}  // namespace llmc
