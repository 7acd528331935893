// --tokenize: text files and JSON lines, plain and packed, to shards: in order, restartable, and never over others'
// work.
#include <algorithm>
#include <atomic>
#include <cerrno>
#include <cstring>
#include <fstream>
#include <mutex>
#include <random>

#include "catch2.h"
#include "data/dataloader.h"
#include "helpers.h"
#include "run/tokenize.h"

using namespace llmc;

namespace {

std::string gzipped(const std::string& text) {
  z_stream z{};
  REQUIRE(deflateInit2(&z, 1, Z_DEFLATED, 15 + 16, 8, Z_DEFAULT_STRATEGY) == Z_OK);
  std::string packed(deflateBound(&z, text.size()) + 64, '\0');
  z.next_in = reinterpret_cast<Bytef*>(const_cast<char*>(text.data()));
  z.avail_in = static_cast<uInt>(text.size());
  z.next_out = reinterpret_cast<Bytef*>(packed.data());
  z.avail_out = static_cast<uInt>(packed.size());
  REQUIRE(deflate(&z, Z_FINISH) == Z_STREAM_END);
  packed.resize(packed.size() - z.avail_out);
  deflateEnd(&z);
  return packed;
}
std::string zstd(const std::string& text) {
  std::string packed(ZSTD_compressBound(text.size()), '\0');
  ZSTD_CCtx* context = ZSTD_createCCtx();
  ZSTD_CCtx_setParameter(context, ZSTD_c_checksumFlag, 1);
  packed.resize(ZSTD_compress2(context, packed.data(), packed.size(), text.data(), text.size()));
  ZSTD_freeCCtx(context);
  return packed;
}
// As zstd --long=28 writes it from a pipe: its window is 256 MiB, and the library's usual limit 128.
std::string zstd_of_long_window(const std::string& text) {
  std::string packed(ZSTD_compressBound(text.size()), '\0');
  ZSTD_CCtx* context = ZSTD_createCCtx();
  ZSTD_CCtx_setParameter(context, ZSTD_c_windowLog, 28);
  ZSTD_outBuffer to{packed.data(), packed.size(), 0};
  ZSTD_inBuffer from{text.data(), text.size(), 0}, end{nullptr, 0, 0};
  REQUIRE_FALSE(ZSTD_isError(ZSTD_compressStream2(context, &to, &from, ZSTD_e_continue)));
  REQUIRE(ZSTD_compressStream2(context, &to, &end, ZSTD_e_end) == 0);
  ZSTD_freeCCtx(context);
  packed.resize(to.pos);
  return packed;
}
void write(const std::string& path, const std::string& text) { std::ofstream(path, std::ios::binary) << text; }

// Documents of many lengths, some MB of them, as lines of JSON.
std::string json_lines() {
  std::string lines;
  for (int i = 0; lines.size() < (size_t{7} << 20); ++i) {
    const std::string word = formatted("{} \\u00e9 ", i * 7919 % 100'003);
    std::string text;
    for (int n = i * 31 % 500; n >= 0; --n) text += word;
    lines += formatted("\"meta\": [{}, \"text\"], \"text\": \"{}\"", i, text) + "}\n";
    lines.insert(lines.rfind("\"meta\""), "{");
    if (i % 50 == 0) lines += "\n";
  }
  return lines;
}

std::string all_text(const std::vector<std::string>& paths, TextPosition begin = {}) {
  ChunkReader reader(
      paths, [](std::string_view text) { return text.size(); }, begin);
  std::string all;
  while (const auto chunk = reader.next())
    for_each_document(*chunk, "text", [&](std::string_view text, int64_t, bool begins) {
      all += begins ? "\n<doc>" : "";
      all += text;
    });
  return all;
}

struct Corpus {
  TempDir dir;
  TokenizeJob job;
  Corpus() {
    write(dir / "a.jsonl", json_lines());
    write(dir / "b.txt", "One document.\n\nStill the same.");
    job = {.paths = {dir / "a.jsonl", dir / "b.txt"},
           .prefix = dir / "out/c_train",
           .tokenizer_name = "bytes",
           .shard_tokens = 1'000'000,
           .record_seconds = 0};
  }
  void run() {
    Log log = Log::silent();
    tokenize_files(job, ByteTokenizer(), log);
  }
  std::vector<std::string> shards() const {
    std::vector<std::string> all;
    for (const std::string& path : ShardWriter::existing(job.prefix)) all.push_back(read_whole(path));
    return all;
  }
  // Runs until `chunks` chunks have been taken, and is stopped.
  void run_in_part(int chunks) {
    job.stop = [&, taken = 0]() mutable { return taken++ < chunks ? "" : "SIGTERM"; };
    REQUIRE_ERROR(run(), "stopped by SIGTERM");
    job.stop = [] { return ""; };
  }
};

}  // namespace

TEST_CASE("the time left counts what this command has read, and the sums what earlier ones did, too", "[tokenize]") {
  Log log = Log::silent();
  const detail::TokenizeProgress progress(log, 1'000'000'000, 400'000'000, 300'000'000);
  REQUIRE(progress.line(500e6, 400e6, 7, 10) == " 50%  400 MB  7 tokens  10.0 MB/s  0:50 left");
}

TEST_CASE("texts compressed with gzip or zstd, in one part or several, are read like the text itself", "[tokenize]") {
  const TempDir dir;
  const std::string lines = json_lines(), first = lines.substr(0, lines.size() / 3), rest = lines.substr(first.size());
  write(dir / "plain.jsonl", lines);
  const std::string plain = all_text({dir / "plain.jsonl"});
  REQUIRE(plain.find("<doc>7919 \u00e9 7919") != plain.npos);
  for (const auto& [name, packed] : {std::pair{"a.jsonl.gz", gzipped(lines)},
                                     {"b.jsonl.gz", gzipped(first) + gzipped(rest)},
                                     {"c.jsonl.zst", zstd(lines)},
                                     {"d.jsonl.zst", zstd(first) + zstd(rest)}}) {
    INFO(name);
    write(dir / name, packed);
    REQUIRE(all_text({dir / name}) == plain);
    write(dir / name, packed.substr(0, packed.size() - 9));
    REQUIRE_ERROR(all_text({dir / name}), "it ends too early");
    std::string damaged = packed;
    damaged[damaged.size() / 2] ^= 1;
    write(dir / name, damaged);
    REQUIRE_ERROR(all_text({dir / name}), std::string(name) + ": ");
  }
  write(dir / "padded.jsonl.gz", gzipped(first) + std::string(300'000, '\0') + gzipped(rest) + std::string(512, '\0'));
  REQUIRE(all_text({dir / "padded.jsonl.gz"}) == plain);
  const std::string skipped("\x53\x2a\x4d\x18\4\0\0\0size", 12);  // a frame of pzstd's
  write(dir / "skipped.jsonl.zst", skipped + zstd(first) + skipped + zstd(rest));
  REQUIRE(all_text({dir / "skipped.jsonl.zst"}) == plain);
  write(dir / "long.jsonl.zst", zstd_of_long_window(lines));
  REQUIRE(all_text({dir / "long.jsonl.zst"}) == plain);
  for (const char* name : {"f.JSONL", "g.jsonl.zstd", "h.NDJSON.GZ"}) {  // by its beginning, whatever the name says
    write(dir / name, lines);
    REQUIRE(all_text({dir / name}) == plain);
  }
  write(dir / "e.jsonl", "PAR1....");
  REQUIRE_ERROR(all_text({dir / "e.jsonl"}), "e.jsonl: a Parquet file");
}

TEST_CASE("a repeated command keeps its shards, however --out is spelled", "[tokenize]") {
  for (const char* out : {"//c", "/./c", "/d/../c", "/c"}) {
    const TempDir dir;
    std::filesystem::create_directory(dir / "d");
    write(dir / "a.txt", std::string(5000, 'x'));
    const std::string command =
        "--tokenize " + (dir / "a.txt") + " --tokenizer bytes --shard-size 1000 --out " + dir.path() + out;
    for (int again = 0; again < 2; ++again) {
      const ProgramResult r = run_program(command);
      INFO(out << ": " << r.out << r.err);
      REQUIRE(r.status == 0);
      REQUIRE(std::filesystem::exists(dir / "c_train_000005.bin"));
    }
  }
}

TEST_CASE("a pattern that matches the record of --tokenize does not make it a text", "[tokenize]") {
  const TempDir dir;
  write(dir / "a.json", R"({"text": "one"})"
                        "\n");
  const std::string command =
      "--tokenize '" + (dir / "*.json") + "," + (dir / "a.json") + "' --tokenizer bytes --out " + (dir / "c");
  for (int again = 0; again < 2; ++again) {
    const ProgramResult r = run_program(command);
    INFO(r.out << r.err);
    REQUIRE(r.status == 0);
    REQUIRE_THAT(r.out, Catch::Matchers::ContainsSubstring("a.json is named twice, and read twice"));
  }
  REQUIRE(files_to_tokenize(dir / "*.json").size() == 1);
  REQUIRE_ERROR(files_to_tokenize(dir / "*.tokenized.json"), "only records of --tokenize match");
  REQUIRE(files_to_tokenize(dir / "c_train.tokenized.json").size() == 1);
}

TEST_CASE("a text without a place to cut is cut between characters", "[tokenize]") {
  for (const std::string character : {"x", "я", "あ", "😀"})
    for (const std::string before : {"", "x", "xx"}) {
      const TempDir dir;
      std::string text = before;
      while (text.size() <= ChunkReader::longest_part) text += character;
      write(dir / "a.txt", text);
      ChunkReader reader({dir / "a.txt"}, [](std::string_view) { return std::nullopt; });
      std::string all;
      for (int chunks = 0; const auto chunk = reader.next(); ++chunks) {
        INFO(character << " after " << before << ", chunk " << chunks << " of " << chunk->text.size() << " bytes");
        REQUIRE_FALSE(utf8_fault(chunk->text));
        REQUIRE((chunks > 0 || chunk->text.size() + 3 >= ChunkReader::longest_part));
        all += chunk->text;
      }
      REQUIRE((all == text));
    }
}

TEST_CASE("reading goes on at any chunk, also within a document", "[tokenize]") {
  const TempDir dir;
  write(dir / "a.jsonl.gz", gzipped(json_lines()));
  std::string book;
  for (int i = 0; book.size() < (size_t{3} << 20); ++i) book += formatted("line {}\n", i);
  write(dir / "b.txt", book);
  write(dir / "c.txt", std::string(ChunkReader::chunk_bytes, 'x'));
  write(dir / "d.txt", "");
  const std::vector<std::string> paths = {dir / "a.jsonl.gz", dir / "b.txt", dir / "c.txt", dir / "d.txt"};
  const std::string all = all_text(paths);
  REQUIRE(all.ends_with("\n<doc>" + book + "\n<doc>" + std::string(ChunkReader::chunk_bytes, 'x')));
  ChunkReader reader(paths, [](std::string_view text) { return text.size(); });
  int chunks = 0;
  while (const auto chunk = reader.next()) {
    const std::string rest = all_text(paths, chunk->end);
    INFO(chunk->end.file << " " << chunk->end.offset);
    REQUIRE(all.ends_with(rest));
    REQUIRE((rest.empty() || chunk->end.within || rest.starts_with("\n<doc>")));
    chunks += !rest.empty();
  }
  REQUIRE(chunks >= 10);
}

TEST_CASE("the chunks after any chunk are the same where text has no place to be cut", "[tokenize]") {
  const TempDir dir;
  std::string text(size_t{6} << 20, 'x');
  for (const size_t place : {size_t{100}, size_t{2'200'000}, size_t{2'300'000}, size_t{5'000'000}}) text[place] = '|';
  write(dir / "a.txt", text);
  write(dir / "b.txt", std::string(3 * ChunkReader::chunk_bytes, '|'));  // ends where a chunk may
  const auto cut = [](std::string_view part) {
    const size_t last = part.rfind('|');
    return last == part.npos ? std::nullopt : std::optional(last + 1);
  };
  const std::vector<std::string> paths = {dir / "a.txt", dir / "b.txt"};
  const auto chunks_from = [&](const TextPosition& begin) {
    ChunkReader reader(paths, cut, begin);
    std::vector<TextChunk> chunks;
    while (auto chunk = reader.next()) chunks.push_back(std::move(*chunk));
    return chunks;
  };
  const std::vector<TextChunk> all = chunks_from({});
  REQUIRE(all.size() == 6);
  for (size_t i = 0; i < all.size(); ++i) {
    const std::vector<TextChunk> rest = chunks_from(all[i].end);
    INFO("after chunk " << i << ", which ends at " << all[i].end.offset << " of file " << all[i].end.file);
    REQUIRE(rest.size() == all.size() - i - 1);
    for (size_t j = 0; j < rest.size(); ++j) REQUIRE((rest[j].text == all[i + 1 + j].text));
  }
}

TEST_CASE("a record that took long to write does not put off the next one for ever", "[tokenize]") {
  REQUIRE(detail::seconds_between_records(10, 0.1) == 10);
  REQUIRE(detail::seconds_between_records(10, 5) == 100);
  REQUIRE(detail::seconds_between_records(10, 3600) == 600);
  REQUIRE(detail::seconds_between_records(1e9, 3600) == 1e9);
}

TEST_CASE("a run that starts over records so before it removes anything", "[tokenize]") {
  Corpus corpus;
  corpus.run();
  const std::vector<std::string> shards = corpus.shards();
  corpus.job.restart = true;
  std::vector<std::string> records;
  std::mutex mutex;
  corpus.job.record_seconds = 1e9;
  corpus.job.stop = [&] {
    const std::lock_guard lock(mutex);
    records.push_back(read_whole(corpus.job.prefix + ".tokenized.json"));
    return "";
  };
  corpus.run();
  const nlohmann::json begun = nlohmann::json::parse(records.front());
  REQUIRE(begun["done"] == false);
  REQUIRE(begun["tokens"] == 0);
  REQUIRE(begun["replaces"] == true);
  REQUIRE(corpus.shards() == shards);
}

TEST_CASE("a damaged record of an earlier run is refused", "[tokenize]") {
  Corpus corpus;
  corpus.run_in_part(2);
  const std::string file = corpus.job.prefix + ".tokenized.json";
  nlohmann::json record = nlohmann::json::parse(read_whole(file));
  record["position"]["file"] = 7;
  write(file, record.dump());
  REQUIRE_ERROR(corpus.run(), " 2 inputs: the file is damaged");
}

TEST_CASE("a line is read as the JSON library reads it, or left to it", "[tokenize]") {
  const std::vector<std::string> lines = {
      R"({"text": "plain"})",
      R"( {"id" : -1.25,"text":"a\"\\\/\b\f\n\r\t\u00e9\uD83D\ude00\u0000 é 日本 😀 and more","n":[0,[],{},true,{"text":null}]} )",
      R"({"meta": {"text": "not this", "a": [false, 10, "x\ny"]}, "t\u0065xt": "named by an escape", "e": ""})",
      R"({"a": 1e5, "text": "left to the library", "b": 123456789012345678901234567890})",
  };
  auto theirs = [](const std::string& line) -> std::optional<std::string> {
    const auto json = nlohmann::json::parse(line, nullptr, false);
    if (!json.is_object() || !json.contains("text") || !json["text"].is_string()) return std::nullopt;
    return json["text"].get<std::string>();
  };
  const std::string field = "text";
  int taken = 0;
  auto check = [&](const std::string& line) {
    std::string text = "before";
    if (!detail::LineReader(line, field).read(text)) return false;
    INFO(shown(line, 400));
    REQUIRE(theirs(line) == text);
    return true;
  };
  for (size_t i = 0; i < lines.size(); ++i) REQUIRE(check(lines[i]) == (i < 3));
  std::mt19937 random(5);
  const std::string_view bytes = "\"\\{}[]:,0129-+.eEtruflsn \t\n\x1f\x7f\x80\xc3\xed\xf4u/dD8";
  for (int i = 0; i < 30'000; ++i) {
    std::string line = lines[random() % lines.size()];
    for (unsigned n = random() % 3; n < 3; ++n) {
      const size_t at = random() % line.size();
      if (random() % 3 == 0) line.erase(at, 1 + random() % 3);
      else if (random() % 2 == 0) line.insert(at, 1, bytes[random() % bytes.size()]);
      else line[at] = bytes[random() % bytes.size()];
    }
    taken += check(line);
  }
  REQUIRE(taken > 3000);
}

TEST_CASE("a line that holds no document is refused with file and line", "[tokenize]") {
  const TempDir dir;
  for (const auto& [line, what] : std::vector<std::pair<std::string, std::string>>{
           {R"({"text": "a")", "not JSON"},
           {R"({"text": "a"} x)", "not JSON"},
           {R"({"text": "\ud800"})", "not JSON"},
           {"{\"text\": \"\xff\"}", "not JSON"},
           {std::string("{\"text\": \"a\"}\0", 14), "has a NUL"},
           {R"(["a"])", "not a JSON object"},
           {R"("a")", "not a JSON object"},
           {R"({"title": "a", "body": {"text": "b"}})", "no field 'text', only title, body"},
           {R"({})", "only none"},
           {R"({"text": null})", "holds null"},
           {R"({"text": 5})", "holds a number"},
           {R"({"text": ["a"]})", "holds a list"},
           {R"({"text": "a", "text": "b"})", "names text twice"},
           {std::string(600, '['), "not a JSON object"},
           {R"({"a": )" + std::string(600, '['), "nested more than 512 deep"},
       }) {
    write(dir / "a.jsonl", "\xef\xbb\xbf{\"text\": \"good\"}\r\n\n" + line + "\n{\"text\": \"good\"}");
    REQUIRE_ERROR(all_text({dir / "a.jsonl"}), "a.jsonl:3: ");
    REQUIRE_ERROR(all_text({dir / "a.jsonl"}), what);
  }
}

TEST_CASE("shards are the documents in order, whatever the number of threads", "[tokenize]") {
  Corpus corpus;
  corpus.run();
  const std::vector<std::string> shards = corpus.shards();
  REQUIRE(shards.size() >= 3);
  std::string text;
  for (const std::string& path : ShardWriter::existing(corpus.job.prefix)) {
    const TokenFile shard = open_token_file(path, DataFormat::llmc);
    REQUIRE(width_of(shard.type) == 2);
    std::vector<uint16_t> tokens(static_cast<size_t>(shard.tokens));
    shard.file.read_at(tokens.data(), 2 * shard.tokens, shard.begin);
    for (const uint16_t token : tokens)
      if (token == 256) text += "\n<doc>";
      else text += static_cast<char>(token);
  }
  REQUIRE(text == all_text(corpus.job.paths));
  for (const int threads : {2, 5}) {
    corpus.job.threads = threads;
    corpus.job.restart = true;
    corpus.run();
    REQUIRE(corpus.shards() == shards);
  }
}

TEST_CASE("a thread that has no encoder ends the command with its error", "[tokenize]") {
  struct OneEncoder final : Tokenizer {
    std::vector<int32_t> encode(const std::string&, const std::string&) const override { return {}; }
    std::optional<std::string> text_of(int32_t) const override { return ""; }
    DocumentEncoder document_encoder() const override {
      CHECK(!given_.exchange(true), "no memory for another encoder");
      return ByteTokenizer().document_encoder();
    }
    int32_t end_of_text() const override { return 256; }
    int64_t size() const override { return 257; }
    std::map<std::string, std::string> files() const override { return ByteTokenizer().files(); }
    mutable std::atomic<bool> given_ = false;
  };
  Corpus corpus;
  corpus.job.threads = 2;
  Log log = Log::silent();
  REQUIRE_ERROR(tokenize_files(corpus.job, OneEncoder(), log), "no memory for another encoder");
}

TEST_CASE("an interrupted command, repeated, writes what one that was not interrupted writes", "[tokenize]") {
  Corpus whole;
  whole.run();
  const std::vector<std::string> shards = whole.shards();
  for (const int chunks : {0, 1, 3}) {
    Corpus corpus;
    corpus.job.threads = 2;
    for (int starts = 0; starts < 2; ++starts) corpus.run_in_part(chunks);
    REQUIRE(corpus.shards().empty());  // nothing has its name yet
    // What was written after the last record is written again.
    for (int64_t i = 0; i < 9; ++i) {
      const std::string partial = corpus.job.prefix + formatted("_{:06}.bin.partial", i);
      if (path_exists(partial)) std::ofstream(partial, std::ios::app) << "more";
    }
    corpus.run();
    REQUIRE(corpus.shards() == shards);
    REQUIRE_FALSE(path_exists(corpus.job.prefix + "_000000.bin.partial"));
    corpus.run();  // has nothing to do
    REQUIRE(corpus.shards() == shards);
    std::filesystem::rename(corpus.job.prefix + "_000001.bin", corpus.job.prefix + "_000001.bin.partial");
    corpus.run();  // ended while the shards got their names
    REQUIRE(corpus.shards() == shards);
  }
  Corpus lost;
  lost.run_in_part(3);
  std::filesystem::remove(lost.job.prefix + "_000000.bin.partial");
  REQUIRE_ERROR(lost.run(), "_000000.bin.partial: does not exist");
}

TEST_CASE("what another command has written is neither continued nor overwritten", "[tokenize]") {
  Corpus corpus;
  corpus.run_in_part(2);
  auto refused = [&](auto&& change, const char* what) {
    const TokenizeJob before = corpus.job;
    change();
    REQUIRE_ERROR(corpus.run(), what);
    corpus.job = before;
  };
  refused([&] { corpus.job.field = "body"; }, "--tokenize-field text, and now it is body");
  refused([&] { corpus.job.shard_tokens = 7; }, "--shard-size 1000000, and now it is 7");
  refused([&] { corpus.job.paths.pop_back(); }, "2 input files, and now there are 1");
  refused([&] { std::swap(corpus.job.paths[0], corpus.job.paths[1]); }, "a.jsonl as input 1, and now that is");
  Log log = Log::silent();
  const HuggingFaceTokenizer other("test/golden/tokenizers/gpt2.json");
  REQUIRE_ERROR(tokenize_files(corpus.job, other, log), "was made with tokenizer");
  {
    FileLock held;
    REQUIRE(held.take(corpus.job.prefix + ".lock") == 0);
    REQUIRE_ERROR(corpus.run(), "another process is writing there");
    REQUIRE(held.in_place());
  }
  corpus.run();
  const std::vector<std::string> shards = corpus.shards();
  write(corpus.dir / "b.txt", "Another document.");
  REQUIRE_ERROR(corpus.run(), "b.txt as it was before it changed");
  REQUIRE(corpus.shards() == shards);
  std::filesystem::remove(corpus.job.prefix + ".tokenized.json");
  REQUIRE_ERROR(corpus.run(), "--restart replaces all shards");
  REQUIRE(corpus.shards() == shards);
  corpus.job.paths.erase(corpus.job.paths.begin());
  corpus.job.restart = true;
  corpus.run();
  REQUIRE(corpus.shards().size() == 1);
  REQUIRE(corpus.shards()[0].size() == shard_header_bytes + 2 * (1 + std::string("Another document.").size()));

  write(corpus.dir / "b.txt", " ab\xff");
  REQUIRE_ERROR(tokenize_files(corpus.job, other, log), "b.txt:1: byte 4 of its text");
  write(corpus.dir / "b.txt", std::string("t\0e\0x\0t\0", 8));
  REQUIRE_ERROR(tokenize_files(corpus.job, other, log), "b.txt: 4 of its first 8 bytes are NUL");
  std::string long_text;
  while (long_text.size() < 2 * ChunkReader::chunk_bytes) long_text += "words in lines\n";
  write(corpus.dir / "b.txt", long_text + "\xff");
  REQUIRE_ERROR(tokenize_files(corpus.job, other, log), formatted("byte {} of its text", long_text.size() + 1));
  write(corpus.dir / "b.txt", "");
  REQUIRE_ERROR(corpus.run(), "no text in");
}

TEST_CASE("a command that is refused before it has written anything leaves nothing", "[tokenize]") {
  Corpus corpus;
  corpus.job.prefix = corpus.dir / "out/deep/c_train";
  const HuggingFaceTokenizer gpt2("test/golden/tokenizers/gpt2.json");
  Log log = Log::silent();
  const auto nothing_left = [&] { REQUIRE_FALSE(path_exists(corpus.dir / "out")); };
  corpus.job.paths.push_back(corpus.dir / "nowhere");
  REQUIRE_ERROR(corpus.run(), "nowhere: No such file");
  nothing_left();
  corpus.job.paths = {corpus.dir / "b.txt"};
  write(corpus.dir / "b.txt", " ab\xff");
  REQUIRE_ERROR(tokenize_files(corpus.job, gpt2, log), "byte 4 of its text");
  nothing_left();
  write(corpus.dir / "b.txt", "");
  REQUIRE_ERROR(corpus.run(), "no text in");
  nothing_left();

  write(corpus.dir / "b.txt", "One document.");
  std::filesystem::create_directories(corpus.dir / "out");
  corpus.job.prefix = corpus.dir / "out/c_train";
  write(corpus.job.prefix + "_000000.bin", "mine");
  REQUIRE_ERROR(corpus.run(), "--restart replaces all shards");
  REQUIRE(names_in(corpus.dir / "out") == std::vector<std::string>{"c_train_000000.bin"});
  corpus.job.prefix = corpus.dir / "whole/c_train";
  corpus.run();
  REQUIRE(names_in(corpus.dir / "whole").size() == 2);  // the shard and what it was made of
}

TEST_CASE("--tokenize removes only folders that it made, and no link", "[tokenize]") {
  Corpus corpus;
  const auto refused = [&](const char* prefix, const char* why) {
    corpus.job.prefix = corpus.dir / prefix;
    REQUIRE_ERROR(corpus.run(), why);
  };
  std::filesystem::create_symlink(corpus.dir / "unmounted/disk", corpus.dir / "link");
  refused("link/c_train", "link: a symbolic link that leads nowhere has this name: give a prefix in another folder");
  refused("link/deep/c_train", "link: a symbolic link that leads nowhere");
  REQUIRE(std::filesystem::is_symlink(corpus.dir / "link"));
  refused("b.txt/deep/c_train", "b.txt: a file has this name: give");
  refused(("deep/" + std::string(300, 'x') + "/c_train").c_str(), ": File name too long: give");
  REQUIRE_FALSE(path_exists(corpus.dir / "deep"));

  std::filesystem::create_directories(corpus.dir / "disk");
  std::filesystem::create_directory_symlink(corpus.dir / "disk", corpus.dir / "mounted");
  corpus.job.paths.push_back(corpus.dir / "nowhere");
  refused("mounted/deep/er/c_train", "nowhere: No such file");
  refused("mounted/c_train", "nowhere: No such file");
  REQUIRE(names_in(corpus.dir / "disk").empty());
  REQUIRE(std::filesystem::is_symlink(corpus.dir / "mounted"));
}

TEST_CASE("--tokenize makes its folder again if another command removes it before there is a lock", "[tokenize]") {
  const TempDir dir;
  write(dir / "a.txt", "A document.");
  const ProgramResult r = run_program(
      "--tokenize " + (dir / "a.txt") + " --tokenizer bytes --out " + (dir / "out/c"),
      formatted("env LD_PRELOAD=build/file_ops.so FILE_OPS_ROOT={} FILE_OPS_FAIL_AT=c_train.lock FILE_OPS_ERRNO={}",
                dir.path(), ENOENT));
  INFO(r.out << r.err);
  REQUIRE(r.status == 0);
  REQUIRE(names_in(dir / "out").size() == 2);
}

TEST_CASE("without locks --tokenize warns, and goes on; any other fault of a lock is an error", "[tokenize]") {
  const TempDir dir;
  write(dir / "a.txt", "A document.");
  const auto with_fault = [&](int error) {
    return run_program(formatted("--tokenize {} --tokenizer bytes --out {} --restart", dir / "a.txt", dir / "out/c"),
                       formatted("env LD_PRELOAD=build/file_ops.so FILE_OPS_LOCK_ERRNO={}", error));
  };
  for (const int error : {ENOLCK, ENOSYS, EOPNOTSUPP, EINVAL}) {
    const ProgramResult r = with_fault(error);
    INFO(r.out << r.err);
    REQUIRE(r.status == 0);
    REQUIRE(r.out.find(formatted("WARNING: {} cannot be locked, on a file system without locks ({}): nothing keeps a "
                                 "second --tokenize from",
                                 dir / "out/c_train.lock", std::strerror(error))) != std::string::npos);
    REQUIRE_FALSE(path_exists(dir / "out/c_train.lock"));
  }
  for (const auto& [error, why] : {std::pair{EACCES, "another process is writing there"},
                                   std::pair{EWOULDBLOCK, "another process is writing there"},
                                   std::pair{EIO, "c_train.lock, or lock it: Input/output error: give"}}) {
    const ProgramResult r = with_fault(error);
    INFO(r.out << r.err);
    REQUIRE(r.status == 1);
    REQUIRE(r.err.find(why) != std::string::npos);
  }
}
