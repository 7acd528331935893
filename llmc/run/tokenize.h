// tokenize.h: --tokenize turns files of text or JSON lines into token shards. Every thread takes the next chunk,
// encodes it, and hands the tokens over in the order of the chunks, so that the shards do not depend on the number of
// threads. PREFIX.tokenized.json records how far they have come; the same command goes on from there.
#pragma once
#include <chrono>
#include <condition_variable>
#include <exception>
#include <filesystem>
#include <mutex>

#include "core/checksum.h"
#include "core/clock.h"
#include "core/files.h"
#include "core/json.h"
#include "core/log.h"
#include "core/signals.h"
#include "data/documents.h"
#include "data/shard_writer.h"
#include "device/host.h"
#include "run/checkpoints/resume_point.h"
#include "run/options/options.h"
#include "text/tokenizer.h"

namespace llmc {

struct TokenizeJob {
  std::vector<std::string> paths;
  std::string prefix;  // of the shards: PREFIX_000000.bin
  std::string tokenizer_name, field = "text";
  int64_t shard_tokens = 100'000'000;
  int threads = 1;
  bool restart = false;
  double record_seconds = 10;                                        // between records of how far it has come
  std::function<std::string()> stop = [] { return std::string(); };  // why to stop now; "": go on
};

namespace detail {

inline constexpr const char* record_suffix = ".tokenized.json";

// took: the time to write the last one. All inputs are in it, and may be a million; but that may have been a pause.
inline double seconds_between_records(double at_least, double took) {
  return std::max(at_least, std::min(20 * took, 600.0));
}

// What the shards are made of, and how far they have come.
struct TokenizeRecord {
  nlohmann::json inputs, tokenizer;
  std::string field;
  int64_t shard_tokens = 0;
  bool replaces = false;  // published shards of an earlier run
  TextPosition position;
  int64_t tokens = 0, documents = 0, text_bytes = 0;
  bool done = false;

  nlohmann::ordered_json to_json() const {
    return {{"inputs", inputs},
            {"tokenizer", tokenizer},
            {"field", field},
            {"shard_size", shard_tokens},
            {"replaces", replaces},
            {"position",
             {{"file", position.file},
              {"offset", position.offset},
              {"line", position.line},
              {"within_document", position.within}}},
            {"tokens", tokens},
            {"documents", documents},
            {"text_bytes", text_bytes},
            {"done", done}};
  }
  static TokenizeRecord read(const std::string& path) try {
    const nlohmann::json json = read_json(path), at = json.at("position");
    const TokenizeRecord record{
        json.at("inputs"),     json.at("tokenizer"),
        json.at("field"),      json.at("shard_size"),
        json.at("replaces"),   {at.at("file"), at.at("offset"), at.at("line"), at.at("within_document")},
        json.at("tokens"),     json.at("documents"),
        json.at("text_bytes"), json.at("done")};
    CHECK(record.position.file >= 0 && record.position.file <= std::ssize(record.inputs) &&
              record.position.offset >= 0 && record.shard_tokens > 0 && record.tokens >= 0,
          "{}: position {}, {} tokens, shards of {} tokens, {} inputs: the file is damaged: start over with --restart",
          path, at, record.tokens, record.shard_tokens, record.inputs.size());
    return record;
  } catch (const nlohmann::json::exception& error) {
    throw Error(formatted("{}: not a record of --tokenize ({}): start over with --restart", path, error.what()));
  }

  // How another run differs from this one; "": it does not.
  std::string difference(const TokenizeRecord& other) const {
    if (inputs.size() != other.inputs.size())
      return formatted("{} input files, and now there are {}", inputs.size(), other.inputs.size());
    for (size_t i = 0; i < inputs.size(); ++i)
      if (inputs[i] != other.inputs[i]) {
        const std::string path = inputs[i].at("path"), now = other.inputs[i].at("path");
        return path == now ? formatted("{} as it was before it changed", path)
                           : formatted("{} as input {}, and now that is {}", path, i + 1, now);
      }
    if (tokenizer != other.tokenizer)
      return formatted("tokenizer {}, and now it is {}", tokenizer.dump(), other.tokenizer.dump());
    if (field != other.field) return formatted("--tokenize-field {}, and now it is {}", field, other.field);
    if (shard_tokens != other.shard_tokens)
      return formatted("--shard-size {}, and now it is {}", shard_tokens, other.shard_tokens);
    return "";
  }
};

// What has been done, and how fast.
class TokenizeProgress {
 public:
  // bytes_before, text_before: of the inputs as they are and of their text, done before this command
  TokenizeProgress(Log& log, int64_t all_bytes, int64_t bytes_before, int64_t text_before)
      : log_(log),
        all_bytes_(static_cast<double>(all_bytes)),
        bytes_before_(static_cast<double>(bytes_before)),
        text_before_(static_cast<double>(text_before)) {}

