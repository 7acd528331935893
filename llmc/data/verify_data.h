// verify_data.h: --verify-data reads every shard in full and checks header, size and every token against the
// vocabulary.
#pragma once
#include <filesystem>

#include "core/work_progress.h"
#include "data/token_file.h"

namespace llmc {

// The contents of shards, or what is wrong with one.
struct ShardReport {
  DataFormat format = DataFormat::automatic;
  TokenType type = TokenType::uint16;
  int64_t tokens = 0;
  int64_t documents = 0;  // end-of-text tokens, or as an index says
  int64_t outside = 0;    // tokens outside the vocabulary
  int64_t largest = -1;   // the largest token
  std::string error;      // empty: good
};

namespace detail {

// Counts in tokens [0, n) of one block.
template <class Token>
void count_tokens(const Token* tokens, int64_t n, int64_t vocab_size, int64_t end_of_text, ShardReport& report) {
  int64_t documents = 0, outside = 0, largest = -1;
#pragma omp parallel for simd reduction(+ : documents, outside) reduction(max : largest)
  for (int64_t i = 0; i < n; ++i) {
    const int64_t token = tokens[i];
    documents += token == end_of_text;
    outside += token < 0 || token >= vocab_size;
    largest = std::max(largest, token);
  }
  report.documents += documents;
  report.outside += outside;
  report.largest = std::max(report.largest, largest);
}

}  // namespace detail

// Verifies one shard. `progress`: called after each block with its bytes.
inline ShardReport verify_shard(const std::string& path, DataFormat format, int64_t vocab_size, int64_t end_of_text,
                                const std::function<void(int64_t)>& progress) {
  constexpr int64_t block = int64_t{1} << 22;  // tokens
  ShardReport report;
  try {
    const TokenFile shard = open_token_file(path, format);
    report.format = shard.format, report.type = shard.type, report.tokens = shard.tokens;
    with_type(shard.type, [&]<class T>() {
      std::vector<T> tokens(static_cast<size_t>(std::min(block, shard.tokens)));
      for (int64_t first = 0; first < shard.tokens; first += block) {
        const int64_t n = std::min(block, shard.tokens - first), bytes = n * static_cast<int64_t>(sizeof(T)),
                      outside_before = report.outside;
        shard.file.read_at(tokens.data(), bytes, shard.byte_of(first));
        detail::count_tokens(tokens.data(), n, vocab_size, end_of_text, report);
        if (outside_before == 0 && report.outside > 0) {
          const auto bad =
              std::find_if(tokens.begin(), tokens.end(), [&](int64_t t) { return t < 0 || t >= vocab_size; });
          report.error = formatted(
              "{}: token {} at position {} is outside the vocabulary of {}; the data was made with another tokenizer, "
              "or --vocab-size is too small",
              path, int64_t{*bad}, first + (bad - tokens.begin()), vocab_size);
        }
        progress(bytes);
      }
    });
    if (shard.index) report.documents = shard.index->documents();
  } catch (const Error& error) {
    report.error = error.what();
  }
  return report;
}

// Verifies every shard that `pattern` matches; prints a line for each and a table. Returns the errors, one per line.
// end_of_text: the token that begins or ends a document; none: only documents of an index are counted.
inline std::string verify_data(Log& log, const char* option, const std::string& pattern, DataFormat format,
                               int64_t vocab_size, std::optional<int64_t> end_of_text) {
  const std::vector<std::string> paths = expand_glob(pattern, option);
  int64_t bytes = 0, bytes_read = 0, bad = 0;
  for (const std::string& path : paths) {
    std::error_code unreadable;  // open_token_file() says why
    const uintmax_t size = std::filesystem::file_size(path, unreadable);
    if (!unreadable) bytes += static_cast<int64_t>(size);
  }
  ShardReport all;
  bool indexed = true;  // all of them
  WorkProgress progress(log);
  const Advance advance = progress.of_bytes(option);
  for (const std::string& path : paths) {
    const ShardReport r = verify_shard(path, format, vocab_size, end_of_text.value_or(-1),
                                       [&](int64_t of_block) { advance(bytes_read += of_block, bytes); });
    all.tokens += r.tokens;
    all.documents += r.documents;
    all.largest = std::max(all.largest, r.largest);
    indexed &= r.format == DataFormat::megatron;
    if (!r.error.empty()) all.error += "\n  " + r.error, ++bad;
    log.line(r.error.empty() ? formatted("good {}: {} tokens of {} ({})", path, human_count(r.tokens), name_of(r.type),
                                         name_of(r.format))
                             : "BAD  " + r.error);
  }
  log.table(
      formatted("{} {}", option, pattern),
      {{"shards", formatted("{} good, {} bad", static_cast<int64_t>(paths.size()) - bad, bad)},
       {"tokens", human_count(all.tokens)},
       {"documents", indexed       ? formatted("{} (as the index says)", human_count(all.documents))
                     : end_of_text ? formatted("{} (end of text is {})", human_count(all.documents), *end_of_text)
                                   : formatted("not counted: unknown end of text for a vocabulary of {}", vocab_size)},
       {"largest token",
        all.largest < 0 ? "none was read" : formatted("{} of a vocabulary of {}", all.largest, vocab_size)}});
  if (all.largest >= 0 && look_like_bytes(all.largest, vocab_size))
    log.line("notice: these look like byte tokens, for which --vocab-size 257 is enough");
  if (look_like_fewer(all.largest, all.tokens, vocab_size))
    log.line(
        formatted("notice: the largest token is {} of a vocabulary of {}: were these made with a smaller "
                  "tokenizer? --tokenizer names it",
                  all.largest, vocab_size));
  return all.error;
}

}  // namespace llmc