  double seconds() const { return seconds_since(began_); }
  // All that is done, with what was before this command.
  void show(int64_t bytes, int64_t text_bytes, int64_t tokens) {
    const auto now = Clock::now();
    if (now < next_) return;
    next_ = now + (log_.live() ? std::chrono::milliseconds(200) : std::chrono::seconds(10));
    const std::string text = line(static_cast<double>(bytes), static_cast<double>(text_bytes), tokens, seconds());
    if (log_.live()) log_.progress(text);
    else log_.line(text);
  }
  std::string line(double bytes, double text_bytes, int64_t tokens, double seconds) const {
    const double left = (all_bytes_ - bytes) * seconds / std::max(1.0, bytes - bytes_before_);
    return formatted("{:3.0f}%  {} MB  {} tokens  {:.1f} MB/s  {} left", 100 * (bytes / std::max(1.0, all_bytes_)),
                     human_count(std::llround(text_bytes * 1e-6)), human_count(tokens),
                     (text_bytes - text_before_) * 1e-6 / seconds, human_duration(left));
  }

 private:
  Log& log_;
  double all_bytes_, bytes_before_, text_before_;
  Clock::time_point began_ = Clock::now(), next_ = began_ + std::chrono::seconds(log_.live() ? 0 : 5);
};

class Tokenization {
 public:
  Tokenization(const TokenizeJob& job, const Tokenizer& tokenizer, Log& log)
      : job_(job), tokenizer_(tokenizer), log_(log) {
    CHECK(tokenizer.document_encoder() != nullptr,
          "--tokenizer {} can decode tokens but not encode text: name a tokenizer.json", job.tokenizer_name);
  }

  // A command that has written nothing leaves nothing behind. It always removes its lock.
  ~Tokenization() {
    lock_.remove();
    for (auto folder = made_.rbegin(); folder != made_.rend(); ++folder) ::rmdir(folder->c_str());  // if empty
  }

  void run() {
    lock_output();
    describe();
    if (!take_earlier_record()) return;
    encode_all();
    record_.done = true;
    writer_->finish();
    write_record();
    publish();
  }

 private:
  // The tokens of one chunk.
  struct Encoded {
    std::string packed;
    int64_t documents = 0, text_bytes = 0;
    TextPosition end;
    int64_t bytes_read = 0;
    std::exception_ptr fault;
  };

  void lock_output() {
    const std::string path = job_.prefix + ".lock";
    int error = ENOENT;
    for (int tries = 0; tries < 2 && error == ENOENT; ++tries) {  // ENOENT: another command has just removed the folder
      make_folder(std::filesystem::path(job_.prefix).parent_path());
      error = lock_.take(path);
    }
    CHECK(error != EWOULDBLOCK, "--out {}: another process is writing there: wait for it, or give another prefix",
          job_.prefix);
    CHECK(error != ELOOP, "{} is a symbolic link, expected a file: remove it", path);
    CHECK(error == 0, "cannot write to {}, or lock it: {}: give a prefix in another folder", path,
          std::strerror(error));
    if (const std::string warning = lock_.warning("--tokenize"); !warning.empty()) log_.line(warning);
  }

  // Creates a folder and its missing parents, and notes which. Does nothing if a parent is removed meanwhile.
  void make_folder(const std::string& folder) {
    if (folder.empty() || is_directory(folder)) return;
    make_folder(std::filesystem::path(folder).parent_path());
    if (::mkdir(folder.c_str(), 0777) == 0) return made_.push_back(folder);
    const int error = errno;
    if (error == ENOENT || is_directory(folder)) return;
    const char* why = error != EEXIST        ? std::strerror(error)
                      : !path_exists(folder) ? "a symbolic link that leads nowhere has this name"
                                             : "a file has this name";
    throw Error(formatted("--out {}: cannot create the folder {}: {}: give a prefix in another folder", job_.prefix,
                          folder, why));
  }

  void describe() {
    constexpr double most = 256 << 20;  // of which checksums are taken
    for (const std::string& path : job_.paths) all_bytes_ += File::open_read(path).size();
    const double share = std::min(1.0, most / static_cast<double>(std::max<int64_t>(1, all_bytes_)));
    record_.inputs = nlohmann::json::array();
    std::set<std::string> named;
    for (const std::string& path : job_.paths) {
      record_.inputs.push_back({{"path", path}, {"checksum", sampled_checksum(path, share)}});
      if (!named.insert(path).second) log_.line(formatted("notice: {} is named twice, and read twice", path));
    }
    record_.tokenizer = {{"checksum", checksum(tokenizer_.files().at("tokenizer.json"))},
                         {"end_of_text", tokenizer_.end_of_text()},
                         {"vocab_size", tokenizer_.size()}};
    record_.field = job_.field;
    record_.shard_tokens = job_.shard_tokens;
  }

  // False: the earlier run had finished, and so has this one.
  bool take_earlier_record() {
    const std::vector<std::string> published = ShardWriter::existing(job_.prefix);
    const bool recorded = path_exists(record_path_);
    if (job_.restart || !recorded) {
      CHECK(job_.restart || published.empty(),
            "{} exists, and no {} says what it was made of: --restart replaces all shards of --out {}",
            published.empty() ? "" : published[0], record_path_, job_.prefix);
      record_.replaces = !published.empty();
    } else {
      const TokenizeRecord earlier = TokenizeRecord::read(record_path_);
      const std::string difference = earlier.difference(record_);
      CHECK(difference.empty(), "--out {} was made with {}: give another prefix, or replace it with --restart",
            job_.prefix, difference);
      CHECK(earlier.done || earlier.replaces || published.empty(),
            "{} has appeared since {} was written: give another prefix, or replace it with --restart",
            published.empty() ? "" : published[0], record_path_);
      record_ = earlier;
    }
    writer_.emplace(job_.prefix, width_, job_.shard_tokens, record_.tokens);
    if (record_.done) return publish(), false;
    if (job_.restart) write_record();  // before what an earlier run wrote is removed: a requeued job goes on from here
    writer_->go_on();
    if (record_.tokens > 0)
      log_.line(
          formatted("going on after {}, {}", counted(record_.documents, "document"), counted(record_.tokens, "token")));
    return true;
  }

  void publish() {
    writer_->publish();
    const std::optional<std::string> damaged = writer_->damaged();
    CHECK(!damaged, "{} is not as {} says: write all shards again with --restart", damaged.value_or(""), record_path_);
    std::vector<std::pair<std::string, std::string>> rows = {
        {"documents", human_count(record_.documents)},
        {"tokens", formatted("{} of {} bytes ({})", human_count(record_.tokens), width_, job_.tokenizer_name)},
        {"bytes per token",
         formatted("{:.3f}", static_cast<double>(record_.text_bytes) / static_cast<double>(record_.tokens))}};
    if (progress_) {
      const double megabytes = static_cast<double>(record_.text_bytes - text_bytes_before_) * 1e-6;
      rows.emplace_back("time",
                        formatted("{:.1f} s, {:.1f} MB/s on {}", progress_->seconds(),
                                  megabytes / std::max(1e-3, progress_->seconds()), counted(job_.threads, "thread")));
    }
    const int64_t last = writer_->shards() - 1;
    rows.emplace_back("shards", writer_->path(0) + (last > 0 ? " ... " + writer_->path(last) : ""));
    log_.table(progress_ ? "tokenized" : "tokenized already", rows);
  }

  void encode_all() {
    for (int64_t i = 0; i < record_.position.file; ++i)
      files_before_ += File::open_read(job_.paths[static_cast<size_t>(i)]).size();
    text_bytes_before_ = record_.text_bytes;
    reader_.emplace(
        job_.paths, [&](std::string_view text) { return tokenizer_.last_cut(text); }, record_.position);
    progress_.emplace(log_, all_bytes_, files_before_ + reader_->bytes_read(), text_bytes_before_);
    last_record_ = Clock::now();
    on_threads(job_.threads, [&] { work(); });
    if (fault_ || !stopped_.empty()) {
      if (stopped_.empty() && record_.tokens == 0 && !path_exists(record_path_)) std::rethrow_exception(fault_);
      try {
        write_record();
      } catch (...) {
        if (!fault_) throw;  // otherwise it came first, such as a full disk
      }
      if (fault_) std::rethrow_exception(fault_);
      throw Error(formatted("stopped by {} after {}, {}; the same command{} goes on from there", stopped_,
                            counted(record_.documents, "document"), counted(record_.tokens, "token"),
                            job_.restart ? ", without --restart," : ""),
                  ExitStatus::requeue);
    }
    CHECK(record_.tokens > 0, "--tokenize: no text in {}", job_.paths);
  }

  // What each thread does.
  void work() {
    DocumentEncoder encoder;
    std::vector<int32_t> ids;
    for (;;) {
      int64_t number = 0;
      Encoded encoded;
      try {
        std::optional<TextChunk> chunk = take(number, encoded);
        if (!chunk) return;
        if (!encoder) encoder = tokenizer_.document_encoder();
        encode(*chunk, encoder, ids, encoded);
      } catch (...) {
        encoded.fault = std::current_exception();
      }
      hand_over(number, std::move(encoded));
    }
  }

  // The next chunk, and its number.
  std::optional<TextChunk> take(int64_t& number, Encoded& encoded) {
    std::lock_guard reading(reading_);
    {
      std::unique_lock lock(mutex_);
      room_.wait(lock, [&] { return fault_ || taken_ - written_ < 3 * job_.threads; });
      if (stopped_.empty()) stopped_ = job_.stop();
      if (fault_ || !stopped_.empty() || ended_) return std::nullopt;
      number = taken_++;
    }
    ended_ = true;  // unless next() returns a chunk: after an error nothing can be read
    std::optional<TextChunk> chunk = reader_->next();
    ended_ = !chunk;
    encoded.bytes_read = files_before_ + reader_->bytes_read();
    return chunk;
  }

  // text: of a chunk. UTF-16 without a mark is valid UTF-8 where it is ASCII, but half of it are NULs.
  static void require_utf8(const TextChunk& chunk, std::string_view text) {
    if (const std::optional<size_t> fault = utf8_fault(text))
      throw Error(formatted(
          "{}:{}: byte {} of its text is not UTF-8: convert the file, or use --tokenizer bytes", chunk.path,
          chunk.begin.line + std::count(text.begin(), text.begin() + static_cast<std::ptrdiff_t>(*fault), '\n'),
          chunk.begin.offset + static_cast<int64_t>(*fault) + 1));
    const auto nuls = std::ranges::count(text, '\0');
    CHECK(chunk.begin.offset > 0 || 200 * nuls <= std::ssize(text),
          "{}: {} of its first {} bytes are NUL, so it is no text: convert UTF-16 (iconv -f UTF-16LE -t UTF-8), or use "
          "--tokenizer bytes",
          chunk.path, nuls, text.size());
  }

  // ids: a buffer.
  void encode(const TextChunk& chunk, const DocumentEncoder& encoder, std::vector<int32_t>& ids,
              Encoded& encoded) const {
    ids.clear();
    for_each_document(chunk, job_.field, [&](std::string_view text, int64_t, bool begins) {
      if (tokenizer_.needs_utf8() && chunk.format == TextFormat::text) require_utf8(chunk, text);
      if (begins) ids.push_back(tokenizer_.end_of_text());
      encoded.documents += begins;
      encoded.text_bytes += std::ssize(text);
      encoder(text, begins ? TextPart::beginning : TextPart::continuation, ids);
    });
    encoded.end = chunk.end;
    encoded.packed.resize(ids.size() * static_cast<size_t>(width_));
    if (width_ == 4) std::memcpy(encoded.packed.data(), ids.data(), encoded.packed.size());
    else
      for (size_t i = 0; i < ids.size(); ++i) {
        const auto narrow = static_cast<uint16_t>(ids[i]);
        std::memcpy(encoded.packed.data() + 2 * i, &narrow, 2);
      }
  }

  // Writes the chunks whose turn it is.
  void hand_over(int64_t number, Encoded encoded) {
    std::lock_guard lock(mutex_);
    waiting_.emplace(number, std::move(encoded));
    while (!fault_ && !waiting_.empty() && waiting_.begin()->first == written_) {
      try {
        write(waiting_.begin()->second);
      } catch (...) {
        fault_ = std::current_exception();
      }
      waiting_.erase(waiting_.begin());
      ++written_;
    }
    room_.notify_all();
  }

  void write(const Encoded& encoded) {
    if (encoded.fault) std::rethrow_exception(encoded.fault);
    writer_->append(encoded.packed);
    record_.tokens = writer_->tokens();
    record_.documents += encoded.documents;
    record_.text_bytes += encoded.text_bytes;
    record_.position = encoded.end;
    progress_->show(encoded.bytes_read, record_.text_bytes, record_.tokens);
    if (seconds_since(last_record_) < seconds_between_records(job_.record_seconds, record_took_)) return;
    const auto begin = Clock::now();
    write_record();
    record_took_ = seconds_since(begin);
    last_record_ = Clock::now();
  }

  void write_record() {
    writer_->sync();
    const std::string next = record_path_ + ".new", text = record_.to_json().dump(1) + "\n";
    CHECK(
        std::ssize(text) <= most_json_bytes,
        "--tokenize: its record {} would have {} bytes, more than the {} that are read again: it names {} files; give "
        "fewer at a time, or join them",
        record_path_, text.size(), most_json_bytes, record_.inputs.size());
    try {
      write_text_durably(next, text);
      rename_path(next, record_path_);
    } catch (...) {
      std::remove(next.c_str());
      throw;
    }
    writer_->sync();
  }

  const TokenizeJob& job_;
  const Tokenizer& tokenizer_;
  Log& log_;
  const int64_t width_ = token_width(tokenizer_.size());
  const std::string record_path_ = job_.prefix + record_suffix;
  int64_t all_bytes_ = 0, files_before_ = 0, text_bytes_before_ = 0;  // files: whole ones, done by earlier commands
  FileLock lock_;
  std::vector<std::string> made_;  // folders, the outermost first
  TokenizeRecord record_;
  std::optional<ShardWriter> writer_;
  std::optional<TokenizeProgress> progress_;

  std::mutex reading_;  // for reader_ and ended_
  std::optional<ChunkReader> reader_;
  bool ended_ = false;

  std::mutex mutex_;  // for what follows, and for the record and the writer
  std::condition_variable room_;
  int64_t taken_ = 0, written_ = 0;  // chunks
  std::map<int64_t, Encoded> waiting_;
  std::exception_ptr fault_;
  std::string stopped_;
  Clock::time_point last_record_;
  double record_took_ = 0;  // seconds to write it
};

}  // namespace detail

inline void tokenize_files(const TokenizeJob& job, const Tokenizer& tokenizer, Log& log) {
  detail::Tokenization(job, tokenizer, log).run();
}

// The files that --tokenize names: files and patterns, which its own records do not match, with commas between them.
inline std::vector<std::string> files_to_tokenize(const std::string& names) {
  std::vector<std::string> paths;
  for (const std::string& name : split(names, ',')) {
    CHECK(!name.empty(), "--tokenize {}: a name is missing: give files or quoted patterns", shown(names, 300));
    for (std::string& path : expand_glob(name, "--tokenize", ".txt"))
      if (path == name || !path.ends_with(detail::record_suffix)) paths.push_back(std::move(path));
  }
  CHECK(!paths.empty(), "--tokenize {}: only records of --tokenize match: name files of text", shown(names, 300));
  return paths;
}

// --tokenize: writes shards OUT_train_000000.bin and so on.
inline void run_tokenize(const Options& o) {
  const std::unique_ptr<Tokenizer> tokenizer = make_tokenizer(o.tokenizer);
  Log log(isatty(STDOUT_FILENO) == 1 ? ProgressLine::shown : ProgressLine::none);
  note_stop_signals(Says::at_once);
  const StopCondition stop(o.time_limit, Clock::now(), 0);
  tokenize_files({.paths = files_to_tokenize(o.tokenize),
                  .prefix = formatted("{}_{}", o.tokenize_out, o.tokenize_split),
                  .tokenizer_name = o.tokenizer,
                  .field = o.tokenize_field,
                  .shard_tokens = o.shard_size,
                  .threads = o.threads > 0 ? static_cast<int>(o.threads) : available_processors(),
                  .restart = o.restart && !requeued(),
                  .stop = [&] { return stop.reason(); }},
                 *tokenizer, log);
}

}  // namespace llmc
